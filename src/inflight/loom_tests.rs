//! The list under every interleaving and weak-memory outcome that loom models, up to `LOOM_MAX_PREEMPTIONS`:
//!
//! ```text
//! RUSTFLAGS="--cfg cobweb_loom --cfg crossbeam_loom" LOOM_MAX_PREEMPTIONS=2 \
//!     cargo test --release --no-default-features --lib inflight --target-dir target/loom
//! ```
//!
//! loom itself finds the data races (the `UnsafeCell`s here, the waker's in `waiter`, and the one in each node that its
//! destructor writes) and the lost wake-ups (as a deadlock).

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize as StdAtomicUsize, Ordering as StdOrdering};
use std::sync::{Arc as StdArc, Mutex as StdMutex};
use std::task::{Context, Poll, Wake, Waker};

use loom::future::block_on;

use super::*;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Arc, UnsafeCell, epoch, thread};
use crate::units::ByteRange;

/// Kind 0 excludes 0; 1 and 2 conflict with nothing.
fn list(shards_log2: u32) -> Arc<InflightList> {
    InflightList::new(Config { shard_bytes_log2: 0, shards_log2, conflicts: [1, 0, 0, 0, 0, 0, 0, 0] })
}

const fn range(offset: u64, len: u64) -> ByteRange {
    ByteRange { offset, len }
}

/// What the entries of a test protect. Two accesses that the list does not order are reported by loom.
#[derive(Default)]
struct Protected(UnsafeCell<usize>);

// SAFETY: none; whether accesses exclude each other is what the tests find out.
unsafe impl Sync for Protected {}
// SAFETY: a number.
unsafe impl Send for Protected {}

impl Protected {
    fn add(&self) {
        // SAFETY: loom checks it.
        self.0.with_mut(|v| unsafe { *v += 1 });
    }

    fn get(&self) -> usize {
        // SAFETY: loom checks it.
        self.0.with(|v| unsafe { *v })
    }
}

/// Counts wake-ups, unseen by loom: std's atomics are not modelled, and here they need not be.
#[derive(Default)]
struct Count(StdAtomicUsize);

impl Wake for Count {
    fn wake(self: StdArc<Self>) {
        self.0.fetch_add(1, StdOrdering::SeqCst);
    }
}

fn poll_once<F: Future + Unpin>(future: &mut F, count: &StdArc<Count>) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(&Waker::from(count.clone())))
}

#[test]
fn two_conflicting_acquires_exclude_each_other_and_both_end() {
    loom::model(|| {
        let list = list(0);
        let data = Arc::new(Protected::default());
        let run = |list: Arc<InflightList>, data: Arc<Protected>| {
            let entry = block_on(list.acquire(range(0, 2), 0));
            data.add();
            drop(entry);
        };
        let other = {
            let (list, data) = (list.clone(), data.clone());
            thread::spawn(move || run(list, data))
        };
        run(list.clone(), data.clone());
        other.join().unwrap();
        assert_eq!(data.get(), 2);
        assert!(list.is_empty());
    });
}

#[test]
fn conflicts_are_met_when_entries_are_in_several_chains() {
    loom::model(|| {
        let list = list(1);
        let data = Arc::new(Protected::default());
        let other = {
            let (list, data) = (list.clone(), data.clone());
            thread::spawn(move || {
                let entry = block_on(list.acquire(range(0, 2), 0));
                data.add();
                drop(entry);
            })
        };
        let entry = block_on(list.acquire(range(1, 2), 0));
        assert_eq!(entry.chains().len(), 2, "the test needs entries in two chains");
        data.add();
        drop(entry);
        other.join().unwrap();
        assert_eq!(data.get(), 2);
    });
}

#[test]
fn a_wide_and_a_narrow_acquire_exclude_each_other() {
    loom::model(|| {
        let list = list(0);
        let data = Arc::new(Protected::default());
        let other = {
            let (list, data) = (list.clone(), data.clone());
            thread::spawn(move || {
                let entry = block_on(list.acquire(range(0, 9), 0));
                assert_eq!(entry.chains(), [super::shard::WIDE], "the test needs a wide entry");
                data.add();
                drop(entry);
            })
        };
        let entry = block_on(list.acquire(range(5, 1), 0));
        data.add();
        drop(entry);
        other.join().unwrap();
        assert_eq!(data.get(), 2);
    });
}

