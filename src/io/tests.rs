//! One test body over both engines, direct and buffered, and every odd size.

use super::file::FileNode;
use super::uring_allowed;
use crate::error::IoResult;
use crate::node::Node;
use crate::options::Options;
use crate::queue::{Cx, Env, testing};
use crate::request::{Buffers, Flags, Op, Request};
use crate::rt::{Rng, real::SplitMix};
use crate::sync::Arc;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::units::ByteRange;

const SIZES: &[u64] = &[512, 1000, 4608, (64 << 10) - 512, 64 << 10, (1 << 20) + 512];

struct Setup {
    env: Arc<Env>,
    file: tempfile::NamedTempFile,
}

fn setup(size: u64) -> Setup {
    let folder = std::env::current_dir().expect("a folder").join("target");
    let file = tempfile::NamedTempFile::new_in(folder).expect("a file on a real file system");
    file.as_file().set_len(size).expect("resized");
    Setup { env: testing::env(0), file }
}

impl Setup {
    fn open(&self, aio: &str, direct: bool, more: &str) -> Arc<FileNode> {
        let direct = if direct { "on" } else { "off" };
        let text = format!("filename={},aio={aio},cache.direct={direct}{more}", self.file.path().display());
        FileNode::open(Options::parse(&text).expect("options"), uring_allowed()).expect("it opens")
    }
}

fn engines() -> Vec<&'static str> {
    if uring_allowed() {
        vec!["threads", "io_uring"]
    } else {
        eprintln!("SKIPPED: io_uring is not allowed here");
        vec!["threads"]
    }
}

async fn read(cx: &Cx, node: &FileNode, at: u64, len: usize, align: usize) -> IoResult<Vec<u8>> {
    let bufs = Buffers::alloc(len + align, 4096).slice(align, len);
    bufs.fill(0xee);
    cx.run(node, Request::read(at, bufs.clone())).await?;
    Ok(bufs.to_vec())
}

#[test]
fn random_requests_agree_with_a_vector_for_every_engine_cache_mode_and_size() {
    for size in SIZES {
        for aio in engines() {
            for direct in [false, true] {
                let s = setup(*size);
                let node = s.open(aio, direct, ",discard=unmap");
                let rng = SplitMix::new(*size);
                let what = format!("size {size} aio {aio} direct {direct}");
                testing::block_on(&s.env, |cx| async move { random_requests(&cx, &node, &rng, &what).await });
                let meta = std::fs::metadata(s.file.path()).expect("it is there");
                assert_eq!(meta.len(), *size, "the file keeps its size");
            }
        }
    }
}

/// Needs a block device that may be overwritten (a loop device over a file of a few MiB will do), given in the environment.
#[test]
fn random_requests_agree_with_a_vector_on_a_block_device() {
    let Ok(device) = std::env::var("COBWEB_TEST_BLOCK_DEVICE") else {
        eprintln!("SKIPPED: COBWEB_TEST_BLOCK_DEVICE is not set");
        return;
    };
    let env = testing::env(0);
    for aio in engines() {
        for direct in ["off", "on"] {
            let text = format!("filename={device},aio={aio},cache.direct={direct},discard=unmap");
            let node =
                FileNode::open(Options::parse(&text).expect("options"), uring_allowed()).expect("it opens");
            let rng = SplitMix::new(1);
            let what = format!("{device} aio {aio} direct {direct}");
            testing::block_on(&env, |cx| async move {
                let all = ByteRange { offset: 0, len: node.limits().size };
                cx.run(&*node, Request::write_zeroes(all, Flags::empty())).await.expect("zeroed");
                random_requests(&cx, &node, &rng, &what).await;
            });
        }
    }
}

