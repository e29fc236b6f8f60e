//! Waiting for one entry to be removed: wait, wake, give up.
//!
//! Each entry has a chain of [`Waiter`]s, closed by the removal. A waiter's `state` decides between the two who may end
//! the wait, the remover and the waiter that gives up: whoever moves it away from `WAITING` owns the waker, wakes or
//! drops it, and so there is no lost and no double wake-up. The memory of a waiter always belongs to its
//! [`Registration`].
//!
//! The waker is written before publication and not changed after it: a poll with another waker gives up and registers
//! again. That needs no third party in the protocol, and it is rare.

use std::ops::ControlFlow;
use std::task::{RawWakerVTable, Waker};

use smallvec::SmallVec;

use super::chain::{self, Chained};
use super::entry::Node;
use super::reclaim::{self, Watch};
use crate::sync::UnsafeCell;
use crate::sync::atomic::AtomicU8;
use crate::sync::atomic::Ordering::{AcqRel, Acquire};
use crate::sync::epoch::{self, Atomic, Guard, Shared};

const WAITING: u8 = 0;
/// The entry has been removed.
const WOKEN: u8 = 1;
/// The waiter gave up.
const GONE: u8 = 2;

/// One task's wait for one entry.
pub(super) struct Waiter {
    link: Atomic<Waiter>,
    state: AtomicU8,
    /// Belongs to whoever moves `state` away from `WAITING`.
    waker: UnsafeCell<Option<Waker>>,
    watch: Watch,
}

// SAFETY: `waker` is accessed by one party, the one that `end` chose; the rest is atomic.
unsafe impl Sync for Waiter {}

impl Chained for Waiter {
    fn link(&self, _index: usize) -> &Atomic<Self> {
        &self.link
    }

    fn touch(&self) {
        self.watch.touch();
    }
}

impl Waiter {
    /// Ends the wait; the waker if this call was the one that ended it.
    fn end(&self, state: u8) -> Option<Waker> {
        // Linearization point of wake-up and of giving up. Partner: the same line in the other party, and for `WOKEN`
        // the load in `Registration::check`. Acquire: a giver-up's pin happens before the remover retires the entry.
        self.state.compare_exchange(WAITING, state, AcqRel, Acquire).ok()?;
        // SAFETY: the exchange succeeds once, so this is the only access after publication.
        self.waker.with_mut(|w| unsafe { (*w).take() })
    }
}

/// The waiters of one entry.
pub(super) struct WaitList {
    head: Atomic<Waiter>,
}

impl WaitList {
    pub(super) fn new() -> Self {
        Self { head: Atomic::null() }
    }

    /// Number of waiters in the chain.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        let (guard, mut count) = (epoch::pin(), 0);
        let _ = chain::walk(self.head.load(Acquire, &guard), &guard, |_| {
            count += 1;
            ControlFlow::<()>::Continue(())
        });
        count
    }

    /// Ends all waits, after which there can be none. The entry must be retired after this call: a waiter that gives up reads
    /// it until its wait has ended.
    pub(super) fn close(&self, guard: &Guard) -> Option<Wakers> {
        let first = chain::close(&self.head, guard);
        if first.is_null() {
            return None;
        }
        let mut wakers = Wakers(SmallVec::new());
        let _ = chain::walk(first, guard, |waiter| {
            wakers.0.extend(waiter.end(WOKEN));
            ControlFlow::<()>::Continue(())
        });
        Some(wakers)
    }
}

/// Wakers to call, newest waiter first. Called after the guard has gone: a waker is foreign code and may write an
/// eventfd.
#[must_use]
pub(super) struct Wakers(SmallVec<[Waker; 4]>);

impl Wakers {
    /// Wakes, the longest waiting first.
    pub(super) fn wake(mut self) {
        while let Some(waker) = self.0.pop() {
            waker.wake();
        }
    }
}

/// A wait under way; dropping it gives up.
pub(super) struct Registration {
    waiter: *const Waiter,
    /// The entry waited for. Valid only between a successful `end(GONE)` and the end of the guard pinned before it.
    entry: *const Node,
    /// Identity of the waker, to recognise a poll by another task: the waker itself may be gone at any moment.
    task: (*const (), &'static RawWakerVTable),
}

// SAFETY: the pointers are used as the protocol above says, from whichever thread; the task's data pointer is only compared.
unsafe impl Send for Registration {}
// SAFETY: `&Registration` gives access to nothing but atomics.
unsafe impl Sync for Registration {}

/// What a poll finds.
pub(super) enum Check {
    /// Still waiting, with the right waker.
    Waiting,
    /// The entry has been removed.
    Woken,
    /// Still waiting, but with the waker of another task.
    Stranger,
}

impl Registration {
    /// Starts to wait for `entry`; `None` if it has been removed.
    pub(super) fn new<'g>(entry: &'g Node, waker: &Waker, guard: &'g Guard) -> Option<Self> {
        let waiter = Box::into_raw(Box::new(Waiter {
            link: Atomic::null(),
            state: AtomicU8::new(WAITING),
            waker: UnsafeCell::new(Some(waker.clone())),
            watch: Watch::default(),
        }));
        if !chain::push(&entry.waiters.head, Shared::from(waiter.cast_const()), 0, guard) {
            // SAFETY: it was not published.
            drop(unsafe { Box::from_raw(waiter) });
            return None;
        }
        Some(Self { waiter, entry, task: (waker.data(), waker.vtable()) })
    }

    /// Looks without changing anything.
    pub(super) fn check(&self, waker: &Waker) -> Check {
        // SAFETY: the waiter is freed by our drop only.
        let waiter = unsafe { &*self.waiter };
        // Acquire: partner is `end(WOKEN)`.
        if waiter.state.load(Acquire) == WOKEN {
            Check::Woken
        } else if self.task.0 == waker.data() && std::ptr::eq(self.task.1, waker.vtable()) {
            // The same address is the same task: our clone keeps it allocated until it has been woken or dropped, and
            // after that the state above would have been seen.
            Check::Waiting
        } else {
            Check::Stranger
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let guard = epoch::pin();
        // SAFETY: the waiter is freed below.
        let waiter = unsafe { &*self.waiter };
        let shared = Shared::from(self.waiter);
        let waker = waiter.end(GONE);
        if waker.is_some() {
            // SAFETY: the remover has not ended this wait yet, it retires the entry after it has, and we are pinned.
            let entry = unsafe { &*self.entry };
            chain::unlink(&entry.waiters.head, shared, 0, &guard);
        }
        // SAFETY: out of the chain, or the chain is closed and its remover pinned; nobody can come by it any more.
        unsafe { reclaim::retire_waiter(shared, &guard) };
        drop(guard);
        drop(waker);
    }
}
