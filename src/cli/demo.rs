//! `cobweb demo`: the main job, measured against what the device can do.
//!
//! A disk of real data gets each of its 32 KiB blocks written once, in random order, eight at a time, four times over: alone; with the
//! granule reads that any copy-before-write must do, issued straight at the file (the best the device can do); with a backup
//! straight to a slow target; with a backup through a RAM cache. The rows run interleaved, in rounds, and medians are shown.
//! The last backup is finished and compared byte for byte with a copy of the disk taken at its instant.
//!
//! All files are unlinked: a demo that is killed leaves nothing behind.

use super::workload::{Latency, Random, Workload};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::graph::Disk;
use crate::job::Job;
use crate::options::{Options, parse_size};
use crate::queue::Queue;
use crate::sync::Arc;
use indicatif::{ProgressBar, ProgressStyle};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Arguments of `cobweb demo`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Size of the disk
    #[arg(long, default_value = "1G", value_parser = size_arg)]
    size: u64,
    /// Folder for the (unlinked) files; should be on the storage to be measured
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// Write speed of the backup target, bytes per second
    #[arg(long, default_value = "50M", value_parser = size_arg)]
    target_speed: u64,
    /// Capacity of the RAM cache
    #[arg(long, default_value = "1G", value_parser = size_arg)]
    ram_cache: u64,
    /// Granule of the copies
    #[arg(long, default_value = "64k", value_parser = size_arg)]
    granularity: u64,
    /// Rounds of which the median is shown
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=99))]
    rounds: u32,
    /// Also measure a second pass over granules that have been copied and drained
    #[arg(long)]
    second_pass: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn size_arg(text: &str) -> std::result::Result<u64, String> {
    parse_size(text).map_err(|e| e.to_string())
}

const BLOCK_LEN: u64 = 32 << 10;
const DEPTH: usize = 8;
/// A backup straight to a slow target is sampled, not run to its end.
const DIRECT_SAMPLE: Duration = Duration::from_secs(4);
const MIB: u64 = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Row {
    NoBackup,
    IoLimit,
    Backup,
    RamCache,
    SecondPass,
}

impl Row {
    const fn name(self) -> &'static str {
        match self {
            Row::NoBackup => "no-backup",
            Row::IoLimit => "io-limit",
            Row::Backup => "backup",
            Row::RamCache => "backup-ram-cache",
            Row::SecondPass => "second-pass",
        }
    }
}

#[derive(Debug)]
struct RowResult {
    row: Row,
    iops: Vec<f64>,
    latency: Vec<Latency>,
}

