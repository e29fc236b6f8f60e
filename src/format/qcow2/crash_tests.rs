//! Crashes at any point: the file's operations are recorded, a prefix of them is replayed with any part of what no barrier covers left out, and the image must then hold,
//! sector by sector, what was flushed last or something written since, without a corruption by `qemu-img check` (leaks are allowed) (qcow2.md 3.2, rule 6).

use super::create::{BackingName, CreateOptions, DataFileName, create};
use crate::error::IoResult;
use crate::graph::Graph;
use crate::io::memory::MemoryNode;
use crate::node::{Edge, Extent, Growth, Limits, Node, NodeFuture, Plan};
use crate::options::Options;
use crate::queue::{Cx, Env, testing};
use crate::request::{Buffers, Flags, Op, ReqRef, Request};
use crate::rt::{Rng, real::SplitMix};
use crate::sync::{Arc, Mutex};
use crate::units::ByteRange;
use std::any::Any;
use std::process::Command;

const SECTOR: usize = 512;

/// Something that happened, in order.
#[derive(Clone, Debug)]
enum Event {
    /// On file number `.0`.
    Write(usize, u64, Vec<u8>),
    Zero(usize, ByteRange),
    Resize(usize, u64),
    Barrier(usize),
    /// The guest has begun to write (zeroes, discards: `None` for what the sectors may become).
    GuestWrite(u64, Vec<u8>),
    /// All that the guest had written is durable.
    GuestFlushed,
}

type Log = Arc<Mutex<Vec<Event>>>;

/// A file in memory that records.
#[derive(Debug)]
struct Recorder {
    id: usize,
    data: Mutex<Vec<u8>>,
    log: Log,
}

impl Recorder {
    fn new(id: usize, data: Vec<u8>, log: &Log) -> Arc<Self> {
        Arc::new(Self { id, data: Mutex::new(data), log: log.clone() })
    }

    fn carry_out(&self, req: ReqRef<'_>) -> IoResult {
        let mut data = self.data.lock();
        let range = req.range.offset as usize..req.range.end() as usize;
        let event = match req.op {
            Op::Read => {
                req.bufs.copy_from_slice(&data[range]);
                return Ok(());
            }
            // In whole sectors: a disk reads the rest of one before it writes.
            Op::Write => {
                req.bufs.copy_to_slice(&mut data[range.clone()]);
                let (first, end) =
                    (range.start / SECTOR * SECTOR, range.end.next_multiple_of(SECTOR).min(data.len()));
                Event::Write(self.id, first as u64, data[first..end].to_vec())
            }
            Op::WriteZeroes | Op::Discard if range.start % SECTOR == 0 && range.end % SECTOR == 0 => {
                data[range].fill(0);
                Event::Zero(self.id, req.range)
            }
            Op::WriteZeroes | Op::Discard => {
                data[range.clone()].fill(0);
                let (first, end) =
                    (range.start / SECTOR * SECTOR, range.end.next_multiple_of(SECTOR).min(data.len()));
                Event::Write(self.id, first as u64, data[first..end].to_vec())
            }
            Op::Flush => Event::Barrier(self.id),
        };
        self.log.lock().push(event);
        Ok(())
    }
}

