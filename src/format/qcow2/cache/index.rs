//! Key to what is cached: a radix tree of three levels whose tables are made when something below them is first cached.
//!
//! Looking up follows two pointers and loads a swappable one; nothing is written that threads share. Tables are never freed while the image is open: a table of
//! pointers is made for a slice that is in the file or will be, so the tables together are at most a pointer per slice of the file, rounded up to whole tables.

use crate::sync::Arc;
use arc_swap::{ArcSwapOption, Guard};
use once_cell::sync::OnceCell;

const FANOUT_BITS: u32 = 9;
const FANOUT: u64 = 1 << FANOUT_BITS;

type Leaf<T> = Box<[ArcSwapOption<T>]>;
type Middle<T> = Box<[OnceCell<Leaf<T>>]>;

/// The tree.
pub(in super::super) struct Index<T> {
    root: Box<[OnceCell<Middle<T>>]>,
}

impl<T> Index<T> {
    /// For keys below `keys`, at most 2^34 (2 EiB in slices of 512 bytes of 2 MiB clusters): then the root has 65,536 places.
    pub(in super::super) fn new(keys: u64) -> Self {
        let root = (0..keys.div_ceil(FANOUT * FANOUT)).map(|_| OnceCell::new()).collect();
        Self { root }
    }

    /// What is in the place of `key`.
    pub(in super::super) fn get(&self, key: u64) -> Option<Guard<Option<Arc<T>>>> {
        self.place(key).map(|place| place.load())
    }

    /// Puts a value in the place of `key`, or empties it. Panics past the last key. Called under the shard's lock.
    pub(in super::super) fn set(&self, key: u64, value: Option<Arc<T>>) {
        let (root, middle, leaf) = split(key);
        let middle_table = self.root[root].get_or_init(|| (0..FANOUT).map(|_| OnceCell::new()).collect());
        let leaf_table =
            middle_table[middle].get_or_init(|| (0..FANOUT).map(|_| ArcSwapOption::empty()).collect());
        leaf_table[leaf].store(value);
    }

    fn place(&self, key: u64) -> Option<&ArcSwapOption<T>> {
        let (root, middle, leaf) = split(key);
        self.root.get(root)?.get()?[middle].get().map(|table| &table[leaf])
    }
}

fn split(key: u64) -> (usize, usize, usize) {
    let part = |shift: u32| (key >> shift & (FANOUT - 1)) as usize;
    ((key >> (2 * FANOUT_BITS)) as usize, part(FANOUT_BITS), part(0))
}
