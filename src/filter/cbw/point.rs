//! The instant: everything the parts of the filter share.

use super::fence::Fence;
use super::geometry::Geometry;
use super::options::{CbwOptions, Live, LossScope, OnCbwError};
use super::policy::{Failure, Verdict, decide};
use super::readahead::Detector;
use super::state::{Granules, HELD, State, StateSet, States};
use super::stats::Counters;
use super::transit::Transits;
use crate::error::{Code, IoError, IoResult};
use crate::events::{Event, EventKind};
use crate::node::Edge;
use crate::queue::{Cancel, Cx, Env};
use crate::report::{Action, ErrorLog, LostList, LostRange, Report};
use crate::request::Op;
use crate::rt::Instant;
use crate::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Arc, Mutex};
use event_listener::EventListener;
use std::future::Future;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

/// One instant of one disk.
#[derive(Debug)]
pub(super) struct Point {
    pub(super) env: Arc<Env>,
    pub(super) name: String,
    pub(super) file: Edge,
    pub(super) target: Edge,
    pub(super) live: Live,
    /// The disk at the instant; growth is not part of the snapshot (S36).
    pub(super) geo: Geometry,
    pub(super) states: States,
    pub(super) fence: Fence,
    pub(super) transits: Transits,
    /// Whether the target read as zeros at the instant, so that zeros need not be written to it.
    pub(super) target_is_zero: bool,
    /// The snapshot is over or broken: every request passes, copying has stopped.
    passive: AtomicBool,
    /// Set with it: copies that nobody waits for any more leave the queues of the source and of the target.
    pub(super) cancel: Arc<Cancel>,
    broken: Mutex<Option<Report>>,
    pub(super) errors: ErrorLog,
    pub(super) lost: LostList,
    /// Notified when the snapshot breaks or ends, or a range is lost.
    pub(super) changed: event_listener::Event,
    pub(super) counters: Counters,
    /// Bytes of granules that need no copy any more.
    settled_bytes: AtomicU64,
    pub(super) readahead: Detector,
    /// Copies under way, whoever waits for them.
    running: AtomicUsize,
    idle: event_listener::Event,
}

/// How a wait ended.
pub(super) enum Waited<T> {
    /// What was waited for.
    Done(T),
    /// There is nothing to wait for any more: look again.
    Over,
    /// The guest's limit was reached.
    Expired,
}

impl Point {
    pub(super) fn new(
        env: Arc<Env>,
        name: String,
        file: Edge,
        target: Edge,
        options: &CbwOptions,
        geo: Geometry,
    ) -> Arc<Self> {
        let target_is_zero = target.get().limits().zero_init;
        Arc::new(Self {
            env,
            name,
            file,
            target,
            live: Live::new(options),
            states: States::new(geo.count()),
            fence: Fence::new(geo.granule_log2()),
            geo,
            transits: Transits::default(),
            target_is_zero,
            passive: AtomicBool::new(false),
            cancel: Arc::default(),
            broken: Mutex::default(),
            errors: ErrorLog::default(),
            lost: LostList::default(),
            changed: event_listener::Event::new(),
            counters: Counters::default(),
            settled_bytes: AtomicU64::new(0),
            readahead: Detector::default(),
            running: AtomicUsize::new(0),
            idle: event_listener::Event::new(),
        })
    }

    pub(super) fn is_passive(&self) -> bool {
        // Acquire: partner of the Release in `stop`.
        self.passive.load(Ordering::Acquire)
    }

    pub(super) fn settled_bytes(&self) -> u64 {
        self.settled_bytes.load(Ordering::Relaxed)
    }

    /// Moves a granule out of a state of `from`; counts its bytes when it leaves NEEDED and READING for good.
    pub(super) fn change(&self, granule: u64, from: StateSet, to: State) -> bool {
        let Some(was) = self.states.change(granule, from, to) else { return false };
        if HELD.has(was) && !HELD.has(to) {
            self.settled_bytes.fetch_add(self.geo.bytes(&(granule..granule + 1)).len, Ordering::Relaxed);
        }
        true
    }

    /// Waits for `future` until the deadline, or until `over` holds, which is looked at whenever the snapshot or a part of it is given up. A cancelled
    /// request leaves the wait with ECANCELED. Nothing but `future` is touched if that is ready at once.
    pub(super) async fn wait<F: Future>(
        &self,
        cx: &Cx,
        deadline: Option<Instant>,
        over: impl Fn() -> bool,
        future: F,
    ) -> IoResult<Waited<F::Output>> {
        let mut future = std::pin::pin!(future);
        let mut listener: Option<EventListener> = None;
        let either = std::future::poll_fn(|context| {
            if let Poll::Ready(value) = future.as_mut().poll(context) {
                return Poll::Ready(Waited::Done(value));
            }
            loop {
                if let Some(l) = &mut listener
                    && Pin::new(l).poll(context).is_pending()
                {
                    return Poll::Pending;
                }
                // Listen first, then look: a change in between notifies the listener.
                listener = Some(self.changed.listen());
                if over() {
                    return Poll::Ready(Waited::Over);
                }
            }
        });
        Ok(cx.cancellable(cx.until(deadline, either)).await?.unwrap_or(Waited::Expired))
    }

