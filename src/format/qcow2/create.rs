//! Creates an image: options to a placement of the structures (pure), and the placement to a file.
//!
//! Everything a new image needs lies in one piece from the start of the file: header, refcount table, refcount blocks, L1 table and, with preallocation, L2
//! tables and data. So the refcounts are ones up to the end of it. The header is written last, behind a barrier: a creation that is
//! cut short leaves no image rather than half of one (rule 2).
//!
//! What is given is a node that the caller has created, locked and may let us truncate. A node whose length is fixed (a device) is used as it is, and what lies on it
//! is overwritten where the image needs it.

use super::addr::HostOffset;
use super::entry::{COPIED, L1Entry, L2Entry, Plain};
use super::extension::{self, Extension};
use super::feature::{self, Autoclear, Compatible, Incompatible};
use super::header::{Compression, CryptMethod, Header};
use super::layout::Layout;
use super::limits::*;
use super::refcount::block;
use crate::error::{Error, IoResult, Result};
use crate::limits::BATCH_LEN;
use crate::node::{Growth, Node};
use crate::queue::Cx;
use crate::request::{Buffers, Class, Flags, Request};
use crate::units::{ByteRange, align_up};

/// Version of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compat {
    /// 2: readable by everything, without the newer features.
    V010,
    /// 3.
    V11,
}

/// What is allocated when an image is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preallocation {
    /// Nothing.
    Off,
    /// L2 tables and mappings; the clusters are holes in the file.
    Metadata,
    /// The same, with the space of the clusters reserved.
    Falloc,
    /// The same, with the clusters written.
    Full,
}

/// A backing file as it is named in the image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingName {
    /// Path, `json:` description or URL, stored as it is.
    pub name: Vec<u8>,
    /// Its format; never left out, since a missing one would have to be probed.
    pub format: String,
}

/// An external data file as it is named in the image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataFileName {
    /// Path, stored as it is.
    pub name: Vec<u8>,
    /// Whether the data file is to be a valid raw image of the disk at all times.
    pub raw: bool,
}

/// How to create an image. The defaults are those of qemu-img; see [`CreateOptions::for_overlay`] for better ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CreateOptions {
    /// Virtual size in bytes; rounded up to 512.
    pub size: u64,
    /// Version of the format.
    pub compat: Compat,
    /// Bytes of a cluster: a power of two from 512 to 2 MiB.
    pub cluster_size: u64,
    /// Whether clusters have 32 sub-clusters. Needs clusters of 16 KiB at least.
    pub extended_l2: bool,
    /// Width of refcounts: a power of two up to 64.
    pub refcount_bits: u32,
    /// Whether refcounts are written late.
    pub lazy_refcounts: bool,
    /// What is allocated at once.
    pub preallocation: Preallocation,
    /// How clusters are compressed.
    pub compression: Compression,
    /// The backing file.
    pub backing: Option<BackingName>,
    /// The external data file.
    pub data_file: Option<DataFileName>,
}

/// Where the structures of a new image lie. All offsets and lengths in clusters, one behind the other, from cluster 0 (the header) on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Placement {
    reftable: Span,
    refblocks: Span,
    l1: Span,
    l1_entries: u64,
    l2: Span,
    data: Span,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    first: u64,
    count: u64,
}

impl Span {
    const fn end(self) -> u64 {
        self.first + self.count
    }
}

impl CreateOptions {
    /// What qemu-img makes of `size` bytes without options.
    pub fn new(size: u64) -> Self {
        Self {
            size,
            compat: Compat::V11,
            cluster_size: 64 << 10,
            extended_l2: false,
            refcount_bits: 16,
            lazy_refcounts: false,
            preallocation: Preallocation::Off,
            compression: Compression::Zlib,
            backing: None,
            data_file: None,
        }
    }

    /// The library's default for an overlay: clusters of 128 KiB with sub-clusters of 4 KiB. A guest's aligned 4 KiB write then needs neither a read of the backing file nor
    /// more than itself written, where 64 KiB clusters copy sixteen times as much; the tables are no larger than theirs (16 bytes for 128 KiB),
    /// and one part of a table (32 entries in 512 bytes) still maps 4 MiB. Safe in that nothing is lost late: refcounts
    /// are kept, unlike with `lazy_refcounts`. QEMU reads it since 5.2.
    pub fn for_overlay(size: u64, backing: BackingName) -> Self {
        Self { extended_l2: true, cluster_size: 128 << 10, backing: Some(backing), ..Self::new(size) }
    }

