//! The raw format: a window of its file.

use crate::error::{IoError, IoResult, Result};
use crate::graph::OpenCx;
use crate::node::{Edge, Extent, Growth, Limits, Node, NodeFuture, Plan, Reservation, fixed_size};
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
    /// As given; without it the window reaches to the end of the file, wherever that is.
    size: Option<u64>,
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
        if size.is_some_and(|size| size > rest) {
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
        // A window that does not start at a multiple of the alignment makes every request unaligned below, whatever is said here; clusters are no longer
        // where a copy would look for them.
        let cluster =
            if self.offset.is_multiple_of(u64::from(below.cluster).max(1)) { below.cluster } else { 0 };
        Limits {
            size: self.size.unwrap_or(below.size.saturating_sub(self.offset)),
            read_only: below.read_only || self.read_only,
            cluster,
            ..below
        }
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

    fn resize<'a>(&'a self, cx: &'a Cx, size: u64, growth: Growth) -> NodeFuture<'a, IoResult> {
        let below = size.checked_add(self.offset).filter(|_| self.size.is_none() && !self.read_only);
        let Some(below) = below else { return fixed_size() };
        Box::pin(async move {
            let file = self.file.node();
            file.resize(cx, below, growth).await
        })
    }

    fn settle<'a>(&'a self, cx: &'a Cx) -> NodeFuture<'a, IoResult> {
        Box::pin(async move {
            let file = self.file.node();
            file.settle(cx).await
        })
    }

    fn get(&self, key: &str) -> Option<String> {
        match key {
            "offset" => Some(self.offset.to_string()),
            "size" => Some(self.limits().size.to_string()),
            "read-only" => Some(if self.read_only { "on" } else { "off" }.to_owned()),
            _ => None,
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;
    use crate::graph::Graph;
    use crate::node::Vertex;
    use crate::queue::testing;
    use crate::request::{Buffers, Flags};

    fn open(graph: &Arc<Graph>, text: &str) -> Result<Arc<Vertex>> {
        graph.open(Options::parse(text).expect("options"))
    }

    #[test]
    fn every_operation_reaches_the_window_and_nothing_else() {
        let graph = Graph::new(testing::env(0));
        let below = open(&graph, "driver=memory,size=1M,node-name=below").expect("it opens").top_node();
        let raw = open(&graph, "driver=raw,offset=128k,size=256k,file=below").expect("it opens").top_node();
        assert_eq!(raw.limits().size, 256 << 10);
        testing::block_on(graph.env(), |cx| async move {
            let data = Buffers::alloc(1 << 20, 4096);
            data.fill(9);
            cx.run(&*below, Request::write(0, data)).await.expect("written");
            let ones = Buffers::alloc(1000, 8);
            ones.fill(1);
            cx.run(&*raw, Request::write(100, ones)).await.expect("written");
            let zeroes = ByteRange { offset: 5000, len: 1000 };
            cx.run(&*raw, Request::write_zeroes(zeroes, Flags::empty())).await.expect("zeroed");
            cx.run(&*raw, Request::discard(ByteRange { offset: 64 << 10, len: 192 << 10 }))
                .await
                .expect("discarded");
            cx.run(&*raw, Request::flush()).await.expect("flushed");
            let all = Buffers::alloc(1 << 20, 8);
            cx.run(&*below, Request::read(0, all.clone())).await.expect("read");
            let mut expected = vec![9u8; 1 << 20];
            let base = 128 << 10;
            expected[base + 100..base + 1100].fill(1);
            expected[base + 5000..base + 6000].fill(0);
            expected[base + (64 << 10)..base + (256 << 10)].fill(0);
            assert!(all.to_vec() == expected);
            let window = Buffers::alloc(256 << 10, 8);
            cx.run(&*raw, Request::read(0, window.clone())).await.expect("read");
            assert!(window.to_vec() == expected[base..base + (256 << 10)]);
            let e = cx.status(&*raw, ByteRange { offset: 64 << 10, len: 192 << 10 }).await.expect("status");
            assert_eq!(e, Extent::hole(192 << 10));
            let e = cx
                .run(&*raw, Request::read(256 << 10, Buffers::alloc(1, 1)))
                .await
                .expect_err("past the end");
            assert_eq!(e.code, Code::OutOfRange);
        });
    }

    #[test]
    fn windows_that_do_not_lie_in_the_file_and_writes_to_a_read_only_one_are_refused() {
        let graph = Graph::new(testing::env(0));
        for (text, named) in [
            ("driver=raw,offset=2M,file.driver=memory,file.size=1M", "offset"),
            ("driver=raw,offset=512k,size=513k,file.driver=memory,file.size=1M", "size"),
            ("driver=raw", "file"),
            ("driver=raw,sice=1,file.driver=memory,file.size=1M", "sice"),
        ] {
            let e = open(&graph, text).expect_err(named);
            assert!(e.full_text().contains(named), "{}", e.full_text());
        }
        let raw = open(&graph, "driver=raw,read-only=on,file.driver=memory,file.size=1M")
            .expect("it opens")
            .top_node();
        assert_eq!((raw.limits().size, raw.limits().read_only), (1 << 20, true));
        let e = testing::block_on(graph.env(), |cx| async move {
            cx.run(&*raw, Request::write(0, Buffers::alloc(1, 1))).await.expect_err("read-only")
        });
        assert_eq!(e.code, Code::ReadOnly);
    }
}
