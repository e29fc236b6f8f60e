//! Waiting until everybody who may have seen the old state of something has gone.
//!
//! A request that looks a place up (a host cluster of an image) and then uses it takes a [`Pass`] before it looks and keeps it until its I/O has ended.
//! Who takes a place out of use first makes it impossible to find, then calls [`Grace::quiesce`]: when that returns, no pass is left that was taken
//! before, so nobody uses the place any more. Passes taken meanwhile are not waited for.
//!
//! Cost: a pass is two atomic operations on a line that threads share only by chance; nothing is pinned over I/O but the count itself.
//!
//! Linearization: a pass counts itself under the parity of the epoch it has read, then reads the epoch again; `quiesce` changes the epoch, then reads the
//! counts of the old parity. These four accesses are in one total order, so either the count is seen or the change is, and then the pass
//! takes its count back and begins anew. Epochs never repeat. A parity is used again only after its counts have been seen at 0, and who counts
//! itself there by mistake takes it back, which can make `quiesce` wait but not end early.

use crate::sync::Arc;
use crate::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use event_listener::Event;
use std::cell::Cell;
use std::fmt;

const SHARDS: usize = 8;

/// Counts those who use what they have looked up; see the module.
#[derive(Default)]
pub struct Grace {
    shards: [Shard; SHARDS],
    epoch: AtomicU64,
    /// Somebody waits, so that who leaves must say so.
    waited_for: AtomicBool,
    left: Event,
    busy: AtomicBool,
    free: Event,
}

#[derive(Default)]
#[repr(align(128))]
struct Shard {
    users: [AtomicUsize; 2],
}

/// Keeps what its owner has looked up from being used for something else; see [`Grace`].
pub struct Pass {
    grace: Arc<Grace>,
    shard: u8,
    parity: u8,
    /// Of another layer, kept together with this one.
    next: Option<Box<Pass>>,
}

impl Grace {
    /// A pass. Take it before looking anything up.
    pub fn enter(self: &Arc<Self>) -> Pass {
        let shard = thread_shard();
        loop {
            let epoch = self.epoch.load(SeqCst);
            let parity = (epoch & 1) as usize;
            // SeqCst, both here and in `quiesce`: see the module.
            self.shards[shard].users[parity].fetch_add(1, SeqCst);
            let pass = Pass { grace: self.clone(), shard: shard as u8, parity: parity as u8, next: None };
            if self.epoch.load(SeqCst) == epoch {
                return pass;
            }
        }
    }

    /// Ends when every pass that was taken before the call has been dropped. Several calls wait in turn.
    pub async fn quiesce(&self) {
        let _turn = self.turn().await;
        self.waited_for.store(true, SeqCst);
        // What a wait that was given up has left.
        self.drained((self.epoch.load(SeqCst) & 1) as usize ^ 1).await;
        let parity = (self.epoch.fetch_add(1, SeqCst) & 1) as usize;
        self.drained(parity).await;
        self.waited_for.store(false, SeqCst);
    }

    async fn drained(&self, parity: usize) {
        loop {
            let listener = self.left.listen();
            if self.shards.iter().all(|s| s.users[parity].load(SeqCst) == 0) {
                return;
            }
            listener.await;
        }
    }

    /// Passes that are held now; for statistics and tests.
    pub fn users(&self) -> usize {
        self.shards.iter().flat_map(|s| &s.users).map(|n| n.load(SeqCst)).sum()
    }

    async fn turn(&self) -> Turn<'_> {
        loop {
            let listener = self.free.listen();
            if !self.busy.swap(true, SeqCst) {
                return Turn(self);
            }
            listener.await;
        }
    }
}

struct Turn<'a>(&'a Grace);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.busy.store(false, SeqCst);
        self.0.free.notify_additional(1);
    }
}

