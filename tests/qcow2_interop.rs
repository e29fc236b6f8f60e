//! qcow2 images that qemu-img and qemu-io have made, read back byte for byte.
//!
//! The sample images are those of qcow2.md section 8. What an image reads as is what `qemu-img convert -O raw` makes of it.
//! A tool that is not installed makes its test pass with a line on stderr, or fail if `CI` is set in the environment.

use cobweb::context::{Context, ContextOptions};
use cobweb::format::qcow2::Qcow2Node;
use cobweb::graph::ImplicitOpen;
use cobweb::node::Node;
use cobweb::options::Options;
use cobweb::request::{Buffers, Request};
use cobweb::units::ByteRange;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

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

struct Dir {
    context: Arc<Context>,
    dir: tempfile::TempDir,
}

impl Dir {
    fn new() -> Self {
        let context = Context::new(ContextOptions::default(), None).expect("context");
        context.start().expect("start");
        context.graph().set_implicit_open(ImplicitOpen::Allow);
        Self { context, dir: tempfile::tempdir().expect("tempdir") }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs a tool in the directory; the words are split at blanks.
    fn run(&self, words: &str) -> String {
        self.run_args(&words.split_whitespace().collect::<Vec<_>>())
    }

    fn run_args(&self, words: &[&str]) -> String {
        let out = Command::new(words[0])
            .args(&words[1..])
            .current_dir(self.dir.path())
            .output()
            .expect("it starts");
        let text =
            format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
        assert!(out.status.success(), "{words:?} failed: {text}");
        text
    }

    /// `qemu-img create -q -f qcow2 WORDS`
    fn create(&self, words: &str) {
        self.run(&format!("qemu-img create -q -f qcow2 {words}"));
    }

    /// qemu-io with these commands on a qcow2 image.
    fn io(&self, image: &str, commands: &[String]) {
        let mut words = vec!["qemu-io", "-d", "unmap", "-f", "qcow2"];
        commands.iter().for_each(|c| words.extend(["-c", c.as_str()]));
        words.push(image);
        let text = self.run_args(&words);
        assert!(!text.contains("failed") && !text.contains("rror"), "{image} {commands:?}: {text}");
    }

    /// A raw file of `len` bytes that has data in it.
    fn raw(&self, name: &str, len: usize, seed: u64) {
        let mut rng = Rng(seed);
        let mut data = vec![0u8; len];
        for chunk in data.chunks_mut(8192) {
            match rng.below(4) {
                0 => {}
                1 => chunk.fill(rng.next() as u8),
                _ => chunk.iter_mut().for_each(|b| *b = rng.next() as u8),
            }
        }
        std::fs::write(self.path(name), data).expect("written");
    }

    /// What the image reads as, according to qemu-img.
    fn expected(&self, image: &str) -> Vec<u8> {
        self.run(&format!("qemu-img convert -O raw {image} expected.raw"));
        std::fs::read(self.path("expected.raw")).expect("converted")
    }

    fn options(&self, image: &str) -> Options {
        let mut o = Options::empty();
        o.set("driver", "qcow2").set("read-only", "on");
        o.set("file.driver", "file").set("file.read-only", "on");
        o.set("file.filename", self.path(image).to_str().expect("text"));
        o
    }

    fn open(&self, image: &str) -> Arc<dyn Node> {
        self.open_with(self.options(image)).unwrap_or_else(|e| panic!("{image}: {}", e.full_text()))
    }

    fn open_with(&self, options: Options) -> cobweb::error::Result<Arc<dyn Node>> {
        self.context.graph().open(options).map(|v| v.top_node())
    }

    /// Closes what nobody uses any more, so that the tools can have it.
    fn close(&self) {
        self.context.graph().collect().expect("closed");
    }

    fn read(&self, node: &Arc<dyn Node>, offset: u64, len: usize) -> Vec<u8> {
        self.try_read(node, offset, len).unwrap_or_else(|e| panic!("read {len} at {offset}: {e:?}"))
    }

    fn try_read(&self, node: &Arc<dyn Node>, offset: u64, len: usize) -> cobweb::error::IoResult<Vec<u8>> {
        let bufs = Buffers::alloc(len, 512);
        // What is not read must show.
        bufs.fill(0xd7);
        let (node, into) = (node.clone(), bufs.clone());
        let done = self
            .context
            .env()
            .block_on(|cx| async move { cx.run(&*node, Request::read(offset, into)).await });
        done.expect("may block").map(|()| bufs.to_vec())
    }

    fn write(&self, node: &Arc<dyn Node>, offset: u64, data: &[u8]) {
        let (node, data) = (node.clone(), Buffers::from_bytes(data));
        let done = self.context.env().block_on(|cx| async move {
            cx.run(&*node, Request::write(offset, data)).await?;
            cx.run(&*node, Request::flush()).await
        });
        done.expect("may block").expect("written");
    }

    /// Compares all of the image with what qemu-img says, read in several ways, and its status with its content.
    fn check(&self, image: &str) {
        let expected = self.expected(image);
        let node = self.open(image);
        self.check_node(image, &node, &expected);
        // A cache of two slices, of the smallest size.
        let mut options = self.options(image);
        options.set("l2-cache-size", "1k").set("l2-cache-entry-size", "512");
        let small = self.open_with(options).unwrap_or_else(|e| panic!("{image}: {}", e.full_text()));
        self.check_node(image, &small, &expected);
        drop((node, small));
        self.close();
    }

    fn check_node(&self, image: &str, node: &Arc<dyn Node>, expected: &[u8]) {
        let size = node.limits().size;
        assert_eq!(size, expected.len() as u64, "{image}: size");
        let mut rng = Rng(size ^ 0x1234);
        for _ in 0..60 {
            if size == 0 {
                break;
            }
            let len = match rng.below(3) {
                0 => 4096,
                1 => 1 + rng.below(70_000),
                _ => 512 * (1 + rng.below(1000)),
            }
            .min(size);
            let at = rng.below(size - len + 1);
            let at = if rng.below(2) == 0 { at } else { at & !511 };
            let got = self.read(node, at, len as usize);
            let want = &expected[at as usize..(at + len) as usize];
            if got != want {
                let first = got.iter().zip(want).position(|(a, b)| a != b).expect("they differ");
                panic!(
                    "{image}: read {len} at {at}: byte {} is {:#x}, not {:#x}",
                    at + first as u64,
                    got[first],
                    want[first]
                );
            }
        }
        for piece in [1 << 20, usize::MAX] {
            let mut at = 0;
            while at < size {
                let len = (size - at).min(piece as u64);
                assert!(
                    self.read(node, at, len as usize) == expected[at as usize..(at + len) as usize],
                    "{image}: {len} at {at}"
                );
                at += len;
            }
        }
        self.check_status(image, node, expected);
    }

    fn check_status(&self, image: &str, node: &Arc<dyn Node>, expected: &[u8]) {
        let size = expected.len() as u64;
        let mut at = 0;
        while at < size {
            let range = ByteRange { offset: at, len: size - at };
            let asked = node.clone();
            let done = self.context.env().block_on(|cx| async move { cx.status(&*asked, range).await });
            let extent =
                done.expect("may block").unwrap_or_else(|e| panic!("{image}: status at {at}: {e:?}"));
            assert!(extent.len > 0 && extent.len <= range.len, "{image}: {extent:?}");
            if extent.is_zero() {
                let part = &expected[at as usize..(at + extent.len) as usize];
                assert!(part.iter().all(|b| *b == 0), "{image}: {extent:?} at {at} is not zero");
            }
            at += extent.len;
        }
    }
}

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }
}

