//! Job type `backup`: a disk as it was at one instant, onto a target, while the guest goes on.
//!
//! What the job puts into the graph, and takes out again however it ends (S61):
//!
//! ```text
//!   disk -> [copy-before-write] -> source          [copy-before-write] -> [ram-cache, if asked for] -> target
//! ```
//!
//! From its start on the filter saves what the guest is about to overwrite; the job copies the rest ([`super::copy`]). Success means (S22): no
//! granule is missing, the cache is empty, the target is flushed, and nothing had broken after that flush. Only then the mark on the
//! target goes ([`mark`], S25). Errors of the target never reach the guest under the filter's default policy.
//!
//! Order at the start: open and check everything, mark the target, then one drained section for the filters of all disks of a group (S1). At
//! the end: let go of whoever waits, take the filter out in a drained section that waits for I/O of the guest only (S3), and only then
//! wait for what is in flight to the target. A job that comes to the same target before that has ended writes after it ([`super::target`]).
//!
//! Not guaranteed: a job of type `sync=none` never ends by itself and has no success; it serves readers of the snapshot, and is cancelled.
//!
//! Start reading at `options.rs`, then here, then `work.rs`.

mod mark;
mod options;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod thread_tests;
mod work;

use super::copy::{self, Failure, OnError, Work, any_of};
use super::mirror::check_target;
use super::registry::{Jobs, Made};
use super::target::Claim;
use super::{Body, Job};
use crate::error::{Code, Error, IoError, IoResult, Result};
use crate::events::Side;
use crate::graph::Graph;
use crate::node::{NodeFuture, Vertex};
use crate::options::Options;
use crate::queue::Cx;
use crate::report::{Action, LostRange, Report};
use crate::request::{Class, Op, Request};
use crate::stats::{HistSnapshot, Stats, WAITS};
use crate::sync::{Arc, Mutex};
use crate::units::ByteRange;
use mark::Mark;
use options::{BackupOptions, Sync};
use serde_json::{Map, Value};
use std::time::Duration;
use work::Setup;

/// Wait before bringing the cache down is tried again, with an error policy that says so.
const SETTLE_AGAIN: Duration = Duration::from_millis(500);

/// One backup.
#[derive(Debug)]
struct Backup {
    graph: Arc<Graph>,
    place: Arc<Vertex>,
    target: Arc<Vertex>,
    size: u64,
    options: BackupOptions,
    claim: Mutex<Option<Claim>>,
    /// What is in the graph; gone when the job has ended.
    setup: Mutex<Option<Arc<Setup>>>,
    /// What the filter and the cache knew at the end.
    last: Mutex<Last>,
}

#[derive(Debug, Default)]
struct Last {
    done: u64,
    stats: Stats,
    waits: Vec<(&'static str, HistSnapshot)>,
    cause: Option<Report>,
    lost: Vec<LostRange>,
}

/// Makes the body of a `backup` job; nothing is changed yet.
pub(super) fn make(jobs: &Arc<Jobs>, options: &mut Options) -> Result<Made> {
    let options = BackupOptions::take(options)?;
    let graph = jobs.graph().clone();
    let place = graph.place(&options.device)?;
    let target = graph.node(&options.target)?;
    check_target(jobs, &place, &target)?;
    let size = place.top().limits().size;
    let room = target.top().limits().size;
    if room != size {
        let text =
            format!("option 'target': it has {room} bytes, and the source has {size}; they must be equal");
        return Err(Error::invalid(text));
    }
    let default_id = graph.disk(&options.device).ok().map(|d| d.name().to_owned());
    let claim = Mutex::new(Some(jobs.claim(&target)?));
    let body = Backup {
        graph,
        place,
        target,
        size,
        options,
        claim,
        setup: Mutex::default(),
        last: Mutex::default(),
    };
    Ok(Made { body: Box::new(body), default_id, total: size })
}

impl Body for Backup {
    fn places(&self) -> Vec<Arc<Vertex>> {
        vec![self.place.clone()]
    }

    fn prepare(&self) -> Result<()> {
        // From the target up; what has been opened when something cannot be is closed again.
        let mut below: Vec<Arc<Vertex>> = Vec::new();
        let opened = self.open_all(&mut below);
        let (filter, cache) = match opened {
            Ok(opened) => opened,
            Err(e) => {
                below.iter().rev().for_each(|node| self.forget(node));
                return Err(e);
            }
        };
        let mark = Mark::set(self.graph.env(), &self.target);
        let setup = Setup::new(self.place.clone(), filter, cache, below, mark, self.size);
        *self.setup.lock() = Some(Arc::new(setup));
        Ok(())
    }

    fn is_current(&self) -> bool {
        let Some(setup) = self.setup() else { return false };
        let top = self.place.top_node();
        let below = setup.filter.base().children().into_iter().find(|(key, _)| *key == "file");
        top.limits().size == self.size && below.is_some_and(|(_, edge)| Arc::ptr_eq(&edge.node(), &top))
    }

