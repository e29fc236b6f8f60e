//! Named places in the graph, and the pointers that lead to them.
//!
//! A [`Vertex`] is a place with a name: a node as it was opened, plus the filters that were put above it since. Whoever uses the
//! vertex (a disk, a parent node) goes through its *top*, so a filter goes in and out for all users at once
//! and no user holds a pointer to be rewritten. Tops are changed only while every disk that can reach the vertex is drained
//! (S1); readers therefore take one atomic load and never see half of a change.

use super::Node;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Mutex, Weak};
use arc_swap::{ArcSwap, Guard};
use std::fmt;

/// A named place in the graph.
pub struct Vertex {
    name: String,
    base: Arc<dyn Node>,
    top: ArcSwap<Arc<dyn Node>>,
    /// Filters above `base`, lowest first; changed only inside a drained section.
    filters: Mutex<Vec<Arc<Vertex>>>,
    inline: AtomicBool,
    /// Who wants to know of changes.
    watchers: Mutex<Vec<Weak<AtomicBool>>>,
}

impl Vertex {
    /// A place named `name` for `node`.
    pub fn new(name: impl Into<String>, node: Arc<dyn Node>) -> Arc<Self> {
        Arc::new(Self {
            name: name.into(),
            top: ArcSwap::from_pointee(node.clone()),
            base: node,
            filters: Mutex::new(Vec::new()),
            inline: AtomicBool::new(false),
            watchers: Mutex::default(),
        })
    }

    /// The node was described inside the options of another one, and goes with it.
    pub fn set_inline(&self) {
        self.inline.store(true, Ordering::Relaxed);
    }

    /// Whether [`Vertex::set_inline`] was called.
    pub fn is_inline(&self) -> bool {
        self.inline.load(Ordering::Relaxed)
    }

    /// The node's name, unique in its context.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The node itself, without the filters above it.
    pub fn base(&self) -> &Arc<dyn Node> {
        &self.base
    }

    /// What users of the place talk to now.
    pub fn top(&self) -> Guard<Arc<Arc<dyn Node>>> {
        self.top.load()
    }

    /// Like [`Vertex::top`], owned.
    pub fn top_node(&self) -> Arc<dyn Node> {
        Arc::clone(&self.top.load())
    }

    /// The filters above the node, lowest first.
    pub fn filters(&self) -> Vec<Arc<Vertex>> {
        self.filters.lock().clone()
    }

    /// `changed` is set when another node is on top from then on: for those who look through the top once and remember what they saw.
    pub fn watch(&self, changed: &Arc<AtomicBool>) {
        let mut watchers = self.watchers.lock();
        watchers.retain(|w| w.strong_count() > 0);
        watchers.push(Arc::downgrade(changed));
    }

    fn tell_watchers(&self) {
        let watchers = std::mem::take(&mut *self.watchers.lock());
        // Release: partner is the load of who remembers; the new top is there when the flag is seen.
        watchers.iter().filter_map(Weak::upgrade).for_each(|w| w.store(true, Ordering::Release));
    }

    /// Puts `filter` on top. The caller has drained every disk that reaches this vertex, and `filter`'s file edge leads to
    /// what was the top until now.
    pub fn push_filter(&self, filter: Arc<Vertex>) {
        let mut filters = self.filters.lock();
        self.top.store(Arc::new(filter.base.clone()));
        filters.push(filter);
        self.tell_watchers();
    }

    /// Takes `filter` out, wherever it is in the stack; the caller has drained every disk that reaches this vertex. Returns whether it was there.
    pub fn remove_filter(&self, filter: &Arc<Vertex>) -> bool {
        let mut filters = self.filters.lock();
        let Some(at) = filters.iter().position(|f| Arc::ptr_eq(f, filter)) else { return false };
        filters.remove(at);
        let below = if at == 0 { self.base.clone() } else { filters[at - 1].base.clone() };
        match filters.get(at) {
            Some(above) => {
                for (key, edge) in above.base.children() {
                    if key == "file" {
                        edge.point_at(below.clone());
                    }
                }
            }
            None => self.top.store(Arc::new(below)),
        }
        self.tell_watchers();
        true
    }
}

impl fmt::Debug for Vertex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Vertex({})", self.name)
    }
}

/// A node's pointer to the node below it.
pub struct Edge {
    to: To,
}

enum To {
    /// Whatever is on top of a place.
    Vertex(Arc<Vertex>),
    /// One node: what was below a filter when it went in. Rewritten when the filter below goes.
    Node(ArcSwap<Arc<dyn Node>>),
}

impl Edge {
    /// An edge to a named place, filters included.
    pub fn to_vertex(vertex: Arc<Vertex>) -> Self {
        Self { to: To::Vertex(vertex) }
    }

    /// An edge to exactly this node.
    pub fn to_node(node: Arc<dyn Node>) -> Self {
        Self { to: To::Node(ArcSwap::from_pointee(node)) }
    }

    /// The node below; hold the guard for a call, not across an await.
    pub fn get(&self) -> Guard<Arc<Arc<dyn Node>>> {
        match &self.to {
            To::Vertex(v) => v.top.load(),
            To::Node(n) => n.load(),
        }
    }

    /// The node below, owned.
    pub fn node(&self) -> Arc<dyn Node> {
        Arc::clone(&self.get())
    }

    /// The place the edge leads to, if it leads to a place.
    pub fn vertex(&self) -> Option<&Arc<Vertex>> {
        match &self.to {
            To::Vertex(v) => Some(v),
            To::Node(_) => None,
        }
    }

    fn point_at(&self, node: Arc<dyn Node>) {
        if let To::Node(n) = &self.to {
            n.store(Arc::new(node));
        }
    }
}

impl fmt::Debug for Edge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.to {
            To::Vertex(v) => write!(f, "-> {}", v.name),
            To::Node(n) => write!(f, "-> {}", n.load().driver()),
        }
    }
}
