//! From options to an open file.

use super::handle::{Aio, FileHandle};
use super::lock::{self, Use};
use super::node::{DetectZeroes, FileNode, Info};
use super::sys;
use crate::error::{Code, Error, Result};
use crate::options::{Options, Prop, PropStates, PropTable, PropType};
use crate::sync::Arc;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Options of the driver `file`.
pub static FILE_PROPS: PropTable = PropTable {
    driver: "file",
    props: &[
        prop("filename", PropType::Str, "", "path of the file or block device; this or fd"),
        prop("fd", PropType::Int, "", "an open descriptor instead of a path; it is duplicated"),
        prop("read-only", PropType::Bool, "off", "refuse writes"),
        prop("auto-read-only", PropType::Bool, "off", "open read-only where writing is not allowed"),
        prop("cache.direct", PropType::Bool, "off", "bypass the page cache (O_DIRECT)"),
        prop("cache.no-flush", PropType::Bool, "off", "ignore flushes: data is lost when the host crashes"),
        prop(
            "aio",
            PropType::Enum(&["threads", "io_uring"]),
            "io_uring",
            "how operations are carried out; threads where io_uring is not allowed",
        ),
        prop("discard", PropType::Enum(DISCARD), "ignore", "what a discard does"),
        prop(
            "detect-zeroes",
            PropType::Enum(DETECT_ZEROES),
            "off",
            "turn writes of zeros into write-zeroes; unmap: that may deallocate",
        ),
        prop(
            "locking",
            PropType::Enum(LOCKING),
            "auto",
            "image locks as QEMU takes them; auto: where they work",
        ),
        prop("force-share", PropType::Bool, "off", "read an image that others write; with read-only"),
    ],
};

const LOCKING: &[&str] = &["off", "on", "auto"];
const DISCARD: &[&str] = &["ignore", "off", "unmap", "on"];
const DETECT_ZEROES: &[&str] = &["off", "on", "unmap"];
/// Where the page of a file system is taken from its preferred block size, up to here; network file systems name sizes that are no blocks.
const PAGE_MAX: u64 = 64 << 10;

const fn prop(name: &'static str, ty: PropType, default: &'static str, doc: &'static str) -> Prop {
    Prop { name, ty, default, states: PropStates::OPEN, doc }
}

struct Wanted {
    read_only: bool,
    auto_read_only: bool,
    direct: bool,
}

/// Creates a (sparse) file of `size` bytes, under the locks of a creator until its size is set. Errors: EEXIST, and the file is not touched; EFBIG,
/// ENOSPC, and there is no file.
pub fn create_file(path: &Path, size: u64) -> Result<File> {
    let at = |e| Error::os(e, format!("cannot create '{}'", path.display()));
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(path).map_err(at)?;
    let name = path.display().to_string();
    let sized = match lock::lock(file.as_raw_fd(), Use::Create, &name) {
        Err(e) if e.code() == Code::Busy => Err(e),
        // Taken, or locks do not work here.
        _ => file.set_len(size).map_err(at),
    };
    lock::unlock(file.as_raw_fd(), Use::Create);
    match sized {
        Ok(()) => Ok(file),
        Err(e) => {
            // Ours: made above, and exclusively.
            let _ = std::fs::remove_file(path);
            Err(e)
        }
    }
}

/// Removes a file that [`create_file`] has made and nobody uses yet.
pub fn remove_file(path: &Path) -> std::io::Result<()> {
    std::fs::remove_file(path)
}

impl FileNode {
    /// A file of `size` bytes without a name in the directory `dir`: it vanishes with its last user (S25), and discards give its blocks back.
    /// Blocks.
    pub fn unlinked(dir: &Path, size: u64, uring_allowed: bool) -> Result<Arc<Self>> {
        let at = |e| Error::os(e, format!("cannot make a file in '{}'", dir.display()));
        let file = sys::unlinked_file(dir).map_err(at)?;
        file.set_len(size).map_err(at)?;
        let mut o = Options::empty();
        o.set("fd", file.as_raw_fd()).set("discard", "unmap").set("locking", "off");
        Self::open(o, uring_allowed)
    }

