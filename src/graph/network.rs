//! The named objects of a context, and changes of the graph.

use super::disk::Disk;
use super::implicit::ImplicitOpen;
use super::open;
use super::turn::Turn;
use crate::error::{Error, Result};
use crate::filter::throttle::ThrottleGroups;
use crate::limits::NODES_MAX;
use crate::node::{Edge, Node, Vertex};
use crate::options::Options;
use crate::queue::{Cx, Env};
use crate::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use crate::sync::{Arc, Mutex};
use std::collections::BTreeMap;
use std::fmt;

/// Nodes and disks of a context by name. All methods may be called from any thread; those that say so may block.
pub struct Graph {
    env: Arc<Env>,
    names: Mutex<Names>,
    changes: Turn,
    next_name: AtomicU64,
    throttle_groups: Arc<ThrottleGroups>,
    implicit_open: AtomicU8,
}

#[derive(Default)]
struct Names {
    nodes: BTreeMap<String, Arc<Vertex>>,
    disks: BTreeMap<String, Arc<Disk>>,
}

impl Graph {
    /// An empty graph.
    pub fn new(env: Arc<Env>) -> Arc<Self> {
        Arc::new(Self {
            throttle_groups: ThrottleGroups::new(env.runtime.clock.clone()),
            env,
            names: Mutex::default(),
            changes: Turn::default(),
            next_name: AtomicU64::new(0),
            implicit_open: AtomicU8::new(0),
        })
    }

    /// The environment.
    pub fn env(&self) -> &Arc<Env> {
        &self.env
    }

    /// The named limits that `throttle` nodes share.
    pub fn throttle_groups(&self) -> &Arc<ThrottleGroups> {
        &self.throttle_groups
    }

    /// Whether names found inside images are opened where the options of a node do not say (`implicit-open`); deny unless it is changed (C11).
    pub fn implicit_open(&self) -> ImplicitOpen {
        ImplicitOpen::from_index(usize::from(self.implicit_open.load(Relaxed)))
    }

    /// Changes [`Graph::implicit_open`] for nodes opened from now on. For commands that stand in for QEMU's.
    pub fn set_implicit_open(&self, policy: ImplicitOpen) {
        self.implicit_open.store(policy as u8, Relaxed);
    }

    /// Opens a node and all its inline children from options; on an error none of them is left. May block.
    pub fn open(self: &Arc<Self>, options: Options) -> Result<Arc<Vertex>> {
        open::open_vertex(self, options)
    }

    /// Registers a node made elsewhere (host backends). `name` empty: generated.
    pub fn add_node(&self, name: &str, node: Arc<dyn Node>) -> Result<Arc<Vertex>> {
        let name = if name.is_empty() { self.generated_name() } else { self.checked_node_name(name)? };
        self.insert_node(name, node)
    }

    /// A name that a node may be given.
    pub(super) fn checked_node_name(&self, name: &str) -> Result<String> {
        check_name("node", name).map(str::to_owned)
    }

    pub(super) fn insert_node(&self, name: String, node: Arc<dyn Node>) -> Result<Arc<Vertex>> {
        let mut names = self.names.lock();
        if names.nodes.contains_key(&name) || names.disks.contains_key(&name) {
            return Err(Error::busy(format!("the name '{name}' is in use")));
        }
        if names.nodes.len() >= NODES_MAX {
            return Err(Error::busy(format!("there are {NODES_MAX} nodes already")));
        }
        let vertex = Vertex::new(name.clone(), node);
        names.nodes.insert(name, vertex.clone());
        Ok(vertex)
    }

    /// A node by name.
    pub fn node(&self, name: &str) -> Result<Arc<Vertex>> {
        let found = self.names.lock().nodes.get(name).cloned();
        found.ok_or_else(|| Error::not_found(format!("no node named '{name}'")))
    }

    /// All nodes, by name.
    pub fn nodes(&self) -> Vec<Arc<Vertex>> {
        self.names.lock().nodes.values().cloned().collect()
    }

    /// Takes the name away; the node lives until its last user has gone. Refused while the node is a filter in place or has a disk or parent.
    pub fn forget_node(&self, vertex: &Arc<Vertex>) -> Result<()> {
        let name = vertex.name();
        if self.users_of(vertex) > 0 {
            return Err(Error::busy(format!("node '{name}' is in use")));
        }
        self.names.lock().nodes.remove(name);
        Ok(())
    }

    /// [`Graph::forget_node`] for a node that holds nothing any more, with the nodes that were opened inside its options; those that somebody uses stay.
    pub fn forget_unused(&self, vertex: &Arc<Vertex>) {
        self.forget_below(vertex, 0);
    }

    fn forget_below(&self, vertex: &Arc<Vertex>, depth: usize) {
        if depth > crate::limits::GRAPH_DEPTH_MAX || self.forget_node(vertex).is_err() {
            return;
        }
        for (_, edge) in vertex.base().children() {
            if let Some(child) = edge.vertex().filter(|v| v.is_inline()) {
                self.forget_below(child, depth + 1);
            }
        }
    }

