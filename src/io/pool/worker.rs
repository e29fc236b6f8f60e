//! Threads that may block.

use super::lanes::{LaneId, Lanes};
use super::timer::Timers;
use super::{STOP_MAX, THREADS_MAX};
use crate::io::file::sys;
use crate::rt::{Join, Runtime};
use crate::sync::{Arc, Condvar, Mutex};
use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A piece of work for a thread that may block. It catches its own panics, if it has to tell anybody about them.
pub type Job = Box<dyn FnOnce() + Send>;

/// The threads of one context; see the module.
pub struct Pool {
    shared: Arc<Shared>,
    pub(super) runtime: Runtime,
    pub(super) timers: Arc<Timers>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    work: Condvar,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    /// With the I/O priority to run at.
    jobs: Lanes<(u16, Job)>,
    threads: usize,
    /// Threads beyond [`THREADS_MAX`], which do only what must start.
    extra: usize,
    /// Threads that wait for work, those included that have been told and not yet woken up: their jobs are still in the list.
    idle: usize,
    /// Threads that have been started and have not taken a job yet.
    coming: usize,
    started: usize,
    handles: Vec<Box<dyn Join>>,
    stop: bool,
}

impl Pool {
    /// A pool without threads; they come with the work.
    pub fn new(runtime: &Runtime) -> Arc<Self> {
        Arc::new(Self { shared: Arc::default(), runtime: runtime.clone(), timers: Arc::default() })
    }

    /// Runs `job` of a lane on a thread, at this I/O priority (0 is the default). If no thread can be started and there is none, it runs here: slow, but nothing is lost.
    pub fn run(&self, lane: LaneId, priority: u16, job: Job) {
        let mut s = self.shared.state.lock();
        s.jobs.push(lane, (priority, job));
        let (can, must) = s.jobs.startable();
        let extra = s.threads - s.extra >= THREADS_MAX;
        if s.idle + s.coming >= if extra { must } else { can } {
            drop(s);
            self.shared.work.notify_one();
            return;
        }
        s.threads += 1;
        s.extra += usize::from(extra);
        s.coming += 1;
        s.started += 1;
        let name = format!("cobweb-io-{}", s.started);
        drop(s);
        let shared = self.shared.clone();
        let thread = self.runtime.spawn.spawn(&name, Box::new(move || shared.work(extra)));
        let mut s = self.shared.state.lock();
        match thread {
            Ok(handle) => {
                // Those of extra threads that have ended would gather.
                s.handles.retain(|h| !h.has_ended());
                s.handles.push(handle);
            }
            Err(_) => {
                s.threads -= 1;
                s.extra -= usize::from(extra);
                s.coming -= 1;
                if s.threads == 0
                    && let Some((lane, (_, job))) = s.jobs.take(false)
                {
                    drop(s);
                    job();
                    self.shared.state.lock().jobs.end(lane);
                }
            }
        }
    }
}

thread_local! {
    /// The pool whose thread this is, for the case that its last user goes on it.
    static POOL: Cell<*const Shared> = const { Cell::new(std::ptr::null()) };
}

impl Shared {
    fn work(&self, extra: bool) {
        POOL.set(self);
        let mut s = self.state.lock();
        s.coming -= 1;
        loop {
            if let Some((lane, (priority, job))) = s.jobs.take(extra) {
                drop(s);
                sys::set_io_priority(priority);
                // A job catches its own panics; if one does not, the thread goes on all the same.
                let _ = catch_unwind(AssertUnwindSafe(job));
                s = self.state.lock();
                s.jobs.end(lane);
            } else if s.stop || extra {
                s.threads -= 1;
                s.extra -= usize::from(extra);
                self.ended.notify_all();
                return;
            } else {
                s.idle += 1;
                s = self.work.wait(s);
                s.idle -= 1;
            }
        }
    }
}

