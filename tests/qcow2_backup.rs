//! Live backup with qcow2 images through the daemon: as source with a chain, as target, `sync=top`, with a client that writes; the result judged by qemu-img.

#[allow(dead_code, reason = "shared with tests that use the rest of it")]
mod support;

use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use support::daemon::{Daemon, Qmp};
use support::nbd::Client;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 16 * MIB;

/// Runs a line of shell commands in the daemon's directory.
fn sh(dir: &Path, line: &str) -> String {
    let out = Command::new("sh").args(["-ec", line]).current_dir(dir).output().expect("it starts");
    let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{line}: {text}");
    text
}

fn have_tools() -> bool {
    ["qemu-img", "qemu-io"].iter().all(|tool| support::have(tool))
}

/// A base of raw data, a layer with some data, zeroes and compressed clusters over it, and a top layer.
const CHAIN: &str = "
    head -c 6M /dev/urandom > base.raw; truncate -s 16M base.raw
    qemu-img convert -q -c -f raw -O qcow2 base.raw packed.q
    qemu-img create -q -f qcow2 -b packed.q -F qcow2 mid.q
    qemu-io -f qcow2 -c 'write -P 17 1M 3M' -c 'write -z 5M 1M' mid.q >/dev/null
    qemu-img create -q -f qcow2 -o OPTIONS -b mid.q -F qcow2 top.q
    qemu-io -f qcow2 -c 'write -P 34 2M 1M' -c 'write -P 51 9M 65k' -c 'write -P 68 15M 1M' top.q >/dev/null
    qemu-img convert -q -f qcow2 -O raw top.q instant.raw";

/// A daemon that exports the top of the chain as `disk`, with a target `t` behind a throttle.
fn daemon(options: &str, target: &str) -> Daemon {
    let dir = tempfile::tempdir().expect("tempdir");
    sh(dir.path(), &CHAIN.replace("OPTIONS", options));
    sh(dir.path(), target);
    Daemon::start_in(
        dir,
        &[
            "--object",
            "throttle-group,id=tg,limits.bps-write=50331648",
            "--nbd-server",
            "addr.type=unix,addr.path=@/nbd",
            "--blockdev",
            "driver=file,node-name=packed-f,filename=@/packed.q,read-only=on",
            "--blockdev",
            "driver=qcow2,node-name=packed,file=packed-f,read-only=on",
            "--blockdev",
            "driver=file,node-name=mid-f,filename=@/mid.q,read-only=on",
            "--blockdev",
            "driver=qcow2,node-name=mid,file=mid-f,read-only=on,backing=packed",
            "--blockdev",
            "driver=qcow2,node-name=disk,file.driver=file,file.filename=@/top.q,backing=mid,discard=unmap",
            "--blockdev",
            "driver=file,node-name=t-f,filename=@/t.q",
            "--export",
            "nbd,id=x,node-name=disk,writable=on",
        ],
    )
}

/// Opens the target image over its throttle.
fn open_target(qmp: &mut Qmp, backing: Value) {
    qmp.ok(
        "blockdev-add",
        json!({"driver": "throttle", "node-name": "t-t", "throttle-group": "tg", "file": "t-f"}),
    );
    qmp.ok("blockdev-add", json!({"driver": "qcow2", "node-name": "t", "file": "t-t", "backing": backing}));
}

/// Tells the writer to stop, also when the test fails.
struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Runs a backup while a client writes all over the disk. Returns the statuses of the job.
fn backup_under_load(daemon: &Daemon, qmp: &mut Qmp, arguments: Value) -> Vec<String> {
    let mut client = Client::connect(&daemon.path("nbd"), "disk");
    let stop = AtomicBool::new(false);
    assert_eq!(qmp.command("blockdev-backup", arguments), json!({"return": {}}));
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut n = 0u64;
            loop {
                let last = stop.load(Ordering::SeqCst);
                let at = n.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (SIZE / 4096) * 4096;
                client.write(at, &[0xee; 4096]);
                n += 1;
                if last {
                    return n;
                }
            }
        });
        let stopping = StopAtEnd(&stop);
        let statuses = qmp.statuses_until("b", "null");
        drop(stopping);
        assert!(writer.join().expect("the writer") > 1, "nothing was written during the backup");
        statuses
    })
}

