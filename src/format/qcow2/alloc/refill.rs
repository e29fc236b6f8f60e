//! The refill: where the next run comes from.
//!
//! One at a time per image, as a task of its own: whoever waits may give up, the refill goes on. It takes the longest free extents first when they are worth it, else
//! space at the end of the file. Order (rules 1, 5, 16): blocks that count the range are loaded, the file covers it and it is zeroed, then it is counted
//! in RAM, then it is handed out. If the long run does not fit, just the clusters that are needed are tried.

use super::allocator::{Allocator, Kind, State};
use super::run::Run;
use crate::error::{Error, IoError, IoResult};
use crate::format::qcow2::addr::HostOffset;
use crate::format::qcow2::flight::Flight;
use crate::format::qcow2::join::join_bounded;
use crate::format::qcow2::meta_io::read_at;
use crate::node::{Growth, Node};
use crate::queue::Cx;
use crate::request::{Buffers, Class, Flags, Request};
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, Mutex};
use crate::units::{ByteRange, align_down, align_up};

/// Blocks read at once.
const WIDTH: usize = 8;
/// Rounds of looking for free clusters at the end of the file: each goes past what a block counts there.
const ROUNDS_MAX: usize = 1 << 20;

/// Blocks that have been read: index, place, bytes.
pub(super) type Loaded = Vec<(u64, HostOffset, Vec<u8>)>;

impl Allocator {
    /// Waits until the runs of `kind` have `need` bytes more than they had, or says why not.
    pub(super) async fn refill(self: &Arc<Self>, cx: &Cx, kind: Kind, need: u64) -> IoResult {
        let (flight, own) = self.start_refill(cx, kind, need);
        match flight.wait(cx).await {
            // Somebody else's refill failed, perhaps for a larger wish: try our own.
            Err(_) if !own => Ok(()),
            result => result,
        }
    }

    /// Begins a refill so that the next run is ripe when it is needed.
    pub(super) fn refill_ahead(self: &Arc<Self>, cx: &Cx, kind: Kind) {
        if self.refill.lock().is_none() {
            self.start_refill(cx, kind, self.layout.cluster_size());
        }
    }

    /// Lets the file reach to `end`, for clusters in use that lie behind its end. Not while a refill changes its length.
    pub async fn extend(self: &Arc<Self>, cx: &Cx, end: u64) -> IoResult {
        let this = self.clone();
        self.alone(cx, move |cx| async move {
            let file = this.file.node();
            let end = align_up(end, this.layout.cluster_size());
            if file.limits().size >= end {
                return Ok(());
            }
            match file.resize(&cx, end, Growth::Sparse).await {
                Err(e) if e.errno == libc::ENOTSUP => Err(IoError::os(libc::ENOSPC)),
                result => result,
            }
        })
        .await
    }

    /// Gives the unused rest of all runs back and cuts the file off behind what is in use (close). The counts are in RAM then.
    pub async fn retire(self: &Arc<Self>, cx: &Cx) -> IoResult {
        let this = self.clone();
        self.alone(cx, move |cx| async move {
            let Some(end) = this.retire_runs(&cx).await? else { return Ok(()) };
            let file = this.file.node();
            if file.limits().size <= end {
                return Ok(());
            }
            match file.resize(&cx, end, Growth::Sparse).await {
                // Then it stays as long as it is.
                Err(e) if e.errno == libc::ENOTSUP => Ok(()),
                result => result,
            }
        })
        .await
    }

