//! Moved buffers, reads, accounting (S11, S16, S32, S41, S44, S75).

use super::super::testing::*;
use super::super::{CacheOptions, RamCache};
use crate::node::{Edge, ExtentFlags, Node};
use crate::request::{Buffers, Class, Flags, Op, Request};
use crate::sync::Arc;
use std::time::Duration;

fn used(cache: &Arc<RamCache>) -> u64 {
    cache.get("used").expect("a property").parse().expect("a number")
}

#[test]
fn moved_memory_reaches_the_file_without_a_copy() {
    let (w, below) = (World::new(), Below::new(8 * M));
    let cache = w.cache(&below, small());
    let mut r = w.reserved(&cache, 128 * K);
    let (a, b) = (r.take(64 * K), r.take(64 * K));
    let addresses: Vec<usize> =
        [&a, &b].iter().flat_map(|x| x.segments()).map(|s| s.as_ptr() as usize).collect();
    a.fill(1);
    b.fill(2);
    assert_eq!(w.start_now(&cache, Request::write(0, a)), Some(Ok(())));
    assert_eq!(w.start_now(&cache, Request::write(64 * K, b)), Some(Ok(())));
    assert!(below.seen().is_empty(), "acknowledged before the file had it");
    assert_eq!(w.settle(&cache), Ok(()));
    assert_eq!(below.seen()[0].memory, addresses);
    assert_eq!(below.bytes(64 * K, 64 * K), vec![2; 65536]);
}

#[test]
fn foreign_memory_may_change_as_soon_as_the_write_is_acknowledged() {
    let (w, below) = (World::new(), Below::new(8 * M));
    let cache = w.cache(&below, small());
    let bufs = Buffers::from_bytes(&[7; 5000]);
    assert_eq!(w.start_now(&cache, Request::write(100, bufs.clone())), Some(Ok(())));
    bufs.fill(9);
    assert_eq!(w.read(&cache, 100, 5000), Ok(vec![7; 5000]));
    assert_eq!(w.settle(&cache), Ok(()));
    assert_eq!(below.bytes(99, 5002), [&[0xEE][..], &[7; 5000], &[0xEE]].concat());
}

#[test]
fn reads_see_memory_over_the_file_piece_by_piece() {
    let (w, below) = (World::new(), Below::new(M));
    let cache = w.cache(&below, small());
    w.write_moved(&cache, 64 * K, 64 * K, 1);
    assert_eq!(w.start_now(&cache, Request::write(70 * K, Buffers::from_bytes(&[2; 1024]))), Some(Ok(())));
    let zeroes = Request::write_zeroes(range(100 * K, 4 * K), Flags::empty());
    assert_eq!(w.start_now(&cache, zeroes), Some(Ok(())));
    let mut want = vec![0xEE; 192 * 1024];
    want[64 * 1024..128 * 1024].fill(1);
    want[70 * 1024..71 * 1024].fill(2);
    want[100 * 1024..104 * 1024].fill(0);
    assert_eq!(w.read(&cache, 0, 192 * K), Ok(want.clone()));
    assert_eq!(w.read(&cache, 70 * K, K), Ok(vec![2; 1024]));
    assert_eq!(w.settle(&cache), Ok(()));
    assert_eq!(below.bytes(0, 192 * K), want);
    assert_eq!(w.read(&cache, 0, 192 * K), Ok(want));
}

