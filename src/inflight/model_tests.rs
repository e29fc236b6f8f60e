//! The list against a plain model, and on real threads.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use proptest::prelude::*;

use super::*;
use crate::units::ByteRange;

/// Kinds of the model: 0 excludes all but 2, 1 shares with 1, 2 conflicts with nothing.
const CONFLICTS: [u8; 8] = [0b011, 0b001, 0, 0, 0, 0, 0, 0];

#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// A task that only counts its wake-ups.
#[derive(Default)]
struct Task(Arc<Count>);

impl Task {
    fn poll<F: Future + Unpin>(&self, future: &mut F) -> Poll<F::Output> {
        Pin::new(future).poll(&mut Context::from_waker(&Waker::from(self.0.clone())))
    }

    fn wakes(&self) -> usize {
        self.0.0.load(Ordering::SeqCst)
    }
}

fn range(offset: u64, len: u64) -> ByteRange {
    ByteRange::new(offset, len).unwrap()
}

fn list(shard_bytes_log2: u32, shards_log2: u32) -> Arc<InflightList> {
    InflightList::new(Config { shard_bytes_log2, shards_log2, conflicts: CONFLICTS })
}

#[test]
fn conflicting_acquires_run_in_the_order_they_came() {
    let list = list(12, 4);
    let tasks: [Task; 4] = Default::default();
    let mut waits: Vec<_> = (0..4).map(|i| list.acquire(range(i * 10, 100), 0)).collect();
    for turn in 0..4 {
        let Poll::Ready(entry) = tasks[turn].poll(&mut waits[turn]) else {
            panic!("turn {turn} had to wait")
        };
        for later in turn + 1..4 {
            assert!(tasks[later].poll(&mut waits[later]).is_pending());
        }
        let before: Vec<_> = tasks.iter().map(Task::wakes).collect();
        drop(entry);
        // Each waits for the one before it, so one and only one is woken.
        for (i, task) in tasks.iter().enumerate() {
            assert_eq!(task.wakes() - before[i], usize::from(i == turn + 1), "turn {turn}, task {i}");
        }
    }
    assert!(list.is_empty());
}

#[test]
fn a_waiter_that_gives_up_is_not_woken_and_does_not_hold_up_others() {
    let list = list(12, 4);
    let (quitter, patient) = (Task::default(), Task::default());
    let first = list.insert(range(0, 10), 0);
    let mut second = list.acquire(range(5, 10), 0);
    let mut third = list.acquire(range(12, 10), 0);
    assert!(quitter.poll(&mut second).is_pending());
    assert!(patient.poll(&mut third).is_pending(), "it overlaps the waiting second one only");
    drop(second);
    assert_eq!((quitter.wakes(), patient.wakes()), (0, 1));
    assert!(patient.poll(&mut third).is_ready());
    drop(first);
    assert_eq!((quitter.wakes(), patient.wakes()), (0, 1));
}

#[test]
fn polling_with_another_waker_moves_the_wake_up_to_it() {
    let list = list(12, 4);
    let (old, new) = (Task::default(), Task::default());
    let first = list.insert(range(0, 10), 0);
    let mut second = list.acquire(range(0, 10), 0);
    assert!(old.poll(&mut second).is_pending());
    assert!(new.poll(&mut second).is_pending());
    assert_eq!(Arc::strong_count(&old.0), 1, "the old waker was kept");
    drop(first);
    assert_eq!((old.wakes(), new.wakes()), (0, 1));
    assert_eq!(Arc::strong_count(&new.0), 1, "the waker was kept after the wake-up");
    assert!(new.poll(&mut second).is_ready());
}

#[test]
fn cancelled_waits_leave_nothing_behind_in_a_long_entry() {
    let list = list(12, 4);
    let long = list.insert(range(0, 10), 0);
    let stays: Vec<_> = (0..3).map(|_| (Task::default(), list.wait_clear(range(0, 10), 1))).collect();
    let mut stays: Vec<_> = stays
        .into_iter()
        .map(|(task, mut wait)| {
            assert!(task.poll(&mut wait).is_pending());
            (task, wait)
        })
        .collect();
    let task = Task::default();
    for _ in 0..1000 {
        let mut wait = list.wait_clear(range(0, 10), 1);
        assert!(task.poll(&mut wait).is_pending());
    }
    assert_eq!(Arc::strong_count(&task.0), 1);
    assert_eq!(long.waiter_count(), 3);
    drop(long);
    assert_eq!(task.wakes(), 0);
    for (task, wait) in &mut stays {
        assert_eq!(task.wakes(), 1);
        assert!(task.poll(wait).is_ready());
    }
}

