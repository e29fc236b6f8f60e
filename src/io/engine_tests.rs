//! One test body for every engine: the contract of [`Engine`].

use super::file::{Aio, FileHandle};
use super::pool::{Pool, PoolEngine};
use super::uring::UringEngine;
use super::{Completion, Engine, EngineOp, EngineSet, FileOp, FileOpKind, Tag, uring_allowed};
use crate::error::{IoError, IoResult};
use crate::queue::IoCell;
use crate::request::{Buffers, Class};
use crate::rt::{Clock, Instant, Rng, real};
use crate::sync::Arc;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// Every engine, with the `aio` of a file that it carries out.
pub(super) fn engines(depth: u32) -> Vec<(&'static str, Box<dyn Engine>, Aio)> {
    let pool = Pool::new(&real::runtime());
    let mut all: Vec<(_, Box<dyn Engine>, _)> =
        vec![("pool", Box::new(PoolEngine::new(&pool)), Aio::Threads)];
    if uring_allowed() {
        let both = || Box::new(EngineSet::new(depth, &pool).expect("a ring"));
        all.push(("uring", Box::new(UringEngine::new(depth).expect("a ring")), Aio::Uring));
        all.push(("ring beside threads", both(), Aio::Uring));
        all.push(("threads beside a ring", both(), Aio::Threads));
    } else {
        eprintln!("SKIPPED: io_uring is not allowed here");
    }
    all
}

pub(super) fn file(size: u64) -> std::fs::File {
    let folder = std::env::current_dir().expect("a folder").join("target");
    let file = tempfile::tempfile_in(folder).expect("a file on a real file system");
    file.set_len(size).expect("resized");
    file
}

pub(super) fn handle(file: &std::fs::File, aio: Aio) -> Arc<FileHandle> {
    let fd = file.try_clone().expect("a descriptor");
    Arc::new(FileHandle::buffered(OwnedFd::from(fd), aio))
}

pub(super) fn op(
    file: &Arc<FileHandle>,
    kind: FileOpKind,
    offset: u64,
    bufs: &Buffers,
) -> (EngineOp, Arc<IoCell>) {
    let cell: Arc<IoCell> = Arc::default();
    let op = FileOp {
        file: file.clone(),
        kind,
        offset,
        len: bufs.len() as u64,
        dsync: false,
        counted: None,
        pass: None,
    };
    (EngineOp { op, bufs: bufs.clone(), class: Class::Guest, tag: Tag::Task(cell.clone()) }, cell)
}

/// Drives `engine` until `n` operations have ended, and gives their results to their cells.
pub(super) fn finish(engine: &mut dyn Engine, n: usize) {
    let mut got = 0;
    while got < n {
        engine.wait(Some(Duration::from_secs(20)));
        let mut out = Vec::new();
        engine.reap(&mut out);
        engine.kick();
        got += out.len();
        out.into_iter().for_each(deliver);
    }
    assert_eq!(got, n);
}

fn deliver(c: Completion) {
    let Tag::Task(cell) = c.tag else { panic!("another tag than was given") };
    cell.complete(c.result);
}

pub(super) fn result(cell: &IoCell) -> Option<IoResult> {
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    match cell.poll(&mut cx) {
        std::task::Poll::Ready(r) => Some(r),
        std::task::Poll::Pending => None,
    }
}

fn readable(fd: i32) -> bool {
    super::file::sys::is_readable(fd, Duration::ZERO)
}

