//! Writes: the fast path that a plan takes, and the slow one that allocates, copies and stages.
//!
//! Fast: the whole range lies in data clusters that are the image's own, one behind the other in the file, and one request to the node below carries it out; or it lies in a
//! cluster that is staged already, and is copied there. Slow, window by window (a window lies below one L2 table): enter the clusters, look at
//! their entries, find host clusters, then stage what would need old content, and read, write and link the rest. An error on the way gives the
//! clusters back; nothing has changed (section 2, point 10).
//!
//! A writer that goes on in order is staged from the start of each cluster, also where nothing must be copied: its small writes become one large one.
//!
//! The slow path runs as a task of its own: a request that is given up does not leave half of it (section 4, point 7).

use super::commit::Commit;
use super::cow::fill::{Data, Need};
use super::cow::stage::{Join, SECTOR, Stage};
use super::image::Image;
use super::map::{Run, map};
use super::tables::Window;
use super::writer::Writer;
use crate::error::{IoError, IoResult};
use crate::node::Plan;
use crate::queue::{Cx, IoCell};
use crate::request::{Flags, Op, ReqRef, Request};
use crate::sync::Arc;
use crate::sync::atomic::Ordering::{Acquire, Relaxed};
use crate::units::{ByteRange, align_down};
use smallvec::smallvec;
use std::future::Future;

/// Bytes of a window, unless a cluster is larger: bounds what a request holds at a time.
const WINDOW_MAX: u64 = 16 << 20;

/// A write at random is staged if it is at most one of so many parts of a cluster: a larger one has little to win from neighbours, and copying it costs more
/// (64 KiB at random over clusters of 64 KiB: 0.77 of QEMU's rate staged, 1.18 written at once).
const STAGED_SHARE: u64 = 4;

/// How the clusters of a write may be treated.
#[derive(Clone, Copy, Debug)]
pub(super) struct How {
    /// Bytes may stay in RAM.
    pub(super) may_stage: bool,
    /// The writer goes on where it stopped.
    pub(super) follows: bool,
}

impl Image {
    /// What writing needs; EACCES if the image cannot be written.
    pub(super) fn writer(&self) -> IoResult<&Arc<Writer>> {
        match self.writer.get() {
            Some(writer) if self.is_writable() => Ok(writer),
            _ => Err(IoError::read_only()),
        }
    }

    /// How a write can be carried out without waiting.
    pub(super) fn plan_write(&self, req: ReqRef<'_>) -> Plan {
        if let Err(e) = self.writer() {
            return Plan::Done(Err(e));
        }
        if req.flags.intersects(Flags::FUA | Flags::COMPRESS) {
            return Plan::Slow;
        }
        if let Some(plan) = self.plan_join(req) {
            return plan;
        }
        let l1 = self.l1.get();
        let Some(l1) = l1.as_ref() else { return Plan::Slow };
        // Before the lookup: the host cluster that is found stays what it is until the operation has ended.
        let pass = self.grace.enter();
        // In this order: what is the image's own stays so, and the place that is found then is one of its own.
        if !self.is_own(req.range) {
            return Plan::Slow;
        }
        let Ok(found) = map(&self.layout, l1, &*self.cache, req.range) else { return Plan::Slow };
        let Run::Data(host) = found.run else { return Plan::Slow };
        let data = self.data().get();
        if found.range != req.range || !self.in_data_file(&***data, host.get(), req.range.len) {
            return Plan::Slow;
        }
        match data.plan(req.at(host.get())) {
            Plan::Io(mut op) => {
                op.pass = Some(pass.and(op.pass.take()));
                Plan::Io(op)
            }
            other => other,
        }
    }

