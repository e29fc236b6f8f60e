//! File operations on the pool's threads.

use super::Pool;
use crate::error::{IoError, IoResult};
use crate::io::file::sys;
use crate::io::progress::{Progress, Step};
use crate::io::{Completion, Engine, EngineOp, FileOpKind, Notify, fill_iovecs, io_priority};
use crate::queue::EventFd;
use crate::rt::Instant;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Arc, Condvar, Mutex};
use once_cell::sync::OnceCell;
use std::cell::Cell;
use std::os::fd::RawFd;
use std::time::Duration;

/// An engine over the pool; see the module.
#[derive(Debug)]
pub struct PoolEngine {
    pool: Arc<Pool>,
    running: usize,
    done: Arc<Done>,
    /// Present when this engine stands alone.
    own: Option<Arc<Signal>>,
    /// Of the signals of the host's fd, those that have been read.
    signals_read: u64,
    timer: Option<Instant>,
    timer_id: u64,
}

/// Where threads put what has ended.
#[derive(Debug)]
struct Done {
    list: Mutex<Vec<Completion>>,
    notify: Arc<dyn Notify>,
    /// Whether the owner has been woken since it last looked.
    told: AtomicBool,
}

/// What an engine that stands alone waits on, and the eventfd of its host.
#[derive(Debug)]
struct Signal {
    woken: Mutex<bool>,
    changed: Condvar,
    host: OnceCell<EventFd>,
    armed: AtomicBool,
    /// Signals of the host's fd, those included that are about to be sent.
    signals: AtomicU64,
}

impl Signal {
    fn tell_host(&self) {
        if let Some(fd) = self.host.get() {
            // Before the write: the write wakes the host, which may run at once and this thread no more for a while. The host has to know then that
            // there is something to read, or it would be woken again and again.
            // Release: partner of the Acquire in `clear_event`.
            self.signals.fetch_add(1, Ordering::Release);
            fd.signal();
        }
    }
}

impl Notify for Signal {
    fn wake(&self) {
        *self.woken.lock() = true;
        self.changed.notify_one();
        // Acquire: partner of the Release in `arm`.
        if self.armed.load(Ordering::Acquire) {
            self.tell_host();
        }
    }
}

impl PoolEngine {
    /// An engine that stands alone.
    pub fn new(pool: &Arc<Pool>) -> Self {
        let own = Arc::new(Signal {
            woken: Mutex::new(false),
            changed: Condvar::new(),
            host: OnceCell::new(),
            armed: AtomicBool::new(true),
            signals: AtomicU64::new(0),
        });
        Self::over(pool, own.clone(), Some(own))
    }

    /// An engine beside a ring: `notify` wakes the ring, which has the event fd and the timer.
    pub fn beside(pool: &Arc<Pool>, notify: Arc<dyn Notify>) -> Self {
        Self::over(pool, notify, None)
    }

    fn over(pool: &Arc<Pool>, notify: Arc<dyn Notify>, own: Option<Arc<Signal>>) -> Self {
        let done = Done { list: Mutex::default(), notify, told: AtomicBool::new(false) };
        Self {
            pool: pool.clone(),
            running: 0,
            done: Arc::new(done),
            own,
            signals_read: 0,
            timer: None,
            timer_id: pool.timers.new_id(),
        }
    }
}

impl Done {
    fn put(&self, c: Completion) {
        self.list.lock().push(c);
        // AcqRel with the swap in `reap`: either the owner's look sees the completion, or this swap sees the flag clear.
        if !self.told.swap(true, Ordering::AcqRel) {
            self.notify.wake();
        }
    }
}

/// Carries out one operation to its end on this thread.
fn perform(e: &EngineOp) -> IoResult {
    thread_local! {
        /// Kept for the next operation.
        static IOV: Cell<Vec<libc::iovec>> = const { Cell::new(Vec::new()) };
    }
    let mut iov = IOV.take();
    let result = transfer(e, &mut iov);
    iov.clear();
    IOV.set(iov);
    result
}

