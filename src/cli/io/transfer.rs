//! read, readv, write, writev, flush, discard: one request, waited for, figures printed.

use super::super::image::errno_text;
use super::super::probe::{PROBE_LEN, format_of};
use super::image::OpenImage;
use super::report::{Figures, dump};
use super::session::{Failed, Outcome, Session, Words, pattern};
use crate::error::{IoError, IoResult};
use crate::limits::REQUEST_LEN_MAX;
use crate::request::{Buffers, Flags, Op, Request};
use crate::units::ByteRange;
use std::io::Read;
use std::time::Instant;

/// Longest transfer of one command: what QEMU's requests can be.
pub(super) const TRANSFER_MAX: u64 = 2_147_483_136;
/// What is written if the user names nothing.
const DEFAULT_BYTE: u8 = 0xcd;
/// Where misaligned memory starts.
const MISALIGNMENT: usize = 16;

/// What of a read is compared.
struct Check {
    byte: u8,
    from: usize,
    len: usize,
}

impl Session {
    pub(super) fn buffers(&self, len: u64) -> Buffers {
        if self.misalign {
            Buffers::alloc(len as usize + MISALIGNMENT, 4096).slice(MISALIGNMENT, len as usize)
        } else {
            Buffers::alloc(len as usize, 4096)
        }
    }

    /// Offset and length of a command with exactly these two operands.
    fn range(&mut self, words: &Words, usage: &str) -> std::result::Result<ByteRange, Failed> {
        let [offset, len] = words.operands.as_slice() else { return Err(self.refuse(usage)) };
        Ok(ByteRange { offset: self.size(offset)?, len: self.size(len)? })
    }

    /// Offset and lengths of a command with several buffers.
    pub(super) fn lengths(
        &mut self,
        words: &Words,
        usage: &str,
    ) -> std::result::Result<(u64, Vec<u64>), Failed> {
        let [offset, lens @ ..] = words.operands.as_slice() else { return Err(self.refuse(usage)) };
        if lens.is_empty() {
            return Err(self.refuse(usage));
        }
        let offset = self.size(offset)?;
        let (mut out, mut total) = (Vec::new(), 0u64);
        for word in lens {
            let len = self.size(word)?;
            if len > TRANSFER_MAX {
                return Err(self.refuse(&format!("Argument '{word}' exceeds maximum size {TRANSFER_MAX}")));
            }
            if len > TRANSFER_MAX - total {
                return Err(
                    self.refuse(&format!("The total number of bytes exceed the maximum size {TRANSFER_MAX}"))
                );
            }
            total += len;
            out.push(len);
        }
        Ok((offset, out))
    }

    pub(super) fn read(&mut self, words: &Words, usage: &str) -> Outcome {
        let range = self.range(words, usage)?;
        if range.len > TRANSFER_MAX {
            let word = words.operands[1].clone();
            return Err(self.refuse(&format!("length cannot exceed {TRANSFER_MAX}, given {word}")));
        }
        let byte = words.value('P').and_then(pattern);
        if byte.is_none() && (words.has('s') || words.has('l')) {
            return Err(self.refuse(usage));
        }
        let from = words.value('s').map_or(Ok(0), |w| self.size(w))?;
        let len = words.value('l').map_or(Ok(range.len.saturating_sub(from)), |w| self.size(w))?;
        if from.checked_add(len).is_none_or(|end| end > range.len) {
            return Err(self.refuse("pattern verification range exceeds end of read data"));
        }
        if words.has('b') {
            self.check_sectors(range)?;
        }
        let check = byte.map(|byte| Check { byte, from: from as usize, len: len as usize });
        self.do_read("read", range, words, check)
    }

    pub(super) fn readv(&mut self, words: &Words, usage: &str) -> Outcome {
        let (offset, lens) = self.lengths(words, usage)?;
        let len: u64 = lens.iter().sum();
        let check = words.value('P').and_then(pattern).map(|byte| Check { byte, from: 0, len: len as usize });
        self.do_read("readv", ByteRange { offset, len }, words, check)
    }

    fn do_read(
        &mut self,
        name: &'static str,
        range: ByteRange,
        words: &Words,
        check: Option<Check>,
    ) -> Outcome {
        let data = self.buffers(range.len);
        let Some(open) = &self.image else { return Err(Failed) };
        let start = Instant::now();
        let result = if words.has('b') {
            open.vmstate(Request::read(range.offset, data.clone()))
        } else {
            open.read(range.offset, &data)
        };
        let time = start.elapsed();
        if let Err(e) = result {
            return Err(self.refuse(&failed(name, e)));
        }
        let mut outcome = Ok(());
        if let Some(check) = check
            && !is_filled(&data.slice(check.from, check.len), check.byte)
        {
            let at = range.offset + check.from as u64;
            outcome =
                Err(self.refuse(&format!("Pattern verification failed at offset {at}, {} bytes", check.len)));
        }
        if words.has('q') {
            return outcome;
        }
        if words.has('v') && !data.is_empty() {
            self.out.line(&dump(range.offset, &data.to_vec()));
        }
        self.figures("read", range, time, words.has('C'));
        outcome
    }

