//! What stands between a request and a backend: alignment, limits, short transfers, emulation.
//!
//! A request is cut into batches only if the backend wants alignment; a batch is bounced if its range or its memory does not fit. Writes
//! enter the node's list then, and keep their entry in the token until the backend is done, so that a read-modify-write never
//! puts back old neighbours of another write. An entry is taken before the turn in the gate, never while holding one.

use super::node::HostNode;
use super::token::{Answer, NewIo};
use super::{HostLimits, HostOp};
use crate::error::{IoError, IoResult};
use crate::inflight::Entry;
use crate::io::align::Permit;
use crate::limits::BATCH_LEN;
use crate::node::Extent;
use crate::queue::Cx;
use crate::request::{Buffers, Class, Flags, Op};
use crate::sync::Arc;
use crate::units::{ByteRange, align_down, align_up};

/// One request under way: what its pieces have in common.
pub(super) struct Work<'a> {
    pub(super) node: &'a HostNode,
    pub(super) cx: &'a Cx,
    pub(super) limits: HostLimits,
    pub(super) flags: Flags,
    pub(super) class: Class,
}

impl Work<'_> {
    /// Carries out a request.
    pub(super) async fn run(&self, op: Op, range: ByteRange, bufs: Buffers) -> IoResult {
        match op {
            Op::Read => self.read(range, bufs).await,
            Op::Write => {
                self.write(range, bufs).await?;
                self.finish_fua().await
            }
            Op::WriteZeroes => {
                self.write_zeroes(range).await?;
                self.finish_fua().await
            }
            Op::Discard => self.discard(range).await,
            Op::Flush => self.flush().await,
        }
    }

    /// Block status of the first bytes of `range`.
    pub(super) async fn status(&self, range: ByteRange) -> IoResult<Extent> {
        let whole = range.widen(self.align(), self.limits.limits.size);
        let mut extent =
            match self.call(HostOp::BlockStatus, whole, Flags::empty(), Buffers::new(), None).await {
                Ok(Answer::Status(extent)) => extent,
                Ok(Answer::Count(_)) => return Err(IoError::os(libc::EIO)),
                Err(e) if e.errno == libc::ENOTSUP => Extent::data(whole.len),
                Err(e) => return Err(e),
            };
        let skip = range.offset - whole.offset;
        if extent.len <= skip {
            // It ends before the first byte asked about. Data, up to the end of the block, is always a right answer.
            extent = Extent::data(self.align());
        }
        extent.len = (extent.len - skip).min(range.len);
        Ok(extent)
    }

    async fn read(&self, range: ByteRange, bufs: Buffers) -> IoResult {
        for (range, skip) in self.batches(range) {
            let part = bufs.slice(skip as usize, range.len as usize);
            let whole = range.widen(self.align(), self.limits.limits.size);
            if whole == range && self.can_take(&part) {
                self.transfer(Op::Read, range, part, None).await?;
            } else {
                let (bounce, _permit) = self.bounce(whole).await?;
                self.transfer(Op::Read, whole, bounce.clone(), None).await?;
                part.copy_from(&bounce.slice((range.offset - whole.offset) as usize, part.len()));
            }
        }
        Ok(())
    }

    async fn write(&self, range: ByteRange, bufs: Buffers) -> IoResult {
        for (range, skip) in self.batches(range) {
            let part = bufs.slice(skip as usize, range.len as usize);
            self.write_batch(range, part).await?;
        }
        Ok(())
    }

    /// A write of at most one batch, unless the backend takes everything as it is.
    async fn write_batch(&self, range: ByteRange, bufs: Buffers) -> IoResult {
        let whole = range.widen(self.align(), self.limits.limits.size);
        if whole == range && self.can_take(&bufs) {
            let entry = self.enter(whole, false).await?;
            return self.transfer(Op::Write, range, bufs, entry).await;
        }
        // Memory first: a request that waits for memory holds nothing that others wait for.
        let (bounce, _permit) = self.bounce(whole).await?;
        let entry = self.enter(whole, whole != range).await?;
        let skip = range.offset - whole.offset;
        // The blocks that are written in part are read first: the first, and the last if it is another one.
        let (align, last) = (self.align(), align_down(range.end(), self.align()));
        let head = (skip > 0).then_some(whole.offset);
        let tail = (last < range.end() && head != Some(last)).then_some(last);
        for offset in head.into_iter().chain(tail) {
            // Into memory of its own: inside the bounce buffer it might not be aligned as the backend wants it.
            let block = ByteRange { offset, len: align };
            let old = self.memory(align);
            self.transfer(Op::Read, block, old.clone(), entry.clone()).await?;
            bounce.slice((offset - whole.offset) as usize, align as usize).copy_from(&old);
        }
        bounce.slice(skip as usize, bufs.len()).copy_from(&bufs);
        self.transfer(Op::Write, whole, bounce, entry).await
    }

    async fn write_zeroes(&self, range: ByteRange) -> IoResult {
        // Blocks that become zero in part are written; the whole ones between them are the backend's.
        let inner = inner(range, self.align());
        for (from, to) in [(range.offset, inner.offset), (inner.end(), range.end())] {
            if from < to {
                self.write_batch(ByteRange { offset: from, len: to - from }, self.node.zeros(to - from))
                    .await?;
            }
        }
        for piece in pieces(inner, self.long_piece(self.limits.max_zeroes, self.align())) {
            let op = HostOp::Request(Op::WriteZeroes);
            let entry = self.enter(piece, false).await?;
            match self.call(op, piece, self.flags(), Buffers::new(), entry).await {
                Ok(_) => {}
                Err(e) if e.errno == libc::ENOTSUP && !self.flags.contains(Flags::NO_FALLBACK) => {
                    for batch in pieces(piece, BATCH_LEN) {
                        self.write_batch(batch, self.node.zeros(batch.len)).await?;
                    }
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    async fn discard(&self, range: ByteRange) -> IoResult {
        let align = self.align().max(self.limits.limits.discard_align.into());
        for piece in pieces(inner(range, align), self.long_piece(self.limits.max_discard, align)) {
            let op = HostOp::Request(Op::Discard);
            let entry = self.enter(piece, false).await?;
            match self.call(op, piece, self.flags(), Buffers::new(), entry).await {
                Err(e) if e.errno == libc::ENOTSUP => return Ok(()),
                result => result.map(drop)?,
            }
        }
        Ok(())
    }

    async fn flush(&self) -> IoResult {
        let range = ByteRange { offset: 0, len: 0 };
        match self.call(HostOp::Request(Op::Flush), range, Flags::empty(), Buffers::new(), None).await {
            Err(e) if e.errno == libc::ENOTSUP => Ok(()),
            result => result.map(drop),
        }
    }

    async fn finish_fua(&self) -> IoResult {
        if self.flags.contains(Flags::FUA) && !self.limits.fua { self.flush().await } else { Ok(()) }
    }

    /// A read or write within the backend's limits of length and segments; short transfers go on where they stopped.
    async fn transfer(&self, op: Op, range: ByteRange, bufs: Buffers, entry: Option<Arc<Entry>>) -> IoResult {
        let flags = if op == Op::Write { self.flags() & Flags::FUA } else { Flags::empty() };
        let mut done = 0;
        while done < range.len {
            let left = bufs.slice(done as usize, (range.len - done) as usize);
            let left = self.first_part(left);
            let asked = ByteRange { offset: range.offset + done, len: left.len() as u64 };
            let count = match self.call(HostOp::Request(op), asked, flags, left, entry.clone()).await? {
                Answer::Count(n) => n,
                Answer::Status(_) => 0,
            };
            // Less than a unit cannot be continued after; it is done again.
            let progress = if count == asked.len { count } else { align_down(count, self.unit()) };
            if progress == 0 {
                self.node.log("a transfer made no progress: it must complete with the bytes done");
                return Err(IoError::os(libc::EIO));
            }
            done += progress;
        }
        Ok(())
    }

    async fn call(
        &self,
        op: HostOp,
        range: ByteRange,
        flags: Flags,
        bufs: Buffers,
        entry: Option<Arc<Entry>>,
    ) -> IoResult<Answer> {
        let new = NewIo { op, flags, class: self.class, range, bufs, entry, permit: None };
        self.node.call(self.cx, new).await
    }

    /// An entry for a write, if alignment makes entries necessary.
    async fn enter(&self, range: ByteRange, modify: bool) -> IoResult<Option<Arc<Entry>>> {
        if self.align() == 1 { Ok(None) } else { self.node.enter(self.cx, range, modify).await.map(Some) }
    }

    fn align(&self) -> u64 {
        self.limits.limits.request_align.into()
    }

    /// Where a transfer can be cut so that both parts are aligned, in the node and in memory.
    fn unit(&self) -> u64 {
        self.align().max(self.limits.limits.memory_align.into())
    }

    /// Flags for the backend: FUA only if it honours it.
    fn flags(&self) -> Flags {
        if self.limits.fua { self.flags } else { self.flags - Flags::FUA }
    }

    /// Whether memory can be handed over as it is. With an alignment, a list that has to be cut by number of segments might be
    /// cut inside a block, so it is gathered.
    fn can_take(&self, bufs: &Buffers) -> bool {
        let limits = &self.limits.limits;
        bufs.is_aligned(limits.memory_align as usize)
            && (self.align() == 1 || bufs.segments().len() <= limits.max_iov as usize)
    }

    /// As much from the start of `bufs` as the backend takes at once.
    fn first_part(&self, bufs: Buffers) -> Buffers {
        let limits = &self.limits.limits;
        let fits: usize = bufs.segments().iter().take(limits.max_iov as usize).map(|s| s.len()).sum();
        let len = (fits as u64).min(cap(limits.max_transfer.into(), self.unit()));
        if len >= bufs.len() as u64 { bufs } else { bufs.slice(0, len as usize) }
    }

    /// The parts in which a transfer is bounced and enters the list, each with its offset in the request; the whole, if nothing of
    /// that is needed.
    fn batches(&self, range: ByteRange) -> impl Iterator<Item = (ByteRange, u64)> + use<> {
        let plain = self.align() == 1 && self.limits.limits.memory_align == 1;
        pieces(range, if plain { u64::MAX } else { BATCH_LEN }).map(move |p| (p, p.offset - range.offset))
    }

    /// Most bytes of one zeroing or discard, given the backend's own limit. An entry is not to cover the disk.
    fn long_piece(&self, limit: u64, align: u64) -> u64 {
        let own = cap(limit, align);
        if self.align() == 1 { own } else { own.min(LONG_PIECE) }
    }

    async fn bounce(&self, range: ByteRange) -> IoResult<(Buffers, Permit<'_>)> {
        let permit = self.cx.waiting(self.node.bounces.take()).await?;
        Ok((self.memory(range.len), permit))
    }

    fn memory(&self, len: u64) -> Buffers {
        Buffers::alloc(len as usize, self.limits.limits.memory_align.max(4096) as usize)
    }
}

/// Longest zeroing or discard that enters the list, in bytes.
const LONG_PIECE: u64 = 64 << 20;

/// The whole blocks of a range; empty, at the range's end, if there is none.
fn inner(range: ByteRange, align: u64) -> ByteRange {
    let offset = align_up(range.offset, align).min(range.end());
    ByteRange { offset, len: align_down(range.end(), align).saturating_sub(offset) }
}

/// A limit of length as a number of whole blocks, at least one; 0 is none.
fn cap(limit: u64, align: u64) -> u64 {
    if limit == 0 { u64::MAX } else { align_down(limit, align).max(align) }
}

/// `range` cut at multiples of `len` (a power of two or `u64::MAX`) or, for other lengths, from its start.
fn pieces(range: ByteRange, len: u64) -> impl Iterator<Item = ByteRange> {
    let mut at = range.offset;
    std::iter::from_fn(move || {
        let left = range.end() - at;
        let to_cut = if len.is_power_of_two() { len - (at & (len - 1)) } else { len };
        let piece = ByteRange { offset: at, len: left.min(to_cut) };
        at = piece.end();
        (piece.len > 0).then_some(piece)
    })
}
