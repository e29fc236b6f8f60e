//! `passthrough`: does nothing. The template that a new filter is copied from.
//!
//! What every filter has to decide, method by method:
//! - `plan`: let a request pass by returning the child's plan for it, or return [`Plan::Slow`] and get it again in `execute`. A plan
//!   may be thrown away and asked for again, so side effects (a count, a token) belong into `execute` or must be taken back.
//! - `execute`: run the request on the child with [`Cx::run`], which checks the range and asks for the child's plan first. Any
//!   operation that the filter does not know what to do with is refused with ENOTSUP, never passed on (C16).
//! - The child is looked up once per request ([`Edge::node`]): filters below come and go while none is in flight.
//! - `settle` brings down what *this* node holds; the graph asks the nodes below for themselves.
//! - `reserve` passes to the child if writes reach it with their buffers unchanged, so that a `ram-cache` below keeps them
//!   without a copy (S41).
//! - Register the driver with one line in `graph/registry.rs`.

use crate::error::{IoResult, Result};
use crate::graph::OpenCx;
use crate::node::{Edge, Extent, Growth, Limits, Node, NodeFuture, Plan, Reservation};
use crate::options::props::REQUIRED;
use crate::options::{Options, Prop, PropStates, PropTable, PropType};
use crate::queue::Cx;
use crate::request::{Class, Op, ReqRef, Request};
use crate::sync::Arc;
use crate::units::ByteRange;
use std::any::Any;

/// A filter that changes nothing.
#[derive(Debug)]
pub struct Passthrough {
    file: Edge,
}

impl Passthrough {
    /// A filter above `file`.
    pub fn new(file: Edge) -> Arc<Self> {
        Arc::new(Self { file })
    }

    /// Driver entry: takes `file`.
    pub fn open(cx: &OpenCx<'_>, mut options: Options) -> Result<Arc<dyn Node>> {
        let file = cx.require_child(&mut options, "file")?;
        options.finish_for(&PROPS)?;
        Ok(Self::new(file))
    }
}

impl Node for Passthrough {
    fn driver(&self) -> &'static str {
        "passthrough"
    }

    fn limits(&self) -> Limits {
        self.file.get().limits()
    }

    fn children(&self) -> Vec<(&'static str, &Edge)> {
        vec![("file", &self.file)]
    }

    fn plan(&self, req: ReqRef<'_>) -> Plan {
        match req.op {
            // Named one by one, so that a new operation stops this from compiling until someone has decided.
            Op::Read | Op::Write | Op::WriteZeroes | Op::Discard | Op::Flush => self.file.get().plan(req),
        }
    }

    fn execute<'a>(&'a self, cx: &'a Cx, req: Request) -> NodeFuture<'a, IoResult> {
        let child = self.file.node();
        Box::pin(async move { cx.run(&*child, req).await })
    }

    fn block_status<'a>(&'a self, cx: &'a Cx, range: ByteRange) -> NodeFuture<'a, IoResult<Extent>> {
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
    driver: "passthrough",
    props: &[Prop {
        name: "file",
        ty: PropType::Node,
        default: REQUIRED,
        states: PropStates::OPEN,
        doc: "The node below",
    }],
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::filter::testing::{Recorder, all_ops};
    use crate::queue::virtual_env::virtual_env;

    #[test]
    fn every_operation_arrives_below_unchanged_by_plan_and_by_execute() {
        for slow in [false, true] {
            let (env, _) = virtual_env(0);
            let below = Recorder::new(&env, 1 << 20);
            below.set_slow(slow);
            let node = Passthrough::new(Edge::to_node(below.clone()));
            let expected: Vec<_> = all_ops().iter().map(|r| (r.op, r.flags, r.class, r.range)).collect();
            env.block_on(|cx| async move {
                for r in all_ops() {
                    cx.run(&*node, r).await.unwrap();
                }
            })
            .unwrap();
            let seen: Vec<_> = below.seen().iter().map(|s| (s.op, s.flags, s.class, s.range)).collect();
            assert_eq!(seen, expected);
            assert_eq!(below.executed(), if slow { expected.len() } else { 0 });
        }
    }

    #[test]
    fn the_property_table_is_sound() {
        PROPS.check().unwrap();
    }

    #[test]
    fn data_and_status_are_those_of_the_node_below() {
        let (env, _) = virtual_env(0);
        let below = Recorder::new(&env, 4096);
        let node = Passthrough::new(Edge::to_node(below.clone()));
        assert_eq!(node.limits(), below.limits());
        env.block_on(|cx| async move {
            let data = crate::request::Buffers::from_bytes(b"data");
            cx.run(&*node, Request::write(100, data)).await.unwrap();
            let back = crate::request::Buffers::alloc(6, 1);
            cx.run(&*node, Request::read(99, back.clone())).await.unwrap();
            assert_eq!(back.to_vec(), b"\0data\0");
            let range = ByteRange { offset: 0, len: 4096 };
            assert_eq!(cx.status(&*node, range).await.unwrap(), Extent::data(4096));
        })
        .unwrap();
    }
}
