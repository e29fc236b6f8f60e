//! The state that the node, the drain and the spiller share, and how the index is changed.

use super::config::{CacheOptions, Live, PIECE_COST, Sizes};
use super::index::{Data, Garbage, Index};
use super::loss::Losses;
use super::meter::Meter;
use super::reserve::{Account, Charge, booking, cost, take_credit};
use super::space::{Level, Space};
use super::spill::SpillFile;
use crate::error::{Code, IoError, IoResult, Result};
use crate::events::{Event as HostEvent, EventKind, Side};
use crate::limits::BATCH_LEN;
use crate::node::Edge;
use crate::queue::{Cancel, Cx, Env};
use crate::request::Buffers;
use crate::request::arena::Arena;
use crate::rt::Instant;
use crate::stats::Hist;
use crate::sync::atomic::{
    AtomicBool, AtomicU64, AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use crate::sync::{Arc, Mutex, Weak};
use crate::units::ByteRange;
use event_listener::Event;
use std::fmt;

/// Largest unit in which drain joins neighbours.
const WINDOW_MAX: u64 = 16 << 20;
/// What those get who waited when everything was thrown away.
pub(super) const ABANDONED: IoError = IoError::new(libc::EIO, Code::SnapshotBroken);
/// Least time between two overflow events of one kind.
const EVENT_EVERY_NS: u64 = 100_000_000;

/// The cache without its glue.
pub(super) struct Store {
    pub(super) env: Arc<Env>,
    pub(super) name: String,
    pub(super) file: Edge,
    pub(super) live: Live,
    sizes: Mutex<Sizes>,
    batch: AtomicU64,
    /// Unit within which drain joins neighbours, in bytes.
    pub(super) window: u64,
    /// Where data is booked.
    pub(super) account: Arc<Account>,
    /// Buffers set aside (S75): for writing through, and for reading back from the spill file.
    pub(super) through: Arc<Account>,
    pub(super) read_back: Arc<Account>,
    pub(super) spill: Option<Arc<SpillFile>>,
    pub(super) work: Mutex<Work>,
    /// Number of pieces, for those who only want to know whether there are any.
    pieces: AtomicUsize,
    /// Notified when a write has ended, whichever way, and when the cache breaks.
    pub(super) moved: Event,
    /// Wakes the worker that sleeps.
    pub(super) wake: Event,
    /// Notified when another overflow step may be right.
    pub(super) steps: Event,
    /// Those who want everything drained at once.
    pub(super) hurry: AtomicUsize,
    /// Data in RAM is wanted in the spill file.
    pub(super) spilling: AtomicBool,
    pub(super) losses: Losses,
    pub(super) space_wait: Hist,
    pub(super) counters: Counters,
    last_overflow: Mutex<(Side, u64)>,
    /// Takes writes of what has been thrown away out of the queues of the file; a new one each time.
    cancel: Mutex<Arc<Cancel>>,
}

/// What is behind the one lock of the cache. Nothing below it but the space's and the budget's locks.
#[derive(Default)]
pub(super) struct Work {
    pub(super) index: Index,
    /// Drain tasks.
    pub(super) workers: usize,
    /// Those of them that are writing; the others look for work, one at a time as a rule.
    pub(super) busy: usize,
    /// The one that looks for work sleeps.
    pub(super) asleep: bool,
    /// Spill tasks.
    pub(super) spillers: usize,
    /// The cache is closed: empty, and it refuses everything.
    pub(super) broken: Option<IoError>,
    /// How many times everything has been thrown away: whoever waited across that gets an error.
    pub(super) era: u64,
    /// Drains that have failed one after the other, and until when none is begun.
    pub(super) streak: u32,
    pub(super) hold_until: Instant,
    /// The last drain that failed for good, for flushes: its epoch and cause, and how many there were.
    pub(super) failed: Option<(u64, IoError)>,
    pub(super) failures: u64,
}

/// Numbers for statistics (Relaxed everywhere).
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) writes: AtomicU64,
    pub(super) stored: AtomicU64,
    pub(super) drained_pieces: AtomicU64,
    pub(super) retries: AtomicU64,
}

