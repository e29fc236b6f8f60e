//! Reading ahead of a guest that writes sequentially, so that only its first writes wait.
//!
//! The detector is told of first touches only: a write that meets a granule that is not clear. What has been read ahead is preserved but not
//! marked, so a stream that runs behind its read-ahead is still seen, granule by granule, without waiting for anything.

use super::copy::Claim;
use super::geometry::Geometry;
use super::point::Point;
use super::state::{Granules, State, StateSet};
use crate::queue::Cx;
use crate::request::Class;
use crate::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Arc, Mutex};

/// How far is read ahead at most, and at first, in bytes.
const WINDOW_MAX: u64 = 4 << 20;
const WINDOW_FIRST: u64 = 512 << 10;
/// One read: short, since the guest may have to wait for it.
const PIECE: u64 = 256 << 10;
/// Reads of one read-ahead at a time.
const WORKERS: u64 = 4;
/// Tasks of all streams of a filter.
const TASKS_MAX: usize = 8;
/// Streams that are followed; the one that was met longest ago makes place for a new one.
const STREAMS: usize = 8;
/// How far, in granules, requests of one stream may come out of order.
const SLACK: u64 = 8;

/// Finds sequential streams in first touches.
#[derive(Debug, Default)]
pub(super) struct Detector {
    streams: Mutex<Streams>,
    /// Whether a stream has been read ahead of; spares the lock where none has.
    active: AtomicBool,
    tasks: AtomicUsize,
}

#[derive(Debug, Default)]
struct Streams {
    list: Vec<Stream>,
    clock: u64,
}

#[derive(Debug)]
struct Stream {
    /// The granule after the last one touched.
    next: u64,
    /// End of what has been read ahead; 0: nothing yet.
    ahead: u64,
    /// Granules to read ahead.
    window: u64,
    met: u64,
}

impl Stream {
    fn follows(&self, at: u64) -> bool {
        // A stream begins with two neighbours; later the queue depth may mix them.
        if self.ahead == 0 { at == self.next } else { at + SLACK >= self.next && at <= self.next + SLACK }
    }
}

impl Detector {
    /// Takes in a first touch; returns what to read ahead, if anything.
    pub(super) fn touched(&self, run: &Granules, geo: Geometry) -> Option<Granules> {
        let per = |bytes: u64| (bytes / geo.granule()).max(1);
        let mut s = self.streams.lock();
        s.clock += 1;
        let now = s.clock;
        let Some(stream) = s.list.iter_mut().find(|s| s.follows(run.start)) else {
            if s.list.len() >= STREAMS
                && let Some(oldest) = (0..s.list.len()).min_by_key(|i| s.list[*i].met)
            {
                s.list.swap_remove(oldest);
            }
            s.list.push(Stream { next: run.end, ahead: 0, window: per(WINDOW_FIRST), met: now });
            return None;
        };
        stream.met = now;
        stream.next = stream.next.max(run.end);
        let start = stream.ahead.max(stream.next);
        let end = (stream.next + stream.window).min(geo.count());
        // Half a window at a time, so that reads are long and the stream does not catch up.
        if start >= end || start - stream.next > stream.window / 2 {
            return None;
        }
        stream.ahead = end;
        stream.window = (stream.window * 2).min(per(WINDOW_MAX));
        // Relaxed: a hint.
        self.active.store(true, Ordering::Relaxed);
        Some(start..end)
    }

    /// Whether a first touch of `run` belongs to a stream that has been read ahead of.
    pub(super) fn expects(&self, run: &Granules) -> bool {
        self.active.load(Ordering::Relaxed)
            && self.streams.lock().list.iter().any(|s| {
                s.ahead > 0 && run.start + SLACK >= s.next && run.start < s.ahead.max(s.next + SLACK)
            })
    }
}

