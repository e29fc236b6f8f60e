//! The allocator over images in memory.

use super::pending::UnlinkedKind;
use super::{Allocator, Config, Kind, MetadataMap};
use crate::error::IoResult;
use crate::format::qcow2::create::{CreateOptions, create};
use crate::format::qcow2::header::{Header, Purpose};
use crate::format::qcow2::layout::Layout;
use crate::format::qcow2::meta_io::read_words;
use crate::format::qcow2::refcount::table::Refcounts;
use crate::graph::Graph;
use crate::node::{Edge, Growth, Node};
use crate::options::Options;
use crate::queue::{Cx, testing};
use crate::request::{Buffers, Class, Request};
use crate::sync::Arc;
use crate::units::ByteRange;
use std::collections::BTreeSet;

struct Nothing;

impl MetadataMap for Nothing {
    fn at(&self, _: ByteRange) -> Option<&'static str> {
        None
    }
}

struct L1At(u64);

impl MetadataMap for L1At {
    fn at(&self, range: ByteRange) -> Option<&'static str> {
        range.overlaps(ByteRange { offset: self.0, len: 512 }).then_some("L1 table")
    }
}

fn node(text: &str) -> Arc<dyn Node> {
    let graph = Graph::new(testing::env(0));
    graph.open(Options::parse(text).expect("options")).expect("it opens").top_node()
}

async fn new_image(cx: &Cx, node: &Arc<dyn Node>, options: &CreateOptions) -> Layout {
    create(cx, &**node, None, options).await.expect("created");
    header(cx, node, options.cluster_size).await.layout()
}

async fn header(cx: &Cx, node: &Arc<dyn Node>, cluster: u64) -> Header {
    let bufs = Buffers::alloc(cluster as usize, 4096);
    cx.run(&**node, Request::read(0, bufs.clone())).await.expect("read");
    Header::parse(&bufs.to_vec(), node.limits().size, Purpose::Use).expect("a header")
}

async fn open(cx: &Cx, node: &Arc<dyn Node>, layout: Layout, map: Arc<dyn MetadataMap>) -> Arc<Allocator> {
    let h = header(cx, node, layout.cluster_size()).await;
    let words = (u64::from(h.reftable_clusters) << layout.cluster_bits) / 8;
    let words = read_words(cx, &**node, h.reftable_offset, words as usize, Class::Guest).await.expect("read");
    let counts = Refcounts::new(layout, h.reftable_offset, words, 4, 512);
    let config = Config {
        layout,
        file: Arc::new(Edge::to_node(node.clone())),
        metadata: map,
        grace: Arc::default(),
        run_len: (64 << 10, 1 << 20),
    };
    Allocator::new(config, counts)
}

/// What a commit does with refcounts alone.
async fn commit(cx: &Cx, node: &Arc<dyn Node>, alloc: &Allocator) -> IoResult {
    let number = alloc.begin_cut();
    let cut = alloc.take_cut();
    for piece in cut.new.iter().chain(&cut.parts).chain(&cut.table_parts) {
        cx.run(&**node, Request::write(piece.offset.get(), Buffers::from_bytes(&piece.bytes))).await?;
    }
    assert!(cut.table_moved.is_none());
    alloc.end_cut(&cut, number, false);
    Ok(())
}

fn options(cluster_size: u64) -> CreateOptions {
    CreateOptions { cluster_size, ..CreateOptions::new(64 << 20) }
}

