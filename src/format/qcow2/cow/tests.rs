//! Deferred copy-on-write as a guest sees it, in virtual time.

use crate::filter::testing::{Started, start};
use crate::format::qcow2::create::{BackingName, CreateOptions, create};
use crate::format::qcow2::node::Qcow2Node;
use crate::format::qcow2::testing::TestFile;
use crate::format::qcow2::writer::Writer;
use crate::graph::Graph;
use crate::node::Node;
use crate::options::Options;
use crate::queue::virtual_env::{VirtualClock, virtual_env};
use crate::queue::{Cx, Env};
use crate::request::{Buffers, Flags, Op, Request};
use crate::rt::Clock;
use crate::sync::Arc;
use crate::sync::atomic::AtomicU64;
use crate::sync::atomic::Ordering::Relaxed;
use crate::units::ByteRange;
use std::time::Duration;

const K: u64 = 1024;
const CLUSTER: u64 = 64 * K;
const SIZE: u64 = 4 << 20;

/// An overlay over a base in which each byte tells its 4 KiB block.
struct World {
    env: Arc<Env>,
    clock: Arc<VirtualClock>,
    cx: Cx,
    file: Arc<TestFile>,
    base: Arc<TestFile>,
    disk: Arc<dyn Node>,
    // Last: what is opened goes before it.
    _graph: Arc<Graph>,
}

fn old(offset: u64) -> u8 {
    (offset / 4096 % 251) as u8 + 1
}

impl World {
    fn new(extended_l2: bool, more: &str) -> Self {
        let (env, clock) = virtual_env(1);
        env.start(0).expect("starts");
        let cx = env.background().expect("started");
        let graph = Graph::new(env.clone());
        let (file, base) = (TestFile::new(Vec::new()), TestFile::new((0..SIZE).map(old).collect()));
        let backing = Some(BackingName { name: b"base".to_vec(), format: "raw".to_owned() });
        let options = CreateOptions { extended_l2, backing, ..CreateOptions::new(SIZE) };
        let image = file.clone();
        env.block_on(|cx| async move { create(&cx, &*image, None, &options).await })
            .expect("not on an engine thread")
            .expect("created");
        graph.add_node("image", file.clone()).expect("added");
        graph.add_node("base", base.clone()).expect("added");
        let text = format!("driver=qcow2,file=image,backing=base{more}");
        let disk = graph.open(Options::parse(&text).expect("options")).expect("opened").top_node();
        file.take_log();
        base.take_log();
        Self { env, clock, cx, file, base, disk, _graph: graph }
    }

    fn writer(&self) -> &Writer {
        let node: &Qcow2Node = self.disk.as_any().downcast_ref().expect("a qcow2 node");
        node.image().writer.get().expect("writable")
    }

    fn count(&self, which: impl Fn(&Writer) -> &AtomicU64) -> u64 {
        which(self.writer()).load(Relaxed)
    }

    /// Runs what can run now; time stands.
    fn run(&self) {
        for _ in 0..8 {
            self.env.run_once(Some(Duration::ZERO)).expect("driven from here");
        }
    }

    fn start(&self, req: Request) -> Started {
        let (cx, disk) = (self.cx.clone(), self.disk.clone());
        let started = start(&self.cx, async move { cx.run(&*disk, req).await });
        self.run();
        started
    }

    #[track_caller]
    fn ends(&self, req: Request) {
        assert_eq!(self.start(req).now(), Some(Ok(())));
    }

    fn fill(offset: u64, len: u64, byte: u8) -> Request {
        let bufs = Buffers::alloc(len as usize, 4096);
        bufs.fill(byte);
        Request::write(offset, bufs)
    }

    #[track_caller]
    fn write(&self, offset: u64, len: u64, byte: u8) {
        self.ends(Self::fill(offset, len, byte));
    }

    #[track_caller]
    fn read(&self, offset: u64, len: u64) -> Vec<u8> {
        let bufs = Buffers::alloc(len as usize, 4096);
        self.ends(Request::read(offset, bufs.clone()));
        bufs.to_vec()
    }

    fn data_writes(&self) -> Vec<ByteRange> {
        let long = |op: &(Op, ByteRange)| op.0 == Op::Write && op.1.len >= CLUSTER;
        self.file.take_log().into_iter().filter(long).map(|(_, range)| range).collect()
    }

