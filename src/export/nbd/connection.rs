//! The transmission phase of one connection: requests in flight, on the connection's own thread.
//!
//! A round takes in what the input buffer holds as far as the limits allow (`advance`), submits it and collects what has completed (`exchange`),
//! and sends what there is to send (`flush`). A round in which nothing moved ends in `sleep`: one poll over socket, queue and control, then one receive.
//!
//! The input is in one of five [`Phase`]s. Whatever stops it (no memory, too many commands, unsent replies) stops the reading of the
//! socket too, and what lets it go on is always the end of something of this connection, which wakes it by the queue's fd or the socket.
//!
//! A read or write longer than a piece is one [`Command`] with several [`Piece`]s. Structured reads send each piece as it comes. Simple
//! replies cannot be interleaved, so a long simple read waits for all other commands and then goes piece by piece.

use super::command::{Action, Rules, Verdict, judge};
use super::meta::{ExtentSlot, status_task};
use super::net::Socket;
use super::pool::Pool;
use super::reply::Outbox;
use super::server::{Control, Export, Timing};
use super::sys::{self, Interest};
use crate::error::{Code, IoError, Result};
use crate::io::nbd::proto::{Errno, RequestHeader};
use crate::limits::{NBD_BACKLOG_MAX, NBD_COMMANDS_MAX, NBD_PIECE_LEN, NBD_PIECES_MAX};
use crate::queue::{Cqe, HostOp, HostReq, Queue, TaskOp, TaskResult};
use crate::request::{Buffers, Flags, Request};
use crate::rt::{Clock, Instant};
use crate::sync::Arc;
use crate::units::ByteRange;
use slab::Slab;
use std::io;
use std::os::fd::RawFd;
use std::time::Duration;

/// One client in the transmission phase.
pub(super) struct Connection {
    // Dropped first: waits for the requests that use the buffers below.
    queue: Queue,
    queue_fd: RawFd,
    /// The queue's fd was readable.
    queue_ready: bool,
    socket: Socket,
    /// The socket took less than it was given; poll tells when it takes more.
    socket_full: bool,
    control: Arc<Control>,
    clock: Arc<dyn Clock>,
    timing: Timing,
    writable: bool,
    structured: bool,
    allocation: bool,

    input: Input,
    phase: Phase,
    commands: Slab<Command>,
    pieces: Slab<Piece>,
    batch: Vec<HostReq>,
    completed: Vec<Cqe>,
    out: Outbox,
    pool: Pool,

    end: End,
}

/// How far the end of the connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct End {
    /// No more commands are taken.
    closing: bool,
    /// Nothing can be sent any more.
    mute: bool,
    /// The server wants it; requests are not waited for past the deadline.
    forced: bool,
    /// When patience ends, once `closing`.
    deadline: Option<Instant>,
}

/// What the next bytes of the input are.
#[derive(Debug)]
enum Phase {
    /// The header of a request.
    Header,
    /// Pieces of a read still have to be issued.
    Read { key: usize, range: ByteRange },
    /// Pieces of a write still have to be received; there is no buffer for the next one yet.
    Write { key: usize, range: ByteRange },
    /// A piece of a write is being received into `whole`; `range` begins with it.
    Payload { key: usize, range: ByteRange, whole: Buffers, len: usize, filled: usize },
    /// Payload that nobody wants.
    Discard { key: usize, left: u64 },
}

/// A request of the client that has no complete reply yet.
#[derive(Debug)]
struct Command {
    cookie: u64,
    action: Action,
    /// Pieces that have not completed.
    running: usize,
    /// No more pieces will come.
    issued: bool,
    /// The first error.
    error: Option<(Errno, &'static str)>,
    /// The header of a simple reply to a read is out.
    head_sent: bool,
    /// The last chunk of a structured reply is out.
    ended: bool,
    /// No reply: its payload never came.
    silent: bool,
    /// Of a block-status command.
    extents: Option<ExtentSlot>,
}

/// A request to the disk.
#[derive(Debug)]
struct Piece {
    command: usize,
    offset: u64,
    len: usize,
    /// Buffer of the pool, at least `len` bytes.
    whole: Option<Buffers>,
}

impl Connection {
    /// A connection whose handshake is over. `rest` is what the client has sent since.
    pub(super) fn new(
        socket: Socket,
        export: &Export,
        (structured, allocation): (bool, bool),
        rest: &[u8],
        control: Arc<Control>,
        pool: Pool,
        timing: Timing,
    ) -> Result<Self> {
        let depth = u32::try_from(NBD_PIECES_MAX).unwrap_or(crate::limits::QUEUE_DEPTH_MAX);
        let queue = Queue::new(&export.disk, depth)?;
        let queue_fd = queue.event_fd()?;
        Ok(Self {
            queue_fd,
            queue_ready: false,
            socket,
            socket_full: false,
            control,
            clock: export.disk.env().runtime.clock.clone(),
            timing,
            writable: export.writable,
            structured,
            allocation,
            input: Input::new(rest),
            phase: Phase::Header,
            commands: Slab::new(),
            pieces: Slab::new(),
            batch: Vec::new(),
            completed: Vec::new(),
            out: Outbox::default(),
            pool,
            end: End { closing: false, mute: false, forced: false, deadline: None },
            queue,
        })
    }

