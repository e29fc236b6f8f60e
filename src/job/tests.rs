//! The life of jobs and the copy engine, with the job type `copy`, in virtual time.

use super::testing::{Bench, Store, pattern};
use super::{Job, Priority, Status};
use crate::error::Code;
use crate::events::Side;
use crate::options::Options;
use crate::report::Action;
use crate::request::{Class, Op};
use crate::sync::Arc;
use std::time::Duration;

const MIB: usize = 1 << 20;

fn two(bench: &Bench, len: usize, holes: &[(usize, usize)]) -> (Arc<Store>, Arc<Store>) {
    (bench.store("s", pattern(len, holes)), bench.store("t", vec![0xee; len]))
}

fn running(bench: &Bench, more: &str) -> Arc<Job> {
    bench.start("copy", &format!("job-id=j,source=s,target=t{more}")).expect("the job starts")
}

#[test]
fn a_copy_is_equal_flushed_and_tells_every_state() {
    for len in [512, 4608, MIB + 512, 65536 - 512, 3 * MIB] {
        let bench = Bench::new();
        let (s, t) = two(&bench, len, &[]);
        let job = running(&bench, "");
        assert_eq!(bench.wait(&job), Ok(()));
        assert!(s.bytes() == t.bytes(), "{len}");
        let seen = t.seen();
        assert_eq!(seen.last().map(|r| r.op), Some(Op::Flush), "the flush comes last");
        assert_eq!(job.query().current, len as u64);
        let want = ["created", "running", "waiting", "pending", "concluded", "null"];
        assert_eq!(bench.states("j"), want);
        assert!(bench.context.jobs().find("j").is_err(), "dismissed");
    }
}

#[test]
fn reads_and_writes_are_merged_into_parts_that_run_in_parallel() {
    let bench = Bench::new();
    let (s, t) = two(&bench, 20 * MIB, &[]);
    s.hold(Op::Read);
    let job = running(&bench, "");
    bench.until(|| s.waiting() == 16);
    bench.run_ready();
    // Memory is the bound: 16 parts of 1 MiB each, and nothing is waiting for more than memory.
    assert_eq!((s.waiting(), job.flight.parts()), (16, 16));
    s.let_go();
    assert_eq!(bench.wait(&job), Ok(()));
    assert_eq!((s.count(Op::Read), t.count(Op::Write)), (20, 20));
    assert!(s.bytes() == t.bytes());
    assert_eq!(bench.context.jobs().pool().used(), 0);
    assert!(s.seen().iter().all(|r| r.class == Class::Background));
}

#[test]
fn at_most_max_workers_parts_are_in_flight() {
    let bench = Bench::new();
    let (s, _t) = two(&bench, 4 * MIB, &[]);
    s.set_delay(Duration::from_millis(5));
    let job = running(&bench, ",max-workers=3,max-chunk=64k");
    assert_eq!(bench.wait(&job), Ok(()));
    assert_eq!(s.most_running(), 3);
    assert_eq!(s.count(Op::Read), 64);
}

#[test]
fn zeros_move_no_payload_and_are_not_cut() {
    let bench = Bench::new();
    // Zeros known by status: one piece of 8 MiB. Zeros found in data: half a part.
    let holes = [(MIB, 8 * MIB)];
    let (s, t) = two(&bench, 10 * MIB, &holes);
    let job = running(&bench, "");
    assert_eq!(bench.wait(&job), Ok(()));
    assert!(s.bytes() == t.bytes());
    assert_eq!((s.count(Op::Read), t.count(Op::Write), t.count(Op::WriteZeroes)), (2, 2, 1));
    let totals = job.flight.totals();
    assert_eq!((totals.copied, totals.zero), (2 * MIB as u64, 8 * MIB as u64));
}

#[test]
fn zeros_are_not_written_to_a_target_that_has_them_already() {
    let bench = Bench::new();
    let s = bench.store("s", pattern(4 * MIB, &[(0, 3 * MIB)]));
    let t = bench.store("t", vec![0; 4 * MIB]);
    t.set_zero_init();
    let job = running(&bench, "");
    assert_eq!(bench.wait(&job), Ok(()));
    assert!(s.bytes() == t.bytes());
    assert_eq!((t.count(Op::Write), t.count(Op::WriteZeroes)), (1, 0));
}

