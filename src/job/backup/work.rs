//! What a backup copies: the granules that the filter still needs.

use super::mark::Mark;
use super::{broken, incomplete};
use crate::error::{Code, IoError, IoResult};
use crate::events::Side;
use crate::filter::cbw::CbwNode;
use crate::filter::ram_cache::RamCache;
use crate::job::copy::{Failure, Moved, Piece, Work};
use crate::node::{ExtentFlags, Node, NodeFuture, Vertex};
use crate::queue::Cx;
use crate::report::{Action, Report};
use crate::request::{Buffers, Class, Op};
use crate::rt::Runtime;
use crate::stats::{HistSnapshot, Stats};
use crate::sync::{Arc, Mutex};
use crate::units::{ByteRange, align_down, align_up};
use event_listener::EventListener;
use std::time::Duration;

/// How often a cache that has been given up is looked at while its target does not answer.
const QUIET_LOOK: Duration = Duration::from_millis(100);

/// Longest piece of zeros: no payload, but a state per granule, which must not keep a worker for long.
const ZERO_MAX: u64 = 256 << 20;

/// What a backup has put into the graph.
#[derive(Debug)]
pub(super) struct Setup {
    pub(super) place: Arc<Vertex>,
    pub(super) filter: Arc<Vertex>,
    pub(super) cache: Option<Arc<Vertex>>,
    /// Everything between the filter and the target, lowest first; the cache is the last of it.
    pub(super) below: Vec<Arc<Vertex>>,
    pub(super) mark: Option<Mark>,
    size: u64,
    /// The last answer of the source: a range and whether it reads as zeros. What is needed has not changed since the instant, so the answer stays
    /// right for as long as the granule is needed.
    known: Mutex<Option<(ByteRange, bool)>>,
}

impl Setup {
    pub(super) fn new(
        place: Arc<Vertex>,
        filter: Arc<Vertex>,
        cache: Option<Arc<Vertex>>,
        below: Vec<Arc<Vertex>>,
        mark: Option<Mark>,
        size: u64,
    ) -> Self {
        Self { place, filter, cache, below, mark, size, known: Mutex::default() }
    }

    /// The filter's own interface.
    pub(super) fn cbw(&self) -> &CbwNode {
        self.filter.base().as_any().downcast_ref().expect("the driver copy-before-write makes CbwNode")
    }

    /// The node whose old data is saved.
    fn source(&self) -> Arc<dyn Node> {
        let file =
            self.filter.base().children().into_iter().find(|(key, _)| *key == "file").map(|(_, e)| e.node());
        file.expect("a filter has a file")
    }

    /// Whether the backup can still succeed. A filter that somebody took out no longer sees the guest's writes.
    pub(super) fn check(&self) -> Result<(), Failure> {
        if let Some(report) = self.cbw().broken() {
            return Err(broken(&report));
        }
        if !self.place.filters().iter().any(|f| Arc::ptr_eq(f, &self.filter)) {
            return Err(incomplete(ByteRange { offset: 0, len: self.size }, Code::SnapshotBroken));
        }
        Ok(())
    }

    /// Whether nothing is missing: nothing lost, nothing left to be copied.
    pub(super) fn check_complete(&self) -> Result<(), Failure> {
        if let Some(lost) = self.cbw().lost().first() {
            return Err(Failure { error: lost.error, side: Side::Target, op: Op::Write, range: lost.range });
        }
        if self.cbw().is_complete() {
            return Ok(());
        }
        let whole = ByteRange { offset: 0, len: self.size };
        Err(incomplete(self.cbw().needed_from(0, self.size).unwrap_or(whole), Code::Incomplete))
    }

    /// Waits for copies in flight and brings everything to the target.
    pub(super) async fn settle(&self, cx: &Cx) -> IoResult {
        self.filter.base().settle(cx).await?;
        match &self.cache {
            Some(cache) => cache.base().settle(cx).await,
            None => Ok(()),
        }
    }

    /// The cache that old data goes to: the job's own, or one that the user has put above the target.
    fn ram_cache(&self) -> Option<Arc<dyn Node>> {
        let target = self.filter.base().children().into_iter().find(|(key, _)| *key == "target")?.1.node();
        target.as_any().is::<RamCache>().then_some(target)
    }

    /// What the cache has to give up concerns the snapshot: its granules are lost, or it breaks (S28, S50).
    pub(super) fn take_over_losses(&self, rt: &Runtime) {
        let Some(node) = self.ram_cache() else { return };
        let Some(cache) = node.as_any().downcast_ref::<RamCache>() else { return };
        let (filter, rt, name) =
            (Arc::downgrade(self.filter.base()), rt.clone(), self.filter.name().to_owned());
        cache.on_lost(Some(Arc::new(move |range, error| {
            let Some(filter) = filter.upgrade() else { return };
            let Some(cbw) = filter.as_any().downcast_ref::<CbwNode>() else { return };
            let action = if cbw.loses_ranges() { Action::RangeLost } else { Action::SnapshotBroken };
            let report = Report::new(&rt, error, Side::Target, Op::Write, range);
            cbw.target_failed(range, report.on_node(name.as_str()).action(action));
        })));
    }

    /// The end of [`Setup::take_over_losses`].
    pub(super) fn leave_losses(&self) {
        if let Some(node) = self.ram_cache()
            && let Some(cache) = node.as_any().downcast_ref::<RamCache>()
        {
            cache.on_lost(None);
        }
    }

