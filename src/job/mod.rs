//! Jobs: work that goes on in the background for as long as it takes, under a name (C21).
//!
//! A [`Job`] belongs to the context, not to a handle (S58): it is found by its id until it has been dismissed, and dropping a handle changes nothing.
//! Its states are QEMU's ([`Status`]); each change is an event. What a type of job does is a [`Body`]; everything that is the
//! same for all types is here and in `run.rs`: the life cycle, pause, cancel, limits, progress, the report.
//!
//! Guarantees
//! - The control calls (query, pause, resume, cancel, speed, priority) never block (C25). `start`, `wait` and the calls of a group may.
//! - Exactly one outcome. A cancel that comes before the job's point of no return wins, a later one is refused (S35).
//! - A cancelled job concludes within [`CANCEL_MAX`] whatever its target does: who waits for it in the guest is released by the call itself, what
//!   is still in flight keeps its memory and is left to end by itself.
//! - Whatever a job changed for its own time is undone when it ends, however it ends (S61).
//! - A panic in a job's task ends the job with `panicked`; the guest goes on (C17).
//!
//! Threads: the task of a job and the parts it copies run on the workers of the context. Locks: [`control::Control`], the group's lock before
//! it; both are held for a few instructions.
//!
//! Start reading at `run.rs` (the life of a job), then `backup/mod.rs` and `copy/engine.rs`.

mod backup;
mod control;
pub mod copy;
mod group;
mod mirror;
mod registry;
mod report;
mod run;
pub(crate) mod stats;
mod status;
mod target;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use copy::{Lost, Priority};
pub use group::{CompletionMode, Group};
pub use registry::{Jobs, has_kind};
pub use status::Status;

use crate::error::{Code, Error, IoError, IoResult, Result};
use crate::events::{Event, EventKind};
use crate::node::{NodeFuture, Vertex};
use crate::queue::{Cx, Env};
use crate::report::{ErrorLog, LostRange, Report};
use crate::stats::{HistSnapshot, Stats};
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::sync::{Arc, Weak};
use control::Control;
use copy::{Flight, Limiter, PoolShare, Progress};
use once_cell::sync::OnceCell;
use std::fmt::{self, Debug};
use std::time::Duration;

/// A cancelled job concludes within this time.
pub const CANCEL_MAX: Duration = Duration::from_millis(800);

/// A job. Any thread.
pub struct Job {
    id: String,
    kind: &'static str,
    env: Arc<Env>,
    control: Control,
    priority: AtomicU32,
    auto_finalize: bool,
    auto_dismiss: bool,
    /// No workers: whoever waits drives the context.
    host_driven: bool,
    errors: ErrorLog,
    progress: Progress,
    limiter: Limiter,
    flight: Arc<Flight>,
    pool: PoolShare,
    body: Box<dyn Body>,
    group: OnceCell<Arc<group::Together>>,
    registry: Weak<Jobs>,
}

/// A look at a job; the numbers are those of the C ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobInfo {
    /// Where it is in its life.
    pub state: Status,
    /// Bytes done; never goes back.
    pub current: u64,
    /// Bytes in all.
    pub total: u64,
    /// Limit in bytes per second; 0 is none.
    pub speed: u64,
    /// Its priority.
    pub prio: Priority,
    /// Whether a pause was asked for.
    pub paused: bool,
    /// Positive errno of a job that has failed, else 0.
    pub err: i32,
    /// Finer than errno.
    pub code: Code,
}

/// What a type of job does.
///
/// Order of calls: `places` and `insert` when it starts (all jobs of a group in one drained section), `run` once, then `finish` after a success or
/// `abort` after anything else. `release` may come at any time, from any thread, more than once.
trait Body: Send + Sync + Debug {
    /// Where in the graph `insert` changes something.
    fn places(&self) -> Vec<Arc<Vertex>> {
        Vec::new()
    }

    /// Opens what goes into the graph. Before the drained section; may block.
    fn prepare(&self) -> Result<()> {
        Ok(())
    }

    /// Whether the graph is still what `prepare` saw. In the drained section; must not block.
    fn is_current(&self) -> bool {
        true
    }

    /// Changes the graph. In the drained section; must not block and cannot fail.
    fn insert(&self) {}

    /// Undoes `prepare`; nothing has been inserted. May block.
    fn unprepare(&self) {}

    /// The job will never be started: gives back what was claimed when it was made.
    fn give_up(&self) {}

    /// Does the job up to the point of no return. Dropped when the job is cancelled.
    fn run<'a>(&'a self, cx: &'a Cx, job: &'a Arc<Job>) -> NodeFuture<'a, IoResult>;

    /// Lets go of everything that waits for this job in the guest (S35); the job is not going to succeed. Must not block.
    fn release(&self, cause: IoError);

    /// Puts everything in order after a success. An error makes the job fail after all.
    fn finish<'a>(&'a self, cx: &'a Cx, job: &'a Arc<Job>) -> NodeFuture<'a, IoResult>;

    /// The job is about to conclude: its target is no longer its own, though something may be in flight there ([`target`]).
    fn concluding(&self) {}

    /// Undoes what the job changed. Runs to its end even if the job has concluded meanwhile.
    fn abort<'a>(&'a self, cx: &'a Cx, job: &'a Arc<Job>) -> NodeFuture<'a, ()>;

    /// Bytes dealt with so far.
    fn done(&self) -> u64;

    /// The report of what broke the job, if it is known better than by the job's own log.
    fn cause(&self) -> Option<Report> {
        None
    }

    /// What was lost.
    fn lost(&self) -> Vec<LostRange> {
        Vec::new()
    }

    /// Counters.
    fn stats(&self) -> Stats {
        Stats::default()
    }

    /// A histogram.
    fn hist(&self, which: &str) -> Option<HistSnapshot> {
        let _ = which;
        None
    }

    /// Fields of its own for `query-cobweb-stats`.
    fn describe(&self, into: &mut serde_json::Map<String, serde_json::Value>) {
        let _ = into;
    }
}

