//! Finds what an image references.

use super::super::entry::{COPIED, L1_RESERVED, L2Entry, Plain, Words};
use super::super::header::Header;
use super::super::join::join_bounded;
use super::super::layout::Layout;
use super::super::limits::{ENTRY_OFFSET_MASK, L1_ENTRIES_MAX};
use super::super::meta_io::{read_at, read_words, to_words};
use super::super::snapshot::table::{Snapshot, SnapshotTable};
use super::super::{addr::HostOffset, bitmap, entry::BadEntry, feature::Autoclear};
use super::compare::Refcounts;
use super::refs::Refs;
use super::{CheckReport, Finding, Severity, Sink};
use crate::error::{Error, Result};
use crate::node::Node;
use crate::queue::Cx;
use crate::request::{Buffers, Class};
use std::collections::HashMap;

/// L2 tables read at once, and the most memory they take.
const TABLES_AHEAD: usize = 64;
const TABLES_AHEAD_BYTES: u64 = 32 << 20;
/// Copied flags that do not agree, kept to be reported behind the clusters; more are counted only.
const COPIED_KEPT: usize = 1 << 20;
/// How often one finding is reported that occurs several times at one place.
const REPEATS_MAX: u64 = 64;

/// Findings and statistics.
pub(super) struct Report<'a> {
    pub(super) counts: CheckReport,
    sink: Sink<'a>,
    copied: Vec<Finding>,
}

impl<'a> Report<'a> {
    pub(super) fn new(sink: Sink<'a>) -> Self {
        Self { counts: CheckReport::default(), sink, copied: Vec::new() }
    }

    /// Counts and reports a finding that occurs `times` times.
    pub(super) fn found(&mut self, finding: &Finding, times: u64) {
        match finding.severity() {
            Severity::Corruption => self.counts.corruptions += times,
            Severity::Leak => self.counts.leaks += times,
            Severity::Error => self.counts.errors += times,
        }
        (0..times.min(REPEATS_MAX)).for_each(|_| (self.sink)(finding));
    }

    /// The same for a copied flag, which is reported last.
    fn found_copied(&mut self, finding: Finding) {
        self.counts.corruptions += 1;
        if self.copied.len() < COPIED_KEPT {
            self.copied.push(finding);
        }
    }

    /// A cluster is in use: the image does not end before it.
    pub(super) fn in_use(&mut self, cluster: u64, cluster_bits: u32) {
        self.counts.image_end_offset = self.counts.image_end_offset.max((cluster + 1) << cluster_bits);
    }

    pub(super) fn finish_copied(&mut self) {
        for finding in std::mem::take(&mut self.copied) {
            (self.sink)(&finding);
        }
    }
}

/// An L2 table and how often it is referenced.
#[derive(Clone, Copy, Debug)]
pub(super) struct Table {
    offset: u64,
    /// The first entry of an L1 table that points at it.
    l1_index: u64,
    /// Entries of the active L1 table that point at it.
    active: u64,
    /// Entries of snapshots' L1 tables that do.
    snapshots: u64,
}

/// An L1 table and how many snapshots have it.
#[derive(Clone, Copy, Debug)]
struct L1Table {
    offset: u64,
    entries: u64,
    times: u64,
}

/// All L2 tables in the order in which they are first met, and the L1 words of the active table.
pub(super) struct Tables {
    list: Vec<Table>,
    active_l1: Vec<u64>,
    snapshot_l1: Vec<L1Table>,
}

/// Reads the L1 tables. What is wrong with them is reported.
pub(super) async fn tables(
    cx: &Cx,
    file: &dyn Node,
    header: &Header,
    snapshots: &SnapshotTable,
    report: &mut Report<'_>,
) -> Result<Tables> {
    let layout = header.layout();
    if header.version > 2 {
        for (index, s) in snapshots.entries.iter().enumerate() {
            if s.extra_len < 16 {
                report.found(&Finding::SnapshotIncomplete { index }, 1);
            }
        }
    }
    let mut gather = Gather { layout, index: HashMap::new(), list: Vec::new() };
    let active_l1 = read_words(cx, file, header.l1_offset, header.l1_entries as usize, Class::Guest)
        .await
        .map_err(|e| Error::io(e, format!("cannot read the L1 table at {}", header.l1_offset)))?;
    gather.add(&active_l1, 0, report);
    let snapshot_l1 = snapshot_tables(&snapshots.entries, &layout, report);
    // Tables of one image do not overlap, so all of them together are no longer than the file; those of an image that was made to differ are left out
    // once they are, and that is reported.
    let mut room = file.limits().size.saturating_add(L1_ENTRIES_MAX * 8);
    for l1 in &snapshot_l1 {
        let Some(rest) = room.checked_sub(l1.entries * 8) else {
            let finding = Finding::Unreadable {
                what: "L1 tables that overlap each other",
                offset: l1.offset,
                errno: libc::EFBIG,
            };
            report.found(&finding, l1.times);
            continue;
        };
        room = rest;
        let offset = HostOffset(l1.offset);
        if l1.offset >= file.limits().size {
            continue;
        }
        match read_words(cx, file, offset, l1.entries as usize, Class::Guest).await {
            Ok(words) => gather.add(&words, l1.times, report),
            Err(e) => {
                let finding = Finding::Unreadable { what: "L1 table", offset: l1.offset, errno: e.errno };
                report.found(&finding, l1.times);
            }
        }
    }
    Ok(Tables { list: gather.list, active_l1, snapshot_l1 })
}

