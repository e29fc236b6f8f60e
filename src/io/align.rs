//! Direct I/O of any offset, length and memory: bounce buffers and read-modify-write, in this one place.
//!
//! A request that a direct file does not take as it is is carried out in pieces of at most [`BATCH_LEN`] through an aligned buffer. Reads are widened to whole blocks. Writes
//! whose range is aligned only change memory. Other writes read the blocks at their ragged ends, merge and write, holding an in-flight entry over
//! the whole blocks; every other write to the file is kept out of these blocks meanwhile (see `file/gate.rs`).
//!
//! The last block of a file whose size is no multiple of the alignment cannot be written directly. It is written through the page cache, durably, so that the
//! page is clean again when the entry is given back and a direct write to its neighbours finds nothing that could be written over it. The entry covers the
//! whole page for that reason.

use super::file::FileHandle;
use super::{FileOp, FileOpKind};
use crate::error::IoResult;
use crate::inflight::{Config, Entry, InflightList};
use crate::limits::BATCH_LEN;
use crate::queue::Cx;
use crate::request::{Buffers, Class, Flags, Request};
use crate::sync::Arc;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::units::{ByteRange, align_down, align_up};
use event_listener::Event;

/// Bounce buffers of one file in use at a time.
const BOUNCES_MAX: usize = 32;
/// Page of the page cache.
const PAGE: u64 = 4096;
const WRITE: u8 = 0;

/// What a direct file needs for requests that are not aligned.
#[derive(Debug)]
pub(super) struct Aligner {
    file: Arc<FileHandle>,
    size: u64,
    writes: Arc<InflightList>,
    bounces: Permits,
}

impl Aligner {
    pub(super) fn new(file: Arc<FileHandle>, size: u64) -> Self {
        let mut conflicts = [0; 8];
        conflicts[WRITE as usize] = 1 << WRITE;
        let writes = InflightList::new(Config { shard_bytes_log2: 24, shards_log2: 6, conflicts });
        Self { file, size, writes, bounces: Permits::default() }
    }

    /// Whether the file takes the request as it is.
    pub(super) fn is_aligned(&self, range: ByteRange, bufs: &Buffers) -> bool {
        (range.offset | range.len) & (self.file.offset_align() - 1) == 0
            && bufs.is_aligned(self.file.memory_align())
    }

    /// Excludes every other write to the blocks of `range`, for an operation that is not a plain aligned write (zeroes, discards).
    pub(super) async fn exclusive(&self, cx: &Cx, range: ByteRange) -> IoResult<(impl Sized + use<>, Entry)> {
        let active = cx.waiting(self.file.begin_rmw()).await?;
        let entry = cx.waiting(self.writes.acquire(range, WRITE)).await?;
        Ok((active, entry))
    }

    pub(super) async fn read(&self, cx: &Cx, req: Request) -> IoResult {
        let align = self.file.offset_align();
        for (piece, data) in pieces(&req, align) {
            let wide = piece.widen(align, u64::MAX);
            let bounce = self.bounce(cx, wide.len).await?;
            cx.io(self.op(FileOpKind::Read, wide, false), bounce.bufs.clone(), req.class).await?;
            data.copy_from(&bounce.bufs.slice((piece.offset - wide.offset) as usize, piece.len as usize));
        }
        Ok(())
    }

    pub(super) async fn write(&self, cx: &Cx, req: Request) -> IoResult {
        let align = self.file.offset_align();
        let dsync = req.flags.contains(Flags::FUA);
        let ragged = (req.range.offset | req.range.len) & (align - 1) != 0;
        if !ragged {
            if let Some(token) = self.file.enter() {
                return self.write_whole_blocks(cx, &req, dsync, Some(token)).await;
            }
            let entry = cx.waiting(self.writes.acquire(req.range, WRITE)).await?;
            let result = self.write_whole_blocks(cx, &req, dsync, None).await;
            drop(entry);
            return result;
        }
        let active = cx.waiting(self.file.begin_rmw()).await?;
        for (piece, data) in pieces(&req, align) {
            let wide = piece.widen(align, u64::MAX);
            let in_tail = wide.end() > self.size;
            let held = if in_tail { wide.widen(PAGE, u64::MAX) } else { wide };
            // Memory first: a request that waits for memory holds nothing that others wait for.
            let bounce = self.bounce(cx, wide.len).await?;
            let entry = cx.waiting(self.writes.acquire(held, WRITE)).await?;
            self.merge(cx, piece, wide, &data, &bounce.bufs, req.class).await?;
            let direct_end = if in_tail { align_down(self.size, align) } else { wide.end() };
            let direct = (direct_end - wide.offset) as usize;
            if direct > 0 {
                let range = ByteRange { offset: wide.offset, len: direct as u64 };
                cx.io(self.op(FileOpKind::Write, range, dsync), bounce.bufs.slice(0, direct), req.class)
                    .await?;
            }
            if in_tail {
                let range = ByteRange { offset: direct_end, len: self.size - direct_end };
                let bufs = bounce.bufs.slice(direct, range.len as usize);
                cx.io(self.op(FileOpKind::Write, range, true), bufs, req.class).await?;
            }
            drop(entry);
        }
        drop(active);
        Ok(())
    }