/// Writes of every kind over a disk of `size` bytes with clusters of `cluster`.
fn scribble(size: u64, cluster: u64, seed: u64, v3: bool, compressed: bool) -> Vec<String> {
    let mut rng = Rng(seed);
    let mut commands = Vec::new();
    if compressed {
        // First, and each cluster once: qemu-io cannot compress over something.
        let taken: std::collections::BTreeSet<u64> = (0..12).map(|_| rng.below(size / cluster)).collect();
        for at in taken.into_iter().map(|n| n * cluster) {
            let pattern = 1 + rng.below(250);
            commands.push(format!("write -c -P {pattern} {at} {}", cluster.min(size - at)));
        }
    }
    for i in 0..40u64 {
        let kind = rng.below(5);
        let pattern = 1 + rng.below(250);
        let clusters = 1 + rng.below(4);
        let at = rng.below(size / cluster) * cluster;
        let len = (clusters * cluster).min(size - at);
        let command = match kind {
            0 => {
                let at = rng.below(size / 512) * 512;
                format!("write -P {pattern} {at} {}", (512 * (1 + rng.below(40))).min(size - at))
            }
            1 => format!("write -P {pattern} {at} {len}"),
            2 if v3 => format!("write -z {at} {len}"),
            3 if v3 => format!("write -z -u {at} {len}"),
            4 if v3 => format!("discard {at} {len}"),
            _ => format!("write -P {} {at} {len}", i + 1),
        };
        commands.push(command);
    }
    commands
}

