//! What the cache holds: a map from offsets to pieces, and the writes on their way to the file below.
//!
//! Pure: no lock, no clock, no I/O, so that it can be tested against a map of bytes. Its owner keeps it under one lock and drops what it
//! throws out ([`Garbage`]) after unlocking.
//!
//! - A *piece* is a range with one version of data: in RAM, in the spill file, zeros, or lost. Pieces are disjoint. Data in RAM is
//!   never changed: a newer version replaces it (S49), in whole or in part.
//! - A *write* is a range that is on its way to the file: a drain of pieces, or a request that goes straight there. Writes are
//!   disjoint too: what overlaps one waits for its end, which is the whole of the ordering of versions on the file (S49).
//!   A drain marks the pieces it wrote; when it has ended, those that still carry its mark go, so newer versions stay.
//! - Every change of data gets a *version* number. Every piece carries an *epoch*, the number of flushes that had begun when the oldest change
//!   that it stands for was made; a piece that replaces an undrained one inherits its epoch, for the flush waits for
//!   the older change, which now can reach the file only as part of the newer one.

use super::spill::Place;
use crate::error::IoError;
use crate::request::Buffers;
use crate::rt::Instant;
use crate::sync::Arc;
use crate::units::ByteRange;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};
use std::time::Duration;

/// Pieces looked at in one locked section when searching for work.
const SCAN_MAX: usize = 256;
/// Pieces of one drain write of zeroes.
const ZERO_MERGE_MAX: usize = 1024;

/// Where a piece's data is.
#[derive(Clone, Debug)]
pub(super) enum Data {
    /// In memory.
    Ram(Buffers),
    /// Nowhere: zeros (S11).
    Zero {
        /// Whether the file may deallocate.
        unmap: bool,
    },
    /// In the spill file, at a byte of a place.
    Spill(Arc<Place>, u64),
    /// Gone (S50).
    Lost(IoError),
}

/// One version of a range.
#[derive(Debug)]
struct Piece {
    len: u64,
    version: u64,
    epoch: u64,
    born: Instant,
    /// Not to be written before this moment (after an error).
    not_before: Instant,
    tries: u32,
    state: State,
    data: Data,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle,
    /// Part of the write to the file that has this number.
    Draining(u64),
    /// Part of the write to the spill file that has this number.
    Spilling(u64),
}

#[derive(Debug)]
struct Write {
    end: u64,
    id: u64,
    /// The oldest epoch of the pieces it writes; `None` for a request of its own.
    epoch: Option<u64>,
    /// Bytes of data that it keeps in memory until it has ended.
    held: u64,
}

/// What has been thrown out; dropped without the lock.
pub(super) type Garbage = SmallVec<[Data; 4]>;

/// A part of a range as a reader sees it.
#[derive(Debug)]
pub(super) struct Part {
    /// The bytes.
    pub(super) range: ByteRange,
    /// Their data, cut to the range; `None`: on the file.
    pub(super) data: Option<Data>,
}

/// Parts of one range, in order and without gaps.
pub(super) type Parts = SmallVec<[Part; 4]>;

/// What a drain may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Want {
    /// Now.
    pub(super) now: Instant,
    /// How old a piece must be (S45).
    pub(super) delay: Duration,
    /// Take pieces of any age.
    pub(super) all: bool,
    /// Most bytes to be read back from the spill file; 0 leaves spilled pieces alone.
    pub(super) spilled_max: u64,
    /// Most bytes of one write.
    pub(super) bytes_max: u64,
    /// Unit within which neighbours are joined and whose edges are not crossed.
    pub(super) window: u64,
    /// Most segments of one write.
    pub(super) segments_max: usize,
    /// Bytes in flight from which on nothing more is begun.
    pub(super) draining_max: u64,
}

/// A write that goes straight to the file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Direct {
    id: u64,
    /// The last version before it.
    version: u64,
    range: ByteRange,
}

/// Result of a search for work.
#[derive(Debug)]
pub(super) enum Pick {
    /// Write this.
    Run(Run),
    /// Nothing so far; search on after letting others have the lock.
    Again,
    /// Nothing; at this moment there may be something.
    Nothing(Option<Instant>),
}

