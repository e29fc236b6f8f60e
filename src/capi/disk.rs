//! `cobweb_disk`: root, filters, limits, blocking calls.

use super::abi::{cobweb_ctx, cobweb_disk, cobweb_error, cobweb_extent, cobweb_limits, cobweb_node};
use super::boundary::{self, null, put, text, write_sized};
use super::ctx::ctx;
use super::handle::Object;
use super::node::NodeRef;
use crate::context::Context;
use crate::error::{Code, Error, IoError, Result};
use crate::graph::Disk;
use crate::limits::REQUEST_LEN_MAX;
use crate::options::Options;
use crate::request::{Buffers, Flags, Request, Segment};
use crate::sync::Arc;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::units::ByteRange;
use libc::{c_char, c_int, c_void, size_t};
use std::time::Duration;

/// A disk of the host.
pub(super) struct DiskRef {
    pub(super) ctx: Arc<Context>,
    pub(super) disk: Arc<Disk>,
    /// Limit of blocking calls in milliseconds, 0 = none (C7).
    sync_timeout_ms: AtomicU64,
}

impl Object for DiskRef {
    type Raw = cobweb_disk;
    const MARK: u64 = 0x636f_6277_6562_0003;
    const NAME: &'static str = "disk";
}

/// Makes a disk without medium. `name`: NULL or empty for a generated one; unique among nodes and disks. Errors: -EBUSY, -EINVAL.
///
/// # Safety
/// Pointers are NULL or valid as their types say.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_disk_new(
    c: *mut cobweb_ctx,
    name: *const c_char,
    out: *mut *mut cobweb_disk,
    e: *mut cobweb_error,
) -> c_int {
    boundary::call_int(e, || {
        // SAFETY: the caller's duty.
        let (ctx, name) = unsafe { (ctx(c)?, boundary::opt_text(name, "name")?) };
        if out.is_null() {
            return Err(null("out"));
        }
        let disk = ctx.graph().add_disk(name)?;
        let disk = DiskRef { ctx: ctx.clone(), disk, sync_timeout_ms: AtomicU64::new(0) };
        // SAFETY: checked above.
        unsafe { put(out, disk.into_raw()) };
        Ok(0)
    })
}

/// Attaches the disk to a node, or ejects it (`root` NULL), while requests run: they are parked meanwhile. May block.
///
/// # Safety
/// `d` and `root` are handles or NULL.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_disk_insert(
    d: *mut cobweb_disk,
    root: *mut cobweb_node,
    e: *mut cobweb_error,
) -> c_int {
    boundary::call_int(e, || {
        // SAFETY: the caller's duty.
        let disk = unsafe { DiskRef::get(d) }?;
        let root = match root.is_null() {
            true => None,
            // SAFETY: the caller's duty.
            false => Some(unsafe { NodeRef::get(root) }?.vertex.clone()),
        };
        disk.ctx.graph().insert(&disk.disk, root)?;
        disk.ctx.graph().collect().map(|()| 0)
    })
}

/// Opens a filter and puts it above the disk's root while requests run, in one drained section. `out` may be NULL. May block.
///
/// # Safety
/// Pointers are NULL or valid as their types say.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_disk_filter_add(
    d: *mut cobweb_disk,
    options: *const c_char,
    out: *mut *mut cobweb_node,
    e: *mut cobweb_error,
) -> c_int {
    boundary::call_int(e, || {
        // SAFETY: the caller's duty.
        let (disk, options) = unsafe { (DiskRef::get(d)?, text(options, "options")?) };
        let filter = disk.ctx.graph().filter_add(&disk.root()?, Options::parse(options)?)?;
        if !out.is_null() {
            // SAFETY: checked above.
            unsafe { put(out, NodeRef::new(&disk.ctx, filter).into_raw()) };
        }
        Ok(0)
    })
}

/// Takes a filter out and brings what it holds to where it belongs (S3). The handle stays valid until cobweb_node_unref. May block.
///
/// # Safety
/// `d` and `filter` are handles or NULL.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_disk_filter_del(
    d: *mut cobweb_disk,
    filter: *mut cobweb_node,
    e: *mut cobweb_error,
) -> c_int {
    boundary::call_int(e, || {
        // SAFETY: the caller's duty.
        let (disk, filter) = unsafe { (DiskRef::get(d)?, NodeRef::get(filter)?) };
        disk.ctx.graph().filter_del(&disk.root()?, &filter.vertex).map(|()| 0)
    })
}