    fn insert(&self) {
        if let Some(setup) = self.setup() {
            setup.take_over_losses(&self.graph.env().runtime);
            self.place.push_filter(setup.filter.clone());
        }
    }

    fn unprepare(&self) {
        let Some(setup) = self.setup.lock().take() else { return };
        self.forget(&setup.filter);
        self.forget_below(&setup);
        if let Some(mark) = &setup.mark {
            mark.restore();
        }
    }

    fn give_up(&self) {
        self.let_go();
    }

    fn run<'a>(&'a self, cx: &'a Cx, job: &'a Arc<Job>) -> NodeFuture<'a, IoResult> {
        Box::pin(async move {
            let setup = self.setup().ok_or(IoError::invalid())?;
            let copied = match self.options.sync {
                Sync::None => setup.until_broken(job).await,
                Sync::Top => {
                    setup.release_below_top(cx).await;
                    copy::run(cx, job, setup.clone(), &self.options.copy).await
                }
                Sync::Full => copy::run(cx, job, setup.clone(), &self.options.copy).await,
            };
            match copied {
                Ok(()) => self.complete(cx, job, &setup).await,
                Err(failure) => Err(failure),
            }
            .map_err(|failure| failure.error)
        })
    }

    fn release(&self, _cause: IoError) {
        if let Some(setup) = self.setup() {
            setup.cbw().end();
            setup.abandon_cache();
        }
    }

    fn finish<'a>(&'a self, cx: &'a Cx, job: &'a Arc<Job>) -> NodeFuture<'a, IoResult> {
        Box::pin(async move {
            let Some(setup) = self.setup() else { return Ok(()) };
            self.keep(&setup);
            // Everything is on the target: there is nothing left to settle, so this waits for the guest's own I/O only.
            if self.graph.filter_del_on(cx, &self.place, &setup.filter).await.is_err() {
                // Removed by somebody else after the job had done its work, which harms nothing now.
                self.graph.env().log(
                    1,
                    "backup",
                    &format!("job '{}': its filter was gone already", job.id()),
                );
            }
            setup.leave_losses();
            self.forget_below(&setup);
            if setup.mark.is_some() {
                let theirs = setup.clone();
                let removed = cx.blocking(move || theirs.mark.as_ref().map_or(Ok(()), Mark::remove)).await?;
                removed.map_err(|e| {
                    let range = ByteRange { offset: 0, len: self.size };
                    let error = IoError::from(e);
                    job.log(Failure { error, side: Side::Target, op: Op::Write, range }, Action::None);
                    error
                })?;
            }
            self.let_go();
            Ok(())
        })
    }

    fn concluding(&self) {
        if let Some(claim) = &*self.claim.lock() {
            claim.conclude();
        }
    }

    fn abort<'a>(&'a self, cx: &'a Cx, job: &'a Arc<Job>) -> NodeFuture<'a, ()> {
        Box::pin(async move {
            if let Some(setup) = self.setup() {
                setup.cbw().end();
                // Before the drain: a guest request may wait in the cache.
                setup.abandon_cache();
                self.keep(&setup);
                self.graph.filter_drop_on(cx, &self.place, &setup.filter).await;
                setup.leave_losses();
                self.forget_below(&setup);
                job.flight.wait_empty().await;
                setup.wait_quiet(cx).await;
            }
            self.let_go();
        })
    }

    fn done(&self) -> u64 {
        match self.setup() {
            Some(setup) => setup.done(),
            None => self.last.lock().done,
        }
    }

    fn cause(&self) -> Option<Report> {
        match self.setup() {
            Some(setup) => setup.cbw().broken(),
            None => self.last.lock().cause.clone(),
        }
    }

    fn lost(&self) -> Vec<LostRange> {
        match self.setup() {
            Some(setup) => setup.cbw().lost(),
            None => self.last.lock().lost.clone(),
        }
    }

    fn stats(&self) -> Stats {
        match self.setup() {
            Some(setup) => setup.stats(),
            None => self.last.lock().stats,
        }
    }

    fn hist(&self, which: &str) -> Option<HistSnapshot> {
        match self.setup() {
            Some(setup) => setup.filter.base().hist(which),
            None => {
                let last = self.last.lock();
                last.waits.iter().find(|(name, _)| *name == which).map(|(_, hist)| hist.clone())
            }
        }
    }

    fn describe(&self, into: &mut Map<String, Value>) {
        into.insert("device".into(), self.options.device.clone().into());
        into.insert("target".into(), self.target.name().into());
        if let Some(setup) = self.setup() {
            into.insert("filter-node-name".into(), setup.filter.name().into());
            into.insert("cache-node-name".into(), setup.cache.as_ref().map(|c| c.name()).into());
            into.insert("bytes-for-guest".into(), setup.done_for_guest().into());
        }
    }
}

