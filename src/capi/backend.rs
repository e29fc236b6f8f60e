//! Host backends: a struct of callbacks becomes a node (C12).

use super::abi::*;
use super::boundary::{self, null, put, read_sized, text};
use super::ctx::ctx;
use super::handle::Object;
use super::node::NodeRef;
use crate::error::Error;
use crate::io::host::{Concurrency, HostBackend, HostIo, HostLimits, HostNode, HostOp, HostOptions, IoState};
use crate::node::{Extent, ExtentFlags};
use crate::queue::Env;
use crate::request::{Class, Op};
use crate::sync::Arc;
use libc::{c_char, c_int, c_void, iovec};

/// The host's callbacks and their first argument.
struct CBackend {
    ops: cobweb_backend_ops,
    be: *mut c_void,
}

// SAFETY: the contract of cobweb_node_register says that the callbacks are called from engine threads; how many at once is what `concurrency` says.
unsafe impl Send for CBackend {}
// SAFETY: as above.
unsafe impl Sync for CBackend {}

impl HostBackend for CBackend {
    fn limits(&self) -> HostLimits {
        let mut l = cobweb_limits {
            struct_size: size_of::<cobweb_limits>() as u32,
            flags: 0,
            size: 0,
            max_zeroes: 0,
            max_discard: 0,
            request_align: 0,
            memory_align: 0,
            opt_transfer: 0,
            max_transfer: 0,
            discard_align: 0,
            max_iov: 0,
        };
        if let Some(f) = self.ops.limits {
            // SAFETY: a callback of the host, called as declared; a failure leaves a size of 0.
            let r = Env::without_blocking(|| unsafe { f(self.be, &raw mut l) });
            if r < 0 {
                l.size = 0;
            }
        }
        let mut out = HostLimits::plain(l.size);
        out.limits.read_only = l.flags & 1 != 0;
        out.limits.request_align = l.request_align.max(1);
        out.limits.memory_align = l.memory_align.max(1);
        out.limits.opt_transfer = l.opt_transfer;
        out.limits.max_transfer = l.max_transfer;
        out.limits.discard_align = l.discard_align.max(1);
        if l.max_iov > 0 {
            out.limits.max_iov = l.max_iov;
        }
        out
    }

    fn submit(&self, io: HostIo) {
        let Some(f) = self.ops.submit else { return };
        let HostOp::Request(op) = io.op() else {
            // The header has no way to ask a backend for its status: all of it is data.
            io.complete_status(Extent { len: io.range().len, flags: ExtentFlags::ALLOCATED, depth: 0 });
            return;
        };
        let bufs = io.buffers();
        let iov: Vec<iovec> =
            bufs.segments().iter().map(|s| iovec { iov_base: s.as_ptr().cast(), iov_len: s.len() }).collect();
        let range = io.range();
        let req = cobweb_req {
            op: op_number(op),
            flags: io.flags().bits(),
            iovcnt: iov.len() as u32,
            offset: range.offset,
            len: range.len,
            iov: iov.as_ptr(),
            user_data: 0,
            arg: 0,
            prio: prio_of(io.class()),
            rsv0: 0,
            rsv1: 0,
        };
        // The host owns one reference, as a raw pointer, until it completes the request.
        let raw = Arc::into_raw(io.into_state()).cast_mut();
        // SAFETY: a callback of the host; the request and its array are valid during the call, the memory until the completion.
        let r = Env::without_blocking(|| unsafe { f(self.be, &raw const req, raw.cast()) });
        if r < 0 {
            // Refused: no completion will come.
            complete(raw, i64::from(r));
        }
    }

    fn cancel(&self, io: &HostIo) -> bool {
        let Some(f) = self.ops.cancel else { return false };
        let raw = Arc::as_ptr(io.state()).cast_mut();
        // SAFETY: a callback of the host, with a token it has.
        Env::without_blocking(|| unsafe { f(self.be, raw.cast()) }) >= 0
    }
}

impl Drop for CBackend {
    fn drop(&mut self) {
        if let Some(f) = self.ops.release {
            // SAFETY: a callback of the host, called once.
            Env::without_blocking(|| unsafe { f(self.be) });
        }
    }
}

