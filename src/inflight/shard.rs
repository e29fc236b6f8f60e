//! Which chains a range belongs to.
//!
//! The offset space is cut into units of `1 << shard_bytes_log2` bytes, and each unit is hashed to one of
//! `1 << shards_log2` chains. A range of up to [`SPAN_MAX`] units is in the chains of all its units; a longer one is in the
//! *wide* chain, which every search also looks at.
//!
//! The heads lie side by side, eight to a cache line: many chains that fit into the first-level cache serve better than
//! few that have a line each, and two threads meet on one line seldom when there are hundreds.

use super::chain::Chained;
use super::entry::Node;
use crate::sync::epoch::Atomic;
use crate::units::ByteRange;

/// Units, and so chains, an entry can be in without being wide. Three, so that any range of up to two units' length fits.
pub(super) const SPAN_MAX: usize = 3;

/// Number of a chain.
pub(super) type Number = u32;

/// The number of the wide chain.
pub(super) const WIDE: Number = Number::MAX;

/// The chains of a range: at least one, none twice, and the wide one only alone.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    numbers: [Number; SPAN_MAX],
    count: usize,
}

impl Span {
    /// Their numbers; an entry's link has the same index as the chain here.
    pub(super) fn numbers(&self) -> &[Number] {
        &self.numbers[..self.count]
    }
}

/// All chains of a list.
pub(super) struct Shards {
    unit_log2: u32,
    /// 64 minus the log2 of the number of chains.
    hash_shift: u32,
    narrow: Box<[Atomic<Node>]>,
    wide: Atomic<Node>,
}

impl Shards {
    pub(super) fn new(unit_log2: u32, shards_log2: u32) -> Self {
        Self {
            unit_log2,
            hash_shift: 64 - shards_log2,
            narrow: (0..1usize << shards_log2).map(|_| Atomic::null()).collect(),
            wide: Atomic::null(),
        }
    }

    /// The head of a chain.
    pub(super) fn head(&self, number: Number) -> &Atomic<Node> {
        if number == WIDE { &self.wide } else { &self.narrow[number as usize] }
    }

    /// The numbers of all chains but the wide one.
    pub(super) fn narrow(&self) -> std::ops::Range<Number> {
        0..self.narrow.len() as Number
    }

    /// Calls `visit` for each chain of `range`, with its place in the span.
    #[inline]
    pub(super) fn each(&self, range: ByteRange, mut visit: impl FnMut(usize, Number)) {
        // Nearly always one, and that without going through memory.
        match self.single(range) {
            Some(number) => visit(0, number),
            None => self.span(range).numbers().iter().enumerate().for_each(|(i, &n)| visit(i, n)),
        }
    }

    /// The only chain of `range`, if it lies within one unit.
    #[inline]
    pub(super) fn single(&self, range: ByteRange) -> Option<Number> {
        let (first, last) = self.units(range);
        (first == last).then(|| self.number(first))
    }

    /// The chains of `range`.
    #[inline(never)]
    pub(super) fn span(&self, range: ByteRange) -> Span {
        let (first, last) = self.units(range);
        if last - first >= SPAN_MAX as u64 {
            return Span { numbers: [WIDE; SPAN_MAX], count: 1 };
        }
        let mut span = Span { numbers: [0; SPAN_MAX], count: 0 };
        for unit in first..=last {
            let number = self.number(unit);
            if !span.numbers().contains(&number) {
                span.numbers[span.count] = number;
                span.count += 1;
            }
        }
        span
    }

    /// First and last unit. An empty range overlaps nothing, but every entry is in some chain (see `core`).
    fn units(&self, range: ByteRange) -> (u64, u64) {
        (range.offset >> self.unit_log2, (range.offset + range.len.saturating_sub(1)) >> self.unit_log2)
    }

    /// Fibonacci hashing: neighbours go to different chains, and so do units a power of two apart.
    fn number(&self, unit: u64) -> Number {
        let hash = unit.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        // A shift by 64 (one chain) would overflow.
        hash.checked_shr(self.hash_shift).unwrap_or(0) as Number
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
                    assert!(sx.numbers()[0] != WIDE && sy.numbers()[0] != WIDE);
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
        assert_eq!(shards.span(range(16, 0)).numbers().len(), 1);
        assert_eq!(shards.span(range(15, 1)).numbers().len(), 1);
        assert_eq!(shards.span(range(15, 2)).numbers().len(), 2);
        assert_eq!(shards.span(range(15, 32)).numbers().len(), 3);
        assert_eq!(shards.span(range(15, 34)).numbers(), [WIDE]);
        assert_eq!(shards.span(range(0, i64::MAX as u64)).numbers(), [WIDE]);
    }

    #[test]
    fn each_visits_the_span() {
        let shards = Shards::new(2, 3);
        for offset in 0..64 {
            for len in 0..16 {
                let (range, mut seen) = (range(offset, len), Vec::new());
                shards.each(range, |index, number| {
                    assert_eq!(index, seen.len());
                    seen.push(number);
                });
                assert_eq!(seen, shards.span(range).numbers(), "{range:?}");
            }
        }
    }

    #[test]
    fn one_chain_takes_all() {
        let shards = Shards::new(4, 0);
        assert_eq!(shards.span(range(1000, 40)).numbers(), &[0]);
        assert_eq!(shards.narrow(), 0..1);
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