#[test]
fn wait_clear_ignores_what_came_after_its_first_poll() {
    let list = list(12, 4);
    let task = Task::default();
    let early = list.insert(range(0, 10), 1);
    let mut wait = list.wait_clear(range(0, 10), 0b10);
    let other_kind = list.insert(range(0, 10), 2);
    let before_poll = list.insert(range(9, 10), 1);
    assert!(task.poll(&mut wait).is_pending());
    let late = list.insert(range(0, 10), 1);
    drop(early);
    assert!(task.poll(&mut wait).is_pending());
    drop(before_poll);
    assert!(task.poll(&mut wait).is_ready());
    drop((late, other_kind));
}

#[test]
fn empty_ranges_conflict_with_nothing() {
    let list = list(12, 4);
    let task = Task::default();
    let point = list.insert(range(50, 0), 0);
    let mut wide = list.acquire(range(0, 100), 0);
    assert!(task.poll(&mut wide).is_ready());
    let mut empty = list.acquire(range(50, 0), 0);
    assert!(task.poll(&mut empty).is_ready());
    assert!(list.try_acquire(range(0, 0), 0).is_some());
    assert!(!list.any(range(50, 0), u8::MAX));
    assert_eq!(point.range(), range(50, 0));
}

#[test]
fn the_state_word_is_seen_by_searches_and_each_entry_once() {
    // One byte per shard: the entry is in three chains, the search range in three or all.
    let list = list(0, 3);
    let entry = list.insert_with(range(4, 3), 1, 7);
    let wide = list.insert_with(range(0, 100), 2, 9);
    for look in [range(4, 3), range(5, 3), range(0, 64)] {
        let mut seen = Vec::new();
        list.for_each_overlap(look, 0b110, |e| seen.push((e.range, e.kind, e.ticket, e.state)));
        seen.sort_by_key(|e| e.1);
        let expected = [
            (range(4, 3), 1, Some(entry.ticket()), entry.state()),
            (range(0, 100), 2, Some(wide.ticket()), 9),
        ];
        assert_eq!(seen, expected, "{look:?}");
        entry.set_state(entry.state() + 1);
    }
    assert_eq!(entry.state(), 10);
    assert_eq!(list.len(), 2);
}

#[test]
fn an_entry_may_outlive_every_handle_of_its_list() {
    let list = list(0, 2);
    let task = Task::default();
    let entries: Vec<_> = (0..20).map(|i| list.insert(range(i, 1 + i % 6), (i % 3) as Kind)).collect();
    let mut wait = list.acquire(range(0, 3), 0);
    assert!(task.poll(&mut wait).is_pending());
    drop(list);
    drop(entries);
    assert!(task.wakes() > 0);
    assert!(task.poll(&mut wait).is_ready());
}

#[test]
#[should_panic(expected = "conflicts of kinds 0 and 1")]
fn an_asymmetric_table_of_conflicts_is_refused() {
    let _ = InflightList::new(Config {
        shard_bytes_log2: 12,
        shards_log2: 2,
        conflicts: [0b10, 0, 0, 0, 0, 0, 0, 0],
    });
}

/// One call of the model test. Indices are taken modulo what is there.
#[derive(Clone, Debug)]
enum Call {
    Insert(ByteRange, Kind),
    TryAcquire(ByteRange, Kind),
    Acquire(ByteRange, Kind),
    WaitClear(ByteRange, u8),
    Poll(usize),
    Remove(usize),
    StopWaiting(usize),
    SetState(usize, u64),
}

fn any_range() -> impl Strategy<Value = ByteRange> {
    // Units are 4 bytes: mostly 1 to 3 units, sometimes empty or wide.
    (0u64..40, prop_oneof![1 => Just(0u64), 8 => 1u64..9, 1 => 12u64..40]).prop_map(|(o, l)| range(o, l))
}