#[test]
fn every_combination_of_cluster_size_entries_and_compression_reads_as_qemu_reads_it() {
    if !have_tools() {
        return;
    }
    let dir = Dir::new();
    dir.raw("base.raw", 6 << 20, 1);
    let mut seed = 0;
    for cluster in [512u64, 4096, 65536, 2 << 20] {
        for extended in [false, true] {
            if extended && cluster < 16 << 10 {
                continue;
            }
            for compression in ["zlib", "zstd"] {
                for backed in [false, true] {
                    seed += 1;
                    let size = (8 << 20) + 512 * seed;
                    let name = format!("c{cluster}-{extended}-{compression}-{backed}.q");
                    let backing = if backed { "-b base.raw -F raw" } else { "" };
                    let on = if extended { "on" } else { "off" };
                    dir.create(&format!(
                        "-o cluster_size={cluster},extended_l2={on},compression_type={compression} {backing} {name} {size}"
                    ));
                    dir.io(&name, &scribble(size, cluster, seed, true, true));
                    dir.check(&name);
                }
            }
        }
    }
}

#[test]
fn version_2_refcount_widths_and_preallocation_read_as_qemu_reads_them() {
    if !have_tools() {
        return;
    }
    let dir = Dir::new();
    dir.raw("base.raw", 3 << 20, 2);
    let size = 4 << 20;
    for (i, (options, v3)) in [
        ("compat=0.10", false),
        ("refcount_bits=1", true),
        ("refcount_bits=2", true),
        ("refcount_bits=8", true),
        ("refcount_bits=64", true),
        ("lazy_refcounts=on", true),
        ("preallocation=metadata", true),
        ("preallocation=falloc", true),
        ("preallocation=full", true),
        ("extended_l2=on,cluster_size=16k", true),
        ("extended_l2=on,compression_type=zstd,refcount_bits=1,lazy_refcounts=on", true),
    ]
    .into_iter()
    .enumerate()
    {
        let cluster = if options.contains("16k") { 16 << 10 } else { 64 << 10 };
        dir.create(&format!("-o {options} i{i}.q {size}"));
        dir.check(&format!("i{i}.q"));
        // A width of 1 allows one compressed cluster per host cluster only; qemu-io copes.
        dir.io(&format!("i{i}.q"), &scribble(size, cluster, i as u64, v3, !options.contains("prealloc")));
        dir.check(&format!("i{i}.q"));
    }
    dir.create("-o compat=0.10 -b base.raw -F raw v2e.q");
    dir.io("v2e.q", &scribble(3 << 20, 65536, 77, false, true));
    dir.check("v2e.q");
    dir.create("-o preallocation=metadata,extended_l2=on -b base.raw -F raw pme.q");
    dir.check("pme.q");
}

