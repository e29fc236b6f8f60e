//! The memory budget of a context, shared by several caches.
//!
//! Each cache is a [`Claim`]: it registers with a *fixed* part (its buffers set aside) and a guaranteed *share*, and both are taken out of
//! the budget for as long as it lives. What it uses beyond its share comes out of the common pool. A cache that finds the
//! pool too small gets into line, once, however many of its requests wait; freed memory is kept for the first in line, and caches are served
//! in turn, one request each (S42). So one dead target can fill the pool but never what another disk is guaranteed.
//!
//! The steps of a claim happen under the lock of its owner: `owner's lock -> budget lock` is the only order. Hence
//! [`Claim::serve`], which calls back into owners, is called with no lock held.

use crate::error::{Error, Result};
use crate::sync::{Arc, Mutex, Weak};
use slab::Slab;
use std::collections::VecDeque;
use std::fmt;

/// Memory that all caches of a context may use together.
#[derive(Default)]
pub struct Budget {
    state: Mutex<State>,
}

/// What the owner of a claim is asked by the budget. Called with no lock of the budget held.
pub trait Claimant: Send + Sync {
    /// It is this one's turn: give memory to the first request that waits, if the pool now has enough.
    fn turn(&self) -> Turn;
    /// Somebody waits for the pool: what is lazily kept should go.
    fn pressed(&self);
}

/// What came of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// A request was served and another one waits for the pool.
    Again,
    /// Nothing here waits for the pool any more.
    Done,
    /// The pool is still too small for this one.
    TooSmall,
}

/// A cache's part in the budget; gives everything back when dropped.
pub struct Claim {
    budget: Arc<Budget>,
    key: usize,
    share: u64,
}

struct State {
    /// `u64::MAX`: no limit.
    limit: u64,
    /// Fixed parts and shares of all claims.
    guaranteed: u64,
    /// Bytes used beyond the shares.
    pooled: u64,
    members: Slab<Member>,
    /// Members that wait for the pool, in turn.
    line: VecDeque<usize>,
    /// Somebody is serving the line, and should look once more when done.
    serving: bool,
    again: bool,
}

struct Member {
    guaranteed: u64,
    pooled: u64,
    claimant: Weak<dyn Claimant>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            limit: u64::MAX,
            guaranteed: 0,
            pooled: 0,
            members: Slab::new(),
            line: VecDeque::new(),
            serving: false,
            again: false,
        }
    }
}

impl Budget {
    /// A budget of `limit` bytes; 0 is no limit.
    pub fn new(limit: u64) -> Arc<Self> {
        let budget = Arc::new(Self::default());
        budget.set_limit(limit);
        budget
    }

    /// Changes the limit; 0 is none. What is used beyond a smaller one stays in use until it is given back.
    pub fn set_limit(&self, limit: u64) {
        self.state.lock().limit = if limit == 0 { u64::MAX } else { limit };
        self.serve();
    }

    /// The limit in bytes; 0 is none.
    pub fn limit(&self) -> u64 {
        match self.state.lock().limit {
            u64::MAX => 0,
            limit => limit,
        }
    }

    /// Bytes spoken for: guaranteed ones, and those used beyond.
    pub fn used(&self) -> u64 {
        let s = self.state.lock();
        s.guaranteed.saturating_add(s.pooled)
    }

    /// Whether somebody waits for the pool.
    pub fn is_pressed(&self) -> bool {
        !self.state.lock().line.is_empty()
    }

    /// Registers a claim with `fixed` bytes that are in use from now on and a guaranteed `share` of further bytes. Refused
    /// when the budget cannot guarantee that.
    pub fn claim(self: &Arc<Self>, fixed: u64, share: u64, claimant: Weak<dyn Claimant>) -> Result<Claim> {
        let mut s = self.state.lock();
        let guaranteed = fixed.saturating_add(share);
        let free = s.limit.saturating_sub(s.guaranteed);
        if guaranteed > free {
            return Err(Error::new(
                libc::ENOMEM,
                crate::error::Code::CacheFull,
                format!("the context's RAM budget has {free} bytes left, {guaranteed} are needed at least"),
            ));
        }
        s.guaranteed += guaranteed;
        let key = s.members.insert(Member { guaranteed, pooled: 0, claimant });
        Ok(Claim { budget: self.clone(), key, share })
    }

    /// Serves the line until the first in it finds the pool too small. One thread at a time; a second one leaves word and goes.
    fn serve(&self) {
        {
            let mut s = self.state.lock();
            s.again = true;
            if s.serving {
                return;
            }
            s.serving = true;
        }
        loop {
            let (key, claimant) = {
                let mut s = self.state.lock();
                if !s.again || s.line.is_empty() {
                    s.serving = false;
                    s.again = false;
                    return;
                }
                // What happens from here on is looked at again.
                s.again = false;
                let key = s.line[0];
                (key, s.members[key].claimant.clone())
            };
            let turn = claimant.upgrade().map_or(Turn::Done, |c| c.turn());
            let mut s = self.state.lock();
            if turn == Turn::TooSmall || s.line.front() != Some(&key) {
                continue;
            }
            s.line.pop_front();
            if turn == Turn::Again {
                s.line.push_back(key);
            }
            s.again = true;
        }
    }
}

