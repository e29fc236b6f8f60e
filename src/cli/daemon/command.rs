//! The QMP commands: one line each in [`COMMANDS`], and what they do.
//!
//! A command that never blocks runs where it was read; one that may block (it opens files, waits for requests to end) runs on the worker thread, one
//! at a time, so that queries, cancels and the end of the daemon do not wait for it.

use super::objects::Objects;
use super::wire::{Failure, version};
use crate::job::{Job, Status};
use crate::options::Options;
use crate::sync::Arc;
use serde_json::{Map, Value, json};

/// Result of a command.
pub(super) type Answer = Result<Value, Failure>;

/// A QMP command.
#[derive(Debug)]
pub(super) struct Command {
    pub(super) name: &'static str,
    /// Whether it must run on the worker.
    pub(super) may_block: bool,
    pub(super) run: fn(&Objects, Options) -> Answer,
}

const fn quick(name: &'static str, run: fn(&Objects, Options) -> Answer) -> Command {
    Command { name, may_block: false, run }
}

const fn slow(name: &'static str, run: fn(&Objects, Options) -> Answer) -> Command {
    Command { name, may_block: true, run }
}

/// All commands, by name. `qmp_capabilities` and `quit` concern the connection and the daemon, and are carried out by the monitor.
pub(super) static COMMANDS: &[Command] = &[
    slow("block-export-add", |x, o| Ok(x.add_export(o).map(|()| json!({}))?)),
    slow("block-export-del", block_export_del),
    quick("block-job-cancel", |x, o| block_job(x, o, &["force"], Job::cancel)),
    quick("block-job-complete", |x, o| block_job(x, o, &[], complete)),
    quick("block-job-dismiss", |x, mut o| act(find_block_job(x, &mut o, "id")?, o, Job::dismiss)),
    quick("block-job-finalize", |x, mut o| act(find_block_job(x, &mut o, "id")?, o, Job::finalize)),
    quick("block-job-pause", |x, o| block_job(x, o, &[], Job::pause)),
    quick("block-job-resume", |x, o| block_job(x, o, &[], Job::resume)),
    quick("block-job-set-speed", block_job_set_speed),
    slow("blockdev-add", |x, o| Ok(x.add_node(o).map(|()| json!({}))?)),
    slow("blockdev-backup", |x, o| Ok(x.context().jobs().start("backup", o).map(|_| json!({}))?)),
    slow("blockdev-del", blockdev_del),
    quick("job-cancel", |x, o| job(x, o, Job::cancel)),
    quick("job-complete", |x, o| job(x, o, complete)),
    quick("job-dismiss", |x, o| job(x, o, Job::dismiss)),
    quick("job-finalize", |x, o| job(x, o, Job::finalize)),
    quick("job-pause", |x, o| job(x, o, Job::pause)),
    quick("job-resume", |x, o| job(x, o, Job::resume)),
    slow("nbd-server-start", |x, o| Ok(x.start_server(o, "addr").map(|()| json!({}))?)),
    slow("nbd-server-stop", nbd_server_stop),
    slow("object-add", |x, o| Ok(x.add_object(o).map(|()| json!({}))?)),
    slow("object-del", object_del),
    quick("qmp_capabilities", |_, _| Err(Failure::new(Failure::NO_COMMAND, "negotiation is over"))),
    quick("qom-get", qom_get),
    quick("qom-set", qom_set),
    quick("query-block-exports", |x, o| no_arguments(o, || x.list_exports())),
    quick("query-block-jobs", |x, o| no_arguments(o, || jobs(x).iter().map(block_job_info).collect())),
    quick("query-cobweb-stats", query_cobweb_stats),
    quick("query-commands", |_, o| {
        no_arguments(o, || COMMANDS.iter().map(|c| json!({ "name": c.name })).collect())
    }),
    quick("query-jobs", |x, o| no_arguments(o, || jobs(x).iter().map(job_info).collect())),
    quick("query-named-block-nodes", query_nodes),
    quick("query-version", |_, o| no_arguments(o, version)),
    quick("quit", |_, o| no_arguments(o, || json!({}))),
    slow("transaction", transaction),
];

/// A command by name.
pub(super) fn find(name: &str) -> Option<&'static Command> {
    COMMANDS.iter().find(|c| c.name == name)
}

/// Makes options of a command's arguments and runs it.
pub(super) fn run(command: &Command, objects: &Objects, arguments: Map<String, Value>) -> Answer {
    (command.run)(objects, Options::from_json(&Value::Object(arguments))?)
}

