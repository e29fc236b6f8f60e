//! Bytes with a limit, and one line of those who wait for them (S42, S74).
//!
//! Knows nothing of caches, so that its protocol can be model-checked alone (`space_loom_tests.rs`). Every change happens under one lock, and
//! every return of bytes ends in [`State::pump`]: what has become free is booked for the first in line, who is then woken
//! with the bytes already in hand, and the next one is looked at. So a waiter whose thread sleeps holds up nobody, a later,
//! smaller request does not pass an earlier one, and a waiter that leaves (cancel, timeout) hands on what it had.
//!
//! The claim on the context's budget moves in the same step (S41): both limits or none.

use crate::error::{IoError, IoResult};
use crate::request::budget::{Budget, Claim, Claimant, Turn};
use crate::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering::Relaxed};
use crate::sync::{Arc, Mutex, MutexGuard, Weak};
use once_cell::sync::OnceCell;
use slab::Slab;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// A bounded number of bytes; see the module text.
pub(super) struct Space {
    state: Mutex<State>,
    claim: OnceCell<Claim>,
    pressed: OnceCell<Box<dyn Fn() + Send + Sync>>,
    // Copies of what is in `state`, for those who decide without the lock (Relaxed: a moment old is good enough).
    used: AtomicU64,
    waiters: AtomicUsize,
    level: AtomicU8,
}

/// How full the space is, with hysteresis (S33, S45).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(super) enum Level {
    /// Below the low mark.
    Low = 0,
    /// Between the marks, coming from below.
    Middle = 1,
    /// At the high mark, and from there down to the low mark.
    High = 2,
}

/// A place in line; ready when the bytes have been booked. Dropping it leaves the line or gives the bytes back, unless they were taken by
/// awaiting it to its end.
pub(super) struct Wait {
    space: Arc<Space>,
    key: Option<usize>,
}

struct State {
    limit: u64,
    /// Bytes beyond the limit that [`Space::force`] may use.
    slack: u64,
    low: u64,
    high: u64,
    used: u64,
    peak: u64,
    level: Level,
    line: VecDeque<usize>,
    tickets: Slab<Ticket>,
    broken: Option<IoError>,
    /// Whether the claim may stand in the budget's line.
    in_line: bool,
    /// It has just got there: others are to be told when the lock is free.
    press: bool,
}

struct Ticket {
    len: u64,
    outcome: Option<IoResult>,
    waker: Option<Waker>,
}

type Wakers = SmallVec<[Waker; 4]>;

impl Space {
    /// `limit` bytes, and `slack` more for [`Space::force`]. The marks are at the limit until they are set.
    pub(super) fn new(limit: u64, slack: u64) -> Arc<Self> {
        let state = State {
            limit,
            slack,
            low: limit,
            high: limit,
            used: 0,
            peak: 0,
            level: Level::Low,
            line: VecDeque::new(),
            tickets: Slab::new(),
            broken: None,
            in_line: false,
            press: false,
        };
        Arc::new(Self {
            state: Mutex::new(state),
            claim: OnceCell::new(),
            pressed: OnceCell::new(),
            used: AtomicU64::new(0),
            waiters: AtomicUsize::new(0),
            level: AtomicU8::new(0),
        })
    }

    /// Binds the space to a budget: `fixed` bytes of it are in use from now on and `share` are guaranteed. `pressed` is called, without a lock,
    /// when others wait for the budget. Once, before the first use.
    pub(super) fn join(
        self: &Arc<Self>,
        budget: &Arc<Budget>,
        fixed: u64,
        share: u64,
        pressed: impl Fn() + Send + Sync + 'static,
    ) -> crate::error::Result<()> {
        let this: Arc<dyn Claimant> = self.clone();
        let weak: Weak<dyn Claimant> = Arc::downgrade(&this);
        let claim = budget.claim(fixed, share, weak)?;
        let first = self.claim.set(claim).is_ok() && self.pressed.set(Box::new(pressed)).is_ok();
        assert!(first, "a space joins one budget");
        Ok(())
    }

    /// Sets limit and marks.
    pub(super) fn set_marks(&self, limit: u64, slack: u64, low: u64, high: u64) {
        let mut s = self.state.lock();
        (s.limit, s.slack, s.low, s.high) = (limit, slack, low, high);
        s.settle_level();
        self.finish(s, false);
    }

    /// Bytes that can be in use.
    pub(super) fn limit(&self) -> u64 {
        self.state.lock().limit
    }

