//! Runs: host clusters reserved ahead of need.
//!
//! A run is counted in RAM, covered by the file and, as a rule, zeroed, before a cluster of it is handed out (rule 16). It is *ripe* when a cut that
//! began after all that has passed its barriers; only then may an entry and the data it points at share a barrier (rule Z).

use crate::units::ByteRange;
use std::collections::VecDeque;

/// Contiguous clusters, handed out from the front.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// What is left of it, in bytes of the file.
    pub rest: ByteRange,
    /// Whether it reads as zeros.
    pub zeroed: bool,
    /// The first cut that covers its refcounts and its zeroing.
    pub cut: u64,
}

/// Clusters for one use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Where.
    pub range: ByteRange,
    /// Whether they read as zeros.
    pub zeroed: bool,
    /// Whether refcounts and zeros are durable.
    pub ripe: bool,
    /// The first cut that covers them.
    pub cut: u64,
}

/// The runs of one kind of cluster, the one in use first.
#[derive(Debug)]
pub struct Runs {
    runs: VecDeque<Run>,
    left: u64,
    /// Length of the run that was added last.
    last_len: u64,
    next_len: u64,
    len_max: u64,
}

impl Runs {
    /// No runs yet. The first is to be `first` bytes long, the longest `len_max`.
    pub fn new(first: u64, len_max: u64) -> Self {
        Self { runs: VecDeque::new(), left: 0, last_len: 0, next_len: first, len_max }
    }

    /// Bytes that can be handed out.
    pub fn left(&self) -> u64 {
        self.left
    }

    /// How long the next run should be.
    pub fn next_len(&self) -> u64 {
        self.next_len
    }

    /// Whether it is time to reserve the next run, so that it is ripe when it is needed.
    pub fn wants_more(&self) -> bool {
        self.left < self.last_len / 2
    }

    /// The last run was used up: the next one is longer.
    pub fn grow(&mut self) {
        self.next_len = (self.next_len * 2).min(self.len_max);
    }

    /// Space is short: runs are short again.
    pub fn shrink(&mut self, len: u64) {
        self.next_len = len.min(self.len_max);
    }

    /// Adds a run behind the others.
    pub fn add(&mut self, run: Run) {
        self.left += run.rest.len;
        self.last_len = run.rest.len;
        match self.runs.back_mut() {
            Some(last)
                if last.rest.end() == run.rest.offset && last.zeroed == run.zeroed && last.cut == run.cut =>
            {
                last.rest.len += run.rest.len;
            }
            _ => self.runs.push_back(run),
        }
    }

    /// The next `len` bytes or fewer (a multiple of the cluster size if `len` and the runs are), in one piece. `done` is the last finished cut.
    pub fn take(&mut self, len: u64, done: u64) -> Option<Grant> {
        let run = self.runs.front_mut()?;
        let range = ByteRange { offset: run.rest.offset, len: run.rest.len.min(len) };
        let grant = Grant { range, zeroed: run.zeroed, ripe: run.cut <= done, cut: run.cut };
        run.rest = ByteRange { offset: range.end(), len: run.rest.len - range.len };
        if run.rest.is_empty() {
            self.runs.pop_front();
        }
        self.left -= range.len;
        Some(grant)
    }

    /// The next `len` bytes in one piece or nothing; shorter runs in front are passed over and kept.
    pub fn take_whole(&mut self, len: u64, done: u64) -> Option<Grant> {
        let at = self.runs.iter().position(|r| r.rest.len >= len)?;
        self.runs.swap(0, at);
        self.take(len, done)
    }

    /// Takes everything that is left.
    pub fn drain(&mut self) -> Vec<Run> {
        self.left = 0;
        self.runs.drain(..).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(offset: u64, len: u64, cut: u64) -> Run {
        Run { rest: ByteRange { offset, len }, zeroed: true, cut }
    }

    #[test]
    fn clusters_come_in_order_and_only_once_and_are_ripe_after_their_cut() {
        let mut runs = Runs::new(8, 32);
        runs.add(run(100, 4, 1));
        runs.add(run(104, 4, 1));
        runs.add(run(200, 4, 2));
        assert_eq!(runs.left(), 12);
        let g = runs.take(6, 0).expect("there");
        assert_eq!((g.range, g.ripe), (ByteRange { offset: 100, len: 6 }, false));
        let g = runs.take(6, 1).expect("there");
        assert_eq!((g.range, g.ripe), (ByteRange { offset: 106, len: 2 }, true));
        let g = runs.take(6, 1).expect("there");
        assert_eq!((g.range, g.ripe), (ByteRange { offset: 200, len: 4 }, false));
        assert_eq!((runs.take(1, 9), runs.left()), (None, 0));
    }

    #[test]
    fn a_piece_that_must_be_whole_passes_over_short_runs() {
        let mut runs = Runs::new(8, 32);
        runs.add(run(100, 1, 1));
        runs.add(run(200, 3, 1));
        assert_eq!(runs.take_whole(4, 1), None);
        assert_eq!(runs.take_whole(2, 1).map(|g| g.range.offset), Some(200));
        assert_eq!(runs.left(), 2);
        let rest: u64 = runs.drain().iter().map(|r| r.rest.len).sum();
        assert_eq!((rest, runs.left()), (2, 0));
    }

    #[test]
    fn runs_grow_under_load_up_to_their_limit() {
        let mut runs = Runs::new(8, 32);
        let mut lens = Vec::new();
        for _ in 0..4 {
            lens.push(runs.next_len());
            runs.grow();
        }
        assert_eq!(lens, [8, 16, 32, 32]);
        runs.add(run(0, 16, 1));
        runs.take(8, 1);
        assert!(!runs.wants_more(), "half is left");
        runs.take(1, 1);
        assert!(runs.wants_more());
        runs.shrink(2);
        assert_eq!(runs.next_len(), 2);
    }
}
