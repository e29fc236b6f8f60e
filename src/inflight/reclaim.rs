//! Memory of entries and waiters: epochs (K. Fraser, "Practical lock-freedom", 2004), by `crossbeam-epoch`.
//!
//! The rule all `SAFETY` comments of this folder lean on: a node is retired only when it cannot be reached from a head
//! any more, and it is freed only when every guard that was pinned at that moment has gone. Hence what a thread reaches
//! from a head after it has pinned stays valid until it unpins. No guard is held across an await or a call of a waker.

use std::ptr::NonNull;

use super::canary::canary;
use super::core::Core;
use super::entry::Node;
use super::waiter::Waiter;
use crate::sync::epoch::{Guard, Shared};

/// A node on the heap.
pub(super) fn new_node(node: Node) -> NonNull<Node> {
    let memory = pool::take();
    // SAFETY: the memory has a node's layout and is nobody else's.
    unsafe { memory.write(node) };
    memory
}

/// Frees an entry's node once nobody can be looking at it.
///
/// # Safety
/// The node came from [`new_node`], cannot be reached from any chain, and is retired once.
pub(super) unsafe fn retire_node(node: Shared<'_, Node>, guard: &Guard) {
    let node = node.as_raw().cast_mut();
    let free = move || {
        // SAFETY: nobody else can reach it any more. `node` came from a `NonNull`.
        unsafe {
            node.drop_in_place();
            pool::give(NonNull::new_unchecked(node));
        }
    };
    if canary("free-at-once") {
        free();
        return;
    }
    // SAFETY: the closure may run on any thread and owns what it uses; the rest is passed on to the caller.
    unsafe { guard.defer_unchecked(free) };
}

/// Frees a list's core once nobody can be using it.
///
/// # Safety
/// The core came from a `Box`, has no owner left, and is retired once.
pub(super) unsafe fn retire_core(core: NonNull<Core>, guard: &Guard) {
    // SAFETY: passed on to the caller.
    unsafe { guard.defer_destroy(Shared::from(core.as_ptr().cast_const())) };
}

/// Frees a waiter once nobody can be looking at it.
///
/// # Safety
/// As for [`retire_node`].
pub(super) unsafe fn retire_waiter(waiter: Shared<'_, Waiter>, guard: &Guard) {
    // SAFETY: passed on to the caller.
    unsafe { guard.defer_destroy(waiter) };
}

/// What shows loom a use after free: read by whoever looks at the memory it is in, written by that memory's destructor.
/// Nothing elsewhere.
#[derive(Debug, Default)]
pub(super) struct Watch {
    #[cfg(cobweb_loom)]
    cell: crate::sync::UnsafeCell<()>,
    #[cfg(cobweb_loom)]
    freed: std::sync::Arc<std::sync::atomic::AtomicBool>,
}

impl Watch {
    /// Tells loom that the memory is read.
    pub(super) fn touch(&self) {
        #[cfg(cobweb_loom)]
        self.cell.with(|_| ());
    }

    /// Becomes true when the memory is freed.
    #[cfg(all(test, cobweb_loom))]
    pub(super) fn freed(&self) -> std::sync::Arc<std::sync::atomic::AtomicBool> {
        self.freed.clone()
    }
}

#[cfg(cobweb_loom)]
impl Drop for Watch {
    fn drop(&mut self) {
        self.cell.with_mut(|_| ());
        assert!(!self.freed.swap(true, std::sync::atomic::Ordering::SeqCst), "freed twice");
    }
}

/// Memory of freed nodes, kept per thread. Nodes are aligned to cache lines, for which the system's allocator takes longer
/// than the list for all the rest of an insertion and removal.
#[cfg(not(any(cobweb_loom, feature = "sim")))]
mod pool {
    use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
    use std::cell::Cell;
    use std::ptr::{self, NonNull};

    use super::Node;
    use crate::sync::thread_local;

    /// Pieces a thread keeps. A collection frees up to 8 bags of 64, on average one; 32 KiB.
    const KEPT_MAX: usize = 512;

    struct Free {
        next: *mut Free,
    }

    struct Pool {
        first: Cell<*mut Free>,
        count: Cell<usize>,
    }

    thread_local! {
        static POOL: Pool = const { Pool { first: Cell::new(ptr::null_mut()), count: Cell::new(0) } };
    }

    const LAYOUT: Layout = Layout::new::<Node>();
    const _: () = assert!(LAYOUT.size() == 64 && LAYOUT.align() == 64, "a node is one cache line");

    /// Memory for a node, not initialised.
    pub(super) fn take() -> NonNull<Node> {
        // No pool while the thread ends.
        POOL.try_with(Pool::take).ok().flatten().unwrap_or_else(|| {
            // SAFETY: the layout is not empty.
            NonNull::new(unsafe { alloc(LAYOUT) }.cast()).unwrap_or_else(|| handle_alloc_error(LAYOUT))
        })
    }

    /// Takes memory back.
    ///
    /// # Safety
    /// It came from [`take`], perhaps on another thread, and nobody uses it.
    pub(super) unsafe fn give(memory: NonNull<Node>) {
        if !POOL.try_with(|pool| pool.give(memory.cast())).unwrap_or(false) {
            // SAFETY: allocated by `take` with this layout.
            unsafe { dealloc(memory.as_ptr().cast(), LAYOUT) };
        }
    }

    impl Pool {
        fn take(&self) -> Option<NonNull<Node>> {
            let first = NonNull::new(self.first.get())?;
            // SAFETY: what is in the pool is a `Free` of its own.
            self.first.set(unsafe { first.as_ref() }.next);
            self.count.set(self.count.get() - 1);
            Some(first.cast())
        }

        fn give(&self, memory: NonNull<Free>) -> bool {
            let room = self.count.get() < KEPT_MAX;
            if room {
                // SAFETY: it is ours now and large enough.
                unsafe { memory.write(Free { next: self.first.get() }) };
                self.first.set(memory.as_ptr());
                self.count.set(self.count.get() + 1);
            }
            room
        }
    }

    impl Drop for Pool {
        fn drop(&mut self) {
            while let Some(memory) = self.take() {
                // SAFETY: allocated by `take` with this layout.
                unsafe { dealloc(memory.as_ptr().cast(), LAYOUT) };
            }
        }
    }
}

/// The same without keeping anything, so that loom and ASan see every use after free.
#[cfg(any(cobweb_loom, feature = "sim"))]
mod pool {
    use std::mem::MaybeUninit;
    use std::ptr::NonNull;

    use super::Node;

    pub(super) fn take() -> NonNull<Node> {
        NonNull::from(Box::leak(Box::<Node>::new_uninit())).cast()
    }

    /// # Safety
    /// It came from [`take`] and nobody uses it.
    pub(super) unsafe fn give(memory: NonNull<Node>) {
        // SAFETY: passed on to the caller.
        drop(unsafe { Box::from_raw(memory.cast::<MaybeUninit<Node>>().as_ptr()) });
    }
}
