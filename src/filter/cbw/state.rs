//! The state of every granule, and its changes.
//!
//! One byte per granule, in chunks that are made when one of their granules first leaves NEEDED: a filter over a huge disk
//! starts at once (S59) and what no guest touches costs nothing. BUFFERED, SPILLED and STORED of semantics.md are all
//! *preserved* here: where the target node keeps the data is its own business, and what a background copy has read but not yet
//! written is in `transit`.
//!
//! ```text
//!   NEEDED <-> READING -> PRESERVED    READING falls back only while all writers are held (S72); they are: a writer goes on
//!                                      only when the granule is marked clear, which NEEDED and READING never are.
//!   NEEDED, PRESERVED -> RELEASED      final
//!   any but RELEASED  -> LOST          final
//! ```
//!
//! The *clear* mark (S71) says: the granule has left NEEDED and READING for good, and every read that was registered at the source before
//! has ended (or was told to choose again, S34). It is the only thing the fast path looks at.

#![cfg_attr(cobweb_loom, allow(dead_code))]

use crate::sync::atomic::AtomicU8;
use crate::sync::atomic::Ordering::{AcqRel, Acquire};
use once_cell::sync::OnceCell;
use std::ops::Range;

/// Numbers of granules.
pub(super) type Granules = Range<u64>;

/// What a granule's old data is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum State {
    /// Old data is only on the source. Zero, so that memory never touched says this.
    Needed = 0,
    /// Claimed; on its way from the source into memory or, for a guest's copy, to the target node.
    Reading = 1,
    /// With the target node, or on its way there in memory of the filter.
    Preserved = 2,
    /// Not part of the snapshot (any more).
    Released = 3,
    /// Gone.
    Lost = 4,
}

/// A set of states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StateSet(u8);

impl StateSet {
    /// The given states.
    pub(super) const fn of(states: &[State]) -> Self {
        let (mut bits, mut i) = (0, 0);
        while i < states.len() {
            bits |= 1 << states[i] as u8;
            i += 1;
        }
        Self(bits)
    }

    /// Whether `state` is one of them.
    pub(super) const fn has(self, state: State) -> bool {
        self.0 >> state as u8 & 1 != 0
    }
}

/// State and mark of a granule, as seen at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seen(u8);

impl Seen {
    const CLEAR: u8 = 0x80;

    /// The state.
    pub(super) fn state(self) -> State {
        match self.0 & !Self::CLEAR {
            0 => State::Needed,
            1 => State::Reading,
            2 => State::Preserved,
            3 => State::Released,
            _ => State::Lost,
        }
    }

    /// Whether writes may go to the source without a look (S71).
    pub(super) fn is_clear(self) -> bool {
        self.0 & Self::CLEAR != 0
    }
}

/// States whose data is not yet safe: writers are held.
pub(super) const HELD: StateSet = StateSet::of(&[State::Needed, State::Reading]);
/// States in which old data is on the way or safe; what can be lost.
pub(super) const KEPT: StateSet = StateSet::of(&[State::Needed, State::Reading, State::Preserved]);

#[cfg(not(cobweb_loom))]
const CHUNK_LOG2: u32 = 16;
/// loom's atomics are dear.
#[cfg(cobweb_loom)]
const CHUNK_LOG2: u32 = 1;

type Chunk = Box<[AtomicU8]>;

/// The states of a disk's granules. Any thread; wait-free but for the allocation of a chunk.
pub(super) struct States {
    chunks: Box<[OnceCell<Chunk>]>,
    count: u64,
}

impl States {
    /// `count` granules, all NEEDED. Costs a word or three per 65536 granules.
    pub(super) fn new(count: u64) -> Self {
        let chunks = (0..count.div_ceil(1 << CHUNK_LOG2)).map(|_| OnceCell::new()).collect();
        Self { chunks, count }
    }

    /// Number of granules.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// State and mark of a granule.
    pub(super) fn get(&self, granule: u64) -> Seen {
        match self.chunks[(granule >> CHUNK_LOG2) as usize].get() {
            // Acquire: partner is every exchange below. Who sees a state sees what led to it.
            Some(chunk) => Seen(chunk[(granule & ((1 << CHUNK_LOG2) - 1)) as usize].load(Acquire)),
            None => Seen(0),
        }
    }

    /// NEEDED becomes READING; whether it was this call that did it.
    pub(super) fn claim(&self, granule: u64) -> bool {
        self.change(granule, StateSet::of(&[State::Needed]), State::Reading).is_some()
    }

    /// Changes a granule that is in one of `from` to `to`, keeping the mark; what it was before, or `None` if it was in none of them.
    pub(super) fn change(&self, granule: u64, from: StateSet, to: State) -> Option<State> {
        let cell = self.cell(granule);
        // Acquire: as in `get`; the load is a result when the state does not fit.
        let mut seen = cell.load(Acquire);
        loop {
            let was = Seen(seen).state();
            if !from.has(was) {
                return None;
            }
            let next = to as u8 | seen & Seen::CLEAR;
            // AcqRel: partner is every load here. For the fence (S5) the order comes from the in-flight list, see `fence`.
            match cell.compare_exchange_weak(seen, next, AcqRel, Acquire) {
                Ok(_) => return Some(was),
                Err(now) => seen = now,
            }
        }
    }

    /// Sets the clear mark; refused for a granule that is NEEDED or READING.
    pub(super) fn mark_clear(&self, granule: u64) -> bool {
        let cell = self.cell(granule);
        let mut seen = cell.load(Acquire);
        loop {
            if HELD.has(Seen(seen).state()) {
                return false;
            }
            if Seen(seen).is_clear() {
                return true;
            }
            // AcqRel: who passes by the mark comes after the reads that the marker waited for.
            match cell.compare_exchange_weak(seen, seen | Seen::CLEAR, AcqRel, Acquire) {
                Ok(_) => return true,
                Err(now) => seen = now,
            }
        }
    }

