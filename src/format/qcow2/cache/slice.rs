//! One slice: entries that can be read while they change, and what of it is not in the file yet.

use super::super::entry::Words;
use super::evict::Cached;
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::fmt;

/// A piece of an L2 table in RAM, in host byte order.
pub struct Slice {
    key: u64,
    words: Box<[AtomicU64]>,
    /// For entries of two words: odd while one of them is being stored.
    sequence: AtomicU32,
    extended: bool,
    /// Users that may change it; `EVICTED` once it is out of the cache.
    pins: AtomicU32,
    /// Looked at again since it was loaded or the clock's hand came by.
    used: AtomicBool,
    /// A bit per part that the file does not have.
    dirty: AtomicU64,
    /// log2 of the words of a part.
    part_bits: u32,
    /// Cuts whose copies are not written yet.
    cuts: AtomicU32,
}

/// Words of a slice that a commit writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirtyPart {
    /// First byte inside the slice.
    pub offset: usize,
    /// Its words, in host byte order.
    pub words: Vec<u64>,
}

const EVICTED: u32 = 1 << 31;

impl Slice {
    /// A slice of these words. Parts are `part_bytes` (a power of two, at least 16), or more where 64 of them would not cover the slice.
    pub(super) fn new(
        key: u64,
        words: impl IntoIterator<Item = u64>,
        extended: bool,
        part_bytes: u32,
    ) -> Self {
        let words: Box<[AtomicU64]> = words.into_iter().map(AtomicU64::new).collect();
        let part_words = (part_bytes as usize / 8).max(words.len() / 64).max(2);
        debug_assert!(words.len().is_power_of_two() && part_words.is_power_of_two());
        Self {
            key,
            part_bits: part_words.trailing_zeros(),
            words,
            sequence: AtomicU32::new(0),
            extended,
            pins: AtomicU32::new(0),
            used: AtomicBool::new(false),
            dirty: AtomicU64::new(0),
            cuts: AtomicU32::new(0),
        }
    }

    /// Its place on the disk, in slices.
    pub fn key(&self) -> u64 {
        self.key
    }

    /// Bytes of the slice.
    pub fn bytes(&self) -> usize {
        self.words.len() * 8
    }

    /// Entry `index` of the slice. Panics past the end.
    pub fn entry(&self, index: usize) -> Words {
        if !self.extended {
            // Acquire: partner is the store in `store`; what an entry points at is there when the entry is seen.
            return Words { entry: self.words[index].load(Ordering::Acquire), bitmap: 0 };
        }
        loop {
            let before = self.sequence.load(Ordering::Acquire);
            if before & 1 == 0 {
                let entry = self.words[index * 2].load(Ordering::Relaxed);
                let bitmap = self.words[index * 2 + 1].load(Ordering::Relaxed);
                // The second look at the number comes after the words: partner is the fence in `store`.
                fence(Ordering::Acquire);
                if self.sequence.load(Ordering::Relaxed) == before {
                    return Words { entry, bitmap };
                }
            }
            std::hint::spin_loop();
        }
    }

    /// Marks the slice as looked at.
    pub(super) fn touch(&self) {
        // The look first, so that hits do not all write the same cache line.
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
    }

    /// Stores an entry. The caller holds a pin and marks the part afterwards.
    pub(super) fn store(&self, index: usize, value: Words) {
        if !self.extended {
            debug_assert!(value.bitmap == 0);
            // Release: see `entry`.
            self.words[index].store(value.entry, Ordering::Release);
            return;
        }
        // The number is a lock among those who store: sections of a few instructions.
        let mut number = self.sequence.load(Ordering::Relaxed);
        loop {
            if number & 1 == 0 {
                match self.sequence.compare_exchange_weak(
                    number,
                    number.wrapping_add(1),
                    Ordering::Acquire,
                    Ordering::Relaxed,
                ) {
                    Ok(_) => break,
                    Err(now) => number = now,
                }
            } else {
                std::hint::spin_loop();
                number = self.sequence.load(Ordering::Relaxed);
            }
        }
        fence(Ordering::Release);
        self.words[index * 2].store(value.entry, Ordering::Relaxed);
        self.words[index * 2 + 1].store(value.bitmap, Ordering::Relaxed);
        self.sequence.store(number.wrapping_add(2), Ordering::Release);
    }

