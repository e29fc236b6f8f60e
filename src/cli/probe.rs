//! What format an image is in, by its first bytes: only where the user gave none, as qemu-img does it.
//!
//! The library never probes (qcow2.md 5.6): a guest that may write a raw disk can make it look like anything.

use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Bytes that are looked at.
pub(super) const PROBE_LEN: usize = 2048;

/// A format's name for these first bytes of an image; `raw` if they are those of no other. Formats that cannot be opened here are told apart all the same:
/// taking them for raw would show their metadata as a disk.
pub(super) fn format_of(head: &[u8]) -> &'static str {
    let at = |offset: usize, magic: &[u8]| head.get(offset..offset + magic.len()) == Some(magic);
    if at(0, b"QFI\xfb") {
        return match head.get(4..8) {
            Some([0, 0, 0, 1]) => "qcow",
            // A version that is not known is refused when it is opened, but it is not raw.
            Some(version) if version > &[0, 0, 0, 1][..] => "qcow2",
            _ => "raw",
        };
    }
    const OTHERS: &[(usize, &[u8], &str)] = &[
        (0, b"QED\0", "qed"),
        (0, b"KDMV", "vmdk"),
        (0, b"COWD", "vmdk"),
        (0, b"vhdxfile", "vhdx"),
        (0, b"conectix", "vpc"),
        (0, b"LUKS\xba\xbe", "luks"),
        (0x40, b"\x7f\x10\xda\xbe", "vdi"),
        (0, b"WithoutFreeSpace", "parallels"),
        (0, b"WithouFreSpacExt", "parallels"),
    ];
    OTHERS.iter().find(|(offset, magic, _)| at(*offset, magic)).map_or("raw", |o| o.2)
}

/// The format of the file at `path`.
pub(super) fn probe_file(path: &Path) -> std::io::Result<&'static str> {
    let mut head = Vec::with_capacity(PROBE_LEN);
    File::open(path)?.take(PROBE_LEN as u64).read_to_end(&mut head)?;
    Ok(format_of(&head))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_told_by_magic_and_version() {
        assert_eq!(format_of(b"QFI\xfb\0\0\0\x03rest"), "qcow2");
        assert_eq!(format_of(b"QFI\xfb\0\0\0\x02"), "qcow2");
        assert_eq!(format_of(b"QFI\xfb\0\0\0\x01"), "qcow");
        assert_eq!(format_of(b"QFI\xfb\0\0\0\x04"), "qcow2");
        assert_eq!(format_of(b"QFI\xfb\0\x01\0\0"), "qcow2");
        assert_eq!(format_of(b"QFI\xfb\0\0\0\0"), "raw");
        assert_eq!(format_of(b"QFI\xfb\0\0\0"), "raw");
        assert_eq!(format_of(b""), "raw");
        assert_eq!(format_of(&[0; PROBE_LEN]), "raw");
        let mut vdi = [0; 0x44];
        vdi[0x40..].copy_from_slice(b"\x7f\x10\xda\xbe");
        assert_eq!(format_of(&vdi), "vdi");
        assert_eq!(format_of(b"KDMV\x01"), "vmdk");
    }
}
