//! Memory for parked data: taken from the system in large pieces and given back when they are empty.
//!
//! An [`Arena`] maps *chunks* of 2 MiB, aligned so that the kernel can back them with huge pages, and hands out runs of
//! pages in powers of two (buddies). Huge pages make transfers cheaper (one segment instead of sixteen for a granule), but one that the
//! kernel has to make room for, or that a hypervisor below has to find memory for, was seen to take 6 ms: only spares, which are made ahead on a
//! thread that nobody waits for, get them, and not for a while after a slow one. Two things decide its design. A page fault costs more than everything else on the
//! way of a parked granule, so memory is used again at once, and chunks are filled up before another is begun. And a
//! bound on memory must hold for what the process really occupies: a chunk goes back to the system when its last page is free (a few
//! are kept while there is use for them), and no more than [`Arena::set_limit`] is ever mapped, because a request that finds no run of its
//! size is served with several smaller ones.
//!
//! Any thread. One lock, held for a search in a few words; it is not held while memory is unmapped or touched. Memory that
//! is handed out holds whatever was there before.

use super::{MemOwner, Segment};
use crate::rt::Clock;
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use crate::sync::{Arc, Mutex};
use slab::Slab;
use smallvec::SmallVec;
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::fmt;
use std::ptr::NonNull;
use std::time::Duration;

/// Size and alignment of the smallest run.
pub const PAGE: usize = 4096;
/// Size and alignment of a chunk.
pub const CHUNK: usize = 2 << 20;
/// Largest run.
pub const RUN_MAX: usize = 1 << 20;

const PAGES: usize = CHUNK / PAGE;
const WORDS: usize = PAGES / 64;
/// Orders of runs: 1 << order pages, up to a whole chunk.
const ORDERS: usize = PAGES.ilog2() as usize + 1;
const RUN_ORDER_MAX: usize = (RUN_MAX / PAGE).ilog2() as usize;
/// Empty chunks kept for the next use; the rest goes back to the system at once.
const SPARES_MAX: usize = 16;
/// Empty chunks below which a growing user does well to have one made ready.
const SPARES_READY: usize = 4;
/// A huge page that takes longer than this to come is not worth having: small ones cost less than 1 ms per chunk.
const HUGE_SLOW: Duration = Duration::from_millis(1);
/// Chunks that do with small pages after a slow huge one.
const SMALL_AFTER_SLOW: u32 = 128;
/// Chunk number of a run that came from the heap because the system refused a mapping.
const HEAP: u32 = u32::MAX;

/// A source of page-aligned memory; see the module text.
pub struct Arena {
    state: Mutex<State>,
    limit: AtomicU64,
    mapped: AtomicU64,
    in_use: AtomicU64,
    /// A chunk was begun and few spares were left.
    hungry: AtomicBool,
    /// Spares still to be made of small pages.
    small: AtomicU32,
}

/// A run of pages; goes back to the arena when dropped.
pub struct Run {
    arena: Arc<Arena>,
    ptr: NonNull<u8>,
    chunk: u32,
    page: u16,
    order: u8,
}

/// The runs that make up a piece of memory, in order.
pub type Runs = SmallVec<[Run; 4]>;

#[derive(Default)]
struct State {
    chunks: Slab<Chunk>,
    /// Chunks by the order of their largest free run; the one touched last is last.
    bins: [Vec<u32>; ORDERS],
    /// Empty chunks.
    spares: Vec<NonNull<u8>>,
}

struct Chunk {
    base: NonNull<u8>,
    /// A set bit is a free page.
    free: [u64; WORDS],
    /// The bin the chunk is in, and its place there; `None` when it is full.
    bin: Option<(u8, u32)>,
}

// SAFETY: the pointers are addresses of mappings that the arena owns; whoever holds the lock may use them on any thread.
unsafe impl Send for State {}

// SAFETY: a run is plain memory that it alone refers to; access goes through `Segment` (raw copies).
unsafe impl Send for Run {}
// SAFETY: shared access reads the address only.
unsafe impl Sync for Run {}

