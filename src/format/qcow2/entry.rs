//! Entries of L1 tables, L2 tables and refcount tables: bits to meaning and back (qcow2.md sections 2 and 7).
//!
//! Pure functions over `u64` words in host byte order; whoever loads a table swaps the bytes. An L2 entry is a [`Words`]: one word, or two with
//! extended L2 entries (the second is 0 otherwise). An entry that cannot be trusted is a [`BadEntry`]; the caller, who knows where the table lies, makes a sentence of
//! it with [`BadEntry::at`].
//!
//! Without sub-clusters a cluster is described as if all 32 had the same state, so users need not tell the two layouts apart.

use super::addr::HostOffset;
use super::layout::Layout;
use super::limits::ENTRY_OFFSET_MASK;
use std::fmt;

/// Refcount is exactly 1 (L1 entries and plain L2 entries).
pub const COPIED: u64 = 1 << 63;
/// The L2 entry is a compressed one.
pub const COMPRESSED: u64 = 1 << 62;
/// The cluster reads as zeros (plain standard entries of version 3).
pub const ZERO: u64 = 1;
/// Bits of an L1 entry that must be 0.
pub const L1_RESERVED: u64 = !(COPIED | ENTRY_OFFSET_MASK);
/// A mask over all sub-clusters.
pub const ALL: u32 = u32::MAX;

/// The words of an L2 entry as stored, in host byte order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Words {
    /// Offset and flags.
    pub entry: u64,
    /// Sub-clusters: allocated in bits 0-31, zero in bits 32-63. 0 without extended L2 entries.
    pub bitmap: u64,
}

/// An L1 entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct L1Entry {
    /// The L2 table, if there is one.
    pub table: Option<HostOffset>,
    /// Whether the table's refcount is exactly 1.
    pub copied: bool,
}

/// An L2 entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum L2Entry {
    /// Unallocated, zero or plain data.
    Plain(Plain),
    /// A compressed cluster.
    Compressed(Compressed),
}

/// A cluster that is not compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Plain {
    /// The host cluster, if there is one; also under zero flags (preallocated).
    pub host: Option<HostOffset>,
    /// Whether the host cluster's refcount is exactly 1.
    pub copied: bool,
    /// Sub-clusters whose data is in the host cluster. All or none without extended entries.
    pub data: u32,
    /// Sub-clusters that read as zeros. All or none without extended entries. Shares no bit with `data`.
    pub zero: u32,
}

/// Compressed data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Compressed {
    /// First byte, anywhere.
    pub offset: HostOffset,
    /// Bytes up to the end of the last sector: 1 to twice the cluster size. The data may end earlier, and the file too.
    pub len: u64,
}

/// State of one sub-cluster (of the cluster without them).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum L2Kind {
    /// The backing file shows through.
    Unallocated,
    /// Zeros, in no host cluster.
    ZeroPlain,
    /// Zeros, over a host cluster that is kept for the next write.
    ZeroAllocated,
    /// Data in the host cluster.
    Data,
    /// Part of a compressed cluster.
    Compressed,
}

/// Why an entry cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadEntry {
    /// The offset is not a multiple of the cluster size.
    Unaligned(u64),
    /// The offset lies in cluster 0.
    InHeader,
    /// A zero flag in a version 2 image.
    ZeroInV2,
    /// Sub-clusters that are both allocated and zero (mask).
    BothStates(u32),
    /// Allocated sub-clusters (mask) without a host cluster.
    NoOffset(u32),
    /// With a data file: an offset that is not the guest's.
    NotGuestOffset(u64, u64),
    /// With a data file: a compressed cluster.
    CompressedInDataFile,
    /// Compressed data past 2^56.
    CompressedOffset(u64),
}

impl Words {
    /// Nothing.
    pub const NONE: Self = Self { entry: 0, bitmap: 0 };

    /// Bits that must be 0 and are not. They do not keep the data from being read.
    pub fn reserved(self, layout: &Layout) -> u64 {
        if self.entry & COMPRESSED != 0 {
            let x = compressed_offset_bits(layout);
            let above = if x > 56 { ((1u64 << x) - 1) & !((1 << 56) - 1) } else { 0 };
            return self.entry & (COPIED | above);
        }
        let zero = if layout.extended { 0 } else { ZERO };
        self.entry & !(COPIED | zero | ENTRY_OFFSET_MASK)
    }

