//! A small, blocking NBD client.

use crate::io::nbd::proto::{
    CONTEXT_ALLOCATION, Chunk, ChunkFlags, ChunkHeader, Command, Errno, ExportFlags, ExportSize, Greeting,
    HandshakeFlags, Info, Opt, OptionHeader, OptionReplyHeader, Reader, Rep, RequestHeader, SimpleReply,
};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

pub(super) struct Client {
    pub(super) stream: UnixStream,
    structured: bool,
    /// Lengths of reads under way; a simple reply does not tell.
    reads: HashMap<u64, u32>,
    next_cookie: u64,
}

/// One reply, chunks put together.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Reply {
    pub(super) cookie: u64,
    pub(super) error: Option<Errno>,
    pub(super) text: String,
    /// Content with its offset, in the order of arrival; holes have no bytes but a length.
    pub(super) content: Vec<(u64, Content)>,
    pub(super) extents: Vec<(u32, u32)>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Content {
    Data(Vec<u8>),
    Hole(u32),
}

impl Client {
    /// Connects and gets past the greeting.
    pub(super) fn connect(path: &Path) -> Self {
        let mut c = Self::connect_raw(path);
        let mut greeting = [0; Greeting::LEN];
        c.stream.read_exact(&mut greeting).expect("greeting");
        let greeting = Greeting::decode(&greeting).expect("a greeting");
        assert_eq!(greeting.flags, HandshakeFlags::all());
        c.stream.write_all(&3u32.to_be_bytes()).expect("client flags");
        c
    }

    /// Connects, no more.
    pub(super) fn connect_raw(path: &Path) -> Self {
        let stream = UnixStream::connect(path).expect("connect");
        // Not to wait for, but to fail rather than hang.
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("timeout");
        stream.set_write_timeout(Some(Duration::from_secs(60))).expect("timeout");
        Self { stream, structured: false, reads: HashMap::new(), next_cookie: 1 }
    }

    pub(super) fn option(&mut self, option: Opt, data: &[u8]) -> Vec<(Rep, Vec<u8>)> {
        let mut message = OptionHeader { option, len: data.len() as u32 }.encode().to_vec();
        message.extend(data);
        self.stream.write_all(&message).expect("option");
        let mut replies = Vec::new();
        loop {
            let mut head = [0; OptionReplyHeader::LEN];
            self.stream.read_exact(&mut head).expect("reply");
            let head = OptionReplyHeader::decode(&head).expect("a reply");
            assert_eq!(head.option, option);
            replies.push((head.reply, self.bytes(head.len as usize)));
            if head.reply == Rep::ACK || head.reply.is_error() {
                return replies;
            }
        }
    }

    pub(super) fn structured(&mut self) {
        assert_eq!(self.option(Opt::STRUCTURED_REPLY, b""), [(Rep::ACK, vec![])]);
        self.structured = true;
    }

    pub(super) fn select_allocation(&mut self, export: &str) {
        let mut data = (export.len() as u32).to_be_bytes().to_vec();
        data.extend(export.as_bytes());
        data.extend(1u32.to_be_bytes());
        data.extend((CONTEXT_ALLOCATION.len() as u32).to_be_bytes());
        data.extend(CONTEXT_ALLOCATION.as_bytes());
        let replies = self.option(Opt::SET_META_CONTEXT, &data);
        assert_eq!(replies[0].0, Rep::META_CONTEXT);
    }

    pub(super) fn go(&mut self, export: &str) -> Result<(u64, ExportFlags), Rep> {
        let mut data = (export.len() as u32).to_be_bytes().to_vec();
        data.extend(export.as_bytes());
        data.extend([0, 0]);
        let replies = self.option(Opt::GO, &data);
        let mut size = None;
        for (kind, data) in &replies {
            if kind.is_error() {
                return Err(*kind);
            }
            if *kind == Rep::INFO && data[..2] == Info::EXPORT.0.to_be_bytes() {
                size = ExportSize::decode(data[2..].try_into().expect("10 bytes"));
            }
        }
        let size = size.expect("size and flags are told");
        Ok((size.size, size.flags))
    }

    /// Sends a request without waiting; returns its cookie.
    pub(super) fn send(&mut self, command: Command, flags: u16, offset: u64, len: u32) -> u64 {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        if command == Command::READ {
            self.reads.insert(cookie, len);
        }
        let header = RequestHeader { flags, command, cookie, offset, len };
        self.stream.write_all(&header.encode()).expect("request");
        cookie
    }

    pub(super) fn send_write(&mut self, flags: u16, offset: u64, data: &[u8]) -> u64 {
        let cookie = self.send(Command::WRITE, flags, offset, data.len() as u32);
        self.stream.write_all(data).expect("payload");
        cookie
    }

