//! Parts in flight.

use super::{Failure, Moved, Piece, Work};
use crate::error::IoError;
use crate::events::Side;
use crate::queue::{Cancel, Env};
use crate::request::{Buffers, Class, Op};
use crate::sync::{Arc, Mutex};
use crate::units::ByteRange;
use event_listener::{Event, EventListener};
use std::collections::BTreeMap;

/// The parts of one job that are in flight, and what has become of the others.
#[derive(Debug, Default)]
pub(in crate::job) struct Flight {
    state: Mutex<State>,
    ended: Event,
    /// Ends what parts wait for, such as a rate limit of the target.
    cancel: Arc<Cancel>,
}

#[derive(Debug, Default)]
struct State {
    /// Parts in flight by offset; they are disjoint.
    parts: BTreeMap<u64, u64>,
    /// No part that has not begun may begin.
    stopped: bool,
    started: u64,
    moved: Totals,
    failed: Vec<Failure>,
}

/// Sums over the parts of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::job) struct Totals {
    /// Parts that have ended well.
    pub(in crate::job) parts: u64,
    /// Bytes read and written.
    pub(in crate::job) copied: u64,
    /// Bytes of zeros that moved no payload.
    pub(in crate::job) zero: u64,
    /// Parts that failed.
    pub(in crate::job) failed: u64,
}

impl Flight {
    /// Starts a part as a task on some worker.
    pub(super) fn start(
        self: &Arc<Self>,
        env: &Arc<Env>,
        work: Arc<dyn Work>,
        piece: Piece,
        bufs: Buffers,
        class: Class,
    ) -> crate::error::Result<()> {
        let part = Part::new(self, piece);
        env.spawn_background(move |cx| async move {
            if part.is_stopped() {
                return part.end(Ok(Moved { skipped: piece.range.len, ..Moved::default() }));
            }
            let result = work.copy(&cx.cancelled_by(&part.flight.cancel), piece, bufs, class).await;
            part.end(result);
        })
    }

    /// Parts in flight.
    pub(in crate::job) fn parts(&self) -> usize {
        self.state.lock().parts.len()
    }

    /// The first part in flight that overlaps `range`.
    pub(super) fn first_overlap(&self, range: ByteRange) -> Option<ByteRange> {
        let s = self.state.lock();
        let before = s.parts.range(..range.offset).next_back();
        let from = s.parts.range(range.offset..range.end()).next();
        let part = |(offset, len): (&u64, &u64)| ByteRange { offset: *offset, len: *len };
        before.map(part).filter(|p| p.overlaps(range)).or_else(|| from.map(part))
    }

    /// Parts ever started.
    pub(in crate::job) fn started(&self) -> u64 {
        self.state.lock().started
    }

    /// Parts that have not begun end at once, and so do those that wait for something else than I/O.
    pub(in crate::job) fn stop(&self) {
        self.state.lock().stopped = true;
        self.cancel.cancel();
    }

    /// Failures since the last call, in the order in which they happened.
    pub(super) fn take_failed(&self) -> Vec<Failure> {
        std::mem::take(&mut self.state.lock().failed)
    }

    /// Sums so far.
    pub(in crate::job) fn totals(&self) -> Totals {
        self.state.lock().moved
    }

    /// Whether no part is in flight and no failure waits to be looked at.
    pub(super) fn is_quiet(&self) -> bool {
        let s = self.state.lock();
        s.parts.is_empty() && s.failed.is_empty()
    }

    /// Notified when a part ends; listen first, then look.
    pub(in crate::job) fn listen(&self) -> EventListener {
        self.ended.listen()
    }

    /// Waits until no part is in flight.
    pub(in crate::job) async fn wait_empty(&self) {
        loop {
            let listener = self.listen();
            if self.parts() == 0 {
                return;
            }
            listener.await;
        }
    }
}

/// Counts a part as in flight; a part that is dropped without an end (a panic, the end of the context) has failed.
#[derive(Debug)]
struct Part {
    flight: Arc<Flight>,
    piece: Piece,
    open: bool,
}

impl Part {
    fn new(flight: &Arc<Flight>, piece: Piece) -> Self {
        let mut s = flight.state.lock();
        let old = s.parts.insert(piece.range.offset, piece.range.len);
        debug_assert!(old.is_none(), "parts in flight are disjoint");
        s.started += 1;
        drop(s);
        Self { flight: flight.clone(), piece, open: true }
    }

    fn is_stopped(&self) -> bool {
        self.flight.state.lock().stopped
    }

    fn end(mut self, result: Result<Moved, Failure>) {
        self.finish(result);
    }

    fn finish(&mut self, result: Result<Moved, Failure>) {
        self.open = false;
        let mut s = self.flight.state.lock();
        s.parts.remove(&self.piece.range.offset);
        match result {
            Ok(moved) => {
                s.moved.parts += 1;
                s.moved.copied += moved.copied;
                s.moved.zero += moved.zero;
            }
            Err(failure) => {
                s.moved.failed += 1;
                s.failed.push(failure);
            }
        }
        drop(s);
        self.flight.ended.notify(usize::MAX);
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if self.open {
            let (error, range) = (IoError::panicked(), self.piece.range);
            self.finish(Err(Failure { error, side: Side::Host, op: Op::Write, range }));
        }
    }
}
