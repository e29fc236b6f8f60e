//! Index arithmetic of an image: which L1 entry, L2 entry, slice, sub-cluster and refcount an offset belongs to.
//!
//! Everything is derived from the header once and copied around; nothing here reads a file. Guest offsets given to the indexing functions are below
//! 2^63 (the waist checks ranges), so none of the shifts can lose bits.

use super::limits::{CLUSTER_BITS, L1_ENTRIES_MAX, SUBCLUSTERS};
use crate::error::{Error, Result};

/// Shape of an image's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Header version, 2 or 3.
    pub version: u32,
    /// log2 of the cluster size in bytes, 9..=21.
    pub cluster_bits: u32,
    /// log2 of the bytes in a cached slice of an L2 table, 9..=`cluster_bits`.
    pub slice_bits: u32,
    /// Whether L2 entries have a bitmap of 32 sub-clusters.
    pub extended: bool,
    /// log2 of the width of a refcount in bits, 0..=6.
    pub refcount_order: u32,
    /// Whether guest data lies in an external data file (at the guest's own offsets).
    pub data_file: bool,
}

impl Layout {
    /// Bytes of a cluster.
    pub const fn cluster_size(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Offset inside its cluster.
    pub const fn in_cluster(&self, offset: u64) -> u64 {
        offset & (self.cluster_size() - 1)
    }

    /// Start of the cluster that holds `offset`.
    pub const fn cluster_start(&self, offset: u64) -> u64 {
        offset & !(self.cluster_size() - 1)
    }

    /// Whole clusters that `bytes` bytes need.
    pub const fn clusters_for(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.cluster_size())
    }

    /// log2 of the bytes of an L2 entry: 3, or 4 with a sub-cluster bitmap.
    pub const fn entry_bits(&self) -> u32 {
        if self.extended { 4 } else { 3 }
    }

    /// 64-bit words of an L2 entry.
    pub const fn entry_words(&self) -> usize {
        if self.extended { 2 } else { 1 }
    }

    /// log2 of the entries of an L2 table.
    pub const fn l2_bits(&self) -> u32 {
        self.cluster_bits - self.entry_bits()
    }

    /// Entries of an L2 table.
    pub const fn l2_entries(&self) -> u64 {
        1 << self.l2_bits()
    }

    /// log2 of the guest bytes that one L2 table maps.
    pub const fn l2_span_bits(&self) -> u32 {
        self.l2_bits() + self.cluster_bits
    }

    /// Guest bytes that one L2 table maps: at most 2^39 (2 MiB clusters).
    pub const fn l2_span(&self) -> u64 {
        1 << self.l2_span_bits()
    }

    /// Entry of the L1 table for a guest offset.
    pub const fn l1_index(&self, guest: u64) -> u64 {
        guest >> self.l2_span_bits()
    }

    /// Entry of its L2 table for a guest offset.
    pub const fn l2_index(&self, guest: u64) -> u64 {
        (guest >> self.cluster_bits) & (self.l2_entries() - 1)
    }

    /// L1 entries that a disk of `size` bytes needs, or the error that says how large a disk of this layout can be.
    pub fn l1_entries_for(&self, size: u64) -> Result<u64> {
        let entries = size.div_ceil(self.l2_span());
        if entries > L1_ENTRIES_MAX {
            return Err(Error::new(
                libc::EFBIG,
                crate::error::Code::Invalid,
                format!(
                    "virtual size {size} needs {entries} L1 entries, more than {L1_ENTRIES_MAX} (largest size with these clusters: {})",
                    L1_ENTRIES_MAX << self.l2_span_bits()
                ),
            ));
        }
        Ok(entries)
    }

    /// log2 of the entries of a slice.
    pub const fn slice_entry_bits(&self) -> u32 {
        self.slice_bits - self.entry_bits()
    }

    /// Entries of a slice.
    pub const fn slice_entries(&self) -> usize {
        1 << self.slice_entry_bits()
    }

