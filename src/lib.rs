//! cobweb: an embeddable block-storage engine for virtual machines.

pub mod error;
pub mod inflight;
pub mod options;
pub mod sync;
pub mod units;