fn no_arguments(options: Options, answer: impl FnOnce() -> Value) -> Answer {
    options.finish()?;
    Ok(answer())
}

fn block_export_del(x: &Objects, mut o: Options) -> Answer {
    let id = o.require_str("id")?;
    let hard = o.take_enum("mode", &["safe", "hard"])? == Some(1);
    o.finish()?;
    x.delete_export(&id, hard)?;
    Ok(json!({}))
}

fn blockdev_del(x: &Objects, mut o: Options) -> Answer {
    let name = o.require_str("node-name")?;
    o.finish()?;
    x.delete_node(&name)?;
    Ok(json!({}))
}

fn nbd_server_stop(x: &Objects, o: Options) -> Answer {
    o.finish()?;
    x.stop_server()?;
    Ok(json!({}))
}

fn object_del(x: &Objects, mut o: Options) -> Answer {
    let id = o.require_str("id")?;
    o.finish()?;
    x.delete_object(&id)?;
    Ok(json!({}))
}

fn qom_set(x: &Objects, mut o: Options) -> Answer {
    let (path, property) = (o.require_str("path")?, o.require_str("property")?);
    let value = o.take_value("value").ok_or_else(|| o.missing("value"))?;
    o.finish()?;
    x.set_object(&path, &property, value)?;
    Ok(json!({}))
}

fn qom_get(x: &Objects, mut o: Options) -> Answer {
    let (path, property) = (o.require_str("path")?, o.require_str("property")?);
    o.finish()?;
    x.get_object(&path, &property)
}

fn query_nodes(x: &Objects, mut o: Options) -> Answer {
    o.take_bool("flat")?;
    no_arguments(o, || x.list_nodes())
}

/// Statistics of a disk, node, job or export. An exported node that keeps none of its own answers with those of its export's disk.
fn query_cobweb_stats(x: &Objects, mut o: Options) -> Answer {
    let name = o.require_str("name")?;
    o.finish()?;
    let context = x.context();
    match x.disk_of(&name) {
        Some(disk) if context.stats(&name).is_none() => Ok(context.stats_json(disk.name())?),
        _ => Ok(context.stats_json(&name)?),
    }
}

/// Starts several backups at one instant, all or none.
fn transaction(x: &Objects, mut o: Options) -> Answer {
    let actions = match o.take_value("actions") {
        Some(Value::Array(actions)) => actions,
        Some(_) => return Err(Failure::generic("option 'actions' must be a list")),
        None => return Err(o.missing("actions").into()),
    };
    let properties = o.take_object("properties")?.unwrap_or_default();
    o.finish()?;
    let mut group = x.context().jobs().group(properties)?;
    for action in actions {
        let mut action = Options::from_json(&action)?;
        let kind = action.require_str("type")?;
        let data = action.take_object("data")?;
        action.finish()?;
        let kind = match kind.as_str() {
            "blockdev-backup" => "backup",
            _ => {
                let text = format!("a transaction starts 'blockdev-backup' only, not '{kind}'");
                return Err(Failure::generic(text));
            }
        };
        group.add(kind, data.unwrap_or_default())?;
    }
    group.start()?;
    Ok(json!({}))
}

fn jobs(x: &Objects) -> Vec<Arc<Job>> {
    x.context().jobs().list()
}

/// A `job-...` command: the job is named by `id`.
fn job(x: &Objects, mut o: Options, action: impl FnOnce(&Job) -> crate::error::Result<()>) -> Answer {
    let id = o.require_str("id")?;
    let job = x.context().jobs().find(&id)?;
    act(job, o, action)
}

/// A `block-job-...` command: the job is named by `device`, and switches in `ignored` make no difference here.
fn block_job(
    x: &Objects,
    mut o: Options,
    ignored: &[&str],
    action: impl FnOnce(&Job) -> crate::error::Result<()>,
) -> Answer {
    let job = find_block_job(x, &mut o, "device")?;
    for key in ignored {
        o.take_bool(key)?;
    }
    act(job, o, action)
}

fn find_block_job(x: &Objects, o: &mut Options, key: &str) -> Result<Arc<Job>, Failure> {
    let id = o.require_str(key)?;
    let found = x.context().jobs().find(&id);
    found.map_err(|e| Failure::new(Failure::NOT_ACTIVE, e.full_text()))
}

fn act(job: Arc<Job>, o: Options, action: impl FnOnce(&Job) -> crate::error::Result<()>) -> Answer {
    o.finish()?;
    action(&job)?;
    Ok(json!({}))
}

