//! The rules of semantics.md, each as a behaviour, over the memory node and nodes whose requests can be held (`fault`).

use super::CbwNode;
use crate::error::Code;
use crate::graph::{Disk, Graph};
use crate::node::{ExtentFlags, Node, Vertex};
use crate::options::Options;
use crate::queue::{HostOp, HostReq, Queue, testing};
use crate::request::{Buffers, Flags, Request};
use crate::rt::{Rng, real::SplitMix};
use crate::sync::Arc;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::units::ByteRange;
use serde_json::json;
use std::time::Duration;

const G: u64 = 64 << 10;

struct Setup {
    graph: Arc<Graph>,
    disk: Arc<Disk>,
    root: Arc<Vertex>,
}

/// A disk of `size` bytes in memory behind a `fault` node named `src`.
fn setup(size: u64) -> Setup {
    let graph = Graph::new(testing::env(1));
    let options = json!({"driver": "fault", "node-name": "src", "rules": [], "file": {"driver": "memory", "size": size}});
    let root = graph.open(Options::from_json(&options).expect("options")).expect("it opens");
    let disk = graph.add_disk("vda").expect("a new name");
    graph.insert(&disk, Some(root.clone())).expect("inserted");
    Setup { graph, disk, root }
}

impl Setup {
    /// Puts the filter in; the target is a `fault` node named `tgt` over memory.
    fn filter(&self, more: serde_json::Value) -> Arc<Vertex> {
        let size = self.disk.size();
        let mut o = json!({"driver": "copy-before-write", "node-name": "cbw",
            "target": {"driver": "fault", "node-name": "tgt", "rules": [], "file": {"driver": "memory", "size": size}}});
        for (k, v) in more.as_object().expect("an object") {
            o[k] = v.clone();
        }
        self.graph.filter_add(&self.root, Options::from_json(&o).expect("options")).expect("added")
    }

    fn rules(&self, node: &str, rules: serde_json::Value) {
        let node = self.graph.node(node).expect("it is there");
        node.base().set("rules", &rules.to_string()).expect("rules are taken");
    }

    fn view(&self) -> Arc<Disk> {
        let o = json!({"driver": "snapshot-access", "file": "cbw"});
        let node = self.graph.open(Options::from_json(&o).expect("options")).expect("it opens");
        let view = self.graph.add_disk("").expect("a name");
        self.graph.insert(&view, Some(node)).expect("inserted");
        view
    }

    fn fill(&self, byte: u8) {
        let size = self.disk.size() as usize;
        self.disk.write(0, &vec![byte; size]).expect("written");
    }
}

fn all(disk: &Disk) -> Vec<u8> {
    let mut v = vec![0; disk.size() as usize];
    disk.read(0, &mut v).expect("read");
    v
}

fn cbw(v: &Arc<Vertex>) -> &CbwNode {
    v.base().as_any().downcast_ref().expect("a cbw node")
}

fn write(queue: &Queue, user_data: u64, at: u64, byte: u8, len: usize) {
    let bufs = Buffers::alloc(len, 4096);
    bufs.fill(byte);
    let mut reqs = vec![HostReq { user_data, op: HostOp::Io(Request::write(at, bufs)) }];
    assert_eq!(queue.submit(&mut reqs), 1);
}

fn reap(queue: &Queue, n: usize) -> Vec<crate::queue::Cqe> {
    let mut out = Vec::new();
    while out.len() < n {
        assert!(queue.reap(&mut out, n, 1, Some(Duration::from_secs(20))) > 0, "a completion is missing");
    }
    out
}

/// Nothing completes although the queue has been driven until it had nothing left to do.
fn stuck(queue: &Queue) {
    let mut out = Vec::new();
    for _ in 0..50 {
        queue.reap(&mut out, 64, 0, None);
    }
    assert!(out.is_empty(), "{out:?}");
}

