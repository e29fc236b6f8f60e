/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* libcobweb: block storage for virtual machines. Generated from src/capi by build.rs; do not edit. */
/* Functions return 0 or a count, or a negative errno. Outputs are written only on success. */
/* See docs/abi.md for objects, thread rules and lifetimes. */

#ifndef COBWEB_H
#define COBWEB_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#if defined(__GNUC__) || defined(__clang__)
#define COBWEB_CHECK __attribute__((warn_unused_result))
#else
#define COBWEB_CHECK
#endif

/* One per function: what this header declares (cobweb_has asks the loaded library). */
#define COBWEB_HAVE_BLOCK_STATUS 1
#define COBWEB_HAVE_CANCEL 1
#define COBWEB_HAVE_CODE_STR 1
#define COBWEB_HAVE_CTX_FREE 1
#define COBWEB_HAVE_CTX_NEW 1
#define COBWEB_HAVE_CTX_QUERY 1
#define COBWEB_HAVE_CTX_RUN 1
#define COBWEB_HAVE_CTX_START 1
#define COBWEB_HAVE_DISCARD 1
#define COBWEB_HAVE_DISK_FILTER_ADD 1
#define COBWEB_HAVE_DISK_FILTER_DEL 1
#define COBWEB_HAVE_DISK_FREE 1
#define COBWEB_HAVE_DISK_INSERT 1
#define COBWEB_HAVE_DISK_LIMITS 1
#define COBWEB_HAVE_DISK_NEW 1
#define COBWEB_HAVE_DISK_SET 1
#define COBWEB_HAVE_EVENT_FD 1
#define COBWEB_HAVE_EVENT_NEXT 1
#define COBWEB_HAVE_EXPORT_START 1
#define COBWEB_HAVE_EXPORT_STOP 1
#define COBWEB_HAVE_FLUSH 1
#define COBWEB_HAVE_GROUP_ADD 1
#define COBWEB_HAVE_GROUP_FREE 1
#define COBWEB_HAVE_GROUP_NEW 1
#define COBWEB_HAVE_GROUP_START 1
#define COBWEB_HAVE_HAS 1
#define COBWEB_HAVE_IO_COMPLETE 1
#define COBWEB_HAVE_JOB_CANCEL 1
#define COBWEB_HAVE_JOB_DISMISS 1
#define COBWEB_HAVE_JOB_FINALIZE 1
#define COBWEB_HAVE_JOB_FIND 1
#define COBWEB_HAVE_JOB_LOST_NEXT 1
#define COBWEB_HAVE_JOB_PAUSE 1
#define COBWEB_HAVE_JOB_QUERY 1
#define COBWEB_HAVE_JOB_REPORT 1
#define COBWEB_HAVE_JOB_RESUME 1
#define COBWEB_HAVE_JOB_SET_PRIORITY 1
#define COBWEB_HAVE_JOB_SET_SPEED 1
#define COBWEB_HAVE_JOB_START 1
#define COBWEB_HAVE_JOB_UNREF 1
#define COBWEB_HAVE_JOB_WAIT 1
#define COBWEB_HAVE_NODE_CREATE 1
#define COBWEB_HAVE_NODE_FIND 1
#define COBWEB_HAVE_NODE_GET 1
#define COBWEB_HAVE_NODE_OPEN 1
#define COBWEB_HAVE_NODE_REGISTER 1
#define COBWEB_HAVE_NODE_RESIZED 1
#define COBWEB_HAVE_NODE_SET 1
#define COBWEB_HAVE_NODE_UNREF 1
#define COBWEB_HAVE_PREAD 1
#define COBWEB_HAVE_PROP_NEXT 1
#define COBWEB_HAVE_PWRITE 1
#define COBWEB_HAVE_QUEUE_ARM 1
#define COBWEB_HAVE_QUEUE_FD 1
#define COBWEB_HAVE_QUEUE_FREE 1
#define COBWEB_HAVE_QUEUE_NEW 1
#define COBWEB_HAVE_REAP 1
#define COBWEB_HAVE_STATS_GET 1
#define COBWEB_HAVE_STATS_HIST 1
#define COBWEB_HAVE_SUBMIT 1
#define COBWEB_HAVE_VERSION 1
#define COBWEB_HAVE_WRITE_ZEROES 1


/* Major version of the header. */
#define COBWEB_VERSION_MAJOR 0

/* Minor version of the header. */
#define COBWEB_VERSION_MINOR 1

/* Patch version of the header. */
#define COBWEB_VERSION_PATCH 0

/* Completes at once with 0. */
#define COBWEB_OP_NOP 0

/* Reads `len` bytes at `offset` into `iov`. */
#define COBWEB_OP_READ 1

/* Writes `len` bytes at `offset` from `iov`. */
#define COBWEB_OP_WRITE 2

