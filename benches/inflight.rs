//! The in-flight list against `Mutex<BTreeMap>` and `crossbeam-skiplist` at the same job: put a request in, look for
//! conflicting ones that overlap it, take it out.
//!
//! Each thread keeps its share of the requests in a ring; a step takes the oldest out and puts a new one in. The ranges
//! are scattered and disjoint, as those of a busy guest mostly are. The figure is the time of one step of one thread.
//!
//! ```text
//! cargo bench --bench inflight
//! ```

use std::collections::BTreeMap;
use std::future::Future;
use std::hint::black_box;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use cobweb::inflight::{Config, Entry, InflightList};
use cobweb::units::ByteRange;
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use crossbeam_skiplist::SkipMap;

const BLOCK: u64 = 64 << 10;
const LENGTH: u64 = 32 << 10;
/// Longest range the ordered maps have to look back for.
const LENGTH_MAX: u64 = 1 << 20;

/// What is compared. Every entry conflicts with every other that overlaps it.
trait Rival: Send + Sync + 'static {
    type Held: Send;
    const NAME: &'static str;
    fn new() -> Self;
    /// Puts a range in; `None` if it would have to wait for one that is there.
    fn insert(&self, range: ByteRange) -> Option<Self::Held>;
    fn remove(&self, held: Self::Held);
}

impl Rival for Arc<InflightList> {
    type Held = Entry;
    const NAME: &'static str = "inflight";

    fn new() -> Self {
        InflightList::new(Config {
            shard_bytes_log2: 20,
            shards_log2: 12,
            conflicts: [1, 0, 0, 0, 0, 0, 0, 0],
        })
    }

    fn insert(&self, range: ByteRange) -> Option<Entry> {
        let mut acquire = self.acquire(range, 0);
        match Pin::new(&mut acquire).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(entry) => Some(entry),
            Poll::Pending => None,
        }
    }

    fn remove(&self, held: Entry) {
        drop(held);
    }
}

struct MutexMap(Mutex<BTreeMap<u64, u64>>);

impl Rival for MutexMap {
    type Held = u64;
    const NAME: &'static str = "mutex-btreemap";

    fn new() -> Self {
        Self(Mutex::default())
    }

    fn insert(&self, range: ByteRange) -> Option<u64> {
        let mut map = self.0.lock().unwrap();
        let near = range.offset.saturating_sub(LENGTH_MAX)..range.end();
        if map.range(near).any(|(&offset, &len)| ByteRange { offset, len }.overlaps(range)) {
            return None;
        }
        map.insert(range.offset, range.len);
        Some(range.offset)
    }

    fn remove(&self, held: u64) {
        self.0.lock().unwrap().remove(&held);
    }
}

/// Keys are offset and ticket: like the list it has to publish first and then look.
struct Skip(SkipMap<(u64, u64), u64>, AtomicU64);

impl Rival for Skip {
    type Held = (u64, u64);
    const NAME: &'static str = "skiplist";

    fn new() -> Self {
        Self(SkipMap::new(), AtomicU64::new(0))
    }

    fn insert(&self, range: ByteRange) -> Option<(u64, u64)> {
        let key = (range.offset, self.1.fetch_add(1, Ordering::AcqRel));
        self.0.insert(key, range.len);
        let near = (range.offset.saturating_sub(LENGTH_MAX), 0)..(range.end(), 0);
        let conflict = self.0.range(near).any(|other| {
            let (&(offset, ticket), &len) = (other.key(), other.value());
            ticket != key.1 && ByteRange { offset, len }.overlaps(range)
        });
        if conflict {
            self.0.remove(&key);
            return None;
        }
        Some(key)
    }

    fn remove(&self, held: (u64, u64)) {
        self.0.remove(&held);
    }
}

/// The range of step `step` of thread `thread`: scattered over 64 GiB, none twice within 2^20 steps.
fn range(step: u64, thread: u64, threads: u64) -> ByteRange {
    let number = (step * threads + thread).wrapping_mul(0x9e37_79b1) % (1 << 20);
    ByteRange { offset: number * BLOCK, len: LENGTH }
}

/// Time of `steps` steps on each of `threads` threads with `in_flight` requests in all.
fn run<R: Rival>(in_flight: usize, threads: usize, steps: u64) -> Duration {
    let rival = R::new();
    let start = Barrier::new(threads);
    let share = (in_flight / threads).max(1) as u64;
    let work = |thread: u64| {
        let next = |step| rival.insert(range(step, thread, threads as u64)).expect("ranges are disjoint");
        // One request in flight is put in and taken out within a step.
        let mut ring: Vec<_> = (0..share).map(|step| Some(next(step))).collect();
        start.wait();
        let begin = Instant::now();
        for step in share..share + steps {
            let place = &mut ring[(step % share) as usize];
            if let Some(old) = place.take() {
                rival.remove(old);
            }
            *place = Some(next(step));
        }
        let time = begin.elapsed();
        ring.into_iter().flatten().for_each(|held| rival.remove(held));
        time
    };
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads as u64).map(|t| scope.spawn(move || work(t))).collect();
        handles.into_iter().map(|h| h.join().unwrap()).max().unwrap()
    })
}

/// A hash of what a rival answers to a fixed sequence of overlapping requests: the same for all.
fn answers<R: Rival>() -> u64 {
    let rival = R::new();
    let mut held = Vec::new();
    let (mut seed, mut hash) = (1u64, 0u64);
    for _ in 0..500 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let range = ByteRange { offset: (seed >> 33) % (8 << 20), len: 1 + (seed >> 20) % (256 << 10) };
        let entry = rival.insert(range);
        hash = hash.wrapping_mul(31).wrapping_add(u64::from(entry.is_some()));
        held.extend(entry);
        if held.len() > 12 {
            rival.remove(held.remove((seed >> 50) as usize % 12));
        }
    }
    held.into_iter().for_each(|h| rival.remove(h));
    hash
}

fn rivals(c: &mut Criterion) {
    let hash = answers::<Arc<InflightList>>();
    assert_eq!(hash, answers::<MutexMap>());
    assert_eq!(hash, answers::<Skip>());
    println!("inflight: answers hash to {hash:016x}");
    fn one<R: Rival>(c: &mut Criterion, threads: usize) {
        let mut group = c.benchmark_group(format!("{}/{threads}-threads", R::NAME));
        for in_flight in [1usize, 16, 256, 4096] {
            group.bench_function(BenchmarkId::from_parameter(in_flight), |b| {
                b.iter_custom(|steps| black_box(run::<R>(in_flight, threads, steps)));
            });
        }
        group.finish();
    }
    for threads in [1, 2] {
        one::<Arc<InflightList>>(c, threads);
        one::<MutexMap>(c, threads);
        one::<Skip>(c, threads);
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(800));
    targets = rivals
}
criterion_main!(benches);
