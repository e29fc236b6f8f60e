//! The allocator of one image: what is under its lock, and the calls that do not wait.

use super::pending::{Pending, Unlinked, UnlinkedKind};
use super::run::{Grant, Runs};
use super::space::Space;
use crate::error::IoResult;
use crate::format::qcow2::addr::HostOffset;
use crate::format::qcow2::flight::Flight;
use crate::format::qcow2::layout::Layout;
use crate::format::qcow2::refcount::table::{RefCut, Refcounts};
use crate::inflight::Grace;
use crate::node::Edge;
use crate::queue::Cx;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Arc, Mutex};
use crate::units::{ByteRange, align_up};
use smallvec::SmallVec;
use std::fmt;

/// What clusters are for; each kind has runs of its own, so that data lies together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Guest data.
    Data,
    /// L2 tables and the like.
    Metadata,
}

impl Kind {
    /// The other one.
    pub(super) fn other(self) -> Self {
        match self {
            Kind::Data => Kind::Metadata,
            Kind::Metadata => Kind::Data,
        }
    }
}

/// Clusters for one request, in order.
pub type Grants = SmallVec<[Grant; 2]>;

/// Says what metadata lies in a range of the file, for the allocator never to hand it out. Called with the allocator's lock held: no waiting, and no call back.
pub trait MetadataMap: Send + Sync {
    /// Name of a structure in `range`, if there is one. The refcount structures are looked after by the allocator itself.
    fn at(&self, range: ByteRange) -> Option<&'static str>;
}

/// How an allocator works.
pub struct Config {
    /// Shape of the tables.
    pub layout: Layout,
    /// The image file.
    pub file: Arc<Edge>,
    /// Where other metadata lies.
    pub metadata: Arc<dyn MetadataMap>,
    /// Waited for before a cluster is used again.
    pub grace: Arc<Grace>,
    /// First and longest run of data clusters, in bytes.
    pub run_len: (u64, u64),
}

/// See the folder.
pub struct Allocator {
    pub(super) layout: Layout,
    pub(super) file: Arc<Edge>,
    pub(super) metadata: Arc<dyn MetadataMap>,
    pub(super) grace: Arc<Grace>,
    pub(super) state: Mutex<State>,
    /// The refill under way.
    pub(super) refill: Mutex<Option<Arc<Flight<()>>>>,
    /// The release under way.
    pub(super) release: Mutex<Option<Arc<Flight<()>>>>,
    /// Cuts begun, and the last one that is durable.
    begun: AtomicU64,
    done: AtomicU64,
    /// For statistics: fallocate calls or the like, and clusters handed out.
    pub(super) refills: AtomicU64,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) counts: Refcounts,
    pub(super) data: Runs,
    pub(super) metadata: Runs,
    pub(super) space: Space,
    pub(super) pending: Pending,
    /// First byte behind everything that may be in use; clusters from here on are looked at before they are taken.
    pub(super) end: u64,
    /// The end has been looked for, and the last block searched for free space.
    pub(super) surveyed: bool,
    /// All blocks have been.
    pub(super) searched: bool,
}

impl Allocator {
    /// An allocator over `counts`. `end` is where the file ends, for a node that can grow.
    pub fn new(config: Config, counts: Refcounts) -> Arc<Self> {
        let Config { layout, file, metadata, grace, run_len } = config;
        let cluster = layout.cluster_size();
        let run = |len: u64| align_up(len.max(1), cluster);
        let end = align_up(file.get().limits().size, cluster).max(cluster);
        let state = State {
            counts,
            data: Runs::new(run(run_len.0), run(run_len.1)),
            metadata: Runs::new(
                run(METADATA_RUN.min(run_len.0)).max(2 * cluster),
                run(METADATA_RUN.max(2 * cluster)),
            ),
            space: Space::new(EXTENTS_MAX),
            pending: Pending::default(),
            end,
            surveyed: false,
            searched: false,
        };
        Arc::new(Self {
            layout,
            file,
            metadata,
            grace,
            state: Mutex::new(state),
            refill: Mutex::default(),
            release: Mutex::default(),
            begun: AtomicU64::new(0),
            done: AtomicU64::new(0),
            refills: AtomicU64::new(0),
        })
    }

    /// `len` bytes (whole clusters, not 0) in as few pieces as the runs allow; waits for a refill if need be. ENOSPC when there is no space for them.
    pub async fn take(self: &Arc<Self>, cx: &Cx, kind: Kind, len: u64) -> IoResult<Grants> {
        debug_assert!(len > 0 && len.is_multiple_of(self.layout.cluster_size()));
        loop {
            if let Some(grants) = self.try_take(cx, kind, len) {
                return Ok(grants);
            }
            self.refill(cx, kind, len).await?;
        }
    }

