//! The null node: does nothing, as fast as possible, or after a fixed time.

use crate::error::{IoError, IoResult, Result};
use crate::node::{Edge, Extent, Growth, Limits, Node, NodeFuture, Plan, fixed_size};
use crate::options::{Options, Prop, PropStates, PropTable, PropType};
use crate::queue::Cx;
use crate::request::{Op, ReqRef, Request};
use crate::sync::Arc;
use crate::units::ByteRange;
use std::any::Any;
use std::time::Duration;

/// Options of the driver `null-co`.
pub static NULL_PROPS: PropTable = PropTable {
    driver: "null-co",
    props: &[
        prop("size", PropType::Size, "1G", "length in bytes"),
        prop("latency-ns", PropType::Int, "0", "time each request takes, nanoseconds"),
        prop(
            "read-zeroes",
            PropType::Bool,
            "off",
            "fill the buffers of reads with zeros; off leaves them as they are",
        ),
        prop("read-only", PropType::Bool, "off", "refuse writes"),
    ],
};

const fn prop(name: &'static str, ty: PropType, default: &'static str, doc: &'static str) -> Prop {
    Prop { name, ty, default, states: PropStates::OPEN, doc }
}

/// A node that drops writes.
#[derive(Debug)]
pub struct NullNode {
    size: u64,
    latency: Duration,
    read_zeroes: bool,
    read_only: bool,
}

impl NullNode {
    /// From options (see [`NULL_PROPS`]).
    pub fn open(mut o: Options) -> Result<Arc<Self>> {
        let size = o.take_size("size")?.unwrap_or(1 << 30);
        let latency = o.take_u64("latency-ns")?.unwrap_or(0);
        let read_zeroes = o.take_bool("read-zeroes")?.unwrap_or(false);
        let read_only = o.take_bool("read-only")?.unwrap_or(false);
        if size > i64::MAX as u64 {
            return Err(o.invalid("size", "is larger than any file"));
        }
        o.finish_for(&NULL_PROPS)?;
        Ok(Arc::new(Self { size, latency: Duration::from_nanos(latency), read_zeroes, read_only }))
    }

    fn now(&self, req: ReqRef<'_>) -> Plan {
        match req.op {
            Op::Read if self.read_zeroes => Plan::Zero,
            op if op.is_write() && self.read_only => Plan::Done(Err(IoError::read_only())),
            _ => Plan::Done(Ok(())),
        }
    }
}

impl Node for NullNode {
    fn driver(&self) -> &'static str {
        "null-co"
    }

    fn limits(&self) -> Limits {
        Limits { read_only: self.read_only, ..Limits::plain(self.size) }
    }

    fn children(&self) -> Vec<(&'static str, &Edge)> {
        Vec::new()
    }

    fn plan(&self, req: ReqRef<'_>) -> Plan {
        if self.latency.is_zero() { self.now(req) } else { Plan::Slow }
    }

    fn execute<'a>(&'a self, cx: &'a Cx, req: Request) -> NodeFuture<'a, IoResult> {
        Box::pin(async move {
            cx.sleep(self.latency).await?;
            match self.now(req.as_ref()) {
                Plan::Zero => {
                    req.bufs.fill(0);
                    Ok(())
                }
                Plan::Done(result) => result,
                Plan::Io(_) | Plan::Slow => Err(IoError::invalid()),
            }
        })
    }

    fn block_status<'a>(&'a self, _cx: &'a Cx, range: ByteRange) -> NodeFuture<'a, IoResult<Extent>> {
        let extent = if self.read_zeroes { Extent::hole(range.len) } else { Extent::data(range.len) };
        Box::pin(async move { Ok(extent) })
    }

    fn resize<'a>(&'a self, _cx: &'a Cx, _size: u64, _growth: Growth) -> NodeFuture<'a, IoResult> {
        fixed_size()
    }

    fn settle<'a>(&'a self, _cx: &'a Cx) -> NodeFuture<'a, IoResult> {
        Box::pin(async { Ok(()) })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queue::virtual_env::virtual_env;
    use crate::request::Buffers;
    use crate::rt::{Clock, Instant};

    fn open(text: &str) -> Arc<NullNode> {
        NullNode::open(Options::parse(text).expect("options")).expect("it opens")
    }

    #[test]
    fn requests_end_at_once_and_reads_leave_their_buffers_unless_zeros_are_asked_for() {
        let (env, clock) = virtual_env(1);
        for (text, byte) in [("", 7), ("read-zeroes=on", 0)] {
            let node = open(text);
            assert_eq!(node.limits().size, 1 << 30);
            env.block_on(|cx| async move {
                let bufs = Buffers::alloc(512, 8);
                bufs.fill(7);
                cx.run(&*node, Request::write(0, bufs.clone())).await.expect("dropped");
                cx.run(&*node, Request::read(0, bufs.clone())).await.expect("read");
                assert_eq!(bufs.to_vec(), [byte; 512]);
            })
            .expect("it may block");
        }
        assert_eq!(clock.now(), Instant(0));
    }

    #[test]
    fn with_a_latency_each_request_takes_that_long() {
        let (env, clock) = virtual_env(1);
        let node = open("latency-ns=5000000,read-zeroes=on");
        env.block_on(|cx| async move {
            let bufs = Buffers::alloc(8, 8);
            bufs.fill(7);
            cx.run(&*node, Request::read(0, bufs.clone())).await.expect("read");
            assert!(bufs.is_zero());
            cx.run(&*node, Request::flush()).await.expect("flushed");
        })
        .expect("it may block");
        assert_eq!(clock.now(), Instant(10_000_000));
    }
}