#[test]
fn odd_and_empty_disks_and_the_end_of_the_file_read_as_qemu_reads_them() {
    if !have_tools() {
        return;
    }
    let dir = Dir::new();
    dir.create("zero.q 0");
    dir.check("zero.q");
    dir.create("odd.q 1000");
    dir.check("odd.q");
    dir.io("odd.q", &["write -P 7 100 900".to_owned()]);
    dir.check("odd.q");
    // One compressed cluster of equal bytes: the file ends in the middle of a sector.
    for kind in ["zlib", "zstd"] {
        dir.create(&format!("-o compression_type={kind} last-{kind}.q 64M"));
        dir.io(&format!("last-{kind}.q"), &["write -P 3 -c 0 64k".to_owned()]);
        let len = std::fs::metadata(dir.path(&format!("last-{kind}.q"))).expect("there").len();
        assert_ne!(len % 512, 0, "{kind}: this is what is to be tested");
        dir.check(&format!("last-{kind}.q"));
    }
    // The last cluster of the disk is partial and compressed.
    dir.raw("part.raw", (1 << 20) + 1536, 9);
    dir.run("qemu-img convert -c -O qcow2 part.raw part.q");
    dir.check("part.q");
    // A data cluster that reaches past the end of the file.
    dir.create("cut.q 1M");
    dir.io("cut.q", &["write -P 5 0 64k".to_owned()]);
    let file = std::fs::OpenOptions::new().write(true).open(dir.path("cut.q")).expect("opens");
    let len = file.metadata().expect("there").len();
    file.set_len(len - 1000).expect("cut");
    let node = dir.open("cut.q");
    let got = dir.read(&node, 0, 65536);
    assert!(got[..64536].iter().all(|b| *b == 5) && got[64536..].iter().all(|b| *b == 0));
}

#[test]
fn data_files_read_as_qemu_reads_them() {
    if !have_tools() {
        return;
    }
    let dir = Dir::new();
    for (name, extra) in [("df", ""), ("dfr", ",data_file_raw=on"), ("dfe", ",extended_l2=on")] {
        // Relative data file names are relative to the working directory: ours is another one, so they are absolute here.
        let file = dir.path(&format!("{name}.raw"));
        dir.create(&format!("-o data_file={}{extra} {name}.q 4M", file.display()));
        dir.io(&format!("{name}.q"), &scribble(4 << 20, 65536, 5, true, false));
        dir.check(&format!("{name}.q"));
        // A writable image needs its data file writable, too.
        let mut options = Options::empty();
        options.set("driver", "qcow2").set("file.driver", "file");
        options.set("file.filename", dir.path(&format!("{name}.q")).to_str().expect("text"));
        let node = dir.open_with(options).unwrap_or_else(|e| panic!("{name}: {}", e.full_text()));
        dir.write(&node, 4096, &[0x5a; 70_000]);
        drop(node);
        dir.close();
        dir.check(&format!("{name}.q"));
        let node = dir.open(&format!("{name}.q"));
        assert!(dir.read(&node, 4096, 70_000).iter().all(|b| *b == 0x5a));
        drop(node);
        // Given by the caller.
        dir.close();
        let expected = dir.expected(&format!("{name}.q"));
        std::fs::rename(&file, dir.path("moved.raw")).expect("moved");
        let mut options = dir.options(&format!("{name}.q"));
        options
            .set("data-file.driver", "file")
            .set("data-file.filename", dir.path("moved.raw").to_str().expect("text"));
        options.set("data-file.read-only", "on");
        let node = dir.open_with(options).expect("opens");
        dir.check_node(name, &node, &expected);
        let e =
            dir.open_with(dir.options(&format!("{name}.q"))).expect_err("the named one is gone").full_text();
        assert!(e.contains(&format!("{name}.raw")), "{e}");
    }
}

