//! Direct I/O of any offset, length and memory: bounce buffers and read-modify-write, in this one place.
//!
//! A request that a direct file does not take as it is is carried out in pieces of at most [`BATCH_LEN`] through an aligned buffer. Reads are widened to whole
//! blocks. Writes whose range is aligned only change memory. Other writes read the blocks at their ragged ends, merge and write, under an
//! in-flight entry over the whole blocks; every other write to the file is kept out of these blocks meanwhile (see `file/gate.rs`). Count and entry belong to the
//! engine operation, not to the request: they end with what the kernel does, also when the request is dropped before.
//!
//! The last block of a file whose size is no multiple of the alignment cannot be written directly. It is written through the page cache with RWF_DSYNC, not for
//! durability but so that the page is clean again when the entry is given back: a direct write to a neighbouring block then finds nothing
//! that the cache could write back over it. The entry covers the whole page for that reason. Direct reads see the bytes: the kernel writes dirty
//! pages back before it reads.
//!
//! Bounds: [`BOUNCES_MAX`] buffers per file. They are taken before anything that others wait for.

use super::file::{Claim, FileHandle, GateToken};
use super::{FileOp, FileOpKind};
use crate::error::IoResult;
use crate::inflight::{Config, InflightList};
use crate::limits::BATCH_LEN;
use crate::queue::Cx;
use crate::request::{Buffers, Class, Request};
use crate::sync::Arc;
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use crate::units::{ByteRange, align_down, align_up};
use event_listener::Event;
use std::future::Future;
use std::pin::pin;
use std::task::Poll;

/// Bounce buffers of one file in use at a time.
const BOUNCES_MAX: usize = 32;
/// Longest in-flight entry of an aligned operation; a longer one goes on behind it with the next.
const CLAIM_LEN: u64 = 4 << 20;
const WRITE: u8 = 0;

const _: () = assert!(CLAIM_LEN >= BATCH_LEN);

/// What a direct file needs for requests that are not aligned.
#[derive(Debug)]
pub(super) struct Aligner {
    file: Arc<FileHandle>,
    size: AtomicU64,
    /// What the page cache reads and writes at once, at least a block of the file.
    page: u64,
    writes: Arc<InflightList>,
    bounces: Permits,
}

impl Aligner {
    /// For a file of `size` bytes; `page` is a power of two.
    pub(super) fn new(file: Arc<FileHandle>, size: u64, page: u64) -> Self {
        let mut conflicts = [0; 8];
        conflicts[WRITE as usize] = 1 << WRITE;
        let writes = InflightList::new(Config { shard_bytes_log2: 21, shards_log2: 6, conflicts });
        let page = page.max(file.offset_align());
        Self { file, size: AtomicU64::new(size), page, writes, bounces: Permits::default() }
    }

    /// Length of the file in bytes.
    pub(super) fn size(&self) -> u64 {
        // Acquire: partner is `set_size`; who sees the new length may use it.
        self.size.load(Ordering::Acquire)
    }

    /// The file has another length now. Where a last part of a block becomes a whole one, an operation on it that is under way ends as it began.
    pub(super) fn set_size(&self, size: u64) {
        self.size.store(size, Ordering::Release);
    }

    /// What zeroing and punching are done in on a direct file, so that the kernel need not zero parts of blocks through the page cache.
    pub(super) fn page(&self) -> u64 {
        self.page
    }

    /// Whether the file takes the request as it is.
    pub(super) fn fits(&self, range: ByteRange, bufs: &Buffers) -> bool {
        let block = self.file.offset_align();
        if block == 1 {
            return true;
        }
        // Each segment is whole blocks, also because a long list is cut between segments.
        let memory = self.file.memory_align() as u64 - 1;
        (range.offset | range.len) & (block - 1) == 0
            && bufs
                .segments()
                .iter()
                .all(|s| s.as_ptr() as u64 & memory == 0 && s.len() as u64 & (block - 1) == 0)
    }

    /// What an operation that changes whole blocks needs so as not to get between the two halves of a read-modify-write, and the first part of `range` that
    /// it is good for. Goes into the operation.
    pub(super) async fn claim(&self, cx: &Cx, range: ByteRange) -> IoResult<(Option<GateToken>, ByteRange)> {
        if !self.file.is_direct() {
            return Ok((None, range));
        }
        if let Some(token) = self.file.enter() {
            return Ok((Some(token), range));
        }
        let first = ByteRange { offset: range.offset, len: range.len.min(CLAIM_LEN) };
        let entry = ready_or_wait(cx, self.writes.acquire(first, WRITE)).await?;
        self.file.passed_mixed();
        let claim = Arc::new(Claim { _entry: entry, _active: None });
        Ok((Some(GateToken::of(&claim)), first))
    }

    pub(super) async fn read(&self, cx: &Cx, req: Request) -> IoResult {
        let align = self.file.offset_align();
        for (piece, data) in pieces(&req, align) {
            let wide = piece.widen(align, u64::MAX);
            let bounce = self.bounce(cx, wide.len).await?;
            cx.io(self.op(FileOpKind::Read, wide, false, None), bounce.bufs.clone(), req.class).await?;
            data.copy_from(&bounce.bufs.slice((piece.offset - wide.offset) as usize, piece.len as usize));
        }
        Ok(())
    }

