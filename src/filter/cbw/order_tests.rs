//! Who waits for whom, in virtual time, over nodes whose calls are held and let go one by one.

use super::CbwNode;
use crate::error::{Code, IoError, IoResult};
use crate::events::EventKind;
use crate::filter::testing::{Call, Fault, Held, HeldNode, Journal, Started, let_others_run, start};
use crate::graph::Graph;
use crate::io::memory::MemoryNode;
use crate::node::{Extent, ExtentFlags, Node, Vertex};
use crate::options::Options;
use crate::queue::virtual_env::{VirtualClock, virtual_env};
use crate::queue::{Cx, Env};
use crate::request::{Buffers, Class, Flags, Op, Request};
use crate::rt::Clock;
use crate::sync::{Arc, Mutex};
use crate::units::ByteRange;
use serde_json::{Value, json};
use std::future::Future;
use std::time::Duration;

const G: u64 = 64 << 10;
const READ: Call = Call::Io(Op::Read);
const WRITE: Call = Call::Io(Op::Write);
const ZEROES: Call = Call::Io(Op::WriteZeroes);

/// A filter between two nodes whose calls can be held. The disk holds 1s at the instant.
#[derive(Clone)]
struct Rig {
    cx: Cx,
    clock: Arc<VirtualClock>,
    journal: Arc<Journal>,
    src: Arc<Held>,
    tgt: Arc<Held>,
    filter: Arc<Vertex>,
    view: Arc<Vertex>,
}

fn rig<Fut: Future<Output = ()>>(size: u64, options: Value, body: impl FnOnce(Rig) -> Fut) {
    rig_over(size, options, true, |_| {}, body);
}

fn rig_over<Fut: Future<Output = ()>>(
    size: u64,
    options: Value,
    filled: bool,
    prepare: impl FnOnce(&Held),
    body: impl FnOnce(Rig) -> Fut,
) {
    let (env, clock): (Arc<Env>, _) = virtual_env(1);
    let (graph, journal) = (Graph::new(env.clone()), Arc::new(Journal::default()));
    let held = |name: &'static str| {
        let held = Held::new(name, MemoryNode::new(size), &journal);
        graph.add_node(name, Arc::new(HeldNode(held.clone()))).expect("a new name");
        held
    };
    let (src, tgt) = (held("src"), held("tgt"));
    prepare(&tgt);
    env.block_on(|cx| async move {
        if filled {
            let ones = Buffers::alloc(size as usize, 4096);
            ones.fill(1);
            cx.run(&HeldNode(src.clone()), Request::write(0, ones)).await.expect("filled");
        }
        let open = |o: Value| graph.open(Options::from_json(&o).expect("options")).expect("it opens");
        let mut o =
            json!({"driver": "copy-before-write", "node-name": "cbw", "file": "src", "target": "tgt"});
        for (k, v) in options.as_object().expect("an object") {
            o[k] = v.clone();
        }
        let filter = open(o);
        let view = open(json!({"driver": "snapshot-access", "file": "cbw"}));
        body(Rig { cx, clock, journal, src, tgt, filter, view }).await;
    })
    .expect("not on an engine thread");
}

impl Rig {
    fn cbw(&self) -> &CbwNode {
        self.filter.base().as_any().downcast_ref().expect("a cbw node")
    }

    fn run(&self, node: &Arc<Vertex>, req: Request) -> Started {
        let (cx, node) = (self.cx.clone(), node.base().clone());
        start(&self.cx, async move { cx.run(&*node, req).await })
    }

    /// A guest write of 2s.
    fn write(&self, offset: u64, len: u64) -> Started {
        let bufs = Buffers::alloc(len as usize, 4096);
        bufs.fill(2);
        self.run(&self.filter, Request::write(offset, bufs))
    }

    /// A read of the snapshot.
    fn read(&self, offset: u64, len: u64) -> (Started, Buffers) {
        let bufs = Buffers::alloc(len as usize, 4096);
        bufs.fill(0xee);
        (self.run(&self.view, Request::read(offset, bufs.clone())), bufs)
    }