/* Makes the range read as zeros. */
#define COBWEB_OP_WRITE_ZEROES 3

/* The range's content is no longer needed; advisory. */
#define COBWEB_OP_DISCARD 4

/* Everything acknowledged before is durable afterwards. */
#define COBWEB_OP_FLUSH 5

/* Fills an array of cobweb_extent (`iov[0]`); the result is their number. */
#define COBWEB_OP_BLOCK_STATUS 6

/* Fills an array of cobweb_mapping (`iov[0]`); the result is their number. */
#define COBWEB_OP_MAP 7

/* Opens nodes from the option text in `iov[0]` and inserts the top one into the disk. */
#define COBWEB_OP_OPEN 8

/* Reserved; answers -ENOTSUP. */
#define COBWEB_OP_RESIZE 9

/* Reserved; answers -ENOTSUP. */
#define COBWEB_OP_DRAIN 10

/* Durable when the request completes. */
#define COBWEB_F_FUA 1

/* Write-zeroes may deallocate. */
#define COBWEB_F_MAY_UNMAP 2

/* Write-zeroes fails with ENOTSUP rather than write zeros slowly. */
#define COBWEB_F_NO_FALLBACK 4

/* The buffers lie in registered memory; a hint. */
#define COBWEB_F_REGISTERED 8

/* The iovec array is copied and need not stay valid. */
#define COBWEB_F_COPY_IOV 16

/* The queue's default: guest. */
#define COBWEB_PRIO_DEFAULT 0

/* The guest. */
#define COBWEB_PRIO_GUEST 1

/* A read that a guest waits for. */
#define COBWEB_PRIO_COPY 2

/* Background work. */
#define COBWEB_PRIO_BACKGROUND 3

/* Work that can wait. */
#define COBWEB_PRIO_LAZY 4

/* As the request that causes it. */
#define COBWEB_PRIO_INHERIT 5

/* Status or map: the array was too short for the whole range. */
#define COBWEB_CQE_MORE 1

/* The layer that answers holds the range. */
#define COBWEB_EXT_ALLOCATED 1

/* Reads as zeros. */
#define COBWEB_EXT_ZERO 2

/* Stored compressed. */
#define COBWEB_EXT_COMPRESSED 4

/* Dirty in the bitmap asked about. */
#define COBWEB_EXT_DIRTY 8

/* Reads fail. */
#define COBWEB_EXT_NO_ACCESS 16

/* The property can be given at open. */
#define COBWEB_PROP_OPEN 1

/* The property can be changed while the node is in use. */
#define COBWEB_PROP_LIVE 2

/* The property can only be read. */
#define COBWEB_PROP_READ_ONLY 4

/* A node's size has changed. */
#define COBWEB_EV_RESIZE 1

/* A job changed its state (`value`). */
#define COBWEB_EV_JOB 2

/* A snapshot broke. */
#define COBWEB_EV_CBW_BROKEN 3

/* A range of a snapshot was lost. */
#define COBWEB_EV_RANGE_LOST 4

/* A cache crossed an occupancy mark (`value` per cent, `len` ms to full). */
#define COBWEB_EV_CACHE_MARK 5

/* An overflow step was taken. */
#define COBWEB_EV_OVERFLOW 6

/* An image is corrupt. */
#define COBWEB_EV_CORRUPT 7

/* The last reader of a snapshot has gone. */
#define COBWEB_EV_READER_GONE 8

/* QEMU's JobStatus. */
#define COBWEB_JOB_CREATED 1

/* Running. */
#define COBWEB_JOB_RUNNING 2

/* Paused. */
#define COBWEB_JOB_PAUSED 3

/* Ready. */
#define COBWEB_JOB_READY 4

/* Paused while ready. */
#define COBWEB_JOB_STANDBY 5

/* Waiting for the others of its group. */
#define COBWEB_JOB_WAITING 6

/* Waiting for finalize. */
#define COBWEB_JOB_PENDING 7

/* Failing. */
#define COBWEB_JOB_ABORTING 8

/* Ended, waiting for dismiss. */
#define COBWEB_JOB_CONCLUDED 9

/* Gone. */
#define COBWEB_JOB_NULL 10

/* The guest's disk. */
#define COBWEB_SIDE_SOURCE 1

/* The backup target. */
#define COBWEB_SIDE_TARGET 2

/* The RAM cache. */
#define COBWEB_SIDE_CACHE 3

/* The spill file. */
#define COBWEB_SIDE_SPILL 4

/* A reader of the snapshot. */
#define COBWEB_SIDE_READER 5

/* The host program. */
#define COBWEB_SIDE_HOST 6

/* Tried again. */
#define COBWEB_ACT_RETRIED 1

/* Moved to the spill file. */
#define COBWEB_ACT_SPILLED 2

/* Written through. */
#define COBWEB_ACT_WRITTEN_THROUGH 3

