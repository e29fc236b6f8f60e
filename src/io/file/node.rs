//! The node over a file.

use super::handle::{Aio, FileHandle};
use super::sys;
use crate::error::{IoError, IoResult};
use crate::io::align::Aligner;
use crate::io::{FileOp, FileOpKind};
use crate::limits::BATCH_LEN;
use crate::node::{Edge, Extent, Growth, Limits, Node, NodeFuture, Plan};
use crate::queue::Cx;
use crate::request::{Buffers, Class, Flags, Op, ReqRef, Request};
use crate::sync::Arc;
use crate::sync::atomic::{AtomicBool, Ordering::Relaxed};
use crate::units::{ByteRange, align_down, align_up};
use std::any::Any;
use std::os::fd::AsRawFd;

/// Longest piece of a zeroing or discard that is one system call: what is cancelled or drained waits for one.
const LONG_PIECE: u64 = 64 << 20;

/// A file or block device.
#[derive(Debug)]
pub struct FileNode {
    handle: Arc<FileHandle>,
    info: Info,
    aligner: Aligner,
    /// Cleared when the file system answers that it cannot do it.
    can_zero: AtomicBool,
    can_punch: AtomicBool,
    /// Nothing has been written since the file was found to be one hole.
    untouched: AtomicBool,
    can_reserve: AtomicBool,
}

#[derive(Debug)]
pub(super) struct Info {
    pub(super) name: String,
    pub(super) size: u64,
    pub(super) read_only: bool,
    pub(super) no_flush: bool,
    /// Whether discards punch holes.
    pub(super) discard: bool,
    pub(super) detect_zeroes: DetectZeroes,
    pub(super) is_block: bool,
    /// What the page cache of the file reads and writes at once: a power of two.
    pub(super) page: u64,
    /// Whether the file had no data when it was opened.
    pub(super) is_hole: bool,
    /// Values of the options `locking` and `force-share`.
    pub(super) locking: &'static str,
    pub(super) force_share: bool,
    /// Device and inode.
    pub(super) identity: (u64, u64),
}

/// What becomes of writes whose data is all zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DetectZeroes {
    /// They are written.
    Off,
    /// They become write-zeroes.
    On,
    /// They become write-zeroes that may deallocate.
    Unmap,
}

impl FileNode {
    pub(super) fn new(handle: Arc<FileHandle>, info: Info) -> Self {
        Self {
            aligner: Aligner::new(handle.clone(), info.size, info.page),
            handle,
            untouched: AtomicBool::new(info.is_hole),
            info,
            can_zero: AtomicBool::new(true),
            can_punch: AtomicBool::new(true),
            can_reserve: AtomicBool::new(true),
        }
    }

    /// The open file.
    pub fn handle(&self) -> &Arc<FileHandle> {
        &self.handle
    }

    /// Device and inode: the same for two nodes over one file.
    pub fn identity(&self) -> (u64, u64) {
        self.info.identity
    }

    /// What was opened, for messages.
    pub fn name(&self) -> &str {
        &self.info.name
    }

    fn op(&self, kind: FileOpKind, range: ByteRange, dsync: bool) -> FileOp {
        FileOp {
            file: self.handle.clone(),
            kind,
            offset: range.offset,
            len: range.len,
            dsync: dsync && !self.info.no_flush,
            counted: None,
            pass: None,
        }
    }

    async fn run(&self, cx: &Cx, mut req: Request) -> IoResult {
        if req.op.is_write() && self.info.read_only {
            return Err(IoError::read_only());
        }
        let durable = req.flags.contains(Flags::FUA) && !self.info.no_flush;
        if self.writes_zeros(req.as_ref()) {
            req.op = Op::WriteZeroes;
            req.flags.set(Flags::MAY_UNMAP, self.info.detect_zeroes == DetectZeroes::Unmap);
            req.flags.remove(Flags::NO_FALLBACK);
        }
        match req.op {
            Op::Read => self.aligner.read(cx, req).await,
            Op::Write => {
                self.touch();
                self.aligner.write(cx, &req, durable).await
            }
            Op::WriteZeroes => {
                self.zero(cx, &req).await?;
                self.sync_if(cx, durable, &req).await
            }
            Op::Discard => {
                self.discard(cx, &req).await?;
                self.sync_if(cx, durable, &req).await
            }
            Op::Flush => self.sync_if(cx, !self.info.no_flush, &req).await,
        }
    }

