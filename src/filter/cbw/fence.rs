//! The in-flight list of one filter: kinds, and what waits for what.

use crate::inflight::{Config, Entry, InflightList, Kind};
use crate::sync::Arc;
use crate::units::ByteRange;

/// Old data on its way from the source.
const COPY: Kind = 0;
/// A snapshot read that was directed at the source.
const FROZEN: Kind = 1;

/// Entries of copies and of frozen reads. No kind conflicts with another *at publication*: who has to wait asks for it explicitly, after looking at the states.
#[derive(Debug)]
pub(super) struct Fence(Arc<InflightList>);

impl Fence {
    pub(super) fn new() -> Self {
        Self(InflightList::new(Config { shard_bytes_log2: 20, shards_log2: 8, conflicts: [0; 8] }))
    }

    /// Publishes a copy over `range`, before any granule of it is claimed: whoever meets READING finds the entry.
    pub(super) fn copy(&self, range: ByteRange) -> Entry {
        self.0.insert(range, COPY)
    }

    /// Registers a snapshot read at the source, before the reader looks at the states (S15).
    pub(super) fn freeze(&self, range: ByteRange) -> Entry {
        self.0.insert(range, FROZEN)
    }

    /// Waits for the copies that are running over `range` now.
    pub(super) async fn copies_ended(&self, range: ByteRange) {
        self.0.wait_clear(range, 1 << COPY).await;
    }

    /// Whether a snapshot read is registered at the source; the caller has published the states before (S5).
    pub(super) fn is_frozen(&self, range: ByteRange) -> bool {
        self.0.any(range, 1 << FROZEN)
    }

    /// Waits for the snapshot reads registered at the source over `range` now.
    pub(super) async fn frozen_ended(&self, range: ByteRange) {
        self.0.wait_clear(range, 1 << FROZEN).await;
    }
}
