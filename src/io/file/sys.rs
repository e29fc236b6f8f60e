//! System calls on files and threads. Results of transfers are a count or a negative errno, as io_uring gives them.

use libc::{c_int, iovec};
use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

/// Runs `f` with all signals blocked on this thread; threads started meanwhile inherit that (C19).
pub fn with_signals_blocked<T>(f: impl FnOnce() -> T) -> T {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut old = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets are written by the calls before they are read; failure is impossible with these arguments.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr());
    }
    let result = f();
    // SAFETY: `old` was filled above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, old.as_ptr(), std::ptr::null_mut()) };
    result
}

fn errno() -> i64 {
    -i64::from(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

fn result(r: isize) -> i64 {
    if r < 0 { errno() } else { r as i64 }
}

/// preadv. The memory of `iov` is valid for writes: it belongs to the operation.
pub(in crate::io) fn preadv(fd: RawFd, iov: &[iovec], offset: u64) -> i64 {
    // SAFETY: the iovecs point into buffers that the caller's operation owns.
    result(unsafe { libc::preadv(fd, iov.as_ptr(), iov.len() as c_int, offset as i64) })
}

/// pwritev, durable if `dsync`.
pub(in crate::io) fn pwritev(fd: RawFd, iov: &[iovec], offset: u64, dsync: bool) -> i64 {
    let flags = if dsync { libc::RWF_DSYNC } else { 0 };
    // SAFETY: as in `preadv`.
    result(unsafe { libc::pwritev2(fd, iov.as_ptr(), iov.len() as c_int, offset as i64, flags) })
}

/// fdatasync.
pub(in crate::io) fn fdatasync(fd: RawFd) -> i64 {
    // SAFETY: no pointers.
    result(unsafe { libc::fdatasync(fd) } as isize)
}

/// fallocate.
pub(in crate::io) fn fallocate(fd: RawFd, mode: i32, offset: u64, len: u64) -> i64 {
    // SAFETY: no pointers.
    result(unsafe { libc::fallocate(fd, mode, offset as i64, len as i64) } as isize)
}

/// Sets this thread's I/O priority; remembered, so that it costs a system call only when it changes.
pub(in crate::io) fn set_io_priority(prio: u16) {
    thread_local! {
        static NOW: std::cell::Cell<u16> = const { std::cell::Cell::new(0) };
    }
    const WHO_PROCESS: c_int = 1;
    if NOW.get() != prio {
        NOW.set(prio);
        // SAFETY: no pointers; 0 means the calling thread. A kernel that refuses leaves the default, which is harmless.
        unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0, c_int::from(prio)) };
    }
}

/// Sleeps on a thread that may block.
pub(in crate::io) fn sleep(d: Duration) {
    std::thread::sleep(d);
}

/// Offset and memory alignment that direct I/O on `fd` wants; `None` if the kernel does not say.
pub(in crate::io) fn direct_alignment(fd: RawFd) -> Option<(u32, u32)> {
    let mut x = std::mem::MaybeUninit::<libc::statx>::zeroed();
    let flags = libc::AT_EMPTY_PATH;
    // SAFETY: an empty path with AT_EMPTY_PATH names `fd`; the struct is large enough and zero is a valid value of it.
    let x = unsafe {
        if libc::statx(fd, c"".as_ptr(), flags, libc::STATX_DIOALIGN, x.as_mut_ptr()) != 0 {
            return None;
        }
        x.assume_init()
    };
    let said = x.stx_mask & libc::STATX_DIOALIGN != 0 && x.stx_dio_offset_align > 0;
    said.then_some((x.stx_dio_offset_align, x.stx_dio_mem_align.max(1)))
}

/// Size of a block device in bytes.
pub(in crate::io) fn block_device_size(fd: RawFd) -> std::io::Result<u64> {
    const BLKGETSIZE64: libc::c_ulong = 0x8008_1272;
    let mut size = 0u64;
    // SAFETY: the ioctl writes one u64.
    if unsafe { libc::ioctl(fd, BLKGETSIZE64, &raw mut size) } < 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(size)
}

