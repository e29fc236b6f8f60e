//! Helpers for tests of the engine: an environment over the real system, and a thread that drives a future.

use super::{Cx, Env};
use crate::sync::Arc;
use std::future::Future;

/// An environment with `workers` worker threads.
pub fn env(workers: usize) -> Arc<Env> {
    let env = crate::io::system_env(crate::io::EngineKind::Auto, None);
    env.start(workers).expect("workers start");
    env
}

/// Runs `body` on the calling thread.
pub fn block_on<F, Fut>(env: &Arc<Env>, body: F) -> Fut::Output
where
    F: FnOnce(Cx) -> Fut,
    Fut: Future,
{
    env.block_on(body).expect("not on an engine thread")
}
