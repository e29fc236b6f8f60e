//! `ram-cache`: a write-back cache in memory over any node, and the place where a snapshot's old data waits for a slow target.
//!
//! # What it does
//!
//! A write is acknowledged when the cache holds it. Its memory comes from [`crate::node::Node::reserve`], taken before the data is read
//! (S41), or it is copied. Drain brings it to `file` later: neighbours joined into large writes, several at a time, straight from
//! the buffers. Zeroes are markers without payload (S11). Reads see memory over the spill file over `file`. Options: [`PROPS`].
//!
//! # What it guarantees
//!
//! - **Memory** (S32, S41, S75): everything it holds is within `capacity`: buffers from the moment they are reserved, whole pages, pieces of the
//!   index, zero markers, and the buffers set aside for writing through and for reading back. The process occupies no more than that and two chunks
//!   of the arena, and nothing when the cache is empty. With capacity 0 it passes everything through.
//! - **Order** (S49): of two versions of a byte the newer reaches `file` last. Data under way is never changed. A write that has been acknowledged
//!   is seen by every later read.
//! - **Durability** (S49): a flush ends when everything acknowledged before it is on `file` and `file` is flushed; what comes later
//!   it does not drain. FUA is written through.
//! - **Waiting** (S31, S42, S74): only for space, in one line, first come, first served, holding nothing that others wait for; cancel
//!   and timeouts leave it cleanly. `overflow` says what happens instead (S46), `latency-bound-ms` how long it may last.
//! - **A dead or failing file** delays only those that wait for space, for a flush, or to write through. No error loses data silently (`loss.rs`).
//! - **An idle cache** has no task and no timer.
//!
//! # What it does not guarantee
//!
//! - Nothing survives the process that has not been flushed; `settle` before closing, or the rest is thrown away (and said so in the log).
//! - Writes of the classes *background* and *lazy* go straight to `file`: they need no speed and would take space from those who do.
//! - A discard drops what is held of its range at once. Bytes of it that `file` does not really discard read as older data then.
//!
//! # Where to read
//!
//! `node` is the glue. `store` has the shared state, `index` what is held and what is on its way (pure), `space` bytes, limit and line (pure,
//! model-checked), `reserve` memory and the overflow steps, `write`, `read`, `flush` the requests, `drain`, `spill` and `loss` the background.
//! Locks, in order: `Work` (one per cache: index and workers), the space's, the budget's; all held for short sections without I/O, without
//! waking anybody and without freeing data. Memory belongs to whoever holds a [`crate::request::Buffers`] of it.

mod config;
mod drain;
mod flush;
mod index;
mod loss;
mod meter;
mod node;
mod read;
mod reserve;
mod space;
mod spill;
mod store;
mod write;

#[cfg(test)]
mod index_tests;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

pub use config::{CacheOptions, Overflow, PROPS};
pub use loss::LossHandler;
pub use node::RamCache;
