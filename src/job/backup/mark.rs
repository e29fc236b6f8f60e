//! The mark on a target that is not a complete backup (S25).
//!
//! A target file carries the extended attribute `user.cobweb.backup` = `incomplete` from before the first write until after
//! success. Where a target can carry none (a block device, NBD, a host backend, some file systems) only the job's result tells.

use crate::io::file::{FileHandle, FileNode, sys};
use crate::node::Vertex;
use crate::queue::Env;
use crate::sync::Arc;

const NAME: &str = "user.cobweb.backup";
const INCOMPLETE: &[u8] = b"incomplete";

/// A file that has been marked.
#[derive(Debug)]
pub(super) struct Mark {
    file: Arc<FileHandle>,
    /// It carried the mark before: an earlier backup onto it had failed.
    old: bool,
}

impl Mark {
    /// Marks the file at the bottom of `target`; `None` if there is none or it can carry no mark. May block.
    pub(super) fn set(env: &Env, target: &Arc<Vertex>) -> Option<Self> {
        let file = bottom_file(target)?;
        let old = matches!(sys::attribute(&file.fd(), NAME), Ok(Some(value)) if value == INCOMPLETE);
        match sys::set_attribute(&file.fd(), NAME, INCOMPLETE) {
            Ok(()) => Some(Self { file, old }),
            Err(e) => {
                let text = format!("target '{}' cannot be marked as incomplete: {e}", target.name());
                env.log(1, "backup", &text);
                None
            }
        }
    }

    /// The backup is complete. May block.
    pub(super) fn remove(&self) -> std::io::Result<()> {
        sys::remove_attribute(&self.file.fd(), NAME)
    }

    /// The backup was not begun: the file is what it was before. May block.
    pub(super) fn restore(&self) {
        if !self.old {
            // A mark that stays by mistake says less than the file holds, which is the safe side.
            let _ = self.remove();
        }
    }
}

/// The file below `vertex`, down the `file` edges.
fn bottom_file(vertex: &Arc<Vertex>) -> Option<Arc<FileHandle>> {
    let mut node = vertex.base().clone();
    for _ in 0..crate::limits::GRAPH_DEPTH_MAX {
        if let Some(file) = node.as_any().downcast_ref::<FileNode>() {
            return Some(file.handle().clone());
        }
        let below = node.children().into_iter().find(|(key, _)| *key == "file").map(|(_, e)| e.node());
        node = below?;
    }
    None
}