    /// Reads a byte of the snapshot to the end.
    async fn byte(&self, offset: u64) -> IoResult<u8> {
        let (read, bufs) = self.read(offset, 1);
        read.result().await.map(|()| bufs.to_vec()[0])
    }

    /// A background copy.
    fn copy(&self, offset: u64, len: u64, memory: Buffers) -> Started {
        let (cx, node) = (self.cx.clone(), self.filter.base().clone());
        start(&self.cx, async move {
            let cbw: &CbwNode = node.as_any().downcast_ref().expect("a cbw node");
            let range = ByteRange { offset, len };
            cbw.copy(&cx, range, &memory, Class::Background).await.map(drop).map_err(|e| e.error)
        })
    }

    /// Everything that can go on has gone on.
    async fn settled(&self) {
        for _ in 0..8 {
            let_others_run(&self.cx).await;
        }
    }

    async fn stuck(&self, task: &Started) {
        self.settled().await;
        assert_eq!(task.now(), None, "{:?}", self.journal.lines());
    }

    async fn ended(&self, task: &Started) -> IoResult {
        self.settled().await;
        task.now().unwrap_or_else(|| panic!("it still waits: {:?}", self.journal.lines()))
    }

    fn stats(&self) -> crate::stats::Stats {
        self.cbw().stats().expect("it counts")
    }

    fn seconds(&self) -> u64 {
        self.clock.now().0 / 1_000_000_000
    }
}

#[test]
fn old_data_is_with_the_target_before_the_write_goes_down() {
    rig(4 * G, json!({}), |r| async move {
        r.src.hold_all(READ);
        r.tgt.hold_all(WRITE);
        let write = r.write(100, 200);
        r.stuck(&write).await;
        assert_eq!(r.src.held(), [(READ, ByteRange { offset: 0, len: G })], "the whole granule is read");
        assert_eq!(r.journal.count("tgt", WRITE), 0);
        r.src.release();
        r.stuck(&write).await;
        assert_eq!(r.tgt.held().len(), 1, "the guest waits for the target");
        let filling = r.journal.count("src", WRITE);
        r.tgt.release();
        assert_eq!(r.ended(&write).await, Ok(()));
        assert_eq!(r.journal.count("src", WRITE), filling + 1);
        assert_eq!(r.byte(100).await, Ok(1));
    });
}

#[test]
fn no_byte_goes_down_before_all_granules_of_the_write_are_safe() {
    rig(4 * G, json!({}), |r| async move {
        // A granule in the middle is copied already, so there are two runs.
        r.write(2 * G, 1).result().await.expect("written");
        r.tgt.hold(|c, range| c == WRITE && range.offset == 3 * G);
        let before = r.journal.count("src", WRITE);
        let write = r.write(G - 1, 2 * G + 2);
        r.stuck(&write).await;
        assert_eq!(r.tgt.held().len(), 1);
        assert_eq!(r.journal.count("src", WRITE), before);
        r.tgt.release();
        assert_eq!(r.ended(&write).await, Ok(()));
    });
}

#[test]
fn of_eight_writers_of_a_granule_one_reads_and_all_wait_for_that_read() {
    rig(4 * G, json!({}), |r| async move {
        r.src.hold_all(READ);
        let writes: Vec<_> = (0..8).map(|i| r.write(i * 4096, 4096)).collect();
        r.settled().await;
        assert_eq!(r.src.held().len(), 1);
        assert!(writes.iter().all(|w| w.now().is_none()));
        r.src.release();
        for w in &writes {
            assert_eq!(r.ended(w).await, Ok(()));
        }
        assert_eq!(r.journal.count("src", READ), 1);
        assert_eq!(r.cbw().hist("granule").expect("a histogram").count, 7);
    });
}

