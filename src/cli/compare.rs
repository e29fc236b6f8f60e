//! `cobweb compare`: whether two images read the same.
//!
//! Both are read at once, several pieces ahead; what both say is zero is not read. Only the first difference is told, so pieces are looked at in order.

use super::getopt::Long;
use super::image::{Image, ImageFlags, SECTOR, cache_mode, error_text};
use super::map::entry_at;
use super::tool::{Ended, Step, Tool};
use crate::error::{IoError, IoResult};
use crate::queue::{Cqe, HostOp, HostReq, Queue};
use crate::request::{Buffers, Request};
use crate::units::ByteRange;
use std::collections::VecDeque;
use std::process::ExitCode;

const HELP: &str = "Usage: cobweb compare [--image-opts | [-f FMT] [-F FMT]] [-s] [-T CACHE] [-p] [-q] [-U] FILE1 FILE2

Tells whether two images read the same. Exit code 0: they do; 1: they do not; 2: one cannot be opened; 3: what is allocated cannot be
told; 4: one cannot be read.

  -f, --a-format FMT   format of FILE1
  -F, --b-format FMT   format of FILE2
      --image-opts     the files are option text
  -s, --strict         different lengths are a difference, even if the rest is zeros; so is what is allocated
  -T, --cache MODE     cache mode of both files
  -p, --progress       show how far it is
  -q, --quiet          print nothing but errors
  -U, --force-share    open the images although others write them";

const LONG: &[Long] = &[
    ("help", false, 'h'),
    ("a-format", true, 'f'),
    ("b-format", true, 'F'),
    ("image-opts", false, 'I'),
    ("strict", false, 's'),
    ("cache", true, 'T'),
    ("progress", false, 'p'),
    ("quiet", false, 'q'),
    ("force-share", false, 'U'),
    ("object", true, 'O'),
];

/// Bytes of a piece.
const PIECE: u64 = 1 << 20;
/// Pieces that are read ahead.
const AHEAD: usize = 8;

#[derive(Debug, Default)]
struct Flags {
    formats: [Option<String>; 2],
    image_opts: bool,
    strict: bool,
    cache: Option<String>,
    progress: bool,
    quiet: bool,
    force_share: bool,
}

/// Why the comparison ended early.
enum Stop {
    /// The images differ at this offset.
    Differ(u64),
    /// One image has there what the other has not, though it reads the same.
    Unlike(u64),
    /// Status of this image (0 or 1) at this offset.
    Status(usize, u64, IoError),
    /// Read of this image at this offset.
    Read(usize, u64, IoError),
}

/// A part of the disk: where, and which of the images have to be read for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    range: ByteRange,
    read: [bool; 2],
}

/// Runs `cobweb compare`.
pub(super) fn run(words: &[String]) -> ExitCode {
    compare(words).unwrap_or_else(|Ended(code)| code)
}

fn compare(words: &[String]) -> Step<ExitCode> {
    let tool = Tool::new("compare", 2, HELP);
    let mut flags = Flags::default();
    let files = tool.words(words, "hf:F:T:pqsU", LONG, |tool, letter, value| {
        match letter {
            'f' => flags.formats[0] = Some(value),
            'F' => flags.formats[1] = Some(value),
            'I' => flags.image_opts = true,
            's' => flags.strict = true,
            'T' => flags.cache = Some(value),
            'p' => flags.progress = true,
            'q' => flags.quiet = true,
            'U' => flags.force_share = true,
            'O' => tool.object(&value)?,
            _ => {}
        }
        Ok(())
    })?;
    let [a, b] = files.as_slice() else { return Err(tool.usage_error("Expecting two image file names")) };
    if let Some(cache) = &flags.cache
        && cache_mode(cache).is_err()
    {
        return Err(tool.error(&format!("Invalid source cache option: {cache}")));
    }
    for format in &flags.formats {
        tool.check_format(flags.image_opts, format.as_deref())?;
    }
    let ctx = tool.context()?;
    let open = |name: &str, format: Option<&str>| {
        let flags = ImageFlags {
            format,
            cache: flags.cache.as_deref(),
            image_opts: flags.image_opts,
            force_share: flags.force_share,
            read_only: true,
            ..Default::default()
        };
        tool.open(&ctx, name, &flags)
    };
    let images = [open(a, flags.formats[0].as_deref())?, open(b, flags.formats[1].as_deref())?];
    let code = work(&tool, &flags, &images)?;
    for image in images {
        image.close().map_err(|e| tool.error(&error_text(&e, "")))?;
    }
    ctx.close();
    Ok(code)
}

