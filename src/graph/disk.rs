//! The stable, guest-facing root.

use super::counters::{IoCounters, IoTotals};
use crate::error::{Code, IoError, IoResult, Result};
use crate::node::{Edge, Extent, Node, Vertex};
use crate::queue::{Cx, Env};
use crate::request::{Buffers, Flags, Request};
use crate::sync::atomic::{AtomicUsize, Ordering, fence};
use crate::sync::{Arc, Mutex, Weak};
use crate::units::ByteRange;
use arc_swap::ArcSwapOption;
use event_listener::Event;
use std::fmt;

/// What a guest device is attached to: a fixed root over a graph that changes. All methods may be called from any thread.
pub struct Disk {
    name: String,
    env: Arc<Env>,
    root: ArcSwapOption<Edge>,
    /// Number of drains under way; the gate is closed while it is not 0.
    gate: AtomicUsize,
    opened: Event,
    /// Requests that entered without a queue (blocking calls).
    direct: AtomicUsize,
    left: Event,
    queues: Mutex<Vec<Weak<crate::queue::QueueCore>>>,
    past: Mutex<IoTotals>,
    direct_counters: IoCounters,
}

/// A request that counts for drains; made by [`Disk::enter`].
#[derive(Debug)]
pub struct DiskPass<'a>(&'a Disk);

impl Disk {
    pub(super) fn new(name: String, env: Arc<Env>) -> Arc<Self> {
        Arc::new(Self {
            name,
            env,
            root: ArcSwapOption::empty(),
            gate: AtomicUsize::new(0),
            opened: Event::new(),
            direct: AtomicUsize::new(0),
            left: Event::new(),
            queues: Mutex::default(),
            past: Mutex::default(),
            direct_counters: IoCounters::default(),
        })
    }

    /// The disk's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The environment.
    pub fn env(&self) -> &Arc<Env> {
        &self.env
    }

    /// The place the disk is attached to.
    pub fn root(&self) -> Option<Arc<Vertex>> {
        self.root.load().as_ref().and_then(|e| e.vertex().cloned())
    }

    /// The node that requests enter now, filters included.
    pub fn top(&self) -> Option<Arc<dyn Node>> {
        self.root.load().as_ref().map(|e| e.node())
    }

    /// Length in bytes; 0 without medium.
    pub fn size(&self) -> u64 {
        self.top().map_or(0, |n| n.limits().size)
    }

