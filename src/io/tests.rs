//! One test body over both engines, direct and buffered, and every odd size.

use super::file::FileNode;
use super::uring_allowed;
use crate::error::IoResult;
use crate::node::Node;
use crate::options::Options;
use crate::queue::{Cx, Env, testing};
use crate::request::{Buffers, Flags, Request};
use crate::rt::{Rng, real::SplitMix};
use crate::sync::Arc;
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
fn unaligned_writers_of_one_block_never_lose_each_others_bytes() {
    for aio in engines() {
        let s = setup(4096);
        let node = s.open(aio, true, "");
        let align = node.handle().offset_align();
        let env = &s.env;
        std::thread::scope(|scope| {
            for me in 0..4u64 {
                let node = node.clone();
                scope.spawn(move || {
                    testing::block_on(env, |cx| async move {
                        for round in 0..100u8 {
                            // Each owns every fourth byte run of the first block; a fifth of the writes are whole, aligned blocks elsewhere.
                            let piece = align / 4;
                            let bufs = Buffers::alloc(piece as usize, 64);
                            bufs.fill(round ^ me as u8);
                            cx.run(&*node, Request::write(me * piece, bufs)).await.expect("unaligned");
                            if round % 5 == 0 && 4096 > align {
                                let whole = Buffers::alloc(align as usize, 4096);
                                whole.fill(round);
                                cx.run(&*node, Request::write(align, whole)).await.expect("aligned");
                            }
                            let got = read(&cx, &node, me * piece, piece as usize, 0).await.expect("read");
                            assert!(
                                got.iter().all(|b| *b == round ^ me as u8),
                                "a neighbour's write took {me}'s bytes back"
                            );
                        }
                    });
                });
            }
        });
    }
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
    ] {
        let e = open(text).expect_err(named);
        assert!(e.full_text().contains(named), "{}", e.full_text());
    }
}
