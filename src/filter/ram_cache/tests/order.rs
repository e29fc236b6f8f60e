//! Flush, FUA, bypass, discard, versions (S20, S23, S49).

use super::super::CacheOptions;
use super::super::testing::*;
use crate::error::{Code, IoError};
use crate::node::Node;
use crate::request::{Buffers, Class, Flags, Op, Request};
use std::time::Duration;

fn lazy() -> CacheOptions {
    CacheOptions { drain_delay_ms: 60_000, ..small() }
}

fn bytes(byte: u8, len: u64) -> Buffers {
    Buffers::from_bytes(&vec![byte; len as usize])
}

#[test]
fn a_flush_drains_what_was_there_and_then_flushes_the_file() {
    let (w, below) = (World::new(), Below::new(8 * M));
    let cache = w.cache(&below, lazy());
    below.hold(Op::Write);
    w.write_moved(&cache, 0, 64 * K, 1);
    let flush = w.start(&cache, Request::flush());
    w.run();
    assert_eq!(below.waiting(), 1, "its write is under way");
    // Right beside it, and after the flush has begun.
    w.write_moved(&cache, 64 * K, 64 * K, 2);
    w.run();
    assert!(flush.now().is_none() && below.ranges(Op::Flush).is_empty());
    below.release(Op::Write);
    w.run();
    assert_eq!(flush.now(), Some(Ok(())));
    let order: Vec<_> = below.seen().iter().map(|s| (s.op, s.range)).collect();
    assert_eq!(order, [(Op::Write, range(0, 64 * K)), (Op::Flush, range(0, 0))]);
    assert!(!cache.is_empty(), "what came later is not drained");
}

#[test]
fn a_flush_of_an_empty_cache_is_a_flush_of_the_file() {
    let (w, below) = (World::new(), Below::new(M));
    let cache = w.cache(&below, lazy());
    assert_eq!(w.start_now(&cache, Request::flush()), Some(Ok(())));
    assert_eq!(below.ranges(Op::Flush).len(), 1);
    below.fail(Op::Flush, range(0, 0), 1, libc::EIO);
    assert_eq!(w.start_now(&cache, Request::flush()), Some(Err(IoError::os(libc::EIO))));
}

#[test]
fn a_flush_that_is_cancelled_lets_its_caller_go() {
    let (w, below) = (World::new(), Below::new(M));
    let cache = w.cache(&below, lazy());
    below.hold(Op::Write);
    w.write_moved(&cache, 0, 64 * K, 1);
    let (cx, cancel) = w.cx.with_new_cancel();
    let flush = w.start_on(&cx, &cache, Request::flush());
    w.run();
    assert!(flush.now().is_none() && below.waiting() == 1);
    cancel.cancel();
    w.run();
    assert_eq!(flush.now(), Some(Err(IoError::cancelled())));
}

#[test]
fn a_durable_write_goes_through_and_replaces_what_is_held() {
    let (w, below) = (World::new(), Below::new(M));
    let cache = w.cache(&below, lazy());
    w.write_moved(&cache, 0, 64 * K, 1);
    let fua = Request::write(4096, bytes(2, 4096)).flags(Flags::FUA);
    assert_eq!(w.start_now(&cache, fua), Some(Ok(())));
    let seen = below.seen();
    assert_eq!((seen.len(), seen[0].range, seen[0].flags), (1, range(4096, 4096), Flags::FUA));
    let want = [vec![1; 4096], vec![2; 4096], vec![1; 65536 - 8192]].concat();
    assert_eq!(w.read(&cache, 0, 64 * K), Ok(want.clone()));
    assert_eq!(w.settle(&cache), Ok(()));
    assert_eq!(below.bytes(0, 64 * K), want);
}