#[test]
fn chains_with_short_and_long_layers_read_as_qemu_reads_them() {
    if !have_tools() {
        return;
    }
    let dir = Dir::new();
    dir.create("m0.q 4M");
    dir.io("m0.q", &scribble(4 << 20, 65536, 1, true, true));
    dir.create("-b m0.q -F qcow2 m1.q 1M");
    dir.io("m1.q", &scribble(1 << 20, 65536, 2, true, true));
    dir.create("-o cluster_size=4k -b m1.q -F qcow2 m2.q 4M");
    dir.io("m2.q", &scribble(4 << 20, 4096, 3, true, true));
    dir.create("-o extended_l2=on -b m2.q -F qcow2 m3.q 5M");
    dir.io("m3.q", &scribble(5 << 20, 65536, 4, true, true));
    for name in ["m1.q", "m2.q", "m3.q"] {
        dir.check(name);
    }
    // Deeper data must not show behind the end of the short layer.
    let node = dir.open("m3.q");
    assert_eq!(node.limits().size, 5 << 20);
    dir.raw("odd.raw", (1 << 20) + 700, 4);
    dir.create("-b odd.raw -F raw -u overodd.q 3M");
    dir.check("overodd.q");
    for (i, name) in (0..40).map(|i| (i, format!("d{i}.q"))) {
        let below = if i == 0 { "m3.q".to_owned() } else { format!("d{}.q", i - 1) };
        dir.create(&format!("-b {below} -F qcow2 {name}"));
        dir.io(
            &name,
            &[
                format!("write -P {} {} 64k", i + 1, (i * 37 % 70) << 16),
                format!("write -z {} 9k", (i * 91 % 80) << 15),
            ],
        );
    }
    dir.check("d39.q");
    let node = dir.open("d39.q");
    dir.read(&node, 0, 5 << 20);
    let top = node.as_any().downcast_ref::<Qcow2Node>().expect("qcow2");
    let chain = top.image().chain().expect("the layers below are of one kind");
    assert_eq!((chain.layers().len(), chain.regions() > 0), (43, true));
}

