//! The ring: the one place that hands memory to the kernel through io_uring.

use super::TEARDOWN_MAX;
use crate::error::{IoError, IoResult};
use crate::io::progress::{Progress, Step};
use crate::io::{Completion, Engine, EngineOp, FileOpKind, Notify};
use crate::queue::EventFd;
use crate::request::Class;
use crate::rt::Instant;
use crate::sync::Arc;
use io_uring::types::{CancelBuilder, Fd, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};
use slab::Slab;
use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

/// An engine over one ring.
pub struct UringEngine {
    ring: ManuallyDrop<IoUring>,
    /// Operations in the kernel; never grows past `depth`, so slots do not move.
    slots: ManuallyDrop<Slab<Slot>>,
    depth: usize,
    backlog: VecDeque<EngineOp>,
    /// Entries pushed and not yet submitted.
    pushed: usize,
    wake: Arc<Wake>,
    /// Where the ring reads the wake counter to; leaked with the slots if the kernel keeps it.
    wake_counter: ManuallyDrop<Box<u64>>,
    wake_armed: bool,
    host: Option<EventFd>,
    registered: bool,
    /// Completions taken since the event fd was last cleared, and clears skipped since; see `clear_event`.
    taken: usize,
    skipped: u32,
    timer: Option<Instant>,
    timespec: Box<Timespec>,
}

#[derive(Debug)]
struct Slot {
    op: EngineOp,
    iov: Vec<libc::iovec>,
    progress: Progress,
}

// SAFETY: the iovecs point into memory that the slot's own buffers keep alive or that is pinned by contract; no thread is special.
unsafe impl Send for Slot {}

#[derive(Debug)]
struct Wake(EventFd);

impl Notify for Wake {
    fn wake(&self) {
        self.0.signal();
    }
}

const WAKE: u64 = u64::MAX;
const IGNORE: u64 = u64::MAX - 1;
const TIMER: u64 = u64::MAX - 2;
const IOV_MAX: usize = 1024;

impl UringEngine {
    /// A ring for `depth` operations (at least 1). Fails where io_uring is not allowed.
    pub fn new(depth: u32) -> std::io::Result<Self> {
        let depth = depth.clamp(1, 4096);
        // Room for the wake read, a timer and a cancel beside the operations.
        let ring = IoUring::builder().build((depth + 3).next_power_of_two())?;
        Ok(Self {
            ring: ManuallyDrop::new(ring),
            slots: ManuallyDrop::new(Slab::with_capacity(depth as usize)),
            depth: depth as usize,
            backlog: VecDeque::new(),
            pushed: 0,
            // Not non-blocking: the ring would answer EAGAIN instead of waiting for the counter.
            wake: Arc::new(Wake(EventFd::blocking()?)),
            wake_counter: ManuallyDrop::new(Box::new(0)),
            wake_armed: false,
            host: None,
            registered: false,
            taken: 0,
            skipped: 0,
            timer: None,
            timespec: Box::new(Timespec::new()),
        })
    }

    fn start(&mut self, op: EngineOp) {
        let slot = Slot { op, iov: Vec::new(), progress: Progress::NEW };
        let index = self.slots.insert(slot);
        self.enqueue(index);
    }

    /// Puts the rest of a slot's operation into the submission queue.
    fn enqueue(&mut self, index: usize) {
        let entry = entry(&mut self.slots[index]).user_data(index as u64);
        self.push_entry(&entry);
    }

