//! Files and other leaves, and the engines that carry out their operations.
//!
//! An [`Engine`] belongs to one queue and is used by whoever drives that queue, one thread at a time. It takes [`EngineOp`]s,
//! sends them to the kernel in one system call per [`Engine::kick`], and gives back [`Completion`]s. Each accepted operation
//! completes exactly once, with the full length or an error: short transfers are continued, EINTR and EAGAIN repeated, a full
//! submission queue makes operations wait in the engine's own backlog. The memory of an operation and its file belong to the engine
//! until then, whatever becomes of the future that waits for it.
//!
//! Two engines carry out file operations, with the same results and errors: `uring` and `pool` (threads). [`EngineSet`] joins them, since the
//! `aio` option is a property of a file and one queue can serve files of both kinds.

mod align;
mod engine_set;
#[cfg(test)]
mod engine_tests;
pub mod file;
pub mod host;
pub mod memory;
#[cfg(feature = "nbd")]
pub mod nbd;
pub mod null;
pub mod pool;
mod progress;
mod system;
#[cfg(test)]
mod tests;
pub mod uring;

pub use engine_set::EngineSet;
pub use system::{EngineKind, SystemEngines, system_env, uring_allowed};

use crate::error::IoResult;
use crate::request::{Buffers, Class};
use crate::rt::Instant;
use crate::sync::Arc;
use file::FileHandle;
use std::fmt::Debug;
use std::os::fd::RawFd;
use std::time::Duration;

pub(in crate::io) use uring::{fill_iovecs, io_priority};

/// One operation on a file.
#[derive(Debug)]
pub struct FileOp {
    /// The file; kept open until the operation has ended.
    pub file: Arc<FileHandle>,
    /// What to do.
    pub kind: FileOpKind,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes; the length of the buffers for reads and writes.
    pub len: u64,
    /// A write that is durable when it completes (RWF_DSYNC).
    pub dsync: bool,
    /// Whether the operation is counted in the file's gate for read-modify-write; the count is taken when the plan is made and
    /// given back when the operation is dropped.
    pub counted: Option<file::GateToken>,
    /// Of a format that has looked up where the bytes are: they stay there until the operation has ended.
    pub pass: Option<crate::inflight::Pass>,
}

/// Kinds of file operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileOpKind {
    /// pread; past the end of the file the buffers are filled with zeros.
    Read,
    /// pwrite.
    Write,
    /// fdatasync.
    Sync,
    /// fallocate with these mode bits (FALLOC_FL_*).
    Allocate(i32),
}

/// An operation as an engine takes it.
#[derive(Debug)]
pub struct EngineOp {
    /// The file operation.
    pub op: FileOp,
    /// Data of reads and writes.
    pub bufs: Buffers,
    /// I/O priority (S39): Guest and Copy leave the kernel's default, Background and Lazy are set on the operation itself (S56).
    pub class: Class,
    /// Returned with the completion.
    pub tag: Tag,
}

impl EngineOp {
    /// Fills the buffers with zeros behind the first `done` bytes.
    fn fill_rest(&self, done: u64) {
        let done = done as usize;
        self.bufs.slice(done, self.bufs.len() - done).fill(0);
    }
}

/// What a completion belongs to.
pub enum Tag {
    /// A request of the host, with what is needed to complete it.
    Request(crate::queue::HostTag),
    /// A task that waits.
    Task(Arc<crate::queue::IoCell>),
}

impl Debug for Tag {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Tag::Request(t) => write!(f, "{t:?}"),
            Tag::Task(_) => f.write_str("Task"),
        }
    }
}

/// The end of an operation.
#[derive(Debug)]
pub struct Completion {
    /// What it belongs to.
    pub tag: Tag,
    /// Success means the whole length.
    pub result: IoResult,
}

/// Carries out operations for one queue.
///
/// Bounds: at most `depth` operations are in the kernel or on pool threads at a time, the rest waits in a backlog, in order.
pub trait Engine: Send + Debug {
    /// Takes an operation; never blocks, makes no system call.
    fn push(&mut self, op: EngineOp);
    /// Hands everything pushed to the kernel, in one system call if there is anything to hand over.
    fn kick(&mut self);
    /// Appends what has completed to `out`; no system call when nothing has.
    fn reap(&mut self, out: &mut Vec<Completion>);
    /// Hands over like `kick`, then blocks until something has completed, [`Notify::wake`] was called (since the last wait or `reap`), or `timeout` has passed;
    /// `None` waits without limit. May return early.
    fn wait(&mut self, timeout: Option<Duration>);
    /// Operations taken and not yet given back, the backlog included.
    fn in_flight(&self) -> usize;
    /// How other threads wake this engine's `wait` and the host's event fd.
    fn notify(&self) -> Arc<dyn Notify>;
    /// The eventfd that a host's event loop polls: readable after a completion, a wake or the timer. Created on first use.
    fn event_fd(&mut self) -> std::io::Result<RawFd>;
    /// Clears the eventfd (called at the start of a pass of an armed queue that may have been signalled).
    fn clear_event(&mut self);
    /// Switches signalling of the eventfd by completions on or off (C6); wakes are governed by the queue itself.
    fn arm(&mut self, on: bool) -> std::io::Result<()>;
    /// Earliest moment at which the eventfd must be signalled although nothing has completed; replaces the former one. `now` is the current time.
    fn set_timer(&mut self, at: Option<Instant>, now: Instant);
}

/// Wakes an engine from any thread.
pub trait Notify: Send + Sync + Debug {
    /// Ends a running or the next `wait` and signals the event fd if there is one. Cheap to call twice, but not free: one write to an eventfd.
    fn wake(&self);
}