    /// The virtual size as it is stored.
    pub fn stored_size(&self) -> Result<u64> {
        let size = self.size.checked_next_multiple_of(512).filter(|s| *s <= FILE_OFFSET_MAX);
        size.ok_or_else(|| Error::invalid(format!("size {} is larger than any disk", self.size)))
    }

    /// Refuses what cannot be combined, naming the options.
    pub fn check(&self) -> Result<()> {
        let refuse = |text: &str| Err(Error::invalid(text.to_owned()));
        let bits = self.cluster_size.trailing_zeros();
        if !self.cluster_size.is_power_of_two() || !CLUSTER_BITS.contains(&bits) {
            return refuse("option 'cluster_size' must be a power of two from 512 to 2M");
        }
        if !self.refcount_bits.is_power_of_two() || self.refcount_bits > 64 {
            return refuse("option 'refcount_bits' must be a power of two from 1 to 64");
        }
        if self.extended_l2 && !CLUSTER_BITS_EXTENDED.contains(&bits) {
            return refuse("option 'extended_l2' needs a 'cluster_size' of 16k at least");
        }
        if self.compat == Compat::V010 {
            let newer = [
                (self.extended_l2, "extended_l2"),
                (self.lazy_refcounts, "lazy_refcounts"),
                (self.refcount_bits != 16, "refcount_bits"),
                (self.compression != Compression::Zlib, "compression_type"),
                (self.data_file.is_some(), "data_file"),
            ];
            if let Some((_, option)) = newer.iter().find(|(used, _)| *used) {
                return Err(Error::invalid(format!("option '{option}' needs compat=1.1")));
            }
        }
        if let Some(backing) = &self.backing {
            if backing.name.is_empty() || backing.name.len() as u64 > BACKING_NAME_MAX {
                return Err(Error::invalid(format!(
                    "option 'backing_file' must have from 1 to {BACKING_NAME_MAX} bytes"
                )));
            }
            if backing.format.is_empty() {
                return refuse("option 'backing_fmt' is required with 'backing_file'");
            }
            if self.data_file.as_ref().is_some_and(|d| d.raw) {
                return refuse("options 'backing_file' and 'data_file_raw' exclude each other");
            }
            if self.preallocation != Preallocation::Off && !self.extended_l2 {
                return refuse("option 'preallocation' goes with 'backing_file' only with extended_l2=on");
            }
        }
        if self.data_file.as_ref().is_some_and(|d| d.name.is_empty()) {
            return refuse("option 'data_file' is empty");
        }
        Ok(())
    }

    /// Whether an image file can hold it. Errors: EFBIG.
    pub fn placeable(&self) -> Result<()> {
        self.place(self.stored_size()?).map(|_| ())
    }

    fn layout(&self) -> Layout {
        Layout {
            version: if self.compat == Compat::V010 { 2 } else { 3 },
            cluster_bits: self.cluster_size.trailing_zeros(),
            slice_bits: self.cluster_size.trailing_zeros(),
            extended: self.extended_l2,
            refcount_order: self.refcount_bits.trailing_zeros(),
            data_file: self.data_file.is_some(),
        }
    }

    /// What is preallocated: a raw data file maps everything from the start.
    fn preallocation(&self) -> Preallocation {
        match (self.preallocation, &self.data_file) {
            (Preallocation::Off, Some(DataFileName { raw: true, .. })) => Preallocation::Metadata,
            (other, _) => other,
        }
    }

