//! Copy-on-write: what a write to a part of a cluster has to bring along.
//!
//! - [`plan`] decides, without I/O.
//! - [`stage`]: clusters whose bytes wait in RAM for the rest (deferred copy-on-write), with the rules of who may copy in and out.
//! - [`fill`] carries plans out: host clusters, reads, vectored writes, links.
//! - `settle`: when and in which company staged clusters are written.

pub(in crate::format::qcow2) mod fill;
pub mod plan;
mod settle;
pub mod stage;
#[cfg(test)]
mod tests;
