//! What happens when there is no space (S31, S42, S46, S47, S74, S75).

use super::super::testing::*;
use super::super::{CacheOptions, Overflow, RamCache};
use crate::error::{Code, IoError};
use crate::events::{EventKind, Side};
use crate::node::{Edge, Node};
use crate::request::{Buffers, Class, Flags, Op, Request};
use crate::sync::Arc;
use crate::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

fn options(overflow: Overflow) -> CacheOptions {
    CacheOptions { overflow, ..small() }
}

fn spilling(then: Overflow, quota: u64) -> CacheOptions {
    CacheOptions {
        capacity: 10 * M,
        overflow: Overflow::Spill,
        spill_quota: quota,
        spill_overflow: then,
        ..CacheOptions::default()
    }
}

fn number(cache: &Arc<RamCache>, key: &str) -> u64 {
    cache.get(key).expect(key).parse().expect("a number")
}

/// Writes mebibytes, 2 MiB apart, until a reservation has to wait; returns how many fitted and the one that waits.
fn fill(w: &World, cache: &Arc<RamCache>) -> (u64, Reserving) {
    for i in 0.. {
        let place = w.reserve(cache, M);
        let Some(mut r) = taken(&place) else { return (i, place) };
        let bufs = r.take(M);
        bufs.fill(i as u8 + 1);
        assert_eq!(w.start_now(cache, Request::write(i * 2 * M, bufs)), Some(Ok(())));
        assert!(i < 1000, "never full");
    }
    unreachable!("the loop ends")
}

fn last_step(w: &World) -> Option<u64> {
    std::iter::from_fn(|| w.env.events.next())
        .filter(|e| e.kind == EventKind::Overflow)
        .last()
        .map(|e| e.value)
}

#[test]
fn those_who_wait_are_served_in_order_and_a_small_request_passes_no_large_one() {
    let (w, below) = (World::new(), Below::new(64 * M));
    below.hold(Op::Write);
    let cache = w.cache(&below, CacheOptions { drain_workers: 1, ..options(Overflow::Wait) });
    let (_, first) = fill(&w, &cache);
    let second = w.reserve(&cache, 4 * K);
    let third = w.reserve(&cache, M);
    assert_eq!(number(&cache, "waiters"), 3, "all three really wait");
    assert!(number(&cache, "used") + 512 * K < 8 * M, "there would be space for the small one");
    assert_eq!(last_step(&w), Some(Side::Cache as u64));
    assert_eq!(cache.hist("space").expect("a histogram").count, 0);
    below.pass();
    w.run();
    assert!(
        first.lock().is_some() && second.lock().is_some(),
        "one store made space for a mebibyte and a page"
    );
    assert!(third.lock().is_none());
    below.pass();
    w.run();
    assert!(third.lock().is_some());
    assert_eq!(cache.hist("space").expect("a histogram").count, 3);
    drop((first, second, third));
    below.release(Op::Write);
    assert_eq!(w.settle(&cache), Ok(()));
    assert_eq!(number(&cache, "used"), 0);
}

#[test]
fn while_somebody_waits_drain_is_forced_although_the_marks_are_far() {
    let (w, below) = (World::new(), Below::new(64 * M));
    let options = CacheOptions {
        high_watermark: 100,
        low_watermark: 99,
        drain_delay_ms: 60_000,
        ..options(Overflow::Wait)
    };
    let cache = w.cache(&below, options);
    below.hold(Op::Write);
    w.write_moved(&cache, 0, M, 1);
    let mut kept: Vec<_> = (0..6).map(|_| w.reserved(&cache, M)).collect();
    w.run();
    assert!(below.seen().is_empty(), "lazy");
    let waits = w.reserve(&cache, M);
    w.run();
    assert!(waits.lock().is_none());
    assert_eq!(below.seen().iter().map(|s| s.class).collect::<Vec<_>>(), [Class::Background]);
    below.release(Op::Write);
    w.run();
    assert!(waits.lock().is_some());
    kept.clear();
}

