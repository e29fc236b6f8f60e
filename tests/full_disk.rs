//! Real file systems that are full: below the target of a backup, below the spill file, below the guest's own image. The guest goes on (S30), nothing
//! hangs, no job claims a success that it has not had, and images stay sound. Needs root, for a tmpfs of 8 MiB.

#![cfg(not(cobweb_loom))]

#[allow(dead_code, reason = "shared with tests that use the rest of it")]
mod support;

use cobweb::context::Context;
use cobweb::error::{Code, Error};
use cobweb::events::{EventKind, Side};
use cobweb::graph::Disk;
use cobweb::job::{Job, Status};
use cobweb::options::Options;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, mpsc};
use std::time::Duration;

const MIB: usize = 1 << 20;
const LEN: usize = 4 * MIB;
const PIECE: usize = 64 << 10;
/// Far more than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// A file system of 8 MiB, full but for what it was made with.
struct Small {
    dir: tempfile::TempDir,
    ballast: File,
}

impl Small {
    /// `None` if this test cannot mount; it says so.
    fn mount() -> Option<Self> {
        // SAFETY: no arguments, no failure.
        if unsafe { libc::geteuid() } != 0 {
            eprintln!("!!! NOT ROOT: this test has proved nothing");
            return None;
        }
        let dir = tempfile::tempdir().expect("a folder");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=8m", "cobweb-test"])
            .arg(dir.path())
            .output()
            .expect("mount is there");
        if !mounted.status.success() {
            let text = String::from_utf8_lossy(&mounted.stderr).into_owned();
            eprintln!("!!! CANNOT MOUNT A TMPFS: this test has proved nothing: {text}");
            assert!(std::env::var_os("CI").is_none(), "root cannot mount a tmpfs, and this is CI: {text}");
            return None;
        }
        let path = dir.path().join("ballast");
        let ballast = OpenOptions::new().append(true).create(true).open(path).expect("created");
        Some(Self { dir, ballast })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Fills it, but for `room` bytes.
    fn leave(&mut self, room: usize) {
        let full = loop {
            if let Err(e) = self.ballast.write_all(&[0xba; 4096]) {
                break e;
            }
        };
        assert_eq!(full.kind(), ErrorKind::StorageFull);
        let size = self.ballast.metadata().expect("known").len();
        self.ballast.set_len(size - room as u64).expect("shorter");
    }

    /// Whether there is no room for `len` bytes.
    fn is_full(&self, len: usize) -> bool {
        let probe = self.path("probe");
        let result = std::fs::write(&probe, vec![1; len]);
        std::fs::remove_file(probe).expect("removed");
        result.is_err_and(|e| e.kind() == ErrorKind::StorageFull)
    }

    fn make_room(&self) {
        self.ballast.set_len(0).expect("empty");
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let done = Command::new("umount").arg("-l").arg(self.dir.path()).status();
        assert!(done.is_ok_and(|s| s.success()) || std::thread::panicking(), "cannot be unmounted");
    }
}

fn options(text: &str) -> Options {
    Options::parse(text).expect("parses")
}

/// Data that differs from piece to piece and from `seed` to `seed`, and does not compress.
fn piece(at: usize, seed: u64) -> Vec<u8> {
    let mut x = (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed << 56 | 1;
    let words = std::iter::repeat_with(|| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x.to_le_bytes()
    });
    words.flatten().take(PIECE).collect()
}

fn instant() -> Vec<u8> {
    (0..LEN / PIECE).flat_map(|at| piece(at, 0)).collect()
}

/// A context with a disk `vda` in memory that holds [`instant`].
fn bench() -> (Arc<Context>, Arc<Disk>) {
    let context = Context::with_defaults().expect("a context");
    let node =
        context.graph().open(options(&format!("driver=memory,node-name=s,size={LEN}"))).expect("opens");
    let disk = context.graph().add_disk("vda").expect("free");
    context.graph().insert(&disk, Some(node)).expect("inserted");
    disk.write(0, &instant()).expect("written");
    (context, disk)
}

/// Overwrites the whole disk, in an order that is not that of the copies; the result of each piece. No write may hang.
fn guest(disk: &Arc<Disk>) -> Vec<Result<(), Error>> {
    guest_and(disk, || {})
}

/// The same, with something to do after each write.
fn guest_and(disk: &Arc<Disk>, mut after: impl FnMut()) -> Vec<Result<(), Error>> {
    let (tell, told) = mpsc::channel();
    let disk = disk.clone();
    std::thread::spawn(move || {
        for n in 0..LEN / PIECE {
            let at = n * 37 % (LEN / PIECE);
            if tell.send((at, disk.write((at * PIECE) as u64, &piece(at, 1)))).is_err() {
                return;
            }
        }
    });
    let mut results: Vec<_> = (0..LEN / PIECE).map(|_| Ok(())).collect();
    for _ in 0..LEN / PIECE {
        let (at, result) = told.recv_timeout(PATIENCE).expect("a write of the guest hangs");
        results[at] = result;
        after();
    }
    results
}

/// Every piece is new where the write succeeded, and what it was where it failed.
fn assert_source(disk: &Disk, results: &[Result<(), Error>], case: &str) {
    let mut all = vec![0; LEN];
    disk.read(0, &mut all).expect("readable");
    for (at, result) in results.iter().enumerate() {
        let seed = u64::from(result.is_ok());
        assert!(all[at * PIECE..][..PIECE] == piece(at, seed), "{case}: piece {at}: {result:?}");
    }
}

/// Waits until the job has ended or is paused; whether it has ended.
fn ended_or_paused(job: &Arc<Job>) -> bool {
    let begun = std::time::Instant::now();
    while job.status() != Status::Paused {
        if job.wait(Some(Duration::from_millis(1))).expect("may wait") {
            return true;
        }
        assert!(begun.elapsed() < PATIENCE, "the job hangs: {:?}", job.query());
    }
    false
}

fn make_target(small: &Small, format: &str) {
    let path = small.path("t");
    if format == "raw" {
        File::create(path).expect("created").set_len(LEN as u64).expect("sized");
    } else {
        qemu_img(&["create", "-q", "-f", format, &path.display().to_string(), &LEN.to_string()]);
    }
}

fn qemu_img(args: &[&str]) -> String {
    let out = Command::new("qemu-img").args(args).output().expect("run qemu-img");
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{args:?}: {text}");
    text
}

fn assert_clean(path: &Path) {
    qemu_img(&["check", "-f", "qcow2", &path.display().to_string()]);
}

/// What an image holds, by qemu-img.
fn content(small: &Small, format: &str) -> Vec<u8> {
    if format == "raw" {
        return std::fs::read(small.path("t")).expect("readable");
    }
    let out = tempfile::NamedTempFile::new().expect("a file");
    let to = out.path().display().to_string();
    qemu_img(&["convert", "-f", format, "-O", "raw", &small.path("t").display().to_string(), &to]);
    std::fs::read(to).expect("readable")
}

fn caches(spill: &Path) -> Vec<String> {
    let cache = |more: &str| format!(",ram-cache.capacity=1M,ram-cache.overflow={more}");
    let spill = format!("spill,ram-cache.spill={}/,ram-cache.spill-quota=16M", spill.display());
    vec![String::new(), cache("wait"), cache(&spill), cache("write-through"), cache("break-snapshot")]
}

fn a_target_is_full(format: &str) {
    let spill = tempfile::tempdir().expect("a folder");
    for cache in caches(spill.path()) {
        for cbw in ["break-snapshot", "break-guest-write"] {
            // Here `stop` is `enospc`.
            for on_error in
                if format == "raw" { &["report", "enospc", "stop"][..] } else { &["report", "enospc"] }
            {
                let Some(mut small) = Small::mount() else { return };
                let text = format!("on-cbw-error={cbw},on-target-error={on_error}{cache}");
                one_full_target(&mut small, format, &text);
            }
        }
    }
}

fn one_full_target(small: &mut Small, format: &str, policies: &str) {
    let case = format!("{format}, {policies}");
    make_target(small, format);
    small.leave(MIB);
    let (context, disk) = bench();
    let file = small.path("t");
    let t = format!("driver={format},node-name=t,file.driver=file,file.filename={}", file.display());
    context.graph().open(options(&t)).expect("opens");
    // Small steps, so that most granules are copied for the guest.
    let backup = format!(
        "device=vda,target=t,sync=full,auto-dismiss=off,max-workers=1,max-chunk=64k,cbw-timeout-ms=50,{policies}"
    );
    let job = context.jobs().start("backup", options(&backup)).expect("starts");
    let results = guest(&disk);
    for (at, result) in results.iter().enumerate() {
        // The target's errno is for the report alone.
        if let Err(e) = result {
            let cbw = e.errno() == libc::EIO && [Code::CbwFailed, Code::CbwTimeout].contains(&e.code());
            assert!(policies.contains("break-guest-write") && cbw, "{case}: piece {at}: {e:?}");
        }
    }
    assert_source(&disk, &results, &case);
    if !ended_or_paused(&job) {
        assert!(!policies.contains("=report"), "{case}: paused");
        assert!(small.is_full(2 * PIECE), "{case}: paused for nothing");
        small.make_room();
        job.resume().expect("paused");
        assert!(job.wait(Some(PATIENCE)).expect("may wait"), "{case}: the job hangs after it was resumed");
    }
    let outcome = job.outcome().expect("it has ended");
    println!("{case}: {outcome:?}, {} writes failed", results.iter().filter(|r| r.is_err()).count());
    if outcome.is_err() {
        let report = job.report().unwrap_or_else(|| panic!("{case}: no report"));
        let cause = (report.side, report.error.errno);
        // The cache may have been full before the target was.
        let known = cause == (Side::Target, libc::ENOSPC)
            || (policies.contains("ram-cache") && report.side == Side::Cache)
            || report.error.code == Code::CbwTimeout;
        assert!(known, "{case}: {report:?}");
    } else {
        assert!(!policies.contains("=report"), "{case}: a success without room");
    }
    job.dismiss().expect("it has ended");
    // The disk is as it was without a backup.
    disk.write(0, &piece(0, 2)).expect("written");
    disk.flush().expect("flushed");
    drop((job, disk));
    drop(context);
    if format != "raw" {
        assert_clean(&file);
    }
    if outcome.is_ok() {
        assert!(content(small, format) == instant(), "{case}: the backup is not the instant");
    }
}

#[test]
fn a_target_that_is_full_stops_the_backup_and_not_the_guest() {
    a_target_is_full("raw");
}

#[test]
fn a_qcow2_target_that_cannot_grow_stops_the_backup_and_stays_clean() {
    if support::have("qemu-img") {
        a_target_is_full("qcow2");
    }
}

#[test]
fn a_spill_directory_that_is_full_counts_as_a_used_up_quota() {
    for (overflow, after) in
        [("wait", Side::Cache), ("write-through", Side::Target), ("break-snapshot", Side::None)]
    {
        let Some(mut small) = Small::mount() else { return };
        small.leave(256 << 10);
        let (context, disk) = bench();
        // So slow that what the guest overwrites does not go straight through.
        let t = format!(
            "driver=throttle,node-name=t,limits.bps-write={},file.driver=memory,file.size={LEN},file.node-name=m",
            LEN / 4
        );
        context.graph().open(options(&t)).expect("opens");
        let backup = format!(
            "device=vda,target=t,sync=full,auto-dismiss=off,max-workers=1,max-chunk=64k,ram-cache.capacity=1M,\
             ram-cache.overflow=spill,ram-cache.spill={}/,ram-cache.spill-quota=64M,ram-cache.spill-overflow={overflow}",
            small.dir.path().display()
        );
        let job = context.jobs().start("backup", options(&backup)).expect("starts");
        // Events that wait are replaced by later ones of their kind, so they are taken while the guest writes.
        let mut steps = Vec::new();
        let results = guest_and(&disk, || {
            let events = std::iter::from_fn(|| context.events().next());
            steps.extend(events.filter(|e| e.kind == EventKind::Overflow).map(|e| e.side));
        });
        assert!(results.iter().all(|r| r.is_ok()), "{overflow}: {results:?}");
        assert_source(&disk, &results, overflow);
        assert!(job.wait(Some(PATIENCE)).expect("may wait"), "{overflow}: the job hangs");
        let outcome = job.outcome().expect("it has ended");
        println!("{overflow}: {outcome:?}: {steps:?}");
        // The quota would do for all of the disk, so this step was taken because the directory was full.
        assert!(steps.contains(&after), "{overflow}: {steps:?}");
        if overflow == "break-snapshot" {
            let report = job.report().expect("it has failed");
            assert!(outcome.is_err() && [Side::Spill, Side::Cache].contains(&report.side), "{report:?}");
        } else {
            assert_eq!(outcome, Ok(()), "{overflow}");
            let copy = context.graph().add_disk("copy").expect("free");
            let m = context.graph().node("m").expect("there");
            context.graph().insert(&copy, Some(m)).expect("inserted");
            let mut all = vec![0; LEN];
            copy.read(0, &mut all).expect("readable");
            assert!(all == instant(), "{overflow}: the backup is not the instant");
        }
        job.dismiss().expect("it has ended");
        drop((job, disk));
        drop(context);
        assert!(!small.is_full(PIECE), "{overflow}: the spill file has given its space back");
    }
}

#[test]
fn a_guest_whose_qcow2_image_cannot_grow_gets_enospc_and_loses_nothing() {
    if !support::have("qemu-img") {
        return;
    }
    for more in ["", ",lazy_refcounts=on", ",extended_l2=on", ",cluster_size=4096"] {
        let Some(mut small) = Small::mount() else { return };
        let file = small.path("disk");
        let size = (16 * MIB).to_string();
        let form = format!("compat=1.1{more}");
        qemu_img(&["create", "-q", "-f", "qcow2", "-o", &form, &file.display().to_string(), &size]);
        small.leave(2 * MIB);
        let context = Context::with_defaults().expect("a context");
        let open = format!("driver=qcow2,node-name=q,file.driver=file,file.filename={}", file.display());
        let node = context.graph().open(options(&open)).expect("opens");
        let disk = context.graph().add_disk("vda").expect("free");
        context.graph().insert(&disk, Some(node)).expect("inserted");
        let results = guest(&disk);
        let failed = results.iter().filter(|r| r.is_err()).count();
        println!("{form}: {failed} of {} writes failed", results.len());
        assert!(failed > 0 && failed < results.len(), "{form}: the disk becomes full on the way");
        assert!(small.is_full(PIECE), "{form}");
        for e in results.iter().filter_map(|r| r.as_ref().err()) {
            assert_eq!(e.errno(), libc::ENOSPC, "{form}: {e}");
        }
        let check = |disk: &Disk, results: &[Result<(), Error>]| {
            let mut all = vec![0; LEN];
            disk.read(0, &mut all).expect("readable");
            for (at, result) in results.iter().enumerate() {
                let found = &all[at * PIECE..][..PIECE];
                let zero = result.is_err() && found.iter().all(|b| *b == 0);
                // A write that failed may have reached some of its clusters.
                let partly = result.is_err()
                    && found
                        .chunks(512)
                        .zip(piece(at, 1).chunks(512))
                        .all(|(f, p)| f == p || f.iter().all(|b| *b == 0));
                assert!(zero || partly || *found == piece(at, 1), "{form}: piece {at}: {result:?}");
            }
        };
        check(&disk, &results);
        // What is written already can be written again, and made durable.
        let there = results.iter().position(Result::is_ok).expect("some");
        disk.write((there * PIECE) as u64, &piece(there, 1)).expect("no new cluster is needed");
        let flushed = disk.flush();
        assert!(
            flushed.as_ref().map_or_else(|e| e.errno() == libc::ENOSPC, |()| true),
            "{form}: {flushed:?}"
        );
        // With room again everything works, on the same open image.
        small.make_room();
        let again = guest(&disk);
        assert!(again.iter().all(Result::is_ok), "{form}: {again:?}");
        disk.flush().expect("flushed");
        check(&disk, &again);
        drop(disk);
        drop(context);
        assert_clean(&file);

        // And an image that is closed while it is full is clean too.
        std::fs::remove_file(&file).expect("removed");
        qemu_img(&["create", "-q", "-f", "qcow2", "-o", &form, &file.display().to_string(), &size]);
        small.leave(2 * MIB);
        let context = Context::with_defaults().expect("a context");
        let node = context.graph().open(options(&open)).expect("opens");
        let disk = context.graph().add_disk("vda").expect("free");
        context.graph().insert(&disk, Some(node)).expect("inserted");
        let results = guest(&disk);
        assert!(results.iter().any(Result::is_err), "{form}: it is full");
        let _ = disk.flush();
        drop(disk);
        drop(context);
        assert_clean(&file);
    }
}
