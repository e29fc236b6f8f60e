//! The view of the instant: reads, status, release, and the node `snapshot-access`.

use super::fence::{is_overtaken, may_read_source};
use super::node::CbwNode;
use super::point::Point;
use super::state::{Granules, State, StateSet};
use crate::error::{Code, Error, IoError, IoResult, Result};
use crate::graph::OpenCx;
use crate::limits::BATCH_LEN;
use crate::node::{Edge, Extent, ExtentFlags, Growth, Limits, Node, NodeFuture, Plan, fixed_size};
use crate::options::{Options, Prop, PropStates, PropTable, PropType, props::REQUIRED};
use crate::queue::Cx;
use crate::request::{Buffers, Op, ReqRef, Request};
use crate::sync::atomic::Ordering::Relaxed;
use crate::sync::{Arc, Mutex};
use crate::units::{ByteRange, align_down};
use smallvec::SmallVec;
use std::any::Any;
use std::future::Future;
use std::pin::Pin;
use std::task::Poll;

/// Longest range whose status is told at once.
const STATUS_MAX: u64 = 64 << 20;
/// Runs of one piece that are read at the same time.
const RUNS_MAX: usize = 16;

impl Point {
    /// Reads the disk as it was. Pieces of at most 1 MiB, each registered at the source for the time of its read only (S5).
    pub(super) async fn read_snapshot(&self, cx: &Cx, range: ByteRange, bufs: &Buffers) -> IoResult {
        let mut at = range.offset;
        while at < range.end() {
            // Up to a border, so that the next pieces are aligned.
            let len = (align_down(at, BATCH_LEN) + BATCH_LEN).min(range.end()) - at;
            let to = bufs.slice((at - range.offset) as usize, len as usize);
            self.read_piece(cx, ByteRange { offset: at, len }, to).await?;
            at += len;
        }
        Ok(())
    }

    /// Reads a piece: runs of granules of different states at the same time, since they come from different places.
    async fn read_piece(&self, cx: &Cx, piece: ByteRange, bufs: Buffers) -> IoResult {
        let mut runs: SmallVec<[ByteRange; 1]> = SmallVec::new();
        let mut at = piece.offset;
        while at < piece.end() {
            let rest = ByteRange { offset: at, len: piece.end() - at };
            let run = if runs.len() + 1 < RUNS_MAX { self.same_state(rest).1 } else { rest };
            runs.push(run);
            at = run.end();
        }
        if runs.len() == 1 {
            return self.read_run(cx, piece, bufs).await;
        }
        let slice = |run: ByteRange| bufs.slice((run.offset - piece.offset) as usize, run.len as usize);
        let reads = runs.into_iter().map(|run| self.read_run(cx, run, slice(run)));
        join_all(reads.map(Box::pin).collect()).await
    }

    /// Reads a run whose states may have changed since somebody looked.
    async fn read_run(&self, cx: &Cx, mut rest: ByteRange, mut bufs: Buffers) -> IoResult {
        while !rest.is_empty() {
            let done = self.read_some(cx, rest, &bufs).await?;
            rest = ByteRange { offset: rest.offset + done, len: rest.len - done };
            bufs = bufs.slice(done as usize, rest.len as usize);
        }
        Ok(())
    }

    /// Reads the start of `rest`; how much. 0: look again.
    async fn read_some(&self, cx: &Cx, rest: ByteRange, bufs: &Buffers) -> IoResult<u64> {
        self.check_over()?;
        let (state, here) = self.same_state(rest);
        match state {
            State::Needed => self.read_source(cx, here, bufs).await,
            State::Reading => {
                let granules = self.geo.touched(here);
                let ended = self.fence.copies_ended(here);
                let over = || self.is_settled(&granules);
                self.wait_for_others(cx, None, over, ended).await?;
                Ok(0)
            }
            State::Preserved => match self.transits.read(here, bufs) {
                Ok(len) => Ok(len),
                Err(end) => {
                    let here = ByteRange { offset: here.offset, len: end - here.offset };
                    self.read_target(cx, here, bufs).await
                }
            },
            State::Released => Err(IoError::new(libc::EACCES, Code::Released)),
            State::Lost => {
                let errno = self.lost.at(here.offset).map_or(libc::EIO, |l| l.error.errno);
                Err(IoError::new(errno, Code::RangeLost))
            }
        }
    }

