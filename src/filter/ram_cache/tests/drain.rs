//! When and how data goes to the file (S45, S48).

use super::super::CacheOptions;
use super::super::testing::*;
use crate::node::Node;
use crate::request::{Class, Op, Request};
use crate::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

#[test]
fn a_mebibyte_of_neighbours_is_at_most_two_writes() {
    for start in [0, 448 * K] {
        let (w, below) = (World::new(), Below::new(8 * M));
        let cache = w.cache(&below, small());
        // Backwards, and in requests of their own.
        for i in (0..16).rev() {
            w.write_moved(&cache, start + i * 64 * K, 64 * K, i as u8);
        }
        w.until("the lazy drain", || cache.is_empty());
        let writes = below.ranges(Op::Write);
        assert!(writes.len() <= 2, "{writes:?}");
        for i in 0..16 {
            assert_eq!(below.bytes(start + i * 64 * K, 64 * K), vec![i as u8; 65536]);
        }
    }
}

#[test]
fn writes_end_at_the_clusters_of_the_file() {
    let (w, below) = (World::new(), Below::new(16 * M));
    below.set_limits(|l| l.cluster = 4 * M as u32);
    let cache = w.cache(&below, CacheOptions { capacity: 64 * M, ..CacheOptions::default() });
    for i in 0..128 {
        w.write_moved(&cache, 2 * M + i * 64 * K, 64 * K, 1);
    }
    w.until("the lazy drain", || cache.is_empty());
    assert_eq!(below.ranges(Op::Write), [range(2 * M, 2 * M), range(4 * M, 4 * M), range(8 * M, 2 * M)]);
}

#[test]
fn a_largest_transfer_and_a_largest_number_of_segments_are_kept() {
    let (w, below) = (World::new(), Below::new(16 * M));
    below.set_limits(|l| (l.max_transfer, l.max_iov) = (256 << 10, 3));
    let cache = w.cache(&below, small());
    for i in 0..16 {
        w.write_moved(&cache, i * 64 * K, 64 * K, 1);
    }
    for i in 0..8 {
        w.write_moved(&cache, M + i * 128 * K, 128 * K, 1);
    }
    assert_eq!(w.settle(&cache), Ok(()));
    assert!(below.seen().iter().all(|s| s.range.len <= 256 * K && s.memory.len() <= 3));
}

#[test]
fn below_the_low_mark_drain_waits_for_neighbours_and_is_lazy() {
    let (w, below) = (World::new(), Below::new(8 * M));
    let cache = w.cache(&below, small());
    w.write_moved(&cache, 0, 64 * K, 1);
    w.advance(Duration::from_millis(90));
    assert!(below.seen().is_empty(), "not yet");
    w.write_moved(&cache, 64 * K, 64 * K, 1);
    w.advance(Duration::from_millis(60));
    assert_eq!(below.ranges(Op::Write), [range(0, 128 * K)], "with the neighbour that came in time");
    assert_eq!(below.seen()[0].class, Class::Lazy);
}

#[test]
fn above_the_low_mark_drain_does_not_wait() {
    let (w, below) = (World::new(), Below::new(64 * M));
    below.hold(Op::Write);
    let options = CacheOptions { low_watermark: 20, drain_delay_ms: 60_000, ..small() };
    let cache = w.cache(&below, options);
    w.write_moved(&cache, 0, M, 1);
    w.run();
    assert!(below.seen().is_empty());
    w.write_moved(&cache, 2 * M, M, 1);
    w.run();
    assert_eq!(below.waiting(), 2, "steady: no waiting");
    assert!(below.seen().iter().all(|s| s.class == Class::Lazy), "but no hurry either");
}

#[test]
fn at_the_high_mark_drain_is_forced_down_to_the_low_mark() {
    let (w, below) = (World::new(), Below::new(64 * M));
    below.hold(Op::Write);
    let options = CacheOptions {
        low_watermark: 40,
        high_watermark: 70,
        drain_delay_ms: 60_000,
        drain_workers: 1,
        ..small()
    };
    let cache = w.cache(&below, options);
    let mut at = 0;
    while !below.seen().iter().any(|s| s.class == Class::Background) {
        for _ in 0..2 {
            w.write_moved(&cache, at, 256 * K, 1);
            at += 2 * M;
        }
        // One write at a time, so each new one tells what is thought now.
        if below.waiting() > 0 {
            below.pass();
        }
        w.run();
        assert!(at < 64 * M, "never forced");
    }
    below.release(Op::Write);
    w.run();
    let left: u64 = cache.get("used").expect("a property").parse().expect("a number");
    let percent = left * 100 / (9 * M);
    assert!(percent < 40, "down to the low mark: {percent}");
    assert!(left > 0, "and the rest is lazy again");
    let seen = below.seen();
    let last = seen.iter().rposition(|s| s.class == Class::Background).expect("was forced");
    assert_eq!(last, seen.len() - 1);
}