#[test]
fn status_is_that_of_what_is_held_and_of_the_file_between() {
    let (w, below) = (World::new(), Below::new(M));
    let cache = w.cache(&below, small());
    w.write_moved(&cache, 64 * K, 64 * K, 1);
    w.write_moved(&cache, 128 * K, 64 * K, 1);
    assert_eq!(
        w.start_now(&cache, Request::write_zeroes(range(192 * K, 8 * K), Flags::empty())),
        Some(Ok(()))
    );
    for (offset, len, flags) in [
        (0, 64 * K, ExtentFlags::ZERO),
        (64 * K, 128 * K, ExtentFlags::ALLOCATED),
        (192 * K, 8 * K, ExtentFlags::ALLOCATED | ExtentFlags::ZERO),
        (200 * K, M - 200 * K, ExtentFlags::ZERO),
    ] {
        let (cx, node) = (w.cx.clone(), cache.clone());
        let done = w.spawn(async move {
            let x = cx.status(&*node, range(offset, M - offset)).await?;
            assert_eq!((x.len, x.flags), (len, flags), "at {offset}");
            Ok(())
        });
        w.run();
        assert_eq!(done.now(), Some(Ok(())));
    }
}

#[test]
fn zeros_take_no_payload_and_reach_the_file_uncut() {
    let (w, below) = (World::new(), Below::new(64 * M));
    let cache = w.cache(&below, small());
    let zeroes = Request::write_zeroes(range(0, 64 * M), Flags::MAY_UNMAP);
    assert_eq!(w.start_now(&cache, zeroes), Some(Ok(())));
    assert!(used(&cache) < 4 * K, "a marker, not 64 MiB");
    assert_eq!(cache.get("zero-markers").as_deref(), Some("1"));
    assert_eq!(w.settle(&cache), Ok(()));
    let seen = below.seen();
    assert_eq!((seen.len(), seen[0].op, seen[0].range), (1, Op::WriteZeroes, range(0, 64 * M)));
    assert!(seen[0].flags.contains(Flags::MAY_UNMAP));
    assert_eq!(used(&cache), 0);
}

#[test]
fn with_capacity_0_everything_passes() {
    let (w, below) = (World::new(), Below::new(M));
    let cache = w.cache(&below, CacheOptions { capacity: 0, ..CacheOptions::default() });
    let bufs = w.reserved(&cache, 64 * K).take(64 * K);
    bufs.fill(5);
    assert_eq!(w.start_now(&cache, Request::write(0, bufs)), Some(Ok(())));
    assert_eq!(below.bytes(0, 64 * K), vec![5; 65536], "before it was acknowledged");
    assert_eq!(w.finish(&cache, Request::flush()), Ok(()));
    assert_eq!(w.read(&cache, 64 * K - 1, 2), Ok(vec![5, 0xEE]));
    assert_eq!(below.ranges(Op::Flush).len(), 1);
    assert!(cache.is_empty() && w.settle(&cache) == Ok(()));
    assert!(cache.set("capacity", "1G").is_err());
    below.answer_in_plan();
    let plan = cache.plan(Request::flush().as_ref());
    assert!(matches!(plan, crate::node::Plan::Done(Ok(()))), "the plan of the node below");
}

#[test]
fn reserved_memory_counts_before_it_is_read_and_goes_back_at_once_if_it_is_not_used() {
    let (w, below) = (World::new(), Below::new(M));
    let cache = w.cache(&below, small());
    let mut r = w.reserved(&cache, M);
    assert!(used(&cache) >= M, "reads in flight count (S32)");
    r.give_back(M - 64 * K);
    assert!(used(&cache) < 66 * K, "the surplus went back (S43)");
    let bufs = r.take(64 * K);
    drop(r);
    assert!(used(&cache) >= 64 * K);
    drop(bufs);
    assert_eq!(used(&cache), 0);
}

#[test]
fn memory_lives_until_the_last_reader_has_gone() {
    let (w, below) = (World::new(), Below::new(M));
    let cache = w.cache(&below, small());
    let bufs = w.reserved(&cache, 64 * K).take(64 * K);
    bufs.fill(3);
    assert_eq!(w.start_now(&cache, Request::write(0, bufs.clone())), Some(Ok(())));
    assert_eq!(w.settle(&cache), Ok(()));
    assert!(cache.is_empty() && used(&cache) >= 64 * K, "the file has it, but somebody still reads (S16)");
    assert_eq!(bufs.to_vec(), vec![3; 65536]);
    drop(bufs);
    assert_eq!(used(&cache), 0);
}