#[test]
fn clusters_are_handed_out_once_zeroed_and_counted_and_ripe_after_a_commit() {
    let node = node("driver=memory,size=0");
    testing::block_on(&testing::env(0), |cx| async move {
        let layout = new_image(&cx, &node, &options(4096)).await;
        let alloc = open(&cx, &node, layout, Arc::new(Nothing)).await;
        let mut seen = BTreeSet::new();
        for n in 0..300u64 {
            let kind = if n % 10 == 0 { Kind::Metadata } else { Kind::Data };
            let len = 4096 * (1 + n % 5);
            let grants = alloc.take(&cx, kind, len).await.expect("space");
            assert_eq!(grants.iter().map(|g| g.range.len).sum::<u64>(), len);
            for g in &grants {
                assert!(g.zeroed && g.range.end() <= node.limits().size);
                for at in (g.range.offset..g.range.end()).step_by(4096) {
                    assert!(seen.insert(at), "{at:#x} twice");
                    assert_eq!(alloc.refcount(crate::format::qcow2::addr::HostOffset(at)), Some(1));
                }
            }
        }
        assert!(*seen.first().expect("some") >= 4 * 4096);
        let grant = alloc.take(&cx, Kind::Data, 4096).await.expect("space")[0];
        assert!(!grant.ripe);
        commit(&cx, &node, &alloc).await.expect("written");
        let grant = alloc.take(&cx, Kind::Data, 4096).await.expect("space")[0];
        assert!(grant.ripe, "the rest of a run that was there at the cut");
        let (refills, _) = alloc.statistics();
        assert!((3..20).contains(&refills), "{refills}");
    });
}

#[test]
fn many_who_find_the_runs_empty_share_a_refill() {
    let node = node("driver=memory,size=0");
    testing::block_on(&testing::env(0), |cx| async move {
        let layout = new_image(&cx, &node, &options(4096)).await;
        let alloc = open(&cx, &node, layout, Arc::new(Nothing)).await;
        let takes = (0..10).map(|_| async {
            let grants = alloc.take(&cx, Kind::Data, 4096).await?;
            assert_eq!(grants.len(), 1);
            Ok(())
        });
        crate::format::qcow2::join::join_bounded(takes, 10).await.expect("space");
        assert_eq!(alloc.statistics().0, 1);
    });
}

#[test]
fn a_node_of_fixed_length_is_used_up_to_its_last_cluster_and_then_full() {
    let window = node("driver=raw,offset=0,size=1M,file.driver=memory,file.size=2M");
    testing::block_on(&testing::env(0), |cx| async move {
        let layout = new_image(&cx, &window, &options(4096)).await;
        let alloc = open(&cx, &window, layout, Arc::new(Nothing)).await;
        let mut taken = Vec::new();
        let error = loop {
            match alloc.take(&cx, Kind::Data, 4096).await {
                Ok(g) => taken.push(g[0].range),
                Err(e) => break e,
            }
        };
        assert_eq!(error.errno, libc::ENOSPC);
        // Header, table, block, L1; the metadata run keeps at most two tables and what it was given at first.
        let kept = alloc.state.lock().metadata.left() / 4096;
        assert_eq!(taken.len() as u64 + kept, 256 - 4);
        let back = taken.swap_remove(100);
        alloc.give_back(back);
        assert_eq!(alloc.take(&cx, Kind::Data, 4096).await.expect("space again")[0].range, back);
        assert_eq!(alloc.take(&cx, Kind::Data, 4096).await.expect_err("full").errno, libc::ENOSPC);
    });
}

#[test]
fn the_tail_that_a_dead_writer_left_is_used_again_and_zeroed_first() {
    let node = node("driver=memory,size=0");
    testing::block_on(&testing::env(0), |cx| async move {
        let layout = new_image(&cx, &node, &options(4096)).await;
        let old = node.limits().size;
        node.resize(&cx, 1 << 20, Growth::Sparse).await.expect("grown");
        let garbage = Buffers::alloc((1 << 20) - old as usize, 8);
        garbage.fill(0xee);
        cx.run(&*node, Request::write(old, garbage)).await.expect("written");
        let alloc = open(&cx, &node, layout, Arc::new(Nothing)).await;
        let g = alloc.take(&cx, Kind::Data, 4096).await.expect("space")[0];
        assert!(g.zeroed && g.range.end() < 1 << 20);
        let seen = Buffers::alloc(4096, 8);
        cx.run(&*node, Request::read(g.range.offset, seen.clone())).await.expect("read");
        assert!(seen.is_zero());
    });
}

