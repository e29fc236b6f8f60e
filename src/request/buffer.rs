//! Scatter-gather buffers that are owned until completion.
//!
//! A [`Segment`] is a piece of memory and whoever keeps it alive: nobody (memory of the host, pinned from submit to
//! completion by the contract of the C ABI) or a reference count (memory of the engine). Cloning or slicing a
//! [`Buffers`] copies no data, so a buffer can be *moved* from a read of the source into the RAM cache and from there into
//! the write to the target.
//!
//! Data races: a guest may change its own buffer while a request runs. All access here goes through raw-pointer copies
//! of bytes, never through references, so the worst outcome is the guest's own mixture of old and new bytes.

use crate::sync::Arc;
use smallvec::SmallVec;
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::any::Any;
use std::fmt;
use std::ptr::NonNull;

/// What keeps a segment's memory alive; downcast to recognise one's own buffers.
pub type MemOwner = Arc<dyn Any + Send + Sync>;

/// A piece of memory with its owner.
#[derive(Clone)]
pub struct Segment {
    ptr: NonNull<u8>,
    len: usize,
    owner: Option<MemOwner>,
}

// SAFETY: a segment is an address and a length; the memory is either kept alive by `owner`, which is Send and
// Sync, or pinned until completion by the contract of `Segment::pinned`, whichever thread uses it.
unsafe impl Send for Segment {}
// SAFETY: shared access only copies bytes through raw pointers (see the module text).
unsafe impl Sync for Segment {}

impl Segment {
    /// A segment over memory of the host.
    ///
    /// # Safety
    /// `ptr .. ptr + len` stays valid for reads (and, for a read request, writes) until the request it is used in has completed.
    pub unsafe fn pinned(ptr: *mut u8, len: usize) -> Self {
        Self { ptr: NonNull::new(ptr).unwrap_or(NonNull::dangling()), len, owner: None }
    }

    /// A segment over memory that `owner` keeps alive.
    ///
    /// # Safety
    /// `ptr .. ptr + len` is valid for reads and writes as long as `owner` (or a clone of it) lives.
    pub unsafe fn shared(ptr: NonNull<u8>, len: usize, owner: MemOwner) -> Self {
        Self { ptr, len, owner: Some(owner) }
    }

    /// Address of the first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the segment has no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Who keeps the memory alive; `None` for pinned memory of the host.
    pub fn owner(&self) -> Option<&MemOwner> {
        self.owner.as_ref()
    }

    fn slice(&self, offset: usize, len: usize) -> Self {
        assert!(offset <= self.len && len <= self.len - offset, "slice past the end of a segment");
        // SAFETY: the assertion keeps the new start inside, or one past, the segment.
        let ptr = unsafe { self.ptr.add(offset) };
        Self { ptr, len, owner: self.owner.clone() }
    }
}

/// A list of segments; the data of one request. At most `u32::MAX` segments, at most `isize::MAX` bytes.
#[derive(Clone, Default)]
pub struct Buffers {
    segs: SmallVec<[Segment; 2]>,
    len: usize,
}

impl Buffers {
    /// No data.
    pub fn new() -> Self {
        Self::default()
    }

    /// One freshly allocated, zeroed buffer of `len` bytes, aligned to `align` (a power of two).
    pub fn alloc(len: usize, align: usize) -> Self {
        if len == 0 {
            return Self::new();
        }
        AlignedMem::zeroed(len, align).into_buffers()
    }

