//! cobweb: an embeddable block-storage engine for virtual machines.
//!
//! Top to bottom: [`graph`] (disks, nodes by name, drained changes) and [`queue`] (submission, executor, completions) stand on the waist,
//! [`node`] and [`request`]; [`inflight`] orders requests; [`io`] carries operations out. What only `inflight` and the fence of the
//! copy-before-write filter need compiles under `--cfg cobweb_loom`; the rest is left out there.

pub mod error;
pub mod inflight;
pub mod sync;
pub mod units;

#[cfg(all(feature = "capi", not(cobweb_loom)))]
pub mod capi;
#[cfg(all(feature = "cli", not(cobweb_loom)))]
pub mod cli;
#[cfg(not(cobweb_loom))]
pub mod context;
#[cfg(not(cobweb_loom))]
pub mod events;
#[cfg(all(feature = "nbd", not(cobweb_loom)))]
pub mod export;
#[cfg(not(cobweb_loom))]
pub mod filter;
#[cfg(not(cobweb_loom))]
pub mod format;
#[cfg(not(cobweb_loom))]
pub mod graph;
#[cfg(not(cobweb_loom))]
pub mod io;
#[cfg(not(cobweb_loom))]
pub mod job;
#[cfg(not(cobweb_loom))]
pub mod limits;
#[cfg(not(cobweb_loom))]
pub mod node;
#[cfg(not(cobweb_loom))]
pub mod options;
#[cfg(not(cobweb_loom))]
pub mod queue;
#[cfg(not(cobweb_loom))]
pub mod rate;
#[cfg(not(cobweb_loom))]
pub mod report;
#[cfg(not(cobweb_loom))]
pub mod request;
#[cfg(not(cobweb_loom))]
pub mod rt;
#[cfg(not(cobweb_loom))]
pub mod stats;

/// The parts of filters that are model-checked: the fence of copy-before-write, and the RAM cache's line for space with the budget behind it.
#[cfg(cobweb_loom)]
#[allow(dead_code, reason = "the models use a part of it")]
mod filter {
    mod cbw {
        mod fence;
        #[cfg(test)]
        mod loom_tests;
        mod state;
    }
    mod ram_cache {
        mod space;
        #[cfg(test)]
        mod space_loom_tests;
    }
}
#[cfg(cobweb_loom)]
pub mod request {
    pub mod budget;
}
