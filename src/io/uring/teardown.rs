//! The end of an engine with operations in flight: cancel, wait a bounded time, and leak what the kernel keeps.

use super::driver::UringEngine;
use std::time::Duration;

/// How long the kernel may take to cancel.
const CANCEL_MAX: Duration = Duration::from_secs(2);
/// After that, how often and how long we wait without anything ending. Block I/O cannot be cancelled, only awaited.
const WAITS_MAX: u32 = 30;
const WAIT: Duration = Duration::from_millis(100);

impl Drop for UringEngine {
    fn drop(&mut self) {
        let Some(mut ring) = self.ring.take() else { return };
        self.backlog.clear();
        ring.submit();
        while ring.take_and_end() {}
        if ring.is_busy() {
            ring.cancel_all(CANCEL_MAX);
        }
        let mut waits = 0;
        loop {
            let mut any = false;
            while ring.take_and_end() {
                any = true;
            }
            if !ring.is_busy() || waits == WAITS_MAX {
                break;
            }
            waits += u32::from(!any);
            ring.submit_and_wait(Some(WAIT));
        }
        ring.release();
    }
}
