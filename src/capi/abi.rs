//! Structs and constants of the header. Requests, completions, extents and mappings are fixed; control structs start with
//! `struct_size` and grow at the end only (C9).

use libc::{c_char, c_int, c_void, iovec};

/// Major version of the header.
pub const COBWEB_VERSION_MAJOR: u32 = 0;
/// Minor version of the header.
pub const COBWEB_VERSION_MINOR: u32 = 1;
/// Patch version of the header.
pub const COBWEB_VERSION_PATCH: u32 = 0;

/// Threads, RAM budget, log sink, names of nodes, disks and jobs. Freed last.
pub struct cobweb_ctx {
    _private: [u8; 0],
}
/// Stable guest-facing root; the graph below may change.
pub struct cobweb_disk {
    _private: [u8; 0],
}
/// File, format, host backend, filter or snapshot view; reference counted.
pub struct cobweb_node {
    _private: [u8; 0],
}
/// Submission and completion of one host thread on one disk.
pub struct cobweb_queue {
    _private: [u8; 0],
}
/// Backup, copy, ...; belongs to the context, found by id.
pub struct cobweb_job {
    _private: [u8; 0],
}
/// Jobs to be started at one instant.
pub struct cobweb_group {
    _private: [u8; 0],
}
/// A running server.
pub struct cobweb_export {
    _private: [u8; 0],
}
/// Token of one request handed to a host backend.
pub struct cobweb_io {
    _private: [u8; 0],
}

/// Error text, owned by the caller, 256 bytes; NULL is allowed wherever one is taken.
#[repr(C)]
pub struct cobweb_error {
    /// Set by the caller to sizeof(cobweb_error).
    pub struct_size: u32,
    /// Negative errno, as returned.
    pub err: i32,
    /// Finer code, see cobweb_code_str.
    pub code: u32,
    /// 0.
    pub rsv: u32,
    /// One sentence, NUL-terminated, cut to fit.
    pub msg: [c_char; 240],
}

/// Completes at once with 0.
pub const COBWEB_OP_NOP: u16 = 0;
/// Reads `len` bytes at `offset` into `iov`.
pub const COBWEB_OP_READ: u16 = 1;
/// Writes `len` bytes at `offset` from `iov`.
pub const COBWEB_OP_WRITE: u16 = 2;
/// Makes the range read as zeros.
pub const COBWEB_OP_WRITE_ZEROES: u16 = 3;
/// The range's content is no longer needed; advisory.
pub const COBWEB_OP_DISCARD: u16 = 4;
/// Everything acknowledged before is durable afterwards.
pub const COBWEB_OP_FLUSH: u16 = 5;
/// Fills an array of cobweb_extent (`iov[0]`); the result is their number.
pub const COBWEB_OP_BLOCK_STATUS: u16 = 6;
/// Fills an array of cobweb_mapping (`iov[0]`); the result is their number.
pub const COBWEB_OP_MAP: u16 = 7;
/// Opens nodes from the option text in `iov[0]` and inserts the top one into the disk.
pub const COBWEB_OP_OPEN: u16 = 8;
/// Reserved; answers -ENOTSUP.
pub const COBWEB_OP_RESIZE: u16 = 9;
/// Reserved; answers -ENOTSUP.
pub const COBWEB_OP_DRAIN: u16 = 10;

/// Durable when the request completes.
pub const COBWEB_F_FUA: u16 = 1;
/// Write-zeroes may deallocate.
pub const COBWEB_F_MAY_UNMAP: u16 = 2;
/// Write-zeroes fails with ENOTSUP rather than write zeros slowly.
pub const COBWEB_F_NO_FALLBACK: u16 = 4;
/// The buffers lie in registered memory; a hint.
pub const COBWEB_F_REGISTERED: u16 = 8;
/// The iovec array is copied and need not stay valid.
pub const COBWEB_F_COPY_IOV: u16 = 16;

/// The queue's default: guest.
pub const COBWEB_PRIO_DEFAULT: u32 = 0;
/// The guest.
pub const COBWEB_PRIO_GUEST: u32 = 1;
/// A read that a guest waits for.
pub const COBWEB_PRIO_COPY: u32 = 2;
/// Background work.
pub const COBWEB_PRIO_BACKGROUND: u32 = 3;
/// Work that can wait.
pub const COBWEB_PRIO_LAZY: u32 = 4;
/// As the request that causes it.
pub const COBWEB_PRIO_INHERIT: u32 = 5;