    /// Reads what of `here` is still only on the source.
    async fn read_source(&self, cx: &Cx, here: ByteRange, bufs: &Buffers) -> IoResult<u64> {
        // S15: register first, then look.
        let registered = self.fence.register(here);
        let here = self.still_needed(here);
        let mut result = Ok(());
        if !here.is_empty() {
            let file = self.file.node();
            result = cx.run(&*file, Request::read(here.offset, bufs.slice(0, here.len as usize))).await;
        }
        // Guests may have been let go without waiting for this read: then what was read may be new (S34).
        let overtaken = self.is_passive() || is_overtaken(&self.states, self.geo.touched(here));
        drop(registered);
        if overtaken {
            return Ok(0);
        }
        result.map(|()| here.len)
    }

    /// The start of `here` that a registered reader may take from the source.
    fn still_needed(&self, here: ByteRange) -> ByteRange {
        let all = self.geo.touched(here);
        let mut run = all.clone();
        run.end =
            run.start + all.into_iter().take_while(|g| may_read_source(&self.states, *g)).count() as u64;
        self.geo.bytes(&run).intersect(here)
    }

    async fn read_target(&self, cx: &Cx, here: ByteRange, bufs: &Buffers) -> IoResult<u64> {
        let target = self.target.node();
        let read = Request::read(here.offset, bufs.slice(0, here.len as usize));
        let result = cx.run(&*target, read).await;
        // Released or lost meanwhile: then what was read may be what a discard has left.
        let kept = |g| self.states.get(g).state() == State::Preserved;
        if self.is_passive() || !self.geo.touched(here).all(kept) {
            return Ok(0);
        }
        result.map(|()| here.len)
    }

    /// The state at the start of `range`, and the bytes of it that share it.
    fn same_state(&self, range: ByteRange) -> (State, ByteRange) {
        let all = self.geo.touched(range);
        let state = self.states.get(all.start).state();
        let run = self.states.run_seen(all, |s| s.state() == state);
        (state, self.geo.bytes(&run).intersect(range))
    }

    /// Status of the view: preserved granules are data or zeros, never holes; what cannot be read is cut off and marked (S18).
    pub(super) async fn snapshot_status(&self, cx: &Cx, range: ByteRange) -> IoResult<Extent> {
        let range = ByteRange { offset: range.offset, len: range.len.min(STATUS_MAX) };
        loop {
            self.check_over()?;
            let (state, here) = self.same_state(range);
            match state {
                State::Needed => {
                    if let Some(extent) = self.source_status(cx, here).await? {
                        return Ok(extent);
                    }
                }
                State::Reading | State::Preserved => return Ok(Extent::data(here.len)),
                State::Released | State::Lost => {
                    return Ok(Extent { len: here.len, flags: ExtentFlags::NO_ACCESS, depth: 0 });
                }
            }
        }
    }

    /// Status of what is only on the source. Registered like a read: the status of a granule that a guest changes meanwhile would be that of the new
    /// data. `None`: look again.
    async fn source_status(&self, cx: &Cx, here: ByteRange) -> IoResult<Option<Extent>> {
        let registered = self.fence.register(here);
        let here = self.still_needed(here);
        if here.is_empty() {
            return Ok(None);
        }
        let file = self.file.node();
        let extent = cx.status(&*file, here).await;
        let overtaken = self.is_passive() || is_overtaken(&self.states, self.geo.touched(here));
        drop(registered);
        if overtaken {
            return Ok(None);
        }
        extent.map(|e| Some(Extent { len: e.len.clamp(1, here.len), ..e }))
    }