impl Arena {
    /// An arena that maps at most about `limit` bytes (rounded up to whole chunks, and one more).
    pub fn new(limit: u64) -> Arc<Self> {
        let arena = Self {
            state: Mutex::default(),
            limit: AtomicU64::new(0),
            mapped: AtomicU64::new(0),
            in_use: AtomicU64::new(0),
            hungry: AtomicBool::new(false),
            small: AtomicU32::new(0),
        };
        arena.set_limit(limit);
        Arc::new(arena)
    }

    /// Changes the limit; takes effect as memory is taken and given back.
    pub fn set_limit(&self, limit: u64) {
        self.limit
            .store(limit.div_ceil(CHUNK as u64).saturating_add(1).saturating_mul(CHUNK as u64), Relaxed);
    }

    /// Bytes mapped now, spare chunks included.
    pub fn mapped(&self) -> u64 {
        self.mapped.load(Relaxed)
    }

    /// Bytes handed out now.
    pub fn in_use(&self) -> u64 {
        self.in_use.load(Relaxed)
    }

    /// Bytes that [`Arena::alloc`] takes for `len` bytes: whole pages.
    pub const fn size_of(len: u64) -> u64 {
        len.next_multiple_of(PAGE as u64)
    }

    /// Memory for `len` bytes (at least 1) in as few runs as there are; each run is a power of two of pages, the largest first as a rule.
    pub fn alloc(self: &Arc<Self>, len: usize) -> Runs {
        let mut pages = len.div_ceil(PAGE).max(1);
        let mut runs = Runs::new();
        let mut state = self.state.lock();
        while pages > 0 {
            let order = (pages.ilog2() as usize).min(RUN_ORDER_MAX);
            let run = self.take(&mut state, order);
            pages -= 1 << run.order;
            self.in_use.fetch_add(run.size() as u64, Relaxed);
            runs.push(run);
        }
        runs
    }

    /// Whether the arena has grown and has no spare chunk at hand, so that [`Arena::add_spare`] would spare the next user the page
    /// faults. Says so once each time.
    pub fn wants_spare(&self) -> bool {
        // Relaxed: a hint. The load keeps the common case free of a locked instruction.
        self.hungry.load(Relaxed) && self.hungry.swap(false, Relaxed)
    }

    /// Maps a chunk and touches its pages, which takes a while, and keeps it for the next user. Huge pages if they come quickly, as `clock` tells.
    pub fn add_spare(&self, clock: &dyn Clock) {
        if !self.may_map() {
            return;
        }
        let huge = self.small.load(Relaxed) == 0;
        let Some(base) = map_chunk(huge) else { return };
        self.mapped.fetch_add(CHUNK as u64, Relaxed);
        let begun = clock.now();
        populate(base);
        if !huge {
            // Relaxed, here and below: several may count at once and lose a step; nothing depends on the number.
            self.small.store(self.small.load(Relaxed).saturating_sub(1), Relaxed);
        } else if clock.now().since(begun) > HUGE_SLOW {
            self.small.store(SMALL_AFTER_SLOW, Relaxed);
        }
        let mut state = self.state.lock();
        if state.spares.len() < SPARES_MAX {
            state.spares.push(base);
        } else {
            drop(state);
            self.unmap(base);
        }
    }

    /// Gives every empty chunk back to the system.
    pub fn trim(&self) {
        let spares = std::mem::take(&mut self.state.lock().spares);
        spares.into_iter().for_each(|base| self.unmap(base));
    }

    fn may_map(&self) -> bool {
        self.mapped.load(Relaxed) + CHUNK as u64 <= self.limit.load(Relaxed)
    }

    /// A run of `order`, or a smaller one when only such are left within the limit.
    fn take(self: &Arc<Self>, state: &mut State, order: usize) -> Run {
        if let Some(run) = self.take_mapped(state, order) {
            return run;
        }
        if self.grow(state, false)
            && let Some(run) = self.take_mapped(state, order)
        {
            return run;
        }
        for smaller in (0..order).rev() {
            if let Some(run) = self.take_mapped(state, smaller) {
                return run;
            }
        }
        // Everything mapped is in use: the users' own accounting lets them have more than the limit.
        if self.grow(state, true)
            && let Some(run) = self.take_mapped(state, order)
        {
            return run;
        }
        self.take_heap(order)
    }