    /// What the entry for the cluster at `guest` (cluster-aligned) says.
    pub fn decode(self, layout: &Layout, guest: u64) -> Result<L2Entry, BadEntry> {
        // Bit 62 first: in a compressed entry bit 0 belongs to the offset.
        if self.entry & COMPRESSED != 0 {
            return decode_compressed(self.entry, layout).map(L2Entry::Compressed);
        }
        let copied = self.entry & COPIED != 0;
        let offset = self.entry & ENTRY_OFFSET_MASK;
        let (data, zero) = if layout.extended {
            (self.bitmap as u32, (self.bitmap >> 32) as u32)
        } else if self.entry & ZERO != 0 {
            (0, ALL)
        } else {
            (ALL, 0)
        };
        if zero != 0 && layout.version < 3 {
            return Err(BadEntry::ZeroInV2);
        }
        if data & zero != 0 {
            return Err(BadEntry::BothStates(data & zero));
        }
        // Offset 0 is an address in a data file only, where the copied flag tells it from none.
        let host = if offset != 0 || (layout.data_file && copied) { Some(HostOffset(offset)) } else { None };
        let Some(at) = host else {
            if layout.extended && data != 0 {
                return Err(BadEntry::NoOffset(data));
            }
            return Ok(L2Entry::Plain(Plain { host: None, copied, data: 0, zero }));
        };
        if !at.is_aligned(layout.cluster_size()) {
            return Err(BadEntry::Unaligned(offset));
        }
        if layout.data_file && offset != guest {
            return Err(BadEntry::NotGuestOffset(offset, guest));
        }
        Ok(L2Entry::Plain(Plain { host, copied, data, zero }))
    }
}

impl L2Entry {
    /// Nothing is mapped.
    pub const UNALLOCATED: Self = Self::Plain(Plain { host: None, copied: false, data: 0, zero: 0 });

    /// A whole cluster of data.
    pub const fn data(host: HostOffset, copied: bool) -> Self {
        Self::Plain(Plain { host: Some(host), copied, data: ALL, zero: 0 })
    }

    /// A whole cluster of zeros, over a host cluster or not.
    pub const fn zero(host: Option<HostOffset>, copied: bool) -> Self {
        Self::Plain(Plain { host, copied, data: 0, zero: ALL })
    }

    /// State of sub-cluster `index` (0 without sub-clusters).
    pub fn kind(&self, index: u32) -> L2Kind {
        match self {
            Self::Compressed(_) => L2Kind::Compressed,
            Self::Plain(p) => p.kind(index),
        }
    }

    /// Whether the host cluster's refcount is said to be exactly 1.
    pub fn is_copied(&self) -> bool {
        matches!(self, Self::Plain(p) if p.copied)
    }

    /// The words to be stored. The entry must be one that the layout can hold: states all or none without sub-clusters, no zero in version 2.
    pub fn encode(&self, layout: &Layout) -> Words {
        match self {
            Self::Compressed(c) => Words { entry: encode_compressed(*c, layout), bitmap: 0 },
            Self::Plain(p) => p.encode(layout),
        }
    }
}

impl Plain {
    /// State of sub-cluster `index`.
    pub fn kind(&self, index: u32) -> L2Kind {
        let bit = 1u32 << (index & 31);
        if self.data & bit != 0 {
            L2Kind::Data
        } else if self.zero & bit == 0 {
            L2Kind::Unallocated
        } else if self.host.is_some() {
            L2Kind::ZeroAllocated
        } else {
            L2Kind::ZeroPlain
        }
    }

    fn encode(&self, layout: &Layout) -> Words {
        debug_assert!(self.data & self.zero == 0 && (self.data == 0 || self.host.is_some()));
        debug_assert!(layout.version > 2 || self.zero == 0);
        let copied = if self.copied { COPIED } else { 0 };
        let offset = self.host.map_or(0, HostOffset::get);
        debug_assert!(offset & !ENTRY_OFFSET_MASK == 0 && offset.is_multiple_of(layout.cluster_size()));
        if layout.extended {
            return Words {
                entry: copied | offset,
                bitmap: u64::from(self.data) | u64::from(self.zero) << 32,
            };
        }
        debug_assert!(matches!((self.data, self.zero), (0, 0) | (ALL, 0) | (0, ALL)));
        Words { entry: copied | offset | if self.zero != 0 { ZERO } else { 0 }, bitmap: 0 }
    }
}

