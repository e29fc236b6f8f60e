//! How many operations writing costs: each row of the cost tables (qcow2.md 3.3), counted at the file.
//!
//! The counts are exact, so they are asserted. With `COBWEB_IOCOUNT=1` in the environment they are printed as well. QEMU's side of the tables was measured with strace; see
//! `docs/benchmarks.md`. A tool that is not installed makes its test pass with a line on stderr, or fail if `CI` is set in the environment.

use cobweb::context::{Context, ContextOptions};
use cobweb::error::IoResult;
use cobweb::graph::Disk;
use cobweb::node::{Edge, Extent, Growth, Limits, Node, NodeFuture, Plan};
use cobweb::options::Options;
use cobweb::queue::Cx;
use cobweb::request::{Buffers, Flags, Op, ReqRef, Request};
use cobweb::units::ByteRange;
use std::any::Any;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};

/// Operations on a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    reads: u64,
    read_bytes: u64,
    writes: u64,
    written_bytes: u64,
    /// Growth with space, zeroing: fallocate.
    allocations: u64,
    discards: u64,
    /// Changes of the length without space: ftruncate.
    truncations: u64,
    barriers: u64,
}

/// A file in memory that counts, in blocks of 512 bytes.
#[derive(Debug)]
struct Counter {
    data: Mutex<Vec<u8>>,
    counts: Mutex<Counts>,
}

impl Counter {
    fn new(data: Vec<u8>) -> Arc<Self> {
        Arc::new(Self { data: Mutex::new(data), counts: Mutex::default() })
    }

    fn take(&self) -> Counts {
        std::mem::take(&mut self.counts.lock().expect("no panic"))
    }

    fn carry_out(&self, req: ReqRef<'_>) -> IoResult {
        let mut data = self.data.lock().expect("no panic");
        let mut counts = self.counts.lock().expect("no panic");
        let range = req.range.offset as usize..req.range.end() as usize;
        match req.op {
            Op::Read => {
                counts.reads += 1;
                counts.read_bytes += req.range.len;
                req.bufs.copy_from_slice(&data[range]);
            }
            Op::Write => {
                counts.writes += 1;
                counts.written_bytes += req.range.len;
                req.bufs.copy_to_slice(&mut data[range]);
            }
            Op::WriteZeroes => {
                counts.allocations += 1;
                data[range].fill(0);
            }
            Op::Discard => {
                counts.discards += 1;
                data[range].fill(0);
            }
            Op::Flush => counts.barriers += 1,
        }
        Ok(())
    }
}

