//! A guest in miniature: writes each block of a disk once, in random order, and measures each request.

use crate::error::{Error, IoError, Result};
use crate::queue::{Cqe, HostOp, HostReq, Queue};
use crate::request::{Buffers, Request};
use std::time::{Duration, Instant};

/// What to write and how.
#[derive(Clone, Copy, Debug)]
pub(super) struct Workload {
    /// Length of the disk in bytes.
    pub(super) disk_len: u64,
    /// Bytes per write.
    pub(super) block_len: u64,
    /// Writes in flight.
    pub(super) depth: usize,
    /// Stamped into every block with its number, so that no two runs write the same data.
    pub(super) stamp: u64,
    /// Stop early after this time.
    pub(super) limit: Option<Duration>,
    /// Read this granule before the first write that touches it: what copy-before-write costs the device, without copy-before-write.
    pub(super) read_first: Option<u64>,
}

/// What was measured.
#[derive(Debug, Default)]
pub(super) struct Measured {
    pub(super) seconds: f64,
    pub(super) latencies_ns: Vec<u64>,
}

/// Latency of one run or several, in microseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Latency {
    pub(super) mean: f64,
    pub(super) p50: f64,
    pub(super) p99: f64,
    pub(super) max: f64,
}

impl Measured {
    /// Writes per second.
    pub(super) fn iops(&self) -> f64 {
        if self.seconds > 0.0 { self.latencies_ns.len() as f64 / self.seconds } else { 0.0 }
    }

    /// Latency percentiles; sorts the samples.
    pub(super) fn latency(&mut self) -> Latency {
        let v = &mut self.latencies_ns;
        if v.is_empty() {
            return Latency::default();
        }
        v.sort_unstable();
        let at = |q: f64| v[((v.len() - 1) as f64 * q).round() as usize] as f64 / 1e3;
        let mean = v.iter().map(|n| *n as f64).sum::<f64>() / v.len() as f64 / 1e3;
        Latency { mean, p50: at(0.5), p99: at(0.99), max: at(1.0) }
    }
}

/// xorshift64*: test data and permutations, reproducible.
#[derive(Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Fills `bytes` with data that does not compress.
    pub(super) fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.next().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }

    fn permutation(&mut self, n: u64) -> Vec<u64> {
        let mut v: Vec<u64> = (0..n).collect();
        for i in (1..v.len()).rev() {
            v.swap(i, (self.next() % (i as u64 + 1)) as usize);
        }
        v
    }
}

struct Slot {
    data: Buffers,
    old: Buffers,
    block: u64,
    begun: Instant,
    reading: bool,
}

impl Workload {
    /// Writes every block once. `progress` is called now and then with the share done.
    pub(super) fn run(&self, queue: &Queue, mut progress: impl FnMut(f64)) -> Result<Measured> {
        let blocks = self.disk_len.div_ceil(self.block_len);
        let mut random = Random::new(self.stamp.wrapping_mul(0x9e37_79b9).wrapping_add(blocks));
        let order = random.permutation(blocks);
        let mut template = vec![0; self.block_len as usize];
        random.fill(&mut template);
        let granule = self.read_first.unwrap_or(0);
        let mut seen = vec![false; if granule == 0 { 0 } else { self.disk_len.div_ceil(granule) as usize }];
        let start = Instant::now();
        let mut slots: Vec<Slot> = (0..self.depth)
            .map(|_| Slot {
                data: Buffers::from_bytes(&template),
                old: Buffers::alloc(granule as usize, 4096),
                block: 0,
                begun: start,
                reading: false,
            })
            .collect();
        let mut free: Vec<usize> = (0..self.depth).collect();
        let mut out = Measured { seconds: 0.0, latencies_ns: Vec::with_capacity(blocks as usize) };
        let (mut reqs, mut cqes): (Vec<HostReq>, Vec<Cqe>) = (Vec::new(), Vec::new());
        let mut next = order.iter();
        let mut stop = false;
        loop {
            while !stop && let Some(i) = free.pop() {
                let Some(block) = next.next() else {
                    free.push(i);
                    stop = true;
                    break;
                };
                let slot = &mut slots[i];
                (slot.block, slot.begun, slot.reading) = (*block, Instant::now(), false);
                let first = block * self.block_len / granule.max(1);
                if granule > 0 && !std::mem::replace(&mut seen[first as usize], true) {
                    slot.reading = true;
                    let at = first * granule;
                    let len = granule.min(self.disk_len - at) as usize;
                    reqs.push(HostReq {
                        user_data: i as u64,
                        op: HostOp::Io(Request::read(at, slot.old.slice(0, len))),
                    });
                } else {
                    reqs.push(self.write(i, slot));
                }
            }
            if free.len() == self.depth {
                break;
            }
            while !reqs.is_empty() {
                queue.submit(&mut reqs);
                if !reqs.is_empty() {
                    queue.reap(&mut cqes, usize::MAX, 1, None);
                }
            }
            queue.reap(&mut cqes, usize::MAX, 1, None);
            let now = Instant::now();
            for c in cqes.drain(..) {
                if c.res < 0 {
                    return Err(Error::io(IoError::new(-c.res as i32, c.code), "a guest request failed"));
                }
                let i = c.user_data as usize;
                let slot = &mut slots[i];
                if std::mem::take(&mut slot.reading) {
                    let write = self.write(i, slot);
                    reqs.push(write);
                    continue;
                }
                out.latencies_ns.push(now.duration_since(slot.begun).as_nanos() as u64);
                free.push(i);
                if out.latencies_ns.len().is_multiple_of(512) {
                    progress(out.latencies_ns.len() as f64 / blocks as f64);
                }
            }
            stop |= self.limit.is_some_and(|l| now.duration_since(start) >= l);
        }
        out.seconds = start.elapsed().as_secs_f64();
        Ok(out)
    }

    fn write(&self, i: usize, slot: &Slot) -> HostReq {
        let at = slot.block * self.block_len;
        let len = self.block_len.min(self.disk_len - at) as usize;
        let data = slot.data.slice(0, len);
        let mut mark = [0; 16];
        mark[..8].copy_from_slice(&slot.block.to_le_bytes());
        mark[8..].copy_from_slice(&self.stamp.to_le_bytes());
        data.copy_from_slice(&mark[..len.min(16)]);
        HostReq { user_data: i as u64, op: HostOp::Io(Request::write(at, data)) }
    }
}
