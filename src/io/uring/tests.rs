//! What only a ring can do wrong: ownership in flight, threads that go away, the end.

use super::UringEngine;
use crate::io::engine_tests::{file, finish, handle, op, result};
use crate::io::file::{Aio, FileHandle, sys};
use crate::io::{Engine, FileOpKind, uring_allowed};
use crate::request::Buffers;
use crate::sync::Arc;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;

fn engine(depth: u32) -> Option<UringEngine> {
    if !uring_allowed() {
        eprintln!("SKIPPED: io_uring is not allowed here");
        return None;
    }
    Some(UringEngine::new(depth).expect("a ring"))
}

/// A file whose reads wait until something is written to the other end.
fn pipe() -> (Arc<FileHandle>, std::io::PipeWriter) {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    (Arc::new(FileHandle::buffered(OwnedFd::from(reader), Aio::Uring)), writer)
}

#[test]
fn an_engine_that_goes_with_reads_in_flight_cancels_them_and_frees_their_memory() {
    let Some(mut engine) = engine(3) else { return };
    let (file, writer) = pipe();
    let bufs: Vec<_> = (0..5).map(|_| Buffers::alloc(8, 8)).collect();
    let cells: Vec<_> = bufs
        .iter()
        .map(|b| {
            let (read, cell) = op(&file, FileOpKind::Read, 0, b);
            engine.push(read);
            cell
        })
        .collect();
    engine.kick();
    let mut out = Vec::new();
    engine.reap(&mut out);
    assert!(out.is_empty() && engine.in_flight() == 5, "three are waiting in the kernel, two in the backlog");
    assert!(Arc::strong_count(&file) == 6);
    drop(engine);
    for (b, cell) in bufs.iter().zip(&cells) {
        let owner = b.segments()[0].owner().expect("engine memory");
        assert_eq!(Arc::strong_count(owner), 1, "the operation has let go of its buffer");
        assert_eq!(result(cell), None, "nothing completes after the engine has gone");
    }
    assert_eq!(Arc::strong_count(&file), 1);
    drop(writer);
}

#[test]
fn operations_outlive_the_thread_that_handed_them_over() {
    let Some(mut engine) = engine(2) else { return };
    let (file, mut writer) = pipe();
    let bufs = Buffers::alloc(4, 8);
    let (read, cell) = op(&file, FileOpKind::Read, 0, &bufs);
    std::thread::scope(|scope| {
        let handed_over = scope.spawn(|| {
            engine.push(read);
            engine.kick();
            let mut out = Vec::new();
            engine.reap(&mut out);
            assert!(out.is_empty(), "the read waits");
        });
        handed_over.join().expect("it ends with the read in flight");
    });
    writer.write_all(b"abcd").expect("written");
    finish(&mut engine, 1);
    assert_eq!(result(&cell), Some(Ok(())));
    assert_eq!(bufs.to_vec(), b"abcd");
}

#[test]
fn a_wake_reaches_an_engine_whose_driver_has_gone() {
    let Some(mut engine) = engine(2) else { return };
    let fd = engine.event_fd().expect("an eventfd");
    // The read of the wake counter is made by a thread that then ends.
    std::thread::scope(|scope| scope.spawn(|| engine.kick()).join().expect("it ends"));
    for _ in 0..3 {
        engine.notify().wake();
        assert!(sys::is_readable(fd, Duration::from_secs(20)), "the host is told");
        engine.wait(None);
        while sys::is_readable(fd, Duration::ZERO) {
            let mut out = Vec::new();
            engine.clear_event();
            engine.reap(&mut out);
            engine.kick();
            assert!(out.is_empty());
        }
    }
}

#[test]
fn what_the_kernel_cannot_do_now_is_repeated_behind_what_others_want() {
    let Some(mut engine) = engine(1) else { return };
    let file = handle(&file(4096), Aio::Uring);
    let first = op(&file, FileOpKind::Read, 0, &Buffers::alloc(512, 512));
    let second = op(&file, FileOpKind::Read, 0, &Buffers::alloc(512, 512));
    engine.ring.as_mut().expect("it is there").results.extend([-libc::EAGAIN; 2]);
    engine.push(first.0);
    engine.push(second.0);
    engine.kick();
    // Both fail once, then each gets its turn in the order in which they came back.
    finish(&mut engine, 1);
    assert_eq!((result(&first.1), result(&second.1)), (Some(Ok(())), None));
    finish(&mut engine, 1);
    assert_eq!(result(&second.1), Some(Ok(())));
    assert!(engine.ring.as_ref().expect("it is there").results.is_empty(), "the results were used");
}

#[test]
fn transfers_are_continued_through_all_segments_after_every_kind_of_short_result() {
    let Some(mut engine) = engine(2) else { return };
    let file = file(4096);
    file.write_all_at(&(0..=255).cycle().take(4096).collect::<Vec<u8>>(), 0).expect("written");
    let handle = handle(&file, Aio::Uring);
    for cuts in [&[100][..], &[1, 99], &[30, 30, 40]] {
        let mut bufs = Buffers::new();
        cuts.iter().for_each(|n| bufs.append(Buffers::alloc(*n, 8)));
        let script = [1, -libc::EINTR, 29, -libc::ECANCELED, -libc::EFAULT, 50, -libc::EAGAIN];
        engine.ring.as_mut().expect("it is there").results.extend(script);
        let (read, cell) = op(&handle, FileOpKind::Read, 1000, &bufs);
        engine.push(read);
        engine.kick();
        finish(&mut engine, 1);
        assert_eq!(result(&cell), Some(Ok(())));
        let expected: Vec<u8> = (1000..1100).map(|i| i as u8).collect();
        assert_eq!(bufs.to_vec(), expected, "{cuts:?}");
        assert!(engine.ring.as_ref().expect("it is there").results.is_empty(), "the results were used");
    }
}

#[test]
fn an_operation_gives_its_count_back_when_the_kernel_is_done_and_not_before() {
    let Some(mut engine) = engine(1) else { return };
    let (file, mut writer) = pipe();
    let (mut read, cell) = op(&file, FileOpKind::Read, 0, &Buffers::alloc(4, 8));
    read.op.counted = file.enter();
    // The request that waits for it goes away.
    drop(cell);
    engine.push(read);
    engine.kick();
    assert_eq!(file.counted(), 1);
    writer.write_all(b"abcd").expect("written");
    finish(&mut engine, 1);
    assert_eq!(file.counted(), 0);
}