impl Claim {
    /// The owner goes from `used` to `used + len` bytes beside its fixed part. False if the pool does not have that, or others
    /// were first in line; with `wait` the owner is then in line. Under the owner's lock.
    pub fn grow(&self, used: u64, len: u64, wait: bool) -> bool {
        let need = self.beyond(used.saturating_add(len)) - self.beyond(used);
        if need == 0 {
            return true;
        }
        let mut s = self.budget.state.lock();
        let first = s.line.front().is_none_or(|k| *k == self.key);
        let room = s.limit.saturating_sub(s.guaranteed).saturating_sub(s.pooled);
        if first && need <= room {
            s.pooled += need;
            s.members[self.key].pooled += need;
            return true;
        }
        if wait && !s.line.contains(&self.key) {
            s.line.push_back(self.key);
        }
        false
    }

    /// The owner goes from `used` to `used + len` with bytes that were part of its fixed ones. Under the owner's lock.
    pub fn add(&self, used: u64, len: u64) {
        let need = self.beyond(used.saturating_add(len)) - self.beyond(used);
        if need > 0 {
            let mut s = self.budget.state.lock();
            s.pooled += need;
            s.members[self.key].pooled += need;
        }
    }

    /// The owner goes from `used` down by `len`. Under the owner's lock; call [`Claim::serve`] after it. Returns whether the pool got anything.
    pub fn shrink(&self, used: u64, len: u64) -> bool {
        let freed = self.beyond(used) - self.beyond(used.saturating_sub(len));
        if freed == 0 {
            return false;
        }
        let mut s = self.budget.state.lock();
        s.pooled -= freed;
        s.members[self.key].pooled -= freed;
        !s.line.is_empty()
    }

    /// Nobody here waits for the pool any more. Under the owner's lock; call [`Claim::serve`] after it if this returns true.
    pub fn leave_line(&self) -> bool {
        let mut s = self.budget.state.lock();
        let before = s.line.len();
        s.line.retain(|k| *k != self.key);
        before != s.line.len() && !s.line.is_empty()
    }

    /// Whether somebody waits for the pool.
    pub fn is_pressed(&self) -> bool {
        self.budget.is_pressed()
    }

    /// Lets those in line have what has been freed. With no lock held.
    pub fn serve(&self) {
        self.budget.serve();
    }

    /// Tells all other claimants that somebody waits. With no lock held.
    pub fn press(&self) {
        let others: Vec<_> = {
            let s = self.budget.state.lock();
            s.members.iter().filter(|(k, _)| *k != self.key).map(|(_, m)| m.claimant.clone()).collect()
        };
        others.iter().filter_map(Weak::upgrade).for_each(|c| c.pressed());
    }

    fn beyond(&self, used: u64) -> u64 {
        used.saturating_sub(self.share)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        {
            let mut s = self.budget.state.lock();
            s.line.retain(|k| *k != self.key);
            let member = s.members.remove(self.key);
            s.guaranteed -= member.guaranteed;
            s.pooled -= member.pooled;
        }
        self.budget.serve();
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Budget").field("limit", &self.limit()).field("used", &self.used()).finish()
    }
}