    /// The first cluster as the guest must see it with `byte` in `range`.
    fn expected(range: std::ops::Range<u64>, byte: u8) -> Vec<u8> {
        (0..CLUSTER).map(|i| if range.contains(&i) { byte } else { old(i) }).collect()
    }
}

#[test]
fn neighbours_join_a_staged_cluster_and_the_rest_is_read_once_at_the_flush() {
    let w = World::new(false, "");
    for i in [3, 1, 2, 7, 4] {
        w.write(i * 4 * K, 4 * K, 0xaa);
    }
    assert_eq!((w.count(|w| &w.counters.staged), w.count(|w| &w.counters.joined)), (1, 4));
    assert_eq!(w.base.begun(), 0, "nothing has been read for it");
    assert!(w.data_writes().is_empty());
    let mut expected = World::expected(4 * K..20 * K, 0xaa);
    expected[28 * 1024..32 * 1024].fill(0xaa);
    assert!(w.read(0, CLUSTER) == expected, "staged bytes lie over the base");
    w.base.take_log();
    w.ends(Request::flush());
    assert_eq!(w.base.take_log(), [(Op::Read, ByteRange { offset: 0, len: CLUSTER })], "one read");
    assert_eq!(w.data_writes().len(), 1, "one write");
    assert!(w.writer().stages.is_empty() && w.writer().stages.bytes() == 0);
    assert!(w.read(0, CLUSTER) == expected);
}

#[test]
fn a_cluster_that_its_writers_fill_is_written_without_a_read() {
    let w = World::new(false, "");
    for i in (0..16).rev() {
        w.write(CLUSTER + i * 4 * K, 4 * K, i as u8 + 1);
    }
    assert!(w.writer().stages.is_empty(), "the last one settled it");
    assert_eq!((w.base.begun(), w.data_writes().len()), (0, 1));
    assert_eq!(w.count(|w| &w.counters.filled), 1);
    let expected: Vec<u8> = (0..CLUSTER).map(|i| (i / 4096) as u8 + 1).collect();
    assert!(w.read(CLUSTER, CLUSTER) == expected);
}

#[test]
fn a_flush_that_comes_while_a_commit_settles_covers_what_was_staged_before_it() {
    let w = World::new(false, "");
    w.write(0, 4 * K, 1);
    // The commit of the first flush reads the rest of the first cluster, and hangs there.
    w.base.close();
    let first = w.start(Request::flush());
    assert_eq!((first.now(), w.base.begun()), (None, 1));
    w.write(8 * CLUSTER, 4 * K, 2);
    let second = w.start(Request::flush());
    w.base.open();
    w.run();
    assert_eq!((first.now(), second.now()), (Some(Ok(())), Some(Ok(()))));
    assert!(w.writer().stages.is_empty(), "the second cluster is in the file");
    let log = w.file.take_log();
    let data = log.iter().rposition(|(op, r)| *op == Op::Write && r.len == CLUSTER).expect("its data");
    assert!(log[data..].iter().any(|(op, _)| *op == Op::Flush), "and behind it a barrier");
}

#[test]
fn a_write_during_the_settling_of_its_cluster_waits_for_it_and_is_not_lost() {
    let w = World::new(false, "");
    w.write(0, 4 * K, 1);
    w.base.close();
    let flush = w.start(Request::flush());
    let late = w.start(World::fill(4 * K, 4 * K, 2));
    assert_eq!((flush.now(), late.now()), (None, None));
    assert_eq!(w.read(0, 4 * K), vec![1; 4096], "readers do not wait");
    w.base.open();
    w.run();
    assert_eq!((flush.now(), late.now()), (Some(Ok(())), Some(Ok(()))));
    assert_eq!(w.read(0, 12 * K)[..8192], [vec![1; 4096], vec![2; 4096]].concat());
}

#[test]
fn a_failed_settling_is_told_to_the_flush_and_loses_nothing() {
    let w = World::new(false, "");
    w.write(0, 4 * K, 1);
    w.base.fail(true);
    let flush = w.start(Request::flush());
    assert!(matches!(flush.now(), Some(Err(e)) if e.errno == libc::EIO), "{:?}", flush.now());
    assert_eq!(w.read(0, 4 * K), vec![1; 4096], "still staged");
    w.write(4 * K, 4 * K, 2);
    w.base.fail(false);
    w.ends(Request::flush());
    assert!(w.writer().stages.is_empty());
    assert!(w.read(0, 8 * K) == [vec![1; 4096], vec![2; 4096]].concat());
}

