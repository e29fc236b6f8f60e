//! Replies: their encoding, and the queue of what must be sent.

use super::meta::{ALLOCATION_ID, WireExtent};
use super::pool::Pool;
use super::sys::Gather;
use crate::io::nbd::proto::{Chunk, ChunkFlags, ChunkHeader, Errno, SimpleReply};
use crate::request::Buffers;
use std::collections::VecDeque;

/// What must be sent, in order. Headers lie in one buffer; data is sent from where the disk's read has put it.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    items: VecDeque<Item>,
    heads: Vec<u8>,
    /// Bytes of `heads` that have been sent.
    heads_sent: usize,
}

#[derive(Debug)]
enum Item {
    /// So many of the next bytes of `heads`.
    Head(usize),
    /// Data from byte `sent` on.
    Data { bufs: Buffers, sent: usize },
    /// A buffer of the pool, all of whose data stands before this.
    Done(Buffers),
}

impl Outbox {
    /// Whether everything has been sent.
    pub(super) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Unsent bytes of headers.
    pub(super) fn backlog(&self) -> usize {
        self.heads.len() - self.heads_sent
    }

    /// A simple reply; the data of a read follows with [`Outbox::data`].
    pub(super) fn simple(&mut self, cookie: u64, error: Errno) {
        self.head(&SimpleReply { error, cookie }.encode());
    }

    /// Data that belongs to what stands before it.
    pub(super) fn data(&mut self, bufs: Buffers) {
        if !bufs.is_empty() {
            self.items.push_back(Item::Data { bufs, sent: 0 });
        }
    }

    /// A buffer that goes back to the pool once the data before it has been sent.
    pub(super) fn release(&mut self, whole: Buffers) {
        self.items.push_back(Item::Done(whole));
    }

    /// The end of a structured reply without content.
    pub(super) fn none(&mut self, cookie: u64) {
        self.chunk(cookie, Chunk::NONE, ChunkFlags::DONE, 0);
    }

    /// The end of a structured reply that has failed.
    pub(super) fn error(&mut self, cookie: u64, error: Errno, why: &str) {
        // Texts are ours and short.
        let len = u16::try_from(why.len()).unwrap_or(0);
        let why = &why.as_bytes()[..usize::from(len)];
        self.chunk(cookie, Chunk::ERROR, ChunkFlags::DONE, 6 + u32::from(len));
        self.head(&error.0.to_be_bytes());
        self.head(&len.to_be_bytes());
        self.head(why);
    }

    /// The content at `offset`: chunks of data, and of holes where it is zero unless `whole`. `last` ends the reply. `bufs` is not empty.
    pub(super) fn content(&mut self, cookie: u64, offset: u64, bufs: &Buffers, whole: bool, last: bool) {
        let mut at = 0;
        while at < bufs.len() {
            let run = if whole { Run { len: bufs.len(), zero: false } } else { next_run(offset, bufs, at) };
            let done = last && at + run.len == bufs.len();
            let flags = if done { ChunkFlags::DONE } else { ChunkFlags::empty() };
            // A run is at most one piece long.
            let len = u32::try_from(run.len).unwrap_or(u32::MAX);
            let start = (offset + at as u64).to_be_bytes();
            if run.zero {
                self.chunk(cookie, Chunk::OFFSET_HOLE, flags, 12);
                self.head(&start);
                self.head(&len.to_be_bytes());
            } else {
                self.chunk(cookie, Chunk::OFFSET_DATA, flags, len + 8);
                self.head(&start);
                self.data(bufs.slice(at, run.len));
            }
            at += run.len;
        }
    }

    /// The extents of `base:allocation`, as a whole reply.
    pub(super) fn extents(&mut self, cookie: u64, extents: &[WireExtent]) {
        // At most NBD_EXTENTS_MAX of them.
        let len = u32::try_from(4 + 8 * extents.len()).unwrap_or(u32::MAX);
        self.chunk(cookie, Chunk::BLOCK_STATUS, ChunkFlags::DONE, len);
        self.head(&ALLOCATION_ID.to_be_bytes());
        for e in extents {
            self.head(&e.len.to_be_bytes());
            self.head(&e.state.bits().to_be_bytes());
        }
    }