/// Neighbouring pieces to be written together.
#[derive(Debug)]
pub(super) struct Run {
    /// Number of the write.
    pub(super) id: u64,
    /// What it covers.
    pub(super) range: ByteRange,
    /// Data of the pieces, in order; a single `Zero` for a run of zeros.
    pub(super) data: Vec<(u64, Data)>,
    /// Most tries that one of its pieces has behind it.
    pub(super) tries: u32,
    /// Number of pieces.
    pub(super) pieces: usize,
}

/// Bytes and pieces by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Totals {
    /// Bytes in RAM that readers can see.
    pub(super) ram: u64,
    /// Bytes in the spill file that readers can see.
    pub(super) spilled: u64,
    /// Zero markers.
    pub(super) zero_markers: usize,
    /// Pieces that are lost.
    pub(super) lost: usize,
}

/// The map; see the module text.
#[derive(Debug, Default)]
pub(super) struct Index {
    pieces: BTreeMap<u64, Piece>,
    writes: BTreeMap<u64, Write>,
    totals: Totals,
    /// Bytes of drains under way.
    draining: u64,
    /// Pieces that are neither lost nor part of a write.
    idle: usize,
    last_version: u64,
    last_write: u64,
    epoch: u64,
    /// Pieces and drains by epoch: what a flush waits for.
    due: BTreeMap<u64, usize>,
    /// Epochs up to this one are asked for by a flush; pieces of them are written at once.
    asked: Option<u64>,
    /// Where the search for work goes on.
    cursor: u64,
    spill_cursor: u64,
    spill_barren: usize,
    /// Pieces looked at since the last one found, and the earliest moment at which one of them can be taken.
    barren: usize,
    earliest: Option<Instant>,
}

impl Index {
    /// Pieces.
    pub(super) fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Whether nothing is left to be written: no pieces but lost ones, no drain under way.
    pub(super) fn is_clean(&self) -> bool {
        self.due.is_empty()
    }

    /// Whether no write of any kind is under way.
    pub(super) fn is_quiet(&self) -> bool {
        self.writes.is_empty()
    }

    /// Whether something is here that readers would miss: what has been thrown away, or was replaced by something lost, may still be on its way to the file.
    pub(super) fn holds_data(&self) -> bool {
        self.totals.ram > 0 || self.totals.spilled > 0 || self.totals.zero_markers > 0
    }

    /// Bytes and pieces by kind.
    pub(super) fn totals(&self) -> Totals {
        self.totals
    }

    /// Pieces that could be written.
    pub(super) fn idle(&self) -> usize {
        self.idle
    }

    /// Bytes of drains under way.
    pub(super) fn draining(&self) -> u64 {
        self.draining
    }

    /// Whether a flush asks for something that is still here.
    pub(super) fn is_asked(&self) -> bool {
        match (self.asked, self.due.first_key_value()) {
            (Some(asked), Some((oldest, _))) => *oldest <= asked,
            _ => false,
        }
    }

    /// Whether a piece overlaps `range`.
    pub(super) fn overlaps(&self, range: ByteRange) -> bool {
        self.first_overlap(range).is_some()
    }

    /// Puts `data` over `range` as the newest version, cut at multiples of `window` unless it is zeros. `eager`: it can be drained at once.
    pub(super) fn put(
        &mut self,
        range: ByteRange,
        data: Data,
        window: u64,
        now: Instant,
        eager: bool,
        garbage: &mut Garbage,
    ) {
        let inherited = self.drop_range(range, u64::MAX, garbage);
        let epoch = inherited.unwrap_or(self.epoch);
        self.last_version += 1;
        let mut at = range.offset;
        while at < range.end() {
            let end = match &data {
                Data::Ram(_) => (at - at % window).saturating_add(window).min(range.end()),
                _ => range.end(),
            };
            let piece = Piece {
                len: end - at,
                version: self.last_version,
                epoch,
                born: now,
                not_before: Instant(0),
                tries: 0,
                state: State::Idle,
                data: data.slice(at - range.offset, end - at),
            };
            self.add(at, piece);
            at = end;
        }
        if eager {
            self.barren = 0;
        }
    }