#[test]
fn a_pause_ends_the_parts_in_flight_and_starts_none() {
    let bench = Bench::new();
    let (s, t) = two(&bench, 20 * MIB, &[]);
    s.hold(Op::Read);
    let job = running(&bench, "");
    bench.until(|| s.waiting() == 16);
    job.pause().expect("a running job can be paused");
    bench.run_ready();
    assert_eq!(job.status(), Status::Running, "parts are still in flight");
    assert!(job.query().paused);
    s.let_go();
    bench.until(|| job.status() == Status::Paused);
    assert_eq!((job.flight.parts(), job.flight.started()), (0, 16));
    assert_eq!((t.count(Op::Write), s.running(), t.running()), (16, 0, 0));
    bench.run_ready();
    assert_eq!(job.flight.started(), 16, "nothing starts while paused");
    let before = job.query().current;
    assert_eq!(before, 16 * MIB as u64);
    job.resume().expect("a paused job can be resumed");
    assert_eq!(bench.wait(&job), Ok(()));
    assert!(s.bytes() == t.bytes());
    let want = ["created", "running", "paused", "running", "waiting", "pending", "concluded", "null"];
    assert_eq!(bench.states("j"), want);
}

#[test]
fn cancel_is_bounded_when_the_target_never_answers() {
    let bench = Bench::new();
    let (_s, t) = two(&bench, 20 * MIB, &[]);
    t.hold(Op::Write);
    let job = running(&bench, "");
    bench.until(|| t.waiting() == 16);
    let began = bench.now();
    job.cancel().expect("a running job can be cancelled");
    let outcome = bench.wait(&job);
    assert_eq!(outcome.map_err(|e| e.code), Err(Code::Cancelled));
    assert!(bench.now().since(began) < Duration::from_secs(1));
    assert_eq!(bench.states("j"), ["created", "running", "aborting", "concluded", "null"]);
    // The hung writes keep their memory; another job is not held up, and one to the same target writes when they have ended.
    assert_eq!(bench.context.jobs().pool().used(), 16 * MIB as u64);
    let (s2, t2) = (bench.store("s2", pattern(MIB, &[])), bench.store("t2", vec![0; MIB]));
    let other = bench.start("copy", "job-id=j2,source=s2,target=t2").expect("another job starts");
    assert_eq!(bench.wait(&other), Ok(()));
    assert!(s2.bytes() == t2.bytes());
    let next = bench.start("copy", "job-id=j3,source=s2,target=t").expect("the target is free");
    bench.run_ready();
    assert_eq!((next.status(), t.running()), (Status::Running, 16));
    let refused = bench.start("copy", "job-id=j4,source=s2,target=t").expect_err("a job is at work there");
    assert_eq!(refused.code(), Code::Busy);
    t.let_go();
    assert_eq!(bench.wait(&next), Ok(()));
    assert!(t.bytes()[..MIB] == s2.bytes()[..]);
    bench.run_ready();
    assert_eq!(bench.context.jobs().pool().used(), 0);
}

#[test]
fn a_cancel_of_a_paused_job_ends_it() {
    let bench = Bench::new();
    two(&bench, 2 * MIB, &[]);
    let job = running(&bench, ",speed=1");
    job.pause().expect("a running job can be paused");
    bench.until(|| job.status() == Status::Paused);
    job.cancel().expect("a paused job can be cancelled");
    assert_eq!(bench.wait(&job).map_err(|e| e.code), Err(Code::Cancelled));
    let want = ["created", "running", "paused", "running", "aborting", "concluded", "null"];
    assert_eq!(bench.states("j"), want);
}