    /// 64-bit words of a slice.
    pub const fn slice_words(&self) -> usize {
        1 << (self.slice_bits - 3)
    }

    /// Slices of an L2 table.
    pub const fn slices_per_table(&self) -> usize {
        1 << (self.cluster_bits - self.slice_bits)
    }

    /// Slice of its L2 table for a guest offset.
    pub const fn slice_index(&self, guest: u64) -> usize {
        (self.l2_index(guest) >> self.slice_entry_bits()) as usize
    }

    /// Entry of its slice for a guest offset.
    pub const fn slice_entry(&self, guest: u64) -> usize {
        (self.l2_index(guest) & (self.slice_entries() as u64 - 1)) as usize
    }

    /// Guest bytes that one slice maps.
    pub const fn slice_span(&self) -> u64 {
        1 << (self.slice_entry_bits() + self.cluster_bits)
    }

    /// First guest byte that the slice around `guest` maps.
    pub const fn slice_start(&self, guest: u64) -> u64 {
        guest & !(self.slice_span() - 1)
    }

    /// Units that can be mapped apart inside a cluster: 32 sub-clusters, or the cluster itself.
    pub const fn subclusters(&self) -> u32 {
        if self.extended { SUBCLUSTERS } else { 1 }
    }

    /// log2 of the bytes of a sub-cluster (of the cluster without them).
    pub const fn subcluster_bits(&self) -> u32 {
        if self.extended { self.cluster_bits - SUBCLUSTERS.trailing_zeros() } else { self.cluster_bits }
    }

    /// Bytes of a sub-cluster (of the cluster without them).
    pub const fn subcluster_size(&self) -> u64 {
        1 << self.subcluster_bits()
    }

    /// Sub-cluster of its cluster for a guest offset; 0 without sub-clusters.
    pub const fn subcluster_index(&self, guest: u64) -> u32 {
        (self.in_cluster(guest) >> self.subcluster_bits()) as u32
    }

    /// Width of a refcount in bits: 1, 2, 4 .. 64.
    pub const fn refcount_bits(&self) -> u32 {
        1 << self.refcount_order
    }

    /// log2 of the refcounts in a refcount block (one cluster).
    pub const fn refblock_bits(&self) -> u32 {
        self.cluster_bits + 3 - self.refcount_order
    }

    /// Refcounts in a refcount block.
    pub const fn refblock_entries(&self) -> u64 {
        1 << self.refblock_bits()
    }

    /// File bytes that one refcount block counts: at most 2^45 (2 MiB clusters, width 1).
    pub const fn refblock_span(&self) -> u64 {
        1 << (self.refblock_bits() + self.cluster_bits)
    }

    /// Entry of the refcount table for a file offset.
    pub const fn reftable_index(&self, host: u64) -> u64 {
        host >> (self.refblock_bits() + self.cluster_bits)
    }

    /// Entry of its refcount block for a file offset.
    pub const fn refblock_index(&self, host: u64) -> u64 {
        (host >> self.cluster_bits) & (self.refblock_entries() - 1)
    }

    /// Entries in `clusters` clusters of the refcount table.
    pub const fn reftable_entries(&self, clusters: u32) -> u64 {
        (clusters as u64) << (self.cluster_bits - 3)
    }

    /// The same layout with slices of `bytes` bytes, a power of two from 512 to the cluster size.
    pub fn with_slice(mut self, bytes: u64) -> Result<Self> {
        if !bytes.is_power_of_two() || bytes < 512 || bytes > self.cluster_size() {
            return Err(Error::invalid(format!(
                "L2 cache entry size {bytes} is not a power of two from 512 to the cluster size ({})",
                self.cluster_size()
            )));
        }
        self.slice_bits = bytes.trailing_zeros();
        Ok(self)
    }
}