    /// Lowers the counts of what is left of all runs. Where the used part of the file ends now, if what was given back lies at its end.
    pub(super) async fn retire_runs(&self, cx: &Cx) -> IoResult<Option<u64>> {
        let runs: Vec<Run> = {
            let mut state = self.state.lock();
            let State { data, metadata, .. } = &mut *state;
            data.drain().into_iter().chain(metadata.drain()).collect()
        };
        for (at, run) in runs.iter().enumerate() {
            let lowered = self
                .with_blocks(cx, &[run.rest], |state| {
                    if state.counts.change(run.rest, true).is_ok() {
                        state.space.insert(run.rest);
                    }
                })
                .await;
            if let Err(e) = lowered {
                let mut state = self.state.lock();
                runs[at..].iter().for_each(|run| state.data.add(*run));
                return Err(e);
            }
        }
        let mut state = self.state.lock();
        let last = state.space.extents().last().filter(|e| e.end() == state.end);
        if let Some(last) = last {
            state.space.remove(last);
            state.end = last.offset;
        }
        Ok(last.map(|e| e.offset))
    }

    /// Counts one more user of a cluster that is in use. False if its count is at the maximum.
    pub async fn share(&self, cx: &Cx, range: ByteRange) -> IoResult<bool> {
        self.with_blocks(cx, &[range], |state| state.counts.change(range, false).is_ok()).await
    }

    /// Whether a cluster can have more than one user.
    pub fn can_share(&self) -> bool {
        self.state.lock().counts.max() > 1
    }

    /// Whether every cluster of `range` has a count that is not 0.
    pub async fn is_counted(&self, cx: &Cx, range: ByteRange) -> IoResult<bool> {
        let cluster = self.layout.cluster_size() as usize;
        self.with_blocks(cx, &[range], |state| {
            (range.offset..range.end()).step_by(cluster).all(|at| state.counts.get(at).is_ok_and(|n| n > 0))
        })
        .await
    }

    /// Runs `body` as a task while no refill runs.
    async fn alone<F, Fut>(self: &Arc<Self>, cx: &Cx, body: F) -> IoResult
    where
        F: FnOnce(Cx) -> Fut,
        Fut: std::future::Future<Output = IoResult> + Send + 'static,
    {
        loop {
            let (flight, landing) = {
                let mut slot = self.refill.lock();
                match &*slot {
                    Some(flight) => (flight.clone(), None),
                    None => {
                        let (flight, landing) = Flight::start();
                        *slot = Some(flight.clone());
                        (flight, Some(landing))
                    }
                }
            };
            let Some(landing) = landing else {
                // Its result is for those who asked for it.
                let _ = flight.wait(cx).await;
                if cx.is_cancelled() {
                    return Err(IoError::cancelled());
                }
                continue;
            };
            let (this, work) = (self.clone(), body(cx.detached()));
            cx.spawn(async move {
                let done = work.await;
                *this.refill.lock() = None;
                drop(this);
                landing.land(done);
            });
            return flight.wait(cx).await;
        }
    }

    fn start_refill(self: &Arc<Self>, cx: &Cx, kind: Kind, need: u64) -> (Arc<Flight<()>>, bool) {
        let mut slot = self.refill.lock();
        if let Some(flight) = &*slot {
            return (flight.clone(), false);
        }
        let (flight, landing) = Flight::start();
        *slot = Some(flight.clone());
        drop(slot);
        let (this, task) = (self.clone(), cx.detached());
        cx.spawn(async move {
            let done = Refill { alloc: &this, cx: &task, kind }.run(need).await;
            *this.refill.lock() = None;
            // Who waits for the end may close the file then.
            drop(this);
            landing.land(done);
        });
        (flight, true)
    }

    /// Reads blocks, some at once.
    pub(super) async fn load(&self, cx: &Cx, wanted: Vec<(u64, HostOffset)>) -> IoResult<Loaded> {
        let loaded: Mutex<Loaded> = Mutex::default();
        let file = self.file.node();
        let cluster = self.layout.cluster_size() as usize;
        let reads = wanted.into_iter().map(|(index, offset)| {
            let (file, loaded) = (&file, &loaded);
            async move {
                let bufs = Buffers::alloc(cluster, 4096);
                read_at(cx, &**file, offset, &bufs, Class::Guest).await?;
                loaded.lock().push((index, offset, bufs.to_vec()));
                Ok(())
            }
        });
        join_bounded(reads, WIDTH).await?;
        Ok(loaded.into_inner())
    }

