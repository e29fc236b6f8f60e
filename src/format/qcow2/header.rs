//! The header: fields, validation, and back to bytes (qcow2.md section 2).
//!
//! Two steps, since the size of the header area is in the header: [`peek`] tells how many bytes to read, [`Header::parse`] takes them. Nothing is
//! allocated that a field of the header sizes beyond cluster 0. What is not understood is kept: unknown extensions, unknown feature bits that may be
//! there, and header bytes past the fields known here come back byte for byte from [`Header::encode`].

use super::addr::HostOffset;
use super::extension::{self, BitmapsPointer, CryptoPointer, Extension, u32_at, u64_at};
use super::feature::{self, Autoclear, Compatible, Incompatible};
use super::layout::Layout;
use super::limits::*;
use crate::error::{Error, Result};

/// First bytes of an image.
pub const MAGIC: u32 = 0x5146_49fb;
/// Bytes that [`peek`] needs.
pub const PEEK_LEN: usize = 104;

/// What an image is opened for; decides what may be broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To be read or written.
    Use,
    /// To be repaired: the refcount table may be missing, the snapshot table out of bounds.
    Repair,
}

/// How guest data is encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CryptMethod {
    /// Not at all.
    None,
    /// AES-CBC with the guest offset as tweak; obsolete.
    Aes,
    /// LUKS.
    Luks,
}

/// How clusters are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Raw deflate.
    Zlib,
    /// Zstandard.
    Zstd,
}

/// A header with its extensions and the backing file name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// log2 of the cluster size.
    pub cluster_bits: u32,
    /// Virtual size in bytes as stored; see [`Header::usable_size`].
    pub size: u64,
    /// Encryption.
    pub crypt: CryptMethod,
    /// Entries of the active L1 table; may be more than the size needs.
    pub l1_entries: u32,
    /// Active L1 table.
    pub l1_offset: HostOffset,
    /// Refcount table.
    pub reftable_offset: HostOffset,
    /// Clusters of the refcount table.
    pub reftable_clusters: u32,
    /// Internal snapshots.
    pub snapshots: u32,
    /// Snapshot table; meaningless without snapshots.
    pub snapshots_offset: HostOffset,
    /// Incompatible features; all known.
    pub incompatible: Incompatible,
    /// Compatible features, unknown bits included.
    pub compatible: Compatible,
    /// Autoclear features, unknown bits included.
    pub autoclear: Autoclear,
    /// log2 of the refcount width in bits.
    pub refcount_order: u32,
    /// Compression type.
    pub compression: Compression,
    /// Bytes of the header: 72, or 104 and more.
    pub header_length: u32,
    /// Header bytes from 105 on; not understood, kept.
    pub tail: Vec<u8>,
    /// Extensions in their order, without the end marker.
    pub extensions: Vec<Extension>,
    /// Name of the backing file as stored: a path, a `json:` description or a URL, in no particular encoding.
    pub backing_name: Option<Vec<u8>>,
}

/// What the first bytes of a file say: its cluster size, with which cluster 0 is to be read.
/// `bytes` are the first [`PEEK_LEN`] bytes of the file; what lies past its end is zero.
pub fn peek(bytes: &[u8; PEEK_LEN]) -> Result<u32> {
    let magic = u32_at(bytes, 0);
    if magic != MAGIC {
        return Err(bad(0, format!("not a qcow2 image: the magic is {magic:#010x}, not {MAGIC:#010x}")));
    }
    let version = u32_at(bytes, 4);
    if !(2..=3).contains(&version) {
        return Err(Error::unsupported(format!("header, offset 4: unsupported qcow2 version {version}")));
    }
    let bits = u32_at(bytes, 20);
    if !CLUSTER_BITS.contains(&bits) {
        return Err(bad(20, format!("cluster_bits is {bits}, not in {CLUSTER_BITS:?}")));
    }
    Ok(bits)
}

