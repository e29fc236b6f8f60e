//! What holds a job back: bytes per second, share of busy time, guest latency (S56). Pure arithmetic over times passed in.
//!
//! Whatever the limits say, some progress remains: copies made for the guest are charged to the speed (S38) but can take at
//! most nine tenths of it, a share is at least one per cent, and the latency target never closes the last worker.

use crate::rate::{Bucket, NANO, Rate};
use crate::rt::Instant;
use crate::stats::HistSnapshot;
use crate::sync::Mutex;
use std::time::Duration;

/// Busy time after which a job with a share below 100 pays with idle time.
const SHARE_SLICE: Duration = Duration::from_millis(100);
/// Most of the speed, in parts of it, that copies for the guest can take away: all but one tenth.
const FLOOR_PART: u64 = 10;

/// Which limit made a job wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// `speed`.
    Speed,
    /// `share`.
    Share,
    /// `latency-target-ms`.
    Latency,
    /// The buffers of the context or of the job.
    Pool,
}

/// Milliseconds lost to each limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lost {
    /// To `speed`.
    pub speed: Duration,
    /// To `share`.
    pub share: Duration,
    /// To `latency-target-ms`.
    pub latency: Duration,
    /// To the memory pool.
    pub pool: Duration,
}

/// The limits of one job. Any thread; changes act at once.
#[derive(Debug)]
pub struct Limiter {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    speed: Bucket,
    /// Charged with the job's own bytes only, at a part of the speed: the progress that remains.
    floor: Bucket,
    share: Share,
    lost: Lost,
}

impl Limiter {
    /// Limits as of `now`: bytes per second (0: none) and per cent of busy time.
    pub fn new(speed: u64, share: u32, now: Instant) -> Self {
        let state = State {
            speed: Bucket::new(Rate::per_second(speed), now),
            floor: Bucket::new(floor(speed), now),
            share: Share::new(share, SHARE_SLICE, now),
            lost: Lost::default(),
        };
        Self { state: Mutex::new(state) }
    }

    /// Bytes per second; 0 is unlimited.
    pub fn speed(&self) -> u64 {
        self.state.lock().speed.rate().avg
    }

    /// Changes the speed. A debt made under a high speed must not stall a low one, so it is forgiven.
    pub fn set_speed(&self, now: Instant, speed: u64) {
        let mut s = self.state.lock();
        s.speed = Bucket::new(Rate::per_second(speed), now);
        s.floor = Bucket::new(floor(speed), now);
    }

    /// Time from `now` until the next part may start, and what the wait is for; `None` if it may start now.
    pub fn delay(&self, now: Instant) -> Option<(Duration, Cause)> {
        let mut s = self.state.lock();
        let speed = s.speed.wait(now).min(s.floor.wait(now));
        let share = s.share.delay(now);
        let (delay, cause) = if speed >= share { (speed, Cause::Speed) } else { (share, Cause::Share) };
        (!delay.is_zero()).then_some((delay, cause))
    }

    /// Charges bytes that the job moves.
    pub fn charge(&self, bytes: u64) {
        let mut s = self.state.lock();
        s.speed.take(u128::from(bytes) * NANO);
        s.floor.take(u128::from(bytes) * NANO);
    }

    /// Charges bytes that were copied for the guest: they are never delayed, but the job pays for them (S38).
    pub fn charge_guest(&self, bytes: u64) {
        self.state.lock().speed.take(u128::from(bytes) * NANO);
    }

    /// Tells whether parts are in flight from `now` on.
    pub fn set_busy(&self, now: Instant, busy: bool) {
        self.state.lock().share.set_busy(now, busy);
    }

    /// Adds to the time lost.
    pub fn add_lost(&self, cause: Cause, time: Duration) {
        let mut s = self.state.lock();
        let slot = match cause {
            Cause::Speed => &mut s.lost.speed,
            Cause::Share => &mut s.lost.share,
            Cause::Latency => &mut s.lost.latency,
            Cause::Pool => &mut s.lost.pool,
        };
        *slot += time;
    }

    /// Time lost so far.
    pub fn lost(&self) -> Lost {
        self.state.lock().lost
    }
}

/// Lets fewer parts run while guests wait too long, and more again when they do not: halved and then one more each time, the way
/// networks share a line.
#[derive(Debug)]
pub(super) struct Backoff {
    target_ns: u64,
    max: usize,
    allowed: usize,
    looked: Instant,
    seen: Option<HistSnapshot>,
}

