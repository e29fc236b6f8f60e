//! What hangs concerns those who wait for it, and nobody else: queues full of operations that never end, beside a disk that goes on.

#![cfg(not(cobweb_loom))]

use cobweb::context::{Context, ContextOptions};
use cobweb::graph::Disk;
use cobweb::io::EngineKind;
use cobweb::io::host::{Concurrency, HostBackend, HostIo, HostLimits, HostNode, HostOptions};
use cobweb::job::Job;
use cobweb::node::Vertex;
use cobweb::options::Options;
use cobweb::queue::{Cqe, HostOp, HostReq, Queue};
use cobweb::request::{Buffers, Request};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const MIB: u64 = 1 << 20;
/// Far more than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);
const QUEUES: usize = 4;
const DEPTH: usize = 16;

/// Keeps what it gets.
#[derive(Default)]
struct Silent(Mutex<Vec<HostIo>>);

impl HostBackend for Silent {
    fn limits(&self) -> HostLimits {
        HostLimits::plain(MIB)
    }

    fn submit(&self, io: HostIo) {
        self.0.lock().expect("no panic").push(io);
    }
}

fn options(text: &str) -> Options {
    Options::parse(text).expect("parses")
}

fn disk(context: &Context, name: &str, node: &str) -> Arc<Disk> {
    let disk = context.graph().add_disk(name).expect("free");
    context.graph().insert(&disk, Some(context.graph().node(node).expect("there"))).expect("inserted");
    disk
}

/// Ends what hangs, also when the test fails: a queue waits for its requests.
struct Release {
    fault: Arc<Vertex>,
    silent: Arc<Silent>,
}

impl Drop for Release {
    fn drop(&mut self) {
        self.fault.base().set("release", "EIO").expect("released");
        let eio = -i64::from(libc::EIO);
        self.silent.0.lock().expect("no panic").drain(..).for_each(|io| assert!(io.complete(eio)));
    }
}

/// Fills queues with reads that hang.
fn fill(disk: &Arc<Disk>) -> Vec<Queue> {
    let read = |n: usize| HostReq {
        user_data: n as u64,
        op: HostOp::Io(Request::read(n as u64 * 4096, Buffers::alloc(4096, 4096))),
    };
    (0..QUEUES)
        .map(|_| {
            let queue = Queue::new(disk, DEPTH as u32).expect("a queue");
            let mut reqs: Vec<_> = (0..DEPTH).map(read).collect();
            assert_eq!(queue.submit(&mut reqs), DEPTH);
            queue
        })
        .collect()
}

fn reap_all(queues: &[Queue]) -> Vec<Cqe> {
    let mut all = Vec::new();
    for queue in queues {
        queue.reap(&mut all, DEPTH, DEPTH, Some(PATIENCE));
    }
    all
}

fn end_of(job: &Arc<Job>) -> Result<(), cobweb::error::IoError> {
    assert!(job.wait(Some(PATIENCE)).expect("may wait"), "the job ends");
    job.outcome().expect("it has ended")
}

fn others_go_on(aio: EngineKind) {
    let context = Context::new(ContextOptions { aio, ..ContextOptions::default() }, None).expect("a context");
    context.start().expect("it starts");
    let (graph, jobs) = (context.graph(), context.jobs());
    let open = |text: &str| graph.open(options(text)).expect("opens");
    let silent = Arc::new(Silent::default());
    let parallel = HostOptions { concurrency: Concurrency::Parallel, timeout_ms: 0 };
    let backend = HostNode::new(context.env(), silent.clone(), parallel).expect("a backend");
    graph.add_node("silent", backend).expect("free");
    let hangs = "rules.0.op=any,rules.0.action=hang,file.driver=memory,file.size=1M";
    let fault = open(&format!("driver=fault,node-name=fault,{hangs}"));
    let (a, b) = (disk(&context, "a", "fault"), disk(&context, "b", "silent"));
    let (hung_a, hung_b) = (fill(&a), fill(&b));
    let release = Release { fault: fault.clone(), silent: silent.clone() };
    let all = (QUEUES * DEPTH).to_string();
    assert_eq!(
        (fault.base().get("hung"), silent.0.lock().expect("no panic").len()),
        (Some(all), QUEUES * DEPTH)
    );
    // Jobs whose targets hang, on the one worker.
    for n in 0..QUEUES {
        open(&format!("driver=memory,node-name=s{n},size=1M"));
        // Data, or there would be nothing to copy to a target that reads as zeros.
        disk(&context, &format!("d{n}"), &format!("s{n}")).write(0, &vec![1; MIB as usize]).expect("written");
        open(&format!("driver=fault,node-name=t{n},{hangs}"));
    }
    let hung_jobs: Vec<_> = (0..QUEUES)
        .map(|n| {
            let text = format!("job-id=j{n},device=d{n},target=t{n},sync=full");
            jobs.start("backup", options(&text)).expect("starts")
        })
        .collect();

    // Somebody else.
    let dir = tempfile::tempdir().expect("a directory");
    for name in ["s", "t"] {
        std::fs::File::create(dir.path().join(name)).expect("created").set_len(4 * MIB).expect("sized");
        open(&format!("driver=file,node-name={name},filename={}", dir.path().join(name).display()));
    }
    let c = disk(&context, "c", "s");
    c.write(0, &vec![7; 4 * MIB as usize]).expect("written");
    c.flush().expect("flushed");
    let queues = fill(&c);
    let done = reap_all(&queues);
    assert!(done.len() == QUEUES * DEPTH && done.iter().all(|d| d.res == 4096), "{done:?}");
    let place = graph.node("s").expect("there");
    let filter = graph.filter_add(&place, options("driver=passthrough")).expect("in");
    graph.filter_del(&place, &filter).expect("out");
    let job =
        jobs.start("backup", options("device=c,target=t,sync=full,ram-cache.capacity=8M")).expect("starts");
    assert_eq!(end_of(&job), Ok(()));
    assert!(std::fs::read(dir.path().join("t")).expect("readable").iter().all(|b| *b == 7));

    // And all of it ends when it is told to.
    for job in &hung_jobs {
        job.cancel().expect("running");
        assert_eq!(end_of(job).map_err(|e| e.errno), Err(libc::ECANCELED));
    }
    drop(release);
    for queues in [hung_a, hung_b] {
        let done = reap_all(&queues);
        assert!(
            done.len() == QUEUES * DEPTH && done.iter().all(|d| d.res == -i64::from(libc::EIO)),
            "{done:?}"
        );
    }
}

#[test]
fn full_queues_that_hang_stop_nobody_else() {
    others_go_on(EngineKind::Auto);
}

#[test]
fn full_queues_that_hang_stop_nobody_else_with_threads_only() {
    others_go_on(EngineKind::Threads);
}
