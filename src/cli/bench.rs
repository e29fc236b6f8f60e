//! `cobweb bench`: qemu-img bench's flags and output line, plus `--json`, `--queues` and `--random`.

use super::image::{ImageFlags, cache_mode, open_disk};
use super::workload::Random;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::graph::Disk;
use crate::limits::QUEUE_DEPTH_MAX;
use crate::options::parse_size;
use crate::queue::{Cqe, HostOp, HostReq, Queue};
use crate::request::{Buffers, Flags, Request};
use crate::sync::{Arc, thread};
use std::process::ExitCode;
use std::time::Instant;

/// Arguments of `cobweb bench`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Image file, or option text with --image-opts
    filename: String,
    /// Number of requests
    #[arg(short = 'c', default_value = "75000")]
    count: String,
    /// Requests in flight (per queue)
    #[arg(short = 'd', default_value = "64")]
    depth: String,
    /// Bytes per request
    #[arg(short = 's', default_value = "4096")]
    size: String,
    /// Distance between the starts of two requests (default: the request size)
    #[arg(short = 'S')]
    step: Option<String>,
    /// Requests at random multiples of the request size instead; the same seed gives the same sequence
    #[arg(long, value_name = "SEED", conflicts_with_all = ["step", "offset"])]
    random: Option<u64>,
    /// Offset of the first request
    #[arg(short = 'o', default_value = "0")]
    offset: String,
    /// Write instead of read
    #[arg(short = 'w')]
    write: bool,
    /// Image format
    #[arg(short = 'f')]
    format: Option<String>,
    /// Cache mode: none, writeback, writethrough, directsync, unsafe
    #[arg(short = 't', default_value = "writeback")]
    cache: String,
    /// AIO back end: threads, io_uring
    #[arg(short = 'i')]
    aio: Option<String>,
    /// Native AIO; here the same as -i io_uring
    #[arg(short = 'n')]
    native: bool,
    /// Byte written
    #[arg(long, default_value = "0")]
    pattern: String,
    /// Flush after this many requests
    #[arg(long)]
    flush_interval: Option<String>,
    /// Do not wait for the requests in flight before a flush
    #[arg(long)]
    no_drain: bool,
    /// The file name is option text
    #[arg(long)]
    image_opts: bool,
    /// Open the image shared
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Print nothing
    #[arg(short = 'q')]
    quiet: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
    /// Number of queues, each on a thread of its own; the requests are divided among them
    #[arg(long, default_value_t = 1)]
    queues: u32,
}

#[derive(Clone, Copy, Debug)]
struct Plan {
    count: u64,
    depth: usize,
    size: usize,
    order: Order,
    write: bool,
    pattern: u8,
    fua: bool,
    flush_interval: u64,
    drain: bool,
    disk_size: u64,
}

/// Where the requests go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// From `offset` on, `step` bytes apart, and from the start again behind the end.
    Step { offset: u64, step: u64 },
    /// To multiples of the request size, each as likely as any other.
    Random { seed: u64 },
}

/// The offsets of one queue's requests.
#[derive(Debug)]
struct Positions {
    order: Order,
    random: Random,
    /// Requests to the other queues between two of this one's, in bytes of [`Order::Step`].
    at: u128,
    stride: u128,
    size: u64,
    disk_size: u64,
}

