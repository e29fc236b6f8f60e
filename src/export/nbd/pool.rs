//! Data buffers of one connection, within its limits.
//!
//! A connection has [`NBD_BYTES_OWN`] for itself and borrows what it needs above that from the server's [`Budget`], up to
//! [`NBD_BYTES_CONNECTION_MAX`]. Buffers come in powers of two, aligned to 4096 bytes, and are kept for the next request. Memory that somebody below still
//! holds when a request has ended (a cache that took it over) is not used again and not counted any more: it is its holder's.

use crate::limits::{NBD_BYTES_CONNECTION_MAX, NBD_BYTES_OWN, NBD_PIECE_LEN};
use crate::request::Buffers;
use crate::sync::Arc;
use crate::sync::atomic::{AtomicUsize, Ordering, fence};

/// Bytes that the connections of a server share.
#[derive(Debug)]
pub(super) struct Budget {
    free: AtomicUsize,
}

impl Budget {
    pub(super) fn new(bytes: usize) -> Arc<Self> {
        Arc::new(Self { free: AtomicUsize::new(bytes) })
    }

    // Relaxed in all three: the counter guards an amount, not any memory.
    fn take(&self, bytes: usize) -> bool {
        self.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |f| f.checked_sub(bytes)).is_ok()
    }

    fn give(&self, bytes: usize) {
        self.free.fetch_add(bytes, Ordering::Relaxed);
    }

    #[cfg(test)]
    pub(super) fn free(&self) -> usize {
        self.free.load(Ordering::Relaxed)
    }
}

/// The buffers of one connection.
#[derive(Debug)]
pub(super) struct Pool {
    budget: Arc<Budget>,
    /// Bytes in use and kept.
    held: usize,
    /// Bytes kept in `idle`.
    kept: usize,
    idle: [Vec<Buffers>; CLASSES],
}

/// Smallest buffer: a page.
const SMALLEST: usize = 4096;
const CLASSES: usize = (NBD_PIECE_LEN / SMALLEST).ilog2() as usize + 1;
/// Bytes kept while the connection is idle.
const KEPT_IDLE: usize = 256 << 10;

impl Pool {
    pub(super) fn new(budget: Arc<Budget>) -> Self {
        Self { budget, held: 0, kept: 0, idle: Default::default() }
    }

    /// A buffer of at least `len` bytes (1 to [`NBD_PIECE_LEN`]) in one segment, or `None` at the limit: something of this connection must end first.
    /// The content is whatever it held before.
    pub(super) fn get(&mut self, len: usize) -> Option<Buffers> {
        let class = class_of(len);
        if let Some(bufs) = self.idle[class].pop() {
            self.kept -= class_size(class);
            return Some(bufs);
        }
        let size = class_size(class);
        if !self.grow(size) {
            // What is kept in other sizes makes room.
            self.trim_to(0);
            if !self.grow(size) {
                return None;
            }
        }
        Some(Buffers::alloc(size, SMALLEST))
    }

    /// Takes back a buffer of [`Pool::get`].
    pub(super) fn put(&mut self, bufs: Buffers) {
        let class = class_of(bufs.len());
        if is_sole_user(&bufs) {
            self.kept += class_size(class);
            self.idle[class].push(bufs);
        } else {
            self.shrink(class_size(class));
        }
    }

    /// Whether [`Pool::trim`] would give anything back.
    pub(super) fn is_fat(&self) -> bool {
        self.kept > KEPT_IDLE
    }

    /// Gives most of what is kept back to the system: the connection is idle.
    pub(super) fn trim(&mut self) {
        self.trim_to(KEPT_IDLE);
    }

    /// Bytes in use.
    #[cfg(test)]
    pub(super) fn in_use(&self) -> usize {
        self.held - self.kept
    }

    fn trim_to(&mut self, limit: usize) {
        for class in (0..CLASSES).rev() {
            while self.kept > limit && self.idle[class].pop().is_some() {
                self.kept -= class_size(class);
                self.shrink(class_size(class));
            }
        }
    }

    fn grow(&mut self, bytes: usize) -> bool {
        let held = self.held + bytes;
        let ok = held <= NBD_BYTES_CONNECTION_MAX && self.budget.take(borrowed(held) - borrowed(self.held));
        if ok {
            self.held = held;
        }
        ok
    }

