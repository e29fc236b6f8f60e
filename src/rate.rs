//! Rate limits as leaky buckets: pure arithmetic over a clock that the caller reads.
//!
//! A [`Bucket`] fills with what is let through and leaks at the average rate. A request may start while the level is at
//! most the bucket's capacity; it then adds its whole cost, however large, so a request larger than the bucket is let through
//! too and the ones behind it wait for the debt. Over any time `t` at most
//! `average * t + capacity + one request` gets through: the rate is right within one burst.
//!
//! Capacity: a tenth of a second at the average rate, or, with a burst rate ([`Rate::max`]), what that rate lets through in
//! [`Rate::max_length`] seconds. With bursts longer than a second a second level keeps the burst itself at the burst rate.
//!
//! Levels are kept in billionths of a unit: `rate per second * nanoseconds` is then exact, and no rounding adds up over time.
//! Shared by the `throttle` filter and the copy engine's speed limit. Nothing here waits or knows who does.

use crate::rt::Instant;
use std::time::Duration;

/// Billionths of a unit (a byte, an operation).
pub type NanoUnits = u128;

/// Billionths in one unit.
pub const NANO: NanoUnits = 1_000_000_000;

/// Largest rate, and largest product of burst rate and length, in units (per second): far above any device and far below an overflow.
pub const RATE_MAX: u64 = 1_000_000_000_000_000;

/// A limit in units per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Average units per second; 0 is no limit.
    pub avg: u64,
    /// Units per second during a burst, at least `avg`; 0 is no burst beyond a tenth of a second at the average rate.
    pub max: u64,
    /// Seconds that a burst at `max` may last, at least 1.
    pub max_length: u64,
}

/// What has been let through, against one rate.
#[derive(Clone, Debug)]
pub struct Bucket {
    rate: Rate,
    /// Let through and not yet leaked at the average rate.
    level: NanoUnits,
    /// Let through and not yet leaked at the burst rate; used only with bursts of more than a second.
    burst_level: NanoUnits,
    leaked_at: Instant,
}

impl Rate {
    /// No limit.
    pub const UNLIMITED: Self = Self { avg: 0, max: 0, max_length: 1 };

    /// `avg` units per second, with bursts of a tenth of a second.
    pub const fn per_second(avg: u64) -> Self {
        Self { avg, ..Self::UNLIMITED }
    }

    /// Whether there is a limit.
    pub const fn is_limited(self) -> bool {
        self.avg > 0
    }

    /// How far the amount let through may run ahead of the average, not counting the request that gets there.
    pub const fn capacity(self) -> NanoUnits {
        if self.max == 0 {
            self.avg as NanoUnits * (NANO / 10)
        } else {
            self.max as NanoUnits * self.max_length as NanoUnits * NANO
        }
    }

    /// Time that `cost` takes at the average rate, rounded up; 0 without a limit.
    pub fn time_of(self, cost: NanoUnits) -> Duration {
        if self.avg == 0 { Duration::ZERO } else { nanoseconds(cost.div_ceil(self.avg.into())) }
    }

    const fn has_long_burst(self) -> bool {
        self.max > 0 && self.max_length > 1
    }

    const fn burst_capacity(self) -> NanoUnits {
        self.max as NanoUnits * (NANO / 10)
    }
}

impl Bucket {
    /// An empty bucket.
    pub const fn new(rate: Rate, now: Instant) -> Self {
        Self { rate, level: 0, burst_level: 0, leaked_at: now }
    }

    /// The rate.
    pub const fn rate(&self) -> Rate {
        self.rate
    }

    /// Changes the rate. What was let through until now counts at the old rate; a debt stays in units, so it is paid off at the new
    /// rate, except that lifting a limit forgives it.
    pub fn set_rate(&mut self, rate: Rate, now: Instant) {
        self.leak(now);
        self.rate = rate;
        if !rate.is_limited() {
            self.level = 0;
        }
        if !rate.has_long_burst() {
            self.burst_level = 0;
        }
    }

