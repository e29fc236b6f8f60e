//! The glue: the cache as a node of the graph.

use super::config::{CacheOptions, PROPS};
use super::loss::LossHandler;
use super::read::ReadPlan;
use super::store::Store;
use crate::error::{Code, Error, IoError, IoResult, Result};
use crate::graph::OpenCx;
use crate::node::{Edge, Extent, Growth, Limits, Node, NodeFuture, Plan, Reservation, fixed_size};
use crate::options::Options;
use crate::queue::{Cx, Env};
use crate::report::{LostRange, Report};
use crate::request::{Class, Op, ReqRef, Request};
use crate::stats::{HistSnapshot, Stats};
use crate::sync::Arc;
use crate::sync::atomic::{AtomicBool, Ordering::Relaxed};
use crate::units::ByteRange;
use serde_json::Value;
use std::any::Any;
use std::fmt;

/// A write-back cache in memory; see the module text.
pub struct RamCache {
    inner: Inner,
    forced: AtomicBool,
}

enum Inner {
    /// Capacity 0.
    Through(Edge),
    Cache(Arc<Store>),
}

impl RamCache {
    /// A cache over `file`. `name` is what events and reports call it. `spill` is the node that holds the spill file, if there is one.
    /// Refuses options that cannot work together and a capacity that the context's RAM budget cannot guarantee a share of.
    pub fn new(
        env: &Arc<Env>,
        name: &str,
        file: Edge,
        spill: Option<Edge>,
        options: CacheOptions,
    ) -> Result<Arc<Self>> {
        options.check(spill.is_some())?;
        let inner = match options.capacity {
            0 => Inner::Through(file),
            _ => Inner::Cache(Store::new(env, name, file, spill, options)?),
        };
        Ok(Arc::new(Self { inner, forced: AtomicBool::new(false) }))
    }

    /// Driver entry.
    pub fn open(cx: &OpenCx<'_>, mut options: Options) -> Result<Arc<dyn Node>> {
        let is_dir = options.peek_str("spill").is_some_and(|s| s.contains('/'));
        let dir = if is_dir { options.take_str("spill")? } else { None };
        let node = if is_dir { None } else { cx.child(&mut options, "spill")? };
        let parsed = CacheOptions::take(&mut options, dir.is_some() || node.is_some())?;
        let file = cx.require_child(&mut options, "file")?;
        options.finish_for(&PROPS)?;
        let spill = match dir {
            Some(dir) if parsed.capacity > 0 => Some(Edge::to_node(
                cx.unlinked_file(&dir, parsed.spill_quota).map_err(|e| spill_error(&dir, e))?,
            )),
            Some(_) => None,
            None => node,
        };
        let parsed = if parsed.capacity == 0 {
            CacheOptions { capacity: 0, ..CacheOptions::default() }
        } else {
            parsed
        };
        Ok(Self::new(cx.env(), cx.name(), file, spill, parsed)?)
    }

    /// Most bytes that one reservation is sure to get at once (S44), and so the largest granule that can be parked here; `u64::MAX` with
    /// capacity 0.
    pub fn batch(&self) -> u64 {
        self.store().map_or(u64::MAX, |s| s.batch())
    }

    /// A reservation without waiting, for reading ahead: only below the high mark, and only if nobody waits (S45).
    pub fn try_reserve(&self, len: u64) -> Option<Reservation> {
        match self.store() {
            None => Some(Reservation::unbounded(len)),
            Some(s) => s.try_reserve(len),
        }
    }

    /// Whether everything has reached the file: nothing in memory or in the spill file, no write under way. Lost ranges do not count.
    pub fn is_empty(&self) -> bool {
        self.store().is_none_or(|s| {
            let work = s.work.lock();
            work.index.is_clean() && work.index.is_quiet()
        })
    }

    /// Drains without delay, in the background class, until this is taken back.
    pub fn set_forced_drain(&self, on: bool) {
        let Some(store) = self.store() else { return };
        if self.forced.swap(on, Relaxed) == on {
            return;
        }
        if on {
            std::mem::forget(store.hurry());
        } else {
            store.hurry_less();
        }
    }

