//! What the daemon owns beside the graph and the jobs: the NBD server, the exports, the throttle groups as objects.
//!
//! Every export has a disk of its own above its node, so a filter that a job puts on the node acts below all of them. Calls that say that they may block
//! are made by one thread at a time (the worker, or the start of the daemon before there is one); all others may be made from anywhere.
//!
//! The lock guards the lists only and is never held while something blocks.

use super::address::take_address;
use super::wire::Failure;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::export::nbd::{Address, Export as NbdExport, Removal, Server};
use crate::filter::throttle::{Group as ThrottleGroup, KEYS, ThrottleLimits};
use crate::graph::{Disk, Graph};
use crate::limits::{GRAPH_DEPTH_MAX, NBD_CONNECTIONS_DEFAULT};
use crate::node::{Node, Vertex};
use crate::options::Options;
use crate::sync::{Arc, Mutex};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Objects of a daemon by name. It holds the context, which ends with it.
#[derive(Debug)]
pub(in crate::cli) struct Objects {
    context: Arc<Context>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Nodes that were made by name; those inside their options go with them.
    named: BTreeSet<String>,
    server: Option<Arc<Server>>,
    exports: BTreeMap<String, Export>,
    /// Disks of exports whose last requests had not ended when they were removed; they are used no more, but not free yet.
    left: Vec<Arc<Disk>>,
    /// Ids of exports that have gone and whose event has not been sent.
    gone: Vec<String>,
}

#[derive(Clone, Debug)]
struct Export {
    /// Name under which NBD clients find it.
    name: String,
    node: String,
    disk: Arc<Disk>,
    writable: bool,
    removing: bool,
}

/// Result of a call whose error has a class of its own.
type Tried<T> = std::result::Result<T, Failure>;

/// How long a node may take to bring down what it holds before it is deleted.
const SETTLE_MAX: Duration = Duration::from_secs(10);

impl Objects {
    /// No objects yet.
    pub(in crate::cli) fn new(context: Arc<Context>) -> Self {
        Self { context, state: Mutex::default() }
    }

    /// The context.
    pub(in crate::cli) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Opens a node. May block.
    pub(in crate::cli) fn add_node(&self, options: Options) -> Result<()> {
        let name = options.peek_str("node-name").unwrap_or_default().to_owned();
        if name.is_empty() {
            return Err(options.missing("node-name"));
        }
        self.graph().open(options)?;
        self.state.lock().named.insert(name);
        Ok(())
    }

    /// Closes a node that nobody uses, and the nodes that were described inside its options. May block.
    pub(in crate::cli) fn delete_node(&self, name: &str) -> Result<()> {
        let node = self.graph().node(name)?;
        if !node.filters().is_empty() {
            return Err(Error::busy(format!("node '{name}' has a filter on it, put there by a job")));
        }
        self.settle(&node)?;
        self.graph().forget_node(&node)?;
        self.state.lock().named.remove(name);
        drop(node);
        self.collect_nodes()
    }

    /// Closes nodes that were described inside the options of others and that nobody uses any more.
    fn collect_nodes(&self) -> Result<()> {
        // What is in use keeps its place in the graph, and at least one reference beside that and ours.
        const UNUSED: usize = 2;
        loop {
            let found = self.graph().nodes().into_iter().find(|node| {
                Arc::strong_count(node) == UNUSED && !self.state.lock().named.contains(node.name())
            });
            let Some(node) = found else { return Ok(()) };
            self.settle(&node)?;
            self.graph().forget_node(&node)?;
        }
    }

    /// Lets a node bring down what it holds, for a bounded time.
    fn settle(&self, node: &Arc<Vertex>) -> Result<()> {
        let settled = self.context.env().block_on(|cx| {
            let node = node.clone();
            async move { cx.until(Some(cx.now().after(SETTLE_MAX)), node.base().settle(&cx)).await }
        })?;
        let name = node.name();
        match settled {
            None => Err(Error::busy(format!("node '{name}' could not bring down what it holds in time"))),
            Some(result) => {
                result.map_err(|e| Error::io(e, format!("node '{name}' cannot bring down what it holds")))
            }
        }
    }

