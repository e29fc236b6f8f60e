//! A leaf whose operations are carried out by the embedding program (C12).
//!
//! The program implements [`HostBackend`]: it gets one [`HostIo`] token per operation and completes it, once, from any thread,
//! before or after `submit` has returned. Data is handed over as the request's own scatter-gather list, uncopied. [`HostNode`] is
//! the node over it and does the rest: cuts requests to the backend's limits, bounces and does read-modify-write where the
//! backend wants alignment, continues short transfers, emulates what the backend answers with ENOTSUP.
//!
//! Emulation
//! - write-zeroes: zeros are written in bounded pieces (not with NO_FALLBACK, which gets the ENOTSUP).
//! - discard: done, as it is advisory.
//! - flush: done. A backend that says it has no flush says that it keeps nothing back; one with a volatile cache must implement it.
//! - block status: everything is data.
//! - FUA, where [`HostLimits::fua`] is not set: the write, then a flush.
//!
//! Concurrency is counted in operations, from `submit` to completion ([`Concurrency`]). A request that waits for its turn can be
//! cancelled; it goes in order of arrival.
//!
//! Cancel and timeout ask the backend ([`HostBackend::cancel`]) and then wait for the completion, because until then the
//! backend may use the memory. Hence a backend without cancel that never completes keeps its requests, and whoever waits for
//! them (a drain, the end of a queue), for ever; nothing here can help that without handing memory in use back. A backend with
//! cancel owes a completion soon after it.
//!
//! Life: the backend is dropped, once, when the node and every token are gone; that may be on the thread that completes the last
//! token. A token dropped without completion fails with EIO. Completing one twice is ignored and logged.
//!
//! `submit` and `cancel` are called with blocking calls into the engine refused (C25), and hold no lock of the engine.
//!
//! Start reading at `node.rs`; `adapt.rs` fits requests to the backend, `token.rs` is the protocol of one operation, `gate.rs` the turns.

mod adapt;
mod gate;
mod node;
#[cfg(test)]
mod tests;
mod token;

pub use node::{HostNode, HostOptions};
pub use token::{HostIo, IoState};

use crate::node::Limits;
use crate::request::Op;

/// What the embedding program implements. Called from any engine thread, several at once unless [`Concurrency`] says otherwise
/// (`limits` and `cancel` even then). No method may block or panic; a panic breaks the node (ENOTRECOVERABLE from then on).
pub trait HostBackend: Send + Sync {
    /// Size and limits; asked when the node is made and after [`HostNode::resized`].
    fn limits(&self) -> HostLimits;

    /// Takes one operation. It may be completed inside this call.
    fn submit(&self, io: HostIo);

    /// Asks for the completion of an operation that was submitted: with ECANCELED, or its result if it is that far. Returns
    /// whether the backend can do that. May race with the completion.
    fn cancel(&self, io: &HostIo) -> bool {
        let _ = io;
        false
    }
}

/// What a backend can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostLimits {
    /// Size, alignment, transfer limits. `size` must be a multiple of `request_align`; alignments are powers of two. A short
    /// transfer goes on at a multiple of the larger alignment; one that is shorter than that is an error.
    pub limits: Limits,
    /// Most bytes of one write-zeroes; 0 if unlimited.
    pub max_zeroes: u64,
    /// Most bytes of one discard; 0 if unlimited.
    pub max_discard: u64,
    /// Whether the backend honours FUA.
    pub fua: bool,
}

impl HostLimits {
    /// No limits but a size; FUA is emulated.
    pub const fn plain(size: u64) -> Self {
        Self { limits: Limits::plain(size), max_zeroes: 0, max_discard: 0, fua: false }
    }
}

/// How many operations a backend has in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Concurrency {
    /// One at a time.
    #[default]
    Serial,
    /// One at a time for each queue of the engine; different queues at once.
    PerQueue,
    /// Any number.
    Parallel,
}

/// What a backend is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostOp {
    /// Read, write, write-zeroes, discard, flush. Completes with the number of bytes for reads and writes (fewer than asked is a
    /// short transfer and is continued), with any number from 0 for the others.
    Request(Op),
    /// Block status of the first bytes of the range; completes with an extent ([`HostIo::complete_status`]).
    BlockStatus,
}
