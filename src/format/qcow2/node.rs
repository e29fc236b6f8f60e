//! The driver's node: requests to what carries them out.

use super::image::Image;
use super::map::Run;
use crate::error::{IoError, IoResult, Result};
use crate::node::{Edge, Extent, ExtentFlags, Growth, Limits, Node, NodeFuture, Plan, fixed_size};
use crate::queue::Cx;
use crate::request::{Op, ReqRef, Request};
use crate::sync::Arc;
use crate::units::ByteRange;
use std::any::Any;

/// A qcow2 image as a node.
#[derive(Debug)]
pub struct Qcow2Node {
    image: Arc<Image>,
}

impl Qcow2Node {
    /// A node over an open image.
    pub fn new(image: Arc<Image>) -> Self {
        Self { image }
    }

    /// The image.
    pub fn image(&self) -> &Arc<Image> {
        &self.image
    }

    /// What [`super::check`] finds in the image's file, as JSON; of a writable image after everything in RAM has been written.
    pub async fn check_json(&self, cx: &Cx) -> Result<String> {
        super::describe::check(cx, &self.image).await.map(|value| value.to_string())
    }

    async fn status(&self, cx: &Cx, range: ByteRange) -> IoResult<Extent> {
        let mut range = range;
        let staged = self.image.writer.get().and_then(|w| w.stages.overlapping(range).into_iter().next());
        if let Some(stage) = staged {
            if stage.guest <= range.offset {
                let end = (stage.guest + self.image.layout.cluster_size()).min(range.end());
                return Ok(Extent::data(end - range.offset));
            }
            range.len = stage.guest - range.offset;
        }
        let found = self.image.mapped(cx, range).await?;
        let len = found.range.len;
        let flags = match found.run {
            Run::Data(_) => ExtentFlags::ALLOCATED,
            Run::Zero(_) => ExtentFlags::ALLOCATED | ExtentFlags::ZERO,
            Run::Compressed(_) => ExtentFlags::ALLOCATED | ExtentFlags::COMPRESSED,
            Run::Unallocated => {
                let Some(below) = self.image.backing().map(Edge::node) else { return Ok(Extent::hole(len)) };
                let size = below.limits().size;
                // Past the end of a short layer it is this one that answers (qcow2.md section 6).
                if range.offset >= size {
                    return Ok(Extent::hole(len));
                }
                let part = ByteRange { offset: range.offset, len: len.min(size - range.offset) };
                let mut extent = match self.image.chain() {
                    Some(chain) => chain.status(cx, part).await?,
                    None => cx.status(&*below, part).await?,
                };
                extent.depth = extent.depth.saturating_add(1);
                return Ok(extent);
            }
        };
        Ok(Extent { len, flags, depth: 0 })
    }
}

impl Node for Qcow2Node {
    fn driver(&self) -> &'static str {
        "qcow2"
    }

    fn limits(&self) -> Limits {
        let below = self.image.data().get().limits();
        Limits {
            size: self.image.size(),
            discard_align: self.image.layout.cluster_size() as u32,
            read_only: !self.image.is_writable(),
            fast_zeroes: self.image.layout.version > 2,
            cluster: self.image.layout.cluster_size() as u32,
            zero_init: false,
            ..below
        }
    }

    fn children(&self) -> Vec<(&'static str, &Edge)> {
        let mut list = vec![("file", &*self.image.file)];
        list.extend(self.image.data_file.as_ref().map(|edge| ("data-file", edge)));
        list.extend(self.image.backing().map(|edge| ("backing", edge)));
        list
    }

    fn plan(&self, req: ReqRef<'_>) -> Plan {
        match req.op {
            Op::Read => self.image.plan_read(req),
            Op::Write => self.image.plan_write(req),
            Op::Flush => self.image.plan_flush(req),
            Op::WriteZeroes | Op::Discard if self.image.is_writable() => Plan::Slow,
            Op::WriteZeroes | Op::Discard => Plan::Done(Err(IoError::read_only())),
        }
    }

    fn execute<'a>(&'a self, cx: &'a Cx, req: Request) -> NodeFuture<'a, IoResult> {
        Box::pin(async move {
            match req.op {
                Op::Read => self.image.read_staged(cx, req).await,
                Op::Write => self.image.write(cx, req).await,
                Op::Flush => self.image.flush(cx).await,
                Op::WriteZeroes => self.image.write_zeroes(cx, req).await,
                Op::Discard => self.image.discard(cx, req).await,
            }
        })
    }

    fn block_status<'a>(&'a self, cx: &'a Cx, range: ByteRange) -> NodeFuture<'a, IoResult<Extent>> {
        Box::pin(self.status(cx, range))
    }

    fn settle<'a>(&'a self, cx: &'a Cx) -> NodeFuture<'a, IoResult> {
        Box::pin(self.image.settle(cx))
    }

    fn resize<'a>(&'a self, _cx: &'a Cx, _size: u64, _growth: Growth) -> NodeFuture<'a, IoResult> {
        fixed_size()
    }

    fn get(&self, key: &str) -> Option<String> {
        match key {
            "size" => Some(self.image.size().to_string()),
            "cluster-size" => Some(self.image.layout.cluster_size().to_string()),
            "read-only" => Some(if self.image.is_writable() { "off" } else { "on" }.to_owned()),
            "info" => Some(super::describe::info(&self.image).to_string()),
            "statistics" => Some(super::describe::statistics(&self.image).to_string()),
            _ => None,
        }
    }

    fn last_error(&self) -> Option<String> {
        self.image.last_error.lock().clone()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