#[test]
fn a_pending_job_waits_for_finalize_and_a_concluded_one_for_dismiss() {
    let bench = Bench::new();
    two(&bench, MIB, &[]);
    let job = running(&bench, ",auto-finalize=off,auto-dismiss=off");
    bench.until(|| job.status() == Status::Pending);
    bench.run_ready();
    assert_eq!((job.status(), job.outcome()), (Status::Pending, None));
    assert!(job.dismiss().is_err(), "not concluded yet");
    job.finalize().expect("a pending job can be finalized");
    assert_eq!(bench.wait(&job), Ok(()));
    assert!(job.cancel().is_err(), "too late");
    assert_eq!(job.status(), Status::Concluded);
    bench.context.jobs().find("j").expect("still there").dismiss().expect("concluded");
    assert_eq!(job.status(), Status::Null);
    assert!(bench.context.jobs().find("j").is_err());
}

#[test]
fn a_cancel_in_pending_wins_over_success() {
    let bench = Bench::new();
    two(&bench, MIB, &[]);
    let job = running(&bench, ",auto-finalize=off,auto-dismiss=off");
    bench.until(|| job.status() == Status::Pending);
    job.cancel().expect("a pending job can be cancelled");
    job.finalize().expect("still pending");
    assert_eq!(bench.wait(&job).map_err(|e| e.code), Err(Code::Cancelled));
}

#[test]
fn the_speed_limit_holds_and_a_change_acts_at_once() {
    let bench = Bench::new();
    two(&bench, 8 * MIB, &[]);
    let job = running(&bench, ",speed=1M");
    let began = bench.now();
    bench.until(|| bench.now().since(began) >= Duration::from_secs(4));
    let done = job.query().current as usize;
    assert!((3 * MIB..=5 * MIB).contains(&done), "{done} in four seconds at 1 MiB/s");
    job.set_speed(1).expect("a speed");
    bench.run_ready();
    job.set_speed(0).expect("no speed");
    let lifted = bench.now();
    assert_eq!(bench.wait(&job), Ok(()));
    assert_eq!(bench.now(), lifted, "without a limit it takes no time here");
    assert!(job.limiter.lost().speed >= Duration::from_secs(3));
}

#[test]
fn a_share_leaves_the_device_idle_in_between() {
    let bench = Bench::new();
    let (s, _t) = two(&bench, 4 * MIB, &[]);
    s.set_delay(Duration::from_millis(20));
    let job = running(&bench, ",share=25,max-workers=1,max-chunk=64k");
    let began = bench.now();
    assert_eq!(bench.wait(&job), Ok(()));
    let (busy, all) = (64 * 20, bench.now().since(began).as_millis() as u64);
    assert!((busy * 3..=busy * 5).contains(&all), "busy {busy} ms of {all} ms");
    assert!(job.limiter.lost().share > Duration::from_secs(2));
}

#[test]
fn the_priority_is_that_of_the_parts_that_start_next() {
    let bench = Bench::new();
    let (s, _t) = two(&bench, 8 * MIB, &[]);
    let job = running(&bench, ",priority=lazy,max-workers=1");
    s.hold(Op::Read);
    bench.until(|| s.waiting() == 1);
    job.set_priority(Priority::Background);
    s.let_go();
    assert_eq!(bench.wait(&job), Ok(()));
    let classes: Vec<Class> = s.seen().iter().map(|r| r.class).collect();
    assert_eq!((classes[0], classes[1]), (Class::Lazy, Class::Background));
}

#[test]
fn an_error_is_reported_ignored_or_stops_the_job_by_its_policy() {
    for (policy, op, side) in [("target", Op::Write, Side::Target), ("source", Op::Read, Side::Source)] {
        let fail = |errno| {
            let bench = Bench::new();
            let (s, t) = two(&bench, 4 * MIB, &[]);
            if op == Op::Read { &s } else { &t }.fail(op, errno, 1);
            (bench, s, t)
        };
        let (bench, _, _) = fail(libc::EIO);
        let job = running(&bench, ",max-workers=1");
        assert_eq!(bench.wait(&job).map_err(|e| e.errno), Err(libc::EIO), "report is the default");
        let report = job.report().expect("a failed job has a report");
        assert_eq!((report.side, report.op, report.action), (side, op, Action::None));
        assert_eq!((report.offset, report.len), (0, MIB as u64));

        let (bench, s, t) = fail(libc::EIO);
        let job = running(&bench, &format!(",on-{policy}-error=ignore,max-workers=1"));
        assert_eq!(bench.wait(&job), Ok(()));
        assert!(s.bytes() == t.bytes(), "what failed was tried again");
        assert_eq!(job.report().map(|r| r.action), Some(Action::Retried));

        for stopping in ["stop", "enospc"] {
            let (bench, s, t) = fail(libc::ENOSPC);
            let job = running(&bench, &format!(",on-{policy}-error={stopping},max-workers=1"));
            bench.until(|| job.status() == Status::Paused);
            assert!(job.query().paused);
            bench.run_ready();
            assert_eq!(job.status(), Status::Paused);
            job.resume().expect("a stopped job can be resumed");
            assert_eq!(bench.wait(&job), Ok(()));
            assert!(s.bytes() == t.bytes());
        }

        let (bench, _, _) = fail(libc::EIO);
        let job = running(&bench, &format!(",on-{policy}-error=enospc"));
        assert_eq!(bench.wait(&job).map_err(|e| e.errno), Err(libc::EIO), "not a full device");
    }
}