/// Logical block size of a block device in bytes.
pub(in crate::io) fn logical_block_size(fd: RawFd) -> std::io::Result<u32> {
    const BLKSSZGET: libc::c_ulong = 0x1268;
    let mut size: c_int = 0;
    // SAFETY: the ioctl writes one int.
    if unsafe { libc::ioctl(fd, BLKSSZGET, &raw mut size) } < 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(u32::try_from(size).unwrap_or(0))
}

/// Discards blocks of a block device; they may read as anything afterwards.
pub(in crate::io) fn discard_blocks(fd: RawFd, offset: u64, len: u64) -> std::io::Result<()> {
    const BLKDISCARD: libc::c_ulong = 0x1277;
    let range = [offset, len];
    // SAFETY: the ioctl reads two u64.
    if unsafe { libc::ioctl(fd, BLKDISCARD, range.as_ptr()) } < 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(())
}

/// Changes the length of a file.
pub(in crate::io) fn set_size(fd: RawFd, size: u64) -> std::io::Result<()> {
    let size = libc::off_t::try_from(size).map_err(|_| std::io::Error::from_raw_os_error(libc::EFBIG))?;
    // SAFETY: no pointers.
    if unsafe { libc::ftruncate(fd, size) } < 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(())
}

/// Page size of the system in bytes.
pub(in crate::io) fn page_size() -> u64 {
    // SAFETY: no pointers.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Where data (`hole` false) or a hole begins at or behind `offset`; `None` behind the last of it.
pub(in crate::io) fn seek(fd: RawFd, offset: u64, hole: bool) -> std::io::Result<Option<u64>> {
    let whence = if hole { libc::SEEK_HOLE } else { libc::SEEK_DATA };
    // SAFETY: no pointers.
    let at = unsafe { libc::lseek(fd, offset as i64, whence) };
    if at >= 0 {
        return Ok(Some(at as u64));
    }
    let e = std::io::Error::last_os_error();
    if e.raw_os_error() == Some(libc::ENXIO) { Ok(None) } else { Err(e) }
}

/// Duplicates a descriptor, close-on-exec.
pub(in crate::io) fn duplicate(fd: RawFd) -> std::io::Result<OwnedFd> {
    // SAFETY: no pointers; an invalid number gives EBADF.
    let new = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) };
    if new < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: made just now.
    Ok(unsafe { OwnedFd::from_raw_fd(new) })
}

/// Status flags (O_DIRECT, access mode) of a descriptor.
pub(in crate::io) fn status_flags(fd: RawFd) -> std::io::Result<c_int> {
    // SAFETY: no pointers.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    if flags < 0 { Err(std::io::Error::last_os_error()) } else { Ok(flags) }
}

