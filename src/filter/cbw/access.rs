//! The view of the instant: reads, status, release, and the node `snapshot-access`.

use super::node::CbwNode;
use super::point::Point;
use super::state::State;
use crate::error::{Code, Error, IoError, IoResult, Result};
use crate::graph::OpenCx;
use crate::limits::BATCH_LEN;
use crate::node::{Edge, Extent, ExtentFlags, Limits, Node, NodeFuture, Plan};
use crate::options::{Options, Prop, PropStates, PropTable, PropType, props::REQUIRED};
use crate::queue::Cx;
use crate::request::{Buffers, Op, ReqRef, Request};
use crate::sync::atomic::Ordering::Relaxed;
use crate::sync::{Arc, Mutex};
use crate::units::ByteRange;
use std::any::Any;
use std::ops::Range;

impl Point {
    /// Reads the disk as it was. Pieces of at most 1 MiB are registered at the source one at a time (S5).
    pub(super) async fn read_snapshot(&self, cx: &Cx, range: ByteRange, bufs: &Buffers) -> IoResult {
        let mut at = range.offset;
        while at < range.end() {
            let piece = ByteRange { offset: at, len: BATCH_LEN.min(range.end() - at) };
            let to = bufs.slice((at - range.offset) as usize, piece.len as usize);
            at += self.read_piece(cx, piece, &to).await?;
        }
        Ok(())
    }

    /// Reads the start of `piece`; returns how much.
    async fn read_piece(&self, cx: &Cx, piece: ByteRange, bufs: &Buffers) -> IoResult<u64> {
        loop {
            // S15: register first, then look.
            let registered = self.fence.freeze(piece);
            self.check_broken()?;
            let (state, run) = self.same_state(piece);
            let here = self.bytes(&run).intersect(piece);
            let to = bufs.slice((here.offset - piece.offset) as usize, here.len as usize);
            match state {
                State::Needed => {
                    let file = self.file.node();
                    cx.run(&*file, Request::read(here.offset, to)).await?;
                    // Guests may have been let go by a failure meanwhile: then what was read may be new data (S34).
                    self.check_broken()?;
                    if self.states.find(run, State::Lost).is_some() {
                        continue;
                    }
                    drop(registered);
                }
                State::Reading => {
                    // Withdraw before waiting for anything (S15).
                    drop(registered);
                    cx.waiting(self.fence.copies_ended(here)).await?;
                    continue;
                }
                State::Preserved => {
                    drop(registered);
                    match self.copy_transit(here, &to) {
                        Some(len) => return Ok(len),
                        None => {
                            let here = self.before_transit(here);
                            let to = to.slice(0, here.len as usize);
                            let target = self.target.node();
                            cx.run(&*target, Request::read(here.offset, to)).await?;
                            self.check_broken()?;
                            return Ok(here.len);
                        }
                    }
                }
                State::Released => return Err(IoError::new(libc::EACCES, Code::Released)),
                State::Lost => {
                    let saved = self.lost.at(here.offset).map(|l| l.error);
                    let errno = saved.map_or(libc::EIO, |e| e.errno);
                    return Err(IoError::new(errno, Code::RangeLost));
                }
            }
            return Ok(here.len);
        }
    }

    /// The state at the start of `range` and the run of granules that share it.
    fn same_state(&self, range: ByteRange) -> (State, Range<u64>) {
        let all = self.granules(range);
        let state = self.states.get(all.start);
        let end = (all.start + 1..all.end).find(|g| self.states.get(*g) != state).unwrap_or(all.end);
        (state, all.start..end)
    }

    /// Copies the start of `here` out of a transit buffer (S73: into memory of the reader); `None` if there is none.
    fn copy_transit(&self, here: ByteRange, to: &Buffers) -> Option<u64> {
        let (at, bufs) = {
            let transit = self.transit.lock();
            let (at, t) = transit.range(..=here.offset).next_back()?;
            (*at, t.bufs.clone())
        };
        let inside = here.offset - at;
        let len = (bufs.len() as u64).checked_sub(inside).filter(|n| *n > 0)?.min(here.len);
        to.slice(0, len as usize).copy_from(&bufs.slice(inside as usize, len as usize));
        Some(len)
    }

