//! The node in memory: sparse, and carried out in the plan.
//!
//! The disk is a tree of three levels whose tables are made when something below them is first written: looking a chunk up takes no lock, and what was
//! never written costs no memory. Each chunk has a lock, held for one copy. A request is carried out chunk by chunk, so of two overlapping requests at
//! once each chunk has one order, but not the request as a whole; that is what the waist promises (nothing). Zeroing and discarding whole
//! chunks frees them.

use crate::error::{IoError, IoResult, Result};
use crate::node::{Edge, Extent, Growth, Limits, Node, NodeFuture, Plan};
use crate::options::{Options, Prop, PropStates, PropTable, PropType, props::REQUIRED};
use crate::queue::Cx;
use crate::request::{Buffers, Op, ReqRef, Request};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Arc, RwLock};
use crate::units::ByteRange;
use once_cell::sync::OnceCell;
use std::any::Any;
use std::fmt;

/// Options of the driver `memory`.
pub static MEMORY_PROPS: PropTable = PropTable {
    driver: "memory",
    props: &[
        Prop {
            name: "size",
            ty: PropType::Size,
            default: REQUIRED,
            states: PropStates::OPEN,
            doc: "length in bytes; memory is used for what has been written",
        },
        Prop {
            name: "read-only",
            ty: PropType::Bool,
            default: "off",
            states: PropStates::OPEN,
            doc: "refuse writes",
        },
    ],
};

/// Bytes of a chunk, of a leaf table and of a middle table. The root has as many middle tables as the size needs.
const CHUNK: u64 = 64 << 10;
const LEAF: u64 = CHUNK * FANOUT;
const MIDDLE: u64 = LEAF * FANOUT;
const FANOUT: u64 = 1024;
/// How far a node can grow that began smaller; the root for it takes a few hundred bytes.
const GROW_MAX: u64 = 1 << 40;
/// Largest node; its root takes 400 KiB.
const SIZE_MAX: u64 = 1 << 50;

type Chunk = RwLock<Option<Buffers>>;
type Leaf = Box<[Chunk]>;
type Middle = Box<[OnceCell<Leaf>]>;

/// A disk in memory; see the module.
pub struct MemoryNode {
    size: AtomicU64,
    read_only: bool,
    root: Box<[OnceCell<Middle>]>,
    written: AtomicBool,
}

/// The part of a request that lies in one chunk.
#[derive(Clone, Copy, Debug)]
struct Part {
    /// First byte inside the chunk.
    at: usize,
    len: usize,
    /// Where it lies in the request.
    from: usize,
}

impl MemoryNode {
    /// A node of `size` zero bytes, at most 1 PiB.
    pub fn new(size: u64) -> Arc<Self> {
        Arc::new(Self::with(size, false))
    }

    /// From options (see [`MEMORY_PROPS`]).
    pub fn open(mut o: Options) -> Result<Arc<Self>> {
        let size = o.require_size("size")?;
        let read_only = o.take_bool("read-only")?.unwrap_or(false);
        if size > SIZE_MAX {
            return Err(o.invalid("size", "is larger than 1 PiB"));
        }
        o.finish_for(&MEMORY_PROPS)?;
        Ok(Arc::new(Self::with(size, read_only)))
    }

    fn with(size: u64, read_only: bool) -> Self {
        assert!(size <= SIZE_MAX, "a memory node of more than 1 PiB");
        // Room to grow.
        let root = (0..size.max(GROW_MAX).div_ceil(MIDDLE)).map(|_| OnceCell::new()).collect();
        Self { size: AtomicU64::new(size), read_only, root, written: AtomicBool::new(false) }
    }

    /// The leaf table that holds `offset`, if there is one; else the first offset behind it that may have one.
    fn leaf(&self, offset: u64) -> std::result::Result<&Leaf, u64> {
        let Some(middle) = self.root[(offset / MIDDLE) as usize].get() else {
            return Err((offset / MIDDLE + 1) * MIDDLE);
        };
        middle[(offset / LEAF % FANOUT) as usize].get().ok_or((offset / LEAF + 1) * LEAF)
    }

