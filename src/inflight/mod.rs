//! The lock-free list of the requests that are running on a node: each entry a byte range, a kind and a state word.
//!
//! # Contract
//!
//! - [`InflightList::insert`] publishes an entry and gives it a ticket. Tickets are the order of insertions. Of two
//!   entries that overlap and whose kinds conflict, the one with the lower ticket goes first and
//!   [`InflightList::acquire`] makes the other wait: first come, first served among conflicts, hence no deadlock and no
//!   starvation. Entries that do not conflict never wait for each other.
//! - Dropping an [`Entry`] removes it and wakes exactly the waiters of that entry, each once. A waiter can give up at any
//!   moment by dropping its future; it is then not woken, and what it had published is removed with its own waiters
//!   told. `acquire` publishes in the call, not in the first poll.
//! - **No call blocks** or waits for a thread that is not running. Search is wait-free; insertion and removal are
//!   lock-free: they start a step again only when another thread has completed one.
//! - **Publish and look.** A thread that inserts and then reads some atomic, and a thread that writes this atomic and then
//!   calls [`any`](InflightList::any), [`wait_clear`](InflightList::wait_clear) (its first poll),
//!   [`for_each_overlap`](InflightList::for_each_overlap) or [`try_acquire`](InflightList::try_acquire): at least one of
//!   them sees the other, whatever orderings the callers use on their atomic. The full fences this needs are inside
//!   (S5 and S15 of the semantics rely on it).
//! - What the owner of an entry did before dropping it is visible to whoever no longer finds it: `acquire`,
//!   `wait_clear`, `try_acquire` and `any` synchronise with the removals they act upon.
//! - An empty range conflicts with nothing and is never found.
//! - Entries and futures may outlive the last handle of their list.
//!
//! # Cost
//!
//! An entry is in the chains of the shard units it touches, so what happens elsewhere does not concern it and the cost
//! does not grow with the number in flight, as long as there are about as many shards as entries. All insertions share
//! one counter. An entry longer than two units may be *wide*: it is in one extra chain, which every search of the list
//! walks, and its own search walks all shards (as `len` and `is_empty` do). That is right but slow; callers enter long
//! requests in pieces.
//!
//! An insertion takes one cache line of memory, from a pool as a rule. A wait costs one small allocation. Giving up walks
//! the waiters that came to the same entry later.
//!
//! # Limits
//!
//! - Kinds are [`KINDS_MAX`]; the table of conflicts is fixed with the list.
//! - A request that wants a wider range drops its entry and starts again; there is one entry per request and list, and
//!   nobody waits here while holding an entry of a node below. The list cannot check this.
//! - Waking calls foreign code on the thread that drops the entry. A waker must not panic.
//! - A ticket is drawn again whenever a conflicting insertion comes between publication and draw (a few instructions),
//!   so one insertion can be overtaken there; each time another one has succeeded.
//!
//! # Where to read
//!
//! `list` has the calls, `entry` the node and the draw of the ticket, `range` the search, `chain` the linked list itself
//! with the papers it comes from, `waiter` the protocol of wait, wake and give up, `shard` the mapping, `core` what entries
//! share and how long it lives, `grace` the wait for those who use what they have looked up, `reclaim` the rule of epochs, `pool` the memory of nodes, `canary` the planted bugs.
//! `docs/design/inflight.md` argues the orderings. No locks. Every linearization point is marked: insertion is the
//! exchange in `Node::draw`, removal `Node::die`, wake-up and giving up `Waiter::end`.

mod canary;
mod chain;
mod core;
mod entry;
mod grace;
mod list;
#[cfg(not(any(cobweb_loom, feature = "sim")))]
mod pool;
mod range;
mod reclaim;
mod shard;
mod waiter;

#[cfg(all(test, cobweb_loom))]
mod loom_tests;
#[cfg(all(test, not(cobweb_loom)))]
mod model_tests;

pub use entry::Entry;
pub use grace::{Grace, Pass};
pub use list::{Acquire, Config, InflightList, KINDS_MAX, Kind, OverlapRef, WaitClear};