    /// `here`, cut where a transit buffer begins.
    fn before_transit(&self, here: ByteRange) -> ByteRange {
        let transit = self.transit.lock();
        let next = transit.range(here.offset..here.end()).next().map_or(here.end(), |(at, _)| *at);
        // A buffer at the very start has just been written: then the target has it.
        if next == here.offset { here } else { ByteRange { offset: here.offset, len: next - here.offset } }
    }

    /// Status of the view: preserved granules are data, what cannot be read is cut off and marked (S18).
    pub(super) async fn snapshot_status(&self, cx: &Cx, range: ByteRange) -> IoResult<Extent> {
        self.check_broken()?;
        let piece = ByteRange { offset: range.offset, len: range.len.min(BATCH_LEN * 64) };
        let (state, run) = self.same_state(piece);
        let here = self.bytes(&run).intersect(piece);
        match state {
            State::Needed => {
                let file = self.file.node();
                let e = cx.status(&*file, here).await?;
                // A write that has come in between would show the new disk's status.
                let (now, _) = self.same_state(ByteRange { offset: here.offset, len: 1 });
                let len = e.len.min(here.len);
                Ok(if now == State::Needed {
                    Extent { len, ..e }
                } else {
                    Extent::data(len.min(self.config.granule))
                })
            }
            State::Reading | State::Preserved => Ok(Extent::data(here.len)),
            State::Released | State::Lost => {
                Ok(Extent { len: here.len, flags: ExtentFlags::NO_ACCESS, depth: 0 })
            }
        }
    }

    /// Releases whole granules: they are not part of the snapshot any more (S20). Returns the bytes released.
    pub(super) async fn release(&self, cx: &Cx, run: Range<u64>) -> IoResult<u64> {
        let mut bytes = 0;
        let mut stored: Option<Range<u64>> = None;
        for g in run {
            loop {
                if self.settle(g, State::Needed, State::Released) {
                    break;
                }
                if self.settle(g, State::Preserved, State::Released) {
                    match &mut stored {
                        Some(r) if r.end == g => r.end = g + 1,
                        Some(r) => {
                            let done = std::mem::replace(r, g..g + 1);
                            self.discard_stored(cx, &done).await?;
                        }
                        None => stored = Some(g..g + 1),
                    }
                    break;
                }
                if self.states.get(g) != State::Reading {
                    break;
                }
                cx.waiting(self.fence.copies_ended(self.bytes(&(g..g + 1)))).await?;
            }
            bytes += self.bytes(&(g..g + 1)).len;
        }
        if let Some(r) = stored {
            self.discard_stored(cx, &r).await?;
        }
        self.counters.released_bytes.fetch_add(bytes, Relaxed);
        Ok(bytes)
    }

    async fn discard_stored(&self, cx: &Cx, run: &Range<u64>) -> IoResult {
        let target = self.target.node();
        // Advisory: a target that cannot discard keeps the space.
        match cx.run(&*target, Request::discard(self.bytes(run))).await {
            Err(e) if e.errno == libc::ENOTSUP => Ok(()),
            other => other,
        }
    }

    fn check_broken(&self) -> IoResult {
        if !self.is_passive() {
            return Ok(());
        }
        let errno = self.broken().map_or(libc::ESHUTDOWN, |r| r.error.errno);
        Err(IoError::new(errno, Code::SnapshotBroken))
    }
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
        let whole = self.point.whole_granules(range);
        self.point.release(cx, whole.clone()).await?;
        let all = self.point.granules(range);
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
        let all = self.point.bytes(&(granule..granule + 1));
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
            discard_align: self.point.config.granule.min(1 << 31) as u32,
            ..Limits::plain(self.point.size)
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

    fn settle<'a>(&'a self, _cx: &'a Cx) -> NodeFuture<'a, IoResult> {
        Box::pin(async { Ok(()) })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
