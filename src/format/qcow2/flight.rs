//! One piece of work for whoever asks: the first starts it, the others wait for its result.

use crate::error::{IoError, IoResult};
use crate::queue::Cx;
use crate::sync::{Arc, Mutex};
use event_listener::Event;
use std::fmt;

/// Work under way. Waiters may give up at any time; the work goes on.
pub struct Flight<T> {
    result: Mutex<Option<IoResult<T>>>,
    landed: Event,
}

/// The duty to end a [`Flight`]; dropped without a result it ends with ECANCELED, so that nobody waits for ever for an executor that is gone.
pub struct Landing<T: Clone>(Arc<Flight<T>>);

impl<T: Clone> Flight<T> {
    /// A flight, and the duty to end it.
    pub fn start() -> (Arc<Self>, Landing<T>) {
        let flight = Arc::new(Self { result: Mutex::new(None), landed: Event::new() });
        (flight.clone(), Landing(flight))
    }

    /// The result if it is there.
    pub fn result(&self) -> Option<IoResult<T>> {
        self.result.lock().clone()
    }

    /// Waits for the result; the request's cancel ends the wait, not the work.
    pub async fn wait(&self, cx: &Cx) -> IoResult<T> {
        loop {
            let listener = self.landed.listen();
            if let Some(result) = self.result() {
                return result;
            }
            // It may run on another queue, whose owner need not look at it.
            cx.waiting(listener).await?;
        }
    }
}

impl<T: Clone> Landing<T> {
    /// Ends the flight.
    pub fn land(self, result: IoResult<T>) {
        self.set(result);
    }

    fn set(&self, result: IoResult<T>) {
        self.0.result.lock().get_or_insert(result);
        self.0.landed.notify(usize::MAX);
    }
}

impl<T: Clone> Drop for Landing<T> {
    fn drop(&mut self) {
        self.set(Err(IoError::cancelled()));
    }
}

impl<T> fmt::Debug for Flight<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Flight")
    }
}