impl Pass {
    /// Keeps `other` as long as this one.
    pub fn and(mut self, other: Option<Pass>) -> Self {
        debug_assert!(self.next.is_none(), "a chain is built from its end");
        self.next = other.map(Box::new);
        self
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        let users = &self.grace.shards[usize::from(self.shard)].users[usize::from(self.parity)];
        // SeqCst: of the last one to leave and the one who waits, one sees the other.
        if users.fetch_sub(1, SeqCst) == 1 && self.grace.waited_for.load(SeqCst) {
            self.grace.left.notify(usize::MAX);
        }
    }
}

impl fmt::Debug for Grace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grace").field("users", &self.users()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pass")
            .field("shard", &self.shard)
            .field("parity", &self.parity)
            .finish_non_exhaustive()
    }
}

/// A number that is the thread's own as long as there are few threads.
fn thread_shard() -> usize {
    static NEXT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    std::thread_local! {
        static SHARD: Cell<usize> = const { Cell::new(usize::MAX) };
    }
    let own = SHARD.get();
    if own < SHARDS {
        return own;
    }
    let own = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed) % SHARDS;
    SHARD.set(own);
    own
}

#[cfg(all(test, not(cobweb_loom)))]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Waker};

    fn ready<F: Future>(future: std::pin::Pin<&mut F>) -> bool {
        future.poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn quiesce_waits_for_passes_from_before_and_not_for_later_ones() {
        let grace: Arc<Grace> = Arc::default();
        let before = grace.enter();
        let mut wait = pin!(grace.quiesce());
        assert!(!ready(wait.as_mut()));
        let after = grace.enter();
        assert!(!ready(wait.as_mut()));
        drop(before);
        assert!(ready(wait.as_mut()));
        assert_eq!(grace.users(), 1);
        drop(after);
    }

    #[test]
    fn every_round_waits_for_the_passes_of_the_round_before() {
        let grace: Arc<Grace> = Arc::default();
        let mut held = grace.enter();
        for _ in 0..5 {
            let next = {
                let mut wait = pin!(grace.quiesce());
                assert!(!ready(wait.as_mut()));
                let next = grace.enter();
                drop(held);
                assert!(ready(wait.as_mut()));
                next
            };
            held = next;
        }
    }

    #[test]
    fn a_wait_that_is_given_up_lets_the_next_one_have_its_turn() {
        let grace: Arc<Grace> = Arc::default();
        let pass = grace.enter().and(Some(Arc::<Grace>::default().enter()));
        {
            let mut first = pin!(grace.quiesce());
            let mut second = pin!(grace.quiesce());
            assert!(!ready(first.as_mut()) && !ready(second.as_mut()));
        }
        let mut third = pin!(grace.quiesce());
        assert!(!ready(third.as_mut()), "the pass is older than all of them");
        drop(pass);
        assert!(ready(third.as_mut()));
    }

    #[test]
    fn what_was_taken_out_is_not_in_use_after_the_wait_on_threads_too() {
        // A slot holds a number; users look it up and use it, the owner replaces it, waits, and poisons what was there.
        const ROUNDS: usize = 3000;
        let grace: Arc<Grace> = Arc::default();
        let alive: Arc<Vec<AtomicBool>> = Arc::new((0..=ROUNDS).map(|_| AtomicBool::new(true)).collect());
        let slot: Arc<AtomicUsize> = Arc::default();
        let used: Arc<AtomicUsize> = Arc::default();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                let (grace, alive, slot, used) = (grace.clone(), alive.clone(), slot.clone(), used.clone());
                scope.spawn(move || {
                    while slot.load(SeqCst) < ROUNDS {
                        let _pass = grace.enter();
                        let n = slot.load(SeqCst);
                        assert!(alive[n].load(SeqCst), "in use after the wait");
                        used.fetch_add(1, SeqCst);
                    }
                });
            }
            for n in 0..ROUNDS {
                slot.store(n + 1, SeqCst);
                let mut wait = pin!(grace.quiesce());
                while !ready(wait.as_mut()) {
                    std::hint::spin_loop();
                }
                alive[n].store(false, SeqCst);
            }
        });
        assert!(used.load(SeqCst) > 0);
    }
}