    fn push_entry(&mut self, entry: &squeue::Entry) {
        // SAFETY: what the entry points to lives in a slot (or in self) until its completion has been taken.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            // Full: hand over what is there. EBUSY and EINTR leave it full; then the kernel has made room or this is tried again.
            let _ = self.ring.submit();
        }
        self.pushed += 1;
    }

    fn arm_wake(&mut self) {
        if !self.wake_armed {
            self.wake_armed = true;
            let to: *mut u64 = &raw mut **self.wake_counter;
            let entry = opcode::Read::new(Fd(self.wake.0.raw()), to.cast(), 8).build().user_data(WAKE);
            self.push_entry(&entry);
        }
    }

    fn submit(&mut self) {
        if self.pushed > 0 {
            // An error here (EBUSY, EINTR, EAGAIN) leaves entries in the queue; they go with the next call.
            if self.ring.submit().is_ok() {
                self.pushed = self.ring.submission().len();
            }
        }
    }

    /// Takes one completion. Returns the operation's end, if it was that.
    fn complete(&mut self, user_data: u64, result: i32) -> Option<Completion> {
        match user_data {
            WAKE => {
                self.wake_armed = false;
                return None;
            }
            TIMER => {
                self.timer = None;
                return None;
            }
            IGNORE => return None,
            _ => {}
        }
        let index = user_data as usize;
        let slot = &mut self.slots[index];
        let op = &slot.op.op;
        let align = op.file.offset_align();
        let result: IoResult = match slot.progress.step(op.kind, op.offset, op.len, align, i64::from(result))
        {
            Step::Again(_) => {
                self.enqueue(index);
                return None;
            }
            Step::Done => Ok(()),
            Step::Zeros(done) => {
                let bufs = &slot.op.bufs;
                bufs.slice(done as usize, bufs.len() - done as usize).fill(0);
                Ok(())
            }
            Step::Fail(errno) => Err(IoError::os(errno)),
        };
        let slot = self.slots.remove(index);
        Some(Completion { tag: slot.op.tag, result })
    }
}

/// The submission entry for what is left of a slot's operation.
fn entry(slot: &mut Slot) -> squeue::Entry {
    let op = &slot.op.op;
    let fd = Fd(op.file.raw_fd(op));
    let done = slot.progress.done;
    let offset = op.offset + done;
    let dsync = if op.dsync { libc::RWF_DSYNC } else { 0 };
    let prio = io_priority(slot.op.class);
    match op.kind {
        FileOpKind::Sync => opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build(),
        FileOpKind::Allocate(mode) => opcode::Fallocate::new(fd, op.len).offset(offset).mode(mode).build(),
        FileOpKind::Read | FileOpKind::Write => {
            let segs = slot.op.bufs.segments();
            let read = op.kind == FileOpKind::Read;
            if segs.len() == 1 {
                let (ptr, len) = (segs[0].as_ptr().wrapping_add(done as usize), (op.len - done) as u32);
                return if read {
                    opcode::Read::new(fd, ptr, len).offset(offset).ioprio(prio).build()
                } else {
                    opcode::Write::new(fd, ptr, len).offset(offset).rw_flags(dsync).ioprio(prio).build()
                };
            }
            fill_iovecs(&mut slot.iov, &slot.op.bufs, done as usize);
            let (ptr, n) = (slot.iov.as_ptr(), slot.iov.len() as u32);
            if read {
                opcode::Readv::new(fd, ptr, n).offset(offset).ioprio(prio).build()
            } else {
                opcode::Writev::new(fd, ptr, n).offset(offset).rw_flags(dsync).ioprio(prio).build()
            }
        }
    }
}

/// The first [`IOV_MAX`] segments behind `skip` bytes.
pub(in crate::io) fn fill_iovecs(
    iov: &mut Vec<libc::iovec>,
    bufs: &crate::request::Buffers,
    mut skip: usize,
) {
    iov.clear();
    for s in bufs.segments() {
        if skip >= s.len() {
            skip -= s.len();
            continue;
        }
        iov.push(libc::iovec { iov_base: s.as_ptr().wrapping_add(skip).cast(), iov_len: s.len() - skip });
        skip = 0;
        if iov.len() == IOV_MAX {
            break;
        }
    }
}

/// The kernel's I/O priority of a class: default for what guests wait for, lowest best-effort for background work, idle for lazy work (S39, S56).
pub(in crate::io) const fn io_priority(class: Class) -> u16 {
    match class {
        Class::Guest | Class::Copy => 0,
        Class::Background => 2 << 13 | 7,
        Class::Lazy => 3 << 13,
    }
}

impl Engine for UringEngine {
    fn push(&mut self, op: EngineOp) {
        if self.slots.len() < self.depth && self.backlog.is_empty() {
            self.start(op);
        } else {
            self.backlog.push_back(op);
        }
    }

    fn kick(&mut self) {
        self.arm_wake();
        self.submit();
    }

    fn reap(&mut self, out: &mut Vec<Completion>) {
        loop {
            let next = self.ring.completion().next();
            let Some(cqe) = next else { break };
            self.taken += 1;
            out.extend(self.complete(cqe.user_data(), cqe.result()));
        }
        while self.slots.len() < self.depth
            && let Some(op) = self.backlog.pop_front()
        {
            self.start(op);
        }
    }

