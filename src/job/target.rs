//! Who writes to which place: at most one job at a time, and one after the other.
//!
//! A job claims its target when it is made and gives it back when nothing it has begun is in flight there any more. A job that was cancelled, or failed, concludes
//! earlier if its target is slow or does not answer (S35). From then on the next job may claim the same target. What it writes must not be overtaken by
//! what the former one still has under way, so it writes through a [`Gate`], which lets nothing pass before that has ended. With a target that answers, the gate
//! is open after a moment; with a dead one the next job waits as the former did.

use crate::error::{Error, IoResult, Result};
use crate::filter::ram_cache::RamCache;
use crate::node::{Edge, Extent, Growth, Limits, Node, NodeFuture, Plan, Reservation, Vertex, fixed_size};
use crate::queue::Cx;
use crate::request::{Class, ReqRef, Request};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Mutex, Weak};
use crate::units::ByteRange;
use event_listener::Event;
use std::any::Any;

/// The targets in use in a context.
#[derive(Debug, Default)]
pub(super) struct Targets(Mutex<Vec<Arc<Use>>>);

/// A place that one job writes to, or has written to.
#[derive(Debug)]
struct Use {
    place: Weak<Vertex>,
    /// The job has concluded; the next one may come.
    concluded: AtomicBool,
    /// Nothing is in flight any more.
    ended: AtomicBool,
    changed: Event,
}

/// The right to write to a place; it is free when this is dropped.
#[derive(Debug)]
pub(super) struct Claim {
    targets: Arc<Targets>,
    own: Arc<Use>,
    before: Vec<Arc<Use>>,
}

impl Targets {
    /// Claims a place. EBUSY while another job that has not concluded has it.
    pub(super) fn claim(self: &Arc<Self>, target: &Arc<Vertex>) -> Result<Claim> {
        let mut list = self.0.lock();
        let same = |u: &&Arc<Use>| std::ptr::eq(u.place.as_ptr(), Arc::as_ptr(target));
        let before: Vec<Arc<Use>> = list.iter().filter(same).cloned().collect();
        if before.iter().any(|u| !u.concluded.load(Ordering::Acquire)) {
            let text = format!("node '{}' is the target of another job (option 'target')", target.name());
            return Err(Error::busy(text));
        }
        let own = Arc::new(Use {
            place: Arc::downgrade(target),
            concluded: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            changed: Event::new(),
        });
        list.push(own.clone());
        Ok(Claim { targets: self.clone(), own, before })
    }
}

impl Claim {
    /// The job is about to conclude, although something of it may be in flight.
    pub(super) fn conclude(&self) {
        self.own.concluded.store(true, Ordering::Release);
    }

    /// What to write through to `target` if a former job has something in flight there.
    pub(super) fn gate(&self, target: &Arc<Vertex>) -> Option<Arc<dyn Node>> {
        let before: Vec<Arc<Use>> = self.before.iter().filter(|u| !u.has_ended()).cloned().collect();
        // A cache keeps the order of what is written to it by itself.
        if before.is_empty() || target.top().as_any().is::<RamCache>() {
            return None;
        }
        Some(Arc::new(Gate { file: Edge::to_vertex(target.clone()), before, open: AtomicBool::new(false) }))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.targets.0.lock().retain(|u| !Arc::ptr_eq(u, &self.own));
        self.own.ended.store(true, Ordering::Release);
        self.own.changed.notify(usize::MAX);
    }
}

impl Use {
    fn has_ended(&self) -> bool {
        // Acquire: partner of the Release in the drop of the claim. What was in flight has ended before.
        self.ended.load(Ordering::Acquire)
    }
}

/// The target of a job that has to let a former one end first.
#[derive(Debug)]
struct Gate {
    file: Edge,
    before: Vec<Arc<Use>>,
    open: AtomicBool,
}

impl Gate {
    fn is_open(&self) -> bool {
        if self.open.load(Ordering::Acquire) {
            return true;
        }
        let open = self.before.iter().all(|u| u.has_ended());
        if open {
            self.open.store(true, Ordering::Release);
        }
        open
    }

    /// Waits until it is open; a cancel ends the wait.
    async fn wait(&self, cx: &Cx) -> IoResult {
        for before in &self.before {
            loop {
                // Listen first, then look.
                let listener = before.changed.listen();
                if before.has_ended() {
                    break;
                }
                cx.waiting(listener).await?;
            }
        }
        Ok(())
    }
}

impl Node for Gate {
    fn driver(&self) -> &'static str {
        "target-gate"
    }

    fn limits(&self) -> Limits {
        // What is in flight is no zeros.
        Limits { zero_init: false, ..self.file.get().limits() }
    }

    fn children(&self) -> Vec<(&'static str, &Edge)> {
        vec![("file", &self.file)]
    }

    fn plan(&self, req: ReqRef<'_>) -> Plan {
        if self.is_open() { self.file.get().plan(req) } else { Plan::Slow }
    }

    fn execute<'a>(&'a self, cx: &'a Cx, req: Request) -> NodeFuture<'a, IoResult> {
        Box::pin(async move {
            self.wait(cx).await?;
            let file = self.file.node();
            cx.run(&*file, req).await
        })
    }

    fn block_status<'a>(&'a self, cx: &'a Cx, range: ByteRange) -> NodeFuture<'a, IoResult<Extent>> {
        Box::pin(async move {
            self.wait(cx).await?;
            let file = self.file.node();
            file.block_status(cx, range).await
        })
    }

    fn resize<'a>(&'a self, _cx: &'a Cx, _size: u64, _growth: Growth) -> NodeFuture<'a, IoResult> {
        // It belongs to a job, whose target keeps its size.
        fixed_size()
    }

    fn reserve<'a>(&'a self, cx: &'a Cx, len: u64, class: Class) -> NodeFuture<'a, IoResult<Reservation>> {
        let file = self.file.node();
        Box::pin(async move { file.reserve(cx, len, class).await })
    }

    fn settle<'a>(&'a self, _cx: &'a Cx) -> NodeFuture<'a, IoResult> {
        // It holds nothing; what waits here is waited for by those who wait.
        Box::pin(async { Ok(()) })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
