//! `cobweb storage-daemon` and `cobweb serve` as programs: sockets, QMP, signals, backups under load.

#[allow(dead_code, reason = "shared with tests that use the rest of it")]
mod support;

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use support::daemon::{COBWEB, Daemon, Qmp};
use support::nbd::Client;

const MIB: usize = 1 << 20;

/// Data without long runs, different for each seed.
fn data(len: usize, seed: u64) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let words = std::iter::repeat_with(|| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x.to_le_bytes()
    });
    words.flatten().take(len).collect()
}

#[test]
fn a_monitor_greets_negotiates_and_survives_mistakes() {
    let daemon = Daemon::start(&[]);
    let mut raw = UnixStream::connect(&daemon.qmp).expect("connect");
    let mut lines = BufReader::new(raw.try_clone().expect("clone")).lines();
    let mut next =
        || -> Value { serde_json::from_str(&lines.next().expect("a line").expect("read")).expect("JSON") };
    let greeting = next();
    assert!(greeting["QMP"]["version"]["qemu"]["major"].is_u64(), "{greeting}");
    assert!(greeting["QMP"]["capabilities"].is_array(), "{greeting}");
    let mut ask = |text: &str| {
        raw.write_all(text.as_bytes()).expect("write");
        next()
    };
    let early = ask("{\"execute\": \"query-version\", \"id\": [1]}\n");
    assert_eq!((&early["error"]["class"], &early["id"]), (&json!("CommandNotFound"), &json!([1])));
    assert_eq!(ask("{\"execute\": \"qmp_capabilities\"}\n"), json!({"return": {}}));
    for bad in [
        "what\n",
        "{\"execute\":\n",
        "{]\n",
        "{\"execute\": 1}\n",
        "[]\n",
        "\"\\\n",
        "{\"execute\": \"x\0\"}\n",
    ] {
        let answer = ask(bad);
        assert!(answer["error"]["desc"].is_string(), "{bad:?}: {answer}");
    }
    assert_eq!(ask(r#"{"execute": "eject"}"#)["error"]["class"], "CommandNotFound");
    let wrong = ask(r#"{"execute": "blockdev-del", "arguments": {"node-name": "n", "force": true}}"#);
    assert!(wrong["error"]["desc"].as_str().is_some_and(|d| d.contains("'force'")), "{wrong}");
    // 2 MiB in one line: refused once, and the line after it is read again.
    let long = format!("{{\"execute\": \"{}\"}}\n{{\"execute\": \"query-jobs\"}}\n", "x".repeat(2 * MIB));
    assert!(ask(&long)["error"]["desc"].as_str().is_some_and(|d| d.contains("too long")));
    assert_eq!(next()["return"], json!([]));
    // Another connection at the same time.
    let mut second = Qmp::connect(&daemon.qmp);
    let commands = second.ok("query-commands", json!({}));
    let names: Vec<_> = commands.as_array().expect("a list").iter().map(|c| c["name"].clone()).collect();
    for name in ["blockdev-backup", "query-cobweb-stats", "transaction", "quit"] {
        assert!(names.contains(&json!(name)), "{name}");
    }
    raw.write_all(b"{\"execute\": \"quit\"}\n").expect("write");
    assert_eq!(next(), json!({"return": {}}));
    daemon.assert_ends_cleanly();
}

#[test]
fn a_client_that_does_not_read_does_not_hold_up_the_others() {
    let daemon = Daemon::start(&[]);
    let mut stuck = UnixStream::connect(&daemon.qmp).expect("connect");
    stuck.write_all(b"{\"execute\": \"qmp_capabilities\"}").expect("write");
    stuck.set_nonblocking(true).expect("nonblocking");
    let commands = b"{\"execute\": \"query-commands\"}".repeat(1000);
    let mut sent = 0;
    // Until neither side takes any more.
    while stuck.write(&commands).is_ok_and(|n| n > 0) {
        sent += 1;
        assert!(sent < 1000, "the daemon reads on and on");
    }
    let mut other = Qmp::connect(&daemon.qmp);
    assert_eq!(other.ok("query-jobs", json!({})), json!([]));
    other.ok("quit", json!({}));
    daemon.assert_ends_cleanly();
}

#[test]
fn sigterm_ends_the_daemon_and_removes_its_files() {
    let daemon = Daemon::start(&[
        "--blockdev",
        "driver=memory,node-name=m,size=1M",
        "--nbd-server",
        "addr.type=unix,addr.path=@/nbd",
        "--export",
        "nbd,id=e,node-name=m,name=x,writable=on",
    ]);
    let mut client = Client::connect(&daemon.path("nbd"), "x");
    client.write(4096, &[7; 512]);
    let mut qmp = Qmp::connect(&daemon.qmp);
    daemon.signal(libc::SIGTERM);
    qmp.assert_closed();
    client.assert_closed();
    daemon.assert_ends_cleanly();
}

#[test]
fn exports_come_and_go_while_others_are_used() {
    let daemon = Daemon::start(&["--nbd-server", "addr.type=unix,addr.path=@/nbd"]);
    let mut qmp = Qmp::connect(&daemon.qmp);
    for name in ["a", "b"] {
        qmp.ok("blockdev-add", json!({"driver": "memory", "node-name": name, "size": 65536}));
        qmp.ok(
            "block-export-add",
            json!({"type": "nbd", "id": name, "node-name": name, "writable": name == "a"}),
        );
    }
    let mut a = Client::connect(&daemon.path("nbd"), "a");
    let b = Client::connect(&daemon.path("nbd"), "b");
    assert!(!a.is_read_only() && b.is_read_only());
    a.write(0, &[1; 4096]);
    let refused = qmp.command("block-export-del", json!({"id": "b"}));
    assert!(refused["error"]["desc"].as_str().is_some_and(|d| d.contains("client")), "{refused}");
    qmp.ok("block-export-del", json!({"id": "b", "mode": "hard"}));
    assert_eq!(qmp.event("BLOCK_EXPORT_DELETED")["data"]["id"], "b");
    b.assert_closed();
    qmp.ok("blockdev-del", json!({"node-name": "b"}));
    assert_eq!(a.read(0, 4096), [1; 4096]);
    let stats = qmp.ok("query-cobweb-stats", json!({"name": "a"}));
    assert_eq!((&stats["wr-ops"], &stats["rd-bytes"]), (&json!(1), &json!(4096)), "{stats}");
    let exports = qmp.ok("query-block-exports", json!({}));
    assert_eq!(exports.as_array().map(Vec::len), Some(1));
    qmp.ok("nbd-server-stop", json!({}));
    a.assert_closed();
    assert!(!daemon.path("nbd").exists());
    qmp.ok("quit", json!({}));
    daemon.assert_ends_cleanly();
}

#[test]
fn an_idle_daemon_does_nothing() {
    let daemon = Daemon::start(&[
        "--blockdev",
        "driver=memory,node-name=m,size=1M",
        "--nbd-server",
        "addr.type=unix,addr.path=@/nbd",
        "--export",
        "nbd,id=e,node-name=m",
    ]);
    let _client = Client::connect(&daemon.path("nbd"), "m");
    let mut qmp = Qmp::connect(&daemon.qmp);
    qmp.ok("query-jobs", json!({}));
    // Nothing to assert by time: the figure is for people. What is asserted is that every thread sleeps in a wait without an end.
    let before = daemon.cpu_ticks();
    std::thread::sleep(std::time::Duration::from_millis(500));
    println!("CPU of an idle daemon in half a second: {} ticks of 10 ms", daemon.cpu_ticks() - before);
    qmp.ok("quit", json!({}));
    daemon.assert_ends_cleanly();
}

#[test]
fn a_mistake_on_the_command_line_is_named_and_leaves_no_socket() {
    let dir = tempfile::tempdir().expect("tempdir");
    let nbd = format!("addr.type=unix,addr.path={}", dir.path().join("nbd").display());
    for (words, part) in [
        (
            vec!["--nbd-server", &nbd, "--blockdev", "driver=nothing,node-name=n"],
            "--blockdev: unknown driver 'nothing'",
        ),
        (vec!["--nbd-server", &nbd, "--export", "nbd,id=e,node-name=n"], "--export: no node named 'n'"),
        (vec!["--export", "nbd,id=e,node-name=n"], "--export: there is no NBD server"),
        (vec!["--monitor", "q"], "--monitor: there is no unused chardev 'q'"),
        (vec!["--object", "secret,id=s"], "--object: "),
        (vec!["--wrong"], "'--wrong'"),
    ] {
        let out = Command::new(COBWEB).arg("storage-daemon").args(&words).output().expect("run");
        let text = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{words:?}: {text}");
        assert!(
            text.starts_with("cobweb: ") && text.contains(part) && text.lines().count() == 1,
            "{words:?}: {text}"
        );
        assert!(!dir.path().join("nbd").exists());
    }
    for (word, part) in [("--help", "--blockdev"), ("-V", env!("CARGO_PKG_VERSION"))] {
        let out = Command::new(COBWEB).args(["storage-daemon", word]).output().expect("run");
        assert!(out.status.success() && String::from_utf8_lossy(&out.stdout).contains(part));
    }
}

#[test]
fn in_the_background_the_command_returns_when_the_daemon_is_up() {
    let dir = tempfile::tempdir().expect("tempdir");
    let (qmp, pid) = (dir.path().join("qmp"), dir.path().join("pid"));
    let chardev = format!("socket,id=q,path={},server=on,wait=off", qmp.display());
    let status = Command::new(COBWEB)
        .args(["storage-daemon", "--daemonize", "--chardev", &chardev, "--monitor", "q", "--pidfile"])
        .arg(&pid)
        .status()
        .expect("run");
    assert!(status.success());
    let number: u32 = std::fs::read_to_string(&pid).expect("pid file").trim().parse().expect("a number");
    assert!(std::path::Path::new(&format!("/proc/{number}")).exists());
    let mut qmp = Qmp::connect(&qmp);
    qmp.ok("quit", json!({}));
    qmp.assert_closed();
    let out = Command::new(COBWEB)
        .args(["storage-daemon", "--daemonize", "--blockdev", "driver=x,node-name=n"])
        .output()
        .expect("run");
    assert!(!out.status.success() && !out.stderr.is_empty());
}

#[test]
fn serve_offers_a_file_and_tells_where() {
    let dir = tempfile::tempdir().expect("tempdir");
    let (disk, socket, qmp) = (dir.path().join("disk.img"), dir.path().join("s"), dir.path().join("q"));
    let old = data(MIB + 512, 1);
    std::fs::write(&disk, &old).expect("write");
    let mut child = Command::new(COBWEB)
        .arg("serve")
        .arg(&disk)
        .args(["--nbd", &format!("unix:{}", socket.display()), "--qmp", &format!("unix:{}", qmp.display())])
        .stdout(Stdio::piped())
        .spawn()
        .expect("run");
    let mut uri = String::new();
    let mut out = BufReader::new(child.stdout.take().expect("piped"));
    out.read_line(&mut uri).expect("a line");
    assert_eq!(uri.trim_end(), format!("nbd+unix:///?socket={}", socket.display()));
    let mut client = Client::connect(&socket, "");
    assert_eq!(client.size(), old.len() as u64);
    assert_eq!(client.read(0, old.len()), old);
    client.write(MIB as u64, &[9; 512]);
    drop(client);
    let nodes = Qmp::connect(&qmp).ok("query-named-block-nodes", json!({}));
    assert!(nodes.as_array().expect("a list").iter().any(|n| n["node-name"] == "disk0"), "{nodes}");
    // SAFETY: no pointers; the process is our child and has not been waited for.
    unsafe { libc::kill(child.id() as i32, libc::SIGINT) };
    assert!(child.wait().expect("wait").success());
    assert!(!socket.exists() && !qmp.exists());
    assert_eq!(std::fs::read(&disk).expect("read")[MIB..], [9; 512]);
    let mut rest = String::new();
    out.read_to_string(&mut rest).expect("read");
    assert_eq!(rest, "");
}

/// A daemon with a disk file per name, exported under that name, and a target file for each behind a throttle of `bps` bytes per second.
/// Returns it with what the disks hold.
fn daemon_with_targets(names: &[&str], len: usize, bps: u64) -> (Daemon, Vec<Vec<u8>>) {
    let dir = tempfile::tempdir().expect("tempdir");
    let mut args = vec![
        "--object".to_owned(),
        format!("throttle-group,id=tg,limits.bps-write={bps}"),
        "--nbd-server".to_owned(),
        "addr.type=unix,addr.path=@/nbd".to_owned(),
    ];
    let mut disks = Vec::new();
    for (n, name) in names.iter().enumerate() {
        let mut bytes = data(len, n as u64 + 1);
        // Part of it is zeroes.
        bytes[len / 2..len / 2 + len / 8].fill(0);
        std::fs::write(dir.path().join(name), &bytes).expect("write");
        let target = std::fs::File::create(dir.path().join(format!("{name}.t"))).expect("create");
        target.set_len(len as u64).expect("length");
        args.extend(
            [
                format!("--blockdev=driver=raw,node-name={name},file.driver=file,file.filename=@/{name}"),
                format!("--blockdev=driver=file,node-name={name}-f,filename=@/{name}.t"),
                format!("--blockdev=driver=throttle,node-name={name}-t,throttle-group=tg,file={name}-f"),
                format!("--export=nbd,id=x-{name},node-name={name},writable=on"),
            ]
            .map(|a| a.replace("@/", &format!("{}/", dir.path().display()))),
        );
        disks.push(bytes);
    }
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    (Daemon::start_in(dir, &args), disks)
}

/// Tells a writer to stop, also when the test fails: else the scope would wait for it for ever.
struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Writes all over the disk until told to stop; returns how many writes ended before that. At least one comes after it was told.
fn write_until(client: &mut Client, stop: &AtomicBool) -> usize {
    let blocks = client.size() / 4096;
    let mut before = 0;
    for n in 0u64.. {
        let stopped = stop.load(Ordering::SeqCst);
        let at = n.wrapping_mul(0x9e37_79b9_7f4a_7c15) % blocks * 4096;
        client.write(at, &[0xee; 4096]);
        if stopped {
            break;
        }
        before += usize::from(!stop.load(Ordering::SeqCst));
    }
    before
}

#[test]
fn a_backup_holds_the_instant_while_a_client_writes() {
    let (daemon, disks) = daemon_with_targets(&["a"], 8 * MIB + 512, 16 << 20);
    let mut qmp = Qmp::connect(&daemon.qmp);
    let mut client = Client::connect(&daemon.path("nbd"), "a");
    let stop = AtomicBool::new(false);
    let started = qmp.command(
        "blockdev-backup",
        json!({"job-id": "b", "device": "a", "target": "a-t", "sync": "full", "ram-cache": {"capacity": 2 * MIB}}),
    );
    assert_eq!(started, json!({"return": {}}));
    let (statuses, writes) = std::thread::scope(|scope| {
        let writer = scope.spawn(|| write_until(&mut client, &stop));
        let stopping = StopAtEnd(&stop);
        let statuses = qmp.statuses_until("b", "null");
        drop(stopping);
        (statuses, writer.join().expect("the writer"))
    });
    assert_eq!(statuses, ["created", "running", "waiting", "pending", "concluded", "null"]);
    assert!(writes > 0, "nothing was written during the backup");
    assert!(std::fs::read(daemon.path("a.t")).expect("target") == disks[0], "the target is not the instant");
    assert!(std::fs::read(daemon.path("a")).expect("disk") != disks[0], "nothing was written");
    assert_eq!(qmp.ok("query-jobs", json!({})), json!([]));
    qmp.ok("quit", json!({}));
    daemon.assert_ends_cleanly();
}

#[test]
fn a_transaction_backs_up_two_disks_at_one_instant() {
    let (daemon, disks) = daemon_with_targets(&["a", "b"], 2 * MIB, 0);
    let mut qmp = Qmp::connect(&daemon.qmp);
    let backup = |name: &str, target: &str| {
        json!({"type": "blockdev-backup", "data": {"job-id": format!("job-{name}"), "device": name, "target": target,
            "sync": "full", "auto-dismiss": false}})
    };
    // The second cannot start, so the first does not either.
    let failed = json!({"actions": [backup("a", "a-t"), backup("b", "nowhere")]});
    let answer = qmp.command("transaction", failed);
    assert!(answer["error"]["desc"].as_str().is_some_and(|d| d.contains("nowhere")), "{answer}");
    assert_eq!(qmp.ok("query-jobs", json!({})), json!([]));
    let both = json!({"actions": [backup("a", "a-t"), backup("b", "b-t")], "properties": {"completion-mode": "grouped"}});
    qmp.ok("transaction", both);
    for (name, disk) in ["a", "b"].iter().zip(&disks) {
        let job = format!("job-{name}");
        // The other's end may have been told before.
        while qmp.job(&job)["status"] != "concluded" {
            qmp.event("JOB_STATUS_CHANGE");
        }
        assert!(qmp.job(&job)["error"].is_null());
        assert!(std::fs::read(daemon.path(&format!("{name}.t"))).expect("target") == *disk);
        qmp.ok("job-dismiss", json!({"id": job}));
    }
    qmp.ok("quit", json!({}));
    daemon.assert_ends_cleanly();
}

#[test]
fn a_backup_to_a_target_that_stands_still_is_paused_cancelled_and_forgotten() {
    let (daemon, _) = daemon_with_targets(&["a"], 4 * MIB, 1);
    let mut qmp = Qmp::connect(&daemon.qmp);
    let mut client = Client::connect(&daemon.path("nbd"), "a");
    let backup = json!({"job-id": "b", "device": "a", "target": "a-t", "sync": "none", "auto-dismiss": false,
        "ram-cache": {"capacity": 2 * MIB}});
    qmp.ok("blockdev-backup", backup);
    // The guest does not notice. (With sync=none every first touch of a granule needs a copy.)
    client.write(0, &[1; 65536]);
    let jobs = qmp.ok("query-block-jobs", json!({}));
    assert_eq!(
        (&jobs[0]["device"], &jobs[0]["type"], &jobs[0]["auto-dismiss"]),
        (&json!("b"), &json!("backup"), &json!(false))
    );
    qmp.ok("block-job-set-speed", json!({"device": "b", "speed": 1000}));
    assert_eq!(qmp.ok("query-block-jobs", json!({}))[0]["speed"], 1000);
    qmp.ok("job-pause", json!({"id": "b"}));
    assert_eq!(qmp.ok("query-block-jobs", json!({}))[0]["paused"], true);
    let refused = qmp.command("job-complete", json!({"id": "b"}));
    assert_eq!(refused["error"]["class"], "GenericError");
    let stats = qmp.ok("query-cobweb-stats", json!({"name": "b"}));
    assert!(stats["cbw-guest-bytes"].as_u64().is_some_and(|n| n > 0), "{stats}");
    qmp.ok("job-cancel", json!({"id": "b"}));
    assert_eq!(qmp.event("BLOCK_JOB_CANCELLED")["data"]["device"], "b");
    assert_eq!(qmp.statuses_until("b", "concluded"), ["concluded"]);
    client.write(2 * MIB as u64, &[2; 4096]);
    qmp.ok("job-dismiss", json!({"id": "b"}));
    let gone = qmp.command("block-job-cancel", json!({"device": "b"}));
    assert_eq!(gone["error"]["class"], "DeviceNotActive");
    qmp.ok("quit", json!({}));
    daemon.assert_ends_cleanly();
}

#[test]
fn sigterm_during_a_backup_cancels_it() {
    let (daemon, _) = daemon_with_targets(&["a"], 4 * MIB, 1);
    let mut qmp = Qmp::connect(&daemon.qmp);
    let mut client = Client::connect(&daemon.path("nbd"), "a");
    qmp.ok("blockdev-backup", json!({"job-id": "b", "device": "a", "target": "a-t", "sync": "full", "ram-cache": {"capacity": 2 * MIB}}));
    client.write(0, &[1; 4096]);
    daemon.signal(libc::SIGTERM);
    assert_eq!(qmp.event("BLOCK_JOB_CANCELLED")["data"]["device"], "b");
    qmp.assert_closed();
    daemon.assert_ends_cleanly();
}

#[test]
fn qemu_io_writes_while_old_data_goes_to_the_target() {
    if !support::have("qemu-io") {
        return;
    }
    let (daemon, disks) = daemon_with_targets(&["a"], 4 * MIB, 0);
    let mut qmp = Qmp::connect(&daemon.qmp);
    qmp.ok("blockdev-backup", json!({"job-id": "b", "device": "a", "target": "a-t", "sync": "none"}));
    let uri = format!("nbd+unix:///a?socket={}", daemon.path("nbd").display());
    let out = Command::new("qemu-io")
        .args([
            "-f",
            "raw",
            "-c",
            "write -P 0xaa 100k 300k",
            "-c",
            "read -P 0xaa 100k 300k",
            "-c",
            "flush",
            &uri,
        ])
        .output()
        .expect("run qemu-io");
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && text.contains("read 307200/307200"), "{text}");
    // Without a cache a write ends after the target has the old data of all granules it touches.
    let (from, to) = (64 << 10, 448 << 10);
    let target = std::fs::read(daemon.path("a.t")).expect("target");
    assert!(target[from..to] == disks[0][from..to], "old data is missing");
    assert!(target[2 * MIB + MIB / 2..].iter().all(|b| *b == 0), "sync=none copies only what is overwritten");
    qmp.ok("block-job-cancel", json!({"device": "b"}));
    qmp.statuses_until("b", "null");
    qmp.ok("quit", json!({}));
    daemon.assert_ends_cleanly();
}

#[test]
fn a_target_that_fails_or_hangs_ends_the_job_and_not_the_guest() {
    let (daemon, _) = daemon_with_targets(&["a"], 4 * MIB, 0);
    let mut qmp = Qmp::connect(&daemon.qmp);
    let mut client = Client::connect(&daemon.path("nbd"), "a");
    let rules = json!([{"op": "write", "action": "error", "errno": "ENOSPC"}]);
    qmp.ok("blockdev-add", json!({"driver": "fault", "node-name": "bad", "file": "a-t", "rules": rules}));
    let backup = json!({"job-id": "b", "device": "a", "target": "bad", "sync": "full", "auto-dismiss": false,
        "ram-cache": {"capacity": 2 * MIB}});
    qmp.ok("blockdev-backup", backup.clone());
    let end = qmp.event("BLOCK_JOB_COMPLETED");
    assert!(end["data"]["error"].as_str().is_some_and(|e| e.contains("No space left")), "{end}");
    assert_eq!(qmp.statuses_until("b", "concluded"), ["concluded"]);
    assert!(qmp.job("b")["error"].is_string());
    client.write(0, &[1; 4096]);
    qmp.ok("job-dismiss", json!({"id": "b"}));
    let hang = json!({"path": "bad", "property": "rules", "value": [{"op": "write", "action": "hang"}]});
    qmp.ok("qom-set", hang);
    qmp.ok("blockdev-backup", backup);
    let hung = json!({"path": "bad", "property": "hung"});
    while qmp.ok("qom-get", hung.clone()) == "0" {
        assert_eq!(qmp.job("b")["status"], "running");
    }
    client.write(MIB as u64, &[2; 4096]);
    qmp.ok("job-cancel", json!({"id": "b"}));
    assert_eq!(qmp.event("BLOCK_JOB_CANCELLED")["data"]["device"], "b");
    client.write(2 * MIB as u64, &[3; 4096]);
    assert_eq!(client.read(MIB as u64, 4096), [2; 4096]);
    qmp.ok("quit", json!({}));
    daemon.assert_ends_cleanly();
}
