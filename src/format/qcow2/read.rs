//! Reads: the fast path that a plan takes, and the slow one that loads, decompresses and goes down the chain.
//!
//! Fast: the whole range is one run that the tables in RAM tell, and one request to one node below carries it out. Slow: the tables of a window of the range are
//! loaded side by side, then the pieces are cut where runs end and read side by side. Windows bound what a request of any length holds in memory.

use super::addr::HostOffset;
use super::cache::Slice;
use super::entry::Words;
use super::image::Image;
use super::join::join_bounded;
use super::l1::L1Table;
use super::map::{Mapped, Run, Slices, Stop, map, place, table_of};
use super::meta_io::read_at;
use crate::error::IoResult;
use crate::node::Plan;
use crate::queue::Cx;
use crate::request::{Buffers, Class, ReqRef, Request};
use crate::sync::Arc;
use crate::sync::atomic::Ordering;
use crate::units::ByteRange;

/// Slices of one window.
const WINDOW_SLICES: u64 = 64;
/// Pieces of one request that are read at a time.
const PIECES: usize = 64;

/// Slices that a request has collected; those of tables that do not exist are not there and not asked for.
pub(super) struct Window {
    first: u64,
    slices: Vec<Option<Arc<Slice>>>,
}

impl Slices for Window {
    fn entry(&self, key: u64, index: usize) -> Option<Words> {
        let at = usize::try_from(key.checked_sub(self.first)?).ok()?;
        self.slices.get(at)?.as_ref().map(|s| s.entry(index))
    }
}

impl Image {
    /// How a read can be carried out without waiting.
    pub(super) fn plan_read(&self, req: ReqRef<'_>) -> Plan {
        if let Some(writer) = self.writer.get() {
            // First what is staged, then the tables: what is settled in between is found in one of them.
            match writer.stages.overlapping(req.range).as_slice() {
                [] => {}
                [stage] if stage.read(req.range, req.bufs) => return Plan::Done(Ok(())),
                _ => return Plan::Slow,
            }
        }
        // Before any lookup: the host cluster that is found stays what it is until the operation has ended.
        let pass = self.is_writable().then(|| self.grace.enter());
        let l1 = self.l1.get();
        let Some(l1) = l1.as_ref() else { return Plan::Slow };
        let Some(run) = self.one_run(l1, req.range) else { return Plan::Slow };
        match run {
            Run::Zero(_) => Plan::Zero,
            Run::Unallocated => self.plan_backing(req),
            Run::Compressed(_) => Plan::Slow,
            Run::Data(host) => {
                let data = self.data().get();
                if !self.in_data_file(&***data, host.get(), req.range.len) {
                    return Plan::Slow;
                }
                match data.plan(req.at(host.get())) {
                    Plan::Io(mut op) => {
                        if let Some(pass) = pass {
                            op.pass = Some(pass.and(op.pass.take()));
                        }
                        Plan::Io(op)
                    }
                    // Done or to be done again by `execute`, which takes a pass of its own.
                    other => other,
                }
            }
        }
    }

    fn plan_backing(&self, req: ReqRef<'_>) -> Plan {
        let Some(backing) = self.backing() else { return Plan::Zero };
        let chain = self.chain.load();
        if let Some(chain) = chain.as_ref() {
            return if chain.is_current() { chain.plan(req) } else { Plan::Slow };
        }
        if !self.chain_tried.load(Ordering::Acquire) {
            return Plan::Slow;
        }
        let below = backing.get();
        let size = below.limits().size;
        if req.range.end() <= size {
            below.plan(req)
        } else if req.range.offset >= size {
            Plan::Zero
        } else {
            Plan::Slow
        }
    }

    /// The run that `range` is, if it is one and all of it is in RAM.
    fn one_run(&self, l1: &L1Table, range: ByteRange) -> Option<Run> {
        let whole = map(&self.layout, l1, &*self.cache, range).ok()?;
        (whole.range == range).then_some(whole.run)
    }

    /// Loads what tells about the start of `range`: a window of slices, side by side. The window may end before the range does.
    pub(super) async fn window(
        &self,
        cx: &Cx,
        l1: &L1Table,
        range: ByteRange,
    ) -> IoResult<(Window, ByteRange)> {
        let first = self.cache.key(range.offset);
        let last = self.cache.key(range.end() - 1).min(first + WINDOW_SLICES - 1);
        let span = self.layout.slice_span();
        let end = ((last + 1).saturating_mul(span)).min(range.end());
        let part = ByteRange { offset: range.offset, len: end - range.offset };
        let per_table = self.layout.slices_per_table() as u64;
        let mut tables = Vec::with_capacity((last - first + 1) as usize);
        for key in first..=last {
            let table = table_of(&self.layout, l1, key / per_table);
            // A bad entry is told when the mapping comes to it, so that the bytes before it can be read.
            tables.push((key, table.ok().flatten()));
        }
        if tables.len() > 1 {
            for (key, table) in &tables {
                if let Some(table) = table {
                    self.cache.prefetch(cx, *key, *table);
                }
            }
        }
        let mut slices = Vec::with_capacity(tables.len());
        for (key, table) in tables {
            slices.push(match table {
                Some(table) => Some(self.cache.get(cx, key, table).await?),
                None => None,
            });
        }
        Ok((Window { first, slices }, part))
    }

    /// Carries out a read of the guest's: what is staged lies over what the tables say.
    pub(super) async fn read_staged(self: &Arc<Self>, cx: &Cx, req: Request) -> IoResult {
        let Some(writer) = self.writer.get() else { return self.read(cx, req).await };
        let stages = writer.stages.overlapping(req.range);
        let (range, bufs) = (req.range, req.bufs.clone());
        self.read(cx, req).await?;
        for stage in stages {
            stage.read(range, &bufs);
        }
        Ok(())
    }

