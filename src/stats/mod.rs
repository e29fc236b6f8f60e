//! Numbers that are always on (semantics.md, section 6): how long guests wait, what was counted, how fast a cache fills.
//!
//! - [`hist`]: a lock-free histogram of times with the layout of `cobweb_hist`. Any thread records; a snapshot is taken
//!   while others record and is then a plain value. A snapshot is not an instant: times recorded meanwhile may be in it or
//!   not, each wholly as far as `count` and the buckets go; `sum_ns` and `max_ns` can be a few records off.
//! - [`counters`]: the plain values of `cobweb_stats` and their JSON form. Whoever counts keeps its own atomics or fields
//!   and fills a [`Stats`] when asked.
//! - [`rate`]: amounts per second over the last seconds, and time-to-full. Pure: time comes in as an argument.
//!
//! No locks. Nothing here reads a clock, and no number panics on overflow: sums of times wrap after centuries, everything
//! else saturates.

pub mod counters;
pub mod hist;
pub mod rate;

pub use counters::Stats;
pub use hist::{Hist, HistSnapshot};
pub use rate::{FillRate, Rate};

/// Names of the histograms of what a guest waited for: all of it, space in the cache, granules held by others, reads of
/// the source, writes to the target.
pub const WAITS: [&str; 5] = ["total", "space", "granule", "read", "write"];