/* The range was lost. */
#define COBWEB_ACT_RANGE_LOST 4

/* The snapshot was broken. */
#define COBWEB_ACT_SNAPSHOT_BROKEN 5

/* The guest's write failed. */
#define COBWEB_ACT_GUEST_WRITE_FAILED 6

/* One call at a time. */
#define COBWEB_CONC_SERIAL 0

/* One call at a time per queue. */
#define COBWEB_CONC_PER_QUEUE 1

/* Any number of calls at a time. */
#define COBWEB_CONC_PARALLEL 2

/* Threads, RAM budget, log sink, names of nodes, disks and jobs. Freed last. */
typedef struct cobweb_ctx cobweb_ctx;

/* Stable guest-facing root; the graph below may change. */
typedef struct cobweb_disk cobweb_disk;

/* A running server. */
typedef struct cobweb_export cobweb_export;

/* Jobs to be started at one instant. */
typedef struct cobweb_group cobweb_group;

/* Token of one request handed to a host backend. */
typedef struct cobweb_io cobweb_io;

/* Backup, copy, ...; belongs to the context, found by id. */
typedef struct cobweb_job cobweb_job;

/* File, format, host backend, filter or snapshot view; reference counted. */
typedef struct cobweb_node cobweb_node;

/* Submission and completion of one host thread on one disk. */
typedef struct cobweb_queue cobweb_queue;

/* A request; 64 bytes on LP64. Reserved fields are zero, and checked. */
typedef struct cobweb_req {
  /* COBWEB_OP_*. */
  uint16_t op;
  /* COBWEB_F_*. */
  uint16_t flags;
  /* Elements of `iov`. */
  uint32_t iovcnt;
  /* First byte. */
  uint64_t offset;
  /* Bytes; for reads and writes the sum of the iovec lengths. */
  uint64_t len;
  /* Data; for status and map the result array; for open the option text. Valid until the completion unless COBWEB_F_COPY_IOV; the data in any case. */
  const struct iovec *iov;
  /* Returned with the completion. */
  uint64_t user_data;
  /* 0 for the operations that exist now. */
  uint64_t arg;
  /* COBWEB_PRIO_*. */
  uint32_t prio;
  /* 0. */
  uint32_t rsv0;
  /* 0. */
  uint64_t rsv1;
} cobweb_req;

/* Takes a request; returns 0 if cobweb_io_complete will be called (or has been), or a negative errno. */
typedef int (*cobweb_backend_submit)(void *be, const struct cobweb_req *r, struct cobweb_io *io);

/* Size, alignments and transfer limits of a disk. */
typedef struct cobweb_limits {
  /* Set by the caller. */
  uint32_t struct_size;
  /* 1: read-only. */
  uint32_t flags;
  /* Bytes. */
  uint64_t size;
  /* Largest write-zeroes, 0 = unlimited. */
  uint64_t max_zeroes;
  /* Largest discard, 0 = unlimited. */
  uint64_t max_discard;
  /* Offset and length alignment that needs no read-modify-write. */
  uint32_t request_align;
  /* Memory alignment that needs no bounce buffer. */
  uint32_t memory_align;
  /* Best transfer size, 0 = unknown. */
  uint32_t opt_transfer;
  /* Largest transfer that goes down as one operation, 0 = unlimited. */
  uint32_t max_transfer;
  /* Discard granularity. */
  uint32_t discard_align;
  /* Most segments of an operation. */
  uint32_t max_iov;
} cobweb_limits;

/* Fills in the limits; 0 or a negative errno. */
typedef int (*cobweb_backend_limits)(void *be, struct cobweb_limits *out);

/* Asks for an early end of a request; 0 or a negative errno. */
typedef int (*cobweb_backend_cancel)(void *be, struct cobweb_io *io);

/* Called once when the last user has gone. */
typedef void (*cobweb_backend_release)(void *be);

/* Callbacks of a host backend (C12). Only submit is required. */
typedef struct cobweb_backend_ops {
  /* Set by the caller. */
  uint32_t struct_size;
  /* COBWEB_CONC_*. */
  uint32_t concurrency;
  /* Required. */
  cobweb_backend_submit submit;
  /* Size and alignment; without it the size is that of the option given to cobweb_node_register, 0. */
  cobweb_backend_limits limits;
  /* Optional. */
  cobweb_backend_cancel cancel;
  /* Optional. */
  cobweb_backend_release release;
} cobweb_backend_ops;

/* Error text, owned by the caller, 256 bytes; NULL is allowed wherever one is taken. */
typedef struct cobweb_error {
  /* Set by the caller to sizeof(cobweb_error). */
  uint32_t struct_size;
  /* Negative errno, as returned. */
  int32_t err;
  /* Finer code, see cobweb_code_str. */
  uint32_t code;
  /* 0. */
  uint32_t rsv;
  /* One sentence, NUL-terminated, cut to fit. */
  char msg[240];
} cobweb_error;