/// Sets the status flags of a descriptor.
pub(in crate::io) fn set_status_flags(fd: RawFd, flags: c_int) -> std::io::Result<()> {
    // SAFETY: no pointers.
    if unsafe { libc::fcntl(fd, libc::F_SETFL, flags) } < 0 {
        Err(std::io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Takes (`F_RDLCK`) or gives back (`F_UNLCK`) a shared open-file-description lock on one byte.
pub(in crate::io) fn lock_byte(fd: RawFd, byte: i64, kind: c_int) -> std::io::Result<()> {
    let mut l = flock(byte, kind);
    // SAFETY: the struct is valid; OFD locks belong to the open file.
    if unsafe { libc::fcntl(fd, libc::F_OFD_SETLK, &raw mut l) } < 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(())
}

/// Whether somebody else holds a lock on a byte.
pub(in crate::io) fn byte_is_locked(fd: RawFd, byte: i64) -> std::io::Result<bool> {
    let mut l = flock(byte, libc::F_WRLCK);
    // SAFETY: as above.
    if unsafe { libc::fcntl(fd, libc::F_OFD_GETLK, &raw mut l) } < 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(c_int::from(l.l_type) != libc::F_UNLCK)
}

fn flock(byte: i64, kind: c_int) -> libc::flock {
    // SAFETY: zero is a valid flock.
    let mut l: libc::flock = unsafe { std::mem::zeroed() };
    l.l_type = kind as libc::c_short;
    l.l_whence = libc::SEEK_SET as libc::c_short;
    l.l_start = byte;
    l.l_len = 1;
    l
}

/// A file without a name in `dir`: O_TMPFILE, or created and unlinked where that is not supported (S25: it vanishes with the process).
pub fn unlinked_file(dir: &Path) -> std::io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = std::fs::OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    match options.clone().custom_flags(libc::O_TMPFILE | libc::O_CLOEXEC).open(dir) {
        Ok(file) => Ok(file),
        Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => {
            let path = dir.join(format!(".cobweb-spill-{}", std::process::id()));
            let file = options.create_new(true).open(&path)?;
            std::fs::remove_file(&path)?;
            Ok(file)
        }
        Err(e) => Err(e),
    }
}

/// Sets an extended attribute. Errors: EOPNOTSUPP where the file can carry none.
pub fn set_attribute(file: &impl AsRawFd, name: &str, value: &[u8]) -> std::io::Result<()> {
    let name = attribute_name(name)?;
    // SAFETY: name is terminated, value has its length.
    let r =
        unsafe { libc::fsetxattr(file.as_raw_fd(), name.as_ptr(), value.as_ptr().cast(), value.len(), 0) };
    if r < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

/// Removes an extended attribute; its absence is no error.
pub fn remove_attribute(file: &impl AsRawFd, name: &str) -> std::io::Result<()> {
    let name = attribute_name(name)?;
    // SAFETY: name is terminated.
    if unsafe { libc::fremovexattr(file.as_raw_fd(), name.as_ptr()) } == 0 {
        return Ok(());
    }
    let e = std::io::Error::last_os_error();
    if e.raw_os_error() == Some(libc::ENODATA) { Ok(()) } else { Err(e) }
}

/// Reads an extended attribute of at most 256 bytes.
pub fn attribute(file: &impl AsRawFd, name: &str) -> std::io::Result<Option<Vec<u8>>> {
    let name = attribute_name(name)?;
    let mut value = vec![0u8; 256];
    // SAFETY: name is terminated, the buffer has its length.
    let n =
        unsafe { libc::fgetxattr(file.as_raw_fd(), name.as_ptr(), value.as_mut_ptr().cast(), value.len()) };
    if n >= 0 {
        value.truncate(n as usize);
        return Ok(Some(value));
    }
    let e = std::io::Error::last_os_error();
    if e.raw_os_error() == Some(libc::ENODATA) { Ok(None) } else { Err(e) }
}

fn attribute_name(name: &str) -> std::io::Result<CString> {
    CString::new(std::ffi::OsStr::new(name).as_bytes())
        .map_err(|_| std::io::Error::from_raw_os_error(libc::EINVAL))
}

/// Whether `fd` is readable within `timeout`.
#[cfg(test)]
pub(in crate::io) fn is_readable(fd: RawFd, timeout: Duration) -> bool {
    let mut p = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let ms = c_int::try_from(timeout.as_millis()).unwrap_or(c_int::MAX);
    loop {
        // SAFETY: one pollfd.
        let n = unsafe { libc::poll(&raw mut p, 1, ms) };
        if n >= 0 || std::io::Error::last_os_error().kind() != std::io::ErrorKind::Interrupted {
            return n == 1;
        }
    }
}

/// I/O priority of this thread, as the kernel has it.
#[cfg(test)]
pub(in crate::io) fn io_priority() -> u16 {
    const WHO_PROCESS: c_int = 1;
    // SAFETY: no pointers; 0 means the calling thread.
    unsafe { libc::syscall(libc::SYS_ioprio_get, WHO_PROCESS, 0) as u16 }
}
