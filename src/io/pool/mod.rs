//! The thread-pool engine, and the pool that also runs blocking calls.
//!
//! One [`Pool`] per context: threads are started on demand, at most [`THREADS_MAX`], and sleep without a timer when there is nothing to do. Each
//! [`PoolEngine`] has at most [`ENGINE_THREADS_MAX`] operations on threads at a time, so that one hung file leaves threads for the others of
//! the context; the rest waits in the engine's backlog, in order. Results and errors are those of io_uring.

mod engine;
mod worker;

pub use engine::PoolEngine;
pub use worker::Pool;

/// Threads of a pool.
pub const THREADS_MAX: usize = 64;
/// Operations of one engine on threads at a time.
pub const ENGINE_THREADS_MAX: usize = 16;

const _: () = assert!(ENGINE_THREADS_MAX * 4 <= THREADS_MAX);
