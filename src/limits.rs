//! Every bound of the engine, tied to the others at compile time.

/// Most requests of one queue.
pub const QUEUE_DEPTH_MAX: u32 = 4096;
/// Largest data request of a host, in bytes; longer ones are refused. Zeroes, discards and status have no such limit.
pub const REQUEST_LEN_MAX: u64 = 1 << 30;
/// One batch: the piece in which long copies reserve memory, enter in-flight lists and register at the source (S5, S44).
pub const BATCH_LEN: u64 = 1 << 20;
/// Smallest guest-facing granule.
pub const GRANULE_MIN: u64 = 4096;
/// Largest guest-facing granule.
pub const GRANULE_MAX: u64 = 64 << 20;
/// Nodes in one context.
pub const NODES_MAX: usize = 65_536;
/// Depth of a graph.
pub const GRAPH_DEPTH_MAX: usize = 1024;
/// Jobs in one context, those that have ended and not been dismissed included.
pub const JOBS_MAX: usize = 4096;
/// Events kept for the host.
pub const EVENTS_MAX: usize = 1024;

const _: () = assert!(GRANULE_MIN.is_power_of_two() && GRANULE_MAX.is_power_of_two());
const _: () = assert!(GRANULE_MIN <= BATCH_LEN);
const _: () = assert!(BATCH_LEN <= REQUEST_LEN_MAX);