    /// Starts the NBD server. May block (it looks up a host name).
    pub(in crate::cli) fn start_server(&self, mut options: Options, key: &str) -> Result<()> {
        let mut address = options.take_object(key)?.ok_or_else(|| options.missing(key))?;
        let at = take_address(&mut address)?;
        address.finish()?;
        let max = options.take_u64_in("max-connections", 0..=u64::from(u32::MAX))?;
        for key in ["tls-creds", "tls-authz"] {
            if options.contains(key) {
                return Err(Error::unsupported(format!("option '{key}': TLS is not supported")));
            }
        }
        options.finish()?;
        let max = max.map_or(NBD_CONNECTIONS_DEFAULT, |n| n as usize);
        self.start_server_at(&at, max).map(drop)
    }

    /// Starts the NBD server for at most `max` clients at a time (0: as many as the engine allows); returns where it listens. May block.
    pub(in crate::cli) fn start_server_at(&self, at: &Address, max: usize) -> Result<Address> {
        if self.state.lock().server.is_some() {
            return Err(Error::busy("there is an NBD server already"));
        }
        let server = Arc::new(Server::start(self.context.env(), at, max)?);
        let address = server.address().clone();
        self.state.lock().server = Some(server);
        Ok(address)
    }

    /// Stops the NBD server and its exports. May block for some seconds.
    pub(in crate::cli) fn stop_server(&self) -> Result<()> {
        let (server, exports) = {
            let mut state = self.state.lock();
            (state.server.take(), std::mem::take(&mut state.exports))
        };
        let server = server.ok_or_else(|| Error::invalid("there is no NBD server"))?;
        server.stop();
        self.state.lock().gone.extend(exports.keys().cloned());
        exports.into_values().for_each(|e| self.drop_disk(e.disk));
        Ok(())
    }

    /// Where the NBD server listens.
    pub(in crate::cli) fn server_address(&self) -> Option<Address> {
        self.state.lock().server.as_ref().map(|s| s.address().clone())
    }

    /// Exports a node. May block.
    pub(in crate::cli) fn add_export(&self, mut options: Options) -> Result<()> {
        options.require_enum("type", &["nbd"])?;
        let id = options.require_str("id")?;
        let node = options.require_str("node-name")?;
        let name = options.take_str("name")?.unwrap_or_else(|| node.clone());
        let description = options.take_str("description")?.unwrap_or_default();
        let writable = options.take_bool("writable")?.unwrap_or(false);
        if options.take_bool("writethrough")?.unwrap_or(false) {
            return Err(Error::unsupported(
                "option 'writethrough' is on, and the clients of an NBD export flush for themselves",
            ));
        }
        options.finish()?;
        self.export(&id, &node, NewExport { name, description, writable })
    }

    /// Exports a node under an id. May block.
    pub(in crate::cli) fn export(&self, id: &str, node: &str, new: NewExport) -> Result<()> {
        check_id(id)?;
        let server = {
            let state = self.state.lock();
            if state.exports.contains_key(id) {
                return Err(Error::busy(format!("there is an export with the id '{id}' already")));
            }
            state.server.clone().ok_or_else(|| Error::invalid("there is no NBD server to export to"))?
        };
        let NewExport { name, description, writable } = new;
        let place = self.graph().place(node)?;
        if writable && place.base().limits().read_only {
            return Err(Error::invalid(format!("node '{node}' is read-only (option 'writable')")));
        }
        let disk = self.graph().add_disk("")?;
        let export = NbdExport { name: name.clone(), description, disk: disk.clone(), writable };
        let added = self.graph().insert(&disk, Some(place.clone())).and_then(|()| server.add_export(export));
        if let Err(e) = added {
            self.graph().remove_disk(&disk);
            return Err(e);
        }
        let node = place.name().to_owned();
        let export = Export { name, node, disk, writable, removing: false };
        self.state.lock().exports.insert(id.to_owned(), export);
        Ok(())
    }

