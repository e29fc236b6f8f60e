//! The loop of one job: looks at everything that may hold it back, then starts one part, and so on until nothing is left.

use super::limit::Backoff;
use super::{Cause, CopyOptions, Failure, OnError, Piece, Work};
use crate::events::Side;
use crate::job::{Job, Status};
use crate::queue::Cx;
use crate::report::{Action, Report};
use crate::request::{Buffers, Op};
use crate::rt::Instant;
use crate::sync::Arc;
use event_listener::EventListener;
use std::future::Future;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

/// Wait before something that failed is tried again; doubled up to [`RETRY_MAX`] while it goes on failing.
const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(1);
/// Smallest part that a low speed makes.
const SLOW_CHUNK: u64 = 64 << 10;

/// Copies everything `work` has to do. Ends with the failure that the job ends with, if any. Dropping the future stops starting parts; those in flight
/// are in the job's [`super::Flight`].
pub(in crate::job) async fn run(
    cx: &Cx,
    job: &Arc<Job>,
    work: Arc<dyn Work>,
    options: &CopyOptions,
) -> Result<(), Failure> {
    let mut state = Loop {
        cx,
        job,
        backoff: Backoff::new(options.latency_target_ns, options.max_workers, cx.now()),
        work,
        options,
        pass: Pass::default(),
        charged_guest: 0,
        retry: Retry::default(),
    };
    loop {
        // Listen first, then look: whatever happens from here on ends the wait.
        let wake = state.listen();
        match state.step().await? {
            Step::Again => {}
            Step::Wait { until, cause } => state.wait(wake, until, cause).await,
            Step::Done => return Ok(()),
        }
    }
}

struct Loop<'a> {
    cx: &'a Cx,
    job: &'a Arc<Job>,
    work: Arc<dyn Work>,
    options: &'a CopyOptions,
    backoff: Backoff,
    pass: Pass,
    /// Bytes copied for the guest that have been charged to the speed.
    charged_guest: u64,
    retry: Retry,
}

/// One walk over the source from its start to its end; they are repeated until one finds nothing.
#[derive(Default)]
struct Pass {
    /// Where to look for the next piece.
    at: u64,
    /// There was something left to be done.
    found: bool,
    /// Something was started.
    started: bool,
}

#[derive(Default)]
struct Retry {
    not_before: Option<Instant>,
    delay: Duration,
    /// Parts that had ended well at the last failure; more of them reset the delay.
    parts: u64,
}

enum Step {
    Again,
    Wait { until: Option<Instant>, cause: Option<Cause> },
    Done,
}

impl Step {
    const WAIT: Self = Step::Wait { until: None, cause: None };
}