    /// Takes NEEDED granules out of the snapshot; others stay as they are. No I/O. Returns the bytes released.
    pub(super) fn release_needed(&self, run: Granules) -> u64 {
        let needed = StateSet::of(&[State::Needed]);
        let released = run.filter(|g| self.change(*g, needed, State::Released));
        let bytes = released.map(|g| self.geo.bytes(&(g..g + 1)).len).sum();
        self.counters.released_bytes.fetch_add(bytes, Relaxed);
        bytes
    }

    /// Releases whole granules: they are not part of the snapshot any more (S20). Returns the bytes released.
    pub(super) async fn release(&self, cx: &Cx, run: Granules) -> IoResult<u64> {
        let (mut bytes, mut at) = (0, run.start);
        let preserved = StateSet::of(&[State::Preserved]);
        while at < run.end {
            bytes += self.release_needed(at..at + 1);
            match self.states.get(at).state() {
                State::Needed => continue,
                State::Reading => {
                    let one = at..at + 1;
                    let ended = self.fence.copies_ended(self.geo.bytes(&one));
                    self.wait_for_others(cx, None, || self.is_settled(&one), ended).await?;
                    self.check_over()?;
                    continue;
                }
                State::Preserved => {
                    let last = run.clone().skip((at - run.start) as usize);
                    let n = last.take_while(|g| self.change(*g, preserved, State::Released)).count() as u64;
                    if n > 0 {
                        let stored = self.geo.bytes(&(at..at + n));
                        self.counters.released_bytes.fetch_add(stored.len, Relaxed);
                        bytes += stored.len;
                        at += n;
                        self.discard_stored(cx, stored).await?;
                    }
                    continue;
                }
                State::Released | State::Lost => at += 1,
            }
        }
        Ok(bytes)
    }

    async fn discard_stored(&self, cx: &Cx, stored: ByteRange) -> IoResult {
        // What is on its way to the target need not arrive, and what has failed is not tried again; a write under way may leave its data there,
        // which nobody can reach any more.
        self.transits.forget(stored);
        let target = self.target.node();
        // Advisory: a target that cannot discard keeps the space.
        match cx.run(&*target, Request::discard(stored)).await {
            Err(e) if e.errno == libc::ENOTSUP => Ok(()),
            other => other,
        }
    }

    fn check_over(&self) -> IoResult {
        if self.is_passive() { Err(self.over_error()) } else { Ok(()) }
    }
}

/// Runs all futures to their ends; the first error among them.
async fn join_all<F: Future<Output = IoResult> + Unpin>(mut futures: Vec<F>) -> IoResult {
    let mut result = Ok(());
    std::future::poll_fn(move |context| {
        futures.retain_mut(|f| match Pin::new(f).poll(context) {
            Poll::Pending => true,
            Poll::Ready(r) => {
                result = result.and(r);
                false
            }
        });
        if futures.is_empty() { Poll::Ready(result) } else { Poll::Pending }
    })
    .await
}

/// Options of the driver `snapshot-access`.
pub static ACCESS_PROPS: PropTable = PropTable {
    driver: "snapshot-access",
    props: &[Prop {
        name: "file",
        ty: PropType::Node,
        default: REQUIRED,
        states: PropStates::OPEN,
        doc: "the copy-before-write filter whose instant is shown",
    }],
};

/// The read-only view of the instant as a node. Discards release granules; those smaller than a granule are kept until they make a whole one.
#[derive(Debug)]
pub struct SnapshotAccess {
    file: Edge,
    point: Arc<Point>,
    /// Discarded pieces of granules not yet whole: granule -> merged ranges.
    partial: Mutex<std::collections::BTreeMap<u64, Vec<ByteRange>>>,
}

/// Partly discarded granules that are remembered; beyond that the oldest is forgotten, which only keeps its space.
const PARTIAL_MAX: usize = 4096;