    /// Removes what `range` holds of versions up to `version`. Returns the oldest epoch removed that no write under way
    /// answers for.
    pub(super) fn drop_range(
        &mut self,
        range: ByteRange,
        version: u64,
        garbage: &mut Garbage,
    ) -> Option<u64> {
        let mut oldest: Option<u64> = None;
        let mut from = self.first_overlap(range);
        while let Some(at) = from {
            let end = at + self.pieces[&at].len;
            if self.pieces[&at].version <= version {
                let piece = self.remove(at);
                if !matches!(piece.state, State::Draining(_)) && !matches!(piece.data, Data::Lost(_)) {
                    oldest = Some(oldest.map_or(piece.epoch, |e| e.min(piece.epoch)));
                }
                if at < range.offset {
                    self.add(at, piece.part(0, range.offset - at));
                }
                if end > range.end() {
                    self.add(range.end(), piece.part(range.end() - at, end - range.end()));
                }
                garbage.push(piece.data);
            }
            from = self.pieces.range((Excluded(end - 1), Unbounded)).next().map(|(k, _)| *k);
            from = from.filter(|k| *k < range.end());
        }
        oldest
    }

    /// Most pieces that removing `range` adds: 1 if it lies inside one piece, else 0.
    pub(super) fn splits(&self, range: ByteRange) -> u64 {
        let inside = |at: u64| at < range.offset && at + self.pieces[&at].len > range.end();
        u64::from(self.first_overlap(range).is_some_and(inside))
    }

    /// Most pieces that putting data over `range` adds.
    pub(super) fn grows(&self, range: ByteRange, window: u64) -> u64 {
        let last = range.end().saturating_sub(1).max(range.offset);
        last / window - range.offset / window + 1 + self.splits(range)
    }

    /// How a reader sees `range`.
    pub(super) fn parts(&self, range: ByteRange) -> Parts {
        let mut parts = Parts::new();
        let mut at = range.offset;
        let gap_to = |parts: &mut Parts, at: &mut u64, to: u64| {
            if *at < to {
                parts.push(Part { range: ByteRange { offset: *at, len: to - *at }, data: None });
                *at = to;
            }
        };
        if let Some(first) = self.first_overlap(range) {
            for (&offset, piece) in self.pieces.range(first..range.end()) {
                gap_to(&mut parts, &mut at, offset);
                let end = (offset + piece.len).min(range.end());
                let data = Some(piece.data.slice(at - offset, end - at));
                parts.push(Part { range: ByteRange { offset: at, len: end - at }, data });
                at = end;
            }
        }
        gap_to(&mut parts, &mut at, range.end());
        parts
    }

    /// Begins a write that goes straight to the file, unless one that overlaps is under way.
    pub(super) fn begin_direct(&mut self, range: ByteRange) -> Option<Direct> {
        if self.write_overlaps(range) {
            return None;
        }
        self.last_write += 1;
        let id = self.last_write;
        self.writes.insert(range.offset, Write { end: range.end(), id, epoch: None, held: 0 });
        // What comes from now on is newer.
        self.last_version += 1;
        Some(Direct { id, version: self.last_version, range })
    }

    /// Ends such a write. If it has reached the file, the older versions go.
    pub(super) fn end_direct(&mut self, direct: Direct, on_file: bool, garbage: &mut Garbage) {
        let write = self.writes.remove(&direct.range.offset);
        debug_assert!(write.is_some_and(|w| w.id == direct.id), "ends once");
        if on_file {
            self.drop_range(direct.range, direct.version, garbage);
        }
        self.barren = 0;
    }

    /// Searches for pieces to write, in order of address from where the last search ended, and begins their write.
    pub(super) fn pick(&mut self, want: &Want) -> Pick {
        if self.draining >= want.draining_max {
            return Pick::Nothing(None);
        }
        for _ in 0..SCAN_MAX {
            if self.barren >= self.pieces.len() {
                self.barren = 0;
                return Pick::Nothing(self.earliest.take());
            }
            let Some((at, end, ready)) = self.look(want) else {
                self.cursor = 0;
                continue;
            };
            self.cursor = end;
            self.barren += 1;
            match ready {
                Ok(asked_only) => {
                    self.barren = 0;
                    let run = self.gather(at, want, asked_only);
                    self.cursor = run.range.end();
                    return Pick::Run(run);
                }
                Err(Some(later)) => {
                    self.earliest = Some(self.earliest.map_or(later, |e| e.min(later)));
                }
                Err(None) => {}
            }
        }
        Pick::Again
    }

    /// Ends a drain that has reached the file: the versions it wrote go.
    pub(super) fn drained(&mut self, run: &Run, garbage: &mut Garbage) {
        for at in self.marked(run.range, State::Draining(run.id)) {
            garbage.push(self.remove(at).data);
        }
        self.remove_drain(run);
    }

