//! How large an image would be: pure arithmetic, the placement of [`super::create`] without creating.

use super::bitmap::Bitmap;
use super::layout::Layout;
use crate::error::{Code, Error, Result};

/// Bytes of an image file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measured {
    /// With the data there is.
    pub required: u64,
    /// With every cluster of the disk allocated.
    pub fully_allocated: u64,
}

/// Measures an image of `size` bytes, `data_clusters` of which hold data. Metadata is counted for the whole disk: an image may grow to it later, and it is
/// little. Errors: EFBIG for sizes that the layout cannot hold.
pub fn measure(layout: &Layout, size: u64, data_clusters: u64) -> Result<Measured> {
    let too_large = || Error::new(libc::EFBIG, Code::Invalid, format!("a disk of {size} bytes is too large"));
    layout.l1_entries_for(size).map_err(|_| too_large())?;
    let cluster = layout.cluster_size();
    let data = layout.clusters_for(size);
    // Tables are counted whole.
    let l2 = data.div_ceil(layout.l2_entries());
    let l1 = (l2 * 8).div_ceil(cluster);
    let others = 1 + l1 + l2;
    let (mut blocks, mut table) = (0, 0);
    loop {
        let total = data + others + blocks + table;
        let needed = total.div_ceil(layout.refblock_entries());
        let entries = (needed * 8).div_ceil(cluster);
        if (needed, entries) == (blocks, table) {
            break;
        }
        // Both only rise: each is counted among what the next round counts.
        (blocks, table) = (needed, entries);
    }
    let bytes = |clusters: u64| clusters.checked_mul(cluster).ok_or_else(too_large);
    let metadata = others + blocks + table;
    Ok(Measured {
        required: bytes(metadata + data_clusters.min(data))?,
        fully_allocated: bytes(metadata + data)?,
    })
}

/// Bytes that copies of `bitmaps` of a disk of `size` bytes take in an image of clusters of `cluster` bytes: those that can be used, every bit stored.
pub fn bitmaps(bitmaps: &[Bitmap], size: u64, cluster: u64) -> u64 {
    let (mut clusters, mut directory) = (0u64, 0u64);
    for b in bitmaps.iter().filter(|b| b.broken.is_none() && b.flags & super::bitmap::IN_USE == 0) {
        let granularity = 1u64.checked_shl(u32::from(b.granularity_bits)).unwrap_or(u64::MAX);
        let data = size.div_ceil(granularity).div_ceil(8).div_ceil(cluster);
        clusters = clusters.saturating_add(data).saturating_add(data.saturating_mul(8).div_ceil(cluster));
        directory += (24 + b.name.len() as u64).next_multiple_of(8);
    }
    clusters.saturating_add(directory.div_ceil(cluster)).saturating_mul(cluster)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn layout(cluster_bits: u32) -> Layout {
        Layout {
            version: 3,
            cluster_bits,
            slice_bits: cluster_bits,
            extended: false,
            refcount_order: 4,
            data_file: false,
        }
    }

    #[test]
    fn an_empty_disk_has_a_header_and_refcounts() {
        let m = measure(&layout(16), 0, 0).expect("fits");
        assert_eq!((m.required, m.fully_allocated), (3 << 16, 3 << 16));
    }

    #[test]
    fn metadata_is_that_of_the_whole_disk_and_data_is_what_there_is() {
        let m = measure(&layout(16), 1 << 30, 10).expect("fits");
        assert_eq!(m.required, (6 + 10) << 16);
        assert_eq!(m.fully_allocated, (6 << 16) + (1 << 30));
        let m = measure(&layout(9), 8 << 30, 0).expect("fits");
        assert_eq!(m.fully_allocated, m.required + (8 << 30));
        assert_eq!(m.required, 171_073_536);
    }

    #[test]
    fn sizes_beyond_the_largest_l1_table_are_refused() {
        assert_eq!(measure(&layout(16), 8 << 50, 0).expect_err("too large").errno(), libc::EFBIG);
        assert!(measure(&layout(16), 1 << 50, 0).is_ok());
        assert!(measure(&layout(21), i64::MAX as u64, 0).is_err());
    }
}
