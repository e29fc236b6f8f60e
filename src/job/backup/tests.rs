//! Backups in virtual time: one thread, every interleaving made on purpose.

use crate::error::Code;
use crate::events::Side;
use crate::graph::Disk;
use crate::job::testing::{Bench, Store, pattern};
use crate::job::{Job, Status};
use crate::options::Options;
use crate::request::{Buffers, Class, Flags, Op, Request};
use crate::rt::Rng;
use crate::rt::real::SplitMix;
use crate::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use crate::sync::{Arc, Mutex};
use crate::units::ByteRange;
use std::time::Duration;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// A guest disk `vda` over the node `s`, and a target `t` of the same size.
struct Guest {
    bench: Bench,
    disk: Arc<Disk>,
    s: Arc<Store>,
    t: Arc<Store>,
}

impl Guest {
    fn new(len: usize, holes: &[(usize, usize)]) -> Self {
        let bench = Bench::new();
        let s = bench.store("s", pattern(len, holes));
        let t = bench.store("t", vec![0xee; len]);
        let graph = bench.context.graph();
        let disk = graph.add_disk("vda").expect("free");
        graph.insert(&disk, Some(graph.node("s").expect("there"))).expect("inserted");
        Self { bench, disk, s, t }
    }

    fn start(&self, more: &str) -> Arc<Job> {
        self.try_start(more).expect("the backup starts")
    }

    fn try_start(&self, more: &str) -> crate::error::Result<Arc<Job>> {
        self.bench.start("backup", &format!("device=vda,target=t,{more}"))
    }

    /// Starts a request of the guest; the number of those that have ended, and the results.
    fn submit(&self, req: Request) -> Arc<Mutex<Option<crate::error::IoResult>>> {
        let slot: Arc<Mutex<Option<_>>> = Arc::default();
        let (disk, there) = (self.disk.clone(), slot.clone());
        let run = |cx: crate::queue::Cx| async move {
            let result = disk.run(&cx, req).await;
            *there.lock() = Some(result);
        };
        self.bench.context.env().spawn_background(run).expect("started");
        slot
    }

    fn write(&self, offset: usize, len: usize, byte: u8) -> Arc<Mutex<Option<crate::error::IoResult>>> {
        self.submit(Request::write(offset as u64, Buffers::from_bytes(&vec![byte; len])))
    }

    /// Names of all nodes: what a job has left behind shows here.
    fn nodes(&self) -> Vec<String> {
        self.bench.context.graph().nodes().iter().map(|n| n.name().to_owned()).collect()
    }

    fn filters(&self) -> usize {
        self.bench.context.graph().node("s").expect("there").filters().len()
    }
}

/// Writers that go on, one request after the other, until told to stop.
fn busy_guests(g: &Guest, guests: u64, each: usize) -> Arc<AtomicUsize> {
    let done: Arc<AtomicUsize> = Arc::default();
    for n in 0..guests {
        let (disk, done) = (g.disk.clone(), done.clone());
        let rng = SplitMix::new(n);
        let run = |cx: crate::queue::Cx| async move {
            let size = disk.size();
            for _ in 0..each {
                let offset = rng.next() % size;
                let len = (1 + rng.next() % (160 << 10)).min(size - offset);
                let range = ByteRange { offset, len };
                let req = match rng.next() % 4 {
                    0 => Request::write_zeroes(range, Flags::empty()),
                    1 => Request::discard(range),
                    _ => Request::write(offset, Buffers::from_bytes(&vec![rng.next() as u8; len as usize])),
                };
                disk.run(&cx, req).await.expect("the guest's requests succeed");
                done.fetch_add(1, SeqCst);
            }
        };
        g.bench.context.env().spawn_background(run).expect("started");
    }
    done
}