#[test]
fn what_was_unlinked_is_free_after_its_cut_and_after_those_who_saw_it() {
    let node = node("driver=memory,size=0");
    testing::block_on(&testing::env(0), |cx| async move {
        let layout = new_image(&cx, &node, &options(4096)).await;
        let alloc = open(&cx, &node, layout, Arc::new(Nothing)).await;
        let g = alloc.take(&cx, Kind::Data, 8 * 4096).await.expect("space")[0];
        let pass = alloc.grace.enter();
        alloc.unlink(g.range, UnlinkedKind::Clusters, true);
        let free = |alloc: &Allocator| alloc.state.lock().space.total();
        alloc.release_all(&cx).await.expect("nothing to do");
        assert_eq!(free(&alloc), 0, "its cut is not durable");
        commit(&cx, &node, &alloc).await.expect("written");
        let flight = alloc.release_soon(&cx);
        assert!(flight.result().is_none() && free(&alloc) == 0, "somebody may still use it");
        drop(pass);
        flight.wait(&cx).await.expect("released");
        assert_eq!(free(&alloc), g.range.len);
        assert!(alloc.is_dirty(), "the lowered counts wait for the next commit");
    });
}

#[test]
fn a_shared_cluster_is_not_free_when_one_of_its_users_goes() {
    let node = node("driver=memory,size=0");
    testing::block_on(&testing::env(0), |cx| async move {
        let layout = new_image(&cx, &node, &options(4096)).await;
        let alloc = open(&cx, &node, layout, Arc::new(Nothing)).await;
        let g = alloc.take(&cx, Kind::Data, 2 * 4096).await.expect("space")[0];
        let first = ByteRange { offset: g.range.offset, len: 4096 };
        alloc.state.lock().counts.change(first, false).expect("counted twice");
        // Compressed data that touches both.
        let data = ByteRange { offset: first.offset + 4000, len: 200 };
        alloc.unlink(data, UnlinkedKind::Compressed, false);
        commit(&cx, &node, &alloc).await.expect("written");
        alloc.release_all(&cx).await.expect("released");
        let free: Vec<_> = alloc.state.lock().space.extents().collect();
        assert_eq!(free, [ByteRange { offset: first.end(), len: 4096 }]);
    });
}

#[test]
fn the_unused_rest_of_runs_goes_back_and_the_file_can_be_cut() {
    let node = node("driver=memory,size=0");
    testing::block_on(&testing::env(0), |cx| async move {
        let layout = new_image(&cx, &node, &options(4096)).await;
        let alloc = open(&cx, &node, layout, Arc::new(Nothing)).await;
        let m = alloc.take_table(&cx).await.expect("space");
        let g = alloc.take(&cx, Kind::Data, 4096).await.expect("space")[0];
        let end = alloc.retire_runs(&cx).await.expect("no I/O fails").expect("something is left");
        assert_eq!(end, g.range.end().max(m.range.end()));
        assert_eq!(alloc.refcount(crate::format::qcow2::addr::HostOffset(end)), Some(0));
        assert_eq!(alloc.retire_runs(&cx).await, Ok(None));
    });
}

#[test]
fn a_cluster_of_metadata_that_is_not_counted_is_never_handed_out() {
    let node = node("driver=memory,size=0");
    testing::block_on(&testing::env(0), |cx| async move {
        let layout = new_image(&cx, &node, &options(4096)).await;
        // The L1 table lies in the last cluster of the new file; here one is said to lie behind it.
        let alloc = open(&cx, &node, layout, Arc::new(L1At(4 * 4096 + 1024))).await;
        let e = alloc.take(&cx, Kind::Data, 4096).await.expect_err("corrupt");
        assert_eq!(e.errno, libc::EIO);
    });
}