#[test]
fn the_view_shows_the_instant_for_every_odd_size() {
    for size in [512u64, 4608, (64 << 10) - 512, 64 << 10, (1 << 20) + 512] {
        let s = setup(size);
        s.fill(1);
        let filter = s.filter(json!({}));
        let view = s.view();
        let before = all(&s.disk);
        s.disk.write(size - 1, &[2]).expect("the last byte");
        s.disk.write_zeroes(ByteRange { offset: 0, len: size / 2 }, Flags::MAY_UNMAP).expect("zeroed");
        assert!(all(&view) == before, "size {size}");
        assert!(all(&s.disk) != before);
        s.graph.filter_del(&s.root, &filter).expect("removed");
    }
}

#[test]
fn a_granule_is_read_once_however_many_writers_wait() {
    let s = setup(1 << 20);
    s.fill(1);
    let filter = s.filter(json!({}));
    s.rules("src", json!([{"op": "read", "action": "hang"}]));
    let queue = Queue::new(&s.disk, 8).expect("a queue");
    for i in 0..8 {
        write(&queue, i, i * 4096, 9, 4096);
    }
    stuck(&queue);
    s.rules("src", json!([]));
    assert!(reap(&queue, 8).iter().all(|c| c.res == 4096));
    let stats = cbw(&filter).stats().expect("it counts");
    assert_eq!((stats.cbw_copied_bytes, stats.cbw_guest_bytes), (G, 8 * 4096));
    assert_eq!(all(&s.view())[..G as usize], vec![1; G as usize]);
}

#[test]
fn without_a_cache_the_guest_waits_for_the_target_and_over_several_granules_for_all() {
    let s = setup(1 << 20);
    s.fill(1);
    let _f = s.filter(json!({}));
    // The second granule's write to the target hangs.
    s.rules("tgt", json!([{"op": "write", "action": "hang", "offset": G, "length": G}]));
    let queue = Queue::new(&s.disk, 8).expect("a queue");
    write(&queue, 1, G - 4096, 2, 8192);
    stuck(&queue);
    let mut byte = [0];
    s.disk.read(G - 1, &mut byte).expect("read");
    assert_eq!(byte, [1], "no byte of the write has gone down (S10)");
    s.rules("tgt", json!([]));
    assert_eq!(reap(&queue, 1)[0].res, 8192);
}

#[test]
fn a_writer_copies_itself_after_the_failed_copy_of_another() {
    let s = setup(1 << 20);
    s.fill(1);
    let _f = s.filter(json!({"on-cbw-error": "break-guest-write"}));
    s.rules("src", json!([{"op": "read", "action": "error", "errno": "EIO", "count": 1}]));
    let queue = Queue::new(&s.disk, 8).expect("a queue");
    write(&queue, 1, 0, 2, 4096);
    write(&queue, 2, 8192, 3, 4096);
    let mut got = reap(&queue, 2);
    got.sort_by_key(|c| c.user_data);
    assert_eq!((got[0].res, got[0].code), (-i64::from(libc::EIO), Code::CbwFailed));
    assert_eq!(got[1].res, 4096, "the other one's failure is not this one's (S8)");
    assert_eq!(all(&s.view())[..4096], vec![1; 4096]);
}

#[test]
fn a_target_error_breaks_the_snapshot_and_never_the_guest() {
    let s = setup(1 << 20);
    s.fill(1);
    let filter = s.filter(json!({}));
    let view = s.view();
    s.rules("tgt", json!([{"op": "write", "action": "error", "errno": "ENOSPC"}]));
    s.disk.write(0, &[2; 4096]).expect("the guest goes on");
    let report = cbw(&filter).broken().expect("broken");
    assert_eq!((report.error.errno, report.error.code), (libc::ENOSPC, Code::TargetFailed));
    let e = view.read(0, &mut [0; 512]).expect_err("the view is gone");
    assert_eq!((e.errno(), e.code()), (libc::ENOSPC, Code::SnapshotBroken));
    s.disk.write(5 * G, &[2; 4096]).expect("and on");
}