#[test]
fn reservations_taken_in_odd_parts_stay_within_what_was_booked() {
    let (w, below) = (World::new(), Below::new(8 * M));
    let cache = w.cache(&below, small());
    for parts in
        [vec![5000, 5000], vec![1; 100], vec![4096, 1, 4095, 61440], vec![512; 300], vec![65536, 1000]]
    {
        let len: u64 = parts.iter().sum();
        let mut r = w.reserved(&cache, len);
        let booked = used(&cache);
        let mut all = Vec::new();
        for (i, n) in parts.iter().enumerate() {
            let b = r.take(*n);
            assert_eq!(b.len() as u64, *n);
            b.fill(i as u8);
            all.push(b);
            assert!(used(&cache) <= booked, "{parts:?}");
        }
        for (i, b) in all.iter().enumerate() {
            assert!(b.to_vec().iter().all(|x| *x == i as u8), "parts do not share bytes");
        }
        drop((all, r));
        assert_eq!(used(&cache), 0, "{parts:?}");
    }
}

#[test]
fn many_small_writes_out_of_one_reservation_are_all_kept() {
    let (w, below) = (World::new(), Below::new(8 * M));
    let cache = w.cache(&below, small());
    let bufs = w.reserved(&cache, M).take(M);
    for i in 0..256u64 {
        let part = bufs.slice((i * 4096) as usize, 4096);
        part.fill(i as u8);
        // Every second page, so that none can be joined with its neighbour.
        assert_eq!(w.start_now(&cache, Request::write(i * 8192, part)), Some(Ok(())));
    }
    drop(bufs);
    let peak: u64 = cache.get("peak").expect("a property").parse().expect("a number");
    assert!(peak + super::super::config::Sizes::new(9 * M, false).expect("fits").fixed <= 9 * M + 9 * M / 64);
    for i in [0u64, 100, 255] {
        assert_eq!(w.read(&cache, i * 8192, 4096), Ok(vec![i as u8; 4096]));
    }
    assert_eq!(w.settle(&cache), Ok(()));
    assert_eq!(used(&cache), 0);
}

#[test]
fn a_write_larger_than_the_cache_goes_in_batch_by_batch() {
    let (w, below) = (World::new(), Below::new(64 * M));
    let cache = w.cache(&below, small());
    let data: Vec<u8> = (0..40 * M).map(|i| (i / 4096) as u8).collect();
    assert_eq!(w.finish(&cache, Request::write(1000, Buffers::from_bytes(&data))), Ok(()));
    assert_eq!(w.settle(&cache), Ok(()));
    assert_eq!(below.bytes(1000, 40 * M), data);
    let peak: u64 = cache.get("peak").expect("a property").parse().expect("a number");
    assert!(peak <= 9 * M, "{peak}");
}

#[test]
fn a_reservation_larger_than_the_cache_is_cut_to_a_batch() {
    let (w, below) = (World::new(), Below::new(M));
    let cache = w.cache(&below, CacheOptions { capacity: 512 * K, ..CacheOptions::default() });
    let r = w.reserved(&cache, M);
    assert_eq!(r.len(), cache.batch());
    assert!((64 * K..M).contains(&r.len()));
}

#[test]
fn reading_ahead_takes_space_below_the_high_mark_only() {
    let (w, below) = (World::new(), Below::new(64 * M));
    below.hold(Op::Write);
    let cache = w.cache(&below, small());
    let mut held = Vec::new();
    while let Some(r) = cache.try_reserve(256 * K) {
        held.push(r);
        assert!(held.len() < 100);
    }
    let part = used(&cache) * 100 / (8 * M);
    assert!((60..=80).contains(&part), "{part} per cent");
    assert!(w.reserved(&cache, 256 * K).len() == 256 * K, "a guest gets more");
    let (cx, node) = (w.cx.clone(), cache.clone());
    let background = w.spawn(async move { node.reserve(&cx, 64 * K, Class::Background).await.map(drop) });
    w.run();
    assert_eq!(background.now().map(|r| r.map_err(|e| e.code)), Some(Err(crate::error::Code::CacheFull)));
}

