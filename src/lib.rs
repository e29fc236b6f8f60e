//! cobweb: an embeddable block-storage engine for virtual machines.

pub mod error;
pub mod inflight;
pub mod options;
// Not for loom: it shares a static counter, which loom's atomics cannot be, and has no protocol to check.
#[cfg(not(cobweb_loom))]
pub mod stats;
pub mod sync;
pub mod units;
