//! What a commit covers.
//!
//! Copied in the order L1, L2, refcounts: pointers before what they point at, so nothing in a cut points at something younger than the cut. Marks of a part are taken
//! before it is copied, and whoever changes an entry stores it before he marks. What is written later is the copy, never the live slice.

use crate::format::qcow2::addr::HostOffset;
use crate::format::qcow2::cache::{DirtyPart, Slice};
use crate::format::qcow2::entry::L1Entry;
use crate::format::qcow2::image::Image;
use crate::format::qcow2::l1::{L1Table, PART};
use crate::format::qcow2::refcount::table::{Piece, RefCut};
use crate::format::qcow2::writer::Writer;
use crate::sync::Arc;
use crate::sync::atomic::Ordering::SeqCst;

/// See the module.
pub(super) struct Cut {
    /// Its number.
    pub(super) number: u64,
    /// Changed parts of L2 tables and of the L1 table: step 2.
    pub(super) mappings: Vec<Piece>,
    /// Refcounts: steps 0 and 1.
    pub(super) refcounts: RefCut,
    /// Whether data must be durable before the mappings are written.
    pub(super) is_ordered: bool,
    slices: Vec<(Arc<Slice>, Vec<DirtyPart>)>,
    l1: Option<(Arc<L1Table>, Vec<usize>)>,
}

impl Cut {
    pub(super) fn take(image: &Image, writer: &Writer) -> Self {
        let commit = &writer.commit;
        let number = writer.alloc.begin_cut();
        let before = commit.ordered.load(SeqCst);
        let mut mappings = Vec::new();
        let l1 = image.l1.get();
        let l1 = l1.as_ref().map(|table| {
            let mut parts = Vec::new();
            table.take_dirty(|part, words| {
                let offset = HostOffset(table.offset().get() + (part * PART * 8) as u64);
                mappings.push(Piece { offset, bytes: to_bytes(&words) });
                parts.push(part);
            });
            (table.clone(), parts)
        });
        let mut slices = Vec::new();
        let layout = &image.layout;
        let per_table = layout.slices_per_table() as u64;
        image.cache.take_dirty(|slice, parts| {
            let l1_index = slice.key() / per_table;
            let table =
                l1.as_ref().and_then(|(table, _)| L1Entry::decode(table.word(l1_index), layout).ok()?.table);
            // A slice is dirty only under a table that the L1 entry in RAM points at.
            if let Some(table) = table {
                let first = table.get() + ((slice.key() % per_table) << layout.slice_bits);
                mappings.extend(parts.iter().map(|part| Piece {
                    offset: HostOffset(first + part.offset as u64),
                    bytes: to_bytes(&part.words),
                }));
            }
            slices.push((slice.clone(), parts));
        });
        let refcounts = writer.alloc.take_cut();
        let under_way = commit.linking.load(SeqCst) != 0;
        let after = commit.ordered.load(SeqCst);
        let last = commit.state.lock().ordered_before.replace(before);
        let is_ordered = under_way || last != Some(after);
        Self { number, mappings, refcounts, is_ordered, slices, l1 }
    }

    /// The cut is over; with `failed` all of it is dirty again.
    pub(super) fn end(&self, image: &Image, writer: &Writer, failed: bool) {
        if failed && let Some((table, parts)) = &self.l1 {
            parts.iter().for_each(|part| table.mark(*part));
        }
        for (slice, parts) in &self.slices {
            if failed {
                image.cache.mark_again(slice, parts);
            }
            image.cache.release_cut(slice);
        }
        writer.alloc.end_cut(&self.refcounts, self.number, failed);
    }
}

fn to_bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_be_bytes()).collect()
}