#[test]
fn a_full_backup_under_random_writes_is_the_instant_for_every_size() {
    for (seed, len) in [512, 4608, MIB + 512, 64 * KIB - 512, 3 * MIB].into_iter().enumerate() {
        let g = Guest::new(len, &[(len / 4, len / 3)]);
        g.s.set_delay(Duration::from_micros(300 + seed as u64));
        g.t.set_delay(Duration::from_millis(2));
        let instant = g.s.bytes();
        let job = g.start("sync=full,max-chunk=64k,max-workers=4");
        assert_eq!((job.id(), g.filters()), ("vda", 1));
        let done = busy_guests(&g, 4, 30);
        assert_eq!(g.bench.wait(&job), Ok(()), "{len}");
        g.bench.until(|| done.load(SeqCst) == 120);
        assert!(g.t.bytes() == instant, "{len}: the target differs from the instant");
        assert!(g.s.bytes() != instant, "{len}: the guest has written");
        assert_eq!((g.filters(), g.nodes()), (0, vec!["s".to_owned(), "t".to_owned()]));
        assert_eq!(job.query().current, len as u64);
        let states = g.bench.states("vda");
        assert_eq!(states, ["created", "running", "waiting", "pending", "concluded", "null"]);
    }
}

#[test]
fn success_comes_after_the_last_write_and_the_flush() {
    let g = Guest::new(2 * MIB, &[]);
    g.t.hold(Op::Flush);
    let job = g.start("sync=full");
    g.bench.until(|| g.t.waiting() == 1);
    g.bench.run_ready();
    assert_eq!(job.status(), Status::Running, "not flushed yet");
    assert_eq!(g.filters(), 1);
    g.t.let_go();
    assert_eq!(g.bench.wait(&job), Ok(()));
    let ops: Vec<Op> = g.t.seen().iter().map(|r| r.op).collect();
    assert_eq!(ops, [Op::Write, Op::Write, Op::Flush]);
}

#[test]
fn parts_are_whole_chunks_and_known_zeros_are_one_request() {
    let g = Guest::new(12 * MIB, &[(2 * MIB, 8 * MIB)]);
    let job = g.start("sync=full,max-workers=1");
    assert_eq!(g.bench.wait(&job), Ok(()));
    assert!(g.t.bytes() == g.s.bytes());
    let zero: u64 = g.t.seen().iter().filter(|r| r.op == Op::WriteZeroes).map(|r| r.range.len).sum();
    assert_eq!(zero, 8 * MIB as u64);
    assert_eq!(job.flight.started(), 5, "four chunks of data and one piece of zeros");
    assert!(g.s.seen().iter().all(|r| r.class == Class::Background));
}

#[test]
fn a_backup_of_type_top_leaves_out_what_lies_below() {
    let g = Guest::new(MIB, &[]);
    // The top layer has the first 256 KiB and the last; what is half in a granule counts as in.
    g.s.set_below((256 * KIB as u64 + 512)..(960 * KIB as u64));
    let job = g.start("sync=top");
    assert_eq!(g.bench.wait(&job), Ok(()));
    let (s, t) = (g.s.bytes(), g.t.bytes());
    assert!(t[..320 * KIB] == s[..320 * KIB] && t[960 * KIB..] == s[960 * KIB..]);
    assert!(t[320 * KIB..960 * KIB].iter().all(|b| *b == 0xee), "not written");
    assert_eq!(job.query().current, MIB as u64);
}

#[test]
fn a_backup_of_type_none_copies_what_is_overwritten_until_it_is_cancelled() {
    let g = Guest::new(MIB, &[]);
    let before = g.s.bytes();
    let job = g.start("sync=none");
    let write = g.write(128 * KIB + 1000, 512, 1);
    g.bench.until(|| write.lock().is_some());
    g.bench.run_ready();
    assert_eq!(job.status(), Status::Running);
    let t = g.t.bytes();
    assert!(t[128 * KIB..192 * KIB] == before[128 * KIB..192 * KIB]);
    assert!(t[..128 * KIB].iter().chain(&t[192 * KIB..]).all(|b| *b == 0xee));
    assert_eq!(job.query().current, 64 * KIB as u64);
    job.cancel().expect("running");
    assert_eq!(g.bench.wait(&job).map_err(|e| e.code), Err(Code::Cancelled));
    assert_eq!(g.filters(), 0);
}

