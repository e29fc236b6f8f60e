//! One file over either engine.

pub mod sys;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// An open file; kept open until the last operation on it has ended.
#[derive(Debug)]
pub struct FileHandle {
    fd: OwnedFd,
}

impl FileHandle {
    /// Takes over a descriptor.
    pub fn new(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// The descriptor.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A write that is counted in its file's gate; the count ends when the token is dropped.
#[derive(Debug)]
pub struct GateToken {
    _private: (),
}