    fn take_mapped(self: &Arc<Self>, state: &mut State, order: usize) -> Option<Run> {
        // The smallest run that is large enough, so that large ones stay whole and nearly full chunks get full.
        let bin = (order..ORDERS).find(|b| !state.bins[*b].is_empty())?;
        let key = *state.bins[bin].last()?;
        let chunk = &mut state.chunks[key as usize];
        let page = find_run(&chunk.free, order)?;
        mark(&mut chunk.free, page, order, false);
        let ptr = page_at(chunk.base, page);
        state.rebin(key);
        Some(Run { arena: self.clone(), ptr, chunk: key, page: page as u16, order: order as u8 })
    }

    fn grow(&self, state: &mut State, beyond: bool) -> bool {
        let base = match state.spares.pop() {
            Some(base) => base,
            None if beyond || self.may_map() => {
                // Somebody waits: small pages come one by one, a huge one may take as long as many requests.
                let Some(base) = map_chunk(false) else { return false };
                self.mapped.fetch_add(CHUNK as u64, Relaxed);
                base
            }
            None => return false,
        };
        // A user of one chunk is not worth the trouble.
        if !state.chunks.is_empty() && state.spares.len() < SPARES_READY && self.may_map() {
            self.hungry.store(true, Relaxed);
        }
        let key = state.chunks.insert(Chunk { base, free: [u64::MAX; WORDS], bin: None });
        state.rebin(key as u32);
        true
    }

    fn take_heap(self: &Arc<Self>, order: usize) -> Run {
        let layout = heap_layout(order);
        // SAFETY: the layout is not empty.
        let ptr = unsafe { alloc(layout) };
        let ptr = NonNull::new(ptr).unwrap_or_else(|| handle_alloc_error(layout));
        Run { arena: self.clone(), ptr, chunk: HEAP, page: 0, order: order as u8 }
    }

    fn give_back(&self, run: &Run) {
        self.in_use.fetch_sub(run.size() as u64, Relaxed);
        if run.chunk == HEAP {
            // SAFETY: allocated in `take_heap` with this layout; the run is being dropped.
            unsafe { dealloc(run.ptr.as_ptr(), heap_layout(run.order as usize)) };
            return;
        }
        let mut state = self.state.lock();
        let chunk = &mut state.chunks[run.chunk as usize];
        mark(&mut chunk.free, run.page as usize, run.order as usize, true);
        if chunk.free.iter().any(|w| *w != u64::MAX) {
            state.rebin(run.chunk);
            return;
        }
        state.unbin(run.chunk);
        let base = state.chunks.remove(run.chunk as usize).base;
        if state.spares.len() < SPARES_MAX && self.mapped.load(Relaxed) <= self.limit.load(Relaxed) {
            state.spares.push(base);
        } else {
            drop(state);
            self.unmap(base);
        }
    }

    fn unmap(&self, base: NonNull<u8>) {
        // SAFETY: a chunk made by `map_chunk` that no run refers to any more.
        unsafe { libc::munmap(base.as_ptr().cast(), CHUNK) };
        self.mapped.fetch_sub(CHUNK as u64, Relaxed);
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // Every run holds the arena, so all chunks are spares by now.
        self.trim();
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena").field("mapped", &self.mapped()).field("in_use", &self.in_use()).finish()
    }
}

impl Run {
    /// Bytes of the run.
    pub fn size(&self) -> usize {
        PAGE << self.order
    }

    /// The first `len` bytes as a segment that `owner`, which must hold this run, keeps alive.
    pub fn segment(&self, len: usize, owner: MemOwner) -> Segment {
        assert!(len <= self.size(), "a segment longer than its run");
        // SAFETY: the run's memory is valid until the run is dropped, which `owner` puts off.
        unsafe { Segment::shared(self.ptr, len, owner) }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.arena.clone().give_back(self);
    }
}