    fn header(&self, place: &Placement, size: u64) -> Header {
        let layout = self.layout();
        let v3 = layout.version > 2;
        let mut extensions = Vec::new();
        let mut add = |magic, data: &[u8]| extensions.push(Extension { magic, data: data.to_vec() });
        if let Some(backing) = &self.backing {
            add(extension::BACKING_FORMAT, backing.format.as_bytes());
        }
        if let Some(data) = &self.data_file {
            add(extension::DATA_FILE, &data.name);
        }
        if v3 {
            add(extension::FEATURE_TABLE, &feature::name_table());
        }
        let zstd = self.compression == Compression::Zstd;
        let mut incompatible = Incompatible::empty();
        incompatible.set(Incompatible::DATA_FILE, self.data_file.is_some());
        incompatible.set(Incompatible::COMPRESSION, zstd);
        incompatible.set(Incompatible::EXTENDED_L2, self.extended_l2);
        let mut compatible = Compatible::empty();
        compatible.set(Compatible::LAZY_REFCOUNTS, self.lazy_refcounts);
        let mut autoclear = Autoclear::empty();
        autoclear.set(Autoclear::RAW_DATA, self.data_file.as_ref().is_some_and(|d| d.raw));
        Header {
            version: layout.version,
            cluster_bits: layout.cluster_bits,
            size,
            crypt: CryptMethod::None,
            l1_entries: place.l1_entries as u32,
            l1_offset: if place.l1_entries == 0 {
                HostOffset(0)
            } else {
                HostOffset(place.l1.first << layout.cluster_bits)
            },
            reftable_offset: HostOffset(place.reftable.first << layout.cluster_bits),
            reftable_clusters: place.reftable.count as u32,
            snapshots: 0,
            snapshots_offset: HostOffset(0),
            incompatible,
            compatible,
            autoclear,
            refcount_order: layout.refcount_order,
            compression: self.compression,
            header_length: if v3 { HEADER_LEN_V3 } else { HEADER_LEN_V2 },
            tail: if v3 { vec![0; (HEADER_LEN_V3 - 105) as usize] } else { Vec::new() },
            extensions,
            backing_name: self.backing.as_ref().map(|b| b.name.clone()),
        }
    }

    fn place(&self, size: u64) -> Result<Placement> {
        let layout = self.layout();
        let l1_entries = layout.l1_entries_for(size)?;
        let l1 = layout.clusters_for(l1_entries * 8);
        let (l2, data) = match self.preallocation() {
            Preallocation::Off => (0, 0),
            _ if layout.data_file => (l1_entries, 0),
            _ => (l1_entries, layout.clusters_for(size)),
        };
        // More blocks need a larger table, which needs more blocks: the counts only rise, and stay below what all clusters need twice over.
        let (mut reftable, mut refblocks) = (1u64, 1u64);
        loop {
            let total = 1 + reftable + refblocks + l1 + l2 + data;
            let blocks = total.div_ceil(layout.refblock_entries()).max(1);
            let table = layout.clusters_for(blocks * 8).max(1);
            if (table, blocks) == (reftable, refblocks) {
                break;
            }
            (reftable, refblocks) = (table.max(reftable), blocks.max(refblocks));
        }
        let bytes = reftable << layout.cluster_bits;
        if bytes > REFTABLE_BYTES_MAX {
            return Err(Error::new(
                libc::EFBIG,
                crate::error::Code::Invalid,
                format!(
                    "the refcount table would need {bytes} bytes, more than {REFTABLE_BYTES_MAX}; use larger clusters"
                ),
            ));
        }
        let reftable = Span { first: 1, count: reftable };
        let refblocks = Span { first: reftable.end(), count: refblocks };
        let l1 = Span { first: refblocks.end(), count: l1 };
        let l2 = Span { first: l1.end(), count: l2 };
        let data = Span { first: l2.end(), count: data };
        if data.end() > ENTRY_OFFSET_MASK >> layout.cluster_bits {
            return Err(Error::new(
                libc::EFBIG,
                crate::error::Code::Invalid,
                "the preallocated image would be larger than an image file can be",
            ));
        }
        Ok(Placement { reftable, refblocks, l1, l1_entries, l2, data })
    }
}