#[test]
fn a_writer_waits_for_a_reader_that_registered_first_and_the_reader_sees_the_instant() {
    rig(4 * G, json!({}), |r| async move {
        r.src.hold(|c, range| c == READ && range.len == 512);
        let (read, bufs) = r.read(4096, 512);
        r.stuck(&read).await;
        let write = r.write(4096, 512);
        r.stuck(&write).await;
        assert_eq!(r.journal.count("tgt", WRITE), 1, "the old data is safe already");
        assert_eq!(r.stats().cbw_frozen_waits, 1);
        // Another granule is not held up.
        assert_eq!(r.ended(&r.write(2 * G, 512)).await, Ok(()));
        r.src.release();
        assert_eq!(r.ended(&read).await, Ok(()));
        assert_eq!(r.ended(&write).await, Ok(()));
        assert_eq!(bufs.to_vec(), vec![1; 512]);
    });
}

#[test]
fn a_reader_that_comes_after_the_copy_never_goes_to_the_source() {
    rig(4 * G, json!({}), |r| async move {
        assert_eq!(r.ended(&r.write(4096, 512)).await, Ok(()));
        r.src.hold_all(READ);
        let (read, bufs) = r.read(4096, 512);
        assert_eq!(r.ended(&read).await, Ok(()));
        assert_eq!(bufs.to_vec(), vec![1; 512]);
    });
}

#[test]
fn a_writer_after_a_background_copy_still_waits_for_the_reader() {
    rig(4 * G, json!({}), |r| async move {
        r.src.hold(|c, range| c == READ && range.len == 512);
        let (read, bufs) = r.read(0, 512);
        r.stuck(&read).await;
        let copy = r.copy(0, G, Buffers::alloc(G as usize, 4096));
        assert_eq!(r.ended(&copy).await, Ok(()));
        let (first, second) = (r.write(0, 512), r.write(512, 512));
        r.stuck(&first).await;
        r.stuck(&second).await;
        r.src.release();
        assert_eq!(r.ended(&read).await, Ok(()));
        assert_eq!(bufs.to_vec(), vec![1; 512]);
        assert_eq!((r.ended(&first).await, r.ended(&second).await), (Ok(()), Ok(())));
    });
}

#[test]
fn a_reader_that_meets_a_copy_waits_for_it_and_reads_the_target() {
    rig(4 * G, json!({}), |r| async move {
        r.src.hold_all(READ);
        let write = r.write(0, 512);
        r.stuck(&write).await;
        let (read, bufs) = r.read(0, 3 * G);
        r.settled().await;
        assert_eq!(r.src.held().len(), 2, "the copy, and the run behind it");
        r.src.release();
        assert_eq!(r.ended(&read).await, Ok(()));
        assert_eq!(bufs.to_vec(), vec![1; 3 * G as usize]);
        assert_eq!(r.ended(&write).await, Ok(()));
    });
}

#[test]
fn a_cancelled_write_stops_waiting_and_its_copy_goes_on_for_the_others() {
    rig(4 * G, json!({}), |r| async move {
        r.tgt.hold_all(WRITE);
        let (own, cancel) = r.cx.with_new_cancel();
        let node = r.filter.base().clone();
        let first =
            start(
                &r.cx,
                async move { own.run(&*node, Request::write(0, Buffers::from_bytes(&[2; 512]))).await },
            );
        let second = r.write(1024, 512);
        r.stuck(&first).await;
        cancel.cancel();
        assert_eq!(r.ended(&first).await, Err(IoError::cancelled()));
        assert_eq!(r.stats().cbw_late, 1);
        r.stuck(&second).await;
        r.tgt.release();
        assert_eq!(r.ended(&second).await, Ok(()));
        assert_eq!(r.journal.count("src", READ), 1, "copied once");
        assert_eq!(r.stats().cbw_late, 0);
        assert_eq!(r.byte(0).await, Ok(1));
    });
}

