//! Random 4 KiB reads and overwrites, 32 in flight a queue, of disks in memory: raw, one qcow2 layer, chains of layers whose data is at the bottom; and one layer through two queues
//! on two threads.
//!
//! Memory takes no time to answer, so what is measured is the driver. The figure is the time of one request. Two targets of the design: a million requests a
//! second on one thread, 1.6 times that on two, and a chain of 100 layers at most 1.1 times a chain of one.
//!
//! ```text
//! cargo bench --bench qcow2
//! ```

use cobweb::context::{Context, ContextOptions};
use cobweb::format::qcow2::create::{BackingName, CreateOptions, Preallocation, create};
use cobweb::graph::Disk;
use cobweb::io::memory::MemoryNode;
use cobweb::options::Options;
use cobweb::queue::{Cqe, HostOp, HostReq, Queue};
use cobweb::request::{Buffers, Request};
use criterion::{Criterion, criterion_group, criterion_main};
use std::hint::black_box;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

/// Bytes of the disk. Small enough for the data to stay in a processor's cache in part, so that the tables are what counts.
const SIZE: u64 = 64 << 20;
const BLOCK: u64 = 4096;
const DEPTH: usize = 32;

/// Which disk.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Raw,
    /// So many qcow2 layers, the lowest of which has all the data.
    Layers(usize),
    /// One qcow2 layer that can be written, through so many queues.
    Writable(usize),
}

/// What one thread uses.
struct Side {
    queue: Queue,
    slots: Vec<Buffers>,
}

struct Bench {
    sides: Vec<Side>,
    // Dropped last.
    _disk: Arc<Disk>,
    _context: Arc<Context>,
}

impl Bench {
    fn new(kind: Kind) -> Self {
        let context = Context::new(ContextOptions::default(), None).expect("context");
        context.start().expect("start");
        let graph = context.graph();
        let text = match kind {
            Kind::Raw => {
                let node = MemoryNode::new(SIZE);
                let file = node.clone();
                // What was never written would be answered without a copy.
                let data = Buffers::alloc(SIZE as usize, 4096);
                let done =
                    context.env().block_on(|cx| async move { cx.run(&*file, Request::write(0, data)).await });
                done.expect("may block").expect("written");
                graph.add_node("m", node).expect("added");
                "driver=raw,file=m".to_owned()
            }
            Kind::Layers(_) | Kind::Writable(_) => {
                let layers = if let Kind::Layers(layers) = kind { layers } else { 1 };
                let mode = if matches!(kind, Kind::Writable(_)) { "" } else { "read-only=on," };
                for i in 0..layers {
                    let node = MemoryNode::new(if i == 0 { SIZE + (4 << 20) } else { 1 << 20 });
                    let options = if i == 0 {
                        CreateOptions { preallocation: Preallocation::Full, ..CreateOptions::new(SIZE) }
                    } else {
                        let backing = BackingName { name: b"below".to_vec(), format: "qcow2".to_owned() };
                        CreateOptions { backing: Some(backing), ..CreateOptions::new(SIZE) }
                    };
                    let file = node.clone();
                    let made =
                        context.env().block_on(|cx| async move { create(&cx, &*file, None, &options).await });
                    made.expect("may block").expect("created");
                    graph.add_node(&format!("m{i}"), node).expect("added");
                    let below = if i == 0 { String::new() } else { format!(",backing=l{}", i - 1) };
                    if i + 1 < layers {
                        let text = format!("driver=qcow2,read-only=on,file=m{i},node-name=l{i}{below}");
                        graph.open(Options::parse(&text).expect("options")).expect("opens");
                    }
                }
                let last = layers - 1;
                let below = if last == 0 { String::new() } else { format!(",backing=l{}", last - 1) };
                format!("driver=qcow2,{mode}file=m{last}{below}")
            }
        };
        let vertex = graph.open(Options::parse(&text).expect("options")).expect("opens");
        let disk = graph.add_disk("").expect("disk");
        graph.insert(&disk, Some(vertex)).expect("inserted");
        let queues = if let Kind::Writable(queues) = kind { queues } else { 1 };
        let side = |_| {
            let queue = Queue::new(&disk, DEPTH as u32 + 1).expect("queue");
            let memory = Buffers::alloc(DEPTH * BLOCK as usize, 4096);
            let slots = (0..DEPTH).map(|i| memory.slice(i * BLOCK as usize, BLOCK as usize)).collect();
            Side { queue, slots }
        };
        let bench = Self { sides: (0..queues).map(side).collect(), _disk: disk.clone(), _context: context };
        // Everything is looked at once, so that the tables are in RAM.
        bench.sides[0].run(false, SIZE / BLOCK, |n| n * BLOCK);
        bench
    }

