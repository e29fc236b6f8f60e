//! `-C`: what is read from a backing file is kept in the image. Done before the read, for whole (sub-)clusters, by the one thread that commands run on.

use super::image::OpenImage;
use super::transfer::is_filled;
use crate::error::IoResult;
use crate::format::qcow2::Qcow2Node;
use crate::request::{Buffers, Flags, Request};
use crate::units::{ByteRange, align_down, align_up};

/// Bytes that are copied at a time.
const PIECE: u64 = 1 << 20;

impl OpenImage {
    /// Copies into the image what of `range` it does not hold itself.
    pub(super) fn copy_up(&self, range: ByteRange) -> IoResult {
        let disk = &self.image.disk;
        let unit = match disk.top() {
            Some(top) if self.copy_on_read => match top.as_any().downcast_ref::<Qcow2Node>() {
                Some(node) => node.image().layout.subcluster_size(),
                None => return Ok(()),
            },
            _ => return Ok(()),
        };
        let end = range.offset.saturating_add(range.len).min(disk.size());
        let end = align_up(end, unit).min(disk.size());
        let mut at = align_down(range.offset, unit);
        while at < end {
            let (held, len) = self.run_of(at, end)?;
            if !held {
                self.copy(ByteRange { offset: at, len })?;
            }
            at += len;
        }
        Ok(())
    }

    fn copy(&self, range: ByteRange) -> IoResult {
        for offset in (range.offset..range.end()).step_by(PIECE as usize) {
            let piece = ByteRange { offset, len: PIECE.min(range.end() - offset) };
            let data = Buffers::alloc(piece.len as usize, 4096);
            self.run(Request::read(offset, data.clone()))?;
            self.run(if is_filled(&data, 0) {
                Request::write_zeroes(piece, Flags::empty())
            } else {
                Request::write(offset, data)
            })?;
        }
        Ok(())
    }
}
