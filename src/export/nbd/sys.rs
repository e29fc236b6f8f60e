//! System calls on sockets that std has no safe form of: poll, and scatter-gather transfers over memory of the engine.
//!
//! `unsafe` because [`Segment`]s hand out raw addresses: their memory belongs to a request, and no reference to it may be made.

use crate::request::Segment;
use smallvec::SmallVec;
use std::io;
use std::marker::PhantomData;
use std::os::fd::RawFd;
use std::time::Duration;

/// Most pieces of memory of one transfer.
pub(super) const IOV_MAX: usize = 256;

/// What to wait for on one descriptor.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Interest {
    pub(super) readable: bool,
    pub(super) writable: bool,
}

impl Interest {
    pub(super) const READ: Self = Self { readable: true, writable: false };
}

/// Waits until one of the descriptors is ready, or `timeout` has passed (`None`: no limit). Returns what is ready, hang-up and errors included in both;
/// a descriptor without interest is not looked at. A signal ends the wait early.
pub(super) fn poll<const N: usize>(
    fds: [(RawFd, Interest); N],
    timeout: Option<Duration>,
) -> io::Result<[Interest; N]> {
    let mut polled = fds.map(|(fd, interest)| {
        let mut events = 0;
        if interest.readable {
            events |= libc::POLLIN;
        }
        if interest.writable {
            events |= libc::POLLOUT;
        }
        // The kernel skips negative descriptors; with no events it would still report a hang-up, again and again.
        libc::pollfd { fd: if events == 0 { -1 } else { fd }, events, revents: 0 }
    });
    // Rounded up: waking early would mean waking twice.
    let ms = timeout.map_or(-1, |t| i32::try_from(t.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX));
    // SAFETY: the array is valid for N entries, which is a small number.
    let n = unsafe { libc::poll(polled.as_mut_ptr(), N as libc::nfds_t, ms) };
    if n < 0 {
        let e = io::Error::last_os_error();
        return if e.kind() == io::ErrorKind::Interrupted { Ok([Interest::default(); N]) } else { Err(e) };
    }
    Ok(polled.map(|p| {
        let broken = p.revents & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0;
        Interest {
            readable: broken || p.revents & libc::POLLIN != 0,
            writable: broken || p.revents & libc::POLLOUT != 0,
        }
    }))
}

/// Receives what is there, without waiting: first into `segment` from byte `skip` on, then into `tail`. 0 is the end of the stream.
///
/// The caller holds the only request on the segment's memory, so nobody else looks at it meanwhile.
pub(super) fn recv(fd: RawFd, segment: Option<(&Segment, usize)>, tail: &mut [u8]) -> io::Result<usize> {
    let mut iov: SmallVec<[libc::iovec; 2]> = SmallVec::new();
    if let Some((segment, skip)) = segment {
        assert!(skip <= segment.len(), "past the end of a segment");
        // SAFETY: the assertion keeps the address inside the segment.
        let base = unsafe { segment.as_ptr().add(skip) };
        iov.push(libc::iovec { iov_base: base.cast(), iov_len: segment.len() - skip });
    }
    iov.push(libc::iovec { iov_base: tail.as_mut_ptr().cast(), iov_len: tail.len() });
    let mut msg = message(iov.as_mut_ptr(), iov.len());
    loop {
        // SAFETY: the vectors point to memory that is writable and lives until the call returns: `segment` and `tail` are borrowed.
        let n = unsafe { libc::recvmsg(fd, &mut msg, libc::MSG_DONTWAIT) };
        match usize::try_from(n) {
            Ok(n) => return Ok(n),
            Err(_) => {
                let e = io::Error::last_os_error();
                if e.kind() != io::ErrorKind::Interrupted {
                    return Err(e);
                }
            }
        }
    }
}

