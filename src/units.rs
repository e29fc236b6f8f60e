//! Byte ranges and checked arithmetic on them.

/// A range of bytes: `offset .. offset + len`. The end never overflows (see [`ByteRange::new`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ByteRange {
    /// First byte.
    pub offset: u64,
    /// Number of bytes; may be 0.
    pub len: u64,
}

impl ByteRange {
    /// A range, or `None` if its end would pass `i64::MAX` (the largest file offset of the kernel).
    pub const fn new(offset: u64, len: u64) -> Option<Self> {
        match offset.checked_add(len) {
            Some(end) if end <= i64::MAX as u64 => Some(Self { offset, len }),
            _ => None,
        }
    }

    /// First byte past the range.
    pub const fn end(self) -> u64 {
        self.offset + self.len
    }

    /// Whether the range has no byte.
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Whether the two ranges share a byte. Empty ranges share none.
    pub const fn overlaps(self, other: Self) -> bool {
        self.offset < other.end() && other.offset < self.end() && self.len != 0 && other.len != 0
    }

    /// Whether every byte of `other` is in `self`.
    pub const fn contains(self, other: Self) -> bool {
        self.offset <= other.offset && other.end() <= self.end()
    }

    /// The bytes that both ranges have.
    pub fn intersect(self, other: Self) -> Self {
        let offset = self.offset.max(other.offset);
        Self { offset, len: self.end().min(other.end()).saturating_sub(offset) }
    }

    /// The smallest range of whole units of `align` bytes (a power of two or not, at least 1) around this one, cut at `limit`.
    pub fn widen(self, align: u64, limit: u64) -> Self {
        let offset = self.offset - self.offset % align;
        let end = align_up(self.end(), align).min(limit.max(self.end()));
        Self { offset, len: end - offset }
    }
}

/// `value` rounded up to a multiple of `align` (at least 1); saturates.
pub const fn align_up(value: u64, align: u64) -> u64 {
    let rest = value % align;
    if rest == 0 { value } else { value.saturating_add(align - rest) }
}

/// `value` rounded down to a multiple of `align` (at least 1).
pub const fn align_down(value: u64, align: u64) -> u64 {
    value - value % align
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_never_pass_the_largest_file_offset() {
        assert!(ByteRange::new(u64::MAX, 1).is_none());
        assert!(ByteRange::new(i64::MAX as u64, 1).is_none());
        assert!(ByteRange::new(i64::MAX as u64, 0).is_some());
    }

    #[test]
    fn set_operations_agree_with_sets_of_bytes() {
        for a in 0..8u64 {
            for al in 0..6u64 {
                for b in 0..8u64 {
                    for bl in 0..6u64 {
                        let (x, y) = (ByteRange { offset: a, len: al }, ByteRange { offset: b, len: bl });
                        let common = (a..a + al).filter(|v| (b..b + bl).contains(v)).count() as u64;
                        assert_eq!(x.overlaps(y), common > 0);
                        assert_eq!(x.intersect(y).len, common);
                    }
                }
            }
        }
    }

    #[test]
    fn widen_covers_whole_units_but_not_past_the_limit() {
        let r = ByteRange { offset: 5, len: 4 }.widen(4, 10);
        assert_eq!(r, ByteRange { offset: 4, len: 6 });
        assert_eq!(ByteRange { offset: 8, len: 0 }.widen(4, 100), ByteRange { offset: 8, len: 0 });
    }
}
