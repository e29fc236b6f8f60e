//! The clock of one shard.

use super::slice::Slice;
use crate::sync::Arc;

/// The slices of a shard in a ring, with a hand.
#[derive(Default)]
pub(super) struct Ring {
    slices: Vec<Arc<Slice>>,
    hand: usize,
}

impl Ring {
    pub(super) fn len(&self) -> usize {
        self.slices.len()
    }

    /// A slice comes in, behind the hand: it is looked at last.
    pub(super) fn push(&mut self, slice: Arc<Slice>) {
        self.slices.push(slice);
        let last = self.slices.len() - 1;
        self.slices.swap(self.hand, last);
        self.hand = (self.hand + 1) % self.slices.len();
    }

    /// Takes out the first slice from the hand on that nothing keeps and nobody has looked at since the hand came by; `None` if all are kept. Two turns at most: the
    /// first takes all marks of looks away.
    pub(super) fn evict(&mut self) -> Option<Arc<Slice>> {
        for _ in 0..self.slices.len() * 2 {
            if self.hand >= self.slices.len() {
                self.hand = 0;
            }
            let slice = &self.slices[self.hand];
            if slice.is_idle() && !slice.take_used() && slice.evict() {
                return Some(self.slices.swap_remove(self.hand));
            }
            self.hand += 1;
        }
        None
    }

    /// Takes `slice` out.
    pub(super) fn remove(&mut self, slice: &Arc<Slice>) {
        self.slices.retain(|s| !Arc::ptr_eq(s, slice));
    }

    /// Takes out every slice that nothing keeps and nobody has looked at since the last time, for the clean interval.
    pub(super) fn sweep(&mut self) -> Vec<Arc<Slice>> {
        let mut out = Vec::new();
        self.slices.retain(|slice| {
            let goes = slice.is_idle() && !slice.take_used() && slice.evict();
            if goes {
                out.push(slice.clone());
            }
            !goes
        });
        self.hand = 0;
        out
    }
}