impl Node for Counter {
    fn driver(&self) -> &'static str {
        "counter"
    }

    fn limits(&self) -> Limits {
        Limits { request_align: 512, ..Limits::plain(self.data.lock().expect("no panic").len() as u64) }
    }

    fn children(&self) -> Vec<(&'static str, &Edge)> {
        Vec::new()
    }

    fn plan(&self, req: ReqRef<'_>) -> Plan {
        Plan::Done(self.carry_out(req))
    }

    fn execute<'a>(&'a self, _cx: &'a Cx, req: Request) -> NodeFuture<'a, IoResult> {
        Box::pin(async move { self.carry_out(req.as_ref()) })
    }

    fn block_status<'a>(&'a self, _cx: &'a Cx, range: ByteRange) -> NodeFuture<'a, IoResult<Extent>> {
        Box::pin(async move { Ok(Extent::data(range.len)) })
    }

    fn settle<'a>(&'a self, _cx: &'a Cx) -> NodeFuture<'a, IoResult> {
        Box::pin(async { Ok(()) })
    }

    fn resize<'a>(&'a self, _cx: &'a Cx, size: u64, growth: Growth) -> NodeFuture<'a, IoResult> {
        Box::pin(async move {
            let mut data = self.data.lock().expect("no panic");
            let mut counts = self.counts.lock().expect("no panic");
            if growth == Growth::Reserved && size as usize > data.len() {
                counts.allocations += 1;
            } else {
                counts.truncations += 1;
            }
            data.resize(size as usize, 0);
            Ok(())
        })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn have_tools() -> bool {
    ["qemu-img", "qemu-io"].iter().all(|name| {
        let found = Command::new(name).arg("--version").output().is_ok();
        if !found {
            assert!(std::env::var_os("CI").is_none(), "{name} is not installed, and this is CI");
            eprintln!("*** SKIPPED: {name} is not installed ***");
        }
        found
    })
}

/// An image that qemu-img has made, in memory, with a base of ones if there is one.
struct Image {
    context: Arc<Context>,
    dir: tempfile::TempDir,
    file: Arc<Counter>,
    base: Option<Arc<Counter>>,
    disk: Arc<Disk>,
}

const DISK: u64 = 64 << 20;
const KIB: u64 = 1 << 10;

impl Image {
    /// Made by shell commands in a directory of its own; the image is `i.q`. Not open yet.
    fn new(commands: &[&str], base: bool) -> Self {
        let dir = tempfile::tempdir().expect("tempdir");
        for line in commands {
            let out =
                Command::new("sh").arg("-c").arg(line).current_dir(dir.path()).output().expect("it starts");
            assert!(out.status.success(), "{line}: {}", String::from_utf8_lossy(&out.stderr));
        }
        let context = Context::new(ContextOptions::default(), None).expect("context");
        context.start().expect("start");
        let disk = context.graph().add_disk("").expect("disk");
        let file = Counter::new(std::fs::read(dir.path().join("i.q")).expect("an image"));
        let base = base.then(|| Counter::new(vec![1; DISK as usize]));
        Self { context, dir, file, base, disk }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("i.q")
    }

    fn open(&self) {
        let graph = self.context.graph();
        graph.add_node("image", self.file.clone()).expect("added");
        let mut text = "driver=qcow2,discard=unmap,file=image".to_owned();
        if let Some(base) = &self.base {
            graph.add_node("base", base.clone()).expect("added");
            text += ",backing=base";
        }
        let vertex = graph
            .open(Options::parse(&text).expect("options"))
            .unwrap_or_else(|e| panic!("{}", e.full_text()));
        graph.insert(&self.disk, Some(vertex)).expect("inserted");
    }

    /// Open, with the first table and block in RAM as after some use, and nothing counted yet.
    fn warm(self) -> Self {
        self.open();
        self.take();
        self
    }

    fn take(&self) -> (Counts, Counts) {
        (self.file.take(), self.base.as_ref().map(|b| b.take()).unwrap_or_default())
    }

    fn close(&self) {
        let graph = self.context.graph();
        graph.insert(&self.disk, None).expect("taken out");
        graph.collect().expect("settled");
    }

    fn write(&self, offset: u64, len: u64) {
        let bufs = Buffers::alloc(len as usize, 4096);
        bufs.fill(0xab);
        self.disk.block(Request::write(offset, bufs)).expect("written");
    }

    fn flush(&self) {
        self.disk.flush().expect("flushed");
    }

    /// 16 writes of 4 KiB, one per cluster, from open to close. Then the image must be clean.
    fn sixteen(&self, cluster: u64, flush_each: bool) -> (Counts, Counts) {
        self.open();
        for n in 0..16 {
            self.write(n * cluster + 32 * KIB.min(cluster / 2 / KIB * KIB / 32).max(KIB), 4 * KIB);
            if flush_each {
                self.flush();
            }
        }
        if !flush_each {
            let barriers = self.file.counts.lock().expect("no panic").barriers;
            assert_eq!(barriers, 0, "nothing is synced before the guest asks");
        }
        self.close();
        let counts = self.take();
        self.check();
        counts
    }

    fn check(&self) {
        std::fs::write(self.path(), &*self.file.data.lock().expect("no panic")).expect("written");
        let out = Command::new("qemu-img")
            .args(["check", "-f", "qcow2"])
            .arg(self.path())
            .output()
            .expect("it starts");
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stdout));
    }
}

