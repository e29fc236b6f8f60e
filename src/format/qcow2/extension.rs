//! Header extensions: tagged data between the header and the backing file name.
//!
//! All of them are kept in their order and byte for byte, known or not, so that a rewrite of the header loses nothing. What is inside a known one
//! is looked at only by whoever needs it: a broken bitmap extension must not keep the data from being read.

use super::addr::HostOffset;
use super::header::bad;
use super::limits::{FILE_OFFSET_MAX, LUKS_HEADER_MIN};
use crate::error::Result;

/// One extension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extension {
    /// What it is; see the constants.
    pub magic: u32,
    /// Its data, without padding.
    pub data: Vec<u8>,
}

/// Ends the list.
pub const END: u32 = 0;
/// Driver name of the backing file.
pub const BACKING_FORMAT: u32 = 0xe279_2aca;
/// Names of feature bits.
pub const FEATURE_TABLE: u32 = 0x6803_f857;
/// Persistent dirty bitmaps.
pub const BITMAPS: u32 = 0x2385_2875;
/// Where the LUKS header is.
pub const CRYPTO: u32 = 0x0537_be77;
/// Name of the external data file.
pub const DATA_FILE: u32 = 0x4441_5441;

/// Where the LUKS header is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CryptoPointer {
    /// First byte, a multiple of the cluster size.
    pub offset: HostOffset,
    /// Bytes.
    pub len: u64,
}

/// Where the bitmap directory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitmapsPointer {
    /// Number of bitmaps.
    pub count: u32,
    /// First byte of the directory, a multiple of the cluster size.
    pub offset: HostOffset,
    /// Bytes of the directory.
    pub len: u64,
}

/// Parses the extension area `area`, which starts at byte `start` of the file. The end marker may be missing where the area ends.
pub fn parse(area: &[u8], start: u64) -> Result<Vec<Extension>> {
    let mut list = Vec::new();
    let mut at = 0;
    // Each round takes at least the 8 bytes of a head.
    while let Some(head) = area.get(at..at + 8) {
        let magic = u32_at(head, 0);
        let len = u32_at(head, 4) as usize;
        if magic == END {
            break;
        }
        let here = start + at as u64;
        let rest = &area[at + 8..];
        let Some(data) = rest.get(..len) else {
            return Err(bad(
                here,
                format!("extension {magic:#010x}: length {len} is larger than the {} bytes left", rest.len()),
            ));
        };
        list.push(Extension { magic, data: data.to_vec() });
        at = at + 8 + len.next_multiple_of(8).min(rest.len());
    }
    Ok(list)
}

/// Appends the extensions to a header. The end marker comes after them unless `room` bytes are used up by then.
pub fn append(list: &[Extension], out: &mut Vec<u8>, room: usize) {
    for e in list {
        out.extend(e.magic.to_be_bytes());
        out.extend((e.data.len() as u32).to_be_bytes());
        out.extend(&e.data);
        out.resize(out.len().next_multiple_of(8), 0);
    }
    if out.len() + 8 <= room {
        out.extend([0; 8]);
    }
}

/// The data of the last extension of this kind (a later one overrides).
pub fn find(list: &[Extension], magic: u32) -> Option<&[u8]> {
    list.iter().rev().find(|e| e.magic == magic).map(|e| e.data.as_slice())
}

/// Replaces, adds (at the front, where the readers of v2 images look) or removes the extension of this kind; the others keep their order.
pub fn set(list: &mut Vec<Extension>, magic: u32, data: Option<Vec<u8>>) {
    let at = list.iter().position(|e| e.magic == magic).unwrap_or(0);
    list.retain(|e| e.magic != magic);
    if let Some(data) = data {
        list.insert(at.min(list.len()), Extension { magic, data });
    }
}

/// Parses the pointer to the LUKS header. `file_len` is the length of the image file.
pub fn parse_crypto(data: &[u8], cluster_size: u64, file_len: u64) -> Result<CryptoPointer> {
    let what = "LUKS header pointer";
    if data.len() != 16 {
        return Err(bad(0, format!("{what}: length {} is not 16", data.len())));
    }
    let (offset, len) = (u64_at(data, 0), u64_at(data, 8));
    if offset == 0 || offset % cluster_size != 0 {
        return Err(bad(
            0,
            format!("{what}: offset {offset:#x} is not a multiple of the cluster size, or 0"),
        ));
    }
    if len < LUKS_HEADER_MIN {
        return Err(bad(0, format!("{what}: length {len} is less than {LUKS_HEADER_MIN}")));
    }
    if offset.checked_add(len).is_none_or(|end| end > file_len) {
        return Err(bad(
            0,
            format!("{what}: {len} bytes at {offset:#x} do not lie inside the file ({file_len} bytes)"),
        ));
    }
    Ok(CryptoPointer { offset: HostOffset(offset), len })
}

