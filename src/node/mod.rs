//! The waist: what every node of a graph can do.
//!
//! `filter`, `format` and `io` implement [`Node`]; everything above talks to nodes through it only. A request reaches a node in
//! two steps. [`Node::plan`] is asked first, on the thread that submits, and must not block, allocate much or wait: it answers
//! with the one engine operation that carries the request out, or that the request is done, or [`Plan::Slow`]. Only
//! then is [`Node::execute`] called, as part of a task. Plans are resolved through the layers by the nodes themselves: a filter
//! that lets a request pass returns its child's plan for the shifted range.
//!
//! Duties of an implementation
//! - `plan` and `execute` are called from several threads at once, for overlapping ranges too. The waist orders nothing.
//! - The range of a request lies inside `limits().size` when it arrives (the disk and [`crate::queue::Cx::run`] check it), and is
//!   not empty except for a flush.
//! - No default body for a method that changes data or its visibility: a new operation must stop every filter from compiling (C16).
//! - Futures are `Send`, keep nothing bound to a thread, and may be dropped at any await: whatever others rely on must
//!   outlive the future (an entry of an in-flight list wakes its waiters when dropped).

mod edge;
mod extent;
mod limits;
mod plan;
mod reserve;

pub use edge::{Edge, Vertex};
pub use extent::{Extent, ExtentFlags};
pub use limits::Limits;
pub use plan::Plan;
pub use reserve::{Permit, Reservation};

use crate::error::{IoError, IoResult, Result};
use crate::queue::Cx;
use crate::request::{Class, ReqRef, Request};
use crate::stats::Stats;
use crate::stats::hist::HistSnapshot;
use crate::units::ByteRange;
use std::any::Any;
use std::fmt::Debug;
use std::future::Future;
use std::pin::Pin;

/// The future of a slow path.
pub type NodeFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What becomes of the space that [`Node::resize`] adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Growth {
    /// Nothing: it is a hole.
    Sparse,
    /// It is reserved where that is possible, so that a later write does not fail for want of space; it still reads as zeros.
    Reserved,
}

/// The answer of a node whose length is fixed, for [`Node::resize`].
pub fn fixed_size<'a>() -> NodeFuture<'a, IoResult> {
    Box::pin(async { Err(IoError::unsupported()) })
}

/// A vertex of the graph.
pub trait Node: Send + Sync + Debug + Any {
    /// Driver name in QEMU's vocabulary.
    fn driver(&self) -> &'static str;

    /// Size, alignment and transfer limits as of now.
    fn limits(&self) -> Limits;

    /// The nodes below, with their option keys (`file`, `target`, ...).
    fn children(&self) -> Vec<(&'static str, &Edge)>;

    /// How to carry out `req` without waiting; never blocks.
    fn plan(&self, req: ReqRef<'_>) -> Plan;

    /// Carries out a request whose plan was [`Plan::Slow`].
    fn execute<'a>(&'a self, cx: &'a Cx, req: Request) -> NodeFuture<'a, IoResult>;

    /// Status of the bytes from `range.offset` on: one extent of at least 1 and at most `range.len` bytes, as long as is cheap to tell.
    fn block_status<'a>(&'a self, cx: &'a Cx, range: ByteRange) -> NodeFuture<'a, IoResult<Extent>>;

    /// Brings everything the node holds in memory to the node below and ends its background work. Called, without a drain,
    /// before the node is closed or removed; errors are returned and the node stays usable.
    fn settle<'a>(&'a self, cx: &'a Cx) -> NodeFuture<'a, IoResult>;

    /// Changes the length of the node to `size` bytes; what is added reads as zeros. A node whose length is fixed (a block device, a window, a filter
    /// that knows its size) answers ENOTSUP and is unchanged. A failure leaves a length between the old and the new one; ENOSPC with
    /// [`Growth::Reserved`] may be tried again with less. Requests may run meanwhile; one at a time, and who shrinks a node has
    /// seen to it that nothing is in flight behind the new end. Durable with the next flush.
    fn resize<'a>(&'a self, cx: &'a Cx, size: u64, growth: Growth) -> NodeFuture<'a, IoResult>;

    /// Space for `len` bytes of data that will be written to this node, reserved before it is read (S41). A node without
    /// a memory of its own answers at once with a reservation that holds plain memory. `len` is at most one batch (1 MiB); a node with little memory
    /// may give less ([`Reservation::len`]).
    fn reserve<'a>(&'a self, cx: &'a Cx, len: u64, class: Class) -> NodeFuture<'a, IoResult<Reservation>> {
        let _ = (cx, class);
        Box::pin(async move { Ok(Reservation::unbounded(len)) })
    }

    /// The node is about to be taken out of the graph, and a drain comes next: requests that wait here for anything but the node below are let go, so that the
    /// drain waits for I/O of the guest only (S3). Nothing to do for a node whose requests wait for nothing else.
    fn detaching(&self) {}

    /// Forgets data that is parked for a reader who will never come (S29): buffers go when their last I/O has ended. Nothing to do for a node that parks none.
    fn abandon(&self) {}

    /// Sets a live property; unknown or read-only keys are refused with a message that names the key.
    fn set(&self, key: &str, value: &str) -> Result<()> {
        let _ = value;
        Err(crate::error::Error::invalid(format!("driver '{}' has no live option '{key}'", self.driver())))
    }

    /// Reads a property as text.
    fn get(&self, key: &str) -> Option<String> {
        let _ = key;
        None
    }

    /// Counters of the node, if it keeps any; unknown fields stay 0.
    fn stats(&self) -> Option<Stats> {
        None
    }

    /// A histogram by name (`total`, `space`, `granule`, `read`, `write`).
    fn hist(&self, which: &str) -> Option<HistSnapshot> {
        let _ = which;
        None
    }

    /// Text of the node's last error (C8).
    fn last_error(&self) -> Option<String> {
        None
    }

    /// For downcasts by code that made the node.
    fn as_any(&self) -> &dyn Any;
}

/// Whether `range` lies inside a node of `size` bytes.
pub fn check_range(range: ByteRange, size: u64) -> IoResult {
    if ByteRange::new(range.offset, range.len).is_some() && range.end() <= size {
        Ok(())
    } else {
        Err(IoError::out_of_range())
    }
}