#[test]
fn cancel_with_a_hung_target_releases_the_guest_and_ends_in_time() {
    let g = Guest::new(20 * MIB, &[]);
    g.t.hold(Op::Write);
    let job = g.start("sync=full,filter-node-name=f");
    g.bench.until(|| g.t.waiting() == 16);
    // A guest write into a granule that waits for the target, and one into a granule that the job has not come to.
    let writes = [g.write(0, 512, 1), g.write(19 * MIB, 512, 2)];
    g.bench.run_ready();
    let began = g.bench.now();
    job.cancel().expect("running");
    assert_eq!(g.bench.wait(&job).map_err(|e| e.code), Err(Code::Cancelled));
    assert!(g.bench.now().since(began) < Duration::from_secs(1));
    g.bench.until(|| writes.iter().all(|w| *w.lock() == Some(Ok(()))));
    assert!(g.bench.now().since(began) < Duration::from_secs(1));
    assert_eq!(g.filters(), 0);
    assert!(g.t.running() > 0, "the target still has not answered");
    // The source is free for the next backup, under the same names.
    let t2 = g.bench.store("t2", vec![0; 20 * MIB]);
    let next = g.bench.start("backup", "device=vda,target=t2,sync=full,filter-node-name=f").expect("starts");
    let instant = g.s.bytes();
    assert_eq!(g.bench.wait(&next), Ok(()));
    assert!(t2.bytes() == instant);
    g.t.let_go();
    g.bench.until(|| g.bench.context.jobs().pool().used() == 0);
    g.bench.run_ready();
    let again = g.start("sync=full");
    assert_eq!(g.bench.wait(&again), Ok(()));
}

#[test]
fn the_target_of_a_cancelled_backup_can_be_used_at_once_and_is_written_in_order() {
    let g = Guest::new(4 * MIB, &[(3 * MIB, 512 * KIB)]);
    g.t.hold(Op::Write);
    let first = g.start("sync=full");
    g.bench.until(|| g.t.waiting() > 0);
    first.cancel().expect("running");
    assert_eq!(g.bench.wait(&first).map_err(|e| e.code), Err(Code::Cancelled));
    let (on_the_way, begun) = (g.t.running(), g.t.count(Op::Write));
    assert!(on_the_way > 0, "the target still has not answered");
    // What the first has on its way is old by now.
    let overwritten = g.write(0, MIB, 0x55);
    g.bench.until(|| *overwritten.lock() == Some(Ok(())));
    let second = g.start("sync=full,ram-cache.capacity=8M");
    g.bench.store("other", vec![0; 4 * MIB]);
    let refused = g.bench.start("copy", "job-id=x,source=other,target=t").expect_err("the second is at work");
    assert_eq!(refused.code(), Code::Busy);
    // Its guest goes on, and nothing passes the gate.
    let write = g.write(MIB, 4096, 0x66);
    g.bench.until(|| *write.lock() == Some(Ok(())));
    g.bench.run_ready();
    assert_eq!((g.t.count(Op::Write), g.t.running()), (begun, on_the_way));
    let began = g.bench.now();
    second.cancel().expect("running");
    assert_eq!(g.bench.wait(&second).map_err(|e| e.code), Err(Code::Cancelled));
    assert!(g.bench.now().since(began) < Duration::from_millis(200), "it had nothing on its way");
    // The third still has to come after the first.
    let instant = g.s.bytes();
    let third = g.start("sync=full");
    g.bench.run_ready();
    assert_eq!((g.t.count(Op::Write), third.status()), (begun, Status::Running));
    g.t.let_go();
    assert_eq!(g.bench.wait(&third), Ok(()));
    assert!(g.t.bytes() == instant);
    assert_eq!(g.nodes(), ["other", "s", "t"]);
    // Nobody is in the way any more: no gate.
    let fourth = g.start("sync=none");
    g.bench.run_ready();
    assert_eq!(g.nodes().len(), 4, "{:?}", g.nodes());
    fourth.cancel().expect("running");
    assert_eq!(g.bench.wait(&fourth).map_err(|e| e.code), Err(Code::Cancelled));
}