    /// Carries out a read.
    pub(super) async fn read(self: &Arc<Self>, cx: &Cx, req: Request) -> IoResult {
        let pass = self.is_writable().then(|| self.grace.enter());
        let l1 = self.l1_table(cx).await?;
        let mut rest = req.range;
        while !rest.is_empty() {
            let (window, part) = self.window(cx, &l1, rest).await?;
            self.read_part(cx, &l1, &window, part, &req).await?;
            rest = ByteRange { offset: part.end(), len: rest.end() - part.end() };
        }
        drop(pass);
        Ok(())
    }

    async fn read_part(
        self: &Arc<Self>,
        cx: &Cx,
        l1: &L1Table,
        window: &Window,
        part: ByteRange,
        req: &Request,
    ) -> IoResult {
        let mut at = part.offset;
        let mut bad: Option<Stop> = None;
        let pieces = std::iter::from_fn(|| {
            if at >= part.end() || bad.is_some() {
                return None;
            }
            let range = ByteRange { offset: at, len: part.end() - at };
            match map(&self.layout, l1, window, range) {
                Ok(piece) => {
                    at = piece.range.end();
                    Some(piece)
                }
                Err(stop) => {
                    bad = Some(stop);
                    None
                }
            }
        });
        let pieces: Vec<Mapped> = pieces.collect();
        if let Some(stop) = bad {
            return Err(self.bad_entry(stop, l1));
        }
        let reads = pieces.into_iter().map(|piece| {
            let from = (piece.range.offset - req.range.offset) as usize;
            let bufs = req.bufs.slice(from, piece.range.len as usize);
            self.read_piece(cx, piece, bufs, req.class)
        });
        join_bounded(reads, PIECES).await
    }

    async fn read_piece(&self, cx: &Cx, piece: Mapped, bufs: Buffers, class: Class) -> IoResult {
        match piece.run {
            Run::Unallocated => self.read_backing(cx, piece.range.offset, bufs, class).await,
            _ => self.read_held(cx, piece, bufs, class).await,
        }
    }

    /// Reads a piece that this layer has; zeros for one that it has not.
    pub(super) async fn read_held(&self, cx: &Cx, piece: Mapped, bufs: Buffers, class: Class) -> IoResult {
        match piece.run {
            Run::Zero(_) | Run::Unallocated => {
                bufs.fill(0);
                Ok(())
            }
            // Past the end of the file there are zeros (qcow2.md section 7, trap 21).
            Run::Data(host) => read_at(cx, &*self.data().node(), host, &bufs, class).await,
            Run::Compressed(place) => {
                let whole = self.clusters.get(cx, &self.file, place, class).await.inspect_err(|e| {
                    *self.last_error.lock() =
                        Some(format!("compressed cluster of {} bytes at {}: {e}", place.len, place.offset));
                })?;
                let inside = self.layout.in_cluster(piece.range.offset) as usize;
                bufs.copy_range(0, &whole, inside, bufs.len());
                Ok(())
            }
        }
    }

    /// Reads what the layer below shows; zeros past its end, also where a deeper layer is longer (qcow2.md 5.4).
    pub(super) async fn read_backing(&self, cx: &Cx, offset: u64, bufs: Buffers, class: Class) -> IoResult {
        if let Some(chain) = self.chain() {
            return chain.read(cx, offset, &bufs, class).await;
        }
        let below = self.backing().map(|edge| edge.node());
        let size = below.as_ref().map_or(0, |node| node.limits().size);
        let inside = size.saturating_sub(offset).min(bufs.len() as u64) as usize;
        bufs.fill_range(inside, bufs.len() - inside, 0);
        match below {
            Some(node) if inside > 0 => {
                cx.run(&*node, Request::read(offset, bufs.slice(0, inside)).class(class)).await
            }
            _ => Ok(()),
        }
    }

    /// The host place that is set aside for the start of `range`, and for how many bytes; see [`place`].
    pub async fn place(&self, cx: &Cx, range: ByteRange) -> IoResult<(Option<HostOffset>, u64)> {
        let l1 = self.l1_table(cx).await?;
        let (window, part) = self.window(cx, &l1, range).await?;
        Ok(place(&self.layout, &l1, &window, part))
    }

    /// What the start of `range` is in this layer, tables loaded as needed: at most one window is looked at, so it may go on the same way.
    pub async fn mapped(&self, cx: &Cx, range: ByteRange) -> IoResult<Mapped> {
        let l1 = self.l1_table(cx).await?;
        if let Ok(found) = map(&self.layout, &l1, &*self.cache, range)
            && found.range == range
        {
            return Ok(found);
        }
        // One slice first: mostly the answer is shorter than that.
        let near = self.cache.key(range.offset) + 1;
        let first = ByteRange {
            offset: range.offset,
            len: (near * self.layout.slice_span()).min(range.end()) - range.offset,
        };
        let (window, _) = self.window(cx, &l1, first).await?;
        let found = map(&self.layout, &l1, &window, first).map_err(|stop| self.bad_entry(stop, &l1))?;
        if found.range != first || first == range || matches!(found.run, Run::Compressed(_)) {
            return Ok(found);
        }
        let (window, part) = self.window(cx, &l1, range).await?;
        map(&self.layout, &l1, &window, part).map_err(|stop| self.bad_entry(stop, &l1))
    }
}
