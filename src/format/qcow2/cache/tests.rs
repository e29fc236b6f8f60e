//! The cache: one load per slice, what is evicted and what is not, dirty parts, torn pairs.

use super::super::addr::HostOffset;
use super::super::entry::Words;
use super::super::layout::Layout;
use super::super::testing::TestFile;
use super::L2Cache;
use crate::error::IoResult;
use crate::queue::{Cx, testing};
use crate::request::Op;
use crate::sync::atomic::{AtomicBool, Ordering::SeqCst};
use crate::sync::{Arc, thread};
use std::future::Future;
use std::pin::Pin;
use std::task::Poll;

const TABLE: HostOffset = HostOffset(0);
const LAYOUT: Layout = Layout {
    version: 3,
    cluster_bits: 16,
    slice_bits: 12,
    extended: false,
    refcount_order: 4,
    data_file: false,
};

/// A table of 8192 entries in 16 slices; entry `i` is `i`.
fn table_file() -> Arc<TestFile> {
    TestFile::new((0..8192u64).flat_map(|i| i.to_be_bytes()).collect())
}

fn cache(file: &Arc<TestFile>, slices: u64) -> Arc<L2Cache> {
    L2Cache::new(LAYOUT, 64, file.edge(), slices << 12, 512, None)
}

fn run<F: Future>(body: impl FnOnce(Cx) -> F) -> F::Output {
    testing::block_on(&testing::env(0), body)
}

type Loaded = IoResult<Arc<super::Slice>>;

fn plain(entry: u64) -> Words {
    Words { entry, bitmap: 0 }
}