#[test]
fn a_failed_flush_fails_the_job() {
    let bench = Bench::new();
    let (_s, t) = two(&bench, MIB, &[]);
    t.fail(Op::Flush, libc::EIO, 1);
    let job = running(&bench, ",on-target-error=ignore");
    assert_eq!(bench.wait(&job).map_err(|e| e.errno), Err(libc::EIO));
    assert_eq!(job.report().map(|r| r.op), Some(Op::Flush));
}

#[test]
fn targets_that_cannot_be_are_refused_and_nothing_is_left() {
    let bench = Bench::new();
    let (_s, t) = two(&bench, MIB, &[]);
    bench.store("small", vec![0; MIB - 1]);
    bench.store("ro", vec![0; MIB]).set_read_only();
    let root = bench.context.graph().node("t").expect("there");
    let refused = |options: &str| bench.start("copy", options).expect_err(options);
    assert!(refused("job-id=j,source=s,target=small").to_string().contains("'target'"));
    assert_eq!(refused("job-id=j,source=s,target=ro").code(), Code::ReadOnly);
    assert!(refused("job-id=j,source=s,target=s").to_string().contains("contain"));
    assert_eq!(refused("job-id=j,source=s,target=nothing").code(), Code::NotFound);
    assert!(refused("source=s,target=t").to_string().contains("job-id"));
    assert!(refused("job-id=j,source=s,target=t,nonsense=1").to_string().contains("nonsense"));
    assert!(refused("job-id=1j,source=s,target=t").to_string().contains("job-id"));
    assert!(refused("job-id=j,source=s,target=t,share=0").to_string().contains("share"));
    let disk = bench.context.graph().add_disk("vda").expect("free");
    bench.context.graph().insert(&disk, Some(root)).expect("inserted");
    assert_eq!(refused("job-id=j,source=s,target=t").code(), Code::Busy);
    bench.context.graph().insert(&disk, None).expect("ejected");
    assert!(bench.context.jobs().list().is_empty());
    assert_eq!(t.seen(), []);
    running(&bench, "");
}

#[test]
fn of_two_jobs_with_one_id_the_second_is_refused() {
    let bench = Bench::new();
    two(&bench, MIB, &[]);
    bench.store("t2", vec![0; MIB]);
    let job = running(&bench, ",auto-dismiss=off");
    let refused = bench.start("copy", "job-id=j,source=s,target=t2").expect_err("in use");
    assert_eq!(refused.code(), Code::Busy);
    bench.wait(&job).expect("success");
    assert!(bench.start("copy", "job-id=j,source=s,target=t2").is_err(), "still in use");
    job.dismiss().expect("concluded");
    assert!(bench.start("copy", "job-id=j,source=s,target=t2").is_ok(), "the refused one has left no claim");
}

