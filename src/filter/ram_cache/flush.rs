//! Flush, and the order of what reaches the file (S49).
//!
//! A flush takes the number of the last change before it and waits until no piece and no drain stands for an older one; then it
//! flushes the file. What came later stays, unless it replaced something older that had not reached the file.
//!
//! A *direct* write is a request that goes straight to the file: FUA, write-through, background class, discard. It waits until no write under
//! way overlaps it, and while it runs no drain of its range begins; when it has ended well the older versions in memory and in the
//! spill file go. Newer ones stay and are drained after it. It runs as a task of its own: a request that is dropped half-way
//! must not leave the range open to others while its data may still arrive.

use super::config::PIECE_COST;
use super::index::Direct;
use super::loss::lost_error;
use super::store::Store;
use crate::error::{IoError, IoResult};
use crate::queue::{Cx, IoCell};
use crate::request::{Class, Op, Request};
use crate::sync::Arc;
use crate::units::ByteRange;

/// Ends a direct write, however its task ends.
struct DirectGuard {
    store: Arc<Store>,
    direct: Option<Direct>,
    drop_older: bool,
    on_file: bool,
    cell: Arc<IoCell>,
    result: IoResult,
}

impl Store {
    /// Carries out a flush.
    pub(super) async fn flush(self: &Arc<Self>, cx: &Cx, class: Class) -> IoResult {
        let (begun, failures, era) = {
            let mut work = self.work.lock();
            if let Some(e) = work.broken {
                return Err(e);
            }
            (work.index.begin_flush(), work.failures, work.era)
        };
        if let Some(epoch) = begun {
            self.kick();
            self.wait_until(cx, |work| {
                if let Some(e) = work.ended(era) {
                    return Some(Err(e));
                }
                if work.index.is_flushed(epoch) {
                    return Some(Ok(()));
                }
                match work.failed {
                    Some((failed, e)) if work.failures != failures && failed <= epoch => Some(Err(e)),
                    _ => None,
                }
            })
            .await??;
        }
        let lost = self.work.lock().index.first_lost();
        if let Some((_, e)) = lost {
            return Err(lost_error(e));
        }
        let file = self.file.node();
        cx.run(&*file, Request::flush().class(class)).await
    }

    /// Carries out a request straight on the file.
    pub(super) async fn direct(self: &Arc<Self>, cx: &Cx, req: Request) -> IoResult {
        let range = req.range;
        let era = self.work.lock().era;
        let direct = loop {
            let moved = self.moved.listen();
            let (direct, hurry) = self.begin_direct(range, era)?;
            if let Some(direct) = direct {
                break direct;
            }
            // What is in the way for want of memory goes with the drain.
            let _hurry = hurry.then(|| self.hurry());
            cx.waiting(moved).await?;
        };
        self.run_direct(cx, req, direct, true).await
    }

    /// Carries out a discard: what is held of the range goes at once, whatever the file does (S20, S29).
    pub(super) async fn discard(self: &Arc<Self>, cx: &Cx, req: Request) -> IoResult {
        let range = req.range;
        self.edit_splitting(
            inner(range, self.file.get().limits().discard_align.into()),
            |work, r, garbage| {
                work.index.drop_range(r, u64::MAX, garbage);
            },
        );
        self.moved.notify(usize::MAX);
        let era = self.work.lock().era;
        let direct = loop {
            let moved = self.moved.listen();
            let begun = {
                let mut work = self.work.lock();
                if let Some(e) = work.ended(era) {
                    return Err(e);
                }
                work.index.begin_direct(range)
            };
            if let Some(direct) = begun {
                break direct;
            }
            cx.waiting(moved).await?;
        };
        // Data that came since is newer than the discard and stays.
        self.run_direct(cx, req, direct, false).await
    }

    /// Begins a direct write, with the memory that its end may need; otherwise says whether it is memory that is missing.
    fn begin_direct(&self, range: ByteRange, era: u64) -> IoResult<(Option<Direct>, bool)> {
        // Its end removes older pieces, which may cut one in two.
        let paid = self.account.space.force(PIECE_COST);
        let direct = {
            let mut work = self.work.lock();
            match work.ended(era) {
                Some(e) => Err(e),
                None if paid => Ok(work.index.begin_direct(range)),
                None => Ok(None),
            }
        };
        if paid && !matches!(direct, Ok(Some(_))) {
            self.account.give(PIECE_COST);
        }
        direct.map(|d| (d, !paid))
    }

    async fn run_direct(
        self: &Arc<Self>,
        cx: &Cx,
        req: Request,
        direct: Direct,
        drop_older: bool,
    ) -> IoResult {
        let cell: Arc<IoCell> = Arc::default();
        let mut guard = DirectGuard {
            store: self.clone(),
            direct: Some(direct),
            drop_older,
            on_file: false,
            cell: cell.clone(),
            result: Err(IoError::panicked()),
        };
        let (file, own) = (self.file.node(), cx.cancelled_by(&self.cancel()));
        // Nothing of the lost marks what is written anew.
        cx.spawn(async move {
            let is_discard = req.op == Op::Discard;
            guard.result = own.run(&*file, req).await;
            guard.on_file = guard.result.is_ok() && !is_discard;
            drop(guard);
        });
        std::future::poll_fn(|context| cell.poll(context)).await
    }

    /// Removes from the index what lies in `range`, as far as there is memory for a piece that is cut in two.
    fn edit_splitting(
        &self,
        range: ByteRange,
        f: impl FnOnce(&mut super::store::Work, ByteRange, &mut super::index::Garbage),
    ) {
        if range.is_empty() || !self.account.space.force(PIECE_COST) {
            return;
        }
        self.edit(PIECE_COST, |work, garbage| f(work, range, garbage));
    }
}

impl Drop for DirectGuard {
    fn drop(&mut self) {
        let Some(direct) = self.direct.take() else { return };
        let paid = if self.drop_older { PIECE_COST } else { 0 };
        let on_file = self.on_file && self.drop_older;
        self.store.edit(paid, |work, garbage| work.index.end_direct(direct, on_file, garbage));
        self.cell.complete(self.result);
        self.store.moved.notify(usize::MAX);
        self.store.kick();
    }
}

/// The whole units of `align` bytes inside `range`.
fn inner(range: ByteRange, align: u64) -> ByteRange {
    let align = align.max(1);
    let start = crate::units::align_up(range.offset, align);
    let end = crate::units::align_down(range.end(), align);
    ByteRange { offset: start, len: end.saturating_sub(start) }
}