    /// A write to staged clusters; `None` if there are none in its range.
    fn plan_join(&self, req: ReqRef<'_>) -> Option<Plan> {
        let writer = self.writer.get()?;
        let stages = writer.stages.overlapping(req.range);
        let stage = stages.first()?;
        let inside =
            self.layout.cluster_start(req.range.offset) == self.layout.cluster_start(req.range.end() - 1);
        if !inside || !is_sectors(req.range) {
            return Some(Plan::Slow);
        }
        match stage.write(req.range, req.bufs, 0, true) {
            (Join::Done, taken) => {
                writer.stages.charge(taken);
                writer.counters.joined.fetch_add(1, Relaxed);
                Some(Plan::Done(Ok(())))
            }
            // Whoever completes it writes it.
            (Join::Completes | Join::Wait, _) => Some(Plan::Slow),
        }
    }

    /// Whether every cluster of `range` is the image's own, as the tables in RAM say.
    fn is_own(&self, range: ByteRange) -> bool {
        if self.layout.data_file {
            return true;
        }
        let cluster = self.layout.cluster_size();
        let mut at = self.layout.cluster_start(range.offset);
        while at < range.end() {
            let words = self.cache.peek(self.cache.key(at)).map(|s| s.entry(self.layout.slice_entry(at)));
            let copied = words.is_some_and(|w| w.entry & super::entry::COPIED != 0);
            let own_table =
                self.l1.get().as_ref().is_some_and(|l1| {
                    l1.entry(self.layout.l1_index(at), &self.layout).is_ok_and(|e| e.copied)
                });
            if !copied || !own_table {
                return false;
            }
            at += cluster;
        }
        true
    }

    /// Carries out a write.
    pub(super) async fn write(self: &Arc<Self>, cx: &Cx, req: Request) -> IoResult {
        let writer = self.writer()?.clone();
        let image = self.clone();
        in_task(cx, move |cx| async move {
            let written = image.write_all(&writer, &cx, &req).await;
            image.after(&writer, &cx, req.flags, written).await
        })
        .await
    }

    /// The end of a request that changes the image: durable with FUA; damage that it has met is marked in the image.
    pub(super) async fn after(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        flags: Flags,
        result: IoResult,
    ) -> IoResult {
        if result.is_err() && self.corrupt.load(Acquire) && self.is_writable() {
            writer.mark_corrupt(cx, self).await;
        }
        result?;
        if flags.contains(Flags::FUA) { Commit::flush(self, writer, cx).await } else { Ok(()) }
    }

    /// Writes the whole range, window by window. The request's range lies on the disk and is not empty.
    pub(super) async fn write_all(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        req: &Request,
    ) -> IoResult {
        debug_assert_eq!(req.op, Op::Write);
        if req.flags.contains(Flags::COMPRESS) && !self.layout.data_file {
            return self.write_packed(writer, cx, req).await;
        }
        let how = How {
            may_stage: !req.flags.contains(Flags::FUA),
            follows: writer.follows(req.range.offset, req.range.end()),
        };
        let mut at = req.range.offset;
        while at < req.range.end() {
            let range = self.next_window(at, req.range.end());
            self.write_window(writer, cx, req, range, how).await?;
            at = range.end();
        }
        Ok(())
    }

    /// The window that begins at `at`: below one L2 table, of whole clusters but for its ends, and of bounded length.
    pub(super) fn next_window(&self, at: u64, end: u64) -> ByteRange {
        let cluster = self.layout.cluster_size();
        let table_end = (self.layout.l1_index(at) + 1) << self.layout.l2_span_bits();
        let far = (align_down(at, cluster) + WINDOW_MAX.max(cluster)).min(table_end);
        ByteRange { offset: at, len: far.min(end) - at }
    }

    async fn write_window(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        req: &Request,
        range: ByteRange,
        how: How,
    ) -> IoResult {
        let filled = self.layout.extended && self.fill_window(writer, cx, req, range, how).await?;
        if !filled {
            let mut window = self.window_to_change(writer, cx, range).await?;
            self.write_entered(writer, cx, &mut window, req, range, how).await?;
        }
        if self.cache.wants_commit() {
            Commit::kick(self, writer, cx);
        }
        Ok(())
    }

