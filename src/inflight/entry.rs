//! One entry: its node in the chains, its ticket, and the handle that takes it out again.

use super::canary::canary;
use super::chain;
use super::list::{Config, InflightList, Kind};
use super::reclaim::{self, Watch};
use super::shard::{SPAN_MAX, Span};
use super::waiter::WaitList;
use crate::sync::Arc;
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
        // Acquire: partner is the exchange in `draw`.
        Ticket(self.ticket.0.load(Acquire))
    }

    /// Draws the ticket. Called by the owner after publication in all chains. Linearization point of the insertion: the
    /// exchange that succeeds.
    pub(super) fn draw(&self, counter: &AtomicU64) -> u64 {
        // Relaxed: only `void` can have changed it, and then the exchange below fails and acquires.
        let mut seen = Ticket(self.ticket.0.load(Relaxed));
        loop {
            // AcqRel: partner is every other draw. Who draws later sees what was published by who drew earlier.
            let number = counter.fetch_add(1, AcqRel);
            // Release: partner is `ticket`. Acquire on failure: partner is the exchange in `void`; the next draw comes
            // after the one of the searcher that voided this one.
            match self.ticket.0.compare_exchange(seen.0, seen.drawn(number).0, AcqRel, Acquire) {
                Ok(_) => return number,
                Err(now) => seen = Ticket(now),
            }
        }
    }

    /// Whether this entry is older than a searcher who drew `number` before it came here. An entry without a ticket is made
    /// to draw one after this call.
    pub(super) fn is_older_than(&self, number: u64) -> bool {
        let seen = self.ticket();
        if let Some(own) = seen.number() {
            return own < number;
        }
        if canary("unvoided-draw") {
            return false;
        }
        // Release: partner is the failing exchange in `draw`: the owner's next draw comes after the searcher's, and the
        // owner sees what the searcher did before (the fence of `list`). If another searcher was faster, the word
        // changed after we had read it, that is after our draw, and the argument is the same.
        match self.ticket.0.compare_exchange(seen.0, seen.voided().0, AcqRel, Acquire) {
            Ok(_) => false,
            Err(now) => Ticket(now).number().is_some_and(|own| own < number),
        }
    }
}

/// Ticket and kind in one word: bit 0 whether the ticket has been drawn, bits 1 to 3 the kind, then the ticket, or, before
/// there is one, how often the draw was voided.
#[derive(Clone, Copy)]
pub(super) struct Ticket(u64);

impl Ticket {
    const DRAWN: u64 = 1;
    const KIND_SHIFT: u32 = 1;
    const NUMBER_SHIFT: u32 = 4;

    pub(super) fn kind(self) -> Kind {
        (self.0 >> Self::KIND_SHIFT) as u8 & 7
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
    list: Arc<InflightList>,
    node: *const Node,
    ticket: u64,
}

// SAFETY: the node is shared by design; everything that changes in it is atomic.
unsafe impl Send for Entry {}
// SAFETY: as above.
unsafe impl Sync for Entry {}

impl Entry {
    /// Publishes a node and draws its ticket.
    pub(super) fn publish(list: Arc<InflightList>, node: Box<Node>, guard: &Guard) -> Self {
        let node: *const Node = Box::into_raw(node);
        let shared = Shared::from(node);
        // SAFETY: freed by our drop only.
        let this = unsafe { &*node };
        let early = canary("early-ticket").then(|| this.draw(&list.tickets));
        let shards = &list.shards;
        let span = shards.span(this.range);
        if span == Span::Wide {
            chain::push(&shards.wide.head, shared, 0, guard);
        }
        for (index, &number) in span.numbers().iter().enumerate() {
            chain::push(&shards.narrow[number as usize].head, shared, index, guard);
        }
        let ticket = early.unwrap_or_else(|| this.draw(&list.tickets));
        Self { list, node, ticket }
    }

    pub(super) fn list(&self) -> &InflightList {
        &self.list
    }

    pub(super) fn config(&self) -> &Config {
        &self.list.config
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

    /// Number of chains it is in; 0 if it is wide.
    #[cfg(all(test, cobweb_loom))]
    pub(super) fn chain_count(&self) -> usize {
        self.list.shards.span(self.range()).numbers().len()
    }

    /// Number of waiters registered.
    #[cfg(test)]
    pub(super) fn waiter_count(&self) -> usize {
        self.node().waiters.count()
    }

    fn node(&self) -> &Node {
        // SAFETY: retired by our drop only.
        unsafe { &*self.node }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let guard = epoch::pin();
        let shared = Shared::from(self.node);
        let closed = self.node().waiters.close(&guard);
        let shards = &self.list.shards;
        let span = shards.span(self.node().range);
        if span == Span::Wide {
            chain::unlink(&shards.wide.head, shared, 0, &guard);
        }
        for (index, &number) in span.numbers().iter().enumerate() {
            chain::unlink(&shards.narrow[number as usize].head, shared, index, &guard);
        }
        let wakers = closed.end(&guard);
        // SAFETY: it is in no chain any more, and its waits have ended.
        unsafe { reclaim::retire_node(shared, &guard) };
        drop(guard);
        wakers.wake();
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
