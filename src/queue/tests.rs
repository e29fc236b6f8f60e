//! Queues over the real system.

use super::testing;
use super::{Cqe, HostOp, HostReq, Queue, TaskResult};
use crate::error::{Code, IoError};
use crate::graph::{Disk, Graph};
use crate::options::Options;
use crate::request::{Buffers, Request};
use crate::sync::Arc;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

fn disk(text: &str) -> (Arc<Graph>, Arc<Disk>) {
    let env = testing::env(1);
    let graph = Graph::new(env);
    let node = graph.open(Options::parse(text).expect("options")).expect("it opens");
    let disk = graph.add_disk("vda").expect("a new name");
    graph.insert(&disk, Some(node)).expect("inserted");
    (graph, disk)
}

fn read(user_data: u64, at: u64, len: usize) -> HostReq {
    HostReq { user_data, op: HostOp::Io(Request::read(at, Buffers::alloc(len, 4096))) }
}

fn all(queue: &Queue, n: usize) -> Vec<Cqe> {
    let mut out = Vec::new();
    while out.len() < n {
        assert!(queue.reap(&mut out, n, 1, Some(Duration::from_secs(20))) > 0, "a completion is missing");
    }
    out
}

#[test]
fn a_full_queue_takes_what_fits_and_completes_each_request_once() {
    let (_g, disk) = disk("driver=memory,size=1M");
    let queue = Queue::new(&disk, 4).expect("a queue");
    let mut reqs: Vec<_> = (0..7).map(|i| read(i, i * 512, 512)).collect();
    assert_eq!(queue.submit(&mut reqs), 4);
    assert_eq!((reqs.len(), queue.room()), (3, 0));
    assert_eq!(queue.submit(&mut reqs), 0);
    let mut seen: Vec<u64> = all(&queue, 4).iter().map(|c| c.user_data).collect();
    assert_eq!(queue.submit(&mut reqs), 3);
    seen.extend(all(&queue, 3).iter().map(|c| c.user_data));
    seen.sort_unstable();
    assert_eq!(seen, [0, 1, 2, 3, 4, 5, 6]);
    assert_eq!(queue.outstanding(), 0);
}

#[test]
fn rings_of_depth_one_carry_hundreds_of_requests_of_a_file() {
    let file = tempfile::NamedTempFile::new_in("target").expect("a file");
    file.as_file().set_len(1 << 20).expect("resized");
    for aio in ["threads", "io_uring"] {
        if aio == "io_uring" && !crate::io::uring_allowed() {
            eprintln!("SKIPPED: io_uring is not allowed here");
            continue;
        }
        let text = format!("driver=file,filename={},cache.direct=on,aio={aio}", file.path().display());
        let (_g, disk) = disk(&text);
        for depth in [1, 2] {
            let queue = Queue::new(&disk, depth).expect("a queue");
            for i in 0..300u64 {
                let mut reqs = vec![read(i, (i % 256) * 4096, 4096)];
                assert_eq!(queue.submit(&mut reqs), 1);
                let c = all(&queue, 1)[0];
                assert_eq!((c.user_data, c.res), (i, 4096));
            }
        }
    }
}

#[test]
fn requests_parked_by_a_drained_section_run_after_it() {
    let (graph, disk) = disk("driver=memory,size=1M");
    let queue = Queue::new(&disk, 8).expect("a queue");
    let root = disk.root().expect("a root");
    let inside = Arc::new(AtomicBool::new(false));
    let release = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        let (graph, root, seen, go) = (graph.clone(), root.clone(), inside.clone(), release.clone());
        scope.spawn(move || {
            testing::block_on(graph.env(), |cx| {
                let graph = graph.clone();
                async move {
                    graph
                        .drained(&cx, &[root], || {
                            seen.store(true, Ordering::SeqCst);
                            while !go.load(Ordering::SeqCst) {
                                std::hint::spin_loop();
                            }
                        })
                        .await;
                }
            });
        });
        while !inside.load(Ordering::SeqCst) {
            std::hint::spin_loop();
        }
        let mut reqs = vec![read(1, 0, 512)];
        assert_eq!(queue.submit(&mut reqs), 1);
        let mut out = Vec::new();
        assert_eq!(queue.reap(&mut out, 8, 0, None), 0, "nothing runs inside the section");
        release.store(true, Ordering::SeqCst);
        assert_eq!(all(&queue, 1)[0].res, 512);
    });
}

