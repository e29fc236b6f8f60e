//! The cache: lookups, loads, changes, and what a commit takes.

use super::super::addr::HostOffset;
use super::super::entry::Words;
use super::super::flight::Flight;
use super::super::l1::L1;
use super::super::layout::Layout;
use super::super::meta_io::read_words;
use super::evict::Ring;
use super::index::Index;
use super::slice::{DirtyPart, Slice};
use crate::error::{IoError, IoResult};
use crate::node::Edge;
use crate::queue::Cx;
use crate::request::Class;
use crate::rt::Instant;
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Arc, Mutex};
use arc_swap::Guard;
use event_listener::Event;
use once_cell::sync::OnceCell;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// Locks of the cache.
const SHARDS: usize = 16;

/// L2 slices of one image; see the folder.
pub struct L2Cache {
    layout: Layout,
    /// Bytes of a part that is written alone.
    part_bytes: u32,
    file: Arc<Edge>,
    index: Index<Slice>,
    shards: Box<[Mutex<Shard>]>,
    /// Most slices per shard.
    shard_max: AtomicUsize,
    clean_interval: Option<Duration>,
    /// When it was swept last, in nanoseconds.
    swept: AtomicU64,
    loads: AtomicU64,
    /// Slices with dirty parts, each once.
    dirty: Mutex<Vec<Arc<Slice>>>,
    /// Slices on that list, and slices in a cut.
    kept: AtomicUsize,
    /// A cut has been released.
    released: Event,
    /// Dirty slices have passed half the cache.
    half_dirty: Event,
    /// Of a writable image: says where tables are now.
    l1: OnceCell<Arc<L1>>,
}

#[derive(Default)]
struct Shard {
    ring: Ring<Slice>,
    loading: BTreeMap<u64, Arc<Flight<Arc<Slice>>>>,
}

/// A slice to look at; hold it for a look, not across an await.
pub struct SliceRef(Guard<Option<Arc<Slice>>>);

/// A slice that stays in the cache while its entries are read and changed.
pub struct Pinned {
    cache: Arc<L2Cache>,
    slice: Arc<Slice>,
}

enum Found {
    Slice(Arc<Slice>),
    Loading(Arc<Flight<Arc<Slice>>>),
}

impl L2Cache {
    /// A cache for the tables of a disk of `keys` slices in `file`, of at most `bytes` bytes. `part_bytes` is the smallest write that the file takes without a
    /// read, 512 to 4096. `clean_interval`: see [`L2Cache::sweep`].
    pub fn new(
        layout: Layout,
        keys: u64,
        file: Arc<Edge>,
        bytes: u64,
        part_bytes: u32,
        clean_interval: Option<Duration>,
    ) -> Arc<Self> {
        let slices = (bytes >> layout.slice_bits).clamp(2, 1 << 24) as usize;
        let shards = SHARDS.min(slices / 2).max(1);
        Arc::new(Self {
            layout,
            part_bytes,
            file,
            index: Index::new(keys),
            shards: (0..shards).map(|_| Mutex::default()).collect(),
            shard_max: AtomicUsize::new(slices.div_ceil(shards)),
            clean_interval,
            swept: AtomicU64::new(0),
            loads: AtomicU64::new(0),
            dirty: Mutex::default(),
            kept: AtomicUsize::new(0),
            released: Event::new(),
            half_dirty: Event::new(),
            l1: OnceCell::new(),
        })
    }

    /// Tables may move from now on (a copy takes the place of one that snapshots share), and `l1` says where they are.
    pub fn watch_tables(&self, l1: &Arc<L1>) {
        // A second call would be about the same table.
        let _ = self.l1.set(l1.clone());
    }

    /// The key of the slice that maps `guest`.
    pub fn key(&self, guest: u64) -> u64 {
        guest >> (self.layout.slice_entry_bits() + self.layout.cluster_bits)
    }

    /// The slice if it is in RAM. Writes nothing that others read but the mark of a look, and that only when it is not set.
    pub fn peek(&self, key: u64) -> Option<SliceRef> {
        let guard = self.index.get(key)?;
        guard.as_ref()?.touch();
        Some(SliceRef(guard))
    }