fn show(row: &str, counts: (Counts, Counts)) -> (Counts, Counts) {
    if std::env::var_os("COBWEB_IOCOUNT").is_some() {
        println!("{row}: {:?}, base {} reads of {}", counts.0, counts.1.reads, counts.1.read_bytes);
    }
    counts
}

const NEW: &str = "qemu-img create -q -f qcow2 i.q 64M";
const OVER: &str = "truncate -s 64M base.raw; qemu-img create -q -f qcow2 -b base.raw -F raw i.q 64M";

#[test]
fn sixteen_small_writes_from_open_to_close() {
    if !have_tools() {
        return;
    }
    let (c, _) = show("no backing", Image::new(&[NEW], false).sixteen(64 * KIB, false));
    assert!(
        c.reads <= 6
            && c.allocations <= 2
            && c.writes <= 20
            && c.written_bytes <= 84 * KIB
            && c.barriers <= 2,
        "{c:?}"
    );

    let (c, b) = show("raw backing", Image::new(&[OVER], true).sixteen(64 * KIB, false));
    assert!(c.reads <= 6 && c.writes <= 20 && c.written_bytes <= 1072 * KIB && c.barriers <= 2, "{c:?}");
    assert!(b.reads <= 16, "{b:?}");

    let extended = "truncate -s 64M base.raw; qemu-img create -q -f qcow2 -o extended_l2=on,cluster_size=128k -b base.raw -F raw i.q 64M";
    let (c, b) = show("extended, backing", Image::new(&[extended], true).sixteen(128 * KIB, false));
    assert!(c.reads <= 6 && c.writes <= 20 && c.written_bytes <= 84 * KIB && c.barriers <= 2, "{c:?}");
    assert_eq!(b.reads, 0);

    let snapshot = [NEW, "qemu-io -f qcow2 -c 'write 0 1M' i.q; qemu-img snapshot -c s i.q"];
    let (c, _) = show("after a snapshot", Image::new(&snapshot, false).sixteen(64 * KIB, false));
    assert!(c.reads <= 24 && c.writes <= 22 && c.written_bytes <= 1171 * KIB && c.barriers <= 3, "{c:?}");

    let compressed =
        ["yes | head -c 1M > r; qemu-img convert -q -c -f raw -O qcow2 r i.q; qemu-img resize -q i.q 64M"];
    let (c, _) = show("over compressed", Image::new(&compressed, false).sixteen(64 * KIB, false));
    assert!(c.reads <= 22 && c.writes <= 21 && c.written_bytes <= 1126 * KIB && c.barriers <= 3, "{c:?}");

    let (c, _) = show("no backing, flush each", Image::new(&[NEW], false).sixteen(64 * KIB, true));
    assert!(
        c.reads <= 6
            && c.allocations <= 2
            && c.writes <= 36
            && c.written_bytes <= 144 * KIB
            && c.barriers <= 18,
        "{c:?}"
    );

    let preallocated = "qemu-img create -q -f qcow2 -o preallocation=metadata i.q 64M";
    let (c, _) = show("preallocated, flush each", Image::new(&[preallocated], false).sixteen(64 * KIB, true));
    assert!(c.reads <= 6 && c.writes == 16 && c.written_bytes == 64 * KIB && c.barriers == 16, "{c:?}");
}

#[test]
fn sixteen_discards_from_open_to_close() {
    if !have_tools() {
        return;
    }
    let image = Image::new(&[NEW, "qemu-io -f qcow2 -c 'write 0 2M' i.q"], false);
    image.open();
    for n in 0..16 {
        image
            .disk
            .block(Request::discard(ByteRange { offset: n * 64 * KIB, len: 64 * KIB }))
            .expect("discarded");
    }
    image.close();
    let (c, _) = show("discards", image.take());
    assert!(
        c.reads <= 6 && c.discards == 1 && c.writes <= 2 && c.written_bytes <= 8 * KIB && c.barriers <= 2,
        "{c:?}"
    );
    image.check();
}

