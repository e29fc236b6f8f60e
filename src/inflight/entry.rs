//! One entry: its node in the chains, its ticket, and the handle that takes it out again.

use std::ptr::NonNull;

use super::canary::canary;
use super::chain;
use super::core::Core;
use super::list::Kind;
use super::reclaim::{self, Watch};
use super::shard::SPAN_MAX;
use super::waiter::WaitList;
use crate::sync::atomic::AtomicU64;
use crate::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use crate::sync::epoch::{self, Atomic, Guard, Shared};
use crate::units::ByteRange;

/// What the chains link. Aligned so that pointers to it have room for the bits of `chain`; on real hardware one cache line.
#[repr(align(64))]
pub(super) struct Node {
    pub(super) links: [Atomic<Node>; SPAN_MAX],
    pub(super) range: ByteRange,
    ticket: TicketWord,
    pub(super) state: AtomicU64,
    pub(super) waiters: WaitList,
    pub(super) watch: Watch,
}

impl Node {
    pub(super) fn new(range: ByteRange, kind: Kind, state: u64) -> Self {
        Self {
            links: std::array::from_fn(|_| Atomic::null()),
            range,
            ticket: TicketWord::new(kind),
            state: AtomicU64::new(state),
            waiters: WaitList::new(),
            watch: Watch::default(),
        }
    }

    pub(super) fn ticket(&self) -> Ticket {
        // Acquire: partners are the exchange in `draw` and the change in `die`.
        Ticket(self.ticket.0.load(Acquire))
    }

    /// Draws the ticket. Called by the owner after publication in all chains. Linearization point of the insertion: the
    /// exchange that succeeds.
    pub(super) fn draw(&self, counter: &AtomicU64) -> u64 {
        // Relaxed: only `number_below` can have changed it, and then the exchange below fails and acquires.
        let mut seen = Ticket(self.ticket.0.load(Relaxed));
        loop {
            // AcqRel: partner is every other draw. Who draws later sees what was published by who drew earlier.
            let number = counter.fetch_add(1, AcqRel);
            // Release: partner is `ticket`. Acquire on failure: partner is the exchange in `number_below`; the next draw
            // comes after the one of the searcher that voided this one.
            match self.ticket.0.compare_exchange(seen.0, seen.drawn(number).0, AcqRel, Acquire) {
                Ok(_) => return number,
                Err(now) => seen = Ticket(now),
            }
        }
    }

    /// Linearization point of the removal. The answer tells whether the entry is an orphan.
    fn die(&self) -> bool {
        // Release: partner is `ticket`, for searchers that pass over the dead. Acquire: partner is `make_orphan`.
        self.ticket.0.fetch_or(Ticket::DEAD, chain::release("relaxed-unlink")) & Ticket::ORPHAN != 0
    }

    /// Tells an entry that its list has no handle left; `false` if it knew or has been removed.
    pub(super) fn make_orphan(&self) -> bool {
        // Release: partner is `die`, whose caller then uses the share counted for it.
        self.ticket.0.fetch_or(Ticket::ORPHAN, AcqRel) & (Ticket::DEAD | Ticket::ORPHAN) == 0
    }

    /// The ticket if it is below `number`, which the searcher drew before it came here. An entry that had no ticket when it
    /// was `seen` is made to draw a higher one.
    pub(super) fn number_below(&self, number: u64, seen: Ticket) -> Option<u64> {
        let drawn = |ticket: Ticket| ticket.number().filter(|&own| own < number);
        if seen.number().is_some() {
            return drawn(seen);
        }
        if canary("unvoided-draw") {
            return None;
        }
        // Voids the draw under way. Release: partner is the failing exchange in `draw`: the owner's next draw comes after
        // the searcher's, and the owner sees what the searcher's caller did before. If another searcher was faster, the
        // word changed after we had read it, that is after our draw, and the argument is the same.
        match self.ticket.0.compare_exchange(seen.0, seen.voided().0, AcqRel, Acquire) {
            Ok(_) => None,
            Err(now) => drawn(Ticket(now)),
        }
    }
}

/// What changes in an entry's life, in one word: bit 0 whether the ticket has been drawn, bits 1 to 3 the kind, bit 4 whether
/// it has been removed, bit 5 whether it outlived its list; then the ticket, or, before there is one, how often the draw
/// was voided. 58 bits of tickets last for centuries.
#[derive(Clone, Copy)]
pub(super) struct Ticket(u64);

impl Ticket {
    const DRAWN: u64 = 1;
    const KIND_SHIFT: u32 = 1;
    const DEAD: u64 = 1 << 4;
    const ORPHAN: u64 = 1 << 5;
    const NUMBER_SHIFT: u32 = 6;