#[test]
fn several_writes_are_under_way_at_a_time_but_no_more_than_workers() {
    let (w, below) = (World::new(), Below::new(64 * M));
    below.hold(Op::Write);
    let cache = w.cache(&below, CacheOptions { drain_workers: 5, ..small() });
    for i in 0..20 {
        w.write_moved(&cache, i * 2 * M, 64 * K, 1);
    }
    cache.set_forced_drain(true);
    w.run();
    assert_eq!(below.waiting(), 5);
    below.release(Op::Write);
    w.until("the forced drain", || cache.is_empty());
    assert_eq!(below.most_at_once.load(SeqCst), 5);
    let mut order: Vec<u64> = below.ranges(Op::Write).iter().map(|r| r.offset / (2 * M)).collect();
    let start = order.iter().position(|i| *i == 0).expect("all of them");
    order.rotate_left(start);
    assert_eq!(order, (0..20).collect::<Vec<_>>(), "in order of address, once round");
}

#[test]
fn forced_drain_can_be_taken_back() {
    let (w, below) = (World::new(), Below::new(8 * M));
    let cache = w.cache(&below, CacheOptions { drain_delay_ms: 60_000, ..small() });
    cache.set_forced_drain(true);
    cache.set_forced_drain(true);
    w.write_moved(&cache, 0, 64 * K, 1);
    w.run();
    assert_eq!(below.seen().len(), 1);
    assert_eq!(below.seen()[0].class, Class::Background);
    cache.set_forced_drain(false);
    w.write_moved(&cache, 0, 64 * K, 1);
    w.run();
    assert_eq!(below.seen().len(), 1, "lazy again");
}

#[test]
fn one_write_that_hangs_does_not_stop_the_others() {
    let (w, below) = (World::new(), Below::new(64 * M));
    below.hold(Op::Write);
    let cache = w.cache(&below, small());
    w.write_moved(&cache, 0, 64 * K, 1);
    w.until("the first write", || below.waiting() == 1);
    // Only this one hangs: it listens for an event that a later release does not repeat.
    let stuck = below.seen().len();
    below.pass_new();
    for i in 1..10 {
        w.write_moved(&cache, i * 2 * M, 64 * K, 1);
        w.advance(Duration::from_millis(150));
    }
    assert_eq!(below.seen().len(), stuck + 9, "each has been written");
    assert_eq!(below.waiting(), 1);
    below.release(Op::Write);
    assert_eq!(w.settle(&cache), Ok(()));
}

#[test]
fn a_worker_that_slept_while_the_others_wrote_everything_does_not_hold_up_a_settle() {
    let (w, below) = (World::new(), Below::new(64 * M));
    below.hold(Op::Write);
    let cache = w.cache(&below, small());
    for i in 0..5 {
        w.write_moved(&cache, i * 2 * M, M, 1);
    }
    let settled = w.start_settle(&cache);
    w.run();
    // Half of the capacity may be under way: the fifth piece waits, and with it a worker that only an event wakes.
    assert_eq!((below.waiting(), below.seen().len()), (4, 4));
    below.release(Op::Write);
    w.run();
    assert_eq!(below.seen().len(), 5, "one of those that wrote took the fifth");
    assert_eq!(settled.now(), Some(Ok(())), "and the settle has ended without the clock");
}

#[test]
fn live_options_act_on_what_is_there() {
    let (w, below) = (World::new(), Below::new(64 * M));
    let cache = w.cache(&below, CacheOptions { drain_delay_ms: 60_000, ..small() });
    w.write_moved(&cache, 0, M, 1);
    w.run();
    assert!(below.seen().is_empty());
    cache.set("drain-delay-ms", "10").expect("live");
    w.advance(Duration::from_millis(20));
    assert_eq!(below.seen().len(), 1);
    cache.set("capacity", "64M").expect("live");
    assert!(w.reserve(&cache, M).lock().is_some());
    let all: Vec<_> = (0..40).map(|_| w.reserved(&cache, M)).collect();
    cache.set("capacity", "9M").expect("live");
    let waiting = w.reserve(&cache, M);
    assert!(waiting.lock().is_none(), "over the new limit");
    drop(all);
    w.run();
    assert!(taken(&waiting).is_some());
    let refused = cache.set("capacity", "1M").expect_err("buffers set aside keep their size").to_string();
    assert!(refused.contains("capacity"), "{refused}");
    assert_eq!(cache.get("capacity").as_deref(), Some("9437184"));
    assert_eq!(w.finish(&cache, Request::flush()), Ok(()));
}