#[test]
fn a_filter_that_goes_into_a_chain_sees_the_reads_and_when_it_goes_they_are_as_before() {
    if !have_tools() {
        return;
    }
    let dir = Dir::new();
    dir.create("l0.q 1M");
    dir.io("l0.q", &["write -P 7 0 1M".to_owned()]);
    for i in 1..4 {
        dir.create(&format!("-b l{}.q -F qcow2 l{i}.q", i - 1));
    }
    let mut options = dir.options("l3.q");
    options.set("backing.driver", "qcow2").set("backing.node-name", "middle").set("backing.read-only", "on");
    options.set("backing.file.driver", "file").set("backing.file.read-only", "on");
    options.set("backing.file.filename", dir.path("l2.q").to_str().expect("text"));
    let node = dir.open_with(options).unwrap_or_else(|e| panic!("{}", e.full_text()));
    let graph = dir.context.graph();
    let regions = || {
        let top = node.as_any().downcast_ref::<Qcow2Node>().expect("qcow2");
        top.image().chain().map_or(0, |chain| chain.regions())
    };
    assert!(dir.read(&node, 0, 4096).iter().all(|b| *b == 7));
    assert_eq!(regions(), 1);
    let middle = graph.node("middle").expect("named");
    let fault =
        Options::parse(r#"{"driver":"fault","rules":[{"op":"read","action":"error","errno":"ENOSPC"}]}"#);
    let filter = graph.filter_add(&middle, fault.expect("options")).expect("goes in");
    let failed = dir.try_read(&node, 0, 4096).expect_err("the filter is asked");
    assert_eq!(failed.errno, 28);
    graph.filter_del(&middle, &filter).expect("goes");
    drop((middle, filter));
    assert!(dir.read(&node, 0, 4096).iter().all(|b| *b == 7));
}

#[test]
fn names_are_opened_as_qemu_opens_them_and_only_if_allowed() {
    if !have_tools() {
        return;
    }
    let dir = Dir::new();
    dir.create("a.q 1M");
    dir.io("a.q", &["write -P 9 0 128k".to_owned()]);
    dir.create("-b a.q -F qcow2 b.q");
    std::fs::create_dir(dir.path("sub")).expect("made");
    dir.create("-b ../a.q -F qcow2 sub/up.q");
    let json = format!(
        "json:{{\"driver\":\"qcow2\",\"file\":{{\"driver\":\"file\",\"filename\":\"{}\"}}}}",
        dir.path("a.q").display()
    );
    dir.run_args(&["qemu-img", "create", "-q", "-f", "qcow2", "-b", &json, "-F", "qcow2", "j.q"]);
    for name in ["b.q", "sub/up.q", "j.q"] {
        dir.check(name);
    }
    let refused = |name: &str, policy: &str| {
        let mut options = dir.options(name);
        options.set("implicit-open", policy);
        dir.open_with(options).map(drop).map_err(|e| e.full_text())
    };
    for (name, stored) in [("b.q", "'a.q'"), ("sub/up.q", "'../a.q'"), ("j.q", "json:")] {
        let e = refused(name, "deny").expect_err("denied");
        assert!(e.contains(name) && e.contains("backing file name") && e.contains(stored), "{e}");
    }
    refused("b.q", "same-directory").expect("it lies beside it");
    refused("sub/up.q", "same-directory").expect_err("it does not");
    refused("j.q", "same-directory").expect_err("a description may say anything");
    // What the caller gives is opened, whatever the image names.
    let mut options = dir.options("b.q");
    options
        .set("implicit-open", "deny")
        .set("backing.driver", "null-co")
        .set("backing.size", "1M")
        .set("backing.read-zeroes", "on");
    let node = dir.open_with(options).expect("opens");
    assert!(dir.read(&node, 0, 65536).iter().all(|b| *b == 0));
    let mut options = dir.options("b.q");
    options.set("implicit-open", "deny").set("backing", serde_json::Value::Null);
    let node = dir.open_with(options).expect("opens");
    assert!(dir.read(&node, 0, 65536).iter().all(|b| *b == 0));
    // Only the driver is given: the file is the named one.
    let mut options = dir.options("b.q");
    options.set("backing.driver", "raw");
    let node = dir.open_with(options).expect("opens");
    assert_eq!(dir.read(&node, 0, 4), b"QFI\xfb");
}

#[test]
fn loops_missing_formats_and_unknown_protocols_are_refused_by_name() {
    if !have_tools() {
        return;
    }
    let dir = Dir::new();
    dir.create("a.q 1M");
    dir.create("-b a.q -F qcow2 b.q");
    dir.run("qemu-img rebase -u -b b.q -F qcow2 a.q");
    let error = |name: &str| dir.open_with(dir.options(name)).map(drop).expect_err("refused").full_text();
    for name in ["a.q", "b.q"] {
        let e = error(name);
        assert!(e.contains("creates an infinite loop"), "{e}");
    }
    dir.run("qemu-img create -q -f qcow2 -u -b nothing.q -F qcow2 self.q 1M");
    dir.run("qemu-img rebase -u -b self.q -F qcow2 self.q");
    assert!(error("self.q").contains("creates an infinite loop"));
    dir.run("qemu-img create -q -f qcow2 -u -b nothing.q -F qcow2 gone.q 1M");
    let e = error("gone.q");
    assert!(e.contains("nothing.q") && e.contains("No such file"), "{e}");
    dir.run("qemu-img create -q -f qcow2 -u -b http://host/x -F raw http.q 1M");
    let e = error("http.q");
    assert!(e.contains("'http'") && e.contains("not supported"), "{e}");
    // Without a stored format: the extension is overwritten with the end marker.
    dir.create("c.q 1M");
    dir.create("-b c.q -F qcow2 unformatted.q");
    let mut bytes = std::fs::read(dir.path("unformatted.q")).expect("read");
    let at = bytes.windows(4).position(|w| w == [0xe2, 0x79, 0x2a, 0xca]).expect("it is there");
    bytes[at..at + 4].fill(0);
    std::fs::write(dir.path("unformatted.q"), bytes).expect("written");
    let e = error("unformatted.q");
    assert!(e.contains("no stored format"), "{e}");
    let mut options = dir.options("unformatted.q");
    options.set("backing.driver", "qcow2");
    dir.open_with(options).expect("the caller says it");
}

#[test]
fn a_chain_of_a_thousand_layers_opens_reads_and_closes() {
    if !have_tools() {
        return;
    }
    let dir = Dir::new();
    dir.create("l0.q 1M");
    dir.io("l0.q", &["write -P 1 0 1M".to_owned()]);
    // Each layer is the header of the second one with another name in it, and one cluster of its own in some.
    dir.create("-b l0000.q -F qcow2 -u layer.q 1M");
    let header = std::fs::read(dir.path("layer.q")).expect("read");
    let at = header.windows(7).position(|w| w == b"l0000.q").expect("it is there");
    for i in 1..=1000 {
        let mut bytes = header.clone();
        let below = if i == 1 { "l0.q\0\0\0".to_owned() } else { format!("l{:04}.q", i - 1) };
        bytes[at..at + 7].copy_from_slice(below.as_bytes());
        if i == 1 {
            bytes[16..20].copy_from_slice(&4u32.to_be_bytes());
        }
        std::fs::write(dir.path(&format!("l{i:04}.q")), bytes).expect("written");
    }
    // On a thread with a small stack: depth must not cost stack.
    let ok = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(512 << 10);
        let body = || {
            let node = dir.open("l1000.q");
            let ok = dir.read(&node, 4096, 8192).iter().all(|b| *b == 1);
            drop(node);
            dir.close();
            ok
        };
        thread.spawn_scoped(scope, body).expect("a thread").join().expect("no overflow")
    });
    assert!(ok);
}