    /// Bytes in use.
    pub(super) fn used(&self) -> u64 {
        self.used.load(Relaxed)
    }

    /// Most bytes ever in use.
    pub(super) fn peak(&self) -> u64 {
        self.state.lock().peak
    }

    /// Requests in line.
    pub(super) fn waiters(&self) -> usize {
        self.waiters.load(Relaxed)
    }

    /// How full the space is.
    pub(super) fn level(&self) -> Level {
        match self.level.load(Relaxed) {
            0 => Level::Low,
            1 => Level::Middle,
            _ => Level::High,
        }
    }

    /// Whether others wait for the budget.
    pub(super) fn is_pressed(&self) -> bool {
        self.claim.get().is_some_and(Claim::is_pressed)
    }

    /// Takes `len` bytes if they are free and nobody waits.
    pub(super) fn try_take(&self, len: u64) -> bool {
        let mut s = self.state.lock();
        let ok = s.broken.is_none() && s.line.is_empty() && self.fits(&mut s, len, false);
        if ok {
            s.add(len);
        }
        self.publish(&s);
        ok
    }

    /// Like [`Space::try_take`], and only if the space stays below its high mark.
    pub(super) fn try_take_low(&self, len: u64) -> bool {
        let mut s = self.state.lock();
        let below = s.level < Level::High && s.used.saturating_add(len) < s.high;
        let ok = below && s.broken.is_none() && s.line.is_empty() && self.fits(&mut s, len, false);
        if ok {
            s.add(len);
        }
        self.publish(&s);
        ok
    }

    /// Takes `len` bytes from the slack if need be, without waiting and without asking the budget (the slack is part of
    /// what was fixed there).
    pub(super) fn force(&self, len: u64) -> bool {
        let mut s = self.state.lock();
        let ok = s.used.saturating_add(len) <= s.limit.saturating_add(s.slack);
        if ok {
            // Beyond the limit the claim is not asked; it moves with `used` all the same, so that giving back is symmetric.
            if let Some(claim) = self.claim.get() {
                claim.add(s.used, len);
            }
            s.add(len);
        }
        self.publish(&s);
        ok
    }

    /// Gets in line for `len` bytes; they may be there at once.
    pub(super) fn enter(self: &Arc<Self>, len: u64) -> Wait {
        let mut s = self.state.lock();
        let outcome = if let Some(e) = s.broken {
            Some(Err(e))
        } else if s.line.is_empty() && self.fits(&mut s, len, true) {
            s.add(len);
            Some(Ok(()))
        } else {
            None
        };
        let waits = outcome.is_none();
        let key = s.tickets.insert(Ticket { len, outcome, waker: None });
        if waits {
            s.line.push_back(key);
        }
        // What was free for the first in line would have been booked for it long ago, so there is nothing to pump.
        self.end(s, false, Wakers::new());
        Wait { space: self.clone(), key: Some(key) }
    }

    /// Gives `len` bytes back.
    pub(super) fn give(&self, len: u64) {
        if len == 0 {
            return;
        }
        let mut s = self.state.lock();
        let serve = self.sub(&mut s, len);
        self.finish(s, serve);
    }

    /// Ends the wait of everybody in line, and of all who come later, with `error`.
    pub(super) fn break_with(&self, error: IoError) {
        self.state.lock().broken.get_or_insert(error);
        self.fail_line(error);
    }

