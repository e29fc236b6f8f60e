//! The spill file: where granules go when memory is full (S46, S47).
//!
//! [`SpillFile`] hands out places within the quota, fixed when the cache is opened. A [`Place`] belongs to whoever refers to it,
//! readers included, and can be used again when the last reference has gone (S16). The file needs neither flush nor crash
//! safety: it has no name, or is somebody else's node.
//!
//! Spill tasks run only while a request has found no space, and from there down to the high mark, so that those who come next
//! find some. They take what is drained last. Memory is freed when the file has acknowledged the data; a write that fails loses nothing,
//! and the file then counts as full until it has been emptied.

use super::config::PIECE_COST;
use super::index::{Data, Pick, Run};
use super::space::Level;
use super::store::Store;
use crate::error::{Code, IoError, IoResult};
use crate::events::Side;
use crate::node::Edge;
use crate::queue::Cx;
use crate::report::Action;
use crate::request::{Buffers, Op, Request};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use crate::sync::{Arc, Mutex};
use crate::units::{ByteRange, align_up};
use std::collections::BTreeMap;

/// Spill tasks at a time.
const SPILLERS_MAX: usize = 4;
/// Places begin and end at multiples of this.
const UNIT: u64 = 4096;
/// Tries of a read of the spill file.
const READ_TRIES: u32 = 3;

/// Places in a file or node.
#[derive(Debug)]
pub(super) struct SpillFile {
    pub(super) edge: Edge,
    space: Mutex<Space>,
    /// No place was left, or a write failed.
    full: AtomicBool,
    used: AtomicU64,
}

#[derive(Debug)]
struct Space {
    /// Free ranges: start to length; neighbours are joined.
    free: BTreeMap<u64, u64>,
    quota: u64,
    /// Bytes from the start that may hold something.
    touched: u64,
    failed: bool,
}

/// A range of the spill file; free again when the last reference goes.
#[derive(Debug)]
pub(super) struct Place {
    file: Arc<SpillFile>,
    range: ByteRange,
}

impl SpillFile {
    pub(super) fn new(edge: Edge, quota: u64) -> Arc<Self> {
        let quota = quota.min(edge.get().limits().size) / UNIT * UNIT;
        let free = BTreeMap::from([(0, quota)]);
        let space = Mutex::new(Space { free, quota, touched: 0, failed: false });
        Arc::new(Self { edge, space, full: AtomicBool::new(false), used: AtomicU64::new(0) })
    }

    /// Bytes of places in use.
    pub(super) fn used(&self) -> u64 {
        self.used.load(Relaxed)
    }

    /// Whether nothing more goes in for now.
    pub(super) fn is_full(&self) -> bool {
        self.full.load(Relaxed)
    }

    /// Nothing that there is to be moved finds a place.
    fn set_full(&self) {
        self.full.store(true, Relaxed);
    }

    /// Bytes of the largest place there is.
    fn largest(&self) -> u64 {
        let s = self.space.lock();
        if s.failed { 0 } else { s.free.values().copied().max().unwrap_or(0) }
    }

    /// A place for `len` bytes.
    pub(super) fn take(self: &Arc<Self>, len: u64) -> Option<Arc<Place>> {
        let len = align_up(len, UNIT);
        let mut s = self.space.lock();
        let first = s.free.iter().find(|(_, l)| **l >= len).map(|(o, _)| *o);
        let offset = first.filter(|_| !s.failed)?;
        let whole = s.free.remove(&offset).unwrap_or(len);
        if whole > len {
            s.free.insert(offset + len, whole - len);
        }
        s.touched = s.touched.max(offset + len);
        self.used.fetch_add(len, Relaxed);
        Some(Arc::new(Place { file: self.clone(), range: ByteRange { offset, len } }))
    }

    fn give(&self, range: ByteRange) {
        let mut s = self.space.lock();
        let mut joined = range;
        if let Some(after) = s.free.remove(&range.end()) {
            joined.len += after;
        }
        let before = s.free.range(..range.offset).next_back().map(|(o, l)| (*o, *l));
        if let Some((offset, len)) = before.filter(|(o, l)| o + l == range.offset) {
            s.free.remove(&offset);
            joined = ByteRange { offset, len: len + joined.len };
        }
        s.free.insert(joined.offset, joined.len);
        let empty = joined.len == s.quota;
        // A file that failed gets another chance when nothing is in it.
        s.failed &= !empty;
        if !s.failed {
            self.full.store(false, Relaxed);
        }
        self.used.fetch_sub(range.len, Relaxed);
    }

