//! cobweb: an embeddable block-storage engine for virtual machines.

pub mod error;
pub mod inflight;
pub mod sync;
pub mod units;
