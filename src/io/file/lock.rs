//! Image locks, byte for byte as QEMU takes them, so that the two refuse each other's double writers.
//!
//! Byte 100+n is held shared while permission n is used, byte 200+n while permission n is not shared with others. First acquire, then test
//! byte 200+n for each permission used and byte 100+n for each one not shared. Locks belong to the open file description; there is no fallback to locks of the
//! process, which closing any descriptor would drop.

use super::sys;
use crate::error::{Code, Error, Result};
use std::os::fd::RawFd;

/// How the file is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// Reading, shared with everything but writers.
    Read,
    /// Reading and writing, alone.
    Write,
    /// Reading whatever others do (`force-share`).
    Share,
    /// Making the file; others may not even open it for resizing.
    Create,
}

const NAMES: [&str; 4] = ["consistent read", "write", "write unchanged", "resize"];

impl Use {
    /// Permissions used and permissions not shared, as lists of n.
    const fn permissions(self) -> (&'static [usize], &'static [usize]) {
        match self {
            Use::Read => (&[0], &[1, 3]),
            Use::Write => (&[0, 1, 3], &[1, 3]),
            Use::Share => (&[0], &[]),
            Use::Create => (&[1, 3], &[3]),
        }
    }

    fn bytes(self) -> impl Iterator<Item = i64> {
        let (used, unshared) = self.permissions();
        used.iter().map(|n| 100 + *n as i64).chain(unshared.iter().map(|n| 200 + *n as i64))
    }
}

/// Takes the locks for `usage`. Errors: EAGAIN when somebody else's use does not go together with it; the system's error where locks do not work.
pub(super) fn lock(fd: RawFd, usage: Use, name: &str) -> Result<()> {
    let (used, unshared) = usage.permissions();
    let system = |e| Error::os(e, format!("cannot lock '{name}'"));
    let busy = |text| {
        unlock(fd, usage);
        Error::new(libc::EAGAIN, Code::Busy, format!("{text}: is another process using '{name}'?"))
    };
    for byte in usage.bytes() {
        match sys::lock_byte(fd, byte, libc::F_RDLCK) {
            Ok(()) => {}
            // Not QEMU and not one of us: somebody holds the byte exclusively.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
                return Err(busy(format!("Failed to lock byte {byte}")));
            }
            Err(e) => return Err(system(e)),
        }
    }
    let conflict =
        |n: &usize, base: i64| sys::byte_is_locked(fd, base + *n as i64).map(|taken| taken.then_some(*n));
    let find = |list: &[usize], base: i64| -> Result<Option<usize>> {
        for n in list {
            if let Some(n) = conflict(n, base).map_err(system)? {
                return Ok(Some(n));
            }
        }
        Ok(None)
    };
    let text = match (find(used, 200)?, find(unshared, 100)?) {
        (None, None) => return Ok(()),
        (Some(n), _) => format!("Failed to get \"{}\" lock", NAMES[n]),
        (None, Some(n)) => format!("Failed to get shared \"{}\" lock", NAMES[n]),
    };
    Err(busy(text))
}

/// Gives the locks for `usage` back. Closing the last descriptor of the open file does the same.
pub(super) fn unlock(fd: RawFd, usage: Use) {
    for byte in usage.bytes() {
        let _ = sys::lock_byte(fd, byte, libc::F_UNLCK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn two_writers_and_writer_with_reader_refuse_each_other_and_readers_share() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let open =
            || std::fs::OpenOptions::new().read(true).write(true).open(file.path()).expect("it is there");
        let (a, b) = (open(), open());
        lock(a.as_raw_fd(), Use::Read, "x").expect("first reader");
        lock(b.as_raw_fd(), Use::Read, "x").expect("second reader");
        let c = open();
        let e = lock(c.as_raw_fd(), Use::Write, "x").expect_err("readers are there");
        assert!(e.to_string().contains("\"write\" lock"), "{e}");
        drop((a, b));
        lock(c.as_raw_fd(), Use::Write, "x").expect("alone");
        let d = open();
        assert!(lock(d.as_raw_fd(), Use::Write, "x").is_err());
        let e = lock(d.as_raw_fd(), Use::Read, "x").expect_err("a writer is there");
        assert!(e.to_string().contains("shared \"write\""), "{e}");
        lock(d.as_raw_fd(), Use::Share, "x").expect("force-share reads anyway");
    }

    #[test]
    fn nobody_opens_a_file_for_writing_while_it_is_being_made() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let open = || std::fs::OpenOptions::new().read(true).write(true).open(file.path()).expect("there");
        let (a, b) = (open(), open());
        lock(a.as_raw_fd(), Use::Create, "x").expect("alone");
        assert_eq!(lock(b.as_raw_fd(), Use::Write, "x").expect_err("being made").code(), Code::Busy);
        unlock(a.as_raw_fd(), Use::Create);
        lock(b.as_raw_fd(), Use::Write, "x").expect("made");
        // What was refused has left no locks behind, and what was given back neither.
        drop(b);
        lock(a.as_raw_fd(), Use::Write, "x").expect("alone again");
    }

    #[test]
    fn a_byte_that_is_held_exclusively_is_a_conflict_and_not_a_file_system_without_locks() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let open = || std::fs::OpenOptions::new().read(true).write(true).open(file.path()).expect("there");
        let (a, b) = (open(), open());
        sys::lock_byte(a.as_raw_fd(), 100, libc::F_WRLCK).expect("alone");
        let e = lock(b.as_raw_fd(), Use::Read, "x").expect_err("held");
        assert_eq!((e.code(), e.errno()), (Code::Busy, libc::EAGAIN));
    }

    #[test]
    fn qemu_and_we_refuse_each_other() {
        if std::process::Command::new("qemu-io").arg("--version").output().is_err() {
            assert!(std::env::var_os("CI").is_none(), "qemu-io is missing");
            eprintln!("SKIPPED: qemu-io is missing");
            return;
        }
        let file = tempfile::NamedTempFile::new().expect("a file");
        file.as_file().set_len(1 << 20).expect("resized");
        lock(file.as_file().as_raw_fd(), Use::Write, "x").expect("alone");
        let out = std::process::Command::new("qemu-io")
            .args(["-f", "raw", "-c", "write 0 512"])
            .arg(file.path())
            .output()
            .expect("it runs");
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(!out.status.success() && text.contains("lock"), "{text}");
    }

    #[test]
    fn a_closed_file_is_free_though_a_child_that_was_forked_has_its_descriptor() {
        use crate::io::file::handle::{Aio, FileHandle};
        let file = tempfile::NamedTempFile::new().expect("a file");
        let open = || std::fs::OpenOptions::new().read(true).write(true).open(file.path()).expect("it opens");
        let first = open();
        lock(first.as_raw_fd(), Use::Write, "f").expect("free");
        // What a fork makes: another descriptor of the same open file.
        let inherited = first.try_clone().expect("duplicated");
        let handle = FileHandle::buffered(first.into(), Aio::Threads).locked_for(Some(Use::Write));
        let second = open();
        lock(second.as_raw_fd(), Use::Write, "f").expect_err("held");
        drop(handle);
        lock(second.as_raw_fd(), Use::Write, "f").expect("free again");
        drop(inherited);
    }
}