/// The distinct L1 tables of snapshots; broken ones are reported and left out.
fn snapshot_tables(snapshots: &[Snapshot], layout: &Layout, report: &mut Report<'_>) -> Vec<L1Table> {
    let mut index: HashMap<(u64, u32), usize> = HashMap::new();
    let mut list: Vec<L1Table> = Vec::new();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    for s in snapshots {
        if s.l1_offset % layout.cluster_size() != 0 || s.l1_offset > i64::MAX as u64 {
            let finding =
                Finding::SnapshotUnaligned { id: text(&s.id), name: text(&s.name), offset: s.l1_offset };
            report.found(&finding, 1);
            continue;
        }
        if u64::from(s.l1_entries) > L1_ENTRIES_MAX {
            let finding =
                Finding::SnapshotTooLarge { id: text(&s.id), name: text(&s.name), entries: s.l1_entries };
            report.found(&finding, 1);
            continue;
        }
        let at = *index.entry((s.l1_offset, s.l1_entries)).or_insert_with(|| {
            list.push(L1Table { offset: s.l1_offset, entries: u64::from(s.l1_entries), times: 0 });
            list.len() - 1
        });
        list[at].times += 1;
    }
    list
}

/// Collects L2 tables.
struct Gather {
    layout: Layout,
    index: HashMap<u64, usize>,
    list: Vec<Table>,
}

impl Gather {
    /// Adds the tables of an L1 table that `times` snapshots have; 0 for the active one.
    fn add(&mut self, words: &[u64], times: u64, report: &mut Report<'_>) {
        for (l1_index, word) in words.iter().enumerate() {
            let offset = word & ENTRY_OFFSET_MASK;
            if offset == 0 {
                continue;
            }
            if word & L1_RESERVED != 0 {
                report.found(&Finding::L1Reserved { word: *word }, times.max(1));
            }
            if !offset.is_multiple_of(self.layout.cluster_size()) {
                report.found(&Finding::L1Unaligned { offset }, times.max(1));
            }
            let at = *self.index.entry(offset).or_insert_with(|| {
                self.list.push(Table { offset, l1_index: l1_index as u64, active: 0, snapshots: 0 });
                self.list.len() - 1
            });
            let table = &mut self.list[at];
            if times == 0 {
                table.active += 1;
            } else {
                table.snapshots = table.snapshots.saturating_add(times);
            }
        }
    }
}

/// One pass over everything.
pub(super) struct Walk<'a, 'r> {
    cx: &'a Cx,
    file: &'a dyn Node,
    header: &'a Header,
    layout: Layout,
    file_len: u64,
    refs: Refs,
    report: &'a mut Report<'r>,
    /// The first pass reports; later ones count references only.
    reports: bool,
    /// Where the next data cluster would be if it followed the last one.
    next_data: Option<u64>,
}

impl<'a, 'r> Walk<'a, 'r> {
    pub(super) fn new(
        cx: &'a Cx,
        file: &'a dyn Node,
        header: &'a Header,
        refs: Refs,
        report: &'a mut Report<'r>,
        reports: bool,
    ) -> Self {
        let (layout, file_len) = (header.layout(), file.limits().size);
        Self { cx, file, header, layout, file_len, refs, report, reports, next_data: None }
    }

    pub(super) fn into_refs(self) -> Refs {
        self.refs
    }

    fn found(&mut self, finding: &Finding, times: u64) {
        if self.reports {
            self.report.found(finding, times);
        }
    }

