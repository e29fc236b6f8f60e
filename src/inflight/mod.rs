//! The lock-free list of the requests that are running on a node.
