//! What the tests of filters share: a node below that remembers what reached it, and when.

use crate::error::{IoError, IoResult};
use crate::node::{Edge, Extent, Growth, Limits, Node, NodeFuture, Permit, Plan, Reservation, fixed_size};
use crate::queue::{Cx, Env, IoCell};
use crate::request::{Buffers, Class, Flags, Op, ReqRef, Request};
use crate::rt::real::SplitMix;
use crate::rt::{Clock, Instant, Rng};
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use crate::sync::{Arc, Mutex};
use crate::units::ByteRange;
use std::any::Any;
use std::future::Future;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// A request as it arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) at: Instant,
    pub(crate) op: Op,
    pub(crate) flags: Flags,
    pub(crate) class: Class,
    pub(crate) range: ByteRange,
}

/// A node in memory that carries out everything in `plan`, or, when told to be slow, in `execute`.
#[derive(Debug)]
pub(crate) struct Recorder {
    clock: Arc<dyn Clock>,
    data: Mutex<Vec<u8>>,
    seen: Mutex<Vec<Seen>>,
    slow: AtomicBool,
    executed: AtomicUsize,
}

impl Recorder {
    pub(crate) fn new(env: &Arc<Env>, size: usize) -> Arc<Self> {
        Arc::new(Self {
            clock: env.runtime.clock.clone(),
            data: Mutex::new(vec![0; size]),
            seen: Mutex::default(),
            slow: AtomicBool::new(false),
            executed: AtomicUsize::new(0),
        })
    }

    pub(crate) fn set_slow(&self, slow: bool) {
        self.slow.store(slow, SeqCst);
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().clone()
    }

    /// Requests that came through `execute`.
    pub(crate) fn executed(&self) -> usize {
        self.executed.load(SeqCst)
    }

    pub(crate) fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        self.data.lock()[offset..offset + len].to_vec()
    }

    fn carry_out(&self, req: ReqRef<'_>) {
        self.seen.lock().push(Seen {
            at: self.clock.now(),
            op: req.op,
            flags: req.flags,
            class: req.class,
            range: req.range,
        });
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

impl Node for Recorder {
    fn driver(&self) -> &'static str {
        "recorder"
    }

    fn limits(&self) -> Limits {
        Limits::plain(self.data.lock().len() as u64)
    }

    fn children(&self) -> Vec<(&'static str, &Edge)> {
        Vec::new()
    }

    fn plan(&self, req: ReqRef<'_>) -> Plan {
        if self.slow.load(SeqCst) {
            return Plan::Slow;
        }
        self.carry_out(req);
        Plan::Done(Ok(()))
    }

    fn execute<'a>(&'a self, _cx: &'a Cx, req: Request) -> NodeFuture<'a, IoResult> {
        Box::pin(async move {
            self.executed.fetch_add(1, SeqCst);
            self.carry_out(req.as_ref());
            Ok(())
        })
    }

    fn block_status<'a>(&'a self, _cx: &'a Cx, range: ByteRange) -> NodeFuture<'a, IoResult<Extent>> {
        Box::pin(async move { Ok(Extent::data(range.len)) })
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

/// One request of every operation, with different flags and classes.
pub(crate) fn all_ops() -> Vec<Request> {
    vec![
        Request::write(512, Buffers::from_bytes(&[7; 512])).class(Class::Copy).flags(Flags::FUA),
        Request::read(0, Buffers::alloc(1024, 512)).class(Class::Background),
        Request::write_zeroes(ByteRange { offset: 600, len: 10 }, Flags::MAY_UNMAP).class(Class::Lazy),
        Request::discard(ByteRange { offset: 0, len: 512 }),
        Request::flush(),
    ]
}

/// Starts `body` as a task of its own, with its own waker: a wake-up that is lost shows.
pub(crate) fn start(cx: &Cx, body: impl Future<Output = IoResult> + Send + 'static) -> Started {
    let cell: Arc<IoCell> = Arc::default();
    let theirs = cell.clone();
    cx.spawn(async move { theirs.complete(body.await) });
    Started(cell)
}

/// A task made by [`start`].
pub(crate) struct Started(Arc<IoCell>);

impl Started {
    /// Waits until the task has ended.
    pub(crate) async fn result(&self) -> IoResult {
        std::future::poll_fn(|context| self.0.poll(context)).await
    }

    /// The result if the task has ended.
    pub(crate) fn now(&self) -> Option<IoResult> {
        match self.0.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(result) => Some(result),
            Poll::Pending => None,
        }
    }
}

/// Gives every task that is ready now a turn.
pub(crate) async fn let_others_run(cx: &Cx) {
    for _ in 0..4 {
        let cell: Arc<IoCell> = Arc::default();
        let theirs = cell.clone();
        cx.spawn(async move { theirs.complete(Ok(())) });
        let turn = Started(cell).result().await;
        assert_eq!(turn, Ok(()));
    }
}

/// What reached a [`Held`] node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Io(Op),
    Status,
}

