//! The filter as a node, and what a job asks of it.

use super::copy::{CopyError, CopyOutcome};
use super::fence::mark;
use super::geometry::Geometry;
use super::options::{CBW_PROPS, CbwOptions};
use super::point::Point;
use super::state::{Granules, HELD, KEPT, State, StateSet};
use crate::error::{Error, IoResult, Result};
use crate::graph::OpenCx;
use crate::node::{Edge, Extent, Growth, Limits, Node, NodeFuture, Plan, Reservation, fixed_size};
use crate::options::Options;
use crate::queue::Cx;
use crate::report::{LostRange, Report};
use crate::request::{Buffers, Class, Op, ReqRef, Request};
use crate::stats::Stats;
use crate::stats::hist::HistSnapshot;
use crate::sync::Arc;
use crate::sync::atomic::Ordering::Relaxed;
use crate::units::ByteRange;
use std::any::Any;
use std::time::Duration;

/// A request that touches more granules than this is looked at by a task.
const FAST_GRANULES_MAX: u64 = 64;
/// How long a snapshot that is over is waited for when its filter goes.
pub(super) const LATE_WAIT: Duration = Duration::from_millis(500);

/// The copy-before-write filter.
#[derive(Debug)]
pub struct CbwNode {
    point: Arc<Point>,
}

impl CbwNode {
    /// From options (see [`CBW_PROPS`]); the instant is the moment the filter goes in.
    pub fn open(cx: &OpenCx<'_>, mut o: Options) -> Result<Arc<dyn Node>> {
        let file = cx.require_child(&mut o, "file")?;
        let target = cx.require_child(&mut o, "target")?;
        let (source_limits, target_limits) = (file.node().limits(), target.node().limits());
        let cached = target.node().driver() == "ram-cache";
        let options = CbwOptions::take(&mut o)?;
        o.finish_for(&CBW_PROPS)?;
        if target_limits.size < source_limits.size {
            return Err(Error::invalid(format!(
                "option 'target': has {} bytes, the disk has {}",
                target_limits.size, source_limits.size
            )));
        }
        if target_limits.read_only {
            return Err(Error::invalid("option 'target': is read-only"));
        }
        let granule = options.granule_wish(u64::from(target_limits.cluster), cached).choose()?;
        let geo = Geometry::new(source_limits.size, granule);
        let point = Point::new(cx.env().clone(), cx.name().to_owned(), file, target, &options, geo);
        Ok(Arc::new(Self { point }))
    }

    pub(super) fn point(&self) -> &Arc<Point> {
        &self.point
    }

    /// Bytes per granule.
    pub fn granule(&self) -> u64 {
        self.point.geo.granule()
    }

    /// Length of the snapshot in bytes.
    pub fn size(&self) -> u64 {
        self.point.geo.size()
    }

    /// Number of granules.
    pub fn granules(&self) -> u64 {
        self.point.states.count()
    }

    /// The next bytes at or behind `offset` that are needed, at most `max` (at least one granule) and within one call's bounded search; `None` if there are none
    /// behind it. The search goes on where the answer ends.
    pub fn needed_from(&self, offset: u64, max: u64) -> Option<ByteRange> {
        let p = &self.point;
        let needed = StateSet::of(&[State::Needed]);
        let start = p.states.next_in(p.geo.granule_of(offset)..u64::MAX, needed)?;
        // The run is looked at only as far as it is asked for: a disk may have millions of granules.
        let end = start.saturating_add((max / self.granule()).max(1));
        Some(p.geo.bytes(&p.states.next_run(start..end, needed)?))
    }

    /// The next bytes at or behind `offset` whose write to the target has failed after guests were released: [`CbwNode::copy`] of them, without
    /// memory, tries again. To be looked at before new pieces are begun, or failed ones use up the memory for new ones.
    pub fn failed_from(&self, offset: u64) -> Option<ByteRange> {
        self.point.transits.next_failed(offset)
    }

    /// Whether nothing is left to be done: no granule is needed or on its way.
    pub fn is_complete(&self) -> bool {
        let p = &self.point;
        p.transits.is_empty() && p.states.next_run(0..u64::MAX, HELD).is_none()
    }

    /// Whether a granule of `range` is on its way right now.
    pub fn is_copying(&self, range: ByteRange) -> bool {
        let p = &self.point;
        p.states.next_run(p.geo.touched(range), StateSet::of(&[State::Reading])).is_some()
    }

