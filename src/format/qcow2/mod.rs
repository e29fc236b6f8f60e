//! qcow2: sparse images with backing files, compression and internal snapshots. The design and the numbers of the rules cited here are those of
//! `qcow2.md`.
//!
//! Foundation, without I/O: [`header`] and [`extension`] (cluster 0 to fields and back), [`feature`] (feature bits), [`layout`] (index
//! arithmetic), [`entry`] (L1 and L2 entries), [`refcount`] (counts in a block's bytes), [`limits`] (bounds of the format). All sums there are checked, all bounds are tested
//! before an allocation depends on them, and errors name structure, offset and value: no image can make them panic, hang or allocate more
//! than cluster 0.

pub mod addr;
pub mod alloc;
pub mod cow;
pub mod entry;
#[cfg(test)]
mod entry_tests;
pub mod extension;
pub mod feature;
pub mod header;
#[cfg(test)]
mod header_tests;
pub mod layout;
pub mod limits;
pub mod refcount;