/// Runs all to their ends.
async fn all<F: Future + Unpin>(mut futures: Vec<F>) -> Vec<F::Output> {
    let mut out = Vec::new();
    std::future::poll_fn(|cx| {
        futures.retain_mut(|f| match Pin::new(f).poll(cx) {
            Poll::Ready(v) => {
                out.push(v);
                false
            }
            Poll::Pending => true,
        });
        if futures.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    out
}

#[test]
fn a_slice_is_loaded_once_whoever_asks_and_several_at_once() {
    let file = table_file();
    let cache = cache(&file, 16);
    run(|cx| async move {
        file.close();
        let mut asking: Vec<Pin<Box<dyn Future<Output = Loaded>>>> = Vec::new();
        for key in [0, 1, 2, 1, 0, 1] {
            let (cache, cx) = (cache.clone(), cx.clone());
            asking.push(Box::pin(async move { cache.get(&cx, key, TABLE).await }));
        }
        let opener = {
            let file = file.clone();
            Box::pin(std::future::poll_fn(move |cx| {
                if file.begun() < 3 {
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                file.open();
                Poll::Ready(Ok(Arc::new(super::Slice::new(9, [0, 0], false, 512))))
            }))
        };
        asking.push(opener);
        let slices = all(asking).await;
        assert_eq!(slices.len(), 7);
        let log = file.take_log();
        assert_eq!(log.len(), 3, "three loads were on their way at once and no more came: {log:?}");
        assert!(log.iter().all(|(op, r)| *op == Op::Read && r.len == 4096));
        assert_eq!(cache.peek(2).expect("cached").entry(3), plain(2 * 512 + 3));
        cache.get(&cx, 2, TABLE).await.expect("a hit");
        assert_eq!(file.begun(), 0);
    });
}

#[test]
fn a_load_goes_on_when_who_began_it_gives_up() {
    let file = table_file();
    let cache = cache(&file, 16);
    run(|cx| async move {
        file.close();
        {
            let mut first = Box::pin(cache.get(&cx, 5, TABLE));
            std::future::poll_fn(|c| {
                assert!(first.as_mut().poll(c).is_pending());
                if file.begun() == 0 {
                    c.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Poll::Ready(())
            })
            .await;
        }
        file.open();
        let slice = cache.get(&cx, 5, TABLE).await.expect("loaded");
        assert_eq!((slice.entry(0), file.begun()), (plain(5 * 512), 1));
    });
}

#[test]
fn a_failed_load_is_tried_again() {
    let file = table_file();
    let cache = cache(&file, 16);
    run(|cx| async move {
        file.fail(true);
        assert_eq!(cache.get(&cx, 0, TABLE).await.expect_err("fails").errno, libc::EIO);
        file.fail(false);
        assert_eq!(cache.get(&cx, 0, TABLE).await.expect("loads").entry(7), plain(7));
    });
}

#[test]
fn what_lies_past_the_end_of_the_file_is_zeros() {
    let file = TestFile::new(7u64.to_be_bytes().to_vec());
    let cache = cache(&file, 16);
    run(|cx| async move {
        let first = cache.get(&cx, 0, TABLE).await.expect("loads");
        assert_eq!((first.entry(0), first.entry(1)), (plain(7), plain(0)));
        let second = cache.get(&cx, 1, TABLE).await.expect("loads");
        assert_eq!(second.entry(511), plain(0));
    });
}

#[test]
fn the_cache_stays_in_its_bounds_and_keeps_what_is_looked_at() {
    let file = table_file();
    let cache = cache(&file, 4);
    assert_eq!(cache.slices_max(), 4);
    run(|cx| async move {
        for key in 0..16 {
            cache.get(&cx, key, TABLE).await.expect("loads");
            assert!(cache.len() <= 4, "{}", cache.len());
        }
        file.take_log();
        // Keys of one shard, since each shard has a clock of its own: with two shards, even ones.
        for key in [2, 4, 6, 8, 10, 12] {
            cache.get(&cx, 0, TABLE).await.expect("loads");
            cache.get(&cx, key, TABLE).await.expect("loads");
        }
        let loads_of_0 = file.take_log().iter().filter(|(_, r)| r.offset == 0).count();
        assert!(loads_of_0 <= 2, "it was looked at all the time, and loaded {loads_of_0} times");
        cache.set_capacity(2 << 12);
        assert!(cache.len() <= 2);
        cache.sweep();
        cache.sweep();
        assert!(cache.is_empty());
        assert!(cache.peek(0).is_none());
    });
}

#[test]
fn after_the_clean_interval_a_miss_drops_what_was_not_looked_at() {
    let file = table_file();
    let interval = Some(std::time::Duration::from_nanos(1));
    let cache = L2Cache::new(LAYOUT, 64, file.edge(), 64 << 12, 512, interval);
    run(|cx| async move {
        for key in 0..4 {
            cache.get(&cx, key, TABLE).await.expect("loads");
            // The last one is always there: it has just been loaded.
            assert!(cache.peek(key).is_some());
        }
        assert!(cache.len() < 4, "every miss came after an interval");
    });
}

#[test]
fn pinned_slices_and_slices_in_a_cut_are_not_evicted() {
    let file = table_file();
    let cache = cache(&file, 2);
    run(|cx| async move {
        let pinned = cache.pin(&cx, 3, TABLE).await.expect("loads");
        assert_eq!(pinned.entry(0), plain(3 * 512));
        for key in (0..16).filter(|k| *k != 3) {
            cache.get(&cx, key, TABLE).await.expect("loads");
        }
        pinned.set(1, plain(0x70000));
        drop(pinned);
        cache.get(&cx, 5, TABLE).await.expect("loads");
        assert_eq!(cache.peek(3).expect("dirty").entry(1), plain(0x70000));
        let mut cut = Vec::new();
        cache.take_dirty(|slice, parts| cut.push((slice.clone(), parts)));
        assert_eq!(cut.len(), 1);
        assert!(!cache.is_dirty() && cache.kept() == 1);
        for key in 5..16 {
            cache.get(&cx, key, TABLE).await.expect("loads");
        }
        assert!(cache.peek(3).is_some(), "its parts are not written yet");
        cache.release_cut(&cut[0].0);
        assert_eq!(cache.kept(), 0);
        for key in 5..16 {
            cache.get(&cx, key, TABLE).await.expect("loads");
        }
        assert!(cache.peek(3).is_none(), "nothing keeps it any more");
    });
}

#[test]
fn a_guest_that_goes_in_steps_has_most_of_the_cache() {
    let file = table_file();
    let cache = L2Cache::new(LAYOUT, 1 << 20, file.edge(), 256 << 12, 512, None);
    run(|cx| async move {
        for step in [1u64, 2, 32, 1024] {
            let before = cache.loads();
            for _ in 0..3 {
                for n in 0..64 {
                    cache.get(&cx, n * step, TABLE).await.expect("loads");
                }
            }
            let loads = cache.loads() - before;
            // A quarter of the cache: hardly any is loaded twice, whatever the step.
            assert!((1..=80).contains(&loads), "step {step}: {loads} loads");
        }
    });
}

#[test]
fn a_cut_has_the_parts_that_changed_and_a_later_change_is_in_the_next() {
    let file = table_file();
    let cache = cache(&file, 16);
    run(|cx| async move {
        let pinned = cache.pin(&cx, 0, TABLE).await.expect("loads");
        pinned.set(0, plain(1 << 16));
        pinned.set(63, plain(2 << 16));
        pinned.set(448, plain(3 << 16));
        let mut cut = Vec::new();
        cache.take_dirty(|slice, parts| {
            // A change between taking the bits and the end of the cut.
            pinned.set(64, plain(4 << 16));
            cut.push((slice.clone(), parts));
        });
        let (slice, parts) = cut.pop().expect("one slice");
        assert!(cut.is_empty());
        assert_eq!(
            parts.iter().map(|p| (p.offset, p.words.len())).collect::<Vec<_>>(),
            [(0, 64), (3584, 64)]
        );
        assert_eq!((parts[0].words[0], parts[0].words[63], parts[1].words[0]), (1 << 16, 2 << 16, 3 << 16));
        // It could not be written.
        cache.mark_again(&slice, &parts);
        cache.release_cut(&slice);
        let mut offsets = Vec::new();
        cache.take_dirty(|slice, parts| {
            offsets.extend(parts.iter().map(|p| p.offset));
            cache.release_cut(slice);
        });
        assert_eq!(offsets, [0, 512, 3584]);
        assert!(!cache.is_dirty() && cache.kept() == 0 && !slice.is_dirty());
    });
}

#[test]
fn a_new_table_is_all_zeros_and_all_dirty_unless_the_file_has_it() {
    let file = TestFile::new(Vec::new());
    let cache = cache(&file, 64);
    cache.insert_new(1, false);
    cache.insert_new(2, true);
    let mut keys = Vec::new();
    cache.take_dirty(|slice, parts| {
        keys.push(slice.key());
        assert_eq!(parts.iter().map(|p| p.words.len()).sum::<usize>() * 8, slice.bytes());
        assert!(parts.iter().all(|p| p.words.iter().all(|w| *w == 0)));
        cache.release_cut(slice);
    });
    assert_eq!(keys, (16..32).collect::<Vec<_>>());
    assert_eq!(cache.peek(47).expect("there").entry(0), Words::NONE);
    cache.forget_table(1);
    assert!(cache.peek(16).is_none() && cache.peek(32).is_some());
}

#[test]
fn a_miss_waits_while_everything_must_be_written_first() {
    let file = table_file();
    let cache = cache(&file, 2);
    run(|cx| async move {
        for key in [0, 1] {
            let pinned = cache.pin(&cx, key, TABLE).await.expect("loads");
            pinned.set(0, plain(1 << 16));
        }
        assert!(cache.wants_commit());
        cache.half_dirty().await;
        let mut miss = Box::pin(cache.get(&cx, 2, TABLE));
        std::future::poll_fn(|c| {
            assert!(miss.as_mut().poll(c).is_pending());
            Poll::Ready(())
        })
        .await;
        let begun = file.begun();
        cache.get(&cx, 0, TABLE).await.expect("a hit does not wait");
        assert_eq!(file.begun(), begun, "no load was begun");
        let mut cut = Vec::new();
        cache.take_dirty(|slice, _| cut.push(slice.clone()));
        cut.iter().for_each(|slice| cache.release_cut(slice));
        assert_eq!(miss.await.expect("loads").entry(0), plain(1024));
    });
}

#[test]
fn entries_of_two_words_are_never_seen_in_halves() {
    let file = TestFile::new(vec![0; 1 << 16]);
    let layout = Layout { extended: true, ..LAYOUT };
    let cache = L2Cache::new(layout, 64, file.edge(), 1 << 20, 512, None);
    let pinned = run(|cx| {
        let cache = cache.clone();
        async move { cache.pin(&cx, 0, TABLE).await.expect("loads") }
    });
    let done = AtomicBool::new(false);
    let pair = |n: u64| Words { entry: n << 16, bitmap: n };
    thread::scope(|scope| {
        for first in [1u64, 2] {
            let pinned = &pinned;
            scope.spawn(move || (0..50_000).for_each(|i| pinned.set(first as usize, pair(first + 2 * i))));
        }
        let readers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let mut seen = 0;
                    while !done.load(SeqCst) || seen == 0 {
                        for index in [1, 2] {
                            let w = cache.peek(0).expect("pinned").entry(index);
                            assert_eq!(w.entry >> 16, w.bitmap);
                            assert!(w.bitmap == 0 || w.bitmap % 2 == index as u64 % 2);
                            seen += 1;
                        }
                        cache.take_dirty(|slice, parts| {
                            let words = &parts[0].words;
                            assert!(words.chunks(2).all(|p| p[0] >> 16 == p[1]));
                            cache.release_cut(slice);
                        });
                    }
                })
            })
            .collect();
        while pinned.entry(1) != pair(1 + 2 * 49_999) || pinned.entry(2) != pair(2 + 2 * 49_999) {
            std::hint::spin_loop();
        }
        done.store(true, SeqCst);
        readers.into_iter().for_each(|r| r.join().expect("no half entry"));
    });
}

