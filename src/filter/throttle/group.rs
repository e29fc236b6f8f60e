//! A throttle group: one budget, shared by the nodes that are its members.
//!
//! Each direction (reads; writes, zeroes and discards) has a queue of waiting requests per member. The *head* of a direction is the first
//! waiter of the member that has used least of the budget; only heads are let through, so a member's requests go in order (FIFO)
//! and members that want more than the budget get equal shares of it, measured in time at the limits and not in
//! requests. A member that was idle starts level with the others: it neither saves up nor owes.
//!
//! Where both directions could go and share a limit they take turns. So every waiter becomes the head after finitely many
//! others, and nothing starves.
//!
//! There is no thread behind it. Whoever comes (a request, a timer, a change of the limits) lets through what may go
//! ([`State::dispatch`]); a waiter that is a head keeps a timer for the moment at which it may. A head that is given up wakes the
//! next. What waits is only a future: no engine slot, no in-flight entry.
//!
//! Lock: `state`, a leaf, held for a walk over the members; wakers are called after it.

use super::config::{Scope, ThrottleLimits};
use crate::error::IoResult;
use crate::queue::{Cx, Sleep};
use crate::rate::{Bucket, NANO, NanoUnits};
use crate::rt::{Clock, Instant};
use crate::sync::atomic::{AtomicBool, Ordering::Relaxed};
use crate::sync::{Arc, Mutex};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// Which budget a request comes out of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Reads.
    Read = 0,
    /// Everything that changes data.
    Write = 1,
}

/// A shared budget. All methods may be called from any thread and never block.
#[derive(Debug)]
pub struct Group {
    name: String,
    clock: Arc<dyn Clock>,
    /// Whether a direction is limited; a look at it spares the lock. Relaxed: a request that races with a change of the limits
    /// may go by either.
    limited: [AtomicBool; 2],
    state: Mutex<State>,
}

/// A node's membership; ends when it is dropped (its waiters hold it).
#[derive(Debug)]
pub struct Member {
    group: Arc<Group>,
    id: u64,
}

#[derive(Debug)]
struct State {
    limits: ThrottleLimits,
    /// By [`Scope`].
    bps: [Bucket; 3],
    iops: [Bucket; 3],
    directions: [Queues; 2],
    /// The direction that went last.
    last: usize,
    next_id: u64,
}

/// The waiters of one direction.
#[derive(Debug, Default)]
struct Queues {
    members: BTreeMap<u64, MemberQueue>,
    /// Budget that the member had used which was let through last: where a member that was idle joins.
    level: u128,
    /// The head that has been told to keep the timer.
    timed: Option<u64>,
}

#[derive(Debug, Default)]
struct MemberQueue {
    /// Nanoseconds of the budget, at the limits when they were used.
    used: u128,
    /// By ticket, so in order of arrival.
    waiting: BTreeMap<u64, Waiter>,
}

#[derive(Debug)]
struct Waiter {
    bytes: u64,
    waker: Waker,
}

impl Direction {
    const fn scope(self) -> Scope {
        match self {
            Direction::Read => Scope::Read,
            Direction::Write => Scope::Write,
        }
    }
}

impl Group {
    /// A group with these limits.
    pub fn new(name: impl Into<String>, limits: ThrottleLimits, clock: Arc<dyn Clock>) -> Arc<Self> {
        let now = clock.now();
        let buckets = || [(); 3].map(|()| Bucket::new(crate::rate::Rate::UNLIMITED, now));
        let group = Self {
            name: name.into(),
            clock,
            limited: Default::default(),
            state: Mutex::new(State {
                limits: ThrottleLimits::default(),
                bps: buckets(),
                iops: buckets(),
                directions: Default::default(),
                last: 0,
                next_id: 0,
            }),
        };
        group.set_limits(limits);
        Arc::new(group)
    }

    /// The group's name; empty for the private group of one node.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The limits now.
    pub fn limits(&self) -> ThrottleLimits {
        self.state.lock().limits
    }

    /// Changes the limits; takes effect for the requests that wait, too.
    pub fn set_limits(&self, limits: ThrottleLimits) {
        self.change(|_| Ok(limits)).expect("nothing to refuse");
    }

