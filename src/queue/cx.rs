//! What a node's slow path can do: run requests on nodes below, do file operations, sleep, wait for others.

use super::cell::IoCell;
use super::env::Env;
use super::exec::Exec;
use super::timer::Sleep;
use crate::error::{IoError, IoResult};
use crate::io::file::FileHandle;
use crate::io::pool::LaneId;
use crate::io::{EngineOp, FileOp, Tag};
use crate::node::{Extent, Node, Plan, check_range};
use crate::request::{Buffers, Class, Request};
use crate::rt::Instant;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Mutex};
use crate::units::ByteRange;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

/// Handle of the executor that a task runs on. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Cx {
    exec: Arc<Exec>,
    cancel: Option<Arc<Cancel>>,
}

/// A request's wish to stop waiting. Cooperative: looked at by [`Cx::waiting`] and [`Cx::sleep`] only, so no operation is
/// abandoned half-way and no buffer is given up while the kernel may write it (C7, S8).
#[derive(Debug, Default)]
pub struct Cancel {
    set: AtomicBool,
    event: event_listener::Event,
}

impl Cancel {
    /// Asks the request to stop waiting.
    pub fn cancel(&self) {
        // Release: partner of the Acquire in `is_set`; the event orders the wake-up itself.
        self.set.store(true, Ordering::Release);
        self.event.notify(usize::MAX);
    }

    /// Whether it has been asked.
    pub fn is_set(&self) -> bool {
        self.set.load(Ordering::Acquire)
    }

    async fn wait(&self) {
        loop {
            if self.is_set() {
                return;
            }
            let listener = self.event.listen();
            if self.is_set() {
                return;
            }
            listener.await;
        }
    }
}

/// Marks that somebody waits for the work of others; while one exists the watchdog looks after queues left alone.
#[derive(Debug)]
pub struct WaitGuard(Arc<Env>);

impl WaitGuard {
    pub(super) fn new(env: Arc<Env>) -> Self {
        env.wait_begin();
        Self(env)
    }
}

impl Drop for WaitGuard {
    fn drop(&mut self) {
        self.0.wait_end();
    }
}

impl Cx {
    pub(crate) fn new(exec: Arc<Exec>) -> Self {
        Self { exec, cancel: None }
    }

    pub(crate) fn with_cancel(exec: Arc<Exec>, cancel: Arc<Cancel>) -> Self {
        Self { exec, cancel: Some(cancel) }
    }

    /// The same executor with a cancel of its own.
    pub fn with_new_cancel(&self) -> (Self, Arc<Cancel>) {
        let cancel: Arc<Cancel> = Arc::default();
        (Self::with_cancel(self.exec.clone(), cancel.clone()), cancel)
    }

    /// The same executor; `cancel` ends the waits of work that runs on it.
    pub fn cancelled_by(&self, cancel: &Arc<Cancel>) -> Self {
        Self::with_cancel(self.exec.clone(), cancel.clone())
    }

    /// The environment: seams, workers, budget.
    pub fn env(&self) -> &Arc<Env> {
        self.exec.env()
    }

    /// Tells executors apart while they live; a queue of a host is one.
    pub fn executor_id(&self) -> usize {
        Arc::as_ptr(&self.exec).addr()
    }

    /// The same executor without the request's cancel: for work that others rely on.
    pub fn detached(&self) -> Self {
        Self { exec: self.exec.clone(), cancel: None }
    }

    /// Current time.
    pub fn now(&self) -> Instant {
        self.exec.now()
    }

    /// Runs a request on `node` to its end: plan first, then the engine operation or the node's slow path.
    pub async fn run(&self, node: &dyn Node, req: Request) -> IoResult {
        check_range(req.range, node.limits().size)?;
        match node.plan(req.as_ref()) {
            Plan::Io(op) => self.io(op, req.bufs, req.class).await,
            Plan::Zero => {
                req.bufs.fill(0);
                Ok(())
            }
            Plan::Done(result) => result,
            Plan::Slow => node.execute(self, req).await,
        }
    }

    /// Status of `range` on `node`, with the range checked.
    pub async fn status(&self, node: &dyn Node, range: ByteRange) -> IoResult<Extent> {
        check_range(range, node.limits().size)?;
        if range.is_empty() {
            return Err(IoError::invalid());
        }
        node.block_status(self, range).await
    }

    /// One file operation. It runs to its end even if the future is dropped.
    pub fn io(&self, op: FileOp, bufs: Buffers, class: Class) -> IoFuture {
        IoFuture { exec: self.exec.clone(), op: Some((op, bufs, class)), cell: Arc::default() }
    }

