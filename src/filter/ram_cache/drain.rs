//! Drain: from memory to the file below (S45, S48).
//!
//! Workers are tasks of the context. Each takes a run of neighbouring pieces, in order of address, writes it with its buffers in place, and
//! throws out what it wrote; it starts another worker when there is more to do. The last one sleeps while there is
//! something that may not be written yet, with a timer only if time is what it waits for, and ends when the cache is empty:
//! an idle cache has neither task nor timer.
//!
//! | mode | when | takes | class |
//! |---|---|---|---|
//! | lazy | below the low mark | what is older than the delay, and its neighbours | lazy |
//! | steady | up to the high mark | everything | lazy |
//! | forced | at the high mark and down to the low one; somebody waits for space or the budget, or wants all of it drained | everything | background |
//!
//! What a flush asks for is taken whatever the mode.

use super::index::{Data, Pick, Run, Want};
use super::loss::{TRIES_MAX, pause};
use super::reserve::{Charge, cost};
use super::space::Level;
use super::spill::unreadable;
use super::store::{Store, Work};
use crate::error::{IoError, IoResult};
use crate::events::Side;
use crate::queue::Cx;
use crate::report::Action;
use crate::request::{Buffers, Class, Flags, Op, Request};
use crate::rt::Instant;
use crate::sync::Arc;
use crate::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Duration;

/// Fewer workers are enough for what can wait.
const LAZY_SHARE: usize = 4;
/// Longest wait for the spill file to give its blocks back.
const TRIM_MAX: Duration = Duration::from_secs(1);
/// Failures in a row after which all workers pause.
const STREAK: u32 = 4;

/// What a worker does next.
enum Next {
    Write(Run, Option<Charge>),
    Again,
    /// Sleep until woken, or until this moment.
    Sleep(Option<Instant>),
    /// Nothing found; look once more with the ear at the door.
    Listen,
    /// Everything is written: give memory and spill file back.
    Tidy,
    End,
}

/// Counts a worker out, however it ends.
struct WorkerGuard {
    store: Arc<Store>,
    counted: bool,
}

/// Puts a run back if its task is dropped.
struct RunGuard<'a> {
    store: &'a Arc<Store>,
    run: Option<Run>,
}

/// Wants everything drained for as long as it lives.
pub(super) struct Hurry<'a>(&'a Arc<Store>);

