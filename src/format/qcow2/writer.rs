//! What an image has only if it can be written.
//!
//! A [`Writer`] is made when a writable image is opened, and reads what writing needs: the L1 table, the refcount table, the header block. It clears autoclear bits that it
//! does not know, durably (section 1). It holds the allocator, the commits, and the two lists that keep changes apart:
//!
//! - `changing`: guest clusters whose mapping is being changed. A slow request enters the clusters of a window before it looks at their entries and leaves when
//!   the entries are stored; requests for the same clusters follow each other. Overwrites of clusters that are ours alone do not come here.
//! - `tables`: L1 indices whose table is being made or copied.
//!
//! Order: `changing` before `tables`; nobody waits for `changing` while in `tables`.

use super::alloc::{Allocator, Config, MetadataMap};
use super::commit::Commit;
use super::cow::stage::Stages;
use super::feature::{Autoclear, Incompatible};
use super::header_area::{Field, HeaderArea};
use super::image::Image;
use super::l1::L1;
use super::layout::Layout;
use super::meta_io::read_words;
use super::pack::Packer;
use super::refcount::table::Refcounts;
use crate::error::{Error, IoError, IoResult, Result};
use crate::inflight::{Config as ListConfig, Entry, InflightList};
use crate::node::{Edge, Growth};
use crate::queue::Cx;
use crate::request::{Buffers, Class, Request};
use crate::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Arc, Mutex};
use crate::units::ByteRange;
use event_listener::Event;
use std::fmt;

/// See the module.
pub struct Writer {
    /// Host clusters.
    pub alloc: Arc<Allocator>,
    /// Commits.
    pub commit: Arc<Commit>,
    /// The header.
    pub header: HeaderArea,
    /// Counters.
    pub counters: Counters,
    /// Clusters whose bytes wait in RAM.
    pub stages: Stages,
    /// Where compressed clusters go.
    pub(super) packer: Packer,
    /// Held while sub-clusters are linked: a few loads and stores.
    pub(super) linking: Mutex<()>,
    /// Ends of the last writes, for telling those that go on in order.
    ends: [AtomicU64; ENDS],
    next_end: AtomicUsize,
    /// A task looks after the age of stages.
    pub(super) ageing: AtomicBool,
    /// A task makes room in the stages.
    pub(super) relieving: AtomicBool,
    /// It has ended.
    pub(super) relieved: Event,
    changing: Arc<InflightList>,
    tables: Arc<InflightList>,
    /// Zeros to be written; nobody writes into them.
    zeros: Buffers,
}

/// What writing has done so far.
#[derive(Debug, Default)]
pub struct Counters {
    /// Clusters (or sub-clusters' clusters) that were linked.
    pub linked: AtomicU64,
    /// Reads of old content for copy-on-write.
    pub cow_reads: AtomicU64,
    /// Partial writes that needed no old content.
    pub cow_avoided: AtomicU64,
    /// Writes that joined a staged cluster.
    pub joined: AtomicU64,
    /// Clusters that were staged, and those of them that were filled before they were settled.
    pub staged: AtomicU64,
    /// See `staged`.
    pub filled: AtomicU64,
}

/// Where metadata lies, for the allocator.
struct Metadata {
    layout: Layout,
    l1: Arc<L1>,
    snapshots: ByteRange,
}

/// Kind of the entries of both lists.
const CHANGE: u8 = 0;
/// First and longest run of data clusters.
const RUN_LEN: (u64, u64) = (1 << 20, 64 << 20);
/// Writers in order that are told apart.
const ENDS: usize = 8;
/// Bytes of zeros at hand.
const ZEROS: usize = 64 << 10;

