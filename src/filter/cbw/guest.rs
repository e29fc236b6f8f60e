//! What a guest's write, write-zeroes or discard does before it goes down.

use super::copy::{Claim, Running};
use super::fence::mark;
use super::options::DiscardPolicy;
use super::point::{Point, Waited};
use super::policy::Failure;
use super::state::{Granules, HELD, State};
use crate::error::{IoError, IoResult};
use crate::limits::BATCH_LEN;
use crate::node::Reservation;
use crate::queue::Cx;
use crate::request::{Class, Op, Request};
use crate::rt::Instant;
use crate::sync::Arc;
use crate::sync::atomic::Ordering::Relaxed;
use crate::units::ByteRange;
use std::task::Poll;

/// Most bytes known to be zero that are claimed at once. Such a piece costs one request at the target, so it is long, but no entry may span the disk.
const ZERO_BATCH: u64 = 64 << 20;
/// Batches after which a long request lets others run, if it never had to wait.
const BATCHES_PER_TURN: u32 = 64;

/// What the granules of a batch are at, from one look at each. A granule that falls back from READING to NEEDED between two looks would be seen as neither.
#[derive(Debug, Default, PartialEq, Eq)]
struct Survey {
    /// The first run of NEEDED ones.
    needed: Option<Granules>,
    /// From the first to the last READING one.
    reading: Option<Granules>,
    unclear: bool,
}

/// One guest request on its way.
struct Guest<'a> {
    cx: &'a Cx,
    op: Op,
    deadline: Option<Instant>,
    /// It met a granule that was not clear.
    met: bool,
    /// The last answer of the source about a range: whether it reads as zeros.
    known: Option<(ByteRange, bool)>,
}

impl Point {
    /// Carries out a guest's changing request: all old data first (S10), then the request itself.
    pub(super) async fn guest(self: &Arc<Self>, cx: &Cx, req: Request) -> IoResult {
        let all = self.geo.touched(req.range);
        if req.op == Op::Discard && self.live.discard() == DiscardPolicy::Hold && !self.is_clear(&all) {
            return Ok(());
        }
        let arrived = cx.now();
        let mut guest =
            Guest { cx, op: req.op, deadline: self.live.deadline(arrived), met: false, known: None };
        let result = self.protect_all(&mut guest, all.clone()).await;
        if guest.met {
            self.counters.guest_bytes.fetch_add(req.range.len, Relaxed);
            self.counters.total.record(cx.now().since(arrived).as_nanos() as u64);
        }
        result?;
        if guest.met && req.op != Op::Discard {
            self.read_ahead(cx, all);
        }
        let file = self.file.node();
        cx.run(&*file, req).await
    }

    /// Whether guests may write these granules without a look.
    pub(super) fn is_clear(&self, run: &Granules) -> bool {
        self.is_passive() || run.clone().all(|g| self.states.get(g).is_clear())
    }

    async fn protect_all(self: &Arc<Self>, guest: &mut Guest<'_>, all: Granules) -> IoResult {
        let mut at = all.start;
        let mut batches = 0;
        while at < all.end && !self.is_passive() {
            let (batch, zero) = self.batch(guest, at..all.end).await;
            self.protect(guest, &batch, zero).await?;
            at = batch.end;
            batches += 1;
            if batches % BATCHES_PER_TURN == 0 {
                yield_now().await;
            }
        }
        Ok(())
    }

    /// The next granules to protect together: one batch of memory, or, of a long discard or zeroing, as much as the source says is zero (S11, S13).
    async fn batch(&self, guest: &mut Guest<'_>, rest: Granules) -> (Granules, bool) {
        let plain = self.geo.first_batch(&rest);
        if guest.op == Op::Write || self.geo.bytes(&rest).len < BATCH_LEN {
            return (plain, false);
        }
        // Most of the time it is a discard of nothing: asking is cheaper than reading, and one answer serves for many batches.
        let start = self.geo.bytes(&plain).offset;
        if guest.known.is_none_or(|(known, _)| !(known.offset..known.end()).contains(&start)) {
            let range = self.geo.bytes(&rest);
            let file = self.file.node();
            guest.known = match guest.cx.status(&*file, range).await {
                Ok(e) => Some((ByteRange { offset: start, len: e.len.clamp(1, range.len) }, e.is_zero())),
                Err(_) => Some((range, false)),
            };
        }
        let Some((known, true)) = guest.known else { return (plain, false) };
        let end = known.end().min(start + ZERO_BATCH);
        let zero = self.geo.covered(ByteRange { offset: start, len: end - start });
        // The answer holds for what is still NEEDED when it is claimed: nobody has written there since the instant.
        if zero.is_empty() { (plain, false) } else { (zero, true) }
    }

    /// Returns when guests may write the granules of `batch`.
    async fn protect(
        self: &Arc<Self>,
        guest: &mut Guest<'_>,
        batch: &Granules,
        known_zero: bool,
    ) -> IoResult {
        while !self.is_passive() {
            let survey = self.survey(batch);
            if survey == Survey::default() {
                return Ok(());
            }
            guest.met = true;
            if let Some(run) = survey.needed {
                self.copy_run(guest, run, known_zero).await?;
            } else if let Some(run) = survey.reading {
                self.wait_for_copies(guest, &run).await?;
            } else if self.fence_off(guest, batch).await? {
                return Ok(());
            }
        }
        Ok(())
    }