    /// Serves the client until it goes or the server stops.
    pub(super) fn run(&mut self) -> io::Result<()> {
        loop {
            let moved = self.advance();
            let done = self.exchange();
            let sent = self.flush();
            if moved || done || sent {
                continue;
            }
            if self.is_over() {
                return Ok(());
            }
            self.sleep()?;
        }
    }

    /// Takes in buffered input and issues pieces, until something is missing. Returns whether anything was done.
    fn advance(&mut self) -> bool {
        let mut moved = false;
        while self.step() {
            moved = true;
        }
        moved
    }

    fn step(&mut self) -> bool {
        match std::mem::replace(&mut self.phase, Phase::Header) {
            Phase::Header => self.next_command(),
            Phase::Read { key, range } => self.read_piece(key, range),
            Phase::Write { key, range } => self.write_piece(key, range),
            Phase::Payload { key, range, whole, len, filled } => {
                self.fill_piece(key, range, whole, len, filled)
            }
            Phase::Discard { key, left } => self.discard(key, left),
        }
    }

    fn next_command(&mut self) -> bool {
        if self.end.closing || !self.takes_commands() {
            return false;
        }
        let Some(head) = self.input.header() else { return false };
        let Some(header) = RequestHeader::decode(&head) else {
            // Out of step: there is no way to find the next request.
            self.close();
            self.end.mute = true;
            return true;
        };
        // Asked each time: a disk can be resized, changed or ejected while it is exported.
        let limits = self.queue.disk().top().map(|n| n.limits());
        let rules = Rules {
            size: limits.map_or(0, |l| l.size),
            read_only: !self.writable || limits.is_none_or(|l| l.read_only),
            structured: self.structured,
            allocation: self.allocation,
        };
        match judge(&header, &rules) {
            Verdict::Disconnect => self.close(),
            Verdict::Refuse { error, why, payload } => {
                let mut command = Command::new(header.cookie, Action::Flush);
                command.error = Some((error, why));
                let key = self.commands.insert(command);
                self.phase = Phase::Discard { key, left: u64::from(payload) };
            }
            Verdict::Run { action, range } => self.start(header.cookie, action, range),
        }
        true
    }

    fn start(&mut self, cookie: u64, action: Action, range: ByteRange) {
        let key = self.commands.insert(Command::new(cookie, action));
        self.input.bulky = matches!(action, Action::Write { .. }) && range.len >= BULKY_FROM;
        let empty = range.is_empty() && action != Action::Flush;
        let op = match action {
            Action::Read { .. } if !empty => return self.phase = Phase::Read { key, range },
            Action::Write { .. } if !empty => return self.phase = Phase::Write { key, range },
            _ if empty => return self.issued(key),
            Action::WriteZeroes { flags } => HostOp::Io(Request::write_zeroes(range, flags)),
            Action::Trim { fua: false } => HostOp::Io(Request::discard(range)),
            Action::Trim { fua: true } => HostOp::Task(durable_trim(range)),
            Action::BlockStatus { one } => {
                let slot = ExtentSlot::default();
                self.commands[key].extents = Some(slot.clone());
                HostOp::Task(status_task(range, one, slot))
            }
            _ => HostOp::Io(Request::flush()),
        };
        self.issue(Piece { command: key, offset: range.offset, len: 0, whole: None }, op);
        self.issued(key);
    }

    fn read_piece(&mut self, key: usize, range: ByteRange) -> bool {
        let command = &self.commands[key];
        if command.error.is_some() {
            self.issued(key);
            return true;
        }
        let long = command.running > 0 || command.head_sent || range.len > NBD_PIECE_LEN as u64;
        let blocked = long && !self.structured && (command.running > 0 || self.commands.len() > 1);
        let len = piece_len(range);
        let whole = if blocked { None } else { self.piece_buffer(len) };
        let Some(whole) = whole else {
            self.phase = Phase::Read { key, range };
            return false;
        };
        let op = HostOp::Io(Request::read(range.offset, whole.slice(0, len)));
        self.issue(Piece { command: key, offset: range.offset, len, whole: Some(whole) }, op);
        match after(range, len) {
            Some(range) => self.phase = Phase::Read { key, range },
            None => self.issued(key),
        }
        true
    }

