//! Amounts per second over the last seconds, and when a cache will be full.
//!
//! Time is an argument, in nanoseconds of any clock that does not run backwards (a moment before one already seen counts
//! as that one). Nothing here locks: a [`Rate`] lives beside what it measures, under the same lock.

/// The time over which rates are taken: long enough to span the bursts of a guest, short enough to warn in time.
pub const WINDOW_NS: u64 = 4_000_000_000;

/// Parts of the window; one is dropped as a whole, so the rate is over 31 parts and the beginning of one more.
const SLOTS: usize = 32;
const SLOT_NS: u64 = WINDOW_NS / SLOTS as u64;
const NS_PER_S: u128 = 1_000_000_000;

/// How much per second, over the last [`WINDOW_NS`].
#[derive(Clone, Debug)]
pub struct Rate {
    slots: [u64; SLOTS],
    /// When measuring began.
    start_ns: u64,
    /// The latest moment seen.
    now_ns: u64,
}

impl Rate {
    /// A rate of 0 that is measured from `now_ns` on.
    pub const fn new(now_ns: u64) -> Self {
        Self { slots: [0; SLOTS], start_ns: now_ns, now_ns }
    }

    /// Counts `amount` at `now_ns`.
    pub fn add(&mut self, now_ns: u64, amount: u64) {
        let old = self.now_ns / SLOT_NS;
        self.now_ns = self.now_ns.max(now_ns);
        let new = self.now_ns / SLOT_NS;
        for slot in (old + 1..=new).rev().take(SLOTS) {
            self.slots[place(slot)] = 0;
        }
        let current = &mut self.slots[place(new)];
        *current = current.saturating_add(amount);
    }

    /// The amount per second at `now_ns`; saturates. In the first moments the time is taken as one part of the window (an
    /// eighth of a second), so that the first request is not taken for a flood.
    pub fn per_second(&self, now_ns: u64) -> u64 {
        let now_ns = self.now_ns.max(now_ns);
        let newest = now_ns / SLOT_NS;
        let oldest = newest.saturating_sub(SLOTS as u64 - 1);
        let seen = self.now_ns / SLOT_NS;
        // What is newer than `seen` holds nothing yet, what is older than `oldest` counts no more.
        let sum: u128 = (oldest..=seen).map(|slot| u128::from(self.slots[place(slot)])).sum();
        let since = (oldest * SLOT_NS).max(self.start_ns);
        let time = (now_ns - since).max(SLOT_NS);
        u64::try_from(sum * NS_PER_S / u128::from(time)).unwrap_or(u64::MAX)
    }
}

/// What goes into a cache and out of it.
#[derive(Clone, Debug)]
pub struct FillRate {
    fill: Rate,
    drain: Rate,
}

impl FillRate {
    /// Measures from `now_ns` on.
    pub const fn new(now_ns: u64) -> Self {
        Self { fill: Rate::new(now_ns), drain: Rate::new(now_ns) }
    }

    /// `bytes` went in.
    pub fn filled(&mut self, now_ns: u64, bytes: u64) {
        self.fill.add(now_ns, bytes);
    }

    /// `bytes` went out.
    pub fn drained(&mut self, now_ns: u64, bytes: u64) {
        self.drain.add(now_ns, bytes);
    }

    /// Bytes per second going in.
    pub fn fill_rate(&self, now_ns: u64) -> u64 {
        self.fill.per_second(now_ns)
    }

    /// Bytes per second going out.
    pub fn drain_rate(&self, now_ns: u64) -> u64 {
        self.drain.per_second(now_ns)
    }

    /// [`time_to_full_ms`] at the rates of `now_ns`.
    pub fn time_to_full_ms(&self, now_ns: u64, capacity: u64, used: u64) -> u64 {
        time_to_full_ms(capacity, used, self.fill_rate(now_ns), self.drain_rate(now_ns))
    }
}

/// (capacity - used) / (fill - drain) in milliseconds, rounded down; `u64::MAX`, "never", if nothing is gained. Bytes and
/// bytes per second. A cache that is full and goes on filling has 0 left.
pub fn time_to_full_ms(capacity: u64, used: u64, fill: u64, drain: u64) -> u64 {
    let gain = match fill.checked_sub(drain) {
        None | Some(0) => return u64::MAX,
        Some(gain) => u128::from(gain),
    };
    let room = u128::from(capacity.saturating_sub(used));
    u64::try_from(room * 1000 / gain).unwrap_or(u64::MAX)
}

