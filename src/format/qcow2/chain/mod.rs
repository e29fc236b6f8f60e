//! The layers below an image as one: where each guest byte is found, without going down from layer to layer (qcow2.md 5.1).
//!
//! A [`ChainMap`] belongs to one image and covers the read-only qcow2 layers below it, as far as they stand directly on one another: it ends at a filter, at a layer that
//! can be written, and at a node of another format (its *base*, to which it passes what no layer has). Guest bytes in units of the smallest (sub)cluster
//! among the layers; 512 units are a region, made whole when it is first needed: the slices of all layers are loaded side by side, so a
//! cold miss costs one round. A region says of each unit: zeros, data of a layer at a host place, the base, or *ask the layers* (compressed, damaged, or cut by the end of
//! a short layer). A lookup is one pointer and one word, whatever the depth.
//!
//! Past the end of a layer the layers above it read zeros, also where a deeper one is longer (5.4).
//!
//! When the chain changes (a filter goes in or out, a layer becomes writable) the places it leads through say so ([`crate::node::Vertex::watch`]), and the map is not used any more: a new one is made.
//!
//! Bounds: [`BUDGET`] bytes of regions, evicted by the clock; what a fill holds is a region and the slices that tell about it.

mod fill;
mod region;
mod walk;

pub use region::Place;

use super::cache::{Index, Ring};
use super::flight::Flight;
use super::image::Image;
use super::node::Qcow2Node;
use crate::node::{Edge, Plan};
use crate::request::ReqRef;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Mutex};
use region::{REGION_UNITS, Region};
use std::collections::BTreeMap;
use std::fmt;

/// Bytes of regions that one map keeps.
const BUDGET: usize = 16 << 20;
/// Locks of the map.
const SHARDS: usize = 16;

/// The map of the layers below one image; see the folder.
pub struct ChainMap {
    /// From the top down; never empty.
    layers: Vec<Arc<Image>>,
    /// Bytes that the image above sees of the chain.
    size: u64,
    /// log2 of the bytes of a unit.
    unit_bits: u32,
    changed: Arc<AtomicBool>,
    index: Index<Region>,
    shards: Box<[Mutex<Shard>]>,
}

#[derive(Default)]
struct Shard {
    ring: Ring<Region>,
    filling: BTreeMap<u64, Arc<Flight<Arc<Region>>>>,
}

impl ChainMap {
    /// The map for an image that stands on `backing`, if that is a layer it can cover.
    pub fn new(backing: &Edge) -> Option<Arc<Self>> {
        let changed = Arc::new(AtomicBool::new(false));
        let mut layers: Vec<Arc<Image>> = Vec::new();
        while layers.len() < crate::limits::GRAPH_DEPTH_MAX + 1 {
            let edge = match layers.last() {
                None => Some(backing),
                Some(layer) => layer.backing(),
            };
            let Some(edge) = edge else { break };
            // Watched before it is looked at: a change after the look is told.
            if let Some(vertex) = edge.vertex() {
                vertex.watch(&changed);
            }
            let node = edge.node();
            let Some(layer) = node.as_any().downcast_ref::<Qcow2Node>() else { break };
            let image = layer.image();
            image.watch(&changed);
            if image.is_writable() {
                break;
            }
            layers.push(image.clone());
        }
        let size = layers.first()?.size();
        let unit_bits = layers.iter().map(|l| l.layout.subcluster_bits()).min()?;
        let regions = size.div_ceil(REGION_UNITS << unit_bits);
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Some(Arc::new(Self { layers, size, unit_bits, changed, index: Index::new(regions), shards }))
    }

    /// Whether the map still tells how the chain is.
    pub fn is_current(&self) -> bool {
        // Acquire: partner is the store of who changes the chain.
        !self.changed.load(Ordering::Acquire)
    }

    /// The layers, from the top down.
    pub fn layers(&self) -> &[Arc<Image>] {
        &self.layers
    }

    /// What the lowest layer stands on.
    pub(super) fn base(&self) -> Option<&Edge> {
        self.layers.last().and_then(|layer| layer.backing())
    }

    /// Bytes that the image above sees of the chain.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Regions in memory.
    pub fn regions(&self) -> usize {
        self.shards.iter().map(|s| s.lock().ring.len()).sum()
    }

    /// How a read that the image above has nothing of can be carried out without waiting.
    pub(super) fn plan(&self, req: ReqRef<'_>) -> Plan {
        if req.range.offset >= self.size {
            return Plan::Zero;
        }
        if req.range.end() > self.size {
            return Plan::Slow;
        }
        match self.look(req.range) {
            Some((Place::Zero, range)) if range == req.range => Plan::Zero,
            Some((Place::Data(layer, host), range)) if range == req.range => {
                let data = self.layers[layer].data().get();
                if !self.layers[layer].in_data_file(&***data, host.get(), range.len) {
                    return Plan::Slow;
                }
                data.plan(req.at(host.get()))
            }
            Some((Place::Base, range)) if range == req.range => {
                let Some(base) = self.base() else { return Plan::Zero };
                let node = base.get();
                if range.end() <= node.limits().size { node.plan(req) } else { Plan::Slow }
            }
            _ => Plan::Slow,
        }
    }
}

impl fmt::Debug for ChainMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChainMap").field("layers", &self.layers.len()).finish_non_exhaustive()
    }
}
