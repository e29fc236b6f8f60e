//! Operations, flags, classes.

use super::Buffers;
use crate::units::ByteRange;

/// A data operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Op {
    /// Fill the buffers from the node.
    Read,
    /// Store the buffers on the node.
    Write,
    /// Make the range read as zeros; may not be dropped (S12).
    WriteZeroes,
    /// The range's content is no longer needed; advisory.
    Discard,
    /// Everything acknowledged before is durable when this ends.
    Flush,
}

impl Op {
    /// Whether the operation changes what the node holds.
    pub const fn is_write(self) -> bool {
        matches!(self, Op::Write | Op::WriteZeroes | Op::Discard)
    }

    /// Whether the operation carries buffers of `len` bytes.
    pub const fn has_data(self) -> bool {
        matches!(self, Op::Read | Op::Write)
    }

    /// Lower-case name for reports and options.
    pub const fn name(self) -> &'static str {
        match self {
            Op::Read => "read",
            Op::Write => "write",
            Op::WriteZeroes => "write-zeroes",
            Op::Discard => "discard",
            Op::Flush => "flush",
        }
    }
}

bitflags::bitflags! {
    /// Request flags; the numbers are those of the C ABI.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct Flags: u16 {
        /// Durable when the request completes.
        const FUA = 1;
        /// Write-zeroes may deallocate.
        const MAY_UNMAP = 2;
        /// Write-zeroes fails with ENOTSUP rather than writing zeros slowly.
        const NO_FALLBACK = 4;
        /// Whole clusters may be stored compressed, by a node that can (engine only, not in the C ABI: the driver `compress` sets it).
        const COMPRESS = 256;
    }
}

/// Who a request is for; decides its I/O priority and its place where bandwidth is shared (S39).
/// The order is the order of importance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Class {
    /// The guest.
    #[default]
    Guest,
    /// A read that a guest write waits for: served like the guest's own.
    Copy,
    /// Background work that should make progress: job reads and writes, forced drain.
    Background,
    /// Work that can wait: lazy drain.
    Lazy,
}

/// One request, owned.
#[derive(Debug)]
pub struct Request {
    /// What to do.
    pub op: Op,
    /// How.
    pub flags: Flags,
    /// For whom.
    pub class: Class,
    /// Which bytes of the node; empty for a flush.
    pub range: ByteRange,
    /// Data: `range.len` bytes for reads and writes, empty for the others.
    pub bufs: Buffers,
}

impl Request {
    /// A read into `bufs`.
    pub fn read(offset: u64, bufs: Buffers) -> Self {
        Self::new(Op::Read, offset, bufs.len() as u64, bufs)
    }

    /// A write from `bufs`.
    pub fn write(offset: u64, bufs: Buffers) -> Self {
        Self::new(Op::Write, offset, bufs.len() as u64, bufs)
    }

    /// Zeroes over `range`.
    pub fn write_zeroes(range: ByteRange, flags: Flags) -> Self {
        let mut r = Self::new(Op::WriteZeroes, range.offset, range.len, Buffers::new());
        r.flags = flags;
        r
    }

    /// A discard of `range`.
    pub fn discard(range: ByteRange) -> Self {
        Self::new(Op::Discard, range.offset, range.len, Buffers::new())
    }

    /// A flush.
    pub fn flush() -> Self {
        Self::new(Op::Flush, 0, 0, Buffers::new())
    }

    /// The same request in another class.
    pub fn class(mut self, class: Class) -> Self {
        self.class = class;
        self
    }

    /// The same request with these flags.
    pub fn flags(mut self, flags: Flags) -> Self {
        self.flags = flags;
        self
    }

    /// The view that plans are made from.
    pub fn as_ref(&self) -> ReqRef<'_> {
        ReqRef { op: self.op, flags: self.flags, class: self.class, range: self.range, bufs: &self.bufs }
    }

    fn new(op: Op, offset: u64, len: u64, bufs: Buffers) -> Self {
        Self { op, flags: Flags::empty(), class: Class::Guest, range: ByteRange { offset, len }, bufs }
    }
}

/// A request as a node sees it when it plans: the buffers are borrowed, the range may be shifted.
#[derive(Clone, Copy, Debug)]
pub struct ReqRef<'a> {
    /// What to do.
    pub op: Op,
    /// How.
    pub flags: Flags,
    /// For whom.
    pub class: Class,
    /// Which bytes of the node that is asked.
    pub range: ByteRange,
    /// Data of the whole request.
    pub bufs: &'a Buffers,
}

impl ReqRef<'_> {
    /// The same request at another offset (a window, for example).
    pub fn at(mut self, offset: u64) -> Self {
        self.range.offset = offset;
        self
    }
}
