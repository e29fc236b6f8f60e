//! No queue stops another: looks after executors that others wait for.
//!
//! Runs as a task on the first worker. It sleeps without a timer while nobody waits; otherwise every 5 ms it makes a pass on each
//! executor that has had none for that long. A pass on an executor with nothing to do is a few loads.

use super::cx::Cx;
use super::env::Env;
use crate::sync::Weak;
use std::time::Duration;

/// How long an executor may be left alone while somebody waits.
pub(super) const STALE: Duration = Duration::from_millis(5);

pub(super) async fn run(cx: &Cx, env: Weak<Env>) {
    loop {
        let Some(strong) = env.upgrade() else { return };
        let listener = strong.waits_began.listen();
        if strong.waits() == 0 {
            // The listener was made before the look, so a wait that begins now notifies it.
            drop(strong);
            listener.await;
            continue;
        }
        drop(listener);
        for exec in strong.execs() {
            exec.help(STALE);
        }
        strong.bury_orphans();
        drop(strong);
        cx.sleep_until(cx.now().after(STALE)).await;
    }
}