    /// Counts `times` references to every cluster that a range touches.
    fn reference(&mut self, offset: u64, len: u64, times: u64) {
        if len == 0 || times == 0 {
            return;
        }
        let end = offset.saturating_add(len);
        if end > self.file_len && end - self.file_len >= self.layout.cluster_size() {
            self.found(&Finding::Outside { offset, len }, times);
            return;
        }
        let bits = self.layout.cluster_bits;
        let times = u32::try_from(times).unwrap_or(u32::MAX);
        (offset >> bits..=(end - 1) >> bits).for_each(|c| self.refs.add(c, times));
    }

    /// Everything, in the order of the module.
    pub(super) async fn all(
        &mut self,
        tables: &Tables,
        snapshots: &SnapshotTable,
        refcounts: &mut Refcounts,
    ) -> Result<()> {
        self.reference(0, self.layout.cluster_size(), 1);
        self.reference(self.header.l1_offset.get(), u64::from(self.header.l1_entries) * 8, 1);
        for table in &tables.list {
            self.reference(table.offset, self.layout.cluster_size(), table.active + table.snapshots);
        }
        self.l2_tables(&tables.list, refcounts).await?;
        if self.reports {
            self.l1_copied(&tables.active_l1, refcounts).await?;
        }
        for l1 in &tables.snapshot_l1 {
            self.reference(l1.offset, l1.entries * 8, l1.times);
        }
        self.reference(self.header.snapshots_offset.get(), snapshots.len, 1);
        if let Some(Ok(crypto)) = self.header.crypto(self.file_len) {
            self.reference(crypto.offset.get(), crypto.len, 1);
        }
        self.bitmaps().await;
        self.refcount_structures(refcounts);
        Ok(())
    }

    async fn l2_tables(&mut self, tables: &[Table], refcounts: &mut Refcounts) -> Result<()> {
        let size = self.layout.cluster_size();
        let ahead = TABLES_AHEAD.min((TABLES_AHEAD_BYTES / size) as usize).max(1);
        let inside: Vec<Table> = tables.iter().filter(|t| t.offset < self.file_len).copied().collect();
        let memory: Vec<Buffers> =
            (0..ahead.min(inside.len())).map(|_| Buffers::alloc(size as usize, 4096)).collect();
        for batch in inside.chunks(ahead) {
            let mut results = vec![Ok(()); batch.len()];
            let (cx, file) = (self.cx, self.file);
            let reads =
                batch.iter().zip(&memory).zip(&mut results).map(|((table, memory), result)| async move {
                    *result = read_at(cx, file, HostOffset(table.offset), memory, Class::Guest).await;
                    Ok(())
                });
            join_bounded(reads, ahead).await.map_err(|e| Error::io(e, "cannot read L2 tables"))?;
            for ((table, memory), result) in batch.iter().zip(&memory).zip(results) {
                match result {
                    Ok(()) => self.l2_table(table, &to_words(memory), refcounts).await?,
                    Err(e) => {
                        let finding =
                            Finding::Unreadable { what: "L2 table", offset: table.offset, errno: e.errno };
                        self.found(&finding, table.active + table.snapshots);
                    }
                }
            }
        }
        Ok(())
    }

    async fn l2_table(&mut self, table: &Table, words: &[u64], refcounts: &mut Refcounts) -> Result<()> {
        let step = self.layout.entry_words();
        // How a disk is fragmented is counted inside of each table.
        self.next_data = None;
        for (index, entry) in words.chunks_exact(step).enumerate() {
            let words = Words { entry: entry[0], bitmap: if step > 1 { entry[1] } else { 0 } };
            if words == Words::NONE {
                continue;
            }
            let Some(host) = self.l2_entry(table, index as u64, words) else { continue };
            // Only tables reachable from the active L1 have flags that mean something.
            if self.reports && table.active > 0 {
                let refcount = if self.layout.data_file {
                    Some(1)
                } else {
                    refcounts.get(self.cx, self.file, host >> self.layout.cluster_bits).await.ok()
                };
                if let Some(refcount) = refcount
                    && (refcount == 1) != (words.entry & COPIED != 0)
                {
                    self.report.found_copied(Finding::L2Copied { word: words.entry, refcount });
                }
            }
        }
        Ok(())
    }

