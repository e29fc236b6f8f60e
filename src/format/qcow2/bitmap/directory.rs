//! Persistent dirty bitmaps: their directory (qcow2.md sections 1 and 2). So far: reading it.
//!
//! A bad bitmap never affects data (section 2, point 3): an entry that breaks a rule is kept with what is wrong with it, and the walk goes on as long
//! as the lengths of the entries can be trusted.

use super::super::extension::{BitmapsPointer, u32_at, u64_at};
use super::super::layout::Layout;
use super::super::meta_io::read_at;
use crate::error::{Error, IoResult, Result};
use crate::node::Node;
use crate::queue::Cx;
use crate::request::{Buffers, Class};

/// The bitmap was not stored after its last use.
pub const IN_USE: u32 = 1;
/// The bitmap records writes from when the image is opened.
pub const AUTO: u32 = 2;
/// Extra data that is not understood does not keep the bitmap from being used.
pub const EXTRA_COMPATIBLE: u32 = 4;
/// Bytes of an entry before its extra data.
const FIXED_LEN: usize = 24;
/// Entries of a bitmap table.
const TABLE_ENTRIES_MAX: u32 = 1 << 27;
/// Bytes of a bitmap's data.
const DATA_MAX: u64 = 512 << 20;

/// An entry of the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bitmap {
    /// First byte of its table.
    pub table_offset: u64,
    /// Entries of its table: clusters of bits, or 0 and 1 for all zeros and all ones.
    pub table_entries: u32,
    /// [`IN_USE`], [`AUTO`], [`EXTRA_COMPATIBLE`], and reserved bits.
    pub flags: u32,
    /// log2 of the bytes that a bit stands for.
    pub granularity_bits: u8,
    /// Its name, in no particular encoding.
    pub name: Vec<u8>,
    /// Why it cannot be used, apart from [`IN_USE`].
    pub broken: Option<String>,
}

/// Reads the directory. An error means that all bitmaps are unusable: it could not be walked.
pub async fn read_directory(
    cx: &Cx,
    file: &dyn Node,
    pointer: &BitmapsPointer,
    layout: &Layout,
    disk_size: u64,
) -> Result<Vec<Bitmap>> {
    let what = format!("bitmap directory at {}", pointer.offset);
    // Bounded by the extension's own check: at most 64 MiB.
    let memory = Buffers::alloc(pointer.len as usize, 4096);
    read_at(cx, file, pointer.offset, &memory, Class::Guest)
        .await
        .map_err(|e| Error::io(e, format!("cannot read the {what}")))?;
    parse(&memory.to_vec(), pointer.count, layout, disk_size)
        .map_err(|text| Error::invalid(format!("{what}: {text}")))
}

/// The entries of a directory.
fn parse(
    directory: &[u8],
    count: u32,
    layout: &Layout,
    disk_size: u64,
) -> std::result::Result<Vec<Bitmap>, String> {
    let mut list: Vec<Bitmap> = Vec::new();
    let mut names = std::collections::HashSet::new();
    let mut rest = directory;
    // Each round takes at least the 24 bytes of an entry.
    while !rest.is_empty() {
        let at = directory.len() - rest.len();
        let entry = |problem: &str| format!("entry {} at byte {at} {problem}", list.len());
        if rest.len() < FIXED_LEN {
            return Err(entry("is cut off"));
        }
        let (name_len, extra_len) =
            (usize::from(rest[18]) << 8 | usize::from(rest[19]), u32_at(rest, 20) as usize);
        let len = FIXED_LEN.saturating_add(extra_len).saturating_add(name_len).saturating_add(7) & !7;
        if len > rest.len() {
            return Err(entry("reaches past the end"));
        }
        let name = rest[FIXED_LEN + extra_len..][..name_len].to_vec();
        let mut bitmap = Bitmap {
            table_offset: u64_at(rest, 0),
            table_entries: u32_at(rest, 8),
            flags: u32_at(rest, 12),
            granularity_bits: rest[17],
            name,
            broken: None,
        };
        let twin = !names.insert(bitmap.name.clone());
        bitmap.broken = problem(&bitmap, rest[16], extra_len, twin, layout, disk_size);
        list.push(bitmap);
        rest = &rest[len..];
    }
    if list.len() != count as usize {
        return Err(format!("has {} entries, the header says {count}", list.len()));
    }
    Ok(list)
}

/// The first rule that an entry breaks.
fn problem(
    b: &Bitmap,
    kind: u8,
    extra_len: usize,
    twin: bool,
    layout: &Layout,
    disk_size: u64,
) -> Option<String> {
    if b.name.is_empty() || b.name.len() > 1023 {
        return Some(format!("a name of {} bytes", b.name.len()));
    }
    if twin {
        return Some("the name of another bitmap".to_owned());
    }
    if kind != 1 {
        return Some(format!("unknown type {kind}"));
    }
    if b.flags & !(IN_USE | AUTO | EXTRA_COMPATIBLE) != 0 {
        return Some(format!("reserved flags {:#x}", b.flags));
    }
    if extra_len > 0 && b.flags & EXTRA_COMPATIBLE == 0 {
        return Some(format!("{extra_len} bytes of unknown extra data"));
    }
    if !(9..=31).contains(&b.granularity_bits) {
        return Some(format!("granularity 2^{}", b.granularity_bits));
    }
    if b.table_offset == 0
        || !b.table_offset.is_multiple_of(layout.cluster_size())
        || b.table_offset > i64::MAX as u64
    {
        return Some(format!("table offset {:#x}", b.table_offset));
    }
    let entries = u64::from(b.table_entries);
    if entries == 0 || b.table_entries > TABLE_ENTRIES_MAX || entries << layout.cluster_bits > DATA_MAX {
        return Some(format!("a table of {entries} entries"));
    }
    let bits = disk_size.div_ceil(1 << b.granularity_bits);
    let needed = layout.clusters_for(bits.div_ceil(8));
    if b.flags & IN_USE == 0 && needed != entries {
        return Some(format!("a table of {entries} entries where the disk needs {needed}"));
    }
    None
}