#[test]
fn a_cancelled_waiter_leaves_the_line_and_the_next_one_is_looked_at() {
    let (w, below) = (World::new(), Below::new(64 * M));
    below.hold(Op::Write);
    let cache = w.cache(&below, options(Overflow::Wait));
    let (cx, cancel) = w.cx.with_new_cancel();
    let (_, first) = fill(&w, &cache);
    let second = w.reserve_on(&cx, &cache, M);
    assert_eq!(number(&cache, "waiters"), 2);
    // The large one at the head goes; what is free is enough for the small one behind it.
    let small = w.reserve(&cache, 4 * K);
    cancel.cancel();
    w.run();
    let result = second.lock().take().map(|r| r.map(drop));
    assert_eq!(result, Some(Err(IoError::cancelled())));
    assert!(first.lock().is_none() && small.lock().is_none(), "the head still waits");
    assert_eq!(number(&cache, "waiters"), 2);
    below.release(Op::Write);
    w.run();
    assert!(first.lock().is_some() && small.lock().is_some());
}

#[test]
fn when_full_a_write_through_reaches_the_file_before_it_is_acknowledged() {
    let (w, below) = (World::new(), Below::new(64 * M));
    below.hold(Op::Write);
    let cache = w.cache(&below, options(Overflow::WriteThrough));
    let mut n = 0;
    let mut through = loop {
        let r = w.reserved(&cache, M);
        if r.writes_through() {
            break r;
        }
        let mut r = r;
        assert_eq!(w.start_now(&cache, Request::write(n * 2 * M, r.take(M))), Some(Ok(())));
        n += 1;
    };
    assert!(n >= 6, "the cache was used first");
    assert_eq!(last_step(&w), Some(Side::Target as u64));
    let bufs = through.take(M);
    bufs.fill(9);
    // The next one has to wait for its turn at the buffer set aside (S75).
    let next = w.reserve(&cache, M);
    assert!(next.lock().is_none());
    let before = below.waiting();
    let write = w.start(&cache, Request::write(60 * M, bufs.clone()));
    drop(bufs);
    w.run();
    assert!(write.now().is_none() && below.waiting() == before + 1, "not acknowledged yet");
    below.release(Op::Write);
    w.run();
    assert_eq!(write.now(), Some(Ok(())));
    assert_eq!(below.bytes(60 * M, M), vec![9; 1 << 20]);
    drop(through);
    w.run();
    assert!(taken(&next).is_some_and(|r| r.writes_through()));
}

#[test]
fn when_full_foreign_memory_is_written_through_as_it_is() {
    let (w, below) = (World::new(), Below::new(64 * M));
    below.hold(Op::Write);
    let cache = w.cache(&below, options(Overflow::WriteThrough));
    let kept: Vec<_> =
        std::iter::from_fn(|| Some(w.reserved(&cache, 64 * K)).filter(|r| !r.writes_through())).collect();
    let bufs = Buffers::from_bytes(&[4; 64 * 1024]);
    let write = w.start(&cache, Request::write(0, bufs.clone()));
    w.run();
    assert_eq!(
        below.seen().last().map(|s| s.memory.clone()),
        Some(vec![bufs.segments()[0].as_ptr() as usize])
    );
    assert!(write.now().is_none());
    below.release(Op::Write);
    w.run();
    assert_eq!(write.now(), Some(Ok(())));
    drop(kept);
}

#[test]
fn break_snapshot_refuses_at_once_and_says_so() {
    let (w, below) = (World::new(), Below::new(64 * M));
    below.hold(Op::Write);
    let cache = w.cache(&below, options(Overflow::BreakSnapshot));
    let mut kept = Vec::new();
    let error = loop {
        let place = w.reserve(&cache, M);
        let result = place.lock().take().expect("never waits");
        match result {
            Ok(r) => kept.push(r),
            Err(e) => break e,
        }
    };
    assert_eq!((error.code, error.errno), (Code::CacheFull, libc::ENOSPC));
    let event =
        std::iter::from_fn(|| w.env.events.next()).find(|e| e.kind == EventKind::Overflow).expect("told");
    assert_eq!((event.code, event.source.as_str()), (Code::CacheFull, "cache"));
    kept.clear();
    assert!(w.reserve(&cache, M).lock().take().is_some_and(|r| r.is_ok()), "space is space again");
}