#[test]
fn of_two_tries_at_once_exactly_one_succeeds() {
    loom::model(|| {
        let list = list(0);
        let other = {
            let list = list.clone();
            thread::spawn(move || list.try_acquire(range(0, 1), 0))
        };
        let mine = list.try_acquire(range(0, 1), 0);
        let theirs = other.join().unwrap();
        assert!(mine.is_some() != theirs.is_some());
    });
}

#[test]
fn neighbours_in_a_chain_are_taken_out_and_put_in_at_once() {
    loom::model(|| {
        let list = list(0);
        let entries: Vec<_> = (0..3).map(|i| list.insert(range(i, 1), 1)).collect();
        let [oldest, middle, newest]: [Entry; 3] = entries.try_into().unwrap();
        let other = thread::spawn(move || drop(middle));
        drop(newest);
        let added = list.insert(range(3, 1), 1);
        other.join().unwrap();
        let mut seen = Vec::new();
        list.for_each_overlap(range(0, 4), u8::MAX, |e| seen.push(e.range.offset));
        assert_eq!(seen, [3, 0], "newest first, nothing dead, nothing lost");
        assert_eq!(list.core().linked_count(&epoch::pin()), 2, "a dead entry is still linked");
        drop((oldest, added));
    });
}

#[test]
fn who_no_longer_finds_an_entry_sees_what_its_owner_did() {
    loom::model(|| {
        let list = list(0);
        let data = Arc::new(Protected::default());
        let entry = list.insert(range(0, 1), 1);
        let other = {
            let data = data.clone();
            thread::spawn(move || {
                // With a pin around it, the fence of the removal's own pin does not do the list's work.
                let _guard = epoch::pin();
                data.add();
                drop(entry);
            })
        };
        if !list.any(range(0, 1), u8::MAX) {
            assert_eq!(data.get(), 1);
        }
        other.join().unwrap();
    });
}

#[test]
fn an_acquire_is_woken_by_the_removal_it_waits_for() {
    loom::model(|| {
        let list = list(0);
        let data = Arc::new(Protected::default());
        let entry = list.insert(range(0, 1), 0);
        let other = {
            let (list, data) = (list.clone(), data.clone());
            thread::spawn(move || {
                let _entry = block_on(list.acquire(range(0, 1), 0));
                data.add();
            })
        };
        data.add();
        drop(entry);
        other.join().unwrap();
        assert_eq!(data.get(), 2);
    });
}

#[test]
fn all_waiters_of_an_entry_are_woken() {
    loom::model(|| {
        let list = list(0);
        let entry = list.insert(range(0, 1), 1);
        let count = StdArc::<Count>::default();
        let mut early = list.wait_clear(range(0, 1), 0b10);
        assert!(poll_once(&mut early, &count).is_pending());
        let late = {
            let list = list.clone();
            thread::spawn(move || block_on(list.wait_clear(range(0, 1), 0b10)))
        };
        drop(entry);
        late.join().unwrap();
        assert_eq!(count.0.load(StdOrdering::SeqCst), 1);
        assert!(poll_once(&mut early, &count).is_ready());
    });
}

#[test]
fn giving_up_against_wake_up_leaves_no_waker_and_at_most_one_wake() {
    loom::model(|| {
        let list = list(0);
        let entry = list.insert(range(0, 1), 1);
        let count = StdArc::<Count>::default();
        let mut wait = list.wait_clear(range(0, 1), 0b10);
        assert!(poll_once(&mut wait, &count).is_pending());
        let other = thread::spawn(move || drop(entry));
        drop(wait);
        other.join().unwrap();
        assert!(count.0.load(StdOrdering::SeqCst) <= 1);
        assert_eq!(StdArc::strong_count(&count), 1, "a waker is still kept");
    });
}

