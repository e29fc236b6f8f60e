//! Metadata contexts: which there are, and the extents of `base:allocation`.

use crate::error::{Code, IoError, IoResult};
use crate::io::nbd::proto::{CONTEXT_ALLOCATION, StateFlags};
use crate::limits::NBD_EXTENTS_MAX;
use crate::node::{Extent, ExtentFlags, Node};
use crate::queue::{Cx, TaskOp, TaskResult};
use crate::sync::{Arc, Mutex};
use crate::units::ByteRange;

/// Our number of `base:allocation`.
pub(super) const ALLOCATION_ID: u32 = 0;

/// Whether a query names `base:allocation`. Wildcards (nothing, or the bare namespace) are for listing only.
pub(super) fn names_allocation(query: &str, listing: bool) -> bool {
    query == CONTEXT_ALLOCATION || (listing && (query.is_empty() || query == "base:"))
}

/// An extent as a reply carries it: length (at least 1) and status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WireExtent {
    pub(super) len: u32,
    pub(super) state: StateFlags,
}

/// Where a status task leaves its extents.
pub(super) type ExtentSlot = Arc<Mutex<Vec<WireExtent>>>;

/// A task that collects the extents of `range` (not empty, at most `u32::MAX` bytes): the whole range, or as much as fits into a reply, or a single
/// extent if `one`. They are in `slot` when it completes with 0.
pub(super) fn status_task(range: ByteRange, one: bool, slot: ExtentSlot) -> TaskOp {
    Box::new(move |cx, node| {
        Box::pin(async move {
            let result = match node {
                Some(node) => collect(&cx, &*node, range, one).await,
                None => Err(IoError::new(libc::ENOMEDIUM, Code::NoMedium)),
            };
            match result {
                Ok(extents) => {
                    *slot.lock() = extents;
                    TaskResult::ok(0, false)
                }
                Err(e) => e.into(),
            }
        })
    })
}

async fn collect(cx: &Cx, node: &dyn Node, range: ByteRange, one: bool) -> IoResult<Vec<WireExtent>> {
    let mut list = ExtentList::default();
    let mut at = range.offset;
    while at < range.end() {
        let left = ByteRange { offset: at, len: range.end() - at };
        let extent = cx.status(node, left).await?;
        // A node that answers with nothing, or with too much, must not make this loop for ever or the reply lie.
        let len = extent.len.clamp(1, left.len);
        if !list.push(len, state_of(extent), one) {
            break;
        }
        at += len;
    }
    Ok(list.extents)
}

/// Extents with equal neighbours merged.
#[derive(Debug, Default)]
struct ExtentList {
    extents: Vec<WireExtent>,
}

impl ExtentList {
    /// Adds `len` bytes; false if that would take another extent and there must not be one.
    fn push(&mut self, len: u64, state: StateFlags, one: bool) -> bool {
        // A reply describes at most as many bytes as the request asked for, which had 32 bits for it.
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        if let Some(last) = self.extents.last_mut()
            && last.state == state
        {
            last.len = last.len.saturating_add(len);
            return true;
        }
        if self.extents.len() >= if one { 1 } else { NBD_EXTENTS_MAX } {
            return false;
        }
        self.extents.push(WireExtent { len, state });
        true
    }
}

/// The status of an extent. What cannot be read (released, lost) is told as allocated data: whoever reads it gets the error.
fn state_of(extent: Extent) -> StateFlags {
    if extent.flags.contains(ExtentFlags::NO_ACCESS) {
        return StateFlags::empty();
    }
    let mut state = StateFlags::empty();
    state.set(StateFlags::ZERO, extent.flags.contains(ExtentFlags::ZERO));
    // A hole that does not read as zeros has undefined content in the protocol, which ours never has.
    let hole = extent.is_zero() && !extent.flags.contains(ExtentFlags::ALLOCATED);
    state.set(StateFlags::HOLE, hole);
    state
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcards_list_but_do_not_select() {
        for (query, listed, selected) in [
            ("base:allocation", true, true),
            ("base:", true, false),
            ("", true, false),
            ("base:alloc", false, false),
            ("base:allocation2", false, false),
            ("qemu:", false, false),
        ] {
            assert_eq!(names_allocation(query, true), listed, "{query}");
            assert_eq!(names_allocation(query, false), selected, "{query}");
        }
    }

    #[test]
    fn status_bits_say_only_what_is_known() {
        let hole = StateFlags::HOLE | StateFlags::ZERO;
        assert_eq!(state_of(Extent::data(1)), StateFlags::empty());
        assert_eq!(state_of(Extent::hole(1)), hole);
        let flags = ExtentFlags::ZERO | ExtentFlags::ALLOCATED;
        assert_eq!(state_of(Extent { len: 1, flags, depth: 0 }), StateFlags::ZERO);
        assert_eq!(state_of(Extent { len: 1, flags: ExtentFlags::empty(), depth: 0 }), StateFlags::empty());
        let flags = ExtentFlags::ZERO | ExtentFlags::NO_ACCESS;
        assert_eq!(state_of(Extent { len: 1, flags, depth: 0 }), StateFlags::empty());
    }

    #[test]
    fn equal_neighbours_merge_and_the_list_is_bounded() {
        let (data, hole) = (StateFlags::empty(), StateFlags::HOLE | StateFlags::ZERO);
        let mut list = ExtentList::default();
        assert!(list.push(5, data, true) && list.push(7, data, true) && !list.push(1, hole, true));
        assert_eq!(list.extents, [WireExtent { len: 12, state: data }]);
        let mut list = ExtentList::default();
        for i in 0..NBD_EXTENTS_MAX {
            assert!(list.push(1, if i % 2 == 0 { data } else { hole }, false));
        }
        assert!(!list.push(1, data, false));
        assert_eq!(list.extents.len(), NBD_EXTENTS_MAX);
    }
}