    /// Begins to load the slice unless it is there or on its way. `table` is its L2 table. To have several on their way at once, call it for each and then [`L2Cache::get`].
    pub fn prefetch(self: &Arc<Self>, cx: &Cx, key: u64, table: HostOffset) {
        if self.peek(key).is_none() {
            self.find(cx, key, table);
        }
    }

    /// The slice, loaded from `table` (its L2 table) if it is not in RAM. It may be evicted while the caller holds it: for reading only.
    pub async fn get(self: &Arc<Self>, cx: &Cx, key: u64, table: HostOffset) -> IoResult<Arc<Slice>> {
        if let Some(slice) = self.peek(key).and_then(|s| s.0.clone()) {
            return Ok(slice);
        }
        self.sweep_if_due(cx);
        self.wait_for_room(cx).await?;
        match self.find(cx, key, table) {
            Found::Slice(slice) => Ok(slice),
            Found::Loading(flight) => flight.wait(cx).await,
        }
    }

    /// The slice, to be changed: it stays in RAM as long as the handle lives.
    pub async fn pin(self: &Arc<Self>, cx: &Cx, key: u64, table: HostOffset) -> IoResult<Pinned> {
        loop {
            let slice = self.get(cx, key, table).await?;
            if slice.pin() {
                return Ok(Pinned { cache: self.clone(), slice });
            }
            // Evicted between the lookup and the pin.
        }
    }

    /// Like [`L2Cache::pin`], without waiting for room: for those whose commit others may wait for. They look at [`L2Cache::is_full`] while they hold nothing, so what is too
    /// much is bounded by the requests under way.
    pub async fn pin_now(self: &Arc<Self>, cx: &Cx, key: u64, table: HostOffset) -> IoResult<Pinned> {
        loop {
            let slice = match self.find(cx, key, table) {
                Found::Slice(slice) => slice,
                Found::Loading(flight) => flight.wait(cx).await?,
            };
            if slice.pin() {
                return Ok(Pinned { cache: self.clone(), slice });
            }
        }
    }

    /// Whether the cache is full of slices that must be written first (rule 14).
    pub fn is_full(&self) -> bool {
        self.kept() >= self.slices_max()
    }

    /// Like [`L2Cache::pin`] if it is in RAM.
    pub fn pin_cached(self: &Arc<Self>, key: u64) -> Option<Pinned> {
        let slice = self.peek(key)?.0.clone()?;
        slice.pin().then(|| Pinned { cache: self.clone(), slice })
    }

    /// Puts all-zero slices of a new table in place: those of the L1 entry `l1_index`, which points nowhere yet. With `in_file` the table's cluster is known
    /// to read as zeros, so that the slices are clean; otherwise all of it is dirty. Call it before the L1 entry is stored.
    pub fn insert_new(self: &Arc<Self>, l1_index: u64, in_file: bool) {
        let per_table = self.layout.slices_per_table() as u64;
        for key in l1_index * per_table..(l1_index + 1) * per_table {
            let words = std::iter::repeat_n(0, self.layout.slice_words());
            let slice = Arc::new(Slice::new(key, words, self.layout.extended, self.part_bytes));
            if !in_file {
                slice.mark_mask(slice.all_parts());
                self.push_dirty(slice.clone());
            }
            let mut shard = self.shard(key).lock();
            debug_assert!(!shard.loading.contains_key(&key), "a table that nothing points at is loaded");
            self.insert(&mut shard, slice);
        }
    }

    /// Drops every slice of a table that is not in use any more. Panics, in builds with assertions, if one of them is pinned or dirty.
    pub fn forget_table(&self, l1_index: u64) {
        let per_table = self.layout.slices_per_table() as u64;
        for key in l1_index * per_table..(l1_index + 1) * per_table {
            let mut shard = self.shard(key).lock();
            shard.loading.remove(&key);
            let Some(slice) = self.index.get(key).and_then(|s| s.clone()) else { continue };
            let idle = slice.evict();
            debug_assert!(idle, "a table is dropped while a slice of it is in use");
            shard.ring.remove(&slice);
            self.index.set(key, None);
        }
    }

    /// Slices that are dirty or in a cut that has not been released.
    pub fn kept(&self) -> usize {
        self.kept.load(Ordering::Acquire)
    }