/* Log callback: may come from any engine thread, holds no engine lock, must not call back (C20). */
typedef void (*cobweb_log_fn)(void *arg, int level, const char *target, const char *msg);

/* Where log lines go. */
typedef struct cobweb_log {
  /* Set by the caller. */
  uint32_t struct_size;
  /* Most detailed level wanted: 0 error, 1 warning, 2 info, 3 debug. */
  uint32_t level;
  /* The callback. */
  cobweb_log_fn fn;
  /* Its first argument. */
  void *arg;
} cobweb_log;

/* An event. */
typedef struct cobweb_event {
  /* Set by the caller. */
  uint32_t struct_size;
  /* COBWEB_EV_*. */
  uint32_t type;
  /* Number in the order of posting. */
  uint64_t seq;
  /* Monotonic time. */
  uint64_t time_ns;
  /* First byte concerned. */
  uint64_t offset;
  /* Bytes concerned. */
  uint64_t len;
  /* Depends on the type. */
  uint64_t value;
  /* Positive errno, 0 if none. */
  int32_t err;
  /* Finer code. */
  uint32_t code;
  /* COBWEB_SIDE_*. */
  uint32_t side;
  /* Events lost so far. */
  uint32_t dropped;
  /* Node or job. */
  char source[64];
} cobweb_event;

/* A range with one status; 16 bytes. */
typedef struct cobweb_extent {
  /* Bytes. */
  uint64_t len;
  /* COBWEB_EXT_*. */
  uint32_t flags;
  /* Layer that answers, 0 = top. */
  uint32_t depth;
} cobweb_extent;

/* A job's state and progress. */
typedef struct cobweb_job_info {
  /* Set by the caller. */
  uint32_t struct_size;
  /* COBWEB_JOB_*. */
  uint32_t state;
  /* Bytes done. */
  uint64_t current;
  /* Bytes to do. */
  uint64_t total;
  /* Limit in bytes per second, 0 = none. */
  uint64_t speed;
  /* COBWEB_PRIO_*. */
  uint32_t prio;
  /* Whether it is paused. */
  uint32_t paused;
  /* Negative errno of a failed job, 0 otherwise. */
  int32_t err;
  /* Finer code. */
  uint32_t code;
} cobweb_job_info;

/* First cause of a job's failure (semantics.md section 5). */
typedef struct cobweb_report {
  /* Set by the caller. */
  uint32_t struct_size;
  /* Negative errno. */
  int32_t err;
  /* Finer code. */
  uint32_t code;
  /* COBWEB_SIDE_*. */
  uint32_t side;
  /* COBWEB_OP_*. */
  uint32_t op;
  /* COBWEB_ACT_*. */
  uint32_t action;
  /* First byte, on the guest's disk. */
  uint64_t offset;
  /* Bytes. */
  uint64_t len;
  /* Monotonic time. */
  uint64_t mono_ns;
  /* Wall-clock time. */
  uint64_t real_ns;
  /* Errors of this kind so far. */
  uint64_t count;
  /* Node name. */
  char node[64];
} cobweb_report;

/* A lost range. */
typedef struct cobweb_range {
  /* First byte. */
  uint64_t offset;
  /* Bytes. */
  uint64_t len;
  /* Wall-clock time of the loss. */
  uint64_t real_ns;
  /* Negative errno. */
  int32_t err;
  /* Finer code. */
  uint32_t code;
} cobweb_range;

/* One option of a driver; the strings are the library's and static. */
typedef struct cobweb_prop {
  /* Set by the caller. */
  uint32_t struct_size;
  /* COBWEB_PROP_*. */
  uint32_t states;
  /* Dotted key. */
  const char *name;
  /* Type: str, bool, u64, size, enum, node, list. */
  const char *type;
  /* Default as text, empty if there is none. */
  const char *def;
  /* One line. */
  const char *doc;
} cobweb_prop;

/* A completion; 32 bytes. */
typedef struct cobweb_cqe {
  /* As submitted. */
  uint64_t user_data;
  /* Bytes or elements, or a negative errno. */
  int64_t res;
  /* COBWEB_CQE_*. */
  uint32_t flags;
  /* Finer code of an error, 0 on success. */
  uint32_t code;
  /* 0. */
  uint64_t rsv;
} cobweb_cqe;

