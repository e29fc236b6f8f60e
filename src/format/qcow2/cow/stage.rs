//! Staged clusters: bytes that guests have written and that wait for the rest of their cluster (qcow2.md 3.1 point 3, 4.2).
//!
//! A [`Stage`] stands for one guest cluster. It has memory for the pages that were written, with a bit per sector that is *valid*, and one that is *busy* while somebody
//! copies into it: a writer claims his sectors (one that finds a busy bit waits), copies, and makes them valid. Readers take valid sectors only. Whoever settles
//! the cluster closes it to new claims and waits for the last busy bit, so no byte is written to the file that nobody has copied yet. Two guests'
//! requests for the same sectors have no order, so a sector may be copied out while another request has just claimed it anew.
//!
//! A [`Stages`] holds the stages of an image: found by cluster, counted by the pages they use. A stage belongs to the image and to no request.
//!
//! Locks: one per shard of the map and one per stage, leaves, held for a few steps and not over copies.

use super::plan::Bytes;
use crate::format::qcow2::addr::HostOffset;
use crate::format::qcow2::cache::Pinned;
use crate::request::Buffers;
use crate::rt::Instant;
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Arc, Mutex};
use crate::units::ByteRange;
use event_listener::Event;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::fmt;

/// What a bit stands for, in bytes.
pub const SECTOR: u64 = 512;
/// What memory is taken in, in bytes (a smaller cluster is one page).
const PAGE: u32 = 4096;
const SHARDS: u64 = 16;

/// The host cluster that a stage will be written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Where it is.
    pub host: HostOffset,
    /// Whether it was reserved for this stage; else the guest cluster has it already.
    pub is_new: bool,
    /// Whether it reads as zeros wherever it is not linked.
    pub zeroed: bool,
    /// The first cut that covers its count and its zeros.
    pub cut: u64,
}

/// See the module.
pub struct Stage {
    /// First byte of the guest cluster.
    pub guest: u64,
    /// Where it goes.
    pub place: Place,
    /// When it was made.
    pub since: Instant,
    cluster: u32,
    /// What must be whole for the stage to be complete: a unit, or the cluster for a writer that goes on in order.
    unit: u32,
    /// The slice that its entry is in: the settling of a full cache must not wait for room.
    _pin: Option<Pinned>,
    state: Mutex<State>,
    changed: Event,
}

#[derive(Default)]
struct State {
    pages: Vec<Option<Buffers>>,
    valid: Bits,
    busy: Bits,
    claims: usize,
    closed: bool,
}

type Bits = SmallVec<[u64; 2]>;

/// What became of a write to a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Join {
    /// The bytes are in.
    Done,
    /// They would make everything touched whole; nothing has been done.
    Completes,
    /// Somebody else copies to the same sectors, or the stage is being settled.
    Wait,
}

impl Stage {
    /// An empty stage of a cluster of `cluster` bytes with units of `unit` bytes.
    pub fn new(
        guest: u64,
        place: Place,
        cluster: u32,
        unit: u32,
        since: Instant,
        pin: Option<Pinned>,
    ) -> Arc<Self> {
        let words = (u64::from(cluster) / SECTOR).div_ceil(64) as usize;
        let state = State {
            pages: vec![None; cluster.div_ceil(PAGE) as usize],
            valid: SmallVec::from_elem(0, words),
            busy: SmallVec::from_elem(0, words),
            ..State::default()
        };
        Arc::new(Self {
            guest,
            place,
            since,
            cluster,
            unit,
            _pin: pin,
            state: Mutex::new(state),
            changed: Event::new(),
        })
    }

