//! Both engines behind one: `aio` is a property of a file, and one queue can serve files of both kinds.

use super::file::Aio;
use super::pool::{Pool, PoolEngine};
use super::uring::UringEngine;
use super::{Completion, Engine, EngineOp, Notify};
use crate::rt::Instant;
use crate::sync::Arc;
use std::os::fd::RawFd;
use std::time::Duration;

/// A ring, and threads beside it. The ring is what is waited on; threads wake it.
#[derive(Debug)]
pub struct EngineSet {
    ring: UringEngine,
    threads: PoolEngine,
}

impl EngineSet {
    /// Both engines with `depth` each. Fails where io_uring is not allowed.
    pub fn new(depth: u32, pool: &Arc<Pool>) -> std::io::Result<Self> {
        let ring = UringEngine::new(depth)?;
        let threads = PoolEngine::beside(pool, ring.notify());
        Ok(Self { ring, threads })
    }
}

impl Engine for EngineSet {
    fn push(&mut self, op: EngineOp) {
        match op.op.file.aio() {
            Aio::Uring => self.ring.push(op),
            Aio::Threads => self.threads.push(op),
        }
    }

    fn kick(&mut self) {
        self.ring.kick();
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        self.ring.reap(out);
        self.threads.reap(out);
    }

    fn wait(&mut self, timeout: Option<Duration>) {
        self.ring.wait(timeout);
    }

    fn in_flight(&self) -> usize {
        self.ring.in_flight() + self.threads.in_flight()
    }

    fn notify(&self) -> Arc<dyn Notify> {
        self.ring.notify()
    }

    fn event_fd(&mut self) -> std::io::Result<RawFd> {
        self.ring.event_fd()
    }

    fn clear_event(&mut self) {
        self.ring.clear_event();
    }

    fn arm(&mut self, on: bool) -> std::io::Result<()> {
        self.ring.arm(on)
    }

    fn set_timer(&mut self, at: Option<Instant>, now: Instant) {
        self.ring.set_timer(at, now);
    }
}
