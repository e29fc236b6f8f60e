//! Before an image is closed: everything in RAM goes to the file, and what was reserved ahead of need goes back.
//!
//! The node stays usable, and settling it again costs little. What is left of runs goes back first: counts that were raised ahead of need are then never written. One
//! commit, and after frees a second one for the counts that they lower.

use super::commit::Commit;
use super::image::Image;
use crate::error::IoResult;
use crate::queue::Cx;
use crate::sync::Arc;

impl Image {
    /// Brings everything to the file. Errors leave it in RAM, for another attempt.
    pub(super) async fn settle(self: &Arc<Self>, cx: &Cx) -> IoResult {
        let Some(writer) = self.writer.get() else { return Ok(()) };
        self.retire_packer(writer);
        writer.alloc.retire(cx).await?;
        if self.is_dirty(writer) || writer.alloc.has_pending() {
            Commit::flush(self, writer, cx).await?;
        }
        if writer.alloc.has_pending() {
            writer.alloc.release_all(cx).await?;
            writer.alloc.retire(cx).await?;
        }
        writer.alloc.idle(cx).await?;
        self.relieved(writer, cx).await?;
        if self.is_dirty(writer) {
            Commit::flush(self, writer, cx).await?;
        }
        writer.alloc.idle(cx).await
    }
}