#[test]
fn data_moves_to_the_spill_file_and_back_to_the_target_in_order_of_address() {
    let (w, below, p) = (World::new(), Below::new(128 * M), Below::new(64 * M));
    below.hold(Op::Write);
    p.hold(Op::Write);
    let cache = w.cache_with(&below, Some(&p), spilling(Overflow::Wait, 64 * M));
    let (n, first) = fill(&w, &cache);
    assert!(p.waiting() > 0, "data is on its way to P");
    let used = number(&cache, "used");
    w.run();
    assert_eq!(number(&cache, "used"), used, "memory is freed only when P has it (S47)");
    assert!(first.lock().is_none());
    assert_eq!(last_step(&w), Some(Side::Spill as u64));
    p.release(Op::Write);
    w.run();
    let mut r = taken(&first).expect("P made space");
    let bufs = r.take(M);
    bufs.fill(n as u8 + 1);
    assert_eq!(w.start_now(&cache, Request::write(n * 2 * M, bufs)), Some(Ok(())));
    drop(r);
    // Far more than memory holds, with a target that hangs all the time.
    for i in n + 1..40 {
        let place = w.reserve(&cache, M);
        w.run();
        let bufs = taken(&place).expect("P makes space").take(M);
        bufs.fill(i as u8 + 1);
        assert_eq!(w.start_now(&cache, Request::write(i * 2 * M, bufs)), Some(Ok(())));
    }
    assert!(number(&cache, "spilled") >= 25 * M && number(&cache, "peak") <= 10 * M);
    for i in [0, 7, 20, 39] {
        assert_eq!(w.read(&cache, i * 2 * M + 5, 1000), Ok(vec![i as u8 + 1; 1000]), "read from P or memory");
    }
    let stuck = below.seen().len();
    below.release(Op::Write);
    assert_eq!(w.settle(&cache), Ok(()));
    for i in 0..40 {
        assert_eq!(below.bytes(i * 2 * M, M), vec![i as u8 + 1; 1 << 20], "granule {i}");
    }
    let order: Vec<u64> = below.ranges(Op::Write)[stuck..].iter().map(|r| r.offset).collect();
    let descents = order.windows(2).filter(|o| o[0] > o[1]).count();
    assert!(descents <= 2, "once round, in order of address: {order:?}");
    assert_eq!((number(&cache, "spilled"), number(&cache, "used")), (0, 0));
    w.run();
    assert!(p.ranges(Op::Discard).iter().any(|r| r.offset == 0), "P's blocks are given back");
}

#[test]
fn what_is_drained_last_goes_to_the_spill_file() {
    let (w, below, p) = (World::new(), Below::new(128 * M), Below::new(64 * M));
    below.hold(Op::Write);
    p.hold(Op::Write);
    let cache =
        w.cache_with(&below, Some(&p), CacheOptions { drain_workers: 1, ..spilling(Overflow::Wait, 64 * M) });
    let (n, _) = fill(&w, &cache);
    w.run();
    p.release(Op::Write);
    w.run();
    let first = below.ranges(Op::Write)[0].offset / (2 * M);
    let content = u64::from(p.bytes(0, 1)[0]) - 1;
    assert_eq!(content, (first + n - 1) % n, "the one that the drain reaches last on its way round");
}

#[test]
fn a_newer_version_drops_the_older_one_from_the_spill_file() {
    let (w, below, p) = (World::new(), Below::new(128 * M), Below::new(64 * M));
    below.hold(Op::Write);
    let cache = w.cache_with(&below, Some(&p), spilling(Overflow::Wait, 64 * M));
    for i in 0..20 {
        let place = w.reserve(&cache, M);
        w.run();
        let bufs = taken(&place).expect("P makes space").take(M);
        bufs.fill(1);
        assert_eq!(w.start_now(&cache, Request::write(i * 2 * M, bufs)), Some(Ok(())));
    }
    let spilled = number(&cache, "spilled");
    assert!(spilled > 0);
    let all = w.start(&cache, Request::write_zeroes(range(0, 64 * M), Flags::empty()));
    w.run();
    assert_eq!(all.now(), Some(Ok(())));
    assert_eq!(number(&cache, "spilled"), 0, "the older versions left P with the newer one's arrival (S49)");
    assert_eq!(w.read(&cache, 4 * M, M), Ok(vec![0; 1 << 20]));
    below.release(Op::Write);
    assert_eq!(w.settle(&cache), Ok(()));
    assert_eq!(below.bytes(0, 64 * M), vec![0; 64 << 20]);
}

