//! Many threads at once on the real executor: each against a twin of its own part of the disk.

use super::super::testing::{Below, K, M, range};
use super::super::{CacheOptions, Overflow, RamCache};
use crate::io::{EngineKind, system_env};
use crate::node::{Edge, Node};
use crate::queue::{Cx, Env};
use crate::request::{Buffers, Class, Flags, Request};
use crate::rt::Rng;
use crate::rt::real::SplitMix;
use crate::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use crate::sync::{Arc, thread};

const THREADS: u64 = 4;
const STEPS: u64 = 150;
/// Parts of the disk alternate between threads in pieces of this size, so neighbours belong to different threads.
const PIECE: u64 = 64 * K;
const PIECES: u64 = 24;

struct Part {
    thread: u64,
    twin: Vec<u8>,
    rng: SplitMix,
}

impl Part {
    /// A random range within one piece: where it is on the disk, and in the twin.
    fn range(&self) -> (u64, usize, u64) {
        let piece = self.rng.next() % PIECES;
        let at = self.rng.next() % 16 * 4 * K;
        let len = (1 + self.rng.next() % 16) * 4 * K;
        let len = len.min(PIECE - at);
        ((piece * THREADS + self.thread) * PIECE + at, (piece * PIECE + at) as usize, len)
    }

    async fn step(&mut self, cx: &Cx, cache: &Arc<RamCache>, step: u64, cancelled: &AtomicUsize) {
        let (offset, at, len) = self.range();
        let place = &mut self.twin[at..at + len as usize];
        let byte = (step + self.thread * 50) as u8;
        let class = if self.rng.next().is_multiple_of(6) { Class::Background } else { Class::Guest };
        match self.rng.next() % 10 {
            0..=4 => {
                let mut own = cache.reserve(cx, len, Class::Guest).await.expect("waits for space");
                assert!(own.len() == len);
                let bufs = own.take(len);
                bufs.fill(byte);
                cx.run(&**cache, Request::write(offset, bufs).class(class)).await.expect("writes");
                place.fill(byte);
            }
            5 => {
                let bufs = Buffers::from_bytes(&vec![byte; len as usize]);
                let flags = if step.is_multiple_of(2) { Flags::FUA } else { Flags::empty() };
                cx.run(&**cache, Request::write(offset, bufs).flags(flags)).await.expect("writes");
                place.fill(byte);
            }
            6 => {
                let zeroes = Request::write_zeroes(range(offset, len), Flags::empty()).class(class);
                cx.run(&**cache, zeroes).await.expect("zeroes");
                place.fill(0);
            }
            7 => {
                // A reservation that is given up, with or without having been served.
                let (own, cancel) = cx.with_new_cancel();
                let node = cache.clone();
                cx.spawn(async move { drop(node.reserve(&own, M / 4, Class::Guest).await) });
                cancel.cancel();
                cancelled.fetch_add(1, Relaxed);
            }
            8 => cx.run(&**cache, Request::flush()).await.expect("flushes"),
            _ => {
                let bufs = Buffers::alloc(len as usize, 4096);
                cx.run(&**cache, Request::read(offset, bufs.clone())).await.expect("reads");
                assert!(bufs.to_vec() == place, "thread {} step {step} at {offset}", self.thread);
            }
        }
    }
}

fn run(overflow: Overflow, spill: bool) {
    let env = system_env(EngineKind::Auto, None);
    env.start(2).expect("starts");
    let size = THREADS * PIECES * PIECE;
    let (below, p) = (Below::new(size), Below::new(4 * M));
    let options = CacheOptions {
        capacity: M,
        overflow,
        spill_quota: if spill { 4 * M } else { 0 },
        drain_delay_ms: 1,
        drain_workers: 4,
        ..CacheOptions::default()
    };
    let spill = spill.then(|| Edge::to_node(p));
    let cache = RamCache::new(&env, "c", Edge::to_node(below.clone()), spill, options).expect("opens");
    let cancelled = AtomicUsize::new(0);
    let parts: Vec<Part> = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (env, cache, cancelled): (&Arc<Env>, _, _) = (&env, &cache, &cancelled);
                scope.spawn(move || {
                    let mut part = Part {
                        thread,
                        twin: vec![0xEE; (PIECES * PIECE) as usize],
                        rng: SplitMix::new(thread),
                    };
                    for step in 0..STEPS {
                        let part = &mut part;
                        env.block_on(|cx| async move { part.step(&cx, cache, step, cancelled).await })
                            .expect("a thread of its own");
                    }
                    part
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().expect("no panic")).collect()
    });
    assert!(cancelled.load(Relaxed) > 0);
    env.block_on(|cx| async move {
        cache.settle(&cx).await.expect("settles");
        assert!(cache.is_empty());
        // What the cancelled tasks had is back when they have ended, which this thread's executor sees to.
        while cache.get("used").as_deref() != Some("0") {
            cx.sleep(std::time::Duration::from_millis(1)).await.expect("not cancelled");
        }
    })
    .expect("a thread of its own");
    for part in parts {
        for piece in 0..PIECES {
            let got = below.bytes((piece * THREADS + part.thread) * PIECE, PIECE);
            let want = &part.twin[(piece * PIECE) as usize..][..PIECE as usize];
            assert!(got == want, "thread {} piece {piece}", part.thread);
        }
    }
    env.shut_down();
}

#[test]
fn threads_that_wait_for_space_read_and_end_like_their_twins() {
    run(Overflow::Wait, false);
}

#[test]
fn threads_that_write_through_read_and_end_like_their_twins() {
    run(Overflow::WriteThrough, false);
}

#[test]
fn threads_that_spill_read_and_end_like_their_twins() {
    run(Overflow::Spill, true);
}