    /// A write to clusters that keep their places, beside others who write to other sub-clusters of them; false, and nothing done, if it is not one.
    async fn fill_window(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        req: &Request,
        range: ByteRange,
        how: How,
    ) -> IoResult<bool> {
        if !writer.stages.overlapping(range).is_empty() || (how.follows && how.may_stage) {
            return Ok(false);
        }
        let mut window = self.window_to_fill(writer, cx, range).await?;
        let needs = self.needs(&window, req, range)?;
        let (cluster, unit) = (self.layout.cluster_size() as u32, self.layout.subcluster_size() as u32);
        let stays = |n: &Need<'_>| n.has_place() && !(how.may_stage && n.needs_old(cluster, unit));
        // Nobody stages a cluster that somebody is in.
        if !writer.stages.overlapping(range).is_empty() || !needs.iter().all(stays) {
            return Ok(false);
        }
        if needs.iter().all(|n| n.is_in_place(unit)) {
            window.leave();
        }
        self.write_needs(writer, cx, &window, needs, req).await?;
        Ok(true)
    }

    fn needs<'a>(&self, window: &Window, req: &'a Request, range: ByteRange) -> IoResult<Vec<Need<'a>>> {
        self.clusters_of(range).map(|part| self.need_of(window, req, part)).collect()
    }

    fn need_of<'a>(&self, window: &Window, req: &'a Request, part: ByteRange) -> IoResult<Need<'a>> {
        let guest = self.layout.cluster_start(part.offset);
        let first = (part.offset - guest) as u32;
        self.need(window, guest, smallvec![first..first + part.len as u32], Data::Request(req), None)
    }

    /// Reads, writes and links needs that have their places.
    async fn write_needs(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        window: &Window,
        needs: Vec<Need<'_>>,
        req: &Request,
    ) -> IoResult {
        let mut jobs = self.plan_jobs(needs);
        self.carry_out(writer, cx, &mut jobs, req.class).await?;
        // Who has left changes nothing: the clusters may have been zeroed or given away meanwhile.
        if !window.has_left() {
            self.link(writer, window, &jobs);
        }
        Ok(())
    }

    /// Carries out the part of a write that lies in clusters which the caller has entered whole.
    pub(super) async fn write_entered(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        window: &mut Window,
        req: &Request,
        range: ByteRange,
        how: How,
    ) -> IoResult {
        let (cluster, unit) = (self.layout.cluster_size() as u32, self.layout.subcluster_size() as u32);
        let mut needs = Vec::new();
        let mut joined = false;
        for part in self.clusters_of(range) {
            if let Some(stage) = writer.stages.get(part.offset) {
                joined = true;
                if is_sectors(part) {
                    self.join(writer, cx, window, &stage, req, part).await?;
                    continue;
                }
                self.settle_one(writer, cx, window, &stage).await?;
            }
            needs.push((part, self.need_of(window, req, part)?));
        }
        if !joined && how.may_stage && needs.iter().all(|(_, n)| n.is_in_place(unit)) {
            window.leave();
        }
        // A cluster that is to be staged has its place found with the others, so that they lie together.
        let stays = |part: &ByteRange, need: &Need<'_>| {
            let at_head = how.follows && part.offset == need.guest && part.len < u64::from(cluster);
            how.may_stage
                && writer.stages.has_room()
                && is_sectors(*part)
                && (how.follows || req.range.len * STAGED_SHARE <= u64::from(cluster))
                && (need.needs_old(cluster, unit) || (at_head && need.is_all_new(unit)))
        };
        let staged: Vec<bool> = needs.iter().map(|(part, need)| stays(part, need)).collect();
        let (parts, mut needs): (Vec<ByteRange>, Vec<Need<'_>>) = needs.into_iter().unzip();
        self.find_places(writer, cx, &mut needs).await?;
        let mut direct = Vec::with_capacity(needs.len());
        for ((part, need), stays) in parts.into_iter().zip(needs).zip(staged) {
            if stays {
                self.stage(writer, cx, window, req, part, &need, how);
            } else {
                direct.push(need);
            }
        }
        if direct.is_empty() {
            return Ok(());
        }
        self.write_needs(writer, cx, window, direct, req).await
    }

    /// Makes a stage of a cluster, with its first bytes.
    #[allow(clippy::too_many_arguments, reason = "what a write has at hand at this point")]
    fn stage(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        window: &Window,
        req: &Request,
        part: ByteRange,
        need: &Need<'_>,
        how: How,
    ) {
        let Some(place) = need.place() else { return };
        let cluster = self.layout.cluster_size();
        let unit = if how.follows { cluster } else { self.layout.subcluster_size() };
        let pin = window.pin_of(self, need.guest);
        let stage = Stage::new(need.guest, place, cluster as u32, unit as u32, cx.now(), pin);
        // Nobody else knows it: it takes the bytes.
        let (_, taken) = stage.write(part, &req.bufs, (part.offset - req.range.offset) as usize, false);
        writer.stages.charge(taken);
        writer.stages.insert(stage);
        writer.counters.staged.fetch_add(1, Relaxed);
        self.tend_stages(writer, cx);
    }

    /// Copies a part of a write to a stage, and writes the stage if that completes it.
    async fn join(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        window: &Window,
        stage: &Arc<Stage>,
        req: &Request,
        part: ByteRange,
    ) -> IoResult {
        let from = (part.offset - req.range.offset) as usize;
        loop {
            match stage.write(part, &req.bufs, from, false) {
                (Join::Wait, _) => cx.waiting(stage.wait(part)).await?,
                (_, taken) => {
                    writer.stages.charge(taken);
                    writer.counters.joined.fetch_add(1, Relaxed);
                    break;
                }
            }
        }
        if !stage.is_complete() {
            return Ok(());
        }
        writer.counters.filled.fetch_add(1, Relaxed);
        self.settle_one(writer, cx, window, stage).await
    }

    /// `range` cut at clusters.
    pub(super) fn clusters_of(&self, range: ByteRange) -> impl Iterator<Item = ByteRange> + use<> {
        let cluster = self.layout.cluster_size();
        let mut at = range.offset;
        std::iter::from_fn(move || {
            (at < range.end()).then(|| {
                let end = (align_down(at, cluster) + cluster).min(range.end());
                let part = ByteRange { offset: at, len: end - at };
                at = end;
                part
            })
        })
    }

    /// How a flush can be carried out without waiting: it is the file's own if nothing but data has been written.
    pub(super) fn plan_flush(&self, req: ReqRef<'_>) -> Plan {
        let Ok(writer) = self.writer() else { return Plan::Done(Ok(())) };
        if self.is_dirty(writer) { Plan::Slow } else { self.data().get().plan(req) }
    }

    pub(super) fn is_dirty(&self, writer: &Writer) -> bool {
        !writer.stages.is_empty()
            || self.cache.kept() > 0
            || writer.commit.is_running()
            || self.l1.get().as_ref().is_some_and(|l1| l1.is_dirty())
            || writer.alloc.is_dirty()
    }

    /// Carries out a flush.
    pub(super) async fn flush(self: &Arc<Self>, cx: &Cx) -> IoResult {
        match self.writer.get() {
            Some(writer) => Commit::flush(self, writer, cx).await,
            None => Ok(()),
        }
    }
}

/// Whether a range is whole sectors.
fn is_sectors(range: ByteRange) -> bool {
    (range.offset | range.len).is_multiple_of(SECTOR)
}

/// Runs `body` as a task of its own and waits for it, whatever becomes of the request: its I/O uses the request's memory.
pub(super) async fn in_task<F, Fut>(cx: &Cx, body: F) -> IoResult
where
    F: FnOnce(Cx) -> Fut,
    Fut: Future<Output = IoResult> + Send + 'static,
{
    /// Ends the wait also when the task panics.
    struct End(Arc<IoCell>);
    impl Drop for End {
        fn drop(&mut self) {
            self.0.complete(Err(IoError::panicked()));
        }
    }
    let cell: Arc<IoCell> = Arc::default();
    let (end, work) = (End(cell.clone()), body(cx.detached()));
    cx.spawn(async move {
        let result = work.await;
        end.0.complete(result);
    });
    std::future::poll_fn(|context| cell.poll(context)).await
}
