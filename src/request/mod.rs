//! What a request is: operation, flags, class, range, buffers, and its one completion.
//!
//! Life of a request: the host (or a job) makes a [`Request`]; the queue asks the top node for a plan; either the plan is
//! one engine operation and its completion ends the request, or the request becomes a task. Buffers belong to the request
//! until it has completed: memory of the host is pinned by contract (C5), memory of the engine is reference-counted, so
//! nothing that the kernel may still write is freed when a future is dropped.
//!
//! Start reading at [`Request`]; [`Buffers`] is the scatter-gather list that travels through all layers unsplit
//! and uncopied.

pub mod arena;
pub mod budget;
mod buffer;
mod op;

pub use buffer::{AlignedMem, Buffers, MemOwner, Segment};
pub use op::{Class, Flags, Op, ReqRef, Request};
