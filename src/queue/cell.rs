//! The meeting point of one operation and the task that waits for it.

use crate::error::IoResult;
use crate::sync::Mutex;
use std::task::{Context, Poll, Waker};

/// A result that is set once, from any thread, and taken by one task.
#[derive(Debug, Default)]
pub struct IoCell {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    result: Option<IoResult>,
    waker: Option<Waker>,
}

impl IoCell {
    /// Sets the result and wakes the waiter. A second call is ignored: the first result stands.
    pub fn complete(&self, result: IoResult) {
        let waker = {
            let mut s = self.state.lock();
            if s.result.is_some() {
                return;
            }
            s.result = Some(result);
            s.waker.take()
        };
        if let Some(w) = waker {
            w.wake();
        }
    }

    /// Nobody waits any more. A waker that is kept keeps its task, and with it the executor that has the operation.
    pub(super) fn forget_waiter(&self) {
        let waker = self.state.lock().waker.take();
        drop(waker);
    }

    /// The result, or registers the task to be woken.
    pub fn poll(&self, cx: &mut Context<'_>) -> Poll<IoResult> {
        let mut s = self.state.lock();
        match s.result {
            Some(r) => Poll::Ready(r),
            None => {
                match &mut s.waker {
                    Some(w) => w.clone_from(cx.waker()),
                    none => *none = Some(cx.waker().clone()),
                }
                Poll::Pending
            }
        }
    }
}
