//! The jobs of a context by id, and the table of types.

use super::copy::{CopyOptions, Flight, Limiter, OnError, Pool, Priority, Progress};
use super::group::{Group, start_all};
use super::target::{Claim, Targets};
use super::{Body, Job, Status, backup, mirror};
use crate::error::{Error, Result};
use crate::graph::Graph;
use crate::limits::{BATCH_LEN, JOBS_MAX};
use crate::node::Vertex;
use crate::options::Options;
use crate::queue::Env;
use crate::rate::RATE_MAX;
use crate::report::ErrorLog;
use crate::sync::atomic::AtomicU32;
use crate::sync::{Arc, Mutex};
use once_cell::sync::OnceCell;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// The jobs of a context. Any thread.
pub struct Jobs {
    graph: Arc<Graph>,
    pool: Arc<Pool>,
    host_driven: bool,
    jobs: Mutex<BTreeMap<String, Arc<Job>>>,
    targets: Arc<Targets>,
}

/// A type of job: its name and how its body is made from options (which it consumes).
struct Kind {
    name: &'static str,
    make: fn(&Arc<Jobs>, &mut Options) -> Result<Made>,
}

/// What a type of job makes of its options.
pub(super) struct Made {
    pub(super) body: Box<dyn Body>,
    /// Id if the options give none.
    pub(super) default_id: Option<String>,
    /// Bytes in all.
    pub(super) total: u64,
}

/// All types of jobs.
static KINDS: &[Kind] =
    &[Kind { name: "backup", make: backup::make }, Kind { name: "copy", make: mirror::make }];

/// Whether there is a type of job of this name.
pub fn has_kind(name: &str) -> bool {
    KINDS.iter().any(|k| k.name == name)
}

impl Jobs {
    /// No jobs. `host_driven`: there are no workers, [`Job::wait`] drives the work itself.
    pub fn new(graph: Arc<Graph>, host_driven: bool) -> Arc<Self> {
        Arc::new(Self {
            graph,
            pool: Arc::default(),
            host_driven,
            jobs: Mutex::default(),
            targets: Arc::default(),
        })
    }

    /// Starts a job of a type (`backup`, `copy`) from options (semantics.md, section 4). May block.
    pub fn start(self: &Arc<Self>, kind: &str, options: Options) -> Result<Arc<Job>> {
        let job = self.create(kind, options)?;
        start_all(self, std::slice::from_ref(&job))?;
        Ok(job)
    }

    /// A group of jobs to be started together; see [`Group`].
    pub fn group(self: &Arc<Self>, options: Options) -> Result<Group> {
        Group::new(self, options)
    }

    /// A job by id. Jobs that have been dismissed are not found.
    pub fn find(&self, id: &str) -> Result<Arc<Job>> {
        let found = self.jobs.lock().get(id).cloned();
        found.ok_or_else(|| Error::not_found(format!("no job named '{id}'")))
    }

    /// All jobs that have not been dismissed, by id.
    pub fn list(&self) -> Vec<Arc<Job>> {
        self.jobs.lock().values().cloned().collect()
    }

    /// The buffers of all jobs.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Cancels every job and waits until all have ended, at most `limit`.
    pub fn shut_down(&self, limit: Duration) {
        let jobs = self.list();
        for job in &jobs {
            // Refused if it is ending by itself.
            let _ = job.cancel();
        }
        let deadline = self.env().runtime.clock.now().after(limit);
        for job in jobs.iter().filter(|j| j.status() != Status::Created) {
            let left = deadline.since(self.env().runtime.clock.now());
            if let Err(e) = job.wait(Some(left)) {
                self.env().log(0, "job", &e.full_text());
            }
        }
        for job in jobs.iter().filter(|j| j.status() == Status::Created) {
            self.discard(job);
        }
    }

    pub(super) fn env(&self) -> &Arc<Env> {
        self.graph.env()
    }

    pub(super) fn graph(&self) -> &Arc<Graph> {
        &self.graph
    }

    /// Makes a job in state `created`.
    pub(super) fn create(self: &Arc<Self>, kind: &str, mut options: Options) -> Result<Arc<Job>> {
        let kind = KINDS
            .iter()
            .find(|k| k.name == kind)
            .ok_or_else(|| Error::not_found(format!("unknown type of job '{kind}'")))?;
        let common = Common::take(&mut options)?;
        let made = (kind.make)(self, &mut options)?;
        options.finish()?;
        let id = match common.id.or(made.default_id) {
            Some(id) => check_id(id)?,
            None => return Err(Error::invalid("missing required option 'job-id'")),
        };
        let now = self.env().runtime.clock.now();
        let job = Arc::new(Job {
            id: id.clone(),
            kind: kind.name,
            env: self.env().clone(),
            control: super::control::Control::new(),
            priority: AtomicU32::new(common.priority as u32),
            auto_finalize: common.auto_finalize,
            auto_dismiss: common.auto_dismiss,
            host_driven: self.host_driven,
            errors: ErrorLog::default(),
            progress: Progress::new(now),
            limiter: Limiter::new(common.speed, common.share, now),
            flight: Arc::<Flight>::default(),
            pool: self.pool.share(),
            body: made.body,
            group: OnceCell::new(),
            registry: Arc::downgrade(self),
        });
        job.progress.set_total(made.total);
        let mut jobs = self.jobs.lock();
        if jobs.contains_key(&id) {
            return Err(Error::busy(format!("job id '{id}' is in use")));
        }
        if jobs.len() >= JOBS_MAX {
            return Err(Error::busy(format!("there are {JOBS_MAX} jobs already")));
        }
        jobs.insert(id, job.clone());
        drop(jobs);
        job.post(Status::Created, None);
        Ok(job)
    }

