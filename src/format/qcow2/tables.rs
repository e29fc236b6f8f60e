//! L2 tables that can be written to, and the window of entries that a slow request changes.

use super::addr::HostOffset;
use super::cache::Pinned;
use super::commit::Commit;
use super::entry::{L1Entry, L2Entry, Words};
use super::image::Image;
use super::map::Stop;
use super::meta_io::read_at;
use super::writer::Writer;
use crate::error::{IoError, IoResult};
use crate::format::qcow2::alloc::pending::UnlinkedKind;
use crate::inflight::{Entry, Pass};
use crate::queue::Cx;
use crate::request::{Buffers, Class, Request};
use crate::sync::Arc;
use crate::units::{ByteRange, align_down, align_up};

/// The entries of some guest clusters below one L2 table, entered and pinned; see [`Writer`]. Dropped in this order: entries are unpinned before the clusters are left.
pub(super) struct Window {
    pins: Vec<Pinned>,
    first_key: u64,
    /// Host clusters that were looked up stay what they are.
    _pass: Pass,
    entry: Option<Entry>,
}

impl Image {
    /// Enters the clusters of `range`, which lies below one L2 table, and pins their slices under a table that is the image's own. Waits for those who change the same clusters,
    /// and before that for room in the cache: nobody who has entered clusters waits for a commit.
    pub(super) async fn window_to_change(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        range: ByteRange,
    ) -> IoResult<Window> {
        let cluster = self.layout.cluster_size();
        self.find_room(writer, cx).await?;
        let entry = writer.enter(cx, whole(range, cluster)).await?;
        self.open_window(writer, cx, entry, range).await
    }

    /// The same for the sub-clusters of `range` only: others may change other sub-clusters of the same clusters meanwhile, but nobody may give the clusters another place.
    pub(super) async fn window_to_fill(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        range: ByteRange,
    ) -> IoResult<Window> {
        self.find_room(writer, cx).await?;
        let entry = writer.enter(cx, whole(range, self.layout.subcluster_size())).await?;
        self.open_window(writer, cx, entry, range).await
    }

    /// The same for one cluster, if nobody is in it.
    pub(super) async fn try_window(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        guest: u64,
    ) -> IoResult<Option<Window>> {
        let range = ByteRange { offset: guest, len: self.layout.cluster_size() };
        match writer.try_enter(range) {
            Some(entry) => self.open_window(writer, cx, entry, range).await.map(Some),
            None => Ok(None),
        }
    }

    /// What comes after a range has been entered.
    pub(super) async fn open_window(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        entry: Entry,
        range: ByteRange,
    ) -> IoResult<Window> {
        let span = whole(range, self.layout.cluster_size());
        // Before the entries are read: see `inflight::Grace`.
        let pass = self.grace.enter();
        let table = self.table_to_change(writer, cx, self.layout.l1_index(span.offset)).await?;
        let (first, last) = (self.cache.key(span.offset), self.cache.key(span.end() - 1));
        if last > first {
            (first..=last).for_each(|key| self.cache.prefetch(cx, key, table));
        }
        let mut pins = Vec::with_capacity((last - first + 1) as usize);
        for key in first..=last {
            pins.push(match self.cache.pin_cached(key) {
                Some(pin) => pin,
                None => self.cache.pin_now(cx, key, table).await?,
            });
        }
        Ok(Window { pins, first_key: first, _pass: pass, entry: Some(entry) })
    }

    /// Ends when the cache is not full of slices that must be written first (rule 14). Fails when they cannot be written.
    async fn find_room(self: &Arc<Self>, writer: &Arc<Writer>, cx: &Cx) -> IoResult {
        while self.cache.is_full() {
            Commit::next_end(self, writer, cx).await?;
        }
        Ok(())
    }

    /// The L2 table below an L1 entry, made or copied if need be so that nobody else has it.
    async fn table_to_change(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        l1_index: u64,
    ) -> IoResult<HostOffset> {
        if let Some(table) = self.own_table(cx, l1_index).await?.0 {
            return Ok(table);
        }
        let _entry = writer.enter_table(cx, l1_index).await?;
        match self.own_table(cx, l1_index).await? {
            (Some(table), _) => Ok(table),
            (None, None) => self.new_table(writer, cx, l1_index).await,
            (None, Some(shared)) => self.copy_table(writer, cx, l1_index, shared).await,
        }
    }