    fn wait(&mut self, timeout: Option<Duration>) {
        self.arm_wake();
        let spec;
        let mut args = SubmitArgs::new();
        if let Some(t) = timeout {
            spec = Timespec::from(t);
            args = args.timespec(&spec);
        }
        // ETIME, EINTR and EBUSY all mean: look again.
        if self.ring.submitter().submit_with_args(1, &args).is_ok() || self.pushed > 0 {
            self.pushed = self.ring.submission().len();
        }
    }

    fn in_flight(&self) -> usize {
        self.slots.len() + self.backlog.len()
    }

    fn notify(&self) -> Arc<dyn Notify> {
        self.wake.clone()
    }

    fn event_fd(&mut self) -> std::io::Result<RawFd> {
        if self.host.is_none() {
            self.host = Some(EventFd::new()?);
            self.arm(true)?;
        }
        self.kick();
        Ok(self.host.as_ref().map_or(-1, EventFd::raw))
    }

    fn clear_event(&mut self) {
        // The kernel signals the fd for each completion, possibly after the completion has been taken; so one clear follows each batch taken, and a host
        // that is woken again and again for nothing gets one as well.
        self.skipped += 1;
        if self.taken > 0 || !self.ring.completion().is_empty() || self.skipped >= 16 {
            self.taken = 0;
            self.skipped = 0;
            if let Some(fd) = &self.host {
                fd.clear();
            }
        }
    }

    fn arm(&mut self, on: bool) -> std::io::Result<()> {
        let Some(fd) = &self.host else { return Ok(()) };
        if on == self.registered {
            return Ok(());
        }
        if on {
            self.ring.submitter().register_eventfd(fd.raw())?;
            fd.signal();
        } else {
            self.ring.submitter().unregister_eventfd()?;
            fd.clear();
        }
        self.registered = on;
        Ok(())
    }

    fn set_timer(&mut self, at: Option<Instant>, now: Instant) {
        // A timer that turns out to be too early ends in one look for nothing; only an earlier one has to be set.
        let Some(at) = at else { return };
        if self.host.is_none() || self.timer.is_some_and(|t| t <= at) {
            return;
        }
        self.timer = Some(at);
        *self.timespec = Timespec::from(at.since(now));
        let entry = opcode::Timeout::new(&raw const *self.timespec).build().user_data(TIMER);
        self.push_entry(&entry);
        // The kernel copies the time when it takes the entry, so `timespec` is free again after this.
        self.submit();
    }
}

impl Drop for UringEngine {
    fn drop(&mut self) {
        self.backlog.clear();
        let _ = self.ring.submit();
        let start = std::time::Instant::now();
        let mut cancelled = false;
        while !self.slots.is_empty() || self.wake_armed {
            let left = TEARDOWN_MAX.saturating_sub(start.elapsed());
            if left.is_zero() {
                break;
            }
            if !cancelled {
                cancelled = true;
                let _ = self
                    .ring
                    .submitter()
                    .register_sync_cancel(Some(Timespec::from(left)), CancelBuilder::any());
            }
            let spec = Timespec::from(left.min(Duration::from_millis(100)));
            let _ = self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&spec));
            loop {
                let next = self.ring.completion().next();
                let Some(cqe) = next else { break };
                match cqe.user_data() {
                    WAKE => self.wake_armed = false,
                    IGNORE | TIMER => {}
                    index => {
                        // Cancelled or not: the kernel is done with it. A short transfer is not continued.
                        self.slots.try_remove(index as usize);
                    }
                }
            }
        }
        // SAFETY: dropped once, here.
        unsafe { ManuallyDrop::drop(&mut self.ring) };
        if self.slots.is_empty() && !self.wake_armed {
            // SAFETY: dropped once, here; nothing is in flight.
            unsafe {
                ManuallyDrop::drop(&mut self.slots);
                ManuallyDrop::drop(&mut self.wake_counter);
            }
        }
        // Else the kernel may still write there: leaked.
    }
}

impl std::fmt::Debug for UringEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UringEngine")
            .field("in_flight", &self.in_flight())
            .field("fd", &self.ring.as_raw_fd())
            .finish()
    }
}
