//! The snapshot table, read entry by entry (qcow2.md sections 2 and 7, traps 9 and 10).
//!
//! The header says how many entries there are, not how long they are: the table is streamed, and its bounds are those of the format, whatever
//! the header says. Nothing is allocated by a length that has not been compared with them.

use super::super::addr::HostOffset;
use super::super::extension::{u32_at, u64_at};
use super::super::header::Header;
use super::super::limits::{SNAPSHOT_TABLE_BYTES_MAX, SNAPSHOTS_MAX};
use super::super::meta_io::read_at;
use crate::error::{Code, Error, Result};
use crate::node::Node;
use crate::queue::Cx;
use crate::request::{Buffers, Class};

/// Bytes of an entry before its extra data.
const FIXED_LEN: usize = 40;
/// Most bytes of extra data.
pub const EXTRA_MAX: u32 = 1024;
/// Bytes read at once.
const PIECE: usize = 64 << 10;

/// An entry of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Its L1 table, as stored: not checked.
    pub l1_offset: u64,
    /// Entries of its L1 table, as stored.
    pub l1_entries: u32,
    /// Unique id, in no particular encoding.
    pub id: Vec<u8>,
    /// Name; may be that of others, too.
    pub name: Vec<u8>,
    /// When it was taken, in seconds since 1970.
    pub date_s: u32,
    /// The rest of that, in nanoseconds.
    pub date_ns: u32,
    /// How long the guest had run, in nanoseconds.
    pub clock_ns: u64,
    /// Bytes of VM state.
    pub vm_state_len: u64,
    /// Size of the disk, if stored.
    pub disk_size: Option<u64>,
    /// Instructions executed, if stored.
    pub icount: Option<u64>,
    /// Extra data that is not understood.
    pub unknown_extra: Vec<u8>,
    /// Bytes of extra data, of which 16 are required in version 3.
    pub extra_len: u32,
}

/// The whole table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SnapshotTable {
    /// Its entries, in order.
    pub entries: Vec<Snapshot>,
    /// Bytes it takes, the padding of its last entry left out.
    pub len: u64,
}

/// Why a table could not be read.
#[derive(Debug)]
pub enum TableError {
    /// The offset is not aligned, or lies past the largest file.
    Offset,
    /// More snapshots than there can be; this many.
    TooMany(u32),
    /// More extra data than there can be, in this entry.
    Extra(u32),
    /// The table does not end where it must.
    TooLong,
    /// The file could not be read.
    Io(crate::error::IoError),
}

impl TableError {
    /// The sentence; names structure, offset and entry.
    pub fn into_error(self, header: &Header) -> Error {
        let at = header.snapshots_offset;
        match self {
            Self::Offset => {
                Error::invalid(format!("header, offset 64: snapshot table at {at} is not aligned"))
            }
            Self::TooMany(n) => Error::new(
                libc::EFBIG,
                Code::Invalid,
                format!("header, offset 60: {n} snapshots, more than {SNAPSHOTS_MAX}"),
            ),
            Self::Extra(n) => Error::new(
                libc::EFBIG,
                Code::Invalid,
                format!("snapshot table at {at}, entry {n}: more than {EXTRA_MAX} bytes of extra data"),
            ),
            Self::TooLong => Error::new(
                libc::EFBIG,
                Code::Invalid,
                format!("snapshot table at {at} is longer than {SNAPSHOT_TABLE_BYTES_MAX} bytes"),
            ),
            Self::Io(e) => Error::io(e, format!("cannot read the snapshot table at {at}")),
        }
    }
}

impl From<crate::error::IoError> for TableError {
    fn from(e: crate::error::IoError) -> Self {
        Self::Io(e)
    }
}