/// Parses the pointer to the bitmap directory. What it points at may still be broken.
pub fn parse_bitmaps(data: &[u8], cluster_size: u64) -> Result<BitmapsPointer> {
    let what = "bitmap extension";
    if data.len() != 24 {
        return Err(bad(0, format!("{what}: length {} is not 24", data.len())));
    }
    let (count, reserved, len, offset) =
        (u32_at(data, 0), u32_at(data, 4), u64_at(data, 8), u64_at(data, 16));
    if reserved != 0 {
        return Err(bad(0, format!("{what}: reserved field is {reserved:#x}")));
    }
    if count == 0 || count > BITMAPS_MAX {
        return Err(bad(0, format!("{what}: {count} bitmaps, not 1..={BITMAPS_MAX}")));
    }
    if offset == 0 || offset % cluster_size != 0 {
        return Err(bad(
            0,
            format!("{what}: directory offset {offset:#x} is not a multiple of the cluster size, or 0"),
        ));
    }
    // An entry has at least 24 bytes and a name of one, rounded up to 8.
    if len > BITMAP_DIRECTORY_BYTES_MAX || len < u64::from(count) * 32 {
        return Err(bad(0, format!("{what}: directory of {len} bytes for {count} bitmaps")));
    }
    if offset.checked_add(len).is_none_or(|end| end > FILE_OFFSET_MAX) {
        return Err(bad(0, format!("{what}: directory of {len} bytes at {offset:#x} has no end")));
    }
    Ok(BitmapsPointer { count, offset: HostOffset(offset), len })
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) << 32 | u64::from(u32_at(bytes, at + 4))
}

const BITMAPS_MAX: u32 = 65_535;
const BITMAP_DIRECTORY_BYTES_MAX: u64 = 65_535 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ext(magic: u32, data: &[u8]) -> Extension {
        Extension { magic, data: data.to_vec() }
    }

    proptest! {
        #[test]
        fn a_list_survives_being_written_and_read(
            list in prop::collection::vec(
                (1u32.., prop::collection::vec(any::<u8>(), 0..40)).prop_map(|(magic, data)| Extension { magic, data }), 0..6),
            room in any::<bool>(),
        ) {
            let mut area = Vec::new();
            append(&list, &mut area, if room { usize::MAX } else { 0 });
            prop_assert_eq!(area.len() % 8, 0);
            prop_assert_eq!(parse(&area, 112).unwrap(), list);
        }

        #[test]
        fn no_area_makes_the_parser_panic(area in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&area, 72);
        }
    }

    #[test]
    fn a_length_past_the_area_names_extension_and_offset() {
        let mut area = Vec::new();
        append(&[ext(0x1234, b"12345678")], &mut area, usize::MAX);
        area.truncate(16);
        area.extend([0, 0, 0x56, 0x78, 0xff, 0xff, 0xff, 0xff]);
        let e = parse(&area, 104).expect_err("too long").full_text();
        assert!(e.contains("offset 120") && e.contains("0x00005678") && e.contains("4294967295"), "{e}");
    }

    #[test]
    fn data_that_reaches_the_end_of_the_area_needs_no_padding() {
        let area = [&[0, 0, 0, 9, 0, 0, 0, 3][..], b"abc"].concat();
        assert_eq!(parse(&area, 0).expect("fits"), [ext(9, b"abc")]);
    }

    #[test]
    fn setting_one_keeps_the_others_and_their_order() {
        let mut list = vec![ext(7, b"a"), ext(8, b"b"), ext(9, b"c"), ext(8, b"twice")];
        assert_eq!(find(&list, 8), Some(&b"twice"[..]));
        set(&mut list, 8, Some(b"new".to_vec()));
        assert_eq!(list, [ext(7, b"a"), ext(8, b"new"), ext(9, b"c")]);
        set(&mut list, 7, None);
        set(&mut list, 5, Some(Vec::new()));
        assert_eq!(list, [ext(5, b""), ext(8, b"new"), ext(9, b"c")]);
    }

    fn words(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|w| w.to_be_bytes()).collect()
    }

    #[test]
    fn pointers_to_luks_headers_are_bounded_by_the_file() {
        let ok = parse_crypto(&words(&[0x10000, 4096]), 65536, 0x11000).expect("valid");
        assert_eq!(ok, CryptoPointer { offset: HostOffset(0x10000), len: 4096 });
        for (data, named) in [
            (words(&[0x10000]), "length 8"),
            (words(&[0, 4096]), "0x0"),
            (words(&[0x10200, 4096]), "0x10200"),
            (words(&[0x10000, 591]), "591"),
            (words(&[0x10000, 4097]), "4097"),
            (words(&[0x10000, u64::MAX]), "inside"),
        ] {
            let e = parse_crypto(&data, 65536, 0x11000).expect_err(named).full_text();
            assert!(e.contains(named), "{e}");
        }
    }

    #[test]
    fn pointers_to_bitmap_directories_are_bounded() {
        let ok = parse_bitmaps(&words(&[2 << 32, 64, 0x20000]), 65536).expect("valid");
        assert_eq!(ok, BitmapsPointer { count: 2, offset: HostOffset(0x20000), len: 64 });
        for (data, named) in [
            (words(&[2 << 32, 64]), "length 16"),
            (words(&[0, 64, 0x20000]), "0 bitmaps"),
            (words(&[65536 << 32, 64 << 20, 0x20000]), "65536 bitmaps"),
            (words(&[2 << 32 | 1, 64, 0x20000]), "reserved"),
            (words(&[2 << 32, 63, 0x20000]), "63 bytes"),
            (words(&[2 << 32, 65536 << 10, 0x20000]), "67108864"),
            (words(&[2 << 32, 64, 0x20008]), "0x20008"),
            (words(&[2 << 32, 64, 0]), "or 0"),
            (words(&[2 << 32, 64, !0xffff]), "no end"),
        ] {
            let e = parse_bitmaps(&data, 65536).expect_err(named).full_text();
            assert!(e.contains(named), "{e}");
        }
    }
}