    /// `dsync`: durable when it ends.
    pub(super) async fn write(&self, cx: &Cx, req: &Request, dsync: bool) -> IoResult {
        let align = self.file.offset_align();
        if (req.range.offset | req.range.len) & (align - 1) == 0 {
            return self.write_blocks(cx, req, dsync).await;
        }
        for (piece, data) in pieces(req, align) {
            self.modify(cx, piece, &data, dsync, req.class).await?;
        }
        Ok(())
    }

    /// Range aligned, memory perhaps not.
    async fn write_blocks(&self, cx: &Cx, req: &Request, dsync: bool) -> IoResult {
        let fits = self.fits(req.range, &req.bufs);
        let mut at = req.range.offset;
        while at < req.range.end() {
            let left = req.range.end() - at;
            let rest = ByteRange { offset: at, len: if fits { left } else { left.min(BATCH_LEN) } };
            let data = |range: ByteRange| {
                req.bufs.slice((range.offset - req.range.offset) as usize, range.len as usize)
            };
            // Memory first: a request that waits for memory holds nothing that others wait for.
            let bounce = if fits { None } else { Some(self.bounce(cx, rest.len).await?) };
            let (token, part) = self.claim(cx, rest).await?;
            let bufs = match &bounce {
                None => data(part),
                Some(bounce) => {
                    bounce.bufs.copy_from(&data(rest));
                    bounce.bufs.slice(0, part.len as usize)
                }
            };
            cx.io(self.op(FileOpKind::Write, part, dsync, token), bufs, req.class).await?;
            at = part.end();
        }
        Ok(())
    }

    /// Read, modify, write.
    async fn modify(&self, cx: &Cx, piece: ByteRange, data: &Buffers, dsync: bool, class: Class) -> IoResult {
        let wide = piece.widen(self.file.offset_align(), u64::MAX);
        let size = self.size();
        let in_tail = wide.end() > size;
        let held = if in_tail { wide.widen(self.page, u64::MAX) } else { wide };
        let bounce = self.bounce(cx, wide.len).await?;
        let active = ready_or_wait(cx, self.file.begin_rmw()).await?;
        let entry = ready_or_wait(cx, self.writes.acquire(held, WRITE)).await?;
        let claim = Arc::new(Claim { _entry: entry, _active: Some(active) });
        self.merge(cx, piece, wide, data, &bounce.bufs, class).await?;
        let end = if in_tail { align_down(size, self.file.offset_align()) } else { wide.end() };
        let direct = ByteRange { offset: wide.offset, len: end - wide.offset };
        if !direct.is_empty() {
            let op = self.op(FileOpKind::Write, direct, dsync, Some(GateToken::of(&claim)));
            cx.io(op, bounce.bufs.slice(0, direct.len as usize), class).await?;
        }
        if in_tail {
            let tail = ByteRange { offset: end, len: size - end };
            let op = self.op(FileOpKind::Write, tail, true, Some(GateToken::of(&claim)));
            cx.io(op, bounce.bufs.slice(direct.len as usize, tail.len as usize), class).await?;
        }
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
            cx.io(self.op(FileOpKind::Read, head, false, None), bounce.slice(0, align as usize), class)
                .await?;
        }
        if piece.end() != wide.end() && !(head_ragged && head == last) {
            let at = (last.offset - wide.offset) as usize;
            let op = self.op(FileOpKind::Read, last, false, None);
            cx.io(op, bounce.slice(at, align as usize), class).await?;
        }
        bounce.slice((piece.offset - wide.offset) as usize, piece.len as usize).copy_from(data);
        Ok(())
    }

    fn op(&self, kind: FileOpKind, range: ByteRange, dsync: bool, counted: Option<GateToken>) -> FileOp {
        FileOp {
            file: self.file.clone(),
            kind,
            offset: range.offset,
            len: range.len,
            dsync,
            counted,
            pass: None,
        }
    }

    async fn bounce(&self, cx: &Cx, len: u64) -> IoResult<Bounce<'_>> {
        let permit = ready_or_wait(cx, self.bounces.take()).await?;
        let align = self.file.memory_align().max(self.page as usize);
        Ok(Bounce { bufs: Buffers::alloc(len as usize, align), _permit: permit })
    }
}

struct Bounce<'a> {
    bufs: Buffers,
    _permit: Permit<'a>,
}

/// `future`, and the wait is told to those who look after waits only if there is one.
async fn ready_or_wait<F: Future>(cx: &Cx, future: F) -> IoResult<F::Output> {
    let mut future = pin!(future);
    let first = std::future::poll_fn(|context| {
        Poll::Ready(match future.as_mut().poll(context) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        })
    });
    match first.await {
        Some(value) => Ok(value),
        None => cx.waiting(future).await,
    }
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
        // One more than have been told already: each permit that comes back wakes somebody.
        self.0.freed.notify_additional(1);
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
