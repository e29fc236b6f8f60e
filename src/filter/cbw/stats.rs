//! Counters of one filter.

use crate::stats::Stats;
use crate::stats::hist::Hist;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Relaxed everywhere: read for statistics only.
#[derive(Debug, Default)]
pub(super) struct Counters {
    /// Bytes of guest requests that met granules not yet clear.
    pub(super) guest_bytes: AtomicU64,
    /// Bytes copied for guests.
    pub(super) copied_bytes: AtomicU64,
    /// Bytes copied in the background.
    pub(super) background_bytes: AtomicU64,
    /// Of both, bytes that were zero.
    pub(super) zero_bytes: AtomicU64,
    pub(super) timeouts: AtomicU64,
    pub(super) late: AtomicU64,
    pub(super) frozen_waits: AtomicU64,
    pub(super) released_bytes: AtomicU64,
    pub(super) total: Hist,
    pub(super) space: Hist,
    pub(super) granule: Hist,
    pub(super) read: Hist,
    pub(super) write: Hist,
}

impl Counters {
    pub(super) fn snapshot(&self, lost_bytes: u64) -> Stats {
        Stats {
            cbw_guest_bytes: self.guest_bytes.load(Relaxed),
            cbw_copied_bytes: self.copied_bytes.load(Relaxed),
            cbw_timeouts: self.timeouts.load(Relaxed),
            cbw_late: self.late.load(Relaxed),
            cbw_frozen_waits: self.frozen_waits.load(Relaxed),
            lost_bytes,
            ..Stats::default()
        }
    }

    pub(super) fn hist(&self, which: &str) -> Option<&Hist> {
        match which {
            "total" => Some(&self.total),
            "space" => Some(&self.space),
            "granule" => Some(&self.granule),
            "read" => Some(&self.read),
            "write" => Some(&self.write),
            _ => None,
        }
    }
}
