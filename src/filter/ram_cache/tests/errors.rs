//! Failing targets and spill files (S28, S47, S50).

use super::super::loss::TRIES_MAX;
use super::super::testing::*;
use super::super::{CacheOptions, Overflow, RamCache};
use crate::error::{Code, IoError};
use crate::events::{EventKind, Side};
use crate::node::{ExtentFlags, Node};
use crate::report::Action;
use crate::request::{Buffers, Op, Request};
use crate::sync::{Arc, Mutex};
use crate::units::ByteRange;
use std::time::Duration;

type Told = Arc<Mutex<Vec<(ByteRange, i32)>>>;

fn with_handler(cache: &Arc<RamCache>) -> Told {
    let told: Told = Arc::default();
    let log = told.clone();
    cache.on_lost(Some(Arc::new(move |range, e: IoError| log.lock().push((range, e.errno)))));
    told
}

#[test]
fn a_target_that_fails_once_is_tried_again_and_nothing_is_lost() {
    let (w, below) = (World::new(), Below::new(8 * M));
    let cache = w.cache(&below, small());
    let told = with_handler(&cache);
    below.fail(Op::Write, range(0, 8 * M), 1, libc::EIO);
    w.write_moved(&cache, 0, 64 * K, 1);
    w.write_moved(&cache, 64 * K, 64 * K, 2);
    w.until("the drain", || cache.is_empty());
    assert_eq!(below.bytes(0, 128 * K), [vec![1; 65536], vec![2; 65536]].concat());
    let first = cache.first_error().expect("reported");
    assert_eq!((first.side, first.error.errno, first.action), (Side::Target, libc::EIO, Action::Retried));
    assert_eq!((first.op, first.offset, first.len, first.count), (Op::Write, 0, 128 * K, 1));
    assert!(told.lock().is_empty() && cache.lost_ranges().is_empty());
    assert!(
        cache.last_error().is_some_and(|t| t.contains("write of 131072 bytes at 0 on the target failed"))
    );
    assert!(w.is_idle());
}

#[test]
fn without_somebody_who_takes_over_losses_data_is_kept_and_flushes_fail() {
    let (w, below) = (World::new(), Below::new(8 * M));
    let cache = w.cache(&below, small());
    below.fail(Op::Write, range(0, 8 * M), usize::MAX, libc::ENOSPC);
    w.write_moved(&cache, 0, 64 * K, 1);
    assert_eq!(w.finish(&cache, Request::flush()), Err(IoError::os(libc::ENOSPC)));
    w.advance(Duration::from_secs(60));
    assert_eq!(w.read(&cache, 0, 64 * K), Ok(vec![1; 65536]));
    assert_eq!(w.settle(&cache), Err(IoError::os(libc::ENOSPC)));
    let tries = below.ranges(Op::Write).len();
    assert!((40..200).contains(&tries), "about once a second: {tries}");
    below.recover();
    assert_eq!(w.finish(&cache, Request::flush()), Ok(()));
    assert_eq!(below.bytes(0, 64 * K), vec![1; 65536]);
    assert_eq!(w.settle(&cache), Ok(()));
}

#[test]
fn only_what_cannot_be_written_is_lost_and_its_readers_are_told() {
    let (w, below) = (World::new(), Below::new(8 * M));
    let cache = w.cache(&below, small());
    let told = with_handler(&cache);
    below.fail(Op::Write, range(130 * K, 1), usize::MAX, libc::EIO);
    for i in 0..8 {
        w.write_moved(&cache, i * 64 * K, 64 * K, i as u8);
    }
    let settled = w.settle(&cache);
    assert_eq!(settled, Err(IoError::new(libc::EIO, Code::RangeLost)), "no silent success (S22)");
    assert_eq!(*told.lock(), [(range(128 * K, 64 * K), libc::EIO)]);
    let lost = cache.lost_ranges();
    assert_eq!((lost.len(), lost[0].range, lost[0].error.errno), (1, range(128 * K, 64 * K), libc::EIO));
    assert_eq!(w.read(&cache, 190 * K, 8 * K), Err(IoError::new(libc::EIO, Code::RangeLost)));
    for i in [0, 1, 3, 7] {
        assert_eq!(below.bytes(i * 64 * K, 64 * K), vec![i as u8; 65536], "its neighbours are stored");
    }
    let (cx, node) = (w.cx.clone(), cache.clone());
    let status = w.spawn(async move {
        let x = cx.status(&*node, range(128 * K, M)).await?;
        assert_eq!((x.len, x.flags), (64 * K, ExtentFlags::NO_ACCESS));
        Ok(())
    });
    w.run();
    assert_eq!(status.now(), Some(Ok(())));
    assert!(cache.is_empty() && w.is_idle());
    assert_eq!(cache.stats().map(|s| s.lost_bytes), Some(64 * K));
    assert!(std::iter::from_fn(|| w.env.events.next()).any(|e| e.kind == EventKind::RangeLost));
    assert_eq!(w.finish(&cache, Request::flush()), Err(IoError::new(libc::EIO, Code::RangeLost)));
    let report = cache.last_report().expect("reported");
    assert_eq!((report.action, report.error.errno), (Action::RangeLost, libc::EIO));
    assert_eq!(cache.errors_json()["first"]["action"], "retried");
    assert_eq!(
        below.ranges(Op::Write).iter().filter(|r| r.overlaps(range(130 * K, 1))).count(),
        TRIES_MAX as usize
    );
}