fn op_number(op: Op) -> u16 {
    match op {
        Op::Read => COBWEB_OP_READ,
        Op::Write => COBWEB_OP_WRITE,
        Op::WriteZeroes => COBWEB_OP_WRITE_ZEROES,
        Op::Discard => COBWEB_OP_DISCARD,
        Op::Flush => COBWEB_OP_FLUSH,
    }
}

fn prio_of(class: Class) -> u32 {
    match class {
        Class::Guest => COBWEB_PRIO_GUEST,
        Class::Copy => COBWEB_PRIO_COPY,
        Class::Background => COBWEB_PRIO_BACKGROUND,
        Class::Lazy => COBWEB_PRIO_LAZY,
    }
}

/// Ends the host's request and takes its reference back. A second completion of one of the last 256 tokens finds it remembered, changes nothing and is logged.
fn complete(raw: *mut IoState, res: i64) {
    // SAFETY: made by `Arc::into_raw` in `submit`; alive until its first completion, and remembered for a while after it.
    let first = unsafe { &*raw }.complete(res);
    if first {
        // SAFETY: the host's reference, given back once.
        drop(unsafe { Arc::from_raw(raw) });
    }
}

/// Puts the host's callbacks under a node name; the name is then used like any other. `concurrency` says how many calls may run at once. Operations the backend
/// answers with -ENOTSUP are emulated (zeroes are written, discards dropped). `release` is called once, when the last user has gone.
/// Errors: -EBUSY (name in use), -EINVAL, -E2BIG.
///
/// # Safety
/// Pointers are NULL or valid as their types say; `be` is passed to the callbacks as it is.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_node_register(
    c: *mut cobweb_ctx,
    node_name: *const c_char,
    ops: *const cobweb_backend_ops,
    be: *mut c_void,
    out: *mut *mut cobweb_node,
    e: *mut cobweb_error,
) -> c_int {
    boundary::call_int(e, || {
        // SAFETY: the caller's duty.
        let (ctx, name) = unsafe { (ctx(c)?, text(node_name, "node_name")?) };
        // SAFETY: the caller's duty.
        let ops = unsafe { read_sized(ops, "ops") }?;
        if out.is_null() {
            return Err(null("out"));
        }
        if ops.submit.is_none() {
            return Err(Error::invalid("'ops': submit is required"));
        }
        let concurrency = match ops.concurrency {
            COBWEB_CONC_SERIAL => Concurrency::Serial,
            COBWEB_CONC_PER_QUEUE => Concurrency::PerQueue,
            COBWEB_CONC_PARALLEL => Concurrency::Parallel,
            n => return Err(Error::invalid(format!("'ops': {n} is not a concurrency"))),
        };
        // The name first: a backend that is refused must not be released.
        ctx.graph().check_new_node_name(name)?;
        let backend = Arc::new(CBackend { ops, be });
        let node = HostNode::new(ctx.env(), backend, HostOptions { concurrency, timeout_ms: 0 })?;
        let vertex = ctx.graph().add_node(name, node)?;
        // SAFETY: checked above.
        unsafe { put(out, NodeRef::new(ctx, vertex).into_raw()) };
        Ok(0)
    })
}

/// Tells that the size of a host backend has changed; the limits are asked for again. Errors: -EINVAL for another kind of node.
///
/// # Safety
/// `n` is a handle or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cobweb_node_resized(n: *mut cobweb_node) -> c_int {
    boundary::call_int(std::ptr::null_mut(), || {
        // SAFETY: the caller's duty.
        let node = unsafe { NodeRef::get(n) }?;
        let base = node.vertex.base();
        let host: &HostNode =
            base.as_any().downcast_ref().ok_or_else(|| Error::invalid("not a host backend's node"))?;
        let size = host.resized()?;
        let event = crate::events::Event::new(crate::events::EventKind::Resize, node.vertex.name());
        node.ctx.events().post(crate::events::Event { value: size, ..event });
        Ok(0)
    })
}

/// Completes a request that was handed to a backend: bytes for reads and writes (fewer than asked is a short transfer, which is continued), 0 or more for the
/// others, or a negative errno. Any thread, exactly once. NULL is allowed.
///
/// # Safety
/// `io` was handed to `submit` and has not been completed, or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cobweb_io_complete(io: *mut cobweb_io, res: i64) {
    boundary::call_unit(|| {
        if !io.is_null() {
            complete(io.cast(), res);
        }
        Ok(())
    });
}