impl Store {
    /// Everything is to be drained now, without delay.
    pub(super) fn hurry(self: &Arc<Self>) -> Hurry<'_> {
        // SeqCst with the load in `mode`: a worker that does not see this has yet to look at `asleep` under the lock.
        self.hurry.fetch_add(1, SeqCst);
        self.kick();
        Hurry(self)
    }

    /// Takes back one wish that was kept beyond its guard.
    pub(super) fn hurry_less(&self) {
        self.hurry.fetch_sub(1, SeqCst);
    }

    /// Something has changed: somebody looks (again) at what there is to do.
    pub(super) fn kick(self: &Arc<Self>) {
        let workers_max = self.workers_max();
        let mut work = self.work.lock();
        let (wake, start) = (work.asleep, work.needs_worker(workers_max));
        work.workers += usize::from(start);
        drop(work);
        if wake {
            self.wake.notify(1);
        }
        if start {
            self.start_worker();
        }
    }

    pub(super) fn workers_max(&self) -> usize {
        let workers = self.live.workers();
        if self.takes_all() { workers } else { (workers / LAZY_SHARE).max(1) }
    }

    /// Starts a worker that has been counted already.
    pub(super) fn start_worker(self: &Arc<Self>) {
        let guard = WorkerGuard { store: self.clone(), counted: true };
        let spawned = self.env.spawn_background(move |cx| async move {
            let mut guard = guard;
            let store = guard.store.clone();
            store.drain_loop(&cx, &mut guard).await;
        });
        if let Err(e) = spawned {
            self.env.log(0, "ram-cache", &format!("{}: cannot drain: {e}", self.name));
        }
    }

    async fn drain_loop(self: &Arc<Self>, cx: &Cx, guard: &mut WorkerGuard) {
        let mut listener = None;
        let mut tidy = true;
        loop {
            match self.next(cx, guard, listener.is_some(), tidy) {
                Next::Write(run, read_back) => {
                    (listener, tidy) = (None, true);
                    self.drain_run(cx, run, read_back).await;
                }
                Next::Again => {}
                Next::Listen => listener = Some(self.wake.listen()),
                Next::Sleep(until) => {
                    if let Some(heard) = listener.take() {
                        cx.until(until, heard).await;
                    }
                    self.work.lock().asleep = false;
                }
                Next::Tidy => {
                    tidy = false;
                    self.account.arena.trim();
                    if let Some(spill) = &self.spill {
                        // It is nobody's fault if that hangs.
                        cx.until(Some(cx.now().after(TRIM_MAX)), spill.trim(cx)).await;
                    }
                    self.work.lock().busy -= 1;
                }
                Next::End => {
                    self.moved.notify(usize::MAX);
                    // The one that sleeps may have nothing to wait for any more.
                    self.wake.notify(1);
                    return;
                }
            }
        }
    }

    fn next(self: &Arc<Self>, cx: &Cx, guard: &mut WorkerGuard, listening: bool, tidy: bool) -> Next {
        // Before the lock: the space has a lock of its own. Reading back is one run at a time.
        let read_back = match &self.spill {
            Some(spill) if spill.used() > 0 => self.read_back.try_book(cost(self.batch())),
            _ => None,
        };
        let mut start = false;
        let mut work = self.work.lock();
        let next = self.decide(cx.now(), &mut work, guard, read_back, (listening, tidy), &mut start);
        drop(work);
        if start {
            self.start_worker();
        }
        next
    }

    fn decide(
        &self,
        now: Instant,
        work: &mut Work,
        guard: &mut WorkerGuard,
        read_back: Option<Charge>,
        (listening, tidy): (bool, bool),
        start: &mut bool,
    ) -> Next {
        let (all, workers_max) = (self.takes_all(), self.workers_max());
        let want = self.want(now, all, if read_back.is_some() { self.batch() } else { 0 });
        let pick = if work.broken.is_some() || work.workers > workers_max {
            Pick::Nothing(None)
        } else if now < work.hold_until {
            Pick::Nothing(Some(work.hold_until))
        } else {
            work.index.pick(&want)
        };
        match pick {
            Pick::Run(run) => {
                work.busy += 1;
                *start = work.needs_worker(workers_max);
                work.workers += usize::from(*start);
                let spilled = run.data.iter().any(|(_, d)| matches!(d, Data::Spill(..)));
                Next::Write(run, read_back.filter(|_| spilled))
            }
            Pick::Again => Next::Again,
            Pick::Nothing(_) if tidy && work.workers == 1 && work.index.is_clean() => {
                // Not looking for work meanwhile: whoever brings some starts another worker.
                work.busy += 1;
                Next::Tidy
            }
            // Another one looks already, or there is nothing to look for.
            Pick::Nothing(_)
                if work.workers - work.busy > 1 || work.index.idle() == 0 || work.broken.is_some() =>
            {
                work.workers -= 1;
                guard.counted = false;
                Next::End
            }
            Pick::Nothing(_) if !listening => Next::Listen,
            Pick::Nothing(at) => {
                work.asleep = true;
                let blocked = work.index.draining() >= want.draining_max;
                Next::Sleep(self.sleep_until(now, work, at, blocked))
            }
        }
    }

    /// When to look again: not at every single piece that becomes old enough, and not at all if only an event can change anything.
    fn sleep_until(&self, now: Instant, work: &Work, at: Option<Instant>, blocked: bool) -> Option<Instant> {
        let delay = self.live.delay();
        if now < work.hold_until {
            return Some(work.hold_until);
        }
        match at {
            Some(at) => Some(at.max(now.after(delay / 4))),
            None if blocked => None,
            // A piece that came while the others were looked at.
            None => Some(now.after(delay.max(Duration::from_millis(1)))),
        }
    }

    fn want(&self, now: Instant, all: bool, spilled_max: u64) -> Want {
        let limits = self.file.get().limits();
        let largest = if limits.max_transfer == 0 { u64::MAX } else { u64::from(limits.max_transfer) };
        Want {
            now,
            delay: self.live.delay(),
            all,
            spilled_max,
            bytes_max: self.window.min(largest),
            window: self.window,
            segments_max: (limits.max_iov as usize).max(1),
            // The other half stays movable: a file that hangs must not keep the spill file from making space.
            draining_max: (self.account.space.limit() / 2).max(1),
        }
    }

    /// Whether pieces of any age are taken.
    fn takes_all(&self) -> bool {
        self.account.space.level() > Level::Low || self.is_forced()
    }

    /// Whether somebody waits for what drain does.
    fn is_forced(&self) -> bool {
        let space = &self.account.space;
        space.level() == Level::High
            || space.waiters() > 0
            || self.hurry.load(SeqCst) > 0
            || space.is_pressed()
    }

    async fn drain_run(self: &Arc<Self>, cx: &Cx, run: Run, read_back: Option<Charge>) {
        let asked = self.work.lock().index.is_asked();
        let class = if self.is_forced() || asked { Class::Background } else { Class::Lazy };
        let mut guard = RunGuard { store: self, run: Some(run) };
        let Some(run) = guard.run.as_mut() else { return };
        let cancel = self.cancel();
        let result = self.write_run(&cx.cancelled_by(&cancel), run, read_back, class).await;
        if result.is_err() && cancel.is_set() {
            // Thrown away meanwhile: the guard puts back what is left of it, which is nothing.
            return;
        }
        let Some(run) = guard.run.take() else { return };
        match result {
            Ok(()) => self.run_drained(run),
            Err((side, e)) => self.run_failed(cx.now(), run, side, e),
        }
    }

    async fn write_run(
        &self,
        cx: &Cx,
        run: &mut Run,
        read_back: Option<Charge>,
        class: Class,
    ) -> Result<(), (Side, IoError)> {
        let file = self.file.node();
        if let Some((_, Data::Zero { unmap })) = run.data.first() {
            let flags = if *unmap { Flags::MAY_UNMAP } else { Flags::empty() };
            let zeroes = Request::write_zeroes(run.range, flags).class(class);
            return cx.run(&*file, zeroes).await.map_err(|e| (Side::Target, e));
        }
        let mut bufs = Buffers::new();
        for (len, data) in run.data.drain(..) {
            match data {
                Data::Ram(b) => bufs.append(b),
                Data::Spill(place, at) => {
                    let (Some(spill), Some(charge)) = (&self.spill, &read_back) else {
                        return Err((Side::Spill, IoError::invalid()));
                    };
                    // A part of what was set aside; several spilled pieces of one run share it.
                    let memory = self.read_back.memory(len, charge.split(cost(len).min(charge.bytes())));
                    spill
                        .read(cx, &place, at, memory.clone())
                        .await
                        .map_err(|e| (Side::Spill, unreadable(e)))?;
                    bufs.append(memory);
                }
                Data::Zero { .. } | Data::Lost(_) => return Err((Side::Cache, IoError::invalid())),
            }
        }
        let write = Request::write(run.range.offset, bufs).class(class);
        cx.run(&*file, write).await.map_err(|e| (Side::Target, e))
    }

    fn run_drained(self: &Arc<Self>, run: Run) {
        self.counters.writes.fetch_add(1, Relaxed);
        self.counters.stored.fetch_add(run.range.len, Relaxed);
        self.counters.drained_pieces.fetch_add(run.pieces as u64, Relaxed);
        self.edit(0, |work, garbage| {
            work.index.drained(&run, garbage);
            work.busy -= 1;
            work.streak = 0;
        });
        self.moved.notify(usize::MAX);
    }

    fn run_failed(self: &Arc<Self>, now: Instant, run: Run, side: Side, error: IoError) {
        let tries = run.tries + 1;
        // A failed run is tried again piece by piece, so only what cannot be written reaches the bound.
        let give_up = tries >= TRIES_MAX && (side == Side::Spill || self.losses.has_handler());
        let action = if give_up { Action::RangeLost } else { Action::Retried };
        self.report(error, side, if side == Side::Spill { Op::Read } else { Op::Write }, run.range, action);
        self.counters.retries.fetch_add(u64::from(!give_up), Relaxed);
        let lost = self.edit(0, |work, garbage| {
            work.busy -= 1;
            work.streak = work.streak.saturating_add(1);
            if work.streak >= STREAK {
                work.hold_until = now.after(pause(work.streak - STREAK));
            }
            if tries >= TRIES_MAX {
                work.failed = Some((work.index.epoch_of(&run), error));
                work.failures += 1;
            }
            if give_up {
                return work.index.drain_lost(&run, error, garbage);
            }
            work.index.drain_failed(&run, now.after(pause(run.tries)));
            Vec::new()
        });
        drop(run);
        lost.into_iter().for_each(|range| self.tell_lost(range, error));
        self.moved.notify(usize::MAX);
    }

    /// Drains everything, what comes meanwhile included, and ends the background work. Fails when a write fails for good; what could not be written
    /// is then still here, or lost.
    pub(super) async fn drain_all(self: &Arc<Self>, cx: &Cx) -> IoResult {
        let hurry = self.hurry();
        let (failures, era) = {
            let work = self.work.lock();
            (work.failures, work.era)
        };
        let result = self
            .wait_until(cx, |work| {
                if let Some(e) = work.ended(era) {
                    return Some(Err(e));
                }
                if work.index.is_clean() && work.index.is_quiet() && work.workers == 0 && work.spillers == 0 {
                    return Some(Ok(()));
                }
                match work.failed {
                    Some((_, e)) if work.failures != failures => Some(Err(e)),
                    _ => None,
                }
            })
            .await?;
        drop(hurry);
        result?;
        match self.work.lock().index.first_lost() {
            Some((_, e)) => Err(super::loss::lost_error(e)),
            None => Ok(()),
        }
    }
}

impl Drop for WorkerGuard {
    fn drop(&mut self) {
        if self.counted {
            // Dropped in the middle: the executor is going, or a panic. What is still here waits for the next worker.
            let mut work = self.store.work.lock();
            work.workers -= 1;
            if work.workers == 0 {
                work.asleep = false;
            }
            drop(work);
            self.store.moved.notify(usize::MAX);
            self.store.wake.notify(1);
        }
    }
}

impl Drop for RunGuard<'_> {
    fn drop(&mut self) {
        if let Some(run) = self.run.take() {
            let now = self.store.env.runtime.clock.now();
            self.store.edit(0, |work, _| {
                work.busy -= 1;
                work.index.drain_failed(&run, now);
            });
            self.store.moved.notify(usize::MAX);
        }
    }
}

impl Drop for Hurry<'_> {
    fn drop(&mut self) {
        self.0.hurry_less();
    }
}