/// No job here has a second phase to be completed by hand.
fn complete(job: &Job) -> crate::error::Result<()> {
    Err(crate::error::Error::invalid(format!(
        "job '{}' is a {} in state '{}', which completes by itself",
        job.id(),
        job.kind(),
        job.status().name()
    )))
}

fn block_job_set_speed(x: &Objects, mut o: Options) -> Answer {
    let job = find_block_job(x, &mut o, "device")?;
    let speed = o.require_u64("speed")?;
    act(job, o, |job| job.set_speed(speed))
}

fn job_info(job: &Arc<Job>) -> Value {
    let info = job.query();
    let mut value = json!({
        "id": job.id(),
        "type": job.kind(),
        "status": info.state.name(),
        "current-progress": info.current,
        "total-progress": info.total,
    });
    add_error(job, &mut value);
    value
}

fn block_job_info(job: &Arc<Job>) -> Value {
    let info = job.query();
    let mut value = json!({
        "type": job.kind(),
        "device": job.id(),
        "len": info.total,
        "offset": info.current,
        "busy": info.state == Status::Running,
        "paused": info.paused,
        "speed": info.speed,
        "io-status": if info.paused && info.err != 0 { "failed" } else { "ok" },
        "ready": info.state == Status::Ready,
        "status": info.state.name(),
        "auto-finalize": job.auto_finalize(),
        "auto-dismiss": job.auto_dismiss(),
    });
    add_error(job, &mut value);
    value
}

