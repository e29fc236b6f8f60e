//! The chain under the list: Harris's linked list with marked pointers (T. Harris, "A pragmatic implementation of
//! non-blocking linked-lists", DISC 2001), unlinked one node at a time as in M. Michael, "High performance dynamic
//! lock-free hash tables and list-based sets" (SPAA 2002), read without helping, and reclaimed through epochs.
//!
//! The chain is not sorted: nodes go in at the head and nowhere else. Hence
//!
//! - a walk that begins after a node went in meets that node, unless it has been unlinked: every value a link ever had,
//!   the newest or an old one, leads to all live nodes older than its holder;
//! - a walk ends: what is put in while it runs lies before it.
//!
//! A pointer carries two things in its low bits. `MARK` belongs to the *holder*: the node that holds this link is being
//! taken out (in a head: the chain is closed), and the link never changes again. The bits above it belong to the
//! *target*: the number of the link through which the chain goes on there, since a node can be in several chains.
//!
//! Orderings. Every change of a link or head is a read-modify-write with AcqRel and every load is Acquire, so that all
//! changes of one pointer form one release sequence: who loads any value of it sees what all earlier changers did before.
//! The one plain store, in [`push`], is published by the compare-exchange after it. Exceptions say so.

use std::ops::ControlFlow;

use super::canary::canary;
use crate::sync::atomic::Ordering::{self, AcqRel, Acquire, Relaxed};
use crate::sync::epoch::{Atomic, Guard, Shared};

/// The holder of this pointer is dead: it never changes again.
const MARK: usize = 1;

const INDEX_SHIFT: u32 = 1;

/// A type whose values can be in chains. Its alignment must leave room for the mark and the highest index.
pub(super) trait Chained: Sized {
    /// The link with this number.
    fn link(&self, index: usize) -> &Atomic<Self>;

    /// Tells loom that the node is read.
    fn touch(&self);
}

/// Puts a node in by its link `index`; `false` if the chain is closed. Lock-free.
pub(super) fn push<'g, T: Chained>(
    head: &Atomic<T>,
    node: Shared<'g, T>,
    index: usize,
    guard: &'g Guard,
) -> bool {
    let me = node.with_tag(index << INDEX_SHIFT);
    // SAFETY: the caller owns the node and keeps it alive for `'g`.
    let link = unsafe { me.deref() }.link(index);
    let mut first = head.load(Acquire, guard);
    loop {
        if first.tag() & MARK != 0 {
            return false;
        }
        // Relaxed: nobody else can see this link before the compare-exchange below publishes it.
        link.store(first, Relaxed);
        // Linearization point of the insertion into this chain; partner: the loads in `walk` and `unlink`.
        match head.compare_exchange(first, me, release("relaxed-publish"), Acquire, guard) {
            Ok(_) => return true,
            Err(e) => first = e.current,
        }
    }
}

/// Takes a node out. Only the node's owner calls this, once per link. When it returns the node cannot be reached from
/// `head`, or `head` is closed and the node belongs to who closed it (who is pinned). Lock-free: it starts again only
/// when another thread has changed the chain.
pub(super) fn unlink<'g, T: Chained>(head: &Atomic<T>, node: Shared<'g, T>, index: usize, guard: &'g Guard) {
    let me = node.with_tag(index << INDEX_SHIFT);
    // SAFETY: the caller owns the node; it is freed after this call at the earliest.
    let link = unsafe { me.deref() }.link(index);
    // From here on the link is frozen, so that nobody can take out our successor through it and be undone by our own
    // unlinking; partner: the load of `next` below, in whoever meets the mark.
    let next = if canary("unfrozen-unlink") {
        link.load(Acquire, guard)
    } else {
        link.fetch_or(MARK, release("relaxed-unlink"), guard)
    };
    if head.compare_exchange(me, unmarked(next), release("relaxed-unlink"), Acquire, guard).is_ok() {
        return;
    }
    'again: loop {
        let mut holder = head;
        let mut node = holder.load(Acquire, guard);
        if node.tag() & MARK != 0 {
            return;
        }
        // SAFETY: reached from the head under this guard (see the module of `reclaim`).
        while let Some(this) = unsafe { node.as_ref() } {
            this.touch();
            let link = this.link(node.tag() >> INDEX_SHIFT);
            let next = link.load(Acquire, guard);
            if next.tag() & MARK == 0 {
                (holder, node) = (link, next);
                continue;
            }
            // Fails if the holder has been marked or changed since: `node` was loaded without a mark.
            match holder.compare_exchange(node, unmarked(next), release("relaxed-unlink"), Acquire, guard) {
                Ok(_) if node == me => return,
                Ok(_) => node = unmarked(next),
                Err(_) => continue 'again,
            }
        }
        // A whole walk did not meet it: another walk has taken it out.
        return;
    }
}

/// Closes the chain for good and returns its first node. Everything that was in it now belongs to the caller.
pub(super) fn close<'g, T: Chained>(head: &Atomic<T>, guard: &'g Guard) -> Shared<'g, T> {
    // Partner: `push`, which the marked head refuses.
    head.swap(Shared::null().with_tag(MARK), release("relaxed-unlink"), guard)
}

/// Visits the nodes from `first` on, dead ones too, newest first. Wait-free.
///
/// Going through marked nodes is safe: a node is unlinked only through an unmarked holder, so what a dead node points
/// to leaves the chain after that dead node has, which was after this walk's guard was pinned.
pub(super) fn walk<'g, T: Chained, B>(
    first: Shared<'g, T>,
    guard: &'g Guard,
    mut visit: impl FnMut(&'g T) -> ControlFlow<B>,
) -> ControlFlow<B> {
    let mut node = first;
    // SAFETY: reached from a head under this guard (see the module of `reclaim`).
    while let Some(this) = unsafe { node.as_ref() } {
        this.touch();
        visit(this)?;
        node = this.link(node.tag() >> INDEX_SHIFT).load(Acquire, guard);
    }
    ControlFlow::Continue(())
}

/// The ordering of a change, unless the named canary weakens it.
pub(super) fn release(weakened_by: &str) -> Ordering {
    if canary(weakened_by) { Relaxed } else { AcqRel }
}

fn unmarked<T>(pointer: Shared<'_, T>) -> Shared<'_, T> {
    pointer.with_tag(pointer.tag() & !MARK)
}
