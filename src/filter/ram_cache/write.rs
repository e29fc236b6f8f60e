//! Writes and zeroes into the cache.
//!
//! Memory of the cache's own (a reservation) is kept as it is; other memory is copied into memory that is reserved first. A long write goes
//! in batch by batch, each drainable before the next is reserved (S44).

use super::reserve::{Account, Grant, MARKER, cost, is_own};
use super::store::Store;
use crate::error::IoResult;
use crate::node::Plan;
use crate::queue::Cx;
use crate::request::{Buffers, Class, Flags, Op, ReqRef, Request};
use crate::sync::Arc;
use crate::units::ByteRange;

/// Writes up to this length are copied while planning, in the submitting thread, if there is space.
const COPY_MAX: u64 = 128 << 10;

impl Store {
    /// Whether a request goes straight to the file: durable ones, and the writes of those who need no speed and should take no space
    /// from those who do.
    fn goes_direct(&self, req: &ReqRef<'_>) -> bool {
        let slow_zeroes = req.op == Op::WriteZeroes
            && req.flags.contains(Flags::NO_FALLBACK)
            && !self.file.get().limits().fast_zeroes;
        req.flags.contains(Flags::FUA) || req.class >= Class::Background || slow_zeroes
    }

    /// Carries out what needs no waiting.
    pub(super) fn plan_write(self: &Arc<Self>, req: ReqRef<'_>) -> Plan {
        if self.goes_direct(&req) {
            return Plan::Slow;
        }
        let now = self.env.runtime.clock.now();
        let kept = if is_own(req.bufs, &self.account) {
            self.keep(now, req.range.offset, req.bufs)
        } else {
            if req.range.len > COPY_MAX.min(self.batch()) || is_own(req.bufs, &self.through) {
                return Plan::Slow;
            }
            let Some(charge) = self.account.try_book(cost(req.range.len)) else { return Plan::Slow };
            self.space_taken();
            let bufs = self.account.memory(req.range.len, charge);
            bufs.copy_from(req.bufs);
            self.keep(now, req.range.offset, &bufs)
        };
        match kept {
            Ok(true) => Plan::Done(Ok(())),
            Ok(false) => Plan::Slow,
            Err(e) => Plan::Done(Err(e)),
        }
    }

    /// Carries out what needs no waiting.
    pub(super) fn plan_zeroes(self: &Arc<Self>, req: ReqRef<'_>) -> Plan {
        if self.goes_direct(&req) {
            return Plan::Slow;
        }
        let Some(charge) = self.account.try_book(MARKER) else { return Plan::Slow };
        self.space_taken();
        let now = self.env.runtime.clock.now();
        match self.keep_zeros(now, req.range, req.flags.contains(Flags::MAY_UNMAP), charge) {
            Ok(true) => Plan::Done(Ok(())),
            Ok(false) => Plan::Slow,
            Err(e) => Plan::Done(Err(e)),
        }
    }

    /// Carries out a write.
    pub(super) async fn write(self: &Arc<Self>, cx: &Cx, req: Request) -> IoResult {
        let through = is_own(&req.bufs, &self.through);
        if through || self.goes_direct(&req.as_ref()) {
            return self.direct(cx, req).await;
        }
        if is_own(&req.bufs, &self.account) {
            if self.keep(cx.now(), req.range.offset, &req.bufs)? {
                return Ok(());
            }
            return self.direct(cx, req).await;
        }
        let mut done = 0;
        while done < req.range.len {
            let len = self.batch().min(req.range.len - done);
            let part = req.bufs.slice(done as usize, len as usize);
            self.write_batch(cx, req.range.offset + done, part, &req).await?;
            done += len;
        }
        Ok(())
    }

    async fn write_batch(self: &Arc<Self>, cx: &Cx, offset: u64, part: Buffers, req: &Request) -> IoResult {
        if let Grant::Space(charge) = self.space_for(cx, cost(part.len() as u64)).await? {
            let bufs = Account::memory(&self.account, part.len() as u64, charge);
            bufs.copy_from(&part);
            if self.keep(cx.now(), offset, &bufs)? {
                return Ok(());
            }
        }
        self.direct(cx, Request::write(offset, part).class(req.class).flags(req.flags)).await
    }

    /// Carries out a write of zeroes: one marker, however long the range is.
    pub(super) async fn zeroes(self: &Arc<Self>, cx: &Cx, req: Request) -> IoResult {
        if !self.goes_direct(&req.as_ref())
            && let Grant::Space(charge) = self.space_for(cx, MARKER).await?
        {
            let unmap = req.flags.contains(Flags::MAY_UNMAP);
            let range: ByteRange = req.range;
            if self.keep_zeros(cx.now(), range, unmap, charge)? {
                return Ok(());
            }
        }
        self.direct(cx, req).await
    }
}
