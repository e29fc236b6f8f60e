//! What the tests of jobs share: nodes that do as they are told, and a context in virtual time.

use crate::context::{Context, ContextOptions};
use crate::error::{IoError, IoResult};
use crate::events::EventKind;
use crate::job::{Job, Status};
use crate::node::{Edge, Extent, ExtentFlags, Growth, Limits, Node, NodeFuture, Plan, fixed_size};
use crate::options::Options;
use crate::queue::Cx;
use crate::queue::virtual_env::virtual_env;
use crate::request::{Class, Op, ReqRef, Request};
use crate::rt::Instant;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use crate::sync::{Arc, Mutex};
use crate::units::ByteRange;
use std::any::Any;
use std::time::Duration;

/// A request that has reached a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) op: Op,
    pub(crate) range: ByteRange,
    pub(crate) class: Class,
    pub(crate) at: Instant,
}

/// A node in memory that can be told to hold requests back, to fail them and to take time.
#[derive(Debug)]
pub(crate) struct Store {
    data: Mutex<Vec<u8>>,
    seen: Mutex<Vec<Seen>>,
    failures: Mutex<Vec<(Op, i32, usize)>>,
    held: Mutex<Vec<Op>>,
    released: event_listener::Event,
    waiting: AtomicUsize,
    running: AtomicUsize,
    most_running: AtomicUsize,
    delay: Mutex<Duration>,
    zero_init: AtomicBool,
    read_only: AtomicBool,
    panics: AtomicBool,
    /// Bytes that a lower layer holds, for block status.
    below: Mutex<std::ops::Range<u64>>,
}

impl Store {
    pub(crate) fn new(data: Vec<u8>) -> Arc<Self> {
        Arc::new(Self {
            data: Mutex::new(data),
            seen: Mutex::default(),
            failures: Mutex::default(),
            held: Mutex::default(),
            released: event_listener::Event::new(),
            waiting: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            most_running: AtomicUsize::new(0),
            delay: Mutex::default(),
            zero_init: AtomicBool::new(false),
            read_only: AtomicBool::new(false),
            panics: AtomicBool::new(false),
            below: Mutex::new(0..0),
        })
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.data.lock().clone()
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().clone()
    }

    /// Requests of one kind that have reached the node.
    pub(crate) fn count(&self, op: Op) -> usize {
        self.seen.lock().iter().filter(|s| s.op == op).count()
    }

    /// Makes requests of this kind wait.
    pub(crate) fn hold(&self, op: Op) {
        self.held.lock().push(op);
    }

    /// Lets all held requests go.
    pub(crate) fn let_go(&self) {
        self.held.lock().clear();
        self.released.notify(usize::MAX);
    }

    /// Requests that are held now.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(SeqCst)
    }

    /// Requests that are being carried out now, held ones included.
    pub(crate) fn running(&self) -> usize {
        self.running.load(SeqCst)
    }

    pub(crate) fn most_running(&self) -> usize {
        self.most_running.load(SeqCst)
    }

    /// Fails the next `times` requests of this kind.
    pub(crate) fn fail(&self, op: Op, errno: i32, times: usize) {
        self.failures.lock().push((op, errno, times));
    }

    pub(crate) fn set_delay(&self, delay: Duration) {
        *self.delay.lock() = delay;
    }

    pub(crate) fn set_zero_init(&self) {
        self.zero_init.store(true, SeqCst);
    }

    pub(crate) fn set_read_only(&self) {
        self.read_only.store(true, SeqCst);
    }

    /// The next requests panic.
    pub(crate) fn set_panics(&self) {
        self.panics.store(true, SeqCst);
    }

    /// Reports these bytes as held by the layer below.
    pub(crate) fn set_below(&self, range: std::ops::Range<u64>) {
        *self.below.lock() = range;
    }

    fn fails(&self, op: Op) -> Option<IoError> {
        let mut failures = self.failures.lock();
        let (_, errno, times) = failures.iter_mut().find(|f| f.0 == op && f.2 > 0)?;
        *times -= 1;
        Some(IoError::os(*errno))
    }

    fn carry_out(&self, req: &Request) {
        let mut data = self.data.lock();
        let place = &mut data[req.range.offset as usize..req.range.end() as usize];
        match req.op {
            Op::Read => req.bufs.copy_from_slice(place),
            Op::Write => req.bufs.copy_to_slice(place),
            Op::WriteZeroes | Op::Discard => place.fill(0),
            Op::Flush => {}
        }
    }
}