#[test]
fn of_two_versions_the_newer_reaches_the_file_last() {
    let (w, below) = (World::new(), Below::new(M));
    let cache = w.cache(&below, CacheOptions { drain_delay_ms: 0, ..small() });
    below.hold(Op::Write);
    w.write_moved(&cache, 0, 64 * K, 1);
    w.run();
    assert_eq!(below.waiting(), 1, "the first version is under way");
    w.write_moved(&cache, 0, 64 * K, 2);
    w.advance(Duration::from_secs(1));
    assert_eq!(below.seen().len(), 1, "the second one waits for its end");
    assert_eq!(w.read(&cache, 0, K), Ok(vec![2; 1024]));
    below.release(Op::Write);
    w.until("both", || cache.is_empty());
    assert_eq!(below.ranges(Op::Write).len(), 2);
    assert_eq!(below.bytes(0, 64 * K), vec![2; 65536]);
}

#[test]
fn a_write_through_waits_for_a_drain_of_its_range() {
    let (w, below) = (World::new(), Below::new(M));
    let cache = w.cache(&below, CacheOptions { drain_delay_ms: 0, ..small() });
    below.hold(Op::Write);
    w.write_moved(&cache, 0, 64 * K, 1);
    w.run();
    assert_eq!(below.waiting(), 1);
    let fua = w.start(&cache, Request::write(0, bytes(2, 4096)).flags(Flags::FUA));
    let beside = w.start(&cache, Request::write(64 * K, bytes(2, 4096)).flags(Flags::FUA));
    w.run();
    assert!(fua.now().is_none());
    assert_eq!(
        below.ranges(Op::Write),
        [range(0, 64 * K), range(64 * K, 4096)],
        "only the one beside is sent"
    );
    below.release(Op::Write);
    w.run();
    assert_eq!((fua.now(), beside.now()), (Some(Ok(())), Some(Ok(()))));
    assert_eq!(below.bytes(0, 4096), vec![2; 4096]);
}

#[test]
fn a_drain_waits_for_a_write_through_of_its_range_and_the_newer_one_wins() {
    let (w, below) = (World::new(), Below::new(M));
    let cache = w.cache(&below, CacheOptions { drain_delay_ms: 0, ..small() });
    below.hold(Op::Write);
    let through = w.start(&cache, Request::write(0, bytes(1, 8192)).class(Class::Background));
    w.run();
    assert_eq!(below.waiting(), 1);
    w.write_moved(&cache, 4096, 4096, 2);
    w.advance(Duration::from_secs(1));
    assert_eq!(below.seen().len(), 1, "the newer data waits in memory");
    below.release(Op::Write);
    w.until("both", || cache.is_empty());
    assert_eq!(through.now(), Some(Ok(())));
    assert_eq!(below.bytes(0, 8192), [vec![1; 4096], vec![2; 4096]].concat());
}

#[test]
fn background_writes_go_straight_to_the_file_and_drop_what_is_older() {
    let (w, below) = (World::new(), Below::new(M));
    let cache = w.cache(&below, lazy());
    w.write_moved(&cache, 0, 64 * K, 1);
    for class in [Class::Background, Class::Lazy] {
        assert_eq!(w.start_now(&cache, Request::write(0, bytes(2, 64 * K)).class(class)), Some(Ok(())));
    }
    assert_eq!(below.seen().iter().map(|s| s.class).collect::<Vec<_>>(), [Class::Background, Class::Lazy]);
    assert!(cache.is_empty(), "nothing is left that would overwrite it");
    let zeroes = Request::write_zeroes(range(0, M), Flags::empty()).class(Class::Background);
    assert_eq!(w.start_now(&cache, zeroes), Some(Ok(())));
    assert_eq!(below.ranges(Op::WriteZeroes), [range(0, M)]);
}

#[test]
fn a_write_through_that_fails_leaves_what_is_held() {
    let (w, below) = (World::new(), Below::new(M));
    let cache = w.cache(&below, lazy());
    w.write_moved(&cache, 0, 64 * K, 1);
    below.fail(Op::Write, range(0, M), 1, libc::ENOSPC);
    let through = Request::write(0, bytes(2, 4096)).class(Class::Background);
    assert_eq!(w.start_now(&cache, through), Some(Err(IoError::os(libc::ENOSPC))));
    assert_eq!(w.read(&cache, 0, 4096), Ok(vec![1; 4096]));
    assert_eq!(w.settle(&cache), Ok(()));
    assert_eq!(below.bytes(0, 4096), vec![1; 4096]);
}