impl Positions {
    /// Of queue `first` out of `of`. `size` is in `1..=disk_size`.
    fn new(order: Order, size: u64, disk_size: u64, first: u64, of: u64) -> Self {
        let (at, stride, seed) = match order {
            Order::Step { offset, step } => (
                u128::from(offset) + u128::from(step) * u128::from(first),
                u128::from(step) * u128::from(of),
                0,
            ),
            Order::Random { seed } => (0, 0, seed),
        };
        // Seeds that follow one another are to give sequences that have nothing in common.
        let seed = (seed.wrapping_add(first << 32).wrapping_add(1)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self { order, random: Random::new(seed), at, stride, size, disk_size }
    }

    fn next(&mut self) -> u64 {
        match self.order {
            Order::Step { .. } => {
                let at = self.at;
                self.at += self.stride;
                let wrap = u128::from(self.disk_size - self.size);
                if wrap == 0 { 0 } else { (at % wrap) as u64 }
            }
            Order::Random { .. } => self.random.next() % (self.disk_size / self.size) * self.size,
        }
    }
}

/// Runs the benchmark.
pub(super) fn run(args: &Args) -> Result<ExitCode> {
    let number = |what: &str, text: &str, min: u64, max: u64| -> Result<u64> {
        let value = parse_size(text)?;
        if (min..=max).contains(&value) {
            Ok(value)
        } else {
            Err(Error::invalid(format!("invalid {what} specified: '{text}' is not in {min}..={max}")))
        }
    };
    let cache = cache_mode(&args.cache)?;
    let size = number("buffer size", &args.size, 1, crate::limits::REQUEST_LEN_MAX)?;
    let mut plan = Plan {
        count: number("request count", &args.count, 1, i32::MAX as u64)?,
        depth: number("queue depth", &args.depth, 1, u64::from(QUEUE_DEPTH_MAX))? as usize,
        size: size as usize,
        order: match args.random {
            Some(seed) => Order::Random { seed },
            None => Order::Step {
                offset: number("offset", &args.offset, 0, i64::MAX as u64)?,
                step: args
                    .step
                    .as_deref()
                    .map_or(Ok(size), |s| number("step size", s, 0, i32::MAX as u64))?,
            },
        },
        write: args.write,
        pattern: number("pattern byte", &args.pattern, 0, 255)? as u8,
        fua: cache.write_through && args.write,
        flush_interval: args
            .flush_interval
            .as_deref()
            .map_or(Ok(0), |s| number("flush interval", s, 0, i32::MAX as u64))?,
        drain: !args.no_drain,
        disk_size: 0,
    };
    if plan.flush_interval > 0 && !plan.write {
        return Err(Error::invalid("--flush-interval is only available in write tests"));
    }
    if plan.flush_interval > 0 && plan.flush_interval < plan.depth as u64 {
        return Err(Error::invalid("flush interval can't be smaller than depth"));
    }
    if args.queues == 0 || args.queues > 64 {
        return Err(Error::invalid("--queues takes 1 to 64"));
    }
    let ctx = Context::with_defaults()?;
    let flags = ImageFlags {
        format: args.format.as_deref(),
        cache: Some(&args.cache),
        discard: None,
        aio: if args.native { Some("io_uring") } else { args.aio.as_deref() },
        image_opts: args.image_opts,
        force_share: args.force_share,
        read_only: !args.write,
    };
    let disk = open_disk(&ctx, &args.filename, &flags)?;
    plan.disk_size = disk.size();
    if plan.disk_size == 0 {
        return Err(Error::invalid("the image has no byte to read or write"));
    }
    plan.size = plan.size.min(plan.disk_size as usize);
    if !args.quiet && !args.json {
        announce(&plan);
    }
    let start = Instant::now();
    let failed = run_queues(&disk, plan, args.queues)?;
    let seconds = start.elapsed().as_secs_f64();
    if let Some(e) = failed {
        return Err(e);
    }
    if args.json {
        let rate = plan.count as f64 / seconds;
        println!(
            "{}",
            serde_json::json!({"seconds": seconds, "requests": plan.count, "iops": rate, "bytes_per_s": rate * plan.size as f64,
                "queues": args.queues, "depth": plan.depth, "size": plan.size, "write": plan.write})
        );
    } else if !args.quiet {
        println!("Run completed in {seconds:.3} seconds.");
    }
    drop(disk);
    ctx.close();
    Ok(ExitCode::SUCCESS)
}

fn announce(p: &Plan) {
    let order = match p.order {
        Order::Step { offset, step } => format!("starting at offset {offset}, step size {step}"),
        Order::Random { seed } => format!("at random offsets, seed {seed}"),
    };
    println!(
        "Sending {} {} requests, {} bytes each, {} in parallel ({order})",
        p.count,
        if p.write { "write" } else { "read" },
        p.size,
        p.depth,
    );
    if p.flush_interval > 0 {
        println!(
            "Sending flush every {} {}requests",
            p.flush_interval,
            if p.drain { "" } else { "non-draining " }
        );
    }
}

/// Divides the requests among the queues: queue `i` sends requests `i, i + n, i + 2n, ...` of the sequence.
fn run_queues(disk: &Arc<Disk>, plan: Plan, queues: u32) -> Result<Option<Error>> {
    if queues == 1 {
        return Ok(run_queue(disk, plan, 0, 1).err());
    }
    let results: Vec<Result<()>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..u64::from(queues))
            .map(|i| scope.spawn(move || run_queue(disk, plan, i, u64::from(queues))))
            .collect();
        threads
            .into_iter()
            .map(|t| t.join().unwrap_or_else(|_| Err(Error::invalid("a benchmark thread panicked"))))
            .collect()
    });
    Ok(results.into_iter().find_map(std::result::Result::err))
}

