//! The seams bound to the system.

use super::{Clock, Instant, Join, Rng, Runtime, Spawn};
use crate::sync::Arc;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// CLOCK_MONOTONIC and CLOCK_REALTIME.
#[derive(Debug)]
pub struct SystemClock {
    start: std::time::Instant,
}

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant(u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    fn wall_ns(&self) -> u64 {
        std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |d| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX))
    }
}

/// splitmix64 from a seed: good enough for fault probabilities, and reproducible.
#[derive(Debug)]
pub struct SplitMix(AtomicU64);

impl SplitMix {
    /// A generator with this seed.
    pub fn new(seed: u64) -> Self {
        Self(AtomicU64::new(seed))
    }
}

impl Rng for SplitMix {
    fn next(&self) -> u64 {
        let mut z = self.0.fetch_add(0x9e37_79b9_7f4a_7c15, Relaxed).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// Threads of the system.
#[derive(Debug)]
pub struct Threads;

impl Spawn for Threads {
    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> std::io::Result<Box<dyn Join>> {
        let handle = crate::io::file::sys::with_signals_blocked(|| {
            std::thread::Builder::new().name(name.to_owned()).spawn(body)
        })?;
        Ok(Box::new(Thread(handle)))
    }
}

struct Thread(std::thread::JoinHandle<()>);

impl Join for Thread {
    fn join(self: Box<Self>) {
        // A panic of the thread has been reported by its own boundary.
        let _ = self.0.join();
    }

    fn has_ended(&self) -> bool {
        self.0.is_finished()
    }
}

/// The system's time, threads and a generator seeded from the clock.
pub fn runtime() -> Runtime {
    let clock = SystemClock { start: std::time::Instant::now() };
    let seed = clock.wall_ns();
    Runtime { clock: Arc::new(clock), rng: Arc::new(SplitMix::new(seed)), spawn: Arc::new(Threads) }
}
