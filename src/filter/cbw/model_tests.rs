//! Random guests, readers and background copies in virtual time, against a plain copy of the disk at the instant.
//!
//! Every call of source and target takes a random time and is carried out at the end of it, so requests overtake each other; depending on
//! the seed some fail, and guests run into their limit. A seed always gives the same run.

use super::CbwNode;
use crate::error::{Code, IoError, IoResult};
use crate::filter::testing::{Call, Fault, Held, HeldNode, Journal, Started, start};
use crate::graph::Graph;
use crate::io::memory::MemoryNode;
use crate::node::{Node, Vertex};
use crate::options::Options;
use crate::queue::Cx;
use crate::queue::virtual_env::virtual_env;
use crate::request::{Buffers, Class, Flags, Op, Request};
use crate::rt::{Rng, real::SplitMix};
use crate::sync::Arc;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};
use crate::units::ByteRange;
use serde_json::json;
use std::time::Duration;

const SIZES: [u64; 6] = [512, 4608, (64 << 10) - 512, 300_000, (1 << 20) + 512, 2 << 20];
const GRANULES: [u64; 3] = [4096, 16 << 10, 64 << 10];
const GUESTS: u64 = 4;
const READERS: u64 = 3;
const STEPS: u64 = 40;

/// What a run is allowed to do.
#[derive(Clone, Copy, Debug)]
struct Plan {
    seed: u64,
    size: u64,
    granule: u64,
    break_guest_write: bool,
    lose_range: bool,
    /// One call in so many fails; 0: none.
    read_faults: u64,
    write_faults: u64,
    /// Milliseconds; 0: none.
    timeout_ms: u64,
    /// Readers discard what they have read.
    discards: bool,
    /// A background copy runs beside the guests.
    job: bool,
    cache: bool,
}

impl Plan {
    fn new(seed: u64) -> Self {
        let rng = SplitMix::new(seed);
        let one_in = |n: u64| rng.next().is_multiple_of(n);
        let faulty = one_in(2);
        Self {
            seed,
            size: SIZES[(rng.next() % SIZES.len() as u64) as usize],
            granule: GRANULES[(rng.next() % GRANULES.len() as u64) as usize],
            break_guest_write: one_in(3),
            lose_range: one_in(2),
            read_faults: if faulty && one_in(2) { 20 } else { 0 },
            write_faults: if faulty && one_in(2) { 10 } else { 0 },
            timeout_ms: if one_in(3) { 1 } else { 0 },
            discards: one_in(4),
            job: one_in(2),
            cache: one_in(2),
        }
    }

    fn is_calm(&self) -> bool {
        self.read_faults == 0 && self.write_faults == 0 && self.timeout_ms == 0
    }
}

/// A run: the filter, and the disk as it was.
#[derive(Clone)]
struct Run {
    plan: Plan,
    cx: Cx,
    filter: Arc<Vertex>,
    view: Arc<Vertex>,
    before: Arc<Vec<u8>>,
    counts: Arc<Counts>,
}

/// What has happened, over all runs: a run in which nothing happens proves nothing.
#[derive(Debug, Default)]
struct Counts {
    checked: AtomicU64,
    lost: AtomicU64,
    broken: AtomicU64,
    guest_errors: AtomicU64,
    timeouts: AtomicU64,
    frozen: AtomicU64,
    retried: AtomicU64,
    released: AtomicU64,
    complete: AtomicU64,
}

impl Run {
    fn cbw(&self) -> &CbwNode {
        self.filter.base().as_any().downcast_ref().expect("a cbw node")
    }

    fn range(&self, rng: &SplitMix, max: u64) -> ByteRange {
        let offset = rng.next() % self.plan.size;
        ByteRange { offset, len: 1 + rng.next() % (self.plan.size - offset).min(max) }
    }

    async fn pause(&self, rng: &SplitMix) {
        let d = Duration::from_micros(rng.next() % 300);
        self.cx.sleep(d).await.expect("nobody cancels");
    }

    async fn guest(self, number: u64) -> IoResult {
        let rng = SplitMix::new(self.plan.seed * 1000 + number);
        for _ in 0..STEPS {
            let range = self.range(&rng, 200_000);
            let req = match rng.next() % 6 {
                0 => Request::write_zeroes(range, Flags::MAY_UNMAP),
                1 => Request::discard(range),
                2 => Request::flush(),
                _ => {
                    let bufs = Buffers::alloc(range.len as usize, 4096);
                    bufs.fill(0x80 | rng.next() as u8);
                    Request::write(range.offset, bufs)
                }
            };
            if let Err(e) = self.cx.run(&**self.filter.base(), req).await {
                assert!(self.plan.break_guest_write, "{e:?} {:?}", self.plan);
                assert_eq!(e.errno, libc::EIO);
                assert!(matches!(e.code, Code::CbwFailed | Code::CbwTimeout), "{e:?}");
                self.counts.guest_errors.fetch_add(1, Relaxed);
            }
            self.pause(&rng).await;
        }
        Ok(())
    }

