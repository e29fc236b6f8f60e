//! The list: insert, wait, look.

use std::future::Future;
use std::ops::ControlFlow;
use std::pin::Pin;
use std::ptr::NonNull;
use std::task::{Context, Poll};

use super::canary::canary;
use super::core::Core;
use super::entry::Entry;
use super::waiter::{Check, Registration};
use crate::sync::Arc;
use crate::sync::atomic::{Ordering, fence};
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
    /// log2 of the number of shards, at most 16. A shard takes 8 bytes; as many shards as entries expected, or more.
    pub shards_log2: u32,
    /// `conflicts[k]`: bit mask of the kinds that kind `k` conflicts with. Symmetric.
    pub conflicts: [u8; KINDS_MAX as usize],
}

/// A lock-free list of running requests; see the module.
pub struct InflightList {
    core: NonNull<Core>,
}

// SAFETY: the core is shared by design; everything that changes in it is atomic.
unsafe impl Send for InflightList {}
// SAFETY: as above.
unsafe impl Sync for InflightList {}

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
        Arc::new(Self { core: Core::new(config) })
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
        let guard = epoch::pin();
        let entry = self.publish(range, kind, state, &guard);
        // Once no older conflict is left none comes back, so the first poll need not look again.
        let clear = self.core().blocker(range, self.conflicts(kind), entry.ticket(), &guard).is_none();
        Acquire { entry: Some(entry), clear, wait: None }
    }

    /// An entry if nothing conflicting is there now, waiting or not. Of several such calls at once one succeeds.
    pub fn try_acquire(self: &Arc<Self>, range: ByteRange, kind: Kind) -> Option<Entry> {
        let kinds = self.conflicts(kind);
        let guard = epoch::pin();
        if self.core().any(range, kinds, &guard) {
            return None;
        }
        let entry = self.publish(range, kind, 0, &guard);
        match self.core().blocker(range, kinds, entry.ticket(), &guard) {
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
        full_fence();
        self.core().any(range, kinds, &epoch::pin())
    }

    /// Calls `visit` once for every entry of one of `kinds` that overlaps `range`, in no order. `visit` runs under a pin: it
    /// must be short and do no I/O.
    pub fn for_each_overlap(&self, range: ByteRange, kinds: u8, mut visit: impl FnMut(OverlapRef)) {
        full_fence();
        let (core, guard) = (self.core(), epoch::pin());
        let _ = core.search(range, kinds, &guard, |node, ticket, place| {
            if core.is_first_meeting(range, node, place) {
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

    /// Number of entries. For statistics: it walks all shards, and may or may not count what changes meanwhile.
    pub fn len(&self) -> usize {
        self.core().len(&epoch::pin())
    }

    /// Whether [`len`](Self::len) is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The kinds that `kind` conflicts with.
    fn conflicts(&self, kind: Kind) -> u8 {
        self.core().config.conflicts[usize::from(kind)]
    }

    fn publish(&self, range: ByteRange, kind: Kind, state: u64, guard: &Guard) -> Entry {
        assert!(kind < KINDS_MAX, "kind {kind}");
        // SAFETY: the list has a handle.
        let entry = unsafe { Entry::publish(self.core, range, kind, state, guard) };
        full_fence();
        entry
    }

    pub(super) fn core(&self) -> &Core {
        // SAFETY: abandoned by our drop.
        unsafe { self.core.as_ref() }
    }
}

impl Drop for InflightList {
    fn drop(&mut self) {
        // SAFETY: the last handle; calls borrow it.
        unsafe { Core::abandon(self.core) };
    }
}

impl std::fmt::Debug for InflightList {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InflightList").field("config", &self.core().config).field("len", &self.len()).finish()
    }
}

/// Each side of the promise to callers (module, "Publish and look"): after publication, before search.
fn full_fence() {
    if !canary("no-fence") {
        // SeqCst: partner is the same line on the other side. Of two such fences one is first; what was written before it
        // is seen by what is read after the other.
        fence(Ordering::SeqCst);
    }
}

/// Future of [`InflightList::acquire`].
#[must_use = "dropping the future removes the entry"]
pub struct Acquire {
    entry: Option<Entry>,
    /// The call itself found no older conflict.
    clear: bool,
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

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Entry> {
        let this = &mut *self;
        let entry = this.entry.take().expect("polled after its end");
        if !this.clear {
            let core = entry.core();
            let kinds = core.config.conflicts[usize::from(entry.kind())];
            let before = |_: &Guard| Some(entry.ticket());
            if poll_clear(core, entry.range(), kinds, before, &mut this.wait, context).is_pending() {
                this.entry = Some(entry);
                return Poll::Pending;
            }
        }
        Poll::Ready(entry)
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
        let (core, range, kinds, before) = (this.list.core(), this.range, this.kinds, &mut this.before);
        let cut = |guard: &Guard| {
            if before.is_none() {
                full_fence();
                if !core.any(range, kinds, guard) {
                    return None;
                }
                // AcqRel: as in `Node::draw`; who draws later sees what our caller did before.
                *before = Some(core.tickets.fetch_add(1, Ordering::AcqRel));
            }
            *before
        };
        poll_clear(core, range, kinds, cut, &mut this.wait, context)
    }
}

/// Waits for the entries older than `before`, one after the other. `before` may say that there are none.
fn poll_clear(
    core: &Core,
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
    while let Some(node) = core.blocker(range, kinds, before, &guard) {
        // Fails if the entry has been removed meanwhile: then it is found no more.
        *wait = Registration::new(node, context.waker(), &guard);
        if wait.is_some() {
            return Poll::Pending;
        }
    }
    Poll::Ready(())
}
