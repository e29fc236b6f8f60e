//! What a guest's write, write-zeroes or discard does before it goes down.

use super::copy::Claim;
use super::point::{Point, Waited};
use super::policy::Failure;
use super::state::State;
use crate::error::{IoError, IoResult};
use crate::limits::BATCH_LEN;
use crate::node::Reservation;
use crate::queue::Cx;
use crate::request::{Class, Op, Request};
use crate::rt::Instant;
use crate::sync::Arc;
use crate::sync::atomic::Ordering::Relaxed;
use crate::units::ByteRange;
use std::ops::Range;

/// Most granules that are known to be zero and claimed at once, in bytes.
const ZERO_BATCH: u64 = 64 << 20;

/// What the granules of a batch are at, from one look at each. A granule that falls back from READING to NEEDED between two looks would be seen as neither.
#[derive(Debug, Default, PartialEq, Eq)]
struct Survey {
    needed: Option<Range<u64>>,
    reading: Option<u64>,
    unclear: bool,
}

impl Point {
    /// Carries out a guest's changing request: all old data first (S10), then the request itself.
    pub(super) async fn guest(self: &Arc<Self>, cx: &Cx, req: Request) -> IoResult {
        if req.op == Op::Discard && self.config.hold_discards && !self.is_passive() {
            return Ok(());
        }
        let arrived = cx.now();
        let mut counted = false;
        let deadline = self.config.timeout.map(|t| arrived.after(t));
        let all = self.granules(req.range);
        let mut at = all.start;
        while at < all.end && !self.is_passive() {
            let (batch, zero) = self.batch(cx, at..all.end, req.range.len).await?;
            self.protect(cx, &batch, zero, deadline, &mut counted).await?;
            at = batch.end;
        }
        if counted {
            self.counters.guest_bytes.fetch_add(req.range.len, Relaxed);
            self.counters.total.record(cx.now().since(arrived).as_nanos() as u64);
        }
        if req.op == Op::Write {
            self.read_ahead(cx, req.range);
        }
        let file = self.file.node();
        cx.run(&*file, req).await
    }

    /// The next granules to protect together: one batch of memory, or, in a long request, as much as the source says is zero (S11, S13).
    async fn batch(&self, cx: &Cx, rest: Range<u64>, request_len: u64) -> IoResult<(Range<u64>, bool)> {
        let per = |bytes: u64| (bytes / self.config.granule).max(1);
        let plain = rest.start..rest.end.min(rest.start + per(BATCH_LEN));
        if request_len <= BATCH_LEN {
            return Ok((plain, false));
        }
        // A long request is a discard or a zeroing, most of the time of nothing: asking is cheaper than reading.
        let wide = rest.start..rest.end.min(rest.start + per(ZERO_BATCH));
        let range = self.bytes(&wide);
        let file = self.file.node();
        let Ok(e) = cx.status(&*file, range).await else { return Ok((plain, false)) };
        if !e.is_zero() {
            return Ok((plain, false));
        }
        let zero = self.whole_granules(ByteRange { offset: range.offset, len: e.len.min(range.len) });
        if zero.is_empty() { Ok((plain, false)) } else { Ok((zero, true)) }
    }

    /// Returns when guests may write the granules of `batch`.
    async fn protect(
        self: &Arc<Self>,
        cx: &Cx,
        batch: &Range<u64>,
        known_zero: bool,
        deadline: Option<Instant>,
        counted: &mut bool,
    ) -> IoResult {
        loop {
            if self.is_passive() {
                return Ok(());
            }
            let survey = self.survey(batch);
            if survey == Survey::default() {
                return Ok(());
            }
            *counted = true;
            if let Some(run) = survey.needed {
                self.copy_run(cx, run, known_zero, deadline).await?;
            } else if let Some(g) = survey.reading {
                let begun = cx.now();
                let ended = self.fence.copies_ended(self.bytes(&(g..batch.end)));
                let waited = self.wait(cx, deadline, ended).await?;
                self.counters.granule.record(cx.now().since(begun).as_nanos() as u64);
                if let Waited::Expired = waited {
                    self.expire(batch)?;
                }
            } else {
                let range = self.bytes(batch);
                // The states are published; now look for readers that were directed at the source before (S5).
                if self.fence.is_frozen(range) {
                    self.counters.frozen_waits.fetch_add(1, Relaxed);
                    if let Waited::Expired = self.wait(cx, deadline, self.fence.frozen_ended(range)).await? {
                        self.expire(batch)?;
                        continue;
                    }
                }
                batch.clone().for_each(|g| self.states.set_clear(g));
                return Ok(());
            }
        }
    }

