//! The node in memory: sparse, and carried out in the plan.

use crate::error::{IoError, IoResult, Result};
use crate::limits::REQUEST_LEN_MAX;
use crate::node::{Edge, Extent, Limits, Node, NodeFuture, Plan};
use crate::options::{Options, Prop, PropStates, PropTable, PropType, props::REQUIRED};
use crate::queue::Cx;
use crate::request::{Buffers, Op, ReqRef, Request};
use crate::sync::{Arc, Mutex};
use crate::units::ByteRange;
use once_cell::sync::OnceCell;
use std::any::Any;
use std::fmt;
use std::sync::RwLock;

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

const CHUNK: u64 = 256 << 10;
/// Chunks per table; tables are made when first used, so a huge node costs little.
const TABLE: u64 = 4096;
/// Largest node: as large as a file can be.
const SIZE_MAX: u64 = 1 << 50;

type Chunk = RwLock<Option<Buffers>>;

/// A disk in memory. Requests are carried out under a lock per 256 KiB, held for a copy only.
pub struct MemoryNode {
    size: u64,
    read_only: bool,
    tables: Mutex<std::collections::HashMap<u64, Arc<[Chunk]>>>,
    first: OnceCell<Arc<[Chunk]>>,
}

impl MemoryNode {
    /// A node of `size` zero bytes.
    pub fn new(size: u64) -> Arc<Self> {
        Arc::new(Self { size, read_only: false, tables: Mutex::default(), first: OnceCell::new() })
    }

    /// From options (see [`MEMORY_PROPS`]).
    pub fn open(mut o: Options) -> Result<Arc<Self>> {
        let size = o.require_size("size")?;
        let read_only = o.take_bool("read-only")?.unwrap_or(false);
        if size > SIZE_MAX {
            return Err(o.invalid("size", "is larger than 1 PiB"));
        }
        o.finish_for(&MEMORY_PROPS)?;
        Ok(Arc::new(Self { size, read_only, tables: Mutex::default(), first: OnceCell::new() }))
    }

    fn table(&self, index: u64) -> Arc<[Chunk]> {
        let make = || (0..TABLE).map(|_| Chunk::default()).collect::<Arc<[Chunk]>>();
        if index == 0 {
            return self.first.get_or_init(make).clone();
        }
        self.tables.lock().entry(index).or_insert_with(make).clone()
    }

    /// Calls `f` with each chunk that `range` touches, the part of it inside the chunk, and where that part lies in the range.
    fn each(&self, range: ByteRange, mut f: impl FnMut(&Chunk, ByteRange, usize)) {
        let mut at = range.offset;
        let mut table = (u64::MAX, Arc::<[Chunk]>::from([]));
        while at < range.end() {
            let chunk = at / CHUNK;
            let inside = at % CHUNK;
            let len = (CHUNK - inside).min(range.end() - at);
            if table.0 != chunk / TABLE {
                table = (chunk / TABLE, self.table(chunk / TABLE));
            }
            let part = ByteRange { offset: inside, len };
            f(&table.1[(chunk % TABLE) as usize], part, (at - range.offset) as usize);
            at += len;
        }
    }

    fn carry_out(&self, req: ReqRef<'_>) -> IoResult {
        if req.op.is_write() && self.read_only {
            return Err(IoError::read_only());
        }
        match req.op {
            Op::Read => self.each(req.range, |chunk, part, at| {
                let to = req.bufs.slice(at, part.len as usize);
                match &*chunk.read().unwrap_or_else(|e| e.into_inner()) {
                    Some(data) => to.copy_from(&data.slice(part.offset as usize, part.len as usize)),
                    None => to.fill(0),
                }
            }),
            Op::Write => self.each(req.range, |chunk, part, at| {
                let from = req.bufs.slice(at, part.len as usize);
                let mut data = chunk.write().unwrap_or_else(|e| e.into_inner());
                let data = data.get_or_insert_with(|| Buffers::alloc(CHUNK as usize, 4096));
                data.slice(part.offset as usize, part.len as usize).copy_from(&from);
            }),
            Op::WriteZeroes | Op::Discard => self.zero(req.range),
            Op::Flush => {}
        }
        Ok(())
    }

    fn zero(&self, range: ByteRange) {
        // Whole tables that were never used need no look at their chunks.
        let span = CHUNK * TABLE;
        let mut at = range.offset;
        while at < range.end() {
            let index = at / span;
            let end = ((index + 1) * span).min(range.end());
            let used =
                if index == 0 { self.first.get().is_some() } else { self.tables.lock().contains_key(&index) };
            if used {
                self.each(ByteRange { offset: at, len: end - at }, |chunk, part, _| {
                    let mut data = chunk.write().unwrap_or_else(|e| e.into_inner());
                    if part.len == CHUNK {
                        *data = None;
                    } else if let Some(data) = &*data {
                        data.slice(part.offset as usize, part.len as usize).fill(0);
                    }
                });
            }
            at = end;
        }
    }

    fn status(&self, range: ByteRange) -> Extent {
        let mut known: Option<(bool, u64)> = None;
        // Bounded work: at most one table per call.
        let end = ((range.offset / (CHUNK * TABLE) + 1) * CHUNK * TABLE).min(range.end());
        let mut same = true;
        self.each(ByteRange { offset: range.offset, len: end - range.offset }, |chunk, part, _| {
            let data = chunk.read().unwrap_or_else(|e| e.into_inner()).is_some();
            match &mut known {
                None => known = Some((data, part.len)),
                Some((d, len)) if same && *d == data => *len += part.len,
                Some(_) => same = false,
            }
        });
        match known {
            Some((true, len)) => Extent::data(len),
            Some((false, len)) => Extent::hole(len),
            None => Extent::hole(range.len),
        }
    }
}

impl Node for MemoryNode {
    fn driver(&self) -> &'static str {
        "memory"
    }

    fn limits(&self) -> Limits {
        Limits { read_only: self.read_only, ..Limits::plain(self.size) }
    }

    fn children(&self) -> Vec<(&'static str, &Edge)> {
        Vec::new()
    }

    fn plan(&self, req: ReqRef<'_>) -> Plan {
        // Long zeroings of used memory take a while; everything else is one bounded copy.
        debug_assert!(!req.op.has_data() || req.range.len <= REQUEST_LEN_MAX);
        Plan::Done(self.carry_out(req))
    }

    fn execute<'a>(&'a self, _cx: &'a Cx, req: Request) -> NodeFuture<'a, IoResult> {
        Box::pin(async move { self.carry_out(req.as_ref()) })
    }

    fn block_status<'a>(&'a self, _cx: &'a Cx, range: ByteRange) -> NodeFuture<'a, IoResult<Extent>> {
        Box::pin(async move { Ok(self.status(range)) })
    }

    fn settle<'a>(&'a self, _cx: &'a Cx) -> NodeFuture<'a, IoResult> {
        Box::pin(async { Ok(()) })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for MemoryNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryNode({} bytes)", self.size)
    }
}
