//! States of the granules: one atomic byte each.

use crate::sync::atomic::{AtomicU8, Ordering};
use once_cell::sync::OnceCell;
use std::ops::Range;

/// State of a granule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum State {
    /// Old data is only on the source.
    Needed = 0,
    /// Old data is on its way; a COPY entry covers the granule.
    Reading = 1,
    /// The target (or a transit buffer) has it.
    Preserved = 2,
    /// Not part of the snapshot, or discarded by the reader.
    Released = 3,
    /// Gone.
    Lost = 4,
}

const CLEAR: u8 = 0x80;
const STATE: u8 = 0x07;

/// The bytes, in blocks that are made when a granule of theirs first leaves NEEDED: a block that is not there is all NEEDED (S59).
#[derive(Debug)]
pub(super) struct States {
    blocks: Box<[OnceCell<Box<[AtomicU8]>>]>,
    count: u64,
}

/// Granules per block.
const BLOCK: u64 = 1 << 16;

impl States {
    /// `count` granules, all NEEDED.
    pub(super) fn new(count: u64) -> Self {
        let blocks = (0..count.div_ceil(BLOCK)).map(|_| OnceCell::new()).collect();
        Self { blocks, count }
    }

    pub(super) fn len(&self) -> u64 {
        self.count
    }

    fn load(&self, index: u64) -> u8 {
        // Acquire: partner of the Release stores below; a block that is missing is NEEDED.
        let block = self.blocks[(index / BLOCK) as usize].get();
        block.map_or(0, |b| b[(index % BLOCK) as usize].load(Ordering::Acquire))
    }

    fn at(&self, index: u64) -> &AtomicU8 {
        let block = &self.blocks[(index / BLOCK) as usize];
        let bytes = block.get_or_init(|| (0..BLOCK).map(|_| AtomicU8::new(0)).collect());
        &bytes[(index % BLOCK) as usize]
    }

    /// The state now. SeqCst is not needed here: S15's fences are in the in-flight list.
    pub(super) fn get(&self, index: u64) -> State {
        match self.load(index) & STATE {
            0 => State::Needed,
            1 => State::Reading,
            2 => State::Preserved,
            3 => State::Released,
            _ => State::Lost,
        }
    }

    /// Whether guests may pass without a look (S71). Acquire: partner of the Release in `set_clear`, so that whoever passes comes after the reads that were waited for.
    pub(super) fn is_clear(&self, index: u64) -> bool {
        self.load(index) & CLEAR != 0
    }

    /// Marks a granule that has left NEEDED.
    pub(super) fn set_clear(&self, index: u64) {
        self.at(index).fetch_or(CLEAR, Ordering::Release);
    }

    /// `from` to `to`; false if the granule is in another state. AcqRel: the winner sees what the former owner of the state did, and publishes its own.
    pub(super) fn change(&self, index: u64, from: State, to: State) -> bool {
        let byte = self.at(index);
        let mut now = byte.load(Ordering::Acquire);
        loop {
            if now & STATE != from as u8 {
                return false;
            }
            match byte.compare_exchange_weak(now, now & CLEAR | to as u8, Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => return true,
                Err(other) => now = other,
            }
        }
    }

    /// The first run of NEEDED granules inside `range`, at most `max` long.
    pub(super) fn needed_run(&self, range: Range<u64>, max: u64) -> Option<Range<u64>> {
        let first = self.find(range.clone(), State::Needed)?;
        let limit = range.end.min(first + max);
        let end = (first..limit).find(|g| self.get(*g) != State::Needed).unwrap_or(limit);
        Some(first..end)
    }

    /// The first granule of `range` in this state.
    pub(super) fn find(&self, range: Range<u64>, state: State) -> Option<u64> {
        range.into_iter().find(|g| self.get(*g) == state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_keeps_the_clear_mark_and_fails_from_another_state() {
        let s = States::new(2);
        assert!(s.change(0, State::Needed, State::Reading));
        assert!(!s.change(0, State::Needed, State::Reading));
        assert!(s.change(0, State::Reading, State::Preserved));
        assert!(!s.is_clear(0));
        s.set_clear(0);
        assert!(s.change(0, State::Preserved, State::Released));
        assert!(s.is_clear(0) && !s.is_clear(1));
        assert_eq!((s.get(0), s.get(1)), (State::Released, State::Needed));
    }

    #[test]
    fn needed_runs_agree_with_a_search_for_every_pattern() {
        for pattern in 0u32..64 {
            let s = States::new(6);
            for g in 0..6 {
                if pattern >> g & 1 == 1 {
                    assert!(s.change(g, State::Needed, State::Released));
                }
            }
            for from in 0..6u64 {
                for max in 1..4 {
                    let free: Vec<u64> = (from..6).filter(|g| pattern >> g & 1 == 0).collect();
                    match s.needed_run(from..6, max) {
                        None => assert!(free.is_empty()),
                        Some(run) => {
                            assert_eq!(run.start, free[0]);
                            assert!(run.end - run.start <= max && run.clone().all(|g| free.contains(&g)));
                            let whole =
                                run.end - run.start == max || run.end == 6 || !free.contains(&run.end);
                            assert!(whole, "the run is as long as it can be");
                        }
                    }
                }
            }
        }
    }
}