#[test]
fn a_cancelled_backup_to_a_slow_target_is_undone_at_once() {
    for cache in ["", ",ram-cache.capacity=8M"] {
        let g = Guest::new(8 * MIB, &[]);
        let throttle = "driver=throttle,node-name=slow,limits.bps-write=64k,file=t";
        g.bench.context.graph().open(Options::parse(throttle).expect("parses")).expect("opens");
        let start = || g.bench.start("backup", &format!("device=vda,target=slow,sync=full{cache}"));
        let job = start().expect("starts");
        let writes: Vec<_> = (0..8).map(|n| g.write(n * MIB + 64 * KIB, 4096, 1)).collect();
        g.bench.run_ready();
        let slow = g.bench.context.graph().node("slow").expect("there");
        assert_ne!(slow.base().get("waiting").as_deref(), Some("0"), "writes wait for their turn");
        let began = g.bench.now();
        job.cancel().expect("running");
        assert_eq!(g.bench.wait(&job).map_err(|e| e.code), Err(Code::Cancelled));
        assert_eq!(g.bench.now(), began, "no time has passed");
        g.bench.run_ready();
        assert!(writes.iter().all(|w| *w.lock() == Some(Ok(()))), "the guest goes on");
        assert_eq!(slow.base().get("waiting").as_deref(), Some("0"));
        assert_eq!(g.bench.context.jobs().pool().used(), 0);
        assert_eq!(g.nodes(), ["s", "slow", "t"]);
        let again = start().expect("the target is free");
        again.cancel().expect("running");
        assert_eq!(g.bench.wait(&again).map_err(|e| e.code), Err(Code::Cancelled));
    }
}

#[test]
fn a_copy_to_the_target_of_a_cancelled_copy_comes_after_it() {
    let g = Guest::new(2 * MIB, &[]);
    g.t.hold(Op::Write);
    let start = |source: &str| g.bench.start("copy", &format!("job-id=c,source={source},target=t"));
    let first = start("s").expect("starts");
    g.bench.until(|| g.t.waiting() > 0);
    first.cancel().expect("running");
    assert_eq!(g.bench.wait(&first).map_err(|e| e.code), Err(Code::Cancelled));
    let other = g.bench.store("other", vec![0x77; 2 * MIB]);
    let begun = g.t.count(Op::Write);
    let second = start("other").expect("the target can be claimed");
    g.bench.run_ready();
    assert_eq!(g.t.count(Op::Write), begun);
    g.t.let_go();
    assert_eq!(g.bench.wait(&second), Ok(()));
    assert!(g.t.bytes() == other.bytes());
}

