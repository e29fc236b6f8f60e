//! Writes: the fast path that a plan takes, and the slow one that allocates and copies.
//!
//! Fast: the whole range lies in data clusters that are the image's own, one behind the other in the file; one request to the node below carries it out. Slow, window
//! by window (a window lies below one L2 table): enter the clusters, look at their entries, plan, take clusters, read what is missing, write everything, and only
//! then link. An error on the way gives the clusters back; nothing has changed (section 2, point 10).
//!
//! The slow path runs as a task of its own: a request that is given up does not leave half of it (section 4, point 7).

use super::addr::HostOffset;
use super::alloc::Kind;
use super::alloc::pending::UnlinkedKind;
use super::commit::Commit;
use super::cow::plan::{self, Plan as CowPlan, Source, Unit};
use super::entry::{ALL, Compressed, L2Entry, Plain};
use super::image::Image;
use super::join::join_bounded;
use super::map::{Run, map};
use super::tables::Window;
use super::writer::Writer;
use crate::error::{IoError, IoResult};
use crate::node::Plan;
use crate::queue::{Cx, IoCell};
use crate::request::{Buffers, Class, Flags, Op, ReqRef, Request};
use crate::sync::Arc;
use crate::sync::atomic::Ordering::{Acquire, Relaxed};
use crate::units::{ByteRange, align_down};
use smallvec::SmallVec;
use std::future::Future;

/// Bytes of a window, unless a cluster is larger: bounds what a request holds at a time.
const WINDOW_MAX: u64 = 16 << 20;
/// Reads or writes of one window under way.
const PIECES: usize = 64;

/// A cluster of a window, with what is to become of it.
struct Job {
    /// Guest offset of the cluster.
    guest: u64,
    old: L2Entry,
    plan: CowPlan,
    /// Where its data goes.
    host: HostOffset,
    fresh: Fresh,
    /// Old content that has been read, in the order of `plan.reads`.
    content: SmallVec<[Buffers; 2]>,
    /// Which bytes of the request it takes.
    valid: ByteRange,
}

/// What is known of a job's host cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fresh {
    /// It was there before.
    No,
    /// It is new.
    New { zeroed: bool, ripe: bool },
}

