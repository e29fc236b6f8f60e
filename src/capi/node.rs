//! `cobweb_node`: open, register, find, properties.

use super::abi::{cobweb_ctx, cobweb_error, cobweb_node};
use super::boundary::{self, null, put, put_text, text};
use super::ctx::ctx;
use super::handle::Object;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::node::Vertex;
use crate::options::Options;
use crate::sync::Arc;
use libc::{c_char, c_int, size_t};

/// A counted use of a node.
pub(super) struct NodeRef {
    pub(super) ctx: Arc<Context>,
    pub(super) vertex: Arc<Vertex>,
}

impl Object for NodeRef {
    type Raw = cobweb_node;
    const MARK: u64 = 0x636f_6277_6562_0002;
    const NAME: &'static str = "node";
}

impl NodeRef {
    pub(super) fn new(ctx: &Arc<Context>, vertex: Arc<Vertex>) -> Self {
        Self { ctx: ctx.clone(), vertex }
    }
}

/// Opens a node and its inline children from option text (C10); nothing is probed (C11). May block.
/// Errors: -EINVAL (option; the text names the key), -ENOENT, -EBUSY (name in use), or what the system said.
///
/// # Safety
/// Pointers are NULL or valid as their types say.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_node_open(
    c: *mut cobweb_ctx,
    options: *const c_char,
    out: *mut *mut cobweb_node,
    e: *mut cobweb_error,
) -> c_int {
    boundary::call_int(e, || {
        // SAFETY: the caller's duty.
        let (ctx, options) = unsafe { (ctx(c)?, text(options, "options")?) };
        if out.is_null() {
            return Err(null("out"));
        }
        let vertex = ctx.graph().open(Options::parse(options)?)?;
        // SAFETY: checked above.
        unsafe { put(out, NodeRef::new(ctx, vertex).into_raw()) };
        Ok(0)
    })
}

/// Creates an image: `driver=file,filename=...,size=...` makes a (sparse) file; `driver=qcow2,filename=...` an image with the options that `cobweb_prop_next("create:qcow2", ...)`
/// lists, in the names of QEMU's blockdev-create. An overlay (`backing-file`, `backing-fmt`) whose layout is not given gets sub-clusters, the fastest for one. Refused
/// (-EEXIST) if the file is there; after an error it is not. May block. Errors: -EINVAL (the text names the option), -EFBIG, or what the system said.
///
/// # Safety
/// Pointers are NULL or valid as their types say.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_node_create(
    c: *mut cobweb_ctx,
    options: *const c_char,
    e: *mut cobweb_error,
) -> c_int {
    boundary::call_int(e, || {
        // SAFETY: the caller's duty.
        let (ctx, options) = unsafe { (ctx(c)?, text(options, "options")?) };
        ctx.graph().create_image(Options::parse(options)?).map(|()| 0)
    })
}

/// Finds a node by name; the handle is a new reference. Errors: -ENOENT.
///
/// # Safety
/// Pointers are NULL or valid as their types say.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_node_find(
    c: *mut cobweb_ctx,
    node_name: *const c_char,
    out: *mut *mut cobweb_node,
) -> c_int {
    boundary::call_int(std::ptr::null_mut(), || {
        // SAFETY: the caller's duty.
        let (ctx, name) = unsafe { (ctx(c)?, text(node_name, "node_name")?) };
        if out.is_null() {
            return Err(null("out"));
        }
        let vertex = ctx.graph().node(name)?;
        // SAFETY: checked above.
        unsafe { put(out, NodeRef::new(ctx, vertex).into_raw()) };
        Ok(0)
    })
}

/// Sets a live property. Errors: -EINVAL for a key that is unknown or cannot be changed, or a value it does not take.
///
/// # Safety
/// Pointers are NULL or valid as their types say.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_node_set(
    n: *mut cobweb_node,
    key: *const c_char,
    val: *const c_char,
    e: *mut cobweb_error,
) -> c_int {
    boundary::call_int(e, || {
        // SAFETY: the caller's duty.
        let (node, key, val) = unsafe { (NodeRef::get(n)?, text(key, "key")?, text(val, "val")?) };
        node.vertex.base().set(key, val).map(|()| 0)
    })
}

/// Reads a property as text; returns its length (which may be more than `cap - 1`: call again). `node-name`, `driver`, `size` and `last-error` exist for every node.
///
/// A qcow2 node also has, as JSON: `info` (what `cobweb info` shows as format-specific data), `statistics` (of the open image: cache, allocations, copy-on-write), and `check`, which
/// walks the whole image and may block for long: `corruptions`, `leaks`, `check-errors`, `image-end-offset`, `total-clusters`, `allocated-clusters`, `fragmented-clusters`,
/// `compressed-clusters` and the first `findings`. What a writable image has reserved ahead of need shows as leaks.
///
/// # Safety
/// `buf` is valid for `cap` bytes or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cobweb_node_get(
    n: *mut cobweb_node,
    key: *const c_char,
    buf: *mut c_char,
    cap: size_t,
    e: *mut cobweb_error,
) -> c_int {
    boundary::call_int(e, || {
        // SAFETY: the caller's duty.
        let (node, key) = unsafe { (NodeRef::get(n)?, text(key, "key")?) };
        let checked = if key == "check" { node.ctx.graph().check_image(&node.vertex) } else { None };
        let value = checked.unwrap_or_else(|| get(&node.vertex, key))?;
        // SAFETY: the caller's duty.
        Ok(unsafe { put_text(&value, buf, cap) })
    })
}

fn get(vertex: &Vertex, key: &str) -> Result<String> {
    let node = vertex.base();
    let value = match key {
        "node-name" => Some(vertex.name().to_owned()),
        "driver" => Some(node.driver().to_owned()),
        "size" => Some(node.limits().size.to_string()),
        "last-error" => Some(node.last_error().unwrap_or_default()),
        other => node.get(other),
    };
    value.ok_or_else(|| Error::invalid(format!("driver '{}' has no property '{key}'", node.driver())))
}

/// Gives a reference back. The node is closed when its last user (handle, parent, disk, job) has gone. NULL is allowed.
///
/// # Safety
/// `n` is a handle or NULL and is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cobweb_node_unref(n: *mut cobweb_node) {
    boundary::call_unit(|| {
        // SAFETY: the caller's duty.
        let Some(NodeRef { ctx, vertex }) = (unsafe { NodeRef::take(n) }) else { return Ok(()) };
        drop(vertex);
        ctx.graph().collect()
    });
}