    /// Copies `range` (sectors of the disk, inside the cluster) from byte `from` of `bufs`. With `stop_short` it is not done if it would complete what it touches. Returns the
    /// memory taken for it beside what became of it.
    pub fn write(&self, range: ByteRange, bufs: &Buffers, from: usize, stop_short: bool) -> (Join, u64) {
        let bits = self.bits(range);
        let (mut taken, mut pieces) = (0, SmallVec::<[(Buffers, usize, usize); 4]>::new());
        {
            let mut state = self.state.lock();
            if state.closed || any(&state.busy, &bits) {
                return (Join::Wait, 0);
            }
            if stop_short && self.completes(&state, &bits) {
                return (Join::Completes, 0);
            }
            let page_len = PAGE.min(self.cluster);
            let mut at = (range.offset - self.guest) as u32;
            let end = at + range.len as u32;
            while at < end {
                let (index, inside) = ((at / page_len) as usize, at % page_len);
                let len = (page_len - inside).min(end - at);
                let page = state.pages[index].get_or_insert_with(|| {
                    taken += u64::from(page_len);
                    Buffers::alloc(page_len as usize, PAGE as usize)
                });
                pieces.push((page.clone(), inside as usize, len as usize));
                at += len;
            }
            set(&mut state.busy, &bits, true);
            state.claims += 1;
        }
        let mut copied = from;
        for (page, inside, len) in pieces {
            page.copy_range(inside, bufs, copied, len);
            copied += len;
        }
        let mut state = self.state.lock();
        set(&mut state.valid, &bits, true);
        set(&mut state.busy, &bits, false);
        state.claims -= 1;
        drop(state);
        self.changed.notify(usize::MAX);
        (Join::Done, taken)
    }

    /// Ends when a write that was told to wait may try again.
    pub async fn wait(&self, range: ByteRange) {
        let bits = self.bits(range);
        loop {
            let listener = self.changed.listen();
            {
                let state = self.state.lock();
                if !state.closed && !any(&state.busy, &bits) {
                    return;
                }
            }
            listener.await;
        }
    }

    /// Copies the valid sectors of `range` (bytes of the disk) to `bufs`, whose first byte is `range.offset`. Whether that was all of it.
    pub fn read(&self, range: ByteRange, bufs: &Buffers) -> bool {
        let cluster = ByteRange { offset: self.guest, len: u64::from(self.cluster) };
        let part = range.intersect(cluster);
        let page_len = u64::from(PAGE.min(self.cluster));
        let mut pieces = SmallVec::<[(Buffers, u64, u64); 4]>::new();
        let mut found = 0;
        {
            let state = self.state.lock();
            for valid in ranges(&state.valid) {
                let valid = ByteRange {
                    offset: self.guest + u64::from(valid.start),
                    len: u64::from(valid.end - valid.start),
                };
                let mut at = valid.intersect(part);
                while !at.is_empty() {
                    let inside = at.offset - self.guest;
                    let len = (page_len - inside % page_len).min(at.len);
                    if let Some(page) = &state.pages[(inside / page_len) as usize] {
                        pieces.push((page.slice((inside % page_len) as usize, len as usize), at.offset, len));
                    }
                    at = ByteRange { offset: at.offset + len, len: at.len - len };
                }
            }
        }
        for (page, offset, len) in pieces {
            bufs.copy_range((offset - range.offset) as usize, &page, 0, len as usize);
            found += len;
        }
        found == range.len
    }

    /// Whether any byte of `range` is valid.
    pub fn has_any(&self, range: ByteRange) -> bool {
        let part = range.intersect(ByteRange { offset: self.guest, len: u64::from(self.cluster) });
        !part.is_empty() && any(&self.state.lock().valid, &self.bits(part))
    }

    /// No claims from now on; ends when those under way have ended.
    pub async fn close(&self) {
        self.state.lock().closed = true;
        loop {
            let listener = self.changed.listen();
            if self.state.lock().claims == 0 {
                return;
            }
            listener.await;
        }
    }

    /// Claims are taken again: it could not be settled.
    pub fn reopen(&self) {
        self.state.lock().closed = false;
        self.changed.notify(usize::MAX);
    }

    /// It is settled and out of the map: whoever waits for it looks at the mapping.
    pub fn end(&self) {
        self.changed.notify(usize::MAX);
    }

    /// The valid ranges of the cluster, in order. Call it when it is closed.
    pub fn valid(&self) -> SmallVec<[Bytes; 4]> {
        ranges(&self.state.lock().valid)
    }

    /// The memory of `len` bytes from `at` of the cluster, all of them valid.
    pub fn slice(&self, at: u32, len: u32) -> Buffers {
        let state = self.state.lock();
        let page_len = PAGE.min(self.cluster);
        let (mut at, end) = (at, at + len);
        let mut out = Buffers::new();
        while at < end {
            let inside = at % page_len;
            let len = (page_len - inside).min(end - at);
            if let Some(page) = &state.pages[(at / page_len) as usize] {
                out.append(page.slice(inside as usize, len as usize));
            }
            at += len;
        }
        out
    }

