//! Files and block devices: the node, the open file, and what keeps unaligned writes safe.
//!
//! [`FileNode`] plans: an aligned request is one engine operation, everything else goes through `io/align.rs`. [`FileHandle`] is what operations
//! keep open. Locks are taken as QEMU takes them, on bytes of the open file description (`lock.rs`). Nothing here changes the size of a file.
//!
//! Not guaranteed: nobody else's writes to the file are seen by the gate; that is what the locks are for.

mod gate;
mod handle;
mod lock;
mod node;
mod open;
pub mod sys;

pub(in crate::io) use gate::Claim;
pub use gate::GateToken;
pub use handle::{Aio, FileHandle};
pub use node::FileNode;
pub use open::{FILE_PROPS, create_file, identity_at, real_path, remove_file};
