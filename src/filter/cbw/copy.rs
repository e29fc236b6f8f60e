//! Old data from the source to the target.

use super::point::{Point, Transit};
use super::policy::Failure;
use super::state::State;
use crate::error::{Code, IoError, IoResult};
use crate::events::Side;
use crate::inflight::Entry;
use crate::node::Reservation;
use crate::queue::{Cx, IoCell};
use crate::request::{Buffers, Class, Flags, Op, Request};
use crate::sync::Arc;
use crate::sync::atomic::Ordering::Relaxed;
use crate::units::ByteRange;
use std::ops::Range;

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

/// What a background copy failed at. The granules are as they were, or their data waits to be written again: call [`Point::copy`] again to retry.
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

/// Granules that this task copies. Dropped without an end (an error, a panic, a lost future) they are NEEDED again, which is safe because every writer of
/// them is still waiting for the entry (S72); the entry goes last and wakes the waiters.
pub(super) struct Claim {
    point: Arc<Point>,
    pub(super) run: Range<u64>,
    open: bool,
    _entry: Entry,
}

impl Claim {
    /// Claims the start of a run of NEEDED granules; `None` if others were faster.
    pub(super) fn take(point: &Arc<Point>, run: &Range<u64>) -> Option<Self> {
        let entry = point.fence.copy(point.bytes(run));
        let taken =
            run.clone().take_while(|g| point.states.change(*g, State::Needed, State::Reading)).count() as u64;
        (taken > 0).then(|| Self {
            point: point.clone(),
            run: run.start..run.start + taken,
            open: true,
            _entry: entry,
        })
    }

    /// The old data is safe: writers may go on. Granules that were lost meanwhile stay lost (S34).
    fn preserved(mut self) {
        self.open = false;
        for g in self.run.clone() {
            self.point.settle(g, State::Reading, State::Preserved);
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.open {
            for g in self.run.clone() {
                self.point.states.change(g, State::Reading, State::Needed);
            }
        }
    }
}

impl Point {
    /// Starts the copy of a claim as a task of its own; the cell gets the result. `known_zero`: the source says that the range reads as zeros.
    pub(super) fn spawn_copy(
        self: &Arc<Self>,
        cx: &Cx,
        claim: Claim,
        memory: Option<Reservation>,
    ) -> Arc<IoCell> {
        let cell: Arc<IoCell> = Arc::default();
        let (point, cx, there) = (self.clone(), cx.detached(), Told(cell.clone()));
        cx.clone().spawn(async move {
            let result = point.copy_for_guest(&cx, claim, memory).await;
            there.0.complete(result);
        });
        cell
    }

    async fn copy_for_guest(
        self: &Arc<Self>,
        cx: &Cx,
        claim: Claim,
        memory: Option<Reservation>,
    ) -> IoResult {
        let run = claim.run.clone();
        let range = self.bytes(&run);
        let Some(mut memory) = memory else {
            // Known to be zero: nothing to read.
            return match self.write_zeros(cx, range, Class::Copy).await {
                Ok(()) => {
                    claim.preserved();
                    Ok(())
                }
                Err(e) => self.copy_failed(Failure::Write, Op::WriteZeroes, claim, e),
            };
        };
        let bufs = memory.take(range.len);
        let begun = cx.now();
        let file = self.file.node();
        let read = cx.run(&*file, Request::read(range.offset, bufs.clone()).class(Class::Copy)).await;
        self.counters.read.record(cx.now().since(begun).as_nanos() as u64);
        if let Err(e) = read {
            return self.copy_failed(Failure::Read, Op::Read, claim, e);
        }
        self.counters.copied_bytes.fetch_add(range.len, Relaxed);
        if self.is_passive() {
            return Ok(());
        }
        let begun = cx.now();
        for (part, zero) in self.runs_by_content(&run, &bufs) {
            let at = self.bytes(&part);
            let written = if zero {
                self.write_zeros(cx, at, Class::Copy).await
            } else {
                let data = bufs.slice((at.offset - range.offset) as usize, at.len as usize);
                let target = self.target.node();
                cx.run(&*target, Request::write(at.offset, data).class(Class::Copy)).await
            };
            if let Err(e) = written {
                let op = if zero { Op::WriteZeroes } else { Op::Write };
                return self.copy_failed(Failure::Write, op, claim, e);
            }
        }
        self.counters.write.record(cx.now().since(begun).as_nanos() as u64);
        claim.preserved();
        Ok(())
    }

    fn copy_failed(&self, failure: Failure, op: Op, claim: Claim, e: IoError) -> IoResult {
        // A granule that is not READING any more was given up by a timeout: its guest has gone.
        let held = claim.run.clone().all(|g| self.states.get(g) == State::Reading);
        self.fail(failure, held, op, &claim.run.clone(), e)
    }

    async fn write_zeros(&self, cx: &Cx, range: ByteRange, class: Class) -> IoResult {
        self.counters.zero_bytes.fetch_add(range.len, Relaxed);
        let target = self.target.node();
        cx.run(&*target, Request::write_zeroes(range, Flags::MAY_UNMAP).class(class)).await
    }

    /// The run cut where granules of zeros and granules of data meet (S11).
    fn runs_by_content(&self, run: &Range<u64>, bufs: &Buffers) -> Vec<(Range<u64>, bool)> {
        let start = self.bytes(run).offset;
        let is_zero = |g: u64| {
            let at = self.bytes(&(g..g + 1));
            bufs.slice((at.offset - start) as usize, at.len as usize).is_zero()
        };
        let mut out: Vec<(Range<u64>, bool)> = Vec::new();
        for g in run.clone() {
            let zero = is_zero(g);
            match out.last_mut() {
                Some((r, z)) if *z == zero => r.end = g + 1,
                _ => out.push((g..g + 1, zero)),
            }
        }
        out
    }

