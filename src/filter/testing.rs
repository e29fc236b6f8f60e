//! What the tests of filters share: a node below that remembers what reached it, and when.

use crate::error::IoResult;
use crate::node::{Edge, Extent, Limits, Node, NodeFuture, Plan};
use crate::queue::{Cx, Env, IoCell};
use crate::request::{Buffers, Class, Flags, Op, ReqRef, Request};
use crate::rt::{Clock, Instant};
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use crate::sync::{Arc, Mutex};
use crate::units::ByteRange;
use std::any::Any;
use std::future::Future;
use std::task::{Context, Poll, Waker};

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