fn any_call() -> impl Strategy<Value = Call> {
    prop_oneof![
        2 => (any_range(), 0u8..3).prop_map(|(r, k)| Call::Insert(r, k)),
        1 => (any_range(), 0u8..3).prop_map(|(r, k)| Call::TryAcquire(r, k)),
        4 => (any_range(), 0u8..3).prop_map(|(r, k)| Call::Acquire(r, k)),
        2 => (any_range(), 0u8..8).prop_map(|(r, k)| Call::WaitClear(r, k)),
        6 => any::<usize>().prop_map(Call::Poll),
        5 => any::<usize>().prop_map(Call::Remove),
        2 => any::<usize>().prop_map(Call::StopWaiting),
        1 => (any::<usize>(), any::<u64>()).prop_map(|(i, s)| Call::SetState(i, s)),
    ]
}

/// An entry of the model, with the real one if it is not still owned by a future.
struct Held {
    ticket: u64,
    range: ByteRange,
    kind: Kind,
    state: u64,
    entry: Option<Entry>,
}

enum Future_ {
    Acquire(Acquire),
    Clear(WaitClear),
}

/// A wait of the model.
struct Waiting {
    future: Future_,
    task: Task,
    range: ByteRange,
    kinds: u8,
    /// Waits for tickets below this; `None` before the first poll.
    before: Option<u64>,
    /// The entry it is registered at.
    at: Option<u64>,
    wakes: usize,
}

struct Model {
    list: Arc<InflightList>,
    held: Vec<Held>,
    waiting: Vec<Waiting>,
}

impl Model {
    fn overlapping(&self, range: ByteRange, kinds: u8, before: u64) -> impl Iterator<Item = &Held> {
        self.held
            .iter()
            .filter(move |h| h.range.overlaps(range) && kinds >> h.kind & 1 == 1 && h.ticket < before)
    }

    fn add(&mut self, ticket: u64, range: ByteRange, kind: Kind, entry: Option<Entry>) {
        assert!(self.held.iter().all(|h| h.ticket < ticket), "tickets rise");
        self.held.push(Held { ticket, range, kind, state: 0, entry });
    }

    /// Forgets an entry and expects the wake-ups of those registered at it.
    fn removed(&mut self, ticket: u64) {
        self.held.retain(|h| h.ticket != ticket);
        for w in &mut self.waiting {
            if w.at == Some(ticket) {
                w.at = None;
                w.wakes += 1;
            }
        }
    }

    fn poll(&mut self, index: usize) {
        let w = &self.waiting[index];
        let (range, kinds) = (w.range, w.kinds);
        let before = w.before.unwrap_or(u64::MAX);
        let blocker = match w.at {
            Some(at) => Some(at),
            None => self.overlapping(range, kinds, before).map(|h| h.ticket).max(),
        };
        let youngest = self.held.iter().map(|h| h.ticket).max().unwrap_or(0);
        let w = &mut self.waiting[index];
        w.before.get_or_insert(youngest + 1);
        w.at = blocker;
        let (ready, entry) = match &mut w.future {
            Future_::Acquire(f) => match w.task.poll(f) {
                Poll::Ready(e) => (true, Some(e)),
                Poll::Pending => (false, None),
            },
            Future_::Clear(f) => (w.task.poll(f).is_ready(), None),
        };
        assert_eq!(ready, blocker.is_none(), "{range:?} {kinds:b}");
        if ready {
            self.waiting.remove(index);
        }
        if let Some(entry) = entry {
            let held = self.held.iter_mut().find(|h| h.ticket == entry.ticket()).unwrap();
            held.entry = Some(entry);
        }
    }

