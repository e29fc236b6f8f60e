//! `throttle`: limits bytes and operations per second, for one node or for a group of nodes together.
//!
//! Options: `file`; `throttle-group`, the name of a group made before (an object of the daemon, [`ThrottleGroups::create`]), or
//! `limits.*` for limits of the node's own ([`KEYS`]). Limits are changed live with [`Node::set`], one by one (`limits.bps-write`)
//! or all at once (`limits`, with option text as its value); on a member of a named group that changes the group. Setting
//! `throttle-group` moves the node to another group; what waits goes on in the old one.
//!
//! Reads count as reads; writes, write-zeroes and discards as writes, with the length of their range; flushes and block
//! status pass. Arithmetic: [`crate::rate`]. Order and fairness: [`group`].
//!
//! Guarantees: the rate is right within one burst (a tenth of a second of it, or what `-max` and `-max-length` say) plus one
//! request; requests of a node are let through in order; none starves; a request that waits can be cancelled and holds nothing.
//! Not guaranteed: that a drain of the disk is short. A drained section waits for requests that wait here, as for any that are slow.
//!
//! `plan` lets a request through only if the node below can carry it out without a task; otherwise it takes the count back and
//! `execute` counts it.

mod config;
mod group;
mod registry;
#[cfg(test)]
mod tests;

pub use config::{KEYS, Scope, ThrottleLimits};
pub use group::{Direction, Group, Member};
pub use registry::ThrottleGroups;

use crate::error::{Error, IoResult, Result};
use crate::graph::OpenCx;
use crate::node::{Edge, Extent, Growth, Limits, Node, NodeFuture, Plan, Reservation};
use crate::options::{Options, Prop, PropStates, PropTable, PropType};
use crate::queue::Cx;
use crate::request::{Class, Op, ReqRef, Request};
use crate::sync::Arc;
use crate::units::ByteRange;
use arc_swap::ArcSwap;
use std::any::Any;
use std::fmt;

/// The filter.
pub struct Throttle {
    file: Edge,
    groups: Arc<ThrottleGroups>,
    member: ArcSwap<Member>,
}

impl Throttle {
    /// A filter above `file` that is a member of `group`. `groups` is where other groups are found by name later.
    pub fn new(file: Edge, group: &Arc<Group>, groups: Arc<ThrottleGroups>) -> Arc<Self> {
        Arc::new(Self { file, groups, member: ArcSwap::new(group.join()) })
    }

    /// Driver entry.
    pub fn open(cx: &OpenCx<'_>, mut options: Options) -> Result<Arc<dyn Node>> {
        let groups = cx.graph().throttle_groups();
        let limits = ThrottleLimits::take(&mut options, "limits.")?;
        let group = match (options.take_str("throttle-group")?, limits) {
            (Some(_), Some(_)) => {
                return Err(Error::invalid(
                    "option 'throttle-group' excludes 'limits': the group has limits of its own",
                ));
            }
            (Some(name), None) => groups.find(&name)?,
            (None, limits) => Group::new("", limits.unwrap_or_default(), cx.env().runtime.clock.clone()),
        };
        let file = cx.require_child(&mut options, "file")?;
        options.finish_for(&PROPS)?;
        Ok(Self::new(file, &group, groups.clone()))
    }

    /// The group that the node is a member of now.
    pub fn group(&self) -> Arc<Group> {
        self.member.load().group().clone()
    }
}

