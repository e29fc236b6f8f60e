//! Keeps aligned writes and read-modify-writes of a direct file apart.
//!
//! A read-modify-write puts back the neighbours it has read, so no other write may run in its blocks between its read and its write. Requests that are
//! not aligned are rare; aligned ones are the fast path and must not pay for an in-flight entry. So an aligned write only *counts itself*, and a
//! read-modify-write first makes sure that nobody is counted. While there are read-modify-writes (and for a while after the last one, so that a stream
//! of them does not wait for the aligned writes again and again) the file is *mixed*: aligned writes take an in-flight entry like everyone else.
//!
//! The protocol is Dekker's. A write counts itself, then looks whether the file is mixed; a read-modify-write makes it mixed, then looks at
//! the counts. Each has a full fence between its store and its look, so at least one of the two sees the other: either the write gives its count
//! back and takes an entry, or the read-modify-write waits for the count. It waits once, before it takes its own entry; writes that come after it find
//! the file mixed. Writes with an entry need no count: entries exclude each other.

use super::FileHandle;
use crate::inflight::Entry;
use crate::sync::Arc;
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
use crossbeam::utils::CachePadded;
use event_listener::Event;

const SHARDS: usize = 8;
/// Aligned writes that still take an entry after the last read-modify-write has ended.
pub(super) const LINGER: u64 = 64;

/// The counts of one file.
#[derive(Debug, Default)]
pub(super) struct Gate {
    writes: [CachePadded<AtomicUsize>; SHARDS],
    /// Read-modify-writes under way in the lower half, aligned writes that are still to take an entry in the upper one. The file is mixed
    /// unless this is 0.
    mixed: AtomicU64,
    left: Event,
}

const ACTIVE: u64 = (1 << 32) - 1;
const LINGER_SHIFT: u32 = 32;

/// What an operation holds until it has ended, so that no other operation comes between: its count, or the in-flight entry it was made under. It belongs
/// to the operation and not to the request: the request may be dropped while the kernel is still writing.
#[derive(Debug)]
pub struct GateToken {
    _held: Held,
}

#[derive(Debug)]
enum Held {
    Count { file: Arc<FileHandle>, shard: usize },
    Claim { _claim: Arc<Claim> },
}

/// An in-flight entry, with the mark of a read-modify-write if it is one. Given back when the last operation under it has ended.
#[derive(Debug)]
pub(in crate::io) struct Claim {
    // Dropped first: whoever comes next must find the file mixed for as long as he might meet the entry.
    pub(in crate::io) _entry: Entry,
    pub(in crate::io) _active: Option<RmwGuard>,
}

/// A read-modify-write under way.
#[derive(Debug)]
pub(in crate::io) struct RmwGuard(Arc<FileHandle>);

impl GateToken {
    /// A token that keeps `claim`.
    pub(in crate::io) fn of(claim: &Arc<Claim>) -> Self {
        Self { _held: Held::Claim { _claim: claim.clone() } }
    }
}

impl FileHandle {
    /// Counts an aligned write; `None` while the file is mixed.
    pub(in crate::io) fn enter(self: &Arc<Self>) -> Option<GateToken> {
        let gate = &self.gate;
        // Spares the locked instructions; what counts is the second look.
        if gate.mixed.load(Ordering::Relaxed) != 0 {
            return None;
        }
        let shard = thread_shard();
        gate.writes[shard].fetch_add(1, Ordering::Relaxed);
        let token = GateToken { _held: Held::Count { file: self.clone(), shard } };
        // Partner: the fence in `begin_rmw`.
        fence(Ordering::SeqCst);
        // Acquire: partner of the Release in the last decrement; what the read-modify-writes did is before this write.
        if gate.mixed.load(Ordering::Acquire) != 0 { None } else { Some(token) }
    }

    /// An aligned write takes an entry because the file is mixed: one fewer to do so.
    pub(in crate::io) fn passed_mixed(&self) {
        let less = |m: u64| (m & ACTIVE == 0 && m != 0).then(|| m - (1 << LINGER_SHIFT));
        let _ = self.gate.mixed.fetch_update(Ordering::Release, Ordering::Relaxed, less);
    }

    /// Makes the file mixed and waits until no aligned write is counted.
    pub(in crate::io) async fn begin_rmw(self: &Arc<Self>) -> RmwGuard {
        self.gate.mixed.fetch_add(1, Ordering::Relaxed);
        let guard = RmwGuard(self.clone());
        // Partner: the fence in `enter`.
        fence(Ordering::SeqCst);
        loop {
            // Made before the look, so that a write that leaves after it wakes us.
            let listener = self.gate.left.listen();
            if self.counted() == 0 {
                return guard;
            }
            listener.await;
        }
    }