#[test]
fn a_lost_range_leaves_the_rest_of_the_view_readable() {
    let s = setup(1 << 20);
    s.fill(1);
    let filter = s.filter(json!({"loss-scope": "range"}));
    let view = s.view();
    s.rules("tgt", json!([{"op": "write", "action": "error", "errno": "EIO", "count": 1}]));
    s.disk.write(3 * G, &[2; 4096]).expect("the guest goes on");
    let lost = cbw(&filter).lost();
    assert_eq!(lost.iter().map(|l| (l.range.offset, l.range.len)).collect::<Vec<_>>(), [(3 * G, G)]);
    assert_eq!(view.read(3 * G, &mut [0; 512]).expect_err("lost").code(), Code::RangeLost);
    let mut data = [0; 512];
    view.read(2 * G, &mut data).expect("the others are there");
    assert_eq!(data, [1; 512]);
}

#[test]
fn an_expired_wait_releases_the_guest_and_the_late_copy_is_dropped() {
    let s = setup(1 << 20);
    s.fill(1);
    let filter = s.filter(json!({"cbw-timeout-ms": 20}));
    s.rules("tgt", json!([{"op": "write", "action": "hang"}]));
    s.disk.write(0, &[2; 4096]).expect("released after 20 ms");
    let report = cbw(&filter).broken().expect("broken");
    assert_eq!(report.error.code, Code::CbwTimeout);
    assert_eq!(cbw(&filter).stats().expect("counts").cbw_timeouts, 1);
    s.rules("tgt", json!([]));
    assert!(cbw(&filter).broken().is_some(), "a late success mends nothing");
}

#[test]
fn an_expired_wait_fails_the_write_under_break_guest_write_and_keeps_the_snapshot() {
    let s = setup(1 << 20);
    s.fill(1);
    let filter = s.filter(json!({"cbw-timeout-ms": 20, "on-cbw-error": "break-guest-write"}));
    s.rules("tgt", json!([{"op": "write", "action": "hang"}]));
    let e = s.disk.write(0, &[2; 4096]).expect_err("it fails");
    assert_eq!((e.errno(), e.code()), (libc::EIO, Code::CbwTimeout));
    s.rules("tgt", json!([]));
    s.disk.write(0, &[2; 4096]).expect("the copy has ended meanwhile or is made again");
    assert!(cbw(&filter).broken().is_none());
    assert_eq!(all(&s.view())[..4096], vec![1; 4096]);
}

#[test]
fn a_guest_write_waits_for_a_snapshot_read_that_was_directed_at_the_source() {
    let s = setup(1 << 20);
    s.fill(1);
    let _f = s.filter(json!({}));
    let view = s.view();
    let reader = Queue::new(&view, 4).expect("a queue");
    s.rules("src", json!([{"op": "read", "action": "hang", "count": 1}]));
    let data = Buffers::alloc(4096, 4096);
    let mut reqs = vec![HostReq { user_data: 1, op: HostOp::Io(Request::read(0, data.clone())) }];
    reader.submit(&mut reqs);
    stuck(&reader);
    let guest = Queue::new(&s.disk, 4).expect("a queue");
    write(&guest, 2, 0, 7, 4096);
    stuck(&guest);
    let mut byte = [0];
    s.disk.read(0, &mut byte).expect("read");
    assert_eq!(byte, [1], "the write has not gone down");
    s.rules("src", json!([]));
    assert_eq!(reap(&reader, 1)[0].res, 4096);
    assert_eq!(data.to_vec(), vec![1; 4096]);
    assert_eq!(reap(&guest, 1)[0].res, 4096);
    // A granule that does not touch the read was never held up.
    write(&guest, 3, 8 * G, 7, 4096);
    assert_eq!(reap(&guest, 1)[0].res, 4096);
}

