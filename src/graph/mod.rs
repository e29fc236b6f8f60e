//! Composition: disks over nodes, options to nodes, drained changes of the graph.
//!
//! A [`Disk`] is what a guest device is attached to: a stable root over a graph that changes. All requests of users enter through disks, so a
//! *drained section* ([`Graph::drained`]) over the disks that can reach a place means that no guest request is in flight there (S1). Filters go in
//! and out in drained sections; a drained section does no I/O of its own and its length does not depend on the size of a disk (S59).
//!
//! Order of locks: `Graph::names` and a disk's `queues` are leaf locks. Changes of the graph take turns ([`turn::Turn`], an async
//! lock), one change at a time.

mod counters;
mod disk;
mod images;
mod implicit;
mod network;
mod open;
mod registry;
#[cfg(test)]
mod tests;
mod turn;

pub use crate::format::qcow2::CREATE_PROPS;
pub use counters::{IoCounters, IoTotals};
pub use disk::{Disk, DiskPass};
pub use implicit::{Base, Chain, ImplicitOpen, NamedChild};
pub use network::Graph;
pub use open::{OpenCx, split_driver};
pub use registry::{DRIVERS, Driver, find_driver};