    /// Like [`Allocator::take`], if the runs have that much.
    pub fn try_take(self: &Arc<Self>, cx: &Cx, kind: Kind, len: u64) -> Option<Grants> {
        let done = self.done();
        let mut grants = Grants::new();
        let wants_more = {
            let mut state = self.state.lock();
            let runs = state.runs(kind);
            if runs.left() < len {
                return None;
            }
            let mut left = len;
            while left > 0 {
                let Some(grant) = runs.take(left, done) else { break };
                left -= grant.range.len;
                grants.push(grant);
            }
            runs.wants_more()
        };
        if wants_more {
            self.refill_ahead(cx, kind);
        }
        Some(grants)
    }

    /// One cluster for metadata.
    pub async fn take_table(self: &Arc<Self>, cx: &Cx) -> IoResult<Grant> {
        let grants = self.take(cx, Kind::Metadata, self.layout.cluster_size()).await?;
        Ok(grants[0])
    }

    /// Clusters that were taken and not linked anywhere, with no I/O to them under way. They may have been written.
    pub fn give_back(&self, range: ByteRange) {
        let mut state = self.state.lock();
        match state.counts.change(range, true) {
            // They were in no cut as anything but leaks, so they need not wait.
            Ok(()) => state.space.insert(range),
            // A release loads the blocks.
            Err(_) => {
                let cut = self.begun.load(Ordering::SeqCst) + 1;
                state.pending.push(cut, Unlinked { range, kind: UnlinkedKind::Clusters, punch: false });
            }
        }
    }

    /// Host clusters lost their place in the mapping, in a change that has been marked dirty already.
    pub fn unlink(&self, range: ByteRange, kind: UnlinkedKind, punch: bool) {
        if range.is_empty() {
            return;
        }
        let mut state = self.state.lock();
        // Under the lock, so that numbers in the list do not fall; SeqCst: see `begin_cut`.
        let cut = self.begun.load(Ordering::SeqCst) + 1;
        state.pending.push(cut, Unlinked { range, kind, punch });
    }

    /// The next cut begins: what is unlinked from now on may not be in it. Called before anything is copied. Its number.
    pub fn begin_cut(&self) -> u64 {
        // SeqCst: an unlinking that reads the old number came before the copies of this cut.
        self.begun.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Cuts begun so far.
    pub fn cuts_begun(&self) -> u64 {
        self.begun.load(Ordering::SeqCst)
    }

    /// The last cut that is durable.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Acquire)
    }

    /// Copies what the file lacks of refcounts; after the mappings have been copied, so that everything they point at is counted.
    pub fn take_cut(&self) -> RefCut {
        self.state.lock().counts.take_cut()
    }

    /// A cut is over. Durable if it has not `failed`.
    pub fn end_cut(&self, cut: &RefCut, number: u64, failed: bool) {
        let mut state = self.state.lock();
        state.counts.end_cut(cut, failed);
        state.counts.trim();
        if !failed {
            // Release: runs of this cut are ripe for who reads the number.
            self.done.store(number, Ordering::Release);
        }
    }

    /// Whether refcounts wait to be written.
    pub fn is_dirty(&self) -> bool {
        self.state.lock().counts.is_dirty()
    }

    /// Whether something unlinked waits to be freed.
    pub fn has_pending(&self) -> bool {
        !self.state.lock().pending.is_empty()
    }

    /// Refills so far, and how far the file is in use.
    pub fn statistics(&self) -> (u64, u64) {
        (self.refills.load(Ordering::Relaxed), self.state.lock().end)
    }

    /// Count of the cluster at `host`, if its block is in RAM.
    pub fn refcount(&self, host: HostOffset) -> Option<u64> {
        self.state.lock().counts.get(host.get()).ok()
    }
}

impl State {
    pub(super) fn runs(&mut self, kind: Kind) -> &mut Runs {
        match kind {
            Kind::Data => &mut self.data,
            Kind::Metadata => &mut self.metadata,
        }
    }

    /// What the other kind would like, if it has nothing yet.
    pub(super) fn other_wish(&self, kind: Kind) -> u64 {
        let other = match kind {
            Kind::Data => &self.metadata,
            Kind::Metadata => &self.data,
        };
        if other.left() == 0 { other.next_len() } else { 0 }
    }
}

impl fmt::Debug for Allocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Allocator")
            .field("begun", &self.begun)
            .field("done", &self.done)
            .finish_non_exhaustive()
    }
}

/// Runs of tables: a gigabyte of guest data takes about this much at 64 KiB clusters.
const METADATA_RUN: u64 = 128 << 10;
/// Free extents kept in the index.
const EXTENTS_MAX: usize = 65_536;
