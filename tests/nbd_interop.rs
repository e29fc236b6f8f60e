//! The NBD server against clients that others have written: qemu-io, qemu-img, nbdinfo, nbdcopy, fio.
//!
//! A tool that is not installed makes its test pass with a line on stderr, or fail if `CI` is set in the environment.
#![cfg(feature = "nbd")]

use cobweb::context::{Context, ContextOptions};
use cobweb::export::nbd::{Address, Export, Server};
use cobweb::options::Options;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
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
    // Dropped in this order: clients first.
    server: Server,
    context: Arc<Context>,
    dir: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        let context = Context::new(ContextOptions::default(), None).expect("context");
        context.start().expect("start");
        let dir = tempfile::tempdir().expect("tempdir");
        let address = Address::Unix(dir.path().join("nbd.sock"));
        let server = Server::start(context.env(), &address, 0).expect("server");
        Self { server, context, dir }
    }

    /// Exports the node that `options` open.
    fn export(&self, name: &str, options: &str, writable: bool) {
        let graph = self.context.graph();
        let vertex = graph.open(Options::parse(options).expect("options")).expect("open");
        let disk = graph.add_disk("").expect("disk");
        graph.insert(&disk, Some(vertex)).expect("insert");
        let export = Export { name: name.to_owned(), description: "for tests".to_owned(), disk, writable };
        self.server.add_export(export).expect("export");
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn uri(&self, name: &str) -> String {
        format!("nbd+unix:///{name}?socket={}", self.path("nbd.sock").display())
    }
}

/// Runs a tool; it must succeed. Returns what it printed.
fn run(command: &mut Command) -> String {
    let out = command.output().expect("the tool starts");
    assert!(out.status.success(), "{command:?} failed: {}", text(&out));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

fn text(out: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr))
}

/// Runs qemu-io with these commands; they must all succeed.
fn qemu_io(uri: &str, commands: &[&str]) -> String {
    let mut c = Command::new("qemu-io");
    c.args(["-f", "raw"]);
    commands.iter().for_each(|cmd| {
        c.args(["-c", cmd]);
    });
    let out = run(c.arg(uri));
    assert!(!out.contains("failed") && !out.contains("rror"), "{out}");
    out
}

/// Bytes of which no two pages are alike, with holes of whole megabytes.
fn image(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut data = Vec::with_capacity(len);
    while data.len() < len {
        let hole = (data.len() >> 20) % 4 == 3;
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let word = if hole { 0 } else { state };
        data.extend(&word.to_le_bytes()[..8.min(len - data.len())]);
    }
    data
}

fn assert_same(a: &Path, expected: &[u8]) {
    assert!(fs::read(a).expect("read") == expected, "{} differs", a.display());
}

#[test]
fn qemu_io_reads_back_unaligned_writes_zeroes_and_trims() {
    if !have("qemu-io") {
        return;
    }
    let f = Fixture::new();
    // 1 MiB + 512, and on a real file with O_DIRECT, where unaligned requests need the most care.
    f.export("m", "driver=memory,size=1049088", true);
    fs::write(f.path("disk"), vec![0u8; 1_049_088]).expect("write");
    let file = format!("driver=file,cache.direct=on,filename={}", f.path("disk").display());
    f.export("f", &file, true);
    for name in ["m", "f"] {
        let uri = f.uri(name);
        let commands = [
            "write -P 0x11 0 1049088",
            "write -P 0x22 511 2",
            "write -f -P 0x33 65000 70001",
            "write -z 131072 65536",
            "write -z -u 300000 70000",
            "write -f -P 0x44 1048577 511",
            "read -P 0x11 0 511",
            "read -P 0x22 511 2",
            "read -P 0x11 513 64487",
            "read -P 0x33 65000 66072",
            "read -P 0 131072 65536",
            "read -P 0x11 196608 103392",
            "read -P 0 300000 70000",
            "read -P 0x44 1048577 511",
            "aio_write -P 0x55 4096 4096",
            "aio_write -P 0x66 8192 100",
            "aio_flush",
            "read -P 0x55 4096 4096",
            "read -P 0x66 8192 100",
            "discard 524288 262144",
            "flush",
            "length",
        ];
        let out = qemu_io(&uri, &commands);
        assert!(out.contains("1 MiB") && !out.contains("Pattern verification"), "{out}");
    }
}