    /// A buffer that holds a copy of `bytes`.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let b = Self::alloc(bytes.len(), 4096);
        b.copy_from_slice(bytes);
        b
    }

    /// Appends a segment; empty ones are dropped.
    pub fn push(&mut self, segment: Segment) {
        if !segment.is_empty() {
            self.len += segment.len;
            self.segs.push(segment);
        }
    }

    /// Appends all segments of `other`.
    pub fn append(&mut self, other: Buffers) {
        self.len += other.len;
        self.segs.extend(other.segs);
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The segments in order; none is empty.
    pub fn segments(&self) -> &[Segment] {
        &self.segs
    }

    /// Whether every address and every length is a multiple of `align` (a power of two).
    pub fn is_aligned(&self, align: usize) -> bool {
        let mask = align - 1;
        self.segs.iter().all(|s| (s.as_ptr() as usize | s.len) & mask == 0)
    }

    /// The bytes `offset .. offset + len` of this list, sharing the memory. Panics past the end.
    pub fn slice(&self, offset: usize, len: usize) -> Self {
        assert!(offset <= self.len && len <= self.len - offset, "slice past the end of the buffers");
        let (mut skip, mut left) = (offset, len);
        let mut out = Self::new();
        for seg in &self.segs {
            if left == 0 {
                break;
            }
            if skip >= seg.len {
                skip -= seg.len;
                continue;
            }
            let n = left.min(seg.len - skip);
            out.push(seg.slice(skip, n));
            skip = 0;
            left -= n;
        }
        out
    }

    /// Copies `self.len()` bytes from `source`, which is at least as long. The two must not share memory.
    pub fn copy_from(&self, source: &Buffers) {
        assert!(source.len >= self.len, "source shorter than destination");
        let mut from = source.segs.iter();
        let mut cur = from.next();
        let mut at = 0;
        for dst in &self.segs {
            let mut done = 0;
            while done < dst.len {
                let Some(src) = cur else { return };
                let n = (src.len - at).min(dst.len - done);
                // SAFETY: both pointers stay inside their segments; the caller promises that they do not overlap.
                unsafe { std::ptr::copy_nonoverlapping(src.as_ptr().add(at), dst.as_ptr().add(done), n) };
                done += n;
                at += n;
                if at == src.len {
                    cur = from.next();
                    at = 0;
                }
            }
        }
    }

    /// Copies `len` bytes of `source` from `from` on to `to` of this list, without counting references. Panics past an end. The two must
    /// not share memory.
    pub fn copy_range(&self, to: usize, source: &Buffers, from: usize, len: usize) {
        assert!(to <= self.len && len <= self.len - to, "range past the end of the destination");
        assert!(from <= source.len && len <= source.len - from, "range past the end of the source");
        let (mut to, mut from, mut left) = (Cursor::at(&self.segs, to), Cursor::at(&source.segs, from), len);
        while left > 0 {
            let n = left.min(to.room()).min(from.room());
            // SAFETY: both cursors have that much room in their segments; the caller promises that they do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(from.ptr(), to.ptr(), n) };
            to.advance(n);
            from.advance(n);
            left -= n;
        }
    }

    /// Fills `len` bytes from `at` on with `byte`. Panics past the end.
    pub fn fill_range(&self, at: usize, len: usize, byte: u8) {
        assert!(at <= self.len && len <= self.len - at, "range past the end of the buffers");
        let (mut to, mut left) = (Cursor::at(&self.segs, at), len);
        while left > 0 {
            let n = left.min(to.room());
            // SAFETY: the cursor has that much room in its segment.
            unsafe { std::ptr::write_bytes(to.ptr(), byte, n) };
            to.advance(n);
            left -= n;
        }
    }

    /// Copies `bytes` to the start of the list. Panics if they do not fit.
    pub fn copy_from_slice(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.len, "slice longer than the buffers");
        let mut rest = bytes;
        for seg in &self.segs {
            let n = rest.len().min(seg.len);
            // SAFETY: `n` bytes fit into the segment; `bytes` is a Rust slice and cannot be memory we own.
            unsafe { std::ptr::copy_nonoverlapping(rest.as_ptr(), seg.as_ptr(), n) };
            rest = &rest[n..];
            if rest.is_empty() {
                break;
            }
        }
    }

    /// Copies the list's bytes into `bytes`, which must be of the same length.
    pub fn copy_to_slice(&self, bytes: &mut [u8]) {
        assert!(bytes.len() == self.len, "slice and buffers differ in length");
        let mut at = 0;
        for seg in &self.segs {
            // SAFETY: lengths were compared above.
            unsafe { std::ptr::copy_nonoverlapping(seg.as_ptr(), bytes.as_mut_ptr().add(at), seg.len) };
            at += seg.len;
        }
    }

    /// A copy of the bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut v = vec![0; self.len];
        self.copy_to_slice(&mut v);
        v
    }

    /// Fills the list with `byte`.
    pub fn fill(&self, byte: u8) {
        for seg in &self.segs {
            // SAFETY: the whole segment is writable by the contract of its constructor.
            unsafe { std::ptr::write_bytes(seg.as_ptr(), byte, seg.len) };
        }
    }

    /// Whether every byte is zero. Looks at the first and last word of each segment first, so data that is not zero is told
    /// at the price of a cache miss or two.
    pub fn is_zero(&self) -> bool {
        self.segs.iter().all(|s| {
            // SAFETY: the segment is readable; a guest that changes it meanwhile changes only the answer.
            let bytes = unsafe { std::slice::from_raw_parts(s.as_ptr(), s.len) };
            bytes[s.len - 1] == 0 && is_zero(bytes)
        })
    }
}

/// A place in a list of segments.
struct Cursor<'a> {
    segs: &'a [Segment],
    at: usize,
}

impl<'a> Cursor<'a> {
    /// The place `offset` bytes into the list, which is at least that long.
    fn at(mut segs: &'a [Segment], mut offset: usize) -> Self {
        while let [first, rest @ ..] = segs
            && offset >= first.len
        {
            offset -= first.len;
            segs = rest;
        }
        Self { segs, at: offset }
    }

    /// Bytes left in the segment; 0 only at the end of the list.
    fn room(&self) -> usize {
        self.segs.first().map_or(0, |s| s.len - self.at)
    }

    fn ptr(&self) -> *mut u8 {
        self.segs[0].as_ptr().wrapping_add(self.at)
    }

