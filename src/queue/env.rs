//! What all executors of a context share: the seams, worker threads, the list of executors.

use super::cx::Cx;
use super::exec::Exec;
use super::watchdog;
use crate::error::{Error, Result};
use crate::events::Events;
use crate::io::Engine;
use crate::io::pool::LaneId;
use crate::request::budget::Budget;
use crate::rt::{Join, Runtime};
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::{Arc, Mutex, Weak};
use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::future::Future;
use std::time::Duration;

/// Makes engines and runs blocking calls: the seam to files.
pub trait EngineFactory: Send + Sync + fmt::Debug {
    /// An engine for a queue of `depth` operations (at least 1).
    fn open(&self, depth: u32) -> Result<Box<dyn Engine>>;
    /// Runs `job` on a thread that may block. Bounded threads; jobs queue, but not for one of another lane that hangs.
    fn run_blocking(&self, lane: LaneId, job: Box<dyn FnOnce() + Send>);
    /// The context ends: waits for threads, for a bounded time. Engines and calls that come later still work.
    fn shut_down(&self) {}
}

/// Receives one line of log: level (0 error .. 3 debug), target, text (C20).
pub type LogSink = Box<dyn Fn(i32, &str, &str) + Send + Sync>;

/// The environment of a context's executors.
pub struct Env {
    /// Time, randomness, threads.
    pub runtime: Runtime,
    /// What the host is told.
    pub events: Events,
    /// Memory that the caches of the context may use together; without limit until somebody sets one.
    pub budget: Arc<Budget>,
    pub(super) factory: Arc<dyn EngineFactory>,
    log: Option<LogSink>,
    execs: Mutex<Vec<Weak<Exec>>>,
    /// Engines for blocking calls. Not executors: those hold the environment, which would never go then.
    idle: Mutex<Vec<Box<dyn Engine>>>,
    orphans: Mutex<Vec<Arc<Exec>>>,
    workers: Mutex<Workers>,
    next_worker: AtomicUsize,
    /// Number of `WaitGuard`s and orphans: reasons for the watchdog to look.
    waits: AtomicUsize,
    pub(super) waits_began: event_listener::Event,
    stop: AtomicBool,
}

#[derive(Default)]
struct Workers {
    execs: Vec<Arc<Exec>>,
    threads: Vec<Box<dyn Join>>,
}

/// Engine depth of workers and blocking calls.
const WORKER_DEPTH: u32 = 256;
/// Engines kept for blocking calls.
const IDLE_MAX: usize = 8;

thread_local! {
    /// Whether this thread is inside an engine callback or a worker, where blocking calls would deadlock (C25).
    static NO_BLOCKING: Cell<u32> = const { Cell::new(0) };
}

impl Env {
    /// An environment without workers; see [`Env::start`].
    pub fn new(runtime: Runtime, factory: Arc<dyn EngineFactory>, log: Option<LogSink>) -> Arc<Self> {
        Arc::new(Self {
            events: Events::default(),
            budget: Budget::new(0),
            runtime,
            factory,
            log,
            execs: Mutex::default(),
            idle: Mutex::default(),
            orphans: Mutex::default(),
            workers: Mutex::default(),
            next_worker: AtomicUsize::new(0),
            waits: AtomicUsize::new(0),
            waits_began: event_listener::Event::new(),
            stop: AtomicBool::new(false),
        })
    }

    /// Creates the executors for background work and, unless `threads` is 0, as many threads that drive them. With 0 there is one
    /// executor and the host drives it through [`Env::run_once`].
    pub fn start(self: &Arc<Self>, threads: usize) -> Result<()> {
        let mut workers = self.workers.lock();
        if !workers.execs.is_empty() {
            return Err(Error::invalid("the context has been started already"));
        }
        for i in 0..threads.max(1) {
            let exec = Exec::new(self, WORKER_DEPTH)?;
            if threads > 0 {
                let (env, theirs) = (self.clone(), exec.clone());
                let name = format!("cobweb-{i}");
                let body = Box::new(move || env.worker(&theirs));
                let thread = self
                    .runtime
                    .spawn
                    .spawn(&name, body)
                    .map_err(|e| Error::os(e, format!("cannot start worker thread '{name}'")))?;
                workers.threads.push(thread);
            }
            workers.execs.push(exec);
        }
        let first = Cx::new(workers.execs[0].clone());
        drop(workers);
        let env = Arc::downgrade(self);
        first.clone().spawn(async move { watchdog::run(&first, env).await });
        Ok(())
    }

