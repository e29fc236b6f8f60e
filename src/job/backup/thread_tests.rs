//! Backups with real threads: guests that write while jobs start, end and are cancelled.

use crate::context::{Context, ContextOptions};
use crate::error::Code;
use crate::events::EventKind;
use crate::graph::Disk;
use crate::io::file::sys;
use crate::job::{Job, Status};
use crate::options::Options;
use crate::sync::Arc;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use crate::sync::thread;
use std::time::Duration;

const MIB: u64 = 1 << 20;

fn context() -> Arc<Context> {
    let context = Context::new(ContextOptions::default(), None).expect("a context");
    context.start().expect("it starts");
    context
}

fn open(context: &Context, options: &str) {
    context.graph().open(Options::parse(options).expect("parses")).expect("opens");
}

fn disk(context: &Context, name: &str, node: &str) -> Arc<Disk> {
    let disk = context.graph().add_disk(name).expect("free");
    let node = context.graph().node(node).expect("there");
    context.graph().insert(&disk, Some(node)).expect("inserted");
    disk
}

/// Starts a backup; the end of the one before it has been seen, so that nothing can be in the way.
fn backup(context: &Context, options: &str) -> Arc<Job> {
    context.jobs().start("backup", Options::parse(options).expect("parses")).expect("starts")
}

fn end_of(job: &Arc<Job>) -> Result<(), Code> {
    assert!(job.wait(Some(Duration::from_secs(60))).expect("may wait"), "the job ends");
    job.outcome().expect("it has ended").map_err(|e| e.code)
}

/// The whole content of a node, through a disk of its own.
fn content(context: &Context, node: &str) -> Vec<u8> {
    let reader = disk(context, "reader", node);
    let mut bytes = vec![0; reader.size() as usize];
    reader.read(0, &mut bytes).expect("readable");
    context.graph().insert(&reader, None).expect("ejected");
    context.graph().remove_disk(&reader);
    bytes
}

/// Runs `guest` again and again on a thread of its own until dropped.
struct Load {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Load {
    fn new(guest: impl Fn(u64) + Send + 'static) -> Self {
        let (stop, rounds): (Arc<AtomicBool>, Arc<AtomicU64>) = Default::default();
        let theirs = (stop.clone(), rounds.clone());
        let thread = thread::spawn(move || {
            for round in 1.. {
                if theirs.0.load(SeqCst) {
                    return;
                }
                guest(round);
                theirs.1.store(round, SeqCst);
            }
        });
        Self { stop, rounds, thread: Some(thread) }
    }