    /// Takes an export away; `hard` disconnects its clients, otherwise it must have none. May block for some seconds.
    pub(in crate::cli) fn delete_export(&self, id: &str, hard: bool) -> Result<()> {
        let (server, name) = {
            let mut state = self.state.lock();
            let server = state.server.clone();
            let export = state.exports.get_mut(id);
            let export = export.ok_or_else(|| Error::not_found(format!("there is no export '{id}'")))?;
            export.removing = true;
            (server, export.name.clone())
        };
        let removal = if hard { Removal::Hard } else { Removal::Safe };
        let removed = server.map_or(Ok(()), |s| s.remove_export(&name, removal));
        let mut state = self.state.lock();
        if removed.is_err() && !hard {
            // It has clients, and stays.
            state.exports.values_mut().filter(|e| e.name == name).for_each(|e| e.removing = false);
            return removed;
        }
        let export = state.exports.remove(id);
        state.gone.push(id.to_owned());
        drop(state);
        if let Some(export) = export {
            self.drop_disk(export.disk);
        }
        removed
    }

    /// Ids of exports that have gone since the last call.
    pub(in crate::cli) fn take_gone(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().gone)
    }

    /// The exports as QMP lists them.
    pub(in crate::cli) fn list_exports(&self) -> Value {
        let state = self.state.lock();
        let list = state.exports.iter().map(|(id, e)| {
            json!({
                "id": id,
                "type": "nbd",
                "node-name": e.node,
                "shutting-down": e.removing,
                "name": e.name,
                "writable": e.writable,
                "disk": e.disk.name(),
            })
        });
        list.collect()
    }

    /// The disk of the export with this id, or of the first export of the node with this name.
    pub(in crate::cli) fn disk_of(&self, name: &str) -> Option<Arc<Disk>> {
        let state = self.state.lock();
        let by_node = || state.exports.values().find(|e| e.node == name);
        state.exports.get(name).or_else(by_node).map(|e| e.disk.clone())
    }

    /// The nodes as QMP lists them.
    pub(in crate::cli) fn list_nodes(&self) -> Value {
        self.graph().nodes().iter().map(describe).collect()
    }

    /// Makes an object; the only type is `throttle-group`.
    pub(in crate::cli) fn add_object(&self, mut options: Options) -> Result<()> {
        options.require_enum("qom-type", &["throttle-group"])?;
        let id = options.require_str("id")?;
        check_id(&id)?;
        self.graph().throttle_groups().create(&id, options).map(drop)
    }

    /// Removes an object that no node uses.
    pub(in crate::cli) fn delete_object(&self, id: &str) -> Result<()> {
        self.graph().throttle_groups().remove(id)
    }

    /// Changes limits of a throttle group (those that are named, the others stay), or a live property of a node.
    pub(super) fn set_object(&self, path: &str, property: &str, value: Value) -> Tried<()> {
        let group = match self.object(path)? {
            Object::Group(group) => group,
            Object::Node(node) => {
                let text = match value {
                    Value::String(text) => text,
                    other => other.to_string(),
                };
                return Ok(node.base().set(property, &text)?);
            }
        };
        let changes = limits_of(property, value)?;
        let Value::Object(mut all) = group.limits().to_json() else { return Ok(()) };
        for (key, value) in changes {
            if !all.contains_key(&key) {
                return Err(Failure::generic(format!(
                    "a throttle group has no limit '{key}' (known: {})",
                    KEYS.join(", ")
                )));
            }
            all.insert(key, value);
        }
        let mut options = Options::from_json(&json!({ "limits": all }))?;
        let limits = ThrottleLimits::take(&mut options, "limits.")?;
        options.finish()?;
        group.set_limits(limits.unwrap_or_default());
        Ok(())
    }

    /// Reads the limits of a throttle group, or one of them; or a property of a node, as text.
    pub(super) fn get_object(&self, path: &str, property: &str) -> Tried<Value> {
        let limits = match self.object(path)? {
            Object::Group(group) => group.limits(),
            Object::Node(node) => {
                let text = node.base().get(property).ok_or_else(|| {
                    Failure::generic(format!("node '{path}' has no property '{}'", property.escape_debug()))
                })?;
                return Ok(text.into());
            }
        };
        let one = property.strip_prefix("limits.").or_else(|| property.strip_prefix("x-"));
        match (property, one) {
            ("limits", _) => Ok(limits.to_json()),
            (_, Some(key)) if limits.value(key).is_some() => Ok(limits.value(key).into()),
            _ => Err(Failure::generic(format!("a throttle group has no property '{property}'"))),
        }
    }

    /// What `/objects/ID`, `ID` or the name of a node stands for; objects come first.
    fn object(&self, path: &str) -> Tried<Object> {
        let name = path.strip_prefix("/objects/").unwrap_or(path);
        if let Ok(group) = self.graph().throttle_groups().find(name) {
            return Ok(Object::Group(group));
        }
        let node = self.graph().node(path).map(Object::Node);
        node.map_err(|_| Failure::new(Failure::NO_DEVICE, format!("there is no object or node '{path}'")))
    }

    fn graph(&self) -> &Arc<Graph> {
        self.context.graph()
    }

    /// Forgets the disk of an export that has gone, unless something still runs on it; then a later call does.
    fn drop_disk(&self, disk: Arc<Disk>) {
        let mut left = std::mem::take(&mut self.state.lock().left);
        left.push(disk);
        left.retain(|d| {
            let busy = d.in_flight() > 0;
            if !busy {
                self.graph().remove_disk(d);
            }
            busy
        });
        self.state.lock().left.append(&mut left);
    }
}

