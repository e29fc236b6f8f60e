//! The host side: a queue of one host thread on one disk.

use super::cx::{Cancel, Cx};
use super::driver::Driver;
use super::exec::Exec;
use crate::error::{Code, Error, IoError, IoResult, Result};
use crate::graph::{Disk, IoCounters};
use crate::io::{EngineOp, Tag};
use crate::node::{Node, NodeFuture, Plan, check_range};
use crate::request::{Op, Request};
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use crate::sync::{Arc, Mutex, Weak};
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::os::fd::RawFd;
use std::time::Duration;

/// A request of the host.
pub struct HostReq {
    /// Returned with the completion.
    pub user_data: u64,
    /// What to do.
    pub op: HostOp,
}

/// The body of [`HostOp::Task`]: gets the executor and the disk's top node.
pub type TaskOp = Box<dyn FnOnce(Cx, Option<Arc<dyn Node>>) -> NodeFuture<'static, TaskResult> + Send>;

/// What a [`HostOp::Task`] completes with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskResult {
    /// A count, or a negative errno.
    pub res: i64,
    /// Finer than errno.
    pub code: Code,
    /// There was more to say than the caller's array could hold.
    pub more: bool,
}

impl TaskResult {
    /// A success with a count.
    pub const fn ok(count: i64, more: bool) -> Self {
        Self { res: count, code: Code::None, more }
    }
}

impl From<IoError> for TaskResult {
    fn from(e: IoError) -> Self {
        Self { res: -(e.errno as i64), code: e.code, more: false }
    }
}

/// What a host can ask for.
pub enum HostOp {
    /// Read, write, zeroes, discard, flush. Completes with the length of the range.
    Io(Request),
    /// Anything else that looks at the graph (status, map), as a task.
    Task(TaskOp),
    /// A task that may change the graph: not counted for drains, so it can wait for one.
    Control(TaskOp),
    /// Completes with 0 at once.
    Nop,
    /// Completes with this error: a request that was refused before it started.
    Fail(IoError),
}

/// A completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cqe {
    /// As submitted.
    pub user_data: u64,
    /// Bytes, or a negative errno.
    pub res: i64,
    /// Finer than errno.
    pub code: Code,
    /// Set when a status call had more to say than its array could hold.
    pub more: bool,
}

/// What an engine operation of a fast request carries; enough to complete it.
#[derive(Clone, Copy, Debug)]
pub struct HostTag {
    user_data: u64,
    len: u64,
    op: Op,
}

/// How an executor reaches the queue bound to it.
pub(super) trait HostHook: Send + Sync {
    /// A fast request has ended.
    fn finished(&self, tag: HostTag, result: IoResult);
    /// Starts what was submitted while the token was taken, and what a drain had parked.
    fn take_inbox(self: Arc<Self>, driver: &mut Driver);
    /// Whether `take_inbox` has something to do.
    fn has_inbox(&self) -> bool;
    /// A pass was made by somebody else than the host: signals the event fd if completions are there.
    fn signal(&self, driver: &mut Driver);
}

/// A submission and completion queue of one host thread on one disk (C4). Used by one thread at a time; survives every change of the graph below.
pub struct Queue {
    core: Arc<QueueCore>,
}

/// The part that executors and drains hold.
pub(crate) struct QueueCore {
    exec: Arc<Exec>,
    disk: Arc<Disk>,
    depth: usize,
    /// Requests that count for a drain (S70).
    running: AtomicUsize,
    /// Requests accepted and not yet reaped.
    accepted: AtomicUsize,
    /// Submitted while the token was taken, or parked by a drain.
    inbox: Mutex<VecDeque<HostReq>>,
    /// Whether the inbox may have something; spares the lock in each pass.
    inbox_flag: AtomicBool,
    done: Mutex<VecDeque<Cqe>>,
    slow: Mutex<HashMap<u64, Vec<Arc<Cancel>>>>,
    /// Whether the host polls the event fd.
    armed: AtomicBool,
    has_fd: AtomicBool,
    pub(crate) counters: IoCounters,
}

impl Queue {
    /// A queue of `depth` requests (1..=4096) on `disk`.
    pub fn new(disk: &Arc<Disk>, depth: u32) -> Result<Self> {
        if depth == 0 || depth > crate::limits::QUEUE_DEPTH_MAX {
            return Err(Error::invalid(format!(
                "queue depth {depth} is not in 1..={}",
                crate::limits::QUEUE_DEPTH_MAX
            )));
        }
        let exec = Exec::new(disk.env(), depth)?;
        let core = Arc::new(QueueCore {
            exec,
            disk: disk.clone(),
            depth: depth as usize,
            running: AtomicUsize::new(0),
            accepted: AtomicUsize::new(0),
            inbox: Mutex::default(),
            inbox_flag: AtomicBool::new(false),
            done: Mutex::default(),
            slow: Mutex::default(),
            armed: AtomicBool::new(true),
            has_fd: AtomicBool::new(false),
            counters: IoCounters::default(),
        });
        let hook: Arc<dyn HostHook> = core.clone();
        let weak: Weak<dyn HostHook> = Arc::downgrade(&hook);
        if core.exec.host.set(weak).is_err() {
            unreachable!("a new executor has no host");
        }
        disk.add_queue(&core);
        Ok(Self { core })
    }