#[test]
fn giving_up_does_not_cost_another_waiter_its_wake_up() {
    loom::model(|| {
        let list = list(0);
        let entry = list.insert(range(0, 1), 1);
        let (first, last) = (StdArc::<Count>::default(), StdArc::<Count>::default());
        let mut older = list.wait_clear(range(0, 1), 0b10);
        assert!(poll_once(&mut older, &first).is_pending());
        let mut younger = list.wait_clear(range(0, 1), 0b10);
        assert!(poll_once(&mut younger, &last).is_pending());
        let remover = thread::spawn(move || drop(entry));
        drop(younger);
        remover.join().unwrap();
        assert_eq!(first.0.load(StdOrdering::SeqCst), 1);
        assert!(last.0.load(StdOrdering::SeqCst) <= 1);
        assert!(poll_once(&mut older, &first).is_ready());
    });
}

#[test]
fn two_that_give_up_at_once_both_leave() {
    loom::model(|| {
        let list = list(0);
        let entry = list.insert(range(0, 1), 1);
        let count = StdArc::<Count>::default();
        let mut waits: Vec<_> = (0..3).map(|_| list.wait_clear(range(0, 1), 0b10)).collect();
        for wait in &mut waits {
            assert!(poll_once(wait, &count).is_pending());
        }
        assert_eq!(entry.waiter_count(), 3);
        let stays = waits.remove(0);
        let [second, third]: [WaitClear; 2] = waits.try_into().ok().unwrap();
        let other = thread::spawn(move || drop(second));
        drop(third);
        other.join().unwrap();
        assert_eq!(entry.waiter_count(), 1);
        drop(entry);
        assert_eq!(count.0.load(StdOrdering::SeqCst), 1);
        drop(stays);
    });
}

#[test]
fn a_queue_moves_on_when_its_middle_gives_up() {
    loom::model(|| {
        let list = list(0);
        let counts: [StdArc<Count>; 2] = Default::default();
        let first = list.insert(range(0, 1), 0);
        let mut middle = list.acquire(range(0, 1), 0);
        let mut last = list.acquire(range(0, 1), 0);
        assert!(poll_once(&mut middle, &counts[0]).is_pending());
        assert!(poll_once(&mut last, &counts[1]).is_pending());
        let quitter = thread::spawn(move || drop(middle));
        drop(first);
        quitter.join().unwrap();
        assert_eq!(counts[1].0.load(StdOrdering::SeqCst), 1, "it waits for the middle one only");
        assert!(poll_once(&mut last, &counts[1]).is_ready());
    });
}

#[test]
fn an_acquire_that_meets_one_giving_up_still_waits_for_the_first() {
    loom::model(|| {
        let list = list(0);
        let count = StdArc::<Count>::default();
        let first = list.insert(range(0, 1), 0);
        let middle = list.acquire(range(0, 1), 0);
        let quitter = thread::spawn(move || drop(middle));
        let mut last = list.acquire(range(0, 1), 0);
        assert!(poll_once(&mut last, &count).is_pending());
        quitter.join().unwrap();
        if count.0.load(StdOrdering::SeqCst) == 1 {
            assert!(poll_once(&mut last, &count).is_pending());
        }
        let before = count.0.load(StdOrdering::SeqCst);
        drop(first);
        assert_eq!(count.0.load(StdOrdering::SeqCst), before + 1);
        assert!(poll_once(&mut last, &count).is_ready());
    });
}

#[test]
fn publish_and_look_never_miss_each_other() {
    loom::model(|| {
        let list = list(0);
        let flag = Arc::new(AtomicUsize::new(0));
        let reader = {
            let (list, flag) = (list.clone(), flag.clone());
            thread::spawn(move || {
                let entry = list.insert(range(0, 1), 1);
                let seen = flag.load(Ordering::Relaxed);
                (entry, seen)
            })
        };
        flag.store(1, Ordering::Relaxed);
        let found = list.any(range(0, 1), 0b10);
        let (_entry, seen) = reader.join().unwrap();
        assert!(found || seen == 1);
    });
}

