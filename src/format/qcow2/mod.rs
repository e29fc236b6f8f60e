//! qcow2: sparse images with backing files, compression and internal snapshots. The design and the numbers of the rules cited here are those of
//! `qcow2.md`.
//!
//! Foundation, without I/O: [`header`] and [`extension`] (cluster 0 to fields and back), [`feature`] (feature bits), [`layout`] (index
//! arithmetic), [`entry`] (L1 and L2 entries), [`refcount`] (counts in a block's bytes), [`limits`] (bounds of the format). All sums there are checked, all bounds are tested
//! before an allocation depends on them, and errors name structure, offset and value: no image can make them panic, hang or allocate more
//! than cluster 0.
//!
//! Metadata in RAM: [`l1`] (the active L1 table), [`cache`] (slices of L2 tables; what a commit takes from them).

pub mod addr;
pub mod alloc;
pub mod cache;
pub mod cow;
pub mod create;
pub mod entry;
#[cfg(test)]
mod entry_tests;
pub mod extension;
pub mod feature;
mod flight;
pub mod header;
#[cfg(test)]
mod header_tests;
mod join;
pub mod l1;
pub mod layout;
pub mod limits;
mod meta_io;
pub mod refcount;
#[cfg(test)]
mod testing;