    fn shrink(&mut self, bytes: usize) {
        let held = self.held - bytes;
        self.budget.give(borrowed(self.held) - borrowed(held));
        self.held = held;
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.budget.give(borrowed(self.held));
    }
}

/// What a connection that holds `held` bytes has borrowed.
const fn borrowed(held: usize) -> usize {
    held.saturating_sub(NBD_BYTES_OWN)
}

const fn class_size(class: usize) -> usize {
    SMALLEST << class
}

fn class_of(len: usize) -> usize {
    assert!(len <= NBD_PIECE_LEN, "a buffer of {len} bytes is longer than a piece");
    (len.max(SMALLEST).next_power_of_two() / SMALLEST).ilog2() as usize
}

fn is_sole_user(bufs: &Buffers) -> bool {
    let sole = bufs.segments().iter().all(|s| s.owner().is_some_and(|o| Arc::strong_count(o) == 1));
    // Acquire, partner of the decrement in the last other holder's drop: what it did with the memory is over.
    fence(Ordering::Acquire);
    sole
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_always_gets_its_own_share_and_borrows_the_rest() {
        let budget = Budget::new(NBD_PIECE_LEN);
        let (mut a, mut b) = (Pool::new(budget.clone()), Pool::new(budget.clone()));
        let own = NBD_BYTES_OWN / NBD_PIECE_LEN;
        let held: Vec<_> = (0..=own).map(|_| a.get(NBD_PIECE_LEN).expect("own and borrowed")).collect();
        assert_eq!(budget.free(), 0);
        assert!(a.get(1).is_none());
        let other: Vec<_> = (0..own).map(|_| b.get(NBD_PIECE_LEN).expect("its own")).collect();
        assert!(b.get(1).is_none());
        held.into_iter().for_each(|h| a.put(h));
        assert_eq!(a.in_use(), 0);
        a.trim();
        assert_eq!(budget.free(), NBD_PIECE_LEN);
        assert!(b.get(1).is_some());
        drop((other, a, b));
        assert_eq!(budget.free(), NBD_PIECE_LEN);
    }

    #[test]
    fn a_connection_has_an_upper_limit_even_if_there_is_more() {
        let budget = Budget::new(usize::MAX / 2);
        let mut pool = Pool::new(budget);
        let mut held = Vec::new();
        while let Some(b) = pool.get(NBD_PIECE_LEN) {
            held.push(b);
        }
        assert_eq!(held.len() * NBD_PIECE_LEN, NBD_BYTES_CONNECTION_MAX);
    }

    #[test]
    fn buffers_are_used_again_unless_somebody_still_holds_them() {
        let mut pool = Pool::new(Budget::new(0));
        let first = pool.get(5000).expect("memory");
        assert_eq!((first.len(), first.segments().len()), (8192, 1));
        assert!(first.is_aligned(4096));
        let address = first.segments()[0].as_ptr();
        pool.put(first);
        let again = pool.get(8192).expect("memory");
        assert_eq!(again.segments()[0].as_ptr(), address);
        let taken_over = again.slice(0, 10);
        pool.put(again);
        assert_eq!((pool.in_use(), pool.kept), (0, 0));
        let fresh = pool.get(8192).expect("memory");
        assert_ne!(fresh.segments()[0].as_ptr(), taken_over.segments()[0].as_ptr());
    }

    #[test]
    fn kept_buffers_of_other_sizes_make_room() {
        let mut pool = Pool::new(Budget::new(0));
        let small: Vec<_> = (0..NBD_BYTES_OWN / SMALLEST).map(|_| pool.get(1).expect("memory")).collect();
        assert!(pool.get(NBD_PIECE_LEN).is_none());
        small.into_iter().for_each(|b| pool.put(b));
        assert!(pool.get(NBD_PIECE_LEN).is_some());
    }

    #[test]
    fn every_length_gets_a_class_that_holds_it() {
        for len in [1, 511, 4096, 4097, 65_536, 65_537, NBD_PIECE_LEN - 1, NBD_PIECE_LEN] {
            let size = class_size(class_of(len));
            assert!(size >= len && size <= NBD_PIECE_LEN.max(2 * len).max(SMALLEST));
        }
        assert_eq!(class_size(CLASSES - 1), NBD_PIECE_LEN);
    }
}