    /// Bytes of memory it uses.
    pub fn memory(&self) -> u64 {
        let pages = self.state.lock().pages.iter().flatten().count() as u64;
        pages * u64::from(PAGE.min(self.cluster))
    }

    /// Whether everything that has been touched is whole.
    pub fn is_complete(&self) -> bool {
        let state = self.state.lock();
        let none = SmallVec::from_elem(0, state.valid.len());
        self.completes(&state, &none)
    }

    /// Whether every unit that has a valid sector would have only such with these added.
    fn completes(&self, state: &State, added: &Bits) -> bool {
        let sectors = (u64::from(self.unit) / SECTOR) as usize;
        let count = (self.cluster / self.unit) as usize;
        let bit = |n: usize| (state.valid[n / 64] | added[n / 64]) >> (n % 64) & 1 == 1;
        (0..count).all(|unit| {
            let mut bits = (unit * sectors..(unit + 1) * sectors).map(bit);
            let first = bits.next().unwrap_or(false);
            bits.all(|b| b == first)
        })
    }

    fn bits(&self, range: ByteRange) -> Bits {
        let first = (range.offset - self.guest) / SECTOR;
        let end = (range.end() - self.guest).div_ceil(SECTOR);
        let words = (u64::from(self.cluster) / SECTOR).div_ceil(64);
        (0..words)
            .map(|w| {
                let (low, high) = (first.max(w * 64), end.min((w + 1) * 64));
                if low >= high { 0 } else { u64::MAX >> (64 - (high - low)) << (low - w * 64) }
            })
            .collect()
    }
}

fn any(a: &Bits, b: &Bits) -> bool {
    a.iter().zip(b).any(|(a, b)| a & b != 0)
}

fn set(bits: &mut Bits, which: &Bits, on: bool) {
    for (word, mask) in bits.iter_mut().zip(which) {
        *word = if on { *word | mask } else { *word & !mask };
    }
}

/// Runs of set bits, in bytes.
fn ranges(bits: &Bits) -> SmallVec<[Bytes; 4]> {
    let mut out: SmallVec<[Bytes; 4]> = SmallVec::new();
    let sector = SECTOR as u32;
    for (w, word) in bits.iter().enumerate() {
        let (mut word, mut at) = (*word, w as u32 * 64);
        while word != 0 {
            let skip = word.trailing_zeros();
            word >>= skip;
            at += skip;
            let run = word.trailing_ones();
            match out.last_mut() {
                Some(last) if last.end == at * sector => last.end = (at + run) * sector,
                _ => out.push(at * sector..(at + run) * sector),
            }
            word = word.checked_shr(run).unwrap_or(0);
            at += run;
        }
    }
    out
}

/// The stages of one image.
pub struct Stages {
    cluster_bits: u32,
    shards: [Mutex<BTreeMap<u64, Arc<Stage>>>; SHARDS as usize],
    count: AtomicUsize,
    bytes: AtomicU64,
    limit: u64,
}

impl Stages {
    /// None yet. `limit` is in bytes of memory; 0 switches staging off.
    pub fn new(cluster_bits: u32, limit: u64) -> Self {
        Self {
            cluster_bits,
            shards: Default::default(),
            count: AtomicUsize::new(0),
            bytes: AtomicU64::new(0),
            limit,
        }
    }

    /// Whether there is none; looked at first by everybody.
    pub fn is_empty(&self) -> bool {
        // Acquire: partner is `insert`; who sees acknowledged bytes finds their stage.
        self.count.load(Ordering::Acquire) == 0
    }