    /// Waits until `n` more rounds have been made.
    fn go_on(&self, n: u64) {
        let want = self.rounds.load(SeqCst) + n;
        while self.rounds.load(SeqCst) < want {
            thread::yield_now();
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, SeqCst);
        let ended = self.thread.take().expect("joined once").join();
        if !thread::panicking() {
            ended.expect("the guest has not panicked");
        }
    }
}

#[test]
fn two_disks_are_backed_up_at_one_instant() {
    let context = context();
    for name in ["a", "b", "ta", "tb"] {
        open(&context, &format!("driver=memory,node-name={name},size=4M"));
    }
    let (vda, vdb) = (disk(&context, "vda", "a"), disk(&context, "vdb", "b"));
    // Each number goes to the first disk and, only when that write has ended, to the second, in four places of each.
    let load = Load::new(move |n| {
        for disk in [&vda, &vdb] {
            for place in 0..4u64 {
                disk.write(place * MIB + 512, &n.to_le_bytes()).expect("the guest writes");
            }
        }
    });
    for _ in 0..5 {
        load.go_on(3);
        let mut group = context.jobs().group(Options::empty()).expect("a group");
        let member = |disk: &str, target: &str| format!("device={disk},target={target},sync=full");
        let parse = |text: String| Options::parse(&text).expect("parses");
        let first = group.add("backup", parse(member("vda", "ta"))).expect("a member");
        let second = group.add("backup", parse(member("vdb", "tb"))).expect("a member");
        group.start().expect("both start");
        assert_eq!((end_of(&first), end_of(&second)), (Ok(()), Ok(())));
        let numbers = |node: &str| -> Vec<u64> {
            let bytes = content(&context, node);
            let at = |p: usize| bytes[p * MIB as usize + 512..][..8].try_into().expect("eight bytes");
            (0..4).map(|p| u64::from_le_bytes(at(p))).collect()
        };
        // In the order in which the guest writes, the numbers fall at most once, by one.
        let order: Vec<u64> = numbers("ta").into_iter().chain(numbers("tb")).collect();
        let newest = order[0];
        assert!(newest >= 3, "the guest was writing");
        let steps = order.windows(2).filter(|w| w[0] != w[1]).count();
        assert!(steps <= 1 && order.iter().all(|n| *n == newest || *n + 1 == newest), "{order:?}");
        assert!(order.windows(2).all(|w| w[0] >= w[1]), "{order:?}");
    }
}

#[test]
fn backups_under_load_are_the_instant_though_filters_come_and_go() {
    let context = context();
    open(&context, "driver=memory,node-name=s,size=2M");
    open(&context, "driver=memory,node-name=t,size=2M");
    let vda = disk(&context, "vda", "s");
    // The guest writes one number all over the disk, block after block, then the next.
    let load = Load::new(move |n| {
        let block = [n as u8; 4096];
        for at in (0..2 * MIB).step_by(4096 * 8) {
            vda.write(at, &block).expect("the guest writes");
        }
    });
    for round in 0..10 {
        load.go_on(1);
        let job = backup(&context, "device=vda,target=t,sync=full");
        if round % 3 == 2 {
            job.cancel().ok();
            end_of(&job).ok();
            continue;
        }
        assert_eq!(end_of(&job), Ok(()));
        let bytes = content(&context, "t");
        let blocks: Vec<u8> = bytes.chunks(4096 * 8).map(|c| c[0]).collect();
        let falls = blocks.windows(2).filter(|w| w[0] != w[1]).count();
        assert!(falls <= 1, "more than two numbers in one instant: {blocks:?}");
        assert!(bytes.chunks(4096 * 8).all(|c| c[..4096].iter().all(|b| *b == c[0])), "a torn block");
    }
    drop(load);
    assert!(context.graph().node("s").expect("there").filters().is_empty());
}

#[test]
fn of_a_cancel_and_the_end_of_the_job_exactly_one_wins() {
    let context = context();
    open(&context, "driver=memory,node-name=s,size=1M");
    open(&context, "driver=memory,node-name=t,size=1M");
    let vda = disk(&context, "vda", "s");
    vda.write(0, &vec![7; MIB as usize]).expect("filled");
    let (mut cancelled, mut finished) = (0, 0);
    for round in 0..200u32 {
        let job = backup(&context, "device=vda,target=t,sync=full,auto-dismiss=off");
        // Cancelled at ever later moments of its life.
        for _ in 0..round * 20 {
            std::hint::spin_loop();
        }
        if round % 2 == 1 {
            while job.query().current < MIB {
                thread::yield_now();
            }
        }
        let accepted = job.cancel().is_ok();
        let outcome = end_of(&job);
        match accepted {
            true => assert_eq!(outcome, Err(Code::Cancelled)),
            false => assert_eq!(outcome, Ok(())),
        }
        if accepted {
            cancelled += 1
        } else {
            finished += 1
        }
        let events: Vec<u64> = std::iter::from_fn(|| context.events().next())
            .filter(|e| e.kind == EventKind::Job)
            .map(|e| e.value)
            .collect();
        assert_eq!(events.iter().filter(|v| **v == Status::Concluded as u64).count(), 1, "{events:?}");
        assert!(job.cancel().is_err(), "it has ended");
        job.dismiss().expect("concluded");
    }
    assert!(cancelled > 0, "some were cancelled ({finished} were not)");
}

#[test]
fn whoever_sees_the_end_of_a_job_can_use_its_id_and_its_target_again() {
    let context = context();
    open(&context, "driver=memory,node-name=s,size=64K");
    open(&context, "driver=memory,node-name=t,size=64K");
    let _vda = disk(&context, "vda", "s");
    let options = || Options::parse("device=vda,target=t,sync=full").expect("parses");
    for round in 0..1000 {
        let job = context.jobs().start("backup", options()).unwrap_or_else(|e| panic!("{round}: {e}"));
        if round % 2 == 1 {
            // Refused if it is over already.
            job.cancel().ok();
        }
        // Not `wait`, which sleeps: the moment it has ended.
        while !job.status().has_ended() {
            std::hint::spin_loop();
        }
        assert!(context.jobs().find(job.id()).is_err(), "{round}: it is still there");
    }
}

#[test]
fn a_group_that_could_not_start_leaves_its_targets_free_though_its_jobs_are_still_held() {
    let context = context();
    for name in ["a", "b", "ta", "tb"] {
        open(&context, &format!("driver=memory,node-name={name},size=64K"));
    }
    let _disks = (disk(&context, "vda", "a"), disk(&context, "vdb", "b"));
    let parse = |text: &str| Options::parse(text).expect("parses");
    let mut group = context.jobs().group(Options::empty()).expect("a group");
    let good = group.add("backup", parse("device=vda,target=ta,sync=full")).expect("a member");
    // Its filter cannot be opened: the name is taken.
    let bad =
        group.add("backup", parse("device=vdb,target=tb,sync=full,filter-node-name=a")).expect("a member");
    group.start().expect_err("one of them cannot");
    assert_eq!((good.status(), bad.status()), (Status::Null, Status::Null));
    for text in ["device=vda,target=ta,sync=full", "device=vdb,target=tb,sync=full"] {
        let job = context.jobs().start("backup", parse(text)).expect("the target is free");
        assert_eq!(end_of(&job), Ok(()));
    }
}

#[test]
fn a_file_is_marked_until_its_backup_is_complete() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name);
    for name in ["s", "t"] {
        let file = std::fs::File::create(path(name)).expect("created");
        file.set_len(2 * MIB).expect("sized");
    }
    let marked = || {
        let file = std::fs::File::open(path("t")).expect("there");
        sys::attribute(&file, "user.cobweb.backup").expect("readable").is_some_and(|v| v == b"incomplete")
    };
    let probe = std::fs::File::open(path("s")).expect("there");
    if sys::set_attribute(&probe, "user.cobweb.probe", b"1").is_err() {
        // A file system without attributes: there is nothing to be tested here.
        return;
    }
    let context = context();
    for name in ["s", "t"] {
        open(&context, &format!("driver=file,node-name={name},filename={}", path(name).display()));
    }
    let vda = disk(&context, "vda", "s");
    vda.write(0, &vec![7; 2 * MIB as usize]).expect("filled");
    assert!(!marked());
    let job = backup(&context, "device=vda,target=t,sync=none");
    assert!(marked(), "from before the first write");
    job.cancel().expect("running");
    end_of(&job).expect_err("cancelled");
    assert!(marked(), "a cancelled backup is not complete");
    let job = backup(&context, "device=vda,target=t,sync=full");
    assert_eq!(end_of(&job), Ok(()));
    assert!(!marked());
    assert!(std::fs::read(path("t")).expect("readable") == std::fs::read(path("s")).expect("readable"));
    // A start that fails leaves the file as it was.
    let taken = Options::parse("device=vda,target=t,sync=full,filter-node-name=s").expect("parses");
    context.jobs().start("backup", taken).expect_err("the name is taken");
    assert!(!marked());
}
