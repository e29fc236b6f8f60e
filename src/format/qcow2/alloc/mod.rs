//! Host clusters: reserved in runs, handed out, given back.
//!
//! - [`run`]: what is reserved and counted ahead of need.
//! - [`space`]: what is free inside the file, by length.
//! - [`pending`]: what has been unlinked and is not free yet (rule 4).
//! - [`Allocator`]: the three and the refcounts under one lock, a leaf that is held for a few steps and never over I/O. Reading refcount blocks, growing the file
//!   and zeroing are done without it, by one *refill* at a time; whoever finds the runs empty waits for it.
//! - [`release`]: the way of unlinked clusters back into the index.
//!
//! What a caller gets is counted in RAM, covered by the file and written by nobody else (rule 16). What it does not link it gives back with
//! [`Allocator::give_back`]. Cluster 0 and clusters that hold metadata are never handed out (section 2, point 4): a refcount of 0 there is corruption
//! and ends the refill with EIO.

mod allocator;
pub mod pending;
mod refill;
mod release;
pub mod run;
pub mod space;
#[cfg(test)]
mod tests;

pub use allocator::{Allocator, Config, Grants, Kind, MetadataMap};
