//! `sync` over loom.
//!
//! `Arc` stays std's: loom's own cannot be a receiver (`self: &Arc<Self>`). loom does not see the edges of its counts,
//! so a model joins its threads where it relies on them.

pub use crossbeam_epoch as epoch;
pub use loom::cell::UnsafeCell;
pub use loom::sync::atomic;
pub use loom::thread;
pub use std::sync::{Arc, Weak};

/// A mutex that ignores poisoning, as in `real`.
#[derive(Debug, Default)]
pub struct Mutex<T>(loom::sync::Mutex<T>);

/// Guard of [`Mutex`].
pub type MutexGuard<'a, T> = loom::sync::MutexGuard<'a, T>;

impl<T> Mutex<T> {
    /// A new, unlocked mutex.
    pub fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    /// Locks.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }
}
