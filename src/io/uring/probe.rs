//! Whether io_uring can be used here.

use super::driver::UringEngine;
use io_uring::{IoUring, Probe, opcode};

/// Makes a ring and asks for everything the engine uses. Errors: EPERM, ENOSYS, ENOMEM as the system gives them; ENOTSUP for a
/// kernel that lacks an operation. Blocks a little; the answer is kept by [`crate::io::uring_allowed`].
pub fn probe() -> std::io::Result<()> {
    let ring = IoUring::new(1)?;
    let unsupported = || std::io::Error::from_raw_os_error(libc::ENOTSUP);
    // Waiting with a timeout in the call itself, and a completion ring that keeps what overflows.
    if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
        return Err(unsupported());
    }
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let needed = [
        opcode::Read::CODE,
        opcode::Write::CODE,
        opcode::Readv::CODE,
        opcode::Writev::CODE,
        opcode::Fsync::CODE,
        opcode::Fallocate::CODE,
        opcode::Timeout::CODE,
        opcode::TimeoutUpdate::CODE,
        opcode::AsyncCancel::CODE,
    ];
    if !needed.into_iter().all(|code| probe.is_supported(code)) {
        return Err(unsupported());
    }
    // A ring as it will be, with its eventfd: a sandbox may forbid one of these calls only.
    UringEngine::new(1).map(drop)
}