#[test]
fn a_drain_ends_although_the_host_does_not_reap() {
    let (graph, disk) = disk("driver=null-co,size=1M,latency-ns=2000000");
    let queue = Queue::new(&disk, 8).expect("a queue");
    let mut reqs = vec![read(1, 0, 512), read(2, 512, 512)];
    assert_eq!(queue.submit(&mut reqs), 2);
    assert_eq!(disk.in_flight(), 2, "the requests are waiting for their timer");
    // Nobody reaps: the watchdog drives the queue, or this would never return.
    graph.insert(&disk, None).expect("ejected");
    assert_eq!(disk.in_flight(), 0);
    assert_eq!(all(&queue, 2).iter().map(|c| c.res).sum::<i64>(), 1024);
    let mut reqs = vec![read(3, 0, 512)];
    queue.submit(&mut reqs);
    let c = all(&queue, 1)[0];
    assert_eq!((c.res, c.code), (-i64::from(libc::ENOMEDIUM), Code::NoMedium));
}

#[test]
fn a_waiting_request_can_be_cancelled_and_completes_once() {
    let (_g, disk) = disk("driver=null-co,size=1M,latency-ns=3600000000000");
    let queue = Queue::new(&disk, 8).expect("a queue");
    let mut reqs = vec![read(1, 0, 512), read(2, 0, 512)];
    queue.submit(&mut reqs);
    let mut out = Vec::new();
    assert_eq!(queue.reap(&mut out, 8, 0, None), 0);
    assert_eq!(queue.cancel(3), 0);
    assert_eq!(queue.cancel(1), 1);
    let c = all(&queue, 1)[0];
    assert_eq!((c.user_data, c.res, c.code), (1, -i64::from(libc::ECANCELED), Code::Cancelled));
    // Freeing the queue lets the other one go as well.
    drop(queue);
    assert_eq!(disk.in_flight(), 0);
}

#[test]
fn a_panic_in_a_task_completes_its_request_and_the_queue_goes_on() {
    let (_g, disk) = disk("driver=memory,size=1M");
    let queue = Queue::new(&disk, 8).expect("a queue");
    let body = Box::new(|_cx, _node| -> crate::node::NodeFuture<'static, TaskResult> {
        Box::pin(async { panic!("on purpose") })
    });
    let mut reqs = vec![HostReq { user_data: 9, op: HostOp::Task(body) }, read(10, 0, 512)];
    queue.submit(&mut reqs);
    let mut got = all(&queue, 2);
    got.sort_by_key(|c| c.user_data);
    assert_eq!((got[0].res, got[0].code), (TaskResult::from(IoError::panicked()).res, Code::Panicked));
    assert_eq!(got[1].res, 512);
}

#[test]
fn two_queues_on_two_threads_lose_nothing_while_the_root_is_exchanged() {
    let (graph, disk) = disk("driver=memory,size=1M");
    let other =
        graph.open(Options::parse("driver=memory,size=1M,node-name=other").expect("options")).expect("opens");
    let first = disk.root().expect("a root");
    let done = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let queue = Queue::new(&disk, 8).expect("a queue");
                while !stop.load(Ordering::Relaxed) {
                    let mut reqs: Vec<_> = (0..8).map(|i| read(i, i * 4096, 4096)).collect();
                    let n = queue.submit(&mut reqs);
                    for c in all(&queue, n) {
                        assert_eq!(c.res, 4096);
                    }
                    done.fetch_add(n, Ordering::Relaxed);
                }
            });
        }
        for i in 0..200 {
            let root = if i % 2 == 0 { &other } else { &first };
            graph.insert(&disk, Some(root.clone())).expect("inserted");
        }
        // The load really ran beside the changes.
        while done.load(Ordering::Relaxed) < 1000 {
            std::thread::yield_now();
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(disk.in_flight(), 0);
}

#[test]
fn an_exchange_takes_what_fits_and_returns_what_ended_in_the_same_pass() {
    let (_g, disk) = disk("driver=memory,size=1M");
    let queue = Queue::new(&disk, 4).expect("a queue");
    queue.event_fd().expect("a fd");
    let mut out = Vec::new();
    queue.exchange(&mut Vec::new(), &mut out, true);
    let mut reqs: Vec<_> = (0..7).map(|i| read(i, i * 512, 512)).collect();
    assert_eq!((queue.exchange(&mut reqs, &mut out, false), reqs.len()), (4, 3));
    assert_eq!((queue.exchange(&mut reqs, &mut out, false), reqs.len()), (3, 0));
    assert_eq!(out.iter().map(|c| c.user_data).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5, 6]);
    assert_eq!(queue.outstanding(), 0);
}