/* Counters (semantics.md section 6); fields that do not apply are 0. */
typedef struct cobweb_stats {
  /* Set by the caller. */
  uint32_t struct_size;
  /* 0. */
  uint32_t rsv;
  /* Reads. */
  uint64_t rd_ops;
  /* Bytes read. */
  uint64_t rd_bytes;
  /* Writes. */
  uint64_t wr_ops;
  /* Bytes written. */
  uint64_t wr_bytes;
  /* Write-zeroes. */
  uint64_t zero_ops;
  /* Discards. */
  uint64_t discard_ops;
  /* Flushes. */
  uint64_t flush_ops;
  /* Failed requests. */
  uint64_t failed;
  /* Requests in flight. */
  uint64_t in_flight;
  /* Bytes the guest wrote in protected granules. */
  uint64_t cbw_guest_bytes;
  /* Bytes copied for the guest. */
  uint64_t cbw_copied_bytes;
  /* Copies that took longer than cbw-timeout. */
  uint64_t cbw_timeouts;
  /* Late copies still running. */
  uint64_t cbw_late;
  /* Snapshot reads that guest writes waited for. */
  uint64_t cbw_frozen_waits;
  /* Bytes lost. */
  uint64_t lost_bytes;
  /* Bytes the cache holds. */
  uint64_t cache_used;
  /* Most it held. */
  uint64_t cache_peak;
  /* Requests waiting for space. */
  uint64_t cache_waiters;
  /* Bytes in the spill file. */
  uint64_t cache_spilled;
  /* Bytes the target has acknowledged. */
  uint64_t cache_stored;
  /* Writes to the target. */
  uint64_t cache_writes;
  /* Milliseconds until the cache is full at the present rates; UINT64_MAX = never. */
  uint64_t time_to_full_ms;
} cobweb_stats;

/* A histogram: 4 equal buckets per power of two, from 1 us. */
typedef struct cobweb_hist {
  /* Set by the caller. */
  uint32_t struct_size;
  /* 0. */
  uint32_t rsv;
  /* Samples. */
  uint64_t count;
  /* Their sum. */
  uint64_t sum_ns;
  /* The largest. */
  uint64_t max_ns;
  /* Samples per bucket. */
  uint64_t bucket[128];
} cobweb_hist;

/* Where a range lies in a file; 48 bytes. Valid while the node's generation is unchanged, and for reading only (C14). */
typedef struct cobweb_mapping {
  /* First byte on the disk. */
  uint64_t offset;
  /* Bytes. */
  uint64_t len;
  /* First byte in the file. */
  uint64_t host_offset;
  /* Look again after the read: it holds only if this is unchanged. */
  uint64_t generation;
  /* Number of the node. */
  uint32_t node_id;
  /* COBWEB_EXT_*. */
  uint32_t flags;
  /* File descriptor, owned by the library. */
  int32_t fd;
  /* 0. */
  uint32_t rsv;
} cobweb_mapping;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 Puts the host's callbacks under a node name; the name is then used like any other. `concurrency` says how many calls may run at once. Operations the backend
 answers with -ENOTSUP are emulated (zeroes are written, discards dropped). `release` is called once, when the last user has gone.
 Errors: -EBUSY (name in use), -EINVAL, -E2BIG.
 */
COBWEB_CHECK
int cobweb_node_register(struct cobweb_ctx *c,
                         const char *node_name,
                         const struct cobweb_backend_ops *ops,
                         void *be,
                         struct cobweb_node **out,
                         struct cobweb_error *e);

/* Tells that the size of a host backend has changed; the limits are asked for again. Errors: -EINVAL for another kind of node. */
int cobweb_node_resized(struct cobweb_node *n);

/*
 Completes a request that was handed to a backend: bytes for reads and writes (fewer than asked is a short transfer, which is continued), 0 or more for the
 others, or a negative errno. Any thread, exactly once. NULL is allowed.
 */
void cobweb_io_complete(struct cobweb_io *io,
                        int64_t res);

/*
 Makes a context. No thread is started: it may be called before the host daemonizes (C3).

 `options`: NULL or option text: `worker-threads` (0: the host drives background work with cobweb_ctx_run), `ram-budget` (bytes),
 `aio` (`io_uring`, `threads`). `log`: NULL or where log lines go. Errors: -EINVAL for an unknown or wrong option.
 */
COBWEB_CHECK
int cobweb_ctx_new(const char *options,
                   const struct cobweb_log *log,
                   struct cobweb_ctx **out,
                   struct cobweb_error *e);

/* Starts the context's threads. After fork() call it in the process that goes on. Errors: -EINVAL if it was started before. */
COBWEB_CHECK
int cobweb_ctx_start(struct cobweb_ctx *c,
                     struct cobweb_error *e);

/*
 Drives background work once, waiting at most `timeout_ns` for some (negative: without limit); only with `worker-threads=0`.
 Returns 1 if work is left, 0 if not.
 */
int cobweb_ctx_run(struct cobweb_ctx *c,
                   int64_t timeout_ns);

/* Answers `what` ("nodes", "disks", "jobs", "stats:NAME") as JSON text; returns its length (which may be more than `cap - 1`: call again). */
int cobweb_ctx_query(struct cobweb_ctx *c,
                     const char *what,
                     char *buf,
                     size_t cap);