    fn touch(&self) {
        // The look first, so that writes do not all write the same cache line.
        if self.untouched.load(Relaxed) {
            self.untouched.store(false, Relaxed);
        }
    }

    /// Whether a request is a write that is to become a write-zeroes.
    fn writes_zeros(&self, req: ReqRef<'_>) -> bool {
        self.info.detect_zeroes != DetectZeroes::Off && req.op == Op::Write && req.bufs.is_zero()
    }

    async fn sync_if(&self, cx: &Cx, wanted: bool, req: &Request) -> IoResult {
        if !wanted {
            return Ok(());
        }
        let none = ByteRange { offset: 0, len: 0 };
        cx.io(self.op(FileOpKind::Sync, none, false), Buffers::new(), req.class).await
    }

    async fn zero(&self, cx: &Cx, req: &Request) -> IoResult {
        for piece in long_pieces(req.range) {
            let (head, middle, tail) = if self.handle.is_direct() || self.info.is_block {
                split(piece, self.aligner.page())
            } else {
                (empty(piece.offset), piece, empty(piece.end()))
            };
            for edge in [head, tail] {
                self.write_zeros(cx, req, edge).await?;
            }
            if middle.is_empty() || self.allocate_zeros(cx, req, middle).await? {
                continue;
            }
            if req.flags.contains(Flags::NO_FALLBACK) {
                return Err(IoError::unsupported());
            }
            self.write_zeros(cx, req, middle).await?;
        }
        Ok(())
    }

