//! Reads and block status: memory over the spill file over the file below (S49).
//!
//! A read takes references to the data under the lock and copies after it, so data that is drained meanwhile stays until it has been copied (S16).
//! Nothing is read in memory of the cache: the reader's own buffers take it all (S73).

use super::index::{Data, Parts};
use super::loss::lost_error;
use super::spill::unreadable;
use super::store::Store;
use crate::error::IoResult;
use crate::node::{Extent, ExtentFlags};
use crate::queue::Cx;
use crate::request::{Buffers, Class, ReqRef, Request};
use crate::sync::Arc;
use crate::units::ByteRange;

/// How a read can be carried out.
pub(super) enum ReadPlan {
    /// The file has all of it.
    File,
    /// Done from memory.
    Done(IoResult),
    /// It takes a task.
    Slow,
}

impl Store {
    /// Carries out what needs no waiting.
    pub(super) fn plan_read(&self, req: ReqRef<'_>) -> ReadPlan {
        if self.has_no_pieces() {
            return match self.broken() {
                Some(e) => ReadPlan::Done(Err(e)),
                None => ReadPlan::File,
            };
        }
        let parts = {
            let work = self.work.lock();
            if !work.index.overlaps(req.range) {
                return ReadPlan::File;
            }
            work.index.parts(req.range)
        };
        let in_memory = |d: &Option<Data>| !matches!(d, None | Some(Data::Spill(..)));
        if !parts.iter().all(|p| in_memory(&p.data)) {
            return ReadPlan::Slow;
        }
        ReadPlan::Done(copy_out(&parts, req.range.offset, req.bufs))
    }

    /// Carries out a read.
    pub(super) async fn read(self: &Arc<Self>, cx: &Cx, req: Request) -> IoResult {
        let parts = {
            let work = self.work.lock();
            if let Some(e) = work.broken {
                return Err(e);
            }
            work.index.parts(req.range)
        };
        copy_out(&parts, req.range.offset, &req.bufs)?;
        for part in &parts {
            let bufs = slice(&req.bufs, part.range, req.range.offset);
            match &part.data {
                None => self.read_file(cx, part.range.offset, bufs, req.class).await?,
                Some(Data::Spill(place, at)) => {
                    if let Some(spill) = &self.spill {
                        spill.read(cx, place, *at, bufs).await.map_err(unreadable)?;
                    }
                }
                Some(Data::Ram(_) | Data::Zero { .. } | Data::Lost(_)) => {}
            }
        }
        Ok(())
    }

    async fn read_file(&self, cx: &Cx, offset: u64, bufs: Buffers, class: Class) -> IoResult {
        let file = self.file.node();
        cx.run(&*file, Request::read(offset, bufs).class(class)).await
    }

    /// Status of the start of `range`. What is held here is data of this layer, never unallocated (S18).
    pub(super) async fn status(&self, cx: &Cx, range: ByteRange) -> IoResult<Extent> {
        let parts = self.work.lock().index.parts(range);
        let flags = |data: &Data| match data {
            Data::Ram(_) | Data::Spill(..) => ExtentFlags::ALLOCATED,
            Data::Zero { .. } => ExtentFlags::ALLOCATED | ExtentFlags::ZERO,
            Data::Lost(_) => ExtentFlags::NO_ACCESS,
        };
        let Some(first) = parts.first() else { return Ok(Extent::data(range.len)) };
        let Some(data) = &first.data else {
            let file = self.file.node();
            return file.block_status(cx, first.range).await;
        };
        let wanted = flags(data);
        let same = parts.iter().take_while(|p| p.data.as_ref().is_some_and(|d| flags(d) == wanted));
        let end = same.last().map_or(range.end(), |p| p.range.end());
        Ok(Extent { len: end - range.offset, flags: wanted, depth: 0 })
    }
}

/// Copies what is in memory. `base` is the offset that the buffers begin at.
fn copy_out(parts: &Parts, base: u64, bufs: &Buffers) -> IoResult {
    for part in parts {
        match &part.data {
            Some(Data::Ram(b)) => slice(bufs, part.range, base).copy_from(b),
            Some(Data::Zero { .. }) => slice(bufs, part.range, base).fill(0),
            Some(Data::Lost(e)) => return Err(lost_error(*e)),
            None | Some(Data::Spill(..)) => {}
        }
    }
    Ok(())
}

fn slice(bufs: &Buffers, range: ByteRange, base: u64) -> Buffers {
    bufs.slice((range.offset - base) as usize, range.len as usize)
}