    /// The disk.
    pub fn disk(&self) -> &Arc<Disk> {
        &self.core.disk
    }

    /// Takes requests from the front of `reqs` until the queue is full; returns how many. Never blocks.
    pub fn submit(&self, reqs: &mut Vec<HostReq>) -> usize {
        let core = &self.core;
        let room = core.depth.saturating_sub(core.accepted.load(Ordering::Relaxed));
        let n = room.min(reqs.len());
        if n == 0 {
            return 0;
        }
        core.accepted.fetch_add(n, Ordering::Relaxed);
        match core.exec.try_drive() {
            Some(mut driver) => {
                // One pass at once, so that slow requests start and everything goes to the kernel.
                core.exec.set_awake();
                core.start(&mut driver, reqs.drain(..n));
                core.exec.pass(&mut driver);
                core.signal(&mut driver);
            }
            None => {
                core.inbox.lock().extend(reqs.drain(..n));
                core.inbox_flag.store(true, Ordering::Release);
                core.exec.notify();
            }
        }
        n
    }

    /// Requests that could be submitted now.
    pub fn room(&self) -> usize {
        self.core.depth.saturating_sub(self.core.accepted.load(Ordering::Relaxed))
    }

    /// Requests accepted and not yet reaped.
    pub fn outstanding(&self) -> usize {
        self.core.accepted.load(Ordering::Relaxed)
    }

    /// Drives the queue and appends at most `max` completions to `out`. With `min` above 0 waits until that many (of those outstanding) are there
    /// or `timeout` has passed; `None` waits without limit. Returns the number appended.
    pub fn reap(&self, out: &mut Vec<Cqe>, max: usize, min: usize, timeout: Option<Duration>) -> usize {
        let core = &self.core;
        let min = min.min(max).min(core.accepted.load(Ordering::Relaxed));
        let deadline = timeout.map(|t| core.exec.now().after(t));
        let mut got = 0;
        let mut driver = core.exec.own_drive();
        let armed = core.armed.load(Ordering::Relaxed) && core.has_fd.load(Ordering::Relaxed);
        if armed {
            driver.engine.clear_event();
        }
        loop {
            let more = core.exec.pass(&mut driver);
            got += core.pop_done(out, max - got);
            if got >= min || got >= max {
                break;
            }
            let left = match deadline {
                None => None,
                Some(at) => {
                    let left = at.since(core.exec.now());
                    if left.is_zero() {
                        break;
                    }
                    Some(left)
                }
            };
            if !more {
                core.exec.wait(&mut driver, left);
            }
        }
        if armed {
            core.exec.arm_timer(&mut driver);
            if !core.done.lock().is_empty() {
                // More is there than the caller had room for: the fd must stay readable.
                driver.engine.notify().wake();
            }
        }
        got
    }

    /// [`Queue::submit`] and a [`Queue::reap`] without waiting, in one pass: takes requests from the front of `reqs` until the queue is full, and
    /// appends every completion that is there, those of the new requests included, to `out`. Returns the number appended. For a loop that does both in
    /// each round; unlike `submit` it waits for a helper's bounded pass. `signalled`: the event fd was seen readable and is cleared; otherwise it is
    /// left as it is, which spares a system call.
    pub fn exchange(&self, reqs: &mut Vec<HostReq>, out: &mut Vec<Cqe>, signalled: bool) -> usize {
        let core = &self.core;
        let mut driver = core.exec.own_drive();
        if signalled {
            driver.engine.clear_event();
        }
        let n = self.room().min(reqs.len());
        if n > 0 {
            core.accepted.fetch_add(n, Ordering::Relaxed);
            core.exec.set_awake();
            core.start(&mut driver, reqs.drain(..n));
        }
        core.exec.pass(&mut driver);
        let got = core.pop_done(out, usize::MAX);
        if core.armed.load(Ordering::Relaxed) && core.has_fd.load(Ordering::Relaxed) {
            core.exec.arm_timer(&mut driver);
        }
        got
    }

    /// The event fd for the host's loop (C6).
    pub fn event_fd(&self) -> Result<RawFd> {
        let mut driver = self.core.exec.own_drive();
        let fd = driver.engine.event_fd().map_err(|e| Error::os(e, "cannot create the queue's event fd"))?;
        self.core.has_fd.store(true, Ordering::Relaxed);
        self.core.exec.arm_timer(&mut driver);
        // What has completed before there was a descriptor is told by it as well.
        self.core.signal(&mut driver);
        Ok(fd)
    }