    /// Counts the caller for drains, waiting while one is under way (S70).
    pub async fn enter(&self) -> DiskPass<'_> {
        loop {
            self.direct.fetch_add(1, Ordering::Relaxed);
            // S70: count first, then look. Partner: the fence in `close_gate`.
            fence(Ordering::SeqCst);
            if !self.gate_closed() {
                return DiskPass(self);
            }
            drop(DiskPass(self));
            let listener = self.opened.listen();
            if self.gate_closed() {
                listener.await;
            }
        }
    }

    /// Runs one request to its end, entering and leaving.
    pub async fn run(&self, cx: &Cx, req: Request) -> IoResult {
        let (op, len) = (req.op, req.range.len);
        let pass = self.enter().await;
        let result = match self.top() {
            None => Err(IoError::new(libc::ENOMEDIUM, Code::NoMedium)),
            Some(top) if op.is_write() && top.limits().read_only => Err(IoError::read_only()),
            Some(_) if len == 0 && op != crate::request::Op::Flush => Ok(()),
            Some(top) => cx.run(&*top, req).await,
        };
        drop(pass);
        self.direct_counters.count(op, len, result.is_ok());
        result
    }

    /// Status of `range`, one extent.
    pub async fn status(&self, cx: &Cx, range: ByteRange) -> IoResult<Extent> {
        let _pass = self.enter().await;
        let top = self.top().ok_or(IoError::new(libc::ENOMEDIUM, Code::NoMedium))?;
        cx.status(&*top, range).await
    }

    /// Blocking read. Not for callbacks or engine threads (EDEADLK).
    pub fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let bufs = Buffers::alloc(buf.len(), 4096);
        self.block(Request::read(offset, bufs.clone()))?;
        bufs.copy_to_slice(buf);
        Ok(())
    }

    /// Blocking write.
    pub fn write(&self, offset: u64, buf: &[u8]) -> Result<()> {
        self.block(Request::write(offset, Buffers::from_bytes(buf)))
    }

    /// Blocking write-zeroes.
    pub fn write_zeroes(&self, range: ByteRange, flags: Flags) -> Result<()> {
        self.block(Request::write_zeroes(range, flags))
    }

    /// Blocking flush.
    pub fn flush(&self) -> Result<()> {
        self.block(Request::flush())
    }

    /// Runs one request on the calling thread.
    pub fn block(&self, req: Request) -> Result<()> {
        self.block_for(req, None)
    }

    /// Runs one request on the calling thread. After `limit` it is cancelled: if it still waits then (for a limit, for space) it ends with
    /// ECANCELED; an operation that has been handed to the kernel is waited for, since it uses the caller's memory (C7).
    pub fn block_for(&self, req: Request, limit: Option<std::time::Duration>) -> Result<()> {
        let (op, range) = (req.op, req.range);
        let run = |cx: Cx| async move {
            let Some(limit) = limit else { return self.run(&cx, req).await };
            let (cx, cancel) = cx.with_new_cancel();
            let mut request = std::pin::pin!(self.run(&cx, req));
            let at = cx.now().after(limit);
            match cx.until(Some(at), request.as_mut()).await {
                Some(result) => result,
                None => {
                    cancel.cancel();
                    request.await
                }
            }
        };
        self.env.block_on(run)?.map_err(|e| {
            let text = format!(
                "{} of {} bytes at {} on disk '{}' failed",
                op.name(),
                range.len,
                range.offset,
                self.name
            );
            crate::error::Error::io(e, text)
        })
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        let queues: usize = self.queue_list().iter().map(|q| q.running()).sum();
        queues + self.direct.load(Ordering::SeqCst)
    }

    /// What was done so far.
    pub fn totals(&self) -> IoTotals {
        let mut sum = *self.past.lock();
        sum += self.direct_counters.totals();
        for q in self.queue_list() {
            sum += q.counters.totals();
        }
        sum
    }

    pub(crate) fn gate_closed(&self) -> bool {
        self.gate.load(Ordering::SeqCst) > 0
    }

    pub(crate) fn request_left(&self) {
        self.left.notify(usize::MAX);
    }

    pub(crate) fn add_queue(&self, queue: &Arc<crate::queue::QueueCore>) {
        self.queues.lock().push(Arc::downgrade(queue));
    }

    pub(crate) fn remove_queue(&self, queue: &crate::queue::QueueCore) {
        *self.past.lock() += queue.counters.totals();
        self.queues.lock().retain(|q| !std::ptr::eq(q.as_ptr(), queue));
        self.request_left();
    }

    pub(super) fn set_root(&self, root: Option<Arc<Vertex>>) {
        self.root.store(root.map(|v| Arc::new(Edge::to_vertex(v))));
    }

    /// Closes the gate: requests that come from now on are parked.
    pub(super) fn close_gate(&self) {
        self.gate.fetch_add(1, Ordering::SeqCst);
        // Partner: the fences in `QueueCore::start` and `enter`.
        fence(Ordering::SeqCst);
    }

    /// Waits until the requests that were running have ended.
    pub(super) async fn wait_empty(&self) {
        loop {
            let listener = self.left.listen();
            if self.in_flight() == 0 {
                return;
            }
            listener.await;
        }
    }

    /// Opens the gate and starts what was parked.
    pub(super) fn open_gate(&self) {
        if self.gate.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.opened.notify(usize::MAX);
            self.queue_list().iter().for_each(|q| q.unpark());
        }
    }

    fn queue_list(&self) -> Vec<Arc<crate::queue::QueueCore>> {
        self.queues.lock().iter().filter_map(Weak::upgrade).collect()
    }
}

impl Drop for DiskPass<'_> {
    fn drop(&mut self) {
        self.0.direct.fetch_sub(1, Ordering::SeqCst);
        if self.0.gate_closed() {
            self.0.request_left();
        }
    }
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Disk({})", self.name)
    }
}
