//! The commit: makes metadata durable, one at a time, for all who flush (qcow2.md 3.1 point 6).
//!
//! - [`Commit`]: who starts one, who waits for it, what became of it.
//! - `cut`: what a commit covers, copied at its start.
//! - `steps`: the one place of write order and barriers.
//!
//! A flush is answered by the first commit whose cut begins after it arrived. Nothing is written before somebody flushes, except when dirty slices pass half
//! the cache. A commit runs as a task of its own: a flush that is given up does not end it.
//!
//! **One barrier or two** (rule Z). Who links something whose data must be durable before its pointer holds an [`Ordered`] from before the entry is stored until
//! after its part is marked dirty. The cut reads the count of those before it copies, and keeps the value for the next cut; after its last copy it needs two barriers if
//! somebody is linking or the count is not what the cut *before* had read. An entry that is in this cut and was not in the one before was counted
//! after that reading, or is being counted now. What is linked without an `Ordered` (rule Z, zero flags, discards) does not count. All of it is
//! sequentially consistent; there are a handful of accesses per write.
//!
//! That an L2 table is durable before rule Z is used on it needs no look: the link of a new table is ordered, and commits follow each other.
//!
//! **Failure** (rule 12). Everything that was in the cut is dirty again, and the next commit uses two barriers. A failed barrier of a file behind the page cache is
//! final: the kernel may have dropped the data, so every flush fails until the image is reopened.

mod cut;
mod steps;

use super::image::Image;
use super::writer::Writer;
use crate::error::{IoError, IoResult};
use crate::queue::Cx;
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use crate::sync::{Arc, Mutex};
use cut::Cut;
use event_listener::Event;

/// The commits of one image.
#[derive(Debug, Default)]
pub struct Commit {
    state: Mutex<State>,
    ended: Event,
    /// Links under way, and made, that need their data durable first.
    linking: AtomicUsize,
    ordered: AtomicU64,
    /// For statistics: barriers issued.
    pub(super) barriers: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    running: bool,
    /// Commits begun, and the last one that has succeeded.
    begun: u64,
    done: u64,
    /// The last commit that failed, and how.
    failed: Option<(u64, IoError)>,
    /// No flush can succeed any more.
    broken: Option<IoError>,
    /// What the last cut read of `ordered` before it copied; `None` after a failure.
    ordered_before: Option<u64>,
}

/// A link under way whose data must be durable before it; see the module.
#[must_use = "the link is under way for as long as this lives"]
#[derive(Debug)]
pub struct Ordered<'a>(&'a Commit);

impl Commit {
    /// For a new image: nothing has been linked.
    pub fn new() -> Self {
        let commit = Self::default();
        commit.state.lock().ordered_before = Some(0);
        commit
    }

    /// Announces a link. Drop it when the entry's part has been marked dirty.
    pub fn order(&self) -> Ordered<'_> {
        self.linking.fetch_add(1, SeqCst);
        Ordered(self)
    }

    /// Whether a commit is under way.
    pub fn is_running(&self) -> bool {
        self.state.lock().running
    }

    /// Barriers issued so far.
    pub fn barriers(&self) -> u64 {
        self.barriers.load(SeqCst)
    }

    /// Ends when everything that was written and linked before the call is durable.
    pub async fn flush(image: &Arc<Image>, writer: &Arc<Writer>, cx: &Cx) -> IoResult {
        let commit = &writer.commit;
        // What has been staged or linked before this look is in the next commit to begin.
        let wanted = commit.state.lock().begun + 1;
        loop {
            let listener = commit.ended.listen();
            let start = {
                let mut state = commit.state.lock();
                if let Some(e) = state.broken {
                    return Err(e);
                }
                if state.done >= wanted {
                    return Ok(());
                }
                if let Some((number, e)) = state.failed
                    && number >= wanted
                {
                    return Err(e);
                }
                state.begin()
            };
            if start {
                Self::start(image, writer, cx);
            }
            cx.waiting(listener).await?;
        }
    }

    /// Ends when the commit under way has ended, or one that is started if there is none. Fails as that did.
    pub async fn next_end(image: &Arc<Image>, writer: &Arc<Writer>, cx: &Cx) -> IoResult {
        let commit = &writer.commit;
        let listener = commit.ended.listen();
        Self::kick(image, writer, cx);
        if let Some(e) = commit.state.lock().broken {
            return Err(e);
        }
        cx.waiting(listener).await?;
        let failed = commit.state.lock().failed;
        failed.map_or(Ok(()), |(_, e)| Err(e))
    }

    /// Starts a commit unless one is under way: nobody waits for it.
    pub fn kick(image: &Arc<Image>, writer: &Arc<Writer>, cx: &Cx) {
        let start = {
            let mut state = writer.commit.state.lock();
            state.broken.is_none() && state.begin()
        };
        if start {
            Self::start(image, writer, cx);
        }
    }

    fn start(image: &Arc<Image>, writer: &Arc<Writer>, cx: &Cx) {
        let (image, writer, task) = (image.clone(), writer.clone(), cx.detached());
        cx.spawn(async move {
            let running = Running(writer.commit.clone());
            let result = run(&image, &writer, &task).await;
            {
                let mut state = writer.commit.state.lock();
                match result {
                    Ok(()) => (state.done, state.failed) = (state.begun, None),
                    Err(e) => {
                        state.failed = Some((state.begun, e));
                        state.ordered_before = None;
                    }
                }
            }
            writer.alloc.release_soon(&task);
            // Who waits for the end may close the file then.
            drop((image, writer));
            drop(running);
        });
    }
}

async fn run(image: &Arc<Image>, writer: &Arc<Writer>, cx: &Cx) -> IoResult {
    // What is staged from now on waits for the next commit, as does who flushes it.
    image.settle_staged(writer, cx).await?;
    let cut = Cut::take(image, writer);
    let result = steps::carry_out(image, writer, cx, &cut).await;
    cut.end(image, writer, result.is_err());
    result
}

impl State {
    /// Whether a commit may begin; it has then.
    fn begin(&mut self) -> bool {
        let begins = !std::mem::replace(&mut self.running, true);
        self.begun += u64::from(begins);
        begins
    }
}

/// A commit under way; also if its task is dropped those who wait go on.
struct Running(Arc<Commit>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.state.lock().running = false;
        self.0.ended.notify(usize::MAX);
    }
}

impl Drop for Ordered<'_> {
    fn drop(&mut self) {
        // In this order: whoever no longer sees the link under way sees it counted.
        self.0.ordered.fetch_add(1, SeqCst);
        self.0.linking.fetch_sub(1, SeqCst);
    }
}