    /// Whether `start` has run and `stop` has not.
    pub fn is_running(&self) -> bool {
        !self.stop.load(Ordering::Acquire) && !self.workers.lock().execs.is_empty()
    }

    /// Ends the workers and waits for their threads. Tasks that are still waiting are dropped. Calls that come later on objects that the host still holds
    /// run on its own thread and leave nothing behind.
    pub fn shut_down(&self) {
        self.stop.store(true, Ordering::SeqCst);
        let (execs, threads) = {
            let mut w = self.workers.lock();
            (std::mem::take(&mut w.execs), std::mem::take(&mut w.threads))
        };
        execs.iter().for_each(|e| e.notify());
        threads.into_iter().for_each(|t| t.join());
        let orphans = std::mem::take(&mut *self.orphans.lock());
        execs.iter().chain(&orphans).for_each(|e| e.close());
        // The flag is looked at under this lock before anything is put there.
        let idle = std::mem::take(&mut *self.idle.lock());
        drop((execs, idle, orphans));
        self.factory.shut_down();
    }

    /// The executor context for background work (round robin over the workers). Falls back to the first idle executor before `start`.
    pub fn background(self: &Arc<Self>) -> Result<Cx> {
        let workers = self.workers.lock();
        if workers.execs.is_empty() {
            return Err(Error::invalid("the context has not been started"));
        }
        let n = self.next_worker.fetch_add(1, Ordering::Relaxed);
        Ok(Cx::new(workers.execs[n % workers.execs.len()].clone()))
    }

    /// Starts a background task on a worker.
    pub fn spawn_background<F, Fut>(self: &Arc<Self>, body: F) -> Result<()>
    where
        F: FnOnce(Cx) -> Fut,
        Fut: Future<Output = ()> + Send + 'static,
    {
        let cx = self.background()?;
        cx.clone().spawn(body(cx));
        Ok(())
    }

    /// Runs a future to its end on the calling thread. Refused (EDEADLK) where that would deadlock: on worker threads and inside callbacks.
    pub fn block_on<F, Fut>(self: &Arc<Self>, body: F) -> Result<Fut::Output>
    where
        F: FnOnce(Cx) -> Fut,
        Fut: Future,
    {
        if NO_BLOCKING.get() > 0 {
            let text = "a call that may block was made from a callback or an engine thread";
            return Err(Error::new(libc::EDEADLK, crate::error::Code::Invalid, text));
        }
        let idle = self.idle.lock().pop();
        let exec = match idle {
            Some(engine) => Exec::over(self, engine),
            None => Exec::new(self, WORKER_DEPTH)?,
        };
        let value = exec.block_on(body(Cx::new(exec.clone())));
        if exec.tasks() > 0 {
            exec.abandon();
        } else if let Some(engine) = exec.into_engine() {
            let mut idle = self.idle.lock();
            if idle.len() < IDLE_MAX && !self.stop.load(Ordering::SeqCst) {
                idle.push(engine);
            }
        }
        Ok(value)
    }

    /// Runs `f` with blocking calls refused on this thread (callbacks into the host).
    pub fn without_blocking<T>(f: impl FnOnce() -> T) -> T {
        struct Leave;
        impl Drop for Leave {
            fn drop(&mut self) {
                NO_BLOCKING.set(NO_BLOCKING.get() - 1);
            }
        }
        NO_BLOCKING.set(NO_BLOCKING.get() + 1);
        let _leave = Leave;
        f()
    }