impl Work {
    /// Why a request that began in `era` has nothing to wait for any more.
    pub(super) fn ended(&self, era: u64) -> Option<IoError> {
        self.broken.or((self.era != era).then_some(ABANDONED))
    }

    /// Whether there may be work and nobody looks for it.
    pub(super) fn needs_worker(&self, workers_max: usize) -> bool {
        self.workers == self.busy
            && self.workers < workers_max
            && self.index.idle() > 0
            && self.broken.is_none()
    }
}

impl Store {
    pub(super) fn new(
        env: &Arc<Env>,
        name: &str,
        file: Edge,
        spill: Option<Edge>,
        options: CacheOptions,
    ) -> Result<Arc<Self>> {
        options.check(spill.is_some())?;
        let sizes = Sizes::new(options.capacity, spill.is_some())?;
        let limits = file.get().limits();
        let now = env.runtime.clock.now();
        let arena = Arena::new(options.capacity);
        let buffer = || Space::new(cost(sizes.batch), 0);
        let account = |space, meter| Account::new(env, space, arena.clone(), meter);
        let has_spill = spill.is_some();
        let quota = options.spill_quota;
        let store = Arc::new(Self {
            env: env.clone(),
            name: name.to_owned(),
            window: window(limits.opt_transfer, limits.cluster),
            file,
            account: account(Space::new(sizes.usable, sizes.slack), Some(Meter::new(now))),
            through: account(buffer(), None),
            read_back: account(buffer(), None),
            spill: spill.map(|edge| SpillFile::new(edge, quota)),
            sizes: Mutex::new(sizes),
            batch: AtomicU64::new(sizes.batch),
            live: Live::new(options.clone(), has_spill),
            work: Mutex::default(),
            pieces: AtomicUsize::new(0),
            moved: Event::new(),
            wake: Event::new(),
            steps: Event::new(),
            hurry: AtomicUsize::new(0),
            spilling: AtomicBool::new(false),
            losses: Losses::default(),
            space_wait: Hist::new(),
            counters: Counters::default(),
            last_overflow: Mutex::new((Side::None, 0)),
            cancel: Mutex::default(),
        });
        let weak = Arc::downgrade(&store);
        let pressed = move || with(&weak, |s| s.kick());
        store.account.space.join(&env.budget, sizes.fixed, booking(sizes.batch), pressed)?;
        let weak = Arc::downgrade(&store);
        if let Some(meter) = &store.account.meter {
            meter.on_mark(move |percent, left| with(&weak, |s| s.post_mark(percent, left)));
        }
        store.apply(&options)?;
        Ok(store)
    }

    /// Takes over options that have changed.
    pub(super) fn apply(self: &Arc<Self>, options: &CacheOptions) -> Result<()> {
        let old = *self.sizes.lock();
        let new = Sizes::new(options.capacity, self.spill.is_some())?;
        // The buffers set aside keep their size: something may be in them.
        let usable = options.capacity.saturating_sub(old.fixed);
        if usable < 4 * cost(old.batch) && new != old {
            return Err(crate::error::Error::invalid(format!(
                "option 'capacity' is {}: it cannot be made that small while the cache is in use",
                options.capacity
            )));
        }
        let part = |percent: u64| (u128::from(usable) * u128::from(percent) / 100) as u64;
        let (low, high) = (part(options.low_watermark), part(options.high_watermark));
        self.account.arena.set_limit(options.capacity);
        self.account.space.set_marks(usable, old.slack, low, high);
        if let Some(meter) = &self.account.meter {
            meter.set_marks(usable, &options.occupancy_events);
        }
        self.steps.notify(usize::MAX);
        self.kick();
        Ok(())
    }

    /// What one request reserves at a time.
    pub(super) fn batch(&self) -> u64 {
        self.batch.load(Relaxed)
    }

    /// Why the cache refuses everything, if it does.
    pub(super) fn broken(&self) -> Option<IoError> {
        self.work.lock().broken
    }

