//! The node over a host backend.

use super::adapt::Work;
use super::gate::Gate;
use super::token::{Answer, NewIo, Pending, Shared};
use super::{Concurrency, HostBackend, HostIo, HostLimits};
use crate::error::{Code, Error, IoError, IoResult, Result};
use crate::inflight::{Config, Entry, InflightList};
use crate::io::align::Permits;
use crate::limits::BATCH_LEN;
use crate::node::{Edge, Extent, Growth, Limits, Node, NodeFuture, Plan, fixed_size};
use crate::options::Options;
use crate::queue::{Cx, Env};
use crate::request::{Buffers, Class, Flags, Op, ReqRef, Request};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use crate::sync::{Arc, Mutex};
use crate::units::ByteRange;
use arc_swap::ArcSwap;
use once_cell::sync::OnceCell;
use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// How the engine treats a backend.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostOptions {
    /// How many operations at once.
    pub concurrency: Concurrency,
    /// Milliseconds after which an operation is cancelled and fails with ETIMEDOUT; 0 is never. Live property `timeout-ms`.
    pub timeout_ms: u64,
}

/// A leaf over a [`HostBackend`].
pub struct HostNode {
    shared: Arc<Shared>,
    limits: ArcSwap<HostLimits>,
    gate: Arc<Gate>,
    options: HostOptions,
    timeout_ms: AtomicU64,
    /// A call into the backend panicked.
    broken: AtomicBool,
    /// Writes that are running, while the backend wants alignment: a read-modify-write must not put back old neighbours of
    /// another write (architecture.md, section 3).
    writes: Arc<InflightList>,
    zeros: OnceCell<Buffers>,
    pub(super) bounces: Permits,
    last_error: Mutex<Option<String>>,
}

/// Kinds of entries in `writes`.
const WHOLE: u8 = 0;
const MODIFY: u8 = 1;

/// Bytes of zeros kept; longer writes of zeros repeat them.
const ZEROS_LEN: usize = 64 << 10;

impl HostNode {
    /// A node over `backend`. Fails if its limits make no sense.
    pub fn new(env: &Arc<Env>, backend: Arc<dyn HostBackend>, options: HostOptions) -> Result<Arc<Self>> {
        let limits = checked(backend.limits())?;
        Ok(Arc::new(Self {
            shared: Shared::new(env.clone(), backend),
            limits: ArcSwap::from_pointee(limits),
            gate: Gate::new(options.concurrency),
            timeout_ms: AtomicU64::new(options.timeout_ms),
            options,
            broken: AtomicBool::new(false),
            writes: InflightList::new(Config {
                shard_bytes_log2: BATCH_LEN.ilog2(),
                shards_log2: 6,
                // Whole writes pass each other; a read-modify-write excludes every other write.
                conflicts: [1 << MODIFY, 1 << WHOLE | 1 << MODIFY, 0, 0, 0, 0, 0, 0],
            }),
            zeros: OnceCell::new(),
            bounces: Permits::default(),
            last_error: Mutex::default(),
        }))
    }

    /// The backend's size or limits have changed: asks for them again. Returns the new size. On error the old limits stay.
    /// Alignment is fixed while the node lives.
    pub fn resized(&self) -> Result<u64> {
        let new = checked(self.shared.backend.limits())?;
        let old = self.limits.load();
        if new.limits.request_align != old.limits.request_align {
            return Err(Error::invalid("a host backend cannot change its request alignment"));
        }
        let size = new.limits.size;
        self.limits.store(Arc::new(new));
        Ok(size)
    }

    /// Operations submitted and not completed.
    pub fn in_flight(&self) -> usize {
        self.shared.running()
    }

    async fn run(&self, cx: &Cx, req: Request) -> IoResult {
        let limits = **self.limits.load();
        let work = Work { node: self, cx, limits, flags: req.flags, class: req.class };
        let (op, range) = (req.op, req.range);
        let result = work.run(op, range, req.bufs).await;
        if let Err(e) = result
            && e.code != Code::Cancelled
        {
            *self.last_error.lock() =
                Some(format!("{} of {} bytes at {} failed: {e}", op.name(), range.len, range.offset));
        }
        result
    }

    /// Waits for a turn, then one operation of the backend to its completion.
    pub(super) async fn call(&self, cx: &Cx, mut new: NewIo) -> IoResult<Answer> {
        new.permit = self.gate.enter(cx).await?;
        if cx.is_cancelled() {
            return Err(IoError::cancelled());
        }
        if self.broken.load(Relaxed) {
            return Err(IoError::panicked());
        }
        let (io, pending) = HostIo::new(&self.shared, new);
        self.guarded(|backend| backend.submit(io))?;
        let timeout = match self.timeout_ms.load(Relaxed) {
            0 => None,
            ms => Some(cx.now().after(Duration::from_millis(ms))),
        };
        match cx.cancellable(cx.until(timeout, answer(&pending))).await {
            Ok(Some(result)) => result,
            Ok(None) => match self.cancel(&pending).await {
                Err(e) if e.code == Code::Cancelled => Err(IoError::os(libc::ETIMEDOUT)),
                result => result,
            },
            Err(_) => self.cancel(&pending).await,
        }
    }

    /// Asks the backend to end an operation, and waits until it has: its memory is in use until then.
    async fn cancel(&self, pending: &Pending) -> IoResult<Answer> {
        if let Some(io) = pending.io() {
            // A panic here breaks the node, but the operation is still the backend's to complete.
            let _ = self.guarded(|backend| backend.cancel(&io));
        }
        answer(pending).await
    }

