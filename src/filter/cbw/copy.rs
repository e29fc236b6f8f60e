//! Old data from the source to the target.

use super::options::{LossScope, OnCbwError};
use super::point::{Copying, Point};
use super::policy::Failure;
use super::state::{Granules, State, StateSet};
use super::transit::Transit;
use crate::error::{IoError, IoResult};
use crate::events::Side;
use crate::inflight::Entry;
use crate::node::Reservation;
use crate::queue::Cx;
use crate::request::{Buffers, Class, Flags, Op, Request};
use crate::sync::Arc;
use crate::sync::atomic::Ordering::Relaxed;
use crate::units::ByteRange;
use smallvec::{SmallVec, smallvec};
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll};

/// What a background copy has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyOutcome {
    /// Bytes read from the source and written to the target.
    pub copied: u64,
    /// Bytes that were zero and moved no payload.
    pub zero: u64,
    /// Bytes that needed no copy any more.
    pub skipped: u64,
}

/// What a background copy failed at. The granules are as they were, or their data waits to be written again: call [`super::CbwNode::copy`] again to retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyError {
    /// errno and code.
    pub error: IoError,
    /// Source or target; `None` if the snapshot is broken or over.
    pub side: Side,
    /// What was tried.
    pub op: Op,
    /// Where, on the disk.
    pub range: ByteRange,
}

/// What a claim has read, in order: data, or `None` for zeros.
type Parts = SmallVec<[(ByteRange, Option<Buffers>); 1]>;

/// A failure of a copy, before anybody has decided what it means.
type Failed = (Failure, Op, IoError);

/// Granules that this task copies. Dropped without an end (an error, a panic, a lost future) they are NEEDED again, which is safe because every writer of
/// them is still waiting (S72); the entry goes last and wakes the waiters.
pub(super) struct Claim {
    point: Arc<Point>,
    pub(super) run: Granules,
    open: bool,
    _copying: Copying,
    _entry: Entry,
}

impl Claim {
    /// Claims the start of a run of NEEDED granules; `None` if others were faster.
    pub(super) fn take(point: &Arc<Point>, run: &Granules) -> Option<Self> {
        let entry = point.fence.copy(point.geo.bytes(run));
        let taken = run.clone().take_while(|g| point.states.claim(*g)).count() as u64;
        (taken > 0).then(|| Self {
            point: point.clone(),
            run: run.start..run.start + taken,
            open: true,
            _copying: point.copying(),
            _entry: entry,
        })
    }

    /// Whether a granule is still to be copied by this claim: not given up meanwhile.
    fn is_wanted(&self, granule: u64) -> bool {
        self.point.states.get(granule).state() == State::Reading
    }

    /// The old data is safe: writers may go on. Granules that were lost meanwhile stay lost (S34).
    fn preserved(mut self) {
        self.open = false;
        for g in self.run.clone() {
            self.point.change(g, READING, State::Preserved);
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.open {
            for g in self.run.clone() {
                self.point.change(g, READING, State::Needed);
            }
        }
    }
}

const READING: StateSet = StateSet::of(&[State::Reading]);

/// The copy of a claim for a guest. It runs in the guest's own task; if that one gives up first (timeout, cancel, the snapshot is over), the copy goes on as
/// a task of its own, because others may wait for it (S8). A panic in it is a failure of the backup, not of the guest (C17).
pub(super) struct Running {
    point: Arc<Point>,
    cx: Cx,
    run: Granules,
    copy: Option<Pin<Box<dyn Future<Output = IoResult> + Send>>>,
}

impl Running {
    /// Starts nothing before the first poll.
    pub(super) fn new(cx: &Cx, claim: Claim, memory: Option<Reservation>) -> Self {
        let (point, run) = (claim.point.clone(), claim.run.clone());
        let cx = cx.cancelled_by(&point.cancel);
        let (there, own) = (point.clone(), cx.clone());
        let copy = Box::pin(async move { there.copy_for_guest(&own, claim, memory).await });
        Self { point, cx, run, copy: Some(copy) }
    }
}

impl Future for Running {
    type Output = IoResult;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<IoResult> {
        let this = self.get_mut();
        let copy = this.copy.as_mut().expect("polled after its end");
        match catch_unwind(AssertUnwindSafe(|| copy.as_mut().poll(context))) {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(result)) => {
                this.copy = None;
                Poll::Ready(result)
            }
            Err(_) => {
                // The verdict before the claim goes: others must not begin the copy of a snapshot that is about to break.
                let result = this.point.fail(Failure::Panic, true, Op::Read, &this.run, IoError::panicked());
                let copy = this.copy.take();
                let dropped = catch_unwind(AssertUnwindSafe(|| drop(copy)));
                let text = if dropped.is_err() { "a copy panicked, and again" } else { "a copy panicked" };
                this.point.env.log(0, "cbw", text);
                Poll::Ready(result)
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let Some(copy) = self.copy.take() else { return };
        let late = Late::new(&self.point);
        self.cx.spawn(async move {
            let _late = late;
            // Whatever it ends with concerns nobody any more.
            let _ = copy.await;
        });
    }
}

/// Counts a copy whose guest has gone.
struct Late(Arc<Point>);

impl Late {
    fn new(point: &Arc<Point>) -> Self {
        point.counters.late.fetch_add(1, Relaxed);
        Self(point.clone())
    }
}

impl Drop for Late {
    fn drop(&mut self) {
        self.0.counters.late.fetch_sub(1, Relaxed);
    }
}

impl Point {
    /// Copies a claim and decides what a failure means.
    async fn copy_for_guest(
        self: &Arc<Self>,
        cx: &Cx,
        claim: Claim,
        memory: Option<Reservation>,
    ) -> IoResult {
        let run = claim.run.clone();
        match self.copy_claim(cx, &claim, memory).await {
            Ok(()) => {
                claim.preserved();
                Ok(())
            }
            // It was told to stop: nobody needs the old data, and the guest goes on.
            Err(_) if self.is_passive() => Ok(()),
            // The verdict before the claim goes, as above. Its granules are READING, so their writers are held; others have been given up.
            Err((failure, op, error)) => self.fail(failure, true, op, &run, error),
        }
    }

