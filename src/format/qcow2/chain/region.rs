//! A region: a word for each unit.

use super::super::addr::HostOffset;
use super::super::cache::Cached;
use super::ChainMap;
use crate::sync::Arc;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::units::ByteRange;

/// Units of a region.
pub(super) const REGION_UNITS: u64 = 512;

/// Where bytes are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Nowhere: they are zeros.
    Zero,
    /// In the data of a layer (its number from the top), from this host place on.
    Data(usize, HostOffset),
    /// Below the layers, at the same guest place.
    Base,
    /// The layers must be asked one by one.
    Ask,
}

/// The places of [`REGION_UNITS`] units; never changes.
pub(super) struct Region {
    pub(super) key: u64,
    words: Box<[u64]>,
    used: AtomicBool,
}

/// A word: kind in bits 0-1, layer in bits 2-13, host place in units of 512 bytes above.
const KIND_BITS: u32 = 2;
const LAYER_BITS: u32 = 12;

// Host places are below 2^56.
const _: () = assert!(KIND_BITS + LAYER_BITS + 56 - 9 <= 64);
const _: () = assert!(crate::limits::GRAPH_DEPTH_MAX < 1 << LAYER_BITS);

pub(super) fn encode(place: Place) -> u64 {
    match place {
        Place::Ask => 0,
        Place::Zero => 1,
        Place::Base => 2,
        Place::Data(layer, host) => {
            3 | (layer as u64) << KIND_BITS | (host.get() / 512) << (KIND_BITS + LAYER_BITS)
        }
    }
}

pub(super) fn decode(word: u64) -> Place {
    match word & 3 {
        0 => Place::Ask,
        1 => Place::Zero,
        2 => Place::Base,
        _ => {
            let layer = (word >> KIND_BITS) & ((1 << LAYER_BITS) - 1);
            Place::Data(layer as usize, HostOffset((word >> (KIND_BITS + LAYER_BITS)) * 512))
        }
    }
}

impl Region {
    pub(super) fn new(key: u64, words: Vec<u64>) -> Self {
        Self { key, words: words.into_boxed_slice(), used: AtomicBool::new(false) }
    }

    /// The place of the bytes at the start of `range`, and how far it goes: at most to the end of the region. `range` begins in the region.
    pub(super) fn look(&self, unit_bits: u32, range: ByteRange) -> (Place, ByteRange) {
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
        let first = ((range.offset >> unit_bits) & (REGION_UNITS - 1)) as usize;
        let inside = range.offset & ((1 << unit_bits) - 1);
        let place = decode(self.words[first]);
        let mut end = range.offset - inside + (1 << unit_bits);
        let mut at = first + 1;
        while end < range.end()
            && at < self.words.len()
            && decode(self.words[at]) == after(place, (at - first) as u64, unit_bits)
        {
            end += 1 << unit_bits;
            at += 1;
        }
        let place = match place {
            Place::Data(layer, host) => Place::Data(layer, HostOffset(host.get() + inside)),
            other => other,
        };
        (place, ByteRange { offset: range.offset, len: end.min(range.end()) - range.offset })
    }
}

/// The place `units` units behind `place`, if it goes on the same way.
fn after(place: Place, units: u64, unit_bits: u32) -> Place {
    match place {
        Place::Data(layer, host) => Place::Data(layer, HostOffset(host.get() + (units << unit_bits))),
        other => other,
    }
}

impl Cached for Region {
    fn take_used(&self) -> bool {
        self.used.load(Ordering::Relaxed) && self.used.swap(false, Ordering::Relaxed)
    }

    fn try_evict(&self) -> bool {
        // Who still looks at it holds it.
        true
    }
}

impl ChainMap {
    /// The place of the bytes at the start of `range` (inside the chain), if its region is in RAM.
    pub(super) fn look(&self, range: ByteRange) -> Option<(Place, ByteRange)> {
        let guard = self.index.get(self.region_key(range.offset))?;
        let region: &Arc<Region> = guard.as_ref()?;
        Some(region.look(self.unit_bits, range))
    }

    pub(super) fn region_key(&self, offset: u64) -> u64 {
        offset >> (self.unit_bits + REGION_UNITS.trailing_zeros())
    }

    /// The bytes of a region.
    pub(super) fn region_range(&self, key: u64) -> ByteRange {
        let bits = self.unit_bits + REGION_UNITS.trailing_zeros();
        let offset = key << bits;
        ByteRange { offset, len: (1 << bits).min(self.size.saturating_sub(offset)) }
    }
}
