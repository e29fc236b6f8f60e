//! Histogram of times: 4 equal buckets per power of two, from 1 us.
//!
//! Bucket 0 holds everything below 1.25 us, bucket 1 what is below 1.5 us, and so on: bucket `4 * e + k` begins at
//! `(1 + k / 4) * 2^e` microseconds. The last bucket begins at 1.75 * 2^31 us (about an hour) and has no end. A percentile read from
//! the buckets is thus at most a quarter too large, from 1 us on, and never too small.
//!
//! Recording costs two relaxed additions on a line that other threads seldom write: a histogram is split into shards, and
//! threads are dealt over them in the order in which they first record anything.

use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use crossbeam::utils::CachePadded;
use serde_json::{Value, json};

/// Buckets of a histogram.
pub const BUCKETS: usize = 128;
/// Longest time that counts as itself, in nanoseconds (about 104 days); a longer one, which can only be an error of a
/// clock, counts as this one.
pub const NS_MAX: u64 = 1 << 53;

/// Shards of a histogram: enough for the few threads that serve one disk, and 4.3 KiB in all.
const SHARDS: usize = 4;
/// A quarter of the first power of two: every boundary is a multiple of it.
const STEP_NS: u64 = 250;

/// A histogram that any number of threads record into.
#[derive(Debug)]
pub struct Hist {
    shards: [CachePadded<Shard>; SHARDS],
}

#[derive(Debug)]
struct Shard {
    sum_ns: AtomicU64,
    max_ns: AtomicU64,
    bucket: [AtomicU64; BUCKETS],
}

/// What a histogram held: plain values, in the layout of `cobweb_hist`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistSnapshot {
    /// Times recorded: the sum of the buckets.
    pub count: u64,
    /// Their sum in nanoseconds; wraps.
    pub sum_ns: u64,
    /// The longest, in nanoseconds.
    pub max_ns: u64,
    /// How many were in each bucket.
    pub bucket: [u64; BUCKETS],
}

impl Hist {
    /// An empty histogram.
    pub fn new() -> Self {
        Self { shards: std::array::from_fn(|_| CachePadded::new(Shard::new())) }
    }

    /// Adds one time, in nanoseconds. Wait-free.
    pub fn record(&self, ns: u64) {
        let ns = ns.min(NS_MAX);
        let shard = &self.shards[shard_of_thread()];
        // Relaxed: the numbers order nothing but themselves.
        shard.bucket[bucket_of(ns)].fetch_add(1, Relaxed);
        shard.sum_ns.fetch_add(ns, Relaxed);
        // The load keeps the common case, no new maximum, to a shared read.
        if ns > shard.max_ns.load(Relaxed) {
            shard.max_ns.fetch_max(ns, Relaxed);
        }
    }

    /// What has been recorded up to now.
    pub fn snapshot(&self) -> HistSnapshot {
        let mut all = HistSnapshot::default();
        for shard in &self.shards {
            for (sum, bucket) in all.bucket.iter_mut().zip(&shard.bucket) {
                *sum = sum.saturating_add(bucket.load(Relaxed));
            }
            all.sum_ns = all.sum_ns.wrapping_add(shard.sum_ns.load(Relaxed));
            all.max_ns = all.max_ns.max(shard.max_ns.load(Relaxed));
        }
        all.count = all.counted();
        all
    }
}

impl Default for Hist {
    fn default() -> Self {
        Self::new()
    }
}

impl HistSnapshot {
    /// The time, in nanoseconds, that `percent` (0 to 100; 99.9 is p99.9) of all records did not exceed: the end of the
    /// bucket in which that record lies, or the maximum if that is less. 0 if there is no record.
    pub fn percentile(&self, percent: f64) -> u64 {
        if self.count == 0 {
            return 0;
        }
        // A conversion of floats saturates and takes NaN for 0, so no argument can do harm.
        let rank = ((percent / 100.0 * self.count as f64).ceil() as u64).clamp(1, self.count);
        let mut below = 0u64;
        for (index, count) in self.bucket.iter().enumerate() {
            below = below.saturating_add(*count);
            if below >= rank {
                return bucket_end(index).min(self.max_ns);
            }
        }
        self.max_ns
    }

    /// The mean in nanoseconds; 0 if there is no record.
    pub fn mean(&self) -> u64 {
        self.sum_ns.checked_div(self.count).unwrap_or(0)
    }

