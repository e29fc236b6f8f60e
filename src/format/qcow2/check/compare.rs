//! The refcounts of the image, and their comparison with what was counted.

use super::super::addr::HostOffset;
use super::super::header::Header;
use super::super::join::join_bounded;
use super::super::layout::Layout;
use super::super::meta_io::{read_at, read_words};
use super::super::refcount::block;
use super::Finding;
use super::refs::Refs;
use super::walk::Report;
use crate::error::{Error, IoError, IoResult, Result};
use crate::node::Node;
use crate::queue::Cx;
use crate::request::{Buffers, Class};
use crate::sync::Arc;
use std::collections::{HashMap, HashSet, VecDeque};

/// Blocks read at once, and the most memory they take.
const BLOCKS_AHEAD: usize = 32;
const BLOCKS_AHEAD_BYTES: u64 = 16 << 20;
/// Refcount table entries that point at a block already seen, for which unused clusters are looked for all the same. An image that is not made to be slow
/// has none.
const DUPLICATES_MAX: usize = 1024;
/// Clusters of a block that cannot be read, reported one by one.
const UNKNOWN_MAX: u64 = 64 << 10;

/// The refcount table, and blocks that have been read.
pub(super) struct Refcounts {
    layout: Layout,
    file_len: u64,
    table: Vec<u64>,
    blocks: HashMap<u64, Arc<Vec<u8>>>,
    /// Blocks in the order in which they were read.
    order: VecDeque<u64>,
    kept_max: usize,
}

impl Refcounts {
    /// Reads the refcount table (at most 8 MiB); blocks are read when needed, and kept in `ram` bytes.
    pub(super) async fn read(cx: &Cx, file: &dyn Node, header: &Header, ram: usize) -> Result<Self> {
        let layout = header.layout();
        let words = layout.reftable_entries(header.reftable_clusters) as usize;
        let table = read_words(cx, file, header.reftable_offset, words, Class::Guest).await.map_err(|e| {
            Error::io(e, format!("cannot read the refcount table at {}", header.reftable_offset))
        })?;
        let kept_max = (ram / layout.cluster_size() as usize).max(2);
        Ok(Self {
            layout,
            file_len: file.limits().size,
            table,
            blocks: HashMap::new(),
            order: VecDeque::new(),
            kept_max,
        })
    }

    pub(super) fn table(&self) -> &[u64] {
        &self.table
    }

    /// Where the block of entry `index` is; none if there is none, or it lies outside of the file (where all is zeros).
    fn block_offset(&self, index: u64) -> IoResult<Option<u64>> {
        let word = usize::try_from(index).ok().and_then(|i| self.table.get(i)).copied().unwrap_or(0);
        let offset = word & !511;
        if !offset.is_multiple_of(self.layout.cluster_size()) {
            return Err(IoError::os(libc::EIO));
        }
        Ok((offset != 0 && offset < self.file_len).then_some(offset))
    }

    /// The refcount of a cluster.
    pub(super) async fn get(&mut self, cx: &Cx, file: &dyn Node, cluster: u64) -> IoResult<u64> {
        let Some(offset) = self.block_offset(cluster >> self.layout.refblock_bits())? else { return Ok(0) };
        let block = self.block(cx, file, offset).await?;
        let index = cluster & (self.layout.refblock_entries() - 1);
        Ok(block::get(&block, self.layout.refcount_order, index as usize))
    }

    async fn block(&mut self, cx: &Cx, file: &dyn Node, offset: u64) -> IoResult<Arc<Vec<u8>>> {
        if let Some(block) = self.blocks.get(&offset) {
            return Ok(block.clone());
        }
        let memory = Buffers::alloc(self.layout.cluster_size() as usize, 4096);
        read_at(cx, file, HostOffset(offset), &memory, Class::Guest).await?;
        let block = Arc::new(memory.to_vec());
        self.keep(offset, block.clone());
        Ok(block)
    }

    fn keep(&mut self, offset: u64, block: Arc<Vec<u8>>) {
        if self.blocks.insert(offset, block).is_none() {
            self.order.push_back(offset);
        }
        while self.order.len() > self.kept_max {
            if let Some(oldest) = self.order.pop_front() {
                self.blocks.remove(&oldest);
            }
        }
    }

    /// Reads the blocks at `offsets` side by side, those that are not there; errors come back when the block is asked for.
    async fn load(&mut self, cx: &Cx, file: &dyn Node, offsets: &[u64]) {
        let size = self.layout.cluster_size() as usize;
        let missing: Vec<u64> = offsets.iter().copied().filter(|o| !self.blocks.contains_key(o)).collect();
        let memory: Vec<Buffers> = missing.iter().map(|_| Buffers::alloc(size, 4096)).collect();
        let mut results = vec![Ok(()); missing.len()];
        let reads =
            missing.iter().zip(&memory).zip(&mut results).map(|((offset, memory), result)| async move {
                *result = read_at(cx, file, HostOffset(*offset), memory, Class::Guest).await;
                Ok(())
            });
        // Each read keeps its own result.
        let _ = join_bounded(reads, BLOCKS_AHEAD).await;
        for ((offset, memory), result) in missing.into_iter().zip(memory).zip(results) {
            if result.is_ok() {
                self.keep(offset, Arc::new(memory.to_vec()));
            }
        }
    }
}

