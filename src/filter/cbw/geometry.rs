//! Granules: which there are, which a request touches, how large they are.
//!
//! Pure. A granule is a number; the last one of a disk may be short (S37).

use super::state::Granules;
use crate::error::{Error, Result};
use crate::limits::{BATCH_LEN, GRANULE_MAX, GRANULE_MIN};
use crate::units::ByteRange;

/// Default of the guest-facing granule, in bytes.
pub(super) const GRANULE_DEFAULT: u64 = 64 << 10;

/// A disk as a row of granules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Geometry {
    size: u64,
    log2: u32,
}

impl Geometry {
    /// A disk of `size` bytes in granules of `granule` bytes, a power of two.
    pub(super) fn new(size: u64, granule: u64) -> Self {
        assert!(granule.is_power_of_two(), "a granule of {granule} bytes");
        Self { size, log2: granule.trailing_zeros() }
    }

    /// Length of the disk in bytes.
    pub(super) fn size(self) -> u64 {
        self.size
    }

    /// Length of a granule in bytes; the last one may be shorter.
    pub(super) fn granule(self) -> u64 {
        1 << self.log2
    }

    /// log2 of [`Geometry::granule`].
    pub(super) fn granule_log2(self) -> u32 {
        self.log2
    }

    /// Number of granules.
    pub(super) fn count(self) -> u64 {
        (self.size >> self.log2) + u64::from(self.size & (self.granule() - 1) != 0)
    }

    /// The granule that holds the byte at `offset`.
    pub(super) fn granule_of(self, offset: u64) -> u64 {
        offset >> self.log2
    }

    /// Bytes of `granules`, which are granules of this disk.
    pub(super) fn bytes(self, granules: &Granules) -> ByteRange {
        debug_assert!(granules.end <= self.count());
        let offset = granules.start << self.log2;
        let end = self.size.min(granules.end << self.log2);
        ByteRange { offset, len: end.saturating_sub(offset) }
    }

    /// The granules that share a byte with `range`; what lies past the end of the disk has none.
    pub(super) fn touched(self, range: ByteRange) -> Granules {
        let end = range.end().min(self.size);
        if range.is_empty() || range.offset >= end {
            return 0..0;
        }
        self.granule_of(range.offset)..self.granule_of(end - 1) + 1
    }

    /// The granules that `range` covers wholly (S20); the short one at the end counts as covered when the range reaches the end of the disk.
    pub(super) fn covered(self, range: ByteRange) -> Granules {
        let end = range.end().min(self.size);
        let first = (range.offset >> self.log2) + u64::from(range.offset & (self.granule() - 1) != 0);
        let last = if end == self.size { self.count() } else { end >> self.log2 };
        if range.is_empty() || first >= last { 0..0 } else { first..last }
    }

    /// Granules per batch: as many as fit into [`BATCH_LEN`], at least one.
    pub(super) fn batch(self) -> u64 {
        (BATCH_LEN >> self.log2).max(1)
    }

    /// The first batch of `granules`. Borders of batches are multiples of a batch, so that those of neighbouring requests meet.
    pub(super) fn first_batch(self, granules: &Granules) -> Granules {
        let batch = self.batch();
        granules.start..granules.end.min((granules.start / batch + 1) * batch)
    }
}

/// What decides the size of a granule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct GranuleWish {
    /// Option `granularity`.
    pub(super) granularity: Option<u64>,
    /// Option `min-cluster-size`; 0: by the target.
    pub(super) min_cluster_size: u64,
    /// Cluster of the target in bytes; 0 if it has none.
    pub(super) target_cluster: u64,
    /// Whether the target is a `ram-cache`, which completes the target's clusters itself (S48).
    pub(super) target_is_cache: bool,
}

impl GranuleWish {
    /// The granule in bytes. Refuses values that cannot work together, naming the option.
    pub(super) fn choose(self) -> Result<u64> {
        let Self { granularity, min_cluster_size, target_cluster, target_is_cache } = self;
        check_size("min-cluster-size", min_cluster_size, min_cluster_size == 0)?;
        let cluster = if target_is_cache { 0 } else { target_cluster.next_power_of_two() };
        let granule = match granularity {
            None => GRANULE_DEFAULT.max(min_cluster_size).max(cluster),
            Some(wish) => {
                check_size("granularity", wish, false)?;
                if wish < min_cluster_size {
                    return Err(Error::invalid(format!(
                        "option 'granularity' ({wish}) is below 'min-cluster-size' ({min_cluster_size})"
                    )));
                }
                if wish < cluster {
                    return Err(Error::invalid(format!(
                        "option 'granularity' ({wish}) is below the cluster of the target ({cluster}); that needs a 'ram-cache' as 'target'"
                    )));
                }
                wish
            }
        };
        if granule > GRANULE_MAX {
            return Err(Error::invalid(format!(
                "the cluster of the target ({cluster}) is above the largest granule ({GRANULE_MAX}); put a 'ram-cache' between"
            )));
        }
        if target_is_cache && granule > BATCH_LEN {
            return Err(Error::invalid(format!(
                "options 'granularity' and 'min-cluster-size' are at most {BATCH_LEN} over a 'ram-cache': a granule is one reservation"
            )));
        }
        Ok(granule)
    }
}

