//! The list: insert, wait, look.

use std::future::Future;
use std::ops::ControlFlow;
use std::pin::Pin;
use std::task::{Context, Poll};

use super::canary::canary;
use super::entry::{Entry, Node};
use super::shard::Shards;
use super::waiter::{Check, Registration};
use crate::sync::Arc;
use crate::sync::atomic::{AtomicU64, Ordering, fence};
use crate::sync::epoch::{self, Guard};
use crate::units::ByteRange;

/// Kind of an entry, below [`KINDS_MAX`]; its meaning belongs to the node that owns the list.
pub type Kind = u8;

/// Number of kinds a list can tell apart.
pub const KINDS_MAX: u8 = 8;

/// How a list is laid out and which kinds exclude each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// log2 of the bytes of a shard unit, at most 62. Entries of up to twice that length are cheap; longer ones are wide
    /// (see the module).
    pub shard_bytes_log2: u32,
    /// log2 of the number of shards, at most 16. A shard takes 64 bytes; about as many shards as entries expected.
    pub shards_log2: u32,
    /// `conflicts[k]`: bit mask of the kinds that kind `k` conflicts with. Symmetric.
    pub conflicts: [u8; KINDS_MAX as usize],
}

/// A lock-free list of running requests; see the module.
pub struct InflightList {
    pub(super) tickets: Tickets,
    pub(super) config: Config,
    pub(super) shards: Shards,
}

/// The counter tickets are drawn from, alone on its cache lines: it is the one thing all inserting threads share.
#[repr(align(128))]
pub(super) struct Tickets(AtomicU64);

impl std::ops::Deref for Tickets {
    type Target = AtomicU64;
    fn deref(&self) -> &AtomicU64 {
        &self.0
    }
}

/// An entry as a search sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverlapRef {
    /// Its range.
    pub range: ByteRange,
    /// Its kind.
    pub kind: Kind,
    /// Its ticket; `None` while its insertion is still under way.
    pub ticket: Option<u64>,
    /// Its state word.
    pub state: u64,
}

impl InflightList {
    /// An empty list. Panics if `config` is out of its bounds or its conflicts are not symmetric.
    pub fn new(config: Config) -> Arc<Self> {
        assert!(config.shard_bytes_log2 <= 62 && config.shards_log2 <= 16, "{config:?}");
        for a in 0..KINDS_MAX {
            for b in 0..KINDS_MAX {
                let conflict = |x: Kind, y: Kind| config.conflicts[usize::from(x)] >> y & 1;
                assert_eq!(conflict(a, b), conflict(b, a), "conflicts of kinds {a} and {b}");
            }
        }
        let shards = Shards::new(config.shard_bytes_log2, config.shards_log2);
        Arc::new(Self { tickets: Tickets(AtomicU64::new(0)), config, shards })
    }

    /// Publishes an entry and draws its ticket, without waiting for anything.
    pub fn insert(self: &Arc<Self>, range: ByteRange, kind: Kind) -> Entry {
        self.insert_with(range, kind, 0)
    }

    /// [`insert`](Self::insert) with a first value of the state word.
    pub fn insert_with(self: &Arc<Self>, range: ByteRange, kind: Kind, state: u64) -> Entry {
        self.publish(range, kind, state, &epoch::pin())
    }

    /// Inserts at once and waits until no older conflicting entry is left. Dropping the future removes the entry.
    pub fn acquire(self: &Arc<Self>, range: ByteRange, kind: Kind) -> Acquire {
        self.acquire_with(range, kind, 0)
    }

    /// [`acquire`](Self::acquire) with a first value of the state word.
    pub fn acquire_with(self: &Arc<Self>, range: ByteRange, kind: Kind, state: u64) -> Acquire {
        Acquire { entry: Some(self.insert_with(range, kind, state)), wait: None }
    }

    /// An entry if nothing conflicting is there now, waiting or not. Of several such calls at once one succeeds.
    pub fn try_acquire(self: &Arc<Self>, range: ByteRange, kind: Kind) -> Option<Entry> {
        let kinds = self.config.conflicts[usize::from(kind)];
        let guard = epoch::pin();
        if self.any_pinned(range, kinds, &guard) {
            return None;
        }
        let entry = self.publish(range, kind, 0, &guard);
        match self.blocker(range, kinds, entry.ticket(), &guard) {
            None => Some(entry),
            Some(_) => None,
        }
    }

    /// A future that ends when every entry of one of `kinds` (a bit mask) that overlaps `range` and was there at the first
    /// poll has been removed. It is no entry itself, so nobody waits for it.
    pub fn wait_clear(self: &Arc<Self>, range: ByteRange, kinds: u8) -> WaitClear {
        WaitClear { list: self.clone(), range, kinds, before: None, wait: None }
    }

    /// Whether an entry of one of `kinds` overlaps `range` now.
    pub fn any(&self, range: ByteRange, kinds: u8) -> bool {
        self.fence();
        self.any_pinned(range, kinds, &epoch::pin())
    }

