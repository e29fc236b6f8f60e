//! Repair of an image that was not closed cleanly: the dirty bit says that its refcounts may be wrong, and a writable open makes them right first (qcow2.md section 1,
//! crash rule 8).
//!
//! The references are the truth. [`super::check`] walks them and tells every refcount that differs; those are set, with new refcount blocks behind the end of the file where
//! there are none; then the copied flags of the active tables are made to agree; then all of it is checked once more, and only an image in which nothing
//! but leaks is left loses the bit. Anything else that is wrong is damage that this cannot mend: the open fails and the image stays as it is marked.
//!
//! A crash on the way is harmless: the bit is still set, and the next open begins anew. Memory is bounded: so many corrections a pass, and passes until there are none.

use super::addr::HostOffset;
use super::check::{CheckOptions, CheckReport, Finding, Severity, check};
use super::entry::{COMPRESSED, COPIED};
use super::feature::Incompatible;
use super::header::{Header, Purpose};
use super::header_area::{Field, HeaderArea};
use super::layout::Layout;
use super::limits::ENTRY_OFFSET_MASK;
use super::meta_io::{read_at, read_words};
use super::open::read_header;
use super::refcount::table::{Piece, Refcounts};
use crate::error::{Code, Error, IoResult, Result};
use crate::node::{Edge, Growth, Node};
use crate::queue::Cx;
use crate::request::{Buffers, Class, Request};
use crate::sync::Arc;
use crate::units::{ByteRange, align_up};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Corrections of a pass.
const FIXES_MAX: usize = 1 << 20;
/// Refcount blocks that are changed together.
const BLOCKS: usize = 64;

/// What has been done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Repaired {
    /// Refcounts that were wrong.
    pub(super) counts: u64,
    /// Copied flags that were wrong.
    pub(super) flags: u64,
}

impl fmt::Display for Repaired {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} refcounts and {} copied flags were put right", self.counts, self.flags)
    }
}

/// What a check has found that can be put right, and the first thing that cannot.
#[derive(Default)]
struct Found {
    /// Clusters with the count they must have.
    fixes: BTreeMap<u64, u32>,
    flags: bool,
    other: Option<String>,
}

impl Found {
    fn fix(&mut self, cluster: u64, count: u32) {
        if self.fixes.len() < FIXES_MAX {
            self.fixes.insert(cluster, count);
        }
    }
}

/// Repairs the image in `file`, whose header is `header`, and clears its dirty bit, durably. Returns the header as it is now. Errors: what is damaged beyond repair (EIO), or
/// the file's.
pub(super) async fn repair(cx: &Cx, file: &Arc<Edge>, header: &Header) -> Result<(Header, Repaired)> {
    let mut done = Repaired::default();
    let node = file.node();
    // Each pass but the last puts right as many as it may, so there cannot be more than this without something going wrong.
    let layout = header.layout();
    let passes = layout.clusters_for(node.limits().size) / FIXES_MAX as u64 + 4;
    let mut header = header.clone();
    let area = HeaderArea::read(cx, &*node, layout.cluster_size())
        .await
        .map_err(|e| Error::io(e, "cannot read the header"))?;
    for _ in 0..passes {
        let (found, report) = look(cx, &*node).await?;
        if let Some(text) = found.other {
            return Err(damaged(&text));
        }
        if !found.fixes.is_empty() {
            done.counts += found.fixes.len() as u64;
            let mut work = Counts { cx, file, area: &area, layout, end: report.image_end_offset };
            work.fix(&header, found.fixes).await?;
        } else if found.flags {
            done.flags += copied_flags(cx, &*node, &header)
                .await
                .map_err(|e| Error::io(e, "cannot put the copied flags right"))?;
        } else {
            let bits = header.incompatible - Incompatible::DIRTY;
            let cleared = async {
                // What has been put right is durable before the bit says so.
                cx.run(&*node, Request::flush()).await?;
                area.change(cx, file, &[Field::Incompatible(bits)]).await?;
                cx.run(&*node, Request::flush()).await
            };
            cleared.await.map_err(|e| Error::io(e, "cannot clear the dirty bit"))?;
            header = read_header(cx, &*node, Purpose::Use).await?;
            return Ok((header, done));
        }
        header = read_header(cx, &*node, Purpose::Use).await?;
    }
    Err(damaged("its refcounts do not become right"))
}

fn damaged(text: &str) -> Error {
    let text = format!(
        "the image was not closed cleanly, and cannot be repaired on opening: {text}; open it with read-only=on"
    );
    Error::new(libc::EIO, Code::Invalid, text)
}