/// A request; 64 bytes on LP64. Reserved fields are zero, and checked.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct cobweb_req {
    /// COBWEB_OP_*.
    pub op: u16,
    /// COBWEB_F_*.
    pub flags: u16,
    /// Elements of `iov`.
    pub iovcnt: u32,
    /// First byte.
    pub offset: u64,
    /// Bytes; for reads and writes the sum of the iovec lengths.
    pub len: u64,
    /// Data; for status and map the result array; for open the option text. Valid until the completion unless COBWEB_F_COPY_IOV; the data in any case.
    pub iov: *const iovec,
    /// Returned with the completion.
    pub user_data: u64,
    /// 0 for the operations that exist now.
    pub arg: u64,
    /// COBWEB_PRIO_*.
    pub prio: u32,
    /// 0.
    pub rsv0: u32,
    /// 0.
    pub rsv1: u64,
}

/// Status or map: the array was too short for the whole range.
pub const COBWEB_CQE_MORE: u32 = 1;

/// A completion; 32 bytes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct cobweb_cqe {
    /// As submitted.
    pub user_data: u64,
    /// Bytes or elements, or a negative errno.
    pub res: i64,
    /// COBWEB_CQE_*.
    pub flags: u32,
    /// Finer code of an error, 0 on success.
    pub code: u32,
    /// 0.
    pub rsv: u64,
}

/// The layer that answers holds the range.
pub const COBWEB_EXT_ALLOCATED: u32 = 1;
/// Reads as zeros.
pub const COBWEB_EXT_ZERO: u32 = 2;
/// Stored compressed.
pub const COBWEB_EXT_COMPRESSED: u32 = 4;
/// Dirty in the bitmap asked about.
pub const COBWEB_EXT_DIRTY: u32 = 8;
/// Reads fail.
pub const COBWEB_EXT_NO_ACCESS: u32 = 16;

/// A range with one status; 16 bytes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct cobweb_extent {
    /// Bytes.
    pub len: u64,
    /// COBWEB_EXT_*.
    pub flags: u32,
    /// Layer that answers, 0 = top.
    pub depth: u32,
}

/// Where a range lies in a file; 48 bytes. Valid while the node's generation is unchanged, and for reading only (C14).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct cobweb_mapping {
    /// First byte on the disk.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// First byte in the file.
    pub host_offset: u64,
    /// Look again after the read: it holds only if this is unchanged.
    pub generation: u64,
    /// Number of the node.
    pub node_id: u32,
    /// COBWEB_EXT_*.
    pub flags: u32,
    /// File descriptor, owned by the library.
    pub fd: i32,
    /// 0.
    pub rsv: u32,
}

/// Size, alignments and transfer limits of a disk.
#[repr(C)]
pub struct cobweb_limits {
    /// Set by the caller.
    pub struct_size: u32,
    /// 1: read-only.
    pub flags: u32,
    /// Bytes.
    pub size: u64,
    /// Largest write-zeroes, 0 = unlimited.
    pub max_zeroes: u64,
    /// Largest discard, 0 = unlimited.
    pub max_discard: u64,
    /// Offset and length alignment that needs no read-modify-write.
    pub request_align: u32,
    /// Memory alignment that needs no bounce buffer.
    pub memory_align: u32,
    /// Best transfer size, 0 = unknown.
    pub opt_transfer: u32,
    /// Largest transfer that goes down as one operation, 0 = unlimited.
    pub max_transfer: u32,
    /// Discard granularity.
    pub discard_align: u32,
    /// Most segments of an operation.
    pub max_iov: u32,
}

/// The property can be given at open.
pub const COBWEB_PROP_OPEN: u32 = 1;
/// The property can be changed while the node is in use.
pub const COBWEB_PROP_LIVE: u32 = 2;
/// The property can only be read.
pub const COBWEB_PROP_READ_ONLY: u32 = 4;

/// One option of a driver; the strings are the library's and static.
#[repr(C)]
pub struct cobweb_prop {
    /// Set by the caller.
    pub struct_size: u32,
    /// COBWEB_PROP_*.
    pub states: u32,
    /// Dotted key.
    pub name: *const c_char,
    /// Type: str, bool, u64, size, enum, node, list.
    pub r#type: *const c_char,
    /// Default as text, empty if there is none.
    pub def: *const c_char,
    /// One line.
    pub doc: *const c_char,
}

/// A node's size has changed.
pub const COBWEB_EV_RESIZE: u32 = 1;
/// A job changed its state (`value`).
pub const COBWEB_EV_JOB: u32 = 2;
/// A snapshot broke.
pub const COBWEB_EV_CBW_BROKEN: u32 = 3;
/// A range of a snapshot was lost.
pub const COBWEB_EV_RANGE_LOST: u32 = 4;
/// A cache crossed an occupancy mark (`value` per cent, `len` ms to full).
pub const COBWEB_EV_CACHE_MARK: u32 = 5;
/// An overflow step was taken.
pub const COBWEB_EV_OVERFLOW: u32 = 6;
/// An image is corrupt.
pub const COBWEB_EV_CORRUPT: u32 = 7;
/// The last reader of a snapshot has gone.
pub const COBWEB_EV_READER_GONE: u32 = 8;

