//! Statistics by the name of a disk, node or job (semantics.md, section 6).

use super::Job;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::graph::Disk;
use crate::node::Vertex;
use crate::stats::{HistSnapshot, Stats, WAITS};
use crate::sync::Arc;
use serde_json::{Map, Value, json};
use std::time::Duration;

/// What a name stands for; disks and nodes share one name space, jobs have their own and come last.
enum Named {
    Disk(Arc<Disk>),
    Node(Arc<Vertex>),
    Job(Arc<Job>),
}

/// Counters by name.
pub(crate) fn find(context: &Context, name: &str) -> Option<Stats> {
    named(context, name).and_then(|n| n.stats())
}

/// A histogram by name.
pub(crate) fn hist(context: &Context, name: &str, which: &str) -> Option<HistSnapshot> {
    named(context, name).and_then(|n| n.hist(which))
}

/// Everything by name, as `query-cobweb-stats` shows it.
pub(crate) fn json(context: &Context, name: &str) -> Result<Value> {
    let found = named(context, name)
        .ok_or_else(|| Error::not_found(format!("no disk, node or job named '{name}'")))?;
    let waits = WAITS.into_iter().filter_map(|which| Some((which, found.hist(which)?)));
    let mut value = found.stats().unwrap_or_default().to_json_with(waits);
    if let Named::Job(job) = found
        && let Some(fields) = value.as_object_mut()
    {
        job.describe(fields);
    }
    Ok(value)
}

/// Lists, and the statistics of one name: what `cobweb_ctx_query` answers.
pub(crate) fn query(context: &Context, what: &str) -> Result<Value> {
    let graph = context.graph();
    Ok(match what {
        "nodes" => graph.nodes().iter().map(describe_node).collect(),
        "disks" => graph.disks().iter().map(describe_disk).collect(),
        "jobs" => context.jobs().list().iter().map(describe_job).collect(),
        _ => match what.strip_prefix("stats:") {
            Some(name) => json(context, name)?,
            None => return Err(Error::invalid(format!("'{what}' is not nodes, disks, jobs or stats:NAME"))),
        },
    })
}

fn describe_node(node: &Arc<Vertex>) -> Value {
    let (base, limits) = (node.base(), node.base().limits());
    let children: Map<String, Value> = base
        .children()
        .into_iter()
        .map(|(key, edge)| (key.to_owned(), json!(edge.vertex().map(|v| v.name()))))
        .collect();
    let filters: Vec<String> = node.filters().iter().map(|f| f.name().to_owned()).collect();
    json!({
        "node-name": node.name(),
        "driver": base.driver(),
        "size": limits.size,
        "read-only": limits.read_only,
        "children": children,
        "filters": filters,
        "last-error": base.last_error(),
    })
}

fn describe_disk(disk: &Arc<Disk>) -> Value {
    json!({
        "name": disk.name(),
        "node-name": disk.root().map(|r| r.name().to_owned()),
        "size": disk.size(),
    })
}

fn describe_job(job: &Arc<Job>) -> Value {
    let info = job.query();
    json!({
        "id": job.id(),
        "type": job.kind(),
        "status": info.state.name(),
        "current-progress": info.current,
        "total-progress": info.total,
        "speed": info.speed,
        "paused": info.paused,
        "errno": info.err,
        "code": info.code.name(),
    })
}

fn named(context: &Context, name: &str) -> Option<Named> {
    let graph = context.graph();
    if let Ok(disk) = graph.disk(name) {
        return Some(Named::Disk(disk));
    }
    if let Ok(node) = graph.node(name) {
        return Some(Named::Node(node));
    }
    context.jobs().find(name).ok().map(Named::Job)
}

impl Named {
    fn stats(&self) -> Option<Stats> {
        match self {
            Named::Disk(disk) => Some(of_disk(disk)),
            Named::Node(node) => node.base().stats(),
            Named::Job(job) => Some(job.stats()),
        }
    }

    fn hist(&self, which: &str) -> Option<HistSnapshot> {
        match self {
            // What the guest of a disk waits for is known to the filters above its root.
            Named::Disk(disk) => {
                let filters = disk.root().map(|r| r.filters()).unwrap_or_default();
                merged(filters.iter().filter_map(|f| f.base().hist(which)))
            }
            Named::Node(node) => node.base().hist(which),
            Named::Job(job) => job.hist(which),
        }
    }
}

/// The disk's own counters, and what the filters above its root count for it.
fn of_disk(disk: &Arc<Disk>) -> Stats {
    let totals = disk.totals();
    let mut stats = Stats::default();
    for filter in disk.root().map(|r| r.filters()).unwrap_or_default() {
        if let Some(s) = filter.base().stats() {
            stats.cbw_guest_bytes += s.cbw_guest_bytes;
            stats.cbw_copied_bytes += s.cbw_copied_bytes;
            stats.cbw_timeouts += s.cbw_timeouts;
            stats.cbw_late += s.cbw_late;
            stats.cbw_frozen_waits += s.cbw_frozen_waits;
            stats.lost_bytes += s.lost_bytes;
        }
    }
    stats.rd_ops = totals.reads;
    stats.rd_bytes = totals.read_bytes;
    stats.wr_ops = totals.writes;
    stats.wr_bytes = totals.written_bytes;
    stats.zero_ops = totals.zeroes;
    stats.discard_ops = totals.discards;
    stats.flush_ops = totals.flushes;
    stats.failed = totals.failed;
    stats.in_flight = disk.in_flight() as u64;
    stats
}

fn merged(hists: impl Iterator<Item = HistSnapshot>) -> Option<HistSnapshot> {
    hists.reduce(|mut sum, h| {
        sum.merge(&h);
        sum
    })
}

impl Job {
    /// Counters: those of the job's filter and cache.
    pub fn stats(&self) -> Stats {
        self.body.stats()
    }

    /// A histogram of the job's filter.
    pub fn hist(&self, which: &str) -> Option<HistSnapshot> {
        self.body.hist(which)
    }

    /// The job's own fields for `query-cobweb-stats`.
    fn describe(&self, into: &mut Map<String, Value>) {
        let now = self.env.runtime.clock.now();
        let (info, totals, lost) = (self.query(), self.flight.totals(), self.limiter.lost());
        let ms = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
        let own = json!({
            "job": self.id,
            "type": self.kind,
            "status": info.state.name(),
            "current-progress": info.current,
            "total-progress": info.total,
            "speed": info.speed,
            "rate": self.progress.rate(now),
            "eta-ms": self.progress.eta(now).map(ms),
            "parts": self.flight.started(),
            "parts-in-flight": self.flight.parts(),
            "parts-failed": totals.failed,
            "bytes-copied": totals.copied,
            "bytes-zero": totals.zero,
            "pool-bytes": self.pool.used(),
            "lost-ms": {
                "speed": ms(lost.speed),
                "share": ms(lost.share),
                "latency": ms(lost.latency),
                "memory": ms(lost.pool),
            },
        });
        if let Value::Object(own) = own {
            into.extend(own);
        }
        self.body.describe(into);
        if !self.errors.is_empty() || self.body.cause().is_some() {
            into.insert("report".to_owned(), self.report_json());
        }
    }
}
