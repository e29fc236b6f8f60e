//! The fence (S5, S15) and the clear mark (S71) under every interleaving and weak-memory outcome that loom models:
//!
//! ```text
//! RUSTFLAGS="--cfg cobweb_loom --cfg crossbeam_loom" LOOM_MAX_PREEMPTIONS=2 \
//!     cargo test --release --no-default-features --lib cbw --target-dir target/loom
//! ```
//!
//! The source is a cell: a write under a running read is a race that loom reports.

use super::fence::{Fence, is_overtaken, mark, may_read_source};
use super::state::{HELD, State, StateSet, States};
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Arc, UnsafeCell, thread};
use crate::units::ByteRange;
use loom::future::block_on;

const ALL: ByteRange = ByteRange { offset: 0, len: 4 };

struct Disk {
    states: States,
    fence: Fence,
    source: UnsafeCell<usize>,
}

// SAFETY: none; whether accesses to the source exclude each other is what the tests find out.
unsafe impl Sync for Disk {}
// SAFETY: a number.
unsafe impl Send for Disk {}

impl Disk {
    /// One granule. Its chunk is made here, since loom does not see how chunks are published.
    fn new() -> Arc<Self> {
        let disk = Self { states: States::new(1), fence: Fence::new(2), source: UnsafeCell::new(1) };
        assert!(!disk.states.mark_clear(0));
        Arc::new(disk)
    }

    /// A snapshot read: from the source, if it may.
    fn read(&self) {
        let registered = self.fence.register(ALL);
        if may_read_source(&self.states, 0) {
            // SAFETY: loom checks it.
            self.source.with(|v| assert_eq!(unsafe { *v }, 1));
            assert!(!is_overtaken(&self.states, 0..1), "nobody was let go without waiting");
        }
        drop(registered);
    }

    /// A copy: the old data is safe.
    fn copy(&self) {
        if self.states.claim(0) {
            assert!(self.states.change(0, StateSet::of(&[State::Reading]), State::Preserved).is_some());
        }
    }

    /// A write, if the granule is safe by now.
    fn write_if_safe(&self) -> bool {
        if HELD.has(self.states.get(0).state()) {
            return false;
        }
        if !self.states.get(0).is_clear() {
            if !self.fence.is_quiet(ALL) {
                block_on(self.fence.readers_ended(ALL));
            }
            assert!(mark(&self.states, 0..1), "it cannot be held again");
        }
        // SAFETY: loom checks it.
        self.source.with_mut(|v| unsafe { *v = 2 });
        true
    }
}

#[test]
fn a_write_and_a_registered_read_of_the_source_exclude_each_other() {
    loom::model(|| {
        let disk = Disk::new();
        let reader = {
            let disk = disk.clone();
            thread::spawn(move || disk.read())
        };
        disk.copy();
        assert!(disk.write_if_safe());
        reader.join().unwrap();
    });
}

#[test]
fn so_they_do_when_somebody_else_has_made_the_copy() {
    loom::model(|| {
        let disk = Disk::new();
        let reader = {
            let disk = disk.clone();
            thread::spawn(move || disk.read())
        };
        let copier = {
            let disk = disk.clone();
            thread::spawn(move || disk.copy())
        };
        disk.write_if_safe();
        reader.join().unwrap();
        copier.join().unwrap();
    });
}

#[test]
fn whoever_passes_by_the_mark_comes_after_the_reads_that_its_setter_waited_for() {
    loom::model(|| {
        let disk = Disk::new();
        // The reader has registered and looked; the others are to come.
        let registered = disk.fence.register(ALL);
        assert!(may_read_source(&disk.states, 0));
        disk.copy();
        let reader = {
            let disk = disk.clone();
            thread::spawn(move || {
                // SAFETY: loom checks it.
                disk.source.with(|v| assert_eq!(unsafe { *v }, 1));
                drop(registered);
            })
        };
        let marker = {
            let disk = disk.clone();
            thread::spawn(move || {
                if disk.fence.is_quiet(ALL) {
                    assert!(mark(&disk.states, 0..1));
                }
            })
        };
        if disk.states.get(0).is_clear() {
            // SAFETY: loom checks it.
            disk.source.with_mut(|v| unsafe { *v = 2 });
        }
        reader.join().unwrap();
        marker.join().unwrap();
    });
}

#[test]
fn a_reader_that_was_overtaken_notices() {
    loom::model(|| {
        let disk = Disk::new();
        // A disk orders what it has done: a read that returns new data comes after the write was sent.
        let content = Arc::new(AtomicUsize::new(1));
        let reader = {
            let (disk, content) = (disk.clone(), content.clone());
            thread::spawn(move || {
                let registered = disk.fence.register(ALL);
                if may_read_source(&disk.states, 0) {
                    let seen = content.load(Ordering::Acquire);
                    assert!(seen == 1 || is_overtaken(&disk.states, 0..1));
                }
                drop(registered);
            })
        };
        disk.copy();
        assert!(mark(&disk.states, 0..1));
        content.store(2, Ordering::Release);
        reader.join().unwrap();
    });
}