fn transfer(e: &EngineOp, iov: &mut Vec<libc::iovec>) -> IoResult {
    let op = &e.op;
    let fd = op.file.raw_fd(op);
    let mut progress = Progress::NEW;
    loop {
        let result = match op.kind {
            FileOpKind::Sync => sys::fdatasync(fd),
            FileOpKind::Allocate(mode) => sys::fallocate(fd, mode, op.offset, op.len),
            FileOpKind::Read | FileOpKind::Write => {
                fill_iovecs(iov, &e.bufs, progress.done as usize);
                let at = op.offset + progress.done;
                // The buffers belong to the operation until it has ended.
                if op.kind == FileOpKind::Read {
                    sys::preadv(fd, iov, at)
                } else {
                    sys::pwritev(fd, iov, at, op.dsync)
                }
            }
        };
        match progress.step(op.kind, op.offset, op.len, op.file.offset_align(), result) {
            Step::Done => return Ok(()),
            Step::Again => {}
            // The thread is there to wait; 16 times at most.
            Step::Later => sys::sleep(Duration::from_millis(1)),
            Step::Zeros => {
                e.fill_rest(progress.done);
                return Ok(());
            }
            Step::Fail(errno) => return Err(IoError::os(errno)),
        }
    }
}

impl Engine for PoolEngine {
    fn push(&mut self, op: EngineOp) {
        self.running += 1;
        let done = self.done.clone();
        let priority = io_priority(op.class);
        let lane = Arc::as_ptr(&op.op.file).addr();
        let job = move || {
            let result = perform(&op);
            // The file and the buffers go before anybody hears of the end.
            let EngineOp { tag, op, bufs, .. } = op;
            drop((op, bufs));
            done.put(Completion { tag, result });
        };
        self.pool.run(lane, priority, Box::new(job));
    }

    fn kick(&mut self) {}

    fn reap(&mut self, out: &mut Vec<Completion>) {
        // Cleared before the look; partner of the swap in `put`. The plain look first keeps the common case free of a locked instruction.
        if !self.done.told.load(Ordering::Relaxed) || !self.done.told.swap(false, Ordering::AcqRel) {
            return;
        }
        let list = std::mem::take(&mut *self.done.list.lock());
        self.running -= list.len();
        out.extend(list);
    }

    fn wait(&mut self, timeout: Option<Duration>) {
        let Some(own) = &self.own else { return };
        let mut woken = own.woken.lock();
        if !*woken {
            woken = match timeout {
                None => own.changed.wait(woken),
                Some(t) => own.changed.wait_timeout(woken, t),
            };
        }
        *woken = false;
    }

    fn in_flight(&self) -> usize {
        self.running
    }

    fn notify(&self) -> Arc<dyn Notify> {
        self.done.notify.clone()
    }

    fn event_fd(&mut self) -> std::io::Result<RawFd> {
        match &self.own {
            Some(own) => Ok(own.host.get_or_try_init(EventFd::new)?.raw()),
            None => Err(std::io::Error::from_raw_os_error(libc::ENOTSUP)),
        }
    }

    fn clear_event(&mut self) {
        // Acquire: partner of the Release in `tell_host`. A signal that is counted and not sent yet is looked for again next time.
        if let Some(own) = &self.own
            && own.signals.load(Ordering::Acquire) != self.signals_read
            && let Some(fd) = own.host.get()
        {
            self.signals_read += fd.take();
        }
    }

    fn arm(&mut self, on: bool) -> std::io::Result<()> {
        if let Some(own) = &self.own {
            own.armed.store(on, Ordering::Release);
            if on {
                // What came while nobody was to be told.
                own.tell_host();
            }
        }
        Ok(())
    }

    fn set_timer(&mut self, at: Option<Instant>, now: Instant) {
        // As with the ring: an early timer ends in one look for nothing, so only an earlier one has to be set. One that has passed has fired.
        let (Some(at), Some(own)) = (at, &self.own) else { return };
        if own.host.get().is_none() || self.timer.is_some_and(|t| t <= at && t > now) {
            return;
        }
        let old = self.timer.replace(at);
        self.pool.timers.set(&self.pool.runtime, self.timer_id, old, at, own.clone());
    }
}

impl Drop for PoolEngine {
    /// Operations on threads go on; they own what they work on.
    fn drop(&mut self) {
        if let Some(at) = self.timer {
            self.pool.timers.remove(self.timer_id, at);
        }
    }
}