    /// Whether another stage may be made.
    pub fn has_room(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) < self.limit
    }

    /// Whether some should be settled to make room.
    pub fn is_pressed(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) > self.limit / 4 * 3
    }

    /// Bytes above what should be in use after pressure has been given way to.
    pub fn excess(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed).saturating_sub(self.limit / 2)
    }

    /// Bytes of memory in use.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// The stage of the cluster that holds `guest`.
    pub fn get(&self, guest: u64) -> Option<Arc<Stage>> {
        if self.is_empty() {
            return None;
        }
        let cluster = guest >> self.cluster_bits;
        self.shard(cluster).lock().get(&cluster).cloned()
    }

    /// Stages of clusters that `range` touches, in order.
    pub fn overlapping(&self, range: ByteRange) -> SmallVec<[Arc<Stage>; 2]> {
        if self.is_empty() || range.is_empty() {
            return SmallVec::new();
        }
        let (first, last) = (range.offset >> self.cluster_bits, (range.end() - 1) >> self.cluster_bits);
        if last - first < SHARDS {
            return (first..=last).filter_map(|c| self.shard(c).lock().get(&c).cloned()).collect();
        }
        let mut found: SmallVec<[Arc<Stage>; 2]> = SmallVec::new();
        for shard in &self.shards {
            found.extend(shard.lock().range(first..=last).map(|(_, s)| s.clone()));
        }
        found.sort_unstable_by_key(|s| s.guest);
        found
    }

    /// All stages, in the order of their host clusters.
    pub fn all(&self) -> Vec<Arc<Stage>> {
        let mut found: Vec<_> =
            self.shards.iter().flat_map(|s| s.lock().values().cloned().collect::<Vec<_>>()).collect();
        found.sort_unstable_by_key(|s| s.place.host);
        found
    }

    /// Adds a stage, with its first bytes in it. The caller has entered the cluster.
    pub fn insert(&self, stage: Arc<Stage>) {
        let cluster = stage.guest >> self.cluster_bits;
        let old = self.shard(cluster).lock().insert(cluster, stage);
        debug_assert!(old.is_none(), "a cluster is staged once");
        self.count.fetch_add(1, Ordering::AcqRel);
    }

    /// Takes a stage out, after its bytes can be read elsewhere.
    pub fn remove(&self, stage: &Arc<Stage>) {
        let cluster = stage.guest >> self.cluster_bits;
        let old = self.shard(cluster).lock().remove(&cluster);
        debug_assert!(old.is_some_and(|s| Arc::ptr_eq(&s, stage)));
        self.give_back(stage.memory());
        self.count.fetch_sub(1, Ordering::AcqRel);
        stage.end();
    }

    /// Memory has been taken for a stage.
    pub fn charge(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn give_back(&self, bytes: u64) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn shard(&self, cluster: u64) -> &Mutex<BTreeMap<u64, Arc<Stage>>> {
        &self.shards[(cluster % SHARDS) as usize]
    }
}

impl fmt::Debug for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stage")
            .field("guest", &self.guest)
            .field("place", &self.place)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Stages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stages")
            .field("count", &self.count)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "the lists are of ranges")]
