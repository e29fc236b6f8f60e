//! What the kernel may touch, and the ring itself: the one place that hands memory to the kernel through io_uring.

use super::op;
use crate::error::IoError;
use crate::io::progress::{Progress, Step};
use crate::io::{Completion, EngineOp, Notify};
use crate::queue::EventFd;
use crate::sync::Arc;
use io_uring::types::{CancelBuilder, Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};
use slab::Slab;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

/// An operation on its way.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) op: EngineOp,
    /// Used by operations of several segments only.
    pub(super) iov: Vec<libc::iovec>,
    pub(super) progress: Progress,
}

// SAFETY: the iovecs point into memory that the slot's own buffers keep alive or that is pinned by contract; no thread is special.
unsafe impl Send for Slot {}

impl Slot {
    pub(super) fn new(op: EngineOp) -> Self {
        Self { op, iov: Vec::new(), progress: Progress::NEW }
    }
}

/// What came out of the ring.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "it lives for a match")]
pub(super) enum Taken {
    /// An operation has ended.
    End(Completion),
    /// An operation that the kernel cannot do now; it is out of the ring and to be started again.
    Later(Slot),
    /// The timer has fired.
    Timer,
    /// A wake, or something that concerns nobody.
    Nothing,
}

/// A ring with the memory that is in use by it.
pub(super) struct Ring {
    // Dropped by `release` only.
    ring: ManuallyDrop<IoUring>,
    memory: ManuallyDrop<Memory>,
    /// Entries that the kernel has not taken yet.
    pushed: usize,
    wake: Arc<Wake>,
    /// What tests put in the place of the kernel's results.
    #[cfg(test)]
    pub(super) results: std::collections::VecDeque<i32>,
}

struct Memory {
    slots: Slab<Slot>,
    /// Where the ring reads the wake counter to, and the eventfd it reads from.
    wake_counter: Box<u64>,
    wake_fd: Arc<Wake>,
    wake_armed: bool,
    /// Read by the kernel when it takes a timer's entry.
    timer: Box<Timespec>,
}

/// The eventfd that other threads write.
#[derive(Debug)]
struct Wake(EventFd);

impl Notify for Wake {
    fn wake(&self) {
        self.0.signal();
    }
}

const WAKE: u64 = u64::MAX;
const TIMER: u64 = u64::MAX - 1;
const IGNORE: u64 = u64::MAX - 2;
/// Entries beside those of operations: the wake read, a timer, a change of the timer, a cancel.
const OTHERS: u32 = 4;

impl Ring {
    /// A ring with room for `depth` operations.
    pub(super) fn new(depth: u32) -> std::io::Result<Self> {
        let ring = IoUring::builder().build((depth + OTHERS).next_power_of_two())?;
        // Not non-blocking: the ring would answer EAGAIN instead of waiting for the counter.
        let wake = Arc::new(Wake(EventFd::blocking()?));
        let memory = Memory {
            slots: Slab::with_capacity(depth as usize),
            wake_counter: Box::new(0),
            wake_fd: wake.clone(),
            wake_armed: false,
            timer: Box::new(Timespec::new()),
        };
        Ok(Self {
            ring: ManuallyDrop::new(ring),
            memory: ManuallyDrop::new(memory),
            pushed: 0,
            wake,
            #[cfg(test)]
            results: Default::default(),
        })
    }

    pub(super) fn notify(&self) -> Arc<dyn Notify> {
        self.wake.clone()
    }

    /// Operations in the kernel, or in the submission queue.
    pub(super) fn in_kernel(&self) -> usize {
        self.memory.slots.len()
    }

    /// Whether the kernel may still write to memory of this ring.
    pub(super) fn is_busy(&self) -> bool {
        self.memory.wake_armed || !self.memory.slots.is_empty()
    }

    /// Puts an operation into the submission queue.
    pub(super) fn start(&mut self, slot: Slot) {
        let index = self.memory.slots.insert(slot);
        self.enqueue(index);
    }

    /// Puts what is left of a slot's operation into the submission queue.
    fn enqueue(&mut self, index: usize) {
        let entry = op::entry(&mut self.memory.slots[index]).user_data(index as u64);
        self.push(&entry);
    }

    /// Makes sure that a wake ends the next wait.
    pub(super) fn arm_wake(&mut self) {
        if self.memory.wake_armed {
            return;
        }
        self.memory.wake_armed = true;
        let counter: *mut u64 = &raw mut *self.memory.wake_counter;
        let fd = Fd(self.memory.wake_fd.0.raw());
        self.push(&opcode::Read::new(fd, counter.cast(), 8).build().user_data(WAKE));
    }

    /// Sets the timer, or moves it if there is one (`running`). To be handed over before it is called again.
    pub(super) fn set_timer(&mut self, after: Duration, running: bool) {
        *self.memory.timer = Timespec::from(after);
        let time: *const Timespec = &raw const *self.memory.timer;
        if running {
            self.push(&opcode::TimeoutUpdate::new(TIMER, time).build().user_data(IGNORE));
        } else {
            self.push(&opcode::Timeout::new(time).build().user_data(TIMER));
        }
    }