    fn write_piece(&mut self, key: usize, range: ByteRange) -> bool {
        if self.commands[key].error.is_some() {
            self.phase = Phase::Discard { key, left: range.len };
            return true;
        }
        let len = piece_len(range);
        match self.piece_buffer(len) {
            Some(whole) => self.phase = Phase::Payload { key, range, whole, len, filled: 0 },
            None => {
                self.phase = Phase::Write { key, range };
                return false;
            }
        }
        true
    }

    fn fill_piece(
        &mut self,
        key: usize,
        range: ByteRange,
        whole: Buffers,
        len: usize,
        filled: usize,
    ) -> bool {
        let n = self.input.move_to(&whole.slice(filled, len - filled));
        let filled = filled + n;
        if filled < len {
            self.phase = Phase::Payload { key, range, whole, len, filled };
            return n > 0;
        }
        let fua = matches!(self.commands[key].action, Action::Write { fua: true });
        let flags = if fua { Flags::FUA } else { Flags::empty() };
        let op = HostOp::Io(Request::write(range.offset, whole.slice(0, len)).flags(flags));
        self.issue(Piece { command: key, offset: range.offset, len, whole: Some(whole) }, op);
        match after(range, len) {
            Some(range) => self.phase = Phase::Write { key, range },
            None => self.issued(key),
        }
        true
    }

    fn discard(&mut self, key: usize, left: u64) -> bool {
        let n = self.input.skip(left);
        if left == n {
            self.issued(key);
            return true;
        }
        self.phase = Phase::Discard { key, left: left - n };
        n > 0
    }

    /// A buffer for a piece, if there may be another one.
    fn piece_buffer(&mut self, len: usize) -> Option<Buffers> {
        if self.pieces.len() >= NBD_PIECES_MAX { None } else { self.pool.get(len) }
    }

    fn takes_commands(&self) -> bool {
        self.commands.len() < NBD_COMMANDS_MAX
            && self.pieces.len() < NBD_PIECES_MAX
            && self.out.backlog() < NBD_BACKLOG_MAX
    }

    fn issue(&mut self, piece: Piece, op: HostOp) {
        self.commands[piece.command].running += 1;
        let user_data = self.pieces.insert(piece) as u64;
        self.batch.push(HostReq { user_data, op });
    }

    /// No more pieces of this command will come.
    fn issued(&mut self, key: usize) {
        self.commands[key].issued = true;
        self.finish_if_done(key);
    }

    /// Submits the batch and collects completions. Returns whether there were any.
    fn exchange(&mut self) -> bool {
        let signalled = std::mem::take(&mut self.queue_ready);
        if self.batch.is_empty() && !signalled {
            return false;
        }
        let mut completed = std::mem::take(&mut self.completed);
        self.queue.exchange(&mut self.batch, &mut completed, signalled);
        let any = !completed.is_empty();
        for cqe in completed.drain(..) {
            self.complete(cqe);
        }
        self.completed = completed;
        any
    }

    fn complete(&mut self, cqe: Cqe) {
        // The user data of a completion is that of a submission.
        let key = usize::try_from(cqe.user_data).unwrap_or(usize::MAX);
        let Some(piece) = self.pieces.try_remove(key) else { return };
        let command = &mut self.commands[piece.command];
        command.running -= 1;
        if cqe.res < 0 {
            let error = Errno::from_os(i32::try_from(-cqe.res).unwrap_or(libc::EIO));
            // A trim is a hint: a disk that cannot do it has done enough.
            if !(error == Errno::NOTSUP && matches!(command.action, Action::Trim { .. })) {
                command.error.get_or_insert((error, text_of(cqe.code)));
            }
        }
        match (piece.whole, command.action) {
            (Some(whole), Action::Read { whole: unfragmented }) if command.error.is_none() => {
                let bufs = whole.slice(0, piece.len);
                if self.structured {
                    let last = command.issued && command.running == 0;
                    self.out.content(command.cookie, piece.offset, &bufs, unfragmented, last);
                    command.ended = last;
                } else {
                    if !std::mem::replace(&mut command.head_sent, true) {
                        self.out.simple(command.cookie, Errno::OK);
                    }
                    self.out.data(bufs);
                }
                self.out.release(whole);
            }
            (Some(whole), _) => self.pool.put(whole),
            (None, _) => {}
        }
        self.finish_if_done(piece.command);
    }