    /// Whether a node of this name could be added.
    pub fn check_new_node_name(&self, name: &str) -> Result<()> {
        let name = if name.is_empty() { return Ok(()) } else { check_name("node", name)? };
        let names = self.names.lock();
        if names.nodes.contains_key(name) || names.disks.contains_key(name) {
            return Err(Error::busy(format!("the name '{name}' is in use")));
        }
        Ok(())
    }

    /// Closes the nodes that nobody uses: no parent, disk, job or handle. What they hold is brought down first. For hosts whose nodes live as long as their
    /// users; a program that names nodes first and uses them later does not call it. May block.
    pub fn collect(self: &Arc<Self>) -> Result<()> {
        loop {
            let unused: Vec<Arc<Vertex>> = {
                let mut names = self.names.lock();
                let alone = |v: &Arc<Vertex>| Arc::strong_count(v) == 1;
                let found: Vec<String> =
                    names.nodes.iter().filter(|(_, v)| alone(v)).map(|(n, _)| n.clone()).collect();
                found.iter().filter_map(|n| names.nodes.remove(n)).collect()
            };
            if unused.is_empty() {
                return Ok(());
            }
            let settled = self.env.block_on(|cx| async move {
                for v in &unused {
                    v.base().settle(&cx).await.map_err(|e| {
                        Error::io(e, format!("node '{}' could not bring down what it holds", v.name()))
                    })?;
                }
                Ok(())
            })?;
            settled?;
        }
    }

    /// A new disk without medium.
    pub fn add_disk(&self, name: &str) -> Result<Arc<Disk>> {
        let name = if name.is_empty() { self.generated_name() } else { check_name("disk", name)?.to_owned() };
        let mut names = self.names.lock();
        if names.disks.contains_key(&name) || names.nodes.contains_key(&name) {
            return Err(Error::busy(format!("the name '{name}' is in use")));
        }
        let disk = Disk::new(name.clone(), self.env.clone());
        names.disks.insert(name, disk.clone());
        Ok(disk)
    }

    /// A disk by name.
    pub fn disk(&self, name: &str) -> Result<Arc<Disk>> {
        let found = self.names.lock().disks.get(name).cloned();
        found.ok_or_else(|| Error::not_found(format!("no disk named '{name}'")))
    }

    /// All disks, by name.
    pub fn disks(&self) -> Vec<Arc<Disk>> {
        self.names.lock().disks.values().cloned().collect()
    }

    /// Forgets a disk. Its queues must be gone.
    pub fn remove_disk(&self, disk: &Arc<Disk>) {
        self.names.lock().disks.remove(disk.name());
        disk.set_root(None);
    }

    /// Attaches a disk to a node (or ejects it) in a drained section. May block.
    pub fn insert(self: &Arc<Self>, disk: &Arc<Disk>, root: Option<Arc<Vertex>>) -> Result<()> {
        self.env.block_on(|cx| async move {
            let turn = self.changes.take().await;
            self.with_closed(&cx, vec![disk.clone()], || disk.set_root(root)).await;
            drop(turn);
        })
    }

    /// The place a name stands for: a node, or the node a disk is attached to.
    pub fn place(&self, name: &str) -> Result<Arc<Vertex>> {
        if let Ok(disk) = self.disk(name) {
            return disk.root().ok_or_else(|| {
                Error::new(
                    libc::ENOMEDIUM,
                    crate::error::Code::NoMedium,
                    format!("disk '{name}' has no medium"),
                )
            });
        }
        self.node(name)
    }

    /// Runs `change` while no request is in flight on any disk that reaches one of `places` (S1). `change` must not block.
    pub async fn drained<R>(
        self: &Arc<Self>,
        cx: &Cx,
        places: &[Arc<Vertex>],
        change: impl FnOnce() -> R,
    ) -> R {
        let turn = self.changes.take().await;
        let disks = self.disks_reaching(places);
        let result = self.with_closed(cx, disks, change).await;
        drop(turn);
        result
    }

    /// Opens a filter from `options` and puts it above `place` for all users. May block.
    pub fn filter_add(self: &Arc<Self>, place: &Arc<Vertex>, options: Options) -> Result<Arc<Vertex>> {
        let filter = open::open_filter(self, place, options)?;
        let added = self.env.block_on(|cx| {
            let filter = filter.clone();
            async move {
                self.drained(&cx, std::slice::from_ref(place), || place.push_filter(filter)).await;
            }
        });
        match added {
            Ok(()) => Ok(filter),
            Err(e) => {
                self.forget_unused(&filter);
                Err(e)
            }
        }
    }

    /// Opens a filter above what is on top of `place` now, without putting it there. Before it goes in ([`Vertex::push_filter`], in a
    /// drained section) compare its `file` with the top: the graph may have changed. May block.
    pub fn filter_open(self: &Arc<Self>, place: &Arc<Vertex>, options: Options) -> Result<Arc<Vertex>> {
        open::open_filter(self, place, options)
    }