    /// The content of the cache is not wanted any more: waiters go, memory goes as its I/O ends (S29). A cache of the user's own stays usable.
    pub(super) fn abandon_cache(&self) {
        match self.own_cache() {
            Some(cache) => cache.close(IoError::cancelled()),
            None => self.ram_cache().iter().for_each(|cache| cache.abandon()),
        }
    }

    fn own_cache(&self) -> Option<&RamCache> {
        self.cache.as_ref()?.base().as_any().downcast_ref()
    }

    /// Waits until nothing that was begun here is in flight to the target.
    pub(super) async fn wait_quiet(&self, cx: &Cx) {
        self.cbw().quiet(cx, None).await;
        while self.own_cache().is_some_and(|c| !c.is_empty()) {
            cx.sleep_until(cx.now().after(QUIET_LOOK)).await;
        }
    }

    /// Counters of the filter and of its cache.
    pub(super) fn stats(&self) -> Stats {
        let filter = self.filter.base().stats().unwrap_or_default();
        let Some(cache) = self.cache.as_ref().and_then(|c| c.base().stats()) else { return filter };
        Stats {
            cache_used: cache.cache_used,
            cache_peak: cache.cache_peak,
            cache_waiters: cache.cache_waiters,
            cache_spilled: cache.cache_spilled,
            cache_stored: cache.cache_stored,
            cache_writes: cache.cache_writes,
            time_to_full_ms: cache.time_to_full_ms,
            ..filter
        }
    }

    /// For `sync=top`: takes out of the copy what the top layer does not hold. Granules that the guest has had copied meanwhile stay copied.
    pub(super) async fn release_below_top(&self, cx: &Cx) {
        let (source, granule) = (self.source(), self.cbw().granule());
        let mut at = 0;
        while at < self.size {
            let rest = ByteRange { offset: at, len: self.size - at };
            // What cannot be told is copied.
            let Ok(extent) = cx.status(&*source, rest).await else { return };
            let here =
                extent.depth == 0 && extent.flags.intersects(ExtentFlags::ALLOCATED | ExtentFlags::ZERO);
            let len = extent.len.clamp(1, rest.len);
            if !here && let Some(whole) = inward(ByteRange { offset: at, len }, granule, self.size) {
                self.cbw().release_needed(whole);
            }
            at += len;
        }
    }

    /// What the source says of the start of `range`, asked only for what the last answer does not cover.
    async fn status(&self, cx: &Cx, range: ByteRange) -> (ByteRange, bool) {
        let known = *self.known.lock();
        if let Some(answer) = known.filter(|(k, _)| k.offset <= range.offset && range.offset < k.end()) {
            return answer;
        }
        let answer = match cx.status(&*self.source(), range).await {
            Ok(extent) => {
                (ByteRange { offset: range.offset, len: extent.len.clamp(1, range.len) }, extent.is_zero())
            }
            // The read will tell.
            Err(_) => (range, false),
        };
        *self.known.lock() = Some(answer);
        answer
    }
}

impl Work for Setup {
    fn next<'a>(&'a self, cx: &'a Cx, at: u64, max: u64) -> NodeFuture<'a, Option<Piece>> {
        Box::pin(async move {
            if at >= self.size {
                return None;
            }
            let granule = self.cbw().granule();
            // A long look for zeros, which are cut only here; data is cut below.
            let left = self.cbw().needed_from(at, ZERO_MAX)?;
            let (known, zero) = self.status(cx, left).await;
            let known = left.intersect(known);
            if zero && let Some(whole) = inward(known, granule, self.size).filter(|w| w.offset == left.offset)
            {
                return Some(Piece { range: whole, zero: true });
            }
            // Data up to where the zeros begin, in whole granules.
            let data = if zero { granule } else { align_up(known.end(), granule) - left.offset };
            let len = data.min(align_down(max, granule).max(granule)).min(left.len);
            Some(Piece { range: ByteRange { offset: left.offset, len }, zero: false })
        })
    }

    fn again(&self, at: u64) -> Option<Piece> {
        self.cbw().failed_from(at).map(|range| Piece { range, zero: true })
    }

    fn copy<'a>(
        &'a self,
        cx: &'a Cx,
        piece: Piece,
        bufs: Buffers,
        class: Class,
    ) -> NodeFuture<'a, Result<Moved, Failure>> {
        Box::pin(async move {
            match self.cbw().copy(cx, piece.range, &bufs, class).await {
                Ok(o) => Ok(Moved { copied: o.copied, zero: o.zero, skipped: o.skipped }),
                // The snapshot is over: why is told by `broken`, or the job is being cancelled.
                Err(e) if e.side == Side::None => Ok(Moved { skipped: piece.range.len, ..Moved::default() }),
                Err(e) => Err(Failure { error: e.error, side: e.side, op: e.op, range: e.range }),
            }
        })
    }

    fn done(&self) -> u64 {
        self.cbw().settled_bytes()
    }

    fn done_for_guest(&self) -> u64 {
        self.filter.base().stats().map_or(0, |s| s.cbw_copied_bytes)
    }

    fn broken(&self) -> Option<Failure> {
        self.check().err()
    }

    fn changed(&self) -> Option<EventListener> {
        Some(self.cbw().changed())
    }

    fn guest_latency(&self) -> Option<HistSnapshot> {
        self.filter.base().hist("total")
    }
}

/// The whole granules in `range`; the last, short granule of the disk counts as whole.
fn inward(range: ByteRange, granule: u64, size: u64) -> Option<ByteRange> {
    let start = align_up(range.offset, granule);
    let end = if range.end() >= size { size } else { align_down(range.end(), granule) };
    (start < end).then(|| ByteRange { offset: start, len: end - start })
}