async fn random_requests(cx: &Cx, node: &FileNode, rng: &SplitMix, what: &str) {
    let size = node.limits().size;
    let mut model = vec![0u8; size as usize];
    for step in 0..300 {
        let mut offset = rng.next() % size;
        let mut len = 1 + rng.next() % (size - offset).min(100_000);
        if rng.next().is_multiple_of(2) {
            (offset, len) = (offset & !511, len.next_multiple_of(512).min(size - (offset & !511)));
        }
        let range = ByteRange { offset, len };
        let place = offset as usize..(offset + len) as usize;
        let memory = (rng.next() % 3) as usize;
        match rng.next() % 8 {
            0..=2 => {
                let data: Vec<u8> = (0..len).map(|i| (step as u64 * 31 + i) as u8 | 1).collect();
                let bufs = Buffers::alloc(len as usize + memory, 4096).slice(memory, len as usize);
                bufs.copy_from_slice(&data);
                let flags = if step % 5 == 0 { Flags::FUA } else { Flags::empty() };
                cx.run(node, Request::write(offset, bufs).flags(flags)).await.expect(what);
                model[place].copy_from_slice(&data);
            }
            3 => {
                let flags = if step % 2 == 0 { Flags::MAY_UNMAP } else { Flags::FUA };
                cx.run(node, Request::write_zeroes(range, flags)).await.expect(what);
                model[place].fill(0);
            }
            4 => {
                cx.run(node, Request::discard(range)).await.expect(what);
                let got = read(cx, node, offset, len as usize, 0).await.expect(what);
                for (m, g) in model[place].iter_mut().zip(got) {
                    assert!(g == *m || g == 0, "{what}: a discard makes zeros or leaves data");
                    *m = g;
                }
            }
            5 => cx.run(node, Request::flush()).await.expect(what),
            6 => {
                let e = cx.status(node, range).await.expect(what);
                assert!(e.len >= 1 && e.len <= len, "{what}");
                if e.is_zero() {
                    assert!(
                        model[place][..e.len as usize].iter().all(|b| *b == 0),
                        "{what}: a hole has no data"
                    );
                }
            }
            _ => {
                let got = read(cx, node, offset, len as usize, memory).await.expect(what);
                assert!(got == model[place], "{what}: step {step} read {offset}+{len}");
            }
        }
    }
    let got = read(cx, node, 0, size as usize, 0).await.expect(what);
    assert!(got == model, "{what}");
}

#[test]
fn requests_past_the_end_and_writes_to_a_read_only_file_are_refused() {
    let s = setup(4608);
    let node = s.open("threads", false, ",read-only=on");
    testing::block_on(&s.env, |cx| async move {
        let e = read(&cx, &node, 4608, 1, 0).await.expect_err("past the end");
        assert_eq!(e.code, crate::error::Code::OutOfRange);
        for req in [
            Request::write(0, Buffers::alloc(512, 512)),
            Request::write_zeroes(ByteRange { offset: 0, len: 512 }, Flags::empty()),
            Request::discard(ByteRange { offset: 0, len: 512 }),
        ] {
            let e = cx.run(&*node, req).await.expect_err("read-only");
            assert_eq!(e.code, crate::error::Code::ReadOnly);
        }
    });
}