    /// Adds the records of another histogram.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.bucket.iter_mut().zip(&other.bucket) {
            *mine = mine.saturating_add(*theirs);
        }
        self.sum_ns = self.sum_ns.wrapping_add(other.sum_ns);
        self.max_ns = self.max_ns.max(other.max_ns);
        self.count = self.counted();
    }

    /// What was recorded since `earlier`, a snapshot of the same histogram. The maximum of that time alone is not known;
    /// it is taken from the highest bucket with a record.
    pub fn sub(&self, earlier: &Self) -> Self {
        let mut since = Self::default();
        for (index, bucket) in since.bucket.iter_mut().enumerate() {
            *bucket = self.bucket[index].saturating_sub(earlier.bucket[index]);
        }
        since.count = since.counted();
        if let Some(highest) = since.bucket.iter().rposition(|count| *count > 0) {
            since.sum_ns = self.sum_ns.wrapping_sub(earlier.sum_ns);
            since.max_ns = bucket_end(highest).min(self.max_ns);
        }
        since
    }

    /// `count`, and `mean`, `p50`, `p99`, `p999`, `max` in microseconds with three decimals.
    pub fn to_json(&self) -> Value {
        let us = |ns: u64| ns as f64 / 1000.0;
        json!({
            "count": self.count,
            "mean": us(self.mean()),
            "p50": us(self.percentile(50.0)),
            "p99": us(self.percentile(99.0)),
            "p999": us(self.percentile(99.9)),
            "max": us(self.max_ns),
        })
    }

    fn counted(&self) -> u64 {
        self.bucket.iter().fold(0, |sum, count| sum.saturating_add(*count))
    }
}

impl Default for HistSnapshot {
    fn default() -> Self {
        Self { count: 0, sum_ns: 0, max_ns: 0, bucket: [0; BUCKETS] }
    }
}