/// What is to be done with a cluster, before it has a host cluster.
struct Need {
    guest: u64,
    old: L2Entry,
    valid: ByteRange,
    units: SmallVec<[Unit; 32]>,
    /// The cluster it has and keeps.
    host: Option<HostOffset>,
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
        if req.flags.contains(Flags::FUA) {
            return Plan::Slow;
        }
        let l1 = self.l1.get();
        let Some(l1) = l1.as_ref() else { return Plan::Slow };
        // Before the lookup: the host cluster that is found stays what it is until the operation has ended.
        let pass = self.grace.enter();
        let Ok(found) = map(&self.layout, l1, &*self.cache, req.range) else { return Plan::Slow };
        let Run::Data(host) = found.run else { return Plan::Slow };
        let data = self.data().get();
        if found.range != req.range
            || !self.in_data_file(&***data, host.get(), req.range.len)
            || !self.is_own(req.range)
        {
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
        let mut at = req.range.offset;
        while at < req.range.end() {
            let range = self.next_window(at, req.range.end());
            self.write_window(writer, cx, req, range).await?;
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
    ) -> IoResult {
        let window = self.window_to_change(writer, cx, range).await?;
        self.write_entered_part(writer, cx, &window, req, range).await?;
        drop(window);
        if self.cache.wants_commit() {
            Commit::kick(self, writer, cx);
        }
        Ok(())
    }

    /// Carries out a write to clusters that the caller has entered.
    pub(super) async fn write_entered(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        window: &Window,
        req: &Request,
    ) -> IoResult {
        self.write_entered_part(writer, cx, window, req, req.range).await
    }

    async fn write_entered_part(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        window: &Window,
        req: &Request,
        range: ByteRange,
    ) -> IoResult {
        let mut needs = Vec::new();
        for valid in self.clusters_of(range) {
            needs.push(self.need(window, valid)?);
        }
        let mut jobs = self.allocate(writer, cx, needs).await?;
        let result = async {
            self.read_old(writer, cx, &mut jobs, req.class).await?;
            self.write_data(writer, cx, &jobs, req).await
        }
        .await;
        if let Err(e) = result {
            for job in jobs.iter().filter(|j| j.fresh != Fresh::No && !self.layout.data_file) {
                writer.alloc.give_back(ByteRange { offset: job.host.get(), len: self.layout.cluster_size() });
            }
            return Err(e);
        }
        self.link(writer, window, &jobs);
        Ok(())
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

    /// What a write of `valid`, which lies in one cluster, has to deal with.
    fn need(&self, window: &Window, valid: ByteRange) -> IoResult<Need> {
        let guest = self.layout.cluster_start(valid.offset);
        let old = window.entry(self, guest)?;
        let (units, host) = match &old {
            L2Entry::Compressed(_) => {
                (SmallVec::from_elem(Unit::Leaving, self.layout.subclusters() as usize), None)
            }
            L2Entry::Plain(p) => {
                let keeps = p.host.filter(|_| p.copied || self.layout.data_file);
                ((0..self.layout.subclusters()).map(|i| self.unit(guest, p, i, keeps)).collect(), keeps)
            }
        };
        Ok(Need { guest, old, valid, units, host })
    }

    /// Where unit `index` of the cluster at `guest` has its bytes.
    fn unit(&self, guest: u64, p: &Plain, index: u32, keeps: Option<HostOffset>) -> Unit {
        let start = guest + u64::from(index) * self.layout.subcluster_size();
        if p.data >> index & 1 == 1 {
            if keeps.is_some() { Unit::Here } else { Unit::Leaving }
        } else if p.zero >> index & 1 == 1 || !self.backing_reaches(start) {
            Unit::Zero
        } else {
            Unit::Elsewhere
        }
    }

    /// Whether the layer below has a byte at `guest` or behind it.
    pub(super) fn backing_reaches(&self, guest: u64) -> bool {
        self.backing().is_some_and(|edge| edge.get().limits().size > guest)
    }

    /// Finds a host cluster for each need that has none, in order, and plans.
    async fn allocate(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        needs: Vec<Need>,
    ) -> IoResult<Vec<Job>> {
        let cluster = self.layout.cluster_size();
        let wanted = needs.iter().filter(|n| n.host.is_none()).count() as u64;
        let mut grants = match wanted {
            0 => Default::default(),
            _ if self.layout.data_file => Default::default(),
            n => writer.alloc.take(cx, Kind::Data, n * cluster).await?,
        };
        grants.reverse();
        let mut jobs = Vec::with_capacity(needs.len());
        for need in needs {
            let (host, fresh) = match (need.host, grants.last_mut()) {
                (Some(host), _) => (host, Fresh::No),
                (None, Some(grant)) => {
                    let host = HostOffset(grant.range.offset);
                    let fresh = Fresh::New { zeroed: grant.zeroed, ripe: grant.ripe };
                    grant.range.offset += cluster;
                    grant.range.len -= cluster;
                    if grant.range.is_empty() {
                        grants.pop();
                    }
                    (host, fresh)
                }
                // In a data file the place is given.
                (None, None) => (HostOffset(need.guest), Fresh::New { zeroed: false, ripe: false }),
            };
            let first = (need.valid.offset - need.guest) as u32;
            let valid = first..first + need.valid.len as u32;
            let plan = plan::plan(&plan::Input {
                cluster: cluster as u32,
                unit: self.layout.subcluster_size() as u32,
                align: self
                    .data()
                    .get()
                    .limits()
                    .request_align
                    .min(self.layout.subcluster_size() as u32)
                    .max(1),
                units: &need.units,
                valid: std::slice::from_ref(&valid),
                zeroed: matches!(fresh, Fresh::New { zeroed: true, .. }),
            });
            let content = SmallVec::new();
            jobs.push(Job {
                guest: need.guest,
                old: need.old,
                plan,
                host,
                fresh,
                content,
                valid: need.valid,
            });
        }
        Ok(jobs)
    }

    /// Reads what the plans miss, all of it at once.
    async fn read_old(
        self: &Arc<Self>,
        writer: &Writer,
        cx: &Cx,
        jobs: &mut [Job],
        class: Class,
    ) -> IoResult {
        let mut reads = Vec::new();
        for job in jobs.iter_mut() {
            for read in &job.plan.reads {
                let bufs = Buffers::alloc((read.end - read.start) as usize, 4096);
                job.content.push(bufs.clone());
                reads.push((job.guest + u64::from(read.start), bufs));
            }
            match job.plan.reads.len() {
                0 if job.valid.len < self.layout.cluster_size() && job.fresh != Fresh::No => {
                    writer.counters.cow_avoided.fetch_add(1, Relaxed);
                }
                n => {
                    writer.counters.cow_reads.fetch_add(n as u64, Relaxed);
                }
            }
        }
        if reads.is_empty() {
            return Ok(());
        }
        let reads = reads.into_iter().map(|(guest, bufs)| self.read_mapped(cx, guest, bufs, class));
        join_bounded(reads, PIECES).await
    }

    /// Reads through the mapping; zeros past the end of the disk.
    async fn read_mapped(self: &Arc<Self>, cx: &Cx, guest: u64, bufs: Buffers, class: Class) -> IoResult {
        let inside = self.size().saturating_sub(guest).min(bufs.len() as u64) as usize;
        bufs.fill_range(inside, bufs.len() - inside, 0);
        if inside == 0 {
            return Ok(());
        }
        self.read(cx, Request::read(guest, bufs.slice(0, inside)).class(class)).await
    }

    /// Writes all data of a window, what follows each other in the file in one write.
    async fn write_data(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        jobs: &[Job],
        req: &Request,
    ) -> IoResult {
        let mut writes: Vec<(u64, Buffers)> = Vec::new();
        for job in jobs {
            for write in &job.plan.writes {
                let host = job.host.get() + u64::from(write.range.start);
                let bufs = self.gather(writer, job, write, req);
                match writes.last_mut() {
                    Some((offset, had)) if *offset + had.len() as u64 == host => had.append(bufs),
                    _ => writes.push((host, bufs)),
                }
            }
        }
        let data = self.data().node();
        if self.layout.data_file {
            // The last cluster of the disk ends with the disk.
            let size = data.limits().size;
            for (host, bufs) in &mut writes {
                let inside = size.saturating_sub(*host).min(bufs.len() as u64);
                *bufs = bufs.slice(0, inside as usize);
            }
            writes.retain(|(_, bufs)| !bufs.is_empty());
        } else if let Some(end) = writes.iter().map(|(host, bufs)| host + bufs.len() as u64).max()
            && end > data.limits().size
        {
            self.extend(writer, cx, jobs, end).await?;
        }
        let data = &data;
        let writes = writes.into_iter().map(|(host, bufs)| async move {
            cx.run(&**data, Request::write(host, bufs).class(req.class)).await
        });
        join_bounded(writes, PIECES).await
    }

    /// Clusters in use reach past the end of the file: it grows, unless one of them is not counted, which is corruption (section 2, point 5).
    async fn extend(self: &Arc<Self>, writer: &Arc<Writer>, cx: &Cx, jobs: &[Job], end: u64) -> IoResult {
        let cluster = self.layout.cluster_size();
        for job in jobs.iter().filter(|j| j.fresh == Fresh::No) {
            let range = ByteRange { offset: job.host.get(), len: cluster };
            if !writer.alloc.is_counted(cx, range).await? {
                let text = format!("data cluster at {} is mapped and not counted", job.host);
                self.found_corrupt(text, ByteRange { offset: job.guest, len: cluster });
                writer.mark_corrupt(cx, self).await;
                return Err(IoError::os(libc::EIO));
            }
        }
        writer.alloc.extend(cx, end).await
    }

    /// The bytes of one write.
    fn gather(&self, writer: &Writer, job: &Job, write: &plan::Write, req: &Request) -> Buffers {
        let mut out = Buffers::new();
        let mut at = write.range.start;
        for (source, len) in &write.parts {
            match source {
                Source::Zero => out.append(writer.zeros(u64::from(*len))),
                Source::Guest => {
                    let from = job.guest + u64::from(at) - req.range.offset;
                    out.append(req.bufs.slice(from as usize, *len as usize));
                }
                Source::Old => {
                    let read = job.plan.reads.iter().zip(&job.content).find(|(r, _)| r.contains(&at));
                    debug_assert!(read.is_some_and(|(r, _)| at + len <= r.end), "planned to be read");
                    if let Some((r, content)) = read {
                        out.append(content.slice((at - r.start) as usize, *len as usize));
                    }
                }
            }
            at += len;
        }
        out
    }

    /// Stores the entries of what has been written.
    fn link(&self, writer: &Arc<Writer>, window: &Window, jobs: &[Job]) {
        let entry = |job: &Job| {
            let (data, zero) = match &job.old {
                L2Entry::Compressed(_) => (job.plan.data, 0),
                L2Entry::Plain(p) => (job.plan.data, p.zero & !job.plan.data),
            };
            let (data, zero) = if self.layout.extended { (data, zero) } else { (ALL, 0) };
            L2Entry::Plain(Plain { host: Some(job.host), copied: true, data, zero })
        };
        let changed = || jobs.iter().filter(|job| entry(job) != job.old);
        if changed().next().is_none() {
            return;
        }
        // Rule Z for all of them, or an order for all of them.
        let ordered = (!changed().all(|job| self.needs_no_order(job))).then(|| writer.commit.order());
        for job in changed() {
            window.set(self, job.guest, entry(job).encode(&self.layout));
            writer.counters.linked.fetch_add(1, Relaxed);
        }
        drop(ordered);
        for job in jobs.iter().filter(|job| job.fresh != Fresh::No) {
            self.unlink(writer, &job.old, self.settings.discard_other);
        }
    }

    /// Rule Z: entry and data may share a barrier.
    fn needs_no_order(&self, job: &Job) -> bool {
        let was_zero = match &job.old {
            L2Entry::Compressed(_) => false,
            L2Entry::Plain(p) => p.data == 0 && (p.zero == ALL || !self.backing_reaches(job.guest)),
        };
        was_zero && job.fresh == Fresh::New { zeroed: true, ripe: true } && !self.layout.data_file
    }

    /// Gives up what an entry pointed at; the entry has been replaced and its part marked.
    pub(super) fn unlink(&self, writer: &Writer, old: &L2Entry, punch: bool) {
        match old {
            L2Entry::Compressed(Compressed { offset, len }) => {
                let range = ByteRange { offset: offset.get(), len: *len };
                writer.alloc.unlink(range, UnlinkedKind::Compressed, false);
            }
            L2Entry::Plain(p) => {
                if let Some(host) = p.host
                    && !self.layout.data_file
                {
                    let range = ByteRange { offset: host.get(), len: self.layout.cluster_size() };
                    writer.alloc.unlink(range, UnlinkedKind::Clusters, punch);
                }
            }
        }
    }

    /// How a flush can be carried out without waiting: it is the file's own if nothing but data has been written.
    pub(super) fn plan_flush(&self, req: ReqRef<'_>) -> Plan {
        let Ok(writer) = self.writer() else { return Plan::Done(Ok(())) };
        if self.is_dirty(writer) { Plan::Slow } else { self.data().get().plan(req) }
    }

    pub(super) fn is_dirty(&self, writer: &Writer) -> bool {
        self.cache.kept() > 0
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