    /// The next bytes to send, as many as one system call takes.
    pub(super) fn gather(&self) -> Gather<'_> {
        let mut gather = Gather::default();
        let mut at = self.heads_sent;
        for item in &self.items {
            if !gather.has_room() {
                break;
            }
            match item {
                Item::Head(len) => {
                    gather.bytes(&self.heads[at..at + len]);
                    at += len;
                }
                Item::Data { bufs, sent } => {
                    let mut skip = *sent;
                    for segment in bufs.segments() {
                        if skip < segment.len() {
                            gather.segment(segment, skip);
                        }
                        skip = skip.saturating_sub(segment.len());
                    }
                }
                Item::Done(_) => {}
            }
        }
        gather
    }

    /// `n` bytes have been sent. Buffers that are done with go to `pool`.
    pub(super) fn sent(&mut self, mut n: usize, pool: &mut Pool) {
        while let Some(item) = self.items.pop_front() {
            match item {
                Item::Head(len) => {
                    let part = len.min(n);
                    self.heads_sent += part;
                    n -= part;
                    if part < len {
                        self.items.push_front(Item::Head(len - part));
                        break;
                    }
                }
                Item::Data { bufs, sent } => {
                    let part = (bufs.len() - sent).min(n);
                    n -= part;
                    if sent + part < bufs.len() {
                        self.items.push_front(Item::Data { bufs, sent: sent + part });
                        break;
                    }
                }
                Item::Done(whole) => pool.put(whole),
            }
        }
        if self.items.is_empty() {
            self.heads.clear();
            self.heads_sent = 0;
        } else if self.heads_sent > COMPACT_AT {
            self.heads.drain(..self.heads_sent);
            self.heads_sent = 0;
        }
    }

    /// Throws everything away: nobody listens any more.
    pub(super) fn clear(&mut self, pool: &mut Pool) {
        self.sent(usize::MAX, pool);
    }

    fn chunk(&mut self, cookie: u64, kind: Chunk, flags: ChunkFlags, len: u32) {
        self.head(&ChunkHeader { flags, kind, cookie, len }.encode());
    }

    fn head(&mut self, bytes: &[u8]) {
        self.heads.extend(bytes);
        match self.items.back_mut() {
            Some(Item::Head(len)) => *len += bytes.len(),
            _ => self.items.push_back(Item::Head(bytes.len())),
        }
    }
}

/// Sent bytes of headers that are worth moving the rest down.
const COMPACT_AT: usize = 64 << 10;
/// Unit in which zeros are looked for. Data that is not zero is told by a look at the unit's ends; zeros are read once and not sent.
const ZERO_UNIT: u64 = 64 << 10;
/// Shorter content is not worth a look.
const ZERO_MIN: usize = 4096;

struct Run {
    len: usize,
    zero: bool,
}

/// The longest run of units from byte `at` on that are all zero, or all not.
fn next_run(offset: u64, bufs: &Buffers, at: usize) -> Run {
    let unit = |at: usize| {
        // Cut at multiples of the unit in the export, so that chunks are aligned as the protocol would like it.
        let to_boundary = ZERO_UNIT - (offset + at as u64) % ZERO_UNIT;
        let len = (bufs.len() - at).min(usize::try_from(to_boundary).unwrap_or(usize::MAX));
        Run { len, zero: len >= ZERO_MIN && bufs.slice(at, len).is_zero() }
    };
    let mut run = unit(at);
    while at + run.len < bufs.len() {
        let next = unit(at + run.len);
        if next.zero != run.zero {
            break;
        }
        run.len += next.len;
    }
    run
}

#[cfg(test)]
mod tests {
    use super::super::pool::Budget;
    use super::*;
    use crate::io::nbd::proto::StateFlags;
    use crate::limits::NBD_PIECE_LEN;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    /// What the outbox would send, sent in parts of `step` bytes.
    fn drain(out: &mut Outbox, pool: &mut Pool, step: usize) -> Vec<u8> {
        let mut all = Vec::new();
        while !out.is_empty() {
            let (a, b) = UnixStream::pair().expect("socketpair");
            let n = out.gather().send(a.as_raw_fd()).expect("send").min(step);
            let mut got = vec![0; n];
            std::io::Read::read_exact(&mut &b, &mut got).expect("read");
            all.extend(got);
            out.sent(n, pool);
        }
        all
    }

    fn pattern(len: usize) -> Buffers {
        let bytes: Vec<u8> = (0..len).map(|i| (i % 251) as u8 + 1).collect();
        Buffers::from_bytes(&bytes)
    }

    fn chunks(mut bytes: &[u8]) -> Vec<(Chunk, bool, Vec<u8>)> {
        let mut all = Vec::new();
        while let Some((head, rest)) = bytes.split_first_chunk::<{ ChunkHeader::LEN }>() {
            let h = ChunkHeader::decode(head).expect("a chunk");
            assert_eq!(h.cookie, 9);
            let (payload, rest) = rest.split_at(h.len as usize);
            all.push((h.kind, h.flags.contains(ChunkFlags::DONE), payload.to_vec()));
            bytes = rest;
        }
        assert!(bytes.is_empty());
        all
    }

