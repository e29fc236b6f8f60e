//! Images that we create against those of qemu-img with the same options: the same information in every field, and clean.
//!
//! A tool that is not installed makes its test pass with a line on stderr, or fail if `CI` is set in the environment.

use cobweb::context::{Context, ContextOptions};
use cobweb::error::Result;
use cobweb::format::qcow2::create::{
    BackingName, Compat, CreateOptions, DataFileName, Preallocation, create,
};
use cobweb::format::qcow2::header::Compression;
use cobweb::io::file::FileNode;
use cobweb::io::uring_allowed;
use cobweb::node::Node;
use cobweb::options::Options;
use serde_json::Value;
use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

/// Whether `name` can be run; loud if not.
fn have(name: &str) -> bool {
    let found = Command::new(name).arg("--version").output().is_ok();
    if !found {
        assert!(std::env::var_os("CI").is_none(), "{name} is not installed, and this is CI");
        eprintln!("*** SKIPPED: {name} is not installed ***");
    }
    found
}

struct Fixture {
    context: Arc<Context>,
    dir: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        let context = Context::new(ContextOptions::default(), None).expect("context");
        context.start().expect("start");
        Self { context, dir: tempfile::tempdir().expect("tempdir") }
    }

    /// A folder of its own, so that names inside images are the same.
    fn folder(&self, name: &str) -> std::path::PathBuf {
        let folder = self.dir.path().join(name);
        std::fs::create_dir_all(&folder).expect("folder");
        for (base, len) in [("base.raw", 64 << 20), ("small.raw", 1 << 20)] {
            File::create(folder.join(base)).expect("base").set_len(len).expect("length");
        }
        folder
    }

    /// A node outside of the graph, which closes (and gives its locks back) with its last user.
    fn open(&self, path: &Path) -> Arc<dyn Node> {
        let mut options = Options::empty();
        options.set("filename", path.display().to_string());
        FileNode::open(options, uring_allowed()).expect("open")
    }

    fn create(&self, folder: &Path, name: &str, options: &CreateOptions) -> Result<()> {
        let path = folder.join(name);
        File::create(&path).expect("file");
        let file = self.open(&path);
        let data = options.data_file.as_ref().map(|d| {
            let path = folder.join(String::from_utf8(d.name.clone()).expect("text"));
            File::create(&path).expect("file");
            self.open(&path)
        });
        self.context
            .env()
            .block_on(|cx| async move { create(&cx, &*file, data.as_deref(), options).await })
            .expect("may block")
    }
}

fn qemu_img(folder: &Path, args: &[&str]) -> String {
    let out = Command::new("qemu-img").current_dir(folder).args(args).output().expect("qemu-img starts");
    let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "qemu-img {args:?}: {text}");
    text
}

fn info(folder: &Path, name: &str) -> Value {
    let mut info: Value =
        serde_json::from_str(&qemu_img(folder, &["info", "--output=json", name])).expect("JSON");
    // What differs with the file system's mood.
    info["actual-size"] = Value::Null;
    info["children"][0]["info"]["actual-size"] = Value::Null;
    info.as_object_mut().expect("object").remove("full-backing-filename");
    for child in info["children"].as_array_mut().expect("children") {
        child["info"]["actual-size"] = Value::Null;
    }
    info
}

type Change = fn(&mut CreateOptions);

