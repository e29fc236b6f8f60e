"""Constants and structs of cobweb.h, checked against the header by tests/test_layout.py."""
import ctypes as C

OP_NOP, OP_READ, OP_WRITE, OP_WRITE_ZEROES, OP_DISCARD, OP_FLUSH, OP_BLOCK_STATUS, OP_MAP, OP_OPEN = range(9)
F_FUA, F_MAY_UNMAP, F_NO_FALLBACK, F_REGISTERED, F_COPY_IOV = 1, 2, 4, 8, 16
EXT_ALLOCATED, EXT_ZERO, EXT_COMPRESSED, EXT_DIRTY, EXT_NO_ACCESS = 1, 2, 4, 8, 16
CQE_MORE = 1
JOB_STATES = ["", "created", "running", "paused", "ready", "standby", "waiting", "pending", "aborting", "concluded", "null"]
JOB_CONCLUDED, JOB_NULL = 9, 10
EVENT_TYPES = ["", "resize", "job", "cbw-broken", "range-lost", "cache-mark", "overflow", "corrupt", "reader-gone"]
SIDES = ["none", "source", "target", "cache", "spill", "reader", "host"]
ACTIONS = ["none", "retried", "spilled", "written-through", "range-lost", "snapshot-broken", "guest-write-failed"]


class iovec(C.Structure):
    _fields_ = [("iov_base", C.c_void_p), ("iov_len", C.c_size_t)]


class cobweb_error(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("err", C.c_int32), ("code", C.c_uint32), ("rsv", C.c_uint32), ("msg", C.c_char * 240)]


class cobweb_req(C.Structure):
    _fields_ = [("op", C.c_uint16), ("flags", C.c_uint16), ("iovcnt", C.c_uint32), ("offset", C.c_uint64), ("len", C.c_uint64),
                ("iov", C.POINTER(iovec)), ("user_data", C.c_uint64), ("arg", C.c_uint64), ("prio", C.c_uint32),
                ("rsv0", C.c_uint32), ("rsv1", C.c_uint64)]


class cobweb_cqe(C.Structure):
    _fields_ = [("user_data", C.c_uint64), ("res", C.c_int64), ("flags", C.c_uint32), ("code", C.c_uint32), ("rsv", C.c_uint64)]


class cobweb_extent(C.Structure):
    _fields_ = [("len", C.c_uint64), ("flags", C.c_uint32), ("depth", C.c_uint32)]


class cobweb_limits(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("flags", C.c_uint32), ("size", C.c_uint64), ("max_zeroes", C.c_uint64),
                ("max_discard", C.c_uint64), ("request_align", C.c_uint32), ("memory_align", C.c_uint32),
                ("opt_transfer", C.c_uint32), ("max_transfer", C.c_uint32), ("discard_align", C.c_uint32), ("max_iov", C.c_uint32)]


class cobweb_event(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("type", C.c_uint32), ("seq", C.c_uint64), ("time_ns", C.c_uint64),
                ("offset", C.c_uint64), ("len", C.c_uint64), ("value", C.c_uint64), ("err", C.c_int32), ("code", C.c_uint32),
                ("side", C.c_uint32), ("dropped", C.c_uint32), ("source", C.c_char * 64)]


class cobweb_job_info(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("state", C.c_uint32), ("current", C.c_uint64), ("total", C.c_uint64),
                ("speed", C.c_uint64), ("prio", C.c_uint32), ("paused", C.c_uint32), ("err", C.c_int32), ("code", C.c_uint32)]


class cobweb_report(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("err", C.c_int32), ("code", C.c_uint32), ("side", C.c_uint32), ("op", C.c_uint32),
                ("action", C.c_uint32), ("offset", C.c_uint64), ("len", C.c_uint64), ("mono_ns", C.c_uint64),
                ("real_ns", C.c_uint64), ("count", C.c_uint64), ("node", C.c_char * 64)]


class cobweb_range(C.Structure):
    _fields_ = [("offset", C.c_uint64), ("len", C.c_uint64), ("real_ns", C.c_uint64), ("err", C.c_int32), ("code", C.c_uint32)]


class cobweb_stats(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("rsv", C.c_uint32)] + [(n, C.c_uint64) for n in (
        "rd_ops rd_bytes wr_ops wr_bytes zero_ops discard_ops flush_ops failed in_flight cbw_guest_bytes cbw_copied_bytes "
        "cbw_timeouts cbw_late cbw_frozen_waits lost_bytes cache_used cache_peak cache_waiters cache_spilled cache_stored "
        "cache_writes time_to_full_ms").split()]