/// Reads the table that `header` names; empty without snapshots. What lies past the end of the file is zeros.
pub async fn read_table(
    cx: &Cx,
    file: &dyn Node,
    header: &Header,
) -> std::result::Result<SnapshotTable, TableError> {
    if header.snapshots == 0 {
        return Ok(SnapshotTable::default());
    }
    if header.snapshots > SNAPSHOTS_MAX {
        return Err(TableError::TooMany(header.snapshots));
    }
    let at = header.snapshots_offset;
    if at.get() == 0
        || !at.is_aligned(1 << header.cluster_bits)
        || at.checked_add(SNAPSHOT_TABLE_BYTES_MAX).is_none()
    {
        return Err(TableError::Offset);
    }
    let mut stream = Stream { cx, file, start: at, at: 0, piece: Vec::new(), piece_at: 0 };
    let mut table = SnapshotTable::default();
    for index in 0..header.snapshots {
        stream.align()?;
        let snapshot = read_entry(&mut stream, index).await?;
        table.len = stream.at;
        table.entries.push(snapshot);
    }
    Ok(table)
}

/// The table for everybody but the check: errors name the place.
pub async fn read_snapshots(cx: &Cx, file: &dyn Node, header: &Header) -> Result<SnapshotTable> {
    read_table(cx, file, header).await.map_err(|e| e.into_error(header))
}

async fn read_entry(stream: &mut Stream<'_>, index: u32) -> std::result::Result<Snapshot, TableError> {
    let fixed = stream.take(FIXED_LEN).await?;
    let (id_len, name_len) = (u16_at(&fixed, 12), u16_at(&fixed, 14));
    let extra_len = u32_at(&fixed, 36);
    if extra_len > EXTRA_MAX {
        return Err(TableError::Extra(index));
    }
    let extra = stream.take(extra_len as usize).await?;
    let id = stream.take(usize::from(id_len)).await?;
    let name = stream.take(usize::from(name_len)).await?;
    let field = |at: usize| (extra.len() >= at + 8).then(|| u64_at(&extra, at));
    Ok(Snapshot {
        l1_offset: u64_at(&fixed, 0),
        l1_entries: u32_at(&fixed, 8),
        id,
        name,
        date_s: u32_at(&fixed, 16),
        date_ns: u32_at(&fixed, 20),
        clock_ns: u64_at(&fixed, 24),
        // The wider field overrides the other one.
        vm_state_len: field(0).unwrap_or(u64::from(u32_at(&fixed, 32))),
        disk_size: field(8),
        icount: field(16).filter(|n| *n != u64::MAX),
        unknown_extra: extra.get(24..).unwrap_or_default().to_vec(),
        extra_len,
    })
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// Reads bytes one after the other, in pieces.
struct Stream<'a> {
    cx: &'a Cx,
    file: &'a dyn Node,
    start: HostOffset,
    /// Bytes taken so far.
    at: u64,
    piece: Vec<u8>,
    /// Where the piece begins, counted from the start.
    piece_at: u64,
}

impl Stream<'_> {
    /// Goes on to a multiple of 8.
    fn align(&mut self) -> std::result::Result<(), TableError> {
        self.at = self.at.next_multiple_of(8);
        if self.at > SNAPSHOT_TABLE_BYTES_MAX { Err(TableError::TooLong) } else { Ok(()) }
    }

    /// The next `len` bytes; at most 64 KiB.
    async fn take(&mut self, len: usize) -> std::result::Result<Vec<u8>, TableError> {
        if self.at + len as u64 > SNAPSHOT_TABLE_BYTES_MAX {
            return Err(TableError::TooLong);
        }
        let mut out = Vec::with_capacity(len);
        while out.len() < len {
            let skip = (self.at - self.piece_at) as usize;
            if skip >= self.piece.len() {
                let from = self.start.checked_add(self.at).ok_or(TableError::Offset)?;
                let memory = Buffers::alloc(PIECE, 4096);
                read_at(self.cx, self.file, from, &memory, Class::Guest).await?;
                (self.piece, self.piece_at) = (memory.to_vec(), self.at);
                continue;
            }
            let n = (len - out.len()).min(self.piece.len() - skip);
            out.extend_from_slice(&self.piece[skip..skip + n]);
            self.at += n as u64;
        }
        Ok(out)
    }
}