    /// Calls `visit` once for every entry of one of `kinds` that overlaps `range`, in no order. `visit` runs under a pin: it
    /// must be short and do no I/O.
    pub fn for_each_overlap(&self, range: ByteRange, kinds: u8, mut visit: impl FnMut(OverlapRef)) {
        self.fence();
        let guard = epoch::pin();
        let _ = self.search(range, kinds, &guard, |node, place| {
            if self.is_first_meeting(range, node, place) {
                let ticket = node.ticket();
                visit(OverlapRef {
                    range: node.range,
                    kind: ticket.kind(),
                    ticket: ticket.number(),
                    // Acquire: partner is `Entry::set_state`.
                    state: node.state.load(Ordering::Acquire),
                });
            }
            ControlFlow::<()>::Continue(())
        });
    }

    /// Number of entries with a non-empty range. For statistics: it walks all shards, and counts what changes meanwhile or
    /// not.
    pub fn len(&self) -> usize {
        let everything = ByteRange { offset: 0, len: i64::MAX as u64 };
        let mut count = 0;
        self.for_each_overlap(everything, u8::MAX, |_| count += 1);
        count
    }

    /// Whether [`len`](Self::len) is 0.
    pub fn is_empty(&self) -> bool {
        !self.any(ByteRange { offset: 0, len: i64::MAX as u64 }, u8::MAX)
    }

    fn publish(self: &Arc<Self>, range: ByteRange, kind: Kind, state: u64, guard: &Guard) -> Entry {
        assert!(kind < KINDS_MAX, "kind {kind}");
        let entry = Entry::publish(self.clone(), Box::new(Node::new(range, kind, state)), guard);
        self.fence();
        entry
    }

    fn any_pinned(&self, range: ByteRange, kinds: u8, guard: &Guard) -> bool {
        self.search(range, kinds, guard, |_, _| ControlFlow::Break(())).is_break()
    }

    /// Each side of the promise to callers (module, "Publish and look"): after publication, before search.
    fn fence(&self) {
        // SeqCst: partner is the same line on the other side. Of two such fences one is first; what was written before it
        // is seen by what is read after the other.
        if !canary("no-fence") {
            fence(Ordering::SeqCst);
        }
    }
}

impl std::fmt::Debug for InflightList {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InflightList").field("config", &self.config).field("len", &self.len()).finish()
    }
}

/// Future of [`InflightList::acquire`].
#[must_use = "dropping the future removes the entry"]
pub struct Acquire {
    entry: Option<Entry>,
    wait: Option<Registration>,
}

impl Acquire {
    /// The entry, which is in the list already, for its range, kind and ticket. `None` after the future has ended.
    pub fn entry(&self) -> Option<&Entry> {
        self.entry.as_ref()
    }
}

impl Future for Acquire {
    type Output = Entry;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Entry> {
        let this = self.get_mut();
        let entry = this.entry.as_ref().expect("polled after its end");
        let kinds = entry.config().conflicts[usize::from(entry.kind())];
        let clear =
            poll_clear(entry.list(), entry.range(), kinds, |_| Some(entry.ticket()), &mut this.wait, context);
        match clear {
            Poll::Pending => Poll::Pending,
            Poll::Ready(()) => Poll::Ready(this.entry.take().expect("taken once")),
        }
    }
}

/// Future of [`InflightList::wait_clear`].
#[must_use = "a future does nothing unless polled"]
pub struct WaitClear {
    list: Arc<InflightList>,
    range: ByteRange,
    kinds: u8,
    /// Ticket that parts what was there at the first poll from what came later; drawn when there is something to wait for.
    before: Option<u64>,
    wait: Option<Registration>,
}

impl Future for WaitClear {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        let (list, range, kinds, before) = (&*this.list, this.range, this.kinds, &mut this.before);
        let cut = |guard: &Guard| {
            if before.is_none() {
                list.fence();
                if !list.any_pinned(range, kinds, guard) {
                    return None;
                }
                // AcqRel: as in `Node::draw`; who draws later sees what our caller did before.
                *before = Some(list.tickets.fetch_add(1, Ordering::AcqRel));
            }
            *before
        };
        poll_clear(list, range, kinds, cut, &mut this.wait, context)
    }
}

/// Waits for the entries older than `before`, one after the other. `before` may say that there are none.
fn poll_clear(
    list: &InflightList,
    range: ByteRange,
    kinds: u8,
    before: impl FnOnce(&Guard) -> Option<u64>,
    wait: &mut Option<Registration>,
    context: &mut Context<'_>,
) -> Poll<()> {
    if let Some(registration) = wait {
        match registration.check(context.waker()) {
            Check::Waiting => return Poll::Pending,
            Check::Woken | Check::Stranger => *wait = None,
        }
    }
    let guard = epoch::pin();
    let Some(before) = before(&guard) else { return Poll::Ready(()) };
    while let Some(node) = list.blocker(range, kinds, before, &guard) {
        // Fails if the entry has been removed meanwhile: then it is found no more.
        *wait = Registration::new(node, context.waker(), &guard);
        if wait.is_some() {
            return Poll::Pending;
        }
    }
    Poll::Ready(())
}
