//! Addresses in the image file.
//!
//! Guest offsets are bare `u64` as everywhere at the waist; offsets in a file have a type of their own, so that the two cannot be mixed up. Conversions
//! are by name only.

use std::fmt;

/// A byte offset in the image file or in its data file. Always below 2^56 where it comes from an L1 or L2 entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct HostOffset(pub u64);

impl HostOffset {
    /// The offset as a number of bytes.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// `self + bytes`, or `None` past the largest file offset (2^63 - 1).
    pub const fn checked_add(self, bytes: u64) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(sum) if sum <= i64::MAX as u64 => Some(Self(sum)),
            _ => None,
        }
    }

    /// Whether the offset is a multiple of `align` (a power of two).
    pub const fn is_aligned(self, align: u64) -> bool {
        self.0 & (align - 1) == 0
    }
}

impl fmt::Display for HostOffset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_stop_at_the_largest_file_offset() {
        let max = HostOffset(i64::MAX as u64);
        assert_eq!(max.checked_add(0), Some(max));
        assert_eq!(max.checked_add(1), None);
        assert_eq!(HostOffset(1).checked_add(u64::MAX), None);
    }
}