    /// Ends a drain that failed: its pieces are to be written again from `not_before` on.
    pub(super) fn drain_failed(&mut self, run: &Run, not_before: Instant) {
        for at in self.marked(run.range, State::Draining(run.id)) {
            let mut piece = self.remove(at);
            (piece.state, piece.not_before, piece.tries) = (State::Idle, not_before, piece.tries + 1);
            self.add(at, piece);
        }
        self.hand_on(run);
        self.remove_drain(run);
    }

    /// Ends a drain whose data is given up: the versions it was to write are lost, where they are still the newest. Returns what that is.
    pub(super) fn drain_lost(&mut self, run: &Run, error: IoError, garbage: &mut Garbage) -> Vec<ByteRange> {
        let mut lost = Vec::new();
        for at in self.marked(run.range, State::Draining(run.id)) {
            let mut piece = self.remove(at);
            garbage.push(std::mem::replace(&mut piece.data, Data::Lost(error)));
            piece.state = State::Idle;
            lost.push(ByteRange { offset: at, len: piece.len });
            self.add(at, piece);
        }
        self.hand_on(run);
        self.remove_drain(run);
        self.join_lost(run.range);
        lost
    }

    /// Searches backwards for pieces in RAM to move to the spill file: those whose turn to be drained comes last. At most `bytes_max`
    /// bytes, within one window.
    pub(super) fn pick_spill(&mut self, bytes_max: u64, window: u64) -> Pick {
        for _ in 0..SCAN_MAX {
            if self.spill_barren >= self.pieces.len() {
                self.spill_barren = 0;
                return Pick::Nothing(None);
            }
            let Some((&at, piece)) = self.pieces.range(..self.spill_cursor).next_back() else {
                self.spill_cursor = u64::MAX;
                continue;
            };
            self.spill_barren += 1;
            self.spill_cursor = at;
            if piece.can_spill() && piece.len <= bytes_max {
                self.last_write += 1;
                let id = self.last_write;
                let want = |p: &Piece| p.can_spill();
                let keys = self.neighbours(at, bytes_max, window, usize::MAX, want);
                let run = self.mark_run(&keys, id, State::Spilling(id));
                self.spill_cursor = run.range.offset;
                self.spill_barren = 0;
                return Pick::Run(run);
            }
        }
        Pick::Again
    }

    /// The next search for pieces to spill begins with those that are drained last as of now.
    pub(super) fn rewind_spill(&mut self) {
        self.spill_cursor = self.cursor;
        self.spill_barren = 0;
    }

    /// Ends a write to the spill file: what it wrote and is still here is at `place` now.
    pub(super) fn spilled(&mut self, run: &Run, place: &Arc<Place>, garbage: &mut Garbage) {
        let keys = self.marked(run.range, State::Spilling(run.id));
        let together = !self.write_overlaps(run.range);
        let mut last: Option<u64> = None;
        for at in keys {
            let mut piece = self.remove(at);
            let data = Data::Spill(place.clone(), at - run.range.offset);
            garbage.push(std::mem::replace(&mut piece.data, data));
            piece.state = State::Idle;
            // One piece instead of many saves memory. Not under a write of its own, which tells older from newer by version.
            if let Some(before) = last.filter(|b| together && *b + self.pieces[b].len == at) {
                let mut whole = self.remove(before);
                whole.len += piece.len;
                whole.version = whole.version.max(piece.version);
                whole.epoch = whole.epoch.min(piece.epoch);
                whole.born = whole.born.min(piece.born);
                whole.tries = whole.tries.max(piece.tries);
                whole.not_before = whole.not_before.max(piece.not_before);
                self.add(before, whole);
            } else {
                self.add(at, piece);
                last = Some(at);
            }
        }
        self.barren = 0;
    }

    /// Ends a write to the spill file that failed: everything stays in RAM (S47).
    pub(super) fn spill_failed(&mut self, run: &Run) {
        for at in self.marked(run.range, State::Spilling(run.id)) {
            let mut piece = self.remove(at);
            piece.state = State::Idle;
            self.add(at, piece);
        }
        self.barren = 0;
    }

