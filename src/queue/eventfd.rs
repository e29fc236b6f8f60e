//! An eventfd: a counter that a host's event loop can poll.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// A close-on-exec eventfd.
#[derive(Debug)]
pub struct EventFd(File);

impl EventFd {
    /// A new one, not signalled.
    pub fn new() -> std::io::Result<Self> {
        Self::with_flags(libc::EFD_NONBLOCK)
    }

    /// A new one whose reads wait, for a ring to read. `clear` must not be called on it.
    pub fn blocking() -> std::io::Result<Self> {
        Self::with_flags(0)
    }

    fn with_flags(flags: i32) -> std::io::Result<Self> {
        // SAFETY: no pointers; the result is checked.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | flags) };
        if fd < 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: a descriptor that was just made and that nobody else owns.
        Ok(Self(File::from(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    /// Makes it readable.
    pub fn signal(&self) {
        // EAGAIN means the counter is at its maximum: readable anyway.
        let _ = (&self.0).write(&1u64.to_ne_bytes());
    }

    /// Makes it unreadable; returns whether it was readable.
    pub fn clear(&self) -> bool {
        self.take() > 0
    }

    /// Makes it unreadable; returns how often it had been signalled.
    pub fn take(&self) -> u64 {
        let mut count = [0; 8];
        (&self.0).read(&mut count).map_or(0, |_| u64::from_ne_bytes(count))
    }

    /// The descriptor, for poll.
    pub fn raw(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clear_tells_whether_it_was_signalled() {
        let e = EventFd::new().expect("eventfd");
        assert!(!e.clear());
        e.signal();
        e.signal();
        assert!(e.clear());
        assert!(!e.clear());
        (0..3).for_each(|_| e.signal());
        assert_eq!((e.take(), e.take()), (3, 0));
    }
}