    /// Copies a claim that no guest waits for yet; a failure is left to whoever meets the granules.
    pub(super) async fn copy_ahead(self: &Arc<Self>, cx: &Cx, claim: Claim, memory: Reservation) {
        let cx = cx.cancelled_by(&self.cancel);
        if self.copy_claim(&cx, &claim, Some(memory)).await.is_ok() {
            claim.preserved();
        }
    }

    /// Reads and writes the granules of a claim. Without memory the source is known to read as zeros.
    async fn copy_claim(
        self: &Arc<Self>,
        cx: &Cx,
        claim: &Claim,
        memory: Option<Reservation>,
    ) -> Result<(), Failed> {
        let range = self.geo.bytes(&claim.run);
        let Some(mut memory) = memory else {
            return self.write_part(cx, range, None, Class::Copy).await;
        };
        let bufs = memory.take(range.len);
        let begun = cx.now();
        self.read_claim(cx, claim, &bufs).await?;
        let read = cx.now();
        self.counters.read.record(read.since(begun).as_nanos() as u64);
        self.counters.copied_bytes.fetch_add(range.len, Relaxed);
        if self.is_passive() {
            return Ok(());
        }
        let parts = self.parts(claim, &bufs);
        // Memory of granules that are zero goes back now.
        drop(bufs);
        for (at, data) in parts {
            self.write_part(cx, at, data, Class::Copy).await?;
        }
        self.counters.write.record(cx.now().since(read).as_nanos() as u64);
        Ok(())
    }

    /// Reads the granules of a claim in one piece. Where an error costs only the range it is in, a failed read is tried again granule by granule, so
    /// that one bad sector loses one granule (S50).
    async fn read_claim(&self, cx: &Cx, claim: &Claim, bufs: &Buffers) -> Result<(), Failed> {
        let range = self.geo.bytes(&claim.run);
        let file = self.file.node();
        let Err(error) = cx.run(&*file, Request::read(range.offset, bufs.clone()).class(Class::Copy)).await
        else {
            return Ok(());
        };
        let single = claim.run.end - claim.run.start == 1;
        let lose_range =
            self.live.loss_scope() == LossScope::Range && self.live.on_error() == OnCbwError::BreakSnapshot;
        if single || self.is_passive() || !lose_range {
            return Err((Failure::Read, Op::Read, error));
        }
        for g in claim.run.clone() {
            let one = g..g + 1;
            let at = self.geo.bytes(&one);
            let part = bufs.slice((at.offset - range.offset) as usize, at.len as usize);
            if let Err(error) = cx.run(&*file, Request::read(at.offset, part).class(Class::Copy)).await {
                self.fail(Failure::Read, true, Op::Read, &one, error)
                    .map_err(|_| (Failure::Read, Op::Read, error))?;
            }
        }
        Ok(())
    }

    async fn write_part(
        &self,
        cx: &Cx,
        at: ByteRange,
        data: Option<Buffers>,
        class: Class,
    ) -> Result<(), Failed> {
        let target = self.target.node();
        match data {
            Some(data) => {
                let written = cx.run(&*target, Request::write(at.offset, data).class(class)).await;
                written.map_err(|e| (Failure::Write, Op::Write, e))
            }
            None => {
                self.counters.zero_bytes.fetch_add(at.len, Relaxed);
                if self.target_is_zero {
                    return Ok(());
                }
                let zeroes = Request::write_zeroes(at, Flags::MAY_UNMAP).class(class);
                let written = cx.run(&*target, zeroes).await;
                written.map_err(|e| (Failure::Write, Op::WriteZeroes, e))
            }
        }
    }

