//! Memory and its accounting: what a reservation is, what a buffer gives back, and the steps when there is no space.
//!
//! A reservation books bytes first (space and budget in one step, S41) and takes memory from the arena as its buffers are asked for.
//! Each buffer's owner carries its *charge*: when the last reference goes, wherever that is, memory and bytes go back and the first in
//! line gets them. A charge has a little more than the memory: the cost of the piece that the index will need for it, so that drain and
//! spill never have to ask for memory.

use super::config::{Overflow, PIECE_COST};
use super::meter::Meter;
use super::space::Space;
use super::store::Store;
use crate::error::{Code, IoError, IoResult};
use crate::events::Side;
use crate::node::{Permit, Reservation};
use crate::queue::{Cx, Env};
use crate::request::arena::{Arena, PAGE, RUN_MAX, Run};
use crate::request::{Buffers, Class, Segment};
use crate::rt::Instant;
use crate::sync::Arc;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::fmt;

/// Pieces of the index that are paid for with each buffer: its own, and the second half of one that it cuts in two.
const PIECES_PAID: u64 = 2;
/// Buffers of this size are what a reservation of several granules is thought to be taken in.
const TAKE: u64 = 64 << 10;

/// Bytes that a buffer of `len` bytes is charged: whole pages, and its pieces of the index.
pub(super) const fn cost(len: u64) -> u64 {
    Arena::size_of(len) + runs(len) * PIECES_PAID * PIECE_COST
}

/// Bytes that a reservation of `len` bytes books: [`cost`], and what it takes more to hand it out in granules.
pub(super) const fn booking(len: u64) -> u64 {
    let takes = len.div_ceil(TAKE);
    let more = takes.saturating_sub(runs(len));
    cost(len) + more * PIECES_PAID * PIECE_COST
}

/// Bytes that a zero marker books.
pub(super) const MARKER: u64 = PIECES_PAID * PIECE_COST;

/// Runs that the arena makes of `len` bytes while it is not short of large ones.
const fn runs(len: u64) -> u64 {
    let pages = len.div_ceil(PAGE as u64);
    let largest = (RUN_MAX / PAGE) as u64;
    pages / largest + (pages % largest).count_ones() as u64
}

/// Where bytes are booked and memory comes from: the cache's own, or one of the buffers set aside.
pub(super) struct Account {
    pub(super) space: Arc<Space>,
    pub(super) arena: Arc<Arena>,
    /// Rates and marks; the buffers set aside have none.
    pub(super) meter: Option<Meter>,
    env: Arc<Env>,
}

/// Bytes booked in an account; given back when dropped.
pub(super) struct Charge {
    account: Arc<Account>,
    bytes: AtomicU64,
}

/// Who keeps a buffer of the cache alive.
pub(super) struct Owner {
    /// Dropped before the charge: bytes are not given to others before the memory is there.
    _run: Run,
    /// Of the charge, bytes for pieces of the index that have not been used.
    credit: AtomicU64,
    charge: Charge,
}

impl Account {
    pub(super) fn new(
        env: &Arc<Env>,
        space: Arc<Space>,
        arena: Arc<Arena>,
        meter: Option<Meter>,
    ) -> Arc<Self> {
        Arc::new(Self { space, arena, meter, env: env.clone() })
    }

    /// Books `len` bytes if they are free and nobody waits.
    pub(super) fn try_book(self: &Arc<Self>, len: u64) -> Option<Charge> {
        self.space.try_take(len).then(|| self.booked(len))
    }

    /// Bytes that have been taken from the space.
    pub(super) fn booked(self: &Arc<Self>, len: u64) -> Charge {
        if let Some(meter) = &self.meter {
            meter.filled(self.now(), len, self.space.used());
        }
        Charge { account: self.clone(), bytes: AtomicU64::new(len) }
    }

    /// Gives `len` bytes back.
    pub(super) fn give(&self, len: u64) {
        if len > 0 {
            if let Some(meter) = &self.meter {
                meter.drained(self.now(), len);
            }
            self.space.give(len);
        }
    }

    fn now(&self) -> Instant {
        self.env.runtime.clock.now()
    }

    /// Memory for `len` bytes, paid for by `charge`, which has at least [`cost`] of it.
    pub(super) fn memory(self: &Arc<Self>, len: u64, charge: Charge) -> Buffers {
        let mut bufs = Buffers::new();
        let mut left = len as usize;
        let mut credit = charge.bytes() - Arena::size_of(len);
        for run in self.arena.alloc(left) {
            let n = left.min(run.size());
            let owner = Arc::new(Owner {
                charge: charge.split(run.size() as u64 + credit),
                credit: AtomicU64::new(std::mem::take(&mut credit)),
                _run: run,
            });
            bufs.push(owner._run.segment(n, owner.clone()));
            left -= n;
        }
        if self.arena.wants_spare() {
            // The page faults of the next chunk happen on a thread that nobody waits for.
            let arena = self.arena.clone();
            let clock = self.env.runtime.clock.clone();
            self.env.run_blocking(0, Box::new(move || arena.add_spare(&*clock)));
        }
        bufs
    }
}

