//! File operations on the pool's threads.

use super::{ENGINE_THREADS_MAX, Pool};
use crate::error::{IoError, IoResult};
use crate::io::file::sys;
use crate::io::progress::{Progress, Step};
use crate::io::{Completion, Engine, EngineOp, FileOpKind, Notify};
use crate::queue::EventFd;
use crate::rt::Instant;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Mutex};
use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::time::Duration;

/// An engine over the pool; see the module.
#[derive(Debug)]
pub struct PoolEngine {
    pool: Arc<Pool>,
    depth: usize,
    running: usize,
    backlog: VecDeque<EngineOp>,
    done: Arc<Done>,
    timer: Option<Instant>,
}

/// Where threads put what has ended.
#[derive(Debug)]
struct Done {
    list: Mutex<Vec<Completion>>,
    notify: Arc<dyn Notify>,
    /// Whether the owner has been woken since it last looked.
    told: AtomicBool,
    /// Present when this engine stands alone.
    own: Option<Arc<Signal>>,
}

/// The eventfd of an engine that stands alone: for `wait` and for the host.
#[derive(Debug)]
pub struct Signal {
    fd: EventFd,
    armed: AtomicBool,
    /// Ends `wait` also while the host does not want to be told.
    inner: EventFd,
}

impl Notify for Signal {
    fn wake(&self) {
        self.inner.signal();
        if self.armed.load(Ordering::Acquire) {
            self.fd.signal();
        }
    }
}

impl PoolEngine {
    /// An engine that stands alone.
    pub fn new(depth: u32, pool: &Arc<Pool>) -> std::io::Result<Self> {
        let own =
            Arc::new(Signal { fd: EventFd::new()?, armed: AtomicBool::new(true), inner: EventFd::new()? });
        Ok(Self::over(depth, pool, own.clone(), Some(own)))
    }

    /// An engine beside a ring: `notify` wakes the ring.
    pub fn beside(depth: u32, pool: &Arc<Pool>, notify: Arc<dyn Notify>) -> Self {
        Self::over(depth, pool, notify, None)
    }

    fn over(depth: u32, pool: &Arc<Pool>, notify: Arc<dyn Notify>, own: Option<Arc<Signal>>) -> Self {
        let done = Done { list: Mutex::default(), notify, told: AtomicBool::new(false), own };
        Self {
            pool: pool.clone(),
            depth: (depth as usize).clamp(1, ENGINE_THREADS_MAX),
            running: 0,
            backlog: VecDeque::new(),
            done: Arc::new(done),
            timer: None,
        }
    }

    fn start(&mut self, op: EngineOp) {
        self.running += 1;
        let done = self.done.clone();
        self.pool.run(Box::new(move || {
            let result = perform(&op);
            let EngineOp { tag, .. } = op;
            done.put(Completion { tag, result });
        }));
    }
}

impl Done {
    fn put(&self, c: Completion) {
        self.list.lock().push(c);
        self.tell();
    }

    fn tell(&self) {
        // AcqRel with the swap in `reap`: either the owner's look sees the completion, or this swap sees the flag clear.
        if !self.told.swap(true, Ordering::AcqRel) {
            self.notify.wake();
        }
    }
}

/// Carries out one operation to its end on this thread.
pub(in crate::io) fn perform(e: &EngineOp) -> IoResult {
    let op = &e.op;
    sys::set_io_priority(crate::io::io_priority(e.class));
    let fd = op.file.raw_fd(op);
    let mut iov = Vec::new();
    let mut progress = Progress::NEW;
    loop {
        let result = match op.kind {
            FileOpKind::Sync => sys::fdatasync(fd),
            FileOpKind::Allocate(mode) => sys::fallocate(fd, mode, op.offset, op.len),
            FileOpKind::Read | FileOpKind::Write => {
                crate::io::fill_iovecs(&mut iov, &e.bufs, progress.done as usize);
                let at = op.offset + progress.done;
                // The buffers belong to the operation until it has ended.
                if op.kind == FileOpKind::Read {
                    sys::preadv(fd, &iov, at)
                } else {
                    sys::pwritev(fd, &iov, at, op.dsync)
                }
            }
        };
        match progress.step(op.kind, op.offset, op.len, op.file.offset_align(), result) {
            Step::Done => return Ok(()),
            Step::Again(_) => {}
            Step::Zeros(done) => {
                e.bufs.slice(done as usize, e.bufs.len() - done as usize).fill(0);
                return Ok(());
            }
            Step::Fail(errno) => return Err(IoError::os(errno)),
        }
    }
}

impl Engine for PoolEngine {
    fn push(&mut self, op: EngineOp) {
        if self.running < self.depth && self.backlog.is_empty() {
            self.start(op);
        } else {
            self.backlog.push_back(op);
        }
    }

    fn kick(&mut self) {}

    fn reap(&mut self, out: &mut Vec<Completion>) {
        // Cleared before the look; partner of the swap in `tell`.
        if self.running == 0 || !self.done.told.swap(false, Ordering::AcqRel) {
            return;
        }
        let list = std::mem::take(&mut *self.done.list.lock());
        self.running -= list.len();
        out.extend(list);
        while self.running < self.depth
            && let Some(op) = self.backlog.pop_front()
        {
            self.start(op);
        }
    }

    fn wait(&mut self, timeout: Option<Duration>) {
        if let Some(own) = &self.done.own {
            sys::poll_readable(own.inner.raw(), timeout);
            own.inner.clear();
        }
    }

    fn in_flight(&self) -> usize {
        self.running + self.backlog.len()
    }

    fn notify(&self) -> Arc<dyn Notify> {
        self.done.notify.clone()
    }

    fn event_fd(&mut self) -> std::io::Result<RawFd> {
        match &self.done.own {
            Some(own) => Ok(own.fd.raw()),
            None => Err(std::io::Error::from_raw_os_error(libc::ENOTSUP)),
        }
    }

    fn clear_event(&mut self) {
        if let Some(own) = &self.done.own {
            own.fd.clear();
        }
    }

    fn arm(&mut self, on: bool) -> std::io::Result<()> {
        if let Some(own) = &self.done.own {
            own.armed.store(on, Ordering::Release);
            if on {
                own.fd.signal();
            } else {
                own.fd.clear();
            }
        }
        Ok(())
    }

    fn set_timer(&mut self, at: Option<Instant>, now: Instant) {
        let Some(at) = at else { return };
        if self.timer.is_some_and(|t| t <= at && t > now) {
            return;
        }
        self.timer = Some(at);
        // A pool thread sleeps it out. Rare: only queues whose host polls, and only for a timer that is earlier than the one under way.
        let (notify, delay) = (self.done.notify.clone(), at.since(now));
        self.pool.run(Box::new(move || {
            sys::sleep(delay.min(TIMER_MAX));
            notify.wake();
        }));
    }
}

/// A timer that lies further away wakes its queue early; the queue then sets it again.
const TIMER_MAX: Duration = Duration::from_secs(1);
