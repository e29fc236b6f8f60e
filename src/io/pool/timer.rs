//! Wakes the queues of hosts that poll an eventfd, at the moment each has asked for.

use crate::io::Notify;
use crate::rt::{Instant, Join, Runtime};
use crate::sync::{Arc, Condvar, Mutex};
use std::collections::BTreeMap;

/// The timers of a pool. The thread is started with the first timer, and waits without a limit while there is none.
#[derive(Default)]
pub(super) struct Timers {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// At most one per engine; the number tells engines apart.
    map: BTreeMap<(Instant, u64), Arc<dyn Notify>>,
    next_id: u64,
    thread: Option<Box<dyn Join>>,
    running: bool,
    stop: bool,
}

impl Timers {
    /// A number for a new engine.
    pub(super) fn new_id(&self) -> u64 {
        let mut s = self.state.lock();
        s.next_id += 1;
        s.next_id
    }

    /// Wakes `notify` at `at`; the engine's former timer (`old`), if it has not fired, is gone. If no thread can be started it is woken at once: it will look
    /// for nothing and try again, which is slow, but late timers are worse.
    pub(super) fn set(
        self: &Arc<Self>,
        runtime: &Runtime,
        id: u64,
        old: Option<Instant>,
        at: Instant,
        notify: Arc<dyn Notify>,
    ) {
        let mut s = self.state.lock();
        if let Some(old) = old {
            s.map.remove(&(old, id));
        }
        if !s.running {
            let (me, clock) = (self.clone(), runtime.clock.clone());
            match runtime.spawn.spawn("cobweb-timer", Box::new(move || me.run(&*clock))) {
                Ok(thread) => (s.running, s.thread) = (true, Some(thread)),
                Err(_) => {
                    drop(s);
                    return notify.wake();
                }
            }
        }
        s.map.insert((at, id), notify);
        if s.map.first_key_value().is_some_and(|(first, _)| *first == (at, id)) {
            self.changed.notify_one();
        }
    }

    /// Forgets an engine's timer.
    pub(super) fn remove(&self, id: u64, at: Instant) {
        self.state.lock().map.remove(&(at, id));
    }

    /// Ends the thread.
    pub(super) fn stop(&self) {
        let thread = {
            let mut s = self.state.lock();
            s.stop = true;
            s.thread.take()
        };
        self.changed.notify_one();
        if let Some(thread) = thread {
            thread.join();
        }
    }

    fn run(&self, clock: &dyn crate::rt::Clock) {
        let mut s = self.state.lock();
        while !s.stop {
            let Some(at) = s.map.first_key_value().map(|(key, _)| key.0) else {
                s = self.changed.wait(s);
                continue;
            };
            let left = at.since(clock.now());
            if !left.is_zero() {
                s = self.changed.wait_timeout(s, left);
                continue;
            }
            if let Some((_, notify)) = s.map.pop_first() {
                // Woken without the lock: a wake is a system call.
                drop(s);
                notify.wake();
                s = self.state.lock();
            }
        }
    }
}

impl std::fmt::Debug for Timers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Timers").field("pending", &self.state.lock().map.len()).finish()
    }
}
