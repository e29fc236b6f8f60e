//! What is left when the program is killed at work (S25): the source as the guest wrote it, a target that says it is no backup, and nothing else.

#[allow(dead_code, reason = "shared with tests that use the rest of it")]
mod support;

use serde_json::json;
use std::ffi::CString;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Instant;
use support::daemon::{COBWEB, Daemon, PATIENCE, Qmp};
use support::nbd::Client;

const MIB: usize = 1 << 20;
const LEN: usize = 8 * MIB;
const BLOCK: usize = 4096;

/// A block that is different for each place and time of writing.
fn block(at: usize, time: u32) -> Vec<u8> {
    let word = (at as u64) << 32 | u64::from(time);
    word.to_le_bytes().repeat(BLOCK / 8)
}

fn image(times: &[u32]) -> Vec<u8> {
    times.iter().enumerate().flat_map(|(at, time)| block(at, *time)).collect()
}

/// The mark of a target; `None` if there is none.
fn mark(path: &Path) -> Option<Vec<u8>> {
    let path = CString::new(path.as_os_str().as_bytes()).expect("a path");
    let mut value = vec![0; 64];
    // SAFETY: terminated strings, and a buffer with its length.
    let n = unsafe {
        libc::getxattr(path.as_ptr(), c"user.cobweb.backup".as_ptr(), value.as_mut_ptr().cast(), value.len())
    };
    if n < 0 {
        let e = std::io::Error::last_os_error();
        assert_eq!(e.raw_os_error(), Some(libc::ENODATA), "this file system carries no user attributes: {e}");
        return None;
    }
    value.truncate(n as usize);
    Some(value)
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).expect("readable");
    let mut all: Vec<_> =
        entries.map(|e| e.expect("an entry").file_name().into_string().expect("UTF-8")).collect();
    all.sort();
    all
}

/// Sizes on disk, in bytes, of the files below `dir` that a process has open and that have no name.
fn nameless(pid: u32, dir: &Path) -> Vec<(u64, u64)> {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs");
    let open = fds.flatten().filter(|fd| {
        // One that has been closed meanwhile is none.
        let name = std::fs::read_link(fd.path()).unwrap_or_default();
        name.starts_with(dir) && name.to_string_lossy().ends_with("(deleted)")
    });
    open.filter_map(|fd| std::fs::metadata(fd.path()).ok()).map(|m| (m.len(), m.blocks() * 512)).collect()
}

/// Waits until nobody has locks on a file. The kernel takes a ring apart after the process has gone, and holds its files that long.
fn wait_for_locks(path: &Path) {
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).expect("opens");
    // All bytes, until nobody else has one.
    // SAFETY: plain numbers, for which zero is a value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    // SAFETY: an open descriptor and a lock to read.
    let done = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLKW, &raw const lock) };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}

/// A folder on a file system with user attributes, which `/tmp` may not have.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder")
}

fn qemu_img(args: &[&str]) -> String {
    let out = Command::new("qemu-img").args(args).output().expect("run qemu-img");
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    // 3 is a check that has found leaks only: clusters that were allocated and not used yet.
    assert!(out.status.success() || (args[0] == "check" && out.status.code() == Some(3)), "{args:?}: {text}");
    text
}

/// A daemon with a disk and a target of this format, which takes `bps` bytes per second (0: all).
fn start(dir: tempfile::TempDir, format: &str, bps: u64) -> Daemon {
    let limits = format!("throttle-group,id=tg,limits.bps-write={bps}");
    let disk =
        format!("driver={format},node-name=a,file.driver=file,file.filename={}/a", dir.path().display());
    let target = format!("driver={format},node-name=t,file=slow");
    let file = format!("driver=file,node-name=t-f,filename={}/t", dir.path().display());
    Daemon::start_in(
        dir,
        &[
            "--object",
            &limits,
            "--nbd-server",
            "addr.type=unix,addr.path=@/nbd",
            "--blockdev",
            &disk,
            "--blockdev",
            &file,
            "--blockdev",
            "driver=throttle,node-name=slow,throttle-group=tg,file=t-f",
            "--blockdev",
            &target,
            "--export",
            "nbd,id=x,node-name=a,writable=on",
        ],
    )
}