    /// Opens a file from options (see [`FILE_PROPS`]). Blocks.
    pub fn open(mut o: Options, uring_allowed: bool) -> Result<Arc<Self>> {
        let filename = o.take_str("filename")?;
        let fd = o.take_u64_in("fd", 0..=i32::MAX as u64)?;
        let read_only = o.take_bool("read-only")?.unwrap_or(false);
        let auto_read_only = o.take_bool("auto-read-only")?.unwrap_or(false);
        let direct = o.take_bool("cache.direct")?.unwrap_or(false);
        let no_flush = o.take_bool("cache.no-flush")?.unwrap_or(false);
        let aio = o.take_enum("aio", &["threads", "io_uring", "native"])?;
        if aio == Some(2) {
            return Err(o.invalid("aio", "cannot be native (Linux AIO); use io_uring or threads"));
        }
        let discard = o.take_enum("discard", DISCARD)?.unwrap_or(0) >= 2;
        let detect_zeroes = match o.take_enum("detect-zeroes", DETECT_ZEROES)?.unwrap_or(0) {
            0 => DetectZeroes::Off,
            1 => DetectZeroes::On,
            _ if !discard => return Err(o.invalid("detect-zeroes", "is unmap, which needs discard=unmap")),
            _ => DetectZeroes::Unmap,
        };
        let locking = o.take_enum("locking", LOCKING)?.unwrap_or(2);
        let force_share = o.take_bool("force-share")?.unwrap_or(false);
        if force_share && !read_only {
            return Err(o.invalid("force-share", "goes with read-only=on only"));
        }
        if aio == Some(1) && !uring_allowed {
            return Err(o.invalid("aio", "io_uring is not available here; use aio=threads"));
        }
        let aio = if aio == Some(0) || !uring_allowed { Aio::Threads } else { Aio::Uring };
        let wanted = Wanted { read_only, auto_read_only, direct };
        let (file, read_only, name) = match (filename, fd) {
            (Some(path), None) => {
                let (file, read_only) = open_path(Path::new(&path), &wanted)?;
                (file, read_only, path)
            }
            (None, Some(fd)) => {
                let name = format!("fd {fd}");
                let (file, read_only) = open_fd(fd as RawFd, &wanted)?;
                (file, read_only, name)
            }
            (Some(_), Some(_)) => return Err(o.invalid("fd", "'filename' and 'fd' exclude each other")),
            (None, None) => return Err(o.missing("filename")),
        };
        o.finish_for(&FILE_PROPS)?;
        let locked = take_locks(&file, locking, read_only, force_share, &name)?;
        let at = |e| Error::os(e, format!("cannot open '{name}'"));
        let meta = file.metadata().map_err(at)?;
        let is_block = meta.file_type().is_block_device();
        if !is_block && !meta.is_file() {
            return Err(Error::invalid(format!("'{name}' is neither a regular file nor a block device")));
        }
        let raw = file.as_raw_fd();
        let size = if is_block { sys::block_device_size(raw).map_err(at)? } else { meta.len() };
        let is_hole = !is_block && matches!(sys::seek(raw, 0, false), Ok(None));
        let handle = if direct {
            let (offset_align, memory_align) = direct_alignment(raw, is_block);
            let tail = if size % u64::from(offset_align) != 0 && !read_only {
                Some(buffered_twin(raw).map_err(at)?)
            } else {
                None
            };
            FileHandle::direct(OwnedFd::from(file), tail, aio, offset_align, memory_align)
        } else {
            FileHandle::buffered(OwnedFd::from(file), aio)
        }
        .locked_for(locked);
        let info = Info {
            name,
            size,
            read_only,
            no_flush,
            discard,
            detect_zeroes,
            is_block,
            page: cache_page(meta.blksize()),
            is_hole,
            locking: LOCKING[locking],
            force_share,
            identity: (meta.dev(), meta.ino()),
        };
        Ok(Arc::new(Self::new(Arc::new(handle), info)))
    }
}

/// Device and inode of the file at `path`, if it can be told.
pub fn identity_at(path: &Path) -> Option<(u64, u64)> {
    std::fs::metadata(path).ok().map(|m| (m.dev(), m.ino()))
}

/// `path` without symbolic links, if it leads to something.
pub fn real_path(path: &Path) -> Option<std::path::PathBuf> {
    path.canonicalize().ok()
}

