//! `sync` over loom.
pub use loom::sync::Arc;
pub use loom::sync::atomic;
pub use loom::thread;
