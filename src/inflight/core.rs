//! What the entries of a list share, and how long it lives.
//!
//! Entries outlive the handles of their list and still have to reach its chains. A count of references in which every
//! insertion and removal on every thread takes part would cost more than the rest of the list, so nobody counts while
//! there is a handle. When the last one goes, it makes *orphans* of the entries it finds: each gets a mark in its ticket
//! word and a share in `owners`, and the last orphan to be removed retires the core. Of the mark and the removal, both
//! changes of one word, one is first: an entry that was removed without seeing the mark has no share, and the pin it
//! holds during its removal keeps the core until it is done.

use std::ptr::NonNull;

use super::canary::canary;
use super::list::Config;
use super::reclaim::{self, Watch};
use super::shard::Shards;
use crate::sync::atomic::Ordering::{AcqRel, Relaxed};
use crate::sync::atomic::{AtomicU64, AtomicUsize};
use crate::sync::epoch::{self, Guard};

/// The shared part of a list.
pub(super) struct Core {
    pub(super) tickets: Tickets,
    pub(super) config: Config,
    pub(super) shards: Shards,
    /// Shares in the core once the last handle has gone; until then 1, that handle's.
    owners: AtomicUsize,
    pub(super) watch: Watch,
}

/// The counter tickets are drawn from, alone on its cache lines: it is the one thing all inserting threads change.
#[repr(align(128))]
pub(super) struct Tickets(AtomicU64);

impl std::ops::Deref for Tickets {
    type Target = AtomicU64;
    fn deref(&self) -> &AtomicU64 {
        &self.0
    }
}

impl Core {
    pub(super) fn new(config: Config) -> NonNull<Self> {
        let core = Self {
            tickets: Tickets(AtomicU64::new(0)),
            shards: Shards::new(config.shard_bytes_log2, config.shards_log2),
            config,
            owners: AtomicUsize::new(1),
            watch: Watch::default(),
        };
        NonNull::from(Box::leak(Box::new(core)))
    }

    /// The last handle goes.
    ///
    /// # Safety
    /// Called once; no call on the list runs or will begin.
    pub(super) unsafe fn abandon(core: NonNull<Self>) {
        let guard = epoch::pin();
        // SAFETY: our own share is given up below.
        let this = unsafe { core.as_ref() };
        this.watch.touch();
        this.walk_all(&guard, |node, _| {
            // Relaxed: our own share keeps the count above 0, and each share is counted before its owner knows of it.
            this.owners.fetch_add(1, Relaxed);
            if canary("no-orphans") || !node.make_orphan() {
                this.owners.fetch_sub(1, Relaxed);
            }
        });
        // SAFETY: our share.
        unsafe { Self::give_up_share(core, &guard) };
    }

    /// # Safety
    /// The caller has a share and does not use the core after its guard.
    pub(super) unsafe fn give_up_share(core: NonNull<Self>, guard: &Guard) {
        // SAFETY: the share.
        let owners = unsafe { &core.as_ref().owners };
        // AcqRel: partner is this line in the other owners: the last one sees all they did.
        if owners.fetch_sub(1, AcqRel) == 1 {
            // SAFETY: nobody has a share, and who still removes an entry is pinned.
            unsafe { reclaim::retire_core(core, guard) };
        }
    }
}
