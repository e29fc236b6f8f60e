//! Block status and mapping for requests and blocking calls.

use super::abi::{cobweb_extent, cobweb_mapping};
use crate::error::IoResult;
use crate::io::{FileOp, FileOpKind};
use crate::limits::BATCH_LEN;
use crate::node::{Node, Plan, check_range};
use crate::queue::Cx;
use crate::request::{Buffers, Class, Flags, Op, ReqRef};
use crate::units::ByteRange;
use std::os::fd::AsRawFd;

/// At most `max` extents from the start of `range`, neighbours of one kind joined, and whether there would be more.
pub(super) async fn extents(
    cx: &Cx,
    node: &dyn Node,
    range: ByteRange,
    max: usize,
) -> IoResult<(Vec<cobweb_extent>, bool)> {
    check_range(range, node.limits().size)?;
    let mut out: Vec<cobweb_extent> = Vec::new();
    let mut at = range.offset;
    while at < range.end() {
        let rest = ByteRange { offset: at, len: range.end() - at };
        let e = cx.status(node, rest).await?;
        let len = e.len.clamp(1, rest.len);
        let full = out.len() >= max;
        match out.last_mut() {
            Some(last) if last.flags == e.flags.bits() && last.depth == e.depth => last.len += len,
            _ if full => return Ok((out, true)),
            _ => out.push(cobweb_extent { len, flags: e.flags.bits(), depth: e.depth }),
        }
        at += len;
    }
    Ok((out, false))
}

/// Where the data of `range` lies in files: pieces of at most 1 MiB that are one plain read each. Ends early at the first piece that is not.
pub(super) fn mappings(
    node: &dyn Node,
    range: ByteRange,
    max: usize,
) -> IoResult<(Vec<cobweb_mapping>, bool)> {
    check_range(range, node.limits().size)?;
    let none = Buffers::new();
    let mut out: Vec<cobweb_mapping> = Vec::new();
    let mut at = range.offset;
    while at < range.end() {
        let piece = ByteRange { offset: at, len: BATCH_LEN.min(range.end() - at) };
        let req =
            ReqRef { op: Op::Read, flags: Flags::empty(), class: Class::Guest, range: piece, bufs: &none };
        let Plan::Io(FileOp { file, kind: FileOpKind::Read, offset, .. }) = node.plan(req) else { break };
        let fd = file.fd().as_raw_fd();
        let full = out.len() >= max;
        match out.last_mut() {
            Some(last) if last.fd == fd && last.host_offset + last.len == offset => last.len += piece.len,
            _ if full => return Ok((out, true)),
            _ => out.push(cobweb_mapping {
                offset: piece.offset,
                len: piece.len,
                host_offset: offset,
                generation: 0,
                node_id: 0,
                flags: super::abi::COBWEB_EXT_ALLOCATED,
                fd,
                rsv: 0,
            }),
        }
        at += piece.len;
    }
    Ok((out, at < range.end()))
}
