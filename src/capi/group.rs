//! `cobweb_group`: jobs of several disks at one instant (C22).

use super::abi::{cobweb_ctx, cobweb_error, cobweb_group, cobweb_job};
use super::boundary::{self, null, opt_text, put, text};
use super::ctx::ctx;
use super::handle::Object;
use crate::error::Result;
use crate::job::Group;
use crate::options::Options;
use crate::sync::Mutex;
use libc::{c_char, c_int};

/// A group being put together.
pub(super) struct GroupRef {
    group: Mutex<Group>,
}

impl Object for GroupRef {
    type Raw = cobweb_group;
    const MARK: u64 = 0x636f_6277_6562_0006;
    const NAME: &'static str = "group";
}

/// Makes an empty group. `options`: NULL or `completion-mode=individual|grouped` (grouped: one failure fails them all).
///
/// # Safety
/// Pointers are NULL or valid as their types say.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_group_new(
    c: *mut cobweb_ctx,
    options: *const c_char,
    out: *mut *mut cobweb_group,
    e: *mut cobweb_error,
) -> c_int {
    boundary::call_int(e, || {
        // SAFETY: the caller's duty.
        let (ctx, options) = unsafe { (ctx(c)?, opt_text(options, "options")?) };
        if out.is_null() {
            return Err(null("out"));
        }
        let options = if options.is_empty() { Options::empty() } else { Options::parse(options)? };
        let group = GroupRef { group: Mutex::new(ctx.jobs().group(options)?) };
        // SAFETY: checked above.
        unsafe { put(out, group.into_raw()) };
        Ok(0)
    })
}

/// Adds a job to the group; it stays `created` until cobweb_group_start. `out` may be NULL. May block.
///
/// # Safety
/// Pointers are NULL or valid as their types say.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_group_add(
    g: *mut cobweb_group,
    kind: *const c_char,
    options: *const c_char,
    out: *mut *mut cobweb_job,
    e: *mut cobweb_error,
) -> c_int {
    boundary::call_int(e, || {
        // SAFETY: the caller's duty.
        let (g, kind, options) =
            unsafe { (GroupRef::get(g)?, text(kind, "type")?, text(options, "options")?) };
        let job = g.group.lock().add(kind, Options::parse(options)?)?;
        if !out.is_null() {
            // SAFETY: checked above.
            unsafe { put(out, job.into_raw()) };
        }
        Ok(0)
    })
}

/// Starts all jobs of the group at one point in time, or none (S1). May block. The group can be freed afterwards.
///
/// # Safety
/// `g` is a handle or NULL.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_group_start(g: *mut cobweb_group, e: *mut cobweb_error) -> c_int {
    boundary::call_int(e, || -> Result<i64> {
        // SAFETY: the caller's duty.
        let g = unsafe { GroupRef::get(g) }?;
        g.group.lock().start().map(|()| 0)
    })
}

/// Frees a group; jobs that were not started are forgotten. NULL is allowed.
///
/// # Safety
/// `g` is a handle or NULL and is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cobweb_group_free(g: *mut cobweb_group) {
    boundary::call_unit(|| {
        // SAFETY: the caller's duty.
        drop(unsafe { GroupRef::take(g) });
        Ok(())
    });
}
