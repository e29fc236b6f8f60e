//! How far a job is, how fast, and how long it will take. Pure arithmetic over times passed in.

use crate::rt::Instant;
use crate::stats::Rate;
use crate::sync::Mutex;
use std::time::Duration;

/// Progress of one job in bytes. Any thread.
#[derive(Debug)]
pub struct Progress {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    current: u64,
    total: u64,
    rate: Rate,
}

impl Progress {
    /// Nothing of nothing, measured from `now` on.
    pub fn new(now: Instant) -> Self {
        Self { state: Mutex::new(State { current: 0, total: 0, rate: Rate::new(now.0) }) }
    }

    /// Sets what the whole job is.
    pub fn set_total(&self, total: u64) {
        let mut s = self.state.lock();
        s.total = total;
        s.current = s.current.min(total);
    }

    /// Tells how much is done; never goes back (S57) and never past the total.
    pub fn advance_to(&self, now: Instant, done: u64) {
        let mut s = self.state.lock();
        let done = done.min(s.total);
        if done > s.current {
            let more = done - s.current;
            s.rate.add(now.0, more);
            s.current = done;
        }
    }

    /// Bytes done and bytes in all.
    pub fn get(&self) -> (u64, u64) {
        let s = self.state.lock();
        (s.current, s.total)
    }

    /// Bytes per second over the last seconds.
    pub fn rate(&self, now: Instant) -> u64 {
        self.state.lock().rate.per_second(now.0)
    }

    /// Time to the end at the present rate; `None` without progress.
    pub fn eta(&self, now: Instant) -> Option<Duration> {
        let rate = self.rate(now);
        let (current, total) = self.get();
        if current == total {
            return Some(Duration::ZERO);
        }
        let left = u128::from(total - current) * 1000;
        (rate > 0).then(|| Duration::from_millis(u64::try_from(left / u128::from(rate)).unwrap_or(u64::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Instant {
        Instant(n * 1_000_000)
    }

    #[test]
    fn progress_never_goes_back_and_never_past_the_total() {
        let p = Progress::new(ms(0));
        p.set_total(100);
        p.advance_to(ms(0), 60);
        p.advance_to(ms(1), 40);
        assert_eq!(p.get(), (60, 100));
        p.advance_to(ms(2), 1000);
        assert_eq!(p.get(), (100, 100));
        assert_eq!(p.eta(ms(3)), Some(Duration::ZERO));
    }

    #[test]
    fn rate_and_eta_follow_the_last_seconds() {
        let p = Progress::new(ms(0));
        p.set_total(1_000_000);
        assert_eq!((p.rate(ms(0)), p.eta(ms(0))), (0, None));
        for i in 0..=100 {
            p.advance_to(ms(i * 100), i * 100);
        }
        let (rate, eta) = (p.rate(ms(10_000)), p.eta(ms(10_000)).expect("there is progress"));
        assert!((950..=1050).contains(&rate), "{rate}");
        assert!((940..=1040).contains(&eta.as_secs()), "{eta:?}");
        // A stall shows as a falling rate, and then there is no end in sight.
        assert!(p.rate(ms(12_000)) < 600);
        assert_eq!((p.rate(ms(60_000)), p.eta(ms(60_000))), (0, None));
    }
}