#[test]
fn the_quota_is_kept_and_then_comes_the_next_step() {
    for then in [Overflow::Wait, Overflow::WriteThrough, Overflow::BreakSnapshot] {
        let (w, below, p) = (World::new(), Below::new(256 * M), Below::new(64 * M));
        below.hold(Op::Write);
        let cache = w.cache_with(&below, Some(&p), spilling(then, 12 * M));
        let mut n = 0;
        let last = loop {
            let place = w.reserve(&cache, M);
            w.run();
            let result = place.lock().take();
            match result {
                Some(Ok(mut r)) if !r.writes_through() => {
                    assert_eq!(w.start_now(&cache, Request::write(n * 2 * M, r.take(M))), Some(Ok(())));
                    n += 1;
                }
                other => break (other, place),
            }
            assert!(n < 100, "the quota ends it");
        };
        assert!((15..=22).contains(&n), "memory and P: {n}");
        assert!(number(&cache, "spilled") <= 12 * M);
        assert!(p.ranges(Op::Write).iter().all(|r| r.end() <= 12 * M));
        match (then, last.0) {
            (Overflow::Wait, None) => assert_eq!(number(&cache, "waiters"), 1),
            (Overflow::WriteThrough, Some(Ok(r))) => assert!(r.writes_through()),
            (Overflow::BreakSnapshot, Some(Err(e))) => assert_eq!(e.code, Code::CacheFull),
            (then, other) => panic!("{then:?}: {other:?}"),
        }
        below.release(Op::Write);
        w.run();
        drop(last.1);
        assert_eq!(w.settle(&cache), Ok(()));
    }
}

#[test]
fn a_spill_file_that_fails_loses_nothing_and_counts_as_full() {
    let (w, below, p) = (World::new(), Below::new(128 * M), Below::new(64 * M));
    below.hold(Op::Write);
    p.fail(Op::Write, range(0, 64 * M), usize::MAX, libc::ENOSPC);
    let cache = w.cache_with(&below, Some(&p), spilling(Overflow::WriteThrough, 64 * M));
    let mut n = 0;
    loop {
        let place = w.reserve(&cache, M);
        w.run();
        let mut r = taken(&place).expect("the next step is taken at once");
        if r.writes_through() {
            break;
        }
        let bufs = r.take(M);
        bufs.fill(n as u8 + 1);
        assert_eq!(w.start_now(&cache, Request::write(n * 2 * M, bufs)), Some(Ok(())));
        n += 1;
    }
    let report = cache.first_error().expect("reported");
    assert_eq!((report.side, report.error.errno), (Side::Spill, libc::ENOSPC));
    assert!(cache.lost_ranges().is_empty());
    assert_eq!(number(&cache, "spilled"), 0);
    below.release(Op::Write);
    assert_eq!(w.settle(&cache), Ok(()));
    for i in 0..n {
        assert_eq!(below.bytes(i * 2 * M, M), vec![i as u8 + 1; 1 << 20]);
    }
}

#[test]
fn a_wait_that_reaches_the_bound_takes_the_next_step() {
    // Wait, then spill.
    let (w, below, p) = (World::new(), Below::new(128 * M), Below::new(64 * M));
    below.hold(Op::Write);
    let o =
        CacheOptions { latency_bound_ms: 50, overflow: Overflow::Wait, ..spilling(Overflow::Wait, 64 * M) };
    let cache = w.cache_with(&below, Some(&p), o);
    let (_, waits) = fill(&w, &cache);
    w.advance(Duration::from_millis(49));
    assert!(waits.lock().is_none() && p.seen().is_empty());
    w.advance(Duration::from_millis(2));
    assert!(waits.lock().is_some(), "the spill file made space");

    // Wait, then break: nothing else is left, and the guest is to be let go.
    let (w, below) = (World::new(), Below::new(128 * M));
    below.hold(Op::Write);
    let cache = w.cache(&below, CacheOptions { latency_bound_ms: 50, ..options(Overflow::Wait) });
    let (_, waits) = fill(&w, &cache);
    w.advance(Duration::from_millis(51));
    assert_eq!(waits.lock().take().map(|r| r.map(drop).map_err(|e| e.code)), Some(Err(Code::CacheFull)));
    assert_eq!(number(&cache, "waiters"), 0);

    // A full spill file, wait, then break.
    let (w, below, p) = (World::new(), Below::new(128 * M), Below::new(64 * M));
    below.hold(Op::Write);
    p.hold(Op::Write);
    let o = CacheOptions { latency_bound_ms: 50, ..spilling(Overflow::Wait, 64 * M) };
    let cache = w.cache_with(&below, Some(&p), o);
    let (_, waits) = fill(&w, &cache);
    w.advance(Duration::from_millis(49));
    assert!(waits.lock().is_none() && p.waiting() > 0);
    w.advance(Duration::from_millis(60));
    assert_eq!(waits.lock().take().map(|r| r.map(drop).map_err(|e| e.code)), Some(Err(Code::CacheFull)));
}