/// The limits of the disk as of now. Errors: -ENOMEDIUM.
///
/// # Safety
/// `out` points to `out->struct_size` writable bytes.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_disk_limits(d: *mut cobweb_disk, out: *mut cobweb_limits) -> c_int {
    boundary::call_int(std::ptr::null_mut(), || {
        // SAFETY: the caller's duty.
        let disk = unsafe { DiskRef::get(d) }?;
        let l = disk.disk.top().ok_or_else(no_medium)?.limits();
        let limits = cobweb_limits {
            struct_size: 0,
            flags: u32::from(l.read_only),
            size: l.size,
            max_zeroes: 0,
            max_discard: 0,
            request_align: l.request_align,
            memory_align: l.memory_align,
            opt_transfer: l.opt_transfer,
            max_transfer: l.max_transfer,
            discard_align: l.discard_align,
            max_iov: l.max_iov,
        };
        // SAFETY: the caller's duty.
        unsafe { write_sized(out, &limits, "out") }.map(|()| 0)
    })
}

/// Sets a property of the disk. `sync-timeout`: limit of blocking calls in seconds (fractions allowed), 0 = none: a call that is still waiting
/// then (for a pause, a limit, space) ends with -ECANCELED.
///
/// # Safety
/// Pointers are NULL or valid as their types say.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_disk_set(
    d: *mut cobweb_disk,
    key: *const c_char,
    val: *const c_char,
    e: *mut cobweb_error,
) -> c_int {
    boundary::call_int(e, || {
        // SAFETY: the caller's duty.
        let (disk, key, val) = unsafe { (DiskRef::get(d)?, text(key, "key")?, text(val, "val")?) };
        match key {
            "sync-timeout" => {
                let seconds: f64 = val
                    .parse()
                    .ok()
                    .filter(|s: &f64| (0.0..=1e9).contains(s))
                    .ok_or_else(|| Error::invalid(format!("'sync-timeout' does not take '{val}'")))?;
                disk.sync_timeout_ms.store((seconds * 1e3).ceil() as u64, Ordering::Relaxed);
                Ok(0)
            }
            other => Err(Error::invalid(format!("a disk has no property '{other}'"))),
        }
    })
}

/// Frees a disk. Its queues must be gone (-EBUSY would be the answer if there were one: the disk then stays). NULL is allowed. May block.
///
/// # Safety
/// `d` is a handle or NULL and is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cobweb_disk_free(d: *mut cobweb_disk) {
    boundary::call_unit(|| {
        // SAFETY: the caller's duty.
        let Some(disk) = (unsafe { DiskRef::take(d) }) else { return Ok(()) };
        disk.ctx.graph().remove_disk(&disk.disk);
        disk.ctx.graph().collect()
    });
}

/// Reads `len` bytes (at most 1 GiB) at `offset`; returns `len` or a negative errno. Blocking.
///
/// # Safety
/// `buf` is valid for `len` bytes.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_pread(
    d: *mut cobweb_disk,
    buf: *mut c_void,
    len: size_t,
    offset: u64,
    flags: u32,
) -> i64 {
    boundary::call(std::ptr::null_mut(), || {
        // SAFETY: the caller's duty.
        let (disk, bufs) = unsafe { (DiskRef::get(d)?, one_buffer(buf, len)?) };
        let flags = check_flags(flags, Flags::empty())?;
        disk.run(Request::read(offset, bufs).flags(flags)).map(|()| len as i64)
    })
}

/// Writes `len` bytes (at most 1 GiB) at `offset`; returns `len` or a negative errno. `flags`: COBWEB_F_FUA. Blocking.
///
/// # Safety
/// `buf` is valid for `len` bytes.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_pwrite(
    d: *mut cobweb_disk,
    buf: *const c_void,
    len: size_t,
    offset: u64,
    flags: u32,
) -> i64 {
    boundary::call(std::ptr::null_mut(), || {
        // SAFETY: the caller's duty; a write only reads the buffer.
        let (disk, bufs) = unsafe { (DiskRef::get(d)?, one_buffer(buf.cast_mut(), len)?) };
        let flags = check_flags(flags, Flags::FUA)?;
        disk.run(Request::write(offset, bufs).flags(flags)).map(|()| len as i64)
    })
}

