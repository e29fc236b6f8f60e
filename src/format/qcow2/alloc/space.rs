//! Free space in the file, found by length.
//!
//! Extents of host bytes that no refcount counts (or soon will not), merged with their neighbours. It is an index and no truth: what is forgotten here when
//! there are too many extents is free on the disk all the same, and found again when its refcounts are next read. All offsets and lengths are
//! multiples of the cluster size; the caller sees to that.

use crate::units::ByteRange;
use std::collections::{BTreeMap, BTreeSet};

/// The index.
#[derive(Debug, Default)]
pub struct Space {
    /// Offset to length.
    by_offset: BTreeMap<u64, u64>,
    /// (length, offset) of the same extents.
    by_len: BTreeSet<(u64, u64)>,
    total: u64,
    extents_max: usize,
}

impl Space {
    /// An empty index that keeps at most `extents_max` extents, the longest ones.
    pub fn new(extents_max: usize) -> Self {
        Self { extents_max, ..Self::default() }
    }

    /// Bytes in the index.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Length of the longest extent.
    pub fn longest(&self) -> u64 {
        self.by_len.last().map_or(0, |(len, _)| *len)
    }

    /// Adds a free range. What of it is there already stays.
    pub fn insert(&mut self, range: ByteRange) {
        if range.is_empty() {
            return;
        }
        let (mut start, mut end) = (range.offset, range.end());
        // Everything that overlaps or touches becomes one extent.
        while let Some((&offset, &len)) = self.by_offset.range(..=end).next_back() {
            if offset + len < start {
                break;
            }
            self.forget(offset, len);
            start = start.min(offset);
            end = end.max(offset + len);
        }
        self.add(start, end - start);
        while self.by_offset.len() > self.extents_max {
            let Some(&(len, offset)) = self.by_len.first() else { break };
            self.forget(offset, len);
        }
    }

    /// Takes a range out, wherever parts of it are.
    pub fn remove(&mut self, range: ByteRange) {
        if range.is_empty() {
            return;
        }
        while let Some((&offset, &len)) = self.by_offset.range(..range.end()).next_back() {
            let end = offset + len;
            if end <= range.offset {
                break;
            }
            self.forget(offset, len);
            if end > range.end() {
                self.add(range.end(), end - range.end());
            }
            if offset < range.offset {
                self.add(offset, range.offset - offset);
                break;
            }
        }
    }

    /// Takes `len` bytes (not 0): the start of the shortest extent that has them, else the longest extent as it is.
    pub fn take(&mut self, len: u64) -> Option<ByteRange> {
        let found = self.by_len.range((len, 0)..).next().or_else(|| self.by_len.last()).copied();
        let (had, offset) = found?;
        self.forget(offset, had);
        if had > len {
            self.add(offset + len, had - len);
        }
        Some(ByteRange { offset, len: had.min(len) })
    }

    /// The extents in the order of their offsets.
    pub fn extents(&self) -> impl Iterator<Item = ByteRange> + '_ {
        self.by_offset.iter().map(|(&offset, &len)| ByteRange { offset, len })
    }

    fn add(&mut self, offset: u64, len: u64) {
        self.by_offset.insert(offset, len);
        self.by_len.insert((len, offset));
        self.total += len;
    }

    fn forget(&mut self, offset: u64, len: u64) {
        self.by_offset.remove(&offset);
        self.by_len.remove(&(len, offset));
        self.total -= len;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rt::{Rng, real::SplitMix};

    fn range(offset: u64, len: u64) -> ByteRange {
        ByteRange { offset, len }
    }

    #[test]
    fn random_changes_agree_with_a_set_of_clusters() {
        let rng = SplitMix::new(11);
        let mut space = Space::new(1000);
        let mut model = [false; 200];
        for _ in 0..20_000 {
            let at = rng.next() % 200;
            let len = 1 + rng.next() % (200 - at).min(12);
            match rng.next() % 3 {
                0 => {
                    space.insert(range(at, len));
                    model[at as usize..(at + len) as usize].fill(true);
                }
                1 => {
                    space.remove(range(at, len));
                    model[at as usize..(at + len) as usize].fill(false);
                }
                _ => {
                    let longest = runs(&model).iter().map(|r| r.len).max();
                    assert_eq!(space.longest(), longest.unwrap_or(0));
                    let Some(got) = space.take(len) else {
                        assert_eq!(longest, None);
                        continue;
                    };
                    assert_eq!(got.len, len.min(longest.expect("there was one")));
                    assert!(model[got.offset as usize..got.end() as usize].iter().all(|free| *free));
                    model[got.offset as usize..got.end() as usize].fill(false);
                }
            }
            assert_eq!(space.extents().collect::<Vec<_>>(), runs(&model));
            assert_eq!(space.total(), model.iter().filter(|free| **free).count() as u64);
        }
    }

    fn runs(model: &[bool]) -> Vec<ByteRange> {
        let mut out: Vec<ByteRange> = Vec::new();
        for at in (0..model.len()).filter(|at| model[*at]) {
            match out.last_mut() {
                Some(r) if r.end() == at as u64 => r.len += 1,
                _ => out.push(range(at as u64, 1)),
            }
        }
        out
    }

    #[test]
    fn the_shortest_extent_that_is_long_enough_is_taken() {
        let mut space = Space::new(10);
        for (offset, len) in [(0, 8), (100, 3), (200, 5)] {
            space.insert(range(offset, len));
        }
        assert_eq!(space.take(4), Some(range(200, 4)));
        assert_eq!(space.take(20), Some(range(0, 8)));
        assert_eq!(space.take(1), Some(range(204, 1)));
        assert_eq!(space.take(3), Some(range(100, 3)));
        assert_eq!(space.take(1), None);
    }

    #[test]
    fn the_shortest_extents_are_forgotten_when_there_are_too_many() {
        let mut space = Space::new(2);
        for (offset, len) in [(0, 8), (100, 3), (200, 5)] {
            space.insert(range(offset, len));
        }
        assert_eq!(space.extents().collect::<Vec<_>>(), [range(0, 8), range(200, 5)]);
    }
}