impl Charge {
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Makes two of one.
    pub(super) fn split(&self, len: u64) -> Charge {
        let old = self.bytes.fetch_sub(len, Relaxed);
        debug_assert!(len <= old, "more split off than there is");
        Charge { account: self.account.clone(), bytes: AtomicU64::new(len) }
    }

    /// Hands the bytes to somebody who will give them back himself.
    pub(super) fn keep(self) -> u64 {
        self.bytes.swap(0, Relaxed)
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.give(self.bytes());
    }
}

impl Owner {
    /// The owner of a segment, if it is memory of a cache.
    pub(super) fn of(segment: &Segment) -> Option<&Owner> {
        segment.owner()?.downcast_ref()
    }

    /// Whether the memory is charged to `account`.
    pub(super) fn is_of(&self, account: &Arc<Account>) -> bool {
        Arc::ptr_eq(&self.charge.account, account)
    }
}

/// Whether all of `bufs` is memory charged to `account`.
pub(super) fn is_own(bufs: &Buffers, account: &Arc<Account>) -> bool {
    bufs.segments().iter().all(|s| Owner::of(s).is_some_and(|o| o.is_of(account)))
}

/// Takes up to `want` bytes for pieces of the index out of the buffers' credit; the caller gives them back to the account when the pieces go.
pub(super) fn take_credit(bufs: &Buffers, want: u64) -> u64 {
    let mut got = 0;
    for owner in bufs.segments().iter().filter_map(Owner::of) {
        let part = |credit: u64| (credit > 0).then(|| credit - credit.min(want - got));
        if let Ok(old) = owner.credit.fetch_update(Relaxed, Relaxed, part) {
            let n = old.min(want - got);
            owner.charge.split(n).keep();
            got += n;
        }
        if got == want {
            break;
        }
    }
    got
}

impl fmt::Debug for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Account").field("space", &self.space).field("arena", &self.arena).finish()
    }
}

impl fmt::Debug for Charge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Charge({})", self.bytes())
    }
}

/// A reservation of this cache.
#[derive(Debug)]
pub(super) struct CachePermit {
    account: Arc<Account>,
    /// Bytes not yet handed out; the charge has at least their cost.
    left: u64,
    charge: Charge,
    /// Memory for all that is left, once it could not be had buffer by buffer.
    rest: Option<Buffers>,
    through: bool,
}

impl CachePermit {
    fn reservation(account: &Arc<Account>, len: u64, charge: Charge, through: bool) -> Reservation {
        let permit = Self { account: account.clone(), left: len, charge, rest: None, through };
        Reservation::with_permit(len, Box::new(permit))
    }

    fn trim(&mut self, keep: u64) {
        let spare = self.charge.bytes().saturating_sub(keep);
        drop(self.charge.split(spare));
    }
}

impl Permit for CachePermit {
    fn buffers(&mut self, len: u64) -> Buffers {
        debug_assert!(len <= self.left, "the reservation counts too");
        if len == 0 {
            return Buffers::new();
        }
        let after = self.left - len;
        if self.rest.is_none() && self.charge.bytes() >= cost(len) + cost(after) {
            let charge = self.charge.split(cost(len));
            self.left = after;
            if after == 0 {
                self.trim(0);
            }
            return self.account.memory(len, charge);
        }
        // Odd lengths: rounding each to pages costs more than was booked, so they share memory.
        let rest = match self.rest.take() {
            Some(rest) => rest,
            None => {
                let charge = self.charge.split(self.charge.bytes());
                self.account.memory(self.left, charge)
            }
        };
        let bufs = rest.slice(0, len as usize);
        self.left = after;
        self.rest = (after > 0).then(|| rest.slice(len as usize, after as usize));
        bufs
    }

    fn surplus(&mut self, len: u64) {
        self.left -= len.min(self.left);
        match &self.rest {
            Some(rest) => self.rest = (self.left > 0).then(|| rest.slice(0, self.left as usize)),
            // At once (S43).
            None => self.trim(booking(self.left)),
        }
    }

    fn writes_through(&self) -> bool {
        self.through
    }
}

/// What came of asking for space.
#[derive(Debug)]
pub(super) enum Grant {
    /// Space in the cache.
    Space(Charge),
    /// None: the request is to be written through.
    Through,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Wait,
    Spill,
    Through,
    Break,
}

impl Store {
    /// [`crate::node::Node::reserve`]: memory for at most one batch; [`Reservation::len`] says how much it is.
    pub(super) async fn reserve(self: &Arc<Self>, cx: &Cx, len: u64, class: Class) -> IoResult<Reservation> {
        let cut = booking(len) > self.account.space.limit();
        let len = if cut { len.min(self.batch()) } else { len };
        if class >= Class::Background {
            // Nobody waits for it: it takes what is free below the high mark (S45).
            if cut {
                return Err(full());
            }
            let charge = self.try_book_low(booking(len)).ok_or(full())?;
            return Ok(CachePermit::reservation(&self.account, len, charge, false));
        }
        match self.space_for(cx, booking(len)).await? {
            Grant::Space(charge) => Ok(CachePermit::reservation(&self.account, len, charge, false)),
            Grant::Through => {
                let len = len.min(self.batch());
                let charge = self.through_buffer(cx, cost(len)).await?;
                Ok(CachePermit::reservation(&self.through, len, charge, true))
            }
        }
    }