    /// [`Point::wait`] for the work of others, which may be on queues that nobody drives.
    pub(super) async fn wait_for_others<F: Future>(
        &self,
        cx: &Cx,
        deadline: Option<Instant>,
        over: impl Fn() -> bool,
        future: F,
    ) -> IoResult<Waited<F::Output>> {
        let guard = cx.wait_guard();
        let waited = self.wait(cx, deadline, over, future).await;
        drop(guard);
        waited
    }

    /// Whether nobody copies any granule of `run` any more, or the snapshot is over.
    pub(super) fn is_settled(&self, run: &Granules) -> bool {
        self.is_passive() || run.clone().all(|g| !HELD.has(self.states.get(g).state()))
    }

    /// What `failure` means for the granules of `run` that are still held, carried out except for the guest's own error, which is
    /// returned. `held`: see [`decide`].
    pub(super) fn fail(
        &self,
        failure: Failure,
        held: bool,
        op: Op,
        run: &Granules,
        error: IoError,
    ) -> IoResult {
        let break_guest_write = self.live.on_error() == OnCbwError::BreakGuestWrite;
        let lose_range = self.live.loss_scope() == LossScope::Range;
        let report = self.report(failure, op, run, error);
        match decide(failure, held, break_guest_write, lose_range) {
            Verdict::FailGuest => {
                self.errors.add(report.action(Action::GuestWriteFailed));
                let code = if failure == Failure::Timeout { Code::CbwTimeout } else { Code::CbwFailed };
                return Err(IoError::new(libc::EIO, code));
            }
            Verdict::LoseRange => self.lose(run, HELD, report),
            Verdict::BreakSnapshot => self.break_snapshot(report),
        }
        Ok(())
    }

    fn report(&self, failure: Failure, op: Op, run: &Granules, error: IoError) -> Report {
        let error = IoError::new(error.errno, failure.code());
        Report::new(&self.env.runtime, error, failure.side(), op, self.geo.bytes(run))
            .on_node(self.name.clone())
    }

    /// Gives up those granules of a run that are in one of `from`, and lets guests pass (S50). Snapshot reads that were directed at the source look again
    /// when their read has ended (S34).
    pub(super) fn lose(&self, run: &Granules, from: StateSet, report: Report) {
        let gone: Vec<u64> = run.clone().filter(|g| self.change(*g, from, State::Lost)).collect();
        if gone.is_empty() {
            return;
        }
        let report = self.errors.add(report.action(Action::RangeLost));
        for g in gone {
            let range = self.geo.bytes(&(g..g + 1));
            self.lost.add(LostRange { range, error: report.error, real_ns: report.real_ns });
            // Only now: a reader that meets LOST finds the cause.
            self.states.mark_clear(g);
        }
        self.changed.notify(usize::MAX);
        self.post(EventKind::RangeLost, &report);
    }

    /// Breaks the snapshot: copying stops, everybody is let go (S29). The first report stays.
    pub(super) fn break_snapshot(&self, report: Report) {
        {
            let mut broken = self.broken.lock();
            if broken.is_some() || self.is_passive() {
                return;
            }
            *broken = Some(self.errors.add(report.action(Action::SnapshotBroken)));
        }
        self.stop();
        if let Some(report) = self.broken() {
            self.post(EventKind::CbwBroken, &report);
        }
        self.target.node().abandon();
    }

    /// Ends copying without an error: the job is over.
    pub(super) fn stop(&self) {
        self.passive.store(true, Ordering::Release);
        self.cancel.cancel();
        self.transits.clear();
        self.changed.notify(usize::MAX);
    }

    pub(super) fn broken(&self) -> Option<Report> {
        self.broken.lock().clone()
    }

    /// What a reader of a snapshot that is over is told: the cause, if there is one.
    pub(super) fn over_error(&self) -> IoError {
        let errno = self.broken().map_or(libc::ESHUTDOWN, |r| r.error.errno);
        IoError::new(errno, Code::SnapshotBroken)
    }

    /// Counts a copy for as long as the guard lives.
    pub(super) fn copying(self: &Arc<Self>) -> Copying {
        self.running.fetch_add(1, Ordering::AcqRel);
        Copying(self.clone())
    }

    /// Waits until no copy is under way, at most for `limit`; whether that was so.
    pub(super) async fn quiet(&self, cx: &Cx, limit: Option<Duration>) -> bool {
        let guard = cx.wait_guard();
        let quiet = async {
            loop {
                let listener = self.idle.listen();
                if self.running.load(Ordering::Acquire) == 0 {
                    return;
                }
                listener.await;
            }
        };
        let done = cx.until(limit.map(|l| cx.now().after(l)), quiet).await.is_some();
        drop(guard);
        done
    }

    fn post(&self, kind: EventKind, r: &Report) {
        self.env.events.post(Event {
            time_ns: r.mono_ns,
            offset: r.offset,
            len: r.len,
            errno: r.error.errno,
            code: r.error.code,
            side: r.side,
            ..Event::new(kind, self.name.clone())
        });
    }
}

/// A copy under way; see [`Point::copying`].
#[derive(Debug)]
pub(super) struct Copying(Arc<Point>);

impl Drop for Copying {
    fn drop(&mut self) {
        if self.0.running.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.idle.notify(usize::MAX);
        }
    }
}
