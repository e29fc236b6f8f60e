//! How fast the cache fills, and the marks at whose crossing the host is told (section 6).

use crate::rt::Instant;
use crate::stats::FillRate;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};
use once_cell::sync::OnceCell;

/// A mark is armed again when occupancy has fallen this many per cent of the capacity below it.
const REARM_PERCENT: u64 = 2;

/// Receives a mark in per cent and the time to full in milliseconds.
type OnMark = Box<dyn Fn(u64, u64) + Send + Sync>;

/// Rates and marks of one cache.
pub(super) struct Meter {
    state: Mutex<State>,
    on_mark: OnceCell<OnMark>,
    // Copies for the common case, in which nothing is crossed: the lowest armed mark, and the highest level that arms one.
    next_up: AtomicU64,
    next_down: AtomicU64,
}

struct State {
    rate: FillRate,
    capacity: u64,
    marks: Vec<Mark>,
}

struct Mark {
    percent: u64,
    bytes: u64,
    rearm: u64,
    armed: bool,
}

impl Meter {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            state: Mutex::new(State { rate: FillRate::new(now.0), capacity: 0, marks: Vec::new() }),
            on_mark: OnceCell::new(),
            next_up: AtomicU64::new(u64::MAX),
            next_down: AtomicU64::new(0),
        }
    }

    /// Who is told of marks; called without a lock. Once.
    pub(super) fn on_mark(&self, f: impl Fn(u64, u64) + Send + Sync + 'static) {
        let first = self.on_mark.set(Box::new(f)).is_ok();
        assert!(first, "a meter has one listener");
    }

    /// Sets the bytes that are 100 per cent, and the marks.
    pub(super) fn set_marks(&self, capacity: u64, percents: &[u64]) {
        let mut s = self.state.lock();
        s.capacity = capacity;
        let part = |percent: u64| (u128::from(capacity) * u128::from(percent) / 100) as u64;
        let mark = |percent: &u64| Mark {
            percent: *percent,
            bytes: part(*percent).max(1),
            rearm: part(percent.saturating_sub(REARM_PERCENT)),
            armed: true,
        };
        s.marks = percents.iter().map(mark).collect();
        self.publish(&s);
    }

    /// `bytes` went in; `used` are in use now.
    pub(super) fn filled(&self, now: Instant, bytes: u64, used: u64) {
        let mut s = self.state.lock();
        s.rate.filled(now.0, bytes);
        // Relaxed: written under the lock that is held.
        if used < self.next_up.load(Relaxed) && used >= self.next_down.load(Relaxed) {
            return;
        }
        let mut crossed = None;
        for m in &mut s.marks {
            m.armed |= used < m.rearm;
            if m.armed && used >= m.bytes {
                m.armed = false;
                crossed = crossed.max(Some(m.percent));
            }
        }
        self.publish(&s);
        let left = s.rate.time_to_full_ms(now.0, s.capacity, used);
        drop(s);
        if let (Some(percent), Some(tell)) = (crossed, self.on_mark.get()) {
            tell(percent, left);
        }
    }

    /// `bytes` went out.
    pub(super) fn drained(&self, now: Instant, bytes: u64) {
        self.state.lock().rate.drained(now.0, bytes);
    }

    /// Milliseconds until the cache is full; `u64::MAX` if it does not fill.
    pub(super) fn time_to_full_ms(&self, now: Instant, used: u64) -> u64 {
        let s = self.state.lock();
        s.rate.time_to_full_ms(now.0, s.capacity, used)
    }

    fn publish(&self, s: &State) {
        let up = s.marks.iter().filter(|m| m.armed).map(|m| m.bytes).min();
        let down = s.marks.iter().filter(|m| !m.armed).map(|m| m.rearm).max();
        self.next_up.store(up.unwrap_or(u64::MAX), Relaxed);
        self.next_down.store(down.unwrap_or(0), Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Arc;

    const S: u64 = 1_000_000_000;

    #[test]
    fn a_mark_is_told_once_and_again_after_a_real_fall() {
        let told: Arc<Mutex<Vec<u64>>> = Arc::default();
        let meter = Meter::new(Instant(0));
        let log = told.clone();
        meter.on_mark(move |percent, _| log.lock().push(percent));
        meter.set_marks(1000, &[50, 80]);
        for used in [400, 499, 500, 600, 499, 510, 481, 520] {
            meter.filled(Instant(S), 1, used);
        }
        assert_eq!(*told.lock(), [50]);
        for used in [479, 500, 900] {
            meter.filled(Instant(S), 1, used);
        }
        assert_eq!(*told.lock(), [50, 50, 80]);
        meter.filled(Instant(S), 1, 100);
        meter.filled(Instant(S), 1, 1000);
        assert_eq!(*told.lock(), [50, 50, 80, 80], "of several marks crossed at once the highest is told");
    }

    #[test]
    fn the_time_to_full_comes_along() {
        let told: Arc<Mutex<Vec<(u64, u64)>>> = Arc::default();
        let meter = Meter::new(Instant(0));
        let log = told.clone();
        meter.on_mark(move |percent, left| log.lock().push((percent, left)));
        meter.set_marks(100_000, &[50]);
        meter.filled(Instant(S), 20_000, 40_000);
        meter.drained(Instant(S), 10_000);
        meter.filled(Instant(2 * S), 20_000, 50_000);
        let (percent, left) = told.lock()[0];
        assert!(percent == 50 && (3000..=3600).contains(&left), "{left}: 50000 left at 15000 per second");
        assert_eq!(meter.time_to_full_ms(Instant(100 * S), 50_000), u64::MAX);
    }
}
