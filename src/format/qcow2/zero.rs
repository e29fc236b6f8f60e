//! Write-zeroes and discard: changes of entries, with no data written where that can be avoided.
//!
//! Neither needs an order between data and entry (qcow2.md 3.1 point 6): whatever the entry pointed at stays as it is until the change is durable. Zero granularity is the
//! sub-cluster, discard granularity the cluster. What is zeroed in part is written with zeros, unless it reads as zeros already.
//!
//! | before | zeroes, kept | zeroes, may unmap | discard |
//! |---|---|---|---|
//! | nothing, no backing | stays | stays | stays |
//! | nothing, over backing | zero | zero | zero |
//! | zero, no host cluster | stays | stays | stays |
//! | host cluster, whole | zero, cluster kept | zero, cluster freed | zero, cluster freed (kept with `discard-no-unref`) |
//! | host cluster, some sub-clusters | their zero bits | their zero bits | ignored |
//! | compressed, whole | zero, data freed | the same | the same |
//!
//! Version 2 has no zero clusters: without backing a cluster is unallocated instead, over one zeros are written and discards ignored. With a raw data file
//! both are carried out there, and the mapping stays.

use super::entry::{ALL, L2Entry, Plain};
use super::feature::Autoclear;
use super::image::Image;
use super::map::Run;
use super::tables::Window;
use super::write::{How, in_task};
use super::writer::Writer;
use crate::error::{IoError, IoResult};
use crate::queue::Cx;
use crate::request::{Class, Flags, Request};
use crate::sync::Arc;
use crate::units::{ByteRange, align_down, align_up};

/// Slices of a window.
const SLICES_MAX: u64 = 16;
/// Zeros written at a time, where they must be.
const ZEROS_MAX: u64 = 1 << 20;

/// What is to become of clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    /// They read as zeros; a host cluster stays with them.
    Zero,
    /// They read as zeros; a host cluster is freed, and given back to the file if so wanted.
    Free { punch: bool },
    /// As the guest gives them up.
    Discard { punch: bool, keep: bool },
}

impl Image {
    /// Carries out a write-zeroes.
    pub(super) async fn write_zeroes(self: &Arc<Self>, cx: &Cx, req: Request) -> IoResult {
        let writer = self.writer()?.clone();
        let image = self.clone();
        in_task(cx, move |cx| async move {
            let change = if req.flags.contains(Flags::MAY_UNMAP) && image.settings.unmap {
                Change::Free { punch: image.settings.discard_request }
            } else {
                Change::Zero
            };
            let zeroed = image.zero(&writer, &cx, &req, change).await;
            image.after(&writer, &cx, req.flags, zeroed).await
        })
        .await
    }

    /// Carries out a discard.
    pub(super) async fn discard(self: &Arc<Self>, cx: &Cx, req: Request) -> IoResult {
        let writer = self.writer()?.clone();
        if !self.settings.unmap {
            return Ok(());
        }
        let image = self.clone();
        in_task(cx, move |cx| async move {
            if image.has_raw_data_file() {
                let data = image.data().node();
                let inside = data.limits().size.saturating_sub(req.range.offset).min(req.range.len);
                let range = ByteRange { offset: req.range.offset, len: inside };
                if !range.is_empty() {
                    cx.run(&*data, Request::discard(range).class(req.class)).await?;
                }
                return image.after(&writer, &cx, req.flags, Ok(())).await;
            }
            let change = Change::Discard {
                punch: image.settings.discard_request,
                keep: image.settings.discard_no_unref,
            };
            let whole = image.units(req.range, image.layout.cluster_size());
            let changed = image.change(&writer, &cx, whole, change).await;
            image.after(&writer, &cx, req.flags, changed).await
        })
        .await
    }

    async fn zero(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        req: &Request,
        change: Change,
    ) -> IoResult {
        if self.has_raw_data_file() {
            let data = self.data().node();
            let flags = req.flags & !Flags::FUA;
            return cx.run(&*data, Request::write_zeroes(req.range, flags).class(req.class)).await;
        }
        if self.layout.version < 3 {
            return self.zero_v2(writer, cx, req, change).await;
        }
        let whole = self.units(req.range, self.layout.subcluster_size());
        if whole.is_empty() {
            return self.write_zeros(writer, cx, req.range, req.class).await;
        }
        let head = ByteRange { offset: req.range.offset, len: whole.offset - req.range.offset };
        let tail = ByteRange { offset: whole.end(), len: req.range.end().saturating_sub(whole.end()) };
        self.write_zeros(writer, cx, head, req.class).await?;
        self.write_zeros(writer, cx, tail, req.class).await?;
        self.change(writer, cx, whole, change).await
    }