    /// Runs a blocking call on the pool.
    pub async fn blocking<T: Send + 'static>(&self, f: impl FnOnce() -> T + Send + 'static) -> IoResult<T> {
        self.blocking_in(0, f).await
    }

    /// Runs a blocking call on a file on the pool.
    pub async fn blocking_on<T: Send + 'static>(
        &self,
        file: &Arc<FileHandle>,
        f: impl FnOnce(&FileHandle) -> T + Send + 'static,
    ) -> IoResult<T> {
        let theirs = file.clone();
        self.blocking_in(Arc::as_ptr(file).addr(), move || f(&theirs)).await
    }

    async fn blocking_in<T: Send + 'static>(
        &self,
        lane: LaneId,
        f: impl FnOnce() -> T + Send + 'static,
    ) -> IoResult<T> {
        let slot: Arc<(IoCell, Mutex<Option<T>>)> = Arc::new((IoCell::default(), Mutex::new(None)));
        let there = slot.clone();
        self.env().run_blocking(
            lane,
            Box::new(move || {
                let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f));
                let result = match done {
                    Ok(value) => {
                        *there.1.lock() = Some(value);
                        Ok(())
                    }
                    Err(_) => Err(IoError::panicked()),
                };
                there.0.complete(result);
            }),
        );
        std::future::poll_fn(|cx| slot.0.poll(cx)).await?;
        let value = slot.1.lock().take();
        value.ok_or(IoError::panicked())
    }

    /// A timer on this executor.
    pub fn sleep_until(&self, at: Instant) -> Sleep {
        Sleep::new(self.exec.clone(), at)
    }

    /// Sleeps, unless the request is cancelled.
    pub async fn sleep(&self, d: Duration) -> IoResult {
        let sleep = self.sleep_until(self.now().after(d));
        self.cancellable(sleep).await
    }

    /// Marks that this task waits for work of others, for as long as the guard lives.
    pub fn wait_guard(&self) -> WaitGuard {
        WaitGuard::new(self.env().clone())
    }

    /// Waits for work of others: the watchdog looks after queues left alone meanwhile, and the request's cancel ends the wait with ECANCELED.
    pub async fn waiting<F: Future>(&self, future: F) -> IoResult<F::Output> {
        let guard = self.wait_guard();
        let result = self.cancellable(future).await;
        drop(guard);
        result
    }

    /// `future`, or ECANCELED when the request is cancelled first. Only for futures that may be dropped while they wait.
    pub async fn cancellable<F: Future>(&self, future: F) -> IoResult<F::Output> {
        let Some(cancel) = &self.cancel else { return Ok(future.await) };
        match select(future, cancel.wait()).await {
            Some(value) => Ok(value),
            None => Err(IoError::cancelled()),
        }
    }

    /// `future`, or `None` when `at` comes first (`None` for `at` waits without limit).
    pub async fn until<F: Future>(&self, at: Option<Instant>, future: F) -> Option<F::Output> {
        match at {
            None => Some(future.await),
            Some(at) => select(future, self.sleep_until(at)).await,
        }
    }

    /// Whether the request has been cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.cancel.as_ref().is_some_and(|c| c.is_set())
    }

    /// Starts a task on this executor. It outlives the request; when the executor's owner goes the watchdog drives it.
    pub fn spawn(&self, future: impl Future<Output = ()> + Send + 'static) {
        self.exec.spawn(Box::pin(future));
    }
}

/// `first`, or `None` if `second` ends before it. `first` is polled first, so a result that is there is not lost to a timeout.
async fn select<F: Future, G: Future>(first: F, second: G) -> Option<F::Output> {
    let mut first = std::pin::pin!(first);
    let mut second = std::pin::pin!(second);
    std::future::poll_fn(move |cx| {
        if let Poll::Ready(v) = first.as_mut().poll(cx) {
            return Poll::Ready(Some(v));
        }
        second.as_mut().poll(cx).map(|_| None)
    })
    .await
}

/// A running file operation; see [`Cx::io`].
#[derive(Debug)]
pub struct IoFuture {
    exec: Arc<Exec>,
    op: Option<(FileOp, Buffers, Class)>,
    cell: Arc<IoCell>,
}

impl Future for IoFuture {
    type Output = IoResult;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<IoResult> {
        let this = self.get_mut();
        if let Some((op, bufs, class)) = this.op.take() {
            let result = this.cell.poll(cx);
            debug_assert!(result.is_pending(), "a new cell has no result");
            let tag = Tag::Task(this.cell.clone());
            this.exec.outbox.lock().push(EngineOp { op, bufs, class, tag });
            return Poll::Pending;
        }
        this.cell.poll(cx)
    }
}

impl Drop for IoFuture {
    fn drop(&mut self) {
        if self.op.is_none() {
            self.cell.forget_waiter();
        }
    }
}
