//! One operation in the hands of the program, from `submit` to its completion, exactly once.
//!
//! The program holds a [`HostIo`], the engine's future a [`Pending`]; they meet in a [`Meeting`]. Whatever the operation uses is kept in the
//! token (memory, turn, in-flight entry) and released at completion, not when the future is dropped: the program may be using it.
//!
//! A completed token is remembered for a while ([`RETIRED_MAX`] of them per backend), so that the C layer, which hands out
//! the address of an [`IoState`], can tell a second completion from a first one.

use super::gate::Permit;
use super::{HostBackend, HostOp};
use crate::error::{Code, IoError, IoResult};
use crate::inflight::Entry;
use crate::node::Extent;
use crate::queue::Env;
use crate::request::{Buffers, Class, Flags};
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Arc, Mutex, Weak};
use crate::units::ByteRange;
use event_listener::Event;
use std::collections::VecDeque;
use std::fmt;
use std::task::{Context, Poll, Waker};

/// Completed tokens remembered.
const RETIRED_MAX: usize = 256;

/// The program's handle of one operation. Clones are the same operation; when the last one is dropped without completion, it
/// fails with EIO.
#[derive(Clone, Debug)]
pub struct HostIo(Arc<IoState>);

/// What is behind a [`HostIo`]. Its address identifies the operation ([`HostIo::state`]).
pub struct IoState {
    me: Weak<IoState>,
    op: HostOp,
    flags: Flags,
    class: Class,
    range: ByteRange,
    /// Taken at completion.
    used: Mutex<Option<Used>>,
    meeting: Arc<Meeting>,
    /// For the log only: a completed token keeps neither the backend nor its memory.
    shared: Weak<Shared>,
}

/// What is in use until the completion. The order of the fields is the order of release: memory before the right to touch it,
/// the backend last.
struct Used {
    bufs: Buffers,
    _entry: Option<Arc<Entry>>,
    _permit: Option<Permit>,
    shared: Arc<Shared>,
}

/// What the tokens of one backend share.
pub(super) struct Shared {
    pub(super) backend: Arc<dyn HostBackend>,
    pub(super) env: Arc<Env>,
    running: AtomicUsize,
    idle: Event,
    retired: Mutex<VecDeque<Arc<IoState>>>,
}

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// Bytes, for reads and writes; otherwise of no meaning.
    Count(u64),
    /// Block status.
    Status(Extent),
}

/// Where the completion meets the future.
#[derive(Debug, Default)]
struct Meeting {
    state: Mutex<(Option<IoResult<Answer>>, Option<Waker>)>,
}

/// The engine's side of one operation.
pub(super) struct Pending {
    meeting: Arc<Meeting>,
    io: Weak<IoState>,
}

/// An operation about to be submitted.
pub(super) struct NewIo {
    pub(super) op: HostOp,
    pub(super) flags: Flags,
    pub(super) class: Class,
    pub(super) range: ByteRange,
    pub(super) bufs: Buffers,
    pub(super) entry: Option<Arc<Entry>>,
    pub(super) permit: Option<Permit>,
}

impl HostIo {
    pub(super) fn new(shared: &Arc<Shared>, new: NewIo) -> (Self, Pending) {
        let meeting: Arc<Meeting> = Arc::default();
        shared.running.fetch_add(1, Ordering::Relaxed);
        let state = Arc::new_cyclic(|me| IoState {
            me: me.clone(),
            op: new.op,
            flags: new.flags,
            class: new.class,
            range: new.range,
            used: Mutex::new(Some(Used {
                bufs: new.bufs,
                _entry: new.entry,
                _permit: new.permit,
                shared: shared.clone(),
            })),
            meeting: meeting.clone(),
            shared: Arc::downgrade(shared),
        });
        let pending = Pending { meeting, io: Arc::downgrade(&state) };
        (Self(state), pending)
    }

    /// What to do.
    pub fn op(&self) -> HostOp {
        self.0.op
    }

    /// How: FUA only if the backend said that it honours it.
    pub fn flags(&self) -> Flags {
        self.0.flags
    }

    /// For whom.
    pub fn class(&self) -> Class {
        self.0.class
    }

    /// Which bytes; empty for a flush.
    pub fn range(&self) -> ByteRange {
        self.0.range
    }

    /// The data of a read or write, not copied; empty for the others and after completion.
    pub fn buffers(&self) -> Buffers {
        self.0.used.lock().as_ref().map(|u| u.bufs.clone()).unwrap_or_default()
    }

    /// Ends the operation: bytes done, or a negative errno. Whether this was the first completion; others are ignored.
    pub fn complete(&self, res: i64) -> bool {
        self.0.complete(res)
    }

    /// Ends the operation with an error.
    pub fn fail(&self, error: IoError) -> bool {
        self.0.end(Err(error))
    }