impl SnapshotAccess {
    /// From options (see [`ACCESS_PROPS`]).
    pub fn open(cx: &OpenCx<'_>, mut o: Options) -> Result<Arc<dyn Node>> {
        let name = o.peek_str("file").map(str::to_owned);
        let file = match &name {
            Some(name) => Edge::to_vertex(cx.graph().node(name)?),
            None => cx.require_child(&mut o, "file")?,
        };
        if name.is_some() {
            o.take_str("file")?;
        }
        o.finish_for(&ACCESS_PROPS)?;
        let node = file.vertex().map_or_else(|| file.node(), |v| v.base().clone());
        let Some(cbw) = node.as_any().downcast_ref::<CbwNode>() else {
            return Err(Error::invalid(
                "option 'file': a snapshot-access node goes above a copy-before-write filter",
            ));
        };
        Ok(Arc::new(Self { point: cbw.point().clone(), file, partial: Mutex::default() }))
    }

    async fn discard(&self, cx: &Cx, range: ByteRange) -> IoResult {
        let whole = self.point.geo.covered(range);
        self.point.release(cx, whole.clone()).await?;
        let all = self.point.geo.touched(range);
        let edges: Vec<u64> = [all.start, all.end.saturating_sub(1)]
            .into_iter()
            .filter(|g| !whole.contains(g) && all.contains(g))
            .collect();
        for g in edges {
            if self.add_partial(g, range) {
                self.point.release(cx, g..g + 1).await?;
            }
        }
        Ok(())
    }

    /// Notes a piece of a granule; whether the granule is whole now.
    fn add_partial(&self, granule: u64, range: ByteRange) -> bool {
        let all = self.point.geo.bytes(&(granule..granule + 1));
        let mut partial = self.partial.lock();
        if partial.len() >= PARTIAL_MAX && !partial.contains_key(&granule) {
            partial.pop_first();
        }
        let pieces = partial.entry(granule).or_default();
        pieces.push(range.intersect(all));
        merge(pieces);
        let whole = pieces.len() == 1 && pieces[0].contains(all);
        if whole {
            partial.remove(&granule);
        }
        whole
    }
}

/// Sorts ranges and joins those that touch.
fn merge(pieces: &mut Vec<ByteRange>) {
    pieces.sort_by_key(|r| r.offset);
    let mut out: Vec<ByteRange> = Vec::with_capacity(pieces.len());
    for r in pieces.drain(..) {
        match out.last_mut() {
            Some(last) if r.offset <= last.end() => last.len = last.len.max(r.end() - last.offset),
            _ => out.push(r),
        }
    }
    *pieces = out;
}

impl Node for SnapshotAccess {
    fn driver(&self) -> &'static str {
        "snapshot-access"
    }

    fn limits(&self) -> Limits {
        // Not `read_only`, which would refuse the reader's discards; writes are refused below.
        Limits {
            discard_align: self.point.geo.granule().min(1 << 31) as u32,
            ..Limits::plain(self.point.geo.size())
        }
    }

    fn children(&self) -> Vec<(&'static str, &Edge)> {
        vec![("file", &self.file)]
    }

    fn plan(&self, req: ReqRef<'_>) -> Plan {
        match req.op {
            Op::Read | Op::Discard => Plan::Slow,
            Op::Flush => Plan::Done(Ok(())),
            Op::Write | Op::WriteZeroes => Plan::Done(Err(IoError::read_only())),
        }
    }

    fn execute<'a>(&'a self, cx: &'a Cx, req: Request) -> NodeFuture<'a, IoResult> {
        Box::pin(async move {
            match req.op {
                Op::Read => self.point.read_snapshot(cx, req.range, &req.bufs).await,
                Op::Discard => self.discard(cx, req.range).await,
                Op::Flush => Ok(()),
                Op::Write | Op::WriteZeroes => Err(IoError::read_only()),
            }
        })
    }

    fn block_status<'a>(&'a self, cx: &'a Cx, range: ByteRange) -> NodeFuture<'a, IoResult<Extent>> {
        Box::pin(self.point.snapshot_status(cx, range))
    }

    fn resize<'a>(&'a self, _cx: &'a Cx, _size: u64, _growth: Growth) -> NodeFuture<'a, IoResult> {
        fixed_size()
    }

    fn settle<'a>(&'a self, _cx: &'a Cx) -> NodeFuture<'a, IoResult> {
        Box::pin(async { Ok(()) })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