impl fmt::Debug for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Run({} bytes)", self.size())
    }
}

impl State {
    /// Puts a chunk into the bin of its largest free run, last in line.
    fn rebin(&mut self, key: u32) {
        let order = largest_run(&self.chunks[key as usize].free);
        if let (Some((bin, at)), Some(order)) = (self.chunks[key as usize].bin, order)
            && bin as usize == order
            && at as usize + 1 == self.bins[order].len()
        {
            return;
        }
        self.unbin(key);
        if let Some(order) = order {
            self.chunks[key as usize].bin = Some((order as u8, self.bins[order].len() as u32));
            self.bins[order].push(key);
        }
    }

    fn unbin(&mut self, key: u32) {
        let Some((bin, at)) = self.chunks[key as usize].bin.take() else { return };
        let list = &mut self.bins[bin as usize];
        list.swap_remove(at as usize);
        if let Some(moved) = list.get(at as usize) {
            self.chunks[*moved as usize].bin = Some((bin, at));
        }
    }
}

fn heap_layout(order: usize) -> Layout {
    Layout::from_size_align(PAGE << order, PAGE).expect("a power of two below the size of a chunk")
}

fn page_at(base: NonNull<u8>, page: usize) -> NonNull<u8> {
    debug_assert!(page < PAGES);
    // SAFETY: the page lies inside the chunk's mapping.
    unsafe { base.add(page * PAGE) }
}

/// A mapping of one chunk, aligned to its size; `None` if the system refuses.
fn map_chunk(huge: bool) -> Option<NonNull<u8>> {
    let len = 2 * CHUNK;
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return None;
    }
    let start: *mut u8 = start.cast();
    let head = start.align_offset(CHUNK);
    // SAFETY: twice the size holds one aligned chunk; what is around it was mapped above and is given back.
    let base = unsafe {
        let base = start.add(head);
        if head > 0 {
            libc::munmap(start.cast(), head);
        }
        if head < CHUNK {
            libc::munmap(base.add(CHUNK).cast(), CHUNK - head);
        }
        // Advice only: everything works without, with more page faults, or with longer ones.
        libc::madvise(base.cast(), CHUNK, if huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE });
        base
    };
    NonNull::new(base)
}

/// Touches every page of a chunk that nobody uses yet.
fn populate(base: NonNull<u8>) {
    // SAFETY: the chunk is mapped and no one else refers to it. The call may fail (old kernels): then the pages come at first use.
    unsafe { libc::madvise(base.as_ptr().cast(), CHUNK, libc::MADV_POPULATE_WRITE) };
}

/// Bits of `word` at which a free, aligned run of `1 << order` pages begins; `order` is at most 6.
fn starts(mut word: u64, order: usize) -> u64 {
    /// Positions that are multiples of 1 << order.
    const ALIGNED: [u64; 7] = [
        u64::MAX,
        0x5555_5555_5555_5555,
        0x1111_1111_1111_1111,
        0x0101_0101_0101_0101,
        0x0001_0001_0001_0001,
        0x0000_0001_0000_0001,
        1,
    ];
    for k in 0..order {
        word &= (word >> (1 << k)) & ALIGNED[k + 1];
    }
    word
}

/// The first page of a free, aligned run of `1 << order` pages.
fn find_run(free: &[u64; WORDS], order: usize) -> Option<usize> {
    if order <= 6 {
        return free.iter().enumerate().find_map(|(i, w)| {
            let starts = starts(*w, order);
            (starts != 0).then(|| i * 64 + starts.trailing_zeros() as usize)
        });
    }
    let words = 1 << (order - 6);
    free.chunks_exact(words).position(|c| c.iter().all(|w| *w == u64::MAX)).map(|i| i * words * 64)
}

