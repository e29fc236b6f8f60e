//! What a context leaves behind when it is gone: no thread, no descriptor. A process of its own, because it counts those of the process.

#![cfg(not(cobweb_loom))]

use cobweb::context::{Context, ContextOptions};
use cobweb::io::EngineKind;
use cobweb::job::Status;
use cobweb::options::Options;
use std::path::Path;

fn count(what: &str) -> usize {
    std::fs::read_dir(Path::new("/proc/self").join(what)).expect("proc is there").count()
}

/// Waits until a thread that has been told to end is gone from the list: joining it comes a moment earlier.
fn settled(threads: usize) -> usize {
    for _ in 0..10_000 {
        if count("task") <= threads {
            break;
        }
        std::thread::yield_now();
    }
    count("task")
}

/// A context with a bit of everything: files by both engines, a filter that throttles, a cache, a job that is cut off by the end.
fn use_one(dir: &Path, aio: EngineKind, round: usize) {
    let context = Context::new(ContextOptions { aio, ..ContextOptions::default() }, None).expect("a context");
    context.start().expect("it starts");
    let graph = context.graph();
    let open = |text: &str| graph.open(Options::parse(text).expect("parses")).expect("opens");
    let path = |name: &str| dir.join(name).display().to_string();
    open(&format!("driver=file,node-name=s,filename={}", path("s")));
    open(&format!(
        "driver=throttle,node-name=t,limits.bps-total=64k,file.driver=file,file.filename={}",
        path("t")
    ));
    let disk = graph.add_disk("vda").expect("free");
    graph.insert(&disk, Some(graph.node("s").expect("there"))).expect("inserted");
    disk.write(0, &vec![round as u8 | 1; 1 << 20]).expect("written");
    let text = "device=vda,target=t,sync=full,ram-cache.capacity=64M,max-chunk=64k";
    let job = context.jobs().start("backup", Options::parse(text).expect("parses")).expect("starts");
    disk.write(65536, &[round as u8; 4096]).expect("written");
    disk.flush().expect("flushed");
    assert_eq!(job.status(), Status::Running, "the target is slow");
    // Both engines by turns.
    if (round / 2).is_multiple_of(2) {
        // Handles that outlive the context: their calls must not bring anything back to life.
        drop(context);
        let mut block = [0; 512];
        let _ = disk.read(0, &mut block);
    }
}

#[test]
fn two_hundred_contexts_leave_no_thread_and_no_descriptor() {
    let dir = tempfile::tempdir().expect("a directory");
    for name in ["s", "t"] {
        let file = std::fs::File::create(dir.path().join(name)).expect("created");
        file.set_len(1 << 20).expect("sized");
    }
    let engines = [EngineKind::Auto, EngineKind::Threads];
    // What is made once per process (a probe of io_uring, the allocator's own things).
    for round in 0..6 {
        use_one(dir.path(), engines[round % 2], round);
    }
    let before = (settled(2), count("fd"));
    assert_eq!(before.0, 2, "the test's own threads");
    for round in 0..200 {
        use_one(dir.path(), engines[round % 2], round);
    }
    assert_eq!((settled(before.0), count("fd")), before);
}