    /// Switches the event fd on (the default) or off. After switching on, reap once more before sleeping.
    pub fn arm(&self, on: bool) -> Result<()> {
        let mut driver = self.core.exec.own_drive();
        self.core.armed.store(on, Ordering::Relaxed);
        if on {
            self.core.signal(&mut driver);
        }
        driver.engine.arm(on).map_err(|e| Error::os(e, "cannot switch the queue's event fd"))
    }

    /// Asks the requests with this `user_data` to stop waiting. Best effort; each still completes once (C7). Returns how many were asked.
    pub fn cancel(&self, user_data: u64) -> usize {
        let core = &self.core;
        let mut asked = 0;
        if core.inbox_flag.load(Ordering::Acquire) {
            let mut inbox = core.inbox.lock();
            for r in inbox.iter_mut().filter(|r| r.user_data == user_data) {
                r.op = HostOp::Fail(IoError::cancelled());
                asked += 1;
            }
        }
        let running = core.slow.lock().get(&user_data).cloned().unwrap_or_default();
        asked += running.len();
        running.iter().for_each(|c| c.cancel());
        if asked > 0 {
            core.exec.notify();
        }
        asked
    }
}

impl Drop for Queue {
    /// Waits for the requests that are running: their memory belongs to the host.
    fn drop(&mut self) {
        let core = &self.core;
        let mut sink = Vec::new();
        while core.accepted.load(Ordering::Relaxed) > 0 {
            // Requests parked by a drain end with it; those that wait are asked to stop.
            let waiting: Vec<_> = core.slow.lock().values().flatten().cloned().collect();
            waiting.iter().for_each(|c| c.cancel());
            if core.disk.gate_closed() {
                let parked = std::mem::take(&mut *core.inbox.lock());
                for r in parked {
                    core.push_done(r.user_data, -i64::from(libc::ECANCELED), Code::Cancelled, false);
                }
            }
            self.reap(&mut sink, usize::MAX, 1, Some(Duration::from_millis(100)));
            sink.clear();
        }
        core.disk.remove_queue(core);
        core.exec.abandon();
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("outstanding", &self.outstanding()).finish()
    }
}

impl QueueCore {
    /// Requests that a drain waits for.
    pub(crate) fn running(&self) -> usize {
        self.running.load(Ordering::SeqCst)
    }

    /// A drain has ended: parked requests start in the next pass.
    pub(crate) fn unpark(&self) {
        self.inbox_flag.store(true, Ordering::Release);
        self.exec.notify();
    }

