//! Filters: nodes that stand above another node and change how requests reach it.
//!
//! A filter implements [`crate::node::Node`] over an edge `file` and is put above a place while the disks that reach it are
//! drained (S1), so it never sees half of a request. What a filter may assume is the contract of the waist (`node/mod.rs`);
//! what it has to decide, method by method, is written in [`passthrough`], the template to copy.
//!
//! Filters know the waist and the foundations, never each other and never what is above, but for [`crate::graph::OpenCx`], which a
//! driver's open function is handed.

pub mod cbw;
pub mod compress;
pub mod fault;
pub mod passthrough;
pub mod ram_cache;
#[cfg(test)]
pub(crate) mod testing;
pub mod throttle;
