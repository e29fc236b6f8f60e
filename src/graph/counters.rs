//! Request counters of a queue, summed per disk.

use crate::request::Op;
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counters of one queue. Relaxed everywhere: they are read for statistics only.
#[derive(Debug, Default)]
pub struct IoCounters {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
    zeroes: AtomicU64,
    discards: AtomicU64,
    flushes: AtomicU64,
    failed: AtomicU64,
}

/// Sums of counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoTotals {
    /// Reads.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Write-zeroes.
    pub zeroes: u64,
    /// Discards.
    pub discards: u64,
    /// Flushes.
    pub flushes: u64,
    /// Requests that failed.
    pub failed: u64,
}

impl IoCounters {
    /// Counts one request that has ended.
    pub fn count(&self, op: Op, len: u64, ok: bool) {
        if !ok {
            self.failed.fetch_add(1, Relaxed);
            return;
        }
        let (ops, bytes) = match op {
            Op::Read => (&self.reads, Some(&self.read_bytes)),
            Op::Write => (&self.writes, Some(&self.written_bytes)),
            Op::WriteZeroes => (&self.zeroes, None),
            Op::Discard => (&self.discards, None),
            Op::Flush => (&self.flushes, None),
        };
        ops.fetch_add(1, Relaxed);
        if let Some(bytes) = bytes {
            bytes.fetch_add(len, Relaxed);
        }
    }

    /// The counters now.
    pub fn totals(&self) -> IoTotals {
        IoTotals {
            reads: self.reads.load(Relaxed),
            read_bytes: self.read_bytes.load(Relaxed),
            writes: self.writes.load(Relaxed),
            written_bytes: self.written_bytes.load(Relaxed),
            zeroes: self.zeroes.load(Relaxed),
            discards: self.discards.load(Relaxed),
            flushes: self.flushes.load(Relaxed),
            failed: self.failed.load(Relaxed),
        }
    }
}

impl std::ops::AddAssign for IoTotals {
    fn add_assign(&mut self, o: Self) {
        self.reads += o.reads;
        self.read_bytes += o.read_bytes;
        self.writes += o.writes;
        self.written_bytes += o.written_bytes;
        self.zeroes += o.zeroes;
        self.discards += o.discards;
        self.flushes += o.flushes;
        self.failed += o.failed;
    }
}
