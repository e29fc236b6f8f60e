use super::*;
use crate::error::Code;
use crate::filter::testing::{Recorder, all_ops, let_others_run, start};
use crate::graph::Graph;
use crate::node::Vertex;
use crate::queue::virtual_env::virtual_env;
use crate::queue::{Env, HostOp, HostReq, Queue};
use crate::request::{Buffers, Flags, Op};

fn set_up(rules: &str) -> (Arc<Env>, Arc<Recorder>, Arc<Fault>) {
    let (env, _) = virtual_env(1);
    let below = Recorder::new(&env, 1 << 20);
    let edge = Edge::to_node(below.clone());
    let node = Fault::new(edge, Rules::parse(rules).unwrap(), env.runtime.rng.clone());
    (env, below, node)
}

fn write(offset: u64, len: usize) -> Request {
    let bufs = Buffers::alloc(len, 512);
    bufs.fill(7);
    Request::write(offset, bufs)
}

fn injected(errno: i32) -> IoResult {
    Err(IoError::new(errno, Code::Injected))
}

fn milliseconds(env: &Arc<Env>) -> u64 {
    env.runtime.clock.now().0 / 1_000_000
}

#[test]
fn only_the_chosen_requests_fail_and_the_others_arrive_once() {
    let rule = r#"[{"op": "write", "action": "error", "errno": "ENOSPC", "offset": 4096, "length": 4096, "skip": 1, "count": 2}]"#;
    for slow in [false, true] {
        let (env, below, node) = set_up(rule);
        below.set_slow(slow);
        env.block_on(|cx| async move {
            let mut results = Vec::new();
            for _ in 0..5 {
                results.push(cx.run(&*node, write(4096, 512)).await);
                cx.run(&*node, write(0, 4096)).await.unwrap();
                cx.run(&*node, Request::read(4096, Buffers::alloc(512, 512))).await.unwrap();
            }
            let no_space = injected(libc::ENOSPC);
            assert_eq!(results, [Ok(()), no_space, no_space, Ok(()), Ok(())]);
            assert_eq!(below.seen().len(), 3 + 5 + 5);
            assert_eq!(node.get("hits").unwrap(), r#"[{"matched":3,"fired":2}]"#);
        })
        .unwrap();
    }
}

#[test]
fn every_operation_can_fail_and_passes_otherwise() {
    for (op, fails) in [(None, false), (Some("any"), true)] {
        let rules = op.map_or_else(String::new, |op| format!(r#"[{{"op": "{op}", "action": "error"}}]"#));
        let (env, below, node) = set_up(&rules);
        env.block_on(|cx| async move {
            for request in all_ops() {
                assert_eq!(cx.run(&*node, request).await.is_err(), fails);
            }
            let range = ByteRange { offset: 0, len: 512 };
            assert_eq!(cx.status(&*node, range).await.is_err(), fails);
            assert_eq!(below.seen().len(), if fails { 0 } else { all_ops().len() });
        })
        .unwrap();
    }
}

#[test]
fn a_delay_takes_exactly_its_time_and_then_the_request_is_carried_out() {
    let (env, below, node) = set_up(r#"[{"op": "any", "action": "delay", "delay-ms": 1500, "count": 2}]"#);
    let clock = env.clone();
    env.block_on(|cx| async move {
        cx.run(&*node, write(0, 512)).await.unwrap();
        assert_eq!(milliseconds(&clock), 1500);
        cx.status(&*node, ByteRange { offset: 0, len: 1 }).await.unwrap();
        assert_eq!(milliseconds(&clock), 3000);
        cx.run(&*node, write(0, 512)).await.unwrap();
        assert_eq!(milliseconds(&clock), 3000);
        assert_eq!(below.seen().iter().map(|s| s.at.0 / 1_000_000).collect::<Vec<_>>(), [1500, 3000]);
    })
    .unwrap();
}

/// Starts `n` writes at the node, and proves that they hang.
async fn hang(cx: &Cx, node: &Arc<Fault>, n: usize) -> Vec<crate::filter::testing::Started> {
    let mut running = Vec::new();
    for i in 0..n {
        let (inner, node) = (cx.clone(), node.clone());
        running.push(start(cx, async move { inner.run(&*node, write(i as u64 * 512, 512)).await }));
    }
    let_others_run(cx).await;
    assert_eq!(node.get("hung"), Some(n.to_string()));
    assert!(running.iter().all(|r| r.now().is_none()));
    running
}

#[test]
fn released_requests_go_on_or_fail_as_told_and_the_rule_stays() {
    let (env, below, node) = set_up(r#"[{"op": "write", "action": "hang"}]"#);
    env.block_on(|cx| async move {
        for (value, result, arrived) in [("", Ok(()), 3), ("EIO", injected(libc::EIO), 3)] {
            let running = hang(&cx, &node, 3).await;
            node.set("release", value).unwrap();
            for r in running {
                assert_eq!(r.result().await, result);
            }
            assert_eq!(below.seen().len(), arrived);
            assert_eq!(node.hung(), 0);
        }
        assert!(node.set("release", "EWHAT").is_err());
    })
    .unwrap();
}

#[test]
fn changing_or_switching_off_the_rules_releases_what_hangs() {
    let (env, below, node) = set_up(r#"[{"op": "write", "action": "hang"}]"#);
    env.block_on(|cx| async move {
        let running = hang(&cx, &node, 2).await;
        assert!(node.set("rules", "[{}]").is_err());
        assert_eq!(node.hung(), 2, "a refused change changes nothing");
        node.set("enabled", "off").unwrap();
        for r in running {
            r.result().await.unwrap();
        }
        cx.run(&*node, write(0, 512)).await.unwrap();
        node.set("enabled", "on").unwrap();
        let running = hang(&cx, &node, 2).await;
        node.set("rules", r#"[{"op": "write", "action": "error"}]"#).unwrap();
        for r in running {
            r.result().await.unwrap();
        }
        assert_eq!(cx.run(&*node, write(0, 512)).await, injected(libc::EIO));
        assert_eq!(below.seen().len(), 5);
        assert_eq!(node.get("hits").unwrap(), r#"[{"matched":1,"fired":1}]"#);
    })
    .unwrap();
}

#[test]
fn a_delay_is_cut_short_by_a_release() {
    let (env, _below, node) = set_up(r#"[{"op": "write", "action": "delay", "delay-ms": 1000000}]"#);
    let clock = env.clone();
    env.block_on(|cx| async move {
        let running = hang(&cx, &node, 1).await;
        node.set("release", "").unwrap();
        running[0].result().await.unwrap();
        assert_eq!(milliseconds(&clock), 0);
    })
    .unwrap();
}

#[test]
fn nothing_waits_in_a_node_that_was_settled_until_it_is_changed() {
    let (env, _below, node) = set_up(r#"[{"op": "write", "action": "hang", "delay-ms": 5}]"#);
    let clock = env.clone();
    env.block_on(|cx| async move {
        let running = hang(&cx, &node, 2).await;
        node.settle(&cx).await.unwrap();
        for r in running {
            r.result().await.unwrap();
        }
        cx.run(&*node, write(0, 512)).await.unwrap();
        assert_eq!(milliseconds(&clock), 0);
        node.set("enabled", "on").unwrap();
        hang(&cx, &node, 1).await;
        node.settle(&cx).await.unwrap();
    })
    .unwrap();
}

#[test]
fn a_filter_with_requests_that_hang_can_be_removed() {
    let (env, below, _) = set_up("");
    let graph = Graph::new(env.clone());
    let disk = graph.add_disk("d").unwrap();
    let place = Vertex::new("base", below.clone());
    graph.insert(&disk, Some(place.clone())).unwrap();
    let options = Options::parse("driver=fault,rules.0.op=any,rules.0.action=hang").unwrap();
    let filter = graph.filter_add(&place, options).unwrap();
    let queue = Queue::new(&disk, 8).unwrap();
    let submit = |n| queue.submit(&mut vec![HostReq { user_data: n, op: HostOp::Io(write(n * 512, 512)) }]);
    assert_eq!(submit(0) + submit(1), 2);
    assert_eq!(filter.base().get("hung").as_deref(), Some("2"));
    env.block_on(|cx| async move {
        // The queue has to be driven meanwhile: in virtual time there is no watchdog that would.
        let removal = {
            let (graph, place, filter, inner) = (graph.clone(), place.clone(), filter.clone(), cx.clone());
            start(
                &cx,
                async move { graph.filter_del_on(&inner, &place, &filter).await.map_err(|e| e.as_io()) },
            )
        };
        let mut done = Vec::new();
        while removal.now().is_none() {
            let_others_run(&cx).await;
            queue.reap(&mut done, 8, 0, None);
        }
        assert_eq!(removal.now(), Some(Ok(())));
        assert_eq!(done.iter().map(|c| c.res).collect::<Vec<_>>(), [512, 512]);
        assert_eq!(below.seen().len(), 2);
    })
    .unwrap();
}

#[test]
fn a_request_that_hangs_can_be_cancelled() {
    let (env, below, _) = set_up("");
    let graph = Graph::new(env.clone());
    let disk = graph.add_disk("d").unwrap();
    let edge = Edge::to_node(below.clone());
    let rules = Rules::parse(r#"[{"op": "write", "action": "hang"}]"#).unwrap();
    let node = Fault::new(edge, rules, env.runtime.rng.clone());
    graph.insert(&disk, Some(Vertex::new("f", node.clone()))).unwrap();
    let queue = Queue::new(&disk, 8).unwrap();
    queue.submit(&mut vec![HostReq { user_data: 5, op: HostOp::Io(write(0, 512)) }]);
    assert_eq!(node.hung(), 1);
    assert_eq!(queue.cancel(5), 1);
    let mut done = Vec::new();
    queue.reap(&mut done, 1, 1, None);
    assert_eq!(done[0].res, -i64::from(libc::ECANCELED));
    assert_eq!((node.hung(), below.seen().len()), (0, 0));
}

#[test]
fn a_short_write_with_an_error_is_torn() {
    let (env, below, node) =
        set_up(r#"[{"op": "write", "action": "short", "short-bytes": 700, "errno": "EIO"}]"#);
    env.block_on(|cx| async move {
        assert_eq!(cx.run(&*node, write(100, 2000)).await, injected(libc::EIO));
        let mut expected = vec![0; 2200];
        expected[100..800].fill(7);
        assert_eq!(below.bytes(0, 2200), expected);
        // One byte is too little to be torn: nothing of it arrives.
        assert_eq!(cx.run(&*node, write(0, 1)).await, injected(libc::EIO));
        assert_eq!(below.seen().len(), 1);
    })
    .unwrap();
}

#[test]
fn a_short_transfer_without_an_error_becomes_two_and_succeeds() {
    let (env, below, node) = set_up(r#"[{"op": "any", "action": "short"}]"#);
    env.block_on(|cx| async move {
        cx.run(&*node, write(512, 2048).class(Class::Lazy).flags(Flags::FUA)).await.unwrap();
        let back = Buffers::alloc(4096, 512);
        cx.run(&*node, Request::read(0, back.clone())).await.unwrap();
        let mut expected = vec![0; 4096];
        expected[512..2560].fill(7);
        assert_eq!(back.to_vec(), expected);
        let zeroes = ByteRange { offset: 1024, len: 1024 };
        cx.run(&*node, Request::write_zeroes(zeroes, Flags::empty())).await.unwrap();
        cx.run(&*node, Request::flush()).await.unwrap();
        let seen: Vec<_> = below.seen().iter().map(|s| (s.op, s.range.offset, s.range.len)).collect();
        let (w, r, z) = (Op::Write, Op::Read, Op::WriteZeroes);
        let data = [(w, 512, 1024), (w, 1536, 1024), (r, 0, 2048), (r, 2048, 2048)];
        assert_eq!(seen[..4], data);
        assert_eq!(seen[4..], [(z, 1024, 512), (z, 1536, 512), (Op::Flush, 0, 0)]);
        assert!(below.seen()[..2].iter().all(|s| s.class == Class::Lazy && s.flags == Flags::FUA));
    })
    .unwrap();
}

#[test]
fn probabilities_come_from_the_seam_so_a_seed_repeats_them() {
    let run = || {
        let (env, _below, node) = set_up(r#"[{"op": "write", "action": "error", "probability": 0.5}]"#);
        env.block_on(|cx| async move {
            let mut failed = Vec::new();
            for _ in 0..64 {
                failed.push(cx.run(&*node, write(0, 512)).await.is_err());
            }
            failed
        })
        .unwrap()
    };
    let first = run();
    assert!((8..56).contains(&first.iter().filter(|f| **f).count()));
    assert_eq!(run(), first);
}

#[test]
fn the_driver_takes_rules_in_both_spellings_and_can_start_switched_off() {
    let (env, below, _) = set_up("");
    let graph = Graph::new(env.clone());
    graph.add_node("file", below).unwrap();
    let open = |text: &str| graph.open(Options::parse(text).unwrap());
    let dotted = open(
        "driver=fault,file=file,rules.0.op=read,rules.0.action=error,rules.1.op=any,rules.1.action=hang",
    )
    .unwrap();
    let json = open(
        r#"{"driver": "fault", "file": "file", "enabled": false, "rules": [{"op": "read", "action": "error"}, {"op": "any", "action": "hang"}]}"#,
    )
    .unwrap();
    assert!(dotted.base().get("rules").unwrap().starts_with(r#"[{"op":"read""#));
    let enabled = |v: &Arc<Vertex>| v.base().get("enabled").unwrap();
    assert_eq!((enabled(&dotted).as_str(), enabled(&json).as_str()), ("on", "off"));
    assert_eq!(json.base().get("hits").unwrap().matches("matched").count(), 2);
    for (text, part) in [
        ("driver=fault,rules.0.op=read,rules.0.action=error", "'file'"),
        ("driver=fault,file=file,rules.0.op=read", "'rules.0'"),
        ("driver=fault,file=file,rules=x", "'rules'"),
        ("driver=fault,file=file,enabled=maybe", "'enabled'"),
        ("driver=fault,file=file,hits=1", "'hits'"),
    ] {
        let message = open(text).unwrap_err().to_string();
        assert!(message.contains(part), "{text}: {message}");
    }
    assert!(json.base().set("hits", "").is_err());
    assert!(json.base().set("enabled", "perhaps").is_err());
}

#[test]
fn the_property_table_is_sound() {
    PROPS.check().unwrap();
}