    /// Ends the wait of everybody in line with `error`.
    pub(super) fn fail_line(&self, error: IoError) {
        let mut s = self.state.lock();
        let mut wakers = Wakers::new();
        while let Some(key) = s.line.pop_front() {
            let ticket = &mut s.tickets[key];
            ticket.outcome = Some(Err(error));
            wakers.extend(ticket.waker.take());
        }
        self.finish(s, false);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Whether `len` more bytes are within limit and budget; if so the budget has booked them.
    fn fits(&self, s: &mut State, len: u64, wait: bool) -> bool {
        if s.used.saturating_add(len) > s.limit {
            return false;
        }
        let Some(claim) = self.claim.get() else { return true };
        let ok = claim.grow(s.used, len, wait);
        if wait && !ok && !s.in_line {
            (s.in_line, s.press) = (true, true);
        }
        ok
    }

    /// Takes `len` off; whether the budget has something for others.
    fn sub(&self, s: &mut State, len: u64) -> bool {
        debug_assert!(len <= s.used, "more given back than taken");
        let serve = self.claim.get().is_some_and(|c| c.shrink(s.used, len));
        s.used = s.used.saturating_sub(len);
        s.settle_level();
        serve
    }

    /// Books what is free for the line and ends the locked section.
    fn finish(&self, mut s: MutexGuard<'_, State>, mut serve: bool) {
        let mut wakers = Wakers::new();
        while self.grant_first(&mut s, true, &mut wakers) {}
        if s.line.is_empty() && std::mem::take(&mut s.in_line) {
            serve |= self.claim.get().is_some_and(Claim::leave_line);
        }
        self.end(s, serve, wakers);
    }

    /// Ends a locked section and then calls whoever is to be called.
    fn end(&self, mut s: MutexGuard<'_, State>, serve: bool, wakers: Wakers) {
        let press = std::mem::take(&mut s.press);
        self.publish(&s);
        drop(s);
        wakers.into_iter().for_each(Waker::wake);
        let Some(claim) = self.claim.get() else { return };
        if press {
            claim.press();
        }
        if serve {
            claim.serve();
        }
    }

    /// Gives the first in line its bytes if they are there.
    fn grant_first(&self, s: &mut State, wait: bool, wakers: &mut Wakers) -> bool {
        let Some(key) = s.line.front().copied() else { return false };
        let len = s.tickets[key].len;
        if !self.fits(s, len, wait) {
            return false;
        }
        s.add(len);
        s.line.pop_front();
        let ticket = &mut s.tickets[key];
        ticket.outcome = Some(Ok(()));
        wakers.extend(ticket.waker.take());
        true
    }

    fn publish(&self, s: &State) {
        self.used.store(s.used, Relaxed);
        self.waiters.store(s.line.len(), Relaxed);
        self.level.store(s.level as u8, Relaxed);
    }
}

impl State {
    fn add(&mut self, len: u64) {
        self.used += len;
        self.peak = self.peak.max(self.used);
        self.settle_level();
    }

    fn settle_level(&mut self) {
        self.level = if self.used >= self.high {
            Level::High
        } else if self.used <= self.low {
            Level::Low
        } else {
            self.level.max(Level::Middle)
        };
    }
}

impl Claimant for Space {
    fn turn(&self) -> Turn {
        let mut s = self.state.lock();
        let mut wakers = Wakers::new();
        let waits = |s: &State| {
            let first = s.line.front().map(|key| s.tickets[*key].len);
            first.is_some_and(|len| s.used.saturating_add(len) <= s.limit)
        };
        let turn = if !waits(&s) {
            Turn::Done
        } else if !self.grant_first(&mut s, false, &mut wakers) {
            Turn::TooSmall
        } else if waits(&s) {
            Turn::Again
        } else {
            Turn::Done
        };
        s.in_line = turn != Turn::Done;
        self.end(s, false, wakers);
        turn
    }

    fn pressed(&self) {
        if let Some(pressed) = self.pressed.get() {
            pressed();
        }
    }
}

impl Wait {
    /// Whether the bytes (or an error) are there already; the next poll will tell.
    pub(super) fn is_ready(&self) -> bool {
        let s = self.space.state.lock();
        self.key.is_none_or(|key| s.tickets[key].outcome.is_some())
    }
}

impl Future for Wait {
    type Output = IoResult;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<IoResult> {
        let key = self.key.expect("not polled after it was ready");
        let space = self.space.clone();
        let mut s = space.state.lock();
        let ticket = &mut s.tickets[key];
        match ticket.outcome {
            Some(outcome) => {
                let ticket = s.tickets.remove(key);
                self.key = None;
                drop(s);
                drop(ticket);
                Poll::Ready(outcome)
            }
            None => {
                let old = ticket.waker.replace(cx.waker().clone());
                drop(s);
                drop(old);
                Poll::Pending
            }
        }
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        let Some(key) = self.key.take() else { return };
        let mut s = self.space.state.lock();
        let ticket = s.tickets.remove(key);
        let serve = match ticket.outcome {
            // Booked and never taken.
            Some(Ok(())) => self.space.sub(&mut s, ticket.len),
            Some(Err(_)) => false,
            None => {
                s.line.retain(|k| *k != key);
                false
            }
        };
        self.space.finish(s, serve);
    }
}

impl fmt::Debug for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = self.state.lock();
        write!(f, "Space({} of {}, {} waiting)", s.used, s.limit, s.line.len())
    }
}