#[test]
fn at_its_limit_a_guest_is_released_with_all_who_wait_and_the_snapshot_is_broken() {
    rig(4 * G, json!({}), |r| async move {
        r.tgt.hold_all(WRITE);
        let (first, second) = (r.write(0, 512), r.write(512, 512));
        r.settled().await;
        r.clock.advance(Duration::from_secs(40));
        let late = r.write(1024, 512);
        r.stuck(&late).await;
        assert_eq!(first.result().await, Ok(()));
        assert_eq!(r.seconds(), 45, "the default");
        assert_eq!((r.ended(&second).await, r.ended(&late).await), (Ok(()), Ok(())));
        assert_eq!(r.seconds(), 45);
        let report = r.cbw().broken().expect("broken");
        assert_eq!((report.error.code, report.error.errno), (Code::CbwTimeout, libc::ETIMEDOUT));
        assert_eq!(r.byte(3 * G).await, Err(IoError::new(libc::ETIMEDOUT, Code::SnapshotBroken)));
        assert_eq!(r.stats().cbw_late, 1);
        r.tgt.release();
        r.settled().await;
        assert_eq!(r.stats().cbw_late, 0);
        assert!(r.cbw().broken().is_some());
        let event = r.cx.env().events.next().expect("an event");
        assert_eq!((event.kind, event.source.as_str()), (EventKind::CbwBroken, "cbw"));
    });
}

#[test]
fn a_copy_that_comes_late_may_hold_new_data_and_is_dropped() {
    rig(4 * G, json!({"loss-scope": "range", "cbw-timeout-ms": 1500}), |r| async move {
        r.src.hold_all(READ);
        let (first, second) = (r.write(0, 512), r.write(512, 512));
        r.settled().await;
        r.clock.advance(Duration::from_millis(1000));
        let third = r.write(1024, 512);
        r.stuck(&third).await;
        assert_eq!(first.result().await, Ok(()));
        assert_eq!(r.clock.now().0, 1_500_000_000);
        assert_eq!((r.ended(&second).await, r.ended(&third).await), (Ok(()), Ok(())), "released with it");
        assert_eq!(r.stats().cbw_timeouts, 1);
        let lost = r.cbw().lost();
        assert_eq!(lost.iter().map(|l| l.range).collect::<Vec<_>>(), [ByteRange { offset: 0, len: G }]);
        r.src.release();
        r.settled().await;
        assert_eq!(r.stats().cbw_late, 0, "the copy has ended");
        assert_eq!(r.journal.count("tgt", WRITE), 0, "and written nothing");
        assert_eq!(r.byte(0).await, Err(IoError::new(libc::ETIMEDOUT, Code::RangeLost)));
        assert_eq!(r.byte(G).await, Ok(1), "the rest is whole");
        assert!(r.cbw().broken().is_none());
    });
}

#[test]
fn a_reader_that_holds_a_guest_too_long_is_overtaken_and_nothing_breaks() {
    rig(4 * G, json!({}), |r| async move {
        r.src.hold(|c, range| c == READ && range.len == 512);
        let (read, bufs) = r.read(0, 512);
        r.stuck(&read).await;
        assert_eq!(r.write(0, 512).result().await, Ok(()));
        assert_eq!(r.seconds(), 45);
        r.src.release();
        assert_eq!(r.ended(&read).await, Ok(()));
        assert_eq!(bufs.to_vec(), vec![1; 512], "read again, from the target");
        assert!(r.cbw().broken().is_none() && r.cbw().lost().is_empty());
    });
}

#[test]
fn a_status_call_sees_the_instant_too() {
    rig_over(
        4 * G,
        json!({}),
        false,
        |_| {},
        |r| async move {
            r.src.hold_all(Call::Status);
            let (cx, view) = (r.cx.clone(), r.view.base().clone());
            let seen: Arc<Mutex<Option<Extent>>> = Arc::default();
            let there = seen.clone();
            let status = start(&r.cx, async move {
                let extent = cx.status(&*view, ByteRange { offset: 0, len: 4 * G }).await?;
                *there.lock() = Some(extent);
                Ok(())
            });
            r.stuck(&status).await;
            let write = r.write(2 * G, 512);
            r.stuck(&write).await;
            r.src.release();
            assert_eq!(r.ended(&status).await, Ok(()));
            assert_eq!(*seen.lock(), Some(Extent::hole(4 * G)), "as it was before the write");
            assert_eq!(r.ended(&write).await, Ok(()));
        },
    );
}