    fn call(&mut self, call: Call) {
        match call {
            Call::Insert(range, kind) => {
                let entry = self.list.insert(range, kind);
                self.add(entry.ticket(), range, kind, Some(entry));
            }
            Call::TryAcquire(range, kind) => {
                let conflict = self.overlapping(range, CONFLICTS[usize::from(kind)], u64::MAX).count() > 0;
                let entry = self.list.try_acquire(range, kind);
                assert_eq!(entry.is_none(), conflict);
                if let Some(entry) = entry {
                    self.add(entry.ticket(), range, kind, Some(entry));
                }
            }
            Call::Acquire(range, kind) => {
                let future = self.list.acquire(range, kind);
                let ticket = future.entry().unwrap().ticket();
                self.add(ticket, range, kind, None);
                self.waiting.push(Waiting {
                    future: Future_::Acquire(future),
                    task: Task::default(),
                    range,
                    kinds: CONFLICTS[usize::from(kind)],
                    before: Some(ticket),
                    at: None,
                    wakes: 0,
                });
            }
            Call::WaitClear(range, kinds) => self.waiting.push(Waiting {
                future: Future_::Clear(self.list.wait_clear(range, kinds)),
                task: Task::default(),
                range,
                kinds,
                before: None,
                at: None,
                wakes: 0,
            }),
            Call::Poll(i) if !self.waiting.is_empty() => self.poll(i % self.waiting.len()),
            Call::Remove(i) if !self.held.is_empty() => {
                let i = i % self.held.len();
                if let Some(entry) = self.held[i].entry.take() {
                    let ticket = entry.ticket();
                    drop(entry);
                    self.removed(ticket);
                }
            }
            Call::StopWaiting(i) if !self.waiting.is_empty() => {
                let w = self.waiting.remove(i % self.waiting.len());
                let ticket = match &w.future {
                    Future_::Acquire(f) => Some(f.entry().unwrap().ticket()),
                    Future_::Clear(_) => None,
                };
                drop(w.future);
                assert_eq!(w.task.wakes(), w.wakes);
                if let Some(ticket) = ticket {
                    self.removed(ticket);
                }
            }
            Call::SetState(i, state) if !self.held.is_empty() => {
                let i = i % self.held.len();
                let held = &mut self.held[i];
                if let Some(entry) = &held.entry {
                    entry.set_state(state);
                    held.state = state;
                }
            }
            _ => {}
        }
        self.check();
    }