    /// Range aligned, memory perhaps not.
    async fn write_whole_blocks(
        &self,
        cx: &Cx,
        req: &Request,
        dsync: bool,
        token: Option<super::file::GateToken>,
    ) -> IoResult {
        if req.bufs.is_aligned(self.file.memory_align()) {
            cx.io(self.op(FileOpKind::Write, req.range, dsync), req.bufs.clone(), req.class).await?;
        } else {
            for (piece, data) in pieces(req, self.file.offset_align()) {
                let bounce = self.bounce(cx, piece.len).await?;
                bounce.bufs.copy_from(&data);
                cx.io(self.op(FileOpKind::Write, piece, dsync), bounce.bufs.clone(), req.class).await?;
            }
        }
        drop(token);
        Ok(())
    }

    /// Reads the blocks at the ragged ends of `piece` into the buffer for `wide`, and puts the data over them.
    async fn merge(
        &self,
        cx: &Cx,
        piece: ByteRange,
        wide: ByteRange,
        data: &Buffers,
        bounce: &Buffers,
        class: Class,
    ) -> IoResult {
        let align = self.file.offset_align();
        let head = ByteRange { offset: wide.offset, len: align };
        let last = ByteRange { offset: wide.end() - align, len: align };
        let head_ragged = piece.offset != wide.offset;
        if head_ragged {
            cx.io(self.op(FileOpKind::Read, head, false), bounce.slice(0, align as usize), class).await?;
        }
        if piece.end() != wide.end() && !(head_ragged && head == last) {
            let at = (last.offset - wide.offset) as usize;
            cx.io(self.op(FileOpKind::Read, last, false), bounce.slice(at, align as usize), class).await?;
        }
        bounce.slice((piece.offset - wide.offset) as usize, piece.len as usize).copy_from(data);
        Ok(())
    }

    fn op(&self, kind: FileOpKind, range: ByteRange, dsync: bool) -> FileOp {
        FileOp { file: self.file.clone(), kind, offset: range.offset, len: range.len, dsync, counted: None }
    }

    async fn bounce(&self, cx: &Cx, len: u64) -> IoResult<Bounce<'_>> {
        let permit = cx.waiting(self.bounces.take()).await?;
        let align = self.file.memory_align().max(self.file.offset_align() as usize).max(PAGE as usize);
        Ok(Bounce { bufs: Buffers::alloc(len as usize, align), _permit: permit })
    }
}

struct Bounce<'a> {
    bufs: Buffers,
    _permit: Permit<'a>,
}

/// The request in pieces of at most one batch, cut at multiples of the alignment.
fn pieces(req: &Request, align: u64) -> impl Iterator<Item = (ByteRange, Buffers)> + '_ {
    let range = req.range;
    let mut at = range.offset;
    std::iter::from_fn(move || {
        if at >= range.end() {
            return None;
        }
        let end = align_up(at + 1, align).max(align_down(at, align) + BATCH_LEN - align).min(range.end());
        let piece = ByteRange { offset: at, len: end - at };
        let data = req.bufs.slice((at - range.offset) as usize, piece.len as usize);
        at = end;
        Some((piece, data))
    })
}

/// A counting semaphore for tasks: bounds the bounce buffers of one node.
#[derive(Debug, Default)]
pub(super) struct Permits {
    used: AtomicUsize,
    freed: Event,
}

/// The right to one bounce buffer.
#[derive(Debug)]
pub(super) struct Permit<'a>(&'a Permits);

impl Permits {
    /// Waits for a permit; hold no in-flight entry meanwhile.
    pub(super) async fn take(&self) -> Permit<'_> {
        loop {
            if let Some(p) = self.try_take() {
                return p;
            }
            let listener = self.freed.listen();
            if let Some(p) = self.try_take() {
                return p;
            }
            listener.await;
        }
    }

    fn try_take(&self) -> Option<Permit<'_>> {
        // AcqRel: nothing is published through the count; the event orders the wake-up.
        let took = self
            .used
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| (n < BOUNCES_MAX).then_some(n + 1));
        took.is_ok().then(|| Permit(self))
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.0.used.fetch_sub(1, Ordering::AcqRel);
        self.0.freed.notify(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_the_request_and_each_widens_to_at_most_one_batch() {
        for align in [1u64, 512, 4096] {
            for offset in [0, 1, 511, 512, 4095, 1 << 20] {
                for len in [1, 511, 4096, (1 << 20) - 1, 1 << 20, (1 << 20) + 513, 3 << 20] {
                    let req = Request::read(offset, Buffers::alloc(len, 64));
                    let mut at = offset;
                    for (piece, data) in pieces(&req, align) {
                        assert_eq!((piece.offset, piece.len), (at, data.len() as u64));
                        assert!(piece.widen(align, u64::MAX).len <= BATCH_LEN);
                        at = piece.end();
                    }
                    assert_eq!(at, offset + len as u64);
                }
            }
        }
    }
}
