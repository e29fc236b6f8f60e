//! Job type `copy`: one node onto another, without a point in time.
//!
//! The source must not change while it is copied: it is a snapshot view, or a disk that nobody writes to. (For a disk that is written to there is
//! `backup`.) Options beside those of all jobs and of the engine: `source` (node or disk), `target` (node), both required.

use super::copy::{self, CopyOptions, Failure, Moved, Piece, Work, write_out};
use super::registry::{Jobs, Made};
use super::target::Claim;
use super::{Body, Job};
use crate::error::{Error, IoError, IoResult, Result};
use crate::events::Side;
use crate::node::{Edge, Node, NodeFuture, Vertex};
use crate::options::Options;
use crate::queue::Cx;
use crate::report::Action;
use crate::request::{Buffers, Class, Op, Request};
use crate::sync::{Arc, Mutex};
use crate::units::ByteRange;
use std::collections::BTreeMap;

#[derive(Debug)]
struct Copy {
    work: Arc<NodeCopy>,
    options: CopyOptions,
    claim: Mutex<Option<Claim>>,
}

#[derive(Debug)]
struct NodeCopy {
    source: Edge,
    target: Edge,
    size: u64,
    /// Zeros need not be written.
    zero_init: bool,
    todo: Mutex<Todo>,
}

/// What has not been copied, and the last answer about what the source holds.
#[derive(Debug)]
struct Todo {
    /// Disjoint ranges: offset to length.
    left: BTreeMap<u64, u64>,
    known: Option<(ByteRange, bool)>,
}

/// Makes the body of a `copy` job.
pub(super) fn make(jobs: &Arc<Jobs>, options: &mut Options) -> Result<Made> {
    let source = jobs.graph().place(&options.require_str("source")?)?;
    let target = jobs.graph().node(&options.require_str("target")?)?;
    let copy_options = CopyOptions::take(options)?;
    check_target(jobs, &source, &target)?;
    let (from, to) = (source.top().limits(), target.top().limits());
    if to.size < from.size {
        let text = format!("option 'target': {} bytes are too few for {} bytes", to.size, from.size);
        return Err(Error::invalid(text));
    }
    let claim = jobs.claim(&target)?;
    let left = if from.size > 0 { BTreeMap::from([(0, from.size)]) } else { BTreeMap::new() };
    let work = NodeCopy {
        source: Edge::to_vertex(source),
        target: claim.gate(&target).map_or_else(|| Edge::to_vertex(target), Edge::to_node),
        size: from.size,
        zero_init: to.zero_init,
        todo: Mutex::new(Todo { left, known: None }),
    };
    let body = Copy { work: Arc::new(work), options: copy_options, claim: Mutex::new(Some(claim)) };
    Ok(Made { body: Box::new(body), default_id: None, total: from.size })
}

/// Refuses a target that cannot be written, that is used by a disk, or that leads to the source (or the source to it).
pub(super) fn check_target(jobs: &Arc<Jobs>, source: &Arc<Vertex>, target: &Arc<Vertex>) -> Result<()> {
    let name = target.name();
    if target.top().limits().read_only {
        return Err(Error::new(
            libc::EACCES,
            crate::error::Code::ReadOnly,
            format!("node '{name}' is read-only (option 'target')"),
        ));
    }
    if reaches(target, source, 0) || reaches(source, target, 0) {
        let text =
            format!("node '{name}' and the source '{}' contain one another (option 'target')", source.name());
        return Err(Error::invalid(text));
    }
    let users = jobs.graph().disks_reaching(std::slice::from_ref(target));
    if let Some(disk) = users.first() {
        return Err(Error::busy(format!(
            "node '{name}' is used by disk '{}' (option 'target')",
            disk.name()
        )));
    }
    Ok(())
}

fn reaches(from: &Arc<Vertex>, to: &Arc<Vertex>, depth: usize) -> bool {
    if Arc::ptr_eq(from, to) {
        return true;
    }
    if depth > crate::limits::GRAPH_DEPTH_MAX {
        return false;
    }
    let filters = from.filters();
    std::iter::once(from).chain(&filters).any(|v| {
        v.base().children().iter().filter_map(|(_, e)| e.vertex()).any(|below| reaches(below, to, depth + 1))
    })
}

impl Body for Copy {
    fn give_up(&self) {
        drop(self.claim.lock().take());
    }

    fn run<'a>(&'a self, cx: &'a Cx, job: &'a Arc<Job>) -> NodeFuture<'a, IoResult> {
        Box::pin(async move {
            copy::run(cx, job, self.work.clone(), &self.options).await.map_err(|f| f.error)?;
            let target = self.work.target.node();
            let flushed = cx.run(&*target, Request::flush().class(Class::Background)).await;
            if let Err(error) = flushed {
                let range = ByteRange { offset: 0, len: 0 };
                job.log(Failure { error, side: Side::Target, op: Op::Flush, range }, Action::None);
            }
            flushed
        })
    }

    fn release(&self, _cause: IoError) {}

    fn finish<'a>(&'a self, _cx: &'a Cx, _job: &'a Arc<Job>) -> NodeFuture<'a, IoResult> {
        Box::pin(async move {
            drop(self.claim.lock().take());
            Ok(())
        })
    }

    fn concluding(&self) {
        if let Some(claim) = &*self.claim.lock() {
            claim.conclude();
        }
    }

    fn abort<'a>(&'a self, _cx: &'a Cx, job: &'a Arc<Job>) -> NodeFuture<'a, ()> {
        Box::pin(async move {
            // The target is free for others when the last write to it has ended.
            job.flight.wait_empty().await;
            drop(self.claim.lock().take());
        })
    }

    fn done(&self) -> u64 {
        self.work.done()
    }
}