    /// Whether there is nothing that a reader must know of. Acquire: partner of the store in `edit`.
    pub(super) fn has_no_pieces(&self) -> bool {
        self.pieces.load(Acquire) == 0
    }

    /// Changes the index and settles what its pieces cost: `paid` bytes have been booked for new ones; the rest goes back.
    pub(super) fn edit<R>(&self, paid: u64, f: impl FnOnce(&mut Work, &mut Garbage) -> R) -> R {
        let mut garbage = Garbage::new();
        let mut work = self.work.lock();
        let before = work.index.len() as u64;
        let result = f(&mut work, &mut garbage);
        let after = work.index.len() as u64;
        self.pieces.store(after as usize, Release);
        drop(work);
        drop(garbage);
        let (have, need) = (paid + before * PIECE_COST, after * PIECE_COST);
        debug_assert!(need <= have, "pieces that nobody paid for");
        self.account.give(have.saturating_sub(need));
        result
    }

    /// Keeps memory of the cache's own as the newest version of the bytes from `offset` on. False, and nothing is kept, if there is
    /// no space for the index to grow: then it is to be written through.
    pub(super) fn keep(self: &Arc<Self>, now: Instant, offset: u64, bufs: &Buffers) -> IoResult<bool> {
        let range = ByteRange { offset, len: bufs.len() as u64 };
        self.put(now, range, Data::Ram(bufs.clone()), |need| take_credit(bufs, need))
    }

    /// Keeps zeros as the newest version of `range`; `charge` pays for the marker.
    pub(super) fn keep_zeros(
        self: &Arc<Self>,
        now: Instant,
        range: ByteRange,
        unmap: bool,
        charge: Charge,
    ) -> IoResult<bool> {
        let credit = |need: u64| charge.split(need.min(charge.bytes())).keep();
        self.put(now, range, Data::Zero { unmap }, credit)
    }

    fn put(
        self: &Arc<Self>,
        now: Instant,
        range: ByteRange,
        data: Data,
        credit: impl FnOnce(u64) -> u64,
    ) -> IoResult<bool> {
        let window = if matches!(data, Data::Zero { .. }) { u64::MAX } else { self.window };
        let workers_max = self.workers_max();
        let mut garbage = Garbage::new();
        let mut work = self.work.lock();
        if let Some(e) = work.broken {
            return Err(e);
        }
        let need = work.index.grows(range, window) * PIECE_COST;
        let mut paid = credit(need);
        if paid < need && self.account.space.force(need - paid) {
            paid = need;
        }
        if paid < need {
            drop(work);
            self.account.give(paid);
            return Ok(false);
        }
        let before = work.index.len() as u64;
        let eager = self.account.space.level() > Level::Low;
        work.index.put(range, data, window, now, eager, &mut garbage);
        let after = work.index.len() as u64;
        self.pieces.store(after as usize, Release);
        let start = work.needs_worker(workers_max);
        work.workers += usize::from(start);
        let wake = work.asleep && eager;
        drop(work);
        drop(garbage);
        self.account.give(paid + before * PIECE_COST - after * PIECE_COST);
        if start {
            self.start_worker();
        } else if wake {
            self.wake.notify(1);
        }
        if self.spilling.load(Relaxed) && self.account.space.waiters() > 0 {
            self.start_spilling();
        }
        Ok(true)
    }

    /// Space has been taken, so that the level may have risen: the worker that sleeps looks again.
    pub(super) fn space_taken(self: &Arc<Self>) {
        if self.account.space.level() > Level::Low {
            self.kick();
        }
    }

    /// Tells the host of an overflow step, but not of each one in a flood.
    pub(super) fn post_overflow(&self, now: Instant, side: Side, error: IoError) {
        {
            let mut last = self.last_overflow.lock();
            if last.0 == side && last.1 != 0 && now.0.saturating_sub(last.1) < EVENT_EVERY_NS {
                return;
            }
            *last = (side, now.0.max(1));
        }
        let breaks = side == Side::None;
        self.post(
            now,
            HostEvent {
                value: u64::from(side as u32),
                side,
                code: if breaks { error.code } else { Code::None },
                errno: if breaks { error.errno } else { 0 },
                ..HostEvent::new(EventKind::Overflow, self.name.as_str())
            },
        );
    }