    /// Time until the next request may start, whatever its size, if nothing else is taken meanwhile; zero if it may start now.
    pub fn wait(&mut self, now: Instant) -> Duration {
        if !self.rate.is_limited() {
            return Duration::ZERO;
        }
        self.leak(now);
        let average = self.rate.time_of(self.level.saturating_sub(self.rate.capacity()));
        if !self.rate.has_long_burst() {
            return average;
        }
        let over = self.burst_level.saturating_sub(self.rate.burst_capacity());
        average.max(nanoseconds(over.div_ceil(self.rate.max.into())))
    }

    /// Counts a request that starts now; call after [`Bucket::wait`] was zero.
    pub fn take(&mut self, cost: NanoUnits) {
        if !self.rate.is_limited() {
            return;
        }
        self.level = self.level.saturating_add(cost);
        if self.rate.has_long_burst() {
            self.burst_level = self.burst_level.saturating_add(cost);
        }
    }

    /// Takes back what was counted for a request that did not start after all.
    pub fn give_back(&mut self, cost: NanoUnits) {
        self.level = self.level.saturating_sub(cost);
        self.burst_level = self.burst_level.saturating_sub(cost);
    }

    fn leak(&mut self, now: Instant) {
        let ns = NanoUnits::from(now.0.saturating_sub(self.leaked_at.0));
        // A clock that is read by several threads may be seen to step back a little; time is never counted twice.
        self.leaked_at = self.leaked_at.max(now);
        self.level = self.level.saturating_sub(ns * NanoUnits::from(self.rate.avg));
        self.burst_level = self.burst_level.saturating_sub(ns * NanoUnits::from(self.rate.max));
    }
}

fn nanoseconds(ns: u128) -> Duration {
    Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
}

