//! The one place that names atomics, locks and threads.
//!
//! Everything else in the crate writes `crate::sync::...`, so that `--cfg cobweb_loom` can put loom's types under the
//! modules that are model-checked (`inflight`, and the small protocol cores written to be checked) without
//! touching them. `Mutex` here never poisons: a panic is caught at the boundary of a task or an entry point and the node
//! concerned is marked broken there, so a second error channel in every lock would only add noise.
//!
//! Locks in this crate guard short sections that do no I/O and are never held across an await.

#[cfg(not(cobweb_loom))]
mod real;
#[cfg(not(cobweb_loom))]
pub use real::*;

#[cfg(cobweb_loom)]
mod loom;
#[cfg(cobweb_loom)]
pub use self::loom::*;