const DONE: [&str; 6] = ["created", "running", "waiting", "pending", "concluded", "null"];

#[test]
fn a_chain_is_backed_up_to_a_qcow2_target_at_its_instant() {
    if !have_tools() {
        return;
    }
    for (source, target) in [
        ("compat=1.1", "qemu-img create -q -f qcow2 t.q 16M"),
        ("extended_l2=on", "qemu-img create -q -f qcow2 -o extended_l2=on,cluster_size=128k t.q 16M"),
        (
            "cluster_size=4k,lazy_refcounts=on",
            "qemu-img create -q -f qcow2 -o cluster_size=2M,compat=0.10 t.q 16M",
        ),
    ] {
        let mut daemon = daemon(source, target);
        let mut qmp = Qmp::connect(&daemon.qmp);
        open_target(&mut qmp, Value::Null);
        let arguments = json!({"job-id": "b", "device": "disk", "target": "t", "sync": "full", "ram-cache": {"capacity": 4 * MIB}});
        assert_eq!(backup_under_load(&daemon, &mut qmp, arguments), DONE);
        qmp.ok("quit", json!({}));
        daemon.assert_ended();
        let dir = daemon.path("");
        sh(&dir, "qemu-img check -q -f qcow2 t.q; qemu-img check -q -f qcow2 top.q");
        sh(&dir, "qemu-img compare -q -f qcow2 -F raw t.q instant.raw");
        sh(&dir, "! qemu-img compare -q -f qcow2 -F raw top.q instant.raw");
    }
}

#[test]
fn a_compressed_backup_is_small_and_whole() {
    if !have_tools() {
        return;
    }
    for target in [
        "",
        "-o compression_type=zstd,extended_l2=on,cluster_size=128k",
        "-o refcount_bits=1,cluster_size=4k",
    ] {
        let mut daemon = daemon("compat=1.1", &format!("qemu-img create -q -f qcow2 {target} t.q 16M"));
        let mut qmp = Qmp::connect(&daemon.qmp);
        open_target(&mut qmp, Value::Null);
        let arguments = json!({"job-id": "b", "device": "disk", "target": "t", "sync": "full", "compress": true, "ram-cache": {"capacity": 4 * MIB}});
        assert_eq!(backup_under_load(&daemon, &mut qmp, arguments), DONE);
        qmp.ok("quit", json!({}));
        daemon.assert_ended();
        let dir = daemon.path("");
        let check = sh(&dir, "qemu-img check --output=json -f qcow2 t.q");
        let check: Value = serde_json::from_str(&check).expect("JSON");
        // The client's pattern and the written bytes compress; what is random does not.
        assert!(
            check["compressed-clusters"].as_u64() > Some(16) && check["leaks"].is_null(),
            "{target}: {check}"
        );
        sh(&dir, "qemu-img compare -q -f qcow2 -F raw t.q instant.raw");
    }
    // A target that cannot compress.
    let daemon = daemon("compat=1.1", "qemu-img create -q -f qcow2 t.q 16M");
    let mut qmp = Qmp::connect(&daemon.qmp);
    qmp.ok("blockdev-add", json!({"driver": "memory", "node-name": "m", "size": SIZE}));
    let arguments = json!({"job-id": "b", "device": "disk", "target": "m", "sync": "full", "compress": true});
    let refused = qmp.command("blockdev-backup", arguments);
    assert!(refused["error"]["desc"].as_str().is_some_and(|d| d.contains("compress")), "{refused}");
}