    async fn reader(self, number: u64) -> IoResult {
        let rng = SplitMix::new(self.plan.seed * 1000 + 500 + number);
        for _ in 0..STEPS {
            let range = self.range(&rng, 150_000);
            match rng.next() % 4 {
                0 => self.check_status(range).await,
                1 if self.plan.discards && number == 0 => {
                    let discard = Request::discard(range);
                    let _ = self.cx.run(&**self.view.base(), discard).await;
                }
                _ => self.check_read(range).await,
            }
            self.pause(&rng).await;
        }
        Ok(())
    }

    async fn check_read(&self, range: ByteRange) {
        let bufs = Buffers::alloc(range.len as usize, 4096);
        match self.cx.run(&**self.view.base(), Request::read(range.offset, bufs.clone())).await {
            Ok(()) => {
                let want = &self.before[range.offset as usize..range.end() as usize];
                let got = bufs.to_vec();
                let wrong = || got.iter().zip(want).position(|(a, b)| a != b);
                assert!(got == want, "byte {:?} of {range:?}, {:?}", wrong(), self.plan);
                self.counts.checked.fetch_add(1, Relaxed);
            }
            Err(e) => self.check_error(e),
        }
    }

    fn check_error(&self, e: IoError) {
        match e.code {
            Code::Released => assert!(self.plan.discards, "{e:?}"),
            Code::RangeLost => assert!(self.plan.lose_range && !self.plan.is_calm(), "{e:?} {:?}", self.plan),
            Code::SnapshotBroken => assert!(!self.plan.is_calm(), "{e:?} {:?}", self.plan),
            // An error of the reader's own read.
            _ => assert!(self.plan.read_faults > 0 && e.errno == libc::EIO, "{e:?} {:?}", self.plan),
        }
    }

    async fn check_status(&self, range: ByteRange) {
        match self.cx.status(&**self.view.base(), range).await {
            Ok(e) => {
                assert!(e.len >= 1 && e.len <= range.len);
                let here = &self.before[range.offset as usize..(range.offset + e.len) as usize];
                assert!(!e.is_zero() || here == vec![0; here.len()], "{range:?} {e:?} {:?}", self.plan);
            }
            Err(e) => self.check_error(e),
        }
    }

    /// A background copy as a job does it; ends when nothing is left or the snapshot is broken.
    async fn job(self) -> IoResult {
        let rng = SplitMix::new(self.plan.seed * 1000 + 900);
        let chunk = 8 * self.plan.granule;
        loop {
            let failed = self.cbw().failed_from(0);
            let Some(range) = failed.or_else(|| self.cbw().needed_from(0, chunk)) else {
                if self.cbw().is_complete() || self.cbw().broken().is_some() {
                    return Ok(());
                }
                self.pause(&rng).await;
                continue;
            };
            let memory = match failed {
                Some(_) => Buffers::new(),
                None => Buffers::alloc(range.len as usize, 4096),
            };
            if self.cbw().copy(&self.cx, range, &memory, Class::Background).await.is_err() {
                if self.cbw().broken().is_some() {
                    return Ok(());
                }
                self.counts.retried.fetch_add(1, Relaxed);
            }
            self.pause(&rng).await;
        }
    }
}