impl fmt::Debug for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Claim").field("share", &self.share).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    /// An owner with a list of sizes that wait.
    #[derive(Default)]
    struct Owner {
        claim: Mutex<Option<Claim>>,
        used: Mutex<u64>,
        waiting: Mutex<VecDeque<u64>>,
        pressed: AtomicUsize,
        log: Arc<Mutex<Vec<(u32, u64)>>>,
        id: u32,
    }

    impl Owner {
        fn new(budget: &Arc<Budget>, id: u32, share: u64, log: &Arc<Mutex<Vec<(u32, u64)>>>) -> Arc<Self> {
            let owner = Arc::new(Self { id, log: log.clone(), ..Self::default() });
            let weak: Weak<dyn Claimant> = Arc::downgrade(&(owner.clone() as Arc<dyn Claimant>));
            *owner.claim.lock() = Some(budget.claim(0, share, weak).expect("fits"));
            owner
        }

        fn with<R>(&self, f: impl FnOnce(&Claim) -> R) -> R {
            f(self.claim.lock().as_ref().expect("registered"))
        }

        fn take(&self, len: u64) -> bool {
            let mut used = self.used.lock();
            let ok = self.waiting.lock().is_empty() && self.with(|c| c.grow(*used, len, true));
            if ok {
                *used += len;
            } else {
                self.waiting.lock().push_back(len);
            }
            ok
        }

        fn give(&self, len: u64) {
            {
                let mut used = self.used.lock();
                self.with(|c| c.shrink(*used, len));
                *used -= len;
            }
            self.with(|c| c.budget.clone()).serve();
        }
    }

    impl Claimant for Owner {
        fn turn(&self) -> Turn {
            let mut used = self.used.lock();
            let mut waiting = self.waiting.lock();
            let Some(len) = waiting.front().copied() else { return Turn::Done };
            if !self.with(|c| c.grow(*used, len, true)) {
                return Turn::TooSmall;
            }
            *used += len;
            waiting.pop_front();
            self.log.lock().push((self.id, len));
            if waiting.is_empty() { Turn::Done } else { Turn::Again }
        }

        fn pressed(&self) {
            self.pressed.fetch_add(1, SeqCst);
        }
    }

    #[test]
    fn a_share_is_there_whatever_the_others_use() {
        let budget = Budget::new(100);
        let log = Arc::default();
        let (a, b) = (Owner::new(&budget, 0, 20, &log), Owner::new(&budget, 1, 20, &log));
        assert!(a.take(80), "the share and the whole pool");
        assert!(!a.take(1));
        assert!(b.take(20));
        assert!(!b.take(1));
        assert_eq!(budget.used(), 100);
    }

    #[test]
    fn caches_that_wait_are_served_in_turn_one_request_each() {
        let budget = Budget::new(100);
        let log = Arc::default();
        let (a, b, c) = (
            Owner::new(&budget, 0, 0, &log),
            Owner::new(&budget, 1, 0, &log),
            Owner::new(&budget, 2, 0, &log),
        );
        assert!(c.take(100));
        for _ in 0..3 {
            assert!(!a.take(10));
        }
        for _ in 0..2 {
            assert!(!b.take(10));
        }
        assert!(budget.is_pressed());
        c.give(50);
        assert_eq!(*log.lock(), [(0, 10), (1, 10), (0, 10), (1, 10), (0, 10)]);
        assert!(!budget.is_pressed());
    }

    #[test]
    fn freed_memory_is_kept_for_the_first_in_line() {
        let budget = Budget::new(100);
        let log = Arc::default();
        let (a, b, c) = (
            Owner::new(&budget, 0, 0, &log),
            Owner::new(&budget, 1, 0, &log),
            Owner::new(&budget, 2, 0, &log),
        );
        assert!(c.take(100));
        assert!(!a.take(50));
        c.give(30);
        assert!(!b.take(10), "30 are free, but a is first");
        assert!(!c.take(10), "the one who gave has no right to it either");
        c.give(20);
        assert_eq!(*log.lock(), [(0, 50)]);
        c.give(10);
        assert_eq!(*log.lock(), [(0, 50), (1, 10)]);
    }

    #[test]
    fn a_claim_that_goes_gives_everything_back_and_lets_the_next_have_it() {
        let budget = Budget::new(100);
        let log = Arc::default();
        let (a, b) = (Owner::new(&budget, 0, 10, &log), Owner::new(&budget, 1, 10, &log));
        assert!(a.take(90));
        assert!(!b.take(60));
        drop(a.claim.lock().take());
        assert_eq!(*log.lock(), [(1, 60)]);
        assert_eq!(budget.used(), 60);
    }

    #[test]
    fn a_share_that_cannot_be_guaranteed_is_refused() {
        let budget = Budget::new(100);
        let log = Arc::default();
        let _a = Owner::new(&budget, 0, 60, &log);
        let weak: Weak<dyn Claimant> = Weak::<Owner>::new();
        let error = budget.claim(30, 20, weak).expect_err("50 of 40");
        assert!(error.to_string().contains("40 bytes left, 50 are needed"), "{error}");
        assert_eq!(budget.used(), 60);
    }

    #[test]
    fn leaving_the_line_lets_the_next_have_its_turn() {
        let budget = Budget::new(100);
        let log = Arc::default();
        let (a, b, c) = (
            Owner::new(&budget, 0, 0, &log),
            Owner::new(&budget, 1, 0, &log),
            Owner::new(&budget, 2, 0, &log),
        );
        assert!(c.take(90));
        assert!(!a.take(50));
        assert!(!b.take(10));
        a.waiting.lock().clear();
        assert!(a.with(|c| c.leave_line()), "b waits behind");
        budget.serve();
        assert_eq!(*log.lock(), [(1, 10)]);
    }

    #[test]
    fn everybody_else_is_told_when_somebody_waits() {
        let budget = Budget::new(100);
        let log = Arc::default();
        let (a, b) = (Owner::new(&budget, 0, 0, &log), Owner::new(&budget, 1, 0, &log));
        a.with(|c| c.press());
        assert_eq!((a.pressed.load(SeqCst), b.pressed.load(SeqCst)), (0, 1));
    }
}
