//! The buffers of all background copies of a context (S53).
//!
//! A part takes its buffer before it claims or reads anything and the buffer goes back when its last user has let go of it: also a write that
//! never ends, of a job that was cancelled long ago. So that such a write starves nobody, each job may use only a part of the pool, and one
//! part of a job (the first it has in flight) is always granted. Copies for the guest never come here.

use crate::limits::BATCH_LEN;
use crate::request::{AlignedMem, Buffers};
use crate::sync::{Arc, Mutex};
use event_listener::{Event, EventListener};

/// Bytes in use by the parts of all jobs, beside the one part that each job is granted.
pub const POOL_BYTES: u64 = 32 << 20;
/// Bytes in use by the parts of one job, unless a single part is larger.
pub const JOB_BYTES: u64 = 16 << 20;
/// Alignment of the buffers: enough for any device.
const ALIGN: usize = 4096;

const _: () = assert!(JOB_BYTES < POOL_BYTES && JOB_BYTES >= BATCH_LEN);

/// The pool of one context.
#[derive(Debug, Default)]
pub struct Pool {
    state: Mutex<State>,
    freed: Event,
}

#[derive(Default)]
struct State {
    used: u64,
    /// Buffers of one batch that nobody uses; kept while there are jobs.
    spare: Vec<AlignedMem>,
    shares: usize,
}

/// A job's access to the pool.
#[derive(Debug)]
pub struct PoolShare {
    pool: Arc<Pool>,
    /// Outlives the share in the buffers that are still out.
    used: Arc<Mutex<u64>>,
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

    fn back(&self, mem: AlignedMem) {
        let len = mem.len() as u64;
        let mut s = self.state.lock();
        s.used -= len;
        // Freed outside the lock, whichever of the two it is.
        let freed = if len == BATCH_LEN && s.shares > 0 {
            s.spare.push(mem);
            None
        } else {
            Some(mem)
        };
        drop(s);
        drop(freed);
        self.freed.notify(usize::MAX);
    }
}

impl PoolShare {
    /// A buffer of `len` bytes with undefined content, if the job may have it now. Listen to [`PoolShare::listen`] first to wait for it.
    pub fn try_take(&self, len: u64) -> Option<Buffers> {
        // A batch is the common size; buffers of it are used again.
        let size =
            if len <= BATCH_LEN && len > BATCH_LEN / 2 { BATCH_LEN } else { len.next_multiple_of(4096) };
        let mut used = self.used.lock();
        let mut s = self.pool.state.lock();
        if *used > 0 && (*used + size > JOB_BYTES || s.used + size > POOL_BYTES) {
            return None;
        }
        *used += size;
        s.used += size;
        let spare = if size == BATCH_LEN { s.spare.pop() } else { None };
        drop(s);
        drop(used);
        let mem = spare.unwrap_or_else(|| AlignedMem::zeroed(size as usize, ALIGN));
        let (share, pool) = (self.used.clone(), self.pool.clone());
        let back = Box::new(move |mem: AlignedMem| {
            *share.lock() -= mem.len() as u64;
            pool.back(mem);
        });
        Some(mem.into_buffers_of(len as usize, back))
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
        let mut s = self.pool.state.lock();
        s.shares -= 1;
        let spare = if s.shares == 0 { std::mem::take(&mut s.spare) } else { Vec::new() };
        drop(s);
        drop(spare);
    }
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("used", &self.used).field("spare", &self.spare.len()).finish()
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
    fn memory_is_used_again_and_freed_with_the_last_job() {
        let pool = Arc::new(Pool::default());
        let share = pool.share();
        let first = share.try_take(BATCH_LEN).expect("room");
        first.slice(0, 1).fill(77);
        let at = first.segments()[0].as_ptr();
        drop(first);
        let second = share.try_take(BATCH_LEN).expect("room");
        assert_eq!(second.segments()[0].as_ptr(), at);
        drop(second);
        assert_eq!(pool.state.lock().spare.len(), 1);
        drop(share);
        assert_eq!((pool.used(), pool.state.lock().spare.len()), (0, 0));
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