    fn finish_if_done(&mut self, key: usize) {
        let command = &self.commands[key];
        if !command.issued || command.running > 0 {
            return;
        }
        let command = self.commands.remove(key);
        if command.silent || command.ended {
            return;
        }
        match (command.error, command.action) {
            (Some(_), _) if command.head_sent => {
                // Data was announced that will not come: only the end of the connection can tell.
                self.close();
                self.end.mute = true;
            }
            (Some((error, why)), _) if self.structured => self.out.error(command.cookie, error, why),
            (Some((error, _)), _) => self.out.simple(command.cookie, error),
            (None, Action::Read { .. }) if self.structured => self.out.none(command.cookie),
            (None, Action::Read { .. }) if command.head_sent => {}
            (None, Action::BlockStatus { .. }) => {
                let extents = command.extents.map(|e| std::mem::take(&mut *e.lock())).unwrap_or_default();
                self.out.extents(command.cookie, &extents);
            }
            (None, _) => self.out.simple(command.cookie, Errno::OK),
        }
    }

    /// Sends what the socket takes. Returns whether anything went.
    fn flush(&mut self) -> bool {
        let mut any = false;
        while !self.out.is_empty() {
            if self.end.mute {
                self.out.clear(&mut self.pool);
                return true;
            }
            if self.socket_full {
                break;
            }
            let gather = self.out.gather();
            let total = gather.len();
            match self.socket.send(gather) {
                Ok(n) => {
                    self.socket_full = n < total;
                    self.out.sent(n, &mut self.pool);
                    any = true;
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.socket_full = true,
                Err(_) => {
                    self.close();
                    self.end.mute = true;
                }
            }
        }
        any
    }

    /// Waits for something to happen, and receives if there is something to receive.
    fn sleep(&mut self) -> io::Result<()> {
        let timeout = self.timeout();
        let control = Interest { readable: !self.end.forced, writable: false };
        let [control, queue, socket] = sys::poll(
            [
                (self.control.raw(), control),
                (self.queue_fd, Interest::READ),
                self.socket.interest(self.wants_input(), self.socket_full && !self.out.is_empty()),
            ],
            timeout,
        )?;
        if control.readable && self.control.must_stop() {
            self.close();
            self.end.forced = true;
            self.end.deadline = Some(self.clock.now().after(self.timing.stop));
        }
        self.queue_ready |= queue.readable;
        if socket.writable {
            self.socket_full = false;
        }
        if socket.readable && self.wants_input() {
            self.receive();
        }
        let quiet = !(control.readable || queue.readable || socket.readable || socket.writable);
        if quiet && timeout.is_some() {
            self.pool.trim();
        }
        self.end.mute |= self.is_late();
        Ok(())
    }

    fn timeout(&self) -> Option<Duration> {
        if let Some(deadline) = self.end.deadline
            && !self.is_late()
        {
            return Some(deadline.since(self.clock.now()));
        }
        // Once, after the last request: an idle connection has no timer.
        (self.pool.is_fat() && self.commands.is_empty()).then_some(IDLE_AFTER)
    }

    fn wants_input(&self) -> bool {
        if self.end.closing {
            return false;
        }
        match self.phase {
            Phase::Header => self.takes_commands(),
            Phase::Payload { .. } | Phase::Discard { .. } => true,
            Phase::Read { .. } | Phase::Write { .. } => false,
        }
    }

    /// One receive: the rest of a piece straight into its buffer, what follows into the input buffer.
    fn receive(&mut self) {
        let result = match &mut self.phase {
            Phase::Payload { whole, len, filled, .. } => {
                let rest = whole.slice(*filled, *len - *filled);
                let tail = self.input.space();
                self.socket.recv(rest.segments().first().map(|s| (s, 0)), tail).inspect(|n| {
                    let direct = rest.len().min(*n);
                    *filled += direct;
                    self.input.add(n - direct);
                })
            }
            _ => {
                let space = self.input.space();
                self.socket.recv(None, space).inspect(|n| self.input.add(*n))
            }
        };
        match result {
            Ok(0) => self.close(),
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => {
                self.close();
                self.end.mute = true;
            }
        }
    }

    /// Takes no more input. What was begun is finished; a command whose payload is not complete is forgotten.
    fn close(&mut self) {
        if self.end.closing {
            return;
        }
        self.end.closing = true;
        self.end.deadline = Some(self.clock.now().after(self.timing.linger));
        match std::mem::replace(&mut self.phase, Phase::Header) {
            Phase::Payload { key, whole, .. } => {
                self.pool.put(whole);
                self.forget(key);
            }
            Phase::Write { key, .. } | Phase::Discard { key, .. } => self.forget(key),
            other => self.phase = other,
        }
    }

    fn forget(&mut self, key: usize) {
        self.commands[key].silent = true;
        self.issued(key);
    }

    /// Whether patience has ended.
    fn is_late(&self) -> bool {
        self.end.deadline.is_some_and(|d| self.clock.now() >= d)
    }

    fn is_over(&self) -> bool {
        if !self.end.closing {
            return false;
        }
        let idle = self.commands.is_empty() && self.batch.is_empty();
        idle && self.out.is_empty() || self.end.forced && self.is_late()
    }
}

impl Command {
    fn new(cookie: u64, action: Action) -> Self {
        Self {
            cookie,
            action,
            running: 0,
            issued: false,
            error: None,
            head_sent: false,
            ended: false,
            silent: false,
            extents: None,
        }
    }
}

/// Received bytes that have not been looked at.
#[derive(Debug)]
struct Input {
    buf: Box<[u8]>,
    from: usize,
    to: usize,
    /// The last command was a large write: the next one probably is too, and its payload should not land here.
    bulky: bool,
}

impl Input {
    fn new(rest: &[u8]) -> Self {
        let mut buf = vec![0; INPUT_LEN.max(rest.len())].into_boxed_slice();
        buf[..rest.len()].copy_from_slice(rest);
        Self { buf, from: 0, to: rest.len(), bulky: false }
    }