impl Writer {
    /// Makes an image writable. The file can be written; nothing of the image has been used yet.
    pub async fn open(cx: &Cx, image: &Arc<Image>) -> Result<Arc<Self>> {
        let failed = |what: &str, e: IoError| Error::io(e, format!("cannot read the {what}"));
        let layout = image.layout;
        let file = image.file.node();
        let header = image.header.lock().clone();
        let l1 = image.l1_table(cx).await.map_err(|e| failed("L1 table", e))?;
        let words = layout.reftable_entries(header.reftable_clusters) as usize;
        let table = read_words(cx, &*file, header.reftable_offset, words, Class::Guest)
            .await
            .map_err(|e| failed("refcount table", e))?;
        let blocks = image.settings.cache_sizes(&layout, image.size()).refcounts >> layout.cluster_bits;
        let part = file.limits().request_align.clamp(512, 4096) as usize;
        let counts = Refcounts::new(layout, header.reftable_offset, table, blocks as usize, part);
        let metadata = Metadata {
            layout,
            l1: image.l1.clone(),
            snapshots: if header.snapshots > 0 {
                // Its length is not known before it is read; entries have 40 bytes at least.
                ByteRange { offset: header.snapshots_offset.get(), len: u64::from(header.snapshots) * 40 }
            } else {
                ByteRange { offset: 0, len: 0 }
            },
        };
        let config = Config {
            layout,
            file: image.file.clone(),
            metadata: Arc::new(metadata),
            grace: image.grace.clone(),
            run_len: RUN_LEN,
        };
        let area =
            HeaderArea::read(cx, &*file, layout.cluster_size()).await.map_err(|e| failed("header", e))?;
        drop(l1);
        // The place in a data file is given, so nothing is won by waiting.
        let stage_bytes = if layout.data_file { 0 } else { image.settings.stage_bytes };
        image.cache.watch_tables(&image.l1);
        let writer = Arc::new(Self {
            alloc: Allocator::new(config, counts),
            commit: Arc::new(Commit::new()),
            header: area,
            counters: Counters::default(),
            stages: Stages::new(layout.cluster_bits, stage_bytes),
            packer: Packer::default(),
            linking: Mutex::new(()),
            ends: Default::default(),
            next_end: AtomicUsize::new(0),
            ageing: AtomicBool::new(false),
            relieving: AtomicBool::new(false),
            relieved: Event::new(),
            changing: list(layout.cluster_bits.max(16) + 1),
            tables: list(0),
            zeros: Buffers::alloc(ZEROS, 4096),
        });
        writer.prepare(cx, image).await.map_err(|e| Error::io(e, "cannot make the image writable"))?;
        Ok(writer)
    }

    /// What must be in the file before the first write.
    async fn prepare(&self, cx: &Cx, image: &Arc<Image>) -> IoResult {
        let header = image.header.lock().clone();
        let mut kept = Autoclear::from_bits_retain(header.autoclear.bits() & Autoclear::all().bits());
        if kept.contains(Autoclear::BITMAPS) && !super::bitmap::mark_in_use(cx, image, &header).await? {
            kept.remove(Autoclear::BITMAPS);
        }
        let changed = header.version > 2 && kept != header.autoclear;
        if changed {
            image.header.lock().autoclear = kept;
            self.header.change(cx, &image.file, &[Field::Autoclear(kept)]).await?;
        }
        if changed || kept.contains(Autoclear::BITMAPS) {
            self.sync(cx, &image.file).await?;
        }
        if let Some(data) = image.data_file.as_ref().map(Edge::node)
            && data.limits().size < image.size()
        {
            match data.resize(cx, image.size(), Growth::Sparse).await {
                Err(e) if e.errno != libc::ENOTSUP => return Err(e),
                _ => {}
            }
        }
        Ok(())
    }

    /// Enters the guest clusters of `range` (whole clusters), after those who are in them.
    pub(super) async fn enter(&self, cx: &Cx, range: ByteRange) -> IoResult<Entry> {
        ready_or_wait(cx, self.changing.acquire(range, CHANGE)).await
    }

