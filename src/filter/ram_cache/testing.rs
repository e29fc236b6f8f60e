//! What the tests of the cache share: a node below that holds, fails and remembers, and a cache over it in virtual time.

use super::{CacheOptions, RamCache};
use crate::error::{IoError, IoResult};
use crate::filter::testing::{Started, start};
use crate::node::{Edge, Extent, Growth, Limits, Node, NodeFuture, Plan, Reservation, fixed_size};
use crate::queue::virtual_env::{VirtualClock, virtual_env_with_log};
use crate::queue::{Cx, Env};
use crate::request::{Buffers, Class, Flags, Op, ReqRef, Request};
use crate::rt::Clock;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use crate::sync::{Arc, Mutex};
use crate::units::ByteRange;
use event_listener::Event;
use std::any::Any;
use std::future::Future;
use std::time::Duration;

pub(super) const K: u64 = 1024;
pub(super) const M: u64 = 1 << 20;

/// A request as it arrived below.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) op: Op,
    pub(super) range: ByteRange,
    pub(super) class: Class,
    pub(super) flags: Flags,
    /// Addresses of the segments.
    pub(super) memory: Vec<usize>,
}

/// A node in memory that does what the test says.
#[derive(Debug)]
pub(super) struct Below {
    data: Mutex<Vec<u8>>,
    limits: Mutex<Limits>,
    seen: Mutex<Vec<Seen>>,
    /// Requests of these operations wait until they are let go.
    held: Mutex<Vec<Op>>,
    let_go: Event,
    waiting: AtomicUsize,
    /// Held requests that may go on although others stay.
    passes: AtomicUsize,
    /// Operation, range, how many more fail, errno.
    failing: Mutex<Vec<(Op, ByteRange, usize, i32)>>,
    /// Data of writes is checked to be whole sectors of one version.
    pub(super) most_at_once: AtomicUsize,
    running: AtomicUsize,
    answers_in_plan: AtomicBool,
}

impl Below {
    pub(super) fn new(size: u64) -> Arc<Self> {
        Arc::new(Self {
            data: Mutex::new(vec![0xEE; size as usize]),
            limits: Mutex::new(Limits::plain(size)),
            seen: Mutex::default(),
            held: Mutex::default(),
            let_go: Event::new(),
            waiting: AtomicUsize::new(0),
            passes: AtomicUsize::new(0),
            failing: Mutex::default(),
            most_at_once: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            answers_in_plan: AtomicBool::new(false),
        })
    }

    pub(super) fn set_limits(&self, change: impl FnOnce(&mut Limits)) {
        change(&mut self.limits.lock());
    }

    pub(super) fn answer_in_plan(&self) {
        self.answers_in_plan.store(true, SeqCst);
    }

    pub(super) fn hold(&self, op: Op) {
        self.held.lock().push(op);
    }

    pub(super) fn release(&self, op: Op) {
        self.held.lock().retain(|o| *o != op);
        self.let_go.notify(usize::MAX);
    }

    /// Lets one held request go on.
    pub(super) fn pass(&self) {
        self.passes.fetch_add(1, SeqCst);
        self.let_go.notify(usize::MAX);
    }

    /// What comes from now on is not held; what is held stays held until it is released.
    pub(super) fn pass_new(&self) {
        self.held.lock().clear();
    }

    /// Requests that are held now.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(SeqCst)
    }

    /// The next `times` requests of this kind that touch `range` fail.
    pub(super) fn fail(&self, op: Op, range: ByteRange, times: usize, errno: i32) {
        self.failing.lock().push((op, range, times, errno));
    }

    pub(super) fn recover(&self) {
        self.failing.lock().clear();
    }

    pub(super) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().clone()
    }

    pub(super) fn ranges(&self, op: Op) -> Vec<ByteRange> {
        self.seen.lock().iter().filter(|s| s.op == op).map(|s| s.range).collect()
    }

    pub(super) fn bytes(&self, offset: u64, len: u64) -> Vec<u8> {
        self.data.lock()[offset as usize..(offset + len) as usize].to_vec()
    }

    fn note(&self, req: &ReqRef<'_>) {
        self.seen.lock().push(Seen {
            op: req.op,
            range: req.range,
            class: req.class,
            flags: req.flags,
            memory: req.bufs.segments().iter().map(|s| s.as_ptr() as usize).collect(),
        });
    }

    fn carry_out(&self, req: &ReqRef<'_>) -> IoResult {
        for f in self.failing.lock().iter_mut().filter(|f| f.0 == req.op && f.2 > 0) {
            if f.1.overlaps(req.range) || req.op == Op::Flush {
                f.2 -= 1;
                return Err(IoError::os(f.3));
            }
        }
        let mut data = self.data.lock();
        let place = &mut data[req.range.offset as usize..req.range.end() as usize];
        match req.op {
            Op::Read => req.bufs.copy_from_slice(place),
            Op::Write => req.bufs.copy_to_slice(place),
            Op::WriteZeroes => place.fill(0),
            Op::Discard => place.fill(0xDD),
            Op::Flush => {}
        }
        Ok(())
    }

    fn is_held(&self, op: Op) -> bool {
        self.held.lock().contains(&op)
    }
}