/* A descriptor that is readable while events wait; owned by the library. */
int cobweb_event_fd(struct cobweb_ctx *c);

/* Takes the next event: 1 if `out` was filled, 0 if there is none. Never blocks. */
int cobweb_event_next(struct cobweb_ctx *c, struct cobweb_event *out);

/* Frees a context: stops jobs (bounded), then exports, then closes nodes. Queues must be gone. NULL is allowed. */
void cobweb_ctx_free(struct cobweb_ctx *c);

/* Makes a disk without medium. `name`: NULL or empty for a generated one; unique among nodes and disks. Errors: -EBUSY, -EINVAL. */
COBWEB_CHECK
int cobweb_disk_new(struct cobweb_ctx *c,
                    const char *name,
                    struct cobweb_disk **out,
                    struct cobweb_error *e);

/* Attaches the disk to a node, or ejects it (`root` NULL), while requests run: they are parked meanwhile. May block. */
COBWEB_CHECK
int cobweb_disk_insert(struct cobweb_disk *d,
                       struct cobweb_node *root,
                       struct cobweb_error *e);

/* Opens a filter and puts it above the disk's root while requests run, in one drained section. `out` may be NULL. May block. */
COBWEB_CHECK
int cobweb_disk_filter_add(struct cobweb_disk *d,
                           const char *options,
                           struct cobweb_node **out,
                           struct cobweb_error *e);

/* Takes a filter out and brings what it holds to where it belongs (S3). The handle stays valid until cobweb_node_unref. May block. */
COBWEB_CHECK
int cobweb_disk_filter_del(struct cobweb_disk *d,
                           struct cobweb_node *filter,
                           struct cobweb_error *e);

/* The limits of the disk as of now. Errors: -ENOMEDIUM. */
COBWEB_CHECK int cobweb_disk_limits(struct cobweb_disk *d, struct cobweb_limits *out);

/*
 Sets a property of the disk. `sync-timeout`: limit of blocking calls in seconds (fractions allowed), 0 = none: a call that is still waiting
 then (for a pause, a limit, space) ends with -ECANCELED.
 */
COBWEB_CHECK
int cobweb_disk_set(struct cobweb_disk *d,
                    const char *key,
                    const char *val,
                    struct cobweb_error *e);

/* Frees a disk. Its queues must be gone (-EBUSY would be the answer if there were one: the disk then stays). NULL is allowed. May block. */
void cobweb_disk_free(struct cobweb_disk *d);

/* Reads `len` bytes (at most 1 GiB) at `offset`; returns `len` or a negative errno. Blocking. */
COBWEB_CHECK
int64_t cobweb_pread(struct cobweb_disk *d,
                     void *buf,
                     size_t len,
                     uint64_t offset,
                     uint32_t flags);

/* Writes `len` bytes (at most 1 GiB) at `offset`; returns `len` or a negative errno. `flags`: COBWEB_F_FUA. Blocking. */
COBWEB_CHECK
int64_t cobweb_pwrite(struct cobweb_disk *d,
                      const void *buf,
                      size_t len,
                      uint64_t offset,
                      uint32_t flags);

/* Makes a range read as zeros. `flags`: COBWEB_F_FUA, COBWEB_F_MAY_UNMAP, COBWEB_F_NO_FALLBACK. Blocking. */
COBWEB_CHECK int cobweb_write_zeroes(struct cobweb_disk *d, uint64_t offset, uint64_t len, uint32_t flags);

/* Discards a range. Blocking. */
COBWEB_CHECK int cobweb_discard(struct cobweb_disk *d, uint64_t offset, uint64_t len);

/* Makes everything written before durable. Blocking. */
COBWEB_CHECK int cobweb_flush(struct cobweb_disk *d);

/* Fills up to `max` extents of the range; returns their number. They may cover less than the range. Blocking. */
COBWEB_CHECK
int cobweb_block_status(struct cobweb_disk *d,
                        uint64_t offset,
                        uint64_t len,
                        struct cobweb_extent *x,
                        uint32_t max);

/*
 Starts a server for a node or disk. `type`: "nbd" with `device` (node or disk name), `addr.type` (unix, inet), `addr.path` or `addr.host` and `addr.port`, `name` (export name,
 default the device's), `writable` (default off). May block. Errors: -ENOTSUP for an unknown type, -EINVAL, -EADDRINUSE.
 */
COBWEB_CHECK
int cobweb_export_start(struct cobweb_ctx *c,
                        const char *kind,
                        const char *options,
                        struct cobweb_export **out,
                        struct cobweb_error *e);

/* Stops a server: no new connections, running requests end (bounded). NULL is allowed. May block. */
void cobweb_export_stop(struct cobweb_export *x);