/// qemu-img's options and ours.
const CASES: &[(&str, &str, Change)] = &[
    ("", "64M", |_| ()),
    ("", "0", |o| o.size = 0),
    ("", "1000", |o| o.size = 1000),
    ("", "1T", |o| o.size = 1 << 40),
    ("compat=0.10", "64M", |o| o.compat = Compat::V010),
    ("cluster_size=512", "64M", |o| o.cluster_size = 512),
    ("cluster_size=512,refcount_bits=64", "8M", |o| {
        (o.cluster_size, o.refcount_bits, o.size) = (512, 64, 8 << 20)
    }),
    ("cluster_size=4k", "64M", |o| o.cluster_size = 4096),
    ("cluster_size=2M", "64M", |o| o.cluster_size = 2 << 20),
    ("refcount_bits=1", "64M", |o| o.refcount_bits = 1),
    ("refcount_bits=2", "64M", |o| o.refcount_bits = 2),
    ("refcount_bits=8", "64M", |o| o.refcount_bits = 8),
    ("refcount_bits=64", "64M", |o| o.refcount_bits = 64),
    ("lazy_refcounts=on", "64M", |o| o.lazy_refcounts = true),
    ("compression_type=zstd", "64M", |o| o.compression = Compression::Zstd),
    ("extended_l2=on", "64M", |o| o.extended_l2 = true),
    ("extended_l2=on,cluster_size=16k", "64M", |o| (o.extended_l2, o.cluster_size) = (true, 16 << 10)),
    ("extended_l2=on,compression_type=zstd,refcount_bits=1,lazy_refcounts=on", "64M", |o| {
        (o.extended_l2, o.compression, o.refcount_bits, o.lazy_refcounts) =
            (true, Compression::Zstd, 1, true);
    }),
    ("backing_file=base.raw,backing_fmt=raw", "64M", |o| o.backing = Some(base("base.raw"))),
    ("backing_file=base.raw,backing_fmt=raw,compat=0.10", "64M", |o| {
        (o.backing, o.compat) = (Some(base("base.raw")), Compat::V010);
    }),
    ("backing_file=small.raw,backing_fmt=raw,extended_l2=on,cluster_size=128k", "64M", |o| {
        *o = CreateOptions::for_overlay(o.size, base("small.raw"));
    }),
    ("data_file=df.raw", "64M", |o| {
        o.data_file = Some(DataFileName { name: b"df.raw".to_vec(), raw: false })
    }),
    ("data_file=df.raw,data_file_raw=on", "64M", |o| {
        o.data_file = Some(DataFileName { name: b"df.raw".to_vec(), raw: true });
    }),
    ("data_file=df.raw,extended_l2=on,preallocation=metadata", "4M", |o| {
        o.data_file = Some(DataFileName { name: b"df.raw".to_vec(), raw: false });
        (o.extended_l2, o.preallocation, o.size) = (true, Preallocation::Metadata, 4 << 20);
    }),
    ("preallocation=metadata", "4M", |o| (o.preallocation, o.size) = (Preallocation::Metadata, 4 << 20)),
    ("preallocation=metadata", "1000", |o| (o.preallocation, o.size) = (Preallocation::Metadata, 1000)),
    ("preallocation=falloc", "4M", |o| (o.preallocation, o.size) = (Preallocation::Falloc, 4 << 20)),
    ("preallocation=full", "4M", |o| (o.preallocation, o.size) = (Preallocation::Full, 4 << 20)),
    ("preallocation=metadata,extended_l2=on", "4M", |o| {
        (o.preallocation, o.size, o.extended_l2) = (Preallocation::Metadata, 4 << 20, true);
    }),
    ("preallocation=metadata,cluster_size=512,refcount_bits=64", "4M", |o| {
        (o.preallocation, o.size) = (Preallocation::Metadata, 4 << 20);
        (o.cluster_size, o.refcount_bits) = (512, 64);
    }),
    ("preallocation=metadata,extended_l2=on,backing_file=base.raw,backing_fmt=raw", "64M", |o| {
        (o.preallocation, o.extended_l2, o.backing) = (Preallocation::Metadata, true, Some(base("base.raw")));
    }),
];

fn base(name: &str) -> BackingName {
    BackingName { name: name.as_bytes().to_vec(), format: "raw".to_owned() }
}

#[test]
fn an_image_with_any_options_is_clean_and_says_the_same_as_one_of_qemu_img() {
    if !have("qemu-img") {
        return;
    }
    let f = Fixture::new();
    for (n, (text, size, change)) in CASES.iter().enumerate() {
        let (theirs, ours) = (f.folder(&format!("theirs{n}")), f.folder(&format!("ours{n}")));
        let mut args = vec!["create", "-q", "-f", "qcow2"];
        if !text.is_empty() {
            args.extend(["-o", text]);
        }
        args.extend(["i.q", size]);
        qemu_img(&theirs, &args);
        let mut options = CreateOptions::new(64 << 20);
        change(&mut options);
        f.create(&ours, "i.q", &options).unwrap_or_else(|e| panic!("{text}: {}", e.full_text()));
        let what = format!("{text} {size}");
        let (mut a, mut b) = (info(&theirs, "i.q"), info(&ours, "i.q"));
        if text.contains("preallocation") || text.contains("512") || text.contains("data_file_raw") {
            // The length of the file: the order of the structures is each program's own.
            for i in [&mut a, &mut b] {
                i["children"][0]["info"]["virtual-size"] = Value::Null;
            }
        }
        assert_eq!(a, b, "{what}");
        qemu_img(&ours, &["check", "-q", "i.q"]);
        // Byte for byte where nothing is left to taste.
        if a["children"][0]["info"]["virtual-size"] != Value::Null && !text.contains("cluster_size=4k") {
            let read = |folder: &Path| std::fs::read(folder.join("i.q")).expect("read");
            assert!(read(&theirs) == read(&ours), "{what}: bytes differ");
        }
        // Reads as zeros, or as what lies below.
        let mut compare = vec!["compare", "-q", "i.q"];
        let other =
            if text.contains("base.raw") || text.contains("small.raw") { "theirs.q" } else { "zero.raw" };
        if other == "theirs.q" {
            std::fs::copy(theirs.join("i.q"), ours.join(other)).expect("copied");
        } else {
            File::create(ours.join(other))
                .expect("file")
                .set_len(options.stored_size().expect("size"))
                .expect("length");
        }
        compare.push(other);
        qemu_img(&ours, &compare);
    }
}

