//! Timers of one executor.

use super::exec::Exec;
use crate::rt::Instant;
use crate::sync::Arc;
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// Pending timers, earliest first. The number breaks ties.
#[derive(Debug, Default)]
pub(super) struct Timers {
    map: BTreeMap<(Instant, u64), Waker>,
    next: u64,
}

impl Timers {
    /// The earliest moment.
    pub(super) fn earliest(&self) -> Option<Instant> {
        self.map.first_key_value().map(|(k, _)| k.0)
    }

    /// Takes all timers out. To be dropped without the lock: a waker may be the last to hold its task.
    pub(super) fn take_all(&mut self) -> impl Sized + use<> {
        std::mem::take(&mut self.map)
    }

    /// Removes and returns the wakers that are due.
    pub(super) fn take_due(&mut self, now: Instant) -> Vec<Waker> {
        let mut due = Vec::new();
        while let Some(entry) = self.map.first_entry() {
            if entry.key().0 > now {
                break;
            }
            due.push(entry.remove());
        }
        due
    }
}

/// Ends at a moment; dropping it removes the timer.
#[derive(Debug)]
pub struct Sleep {
    exec: Arc<Exec>,
    at: Instant,
    key: Option<u64>,
}

impl Sleep {
    pub(super) fn new(exec: Arc<Exec>, at: Instant) -> Self {
        Self { exec, at, key: None }
    }

    fn cancel(&mut self) {
        if let Some(key) = self.key.take() {
            self.exec.timers.lock().map.remove(&(self.at, key));
        }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        if this.exec.now() >= this.at {
            this.cancel();
            return Poll::Ready(());
        }
        let mut timers = this.exec.timers.lock();
        let key = *this.key.get_or_insert_with(|| {
            timers.next += 1;
            timers.next
        });
        timers.map.insert((this.at, key), cx.waker().clone());
        drop(timers);
        // A sleep that is first polled outside a pass (block_on) must shorten a wait under way.
        this.exec.notify();
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        self.cancel();
    }
}