#[test]
fn memory_of_what_is_lost_is_free_again() {
    let (w, below) = (World::new(), Below::new(64 * M));
    let cache = w.cache(&below, small());
    let told = with_handler(&cache);
    below.fail(Op::Write, range(0, 64 * M), usize::MAX, libc::EIO);
    for i in 0..50 {
        let place = w.reserve(&cache, M);
        w.until("space from what is lost", || place.lock().is_some());
        let bufs = taken(&place).expect("reserved").take(M);
        assert_eq!(w.start_now(&cache, Request::write(i * M, bufs)), Some(Ok(())));
    }
    w.until("all of it", || cache.is_empty());
    assert_eq!(told.lock().iter().map(|(r, _)| r.len).sum::<u64>(), 50 * M);
    assert_eq!(cache.lost_ranges().len(), 1, "merged");
    let used: u64 = cache.get("used").expect("a property").parse().expect("a number");
    assert!(used <= 50 * 256, "only what the pieces cost: {used}");
}

#[test]
fn a_lost_range_that_is_written_again_reads_again() {
    let (w, below) = (World::new(), Below::new(8 * M));
    let cache = w.cache(&below, small());
    let told = with_handler(&cache);
    below.fail(Op::Write, range(0, M), usize::MAX, libc::EIO);
    w.write_moved(&cache, 0, 64 * K, 1);
    w.until("the loss", || !told.lock().is_empty());
    below.recover();
    assert_eq!(w.start_now(&cache, Request::write(0, Buffers::from_bytes(&[2; 65536]))), Some(Ok(())));
    assert_eq!(w.read(&cache, 0, 64 * K), Ok(vec![2; 65536]));
    assert_eq!(w.settle(&cache), Ok(()));
    assert_eq!(cache.lost_ranges().len(), 1, "the list of what was lost stays");
}

fn spilled(w: &World, below: &Arc<Below>, p: &Arc<Below>) -> (Arc<RamCache>, u64) {
    below.hold(Op::Write);
    let options = CacheOptions {
        capacity: 10 * M,
        overflow: Overflow::Spill,
        spill_quota: 64 * M,
        drain_workers: 1,
        ..CacheOptions::default()
    };
    let cache = w.cache_with(below, Some(p), options);
    for i in 0..20 {
        let place = w.reserve(&cache, M);
        w.run();
        let bufs = taken(&place).expect("P makes space").take(M);
        bufs.fill(i as u8 + 1);
        assert_eq!(w.start_now(&cache, Request::write(i * 2 * M, bufs)), Some(Ok(())));
    }
    let first = p.ranges(Op::Write)[0];
    assert!(first.offset == 0, "the first place");
    let granule = u64::from(p.bytes(0, 1)[0]) - 1;
    (cache, granule)
}

#[test]
fn a_read_of_the_spill_file_that_fails_once_is_repeated() {
    let (w, below, p) = (World::new(), Below::new(64 * M), Below::new(64 * M));
    let (cache, granule) = spilled(&w, &below, &p);
    p.fail(Op::Read, range(0, 4096), 1, libc::EIO);
    assert_eq!(w.read(&cache, granule * 2 * M, 4096), Ok(vec![granule as u8 + 1; 4096]));
    below.release(Op::Write);
    assert_eq!(w.settle(&cache), Ok(()));
}

#[test]
fn what_the_spill_file_cannot_give_back_is_lost_and_the_rest_is_not() {
    let (w, below, p) = (World::new(), Below::new(64 * M), Below::new(64 * M));
    let (cache, granule) = spilled(&w, &below, &p);
    p.fail(Op::Read, range(0, 4096), usize::MAX, libc::EIO);
    let read = w.read(&cache, granule * 2 * M, 4096);
    assert_eq!(read, Err(IoError::new(libc::EIO, Code::SpillFull)));
    below.release(Op::Write);
    assert_eq!(w.settle(&cache), Err(IoError::new(libc::EIO, Code::RangeLost)));
    assert_eq!(cache.lost_ranges().iter().map(|l| l.range).collect::<Vec<_>>(), [range(granule * 2 * M, M)]);
    assert_eq!(cache.last_report().map(|r| r.side), Some(Side::Spill));
    for i in (0..20).filter(|i| *i != granule) {
        assert_eq!(below.bytes(i * 2 * M, M), vec![i as u8 + 1; 1 << 20]);
    }
}
