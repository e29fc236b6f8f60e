//! The life of a job from its start to its end, the same for all types.
//!
//! ```text
//! created -> running <-> paused
//!               |-> waiting -> pending -> concluded -> null      done (waiting: for its group; pending: for finalize)
//!               `-> aborting ----------> concluded -> null       failed or cancelled
//! ```

use super::copy::any_of;
use super::{CANCEL_MAX, Job, Status};
use crate::error::{IoError, IoResult};
use crate::queue::Cx;
use crate::sync::Arc;
use std::future::Future;
use std::time::Duration;

/// Of [`CANCEL_MAX`], what undoing may take before the job concludes without waiting for its end.
const UNDO_MAX: Duration = CANCEL_MAX.saturating_sub(Duration::from_millis(100));

/// Starts the job's task on `cx`, an executor of the context. The graph has been changed already.
pub(super) fn launch(cx: Cx, job: &Arc<Job>) {
    job.advance(Status::Running);
    let guard = Guard { job: job.clone(), done: false };
    cx.clone().spawn(async move {
        live(&cx, &guard.job).await;
        guard.disarm();
    });
}

/// From running to the end.
async fn live(cx: &Cx, job: &Arc<Job>) {
    let worked = match uncancelled(job, job.body.run(cx, job)).await {
        Ok(()) => settle_outcome(job).await,
        Err(e) => Err(e),
    };
    let outcome = match worked {
        Ok(()) => job.body.finish(cx, job).await,
        Err(e) => Err(e),
    };
    match outcome {
        Ok(()) => conclude(job, Ok(())),
        Err(e) => abort(cx, job, e).await,
    }
}

/// Waits for the group and for `finalize`; success means that no cancel can come any more.
async fn settle_outcome(job: &Arc<Job>) -> IoResult {
    wait_resumed(job).await?;
    job.advance(Status::Waiting);
    if let Some(group) = job.group.get() {
        uncancelled(job, group.arrive(job)).await?;
    }
    job.advance(Status::Pending);
    let finalized = async {
        match job.group.get() {
            Some(group) => group.finalized().await,
            None => until_view(job, |v| v.finalize || job.auto_finalize).await,
        }
        Ok(())
    };
    uncancelled(job, finalized).await?;
    match job.group.get() {
        Some(group) => group.commit(),
        None => job.control.commit(),
    }
}

/// A job that is paused while its last work ends stays paused.
pub(super) async fn wait_resumed(job: &Arc<Job>) -> IoResult {
    let resumed = async {
        if job.control.view().pause {
            job.advance(Status::Paused);
            until_view(job, |v| !v.pause).await;
        }
        Ok(())
    };
    uncancelled(job, resumed).await?;
    if job.status() == Status::Paused {
        job.advance(Status::Running);
    }
    Ok(())
}

async fn abort(cx: &Cx, job: &Arc<Job>, error: IoError) {
    if let Some(group) = job.group.get() {
        group.failed(job);
    }
    job.body.release(error);
    if job.status() == Status::Paused {
        job.advance(Status::Running);
    }
    job.advance(Status::Aborting);
    job.flight.stop();
    // The undo goes on by itself when it takes longer than the job may: a source that hangs holds up the drained section, not the host.
    let undone: Arc<(crate::sync::atomic::AtomicBool, event_listener::Event)> = Arc::default();
    let (there, theirs) = (undone.clone(), job.clone());
    let task_cx = cx.clone();
    cx.spawn(async move {
        theirs.body.abort(&task_cx, &theirs).await;
        there.0.store(true, crate::sync::atomic::Ordering::Release);
        there.1.notify(usize::MAX);
    });
    let wait = async {
        loop {
            let listener = undone.1.listen();
            if undone.0.load(crate::sync::atomic::Ordering::Acquire) {
                return;
            }
            listener.await;
        }
    };
    if cx.until(Some(cx.now().after(UNDO_MAX)), wait).await.is_none() {
        let text = format!("job '{}': undoing its changes takes long and goes on in the background", job.id);
        job.env.log(1, "job", &text);
    }
    conclude(job, Err(error));
}

fn conclude(job: &Arc<Job>, outcome: IoResult) {
    job.progress.advance_to(job.env.runtime.clock.now(), job.body.done());
    job.body.concluding();
    // The id is free before anybody can see the end: else who starts the next job then would be refused, now and again.
    let jobs = job.registry.upgrade().filter(|_| job.auto_dismiss);
    job.control.conclude(outcome, job.auto_dismiss, |status| {
        jobs.iter().for_each(|j| j.forget(&job.id));
        job.post(status, outcome.err());
    });
}

/// `work`, unless the job is cancelled first.
async fn uncancelled(job: &Arc<Job>, work: impl Future<Output = IoResult>) -> IoResult {
    let mut work = std::pin::pin!(work);
    loop {
        let changed = any_of(vec![job.control.listen()]);
        if job.control.view().cancel {
            return Err(IoError::cancelled());
        }
        let mut changed = std::pin::pin!(changed);
        let ended = std::future::poll_fn(|cx| {
            use std::task::Poll;
            if let Poll::Ready(result) = work.as_mut().poll(cx) {
                return Poll::Ready(Some(result));
            }
            changed.as_mut().poll(cx).map(|()| None)
        });
        if let Some(result) = ended.await {
            return result;
        }
    }
}

async fn until_view(job: &Arc<Job>, want: impl Fn(&super::control::View) -> bool) {
    loop {
        let listener = job.control.listen();
        if want(&job.control.view()) {
            return;
        }
        listener.await;
    }
}

/// Ends a job whose task was dropped: by a panic, or because the context ends.
struct Guard {
    job: Arc<Job>,
    done: bool,
}

impl Guard {
    fn disarm(mut self) {
        self.done = true;
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        let error = IoError::panicked();
        self.job.body.release(error);
        self.job.flight.stop();
        if let Some(group) = self.job.group.get() {
            group.failed(&self.job);
        }
        let job = self.job.clone();
        let undo = self.job.env.spawn_background(|cx| async move {
            job.body.abort(&cx, &job).await;
        });
        if let Err(e) = undo {
            self.job.env.log(0, "job", &e.full_text());
        }
        conclude(&self.job, Err(error));
    }
}
