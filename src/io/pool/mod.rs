//! The thread-pool engine, and the pool that also runs blocking calls.
//!
//! One [`Pool`] per context. Threads are started on demand, at most [`THREADS_MAX`] (and extra ones, see below), and sleep without a timer when there is nothing to do;
//! one more thread keeps the time of queues whose host polls, once there is such a queue. When the pool is dropped they end and are joined; one that hangs in a
//! system call is left behind after [`STOP_MAX`], with what it works on.
//!
//! A file has at most [`LANE_THREADS_MAX`] jobs on threads at a time, for all queues together; the rest waits, in order. So a file that hangs leaves
//! threads for others. When so many hang that no thread is left, a file of which nothing runs still gets an extra thread for one job, which goes on with
//! other such files and ends when there are none: every file that does not hang goes on, if slowly, and there are never more extra threads than files.
//! Jobs that belong to no file count as one of them.
//!
//! Results and errors are those of io_uring; both engines share what a result means (`io/progress.rs`).

mod engine;
mod lanes;
mod timer;
mod worker;

pub use engine::PoolEngine;
pub use lanes::LaneId;
pub use worker::Pool;

use std::time::Duration;

/// Threads of a pool.
pub const THREADS_MAX: usize = 64;
/// Jobs of one file on threads at a time.
pub const LANE_THREADS_MAX: usize = 16;
/// How long a dropped pool waits for its threads.
pub const STOP_MAX: Duration = Duration::from_secs(2);

const _: () = assert!(LANE_THREADS_MAX * 4 <= THREADS_MAX);