    /// Takes a request header, if it is complete.
    fn header(&mut self) -> Option<[u8; RequestHeader::LEN]> {
        let head = *self.buf[self.from..self.to].first_chunk()?;
        self.from += RequestHeader::LEN;
        Some(head)
    }

    /// Moves bytes to the start of `bufs`; returns how many.
    fn move_to(&mut self, bufs: &Buffers) -> usize {
        let n = bufs.len().min(self.to - self.from);
        bufs.copy_from_slice(&self.buf[self.from..self.from + n]);
        self.from += n;
        n
    }

    /// Skips at most `len` bytes; returns how many.
    fn skip(&mut self, len: u64) -> u64 {
        let n = usize::try_from(len).unwrap_or(usize::MAX).min(self.to - self.from);
        self.from += n;
        n as u64
    }

    /// Where to receive. What has not been looked at, less than a header in all phases that receive, moves to the front.
    fn space(&mut self) -> &mut [u8] {
        self.buf.copy_within(self.from..self.to, 0);
        self.to -= self.from;
        self.from = 0;
        let limit = if self.bulky && self.to < BULKY_INPUT_LEN { BULKY_INPUT_LEN } else { self.buf.len() };
        &mut self.buf[self.to..limit]
    }

    /// `n` bytes have been received into [`Input::space`].
    fn add(&mut self, n: usize) {
        self.to += n;
    }
}

fn piece_len(range: ByteRange) -> usize {
    usize::try_from(range.len).unwrap_or(usize::MAX).min(NBD_PIECE_LEN)
}

/// What is left of `range` after its first `len` bytes.
fn after(range: ByteRange, len: usize) -> Option<ByteRange> {
    let len = len as u64;
    (range.len > len).then(|| ByteRange { offset: range.offset + len, len: range.len - len })
}

/// A discard and then a flush: how a discard becomes durable is not every node's business.
fn durable_trim(range: ByteRange) -> TaskOp {
    Box::new(move |cx, node| {
        Box::pin(async move {
            let Some(node) = node else { return IoError::new(libc::ENOMEDIUM, Code::NoMedium).into() };
            let done = match cx.run(&*node, Request::discard(range)).await {
                Ok(()) => cx.run(&*node, Request::flush()).await,
                Err(e) => Err(e),
            };
            done.map_or_else(TaskResult::from, |()| TaskResult::ok(0, false))
        })
    })
}

/// What the client is told beside the number: nothing if the number says it all.
fn text_of(code: Code) -> &'static str {
    if matches!(code, Code::None | Code::Io) { "" } else { code.name() }
}

/// Input buffer; also how much of a small write's payload is copied rather than received in place.
const INPUT_LEN: usize = 64 << 10;
/// The same after a large write.
const BULKY_INPUT_LEN: usize = 4096;
/// A write of so many bytes is large.
const BULKY_FROM: u64 = 8192;
/// How long after the last request most of the kept memory is given back.
const IDLE_AFTER: Duration = Duration::from_secs(1);

const _: () = assert!(BULKY_INPUT_LEN > RequestHeader::LEN);
