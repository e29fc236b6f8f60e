//! Queues: submission, execution, completion.
//!
//! Two layers. An [`Exec`] is an engine, a set of tasks, timers, and a *drive token*: whoever holds the token makes passes (collect
//! completions, fire timers, poll ready tasks, hand new operations to the kernel), one thread at a time, but not always the same one. A
//! [`Queue`] is an executor bound to a disk: it takes requests from a host thread and gives completions back. Worker threads
//! of the context drive executors of their own for background work.
//!
//! Guarantees
//! - `submit` and `reap` with `min == 0` never block. Exactly one completion per accepted request, on the queue it came from.
//! - A pass is bounded ([`PASS_POLLS_MAX`]); if work is left the event fd stays signalled.
//! - *No queue stops another*: a task that waits for work of others holds a [`Cx::waiting`] guard; while there is one, a worker looks every
//!   5 ms for executors that have had no pass for that long and drives them ([`watchdog`]). With nobody waiting no timer runs.
//! - Nothing outlives the end of the context ([`Env::shut_down`]) but what the host still holds: tasks that wait are dropped with what they hold, engines and
//!   threads are gone when it returns, except for what hangs in the kernel.
//! - Dropping a future never frees memory of an operation in flight: the engine owns it.
//!
//! Wake-ups: `awake` is the flag of an executor. A waker sets it and writes the engine's eventfd only if it was clear. A pass
//! sets it before it looks and clears it before it looks for the last time, so a wake-up either is seen by the pass or
//! writes the fd. Partner orderings are named at the accesses (`exec.rs`).
//!
//! Locks: `drive` (the token; only `try_lock` by anyone but the owner), then `outbox`, `timers`, `list`, `done`, all leaf locks held for a few instructions.
//!
//! Start reading at `exec.rs`, then `host.rs`.

mod cell;
mod cx;
mod driver;
mod env;
mod eventfd;
mod exec;
mod host;
#[cfg(any(test, feature = "sim"))]
pub mod testing;
#[cfg(test)]
mod tests;
mod timer;
#[cfg(any(test, feature = "sim"))]
pub mod virtual_env;
mod watchdog;

pub use cell::IoCell;
pub use cx::{Cancel, Cx, IoFuture, WaitGuard};
pub use env::{EngineFactory, Env, LogSink};
pub use eventfd::EventFd;
pub use exec::{Exec, PASS_POLLS_MAX};
pub(crate) use host::QueueCore;
pub use host::{Cqe, HostOp, HostReq, HostTag, Queue, TaskOp, TaskResult};
pub use timer::Sleep;