impl Work for NodeCopy {
    fn next<'a>(&'a self, cx: &'a Cx, at: u64, max: u64) -> NodeFuture<'a, Option<Piece>> {
        Box::pin(async move {
            let left = self.todo.lock().first_from(at)?;
            let (known, zero) = self.status(cx, left).await;
            let mut range = left.intersect(known);
            if !zero {
                range.len = range.len.min(max);
            }
            Some(Piece { range, zero })
        })
    }

    fn copy<'a>(
        &'a self,
        cx: &'a Cx,
        piece: Piece,
        bufs: Buffers,
        class: Class,
    ) -> NodeFuture<'a, std::result::Result<Moved, Failure>> {
        Box::pin(async move {
            let range = piece.range;
            let (source, target) = (self.source.node(), self.target.node());
            let failure = |side, op| move |error| Failure { error, side, op, range };
            let moved = if piece.zero {
                if !self.zero_init {
                    let written = copy::write_zeroes(cx, &*target, range, class).await;
                    written.map_err(failure(Side::Target, Op::WriteZeroes))?;
                }
                Moved { zero: range.len, ..Moved::default() }
            } else {
                let read = cx.run(&*source, Request::read(range.offset, bufs.clone()).class(class)).await;
                read.map_err(failure(Side::Source, Op::Read))?;
                let written = write_out(cx, &*target, range.offset, bufs, class, self.zero_init).await;
                let (copied, zero) = written.map_err(failure(Side::Target, Op::Write))?;
                Moved { copied, zero, skipped: 0 }
            };
            self.todo.lock().remove(range);
            Ok(moved)
        })
    }

    fn done(&self) -> u64 {
        self.size - self.todo.lock().left.values().sum::<u64>()
    }
}

impl NodeCopy {
    /// What is known of the start of `range`, asking the source only for what the last answer does not cover.
    async fn status(&self, cx: &Cx, range: ByteRange) -> (ByteRange, bool) {
        let known = self.todo.lock().known;
        if let Some((extent, zero)) =
            known.filter(|(k, _)| k.offset <= range.offset && range.offset < k.end())
        {
            return (extent, zero);
        }
        let source: Arc<dyn Node> = self.source.node();
        let answer = match cx.status(&*source, range).await {
            Ok(extent) => {
                (ByteRange { offset: range.offset, len: extent.len.min(range.len) }, extent.is_zero())
            }
            // The read will tell.
            Err(_) => (range, false),
        };
        self.todo.lock().known = Some(answer);
        answer
    }
}

impl Todo {
    fn first_from(&self, at: u64) -> Option<ByteRange> {
        let before = self.left.range(..at).next_back().map(|(o, l)| ByteRange { offset: *o, len: *l });
        if let Some(b) = before.filter(|b| b.end() > at) {
            return Some(ByteRange { offset: at, len: b.end() - at });
        }
        self.left.range(at..).next().map(|(o, l)| ByteRange { offset: *o, len: *l })
    }

    fn remove(&mut self, done: ByteRange) {
        let first = self.left.range(..=done.offset).next_back().map_or(done.offset, |(o, _)| *o);
        let hit: Vec<(u64, u64)> = self.left.range(first..done.end()).map(|(o, l)| (*o, *l)).collect();
        for (offset, len) in hit {
            let old = ByteRange { offset, len };
            if !old.overlaps(done) {
                continue;
            }
            self.left.remove(&offset);
            if old.offset < done.offset {
                self.left.insert(old.offset, done.offset - old.offset);
            }
            if old.end() > done.end() {
                self.left.insert(done.end(), old.end() - done.end());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_agrees_with_a_set_of_bytes() {
        let ranges: Vec<ByteRange> =
            (0..6).flat_map(|offset| (1..=6 - offset).map(move |len| ByteRange { offset, len })).collect();
        for a in &ranges {
            for b in &ranges {
                let mut todo = Todo { left: BTreeMap::from([(0, 6)]), known: None };
                todo.remove(*a);
                todo.remove(*b);
                let inside = |r: &ByteRange, x: u64| r.offset <= x && x < r.end();
                let left: Vec<u64> = (0..6).filter(|x| !inside(a, *x) && !inside(b, *x)).collect();
                assert_eq!(todo.left.values().sum::<u64>(), left.len() as u64);
                for at in 0..6 {
                    let want = left.iter().copied().find(|x| *x >= at);
                    assert_eq!(todo.first_from(at).map(|r| r.offset), want);
                }
            }
        }
    }
}