#[test]
fn the_top_layer_alone_goes_to_a_target_over_the_same_backing() {
    if !have_tools() {
        return;
    }
    let mut daemon = daemon("compat=1.1", "qemu-img create -q -f qcow2 -b mid.q -F qcow2 t.q");
    let mut qmp = Qmp::connect(&daemon.qmp);
    open_target(&mut qmp, Value::Null);
    let arguments = json!({"job-id": "b", "device": "disk", "target": "t", "sync": "top", "ram-cache": {"capacity": 4 * MIB}});
    let mut client = Client::connect(&daemon.path("nbd"), "disk");
    assert_eq!(qmp.command("blockdev-backup", arguments), json!({"return": {}}));
    client.write(3 * MIB, &[0xee; 512]);
    assert_eq!(qmp.statuses_until("b", "null"), DONE);
    drop(client);
    qmp.ok("quit", json!({}));
    daemon.assert_ended();
    let dir = daemon.path("");
    sh(&dir, "qemu-img check -q -f qcow2 t.q; qemu-img compare -q -f qcow2 -F raw t.q instant.raw");
    let map = sh(&dir, "qemu-img map --output=json -f qcow2 t.q");
    let map: Value = serde_json::from_str(&map).expect("JSON");
    let own: u64 = map
        .as_array()
        .expect("a list")
        .iter()
        .filter(|e| e["depth"] == 0)
        .filter_map(|e| e["length"].as_u64())
        .sum();
    // What the top layer had, and the granule that the client has overwritten.
    assert!((2 * MIB..=2 * MIB + 512 * 1024).contains(&own), "{own} bytes in the target: {map}");
}

#[test]
fn a_cancelled_backup_and_a_full_target_leave_clean_images() {
    if !have_tools() {
        return;
    }
    let mut daemon = daemon("compat=1.1", "qemu-img create -q -f qcow2 t.q 16M; cp t.q u.q");
    let mut qmp = Qmp::connect(&daemon.qmp);
    open_target(&mut qmp, Value::Null);
    let arguments = json!({"job-id": "b", "device": "disk", "target": "t", "sync": "full", "speed": 1 << 20});
    let mut client = Client::connect(&daemon.path("nbd"), "disk");
    assert_eq!(qmp.command("blockdev-backup", arguments), json!({"return": {}}));
    client.write(0, &[0xee; 4096]);
    qmp.ok("job-cancel", json!({"id": "b"}));
    let statuses = qmp.statuses_until("b", "null");
    assert!(statuses.contains(&"aborting".to_owned()), "{statuses:?}");
    // The image below the target gets no more room.
    let rules = json!([{"op": "write", "action": "error", "errno": "ENOSPC", "skip": 3}]);
    qmp.ok(
        "blockdev-add",
        json!({"driver": "file", "node-name": "u-f", "filename": daemon.path("u.q").to_str()}),
    );
    qmp.ok("blockdev-add", json!({"driver": "fault", "node-name": "u-x", "file": "u-f", "rules": rules}));
    qmp.ok("blockdev-add", json!({"driver": "qcow2", "node-name": "u", "file": "u-x"}));
    let arguments = json!({"job-id": "b", "device": "disk", "target": "u", "sync": "full", "ram-cache": {"capacity": 4 * MIB}});
    assert_eq!(qmp.command("blockdev-backup", arguments), json!({"return": {}}));
    client.write(4096, &[0xdd; 4096]);
    let statuses = qmp.statuses_until("b", "null");
    assert!(statuses.contains(&"aborting".to_owned()), "{statuses:?}");
    assert_eq!(
        client.read(0, 8192)[..],
        [[0xee; 4096], [0xdd; 4096]].concat()[..],
        "the guest saw none of it"
    );
    drop(client);
    qmp.ok("quit", json!({}));
    daemon.assert_ended();
    let dir = daemon.path("");
    sh(&dir, "qemu-img check -q -f qcow2 t.q; qemu-img check -q -f qcow2 top.q");
    // What a full disk leaves is clean, or has leaks at most (exit code 3).
    sh(&dir, "qemu-img check -q -f qcow2 u.q || test $? = 3");
}