#[test]
fn zero_granules_move_no_payload() {
    let s = setup(1 << 20);
    let _f = s.filter(json!({}));
    s.rules("tgt", json!([{"op": "write", "action": "error", "errno": "EIO"}]));
    s.disk.write(0, &[1; 4096]).expect("written");
    s.disk.write_zeroes(ByteRange { offset: 0, len: 1 << 20 }, Flags::empty()).expect("zeroed");
    assert!(all(&s.view()).iter().all(|b| *b == 0));
}

#[test]
fn a_readers_discard_releases_whole_granules_and_adds_up_small_ones() {
    let s = setup(4 * G);
    s.fill(1);
    let _f = s.filter(json!({}));
    let view = s.view();
    s.disk.write(0, &[2; 512]).expect("granule 0 is on the target");
    view.block(Request::discard(ByteRange { offset: 0, len: G + G / 2 })).expect("discarded");
    assert_eq!(view.read(0, &mut [0; 512]).expect_err("released").errno(), libc::EACCES);
    view.read(G, &mut [0; 512]).expect("half a granule releases nothing");
    view.block(Request::discard(ByteRange { offset: G + G / 2, len: G / 2 })).expect("discarded");
    assert_eq!(view.read(G, &mut [0; 512]).expect_err("released").code(), Code::Released);
    let e = testing::block_on(s.graph.env(), |cx| {
        let view = view.clone();
        async move { view.status(&cx, ByteRange { offset: 0, len: 4 * G }).await }
    });
    let e = e.expect("status is cut, not failed");
    assert_eq!((e.len, e.flags), (2 * G, ExtentFlags::NO_ACCESS));
    // A released granule needs no copy.
    s.rules("tgt", json!([{"op": "write", "action": "error", "errno": "EIO"}]));
    s.disk.write(G, &[3; 512]).expect("passes");
    s.disk.read(0, &mut [0; 1]).expect("the disk is as ever");
}

#[test]
fn background_copies_release_guests_when_their_read_is_done_and_are_readable_until_stored() {
    let s = setup(4 * G);
    s.fill(1);
    let filter = s.filter(json!({}));
    let view = s.view();
    s.rules("tgt", json!([{"op": "write", "action": "hang"}]));
    let env = s.graph.env().clone();
    let done = Arc::new(AtomicBool::new(false));
    let (node, flag) = (filter.base().clone(), done.clone());
    env.spawn_background(move |cx| async move {
        let cbw: &CbwNode = node.as_any().downcast_ref().expect("a cbw node");
        let memory = Buffers::alloc(2 * G as usize, 4096);
        let r = cbw
            .copy(&cx, ByteRange { offset: 0, len: 2 * G }, &memory, crate::request::Class::Background)
            .await;
        assert_eq!(r.expect("copied").copied, 2 * G);
        flag.store(true, Ordering::SeqCst);
    })
    .expect("started");
    // The read is done when nothing of the two granules is needed any more.
    while cbw(&filter).settled_bytes() < 2 * G {
        std::thread::yield_now();
    }
    // The guest's write ends although the target never answers.
    s.disk.write(100, &[5; 100]).expect("written");
    assert!(!done.load(Ordering::SeqCst), "the copy is still waiting for the target");
    let mut data = [0; 512];
    view.read(0, &mut data).expect("read from the buffer");
    assert_eq!(data, [1; 512]);
    s.rules("tgt", json!([]));
    while !done.load(Ordering::SeqCst) {
        std::thread::yield_now();
    }
    assert_eq!(all(&view), vec![1; 4 * G as usize]);
}

