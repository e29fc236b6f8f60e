//! The active L1 table in RAM.
//!
//! Entries are atomics, so that a look at one takes no lock. The table of a read-only layer is read when it is first needed; the table of a writable image at
//! open. Changes are kept per part of [`PART`] entries for the commit: who changes an entry stores it and then sets the part's bit, who writes takes the
//! bits first and copies then (qcow2.md 3.1 point 6).

use super::addr::HostOffset;
use super::entry::{BadEntry, L1Entry};
use super::flight::Flight;
use super::layout::Layout;
use super::meta_io::read_words;
use crate::error::IoResult;
use crate::node::Edge;
use crate::queue::Cx;
use crate::request::Class;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Arc, Mutex};
use arc_swap::{ArcSwapOption, Guard};

/// Entries of a part: 512 bytes.
pub const PART: usize = 64;

/// An L1 table.
#[derive(Debug)]
pub struct L1Table {
    offset: HostOffset,
    words: Box<[AtomicU64]>,
    /// A bit per part.
    dirty: Box<[AtomicU64]>,
}

impl L1Table {
    /// A table at `offset` with these entries, none of them changed.
    pub fn new(offset: HostOffset, words: impl IntoIterator<Item = u64>) -> Self {
        let words: Box<[AtomicU64]> = words.into_iter().map(AtomicU64::new).collect();
        let dirty = (0..words.len().div_ceil(PART * 64)).map(|_| AtomicU64::new(0)).collect();
        Self { offset, words, dirty }
    }

    /// Where it lies in the file.
    pub fn offset(&self) -> HostOffset {
        self.offset
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.words.len()
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Entry `index` as stored; 0 past the end.
    pub fn word(&self, index: u64) -> u64 {
        // Acquire: partner is `set`; who sees a pointer to a new table sees its slices in the cache.
        self.words.get(index as usize).map_or(0, |w| w.load(Ordering::Acquire))
    }

    /// Entry `index`; none past the end.
    pub fn entry(&self, index: u64, layout: &Layout) -> Result<L1Entry, BadEntry> {
        L1Entry::decode(self.word(index), layout)
    }

    /// Stores entry `index` and marks its part. Panics past the end.
    pub fn set(&self, index: u64, word: u64) {
        // Release: partners are `word` and, through the bit, `take_dirty`.
        self.words[index as usize].store(word, Ordering::Release);
        self.mark(index as usize / PART);
    }

    /// Marks part `part` as not written (again).
    pub fn mark(&self, part: usize) {
        self.dirty[part / 64].fetch_or(1 << (part % 64), Ordering::AcqRel);
    }

    /// Whether any part waits to be written.
    pub fn is_dirty(&self) -> bool {
        self.dirty.iter().any(|d| d.load(Ordering::Acquire) != 0)
    }

    /// Takes the marks away, then gives each marked part (its number and its entries, the last one may be short) to `copy`.
    pub fn take_dirty(&self, mut copy: impl FnMut(usize, Vec<u64>)) {
        for (i, mask) in self.dirty.iter().enumerate() {
            // AcqRel: a change whose mark is taken here is copied below; a later one sets its mark again.
            let mut bits = if mask.load(Ordering::Relaxed) == 0 { 0 } else { mask.swap(0, Ordering::AcqRel) };
            while bits != 0 {
                let part = i * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                let end = ((part + 1) * PART).min(self.words.len());
                let words = self.words[part * PART..end].iter();
                copy(part, words.map(|w| w.load(Ordering::Acquire)).collect());
            }
        }
    }
}

/// The place of the active L1 table: empty until it is read, replaced when it moves.
#[derive(Debug)]
pub struct L1 {
    table: ArcSwapOption<L1Table>,
    loading: Mutex<Option<Arc<Flight<Arc<L1Table>>>>>,
    offset: HostOffset,
    entries: usize,
}

impl L1 {
    /// A table of `entries` entries at `offset`, not read yet. `entries` is bounded by the header's rules (32 MiB).
    pub fn new(offset: HostOffset, entries: usize) -> Self {
        Self { table: ArcSwapOption::empty(), loading: Mutex::default(), offset, entries }
    }

    /// The table if it has been read; hold the guard for a look, not across an await.
    pub fn get(&self) -> Guard<Option<Arc<L1Table>>> {
        self.table.load()
    }

    /// Another table takes its place (growth, snapshots).
    pub fn replace(&self, table: Arc<L1Table>) {
        self.table.store(Some(table));
    }

    /// The table, read from `file` if nobody has done so yet. A read that failed is tried again by the next who asks.
    pub async fn load(self: &Arc<Self>, cx: &Cx, file: &Arc<Edge>) -> IoResult<Arc<L1Table>> {
        if let Some(table) = self.table.load_full() {
            return Ok(table);
        }
        let flight = self.start(cx, file);
        flight.wait(cx).await
    }

    fn start(self: &Arc<Self>, cx: &Cx, file: &Arc<Edge>) -> Arc<Flight<Arc<L1Table>>> {
        let mut loading = self.loading.lock();
        if let Some(flight) = &*loading
            && !matches!(flight.result(), Some(Err(_)))
        {
            return flight.clone();
        }
        let (flight, landing) = Flight::start();
        *loading = Some(flight.clone());
        let (this, file, task) = (self.clone(), file.clone(), cx.detached());
        cx.spawn(async move {
            let read = read_words(&task, &*file.node(), this.offset, this.entries, Class::Guest).await;
            let table = read.map(|words| Arc::new(L1Table::new(this.offset, words)));
            if let Ok(table) = &table {
                this.table.store(Some(table.clone()));
            }
            landing.land(table);
        });
        flight
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_takes_the_marked_parts_and_a_later_change_marks_again() {
        let table = L1Table::new(HostOffset(0x30000), vec![0; 130]);
        assert!(!table.is_dirty());
        table.set(0, 7);
        table.set(129, 9);
        let mut parts = Vec::new();
        table.take_dirty(|part, words| parts.push((part, words)));
        assert_eq!(parts.iter().map(|(p, w)| (*p, w.len())).collect::<Vec<_>>(), [(0, 64), (2, 2)]);
        assert_eq!((parts[0].1[0], parts[1].1[1]), (7, 9));
        assert!(!table.is_dirty());
        table.mark(2);
        assert!(table.is_dirty());
        assert_eq!(table.word(130), 0);
    }
}
