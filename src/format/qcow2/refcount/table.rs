//! The refcounts of an image in RAM: the table, the blocks that are loaded, and what of both the file does not have yet.
//!
//! A plain value under the allocator's lock; nothing here waits or reads. A block is loaded by whoever needs it, outside of the lock ([`Refcounts::missing`],
//! [`Refcounts::install`]). Every change marks a *part* (512 bytes, or the file's block if larger) as dirty; a cut takes the marks and copies of the
//! parts ([`Refcounts::take_cut`]), so what is written later is as it was at the cut (qcow2.md 3.1 points 5 and 6). A failed cut marks its parts
//! again. A block with dirty parts, or in a cut that is not over, stays in RAM.
//!
//! Blocks and tables that are new are whole in their first cut (step 0); the pointers to them follow in step 1.

use super::block;
use crate::error::{Error, IoError, Result};
use crate::format::qcow2::addr::HostOffset;
use crate::format::qcow2::entry::decode_reftable;
use crate::format::qcow2::layout::Layout;
use crate::format::qcow2::limits::REFTABLE_BYTES_MAX;
use crate::units::ByteRange;
use std::collections::BTreeMap;

/// Refcounts of one image.
#[derive(Debug)]
pub struct Refcounts {
    layout: Layout,
    /// Words of the table, in host byte order; whole clusters of it.
    entries: Vec<u64>,
    table: HostOffset,
    /// Parts of the table to be written.
    table_dirty: Marks,
    /// The table is in a place that no header points at yet.
    table_moved: bool,
    blocks: BTreeMap<u64, Block>,
    blocks_max: usize,
    part: usize,
    clock: u64,
}

#[derive(Debug)]
struct Block {
    offset: HostOffset,
    bytes: Vec<u8>,
    dirty: Marks,
    is_new: bool,
    /// Cuts that hold parts of it and are not over.
    cuts: u32,
    used: u64,
}

/// A bit per part.
#[derive(Clone, Debug, Default)]
struct Marks {
    words: Vec<u64>,
    any: bool,
}

/// A change of a refcount that cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// A block must be loaded first.
    NotLoaded(u64),
    /// The count would pass the largest of its width, or fall below 0, at this cluster.
    OutOfBounds(u64),
}

/// Bytes for the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where in the file.
    pub offset: HostOffset,
    /// What.
    pub bytes: Vec<u8>,
}

/// What a cut holds of the refcounts.
#[derive(Debug, Default)]
pub struct RefCut {
    /// New blocks and a new table: step 0.
    pub new: Vec<Piece>,
    /// Changed parts of blocks: step 1, or step 0 if there is one.
    pub parts: Vec<Piece>,
    /// Changed parts of a table that the header points at: step 1.
    pub table_parts: Vec<Piece>,
    /// The header is to point at this table (offset, clusters): step 1.
    pub table_moved: Option<(HostOffset, u32)>,
    /// Block and part numbers, for marking them again.
    taken: Vec<(u64, Vec<usize>, bool)>,
    table_taken: Vec<usize>,
}

/// New structures for clusters that nothing counts yet; see [`Refcounts::plan_growth`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrowthPlan {
    /// New blocks: table index, host offset.
    pub blocks: Vec<(u64, HostOffset)>,
    /// A new table: host offset, clusters.
    pub table: Option<(HostOffset, u32)>,
    /// What is left for use.
    pub data: ByteRange,
    /// All of it, structures and data.
    pub all: ByteRange,
}

impl Refcounts {
    /// Refcounts with this table. At most `blocks_max` blocks are kept in RAM beyond those that must be; parts are `part` bytes, a power of two from 512
    /// to the cluster size.
    pub fn new(layout: Layout, table: HostOffset, entries: Vec<u64>, blocks_max: usize, part: usize) -> Self {
        let part = part.min(layout.cluster_size() as usize);
        debug_assert!(part.is_power_of_two() && part >= 512);
        let marks = Marks::new(entries.len() * 8 / part);
        Self {
            layout,
            entries,
            table,
            table_dirty: marks,
            table_moved: false,
            blocks: BTreeMap::new(),
            blocks_max: blocks_max.max(2),
            part,
            clock: 0,
        }
    }