/// Creates an image on `file`, which is truncated if it can be, and durable when this ends. With [`CreateOptions::data_file`], `data_file` is the node to be
/// used with it; it gets the size of the disk and is otherwise left as it is (except by preallocation).
///
/// Errors: EINVAL and a sentence that names the option for what cannot be combined, before anything is touched; EFBIG for sizes that the format cannot
/// hold; else what the node answered.
pub async fn create(
    cx: &Cx,
    file: &dyn Node,
    data_file: Option<&dyn Node>,
    options: &CreateOptions,
) -> Result<()> {
    options.check()?;
    let size = options.stored_size()?;
    let place = options.place(size)?;
    let mut header = options.header(&place, size);
    let header = header.encode().or_else(|e| {
        // The names of features are for messages only; in a small cluster the name of the backing file comes first.
        let had = header.extensions.len();
        header.extensions.retain(|e| e.magic != extension::FEATURE_TABLE);
        if header.extensions.len() < had { header.encode() } else { Err(e) }
    })?;
    if options.data_file.is_some() != data_file.is_some() {
        return Err(Error::invalid("option 'data_file' and the node for it go together"));
    }
    let failed = |e| Error::io(e, "cannot create the image");
    Writer { cx, file, data_file, options, layout: options.layout(), place, size }
        .run(&header)
        .await
        .map_err(failed)
}

struct Writer<'a> {
    cx: &'a Cx,
    file: &'a dyn Node,
    data_file: Option<&'a dyn Node>,
    options: &'a CreateOptions,
    layout: Layout,
    place: Placement,
    size: u64,
}