fn run_queue(disk: &Arc<Disk>, p: Plan, first: u64, of: u64) -> Result<()> {
    let queue = Queue::new(disk, (p.depth as u32 + 1).min(QUEUE_DEPTH_MAX))?;
    let depth = p.depth.min(queue.room());
    let memory = Buffers::alloc(p.size * depth, 4096);
    memory.fill(p.pattern);
    let slots: Vec<Buffers> = (0..depth).map(|i| memory.slice(i * p.size, p.size)).collect();
    let mut free: Vec<usize> = (0..depth).collect();
    let count = (p.count + of - 1 - first) / of;
    let mut positions = Positions::new(p.order, p.size as u64, p.disk_size, first, of);
    let (mut sent, mut ended, mut since_flush) = (0, 0, 0);
    let mut flush_wanted = false;
    let mut flushing = false;
    let (mut reqs, mut cqes): (Vec<HostReq>, Vec<Cqe>) =
        (Vec::with_capacity(depth), Vec::with_capacity(depth + 1));
    while ended < count || flushing || flush_wanted {
        let idle = free.len() == depth;
        if flush_wanted && !flushing && (idle || !p.drain) {
            reqs.push(HostReq { user_data: FLUSH, op: HostOp::Io(Request::flush()) });
            (flush_wanted, flushing) = (false, true);
        }
        while sent < count && !(p.drain && (flush_wanted || flushing)) {
            let Some(slot) = free.pop() else { break };
            let data = slots[slot].clone();
            let at = positions.next();
            let mut req = if p.write { Request::write(at, data) } else { Request::read(at, data) };
            if p.fua {
                req = req.flags(Flags::FUA);
            }
            reqs.push(HostReq { user_data: slot as u64, op: HostOp::Io(req) });
            sent += 1;
            since_flush += 1;
            if p.flush_interval > 0 && since_flush == p.flush_interval {
                since_flush = 0;
                flush_wanted = true;
            }
        }
        queue.submit(&mut reqs);
        queue.reap(&mut cqes, depth + 1, 1, None);
        for c in cqes.drain(..) {
            if c.res < 0 {
                let e = crate::error::IoError::new(-c.res as i32, c.code);
                return Err(Error::io(e, "Failed request"));
            }
            if c.user_data == FLUSH {
                flushing = false;
            } else {
                ended += 1;
                free.push(c.user_data as usize);
            }
        }
    }
    Ok(())
}

const FLUSH: u64 = u64::MAX;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_share_the_steps_and_start_again_behind_the_end() {
        let order = Order::Step { offset: 8, step: 4 };
        let one: Vec<u64> = {
            let mut p = Positions::new(order, 4, 36, 0, 1);
            (0..12).map(|_| p.next()).collect()
        };
        assert_eq!(one, [8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20]);
        let (mut a, mut b) = (Positions::new(order, 4, 36, 0, 2), Positions::new(order, 4, 36, 1, 2));
        for pair in one.chunks(2) {
            assert_eq!([a.next(), b.next()], pair);
        }
        let mut whole = Positions::new(order, 36, 36, 0, 1);
        assert_eq!((whole.next(), whole.next()), (0, 0));
    }

    #[test]
    fn random_requests_reach_every_block_and_differ_between_seeds_and_queues() {
        let (size, disk_size) = (4096, 100 * 4096 + 5);
        let take = |seed, first| {
            let mut p = Positions::new(Order::Random { seed }, size, disk_size, first, 2);
            (0..2000).map(|_| p.next()).collect::<Vec<u64>>()
        };
        let all = take(1, 0);
        assert_eq!(all, take(1, 0), "the same seed");
        let blocks: std::collections::BTreeSet<u64> = all.iter().copied().collect();
        assert_eq!(blocks.len(), 100);
        assert!(blocks.iter().all(|at| at % size == 0 && at + size <= disk_size));
        for other in [take(2, 0), take(1, 1), take(0, 0)] {
            let same = all.iter().zip(&other).filter(|(a, b)| a == b).count();
            assert!(same < 100, "{same} of 2000, where 20 are to be expected");
        }
    }
}