    /// Enters the guest clusters of `range` if nobody is in them.
    pub(super) fn try_enter(&self, range: ByteRange) -> Option<Entry> {
        self.changing.try_acquire(range, CHANGE)
    }

    /// Whether a write at `offset` goes on where one of the last ones ended; from now on it ends at `end`.
    pub(super) fn follows(&self, offset: u64, end: u64) -> bool {
        for slot in &self.ends {
            // Relaxed: a hint, and nothing is read through it.
            if slot.compare_exchange(offset, end, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                return true;
            }
        }
        let next = self.next_end.fetch_add(1, Ordering::Relaxed) % ENDS;
        self.ends[next].store(end, Ordering::Relaxed);
        false
    }

    /// Enters an L1 index.
    pub(super) async fn enter_table(&self, cx: &Cx, l1_index: u64) -> IoResult<Entry> {
        let range = ByteRange { offset: l1_index, len: 1 };
        ready_or_wait(cx, self.tables.acquire(range, CHANGE)).await
    }

    /// `len` bytes of zeros, for writing.
    pub(super) fn zeros(&self, len: u64) -> Buffers {
        let mut out = Buffers::new();
        let mut left = len as usize;
        while left > 0 {
            let n = left.min(ZEROS);
            out.append(self.zeros.slice(0, n));
            left -= n;
        }
        out
    }

    /// Damage has been found: sets the corrupt bit, durably as far as that is possible, and refuses writes from now on.
    pub(super) async fn mark_corrupt(&self, cx: &Cx, image: &Arc<Image>) {
        image.read_only.store(true, Ordering::Release);
        let bits = {
            let mut header = image.header.lock();
            if header.version < 3 {
                return;
            }
            header.incompatible |= Incompatible::CORRUPT;
            header.incompatible
        };
        if self.header.change(cx, &image.file, &[Field::Incompatible(bits)]).await.is_ok() {
            // What cannot be made durable has been told to the program.
            let _ = self.sync(cx, &image.file).await;
        }
    }

    async fn sync(&self, cx: &Cx, file: &Edge) -> IoResult {
        let node = file.node();
        cx.run(&*node, Request::flush()).await
    }
}

impl MetadataMap for Metadata {
    fn at(&self, range: ByteRange) -> Option<&'static str> {
        if self.snapshots.overlaps(range) {
            return Some("snapshot table");
        }
        let l1 = self.l1.get();
        let l1 = l1.as_ref()?;
        if (ByteRange { offset: l1.offset().get(), len: l1.len() as u64 * 8 }).overlaps(range) {
            return Some("L1 table");
        }
        let cluster = self.layout.cluster_size();
        let table = |index| l1.entry(index, &self.layout).ok().and_then(|e| e.table);
        let hit = (0..l1.len() as u64)
            .filter_map(table)
            .any(|at| ByteRange { offset: at.get(), len: cluster }.overlaps(range));
        hit.then_some("L2 table")
    }
}

fn list(shard_bytes_log2: u32) -> Arc<InflightList> {
    let mut conflicts = [0; 8];
    conflicts[CHANGE as usize] = 1 << CHANGE;
    InflightList::new(ListConfig { shard_bytes_log2, shards_log2: 8, conflicts })
}

/// `future`; that it waits is told to those who look after waits only if it does.
async fn ready_or_wait<F: std::future::Future>(cx: &Cx, future: F) -> IoResult<F::Output> {
    let mut future = std::pin::pin!(future);
    let first = std::future::poll_fn(|context| {
        std::task::Poll::Ready(match future.as_mut().poll(context) {
            std::task::Poll::Ready(value) => Some(value),
            std::task::Poll::Pending => None,
        })
    });
    match first.await {
        Some(value) => Ok(value),
        None => cx.waiting(future).await,
    }
}

impl fmt::Debug for Writer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writer")
            .field("alloc", &self.alloc)
            .field("commit", &self.commit)
            .finish_non_exhaustive()
    }
}