#[test]
fn hundreds_of_operations_pass_through_rings_of_depth_one_and_two() {
    const BLOCK: usize = 512;
    for depth in [1, 2, 7] {
        for (name, mut engine, aio) in engines(depth) {
            let file = file(64 * BLOCK as u64);
            let handle = handle(&file, aio);
            let rng = real::SplitMix::new(u64::from(depth));
            let mut model = vec![0u8; 64 * BLOCK];
            for round in 0..20usize {
                // Distinct blocks, so that the order in which they are carried out does not matter.
                let first = rng.next() as usize % 64;
                let mut waiting = Vec::new();
                for i in 0..32 {
                    let at = (first + i) % 64 * BLOCK;
                    let bufs = Buffers::alloc(BLOCK, 512);
                    let kind =
                        if rng.next().is_multiple_of(2) { FileOpKind::Read } else { FileOpKind::Write };
                    if kind == FileOpKind::Write {
                        let byte = (round * 32 + i) as u8;
                        bufs.fill(byte);
                        model[at..at + BLOCK].fill(byte);
                    }
                    let (mut op, cell) = op(&handle, kind, at as u64, &bufs);
                    op.class = [Class::Guest, Class::Copy, Class::Background, Class::Lazy][i % 4];
                    op.op.dsync = kind == FileOpKind::Write && i % 8 == 0;
                    engine.push(op);
                    waiting.push((cell, bufs, at));
                }
                assert_eq!(engine.in_flight(), 32, "{name}");
                engine.kick();
                finish(&mut *engine, 32);
                assert_eq!(engine.in_flight(), 0, "{name}");
                for (cell, bufs, at) in waiting {
                    assert_eq!(result(&cell), Some(Ok(())), "{name}");
                    assert_eq!(
                        bufs.to_vec(),
                        model[at..at + BLOCK],
                        "{name} depth {depth} round {round} at {at}"
                    );
                }
            }
        }
    }
}

#[test]
fn lists_of_segments_longer_than_the_kernel_takes_are_carried_out_whole() {
    for (name, mut engine, aio) in engines(4) {
        let file = file(1 << 16);
        let handle = handle(&file, aio);
        let data: Vec<u8> = (0..2500 * 16).map(|i| (i / 7) as u8).collect();
        let mut bufs = Buffers::new();
        (0..2500).for_each(|_| bufs.append(Buffers::alloc(16, 16)));
        bufs.copy_from_slice(&data);
        let (write, written) = op(&handle, FileOpKind::Write, 100, &bufs);
        engine.push(write);
        engine.kick();
        finish(&mut *engine, 1);
        assert_eq!(result(&written), Some(Ok(())), "{name}");
        let mut there = vec![0; data.len()];
        file.read_exact_at(&mut there, 100).expect("it is there");
        assert!(there == data, "{name}");
        bufs.fill(0);
        let (read, done) = op(&handle, FileOpKind::Read, 100, &bufs);
        engine.push(read);
        engine.kick();
        finish(&mut *engine, 1);
        assert_eq!(result(&done), Some(Ok(())), "{name}");
        assert!(bufs.to_vec() == data, "{name}");
    }
}

#[test]
fn reads_past_the_end_give_zeros_and_errors_come_back_as_they_are() {
    for (name, mut engine, aio) in engines(4) {
        let file = file(100);
        file.write_all_at(&[7; 100], 0).expect("written");
        let whole = handle(&file, aio);
        let read_only =
            std::fs::File::open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file)));
        let read_only = handle(&read_only.expect("opened again"), aio);
        let bufs = Buffers::alloc(60, 8);
        bufs.fill(0xee);
        let beyond = Buffers::alloc(60, 8);
        beyond.fill(0xee);
        let sync = Buffers::new();
        let ops = [
            op(&whole, FileOpKind::Read, 70, &bufs),
            op(&whole, FileOpKind::Read, 5000, &beyond),
            op(&read_only, FileOpKind::Write, 0, &Buffers::alloc(8, 8)),
            op(&whole, FileOpKind::Sync, 0, &sync),
            op(&whole, FileOpKind::Allocate(libc::FALLOC_FL_PUNCH_HOLE), 0, &Buffers::alloc(8, 8)),
        ];
        let cells: Vec<_> = ops
            .into_iter()
            .map(|(op, cell)| {
                engine.push(op);
                cell
            })
            .collect();
        engine.kick();
        finish(&mut *engine, 5);
        assert_eq!(result(&cells[0]), Some(Ok(())), "{name}");
        assert_eq!(bufs.to_vec(), [vec![7; 30], vec![0; 30]].concat(), "{name}");
        assert_eq!(result(&cells[1]), Some(Ok(())), "{name}");
        assert!(beyond.is_zero(), "{name}");
        assert_eq!(result(&cells[2]), Some(Err(IoError::os(libc::EBADF))), "{name}");
        assert_eq!(result(&cells[3]), Some(Ok(())), "{name}");
        // Punching without KEEP_SIZE is refused by every kernel.
        assert_eq!(result(&cells[4]), Some(Err(IoError::os(libc::EOPNOTSUPP))), "{name}");
    }
}