class cobweb_hist(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("rsv", C.c_uint32), ("count", C.c_uint64), ("sum_ns", C.c_uint64),
                ("max_ns", C.c_uint64), ("bucket", C.c_uint64 * 128)]


class cobweb_prop(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("states", C.c_uint32), ("name", C.c_char_p), ("type", C.c_char_p), ("def", C.c_char_p),
                ("doc", C.c_char_p)]


STRUCTS = [cobweb_prop, cobweb_error, cobweb_req, cobweb_cqe, cobweb_extent, cobweb_limits, cobweb_event, cobweb_job_info, cobweb_report,
           cobweb_range, cobweb_stats, cobweb_hist]

_p, _s, _u32, _u64, _i64, _int = C.c_void_p, C.c_char_p, C.c_uint32, C.c_uint64, C.c_int64, C.c_int
_e = C.POINTER(cobweb_error)
_out = C.POINTER(C.c_void_p)

# name: (result, arguments)
FUNCTIONS = {
    "version": (_u32, []), "has": (_int, [_s]), "code_str": (_s, [_u32]),
    "prop_next": (_int, [_s, C.POINTER(C.c_uint32), C.POINTER(cobweb_prop)]),
    "ctx_new": (_int, [_s, _p, _out, _e]), "ctx_start": (_int, [_p, _e]), "ctx_query": (_int, [_p, _s, _p, C.c_size_t]),
    "event_fd": (_int, [_p]), "event_next": (_int, [_p, C.POINTER(cobweb_event)]), "ctx_free": (None, [_p]),
    "node_open": (_int, [_p, _s, _out, _e]), "node_create": (_int, [_p, _s, _e]), "node_find": (_int, [_p, _s, _out]),
    "node_set": (_int, [_p, _s, _s, _e]), "node_get": (_int, [_p, _s, _p, C.c_size_t, _e]), "node_unref": (None, [_p]),
    "disk_new": (_int, [_p, _s, _out, _e]), "disk_insert": (_int, [_p, _p, _e]),
    "disk_filter_add": (_int, [_p, _s, _out, _e]), "disk_filter_del": (_int, [_p, _p, _e]),
    "disk_limits": (_int, [_p, C.POINTER(cobweb_limits)]), "disk_set": (_int, [_p, _s, _s, _e]), "disk_free": (None, [_p]),
    "queue_new": (_int, [_p, _u32, _out, _e]), "queue_fd": (_int, [_p]), "queue_arm": (_int, [_p, _int]),
    "submit": (_int, [_p, C.POINTER(cobweb_req), _u32]), "reap": (_int, [_p, C.POINTER(cobweb_cqe), _u32, _u32, _i64]),
    "cancel": (_int, [_p, _u64]), "queue_free": (None, [_p]),
    "pread": (_i64, [_p, _p, C.c_size_t, _u64, _u32]), "pwrite": (_i64, [_p, _p, C.c_size_t, _u64, _u32]),
    "write_zeroes": (_int, [_p, _u64, _u64, _u32]), "discard": (_int, [_p, _u64, _u64]), "flush": (_int, [_p]),
    "block_status": (_int, [_p, _u64, _u64, C.POINTER(cobweb_extent), _u32]),
    "job_start": (_int, [_p, _s, _s, _out, _e]), "job_find": (_int, [_p, _s, _out]),
    "job_query": (_int, [_p, C.POINTER(cobweb_job_info)]), "job_report": (_int, [_p, C.POINTER(cobweb_report)]),
    "job_lost_next": (_int, [_p, C.POINTER(_u64), C.POINTER(cobweb_range)]),
    "job_pause": (_int, [_p]), "job_resume": (_int, [_p]), "job_cancel": (_int, [_p]), "job_finalize": (_int, [_p, _e]),
    "job_dismiss": (_int, [_p]), "job_set_speed": (_int, [_p, _u64]), "job_set_priority": (_int, [_p, _u32]),
    "job_wait": (_int, [_p, _i64]), "job_unref": (None, [_p]),
    "group_new": (_int, [_p, _s, _out, _e]), "group_add": (_int, [_p, _s, _s, _out, _e]), "group_start": (_int, [_p, _e]),
    "group_free": (None, [_p]),
    "export_start": (_int, [_p, _s, _s, _out, _e]), "export_stop": (None, [_p]),
    "stats_get": (_int, [_p, _s, C.POINTER(cobweb_stats)]), "stats_hist": (_int, [_p, _s, _s, C.POINTER(cobweb_hist)]),
}