    /// The table if it is the image's own; else the one that is shared, if there is one.
    async fn own_table(&self, cx: &Cx, l1_index: u64) -> IoResult<(Option<HostOffset>, Option<HostOffset>)> {
        let l1 = self.l1_table(cx).await?;
        let entry = l1
            .entry(l1_index, &self.layout)
            .map_err(|bad| self.bad_entry(Stop::BadL1(l1_index, bad), &l1))?;
        Ok(if entry.copied { (entry.table, None) } else { (None, entry.table) })
    }

    async fn new_table(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        l1_index: u64,
    ) -> IoResult<HostOffset> {
        let grant = writer.alloc.take_table(cx).await?;
        if !grant.zeroed {
            let zeros = writer.zeros(self.layout.cluster_size());
            self.write_table(writer, cx, grant.range, zeros).await?;
        }
        let table = HostOffset(grant.range.offset);
        // The table reads as zeros in the file, or will when the pointer to it is durable: its slices are clean.
        self.cache.insert_new(l1_index, true);
        let ordered = (!(grant.ripe && grant.zeroed)).then(|| writer.commit.order());
        let l1 = self.l1_table(cx).await?;
        l1.set(l1_index, L1Entry { table: Some(table), copied: true }.encode());
        drop(ordered);
        Ok(table)
    }

    /// A table that snapshots have too: a copy takes its place. Its entries do not change meanwhile, since whoever changes one comes here first.
    async fn copy_table(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        l1_index: u64,
        shared: HostOffset,
    ) -> IoResult<HostOffset> {
        let cluster = self.layout.cluster_size();
        // Its slices are clean, so the file has it as it is.
        let bytes = Buffers::alloc(cluster as usize, 4096);
        read_at(cx, &*self.file.node(), shared, &bytes, Class::Guest).await?;
        let grant = writer.alloc.take_table(cx).await?;
        self.write_table(writer, cx, grant.range, bytes).await?;
        let table = HostOffset(grant.range.offset);
        let l1 = self.l1_table(cx).await?;
        let ordered = writer.commit.order();
        l1.set(l1_index, L1Entry { table: Some(table), copied: true }.encode());
        drop(ordered);
        let old = ByteRange { offset: shared.get(), len: cluster };
        writer.alloc.unlink(old, UnlinkedKind::Clusters, self.settings.discard_other);
        Ok(table)
    }

    async fn write_table(&self, writer: &Arc<Writer>, cx: &Cx, at: ByteRange, bytes: Buffers) -> IoResult {
        let file = self.file.node();
        let req = Request::write(at.offset, bytes).class(Class::Guest);
        cx.run(&*file, req).await.inspect_err(|_| writer.alloc.give_back(at))
    }
}

/// `range` widened to whole units of `unit` bytes.
fn whole(range: ByteRange, unit: u64) -> ByteRange {
    let offset = align_down(range.offset, unit);
    ByteRange { offset, len: align_up(range.end(), unit) - offset }
}

impl Window {
    /// Leaves the clusters: nothing in the tables is going to change. Their host clusters stay what they are until the window is dropped.
    pub(super) fn leave(&mut self) {
        self.entry = None;
    }

    /// Whether the clusters have been left.
    pub(super) fn has_left(&self) -> bool {
        self.entry.is_none()
    }

    /// The slice of the cluster at `guest`, pinned once more.
    pub(super) fn pin_of(&self, image: &Image, guest: u64) -> Option<Pinned> {
        image.cache.pin_cached(image.cache.key(guest))
    }

    /// The entry for the cluster at `guest`.
    pub(super) fn entry(&self, image: &Image, guest: u64) -> IoResult<L2Entry> {
        let words = self.pin(image, guest).entry(image.layout.slice_entry(guest));
        words.decode(&image.layout, guest).map_err(|bad| {
            let l1 = image.l1.get();
            match l1.as_ref() {
                Some(l1) => image.bad_entry(Stop::BadL2(guest, bad), l1),
                None => IoError::os(libc::EIO),
            }
        })
    }

    /// Stores the entry for the cluster at `guest` and marks it dirty.
    pub(super) fn set(&self, image: &Image, guest: u64, words: Words) {
        self.pin(image, guest).set(image.layout.slice_entry(guest), words);
    }

    fn pin(&self, image: &Image, guest: u64) -> &Pinned {
        &self.pins[(image.cache.key(guest) - self.first_key) as usize]
    }
}