    /// Length of the run at the start of `granules` for which `same` holds.
    pub(super) fn run(&self, granules: Range<u64>, same: impl Fn(Seen) -> bool) -> u64 {
        granules.clone().take_while(|g| same(self.get(*g))).count() as u64
    }

    /// The run at the start of `granules` whose first granule has just been seen to be `same`. Never empty, though that granule may have changed since: what
    /// was seen is out of date in any case, and whoever acts on it claims or looks again.
    pub(super) fn run_seen(&self, granules: Range<u64>, same: impl Fn(Seen) -> bool) -> Range<u64> {
        let second = granules.start + 1;
        granules.start..second + self.run(second..granules.end, same)
    }

    /// The first run of granules of `range` that are in a state of `set`.
    pub(super) fn next_run(&self, range: Range<u64>, set: StateSet) -> Option<Range<u64>> {
        let end = range.end.min(self.count);
        let at = self.next_in(range, set)?;
        Some(self.run_seen(at..end, |s| set.has(s.state())))
    }

    /// The first granule of `range` that is in a state of `set`.
    pub(super) fn next_in(&self, range: Range<u64>, set: StateSet) -> Option<u64> {
        let (mut at, end) = (range.start, range.end.min(self.count));
        while at < end {
            let chunk_end = (((at >> CHUNK_LOG2) + 1) << CHUNK_LOG2).min(end);
            if self.chunks[(at >> CHUNK_LOG2) as usize].get().is_none() && !set.has(State::Needed) {
                at = chunk_end;
            } else if set.has(self.get(at).state()) {
                return Some(at);
            } else {
                at += 1;
            }
        }
        None
    }

    fn cell(&self, granule: u64) -> &AtomicU8 {
        debug_assert!(granule < self.count);
        let index = granule >> CHUNK_LOG2;
        let chunk = self.chunks[index as usize].get_or_init(|| {
            let left = self.count - (index << CHUNK_LOG2);
            (0..left.min(1 << CHUNK_LOG2)).map(|_| AtomicU8::new(State::Needed as u8)).collect()
        });
        &chunk[(granule & ((1 << CHUNK_LOG2) - 1)) as usize]
    }
}

impl std::fmt::Debug for States {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let made = self.chunks.iter().filter(|c| c.get().is_some()).count();
        f.debug_struct("States").field("count", &self.count).field("chunks", &made).finish()
    }
}

#[cfg(all(test, not(cobweb_loom)))]
mod tests {
    use super::*;

    const ALL: [State; 5] = [State::Needed, State::Reading, State::Preserved, State::Released, State::Lost];

    #[test]
    fn a_run_that_has_been_seen_is_not_empty_though_its_granules_have_changed() {
        let s = States::new(4);
        let changed = |s: Seen| s.state() == State::Lost;
        assert_eq!((s.run(1..4, changed), s.run_seen(1..4, changed)), (0, 1..2));
        let needed = |s: Seen| s.state() == State::Needed;
        assert!(s.claim(3));
        assert_eq!((s.run(1..4, needed), s.run_seen(1..4, needed)), (2, 1..3));
    }

    #[test]
    fn a_new_table_is_needed_throughout_and_takes_no_memory() {
        let s = States::new(1 << 30);
        assert_eq!(s.get((1 << 30) - 1).state(), State::Needed);
        assert_eq!(format!("{s:?}"), "States { count: 1073741824, chunks: 0 }");
        assert!(s.claim(5));
        assert_eq!(format!("{s:?}"), "States { count: 1073741824, chunks: 1 }");
    }

    #[test]
    fn only_granules_that_are_safe_can_be_marked_and_changes_keep_the_mark() {
        for from in ALL {
            let s = States::new(1);
            s.change(0, StateSet::of(&[State::Needed]), from);
            assert_eq!(s.get(0).state(), from);
            assert_eq!(s.mark_clear(0), !HELD.has(from), "{from:?}");
            assert_eq!(s.get(0).is_clear(), !HELD.has(from));
            let marked = s.get(0).is_clear();
            assert_eq!(s.change(0, StateSet::of(&ALL), State::Lost), Some(from));
            assert_eq!(s.get(0).is_clear(), marked);
        }
    }

    #[test]
    fn a_granule_is_claimed_once() {
        let s = States::new(3);
        assert!(s.claim(1) && !s.claim(1));
        assert_eq!(s.change(1, StateSet::of(&[State::Needed]), State::Released), None);
        assert_eq!(s.get(1).state(), State::Reading);
    }

    #[test]
    fn runs_are_found_across_chunks_and_cut_at_the_bound() {
        let count = (1 << CHUNK_LOG2) + 10;
        let s = States::new(count);
        let set = StateSet::of(&[State::Reading]);
        assert_eq!(s.next_run(0..count, set), None);
        for g in (1 << CHUNK_LOG2) - 3..(1 << CHUNK_LOG2) + 4 {
            assert!(s.claim(g));
        }
        let first = (1 << CHUNK_LOG2) - 3;
        assert_eq!(s.next_run(0..count, set), Some(first..first + 7));
        assert_eq!(s.next_run(0..first + 2, set), Some(first..first + 2));
        assert_eq!(s.next_run(first + 7..u64::MAX, StateSet::of(&[State::Needed])), Some(first + 7..count));
        assert_eq!(s.next_run(count..count, set), None);
    }
}