    pub(super) fn write(&mut self, words: &Words, usage: &str) -> Outcome {
        if words.operands.len() != 2 {
            return Err(self.refuse(usage));
        }
        let has = |letter| words.has(letter);
        let conflict = if has('b') && has('z') {
            Some("-b and -z cannot be specified at the same time")
        } else if has('f') && (has('b') || has('c')) {
            Some("-f and -b or -c cannot be specified at the same time")
        } else if has('n') && !has('z') {
            Some("-n requires -z to be specified")
        } else if has('u') && !has('z') {
            Some("-u requires -z to be specified")
        } else if ['z', 'P', 's'].iter().filter(|l| has(**l)).count() > 1 {
            Some("Only one of -z, -P, and -s can be specified at the same time")
        } else {
            None
        };
        if let Some(text) = conflict {
            return Err(self.refuse(text));
        }
        let range = self.range(words, usage)?;
        if range.len > TRANSFER_MAX && !has('n') {
            let word = words.operands[1].clone();
            return Err(self.refuse(&format!("length cannot exceed {TRANSFER_MAX} without -n, given {word}")));
        }
        if has('b') || has('c') {
            self.check_sectors(range)?;
        }
        if has('r') && has('z') {
            return Err(self.refuse("cannot combine zero write with registered I/O buffer"));
        }
        let request = if has('z') {
            Request::write_zeroes(range, zero_flags(words))
        } else {
            let data = self.buffers(range.len);
            match words.value('s') {
                Some(path) => fill_from_file(&data, path)?,
                None => data.fill(words.value('P').and_then(pattern).unwrap_or(DEFAULT_BYTE)),
            }
            Request::write(range.offset, data)
        };
        self.do_write("write", request, words)
    }

    pub(super) fn writev(&mut self, words: &Words, usage: &str) -> Outcome {
        let (offset, lens) = self.lengths(words, usage)?;
        let data = self.buffers(lens.iter().sum());
        data.fill(words.value('P').and_then(pattern).unwrap_or(DEFAULT_BYTE));
        self.do_write("writev", Request::write(offset, data), words)
    }

    fn do_write(&mut self, name: &'static str, mut request: Request, words: &Words) -> Outcome {
        let Some(open) = &self.image else { return Err(Failed) };
        if words.has('f') || open.write_through {
            request.flags |= Flags::FUA;
        }
        let range = request.range;
        let start = Instant::now();
        let result = if words.has('b') {
            open.vmstate(request)
        } else if words.has('c') && request.op == Op::Write {
            open.write_compressed(request)
        } else {
            open.guard(&request).and_then(|()| open.run(request))
        };
        let time = start.elapsed();
        if let Err(e) = result {
            return Err(self.refuse(&failed(name, e)));
        }
        if !words.has('q') {
            self.figures("wrote", range, time, words.has('C'));
        }
        Ok(())
    }

    pub(super) fn discard(&mut self, words: &Words, usage: &str) -> Outcome {
        let range = self.range(words, usage)?;
        if range.len > TRANSFER_MAX {
            let word = words.operands[1].clone();
            return Err(self.refuse(&format!("length cannot exceed {TRANSFER_MAX}, given {word}")));
        }
        let Some(open) = &self.image else { return Err(Failed) };
        let start = Instant::now();
        let result = open.run(Request::discard(range));
        let time = start.elapsed();
        if let Err(e) = result {
            return Err(self.refuse(&failed("discard", e)));
        }
        if !words.has('q') {
            self.figures("discard", range, time, words.has('C'));
        }
        Ok(())
    }

    pub(super) fn flush(&mut self) -> Outcome {
        let Some(open) = &self.image else { return Err(Failed) };
        match open.run(Request::flush()) {
            Ok(()) => Ok(()),
            Err(e) => Err(self.complain(&format!("flush failed: {}", errno_text(e.errno)))),
        }
    }

    fn figures(&mut self, verb: &'static str, range: ByteRange, time: std::time::Duration, machine: bool) {
        let figures = Figures { verb, offset: range.offset, len: range.len, time };
        self.out.line(&figures.text(machine));
    }