// u64 nanoseconds at the largest rate stay far inside u128.
const _: () = assert!((u64::MAX as NanoUnits) < NanoUnits::MAX / RATE_MAX as NanoUnits);

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// Lets requests of `size` through as fast as the bucket allows until `end`; the times at which they started.
    fn starts(bucket: &mut Bucket, size: u64, from: u64, end: u64) -> Vec<u64> {
        let (mut now, mut at) = (from, Vec::new());
        loop {
            now += u64::try_from(bucket.wait(Instant(now)).as_nanos()).unwrap();
            if now >= end {
                return at;
            }
            bucket.take(NanoUnits::from(size) * NANO);
            at.push(now);
        }
    }

    #[test]
    fn the_amount_let_through_stays_within_one_burst_of_the_rate_for_any_size() {
        let rates = [
            Rate::per_second(1),
            Rate::per_second(7),
            Rate::per_second(1000),
            Rate { avg: 10, max: 50, max_length: 1 },
            Rate { avg: 10, max: 50, max_length: 3 },
        ];
        for rate in rates {
            for size in [1u64, 3, 10, 64, 1000] {
                let mut bucket = Bucket::new(rate, Instant(0));
                let at = starts(&mut bucket, size, 0, 100 * SECOND);
                for (i, t) in at.iter().enumerate() {
                    let through = (i as u128 + 1) * u128::from(size) * NANO;
                    let allowed = u128::from(rate.avg) * u128::from(*t) + rate.capacity();
                    assert!(through <= allowed + u128::from(size) * NANO, "{rate:?} {size}: too fast at {t}");
                }
                // Not slower either.
                let total = at.len() as u128 * u128::from(size);
                let least = u128::from(rate.avg) * 100;
                assert!(total + u128::from(size) >= least, "{rate:?} {size}: {total} of {least}");
            }
        }
    }

    #[test]
    fn a_steady_stream_starts_at_exact_times() {
        let mut bucket = Bucket::new(Rate::per_second(1000), Instant(0));
        // Capacity 100: at 0 the first three of 50 go (levels 0, 50, 100), then one per 50 ms.
        let at = starts(&mut bucket, 50, 0, 200_000_000);
        assert_eq!(at, [0, 0, 0, 50_000_000, 100_000_000, 150_000_000]);
    }

    #[test]
    fn a_request_larger_than_the_bucket_goes_at_once_and_leaves_a_debt() {
        let mut bucket = Bucket::new(Rate::per_second(100), Instant(0));
        assert_eq!(bucket.wait(Instant(0)), Duration::ZERO);
        bucket.take(1000 * NANO);
        // 1000 units less the capacity of 10 at 100 per second.
        assert_eq!(bucket.wait(Instant(0)), Duration::from_millis(9900));
        assert_eq!(bucket.wait(Instant(9 * SECOND)), Duration::from_millis(900));
        assert_eq!(bucket.wait(Instant(10 * SECOND)), Duration::ZERO);
    }

    #[test]
    fn a_long_burst_runs_at_the_burst_rate_and_then_at_the_average() {
        let rate = Rate { avg: 10, max: 100, max_length: 2 };
        let mut bucket = Bucket::new(rate, Instant(0));
        let at = starts(&mut bucket, 1, 0, 100 * SECOND);
        let until = |t: u64| at.iter().filter(|s| **s <= t).count();
        // A tenth of a second at 100/s at once (11 with the one that crosses), then 100/s.
        assert_eq!(until(0), 11);
        assert_eq!(until(SECOND), 111);
        // Once the capacity of 200 is used up, 10/s: after ten seconds 200 + 10 * 10, and the one that crosses.
        let end = until(10 * SECOND);
        assert_eq!(end, 301);
        assert_eq!(until(20 * SECOND) - end, 100);
    }

    #[test]
    fn a_rate_below_one_in_a_tenth_of_a_second_still_lets_the_first_request_through() {
        let mut bucket = Bucket::new(Rate::per_second(1), Instant(5));
        assert_eq!(bucket.wait(Instant(5)), Duration::ZERO);
        bucket.take(NANO);
        assert_eq!(bucket.wait(Instant(5)), Duration::from_millis(900));
    }

    #[test]
    fn changing_the_rate_keeps_the_debt_and_lifting_it_forgives() {
        let mut bucket = Bucket::new(Rate::per_second(100), Instant(0));
        bucket.take(1010 * NANO);
        bucket.set_rate(Rate::per_second(1000), Instant(0));
        assert_eq!(bucket.wait(Instant(0)), Duration::from_millis(910));
        bucket.set_rate(Rate::UNLIMITED, Instant(0));
        assert_eq!(bucket.wait(Instant(0)), Duration::ZERO);
        bucket.set_rate(Rate::per_second(1), Instant(0));
        assert_eq!(bucket.wait(Instant(0)), Duration::ZERO);
    }

    #[test]
    fn what_is_given_back_can_be_taken_again() {
        let mut bucket = Bucket::new(Rate::per_second(10), Instant(0));
        bucket.take(5 * NANO);
        let wait = bucket.wait(Instant(0));
        assert!(wait > Duration::ZERO);
        bucket.take(3 * NANO);
        bucket.give_back(3 * NANO);
        assert_eq!(bucket.wait(Instant(0)), wait);
        bucket.give_back(5 * NANO);
        assert_eq!(bucket.wait(Instant(0)), Duration::ZERO);
    }

    #[test]
    fn a_clock_that_steps_back_gives_no_time_twice() {
        let mut bucket = Bucket::new(Rate::per_second(10), Instant(SECOND));
        bucket.take(11 * NANO);
        assert_eq!(bucket.wait(Instant(SECOND)), Duration::from_secs(1));
        assert_eq!(bucket.wait(Instant(0)), Duration::from_secs(1));
        assert_eq!(bucket.wait(Instant(SECOND + SECOND / 2)), Duration::from_millis(500));
        assert_eq!(bucket.wait(Instant(SECOND + SECOND / 4)), Duration::from_millis(500));
    }

    #[test]
    fn the_largest_rates_and_debts_do_not_overflow() {
        let rate = Rate { avg: RATE_MAX, max: RATE_MAX, max_length: 1 };
        let mut bucket = Bucket::new(rate, Instant(0));
        for _ in 0..4 {
            bucket.take(NanoUnits::from(u64::MAX) * NANO);
        }
        assert!(bucket.wait(Instant(0)) > Duration::ZERO);
        assert_eq!(bucket.wait(Instant(u64::MAX)), Duration::ZERO);
        let mut slow = Bucket::new(Rate::per_second(1), Instant(0));
        slow.take(NanoUnits::MAX);
        assert_eq!(slow.wait(Instant(0)), Duration::from_nanos(u64::MAX));
    }
}