/// A line of a [`Journal`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    pub(crate) node: &'static str,
    pub(crate) call: Call,
    pub(crate) range: ByteRange,
    /// Whether the call had ended; else it had arrived.
    pub(crate) ended: bool,
}

/// What happened in which order, over several nodes.
#[derive(Debug, Default)]
pub(crate) struct Journal(Mutex<Vec<Line>>);

impl Journal {
    pub(crate) fn lines(&self) -> Vec<Line> {
        self.0.lock().clone()
    }

    /// Number of such calls that arrived.
    pub(crate) fn count(&self, node: &str, call: Call) -> usize {
        self.lines().iter().filter(|l| l.node == node && l.call == call && !l.ended).count()
    }
}

type Choice = Box<dyn Fn(Call, ByteRange) -> bool + Send + Sync>;

/// A node in memory whose calls can be held and let go one by one. What a call does it does when it is let go, as a disk that
/// is slow: a held read shows what was written meanwhile. Like the kernel's, an operation goes on when its future is dropped.
pub(crate) struct Held {
    name: &'static str,
    inner: Arc<dyn Node>,
    journal: Arc<Journal>,
    hold: Mutex<Option<Choice>>,
    fault: Mutex<Option<(Choice, Fault)>>,
    waiting: Mutex<Vec<Waiting>>,
    limits: Mutex<Limits>,
    driver: Mutex<&'static str>,
    space: Arc<Space>,
    /// Longest delay of a call, and the source of delays.
    delay: Mutex<Option<(Duration, SplitMix)>>,
}

/// The space of a [`Held`] node: there is enough, or none, or so much at a time.
#[derive(Debug, Default)]
struct Space {
    full: AtomicBool,
    /// Most bytes of one reservation; 0 is no limit.
    most: AtomicUsize,
    reserved: AtomicUsize,
    changed: event_listener::Event,
}

/// Counts what is reserved and not yet taken or given back.
#[derive(Debug)]
struct Counted(Arc<Space>, usize);

impl Permit for Counted {
    fn buffers(&mut self, len: u64) -> Buffers {
        self.surplus(len);
        Buffers::alloc(len as usize, 4096)
    }

    fn surplus(&mut self, len: u64) {
        self.1 -= len as usize;
        self.0.reserved.fetch_sub(len as usize, SeqCst);
    }

    fn writes_through(&self) -> bool {
        false
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.reserved.fetch_sub(self.1, SeqCst);
    }
}

/// What a [`Held`] node does to the calls that are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Fail(IoError),
    Panic,
}

#[derive(Clone)]
struct Waiting {
    call: Call,
    range: ByteRange,
    gate: Arc<IoCell>,
}

impl Held {
    pub(crate) fn new(name: &'static str, inner: Arc<dyn Node>, journal: &Arc<Journal>) -> Arc<Self> {
        Arc::new(Self {
            name,
            limits: Mutex::new(inner.limits()),
            inner,
            journal: journal.clone(),
            hold: Mutex::default(),
            fault: Mutex::default(),
            waiting: Mutex::default(),
            driver: Mutex::new("held"),
            space: Arc::default(),
            delay: Mutex::default(),
        })
    }

    /// From now on holds the calls that `choice` picks.
    pub(crate) fn hold(&self, choice: impl Fn(Call, ByteRange) -> bool + Send + Sync + 'static) {
        *self.hold.lock() = Some(Box::new(choice));
    }

    /// From now on holds every call of this kind.
    pub(crate) fn hold_all(&self, call: Call) {
        self.hold(move |c, _| c == call);
    }

    /// Holds nothing any more and lets go what is held.
    pub(crate) fn release(&self) {
        *self.hold.lock() = None;
        while self.let_go(0, Ok(())) {}
    }

    /// The calls that are held, in order of arrival.
    pub(crate) fn held(&self) -> Vec<(Call, ByteRange)> {
        self.waiting.lock().iter().map(|w| (w.call, w.range)).collect()
    }

    /// Lets the call at `index` of [`Held::held`] go, with an error or so that it is carried out; whether there was one.
    pub(crate) fn let_go(&self, index: usize, result: IoResult) -> bool {
        let waiting = {
            let mut waiting = self.waiting.lock();
            (index < waiting.len()).then(|| waiting.remove(index))
        };
        waiting.is_some_and(|w| {
            w.gate.complete(result);
            true
        })
    }

    /// From now on does this to the calls that `choice` picks; they are not held.
    pub(crate) fn fault(
        &self,
        fault: Fault,
        choice: impl Fn(Call, ByteRange) -> bool + Send + Sync + 'static,
    ) {
        *self.fault.lock() = Some((Box::new(choice), fault));
    }

