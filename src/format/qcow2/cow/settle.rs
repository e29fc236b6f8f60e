//! When staged clusters are written, and in which company (qcow2.md 3.1 point 3).
//!
//! - A cluster that its writers have filled is settled by the one who filled it: one write, no read.
//! - A commit settles what was staged when it began; so does everything that commits (close, FUA).
//! - Under memory pressure a task settles until half of the memory is free, the fullest first, then the oldest.
//! - What is a second old is settled by a task on a worker.
//!
//! Clusters that follow each other in the file, as those staged one after the other do, are settled together, up to [`GROUP_BYTES`]: their reads run side by side and
//! they go out in one write. A group holds several entries of the list of changes at once, so it takes only clusters that nobody is in, and waits for the others
//! one by one while it holds none: nobody ever waits for a cluster while holding another.

use super::fill::Data;
use super::stage::Stage;
use crate::error::IoResult;
use crate::format::qcow2::image::Image;
use crate::format::qcow2::join::join_bounded;
use crate::format::qcow2::tables::Window;
use crate::format::qcow2::writer::Writer;
use crate::queue::Cx;
use crate::request::Class;
use crate::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use crate::sync::{Arc, Mutex};
use std::time::Duration;

/// Bytes of clusters that are settled together.
const GROUP_BYTES: u64 = 1 << 20;
/// Clusters that are settled together.
const GROUP_MAX: usize = 64;
/// Groups under way.
const GROUPS: usize = 4;
/// Age at which a stage is settled, and how often that is looked at.
const AGE: Duration = Duration::from_secs(1);
const AGE_STEP: Duration = Duration::from_millis(250);

impl Image {
    /// Settles everything that is staged now. The first error; what could not be settled stays staged.
    pub(in crate::format::qcow2) async fn settle_staged(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
    ) -> IoResult {
        if writer.stages.is_empty() {
            return Ok(());
        }
        self.settle_list(writer, cx, writer.stages.all()).await
    }

    /// Settles these, which are in the order of their host clusters.
    async fn settle_list(self: &Arc<Self>, writer: &Arc<Writer>, cx: &Cx, list: Vec<Arc<Stage>>) -> IoResult {
        let cluster = self.layout.cluster_size();
        let most = ((GROUP_BYTES / cluster) as usize).clamp(1, GROUP_MAX);
        let mut groups: Vec<Vec<Arc<Stage>>> = Vec::new();
        for stage in list {
            match groups.last_mut() {
                Some(group)
                    if group.len() < most
                        && group
                            .last()
                            .is_some_and(|s| s.place.host.get() + cluster == stage.place.host.get()) =>
                {
                    group.push(stage);
                }
                _ => groups.push(vec![stage]),
            }
        }
        let failed: Mutex<IoResult> = Mutex::new(Ok(()));
        let work = groups.into_iter().map(|group| {
            let failed = &failed;
            async move {
                if let Err(e) = self.settle_group(writer, cx, group).await {
                    // The others are settled all the same.
                    let mut failed = failed.lock();
                    *failed = failed.and(Err(e));
                }
                Ok(())
            }
        });
        join_bounded(work, GROUPS).await?;
        failed.into_inner()
    }

    async fn settle_group(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        group: Vec<Arc<Stage>>,
    ) -> IoResult {
        let mut entered: Vec<(Window, Arc<Stage>)> = Vec::new();
        let mut later = Vec::new();
        for stage in group {
            match self.try_window(writer, cx, stage.guest).await? {
                Some(window) => entered.push((window, stage)),
                None => later.push(stage),
            }
        }
        let mut result = self.settle_entered(writer, cx, &entered).await;
        drop(entered);
        for stage in later {
            let range = crate::units::ByteRange { offset: stage.guest, len: self.layout.cluster_size() };
            let one = match writer.enter(cx, range).await {
                Ok(entry) => match self.open_window(writer, cx, entry, range).await {
                    Ok(window) => self.settle_entered(writer, cx, &[(window, stage)]).await,
                    Err(e) => Err(e),
                },
                Err(e) => Err(e),
            };
            result = result.and(one);
        }
        result
    }

    /// Settles stages whose clusters the caller has entered, each with its window, in the order of their host clusters. Those that are settled already are passed over.
    pub(in crate::format::qcow2) async fn settle_entered(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        list: &[(Window, Arc<Stage>)],
    ) -> IoResult {
        let refs: Vec<(&Window, &Arc<Stage>)> = list.iter().map(|(w, s)| (w, s)).collect();
        self.settle_refs(writer, cx, &refs).await
    }