    /// For `worker-threads=0`: drives the background executor once, waiting at most `timeout` for something to do. Returns
    /// whether there was work.
    pub fn run_once(&self, timeout: Option<Duration>) -> Result<bool> {
        let exec = {
            let w = self.workers.lock();
            if !w.threads.is_empty() {
                return Err(Error::invalid("the context has worker threads of its own"));
            }
            w.execs.first().cloned().ok_or_else(|| Error::invalid("the context has not been started"))?
        };
        let mut driver = exec.own_drive();
        if exec.pass(&mut driver) {
            return Ok(true);
        }
        exec.wait(&mut driver, timeout);
        exec.pass(&mut driver);
        Ok(exec.tasks() > 1)
    }

    /// Runs a blocking call on the pool, in the lane of a file or that of all others (0).
    pub fn run_blocking(&self, lane: LaneId, job: Box<dyn FnOnce() + Send>) {
        self.factory.run_blocking(lane, job);
    }

    /// Writes a line to the log sink, or to stderr if `COBWEB_DEBUG=1` and there is none.
    pub fn log(&self, level: i32, target: &str, text: &str) {
        match &self.log {
            Some(sink) => Self::without_blocking(|| sink(level, target, text)),
            None if std::env::var_os("COBWEB_DEBUG").is_some_and(|v| v == "1") => {
                eprintln!("cobweb[{level}] {target}: {text}");
            }
            None => {}
        }
    }

    pub(super) fn report_panic(&self, payload: &Box<dyn Any + Send>) {
        let text = payload
            .downcast_ref::<&str>()
            .map(|s| (*s).to_owned())
            .or_else(|| payload.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "unknown panic".to_owned());
        self.log(0, "panic", &text);
    }

    pub(super) fn register(&self, exec: &Arc<Exec>) {
        let mut execs = self.execs.lock();
        if execs.len() == execs.capacity() {
            execs.retain(|e| e.strong_count() > 0);
        }
        execs.push(Arc::downgrade(exec));
    }

    pub(super) fn adopt(&self, exec: Arc<Exec>) {
        {
            let mut orphans = self.orphans.lock();
            if !self.stop.load(Ordering::SeqCst) {
                orphans.push(exec);
                drop(orphans);
                return self.wait_begin();
            }
        }
        // There is no watchdog any more.
        exec.close();
    }

    /// Drops orphans that have nothing left to do.
    pub(super) fn bury_orphans(&self) {
        let buried: Vec<_> = {
            let mut orphans = self.orphans.lock();
            let (dead, alive) = orphans.drain(..).partition(|e| e.tasks() == 0);
            *orphans = alive;
            dead
        };
        for _ in &buried {
            self.wait_end();
        }
    }

    pub(super) fn execs(&self) -> Vec<Arc<Exec>> {
        self.execs.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Number of reasons to look after executors left alone.
    pub(super) fn waits(&self) -> usize {
        self.waits.load(Ordering::SeqCst)
    }

    pub(super) fn wait_begin(&self) {
        // SeqCst: partner of the load in `watchdog::run`, which looks again after it has begun to listen.
        if self.waits.fetch_add(1, Ordering::SeqCst) == 0 {
            self.waits_began.notify(usize::MAX);
        }
    }

    pub(super) fn wait_end(&self) {
        self.waits.fetch_sub(1, Ordering::SeqCst);
    }

    fn worker(self: &Arc<Self>, exec: &Arc<Exec>) {
        NO_BLOCKING.set(1);
        while !self.stop.load(Ordering::SeqCst) {
            let mut driver = exec.own_drive();
            // SeqCst, partner of the store in `shut_down`: its wake-up goes unwritten if it comes before the pass clears `awake`, and then this
            // load sees the flag.
            if !exec.pass(&mut driver) && !self.stop.load(Ordering::SeqCst) {
                exec.wait(&mut driver, None);
            }
        }
    }
}

impl fmt::Debug for Env {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Env").field("waits", &self.waits()).finish()
    }
}
