//! qcow2: sparse images with backing files, compression and internal snapshots. The design and the numbers of the rules cited here are those of
//! `qcow2.md`.
//!
//! Foundation, without I/O: [`header`] and [`extension`] (cluster 0 to fields and back), [`feature`] (feature bits), [`layout`] (index
//! arithmetic), [`entry`] (L1 and L2 entries), [`refcount`] (counts in a block's bytes), [`limits`] (bounds of the format). All sums there are checked, all bounds are tested
//! before an allocation depends on them, and errors name structure, offset and value: no image can make them panic, hang or allocate more
//! than cluster 0.
//!
//! Looking without opening: [`inspect`] (the header), [`snapshot`], [`bitmap`] (what they list), [`check`] (whether all of it is consistent), [`measure`] (how large an image
//! would be).
//!
//! Metadata in RAM: [`l1`] (the active L1 table), [`cache`] (slices of L2 tables; what a commit takes from them).
//!
//! An open image: [`open`] (options to images, the chain below), [`settings`] (QEMU's option names), [`image`] (state that all requests share), `node` (the trait), [`map`]
//! (guest range to runs), `read` (plans and slow reads), `decompress` (compressed clusters, kept for a while), [`chain`] (the
//! layers below as one).
//!
//! Writing: `write` (fast and slow path), `zero` (write-zeroes, discard), `tables` (L2 tables of the image's own, the window of entries that a request changes),
//! [`cow`] (what a partial write must bring along), [`alloc`] (host clusters), [`commit`] (what is durable when), [`writer`] (what a writable image has beside),
//! `header_area`, `bitmap`, `close`, [`create`]. `docs/design/qcow2-write.md` says how they meet.
//!
//! Threads: everything here is used by several queues at once. Locks: those of the cache (see there), a few leaf locks for sections of some instructions (`header`,
//! `last_error`, the list of decompressed clusters, the allocator, the state of commits); none is held across an await.

pub mod addr;
pub mod alloc;
pub mod bitmap;
pub mod cache;
pub mod chain;
pub mod check;
mod close;
pub mod commit;
mod compress;
pub mod cow;
#[cfg(test)]
mod crash_tests;
pub mod create;
pub mod create_options;
mod decompress;
mod describe;
pub mod entry;
#[cfg(test)]
mod entry_tests;
pub mod extension;
pub mod feature;
mod flight;
pub mod header;
mod header_area;
#[cfg(test)]
mod header_tests;
pub mod image;
pub mod inspect;
mod join;
pub mod l1;
pub mod layout;
pub mod limits;
pub mod map;
pub mod measure;
mod meta_io;
mod node;
pub mod open;
mod pack;
mod read;
pub mod refcount;
mod repair;
pub mod settings;
pub mod snapshot;
mod tables;
#[cfg(test)]
mod testing;
mod write;
pub mod writer;
mod zero;

pub use create_options::CREATE_PROPS;
pub use image::Image;
pub use node::Qcow2Node;
pub use settings::QCOW2_PROPS;