#[test]
fn a_dead_target_hangs_only_those_whom_the_policy_lets_hang() {
    let (w, below) = (World::new(), Below::new(64 * M));
    below.hold(Op::Write);
    let cache = w.cache(&below, options(Overflow::Wait));
    let (n, waits) = fill(&w, &cache);
    w.advance(Duration::from_secs(600));
    assert!(waits.lock().is_none(), "waits as long as it takes");
    assert_eq!(w.read(&cache, (n - 1) * 2 * M, 100), Ok(vec![n as u8; 100]), "reads do not wait");
    assert_eq!(w.read(&cache, 63 * M, 100), Ok(vec![0xEE; 100]));
    assert!(below.most_at_once.load(SeqCst) <= 16);
    below.release(Op::Write);
    w.run();
    assert!(waits.lock().is_some());
}

#[test]
fn caches_share_the_budget_and_a_dead_target_does_not_starve_the_other_disk() {
    let w = World::new();
    let (dead, live) = (Below::new(256 * M), Below::new(256 * M));
    dead.hold(Op::Write);
    w.env.budget.set_limit(24 * M);
    let o = CacheOptions { capacity: 64 * M, drain_delay_ms: 60_000, ..CacheOptions::default() };
    let (a, b) = (w.cache(&dead, o.clone()), w.cache(&live, o.clone()));
    let (n, waits) = fill(&w, &a);
    assert!((12..24).contains(&n), "the whole pool: {n}");
    assert!(w.env.budget.used() <= 24 * M);
    // Its share is one batch, and the line moves on as its target does.
    for i in 0..20 {
        let place = w.reserve(&b, M);
        w.until("the other disk's reservation", || place.lock().is_some());
        let bufs = taken(&place).expect("served").take(M);
        assert_eq!(w.start_now(&b, Request::write(i * 2 * M, bufs)), Some(Ok(())));
    }
    assert!(waits.lock().is_none(), "the dead one still waits");
    assert_eq!(w.settle(&b), Ok(()));
    dead.release(Op::Write);
    w.run();
    assert!(waits.lock().is_some());
    drop(waits);
    assert_eq!(w.settle(&a), Ok(()));
    drop((a, b));
    w.run();
    assert_eq!(w.env.budget.used(), 0);
}

#[test]
fn a_cache_that_waits_for_the_budget_makes_the_others_drain() {
    let w = World::new();
    let (t1, t2) = (Below::new(256 * M), Below::new(256 * M));
    w.env.budget.set_limit(24 * M);
    let o = CacheOptions { capacity: 64 * M, drain_delay_ms: 60_000, ..CacheOptions::default() };
    let (a, b) = (w.cache(&t1, o.clone()), w.cache(&t2, o.clone()));
    // All of the pool lies in a lazy cache.
    let mut n = 0;
    while let Some(r) = a.try_reserve(M) {
        let mut r = r;
        assert_eq!(w.start_now(&a, Request::write(n * 2 * M, r.take(M))), Some(Ok(())));
        n += 1;
    }
    assert!(n >= 10 && t1.seen().is_empty(), "lazy: {n}");
    let kept: Vec<_> = (0..3).map(|_| w.reserve(&b, M)).collect();
    w.run();
    assert!(kept.iter().all(|p| p.lock().is_some()));
    assert!(!t1.seen().is_empty() && t1.seen()[0].class == Class::Background);
}

#[test]
fn a_cache_whose_share_does_not_fit_into_the_budget_is_refused() {
    let (w, below) = (World::new(), Below::new(M));
    w.env.budget.set_limit(M);
    let error = RamCache::new(&w.env, "c", Edge::to_node(below), None, small()).expect_err("too small");
    assert!(error.to_string().contains("RAM budget"), "{error}");
}