    /// Counts what an entry references; returns the host cluster of a plain one.
    fn l2_entry(&mut self, table: &Table, index: u64, words: Words) -> Option<u64> {
        let times = table.active + table.snapshots;
        let word = words.entry;
        if word & super::super::entry::COMPRESSED != 0 {
            self.compressed(table, index, words);
            return None;
        }
        let offset = word & ENTRY_OFFSET_MASK;
        // Judged by the layout of version 3 first: an offset is counted whatever is wrong with the flags beside it.
        let reserved = words.reserved(&self.layout)
            | if self.layout.version < 3 { word & super::super::entry::ZERO } else { 0 };
        // Offset 0 is one in a data file, for data that is said to be there.
        let zero_flag = !self.layout.extended && word & super::super::entry::ZERO != 0;
        let has_host = offset != 0 || (self.layout.data_file && word & COPIED != 0 && !zero_flag);
        if has_host && reserved != 0 {
            self.found(&Finding::L2Reserved { word }, times);
        }
        let (data, zero) = (words.bitmap as u32, (words.bitmap >> 32) as u32);
        if !has_host {
            if self.layout.extended && data != 0 {
                self.found(&Finding::BitmapWithoutCluster, times);
            } else if self.layout.extended && data & zero != 0 {
                self.found(&Finding::BitmapBothStates { offset }, times);
            } else if reserved != 0 {
                self.found(&Finding::L2Reserved { word }, times);
            }
            return None;
        }
        if self.layout.extended && data & zero != 0 {
            self.found(&Finding::BitmapBothStates { offset }, times);
        }
        let holds_data = if self.layout.extended { data != 0 } else { word & super::super::entry::ZERO == 0 };
        if !offset.is_multiple_of(self.layout.cluster_size()) {
            self.found(&Finding::Unaligned { offset, data: holds_data }, times);
        } else if let Some(problem) = self.misplaced(table, index, words) {
            self.found(&Finding::BadL2 { table: table.offset, index, problem }, times);
        }
        self.count_allocated(offset, table.active);
        if !self.layout.data_file {
            self.reference(offset, self.layout.cluster_size(), times);
        }
        Some(offset)
    }

    /// With a data file: an offset that is not the guest's.
    fn misplaced(&self, table: &Table, index: u64, words: Words) -> Option<BadEntry> {
        if !self.layout.data_file {
            return None;
        }
        let offset = words.entry & ENTRY_OFFSET_MASK;
        let guest = (table.l1_index << self.layout.l2_span_bits()) + (index << self.layout.cluster_bits);
        (offset != guest).then_some(BadEntry::NotGuestOffset(offset, guest))
    }

    fn compressed(&mut self, table: &Table, index: u64, words: Words) {
        let times = table.active + table.snapshots;
        let word = words.entry;
        // Bits of the offset are told apart from the flags by decoding without the copied flag, which never belongs here.
        let plain = Words { entry: word & !COPIED, bitmap: 0 };
        let without_data_file = Layout { data_file: false, ..self.layout };
        let place = match plain.decode(&without_data_file, 0) {
            Ok(L2Entry::Compressed(c)) => Some((c.offset.get(), c.len)),
            Err(BadEntry::InHeader) => {
                // Counted all the same: that is what makes the header's cluster a corruption.
                let x = 62 - (self.layout.cluster_bits - 8);
                let offset = word & ((1 << x) - 1);
                Some((offset, (((word & !COPIED) >> x & ((1 << (62 - x)) - 1)) + 1) * 512 - offset % 512))
            }
            Err(problem) => {
                self.found(&Finding::BadL2 { table: table.offset, index, problem }, times);
                None
            }
            Ok(L2Entry::Plain(Plain { .. })) => None,
        };
        if word & COPIED != 0 {
            let offset = place.map_or(0, |p| p.0);
            self.found(&Finding::CompressedCopied { offset }, times);
        }
        if self.layout.data_file {
            self.found(&Finding::CompressedInDataFile { index, word: word & !COPIED }, times);
            return;
        }
        if words.bitmap != 0 && self.layout.extended {
            self.found(&Finding::CompressedBitmap { index, word: word & !COPIED }, times);
            return;
        }
        let Some((offset, len)) = place else { return };
        if self.reports {
            let counts = &mut self.report.counts;
            counts.allocated_clusters += table.active;
            counts.compressed_clusters += table.active;
            // Compressed data begins where the last ended, but not on a cluster's start.
            counts.fragmented_clusters += table.active;
        }
        self.reference(offset, len, times);
    }

    fn count_allocated(&mut self, offset: u64, active: u64) {
        if !self.reports || active == 0 {
            return;
        }
        self.report.counts.allocated_clusters += active;
        if self.next_data.is_some_and(|next| next != offset) {
            self.report.counts.fragmented_clusters += active;
        }
        self.next_data = Some(offset + self.layout.cluster_size());
    }

