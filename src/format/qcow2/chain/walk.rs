//! Reads and status through the chain: by the map, and by asking the layers in turn where the map says so. Loops, not recursion: depth costs no stack.

use super::super::image::Image;
use super::super::join::join_bounded;
use super::super::map::Run;
use super::super::meta_io::read_at;
use super::{ChainMap, Place};
use crate::error::IoResult;
use crate::node::{Edge, Extent, ExtentFlags};
use crate::queue::Cx;
use crate::request::{Buffers, Class, Request};
use crate::sync::Arc;
use crate::units::ByteRange;

/// Pieces that are read at a time.
const PIECES: usize = 64;

impl ChainMap {
    /// Reads the bytes from `offset` on, as the image above sees the chain.
    pub(in super::super) async fn read(
        self: &Arc<Self>,
        cx: &Cx,
        offset: u64,
        bufs: &Buffers,
        class: Class,
    ) -> IoResult {
        let inside = self.size.saturating_sub(offset).min(bufs.len() as u64);
        bufs.fill_range(inside as usize, bufs.len() - inside as usize, 0);
        let mut at = offset;
        while at < offset + inside {
            let key = self.region_key(at);
            let region = self.region(cx, key).await?;
            let end = self.region_range(key).end().min(offset + inside);
            let pieces = std::iter::from_fn(|| {
                let rest = ByteRange { offset: at, len: end - at };
                (!rest.is_empty()).then(|| {
                    let (place, range) = region.look(self.unit_bits, rest);
                    at = range.end();
                    (place, range)
                })
            });
            let pieces: Vec<(Place, ByteRange)> = pieces.collect();
            let reads = pieces.into_iter().map(|(place, range)| {
                let part = bufs.slice((range.offset - offset) as usize, range.len as usize);
                self.read_place(cx, place, range, part, class)
            });
            join_bounded(reads, PIECES).await?;
        }
        Ok(())
    }

    async fn read_place(
        &self,
        cx: &Cx,
        place: Place,
        range: ByteRange,
        bufs: Buffers,
        class: Class,
    ) -> IoResult {
        match place {
            Place::Zero => {
                bufs.fill(0);
                Ok(())
            }
            Place::Data(layer, host) => {
                let data = self.layers[layer].data().node();
                read_at(cx, &*data, host, &bufs, class).await
            }
            Place::Base => self.read_base(cx, range.offset, bufs, class).await,
            Place::Ask => self.ask_layers(cx, range, bufs, class).await,
        }
    }

    /// Reads what lies below the layers; zeros past its end.
    async fn read_base(&self, cx: &Cx, offset: u64, bufs: Buffers, class: Class) -> IoResult {
        let node = self.base().map(Edge::node);
        let size = node.as_ref().map_or(0, |n| n.limits().size);
        let inside = size.saturating_sub(offset).min(bufs.len() as u64) as usize;
        bufs.fill_range(inside, bufs.len() - inside, 0);
        match node {
            Some(node) if inside > 0 => {
                cx.run(&*node, Request::read(offset, bufs.slice(0, inside)).class(class)).await
            }
            _ => Ok(()),
        }
    }

    /// Reads by asking the layers from the top down, byte by byte as exact as they answer.
    async fn ask_layers(&self, cx: &Cx, range: ByteRange, bufs: Buffers, class: Class) -> IoResult {
        // What is left to be found, with the layer to ask next.
        let mut left = vec![(0, range)];
        while let Some((number, part)) = left.pop() {
            let to = bufs.slice((part.offset - range.offset) as usize, part.len as usize);
            let Some(layer) = self.layers.get(number) else {
                self.read_base(cx, part.offset, to, class).await?;
                continue;
            };
            let inside = layer.size().saturating_sub(part.offset).min(part.len);
            to.fill_range(inside as usize, (part.len - inside) as usize, 0);
            if inside == 0 {
                continue;
            }
            let asked = ByteRange { offset: part.offset, len: inside };
            let found = layer.mapped(cx, asked).await?;
            let rest = ByteRange { offset: found.range.end(), len: asked.end() - found.range.end() };
            if !rest.is_empty() {
                left.push((number, rest));
            }
            match found.run {
                Run::Unallocated => left.push((number + 1, found.range)),
                _ => layer.read_held(cx, found, to.slice(0, found.range.len as usize), class).await?,
            }
        }
        Ok(())
    }

    /// Status of the start of `range`, which lies in the chain; `depth` counts from the first layer of the chain.
    pub(in super::super) async fn status(&self, cx: &Cx, range: ByteRange) -> IoResult<Extent> {
        let mut part = range;
        for (depth, layer) in self.layers.iter().enumerate() {
            let depth = depth as u32;
            let above = depth.saturating_sub(1);
            let Some(asked) = within(part, layer) else {
                return Ok(Extent { depth: above, ..Extent::hole(part.len) });
            };
            let found = layer.mapped(cx, asked).await?;
            part = found.range;
            let flags = match found.run {
                Run::Unallocated => continue,
                Run::Data(_) => ExtentFlags::ALLOCATED,
                Run::Zero(_) => ExtentFlags::ALLOCATED | ExtentFlags::ZERO,
                Run::Compressed(_) => ExtentFlags::ALLOCATED | ExtentFlags::COMPRESSED,
            };
            return Ok(Extent { len: part.len, flags, depth });
        }
        let lowest = self.layers.len() as u32 - 1;
        let Some(node) = self.base().map(Edge::node) else {
            return Ok(Extent { depth: lowest, ..Extent::hole(part.len) });
        };
        let size = node.limits().size;
        if part.offset >= size {
            return Ok(Extent { depth: lowest, ..Extent::hole(part.len) });
        }
        let asked = ByteRange { offset: part.offset, len: part.len.min(size - part.offset) };
        let extent = cx.status(&*node, asked).await?;
        Ok(Extent { depth: extent.depth + lowest + 1, ..extent })
    }
}

/// The part of `range` inside the layer, if there is one.
fn within(range: ByteRange, layer: &Image) -> Option<ByteRange> {
    let inside = layer.size().saturating_sub(range.offset).min(range.len);
    (inside > 0).then_some(ByteRange { offset: range.offset, len: inside })
}
