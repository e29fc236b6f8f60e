//! A file for tests: in memory, every operation on record, held up or failing on demand.

use crate::error::{IoError, IoResult};
use crate::node::{Edge, Extent, Growth, Limits, Node, NodeFuture, Plan};
use crate::queue::Cx;
use crate::request::{Op, ReqRef, Request};
use crate::sync::atomic::{AtomicBool, Ordering::SeqCst};
use crate::sync::{Arc, Mutex};
use crate::units::ByteRange;
use event_listener::Event;
use std::any::Any;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct TestFile {
    data: Mutex<Vec<u8>>,
    log: Mutex<Vec<(Op, ByteRange)>>,
    closed: AtomicBool,
    opened: Event,
    failing: AtomicBool,
}

impl TestFile {
    /// A file with this content.
    pub(super) fn new(data: Vec<u8>) -> Arc<Self> {
        Arc::new(Self { data: Mutex::new(data), ..Self::default() })
    }

    /// An edge to it.
    pub(super) fn edge(self: &Arc<Self>) -> Arc<Edge> {
        Arc::new(Edge::to_node(self.clone()))
    }

    /// What has been done since the last call.
    pub(super) fn take_log(&self) -> Vec<(Op, ByteRange)> {
        std::mem::take(&mut *self.log.lock())
    }

    /// Operations begun since the log was taken.
    pub(super) fn begun(&self) -> usize {
        self.log.lock().len()
    }

    /// Holds operations up until [`TestFile::open`]; they count as begun.
    pub(super) fn close(&self) {
        self.closed.store(true, SeqCst);
    }

    /// Lets them go on.
    pub(super) fn open(&self) {
        self.closed.store(false, SeqCst);
        self.opened.notify(usize::MAX);
    }

    /// Whether operations fail with EIO from now on.
    pub(super) fn fail(&self, failing: bool) {
        self.failing.store(failing, SeqCst);
    }

    /// The content.
    pub(super) fn content(&self) -> Vec<u8> {
        self.data.lock().clone()
    }

    fn carry_out(&self, req: &Request) -> IoResult {
        if self.failing.load(SeqCst) {
            return Err(IoError::os(libc::EIO));
        }
        let mut data = self.data.lock();
        let range = req.range.offset as usize..req.range.end() as usize;
        match req.op {
            Op::Read => req.bufs.copy_from_slice(&data[range]),
            Op::Write => req.bufs.copy_to_slice(&mut data[range]),
            Op::WriteZeroes | Op::Discard => data[range].fill(0),
            Op::Flush => {}
        }
        Ok(())
    }
}

impl Node for TestFile {
    fn driver(&self) -> &'static str {
        "test"
    }

    fn limits(&self) -> Limits {
        Limits::plain(self.data.lock().len() as u64)
    }

    fn children(&self) -> Vec<(&'static str, &Edge)> {
        Vec::new()
    }

    fn plan(&self, _req: ReqRef<'_>) -> Plan {
        Plan::Slow
    }

    fn execute<'a>(&'a self, _cx: &'a Cx, req: Request) -> NodeFuture<'a, IoResult> {
        Box::pin(async move {
            self.log.lock().push((req.op, req.range));
            loop {
                let listener = self.opened.listen();
                if !self.closed.load(SeqCst) {
                    break;
                }
                listener.await;
            }
            self.carry_out(&req)
        })
    }

    fn block_status<'a>(&'a self, _cx: &'a Cx, range: ByteRange) -> NodeFuture<'a, IoResult<Extent>> {
        Box::pin(async move { Ok(Extent::data(range.len)) })
    }

    fn settle<'a>(&'a self, _cx: &'a Cx) -> NodeFuture<'a, IoResult> {
        Box::pin(async { Ok(()) })
    }

    fn resize<'a>(&'a self, _cx: &'a Cx, size: u64, _growth: Growth) -> NodeFuture<'a, IoResult> {
        Box::pin(async move {
            self.data.lock().resize(size as usize, 0);
            Ok(())
        })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
