//! `cobweb_queue`: submission and completion.

use super::abi::*;
use super::boundary::{self, null, put};
use super::disk::DiskRef;
use super::handle::Object;
use super::status;
use crate::context::Context;
use crate::error::{Code, IoError, IoResult, Result};
use crate::graph::Disk;
use crate::limits::REQUEST_LEN_MAX;
use crate::options::Options;
use crate::queue::{Cqe, Cx, HostOp, HostReq, Queue, TaskOp, TaskResult};
use crate::request::{Buffers, Class, Flags, Request, Segment};
use crate::sync::{Arc, Mutex};
use crate::units::ByteRange;
use libc::{c_int, iovec};
use std::time::Duration;

/// A queue of the host. The mutex is never contended in correct use (C4: one thread at a time); it makes wrong use safe.
pub(super) struct QueueRef {
    ctx: Arc<Context>,
    queue: Queue,
    scratch: Mutex<Scratch>,
}

#[derive(Default)]
struct Scratch {
    reqs: Vec<HostReq>,
    cqes: Vec<Cqe>,
}

impl Object for QueueRef {
    type Raw = cobweb_queue;
    const MARK: u64 = 0x636f_6277_6562_0004;
    const NAME: &'static str = "queue";
}

/// Makes a queue of at most `depth` (1..4096) requests on a disk, to be used by one thread at a time. Errors: -EINVAL, -ENOMEM.
///
/// # Safety
/// Pointers are NULL or valid as their types say.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_queue_new(
    d: *mut cobweb_disk,
    depth: u32,
    out: *mut *mut cobweb_queue,
    e: *mut cobweb_error,
) -> c_int {
    boundary::call_int(e, || {
        // SAFETY: the caller's duty.
        let disk = unsafe { DiskRef::get(d) }?;
        if out.is_null() {
            return Err(null("out"));
        }
        let queue = Queue::new(&disk.disk, depth)?;
        let queue = QueueRef { ctx: disk.ctx.clone(), queue, scratch: Mutex::default() };
        // SAFETY: checked above.
        unsafe { put(out, queue.into_raw()) };
        Ok(0)
    })
}

/// The queue's eventfd, armed: readable when cobweb_reap has something to do. Owned by the library. A poll or epoll_wait of the thread that submitted can end with
/// EINTR while requests complete (the kernel finishes them on that thread): repeat it.
///
/// # Safety
/// `q` is a handle or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cobweb_queue_fd(q: *mut cobweb_queue) -> c_int {
    // SAFETY: the caller's duty.
    boundary::call_int(std::ptr::null_mut(), || unsafe { QueueRef::get(q) }?.queue.event_fd().map(i64::from))
}

/// Switches the eventfd off (0) or on (1). After switching on, reap once more before sleeping on it.
///
/// # Safety
/// `q` is a handle or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cobweb_queue_arm(q: *mut cobweb_queue, on: c_int) -> c_int {
    // SAFETY: the caller's duty.
    boundary::call_int(std::ptr::null_mut(), || unsafe { QueueRef::get(q) }?.queue.arm(on != 0).map(|()| 0))
}

/// Submits `n` requests; returns how many were taken (fewer when the queue is full), or a negative errno if none was looked at. A request with wrong
/// fields is taken and completes with -EINVAL. Never blocks.
///
/// # Safety
/// `r` is valid for `n` requests whose pointers are as their fields say (C5).
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_submit(q: *mut cobweb_queue, r: *const cobweb_req, n: u32) -> c_int {
    boundary::call_int(std::ptr::null_mut(), || {
        // SAFETY: the caller's duty.
        let queue = unsafe { QueueRef::get(q) }?;
        if n == 0 {
            return Ok(0);
        }
        if r.is_null() {
            return Err(null("r"));
        }
        let mut scratch = queue.scratch.lock();
        let n = (n as usize).min(queue.queue.room());
        for i in 0..n {
            // SAFETY: i < n.
            let req = unsafe { &*r.add(i) };
            // SAFETY: the caller's duty.
            let op = unsafe { queue.translate(req) }.unwrap_or_else(HostOp::Fail);
            scratch.reqs.push(HostReq { user_data: req.user_data, op });
        }
        let taken = queue.queue.submit(&mut scratch.reqs);
        debug_assert!(scratch.reqs.is_empty(), "there was room for all of them");
        Ok(taken as i64)
    })
}