/// Compares the counts of a window with the refcounts, in the order of the file.
pub(super) async fn clusters(
    cx: &Cx,
    file: &dyn Node,
    refs: &Refs,
    refcounts: &mut Refcounts,
    file_clusters: u64,
    report: &mut Report<'_>,
) -> Result<()> {
    let window = refs.window();
    let end = window.end.min(file_clusters);
    let bits = refcounts.layout.refblock_bits();
    let ahead = BLOCKS_AHEAD
        .min((BLOCKS_AHEAD_BYTES / refcounts.layout.cluster_size()) as usize)
        .min(refcounts.kept_max / 2)
        .max(1);
    let mut seen = HashSet::new();
    let mut duplicates = 0;
    let mut at = window.start;
    while at < end {
        // Blocks with something in them: a table entry, or clusters that are referenced.
        let mut batch = Vec::new();
        let mut index = at >> bits;
        while batch.len() < ahead {
            let Some(next) = next_block(refs, refcounts, index, bits) else { break };
            if next << bits >= end {
                break;
            }
            batch.push(next);
            index = next + 1;
        }
        if batch.is_empty() {
            break;
        }
        let offsets: Vec<u64> =
            batch.iter().filter_map(|i| refcounts.block_offset(*i).ok().flatten()).collect();
        refcounts.load(cx, file, &offsets).await;
        for index in batch {
            let first = (index << bits).max(at);
            let last = ((index + 1) << bits).min(end);
            let repeated = match refcounts.block_offset(index) {
                Ok(Some(offset)) => !seen.insert(offset),
                _ => false,
            };
            duplicates += usize::from(repeated);
            let only_used = repeated && duplicates > DUPLICATES_MAX;
            compare_block(cx, file, refs, refcounts, first..last, only_used, report).await;
            at = last;
        }
    }
    Ok(())
}

/// The first block from `index` on that has an entry in the table or references in the window.
fn next_block(refs: &Refs, refcounts: &Refcounts, index: u64, bits: u32) -> Option<u64> {
    let from = usize::try_from(index).unwrap_or(usize::MAX);
    let in_table = refcounts
        .table
        .get(from..)
        .and_then(|rest| rest.iter().position(|w| *w != 0))
        .map(|n| (from + n) as u64);
    let referenced = index.checked_shl(bits).and_then(|cluster| refs.next(cluster)).map(|(c, _)| c >> bits);
    match (in_table, referenced) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

async fn compare_block(
    cx: &Cx,
    file: &dyn Node,
    refs: &Refs,
    refcounts: &mut Refcounts,
    clusters: std::ops::Range<u64>,
    only_used: bool,
    report: &mut Report<'_>,
) {
    let layout = refcounts.layout;
    let block = match refcounts.block_offset(clusters.start >> layout.refblock_bits()) {
        Ok(None) => Ok(None),
        Ok(Some(offset)) => refcounts.block(cx, file, offset).await.map(Some),
        Err(e) => Err(e),
    };
    let block = match block {
        Ok(block) => block,
        Err(e) => {
            // Of many clusters only those in use, or a sparse file could make the report endless.
            let few = clusters.end - clusters.start <= UNKNOWN_MAX;
            let mut at = clusters.start;
            while at < clusters.end {
                let next = if few { Some(at) } else { refs.next(at).map(|n| n.0) };
                let Some(cluster) = next.filter(|c| *c < clusters.end) else { break };
                report.found(&Finding::NoRefcount { cluster, errno: e.errno }, 1);
                at = cluster + 1;
            }
            return;
        }
    };
    let Some(block) = block else {
        let mut at = clusters.start;
        while let Some((cluster, references)) = refs.next(at).filter(|(c, _)| *c < clusters.end) {
            report.found(&Finding::TooLow { cluster, refcount: 0, references }, 1);
            report.in_use(cluster, layout.cluster_bits);
            at = cluster + 1;
        }
        return;
    };
    let mut cluster = clusters.start;
    while cluster < clusters.end {
        if only_used {
            match refs.next(cluster).filter(|(c, _)| *c < clusters.end) {
                Some((next, _)) => cluster = next,
                None => break,
            }
        }
        let index = cluster & (layout.refblock_entries() - 1);
        let refcount = block::get(&block, layout.refcount_order, index as usize);
        let references = refs.get(cluster);
        if refcount > 0 || references > 0 {
            report.in_use(cluster, layout.cluster_bits);
        }
        if refcount < u64::from(references) {
            report.found(&Finding::TooLow { cluster, refcount, references }, 1);
        } else if refcount > u64::from(references) {
            report.found(&Finding::Leak { cluster, refcount, references }, 1);
        }
        cluster += 1;
    }
}