    /// A flush begins: the epoch it waits for, or `None` if nothing is to be written.
    pub(super) fn begin_flush(&mut self) -> Option<u64> {
        let epoch = *self.due.last_key_value()?.0;
        // What comes from now on is of a later epoch.
        self.epoch = self.epoch.max(epoch + 1);
        self.asked = Some(self.asked.map_or(epoch, |a| a.max(epoch)));
        self.barren = 0;
        Some(epoch)
    }

    /// Whether everything of epochs up to `epoch` has reached the file.
    pub(super) fn is_flushed(&self, epoch: u64) -> bool {
        self.due.first_key_value().is_none_or(|(oldest, _)| *oldest > epoch)
    }

    /// The oldest epoch that a drain answers for.
    pub(super) fn epoch_of(&self, run: &Run) -> u64 {
        self.writes.get(&run.range.offset).and_then(|w| w.epoch).unwrap_or(u64::MAX)
    }

    /// The first lost piece, with its cause.
    pub(super) fn first_lost(&self) -> Option<(ByteRange, IoError)> {
        if self.totals.lost == 0 {
            return None;
        }
        self.pieces.iter().find_map(|(at, p)| match p.data {
            Data::Lost(e) => Some((ByteRange { offset: *at, len: p.len }, e)),
            _ => None,
        })
    }

    /// Throws everything out. Writes under way go on to their end.
    pub(super) fn clear(&mut self, garbage: &mut Vec<Data>) {
        let keys: Vec<u64> = self.pieces.keys().copied().collect();
        for at in keys {
            garbage.push(self.remove(at).data);
        }
    }

    /// The piece at the cursor: where it is, where it ends, and whether it can be taken (if so, whether only because a flush asks).
    #[allow(clippy::type_complexity, reason = "used once, right above")]
    fn look(&self, want: &Want) -> Option<(u64, u64, std::result::Result<bool, Option<Instant>>)> {
        let (&at, piece) = self.pieces.range(self.cursor..).next()?;
        let range = ByteRange { offset: at, len: piece.len };
        let ready = match self.ready(piece, want) {
            Ok(_) if self.write_overlaps(range) => Err(None),
            other => other,
        };
        Some((at, range.end(), ready))
    }

    fn ready(&self, piece: &Piece, want: &Want) -> std::result::Result<bool, Option<Instant>> {
        if !piece.can_drain(want.spilled_max) {
            return Err(None);
        }
        if piece.not_before > want.now {
            return Err(Some(piece.not_before));
        }
        let old = want.all || piece.born.after(want.delay) <= want.now;
        let asked = self.asked.is_some_and(|a| piece.epoch <= a);
        if old || asked { Ok(!old) } else { Err(Some(piece.born.after(want.delay))) }
    }

    /// Begins the drain of the piece at `at` together with its neighbours. Younger neighbours come along, unless only a flush asks,
    /// which must not drain what came after it (S49).
    fn gather(&mut self, at: u64, want: &Want, asked_only: bool) -> Run {
        let zero = matches!(self.pieces[&at].data, Data::Zero { .. });
        let asked = self.asked;
        let spilled = |p: &Piece| if matches!(p.data, Data::Spill(..)) { p.len } else { 0 };
        let mut spilled_left = want.spilled_max.saturating_sub(spilled(&self.pieces[&at]));
        let alone = self.pieces[&at].tries > 0;
        let mut take = |p: &Piece| {
            let kind = matches!(p.data, Data::Zero { .. }) == zero;
            let due = !asked_only || asked.is_some_and(|a| p.epoch <= a);
            // What has failed is tried again alone, so that one bad place does not take its neighbours along (S50).
            let ok = kind && due && !alone && p.tries == 0 && p.can_drain(spilled_left);
            if ok {
                spilled_left -= spilled(p);
            }
            ok
        };
        let keys = if zero {
            self.neighbours(at, u64::MAX, u64::MAX, ZERO_MERGE_MAX, &mut take)
        } else {
            self.neighbours(at, want.bytes_max, want.window, want.segments_max, &mut take)
        };
        self.last_write += 1;
        let id = self.last_write;
        let mut run = self.mark_run(&keys, id, State::Draining(id));
        if zero {
            let unmap = run.data.iter().all(|(_, d)| matches!(d, Data::Zero { unmap: true }));
            run.data.clear();
            run.data.push((run.range.len, Data::Zero { unmap }));
        }
        let epoch = keys.iter().map(|k| self.pieces[k].epoch).min().unwrap_or(self.epoch);
        let held = if zero { 0 } else { run.range.len };
        self.add_drain(run.range, id, epoch, held);
        run
    }

