//! Reading ahead of a guest that writes sequentially, so that only its first write waits.

use super::copy::Claim;
use super::point::Point;
use crate::limits::BATCH_LEN;
use crate::queue::Cx;
use crate::request::Class;
use crate::sync::Arc;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};
use crate::units::ByteRange;

/// How far is read ahead, in bytes.
const WINDOW: u64 = 4 << 20;
/// Writes in a row that make a stream.
const STREAM: u64 = 3;

/// Finds one sequential stream. Two queues that write two streams hide each other: then nothing is read ahead, which is only slower.
#[derive(Debug, Default)]
pub(super) struct Detector {
    next: AtomicU64,
    in_row: AtomicU64,
    /// End of what has been read ahead.
    ahead: AtomicU64,
}

impl Detector {
    /// Takes in a write; returns what to read ahead, if anything.
    fn saw(&self, write: ByteRange, size: u64) -> Option<ByteRange> {
        if self.next.swap(write.end(), Relaxed) != write.offset {
            self.in_row.store(0, Relaxed);
            self.ahead.store(write.end(), Relaxed);
            return None;
        }
        if self.in_row.fetch_add(1, Relaxed) + 1 < STREAM {
            return None;
        }
        // Half a window at a time, so that reads are long and the stream never catches up.
        let ahead = self.ahead.load(Relaxed).max(write.end());
        if ahead >= size || ahead - write.end() > WINDOW / 2 {
            return None;
        }
        let end = (write.end() + WINDOW).min(size);
        self.ahead.store(end, Relaxed);
        Some(ByteRange { offset: ahead, len: end - ahead })
    }
}

impl Point {
    /// Called with each guest write; starts copies ahead of a sequential one. Only over a cache that has room: Class::Lazy never waits for space (S45).
    pub(super) fn read_ahead(self: &Arc<Self>, cx: &Cx, write: ByteRange) {
        let Some(ahead) = self.readahead.saw(write, self.size) else { return };
        if self.is_passive() || self.target.get().driver() != "ram-cache" {
            return;
        }
        let point = self.clone();
        let cx = cx.detached();
        cx.clone().spawn(async move {
            let target = point.target.node();
            let all = point.granules(ahead);
            let per = (BATCH_LEN / point.config.granule).max(1);
            let mut at = all.start;
            while at < all.end && !point.is_passive() {
                let Some(run) = point.states.needed_run(at..all.end, per) else { return };
                at = run.end;
                let Ok(memory) = target.reserve(&cx, point.bytes(&run).len, Class::Lazy).await else {
                    return;
                };
                if memory.writes_through() {
                    return;
                }
                if let Some(claim) = Claim::take(&point, &run) {
                    // Its result is looked at by whoever meets the granules.
                    point.spawn_copy(&cx, claim, Some(memory));
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_read_ahead_once_and_random_writes_never() {
        let d = Detector::default();
        let mut covered = 0;
        for i in 0..1000u64 {
            if let Some(r) = d.saw(ByteRange { offset: i * 4096, len: 4096 }, 1 << 30) {
                assert!(r.offset >= (i + 1) * 4096 && r.offset >= covered, "nothing is read twice");
                covered = r.end();
            }
        }
        assert!(covered > 1000 * 4096, "the stream stays behind");
        for i in [5u64, 900, 17, 33, 2] {
            assert_eq!(d.saw(ByteRange { offset: i << 20, len: 4096 }, 1 << 30), None);
        }
    }

    #[test]
    fn reading_ahead_ends_with_the_disk() {
        let d = Detector::default();
        let size = 100 * 4096;
        for i in 0..100u64 {
            if let Some(r) = d.saw(ByteRange { offset: i * 4096, len: 4096 }, size) {
                assert!(r.end() <= size && r.len > 0);
            }
        }
    }
}