impl Writer<'_> {
    async fn run(&self, header: &[u8]) -> IoResult {
        let metadata_end = self.metadata_end();
        let end = if self.place.data.count > 0 { self.bytes(self.place.data.end()) } else { metadata_end };
        let align = u64::from(self.file.limits().request_align.max(1));
        let fresh = self.truncate(self.file, align_up(end, align)).await?;
        if !fresh {
            // Old bytes must not be taken for tables, nor for the data of mapped clusters.
            self.zero(self.file, ByteRange { offset: 0, len: end }).await?;
        } else if self.layout.cluster_size() <= BATCH_LEN {
            // As large on the disk as an image that others make: no hole between the tables.
            self.write(0, vec![0; self.layout.cluster_size() as usize]).await?;
        }
        if let Some(data) = self.data_file
            && !self.truncate(data, self.size).await?
            && data.limits().size < self.size
        {
            return Err(crate::error::IoError::os(libc::ENOSPC));
        }
        self.reftable().await?;
        self.refblocks().await?;
        self.l1().await?;
        self.l2().await?;
        self.preallocate().await?;
        self.flush().await?;
        self.write(0, header.to_vec()).await?;
        self.flush().await
    }

    /// End of the tables in bytes; the L1 table ends with its last entry.
    fn metadata_end(&self) -> u64 {
        if self.place.l2.count > 0 {
            self.bytes(self.place.l2.end())
        } else if self.place.l1_entries > 0 {
            self.bytes(self.place.l1.first) + self.place.l1_entries * 8
        } else {
            self.bytes(self.place.refblocks.end())
        }
    }

    const fn bytes(&self, clusters: u64) -> u64 {
        clusters << self.layout.cluster_bits
    }

    /// Empties a node and gives it `size` zero bytes; false if its length is fixed, and then it is as it was.
    async fn truncate(&self, node: &dyn Node, size: u64) -> IoResult<bool> {
        let emptied = node.resize(self.cx, 0, Growth::Sparse).await;
        match emptied {
            Ok(()) => node.resize(self.cx, size, Growth::Sparse).await.map(|()| true),
            Err(e) if e.errno == libc::ENOTSUP => {
                if node.limits().size < size {
                    return Err(crate::error::IoError::os(libc::ENOSPC));
                }
                Ok(false)
            }
            Err(e) => Err(e),
        }
    }

    async fn zero(&self, node: &dyn Node, range: ByteRange) -> IoResult {
        if range.is_empty() {
            return Ok(());
        }
        let req = Request::write_zeroes(range, Flags::empty()).class(Class::Background);
        self.cx.run(node, req).await
    }

    async fn write(&self, offset: u64, bytes: Vec<u8>) -> IoResult {
        let req = Request::write(offset, Buffers::from_bytes(&bytes)).class(Class::Background);
        self.cx.run(self.file, req).await
    }

    /// Writes a table of big-endian words, piece by piece.
    async fn words(&self, offset: u64, count: u64, word: impl Fn(u64) -> u64) -> IoResult {
        let step = BATCH_LEN / 8;
        for first in (0..count).step_by(step as usize) {
            let last = (first + step).min(count);
            let bytes = (first..last).flat_map(|index| word(index).to_be_bytes()).collect();
            self.write(offset + first * 8, bytes).await?;
        }
        Ok(())
    }

    async fn reftable(&self) -> IoResult {
        let blocks = self.place.refblocks;
        let entries = self.layout.reftable_entries(self.place.reftable.count as u32);
        let word = |index| if index < blocks.count { self.bytes(blocks.first + index) } else { 0 };
        self.words(self.bytes(self.place.reftable.first), entries, word).await
    }

    async fn refblocks(&self) -> IoResult {
        let (used, per_block) = (self.place.data.end(), self.layout.refblock_entries());
        let cluster = self.layout.cluster_size() as usize;
        for index in 0..self.place.refblocks.count {
            let counted = used.saturating_sub(index * per_block).min(per_block);
            let mut bytes = vec![0; cluster];
            for at in 0..counted as usize {
                // One fits every width.
                let _ = block::set(&mut bytes, self.layout.refcount_order, at, 1);
            }
            self.write(self.bytes(self.place.refblocks.first + index), bytes).await?;
        }
        Ok(())
    }

    async fn l1(&self) -> IoResult {
        let l2 = self.place.l2;
        let word = |index| {
            let table = (index < l2.count).then(|| HostOffset(self.bytes(l2.first + index)));
            L1Entry { table, copied: table.is_some() }.encode()
        };
        self.words(self.bytes(self.place.l1.first), self.place.l1_entries, word).await
    }

    async fn l2(&self) -> IoResult {
        let words = self.layout.entry_words() as u64;
        let clusters = self.layout.clusters_for(self.size);
        let entry = |index: u64| {
            let at = self.bytes(if self.layout.data_file { index } else { self.place.data.first + index });
            if self.layout.extended {
                // A place is set aside; what the guest reads is still what lies below.
                let plain = Plain { host: Some(HostOffset(at)), copied: true, data: 0, zero: 0 };
                return L2Entry::Plain(plain).encode(&self.layout).entry;
            }
            debug_assert!(at != 0 || self.layout.data_file);
            at | COPIED
        };
        let word = |index: u64| {
            let (cluster, part) = (index / words, index % words);
            if cluster < clusters && part == 0 { entry(cluster) } else { 0 }
        };
        let count = self.place.l2.count << (self.layout.cluster_bits - 3);
        self.words(self.bytes(self.place.l2.first), count, word).await
    }

    /// Space for the data.
    async fn preallocate(&self) -> IoResult {
        let (node, range) = match self.data_file {
            Some(data) => (data, ByteRange { offset: 0, len: self.size }),
            None => {
                let data = self.place.data;
                (self.file, ByteRange { offset: self.bytes(data.first), len: self.bytes(data.count) })
            }
        };
        match self.options.preallocation() {
            Preallocation::Off | Preallocation::Metadata => Ok(()),
            _ if range.is_empty() => Ok(()),
            Preallocation::Falloc => {
                // Cut off and grown again, with its space this time. A node whose length is fixed has its space.
                match node.resize(self.cx, range.offset, Growth::Sparse).await {
                    Ok(()) => node.resize(self.cx, range.end(), Growth::Reserved).await,
                    Err(e) if e.errno == libc::ENOTSUP => Ok(()),
                    Err(e) => Err(e),
                }
            }
            Preallocation::Full => {
                let zeros = Buffers::alloc(BATCH_LEN.min(range.len) as usize, 4096);
                for offset in (range.offset..range.end()).step_by(BATCH_LEN as usize) {
                    let len = BATCH_LEN.min(range.end() - offset);
                    let piece = zeros.slice(0, len as usize);
                    self.cx.run(node, Request::write(offset, piece).class(Class::Background)).await?;
                }
                Ok(())
            }
        }
    }

    async fn flush(&self) -> IoResult {
        for node in [Some(self.file), self.data_file].into_iter().flatten() {
            self.cx.run(node, Request::flush().class(Class::Background)).await?;
        }
        Ok(())
    }
}
