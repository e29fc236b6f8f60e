//! Writing to qcow2 images: random load against a model of bytes, judged by qemu-img.
//!
//! A tool that is not installed makes its test pass with a line on stderr, or fail if `CI` is set in the environment.

use cobweb::context::{Context, ContextOptions};
use cobweb::graph::{Disk, ImplicitOpen};
use cobweb::options::Options;
use cobweb::request::{Buffers, Flags, Request};
use cobweb::units::ByteRange;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard};

/// Whether the tools can be run; loud if not.
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

/// One test at a time: a process that another test starts has our descriptors, and with them our image locks, from its fork to its exec.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(|e| e.into_inner())
}

/// A small generator; the engine's own is not public.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// A directory with an image, the model of its content, and the image open on a disk.
struct Image {
    context: Arc<Context>,
    dir: tempfile::TempDir,
    disk: Arc<Disk>,
    model: Vec<u8>,
    open_options: String,
    /// What a discard of whole clusters does to the content, and the cluster size.
    discards: Discards,
    cluster: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Discards {
    /// Whole clusters read as zeros.
    Zero,
    /// Nothing.
    Nothing,
    /// The test does not know.
    Unknown,
}

impl Image {
    /// Creates an image of `size` bytes with qemu-img's options over a base of `base` random bytes, if not 0.
    fn new(options: &str, size: u64, base: u64, base_format: &str, seed: u64) -> Self {
        let context = Context::new(ContextOptions::default(), None).expect("context");
        context.start().expect("start");
        context.graph().set_implicit_open(ImplicitOpen::Allow);
        let dir = tempfile::tempdir().expect("tempdir");
        let disk = context.graph().add_disk("").expect("disk");
        let cluster =
            options.split(',').find_map(|o| o.strip_prefix("cluster_size=")).map_or(64 << 10, |v| {
                v.trim_end_matches('k').parse::<u64>().expect("a number")
                    * if v.ends_with('k') { 1024 } else { 1 }
            });
        let mut image = Self {
            context,
            dir,
            disk,
            model: vec![0; size as usize],
            open_options: "discard=unmap".to_owned(),
            discards: Discards::Zero,
            cluster,
        };
        let mut rng = Rng(seed);
        let mut words = format!("qemu-img create -q -f qcow2 i.q {size}");
        if !options.is_empty() {
            words += &format!(" -o {options}");
        }
        if base > 0 {
            // Random data with holes.
            let mut bytes = vec![0u8; base as usize];
            for chunk in bytes.chunks_mut(8 << 10) {
                if rng.below(3) > 0 {
                    chunk.fill_with(|| rng.next() as u8);
                }
            }
            std::fs::write(image.path("base.raw"), &bytes).expect("base");
            let len = bytes.len().min(image.model.len());
            image.model[..len].copy_from_slice(&bytes[..len]);
            if base_format == "qcow2" {
                image.run("qemu-img convert -q -f raw -O qcow2 -c base.raw base.q");
                words += " -b base.q -F qcow2";
            } else {
                words += " -b base.raw -F raw";
            }
        }
        image.run(&words);
        if options.contains("compat=0.10") && base > 0 {
            image.discards = Discards::Nothing;
        }
        if options.contains("data_file_raw") {
            image.discards = Discards::Unknown;
        }
        image.open();
        image
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs a tool in the directory; the words are split at blanks.
    fn run(&self, words: &str) -> String {
        self.run_args(&words.split_whitespace().collect::<Vec<_>>())
    }

    fn run_args(&self, words: &[&str]) -> String {
        let mut command = Command::new(words[0]);
        let out = command.args(&words[1..]).current_dir(self.dir.path()).output().expect("it starts");
        let text =
            format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
        assert!(out.status.success(), "{command:?} failed: {text}");
        text
    }

    fn open(&mut self) {
        let mut text = format!(
            "driver=qcow2,{},file.driver=file,file.discard=unmap,file.filename={}",
            self.open_options,
            self.path("i.q").display()
        );
        if self.path("df.raw").exists() {
            // A relative data file name is relative to the process.
            text += &format!(",data-file.driver=file,data-file.filename={}", self.path("df.raw").display());
        }
        let graph = self.context.graph();
        let vertex = graph
            .open(Options::parse(&text).expect("options"))
            .unwrap_or_else(|e| panic!("{}", e.full_text()));
        graph.insert(&self.disk, Some(vertex)).expect("inserted");
    }

    fn close(&mut self) {
        let graph = self.context.graph();
        graph.insert(&self.disk, None).expect("taken out");
        graph.collect().expect("settled");
        assert!(graph.nodes().is_empty(), "a task keeps a node: {:?}", graph.nodes());
    }

    fn block(&self, req: Request) {
        let what = format!("{:?} {:?}", req.op, req.range);
        self.disk.block(req).unwrap_or_else(|e| panic!("{what}: {}", e.full_text()));
    }

    fn write(&mut self, offset: u64, bytes: &[u8], flags: Flags) {
        self.block(Request::write(offset, Buffers::from_bytes(bytes)).flags(flags));
        self.model[offset as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    fn zero(&mut self, range: ByteRange, flags: Flags) {
        self.block(Request::write_zeroes(range, flags));
        self.model[range.offset as usize..range.end() as usize].fill(0);
    }

    fn discard(&mut self, range: ByteRange) {
        self.block(Request::discard(range));
        let first = range.offset.next_multiple_of(self.cluster);
        let size = self.model.len() as u64;
        let end = if range.end() == size { size } else { range.end() / self.cluster * self.cluster };
        if self.discards == Discards::Zero && first < end {
            self.model[first as usize..end as usize].fill(0);
        }
    }

    fn check_content(&self, what: &str) {
        let bufs = Buffers::alloc(self.model.len(), 4096);
        self.block(Request::read(0, bufs.clone()));
        let seen = bufs.to_vec();
        if seen != self.model {
            let at = (0..seen.len()).find(|i| seen[*i] != self.model[*i]).expect("a difference");
            panic!("{what}: byte {at:#x} is {:#x}, not {:#x}", seen[at], self.model[at]);
        }
    }

    /// Closed: qemu-io writes, and perhaps a snapshot is taken.
    fn qemu_turn(&mut self, rng: &mut Rng, snapshots: bool) {
        let size = self.model.len() as u64;
        let mut words = "qemu-io -f qcow2 -d unmap".to_owned();
        let mut commands = Vec::new();
        for _ in 0..3 {
            let range = random_range(rng, size / 512 * 512, 4 * self.cluster);
            let range = ByteRange { offset: range.offset / 512 * 512, len: range.len.next_multiple_of(512) };
            let range = ByteRange { len: range.len.min(size / 512 * 512 - range.offset), ..range };
            let byte = if rng.below(4) == 0 { 0 } else { rng.next() as u8 };
            let what = if byte == 0 { "write -z".to_owned() } else { format!("write -P {byte}") };
            commands.push(format!("{what} {} {}", range.offset, range.len));
            self.model[range.offset as usize..range.end() as usize].fill(byte);
        }
        if self.path("df.raw").exists() {
            words += " --image-opts driver=qcow2,discard=unmap,file.filename=i.q,data-file.driver=file,data-file.filename=df.raw";
            words = words.replace("-f qcow2 ", "");
        } else {
            words += " i.q";
        }
        let mut command = Command::new("qemu-io");
        command.args(words.split_whitespace().skip(1)).current_dir(self.dir.path());
        commands.iter().for_each(|c| {
            command.args(["-c", c]);
        });
        let out = command.output().expect("it starts");
        assert!(out.status.success(), "{command:?}: {}", String::from_utf8_lossy(&out.stderr));
        if snapshots && rng.below(2) == 0 {
            self.run(&format!("qemu-img snapshot -c s{} i.q", rng.next()));
        }
    }

    /// Closed: qemu-img finds nothing wrong and reads the same.
    fn judge(&self, what: &str) {
        let out = Command::new("qemu-img")
            .args(["check", "i.q"])
            .current_dir(self.dir.path())
            .output()
            .expect("it starts");
        assert!(
            out.status.success(),
            "{what}: {}{}",
            String::from_utf8_lossy(&out.stdout),
            String::from_utf8_lossy(&out.stderr)
        );
        std::fs::write(self.path("model.raw"), &self.model).expect("model");
        let out = Command::new("qemu-img")
            .args(["compare", "-f", "qcow2", "-F", "raw", "i.q", "model.raw"])
            .current_dir(self.dir.path())
            .output()
            .expect("it starts");
        assert!(out.status.success(), "{what}: {}", String::from_utf8_lossy(&out.stdout));
    }
}

/// A random range of the disk: mostly blocks, sometimes anything.
fn random_range(rng: &mut Rng, size: u64, longest: u64) -> ByteRange {
    let unit = [1, 512, 4096, 4096][rng.below(4) as usize];
    let offset = rng.below(size) / unit * unit;
    let len = (1 + rng.below(longest)).next_multiple_of(unit).min(size - offset);
    ByteRange { offset, len }
}

const UNTIL_JUDGED: u64 = 40;

fn random_load(image: &mut Image, seed: u64, steps: u64, snapshots: bool) {
    let mut rng = Rng(seed);
    let size = image.model.len() as u64;
    let longest = (size / 3).min(6 * image.cluster).max(8192);
    for step in 0..steps {
        let range = random_range(&mut rng, size, longest);
        let flags = if rng.below(8) == 0 { Flags::FUA } else { Flags::empty() };
        match rng.below(12) {
            0..6 => {
                let byte = rng.next() as u8;
                let bytes: Vec<u8> = (0..range.len).map(|i| byte.wrapping_add((i / 512) as u8)).collect();
                image.write(range.offset, &bytes, flags);
            }
            6 => image.zero(range, flags),
            7 => image.zero(range, flags | Flags::MAY_UNMAP),
            8 if image.discards != Discards::Unknown => image.discard(range),
            9 => image.block(Request::flush()),
            10 if rng.below(3) == 0 => {
                image.close();
                image.open();
            }
            _ => image.check_content(&format!("step {step}")),
        }
        if step % UNTIL_JUDGED == UNTIL_JUDGED - 1 {
            image.close();
            image.judge(&format!("step {step}"));
            image.qemu_turn(&mut rng, snapshots);
            image.judge(&format!("qemu's turn after step {step}"));
            image.open();
        }
    }
    image.check_content("end");
    image.close();
    image.judge("end");
}

#[test]
fn random_load_leaves_clean_images_in_all_geometries() {
    if !have_tools() {
        return;
    }
    let _alone = alone();
    let cases: &[(&str, u64, u64, &str)] = &[
        ("", 2 << 20, 0, ""),
        ("", 2 << 20, 2 << 20, "raw"),
        ("", 2 << 20, 1 << 20, "qcow2"),
        ("", (1 << 20) + 1536, 700_000, "raw"),
        ("cluster_size=512", 256 << 10, 200_000, "raw"),
        ("cluster_size=512,refcount_bits=64", 512 << 10, 0, ""),
        ("cluster_size=4k,refcount_bits=1", 1 << 20, 1 << 20, "raw"),
        ("cluster_size=4k,refcount_bits=8", 1 << 20, 0, ""),
        ("cluster_size=2048k", 6 << 20, 6 << 20, "raw"),
        ("compat=0.10", 1 << 20, 0, ""),
        ("compat=0.10", 1 << 20, 1 << 20, "raw"),
        ("extended_l2=on", 2 << 20, 0, ""),
        ("extended_l2=on", 2 << 20, 2 << 20, "raw"),
        ("extended_l2=on,cluster_size=16k", 1 << 20, 1 << 20, "qcow2"),
        ("extended_l2=on,cluster_size=128k", (2 << 20) + 512, 2 << 20, "raw"),
        ("data_file=df.raw", 1 << 20, 0, ""),
        ("data_file=df.raw", (1 << 20) + 512, 1 << 20, "raw"),
        ("data_file=df.raw,data_file_raw=on", 1 << 20, 0, ""),
        ("preallocation=metadata", 2 << 20, 0, ""),
        ("preallocation=metadata,extended_l2=on", 2 << 20, 2 << 20, "raw"),
    ];
    for (n, (options, size, base, format)) in cases.iter().enumerate() {
        eprintln!("{options} {size} over {base} {format}");
        let mut image = Image::new(options, *size, *base, format, n as u64);
        random_load(&mut image, 1000 + n as u64, 160, false);
    }
}

#[test]
fn enabled_bitmaps_are_marked_in_use_before_a_write_and_disabled_ones_stay() {
    if !have_tools() {
        return;
    }
    let _alone = alone();
    let mut image = Image::new("", 1 << 20, 0, "", 7);
    image.close();
    image.run("qemu-img bitmap --add -g 64k i.q on");
    image.run("qemu-img bitmap --add -g 64k i.q off");
    image.run("qemu-img bitmap --disable i.q off");
    image.open();
    image.write(5000, &[7; 9000], Flags::empty());
    image.close();
    image.judge("with bitmaps");
    let info = image.run("qemu-img info --output=json i.q");
    let info: serde_json::Value = serde_json::from_str(&info).expect("JSON");
    let bitmaps = info["format-specific"]["data"]["bitmaps"].as_array().expect("bitmaps").clone();
    let flags = |name: &str| {
        let b = bitmaps.iter().find(|b| b["name"] == name).expect("it is there");
        b["flags"]
            .as_array()
            .expect("flags")
            .iter()
            .map(|f| f.as_str().expect("text").to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!((flags("on"), flags("off")), (vec!["in-use".to_owned(), "auto".to_owned()], vec![]));
    image.run("qemu-img bitmap --remove i.q on");
}

#[test]
fn random_load_over_internal_snapshots_and_compressed_clusters_leaves_clean_images() {
    if !have_tools() {
        return;
    }
    let _alone = alone();
    let cases: &[(&str, u64, u64)] = &[
        ("", 2 << 20, 0),
        ("cluster_size=4k", 1 << 20, 1 << 20),
        ("cluster_size=512", 256 << 10, 0),
        ("cluster_size=16k,extended_l2=on", 1 << 20, 1 << 20),
        ("cluster_size=4k,compat=0.10", 1 << 20, 0),
        ("cluster_size=4k,refcount_bits=4", 1 << 20, 0),
    ];
    for (n, (options, size, base)) in cases.iter().enumerate() {
        eprintln!("{options} {size} over {base}");
        let mut image = Image::new(options, *size, *base, "raw", 50 + n as u64);
        image.close();
        // Compressed clusters under the load, and a snapshot that has them too.
        let half = size / 2 / image.cluster * image.cluster;
        let mut at = 0;
        while at < half {
            image.run_args(&[
                "qemu-io",
                "-f",
                "qcow2",
                "-c",
                &format!("write -c -P 5 {at} {}", image.cluster),
                "i.q",
            ]);
            image.model[at as usize..(at + image.cluster) as usize].fill(5);
            at += image.cluster * 7;
        }
        image.run("qemu-img snapshot -c first i.q");
        image.judge("before");
        let before = image.model.clone();
        image.open();
        random_load(&mut image, 2000 + n as u64, 160, true);
        // The snapshot is what it was.
        std::fs::write(image.path("before.raw"), &before).expect("written");
        image.run("qemu-img convert -q -f qcow2 -l snapshot.name=first -O raw i.q after.raw");
        assert!(
            std::fs::read(image.path("after.raw")).expect("read") == before,
            "{options}: the snapshot changed"
        );
    }
}

#[test]
fn threads_that_write_to_the_same_clusters_find_their_own_sectors_as_they_left_them() {
    if !have_tools() {
        return;
    }
    let _alone = alone();
    const THREADS: u64 = 4;
    for (options, base) in [("", 0), ("", 2 << 20), ("extended_l2=on", 2 << 20), ("cluster_size=4k", 2 << 20)]
    {
        let size = 2u64 << 20;
        let mut image = Image::new(options, size, base, "raw", 9);
        let disk = image.disk.clone();
        let model = image.model.clone();
        let parts: Vec<Vec<(u64, Vec<u8>)>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS)
                .map(|t| {
                    let (disk, model) = (&disk, &model);
                    scope.spawn(move || {
                        // Every fourth block of 512 bytes to 4 KiB is this thread's.
                        let unit = [512, 1024, 4096, 2048][t as usize];
                        let mut rng = Rng(t + 77);
                        let blocks = size / (4096 * THREADS);
                        let mut own: Vec<(u64, Vec<u8>)> = (0..blocks)
                            .map(|b| {
                                let at = (b * THREADS + t) * 4096;
                                (at, model[at as usize..][..unit].to_vec())
                            })
                            .collect();
                        for step in 0..400u64 {
                            let (at, bytes) = &mut own[rng.below(blocks) as usize];
                            match rng.below(8) {
                                0 => disk.flush().expect("flushed"),
                                1 => {
                                    let range = ByteRange { offset: *at, len: unit as u64 };
                                    disk.write_zeroes(range, Flags::MAY_UNMAP).expect("zeroed");
                                    bytes.fill(0);
                                }
                                2 | 3 => {
                                    let mut seen = vec![0; unit];
                                    disk.read(*at, &mut seen).expect("read");
                                    assert!(seen == *bytes, "thread {t} step {step}");
                                }
                                _ => {
                                    bytes.fill(rng.next() as u8);
                                    disk.write(*at, bytes).expect("written");
                                }
                            }
                        }
                        own
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().expect("no panic")).collect()
        });
        for (at, bytes) in parts.into_iter().flatten() {
            image.model[at as usize..][..bytes.len()].copy_from_slice(&bytes);
        }
        image.check_content(options);
        image.close();
        image.judge(options);
    }
}
