use super::*;
use crate::filter::testing::{Recorder, Seen, let_others_run, start};
use crate::graph::Graph;
use crate::node::Vertex;
use crate::queue::virtual_env::{VirtualClock, virtual_env};
use crate::queue::{Cqe, Env, HostOp, HostReq, Queue};
use crate::request::{Buffers, Flags};
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

const MS: u64 = 1_000_000;

struct Set {
    env: Arc<Env>,
    clock: Arc<VirtualClock>,
    below: Arc<Recorder>,
    group: Arc<Group>,
    groups: Arc<ThrottleGroups>,
}

impl Set {
    /// A group with limits as in `bps-write=1000,iops-total=5`.
    fn new(limits: &str) -> Self {
        let (env, clock) = virtual_env(0);
        let groups = ThrottleGroups::new(env.runtime.clock.clone());
        let text =
            limits.split(',').filter(|l| !l.is_empty()).map(|l| format!("limits.{l},")).collect::<String>();
        let group = groups.create("g", Options::parse(&text).unwrap()).unwrap();
        Self { below: Recorder::new(&env, 1 << 20), env, clock, group, groups }
    }

    fn node(&self) -> Arc<Throttle> {
        Throttle::new(Edge::to_node(self.below.clone()), &self.group, self.groups.clone())
    }

    fn advance(&self, ms: u64) {
        self.clock.advance(Duration::from_millis(ms));
    }

    fn seen(&self) -> Vec<Seen> {
        self.below.seen()
    }

    /// Offset and start, in milliseconds, of what reached the node below.
    fn starts(&self) -> Vec<(u64, u64)> {
        self.seen().iter().map(|s| (s.range.offset, s.at.0 / MS)).collect()
    }
}

fn write(offset: u64, len: usize) -> Request {
    Request::write(offset, Buffers::alloc(len, 512))
}

fn read(offset: u64, len: usize) -> Request {
    Request::read(offset, Buffers::alloc(len, 512))
}

/// Runs all of `requests` at once, each as a task, and waits for them.
fn run_all(env: &Arc<Env>, requests: Vec<(Arc<Throttle>, Request)>) {
    env.block_on(|cx| async move {
        let mut running = Vec::new();
        for (node, request) in requests {
            let inner = cx.clone();
            running.push(start(&cx, async move { inner.run(&*node, request).await }));
        }
        for r in running {
            r.result().await.unwrap();
        }
    })
    .unwrap();
}

#[test]
fn the_rate_is_right_within_one_burst_and_one_request_at_any_moment() {
    for slow in [false, true] {
        let set = Set::new("bps-write=1000000");
        set.below.set_slow(slow);
        let node = set.node();
        const LEN: u64 = 64 << 10;
        run_all(&set.env, (0..100).map(|_| (node.clone(), write(0, LEN as usize))).collect());
        let seen = set.seen();
        assert_eq!(seen.len(), 100);
        for (i, s) in seen.iter().enumerate() {
            let through = (i as u64 + 1) * LEN;
            let allowed = s.at.0 / 1000 + 100_000;
            assert!(through <= allowed + LEN, "request {i}: too fast");
            // With requests waiting all the time each starts at the very moment when it may.
            assert!(s.at.0 == 0 || through > allowed - 1, "request {i}: too slow");
        }
        // 100 * 64 KiB at 1 MB/s, less the burst and the request that crosses it.
        assert_eq!(seen[99].at.0, (99 * LEN - 100_000) * 1000);
    }
}

#[test]
fn requests_of_a_node_go_in_the_order_of_arrival() {
    let set = Set::new("iops-write=10");
    let node = set.node();
    run_all(&set.env, (0..20).map(|i| (node.clone(), write(i * 512, 512))).collect());
    // The bucket holds one: two go at once, then one per tenth of a second.
    let expected: Vec<_> = (0..20u64).map(|i| (i * 512, i.saturating_sub(1) * 100)).collect();
    assert_eq!(set.starts(), expected);
}

