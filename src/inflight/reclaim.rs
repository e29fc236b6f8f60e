//! Memory of entries and waiters: epochs (K. Fraser, "Practical lock-freedom", 2004), by `crossbeam-epoch`.
//!
//! The rule all `SAFETY` comments of this folder lean on: a node is retired only when it cannot be reached from a head
//! any more, and it is freed only when every guard that was pinned at that moment has gone. Hence what a thread reaches
//! from a head after it has pinned stays valid until it unpins. No guard is held across an await or a call of a waker.

use super::canary::canary;
use super::entry::Node;
use super::waiter::Waiter;
use crate::sync::epoch::{Guard, Shared};

/// Frees an entry's node once nobody can be looking at it.
///
/// # Safety
/// The node came from a `Box`, cannot be reached from any chain, and is retired once.
pub(super) unsafe fn retire_node(node: Shared<'_, Node>, guard: &Guard) {
    if canary("free-at-once") {
        // SAFETY: none: this is the planted bug.
        drop(unsafe { node.into_owned() });
        return;
    }
    // SAFETY: passed on to the caller.
    unsafe { guard.defer_destroy(node) };
}

/// Frees a waiter once nobody can be looking at it.
///
/// # Safety
/// As for [`retire_node`].
pub(super) unsafe fn retire_waiter(waiter: Shared<'_, Waiter>, guard: &Guard) {
    // SAFETY: passed on to the caller.
    unsafe { guard.defer_destroy(waiter) };
}

/// What shows loom a use after free: read by whoever looks at a node, written by the node's destructor. Nothing elsewhere.
#[derive(Debug, Default)]
pub(super) struct Watch {
    #[cfg(cobweb_loom)]
    cell: crate::sync::UnsafeCell<()>,
}

impl Watch {
    /// Tells loom that the node is read.
    pub(super) fn touch(&self) {
        #[cfg(cobweb_loom)]
        self.cell.with(|_| ());
    }
}

#[cfg(cobweb_loom)]
impl Drop for Watch {
    fn drop(&mut self) {
        self.cell.with_mut(|_| ());
    }
}