    /// Settles the stage of one cluster in a window.
    pub(in crate::format::qcow2) async fn settle_one(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        window: &Window,
        stage: &Arc<Stage>,
    ) -> IoResult {
        self.settle_refs(writer, cx, &[(window, stage)]).await
    }

    async fn settle_refs(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        list: &[(&Window, &Arc<Stage>)],
    ) -> IoResult {
        let mut open = Vec::with_capacity(list.len());
        for (window, stage) in list {
            let staged = writer.stages.get(stage.guest);
            if staged.is_some_and(|s| Arc::ptr_eq(&s, stage)) {
                stage.close().await;
                open.push((*window, (*stage).clone()));
            }
        }
        let result = self.settle_closed(writer, cx, &open).await;
        for (_, stage) in &open {
            match result {
                Ok(()) => writer.stages.remove(stage),
                Err(_) => stage.reopen(),
            }
        }
        result
    }

    async fn settle_closed(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        list: &[(&Window, Arc<Stage>)],
    ) -> IoResult {
        let mut needs = Vec::with_capacity(list.len());
        for (window, stage) in list {
            let place = stage.place.is_new.then_some(stage.place);
            needs.push(self.need(window, stage.guest, stage.valid(), Data::Stage(stage.clone()), place)?);
        }
        let mut jobs = self.plan_jobs(needs);
        self.carry_out(writer, cx, &mut jobs, Class::Guest).await?;
        for (job, (window, _)) in jobs.iter().zip(list) {
            self.link(writer, window, std::slice::from_ref(job));
        }
        Ok(())
    }

    /// Drops the stage of a cluster that the caller has entered and whose bytes are not wanted any more.
    pub(in crate::format::qcow2) async fn drop_stage(&self, writer: &Writer, stage: &Arc<Stage>) {
        stage.close().await;
        writer.stages.remove(stage);
        if stage.place.is_new {
            let range =
                crate::units::ByteRange { offset: stage.place.host.get(), len: self.layout.cluster_size() };
            writer.alloc.give_back(range);
        }
    }

    /// Looks after what has been staged: its age, and the memory it takes.
    pub(in crate::format::qcow2) fn tend_stages(self: &Arc<Self>, writer: &Arc<Writer>, cx: &Cx) {
        if writer.stages.is_pressed() && !writer.relieving.swap(true, AcqRel) {
            let (image, theirs, task) = (self.clone(), writer.clone(), cx.detached());
            cx.spawn(async move {
                image.relieve(&theirs, &task).await;
                drop(image);
                theirs.relieving.store(false, Release);
                theirs.relieved.notify(usize::MAX);
            });
        }
        if writer.ageing.load(Relaxed) || writer.ageing.swap(true, AcqRel) {
            return;
        }
        // Weak: an image that is closed is not kept open by its age.
        let (image, theirs) = (Arc::downgrade(self), Arc::downgrade(writer));
        let started = cx.env().spawn_background(move |cx| async move {
            loop {
                cx.sleep_until(cx.now().after(AGE_STEP)).await;
                let (Some(image), Some(writer)) = (image.upgrade(), theirs.upgrade()) else { return };
                if writer.stages.is_empty() {
                    writer.ageing.store(false, Release);
                    // Somebody may have staged before he could see that.
                    if writer.stages.is_empty() || writer.ageing.swap(true, AcqRel) {
                        return;
                    }
                }
                let now = cx.now();
                let old = writer.stages.all().into_iter().filter(|s| now.since(s.since) >= AGE).collect();
                // What fails stays staged, and is tried again and told to whoever flushes.
                let _ = image.settle_list(&writer, &cx, old).await;
            }
        });
        if started.is_err() {
            writer.ageing.store(false, Release);
        }
    }

    /// Settles until half of the memory is free, the fullest stages first, then the oldest.
    async fn relieve(self: &Arc<Self>, writer: &Arc<Writer>, cx: &Cx) {
        let mut list = writer.stages.all();
        list.sort_by_cached_key(|s| (std::cmp::Reverse(s.memory()), s.since));
        let mut freed = 0;
        let excess = writer.stages.excess();
        let enough = list
            .iter()
            .position(|s| {
                freed += s.memory();
                freed >= excess
            })
            .map_or(list.len(), |at| at + 1);
        list.truncate(enough);
        list.sort_unstable_by_key(|s| s.place.host);
        let _ = self.settle_list(writer, cx, list).await;
    }

    /// Ends when no task that makes room is under way.
    pub(in crate::format::qcow2) async fn relieved(&self, writer: &Writer, cx: &Cx) -> IoResult {
        loop {
            let listener = writer.relieved.listen();
            if !writer.relieving.load(Acquire) {
                return Ok(());
            }
            cx.waiting(listener).await?;
        }
    }
}
