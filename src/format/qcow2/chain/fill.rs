//! Making regions: all layers asked at once.

use super::super::flight::Flight;
use super::super::image::Image;
use super::super::join::join_bounded;
use super::super::l1::L1Table;
use super::super::map::{Run, map};
use super::super::read::Window;
use super::region::{REGION_UNITS, Region, encode};
use super::{BUDGET, ChainMap, Place};
use crate::error::IoResult;
use crate::queue::Cx;
use crate::sync::{Arc, Mutex};
use crate::units::ByteRange;

/// Layers whose tables are loaded at a time.
const LAYERS_AT_ONCE: usize = 256;

/// What a layer knows about a region: its L1 table and the slices that its entries point at.
type Known = (Arc<L1Table>, Window);

impl ChainMap {
    /// The region `key`, made if it is not in RAM; once, whoever asks.
    pub(super) async fn region(self: &Arc<Self>, cx: &Cx, key: u64) -> IoResult<Arc<Region>> {
        if let Some(region) = self.index.get(key).and_then(|r| r.clone()) {
            return Ok(region);
        }
        let flight = self.start(cx, key);
        flight.wait(cx).await
    }

    fn start(self: &Arc<Self>, cx: &Cx, key: u64) -> Arc<Flight<Arc<Region>>> {
        let mut shard = self.shards[(key % self.shards.len() as u64) as usize].lock();
        if let Some(flight) = shard.filling.get(&key)
            && flight.result().is_none()
        {
            return flight.clone();
        }
        let (flight, landing) = Flight::start();
        shard.filling.insert(key, flight.clone());
        drop(shard);
        let (this, task) = (self.clone(), cx.detached());
        cx.spawn(async move {
            let made = this.fill(&task, key).await.map(|words| Arc::new(Region::new(key, words)));
            let mut shard = this.shards[(key % this.shards.len() as u64) as usize].lock();
            shard.filling.remove(&key);
            if let Ok(region) = &made {
                let most = BUDGET / (REGION_UNITS as usize * 8) / this.shards.len();
                while shard.ring.len() >= most {
                    let Some(old) = shard.ring.evict() else { break };
                    this.index.set(old.key, None);
                }
                this.index.set(key, Some(region.clone()));
                shard.ring.push(region.clone());
            }
            drop(shard);
            landing.land(made);
        });
        flight
    }

    async fn fill(&self, cx: &Cx, key: u64) -> IoResult<Vec<u64>> {
        let region = self.region_range(key);
        let known: Vec<Mutex<Option<Known>>> = self.layers.iter().map(|_| Mutex::new(None)).collect();
        let loads = self.layers.iter().zip(&known).map(|(layer, known)| async move {
            let part = clip(region, layer.size());
            if !part.is_empty() {
                let l1 = layer.l1_table(cx).await?;
                let (window, _) = layer.window(cx, &l1, part).await?;
                *known.lock() = Some((l1, window));
            }
            Ok(())
        });
        join_bounded(loads, LAYERS_AT_ONCE).await?;
        let units = region.len.div_ceil(1 << self.unit_bits);
        let mut places: Vec<Option<Place>> = vec![None; units as usize];
        for (number, (layer, known)) in self.layers.iter().zip(known).enumerate() {
            let known = known.into_inner();
            self.ask(layer, number, known.as_ref(), region, &mut places);
            if places.iter().all(Option::is_some) {
                break;
            }
        }
        let rest = if self.base().is_some() { Place::Base } else { Place::Zero };
        Ok(places.into_iter().map(|p| encode(p.unwrap_or(rest))).collect())
    }

    /// Fills in what layer `number` says about the units that no layer above it has.
    fn ask(
        &self,
        layer: &Image,
        number: usize,
        known: Option<&Known>,
        region: ByteRange,
        places: &mut [Option<Place>],
    ) {
        let unit = 1u64 << self.unit_bits;
        let part = clip(region, layer.size());
        let mut index = 0;
        while index < places.len() {
            if places[index].is_some() {
                index += 1;
                continue;
            }
            let start = region.offset + ((index as u64) << self.unit_bits);
            let unit_end = (start + unit).min(region.end());
            if start >= part.end() {
                places[index] = Some(Place::Zero);
                index += 1;
                continue;
            }
            if unit_end > part.end() {
                // The layer ends inside the unit.
                places[index] = Some(Place::Ask);
                index += 1;
                continue;
            }
            let rest = ByteRange { offset: start, len: part.end() - start };
            let found = known.and_then(|(l1, window)| map(&layer.layout, l1, window, rest).ok());
            let Some(found) = found else {
                // Damage: whoever reads it is told by the layer.
                places[index] = Some(Place::Ask);
                index += 1;
                continue;
            };
            // Whole units only: a run is as long as (sub)clusters are, and at least one unit, unless the layer ends there.
            let end = index + (found.range.len >> self.unit_bits).max(1) as usize;
            for (at, place) in places.iter_mut().enumerate().take(end).skip(index) {
                if place.is_none() {
                    let ahead = ((at - index) as u64) << self.unit_bits;
                    *place = match found.run {
                        Run::Unallocated => None,
                        Run::Zero(_) => Some(Place::Zero),
                        Run::Data(host) => host.checked_add(ahead).map(|host| Place::Data(number, host)),
                        Run::Compressed(_) => Some(Place::Ask),
                    };
                }
            }
            index = end;
        }
    }
}

/// The part of `range` that lies in a layer of `size` bytes; empty if there is none.
fn clip(range: ByteRange, size: u64) -> ByteRange {
    ByteRange { offset: range.offset, len: size.saturating_sub(range.offset).min(range.len) }
}