    /// Aligned writes counted now.
    pub(in crate::io) fn counted(&self) -> usize {
        // Acquire: partner of the Release in `leave`; what the writes did is before what follows. The sum may be torn, but a shard that is 0 once the file
        // is mixed stays 0 but for writes that are about to give their count back.
        self.gate.writes.iter().map(|n| n.load(Ordering::Acquire)).sum()
    }

    fn leave(&self, shard: usize) {
        // Release: partner of the Acquire in `counted`. The fence orders it before the look, as the waiter has raised `mixed` before its own look: either it
        // sees the lower count, or this thread sees it waiting.
        self.gate.writes[shard].fetch_sub(1, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.gate.mixed.load(Ordering::Relaxed) & ACTIVE != 0 {
            self.gate.left.notify(usize::MAX);
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Held::Count { file, shard } = self {
            file.leave(*shard);
        }
    }
}

impl Drop for RmwGuard {
    fn drop(&mut self) {
        let ended = |m: u64| Some(LINGER << LINGER_SHIFT | ((m & ACTIVE) - 1));
        // Release: partner of the Acquire in `enter`.
        let _ = self.0.gate.mixed.fetch_update(Ordering::Release, Ordering::Relaxed, ended);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::engine_tests::{file, handle};
    use crate::io::file::Aio;
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    fn poll<F: Future>(future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn a_read_modify_write_waits_for_the_writes_that_are_counted_and_keeps_new_ones_out() {
        let file = handle(&file(4096), Aio::Threads);
        let (a, b) = (file.enter().expect("nobody is there"), file.enter().expect("nobody is there"));
        let mut rmw = pin!(file.begin_rmw());
        assert!(poll(rmw.as_mut()).is_pending());
        assert!(file.enter().is_none());
        assert_eq!(file.counted(), 2, "the one that was kept out has given its count back");
        drop(a);
        assert!(poll(rmw.as_mut()).is_pending());
        drop(b);
        let Poll::Ready(guard) = poll(rmw.as_mut()) else { panic!("nobody is counted any more") };
        assert!(file.enter().is_none());
        drop(guard);
        // Mixed until that many aligned writes have passed.
        for _ in 0..LINGER {
            assert!(file.enter().is_none());
            file.passed_mixed();
        }
        assert!(file.enter().is_some());
        file.passed_mixed();
        assert!(file.enter().is_some(), "one too many does no harm");
    }

    #[test]
    fn a_read_modify_write_that_gives_up_waiting_lets_aligned_writes_pass_again() {
        let file = handle(&file(4096), Aio::Threads);
        let token = file.enter();
        {
            let mut rmw = pin!(file.begin_rmw());
            assert!(poll(rmw.as_mut()).is_pending());
        }
        (0..LINGER).for_each(|_| file.passed_mixed());
        assert!(file.enter().is_some());
        drop(token);
    }

    #[test]
    fn passing_while_a_read_modify_write_runs_does_not_end_the_mixture() {
        let file = handle(&file(4096), Aio::Threads);
        let Poll::Ready(_guard) = poll(pin!(file.begin_rmw())) else { panic!("nobody is counted") };
        (0..2 * LINGER).for_each(|_| file.passed_mixed());
        assert!(file.enter().is_none());
    }

    #[test]
    fn counted_writes_and_read_modify_writes_never_run_at_once() {
        let file = handle(&file(4096), Aio::Threads);
        let inside = AtomicUsize::new(0);
        let met = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        match file.enter() {
                            Some(_token) => {
                                // A read-modify-write would have added 1 << 16.
                                assert!(inside.fetch_add(1, Ordering::SeqCst) < 1 << 16);
                                inside.fetch_sub(1, Ordering::SeqCst);
                            }
                            None => {
                                met.fetch_add(1, Ordering::Relaxed);
                                file.passed_mixed();
                            }
                        }
                    }
                });
            }
            for _ in 0..2_000 {
                let mut rmw = pin!(file.begin_rmw());
                let _guard = loop {
                    match poll(rmw.as_mut()) {
                        Poll::Ready(guard) => break guard,
                        Poll::Pending => std::thread::yield_now(),
                    }
                };
                assert_eq!(inside.fetch_add(1 << 16, Ordering::SeqCst), 0, "a counted write is inside");
                inside.fetch_sub(1 << 16, Ordering::SeqCst);
            }
        });
        assert!(met.load(Ordering::Relaxed) > 0, "they have met");
        assert_eq!(file.counted(), 0);
    }
}