    /// The wanted granules of a claim as runs of data and runs of zeros (S11); usually one.
    fn parts(&self, claim: &Claim, bufs: &Buffers) -> Parts {
        let start = self.geo.bytes(&claim.run).offset;
        let slice = |at: ByteRange| bufs.slice((at.offset - start) as usize, at.len as usize);
        let mut runs: SmallVec<[(ByteRange, bool); 2]> = SmallVec::new();
        for g in claim.run.clone().filter(|g| claim.is_wanted(*g)) {
            let at = self.geo.bytes(&(g..g + 1));
            let zero = slice(at).is_zero();
            match runs.last_mut() {
                Some((r, z)) if *z == zero && r.end() == at.offset => r.len += at.len,
                _ => runs.push((at, zero)),
            }
        }
        runs.into_iter().map(|(at, zero)| (at, (!zero).then(|| slice(at)))).collect()
    }

    /// Copies what is still needed of `range` in the background, through `memory`, which is at least as long as the range and kept until the target has
    /// acknowledged (S53), or empty if the source is known to read as zeros there or there is only old work to be done again. Guests that meet a granule of
    /// it go on when its *read* is done (S7). Data that a former call could not write is tried again first.
    pub(super) async fn copy(
        self: &Arc<Self>,
        cx: &Cx,
        range: ByteRange,
        memory: &Buffers,
        class: Class,
    ) -> Result<CopyOutcome, CopyError> {
        assert!(memory.is_empty() || memory.len() as u64 >= range.len, "memory for the whole range");
        let mut outcome = CopyOutcome::default();
        while let Some(t) = self.transits.retry(range) {
            let (copied, zero) = if t.data.is_some() { (t.range.len, 0) } else { (0, t.range.len) };
            self.write_transit(cx, t, class).await?;
            outcome.copied += copied;
            outcome.zero += zero;
        }
        let all = self.geo.touched(range);
        let mut at = all.start;
        while at < all.end {
            if self.is_passive() {
                return Err(self.over(range));
            }
            match self.states.get(at).state() {
                State::Needed => {
                    let run = self.states.run_seen(at..all.end, |s| s.state() == State::Needed);
                    if let Some(claim) = Claim::take(self, &run) {
                        at = claim.run.end;
                        self.copy_transit(cx, claim, range, memory, class, &mut outcome).await?;
                    }
                }
                State::Reading => {
                    let run = at..at + 1;
                    let ended = self.fence.copies_ended(self.geo.bytes(&run));
                    let cancelled = |error| CopyError { error, side: Side::None, op: Op::Read, range };
                    self.wait_for_others(cx, None, || self.is_settled(&run), ended)
                        .await
                        .map_err(cancelled)?;
                }
                _ => {
                    outcome.skipped += self.geo.bytes(&(at..at + 1)).len;
                    at += 1;
                }
            }
        }
        Ok(outcome)
    }

    async fn copy_transit(
        self: &Arc<Self>,
        cx: &Cx,
        claim: Claim,
        whole: ByteRange,
        memory: &Buffers,
        class: Class,
        outcome: &mut CopyOutcome,
    ) -> Result<(), CopyError> {
        let range = self.geo.bytes(&claim.run);
        let parts = if memory.is_empty() {
            smallvec![(range, None)]
        } else {
            let bufs =
                memory.slice((range.offset - range.offset.min(whole.offset)) as usize, range.len as usize);
            let file = self.file.node();
            // A guest may have to wait for this read, so it is never idle work (S39).
            let read = Request::read(range.offset, bufs.clone()).class(class.min(Class::Background));
            if let Err(error) = cx.run(&*file, read).await {
                return Err(CopyError { error, side: Side::Source, op: Op::Read, range });
            }
            self.counters.background_bytes.fetch_add(range.len, Relaxed);
            self.parts(&claim, &bufs)
        };
        if self.is_passive() {
            return Err(self.over(range));
        }
        // Readable before the state says so: a reader that meets PRESERVED looks here first (S15).
        for (at, data) in &parts {
            self.transits.add(Transit { range: *at, data: data.clone() });
        }
        let _copying = self.copying();
        claim.preserved();
        let mut first_error = Ok(());
        for (at, data) in parts {
            if data.is_some() {
                outcome.copied += at.len;
            } else {
                outcome.zero += at.len;
            }
            let written = self.write_transit(cx, Transit { range: at, data }, class).await;
            first_error = first_error.and(written);
        }
        first_error
    }

    /// Writes a piece that guests no longer wait for.
    async fn write_transit(&self, cx: &Cx, t: Transit, class: Class) -> Result<(), CopyError> {
        /// Whoever drops the write half-way leaves the piece to be tried again.
        struct Unfinished<'a>(&'a Point, u64);
        impl Drop for Unfinished<'_> {
            fn drop(&mut self) {
                self.0.transits.failed(self.1);
            }
        }
        let unfinished = Unfinished(self, t.range.offset);
        let range = t.range;
        match self.write_part(cx, range, t.data, class).await {
            Ok(()) => {
                std::mem::forget(unfinished);
                self.transits.done(range.offset);
                Ok(())
            }
            Err((_, op, error)) => Err(CopyError { error, side: Side::Target, op, range }),
        }
    }

    pub(super) fn over(&self, range: ByteRange) -> CopyError {
        CopyError { error: self.over_error(), side: Side::None, op: Op::Read, range }
    }
}
