//! Servers that offer disks to the outside.
//!
//! Life of a server: it listens from `start` on, has exports added and removed while it runs, and ends with `stop` (or by being dropped): the
//! listener is closed first, so that nobody new comes; then each connection takes no more requests, finishes what it has begun, within a
//! bound, and its thread is joined. An export is a name for a [`crate::graph::Disk`]; requests of clients enter the graph through it like those of
//! any other user, so filters come and go below a connected client.
//!
//! Exports use the public Rust API of the engine (and the wire structures of `io/nbd`) only; nothing below knows them.

pub mod nbd;