#[test]
fn one_request_and_the_flush_behind_it() {
    if !have_tools() {
        return;
    }
    // Overwrite: the minimum.
    let image = Image::new(&[NEW, "qemu-io -f qcow2 -c 'write 0 1M' i.q"], false).warm();
    image.write(32 * KIB, 4 * KIB);
    let (c, _) = show("overwrite", image.take());
    assert_eq!((c.writes, c.written_bytes), (1, 4 * KIB));
    image.write(36 * KIB, 4 * KIB);
    image.flush();
    let (c, _) = image.take();
    assert_eq!((c.writes, c.reads, c.barriers), (1, 0, 1));
    // A discard, a zeroing: no data, one barrier.
    image
        .disk
        .block(Request::write_zeroes(ByteRange { offset: 0, len: 64 * KIB }, Flags::empty()))
        .expect("zeroed");
    let (c, _) = image.take();
    assert_eq!((c.writes, c.allocations, c.barriers), (0, 0, 0));
    image.flush();
    let (c, _) = show("zeroes, flush", image.take());
    assert_eq!((c.writes, c.barriers), (1, 1));
    image.disk.block(Request::discard(ByteRange { offset: 64 * KIB, len: 64 * KIB })).expect("discarded");
    image.flush();
    let (c, _) = show("discard, flush", image.take());
    assert_eq!((c.writes, c.barriers), (1, 1));
    image.close();
    image.check();

    // Into a cluster from a ripe run: data, L2 part, one barrier.
    let image = Image::new(&[NEW], false).warm();
    image.write(0, 4 * KIB);
    image.flush();
    let (c, _) = show("first write, flush", image.take());
    assert_eq!(c.barriers, 2, "the run was not ripe");
    assert!(c.allocations <= 2 && c.writes <= 5, "{c:?}");
    image.write(64 * KIB, 4 * KIB);
    image.flush();
    let (c, _) = show("second write, flush", image.take());
    assert_eq!((c.writes, c.written_bytes, c.barriers, c.allocations), (2, 4 * KIB + 512, 1, 0));
    image.close();
    image.check();

    // A whole cluster over a base: no read.
    let image = Image::new(&[OVER], true).warm();
    image.write(64 * KIB, 64 * KIB);
    let (c, b) = show("whole cluster, backing", image.take());
    assert_eq!((c.writes, c.written_bytes, b.reads), (1, 64 * KIB, 0));
    image.close();
    image.check();

    // A part of one: one read, one write, whenever they come.
    for (offset, len) in [(32, 4), (0, 4), (16, 32)] {
        let image = Image::new(&[OVER], true).warm();
        image.write(offset * KIB, len * KIB);
        image.flush();
        let (c, b) = show("part of a cluster, backing, flush", image.take());
        assert_eq!(b.reads, 1);
        let metadata = 4 * 512;
        assert!(c.written_bytes <= 64 * KIB + metadata && c.barriers == 2, "{c:?}");
        image.close();
        image.check();
    }

    // A sub-cluster over a base: only itself.
    let extended = "truncate -s 64M base.raw; qemu-img create -q -f qcow2 -o extended_l2=on,cluster_size=128k -b base.raw -F raw i.q 64M";
    let image = Image::new(&[extended], true).warm();
    image.write(32 * KIB, 4 * KIB);
    image.flush();
    image.take();
    image.write(36 * KIB, 4 * KIB);
    let (c, b) = show("next sub-cluster", image.take());
    assert_eq!((c.writes, c.written_bytes, b.reads), (1, 4 * KIB, 0));
    image.flush();
    let (c, _) = show("its flush", image.take());
    assert_eq!((c.writes, c.written_bytes, c.barriers), (1, 512, 2));
    image.close();
    image.check();
}
