//! The instant: everything the parts of the filter share.

use super::fence::Fence;
use super::options::Config;
use super::policy::{Failure, Verdict, decide};
use super::readahead::Detector;
use super::state::{State, States};
use super::stats::Counters;
use crate::error::{Code, IoError, IoResult};
use crate::events::{Event, EventKind};
use crate::node::Edge;
use crate::queue::{Cx, Env};
use crate::report::{Action, ErrorLog, LostList, LostRange, Report};
use crate::request::{Buffers, Op};
use crate::rt::Instant;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Arc, Mutex};
use crate::units::{ByteRange, align_down};
use std::collections::BTreeMap;
use std::future::Future;
use std::ops::Range;

/// One instant of one disk.
#[derive(Debug)]
pub(super) struct Point {
    pub(super) env: Arc<Env>,
    pub(super) name: String,
    pub(super) file: Edge,
    pub(super) target: Edge,
    pub(super) config: Config,
    /// Length of the disk at the instant; growth is not part of the snapshot (S36).
    pub(super) size: u64,
    pub(super) states: States,
    pub(super) fence: Fence,
    /// Data of background copies between the end of their read and the target's acknowledgement, by offset; readable meanwhile (S7, S15).
    pub(super) transit: Mutex<BTreeMap<u64, Transit>>,
    /// The snapshot is over or broken: every request passes, copying has stopped.
    passive: AtomicBool,
    broken: Mutex<Option<Report>>,
    pub(super) errors: ErrorLog,
    pub(super) lost: LostList,
    /// Notified when the snapshot breaks or ends, or a range is lost.
    pub(super) changed: event_listener::Event,
    pub(super) counters: Counters,
    /// Bytes of granules that need no copy any more.
    pub(super) settled_bytes: AtomicU64,
    pub(super) readahead: Detector,
}

/// Data on its way to the target.
#[derive(Clone, Debug)]
pub(super) struct Transit {
    pub(super) bufs: Buffers,
    /// The write has failed and waits to be tried again.
    pub(super) failed: bool,
}

/// How a wait ended.
pub(super) enum Waited<T> {
    /// What was waited for.
    Done(T),
    /// The snapshot is over: pass.
    Passive,
    /// The guest's limit was reached.
    Expired,
}

impl Point {
    pub(super) fn new(
        env: Arc<Env>,
        name: String,
        file: Edge,
        target: Edge,
        config: Config,
        size: u64,
    ) -> Arc<Self> {
        let granules = size.div_ceil(config.granule);
        Arc::new(Self {
            env,
            name,
            file,
            target,
            size,
            states: States::new(granules),
            fence: Fence::new(),
            transit: Mutex::default(),
            passive: AtomicBool::new(false),
            broken: Mutex::default(),
            errors: ErrorLog::default(),
            lost: LostList::default(),
            changed: event_listener::Event::new(),
            counters: Counters::default(),
            settled_bytes: AtomicU64::new(0),
            readahead: Detector::default(),
            config,
        })
    }

    /// The granules that `range` touches, inside the snapshot.
    pub(super) fn granules(&self, range: ByteRange) -> Range<u64> {
        let g = self.config.granule;
        let end = range.end().min(self.size).div_ceil(g);
        (range.offset / g).min(end)..end
    }

    /// The granules that lie wholly inside `range`; the short last one counts when the range reaches the end of the snapshot.
    pub(super) fn whole_granules(&self, range: ByteRange) -> Range<u64> {
        let g = self.config.granule;
        let first = range.offset.div_ceil(g);
        let end = if range.end() >= self.size { self.states.len() } else { align_down(range.end(), g) / g };
        first.min(end)..end
    }

    /// The bytes of a run of granules; the last granule may be short (S37).
    pub(super) fn bytes(&self, run: &Range<u64>) -> ByteRange {
        let g = self.config.granule;
        let offset = (run.start * g).min(self.size);
        ByteRange { offset, len: (run.end * g).min(self.size) - offset }
    }