#[test]
fn a_settling_whose_write_fails_is_told_to_the_flush_and_repeated_by_the_next() {
    let w = World::new(false, "");
    w.write(0, 4 * K, 1);
    // The refill has ended; what fails is the write of the cluster.
    w.file.take_log();
    w.file.fail(true);
    let flush = w.start(Request::flush());
    assert!(matches!(flush.now(), Some(Err(e)) if e.errno == libc::EIO), "{:?}", flush.now());
    let first = w.file.take_log().into_iter().find(|(op, _)| *op == Op::Write);
    assert_eq!(first.map(|(_, range)| range.len), Some(CLUSTER), "the cluster itself");
    assert!(!w.writer().stages.is_empty());
    assert_eq!(w.read(0, 4 * K), vec![1; 4096], "still staged");
    w.file.fail(false);
    w.ends(Request::flush());
    assert!(w.writer().stages.is_empty());
    assert_eq!(w.data_writes().len(), 1, "written once more, and once only");
    assert!(w.read(0, CLUSTER) == World::expected(0..4 * K, 1));
}

#[test]
fn a_write_in_place_that_is_overtaken_by_zeroes_or_a_discard_does_not_bring_the_cluster_back() {
    for (extended, zeroed) in [(false, true), (false, false), (true, true), (true, false)] {
        let w = World::new(extended, ",discard=unmap");
        // In the file the second cluster lies before the first, so a write over the border of both takes the slow path.
        w.write(CLUSTER, CLUSTER, 0xaa);
        w.write(0, CLUSTER, 0xaa);
        w.ends(Request::flush());
        w.file.close();
        let late = w.start(World::fill(CLUSTER - 4 * K, 8 * K, 0xbb));
        assert_eq!(late.now(), None, "its data is on the way");
        let range = ByteRange { offset: 0, len: if extended && zeroed { CLUSTER / 2 } else { CLUSTER } };
        w.ends(if zeroed { Request::write_zeroes(range, Flags::MAY_UNMAP) } else { Request::discard(range) });
        w.file.open();
        w.run();
        assert_eq!(late.now(), Some(Ok(())));
        let seen = w.read(0, CLUSTER / 2);
        assert!(seen.iter().all(|b| *b == 0), "sub-clusters {extended}, zeroes {zeroed}: old data is back");
        w.ends(Request::flush());
    }
}

#[test]
fn closing_settles_each_stage_once() {
    let w = World::new(false, "");
    for i in [1, 3, 5] {
        w.write(i * CLUSTER, 4 * K, 1);
    }
    w.file.take_log();
    for round in 0..2 {
        let (cx, disk) = (w.cx.clone(), w.disk.clone());
        let closing = start(&w.cx, async move { disk.settle(&cx).await });
        w.run();
        assert_eq!(closing.now(), Some(Ok(())), "round {round}");
        let written: u64 = w.data_writes().iter().map(|r| r.len).sum();
        assert_eq!(written, if round == 0 { 3 * CLUSTER } else { 0 });
    }
    assert!(w.writer().stages.is_empty() && w.writer().stages.bytes() == 0);
}

#[test]
fn zeroes_and_discards_over_a_staged_cluster_take_its_place() {
    let w = World::new(false, ",discard=unmap");
    w.write(0, 4 * K, 1);
    w.ends(Request::write_zeroes(ByteRange { offset: 0, len: CLUSTER }, Flags::MAY_UNMAP));
    assert!(w.writer().stages.is_empty(), "all of it is zeros");
    assert_eq!(w.read(0, 8 * K), vec![0; 8192]);
    w.write(CLUSTER, 4 * K, 1);
    w.ends(Request::discard(ByteRange { offset: CLUSTER, len: CLUSTER }));
    assert!(w.writer().stages.is_empty());
    // A part of one: the rest keeps its content.
    w.write(2 * CLUSTER, 8 * K, 1);
    w.ends(Request::write_zeroes(ByteRange { offset: 2 * CLUSTER + 4 * K, len: 8 * K }, Flags::empty()));
    let mut expected = vec![old(2 * CLUSTER + 12 * K); 16384];
    expected[..4096].fill(1);
    expected[4096..12288].fill(0);
    assert!(w.read(2 * CLUSTER, 16 * K) == expected);
    w.ends(Request::flush());
    assert!(w.read(2 * CLUSTER, 16 * K) == expected);
    assert_eq!(w.base.begun(), 1 + 1, "read once for the guest, once for the copy");
}