/// Lets the kernel probe a silent TCP peer, at its usual pace, and fail the socket if it has gone.
pub(super) fn keep_alive(fd: RawFd) -> io::Result<()> {
    let on: libc::c_int = 1;
    // SAFETY: the value is an int of the length that is told.
    let n = unsafe {
        libc::setsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_KEEPALIVE,
            (&raw const on).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if n < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Memory to be sent, in order; at most [`IOV_MAX`] pieces.
#[derive(Default)]
pub(super) struct Gather<'a> {
    iov: SmallVec<[libc::iovec; 32]>,
    lives: PhantomData<&'a [u8]>,
}

impl<'a> Gather<'a> {
    /// Whether another piece fits.
    pub(super) fn has_room(&self) -> bool {
        self.iov.len() < IOV_MAX
    }

    /// Bytes added.
    pub(super) fn len(&self) -> usize {
        self.iov.iter().map(|v| v.iov_len).sum()
    }

    /// Adds bytes; ignored without room.
    pub(super) fn bytes(&mut self, bytes: &'a [u8]) {
        self.add(bytes.as_ptr().cast_mut(), bytes.len());
    }

    /// Adds a segment from byte `skip` on; ignored without room.
    pub(super) fn segment(&mut self, segment: &'a Segment, skip: usize) {
        assert!(skip <= segment.len(), "past the end of a segment");
        // SAFETY: the assertion keeps the address inside the segment.
        self.add(unsafe { segment.as_ptr().add(skip) }, segment.len() - skip);
    }

    fn add(&mut self, ptr: *mut u8, len: usize) {
        if len > 0 && self.has_room() {
            self.iov.push(libc::iovec { iov_base: ptr.cast(), iov_len: len });
        }
    }

    /// Sends as much as the socket takes without waiting; returns how many bytes. Raises no SIGPIPE.
    pub(super) fn send(mut self, fd: RawFd) -> io::Result<usize> {
        let msg = message(self.iov.as_mut_ptr(), self.iov.len());
        loop {
            // SAFETY: the vectors point to memory that is readable and borrowed for 'a; the kernel only reads it.
            let n = unsafe { libc::sendmsg(fd, &msg, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
            match usize::try_from(n) {
                Ok(n) => return Ok(n),
                Err(_) => {
                    let e = io::Error::last_os_error();
                    if e.kind() != io::ErrorKind::Interrupted {
                        return Err(e);
                    }
                }
            }
        }
    }
}

fn message(iov: *mut libc::iovec, len: usize) -> libc::msghdr {
    // SAFETY: all-zero is a valid msghdr: no address, no control data. (The struct has private padding on some targets.)
    let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
    msg.msg_iov = iov;
    msg.msg_iovlen = len as _;
    msg
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Buffers;
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_transfer_scatters_over_segment_and_tail_and_gathers_back() {
        let (mut a, b) = UnixStream::pair().expect("socketpair");
        a.write_all(b"0123456789").expect("write");
        let bufs = Buffers::alloc(8, 8);
        let segment = &bufs.segments()[0];
        let mut tail = [0; 16];
        assert_eq!(recv(b.as_raw_fd(), Some((segment, 3)), &mut tail).expect("recv"), 10);
        assert_eq!((&bufs.to_vec()[3..], &tail[..5]), (&b"01234"[..], &b"56789"[..]));
        let mut out = Gather::default();
        out.bytes(b"<");
        out.segment(segment, 6);
        out.bytes(b"");
        out.bytes(b">");
        assert_eq!(out.send(a.as_raw_fd()).expect("send"), 4);
        assert_eq!(recv(b.as_raw_fd(), None, &mut tail).expect("recv"), 4);
        assert_eq!(&tail[..4], b"<34>");
    }

    #[test]
    fn nothing_blocks_and_a_closed_peer_is_an_error_not_a_signal() {
        let (a, b) = UnixStream::pair().expect("socketpair");
        let e = recv(b.as_raw_fd(), None, &mut [0; 4]).expect_err("nothing there");
        assert_eq!(e.kind(), io::ErrorKind::WouldBlock);
        drop(a);
        assert_eq!(recv(b.as_raw_fd(), None, &mut [0; 4]).expect("end"), 0);
        let mut out = Gather::default();
        out.bytes(b"x");
        assert_eq!(out.send(b.as_raw_fd()).expect_err("closed").kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn poll_tells_what_is_ready_and_skips_what_is_not_asked_for() {
        let (mut a, b) = UnixStream::pair().expect("socketpair");
        let both = Interest { readable: true, writable: true };
        let none = Interest::default();
        let zero = Some(Duration::ZERO);
        let [r] = poll([(b.as_raw_fd(), both)], zero).expect("poll");
        assert!(r.writable && !r.readable);
        a.write_all(b"x").expect("write");
        drop(a);
        let [r, skipped] =
            poll([(b.as_raw_fd(), Interest::READ), (b.as_raw_fd(), none)], None).expect("poll");
        assert!(r.readable && !skipped.readable && !skipped.writable);
    }
}