#[test]
fn nodes_of_a_group_share_its_budget_equally_whatever_the_size_of_their_requests() {
    let set = Set::new("bps-write=1000000");
    let (a, b) = (set.node(), set.node());
    let large = (0..50).map(|_| (a.clone(), write(0, 60_000)));
    let small = (0..750).map(|_| (b.clone(), write(512, 4_000)));
    run_all(&set.env, large.chain(small).collect());
    // At 0 the burst goes to whoever came first; from then on both want more than there is.
    let mut bytes = [0i64; 2];
    let mut compared = 0;
    let contended = set.seen().into_iter().filter(|s| s.at.0 > 0);
    for s in contended.take_while(|s| s.at.0 < 5_000 * MS) {
        bytes[usize::from(s.range.len == 4_000)] += s.range.len as i64;
        assert!((bytes[0] - bytes[1]).abs() <= 64_000, "after {bytes:?}");
        compared += 1;
    }
    assert!(compared > 500 && bytes[0] > 2_000_000, "{compared} {bytes:?}");
}

#[test]
fn a_member_that_was_idle_neither_catches_up_nor_owes() {
    let set = Set::new("iops-write=10");
    let (a, b) = (set.node(), set.node());
    run_all(&set.env, (0..20).map(|_| (a.clone(), write(0, 512))).collect());
    let first = (0..10).map(|_| (a.clone(), write(0, 512)));
    let second = (0..10).map(|_| (b.clone(), write(512, 512)));
    run_all(&set.env, first.chain(second).collect());
    let later = set.seen().split_off(20);
    let of_b = later[..10].iter().filter(|s| s.range.offset == 512).count();
    assert!((4..=6).contains(&of_b), "{of_b} of the first ten");
}

#[test]
fn only_the_limited_direction_waits_and_flushes_pass() {
    let set = Set::new("bps-write=1000");
    let node = set.node();
    let env = set.env.clone();
    env.block_on(|cx| async move {
        cx.run(&*node, write(0, 100_000)).await.unwrap();
        let inner = cx.clone();
        let theirs = node.clone();
        let waiting = start(&cx, async move { inner.run(&*theirs, write(0, 512)).await });
        let_others_run(&cx).await;
        assert_eq!((waiting.now(), set.group.waiting()), (None, 1));
        cx.run(&*node, read(0, 100_000)).await.unwrap();
        cx.run(&*node, Request::flush()).await.unwrap();
        assert_eq!(set.env.runtime.clock.now().0, 0);
        for op in [
            Request::discard(ByteRange { offset: 0, len: 512 }),
            Request::write_zeroes(ByteRange { offset: 0, len: 512 }, Flags::empty()),
        ] {
            assert!(matches!(node.plan(op.as_ref()), Plan::Slow), "{:?} is a write", op.op);
        }
        waiting.result().await.unwrap();
        assert_eq!(set.env.runtime.clock.now().0, 99_900 * MS);
    })
    .unwrap();
}

#[test]
fn reads_and_writes_under_a_total_limit_take_turns() {
    let set = Set::new("iops-total=10");
    let node = set.node();
    let reads = (0..30).map(|_| (node.clone(), read(0, 512)));
    let writes = (0..30).map(|_| (node.clone(), write(512, 512)));
    run_all(&set.env, reads.chain(writes).collect());
    let seen = set.seen();
    assert_eq!(seen.len(), 60);
    let writes = |n: usize| seen[..n].iter().filter(|s| s.op == Op::Write).count();
    for n in (4..60).step_by(2) {
        assert!(writes(n).abs_diff(n / 2) <= 2, "{} of {n}", writes(n));
    }
    assert_eq!(seen[59].at.0, 58 * 100 * MS);
}

#[test]
fn an_operation_larger_than_iops_size_counts_in_proportion() {
    let set = Set::new("iops-write=10,iops-size=4096");
    let node = set.node();
    run_all(
        &set.env,
        [40 << 10, 512, 6 << 10, 512].iter().map(|len| (node.clone(), write(0, *len))).collect(),
    );
    // 10 operations, 1, 1.5, 1; the bucket holds one.
    let at: Vec<_> = set.seen().iter().map(|s| s.at.0 / MS).collect();
    assert_eq!(at, [0, 900, 1000, 1150]);
}