    fn advance(&mut self, n: usize) {
        self.at += n;
        if self.segs[0].len == self.at {
            (self.segs, self.at) = (&self.segs[1..], 0);
        }
    }
}

/// Whether every byte of `bytes` is zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    let (head, words, tail) = bytes.as_chunks_split();
    head.iter().all(|b| *b == 0)
        && words.chunks(16).all(|c| c.iter().fold(0u64, |a, w| a | w) == 0)
        && tail.iter().all(|b| *b == 0)
}

trait Words {
    fn as_chunks_split(&self) -> (&[u8], &[u64], &[u8]);
}

impl Words for [u8] {
    fn as_chunks_split(&self) -> (&[u8], &[u64], &[u8]) {
        // SAFETY: every bit pattern is a valid u64.
        unsafe { self.align_to::<u64>() }
    }
}

impl fmt::Debug for Buffers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffers({} bytes, {} segments)", self.len, self.segs.len())
    }
}

/// Owned, zeroed, aligned memory.
pub struct AlignedMem {
    ptr: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain owned memory.
unsafe impl Send for AlignedMem {}
// SAFETY: access goes through `Buffers` only (raw copies).
unsafe impl Sync for AlignedMem {}

impl AlignedMem {
    /// `len` zeroed bytes at a multiple of `align`. Panics on an alignment that is no power of two.
    pub fn zeroed(len: usize, align: usize) -> Self {
        let layout = Layout::from_size_align(len.max(1), align).expect("alignment is a power of two");
        // SAFETY: the layout is not empty.
        let ptr = unsafe { alloc(layout) };
        let ptr = NonNull::new(ptr).unwrap_or_else(|| handle_alloc_error(layout));
        // SAFETY: freshly allocated, `layout.size()` bytes. (Not alloc_zeroed: an aligned calloc is malloc plus memset anyway.)
        unsafe { std::ptr::write_bytes(ptr.as_ptr(), 0, layout.size()) };
        Self { ptr, layout }
    }

    /// The memory as a list of one segment that owns it.
    pub fn into_buffers(self) -> Buffers {
        let (ptr, len) = (self.ptr, self.layout.size());
        let owner: MemOwner = Arc::new(self);
        let mut b = Buffers::new();
        // SAFETY: the owner frees the memory when its last clone goes.
        b.push(unsafe { Segment::shared(ptr, len, owner) });
        b
    }
}

impl Drop for AlignedMem {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this layout.
        unsafe { dealloc(self.ptr.as_ptr(), self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(lens: &[usize]) -> Buffers {
        let mut b = Buffers::new();
        for l in lens {
            b.append(if *l == 0 { Buffers::new() } else { Buffers::alloc(*l, 64) });
        }
        b
    }

    #[test]
    fn slices_and_copies_agree_with_vectors_for_every_cut() {
        let data: Vec<u8> = (1..=16).collect();
        for cut in 1..15usize {
            let b = pieces(&[cut, 16 - cut]);
            b.copy_from_slice(&data);
            assert_eq!(b.to_vec(), data);
            for off in 0..=16usize {
                for len in 0..=16 - off {
                    let s = b.slice(off, len);
                    assert_eq!(s.to_vec(), &data[off..off + len]);
                    let d = pieces(&[len / 2, len - len / 2]);
                    d.copy_from(&s);
                    assert_eq!(d.to_vec(), &data[off..off + len]);
                }
            }
        }
    }

    #[test]
    fn ranges_copied_and_filled_agree_with_vectors_for_every_cut() {
        let data: Vec<u8> = (1..=12).collect();
        for cut in 1..11usize {
            let source = pieces(&[cut, 12 - cut]);
            source.copy_from_slice(&data);
            for (to, from, len) in (0..=12)
                .flat_map(|to| {
                    (0..=12usize).flat_map(move |from| (0..=12usize).map(move |len| (to, from, len)))
                })
                .filter(|(to, from, len)| to + len <= 12 && from + len <= 12)
            {
                let dest = pieces(&[12 - cut, cut]);
                dest.fill(0xee);
                let mut model = vec![0xee; 12];
                dest.copy_range(to, &source, from, len);
                model[to..to + len].copy_from_slice(&data[from..from + len]);
                assert_eq!(dest.to_vec(), model);
                dest.fill_range(from, len, 0x55);
                model[from..from + len].fill(0x55);
                assert_eq!(dest.to_vec(), model);
            }
        }
    }

    #[test]
    fn one_byte_anywhere_makes_a_buffer_non_zero() {
        for at in 0..300usize {
            let b = Buffers::alloc(300, 64);
            assert!(b.is_zero());
            b.slice(at, 1).fill(1);
            assert!(!b.is_zero(), "byte {at}");
        }
    }

    #[test]
    fn memory_lives_as_long_as_the_last_slice() {
        let b = Buffers::from_bytes(b"hello");
        let s = b.slice(1, 3);
        drop(b);
        assert_eq!(s.to_vec(), b"ell");
    }
}