impl Loop<'_> {
    fn listen(&self) -> Vec<EventListener> {
        let flight = self.job.flight.listen();
        let mut all = vec![self.job.control.listen(), flight, self.job.pool.listen()];
        all.extend(self.work.changed());
        all
    }

    async fn step(&mut self) -> Result<Step, Failure> {
        let now = self.cx.now();
        let parts = self.job.flight.parts();
        self.account(now, parts);
        if let Some(failure) = self.work.broken() {
            return Err(failure);
        }
        for failure in self.job.flight.take_failed() {
            self.failed(now, failure)?;
        }
        if let Some(step) = self.hold(now, parts) {
            return Ok(step);
        }
        if let Some(piece) = self.failed_piece() {
            self.start(piece, Buffers::new())?;
            return Ok(Step::Again);
        }
        let chunk = self.chunk();
        let Some(mut piece) = self.work.next(self.cx, self.pass.at, chunk).await else {
            return Ok(self.end_of_pass());
        };
        debug_assert!(piece.range.offset >= self.pass.at && piece.range.len > 0, "a pass goes forward");
        self.pass.found = true;
        match self.job.flight.first_overlap(piece.range) {
            Some(busy) if busy.offset <= piece.range.offset => {
                self.pass.at = busy.end();
                return Ok(Step::Again);
            }
            Some(busy) => piece.range.len = busy.offset - piece.range.offset,
            None => {}
        }
        let bufs = match piece.zero {
            true => Some(Buffers::new()),
            false => self.job.pool.try_take(piece.range.len),
        };
        let Some(bufs) = bufs else { return Ok(Step::Wait { until: None, cause: Some(Cause::Pool) }) };
        if !piece.zero {
            self.job.limiter.charge(piece.range.len);
        }
        self.pass.at = piece.range.end();
        self.pass.started = true;
        self.start(piece, bufs)?;
        Ok(Step::Again)
    }

    fn start(&self, piece: Piece, bufs: Buffers) -> Result<(), Failure> {
        let (env, class) = (self.cx.env(), self.job.priority().class());
        let started = self.job.flight.start(env, self.work.clone(), piece, bufs, class);
        started.map_err(|e| Failure { error: e.as_io(), side: Side::Host, op: Op::Read, range: piece.range })
    }

    /// A piece that failed before and that nobody is at.
    fn failed_piece(&self) -> Option<Piece> {
        let mut at = 0;
        loop {
            let piece = self.work.again(at)?;
            match self.job.flight.first_overlap(piece.range) {
                None => return Some(piece),
                Some(busy) => at = busy.end().max(piece.range.end()),
            }
        }
    }

    /// Progress, and what the limits are to know.
    fn account(&mut self, now: Instant, parts: usize) {
        self.job.progress.advance_to(now, self.work.done());
        self.job.limiter.set_busy(now, parts > 0);
        let guest = self.work.done_for_guest();
        self.job.limiter.charge_guest(guest.saturating_sub(self.charged_guest));
        self.charged_guest = self.charged_guest.max(guest);
    }

    /// What forbids to start a part now.
    fn hold(&mut self, now: Instant, parts: usize) -> Option<Step> {
        if self.job.control.view().pause {
            if parts == 0 {
                self.job.advance(Status::Paused);
            }
            return Some(Step::WAIT);
        }
        if self.job.status() == Status::Paused {
            self.job.advance(Status::Running);
            // Resumed: no reason to wait for what failed.
            self.retry.not_before = None;
        }
        if let Some(at) = self.retry.not_before {
            if now < at {
                return Some(Step::Wait { until: Some(at), cause: None });
            }
            self.retry.not_before = None;
        }
        if let Some((delay, cause)) = self.job.limiter.delay(now) {
            return Some(Step::Wait { until: Some(now.after(delay)), cause: Some(cause) });
        }
        let allowed = self.backoff.allowed(now, || self.work.guest_latency());
        if parts >= allowed {
            let cause = self.backoff.holds_back().then_some(Cause::Latency);
            return Some(Step::Wait { until: None, cause });
        }
        None
    }

    /// Nothing is left up to the end: look again from the start, wait for parts in flight, or be done.
    fn end_of_pass(&mut self) -> Step {
        let pass = std::mem::take(&mut self.pass);
        match (pass.found, pass.started) {
            (true, true) => Step::Again,
            // What was found is in flight.
            (true, false) => Step::WAIT,
            (false, _) if self.job.flight.is_quiet() => Step::Done,
            (false, _) => Step::WAIT,
        }
    }

    /// A slow job moves small parts, so that its speed is even and a change of it acts soon.
    fn chunk(&self) -> u64 {
        let speed = self.job.limiter.speed();
        if speed == 0 {
            return self.options.max_chunk;
        }
        (speed / 16).next_power_of_two().max(SLOW_CHUNK).min(self.options.max_chunk)
    }

    fn failed(&mut self, now: Instant, failure: Failure) -> Result<(), Failure> {
        let policy = match failure.side {
            Side::Source => self.options.on_source_error,
            Side::Host => OnError::Report,
            _ => self.options.on_target_error,
        };
        let full = failure.error.errno == libc::ENOSPC;
        let (retry, stop) = match policy {
            OnError::Report => (false, false),
            OnError::Ignore => (true, false),
            OnError::Stop => (true, true),
            OnError::Enospc => (full, full),
        };
        let action = if retry { Action::Retried } else { Action::None };
        self.job.log(failure, action);
        if !retry {
            return Err(failure);
        }
        if stop {
            self.job.control.stop();
        }
        let done = self.job.flight.totals().parts;
        let again = self.retry.parts == done && !self.retry.delay.is_zero();
        self.retry.parts = done;
        self.retry.delay = if again { (self.retry.delay * 2).min(RETRY_MAX) } else { RETRY_MIN };
        self.retry.not_before = Some(now.after(self.retry.delay));
        Ok(())
    }

    async fn wait(&self, wake: Vec<EventListener>, until: Option<Instant>, cause: Option<Cause>) {
        let began = self.cx.now();
        self.cx.until(until, any_of(wake)).await;
        if let Some(cause) = cause {
            self.job.limiter.add_lost(cause, self.cx.now().since(began));
        }
    }
}

impl Job {
    /// Puts a failure into the job's report.
    pub(in crate::job) fn log(&self, failure: Failure, action: Action) {
        let rt = &self.env.runtime;
        let report = Report::new(rt, failure.error, failure.side, failure.op, failure.range).action(action);
        self.errors.add(report);
    }
}

/// Ends when one of `listeners` is notified.
pub(in crate::job) fn any_of(mut listeners: Vec<EventListener>) -> impl Future<Output = ()> + Send {
    std::future::poll_fn(move |cx| {
        let ready = listeners.iter_mut().any(|l| Pin::new(l).poll(cx).is_ready());
        if ready { Poll::Ready(()) } else { Poll::Pending }
    })
}
