//! From operations to submission entries.

use super::ring::Slot;
use crate::io::FileOpKind;
use crate::request::{Buffers, Class};
use io_uring::types::{Fd, FsyncFlags};
use io_uring::{opcode, squeue};

/// Most segments of one operation (UIO_MAXIOV). The rest follows as the continuation of a short transfer.
const IOV_MAX: usize = 1024;

/// Most bytes the kernel moves in one operation (MAX_RW_COUNT with 4 KiB pages); a multiple of every block size.
const TRANSFER_MAX: u64 = 0x7fff_f000;

/// The submission entry for what is left of an operation. It points into the slot's iovecs and buffers.
pub(super) fn entry(slot: &mut Slot) -> squeue::Entry {
    let op = &slot.op.op;
    let fd = Fd(op.file.raw_fd(op));
    let done = slot.progress.done;
    let offset = op.offset + done;
    let dsync = if op.dsync { libc::RWF_DSYNC } else { 0 };
    let prio = io_priority(slot.op.class);
    let entry = match op.kind {
        FileOpKind::Sync => opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build(),
        FileOpKind::Allocate(mode) => opcode::Fallocate::new(fd, op.len).offset(op.offset).mode(mode).build(),
        FileOpKind::Read | FileOpKind::Write => {
            let read = op.kind == FileOpKind::Read;
            if let [segment] = slot.op.bufs.segments() {
                let memory = segment.as_ptr().wrapping_add(done as usize);
                let len = (op.len - done).min(TRANSFER_MAX) as u32;
                if read {
                    opcode::Read::new(fd, memory, len).offset(offset).ioprio(prio).build()
                } else {
                    opcode::Write::new(fd, memory, len).offset(offset).rw_flags(dsync).ioprio(prio).build()
                }
            } else {
                fill_iovecs(&mut slot.iov, &slot.op.bufs, done as usize);
                let (iov, n) = (slot.iov.as_ptr(), slot.iov.len() as u32);
                if read {
                    opcode::Readv::new(fd, iov, n).offset(offset).ioprio(prio).build()
                } else {
                    opcode::Writev::new(fd, iov, n).offset(offset).rw_flags(dsync).ioprio(prio).build()
                }
            }
        }
    };
    // What the kernel would not do without waiting is done by a kernel thread that may.
    if slot.progress.is_delayed() { entry.flags(squeue::Flags::ASYNC) } else { entry }
}

/// The first [`IOV_MAX`] segments behind `skip` bytes.
pub(in crate::io) fn fill_iovecs(iov: &mut Vec<libc::iovec>, bufs: &Buffers, mut skip: usize) {
    iov.clear();
    for s in bufs.segments() {
        if skip >= s.len() {
            skip -= s.len();
            continue;
        }
        iov.push(libc::iovec { iov_base: s.as_ptr().wrapping_add(skip).cast(), iov_len: s.len() - skip });
        skip = 0;
        if iov.len() == IOV_MAX {
            break;
        }
    }
}

/// The kernel's I/O priority of a class: the default for what guests wait for, the lowest best-effort level for background work, the idle class
/// for lazy work (S39, S56). 0 means the default of the thread.
pub(in crate::io) const fn io_priority(class: Class) -> u16 {
    const BEST_EFFORT: u16 = 2 << 13;
    const IDLE: u16 = 3 << 13;
    match class {
        Class::Guest | Class::Copy => 0,
        Class::Background => BEST_EFFORT | 7,
        Class::Lazy => IDLE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn iovecs_are_the_segments_behind_the_skipped_bytes() {
        let mut bufs = Buffers::new();
        [3, 1, 4, 2].into_iter().for_each(|n| bufs.append(Buffers::alloc(n, 8)));
        let mut iov = Vec::new();
        for skip in 0..10 {
            fill_iovecs(&mut iov, &bufs, skip);
            let rest = bufs.slice(skip, 10 - skip);
            let expected: Vec<_> = rest.segments().iter().map(|s| (s.as_ptr(), s.len())).collect();
            let got: Vec<_> = iov.iter().map(|v| (v.iov_base.cast::<u8>(), v.iov_len)).collect();
            assert_eq!(got, expected, "behind {skip}");
        }
    }

    #[test]
    fn iovecs_end_at_the_kernel_s_limit() {
        let mut bufs = Buffers::new();
        (0..IOV_MAX + 5).for_each(|_| bufs.append(Buffers::alloc(1, 1)));
        let mut iov = Vec::new();
        fill_iovecs(&mut iov, &bufs, 0);
        assert_eq!(iov.len(), IOV_MAX);
        fill_iovecs(&mut iov, &bufs, IOV_MAX);
        assert_eq!(iov.len(), 5);
    }
}
