//! Before an image is closed: everything in RAM goes to the file, and what was reserved ahead of need goes back.
//!
//! The node stays usable, and settling it again costs little. Three commits at most: what was written; the counts lowered by what that freed; the counts of
//! runs that were given back, in the same one.

use super::commit::Commit;
use super::image::Image;
use crate::error::IoResult;
use crate::queue::Cx;
use crate::sync::Arc;

impl Image {
    /// Brings everything to the file. Errors leave it in RAM, for another attempt.
    pub(super) async fn settle(self: &Arc<Self>, cx: &Cx) -> IoResult {
        let Some(writer) = self.writer.get() else { return Ok(()) };
        if self.is_dirty(writer) || writer.alloc.has_pending() {
            Commit::flush(self, writer, cx).await?;
        }
        writer.alloc.release_all(cx).await?;
        writer.alloc.retire(cx).await?;
        if self.is_dirty(writer) {
            Commit::flush(self, writer, cx).await?;
        }
        writer.alloc.idle(cx).await
    }
}
