//! The executor: tasks, passes, the drive token.

use super::driver::Driver;
use super::env::Env;
use super::host::HostHook;
use super::timer::Timers;
use crate::error::IoError;
use crate::io::{Completion, Engine, EngineOp, Notify, Tag};
use crate::rt::Instant;
use crate::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Arc, Mutex, MutexGuard, Weak};
use crossbeam::queue::SegQueue;
use once_cell::sync::OnceCell;
use std::fmt;
use std::future::Future;
use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

/// Polls per pass before it ends with the event fd signalled.
pub const PASS_POLLS_MAX: usize = 512;

/// Tasks run.
const OPEN: u8 = 0;
/// Tasks are being dropped, and no new ones are taken.
const CLOSING: u8 = 1;
/// No task has a future any more.
const CLOSED: u8 = 2;

type TaskFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

/// An engine with the tasks that use it; see the module text.
pub struct Exec {
    env: Arc<Env>,
    drive: Mutex<Driver>,
    ready: SegQueue<Arc<Task>>,
    /// Operations of tasks, on their way to the engine at the end of the poll loop.
    pub(super) outbox: Mutex<Vec<EngineOp>>,
    pub(super) timers: Mutex<Timers>,
    notify: Arc<dyn Notify>,
    /// Set while somebody is going to look; see `notify`.
    awake: AtomicBool,
    /// Time of the last pass (for the watchdog).
    last_pass_ns: AtomicU64,
    /// Tasks spawned and not yet ended.
    tasks: AtomicUsize,
    /// The same tasks, so that the end of the context reaches those that nobody will ever wake.
    list: Mutex<TaskList>,
    /// [`OPEN`], then [`CLOSING`], then [`CLOSED`]; see [`Exec::close`].
    life: AtomicU8,
    /// Nobody drives this executor any more; the watchdog does until its tasks have ended.
    orphan: AtomicBool,
    /// The host side, if a queue is bound to this executor.
    pub(super) host: OnceCell<Weak<dyn HostHook>>,
}

struct Task {
    exec: Arc<Exec>,
    /// Its place in the list of the executor.
    place: usize,
    queued: AtomicBool,
    future: Mutex<Option<TaskFuture>>,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // AcqRel: what the waker did before is seen by the poll that clears the flag.
        if !self.queued.swap(true, Ordering::AcqRel) {
            self.exec.push_ready(self.clone());
        }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        // Nobody could wake it any more. A future that has ended has been taken out.
        if self.future.get_mut().is_some() {
            self.exec.unlist(self.place);
        }
    }
}

/// Tasks by place; places are used again.
#[derive(Default)]
struct TaskList {
    places: Vec<Option<Weak<Task>>>,
    free: Vec<usize>,
}

impl Exec {
    /// An executor over a new engine of `depth` operations.
    pub(crate) fn new(env: &Arc<Env>, depth: u32) -> crate::error::Result<Arc<Self>> {
        Ok(Self::over(env, env.factory.open(depth)?))
    }

    /// An executor over an engine that is there already.
    pub(super) fn over(env: &Arc<Env>, engine: Box<dyn Engine>) -> Arc<Self> {
        let exec = Arc::new(Self {
            env: env.clone(),
            notify: engine.notify(),
            drive: Mutex::new(Driver::new(engine)),
            ready: SegQueue::new(),
            outbox: Mutex::new(Vec::new()),
            timers: Mutex::default(),
            awake: AtomicBool::new(false),
            last_pass_ns: AtomicU64::new(0),
            tasks: AtomicUsize::new(0),
            list: Mutex::default(),
            life: AtomicU8::new(OPEN),
            orphan: AtomicBool::new(false),
            host: OnceCell::new(),
        });
        env.register(&exec);
        exec
    }

    /// The engine of an executor that nobody uses any more; `None` if somebody does.
    pub(super) fn into_engine(self: Arc<Self>) -> Option<Box<dyn Engine>> {
        Arc::try_unwrap(self).ok().map(|exec| exec.drive.into_inner().engine)
    }