    /// Most slices in RAM (without pinned ones that do not fit).
    pub fn slices_max(&self) -> usize {
        self.shard_max.load(Ordering::Relaxed) * self.shards.len()
    }

    /// Slices loaded from the file so far.
    pub fn loads(&self) -> u64 {
        self.loads.load(Ordering::Relaxed)
    }

    /// Slices in RAM.
    pub fn len(&self) -> usize {
        self.shards.iter().map(|s| s.lock().ring.len()).sum()
    }

    /// Whether no slice is in RAM.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether a commit should start without waiting for a flush: dirty slices have passed half the cache.
    pub fn wants_commit(&self) -> bool {
        self.kept() * 2 > self.slices_max()
    }

    /// Ends when [`L2Cache::wants_commit`] holds.
    pub async fn half_dirty(&self) {
        loop {
            let listener = self.half_dirty.listen();
            if self.wants_commit() {
                return;
            }
            listener.await;
        }
    }

    /// Whether any slice waits to be written.
    pub fn is_dirty(&self) -> bool {
        !self.dirty.lock().is_empty()
    }

    /// Takes the list of dirty slices; then, for each, its dirty parts. Each slice given to `copy` must be handed to [`L2Cache::release_cut`] when its parts are
    /// written (or marked again).
    pub fn take_dirty(&self, mut copy: impl FnMut(&Arc<Slice>, Vec<DirtyPart>)) {
        let list = std::mem::take(&mut *self.dirty.lock());
        for slice in list {
            let parts = slice.take_parts();
            copy(&slice, parts);
        }
    }

    /// The parts that a cut took from this slice are in the file, or have been marked again.
    pub fn release_cut(&self, slice: &Slice) {
        slice.end_cut();
        self.kept.fetch_sub(1, Ordering::AcqRel);
        self.released.notify(usize::MAX);
    }

    /// Marks the parts of a cut as dirty again: they could not be written. Before [`L2Cache::release_cut`].
    pub fn mark_again(&self, slice: &Arc<Slice>, parts: &[DirtyPart]) {
        let mask = parts.iter().fold(0, |mask, p| mask | slice.part_of(p.offset));
        if mask != 0 && slice.mark_mask(mask) {
            self.push_dirty(slice.clone());
        }
    }

    /// Another size, in bytes; takes what is too much out.
    pub fn set_capacity(&self, bytes: u64) {
        let slices = (bytes >> self.layout.slice_bits).clamp(2, 1 << 24) as usize;
        self.shard_max.store(slices.div_ceil(self.shards.len()), Ordering::Relaxed);
        for shard in &self.shards {
            self.make_room(&mut shard.lock(), 0);
        }
    }

    /// Drops clean slices that nobody has looked at since the last call. Done at the first miss after each `cache-clean-interval`: a cache that is not used keeps
    /// what it has, within its bounds.
    pub fn sweep(&self) {
        for shard in &self.shards {
            let mut shard = shard.lock();
            for slice in shard.ring.sweep() {
                self.index.set(slice.key(), None);
            }
        }
    }