    /// A reservation without waiting, for reading ahead: only below the high mark, and only if nobody waits (S45).
    pub(super) fn try_reserve(&self, len: u64) -> Option<Reservation> {
        let charge = self.try_book_low(booking(len))?;
        Some(CachePermit::reservation(&self.account, len, charge, false))
    }

    fn try_book_low(&self, bytes: u64) -> Option<Charge> {
        let ok = self.broken().is_none() && self.account.space.try_take_low(bytes);
        ok.then(|| self.account.booked(bytes))
    }

    /// `bytes` of space, by the steps that the options allow (S46).
    pub(super) async fn space_for(self: &Arc<Self>, cx: &Cx, bytes: u64) -> IoResult<Grant> {
        if let Some(charge) = self.account.try_book(bytes) {
            self.space_taken();
            return Ok(Grant::Space(charge));
        }
        let begun = cx.now();
        let result = self.wait_for_space(cx, bytes).await;
        self.space_wait.record(cx.now().since(begun).as_nanos() as u64);
        result
    }

    async fn wait_for_space(self: &Arc<Self>, cx: &Cx, bytes: u64) -> IoResult<Grant> {
        let mut expired = 0;
        let mut deadline = self.live.bound().map(|b| cx.now().after(b));
        let mut wait = None;
        loop {
            let changed = self.steps.listen();
            let step = self.step(expired);
            match step {
                Step::Break => {
                    self.post_overflow(cx.now(), Side::None, full());
                    return Err(full());
                }
                Step::Through => {
                    self.post_overflow(cx.now(), Side::Target, full());
                    return Ok(Grant::Through);
                }
                Step::Wait | Step::Spill => {}
            }
            let place = wait.get_or_insert_with(|| Box::pin(self.account.space.enter(bytes)));
            if !place.is_ready() {
                let side = if step == Step::Spill { Side::Spill } else { Side::Cache };
                self.post_overflow(cx.now(), side, full());
                // In this order: whoever frees space from now on finds this request in line.
                self.kick();
                if step == Step::Spill {
                    self.start_spilling();
                }
            }
            let booked = cx.until(deadline, first_of(place.as_mut(), changed));
            match cx.waiting(booked).await? {
                Some(Some(result)) => {
                    result?;
                    self.space_taken();
                    return Ok(Grant::Space(self.account.booked(bytes)));
                }
                // The spill file has become full or usable.
                Some(None) => {}
                None => {
                    expired += 1;
                    deadline = self.live.bound().map(|b| cx.now().after(b));
                }
            }
        }
    }

    /// The step to take after so many waits have reached the bound. A bound that is reached ends in breaking the snapshot when nothing
    /// else is left, whatever `overflow` says: it is there to let the guest go.
    fn step(&self, expired: u32) -> Step {
        let spill = self.spill.as_ref().is_some_and(|s| !s.is_full());
        let through = [self.live.overflow(), self.live.spill_overflow()].contains(&Overflow::WriteThrough);
        let base = match self.live.overflow() {
            Overflow::Spill if spill => Overflow::Spill,
            Overflow::Spill => self.live.spill_overflow(),
            other => other,
        };
        match (base, expired) {
            (Overflow::BreakSnapshot, _) => Step::Break,
            (Overflow::WriteThrough, 0..=1) => Step::Through,
            (Overflow::Wait, 0) => Step::Wait,
            (Overflow::Spill, 0) => Step::Spill,
            (Overflow::Wait, 1) if spill => Step::Spill,
            (_, 1) if through => Step::Through,
            _ => Step::Break,
        }
    }

    /// A buffer set aside for writing through: one after the other (S75), within the bound if there is one.
    async fn through_buffer(&self, cx: &Cx, bytes: u64) -> IoResult<Charge> {
        if let Some(charge) = self.through.try_book(bytes) {
            return Ok(charge);
        }
        let deadline = self.live.bound().map(|b| cx.now().after(b));
        let turn = cx.until(deadline, self.through.space.enter(bytes));
        match cx.waiting(turn).await? {
            Some(result) => {
                result?;
                Ok(self.through.booked(bytes))
            }
            None => {
                self.post_overflow(cx.now(), Side::None, full());
                Err(full())
            }
        }
    }
}

/// The error of a request for which there is no space.
pub(super) const fn full() -> IoError {
    IoError::new(libc::ENOSPC, Code::CacheFull)
}

/// The output of `first`, or `None` when `second` ends before it.
async fn first_of<F: Future + Unpin, G: Future + Unpin>(mut first: F, mut second: G) -> Option<F::Output> {
    std::future::poll_fn(move |cx| {
        use std::task::Poll;
        if let Poll::Ready(value) = std::pin::Pin::new(&mut first).poll(cx) {
            return Poll::Ready(Some(value));
        }
        std::pin::Pin::new(&mut second).poll(cx).map(|_| None)
    })
    .await
}