#[test]
fn one_bad_sector_costs_one_granule_where_losses_are_by_range() {
    rig(8 * G, json!({"loss-scope": "range"}), |r| async move {
        let bad = ByteRange { offset: 2 * G + 512, len: 512 };
        let eio = Fault::Fail(IoError::os(libc::EIO));
        r.src.fault(eio, move |c, range| c == READ && range.overlaps(bad));
        assert_eq!(r.ended(&r.write(0, 5 * G)).await, Ok(()));
        let lost = r.cbw().lost();
        assert_eq!(lost.iter().map(|l| l.range).collect::<Vec<_>>(), [ByteRange { offset: 2 * G, len: G }]);
        r.src.heal();
        for g in [0, 1, 3, 4] {
            assert_eq!(r.byte(g * G).await, Ok(1), "granule {g}");
        }
        assert_eq!(r.byte(2 * G).await, Err(IoError::new(libc::EIO, Code::RangeLost)));
        let event = r.cx.env().events.next().expect("an event");
        assert_eq!((event.kind, event.offset, event.len), (EventKind::RangeLost, 2 * G, G));
    });
}

#[test]
fn a_panic_in_a_copy_breaks_the_snapshot_and_the_guests_go_on() {
    for (node, call) in [("src", READ), ("tgt", WRITE)] {
        rig(4 * G, json!({}), |r| async move {
            let held = if node == "src" { &r.src } else { &r.tgt };
            held.fault(Fault::Panic, move |c, _| c == call);
            let (first, second) = (r.write(0, 512), r.write(512, 512));
            assert_eq!((r.ended(&first).await, r.ended(&second).await), (Ok(()), Ok(())));
            assert_eq!(r.cbw().broken().expect("broken").error.code, Code::Panicked);
        });
        rig(4 * G, json!({"on-cbw-error": "break-guest-write"}), |r| async move {
            let held = if node == "src" { &r.src } else { &r.tgt };
            held.fault(Fault::Panic, move |c, _| c == call);
            assert_eq!(r.ended(&r.write(0, 512)).await, Err(IoError::new(libc::EIO, Code::CbwFailed)));
            held.heal();
            assert_eq!(r.ended(&r.write(0, 512)).await, Ok(()), "the granule is needed again");
            assert_eq!(r.byte(0).await, Ok(1));
        });
    }
}

#[test]
fn the_end_of_the_snapshot_lets_everybody_go_and_drops_what_comes_later() {
    rig(4 * G, json!({}), |r| async move {
        r.tgt.hold_all(WRITE);
        r.src.hold(|c, range| c == READ && range.offset == 2 * G);
        let (first, second, third) = (r.write(0, 512), r.write(512, 512), r.write(2 * G, 512));
        r.stuck(&first).await;
        r.cbw().end();
        for w in [first, second, third] {
            assert_eq!(r.ended(&w).await, Ok(()));
        }
        assert_eq!(r.stats().cbw_late, 2);
        r.src.release();
        r.settled().await;
        assert_eq!(r.journal.count("tgt", WRITE), 1, "the copy that was still reading wrote nothing");
        // The filter goes without waiting for ever for the copy that its target does not answer.
        let before = r.clock.now();
        r.filter.base().settle(&r.cx).await.expect("settled");
        assert_eq!(r.clock.now().since(before), super::node::LATE_WAIT);
        r.tgt.release();
        assert!(r.cbw().quiet(&r.cx, None).await);
        assert_eq!(r.stats().cbw_late, 0);
    });
}

