//! System calls of the command that std has no safe form of: poll over many descriptors, signals as a descriptor, going into the background.
//!
//! `unsafe` because these are bare system calls; nothing here keeps a pointer.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// What to wait for on one descriptor, and what was found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Interest {
    pub(super) readable: bool,
    pub(super) writable: bool,
}

impl Interest {
    pub(super) const READ: Self = Self { readable: true, writable: false };
}

/// Waits until one of `fds` is ready, or `timeout` has passed (`None`: no limit), and replaces each interest by what is ready. A hang-up makes ready
/// what was asked for; a descriptor without interest is skipped. A signal ends the wait early.
pub(super) fn poll(fds: &mut [(RawFd, Interest)], timeout: Option<Duration>) -> io::Result<()> {
    let mut polled: Vec<libc::pollfd> = fds
        .iter()
        .map(|(fd, interest)| {
            let read = if interest.readable { libc::POLLIN } else { 0 };
            let write = if interest.writable { libc::POLLOUT } else { 0 };
            // The kernel skips negative descriptors; without events it would still report a hang-up, again and again.
            let fd = if read | write == 0 { -1 } else { *fd };
            libc::pollfd { fd, events: read | write, revents: 0 }
        })
        .collect();
    // Rounded up: waking early would mean waking twice.
    let ms = timeout.map_or(-1, |t| i32::try_from(t.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX));
    // SAFETY: the vector is valid for its length, which is a small number.
    let n = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, ms) };
    let error = (n < 0).then(io::Error::last_os_error);
    if let Some(e) = error.filter(|e| e.kind() != io::ErrorKind::Interrupted) {
        return Err(e);
    }
    for ((_, interest), p) in fds.iter_mut().zip(polled) {
        let broken = p.revents & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0;
        *interest = Interest {
            readable: interest.readable && (broken || p.revents & libc::POLLIN != 0),
            writable: interest.writable && (broken || p.revents & libc::POLLOUT != 0),
        };
    }
    Ok(())
}

/// SIGTERM, SIGINT and SIGHUP as a descriptor that becomes readable. They stay blocked for the process from then on, so it is made before any
/// thread is.
#[derive(Debug)]
pub(super) struct Signals(File);

impl Signals {
    /// Blocks the signals on this thread (and those it starts) and makes the descriptor.
    pub(super) fn catch() -> io::Result<Self> {
        let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: sigemptyset initializes the set before it is used; the other pointers are null or to it.
        let fd = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
                libc::sigaddset(set.as_mut_ptr(), signal);
            }
            let failed = libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
            if failed != 0 {
                return Err(io::Error::from_raw_os_error(failed));
            }
            libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a descriptor that was just made and that nobody else owns.
        Ok(Self(File::from(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    /// For poll.
    pub(super) fn raw(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Takes what has arrived; returns whether anything had.
    pub(super) fn take(&self) -> bool {
        let mut info = [0; size_of::<libc::signalfd_siginfo>()];
        let mut any = false;
        while (&self.0).read(&mut info).is_ok_and(|n| n > 0) {
            any = true;
        }
        any
    }
}

/// The end of a process in the background that tells its parent how its start went.
#[derive(Debug)]
pub(super) struct Detached(File);

/// Which side of [`detach`] this process is.
#[derive(Debug)]
pub(super) enum Side {
    /// The process the user started; the other one says whether it has come up.
    Parent(bool),
    /// The one in the background.
    Child(Detached),
}

/// Goes into the background. The parent returns when the child has called [`Detached::ready`] or has ended. Must be called before any thread is
/// started.
pub(super) fn detach() -> io::Result<Side> {
    let (mut reader, writer) = io::pipe()?;
    // SAFETY: there is one thread, so the child may do anything its parent might have done.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            drop(reader);
            // SAFETY: no pointers. It cannot fail in a child that leads no process group.
            unsafe { libc::setsid() };
            Ok(Side::Child(Detached(File::from(OwnedFd::from(writer)))))
        }
        _ => {
            drop(writer);
            let mut up = [0; 1];
            Ok(Side::Parent(reader.read(&mut up)? == 1))
        }
    }
}

impl Detached {
    /// Tells the parent that all is well, and lets go of the terminal.
    pub(super) fn ready(mut self) -> io::Result<()> {
        self.0.write_all(&[1])?;
        #[allow(clippy::disallowed_methods)]
        let null = File::options().read(true).write(true).open("/dev/null")?;
        for fd in 0..3 {
            // SAFETY: no pointers; both descriptors are open.
            if unsafe { libc::dup2(null.as_raw_fd(), fd) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    }
}

/// Year, month, day, hour, minute and second of a moment in local time.
pub(super) fn local_time(seconds: i64) -> [i32; 6] {
    let mut tm = std::mem::MaybeUninit::<libc::tm>::zeroed();
    // SAFETY: both pointers are valid for the call, which writes the second; zeros are a valid value if it fails.
    let tm = unsafe {
        libc::localtime_r(&seconds, tm.as_mut_ptr());
        tm.assume_init()
    };
    [tm.tm_year + 1900, tm.tm_mon + 1, tm.tm_mday, tm.tm_hour, tm.tm_min, tm.tm_sec]
}

/// Sends this process a signal.
pub(super) fn raise(signal: i32) -> io::Result<()> {
    // SAFETY: no pointers.
    if unsafe { libc::raise(signal) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Reserves `len` bytes from `offset` on, which then belong to the file.
pub(super) fn allocate(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let (offset, len) = (i64::try_from(offset), i64::try_from(len));
    let (Ok(offset), Ok(len)) = (offset, len) else { return Err(io::Error::from_raw_os_error(libc::EFBIG)) };
    // SAFETY: no pointers; the descriptor is open.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), offset, len) } {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// Gives free memory of all heaps back to the system, where the C library can.
pub(super) fn trim_heap() {
    // SAFETY: no arguments but a number; it may be called on any thread at any time.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Asks the file system to overwrite a file in place. Errors: ENOTTY and others where that is not known, which most file systems answer.
pub(super) fn set_nocow(file: &File) -> io::Result<()> {
    const FS_NOCOW_FL: libc::c_long = 0x0080_0000;
    let mut flags: libc::c_long = 0;
    // SAFETY: the kernel writes an int or a long through the pointer, which is valid for both.
    if unsafe { libc::ioctl(file.as_raw_fd(), libc::FS_IOC_GETFLAGS, &raw mut flags) } < 0 {
        return Err(io::Error::last_os_error());
    }
    flags |= FS_NOCOW_FL;
    // SAFETY: the kernel reads an int or a long through the pointer, which is valid for both.
    if unsafe { libc::ioctl(file.as_raw_fd(), libc::FS_IOC_SETFLAGS, &raw const flags) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn poll_tells_what_is_ready_and_skips_what_is_not_asked_for() {
        let (mut a, b) = UnixStream::pair().expect("socketpair");
        let both = Interest { readable: true, writable: true };
        let now = Some(Duration::ZERO);
        let mut fds = [(b.as_raw_fd(), both), (b.as_raw_fd(), Interest::default())];
        poll(&mut fds, now).expect("poll");
        assert_eq!((fds[0].1.readable, fds[0].1.writable), (false, true));
        a.write_all(b"x").expect("write");
        drop(a);
        fds[0].1 = Interest::READ;
        poll(&mut fds, now).expect("poll");
        assert_eq!((fds[0].1, fds[1].1), (Interest::READ, Interest::default()));
    }
}