    /// No more faults.
    pub(crate) fn heal(&self) {
        *self.fault.lock() = None;
    }

    pub(crate) fn set_limits(&self, limits: Limits) {
        *self.limits.lock() = limits;
    }

    /// From now on every call takes a random time of at most `max`.
    pub(crate) fn set_delay(&self, max: Duration, seed: u64) {
        *self.delay.lock() = Some((max, SplitMix::new(seed)));
    }

    /// Whether reservations wait.
    pub(crate) fn set_full(&self, full: bool) {
        self.space.full.store(full, SeqCst);
        self.space.changed.notify(usize::MAX);
    }

    /// Reservations are for at most so many bytes.
    pub(crate) fn set_most(&self, bytes: u64) {
        self.space.most.store(bytes as usize, SeqCst);
    }

    /// Bytes that are reserved.
    pub(crate) fn reserved(&self) -> usize {
        self.space.reserved.load(SeqCst)
    }

    /// Goes under the name of another driver.
    pub(crate) fn set_driver(&self, driver: &'static str) {
        *self.driver.lock() = driver;
    }

    /// Waits at the gate if the call is held; its verdict.
    async fn admit(&self, cx: &Cx, call: Call, range: ByteRange) -> IoResult {
        self.journal.0.lock().push(Line { node: self.name, call, range, ended: false });
        let delay = self.delay.lock().as_ref().map(|(max, rng)| rng.next() % (max.as_nanos() as u64 + 1));
        if let Some(delay) = delay {
            cx.sleep(Duration::from_nanos(delay)).await?;
        }
        let fault = self.fault.lock().as_ref().filter(|(choice, _)| choice(call, range)).map(|(_, f)| *f);
        match fault {
            Some(Fault::Fail(error)) => return Err(error),
            Some(Fault::Panic) => panic!("{} was told to panic", self.name),
            None => {}
        }
        if !self.hold.lock().as_ref().is_some_and(|choice| choice(call, range)) {
            return Ok(());
        }
        let gate: Arc<IoCell> = Arc::default();
        self.waiting.lock().push(Waiting { call, range, gate: gate.clone() });
        std::future::poll_fn(|context| gate.poll(context)).await
    }

    fn end(&self, call: Call, range: ByteRange) {
        self.journal.0.lock().push(Line { node: self.name, call, range, ended: true });
    }
}

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held").field("name", &self.name).field("held", &self.held()).finish()
    }
}

/// The way to a [`Held`] node for tasks that outlive the caller.
#[derive(Debug)]
pub(crate) struct HeldNode(pub(crate) Arc<Held>);

impl Node for HeldNode {
    fn driver(&self) -> &'static str {
        *self.0.driver.lock()
    }

    fn limits(&self) -> Limits {
        *self.0.limits.lock()
    }

    fn children(&self) -> Vec<(&'static str, &Edge)> {
        Vec::new()
    }

    fn plan(&self, _req: ReqRef<'_>) -> Plan {
        Plan::Slow
    }

    fn execute<'a>(&'a self, cx: &'a Cx, req: Request) -> NodeFuture<'a, IoResult> {
        let cell: Arc<IoCell> = Arc::default();
        let (held, own, there) = (self.0.clone(), cx.detached(), cell.clone());
        let (call, range) = (Call::Io(req.op), req.range);
        let panics = matches!(&*held.fault.lock(), Some((choice, Fault::Panic)) if choice(call, range));
        Box::pin(async move {
            if panics {
                // In the caller's task, as a bug in a node would.
                held.admit(cx, call, range).await?;
            }
            cx.spawn(async move {
                let mut result = held.admit(&own, call, range).await;
                if result.is_ok() {
                    result = own.run(&*held.inner, req).await;
                }
                held.end(call, range);
                there.complete(result);
            });
            std::future::poll_fn(|context| cell.poll(context)).await
        })
    }

    fn reserve<'a>(&'a self, _cx: &'a Cx, len: u64, _class: Class) -> NodeFuture<'a, IoResult<Reservation>> {
        Box::pin(async move {
            let space = &self.0.space;
            loop {
                let listener = space.changed.listen();
                if !space.full.load(SeqCst) {
                    break;
                }
                listener.await;
            }
            let most = space.most.load(SeqCst) as u64;
            let len = if most == 0 { len } else { len.min(most) };
            space.reserved.fetch_add(len as usize, SeqCst);
            Ok(Reservation::with_permit(len, Box::new(Counted(space.clone(), len as usize))))
        })
    }

    fn block_status<'a>(&'a self, cx: &'a Cx, range: ByteRange) -> NodeFuture<'a, IoResult<Extent>> {
        Box::pin(async move {
            // What the status is is told when the call is let go, like a read.
            self.0.admit(cx, Call::Status, range).await?;
            let extent = self.0.inner.block_status(cx, range).await;
            self.0.end(Call::Status, range);
            extent
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