    fn survey(&self, batch: &Granules) -> Survey {
        let mut s = Survey::default();
        for g in batch.clone() {
            let seen = self.states.get(g);
            let run = match seen.state() {
                State::Needed => &mut s.needed,
                State::Reading => &mut s.reading,
                _ => {
                    s.unclear |= !seen.is_clear();
                    continue;
                }
            };
            match run {
                None => *run = Some(g..g + 1),
                Some(r) if r.end == g || seen.state() == State::Reading => r.end = g + 1,
                Some(_) => {}
            }
            s.unclear = true;
        }
        s
    }

    /// Waits until nobody copies a granule of `run` any more; the caller looks again (S6, S8).
    async fn wait_for_copies(&self, guest: &Guest<'_>, run: &Granules) -> IoResult {
        let begun = guest.cx.now();
        let ended = self.fence.copies_ended(self.geo.bytes(run));
        let over = || self.is_settled(run);
        let waited = self.wait_for_others(guest.cx, guest.deadline, over, ended).await?;
        self.counters.granule.record(guest.cx.now().since(begun).as_nanos() as u64);
        match waited {
            Waited::Expired => self.expire(guest.op, run),
            Waited::Done(()) | Waited::Over => Ok(()),
        }
    }

    /// Waits for snapshot reads that were directed at the source, then marks the granules clear (S5, S71). `false`: look again.
    async fn fence_off(&self, guest: &Guest<'_>, batch: &Granules) -> IoResult<bool> {
        let range = self.geo.bytes(batch);
        // The states have been seen to leave NEEDED; now look for readers.
        if !self.fence.is_quiet(range) {
            self.counters.frozen_waits.fetch_add(1, Relaxed);
            let over = || self.is_passive();
            let ended = self.fence.readers_ended(range);
            if let Waited::Expired = self.wait_for_others(guest.cx, guest.deadline, over, ended).await? {
                // The old data is safe, so nothing breaks: the mark overtakes the readers, who see it and choose again (S34).
                self.counters.timeouts.fetch_add(1, Relaxed);
            }
        }
        Ok(mark(&self.states, batch.clone()))
    }

    /// Reserves space, claims what is still needed of `run`, and waits for its copy. An error is the guest's own (S8).
    async fn copy_run(self: &Arc<Self>, guest: &Guest<'_>, mut run: Granules, known_zero: bool) -> IoResult {
        let mut memory = None;
        if !known_zero {
            let Some(m) = self.space(guest, &run).await? else { return Ok(()) };
            // A small cache gives less than was asked for; the caller comes again for the rest.
            run.end = self.fitting(&run, m.len());
            if run.is_empty() {
                let error = IoError::os(libc::ENOSPC);
                return self.fail(Failure::Space, true, guest.op, &(run.start..run.start + 1), error);
            }
            memory = Some(m);
        }
        // Others may have been faster while this one waited for space (S43).
        let Some(claim) = Claim::take(self, &run) else { return Ok(()) };
        let claimed = claim.run.clone();
        if let Some(m) = &mut memory {
            m.give_back(m.len().saturating_sub(self.geo.bytes(&claimed).len));
        }
        let copy = Running::new(guest.cx, claim, memory);
        let over = || self.is_passive();
        match self.wait(guest.cx, guest.deadline, over, copy).await? {
            Waited::Done(result) => result,
            Waited::Over => Ok(()),
            Waited::Expired => self.expire(guest.op, &claimed),
        }
    }

    /// End of the first granules of `run` that `len` bytes hold.
    fn fitting(&self, run: &Granules, len: u64) -> u64 {
        if self.geo.bytes(run).len <= len { run.end } else { run.start + len / self.geo.granule() }
    }

    /// Memory for the run, or for less of it; `None` if there is nothing to copy any more.
    async fn space(&self, guest: &Guest<'_>, run: &Granules) -> IoResult<Option<Reservation>> {
        let len = self.geo.bytes(run).len;
        if len > BATCH_LEN {
            // One granule of more than a batch: the target has no memory of its own (checked when the node was opened).
            return Ok(Some(Reservation::unbounded(len)));
        }
        let begun = guest.cx.now();
        let bound = self.live.space_deadline(begun);
        let first = match (guest.deadline, bound) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        let over = || self.is_passive() || run.clone().all(|g| self.states.get(g).state() != State::Needed);
        let target = self.target.node();
        let waited = self.wait(guest.cx, first, over, target.reserve(guest.cx, len, Class::Copy)).await?;
        self.counters.space.record(guest.cx.now().since(begun).as_nanos() as u64);
        let error = match waited {
            Waited::Done(Ok(memory)) => return Ok(Some(memory)),
            Waited::Done(Err(e)) if guest.cx.is_cancelled() => return Err(e),
            Waited::Done(Err(e)) => e,
            Waited::Over => return Ok(None),
            Waited::Expired if bound != first => return self.expire(guest.op, run).map(|()| None),
            Waited::Expired => IoError::os(libc::ENOSPC),
        };
        self.fail(Failure::Space, true, guest.op, run, error).map(|()| None)
    }

    /// The guest has waited for too long for granules of `run` (S34). Their copies go on; a result that comes late finds the granules lost, or
    /// the snapshot broken.
    fn expire(&self, op: Op, run: &Granules) -> IoResult {
        let held = |g: &u64| HELD.has(self.states.get(*g).state());
        let Some(first) = run.clone().find(held) else { return Ok(()) };
        let last = run.clone().rev().find(held).unwrap_or(first);
        self.counters.timeouts.fetch_add(1, Relaxed);
        self.fail(Failure::Timeout, true, op, &(first..last + 1), IoError::os(libc::ETIMEDOUT))
    }
}

/// Lets other tasks have a turn.
async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
