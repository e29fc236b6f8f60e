//! From options to a cache over real files.

use crate::events::EventKind;
use crate::graph::Graph;
use crate::io::{EngineKind, system_env};
use crate::options::Options;
use crate::request::Flags;
use crate::sync::Arc;
use crate::units::ByteRange;

const M: u64 = 1 << 20;

fn graph() -> Arc<Graph> {
    let env = system_env(EngineKind::Auto, None);
    env.start(2).expect("starts");
    Graph::new(env)
}

fn open(graph: &Arc<Graph>, text: &str) -> crate::error::Result<Arc<crate::node::Vertex>> {
    graph.open(Options::parse(text).expect("option text"))
}

fn files_of(dir: &std::path::Path) -> usize {
    std::fs::read_dir(dir).expect("a directory").count()
}

fn unlinked_of(dir: &std::path::Path) -> usize {
    let dir = dir.canonicalize().expect("a directory");
    let fds = std::fs::read_dir("/proc/self/fd").expect("on Linux");
    fds.filter_map(|f| std::fs::read_link(f.ok()?.path()).ok())
        .filter(|l| l.starts_with(&dir) && l.to_string_lossy().ends_with("(deleted)"))
        .count()
}

#[test]
fn the_spill_file_is_unlinked_and_vanishes_with_the_cache() {
    let dir = tempfile::tempdir().expect("a directory");
    let g = graph();
    let text = format!(
        "driver=ram-cache,node-name=c,capacity=2M,overflow=spill,spill={}/,spill-quota=64M,drain-delay-ms=60000,\
         file.driver=throttle,file.limits.bps-write=4M,file.file.driver=memory,file.file.size=64M",
        dir.path().display()
    );
    let vertex = open(&g, &text).expect("opens");
    assert_eq!(files_of(dir.path()), 0, "no name");
    assert!(unlinked_of(dir.path()) > 0, "but a file");
    let disk = g.add_disk("d").expect("a disk");
    g.insert(&disk, Some(vertex.clone())).expect("inserts");
    for i in 0..24u64 {
        disk.write(i * M, &vec![i as u8 + 1; M as usize]).expect("writes");
    }
    let spilled: u64 = vertex.base().get("spilled").expect("a property").parse().expect("a number");
    assert!(spilled > 0, "the target is far too slow for memory alone");
    assert_eq!(files_of(dir.path()), 0);
    let mut buf = vec![0; M as usize];
    for i in 0..24u64 {
        disk.read(i * M, &mut buf).expect("reads");
        assert!(buf.iter().all(|b| *b == i as u8 + 1), "granule {i}");
    }
    disk.write_zeroes(ByteRange { offset: 0, len: 24 * M }, Flags::empty()).expect("zeroes");
    disk.flush().expect("flushes");
    let events: Vec<_> = std::iter::from_fn(|| g.env().events.next()).collect();
    assert!(events.iter().any(|e| e.kind == EventKind::Overflow && e.source == "c"), "{events:?}");
    g.insert(&disk, None).expect("ejects");
    g.env()
        .block_on(|cx| async move { vertex.base().settle(&cx).await })
        .expect("a thread")
        .expect("settles");
    let c = g.node("c").expect("still named");
    g.forget_node(&c).expect("unused");
    drop(c);
    g.env().shut_down();
    assert_eq!(unlinked_of(dir.path()), 0, "gone with its last user");
}

#[test]
fn what_cannot_be_opened_is_refused_by_name() {
    let g = graph();
    for (text, part) in [
        ("driver=ram-cache", "'file'"),
        ("driver=ram-cache,capacity=1k,file.driver=memory,file.size=1M", "capacity"),
        ("driver=ram-cache,capcity=1M,file.driver=memory,file.size=1M", "capcity"),
        ("driver=ram-cache,spill=./no-such-dir/,spill-quota=1G,file.driver=memory,file.size=1M", "'spill'"),
        ("driver=ram-cache,spill=nobody,spill-quota=1G,file.driver=memory,file.size=1M", "nobody"),
    ] {
        let error = open(&g, text).expect_err(text).full_text();
        assert!(error.contains(part), "{text}: {error}");
    }
    assert!(g.nodes().iter().all(|n| n.base().driver() != "ram-cache"));
    g.env().shut_down();
}

#[test]
fn a_cache_goes_in_and_out_above_a_disk_in_use() {
    let g = graph();
    let base = open(&g, "driver=memory,size=4M,node-name=m").expect("opens");
    let disk = g.add_disk("d").expect("a disk");
    g.insert(&disk, Some(base.clone())).expect("inserts");
    disk.write(0, &[1; 4096]).expect("writes");
    let options = Options::parse("driver=ram-cache,capacity=4M,drain-delay-ms=60000").expect("option text");
    let filter = g.filter_add(&base, options).expect("goes in");
    disk.write(4096, &[2; 4096]).expect("writes");
    let mut buf = [0; 8192];
    disk.read(0, &mut buf).expect("reads");
    assert_eq!(buf, [[1; 4096], [2; 4096]].concat()[..]);
    assert!(filter.base().get("used").is_some_and(|u| u != "0"), "it is in the cache");
    g.filter_del(&base, &filter).expect("comes out");
    drop(filter);
    disk.read(0, &mut buf).expect("reads");
    assert_eq!(buf, [[1; 4096], [2; 4096]].concat()[..], "brought down before it went");
    g.env().shut_down();
}
