//! What a check can find, in the words that scripts know from qemu-img.

use super::super::entry::BadEntry;
use std::fmt;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// Data may be wrong, or become wrong by writing.
    Corruption,
    /// Space is lost.
    Leak,
    /// The check could not look.
    Error,
}

/// Something that is not as it should be. Numbers are those of the image: clusters of the file, words as stored.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are what the texts below say of them")]
pub enum Finding {
    /// A cluster is used more often than counted.
    TooLow { cluster: u64, refcount: u64, references: u32 },
    /// A cluster is used less often than counted.
    Leak { cluster: u64, refcount: u64, references: u32 },
    /// The refcount of a cluster cannot be found out.
    NoRefcount { cluster: u64, errno: i32 },
    /// Something lies outside of the file.
    Outside { offset: u64, len: u64 },
    /// An L1 entry with bits that must be 0.
    L1Reserved { word: u64 },
    /// An L1 entry whose offset is not a multiple of the cluster size.
    L1Unaligned { offset: u64 },
    /// The copied flag of an L1 entry does not agree with the refcount.
    L1Copied { index: u64, word: u64, refcount: u64 },
    /// An L2 entry with bits that must be 0.
    L2Reserved { word: u64 },
    /// The copied flag of an L2 entry does not agree with the refcount.
    L2Copied { word: u64, refcount: u64 },
    /// A cluster whose offset is not a multiple of the cluster size.
    Unaligned { offset: u64, data: bool },
    /// The copied flag on compressed data.
    CompressedCopied { offset: u64 },
    /// Compressed data in an image with a data file.
    CompressedInDataFile { index: u64, word: u64 },
    /// Compressed data with a sub-cluster bitmap.
    CompressedBitmap { index: u64, word: u64 },
    /// Sub-clusters allocated in no cluster.
    BitmapWithoutCluster,
    /// Sub-clusters both allocated and zero.
    BitmapBothStates { offset: u64 },
    /// Another broken entry.
    BadL2 { table: u64, index: u64, problem: BadEntry },
    /// A refcount table entry with bits that must be 0.
    ReftableReserved { index: u64 },
    /// A refcount block whose offset is not a multiple of the cluster size.
    RefblockUnaligned { index: u64 },
    /// A refcount block outside of the file.
    RefblockOutside { index: u64 },
    /// A refcount block that is something else as well.
    RefblockShared { index: u64, references: u32 },
    /// A snapshot without the fields that version 3 requires.
    SnapshotIncomplete { index: usize },
    /// The L1 table of a snapshot is not aligned.
    SnapshotUnaligned { id: String, name: String, offset: u64 },
    /// The L1 table of a snapshot is larger than any.
    SnapshotTooLarge { id: String, name: String, entries: u32 },
    /// A bitmap that breaks a rule.
    Bitmap { name: String, problem: String },
    /// The bitmaps cannot be told.
    Bitmaps { problem: String },
    /// A part of the image could not be read.
    Unreadable { what: &'static str, offset: u64, errno: i32 },
}

impl Finding {
    /// How bad it is.
    pub const fn severity(&self) -> Severity {
        match self {
            Self::Leak { .. } => Severity::Leak,
            Self::NoRefcount { .. } | Self::Unreadable { .. } => Severity::Error,
            _ => Severity::Corruption,
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the number that Rust puts behind the words.
        let errno = |n: &i32| {
            let text = crate::error::IoError::os(*n).to_string();
            text.split(" (os error").next().unwrap_or_default().to_owned()
        };
        match self {
            Self::TooLow { cluster, refcount, references } => {
                write!(f, "ERROR cluster {cluster} refcount={refcount} reference={references}")
            }
            Self::Leak { cluster, refcount, references } => {
                write!(f, "Leaked cluster {cluster} refcount={refcount} reference={references}")
            }
            Self::NoRefcount { cluster, errno: e } => {
                write!(f, "Can't get refcount for cluster {cluster}: {}", errno(e))
            }
            Self::Outside { offset, len } => write!(
                f,
                "ERROR: counting reference for region exceeding the end of the file by one cluster or more: offset {offset:#x} size {len:#x}"
            ),
            Self::L1Reserved { word } => write!(f, "ERROR found L1 entry with reserved bits set: {word:x}"),
            Self::L1Unaligned { offset } => {
                write!(f, "ERROR l2_offset={offset:x}: Table is not cluster aligned; L1 entry corrupted")
            }
            Self::L1Copied { index, word, refcount } => write!(
                f,
                "ERROR OFLAG_COPIED L2 cluster: l1_index={index} l1_entry={word:x} refcount={refcount}"
            ),
            Self::L2Reserved { word } => write!(f, "ERROR found l2 entry with reserved bits set: {word:x}"),
            Self::L2Copied { word, refcount } => {
                write!(f, "ERROR OFLAG_COPIED data cluster: l2_entry={word:x} refcount={refcount}")
            }
            Self::Unaligned { offset, data } => {
                let what = if *data { "Data" } else { "Preallocated" };
                write!(
                    f,
                    "ERROR offset={offset:x}: {what} cluster is not properly aligned; L2 entry corrupted."
                )
            }
            Self::CompressedCopied { offset } => {
                write!(f, "ERROR: coffset={offset:#x}: copied flag must never be set for compressed clusters")
            }
            Self::CompressedInDataFile { index, word } => {
                write!(f, "ERROR compressed cluster {index} with data file, entry={word:#x}")
            }
            Self::CompressedBitmap { index, word } => write!(
                f,
                "ERROR compressed cluster {index} with non-zero subcluster allocation bitmap, entry={word:#x}"
            ),
            Self::BitmapWithoutCluster => {
                f.write_str("ERROR: Unallocated cluster has non-zero subcluster allocation map")
            }
            Self::BitmapBothStates { offset } => {
                write!(
                    f,
                    "ERROR offset={offset:x}: Allocated cluster has corrupted subcluster allocation bitmap"
                )
            }
            Self::BadL2 { table, index, problem } => {
                write!(f, "ERROR L2 table at {table:#x}, entry {index}: {problem}")
            }
            Self::ReftableReserved { index } => {
                write!(f, "ERROR refcount table entry {index} has reserved bits set")
            }
            Self::RefblockUnaligned { index } => write!(
                f,
                "ERROR refcount block {index} is not cluster aligned; refcount table entry corrupted"
            ),
            Self::RefblockOutside { index } => write!(f, "ERROR refcount block {index} is outside image"),
            Self::RefblockShared { index, references } => {
                write!(f, "ERROR refcount block {index} refcount={references}")
            }
            Self::SnapshotIncomplete { index } => {
                write!(f, "ERROR snapshot table entry {index} is incomplete")
            }
            Self::SnapshotUnaligned { id, name, offset } => write!(
                f,
                "ERROR snapshot {id} ({name}) l1_offset={offset:#x}: L1 table is not cluster aligned; snapshot table entry corrupted"
            ),
            Self::SnapshotTooLarge { id, name, entries } => write!(
                f,
                "ERROR snapshot {id} ({name}) l1_size={entries:#x}: L1 table is too large; snapshot table entry corrupted"
            ),
            Self::Bitmap { name, problem } => write!(f, "ERROR bitmap '{name}': {problem}"),
            Self::Bitmaps { problem } => write!(f, "ERROR {problem}"),
            Self::Unreadable { what, offset, errno: e } => {
                write!(f, "ERROR: cannot read the {what} at {offset:#x}: {}", errno(e))
            }
        }
    }
}
