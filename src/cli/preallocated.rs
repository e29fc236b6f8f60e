//! Whether a qcow2 image looks as if clusters had been set aside for it without writing to them.
//!
//! Then holes of its file say which have not been written to, and `map` tells them. Otherwise holes are nobody's business: there are some
//! wherever a cluster was written in part. As with qemu-img this is a guess: noticeably more clusters are in use than the file has space for.

use crate::error::IoResult;
use crate::format::qcow2::Qcow2Node;
use crate::format::qcow2::refcount::block;
use crate::node::Node;
use crate::queue::Cx;
use crate::request::{Buffers, Request};
use crate::sync::{Arc, Mutex};
use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;

/// What has been found of the layers of one image, by their address: they live as long as it is open.
#[derive(Clone, Debug, Default)]
pub(super) struct Guesses(Arc<Mutex<HashMap<usize, bool>>>);

impl Guesses {
    /// Whether the layer `top` looks preallocated. Looks at its refcounts at most once, and only if its file has far less space than length.
    pub(super) async fn of(&self, cx: &Cx, top: &Qcow2Node) -> bool {
        let key = std::ptr::from_ref(top).addr();
        let known = self.0.lock().get(&key).copied();
        if let Some(known) = known {
            return known;
        }
        // What cannot be read is no reason to believe anything.
        let found = look(cx, top).await.unwrap_or(false);
        self.0.lock().insert(key, found);
        found
    }
}

async fn look(cx: &Cx, top: &Qcow2Node) -> IoResult<bool> {
    let file = top.image().file.node();
    let Some(meta) = file.get("filename").and_then(|name| std::fs::metadata(name).ok()) else {
        return Ok(false);
    };
    let layout = top.image().layout;
    let (all, with_space) = (layout.clusters_for(meta.len()), (meta.blocks() * 512) >> layout.cluster_bits);
    let many = with_space + (with_space / 9).max(2);
    Ok(meta.is_file() && all >= many && clusters_in_use(cx, &*file, top, all, many).await? >= many)
}

/// Counts clusters with a refcount among the first `all`, up to `enough`.
async fn clusters_in_use(cx: &Cx, file: &dyn Node, top: &Qcow2Node, all: u64, enough: u64) -> IoResult<u64> {
    let layout = top.image().layout;
    let (table, clusters) = {
        let header = top.image().header.lock();
        (header.reftable_offset.get(), header.reftable_clusters)
    };
    // Blocks past the end of the file count nothing that has space.
    let blocks = all.div_ceil(layout.refblock_entries()).min(layout.reftable_entries(clusters));
    let mut count = 0;
    for index in 0..blocks {
        let entry = read(cx, file, table + index * 8, 8).await?;
        let at = entry.iter().fold(0, |at, byte| at << 8 | u64::from(*byte)) & !511;
        if at == 0 || at >= file.limits().size {
            continue;
        }
        let bytes = read(cx, file, at, layout.cluster_size()).await?;
        let used = |at: &usize| block::get(&bytes, layout.refcount_order, *at) != 0;
        count += (0..layout.refblock_entries() as usize).filter(used).count() as u64;
        if count >= enough {
            break;
        }
    }
    Ok(count)
}

/// Reads; what lies past the end is zeros.
async fn read(cx: &Cx, file: &dyn Node, offset: u64, len: u64) -> IoResult<Vec<u8>> {
    let data = Buffers::alloc(len as usize, 4096);
    data.fill(0);
    let inside = file.limits().size.saturating_sub(offset).min(len);
    if inside > 0 {
        cx.run(file, Request::read(offset, data.slice(0, inside as usize))).await?;
    }
    Ok(data.to_vec())
}
