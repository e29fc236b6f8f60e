//! Threads that may block.

use super::THREADS_MAX;
use crate::rt::Spawn;
use crate::sync::{Arc, Condvar, Mutex};
use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

/// A piece of work for a thread that may block.
pub type Job = Box<dyn FnOnce() + Send>;

/// The threads of one context.
pub struct Pool {
    shared: Arc<Shared>,
    spawn: Arc<dyn Spawn>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    work: Condvar,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
    stop: bool,
}

impl Pool {
    /// A pool without threads; they come with the work.
    pub fn new(spawn: Arc<dyn Spawn>) -> Arc<Self> {
        Arc::new(Self { shared: Arc::default(), spawn })
    }

    /// Runs `job` on a thread. If no thread can be started and there is none, it runs here: slow, but nothing is lost.
    pub fn run(&self, job: Job) {
        let mut s = self.shared.state.lock();
        s.jobs.push_back(job);
        if s.idle >= s.jobs.len() || s.threads >= THREADS_MAX {
            drop(s);
            self.shared.work.notify_one();
            return;
        }
        s.threads += 1;
        let name = format!("cobweb-io-{}", s.threads);
        drop(s);
        let shared = self.shared.clone();
        if self.spawn.spawn(&name, Box::new(move || shared.work())).is_err() {
            let mut s = self.shared.state.lock();
            s.threads -= 1;
            if s.threads == 0
                && let Some(job) = s.jobs.pop_back()
            {
                drop(s);
                job();
            }
        }
    }
}

impl Shared {
    fn work(&self) {
        let mut s = self.state.lock();
        loop {
            if let Some(job) = s.jobs.pop_front() {
                drop(s);
                // A job catches its own panics; if one does not, the thread goes on all the same.
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
                s = self.state.lock();
            } else if s.stop {
                s.threads -= 1;
                self.ended.notify_all();
                return;
            } else {
                s.idle += 1;
                s = self.work.wait(s);
                s.idle -= 1;
            }
        }
    }
}

impl Drop for Pool {
    /// Waits for the threads, but not for one that hangs in a system call: it keeps what it works on and ends by itself.
    fn drop(&mut self) {
        let mut s = self.shared.state.lock();
        s.stop = true;
        self.shared.work.notify_all();
        for _ in 0..20 {
            if s.threads == 0 {
                return;
            }
            s = self.shared.ended.wait_timeout(s, Duration::from_millis(100));
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = self.shared.state.lock();
        f.debug_struct("Pool").field("threads", &s.threads).field("jobs", &s.jobs.len()).finish()
    }
}
