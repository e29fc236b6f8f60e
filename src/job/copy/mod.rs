//! The copy engine: moves ranges in the background, in parts that run in parallel, in bounded memory (S51-S57).
//!
//! What is copied is a [`Work`]: it says which piece comes next and how one piece is moved. The engine ([`engine::run`]) decides when: it keeps
//! as many parts in flight as workers, memory and limits allow, spreads them over the workers of the context, and handles pause and failures.
//!
//! Invariants
//! - A part has its buffer before it is started and keeps it until its last write has ended (S53). While the engine waits for memory, a limit
//!   or a pause nothing is claimed: a piece is chosen only when it can start.
//! - A piece without data takes no buffer and is not cut (S54).
//! - A pause lets the parts in flight end and starts none (S57); when it is reported none is in flight.
//! - Parts are tasks of their own. Dropping the engine's future starts no more of them, and [`Flight`] tells when the last has ended; one that
//!   hangs in a dead target keeps its memory and nothing else.
//! - The engine ends well only when the work has no piece left and no part is in flight.
//!
//! The engine's loop runs on one task; there is no lock across an await. Start reading at `engine.rs`.

mod class;
mod engine;
mod limit;
mod part;
mod pool;
mod progress;
mod zero;

pub use class::Priority;
pub use limit::{Cause, Limiter, Lost};
pub use pool::{POOL_BYTES, Pool, PoolShare};
pub use progress::Progress;

pub(super) use engine::{any_of, run};
pub(super) use part::Flight;
pub(super) use zero::{write_out, write_zeroes};

use crate::error::IoError;
use crate::events::Side;
use crate::node::NodeFuture;
use crate::queue::Cx;
use crate::request::{Buffers, Class, Op};
use crate::stats::HistSnapshot;
use crate::units::ByteRange;
use event_listener::EventListener;
use std::fmt::Debug;

/// What a job copies.
pub(super) trait Work: Send + Sync + Debug {
    /// The first piece at or after `at` that is left to be done and not in flight: at most `max` bytes (rounded up to the work's own unit), or a
    /// longer one that reads as zeros. `None` if there is none up to the end. Does not claim it.
    fn next<'a>(&'a self, cx: &'a Cx, at: u64, max: u64) -> NodeFuture<'a, Option<Piece>>;

    /// The first piece at or after `at` whose data has been read and could not be written: it needs no new buffer, and what it holds is not free before it has
    /// been written, so such pieces come first.
    fn again(&self, at: u64) -> Option<Piece> {
        let _ = at;
        None
    }

    /// Moves a piece. `bufs` has the piece's length, or none for a piece of zeros. A piece that somebody else has done meanwhile is no failure.
    fn copy<'a>(
        &'a self,
        cx: &'a Cx,
        piece: Piece,
        bufs: Buffers,
        class: Class,
    ) -> NodeFuture<'a, Result<Moved, Failure>>;

    /// Bytes dealt with, whoever did it.
    fn done(&self) -> u64;

    /// Bytes of [`Work::done`] that a guest's requests caused.
    fn done_for_guest(&self) -> u64 {
        0
    }

    /// Why there is no point in going on.
    fn broken(&self) -> Option<Failure> {
        None
    }

    /// Notified when `broken` or what `next` says may have changed through others.
    fn changed(&self) -> Option<EventListener> {
        None
    }

    /// How long guests waited so far, for the latency target.
    fn guest_latency(&self) -> Option<HistSnapshot> {
        None
    }
}

/// A piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Bytes of the source.
    pub(super) range: ByteRange,
    /// Known to read as zeros: takes no buffer.
    pub(super) zero: bool,
}

/// What became of a piece.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Moved {
    /// Bytes read and written.
    pub(super) copied: u64,
    /// Bytes that were zeros and moved no payload.
    pub(super) zero: u64,
    /// Bytes that others had done.
    pub(super) skipped: u64,
}

/// An error with where it happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    /// The error.
    pub(super) error: IoError,
    /// Source or target.
    pub(super) side: Side,
    /// What was tried.
    pub(super) op: Op,
    /// Where.
    pub(super) range: ByteRange,
}

/// What to do about errors of one side (QEMU's BlockdevOnError).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) enum OnError {
    /// The job fails.
    #[default]
    Report,
    /// Tried again later, for as long as it takes.
    Ignore,
    /// Like `Stop` for a full device, else like `Report`.
    Enospc,
    /// The job pauses; resumed, it tries again.
    Stop,
}

impl OnError {
    /// The values of the options, in the order of [`OnError::from_index`].
    pub(super) const NAMES: &'static [&'static str] = &["report", "ignore", "enospc", "stop"];

    /// The value at an index of [`OnError::NAMES`].
    pub(super) const fn from_index(index: usize) -> Self {
        match index {
            1 => OnError::Ignore,
            2 => OnError::Enospc,
            3 => OnError::Stop,
            _ => OnError::Report,
        }
    }
}

/// How a job copies.
#[derive(Clone, Copy, Debug)]
pub(super) struct CopyOptions {
    /// Most parts in flight.
    pub(super) max_workers: usize,
    /// Most bytes per part, unless the work's own unit is larger.
    pub(super) max_chunk: u64,
    /// Policy for errors of the source.
    pub(super) on_source_error: OnError,
    /// Policy for errors of the target.
    pub(super) on_target_error: OnError,
    /// Guest latency above which the job backs off, in nanoseconds; 0: none.
    pub(super) latency_target_ns: u64,
}