/// Drives the queue and stores up to `max` completions; with `min` above 0 waits until that many of the outstanding ones are there or `timeout_ns` has
/// passed (negative: no limit). Returns their number. With `min` 0 it never blocks.
///
/// # Safety
/// `c` is valid for `max` completions.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_reap(
    q: *mut cobweb_queue,
    c: *mut cobweb_cqe,
    max: u32,
    min: u32,
    timeout_ns: i64,
) -> c_int {
    boundary::call_int(std::ptr::null_mut(), || {
        // SAFETY: the caller's duty.
        let queue = unsafe { QueueRef::get(q) }?;
        if c.is_null() && max > 0 {
            return Err(null("c"));
        }
        let timeout = u64::try_from(timeout_ns).ok().map(Duration::from_nanos);
        let mut scratch = queue.scratch.lock();
        let max = max.min(c_int::MAX as u32);
        queue.queue.reap(&mut scratch.cqes, max as usize, min as usize, timeout);
        let n = scratch.cqes.len();
        for (i, cqe) in scratch.cqes.drain(..).enumerate() {
            let flags = if cqe.more { COBWEB_CQE_MORE } else { 0 };
            let out =
                cobweb_cqe { user_data: cqe.user_data, res: cqe.res, flags, code: cqe.code as u32, rsv: 0 };
            // SAFETY: i < max.
            unsafe { put(c.add(i), out) };
        }
        Ok(n as i64)
    })
}

/// Asks the requests with this `user_data` to stop waiting; each still completes exactly once. Returns how many were asked. Never blocks.
///
/// # Safety
/// `q` is a handle or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cobweb_cancel(q: *mut cobweb_queue, user_data: u64) -> c_int {
    // SAFETY: the caller's duty.
    boundary::call_int(std::ptr::null_mut(), || {
        // SAFETY: the caller's duty.
        let queue = unsafe { QueueRef::get(q) }?;
        Ok(queue.queue.cancel(user_data) as i64)
    })
}

/// Frees a queue; waits until no request of it uses memory of the host any more. NULL is allowed.
///
/// # Safety
/// `q` is a handle or NULL and is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cobweb_queue_free(q: *mut cobweb_queue) {
    boundary::call_unit(|| {
        // SAFETY: the caller's duty.
        drop(unsafe { QueueRef::take(q) });
        Ok(())
    });
}

impl QueueRef {
    /// # Safety
    /// The request's pointers are as its fields say.
    unsafe fn translate(&self, r: &cobweb_req) -> IoResult<HostOp> {
        let class = class_of(r.prio)?;
        let host_flags = COBWEB_F_REGISTERED | COBWEB_F_COPY_IOV;
        let flags = Flags::from_bits(r.flags & !host_flags).ok_or(IoError::invalid())?;
        if r.rsv0 != 0 || r.rsv1 != 0 || r.arg != 0 {
            return Err(IoError::invalid());
        }
        let allowed = match r.op {
            COBWEB_OP_WRITE => Flags::FUA,
            COBWEB_OP_WRITE_ZEROES => Flags::all(),
            COBWEB_OP_DISCARD => Flags::FUA,
            _ => Flags::empty(),
        };
        if !allowed.contains(flags) {
            return Err(IoError::invalid());
        }
        let range = ByteRange::new(r.offset, r.len).ok_or(IoError::out_of_range())?;
        let io = |req: Request| Ok(HostOp::Io(req.flags(flags).class(class)));
        match r.op {
            COBWEB_OP_NOP => Ok(HostOp::Nop),
            // SAFETY: the caller's duty.
            COBWEB_OP_READ => io(Request::read(r.offset, unsafe { buffers(r) }?)),
            // SAFETY: the caller's duty.
            COBWEB_OP_WRITE => io(Request::write(r.offset, unsafe { buffers(r) }?)),
            COBWEB_OP_WRITE_ZEROES => io(Request::write_zeroes(range, flags)),
            COBWEB_OP_DISCARD => io(Request::discard(range)),
            COBWEB_OP_FLUSH => io(Request::flush()),
            COBWEB_OP_BLOCK_STATUS => {
                // SAFETY: the caller's duty.
                let out: OutArray<cobweb_extent> = unsafe { OutArray::of(r) }?;
                Ok(HostOp::Task(status_task(out, range)))
            }
            COBWEB_OP_MAP => {
                // SAFETY: the caller's duty.
                let out: OutArray<cobweb_mapping> = unsafe { OutArray::of(r) }?;
                Ok(HostOp::Task(map_task(out, range)))
            }
            COBWEB_OP_OPEN => {
                // SAFETY: the caller's duty.
                let text = unsafe { option_text(r) }?;
                Ok(HostOp::Control(open_task(self.ctx.clone(), self.queue.disk().clone(), text)))
            }
            _ => Err(IoError::unsupported()),
        }
    }
}

fn class_of(prio: u32) -> IoResult<Class> {
    match prio {
        COBWEB_PRIO_DEFAULT | COBWEB_PRIO_GUEST | COBWEB_PRIO_INHERIT => Ok(Class::Guest),
        COBWEB_PRIO_COPY => Ok(Class::Copy),
        COBWEB_PRIO_BACKGROUND => Ok(Class::Background),
        COBWEB_PRIO_LAZY => Ok(Class::Lazy),
        _ => Err(IoError::invalid()),
    }
}