#[test]
fn an_empty_cache_has_no_memory_no_task_and_no_timer() {
    let (w, below) = (World::new(), Below::new(64 * M));
    let cache = w.cache(&below, CacheOptions { capacity: 64 * M, ..CacheOptions::default() });
    assert!(w.is_idle());
    for i in 0..300 {
        w.write_moved(&cache, i * 64 * K, 64 * K, 1);
    }
    assert!(!w.is_idle());
    w.until("the lazy drain", || cache.is_empty());
    assert!(w.is_idle());
    assert_eq!(used(&cache), 0);
    assert!(format!("{cache:?}").contains("RamCache"));
}

#[test]
fn the_node_has_the_limits_of_the_file_without_its_alignment() {
    let (w, below) = (World::new(), Below::new(M + 512));
    below.set_limits(|l| {
        (l.request_align, l.memory_align, l.cluster, l.max_transfer, l.fast_zeroes) =
            (4096, 512, 65536, M as u32, false);
    });
    let cache = w.cache(&below, small());
    let l = cache.limits();
    assert_eq!((l.size, l.request_align, l.memory_align, l.cluster), (M + 512, 1, 1, 65536));
    assert!(l.fast_zeroes && l.max_transfer == 0);
    assert_eq!(cache.children()[0].0, "file");
}

#[test]
fn the_odd_end_of_a_disk_is_written_to_its_last_byte() {
    let size = M + 512;
    let (w, below) = (World::new(), Below::new(size));
    let cache = w.cache(&below, small());
    w.write_moved(&cache, M, 512, 6);
    assert_eq!(w.start_now(&cache, Request::write(M - 1, Buffers::from_bytes(&[7]))), Some(Ok(())));
    assert_eq!(w.read(&cache, M - 1, 513), Ok([&[7][..], &[6; 512]].concat()));
    assert!(w.finish(&cache, Request::write(M, Buffers::from_bytes(&[0; 513]))).is_err());
    assert_eq!(w.settle(&cache), Ok(()));
    assert_eq!(below.bytes(M - 2, 514), [&[0xEE, 7][..], &[6; 512]].concat());
}

#[test]
fn a_cache_that_is_closed_with_data_says_so() {
    let lines: Arc<crate::sync::Mutex<Vec<String>>> = Arc::default();
    let (virtual_env, _) = crate::queue::virtual_env::virtual_env(1);
    let log = lines.clone();
    let sink: crate::queue::LogSink = Box::new(move |_, _, text| log.lock().push(text.to_owned()));
    let env = crate::queue::Env::new(virtual_env.runtime.clone(), Arc::new(NoEngines), Some(sink));
    let below = Below::new(M);
    let cache = RamCache::new(&env, "c0", Edge::to_node(below), None, small()).expect("opens");
    let zeroes = Request::write_zeroes(range(0, 4096), Flags::empty());
    assert!(matches!(cache.plan(zeroes.as_ref()), crate::node::Plan::Done(Ok(()))));
    drop(cache);
    let lines = lines.lock();
    assert!(lines.iter().any(|l| l.starts_with("c0: cannot drain")), "{lines:?}");
    assert!(lines.iter().any(|l| l.starts_with("c0: closed without having been settled")), "{lines:?}");
}

