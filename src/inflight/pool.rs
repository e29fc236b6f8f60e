//! Memory of freed nodes, kept for reuse.
//!
//! Nodes are aligned to cache lines, and for that the system's allocator takes longer than the list for all the rest of
//! an insertion and removal. Each thread has two magazines of free pieces; full ones it cannot keep go to a depot for all
//! threads, where the next empty-handed one finds them (J. Bonwick, J. Adams, "Magazines and Vmem", USENIX 2001). The depot
//! is needed because epochs free in bursts: a thread that is descheduled while pinned holds up everything retired since.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::cell::Cell;
use std::ptr::{self, NonNull};

use super::entry::Node;
use crate::sync::atomic::AtomicPtr;
use crate::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use crate::sync::thread_local;

/// Pieces in a full magazine. A thread keeps at most two full ones, 32 KiB.
const MAGAZINE: usize = 256;

/// Full magazines in the depot, 1 MiB in all.
const DEPOT: usize = 64;

const LAYOUT: Layout = Layout::new::<Node>();
const _: () = assert!(LAYOUT.size() == 64 && LAYOUT.align() == 64, "a node is one cache line");

struct Free {
    next: *mut Free,
}

/// A stack of free pieces.
struct Magazine {
    first: Cell<*mut Free>,
    count: Cell<usize>,
}

struct Pool {
    current: Magazine,
    /// Empty or full.
    spare: Magazine,
}

/// Each slot is empty or has one full magazine. Taking and giving whole slots has no ABA.
static DEPOT_SLOTS: [AtomicPtr<Free>; DEPOT] = [const { AtomicPtr::new(ptr::null_mut()) }; DEPOT];

thread_local! {
    static POOL: Pool = const { Pool { current: Magazine::new(), spare: Magazine::new() } };
}

/// Memory for a node, not initialised.
pub(super) fn take() -> NonNull<Node> {
    // No pool while the thread ends.
    POOL.try_with(Pool::take).ok().flatten().map(NonNull::cast).unwrap_or_else(|| {
        // SAFETY: the layout is not empty.
        NonNull::new(unsafe { alloc(LAYOUT) }.cast()).unwrap_or_else(|| handle_alloc_error(LAYOUT))
    })
}

/// Takes memory back.
///
/// # Safety
/// It came from [`take`], perhaps on another thread, and nobody uses it.
pub(super) unsafe fn give(memory: NonNull<Node>) {
    if POOL.try_with(|pool| pool.give(memory.cast())).is_err() {
        // SAFETY: passed on to the caller.
        unsafe { free(memory.cast()) };
    }
}

impl Pool {
    fn take(&self) -> Option<NonNull<Free>> {
        if let Some(piece) = self.current.pop() {
            return Some(piece);
        }
        if self.spare.count.get() == 0 {
            self.spare.load_from_depot();
        }
        self.current.swap(&self.spare);
        self.current.pop()
    }

    fn give(&self, memory: NonNull<Free>) {
        if self.current.count.get() == MAGAZINE {
            if self.spare.count.get() == MAGAZINE {
                self.spare.unload_to_depot();
            }
            self.current.swap(&self.spare);
        }
        self.current.push(memory);
    }
}

impl Magazine {
    const fn new() -> Self {
        Self { first: Cell::new(ptr::null_mut()), count: Cell::new(0) }
    }

    fn pop(&self) -> Option<NonNull<Free>> {
        let first = NonNull::new(self.first.get())?;
        // SAFETY: what is in a magazine is a `Free` of its own.
        self.first.set(unsafe { first.as_ref() }.next);
        self.count.set(self.count.get() - 1);
        Some(first)
    }

    fn push(&self, memory: NonNull<Free>) {
        // SAFETY: the memory is the pool's now, and large enough.
        unsafe { memory.write(Free { next: self.first.get() }) };
        self.first.set(memory.as_ptr());
        self.count.set(self.count.get() + 1);
    }

    fn swap(&self, other: &Self) {
        self.first.swap(&other.first);
        self.count.swap(&other.count);
    }

    /// Fills an empty magazine if the depot has a full one.
    fn load_from_depot(&self) {
        // Relaxed: a first look. Acquire: partner is the exchange below; the pieces are what their thread wrote.
        let full = |slot: &AtomicPtr<Free>| {
            NonNull::new(slot.load(Relaxed)).and_then(|_| NonNull::new(slot.swap(ptr::null_mut(), Acquire)))
        };
        if let Some(first) = DEPOT_SLOTS.iter().find_map(full) {
            self.first.set(first.as_ptr());
            self.count.set(MAGAZINE);
        }
    }

    /// Empties a full magazine: into the depot, or to the system if that is full.
    fn unload_to_depot(&self) {
        let first = self.first.get();
        let room = |slot: &AtomicPtr<Free>| {
            // Relaxed: a first look. AcqRel: partner is the swap above.
            slot.load(Relaxed).is_null()
                && slot.compare_exchange(ptr::null_mut(), first, Release, Relaxed).is_ok()
        };
        if DEPOT_SLOTS.iter().any(room) {
            self.first.set(ptr::null_mut());
            self.count.set(0);
        } else {
            self.free_all();
        }
    }

    fn free_all(&self) {
        while let Some(piece) = self.pop() {
            // SAFETY: allocated by `take`, and nobody else's.
            unsafe { free(piece) };
        }
    }
}

impl Drop for Magazine {
    fn drop(&mut self) {
        self.free_all();
    }
}

/// # Safety
/// The memory came from [`take`], and nobody uses it.
unsafe fn free(memory: NonNull<Free>) {
    // SAFETY: allocated by `take` with this layout.
    unsafe { dealloc(memory.as_ptr().cast(), LAYOUT) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn no_piece_is_handed_out_twice_and_threads_share_what_they_cannot_keep() {
        let pieces: Vec<usize> = std::thread::spawn(|| {
            let pieces: Vec<_> = (0..5 * MAGAZINE).map(|_| take()).collect();
            let numbers: Vec<_> = pieces.iter().map(|p| p.as_ptr() as usize).collect();
            // SAFETY: just taken.
            pieces.into_iter().for_each(|p| unsafe { give(p) });
            numbers
        })
        .join()
        .unwrap();
        assert_eq!(pieces.iter().collect::<HashSet<_>>().len(), pieces.len());
        let held: Vec<_> = (0..3 * MAGAZINE).map(|_| take()).collect();
        let numbers: HashSet<_> = held.iter().map(|p| p.as_ptr() as usize).collect();
        assert_eq!(numbers.len(), held.len());
        // SAFETY: just taken.
        held.into_iter().for_each(|p| unsafe { give(p) });
    }
}