/// Makes a range read as zeros. `flags`: COBWEB_F_FUA, COBWEB_F_MAY_UNMAP, COBWEB_F_NO_FALLBACK. Blocking.
///
/// # Safety
/// `d` is a handle or NULL.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_write_zeroes(
    d: *mut cobweb_disk,
    offset: u64,
    len: u64,
    flags: u32,
) -> c_int {
    boundary::call_int(std::ptr::null_mut(), || {
        // SAFETY: the caller's duty.
        let disk = unsafe { DiskRef::get(d) }?;
        let flags = check_flags(flags, Flags::all())?;
        disk.run(Request::write_zeroes(range(offset, len)?, flags)).map(|()| 0)
    })
}

/// Discards a range. Blocking.
///
/// # Safety
/// `d` is a handle or NULL.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_discard(d: *mut cobweb_disk, offset: u64, len: u64) -> c_int {
    boundary::call_int(std::ptr::null_mut(), || {
        // SAFETY: the caller's duty.
        let disk = unsafe { DiskRef::get(d) }?;
        disk.run(Request::discard(range(offset, len)?)).map(|()| 0)
    })
}

/// Makes everything written before durable. Blocking.
///
/// # Safety
/// `d` is a handle or NULL.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_flush(d: *mut cobweb_disk) -> c_int {
    boundary::call_int(std::ptr::null_mut(), || {
        // SAFETY: the caller's duty.
        let disk = unsafe { DiskRef::get(d) }?;
        disk.run(Request::flush()).map(|()| 0)
    })
}

/// Fills up to `max` extents of the range; returns their number. They may cover less than the range. Blocking.
///
/// # Safety
/// `x` is valid for `max` extents.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn cobweb_block_status(
    d: *mut cobweb_disk,
    offset: u64,
    len: u64,
    x: *mut cobweb_extent,
    max: u32,
) -> c_int {
    boundary::call_int(std::ptr::null_mut(), || {
        // SAFETY: the caller's duty.
        let disk = unsafe { DiskRef::get(d) }?;
        if x.is_null() {
            return Err(null("x"));
        }
        let range = range(offset, len)?;
        let inner = disk.disk.clone();
        let found = disk.ctx.env().block_on(|cx| async move {
            let _pass = inner.enter().await;
            let top = inner.top().ok_or(IoError::new(libc::ENOMEDIUM, Code::NoMedium))?;
            super::status::extents(&cx, &*top, range, max as usize).await
        })?;
        let (extents, _) = found.map_err(|e| Error::io(e, "block status failed"))?;
        for (i, extent) in extents.iter().enumerate() {
            // SAFETY: i < max.
            unsafe { put(x.add(i), *extent) };
        }
        Ok(extents.len() as i64)
    })
}

impl DiskRef {
    pub(super) fn root(&self) -> Result<Arc<crate::node::Vertex>> {
        self.disk.root().ok_or_else(no_medium)
    }

    fn run(&self, req: Request) -> Result<()> {
        let ms = self.sync_timeout_ms.load(Ordering::Relaxed);
        let limit = (ms > 0).then(|| Duration::from_millis(ms));
        self.disk.block_for(req, limit)
    }
}

fn no_medium() -> Error {
    Error::new(libc::ENOMEDIUM, Code::NoMedium, "the disk has no medium")
}

fn range(offset: u64, len: u64) -> Result<ByteRange> {
    ByteRange::new(offset, len)
        .ok_or_else(|| Error::io(IoError::out_of_range(), "the range passes the end of any disk"))
}

fn check_flags(flags: u32, allowed: Flags) -> Result<Flags> {
    u16::try_from(flags)
        .ok()
        .and_then(Flags::from_bits)
        .filter(|f| allowed.contains(*f))
        .ok_or_else(|| Error::invalid(format!("flags {flags:#x} do not fit the operation")))
}

/// # Safety
/// `buf` is valid for `len` bytes until the blocking call ends.
unsafe fn one_buffer(buf: *mut c_void, len: usize) -> Result<Buffers> {
    if len as u64 > REQUEST_LEN_MAX {
        return Err(Error::invalid(format!("{len} bytes are more than a request may have")));
    }
    let mut bufs = Buffers::new();
    if len > 0 {
        if buf.is_null() {
            return Err(null("buf"));
        }
        // SAFETY: the caller's duty.
        bufs.push(unsafe { Segment::pinned(buf.cast(), len) });
    }
    Ok(bufs)
}
