//! The buffers of all background copies of a context (S53).
//!
//! A part takes its buffer before it claims or reads anything and the buffer goes back when its last user has let go of it: also a write that
//! never ends, of a job that was cancelled long ago. So that such a write starves nobody, each job may use only a part of the pool, and one
//! part of a job (the first it has in flight) is always granted. Copies for the guest never come here.

use crate::limits::BATCH_LEN;
use crate::request::arena::{Arena, Runs};
use crate::request::{Buffers, MemOwner};
use crate::sync::{Arc, Mutex};
use event_listener::{Event, EventListener};

/// Bytes in use by the parts of all jobs, beside the one part that each job is granted.
pub const POOL_BYTES: u64 = 32 << 20;
/// Bytes in use by the parts of one job, unless a single part is larger.
pub const JOB_BYTES: u64 = 16 << 20;

const _: () = assert!(JOB_BYTES < POOL_BYTES && JOB_BYTES >= BATCH_LEN);

/// The pool of one context. Its memory is the system's again when the last job has ended.
#[derive(Debug)]
pub struct Pool {
    arena: Arc<Arena>,
    state: Mutex<State>,
    freed: Event,
}

#[derive(Debug, Default)]
struct State {
    used: u64,
    shares: usize,
}

/// A job's access to the pool.
#[derive(Debug)]
pub struct PoolShare {
    pool: Arc<Pool>,
    /// Outlives the share in the buffers that are still out.
    used: Arc<Mutex<u64>>,
}

/// Memory that is out; accounted for until its last user has let go of it.
#[derive(Debug)]
struct Held {
    pool: Arc<Pool>,
    share: Arc<Mutex<u64>>,
    runs: Runs,
    size: u64,
}

impl Default for Pool {
    fn default() -> Self {
        Self { arena: Arena::new(POOL_BYTES), state: Mutex::default(), freed: Event::new() }
    }
}

impl Pool {
    /// A share for one job. Buffers taken from it may outlive it.
    pub fn share(self: &Arc<Self>) -> PoolShare {
        self.state.lock().shares += 1;
        PoolShare { pool: self.clone(), used: Arc::default() }
    }

    /// Bytes in use.
    pub fn used(&self) -> u64 {
        self.state.lock().used
    }

    /// Bytes that the pool has from the system.
    pub fn mapped(&self) -> u64 {
        self.arena.mapped()
    }
}

impl PoolShare {
    /// A buffer of `len` bytes (at least 1) with undefined content, if the job may have it now. Listen to [`PoolShare::listen`] first to wait for it.
    pub fn try_take(&self, len: u64) -> Option<Buffers> {
        let size = Arena::size_of(len);
        let mut used = self.used.lock();
        let mut state = self.pool.state.lock();
        if *used > 0 && (*used + size > JOB_BYTES || state.used + size > POOL_BYTES) {
            return None;
        }
        *used += size;
        state.used += size;
        drop(state);
        drop(used);
        let runs = self.pool.arena.alloc(len as usize);
        let held = Arc::new(Held { pool: self.pool.clone(), share: self.used.clone(), runs, size });
        let owner: MemOwner = held.clone();
        let mut bufs = Buffers::new();
        for run in &held.runs {
            let left = len as usize - bufs.len();
            bufs.push(run.segment(left.min(run.size()), owner.clone()));
        }
        Some(bufs)
    }

    /// Notified when something has been given back.
    pub fn listen(&self) -> EventListener {
        self.pool.freed.listen()
    }

    /// Bytes of the job in use.
    pub fn used(&self) -> u64 {
        *self.used.lock()
    }
}

impl Drop for PoolShare {
    fn drop(&mut self) {
        let mut state = self.pool.state.lock();
        state.shares -= 1;
        let last = state.shares == 0;
        drop(state);
        if last {
            self.pool.arena.trim();
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        drop(std::mem::take(&mut self.runs));
        *self.share.lock() -= self.size;
        let mut state = self.pool.state.lock();
        state.used -= self.size;
        let idle = state.shares == 0;
        drop(state);
        if idle {
            self.pool.arena.trim();
        }
        self.pool.freed.notify(usize::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_gets_its_share_and_no_more_until_something_comes_back() {
        let pool = Arc::new(Pool::default());
        let share = pool.share();
        let mut held: Vec<Buffers> = std::iter::from_fn(|| share.try_take(BATCH_LEN)).collect();
        assert_eq!(held.len() as u64, JOB_BYTES / BATCH_LEN);
        let listener = share.listen();
        assert!(share.try_take(512).is_none());
        held.pop();
        assert!(listener.notified_now());
        assert!(share.try_take(512).is_some());
    }

    #[test]
    fn jobs_with_hung_writes_leave_every_other_job_one_part() {
        let pool = Arc::new(Pool::default());
        let shares: Vec<_> = (0..8).map(|_| pool.share()).collect();
        let hung: Vec<Buffers> =
            shares.iter().flat_map(|s| std::iter::from_fn(|| s.try_take(BATCH_LEN))).collect();
        assert!(pool.used() >= POOL_BYTES && pool.used() <= POOL_BYTES + 8 * BATCH_LEN);
        let late = pool.share();
        let part = late.try_take(BATCH_LEN).expect("the first part is granted");
        assert!(late.try_take(BATCH_LEN).is_none());
        // A part larger than the job's share goes alone.
        drop(part);
        assert!(late.try_take(JOB_BYTES * 2).is_some());
        drop(shares);
        assert!(hung.iter().all(|b| b.len() as u64 == BATCH_LEN));
        drop(hung);
        assert_eq!(pool.used(), 0);
    }

    #[test]
    fn memory_is_the_systems_again_when_the_last_job_and_the_last_buffer_have_gone() {
        let pool = Arc::new(Pool::default());
        let share = pool.share();
        let (first, second) = (share.try_take(BATCH_LEN).expect("room"), share.try_take(512).expect("room"));
        assert_eq!((first.len() as u64, second.len(), pool.used()), (BATCH_LEN, 512, BATCH_LEN + 4096));
        second.fill(1);
        drop(first);
        assert!(pool.mapped() > 0, "kept while there are jobs");
        drop(share);
        assert!(pool.mapped() > 0, "a buffer is still out");
        drop(second);
        assert_eq!((pool.used(), pool.mapped()), (0, 0));
    }

    trait Notified {
        fn notified_now(self) -> bool;
    }

    impl Notified for EventListener {
        fn notified_now(self) -> bool {
            use event_listener::Listener;
            self.wait_timeout(std::time::Duration::ZERO).is_some()
        }
    }
}
