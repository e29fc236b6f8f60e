//! Which chains a range belongs to.
//!
//! The offset space is cut into units of `1 << shard_bytes_log2` bytes, and each unit is hashed to one of
//! `1 << shards_log2` chains, each on a cache line of its own. A range of up to [`SPAN_MAX`] units is in the chains of all
//! its units; a longer one is in the *wide* chain, which every search also looks at.

use super::chain::Chained;
use super::entry::Node;
use crate::sync::epoch::Atomic;
use crate::units::ByteRange;

/// Units, and so chains, an entry can be in without being wide. Three, so that any range of up to two units' length fits.
pub(super) const SPAN_MAX: usize = 3;

/// One chain of entries.
#[repr(align(64))]
pub(super) struct Shard {
    pub(super) head: Atomic<Node>,
}

/// The chains a range belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Span {
    /// The first `.1` chain numbers of `.0`, no number twice. None for an empty range.
    Narrow([u32; SPAN_MAX], u8),
    /// Too many units.
    Wide,
}

impl Span {
    /// The numbers of the chains; none for a wide span.
    pub(super) fn numbers(&self) -> &[u32] {
        match self {
            Span::Narrow(numbers, count) => &numbers[..usize::from(*count)],
            Span::Wide => &[],
        }
    }
}

/// All chains of a list.
pub(super) struct Shards {
    unit_log2: u32,
    /// 64 minus the log2 of the number of chains.
    hash_shift: u32,
    pub(super) narrow: Box<[Shard]>,
    pub(super) wide: Shard,
}

impl Shards {
    pub(super) fn new(unit_log2: u32, shards_log2: u32) -> Self {
        let shard = || Shard { head: Atomic::null() };
        Self {
            unit_log2,
            hash_shift: 64 - shards_log2,
            narrow: (0..1usize << shards_log2).map(|_| shard()).collect(),
            wide: shard(),
        }
    }

    /// The chains `range` belongs to.
    pub(super) fn span(&self, range: ByteRange) -> Span {
        let mut numbers = [0; SPAN_MAX];
        let mut count = 0u8;
        if !range.is_empty() {
            let first = range.offset >> self.unit_log2;
            let last = (range.end() - 1) >> self.unit_log2;
            if last - first >= SPAN_MAX as u64 {
                return Span::Wide;
            }
            for unit in first..=last {
                let number = self.number(unit);
                if !numbers[..usize::from(count)].contains(&number) {
                    numbers[usize::from(count)] = number;
                    count += 1;
                }
            }
        }
        Span::Narrow(numbers, count)
    }

    /// Fibonacci hashing: neighbours go to different chains, and so do units a power of two apart.
    fn number(&self, unit: u64) -> u32 {
        let hash = unit.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        // A shift by 64 (one chain) would overflow.
        (hash.checked_shr(self.hash_shift).unwrap_or(0)) as u32
    }
}

impl Chained for Node {
    fn link(&self, index: usize) -> &Atomic<Self> {
        &self.links[index]
    }

    fn touch(&self) {
        self.watch.touch();
    }
}

#[cfg(all(test, not(cobweb_loom)))]
mod tests {
    use super::*;

    fn range(offset: u64, len: u64) -> ByteRange {
        ByteRange::new(offset, len).unwrap()
    }

    #[test]
    fn overlapping_narrow_ranges_share_a_chain() {
        let shards = Shards::new(2, 3);
        for a in 0..40 {
            for b in 0..40 {
                for len in 1..9 {
                    let (x, y) = (range(a, len), range(b, 3));
                    let (sx, sy) = (shards.span(x), shards.span(y));
                    assert!(sx != Span::Wide && sy != Span::Wide);
                    if x.overlaps(y) {
                        assert!(sx.numbers().iter().any(|n| sy.numbers().contains(n)), "{x:?} {y:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn up_to_two_units_are_narrow_and_more_than_three_are_wide() {
        let shards = Shards::new(4, 10);
        assert_eq!(shards.span(range(5, 0)).numbers(), &[] as &[u32]);
        assert_eq!(shards.span(range(15, 1)).numbers().len(), 1);
        assert_eq!(shards.span(range(15, 2)).numbers().len(), 2);
        assert_eq!(shards.span(range(15, 32)).numbers().len(), 3);
        assert_eq!(shards.span(range(15, 34)), Span::Wide);
        assert_eq!(shards.span(range(0, i64::MAX as u64)), Span::Wide);
    }

    #[test]
    fn one_chain_takes_all() {
        let shards = Shards::new(4, 0);
        assert_eq!(shards.span(range(1000, 40)).numbers(), &[0]);
        assert_eq!(shards.narrow.len(), 1);
    }

    #[test]
    fn neighbouring_and_strided_units_spread() {
        let shards = Shards::new(0, 6);
        for stride in [1u64, 2, 16, 64, 1024, 1 << 20] {
            let mut hits = [0u32; 64];
            for unit in 0..256 {
                hits[shards.span(range(unit * stride, 1)).numbers()[0] as usize] += 1;
            }
            assert!(hits.iter().all(|&n| n <= 16), "stride {stride}: {hits:?}");
        }
    }
}