/// Time between two looks at the guest's latency: long enough for a percentile to mean something.
const LOOK_EVERY: Duration = Duration::from_millis(200);

impl Backoff {
    /// For a target in nanoseconds (0: no limit) and at most `max` parts.
    pub(super) fn new(target_ns: u64, max: usize, now: Instant) -> Self {
        Self { target_ns, max, allowed: max, looked: now, seen: None }
    }

    /// Parts that may run, given all waits of the guest so far; at least 1.
    pub(super) fn allowed(&mut self, now: Instant, waits: impl FnOnce() -> Option<HistSnapshot>) -> usize {
        if self.target_ns == 0 || now.since(self.looked) < LOOK_EVERY {
            return self.allowed;
        }
        self.looked = now;
        let Some(all) = waits() else { return self.allowed };
        let recent = match &self.seen {
            Some(seen) => all.sub(seen),
            None => all.clone(),
        };
        self.seen = Some(all);
        self.allowed = if recent.count > 0 && recent.percentile(99.0) > self.target_ns {
            (self.allowed / 2).max(1)
        } else {
            (self.allowed + 1).min(self.max)
        };
        self.allowed
    }

    /// Whether fewer parts run than could.
    pub(super) fn holds_back(&self) -> bool {
        self.allowed < self.max
    }
}

fn floor(speed: u64) -> Rate {
    Rate::per_second(if speed == 0 { 0 } else { (speed / FLOOR_PART).max(1) })
}

/// A share of time: busy at most `percent` of it, in slices.
///
/// Busy time is owed idle time in proportion; work may begin until the debt is that of one slice, then not before it has been paid.
#[derive(Clone, Debug)]
struct Share {
    percent: u32,
    slice_ns: u64,
    /// Idle nanoseconds owed.
    debt_ns: u64,
    /// Paying the debt: no work until it is 0.
    paying: bool,
    busy: bool,
    at: Instant,
}

impl Share {
    /// `percent` in 1..=100 (others are brought into it); 100 is no limit. `slice` is the busy time after which the debt is paid.
    fn new(percent: u32, slice: Duration, now: Instant) -> Self {
        let slice_ns = u64::try_from(slice.as_nanos()).unwrap_or(u64::MAX);
        Self { percent: percent.clamp(1, 100), slice_ns, debt_ns: 0, paying: false, busy: false, at: now }
    }

    /// Tells whether work is under way from now on.
    fn set_busy(&mut self, now: Instant, busy: bool) {
        self.advance(now);
        self.busy = busy;
    }

    /// Time from `now` until work may begin, counted as if none were under way; zero if it may begin now.
    fn delay(&mut self, now: Instant) -> Duration {
        self.advance(now);
        if self.percent == 100 {
            return Duration::ZERO;
        }
        if self.debt_ns == 0 {
            self.paying = false;
        } else if self.debt_ns >= self.owed(self.slice_ns) {
            self.paying = true;
        }
        if self.paying { Duration::from_nanos(self.debt_ns) } else { Duration::ZERO }
    }

    fn owed(&self, busy_ns: u64) -> u64 {
        let ns = u128::from(busy_ns) * u128::from(100 - self.percent) / u128::from(self.percent);
        u64::try_from(ns).unwrap_or(u64::MAX)
    }