/// Runs the demo; exit code 1 if the finished backup differs from the instant.
pub(super) fn run(args: &Args) -> Result<ExitCode> {
    if args.size < BLOCK_LEN {
        return Err(Error::invalid("--size must be at least 32k"));
    }
    if args.target_speed == 0 {
        return Err(Error::invalid("--target-speed must be above 0"));
    }
    let mut demo = Demo::new(args)?;
    let mut rows = vec![Row::NoBackup, Row::IoLimit, Row::Backup, Row::RamCache];
    if args.second_pass {
        rows.push(Row::SecondPass);
    }
    let mut results: Vec<RowResult> =
        rows.iter().map(|r| RowResult { row: *r, iops: vec![], latency: vec![] }).collect();
    let mut verdict = None;
    for round in 0..args.rounds {
        // The row that finishes its backup comes last of all.
        for result in &mut results {
            if result.row == Row::RamCache && args.second_pass {
                continue;
            }
            let last = round + 1 == args.rounds && result.row == Row::RamCache;
            demo.measure(result, round, last, &mut verdict)?;
        }
        if args.second_pass {
            let last = round + 1 == args.rounds;
            let at = rows.iter().position(|r| *r == Row::RamCache).unwrap_or(0);
            demo.measure(&mut results[at], round, last, &mut verdict)?;
        }
    }
    demo.bar.finish_and_clear();
    let (verified, differing) = verdict.unwrap_or((false, 0));
    report(args, &results, verified, differing);
    demo.close()?;
    Ok(if verified && differing == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

struct Demo<'a> {
    args: &'a Args,
    ctx: Arc<Context>,
    source: File,
    /// One target for all rounds, its space allocated: freeing and allocating space beside the measurement would be measured with it.
    target: File,
    disk: Arc<Disk>,
    direct: bool,
    bar: ProgressBar,
    stamp: u64,
}

impl<'a> Demo<'a> {
    fn new(args: &'a Args) -> Result<Self> {
        let bar = if args.json { ProgressBar::hidden() } else { ProgressBar::new(1000) };
        if let Ok(style) = ProgressStyle::with_template("{msg:32} [{bar:40}] {elapsed}") {
            bar.set_style(style.progress_chars("=> "));
        }
        let ctx = Context::with_defaults()?;
        let source = unlinked_file(&args.dir, args.size)?;
        bar.set_message("making a disk of real data");
        fill(&source, args.size, &bar)?;
        let target = unlinked_file(&args.dir, args.size)?;
        fill(&target, args.size, &bar)?;
        let direct = supports_direct(&source);
        if !direct && !args.json {
            eprintln!(
                "cobweb: {} does not support O_DIRECT; measuring through the page cache",
                args.dir.display()
            );
        }
        let node = ctx.graph().open(file_options("source", &source, direct, None)?)?;
        let disk = ctx.graph().add_disk("vda")?;
        ctx.graph().insert(&disk, Some(node))?;
        Ok(Self { args, ctx, source, target, disk, direct, bar, stamp: 0 })
    }

    fn measure(
        &mut self,
        result: &mut RowResult,
        round: u32,
        last: bool,
        verdict: &mut Option<(bool, u64)>,
    ) -> Result<()> {
        let args = self.args;
        let row = result.row;
        self.bar.set_message(format!("{} ({}/{})", row.name(), round + 1, args.rounds));
        let golden = if last { Some(self.copy_of_source()?) } else { None };
        let backup = match row {
            Row::NoBackup | Row::IoLimit => None,
            Row::Backup => Some(self.start_backup(None)?),
            Row::RamCache | Row::SecondPass => Some(self.start_backup(Some(args.ram_cache))?),
        };
        let queue = Queue::new(&self.disk, DEPTH as u32)?;
        if row == Row::SecondPass {
            self.write_all(&queue, None, None)?;
            if let Some((job, _)) = &backup {
                wait_drained(&self.ctx, job)?;
            }
        }
        let limit = (row == Row::Backup).then_some(DIRECT_SAMPLE);
        let read_first = (row == Row::IoLimit).then_some(args.granularity);
        let mut measured = self.write_all(&queue, limit, read_first)?;
        result.iops.push(measured.iops());
        result.latency.push(measured.latency());
        drop(queue);
        if let Some((job, target)) = backup {
            match golden {
                Some(golden) => *verdict = Some(self.finish_backup(&job, &target, &golden)?),
                None => {
                    job.cancel()?;
                    job.wait(None)?;
                }
            }
            job.dismiss()?;
            drop(job);
            let node = self.ctx.graph().node("target")?;
            self.ctx.graph().forget_node(&node)?;
        }
        Ok(())
    }

    fn write_all(
        &mut self,
        queue: &Queue,
        limit: Option<Duration>,
        read_first: Option<u64>,
    ) -> Result<super::workload::Measured> {
        self.stamp += 1;
        let bar = self.bar.clone();
        Workload {
            disk_len: self.args.size,
            block_len: BLOCK_LEN,
            depth: DEPTH,
            stamp: self.stamp,
            limit,
            read_first,
        }
        .run(queue, |share| bar.set_position((share * 1000.0) as u64))
    }

    /// A backup that copies nothing by itself yet: what is measured is the cost of copy-before-write.
    fn start_backup(&self, ram_cache: Option<u64>) -> Result<(Arc<Job>, File)> {
        let target = self.target.try_clone().map_err(|e| Error::os(e, "cannot use the target file"))?;
        self.ctx.graph().open(file_options("target", &target, self.direct, Some(self.args.target_speed))?)?;
        let mut text = format!(
            "device=vda,target=target,job-id=backup,sync=full,auto-dismiss=off,granularity={}",
            self.args.granularity
        );
        if let Some(capacity) = ram_cache {
            text.push_str(&format!(",ram-cache.capacity={capacity}"));
        }
        // Paused before it starts: not one background copy is in the measurement.
        let mut group = self.ctx.jobs().group(Options::empty())?;
        let job = group.add("backup", Options::parse(&text)?)?;
        job.pause()?;
        group.start()?;
        Ok((job, target))
    }

    fn finish_backup(&self, job: &Arc<Job>, target: &File, golden: &File) -> Result<(bool, u64)> {
        job.resume()?;
        while !job.wait(Some(Duration::from_millis(100)))? {
            let info = job.query();
            self.bar.set_message("finishing the backup");
            self.bar.set_position(1000 * info.current / info.total.max(1));
        }
        let info = job.query();
        if info.err != 0 {
            let text = format!("the backup failed: {}", job.error_text().unwrap_or_default());
            return Err(Error::new(info.err, crate::error::Code::Incomplete, text));
        }
        self.bar.set_message("comparing with the instant");
        Ok((true, differing_bytes(target, golden, self.args.size, &self.bar)?))
    }

    fn copy_of_source(&self) -> Result<File> {
        self.bar.set_message("keeping a copy of the instant");
        let copy = unlinked_file(&self.args.dir, self.args.size)?;
        let mut buf = vec![0; MIB as usize];
        for at in (0..self.args.size).step_by(MIB as usize) {
            let n = MIB.min(self.args.size - at) as usize;
            self.disk.read(at, &mut buf[..n])?;
            copy.write_all_at(&buf[..n], at)
                .map_err(|e| Error::os(e, "cannot write the copy of the instant"))?;
        }
        Ok(copy)
    }

    fn close(self) -> Result<()> {
        drop(self.disk);
        drop(self.source);
        self.ctx.close();
        Ok(())
    }
}

/// Options of a node over an open file; throttled for a target.
fn file_options(name: &str, file: &File, direct: bool, write_speed: Option<u64>) -> Result<Options> {
    let cache = if direct { "on" } else { "off" };
    let fd = file.as_raw_fd();
    match write_speed {
        None => Options::parse(&format!(
            "driver=raw,node-name={name},file.driver=file,file.fd={fd},file.cache.direct={cache},file.locking=off"
        )),
        Some(speed) => Options::parse(&format!(
            "driver=raw,node-name={name},file.driver=throttle,file.limits.bps-write={speed},\
             file.file.driver=file,file.file.fd={fd},file.file.cache.direct={cache},file.file.locking=off"
        )),
    }
}

/// A file of `size` bytes without a name.
fn unlinked_file(dir: &Path, size: u64) -> Result<File> {
    let at = |e| Error::os(e, format!("cannot make a temporary file in '{}'", dir.display()));
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_TMPFILE | libc::O_CLOEXEC)
        .open(dir)
        .map_err(at)?;
    file.set_len(size).map_err(at)?;
    Ok(file)
}