fn work(tool: &Tool, flags: &Flags, images: &[Image; 2]) -> Step<ExitCode> {
    let say = |text: &str| {
        if !flags.quiet {
            println!("{text}");
        }
    };
    let sizes = [images[0].size(), images[1].size()];
    if flags.strict && sizes[0] != sizes[1] {
        say("Strict mode: Image size mismatch!");
        return Ok(ExitCode::FAILURE);
    }
    let (common, all) = (sizes[0].min(sizes[1]), sizes[0].max(sizes[1]));
    let mut progress = Progress { on: flags.progress && !flags.quiet, all, shown: None };
    progress.show(0);
    let other = if flags.strict { other_status(images, common) } else { Ok(None) };
    let mut result = other.and_then(|other| {
        // Of a difference in content and one in status, the first one is told.
        compare_range(images, 0, other.unwrap_or(common), sizes, &mut progress)?;
        other.map_or(Ok(()), |at| Err(Stop::Unlike(at)))
    });
    if result.is_ok() && sizes[0] != sizes[1] {
        say("Warning: Image size mismatch!");
        result = compare_range(images, common, all, sizes, &mut progress);
    }
    let name = |n: usize| images[n].spec.name.as_str();
    match result {
        Ok(()) => {
            progress.show(all.max(1));
            say("Images are identical.");
            Ok(ExitCode::SUCCESS)
        }
        Err(Stop::Differ(at)) => {
            say(&format!("Content mismatch at offset {at}!"));
            Ok(ExitCode::FAILURE)
        }
        Err(Stop::Unlike(at)) => {
            say(&format!("Strict mode: Offset {at} block status mismatch!"));
            Ok(ExitCode::FAILURE)
        }
        Err(Stop::Status(n, at, e)) => {
            let _ =
                tool.error(&format!("Error while reading the block status of '{}' at {at}: {e}", name(n)));
            Ok(ExitCode::from(3))
        }
        Err(Stop::Read(n, at, e)) => {
            let _ = tool.error(&format!("Error while reading offset {at} of {}: {e}", name(n)));
            Ok(ExitCode::from(4))
        }
    }
}

/// Where the status of two images of `size` bytes differs first.
fn other_status(images: &[Image; 2], size: u64) -> Result<Option<u64>, Stop> {
    let mut at = 0;
    while at < size {
        let range = ByteRange { offset: at, len: size - at };
        let entry = |n: usize| entry_at(&images[n], range).map_err(|e| Stop::Status(n, at, e));
        let (a, b) = (entry(0)?, entry(1)?);
        if a.state(size) != b.state(size) {
            return Ok(Some(at));
        }
        at += a.len.min(b.len);
    }
    Ok(None)
}

/// Compares from `from` to `to`; an image that is shorter counts as zeros there.
fn compare_range(
    images: &[Image; 2],
    from: u64,
    to: u64,
    sizes: [u64; 2],
    progress: &mut Progress,
) -> Result<(), Stop> {
    let mut readers = Vec::new();
    for (n, image) in images.iter().enumerate() {
        readers.push(Reader::new(image, sizes[n]).map_err(|e| Stop::Read(n, from, e))?);
    }
    let mut plan = Plan { images, at: from, end: to, sizes, zero_until: [from; 2], data_until: [from; 2] };
    let mut ahead: VecDeque<Piece> = VecDeque::new();
    loop {
        while ahead.len() < AHEAD {
            let Some(piece) = plan.next()? else { break };
            for (reader, read) in readers.iter_mut().zip(piece.read) {
                reader.begin(piece.range, read);
            }
            ahead.push_back(piece);
        }
        let Some(piece) = ahead.pop_front() else { return Ok(()) };
        let mut data = Vec::new();
        for (n, reader) in readers.iter_mut().enumerate() {
            data.push(reader.end().map_err(|e| Stop::Read(n, piece.range.offset, e))?);
        }
        if let Some(at) = first_difference(&data[0], &data[1]) {
            return Err(Stop::Differ(piece.range.offset + at as u64));
        }
        progress.show(piece.range.end());
    }
}

/// Offset of the first sector that differs. No data on one side stands for zeros.
fn first_difference(a: &[u8], b: &[u8]) -> Option<usize> {
    let sector = SECTOR as usize;
    let sectors = |d: &[u8]| d.chunks(sector).position(|s| s.iter().any(|b| *b != 0));
    let found = match (a.is_empty(), b.is_empty()) {
        (true, true) => None,
        (true, false) => sectors(b),
        (false, true) => sectors(a),
        (false, false) if a == b => None,
        (false, false) => a.chunks(sector).zip(b.chunks(sector)).position(|(a, b)| a != b),
    };
    found.map(|n| n * sector)
}

/// Cuts a range into pieces, leaving out what reads as zeros on both sides.
struct Plan<'a> {
    images: &'a [Image; 2],
    at: u64,
    end: u64,
    sizes: [u64; 2],
    /// Up to here the image is known to read as zeros, or as data; whichever is larger holds from `at` on.
    zero_until: [u64; 2],
    data_until: [u64; 2],
}