#[test]
fn lifting_the_limit_lets_all_that_wait_go_at_once() {
    let set = Set::new("bps-write=1");
    let node = set.node();
    let env = set.env.clone();
    env.block_on(|cx| async move {
        let mut running = Vec::new();
        for i in 0..10 {
            let (inner, node) = (cx.clone(), node.clone());
            running.push(start(&cx, async move { inner.run(&*node, write(i * 512, 512)).await }));
        }
        let_others_run(&cx).await;
        assert_eq!(set.group.waiting(), 9);
        node.set("limits.bps-write", "0").unwrap();
        for r in running {
            r.result().await.unwrap();
        }
        assert_eq!(set.starts(), (0..10).map(|i| (i * 512, 0)).collect::<Vec<_>>());
    })
    .unwrap();
}

#[test]
fn raising_the_limit_shortens_a_wait_under_way() {
    let set = Set::new("bps-write=100");
    let node = set.node();
    let env = set.env.clone();
    env.block_on(|cx| async move {
        cx.run(&*node, write(0, 10_000)).await.unwrap();
        let (inner, theirs) = (cx.clone(), node.clone());
        let waiting = start(&cx, async move { inner.run(&*theirs, write(0, 512)).await });
        let_others_run(&cx).await;
        assert_eq!(set.group.waiting(), 1);
        set.group.set("bps-write", "1000").unwrap();
        waiting.result().await.unwrap();
        // 10,000 bytes less the new capacity of 100, at the new rate.
        assert_eq!(set.env.runtime.clock.now().0, 9_900 * MS);
    })
    .unwrap();
}

/// A disk over a throttled node, with a queue of the host.
fn disk_over(set: &Set) -> (Arc<Graph>, Queue) {
    let graph = Graph::new(set.env.clone());
    let disk = graph.add_disk("d").unwrap();
    graph.insert(&disk, Some(Vertex::new("t", set.node()))).unwrap();
    let queue = Queue::new(&disk, 64).unwrap();
    (graph, queue)
}

fn submit(queue: &Queue, user_data: u64, request: Request) {
    assert_eq!(queue.submit(&mut vec![HostReq { user_data, op: HostOp::Io(request) }]), 1);
}

fn reap(queue: &Queue, n: usize) -> Vec<Cqe> {
    let mut out = Vec::new();
    queue.reap(&mut out, n, n, None);
    out
}

#[test]
fn a_request_that_waits_can_be_cancelled_and_the_next_one_takes_its_place() {
    let set = Set::new("bps-write=1000");
    let (_graph, queue) = disk_over(&set);
    submit(&queue, 1, write(0, 1_100));
    for i in 2..5 {
        submit(&queue, i, write(i * 1000, 1_000));
    }
    assert_eq!(set.group.waiting(), 3);
    // The head (2) with the timer, and one from the middle of what is left.
    assert_eq!(queue.cancel(2), 1);
    assert_eq!(queue.cancel(3), 1);
    let done = reap(&queue, 3);
    let cancelled = -i64::from(libc::ECANCELED);
    assert_eq!(
        done.iter().map(|c| (c.user_data, c.res)).collect::<Vec<_>>(),
        [(1, 1_100), (2, cancelled), (3, cancelled)]
    );
    assert_eq!(set.group.waiting(), 1);
    assert_eq!(reap(&queue, 1)[0].res, 1_000);
    // As if the cancelled ones had never been.
    assert_eq!(set.starts(), [(0, 0), (4000, 1000)]);
}

#[test]
fn dropping_a_queue_does_not_wait_for_the_budget() {
    let set = Set::new("bps-write=1");
    let (_graph, queue) = disk_over(&set);
    for i in 0..5 {
        submit(&queue, i, write(i * 512, 512));
    }
    assert_eq!(set.group.waiting(), 4);
    drop(queue);
    assert_eq!(set.group.waiting(), 0);
    assert_eq!(set.seen().len(), 1);
    assert!(set.env.runtime.clock.now().0 < 1000 * MS);
}