    fn fail(&self) {
        let mut s = self.space.lock();
        s.failed = s.free.values().sum::<u64>() < s.quota;
        self.full.store(true, Relaxed);
    }

    /// Reads `bufs.len()` bytes from byte `at` of a place.
    pub(super) async fn read(&self, cx: &Cx, place: &Place, at: u64, bufs: Buffers) -> IoResult {
        debug_assert!(at + bufs.len() as u64 <= place.range.len, "a read stays in its place");
        let node = self.edge.node();
        let mut tries = 0;
        loop {
            let read = Request::read(place.range.offset + at, bufs.clone());
            match cx.run(&*node, read).await {
                Err(e) if e.code != Code::Cancelled && tries + 1 < READ_TRIES => tries += 1,
                other => return other,
            }
        }
    }

    /// Gives the file's blocks back to the file system when nothing is in it.
    pub(super) async fn trim(self: &Arc<Self>, cx: &Cx) {
        let range = {
            let mut s = self.space.lock();
            let empty = s.free.get(&0) == Some(&s.quota);
            if !empty || s.touched == 0 {
                return;
            }
            // Taken while it is discarded, or somebody could write there meanwhile.
            let range = ByteRange { offset: 0, len: s.touched };
            s.free = BTreeMap::from([(s.touched, s.quota - s.touched)]);
            s.free.retain(|_, len| *len > 0);
            s.touched = 0;
            self.used.fetch_add(range.len, Relaxed);
            range
        };
        let place = Place { file: self.clone(), range };
        let node = self.edge.node();
        // Advice: a file that cannot punch keeps its blocks until it is closed.
        let _ = cx.run(&*node, Request::discard(range)).await;
        drop(place);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.file.give(self.range);
    }
}

impl Store {
    /// A request has found no space: starts to move data to the spill file. Called again when data has come that could be moved.
    pub(super) fn start_spilling(self: &Arc<Self>) {
        self.spilling.store(true, Relaxed);
        let start = {
            let mut work = self.work.lock();
            if work.spillers == 0 {
                work.index.rewind_spill();
            }
            let start = work.spillers < SPILLERS_MAX && work.broken.is_none();
            work.spillers += usize::from(start);
            start
        };
        if !start {
            return;
        }
        let store = self.clone();
        let end = SpillerGuard(self.clone());
        let spawned = self.env.spawn_background(move |cx| async move {
            let end = end;
            store.spill_loop(&cx).await;
            drop(end);
        });
        if let Err(e) = spawned {
            self.env.log(0, "ram-cache", &format!("{}: cannot spill: {e}", self.name));
        }
    }

    async fn spill_loop(self: &Arc<Self>, cx: &Cx) {
        let Some(file) = &self.spill else { return };
        loop {
            let space = &self.account.space;
            if space.waiters() == 0 && space.level() < Level::High && !space.is_pressed() {
                self.spilling.store(false, Relaxed);
                return;
            }
            let room = file.largest() / UNIT * UNIT;
            let (pick, only_pieces) = {
                let mut work = self.work.lock();
                if work.broken.is_some() || room == 0 {
                    break;
                }
                let pick = work.index.pick_spill(self.batch().min(room), self.window);
                (pick, space.used() <= work.index.len() as u64 * PIECE_COST)
            };
            match pick {
                Pick::Run(run) => {
                    if !self.spill_run(cx, file, run).await {
                        break;
                    }
                }
                Pick::Again => {}
                // Moving more would not make space: what is left is too large for the places, or is what pieces cost.
                Pick::Nothing(_) if room < self.batch() || only_pieces => break,
                // What is not being read or written has been moved. Data that comes now starts this again.
                Pick::Nothing(_) => return,
            }
        }
        file.set_full();
        // Waiters look again at what their options allow.
        self.steps.notify(usize::MAX);
    }

