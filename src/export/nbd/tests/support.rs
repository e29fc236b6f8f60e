//! A disk that can be held up and made to fail, and a server over it.

use super::super::net::Address;
use super::super::server::{Export, Server, Timing};
use super::client::Client;
use crate::error::{Code, IoError, IoResult};
use crate::graph::{Disk, Graph};
use crate::io::{EngineKind, system_env};
use crate::node::{Edge, Extent, Growth, Limits, Node, NodeFuture, Plan, fixed_size};
use crate::queue::{Cx, Env};
use crate::request::{Flags, Op, ReqRef, Request};
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::{Arc, Mutex};
use crate::units::ByteRange;
use event_listener::Event;
use std::any::Any;
use std::time::Duration;

/// Waits until `what` holds; fails loudly if it never does.
pub(super) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(60), "never: {what}");
        std::thread::yield_now();
    }
}

/// What a disk was asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) op: Op,
    pub(super) flags: Flags,
    pub(super) range: ByteRange,
    /// Whether the memory was aligned to 4096 bytes.
    pub(super) aligned: bool,
}

/// A disk in memory.
#[derive(Debug)]
pub(super) struct TestDisk {
    pub(super) data: Mutex<Vec<u8>>,
    pub(super) seen: Mutex<Vec<Seen>>,
    /// Requests of this kind wait until it is opened.
    pub(super) gate: Gate,
    /// Requests of this kind that touch this byte fail.
    pub(super) fail: Mutex<Option<(Op, u64, IoError)>>,
    pub(super) read_only: AtomicBool,
}

/// Holds requests up.
#[derive(Debug, Default)]
pub(super) struct Gate {
    closed_for: Mutex<Option<Op>>,
    /// Whether a held request ends when it is cancelled.
    pub(super) cancellable: AtomicBool,
    waiting: AtomicUsize,
    opened: Event,
}

impl Gate {
    pub(super) fn close(&self, op: Op) {
        *self.closed_for.lock() = Some(op);
    }

    pub(super) fn open(&self) {
        *self.closed_for.lock() = None;
        self.opened.notify(usize::MAX);
    }

    /// Requests held up now.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }

    fn is_closed(&self, op: Op) -> bool {
        *self.closed_for.lock() == Some(op)
    }

    async fn pass(&self, cx: &Cx, op: Op) -> IoResult {
        struct Count<'a>(&'a AtomicUsize);
        impl Drop for Count<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::SeqCst);
            }
        }
        while self.is_closed(op) {
            let listener = self.opened.listen();
            if self.is_closed(op) {
                self.waiting.fetch_add(1, Ordering::SeqCst);
                let count = Count(&self.waiting);
                if self.cancellable.load(Ordering::SeqCst) {
                    cx.cancellable(listener).await?;
                } else {
                    listener.await;
                }
                drop(count);
            }
        }
        Ok(())
    }
}

impl TestDisk {
    pub(super) fn new(len: usize) -> Arc<Self> {
        let data: Vec<u8> = (0..len).map(pattern).collect();
        Arc::new(Self {
            data: Mutex::new(data),
            seen: Mutex::default(),
            gate: Gate::default(),
            fail: Mutex::default(),
            read_only: AtomicBool::new(false),
        })
    }

    /// Kinds of the requests so far.
    pub(super) fn ops(&self) -> Vec<Op> {
        self.seen.lock().iter().map(|s| s.op).collect()
    }

    fn carry_out(&self, req: ReqRef<'_>) -> IoResult {
        let range = req.range;
        self.seen.lock().push(Seen {
            op: req.op,
            flags: req.flags,
            range,
            aligned: req.bufs.segments().iter().all(|s| (s.as_ptr() as usize).is_multiple_of(4096)),
        });
        if let Some((op, at, error)) = *self.fail.lock()
            && op == req.op
            && range.offset <= at
            && at < range.end()
        {
            return Err(error);
        }
        let mut data = self.data.lock();
        let at = range.offset as usize..range.end() as usize;
        match req.op {
            Op::Read => req.bufs.copy_from_slice(&data[at]),
            Op::Write => req.bufs.copy_to_slice(&mut data[at]),
            Op::WriteZeroes => data[at].fill(0),
            Op::Discard | Op::Flush => {}
        }
        Ok(())
    }
}

/// The first content of each byte; never 0.
pub(super) fn pattern(at: usize) -> u8 {
    (at % 253) as u8 + 1
}