#[test]
fn a_head_on_one_queue_that_goes_wakes_the_next_on_another() {
    let set = Set::new("iops-write=10");
    let (graph, first) = disk_over(&set);
    let second = Queue::new(&graph.disk("d").unwrap(), 8).unwrap();
    submit(&first, 1, write(0, 512));
    submit(&first, 2, write(512, 512));
    submit(&first, 3, write(1024, 512));
    submit(&second, 4, write(2048, 512));
    assert_eq!(set.group.waiting(), 2);
    assert_eq!(reap(&first, 3).len(), 3);
    // The second queue was not driven meanwhile; its request is the head now and knows its moment.
    assert_eq!(set.group.waiting(), 1);
    assert_eq!(reap(&second, 1)[0].res, 512);
    assert_eq!(set.starts(), [(0, 0), (512, 0), (1024, 100), (2048, 200)]);
}

#[test]
fn a_request_given_up_after_it_was_let_through_gives_its_budget_back() {
    let set = Set::new("bps-write=1000");
    let member = set.group.join();
    let env = set.env.clone();
    env.block_on(|cx| async move {
        assert!(member.try_admit(Direction::Write, 1_000));
        let mut context = Context::from_waker(Waker::noop());
        let mut second = Box::pin(member.admit(&cx, Direction::Write, 50_000));
        assert!(second.as_mut().poll(&mut context).is_pending());
        set.advance(900);
        let mut third = pin!(member.admit(&cx, Direction::Write, 100));
        assert!(third.as_mut().poll(&mut context).is_pending());
        assert_eq!(set.group.waiting(), 1, "the second was let through and has not seen it");
        drop(second);
        assert_eq!(set.group.waiting(), 0, "the third got its budget");
        assert_eq!(third.as_mut().poll(&mut context), Poll::Ready(Ok(())));
    })
    .unwrap();
}

#[test]
fn a_plan_that_the_node_below_cannot_carry_out_costs_nothing() {
    let set = Set::new("bps-write=1000");
    set.below.set_slow(true);
    let node = set.node();
    for _ in 0..100 {
        assert!(matches!(node.plan(write(0, 1_000).as_ref()), Plan::Slow));
    }
    set.below.set_slow(false);
    assert!(matches!(node.plan(write(0, 1_000).as_ref()), Plan::Done(Ok(()))));
    assert!(matches!(node.plan(write(0, 1_000).as_ref()), Plan::Slow));
    assert_eq!(set.seen().len(), 1);
}

#[test]
fn a_node_can_move_to_another_group_while_requests_wait_in_the_old_one() {
    let set = Set::new("bps-write=1000");
    let node = set.node();
    set.groups.create("free", Options::empty()).unwrap();
    let env = set.env.clone();
    env.block_on(|cx| async move {
        cx.run(&*node, write(0, 1_100)).await.unwrap();
        let (inner, theirs) = (cx.clone(), node.clone());
        let waiting = start(&cx, async move { inner.run(&*theirs, write(512, 512)).await });
        let_others_run(&cx).await;
        assert_eq!(set.group.waiting(), 1);
        assert!(node.set("throttle-group", "none").is_err());
        node.set("throttle-group", "free").unwrap();
        assert_eq!(node.get("throttle-group").as_deref(), Some("free"));
        cx.run(&*node, write(1024, 100_000)).await.unwrap();
        assert_eq!(set.groups.remove("g").unwrap_err().errno(), libc::EBUSY);
        waiting.result().await.unwrap();
        assert_eq!(set.starts(), [(0, 0), (1024, 0), (512, 1000)]);
        let_others_run(&cx).await;
        set.groups.remove("g").unwrap();
    })
    .unwrap();
}