async fn look(cx: &Cx, file: &dyn Node) -> Result<(Found, CheckReport)> {
    let mut found = Found::default();
    let mut sink = |finding: &Finding| match finding {
        Finding::TooLow { cluster, references, .. } | Finding::Leak { cluster, references, .. } => {
            found.fix(*cluster, *references);
        }
        Finding::L1Copied { .. } | Finding::L2Copied { .. } => found.flags = true,
        other if other.severity() != Severity::Leak => {
            found.other.get_or_insert_with(|| other.to_string());
        }
        _ => {}
    };
    let report = check(cx, file, CheckOptions::default(), &mut sink).await.map_err(|e| e.into_error())?;
    Ok((found, report))
}

/// Refcounts being put right.
struct Counts<'a> {
    cx: &'a Cx,
    file: &'a Arc<Edge>,
    area: &'a HeaderArea,
    layout: Layout,
    /// End of what is in use.
    end: u64,
}

impl Counts<'_> {
    async fn fix(&mut self, header: &Header, fixes: BTreeMap<u64, u32>) -> Result<()> {
        let failed = |e| Error::io(e, "cannot put the refcounts right");
        let file = self.file.node();
        let words = self.layout.reftable_entries(header.reftable_clusters) as usize;
        let table =
            read_words(self.cx, &*file, header.reftable_offset, words, Class::Guest).await.map_err(failed)?;
        let part = file.limits().request_align.clamp(512, 4096) as usize;
        let mut counts = Refcounts::new(self.layout, header.reftable_offset, table, BLOCKS, part);
        let bits = self.layout.refblock_bits();
        let mut list = fixes.into_iter().peekable();
        while list.peek().is_some() {
            let mut batch: BTreeMap<u64, Vec<(u64, u32)>> = BTreeMap::new();
            while let Some((cluster, _)) = list.peek()
                && (batch.len() < BLOCKS || batch.contains_key(&(cluster >> bits)))
            {
                if let Some((cluster, count)) = list.next() {
                    batch.entry(cluster >> bits).or_default().push((cluster, count));
                }
            }
            self.fix_batch(&mut counts, &batch).await?;
        }
        Ok(())
    }

    async fn fix_batch(
        &mut self,
        counts: &mut Refcounts,
        batch: &BTreeMap<u64, Vec<(u64, u32)>>,
    ) -> Result<()> {
        let failed = |e| Error::io(e, "cannot put the refcounts right");
        let mut without = Vec::new();
        for index in batch.keys() {
            // A cluster that is not used needs no block.
            if counts.block_offset(*index)?.is_none() && batch[index].iter().any(|(_, n)| *n > 0) {
                without.push(*index);
            }
        }
        let mut unused = None;
        if !without.is_empty() {
            unused = self.grow(counts, &without).await?;
        }
        let bits = self.layout.cluster_bits;
        for index in batch.keys() {
            self.load(counts, index << (self.layout.refblock_bits() + bits), self.layout.cluster_size())
                .await?;
        }
        for (cluster, count) in batch.values().flatten() {
            if counts.block_offset(cluster >> self.layout.refblock_bits())?.is_some() {
                counts.set(cluster << bits, u64::from(*count)).map_err(|_| {
                    damaged(&format!(
                        "cluster {cluster} is used {count} times, more often than can be counted"
                    ))
                })?;
            }
        }
        if let Some(old) = unused {
            self.load(counts, old.offset, old.len).await?;
            for host in (old.offset..old.end()).step_by(self.layout.cluster_size() as usize) {
                counts.set(host, 0).map_err(|e| failed(e.into()))?;
            }
        }
        self.write(counts).await.map_err(failed)?;
        counts.trim();
        Ok(())
    }

    /// Makes blocks for these indices, behind everything. Returns the place of the table that is not used any more, if it moves.
    async fn grow(&mut self, counts: &mut Refcounts, without: &[u64]) -> Result<Option<ByteRange>> {
        let failed = |e| Error::io(e, "cannot make new refcount blocks");
        let file = self.file.node();
        let at = align_up(self.end.max(file.limits().size), self.layout.cluster_size());
        let plan = counts.plan_growth_for(at, 0, without)?;
        self.end = plan.all.end();
        match file.resize(self.cx, self.end, Growth::Sparse).await {
            Err(e) if e.errno != libc::ENOTSUP => return Err(failed(e)),
            _ => {}
        }
        self.load(counts, plan.all.offset, plan.all.len).await?;
        for host in (plan.all.offset..plan.all.end()).step_by(self.layout.cluster_size() as usize) {
            // What an old block may say of a place behind the end of the file.
            if counts.block_offset(self.layout.reftable_index(host))?.is_some() {
                counts.set(host, 0).map_err(|e| failed(e.into()))?;
            }
        }
        counts.grow(&plan).map_err(|e| failed(e.into()))
    }

    async fn load(&self, counts: &mut Refcounts, offset: u64, len: u64) -> Result<()> {
        let file = self.file.node();
        for (index, host) in counts.missing(ByteRange { offset, len })? {
            let bufs = Buffers::alloc(self.layout.cluster_size() as usize, 4096);
            read_at(self.cx, &*file, host, &bufs, Class::Guest)
                .await
                .map_err(|e| Error::io(e, format!("cannot read the refcount block at {host}")))?;
            counts.install(index, host, bufs.to_vec());
        }
        Ok(())
    }

    /// Writes what has changed; blocks and tables before what points at them.
    async fn write(&self, counts: &mut Refcounts) -> IoResult {
        let (cx, file) = (self.cx, self.file.node());
        let cut = counts.take_cut();
        let write = |piece: &Piece| Request::write(piece.offset.get(), Buffers::from_bytes(&piece.bytes));
        for piece in cut.new.iter().chain(&cut.parts) {
            cx.run(&*file, write(piece)).await?;
        }
        if !cut.new.is_empty() {
            cx.run(&*file, Request::flush()).await?;
        }
        for piece in &cut.table_parts {
            cx.run(&*file, write(piece)).await?;
        }
        if let Some((offset, clusters)) = cut.table_moved {
            self.area.change(cx, self.file, &[Field::Reftable(offset.get(), clusters)]).await?;
        }
        counts.end_cut(&cut, false);
        Ok(())
    }
}

