//! The way of what was unlinked back into the index (rule 4).
//!
//! Its cut is durable. Then all who may have looked it up must have ended, then a punch, if wanted, and then the count is lowered: only a count that falls to 0
//! makes a cluster free. The lowered count goes out with the next commit and is simply raised again if the cluster is used before. One release at a
//! time, as a task of its own.

use super::allocator::Allocator;
use super::pending::{Unlinked, UnlinkedKind};
use crate::error::IoResult;
use crate::format::qcow2::flight::Flight;
use crate::queue::Cx;
use crate::request::{Class, Request};
use crate::sync::Arc;
use crate::units::{ByteRange, align_down, align_up};

/// Entries of the list that are worked on at once: bounds the blocks that must be in RAM together.
const BATCH: usize = 64;

impl Allocator {
    /// Begins to release what finished cuts have made durable, unless that is under way.
    pub fn release_soon(self: &Arc<Self>, cx: &Cx) -> Arc<Flight<()>> {
        let mut slot = self.release.lock();
        if let Some(flight) = &*slot {
            return flight.clone();
        }
        let (flight, landing) = Flight::start();
        *slot = Some(flight.clone());
        drop(slot);
        let (this, task) = (self.clone(), cx.detached());
        cx.spawn(async move {
            let done = this.release(&task).await;
            *this.release.lock() = None;
            drop(this);
            landing.land(done);
        });
        flight
    }

    /// Releases everything that is durable by now, and waits for it.
    pub async fn release_all(self: &Arc<Self>, cx: &Cx) -> IoResult {
        loop {
            let under_way = self.release.lock().clone();
            let last = under_way.is_none();
            under_way.unwrap_or_else(|| self.release_soon(cx)).wait(cx).await?;
            if last {
                return Ok(());
            }
        }
    }

    /// Waits until no task of the allocator is under way.
    pub async fn idle(&self, cx: &Cx) -> IoResult {
        loop {
            let flight = self.release.lock().clone().or(self.refill.lock().clone());
            let Some(flight) = flight else { return Ok(()) };
            // What became of it is for those who asked for it.
            let _ = flight.wait(cx).await;
            if cx.is_cancelled() {
                return Err(crate::error::IoError::cancelled());
            }
        }
    }

    async fn release(&self, cx: &Cx) -> IoResult {
        let list = {
            let mut state = self.state.lock();
            state.pending.take(self.done())
        };
        if list.is_empty() {
            return Ok(());
        }
        self.grace.quiesce().await;
        let file = self.file.node();
        for (at, batch) in list.chunks(BATCH).enumerate() {
            for unlinked in batch.iter().filter(|u| u.punch && u.kind == UnlinkedKind::Clusters) {
                let inside = file.limits().size.saturating_sub(unlinked.range.offset).min(unlinked.range.len);
                let range = ByteRange { offset: unlinked.range.offset, len: inside };
                if !range.is_empty() {
                    // Advice: a failure costs space only.
                    let _ = cx.run(&*file, Request::discard(range).class(Class::Background)).await;
                }
            }
            let ranges: Vec<ByteRange> = batch.iter().map(|u| self.counted(u)).collect();
            let lowered = self
                .with_blocks(cx, &ranges, |state| {
                    for range in &ranges {
                        let cluster = self.layout.cluster_size();
                        for offset in (range.offset..range.end()).step_by(cluster as usize) {
                            let one = ByteRange { offset, len: cluster };
                            // A count that cannot be lowered is wrong already; it stays as it is.
                            if state.counts.change(one, true).is_ok() && state.counts.get(offset) == Ok(0) {
                                state.space.insert(one);
                            }
                        }
                    }
                })
                .await;
            if let Err(e) = lowered {
                // For the next release.
                self.state.lock().pending.put_back(&list[at * BATCH..]);
                return Err(e);
            }
        }
        Ok(())
    }

    /// The clusters that lose a reference.
    fn counted(&self, unlinked: &Unlinked) -> ByteRange {
        let cluster = self.layout.cluster_size();
        let offset = align_down(unlinked.range.offset, cluster);
        ByteRange { offset, len: align_up(unlinked.range.end(), cluster) - offset }
    }
}