    /// `count` requests, shared by the queues, each driven by a thread of its own; the time from the first to the last.
    fn all(&self, write: bool, count: u64) -> Duration {
        let share = count.div_ceil(self.sides.len() as u64);
        if let [side] = self.sides.as_slice() {
            let begin = Instant::now();
            black_box(side.run(write, count, random));
            return begin.elapsed();
        }
        let start = Barrier::new(self.sides.len() + 1);
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0u64..)
                .zip(&self.sides)
                .map(|(n, side)| {
                    let start = &start;
                    scope.spawn(move || {
                        start.wait();
                        black_box(side.run(write, share, |i| random(i + (n << 40))));
                    })
                })
                .collect();
            start.wait();
            let begin = Instant::now();
            threads.into_iter().for_each(|t| t.join().expect("a side"));
            begin.elapsed()
        })
    }
}

impl Side {
    /// Sends `count` requests and waits for their ends; a hash of what they ended with.
    fn run(&self, write: bool, count: u64, place: impl Fn(u64) -> u64) -> u64 {
        let (mut sent, mut ended, mut hash) = (0u64, 0u64, 0u64);
        let mut free: Vec<usize> = (0..DEPTH).collect();
        let (mut reqs, mut cqes): (Vec<HostReq>, Vec<Cqe>) =
            (Vec::with_capacity(DEPTH), Vec::with_capacity(DEPTH));
        while ended < count {
            while sent < count {
                let Some(slot) = free.pop() else { break };
                let (at, data) = (place(sent), self.slots[slot].clone());
                let req = if write { Request::write(at, data) } else { Request::read(at, data) };
                reqs.push(HostReq { user_data: slot as u64, op: HostOp::Io(req) });
                sent += 1;
            }
            self.queue.submit(&mut reqs);
            self.queue.reap(&mut cqes, DEPTH, 1, Some(Duration::from_secs(10)));
            for c in cqes.drain(..) {
                assert_eq!(c.res, BLOCK as i64, "a request failed");
                hash = hash.wrapping_mul(31).wrapping_add(1);
                free.push(c.user_data as usize);
                ended += 1;
            }
        }
        hash
    }
}

fn random(n: u64) -> u64 {
    let x = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x >> 20) % (SIZE / BLOCK) * BLOCK
}

fn reads(c: &mut Criterion) {
    let kinds = [
        ("raw", Kind::Raw),
        ("layers-1", Kind::Layers(1)),
        ("layers-2", Kind::Layers(2)),
        ("layers-21", Kind::Layers(21)),
        ("layers-101", Kind::Layers(101)),
    ];
    let mut group = c.benchmark_group("qcow2-read-4k");
    for (name, kind) in kinds {
        let bench = Bench::new(kind);
        println!("{name}: hash {:016x}", bench.sides[0].run(false, 500, random));
        group.bench_function(name, |b| b.iter_custom(|count| bench.all(false, count)));
    }
    group.finish();
}

fn queues(c: &mut Criterion) {
    let mut group = c.benchmark_group("qcow2-queues");
    for queues in [1, 2] {
        let bench = Bench::new(Kind::Writable(queues));
        for (what, write) in [("read", false), ("write", true)] {
            let name = format!("{what}-4k/queues-{queues}");
            group.bench_function(name, |b| b.iter_custom(|count| bench.all(write, count)));
        }
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_millis(1500));
    targets = reads, queues
}
criterion_main!(benches);