/// What has properties.
enum Object {
    Group(Arc<ThrottleGroup>),
    Node(Arc<Vertex>),
}

/// What an NBD client sees of an export.
#[derive(Debug)]
pub(in crate::cli) struct NewExport {
    pub(in crate::cli) name: String,
    pub(in crate::cli) description: String,
    pub(in crate::cli) writable: bool,
}

/// `limits` with an object, or one limit (`x-bps-write`, `limits.bps-write`) with its value.
fn limits_of(property: &str, value: Value) -> Tried<Map<String, Value>> {
    match (property, value) {
        ("limits", Value::Object(map)) => Ok(map),
        ("limits", _) => Err(Failure::generic("the value of 'limits' must be an object")),
        (_, value) => {
            let key = property.strip_prefix("limits.").or_else(|| property.strip_prefix("x-"));
            let key = key.ok_or_else(|| {
                Failure::generic(format!("a throttle group has no property '{}'", property.escape_debug()))
            })?;
            Ok(Map::from_iter([(key.to_owned(), value)]))
        }
    }
}

fn describe(node: &Arc<Vertex>) -> Value {
    let (base, limits) = (node.base(), node.base().limits());
    let children: Vec<Value> = base
        .children()
        .into_iter()
        .map(|(key, edge)| json!({ "child": key, "node-name": edge.vertex().map(|v| v.name()) }))
        .collect();
    let filename = filename(&**base, 0).unwrap_or_default();
    json!({
        "node-name": node.name(),
        "drv": base.driver(),
        "ro": limits.read_only,
        "file": filename,
        "image": { "filename": filename, "format": base.driver(), "virtual-size": limits.size },
        "children": children,
        "filters": node.filters().iter().map(|f| f.name().to_owned()).collect::<Vec<_>>(),
    })
}

/// The file that a node stands on, if it is one.
fn filename(node: &dyn Node, depth: usize) -> Option<String> {
    if depth > GRAPH_DEPTH_MAX {
        return None;
    }
    node.get("filename").or_else(|| {
        let (_, file) = node.children().into_iter().find(|(key, _)| *key == "file")?;
        filename(&*file.node(), depth + 1)
    })
}

/// Ids follow QEMU's rule: a letter first, then letters, digits, `-`, `.`, `_`.
pub(in crate::cli) fn check_id(id: &str) -> Result<()> {
    let mut chars = id.chars();
    let ok = id.len() <= 63
        && chars.next().is_some_and(|c| c.is_ascii_alphabetic())
        && chars.all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_'));
    if ok { Ok(()) } else { Err(Error::invalid(format!("'{id}' is not a valid id (option 'id')"))) }
}