    fn make_leaf(&self, offset: u64) -> &Leaf {
        let middle = self.root[(offset / MIDDLE) as usize]
            .get_or_init(|| (0..FANOUT).map(|_| OnceCell::new()).collect());
        middle[(offset / LEAF % FANOUT) as usize]
            .get_or_init(|| (0..FANOUT).map(|_| Chunk::default()).collect())
    }

    fn read(&self, range: ByteRange, bufs: &Buffers) {
        for (offset, part) in parts(range) {
            let found = self.leaf(offset).ok().map(|leaf| chunk(leaf, offset).read());
            match found.as_ref().and_then(|chunk| chunk.as_ref()) {
                Some(data) => bufs.copy_range(part.from, data, part.at, part.len),
                None => bufs.fill_range(part.from, part.len, 0),
            }
        }
    }

    fn write(&self, range: ByteRange, bufs: &Buffers) {
        if !self.written.load(Ordering::Relaxed) {
            self.written.store(true, Ordering::Relaxed);
        }
        for (offset, part) in parts(range) {
            let mut chunk = chunk(self.make_leaf(offset), offset).write();
            let data = chunk.get_or_insert_with(|| Buffers::alloc(CHUNK as usize, 4096));
            data.copy_range(part.at, bufs, part.from, part.len);
        }
    }

    fn zero(&self, range: ByteRange) {
        let mut at = range.offset;
        while at < range.end() {
            let leaf = match self.leaf(at) {
                Ok(leaf) => leaf,
                Err(next) => {
                    at = next;
                    continue;
                }
            };
            let end = ((at / LEAF + 1) * LEAF).min(range.end());
            for (offset, part) in parts(ByteRange { offset: at, len: end - at }) {
                let chunk = chunk(leaf, offset);
                // Mostly there is nothing to do, so look before locking out the readers.
                if chunk.read().is_none() {
                    continue;
                }
                let mut chunk = chunk.write();
                if part.len as u64 == CHUNK {
                    *chunk = None;
                } else if let Some(data) = &*chunk {
                    data.fill_range(part.at, part.len, 0);
                }
            }
            at = end;
        }
    }

    fn carry_out(&self, req: ReqRef<'_>) -> IoResult {
        if req.op.is_write() && self.read_only {
            return Err(IoError::read_only());
        }
        match req.op {
            Op::Read => self.read(req.range, req.bufs),
            Op::Write => self.write(req.range, req.bufs),
            Op::WriteZeroes | Op::Discard => self.zero(req.range),
            Op::Flush => {}
        }
        Ok(())
    }

    /// What is at the start of `range`; looks at one table of chunks at most, so it may tell less than there is.
    fn status(&self, range: ByteRange) -> Extent {
        let mut at = range.offset;
        while at < range.end() {
            let leaf = match self.leaf(at) {
                Ok(leaf) => leaf,
                Err(next) => {
                    at = next;
                    continue;
                }
            };
            let hole = at - range.offset;
            let end = ((at / LEAF + 1) * LEAF).min(range.end());
            let mut run: Option<(bool, u64)> = (hole > 0).then_some((false, hole));
            for (offset, part) in parts(ByteRange { offset: at, len: end - at }) {
                let data = chunk(leaf, offset).read().is_some();
                match &mut run {
                    None => run = Some((data, part.len as u64)),
                    Some((kind, len)) if *kind == data => *len += part.len as u64,
                    Some(_) => break,
                }
            }
            return match run {
                Some((true, len)) => Extent::data(len),
                Some((false, len)) => Extent::hole(len),
                None => Extent::hole(end - range.offset),
            };
        }
        Extent::hole(range.len)
    }
}

fn chunk(leaf: &Leaf, offset: u64) -> &Chunk {
    &leaf[(offset / CHUNK % FANOUT) as usize]
}

/// The request cut at the borders of chunks, each part with its offset on the disk.
fn parts(range: ByteRange) -> impl Iterator<Item = (u64, Part)> {
    let mut at = range.offset;
    std::iter::from_fn(move || {
        (at < range.end()).then(|| {
            let inside = at % CHUNK;
            let len = (CHUNK - inside).min(range.end() - at);
            let part = Part { at: inside as usize, len: len as usize, from: (at - range.offset) as usize };
            let offset = at;
            at += len;
            (offset, part)
        })
    })
}