    #[test]
    fn sending_in_parts_of_any_length_gives_the_same_bytes() {
        let mut pool = Pool::new(Budget::new(0));
        let fill = |out: &mut Outbox| {
            out.simple(1, Errno::OK);
            out.data(pattern(100));
            out.simple(2, Errno::IO);
            out.simple(3, Errno::OK);
        };
        let mut expected = SimpleReply { error: Errno::OK, cookie: 1 }.encode().to_vec();
        expected.extend(pattern(100).to_vec());
        expected.extend(SimpleReply { error: Errno::IO, cookie: 2 }.encode());
        expected.extend(SimpleReply { error: Errno::OK, cookie: 3 }.encode());
        for step in [1, 7, 16, 40, 1000] {
            let mut out = Outbox::default();
            fill(&mut out);
            assert_eq!(out.backlog(), 48);
            assert_eq!(drain(&mut out, &mut pool, step), expected, "in parts of {step}");
            assert_eq!(out.backlog(), 0);
        }
    }

    #[test]
    fn a_buffer_returns_to_the_pool_only_after_its_last_byte() {
        let mut pool = Pool::new(Budget::new(0));
        let whole = pool.get(4096).expect("memory");
        let mut out = Outbox::default();
        out.simple(1, Errno::OK);
        out.data(whole.slice(0, 4000));
        out.release(whole);
        out.sent(16 + 3999, &mut pool);
        assert_eq!(pool.in_use(), 4096);
        out.sent(1, &mut pool);
        assert_eq!(pool.in_use(), 0);
        assert!(out.is_empty());
    }

    #[test]
    fn zero_units_become_holes_with_aligned_borders() {
        let unit = usize::try_from(ZERO_UNIT).expect("small");
        let data = pattern(4 * unit);
        data.slice(unit - 512, 2 * unit).fill(0);
        let mut out = Outbox::default();
        out.content(9, 512, &data, false, true);
        let got = chunks(&drain(&mut out, &mut Pool::new(Budget::new(0)), usize::MAX));
        let kinds: Vec<_> = got.iter().map(|c| (c.0, c.1)).collect();
        assert_eq!(
            kinds,
            [(Chunk::OFFSET_DATA, false), (Chunk::OFFSET_HOLE, false), (Chunk::OFFSET_DATA, true)]
        );
        assert_eq!(got[1].2[..8], ZERO_UNIT.to_be_bytes());
        assert_eq!(got[1].2[8..], (2 * u32::try_from(unit).expect("small")).to_be_bytes());
        assert_eq!(got[0].2[8..], data.slice(0, unit - 512).to_vec());
        assert_eq!(got[2].2[8..], data.slice(3 * unit - 512, unit + 512).to_vec());
    }

    #[test]
    fn unfragmented_content_is_one_chunk_of_data_even_if_zero() {
        let mut out = Outbox::default();
        out.content(9, 0, &Buffers::alloc(NBD_PIECE_LEN, 64), true, true);
        let got = chunks(&drain(&mut out, &mut Pool::new(Budget::new(0)), usize::MAX));
        assert_eq!(got.len(), 1);
        assert_eq!((got[0].0, got[0].1, got[0].2.len()), (Chunk::OFFSET_DATA, true, NBD_PIECE_LEN + 8));
    }

    #[test]
    fn errors_extents_and_empty_ends_have_the_layout_of_the_specification() {
        let mut out = Outbox::default();
        out.error(9, Errno::NOSPC, "full");
        out.none(9);
        let state = StateFlags::HOLE | StateFlags::ZERO;
        out.extents(9, &[WireExtent { len: 5, state: StateFlags::empty() }, WireExtent { len: 6, state }]);
        let got = chunks(&drain(&mut out, &mut Pool::new(Budget::new(0)), usize::MAX));
        assert_eq!(got[0], (Chunk::ERROR, true, b"\0\0\0\x1c\0\x04full".to_vec()));
        assert_eq!(got[1], (Chunk::NONE, true, vec![]));
        let extents = [0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 3];
        assert_eq!(got[2], (Chunk::BLOCK_STATUS, true, extents.to_vec()));
    }

    #[test]
    fn headers_do_not_pile_up_while_data_is_always_waiting() {
        let mut pool = Pool::new(Budget::new(0));
        let mut out = Outbox::default();
        out.simple(0, Errno::OK);
        for i in 0..20_000 {
            out.simple(i, Errno::OK);
            out.sent(SimpleReply::LEN, &mut pool);
        }
        assert_eq!(out.backlog(), SimpleReply::LEN);
        assert!(out.heads.len() <= COMPACT_AT + 2 * SimpleReply::LEN);
    }
}