impl Node for Throttle {
    fn driver(&self) -> &'static str {
        "throttle"
    }

    fn limits(&self) -> Limits {
        self.file.get().limits()
    }

    fn children(&self) -> Vec<(&'static str, &Edge)> {
        vec![("file", &self.file)]
    }

    fn plan(&self, req: ReqRef<'_>) -> Plan {
        let Some(direction) = direction(req.op) else { return self.file.get().plan(req) };
        let member = self.member.load();
        if !member.is_limited(direction) {
            return self.file.get().plan(req);
        }
        if !member.try_admit(direction, req.range.len) {
            return Plan::Slow;
        }
        let plan = self.file.get().plan(req);
        if matches!(plan, Plan::Slow) {
            member.give_back(direction, req.range.len);
        }
        plan
    }

    fn execute<'a>(&'a self, cx: &'a Cx, req: Request) -> NodeFuture<'a, IoResult> {
        Box::pin(async move {
            if let Some(direction) = direction(req.op) {
                let member = self.member.load_full();
                if member.is_limited(direction) {
                    member.admit(cx, direction, req.range.len).await?;
                }
            }
            let child = self.file.node();
            cx.run(&*child, req).await
        })
    }

    fn block_status<'a>(&'a self, cx: &'a Cx, range: ByteRange) -> NodeFuture<'a, IoResult<Extent>> {
        let child = self.file.node();
        Box::pin(async move { child.block_status(cx, range).await })
    }

    fn resize<'a>(&'a self, cx: &'a Cx, size: u64, growth: Growth) -> NodeFuture<'a, IoResult> {
        let child = self.file.node();
        Box::pin(async move { child.resize(cx, size, growth).await })
    }

    fn settle<'a>(&'a self, _cx: &'a Cx) -> NodeFuture<'a, IoResult> {
        // Whoever waits here is waited for by a drain; the node itself holds nothing.
        Box::pin(async { Ok(()) })
    }

    fn reserve<'a>(&'a self, cx: &'a Cx, len: u64, class: Class) -> NodeFuture<'a, IoResult<Reservation>> {
        let child = self.file.node();
        Box::pin(async move { child.reserve(cx, len, class).await })
    }

    fn set(&self, key: &str, value: &str) -> Result<()> {
        let group = self.group();
        match key {
            "throttle-group" => {
                self.member.store(self.groups.find(value)?.join());
                Ok(())
            }
            "limits" => {
                let mut options = Options::parse(value)?;
                let limits = ThrottleLimits::take(&mut options, "")?;
                options.finish()?;
                group.set_limits(limits.unwrap_or_default());
                Ok(())
            }
            _ => match key.strip_prefix("limits.") {
                Some(limit) => group.set(limit, value),
                None => Err(Error::invalid(format!("driver 'throttle' has no live option '{key}'"))),
            },
        }
    }

    fn get(&self, key: &str) -> Option<String> {
        let group = self.group();
        match key {
            "throttle-group" => Some(group.name().to_owned()),
            "limits" => Some(group.limits().to_json().to_string()),
            "waiting" => Some(group.waiting().to_string()),
            _ => group.limits().value(key.strip_prefix("limits.")?).map(|v| v.to_string()),
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for Throttle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Throttle").field("group", &self.group().name()).field("file", &self.file).finish()
    }
}

/// Which budget an operation comes out of; `None` passes.
const fn direction(op: Op) -> Option<Direction> {
    match op {
        Op::Read => Some(Direction::Read),
        Op::Write | Op::WriteZeroes | Op::Discard => Some(Direction::Write),
        Op::Flush => None,
    }
}

/// Options of the driver.
pub static PROPS: PropTable = PropTable { driver: "throttle", props: &LIST };

const OWN: [Prop; 3] = [
    Prop {
        name: "file",
        ty: PropType::Node,
        default: crate::options::props::REQUIRED,
        states: PropStates::OPEN,
        doc: "The node below",
    },
    Prop {
        name: "throttle-group",
        ty: PropType::Str,
        default: "",
        states: PropStates::OPEN.union(PropStates::LIVE),
        doc: "Name of a group whose limits are shared by its members, instead of limits",
    },
    Prop {
        name: "waiting",
        ty: PropType::Int,
        default: "",
        states: PropStates::READ_ONLY,
        doc: "Requests of the group that wait now",
    },
];

/// The node's own, then one per limit.
static LIST: [Prop; OWN.len() + KEYS.len()] = {
    let mut list = [OWN[0]; OWN.len() + KEYS.len()];
    let mut i = 0;
    while i < list.len() {
        list[i] = if i < OWN.len() { OWN[i] } else { config::PROPS[i - OWN.len()] };
        i += 1;
    }
    list
};