    fn sweep_if_due(&self, cx: &Cx) {
        let Some(interval) = self.clean_interval else { return };
        let (now, last) = (cx.now(), self.swept.load(Ordering::Relaxed));
        if last == 0 {
            let _ = self.swept.compare_exchange(0, now.0.max(1), Ordering::Relaxed, Ordering::Relaxed);
        } else if now.since(Instant(last)) >= interval
            && self.swept.compare_exchange(last, now.0, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        {
            self.sweep();
        }
    }

    fn shard(&self, key: u64) -> &Mutex<Shard> {
        // Scattered: a guest that goes in steps of a gigabyte must not find one sixteenth of the cache.
        // Multiples of the golden ratio lie evenly.
        let scattered = key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        &self.shards[((scattered * self.shards.len() as u64) >> 32) as usize]
    }

    /// The slice or its load, which is begun if need be.
    fn find(self: &Arc<Self>, cx: &Cx, key: u64, table: HostOffset) -> Found {
        let mut shard = self.shard(key).lock();
        if let Some(slice) = self.index.get(key).and_then(|s| s.clone()) {
            slice.touch();
            return Found::Slice(slice);
        }
        if let Some(flight) = shard.loading.get(&key)
            && flight.result().is_none()
        {
            return Found::Loading(flight.clone());
        }
        let (flight, landing) = Flight::start();
        shard.loading.insert(key, flight.clone());
        drop(shard);
        self.loads.fetch_add(1, Ordering::Relaxed);
        let (this, task) = (self.clone(), cx.detached());
        cx.spawn(async move {
            let mut table = table;
            let loaded = loop {
                let loaded = this.load(&task, key, table).await;
                let mut shard = this.shard(key).lock();
                // Who asked may have looked at the L1 table long ago. Whoever changes an entry does so in the new place, after the move, and comes here for
                // the slice: if the table has not moved by now, there is no such change.
                if let Some(now) = this.table_now(key)
                    && now != table
                {
                    table = now;
                    continue;
                }
                shard.loading.remove(&key);
                if let Ok(slice) = &loaded {
                    this.insert(&mut shard, slice.clone());
                }
                break loaded;
            };
            drop(this);
            landing.land(loaded);
        });
        Found::Loading(flight)
    }

    /// The table of a slice, if tables may move.
    fn table_now(&self, key: u64) -> Option<HostOffset> {
        let l1 = self.l1.get()?.get();
        let index = key / self.layout.slices_per_table() as u64;
        l1.as_ref()?.entry(index, &self.layout).ok()?.table
    }

    async fn load(&self, cx: &Cx, key: u64, table: HostOffset) -> IoResult<Arc<Slice>> {
        let in_table = key & (self.layout.slices_per_table() as u64 - 1);
        let offset = table.checked_add(in_table << self.layout.slice_bits).ok_or(IoError::out_of_range())?;
        let file = self.file.node();
        let words = read_words(cx, &*file, offset, self.layout.slice_words(), Class::Guest).await?;
        Ok(Arc::new(Slice::new(key, words, self.layout.extended, self.part_bytes)))
    }

    fn insert(&self, shard: &mut Shard, slice: Arc<Slice>) {
        self.make_room(shard, 1);
        self.index.set(slice.key(), Some(slice.clone()));
        shard.ring.push(slice);
    }

    fn make_room(&self, shard: &mut Shard, wanted: usize) {
        let max = self.shard_max.load(Ordering::Relaxed);
        while shard.ring.len() + wanted > max {
            let Some(victim) = shard.ring.evict() else { return };
            self.index.set(victim.key(), None);
        }
    }

    fn push_dirty(&self, slice: Arc<Slice>) {
        let mut list = self.dirty.lock();
        list.push(slice);
        let kept = self.kept.fetch_add(1, Ordering::AcqRel) + 1;
        drop(list);
        if kept * 2 > self.slices_max() {
            self.half_dirty.notify(usize::MAX);
        }
    }

    /// Waits while the cache is full of slices that must be written first (rule 14).
    async fn wait_for_room(&self, cx: &Cx) -> IoResult {
        loop {
            if self.kept() < self.slices_max() {
                return Ok(());
            }
            let listener = self.released.listen();
            if self.kept() >= self.slices_max() {
                cx.waiting(listener).await?;
            }
        }
    }
}

impl SliceRef {
    /// Entry `index` of the slice.
    pub fn entry(&self, index: usize) -> Words {
        self.0.as_ref().map_or(Words::NONE, |s| s.entry(index))
    }
}

impl Pinned {
    /// Entry `index` of the slice.
    pub fn entry(&self, index: usize) -> Words {
        self.slice.entry(index)
    }

    /// Changes an entry: stores it, then marks its part. Two changes of one entry at once are the caller's to prevent.
    pub fn set(&self, index: usize, words: Words) {
        self.slice.store(index, words);
        if self.slice.mark(index) {
            self.cache.push_dirty(self.slice.clone());
        }
    }

    /// The slice.
    pub fn slice(&self) -> &Arc<Slice> {
        &self.slice
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.slice.unpin();
    }
}

impl fmt::Debug for L2Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("L2Cache").field("kept", &self.kept()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pinned({:?})", self.slice)
    }
}