impl Node for Recorder {
    fn driver(&self) -> &'static str {
        "recorder"
    }

    fn limits(&self) -> Limits {
        Limits::plain(self.data.lock().len() as u64)
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

    fn resize<'a>(&'a self, _cx: &'a Cx, size: u64, _growth: Growth) -> NodeFuture<'a, IoResult> {
        Box::pin(async move {
            self.data.lock().resize(size as usize, 0);
            self.log.lock().push(Event::Resize(self.id, size));
            Ok(())
        })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The files as they may be after a crash behind the first `end` events.
fn crashed(start: &[Vec<u8>], log: &[Event], end: usize, rng: &SplitMix) -> Vec<Vec<u8>> {
    let mut files = start.to_vec();
    for (id, file) in files.iter_mut().enumerate() {
        let barrier =
            log[..end].iter().rposition(|e| matches!(e, Event::Barrier(f) if *f == id)).unwrap_or(0);
        // Behind the last barrier: how much survives changes from crash to crash, nothing and everything included.
        let chance = [0, 1, 2, 3, 4][(rng.next() % 5) as usize];
        for (at, event) in log[..end].iter().enumerate() {
            let survives = || at < barrier || rng.next() % 4 < chance;
            match event {
                Event::Write(f, offset, bytes) if *f == id => {
                    // A sector is whole or not written.
                    let (start, end) = (*offset as usize, *offset as usize + bytes.len());
                    let mut from = start;
                    while from < end {
                        let to = (from / SECTOR + 1) * SECTOR;
                        let to = to.min(end);
                        if survives() {
                            let len = file.len().max(to);
                            file.resize(len, 0);
                            file[from..to].copy_from_slice(&bytes[from - start..to - start]);
                        }
                        from = to;
                    }
                }
                Event::Zero(f, range) if *f == id => {
                    let mut from = range.offset as usize;
                    while from < range.end() as usize {
                        let to = ((from / SECTOR + 1) * SECTOR).min(range.end() as usize);
                        if survives() && from < file.len() {
                            let to = to.min(file.len());
                            file[from..to].fill(0);
                        }
                        from = to;
                    }
                }
                Event::Resize(f, size) if *f == id && survives() => file.resize(*size as usize, 0),
                _ => {}
            }
        }
    }
    files
}

/// What each sector of the disk may hold after a crash behind the first `end` events.
fn allowed(start: &[u8], log: &[Event], end: usize) -> Vec<Vec<Vec<u8>>> {
    let mut sectors: Vec<Vec<Vec<u8>>> = start.chunks(SECTOR).map(|s| vec![s.to_vec()]).collect();
    for event in &log[..end] {
        match event {
            Event::GuestWrite(offset, bytes) => {
                let (mut at, mut rest) = (*offset as usize, bytes.as_slice());
                while !rest.is_empty() {
                    let (index, inside) = (at / SECTOR, at % SECTOR);
                    let len = rest.len().min(SECTOR - inside).min(sectors[index][0].len() - inside);
                    let mut new = sectors[index].last().expect("one").clone();
                    new[inside..inside + len].copy_from_slice(&rest[..len]);
                    sectors[index].push(new);
                    (at, rest) = (at + len, &rest[len..]);
                }
            }
            Event::GuestFlushed => {
                for s in &mut sectors {
                    let last = s.pop().expect("one");
                    *s = vec![last];
                }
            }
            _ => {}
        }
    }
    sectors
}

struct Setup {
    env: Arc<Env>,
    /// Image file, data file if there is one.
    start: Vec<Vec<u8>>,
    base: Option<Vec<u8>>,
    /// What the guest reads at the start.
    content: Vec<u8>,
    cluster: u64,
    has_discards: bool,
    /// Writes of a sector may need old content.
    can_stage: bool,
}

/// Clusters that have been staged.
fn staged(disk: &dyn Node) -> u64 {
    let node: &super::node::Qcow2Node = disk.as_any().downcast_ref().expect("a qcow2 node");
    node.image().writer.get().map_or(0, |w| w.counters.staged.load(crate::sync::atomic::Ordering::Relaxed))
}

fn open(
    graph: &Arc<Graph>,
    files: Vec<Arc<dyn Node>>,
    base: Option<Arc<dyn Node>>,
    more: &str,
) -> Arc<dyn Node> {
    let mut text = format!("driver=qcow2,discard=unmap,file=image{more}");
    let add = |name: &str, node: Arc<dyn Node>| graph.add_node(name, node).expect("added");
    let mut files = files.into_iter();
    add("image", files.next().expect("an image"));
    if let Some(data) = files.next() {
        add("data", data);
        text += ",data-file=data";
    }
    match base {
        Some(base) => {
            add("base", base);
            text += ",backing=base";
        }
        None => text += ",backing=",
    }
    let text = text.trim_end_matches(",backing=").to_owned();
    graph
        .open(Options::parse(&text).expect("options"))
        .unwrap_or_else(|e| panic!("{}", e.full_text()))
        .top_node()
}

async fn memory(cx: &Cx, bytes: &[u8]) -> Arc<dyn Node> {
    let node = MemoryNode::new(bytes.len() as u64);
    if !bytes.is_empty() {
        cx.run(&*node, Request::write(0, Buffers::from_bytes(bytes))).await.expect("written");
    }
    node
}

impl Setup {
    fn new(options: &CreateOptions, base: Option<Vec<u8>>) -> Self {
        let env = testing::env(0);
        let log: Log = Arc::default();
        let (image, data) = (Recorder::new(0, Vec::new(), &log), Recorder::new(1, Vec::new(), &log));
        let with_data = options.data_file.is_some();
        testing::block_on(&env, |cx| {
            let (image, data) = (image.clone(), data.clone());
            async move {
                create(&cx, &*image, with_data.then_some(&*data as &dyn Node), options)
                    .await
                    .expect("created");
            }
        });
        let mut start = vec![image.data.lock().clone()];
        if with_data {
            start.push(data.data.lock().clone());
        }
        let mut content = vec![0; options.size as usize];
        if let Some(base) = &base {
            let len = base.len().min(content.len());
            content[..len].copy_from_slice(&base[..len]);
        }
        let unit = options.cluster_size / if options.extended_l2 { 32 } else { 1 };
        let can_stage = base.is_some() && !with_data && unit >= 2048;
        Self { env, start, base, content, cluster: options.cluster_size, has_discards: true, can_stage }
    }

    /// An image that qemu-img and qemu-io have made with these commands; it is `i.q`.
    fn from_qemu(commands: &[&str], content: Vec<u8>, cluster: u64) -> Self {
        let dir = tempfile::tempdir().expect("tempdir");
        for line in commands {
            let out =
                Command::new("sh").arg("-c").arg(line).current_dir(dir.path()).output().expect("it starts");
            assert!(out.status.success(), "{line}: {}", String::from_utf8_lossy(&out.stderr));
        }
        let image = std::fs::read(dir.path().join("i.q")).expect("an image");
        let env = testing::env(0);
        Self { env, start: vec![image], base: None, content, cluster, has_discards: true, can_stage: false }
    }

    /// Runs random load; the log of it.
    fn load(&self, seed: u64, steps: usize) -> Vec<Event> {
        let log: Log = Arc::default();
        let graph = Graph::new(self.env.clone());
        let files: Vec<Arc<dyn Node>> = self
            .start
            .iter()
            .enumerate()
            .map(|(id, bytes)| Recorder::new(id, bytes.clone(), &log) as Arc<dyn Node>)
            .collect();
        let base = self.base.clone();
        let env = self.env.clone();
        let base = testing::block_on(&env, |cx| async move {
            match base {
                Some(bytes) => Some(memory(&cx, &bytes).await),
                None => None,
            }
        });
        let disk = open(&graph, files, base, "");
        let size = self.content.len() as u64;
        let rng = SplitMix::new(seed);
        let (cluster, has_discards) = (self.cluster, self.has_discards);
        let theirs = disk.clone();
        testing::block_on(&env, |cx| {
            let (log, disk) = (log.clone(), theirs);
            async move {
                for _ in 0..steps {
                    step(&cx, &*disk, &log, &rng, size, cluster, has_discards).await;
                }
                disk.settle(&cx).await.expect("settled");
                log.lock().push(Event::GuestFlushed);
            }
        });
        assert!(!self.can_stage || steps < 40 || staged(&*disk) > 0, "none of {steps} steps staged anything");
        std::mem::take(&mut *log.lock())
    }

    /// Crashes at `points` random places.
    fn judge(&self, log: &[Event], seed: u64, points: usize, what: &str) {
        let rng = SplitMix::new(seed);
        let dir = tempfile::tempdir().expect("tempdir");
        for _ in 0..points {
            let end = (rng.next() % (log.len() as u64 + 1)) as usize;
            let files = crashed(&self.start, log, end, &rng);
            let what = format!("{what}, after {end} of {} events", log.len());
            let place = dir.path().join("i.q");
            std::fs::write(&place, &files[0]).expect("written");
            if let Some(base) = &self.base {
                std::fs::write(dir.path().join("base.raw"), base).expect("written");
            }
            if let Some(data) = files.get(1) {
                std::fs::write(dir.path().join("d.raw"), data).expect("written");
            }
            let out = Command::new("qemu-img")
                .args(["check", "-f", "qcow2", "i.q"])
                .current_dir(dir.path())
                .output();
            let out = out.expect("qemu-img starts");
            let text =
                format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
            if !matches!(out.status.code(), Some(0 | 3)) {
                let keep = std::env::temp_dir().join("cobweb-crashed.q");
                let _ = std::fs::copy(&place, &keep);
                panic!("{what}: {}\n{}", text.chars().take(600).collect::<String>(), tail(log, end));
            }
            self.check_content(&files, &allowed(&self.content, log, end), &what, log, end);
        }
    }

    fn check_content(
        &self,
        files: &[Vec<u8>],
        allowed: &[Vec<Vec<u8>>],
        what: &str,
        log: &[Event],
        end: usize,
    ) {
        let graph = Graph::new(self.env.clone());
        let (files, base) = (files.to_vec(), self.base.clone());
        let (nodes, base) = testing::block_on(&self.env, |cx| async move {
            let mut nodes = Vec::new();
            for bytes in &files {
                nodes.push(memory(&cx, bytes).await);
            }
            let base = match base {
                Some(bytes) => Some(memory(&cx, &bytes).await),
                None => None,
            };
            (nodes, base)
        });
        let disk = open(&graph, nodes, base, ",read-only=on");
        let seen = Buffers::alloc(self.content.len(), 4096);
        let theirs = seen.clone();
        testing::block_on(&self.env, |cx| async move {
            cx.run(&*disk, Request::read(0, theirs)).await.expect("read");
        });
        for (index, (sector, ok)) in seen.to_vec().chunks(SECTOR).zip(allowed).enumerate() {
            assert!(
                ok.iter().any(|a| a == sector),
                "{what}: sector {index} holds {:x?}..., allowed are {:x?}\n{}",
                &sector[..4],
                ok.iter().map(|a| &a[..4]).collect::<Vec<_>>(),
                tail(log, end)
            );
        }
    }
}

fn tail(log: &[Event], end: usize) -> String {
    let short = |e: &Event| match e {
        Event::Write(f, o, b) => format!("write {f} {o:#x}+{:#x}", b.len()),
        Event::GuestWrite(o, b) => format!("guest {o:#x}+{:#x} {:x?}", b.len(), &b[..b.len().min(2)]),
        other => format!("{other:x?}"),
    };
    log[end.saturating_sub(40)..end].iter().map(short).collect::<Vec<_>>().join("\n")
}

async fn step(
    cx: &Cx,
    disk: &dyn Node,
    log: &Log,
    rng: &SplitMix,
    size: u64,
    cluster: u64,
    has_discards: bool,
) {
    // Half of them short enough to be staged.
    let is_short = rng.next().is_multiple_of(2);
    let unit = if is_short { 512 } else { [1, 512, 4096][(rng.next() % 3) as usize] };
    let offset = rng.next() % size / unit * unit;
    let longest = if is_short { cluster / 4 } else { 3 * cluster };
    let len = (1 + rng.next() % longest.clamp(1, size / 2)).next_multiple_of(unit).min(size - offset);
    let range = ByteRange { offset, len };
    let flags = if rng.next().is_multiple_of(6) { Flags::FUA } else { Flags::empty() };
    let begin = |bytes: Vec<u8>| log.lock().push(Event::GuestWrite(offset, bytes));
    match rng.next() % 10 {
        0..5 => {
            let byte = rng.next() as u8 | 1;
            let bytes: Vec<u8> = (0..len).map(|i| byte.wrapping_add((i / 512) as u8)).collect();
            begin(bytes.clone());
            cx.run(disk, Request::write(offset, Buffers::from_bytes(&bytes)).flags(flags))
                .await
                .expect("written");
        }
        5 | 6 => {
            begin(vec![0; len as usize]);
            let unmap = if rng.next().is_multiple_of(2) { Flags::MAY_UNMAP } else { Flags::empty() };
            cx.run(disk, Request::write_zeroes(range, flags | unmap)).await.expect("zeroed");
        }
        7 if has_discards => {
            // Whole clusters become zeros; the parts at the ends stay.
            let first = offset.next_multiple_of(cluster);
            let end = if range.end() == size { size } else { range.end() / cluster * cluster };
            if first < end {
                log.lock().push(Event::GuestWrite(first, vec![0; (end - first) as usize]));
            }
            cx.run(disk, Request::discard(range)).await.expect("discarded");
        }
        8 => disk.settle(cx).await.expect("settled"),
        _ => {
            cx.run(disk, Request::flush()).await.expect("flushed");
            log.lock().push(Event::GuestFlushed);
        }
    }
}

fn have_qemu() -> bool {
    let found = Command::new("qemu-img").arg("--version").output().is_ok();
    if !found {
        assert!(std::env::var_os("CI").is_none(), "qemu-img is not installed, and this is CI");
        eprintln!("*** SKIPPED: qemu-img is not installed ***");
    }
    found
}

fn noise(len: usize, seed: u64) -> Vec<u8> {
    let rng = SplitMix::new(seed);
    let mut out = vec![0; len];
    for chunk in out.chunks_mut(4096) {
        if !rng.next().is_multiple_of(3) {
            let byte = rng.next() as u8;
            chunk.iter_mut().enumerate().for_each(|(i, b)| *b = byte ^ (i / 512) as u8);
        }
    }
    out
}

fn backing() -> Option<BackingName> {
    Some(BackingName { name: b"base.raw".to_vec(), format: "raw".to_owned() })
}

/// Seeds of each case; more for a long run.
fn rounds() -> u64 {
    std::env::var("COBWEB_CRASH_ROUNDS").ok().and_then(|v| v.parse().ok()).unwrap_or(2)
}

fn run_case(what: &str, setup: &Setup) {
    for seed in 0..rounds() {
        let log = setup.load(seed, 60);
        assert!(log.iter().any(|e| matches!(e, Event::Barrier(_))), "{what}: the load flushes");
        setup.judge(&log, seed, 25, &format!("{what}, seed {seed}"));
    }
}

#[test]
fn after_a_crash_every_sector_is_old_or_new_and_nothing_is_corrupt() {
    if !have_qemu() {
        return;
    }
    let new = CreateOptions::new;
    let small = |cluster_size| CreateOptions { cluster_size, ..new(256 << 10) };
    let over = |o: CreateOptions| CreateOptions { backing: backing(), ..o };
    let extended = |cluster_size| CreateOptions { extended_l2: true, cluster_size, ..new(512 << 10) };
    let cases: Vec<(&str, CreateOptions, usize)> = vec![
        ("64k", CreateOptions { size: 1 << 20, ..new(0) }, 0),
        ("64k over a base", over(CreateOptions { size: 1 << 20, ..new(0) }), 900_000),
        ("4k", small(4096), 0),
        ("4k over a base", over(small(4096)), 256 << 10),
        ("512, 64 bit", CreateOptions { refcount_bits: 64, ..small(512) }, 0),
        ("512 over a base", over(small(512)), 200_000),
        ("4k, 1 bit", CreateOptions { refcount_bits: 1, ..small(4096) }, 0),
        ("extended 16k", extended(16 << 10), 0),
        ("extended 16k over a base", over(extended(16 << 10)), 400_000),
        ("extended 64k over a base", over(extended(64 << 10)), 512 << 10),
        (
            "data file",
            CreateOptions {
                data_file: Some(DataFileName { name: b"d.raw".to_vec(), raw: false }),
                ..small(4096)
            },
            0,
        ),
    ];
    for (what, options, base) in cases {
        let base = (base > 0).then(|| noise(base, 5));
        run_case(what, &Setup::new(&options, base));
    }
}

#[test]
fn after_a_crash_snapshots_and_compressed_clusters_are_whole() {
    if !have_qemu() {
        return;
    }
    let content = |first: u8, second: u8| {
        let mut c = vec![0; 512 << 10];
        c[..256 << 10].fill(first);
        c[256 << 10..384 << 10].fill(second);
        c
    };
    let setup = Setup::from_qemu(
        &[
            "qemu-img create -q -f qcow2 -o cluster_size=4k i.q 512k",
            "qemu-io -f qcow2 -c 'write -P 7 0 256k' -c 'write -P 9 256k 128k' i.q",
            "qemu-img snapshot -c s i.q",
        ],
        content(7, 9),
        4096,
    );
    run_case("a snapshot", &setup);
    let setup = Setup::from_qemu(
        &[
            "truncate -s 512k r; printf '%262144s' | tr ' ' '\\007' | dd of=r conv=notrunc bs=64k status=none",
            "qemu-img convert -q -c -f raw -O qcow2 -o cluster_size=16k r i.q",
            "qemu-img snapshot -c s i.q",
            "qemu-io -f qcow2 -c 'write -P 9 256k 128k' i.q",
        ],
        content(7, 9),
        16 << 10,
    );
    run_case("compressed", &setup);
}

/// One load with one operation of the file failing; the failed request is tried again. Returns whether the rule fired.
fn with_fault(setup: &Setup, skip: usize, count: u64, errno: &str, what: &str) -> bool {
    use crate::filter::fault::{Fault, Rules};
    let graph = Graph::new(setup.env.clone());
    let log: Log = Arc::default();
    let image = Recorder::new(0, setup.start[0].clone(), &log);
    let rules = Rules::parse(&format!(
        r#"[{{"op": "any", "action": "error", "errno": "{errno}", "skip": {skip}, "count": {count}}}]"#
    ));
    let fault =
        Fault::new(Edge::to_node(image.clone()), rules.expect("rules"), setup.env.runtime.rng.clone());
    let base = setup.base.clone();
    let (env, content) = (setup.env.clone(), setup.content.clone());
    let base = testing::block_on(&env, |cx| async move {
        match base {
            Some(bytes) => Some(memory(&cx, &bytes).await),
            None => None,
        }
    });
    fault.set("enabled", "off").expect("live");
    let disk = open(&graph, vec![fault.clone()], base, "");
    fault.set("enabled", "on").expect("live");
    let rng = SplitMix::new(3);
    let (theirs, whole) = (fault.clone(), disk.clone());
    let (model, failures) = testing::block_on(&env, |cx| async move {
        let mut model = content;
        let mut failures = 0;
        for n in 0..30u64 {
            let size = model.len() as u64;
            let offset = rng.next() % size / 512 * 512;
            // Two of three short enough to be staged.
            let longest = if rng.next().is_multiple_of(3) { 24 } else { 2 };
            let len = (512 * (1 + rng.next() % longest)).min(size - offset);
            let range = ByteRange { offset, len };
            let place = offset as usize..range.end() as usize;
            let request = || match n % 6 {
                0 | 2 | 4 => {
                    let bufs = Buffers::alloc(len as usize, 4096);
                    bufs.fill(n as u8 + 1);
                    Request::write(offset, bufs)
                }
                1 => Request::write_zeroes(range, Flags::MAY_UNMAP),
                3 => Request::read(offset, Buffers::alloc(len as usize, 4096)),
                _ => Request::flush(),
            };
            match n % 6 {
                0 | 2 | 4 => model[place].fill(n as u8 + 1),
                1 => model[place].fill(0),
                _ => {}
            }
            let mut tries = 0;
            while cx.run(&*disk, request()).await.is_err() {
                failures += 1;
                tries += 1;
                assert!(tries < 20, "it never succeeds again");
            }
        }
        theirs.set("enabled", "off").expect("live");
        let seen = Buffers::alloc(model.len(), 4096);
        cx.run(&*disk, Request::read(0, seen.clone())).await.expect("read");
        assert!(seen.to_vec() == model);
        disk.settle(&cx).await.expect("settled");
        (model, failures)
    });
    assert!(setup.base.is_none() || staged(&*whole) > 0, "{what}: nothing was staged");
    drop(whole);
    let hits = fault.get("hits").expect("counted");
    let fired = !hits.contains("\"fired\":0");
    assert!(failures == 0 || fired, "{what}: {hits}");
    let dir = tempfile::tempdir().expect("tempdir");
    std::fs::write(dir.path().join("i.q"), &*image.data.lock()).expect("written");
    if let Some(base) = &setup.base {
        std::fs::write(dir.path().join("base.raw"), base).expect("written");
    }
    std::fs::write(dir.path().join("model"), &model).expect("written");
    let log = std::mem::take(&mut *log.lock());
    for args in
        [&["check", "-f", "qcow2", "i.q"][..], &["compare", "-f", "qcow2", "-F", "raw", "i.q", "model"]]
    {
        let out = Command::new("qemu-img").args(args).current_dir(dir.path()).output().expect("it starts");
        let text =
            format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
        assert!(
            out.status.success(),
            "{what}: {}\n{}",
            text.chars().take(600).collect::<String>(),
            tail(&log, log.len())
        );
    }
    fired
}

#[test]
fn an_error_at_any_single_step_leaves_the_image_usable_and_clean() {
    if !have_qemu() {
        return;
    }
    let options = CreateOptions { cluster_size: 4096, backing: backing(), ..CreateOptions::new(128 << 10) };
    let plain = Setup::new(&options, Some(noise(100_000, 5)));
    let tiny = CreateOptions { cluster_size: 512, refcount_bits: 64, ..CreateOptions::new(64 << 10) };
    let tiny = Setup::new(&tiny, None);
    for (name, setup) in [("4k over a base", &plain), ("512, 64 bit", &tiny)] {
        for (errno, count) in [("EIO", 1), ("ENOSPC", 2)] {
            let mut fired = 0;
            for skip in 0.. {
                if !with_fault(setup, skip, count, errno, &format!("{name}, {errno} at {skip}")) {
                    break;
                }
                fired += 1;
            }
            assert!(fired > 30, "{name}: {fired} steps");
        }
    }
}
