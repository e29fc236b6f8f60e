//! Statistics by name of a disk, node or job.

use super::abi::{cobweb_ctx, cobweb_hist, cobweb_stats};
use super::boundary::{self, text, write_sized};
use super::ctx::ctx;
use crate::error::Error;
use libc::{c_char, c_int};

/// Counters of a disk, node or job. Never blocks. Errors: -ENOENT.
///
/// # Safety
/// `out` points to `out->struct_size` writable bytes.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_stats_get(
    c: *mut cobweb_ctx,
    name: *const c_char,
    out: *mut cobweb_stats,
) -> c_int {
    boundary::call_int(std::ptr::null_mut(), || {
        // SAFETY: the caller's duty.
        let (ctx, name) = unsafe { (ctx(c)?, text(name, "name")?) };
        let s = ctx.stats(name).ok_or_else(|| nothing(name))?;
        let stats = cobweb_stats {
            struct_size: 0,
            rsv: 0,
            rd_ops: s.rd_ops,
            rd_bytes: s.rd_bytes,
            wr_ops: s.wr_ops,
            wr_bytes: s.wr_bytes,
            zero_ops: s.zero_ops,
            discard_ops: s.discard_ops,
            flush_ops: s.flush_ops,
            failed: s.failed,
            in_flight: s.in_flight,
            cbw_guest_bytes: s.cbw_guest_bytes,
            cbw_copied_bytes: s.cbw_copied_bytes,
            cbw_timeouts: s.cbw_timeouts,
            cbw_late: s.cbw_late,
            cbw_frozen_waits: s.cbw_frozen_waits,
            lost_bytes: s.lost_bytes,
            cache_used: s.cache_used,
            cache_peak: s.cache_peak,
            cache_waiters: s.cache_waiters,
            cache_spilled: s.cache_spilled,
            cache_stored: s.cache_stored,
            cache_writes: s.cache_writes,
            time_to_full_ms: s.time_to_full_ms,
        };
        // SAFETY: the caller's duty.
        unsafe { write_sized(out, &stats, "out") }.map(|()| 0)
    })
}

/// A histogram of guest waits: `which` is "total", "space", "granule", "read" or "write". Never blocks. Errors: -ENOENT.
///
/// # Safety
/// `out` points to `out->struct_size` writable bytes.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_stats_hist(
    c: *mut cobweb_ctx,
    name: *const c_char,
    which: *const c_char,
    out: *mut cobweb_hist,
) -> c_int {
    boundary::call_int(std::ptr::null_mut(), || {
        // SAFETY: the caller's duty.
        let (ctx, name, which) = unsafe { (ctx(c)?, text(name, "name")?, text(which, "which")?) };
        let h = ctx.hist(name, which).ok_or_else(|| nothing(name))?;
        let hist = cobweb_hist {
            struct_size: 0,
            rsv: 0,
            count: h.count,
            sum_ns: h.sum_ns,
            max_ns: h.max_ns,
            bucket: h.bucket,
        };
        // SAFETY: the caller's duty.
        unsafe { write_sized(out, &hist, "out") }.map(|()| 0)
    })
}

fn nothing(name: &str) -> Error {
    Error::not_found(format!("no such statistics for '{name}'"))
}