    /// Changes one limit; `key` is one of [`super::KEYS`].
    pub fn set(&self, key: &str, value: &str) -> crate::error::Result<()> {
        self.change(|limits| limits.with(key, value))
    }

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        let state = self.state.lock();
        state.directions.iter().flat_map(|d| d.members.values()).map(|m| m.waiting.len()).sum()
    }

    /// Nodes that share the budget.
    pub fn members(&self) -> usize {
        self.state.lock().directions[0].members.len()
    }

    /// A new member.
    pub fn join(self: &Arc<Self>) -> Arc<Member> {
        let mut state = self.state.lock();
        let id = state.next_id();
        for queues in &mut state.directions {
            let used = queues.level;
            queues.members.insert(id, MemberQueue { used, waiting: BTreeMap::new() });
        }
        Arc::new(Member { group: self.clone(), id })
    }

    fn change(
        &self,
        new: impl FnOnce(ThrottleLimits) -> crate::error::Result<ThrottleLimits>,
    ) -> crate::error::Result<()> {
        let now = self.clock.now();
        let mut wake = Vec::new();
        {
            let mut state = self.state.lock();
            let limits = new(state.limits)?;
            state.limits = limits;
            for scope in [Scope::Total, Scope::Read, Scope::Write] {
                state.bps[scope as usize].set_rate(limits.bps(scope), now);
                state.iops[scope as usize].set_rate(limits.iops(scope), now);
            }
            for direction in [Direction::Read, Direction::Write] {
                self.limited[direction as usize].store(limits.limits(direction.scope()), Relaxed);
                // The timers of the heads are for other limits.
                state.directions[direction as usize].timed = None;
            }
            state.dispatch(now, None, &mut wake);
        }
        wake.into_iter().for_each(Waker::wake);
        Ok(())
    }
}

impl Member {
    /// The group.
    pub fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// Whether requests of this direction are limited at all.
    pub fn is_limited(&self, direction: Direction) -> bool {
        self.group.limited[direction as usize].load(Relaxed)
    }

    /// Lets a request through now if it need not wait for budget or behind another.
    pub fn try_admit(&self, direction: Direction, bytes: u64) -> bool {
        let now = self.group.clock.now();
        let mut state = self.group.state.lock();
        // A head of the other direction that may go, too, has its turn first: see `dispatch`.
        let free = state.directions[direction as usize].head().is_none()
            && state.wait(direction, now).is_zero()
            && state.next_to_go(now).is_none();
        if free {
            state.admit(self.id, direction, bytes);
        }
        free
    }

    /// Takes back a request that was let through and did not start.
    pub fn give_back(&self, direction: Direction, bytes: u64) {
        let now = self.group.clock.now();
        let mut wake = Vec::new();
        {
            let mut state = self.group.state.lock();
            state.charge(direction, bytes, |bucket, cost| bucket.give_back(cost));
            let used = state.time_of(direction, bytes);
            if let Some(me) = state.directions[direction as usize].members.get_mut(&self.id) {
                me.used = me.used.saturating_sub(used);
            }
            for queues in &mut state.directions {
                queues.timed = None;
            }
            state.dispatch(now, None, &mut wake);
        }
        wake.into_iter().for_each(Waker::wake);
    }

    /// Waits until the request may start. Cancelling the request ends the wait with ECANCELED.
    pub async fn admit(self: &Arc<Self>, cx: &Cx, direction: Direction, bytes: u64) -> IoResult {
        let (member, cx) = (self.clone(), cx.clone());
        let admission =
            Admission { member, cx: cx.clone(), direction, bytes, stage: Stage::New, timer: None };
        // The head's timer may be on a queue that its host has left alone: others wait for it, so the watchdog must know.
        cx.waiting(admission).await
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        for queues in &mut self.group.state.lock().directions {
            queues.members.remove(&self.id);
        }
    }
}

/// A request that waits for the budget.
struct Admission {
    member: Arc<Member>,
    cx: Cx,
    direction: Direction,
    bytes: u64,
    stage: Stage,
    /// Kept while the request is a head.
    timer: Option<Sleep>,
}

#[derive(Clone, Copy)]
enum Stage {
    New,
    /// In the queue, or let through since the last poll.
    Waiting(u64),
    Through,
}

impl Future for Admission {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        let now = this.cx.now();
        let mut wake = Vec::new();
        let head_wait = {
            let mut state = this.member.group.state.lock();
            let ticket = match this.stage {
                Stage::Through => return Poll::Ready(()),
                Stage::New => state.enqueue(this.member.id, this.direction, this.bytes, context.waker()),
                Stage::Waiting(ticket) => ticket,
            };
            this.stage = Stage::Waiting(ticket);
            if let Some(waiter) = state.waiter(this.member.id, this.direction, ticket) {
                waiter.waker.clone_from(context.waker());
                state.dispatch(now, Some(ticket), &mut wake);
            }
            if state.waiter(this.member.id, this.direction, ticket).is_none() {
                this.stage = Stage::Through;
                None
            } else if state.directions[this.direction as usize].head() == Some((this.member.id, ticket)) {
                state.directions[this.direction as usize].timed = Some(ticket);
                Some(state.wait(this.direction, now))
            } else {
                None
            }
        };
        wake.into_iter().for_each(Waker::wake);
        if matches!(this.stage, Stage::Through) {
            this.timer = None;
            return Poll::Ready(());
        }
        this.timer = head_wait.map(|wait| this.cx.sleep_until(now.after(wait)));
        if let Some(timer) = &mut this.timer
            && Pin::new(timer).poll(context).is_ready()
        {
            // The moment came while the timer was being set.
            context.waker().wake_by_ref();
        }
        Poll::Pending
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        let Stage::Waiting(ticket) = self.stage else { return };
        let mut wake = Vec::new();
        let was_waiting = {
            let now = self.cx.now();
            let mut state = self.member.group.state.lock();
            let was_waiting = state.remove(self.member.id, self.direction, ticket);
            state.dispatch(now, None, &mut wake);
            was_waiting
        };
        wake.into_iter().for_each(Waker::wake);
        if !was_waiting {
            // Let through, but the request was given up before it saw that.
            self.member.give_back(self.direction, self.bytes);
        }
    }
}

