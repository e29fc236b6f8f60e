//! Carries out what [`super::plan`] has decided: host clusters, reads of old content, vectored writes, links.
//!
//! A [`Need`] is a guest cluster with bytes for it, looked at with its entry entered; a [`Job`] is a need with a host cluster and a plan. The bytes are a request's or a
//! stage's. Nothing is linked before all data of the jobs is written; an error gives new clusters back and changes nothing (section 2, point 10).

use super::plan::{self, Bytes, Plan as CowPlan, Source, Unit};
use super::stage::{Place, Stage};
use crate::error::{IoError, IoResult};
use crate::format::qcow2::addr::HostOffset;
use crate::format::qcow2::alloc::Kind;
use crate::format::qcow2::alloc::pending::UnlinkedKind;
use crate::format::qcow2::entry::{ALL, Compressed, L2Entry, Plain};
use crate::format::qcow2::image::Image;
use crate::format::qcow2::join::join_bounded;
use crate::format::qcow2::tables::Window;
use crate::format::qcow2::writer::Writer;
use crate::queue::Cx;
use crate::request::{Buffers, Class, Request};
use crate::sync::Arc;
use crate::sync::atomic::Ordering::Relaxed;
use crate::units::ByteRange;
use smallvec::SmallVec;

/// Reads or writes of some jobs under way.
const PIECES: usize = 64;

/// Where the guest's bytes of a cluster are.
#[derive(Clone)]
pub(in crate::format::qcow2) enum Data<'a> {
    /// In a request.
    Request(&'a Request),
    /// In a stage.
    Stage(Arc<Stage>),
}

/// A cluster, with what is to become of it.
pub(in crate::format::qcow2) struct Job<'a> {
    /// Guest offset of the cluster.
    pub(in crate::format::qcow2) guest: u64,
    old: L2Entry,
    plan: CowPlan,
    /// Where its data goes.
    host: HostOffset,
    fresh: Fresh,
    /// Old content that has been read, in the order of `plan.reads`.
    content: SmallVec<[Buffers; 2]>,
    data: Data<'a>,
}

/// What is known of a job's host cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fresh {
    /// It was there before.
    No,
    /// It is new; `cut` is the first that covers its count and its zeros.
    New { zeroed: bool, cut: u64 },
}

/// What is to be done with a cluster, before it has a host cluster.
pub(in crate::format::qcow2) struct Need<'a> {
    /// Guest offset of the cluster.
    pub(in crate::format::qcow2) guest: u64,
    old: L2Entry,
    valid: SmallVec<[Bytes; 4]>,
    units: SmallVec<[Unit; 32]>,
    /// The cluster it has and keeps, or that was reserved for it.
    host: Option<Place>,
    data: Data<'a>,
}

impl Need<'_> {
    /// Whether all bytes go where the guest's bytes are already: nothing is linked.
    pub(in crate::format::qcow2) fn is_in_place(&self, unit: u32) -> bool {
        self.touched(unit).all(|state| state == Unit::Here) && !self.units.contains(&Unit::Leaving)
    }

    /// Whether it has a host cluster, which it keeps.
    pub(in crate::format::qcow2) fn has_place(&self) -> bool {
        self.host.is_some_and(|place| !place.is_new)
    }

    /// Its host cluster, if it has one by now.
    pub(in crate::format::qcow2) fn place(&self) -> Option<Place> {
        self.host
    }

    /// Whether none of the bytes go to a unit that has data.
    pub(in crate::format::qcow2) fn is_all_new(&self, unit: u32) -> bool {
        self.touched(unit).all(|state| state != Unit::Here)
    }

    /// Whether old content must be read for it.
    pub(in crate::format::qcow2) fn needs_old(&self, cluster: u32, unit: u32) -> bool {
        let input =
            plan::Input { cluster, unit, align: 1, units: &self.units, valid: &self.valid, zeroed: true };
        !plan::plan(&input).reads.is_empty()
    }

    fn touched(&self, unit: u32) -> impl Iterator<Item = Unit> + '_ {
        let units = self.valid.iter().flat_map(move |r| r.start / unit..r.end.div_ceil(unit));
        units.map(|index| self.units[index as usize])
    }
}