    fn check(&self) {
        for w in &self.waiting {
            assert_eq!(w.task.wakes(), w.wakes);
        }
        assert_eq!(self.list.len(), self.held.len());
        for look in [range(0, 4), range(7, 9), range(20, 1), range(0, 80)] {
            for kinds in [0b001, 0b110] {
                let mut seen = Vec::new();
                self.list.for_each_overlap(look, kinds, |e| {
                    seen.push((e.ticket, e.range.offset, e.range.len, e.kind, e.state));
                });
                seen.sort_unstable();
                let mut expected: Vec<_> = self
                    .overlapping(look, kinds, u64::MAX)
                    .map(|h| (Some(h.ticket), h.range.offset, h.range.len, h.kind, h.state))
                    .collect();
                expected.sort_unstable();
                assert_eq!(seen, expected);
                assert_eq!(self.list.any(look, kinds), !expected.is_empty());
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_list_equals_a_plain_model(shards_log2 in 0u32..5, calls in prop::collection::vec(any_call(), 1..80)) {
        let mut model = Model { list: list(2, shards_log2), held: Vec::new(), waiting: Vec::new() };
        for call in calls {
            model.call(call);
        }
        // Everything can end: entries held go, then each wait in turn.
        while !model.held.is_empty() || !model.waiting.is_empty() {
            while let Some(i) = model.held.iter().position(|h| h.entry.is_some()) {
                model.call(Call::Remove(i));
            }
            let left = model.waiting.len();
            for i in (0..left).rev() {
                model.poll(i);
            }
            prop_assert!(left == 0 || model.waiting.len() < left, "nobody can go on");
        }
        prop_assert_eq!(model.list.core().linked_count(&crate::sync::epoch::pin()), 0);
    }
}

/// Wakes a thread.
struct Unpark(std::thread::Thread, AtomicBool);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.1.store(true, Ordering::Release);
        self.0.unpark();
    }
}

fn block_on<F: Future + Unpin>(mut future: F) -> F::Output {
    let unpark = Arc::new(Unpark(std::thread::current(), AtomicBool::new(false)));
    let waker = Waker::from(unpark.clone());
    loop {
        if let Poll::Ready(out) = Pin::new(&mut future).poll(&mut Context::from_waker(&waker)) {
            return out;
        }
        while !unpark.1.swap(false, Ordering::Acquire) {
            std::thread::park();
        }
    }
}

fn next_random(seed: &mut u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed
}

/// Threads acquire random ranges of a small space, some giving up, and check at each byte that they are alone and that
/// tickets rise. A lost wake-up hangs the test.
#[test]
fn threads_exclude_each_other_in_ticket_order() {
    const BYTES: usize = 64;
    const ROUNDS: u64 = 15_000;
    let list = list(3, 2);
    let owner: Arc<Vec<AtomicU64>> = Arc::new((0..BYTES).map(|_| AtomicU64::new(0)).collect());
    let last: Arc<Vec<AtomicU64>> = Arc::new((0..BYTES).map(|_| AtomicU64::new(0)).collect());
    let waited = Arc::new(AtomicU64::new(0));
    let cancelled = Arc::new(AtomicU64::new(0));
    let threads: Vec<_> = (1..=4u64)
        .map(|id| {
            let (list, owner, last) = (list.clone(), owner.clone(), last.clone());
            let (waited, cancelled) = (waited.clone(), cancelled.clone());
            std::thread::spawn(move || {
                let mut seed = id.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                let task = Task::default();
                for _ in 0..ROUNDS {
                    let r = next_random(&mut seed);
                    let len = if r >> 20 & 15 == 0 { 30 } else { 1 + (r >> 8) % 12 };
                    let range = range(r % (BYTES as u64 - len), len);
                    let mut future = list.acquire(range, 0);
                    let entry = match task.poll(&mut future) {
                        Poll::Ready(entry) => entry,
                        Poll::Pending if r >> 30 & 7 == 0 => {
                            cancelled.fetch_add(1, Ordering::Relaxed);
                            continue;
                        }
                        Poll::Pending => {
                            waited.fetch_add(1, Ordering::Relaxed);
                            block_on(future)
                        }
                    };
                    // Relaxed on purpose: the list must order these, and loom_tests checks that it does.
                    for b in range.offset..range.end() {
                        assert_eq!(owner[b as usize].swap(id, Ordering::Relaxed), 0, "two at byte {b}");
                        let before = last[b as usize].swap(entry.ticket() + 1, Ordering::Relaxed);
                        assert!(before <= entry.ticket(), "byte {b}: {before} before {}", entry.ticket());
                    }
                    if r >> 40 & 3 == 0 {
                        std::thread::yield_now();
                    }
                    for b in range.offset..range.end() {
                        owner[b as usize].store(0, Ordering::Relaxed);
                    }
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert!(list.is_empty());
    assert!(waited.load(Ordering::Relaxed) > 0, "no conflict ever happened");
    assert!(cancelled.load(Ordering::Relaxed) > 0, "nobody ever gave up");
}

/// Readers insert and look at a flag, a writer sets the flag and waits: never do both miss each other (S5, S15).
#[test]
fn a_published_reader_and_a_writer_that_waits_never_miss_each_other() {
    const ROUNDS: u64 = 20_000;
    let list = list(12, 2);
    // Epoch of the data and, for each reader, the epoch it relies on while it is reading (0 = none).
    let epoch = Arc::new(AtomicU64::new(1));
    let relied: Arc<[AtomicU64; 2]> = Arc::default();
    let stop = Arc::new(AtomicBool::new(false));
    let readers: Vec<_> = (0..2usize)
        .map(|id| {
            let (list, epoch, relied, stop) = (list.clone(), epoch.clone(), relied.clone(), stop.clone());
            std::thread::spawn(move || {
                let mut reads = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    let entry = list.insert(range(100, 10), 1);
                    let seen = epoch.load(Ordering::Relaxed);
                    relied[id].store(seen, Ordering::Relaxed);
                    reads += 1;
                    relied[id].store(0, Ordering::Relaxed);
                    drop(entry);
                }
                reads
            })
        })
        .collect();
    for round in 2..ROUNDS {
        epoch.store(round, Ordering::Relaxed);
        block_on(list.wait_clear(range(105, 1), 0b10));
        for r in relied.iter() {
            let seen = r.load(Ordering::Relaxed);
            assert!(seen == 0 || seen >= round, "a reader still relies on {seen} in round {round}");
        }
    }
    stop.store(true, Ordering::Relaxed);
    for reader in readers {
        assert!(reader.join().unwrap() > 0);
    }
}