fn place(slot: u64) -> usize {
    (slot % SLOTS as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const S: u64 = 1_000_000_000;
    const MS: u64 = 1_000_000;

    #[test]
    fn a_steady_stream_has_its_rate() {
        for start in [0, 1, 77 * S + 3] {
            let mut rate = Rate::new(start);
            for ms in 0..10_000 {
                let now = start + ms * MS;
                rate.add(now, 5000);
                if ms >= 1000 {
                    let read = rate.per_second(now);
                    assert!((4_990_000..=5_010_000).contains(&read), "{read} after {ms} ms");
                }
            }
        }
    }

    #[test]
    fn nothing_is_left_after_the_window() {
        let mut rate = Rate::new(0);
        rate.add(S, 4000);
        assert_eq!(rate.per_second(S), 4000);
        assert!(rate.per_second(S + WINDOW_NS - SLOT_NS) > 0);
        assert_eq!(rate.per_second(S + WINDOW_NS), 0);
        assert_eq!(rate.per_second(u64::MAX), 0);
        rate.add(S + WINDOW_NS, 0);
        assert_eq!(rate.per_second(S + WINDOW_NS), 0);
    }

    #[test]
    fn the_first_request_is_no_flood() {
        let mut rate = Rate::new(10 * S);
        rate.add(10 * S, 1000);
        assert_eq!(rate.per_second(10 * S), 1000 * S / SLOT_NS);
        assert_eq!(rate.per_second(11 * S), 1000);
    }

    #[test]
    fn a_clock_that_runs_backwards_counts_as_standing() {
        let mut rate = Rate::new(5 * S);
        rate.add(6 * S, 100);
        rate.add(3 * S, 100);
        assert_eq!(rate.per_second(0), 200);
        assert_eq!(rate.per_second(6 * S), 200);
    }

    #[test]
    fn huge_amounts_and_moments_saturate() {
        let mut rate = Rate::new(0);
        rate.add(u64::MAX, u64::MAX);
        rate.add(u64::MAX, u64::MAX);
        assert!(rate.per_second(u64::MAX) > u64::MAX / 8);
        let mut rate = Rate::new(0);
        rate.add(0, u64::MAX);
        assert_eq!(rate.per_second(0), u64::MAX);
    }

    #[test]
    fn time_to_full_is_room_over_gain() {
        assert_eq!(time_to_full_ms(1000, 500, 300, 50), 2000);
        assert_eq!(time_to_full_ms(1000, 500, 3, 0), 166_666);
        assert_eq!(time_to_full_ms(1000, 1000, 1, 0), 0);
        assert_eq!(time_to_full_ms(1000, 2000, 1, 0), 0);
        assert_eq!(time_to_full_ms(u64::MAX, 0, 1, 0), u64::MAX);
    }

    #[test]
    fn a_cache_that_does_not_gain_is_never_full() {
        assert_eq!(time_to_full_ms(1000, 0, 0, 0), u64::MAX);
        assert_eq!(time_to_full_ms(1000, 500, 50, 50), u64::MAX);
        assert_eq!(time_to_full_ms(1000, 1000, 50, 51), u64::MAX);
    }

    #[test]
    fn fill_and_drain_are_set_against_each_other() {
        let mut rate = FillRate::new(0);
        assert_eq!(rate.time_to_full_ms(0, 1 << 20, 0), u64::MAX);
        for tick in 1..=40 {
            rate.filled(tick * 100 * MS, 3000);
            rate.drained(tick * 100 * MS, 1000);
        }
        let now = 4 * S;
        let (fill, drain) = (rate.fill_rate(now), rate.drain_rate(now));
        assert!(fill.abs_diff(30_000) < 1000 && drain.abs_diff(10_000) < 500, "{fill} {drain}");
        let left = rate.time_to_full_ms(now, 200_000, 100_000);
        assert!(left.abs_diff(5000) < 200, "{left}");
        assert_eq!(rate.time_to_full_ms(now + 2 * WINDOW_NS, 200_000, 100_000), u64::MAX);
    }

    proptest! {
        /// Against a list of all events: the sum lies between that of a window without the oldest part and that of the whole window.
        #[test]
        fn the_rate_is_that_of_the_last_seconds(
            events in proptest::collection::vec((0u64..500 * MS, 0u64..1 << 30), 1..100),
            later in 0u64..6 * S,
        ) {
            let begin = 100 * S;
            let mut rate = Rate::new(begin);
            let mut now = begin;
            let mut list = Vec::new();
            for (step, amount) in events {
                now += step;
                rate.add(now, amount);
                list.push((now, amount));
            }
            now += later;
            let within = |window: u64| -> u128 {
                list.iter().filter(|(at, _)| now - at < window).map(|(_, amount)| u128::from(*amount)).sum()
            };
            let read = u128::from(rate.per_second(now));
            let time = |window: u64| u128::from((now - begin).min(window).max(SLOT_NS));
            let low = within(WINDOW_NS - SLOT_NS) * NS_PER_S / time(WINDOW_NS);
            let high = within(WINDOW_NS) * NS_PER_S / time(WINDOW_NS - SLOT_NS);
            prop_assert!(low <= read && read <= high, "{} <= {} <= {}", low, read, high);
        }
    }
}