    /// The keys of the piece at `at` and of those beside it, without a gap, for which `take` is true and no write is in the way;
    /// within the window of `at` and the other bounds. In order.
    fn neighbours(
        &self,
        at: u64,
        bytes_max: u64,
        window: u64,
        count_max: usize,
        mut take: impl FnMut(&Piece) -> bool,
    ) -> SmallVec<[u64; 16]> {
        let first = &self.pieces[&at];
        let low = at - at % window;
        let high = low.saturating_add(window);
        let mut keys: SmallVec<[u64; 16]> = SmallVec::new();
        let (mut start, mut end) = (at, at + first.len);
        let mut count = first.data.segments();
        let mut fits = |p: &Piece, at: u64, bytes: u64| {
            let n = p.data.segments();
            let range = ByteRange { offset: at, len: p.len };
            let ok = bytes + p.len <= bytes_max && count + n <= count_max && !self.write_overlaps(range);
            let ok = ok && take(p);
            count += if ok { n } else { 0 };
            ok
        };
        for (&k, p) in self.pieces.range(low..at).rev() {
            if k + p.len != start || !fits(p, k, end - start) {
                break;
            }
            start = k;
            keys.push(k);
        }
        keys.reverse();
        keys.push(at);
        for (&k, p) in self.pieces.range((Excluded(at), Unbounded)) {
            if k != end || k + p.len > high || !fits(p, k, end - start) {
                break;
            }
            end = k + p.len;
            keys.push(k);
        }
        keys
    }

    fn mark_run(&mut self, keys: &[u64], id: u64, state: State) -> Run {
        let mut data = Vec::with_capacity(keys.len());
        let mut tries = 0;
        let mut end = keys[0];
        for key in keys {
            self.idle -= 1;
            let piece = self.pieces.get_mut(key).expect("a key just found");
            piece.state = state;
            tries = tries.max(piece.tries);
            data.push((piece.len, piece.data.clone()));
            end = key + piece.len;
        }
        let range = ByteRange { offset: keys[0], len: end - keys[0] };
        Run { id, range, data, tries, pieces: keys.len() }
    }

    /// Keys of the pieces in `range` that carry the mark of a write.
    fn marked(&self, range: ByteRange, state: State) -> SmallVec<[u64; 16]> {
        let pieces = self.pieces.range(range.offset..range.end());
        pieces.filter(|(_, p)| p.state == state).map(|(k, _)| *k).collect()
    }

    /// A drain has failed: what has replaced its pieces meanwhile now stands for their change too.
    fn hand_on(&mut self, run: &Run) {
        let epoch = self.epoch_of(run);
        let first = self.first_overlap(run.range).unwrap_or(run.range.end());
        let newer: SmallVec<[u64; 4]> = self
            .pieces
            .range(first.min(run.range.end())..run.range.end())
            .filter(|(_, p)| p.epoch > epoch && !matches!(p.data, Data::Lost(_)))
            .map(|(k, _)| *k)
            .collect();
        for at in newer {
            let mut piece = self.remove(at);
            piece.epoch = epoch;
            self.add(at, piece);
        }
    }

    /// Joins lost pieces with the same cause around `range`: they may be many and stay for long.
    fn join_lost(&mut self, range: ByteRange) {
        let before = self.pieces.range(..range.offset).next_back().map_or(range.offset, |(k, _)| *k);
        let lost = self.pieces.range(before..=range.end()).filter_map(|(k, p)| match p.data {
            Data::Lost(e) => Some((*k, p.len, e)),
            _ => None,
        });
        let lost: SmallVec<[(u64, u64, IoError); 16]> = lost.collect();
        let mut last: Option<(u64, u64, IoError)> = None;
        for (at, len, error) in lost {
            // Not under a write of its own, which tells older from newer by version.
            let joined = last.filter(|(b, l, e)| {
                let both = ByteRange { offset: *b, len: l + len };
                b + l == at && *e == error && !self.write_overlaps(both)
            });
            let Some((first, first_len, _)) = joined else {
                last = Some((at, len, error));
                continue;
            };
            let second = self.remove(at);
            let mut whole = self.remove(first);
            whole.len += second.len;
            whole.version = whole.version.max(second.version);
            self.add(first, whole);
            last = Some((first, first_len + len, error));
        }
    }

