//! The context: everything of one embedding, with nothing global (C2).
//!
//! A [`Context`] owns the environment (worker threads, seams, events), the graph (nodes and disks by name) and the jobs. It is made in two steps
//! (C3): [`Context::new`] creates no thread, [`Context::start`] does.
//!
//! Dropping it ends, in this order: jobs (cancelled, all within one bound, S35), exports (the callbacks given to
//! [`Context::on_shutdown`], newest first), nodes (settled from the top down, within one bound), worker threads. In a child after `fork()`
//! the threads are gone; a context marked dead there ([`Context::mark_dead`]) waits for nothing and frees nothing.

use crate::error::{Code, Error, Result};
use crate::events::Events;
use crate::graph::Graph;
use crate::io::EngineKind;
use crate::job::Jobs;
use crate::node::Vertex;
use crate::options::Options;
use crate::queue::{Env, LogSink};
use crate::stats::Stats;
use crate::stats::hist::HistSnapshot;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Arc, Mutex};
use std::fmt;
use std::time::Duration;

/// What a context is made from; all of it can be given as option text.
#[derive(Clone, Copy, Debug)]
pub struct ContextOptions {
    /// Threads for background work, at most [`WORKERS_MAX`]; 0: the host drives it with [`Context::run`].
    pub worker_threads: usize,
    /// Bytes that all RAM caches together may hold; 0 for no limit but their own.
    pub ram_budget: u64,
    /// Engine for file operations.
    pub aio: EngineKind,
}

/// Most worker threads.
pub const WORKERS_MAX: u64 = 64;
/// How long dropping a context waits for jobs, and then again for nodes that bring down what they hold.
const SHUTDOWN_MAX: Duration = Duration::from_secs(2);

impl Default for ContextOptions {
    fn default() -> Self {
        Self { worker_threads: 1, ram_budget: 0, aio: EngineKind::Auto }
    }
}

impl ContextOptions {
    /// Reads `worker-threads` (0..=64, default 1), `ram-budget` (bytes, default 0: none) and `aio` (`auto`, the default; `io_uring`, an error
    /// where it is not allowed; `threads`).
    pub fn from_options(mut options: Options) -> Result<Self> {
        let default = Self::default();
        let aio = match options.take_enum("aio", &["auto", "io_uring", "threads"])? {
            Some(1) if !crate::io::uring_allowed() => {
                return Err(Error::unsupported("io_uring is not available here (option 'aio')"));
            }
            Some(2) => EngineKind::Threads,
            _ => EngineKind::Auto,
        };
        let workers = options.take_u64_in("worker-threads", 0..=WORKERS_MAX)?;
        let read = Self {
            worker_threads: workers.map_or(default.worker_threads, |n| n as usize),
            ram_budget: options.take_size("ram-budget")?.unwrap_or(default.ram_budget),
            aio,
        };
        options.finish()?;
        Ok(read)
    }
}

type Shutdown = Box<dyn FnOnce() + Send>;

/// Threads, names, budget, log and events of one embedding. Any thread, unless a method says more.
pub struct Context {
    options: ContextOptions,
    jobs: Arc<Jobs>,
    graph: Arc<Graph>,
    env: Arc<Env>,
    shutdown: Mutex<Vec<(u64, Shutdown)>>,
    next_id: AtomicU64,
    dead: AtomicBool,
    closed: AtomicBool,
}

impl Context {
    /// A context without threads; background work begins with [`Context::start`]. Log lines go to `log` (C20).
    pub fn new(options: ContextOptions, log: Option<LogSink>) -> Result<Arc<Self>> {
        if options.worker_threads as u64 > WORKERS_MAX {
            return Err(Error::invalid(format!("more than {WORKERS_MAX} worker threads")));
        }
        Ok(Self::with_env(options, crate::io::system_env(options.aio, log)))
    }

    /// A context with all defaults, started.
    pub fn with_defaults() -> Result<Arc<Self>> {
        let context = Self::new(ContextOptions::default(), None)?;
        context.start()?;
        Ok(context)
    }

    /// A context over an environment made elsewhere (tests, simulation).
    pub fn with_env(options: ContextOptions, env: Arc<Env>) -> Arc<Self> {
        env.budget.set_limit(options.ram_budget);
        let graph = Graph::new(env.clone());
        let jobs = Jobs::new(graph.clone(), options.worker_threads == 0);
        Arc::new(Self {
            options,
            jobs,
            graph,
            env,
            shutdown: Mutex::default(),
            next_id: AtomicU64::new(0),
            dead: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        })
    }

    /// Starts the workers; call it after the host has daemonized. May be called once.
    pub fn start(&self) -> Result<()> {
        self.check_alive()?;
        self.env.start(self.options.worker_threads)
    }

    /// With `worker-threads=0`: drives background work once, waiting at most `timeout` for something to do. Returns whether there is more.
    pub fn run(&self, timeout: Option<Duration>) -> Result<bool> {
        self.check_alive()?;
        self.env.run_once(timeout)
    }

    /// What the context was made from.
    pub fn options(&self) -> &ContextOptions {
        &self.options
    }

