//! The order between readers of the snapshot that read the source and writers that change it (S5, S15, S71).
//!
//! Small and free of I/O, so that loom can check it. Reader and writer each publish first and then look at the other:
//!
//! ```text
//!   reader: register at the source;  full fence;  look at the state: still NEEDED? read the source, withdraw
//!   copier: state leaves NEEDED
//!   writer: sees that;  full fence;  anybody registered? wait for them;  mark clear;  write the source
//! ```
//!
//! Of the two fences one is first, so either the reader sees that the granule has left NEEDED, or the writer sees the reader. That the
//! copier and the writer may be different threads changes nothing: if the writer's fence is first and the reader still
//! saw NEEDED, the reader would have read an older value than the writer had read before its fence, which coherence forbids. The
//! fences are inside `InflightList` ("publish and look" in its contract).
//!
//! A read is *overtaken* when writers were let go without waiting for it (S34): the granule is then marked clear, lost, or the
//! snapshot is over, and the reader, who looks again after its read, drops what it has read. A mark set in the regular way is
//! never seen by a reader that is still registered, because its setter waited for it.

#![cfg_attr(cobweb_loom, allow(dead_code))]

use super::state::{Granules, State, States};
use crate::inflight::{Config, Entry, InflightList, Kind};
use crate::sync::Arc;
use crate::units::ByteRange;

/// A claimed range whose old data is being copied. Others wait for it (S6).
const COPY: Kind = 0;
/// A read of the snapshot directed at the source.
const FROZEN: Kind = 1;

/// The in-flight list of a filter. No kinds exclude each other: every wait here is explicit.
#[derive(Debug)]
pub(super) struct Fence(Arc<InflightList>);

impl Fence {
    /// An empty list, for granules of this length. Batches and pieces are at most a megabyte or a granule.
    pub(super) fn new(granule_log2: u32) -> Self {
        let shards_log2 = if cfg!(cobweb_loom) { 0 } else { 8 };
        let shard_bytes_log2 = granule_log2.max(20);
        Self(InflightList::new(Config { shard_bytes_log2, shards_log2, conflicts: [0; 8] }))
    }

    /// Publishes a copy over `range`, before any granule of it is claimed: whoever meets READING finds the entry.
    pub(super) fn copy(&self, range: ByteRange) -> Entry {
        self.0.insert(range, COPY)
    }

    /// Waits for the copies that are running over `range` now.
    pub(super) async fn copies_ended(&self, range: ByteRange) {
        self.0.wait_clear(range, 1 << COPY).await;
    }

    /// Registers a reader at the source. It looks at the states only after this.
    pub(super) fn register(&self, range: ByteRange) -> Entry {
        self.0.insert(range, FROZEN)
    }

    /// Whether writers of `range` need not wait for readers. The caller has seen the states leave NEEDED before.
    pub(super) fn is_quiet(&self, range: ByteRange) -> bool {
        !self.0.any(range, 1 << FROZEN)
    }

    /// Waits for the readers that are registered at the source over `range` now. The caller has seen the states leave NEEDED before.
    pub(super) async fn readers_ended(&self, range: ByteRange) {
        self.0.wait_clear(range, 1 << FROZEN).await;
    }
}

/// Marks `granules` clear. The caller has seen them leave NEEDED and READING, and since then either found [`Fence::is_quiet`] or
/// waited, or decided to overtake the readers. `false` if one of them is held: look again.
pub(super) fn mark(states: &States, granules: Granules) -> bool {
    granules.into_iter().all(|g| states.mark_clear(g))
}

/// Whether a registered reader may read the source for this granule.
pub(super) fn may_read_source(states: &States, granule: u64) -> bool {
    states.get(granule).state() == State::Needed
}

/// Whether a read of the source that has just ended was overtaken: its data may be new. The caller also looks whether the snapshot is over.
pub(super) fn is_overtaken(states: &States, granules: Granules) -> bool {
    granules.into_iter().any(|g| {
        let seen = states.get(g);
        seen.is_clear() || seen.state() == State::Lost
    })
}