impl Image {
    /// What bytes for the cluster at `guest` have to deal with. `valid` are the bytes, inside the cluster; `reserved` is a host cluster that was set aside for them.
    pub(in crate::format::qcow2) fn need<'a>(
        &self,
        window: &Window,
        guest: u64,
        valid: SmallVec<[Bytes; 4]>,
        data: Data<'a>,
        reserved: Option<Place>,
    ) -> IoResult<Need<'a>> {
        let old = window.entry(self, guest)?;
        let (units, keeps) = match &old {
            L2Entry::Compressed(_) => {
                (SmallVec::from_elem(Unit::Leaving, self.layout.subclusters() as usize), None)
            }
            L2Entry::Plain(p) => {
                let keeps = p.host.filter(|_| p.copied || self.layout.data_file);
                ((0..self.layout.subclusters()).map(|i| self.unit(guest, p, i, keeps)).collect(), keeps)
            }
        };
        let kept = keeps.map(|host| Place { host, is_new: false, zeroed: false, cut: 0 });
        Ok(Need { guest, old, valid, units, host: kept.or(reserved), data })
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
    pub(in crate::format::qcow2) fn backing_reaches(&self, guest: u64) -> bool {
        self.backing().is_some_and(|edge| edge.get().limits().size > guest)
    }

    /// Host clusters for the needs that have none, in order. In a data file the place is given.
    pub(in crate::format::qcow2) async fn find_places(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        needs: &mut [Need<'_>],
    ) -> IoResult {
        let cluster = self.layout.cluster_size();
        let wanted = needs.iter().filter(|n| n.host.is_none()).count() as u64;
        if wanted == 0 {
            return Ok(());
        }
        if self.layout.data_file {
            for need in needs.iter_mut() {
                let host = HostOffset(need.guest);
                need.host.get_or_insert(Place { host, is_new: true, zeroed: false, cut: u64::MAX });
            }
            return Ok(());
        }
        let grants = writer.alloc.take(cx, Kind::Data, wanted * cluster).await?;
        let mut places = grants.iter().flat_map(|g| {
            (g.range.offset..g.range.end()).step_by(cluster as usize).map(|host| Place {
                host: HostOffset(host),
                is_new: true,
                zeroed: g.zeroed,
                cut: g.cut,
            })
        });
        for need in needs.iter_mut().filter(|n| n.host.is_none()) {
            need.host = places.next();
        }
        Ok(())
    }

    /// Plans needs that have their places.
    pub(in crate::format::qcow2) fn plan_jobs<'a>(&self, needs: Vec<Need<'a>>) -> Vec<Job<'a>> {
        let unit = self.layout.subcluster_size() as u32;
        let align = self.data().get().limits().request_align.min(unit).max(1);
        let plan = |need: Need<'a>| {
            // Every need has its place by now.
            let place = need.host?;
            let plan = plan::plan(&plan::Input {
                cluster: self.layout.cluster_size() as u32,
                unit,
                align,
                units: &need.units,
                valid: &need.valid,
                zeroed: place.zeroed,
            });
            let fresh = match place.is_new {
                true => Fresh::New { zeroed: place.zeroed, cut: place.cut },
                false => Fresh::No,
            };
            Some(Job {
                guest: need.guest,
                old: need.old,
                plan,
                host: place.host,
                fresh,
                content: SmallVec::new(),
                data: need.data,
            })
        };
        needs.into_iter().filter_map(plan).collect()
    }

    /// Reads and writes whatever the jobs need. On an error new clusters that no stage has reserved are given back.
    pub(in crate::format::qcow2) async fn carry_out(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        jobs: &mut [Job<'_>],
        class: Class,
    ) -> IoResult {
        let result = match self.read_old(writer, cx, jobs, class).await {
            Ok(()) => self.write_data(writer, cx, jobs, class).await,
            Err(e) => Err(e),
        };
        if result.is_err() && !self.layout.data_file {
            let new = |j: &&Job<'_>| j.fresh != Fresh::No && matches!(j.data, Data::Request(_));
            for job in jobs.iter().filter(new) {
                writer.alloc.give_back(ByteRange { offset: job.host.get(), len: self.layout.cluster_size() });
            }
        }
        result
    }

    /// Reads what the plans miss, all of it at once.
    async fn read_old(
        self: &Arc<Self>,
        writer: &Writer,
        cx: &Cx,
        jobs: &mut [Job<'_>],
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
                0 if job.fresh != Fresh::No => writer.counters.cow_avoided.fetch_add(1, Relaxed),
                n => writer.counters.cow_reads.fetch_add(n as u64, Relaxed),
            };
        }
        if reads.is_empty() {
            return Ok(());
        }
        let reads = reads.into_iter().map(|(guest, bufs)| self.read_mapped(cx, guest, bufs, class));
        join_bounded(reads, PIECES).await
    }

    /// Reads through the mapping; zeros past the end of the disk.
    pub(in crate::format::qcow2) async fn read_mapped(
        self: &Arc<Self>,
        cx: &Cx,
        guest: u64,
        bufs: Buffers,
        class: Class,
    ) -> IoResult {
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
        jobs: &[Job<'_>],
        class: Class,
    ) -> IoResult {
        let mut writes: Vec<(u64, Buffers)> = Vec::new();
        for job in jobs {
            for write in &job.plan.writes {
                let host = job.host.get() + u64::from(write.range.start);
                let bufs = self.gather(writer, job, write);
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
            cx.run(&**data, Request::write(host, bufs).class(class)).await
        });
        join_bounded(writes, PIECES).await
    }

    /// Clusters in use reach past the end of the file: it grows, unless one of them is not counted, which is corruption (section 2, point 5).
    async fn extend(self: &Arc<Self>, writer: &Arc<Writer>, cx: &Cx, jobs: &[Job<'_>], end: u64) -> IoResult {
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
    fn gather(&self, writer: &Writer, job: &Job<'_>, write: &plan::Write) -> Buffers {
        let mut out = Buffers::new();
        let mut at = write.range.start;
        for (source, len) in &write.parts {
            match source {
                Source::Zero => out.append(writer.zeros(u64::from(*len))),
                Source::Guest => out.append(match &job.data {
                    Data::Request(req) => {
                        let from = job.guest + u64::from(at) - req.range.offset;
                        req.bufs.slice(from as usize, *len as usize)
                    }
                    Data::Stage(stage) => stage.slice(at, *len),
                }),
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

    /// Stores the entries of what has been written. The jobs' clusters lie in the window.
    pub(in crate::format::qcow2) fn link(&self, writer: &Arc<Writer>, window: &Window, jobs: &[Job<'_>]) {
        // Sub-clusters of one cluster may be linked by several requests at once.
        let _turn = self.layout.extended.then(|| writer.linking.lock());
        let mut changes: SmallVec<[(u64, L2Entry); 4]> = SmallVec::new();
        let mut needs_order = false;
        for job in jobs {
            let now = window.entry(self, job.guest).unwrap_or(job.old);
            let new = self.linked(job, &now);
            if new != now {
                changes.push((job.guest, new));
                needs_order |= !self.needs_no_order(writer, job);
            }
        }
        if changes.is_empty() {
            return;
        }
        // Rule Z for all of them, or an order for all of them.
        let ordered = needs_order.then(|| writer.commit.order());
        for (guest, entry) in &changes {
            window.set(self, *guest, entry.encode(&self.layout));
        }
        drop(ordered);
        writer.counters.linked.fetch_add(changes.len() as u64, Relaxed);
        for job in jobs.iter().filter(|job| job.fresh != Fresh::No) {
            self.unlink(writer, &job.old, self.settings.discard_other);
        }
    }

    /// The entry `now` with what the job has written.
    fn linked(&self, job: &Job<'_>, now: &L2Entry) -> L2Entry {
        let (had_data, had_zero) = match now {
            L2Entry::Plain(p) if job.fresh == Fresh::No => (p.data, p.zero),
            L2Entry::Plain(p) => (0, p.zero),
            L2Entry::Compressed(_) => (0, 0),
        };
        let data = if self.layout.extended { had_data | job.plan.data } else { ALL };
        L2Entry::Plain(Plain { host: Some(job.host), copied: true, data, zero: had_zero & !data })
    }

    /// Rule Z: entry and data may share a barrier.
    fn needs_no_order(&self, writer: &Writer, job: &Job<'_>) -> bool {
        let was_zero = match &job.old {
            L2Entry::Compressed(_) => false,
            L2Entry::Plain(p) => p.data == 0 && (p.zero == ALL || !self.backing_reaches(job.guest)),
        };
        match job.fresh {
            Fresh::New { zeroed: true, cut } => {
                was_zero && cut <= writer.alloc.done() && !self.layout.data_file
            }
            _ => false,
        }
    }

    /// Gives up what an entry pointed at; the entry has been replaced and its part marked.
    pub(in crate::format::qcow2) fn unlink(&self, writer: &Writer, old: &L2Entry, punch: bool) {
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
}
