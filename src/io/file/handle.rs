//! The open file that operations hold.

use super::gate::Gate;
use super::lock::{self, Use};
use crate::io::{FileOp, FileOpKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

/// Which engine carries out a file's operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aio {
    /// io_uring, where the queue has a ring; else threads.
    Uring,
    /// Pool threads.
    Threads,
}

/// An open file; kept open until the last operation on it has ended.
#[derive(Debug)]
pub struct FileHandle {
    fd: OwnedFd,
    /// Buffered descriptor for the last, partial block of a direct file.
    tail: Option<OwnedFd>,
    aio: Aio,
    offset_align: u32,
    memory_align: u32,
    /// What the open file is locked for, by us.
    locked: Option<Use>,
    pub(super) gate: Gate,
}

impl FileHandle {
    /// A file without alignment, carried out by `aio`.
    pub fn buffered(fd: OwnedFd, aio: Aio) -> Self {
        Self { fd, tail: None, aio, offset_align: 1, memory_align: 1, locked: None, gate: Gate::default() }
    }

    /// A file opened with O_DIRECT; alignments are powers of two. `tail` is a buffered descriptor of the same file, needed when its size is no
    /// multiple of the alignment.
    pub fn direct(
        fd: OwnedFd,
        tail: Option<OwnedFd>,
        aio: Aio,
        offset_align: u32,
        memory_align: u32,
    ) -> Self {
        Self { fd, tail, aio, offset_align, memory_align, locked: None, gate: Gate::default() }
    }

    /// Gives the locks of the open file back when the handle is dropped.
    pub(super) fn locked_for(mut self, usage: Option<Use>) -> Self {
        self.locked = usage;
        self
    }

    /// The descriptor.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Which engine to use.
    pub fn aio(&self) -> Aio {
        self.aio
    }

    /// Offsets and lengths of operations are multiples of this, except for the tail.
    pub fn offset_align(&self) -> u64 {
        u64::from(self.offset_align)
    }

    /// Memory of operations is aligned to this.
    pub fn memory_align(&self) -> usize {
        self.memory_align as usize
    }

    /// Whether the file is open with O_DIRECT.
    pub fn is_direct(&self) -> bool {
        self.offset_align > 1
    }

    /// Whether the last, partial block of the file can be written; always so without alignment.
    pub fn has_tail(&self) -> bool {
        !self.is_direct() || self.tail.is_some()
    }

    /// The descriptor for one operation: a write that is not aligned is one of the tail.
    pub(in crate::io) fn raw_fd(&self, op: &FileOp) -> RawFd {
        let aligned = (op.offset | op.len) & (self.offset_align() - 1) == 0;
        match &self.tail {
            Some(tail) if op.kind == FileOpKind::Write && !aligned => tail.as_raw_fd(),
            _ => self.fd.as_raw_fd(),
        }
    }
}

impl Drop for FileHandle {
    fn drop(&mut self) {
        // Closing is not enough: a child of this process that has not come to its exec yet has the same open file.
        if let Some(usage) = self.locked {
            lock::unlock(self.fd.as_raw_fd(), usage);
        }
    }
}

impl AsRawFd for FileHandle {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}