/* Makes an empty group. `options`: NULL or `completion-mode=individual|grouped` (grouped: one failure fails them all). */
COBWEB_CHECK
int cobweb_group_new(struct cobweb_ctx *c,
                     const char *options,
                     struct cobweb_group **out,
                     struct cobweb_error *e);

/* Adds a job to the group; it stays `created` until cobweb_group_start. `out` may be NULL. May block. */
COBWEB_CHECK
int cobweb_group_add(struct cobweb_group *g,
                     const char *kind,
                     const char *options,
                     struct cobweb_job **out,
                     struct cobweb_error *e);

/* Starts all jobs of the group at one point in time, or none (S1). May block. The group can be freed afterwards. */
COBWEB_CHECK
int cobweb_group_start(struct cobweb_group *g,
                       struct cobweb_error *e);

/* Frees a group; jobs that were not started are forgotten. NULL is allowed. */
void cobweb_group_free(struct cobweb_group *g);

/*
 Starts a job ("backup", "copy") with options in QEMU's vocabulary. `out` may be NULL: the job belongs to the context and is found by its id. May block.
 Errors: -EINVAL, -ENOENT, -EBUSY.
 */
COBWEB_CHECK
int cobweb_job_start(struct cobweb_ctx *c,
                     const char *kind,
                     const char *options,
                     struct cobweb_job **out,
                     struct cobweb_error *e);

/* Finds a job by id. Errors: -ENOENT. */
COBWEB_CHECK int cobweb_job_find(struct cobweb_ctx *c, const char *job_id, struct cobweb_job **out);

/* State and progress. Never blocks. */
COBWEB_CHECK int cobweb_job_query(struct cobweb_job *j, struct cobweb_job_info *out);

/* The first error of the job: 1 if `out` was filled, 0 if there was none. Never blocks. */
COBWEB_CHECK int cobweb_job_report(struct cobweb_job *j, struct cobweb_report *out);

/* The next lost range: 1 if `out` was filled, 0 at the end. `iter` starts at 0. */
int cobweb_job_lost_next(struct cobweb_job *j, uint64_t *iter, struct cobweb_range *out);

/* Pauses: parts in flight end, none starts (S57). Never blocks. */
COBWEB_CHECK int cobweb_job_pause(struct cobweb_job *j);

/* Resumes a paused job. Never blocks. */
COBWEB_CHECK int cobweb_job_resume(struct cobweb_job *j);

/* Asks the job to end; cobweb_job_wait returns within a second also when the target never answers (S35). Never blocks. */
COBWEB_CHECK
int cobweb_job_cancel(struct cobweb_job *j);

/* Forgets a concluded job (`auto-dismiss=off`). Errors: -EBUSY if it has not concluded. */
COBWEB_CHECK int cobweb_job_dismiss(struct cobweb_job *j);

/* Lets a pending job (`auto-finalize=off`) finish. May block. */
COBWEB_CHECK int cobweb_job_finalize(struct cobweb_job *j, struct cobweb_error *e);

/* Limits background copies to `bytes_per_s` (0 = no limit); acts at once. Never blocks. */
COBWEB_CHECK int cobweb_job_set_speed(struct cobweb_job *j, uint64_t bytes_per_s);

/* Sets the class of background copies: COBWEB_PRIO_BACKGROUND, COBWEB_PRIO_LAZY or COBWEB_PRIO_INHERIT. Never blocks. */
COBWEB_CHECK
int cobweb_job_set_priority(struct cobweb_job *j,
                            uint32_t prio);

/*
 Waits until the job has concluded or `timeout_ns` has passed (negative: no limit). Returns 0 if it succeeded, its negative errno if it
 failed or was cancelled (-ECANCELED), -ETIMEDOUT if it is still running.
 */
COBWEB_CHECK
int cobweb_job_wait(struct cobweb_job *j,
                    int64_t timeout_ns);

/* Drops the handle; the job goes on. NULL is allowed. */
void cobweb_job_unref(struct cobweb_job *j);

/*
 Opens a node and its inline children from option text (C10); nothing is probed (C11). May block.
 Errors: -EINVAL (option; the text names the key), -ENOENT, -EBUSY (name in use), or what the system said.
 */
COBWEB_CHECK
int cobweb_node_open(struct cobweb_ctx *c,
                     const char *options,
                     struct cobweb_node **out,
                     struct cobweb_error *e);

/*
 Creates an image: `driver=file,filename=...,size=...` makes a (sparse) file; `driver=qcow2,filename=...` an image with the options that `cobweb_prop_next("create:qcow2", ...)`
 lists, in the names of QEMU's blockdev-create. An overlay (`backing-file`, `backing-fmt`) whose layout is not given gets sub-clusters, the fastest for one. Refused
 (-EEXIST) if the file is there; after an error it is not. May block. Errors: -EINVAL (the text names the option), -EFBIG, or what the system said.
 */