    /// Loads the blocks for `ranges`, then runs `body` with all of them in RAM. It may be called again if one was lost meanwhile, so
    /// it changes nothing when it answers `None`.
    pub(super) async fn with_blocks<T>(
        &self,
        cx: &Cx,
        ranges: &[ByteRange],
        mut body: impl FnMut(&mut State) -> T,
    ) -> IoResult<T> {
        loop {
            let mut missing = Vec::new();
            {
                let state = self.state.lock();
                for range in ranges {
                    missing.extend(state.counts.missing(*range).map_err(|e| e.as_io())?);
                }
            }
            missing.sort_unstable();
            missing.dedup();
            let loaded = self.load(cx, missing).await?;
            let mut state = self.state.lock();
            for (index, offset, bytes) in loaded {
                state.counts.install(index, offset, bytes);
            }
            let complete = ranges.iter().all(|r| matches!(state.counts.missing(*r), Ok(m) if m.is_empty()));
            if complete {
                let out = body(&mut state);
                state.counts.trim();
                return Ok(out);
            }
        }
    }
}

struct Refill<'a> {
    alloc: &'a Arc<Allocator>,
    cx: &'a Cx,
    kind: Kind,
}

impl Refill<'_> {
    async fn run(&self, need: u64) -> IoResult {
        self.survey().await?;
        if self.alloc.refills.load(Ordering::Relaxed) == SEARCH_AFTER {
            self.search().await?;
        }
        let want = {
            let mut state = self.alloc.state.lock();
            let runs = state.runs(self.kind);
            let want = runs.next_len().max(need);
            runs.grow();
            want
        };
        if self.inside(want).await? {
            // Perhaps less than is needed; who waits comes again.
            return Ok(());
        }
        match self.at_end(want, true).await {
            Err(e) if is_full(e) => {
                // Not even short of the wish: the last scraps inside the file, then the exact need at its end.
                self.alloc.state.lock().runs(self.kind).shrink(self.alloc.layout.cluster_size());
                self.search().await?;
                if self.scraps(need).await? {
                    return Ok(());
                }
                self.at_end(need, false).await
            }
            result => result,
        }
    }

    /// Once: where the used part of a node of fixed length ends, and what is free in the last block.
    async fn survey(&self) -> IoResult {
        let (alloc, cx) = (self.alloc, self.cx);
        if alloc.state.lock().surveyed {
            return Ok(());
        }
        let length = alloc.file.node().limits().size;
        let mut blocks: Vec<u64> = alloc.state.lock().counts.block_indices().collect();
        let span = alloc.layout.refblock_span();
        let mut used_end = None;
        // From the back to the first block that counts anything.
        while let Some(index) = blocks.pop() {
            let range = ByteRange { offset: index * span, len: alloc.layout.cluster_size() };
            used_end = alloc.with_blocks(cx, &[range], |s| s.counts.used_end_of_block(index)).await?;
            if let Some(used) = used_end {
                let free = alloc
                    .with_blocks(cx, &[range], |s| s.counts.free_in_block(index, used.min(length)))
                    .await?;
                let mut state = alloc.state.lock();
                free.into_iter().for_each(|r| state.space.insert(r));
                break;
            }
        }
        let mut state = alloc.state.lock();
        // A file that can grow is longer than what is used where a writer died: that tail is space inside the file.
        let used = used_end.unwrap_or(alloc.layout.cluster_size());
        let end = align_down(length, alloc.layout.cluster_size());
        if used < end {
            state.end = used.max(alloc.layout.cluster_size());
        }
        state.surveyed = true;
        Ok(())
    }

    /// Once, when it is worth it: what is free in all other blocks.
    async fn search(&self) -> IoResult {
        let (alloc, cx) = (self.alloc, self.cx);
        let (blocks, end): (Vec<u64>, u64) = {
            let mut state = alloc.state.lock();
            if std::mem::replace(&mut state.searched, true) {
                return Ok(());
            }
            (state.counts.block_indices().collect(), state.end)
        };
        let end = end.min(alloc.file.node().limits().size);
        for index in blocks {
            let first = index * alloc.layout.refblock_span();
            if first >= end {
                break;
            }
            let range = ByteRange { offset: first, len: alloc.layout.cluster_size() };
            alloc
                .with_blocks(cx, &[range], |state| {
                    let free = state.counts.free_in_block(index, end);
                    free.into_iter().for_each(|r| state.space.insert(r));
                })
                .await?;
        }
        Ok(())
    }

    /// A run out of the index, if that is worth it.
    async fn inside(&self, want: u64) -> IoResult<bool> {
        let range = {
            let mut state = self.alloc.state.lock();
            let longest = state.space.longest();
            // Small pieces only if there are many of them.
            let worth = longest >= want.min(WORTHWHILE) || state.space.total() > state.end / 8;
            if longest == 0 || !worth {
                return Ok(false);
            }
            state.space.take(want)
        };
        match range {
            Some(range) => self.use_free(range).await,
            None => Ok(false),
        }
    }

    /// Anything out of the index.
    async fn scraps(&self, need: u64) -> IoResult<bool> {
        let range = self.alloc.state.lock().space.take(need);
        match range {
            Some(range) => self.use_free(range).await,
            None => Ok(false),
        }
    }

    /// Makes a run of a range inside the file that the index had. False if it turns out not to be free.
    async fn use_free(&self, range: ByteRange) -> IoResult<bool> {
        let prepared = self.zero(range).await;
        let zeroed = match prepared {
            Ok(zeroed) => zeroed,
            Err(e) => {
                self.alloc.state.lock().space.insert(range);
                return Err(e);
            }
        };
        let counted =
            self.alloc.with_blocks(self.cx, &[range], |state| self.count(state, range, zeroed)).await;
        match counted {
            Ok(result) => result.map(|()| true),
            Err(e) => {
                self.alloc.state.lock().space.insert(range);
                Err(e)
            }
        }
    }

    fn count(&self, state: &mut State, range: ByteRange, zeroed: bool) -> IoResult {
        self.check(state, range)?;
        let cluster = self.alloc.layout.cluster_size();
        let free =
            (range.offset..range.end()).step_by(cluster as usize).all(|at| state.counts.get(at) == Ok(0));
        if !free {
            return Err(IoError::os(libc::EIO));
        }
        state.counts.change(range, false)?;
        self.add_both(state, range, 0, zeroed);
        Ok(())
    }

    /// Adds a run, of which `other` bytes (at its start) go to the other kind.
    fn add_both(&self, state: &mut State, run: ByteRange, other: u64, zeroed: bool) {
        // The next cut to begin copies the counts after this section, and flushes the zeroing, which has ended.
        let cut = self.alloc.cuts_begun() + 1;
        let other = other.min(run.len.saturating_sub(self.alloc.layout.cluster_size()));
        let (first, rest) = (
            ByteRange { offset: run.offset, len: other },
            ByteRange { offset: run.offset + other, len: run.len - other },
        );
        if other > 0 {
            state.runs(self.kind.other()).add(Run { rest: first, zeroed, cut });
            state.runs(self.kind.other()).grow();
        }
        state.runs(self.kind).add(Run { rest, zeroed, cut });
        self.alloc.refills.fetch_add(1, Ordering::Relaxed);
    }

    /// A run behind everything that is in use.
    async fn at_end(&self, want: u64, with_other: bool) -> IoResult {
        let alloc = self.alloc;
        let file = alloc.file.node();
        let mut want = want;
        for _ in 0..ROUNDS_MAX {
            let (at, plan, other) = {
                let state = alloc.state.lock();
                // At the start both kinds are needed: one piece for both.
                let other = if with_other { state.other_wish(self.kind) } else { 0 };
                (state.end, state.counts.plan_growth(state.end, want + other).map_err(|e| e.as_io())?, other)
            };
            // What is counted there already (leaks of a writer that died) is passed over.
            let free =
                alloc.with_blocks(self.cx, &[plan.all], |s| s.counts.free_run(at, plan.all.end())).await??;
            match free {
                None => {
                    alloc.state.lock().end = plan.all.end();
                    continue;
                }
                Some(free) if free.offset > at => {
                    alloc.state.lock().end = free.offset;
                    continue;
                }
                Some(free) if free.len < plan.all.len => {
                    let cluster = alloc.layout.cluster_size();
                    let less = want.saturating_sub(plan.all.len - free.len).max(cluster);
                    if less == want {
                        alloc.state.lock().end = free.end();
                    }
                    want = less;
                    continue;
                }
                Some(_) => {}
            }
            self.check(&alloc.state.lock(), plan.all)?;
            let zeroed = self.cover(&*file, plan.all).await?;
            let grown = alloc
                .with_blocks(self.cx, &[plan.all], |state| {
                    let old = state.counts.grow(&plan)?;
                    state.end = plan.all.end();
                    self.add_both(state, plan.data, other, zeroed);
                    Ok::<_, IoError>(old)
                })
                .await??;
            if let Some(old) = grown {
                alloc.unlink(old, super::pending::UnlinkedKind::Clusters, false);
            }
            return Ok(());
        }
        Err(IoError::os(libc::EIO))
    }

    /// Sees to it that the file reaches over `range`. Whether the range reads as zeros.
    async fn cover(&self, file: &dyn Node, range: ByteRange) -> IoResult<bool> {
        let length = file.limits().size;
        if range.end() > length {
            match file.resize(self.cx, range.end(), Growth::Reserved).await {
                Ok(()) => {}
                Err(e) if e.errno == libc::ENOTSUP => return Err(IoError::os(libc::ENOSPC)),
                Err(e) => return Err(e),
            }
        }
        let inside = length.saturating_sub(range.offset).min(range.len);
        self.zero(ByteRange { offset: range.offset, len: inside }).await
    }

    /// Zeroes a range inside the file, if that is cheap; whether it has been done.
    async fn zero(&self, range: ByteRange) -> IoResult<bool> {
        if range.is_empty() {
            return Ok(true);
        }
        let file = self.alloc.file.node();
        let req = Request::write_zeroes(range, Flags::NO_FALLBACK);
        match self.cx.run(&*file, req).await {
            Ok(()) => Ok(true),
            Err(e) if e.errno == libc::ENOTSUP => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Refuses a range that holds metadata: a refcount of 0 there is corruption.
    fn check(&self, state: &State, range: ByteRange) -> IoResult {
        let alloc = self.alloc;
        let cluster = alloc.layout.cluster_size();
        let found = if range.offset < cluster {
            Some("header")
        } else if state.counts.table().overlaps(range) {
            Some("refcount table")
        } else if state.counts.has_block_in(range) {
            Some("refcount block")
        } else {
            alloc.metadata.at(range)
        };
        match found {
            None => Ok(()),
            Some(what) => {
                let text = format!("{what} in {} bytes at {:#x} is not counted", range.len, range.offset);
                self.cx.env().log(0, "qcow2", &text);
                Err(Error::new(libc::EIO, crate::error::Code::Io, text).as_io())
            }
        }
    }
}

fn is_full(e: IoError) -> bool {
    matches!(e.errno, libc::ENOSPC | libc::EDQUOT | libc::EFBIG)
}

/// Refills after which all of the image is searched for free space: it is being written in earnest.
const SEARCH_AFTER: u64 = 8;
/// An extent of this length is taken before the file grows.
const WORTHWHILE: u64 = 256 << 10;
