//! Memory of entries and waiters: epochs (K. Fraser, "Practical lock-freedom", 2004), by `crossbeam-epoch`.
//!
//! The rule all `SAFETY` comments of this folder lean on: a node is retired only when it cannot be reached from a head
//! any more, and it is freed only when every guard that was pinned at that moment has gone. Hence what a thread reaches
//! from a head after it has pinned stays valid until it unpins. No guard is held across an await or a call of a waker.

use std::ptr::NonNull;

use super::canary::canary;
use super::core::Core;
use super::entry::Node;
#[cfg(not(any(cobweb_loom, feature = "sim")))]
use super::pool as memory;
use super::waiter::Waiter;
use crate::sync::epoch::{Guard, Shared};

#[cfg(any(cobweb_loom, feature = "sim"))]
use plain as memory;

/// A node on the heap.
pub(super) fn new_node(node: Node) -> NonNull<Node> {
    let memory = memory::take();
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
            memory::give(NonNull::new_unchecked(node));
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

/// Without a pool, so that loom and ASan see every use after free.
#[cfg(any(cobweb_loom, feature = "sim"))]
mod plain {
    use std::mem::MaybeUninit;
    use std::ptr::NonNull;

    use super::Node;

    /// Memory for a node, not initialised.
    pub(super) fn take() -> NonNull<Node> {
        NonNull::from(Box::leak(Box::<Node>::new_uninit())).cast()
    }

    /// Takes memory back.
    ///
    /// # Safety
    /// It came from [`take`] and nobody uses it.
    pub(super) unsafe fn give(memory: NonNull<Node>) {
        // SAFETY: passed on to the caller.
        drop(unsafe { Box::from_raw(memory.cast::<MaybeUninit<Node>>().as_ptr()) });
    }
}