    /// The table: offset and bytes.
    pub fn table(&self) -> ByteRange {
        ByteRange { offset: self.table.get(), len: self.entries.len() as u64 * 8 }
    }

    /// Where block `index` lies; `None` if there is none. Errors name the entry.
    pub fn block_offset(&self, index: u64) -> Result<Option<HostOffset>> {
        let word = self.entries.get(index as usize).copied().unwrap_or(0);
        decode_reftable(word, &self.layout).map_err(|e| {
            Error::new(libc::EIO, crate::error::Code::Invalid, e.at("refcount table", self.table, index))
        })
    }

    /// Indices of blocks that exist, in order.
    pub fn block_indices(&self) -> impl Iterator<Item = u64> + '_ {
        self.entries.iter().enumerate().filter(|(_, word)| **word & !511 != 0).map(|(index, _)| index as u64)
    }

    /// Whether a block lies in `range` of the file.
    pub fn has_block_in(&self, range: ByteRange) -> bool {
        let cluster = self.layout.cluster_size();
        let at =
            |word: &u64| ByteRange { offset: (word & !511).min(i64::MAX as u64 - cluster), len: cluster };
        self.entries.iter().any(|word| word & !511 != 0 && at(word).overlaps(range))
    }

    /// Blocks in RAM.
    pub fn loaded(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks for `range` that exist and are not in RAM.
    pub fn missing(&self, range: ByteRange) -> Result<Vec<(u64, HostOffset)>> {
        let mut out = Vec::new();
        for index in self.indices(range) {
            if !self.blocks.contains_key(&index)
                && let Some(offset) = self.block_offset(index)?
            {
                out.push((index, offset));
            }
        }
        Ok(out)
    }

    /// A block as it has been read from the file. If it has come in meanwhile it stays as it is. Whoever has loaded blocks puts them in and uses them in one section
    /// of the lock, and then calls [`Refcounts::trim`].
    pub fn install(&mut self, index: u64, offset: HostOffset, bytes: Vec<u8>) {
        debug_assert_eq!(bytes.len() as u64, self.layout.cluster_size());
        if self.entries.get(index as usize).is_none_or(|word| word & !511 != offset.get()) {
            return;
        }
        self.clock += 1;
        let (used, parts) = (self.clock, bytes.len() / self.part);
        let dirty = Marks::new(parts);
        self.blocks.entry(index).or_insert(Block { offset, bytes, dirty, is_new: false, cuts: 0, used });
    }

    /// Refcount of the cluster at `host`; 0 where no block is. `Err` if the block must be loaded first.
    pub fn get(&self, host: u64) -> std::result::Result<u64, Refused> {
        let index = self.layout.reftable_index(host);
        match self.blocks.get(&index) {
            Some(b) => Ok(block::get(
                &b.bytes,
                self.layout.refcount_order,
                self.layout.refblock_index(host) as usize,
            )),
            None if self.entries.get(index as usize).is_none_or(|word| word & !511 == 0) => Ok(0),
            None => Err(Refused::NotLoaded(index)),
        }
    }

    /// Largest count of the image's width.
    pub fn max(&self) -> u64 {
        block::max(self.layout.refcount_order)
    }

    /// Raises (or, with `down`, lowers) the count of every cluster of `range` by one. All or nothing.
    pub fn change(&mut self, range: ByteRange, down: bool) -> std::result::Result<(), Refused> {
        for host in self.clusters(range) {
            let now = self.get(host)?;
            let blockless = !self.blocks.contains_key(&self.layout.reftable_index(host));
            if blockless || if down { now == 0 } else { now == self.max() } {
                return Err(Refused::OutOfBounds(host));
            }
        }
        self.clock += 1;
        for host in self.clusters(range) {
            let (index, at) = (self.layout.reftable_index(host), self.layout.refblock_index(host) as usize);
            let order = self.layout.refcount_order;
            let (clock, part) = (self.clock, self.part);
            let Some(b) = self.blocks.get_mut(&index) else { continue };
            let now = block::get(&b.bytes, order, at);
            let next = if down { now - 1 } else { now + 1 };
            // Checked above.
            let _ = block::set(&mut b.bytes, order, at, next);
            b.used = clock;
            b.dirty.set(block::bytes_of(order, at).start / part);
        }
        Ok(())
    }

    /// Makes the count of the cluster at `host` be `value` (repair). The block must be loaded.
    pub fn set(&mut self, host: u64, value: u64) -> std::result::Result<(), Refused> {
        let (index, at) = (self.layout.reftable_index(host), self.layout.refblock_index(host) as usize);
        let order = self.layout.refcount_order;
        let (clock, part) = (self.clock + 1, self.part);
        let b = self.blocks.get_mut(&index).ok_or(Refused::NotLoaded(index))?;
        block::set(&mut b.bytes, order, at, value).map_err(|_| Refused::OutOfBounds(host))?;
        b.used = clock;
        b.dirty.set(block::bytes_of(order, at).start / part);
        self.clock = clock;
        Ok(())
    }

    /// The first cluster from `host` on, up to `end`, whose count is 0, and how many bytes of such clusters follow. Blocks that are not loaded end the
    /// search (`Err`).
    pub fn free_run(&self, host: u64, end: u64) -> std::result::Result<Option<ByteRange>, Refused> {
        let cluster = self.layout.cluster_size();
        let mut at = host;
        while at < end && self.get(at)? != 0 {
            at += cluster;
        }
        let start = at;
        while at < end && matches!(self.get(at), Ok(0)) {
            at += cluster;
        }
        Ok((at > start).then_some(ByteRange { offset: start, len: at - start }))
    }

    /// Free ranges of block `index` below `end`, if the block is loaded.
    pub fn free_in_block(&self, index: u64, end: u64) -> Vec<ByteRange> {
        let first = index << (self.layout.refblock_bits() + self.layout.cluster_bits);
        let end = end.min(first.saturating_add(self.layout.refblock_span()));
        let mut out = Vec::new();
        let mut at = first;
        if !self.blocks.contains_key(&index) {
            return out;
        }
        while let Ok(Some(range)) = self.free_run(at, end) {
            at = range.end();
            out.push(range);
        }
        out
    }

    /// Last byte + 1 of what block `index` counts; `None` if it counts nothing or is not loaded.
    pub fn used_end_of_block(&self, index: u64) -> Option<u64> {
        let b = self.blocks.get(&index)?;
        let first = index << (self.layout.refblock_bits() + self.layout.cluster_bits);
        (0..self.layout.refblock_entries())
            .rev()
            .find(|at| block::get(&b.bytes, self.layout.refcount_order, *at as usize) != 0)
            .map(|at| first + ((at + 1) << self.layout.cluster_bits))
    }

    /// What counting `want` bytes of free clusters from `at` on takes: blocks where there are none, perhaps a larger table, and clusters for both, all in one
    /// piece from `at` on. Pure. EFBIG if the table would pass its limit.
    ///
    /// A block may count itself, and more blocks may need a larger table, which needs more blocks: the numbers only rise until they fit (trap 13).
    pub fn plan_growth(&self, at: u64, want: u64) -> Result<GrowthPlan> {
        self.plan_growth_for(at, want, &[])
    }

    /// The same, with blocks for the indices `extra` as well, which lie below `at` and have none.
    pub fn plan_growth_for(&self, at: u64, want: u64, extra: &[u64]) -> Result<GrowthPlan> {
        let l = &self.layout;
        let too_large = || {
            Error::new(
                libc::EFBIG,
                crate::error::Code::Invalid,
                format!("the refcount table would pass {REFTABLE_BYTES_MAX} bytes"),
            )
        };
        let (mut table, mut blocks) = (0u64, Vec::new());
        loop {
            let own = (table + blocks.len() as u64) << l.cluster_bits;
            let all = at.checked_add(own).and_then(|e| e.checked_add(want)).filter(|e| *e <= i64::MAX as u64);
            let all = ByteRange { offset: at, len: all.ok_or_else(too_large)? - at };
            let last = l.reftable_index(all.end().max(1) - 1);
            let mut missing = extra.to_vec();
            for index in self.indices(all) {
                if self.block_offset(index)?.is_none() && !extra.contains(&index) {
                    missing.push(index);
                }
            }
            let needed = if last < self.entries.len() as u64 {
                0
            } else {
                let bytes = (last + 1).checked_mul(8).ok_or_else(too_large)?;
                if bytes > REFTABLE_BYTES_MAX {
                    return Err(too_large());
                }
                // Half as much again, so that the next growth is far away.
                l.clusters_for((bytes + bytes / 2).min(REFTABLE_BYTES_MAX))
            };
            if needed <= table && missing.len() <= blocks.len() {
                let place = |n: u64| HostOffset(at + (n << l.cluster_bits));
                // Fewer may be missing than there is room for; the rest is used.
                let placed: Vec<_> =
                    missing.iter().enumerate().map(|(n, i)| (*i, place(table + n as u64))).collect();
                let first = at + ((table + placed.len() as u64) << l.cluster_bits);
                return Ok(GrowthPlan {
                    blocks: placed,
                    table: (table > 0).then(|| (place(0), table as u32)),
                    data: ByteRange { offset: first, len: all.end() - first },
                    all,
                });
            }
            table = table.max(needed);
            if missing.len() > blocks.len() {
                blocks = missing;
            }
        }
    }

    /// Carries a plan out in RAM: the new blocks and the new table are there, all clusters of the plan are counted once. The blocks that exist already
    /// are loaded. Returns the place of the table that is not in use any more.
    pub fn grow(&mut self, plan: &GrowthPlan) -> std::result::Result<Option<ByteRange>, Refused> {
        for host in self.clusters(plan.all) {
            if self.get(host)? != 0 {
                return Err(Refused::OutOfBounds(host));
            }
        }
        let mut old = None;
        if let Some((offset, clusters)) = plan.table {
            old = Some(self.table());
            self.entries.resize(self.layout.reftable_entries(clusters) as usize, 0);
            self.table = offset;
            self.table_moved = true;
            self.table_dirty = Marks::new(self.entries.len() * 8 / self.part);
        }
        let cluster = self.layout.cluster_size() as usize;
        self.clock += 1;
        for (index, offset) in &plan.blocks {
            self.entries[*index as usize] = offset.get();
            self.table_dirty.set(*index as usize * 8 / self.part);
            let dirty = Marks::new(cluster / self.part);
            let block = Block {
                offset: *offset,
                bytes: vec![0; cluster],
                dirty,
                is_new: true,
                cuts: 0,
                used: self.clock,
            };
            self.blocks.insert(*index, block);
        }
        self.change(plan.all, false)?;
        Ok(old)
    }

    /// Drops blocks that need not stay, the ones longest not used first, as far as there are too many.
    pub fn trim(&mut self) {
        while self.blocks.len() > self.blocks_max {
            let idle = |(_, b): &(&u64, &Block)| !b.dirty.any && !b.is_new && b.cuts == 0;
            let Some(oldest) = self.blocks.iter().filter(idle).min_by_key(|(_, b)| b.used).map(|(i, _)| *i)
            else {
                return;
            };
            self.blocks.remove(&oldest);
        }
    }

    /// Whether the file lacks anything.
    pub fn is_dirty(&self) -> bool {
        self.table_moved || self.table_dirty.any || self.blocks.values().any(|b| b.dirty.any || b.is_new)
    }

    /// Whether step 0 has work.
    pub fn has_new(&self) -> bool {
        self.table_moved || self.blocks.values().any(|b| b.is_new)
    }

    /// Takes the marks away and copies what they mark. Hand the cut to [`Refcounts::end_cut`] afterwards.
    pub fn take_cut(&mut self) -> RefCut {
        let mut cut = RefCut::default();
        let part = self.part;
        for (index, b) in &mut self.blocks {
            if !b.is_new && !b.dirty.any {
                continue;
            }
            let parts = b.dirty.take();
            b.cuts += 1;
            cut.taken.push((*index, parts.clone(), b.is_new));
            if std::mem::take(&mut b.is_new) {
                cut.new.push(Piece { offset: b.offset, bytes: b.bytes.clone() });
                continue;
            }
            for at in parts {
                let (first, offset) = (at * part, HostOffset(b.offset.get() + (at * part) as u64));
                cut.parts.push(Piece { offset, bytes: b.bytes[first..first + part].to_vec() });
            }
        }
        if std::mem::take(&mut self.table_moved) {
            self.table_dirty.take();
            let clusters = (self.entries.len() as u64 * 8) >> self.layout.cluster_bits;
            cut.table_moved = Some((self.table, clusters as u32));
            cut.new.push(Piece { offset: self.table, bytes: to_bytes(&self.entries) });
        } else {
            for at in self.table_dirty.take() {
                let words = &self.entries[at * part / 8..(at + 1) * part / 8];
                let offset = HostOffset(self.table.get() + (at * part) as u64);
                cut.table_parts.push(Piece { offset, bytes: to_bytes(words) });
                cut.table_taken.push(at);
            }
        }
        cut
    }

    /// The cut is over: its bytes are in the file, or (`failed`) are to be written by the next one.
    pub fn end_cut(&mut self, cut: &RefCut, failed: bool) {
        for (index, parts, was_new) in &cut.taken {
            let Some(b) = self.blocks.get_mut(index) else { continue };
            b.cuts -= 1;
            if failed {
                parts.iter().for_each(|at| b.dirty.set(*at));
                b.is_new |= *was_new;
            }
        }
        if failed {
            // A table that has moved once more since is whole in the next cut anyway.
            let parts = self.table_dirty.words.len() * 64;
            cut.table_taken.iter().filter(|at| **at < parts).for_each(|at| self.table_dirty.set(*at));
            self.table_moved |= cut.table_moved.is_some();
        }
    }

    fn clusters(&self, range: ByteRange) -> impl Iterator<Item = u64> + use<> {
        debug_assert!(range.offset.is_multiple_of(self.layout.cluster_size()));
        (range.offset..range.end()).step_by(self.layout.cluster_size() as usize)
    }

    fn indices(&self, range: ByteRange) -> impl Iterator<Item = u64> + use<> {
        let first = self.layout.reftable_index(range.offset);
        let end = if range.is_empty() { first } else { self.layout.reftable_index(range.end() - 1) + 1 };
        first..end
    }
}

impl From<Refused> for IoError {
    fn from(_: Refused) -> Self {
        IoError::os(libc::EIO)
    }
}

impl Marks {
    fn new(parts: usize) -> Self {
        Self { words: vec![0; parts.div_ceil(64)], any: false }
    }

    fn set(&mut self, at: usize) {
        self.words[at / 64] |= 1 << (at % 64);
        self.any = true;
    }

    /// The marked parts; none is marked afterwards.
    fn take(&mut self) -> Vec<usize> {
        let mut out = Vec::new();
        if !std::mem::take(&mut self.any) {
            return out;
        }
        for (i, word) in self.words.iter_mut().enumerate() {
            let mut bits = std::mem::take(word);
            while bits != 0 {
                out.push(i * 64 + bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
        }
        out
    }
}

fn to_bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_be_bytes()).collect()
}