#[test]
fn what_was_thrown_away_on_purpose_is_not_reported_as_lost_though_it_is_on_its_way_still() {
    let lines: Arc<crate::sync::Mutex<Vec<String>>> = Arc::default();
    let log = lines.clone();
    let w = World::with_log(Some(Box::new(move |_, _, text| log.lock().push(text.to_owned()))));
    let below = Below::new(8 * M);
    below.hold(Op::Write);
    let cache = w.cache(&below, CacheOptions { drain_delay_ms: 0, ..small() });
    w.write_moved(&cache, 0, M, 1);
    w.until("a write to the file", || below.waiting() > 0);
    cache.abandon();
    assert!(!cache.is_empty(), "it is under way");
    drop(cache);
    assert!(lines.lock().is_empty(), "{:?}", lines.lock());
    below.release(Op::Write);
    w.run();
}

#[test]
fn what_is_thrown_away_leaves_the_line_at_a_throttled_file_at_once() {
    let w = World::new();
    let below = Below::new(8 * M);
    let groups = crate::filter::throttle::ThrottleGroups::new(w.env.runtime.clock.clone());
    let limits = crate::filter::throttle::ThrottleLimits::take(
        &mut crate::options::Options::parse("limits.bps-write=1M").expect("parses"),
        "limits.",
    );
    let limits = limits.expect("right").expect("given");
    let group = crate::filter::throttle::Group::new("", limits, w.env.runtime.clock.clone());
    let slow = crate::filter::throttle::Throttle::new(Edge::to_node(below.clone()), &group, groups);
    let options = CacheOptions { drain_delay_ms: 0, ..small() };
    let cache = RamCache::new(&w.env, "cache", Edge::to_node(slow), None, options).expect("opens");
    for i in 0..6 {
        w.write_moved(&cache, i * M, M, 1);
    }
    w.advance(Duration::from_millis(10));
    assert!(group.waiting() > 0, "writes wait for their turn");
    let direct =
        w.start(&cache, Request::write(7 * M, Buffers::from_bytes(&[1; 512])).class(Class::Background));
    w.run();
    let before = w.env.runtime.clock.now();
    cache.abandon();
    w.run();
    assert!(cache.is_empty() && direct.now().is_some_and(|r| r.is_err()), "nothing waits any more");
    assert_eq!((group.waiting(), w.env.runtime.clock.now()), (0, before), "no time has passed");
    // It can be used again.
    w.write_moved(&cache, 0, 4096, 9);
    assert_eq!(w.settle(&cache), Ok(()));
    assert_eq!(below.bytes(0, 4096), vec![9; 4096]);
}

/// No engine at all: background work cannot be started.
#[derive(Debug)]
struct NoEngines;

impl crate::queue::EngineFactory for NoEngines {
    fn open(&self, _depth: u32) -> crate::error::Result<Box<dyn crate::io::Engine>> {
        Err(crate::error::Error::invalid("none"))
    }

    fn run_blocking(&self, _lane: usize, _job: Box<dyn FnOnce() + Send>) {}
}

#[test]
fn occupancy_marks_and_statistics_tell_what_happens() {
    let (w, below) = (World::new(), Below::new(64 * M));
    below.hold(Op::Write);
    let cache = w.cache(&below, small());
    for i in 0..7 {
        w.advance(Duration::from_millis(200));
        w.write_moved(&cache, i * M, M, 1);
    }
    let marks: Vec<_> = std::iter::from_fn(|| w.env.events.next())
        .filter(|e| e.kind == crate::events::EventKind::CacheMark)
        .collect();
    // Events of one kind and source are merged while they wait.
    assert_eq!(marks.last().map(|e| (e.source.as_str(), e.value)), Some(("cache", 80)));
    assert!(marks[0].len < 2000, "time to full in milliseconds: {}", marks[0].len);
    let stats = cache.stats().expect("a cache has statistics");
    assert!(stats.cache_used >= 7 * M && stats.cache_peak >= 7 * M);
    assert!(stats.time_to_full_ms < 2000);
    below.release(Op::Write);
    assert_eq!(w.settle(&cache), Ok(()));
    let stats = cache.stats().expect("a cache has statistics");
    assert_eq!((stats.cache_used, stats.cache_stored, stats.cache_writes), (0, 7 * M, 7));
}
