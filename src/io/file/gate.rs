//! Keeps aligned writes and read-modify-writes of a direct file apart.
//!
//! A read-modify-write puts back the neighbours it has read, so no other write may run in its blocks between its read and its write. Writes that are not aligned
//! are rare; aligned ones are the fast path and must not pay for an in-flight entry. So an aligned write only *counts itself*, and a read-modify-write
//! first makes sure that nobody is counted; while any is active, aligned writes take the slow path and an entry like everyone else.
//!
//! The protocol is Dekker's: a write counts itself, then looks at `active`; a read-modify-write sets `active`, then looks at the counts. With a full
//! fence between the two steps on both sides at least one of them sees the other.

use super::FileHandle;
use crate::sync::Arc;
use crate::sync::atomic::{AtomicUsize, Ordering, fence};
use crossbeam::utils::CachePadded;
use event_listener::Event;

const SHARDS: usize = 8;

/// The counts of one file.
#[derive(Debug, Default)]
pub(super) struct Gate {
    writes: [CachePadded<AtomicUsize>; SHARDS],
    active: AtomicUsize,
    left: Event,
}

/// A write that is counted; the count ends when the token is dropped.
#[derive(Debug)]
pub struct GateToken {
    file: Arc<FileHandle>,
    shard: usize,
}

/// A read-modify-write under way.
#[derive(Debug)]
pub(in crate::io) struct RmwGuard(Arc<FileHandle>);

impl FileHandle {
    /// Counts an aligned write; `None` while a read-modify-write is active.
    pub(in crate::io) fn enter(self: &Arc<Self>) -> Option<GateToken> {
        let shard = thread_shard();
        self.gate.writes[shard].fetch_add(1, Ordering::Relaxed);
        let token = GateToken { file: self.clone(), shard };
        // Partner: the fence in `begin_rmw`.
        fence(Ordering::SeqCst);
        if self.gate.active.load(Ordering::Relaxed) > 0 { None } else { Some(token) }
    }

    /// Waits until no aligned write is counted, and keeps new ones out while the guard lives.
    pub(in crate::io) async fn begin_rmw(self: &Arc<Self>) -> RmwGuard {
        self.gate.active.fetch_add(1, Ordering::Relaxed);
        let guard = RmwGuard(self.clone());
        // Partner: the fence in `enter`.
        fence(Ordering::SeqCst);
        loop {
            let listener = self.gate.left.listen();
            // Acquire: what the writes did is before what follows.
            if self.gate.writes.iter().all(|n| n.load(Ordering::Acquire) == 0) {
                return guard;
            }
            listener.await;
        }
    }
}

impl Drop for GateToken {
    fn drop(&mut self) {
        let gate = &self.file.gate;
        // Release: partner of the Acquire in `begin_rmw`. The fence orders it before the look at `active`, so the last write out wakes the waiter.
        gate.writes[self.shard].fetch_sub(1, Ordering::Release);
        fence(Ordering::SeqCst);
        if gate.active.load(Ordering::Relaxed) > 0 {
            gate.left.notify(usize::MAX);
        }
    }
}

impl Drop for RmwGuard {
    fn drop(&mut self) {
        self.0.gate.active.fetch_sub(1, Ordering::Release);
    }
}

/// A counter of this thread's own, most of the time.
fn thread_shard() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static SHARD: usize = NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS;
    }
    SHARD.with(|s| *s)
}
