//! Key to slice: a radix tree of three levels whose tables are made when something below them is first cached.
//!
//! Looking up follows two pointers and loads a swappable one; nothing is written that threads share. Tables are never freed while the image is open: a table of
//! pointers is made for a slice that is in the file or will be, so the tables together are at most a pointer per slice of the file, rounded up to whole tables.

use super::slice::Slice;
use crate::sync::Arc;
use arc_swap::{ArcSwapOption, Guard};
use once_cell::sync::OnceCell;

const FANOUT_BITS: u32 = 9;
const FANOUT: u64 = 1 << FANOUT_BITS;

type Leaf = Box<[ArcSwapOption<Slice>]>;
type Middle = Box<[OnceCell<Leaf>]>;

/// The tree.
pub(super) struct Index {
    root: Box<[OnceCell<Middle>]>,
}

impl Index {
    /// For keys below `keys`, at most 2^34 (2 EiB in slices of 512 bytes of 2 MiB clusters): then the root has 65,536 places.
    pub(super) fn new(keys: u64) -> Self {
        let root = (0..keys.div_ceil(FANOUT * FANOUT)).map(|_| OnceCell::new()).collect();
        Self { root }
    }

    /// What is in the place of `key`.
    pub(super) fn get(&self, key: u64) -> Option<Guard<Option<Arc<Slice>>>> {
        self.place(key).map(|place| place.load())
    }

    /// Puts a slice in the place of `key`, or empties it. Panics past the last key. Called under the shard's lock.
    pub(super) fn set(&self, key: u64, slice: Option<Arc<Slice>>) {
        let (root, middle, leaf) = split(key);
        let middle_table = self.root[root].get_or_init(|| (0..FANOUT).map(|_| OnceCell::new()).collect());
        let leaf_table =
            middle_table[middle].get_or_init(|| (0..FANOUT).map(|_| ArcSwapOption::empty()).collect());
        leaf_table[leaf].store(slice);
    }

    fn place(&self, key: u64) -> Option<&ArcSwapOption<Slice>> {
        let (root, middle, leaf) = split(key);
        self.root.get(root)?.get()?[middle].get().map(|table| &table[leaf])
    }
}

fn split(key: u64) -> (usize, usize, usize) {
    let part = |shift: u32| (key >> shift & (FANOUT - 1)) as usize;
    ((key >> (2 * FANOUT_BITS)) as usize, part(FANOUT_BITS), part(0))
}
