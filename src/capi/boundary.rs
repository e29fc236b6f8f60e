//! What every entry point goes through: panics, NULL, error text, sized structs, option text.

use super::abi::cobweb_error;
use crate::error::{Code, Error, Result};
use libc::{c_char, c_int};
use std::ffi::CStr;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs an entry point: its value, or `-errno` with the text in `e`.
pub(super) fn call(e: *mut cobweb_error, body: impl FnOnce() -> Result<i64>) -> i64 {
    let result = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(result) => result,
        Err(payload) => {
            let text = payload
                .downcast_ref::<&str>()
                .map(|s| (*s).to_owned())
                .or_else(|| payload.downcast_ref::<String>().cloned())
                .unwrap_or_default();
            Err(Error::new(libc::ENOTRECOVERABLE, Code::Panicked, format!("internal error: {text}")))
        }
    };
    match result {
        Ok(value) => value,
        Err(error) => {
            write_error(e, &error);
            -i64::from(error.errno())
        }
    }
}

/// [`call`] for functions that return an int.
pub(super) fn call_int(e: *mut cobweb_error, body: impl FnOnce() -> Result<i64>) -> c_int {
    // Values of these functions are small by construction.
    call(e, body).clamp(i64::from(c_int::MIN), i64::from(c_int::MAX)) as c_int
}

/// [`call`] for functions that return nothing.
pub(super) fn call_unit(body: impl FnOnce() -> Result<()>) {
    call(std::ptr::null_mut(), || body().map(|()| 0));
}

fn write_error(e: *mut cobweb_error, error: &Error) {
    if e.is_null() {
        return;
    }
    // SAFETY: not NULL, so the caller promises a readable first field.
    let size = unsafe { (*e).struct_size } as usize;
    if size < size_of::<cobweb_error>() {
        return;
    }
    let mut msg = [0; 240];
    let text = error.full_text();
    let mut n = text.len().min(msg.len() - 1);
    while !text.is_char_boundary(n) {
        n -= 1;
    }
    for (to, from) in msg.iter_mut().zip(text.as_bytes()[..n].iter()) {
        *to = *from as c_char;
    }
    // SAFETY: the caller's struct is at least this large (checked above).
    unsafe {
        (*e).err = -error.errno();
        (*e).code = error.code() as u32;
        (*e).rsv = 0;
        (*e).msg = msg;
    }
}

/// The error of a required pointer that is NULL (C24).
pub(super) fn null(what: &str) -> Error {
    Error::new(libc::EFAULT, Code::Invalid, format!("'{what}' is NULL"))
}

/// A required text argument. At most 1 MiB of UTF-8.
///
/// # Safety
/// `text` is NULL or a NUL-terminated string.
pub(super) unsafe fn text<'a>(text: *const c_char, what: &str) -> Result<&'a str> {
    if text.is_null() {
        return Err(null(what));
    }
    // SAFETY: not NULL; the caller promises a terminator.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| Error::invalid(format!("'{what}' is not UTF-8")))
}

/// An optional text argument; NULL is empty.
///
/// # Safety
/// As [`text`].
pub(super) unsafe fn opt_text<'a>(ptr: *const c_char, what: &str) -> Result<&'a str> {
    if ptr.is_null() {
        return Ok("");
    }
    // SAFETY: passed on.
    unsafe { text(ptr, what) }
}

/// Writes `value` to an output parameter that was checked not to be NULL.
///
/// # Safety
/// `out` is valid for a write of `T`.
pub(super) unsafe fn put<T>(out: *mut T, value: T) {
    // SAFETY: the caller's duty.
    unsafe { out.write(value) };
}

/// Copies text into a caller's buffer, NUL-terminated and cut to fit; returns the length needed without the NUL (C18).
///
/// # Safety
/// `buf` is valid for `cap` bytes, or NULL.
pub(super) unsafe fn put_text(text: &str, buf: *mut c_char, cap: usize) -> i64 {
    if !buf.is_null() && cap > 0 {
        let n = text.len().min(cap - 1);
        // SAFETY: n + 1 <= cap bytes are written.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr().cast(), buf, n);
            buf.add(n).write(0);
        }
    }
    text.len() as i64
}

/// Text for a fixed field, NUL-terminated and cut to fit.
pub(super) fn fixed_text<const N: usize>(text: &str) -> [c_char; N] {
    let mut out = [0; N];
    for (to, from) in out[..N - 1].iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
    out
}

/// Reads a control struct of the caller's size (C9): what the caller's is too short for is zero, and a longer one is accepted if its unknown tail is zero.
///
/// # Safety
/// `from` is NULL or points to `struct_size` readable bytes, the first four of which are that number; `T` is `repr(C)`, starts with `struct_size: u32`
/// and all-zero is a valid value.
pub(super) unsafe fn read_sized<T>(from: *const T, what: &str) -> Result<T> {
    if from.is_null() {
        return Err(null(what));
    }
    // SAFETY: the first field is readable.
    let size = unsafe { from.cast::<u32>().read_unaligned() } as usize;
    check_size(size, what)?;
    let known = size.min(size_of::<T>());
    if size > known {
        // SAFETY: the caller's struct has `size` bytes.
        let tail = unsafe { std::slice::from_raw_parts(from.cast::<u8>().add(known), size - known) };
        if tail.iter().any(|b| *b != 0) {
            return Err(Error::new(
                libc::E2BIG,
                Code::Invalid,
                format!("'{what}' uses fields this library does not know"),
            ));
        }
    }
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: `known` bytes are readable there and writable here; zero is valid for the rest.
    unsafe {
        std::ptr::copy_nonoverlapping(from.cast::<u8>(), value.as_mut_ptr().cast::<u8>(), known);
        Ok(value.assume_init())
    }
}

/// Fills an output struct up to the caller's size (C9), keeping its `struct_size`.
///
/// # Safety
/// As [`read_sized`], and writable.
pub(super) unsafe fn write_sized<T>(to: *mut T, value: &T, what: &str) -> Result<()> {
    if to.is_null() {
        return Err(null(what));
    }
    // SAFETY: the first field is readable.
    let size = unsafe { to.cast::<u32>().read_unaligned() } as usize;
    check_size(size, what)?;
    let known = size.min(size_of::<T>());
    // SAFETY: `known - 4` bytes behind the size are writable.
    unsafe {
        std::ptr::copy_nonoverlapping(
            std::ptr::from_ref(value).cast::<u8>().add(4),
            to.cast::<u8>().add(4),
            known - 4,
        );
        if size > known {
            std::ptr::write_bytes(to.cast::<u8>().add(known), 0, size - known);
        }
    }
    Ok(())
}

fn check_size(size: usize, what: &str) -> Result<()> {
    // 64 KiB: no struct will ever be that large, and a stray value must not make us read far.
    if (8..=1 << 16).contains(&size) {
        Ok(())
    } else {
        Err(Error::invalid(format!("'{what}' has a struct_size of {size}")))
    }
}