impl State {
    fn next_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn enqueue(&mut self, member: u64, direction: Direction, bytes: u64, waker: &Waker) -> u64 {
        let ticket = self.next_id();
        let queues = &mut self.directions[direction as usize];
        let queue = queues.members.entry(member).or_default();
        if queue.waiting.is_empty() {
            queue.used = queue.used.max(queues.level);
        }
        queue.waiting.insert(ticket, Waiter { bytes, waker: waker.clone() });
        ticket
    }

    fn waiter(&mut self, member: u64, direction: Direction, ticket: u64) -> Option<&mut Waiter> {
        self.directions[direction as usize].members.get_mut(&member)?.waiting.get_mut(&ticket)
    }

    fn remove(&mut self, member: u64, direction: Direction, ticket: u64) -> bool {
        let queue = self.directions[direction as usize].members.get_mut(&member);
        queue.is_some_and(|q| q.waiting.remove(&ticket).is_some())
    }

    /// Lets through every head that may go, and wakes the heads that have to set a timer. `me` is the caller's own ticket, which needs no waking.
    fn dispatch(&mut self, now: Instant, me: Option<u64>, wake: &mut Vec<Waker>) {
        while let Some((direction, member, ticket)) = self.next_to_go(now) {
            let queue = self.directions[direction as usize].members.get_mut(&member);
            let Some(waiter) = queue.and_then(|q| q.waiting.remove(&ticket)) else { return };
            self.admit(member, direction, waiter.bytes);
            if me != Some(ticket) {
                wake.push(waiter.waker);
            }
        }
        for direction in [Direction::Read, Direction::Write] {
            let queues = &self.directions[direction as usize];
            let Some((member, ticket)) = queues.head() else { continue };
            if queues.timed != Some(ticket) && me != Some(ticket) {
                wake.extend(self.waiter(member, direction, ticket).map(|w| w.waker.clone()));
            }
        }
    }

    /// A head that may go now, the direction whose turn it is first.
    fn next_to_go(&mut self, now: Instant) -> Option<(Direction, u64, u64)> {
        let order = match self.last {
            0 => [Direction::Write, Direction::Read],
            _ => [Direction::Read, Direction::Write],
        };
        order.into_iter().find_map(|direction| {
            let (member, ticket) = self.directions[direction as usize].head()?;
            self.wait(direction, now).is_zero().then_some((direction, member, ticket))
        })
    }

    /// Time until a request of this direction may start.
    fn wait(&mut self, direction: Direction, now: Instant) -> Duration {
        let scopes = [Scope::Total as usize, direction.scope() as usize];
        let waits = scopes.map(|s| self.bps[s].wait(now).max(self.iops[s].wait(now)));
        waits[0].max(waits[1])
    }

    fn admit(&mut self, member: u64, direction: Direction, bytes: u64) {
        self.charge(direction, bytes, Bucket::take);
        let time = self.time_of(direction, bytes);
        let queues = &mut self.directions[direction as usize];
        let queue = queues.members.entry(member).or_default();
        queues.level = queues.level.max(queue.used);
        queue.used = queues.level + time;
        self.last = direction as usize;
    }

    fn charge(&mut self, direction: Direction, bytes: u64, charge: impl Fn(&mut Bucket, NanoUnits)) {
        let (bytes, operations) = self.cost(bytes);
        for scope in [Scope::Total as usize, direction.scope() as usize] {
            charge(&mut self.bps[scope], bytes);
            charge(&mut self.iops[scope], operations);
        }
    }

    /// Nanoseconds of the budget that a request uses: at the limit that it weighs on most.
    fn time_of(&self, direction: Direction, bytes: u64) -> u128 {
        let (bytes, operations) = self.cost(bytes);
        [Scope::Total as usize, direction.scope() as usize]
            .map(|s| {
                self.bps[s].rate().time_of(bytes).max(self.iops[s].rate().time_of(operations)).as_nanos()
            })
            .into_iter()
            .fold(0, u128::max)
    }

    /// Bytes and operations that a request counts as.
    fn cost(&self, bytes: u64) -> (NanoUnits, NanoUnits) {
        let bytes = NanoUnits::from(bytes);
        let operations = match self.limits.iops_size {
            0 => NANO,
            size => (bytes * NANO / NanoUnits::from(size)).max(NANO),
        };
        (bytes * NANO, operations)
    }
}

impl Queues {
    /// Member and ticket of the waiter that goes next.
    fn head(&self) -> Option<(u64, u64)> {
        self.members
            .iter()
            .filter_map(|(id, m)| m.waiting.first_key_value().map(|(ticket, _)| (m.used, *ticket, *id)))
            .min()
            .map(|(_, ticket, id)| (id, ticket))
    }
}