    /// Throws everything away at once and refuses everything from now on with `error`; the first call counts. Never waits: buffers of
    /// writes under way are freed when those end (S29, S35). Waiters are let go. [`Node::abandon`] does the same, but the cache can be used again.
    pub fn close(&self, error: IoError) {
        if let Some(store) = self.store() {
            store.close(error);
        }
    }

    /// Who takes over losses (S50): told of each range that is given up. Without a handler nothing is given up that memory still holds.
    /// Called on a worker, without a lock; must not block.
    pub fn on_lost(&self, handler: Option<LossHandler>) {
        if let Some(store) = self.store() {
            store.losses.set_handler(handler);
        }
    }

    /// Every range lost so far, merged.
    pub fn lost_ranges(&self) -> Vec<LostRange> {
        self.store().map_or_else(Vec::new, |s| s.losses.lost.all())
    }

    /// The first error of the file or the spill file.
    pub fn first_error(&self) -> Option<Report> {
        self.store().and_then(|s| s.losses.log.first())
    }

    /// The last one.
    pub fn last_report(&self) -> Option<Report> {
        self.store().and_then(|s| s.losses.log.last())
    }

    /// Errors as in section 5: `first`, `last`, `counts`.
    pub fn errors_json(&self) -> Value {
        self.store().map_or(Value::Null, |s| s.losses.log.to_json())
    }

    fn store(&self) -> Option<&Arc<Store>> {
        match &self.inner {
            Inner::Through(_) => None,
            Inner::Cache(store) => Some(store),
        }
    }

    fn file(&self) -> &Edge {
        match &self.inner {
            Inner::Through(file) => file,
            Inner::Cache(store) => &store.file,
        }
    }
}