/// An event.
#[repr(C)]
pub struct cobweb_event {
    /// Set by the caller.
    pub struct_size: u32,
    /// COBWEB_EV_*.
    pub r#type: u32,
    /// Number in the order of posting.
    pub seq: u64,
    /// Monotonic time.
    pub time_ns: u64,
    /// First byte concerned.
    pub offset: u64,
    /// Bytes concerned.
    pub len: u64,
    /// Depends on the type.
    pub value: u64,
    /// Positive errno, 0 if none.
    pub err: i32,
    /// Finer code.
    pub code: u32,
    /// COBWEB_SIDE_*.
    pub side: u32,
    /// Events lost so far.
    pub dropped: u32,
    /// Node or job.
    pub source: [c_char; 64],
}

/// QEMU's JobStatus.
pub const COBWEB_JOB_CREATED: u32 = 1;
/// Running.
pub const COBWEB_JOB_RUNNING: u32 = 2;
/// Paused.
pub const COBWEB_JOB_PAUSED: u32 = 3;
/// Ready.
pub const COBWEB_JOB_READY: u32 = 4;
/// Paused while ready.
pub const COBWEB_JOB_STANDBY: u32 = 5;
/// Waiting for the others of its group.
pub const COBWEB_JOB_WAITING: u32 = 6;
/// Waiting for finalize.
pub const COBWEB_JOB_PENDING: u32 = 7;
/// Failing.
pub const COBWEB_JOB_ABORTING: u32 = 8;
/// Ended, waiting for dismiss.
pub const COBWEB_JOB_CONCLUDED: u32 = 9;
/// Gone.
pub const COBWEB_JOB_NULL: u32 = 10;

/// A job's state and progress.
#[repr(C)]
pub struct cobweb_job_info {
    /// Set by the caller.
    pub struct_size: u32,
    /// COBWEB_JOB_*.
    pub state: u32,
    /// Bytes done.
    pub current: u64,
    /// Bytes to do.
    pub total: u64,
    /// Limit in bytes per second, 0 = none.
    pub speed: u64,
    /// COBWEB_PRIO_*.
    pub prio: u32,
    /// Whether it is paused.
    pub paused: u32,
    /// Negative errno of a failed job, 0 otherwise.
    pub err: i32,
    /// Finer code.
    pub code: u32,
}

/// The guest's disk.
pub const COBWEB_SIDE_SOURCE: u32 = 1;
/// The backup target.
pub const COBWEB_SIDE_TARGET: u32 = 2;
/// The RAM cache.
pub const COBWEB_SIDE_CACHE: u32 = 3;
/// The spill file.
pub const COBWEB_SIDE_SPILL: u32 = 4;
/// A reader of the snapshot.
pub const COBWEB_SIDE_READER: u32 = 5;
/// The host program.
pub const COBWEB_SIDE_HOST: u32 = 6;

/// Tried again.
pub const COBWEB_ACT_RETRIED: u32 = 1;
/// Moved to the spill file.
pub const COBWEB_ACT_SPILLED: u32 = 2;
/// Written through.
pub const COBWEB_ACT_WRITTEN_THROUGH: u32 = 3;
/// The range was lost.
pub const COBWEB_ACT_RANGE_LOST: u32 = 4;
/// The snapshot was broken.
pub const COBWEB_ACT_SNAPSHOT_BROKEN: u32 = 5;
/// The guest's write failed.
pub const COBWEB_ACT_GUEST_WRITE_FAILED: u32 = 6;

/// First cause of a job's failure (semantics.md section 5).
#[repr(C)]
pub struct cobweb_report {
    /// Set by the caller.
    pub struct_size: u32,
    /// Negative errno.
    pub err: i32,
    /// Finer code.
    pub code: u32,
    /// COBWEB_SIDE_*.
    pub side: u32,
    /// COBWEB_OP_*.
    pub op: u32,
    /// COBWEB_ACT_*.
    pub action: u32,
    /// First byte, on the guest's disk.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Monotonic time.
    pub mono_ns: u64,
    /// Wall-clock time.
    pub real_ns: u64,
    /// Errors of this kind so far.
    pub count: u64,
    /// Node name.
    pub node: [c_char; 64],
}

/// A lost range.
#[repr(C)]
pub struct cobweb_range {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Wall-clock time of the loss.
    pub real_ns: u64,
    /// Negative errno.
    pub err: i32,
    /// Finer code.
    pub code: u32,
}