#[test]
fn zeroes_that_must_be_fast_ask_the_file_if_it_is_slow() {
    let (w, below) = (World::new(), Below::new(M));
    below.set_limits(|l| l.fast_zeroes = false);
    let cache = w.cache(&below, lazy());
    let fast = Request::write_zeroes(range(0, 4096), Flags::NO_FALLBACK);
    assert_eq!(w.start_now(&cache, fast), Some(Ok(())));
    assert_eq!(below.ranges(Op::WriteZeroes).len(), 1);
    assert_eq!(w.start_now(&cache, Request::write_zeroes(range(0, 4096), Flags::empty())), Some(Ok(())));
    assert_eq!(below.ranges(Op::WriteZeroes).len(), 1, "the others need not be");
}

#[test]
fn a_discard_drops_what_is_held_at_once_and_goes_down() {
    let (w, below) = (World::new(), Below::new(M));
    let cache = w.cache(&below, CacheOptions { drain_delay_ms: 0, drain_workers: 1, ..small() });
    below.hold(Op::Write);
    w.write_moved(&cache, 0, 64 * K, 1);
    w.run();
    assert_eq!(below.waiting(), 1, "a store is under way");
    w.write_moved(&cache, 128 * K, 64 * K, 2);
    let held: u64 = cache.get("used").expect("a property").parse().expect("a number");
    let discard = w.start(&cache, Request::discard(range(0, 256 * K)));
    w.run();
    let left: u64 = cache.get("used").expect("a property").parse().expect("a number");
    assert!(left < held - 60 * K, "what was not under way is gone already (S20)");
    assert!(
        discard.now().is_none() && below.ranges(Op::Discard).is_empty(),
        "the file gets it after the stores"
    );
    below.release(Op::Write);
    w.run();
    assert_eq!(discard.now(), Some(Ok(())));
    assert_eq!(below.ranges(Op::Discard), [range(0, 256 * K)]);
    assert!(cache.is_empty());
    assert_eq!(below.bytes(0, 256 * K), vec![0xDD; 256 * 1024]);
}

#[test]
fn a_discard_keeps_the_ragged_edges_that_the_file_would_ignore() {
    let (w, below) = (World::new(), Below::new(M));
    below.set_limits(|l| l.discard_align = 65536);
    let cache = w.cache(&below, lazy());
    w.write_moved(&cache, 0, 256 * K, 1);
    assert_eq!(w.start_now(&cache, Request::discard(range(10 * K, 200 * K))), Some(Ok(())));
    assert_eq!(w.read(&cache, 0, 64 * K), Ok(vec![1; 65536]));
    assert_eq!(w.read(&cache, 192 * K, 64 * K), Ok(vec![1; 65536]));
    assert_eq!(w.read(&cache, 64 * K, 128 * K), Ok(vec![0xDD; 128 * 1024]));
}

#[test]
fn data_that_comes_after_a_discard_survives_it() {
    let (w, below) = (World::new(), Below::new(M));
    let cache = w.cache(&below, lazy());
    below.hold(Op::Discard);
    let discard = w.start(&cache, Request::discard(range(0, 64 * K)));
    w.run();
    assert_eq!(below.waiting(), 1);
    w.write_moved(&cache, 0, 64 * K, 3);
    below.release(Op::Discard);
    w.run();
    assert_eq!(discard.now(), Some(Ok(())));
    assert_eq!(w.settle(&cache), Ok(()));
    assert_eq!(below.bytes(0, 64 * K), vec![3; 65536]);
}

#[test]
fn settling_drains_what_comes_meanwhile_too() {
    let (w, below) = (World::new(), Below::new(M));
    let cache = w.cache(&below, lazy());
    below.hold(Op::Write);
    w.write_moved(&cache, 0, 64 * K, 1);
    let (cx, node) = (w.cx.clone(), cache.clone());
    let settle = w.spawn(async move { node.settle(&cx).await });
    w.run();
    w.write_moved(&cache, 128 * K, 64 * K, 1);
    w.run();
    assert_eq!(below.waiting(), 2);
    assert!(settle.now().is_none());
    below.release(Op::Write);
    w.run();
    assert_eq!(settle.now(), Some(Ok(())));
    assert!(cache.is_empty() && w.is_idle());
}