    /// Calls the backend.
    fn guarded<T>(&self, call: impl FnOnce(&dyn HostBackend) -> T) -> IoResult<T> {
        let call = || Env::without_blocking(|| call(&*self.shared.backend));
        catch_unwind(AssertUnwindSafe(call)).map_err(|_| {
            self.broken.store(true, Relaxed);
            *self.last_error.lock() = Some("the backend panicked".to_owned());
            IoError::panicked()
        })
    }

    /// `len` zero bytes, the same few over and over.
    pub(super) fn zeros(&self, len: u64) -> Buffers {
        let some = self.zeros.get_or_init(|| Buffers::alloc(ZEROS_LEN, 4096));
        let mut bufs = Buffers::new();
        while (bufs.len() as u64) < len {
            let n = (len - bufs.len() as u64).min(ZEROS_LEN as u64);
            bufs.append(some.slice(0, n as usize));
        }
        bufs
    }

    /// An entry for a write of `range` that is (`modify`) or is not a read-modify-write.
    pub(super) async fn enter(&self, cx: &Cx, range: ByteRange, modify: bool) -> IoResult<Arc<Entry>> {
        let acquire = self.writes.acquire(range, if modify { MODIFY } else { WHOLE });
        Ok(Arc::new(cx.waiting(acquire).await?))
    }

    pub(super) fn log(&self, text: &str) {
        self.shared.env.log(0, "host", text);
    }
}

async fn answer(pending: &Pending) -> IoResult<Answer> {
    std::future::poll_fn(|context| pending.poll(context)).await
}

/// Limits that the rest can rely on.
fn checked(mut host: HostLimits) -> Result<HostLimits> {
    let l = &mut host.limits;
    let refuse = |text: String| Err(Error::invalid(format!("host backend: {text}")));
    for (name, value) in [
        ("request_align", &mut l.request_align),
        ("memory_align", &mut l.memory_align),
        ("discard_align", &mut l.discard_align),
    ] {
        *value = (*value).max(1);
        if !value.is_power_of_two() || u64::from(*value) > BATCH_LEN {
            return refuse(format!("{name} {value} is not a power of two up to {BATCH_LEN}"));
        }
    }
    let unit = l.request_align.max(l.memory_align);
    if l.max_transfer > 0 && l.max_transfer < unit {
        return refuse(format!("max_transfer {} is less than the alignment {unit}", l.max_transfer));
    }
    if l.size > i64::MAX as u64 {
        return refuse(format!("size {} is larger than a disk can be", l.size));
    }
    if !l.size.is_multiple_of(l.request_align.into()) {
        return refuse(format!("size {} is not a multiple of request_align {}", l.size, l.request_align));
    }
    if l.max_iov == 0 {
        l.max_iov = Limits::plain(0).max_iov;
    }
    Ok(host)
}

impl Node for HostNode {
    fn driver(&self) -> &'static str {
        "host"
    }

    fn limits(&self) -> Limits {
        self.limits.load().limits
    }

    fn children(&self) -> Vec<(&'static str, &Edge)> {
        Vec::new()
    }

    fn plan(&self, req: ReqRef<'_>) -> Plan {
        match req.op {
            Op::Read | Op::Write | Op::WriteZeroes | Op::Discard | Op::Flush => Plan::Slow,
        }
    }

    fn execute<'a>(&'a self, cx: &'a Cx, req: Request) -> NodeFuture<'a, IoResult> {
        Box::pin(self.run(cx, req))
    }

    fn block_status<'a>(&'a self, cx: &'a Cx, range: ByteRange) -> NodeFuture<'a, IoResult<Extent>> {
        Box::pin(async move {
            let limits = **self.limits.load();
            let work = Work { node: self, cx, limits, flags: Flags::empty(), class: Class::Guest };
            work.status(range).await
        })
    }

    fn resize<'a>(&'a self, _cx: &'a Cx, _size: u64, _growth: Growth) -> NodeFuture<'a, IoResult> {
        fixed_size()
    }

    /// Waits for the operations whose futures are gone.
    fn settle<'a>(&'a self, cx: &'a Cx) -> NodeFuture<'a, IoResult> {
        Box::pin(async move { cx.waiting(self.shared.wait_idle()).await })
    }

    fn set(&self, key: &str, value: &str) -> Result<()> {
        if key != "timeout-ms" {
            return Err(Error::invalid(format!("driver 'host' has no live option '{key}'")));
        }
        let mut options = Options::empty();
        options.insert(key, value)?;
        self.timeout_ms.store(options.require_u64(key)?, Relaxed);
        Ok(())
    }

    fn get(&self, key: &str) -> Option<String> {
        match key {
            "timeout-ms" => Some(self.timeout_ms.load(Relaxed).to_string()),
            "in-flight" => Some(self.in_flight().to_string()),
            "concurrency" => Some(
                match self.options.concurrency {
                    Concurrency::Serial => "serial",
                    Concurrency::PerQueue => "per-queue",
                    Concurrency::Parallel => "parallel",
                }
                .to_owned(),
            ),
            _ => None,
        }
    }

    fn last_error(&self) -> Option<String> {
        self.last_error.lock().clone()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for HostNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostNode")
            .field("in_flight", &self.in_flight())
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}