#[test]
fn a_group_ends_together_and_one_failure_fails_all() {
    let bench = Bench::new();
    for (name, len) in [("s1", MIB), ("t1", MIB), ("s2", 2 * MIB), ("t2", 2 * MIB)] {
        bench.store(name, pattern(len, &[]));
    }
    let group = |more: &str| {
        let options = Options::parse("completion-mode=grouped").expect("parses");
        let mut group = bench.context.jobs().group(options).expect("a group");
        let mut add =
            |options: String| group.add("copy", Options::parse(&options).expect("parses")).expect("a member");
        let jobs = (
            add("job-id=a,source=s1,target=t1,auto-dismiss=off".into()),
            add(format!("job-id=b,source=s2,target=t2,auto-dismiss=off{more}")),
        );
        group.start().expect("the group starts");
        jobs
    };
    // The first waits for the second, which is slow.
    let (a, b) = group(",speed=1M");
    bench.until(|| a.status() == Status::Waiting);
    assert_eq!(b.status(), Status::Running);
    assert_eq!((bench.wait(&a), bench.wait(&b)), (Ok(()), Ok(())));
    a.dismiss().and(b.dismiss()).expect("concluded");

    // A cancel of the second cancels the first, which is done already.
    let (a, b) = group(",speed=1");
    bench.until(|| a.status() == Status::Waiting);
    b.cancel().expect("running");
    let ends = (bench.wait(&a), bench.wait(&b));
    assert_eq!(
        (ends.0.map_err(|e| e.code), ends.1.map_err(|e| e.code)),
        (Err(Code::Cancelled), Err(Code::Cancelled))
    );
    a.dismiss().and(b.dismiss()).expect("concluded");

    // If one waits to be finalized all do, and one call finalizes all.
    let (a, b) = group(",auto-finalize=off");
    bench.until(|| a.status() == Status::Pending && b.status() == Status::Pending);
    bench.run_ready();
    assert_eq!((a.outcome(), b.outcome()), (None, None));
    a.finalize().expect("pending");
    assert_eq!((bench.wait(&a), bench.wait(&b)), (Ok(()), Ok(())));
}

#[test]
fn a_job_paused_before_its_group_starts_copies_nothing() {
    let bench = Bench::new();
    let (s, t) = two(&bench, MIB, &[]);
    let mut group = bench.context.jobs().group(Options::empty()).expect("a group");
    let options = Options::parse("job-id=j,source=s,target=t").expect("parses");
    let job = group.add("copy", options).expect("a member");
    job.pause().expect("a created job can be paused");
    group.start().expect("the group starts");
    bench.until(|| job.status() == Status::Paused);
    bench.run_ready();
    assert_eq!((s.seen(), t.seen()), (Vec::new(), Vec::new()));
    job.resume().expect("paused");
    assert_eq!(bench.wait(&job), Ok(()));
}

#[test]
fn a_group_that_is_not_started_leaves_nothing() {
    let bench = Bench::new();
    two(&bench, MIB, &[]);
    let mut group = bench.context.jobs().group(Options::empty()).expect("a group");
    let job =
        group.add("copy", Options::parse("job-id=j,source=s,target=t").expect("parses")).expect("a member");
    assert_eq!(job.status(), Status::Created);
    assert!(
        group.add("copy", Options::parse("job-id=k,source=s,target=t").expect("parses")).is_err(),
        "one target"
    );
    drop(group);
    assert_eq!(job.status(), Status::Null);
    drop(job);
    assert!(running(&bench, "").status() == Status::Running);
}

#[test]
fn a_panic_in_a_part_ends_the_job_with_an_error() {
    let bench = Bench::new();
    let (s, _t) = two(&bench, MIB, &[]);
    s.set_panics();
    let job = running(&bench, "");
    let outcome = bench.wait(&job);
    assert_eq!(outcome.map_err(|e| e.code), Err(Code::Panicked));
    assert_eq!(job.flight.parts(), 0);
}

#[test]
fn dropping_the_context_cancels_jobs_in_bounded_time() {
    let bench = Bench::new();
    let (_s, t) = two(&bench, 4 * MIB, &[]);
    t.hold(Op::Write);
    let job = running(&bench, "");
    bench.until(|| t.waiting() == 4);
    let (began, clock) = (bench.now(), bench.context.env().runtime.clock.clone());
    drop(bench);
    assert_eq!(job.outcome().map(|o| o.map_err(|e| e.code)), Some(Err(Code::Cancelled)));
    assert!(clock.now().since(began) < Duration::from_secs(2));
}