#[test]
fn wait_clear_passes_a_reader_only_if_that_reader_sees_the_new_state() {
    loom::model(|| {
        let list = list(0);
        let flag = Arc::new(AtomicUsize::new(0));
        let count = StdArc::<Count>::default();
        let reader = {
            let (list, flag) = (list.clone(), flag.clone());
            thread::spawn(move || {
                let entry = list.insert(range(0, 1), 1);
                let seen = flag.load(Ordering::Relaxed);
                (entry, seen)
            })
        };
        flag.store(1, Ordering::Relaxed);
        let mut wait = list.wait_clear(range(0, 1), 0b10);
        let passed = poll_once(&mut wait, &count).is_ready();
        let (_entry, seen) = reader.join().unwrap();
        assert!(!passed || seen == 1);
    });
}

#[test]
fn memory_is_freed_after_the_last_look() {
    loom::model(|| {
        let list = list(0);
        let entry = list.insert(range(0, 1), 1);
        let other = thread::spawn(move || {
            drop(entry);
            // Retired in one epoch and freed two later.
            for _ in 0..3 {
                epoch::pin().flush();
            }
        });
        list.any(range(0, 1), 0b01);
        other.join().unwrap();
    });
}

#[test]
fn the_core_lives_as_long_as_handles_and_entries_and_no_longer() {
    // Collected over all executions and looked at after them: the other thread's last pin, in its thread-local destructor,
    // may keep garbage until the collector itself is dropped.
    let cores = StdArc::new(StdMutex::new(Vec::new()));
    let all = cores.clone();
    loom::model(move || {
        let list = list(0);
        let freed = list.core().watch.freed();
        all.lock().unwrap().push(freed.clone());
        let (first, second) = (list.insert(range(0, 1), 0), list.insert(range(0, 0), 0));
        let other = thread::spawn(move || drop(first));
        drop(list);
        for _ in 0..3 {
            epoch::pin().flush();
        }
        assert!(!freed.load(StdOrdering::SeqCst), "the second entry is still there");
        drop(second);
        other.join().unwrap();
    });
    let cores = cores.lock().unwrap();
    let freed = cores.iter().filter(|freed| freed.load(StdOrdering::SeqCst)).count();
    assert_eq!(freed, cores.len(), "some cores were never freed");
}

/// Runs a test of this file in a child process with a planted bug and expects it to fail. A child, because loom's report
/// can come in a destructor and abort.
fn must_fail(canary: &str, test: &str) {
    let out = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--test-threads=1", &format!("inflight::loom_tests::{test}")])
        .env("COBWEB_CANARY", canary)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(text.contains("running 1 test"), "no such test: {text}");
    assert!(!out.status.success(), "{test} did not notice {canary}");
}

#[test]
fn canary_relaxed_unlink_is_found() {
    must_fail("relaxed-unlink", "who_no_longer_finds_an_entry_sees_what_its_owner_did");
}

#[test]
fn canary_unfrozen_unlink_is_found() {
    must_fail("unfrozen-unlink", "neighbours_in_a_chain_are_taken_out_and_put_in_at_once");
}

#[test]
fn canary_relaxed_publish_is_found() {
    must_fail("relaxed-publish", "publish_and_look_never_miss_each_other");
}

#[test]
fn canary_early_ticket_is_found() {
    must_fail("early-ticket", "two_conflicting_acquires_exclude_each_other_and_both_end");
}

#[test]
fn canary_unvoided_draw_is_found() {
    must_fail("unvoided-draw", "two_conflicting_acquires_exclude_each_other_and_both_end");
}

#[test]
fn canary_no_fence_is_found() {
    must_fail("no-fence", "publish_and_look_never_miss_each_other");
}

#[test]
fn canary_no_orphans_is_found() {
    must_fail("no-orphans", "the_core_lives_as_long_as_handles_and_entries_and_no_longer");
}

#[test]
fn canary_free_at_once_is_found() {
    must_fail("free-at-once", "memory_is_freed_after_the_last_look");
}