    pub(super) fn is_passive(&self) -> bool {
        self.passive.load(Ordering::Acquire)
    }

    /// Moves a granule to a final state; counts its bytes the first time. Returns whether it was in `from`.
    pub(super) fn settle(&self, granule: u64, from: State, to: State) -> bool {
        let moved = self.states.change(granule, from, to);
        if moved && matches!(from, State::Needed | State::Reading) {
            let len = self.bytes(&(granule..granule + 1)).len;
            self.settled_bytes.fetch_add(len, Ordering::Relaxed);
        }
        moved
    }

    /// Waits for `future`, the end of the snapshot, or the deadline. The wait is one for others' work, so a cancelled request leaves it with ECANCELED.
    pub(super) async fn wait<F: Future>(
        &self,
        cx: &Cx,
        deadline: Option<Instant>,
        future: F,
    ) -> IoResult<Waited<F::Output>> {
        let over = async {
            loop {
                let listener = self.changed.listen();
                if self.is_passive() {
                    return;
                }
                listener.await;
            }
        };
        let either = async {
            let mut future = std::pin::pin!(future);
            let mut over = std::pin::pin!(over);
            std::future::poll_fn(|c| {
                if let std::task::Poll::Ready(v) = future.as_mut().poll(c) {
                    return std::task::Poll::Ready(Waited::Done(v));
                }
                over.as_mut().poll(c).map(|()| Waited::Passive)
            })
            .await
        };
        Ok(cx.waiting(cx.until(deadline, either)).await?.unwrap_or(Waited::Expired))
    }

    /// What `failure` means for the granules of `run`; carries it out except for the guest's own error, which is returned. `held`: see [`decide`].
    pub(super) fn fail(
        &self,
        failure: Failure,
        held: bool,
        op: Op,
        run: &Range<u64>,
        error: IoError,
    ) -> IoResult {
        let verdict = decide(failure, held, self.config.break_guest_write, self.config.lose_range);
        let code = match failure {
            Failure::Read => Code::ReadFailed,
            Failure::Space => Code::CacheFull,
            Failure::Write => Code::TargetFailed,
            Failure::Timeout => Code::CbwTimeout,
        };
        let range = self.bytes(run);
        let report =
            Report::new(&self.env.runtime, IoError::new(error.errno, code), failure.side(), op, range)
                .on_node(self.name.clone());
        match verdict {
            Verdict::FailGuest => {
                self.errors.add(report.action(Action::GuestWriteFailed));
                let code = if failure == Failure::Timeout { Code::CbwTimeout } else { Code::CbwFailed };
                Err(IoError::new(libc::EIO, code))
            }
            Verdict::LoseRange => {
                self.lose(run, report);
                Ok(())
            }
            Verdict::BreakSnapshot => {
                self.break_snapshot(report);
                Ok(())
            }
        }
    }

    /// Gives up a run of granules and lets guests pass (S50). Snapshot reads that were directed at the source look again when their read has ended (S34).
    pub(super) fn lose(&self, run: &Range<u64>, report: Report) {
        let report = self.errors.add(report.action(Action::RangeLost));
        for g in run.clone() {
            let gone = [State::Needed, State::Reading, State::Preserved]
                .iter()
                .any(|s| self.settle(g, *s, State::Lost));
            if gone {
                self.states.set_clear(g);
                let range = self.bytes(&(g..g + 1));
                self.lost.add(LostRange { range, error: report.error, real_ns: report.real_ns });
            }
        }
        let range = self.bytes(run);
        self.transit.lock().retain(|at, t| *at + t.bufs.len() as u64 <= range.offset || *at >= range.end());
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
        self.transit.lock().clear();
        self.changed.notify(usize::MAX);
    }

    pub(super) fn broken(&self) -> Option<Report> {
        self.broken.lock().clone()
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