impl L1Entry {
    /// What the word of an L1 table says. Reserved bits are ignored; see [`L1_RESERVED`].
    pub fn decode(word: u64, layout: &Layout) -> Result<Self, BadEntry> {
        let offset = word & ENTRY_OFFSET_MASK;
        if !offset.is_multiple_of(layout.cluster_size()) {
            return Err(BadEntry::Unaligned(offset));
        }
        let table = (offset != 0).then_some(HostOffset(offset));
        Ok(Self { table, copied: word & COPIED != 0 })
    }

    /// The word to be stored.
    pub fn encode(self) -> u64 {
        self.table.map_or(0, HostOffset::get) | if self.copied { COPIED } else { 0 }
    }
}

/// The refcount block that a word of the refcount table points at, if there is one.
pub fn decode_reftable(word: u64, layout: &Layout) -> Result<Option<HostOffset>, BadEntry> {
    let offset = word & !511;
    if !offset.is_multiple_of(layout.cluster_size()) || offset > super::limits::FILE_OFFSET_MAX {
        return Err(BadEntry::Unaligned(offset));
    }
    Ok((offset != 0).then_some(HostOffset(offset)))
}

impl Compressed {
    /// Data of `len` bytes (1 or more) at `offset`, as an entry can describe it: up to the end of the sector. `None` if it is too long for one or lies past 2^56.
    pub fn for_data(offset: HostOffset, len: u64, layout: &Layout) -> Option<Self> {
        let end = offset.get().checked_add(len)?.checked_next_multiple_of(512)?;
        let x = compressed_offset_bits(layout);
        let sectors = end / 512 - offset.get() / 512;
        let room = 1u64 << (62 - x);
        let fits = len > 0 && sectors <= room && offset.get() < 1 << x.min(56);
        fits.then_some(Self { offset, len: end - offset.get() })
    }
}

/// Bits of a compressed entry that hold the offset; those above, up to bit 61, count sectors.
fn compressed_offset_bits(layout: &Layout) -> u32 {
    62 - (layout.cluster_bits - 8)
}

fn decode_compressed(entry: u64, layout: &Layout) -> Result<Compressed, BadEntry> {
    if layout.data_file {
        return Err(BadEntry::CompressedInDataFile);
    }
    let x = compressed_offset_bits(layout);
    let offset = entry & ((1 << x) - 1);
    if offset >= 1 << 56 {
        return Err(BadEntry::CompressedOffset(offset));
    }
    if offset < layout.cluster_size() {
        return Err(BadEntry::InHeader);
    }
    let more = (entry & (COMPRESSED - 1)) >> x;
    Ok(Compressed { offset: HostOffset(offset), len: (more + 1) * 512 - offset % 512 })
}

fn encode_compressed(c: Compressed, layout: &Layout) -> u64 {
    let x = compressed_offset_bits(layout);
    let sectors = (c.offset.get() % 512 + c.len).div_ceil(512);
    debug_assert!(sectors >= 1 && sectors <= 1 << (62 - x) && c.offset.get() < 1 << x.min(56));
    COMPRESSED | (sectors - 1) << x | c.offset.get()
}

impl BadEntry {
    /// The sentence with the place: `L2 table at 0x40000, entry 17: ...`.
    pub fn at(self, table: &str, offset: HostOffset, index: u64) -> String {
        format!("{table} at {offset}, entry {index}: {self}")
    }
}

impl fmt::Display for BadEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unaligned(offset) => write!(f, "offset {offset:#x} not aligned to a cluster"),
            Self::InHeader => f.write_str("offset inside the header cluster"),
            Self::ZeroInV2 => f.write_str("zero flag in a version 2 image"),
            Self::BothStates(mask) => write!(f, "sub-clusters {mask:#010x} both allocated and zero"),
            Self::NoOffset(mask) => write!(f, "sub-clusters {mask:#010x} allocated without an offset"),
            Self::NotGuestOffset(host, guest) => {
                write!(f, "offset {host:#x} in the data file is not the guest offset {guest:#x}")
            }
            Self::CompressedInDataFile => f.write_str("compressed cluster in an image with a data file"),
            Self::CompressedOffset(offset) => write!(f, "compressed data at {offset:#x}, past 2^56"),
        }
    }
}