impl Node for Store {
    fn driver(&self) -> &'static str {
        "store"
    }

    fn limits(&self) -> Limits {
        let mut limits = Limits::plain(self.data.lock().len() as u64);
        limits.zero_init = self.zero_init.load(SeqCst);
        limits.read_only = self.read_only.load(SeqCst);
        limits
    }

    fn children(&self) -> Vec<(&'static str, &Edge)> {
        Vec::new()
    }

    fn plan(&self, _req: ReqRef<'_>) -> Plan {
        Plan::Slow
    }

    fn execute<'a>(&'a self, cx: &'a Cx, req: Request) -> NodeFuture<'a, IoResult> {
        struct Counted<'a>(&'a AtomicUsize);
        impl Drop for Counted<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, SeqCst);
            }
        }
        Box::pin(async move {
            self.seen.lock().push(Seen { op: req.op, range: req.range, class: req.class, at: cx.now() });
            let running = self.running.fetch_add(1, SeqCst) + 1;
            let _running = Counted(&self.running);
            self.most_running.fetch_max(running, SeqCst);
            loop {
                let listener = self.released.listen();
                if !self.held.lock().contains(&req.op) {
                    break;
                }
                self.waiting.fetch_add(1, SeqCst);
                let _waiting = Counted(&self.waiting);
                listener.await;
            }
            assert!(!self.panics.load(SeqCst), "told to panic");
            let delay = *self.delay.lock();
            if !delay.is_zero() {
                cx.sleep_until(cx.now().after(delay)).await;
            }
            match self.fails(req.op) {
                Some(error) => Err(error),
                None => {
                    self.carry_out(&req);
                    Ok(())
                }
            }
        })
    }

    fn block_status<'a>(&'a self, _cx: &'a Cx, range: ByteRange) -> NodeFuture<'a, IoResult<Extent>> {
        Box::pin(async move {
            let below = self.below.lock().clone();
            if below.contains(&range.offset) {
                let len = below.end.min(range.end()) - range.offset;
                return Ok(Extent { len, flags: ExtentFlags::ALLOCATED, depth: 1 });
            }
            let range = match below.start > range.offset {
                true => ByteRange { offset: range.offset, len: below.start.min(range.end()) - range.offset },
                false => range,
            };
            // Holes of 4 KiB and more, as a file system would tell.
            let data = self.data.lock();
            let unit = |at: u64| {
                let start = (at - at % 4096) as usize;
                data[start..(start + 4096).min(data.len())].iter().all(|b| *b == 0)
            };
            let zero = unit(range.offset);
            let mut end = range.offset + 4096 - range.offset % 4096;
            while end < range.end() && unit(end) == zero {
                end += 4096;
            }
            let len = end.min(range.end()) - range.offset;
            Ok(if zero { Extent::hole(len) } else { Extent::data(len) })
        })
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

/// A context in virtual time, driven by the test's thread.
pub(crate) struct Bench {
    pub(crate) context: Arc<Context>,
}

impl Bench {
    pub(crate) fn new() -> Self {
        let (env, _clock) = virtual_env(1);
        let options = ContextOptions { worker_threads: 0, ..ContextOptions::default() };
        let context = Context::with_env(options, env);
        context.start().expect("a new context starts");
        Self { context }
    }

    /// A node of this content under a name.
    pub(crate) fn store(&self, name: &str, data: Vec<u8>) -> Arc<Store> {
        let store = Store::new(data);
        self.context.graph().add_node(name, store.clone()).expect("the name is free");
        store
    }

    pub(crate) fn start(&self, kind: &str, options: &str) -> crate::error::Result<Arc<Job>> {
        self.context.jobs().start(kind, Options::parse(options).expect("options can be parsed"))
    }

    pub(crate) fn now(&self) -> Instant {
        self.context.env().runtime.clock.now()
    }

    /// Drives until `done`; panics if nothing can happen any more.
    pub(crate) fn until(&self, mut done: impl FnMut() -> bool) {
        while !done() {
            self.context.run(None).expect("the context runs");
        }
    }

    /// Drives as long as something happens without time passing.
    pub(crate) fn run_ready(&self) {
        for _ in 0..10 {
            self.context.run(Some(Duration::ZERO)).expect("the context runs");
        }
    }

    pub(crate) fn wait(&self, job: &Arc<Job>) -> Result<(), IoError> {
        assert!(job.wait(Some(Duration::from_secs(1000))).expect("waiting is allowed"), "job ends");
        job.outcome().expect("an ended job has an outcome")
    }

    /// States of a job in the order in which the host was told.
    pub(crate) fn states(&self, id: &str) -> Vec<&'static str> {
        let name = |value| (1..=10).find(|n| *n == value).map(|n| STATES[n as usize - 1].name());
        std::iter::from_fn(|| self.context.events().next())
            .filter(|e| e.kind == EventKind::Job && e.source == id)
            .filter_map(|e| name(e.value))
            .collect()
    }
}

const STATES: [Status; 10] = [
    Status::Created,
    Status::Running,
    Status::Paused,
    Status::Ready,
    Status::Standby,
    Status::Waiting,
    Status::Pending,
    Status::Aborting,
    Status::Concluded,
    Status::Null,
];

/// Bytes in which every 512 are different; the parts in `holes` (offset, length) are zero.
pub(crate) fn pattern(len: usize, holes: &[(usize, usize)]) -> Vec<u8> {
    let mut data: Vec<u8> = (0..len).map(|i| (i / 512 * 7 + i % 251 + 1) as u8 | 1).collect();
    for (offset, n) in holes {
        data[*offset..*offset + *n].fill(0);
    }
    data
}