// The largest spans fit 64 bits with room for the largest index.
const _: () = assert!(*CLUSTER_BITS.end() * 2 - 3 + L1_ENTRIES_MAX.trailing_zeros() < 63);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn layouts() -> impl Strategy<Value = Layout> {
        (9u32..=21, any::<bool>(), 0u32..=6, any::<bool>()).prop_flat_map(|(bits, ext, order, data_file)| {
            let extended = ext && bits >= 14;
            (9..=bits).prop_map(move |slice_bits| Layout {
                version: 3,
                cluster_bits: bits,
                slice_bits,
                extended,
                refcount_order: order,
                data_file,
            })
        })
    }

    proptest! {
        #[test]
        fn indices_put_a_guest_offset_together_again(l in layouts(), guest in 0u64..1 << 61) {
            let cluster = (l.l1_index(guest) << l.l2_bits()) + l.l2_index(guest);
            prop_assert_eq!(cluster, guest >> l.cluster_bits);
            let entry = ((l.slice_index(guest) << l.slice_entry_bits()) + l.slice_entry(guest)) as u64;
            prop_assert_eq!(entry, l.l2_index(guest));
            prop_assert!(l.slice_index(guest) < l.slices_per_table() && l.slice_entry(guest) < l.slice_entries());
            prop_assert_eq!(l.slices_per_table() * l.slice_entries(), l.l2_entries() as usize);
            prop_assert_eq!(l.slice_words(), l.slice_entries() * l.entry_words());
            prop_assert!(l.slice_start(guest) <= guest && guest - l.slice_start(guest) < l.slice_span());
            let sub = u64::from(l.subcluster_index(guest)) * l.subcluster_size();
            prop_assert!(sub <= l.in_cluster(guest) && l.in_cluster(guest) - sub < l.subcluster_size());
            prop_assert_eq!(u64::from(l.subclusters()) * l.subcluster_size(), l.cluster_size());
        }

        #[test]
        fn indices_put_a_file_offset_together_again(l in layouts(), host in 0u64..1 << 62) {
            let counted = (l.reftable_index(host) << l.refblock_bits()) + l.refblock_index(host);
            prop_assert_eq!(counted, host >> l.cluster_bits);
            prop_assert_eq!(l.refblock_entries() * u64::from(l.refcount_bits()), l.cluster_size() * 8);
        }
    }

    #[test]
    fn the_largest_disks_are_those_of_the_design() {
        let l = |cluster_bits, extended| Layout {
            version: 3,
            cluster_bits,
            slice_bits: 9,
            extended,
            refcount_order: 4,
            data_file: false,
        };
        for (layout, max) in [
            (l(9, false), 128u64 << 30),
            (l(16, false), 2 << 50),
            (l(21, false), 2 << 60),
            (l(16, true), 1 << 50),
            (l(21, true), 1 << 60),
        ] {
            assert_eq!(layout.l1_entries_for(max).expect("it fits"), L1_ENTRIES_MAX);
            let e = layout.l1_entries_for(max + 1).expect_err("too large");
            assert!(e.full_text().contains(&max.to_string()), "{}", e.full_text());
        }
        assert_eq!(l(16, false).l1_entries_for(0).expect("empty"), 0);
        assert!(l(16, false).l1_entries_for(u64::MAX).is_err());
    }

    #[test]
    fn a_slice_is_a_power_of_two_inside_a_cluster() {
        let l = Layout {
            version: 3,
            cluster_bits: 12,
            slice_bits: 12,
            extended: false,
            refcount_order: 4,
            data_file: false,
        };
        for bytes in [0, 1, 256, 513, 768, 8192, u64::MAX] {
            assert!(l.with_slice(bytes).is_err(), "{bytes}");
        }
        assert_eq!(l.with_slice(512).expect("valid").slices_per_table(), 8);
        assert_eq!(l.with_slice(4096).expect("valid").slices_per_table(), 1);
    }
}