fn add_error(job: &Job, value: &mut Value) {
    if let (Some(text), Some(fields)) = (job.error_text(), value.as_object_mut()) {
        fields.insert("error".to_owned(), text.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context::{Context, ContextOptions};
    use crate::queue::testing;

    fn objects() -> Objects {
        let context = Context::with_env(ContextOptions::default(), testing::env(1));
        Objects::new(context)
    }

    fn call(x: &Objects, name: &str, arguments: Value) -> Answer {
        let Value::Object(arguments) = arguments else { panic!("arguments are an object") };
        run(find(name).expect(name), x, arguments)
    }

    #[test]
    fn the_table_is_sorted_and_names_are_unique() {
        assert!(COMMANDS.windows(2).all(|w| w[0].name < w[1].name));
        assert!(find("blockdev-backup").is_some_and(|c| c.may_block));
        assert!(find("job-cancel").is_some_and(|c| !c.may_block));
        assert!(find("human-monitor-command").is_none());
    }

    #[test]
    fn nodes_come_and_go_with_those_inside_their_options() {
        let x = objects();
        let node = json!({"driver": "raw", "node-name": "r", "file": {"driver": "memory", "size": 4096}});
        call(&x, "blockdev-add", node.clone()).expect("added");
        assert_eq!(x.context().graph().nodes().len(), 2);
        let e = call(&x, "blockdev-add", node).expect_err("the name is in use");
        assert!(e.text.contains("'r'"), "{}", e.text);
        assert_eq!(x.context().graph().nodes().len(), 2, "nothing is left of the second");
        let list = call(&x, "query-named-block-nodes", json!({})).expect("list");
        let found = list.as_array().expect("a list").iter().find(|n| n["node-name"] == "r");
        assert_eq!(found.expect("the node")["image"]["virtual-size"], 4096);
        call(&x, "blockdev-del", json!({"node-name": "r"})).expect("deleted");
        assert!(call(&x, "blockdev-del", json!({"node-name": "r"})).is_err());
        let names: Vec<_> = x.context().graph().nodes().iter().map(|n| n.name().to_owned()).collect();
        assert_eq!(names, [""; 0]);
        let e = call(&x, "blockdev-add", json!({"driver": "memory", "size": 1})).expect_err("no name");
        assert!(e.text.contains("'node-name'"), "{}", e.text);
    }

    #[test]
    fn limits_of_a_group_change_one_by_one_or_together_and_all_or_none() {
        let x = objects();
        let group = json!({"qom-type": "throttle-group", "id": "tg", "limits": {"bps-write": 1000}});
        call(&x, "object-add", group).expect("added");
        let get = |key: &str| call(&x, "qom-get", json!({"path": "/objects/tg", "property": key}));
        let set = |key: &str, value: Value| {
            call(&x, "qom-set", json!({"path": "tg", "property": key, "value": value}))
        };
        set("limits", json!({"iops-read": 7})).expect("set");
        assert_eq!(get("limits").expect("get")["bps-write"], 1000);
        assert_eq!(get("limits.iops-read"), Ok(json!(7)));
        // Both at once, so that neither order of the two is refused.
        set("limits", json!({"bps-write": 0, "bps-total": 5})).expect("set");
        assert!(set("limits", json!({"bps-write": 9, "iops-read": 1})).is_err());
        assert_eq!((get("x-bps-write"), get("x-iops-read")), (Ok(json!(0)), Ok(json!(7))));
        let e = set("limits", json!({"bps": 1})).expect_err("no such limit");
        assert!(e.text.contains("'bps'"), "{}", e.text);
        let e = call(&x, "qom-get", json!({"path": "/objects/no", "property": "limits"}));
        assert_eq!(e.expect_err("no such object").class, "DeviceNotFound");
        call(&x, "object-del", json!({"id": "tg"})).expect("deleted");
    }

    #[test]
    fn live_properties_of_a_node_are_set_by_its_name() {
        let x = objects();
        let node =
            json!({"driver": "throttle", "node-name": "t", "file": {"driver": "memory", "size": 4096}});
        call(&x, "blockdev-add", node).expect("added");
        let set = |key: &str, value: Value| {
            call(&x, "qom-set", json!({"path": "t", "property": key, "value": value}))
        };
        set("limits.bps-write", json!(5000)).expect("set");
        let get = json!({"path": "t", "property": "limits.bps-write"});
        assert_eq!(call(&x, "qom-get", get), Ok(json!("5000")));
        assert!(set("limits.nothing", json!(1)).is_err());
        assert!(call(&x, "qom-get", json!({"path": "t", "property": "nothing"})).is_err());
    }

    #[test]
    fn a_job_that_does_not_exist_has_the_class_that_clients_look_for() {
        let x = objects();
        let e = call(&x, "block-job-cancel", json!({"device": "j", "force": true})).expect_err("no job");
        assert_eq!(e.class, "DeviceNotActive");
        let e = call(&x, "job-cancel", json!({"id": "j"})).expect_err("no job");
        assert_eq!(e.class, "GenericError");
        assert_eq!(call(&x, "query-jobs", json!({})), Ok(json!([])));
        assert!(call(&x, "query-jobs", json!({"x": 1})).expect_err("unknown").text.contains("'x'"));
    }

    #[test]
    fn a_transaction_that_cannot_start_leaves_nothing_behind() {
        let x = objects();
        for actions in [
            json!(5),
            json!([5]),
            json!([{"type": "blockdev-snapshot-sync", "data": {}}]),
            json!([{"type": "blockdev-backup", "data": {"device": "a", "target": "b", "sync": "full"}}]),
        ] {
            assert!(call(&x, "transaction", json!({"actions": actions})).is_err(), "{actions}");
            assert_eq!(x.context().jobs().list().len(), 0);
        }
        assert_eq!(call(&x, "transaction", json!({"actions": []})), Ok(json!({})));
    }

    #[test]
    fn an_export_needs_a_server_and_a_node() {
        let x = objects();
        let dir = tempfile::tempdir().expect("tempdir");
        let export = json!({"type": "nbd", "id": "e", "node-name": "n"});
        assert!(call(&x, "block-export-add", export.clone()).expect_err("no server").text.contains("server"));
        let path = dir.path().join("s");
        let addr = json!({"addr": {"type": "unix", "data": {"path": path}}});
        call(&x, "nbd-server-start", addr.clone()).expect("started");
        assert!(path.exists());
        assert!(call(&x, "nbd-server-start", addr).is_err());
        assert!(call(&x, "block-export-add", export.clone()).expect_err("no node").text.contains("'n'"));
        call(&x, "blockdev-add", json!({"driver": "memory", "node-name": "n", "size": 8192})).expect("node");
        call(&x, "block-export-add", export.clone()).expect("exported");
        assert!(call(&x, "block-export-add", export).is_err());
        let list = call(&x, "query-block-exports", json!({})).expect("list");
        assert_eq!((&list[0]["id"], &list[0]["name"]), (&json!("e"), &json!("n")));
        assert!(call(&x, "blockdev-del", json!({"node-name": "n"})).is_err(), "it is in use");
        let stats = call(&x, "query-cobweb-stats", json!({"name": "e"})).expect("by id");
        assert_eq!(stats["rd-ops"], 0);
        call(&x, "block-export-del", json!({"id": "e"})).expect("deleted");
        assert!(call(&x, "block-export-del", json!({"id": "e"})).is_err());
        call(&x, "blockdev-del", json!({"node-name": "n"})).expect("nobody uses it");
        call(&x, "nbd-server-stop", json!({})).expect("stopped");
        assert!(!path.exists());
    }
}
