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

/// Connections of one NBD server unless the user says otherwise.
pub const NBD_CONNECTIONS_DEFAULT: usize = 100;
/// Most connections of one NBD server, whatever the user says.
pub const NBD_CONNECTIONS_MAX: usize = 4096;
/// Exports of one NBD server.
pub const NBD_EXPORTS_MAX: usize = 1024;
/// Longest data of an NBD option that is looked at.
pub const NBD_OPTION_LEN_MAX: u32 = 64 << 10;
/// Longest data of an NBD option that is skipped and answered; beyond it the connection is closed.
pub const NBD_OPTION_SKIP_MAX: u32 = 1 << 20;
/// Options of one NBD handshake.
pub const NBD_OPTIONS_MAX: usize = 1024;
/// Longest NBD read or write, in bytes; advertised to clients.
pub const NBD_PAYLOAD_MAX: u32 = 32 << 20;
/// Piece in which NBD reads and writes are carried out, in bytes.
pub const NBD_PIECE_LEN: usize = 1 << 20;
/// NBD commands in flight on one connection.
pub const NBD_COMMANDS_MAX: usize = 128;
/// Pieces in flight on one connection.
pub const NBD_PIECES_MAX: usize = 256;
/// Data buffers that a connection can always have, in bytes.
pub const NBD_BYTES_OWN: usize = 2 << 20;
/// Data buffers that one connection may have, in bytes.
pub const NBD_BYTES_CONNECTION_MAX: usize = 32 << 20;
/// Data buffers that the connections of one server share above their own, in bytes.
pub const NBD_BYTES_SHARED: usize = 256 << 20;
/// Extents of one block-status reply.
pub const NBD_EXTENTS_MAX: usize = 2048;
/// Unsent reply headers of one connection, in bytes, from which on no command is taken.
pub const NBD_BACKLOG_MAX: usize = 256 << 10;

// A connection that holds nothing can always get the memory of a piece, or it could wait for ever.
const _: () = assert!(NBD_PIECE_LEN <= NBD_BYTES_OWN && NBD_BYTES_OWN <= NBD_BYTES_CONNECTION_MAX);
const _: () = assert!(NBD_PIECE_LEN as u64 <= BATCH_LEN && (NBD_PAYLOAD_MAX as u64) <= REQUEST_LEN_MAX);
const _: () = assert!(NBD_COMMANDS_MAX <= NBD_PIECES_MAX && NBD_PIECES_MAX <= QUEUE_DEPTH_MAX as usize);
const _: () = assert!(NBD_OPTION_LEN_MAX <= NBD_OPTION_SKIP_MAX);