    /// Copies what is still needed of `range` in the background, through `memory`. That is at least as long as the range and is kept until the target
    /// has acknowledged (S53); or empty, if the source is known to read as zeros there or the range comes from [`CbwNode::failed_from`].
    /// Guests that meet a granule of it go on when its read is done (S7).
    pub async fn copy(
        &self,
        cx: &Cx,
        range: ByteRange,
        memory: &Buffers,
        class: Class,
    ) -> std::result::Result<CopyOutcome, CopyError> {
        self.point.copy(cx, range, memory, class).await
    }

    /// Takes whole granules out of the snapshot when its reader has done with them (S20), and discards them at the target. Returns the bytes released.
    pub async fn release(&self, cx: &Cx, range: ByteRange) -> IoResult<u64> {
        self.point.release(cx, self.point.geo.covered(range)).await
    }

    /// Takes whole granules that are still needed out of the snapshot, such as unallocated ones for `sync=top`, without I/O. What has been copied or is on
    /// its way stays. Returns the bytes released.
    pub fn release_needed(&self, range: ByteRange) -> u64 {
        self.point.release_needed(self.point.geo.covered(range))
    }

    /// Reads the disk as it was at the instant.
    pub async fn read_snapshot(&self, cx: &Cx, offset: u64, bufs: &Buffers) -> IoResult {
        let range = ByteRange { offset, len: bufs.len() as u64 };
        crate::node::check_range(range, self.size())?;
        self.point.read_snapshot(cx, range, bufs).await
    }

    /// Bytes of granules that need no copy any more: copied for guests, copied in the background, released or lost.
    pub fn settled_bytes(&self) -> u64 {
        self.point.settled_bytes()
    }

    /// Of these, bytes that were not part of the snapshot.
    pub fn released_bytes(&self) -> u64 {
        self.point.counters.released_bytes.load(Relaxed)
    }

    /// Why the snapshot is broken, if it is.
    pub fn broken(&self) -> Option<Report> {
        self.point.broken()
    }

    /// Breaks the snapshot (S29): copying stops at once and everybody is let go.
    pub fn break_snapshot(&self, report: Report) {
        self.point.break_snapshot(report);
    }

    /// Gives up one range, whatever has become of it (S50).
    pub fn lose(&self, range: ByteRange, report: Report) {
        let run = self.point.geo.touched(range);
        self.point.transits.forget(self.point.geo.bytes(&run));
        self.point.lose(&run, KEPT, report);
    }

    /// The target has given up a range for good, after guests were released: the range is lost, or the snapshot broken, as the options say (S28).
    pub fn target_failed(&self, range: ByteRange, report: Report) {
        if self.loses_ranges() { self.lose(range, report) } else { self.break_snapshot(report) }
    }

    /// Whether a failure after the guest was released loses its range only.
    pub fn loses_ranges(&self) -> bool {
        self.point.live.loss_scope() == super::options::LossScope::Range
    }

    /// The snapshot is over: every request passes from now on, and waiters are let go.
    pub fn end(&self) {
        self.point.stop();
    }

    /// Notified when the snapshot breaks, ends or loses a range; listen first, then look.
    pub fn changed(&self) -> event_listener::EventListener {
        self.point.changed.listen()
    }

    /// What was lost.
    pub fn lost(&self) -> Vec<LostRange> {
        self.point.lost.all()
    }

    /// First error, if any.
    pub fn first_error(&self) -> Option<Report> {
        self.point.errors.first()
    }

    /// The errors as JSON (semantics.md, section 5).
    pub fn errors_json(&self) -> serde_json::Value {
        self.point.errors.to_json()
    }

    /// Waits until no copy is under way, late ones included, at most for `limit`; whether that was so. After [`CbwNode::end`] copies end with
    /// their next I/O.
    pub async fn quiet(&self, cx: &Cx, limit: Option<Duration>) -> bool {
        self.point.quiet(cx, limit).await
    }