#[test]
fn errors_of_a_background_copy_follow_the_policy_and_never_reach_the_guest() {
    for (op, key, side) in
        [(Op::Write, "on-target-error", Side::Target), (Op::Read, "on-source-error", Side::Source)]
    {
        let fail = |more: &str| {
            let g = Guest::new(2 * MIB, &[]);
            if op == Op::Read { &g.s } else { &g.t }.fail(op, libc::EIO, 1);
            let job = g.start(&format!("sync=full,max-workers=1{more}"));
            (g, job)
        };
        let (g, job) = fail("");
        assert_eq!(g.bench.wait(&job).map_err(|e| e.errno), Err(libc::EIO));
        let report = job.report().expect("there is a cause");
        assert_eq!((report.side, report.op, report.error.errno), (side, op, libc::EIO));
        assert_eq!(g.filters(), 0);
        let write = g.write(0, 4096, 1);
        g.bench.until(|| write.lock().is_some());
        assert_eq!(*write.lock(), Some(Ok(())));

        let (g, job) = fail(&format!(",{key}=ignore"));
        let instant = g.s.bytes();
        assert_eq!(g.bench.wait(&job), Ok(()));
        assert!(g.t.bytes() == instant);

        let (g, job) = fail(&format!(",{key}=stop"));
        g.bench.until(|| job.status() == Status::Paused);
        assert_eq!(job.flight.parts(), 0);
        // The guest goes on while the job is stopped, and its writes are copied first.
        let instant = g.s.bytes();
        let write = g.write(MIB, 4096, 1);
        g.bench.until(|| write.lock().is_some());
        assert_eq!((*write.lock(), job.status()), (Some(Ok(())), Status::Paused));
        job.resume().expect("stopped");
        assert_eq!(g.bench.wait(&job), Ok(()));
        assert!(g.t.bytes() == instant);
    }
}

#[test]
fn a_broken_snapshot_fails_the_job_and_not_the_guest() {
    let g = Guest::new(4 * MIB, &[]);
    let job = g.start("sync=none");
    g.t.fail(Op::Write, libc::ENOSPC, 1);
    let write = g.write(0, 512, 1);
    assert_eq!(g.bench.wait(&job).map_err(|e| e.errno), Err(libc::ENOSPC));
    g.bench.until(|| write.lock().is_some());
    assert_eq!(*write.lock(), Some(Ok(())));
    let report = job.report().expect("there is a cause");
    assert_eq!((report.side, report.error.errno), (Side::Target, libc::ENOSPC));
    assert!(job.error_text().expect("it failed").contains("target"));
    assert_eq!(g.filters(), 0);
}

#[test]
fn a_flush_that_fails_fails_the_job_whatever_the_policy() {
    let g = Guest::new(MIB, &[]);
    g.t.fail(Op::Flush, libc::EIO, 1);
    let job = g.start("sync=full,on-target-error=ignore");
    assert_eq!(g.bench.wait(&job).map_err(|e| e.errno), Err(libc::EIO));
    assert_eq!(g.filters(), 0);
}

#[test]
fn a_filter_that_somebody_takes_out_fails_the_job() {
    let g = Guest::new(4 * MIB, &[]);
    let job = g.start("sync=full,filter-node-name=f");
    job.pause().expect("running");
    g.bench.until(|| job.status() == Status::Paused);
    let graph = g.bench.context.graph();
    let (place, filter) = (graph.node("s").expect("there"), graph.node("f").expect("there"));
    graph.filter_del(&place, &filter).expect("a filter in place");
    job.resume().expect("paused");
    assert_eq!(g.bench.wait(&job).map_err(|e| e.code), Err(Code::SnapshotBroken));
}

#[test]
fn a_pause_holds_the_job_but_not_the_copies_for_the_guest() {
    let g = Guest::new(20 * MIB, &[]);
    let instant = g.s.bytes();
    let job = g.start("sync=full,max-workers=2");
    job.pause().expect("running");
    g.bench.until(|| job.status() == Status::Paused);
    let before = (job.query().current, job.flight.started());
    let write = g.write(10 * MIB, 4096, 9);
    g.bench.until(|| write.lock().is_some());
    g.bench.run_ready();
    assert_eq!(job.flight.started(), before.1);
    assert_eq!(job.query().current, before.0 + 64 * KIB as u64, "guest-driven copies count");
    job.resume().expect("paused");
    assert_eq!(g.bench.wait(&job), Ok(()));
    assert!(g.t.bytes() == instant);
}

#[test]
fn the_job_ends_under_a_guest_that_never_stops_and_a_low_speed() {
    let g = Guest::new(2 * MIB, &[]);
    g.s.set_delay(Duration::from_millis(1));
    let instant = g.s.bytes();
    let job = g.start("sync=full,speed=256k");
    let done = busy_guests(&g, 2, 2000);
    let began = g.bench.now();
    assert_eq!(g.bench.wait(&job), Ok(()));
    assert!(g.t.bytes() == instant);
    assert!(g.bench.now().since(began) < Duration::from_secs(60));
    g.bench.until(|| done.load(SeqCst) == 4000);
}