    fn survey(&self, batch: &Range<u64>) -> Survey {
        let mut s = Survey::default();
        let per_batch = (BATCH_LEN / self.config.granule).max(1);
        for g in batch.clone() {
            match self.states.get(g) {
                State::Needed => match &mut s.needed {
                    None => s.needed = Some(g..g + 1),
                    Some(run) if run.end == g && run.end - run.start < per_batch => run.end = g + 1,
                    Some(_) => {}
                },
                State::Reading => s.reading = s.reading.or(Some(g)),
                _ => {}
            }
            s.unclear |= !self.states.is_clear(g);
        }
        s
    }

    /// Reserves space, claims what is still needed of `run`, and waits for its copy. An error is the guest's own (S8).
    async fn copy_run(
        self: &Arc<Self>,
        cx: &Cx,
        run: Range<u64>,
        known_zero: bool,
        deadline: Option<Instant>,
    ) -> IoResult {
        let mut memory = None;
        if !known_zero {
            match self.space(cx, &run, deadline).await? {
                Some(m) => memory = Some(m),
                None => return Ok(()),
            }
        }
        // Others may have been faster while this one waited for space (S43); what is not used of the reservation goes back with it.
        let Some(claim) = Claim::take(self, &run) else { return Ok(()) };
        let claimed = claim.run.clone();
        if let Some(m) = &mut memory {
            m.give_back(m.len().saturating_sub(self.bytes(&claimed).len));
        }
        let cell = self.spawn_copy(cx, claim, memory);
        let done = std::future::poll_fn(|c| cell.poll(c));
        match self.wait(cx, deadline, done).await? {
            Waited::Done(result) => result,
            Waited::Passive => Ok(()),
            Waited::Expired => self.expire(&claimed),
        }
    }

    /// Memory for the run; `None` if the snapshot is over.
    async fn space(
        &self,
        cx: &Cx,
        run: &Range<u64>,
        deadline: Option<Instant>,
    ) -> IoResult<Option<Reservation>> {
        let len = self.bytes(run).len;
        let begun = cx.now();
        let bound = self.config.space_wait.map(|t| begun.after(t));
        let first = match (deadline, bound) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        let target = self.target.node();
        let waited = self.wait(cx, first, target.reserve(cx, len, Class::Copy)).await?;
        self.counters.space.record(cx.now().since(begun).as_nanos() as u64);
        match waited {
            Waited::Done(Ok(memory)) => Ok(Some(memory)),
            Waited::Done(Err(e)) if e.errno == libc::ECANCELED => Err(e),
            Waited::Done(Err(e)) => self.fail(Failure::Space, true, Op::Write, run, e).map(|()| None),
            Waited::Passive => Ok(None),
            Waited::Expired if first == deadline && deadline != bound => self.expire(run).map(|()| None),
            Waited::Expired => {
                self.fail(Failure::Space, true, Op::Write, run, IoError::os(libc::ENOSPC)).map(|()| None)
            }
        }
    }

    /// The guest has waited for too long (S34). The copy goes on; its result finds the granules lost, or the snapshot broken.
    fn expire(&self, run: &Range<u64>) -> IoResult {
        self.counters.timeouts.fetch_add(1, Relaxed);
        let unsafe_ones = |g: &u64| !self.states.is_clear(*g);
        let first = run.clone().find(unsafe_ones).unwrap_or(run.start);
        self.fail(Failure::Timeout, true, Op::Write, &(first..run.end), IoError::os(libc::ETIMEDOUT))
    }
}