#[test]
fn what_a_background_copy_could_not_write_is_tried_again() {
    let s = setup(2 * G);
    s.fill(1);
    let filter = s.filter(json!({}));
    s.rules("tgt", json!([{"op": "write", "action": "error", "errno": "EIO", "count": 1}]));
    testing::block_on(s.graph.env(), |cx| {
        let node = filter.base().clone();
        async move {
            let cbw: &CbwNode = node.as_any().downcast_ref().expect("a cbw node");
            let memory = Buffers::alloc(2 * G as usize, 4096);
            let range = ByteRange { offset: 0, len: 2 * G };
            let e =
                cbw.copy(&cx, range, &memory, crate::request::Class::Background).await.expect_err("EIO once");
            assert_eq!(e.error.errno, libc::EIO);
            cbw.copy(&cx, range, &memory, crate::request::Class::Background).await.expect("the second time");
        }
    });
    s.disk.write(0, &[9; 512]).expect("written");
    assert_eq!(all(&s.view()), vec![1; 2 * G as usize]);
}

#[test]
fn random_load_from_two_queues_never_changes_the_view_while_filters_come_and_go() {
    let size = (1 << 20) + 4608;
    let s = setup(size);
    let stop = AtomicBool::new(false);
    let rounds = std::sync::atomic::AtomicU64::new(0);
    std::thread::scope(|scope| {
        for seed in 1..=2u64 {
            let (s, stop, rounds) = (&s, &stop, &rounds);
            scope.spawn(move || {
                let rng = SplitMix::new(seed);
                let queue = Queue::new(&s.disk, 8).expect("a queue");
                while !stop.load(Ordering::Relaxed) {
                    let mut reqs: Vec<_> = (0..8)
                        .map(|i| HostReq { user_data: i, op: HostOp::Io(random(&rng, size)) })
                        .collect();
                    let n = queue.submit(&mut reqs);
                    assert!(reap(&queue, n).iter().all(|c| c.res >= 0));
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for round in 0..30 {
            let granularity = [4096, 16384, 65536][round % 3];
            let filter = s.filter(json!({"granularity": granularity}));
            let view = s.view();
            let first = all(&view);
            let seen = rounds.load(Ordering::Relaxed);
            while rounds.load(Ordering::Relaxed) < seen + 20 {
                std::thread::yield_now();
            }
            assert!(all(&view) == first, "round {round}");
            s.graph.insert(&view, None).expect("ejected");
            s.graph.remove_disk(&view);
            s.graph.filter_del(&s.root, &filter).expect("removed");
            for v in s.graph.nodes().into_iter().filter(|v| v.name() != "src") {
                let _ = s.graph.forget_node(&v);
            }
            for v in s.graph.nodes().into_iter().filter(|v| v.name() != "src") {
                let _ = s.graph.forget_node(&v);
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}

fn random(rng: &SplitMix, size: u64) -> Request {
    let offset = rng.next() % size;
    let len = 1 + rng.next() % (size - offset).min(70_000);
    let range = ByteRange { offset, len };
    match rng.next() % 6 {
        0 => Request::write_zeroes(range, Flags::MAY_UNMAP),
        1 => Request::discard(range),
        2 => Request::flush(),
        _ => {
            let bufs = Buffers::alloc(len as usize, 4096);
            bufs.fill(rng.next() as u8);
            Request::write(offset, bufs)
        }
    }
}

#[test]
fn options_that_cannot_work_are_refused_with_their_key() {
    let s = setup(1 << 20);
    for (o, key) in [
        (json!({"cbw-timeout": 1, "cbw-timeout-ms": 5}), "cbw-timeout-ms"),
        (json!({"granularity": 5000}), "granularity"),
        (json!({"granularity": 512}), "granularity"),
        (json!({"bitmap": {"node": "a", "name": "b"}}), "bitmap"),
        (json!({"on-cbw-error": "panic"}), "on-cbw-error"),
        (json!({"colour": "red"}), "colour"),
        (json!({"target": {"driver": "memory", "size": 512}}), "target"),
    ] {
        let mut all = json!({"driver": "copy-before-write", "target": {"driver": "memory", "size": 1 << 20}});
        for (k, v) in o.as_object().expect("an object") {
            all[k] = v.clone();
        }
        let e = s.graph.filter_add(&s.root, Options::from_json(&all).expect("options")).expect_err(key);
        assert!(e.full_text().contains(key), "{}", e.full_text());
    }
}