#[test]
fn disks_of_a_group_are_backed_up_at_one_instant_or_not_at_all() {
    let g = Guest::new(MIB, &[]);
    let (s2, t2) = (g.bench.store("s2", pattern(MIB, &[])), g.bench.store("t2", vec![0; MIB]));
    let graph = g.bench.context.graph();
    let disk2 = graph.add_disk("vdb").expect("free");
    graph.insert(&disk2, Some(graph.node("s2").expect("there"))).expect("inserted");
    let group = |second: &str| {
        let mut group = g.bench.context.jobs().group(Options::empty()).expect("a group");
        let first = Options::parse("device=vda,target=t,sync=full").expect("parses");
        let second = Options::parse(&format!("device=vdb,target=t2,sync=full{second}")).expect("parses");
        let jobs = (group.add("backup", first), group.add("backup", second));
        (group, jobs)
    };
    // The second cannot be prepared: its filter's name is taken.
    let (mut both, jobs) = group(",filter-node-name=s");
    assert_eq!(both.start().expect_err("one cannot be opened").code(), Code::Busy);
    drop(both);
    for job in [jobs.0, jobs.1] {
        assert_eq!(job.expect("a member").status(), Status::Null);
    }
    assert_eq!((g.filters(), g.nodes().len()), (0, 4));
    assert_eq!((g.t.seen(), t2.seen()), (Vec::new(), Vec::new()));

    let instants = (g.s.bytes(), s2.bytes());
    let (mut both, jobs) = group("");
    both.start().expect("both can be opened");
    let writes = [g.write(0, 4096, 1), g.write(MIB / 2, 4096, 1)];
    for job in [jobs.0, jobs.1] {
        assert_eq!(g.bench.wait(&job.expect("a member")), Ok(()));
    }
    g.bench.until(|| writes.iter().all(|w| w.lock().is_some()));
    assert!(g.t.bytes() == instants.0 && t2.bytes() == instants.1);
}

#[test]
fn what_cannot_be_backed_up_is_refused_and_nothing_is_left() {
    let g = Guest::new(MIB, &[]);
    for (name, len) in [("small", MIB - 512), ("large", MIB + 512), ("ro", MIB)] {
        g.bench.store(name, vec![0; len]);
    }
    let graph = g.bench.context.graph();
    graph.add_disk("empty").expect("free");
    graph.open(Options::parse("driver=passthrough,node-name=above,file=s").expect("parses")).expect("opened");
    let before = g.nodes();
    let refused = |options: &str| g.bench.start("backup", options).expect_err(options);
    for target in ["small", "large", "s", "above"] {
        let e = refused(&format!("device=vda,target={target},sync=full"));
        assert!(e.to_string().contains("'target'"), "{e}");
    }
    assert_eq!(refused("device=empty,target=t,sync=full").code(), Code::NoMedium);
    assert_eq!(refused("device=none,target=t,sync=full").code(), Code::NotFound);
    assert!(refused("device=s,target=t,sync=full").to_string().contains("job-id"));
    assert!(refused("device=vda,target=t,sync=full,nonsense=1").to_string().contains("nonsense"));
    assert!(refused("device=vda,target=t,sync=full,filter-node-name=t").code() == Code::Busy);
    assert_eq!((g.nodes(), g.filters()), (before, 0));
    assert!(g.bench.context.jobs().list().is_empty());
    let by_node =
        g.bench.start("backup", "device=s,target=t,sync=full,job-id=j").expect("a node can be given");
    assert_eq!(g.bench.wait(&by_node), Ok(()));
}