#[test]
fn unknown_feature_bits_corrupt_and_dirty_images_are_treated_by_the_rules() {
    if !have_tools() {
        return;
    }
    let dir = Dir::new();
    let patched = |name: &str, at: usize, bits: u64| {
        dir.create(&format!("{name} 1M"));
        dir.io(name, &["write -P 4 0 64k".to_owned()]);
        let mut bytes = std::fs::read(dir.path(name)).expect("read");
        let old = u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight"));
        bytes[at..at + 8].copy_from_slice(&(old | bits).to_be_bytes());
        std::fs::write(dir.path(name), bytes).expect("written");
    };
    patched("dirty.q", 72, 1);
    patched("corrupt.q", 72, 2);
    patched("compatible.q", 80, 1 << 50);
    patched("autoclear.q", 88, 1 << 50);
    for name in ["dirty.q", "corrupt.q", "compatible.q", "autoclear.q"] {
        let before = std::fs::read(dir.path(name)).expect("read");
        let node = dir.open(name);
        assert!(dir.read(&node, 0, 65536).iter().all(|b| *b == 4), "{name}");
        drop(node);
        dir.close();
        assert!(
            before == std::fs::read(dir.path(name)).expect("read"),
            "{name}: a read-only open changes nothing"
        );
    }
    patched("unknown.q", 72, 1 << 50);
    let e = dir.open_with(dir.options("unknown.q")).expect_err("refused").full_text();
    assert!(e.contains("unknown.q") && e.contains("bit 50"), "{e}");
}