    fn start(self: &Arc<Self>, driver: &mut Driver, reqs: impl ExactSizeIterator<Item = HostReq>) {
        let n = reqs.len();
        // S70: count first, then look at the gate. SeqCst fence: partner of the one in `Disk::close_gate`.
        self.running.fetch_add(n, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if self.disk.gate_closed() {
            self.inbox.lock().extend(reqs);
            self.leave(n);
            return;
        }
        let top = self.disk.top();
        for r in reqs {
            self.start_one(driver, r, top.as_ref());
        }
    }

    fn start_one(self: &Arc<Self>, driver: &mut Driver, r: HostReq, top: Option<&Arc<dyn Node>>) {
        let user_data = r.user_data;
        let req = match r.op {
            HostOp::Io(req) => req,
            HostOp::Nop => return self.end(user_data, 0, Code::None, false),
            HostOp::Fail(e) => return self.end(user_data, -i64::from(e.errno), e.code, false),
            HostOp::Task(body) => return self.spawn_task(user_data, body, top.cloned(), true),
            HostOp::Control(body) => {
                self.leave(1);
                return self.spawn_task(user_data, body, top.cloned(), false);
            }
        };
        let tag = HostTag { user_data, len: req.range.len, op: req.op };
        let Some(node) = top else {
            return self.finish(tag, Err(IoError::new(libc::ENOMEDIUM, Code::NoMedium)));
        };
        let limits = node.limits();
        if let Err(e) = check_range(req.range, limits.size) {
            return self.finish(tag, Err(e));
        }
        if req.op.is_write() && limits.read_only {
            return self.finish(tag, Err(IoError::read_only()));
        }
        if req.range.is_empty() && req.op != Op::Flush {
            return self.finish(tag, Ok(()));
        }
        match node.plan(req.as_ref()) {
            Plan::Io(op) => {
                driver.push(EngineOp { op, bufs: req.bufs, class: req.class, tag: Tag::Request(tag) });
            }
            Plan::Zero => {
                req.bufs.fill(0);
                self.finish(tag, Ok(()));
            }
            Plan::Done(result) => self.finish(tag, result),
            Plan::Slow => self.spawn_slow(tag, req, node.clone()),
        }
    }

    fn spawn_slow(self: &Arc<Self>, tag: HostTag, req: Request, node: Arc<dyn Node>) {
        let mut ticket = SlowTicket::new(self, tag.user_data);
        let cx = Cx::with_cancel(self.exec.clone(), ticket.cancel.clone());
        self.exec.spawn(Box::pin(async move {
            let result = node.execute(&cx, req).await;
            ticket.end_io(tag, result);
        }));
    }

    fn spawn_task(
        self: &Arc<Self>,
        user_data: u64,
        body: TaskOp,
        node: Option<Arc<dyn Node>>,
        counted: bool,
    ) {
        let mut ticket = SlowTicket::new(self, user_data);
        ticket.counted = counted;
        let cx = Cx::with_cancel(self.exec.clone(), ticket.cancel.clone());
        self.exec.spawn(Box::pin(async move {
            let result = body(cx, node).await;
            ticket.end(result);
        }));
    }

    fn finish(&self, tag: HostTag, result: IoResult) {
        self.counters.count(tag.op, tag.len, result.is_ok());
        match result {
            Ok(()) => self.end(tag.user_data, tag.len as i64, Code::None, false),
            Err(e) => self.end(tag.user_data, -i64::from(e.errno), e.code, false),
        }
    }

    fn end(&self, user_data: u64, res: i64, code: Code, more: bool) {
        self.push_done(user_data, res, code, more);
        self.leave(1);
    }

    fn push_done(&self, user_data: u64, res: i64, code: Code, more: bool) {
        self.done.lock().push_back(Cqe { user_data, res, code, more });
    }

    fn pop_done(&self, out: &mut Vec<Cqe>, max: usize) -> usize {
        let mut done = self.done.lock();
        let n = max.min(done.len());
        out.extend(done.drain(..n));
        drop(done);
        self.accepted.fetch_sub(n, Ordering::Relaxed);
        n
    }

    fn leave(&self, n: usize) {
        // SeqCst: with the drainer's own accesses, either it sees the lower count or this thread sees the closed gate.
        self.running.fetch_sub(n, Ordering::SeqCst);
        if self.disk.gate_closed() {
            self.disk.request_left();
        }
    }
}

impl HostHook for QueueCore {
    fn finished(&self, tag: HostTag, result: IoResult) {
        self.finish(tag, result);
    }

    fn take_inbox(self: Arc<Self>, driver: &mut Driver) {
        // Acquire: partner of the Release stores beside `inbox`. The plain load keeps the common case free of a locked instruction.
        if !self.inbox_flag.load(Ordering::Acquire) || !self.inbox_flag.swap(false, Ordering::Acquire) {
            return;
        }
        let reqs = std::mem::take(&mut *self.inbox.lock());
        if !reqs.is_empty() {
            self.start(driver, reqs.into_iter());
        }
    }

    fn signal(&self, driver: &mut Driver) {
        if self.has_fd.load(Ordering::Relaxed)
            && self.armed.load(Ordering::Relaxed)
            && !self.done.lock().is_empty()
        {
            driver.engine.notify().wake();
        }
    }

    fn has_inbox(&self) -> bool {
        self.inbox_flag.load(Ordering::Acquire)
    }
}

/// Completes a slow request exactly once, also when its future is dropped or panics.
struct SlowTicket {
    core: Arc<QueueCore>,
    user_data: u64,
    cancel: Arc<Cancel>,
    open: bool,
    /// Whether the request counts for drains.
    counted: bool,
}

impl SlowTicket {
    fn new(core: &Arc<QueueCore>, user_data: u64) -> Self {
        let cancel: Arc<Cancel> = Arc::default();
        core.slow.lock().entry(user_data).or_default().push(cancel.clone());
        Self { core: core.clone(), user_data, cancel, open: true, counted: true }
    }

    fn end_io(&mut self, tag: HostTag, result: IoResult) {
        self.unlist();
        self.core.finish(tag, result);
    }

    fn end(&mut self, r: TaskResult) {
        self.unlist();
        self.core.push_done(self.user_data, r.res, r.code, r.more);
        if self.counted {
            self.core.leave(1);
        }
    }

    fn unlist(&mut self) {
        self.open = false;
        let mut slow = self.core.slow.lock();
        if let Some(list) = slow.get_mut(&self.user_data) {
            list.retain(|c| !Arc::ptr_eq(c, &self.cancel));
            if list.is_empty() {
                slow.remove(&self.user_data);
            }
        }
    }
}

impl Drop for SlowTicket {
    fn drop(&mut self) {
        if self.open {
            self.end(IoError::panicked().into());
        }
    }
}