/// Whether the file's storage takes O_DIRECT, asked by opening it again that way.
fn supports_direct(file: &File) -> bool {
    std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(format!("/proc/self/fd/{}", file.as_raw_fd()))
        .is_ok()
}

/// Fills the disk: every eighth MiB is zero, the rest does not compress.
fn fill(file: &File, size: u64, bar: &ProgressBar) -> Result<()> {
    let mut random = Random::new(size);
    let mut buf = vec![0; MIB as usize];
    for at in (0..size).step_by(MIB as usize) {
        let n = MIB.min(size - at) as usize;
        if (at / MIB) % 8 == 7 {
            buf[..n].fill(0);
        } else {
            random.fill(&mut buf[..n]);
        }
        file.write_all_at(&buf[..n], at).map_err(|e| Error::os(e, "cannot write the disk's data"))?;
        bar.set_position(1000 * at / size);
    }
    file.sync_all().map_err(|e| Error::os(e, "cannot flush the disk's data"))
}

/// Number of bytes in which the two files differ.
fn differing_bytes(a: &File, b: &File, size: u64, bar: &ProgressBar) -> Result<u64> {
    let (mut x, mut y) = (vec![0; MIB as usize], vec![0; MIB as usize]);
    let mut differing = 0;
    for at in (0..size).step_by(MIB as usize) {
        let n = MIB.min(size - at) as usize;
        for (file, buf) in [(a, &mut x), (b, &mut y)] {
            file.read_exact_at(&mut buf[..n], at)
                .map_err(|e| Error::os(e, "cannot read a file to compare"))?;
        }
        if x[..n] != y[..n] {
            differing += x[..n].iter().zip(&y[..n]).filter(|(p, q)| p != q).count() as u64;
        }
        bar.set_position(1000 * at / size);
    }
    Ok(differing)
}

