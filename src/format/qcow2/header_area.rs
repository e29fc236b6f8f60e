//! The first bytes of the file, for changes of single fields while the image is open (rule 17).
//!
//! All writes of the header are built from one copy and go out one at a time, so a bit set by one task does not undo a switch made by another. What is written is
//! the first block, as it is in the file but for the fields changed: names, extensions and bytes that nobody understands stay where they are. All
//! fields that change lie in the first 512 bytes, which reach the disk whole or not at all.

use super::feature::{Autoclear, Incompatible};
use crate::error::IoResult;
use crate::node::{Edge, Node};
use crate::queue::Cx;
use crate::request::{Buffers, Class, Request};
use crate::sync::{Arc, Mutex};
use event_listener::Event;
use std::fmt;

/// A change of the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// The refcount table: offset, clusters.
    Reftable(u64, u32),
    /// The active L1 table: offset, entries.
    L1(u64, u32),
    /// Bytes of the disk.
    Size(u64),
    /// Incompatible features.
    Incompatible(Incompatible),
    /// Autoclear features.
    Autoclear(Autoclear),
}

/// See the module.
pub struct HeaderArea {
    block: Mutex<Vec<u8>>,
    busy: Mutex<bool>,
    free: Event,
}

impl HeaderArea {
    /// The header area of the image in `file`, read from it; its cluster size is `cluster`.
    pub async fn read(cx: &Cx, file: &dyn Node, cluster: u64) -> IoResult<Self> {
        // Whole blocks of the file, so that writing them needs no read; but never a neighbour of cluster 0.
        let len = u64::from(file.limits().request_align).clamp(512, 4096).min(cluster);
        let bufs = Buffers::alloc(len as usize, 4096);
        super::meta_io::read_at(cx, file, super::addr::HostOffset(0), &bufs, Class::Guest).await?;
        Ok(Self { block: Mutex::new(bufs.to_vec()), busy: Mutex::new(false), free: Event::new() })
    }

    /// Writes the header with these fields changed; in the file, not yet durable, when it ends. After an error the copy has the change all the same, and the next write
    /// carries it.
    pub async fn change(&self, cx: &Cx, file: &Arc<Edge>, fields: &[Field]) -> IoResult {
        let _turn = self.turn().await;
        let bytes = {
            let mut block = self.block.lock();
            fields.iter().for_each(|field| field.put(&mut block));
            Buffers::from_bytes(&block)
        };
        let file = file.node();
        cx.run(&*file, Request::write(0, bytes)).await
    }

    async fn turn(&self) -> Turn<'_> {
        loop {
            let listener = self.free.listen();
            if !std::mem::replace(&mut *self.busy.lock(), true) {
                return Turn(self);
            }
            listener.await;
        }
    }
}

struct Turn<'a>(&'a HeaderArea);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.busy.lock() = false;
        self.0.free.notify_additional(1);
    }
}

impl Field {
    fn put(self, block: &mut [u8]) {
        let mut at = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
        match self {
            Field::Reftable(offset, clusters) => {
                at(48, &offset.to_be_bytes());
                at(56, &clusters.to_be_bytes());
            }
            Field::L1(offset, entries) => {
                at(36, &entries.to_be_bytes());
                at(40, &offset.to_be_bytes());
            }
            Field::Size(size) => at(24, &size.to_be_bytes()),
            Field::Incompatible(bits) => at(72, &bits.bits().to_be_bytes()),
            Field::Autoclear(bits) => at(88, &bits.bits().to_be_bytes()),
        }
    }
}

impl fmt::Debug for HeaderArea {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HeaderArea")
    }
}
