//! An environment in virtual time, for tests that are about time.
//!
//! One thread drives everything: `Env::block_on`, or the `reap` of a queue. Whenever the thread that drives would sleep until a timer,
//! the clock jumps there instead, so a test of an hour takes no time and every moment is exact. Sleeping with no timer and
//! nothing woken means that nothing can ever happen again; it panics, so a lost wake-up fails the test instead of hanging it.
//! There are no workers (`Env::start` is not called), hence no watchdog, and no files: a file operation ends with ENOSYS.

use super::{EngineFactory, Env, LogSink};
use crate::error::{IoError, Result};
use crate::io::pool::LaneId;
use crate::io::{Completion, Engine, EngineOp, Notify};
use crate::rt::real::{SplitMix, Threads};
use crate::rt::{Clock, Instant, Runtime};
use crate::sync::Arc;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::os::fd::RawFd;
use std::time::Duration;

/// A clock that moves only when told to.
#[derive(Debug, Default)]
pub struct VirtualClock(AtomicU64);

impl VirtualClock {
    /// Moves the clock forward.
    pub fn advance(&self, d: Duration) {
        self.0.fetch_add(u64::try_from(d.as_nanos()).expect("a time that a test can mean"), SeqCst);
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> Instant {
        Instant(self.0.load(SeqCst))
    }

    fn wall_ns(&self) -> u64 {
        self.0.load(SeqCst)
    }
}

/// An environment without workers whose time is the returned clock, starting at 0, and whose random numbers come from `seed`.
pub fn virtual_env(seed: u64) -> (Arc<Env>, Arc<VirtualClock>) {
    virtual_env_with_log(seed, None)
}

/// The same, with a place for the lines of its log.
pub fn virtual_env_with_log(seed: u64, log: Option<LogSink>) -> (Arc<Env>, Arc<VirtualClock>) {
    let clock = Arc::new(VirtualClock::default());
    let runtime =
        Runtime { clock: clock.clone(), rng: Arc::new(SplitMix::new(seed)), spawn: Arc::new(Threads) };
    let env = Env::new(runtime, Arc::new(VirtualEngines(clock.clone())), log);
    (env, clock)
}

#[derive(Debug)]
struct VirtualEngines(Arc<VirtualClock>);

impl EngineFactory for VirtualEngines {
    fn open(&self, _depth: u32) -> Result<Box<dyn Engine>> {
        Ok(Box::new(VirtualEngine { clock: self.0.clone(), woken: Arc::default(), done: Vec::new() }))
    }

    fn run_blocking(&self, _lane: LaneId, job: Box<dyn FnOnce() + Send>) {
        job();
    }
}

#[derive(Debug)]
struct VirtualEngine {
    clock: Arc<VirtualClock>,
    woken: Arc<Woken>,
    done: Vec<Completion>,
}

#[derive(Debug, Default)]
struct Woken(AtomicBool);

impl Notify for Woken {
    fn wake(&self) {
        self.0.store(true, SeqCst);
    }
}

impl Engine for VirtualEngine {
    fn push(&mut self, op: EngineOp) {
        self.done.push(Completion { tag: op.tag, result: Err(IoError::os(libc::ENOSYS)) });
    }

    fn kick(&mut self) {}

    fn reap(&mut self, out: &mut Vec<Completion>) {
        out.append(&mut self.done);
    }

    fn wait(&mut self, timeout: Option<Duration>) {
        if self.woken.0.swap(false, SeqCst) || !self.done.is_empty() {
            return;
        }
        let until = timeout.expect("waiting without a timer in virtual time: nothing can ever happen again");
        self.clock.advance(until);
    }

    fn in_flight(&self) -> usize {
        self.done.len()
    }

    fn notify(&self) -> Arc<dyn Notify> {
        self.woken.clone()
    }

    fn event_fd(&mut self) -> std::io::Result<RawFd> {
        Err(std::io::Error::from_raw_os_error(libc::ENOTSUP))
    }

    fn clear_event(&mut self) {}

    fn arm(&mut self, _on: bool) -> std::io::Result<()> {
        Ok(())
    }

    fn set_timer(&mut self, _at: Option<Instant>, _now: Instant) {}
}