/// Waits until the backup's cache is empty.
fn wait_drained(ctx: &Context, job: &Job) -> Result<()> {
    let begun = Instant::now();
    loop {
        let used = ctx.stats(job.id()).map_or(0, |s| s.cache_used);
        if used == 0 {
            return Ok(());
        }
        if begun.elapsed() > Duration::from_secs(600) {
            return Err(Error::new(
                libc::ETIMEDOUT,
                crate::error::Code::Io,
                "the cache did not drain in 10 minutes",
            ));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn median(mut v: Vec<f64>) -> f64 {
    v.sort_by(f64::total_cmp);
    match v.len() {
        0 => 0.0,
        n if n % 2 == 1 => v[n / 2],
        n => (v[n / 2 - 1] + v[n / 2]) / 2.0,
    }
}

/// Highest resident size of this process so far, in bytes.
fn rss_peak_bytes() -> u64 {
    std::fs::read_to_string("/proc/self/status")
        .ok()
        .and_then(|s| {
            s.lines().find_map(|l| l.strip_prefix("VmHWM:")?.split_whitespace().next()?.parse::<u64>().ok())
        })
        .map_or(0, |kib| kib << 10)
}

fn report(args: &Args, results: &[RowResult], verified: bool, differing: u64) {
    let base = results.iter().find(|r| r.row == Row::NoBackup).map_or(0.0, |r| median(r.iops.clone()));
    let lines: Vec<_> = results
        .iter()
        .map(|r| {
            let of = |f: fn(&Latency) -> f64| median(r.latency.iter().map(f).collect());
            let l =
                Latency { mean: of(|l| l.mean), p50: of(|l| l.p50), p99: of(|l| l.p99), max: of(|l| l.max) };
            let iops = median(r.iops.clone());
            (r.row, iops, l, if base > 0.0 { iops / base } else { 0.0 })
        })
        .collect();
    if args.json {
        let rows: Vec<_> = lines
            .iter()
            .map(|(row, iops, l, ratio)| {
                serde_json::json!({"name": row.name(), "iops": iops, "ratio": ratio,
                    "latency_us": {"mean": l.mean, "p50": l.p50, "p99": l.p99, "max": l.max}})
            })
            .collect();
        println!(
            "{}",
            serde_json::json!({"rows": rows, "verified": verified && differing == 0, "differing_bytes": differing,
                "rss_peak_bytes": rss_peak_bytes()})
        );
        return;
    }
    println!(
        "{} MiB, 32 KiB random writes, {DEPTH} in flight, target {:.0} MB/s, medians of {} rounds",
        args.size / MIB,
        args.target_speed as f64 / 1e6,
        args.rounds
    );
    println!(
        "{:18} {:>9} {:>9} {:>9} {:>9} {:>9} {:>7}",
        "", "IOPS", "mean us", "p50 us", "p99 us", "max us", "ratio"
    );
    for (row, iops, l, ratio) in &lines {
        println!(
            "{:18} {iops:9.0} {:9.0} {:9.0} {:9.0} {:9.0} {ratio:7.2}",
            row.name(),
            l.mean,
            l.p50,
            l.p99,
            l.max
        );
    }
    println!("peak RSS {} MiB", rss_peak_bytes() / MIB);
    if verified && differing == 0 {
        println!("backup finished; every byte equals the disk as it was at the instant");
    } else {
        println!("BACKUP DIFFERS from the instant in {differing} bytes");
    }
}