#[test]
fn a_wake_from_another_thread_ends_a_wait_and_one_before_it_the_next() {
    for (_, mut engine, _) in engines(2) {
        let notify = engine.notify();
        notify.wake();
        engine.wait(None);
        let mut out = Vec::new();
        engine.reap(&mut out);
        engine.kick();
        std::thread::scope(|scope| {
            scope.spawn(move || notify.wake());
            // Returns at all: without the wake it would wait for ever. It may return early, but then again only for the wake.
            engine.wait(None);
        });
        assert!(out.is_empty());
    }
}

#[test]
fn the_event_fd_tells_of_completions_and_wakes_while_it_is_armed() {
    for (name, mut engine, aio) in engines(2) {
        let file = file(4096);
        let handle = handle(&file, aio);
        let fd = engine.event_fd().expect("an eventfd");
        assert_eq!(engine.event_fd().expect("the same"), fd, "{name}");
        engine.kick();
        assert!(!readable(fd), "{name}");
        let one = |engine: &mut dyn Engine| {
            let (read, cell) = op(&handle, FileOpKind::Read, 0, &Buffers::alloc(512, 512));
            engine.push(read);
            engine.kick();
            cell
        };
        let settle = |engine: &mut dyn Engine| {
            let mut out = Vec::new();
            engine.clear_event();
            engine.reap(&mut out);
            engine.kick();
            out.into_iter().for_each(deliver);
        };
        // Without anybody waiting in the engine: the fd alone tells.
        let cell = one(&mut *engine);
        while result(&cell).is_none() {
            assert!(
                super::file::sys::is_readable(fd, Duration::from_secs(20)),
                "{name}: told of a completion"
            );
            settle(&mut *engine);
        }
        quiet(&mut *engine, fd, name);
        engine.notify().wake();
        assert!(super::file::sys::is_readable(fd, Duration::from_secs(20)), "{name}: told of a wake");
        settle(&mut *engine);
        quiet(&mut *engine, fd, name);

        engine.arm(false).expect("disarmed");
        let cell = one(&mut *engine);
        finish(&mut *engine, 1);
        assert_eq!(result(&cell), Some(Ok(())), "{name}");
        assert!(!readable(fd), "{name}: not told while it is off");
        engine.notify().wake();
        engine.arm(true).expect("armed");
        // A wake that came while it was off is told now.
        assert!(super::file::sys::is_readable(fd, Duration::from_secs(20)), "{name}");
        quiet(&mut *engine, fd, name);
    }
}

/// Passes as a host makes them until the fd is quiet: a few, however slow the thread is that has signalled it.
fn quiet(engine: &mut dyn Engine, fd: i32, name: &str) {
    for _ in 0..100 {
        if !readable(fd) {
            return;
        }
        engine.clear_event();
        let mut out = Vec::new();
        engine.reap(&mut out);
        engine.kick();
        assert!(out.is_empty(), "{name}");
    }
    panic!("{name}: the event fd stays readable");
}

#[test]
fn the_event_fd_fires_for_the_earliest_timer_and_only_while_there_is_a_host() {
    for (name, mut engine, _) in engines(2) {
        let clock = real::runtime().clock;
        let far = |clock: &dyn Clock| clock.now().after(Duration::from_secs(3600));
        // Without a host nothing is set: `wait` has the timeout.
        engine.set_timer(Some(clock.now()), clock.now());
        let fd = engine.event_fd().expect("an eventfd");
        engine.set_timer(Some(far(&*clock)), clock.now());
        engine.set_timer(None, clock.now());
        assert!(!readable(fd), "{name}");
        for round in 0..3 {
            // An earlier one replaces the far one; after it has fired the far one can be set again.
            let soon: Instant = clock.now().after(Duration::from_millis(2));
            engine.set_timer(Some(soon), clock.now());
            assert!(super::file::sys::is_readable(fd, Duration::from_secs(20)), "{name} round {round}");
            while clock.now() <= soon {
                std::thread::yield_now();
            }
            quiet(&mut *engine, fd, name);
            engine.set_timer(Some(far(&*clock)), clock.now());
            assert!(!readable(fd), "{name} round {round}");
        }
    }
}
