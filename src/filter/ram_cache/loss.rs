//! Errors of the file and the spill file, and what was lost (S28, S47, S50).
//!
//! A write that fails keeps its buffer and is tried again, each time later, until it has been tried [`TRIES_MAX`] times. If somebody
//! has said that he takes over losses ([`Losses::set_handler`], the owner of a snapshot) the range is then given up: it is listed, reads of it
//! fail, and he is told. Without such an owner, as for a cache over a guest's disk, nothing is ever given up: it is tried
//! on, once a second, and flushes fail. Data in a spill file that cannot be read is lost in either case: there is no other copy.

use super::store::Store;
use crate::error::{Code, IoError};
use crate::events::{Event, EventKind, Side};
use crate::report::{Action, ErrorLog, LostList, LostRange, Report};
use crate::request::Op;
use crate::sync::{Arc, Mutex};
use crate::units::ByteRange;
use std::time::Duration;

/// Tries of a write before its range is given up.
pub(super) const TRIES_MAX: u32 = 8;

/// Who is told of lost ranges.
pub type LossHandler = Arc<dyn Fn(ByteRange, IoError) + Send + Sync>;

/// Errors and losses of one cache.
#[derive(Default)]
pub(super) struct Losses {
    pub(super) log: ErrorLog,
    pub(super) lost: LostList,
    handler: Mutex<Option<LossHandler>>,
}

impl Losses {
    pub(super) fn set_handler(&self, handler: Option<LossHandler>) {
        *self.handler.lock() = handler;
    }

    /// Whether somebody takes over losses.
    pub(super) fn has_handler(&self) -> bool {
        self.handler.lock().is_some()
    }
}

/// How long to wait after so many tries.
pub(super) fn pause(tries: u32) -> Duration {
    Duration::from_millis(10 << tries.min(7)).min(Duration::from_secs(1))
}

/// The error that readers of a lost range get: the saved errno (S15).
pub(super) const fn lost_error(cause: IoError) -> IoError {
    IoError::new(cause.errno, Code::RangeLost)
}

impl Store {
    /// Logs an error and what was done about it.
    pub(super) fn report(&self, error: IoError, side: Side, op: Op, range: ByteRange, action: Action) {
        let report = Report::new(&self.env.runtime, error, side, op, range);
        let logged = self.losses.log.add(report.on_node(self.name.as_str()).action(action));
        if logged.count == 1 {
            let text = format!(
                "{}: {} of {} bytes at {} on the {} failed: {error} ({})",
                self.name,
                op.name(),
                range.len,
                range.offset,
                side.name(),
                action.name()
            );
            self.env.log(1, "ram-cache", &text);
        }
    }

    /// Lists a range as lost and tells who has to know. Without a lock held.
    pub(super) fn tell_lost(&self, range: ByteRange, error: IoError) {
        let real_ns = self.env.runtime.clock.wall_ns();
        self.losses.lost.add(LostRange { range, error, real_ns });
        self.env.events.post(Event {
            time_ns: self.env.runtime.clock.now().0,
            offset: range.offset,
            len: range.len,
            errno: error.errno,
            code: error.code,
            side: Side::Target,
            ..Event::new(EventKind::RangeLost, self.name.as_str())
        });
        let handler = self.losses.handler.lock().clone();
        if let Some(tell) = handler {
            tell(range, error);
        }
    }
}