mod tests {
    use super::*;
    use crate::rt::{Rng, real::SplitMix};
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Waker};

    const GUEST: u64 = 1 << 20;

    fn stage(cluster: u32, unit: u32) -> Arc<Stage> {
        let place = Place { host: HostOffset(0x50000), is_new: true, zeroed: true, cut: 0 };
        Stage::new(GUEST, place, cluster, unit, Instant(0), None)
    }

    fn range(offset: u64, len: u64) -> ByteRange {
        ByteRange { offset: GUEST + offset, len }
    }

    fn bytes(len: u64, byte: u8) -> Buffers {
        let b = Buffers::alloc(len as usize, 8);
        b.fill(byte);
        b
    }

    #[test]
    fn random_writes_agree_with_a_vector_and_its_mask() {
        for cluster in [512u64, 1024, 4096, 65536] {
            let s = stage(cluster as u32, cluster as u32);
            let rng = SplitMix::new(cluster);
            let (mut model, mut mask) = (vec![0u8; cluster as usize], vec![false; cluster as usize]);
            let mut memory = 0;
            for step in 0..200u64 {
                let first = rng.next() % (cluster / SECTOR);
                let len = 1 + rng.next() % (cluster / SECTOR - first);
                let r = range(first * SECTOR, len * SECTOR);
                let place = (first * SECTOR) as usize..((first + len) * SECTOR) as usize;
                let all = mask.iter().enumerate().all(|(i, m)| *m || place.contains(&i));
                let (join, taken) = s.write(r, &bytes(r.len + 7, step as u8), 7, true);
                memory += taken;
                assert_eq!(join == Join::Completes, all, "step {step}");
                if join == Join::Done {
                    model[place.clone()].fill(step as u8);
                    mask[place].fill(true);
                }
                let seen = bytes(cluster, 0xee);
                let whole = s.read(range(0, cluster), &seen);
                assert_eq!(whole, mask.iter().all(|m| *m));
                for (i, byte) in seen.to_vec().into_iter().enumerate() {
                    assert_eq!(byte, if mask[i] { model[i] } else { 0xee });
                }
                let ranges = s.valid();
                let in_ranges = |i: usize| ranges.iter().any(|r| r.contains(&(i as u32)));
                assert!((0..cluster as usize).all(|i| in_ranges(i) == mask[i]));
                for r in &ranges {
                    let expected = &model[r.start as usize..r.end as usize];
                    assert!(s.slice(r.start, r.end - r.start).to_vec() == expected);
                }
                assert_eq!(s.has_any(r), (0..r.len).any(|i| mask[(r.offset - GUEST + i) as usize]));
            }
            assert_eq!(s.memory(), memory);
        }
    }

    #[test]
    fn units_are_complete_each_for_itself() {
        let s = stage(16384, 4096);
        assert_eq!(s.write(range(0, 512), &bytes(512, 1), 0, true).0, Join::Done);
        assert_eq!(s.write(range(512, 3584), &bytes(3584, 1), 0, true).0, Join::Completes);
        assert_eq!(
            s.write(range(4096, 4096), &bytes(4096, 1), 0, true).0,
            Join::Done,
            "the first is not whole"
        );
        assert_eq!(s.write(range(512, 3584), &bytes(3584, 1), 0, false).0, Join::Done);
        assert_eq!(s.valid().to_vec(), [0..8192]);
    }

    #[test]
    fn a_closed_stage_takes_nothing_until_it_is_opened_again() {
        let s = stage(4096, 4096);
        assert_eq!(s.write(range(0, 512), &bytes(512, 1), 0, true).0, Join::Done);
        let mut cx = Context::from_waker(Waker::noop());
        assert!(pin!(s.close()).poll(&mut cx).is_ready(), "nobody copies");
        assert_eq!(s.write(range(512, 512), &bytes(512, 1), 0, true).0, Join::Wait);
        let mut wait = pin!(s.wait(range(512, 512)));
        assert!(wait.as_mut().poll(&mut cx).is_pending());
        s.reopen();
        assert!(wait.as_mut().poll(&mut cx).is_ready());
        assert_eq!(s.write(range(512, 512), &bytes(512, 1), 0, true).0, Join::Done);
    }

    #[test]
    fn stages_are_found_by_their_clusters_and_their_memory_is_counted() {
        let stages = Stages::new(12, 8192);
        let place = |host| Place { host: HostOffset(host), is_new: true, zeroed: true, cut: 0 };
        for (guest, host) in [(0u64, 0x3000), (0x5000, 0x1000), (0x40000, 0x2000)] {
            let s = Stage::new(guest, place(host), 4096, 4096, Instant(0), None);
            let (_, taken) = s.write(ByteRange { offset: guest, len: 512 }, &bytes(512, 1), 0, true);
            stages.charge(taken);
            stages.insert(s);
        }
        assert!(!stages.has_room() && stages.is_pressed());
        assert_eq!(stages.excess(), 8192);
        let guests = |range: ByteRange| stages.overlapping(range).iter().map(|s| s.guest).collect::<Vec<_>>();
        assert_eq!(guests(ByteRange { offset: 0x5fff, len: 1 }), [0x5000]);
        assert_eq!(guests(ByteRange { offset: 0xfff, len: 0x3f002 }), [0, 0x5000, 0x40000]);
        assert_eq!(guests(ByteRange { offset: 0x1000, len: 0x4000 }), Vec::<u64>::new());
        let hosts: Vec<u64> = stages.all().iter().map(|s| s.place.host.get()).collect();
        assert_eq!(hosts, [0x1000, 0x2000, 0x3000]);
        let s = stages.get(0x5123).expect("staged");
        stages.remove(&s);
        assert!(stages.get(0x5000).is_none() && stages.has_room() == (stages.bytes() < 8192));
        stages.all().iter().for_each(|s| stages.remove(s));
        assert!(stages.is_empty() && stages.bytes() == 0);
    }
}