/// Makes the copied flags of the active tables agree with the refcounts. Returns how many did not.
async fn copied_flags(cx: &Cx, file: &dyn Node, header: &Header) -> IoResult<u64> {
    let layout = header.layout();
    let mut counts = Lookup { cx, file, layout, header, table: None, block: None };
    let mut l1 = read_words(cx, file, header.l1_offset, header.l1_entries as usize, Class::Guest).await?;
    let mut changed = 0;
    let mut seen = BTreeSet::new();
    let words = (layout.cluster_size() / 8) as usize;
    let step = if layout.extended { 2 } else { 1 };
    for word in &mut l1 {
        let table = *word & ENTRY_OFFSET_MASK;
        if table == 0 {
            continue;
        }
        changed += u64::from(put_right(word, counts.get(table).await?));
        if !seen.insert(table) {
            continue;
        }
        let mut entries = read_words(cx, file, HostOffset(table), words, Class::Guest).await?;
        let before = changed;
        for entry in entries.iter_mut().step_by(step) {
            let host = *entry & ENTRY_OFFSET_MASK;
            if *entry & COMPRESSED == 0 && host != 0 && !layout.data_file {
                changed += u64::from(put_right(entry, counts.get(host).await?));
            }
        }
        if changed > before {
            cx.run(file, Request::write(table, Buffers::from_bytes(&to_bytes(&entries)))).await?;
        }
    }
    cx.run(file, Request::write(header.l1_offset.get(), Buffers::from_bytes(&to_bytes(&l1)))).await?;
    Ok(changed)
}

/// Whether the flag was wrong.
fn put_right(word: &mut u64, count: u64) -> bool {
    let new = if count == 1 { *word | COPIED } else { *word & !COPIED };
    std::mem::replace(word, new) != new
}

/// Refcounts as they are in the file, one block at a time.
struct Lookup<'a> {
    cx: &'a Cx,
    file: &'a dyn Node,
    layout: Layout,
    header: &'a Header,
    table: Option<Vec<u64>>,
    block: Option<(u64, Vec<u8>)>,
}

impl Lookup<'_> {
    async fn get(&mut self, host: u64) -> IoResult<u64> {
        if self.table.is_none() {
            let words = self.layout.reftable_entries(self.header.reftable_clusters) as usize;
            self.table =
                Some(read_words(self.cx, self.file, self.header.reftable_offset, words, Class::Guest).await?);
        }
        let index = self.layout.reftable_index(host);
        let entry = self.table.as_ref().and_then(|t| t.get(index as usize)).copied().unwrap_or(0) & !511;
        if entry == 0 {
            return Ok(0);
        }
        if self.block.as_ref().is_none_or(|(at, _)| *at != entry) {
            let bufs = Buffers::alloc(self.layout.cluster_size() as usize, 4096);
            read_at(self.cx, self.file, HostOffset(entry), &bufs, Class::Guest).await?;
            self.block = Some((entry, bufs.to_vec()));
        }
        let at = self.layout.refblock_index(host) as usize;
        Ok(self
            .block
            .as_ref()
            .map_or(0, |(_, b)| super::refcount::block::get(b, self.layout.refcount_order, at)))
    }
}

fn to_bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_be_bytes()).collect()
}