    fn post_mark(&self, percent: u64, time_to_full_ms: u64) {
        let event = HostEvent {
            value: percent,
            len: time_to_full_ms,
            side: Side::Cache,
            ..HostEvent::new(EventKind::CacheMark, self.name.as_str())
        };
        self.post(self.env.runtime.clock.now(), event);
    }

    fn post(&self, now: Instant, event: HostEvent) {
        self.env.events.post(HostEvent { time_ns: now.0, ..event });
    }

    /// Ends the waits of writes that begin now when everything is thrown away.
    pub(super) fn cancel(&self) -> Arc<Cancel> {
        self.cancel.lock().clone()
    }

    /// Throws everything away at once and lets everybody go who waits (S29, S35). Buffers of writes under way are freed when those end, which those that only wait
    /// for their turn at the file do at once.
    pub(super) fn abandon(&self) {
        self.work.lock().era += 1;
        // Before anything is freed: nobody in line is to get it.
        self.account.space.fail_line(ABANDONED);
        self.through.space.fail_line(ABANDONED);
        self.clear();
    }

    /// [`Store::abandon`] for good: everything from now on is refused with `error`.
    pub(super) fn close(&self, error: IoError) {
        let error = *self.work.lock().broken.get_or_insert(error);
        self.account.space.break_with(error);
        self.through.space.break_with(error);
        self.clear();
    }

    fn clear(&self) {
        let mut garbage = Vec::new();
        self.edit(0, |work, _| work.index.clear(&mut garbage));
        drop(garbage);
        // The new one first: whoever takes one later writes what came later.
        let old = std::mem::take(&mut *self.cancel.lock());
        old.cancel();
        self.moved.notify(usize::MAX);
        self.wake.notify(usize::MAX);
        self.steps.notify(usize::MAX);
        self.account.arena.trim();
    }

    /// Bytes in use, those of the buffers set aside included.
    pub(super) fn used(&self) -> u64 {
        self.account.space.used() + self.through.space.used() + self.read_back.space.used()
    }

    /// Waits until `done` is true; looks after each change.
    pub(super) async fn wait_until<T>(
        &self,
        cx: &Cx,
        mut done: impl FnMut(&mut Work) -> Option<T>,
    ) -> IoResult<T> {
        loop {
            // Listen first, then look: a change in between is not missed.
            let moved = self.moved.listen();
            if let Some(value) = done(&mut self.work.lock()) {
                return Ok(value);
            }
            cx.waiting(moved).await?;
        }
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("name", &self.name).field("space", &self.account.space).finish()
    }
}

fn with(weak: &Weak<Store>, f: impl FnOnce(&Arc<Store>)) {
    if let Some(store) = weak.upgrade() {
        f(&store);
    }
}

/// Writes are joined up to the target's best transfer, at least one batch, and in whole clusters (S48).
fn window(opt_transfer: u32, cluster: u32) -> u64 {
    let unit = u64::from(opt_transfer.max(cluster)).max(1);
    let window = if unit < BATCH_LEN { BATCH_LEN.div_ceil(unit) * unit } else { unit };
    let multiple_of_cluster = window.next_multiple_of(u64::from(cluster.max(1)));
    multiple_of_cluster.min(WINDOW_MAX)
}

#[cfg(test)]
mod tests {
    use super::window;

    #[test]
    fn the_window_is_whole_clusters_and_at_least_a_batch() {
        for (opt, cluster, want) in [
            (0, 0, 1 << 20),
            (0, 65536, 1 << 20),
            (4 << 20, 0, 4 << 20),
            (0, 4 << 20, 4 << 20),
            (3 << 19, 65536, 3 << 19),
            (0, 768 << 10, 1536 << 10),
            (1 << 31, 0, 16 << 20),
        ] {
            assert_eq!(window(opt, cluster), want, "{opt} {cluster}");
        }
    }
}
