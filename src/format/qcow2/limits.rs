//! Bounds of the format (qcow2.md section 2), tied to each other.

use std::ops::RangeInclusive;

/// log2 of a cluster's bytes.
pub const CLUSTER_BITS: RangeInclusive<u32> = 9..=21;
/// The same with extended L2 entries.
pub const CLUSTER_BITS_EXTENDED: RangeInclusive<u32> = 14..=21;
/// Sub-clusters of a cluster with extended L2 entries.
pub const SUBCLUSTERS: u32 = 32;
/// Entries of an L1 table, active or of a snapshot.
pub const L1_ENTRIES_MAX: u64 = 4 << 20;
/// Bytes of the refcount table.
pub const REFTABLE_BYTES_MAX: u64 = 8 << 20;
/// Internal snapshots.
pub const SNAPSHOTS_MAX: u32 = 65_536;
/// Bytes of the snapshot table.
pub const SNAPSHOT_TABLE_BYTES_MAX: u64 = 64 << 20;
/// Bytes of a backing file name.
pub const BACKING_NAME_MAX: u64 = 1023;
/// Bytes of a LUKS header.
pub const LUKS_HEADER_MIN: u64 = 592;
/// Bytes of a version 2 header.
pub const HEADER_LEN_V2: u32 = 72;
/// Bytes of the shortest version 3 header.
pub const HEADER_LEN_V3_MIN: u32 = 104;
/// Bytes of the version 3 header that this driver writes.
pub const HEADER_LEN_V3: u32 = 112;
/// Host offsets in L1 and L2 entries have bits 9-55.
pub const ENTRY_OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
/// Largest file offset.
pub const FILE_OFFSET_MAX: u64 = i64::MAX as u64;

const _: () = assert!(L1_ENTRIES_MAX * 8 == 32 << 20);
const _: () = assert!(HEADER_LEN_V3 as u64 <= 1 << *CLUSTER_BITS.start());
const _: () = assert!(*CLUSTER_BITS_EXTENDED.start() - SUBCLUSTERS.trailing_zeros() >= *CLUSTER_BITS.start());