impl Node for MemoryNode {
    fn driver(&self) -> &'static str {
        "memory"
    }

    fn limits(&self) -> Limits {
        Limits {
            read_only: self.read_only,
            zero_init: !self.written.load(Ordering::Relaxed),
            ..Limits::plain(self.size.load(Ordering::Acquire))
        }
    }

    fn children(&self) -> Vec<(&'static str, &Edge)> {
        Vec::new()
    }

    fn plan(&self, req: ReqRef<'_>) -> Plan {
        Plan::Done(self.carry_out(req))
    }

    fn execute<'a>(&'a self, _cx: &'a Cx, req: Request) -> NodeFuture<'a, IoResult> {
        Box::pin(async move { self.carry_out(req.as_ref()) })
    }

    fn block_status<'a>(&'a self, _cx: &'a Cx, range: ByteRange) -> NodeFuture<'a, IoResult<Extent>> {
        Box::pin(async move { Ok(self.status(range)) })
    }

    /// Up to 1 TiB, or to the size it began with.
    fn resize<'a>(&'a self, _cx: &'a Cx, size: u64, _growth: Growth) -> NodeFuture<'a, IoResult> {
        Box::pin(async move {
            if self.read_only {
                return Err(IoError::read_only());
            }
            if size > self.root.len() as u64 * MIDDLE {
                return Err(IoError::os(libc::EFBIG));
            }
            // Release: partner is the load in `limits`; what was cut off is zeros before anybody sees the place again.
            let old = self.size.load(Ordering::Acquire);
            if size < old {
                self.size.store(size, Ordering::Release);
                self.zero(ByteRange { offset: size, len: old - size });
            } else {
                self.size.store(size, Ordering::Release);
            }
            Ok(())
        })
    }

    fn settle<'a>(&'a self, _cx: &'a Cx) -> NodeFuture<'a, IoResult> {
        Box::pin(async { Ok(()) })
    }

    fn get(&self, key: &str) -> Option<String> {
        match key {
            "size" => Some(self.limits().size.to_string()),
            "read-only" => Some(if self.read_only { "on" } else { "off" }.to_owned()),
            _ => None,
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for MemoryNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryNode({} bytes)", self.limits().size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Flags;
    use crate::rt::{Rng, real::SplitMix};

    fn run(node: &MemoryNode, req: Request) -> IoResult {
        match node.plan(req.as_ref()) {
            Plan::Done(result) => result,
            other => panic!("{other:?}"),
        }
    }

    /// Bytes of memory in use, in chunks, and tables of chunks.
    fn used(node: &MemoryNode) -> (usize, usize) {
        let leaves: Vec<_> =
            node.root.iter().filter_map(|m| m.get()).flat_map(|m| m.iter().filter_map(|l| l.get())).collect();
        (leaves.iter().flat_map(|l| l.iter()).filter(|c| c.read().is_some()).count(), leaves.len())
    }

    #[test]
    fn random_requests_agree_with_a_vector() {
        let size = 3 * CHUNK + 1000;
        let node = MemoryNode::new(size);
        let mut model = vec![0u8; size as usize];
        let rng = SplitMix::new(7);
        for step in 0..2000u64 {
            let offset = rng.next() % size;
            let len = 1 + rng.next() % (size - offset).min(2 * CHUNK);
            let (range, place) = (ByteRange { offset, len }, offset as usize..(offset + len) as usize);
            let cut = (rng.next() % len) as usize;
            let mut bufs = Buffers::alloc(cut, 8);
            bufs.append(Buffers::alloc(len as usize - cut, 8));
            match rng.next() % 5 {
                0 => {
                    let data: Vec<u8> = (0..len).map(|i| (step * 7 + i) as u8).collect();
                    bufs.copy_from_slice(&data);
                    run(&node, Request::write(offset, bufs)).expect("written");
                    model[place].copy_from_slice(&data);
                }
                1 => {
                    run(&node, Request::write_zeroes(range, Flags::empty())).expect("zeroed");
                    model[place].fill(0);
                }
                2 => {
                    run(&node, Request::discard(range)).expect("discarded");
                    model[place].fill(0);
                }
                3 => {
                    let e = node.status(range);
                    assert!((1..=len).contains(&e.len));
                    assert!(!e.is_zero() || model[place][..e.len as usize].iter().all(|b| *b == 0));
                }
                _ => {
                    bufs.fill(0xee);
                    run(&node, Request::read(offset, bufs.clone())).expect("read");
                    assert!(bufs.to_vec() == model[place], "step {step}");
                }
            }
        }
    }

    #[test]
    fn a_huge_node_uses_memory_only_for_what_was_written() {
        let node = MemoryNode::new(SIZE_MAX);
        let all = ByteRange { offset: 0, len: SIZE_MAX };
        let bufs = Buffers::alloc(512, 8);
        run(&node, Request::read(SIZE_MAX - 512, bufs.clone())).expect("read");
        run(&node, Request::discard(all)).expect("discarded");
        assert_eq!(node.status(all), Extent::hole(SIZE_MAX));
        assert_eq!(used(&node), (0, 0), "looking makes nothing");
        assert!(node.limits().zero_init);
        let far = (SIZE_MAX / 2) + 3 * LEAF;
        run(&node, Request::write(far + 5 * CHUNK, bufs)).expect("written");
        assert_eq!(used(&node), (1, 1));
        assert!(!node.limits().zero_init);
        assert_eq!(node.status(all), Extent::hole(far + 5 * CHUNK));
        let rest = |offset| ByteRange { offset, len: SIZE_MAX - offset };
        assert_eq!(node.status(rest(far + 5 * CHUNK)), Extent::data(CHUNK));
        assert_eq!(node.status(rest(far + 6 * CHUNK)), Extent::hole(LEAF - 6 * CHUNK));
        run(&node, Request::write_zeroes(all, Flags::empty())).expect("zeroed");
        assert_eq!(used(&node).0, 0);
    }

    #[test]
    fn a_node_grows_and_shrinks_and_what_comes_is_zero() {
        let node = MemoryNode::new(CHUNK);
        let env = crate::queue::testing::env(0);
        crate::queue::testing::block_on(&env, |cx| async move {
            let data = Buffers::alloc(1000, 8);
            data.fill(7);
            cx.run(&*node, Request::write(CHUNK, data.clone())).await.expect_err("past the end");
            node.resize(&cx, 3 * CHUNK, Growth::Reserved).await.expect("it grows");
            assert_eq!(node.limits().size, 3 * CHUNK);
            cx.run(&*node, Request::write(2 * CHUNK, data.clone())).await.expect("written");
            node.resize(&cx, 2 * CHUNK + 10, Growth::Sparse).await.expect("it shrinks");
            cx.run(&*node, Request::write(2 * CHUNK, data.clone())).await.expect_err("past the end");
            node.resize(&cx, 3 * CHUNK, Growth::Sparse).await.expect("it grows again");
            cx.run(&*node, Request::read(2 * CHUNK, data.clone())).await.expect("read");
            assert!(data.slice(0, 10).to_vec() == [7; 10] && data.slice(10, 990).is_zero());
            let e = node.resize(&cx, GROW_MAX + 1, Growth::Sparse).await.expect_err("too far");
            assert_eq!(e.errno, libc::EFBIG);
        });
    }

    #[test]
    fn a_read_only_node_refuses_what_would_change_it() {
        let options = Options::parse("size=1M,read-only=on").expect("options");
        let node = MemoryNode::open(options).expect("it opens");
        let range = ByteRange { offset: 0, len: 512 };
        for req in [
            Request::write(0, Buffers::alloc(512, 8)),
            Request::write_zeroes(range, Flags::empty()),
            Request::discard(range),
        ] {
            assert_eq!(run(&node, req), Err(IoError::read_only()));
        }
        run(&node, Request::flush()).expect("nothing to do");
    }

    #[test]
    fn sizes_without_sense_are_refused() {
        for (text, named) in [("", "size"), ("size=2P", "1 PiB"), ("size=1M,sice=2", "sice")] {
            let e = MemoryNode::open(Options::parse(text).expect("options")).expect_err(named);
            assert!(e.full_text().contains(named), "{}", e.full_text());
        }
        assert_eq!(
            MemoryNode::open(Options::parse("size=0").expect("options")).expect("opens").limits().size,
            0
        );
    }
}
