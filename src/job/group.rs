//! Jobs that start at one instant (C22), and end together if asked to.

use super::registry::Jobs;
use super::run::launch;
use super::{Job, Status};
use crate::error::{Error, IoError, IoResult, Result};
use crate::node::Vertex;
use crate::options::Options;
use crate::queue::Cx;
use crate::sync::{Arc, Mutex};
use event_listener::Event;

/// What the end of one job means for the others of its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum CompletionMode {
    /// Nothing.
    #[default]
    Individual,
    /// A failure or a cancel fails them all; success is that of all.
    Grouped,
}

/// Jobs to be started together: one drained section, all or none (S1). Not shared between threads.
#[derive(Debug)]
pub struct Group {
    jobs: Arc<Jobs>,
    mode: CompletionMode,
    members: Vec<Arc<Job>>,
    started: bool,
}

/// Attempts to find the graph unchanged between opening the filters and the drained section.
const ATTEMPTS_MAX: usize = 16;
/// Most jobs of one group.
const MEMBERS_MAX: usize = 1024;

impl Group {
    /// An empty group. Option: `completion-mode` (`individual`, the default, or `grouped`).
    pub(super) fn new(jobs: &Arc<Jobs>, mut options: Options) -> Result<Self> {
        let mode = match options.take_enum("completion-mode", &["individual", "grouped"])? {
            Some(1) => CompletionMode::Grouped,
            _ => CompletionMode::Individual,
        };
        options.finish()?;
        Ok(Self { jobs: jobs.clone(), mode, members: Vec::new(), started: false })
    }

    /// Makes a job of the group; it is started by [`Group::start`]. May block.
    pub fn add(&mut self, kind: &str, options: Options) -> Result<Arc<Job>> {
        if self.started {
            return Err(Error::invalid("the group has been started"));
        }
        if self.members.len() >= MEMBERS_MAX {
            return Err(Error::invalid(format!("a group has at most {MEMBERS_MAX} jobs")));
        }
        let job = self.jobs.create(kind, options)?;
        self.members.push(job.clone());
        Ok(job)
    }

    /// Starts all jobs at one instant, or none. May block.
    pub fn start(&mut self) -> Result<()> {
        if self.started {
            return Err(Error::invalid("the group has been started"));
        }
        if self.mode == CompletionMode::Grouped {
            let together = Together::new(&self.members);
            for job in &self.members {
                // A job is in one group.
                let _ = job.group.set(together.clone());
            }
        }
        self.started = true;
        start_all(&self.jobs, &self.members)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if !self.started {
            self.members.iter().for_each(|j| self.jobs.discard(j));
        }
    }
}

/// Starts jobs that have been created: one drained section, all or none. On an error they are gone.
pub(super) fn start_all(jobs: &Arc<Jobs>, members: &[Arc<Job>]) -> Result<()> {
    let started = executors(jobs, members.len()).and_then(|cxs| insert_all(jobs, members).map(|()| cxs));
    match started {
        Ok(cxs) => {
            cxs.into_iter().zip(members).for_each(|(cx, job)| launch(cx, job));
            Ok(())
        }
        Err(e) => {
            members.iter().for_each(|j| jobs.discard(j));
            Err(e)
        }
    }
}

/// An executor for each job; taken before anything is changed, so that nothing can fail afterwards.
fn executors(jobs: &Arc<Jobs>, n: usize) -> Result<Vec<Cx>> {
    (0..n).map(|_| jobs.env().background()).collect()
}

fn insert_all(jobs: &Arc<Jobs>, members: &[Arc<Job>]) -> Result<()> {
    let places: Vec<Arc<Vertex>> = members.iter().flat_map(|j| j.body.places()).collect();
    for _ in 0..ATTEMPTS_MAX {
        prepare_all(members)?;
        let graph = jobs.graph().clone();
        let (places, theirs) = (&places, members);
        let inserted = jobs.env().block_on(|cx| async move {
            graph
                .drained(&cx, places, || {
                    let current = theirs.iter().all(|j| j.body.is_current());
                    if current {
                        theirs.iter().for_each(|j| j.body.insert());
                    }
                    current
                })
                .await
        });
        match inserted {
            Ok(true) => return Ok(()),
            // Somebody changed the graph in between: what was opened stands above the wrong node.
            Ok(false) => members.iter().for_each(|j| j.body.unprepare()),
            Err(e) => {
                members.iter().for_each(|j| j.body.unprepare());
                return Err(e);
            }
        }
    }
    Err(Error::busy("the graph keeps changing"))
}