    fn advance(&mut self, now: Instant) {
        let ns = u64::try_from(now.since(self.at).as_nanos()).unwrap_or(u64::MAX);
        self.at = self.at.max(now);
        self.debt_ns = if self.busy {
            self.debt_ns.saturating_add(self.owed(ns))
        } else {
            self.debt_ns.saturating_sub(ns)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const MIB: u64 = 1 << 20;

    /// Starts parts of `len` as soon as allowed until `end`, calling `each` before every look; returns the bytes.
    fn run(l: &Limiter, len: u64, from: Instant, end: Instant, each: impl Fn(Instant)) -> u64 {
        let (mut now, mut bytes) = (from, 0);
        while now < end {
            each(now);
            match l.delay(now) {
                Some((d, _)) => now = now.after(d.min(Duration::from_millis(1))),
                None => {
                    l.charge(len);
                    bytes += len;
                }
            }
        }
        bytes
    }

    #[test]
    fn the_speed_is_kept_within_one_burst_and_one_part() {
        let l = Limiter::new(50 * MIB, 100, Instant(0));
        let bytes = run(&l, MIB, Instant(0), Instant(10_000 * MS), |_| {});
        assert!((500 * MIB..=506 * MIB).contains(&bytes), "{bytes}");
    }

    #[test]
    fn guest_copies_slow_the_job_but_leave_a_tenth() {
        let l = Limiter::new(10 * MIB, 100, Instant(0));
        // The guest copies at ten times the limit, all the time: 100 KiB each millisecond.
        let bytes = run(&l, 64 << 10, Instant(0), Instant(10_000 * MS), |_| l.charge_guest(100 << 10));
        assert!((10 * MIB..=13 * MIB).contains(&bytes), "{bytes}");
        let alone = Limiter::new(10 * MIB, 100, Instant(0));
        assert!(run(&alone, 64 << 10, Instant(0), Instant(10_000 * MS), |_| {}) > 9 * bytes - 20 * MIB);
    }

    #[test]
    fn a_new_speed_acts_at_once_and_owes_nothing() {
        let l = Limiter::new(1, 100, Instant(0));
        l.charge(MIB);
        assert!(l.delay(Instant(0)).is_some_and(|(d, c)| d > Duration::from_secs(1000) && c == Cause::Speed));
        l.set_speed(Instant(5), 0);
        assert_eq!(l.delay(Instant(5)), None);
        l.set_speed(Instant(5), 1000);
        assert_eq!((l.delay(Instant(5)), l.speed()), (None, 1000));
    }

    #[test]
    fn a_share_keeps_the_busy_part_of_time() {
        for percent in [1u32, 10, 25, 50, 90, 99] {
            let l = Limiter::new(0, percent, Instant(0));
            let (mut now, mut busy) = (Instant(0), 0u64);
            while now < Instant(1_000_000 * MS) {
                match l.delay(now) {
                    Some((d, cause)) => {
                        assert_eq!(cause, Cause::Share);
                        now = now.after(d);
                    }
                    None => {
                        l.set_busy(now, true);
                        now = now.after(Duration::from_millis(7));
                        busy += 7;
                        l.set_busy(now, false);
                    }
                }
            }
            let got = busy * 100_000 / (now.0 / MS);
            let want = u64::from(percent) * 1000;
            assert!(got.abs_diff(want) <= want / 10, "{got} of {want} (thousandths of a per cent)");
        }
    }

    #[test]
    fn a_full_share_never_delays() {
        let l = Limiter::new(0, 100, Instant(0));
        l.set_busy(Instant(0), true);
        assert_eq!(l.delay(Instant(u64::MAX)), None);
    }

    #[test]
    fn a_slow_guest_halves_the_parts_down_to_one_and_a_fast_one_gives_them_back() {
        let waits = crate::stats::Hist::new();
        let mut b = Backoff::new(10 * MS, 16, Instant(0));
        let mut now = Instant(0);
        let mut look = |b: &mut Backoff, wait_ns: u64| {
            (0..100).for_each(|_| waits.record(wait_ns));
            now = now.after(LOOK_EVERY);
            b.allowed(now, || Some(waits.snapshot()))
        };
        let slow: Vec<usize> = (0..6).map(|_| look(&mut b, 50 * MS)).collect();
        assert_eq!(slow, [8, 4, 2, 1, 1, 1]);
        assert!(b.holds_back());
        let fast: Vec<usize> = (0..16).map(|_| look(&mut b, MS)).collect();
        assert_eq!((fast[0], fast[14], fast[15]), (2, 16, 16));
        assert!(!b.holds_back());
    }

    #[test]
    fn time_lost_is_kept_per_cause() {
        let l = Limiter::new(0, 100, Instant(0));
        l.add_lost(Cause::Pool, Duration::from_millis(3));
        l.add_lost(Cause::Pool, Duration::from_millis(4));
        l.add_lost(Cause::Latency, Duration::from_millis(1));
        let lost = l.lost();
        assert_eq!((lost.pool, lost.latency), (Duration::from_millis(7), Duration::from_millis(1)));
        assert_eq!((lost.speed, lost.share), (Duration::ZERO, Duration::ZERO));
    }
}