impl Plan<'_> {
    fn next(&mut self) -> Result<Option<Piece>, Stop> {
        while self.at < self.end {
            let mut end = self.end;
            let mut zero = [false; 2];
            for (n, zero) in zero.iter_mut().enumerate() {
                let until = self.known(n)?;
                *zero = until == self.zero_until[n] && self.zero_until[n] > self.data_until[n];
                end = end.min(until);
            }
            if zero[0] && zero[1] {
                self.at = end;
                continue;
            }
            let end = end.min(self.at + PIECE);
            let range = ByteRange { offset: self.at, len: end - self.at };
            self.at = end;
            return Ok(Some(Piece { range, read: [!zero[0], !zero[1]] }));
        }
        Ok(None)
    }

    /// How far the status of image `n` is known, asking for it if it is not known at all.
    fn known(&mut self, n: usize) -> Result<u64, Stop> {
        let until = self.zero_until[n].max(self.data_until[n]);
        if until > self.at {
            return Ok(until);
        }
        let disk = &self.images[n].disk;
        let size = disk.size();
        if self.at >= size {
            // Past the end, or between the end of a raw file and that of its last sector.
            self.zero_until[n] = if self.at < self.sizes[n] { self.sizes[n] } else { self.end };
            return Ok(self.zero_until[n]);
        }
        let range = ByteRange { offset: self.at, len: size.min(self.end) - self.at };
        let extent = disk
            .env()
            .block_on(|cx| async move { disk.status(&cx, range).await })
            .unwrap_or_else(|e| Err(e.as_io()))
            .map_err(|e| Stop::Status(n, self.at, e))?;
        let until = self.at + extent.len;
        if extent.is_zero() {
            self.zero_until[n] = until;
        } else {
            // A hole may begin in the middle of a sector, but sectors are compared.
            self.data_until[n] = until.next_multiple_of(SECTOR).min(self.sizes[n]);
        }
        Ok(self.zero_until[n].max(self.data_until[n]))
    }
}

/// Reads pieces of one image in order, several at once.
struct Reader {
    queue: Queue,
    size: u64,
    next: u64,
    /// Number, memory (none: not read), whether it has ended.
    running: VecDeque<(u64, Option<Buffers>, Option<IoResult>)>,
}

impl Reader {
    fn new(image: &Image, _size: u64) -> IoResult<Self> {
        let queue = Queue::new(&image.disk, AHEAD as u32 * 2).map_err(|e| e.as_io())?;
        Ok(Self { queue, size: image.disk.size(), next: 0, running: VecDeque::new() })
    }

    fn begin(&mut self, range: ByteRange, read: bool) {
        let id = self.next;
        self.next += 1;
        if !read {
            self.running.push_back((id, None, Some(Ok(()))));
            return;
        }
        let data = Buffers::alloc(range.len as usize, 4096);
        let inside = self.size.saturating_sub(range.offset).min(range.len);
        if inside == 0 {
            self.running.push_back((id, Some(data), Some(Ok(()))));
            return;
        }
        let request = Request::read(range.offset, data.slice(0, inside as usize));
        self.queue.submit(&mut vec![HostReq { user_data: id, op: HostOp::Io(request) }]);
        self.running.push_back((id, Some(data), None));
    }

    /// Waits for the oldest piece.
    fn end(&mut self) -> IoResult<Vec<u8>> {
        loop {
            match self.running.pop_front() {
                None => return Ok(Vec::new()),
                Some((_, data, Some(result))) => {
                    result?;
                    return Ok(data.map(|d| d.to_vec()).unwrap_or_default());
                }
                Some(running) => self.running.push_front(running),
            }
            let mut ended: Vec<Cqe> = Vec::new();
            self.queue.reap(&mut ended, AHEAD * 2, 1, None);
            for cqe in ended {
                let result = if cqe.res < 0 { Err(IoError::new(-cqe.res as i32, cqe.code)) } else { Ok(()) };
                if let Some(r) = self.running.iter_mut().find(|r| r.0 == cqe.user_data) {
                    r.2 = Some(result);
                }
            }
        }
    }
}

/// The line of `-p`.
struct Progress {
    on: bool,
    all: u64,
    shown: Option<u64>,
}

impl Progress {
    /// Shows how far it is, in hundredths of a percent, when at least two percent have been added.
    fn show(&mut self, done: u64) {
        if !self.on {
            return;
        }
        let part = (u128::from(done) * 10_000 / u128::from(self.all.max(1))).min(10_000) as u64;
        if self.shown.is_none_or(|shown| part >= shown + 200 || (part == 10_000 && shown != part)) {
            use std::io::Write;
            let mut out = std::io::stdout();
            let _ = write!(out, "    ({}.{:02}/100%)\r", part / 100, part % 100).and_then(|()| out.flush());
            self.shown = Some(part);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_told_by_sector_and_absent_data_is_zero() {
        let mut a = vec![0u8; 4096];
        assert_eq!(first_difference(&a, &[]), None);
        assert_eq!(first_difference(&[], &[]), None);
        a[1500] = 1;
        assert_eq!(first_difference(&a, &[]), Some(1024));
        assert_eq!(first_difference(&[], &a), Some(1024));
        assert_eq!(first_difference(&a, &vec![0; 4096]), Some(1024));
        assert_eq!(first_difference(&a, &a), None);
    }
}
