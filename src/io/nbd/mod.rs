//! The NBD protocol as seen from the wire.
//!
//! [`proto`] holds the structures of the protocol as pure encoding and decoding; the server (`export/nbd`) uses it, and so will a client that
//! makes a node of a remote export. Nothing here does I/O.

pub mod proto;