#[test]
fn statistics_are_found_by_job_disk_and_node() {
    let g = Guest::new(MIB, &[]);
    let job = g.start("sync=none,filter-node-name=f,auto-dismiss=off");
    let write = g.write(0, 512, 1);
    g.bench.until(|| write.lock().is_some());
    let context = &g.bench.context;
    let json = context.stats_json("f").expect("a node");
    assert!(json.get("cbw-copied-bytes").is_some());
    assert_eq!(context.stats("vda").map(|s| s.wr_ops), Some(1));
    assert!(context.stats_json("nothing").is_err());
    job.cancel().expect("running");
    g.bench.wait(&job).expect_err("cancelled");
    let json = context.query("jobs").expect("a list");
    assert_eq!(json[0]["status"], "concluded");
    assert_eq!(json[0]["code"], "cancelled");
    job.dismiss().expect("concluded");
    assert_eq!(context.query("jobs").expect("a list").as_array().map(Vec::len), Some(0));
}

#[test]
fn with_a_ram_cache_the_guest_waits_for_the_source_only_and_the_backup_is_the_instant() {
    let g = Guest::new(4 * MIB, &[(MIB, MIB)]);
    let instant = g.s.bytes();
    g.t.hold(Op::Write);
    g.t.hold(Op::WriteZeroes);
    let job = g.start("sync=full,max-workers=1,ram-cache.capacity=8M,ram-cache.node-name=c");
    let writes: Vec<_> = (0..16).map(|n| g.write(2 * MIB + n * 128 * KIB, 4096, 1)).collect();
    g.bench.until(|| writes.iter().all(|w| *w.lock() == Some(Ok(()))));
    assert!(g.t.waiting() > 0, "the target has answered nothing yet");
    assert!(g.bench.context.stats("c").is_some_and(|s| s.cache_used > 0), "the old data is in memory");
    g.t.let_go();
    assert_eq!(g.bench.wait(&job), Ok(()));
    assert!(g.t.bytes() == instant);
    assert_eq!(g.nodes(), ["s", "t"]);
    assert_eq!(g.t.seen().last().map(|r| r.op), Some(Op::Flush));
}

#[test]
fn a_cancel_with_data_in_the_cache_of_a_hung_target_is_bounded_and_frees_it() {
    let g = Guest::new(8 * MIB, &[]);
    g.t.hold(Op::Write);
    let job = g.start("sync=none,ram-cache.capacity=2M,ram-cache.node-name=c");
    // More than fits: the last ones wait for space.
    let writes: Vec<_> = (0..64).map(|n| g.write(n * 64 * KIB, 4096, 1)).collect();
    g.bench.until(|| g.bench.context.stats("c").is_some_and(|s| s.cache_waiters > 0));
    let began = g.bench.now();
    job.cancel().expect("running");
    assert_eq!(g.bench.wait(&job).map_err(|e| e.code), Err(Code::Cancelled));
    g.bench.until(|| writes.iter().all(|w| *w.lock() == Some(Ok(()))));
    assert!(g.bench.now().since(began) < Duration::from_secs(1));
    assert_eq!((g.filters(), g.nodes()), (0, vec!["s".to_owned(), "t".to_owned()]));
    assert!(g.t.running() > 0, "the target still has not answered");
    g.t.let_go();
    g.bench.until(|| g.t.running() == 0);
}

#[test]
fn a_target_that_goes_on_failing_breaks_the_snapshot_and_not_the_guest() {
    let g = Guest::new(MIB, &[]);
    g.t.fail(Op::Write, libc::EIO, usize::MAX);
    let job = g.start("sync=none,ram-cache.capacity=8M,ram-cache.drain-delay-ms=1");
    let write = g.write(0, 4096, 1);
    assert_eq!(g.bench.wait(&job).map_err(|e| e.errno), Err(libc::EIO));
    g.bench.until(|| *write.lock() == Some(Ok(())));
    assert_eq!(job.report().map(|r| r.side), Some(Side::Target));
    assert_eq!(g.nodes(), ["s", "t"]);
}