    /// Zeroes by fallocate; false if the file system cannot.
    async fn allocate_zeros(&self, cx: &Cx, req: &Request, range: ByteRange) -> IoResult<bool> {
        let unmap = req.flags.contains(Flags::MAY_UNMAP);
        let modes = [
            (unmap, &self.can_punch, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE),
            (true, &self.can_zero, libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE),
        ];
        for (wanted, possible, mode) in modes {
            if wanted && possible.load(Relaxed) && self.allocate(cx, req, range, mode, possible).await? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// fallocate; false if that is not possible, which is remembered in `possible` where it will never be.
    async fn allocate(
        &self,
        cx: &Cx,
        req: &Request,
        range: ByteRange,
        mode: i32,
        possible: &AtomicBool,
    ) -> IoResult<bool> {
        let mut at = range.offset;
        while at < range.end() {
            let rest = ByteRange { offset: at, len: range.end() - at };
            let (token, part) = self.aligner.claim(cx, rest).await?;
            let mut op = self.op(FileOpKind::Allocate(mode), part, false);
            op.counted = token;
            match cx.io(op, Buffers::new(), req.class).await {
                Ok(()) => at = part.end(),
                Err(e) if matches!(e.errno, libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV) => {
                    possible.store(false, Relaxed);
                    return Ok(false);
                }
                // This range cannot, another may.
                Err(e) if e.errno == libc::EINVAL => return Ok(false),
                Err(e) => return Err(e),
            }
        }
        Ok(true)
    }

    async fn write_zeros(&self, cx: &Cx, req: &Request, range: ByteRange) -> IoResult {
        let mut at = range.offset;
        while at < range.end() {
            let len = BATCH_LEN.min(range.end() - at);
            let zeros = Buffers::alloc(len as usize, self.aligner.page() as usize);
            let write = Request::write(at, zeros).class(req.class);
            self.aligner.write(cx, &write, false).await?;
            at += len;
        }
        Ok(())
    }

    async fn discard(&self, cx: &Cx, req: &Request) -> IoResult {
        if !self.info.discard {
            return Ok(());
        }
        for piece in long_pieces(req.range) {
            let (_, middle, _) = split(piece, self.aligner.page());
            // A piece that ends with the file is whole up to there.
            let middle =
                if piece.end() == self.aligner.size() && !self.handle.is_direct() && !middle.is_empty() {
                    ByteRange { offset: middle.offset, len: piece.end() - middle.offset }
                } else {
                    middle
                };
            if middle.is_empty() || !self.can_punch.load(Relaxed) {
                continue;
            }
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            if !self.allocate(cx, req, middle, mode, &self.can_punch).await? && self.info.is_block {
                self.discard_blocks(cx, middle).await?;
            }
        }
        Ok(())
    }

    async fn set_size(&self, cx: &Cx, size: u64, growth: Growth) -> IoResult {
        let old = self.aligner.size();
        if self.info.read_only {
            return Err(IoError::read_only());
        }
        if self.info.is_block {
            return Err(IoError::unsupported());
        }
        // The last part of a block is written through a descriptor that is there only if there was such a part at open.
        if size > i64::MAX as u64
            || (!self.handle.has_tail() && !size.is_multiple_of(self.handle.offset_align()))
        {
            return Err(IoError::invalid());
        }
        let added = ByteRange { offset: old, len: size.saturating_sub(old) };
        if !added.is_empty() && growth == Growth::Reserved && self.can_reserve.load(Relaxed) {
            match cx.io(self.op(FileOpKind::Allocate(0), added, false), Buffers::new(), Class::Guest).await {
                Ok(()) => {
                    self.aligner.set_size(size);
                    return Ok(());
                }
                Err(e) if matches!(e.errno, libc::EOPNOTSUPP | libc::ENOSYS) => {
                    self.can_reserve.store(false, Relaxed);
                }
                Err(e) => return Err(e),
            }
        }
        if size < old {
            self.aligner.set_size(size);
        }
        match cx.blocking_on(&self.handle, move |file| sys::set_size(file.as_raw_fd(), size)).await? {
            Ok(()) => {
                self.aligner.set_size(size);
                Ok(())
            }
            Err(e) => {
                self.aligner.set_size(old);
                Err(e.into())
            }
        }
    }

    /// A device that cannot deallocate and promise zeros may still be able to deallocate.
    async fn discard_blocks(&self, cx: &Cx, range: ByteRange) -> IoResult {
        let mut at = range.offset;
        while at < range.end() {
            let rest = ByteRange { offset: at, len: range.end() - at };
            let (token, part) = self.aligner.claim(cx, rest).await?;
            let done = cx.blocking_on(&self.handle, move |file| {
                let done = sys::discard_blocks(file.as_raw_fd(), part.offset, part.len);
                // Not before, also if nobody waits any more.
                drop(token);
                done
            });
            match done.await? {
                Ok(()) => at = part.end(),
                Err(e)
                    if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL | libc::ENOTTY)) =>
                {
                    return Ok(());
                }
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    /// The plan of a write that is written as it is.
    fn plan_write(&self, req: ReqRef<'_>) -> Plan {
        if !self.aligner.fits(req.range, req.bufs) {
            return Plan::Slow;
        }
        let mut op = self.op(FileOpKind::Write, req.range, req.flags.contains(Flags::FUA));
        if self.handle.is_direct() {
            let Some(token) = self.handle.enter() else { return Plan::Slow };
            op.counted = Some(token);
        }
        Plan::Io(op)
    }
}

impl Node for FileNode {
    fn driver(&self) -> &'static str {
        "file"
    }

    fn limits(&self) -> Limits {
        Limits {
            request_align: self.handle.offset_align() as u32,
            memory_align: self.handle.memory_align() as u32,
            discard_align: self.aligner.page() as u32,
            zero_init: self.untouched.load(Relaxed),
            read_only: self.info.read_only,
            fast_zeroes: self.can_zero.load(Relaxed) || self.can_punch.load(Relaxed),
            ..Limits::plain(self.aligner.size())
        }
    }

    fn children(&self) -> Vec<(&'static str, &Edge)> {
        Vec::new()
    }

    fn plan(&self, req: ReqRef<'_>) -> Plan {
        match req.op {
            Op::Read if self.aligner.fits(req.range, req.bufs) => {
                Plan::Io(self.op(FileOpKind::Read, req.range, false))
            }
            op if op.is_write() && self.info.read_only => Plan::Done(Err(IoError::read_only())),
            Op::Write if !self.writes_zeros(req) => {
                self.touch();
                self.plan_write(req)
            }
            Op::Flush if self.info.no_flush => Plan::Done(Ok(())),
            Op::Flush => Plan::Io(self.op(FileOpKind::Sync, ByteRange { offset: 0, len: 0 }, false)),
            Op::Discard if !self.info.discard && !req.flags.contains(Flags::FUA) => Plan::Done(Ok(())),
            _ => Plan::Slow,
        }
    }

    fn execute<'a>(&'a self, cx: &'a Cx, req: Request) -> NodeFuture<'a, IoResult> {
        Box::pin(self.run(cx, req))
    }

    fn block_status<'a>(&'a self, cx: &'a Cx, range: ByteRange) -> NodeFuture<'a, IoResult<Extent>> {
        if self.info.is_block {
            return Box::pin(async move { Ok(Extent::data(range.len)) });
        }
        Box::pin(
            async move { cx.blocking_on(&self.handle, move |file| status(file.as_raw_fd(), range)).await? },
        )
    }

    fn resize<'a>(&'a self, cx: &'a Cx, size: u64, growth: Growth) -> NodeFuture<'a, IoResult> {
        Box::pin(self.set_size(cx, size, growth))
    }

    fn settle<'a>(&'a self, _cx: &'a Cx) -> NodeFuture<'a, IoResult> {
        Box::pin(async { Ok(()) })
    }

    fn get(&self, key: &str) -> Option<String> {
        match key {
            "filename" => Some(self.info.name.clone()),
            "read-only" => Some(if self.info.read_only { "on" } else { "off" }.to_owned()),
            "cache.no-flush" => Some(on_off(self.info.no_flush)),
            "discard" => Some(if self.info.discard { "unmap" } else { "ignore" }.to_owned()),
            "force-share" => Some(on_off(self.info.force_share)),
            "locking" => Some(self.info.locking.to_owned()),
            "aio" => Some(if self.handle.aio() == Aio::Uring { "io_uring" } else { "threads" }.to_owned()),
            "cache.direct" => Some(if self.handle.is_direct() { "on" } else { "off" }.to_owned()),
            _ => None,
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn on_off(on: bool) -> String {
    if on { "on" } else { "off" }.to_owned()
}

/// Data or hole at the start of `range`. A file system that cannot tell has data everywhere.
fn status(fd: i32, range: ByteRange) -> IoResult<Extent> {
    let data = match sys::seek(fd, range.offset, false) {
        Ok(at) => at.unwrap_or(u64::MAX),
        Err(_) => return Ok(Extent::data(range.len)),
    };
    if data > range.offset {
        return Ok(Extent::hole(data.min(range.end()) - range.offset));
    }
    let hole = sys::seek(fd, range.offset, true).ok().flatten().unwrap_or(u64::MAX);
    // A file that shrinks meanwhile may answer with a place at or before the start.
    let end = if hole > range.offset { hole.min(range.end()) } else { range.end() };
    Ok(Extent::data(end - range.offset))
}

const fn empty(offset: u64) -> ByteRange {
    ByteRange { offset, len: 0 }
}

/// The ragged start, the whole units and the ragged end of a range.
fn split(range: ByteRange, unit: u64) -> (ByteRange, ByteRange, ByteRange) {
    let first = align_up(range.offset, unit);
    let last = align_down(range.end(), unit);
    if first >= last {
        return (range, empty(range.end()), empty(range.end()));
    }
    (
        ByteRange { offset: range.offset, len: first - range.offset },
        ByteRange { offset: first, len: last - first },
        ByteRange { offset: last, len: range.end() - last },
    )
}

fn long_pieces(range: ByteRange) -> impl Iterator<Item = ByteRange> {
    let mut at = range.offset;
    std::iter::from_fn(move || {
        (at < range.end()).then(|| {
            let end = align_down(at, LONG_PIECE).saturating_add(LONG_PIECE).min(range.end());
            let piece = ByteRange { offset: at, len: end - at };
            at = end;
            piece
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_keeps_every_byte_and_only_whole_units_in_the_middle() {
        for unit in [1, 4, 8] {
            for offset in 0..20 {
                for len in 1..40 {
                    let (a, b, c) = split(ByteRange { offset, len }, unit);
                    assert_eq!(a.len + b.len + c.len, len);
                    assert_eq!((a.offset, b.is_empty() || b.offset == a.end()), (offset, true));
                    assert_eq!(
                        (b.offset % unit, b.len % unit),
                        (if b.is_empty() { b.offset % unit } else { 0 }, 0)
                    );
                }
            }
        }
    }
}
