//! Limits that a node states and the layer above keeps.

/// Size, alignment and transfer limits of a node.
///
/// Requests of any offset and length inside the node are *accepted* by every node (adapting is done once, in `io/align.rs`); the
/// alignments say what is fast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Length in bytes; need not be a multiple of anything (S37).
    pub size: u64,
    /// Offset and length alignment in bytes that needs no read-modify-write; a power of two, 1 if there is none.
    pub request_align: u32,
    /// Memory alignment in bytes that needs no bounce buffer; a power of two.
    pub memory_align: u32,
    /// Best transfer size in bytes; 0 if unknown.
    pub opt_transfer: u32,
    /// Largest transfer in bytes that goes down as one operation; 0 if unlimited.
    pub max_transfer: u32,
    /// Discard granularity in bytes; smaller ones may be ignored.
    pub discard_align: u32,
    /// Most segments per operation.
    pub max_iov: u32,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether `WriteZeroes` is fast (does not write the zeros).
    pub fast_zeroes: bool,
    /// Granule in bytes that a copy to this node should be a multiple of (a format's cluster); 0 if none.
    pub cluster: u32,
    /// Whether a node that was never written reads as zeros *and this is known* (a fresh file), so that zeros need not be copied.
    pub zero_init: bool,
}

impl Limits {
    /// Limits of a plain node of `size` bytes in memory.
    pub const fn plain(size: u64) -> Self {
        Self {
            size,
            request_align: 1,
            memory_align: 1,
            opt_transfer: 0,
            max_transfer: 0,
            discard_align: 1,
            max_iov: 1024,
            read_only: false,
            fast_zeroes: true,
            cluster: 0,
            zero_init: false,
        }
    }
}
