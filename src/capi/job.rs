//! `cobweb_job`: start, find, control, report.

use super::abi::*;
use super::boundary::{self, fixed_text, null, put, text, write_sized};
use super::ctx::ctx;
use super::handle::Object;
use crate::error::Result;
use crate::job::{Job, Priority};
use crate::options::Options;
use crate::sync::Arc;
use libc::{c_char, c_int};
use std::time::Duration;

impl Object for Arc<Job> {
    type Raw = cobweb_job;
    const MARK: u64 = 0x636f_6277_6562_0005;
    const NAME: &'static str = "job";
}

/// Starts a job ("backup", "copy") with options in QEMU's vocabulary. `out` may be NULL: the job belongs to the context and is found by its id. May block.
/// Errors: -EINVAL, -ENOENT, -EBUSY.
///
/// # Safety
/// Pointers are NULL or valid as their types say.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_job_start(
    c: *mut cobweb_ctx,
    kind: *const c_char,
    options: *const c_char,
    out: *mut *mut cobweb_job,
    e: *mut cobweb_error,
) -> c_int {
    boundary::call_int(e, || {
        // SAFETY: the caller's duty.
        let (ctx, kind, options) = unsafe { (ctx(c)?, text(kind, "type")?, text(options, "options")?) };
        let job = ctx.jobs().start(kind, Options::parse(options)?)?;
        if !out.is_null() {
            // SAFETY: checked above.
            unsafe { put(out, job.into_raw()) };
        }
        Ok(0)
    })
}

/// Finds a job by id. Errors: -ENOENT.
///
/// # Safety
/// Pointers are NULL or valid as their types say.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_job_find(
    c: *mut cobweb_ctx,
    job_id: *const c_char,
    out: *mut *mut cobweb_job,
) -> c_int {
    boundary::call_int(std::ptr::null_mut(), || {
        // SAFETY: the caller's duty.
        let (ctx, id) = unsafe { (ctx(c)?, text(job_id, "job_id")?) };
        if out.is_null() {
            return Err(null("out"));
        }
        let job = ctx.jobs().find(id)?;
        // SAFETY: checked above.
        unsafe { put(out, job.into_raw()) };
        Ok(0)
    })
}

/// State and progress. Never blocks.
///
/// # Safety
/// `out` points to `out->struct_size` writable bytes.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_job_query(j: *mut cobweb_job, out: *mut cobweb_job_info) -> c_int {
    boundary::call_int(std::ptr::null_mut(), || {
        // SAFETY: the caller's duty.
        let i = unsafe { Arc::<Job>::get(j) }?.query();
        let info = cobweb_job_info {
            struct_size: 0,
            state: i.state as u32,
            current: i.current,
            total: i.total,
            speed: i.speed,
            prio: i.prio as u32,
            paused: u32::from(i.paused),
            err: -i.err,
            code: i.code as u32,
        };
        // SAFETY: the caller's duty.
        unsafe { write_sized(out, &info, "out") }.map(|()| 0)
    })
}

/// The first error of the job: 1 if `out` was filled, 0 if there was none. Never blocks.
///
/// # Safety
/// `out` points to `out->struct_size` writable bytes.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_job_report(j: *mut cobweb_job, out: *mut cobweb_report) -> c_int {
    boundary::call_int(std::ptr::null_mut(), || {
        // SAFETY: the caller's duty.
        let Some(r) = unsafe { Arc::<Job>::get(j) }?.report() else { return Ok(0) };
        let report = cobweb_report {
            struct_size: 0,
            err: -r.error.errno,
            code: r.error.code as u32,
            side: r.side as u32,
            op: u32::from(op_number(r.op)),
            action: r.action as u32,
            offset: r.offset,
            len: r.len,
            mono_ns: r.mono_ns,
            real_ns: r.real_ns,
            count: r.count,
            node: fixed_text(&r.node),
        };
        // SAFETY: the caller's duty.
        unsafe { write_sized(out, &report, "out") }?;
        Ok(1)
    })
}

fn op_number(op: crate::request::Op) -> u16 {
    use crate::request::Op;
    match op {
        Op::Read => COBWEB_OP_READ,
        Op::Write => COBWEB_OP_WRITE,
        Op::WriteZeroes => COBWEB_OP_WRITE_ZEROES,
        Op::Discard => COBWEB_OP_DISCARD,
        Op::Flush => COBWEB_OP_FLUSH,
    }
}

