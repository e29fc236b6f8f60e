//! Persistent dirty bitmaps (qcow2.md sections 1 and 2, crash rule 10): their directory is read for `info` and `check`, and a writer marks the enabled ones as in
//! use. This driver does not track them yet.

mod directory;
mod in_use;

pub use directory::{AUTO, Bitmap, EXTRA_COMPATIBLE, IN_USE, each_table_piece, read_directory};
pub(super) use in_use::mark_in_use;