    /// Takes a filter out without waiting for what it holds: for one that is given up because what is below it does not answer (S3, S35).
    /// Returns whether it was there.
    pub async fn filter_drop_on(
        self: &Arc<Self>,
        cx: &Cx,
        place: &Arc<Vertex>,
        filter: &Arc<Vertex>,
    ) -> bool {
        let there = self.drained(cx, std::slice::from_ref(place), || place.remove_filter(filter)).await;
        self.names.lock().nodes.remove(filter.name());
        there
    }

    /// Takes a filter out and brings what it holds to where it belongs (S3: the drained section waits for guest I/O only). May block.
    pub fn filter_del(self: &Arc<Self>, place: &Arc<Vertex>, filter: &Arc<Vertex>) -> Result<()> {
        self.env.block_on(|cx| async move { self.filter_del_on(&cx, place, filter).await })?
    }

    /// [`Graph::filter_del`] for tasks.
    pub async fn filter_del_on(
        self: &Arc<Self>,
        cx: &Cx,
        place: &Arc<Vertex>,
        filter: &Arc<Vertex>,
    ) -> Result<()> {
        if !place.filters().iter().any(|f| Arc::ptr_eq(f, filter)) {
            return Err(Error::not_found(format!(
                "'{}' is not a filter on '{}'",
                filter.name(),
                place.name()
            )));
        }
        // Before the drain: let requests go that do not wait for the guest's own I/O, and bring down what is held. After it: what came in between.
        filter.base().detaching();
        let first = filter.base().settle(cx).await;
        let there = self.drained(cx, std::slice::from_ref(place), || place.remove_filter(filter)).await;
        let last = filter.base().settle(cx).await;
        self.names.lock().nodes.remove(filter.name());
        if !there {
            return Err(Error::not_found(format!("'{}' has been removed already", filter.name())));
        }
        first.and(last).map_err(|e| Error::io(e, format!("cannot settle filter '{}'", filter.name())))
    }

    /// Disks from which one of `places` can be reached.
    pub fn disks_reaching(&self, places: &[Arc<Vertex>]) -> Vec<Arc<Disk>> {
        self.disks().into_iter().filter(|d| d.root().is_some_and(|r| reaches(&r, places, 0))).collect()
    }

    pub(super) fn generated_name(&self) -> String {
        format!("#node{}", self.next_name.fetch_add(1, Relaxed))
    }

    async fn with_closed<R>(&self, cx: &Cx, disks: Vec<Arc<Disk>>, change: impl FnOnce() -> R) -> R {
        // Opens the gates again whatever happens, also when the future is dropped while it waits.
        struct Gates(Vec<Arc<Disk>>);
        impl Drop for Gates {
            fn drop(&mut self) {
                self.0.iter().for_each(|d| d.open_gate());
            }
        }
        let guard = cx.wait_guard();
        disks.iter().for_each(|d| d.close_gate());
        let gates = Gates(disks);
        for d in &gates.0 {
            d.wait_empty().await;
        }
        let result = change();
        drop(gates);
        drop(guard);
        result
    }

    fn users_of(&self, vertex: &Arc<Vertex>) -> usize {
        let names = self.names.lock();
        let by_disk =
            names.disks.values().filter(|d| d.root().is_some_and(|r| Arc::ptr_eq(&r, vertex))).count();
        let by_node = names
            .nodes
            .values()
            .flat_map(|v| {
                v.base().children().into_iter().map(|(_, e)| e.vertex().cloned()).collect::<Vec<_>>()
            })
            .flatten()
            .filter(|v| Arc::ptr_eq(v, vertex))
            .count();
        let as_filter =
            names.nodes.values().filter(|v| v.filters().iter().any(|f| Arc::ptr_eq(f, vertex))).count();
        by_disk + by_node + as_filter
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.names.lock();
        f.debug_struct("Graph")
            .field("nodes", &names.nodes.keys().collect::<Vec<_>>())
            .field("disks", &names.disks.keys().collect::<Vec<_>>())
            .finish()
    }
}

fn reaches(from: &Arc<Vertex>, places: &[Arc<Vertex>], depth: usize) -> bool {
    if depth > crate::limits::GRAPH_DEPTH_MAX {
        return false;
    }
    places.iter().any(|p| Arc::ptr_eq(p, from))
        || std::iter::once(from.base().clone()).chain(from.filters().iter().map(|f| f.base().clone())).any(
            |n| {
                n.children()
                    .iter()
                    .filter_map(|(_, e): &(_, &Edge)| e.vertex())
                    .any(|v| reaches(v, places, depth + 1))
            },
        )
}

/// A name as QEMU allows it: a letter first, then letters, digits, `-`, `.`, `_`; at most 63 bytes.
fn check_name<'a>(what: &str, name: &'a str) -> Result<&'a str> {
    let mut chars = name.chars();
    let ok = name.len() <= 63
        && chars.next().is_some_and(|c| c.is_ascii_alphabetic())
        && chars.all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_'));
    if ok { Ok(name) } else { Err(Error::invalid(format!("'{name}' is not a valid {what} name"))) }
}
