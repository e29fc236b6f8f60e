//! Introspection of options.

use super::abi::cobweb_prop;
use super::boundary::{self, null, put, text, write_sized};
use crate::graph::{CREATE_PROPS, DRIVERS};
use libc::{c_char, c_int};
use once_cell::sync::OnceCell;
use std::ffi::CString;

/// The strings of one property, kept for the life of the library.
struct Row {
    driver: &'static str,
    states: u32,
    name: CString,
    kind: CString,
    def: CString,
    doc: CString,
}

/// Lists the options of a driver, one per call: 1 if `out` was filled, 0 at the end, -ENOENT for an unknown driver. `iter` starts at 0. The strings are static. `create:qcow2` stands
/// for what `cobweb_node_create` takes.
///
/// # Safety
/// `iter` and `out` are valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cobweb_prop_next(
    driver: *const c_char,
    iter: *mut u32,
    out: *mut cobweb_prop,
) -> c_int {
    boundary::call_int(std::ptr::null_mut(), || {
        // SAFETY: the caller's duty.
        let driver = unsafe { text(driver, "driver") }?;
        if iter.is_null() || out.is_null() {
            return Err(null(if iter.is_null() { "iter" } else { "out" }));
        }
        let name = match crate::graph::find_driver(driver) {
            Some(found) => found.name,
            None if driver == CREATE_PROPS.driver => CREATE_PROPS.driver,
            None => return Err(crate::error::Error::not_found(format!("unknown driver '{driver}'"))),
        };
        // SAFETY: checked above.
        let at = unsafe { iter.read() };
        let Some(row) = rows().iter().filter(|r| r.driver == name).nth(at as usize) else {
            return Ok(0);
        };
        let prop = cobweb_prop {
            struct_size: 0,
            states: row.states,
            name: row.name.as_ptr(),
            r#type: row.kind.as_ptr(),
            def: row.def.as_ptr(),
            doc: row.doc.as_ptr(),
        };
        // SAFETY: checked above, and the caller's duty.
        unsafe {
            write_sized(out, &prop, "out")?;
            put(iter, at.saturating_add(1));
        }
        Ok(1)
    })
}

fn rows() -> &'static [Row] {
    static ROWS: OnceCell<Vec<Row>> = OnceCell::new();
    ROWS.get_or_init(|| {
        let c = |s: &str| CString::new(s).unwrap_or_default();
        DRIVERS
            .iter()
            .map(|d| (d.name, d.props))
            .chain([(CREATE_PROPS.driver, &CREATE_PROPS)])
            .flat_map(|(driver, table)| {
                table.props.iter().map(move |p| Row {
                    driver,
                    states: p.states.bits(),
                    name: c(p.name),
                    kind: c(p.ty.name()),
                    def: c(p.default),
                    doc: c(p.doc),
                })
            })
            .collect()
    })
}