fn check_size(key: &str, value: u64, unset: bool) -> Result<()> {
    if unset || (value.is_power_of_two() && (GRANULE_MIN..=GRANULE_MAX).contains(&value)) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "option '{key}' is {value}, not a power of two from {GRANULE_MIN} to {GRANULE_MAX}"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small(size: u64) -> Geometry {
        Geometry { size, log2: 2 }
    }

    #[test]
    fn granules_agree_with_sets_of_bytes_for_every_small_disk_and_range() {
        for size in 0..14u64 {
            let g = small(size);
            let of = |granule: u64| (granule * 4)..((granule + 1) * 4).min(size);
            assert_eq!(g.count(), size.div_ceil(4));
            for offset in 0..16 {
                for len in 0..16 {
                    let r = ByteRange { offset, len };
                    let hit = |n: &u64| of(*n).any(|b| (offset..offset + len).contains(&b));
                    let touched: Vec<_> = (0..g.count()).filter(hit).collect();
                    assert_eq!(g.touched(r).collect::<Vec<_>>(), touched, "{size} {r:?}");
                    let whole = |n: &u64| of(*n).all(|b| (offset..offset + len).contains(&b));
                    let covered: Vec<_> = (0..g.count()).filter(whole).collect();
                    assert_eq!(g.covered(r).collect::<Vec<_>>(), covered, "{size} {r:?}");
                }
            }
        }
    }

    #[test]
    fn bytes_of_all_granules_are_the_disk_and_the_tail_is_short() {
        for size in [512, 4608, (1 << 20) + 512, (64 << 10) - 512] {
            let g = Geometry::new(size, 64 << 10);
            assert_eq!(g.bytes(&(0..g.count())), ByteRange { offset: 0, len: size });
            let tail = g.bytes(&(g.count() - 1..g.count()));
            assert_eq!(tail.end(), size);
            assert!(tail.len > 0 && tail.len < 64 << 10);
        }
    }

    #[test]
    fn batches_cover_the_granules_once_and_in_order() {
        let g = Geometry::new(1 << 30, 64 << 10);
        assert_eq!(g.batch(), 16);
        for start in 0..40 {
            for end in start + 1..60 {
                let mut at = start;
                while at < end {
                    let b = g.first_batch(&(at..end));
                    assert!(b.start == at && b.end > at && b.end <= end && b.end - b.start <= 16);
                    assert!(b.end == end || b.end.is_multiple_of(16));
                    at = b.end;
                }
            }
        }
        let large = Geometry::new(1 << 30, 4 << 20);
        assert_eq!(large.first_batch(&(1..3)), 1..2);
    }

    #[test]
    fn the_granule_follows_the_options_and_the_target() {
        let choose = |granularity, min_cluster_size, target_cluster, target_is_cache| {
            GranuleWish { granularity, min_cluster_size, target_cluster, target_is_cache }.choose().ok()
        };
        let k = |n: u64| n << 10;
        assert_eq!(choose(None, 0, 0, false), Some(k(64)));
        assert_eq!(choose(None, 0, k(4), false), Some(k(64)));
        assert_eq!(choose(None, 0, k(4096), false), Some(k(4096)), "by the target");
        assert_eq!(choose(None, 0, k(4096), true), Some(k(64)), "a cache completes clusters");
        assert_eq!(choose(None, k(128), 0, true), Some(k(128)));
        assert_eq!(choose(Some(k(4)), 0, 0, false), Some(k(4)));
        assert_eq!(choose(Some(k(4)), 0, k(64), true), Some(k(4)));
        assert_eq!(choose(Some(k(4)), 0, k(64), false), None, "below the target's cluster");
        assert_eq!(choose(Some(k(64)), k(128), 0, false), None);
        assert_eq!(choose(Some(k(2)), 0, 0, false), None);
        assert_eq!(choose(Some(k(65)), 0, 0, false), None);
        assert_eq!(choose(None, 3, 0, false), None);
        assert_eq!(choose(Some(k(2048)), 0, 0, true), None, "more than a batch");
        assert_eq!(choose(None, 0, 1 << 40, false), None);
    }
}