#[test]
fn the_driver_takes_a_group_or_limits_of_its_own() {
    let set = Set::new("");
    let graph = Graph::new(set.env.clone());
    graph.add_node("file", set.below.clone()).unwrap();
    let open = |text: &str| graph.open(Options::parse(text).unwrap());
    let group =
        graph.throttle_groups().create("tg", Options::parse("limits.bps-write=50000000").unwrap()).unwrap();
    let named = open("driver=throttle,node-name=tt,throttle-group=tg,file=file").unwrap();
    assert_eq!(named.base().get("limits.bps-write").as_deref(), Some("50000000"));
    group.set("iops-total", "7").unwrap();
    assert_eq!(named.base().get("limits.iops-total").as_deref(), Some("7"));
    let own = open("driver=throttle,file=file,limits.bps-read=1M").unwrap();
    assert_eq!(own.base().get("limits.bps-read").as_deref(), Some("1048576"));
    own.base().set("limits", r#"{"iops-read": 5}"#).unwrap();
    let all = own.base().get("limits").unwrap();
    assert!(all.contains(r#""iops-read":5"#) && all.contains(r#""bps-read":0"#), "{all}");
    assert!(open("driver=throttle,file=file").unwrap().base().get("throttle-group").unwrap().is_empty());
    for (text, part) in [
        ("driver=throttle,file=file,throttle-group=nope", "'nope'"),
        ("driver=throttle,file=file,throttle-group=tg,limits.bps-read=1", "'throttle-group'"),
        ("driver=throttle,throttle-group=tg", "'file'"),
        ("driver=throttle,file=file,limits.bps=1", "'limits.bps'"),
        ("driver=throttle,file=file,limits.bps-total=1,limits.bps-read=1", "'limits.bps-total'"),
    ] {
        let message = open(text).unwrap_err().to_string();
        assert!(message.contains(part), "{text}: {message}");
    }
    for (key, value) in
        [("limits.bps-read", "x"), ("limits.nothing", "1"), ("file", "file"), ("limits", "bps-read")]
    {
        assert!(own.base().set(key, value).is_err(), "{key}");
    }
    assert!(
        own.base().get("limits").unwrap().contains(r#""iops-read":5"#),
        "a refused change changes nothing"
    );
}

#[test]
fn groups_are_made_from_both_spellings_and_names_are_unique() {
    let set = Set::new("");
    let make = |name: &str, text: &str| set.groups.create(name, Options::parse(text).unwrap());
    assert_eq!(
        make("a", "x-iops-write=5").unwrap().limits(),
        make("b", "limits.iops-write=5").unwrap().limits()
    );
    for (name, text) in
        [("a", ""), ("", ""), ("c", "x-iops-write=5,limits.iops-read=1"), ("c", "iops-write=5")]
    {
        assert!(make(name, text).is_err(), "{name} {text}");
    }
    assert_eq!(set.groups.names(), ["a", "b", "g"]);
    set.groups.remove("a").unwrap();
    assert!(set.groups.find("a").is_err());
}

#[test]
fn the_property_table_is_sound() {
    PROPS.check().unwrap();
}

#[test]
fn no_wake_up_is_lost_when_threads_wait_cancel_and_change_the_limits() {
    let env = crate::queue::testing::env(1);
    let groups = ThrottleGroups::new(env.runtime.clock.clone());
    let group = groups.create("g", Options::parse("limits.iops-total=50000").unwrap()).unwrap();
    let below = Recorder::new(&env, 1 << 20);
    let graph = Graph::new(env.clone());
    let clients: Vec<_> = (0..2)
        .map(|client| {
            let disk = graph.add_disk(&format!("d{client}")).unwrap();
            let node = Throttle::new(Edge::to_node(below.clone()), &group, groups.clone());
            graph.insert(&disk, Some(Vertex::new(format!("t{client}"), node))).unwrap();
            crate::sync::thread::spawn(move || {
                let queue = Queue::new(&disk, 8).unwrap();
                let mut cancelled = 0;
                for round in 0..100 {
                    for i in 0..8 {
                        submit(&queue, i, if i % 2 == 0 { write(0, 512) } else { read(0, 512) });
                    }
                    queue.cancel(round % 8);
                    let done = reap(&queue, 8);
                    assert_eq!(done.len(), 8);
                    cancelled += done.iter().filter(|c| c.res < 0).count();
                }
                800 - cancelled
            })
        })
        .collect();
    let changer = {
        let group = group.clone();
        crate::sync::thread::spawn(move || {
            for i in 0..400 {
                group.set("iops-total", ["20000", "100000", "0"][i % 3]).unwrap();
                crate::sync::thread::yield_now();
            }
        })
    };
    changer.join().unwrap();
    let carried_out: usize = clients.into_iter().map(|c| c.join().unwrap()).sum();
    assert_eq!(below.seen().len(), carried_out);
    assert_eq!(group.waiting(), 0);
}