    fn push(&mut self, entry: &squeue::Entry) {
        // There is room for all that can be under way; it is missing only while the kernel refuses to take entries (EAGAIN under memory
        // pressure) and the timer is changed again and again meanwhile.
        // SAFETY: what the entry points to belongs to `memory`, which lives until its completion has been taken, or for ever (`release`).
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            let _ = self.ring.submit();
        }
        self.pushed += 1;
    }

    /// Hands over what has been pushed. Returns whether the kernel has taken all of it.
    pub(super) fn submit(&mut self) -> bool {
        while self.pushed > 0 {
            // EAGAIN, EBUSY and EINTR leave entries in the queue; they go with the next call.
            let taken = self.ring.submit().unwrap_or(0);
            self.pushed = self.ring.submission().len();
            if taken == 0 {
                break;
            }
        }
        self.pushed == 0
    }

    /// Hands over and waits for a completion, all in one system call.
    pub(super) fn submit_and_wait(&mut self, timeout: Option<Duration>) {
        // ETIME, EINTR, EAGAIN and EBUSY all mean: look again.
        let _ = match timeout {
            None => self.ring.submit_and_wait(1),
            Some(t) => {
                let spec = Timespec::from(t);
                self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&spec))
            }
        };
        self.pushed = self.ring.submission().len();
    }

    /// Whether no completion waits to be taken.
    pub(super) fn is_empty(&mut self) -> bool {
        self.ring.completion().is_empty()
    }

    /// Takes the next completion, if there is one; no system call.
    pub(super) fn take(&mut self) -> Option<Taken> {
        let cqe = self.ring.completion().next()?;
        Some(match cqe.user_data() {
            WAKE => {
                self.memory.wake_armed = false;
                Taken::Nothing
            }
            TIMER => Taken::Timer,
            IGNORE => Taken::Nothing,
            index => self.step(index as usize, cqe.result()),
        })
    }

    /// Takes the next completion when the ring is going away: an operation ends, whatever its result. Returns false if there is none.
    pub(super) fn take_and_end(&mut self) -> bool {
        let next = self.ring.completion().next();
        let Some(cqe) = next else { return false };
        match cqe.user_data() {
            WAKE => self.memory.wake_armed = false,
            TIMER | IGNORE => {}
            index => drop(self.memory.slots.try_remove(index as usize)),
        }
        true
    }

    fn step(&mut self, index: usize, result: i32) -> Taken {
        #[cfg(test)]
        let result = self.results.pop_front().unwrap_or(result);
        let slot = &mut self.memory.slots[index];
        let op = &slot.op.op;
        let align = op.file.offset_align();
        let result = match slot.progress.step(op.kind, op.offset, op.len, align, i64::from(result)) {
            Step::Again => {
                self.enqueue(index);
                return Taken::Nothing;
            }
            Step::Later => return Taken::Later(self.memory.slots.remove(index)),
            Step::Done => Ok(()),
            Step::Zeros => {
                slot.op.fill_rest(slot.progress.done);
                Ok(())
            }
            Step::Fail(errno) => Err(IoError::os(errno)),
        };
        let slot = self.memory.slots.remove(index);
        Taken::End(Completion { tag: slot.op.tag, result })
    }

    /// Has the kernel signal `fd` for each completion.
    pub(super) fn register_event(&self, fd: RawFd) -> std::io::Result<()> {
        self.ring.submitter().register_eventfd(fd)
    }

    /// Switches the registered signal on or off, without a system call.
    pub(super) fn enable_event(&mut self, on: bool) {
        let completions = self.ring.completion();
        if on {
            completions.enable_eventfd();
        } else {
            completions.disable_eventfd();
        }
    }

    /// Cancels everything in flight and waits at most `limit` for the kernel to have done so.
    pub(super) fn cancel_all(&mut self, limit: Duration) {
        let any = || CancelBuilder::any();
        if self.ring.submitter().register_sync_cancel(Some(Timespec::from(limit)), any()).is_err() {
            // Before Linux 6.0: an entry like any other. (ENOENT, nothing to cancel, comes here too and costs nothing.)
            self.push(&opcode::AsyncCancel2::new(any()).build().user_data(IGNORE));
            self.submit();
        }
    }

    /// Closes the ring. What the kernel may still write to is leaked rather than freed.
    pub(super) fn release(mut self) {
        let busy = self.is_busy();
        // SAFETY: both are dropped here only; `self` is gone after this call, and it has no Drop that could use them.
        unsafe {
            ManuallyDrop::drop(&mut self.ring);
            if !busy {
                ManuallyDrop::drop(&mut self.memory);
            }
        }
    }
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("fd", &self.ring.as_raw_fd())
            .field("in_kernel", &self.in_kernel())
            .finish()
    }
}
