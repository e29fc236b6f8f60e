//! Block status.

bitflags::bitflags! {
    /// What is known of a range; the numbers are those of the C ABI.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct ExtentFlags: u32 {
        /// The layer that answers holds the range (S18: a preserved granule is always this).
        const ALLOCATED = 1;
        /// Reads as zeros.
        const ZERO = 2;
        /// Stored compressed.
        const COMPRESSED = 4;
        /// Dirty in the bitmap asked about.
        const DIRTY = 8;
        /// Reads fail: released or lost.
        const NO_ACCESS = 16;
    }
}

/// A range with one status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes, at least 1.
    pub len: u64,
    /// Status.
    pub flags: ExtentFlags,
    /// Layer that answers, counted from the top (0).
    pub depth: u32,
}

impl Extent {
    /// Allocated data.
    pub const fn data(len: u64) -> Self {
        Self { len, flags: ExtentFlags::ALLOCATED, depth: 0 }
    }

    /// Zeros that take no space.
    pub const fn hole(len: u64) -> Self {
        Self { len, flags: ExtentFlags::ZERO, depth: 0 }
    }

    /// Whether the range reads as zeros.
    pub fn is_zero(self) -> bool {
        self.flags.contains(ExtentFlags::ZERO)
    }
}
