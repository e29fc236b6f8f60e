//! The io_uring engine.
//!
//! The ring is an ordinary one (no single issuer, no deferred task work): a queue may be driven by another thread than its own. Operations own
//! their file, buffers and iovecs in a slot until their completion has been taken out of the ring; a slot's number is its `user_data`. At most
//! `depth` operations are in the kernel, so the completion ring cannot overflow. An eventfd that is always being read through the ring wakes a
//! waiting thread (or the host, whose own eventfd is registered with the ring) from anywhere.
//!
//! Teardown cancels what is in flight and waits for it, at most [`TEARDOWN_MAX`]; what the kernel has not given back by then is leaked rather than freed.

mod ring;

pub use ring::UringEngine;
pub(in crate::io) use ring::{fill_iovecs, io_priority};

/// How long a dropped engine waits for the kernel.
pub const TEARDOWN_MAX: std::time::Duration = std::time::Duration::from_secs(5);
