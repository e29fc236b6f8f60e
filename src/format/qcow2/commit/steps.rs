//! The one place of write order and barriers (qcow2.md 3.1 point 6 and 3.2).
//!
//! | step | written | barrier |
//! |---|---|---|
//! | 0 | new refcount blocks, a new refcount table, counts in old blocks | if there are new ones |
//! | 1 | counts, refcount table entries or the header's pointer to a new table | always; also makes data durable |
//! | 2 | changed parts of L2 tables and of the L1 table | if there are any |
//!
//! Steps 1 and 2 share a barrier when nothing in step 2 needs its data durable first ([`Cut::is_ordered`]).

use super::cut::Cut;
use crate::error::IoResult;
use crate::format::qcow2::header_area::Field;
use crate::format::qcow2::image::Image;
use crate::format::qcow2::join::join_bounded;
use crate::format::qcow2::refcount::table::Piece;
use crate::format::qcow2::writer::Writer;
use crate::limits::BATCH_LEN;
use crate::node::{Edge, Node};
use crate::queue::Cx;
use crate::request::{Buffers, Request};
use crate::sync::Arc;
use crate::sync::atomic::Ordering::SeqCst;

/// Metadata writes under way at a time.
const WIDTH: usize = 16;

pub(super) async fn carry_out(image: &Arc<Image>, writer: &Arc<Writer>, cx: &Cx, cut: &Cut) -> IoResult {
    let refs = &cut.refcounts;
    let file = image.file.node();
    let has_step_0 = !refs.new.is_empty();
    if has_step_0 {
        let pieces: Vec<&Piece> = refs.new.iter().chain(&refs.parts).collect();
        write(cx, &*file, pieces).await?;
        barrier(image, writer, cx, false).await?;
    }
    let counts: Vec<&Piece> = if has_step_0 {
        refs.table_parts.iter().collect()
    } else {
        refs.parts.iter().chain(&refs.table_parts).collect()
    };
    write(cx, &*file, counts).await?;
    if let Some((offset, clusters)) = refs.table_moved {
        writer.header.change(cx, &image.file, &[Field::Reftable(offset.get(), clusters)]).await?;
    }
    if cut.is_ordered && !cut.mappings.is_empty() {
        barrier(image, writer, cx, true).await?;
        write(cx, &*file, cut.mappings.iter().collect()).await?;
        return barrier(image, writer, cx, false).await;
    }
    write(cx, &*file, cut.mappings.iter().collect()).await?;
    barrier(image, writer, cx, true).await
}

/// Writes pieces of metadata, those that follow each other in one write.
async fn write(cx: &Cx, file: &dyn Node, mut pieces: Vec<&Piece>) -> IoResult {
    pieces.sort_unstable_by_key(|p| p.offset);
    let mut joined: Vec<Piece> = Vec::new();
    for piece in pieces {
        match joined.last_mut() {
            Some(last)
                if last.offset.get() + last.bytes.len() as u64 == piece.offset.get()
                    && (last.bytes.len() + piece.bytes.len()) as u64 <= BATCH_LEN =>
            {
                last.bytes.extend(&piece.bytes);
            }
            _ => joined.push(piece.clone()),
        }
    }
    let writes = joined.into_iter().map(|piece| async move {
        cx.run(file, Request::write(piece.offset.get(), Buffers::from_bytes(&piece.bytes))).await
    });
    join_bounded(writes, WIDTH).await
}

/// Makes everything that has been written durable; with `data` also in the data file.
async fn barrier(image: &Image, writer: &Writer, cx: &Cx, data: bool) -> IoResult {
    let data = image.data_file.as_ref().filter(|_| data).map(Edge::node);
    let nodes: Vec<_> = std::iter::once(image.file.node()).chain(data).collect();
    writer.commit.barriers.fetch_add(nodes.len() as u64, SeqCst);
    let flushes = nodes.iter().map(|node| async move { cx.run(&**node, Request::flush()).await });
    let result = join_bounded(flushes, 2).await;
    if let Err(e) = result
        && nodes.iter().any(|node| is_buffered(&**node))
    {
        writer.commit.state.lock().broken = Some(e);
    }
    result
}

/// Whether the kernel keeps written data of `node` in its page cache, where a failed flush may drop it.
fn is_buffered(node: &dyn Node) -> bool {
    node.get("cache.direct").as_deref() == Some("off")
        || node.children().iter().any(|(key, edge)| *key == "file" && is_buffered(&*edge.node()))
}