impl Node for TestDisk {
    fn driver(&self) -> &'static str {
        "test-disk"
    }

    fn limits(&self) -> Limits {
        let read_only = self.read_only.load(Ordering::SeqCst);
        Limits { read_only, ..Limits::plain(self.data.lock().len() as u64) }
    }

    fn children(&self) -> Vec<(&'static str, &Edge)> {
        Vec::new()
    }

    fn plan(&self, req: ReqRef<'_>) -> Plan {
        if self.gate.is_closed(req.op) { Plan::Slow } else { Plan::Done(self.carry_out(req)) }
    }

    fn execute<'a>(&'a self, cx: &'a Cx, req: Request) -> NodeFuture<'a, IoResult> {
        Box::pin(async move {
            self.gate.pass(cx, req.op).await?;
            self.carry_out(req.as_ref())
        })
    }

    fn block_status<'a>(&'a self, _: &'a Cx, range: ByteRange) -> NodeFuture<'a, IoResult<Extent>> {
        Box::pin(async move {
            let data = self.data.lock();
            let len = (4096 - range.offset % 4096).min(range.len);
            let bytes = &data[range.offset as usize..(range.offset + len) as usize];
            Ok(if bytes.iter().all(|b| *b == 0) { Extent::hole(len) } else { Extent::data(len) })
        })
    }

    fn resize<'a>(&'a self, _cx: &'a Cx, _size: u64, _growth: Growth) -> NodeFuture<'a, IoResult> {
        fixed_size()
    }

    fn settle<'a>(&'a self, _: &'a Cx) -> NodeFuture<'a, IoResult> {
        Box::pin(async { Ok(()) })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A server in a directory of its own.
pub(super) struct Fixture {
    pub(super) server: Server,
    pub(super) env: Arc<Env>,
    graph: Arc<Graph>,
    dir: tempfile::TempDir,
}

/// Patience of servers in tests: long where a test does not wait for it.
pub(super) const PATIENT: Timing = Timing {
    handshake: Duration::from_secs(60),
    linger: Duration::from_secs(60),
    stop: Duration::from_secs(60),
};

impl Fixture {
    pub(super) fn new() -> Self {
        Self::with(0, PATIENT)
    }

    pub(super) fn with(connections_max: usize, timing: Timing) -> Self {
        let env = system_env(EngineKind::Auto, None);
        env.start(1).expect("start");
        let dir = tempfile::tempdir().expect("tempdir");
        let address = Address::Unix(dir.path().join("nbd"));
        let server = Server::start_with(&env, &address, connections_max, timing).expect("server");
        Self { server, graph: Graph::new(env.clone()), env, dir }
    }

    /// A server with one export of `len` bytes without a name.
    pub(super) fn with_disk(len: usize) -> (Self, Arc<TestDisk>) {
        let fixture = Self::new();
        let disk = TestDisk::new(len);
        fixture.export("", &disk);
        (fixture, disk)
    }

    /// Exports `node` under `name`, writable.
    pub(super) fn export(&self, name: &str, node: &Arc<TestDisk>) -> Arc<Disk> {
        let disk = self.disk(node);
        let export = Export {
            name: name.to_owned(),
            description: "a test".to_owned(),
            disk: disk.clone(),
            writable: true,
        };
        self.server.add_export(export).expect("export");
        disk
    }

    pub(super) fn disk(&self, node: &Arc<TestDisk>) -> Arc<Disk> {
        let vertex = self.graph.add_node("", node.clone()).expect("node");
        let disk = self.graph.add_disk("").expect("disk");
        self.graph.insert(&disk, Some(vertex)).expect("insert");
        disk
    }

    /// Takes the medium away.
    pub(super) fn eject(&self, disk: &Arc<Disk>) {
        self.graph.insert(disk, None).expect("eject");
    }

    pub(super) fn path(&self) -> std::path::PathBuf {
        self.dir.path().join("nbd")
    }

    /// A client of the export without name, with structured replies and `base:allocation`.
    pub(super) fn client(&self) -> Client {
        let mut c = Client::connect(&self.path());
        c.structured();
        c.select_allocation("");
        c.go("").expect("the export is there");
        c
    }

    /// A client of the export without name, with simple replies.
    pub(super) fn simple_client(&self) -> Client {
        let mut c = Client::connect(&self.path());
        c.go("").expect("the export is there");
        c
    }

    /// Waits until no client is left, and checks that no memory is.
    pub(super) fn assert_all_gone(&self) {
        until("all connections end", || self.server.connections() == 0);
        assert_eq!(self.server.budget_free(), crate::limits::NBD_BYTES_SHARED);
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.server.stop();
        self.env.shut_down();
    }
}

/// An error of a disk.
pub(super) const EIO: IoError = IoError::new(libc::EIO, Code::Injected);