impl Node for RamCache {
    fn driver(&self) -> &'static str {
        "ram-cache"
    }

    fn limits(&self) -> Limits {
        let below = self.file().get().limits();
        match self.inner {
            Inner::Through(_) => below,
            // Any alignment is fast here; what drain makes of it is its own affair.
            Inner::Cache(_) => {
                Limits { request_align: 1, memory_align: 1, max_transfer: 0, fast_zeroes: true, ..below }
            }
        }
    }

    fn children(&self) -> Vec<(&'static str, &Edge)> {
        let mut children = vec![("file", self.file())];
        if let Some(spill) = self.store().and_then(|s| s.spill.as_ref()) {
            children.push(("spill", &spill.edge));
        }
        children
    }

    fn plan(&self, req: ReqRef<'_>) -> Plan {
        let store = match &self.inner {
            Inner::Through(file) => return file.get().plan(req),
            Inner::Cache(store) => store,
        };
        match req.op {
            Op::Read => match store.plan_read(req) {
                ReadPlan::File => store.file.get().plan(req),
                ReadPlan::Done(result) => Plan::Done(result),
                ReadPlan::Slow => Plan::Slow,
            },
            Op::Write => store.plan_write(req),
            Op::WriteZeroes => store.plan_zeroes(req),
            Op::Discard | Op::Flush => Plan::Slow,
        }
    }

    fn execute<'a>(&'a self, cx: &'a Cx, req: Request) -> NodeFuture<'a, IoResult> {
        let store = match &self.inner {
            Inner::Through(file) => {
                let file = file.node();
                return Box::pin(async move { cx.run(&*file, req).await });
            }
            Inner::Cache(store) => store,
        };
        match req.op {
            Op::Read => Box::pin(store.read(cx, req)),
            Op::Write => Box::pin(store.write(cx, req)),
            Op::WriteZeroes => Box::pin(store.zeroes(cx, req)),
            Op::Discard => Box::pin(store.discard(cx, req)),
            Op::Flush => Box::pin(store.flush(cx, req.class)),
        }
    }

    fn block_status<'a>(&'a self, cx: &'a Cx, range: ByteRange) -> NodeFuture<'a, IoResult<Extent>> {
        match &self.inner {
            Inner::Through(file) => {
                let file = file.node();
                Box::pin(async move { file.block_status(cx, range).await })
            }
            Inner::Cache(store) => Box::pin(store.status(cx, range)),
        }
    }

    fn resize<'a>(&'a self, _cx: &'a Cx, _size: u64, _growth: Growth) -> NodeFuture<'a, IoResult> {
        fixed_size()
    }

    fn settle<'a>(&'a self, cx: &'a Cx) -> NodeFuture<'a, IoResult> {
        Box::pin(async move {
            match self.store() {
                Some(store) => store.drain_all(cx).await,
                None => Ok(()),
            }
        })
    }

    fn reserve<'a>(&'a self, cx: &'a Cx, len: u64, class: Class) -> NodeFuture<'a, IoResult<Reservation>> {
        match &self.inner {
            Inner::Through(file) => {
                let file = file.node();
                Box::pin(async move { file.reserve(cx, len, class).await })
            }
            Inner::Cache(store) => Box::pin(store.reserve(cx, len, class)),
        }
    }

    fn abandon(&self) {
        if let Some(store) = self.store() {
            store.abandon();
        }
    }

    fn set(&self, key: &str, value: &str) -> Result<()> {
        match self.store() {
            Some(store) => {
                let old = store.live.options();
                let new = store.live.set(key, value)?;
                store.apply(&new).inspect_err(|_| store.live.put_back(old))
            }
            None => Err(Error::invalid(format!("'{key}' cannot be set: the cache has a capacity of 0"))),
        }
    }

    fn get(&self, key: &str) -> Option<String> {
        let Some(store) = self.store() else {
            return (key == "capacity").then(|| "0".to_owned());
        };
        let number = match key {
            "batch" => store.batch(),
            "used" => store.used(),
            "peak" => store.account.space.peak(),
            "waiters" => store.account.space.waiters() as u64,
            "spilled" => store.spill.as_ref().map_or(0, |s| s.used()),
            "zero-markers" => store.work.lock().index.totals().zero_markers as u64,
            "lost" => store.losses.lost.bytes(),
            _ => return store.live.get(key),
        };
        Some(number.to_string())
    }

    fn stats(&self) -> Option<Stats> {
        let store = self.store()?;
        let now = store.env.runtime.clock.now();
        let space = &store.account.space;
        let left = store.account.meter.as_ref().map_or(u64::MAX, |m| m.time_to_full_ms(now, space.used()));
        Some(Stats {
            cache_used: store.used(),
            cache_peak: space.peak(),
            cache_waiters: space.waiters() as u64,
            cache_spilled: store.spill.as_ref().map_or(0, |s| s.used()),
            cache_stored: store.counters.stored.load(Relaxed),
            cache_writes: store.counters.writes.load(Relaxed),
            lost_bytes: store.losses.lost.bytes(),
            time_to_full_ms: left,
            ..Stats::default()
        })
    }

    fn hist(&self, which: &str) -> Option<HistSnapshot> {
        match (which, self.store()) {
            ("space", Some(store)) => Some(store.space_wait.snapshot()),
            _ => None,
        }
    }

    fn last_error(&self) -> Option<String> {
        let last = self.last_report()?;
        Some(format!(
            "{} of {} bytes at {} on the {} failed: {}",
            last.op.name(),
            last.len,
            last.offset,
            last.side.name(),
            last.error
        ))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for RamCache {
    fn drop(&mut self) {
        let Some(store) = self.store() else { return };
        // What has been thrown away on purpose may still be on its way to the file, and is not lost.
        let holds_data = store.work.lock().index.holds_data();
        if holds_data && store.broken().is_none() {
            let text = format!("{}: closed without having been settled, data is lost", store.name);
            store.env.log(0, "ram-cache", &text);
        }
        store.close(IoError::new(libc::ECANCELED, Code::Cancelled));
    }
}

impl fmt::Debug for RamCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.inner {
            Inner::Through(file) => f.debug_struct("RamCache").field("file", file).finish(),
            Inner::Cache(store) => {
                f.debug_struct("RamCache").field("store", store).field("file", &store.file).finish()
            }
        }
    }
}

fn spill_error(dir: &str, error: Error) -> Error {
    let text = format!("option 'spill': cannot make a file in '{dir}': {}", error.full_text());
    Error::new(error.errno(), error.code(), text)
}