/// The next lost range: 1 if `out` was filled, 0 at the end. `iter` starts at 0.
///
/// # Safety
/// `iter` and `out` are valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cobweb_job_lost_next(
    j: *mut cobweb_job,
    iter: *mut u64,
    out: *mut cobweb_range,
) -> c_int {
    boundary::call_int(std::ptr::null_mut(), || {
        // SAFETY: the caller's duty.
        let job = unsafe { Arc::<Job>::get(j) }?;
        if iter.is_null() || out.is_null() {
            return Err(null(if iter.is_null() { "iter" } else { "out" }));
        }
        // SAFETY: checked above.
        let at = unsafe { iter.read() };
        let lost = job.lost();
        let Some(l) = usize::try_from(at).ok().and_then(|i| lost.get(i)) else { return Ok(0) };
        let range = cobweb_range {
            offset: l.range.offset,
            len: l.range.len,
            real_ns: l.real_ns,
            err: -l.error.errno,
            code: l.error.code as u32,
        };
        // SAFETY: checked above.
        unsafe {
            put(out, range);
            put(iter, at + 1);
        }
        Ok(1)
    })
}

/// Pauses: parts in flight end, none starts (S57). Never blocks.
///
/// # Safety
/// `j` is a handle or NULL.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_job_pause(j: *mut cobweb_job) -> c_int {
    // SAFETY: the caller's duty.
    boundary::call_int(std::ptr::null_mut(), || unsafe { Arc::<Job>::get(j) }?.pause().map(|()| 0))
}

/// Resumes a paused job. Never blocks.
///
/// # Safety
/// `j` is a handle or NULL.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_job_resume(j: *mut cobweb_job) -> c_int {
    // SAFETY: the caller's duty.
    boundary::call_int(std::ptr::null_mut(), || unsafe { Arc::<Job>::get(j) }?.resume().map(|()| 0))
}

/// Asks the job to end; cobweb_job_wait returns within a second also when the target never answers (S35). Never blocks.
///
/// # Safety
/// `j` is a handle or NULL.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_job_cancel(j: *mut cobweb_job) -> c_int {
    // SAFETY: the caller's duty.
    boundary::call_int(std::ptr::null_mut(), || unsafe { Arc::<Job>::get(j) }?.cancel().map(|()| 0))
}

/// Forgets a concluded job (`auto-dismiss=off`). Errors: -EBUSY if it has not concluded.
///
/// # Safety
/// `j` is a handle or NULL.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_job_dismiss(j: *mut cobweb_job) -> c_int {
    // SAFETY: the caller's duty.
    boundary::call_int(std::ptr::null_mut(), || unsafe { Arc::<Job>::get(j) }?.dismiss().map(|()| 0))
}

/// Lets a pending job (`auto-finalize=off`) finish. May block.
///
/// # Safety
/// `j` is a handle or NULL.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_job_finalize(j: *mut cobweb_job, e: *mut cobweb_error) -> c_int {
    // SAFETY: the caller's duty.
    boundary::call_int(e, || unsafe { Arc::<Job>::get(j) }?.finalize().map(|()| 0))
}

/// Limits background copies to `bytes_per_s` (0 = no limit); acts at once. Never blocks.
///
/// # Safety
/// `j` is a handle or NULL.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_job_set_speed(j: *mut cobweb_job, bytes_per_s: u64) -> c_int {
    boundary::call_int(std::ptr::null_mut(), || {
        // SAFETY: the caller's duty.
        let job = unsafe { Arc::<Job>::get(j) }?;
        job.set_speed(bytes_per_s).map(|()| 0)
    })
}

/// Sets the class of background copies: COBWEB_PRIO_BACKGROUND, COBWEB_PRIO_LAZY or COBWEB_PRIO_INHERIT. Never blocks.
///
/// # Safety
/// `j` is a handle or NULL.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_job_set_priority(j: *mut cobweb_job, prio: u32) -> c_int {
    boundary::call_int(std::ptr::null_mut(), || {
        // SAFETY: the caller's duty.
        let job = unsafe { Arc::<Job>::get(j) }?;
        job.set_priority(Priority::from_number(prio)?);
        Ok(0)
    })
}

/// Waits until the job has concluded or `timeout_ns` has passed (negative: no limit). Returns 0 if it succeeded, its negative errno if it
/// failed or was cancelled (-ECANCELED), -ETIMEDOUT if it is still running.
///
/// # Safety
/// `j` is a handle or NULL.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_job_wait(j: *mut cobweb_job, timeout_ns: i64) -> c_int {
    boundary::call_int(std::ptr::null_mut(), || -> Result<i64> {
        // SAFETY: the caller's duty.
        let job = unsafe { Arc::<Job>::get(j) }?;
        let timeout = u64::try_from(timeout_ns).ok().map(Duration::from_nanos);
        if job.wait(timeout)? { Ok(-i64::from(job.query().err)) } else { Ok(-i64::from(libc::ETIMEDOUT)) }
    })
}

/// Drops the handle; the job goes on. NULL is allowed.
///
/// # Safety
/// `j` is a handle or NULL and is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cobweb_job_unref(j: *mut cobweb_job) {
    boundary::call_unit(|| {
        // SAFETY: the caller's duty.
        drop(unsafe { Arc::<Job>::take(j) });
        Ok(())
    });
}
