//! Seams of nondeterminism: time, randomness, threads.
//!
//! The engine asks [`Clock`] for the time, [`Rng`] for random numbers and [`Spawn`] for threads, and reaches files only through an
//! [`crate::io::Engine`]. Production binds them to the system ([`real`]); a simulator binds them to one seeded thread. Code that
//! goes around the seams is a defect.

pub mod real;

use crate::sync::Arc;
use std::fmt::Debug;
use std::time::Duration;

/// Nanoseconds on a monotonic clock with an arbitrary start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Instant(pub u64);

impl Instant {
    /// This moment plus `d`; saturates.
    pub fn after(self, d: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// Time from `earlier` to this moment; 0 if it lies ahead.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

/// Source of time.
pub trait Clock: Send + Sync + Debug {
    /// Monotonic time.
    fn now(&self) -> Instant;
    /// Wall-clock nanoseconds since 1970, for reports only.
    fn wall_ns(&self) -> u64;
}

/// Source of randomness (probabilities of the `fault` node, test data).
pub trait Rng: Send + Sync + Debug {
    /// A random number.
    fn next(&self) -> u64;
}

/// Starts threads. The thread blocks all signals and carries `name` (C19).
pub trait Spawn: Send + Sync + Debug {
    /// Runs `body` on a new thread.
    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> std::io::Result<Box<dyn Join>>;
}

/// Handle of a started thread.
pub trait Join: Send {
    /// Waits until the thread has ended.
    fn join(self: Box<Self>);
    /// Whether it has ended, so that `join` would not wait.
    fn has_ended(&self) -> bool;
}

/// The seams of one context.
#[derive(Clone, Debug)]
pub struct Runtime {
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Randomness.
    pub rng: Arc<dyn Rng>,
    /// Threads.
    pub spawn: Arc<dyn Spawn>,
}