impl Node for Below {
    fn driver(&self) -> &'static str {
        "below"
    }

    fn limits(&self) -> Limits {
        *self.limits.lock()
    }

    fn children(&self) -> Vec<(&'static str, &Edge)> {
        Vec::new()
    }

    fn plan(&self, req: ReqRef<'_>) -> Plan {
        if !self.answers_in_plan.load(SeqCst) || self.is_held(req.op) {
            return Plan::Slow;
        }
        self.note(&req);
        Plan::Done(self.carry_out(&req))
    }

    fn execute<'a>(&'a self, _cx: &'a Cx, req: Request) -> NodeFuture<'a, IoResult> {
        Box::pin(async move {
            self.note(&req.as_ref());
            let n = self.running.fetch_add(1, SeqCst) + 1;
            self.most_at_once.fetch_max(n, SeqCst);
            loop {
                let let_go = self.let_go.listen();
                let pass = |n: usize| n.checked_sub(1);
                if !self.is_held(req.op) || self.passes.fetch_update(SeqCst, SeqCst, pass).is_ok() {
                    break;
                }
                self.waiting.fetch_add(1, SeqCst);
                let_go.await;
                self.waiting.fetch_sub(1, SeqCst);
            }
            self.running.fetch_sub(1, SeqCst);
            self.carry_out(&req.as_ref())
        })
    }

    fn block_status<'a>(&'a self, _cx: &'a Cx, range: ByteRange) -> NodeFuture<'a, IoResult<Extent>> {
        Box::pin(async move { Ok(Extent::hole(range.len)) })
    }

    fn resize<'a>(&'a self, _cx: &'a Cx, _size: u64, _growth: Growth) -> NodeFuture<'a, IoResult> {
        fixed_size()
    }

    fn settle<'a>(&'a self, _cx: &'a Cx) -> NodeFuture<'a, IoResult> {
        Box::pin(async { Ok(()) })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// One thread and virtual time: time moves only in `advance` and `until`.
pub(super) struct World {
    pub(super) env: Arc<Env>,
    clock: Arc<VirtualClock>,
    pub(super) cx: Cx,
}

impl World {
    pub(super) fn new() -> Self {
        Self::with_log(None)
    }

    pub(super) fn with_log(log: Option<crate::queue::LogSink>) -> Self {
        let (env, clock) = virtual_env_with_log(1, log);
        env.start(0).expect("starts");
        let cx = env.background().expect("started");
        Self { env, clock, cx }
    }

    pub(super) fn cache(&self, below: &Arc<Below>, options: CacheOptions) -> Arc<RamCache> {
        self.cache_with(below, None, options)
    }

    pub(super) fn cache_with(
        &self,
        below: &Arc<Below>,
        spill: Option<&Arc<Below>>,
        options: CacheOptions,
    ) -> Arc<RamCache> {
        let spill = spill.map(|s| Edge::to_node(s.clone()));
        RamCache::new(&self.env, "cache", Edge::to_node(below.clone()), spill, options).expect("opens")
    }

    /// Runs what can run now.
    pub(super) fn run(&self) {
        for _ in 0..8 {
            self.env.run_once(Some(Duration::ZERO)).expect("driven from here");
        }
    }

    /// Lets time pass.
    pub(super) fn advance(&self, d: Duration) {
        let end = self.clock.now().after(d);
        self.run();
        while self.clock.now() < end {
            self.env.run_once(Some(end.since(self.clock.now()))).expect("driven from here");
        }
        self.run();
    }

    /// Lets time pass until `done`.
    pub(super) fn until(&self, what: &str, mut done: impl FnMut() -> bool) {
        self.run();
        for _ in 0..20_000 {
            if done() {
                return;
            }
            self.env.run_once(Some(Duration::from_secs(1))).expect("driven from here");
        }
        panic!("this did not happen: {what}");
    }

    /// Whether nothing will ever happen by itself any more: no timer, nothing woken.
    pub(super) fn is_idle(&self) -> bool {
        // The watchdog's own timer, if somebody has just waited.
        self.advance(Duration::from_millis(20));
        let before = self.clock.now();
        self.env.run_once(Some(Duration::from_secs(1000))).expect("driven from here");
        // With a timer the clock stops there.
        self.clock.now().since(before) == Duration::from_secs(1000)
    }

    /// Starts a request as a task.
    pub(super) fn start(&self, node: &Arc<RamCache>, req: Request) -> Started {
        self.start_on(&self.cx, node, req)
    }

    pub(super) fn start_on(&self, cx: &Cx, node: &Arc<RamCache>, req: Request) -> Started {
        let (own, node) = (cx.clone(), node.clone());
        start(cx, async move { own.run(&*node, req).await })
    }

    /// Starts anything as a task.
    pub(super) fn spawn(&self, body: impl Future<Output = IoResult> + Send + 'static) -> Started {
        start(&self.cx, body)
    }

    /// Starts a reservation; it comes to stand in the returned place.
    pub(super) fn reserve(&self, node: &Arc<RamCache>, len: u64) -> Reserving {
        self.reserve_on(&self.cx, node, len)
    }

    pub(super) fn reserve_on(&self, cx: &Cx, node: &Arc<RamCache>, len: u64) -> Reserving {
        let place: Reserving = Arc::default();
        let (own, node, theirs) = (cx.clone(), node.clone(), place.clone());
        cx.spawn(async move {
            let result = node.reserve(&own, len, Class::Guest).await;
            *theirs.lock() = Some(result);
        });
        self.run();
        place
    }

    /// A reservation that is there at once.
    pub(super) fn reserved(&self, node: &Arc<RamCache>, len: u64) -> Reservation {
        taken(&self.reserve(node, len)).expect("reserved at once")
    }

    /// Runs a request to its end, letting time pass.
    pub(super) fn finish(&self, node: &Arc<RamCache>, req: Request) -> IoResult {
        let started = self.start(node, req);
        let mut result = None;
        self.until("the end of a request", || {
            result = started.now();
            result.is_some()
        });
        result.expect("just seen")
    }

    /// Writes `len` bytes of `byte` in memory that the cache handed out.
    pub(super) fn write_moved(&self, node: &Arc<RamCache>, offset: u64, len: u64, byte: u8) {
        let bufs = self.reserved(node, len).take(len);
        bufs.fill(byte);
        assert_eq!(self.start_now(node, Request::write(offset, bufs)), Some(Ok(())));
    }

    /// The result of a request that should not have to wait.
    pub(super) fn start_now(&self, node: &Arc<RamCache>, req: Request) -> Option<IoResult> {
        let started = self.start(node, req);
        self.run();
        started.now()
    }

    pub(super) fn read(&self, node: &Arc<RamCache>, offset: u64, len: u64) -> IoResult<Vec<u8>> {
        let bufs = Buffers::alloc(len as usize, 4096);
        self.finish(node, Request::read(offset, bufs.clone())).map(|()| bufs.to_vec())
    }

    pub(super) fn start_settle(&self, node: &Arc<RamCache>) -> Started {
        let (cx, node) = (self.cx.clone(), node.clone());
        self.spawn(async move { node.settle(&cx).await })
    }

    pub(super) fn settle(&self, node: &Arc<RamCache>) -> IoResult {
        let started = self.start_settle(node);
        let mut result = None;
        self.until("the end of settling", || {
            result = started.now();
            result.is_some()
        });
        result.expect("just seen")
    }
}

/// A reservation on its way.
pub(super) type Reserving = Arc<Mutex<Option<IoResult<Reservation>>>>;

/// What came of it; `None` while it waits.
pub(super) fn taken(place: &Reserving) -> Option<Reservation> {
    place.lock().take().map(|r| r.expect("a reservation"))
}

pub(super) fn range(offset: u64, len: u64) -> ByteRange {
    ByteRange { offset, len }
}

/// Options of a small cache: batch 1 MiB, about 7.8 MiB usable.
pub(super) fn small() -> CacheOptions {
    CacheOptions { capacity: 9 * M, ..CacheOptions::default() }
}
