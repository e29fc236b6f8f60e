//! Turns: which operations of a backend may run at once.
//!
//! A lane is one operation wide. A permit is handed over, in order of arrival, to the next that waits; nobody can come in
//! between. It ends when it is dropped, which the token does at completion, so an operation whose future is gone still keeps its lane.

use super::Concurrency;
use crate::error::IoResult;
use crate::queue::Cx;
use crate::sync::{Arc, Mutex};
use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// The lanes of one backend. Lock: `lanes`, a leaf; wakers are called after it.
#[derive(Debug)]
pub(super) struct Gate {
    concurrency: Concurrency,
    /// Lanes in use, by executor (one for all if serial).
    lanes: Mutex<BTreeMap<usize, Lane>>,
}

#[derive(Debug, Default)]
struct Lane {
    waiting: VecDeque<(u64, Waker)>,
    /// The one that the lane was handed to and that has not looked yet.
    handed_to: Option<u64>,
    next_ticket: u64,
}

/// The right to run one operation.
#[derive(Debug)]
pub(super) struct Permit {
    gate: Arc<Gate>,
    lane: usize,
}

impl Gate {
    pub(super) fn new(concurrency: Concurrency) -> Arc<Self> {
        Arc::new(Self { concurrency, lanes: Mutex::default() })
    }

    /// Waits for a turn; `None` if none is needed. Cancelling the request ends the wait.
    pub(super) async fn enter(self: &Arc<Self>, cx: &Cx) -> IoResult<Option<Permit>> {
        let lane = match self.concurrency {
            Concurrency::Parallel => return Ok(None),
            Concurrency::PerQueue => cx.executor_id(),
            Concurrency::Serial => 0,
        };
        let turn = Turn { gate: self.clone(), lane, ticket: None, through: false };
        cx.waiting(turn).await.map(Some)
    }

    /// Passes the lane on.
    fn leave(&self, id: usize) {
        let next = {
            let mut lanes = self.lanes.lock();
            let Some(lane) = lanes.get_mut(&id) else { return };
            match lane.waiting.pop_front() {
                Some((ticket, waker)) => {
                    lane.handed_to = Some(ticket);
                    Some(waker)
                }
                None => {
                    lanes.remove(&id);
                    None
                }
            }
        };
        if let Some(waker) = next {
            waker.wake();
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.gate.leave(self.lane);
    }
}

struct Turn {
    gate: Arc<Gate>,
    lane: usize,
    ticket: Option<u64>,
    through: bool,
}

impl Future for Turn {
    type Output = Permit;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Permit> {
        let this = self.get_mut();
        let mut lanes = this.gate.lanes.lock();
        let through = match (lanes.get_mut(&this.lane), this.ticket) {
            (None, _) => {
                lanes.insert(this.lane, Lane::default());
                true
            }
            (Some(lane), None) => {
                lane.next_ticket += 1;
                this.ticket = Some(lane.next_ticket);
                lane.waiting.push_back((lane.next_ticket, context.waker().clone()));
                false
            }
            (Some(lane), Some(mine)) if lane.handed_to == Some(mine) => {
                lane.handed_to = None;
                true
            }
            (Some(lane), Some(mine)) => {
                if let Some((_, waker)) = lane.waiting.iter_mut().find(|(ticket, _)| *ticket == mine) {
                    waker.clone_from(context.waker());
                }
                false
            }
        };
        drop(lanes);
        if !through {
            return Poll::Pending;
        }
        this.through = true;
        Poll::Ready(Permit { gate: this.gate.clone(), lane: this.lane })
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let Some(mine) = self.ticket.filter(|_| !self.through) else { return };
        let handed = {
            let mut lanes = self.gate.lanes.lock();
            let Some(lane) = lanes.get_mut(&self.lane) else { return };
            lane.waiting.retain(|(ticket, _)| *ticket != mine);
            let handed = lane.handed_to == Some(mine);
            if handed {
                lane.handed_to = None;
            }
            handed
        };
        if handed {
            self.gate.leave(self.lane);
        }
    }
}
