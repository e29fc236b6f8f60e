//! The engines of the real system.

use super::pool::{LaneId, Pool, PoolEngine};
use super::{Engine, EngineSet};
use crate::error::{Error, Result};
use crate::queue::{EngineFactory, Env, LogSink};
use crate::rt::real;
use crate::sync::Arc;
use once_cell::sync::OnceCell;

/// Which engines queues get.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum EngineKind {
    /// io_uring where it is allowed, threads beside it; `COBWEB_AIO=threads` in the environment means [`EngineKind::Threads`].
    #[default]
    Auto,
    /// Threads only; no ring is made (for memcheck, which does not see what a ring writes).
    Threads,
}

/// Makes engines over the system's files.
#[derive(Debug)]
pub struct SystemEngines {
    rings: bool,
    pool: Arc<Pool>,
}

/// Whether io_uring can be used here: asked once, by making a ring.
pub fn uring_allowed() -> bool {
    static ALLOWED: OnceCell<bool> = OnceCell::new();
    *ALLOWED.get_or_init(|| !threads_forced() && super::uring::probe().is_ok())
}

fn threads_forced() -> bool {
    std::env::var_os("COBWEB_AIO").is_some_and(|v| v == "threads")
}

impl SystemEngines {
    /// Engines of this kind, with a pool of their own.
    pub fn new(kind: EngineKind, runtime: &crate::rt::Runtime) -> Arc<Self> {
        let rings = kind == EngineKind::Auto && uring_allowed();
        Arc::new(Self { rings, pool: Pool::new(runtime) })
    }
}

impl EngineFactory for SystemEngines {
    fn open(&self, depth: u32) -> Result<Box<dyn Engine>> {
        if self.rings {
            match EngineSet::new(depth, &self.pool) {
                Ok(engine) => return Ok(Box::new(engine)),
                // Out of locked memory or descriptors: threads still work.
                Err(e) if matches!(e.raw_os_error(), Some(libc::ENOMEM | libc::EPERM)) => {}
                Err(e) => return Err(Error::os(e, "cannot make an io_uring")),
            }
        }
        Ok(Box::new(PoolEngine::new(&self.pool)))
    }

    fn run_blocking(&self, lane: LaneId, job: Box<dyn FnOnce() + Send>) {
        self.pool.run(lane, 0, job);
    }

    fn shut_down(&self) {
        self.pool.stop();
    }
}

/// An environment over the real system, not started.
pub fn system_env(kind: EngineKind, log: Option<LogSink>) -> Arc<Env> {
    let runtime = real::runtime();
    let engines = SystemEngines::new(kind, &runtime);
    Env::new(runtime, engines, log)
}