impl Job {
    /// The id, unique among the jobs of the context.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// `backup`, `copy`, ...
    pub fn kind(&self) -> &'static str {
        self.kind
    }

    /// Whether the job concludes without [`Job::finalize`].
    pub fn auto_finalize(&self) -> bool {
        self.auto_finalize
    }

    /// Whether the job is forgotten without [`Job::dismiss`].
    pub fn auto_dismiss(&self) -> bool {
        self.auto_dismiss
    }

    /// Where the job is in its life.
    pub fn status(&self) -> Status {
        self.control.view().status
    }

    /// State and progress.
    pub fn query(&self) -> JobInfo {
        let view = self.control.view();
        if !view.status.has_ended() {
            self.progress.advance_to(self.env.runtime.clock.now(), self.body.done());
        }
        let (current, total) = self.progress.get();
        let error = view.outcome.and_then(IoResult::err);
        JobInfo {
            state: view.status,
            current,
            total,
            speed: self.limiter.speed(),
            prio: self.priority(),
            paused: view.pause,
            err: error.map_or(0, |e| e.errno),
            code: error.map_or(Code::None, |e| e.code),
        }
    }

    /// The outcome, once the job has concluded.
    pub fn outcome(&self) -> Option<IoResult> {
        self.control.view().outcome
    }

    /// Starts no more parts; those in flight end, then the state becomes `paused` (S57). Copies for the guest go on.
    pub fn pause(&self) -> Result<()> {
        self.control.set_pause(&self.id, true)
    }

    /// Ends a pause, also one by error policy `stop`.
    pub fn resume(&self) -> Result<()> {
        self.control.set_pause(&self.id, false)
    }

    /// Ends the job without success, within [`CANCEL_MAX`] (S35). Refused once the job is past its point of no return.
    pub fn cancel(&self) -> Result<()> {
        match self.group.get() {
            Some(group) => group.cancel(self)?,
            None => self.control.cancel(&self.id)?,
        }
        self.body.release(IoError::cancelled());
        Ok(())
    }

    /// With `auto-finalize=off`: lets a job in state `pending` conclude.
    pub fn finalize(&self) -> Result<()> {
        self.control.finalize(&self.id)?;
        if let Some(group) = self.group.get() {
            group.finalize();
        }
        Ok(())
    }

    /// With `auto-dismiss=off`: forgets a concluded job.
    pub fn dismiss(&self) -> Result<()> {
        let error = self.outcome().and_then(IoResult::err);
        let jobs = self.registry.upgrade();
        self.control.dismiss(&self.id, || {
            jobs.iter().for_each(|j| j.forget(&self.id));
            self.post(Status::Null, error);
        })
    }

    /// Limits background copies to so many bytes per second; 0 lifts the limit. Acts at once.
    pub fn set_speed(&self, bytes_per_s: u64) -> Result<()> {
        if bytes_per_s > crate::rate::RATE_MAX {
            return Err(Error::invalid(format!("speed {bytes_per_s} is above {}", crate::rate::RATE_MAX)));
        }
        self.limiter.set_speed(self.env.runtime.clock.now(), bytes_per_s);
        self.control.notify();
        Ok(())
    }

    /// The priority of the parts that start from now on.
    pub fn set_priority(&self, priority: Priority) {
        self.priority.store(priority as u32, Ordering::Relaxed);
    }

    /// The priority.
    pub fn priority(&self) -> Priority {
        Priority::from_number(self.priority.load(Ordering::Relaxed)).unwrap_or_default()
    }

    /// Waits until the job has concluded, at most `timeout`; returns whether it has. Blocks; refused (EDEADLK) where that would deadlock. Without worker
    /// threads the caller drives the context's work meanwhile.
    pub fn wait(self: &Arc<Self>, timeout: Option<Duration>) -> Result<bool> {
        let deadline = timeout.map(|t| self.env.runtime.clock.now().after(t));
        if !self.host_driven {
            let job = self.clone();
            return self.env.block_on(|cx| async move { cx.until(deadline, job.ended()).await.is_some() });
        }
        while !self.status().has_ended() {
            let left = deadline.map(|at| at.since(self.env.runtime.clock.now()));
            if left.is_some_and(|l| l.is_zero()) {
                return Ok(false);
            }
            self.env.run_once(left)?;
        }
        Ok(true)
    }

    /// Ends when the job has concluded.
    pub async fn ended(&self) {
        loop {
            let listener = self.control.listen();
            if self.status().has_ended() {
                return;
            }
            listener.await;
        }
    }

    /// Moves to the next state and tells the host.
    fn advance(&self, next: Status) -> bool {
        self.control.advance(next, || self.post(next, None))
    }

    /// Called with the lock of `control` held.
    fn post(&self, status: Status, error: Option<IoError>) {
        let (current, total) = self.progress.get();
        self.env.events.post(Event {
            value: status as u64,
            time_ns: self.env.runtime.clock.now().0,
            offset: current,
            len: total,
            errno: error.map_or(0, |e| e.errno),
            code: error.map_or(Code::None, |e| e.code),
            ..Event::new(EventKind::Job, &self.id)
        });
    }
}

impl Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job")
            .field("id", &self.id)
            .field("kind", &self.kind)
            .field("state", &self.control)
            .finish()
    }
}