#[test]
fn a_failed_background_write_is_tried_again_from_memory_and_readable_meanwhile() {
    rig(4 * G, json!({}), |r| async move {
        let eio = IoError::os(libc::EIO);
        r.tgt.fault(Fault::Fail(eio), |c, _| c == WRITE);
        let copy = r.copy(0, 2 * G, Buffers::alloc(2 * G as usize, 4096));
        assert_eq!(r.ended(&copy).await, Err(eio));
        assert_eq!(r.cbw().failed_from(0), Some(ByteRange { offset: 0, len: 2 * G }));
        assert!(!r.cbw().is_complete() && r.cbw().needed_from(0, 1 << 20).is_some_and(|n| n.offset == 2 * G));
        // The guest goes on, over the data that only the memory has (S72).
        assert_eq!(r.ended(&r.write(0, 512)).await, Ok(()));
        assert_eq!(r.byte(0).await, Ok(1));
        r.tgt.heal();
        assert_eq!(r.ended(&r.copy(0, 2 * G, Buffers::new())).await, Ok(()));
        assert_eq!(r.cbw().failed_from(0), None);
        assert_eq!((r.byte(0).await, r.byte(2 * G - 1).await), (Ok(1), Ok(1)));
        let rest = Buffers::alloc(2 * G as usize, 4096);
        assert_eq!(r.ended(&r.copy(2 * G, 2 * G, rest)).await, Ok(()));
        assert!(r.cbw().is_complete());
    });
}

#[test]
fn a_background_copy_holds_guests_for_its_read_only() {
    rig(4 * G, json!({}), |r| async move {
        r.src.hold_all(READ);
        r.tgt.hold_all(WRITE);
        let copy = r.copy(0, 4 * G, Buffers::alloc(4 * G as usize, 4096));
        let write = r.write(3 * G, 512);
        r.stuck(&write).await;
        r.src.release();
        assert_eq!(r.ended(&write).await, Ok(()), "although nothing is on the target");
        r.stuck(&copy).await;
        let (read, bufs) = r.read(G, 3 * G);
        assert_eq!(r.ended(&read).await, Ok(()));
        assert_eq!(bufs.to_vec(), vec![1; 3 * G as usize]);
        r.tgt.release();
        assert_eq!(r.ended(&copy).await, Ok(()));
    });
}

#[test]
fn zeros_move_no_payload_and_long_ones_are_not_cut() {
    let size = 200 << 20;
    rig_over(
        size,
        json!({}),
        false,
        |_| {},
        |r| async move {
            let range = ByteRange { offset: 512, len: size - 1024 };
            let zeroes = r.run(&r.filter, Request::write_zeroes(range, Flags::MAY_UNMAP));
            assert_eq!(r.ended(&zeroes).await, Ok(()));
            assert_eq!(r.journal.count("tgt", WRITE), 0);
            assert_eq!(r.journal.count("src", READ), 0, "the source was asked, not read");
            assert!(r.journal.count("tgt", ZEROES) <= 5, "{}", r.journal.count("tgt", ZEROES));
            // What is zero is also found by reading.
            assert_eq!(r.ended(&r.write(0, 512)).await, Ok(()));
            assert_eq!(r.journal.count("tgt", WRITE), 0);
            assert_eq!(r.byte(0).await, Ok(0));
        },
    );
}

#[test]
fn zeros_are_not_written_to_a_target_that_is_known_to_hold_them() {
    let fresh = |tgt: &Held| {
        tgt.set_limits(crate::node::Limits { zero_init: true, ..crate::node::Limits::plain(4 * G) })
    };
    rig_over(4 * G, json!({}), false, fresh, |r| async move {
        assert_eq!(r.ended(&r.write(0, 512)).await, Ok(()));
        assert_eq!(r.journal.count("tgt", WRITE) + r.journal.count("tgt", ZEROES), 0);
        assert_eq!(r.byte(0).await, Ok(0));
    });
}