    async fn l1_copied(&mut self, words: &[u64], refcounts: &mut Refcounts) -> Result<()> {
        let kept = std::mem::take(&mut self.report.copied);
        for (index, word) in words.iter().enumerate() {
            let offset = word & ENTRY_OFFSET_MASK;
            if offset == 0 {
                continue;
            }
            let cluster = offset >> self.layout.cluster_bits;
            if let Ok(refcount) = refcounts.get(self.cx, self.file, cluster).await
                && (refcount == 1) != (word & COPIED != 0)
            {
                let index = index as u64;
                self.report.found_copied(Finding::L1Copied { index, word: *word, refcount });
            }
        }
        // Those of L1 entries come first.
        self.report.copied.extend(kept);
        Ok(())
    }

    async fn bitmaps(&mut self) {
        if !self.header.autoclear.contains(Autoclear::BITMAPS) || self.header.version < 3 {
            return;
        }
        let pointer = match self.header.bitmaps() {
            None => return,
            Some(Ok(pointer)) => pointer,
            Some(Err(e)) => return self.found(&Finding::Bitmaps { problem: e.full_text() }, 1),
        };
        self.reference(pointer.offset.get(), pointer.len, 1);
        let size = self.header.usable_size();
        let list = bitmap::read_directory(self.cx, self.file, &pointer, &self.layout, size).await;
        let list = match list {
            Ok(list) => list,
            Err(e) => return self.found(&Finding::Bitmaps { problem: e.full_text() }, 1),
        };
        for b in list {
            self.bitmap(&b).await;
        }
    }

    async fn bitmap(&mut self, b: &bitmap::Bitmap) {
        let name = String::from_utf8_lossy(&b.name).into_owned();
        if let Some(problem) = &b.broken {
            self.found(&Finding::Bitmap { name: name.clone(), problem: problem.clone() }, 1);
        }
        let bytes = u64::from(b.table_entries) * 8;
        if b.table_entries == 0
            || bytes > 1 << 30
            || b.table_offset == 0
            || !b.table_offset.is_multiple_of(self.layout.cluster_size())
            || b.table_offset > i64::MAX as u64 - bytes
        {
            return;
        }
        self.reference(b.table_offset, bytes, 1);
        // A table behind the end of the file is all zeros.
        if b.table_offset.saturating_add(bytes) > self.file_len.next_multiple_of(self.layout.cluster_size()) {
            return;
        }
        let mut words = Vec::new();
        let read = bitmap::each_table_piece(self.cx, self.file, b, |first, piece| {
            let used = piece.iter().enumerate().filter(|(_, w)| **w > 1);
            words.extend(used.map(|(i, w)| (first + i as u64, *w)));
        });
        if let Err(e) = read.await {
            let finding =
                Finding::Unreadable { what: "bitmap table", offset: b.table_offset, errno: e.errno };
            return self.found(&finding, 1);
        }
        for (index, word) in words {
            let offset = word & ENTRY_OFFSET_MASK;
            if word & !ENTRY_OFFSET_MASK != 0 || !offset.is_multiple_of(self.layout.cluster_size()) {
                let problem =
                    format!("table at {:#x}, entry {index}: {word:#x} is not an offset", b.table_offset);
                self.found(&Finding::Bitmap { name: name.clone(), problem }, 1);
                continue;
            }
            self.reference(offset, self.layout.cluster_size(), 1);
        }
    }

    /// The refcount table and its blocks.
    fn refcount_structures(&mut self, refcounts: &Refcounts) {
        let size = self.layout.cluster_size();
        let table = self.header.reftable_offset.get();
        self.reference(table, u64::from(self.header.reftable_clusters) << self.layout.cluster_bits, 1);
        for (index, word) in refcounts.table().iter().enumerate().filter(|(_, w)| **w != 0) {
            let (index, offset) = (index as u64, word & !511);
            if word & 511 != 0 {
                self.found(&Finding::ReftableReserved { index }, 1);
            } else if !offset.is_multiple_of(size) {
                self.found(&Finding::RefblockUnaligned { index }, 1);
            } else if offset >= self.file_len {
                self.found(&Finding::RefblockOutside { index }, 1);
            } else {
                self.reference(offset, size, 1);
                let cluster = offset >> self.layout.cluster_bits;
                let references = self.refs.get(cluster);
                // In a later pass the window has moved on, and what is outside of it is not counted.
                if self.refs.window().contains(&cluster) && references != 1 {
                    self.report.found(&Finding::RefblockShared { index, references }, 1);
                }
            }
        }
    }
}
