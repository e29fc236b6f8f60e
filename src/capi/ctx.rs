//! `cobweb_ctx`: library, context, events.

use super::abi::{cobweb_ctx, cobweb_error, cobweb_event, cobweb_log, cobweb_log_fn};
use super::boundary::{self, fixed_text, null, opt_text, put, put_text, read_sized, text, write_sized};
use super::handle::Object;
use crate::context::{Context, ContextOptions};
use crate::error::{Error, Result};
use crate::options::Options;
use crate::queue::LogSink;
use crate::sync::Arc;
use libc::{c_char, c_int, c_void, size_t};
use std::ffi::CString;
use std::time::Duration;

impl Object for Arc<Context> {
    type Raw = cobweb_ctx;
    const MARK: u64 = 0x636f_6277_6562_0001;
    const NAME: &'static str = "ctx";
}

/// The host's log callback; the host promises that it may be called from any thread (C20).
struct HostLog {
    f: unsafe extern "C" fn(*mut c_void, c_int, *const c_char, *const c_char),
    arg: *mut c_void,
    level: i32,
}

// SAFETY: the contract of cobweb_log says that the callback and its argument are used from any engine thread.
unsafe impl Send for HostLog {}
// SAFETY: as above.
unsafe impl Sync for HostLog {}

impl HostLog {
    fn write(&self, level: i32, target: &str, msg: &str) {
        if level > self.level {
            return;
        }
        let clean = |s: &str| CString::new(s.replace('\0', " ")).unwrap_or_default();
        let (target, msg) = (clean(target), clean(msg));
        // SAFETY: the callback is the host's, called as its declaration says.
        unsafe { (self.f)(self.arg, level, target.as_ptr(), msg.as_ptr()) };
    }
}

/// Makes a context. No thread is started: it may be called before the host daemonizes (C3).
///
/// `options`: NULL or option text: `worker-threads` (0: the host drives background work with cobweb_ctx_run), `ram-budget` (bytes),
/// `aio` (`io_uring`, `threads`). `log`: NULL or where log lines go. Errors: -EINVAL for an unknown or wrong option.
///
/// # Safety
/// Pointers are NULL or valid as their types say.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_ctx_new(
    options: *const c_char,
    log: *const cobweb_log,
    out: *mut *mut cobweb_ctx,
    e: *mut cobweb_error,
) -> c_int {
    boundary::call_int(e, || {
        if out.is_null() {
            return Err(null("out"));
        }
        // SAFETY: the caller's duty.
        let options = unsafe { opt_text(options, "options") }?;
        let options = if options.is_empty() { Options::empty() } else { Options::parse(options)? };
        // SAFETY: the caller's duty.
        let sink = if log.is_null() { None } else { log_sink(unsafe { read_sized(log, "log") }?) };
        let ctx = Context::new(ContextOptions::from_options(options)?, sink)?;
        // SAFETY: checked above.
        unsafe { put(out, ctx.into_raw()) };
        Ok(0)
    })
}

fn log_sink(log: cobweb_log) -> Option<LogSink> {
    let f: cobweb_log_fn = log.r#fn;
    let host = HostLog { f: f?, arg: log.arg, level: i32::try_from(log.level).unwrap_or(i32::MAX) };
    Some(Box::new(move |level, target, msg| host.write(level, target, msg)))
}

/// Starts the context's threads. After fork() call it in the process that goes on. Errors: -EINVAL if it was started before.
///
/// # Safety
/// `c` is a handle or NULL.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_ctx_start(c: *mut cobweb_ctx, e: *mut cobweb_error) -> c_int {
    // SAFETY: the caller's duty.
    boundary::call_int(e, || unsafe { Arc::<Context>::get(c) }?.start().map(|()| 0))
}

/// Drives background work once, waiting at most `timeout_ns` for some (negative: without limit); only with `worker-threads=0`.
/// Returns 1 if work is left, 0 if not.
///
/// # Safety
/// `c` is a handle or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cobweb_ctx_run(c: *mut cobweb_ctx, timeout_ns: i64) -> c_int {
    boundary::call_int(std::ptr::null_mut(), || {
        let timeout = u64::try_from(timeout_ns).ok().map(Duration::from_nanos);
        // SAFETY: the caller's duty.
        unsafe { Arc::<Context>::get(c) }?.env().run_once(timeout).map(i64::from)
    })
}

/// Answers `what` ("nodes", "disks", "jobs", "stats:NAME") as JSON text; returns its length (which may be more than `cap - 1`: call again).
///
/// # Safety
/// `buf` is valid for `cap` bytes or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cobweb_ctx_query(
    c: *mut cobweb_ctx,
    what: *const c_char,
    buf: *mut c_char,
    cap: size_t,
) -> c_int {
    boundary::call_int(std::ptr::null_mut(), || {
        // SAFETY: the caller's duty.
        let (ctx, what) = unsafe { (Arc::<Context>::get(c)?, text(what, "what")?) };
        let answer = ctx.query(what)?.to_string();
        // SAFETY: the caller's duty.
        Ok(unsafe { put_text(&answer, buf, cap) })
    })
}

/// A descriptor that is readable while events wait; owned by the library.
///
/// # Safety
/// `c` is a handle or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cobweb_event_fd(c: *mut cobweb_ctx) -> c_int {
    boundary::call_int(std::ptr::null_mut(), || {
        // SAFETY: the caller's duty.
        let fd = unsafe { Arc::<Context>::get(c) }?.events().fd();
        fd.map(i64::from).map_err(|e| Error::os(e, "cannot make the event descriptor"))
    })
}

/// Takes the next event: 1 if `out` was filled, 0 if there is none. Never blocks.
///
/// # Safety
/// `out` points to `out->struct_size` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cobweb_event_next(c: *mut cobweb_ctx, out: *mut cobweb_event) -> c_int {
    boundary::call_int(std::ptr::null_mut(), || {
        // SAFETY: the caller's duty.
        let ctx = unsafe { Arc::<Context>::get(c) }?;
        if out.is_null() {
            return Err(null("out"));
        }
        let Some(e) = ctx.events().next() else { return Ok(0) };
        let event = cobweb_event {
            struct_size: 0,
            r#type: e.kind as u32,
            seq: e.seq,
            time_ns: e.time_ns,
            offset: e.offset,
            len: e.len,
            value: e.value,
            err: e.errno,
            code: e.code as u32,
            side: e.side as u32,
            dropped: e.dropped,
            source: fixed_text(&e.source),
        };
        // SAFETY: the caller's duty.
        unsafe { write_sized(out, &event, "out") }?;
        Ok(1)
    })
}

/// Frees a context: stops jobs (bounded), then exports, then closes nodes. Queues must be gone. NULL is allowed.
///
/// # Safety
/// `c` is a handle or NULL and is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cobweb_ctx_free(c: *mut cobweb_ctx) {
    boundary::call_unit(|| {
        // SAFETY: the caller's duty.
        if let Some(ctx) = unsafe { Arc::<Context>::take(c) } {
            ctx.close();
        }
        Ok(())
    });
}

/// The context behind a handle, shared.
///
/// # Safety
/// `c` is a handle or NULL.
pub(super) unsafe fn ctx<'a>(c: *mut cobweb_ctx) -> Result<&'a Arc<Context>> {
    // SAFETY: passed on.
    unsafe { Arc::<Context>::get(c) }
}