    /// The environment.
    pub fn env(&self) -> &Arc<Env> {
        &self.env
    }

    /// Current time.
    pub fn now(&self) -> Instant {
        self.env.runtime.clock.now()
    }

    /// Tasks that have not ended.
    pub fn tasks(&self) -> usize {
        self.tasks.load(Ordering::Acquire)
    }

    /// Starts a task. It is polled for the first time in the next pass.
    pub(crate) fn spawn(self: &Arc<Self>, future: TaskFuture) {
        let mut list = self.list.lock();
        // SeqCst, and written under the lock: `close` either finds the task in the list, or is seen here.
        if self.life.load(Ordering::SeqCst) != OPEN {
            drop(list);
            return drop(future);
        }
        self.tasks.fetch_add(1, Ordering::AcqRel);
        let place = list.free.pop().unwrap_or_else(|| {
            list.places.push(None);
            list.places.len() - 1
        });
        let task = Arc::new(Task {
            exec: self.clone(),
            place,
            queued: AtomicBool::new(true),
            future: Mutex::new(Some(future)),
        });
        list.places[place] = Some(Arc::downgrade(&task));
        drop(list);
        self.push_ready(task);
    }

    /// Never drops a future: wakers are called under locks of events, which futures that wait take when they are dropped.
    fn push_ready(&self, task: Arc<Task>) {
        self.ready.push(task);
        self.notify();
        // After the SeqCst swap in `notify`. Partner: the store and the swap at the end of `close`; either the last look there finds the task, or this one
        // sees CLOSED, and then no task has a future.
        if self.life.load(Ordering::SeqCst) == CLOSED {
            self.forget_ready();
        }
    }

    fn forget_ready(&self) {
        while let Some(task) = self.ready.pop() {
            drop(task);
        }
    }

    /// The task of this place has ended or is gone.
    fn unlist(&self, place: usize) {
        let mut list = self.list.lock();
        let task = list.places[place].take();
        list.free.push(place);
        drop(list);
        drop(task);
        self.tasks.fetch_sub(1, Ordering::AcqRel);
    }

    /// Drops all tasks and the engine, for good; what is spawned later is dropped at once. Tasks, events that wake them and operations that complete them hold
    /// each other: without this an executor with a task that waits would never go, nor would what the task holds. Called when nobody drives the
    /// executor any more. Waits for operations in flight as dropping an engine does: bounded.
    pub(super) fn close(&self) {
        let tasks: Vec<Weak<Task>> = {
            let list = self.list.lock();
            self.life.store(CLOSING, Ordering::SeqCst);
            list.places.iter().flatten().cloned().collect()
        };
        for task in tasks.iter().filter_map(Weak::upgrade) {
            // One that is being polled is dropped when that has ended.
            if let Some(mut slot) = task.future.try_lock() {
                let future = slot.take();
                drop(slot);
                self.end_task(&task, future);
            }
        }
        self.life.store(CLOSED, Ordering::SeqCst);
        // Orders this with the wakers, see `push_ready`.
        self.awake.swap(true, Ordering::SeqCst);
        self.forget_ready();
        let timers = self.timers.lock().take_all();
        drop(timers);
        let Some(mut driver) = self.try_drive() else { return };
        let engine = std::mem::replace(&mut driver.engine, Box::new(NoEngine(self.notify.clone())));
        let (done, ops) = (std::mem::take(&mut driver.completions), std::mem::take(&mut driver.ops));
        drop(driver);
        let waiting = std::mem::take(&mut *self.outbox.lock());
        drop((engine, done, ops, waiting));
    }