fn a_daemon_is_killed(format: &str) {
    let dir = folder();
    let path = |name: &str| dir.path().join(name);
    let mut times = vec![1; LEN / BLOCK];
    std::fs::write(path("raw"), image(&times)).expect("written");
    let text = |name: &str| path(name).display().to_string();
    if format == "raw" {
        std::fs::rename(path("raw"), path("a")).expect("renamed");
        std::fs::File::create(path("t")).expect("created").set_len(LEN as u64).expect("sized");
    } else {
        qemu_img(&["convert", "-f", "raw", "-O", format, &text("raw"), &text("a")]);
        qemu_img(&["create", "-f", format, &text("t"), &LEN.to_string()]);
        std::fs::remove_file(path("raw")).expect("removed");
    }
    std::fs::create_dir(path("spill")).expect("created");
    let daemon = start(dir, format, 1);
    let mut qmp = Qmp::connect(&daemon.qmp);
    let spill = format!("{}/", daemon.path("spill").display());
    // One chunk at a time, or the job would hold the whole disk in its hands and the guest would find nothing to copy.
    let backup = json!({"job-id": "b", "device": "a", "target": "t", "sync": "full", "max-workers": 1,
        "max-chunk": 65536, "ram-cache": {
        "capacity": 2 * MIB, "overflow": "spill", "spill": spill, "spill-quota": 64 * MIB}});
    qmp.ok("blockdev-backup", backup);

    // A guest writes from end to end, and never stops.
    let mut client = Client::connect(&daemon.path("nbd"), "a");
    let (tell, told) = mpsc::channel();
    let guest = std::thread::spawn(move || {
        for n in 0u32.. {
            let (at, time) = (n as usize % (LEN / BLOCK), 2 + n);
            if !client.try_write((at * BLOCK) as u64, &block(at, time)) {
                // Whether this one has reached the disk nobody knows.
                return (at, time);
            }
            tell.send((at, time)).expect("the test listens");
        }
        unreachable!("the daemon is killed before");
    });
    assert_eq!(qmp.event("COBWEB_OVERFLOW")["data"]["to"], "spill");
    let stats = json!({"name": "b"});
    while qmp.ok("query-cobweb-stats", stats.clone())["cache-spilled"].as_u64().expect("a number")
        < MIB as u64
    {
        assert_eq!(qmp.job("b")["status"], "running");
    }
    let spilled = nameless(daemon.pid(), &daemon.path("spill"));
    assert!(spilled.len() == 1 && spilled[0].1 > 0, "there is a spill file: {spilled:?}");
    assert_eq!(names(&daemon.path("spill")), [""; 0], "it has no name");

    let dir = daemon.kill();
    let path = |name: &str| dir.path().join(name);
    ["a", "t"].iter().for_each(|name| wait_for_locks(&path(name)));
    let text = |name: &str| path(name).display().to_string();
    let doubtful = guest.join().expect("the guest");
    let acknowledged: Vec<_> = told.try_iter().collect();
    assert!(acknowledged.len() > 100, "writes of the guest: {}", acknowledged.len());
    acknowledged.into_iter().for_each(|(at, time)| times[at] = time);

    // The monitor, the NBD server and the pid file could not be removed; otherwise there is what was there before.
    assert_eq!(names(dir.path()), ["a", "nbd", "pid", "qmp", "spill", "t"]);
    assert_eq!(names(&path("spill")), [""; 0]);
    assert_eq!(mark(&path("t")).as_deref(), Some(&b"incomplete"[..]), "the target says what it is");
    assert_eq!(mark(&path("a")), None);
    if format != "raw" {
        for name in ["a", "t"] {
            let found = qemu_img(&["check", "-f", format, &text(name)]);
            assert!(!found.contains("ERROR"), "{found}");
        }
    }

    // A new daemon in the same place: the disk is what the guest wrote, and the next backup is complete.
    std::fs::remove_file(path("pid")).expect("the test's FIFO");
    let daemon = start(dir, format, 0);
    let mut client = Client::connect(&daemon.path("nbd"), "a");
    let disk: Vec<u8> = (0..LEN / MIB).flat_map(|n| client.read((n * MIB) as u64, MIB)).collect();
    let mut late = times.clone();
    late[doubtful.0] = doubtful.1;
    assert!(disk == image(&times) || disk == image(&late), "the source was harmed");
    let mut qmp = Qmp::connect(&daemon.qmp);
    qmp.ok("blockdev-backup", json!({"job-id": "b", "device": "a", "target": "t", "sync": "full"}));
    assert!(qmp.event("BLOCK_JOB_COMPLETED")["data"]["error"].is_null());
    qmp.statuses_until("b", "null");
    assert_eq!(mark(&daemon.path("t")), None, "complete");
    qmp.ok("quit", json!({}));
    let mut daemon = daemon;
    daemon.assert_ended();
    let text = |name: &str| daemon.path(name).display().to_string();
    if format == "raw" {
        assert!(std::fs::read(text("t")).expect("readable") == disk, "the new backup");
    } else {
        qemu_img(&["compare", "-f", format, "-F", format, &text("a"), &text("t")]);
        let found = qemu_img(&["check", "-f", format, &text("t")]);
        assert!(found.contains("No errors"), "{found}");
    }
}

#[test]
fn a_daemon_killed_during_a_backup_leaves_the_source_whole_and_the_target_marked() {
    a_daemon_is_killed("raw");
}

#[test]
fn a_daemon_killed_during_a_backup_of_qcow2_leaves_images_without_errors() {
    if support::have("qemu-img") {
        a_daemon_is_killed("qcow2");
    }
}

/// Kills a child when the test fails.
struct Kill(std::process::Child);

impl Drop for Kill {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_demo_that_is_killed_leaves_nothing_behind() {
    let dir = folder();
    // The last backup is checked, so its instant is copied, and its target takes for ever.
    let child = Command::new(COBWEB)
        .args([
            "demo",
            "--size",
            "16M",
            "--rounds",
            "1",
            "--target-speed",
            "1",
            "--ram-cache",
            "64M",
            "--json",
            "--dir",
        ])
        .arg(dir.path())
        .stdout(Stdio::null())
        .spawn()
        .expect("run");
    let mut demo = Kill(child);
    let full = |files: Vec<(u64, u64)>| files.len() == 3 && files.iter().all(|f| f.1 >= 14 << 20);
    let begun = Instant::now();
    // Source, target and the copy of the instant.
    while !full(nameless(demo.0.id(), dir.path())) {
        assert!(demo.0.try_wait().expect("its state").is_none(), "it goes on for ever");
        assert!(begun.elapsed() < PATIENCE, "no backup comes: {:?}", nameless(demo.0.id(), dir.path()));
        std::thread::yield_now();
    }
    demo.0.kill().expect("killed");
    demo.0.wait().expect("wait");
    assert_eq!(names(dir.path()), [""; 0]);
}