    /// Moves one run; false if nothing more goes in.
    async fn spill_run(self: &Arc<Self>, cx: &Cx, file: &Arc<SpillFile>, run: Run) -> bool {
        let mut undo = SpillUndo { store: self, run: Some(run) };
        let Some(run) = undo.run.as_ref() else { return false };
        // Another task may have taken the place; then this one looks again.
        let Some(place) = file.take(run.range.len) else { return true };
        let mut bufs = Buffers::new();
        for (_, data) in &run.data {
            if let Data::Ram(b) = data {
                bufs.append(b.clone());
            }
        }
        let node = file.edge.node();
        let result = cx.run(&*node, Request::write(place.range.offset, bufs)).await;
        let Some(run) = undo.run.take() else { return false };
        match result {
            Ok(()) => {
                self.edit(0, |work, garbage| work.index.spilled(&run, &place, garbage));
                // The drain's own references.
                drop(run);
                self.kick();
                true
            }
            Err(e) => {
                file.fail();
                self.work.lock().index.spill_failed(&run);
                self.report(e, Side::Spill, Op::Write, run.range, Action::Retried);
                self.kick();
                false
            }
        }
    }
}

/// Counts a spill task out, however it ends.
struct SpillerGuard(Arc<Store>);

impl Drop for SpillerGuard {
    fn drop(&mut self) {
        self.0.work.lock().spillers -= 1;
        self.0.moved.notify(usize::MAX);
    }
}

/// Puts a run back if its task is dropped, or there was no place for it.
struct SpillUndo<'a> {
    store: &'a Arc<Store>,
    run: Option<Run>,
}

impl Drop for SpillUndo<'_> {
    fn drop(&mut self) {
        if let Some(run) = self.run.take() {
            self.store.work.lock().index.spill_failed(&run);
        }
    }
}

/// The error of a request whose data was in a spill file that cannot be read.
pub(super) const fn unreadable(e: IoError) -> IoError {
    IoError::new(e.errno, Code::SpillFull)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::filter::testing::Recorder;
    use crate::queue::virtual_env::virtual_env;
    use crate::rt::Rng;
    use crate::rt::real::SplitMix;

    fn file(quota: u64) -> Arc<SpillFile> {
        let (env, _) = virtual_env(1);
        SpillFile::new(Edge::to_node(Recorder::new(&env, 1 << 20)), quota)
    }

    #[test]
    fn the_quota_is_kept_and_freed_places_are_joined() {
        let f = file(64 << 10);
        let a: Vec<_> = (0..4).map(|_| f.take(16 << 10).expect("fits")).collect();
        assert!(f.take(1).is_none() && f.largest() == 0);
        assert_eq!(f.used(), 64 << 10);
        let mut a = a.into_iter();
        drop((a.next(), a.next()));
        let b = f.take(32 << 10).expect("two neighbours make one place");
        assert_eq!(b.range, ByteRange { offset: 0, len: 32 << 10 });
        drop((a, b));
        assert_eq!(f.used(), 0);
        assert_eq!(f.space.lock().free, BTreeMap::from([(0, 64 << 10)]));
    }

    #[test]
    fn a_quota_beyond_the_node_ends_with_it() {
        let f = file(u64::MAX);
        let all = f.take(1 << 20);
        assert!(all.is_some() && f.take(1).is_none());
    }

    #[test]
    fn a_failed_file_is_full_until_it_is_empty() {
        let f = file(64 << 10);
        let (a, b) = (f.take(4096), f.take(4096));
        f.fail();
        drop(a);
        assert!(f.is_full() && f.take(4096).is_none(), "something is still in it");
        drop(b);
        assert!(!f.is_full() && f.take(4096).is_some());
    }

    #[test]
    fn places_never_overlap() {
        let f = file(1 << 20);
        let rng = SplitMix::new(3);
        let mut held: Vec<Arc<Place>> = Vec::new();
        for _ in 0..3000 {
            if rng.next().is_multiple_of(2) {
                held.extend(f.take(1 + rng.next() % 100_000));
            } else if !held.is_empty() {
                held.swap_remove(rng.next() as usize % held.len());
            }
            let mut ranges: Vec<ByteRange> = held.iter().map(|p| p.range).collect();
            ranges.sort_by_key(|r| r.offset);
            assert!(ranges.windows(2).all(|w| w[0].end() <= w[1].offset));
            assert_eq!(f.used(), ranges.iter().map(|r| r.len).sum::<u64>());
        }
    }
}