impl Backup {
    /// Opens what stands between the source and the target and returns the filter and the cache. `below`: what is below the filter, lowest first.
    fn open_all(&self, below: &mut Vec<Arc<Vertex>>) -> Result<(Arc<Vertex>, Option<Arc<Vertex>>)> {
        let gate = self.claim.lock().as_ref().and_then(|claim| claim.gate(&self.target));
        if let Some(gate) = gate {
            let text = format!("target '{}': a former job has writes in flight there", self.target.name());
            self.graph.env().log(2, "backup", &text);
            below.push(self.graph.add_node("", gate)?);
        }
        let name = |below: &Vec<Arc<Vertex>>| below.last().unwrap_or(&self.target).name().to_owned();
        if self.options.compress {
            let mut options = Options::empty();
            options.set("driver", "compress");
            options.set("file", name(below));
            below.push(self.graph.open(options)?);
        }
        let mut cache = None;
        if let Some(options) = &self.options.cache {
            let mut options = options.clone();
            options.set("file", name(below));
            cache = Some(self.graph.open(options)?);
            below.extend(cache.clone());
        }
        let mut filter = self.options.filter.clone();
        filter.set("target", name(below));
        Ok((self.graph.filter_open(&self.place, filter)?, cache))
    }

    fn setup(&self) -> Option<Arc<Setup>> {
        self.setup.lock().clone()
    }

    fn forget(&self, node: &Arc<Vertex>) {
        // If somebody has built on it, it lives until they let go.
        self.graph.forget_unused(node);
    }

    /// What was opened below the filter.
    fn forget_below(&self, setup: &Setup) {
        setup.below.iter().rev().for_each(|node| self.forget(node));
    }

    /// Keeps what can be asked about after the end.
    fn keep(&self, setup: &Arc<Setup>) {
        let filter = setup.filter.base();
        let waits = WAITS.into_iter().filter_map(|which| Some((which, filter.hist(which)?))).collect();
        *self.last.lock() = Last {
            done: setup.done(),
            stats: setup.stats(),
            waits,
            cause: setup.cbw().broken(),
            lost: setup.cbw().lost(),
        };
    }

    /// The job holds nothing any more.
    fn let_go(&self) {
        let setup = self.setup.lock().take();
        drop(setup);
        drop(self.claim.lock().take());
    }

    /// Everything has been copied: brings the cache down, flushes the target and looks again (S22).
    async fn complete(
        &self,
        cx: &Cx,
        job: &Arc<Job>,
        setup: &Arc<Setup>,
    ) -> std::result::Result<(), Failure> {
        let whole = ByteRange { offset: 0, len: self.size };
        while let Err(error) = setup.settle(cx).await {
            setup.check()?;
            let failure = Failure { error, side: Side::Target, op: Op::Write, range: whole };
            self.settle_failed(cx, job, failure).await?;
        }
        let target = self.target.top_node();
        let flushed = cx.run(&*target, Request::flush().class(Class::Background)).await;
        if let Err(error) = flushed {
            // What a device lost in a failed flush cannot be told: no policy helps.
            let failure = Failure { error, side: Side::Target, op: Op::Flush, range: whole };
            job.log(failure, Action::None);
            return Err(failure);
        }
        setup.check()?;
        setup.check_complete()
    }

    /// The error policy of the target for what the cache could not bring down: returns if it is to be tried again.
    async fn settle_failed(
        &self,
        cx: &Cx,
        job: &Arc<Job>,
        failure: Failure,
    ) -> std::result::Result<(), Failure> {
        let full = failure.error.errno == libc::ENOSPC;
        let stop = match self.options.copy.on_target_error {
            OnError::Ignore => false,
            OnError::Stop => true,
            OnError::Enospc if full => true,
            OnError::Enospc | OnError::Report => {
                job.log(failure, Action::None);
                return Err(failure);
            }
        };
        job.log(failure, Action::Retried);
        if stop {
            job.control.stop();
            // Cancelled meanwhile: this future is dropped, so the end of the pause need not be told from it.
            let _ = super::run::wait_resumed(job).await;
        } else {
            cx.sleep_until(cx.now().after(SETTLE_AGAIN)).await;
        }
        Ok(())
    }
}

impl Setup {
    /// For `sync=none`: ends when the snapshot has broken; the job ends by being cancelled.
    async fn until_broken(&self, job: &Arc<Job>) -> std::result::Result<(), Failure> {
        loop {
            let changed: Vec<_> = self.changed().into_iter().chain([job.control.listen()]).collect();
            self.check()?;
            if job.control.view().pause {
                job.advance(super::Status::Paused);
            } else if job.status() == super::Status::Paused {
                job.advance(super::Status::Running);
            }
            any_of(changed).await;
        }
    }
}

/// The failure of a snapshot that has broken.
fn broken(report: &Report) -> Failure {
    let range = ByteRange { offset: report.offset, len: report.len };
    Failure { error: report.error, side: report.side, op: report.op, range }
}

/// The failure of a backup that lacks `range` for a reason that has been reported elsewhere, or for none that is known.
fn incomplete(range: ByteRange, code: Code) -> Failure {
    Failure { error: IoError::new(libc::EIO, code), side: Side::Host, op: Op::Read, range }
}