    /// The environment.
    pub fn env(&self) -> &Arc<Env> {
        &self.env
    }

    /// Nodes and disks by name.
    pub fn graph(&self) -> &Arc<Graph> {
        &self.graph
    }

    /// Jobs by id.
    pub fn jobs(&self) -> &Arc<Jobs> {
        &self.jobs
    }

    /// What the host is told.
    pub fn events(&self) -> &Events {
        &self.env.events
    }

    /// Runs `end` when the context is dropped, after the jobs have ended and before nodes are closed; for exports. Returns a number for
    /// [`Context::forget_shutdown`].
    pub fn on_shutdown(&self, end: impl FnOnce() + Send + 'static) -> u64 {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        self.shutdown.lock().push((id, Box::new(end)));
        id
    }

    /// Forgets a callback of [`Context::on_shutdown`]: what it would end has ended.
    pub fn forget_shutdown(&self, id: u64) {
        let mut list = self.shutdown.lock();
        let at = list.iter().position(|(n, _)| *n == id);
        let removed = at.map(|at| list.remove(at));
        drop(list);
        drop(removed);
    }

    /// Marks the context as belonging to a parent process (C3): calls are refused and dropping it does nothing. Async-signal-safe.
    pub fn mark_dead(&self) {
        self.dead.store(true, Ordering::Release);
    }

    /// Whether [`Context::mark_dead`] was called.
    pub fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// EIO with `forked` in a child after `fork()`.
    pub fn check_alive(&self) -> Result<()> {
        if self.is_dead() {
            return Err(Error::new(
                libc::EIO,
                Code::Forked,
                "the context belongs to the process that forked",
            ));
        }
        Ok(())
    }

    /// Answers `nodes`, `disks`, `jobs` or `stats:NAME` as JSON.
    pub fn query(&self, what: &str) -> Result<serde_json::Value> {
        self.check_alive()?;
        crate::job::stats::query(self, what)
    }

    /// Counters of a disk, node or job; `None` if there is no such name or it keeps none.
    pub fn stats(&self, name: &str) -> Option<Stats> {
        crate::job::stats::find(self, name)
    }

    /// The counters of a disk, node or job as `query-cobweb-stats` shows them.
    pub fn stats_json(&self, name: &str) -> Result<serde_json::Value> {
        crate::job::stats::json(self, name)
    }

    /// A histogram (`total`, `space`, `granule`, `read`, `write`) of a disk, node or job.
    pub fn hist(&self, name: &str, which: &str) -> Option<HistSnapshot> {
        crate::job::stats::hist(self, name, which)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.close();
    }
}

impl Context {
    /// Ends everything: jobs (cancelled, bounded), exports, nodes (what they hold is brought down, bounded), workers. Once; later calls do nothing. Objects that the host still
    /// holds stay valid, their calls fail. Blocks.
    pub fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        if self.is_dead() {
            // The threads are gone and locks may be held by them for ever: leak everything.
            std::mem::forget((self.jobs.clone(), self.graph.clone(), self.env.clone()));
            return;
        }
        self.jobs.shut_down(SHUTDOWN_MAX);
        loop {
            let last = self.shutdown.lock().pop();
            let Some((_, end)) = last else { break };
            end();
        }
        self.settle_nodes();
        self.env.shut_down();
    }
}

impl Context {
    /// Brings down what filters hold, top down, for a bounded time: a target that does not answer must not hold up the host.
    fn settle_nodes(&self) {
        let nodes = top_down(&self.graph.nodes());
        let settled = self.env.block_on(|cx| async move {
            let limit = cx.now().after(SHUTDOWN_MAX);
            let all = async {
                for node in &nodes {
                    if let Err(e) = node.base().settle(&cx).await {
                        let text = format!("node '{}' could not be settled: {e}", node.name());
                        cx.env().log(1, "context", &text);
                    }
                }
            };
            if cx.until(Some(limit), all).await.is_none() {
                cx.env().log(0, "context", "nodes could not be settled in time; what they held is dropped");
            }
        });
        if let Err(e) = settled {
            self.env.log(0, "context", &e.full_text());
        }
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("options", &self.options).field("graph", &self.graph).finish()
    }
}

/// Users before what they use, filters before what they were put above.
fn top_down(nodes: &[Arc<Vertex>]) -> Vec<Arc<Vertex>> {
    type Seen = std::collections::BTreeSet<usize>;
    fn visit(v: &Arc<Vertex>, seen: &mut Seen, out: &mut Vec<Arc<Vertex>>, depth: usize) {
        if depth > crate::limits::GRAPH_DEPTH_MAX || !seen.insert(Arc::as_ptr(v).addr()) {
            return;
        }
        for (_, edge) in v.base().children() {
            if let Some(below) = edge.vertex() {
                visit(below, seen, out, depth + 1);
            }
        }
        out.push(v.clone());
        // Filters point at nodes, not at places: their order is that of the stack.
        for filter in v.filters() {
            visit(&filter, seen, out, depth + 1);
        }
    }
    let (mut seen, mut out) = (Seen::new(), Vec::new());
    nodes.iter().for_each(|v| visit(v, &mut seen, &mut out, 0));
    out.reverse();
    out
}
