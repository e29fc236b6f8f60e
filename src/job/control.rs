//! What the world wants of a job and how far it is: the meeting point of the control calls and the job's task.
//!
//! One small lock per job; each change notifies the task and whoever waits for the job. Nothing here waits. The host is told of a change of state
//! while the lock is held, so that nobody sees a state whose event is not there yet, and events come in the order of the states.

use super::status::Status;
use crate::error::{Error, IoError, IoResult, Result};
use crate::sync::Mutex;
use event_listener::{Event, EventListener};

/// Wishes and state of one job.
#[derive(Debug)]
pub(super) struct Control {
    state: Mutex<State>,
    changed: Event,
}

#[derive(Debug)]
struct State {
    status: Status,
    /// The user, or an error with policy `stop`, wants a pause.
    pause: bool,
    cancel: bool,
    finalize: bool,
    /// Too late for a cancel: the job is being concluded as a success.
    committed: bool,
    /// What is reported; set once, when the job has concluded.
    outcome: Option<IoResult>,
}

/// A look at the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct View {
    pub(super) status: Status,
    pub(super) pause: bool,
    pub(super) cancel: bool,
    pub(super) finalize: bool,
    pub(super) outcome: Option<IoResult>,
}

impl Control {
    pub(super) fn new() -> Self {
        let state = State {
            status: Status::Created,
            pause: false,
            cancel: false,
            finalize: false,
            committed: false,
            outcome: None,
        };
        Self { state: Mutex::new(state), changed: Event::new() }
    }

    pub(super) fn view(&self) -> View {
        let s = self.state.lock();
        View { status: s.status, pause: s.pause, cancel: s.cancel, finalize: s.finalize, outcome: s.outcome }
    }

    /// Listen first, then look.
    pub(super) fn listen(&self) -> EventListener {
        self.changed.listen()
    }

    /// Moves to `next` if the states allow it, and then calls `tell`; returns whether it did.
    pub(super) fn advance(&self, next: Status, tell: impl FnOnce()) -> bool {
        let mut s = self.state.lock();
        if !s.status.may_become(next) {
            return false;
        }
        s.status = next;
        tell();
        drop(s);
        self.notify();
        true
    }

    pub(super) fn set_pause(&self, id: &str, on: bool) -> Result<()> {
        let mut s = self.state.lock();
        match s.status {
            Status::Created | Status::Running | Status::Paused => {}
            status => return Err(refused(id, status, if on { "paused" } else { "resumed" })),
        }
        if s.pause == on {
            let text = if on { "is paused already" } else { "is not paused" };
            return Err(Error::invalid(format!("job '{id}' {text}")));
        }
        s.pause = on;
        drop(s);
        self.notify();
        Ok(())
    }

    /// A pause that the job itself asks for (error policy `stop`).
    pub(super) fn stop(&self) {
        self.state.lock().pause = true;
        self.notify();
    }

    /// Asks for a cancel. Refused once the job has been committed or has ended; a repeated cancel is accepted.
    pub(super) fn cancel(&self, id: &str) -> Result<()> {
        let mut s = self.state.lock();
        if s.committed || s.status.has_ended() || (s.status == Status::Aborting && !s.cancel) {
            return Err(refused(id, s.status, "cancelled"));
        }
        s.cancel = true;
        s.pause = false;
        drop(s);
        self.notify();
        Ok(())
    }

    pub(super) fn finalize(&self, id: &str) -> Result<()> {
        let mut s = self.state.lock();
        if s.status != Status::Pending {
            return Err(refused(id, s.status, "finalized"));
        }
        s.finalize = true;
        drop(s);
        self.notify();
        Ok(())
    }

    /// The point of no return (S35): after it a cancel is refused; before it a cancel that was asked for wins.
    pub(super) fn commit(&self) -> IoResult {
        let mut s = self.state.lock();
        if s.cancel {
            return Err(IoError::cancelled());
        }
        s.committed = true;
        Ok(())
    }

    /// Ends the job with its one outcome and calls `tell` with the state; with `dismiss` the job is let forgotten in the same step, and `tell` is called
    /// with that too. Nobody sees the end of such a job before it is forgotten: who starts the next one at once finds its id free. Returns whether it was still open.
    pub(super) fn conclude(&self, outcome: IoResult, dismiss: bool, mut tell: impl FnMut(Status)) -> bool {
        let mut s = self.state.lock();
        if s.outcome.is_some() {
            return false;
        }
        s.outcome = Some(outcome);
        s.status = Status::Concluded;
        tell(Status::Concluded);
        if dismiss {
            s.status = Status::Null;
            tell(Status::Null);
        }
        drop(s);
        self.notify();
        true
    }

    /// Lets a concluded job be forgotten.
    pub(super) fn dismiss(&self, id: &str, tell: impl FnOnce()) -> Result<()> {
        let mut s = self.state.lock();
        if s.status != Status::Concluded {
            return Err(refused(id, s.status, "dismissed"));
        }
        s.status = Status::Null;
        tell();
        drop(s);
        self.notify();
        Ok(())
    }

    pub(super) fn notify(&self) {
        self.changed.notify(usize::MAX);
    }
}

fn refused(id: &str, status: Status, what: &str) -> Error {
    Error::invalid(format!("job '{id}' is in state '{}' and cannot be {what}", status.name()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn running() -> Control {
        let c = Control::new();
        assert!(c.advance(Status::Running, || {}));
        c
    }

    #[test]
    fn a_cancel_before_the_commit_wins_and_one_after_it_is_refused() {
        let c = running();
        c.cancel("j").expect("a running job can be cancelled");
        assert_eq!(c.commit(), Err(IoError::cancelled()));

        let c = running();
        assert_eq!(c.commit(), Ok(()));
        assert!(c.cancel("j").is_err());
        assert!(!c.view().cancel);
    }

    #[test]
    fn the_first_outcome_is_the_only_one() {
        let c = running();
        assert!(c.conclude(Err(IoError::cancelled()), false, |_| {}));
        assert!(!c.conclude(Ok(()), false, |_| {}));
        assert_eq!(c.view().outcome, Some(Err(IoError::cancelled())));
    }

    #[test]
    fn a_job_that_dismisses_itself_is_forgotten_in_the_step_that_ends_it() {
        let (c, mut told) = (running(), Vec::new());
        assert!(c.conclude(Ok(()), true, |s| told.push(s)));
        assert_eq!(told, [Status::Concluded, Status::Null]);
        assert_eq!((c.view().status, c.view().outcome), (Status::Null, Some(Ok(()))));
        assert!(c.dismiss("j", || {}).is_err());
    }

    #[test]
    fn a_cancel_ends_a_pause_and_pauses_are_not_counted_twice() {
        let c = running();
        c.set_pause("j", true).expect("a running job can be paused");
        assert!(c.set_pause("j", true).is_err());
        c.cancel("j").expect("a paused job can be cancelled");
        assert!(!c.view().pause);
    }

    #[test]
    fn verbs_are_refused_in_the_wrong_state() {
        let c = running();
        assert!(c.finalize("j").is_err());
        assert!(c.dismiss("j", || {}).is_err());
        assert!(!c.advance(Status::Pending, || {}));
        c.conclude(Ok(()), false, |_| {});
        assert!(c.cancel("j").is_err());
        assert!(c.set_pause("j", true).is_err());
        c.dismiss("j", || {}).expect("a concluded job can be dismissed");
        assert!(c.dismiss("j", || {}).is_err());
    }
}