    fn check_sectors(&mut self, range: ByteRange) -> Outcome {
        for (value, what) in [(range.offset, "offset"), (range.len, "count")] {
            if value % 512 != 0 {
                return Err(self.refuse(&format!("{value} is not a sector-aligned value for '{what}'")));
            }
        }
        Ok(())
    }
}

impl OpenImage {
    /// Runs a request to its end.
    pub(super) fn run(&self, request: Request) -> IoResult {
        let disk = &self.image.disk;
        let pieces = pieces(request);
        let all = disk.env().block_on(|cx| async move {
            for piece in pieces {
                disk.run(&cx, piece).await?;
            }
            Ok(())
        });
        all.unwrap_or_else(|e| Err(e.as_io()))
    }

    /// Reads; what lies between the end of a raw file and that of its last sector is zeros.
    pub(super) fn read(&self, offset: u64, data: &Buffers) -> IoResult {
        let (len, size) = (data.len() as u64, self.image.disk.size());
        let end = offset.checked_add(len).ok_or(IoError::out_of_range())?;
        if len == 0 {
            return Ok(());
        }
        if end <= size {
            self.copy_up(ByteRange { offset, len })?;
        }
        if end <= size || end > self.image.size() {
            return self.run(Request::read(offset, data.clone()));
        }
        let real = size.saturating_sub(offset) as usize;
        data.slice(real, data.len() - real).fill(0);
        if real == 0 { Ok(()) } else { self.run(Request::read(offset, data.slice(0, real))) }
    }

    /// Refuses a write that would make an image look like another format, if it was found to be raw by looking.
    pub(super) fn guard(&self, request: &Request) -> IoResult {
        if !self.guards_head || request.op != Op::Write || request.range.offset >= PROBE_LEN as u64 {
            return Ok(());
        }
        let size = self.image.disk.size().min(PROBE_LEN as u64);
        let head = Buffers::alloc(size as usize, 4096);
        self.read(0, &head)?;
        let mut head = head.to_vec();
        let at = request.range.offset as usize;
        let written = request.bufs.to_vec();
        for (to, from) in head.iter_mut().skip(at).zip(written) {
            *to = from;
        }
        if format_of(&head) == "raw" { Ok(()) } else { Err(IoError::os(libc::EPERM)) }
    }

    /// Reads or writes the VM state.
    pub(super) fn vmstate(&self, _request: Request) -> IoResult {
        Err(IoError::unsupported())
    }

    /// Writes whole clusters compressed.
    pub(super) fn write_compressed(&self, mut request: Request) -> IoResult {
        let top = self.image.disk.top();
        if top.is_none_or(|node| node.driver() != "qcow2") {
            return Err(IoError::unsupported());
        }
        request.flags |= Flags::COMPRESS;
        self.run(request)
    }
}

/// `write failed: No space left on device`.
pub(super) fn failed(name: &str, e: IoError) -> String {
    format!("{name} failed: {}", errno_text(e.errno))
}

pub(super) fn zero_flags(words: &Words) -> Flags {
    let mut flags = Flags::empty();
    flags.set(Flags::MAY_UNMAP, words.has('u'));
    flags.set(Flags::NO_FALLBACK, words.has('n'));
    flags
}

/// Whether every byte is `byte`.
pub(super) fn is_filled(data: &Buffers, byte: u8) -> bool {
    data.to_vec().iter().all(|b| *b == byte)
}

/// Cuts a request that carries more data than the engine takes at once.
fn pieces(request: Request) -> Vec<Request> {
    if request.range.len <= REQUEST_LEN_MAX || !request.op.has_data() {
        return vec![request];
    }
    let step = REQUEST_LEN_MAX as usize;
    (0..request.bufs.len())
        .step_by(step)
        .map(|at| {
            let bufs = request.bufs.slice(at, step.min(request.bufs.len() - at));
            let offset = request.range.offset + at as u64;
            let piece = match request.op {
                Op::Read => Request::read(offset, bufs),
                _ => Request::write(offset, bufs),
            };
            piece.flags(request.flags)
        })
        .collect()
}

/// Fills memory with the bytes of a file, again and again.
fn fill_from_file(data: &Buffers, path: &str) -> Outcome {
    let mut bytes = Vec::new();
    let read = std::fs::File::open(path).and_then(|f| f.take(data.len() as u64).read_to_end(&mut bytes));
    if let Err(e) = read {
        eprintln!("{path}: {}", errno_text(e.raw_os_error().unwrap_or(libc::EIO)));
        return Err(Failed);
    }
    if bytes.is_empty() {
        eprintln!("{path}: file is empty");
        return Err(Failed);
    }
    let all: Vec<u8> = bytes.iter().copied().cycle().take(data.len()).collect();
    data.copy_from_slice(&all);
    Ok(())
}
