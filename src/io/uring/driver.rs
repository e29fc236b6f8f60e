//! The engine over a ring: backlog, event fd, timer.

use super::ring::{Ring, Slot, Taken};
use crate::io::{Completion, Engine, EngineOp, Notify};
use crate::limits::QUEUE_DEPTH_MAX;
use crate::queue::EventFd;
use crate::rt::Instant;
use crate::sync::Arc;
use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::time::Duration;

/// An engine over one ring; see the module.
#[derive(Debug)]
pub struct UringEngine {
    /// Taken out by Drop only.
    pub(super) ring: Option<Ring>,
    depth: usize,
    pub(super) backlog: VecDeque<Slot>,
    host: Option<HostEvent>,
    /// Whether the host wants to be signalled; also before it has asked for the fd.
    armed: bool,
    /// When the timer in the kernel fires, if there is one.
    timer: Option<Instant>,
}

/// The eventfd that a host polls.
#[derive(Debug)]
struct HostEvent {
    fd: EventFd,
    /// Something has been taken from the ring, or signalled by us, since the fd was last read: it may be readable.
    signalled: bool,
    /// Reads skipped since the last one.
    skipped: u32,
}

/// Reads of the host's eventfd that may be skipped in a row, see [`Engine::clear_event`].
const SKIPS_MAX: u32 = 64;

impl UringEngine {
    /// An engine for `depth` operations (1 to 4096). Fails where io_uring is not allowed.
    pub fn new(depth: u32) -> std::io::Result<Self> {
        let depth = depth.clamp(1, QUEUE_DEPTH_MAX);
        Ok(Self {
            ring: Some(Ring::new(depth)?),
            depth: depth as usize,
            backlog: VecDeque::new(),
            host: None,
            armed: true,
            timer: None,
        })
    }

    fn ring(&mut self) -> &mut Ring {
        self.ring.as_mut().expect("taken by Drop only")
    }

    fn submit(&mut self) {
        if !self.ring().submit()
            && let Some(host) = &mut self.host
        {
            // The kernel is short of something. Whoever polls the fd is not to sleep over what is left.
            host.signal();
        }
    }
}

impl HostEvent {
    fn signal(&mut self) {
        self.signalled = true;
        self.fd.signal();
    }
}

impl Engine for UringEngine {
    fn push(&mut self, op: EngineOp) {
        let room = self.ring().in_kernel() < self.depth;
        if room && self.backlog.is_empty() {
            self.ring().start(Slot::new(op));
        } else {
            self.backlog.push_back(Slot::new(op));
        }
    }

    fn kick(&mut self) {
        self.ring().arm_wake();
        self.submit();
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        let mut any = false;
        let ring = self.ring.as_mut().expect("taken by Drop only");
        while let Some(taken) = ring.take() {
            any = true;
            match taken {
                Taken::End(completion) => out.push(completion),
                // Behind everything that waits, so that others make progress first.
                Taken::Later(slot) => self.backlog.push_back(slot),
                Taken::Timer => self.timer = None,
                Taken::Nothing => {}
            }
        }
        while ring.in_kernel() < self.depth
            && let Some(slot) = self.backlog.pop_front()
        {
            ring.start(slot);
        }
        if any && let Some(host) = &mut self.host {
            host.signalled = true;
        }
    }

    fn wait(&mut self, timeout: Option<Duration>) {
        self.ring().arm_wake();
        self.ring().submit_and_wait(timeout);
    }

    fn in_flight(&self) -> usize {
        self.ring.as_ref().map_or(0, Ring::in_kernel) + self.backlog.len()
    }

    fn notify(&self) -> Arc<dyn Notify> {
        self.ring.as_ref().expect("taken by Drop only").notify()
    }

    fn event_fd(&mut self) -> std::io::Result<RawFd> {
        if self.host.is_none() {
            let fd = EventFd::new()?;
            self.ring().register_event(fd.raw())?;
            self.host = Some(HostEvent { fd, signalled: false, skipped: 0 });
            self.arm(self.armed)?;
        }
        Ok(self.host.as_ref().map_or(-1, |h| h.fd.raw()))
    }

    fn clear_event(&mut self) {
        // The kernel signals the fd after it has published a completion, and only then. So as long as none has been taken since the fd was last
        // read, and none is there, the fd is not readable and reading it would be a system call for nothing (C6). One case escapes: the
        // kernel is slow to signal, the completion has been taken and the fd read before it does. The host is then woken
        // for nothing a few times, until the fd is read all the same.
        let empty = self.ring().is_empty();
        let Some(host) = &mut self.host else { return };
        host.skipped += 1;
        if host.signalled || !empty || host.skipped > SKIPS_MAX {
            // If a signal was due but not there it is still to come: read again next time.
            host.signalled = !host.fd.clear() && host.signalled;
            host.skipped = 0;
        }
    }

    fn arm(&mut self, on: bool) -> std::io::Result<()> {
        self.armed = on;
        if self.host.is_none() {
            return Ok(());
        }
        self.ring().enable_event(on);
        if on {
            // What came while nobody was to be told: a wake whose counter nobody reads, or completions in the ring.
            self.kick();
            // The flag is on before the look, as the kernel publishes before it looks at the flag.
            crate::sync::atomic::fence(crate::sync::atomic::Ordering::SeqCst);
            let missed = !self.ring().is_empty();
            if missed && let Some(host) = &mut self.host {
                host.signal();
            }
        }
        Ok(())
    }

    fn set_timer(&mut self, at: Option<Instant>, now: Instant) {
        // A timer that turns out to be early ends in one look for nothing, so only an earlier one has to be set. Without a host fd `wait` has the timeout.
        let Some(at) = at else { return };
        if self.host.is_none() || self.timer.is_some_and(|t| t <= at) {
            return;
        }
        let running = self.timer.replace(at).is_some();
        self.ring().set_timer(at.since(now), running);
        // At once: the host goes to sleep next, and the kernel reads the time when it takes the entry.
        self.submit();
    }
}