/// Calls `each` with the entries of a bitmap's table, in pieces: index of the first, entries. The table must be one that [`Bitmap::broken`] does not
/// complain about, apart from the size of the disk.
pub async fn each_table_piece(
    cx: &Cx,
    file: &dyn Node,
    bitmap: &Bitmap,
    mut each: impl FnMut(u64, &[u64]),
) -> IoResult {
    const PIECE: usize = 16 << 10;
    let total = bitmap.table_entries.min(TABLE_ENTRIES_MAX) as usize;
    let mut at = 0;
    while at < total {
        let n = PIECE.min(total - at);
        let offset = super::super::addr::HostOffset(bitmap.table_offset)
            .checked_add(at as u64 * 8)
            .ok_or(crate::error::IoError::out_of_range())?;
        let words = super::super::meta_io::read_words(cx, file, offset, n, Class::Guest).await?;
        each(at as u64, &words);
        at += n;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn layout() -> Layout {
        Layout {
            version: 3,
            cluster_bits: 16,
            slice_bits: 16,
            extended: false,
            refcount_order: 4,
            data_file: false,
        }
    }

    fn entry(offset: u64, entries: u32, flags: u32, granularity: u8, extra: u32, name: &str) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend(offset.to_be_bytes());
        out.extend(entries.to_be_bytes());
        out.extend(flags.to_be_bytes());
        out.extend([1, granularity]);
        out.extend((name.len() as u16).to_be_bytes());
        out.extend(extra.to_be_bytes());
        out.extend(vec![7; extra as usize]);
        out.extend(name.as_bytes());
        out.resize(out.len().next_multiple_of(8), 0);
        out
    }

    const DISK: u64 = 64 << 20;

    #[test]
    fn a_bad_entry_is_kept_with_its_problem_and_the_others_are_good() {
        let good = entry(0x20000, 1, AUTO, 16, 0, "good");
        for (bad, named) in [
            (entry(0x20008, 1, 0, 16, 0, "b"), "0x20008"),
            (entry(0x20000, 0, 0, 16, 0, "b"), "0 entries"),
            (entry(0x20000, 1 << 28, 0, 16, 0, "b"), "268435456 entries"),
            (entry(0x20000, 2, 0, 16, 0, "b"), "needs 1"),
            (entry(0x20000, 1, 8, 16, 0, "b"), "flags 0x8"),
            (entry(0x20000, 1, 0, 8, 0, "b"), "2^8"),
            (entry(0x20000, 1, 0, 32, 0, "b"), "2^32"),
            (entry(0x20000, 1, 0, 16, 8, "b"), "8 bytes of unknown"),
            (entry(0x20000, 1, 0, 16, 0, ""), "0 bytes"),
            (entry(0x20000, 1, 0, 16, 0, "good"), "another bitmap"),
        ] {
            let list = parse(&[good.clone(), bad].concat(), 2, &layout(), DISK).expect(named);
            assert_eq!(list[0].broken, None);
            let problem = list[1].broken.as_deref().expect(named);
            assert!(problem.contains(named), "{problem}");
        }
        let in_use = parse(&entry(0x20000, 2, IN_USE, 16, 0, "b"), 1, &layout(), DISK).expect("walkable");
        assert_eq!(in_use[0].broken, None, "the size of one that is in use counts for nothing");
        let extra =
            parse(&entry(0x20000, 1, EXTRA_COMPATIBLE, 16, 3, "b"), 1, &layout(), DISK).expect("walkable");
        assert_eq!((extra[0].broken.as_ref(), extra[0].name.as_slice()), (None, &b"b"[..]));
    }

    #[test]
    fn a_directory_that_cannot_be_walked_is_an_error() {
        let good = entry(0x20000, 1, 0, 16, 0, "good");
        assert!(parse(&good, 2, &layout(), DISK).is_err());
        assert!(parse(&good[..24], 1, &layout(), DISK).is_err());
        assert!(parse(&[good.clone(), vec![0; 8]].concat(), 1, &layout(), DISK).is_err());
        let mut long = good;
        long[20..24].copy_from_slice(&u32::MAX.to_be_bytes());
        assert!(parse(&long, 1, &layout(), DISK).is_err());
    }

    proptest! {
        #[test]
        fn no_directory_makes_the_parser_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), count in 0u32..4) {
            let _ = parse(&bytes, count, &layout(), DISK);
        }
    }
}