    /// Whether a changing request may go down without a look. Granules that are safe but not yet marked are marked here if no reader is in the way (S71);
    /// first touches of a stream are left to the slow path, which reads ahead.
    pub(super) fn passes(&self, range: ByteRange) -> bool {
        let p = &self.point;
        if p.is_passive() {
            return true;
        }
        let run: Granules = p.geo.touched(range);
        if run.end - run.start > FAST_GRANULES_MAX {
            return false;
        }
        let mut clear = true;
        for g in run.clone() {
            let seen = p.states.get(g);
            if HELD.has(seen.state()) {
                return false;
            }
            clear &= seen.is_clear();
        }
        clear || !p.readahead.expects(&run) && p.fence.is_quiet(p.geo.bytes(&run)) && mark(&p.states, run)
    }
}

impl Node for CbwNode {
    fn driver(&self) -> &'static str {
        "copy-before-write"
    }

    fn limits(&self) -> Limits {
        self.point.file.get().limits()
    }

    fn children(&self) -> Vec<(&'static str, &Edge)> {
        vec![("file", &self.point.file), ("target", &self.point.target)]
    }

    fn plan(&self, req: ReqRef<'_>) -> Plan {
        let pass = match req.op {
            // Guest flush and FUA concern the source only (S21).
            Op::Read | Op::Flush => true,
            Op::Write | Op::WriteZeroes | Op::Discard => self.passes(req.range),
        };
        if pass { self.point.file.get().plan(req) } else { Plan::Slow }
    }

    fn execute<'a>(&'a self, cx: &'a Cx, req: Request) -> NodeFuture<'a, IoResult> {
        Box::pin(async move {
            match req.op {
                Op::Write | Op::WriteZeroes | Op::Discard => self.point.guest(cx, req).await,
                Op::Read | Op::Flush => {
                    let file = self.point.file.node();
                    cx.run(&*file, req).await
                }
            }
        })
    }

    fn block_status<'a>(&'a self, cx: &'a Cx, range: ByteRange) -> NodeFuture<'a, IoResult<Extent>> {
        Box::pin(async move {
            let file = self.point.file.node();
            cx.status(&*file, range).await
        })
    }

    fn resize<'a>(&'a self, _cx: &'a Cx, _size: u64, _growth: Growth) -> NodeFuture<'a, IoResult> {
        fixed_size()
    }

    /// Waits for the copies under way, then for what the target holds in memory. A snapshot that is over waits for late copies only, and for a while
    /// only: their target may be dead, and their memory belongs to them (S3).
    fn settle<'a>(&'a self, cx: &'a Cx) -> NodeFuture<'a, IoResult> {
        Box::pin(async move {
            if self.point.is_passive() {
                self.point.quiet(cx, Some(LATE_WAIT)).await;
                return Ok(());
            }
            self.point.quiet(cx, None).await;
            let target = self.point.target.node();
            target.settle(cx).await
        })
    }

    fn detaching(&self) {
        self.end();
    }

    fn reserve<'a>(&'a self, cx: &'a Cx, len: u64, class: Class) -> NodeFuture<'a, IoResult<Reservation>> {
        let file = self.point.file.node();
        Box::pin(async move { file.reserve(cx, len, class).await })
    }

    fn set(&self, key: &str, value: &str) -> Result<()> {
        if self.point.live.set(key, value)? {
            return Ok(());
        }
        Err(Error::invalid(format!("driver 'copy-before-write' has no live option '{key}'")))
    }

    fn get(&self, key: &str) -> Option<String> {
        match key {
            "granule" | "granularity" => Some(self.granule().to_string()),
            "state" => Some(
                match (self.broken().is_some(), self.point.is_passive()) {
                    (true, _) => "broken",
                    (false, true) => "ended",
                    (false, false) => "active",
                }
                .to_owned(),
            ),
            "errors" => Some(self.errors_json().to_string()),
            _ => self.point.live.get(key),
        }
    }

    fn stats(&self) -> Option<Stats> {
        let mut stats = self.point.counters.snapshot(self.point.lost.bytes());
        if let Some(t) = self.point.target.node().stats() {
            stats.cache_used = t.cache_used;
            stats.cache_peak = t.cache_peak;
            stats.cache_waiters = t.cache_waiters;
            stats.cache_spilled = t.cache_spilled;
            stats.cache_stored = t.cache_stored;
            stats.cache_writes = t.cache_writes;
            stats.time_to_full_ms = t.time_to_full_ms;
        }
        Some(stats)
    }

    fn hist(&self, which: &str) -> Option<HistSnapshot> {
        self.point.counters.hist(which).map(|h| h.snapshot())
    }

    fn last_error(&self) -> Option<String> {
        self.point.errors.last().map(|r| r.to_json().to_string())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
