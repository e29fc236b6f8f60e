//! Versions and feature queries.

use super::abi::{COBWEB_VERSION_MAJOR, COBWEB_VERSION_MINOR, COBWEB_VERSION_PATCH};
use super::boundary::{self, text};
use crate::error::Code;
use crate::graph::{DRIVERS, find_driver};
use libc::{c_char, c_int};
use std::ffi::CStr;

/// Version of the loaded library: major << 16 | minor << 8 | patch.
#[unsafe(no_mangle)]
pub extern "C" fn cobweb_version() -> u32 {
    COBWEB_VERSION_MAJOR << 16 | COBWEB_VERSION_MINOR << 8 | COBWEB_VERSION_PATCH
}

/// Whether the loaded library has a feature: "op:map", "driver:qcow2", "prop:ram-cache:capacity", "job:backup", "export:nbd". 1, 0, or
/// a negative errno.
///
/// # Safety
/// `feature` is NULL or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cobweb_has(feature: *const c_char) -> c_int {
    boundary::call_int(std::ptr::null_mut(), || {
        // SAFETY: the caller's duty.
        let feature = unsafe { text(feature, "feature") }?;
        Ok(i64::from(has(feature)))
    })
}

const OPS: &[&str] =
    &["nop", "read", "write", "write-zeroes", "discard", "flush", "block-status", "map", "open"];

fn has(feature: &str) -> bool {
    let mut parts = feature.splitn(3, ':');
    match (parts.next(), parts.next(), parts.next()) {
        (Some("op"), Some(op), None) => OPS.contains(&op),
        (Some("driver"), Some(driver), None) => find_driver(driver).is_some(),
        (Some("prop"), Some(driver), Some(key)) => {
            DRIVERS.iter().filter(|d| d.name == driver).any(|d| d.props.props.iter().any(|p| p.name == key))
        }
        (Some("job"), Some(kind), None) => crate::job::has_kind(kind),
        (Some("export"), Some(kind), None) => cfg!(feature = "nbd") && kind == "nbd",
        _ => false,
    }
}

/// A static name for a code of a completion, error or report; "unknown" for a number this library does not have.
#[unsafe(no_mangle)]
pub extern "C" fn cobweb_code_str(code: u32) -> *const c_char {
    const NAMES: &[&CStr] = &[
        c"none",
        c"io",
        c"invalid",
        c"unsupported",
        c"cancelled",
        c"out-of-range",
        c"read-only",
        c"no-medium",
        c"not-found",
        c"busy",
        c"cbw-failed",
        c"cbw-timeout",
        c"snapshot-broken",
        c"range-lost",
        c"released",
        c"cache-full",
        c"spill-full",
        c"read-failed",
        c"target-failed",
        c"panicked",
        c"forked",
        c"injected",
        c"incomplete",
    ];
    const _: () = assert!(NAMES.len() == Code::ALL.len());
    NAMES.get(code as usize).copied().unwrap_or(c"unknown").as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_names_in_c_and_rust_are_the_same() {
        for code in Code::ALL {
            // SAFETY: static strings.
            let name = unsafe { CStr::from_ptr(cobweb_code_str(*code as u32)) };
            assert_eq!(name.to_str(), Ok(code.name()));
        }
    }
}