#[test]
fn qemu_io_gets_errors_and_goes_on() {
    if !have("qemu-io") {
        return;
    }
    let f = Fixture::new();
    f.export("", r#"{"driver": "memory", "size": 65536}"#, false);
    let ro = Command::new("qemu-io").args(["-f", "raw", "-c", "write 0 512", &f.uri("")]).output();
    let ro = ro.expect("qemu-io");
    assert!(!ro.status.success(), "it does not open a read-only export for writing");
    let mut c = Command::new("qemu-io");
    run(c.args(["-r", "-f", "raw", "-c", "read -P 0 0 64k"]).arg(f.uri("")));
    f.export("b", "driver=fault,rules.0.action=error,rules.0.op=read,rules.0.offset=4096,rules.0.length=4096,file.driver=memory,file.size=65536", true);
    let mut c = Command::new("qemu-io");
    c.args(["-f", "raw", "-c", "read 4096 512", "-c", "read -P 0 0 4096", "-c", "write -P 9 8192 512"]);
    let out = c.args(["-c", "read -P 9 8192 512"]).arg(f.uri("b")).output().expect("qemu-io");
    let out = text(&out);
    assert!(out.contains("read failed: Input/output error"), "{out}");
    assert!(out.contains("read 4096/4096") && out.contains("read 512/512"), "{out}");
}

#[test]
fn qemu_img_copies_in_and_out_and_sees_the_holes() {
    if !have("qemu-img") {
        return;
    }
    let f = Fixture::new();
    let data = image((9 << 20) + 512);
    fs::write(f.path("in"), &data).expect("write");
    fs::write(f.path("disk"), vec![0xffu8; data.len()]).expect("write");
    let options = format!("driver=raw,file.driver=file,file.filename={}", f.path("disk").display());
    f.export("d", &options, true);
    let uri = f.uri("d");
    for extra in [&["-m", "16", "-W"][..], &["-m", "1"]] {
        let mut c = Command::new("qemu-img");
        run(c.args(["convert", "-n", "-f", "raw", "-O", "raw"]).args(extra).arg(f.path("in")).arg(&uri));
        let mut c = Command::new("qemu-img");
        run(c.args(["convert", "-f", "raw", "-O", "raw"]).args(extra).arg(&uri).arg(f.path("out")));
        assert_same(&f.path("out"), &data);
        run(Command::new("qemu-img").args(["compare", "-f", "raw", "-F", "raw"]).arg(f.path("in")).arg(&uri));
    }
    let map = run(Command::new("qemu-img").args(["map", "--output=json", "-f", "raw"]).arg(&uri));
    assert!(map.contains("\"start\": 3145728, \"length\": 1048576"), "{map}");
    let info = run(Command::new("qemu-img").args(["info", "--output=json"]).arg(&uri));
    assert!(info.contains(&format!("\"virtual-size\": {}", data.len())), "{info}");
    let bench = ["bench", "-c", "500", "-d", "16", "-s", "4096", "-w", "--flush-interval=50", "-f", "raw"];
    run(Command::new("qemu-img").args(bench).arg(&uri));
}

#[test]
fn nbdinfo_sees_exports_abilities_and_extents() {
    if !have("nbdinfo") {
        return;
    }
    let f = Fixture::new();
    fs::write(f.path("disk"), image(5 << 20)).expect("write");
    let punched = fs::File::options().write(true).open(f.path("disk")).expect("open");
    punched.set_len(3 << 20).and_then(|()| punched.set_len(5 << 20)).expect("a hole");
    f.export("disk", &format!("driver=file,filename={}", f.path("disk").display()), true);
    f.export("ro", "driver=memory,size=4608", false);
    let list = run(Command::new("nbdinfo").args(["--list", "--json"]).arg(f.uri("")));
    for expected in ["\"export-name\": \"disk\"", "\"export-name\": \"ro\"", "\"description\": \"for tests\""]
    {
        assert!(list.contains(expected), "{expected}: {list}");
    }
    let info = run(Command::new("nbdinfo").arg("--json").arg(f.uri("disk")));
    for expected in [
        "\"protocol\": \"newstyle-fixed\"",
        "\"structured\": true",
        "\"export-size\": 5242880",
        "base:allocation",
        "\"is_read_only\": false",
        "\"can_df\": true",
        "\"can_fast_zero\": true",
        "\"can_flush\": true",
        "\"can_fua\": true",
        "\"can_multi_conn\": true",
        "\"can_trim\": true",
        "\"can_zero\": true",
        "\"block_size_minimum\": 1",
        "\"block_size_maximum\": 33554432",
    ] {
        assert!(info.contains(expected), "{expected}: {info}");
    }
    let info = run(Command::new("nbdinfo").arg("--json").arg(f.uri("ro")));
    assert!(info.contains("\"is_read_only\": true") && info.contains("\"can_trim\": false"), "{info}");
    let map = run(Command::new("nbdinfo").args(["--map", "--totals"]).arg(f.uri("disk")));
    assert!(map.contains("2097152") && map.contains("hole,zero"), "{map}");
    let missing = Command::new("nbdinfo").arg(f.uri("nothing")).output().expect("nbdinfo");
    assert!(!missing.status.success());
}

#[test]
fn nbdcopy_copies_in_and_out_over_several_connections() {
    if !have("nbdcopy") {
        return;
    }
    let f = Fixture::new();
    let data = image((21 << 20) + 4608);
    fs::write(f.path("in"), &data).expect("write");
    f.export("m", &format!("driver=memory,size={}", data.len()), true);
    fs::write(f.path("disk"), vec![0u8; data.len()]).expect("write");
    let file = format!("driver=file,cache.direct=on,filename={}", f.path("disk").display());
    f.export("f", &file, true);
    for name in ["m", "f"] {
        let uri = f.uri(name);
        run(Command::new("nbdcopy").args(["--connections=4", "--flush"]).arg(f.path("in")).arg(&uri));
        run(Command::new("nbdcopy").arg("--connections=4").arg(&uri).arg(f.path("out")));
        assert_same(&f.path("out"), &data);
        fs::remove_file(f.path("out")).expect("remove");
    }
    assert_same(&f.path("disk"), &data);
    // From one export to another of the same server.
    f.export("m2", &format!("driver=memory,size={}", data.len()), true);
    run(Command::new("nbdcopy").arg("--synchronous").arg(f.uri("f")).arg(f.uri("m2")));
    run(Command::new("nbdcopy").arg(f.uri("m2")).arg(f.path("out")));
    assert_same(&f.path("out"), &data);
}

#[test]
fn fio_verifies_what_it_wrote() {
    if !have("fio") {
        return;
    }
    let f = Fixture::new();
    fs::write(f.path("disk"), vec![0u8; 16 << 20]).expect("write");
    let file = format!("driver=file,cache.direct=on,filename={}", f.path("disk").display());
    f.export("d", &file, true);
    let uri = format!("--uri={}", f.uri("d"));
    let common = ["--name=w", "--ioengine=nbd", &uri, "--size=16m", "--randseed=7"];
    for shape in [
        &["--bs=32k", "--iodepth=8", "--rw=randwrite", "--verify=crc32c", "--do_verify=1"][..],
        &["--bsrange=512-64k", "--bs_unaligned=0", "--iodepth=32", "--rw=randrw", "--verify=crc32c"],
        &["--bs=4k", "--iodepth=16", "--rw=randtrimwrite", "--io_size=8m"],
    ] {
        let out = run(Command::new("fio").current_dir(f.dir.path()).args(common).args(shape));
        assert!(out.contains("err= 0"), "{out}");
    }
}

#[test]
fn tcp_serves_like_a_unix_socket() {
    if !have("qemu-io") {
        return;
    }
    let f = Fixture::new();
    let server = Server::start(f.context.env(), &Address::Tcp("127.0.0.1".to_owned(), 0), 0).expect("server");
    f.export("d", "driver=memory,size=3M", true);
    let disk = f.server.exports()[0].disk.clone();
    let export = Export { name: "d".to_owned(), description: String::new(), disk, writable: true };
    server.add_export(export).expect("the same disk, on another server");
    let uri = format!("nbd://{}/d", server.address());
    qemu_io(&uri, &["write -P 7 5 2000000", "flush", "read -P 7 5 2000000", "read -P 0 2000005 1000"]);
    qemu_io(&f.uri("d"), &["read -P 7 5 2000000"]);
}
