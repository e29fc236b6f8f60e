//! `compress`: what is written through it is stored compressed, whole clusters of it and where nothing has been stored yet, by the qcow2 image below.
//!
//! A backup with `compress=on` has one above its target. Everything but the flag on writes passes unchanged, so partial clusters and clusters that are there already are written as
//! always.

use crate::error::{Error, IoResult, Result};
use crate::graph::OpenCx;
use crate::node::{Edge, Extent, Growth, Limits, Node, NodeFuture, Plan, Reservation};
use crate::options::props::REQUIRED;
use crate::options::{Options, Prop, PropStates, PropTable, PropType};
use crate::queue::Cx;
use crate::request::{Class, Flags, Op, ReqRef, Request};
use crate::sync::Arc;
use std::any::Any;

/// The filter.
#[derive(Debug)]
pub struct Compress {
    file: Edge,
}

impl Compress {
    /// A filter above `file`.
    pub fn new(file: Edge) -> Arc<Self> {
        Arc::new(Self { file })
    }

    /// Driver entry: takes `file`. Refused (ENOTSUP) above a format that does not compress.
    pub fn open(cx: &OpenCx<'_>, mut options: Options) -> Result<Arc<dyn Node>> {
        let file = cx.require_child(&mut options, "file")?;
        options.finish_for(&PROPS)?;
        let driver = file.node().driver();
        if driver != "qcow2" {
            return Err(Error::unsupported(format!("driver '{driver}' does not store anything compressed")));
        }
        Ok(Self::new(file))
    }
}

impl Node for Compress {
    fn driver(&self) -> &'static str {
        "compress"
    }

    fn limits(&self) -> Limits {
        self.file.get().limits()
    }

    fn children(&self) -> Vec<(&'static str, &Edge)> {
        vec![("file", &self.file)]
    }

    fn plan(&self, req: ReqRef<'_>) -> Plan {
        match req.op {
            Op::Write => Plan::Slow,
            Op::Read | Op::WriteZeroes | Op::Discard | Op::Flush => self.file.get().plan(req),
        }
    }

    fn execute<'a>(&'a self, cx: &'a Cx, mut req: Request) -> NodeFuture<'a, IoResult> {
        let child = self.file.node();
        if req.op == Op::Write {
            req.flags |= Flags::COMPRESS;
        }
        Box::pin(async move { cx.run(&*child, req).await })
    }

    fn block_status<'a>(
        &'a self,
        cx: &'a Cx,
        range: crate::units::ByteRange,
    ) -> NodeFuture<'a, IoResult<Extent>> {
        let child = self.file.node();
        Box::pin(async move { child.block_status(cx, range).await })
    }

    fn resize<'a>(&'a self, cx: &'a Cx, size: u64, growth: Growth) -> NodeFuture<'a, IoResult> {
        let child = self.file.node();
        Box::pin(async move { child.resize(cx, size, growth).await })
    }

    fn settle<'a>(&'a self, _cx: &'a Cx) -> NodeFuture<'a, IoResult> {
        Box::pin(async { Ok(()) })
    }

    fn reserve<'a>(&'a self, cx: &'a Cx, len: u64, class: Class) -> NodeFuture<'a, IoResult<Reservation>> {
        let child = self.file.node();
        Box::pin(async move { child.reserve(cx, len, class).await })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Options of the driver.
pub static PROPS: PropTable = PropTable {
    driver: "compress",
    props: &[Prop {
        name: "file",
        ty: PropType::Node,
        default: REQUIRED,
        states: PropStates::OPEN,
        doc: "The image that compresses",
    }],
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::filter::testing::{Recorder, all_ops};
    use crate::queue::virtual_env::virtual_env;

    #[test]
    fn writes_get_the_flag_and_all_else_arrives_unchanged() {
        let (env, _) = virtual_env(0);
        let below = Recorder::new(&env, 1 << 20);
        let node = Compress::new(Edge::to_node(below.clone()));
        let flag = |r: &Request| if r.op == Op::Write { Flags::COMPRESS } else { Flags::empty() };
        let expected: Vec<_> =
            all_ops().iter().map(|r| (r.op, r.flags | flag(r), r.class, r.range)).collect();
        env.block_on(|cx| async move {
            for r in all_ops() {
                cx.run(&*node, r).await.unwrap();
            }
        })
        .unwrap();
        let seen: Vec<_> = below.seen().iter().map(|s| (s.op, s.flags, s.class, s.range)).collect();
        assert_eq!(seen, expected);
    }

    #[test]
    fn the_property_table_is_sound() {
        PROPS.check().unwrap();
    }
}