#[test]
fn a_long_discard_of_data_is_copied_in_batches_and_can_be_cancelled() {
    rig(8 << 20, json!({}), |r| async move {
        r.src.hold_all(READ);
        let (own, cancel) = r.cx.with_new_cancel();
        let node = r.filter.base().clone();
        let discard = start(&r.cx, async move {
            own.run(&*node, Request::discard(ByteRange { offset: 0, len: 8 << 20 })).await
        });
        for i in 0..3u64 {
            r.stuck(&discard).await;
            assert_eq!(r.src.held(), [(READ, ByteRange { offset: i << 20, len: 1 << 20 })]);
            assert!(r.src.let_go(0, Ok(())));
        }
        r.stuck(&discard).await;
        cancel.cancel();
        assert_eq!(r.ended(&discard).await, Err(IoError::cancelled()));
        assert_eq!(r.journal.count("src", Call::Io(Op::Discard)), 0, "nothing went down");
        r.src.release();
        r.settled().await;
        assert_eq!(r.byte(0).await, Ok(1));
    });
}

#[test]
fn held_discards_do_nothing_where_they_would_need_a_copy() {
    rig(4 * G, json!({"discard-policy": "hold"}), |r| async move {
        let discard = |offset| Request::discard(ByteRange { offset, len: G });
        assert_eq!(r.ended(&r.run(&r.filter, discard(0))).await, Ok(()));
        assert_eq!(r.journal.count("src", READ) + r.journal.count("src", Call::Io(Op::Discard)), 0);
        assert_eq!(r.ended(&r.write(G, 512)).await, Ok(()));
        assert_eq!(r.ended(&r.run(&r.filter, discard(G))).await, Ok(()));
        assert_eq!(r.journal.count("src", Call::Io(Op::Discard)), 1, "nothing is in its way there");
    });
}

#[test]
fn flush_and_reads_concern_the_source_only() {
    rig(4 * G, json!({}), |r| async move {
        r.tgt.hold(|_, _| true);
        assert_eq!(r.ended(&r.run(&r.filter, Request::flush())).await, Ok(()));
        let read = Request::read(0, Buffers::alloc(512, 512));
        assert_eq!(r.ended(&r.run(&r.filter, read)).await, Ok(()));
        assert!(r.tgt.held().is_empty());
    });
}

#[test]
fn a_sequential_writer_waits_at_its_beginning_only() {
    let size = 16 << 20;
    rig_over(
        size,
        json!({}),
        true,
        |tgt| tgt.set_driver("ram-cache"),
        |r| async move {
            // 32 KiB at a time: every second write meets a new granule.
            for i in 0..3u64 {
                assert_eq!(r.ended(&r.write(i * G / 2, G / 2)).await, Ok(()));
            }
            r.settled().await;
            for i in 3..512u64 {
                // Reads of the source go through when nobody waits for them, and not while a write does.
                r.src.hold_all(READ);
                let write = r.write(i * G / 2, G / 2);
                assert_eq!(r.ended(&write).await, Ok(()), "write {i}");
                r.src.release();
                r.settled().await;
            }
            let (read, bufs) = r.read(0, size);
            assert_eq!(r.ended(&read).await, Ok(()));
            assert!(bufs.to_vec().iter().all(|b| *b == 1));
        },
    );
}

#[test]
fn without_a_cache_nothing_is_read_ahead() {
    rig(64 * G, json!({}), |r| async move {
        for g in 0..16 {
            assert_eq!(r.ended(&r.write(g * G, 512)).await, Ok(()));
        }
        assert_eq!(r.journal.count("src", READ), 16);
    });
}

#[test]
fn granules_that_are_safe_are_marked_by_the_fast_path_unless_a_reader_is_in_the_way() {
    rig(4 * G, json!({}), |r| async move {
        let range = ByteRange { offset: 0, len: 512 };
        assert!(!r.cbw().passes(range), "needed");
        r.src.hold(|c, range| c == READ && range.len == 512);
        let (read, _) = r.read(0, 512);
        r.stuck(&read).await;
        assert_eq!(r.ended(&r.copy(0, 2 * G, Buffers::alloc(2 * G as usize, 4096))).await, Ok(()));
        assert!(!r.cbw().passes(range), "a reader is at the source");
        assert!(r.cbw().passes(ByteRange { offset: G, len: 512 }), "not there");
        r.src.release();
        assert_eq!(r.ended(&read).await, Ok(()));
        assert!(r.cbw().passes(range));
    });
}