impl Header {
    /// Parses and validates the header. `cluster` is cluster 0 (zeros where the file is shorter), `file_len` the length of the file.
    pub fn parse(cluster: &[u8], file_len: u64, purpose: Purpose) -> Result<Self> {
        let Some(first) = cluster.first_chunk::<PEEK_LEN>() else {
            return Err(bad(0, format!("the header area has {} bytes", cluster.len())));
        };
        let cluster_bits = peek(first)?;
        let cluster_size = 1u64 << cluster_bits;
        if cluster.len() as u64 != cluster_size {
            return Err(bad(
                20,
                format!("the header area has {} bytes, not those of a cluster", cluster.len()),
            ));
        }
        let version = u32_at(cluster, 4);
        let header_length = if version == 2 { HEADER_LEN_V2 } else { u32_at(cluster, 100) };
        if version == 3
            && (header_length < HEADER_LEN_V3_MIN
                || u64::from(header_length) > cluster_size
                || header_length % 8 != 0)
        {
            return Err(bad(
                100,
                format!(
                    "header_length is {header_length}, not a multiple of 8 from {HEADER_LEN_V3_MIN} to the cluster size"
                ),
            ));
        }
        let (backing_name, area_end) = parse_backing_name(cluster)?;
        let area = cluster.get(header_length as usize..area_end).unwrap_or_default();
        // The extensions come before the feature bits are judged: they may hold the names for the message. If they are broken, the bits are judged
        // without names, for an unknown layout may be the reason.
        let extensions = extension::parse(area, u64::from(header_length));
        let field = |at| if version == 2 { 0 } else { u64_at(cluster, at) };
        let table = extensions.as_ref().ok().and_then(|e| extension::find(e, extension::FEATURE_TABLE));
        feature::check_incompatible(field(72), table)?;
        let extensions = extensions?;
        let crypt = match u32_at(cluster, 32) {
            0 => CryptMethod::None,
            1 => CryptMethod::Aes,
            2 => CryptMethod::Luks,
            other => {
                return Err(Error::unsupported(format!(
                    "header, offset 32: unsupported encryption method {other}"
                )));
            }
        };
        let has_type = header_length > HEADER_LEN_V3_MIN;
        let compression_type = if has_type { cluster[104] } else { 0 };
        let incompatible = Incompatible::from_bits_retain(field(72));
        feature::check_compression(incompatible, compression_type)?;
        let header = Self {
            version,
            cluster_bits,
            size: u64_at(cluster, 24),
            crypt,
            l1_entries: u32_at(cluster, 36),
            l1_offset: HostOffset(u64_at(cluster, 40)),
            reftable_offset: HostOffset(u64_at(cluster, 48)),
            reftable_clusters: u32_at(cluster, 56),
            snapshots: u32_at(cluster, 60),
            snapshots_offset: HostOffset(u64_at(cluster, 64)),
            incompatible,
            compatible: Compatible::from_bits_retain(field(80)),
            autoclear: Autoclear::from_bits_retain(field(88)),
            refcount_order: if version == 2 { 4 } else { u32_at(cluster, 96) },
            compression: if compression_type == 1 { Compression::Zstd } else { Compression::Zlib },
            header_length,
            tail: if has_type { cluster[105..header_length as usize].to_vec() } else { Vec::new() },
            extensions,
            backing_name,
        };
        header.validate(file_len, purpose)?;
        Ok(header)
    }

    /// The shape of the tables, with whole tables as slices.
    pub fn layout(&self) -> Layout {
        Layout {
            version: self.version,
            cluster_bits: self.cluster_bits,
            slice_bits: self.cluster_bits,
            extended: self.incompatible.contains(Incompatible::EXTENDED_L2),
            refcount_order: self.refcount_order,
            data_file: self.incompatible.contains(Incompatible::DATA_FILE),
        }
    }

    /// Bytes of the disk: the virtual size in whole sectors.
    pub fn usable_size(&self) -> u64 {
        self.size & !511
    }

    /// Driver name of the backing file, if one is stored.
    pub fn backing_format(&self) -> Option<&[u8]> {
        extension::find(&self.extensions, extension::BACKING_FORMAT)
    }

    /// Name of the external data file, if one is stored. Only meaningful with the feature bit.
    pub fn data_file_name(&self) -> Option<&[u8]> {
        extension::find(&self.extensions, extension::DATA_FILE)
    }