    fn first_overlap(&self, range: ByteRange) -> Option<u64> {
        if range.is_empty() {
            return None;
        }
        let before = self.pieces.range(..=range.offset).next_back();
        before
            .filter(|(k, p)| *k + p.len > range.offset)
            .or_else(|| self.pieces.range(range.offset..range.end()).next())
            .map(|(k, _)| *k)
    }

    fn write_overlaps(&self, range: ByteRange) -> bool {
        self.writes.range(..range.end()).next_back().is_some_and(|(_, w)| w.end > range.offset)
    }

    fn add_drain(&mut self, range: ByteRange, id: u64, epoch: u64, held: u64) {
        self.writes.insert(range.offset, Write { end: range.end(), id, epoch: Some(epoch), held });
        self.draining += held;
        *self.due.entry(epoch).or_default() += 1;
    }

    fn remove_drain(&mut self, run: &Run) {
        let Some(write) = self.writes.remove(&run.range.offset) else { return };
        debug_assert!(write.id == run.id, "a range has one write");
        self.draining -= write.held;
        if let Some(epoch) = write.epoch {
            self.undue(epoch);
        }
        self.barren = 0;
    }

    fn undue(&mut self, epoch: u64) {
        if let Some(count) = self.due.get_mut(&epoch) {
            *count -= 1;
            if *count == 0 {
                self.due.remove(&epoch);
            }
        }
    }

    fn add(&mut self, at: u64, piece: Piece) {
        if let Data::Lost(_) = piece.data {
            self.totals.lost += 1;
        } else {
            *self.due.entry(piece.epoch).or_default() += 1;
            self.idle += usize::from(piece.state == State::Idle);
        }
        match piece.data {
            Data::Ram(_) => self.totals.ram += piece.len,
            Data::Spill(..) => self.totals.spilled += piece.len,
            Data::Zero { .. } => self.totals.zero_markers += 1,
            Data::Lost(_) => {}
        }
        let old = self.pieces.insert(at, piece);
        debug_assert!(old.is_none(), "pieces are disjoint");
    }

    fn remove(&mut self, at: u64) -> Piece {
        let piece = self.pieces.remove(&at).expect("a key just found");
        if let Data::Lost(_) = piece.data {
            self.totals.lost -= 1;
        } else {
            self.undue(piece.epoch);
            self.idle -= usize::from(piece.state == State::Idle);
        }
        match piece.data {
            Data::Ram(_) => self.totals.ram -= piece.len,
            Data::Spill(..) => self.totals.spilled -= piece.len,
            Data::Zero { .. } => self.totals.zero_markers -= 1,
            Data::Lost(_) => {}
        }
        piece
    }
}

impl Piece {
    /// The same version of a part of the range.
    fn part(&self, skip: u64, len: u64) -> Self {
        Self {
            len,
            version: self.version,
            epoch: self.epoch,
            born: self.born,
            not_before: self.not_before,
            tries: self.tries,
            state: self.state,
            data: self.data.slice(skip, len),
        }
    }

    fn can_drain(&self, spilled_max: u64) -> bool {
        self.state == State::Idle
            && match self.data {
                Data::Ram(_) | Data::Zero { .. } => true,
                Data::Spill(..) => self.len <= spilled_max,
                Data::Lost(_) => false,
            }
    }

    fn can_spill(&self) -> bool {
        self.state == State::Idle && matches!(self.data, Data::Ram(_))
    }
}

impl Data {
    /// The data of `len` bytes from `skip` on, sharing the memory.
    pub(super) fn slice(&self, skip: u64, len: u64) -> Self {
        match self {
            Data::Ram(bufs) if skip == 0 && len == bufs.len() as u64 => Data::Ram(bufs.clone()),
            Data::Ram(bufs) => Data::Ram(bufs.slice(skip as usize, len as usize)),
            Data::Zero { unmap } => Data::Zero { unmap: *unmap },
            Data::Spill(place, at) => Data::Spill(place.clone(), at + skip),
            Data::Lost(e) => Data::Lost(*e),
        }
    }

    fn segments(&self) -> usize {
        match self {
            Data::Ram(bufs) => bufs.segments().len(),
            _ => 1,
        }
    }
}