impl Pool {
    /// Ends the threads and waits for them, but not for one that hangs in a system call: it keeps what it works on and ends by itself. Nor for the caller, if
    /// it is one of them. Work that comes later is done by threads that end after it.
    pub fn stop(&self) {
        self.timers.stop();
        let own = usize::from(std::ptr::eq(POOL.get(), &*self.shared));
        let mut s = self.shared.state.lock();
        s.stop = true;
        self.shared.work.notify_all();
        let until = self.runtime.clock.now().after(STOP_MAX);
        while s.threads > own {
            let left = until.since(self.runtime.clock.now());
            if left.is_zero() {
                return;
            }
            s = self.shared.ended.wait_timeout(s, left);
        }
        let handles = std::mem::take(&mut s.handles);
        drop(s);
        if own == 0 {
            handles.into_iter().for_each(|h| h.join());
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.stop();
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = self.shared.state.lock();
        f.debug_struct("Pool").field("threads", &s.threads).field("jobs", &s.jobs.waiting()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::io_priority;
    use crate::io::pool::LANE_THREADS_MAX;
    use crate::request::Class;
    use crate::rt::real;
    use crate::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::Barrier;

    #[test]
    fn jobs_run_side_by_side_and_idle_threads_are_used_again() {
        let pool = Pool::new(&real::runtime());
        let done = Arc::new(AtomicUsize::new(0));
        for round in 1..=3 {
            // Nobody passes the barrier unless all are running at once.
            let barrier = Arc::new(Barrier::new(9));
            for _ in 0..8 {
                let (barrier, done) = (barrier.clone(), done.clone());
                pool.run(
                    0,
                    0,
                    Box::new(move || {
                        barrier.wait();
                        done.fetch_add(1, Ordering::SeqCst);
                    }),
                );
            }
            barrier.wait();
            while done.load(Ordering::SeqCst) < 8 * round {
                std::thread::yield_now();
            }
        }
        assert!(pool.shared.state.lock().started <= THREADS_MAX);
    }

    #[test]
    fn dropping_the_pool_runs_what_was_queued_and_joins_the_threads() {
        let pool = Pool::new(&real::runtime());
        let done = Arc::new(AtomicUsize::new(0));
        for _ in 0..200 {
            let done = done.clone();
            pool.run(
                0,
                0,
                Box::new(move || {
                    done.fetch_add(1, Ordering::SeqCst);
                }),
            );
        }
        let shared = pool.shared.clone();
        drop(pool);
        assert_eq!(done.load(Ordering::SeqCst), 200);
        assert_eq!(shared.state.lock().threads, 0);
        // The threads have given up their share, so they are really gone.
        assert_eq!(Arc::strong_count(&shared), 1);
    }

    #[test]
    fn a_job_runs_at_its_own_priority_whatever_its_thread_did_before() {
        let pool = Pool::new(&real::runtime());
        let (tell, told) = std::sync::mpsc::channel();
        let normal = sys::io_priority();
        for priority in
            [0, io_priority(Class::Lazy), 0, io_priority(Class::Background), io_priority(Class::Lazy), 0]
        {
            let tell = tell.clone();
            pool.run(0, priority, Box::new(move || tell.send(sys::io_priority()).expect("heard")));
            let seen = told.recv().expect("it runs");
            assert_eq!(seen, if priority == 0 { normal } else { priority });
        }
    }

    #[test]
    fn a_panic_of_a_job_does_not_cost_a_thread() {
        let pool = Pool::new(&real::runtime());
        let (tell, told) = std::sync::mpsc::channel();
        pool.run(0, 0, Box::new(|| panic!("on purpose")));
        pool.run(0, 0, Box::new(move || tell.send(()).expect("the test waits")));
        told.recv().expect("the second job runs");
        let shared = pool.shared.clone();
        drop(pool);
        assert_eq!(shared.state.lock().threads, 0);
    }

    #[test]
    fn the_job_that_is_the_last_user_of_the_pool_does_not_wait_for_itself() {
        let pool = Pool::new(&real::runtime());
        let (shared, clock) = (pool.shared.clone(), pool.runtime.clock.clone());
        let (tell, told) = std::sync::mpsc::channel();
        let (give, take) = std::sync::mpsc::channel::<Arc<Pool>>();
        pool.run(
            0,
            0,
            Box::new(move || {
                let last = take.recv().expect("handed over");
                let began = clock.now();
                drop(last);
                tell.send(clock.now().since(began)).expect("the test waits");
            }),
        );
        give.send(pool).expect("it runs");
        let took = told.recv().expect("it ends");
        assert!(took < STOP_MAX, "{took:?}");
        while shared.state.lock().threads > 0 {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_lane_of_which_nothing_runs_goes_on_when_all_threads_hang() {
        let pool = Pool::new(&real::runtime());
        let (release, hang) = std::sync::mpsc::channel::<()>();
        let hang = Arc::new(Mutex::new(hang));
        let (tell, told) = std::sync::mpsc::channel();
        // Five lanes fill all threads.
        for n in 0..5 * LANE_THREADS_MAX {
            let (hang, tell) = (hang.clone(), tell.clone());
            let job = move || {
                tell.send(0).expect("the test waits");
                let _ = hang.lock().recv();
            };
            pool.run(1 + n % 5, 0, Box::new(job));
        }
        (0..THREADS_MAX).for_each(|_| assert_eq!(told.recv(), Ok(0), "hangs"));
        assert_eq!(pool.shared.state.lock().threads, THREADS_MAX);
        // Others: one at a time, many at once, and those of no file.
        for n in 1..100 {
            let tell = tell.clone();
            pool.run(100 + n % 7, 0, Box::new(move || tell.send(n).expect("the test waits")));
            assert_eq!(told.recv(), Ok(n), "goes on");
        }
        for n in 1..=300 {
            let tell = tell.clone();
            pool.run(
                if n % 3 == 0 { 0 } else { 100 + n % 7 },
                0,
                Box::new(move || tell.send(n).expect("heard")),
            );
        }
        let mut all: Vec<_> = (0..300).map(|_| told.recv().expect("goes on")).collect();
        all.sort_unstable();
        assert_eq!(all, (1..=300).collect::<Vec<_>>());
        // Their threads end by themselves.
        while pool.shared.state.lock().extra > 0 {
            std::thread::yield_now();
        }
        assert_eq!(pool.shared.state.lock().threads, THREADS_MAX);
        drop(release);
        (0..5 * LANE_THREADS_MAX - THREADS_MAX).for_each(|_| assert_eq!(told.recv(), Ok(0), "had waited"));
        let shared = pool.shared.clone();
        drop(pool);
        assert_eq!(shared.state.lock().threads, 0);
    }

    #[test]
    fn a_thread_that_hangs_is_left_behind() {
        let pool = Pool::new(&real::runtime());
        let (release, hang) = std::sync::mpsc::channel::<()>();
        let (tell, told) = std::sync::mpsc::channel();
        pool.run(
            0,
            0,
            Box::new(move || {
                tell.send(()).expect("the test waits");
                let _ = hang.recv();
            }),
        );
        told.recv().expect("it hangs");
        let shared = pool.shared.clone();
        drop(pool);
        assert_eq!(shared.state.lock().threads, 1);
        drop(release);
    }
}