/// # Safety
/// `r.iov` has `r.iovcnt` elements and their memory is valid until the completion.
unsafe fn buffers(r: &cobweb_req) -> IoResult<Buffers> {
    // SAFETY: the caller's duty.
    let iov = unsafe { iovecs(r) }?;
    let mut bufs = Buffers::new();
    let mut sum = 0u64;
    for v in iov {
        sum = sum.checked_add(v.iov_len as u64).filter(|s| *s <= REQUEST_LEN_MAX).ok_or(IoError::invalid())?;
        if v.iov_len > 0 && v.iov_base.is_null() {
            return Err(IoError::os(libc::EFAULT));
        }
        // SAFETY: the caller's duty.
        bufs.push(unsafe { Segment::pinned(v.iov_base.cast(), v.iov_len) });
    }
    if sum == r.len { Ok(bufs) } else { Err(IoError::invalid()) }
}

/// # Safety
/// `r.iov` has `r.iovcnt` elements.
unsafe fn iovecs(r: &cobweb_req) -> IoResult<&[iovec]> {
    if r.iovcnt == 0 {
        return Ok(&[]);
    }
    if r.iov.is_null() {
        return Err(IoError::os(libc::EFAULT));
    }
    if r.iovcnt > IOV_MAX {
        return Err(IoError::invalid());
    }
    // SAFETY: the caller's duty.
    Ok(unsafe { std::slice::from_raw_parts(r.iov, r.iovcnt as usize) })
}

/// Most elements of an iovec array.
const IOV_MAX: u32 = 1024;

/// # Safety
/// `r.iov[0]` is readable text.
unsafe fn option_text(r: &cobweb_req) -> IoResult<String> {
    // SAFETY: the caller's duty.
    let [v] = unsafe { iovecs(r) }? else { return Err(IoError::invalid()) };
    if v.iov_base.is_null() {
        return Err(IoError::os(libc::EFAULT));
    }
    if v.iov_len > 1 << 20 {
        return Err(IoError::invalid());
    }
    // SAFETY: the caller's duty.
    let bytes = unsafe { std::slice::from_raw_parts(v.iov_base.cast::<u8>(), v.iov_len) };
    let bytes = bytes.strip_suffix(&[0]).unwrap_or(bytes);
    String::from_utf8(bytes.to_vec()).map_err(|_| IoError::invalid())
}

/// An array of the host that a task fills before it completes.
struct OutArray<T> {
    at: *mut T,
    max: usize,
}

// SAFETY: the host keeps the array valid, and does not touch it, until the completion (C5), on whatever thread the task is polled.
unsafe impl<T> Send for OutArray<T> {}

impl<T: Copy> OutArray<T> {
    /// # Safety
    /// `r.iov[0]` is valid for writes.
    unsafe fn of(r: &cobweb_req) -> IoResult<Self> {
        // SAFETY: the caller's duty.
        let [v] = unsafe { iovecs(r) }? else { return Err(IoError::invalid()) };
        let (at, max) = (v.iov_base.cast::<T>(), v.iov_len / size_of::<T>());
        if at.is_null() {
            return Err(IoError::os(libc::EFAULT));
        }
        if max == 0 || !at.is_aligned() {
            return Err(IoError::invalid());
        }
        Ok(Self { at, max })
    }

    fn fill(&self, values: &[T]) -> i64 {
        for (i, v) in values.iter().take(self.max).enumerate() {
            // SAFETY: i < max.
            unsafe { self.at.add(i).write(*v) };
        }
        values.len().min(self.max) as i64
    }
}

fn status_task(out: OutArray<cobweb_extent>, range: ByteRange) -> TaskOp {
    Box::new(move |cx, node| {
        Box::pin(async move {
            let out = out;
            let Some(node) = node else { return IoError::new(libc::ENOMEDIUM, Code::NoMedium).into() };
            match status::extents(&cx, &*node, range, out.max).await {
                Ok((extents, more)) => TaskResult::ok(out.fill(&extents), more),
                Err(e) => e.into(),
            }
        })
    })
}

fn map_task(out: OutArray<cobweb_mapping>, range: ByteRange) -> TaskOp {
    Box::new(move |_cx, node| {
        Box::pin(async move {
            let out = out;
            let Some(node) = node else { return IoError::new(libc::ENOMEDIUM, Code::NoMedium).into() };
            match status::mappings(&*node, range, out.max) {
                Ok((maps, more)) => TaskResult::ok(out.fill(&maps), more),
                Err(e) => e.into(),
            }
        })
    })
}

/// C13: opens off the host's thread, then inserts. Runs outside of the drain it causes: the request itself is not counted.
fn open_task(ctx: Arc<Context>, disk: Arc<Disk>, text: String) -> TaskOp {
    Box::new(move |cx: Cx, _node| {
        Box::pin(async move {
            let opened = cx
                .blocking(move || -> Result<()> {
                    let vertex = ctx.graph().open(Options::parse(&text)?)?;
                    let inserted = ctx.graph().insert(&disk, Some(vertex));
                    inserted.inspect_err(|e| ctx.env().log(0, "open", &e.full_text()))
                })
                .await;
            match opened {
                Ok(Ok(())) => TaskResult::ok(0, false),
                Ok(Err(e)) => e.as_io().into(),
                Err(e) => e.into(),
            }
        })
    })
}
