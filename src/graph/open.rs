//! From options to nodes.

use super::implicit::{Chain, ImplicitOpen, NamedChild};
use super::network::Graph;
use super::registry::find_driver;
use crate::error::{Error, Result};
use crate::io::file::FileNode;
use crate::io::uring_allowed;
use crate::limits::GRAPH_DEPTH_MAX;
use crate::node::{Edge, Node, Vertex};
use crate::options::{Child, Options};
use crate::queue::Env;
use crate::sync::{Arc, Mutex};

/// What a driver's open function gets beside its options.
pub struct OpenCx<'a> {
    graph: &'a Arc<Graph>,
    depth: usize,
    name: &'a str,
    below: Option<Arc<dyn Node>>,
    /// Children opened so far, to be closed again if the node cannot be.
    inline: Mutex<Vec<Arc<Vertex>>>,
}

impl OpenCx<'_> {
    /// The graph.
    pub fn graph(&self) -> &Arc<Graph> {
        self.graph
    }

    /// The name the node will have, for its reports and events.
    pub fn name(&self) -> &str {
        self.name
    }

    /// The environment.
    pub fn env(&self) -> &Arc<Env> {
        self.graph.env()
    }

    /// A node over a file of `size` bytes without a name in the directory `dir`; it vanishes with its last user (S25).
    pub fn unlinked_file(&self, dir: &str, size: u64) -> Result<Arc<dyn Node>> {
        Ok(FileNode::unlinked(std::path::Path::new(dir), size, uring_allowed())?)
    }

    /// The child under `key`, opened inline or found by name. For a filter that goes in live, `file` is what it goes above.
    pub fn child(&self, options: &mut Options, key: &str) -> Result<Option<Edge>> {
        if key == "file"
            && let Some(below) = &self.below
        {
            if options.contains(key) {
                return Err(Error::invalid("'file' is given by the place of a filter that is added live"));
            }
            return Ok(Some(Edge::to_node(below.clone())));
        }
        match options.take_child(key)? {
            None | Some(Child::Null) => Ok(None),
            Some(Child::Name(name)) => Ok(Some(Edge::to_vertex(self.graph.place(&name)?))),
            Some(Child::Inline(inline)) => {
                let child = open(self.graph, inline, self.depth + 1, None)?;
                Ok(Some(self.keep(child)))
            }
        }
    }

    /// Like [`OpenCx::child`], missing is an error.
    pub fn require_child(&self, options: &mut Options, key: &str) -> Result<Edge> {
        match self.child(options, key)? {
            Some(edge) => Ok(edge),
            None => Err(options.missing(key)),
        }
    }
}

impl OpenCx<'_> {
    /// The options of a node that an image names, if that is allowed: by `policy`, or by the graph's default where the node does not say. `chain` has
    /// the files of the chain so far. Errors name image, structure and name.
    pub fn resolve_named(
        &self,
        named: &NamedChild<'_>,
        policy: Option<ImplicitOpen>,
        read_only: bool,
        chain: &mut Chain,
    ) -> Result<Options> {
        let options = named.resolve(policy.unwrap_or(self.graph.implicit_open()), read_only)?;
        if chain.len() > GRAPH_DEPTH_MAX {
            return Err(named
                .refuse(libc::ELOOP, format!("is the end of a chain of more than {GRAPH_DEPTH_MAX} files")));
        }
        if !chain.enter(&options) {
            return Err(named.refuse(libc::ELOOP, "creates an infinite loop"));
        }
        Ok(options)
    }

    /// Opens a node from options that an image gave. Not for chains: see [`OpenCx::add`].
    pub fn open_below(&self, options: Options) -> Result<Edge> {
        Ok(self.keep(open(self.graph, options, self.depth + 1, None)?))
    }

    /// A name for a node that this open function makes itself.
    pub fn new_name(&self) -> String {
        self.graph.generated_name()
    }

    /// Gives a node that this open function made its place in the graph. Long chains are opened this way, one after the other, since opening one inside the
    /// other would need a stack as deep as the chain.
    pub fn add(&self, name: String, node: Arc<dyn Node>) -> Result<Edge> {
        Ok(self.keep(self.graph.insert_node(name, node)?))
    }

    /// A child that lives and dies with the node.
    fn keep(&self, child: Arc<Vertex>) -> Edge {
        child.set_inline();
        self.inline.lock().push(child.clone());
        Edge::to_vertex(child)
    }
}

/// Takes `driver` and `node-name` out of a node's options.
pub fn split_driver(options: &mut Options) -> Result<(String, String)> {
    let driver =
        options.take_str("driver")?.ok_or_else(|| Error::invalid("missing required option 'driver'"))?;
    let name = options.take_str("node-name")?.unwrap_or_default();
    Ok((driver, name))
}

/// Opens a node and its inline children, or nothing.
pub(super) fn open_vertex(graph: &Arc<Graph>, options: Options) -> Result<Arc<Vertex>> {
    open(graph, options, 0, None)
}

/// Opens a filter whose `file` is what is on top of `place` now.
pub(super) fn open_filter(graph: &Arc<Graph>, place: &Arc<Vertex>, options: Options) -> Result<Arc<Vertex>> {
    open(graph, options, 0, Some(place.top_node()))
}

fn open(
    graph: &Arc<Graph>,
    mut options: Options,
    depth: usize,
    below: Option<Arc<dyn Node>>,
) -> Result<Arc<Vertex>> {
    if depth > GRAPH_DEPTH_MAX {
        return Err(Error::invalid(format!("more than {GRAPH_DEPTH_MAX} nodes nested")));
    }
    let (driver, name) = split_driver(&mut options)?;
    let driver = find_driver(&driver)
        .ok_or_else(|| Error::not_found(format!("unknown driver '{driver}' (option 'driver')")))?;
    if below.is_some() && !driver.is_filter {
        return Err(Error::invalid(format!("driver '{}' is not a filter", driver.name)));
    }
    let name = if name.is_empty() { graph.generated_name() } else { graph.checked_node_name(&name)? };
    let cx = OpenCx { graph, depth, name: &name, below, inline: Mutex::default() };
    let opened = (driver.open)(&cx, options).and_then(|node| graph.insert_node(name.clone(), node));
    if opened.is_err() {
        // The node itself is gone by now, so that nobody uses them but who has found them by name in the short time since.
        let children = cx.inline.into_inner();
        children.iter().rev().for_each(|child| graph.forget_unused(child));
    }
    opened
}