fn one_run(plan: Plan, counts: &Arc<Counts>) {
    let (env, _) = virtual_env(plan.seed);
    let (graph, journal) = (Graph::new(env.clone()), Arc::new(Journal::default()));
    let held = |name: &'static str| {
        let held = Held::new(name, MemoryNode::new(plan.size), &journal);
        graph.add_node(name, Arc::new(HeldNode(held.clone()))).expect("a new name");
        held
    };
    let (src, tgt) = (held("src"), held("tgt"));
    if plan.cache {
        tgt.set_driver("ram-cache");
    }
    let before = contents(&plan);
    let counts = counts.clone();
    let body = |cx: Cx| async move {
        let first = Request::write(0, Buffers::from_bytes(&before));
        cx.run(&HeldNode(src.clone()), first).await.expect("filled");
        let open = |o| graph.open(Options::from_json(&o).expect("options")).expect("it opens");
        let filter = open(json!({
            "driver": "copy-before-write", "node-name": "cbw", "file": "src", "target": "tgt",
            "granularity": plan.granule, "cbw-timeout-ms": plan.timeout_ms,
            "on-cbw-error": if plan.break_guest_write { "break-guest-write" } else { "break-snapshot" },
            "loss-scope": if plan.lose_range { "range" } else { "snapshot" },
        }));
        let view = open(json!({"driver": "snapshot-access", "file": "cbw"}));
        src.set_delay(Duration::from_micros(800), plan.seed + 1);
        tgt.set_delay(Duration::from_micros(if plan.cache { 20 } else { 1500 }), plan.seed + 2);
        fault(&src, Op::Read, plan.read_faults, plan.seed + 3);
        fault(&tgt, Op::Write, plan.write_faults, plan.seed + 4);
        let run = Run { plan, cx: cx.clone(), filter, view, before: Arc::new(before), counts };
        let mut tasks: Vec<Started> = Vec::new();
        tasks.extend((0..GUESTS).map(|n| start(&cx, run.clone().guest(n))));
        tasks.extend((0..READERS).map(|n| start(&cx, run.clone().reader(n))));
        if plan.job {
            tasks.push(start(&cx, run.clone().job()));
        }
        for t in &tasks {
            t.result().await.expect("checked inside");
        }
        src.heal();
        tgt.heal();
        run.clone().job().await.expect("nothing fails any more");
        finish(&run, &tgt).await;
    };
    env.block_on(body).expect("not on an engine thread");
}

/// Half zeros, half numbers that no guest writes.
fn contents(plan: &Plan) -> Vec<u8> {
    let rng = SplitMix::new(plan.seed + 7);
    let mut data = vec![0; plan.size as usize];
    for piece in data.chunks_mut(8192) {
        if rng.next().is_multiple_of(2) {
            piece.fill(1 + (rng.next() % 127) as u8);
        }
    }
    data
}

fn fault(node: &Held, op: Op, one_in: u64, seed: u64) {
    if one_in > 0 {
        let rng = SplitMix::new(seed);
        let error = Fault::Fail(IoError::os(libc::EIO));
        node.fault(error, move |c, _| c == Call::Io(op) && rng.next().is_multiple_of(one_in));
    }
}

/// Everything is where it belongs, and nothing is left over.
async fn finish(run: &Run, tgt: &Arc<Held>) {
    let (plan, counts, cbw) = (&run.plan, &run.counts, run.cbw());
    assert!(cbw.quiet(&run.cx, None).await);
    let stats = cbw.stats().expect("it counts");
    assert_eq!(stats.cbw_late, 0);
    assert_eq!(tgt.reserved(), 0, "{plan:?}");
    counts.timeouts.fetch_add(stats.cbw_timeouts, Relaxed);
    counts.frozen.fetch_add(stats.cbw_frozen_waits, Relaxed);
    counts.released.fetch_add(cbw.released_bytes(), Relaxed);
    if cbw.broken().is_some() {
        assert!(!plan.is_calm(), "{plan:?}");
        counts.broken.fetch_add(1, Relaxed);
        return;
    }
    assert!(cbw.is_complete());
    assert_eq!(cbw.settled_bytes(), plan.size);
    let lost = cbw.lost();
    assert!(lost.is_empty() || plan.lose_range && !plan.is_calm(), "{plan:?}");
    counts.lost.fetch_add(lost.len() as u64, Relaxed);
    counts.complete.fetch_add(1, Relaxed);
    if plan.discards {
        return;
    }
    let stored = Buffers::alloc(plan.size as usize, 4096);
    run.cx.run(&HeldNode(tgt.clone()), Request::read(0, stored.clone())).await.expect("read");
    let stored = stored.to_vec();
    // Up to each lost range, and from the last one to the end.
    let end = ByteRange { offset: plan.size, len: 0 };
    let mut at = 0;
    for gone in lost.iter().map(|l| l.range).chain([end]) {
        let here = at as usize..gone.offset as usize;
        assert!(stored[here.clone()] == run.before[here.clone()], "{here:?} on the target, {plan:?}");
        at = gone.end();
    }
}

fn runs(seeds: std::ops::Range<u64>) -> Counts {
    let counts: Arc<Counts> = Arc::default();
    for seed in seeds {
        one_run(Plan::new(seed), &counts);
    }
    Arc::into_inner(counts).expect("the runs have ended")
}

#[test]
fn whatever_guests_readers_and_jobs_do_the_view_and_the_target_are_the_instant() {
    let c = runs(0..80);
    let all = [
        &c.checked,
        &c.lost,
        &c.broken,
        &c.guest_errors,
        &c.timeouts,
        &c.frozen,
        &c.retried,
        &c.released,
        &c.complete,
    ];
    assert!(all.iter().all(|n| n.load(Relaxed) > 0), "something never happened: {c:?}");
}
