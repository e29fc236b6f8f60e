//! Random operations against a twin without a cache.

use super::super::testing::*;
use super::super::{CacheOptions, Overflow, RamCache};
use crate::events::{Event, EventKind, Side};
use crate::node::Node;
use crate::request::{Buffers, Class, Flags, Op, Request};
use crate::rt::Rng;
use crate::rt::real::SplitMix;
use crate::sync::Arc;
use std::time::Duration;

const SIZE: u64 = 6 * M + 512;

/// One random request, carried out on the twin and made for the cache.
fn request(rng: &SplitMix, w: &World, cache: &Arc<RamCache>, twin: &mut [u8], step: u32) -> Option<Request> {
    let len = match rng.next() % 4 {
        0 => 1 + rng.next() % 9000,
        1 => 64 * K,
        2 => 512 * (1 + rng.next() % 300),
        _ => 1 + rng.next() % M,
    };
    let offset = match rng.next() % 3 {
        0 => rng.next() % (SIZE / (64 * K)) * 64 * K,
        _ => rng.next() % SIZE,
    };
    let r = range(offset, len.min(SIZE - offset));
    let place = &mut twin[r.offset as usize..r.end() as usize];
    let class = if rng.next().is_multiple_of(5) { Class::Background } else { Class::Guest };
    let flags = if rng.next().is_multiple_of(8) { Flags::FUA } else { Flags::empty() };
    Some(match rng.next() % 10 {
        0..=4 => {
            let data: Vec<u8> = (0..r.len).map(|i| (step as u8) ^ (i / 512) as u8).collect();
            place.copy_from_slice(&data);
            let mut bufs = Buffers::from_bytes(&data);
            if rng.next().is_multiple_of(2) && r.len <= cache.batch() {
                // Moved, if there is space without waiting.
                let mut own = taken(&w.reserve(cache, r.len))?;
                let moved = own.take(r.len);
                moved.copy_from_slice(&data);
                bufs = moved;
            }
            Request::write(r.offset, bufs).class(class).flags(flags)
        }
        5 | 6 => {
            place.fill(0);
            Request::write_zeroes(r, Flags::MAY_UNMAP | flags).class(class)
        }
        7 => {
            place.fill(0xDD);
            Request::discard(r)
        }
        8 => Request::flush(),
        _ => {
            let bufs = Buffers::alloc(r.len as usize, 512);
            assert_eq!(w.finish(cache, Request::read(r.offset, bufs.clone())), Ok(()));
            assert!(bufs.to_vec() == place, "step {step}: {r:?} reads differently");
            return None;
        }
    })
}

/// `step` is the overflow step that must have been taken, or the run was too tame.
fn run(seed: u64, options: CacheOptions, spill: bool, step: Side) {
    let rng = SplitMix::new(seed);
    let (w, below, p) = (World::new(), Below::new(SIZE), Below::new(4 * M));
    let capacity = options.capacity;
    let cache = w.cache_with(&below, spill.then_some(&p), options);
    let mut twin = below.bytes(0, SIZE);
    for step in 0..250 {
        if let Some(req) = request(&rng, &w, &cache, &mut twin, step) {
            assert_eq!(w.finish(&cache, req), Ok(()), "step {step}");
        }
        if rng.next().is_multiple_of(16) {
            below.fail(Op::Write, range(rng.next() % SIZE, 1), 1, libc::EIO);
            w.advance(Duration::from_millis(rng.next() % 300));
            below.recover();
        }
        let used: u64 = cache.get("used").expect("a property").parse().expect("a number");
        assert!(used <= capacity, "step {step}");
        let peak: u64 = cache.get("peak").expect("a property").parse().expect("a number");
        assert!(peak <= capacity, "step {step}: {peak} of {capacity}");
    }
    let events: Vec<_> = std::iter::from_fn(|| w.env.events.next()).collect();
    let taken = |e: &&Event| e.kind == EventKind::Overflow && e.side == step;
    assert!(events.iter().find(taken).is_some(), "seed {seed}: {events:?}");
    assert_eq!(w.settle(&cache), Ok(()));
    assert!(below.bytes(0, SIZE) == twin, "seed {seed}");
    assert_eq!((cache.get("used").as_deref(), cache.get("spilled").as_deref()), (Some("0"), Some("0")));
    w.run();
    assert!(w.is_idle());
}

#[test]
fn a_cache_reads_and_ends_like_its_twin() {
    let options =
        CacheOptions { capacity: M, drain_workers: 1, drain_delay_ms: 5000, ..CacheOptions::default() };
    for seed in 0..3 {
        run(seed, options.clone(), false, Side::Cache);
    }
}

#[test]
fn a_cache_that_writes_through_when_full_reads_and_ends_like_its_twin() {
    let options = CacheOptions { capacity: M, overflow: Overflow::WriteThrough, ..CacheOptions::default() };
    for seed in 10..13 {
        run(seed, options.clone(), false, Side::Target);
    }
}

#[test]
fn a_cache_that_spills_reads_and_ends_like_its_twin() {
    let options = CacheOptions {
        capacity: M,
        overflow: Overflow::Spill,
        spill_quota: 4 * M,
        drain_workers: 1,
        drain_delay_ms: 5000,
        ..CacheOptions::default()
    };
    for seed in 20..23 {
        run(seed, options.clone(), true, Side::Spill);
    }
}