/// Counters (semantics.md section 6); fields that do not apply are 0.
#[repr(C)]
pub struct cobweb_stats {
    /// Set by the caller.
    pub struct_size: u32,
    /// 0.
    pub rsv: u32,
    /// Reads.
    pub rd_ops: u64,
    /// Bytes read.
    pub rd_bytes: u64,
    /// Writes.
    pub wr_ops: u64,
    /// Bytes written.
    pub wr_bytes: u64,
    /// Write-zeroes.
    pub zero_ops: u64,
    /// Discards.
    pub discard_ops: u64,
    /// Flushes.
    pub flush_ops: u64,
    /// Failed requests.
    pub failed: u64,
    /// Requests in flight.
    pub in_flight: u64,
    /// Bytes the guest wrote in protected granules.
    pub cbw_guest_bytes: u64,
    /// Bytes copied for the guest.
    pub cbw_copied_bytes: u64,
    /// Copies that took longer than cbw-timeout.
    pub cbw_timeouts: u64,
    /// Late copies still running.
    pub cbw_late: u64,
    /// Snapshot reads that guest writes waited for.
    pub cbw_frozen_waits: u64,
    /// Bytes lost.
    pub lost_bytes: u64,
    /// Bytes the cache holds.
    pub cache_used: u64,
    /// Most it held.
    pub cache_peak: u64,
    /// Requests waiting for space.
    pub cache_waiters: u64,
    /// Bytes in the spill file.
    pub cache_spilled: u64,
    /// Bytes the target has acknowledged.
    pub cache_stored: u64,
    /// Writes to the target.
    pub cache_writes: u64,
    /// Milliseconds until the cache is full at the present rates; UINT64_MAX = never.
    pub time_to_full_ms: u64,
}

/// A histogram: 4 equal buckets per power of two, from 1 us.
#[repr(C)]
pub struct cobweb_hist {
    /// Set by the caller.
    pub struct_size: u32,
    /// 0.
    pub rsv: u32,
    /// Samples.
    pub count: u64,
    /// Their sum.
    pub sum_ns: u64,
    /// The largest.
    pub max_ns: u64,
    /// Samples per bucket.
    pub bucket: [u64; 128],
}

/// Log callback: may come from any engine thread, holds no engine lock, must not call back (C20).
pub type cobweb_log_fn =
    Option<unsafe extern "C" fn(arg: *mut c_void, level: c_int, target: *const c_char, msg: *const c_char)>;

/// Where log lines go.
#[repr(C)]
pub struct cobweb_log {
    /// Set by the caller.
    pub struct_size: u32,
    /// Most detailed level wanted: 0 error, 1 warning, 2 info, 3 debug.
    pub level: u32,
    /// The callback.
    pub r#fn: cobweb_log_fn,
    /// Its first argument.
    pub arg: *mut c_void,
}

/// One call at a time.
pub const COBWEB_CONC_SERIAL: u32 = 0;
/// One call at a time per queue.
pub const COBWEB_CONC_PER_QUEUE: u32 = 1;
/// Any number of calls at a time.
pub const COBWEB_CONC_PARALLEL: u32 = 2;

/// Takes a request; returns 0 if cobweb_io_complete will be called (or has been), or a negative errno.
pub type cobweb_backend_submit =
    Option<unsafe extern "C" fn(be: *mut c_void, r: *const cobweb_req, io: *mut cobweb_io) -> c_int>;
/// Fills in the limits; 0 or a negative errno.
pub type cobweb_backend_limits =
    Option<unsafe extern "C" fn(be: *mut c_void, out: *mut cobweb_limits) -> c_int>;
/// Asks for an early end of a request; 0 or a negative errno.
pub type cobweb_backend_cancel = Option<unsafe extern "C" fn(be: *mut c_void, io: *mut cobweb_io) -> c_int>;
/// Called once when the last user has gone.
pub type cobweb_backend_release = Option<unsafe extern "C" fn(be: *mut c_void)>;

/// Callbacks of a host backend (C12). Only submit is required.
#[repr(C)]
pub struct cobweb_backend_ops {
    /// Set by the caller.
    pub struct_size: u32,
    /// COBWEB_CONC_*.
    pub concurrency: u32,
    /// Required.
    pub submit: cobweb_backend_submit,
    /// Size and alignment; without it the size is that of the option given to cobweb_node_register, 0.
    pub limits: cobweb_backend_limits,
    /// Optional.
    pub cancel: cobweb_backend_cancel,
    /// Optional.
    pub release: cobweb_backend_release,
}

const _: () = assert!(size_of::<cobweb_req>() == 64);
const _: () = assert!(size_of::<cobweb_cqe>() == 32);
const _: () = assert!(size_of::<cobweb_extent>() == 16);
const _: () = assert!(size_of::<cobweb_mapping>() == 48);
const _: () = assert!(size_of::<cobweb_error>() == 256);