    async fn zero_v2(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        req: &Request,
        change: Change,
    ) -> IoResult {
        let whole = self.units(req.range, self.layout.cluster_size());
        let Change::Free { punch } = change else {
            return self.write_zeros(writer, cx, req.range, req.class).await;
        };
        if whole.is_empty() || self.backing().is_some() {
            if req.flags.contains(Flags::NO_FALLBACK) {
                return Err(IoError::unsupported());
            }
            return self.write_zeros(writer, cx, req.range, req.class).await;
        }
        let head = ByteRange { offset: req.range.offset, len: whole.offset - req.range.offset };
        let tail = ByteRange { offset: whole.end(), len: req.range.end().saturating_sub(whole.end()) };
        self.write_zeros(writer, cx, head, req.class).await?;
        self.write_zeros(writer, cx, tail, req.class).await?;
        self.change(writer, cx, whole, Change::Discard { punch, keep: false }).await
    }

    /// Whether the data file is to be a raw image of the disk at all times.
    pub(super) fn has_raw_data_file(&self) -> bool {
        self.layout.data_file && self.header.lock().autoclear.contains(Autoclear::RAW_DATA)
    }

    /// The whole units of `size` bytes in `range`; one that the disk ends in is whole if the range reaches there. Empty at the start of the range if there are none.
    fn units(&self, range: ByteRange, size: u64) -> ByteRange {
        let first = align_up(range.offset, size);
        let end = if range.end() >= self.size() {
            align_up(range.end(), size)
        } else {
            align_down(range.end(), size)
        };
        if first >= end {
            return ByteRange { offset: range.offset, len: 0 };
        }
        ByteRange { offset: first, len: end - first }
    }

    /// Writes zeros where the disk does not read as zeros.
    async fn write_zeros(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        range: ByteRange,
        class: Class,
    ) -> IoResult {
        let mut at = range.offset;
        while at < range.end() {
            let rest = ByteRange { offset: at, len: range.end() - at };
            if let Some(stage) = writer.stages.overlapping(rest).first() {
                // What is staged is data, whatever the tables say of its cluster.
                let end = (stage.guest + self.layout.cluster_size()).min(rest.end());
                let len = (if stage.guest > at { stage.guest } else { end }) - at;
                if stage.guest <= at {
                    let req = Request::write(at, writer.zeros(len)).class(class);
                    self.write_all(writer, cx, &req).await?;
                    at += len;
                    continue;
                }
                self.write_zeros_mapped(writer, cx, ByteRange { offset: at, len }, class).await?;
                at += len;
                continue;
            }
            return self.write_zeros_mapped(writer, cx, rest, class).await;
        }
        Ok(())
    }

    /// The same where nothing is staged.
    async fn write_zeros_mapped(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        range: ByteRange,
        class: Class,
    ) -> IoResult {
        let mut at = range.offset;
        while at < range.end() {
            let rest = ByteRange { offset: at, len: range.end() - at };
            let found = self.mapped(cx, rest).await?;
            let is_zero = match found.run {
                Run::Zero(_) => true,
                Run::Unallocated => self.backing().is_none(),
                Run::Data(_) | Run::Compressed(_) => false,
            };
            let len = if is_zero { found.range.len } else { found.range.len.min(ZEROS_MAX) };
            if !is_zero {
                let req = Request::write(at, writer.zeros(len)).class(class);
                self.write_all(writer, cx, &req).await?;
            }
            at += len;
        }
        Ok(())
    }

    /// Changes the entries of whole units.
    async fn change(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        range: ByteRange,
        change: Change,
    ) -> IoResult {
        let mut at = range.offset;
        while at < range.end() {
            let table_end = (self.layout.l1_index(at) + 1) << self.layout.l2_span_bits();
            let l1 = self.l1_table(cx).await?;
            let is_empty = l1.word(self.layout.l1_index(at)) == 0;
            if is_empty && self.backing().is_none() {
                // Nothing is mapped, and nothing shows through.
                at = table_end.min(range.end());
                continue;
            }
            let far = align_down(at, self.layout.slice_span()) + SLICES_MAX * self.layout.slice_span();
            let end = far.min(table_end).min(range.end());
            self.change_window(writer, cx, ByteRange { offset: at, len: end - at }, change).await?;
            at = end;
        }
        Ok(())
    }

