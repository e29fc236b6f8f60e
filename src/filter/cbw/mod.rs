//! copy-before-write: keeps the disk as it was at one instant while the guest goes on writing.
//!
//! The filter stands above the source `S`. Before a guest write, write-zeroes or discard reaches a granule of `S` for the first time, the granule's old data is
//! read and written to the node `target`; with a RAM cache as the target that write is done when the data is in memory, so the guest waits for one read of
//! `S` and for nothing else. Where the target keeps the data (RAM, spill file, disk) is the target's business: the filter knows that a granule is *preserved*.
//!
//! # State of a granule
//!
//! One byte each (`state.rs`): NEEDED -> READING -> PRESERVED, or RELEASED, or LOST; and the mark CLEAR, the only thing the fast path looks at (S71): the
//! granule has left NEEDED *and* the snapshot reads registered at `S` before that have ended. Chunks of states are made when
//! one of their granules first leaves NEEDED, so starting costs next to nothing whatever the size of the disk (S59).
//!
//! # Who waits for whom
//!
//! Everything that orders requests is an entry of one in-flight list (`fence.rs`):
//! - COPY over the granules that are being read or, without a cache, written. It belongs to the copy, not to the request that caused it: the copy runs in the
//!   request's task, and a request that gives up (timeout, cancel) leaves it running as a task of its own (S8). Writers that meet READING wait for the entry,
//!   then look again.
//! - FROZEN over a piece of at most 1 MiB that a snapshot read, or a status call, takes from `S`, for the time of that call (S5). The reader registers first and
//!   then looks at the states; the writer publishes the state first and then looks for readers; the list fences both (S15).
//!
//! Space at the target is reserved before anything is claimed and before the read (S41, S43): a request that waits for space holds no claim. Nobody
//! waits for a fence while holding a claim. So every wait ends with the I/O of others, with the guest's limit, or with the end of the snapshot.
//!
//! # Background copies
//!
//! A job's copy ([`CbwNode::copy`]) lets guests go when its read is done (S7). Its data stays readable in `transit.rs` until the target has it; a write that fails
//! is tried again from there, because a granule that guests may have passed is never NEEDED again (S72).
//!
//! # When it goes wrong
//!
//! `policy.rs` decides, once, what an error means (S27, S28, S30); a broken snapshot stops copying at once, lets everybody go, and every later request passes (S29).
//! A copy that comes late finds the granule LOST, or the snapshot broken, and is dropped; a snapshot read that writers did not wait for finds the mark, and
//! chooses again (S34). A panic in a copy is a failure of the backup, never of the guest (C17).
//!
//! # Not guaranteed
//!
//! The filter orders no guest requests among each other. After a crash the snapshot is gone and `S` is as the guest wrote it (S25). A target that has `S` as its
//! backing file needs a cache between (S17).
//!
//! Locks: those of `transit`, `readahead`, the event and the logs, all leaf locks, none held across an await.
//!
//! Start reading at `guest.rs` (what a guest write does), then `copy.rs`, then `access.rs` (the view). `docs/design/cbw.md` has the options that were dropped.

mod access;
mod copy;
mod fence;
mod geometry;
mod guest;
#[cfg(test)]
mod model_tests;
mod node;
mod options;
#[cfg(test)]
mod order_tests;
mod point;
mod policy;
mod readahead;
mod state;
mod stats;
#[cfg(test)]
mod tests;
mod transit;

pub use access::{ACCESS_PROPS, SnapshotAccess};
pub use copy::{CopyError, CopyOutcome};
pub use node::CbwNode;
pub use options::{CBW_PROPS, CbwOptions, DiscardPolicy, LossScope, OnCbwError};