/// Offset and memory alignment of direct I/O in bytes: what the kernel says, else what is always enough.
fn direct_alignment(fd: RawFd, is_block: bool) -> (u32, u32) {
    let (offset, memory) = match sys::direct_alignment(fd) {
        Some(said) => said,
        None if is_block => {
            let block = sys::logical_block_size(fd).unwrap_or(4096);
            (block, block)
        }
        None => (4096, 4096),
    };
    (offset.clamp(512, 1 << 20).next_power_of_two(), memory.clamp(1, 1 << 20).next_power_of_two())
}

/// What the page cache reads and writes at once: a page, or a block of a file system with larger ones.
fn cache_page(block: u64) -> u64 {
    let page = sys::page_size().next_power_of_two();
    if block.is_power_of_two() && block <= PAGE_MAX { page.max(block) } else { page }
}

/// Opens for reading and perhaps writing. O_NONBLOCK is for the open only, which would wait for the other end of a FIFO.
fn open_at(path: &Path, wanted: &Wanted, write: bool) -> std::io::Result<File> {
    let direct = if wanted.direct { libc::O_DIRECT } else { 0 };
    let mut o = OpenOptions::new();
    o.read(true).write(write).custom_flags(direct | libc::O_CLOEXEC | libc::O_NONBLOCK);
    let file = o.open(path)?;
    let fd = file.as_raw_fd();
    sys::set_status_flags(fd, sys::status_flags(fd)? & !libc::O_NONBLOCK)?;
    Ok(file)
}

fn open_path(path: &Path, wanted: &Wanted) -> Result<(File, bool)> {
    let at = |e| Error::os(e, format!("cannot open '{}'", path.display()));
    match open_at(path, wanted, !wanted.read_only) {
        Ok(file) => Ok((file, wanted.read_only)),
        Err(e)
            if wanted.auto_read_only
                && matches!(e.raw_os_error(), Some(libc::EACCES | libc::EROFS | libc::EPERM)) =>
        {
            Ok((open_at(path, wanted, false).map_err(at)?, true))
        }
        Err(e) => Err(at(e)),
    }
}

/// Opens what a descriptor stands for again, so that flags (O_DIRECT) and locks are ours and not the caller's. Where that is not possible (no /proc, permissions) the
/// descriptor is duplicated and must have the right flags.
fn open_fd(fd: RawFd, wanted: &Wanted) -> Result<(File, bool)> {
    let at = |e| Error::os(e, format!("cannot use descriptor {fd}"));
    let flags = sys::status_flags(fd).map_err(at)?;
    let writable = flags & libc::O_ACCMODE != libc::O_RDONLY;
    if !writable && !wanted.read_only && !wanted.auto_read_only {
        return Err(Error::new(libc::EACCES, Code::ReadOnly, format!("descriptor {fd} is read-only")));
    }
    let read_only = wanted.read_only || !writable;
    if let Ok(file) = open_at(Path::new(&format!("/proc/self/fd/{fd}")), wanted, !read_only) {
        return Ok((file, read_only));
    }
    if flags & libc::O_APPEND != 0 && !read_only {
        return Err(Error::invalid(format!("descriptor {fd} is open for appending")));
    }
    if wanted.direct != (flags & libc::O_DIRECT != 0) {
        return Err(Error::invalid(format!(
            "descriptor {fd} does not have the cache mode that cache.direct asks for"
        )));
    }
    Ok((File::from(sys::duplicate(fd).map_err(at)?), read_only))
}

/// What the file has been locked for.
fn take_locks(
    file: &File,
    locking: usize,
    read_only: bool,
    force_share: bool,
    name: &str,
) -> Result<Option<Use>> {
    let usage = match (force_share, read_only) {
        (true, _) => Use::Share,
        (_, true) => Use::Read,
        _ => Use::Write,
    };
    if locking == 0 {
        return Ok(None);
    }
    match lock::lock(file.as_raw_fd(), usage, name) {
        // auto: a file system without such locks is used without.
        Err(e) if locking == 2 && e.code() != Code::Busy => Ok(None),
        other => other.map(|()| Some(usage)),
    }
}

/// A buffered descriptor of the same file.
fn buffered_twin(fd: RawFd) -> std::io::Result<OwnedFd> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_CLOEXEC)
        .open(format!("/proc/self/fd/{fd}"))?;
    Ok(OwnedFd::from(file))
}
