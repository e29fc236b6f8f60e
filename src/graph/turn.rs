//! An async lock for changes of the graph: no thread blocks, nothing is held by the system while a change waits for I/O.

use crate::sync::Mutex;
use event_listener::Event;

#[derive(Debug, Default)]
pub(super) struct Turn {
    taken: Mutex<bool>,
    freed: Event,
}

/// The right to change the graph.
#[derive(Debug)]
pub(super) struct TurnGuard<'a>(&'a Turn);

impl Turn {
    pub(super) async fn take(&self) -> TurnGuard<'_> {
        loop {
            if let Some(g) = self.try_take() {
                return g;
            }
            let listener = self.freed.listen();
            if let Some(g) = self.try_take() {
                return g;
            }
            listener.await;
        }
    }

    fn try_take(&self) -> Option<TurnGuard<'_>> {
        let mut taken = self.taken.lock();
        if *taken {
            return None;
        }
        *taken = true;
        Some(TurnGuard(self))
    }
}

impl Drop for TurnGuard<'_> {
    fn drop(&mut self) {
        *self.0.taken.lock() = false;
        self.0.freed.notify(1);
    }
}