#[test]
fn space_is_waited_for_no_longer_than_the_bound() {
    // A target whose reservations never come.
    for (policy, result) in
        [("break-snapshot", Ok(())), ("break-guest-write", Err(IoError::new(libc::EIO, Code::CbwFailed)))]
    {
        let o = json!({"latency-bound-ms": 70, "on-cbw-error": policy});
        rig_over(
            4 * G,
            o,
            true,
            |tgt| tgt.set_full(true),
            |r| async move {
                let (first, second) = (r.write(0, 512), r.write(2 * G, 512));
                r.stuck(&first).await;
                assert!(!r.cbw().is_copying(ByteRange { offset: 0, len: 4 * G }), "no claim while it waits");
                assert_eq!(first.result().await, result);
                assert_eq!(r.clock.now().0, 70_000_000);
                assert_eq!(r.ended(&second).await, result);
                assert_eq!(r.cbw().first_error().expect("reported").error.code, Code::CacheFull);
                assert_eq!(r.cbw().broken().is_some(), policy == "break-snapshot");
            },
        );
    }
}

#[test]
fn a_cache_smaller_than_a_write_takes_it_piece_by_piece() {
    rig_over(
        4 * G,
        json!({}),
        true,
        |tgt| tgt.set_most(2 * G + 512),
        |r| async move {
            assert_eq!(r.ended(&r.write(0, 4 * G)).await, Ok(()));
            assert_eq!(r.journal.count("src", READ), 2, "two granules at a time");
            assert_eq!(r.tgt.reserved(), 0);
            assert!(r.cbw().broken().is_none());
        },
    );
}

#[test]
fn space_for_less_than_a_granule_is_none() {
    rig_over(
        2 * G,
        json!({}),
        true,
        |tgt| tgt.set_most(512),
        |r| async move {
            assert_eq!(r.ended(&r.write(0, 512)).await, Ok(()), "the guest goes on");
            assert_eq!(r.cbw().broken().expect("broken").error.errno, libc::ENOSPC);
            assert_eq!(r.journal.count("src", READ), 0);
            assert_eq!(r.tgt.reserved(), 0);
        },
    );
}

#[test]
fn after_a_wait_for_space_others_may_have_been_faster() {
    rig_over(
        4 * G,
        json!({}),
        true,
        |tgt| tgt.set_full(true),
        |r| async move {
            let write = r.write(0, 512);
            r.stuck(&write).await;
            // A background copy needs no reservation.
            assert_eq!(r.ended(&r.copy(0, G, Buffers::alloc(G as usize, 4096))).await, Ok(()));
            r.tgt.set_full(false);
            assert_eq!(r.ended(&write).await, Ok(()));
            assert_eq!(r.journal.count("src", READ), 1, "not read again");
            assert_eq!(r.tgt.reserved(), 0, "the surplus went back");
        },
    );
}

#[test]
fn what_is_released_while_it_is_read_from_the_target_is_not_shown() {
    rig(4 * G, json!({}), |r| async move {
        assert_eq!(r.ended(&r.write(0, 512)).await, Ok(()));
        r.tgt.hold_all(READ);
        let (read, _) = r.read(0, 512);
        r.stuck(&read).await;
        let discard = r.run(&r.view, Request::discard(ByteRange { offset: 0, len: G }));
        assert_eq!(r.ended(&discard).await, Ok(()));
        r.tgt.release();
        assert_eq!(r.ended(&read).await, Err(IoError::new(libc::EACCES, Code::Released)));
        let status = r.cx.status(&**r.view.base(), ByteRange { offset: 0, len: 4 * G }).await.expect("told");
        assert_eq!((status.len, status.flags), (G, ExtentFlags::NO_ACCESS));
    });
}