#[test]
fn changes_survive_threads_that_evict_everything_all_the_time() {
    // Four threads raise counters in entries of a table much larger than the cache; a fifth commits. At the end the file has every change.
    const THREADS: u64 = 4;
    const ROUNDS: u64 = 400;
    let file = TestFile::new(vec![0; 1 << 16]);
    let cache = cache(&file, 4);
    let (done, env) = (&AtomicBool::new(false), &testing::env(1));
    let commit = |cx: &Cx| {
        let (cache, file, cx) = (cache.clone(), file.clone(), cx.clone());
        async move {
            let mut cut = Vec::new();
            cache.take_dirty(|slice, parts| cut.push((slice.clone(), parts)));
            for (slice, parts) in cut {
                for part in &parts {
                    let bytes: Vec<u8> = part.words.iter().flat_map(|w| w.to_be_bytes()).collect();
                    let at = slice.key() * 4096 + part.offset as u64;
                    let data = crate::request::Buffers::from_bytes(&bytes);
                    cx.run(&*file, crate::request::Request::write(at, data)).await.expect("written");
                }
                cache.release_cut(&slice);
            }
        }
    };
    thread::scope(|scope| {
        let writers: Vec<_> = (0..THREADS)
            .map(|t| {
                let cache = &cache;
                scope.spawn(move || {
                    testing::block_on(env, |cx| async move {
                        for i in 0..ROUNDS {
                            // Each thread has entries of its own in every slice.
                            let pinned = cache.pin(&cx, i * 7 % 16, TABLE).await.expect("loads");
                            let index = (t * 100) as usize;
                            let old = pinned.entry(index).entry;
                            pinned.set(index, plain(old + 1));
                        }
                    });
                })
            })
            .collect();
        let committer = scope.spawn(|| {
            testing::block_on(env, |cx| async move {
                while !done.load(SeqCst) {
                    commit(&cx).await;
                }
                commit(&cx).await;
            });
        });
        writers.into_iter().for_each(|w| w.join().expect("writer"));
        done.store(true, SeqCst);
        committer.join().expect("committer");
    });
    let content = file.content();
    let word = |i: usize| u64::from_be_bytes(content[i * 8..i * 8 + 8].try_into().unwrap());
    for t in 0..THREADS as usize {
        let sum: u64 = (0..16).map(|s| word(s * 512 + t * 100)).sum();
        assert_eq!(sum, ROUNDS, "thread {t}");
    }
    // What was pinned beyond the size goes when somebody comes for more.
    testing::block_on(env, |cx| async move {
        for key in 0..16 {
            cache.get(&cx, key, TABLE).await.expect("loads");
        }
        assert!(cache.kept() == 0 && cache.len() <= 4, "{} slices", cache.len());
    });
}