#[test]
fn unaligned_writers_of_the_same_blocks_never_lose_each_others_bytes() {
    const WRITERS: u64 = 3;
    const ROUNDS: u8 = 60;
    for aio in engines() {
        // The last of the blocks is the partial one, which is written through the page cache and shares its page with the others.
        let s = setup(8 * 512 + 200);
        let node = s.open(aio, true, ",discard=unmap");
        let block = node.handle().offset_align();
        let blocks = node.limits().size / block;
        let (env, met) = (&s.env, AtomicUsize::new(0));
        let (node, met) = (&node, &met);
        std::thread::scope(|scope| {
            for me in 0..WRITERS {
                scope.spawn(move || {
                    testing::block_on(env, |cx| async move {
                        for round in 1..=ROUNDS {
                            // Each has bytes of its own in every block, the tail included, and nobody else writes them.
                            for at in (0..=blocks).map(|b| b * block + me * 60) {
                                let bufs = Buffers::alloc(50, 64);
                                bufs.fill(round ^ me as u8);
                                let req = if (at + u64::from(round)).is_multiple_of(5) {
                                    Request::write_zeroes(ByteRange { offset: at, len: 50 }, Flags::empty())
                                } else {
                                    Request::write(at, bufs.clone())
                                };
                                let expected = if req.op == Op::Write { round ^ me as u8 } else { 0 };
                                cx.run(&**node, req).await.expect("unaligned");
                                let got = read(&cx, node, at, 50, 0).await.expect("read");
                                assert_eq!(
                                    got, [expected; 50],
                                    "{aio}: {me}'s bytes at {at} were taken back"
                                );
                            }
                        }
                    });
                });
            }
            // Aligned writes of whole blocks between them: the first half of a block is nobody's, so it must be what was written last.
            scope.spawn(move || {
                testing::block_on(env, |cx| async move {
                    for round in 1..=ROUNDS {
                        for b in [1, 4].into_iter().filter(|b| *b < blocks) {
                            met.fetch_add(usize::from(node.handle().enter().is_none()), Ordering::Relaxed);
                            let bufs = Buffers::alloc(block as usize / 2, 4096);
                            bufs.fill(round);
                            let at = b * block + block / 2;
                            cx.run(&**node, Request::write(at, bufs)).await.expect("half a block");
                            let got = read(&cx, node, at, block as usize / 2, 0).await.expect("read");
                            assert!(
                                got.iter().all(|v| *v == round),
                                "{aio}: the half of block {b} was taken back"
                            );
                        }
                    }
                });
            });
        });
        assert!(met.load(Ordering::Relaxed) > 0, "{aio}: read-modify-writes were under way");
    }
}

#[test]
fn aligned_writes_beside_read_modify_writes_are_not_taken_back() {
    for aio in engines() {
        let s = setup(64 * 512);
        let node = s.open(aio, true, "");
        let block = node.handle().offset_align();
        let (env, met) = (&s.env, AtomicUsize::new(0));
        let (node, met) = (&node, &met);
        let ready = std::sync::Barrier::new(2);
        let ready = &ready;
        // Two writers of one block: whole blocks, and single bytes. Whoever wrote last is there as a whole: a read-modify-write never puts back
        // bytes from before a whole write that ended after it began.
        std::thread::scope(|scope| {
            scope.spawn(move || {
                ready.wait();
                testing::block_on(env, |cx| async move {
                    for round in 0..400u64 {
                        let bufs = Buffers::alloc(1, 64);
                        bufs.fill(0xff);
                        cx.run(&**node, Request::write(round % block, bufs)).await.expect("one byte");
                    }
                });
            });
            scope.spawn(move || {
                ready.wait();
                testing::block_on(env, |cx| async move {
                    for round in 0..400u64 {
                        met.fetch_add(usize::from(node.handle().enter().is_none()), Ordering::Relaxed);
                        let bufs = Buffers::alloc(block as usize, 4096);
                        bufs.fill(round as u8 & 0x7f);
                        cx.run(&**node, Request::write(0, bufs)).await.expect("a block");
                        let got = read(&cx, node, 0, block as usize, 0).await.expect("read");
                        let old = got.iter().find(|v| **v != round as u8 & 0x7f && **v != 0xff);
                        assert_eq!(old, None, "{aio}: bytes of an earlier round are back in round {round}");
                    }
                });
            });
        });
        assert!(met.load(Ordering::Relaxed) > 0, "{aio}: they met");
    }
}