impl Shard {
    fn new() -> Self {
        Self {
            sum_ns: AtomicU64::new(0),
            max_ns: AtomicU64::new(0),
            bucket: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }
}

/// The bucket of a time.
pub fn bucket_of(ns: u64) -> usize {
    let steps = ns / STEP_NS;
    if steps < 4 {
        return 0;
    }
    // The highest three bits: the power of two, and the quarter within it.
    let shift = steps.ilog2() - 2;
    let index = shift as usize * 4 + (steps >> shift) as usize % 4;
    index.min(BUCKETS - 1)
}

/// The first nanosecond of a bucket; of bucket 0, which begins at 0, the nominal 1 us.
pub fn bucket_start(index: usize) -> u64 {
    let index = index.min(BUCKETS) as u64;
    (STEP_NS * (4 + index % 4)) << (index / 4)
}

/// The last nanosecond of a bucket.
fn bucket_end(index: usize) -> u64 {
    if index + 1 < BUCKETS { bucket_start(index + 1) - 1 } else { u64::MAX }
}

/// Which shard this thread records into. Threads are dealt over the shards in turn, which a hash of the thread would not
/// do: two threads of one disk then share a shard only if others came between them.
fn shard_of_thread() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static SHARD: usize = NEXT.fetch_add(1, Relaxed) % SHARDS;
    }
    // A thread that is being torn down has no value any more; any shard does.
    SHARD.try_with(|shard| *shard).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition, without cleverness: 4 equal buckets per power of two microseconds.
    fn bucket_by_definition(ns: u64) -> usize {
        (1..BUCKETS).rev().find(|index| ns >= bucket_start(*index)).unwrap_or(0)
    }

    #[test]
    fn buckets_start_at_quarters_of_powers_of_two_microseconds() {
        for e in 0..BUCKETS / 4 {
            for k in 0..4 {
                let start = (1u64 << e) * 1000 + (1u64 << e) * 1000 * k as u64 / 4;
                assert_eq!(bucket_start(4 * e + k), start);
            }
        }
        assert_eq!(
            (bucket_start(0), bucket_start(1), bucket_start(4), bucket_start(40)),
            (1000, 1250, 2000, 1_024_000)
        );
    }

    #[test]
    fn every_time_up_to_a_millisecond_is_in_its_bucket() {
        for ns in 0..1_000_000 {
            assert_eq!(bucket_of(ns), bucket_by_definition(ns), "{ns}");
        }
    }

    #[test]
    fn both_sides_of_every_boundary_are_in_their_buckets() {
        for index in 1..BUCKETS {
            assert_eq!(bucket_of(bucket_start(index)), index);
            assert_eq!(bucket_of(bucket_start(index) - 1), index - 1);
            assert_eq!(bucket_end(index - 1) + 1, bucket_start(index));
        }
        assert_eq!(bucket_of(0), 0);
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
        assert_eq!(bucket_end(BUCKETS - 1), u64::MAX);
    }

    fn of(times: &[u64]) -> HistSnapshot {
        let hist = Hist::new();
        times.iter().for_each(|ns| hist.record(*ns));
        hist.snapshot()
    }

    #[test]
    fn a_snapshot_holds_what_was_recorded() {
        let snapshot = of(&[0, 999, 1000, 1250, 5_000_000]);
        assert_eq!((snapshot.count, snapshot.sum_ns, snapshot.max_ns), (5, 5_003_249, 5_000_000));
        assert_eq!((snapshot.bucket[0], snapshot.bucket[1]), (3, 1));
        assert_eq!(snapshot.bucket[bucket_of(5_000_000)], 1);
        assert_eq!(snapshot.mean(), 1_000_649);
    }

    #[test]
    fn an_empty_histogram_is_all_zeros() {
        let empty = Hist::default().snapshot();
        assert_eq!(empty, HistSnapshot::default());
        assert_eq!((empty.mean(), empty.percentile(50.0), empty.percentile(100.0)), (0, 0, 0));
    }

    #[test]
    fn a_time_beyond_all_measure_counts_as_the_longest() {
        let snapshot = of(&[u64::MAX, 1]);
        assert_eq!((snapshot.count, snapshot.max_ns, snapshot.sum_ns), (2, NS_MAX, NS_MAX + 1));
        assert_eq!(snapshot.bucket[BUCKETS - 1], 1);
        assert_eq!(snapshot.percentile(99.0), NS_MAX);
    }

    #[test]
    fn percentiles_of_strange_arguments_do_no_harm() {
        let snapshot = of(&[1_000, 1_000_000]);
        for percent in [f64::NAN, f64::NEG_INFINITY, -1.0, 0.0] {
            assert_eq!(snapshot.percentile(percent), 1249);
        }
        for percent in [100.0, 101.0, f64::INFINITY] {
            assert_eq!(snapshot.percentile(percent), 1_000_000);
        }
    }

    #[test]
    fn the_json_form_is_in_microseconds() {
        let mut times = vec![1_000; 990];
        times.extend([3_000_000; 10]);
        let expected = json!({
            "count": 1000, "mean": 30.99, "p50": 1.249, "p99": 1.249, "p999": 3000.0, "max": 3000.0
        });
        assert_eq!(of(&times).to_json(), expected);
    }

    #[test]
    fn records_of_many_threads_all_arrive() {
        let hist = Hist::new();
        crate::sync::thread::scope(|scope| {
            for thread in 0..8u64 {
                let hist = &hist;
                scope.spawn(move || (0..1000).for_each(|n| hist.record(thread * 1_000_000 + n)));
            }
        });
        let snapshot = hist.snapshot();
        assert_eq!((snapshot.count, snapshot.max_ns), (8000, 7_000_999));
        assert_eq!(snapshot.sum_ns, (0..8).map(|t| t * 1_000_000_000 + 999 * 500).sum::<u64>());
        let used = hist.shards.iter().filter(|shard| shard.max_ns.load(Relaxed) > 0).count();
        assert!(used > 1, "the threads were dealt over the shards");
    }

    #[test]
    fn a_difference_knows_its_maximum_by_bucket() {
        let hist = Hist::new();
        hist.record(9_000_000);
        let earlier = hist.snapshot();
        assert_eq!(hist.snapshot().sub(&earlier), HistSnapshot::default());
        hist.record(1_300);
        let since = hist.snapshot().sub(&earlier);
        assert_eq!((since.count, since.sum_ns, since.max_ns), (1, 1_300, 1_499));
        hist.record(9_100_000);
        assert_eq!(hist.snapshot().sub(&earlier).max_ns, 9_100_000);
    }

    proptest! {
        #[test]
        fn percentiles_are_exact_up_to_the_width_of_a_bucket(
            mut times in proptest::collection::vec(1_000u64..100_000_000_000, 1..200),
            percent in 0.0..100.0f64,
        ) {
            let snapshot = of(&times);
            times.sort_unstable();
            let rank = ((percent / 100.0 * times.len() as f64).ceil() as usize).max(1);
            let exact = times[rank - 1];
            let read = snapshot.percentile(percent);
            prop_assert!(exact <= read && read <= exact + exact / 4, "{} for {}", read, exact);
            prop_assert_eq!(snapshot.percentile(100.0), times[times.len() - 1]);
        }

        #[test]
        fn merged_parts_equal_the_whole(
            a in proptest::collection::vec(any::<u64>(), 0..50),
            b in proptest::collection::vec(0u64..1_000_000, 0..50),
        ) {
            let mut merged = of(&a);
            merged.merge(&of(&b));
            let whole = of(&[a.clone(), b.clone()].concat());
            prop_assert_eq!(&merged, &whole);
            let rest = whole.sub(&of(&a));
            prop_assert_eq!((rest.count, rest.sum_ns, rest.bucket), {
                let b = of(&b);
                (b.count, b.sum_ns, b.bucket)
            });
        }
    }
}
