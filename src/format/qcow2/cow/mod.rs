//! Copy-on-write: what a write to a part of a cluster has to bring along.
//!
//! [`plan`] decides, without I/O.

pub mod plan;
