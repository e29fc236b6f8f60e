//! The clock of one shard.

use crate::sync::Arc;

/// What a clock can take out.
pub(in super::super) trait Cached {
    /// Takes the mark of a look away; whether there was one.
    fn take_used(&self) -> bool;
    /// Takes it out of use if nothing keeps it.
    fn try_evict(&self) -> bool;
}

/// What a shard has, in a ring with a hand.
pub(in super::super) struct Ring<T> {
    slices: Vec<Arc<T>>,
    hand: usize,
}

impl<T> Default for Ring<T> {
    fn default() -> Self {
        Self { slices: Vec::new(), hand: 0 }
    }
}

impl<T: Cached> Ring<T> {
    pub(in super::super) fn len(&self) -> usize {
        self.slices.len()
    }

    /// A slice comes in, behind the hand: it is looked at last.
    pub(in super::super) fn push(&mut self, slice: Arc<T>) {
        self.slices.push(slice);
        let last = self.slices.len() - 1;
        self.slices.swap(self.hand, last);
        self.hand = (self.hand + 1) % self.slices.len();
    }

    /// Takes out the first slice from the hand on that nothing keeps and nobody has looked at since the hand came by; `None` if all are kept. Two turns at most: the
    /// first takes all marks of looks away.
    pub(in super::super) fn evict(&mut self) -> Option<Arc<T>> {
        for _ in 0..self.slices.len() * 2 {
            if self.hand >= self.slices.len() {
                self.hand = 0;
            }
            let slice = &self.slices[self.hand];
            if !slice.take_used() && slice.try_evict() {
                return Some(self.slices.swap_remove(self.hand));
            }
            self.hand += 1;
        }
        None
    }

    /// Takes `slice` out.
    pub(in super::super) fn remove(&mut self, slice: &Arc<T>) {
        self.slices.retain(|s| !Arc::ptr_eq(s, slice));
    }

    /// Takes out every slice that nothing keeps and nobody has looked at since the last time, for the clean interval.
    pub(in super::super) fn sweep(&mut self) -> Vec<Arc<T>> {
        let mut out = Vec::new();
        self.slices.retain(|slice| {
            let goes = !slice.take_used() && slice.try_evict();
            if goes {
                out.push(slice.clone());
            }
            !goes
        });
        self.hand = 0;
        out
    }
}
