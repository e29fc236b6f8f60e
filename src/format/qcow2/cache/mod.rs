//! L2 tables in RAM, in slices.
//!
//! A slice is a piece of an L2 table (`l2-cache-entry-size`, 4 KiB unless told otherwise); its key is its place on the disk: guest offset divided by the bytes that a slice
//! maps. [`L2Cache`] finds a slice by key through a radix tree of swappable pointers (`index`), without a hash and without writing anything that queues share;
//! a hit needs no lock. Misses are loaded once, whoever asks; all misses of a request at once. Each shard evicts clean slices by the clock (`evict`).
//!
//! What users rely on
//! - A [`Slice`] that is only read may be evicted meanwhile; what was read was true at the moment of the lookup. Host clusters found this way stay what
//!   they are for as long as the reader holds a pass of the image's `inflight::Grace`, taken before the lookup.
//! - A [`Pinned`] slice is not evicted. Who changes an entry pins the slice before it reads the entry and keeps the pin until [`Pinned::set`] has returned:
//!   that stores the entry and then marks its part dirty (qcow2.md 3.1 point 6).
//! - A dirty slice, and one whose parts a commit has copied and not yet released ([`L2Cache::release_cut`]), is not evicted (rule 14).
//!
//! Locks: one per shard, held for pushes and pops only, nothing else is locked inside but the list of dirty slices.
//! Memory: at most the configured bytes of slices, plus what is pinned (bounded by the requests in flight); the pointers take one 512th of what has ever been
//! cached or less at the default sizes.

mod evict;
mod index;
mod l2;
mod slice;
#[cfg(test)]
mod tests;

pub(super) use evict::{Cached, Ring};
pub(super) use index::Index;
pub use l2::{L2Cache, Pinned, SliceRef};
pub use slice::{DirtyPart, Slice};