#[test]
fn a_write_with_fua_settles_the_cluster_it_joins() {
    let w = World::new(false, "");
    w.write(0, 4 * K, 1);
    w.file.take_log();
    w.ends(World::fill(4 * K, 4 * K, 2).flags(Flags::FUA));
    assert!(w.writer().stages.is_empty());
    assert_eq!(w.file.take_log().last().map(|(op, _)| *op), Some(Op::Flush));
}

#[test]
fn memory_for_staging_is_bounded_and_pressure_settles() {
    let w = World::new(false, ",cow-staging-bytes=64k");
    for i in 0..SIZE / CLUSTER {
        w.write(i * CLUSTER + 4 * K, 4 * K, 9);
        assert!(w.writer().stages.bytes() <= 64 * K, "at cluster {i}");
    }
    assert!(w.count(|w| &w.counters.staged) > 32, "most of them were staged");
    w.ends(Request::flush());
    for i in 0..SIZE / CLUSTER {
        let at = i * CLUSTER;
        assert!(
            w.read(at, 12 * K) == [vec![old(at); 4096], vec![9; 4096], vec![old(at + 8 * K); 4096]].concat()
        );
    }
}

#[test]
fn with_no_memory_for_it_nothing_is_staged() {
    let w = World::new(false, ",cow-staging-bytes=0");
    w.write(0, 4 * K, 1);
    assert_eq!((w.count(|w| &w.counters.staged), w.data_writes().len()), (0, 1));
}

#[test]
fn a_stage_is_settled_when_it_is_old_and_then_no_timer_is_left() {
    let w = World::new(false, "");
    w.write(0, 4 * K, 1);
    let begin = w.clock.now();
    while !w.writer().stages.is_empty() {
        assert!(w.clock.now().since(begin) < Duration::from_secs(2), "never settled");
        w.env.run_once(Some(Duration::from_millis(50))).expect("driven from here");
    }
    assert!(w.clock.now().since(begin) >= Duration::from_secs(1), "it had a second to be joined");
    w.env.run_once(Some(Duration::from_secs(1))).expect("driven from here");
    let idle = w.clock.now();
    w.env.run_once(Some(Duration::from_secs(1000))).expect("driven from here");
    assert_eq!(w.clock.now().since(idle), Duration::from_secs(1000), "nothing wakes up any more");
}

#[test]
fn sub_clusters_are_staged_and_completed_each_for_itself() {
    let w = World::new(true, "");
    // Sub-clusters of 2 KiB: a whole one needs nothing old. Not in order: a writer who goes on in order is given the whole cluster.
    w.write(CLUSTER + 4 * K, 2 * K, 1);
    assert_eq!((w.count(|w| &w.counters.staged), w.base.begun()), (0, 0));
    w.write(CLUSTER + 3 * K, K, 2);
    assert_eq!(w.count(|w| &w.counters.staged), 1, "half a sub-cluster waits");
    w.write(CLUSTER + 2 * K, K, 3);
    assert!(w.writer().stages.is_empty(), "it is whole");
    assert_eq!(w.base.begun(), 0);
    let seen = w.read(CLUSTER, 8 * K);
    let old = |at| vec![old(CLUSTER + at); 2048];
    assert!(seen == [old(0), [vec![3; 1024], vec![2; 1024]].concat(), vec![1; 2048], old(6 * K)].concat());
}

#[test]
fn a_request_that_is_given_up_leaves_its_stage_whole() {
    let w = World::new(false, "");
    w.base.close();
    w.write(0, 4 * K, 1);
    let late = {
        let flush = w.start(Request::flush());
        let late = w.start(World::fill(4 * K, 4 * K, 2));
        assert_eq!((flush.now(), late.now()), (None, None));
        late
    };
    // The one who waits goes away; the work goes on.
    drop(late);
    w.base.open();
    w.run();
    assert_eq!(w.read(0, 8 * K), [vec![1; 4096], vec![2; 4096]].concat());
    w.ends(Request::flush());
    assert!(w.writer().stages.is_empty());
}
