//! Feature bits and their names (qcow2.md section 1).

use super::header::bad;
use crate::error::{Error, Result};

bitflags::bitflags! {
    /// Bits without which the image cannot be understood; an unknown one is refused.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct Incompatible: u64 {
        /// Refcounts may be stale.
        const DIRTY = 1;
        /// Damage has been found; no writing but for repair.
        const CORRUPT = 2;
        /// Guest data lies in an external file.
        const DATA_FILE = 4;
        /// The compression type is not zlib.
        const COMPRESSION = 8;
        /// L2 entries have sub-cluster bitmaps.
        const EXTENDED_L2 = 16;
    }

    /// Bits that may be ignored.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct Compatible: u64 {
        /// Refcounts are written late, under the dirty bit.
        const LAZY_REFCOUNTS = 1;
    }

    /// Bits that a writer clears unless it knows them.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
    pub struct Autoclear: u64 {
        /// The bitmap extension is consistent.
        const BITMAPS = 1;
        /// The data file reads as the disk does.
        const RAW_DATA = 2;
    }
}

/// The field that a bit belongs to; the numbers are those of the name table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FeatureKind {
    /// Header bytes 72-79.
    Incompatible = 0,
    /// Header bytes 80-87.
    Compatible = 1,
    /// Header bytes 88-95.
    Autoclear = 2,
}

/// Names of all known bits, in the order in which the table of a new image has them: kind, bit, name.
pub const KNOWN: &[(FeatureKind, u8, &str)] = &[
    (FeatureKind::Incompatible, 0, "dirty bit"),
    (FeatureKind::Incompatible, 1, "corrupt bit"),
    (FeatureKind::Incompatible, 2, "external data file"),
    (FeatureKind::Incompatible, 3, "compression type"),
    (FeatureKind::Incompatible, 4, "extended L2 entries"),
    (FeatureKind::Compatible, 0, "lazy refcounts"),
    (FeatureKind::Autoclear, 0, "bitmaps"),
    (FeatureKind::Autoclear, 1, "raw external data"),
];

/// Bytes of an entry of the name table: kind, bit, 46 bytes of name.
const ENTRY_LEN: usize = 48;

/// The name table of a new image.
pub fn name_table() -> Vec<u8> {
    let mut table = Vec::with_capacity(KNOWN.len() * ENTRY_LEN);
    for (kind, bit, name) in KNOWN {
        let start = table.len();
        table.extend([*kind as u8, *bit]);
        table.extend(name.as_bytes());
        table.resize(start + ENTRY_LEN, 0);
    }
    table
}

/// Name of a bit according to `table` (the extension's data, which may be anything), printable and at most 46 characters.
pub fn name_in(table: &[u8], kind: FeatureKind, bit: u8) -> Option<String> {
    table.chunks_exact(ENTRY_LEN).find(|e| e[0] == kind as u8 && e[1] == bit).and_then(|e| {
        let name = e[2..].split(|b| *b == 0).next().unwrap_or_default();
        let text: String =
            name.iter().map(|b| if b.is_ascii_graphic() || *b == b' ' { *b as char } else { '?' }).collect();
        (!text.is_empty()).then_some(text)
    })
}

/// Refuses incompatible bits that are not known, naming each from the table or by its number.
pub fn check_incompatible(bits: u64, table: Option<&[u8]>) -> Result<()> {
    let unknown = bits & !Incompatible::all().bits();
    if unknown == 0 {
        return Ok(());
    }
    let names: Vec<String> = (0..64u8)
        .filter(|bit| unknown >> bit & 1 == 1)
        .map(|bit| match table.and_then(|t| name_in(t, FeatureKind::Incompatible, bit)) {
            Some(name) => format!("'{name}' (bit {bit})"),
            None => format!("bit {bit}"),
        })
        .collect();
    Err(Error::unsupported(format!(
        "header, offset 72: unsupported incompatible features: {}",
        names.join(", ")
    )))
}

/// Refuses feature bits in combinations that the format forbids. `compression` is the compression type byte.
pub(super) fn check_compression(bits: Incompatible, compression: u8) -> Result<()> {
    match (bits.contains(Incompatible::COMPRESSION), compression) {
        (false, 0) | (true, 1) => Ok(()),
        (true, 0) => Err(bad(72, "the compression type bit is set although the compression type is zlib")),
        (false, 1) => {
            Err(bad(72, "the compression type bit is not set although the compression type is zstd"))
        }
        (_, other) => {
            Err(Error::unsupported(format!("header, offset 104: unknown compression type {other}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_a_new_image_names_every_known_bit() {
        let table = name_table();
        assert_eq!(table.len(), 0x180);
        for (kind, bit, name) in KNOWN {
            assert_eq!(name_in(&table, *kind, *bit).as_deref(), Some(*name));
        }
        let of = |kind| KNOWN.iter().filter(|k| k.0 == kind).fold(0u64, |a, k| a | 1 << k.1);
        assert_eq!(of(FeatureKind::Incompatible), Incompatible::all().bits());
        assert_eq!(of(FeatureKind::Compatible), Compatible::all().bits());
        assert_eq!(of(FeatureKind::Autoclear), Autoclear::all().bits());
    }

    #[test]
    fn unknown_bits_are_named_from_the_table_or_by_number() {
        let mut table = vec![0u8, 63];
        table.extend(b"time\x1btravel");
        table.resize(48, 0);
        table.extend([0, 5]); // an entry cut off is no entry
        let e = check_incompatible(1 << 63 | 1 << 5 | 31, Some(&table)).expect_err("unknown");
        assert_eq!(
            e.full_text(),
            "header, offset 72: unsupported incompatible features: bit 5, 'time?travel' (bit 63)"
        );
        assert_eq!(e.code(), crate::error::Code::Unsupported);
        check_incompatible(31, None).expect("all known");
        assert!(check_incompatible(32, None).is_err());
    }

    #[test]
    fn bit_and_type_of_the_compression_agree_in_both_directions() {
        let bit = Incompatible::COMPRESSION;
        assert!(check_compression(Incompatible::empty(), 0).is_ok());
        assert!(check_compression(bit, 1).is_ok());
        assert!(check_compression(bit, 0).is_err());
        assert!(check_compression(Incompatible::empty(), 1).is_err());
        assert!(check_compression(bit, 2).is_err() && check_compression(Incompatible::empty(), 255).is_err());
    }
}