    /// Ends a [`HostOp::BlockStatus`]: one extent from the start of the range, of at least one byte; what is longer than the range is cut.
    pub fn complete_status(&self, extent: Extent) -> bool {
        self.0.end(if extent.len == 0 { Err(IoError::os(libc::EIO)) } else { Ok(Answer::Status(extent)) })
    }

    /// The state, for a caller that hands its address out and keeps the reference until [`IoState::complete`] has returned true.
    pub fn into_state(self) -> Arc<IoState> {
        self.0
    }

    /// The state; its address is that of [`HostIo::into_state`].
    pub fn state(&self) -> &Arc<IoState> {
        &self.0
    }
}

impl From<Arc<IoState>> for HostIo {
    fn from(state: Arc<IoState>) -> Self {
        Self(state)
    }
}

impl IoState {
    /// [`HostIo::complete`].
    pub fn complete(&self, res: i64) -> bool {
        self.end(self.judge(res))
    }

    fn judge(&self, res: i64) -> IoResult<Answer> {
        if res < 0 {
            let errno = i32::try_from(res.unsigned_abs()).ok().filter(|e| *e <= 4095).unwrap_or(libc::EIO);
            let code = match errno {
                libc::ECANCELED => Code::Cancelled,
                libc::ENOTSUP => Code::Unsupported,
                _ => Code::Io,
            };
            return Err(IoError::new(errno, code));
        }
        let count = res.unsigned_abs();
        match self.op {
            HostOp::Request(op) if op.has_data() && count > self.range.len => {
                self.log(&format!("{} of {} bytes completed with {count}", op.name(), self.range.len));
                Err(IoError::os(libc::EIO))
            }
            HostOp::Request(_) => Ok(Answer::Count(count)),
            // A number is no status. Nothing is wrong with the data, so the safe answer is that there is some.
            HostOp::BlockStatus => Ok(Answer::Status(Extent::data(self.range.len))),
        }
    }

    fn end(&self, result: IoResult<Answer>) -> bool {
        let Some(used) = self.used.lock().take() else {
            self.log(&format!("an operation ({:?} at {}) was completed twice", self.op, self.range.offset));
            return false;
        };
        let shared = used.shared.clone();
        drop(used);
        if let Some(me) = self.me.upgrade() {
            shared.retire(me);
        }
        // Release: whoever finds nothing running (`Shared::running`) finds the memory released, too.
        if shared.running.fetch_sub(1, Ordering::Release) == 1 {
            shared.idle.notify(usize::MAX);
        }
        self.meeting.complete(result);
        true
    }

    fn log(&self, text: &str) {
        if let Some(shared) = self.shared.upgrade() {
            shared.env.log(0, "host", text);
        }
    }
}

impl Drop for IoState {
    fn drop(&mut self) {
        if self.used.get_mut().is_some() {
            self.log("an operation was dropped without completion");
            self.end(Err(IoError::os(libc::EIO)));
        }
    }
}

impl fmt::Debug for IoState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IoState").field("op", &self.op).field("range", &self.range).finish_non_exhaustive()
    }
}

impl Shared {
    pub(super) fn new(env: Arc<Env>, backend: Arc<dyn HostBackend>) -> Arc<Self> {
        let retired = Mutex::new(VecDeque::new());
        Arc::new(Self { backend, env, running: AtomicUsize::new(0), idle: Event::new(), retired })
    }

    /// Operations submitted and not completed.
    pub(super) fn running(&self) -> usize {
        self.running.load(Ordering::Acquire)
    }

    /// Waits until every operation has completed, those included whose futures are gone.
    pub(super) async fn wait_idle(&self) {
        loop {
            let listener = self.idle.listen();
            if self.running() == 0 {
                return;
            }
            listener.await;
        }
    }

    fn retire(&self, io: Arc<IoState>) {
        let old = {
            let mut retired = self.retired.lock();
            retired.push_back(io);
            if retired.len() > RETIRED_MAX { retired.pop_front() } else { None }
        };
        drop(old);
    }
}

impl Meeting {
    fn complete(&self, result: IoResult<Answer>) {
        let waker = {
            let mut state = self.state.lock();
            state.0 = Some(result);
            state.1.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Pending {
    /// The token, if it has not been completed.
    pub(super) fn io(&self) -> Option<HostIo> {
        self.io.upgrade().filter(|io| io.used.lock().is_some()).map(HostIo)
    }

    /// The answer, once it is there.
    pub(super) fn poll(&self, context: &mut Context<'_>) -> Poll<IoResult<Answer>> {
        let mut state = self.meeting.state.lock();
        match state.0 {
            Some(result) => Poll::Ready(result),
            None => {
                state.1 = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}