    async fn change_window(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        range: ByteRange,
        change: Change,
    ) -> IoResult {
        let mut window = self.window_to_change(writer, cx, range).await?;
        for part in self.clusters_of(range) {
            self.change_cluster(writer, cx, &mut window, part, change).await?;
        }
        drop(window);
        if self.cache.wants_commit() {
            super::commit::Commit::kick(self, writer, cx);
        }
        Ok(())
    }

    async fn change_cluster(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        window: &mut Window,
        part: ByteRange,
        change: Change,
    ) -> IoResult {
        let guest = self.layout.cluster_start(part.offset);
        let units = self.mask(guest, part);
        let ignored = units != ALL || (self.layout.version < 3 && self.backing_reaches(guest));
        if matches!(change, Change::Discard { .. }) && ignored {
            return Ok(());
        }
        if let Some(stage) = writer.stages.get(guest) {
            if units == ALL {
                self.drop_stage(writer, &stage).await;
            } else {
                self.settle_one(writer, cx, window, &stage).await?;
            }
        }
        let old = window.entry(self, guest)?;
        if let (L2Entry::Compressed(_), false) = (&old, units == ALL) {
            // The other sub-clusters must move: a write of zeros does that, and more than it must.
            let range = ByteRange { offset: part.offset, len: part.len.min(self.size() - part.offset) };
            let req = Request::write(range.offset, writer.zeros(range.len));
            let how = How { may_stage: false, follows: false };
            return self.write_entered(writer, cx, window, &req, range, how).await;
        }
        let Some(new) = self.changed(&old, units, change) else { return Ok(()) };
        if new == old {
            return Ok(());
        }
        window.set(self, guest, new.encode(&self.layout));
        let (had, has) = (host_of(&old), host_of(&new));
        if had != has {
            let punch = matches!(change, Change::Free { punch: true } | Change::Discard { punch: true, .. });
            self.unlink(writer, &old, punch);
        }
        Ok(())
    }

    /// The sub-clusters of the cluster at `guest` that `part` covers (all without sub-clusters).
    fn mask(&self, guest: u64, part: ByteRange) -> u32 {
        if !self.layout.extended {
            return ALL;
        }
        let bits = self.layout.subcluster_bits();
        let first = (part.offset - guest) >> bits;
        let count = part.len >> bits;
        (u64::MAX >> (64 - count) << first) as u32
    }

    /// The entry after a change of these units; `None` if it does not concern the cluster.
    fn changed(&self, old: &L2Entry, units: u32, change: Change) -> Option<L2Entry> {
        let v3 = self.layout.version > 2;
        let whole = units == ALL;
        // Where a backing file ends today says nothing of tomorrow: it may grow while nobody has it open below this image.
        let reads_zero = self.backing().is_none();
        let nothing = |host: Option<_>, copied| {
            if v3 { L2Entry::zero(host, copied && host.is_some()) } else { L2Entry::UNALLOCATED }
        };
        match (old, change) {
            (L2Entry::Compressed(_), _) => Some(nothing(None, false)),
            (L2Entry::Plain(p), _) if p.host.is_none() && (p.zero & units == units) => None,
            (L2Entry::Plain(p), _) if p.host.is_none() && p.zero == 0 && reads_zero => None,
            (L2Entry::Plain(p), _) if !whole => {
                Some(L2Entry::Plain(Plain { zero: p.zero | units, data: p.data & !units, ..*p }))
            }
            (L2Entry::Plain(p), Change::Zero | Change::Discard { keep: true, .. }) => {
                // A cluster that snapshots have is not ours to keep.
                let keeps = p.host.filter(|_| p.copied || self.layout.data_file);
                Some(nothing(keeps, p.copied))
            }
            (L2Entry::Plain(_), Change::Free { .. } | Change::Discard { .. }) => Some(nothing(None, false)),
        }
    }
}

fn host_of(entry: &L2Entry) -> Option<u64> {
    match entry {
        // Never kept.
        L2Entry::Compressed(c) => Some(c.offset.get() | 1 << 63),
        L2Entry::Plain(p) => p.host.map(|h| h.get()),
    }
}