#[test]
fn discards_and_zeroes_that_may_unmap_give_space_back() {
    use std::os::unix::fs::MetadataExt;
    for aio in engines() {
        for direct in [false, true] {
            let s = setup(1 << 20);
            let node = s.open(aio, direct, ",discard=unmap");
            let blocks = || std::fs::metadata(s.file.path()).expect("it is there").blocks();
            testing::block_on(&s.env, |cx| async move {
                let data = Buffers::alloc(1 << 20, 4096);
                data.fill(7);
                cx.run(&*node, Request::write(0, data).flags(Flags::FUA)).await.expect("written");
                let full = blocks();
                assert!(full >= 1 << 11, "all of it takes space");
                cx.run(&*node, Request::discard(ByteRange { offset: 100, len: 512 << 10 }))
                    .await
                    .expect("discard");
                let half = blocks();
                assert!(half < full, "{aio} direct {direct}: {half} of {full}");
                let rest = ByteRange { offset: 1 << 19, len: (1 << 19) - 1 };
                let unmap = Request::write_zeroes(rest, Flags::MAY_UNMAP | Flags::NO_FALLBACK);
                cx.run(&*node, unmap).await.expect("zeroes");
                assert!(blocks() < half, "{aio} direct {direct}");
                let got = read(&cx, &node, 0, 1 << 20, 0).await.expect("read");
                assert_eq!((got[0], got[99], got[(1 << 20) - 1]), (7, 7, 7), "outside of the ranges");
                assert!(got[4096..1 << 19].iter().all(|b| *b == 0));
                assert!(got[1 << 19..(1 << 20) - 1].iter().all(|b| *b == 0));
            });
        }
    }
}

#[test]
fn discards_are_ignored_unless_asked_for() {
    let s = setup(8192);
    let node = s.open("threads", false, "");
    testing::block_on(&s.env, |cx| async move {
        let data = Buffers::alloc(8192, 4096);
        data.fill(7);
        cx.run(&*node, Request::write(0, data)).await.expect("written");
        let all = ByteRange { offset: 0, len: 8192 };
        for flags in [Flags::empty(), Flags::FUA] {
            cx.run(&*node, Request::discard(all).flags(flags)).await.expect("a success");
        }
        assert!(read(&cx, &node, 0, 8192, 0).await.expect("read").iter().all(|b| *b == 7));
    });
}

#[test]
fn writes_of_zeros_become_zeroes_if_they_are_looked_for() {
    use std::os::unix::fs::MetadataExt;
    for direct in [false, true] {
        let s = setup(1 << 20);
        let node = s.open("threads", direct, ",discard=unmap,detect-zeroes=unmap");
        testing::block_on(&s.env, |cx| async move {
            let bufs = Buffers::alloc(1 << 20, 4096);
            bufs.fill(7);
            cx.run(&*node, Request::write(0, bufs.clone())).await.expect("written");
            bufs.fill(0);
            cx.run(&*node, Request::write(0, bufs.clone()).flags(Flags::FUA)).await.expect("zeros");
            assert!(read(&cx, &node, 0, 1 << 20, 0).await.expect("read").iter().all(|b| *b == 0));
            let status = cx.status(&*node, ByteRange { offset: 0, len: 1 << 20 }).await.expect("status");
            assert!(status.is_zero(), "direct {direct}: {status:?}");
            bufs.slice(1 << 19, 1).fill(1);
            cx.run(&*node, Request::write(0, bufs)).await.expect("written");
            assert_eq!(read(&cx, &node, 1 << 19, 1, 0).await.expect("read"), [1]);
        });
        assert!(std::fs::metadata(s.file.path()).expect("it is there").blocks() > 0);
    }
}

#[test]
fn a_file_without_data_is_known_to_be_zero_until_it_is_written() {
    let s = setup(8192);
    let node = s.open("threads", true, "");
    testing::block_on(&s.env, |cx| async move {
        assert!(node.limits().zero_init);
        let range = ByteRange { offset: 0, len: 8192 };
        cx.run(&*node, Request::write_zeroes(range, Flags::empty())).await.expect("zeroes change nothing");
        assert!(node.limits().zero_init);
        cx.run(&*node, Request::write(0, Buffers::alloc(1, 1))).await.expect("written");
        assert!(!node.limits().zero_init);
    });
    assert!(!s.open("threads", false, ",locking=off").limits().zero_init, "it has data now");
}