    /// Sets the bit of the entry's part; whether no bit was set before.
    pub(super) fn mark(&self, index: usize) -> bool {
        let word = if self.extended { index * 2 } else { index };
        self.mark_mask(1 << (word >> self.part_bits))
    }

    pub(super) fn mark_mask(&self, mask: u64) -> bool {
        // AcqRel: Release publishes the entry to the cut that takes the bit.
        self.dirty.fetch_or(mask, Ordering::AcqRel) == 0
    }

    /// All parts.
    pub(super) fn all_parts(&self) -> u64 {
        u64::MAX >> (64 - (self.words.len() >> self.part_bits).max(1))
    }

    /// The bit of the part that begins at byte `offset` of the slice.
    pub(super) fn part_of(&self, offset: usize) -> u64 {
        1 << ((offset / 8) >> self.part_bits)
    }

    /// Whether the file lacks something of it.
    pub fn is_dirty(&self) -> bool {
        self.dirty.load(Ordering::Acquire) != 0
    }

    /// Takes the dirty bits away and copies those parts. The slice then stays in the cache until [`super::L2Cache::release_cut`].
    pub(super) fn take_parts(&self) -> Vec<DirtyPart> {
        self.cuts.fetch_add(1, Ordering::AcqRel);
        // AcqRel: a change whose bit is taken here is copied below; a later one sets its bit again.
        let mut mask = self.dirty.swap(0, Ordering::AcqRel);
        let mut parts = Vec::with_capacity(mask.count_ones() as usize);
        while mask != 0 {
            let part = mask.trailing_zeros() as usize;
            mask &= mask - 1;
            let first = part << self.part_bits;
            parts.push(DirtyPart { offset: first * 8, words: self.copy(first, 1 << self.part_bits) });
        }
        parts
    }

    /// All words as they are now; pairs are whole.
    pub fn words(&self) -> Vec<u64> {
        self.copy(0, self.words.len())
    }

    pub(super) fn end_cut(&self) {
        self.cuts.fetch_sub(1, Ordering::AcqRel);
    }

    fn copy(&self, first: usize, words: usize) -> Vec<u64> {
        let words = words.min(self.words.len());
        if !self.extended {
            return self.words[first..first + words].iter().map(|w| w.load(Ordering::Acquire)).collect();
        }
        (first / 2..(first + words) / 2)
            .flat_map(|i| {
                let e = self.entry(i);
                [e.entry, e.bitmap]
            })
            .collect()
    }

    /// Takes a pin, unless the slice is out of the cache.
    pub(super) fn pin(&self) -> bool {
        // AcqRel: partners are `unpin` and `evict`.
        if self.pins.fetch_add(1, Ordering::AcqRel) & EVICTED == 0 {
            return true;
        }
        self.pins.fetch_sub(1, Ordering::AcqRel);
        false
    }

    pub(super) fn unpin(&self) {
        // Release: what was done under the pin, dirty bits above all, is seen by `evict`.
        self.pins.fetch_sub(1, Ordering::AcqRel);
    }

    /// Whether nothing keeps it in the cache now.
    fn is_idle(&self) -> bool {
        self.pins.load(Ordering::Acquire) == 0
            && self.dirty.load(Ordering::Acquire) == 0
            && self.cuts.load(Ordering::Acquire) == 0
    }

    /// Takes the slice out of use if nothing keeps it: then no pin can be taken any more. Called under the shard's lock.
    pub(super) fn evict(&self) -> bool {
        // Acquire: no pin is held, and what was done under the last one is seen.
        if self.pins.compare_exchange(0, EVICTED, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return false;
        }
        if self.dirty.load(Ordering::Acquire) == 0 && self.cuts.load(Ordering::Acquire) == 0 {
            return true;
        }
        self.pins.fetch_and(!EVICTED, Ordering::AcqRel);
        false
    }
}

impl Cached for Slice {
    fn take_used(&self) -> bool {
        self.used.load(Ordering::Relaxed) && self.used.swap(false, Ordering::Relaxed)
    }

    fn try_evict(&self) -> bool {
        self.is_idle() && self.evict()
    }
}

impl fmt::Debug for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slice").field("key", &self.key).field("dirty", &self.dirty).finish_non_exhaustive()
    }
}