#[test]
fn preallocated_space_is_there() {
    if !have("qemu-img") {
        return;
    }
    use std::os::unix::fs::MetadataExt;
    let f = Fixture::new();
    for (preallocation, least, most) in [
        (Preallocation::Metadata, 0, 1 << 20),
        (Preallocation::Falloc, 16 << 20, 18 << 20),
        (Preallocation::Full, 16 << 20, 18 << 20),
    ] {
        for data_file in [false, true] {
            let folder = f.folder(&format!("{preallocation:?}{data_file}"));
            let mut options = CreateOptions { preallocation, ..CreateOptions::new(16 << 20) };
            if data_file {
                options.data_file = Some(DataFileName { name: b"d.raw".to_vec(), raw: false });
            }
            f.create(&folder, "i.q", &options).expect("created");
            let name = if data_file { "d.raw" } else { "i.q" };
            let used = std::fs::metadata(folder.join(name)).expect("there").blocks() * 512;
            assert!((least..most).contains(&used), "{preallocation:?} {data_file}: {used}");
            qemu_img(&folder, &["check", "-q", "i.q"]);
        }
    }
}

#[test]
fn what_cannot_be_combined_is_refused_by_the_name_of_an_option_and_nothing_is_touched() {
    let f = Fixture::new();
    let folder = f.folder("refused");
    let data = |raw| Some(DataFileName { name: b"d.raw".to_vec(), raw });
    type Case<'a> = (&'a str, &'a dyn Fn(&mut CreateOptions));
    let cases: &[Case<'_>] = &[
        ("cluster_size", &|o| o.cluster_size = 4 << 20),
        ("cluster_size", &|o| o.cluster_size = 256),
        ("cluster_size", &|o| o.cluster_size = 65537),
        ("cluster_size", &|o| o.cluster_size = 0),
        ("refcount_bits", &|o| o.refcount_bits = 3),
        ("refcount_bits", &|o| o.refcount_bits = 128),
        ("refcount_bits", &|o| o.refcount_bits = 0),
        ("extended_l2", &|o| (o.extended_l2, o.cluster_size) = (true, 8 << 10)),
        ("extended_l2", &|o| (o.extended_l2, o.compat) = (true, Compat::V010)),
        ("lazy_refcounts", &|o| (o.lazy_refcounts, o.compat) = (true, Compat::V010)),
        ("refcount_bits", &|o| (o.refcount_bits, o.compat) = (8, Compat::V010)),
        ("compression_type", &|o| (o.compression, o.compat) = (Compression::Zstd, Compat::V010)),
        ("data_file", &|o| (o.data_file, o.compat) = (data(false), Compat::V010)),
        ("data_file_raw", &|o| (o.data_file, o.backing) = (data(true), Some(base("base.raw")))),
        ("preallocation", &|o| (o.preallocation, o.backing) = (Preallocation::Full, Some(base("base.raw")))),
        ("backing_fmt", &|o| o.backing = Some(BackingName { name: b"x".to_vec(), format: String::new() })),
        ("backing_file", &|o| {
            o.backing = Some(BackingName { name: vec![b'x'; 1024], format: "raw".to_owned() })
        }),
        ("virtual size", &|o| (o.size, o.cluster_size) = (129 << 30, 512)),
        ("size", &|o| o.size = u64::MAX),
    ];
    for (named, change) in cases {
        let mut options = CreateOptions::new(64 << 20);
        change(&mut options);
        let e = f.create(&folder, "i.q", &options).expect_err(named);
        assert!(e.full_text().contains(named), "{}", e.full_text());
        assert_eq!(std::fs::metadata(folder.join("i.q")).expect("there").len(), 0);
    }
}

#[test]
fn a_header_that_does_not_fit_its_cluster_is_refused() {
    let f = Fixture::new();
    let folder = f.folder("long");
    let name = BackingName { name: vec![b'x'; 500], format: "raw".to_owned() };
    let options = CreateOptions { cluster_size: 512, backing: Some(name), ..CreateOptions::new(1 << 20) };
    let e = f.create(&folder, "i.q", &options).expect_err("too long");
    assert!(e.full_text().contains("more than a cluster"), "{}", e.full_text());
}

#[test]
fn a_node_of_fixed_length_is_overwritten_and_used_as_it_is() {
    if !have("qemu-img") {
        return;
    }
    let f = Fixture::new();
    let folder = f.folder("fixed");
    let path = folder.join("device");
    std::fs::write(&path, vec![0xff; 8 << 20]).expect("garbage");
    // A window cannot grow, as a device.
    let text = format!(
        "driver=raw,offset=0,size=8M,file.driver=file,file.locking=off,file.filename={}",
        path.display()
    );
    let device = f.context.graph().open(Options::parse(&text).expect("options")).expect("open").top_node();
    let make = |options: CreateOptions| {
        let device = device.clone();
        f.context
            .env()
            .block_on(|cx| async move { create(&cx, &*device, None, &options).await })
            .expect("may block")
    };
    let e = make(CreateOptions { preallocation: Preallocation::Full, ..CreateOptions::new(8 << 20) })
        .expect_err("too small");
    assert_eq!(e.errno(), 28);
    make(CreateOptions { preallocation: Preallocation::Metadata, ..CreateOptions::new(4 << 20) })
        .expect("created");
    qemu_img(&folder, &["check", "-q", "-f", "qcow2", "device"]);
    File::create(folder.join("zero.raw")).expect("file").set_len(4 << 20).expect("length");
    qemu_img(&folder, &["compare", "-q", "-f", "qcow2", "-F", "raw", "device", "zero.raw"]);
}
