//! What the engine reports, as QMP events.

use crate::error::Code;
use crate::events::{Event, EventKind, Side};
use crate::job::Status;
use crate::rt::Clock;
use serde_json::{Map, Value, json};

/// What is known of a job beside its event.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct JobFacts {
    pub(super) kind: &'static str,
    pub(super) speed: u64,
}

/// The QMP events that one event of the engine becomes, in order. `job` is what is known of the job that the event is about.
pub(super) fn translate(event: &Event, clock: &dyn Clock, job: JobFacts) -> Vec<Value> {
    let at = wall_ns(event, clock);
    let name = match event.kind {
        EventKind::Job => return of_job(event, at, job),
        EventKind::Resize => "COBWEB_RESIZE",
        EventKind::CbwBroken => "COBWEB_SNAPSHOT_BROKEN",
        EventKind::RangeLost => "COBWEB_RANGE_LOST",
        EventKind::CacheMark => "COBWEB_CACHE_MARK",
        EventKind::Overflow => "COBWEB_OVERFLOW",
        EventKind::Corrupt => "COBWEB_IMAGE_CORRUPTED",
        EventKind::ReaderGone => "COBWEB_READER_GONE",
    };
    let mut data = Map::new();
    data.insert("name".to_owned(), event.source.as_str().into());
    match event.kind {
        EventKind::Resize => {
            data.insert("size".to_owned(), event.value.into());
        }
        EventKind::CacheMark => {
            data.insert("percent".to_owned(), event.value.into());
            // 0 and the largest number mean that it does not fill up as things are.
            if !matches!(event.len, 0 | u64::MAX) {
                data.insert("time-to-full-ms".to_owned(), event.len.into());
            }
        }
        EventKind::Overflow => {
            data.insert("to".to_owned(), side(event.value).into());
        }
        EventKind::CbwBroken | EventKind::RangeLost | EventKind::Corrupt => {
            data.insert("offset".to_owned(), event.offset.into());
            data.insert("len".to_owned(), event.len.into());
        }
        EventKind::Job | EventKind::ReaderGone => {}
    }
    if event.errno != 0 || event.code != Code::None {
        data.insert("errno".to_owned(), event.errno.into());
        data.insert("code".to_owned(), event.code.name().into());
        data.insert("side".to_owned(), event.side.name().into());
    }
    vec![message(name, Value::Object(data), at)]
}

/// An event that does not come from the engine.
pub(super) fn own(name: &str, data: Value, clock: &dyn Clock) -> Value {
    message(name, data, clock.wall_ns())
}

/// `JOB_STATUS_CHANGE`, and before the end of a job what QEMU tells about it beside.
fn of_job(event: &Event, at: u64, job: JobFacts) -> Vec<Value> {
    let Some(status) = status(event.value) else { return Vec::new() };
    let mut all = Vec::new();
    let mut data = json!({
        "type": job.kind,
        "device": event.source,
        "len": event.len,
        "offset": event.offset,
        "speed": job.speed,
    });
    match status {
        Status::Concluded if event.code == Code::Cancelled => {
            all.push(message("BLOCK_JOB_CANCELLED", data, at));
        }
        Status::Concluded => {
            if let Some(fields) = data.as_object_mut().filter(|_| event.errno != 0) {
                let text = std::io::Error::from_raw_os_error(event.errno).to_string();
                let text = text.split(" (os error").next().unwrap_or_default();
                fields.insert("error".to_owned(), format!("{text} ({})", event.code.name()).into());
            }
            all.push(message("BLOCK_JOB_COMPLETED", data, at));
        }
        _ => {}
    }
    all.push(message("JOB_STATUS_CHANGE", json!({ "id": event.source, "status": status.name() }), at));
    all
}

fn message(name: &str, data: Value, at: u64) -> Value {
    json!({
        "event": name,
        "data": data,
        "timestamp": { "seconds": at / 1_000_000_000, "microseconds": at / 1000 % 1_000_000 },
    })
}

/// When it happened, by the wall clock.
fn wall_ns(event: &Event, clock: &dyn Clock) -> u64 {
    let (wall, now) = (clock.wall_ns(), clock.now().0);
    if event.time_ns == 0 { wall } else { wall.saturating_sub(now.saturating_sub(event.time_ns)) }
}

fn status(number: u64) -> Option<Status> {
    use Status::*;
    [Created, Running, Paused, Ready, Standby, Waiting, Pending, Aborting, Concluded, Null]
        .into_iter()
        .find(|s| *s as u64 == number)
}

fn side(number: u64) -> &'static str {
    [Side::Source, Side::Target, Side::Cache, Side::Spill, Side::Reader, Side::Host]
        .into_iter()
        .find(|s| *s as u64 == number)
        .map_or("none", Side::name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rt::Instant;

    #[derive(Debug)]
    struct Fixed;

    impl Clock for Fixed {
        fn now(&self) -> Instant {
            Instant(5_000_000_000)
        }
        fn wall_ns(&self) -> u64 {
            1_700_000_002_000_003_000
        }
    }

    fn job(status: Status, errno: i32, code: Code) -> Vec<Value> {
        let event = Event {
            value: status as u64,
            errno,
            code,
            offset: 3,
            len: 4,
            time_ns: 3_000_000_000,
            ..Event::new(EventKind::Job, "j")
        };
        translate(&event, &Fixed, JobFacts { kind: "backup", speed: 9 })
    }

    #[test]
    fn a_change_of_state_carries_the_time_at_which_it_happened() {
        let expected = json!({
            "event": "JOB_STATUS_CHANGE",
            "data": {"id": "j", "status": "running"},
            "timestamp": {"seconds": 1_700_000_000, "microseconds": 3},
        });
        assert_eq!(job(Status::Running, 0, Code::None), [expected]);
    }

    #[test]
    fn the_end_of_a_job_is_told_before_the_state_changes() {
        let names = |all: &[Value]| all.iter().map(|v| v["event"].clone()).collect::<Vec<_>>();
        let good = job(Status::Concluded, 0, Code::None);
        assert_eq!(names(&good), ["BLOCK_JOB_COMPLETED", "JOB_STATUS_CHANGE"]);
        let data = json!({"type": "backup", "device": "j", "len": 4, "offset": 3, "speed": 9});
        assert_eq!(good[0]["data"], data);
        let failed = job(Status::Concluded, libc::ENOSPC, Code::TargetFailed);
        assert_eq!(failed[0]["data"]["error"], "No space left on device (target-failed)");
        let cancelled = job(Status::Concluded, libc::ECANCELED, Code::Cancelled);
        assert_eq!(names(&cancelled), ["BLOCK_JOB_CANCELLED", "JOB_STATUS_CHANGE"]);
    }

    #[test]
    fn a_mark_of_a_cache_tells_when_it_will_be_full() {
        let mut event = Event { value: 80, len: 1500, ..Event::new(EventKind::CacheMark, "c") };
        let found = translate(&event, &Fixed, JobFacts::default());
        assert_eq!(found[0]["event"], "COBWEB_CACHE_MARK");
        assert_eq!(found[0]["data"], json!({"name": "c", "percent": 80, "time-to-full-ms": 1500}));
        event.len = u64::MAX;
        let found = translate(&event, &Fixed, JobFacts::default());
        assert_eq!(found[0]["data"], json!({"name": "c", "percent": 80}));
    }
}
