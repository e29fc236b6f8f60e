//! Host clusters: reserved in runs, handed out, given back.
//!
//! - [`run`]: what is reserved and counted ahead of need.
//! - [`space`]: what is free inside the file, by length.
//! - [`pending`]: what has been unlinked and is not free yet (rule 4).
//!
//! These three are plain values under the lock of the image's allocator, a leaf that is held for a few steps and never over I/O.

pub mod pending;
pub mod run;
pub mod space;
