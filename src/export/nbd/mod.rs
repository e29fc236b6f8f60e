//! NBD server: fixed newstyle handshake, structured replies, block status.
//!
//! One thread accepts ([`server`]); each connection has a thread and a [`crate::queue::Queue`] of its own on the export's disk. The thread sleeps in
//! poll on three descriptors: the socket, the queue's event fd, and an event fd by which the server speaks to it. Nothing is shared between
//! connections but the list of exports and a counter of bytes, so a client that is slow, silent or malicious keeps only itself waiting.
//!
//! Bounds (all in [`crate::limits`]). A read or write is carried out in pieces of at most 1 MiB, each in a pooled buffer. A
//! connection always gets 2 MiB, and more, up to 32 MiB, as long as what all connections share lasts ([`pool`]). Without memory, with 128 commands in flight,
//! or with too many unsent replies, it stops reading its socket. So memory is bounded by connections x 2 MiB + 256 MiB, and progress needs
//! nobody else's: what a connection waits for is always its own. The handshake is limited in time, in number of options and in their length.
//!
//! Data path. Write payload goes from the socket into the aligned buffer that the disk's write uses; read data goes from the buffer of the
//! disk's read to the socket; whatever has to be sent goes out in one system call per round.
//!
//! Not guaranteed: the order of replies; a read or write of more than one piece is not atomic towards overlapping requests (the protocol promises neither).
//!
//! Pure parts, without sockets and without a disk: [`handshake`] and [`option`] (bytes in, bytes out), [`command`] (header in, verdict out),
//! [`reply`] (encoding, output queue), [`meta`] (extents). `unsafe` only in [`sys`].
//!
//! Locks: [`server`] has one, for exports and the list of connections; it is a leaf lock. Start reading at `connection.rs`.

mod command;
mod connection;
mod handshake;
mod meta;
mod net;
mod option;
mod pool;
mod reply;
mod server;
mod session;
mod sys;
#[cfg(test)]
mod tests;

pub use net::{Address, Listener};
pub use server::{Export, Removal, Server};

/// Entry points for fuzzing: any bytes, no panic, bounded memory.
pub mod fuzz {
    pub use super::command::fuzz as command;
    pub use super::handshake::fuzz as handshake;
}