impl Point {
    /// Called after each first touch of a guest write; starts copies ahead of a sequential one. Only over a cache that has room: a reservation of Class::Lazy
    /// never waits (S45).
    pub(super) fn read_ahead(self: &Arc<Self>, cx: &Cx, touched: Granules) {
        if self.is_passive() || self.target.get().driver() != "ram-cache" {
            return;
        }
        let Some(ahead) = self.readahead.touched(&touched, self.geo) else { return };
        let piece = (PIECE / self.geo.granule()).max(1);
        let cursor = Arc::new(AtomicU64::new(ahead.start));
        for _ in 0..WORKERS.min((ahead.end - ahead.start).div_ceil(piece)) {
            let Some(task) = Task::new(self) else { return };
            let (cursor, end) = (cursor.clone(), ahead.end);
            let body = move |cx: Cx| async move {
                loop {
                    // Relaxed: whoever gets a piece has it for itself.
                    let at = cursor.fetch_add(piece, Ordering::Relaxed);
                    if at >= end || !task.0.copy_piece(&cx, at..end.min(at + piece)).await {
                        return;
                    }
                }
            };
            // Nobody waits for it, so it belongs on a worker; without workers it runs here.
            if let Ok(worker) = self.env.background() {
                worker.clone().spawn(body(worker));
            } else {
                let own = cx.detached();
                own.clone().spawn(body(own));
            }
        }
    }

    /// Copies what is still needed of `piece`; `false` if there is no room for more.
    async fn copy_piece(self: &Arc<Self>, cx: &Cx, piece: Granules) -> bool {
        let mut at = piece.start;
        while let Some(run) = self.states.next_run(at..piece.end, StateSet::of(&[State::Needed])) {
            if self.is_passive() {
                return false;
            }
            at = run.end;
            let target = self.target.node();
            let Ok(memory) = target.reserve(cx, self.geo.bytes(&run).len, Class::Lazy).await else {
                return false;
            };
            if memory.writes_through() {
                return false;
            }
            if let Some(claim) = Claim::take(self, &run) {
                self.copy_ahead(cx, claim, memory).await;
            }
        }
        true
    }
}

/// Counts a task of read-ahead.
struct Task(Arc<Point>);

impl Task {
    fn new(point: &Arc<Point>) -> Option<Self> {
        // Relaxed: a bound on tasks, no data is passed.
        let taken = point
            .readahead
            .tasks
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < TASKS_MAX).then_some(n + 1));
        taken.ok().map(|_| Self(point.clone()))
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.readahead.tasks.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geo() -> Geometry {
        Geometry::new(1 << 30, 64 << 10)
    }

    #[test]
    fn a_stream_is_read_ahead_once_from_its_second_granule_on_and_never_catches_up() {
        let d = Detector::default();
        let mut covered = 0;
        for g in 0..2000u64 {
            if let Some(r) = d.touched(&(g..g + 1), geo()) {
                assert!(r.start > g && r.start >= covered, "nothing is read twice");
                assert!(r.end - g <= WINDOW_MAX / (64 << 10) + 1);
                covered = r.end;
            }
            assert_eq!(d.expects(&(g + 1..g + 2)), g >= 1);
            assert!(g < 1 || covered > g + 1, "granule {g}");
        }
    }

    #[test]
    fn several_streams_out_of_order_are_followed_at_the_same_time() {
        let d = Detector::default();
        let mut covered = [0; 4];
        for i in 0..200u64 {
            for s in 0..4u64 {
                // Pairs of neighbours swap places after the beginning.
                let g = s * 3000 + if i < 2 { i } else { i ^ 1 };
                if let Some(r) = d.touched(&(g..g + 1), geo()) {
                    assert!(r.start >= covered[s as usize]);
                    covered[s as usize] = r.end;
                }
            }
        }
        for (s, end) in covered.into_iter().enumerate() {
            assert!(end > s as u64 * 3000 + 200, "stream {s}: {end}");
        }
    }

    #[test]
    fn random_touches_start_nothing_and_reading_ahead_ends_with_the_disk() {
        let d = Detector::default();
        for g in [5u64, 900, 17, 33, 2, 4000, 77, 1234, 8000, 9, 600, 41] {
            assert_eq!(d.touched(&(g..g + 1), geo()), None);
        }
        let small = Geometry::new(10 << 16, 64 << 10);
        let d = Detector::default();
        for g in 0..10 {
            if let Some(r) = d.touched(&(g..g + 1), small) {
                assert!(r.end <= 10 && r.start < r.end);
            }
        }
    }
}