    /// Forgets a job that was never started.
    pub(super) fn discard(&self, job: &Arc<Job>) {
        let forgotten = job.control.advance(Status::Null, || {
            self.forget(&job.id);
            job.post(Status::Null, None);
        });
        if forgotten {
            // Handles may outlive this by far.
            job.body.give_up();
        }
    }

    /// The id is free again. Called with the lock of the job's `control` held, so that nobody hears of the end of a job whose id is still taken.
    pub(super) fn forget(&self, id: &str) {
        let job = self.jobs.lock().remove(id);
        drop(job);
    }

    /// Reserves a place for a job that writes to it; the place is free again when the claim is dropped.
    pub(super) fn claim(&self, target: &Arc<Vertex>) -> Result<Claim> {
        self.targets.claim(target)
    }
}

impl fmt::Debug for Jobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.list()).finish()
    }
}

/// Options that every job takes.
struct Common {
    id: Option<String>,
    auto_finalize: bool,
    auto_dismiss: bool,
    speed: u64,
    priority: Priority,
    share: u32,
}

impl Common {
    fn take(options: &mut Options) -> Result<Self> {
        let speed = options.take_size("speed")?.unwrap_or(0);
        if speed > RATE_MAX {
            return Err(options.invalid("speed", format!("{speed} is above {RATE_MAX}")));
        }
        Ok(Self {
            id: options.take_str("job-id")?,
            auto_finalize: options.take_bool("auto-finalize")?.unwrap_or(true),
            auto_dismiss: options.take_bool("auto-dismiss")?.unwrap_or(true),
            speed,
            priority: options
                .take_enum("priority", Priority::NAMES)?
                .map(Priority::from_index)
                .unwrap_or_default(),
            share: options.take_u64_in("share", 1..=100)?.unwrap_or(100) as u32,
        })
    }
}

/// Most parts of one job; each holds at least a buffer.
const WORKERS_MAX: u64 = 1024;

impl CopyOptions {
    /// `max-workers`, `max-chunk`, `latency-target-ms`, `on-source-error`, `on-target-error`; the first two also below `x-perf`, as in QEMU.
    pub(super) fn take(options: &mut Options) -> Result<Self> {
        let max_workers = either(options, "max-workers", |o, key| o.take_u64_in(key, 1..=WORKERS_MAX))?;
        let max_chunk = either(options, "max-chunk", |o, key| o.take_size(key))?;
        let max_chunk = match max_chunk {
            // As in QEMU: 0 leaves it to the engine.
            None | Some(0) => BATCH_LEN,
            Some(n) if n < 4096 => {
                return Err(options.invalid("max-chunk", format!("{n} is below 4096")));
            }
            // Longer parts gain nothing and hold their claims longer (S5).
            Some(n) => (n - n % 4096).min(BATCH_LEN),
        };
        let on_error = |options: &mut Options, key| {
            Ok::<_, Error>(
                options.take_enum(key, OnError::NAMES)?.map(OnError::from_index).unwrap_or_default(),
            )
        };
        let latency = options.take_u64_in("latency-target-ms", 0..=3_600_000)?.unwrap_or(0);
        Ok(Self {
            max_workers: max_workers.unwrap_or(64) as usize,
            max_chunk,
            on_source_error: on_error(options, "on-source-error")?,
            on_target_error: on_error(options, "on-target-error")?,
            latency_target_ns: latency * 1_000_000,
        })
    }
}

/// An option that QEMU has below `x-perf` and we have at the top; not both.
pub(super) fn either<T>(
    options: &mut Options,
    key: &str,
    mut take: impl FnMut(&mut Options, &str) -> Result<Option<T>>,
) -> Result<Option<T>> {
    let old_key = format!("x-perf.{key}");
    let (new, old) = (take(options, key)?, take(options, &old_key)?);
    match (new, old) {
        (Some(_), Some(_)) => Err(Error::invalid(format!("'{key}' and '{old_key}' are both given"))),
        (new, old) => Ok(new.or(old)),
    }
}

/// Job ids follow QEMU's rule for names: a letter first, then letters, digits, `-`, `.`, `_`; at most 63 bytes.
fn check_id(id: String) -> Result<String> {
    let mut chars = id.chars();
    let ok = id.len() <= 63
        && chars.next().is_some_and(|c| c.is_ascii_alphabetic())
        && chars.all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_'));
    if ok { Ok(id) } else { Err(Error::invalid(format!("'{id}' is not a valid job id (option 'job-id')"))) }
}
