//! The raw format: a window of its file.

use crate::error::{IoError, IoResult, Result};
use crate::graph::OpenCx;
use crate::node::{Edge, Extent, Limits, Node, NodeFuture, Plan, Reservation};
use crate::options::{Options, Prop, PropStates, PropTable, PropType, props::REQUIRED};
use crate::queue::Cx;
use crate::request::{Class, Op, ReqRef, Request};
use crate::sync::Arc;
use crate::units::ByteRange;
use std::any::Any;

/// Options of the driver `raw`.
pub static RAW_PROPS: PropTable = PropTable {
    driver: "raw",
    props: &[
        prop("file", PropType::Node, REQUIRED, "the node below"),
        prop("offset", PropType::Size, "0", "first byte of the file that belongs to the disk"),
        prop("size", PropType::Size, "", "length of the disk in bytes; the rest of the file if not given"),
        prop("read-only", PropType::Bool, "off", "refuse writes"),
    ],
};

const fn prop(name: &'static str, ty: PropType, default: &'static str, doc: &'static str) -> Prop {
    Prop { name, ty, default, states: PropStates::OPEN, doc }
}

/// A window of the node below.
#[derive(Debug)]
pub struct RawNode {
    file: Edge,
    offset: u64,
    size: u64,
    read_only: bool,
}

impl RawNode {
    /// From options (see [`RAW_PROPS`]).
    pub fn open(cx: &OpenCx<'_>, mut o: Options) -> Result<Arc<dyn Node>> {
        let file = cx.require_child(&mut o, "file")?;
        let offset = o.take_size("offset")?.unwrap_or(0);
        let size = o.take_size("size")?;
        let read_only = o.take_bool("read-only")?.unwrap_or(false);
        let below = file.node().limits().size;
        let Some(rest) = below.checked_sub(offset) else {
            return Err(o.invalid("offset", "lies behind the end of the file"));
        };
        let size = size.unwrap_or(rest);
        if size > rest {
            return Err(o.invalid("size", "reaches past the end of the file"));
        }
        o.finish_for(&RAW_PROPS)?;
        Ok(Arc::new(Self { file, offset, size, read_only }))
    }

    fn shift(&self, range: ByteRange) -> ByteRange {
        ByteRange { offset: range.offset + self.offset, len: range.len }
    }
}

impl Node for RawNode {
    fn driver(&self) -> &'static str {
        "raw"
    }

    fn limits(&self) -> Limits {
        let below = self.file.get().limits();
        // A window that does not start at a multiple of the alignment makes every request unaligned below.
        Limits { size: self.size, read_only: below.read_only || self.read_only, ..below }
    }

    fn children(&self) -> Vec<(&'static str, &Edge)> {
        vec![("file", &self.file)]
    }

    fn plan(&self, req: ReqRef<'_>) -> Plan {
        if req.op.is_write() && self.read_only {
            return Plan::Done(Err(IoError::read_only()));
        }
        let at = if req.op == Op::Flush { 0 } else { req.range.offset + self.offset };
        self.file.get().plan(req.at(at))
    }

    fn execute<'a>(&'a self, cx: &'a Cx, mut req: Request) -> NodeFuture<'a, IoResult> {
        Box::pin(async move {
            if req.op.is_write() && self.read_only {
                return Err(IoError::read_only());
            }
            if req.op != Op::Flush {
                req.range = self.shift(req.range);
            }
            let file = self.file.node();
            cx.run(&*file, req).await
        })
    }

    fn block_status<'a>(&'a self, cx: &'a Cx, range: ByteRange) -> NodeFuture<'a, IoResult<Extent>> {
        Box::pin(async move {
            let file = self.file.node();
            cx.status(&*file, self.shift(range)).await
        })
    }

    fn settle<'a>(&'a self, cx: &'a Cx) -> NodeFuture<'a, IoResult> {
        Box::pin(async move {
            let file = self.file.node();
            file.settle(cx).await
        })
    }

    fn reserve<'a>(&'a self, cx: &'a Cx, len: u64, class: Class) -> NodeFuture<'a, IoResult<Reservation>> {
        Box::pin(async move {
            let file = self.file.node();
            file.reserve(cx, len, class).await
        })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
