//! The filter as a node, and what a job asks of it.

use super::copy::{CopyError, CopyOutcome};
use super::options::{CBW_PROPS, Config};
use super::point::Point;
use super::state::State;
use crate::error::{Error, IoResult, Result};
use crate::graph::OpenCx;
use crate::node::{Edge, Extent, Limits, Node, NodeFuture, Plan};
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
use std::ops::Range;

/// A request that touches more granules than this is looked at by a task.
const FAST_GRANULES_MAX: u64 = 64;

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
        let config = Config::take(&mut o, target_limits, cached)?;
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
        let point =
            Point::new(cx.env().clone(), cx.name().to_owned(), file, target, config, source_limits.size);
        Ok(Arc::new(Self { point }))
    }

    pub(super) fn point(&self) -> &Arc<Point> {
        &self.point
    }

    /// Bytes per granule.
    pub fn granule(&self) -> u64 {
        self.point.config.granule
    }

    /// Length of the snapshot in bytes.
    pub fn size(&self) -> u64 {
        self.point.size
    }

    /// Number of granules.
    pub fn granules(&self) -> u64 {
        self.point.states.len()
    }

    /// The next bytes at or behind `offset` that are needed, at most `max` (at least one granule) and within one call's bounded search; `None` if there are none
    /// behind it. The search goes on where the answer ends.
    pub fn needed_from(&self, offset: u64, max: u64) -> Option<ByteRange> {
        let p = &self.point;
        let first = offset / self.granule();
        let run = p.states.needed_run(first..p.states.len(), (max / self.granule()).max(1))?;
        Some(p.bytes(&run))
    }

    /// Whether a granule of `range` is on its way right now.
    pub fn is_copying(&self, range: ByteRange) -> bool {
        self.point.states.find(self.point.granules(range), State::Reading).is_some()
    }

    /// Copies what is still needed of `range` in the background; see `copy.rs`. `memory` is at least as long as the range.
    pub async fn copy(
        &self,
        cx: &Cx,
        range: ByteRange,
        memory: &Buffers,
        class: Class,
    ) -> std::result::Result<CopyOutcome, CopyError> {
        self.point.copy(cx, range, memory, class).await
    }

    /// Takes whole granules out of the snapshot before it begins (unallocated ones of `sync=top`) or when its reader has done with them (S20).
    pub async fn release(&self, cx: &Cx, range: ByteRange) -> IoResult<u64> {
        self.point.release(cx, self.point.whole_granules(range)).await
    }

    /// Reads the disk as it was at the instant.
    pub async fn read_snapshot(&self, cx: &Cx, offset: u64, bufs: &Buffers) -> IoResult {
        let range = ByteRange { offset, len: bufs.len() as u64 };
        crate::node::check_range(range, self.size())?;
        self.point.read_snapshot(cx, range, bufs).await
    }

    /// Bytes of granules that need no copy any more: copied for guests, copied in the background, released or lost.
    pub fn settled_bytes(&self) -> u64 {
        self.point.settled_bytes.load(Relaxed)
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

    /// Gives up one range (S50).
    pub fn lose(&self, range: ByteRange, report: Report) {
        self.point.lose(&self.point.granules(range), report);
    }

    /// Whether a failure after the guest was released loses its range only.
    pub fn loses_ranges(&self) -> bool {
        self.point.config.lose_range
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

    fn granules_clear(&self, range: ByteRange) -> bool {
        let run: Range<u64> = self.point.granules(range);
        run.end - run.start <= FAST_GRANULES_MAX && run.into_iter().all(|g| self.point.states.is_clear(g))
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
            Op::Write | Op::WriteZeroes => self.point.is_passive() || self.granules_clear(req.range),
            Op::Discard if self.point.config.hold_discards && !self.point.is_passive() => {
                return Plan::Done(Ok(()));
            }
            Op::Discard => self.point.is_passive() || self.granules_clear(req.range),
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

    /// Ends the snapshot's copying for good once the filter is out of the graph is the remover's business ([`CbwNode::end`]); what has been preserved goes down here.
    fn settle<'a>(&'a self, cx: &'a Cx) -> NodeFuture<'a, IoResult> {
        Box::pin(async move {
            if self.point.is_passive() {
                return Ok(());
            }
            let target = self.point.target.node();
            target.settle(cx).await
        })
    }

    fn get(&self, key: &str) -> Option<String> {
        match key {
            "granularity" => Some(self.granule().to_string()),
            "broken" => Some(if self.broken().is_some() { "on" } else { "off" }.to_owned()),
            "errors" => Some(self.errors_json().to_string()),
            _ => None,
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
