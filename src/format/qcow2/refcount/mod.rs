//! Refcounts: how often each cluster of the file is used.
//!
//! [`block`] is the arithmetic of a refcount block in bytes.

pub mod block;
