//! aio_read, aio_write, aio_flush: requests that run while other commands do.
//!
//! They go through a queue of their own. Whoever drives it collects what has ended and prints it: after each command without waiting, at
//! `aio_flush`, and before the image is closed or changes.

use super::image::OpenImage;
use super::report::{Figures, dump};
use super::session::{Failed, Outcome, Session, Words, pattern};
use super::transfer::{failed, is_filled, zero_flags};
use crate::error::{IoError, IoResult};
use crate::queue::{Cqe, HostOp, HostReq, Queue};
use crate::request::{Buffers, Flags, Op, Request};
use crate::units::ByteRange;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Requests that may run at a time.
const DEPTH: u32 = 1024;

/// The requests of an image that have been started.
#[derive(Default)]
pub(super) struct Queued {
    queue: Option<Queue>,
    running: HashMap<u64, Started>,
    next: u64,
}

/// A request that runs.
struct Started {
    op: Op,
    range: ByteRange,
    data: Buffers,
    at: Instant,
    byte: Option<u8>,
    quiet: bool,
    machine: bool,
    shown: bool,
}

impl Session {
    pub(super) fn aio_read(&mut self, words: &Words, usage: &str) -> Outcome {
        if words.has('i') {
            self.out.line("injecting invalid read request");
            return Ok(());
        }
        let (offset, lens) = self.lengths(words, usage)?;
        let data = self.buffers(lens.iter().sum());
        self.start(Request::read(offset, data), words)
    }

    pub(super) fn aio_write(&mut self, words: &Words, usage: &str) -> Outcome {
        if words.has('i') {
            self.out.line("injecting invalid write request");
            return Ok(());
        }
        let zeroes = words.has('z');
        let conflict = if zeroes && words.operands.len() != 2 {
            Some("-z supports only a single length parameter")
        } else if words.has('u') && !zeroes {
            Some("-u requires -z to be specified")
        } else if zeroes && words.has('P') {
            Some("-z and -P cannot be specified at the same time")
        } else if zeroes && words.has('r') {
            Some("cannot combine zero write with registered I/O buffer")
        } else {
            None
        };
        if let Some(text) = conflict {
            return Err(self.refuse(text));
        }
        let mut request = if zeroes {
            let range =
                ByteRange { offset: self.size(&words.operands[0])?, len: self.size(&words.operands[1])? };
            Request::write_zeroes(range, zero_flags(words))
        } else {
            let (offset, lens) = self.lengths(words, usage)?;
            let data = self.buffers(lens.iter().sum());
            data.fill(words.value('P').and_then(pattern).unwrap_or(0xcd));
            Request::write(offset, data)
        };
        if words.has('f') {
            request.flags |= Flags::FUA;
        }
        self.start(request, words)
    }

    fn start(&mut self, mut request: Request, words: &Words) -> Outcome {
        let Some(mut open) = self.image.take() else { return Err(Failed) };
        if open.write_through && request.op.is_write() {
            request.flags |= Flags::FUA;
        }
        let started = Started {
            op: request.op,
            range: request.range,
            data: request.bufs.clone(),
            at: Instant::now(),
            byte: words.value('P').and_then(pattern),
            quiet: words.has('q'),
            machine: words.has('C'),
            shown: words.has('v'),
        };
        let ready = open.guard(&request).and_then(|()| match request.op {
            Op::Read => open.copy_up(request.range),
            _ => Ok(()),
        });
        let outcome = match ready {
            Err(e) => {
                self.ended(&started, Err(e));
                Ok(())
            }
            Ok(()) => self.submit(&mut open, request, started),
        };
        self.image = Some(open);
        outcome
    }

    fn submit(&mut self, open: &mut OpenImage, request: Request, started: Started) -> Outcome {
        if open.queued.queue.is_none() {
            match Queue::new(&open.image.disk, DEPTH) {
                Ok(queue) => open.queued.queue = Some(queue),
                Err(e) => return Err(self.complain(&e.full_text())),
            }
        }
        let id = open.queued.next;
        open.queued.next += 1;
        open.queued.running.insert(id, started);
        let mut request = vec![HostReq { user_data: id, op: HostOp::Io(request) }];
        while !request.is_empty() {
            let Some(queue) = &open.queued.queue else { return Err(Failed) };
            if queue.submit(&mut request) == 0 {
                self.collect(open, true);
            }
        }
        Ok(())
    }

    /// Prints what has ended, without waiting.
    pub(super) fn poll_queued(&mut self) {
        if let Some(mut open) = self.image.take() {
            if !open.queued.running.is_empty() {
                self.collect(&mut open, false);
            }
            self.image = Some(open);
        }
    }

    /// Waits for everything that was started.
    pub(super) fn finish_queued(&mut self) {
        if let Some(mut open) = self.image.take() {
            self.finish_queued_of(&mut open);
            self.image = Some(open);
        }
    }

    /// The same for an image that is out of its place.
    pub(super) fn finish_queued_of(&mut self, open: &mut OpenImage) {
        while !open.queued.running.is_empty() {
            self.collect(open, true);
        }
    }

    fn collect(&mut self, open: &mut OpenImage, wait: bool) {
        let mut ended: Vec<Cqe> = Vec::new();
        if let Some(queue) = &open.queued.queue {
            // Bounded, so that a wait that nobody ends does not look like one.
            queue.reap(&mut ended, DEPTH as usize, usize::from(wait), Some(Duration::from_secs(60)));
        }
        for cqe in ended {
            let Some(started) = open.queued.running.remove(&cqe.user_data) else { continue };
            let result = if cqe.res < 0 { Err(IoError::new(-cqe.res as i32, cqe.code)) } else { Ok(()) };
            self.ended(&started, result);
        }
    }

    /// Prints the end of a request.
    fn ended(&mut self, s: &Started, result: IoResult) {
        let is_read = s.op == Op::Read;
        if let Err(e) = result {
            self.out.line(&failed(if is_read { "readv" } else { "aio_write" }, e));
            return;
        }
        if is_read
            && let Some(byte) = s.byte
            && !is_filled(&s.data, byte)
        {
            let (at, len) = (s.range.offset, s.range.len);
            self.out.line(&format!("Pattern verification failed at offset {at}, {len} bytes"));
        }
        if s.quiet {
            return;
        }
        if is_read && s.shown && !s.data.is_empty() {
            self.out.line(&dump(s.range.offset, &s.data.to_vec()));
        }
        let verb = if is_read { "read" } else { "wrote" };
        let figures = Figures { verb, offset: s.range.offset, len: s.range.len, time: s.at.elapsed() };
        self.out.line(&figures.text(s.machine));
    }
}