fn prepare_all(members: &[Arc<Job>]) -> Result<()> {
    for (i, job) in members.iter().enumerate() {
        if let Err(e) = job.body.prepare() {
            members[..i].iter().for_each(|j| j.body.unprepare());
            return Err(e);
        }
    }
    Ok(())
}

/// What jobs share that end together.
#[derive(Debug)]
pub(super) struct Together {
    state: Mutex<State>,
    changed: Event,
}

#[derive(Debug)]
struct State {
    members: Vec<crate::sync::Weak<Job>>,
    /// Members that have done their work.
    arrived: usize,
    /// A member has failed or was cancelled.
    failed: bool,
    finalize: bool,
    /// What all members agreed on; set once.
    decided: Option<IoResult>,
}

impl Together {
    fn new(members: &[Arc<Job>]) -> Arc<Self> {
        let state = State {
            members: members.iter().map(Arc::downgrade).collect(),
            arrived: 0,
            failed: false,
            // As in QEMU: if one of them waits to be finalized, they all do.
            finalize: members.iter().all(|j| j.auto_finalize),
            decided: None,
        };
        Arc::new(Self { state: Mutex::new(state), changed: Event::new() })
    }

    /// This member is done; ends when all are, or with an error when one has failed.
    pub(super) async fn arrive(&self, _job: &Job) -> IoResult {
        self.state.lock().arrived += 1;
        self.changed.notify(usize::MAX);
        self.until(|s| s.failed || s.arrived == s.members.len()).await;
        if self.state.lock().failed { Err(IoError::cancelled()) } else { Ok(()) }
    }

    /// Ends when the members may conclude, or must fail.
    pub(super) async fn finalized(&self) {
        self.until(|s| s.finalize || s.failed).await;
    }

    pub(super) fn finalize(&self) {
        self.state.lock().finalize = true;
        self.changed.notify(usize::MAX);
    }

    /// The point of no return of all members: the first to come decides.
    pub(super) fn commit(&self) -> IoResult {
        let mut s = self.state.lock();
        if let Some(decided) = s.decided {
            return decided;
        }
        let members: Vec<Arc<Job>> = s.members.iter().filter_map(crate::sync::Weak::upgrade).collect();
        // A cancel of any member takes this lock first, so it is either seen here or refused.
        let open = !s.failed && members.iter().all(|j| !j.control.view().cancel);
        let decided = if open { Ok(()) } else { Err(IoError::cancelled()) };
        if open {
            for job in &members {
                // Cannot fail: no cancel was asked for, and none can be while the lock is held.
                let _ = job.control.commit();
            }
        }
        s.decided = Some(decided);
        decided
    }

    /// Cancels one member, which fails the others.
    pub(super) fn cancel(&self, job: &Job) -> Result<()> {
        let s = self.state.lock();
        job.control.cancel(&job.id)?;
        drop(s);
        self.failed(job);
        Ok(())
    }

    /// A member has failed: the others are cancelled.
    pub(super) fn failed(&self, job: &Job) {
        let mut s = self.state.lock();
        if s.failed || s.decided == Some(Ok(())) {
            return;
        }
        s.failed = true;
        let others: Vec<Arc<Job>> = s
            .members
            .iter()
            .filter_map(crate::sync::Weak::upgrade)
            .filter(|j| !std::ptr::eq(&**j, job))
            .collect();
        for other in &others {
            // Refused only if it has failed by itself.
            let _ = other.control.cancel(&other.id);
        }
        drop(s);
        self.changed.notify(usize::MAX);
        for other in others.iter().filter(|j| j.status() != Status::Concluded) {
            other.body.release(IoError::cancelled());
        }
    }

    async fn until(&self, want: impl Fn(&State) -> bool) {
        loop {
            let listener = self.changed.listen();
            if want(&self.state.lock()) {
                return;
            }
            listener.await;
        }
    }
}