COBWEB_CHECK
int cobweb_node_create(struct cobweb_ctx *c,
                       const char *options,
                       struct cobweb_error *e);

/* Finds a node by name; the handle is a new reference. Errors: -ENOENT. */
COBWEB_CHECK int cobweb_node_find(struct cobweb_ctx *c, const char *node_name, struct cobweb_node **out);

/* Sets a live property. Errors: -EINVAL for a key that is unknown or cannot be changed, or a value it does not take. */
COBWEB_CHECK
int cobweb_node_set(struct cobweb_node *n,
                    const char *key,
                    const char *val,
                    struct cobweb_error *e);

/*
 Reads a property as text; returns its length (which may be more than `cap - 1`: call again). `node-name`, `driver`, `size` and `last-error` exist for every node.

 A qcow2 node also has, as JSON: `info` (what `cobweb info` shows as format-specific data), `statistics` (of the open image: cache, allocations, copy-on-write), and `check`, which
 walks the whole image and may block for long: `corruptions`, `leaks`, `check-errors`, `image-end-offset`, `total-clusters`, `allocated-clusters`, `fragmented-clusters`,
 `compressed-clusters` and the first `findings`. What a writable image has reserved ahead of need shows as leaks.
 */
int cobweb_node_get(struct cobweb_node *n,
                    const char *key,
                    char *buf,
                    size_t cap,
                    struct cobweb_error *e);

/* Gives a reference back. The node is closed when its last user (handle, parent, disk, job) has gone. NULL is allowed. */
void cobweb_node_unref(struct cobweb_node *n);

/*
 Lists the options of a driver, one per call: 1 if `out` was filled, 0 at the end, -ENOENT for an unknown driver. `iter` starts at 0. The strings are static. `create:qcow2` stands
 for what `cobweb_node_create` takes.
 */
int cobweb_prop_next(const char *driver,
                     uint32_t *iter,
                     struct cobweb_prop *out);

/* Makes a queue of at most `depth` (1..4096) requests on a disk, to be used by one thread at a time. Errors: -EINVAL, -ENOMEM. */
COBWEB_CHECK
int cobweb_queue_new(struct cobweb_disk *d,
                     uint32_t depth,
                     struct cobweb_queue **out,
                     struct cobweb_error *e);

/*
 The queue's eventfd, armed: readable when cobweb_reap has something to do. Owned by the library. A poll or epoll_wait of the thread that submitted can end with
 EINTR while requests complete (the kernel finishes them on that thread): repeat it.
 */
int cobweb_queue_fd(struct cobweb_queue *q);

/* Switches the eventfd off (0) or on (1). After switching on, reap once more before sleeping on it. */
int cobweb_queue_arm(struct cobweb_queue *q, int on);

/*
 Submits `n` requests; returns how many were taken (fewer when the queue is full), or a negative errno if none was looked at. A request with wrong
 fields is taken and completes with -EINVAL. Never blocks.
 */
COBWEB_CHECK
int cobweb_submit(struct cobweb_queue *q,
                  const struct cobweb_req *r,
                  uint32_t n);

/*
 Drives the queue and stores up to `max` completions; with `min` above 0 waits until that many of the outstanding ones are there or `timeout_ns` has
 passed (negative: no limit). Returns their number. With `min` 0 it never blocks.
 */
COBWEB_CHECK
int cobweb_reap(struct cobweb_queue *q,
                struct cobweb_cqe *c,
                uint32_t max,
                uint32_t min,
                int64_t timeout_ns);

/* Asks the requests with this `user_data` to stop waiting; each still completes exactly once. Returns how many were asked. Never blocks. */
int cobweb_cancel(struct cobweb_queue *q,
                  uint64_t user_data);

/* Frees a queue; waits until no request of it uses memory of the host any more. NULL is allowed. */
void cobweb_queue_free(struct cobweb_queue *q);

/* Counters of a disk, node or job. Never blocks. Errors: -ENOENT. */
COBWEB_CHECK int cobweb_stats_get(struct cobweb_ctx *c, const char *name, struct cobweb_stats *out);

/* A histogram of guest waits: `which` is "total", "space", "granule", "read" or "write". Never blocks. Errors: -ENOENT. */
COBWEB_CHECK
int cobweb_stats_hist(struct cobweb_ctx *c,
                      const char *name,
                      const char *which,
                      struct cobweb_hist *out);

/* Version of the loaded library: major << 16 | minor << 8 | patch. */
uint32_t cobweb_version(void);

/*
 Whether the loaded library has a feature: "op:map", "driver:qcow2", "prop:ram-cache:capacity", "job:backup", "export:nbd". 1, 0, or
 a negative errno.
 */
int cobweb_has(const char *feature);

/* A static name for a code of a completion, error or report; "unknown" for a number this library does not have. */
const char *cobweb_code_str(uint32_t code);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* COBWEB_H */