    /// The next complete reply, of whatever request; `None` at the end of the stream. Chunks of several structured replies may come mixed.
    pub(super) fn next_reply(&mut self) -> Option<Reply> {
        let mut partial: HashMap<u64, Reply> = HashMap::new();
        loop {
            let mut magic = [0; 4];
            if self.read_some(&mut magic[..1]).expect("reply") == 0 {
                assert!(partial.is_empty(), "the stream ends inside a reply");
                return None;
            }
            self.stream.read_exact(&mut magic[1..]).expect("reply");
            let mut head = [0; ChunkHeader::LEN];
            head[..4].copy_from_slice(&magic);
            self.stream.read_exact(&mut head[4..SimpleReply::LEN]).expect("reply");
            if let Some(r) = SimpleReply::decode(head[..SimpleReply::LEN].try_into().expect("16 bytes")) {
                return Some(self.simple(r));
            }
            self.stream.read_exact(&mut head[SimpleReply::LEN..]).expect("reply");
            let chunk = ChunkHeader::decode(&head).expect("a reply");
            assert!(self.structured, "a chunk without structured replies");
            let payload = self.bytes(chunk.len as usize);
            let reply = partial.entry(chunk.cookie).or_default();
            reply.cookie = chunk.cookie;
            reply.add(chunk.kind, &payload);
            if chunk.flags.contains(ChunkFlags::DONE) {
                let done = partial.remove(&chunk.cookie);
                assert!(partial.is_empty(), "tests that mix replies read them with `replies`");
                return done;
            }
        }
    }

    fn simple(&mut self, r: SimpleReply) -> Reply {
        let read = self.reads.remove(&r.cookie);
        let mut reply = Reply { cookie: r.cookie, ..Reply::default() };
        if r.error != Errno::OK {
            reply.error = Some(r.error);
        } else if let Some(len) = read {
            assert!(!self.structured, "a simple reply to a read");
            reply.content.push((0, Content::Data(self.bytes(len as usize))));
        }
        reply
    }

    /// Sends a request and waits for its reply; no other may be under way.
    pub(super) fn call(&mut self, command: Command, flags: u16, offset: u64, len: u32) -> Reply {
        let cookie = self.send(command, flags, offset, len);
        self.reply_to(cookie)
    }

    pub(super) fn reply_to(&mut self, cookie: u64) -> Reply {
        let reply = self.next_reply().expect("a reply");
        assert_eq!(reply.cookie, cookie);
        reply
    }

    pub(super) fn read(&mut self, offset: u64, len: u32) -> Result<Vec<u8>, Errno> {
        let reply = self.call(Command::READ, 0, offset, len);
        match reply.error {
            Some(e) => Err(e),
            None if self.structured => Ok(reply.assemble(offset, len)),
            None => match reply.content.into_iter().next() {
                Some((_, Content::Data(data))) => Ok(data),
                other => panic!("{other:?}"),
            },
        }
    }

    pub(super) fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), Errno> {
        let cookie = self.send_write(0, offset, data);
        self.reply_to(cookie).result()
    }

    pub(super) fn flush(&mut self) -> Result<(), Errno> {
        self.call(Command::FLUSH, 0, 0, 0).result()
    }

    pub(super) fn disconnect(&mut self) {
        self.send(Command::DISC, 0, 0, 0);
    }

    /// Whether the server has closed the connection without another byte.
    pub(super) fn is_closed(&mut self) -> bool {
        match self.read_some(&mut [0]) {
            Ok(n) => n == 0,
            Err(e) => e.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }

    /// One read. A thread that has made a ring (by a blocking call of the engine) can be interrupted without any signal.
    fn read_some(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        loop {
            match self.stream.read(buf) {
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        self.stream.read_exact(&mut data).expect("data");
        data
    }
}

impl Reply {
    pub(super) fn result(&self) -> Result<(), Errno> {
        self.error.map_or(Ok(()), Err)
    }

    /// The bytes `offset .. offset + len`; every byte must have come exactly once.
    pub(super) fn assemble(&self, offset: u64, len: u32) -> Vec<u8> {
        let mut data = vec![0; len as usize];
        let mut have = vec![false; len as usize];
        for (at, content) in &self.content {
            let from = (at - offset) as usize;
            let n = match content {
                Content::Data(bytes) => {
                    data[from..from + bytes.len()].copy_from_slice(bytes);
                    bytes.len()
                }
                Content::Hole(n) => *n as usize,
            };
            assert!(n > 0 && have[from..from + n].iter().all(|h| !h), "content twice");
            have[from..from + n].fill(true);
        }
        assert!(have.iter().all(|h| *h), "content missing");
        data
    }

    fn add(&mut self, kind: Chunk, payload: &[u8]) {
        let mut r = Reader::new(payload);
        match kind {
            Chunk::NONE => assert!(payload.is_empty()),
            Chunk::OFFSET_DATA => {
                let at = r.u64().expect("offset");
                self.content.push((at, Content::Data(r.bytes(r.remaining()).expect("data").to_vec())));
            }
            Chunk::OFFSET_HOLE => {
                let at = r.u64().expect("offset");
                self.content.push((at, Content::Hole(r.u32().expect("length"))));
            }
            Chunk::BLOCK_STATUS => {
                assert_eq!(r.u32(), Some(super::super::meta::ALLOCATION_ID));
                while let (Some(len), Some(state)) = (r.u32(), r.u32()) {
                    self.extents.push((len, state));
                }
            }
            Chunk::ERROR => {
                self.error = r.u32().map(Errno);
                let len = r.u16().expect("length");
                self.text = r.str(usize::from(len)).expect("text").to_owned();
            }
            other => panic!("{other:?}"),
        }
        assert!(r.is_empty());
    }
}