#[test]
fn closing_lets_everybody_go_and_frees_buffers_as_their_writes_end() {
    let (w, below) = (World::new(), Below::new(64 * M));
    let cache = w.cache(&below, CacheOptions { drain_workers: 2, ..small() });
    below.hold(Op::Write);
    for i in 0..7 {
        w.write_moved(&cache, i * 2 * M, M, 1);
    }
    let line: Vec<_> = (0..3).map(|_| w.reserve(&cache, M)).collect();
    let flush = w.start(&cache, Request::flush());
    w.run();
    assert_eq!(below.waiting(), 2, "two stores hang");
    assert_eq!(cache.get("waiters").as_deref(), Some("3"));
    assert!(flush.now().is_none());

    let gone = IoError::new(libc::ECANCELED, Code::Cancelled);
    cache.close(gone);
    w.run();
    for place in &line {
        assert_eq!(place.lock().take().map(|r| r.map(drop)), Some(Err(gone)));
    }
    assert_eq!(flush.now(), Some(Err(gone)));
    let used: u64 = cache.get("used").expect("a property").parse().expect("a number");
    assert!((2 * M..2 * M + 16 * K).contains(&used), "only what the kernel may still read: {used}");
    assert_eq!(w.start_now(&cache, Request::write(0, bytes(1, 4096))), Some(Err(gone)));
    assert_eq!(w.start_now(&cache, Request::read(0, bytes(1, 4096))), Some(Err(gone)));
    assert_eq!(w.start_now(&cache, Request::discard(range(0, 4096))), Some(Err(gone)));
    assert_eq!(w.settle(&cache), Err(gone));

    below.release(Op::Write);
    w.run();
    assert_eq!(cache.get("used").as_deref(), Some("0"));
    assert!(w.is_idle());
}

#[test]
fn what_is_abandoned_is_gone_and_the_cache_can_be_used_again() {
    let (w, below) = (World::new(), Below::new(64 * M));
    let cache = w.cache(&below, CacheOptions { drain_workers: 1, ..small() });
    below.hold(Op::Write);
    for i in 0..7 {
        w.write_moved(&cache, i * 2 * M, M, 1);
    }
    let line = w.reserve(&cache, M);
    let under_way = below.ranges(Op::Write)[0].offset;
    let (cx, node) = (w.cx.clone(), cache.clone());
    let settle = w.spawn(async move { node.settle(&cx).await });
    let flush = w.start(&cache, Request::flush());
    let through = w.start(&cache, Request::write(under_way, bytes(2, M)).flags(Flags::FUA));
    w.run();
    assert_eq!(cache.get("waiters").as_deref(), Some("1"));
    assert!(settle.now().is_none() && flush.now().is_none() && through.now().is_none());
    assert_eq!(below.waiting(), 1);

    Node::abandon(&*cache);
    w.run();
    let gone = IoError::new(libc::EIO, Code::SnapshotBroken);
    assert_eq!(line.lock().take().map(|r| r.map(drop)), Some(Err(gone)));
    for waited in [settle.now(), flush.now(), through.now()] {
        assert_eq!(waited, Some(Err(gone)));
    }
    assert_eq!(w.read(&cache, 12 * M, K), Ok(vec![0xEE; 1024]), "as the file has it");
    w.write_moved(&cache, 12 * M, M, 9);
    below.fail(Op::Write, range(under_way, M), 1, libc::EIO);
    below.release(Op::Write);
    assert_eq!(w.settle(&cache), Ok(()));
    assert_eq!(below.bytes(12 * M, M), vec![9; 1 << 20]);
    assert_eq!(below.ranges(Op::Write).len(), 2, "what failed after it was abandoned is not tried again");
    assert!(w.is_idle() && cache.get("used").as_deref() == Some("0"));
}