    /// Where the LUKS header is; checked when the header was parsed.
    pub fn crypto(&self, file_len: u64) -> Option<Result<CryptoPointer>> {
        extension::find(&self.extensions, extension::CRYPTO)
            .map(|d| extension::parse_crypto(d, 1 << self.cluster_bits, file_len))
    }

    /// Where the bitmap directory is. Without the autoclear bit what it says is void.
    pub fn bitmaps(&self) -> Option<Result<BitmapsPointer>> {
        extension::find(&self.extensions, extension::BITMAPS)
            .map(|d| extension::parse_bitmaps(d, 1 << self.cluster_bits))
    }

    /// The bytes at the start of the file: header, extensions, backing file name. At most a cluster, or an error if they do not fit. Bytes of
    /// cluster 0 behind them have no meaning and need not be rewritten.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let cluster_size = 1usize << self.cluster_bits;
        let name = self.backing_name.as_deref().unwrap_or_default();
        let mut out = Vec::with_capacity(1024);
        out.resize(self.header_length as usize, 0);
        let mut at = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        at(0, &MAGIC.to_be_bytes());
        at(4, &self.version.to_be_bytes());
        at(20, &self.cluster_bits.to_be_bytes());
        at(24, &self.size.to_be_bytes());
        let crypt: u32 = match self.crypt {
            CryptMethod::None => 0,
            CryptMethod::Aes => 1,
            CryptMethod::Luks => 2,
        };
        at(32, &crypt.to_be_bytes());
        at(36, &self.l1_entries.to_be_bytes());
        at(40, &self.l1_offset.get().to_be_bytes());
        at(48, &self.reftable_offset.get().to_be_bytes());
        at(56, &self.reftable_clusters.to_be_bytes());
        at(60, &self.snapshots.to_be_bytes());
        at(64, &self.snapshots_offset.get().to_be_bytes());
        if self.version > 2 {
            at(72, &self.incompatible.bits().to_be_bytes());
            at(80, &self.compatible.bits().to_be_bytes());
            at(88, &self.autoclear.bits().to_be_bytes());
            at(96, &self.refcount_order.to_be_bytes());
            at(100, &self.header_length.to_be_bytes());
            if self.header_length > HEADER_LEN_V3_MIN {
                at(104, &[(self.compression == Compression::Zstd) as u8]);
                at(105, &self.tail);
            }
        }
        extension::append(&self.extensions, &mut out, cluster_size.saturating_sub(name.len()));
        if !name.is_empty() {
            let offset = out.len() as u64;
            out[8..16].copy_from_slice(&offset.to_be_bytes());
            out[16..20].copy_from_slice(&(name.len() as u32).to_be_bytes());
            out.extend(name);
        }
        if out.len() > cluster_size {
            return Err(Error::new(
                libc::ENOSPC,
                crate::error::Code::Invalid,
                format!(
                    "header, extensions and backing file name need {} bytes, more than a cluster ({cluster_size})",
                    out.len()
                ),
            ));
        }
        Ok(out)
    }

    fn validate(&self, file_len: u64, purpose: Purpose) -> Result<()> {
        let cluster_size = 1u64 << self.cluster_bits;
        let extended = self.incompatible.contains(Incompatible::EXTENDED_L2);
        if extended && !CLUSTER_BITS_EXTENDED.contains(&self.cluster_bits) {
            return Err(bad(
                20,
                format!(
                    "cluster_bits is {}, not in {CLUSTER_BITS_EXTENDED:?} as extended L2 entries need",
                    self.cluster_bits
                ),
            ));
        }
        if self.refcount_order > 6 {
            return Err(bad(96, format!("refcount_order is {}, larger than 6", self.refcount_order)));
        }
        match (self.crypt, self.crypto(file_len)) {
            (CryptMethod::Luks, None) => {
                return Err(bad(
                    32,
                    "the encryption method is LUKS, but there is no pointer to a LUKS header",
                ));
            }
            (CryptMethod::Luks, Some(pointer)) => drop(pointer?),
            (_, Some(_)) => {
                return Err(bad(
                    32,
                    "there is a pointer to a LUKS header, but the encryption method is not LUKS",
                ));
            }
            (_, None) => {}
        }
        self.validate_l1(cluster_size)?;
        self.validate_reftable(cluster_size, purpose)?;
        if purpose == Purpose::Use {
            self.validate_snapshots(cluster_size)?;
        }
        Ok(())
    }

    fn validate_l1(&self, cluster_size: u64) -> Result<()> {
        let needed = self.layout().l1_entries_for(self.usable_size()).map_err(|e| bad(24, e.full_text()))?;
        let entries = u64::from(self.l1_entries);
        if entries > L1_ENTRIES_MAX {
            return Err(bad(
                36,
                format!("active L1 table: {entries} entries, more than {L1_ENTRIES_MAX} (32 MiB)"),
            ));
        }
        if entries < needed {
            return Err(bad(
                36,
                format!("active L1 table: {entries} entries, but the virtual size needs {needed}"),
            ));
        }
        if entries > 0 {
            self.check_place("active L1 table", 40, self.l1_offset, entries * 8, cluster_size)?;
        }
        Ok(())
    }

    fn validate_reftable(&self, cluster_size: u64, purpose: Purpose) -> Result<()> {
        let bytes = u64::from(self.reftable_clusters) * cluster_size;
        if bytes > REFTABLE_BYTES_MAX {
            return Err(bad(56, format!("refcount table: {bytes} bytes, more than {REFTABLE_BYTES_MAX}")));
        }
        if bytes == 0 {
            return match purpose {
                Purpose::Repair => Ok(()),
                Purpose::Use => Err(bad(56, "the image has no refcount table")),
            };
        }
        self.check_place("refcount table", 48, self.reftable_offset, bytes, cluster_size)
    }

    fn validate_snapshots(&self, cluster_size: u64) -> Result<()> {
        if self.snapshots > SNAPSHOTS_MAX {
            return Err(bad(60, format!("{} snapshots, more than {SNAPSHOTS_MAX}", self.snapshots)));
        }
        if self.snapshots == 0 {
            return Ok(());
        }
        // An entry has at least 40 bytes; how long the table really is turns out when it is read.
        let least = u64::from(self.snapshots) * 40;
        self.check_place("snapshot table", 64, self.snapshots_offset, least, cluster_size)
    }

    /// Whether a structure can lie where the header field at `field` says.
    fn check_place(
        &self,
        what: &str,
        field: u64,
        offset: HostOffset,
        len: u64,
        cluster_size: u64,
    ) -> Result<()> {
        if !offset.is_aligned(cluster_size) {
            return Err(bad(field, format!("{what}: offset {offset} is not aligned to {cluster_size}")));
        }
        if offset.get() == 0 {
            return Err(bad(field, format!("{what}: offset 0 is inside the header cluster")));
        }
        if offset.checked_add(len).is_none() {
            return Err(bad(field, format!("{what}: {len} bytes at {offset} reach past the largest file")));
        }
        Ok(())
    }
}

/// The backing file name, and the end of the extension area.
fn parse_backing_name(cluster: &[u8]) -> Result<(Option<Vec<u8>>, usize)> {
    let (offset, len) = (u64_at(cluster, 8), u64::from(u32_at(cluster, 16)));
    if offset == 0 {
        return Ok((None, cluster.len()));
    }
    if len > BACKING_NAME_MAX {
        return Err(bad(16, format!("backing file name: {len} bytes, more than {BACKING_NAME_MAX}")));
    }
    let size = cluster.len() as u64;
    if offset >= size || len > size - offset {
        return Err(bad(
            8,
            format!(
                "backing file name: {len} bytes at {offset:#x} do not lie in the first cluster ({size} bytes)"
            ),
        ));
    }
    let name = cluster[offset as usize..(offset + len) as usize].to_vec();
    // An empty name is no name; the offset still ends the extensions.
    Ok(((!name.is_empty()).then_some(name), offset as usize))
}

/// An error in the header field at `offset`.
pub(super) fn bad(offset: u64, text: impl std::fmt::Display) -> Error {
    Error::invalid(format!("header, offset {offset}: {text}"))
}
