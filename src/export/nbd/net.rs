//! Sockets: addresses, listening, accepting.

use super::sys::{self, Gather, Interest};
use crate::error::{Error, Result};
use crate::request::Segment;
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A socket in the file system.
    Unix(PathBuf),
    /// Host name or address, and port; port 0 takes a free one. Of several addresses of a name the first that can be bound is used.
    Tcp(String, u16),
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
            Address::Tcp(host, port) if host.contains(':') => write!(f, "[{host}]:{port}"),
            Address::Tcp(host, port) => write!(f, "{host}:{port}"),
        }
    }
}

/// A listening socket that does not block; a unix socket's file goes with it.
#[derive(Debug)]
pub struct Listener {
    kind: Kind,
    address: Address,
}

#[derive(Debug)]
enum Kind {
    /// With device and inode of the socket's file, so that only our own is removed.
    Unix(UnixListener, Option<(u64, u64)>),
    Tcp(TcpListener),
}

impl Listener {
    /// Binds and listens. A socket file that nobody listens on any more is replaced.
    pub fn bind(address: &Address) -> Result<Self> {
        let failed = |e| Error::os(e, format!("cannot listen on {address}"));
        match address {
            Address::Unix(path) => {
                let listener = bind_unix(path).map_err(failed)?;
                listener.set_nonblocking(true).map_err(failed)?;
                Ok(Self { kind: Kind::Unix(listener, identity(path)), address: address.clone() })
            }
            Address::Tcp(host, port) => {
                let found =
                    (host.as_str(), *port).to_socket_addrs().map_err(failed)?.collect::<Vec<SocketAddr>>();
                let listener = TcpListener::bind(&*found).map_err(failed)?;
                listener.set_nonblocking(true).map_err(failed)?;
                let port = listener.local_addr().map_err(failed)?.port();
                Ok(Self { kind: Kind::Tcp(listener), address: Address::Tcp(host.clone(), port) })
            }
        }
    }

    /// Where it listens, with the port it got.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// For poll.
    pub fn raw(&self) -> RawFd {
        match &self.kind {
            Kind::Unix(l, _) => l.as_raw_fd(),
            Kind::Tcp(l) => l.as_raw_fd(),
        }
    }

    /// A connection that is waiting, or `WouldBlock`. It does not block either.
    pub fn accept(&self) -> io::Result<OwnedFd> {
        Ok(match &self.kind {
            Kind::Unix(l, _) => {
                let (s, _) = l.accept()?;
                s.set_nonblocking(true)?;
                s.into()
            }
            Kind::Tcp(l) => {
                let (s, _) = l.accept()?;
                s.set_nonblocking(true)?;
                // Replies are gathered into one call already; waiting for more would only add latency.
                s.set_nodelay(true)?;
                // A client whose machine has gone must not hold its connection for ever.
                sys::keep_alive(s.as_raw_fd())?;
                s.into()
            }
        })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let (Kind::Unix(_, Some(ours)), Address::Unix(path)) = (&self.kind, &self.address) else { return };
        if identity(path) == Some(*ours) {
            // Nothing can be done about a failure; the next server finds a stale socket and removes it.
            let _ = remove_file(path);
        }
    }
}

/// Binds to `path`; a socket file that nobody listens on any more is removed first, anything else is left alone.
fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    match UnixListener::bind(path) {
        Err(e) if e.kind() == io::ErrorKind::AddrInUse && is_stale(path) => {
            remove_file(path)?;
            UnixListener::bind(path)
        }
        other => other,
    }
}

fn is_stale(path: &Path) -> bool {
    let is_socket = metadata(path).is_ok_and(|m| m.file_type().is_socket());
    is_socket && UnixStream::connect(path).is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused)
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    metadata(path).ok().map(|m| (m.dev(), m.ino()))
}

// The name of a socket belongs to the socket, not to the files of the engine, so these two do not go through the seam of `io`.
#[allow(clippy::disallowed_methods)]
fn metadata(path: &Path) -> io::Result<std::fs::Metadata> {
    std::fs::symlink_metadata(path)
}

#[allow(clippy::disallowed_methods)]
fn remove_file(path: &Path) -> io::Result<()> {
    std::fs::remove_file(path)
}

/// A connected, non-blocking stream socket.
#[derive(Debug)]
pub(super) struct Socket(OwnedFd);

impl Socket {
    /// For poll.
    pub(super) fn raw(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Receives what is there; see [`sys::recv`].
    pub(super) fn recv(&self, segment: Option<(&Segment, usize)>, tail: &mut [u8]) -> io::Result<usize> {
        sys::recv(self.raw(), segment, tail)
    }

    /// Sends what fits; see [`Gather::send`].
    pub(super) fn send(&self, gather: Gather<'_>) -> io::Result<usize> {
        gather.send(self.raw())
    }

    /// This socket's place in a call of [`sys::poll`].
    pub(super) fn interest(&self, readable: bool, writable: bool) -> (RawFd, Interest) {
        (self.raw(), Interest { readable, writable })
    }
}

impl From<OwnedFd> for Socket {
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

impl From<UnixStream> for Socket {
    fn from(stream: UnixStream) -> Self {
        Self(stream.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_socket_is_replaced_but_a_live_one_and_a_file_are_not() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("s");
        let address = Address::Unix(path.clone());
        // A std listener leaves its file behind when it is dropped.
        drop(UnixListener::bind(&path).expect("bind"));
        assert!(path.exists());
        let live = Listener::bind(&address).expect("the stale socket is replaced");
        let e = Listener::bind(&address).expect_err("somebody listens");
        assert_eq!(e.errno(), libc::EADDRINUSE);
        drop(live);
        assert!(!path.exists());
        std::fs::write(&path, b"data").expect("write");
        assert!(Listener::bind(&address).is_err());
        assert_eq!(std::fs::read(&path).expect("still there"), b"data");
    }

    #[test]
    fn a_socket_file_of_somebody_else_is_not_removed() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("s");
        let ours = Listener::bind(&Address::Unix(path.clone())).expect("bind");
        std::fs::remove_file(&path).expect("remove");
        let _theirs = UnixListener::bind(&path).expect("bind");
        drop(ours);
        assert!(path.exists());
    }

    #[test]
    fn port_0_is_told_as_the_port_it_became() {
        let l = Listener::bind(&Address::Tcp("127.0.0.1".to_owned(), 0)).expect("bind");
        assert!(matches!(l.address(), Address::Tcp(host, port) if host == "127.0.0.1" && *port != 0));
        assert_eq!(l.accept().expect_err("nobody").kind(), io::ErrorKind::WouldBlock);
        assert_eq!(Address::Tcp("::1".to_owned(), 5).to_string(), "[::1]:5");
    }
}
