//! Refcounts: how often each cluster of the file is used.
//!
//! [`block`] is the arithmetic of a refcount block in bytes; [`table`] the refcounts of an image in RAM with what the file does not have yet.

pub mod block;
pub mod table;
#[cfg(test)]
mod table_tests;