    pub(super) fn kind(self) -> Kind {
        (self.0 >> Self::KIND_SHIFT) as u8 & 7
    }

    /// Whether the entry has been removed.
    pub(super) fn is_dead(self) -> bool {
        self.0 & Self::DEAD != 0
    }

    pub(super) fn number(self) -> Option<u64> {
        (self.0 & Self::DRAWN != 0).then_some(self.0 >> Self::NUMBER_SHIFT)
    }

    fn drawn(self, number: u64) -> Self {
        Self(number << Self::NUMBER_SHIFT | u64::from(self.kind()) << Self::KIND_SHIFT | Self::DRAWN)
    }

    fn voided(self) -> Self {
        Self(self.0.wrapping_add(1 << Self::NUMBER_SHIFT))
    }
}

struct TicketWord(AtomicU64);

impl TicketWord {
    fn new(kind: Kind) -> Self {
        debug_assert!(kind < super::KINDS_MAX);
        Self(AtomicU64::new(u64::from(kind) << Ticket::KIND_SHIFT))
    }
}

/// A running request in the list. Dropping it, on any thread, removes it and wakes exactly its waiters.
#[must_use = "dropping an entry removes it"]
pub struct Entry {
    core: NonNull<Core>,
    node: NonNull<Node>,
    ticket: u64,
}

// SAFETY: core and node are shared by design; everything that changes in them is atomic.
unsafe impl Send for Entry {}
// SAFETY: as above.
unsafe impl Sync for Entry {}

impl Entry {
    /// Publishes a node and draws its ticket.
    ///
    /// # Safety
    /// The list has a handle during the call.
    pub(super) unsafe fn publish(
        core: NonNull<Core>,
        range: ByteRange,
        kind: Kind,
        state: u64,
        guard: &Guard,
    ) -> Self {
        let node = reclaim::new_node(Node::new(range, kind, state));
        // SAFETY: the caller's promise; the node is retired by the drop of what we return.
        let (shared, this, Core { shards, tickets, .. }) =
            unsafe { (Shared::from(node.as_ptr().cast_const()), node.as_ref(), core.as_ref()) };
        let early = canary("early-ticket").then(|| this.draw(tickets));
        shards.each(range, |index, number| {
            chain::push(shards.head(number), shared, index, guard);
        });
        let ticket = early.unwrap_or_else(|| this.draw(tickets));
        Self { core, node, ticket }
    }

    pub(super) fn core(&self) -> &Core {
        // SAFETY: lives as long as its list has handles or live entries.
        unsafe { self.core.as_ref() }
    }

    /// The range it was inserted with.
    pub fn range(&self) -> ByteRange {
        self.node().range
    }

    /// The kind it was inserted with.
    pub fn kind(&self) -> Kind {
        self.node().ticket().kind()
    }

    /// Its place in the order of insertions into this list: lower is older. No two entries of a list have the same.
    pub fn ticket(&self) -> u64 {
        self.ticket
    }

    /// The state word.
    pub fn state(&self) -> u64 {
        // Acquire: partner is `set_state`, possibly on another thread.
        self.node().state.load(Acquire)
    }

    /// Changes the state word. Who reads the new value (`for_each_overlap`) sees what was done before.
    pub fn set_state(&self, state: u64) {
        // Release: partners are the loads in `state` and in `InflightList::for_each_overlap`.
        self.node().state.store(state, Release);
    }

    /// Numbers of the chains it is in.
    #[cfg(all(test, cobweb_loom))]
    pub(super) fn chains(&self) -> Vec<super::shard::Number> {
        self.core().shards.span(self.range()).numbers().to_vec()
    }

    /// Number of waiters registered.
    #[cfg(test)]
    pub(super) fn waiter_count(&self) -> usize {
        self.node().waiters.count()
    }

    fn node(&self) -> &Node {
        // SAFETY: retired by our drop only.
        unsafe { self.node.as_ref() }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let guard = epoch::pin();
        let shared = Shared::from(self.node.as_ptr().cast_const());
        let (node, Core { shards, watch, .. }) = (self.node(), self.core());
        let orphan = node.die();
        shards.each(node.range, |index, number| chain::unlink(shards.head(number), shared, index, &guard));
        watch.touch();
        let wakers = node.waiters.close(&guard);
        // SAFETY: it is in no chain any more, its waits have ended, and the share is that of an orphan.
        unsafe {
            reclaim::retire_node(shared, &guard);
            if orphan {
                Core::give_up_share(self.core, &guard);
            }
        }
        drop(guard);
        if let Some(wakers) = wakers {
            wakers.wake();
        }
    }
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Entry")
            .field("range", &self.range())
            .field("kind", &self.kind())
            .field("ticket", &self.ticket)
            .field("state", &self.state())
            .finish()
    }
}
