//! The io_uring engine.
//!
//! The ring is an ordinary one (no single issuer, no deferred or cooperative task work): a queue may be driven by another
//! thread than its own. Files: `ring.rs` owns what the kernel may touch (operations with their file, buffers and iovecs, the
//! wake counter, the timer) and is the only place with `unsafe`; `op.rs` turns an operation into a submission entry; `driver.rs` is
//! the engine over the two; `teardown.rs` its end; `probe.rs` says whether all this is allowed here.
//!
//! Invariants
//! - An operation stays in its slot until its completion has been taken out of the ring; the slot's number is its `user_data`.
//! - At most `depth` operations are in the kernel, beside one read of the wake counter, one timer and one change of it. The completion
//!   ring has room for twice that, so it cannot overflow. What does not fit waits in the driver's backlog, in order.
//! - The wake eventfd is always being read through the ring while somebody waits, so one `io_uring_enter` both hands over and waits, and any
//!   thread can end it. The host's eventfd is another one, registered with the ring: the kernel signals it for each
//!   completion, wakes and the timer included.
//! - A thread that has driven a queue and then exits takes its io-wq workers with it: what they were doing ends with ECANCELED
//!   (or EFAULT, from a retry on behalf of a task that is gone) although nobody has cancelled it. Since this engine cancels nothing before its own
//!   end, such operations are handed over again.

mod driver;
mod op;
mod probe;
mod ring;
mod teardown;
#[cfg(test)]
mod tests;

pub use driver::UringEngine;
pub use probe::probe;

pub(in crate::io) use op::{fill_iovecs, io_priority};