    /// A task has ended, or is ended. Dropping the future tells whoever waits (a request's completion, an in-flight entry). A panic in a destructor is caught
    /// like any other.
    fn end_task(&self, task: &Task, future: Option<TaskFuture>) {
        if future.is_none() {
            return;
        }
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(future))) {
            self.env.report_panic(&payload);
        }
        self.unlist(task.place);
    }

    /// Makes sure that somebody looks at this executor.
    pub(super) fn notify(&self) {
        // SeqCst with the store and the last look in `pass`: either that look sees what was pushed before this swap, or
        // this swap sees the flag cleared and writes the fd.
        if !self.awake.swap(true, Ordering::SeqCst) {
            self.notify.wake();
        }
    }

    /// Takes the token if nobody has it.
    pub(super) fn try_drive(&self) -> Option<MutexGuard<'_, Driver>> {
        self.drive.try_lock()
    }

    /// Takes the token, waiting for a helper's bounded pass to end. Only for the executor's owner.
    pub(super) fn own_drive(&self) -> MutexGuard<'_, Driver> {
        self.drive.lock()
    }

    /// One bounded pass. Returns whether ready work is left.
    pub(super) fn pass(&self, driver: &mut Driver) -> bool {
        // Relaxed is enough to suppress needless fd writes; correctness comes from the clearing store below.
        self.awake.store(true, Ordering::Relaxed);
        self.last_pass_ns.store(self.now().0, Ordering::Relaxed);
        let mut budget = PASS_POLLS_MAX;
        loop {
            let progress = self.collect(driver) | self.fire_timers();
            let polled = self.poll_ready(&mut budget);
            if let Some(host) = self.host.get().and_then(Weak::upgrade) {
                host.take_inbox(driver);
            }
            self.hand_over(driver);
            if budget == 0 {
                driver.hand_over();
                // Whatever is left is looked at in the next pass; say so to whoever sleeps on the fd.
                self.awake.store(true, Ordering::SeqCst);
                self.notify.wake();
                return true;
            }
            if !progress && polled == 0 {
                driver.hand_over();
                // SeqCst: partner of the swap in `notify`.
                self.awake.store(false, Ordering::SeqCst);
                let inbox = self.host.get().and_then(Weak::upgrade).is_some_and(|h| h.has_inbox());
                if self.ready.is_empty() && !inbox {
                    return false;
                }
                self.awake.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Blocks until something may have changed, or `limit`. The caller holds the token and has just made a pass without work left.
    pub(super) fn wait(&self, driver: &mut Driver, limit: Option<Duration>) {
        let timer = self.timers.lock().earliest().map(|at| at.since(self.now()));
        let timeout = match (timer, limit) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        driver.engine.wait(timeout);
    }

    /// Tells the engine when to signal the host's event fd for a timer.
    pub(super) fn arm_timer(&self, driver: &mut Driver) {
        let earliest = self.timers.lock().earliest();
        driver.engine.set_timer(earliest, self.now());
    }

    /// A pass by somebody who is not the owner, if the executor has been left alone for `stale`.
    pub(super) fn help(&self, stale: Duration) {
        let last = Instant(self.last_pass_ns.load(Ordering::Relaxed));
        if self.now().since(last) < stale {
            return;
        }
        if let Some(mut driver) = self.try_drive() {
            self.pass(&mut driver);
            if let Some(host) = self.host.get().and_then(Weak::upgrade) {
                host.signal(&mut driver);
            }
        }
    }

    /// The owner is about to make a pass: wake-ups until then need not write the fd.
    pub(super) fn set_awake(&self) {
        self.awake.store(true, Ordering::Relaxed);
    }

    /// Gives the executor to the watchdog.
    pub(super) fn abandon(self: &Arc<Self>) {
        if self.tasks() > 0 && !self.orphan.swap(true, Ordering::AcqRel) {
            self.env.adopt(self.clone());
        }
    }

    /// Drives until `future` is ready, on this thread. The token is held all the time.
    pub(super) fn block_on<F: Future>(self: &Arc<Self>, future: F) -> F::Output {
        struct Main(Arc<Exec>, AtomicBool);
        impl Wake for Main {
            fn wake(self: Arc<Self>) {
                self.1.store(true, Ordering::Release);
                self.0.notify();
            }
        }
        let main = Arc::new(Main(self.clone(), AtomicBool::new(true)));
        let waker = Waker::from(main.clone());
        let mut context = Context::from_waker(&waker);
        let mut future = std::pin::pin!(future);
        let mut driver = self.own_drive();
        loop {
            // The flag is cleared before the poll, so a wake-up during the poll is not lost.
            if main.1.swap(false, Ordering::AcqRel)
                && let Poll::Ready(value) = future.as_mut().poll(&mut context)
            {
                self.pass(&mut driver);
                return value;
            }
            let more = self.pass(&mut driver);
            if !more && !main.1.load(Ordering::Acquire) {
                self.wait(&mut driver, None);
            }
        }
    }

    fn collect(&self, driver: &mut Driver) -> bool {
        driver.engine.reap(&mut driver.completions);
        if driver.completions.is_empty() {
            return false;
        }
        let host = self.host.get().and_then(Weak::upgrade);
        for c in driver.completions.drain(..) {
            match c.tag {
                Tag::Task(cell) => cell.complete(c.result),
                Tag::Request(tag) => {
                    if let Some(host) = &host {
                        host.finished(tag, c.result);
                    }
                }
            }
        }
        true
    }

    fn fire_timers(&self) -> bool {
        let due = {
            let mut timers = self.timers.lock();
            match timers.earliest() {
                None => return false,
                Some(_) => timers.take_due(self.now()),
            }
        };
        let any = !due.is_empty();
        due.into_iter().for_each(Waker::wake);
        any
    }

    fn poll_ready(&self, budget: &mut usize) -> usize {
        let mut polled = 0;
        while *budget > 0 {
            let Some(task) = self.ready.pop() else { break };
            *budget -= 1;
            polled += 1;
            self.poll_task(task);
        }
        polled
    }

    fn poll_task(&self, task: Arc<Task>) {
        // AcqRel: sees what the waker did; a wake-up from here on queues the task again.
        task.queued.swap(false, Ordering::AcqRel);
        let mut slot = task.future.lock();
        let Some(future) = slot.as_mut() else { return };
        let waker = Waker::from(task.clone());
        let mut context = Context::from_waker(&waker);
        let ended = match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(&mut context))) {
            Ok(Poll::Pending) => false,
            Ok(Poll::Ready(())) => true,
            Err(payload) => {
                self.env.report_panic(&payload);
                true
            }
        };
        if ended || self.life.load(Ordering::SeqCst) != OPEN {
            let future = slot.take();
            drop(slot);
            self.end_task(&task, future);
        }
    }

    fn hand_over(&self, driver: &mut Driver) {
        let mut ops = std::mem::take(&mut driver.ops);
        {
            let mut outbox = self.outbox.lock();
            if !outbox.is_empty() {
                std::mem::swap(&mut *outbox, &mut ops);
            }
        }
        for op in ops.drain(..) {
            driver.push(op);
        }
        driver.ops = ops;
    }
}

/// What a closed executor has: takes nothing, gives nothing.
#[derive(Debug)]
struct NoEngine(Arc<dyn Notify>);

impl Engine for NoEngine {
    fn push(&mut self, op: EngineOp) {
        if let Tag::Task(cell) = op.tag {
            cell.complete(Err(IoError::cancelled()));
        }
    }

    fn kick(&mut self) {}

    fn reap(&mut self, _out: &mut Vec<Completion>) {}

    fn wait(&mut self, _timeout: Option<Duration>) {}

    fn in_flight(&self) -> usize {
        0
    }

    fn notify(&self) -> Arc<dyn Notify> {
        self.0.clone()
    }

    fn event_fd(&mut self) -> std::io::Result<RawFd> {
        Err(std::io::Error::from_raw_os_error(libc::ESHUTDOWN))
    }

    fn clear_event(&mut self) {}

    fn arm(&mut self, _on: bool) -> std::io::Result<()> {
        Ok(())
    }

    fn set_timer(&mut self, _at: Option<Instant>, _now: Instant) {}
}

impl fmt::Debug for Exec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exec").field("tasks", &self.tasks()).field("ready", &self.ready.len()).finish()
    }
}