/// The order of the largest free run; `None` if no page is free.
fn largest_run(free: &[u64; WORDS]) -> Option<usize> {
    let whole = (7..ORDERS).rev().find(|order| find_run(free, *order).is_some());
    whole.or_else(|| free.iter().filter_map(|w| (0..=6).rev().find(|o| starts(*w, *o) != 0)).max())
}

/// Marks the pages of a run as free or taken.
fn mark(free: &mut [u64; WORDS], page: usize, order: usize, to_free: bool) {
    let mut set = |word: usize, mask: u64| {
        debug_assert!(free[word] & mask == if to_free { 0 } else { mask }, "a page has one owner");
        if to_free {
            free[word] |= mask;
        } else {
            free[word] &= !mask;
        }
    };
    if order >= 6 {
        (page / 64..(page + (1 << order)) / 64).for_each(|word| set(word, u64::MAX));
    } else {
        set(page / 64, ((1u64 << (1 << order)) - 1) << (page % 64));
    }
}

const _: () = assert!(RUN_MAX <= CHUNK && RUN_MAX.is_power_of_two());
const _: () = assert!(PAGES <= u16::MAX as usize);
const _: () = assert!(crate::limits::BATCH_LEN <= RUN_MAX as u64);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Buffers;
    use crate::rt::real::SplitMix;
    use crate::rt::{Instant, Rng};

    /// The runs of one request, as a user holds them.
    fn buffers(arena: &Arc<Arena>, len: usize) -> Buffers {
        let mut bufs = Buffers::new();
        let mut left = len;
        for run in arena.alloc(len) {
            let owner = Arc::new(run);
            let n = left.min(owner.size());
            bufs.push(owner.segment(n, owner.clone()));
            left -= n;
        }
        assert_eq!(bufs.len(), len);
        bufs
    }

    #[test]
    fn runs_of_every_order_are_found_at_the_first_aligned_place() {
        for order in 0..ORDERS {
            let mut free = [u64::MAX; WORDS];
            mark(&mut free, 0, 0, false);
            let want = if order + 1 < ORDERS { Some(1 << order) } else { None };
            assert_eq!(find_run(&free, order), want, "order {order}");
            assert_eq!(largest_run(&free), Some(ORDERS - 2));
        }
        assert_eq!(largest_run(&[0; WORDS]), None);
    }

    #[test]
    fn the_largest_run_agrees_with_a_search_page_by_page() {
        let rng = SplitMix::new(1);
        for _ in 0..2000 {
            let mut free = [0; WORDS];
            for word in &mut free {
                *word = match rng.next() % 4 {
                    0 => u64::MAX,
                    1 => rng.next(),
                    2 => rng.next() | rng.next(),
                    _ => rng.next() & rng.next() & rng.next(),
                };
            }
            let is_free = |page: usize| free[page / 64] >> (page % 64) & 1 == 1;
            let by_page = (0..ORDERS)
                .rev()
                .find(|order| (0..PAGES).step_by(1 << order).any(|p| (p..p + (1 << order)).all(is_free)));
            assert_eq!(largest_run(&free), by_page);
        }
    }

    #[test]
    fn memory_of_different_owners_never_overlaps_and_all_of_it_goes_back() {
        let arena = Arena::new(64 << 20);
        let rng = SplitMix::new(7);
        let mut held: Vec<(u8, Buffers)> = Vec::new();
        for step in 0..4000u32 {
            if rng.next() % 5 < 3 && held.len() < 100 {
                let len = match rng.next() % 3 {
                    0 => PAGE << (rng.next() % 9),
                    1 => 1 + (rng.next() % 100_000) as usize,
                    _ => 65536,
                };
                let bufs = buffers(&arena, len);
                bufs.fill(step as u8);
                held.push((step as u8, bufs));
            } else if !held.is_empty() {
                let (byte, bufs) = held.swap_remove(rng.next() as usize % held.len());
                assert!(bufs.to_vec().iter().all(|b| *b == byte), "somebody else wrote here");
            }
        }
        let used: u64 = held.iter().map(|(_, b)| Arena::size_of(b.len() as u64)).sum();
        assert_eq!(arena.in_use(), used);
        held.clear();
        assert_eq!(arena.in_use(), 0);
        arena.trim();
        assert_eq!(arena.mapped(), 0);
    }

    #[test]
    fn a_chunk_goes_back_to_the_system_when_its_last_page_is_free() {
        let arena = Arena::new(256 << 20);
        let all: Vec<Buffers> = (0..1024).map(|_| buffers(&arena, 65536)).collect();
        all.iter().for_each(|b| b.fill(1));
        assert_eq!(arena.mapped(), 64 << 20, "no chunk is begun before the last one is full");
        drop(all);
        assert_eq!(arena.mapped(), (SPARES_MAX * CHUNK) as u64, "only the spares are left");
        arena.trim();
        assert_eq!(arena.mapped(), 0);
    }

    #[test]
    fn freed_memory_is_used_before_new_memory() {
        let arena = Arena::new(64 << 20);
        let keep = buffers(&arena, 65536);
        let first = buffers(&arena, 65536).segments()[0].as_ptr();
        let again = buffers(&arena, 65536).segments()[0].as_ptr();
        assert_eq!(first, again);
        drop(keep);
    }

    #[test]
    fn scattered_pages_serve_a_large_request_within_the_limit() {
        let limit = 8 << 20;
        let arena = Arena::new(limit);
        let mut pages: Vec<Buffers> = (0..limit / PAGE as u64).map(|_| buffers(&arena, PAGE)).collect();
        // Every second page is freed: no chunk has two free pages side by side.
        let mut n = 0;
        pages.retain(|_| {
            n += 1;
            n % 2 == 0
        });
        // One more chunk is allowed; after that only single pages are left.
        let large: Vec<Buffers> = (0..5).map(|_| buffers(&arena, RUN_MAX)).collect();
        assert!(large[4].segments().len() == RUN_MAX / PAGE, "made of single pages");
        assert!(arena.mapped() <= limit + CHUNK as u64);
        drop((pages, large));
        assert_eq!(arena.in_use(), 0);
    }

    /// A clock that moves on by itself.
    #[derive(Debug, Default)]
    struct Steps {
        now: AtomicU64,
        step: u64,
    }

    impl Clock for Steps {
        fn now(&self) -> Instant {
            Instant(self.now.fetch_add(self.step, Relaxed))
        }

        fn wall_ns(&self) -> u64 {
            0
        }
    }

    #[test]
    fn after_a_slow_huge_page_spares_are_made_of_small_ones_for_a_while() {
        let arena = Arena::new(64 << 20);
        arena.add_spare(&Steps::default());
        assert_eq!(arena.small.load(Relaxed), 0, "huge pages that come at once are kept");
        let slow = Steps { step: 2 * HUGE_SLOW.as_nanos() as u64, ..Steps::default() };
        arena.add_spare(&slow);
        assert_eq!(arena.small.load(Relaxed), SMALL_AFTER_SLOW);
        arena.add_spare(&slow);
        assert_eq!(
            arena.small.load(Relaxed),
            SMALL_AFTER_SLOW - 1,
            "that one was small: its time says nothing"
        );
        assert_eq!(arena.mapped(), 3 * CHUNK as u64);
    }

    #[test]
    fn a_spare_is_asked_for_when_the_arena_grows_and_used_by_the_next_request() {
        let arena = Arena::new(64 << 20);
        let first = buffers(&arena, RUN_MAX);
        assert!(!arena.wants_spare(), "one chunk is no growth");
        let more: Vec<Buffers> = (0..2).map(|_| buffers(&arena, RUN_MAX)).collect();
        assert!(arena.wants_spare() && !arena.wants_spare(), "once");
        arena.add_spare(&Steps::default());
        let mapped = arena.mapped();
        let next: Vec<Buffers> = (0..3).map(|_| buffers(&arena, RUN_MAX)).collect();
        assert_eq!(arena.mapped(), mapped, "the spare was used");
        drop((first, more, next));
    }
}