#[test]
fn a_new_file_has_its_size_and_a_failed_one_is_gone() {
    let folder = tempfile::tempdir_in("target").expect("a folder");
    let path = folder.path().join("image");
    let file = super::file::create_file(&path, 12345).expect("made");
    assert_eq!(file.metadata().expect("there").len(), 12345);
    let e = super::file::create_file(&path, 1).expect_err("it is there");
    assert_eq!(e.errno(), libc::EEXIST);
    assert_eq!(file.metadata().expect("there").len(), 12345, "what was there is not touched");
    let path = folder.path().join("huge");
    super::file::create_file(&path, u64::MAX).expect_err("no file is that large");
    assert!(!path.exists());
}

#[test]
fn a_file_can_be_given_as_a_descriptor_and_names_what_is_wrong_otherwise() {
    use std::os::fd::AsRawFd;
    let s = setup(4096);
    let open = |text: String| FileNode::open(Options::parse(&text).expect("options"), uring_allowed());
    let node = open(format!("fd={},cache.direct=on", s.file.as_file().as_raw_fd())).expect("by descriptor");
    assert_eq!(node.limits().size, 4096);
    drop(node);
    for (text, named) in [
        ("filename=/no/such/file".to_owned(), "/no/such/file"),
        ("fd=4000".to_owned(), "4000"),
        (String::new(), "filename"),
        (format!("filename={},cache.driect=on", s.file.path().display()), "cache.driect"),
        (format!("filename={},aio=native", s.file.path().display()), "aio"),
        (format!("filename={},force-share=on", s.file.path().display()), "force-share"),
        (format!("filename={},detect-zeroes=unmap", s.file.path().display()), "detect-zeroes"),
    ] {
        let e = open(text).expect_err(named);
        assert!(e.full_text().contains(named), "{}", e.full_text());
    }
}

#[test]
fn a_file_grows_and_shrinks_while_it_is_open_and_what_comes_is_zero() {
    use crate::node::Growth;
    for direct in [false, true] {
        for growth in [Growth::Sparse, Growth::Reserved] {
            // Not a multiple of a block: the last part becomes a whole block.
            let s = setup(196_616);
            let node = s.open("threads", direct, "");
            testing::block_on(&s.env, |cx| async move {
                let data = Buffers::alloc(4096, 4096);
                data.fill(7);
                cx.run(&*node, Request::write(192_520, data.clone())).await.expect("written");
                cx.run(&*node, Request::write(1 << 20, data.clone())).await.expect_err("past the end");
                node.resize(&cx, 2 << 20, growth).await.expect("it grows");
                assert_eq!(node.limits().size, 2 << 20);
                cx.run(&*node, Request::write(1 << 20, data.clone())).await.expect("written");
                let seen = read(&cx, &node, 192_520, 8192, 0).await.expect("read");
                assert!(seen[..4096] == [7; 4096] && seen[4096..] == [0; 4096]);
                node.resize(&cx, 1 << 20, Growth::Sparse).await.expect("it shrinks");
                cx.run(&*node, Request::write(1 << 20, data.clone())).await.expect_err("past the end");
                node.resize(&cx, 2 << 20, growth).await.expect("it grows again");
                let seen = read(&cx, &node, 1 << 20, 4096, 0).await.expect("read");
                assert!(seen == [0; 4096]);
            });
            let meta = std::fs::metadata(s.file.path()).expect("it is there");
            assert_eq!(meta.len(), 2 << 20);
            let reserved = std::os::unix::fs::MetadataExt::blocks(&meta) * 512 >= 1 << 20;
            assert_eq!(reserved, growth == Growth::Reserved, "blocks are there before they are written");
        }
    }
}

#[test]
fn a_direct_file_whose_end_is_aligned_refuses_one_that_is_not() {
    use crate::node::Growth;
    let s = setup(4096);
    let node = s.open("threads", true, "");
    testing::block_on(&s.env, |cx| async move {
        let e = node.resize(&cx, 5000, Growth::Sparse).await.expect_err("not aligned");
        assert_eq!(e.errno, libc::EINVAL);
        assert_eq!(node.limits().size, 4096);
    });
    let s = setup(4096);
    let node = s.open("threads", false, ",read-only=on");
    testing::block_on(&s.env, |cx| async move {
        node.resize(&cx, 8192, Growth::Sparse).await.expect_err("read-only");
    });
}
