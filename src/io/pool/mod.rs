//! The thread-pool engine, and the pool that also runs blocking calls.
//!
//! One [`Pool`] per context. Threads are started on demand, at most [`THREADS_MAX`], and sleep without a timer when there is nothing to do;
//! one more thread keeps the time of queues whose host polls, once there is such a queue. When the pool is dropped they end and are joined; one that hangs in a
//! system call is left behind after [`STOP_MAX`], with what it works on.
//!
//! Each [`PoolEngine`] has at most [`ENGINE_THREADS_MAX`] operations on threads at a time, the rest waits in the engine's backlog, in order. So a file that
//! hangs stops the queue that uses it, and leaves threads for the other queues of the context (unless several queues hang at once, each of them with
//! a full set of operations).
//!
//! Results and errors are those of io_uring; both engines share what a result means (`io/progress.rs`).

mod engine;
mod timer;
mod worker;

pub use engine::PoolEngine;
pub use worker::Pool;

use std::time::Duration;

/// Threads of a pool.
pub const THREADS_MAX: usize = 64;
/// Operations of one engine on threads at a time.
pub const ENGINE_THREADS_MAX: usize = 16;
/// How long a dropped pool waits for its threads.
pub const STOP_MAX: Duration = Duration::from_secs(2);

const _: () = assert!(ENGINE_THREADS_MAX * 4 <= THREADS_MAX);