    /// Copies what is still needed of `range` in the background, through `memory` (at least as long as the range, kept until the target has acknowledged: S53).
    /// Guests that meet a granule of it go on when its *read* is done (S7). Data that a former call could not write is tried again first.
    pub(super) async fn copy(
        self: &Arc<Self>,
        cx: &Cx,
        range: ByteRange,
        memory: &Buffers,
        class: Class,
    ) -> Result<CopyOutcome, CopyError> {
        assert!(memory.len() as u64 >= range.len, "memory for the whole range");
        let mut outcome = CopyOutcome::default();
        self.retry(cx, range, class).await?;
        let all = self.granules(range);
        let mut at = all.start;
        while at < all.end {
            if self.is_passive() {
                return Err(self.over(range));
            }
            match self.states.get(at) {
                State::Needed => {}
                State::Reading => {
                    let here = self.bytes(&(at..at + 1));
                    self.fence.copies_ended(here).await;
                    continue;
                }
                _ => {
                    outcome.skipped += self.bytes(&(at..at + 1)).len;
                    at += 1;
                    continue;
                }
            }
            let max = all.end - at;
            let Some(run) = self.states.needed_run(at..all.end, max) else { continue };
            let Some(claim) = Claim::take(self, &run) else { continue };
            at = claim.run.end;
            self.copy_claim(cx, claim, range, memory, class, &mut outcome).await?;
        }
        Ok(outcome)
    }

    async fn copy_claim(
        self: &Arc<Self>,
        cx: &Cx,
        claim: Claim,
        whole: ByteRange,
        memory: &Buffers,
        class: Class,
        outcome: &mut CopyOutcome,
    ) -> Result<(), CopyError> {
        let run = claim.run.clone();
        let range = self.bytes(&run);
        let bufs = memory.slice(range.offset.saturating_sub(whole.offset) as usize, range.len as usize);
        let file = self.file.node();
        let read = cx.run(&*file, Request::read(range.offset, bufs.clone()).class(class)).await;
        if let Err(error) = read {
            return Err(CopyError { error, side: Side::Source, op: Op::Read, range });
        }
        if self.is_passive() {
            return Err(self.over(range));
        }
        self.counters.background_bytes.fetch_add(range.len, Relaxed);
        let parts = self.runs_by_content(&run, &bufs);
        for (part, zero) in &parts {
            let at = self.bytes(part);
            let data = if *zero {
                zeros(at.len)
            } else {
                bufs.slice((at.offset - range.offset) as usize, at.len as usize)
            };
            // Readable before the state says so: S15 looks here first.
            self.transit.lock().insert(at.offset, Transit { bufs: data, failed: false });
            if *zero {
                outcome.zero += at.len;
            } else {
                outcome.copied += at.len;
            }
        }
        claim.preserved();
        let mut first_error = None;
        for (part, zero) in parts {
            let at = self.bytes(&part);
            let written = if zero {
                self.write_zeros(cx, at, class).await
            } else {
                self.write_transit(cx, at, class).await
            };
            let failed = self.end_transit(at, written, zero);
            first_error = first_error.or(failed);
        }
        first_error.map_or(Ok(()), Err)
    }

    async fn write_transit(&self, cx: &Cx, at: ByteRange, class: Class) -> IoResult {
        let Some(t) = self.transit.lock().get(&at.offset).cloned() else { return Ok(()) };
        let target = self.target.node();
        cx.run(&*target, Request::write(at.offset, t.bufs).class(class)).await
    }

    fn end_transit(&self, at: ByteRange, written: IoResult, zero: bool) -> Option<CopyError> {
        let mut transit = self.transit.lock();
        match written {
            Ok(()) => {
                transit.remove(&at.offset);
                None
            }
            Err(error) => {
                if let Some(t) = transit.get_mut(&at.offset) {
                    t.failed = true;
                }
                let op = if zero { Op::WriteZeroes } else { Op::Write };
                Some(CopyError { error, side: Side::Target, op, range: at })
            }
        }
    }

    /// Writes again what could not be written before.
    async fn retry(&self, cx: &Cx, range: ByteRange, class: Class) -> Result<(), CopyError> {
        loop {
            let next = {
                let transit = self.transit.lock();
                let found = transit.range(range.offset..range.end()).find(|(_, t)| t.failed);
                found.map(|(at, t)| ByteRange { offset: *at, len: t.bufs.len() as u64 })
            };
            let Some(at) = next else { return Ok(()) };
            let written = self.write_transit(cx, at, class).await;
            if let Some(e) = self.end_transit(at, written, false) {
                return Err(e);
            }
        }
    }

    pub(super) fn over(&self, range: ByteRange) -> CopyError {
        let error = self.broken().map_or(IoError::new(libc::ECANCELED, Code::SnapshotBroken), |r| r.error);
        CopyError { error, side: Side::None, op: Op::Read, range }
    }
}

/// `len` readable zeros, in one small buffer used again and again.
fn zeros(len: u64) -> Buffers {
    const PIECE: usize = 64 << 10;
    let piece = Buffers::alloc(PIECE.min(len as usize), 4096);
    let mut out = Buffers::new();
    let mut left = len as usize;
    while left > 0 {
        let n = left.min(PIECE);
        out.append(piece.slice(0, n));
        left -= n;
    }
    out
}

/// Tells the waiter also when the task is dropped or panics.
struct Told(Arc<IoCell>);

impl Drop for Told {
    fn drop(&mut self) {
        // Ignored if the task has told its result.
        self.0.complete(Err(IoError::panicked()));
    }
}
