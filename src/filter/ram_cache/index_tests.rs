//! The index against a model that knows, for each cell of four bytes, which version the file has and which one is held.

use super::index::{Data, Direct, Garbage, Index, Pick, Run, Want};
use super::spill::{Place, SpillFile};
use crate::error::IoError;
use crate::filter::testing::Recorder;
use crate::node::Edge;
use crate::queue::virtual_env::virtual_env;
use crate::request::Buffers;
use crate::rt::Instant;
use crate::sync::Arc;
use crate::units::ByteRange;
use proptest::prelude::*;
use std::time::Duration;

const CELLS: usize = 48;
const CELL: u64 = 4;
/// Cells of a window.
const WINDOW: usize = 16;

#[derive(Clone, Copy, Debug)]
enum Op {
    Put(usize, usize),
    Zero(usize, usize),
    Discard(usize, usize),
    Pick { all: bool, spilled: bool },
    Finish { which: usize, how: u8 },
    Direct(usize, usize),
    EndDirect { which: usize, ok: bool },
    Spill,
    EndSpill { which: usize, ok: bool },
    Flush,
    Tick,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let range = || (0..CELLS, 1..20usize).prop_map(|(at, len)| (at, len.min(CELLS - at)));
    let op = prop_oneof![
        6 => range().prop_map(|(a, l)| Op::Put(a, l)),
        2 => range().prop_map(|(a, l)| Op::Zero(a, l)),
        1 => range().prop_map(|(a, l)| Op::Discard(a, l)),
        5 => (any::<bool>(), any::<bool>()).prop_map(|(all, spilled)| Op::Pick { all, spilled }),
        5 => (any::<usize>(), 0..8u8).prop_map(|(which, how)| Op::Finish { which, how }),
        1 => range().prop_map(|(a, l)| Op::Direct(a, l)),
        2 => (any::<usize>(), any::<bool>()).prop_map(|(which, ok)| Op::EndDirect { which, ok }),
        3 => Just(Op::Spill),
        3 => (any::<usize>(), 0..4u8).prop_map(|(which, n)| Op::EndSpill { which, ok: n > 0 }),
        1 => Just(Op::Flush),
        1 => Just(Op::Tick),
    ];
    proptest::collection::vec(op, 1..120)
}

/// What a cell has to read as; versions count up, zeros and lost cells have versions too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Held {
    version: u32,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Bytes,
    Zero,
    Lost,
}

struct Model {
    index: Index,
    now: u64,
    last: u32,
    /// Version of each cell on the file; versions never go back.
    file: Vec<u32>,
    held: Vec<Option<Held>>,
    /// Drains under way with the versions they carry.
    runs: Vec<(Run, Vec<Held>)>,
    /// Direct writes under way: their version and the last one before they began.
    directs: Vec<(Direct, ByteRange, u32)>,
    spills: Vec<(Run, Vec<Held>, Arc<Place>)>,
    spill_file: Arc<SpillFile>,
    /// Contents of the spill file by place.
    spilled: Vec<(Arc<Place>, Vec<Held>)>,
    /// Flushes: their epoch and what the file must have.
    flushes: Vec<(u64, Vec<u32>)>,
}

fn bytes(at: usize, len: usize) -> ByteRange {
    ByteRange { offset: at as u64 * CELL, len: len as u64 * CELL }
}

fn cells(r: ByteRange) -> std::ops::Range<usize> {
    (r.offset / CELL) as usize..(r.end() / CELL) as usize
}

impl Model {
    fn new() -> Self {
        let (env, _) = virtual_env(1);
        Self {
            index: Index::default(),
            now: 0,
            last: 0,
            file: vec![0; CELLS],
            held: vec![None; CELLS],
            runs: Vec::new(),
            directs: Vec::new(),
            spills: Vec::new(),
            spill_file: SpillFile::new(Edge::to_node(Recorder::new(&env, 1 << 20)), 1 << 20),
            spilled: Vec::new(),
            flushes: Vec::new(),
        }
    }

    fn want(&self, all: bool, spilled: bool) -> Want {
        Want {
            now: Instant(self.now),
            delay: Duration::from_nanos(10),
            all,
            spilled_max: if spilled { WINDOW as u64 * CELL } else { 0 },
            bytes_max: WINDOW as u64 * CELL,
            window: WINDOW as u64 * CELL,
            segments_max: 5,
            draining_max: 30 * CELL,
        }
    }

    fn step(&mut self, op: Op) {
        let mut garbage = Garbage::new();
        match op {
            Op::Put(at, len) => self.put(at, len, Kind::Bytes, &mut garbage),
            Op::Zero(at, len) => self.put(at, len, Kind::Zero, &mut garbage),
            Op::Discard(at, len) => {
                let before = self.index.len() as u64;
                let splits = self.index.splits(bytes(at, len));
                self.index.drop_range(bytes(at, len), u64::MAX, &mut garbage);
                assert!(self.index.len() as u64 <= before + splits);
                self.held[at..at + len].fill(None);
                // A discard leaves nothing to flush there.
                for (_, must) in &mut self.flushes {
                    must[at..at + len].fill(0);
                }
            }
            Op::Pick { all, spilled } => self.pick(all, spilled),
            Op::Finish { which, how } => self.finish(which, how, &mut garbage),
            Op::Direct(at, len) => {
                let range = bytes(at, len);
                let busy = self.busy_ranges().any(|r| r.overlaps(range));
                match self.index.begin_direct(range) {
                    None => assert!(busy, "nothing was in the way"),
                    Some(direct) => {
                        assert!(!busy, "a write under way overlaps");
                        self.last += 1;
                        self.directs.push((direct, range, self.last));
                    }
                }
            }
            Op::EndDirect { which, ok } => self.end_direct(which, ok, &mut garbage),
            Op::Spill => self.pick_spill(),
            Op::EndSpill { which, ok } => self.end_spill(which, ok, &mut garbage),
            Op::Flush => {
                let must: Vec<u32> = (0..CELLS)
                    .map(|c| self.held[c].filter(|h| h.kind != Kind::Lost).map_or(0, |h| h.version))
                    .collect();
                match self.index.begin_flush() {
                    Some(epoch) => self.flushes.push((epoch, must)),
                    None => assert!(self.held.iter().flatten().all(|h| h.kind == Kind::Lost)),
                }
            }
            Op::Tick => self.now += 4,
        }
        self.check();
    }

    fn put(&mut self, at: usize, len: usize, kind: Kind, garbage: &mut Garbage) {
        self.last += 1;
        let held = Held { version: self.last, kind };
        let data = match kind {
            Kind::Zero => Data::Zero { unmap: at.is_multiple_of(2) },
            _ => Data::Ram(Buffers::from_bytes(&self.last.to_le_bytes().repeat(len))),
        };
        let window = if kind == Kind::Zero { u64::MAX } else { WINDOW as u64 * CELL };
        let before = self.index.len() as u64;
        let grows = self.index.grows(bytes(at, len), window);
        self.index.put(bytes(at, len), data, window, Instant(self.now), true, garbage);
        assert!(self.index.len() as u64 <= before + grows, "more pieces than were announced");
        self.held[at..at + len].fill(Some(held));
    }

    fn pick(&mut self, all: bool, spilled: bool) {
        let mut again = 0;
        let run = loop {
            match self.index.pick(&self.want(all, spilled)) {
                Pick::Run(run) => break run,
                Pick::Again => again += 1,
                Pick::Nothing(_) => return,
            }
            assert!(again < 4, "a search comes to an end");
        };
        let carried: Vec<Held> =
            cells(run.range).map(|c| self.held[c].expect("a drain takes what is held")).collect();
        let zero = matches!(run.data.first(), Some((_, Data::Zero { .. })));
        assert!(zero || cells(run.range).len() <= WINDOW);
        assert!(
            zero || run.range.offset / (WINDOW as u64 * CELL)
                == (run.range.end() - 1) / (WINDOW as u64 * CELL),
            "a run crosses no window"
        );
        let mut at = run.range.offset;
        for (len, data) in &run.data {
            let part = ByteRange { offset: at, len: *len };
            self.check_data(part, data, &carried[(at - run.range.offset) as usize / 4..]);
            at += len;
        }
        assert_eq!(at, run.range.end());
        assert!(!self.busy_ranges().any(|r| r.overlaps(run.range)), "two writes of one range");
        self.runs.push((run, carried));
    }

    fn finish(&mut self, which: usize, how: u8, garbage: &mut Garbage) {
        if self.runs.is_empty() {
            return;
        }
        let (run, carried) = self.runs.swap_remove(which % self.runs.len());
        let range = cells(run.range);
        match how {
            0 => self.index.drain_failed(&run, Instant(self.now + 7)),
            1 => {
                self.index.drain_lost(&run, IoError::os(libc::EIO), garbage);
                for (c, h) in range.zip(&carried) {
                    if self.held[c] == Some(*h) {
                        self.held[c] = Some(Held { kind: Kind::Lost, ..*h });
                    }
                    self.flushes.iter_mut().for_each(|(_, must)| must[c] = 0);
                }
            }
            _ => {
                self.index.drained(&run, garbage);
                for (c, h) in range.zip(&carried) {
                    self.write_file(c, h.version);
                    if self.held[c] == Some(*h) {
                        self.held[c] = None;
                    }
                }
            }
        }
    }

    fn end_direct(&mut self, which: usize, ok: bool, garbage: &mut Garbage) {
        if self.directs.is_empty() {
            return;
        }
        let (direct, range, version) = self.directs.swap_remove(which % self.directs.len());
        let before = self.index.len() as u64;
        self.index.end_direct(direct, ok, garbage);
        assert!(self.index.len() as u64 <= before + 1);
        if ok {
            for c in cells(range) {
                self.write_file(c, version);
                if self.held[c].is_some_and(|h| h.version < version) {
                    self.held[c] = None;
                }
            }
        }
    }

    fn pick_spill(&mut self) {
        let mut again = 0;
        let run = loop {
            match self.index.pick_spill(8 * CELL, WINDOW as u64 * CELL) {
                Pick::Run(run) => break run,
                Pick::Again => again += 1,
                Pick::Nothing(_) => return,
            }
            assert!(again < 4, "a search comes to an end");
        };
        assert!(run.range.len <= 8 * CELL);
        let carried: Vec<Held> = cells(run.range).map(|c| self.held[c].expect("held")).collect();
        assert!(carried.iter().all(|h| h.kind == Kind::Bytes));
        let place = self.spill_file.take(run.range.len).expect("there is room");
        self.spills.push((run, carried, place));
    }

    fn end_spill(&mut self, which: usize, ok: bool, garbage: &mut Garbage) {
        if self.spills.is_empty() {
            return;
        }
        let (run, carried, place) = self.spills.swap_remove(which % self.spills.len());
        if ok {
            self.index.spilled(&run, &place, garbage);
            self.spilled.push((place, carried));
        } else {
            self.index.spill_failed(&run);
        }
    }

    fn write_file(&mut self, cell: usize, version: u32) {
        assert!(self.file[cell] <= version, "an older version reached the file last (S49)");
        self.file[cell] = version;
    }

    fn busy_ranges(&self) -> impl Iterator<Item = ByteRange> {
        self.runs.iter().map(|(r, _)| r.range).chain(self.directs.iter().map(|(_, r, _)| *r))
    }

    fn check_data(&self, range: ByteRange, data: &Data, want: &[Held]) {
        for (i, held) in want.iter().enumerate().take(range.len as usize / 4) {
            match data {
                Data::Ram(b) => {
                    let got = b.slice(i * 4, 4).to_vec();
                    assert_eq!((got, held.kind), (held.version.to_le_bytes().to_vec(), Kind::Bytes));
                }
                Data::Zero { .. } => assert_eq!(held.kind, Kind::Zero),
                Data::Lost(_) => assert_eq!(held.kind, Kind::Lost),
                Data::Spill(place, at) => {
                    let (_, content) = self
                        .spilled
                        .iter()
                        .find(|(p, _)| Arc::ptr_eq(p, place))
                        .expect("a place that was written");
                    assert_eq!(content[*at as usize / 4 + i], *held);
                }
            }
        }
    }

    fn check(&mut self) {
        let parts = self.index.parts(bytes(0, CELLS));
        let mut at = 0;
        for p in &parts {
            assert_eq!(p.range.offset, at);
            at = p.range.end();
            for c in cells(p.range) {
                let one = ByteRange { offset: c as u64 * CELL, len: CELL };
                match (&p.data, self.held[c]) {
                    (None, None) => {}
                    (Some(data), Some(held)) => {
                        self.check_data(one, &data.slice(one.offset - p.range.offset, CELL), &[held]);
                    }
                    (got, want) => panic!("cell {c}: {got:?} for {want:?}"),
                }
            }
        }
        assert_eq!(at, CELLS as u64 * CELL);
        let index = &self.index;
        let file = &self.file;
        self.flushes.retain(|(epoch, must)| {
            let done = index.is_flushed(*epoch);
            if done {
                let behind = must.iter().zip(file).position(|(m, f)| f < m);
                assert_eq!(behind, None, "a flush ended before an older change was on the file");
            }
            !done
        });
        let t = self.index.totals();
        let count = |k: Kind| self.held.iter().flatten().filter(|h| h.kind == k).count() as u64 * CELL;
        assert_eq!(t.ram + t.spilled, count(Kind::Bytes));
        assert_eq!(t.lost == 0, count(Kind::Lost) == 0);
        assert_eq!(t.zero_markers == 0, count(Kind::Zero) == 0);
    }

    /// Lets everything end well and checks that nothing is left behind.
    fn settle(mut self) {
        let mut garbage = Garbage::new();
        while !self.spills.is_empty() {
            self.end_spill(0, true, &mut garbage);
        }
        while !self.directs.is_empty() {
            self.end_direct(0, true, &mut garbage);
        }
        self.now += 100;
        for round in 0.. {
            assert!(round < 200, "the index drains");
            while !self.runs.is_empty() {
                self.finish(0, 2, &mut garbage);
                self.check();
            }
            if self.index.idle() == 0 {
                break;
            }
            let before = self.index.idle();
            self.pick(true, true);
            assert!(self.index.idle() < before, "something can be taken when nothing is in the way");
        }
        assert!(self.index.is_clean() && self.index.is_quiet());
        assert_eq!(self.index.draining(), 0);
        // A write that went straight to the file may have been the last that a flush waited for.
        self.check();
        assert!(self.flushes.is_empty());
        assert!(self.held.iter().flatten().all(|h| h.kind == Kind::Lost));
        drop(garbage);
        let mut rest = Vec::new();
        self.index.clear(&mut rest);
        drop(rest);
        self.spilled.clear();
        assert_eq!(self.spill_file.used(), 0, "every place is free again (S16)");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]
    #[test]
    fn any_sequence_of_changes_reads_and_drains_like_the_model(ops in ops()) {
        let mut model = Model::new();
        for op in ops {
            model.step(op);
        }
        model.settle();
    }
}

fn put(index: &mut Index, at: usize, len: usize, now: u64) {
    let data = Data::Ram(Buffers::from_bytes(&vec![1; len * 4]));
    index.put(bytes(at, len), data, WINDOW as u64 * CELL, Instant(now), false, &mut Garbage::new());
}

#[test]
fn a_flush_does_not_drain_what_came_after_it() {
    let mut m = Model::new();
    put(&mut m.index, 0, 4, 0);
    let epoch = m.index.begin_flush().expect("there is something");
    put(&mut m.index, 4, 4, 0);
    let Pick::Run(run) = m.index.pick(&m.want(false, false)) else { panic!("the flush asks for it") };
    assert_eq!(run.range, bytes(0, 4), "without its younger neighbour");
    assert!(matches!(m.index.pick(&m.want(false, false)), Pick::Nothing(Some(_))));
    m.index.drained(&run, &mut Garbage::new());
    assert!(m.index.is_flushed(epoch) && !m.index.is_clean());
}

#[test]
fn a_flush_waits_for_the_newer_version_when_it_replaced_the_older_one() {
    let mut m = Model::new();
    put(&mut m.index, 0, 4, 0);
    let epoch = m.index.begin_flush().expect("there is something");
    put(&mut m.index, 0, 4, 0);
    assert!(!m.index.is_flushed(epoch));
    let Pick::Run(run) = m.index.pick(&m.want(false, false)) else { panic!("it is asked for") };
    m.index.drained(&run, &mut Garbage::new());
    assert!(m.index.is_flushed(epoch));
}

#[test]
fn a_version_under_way_is_replaced_and_its_end_frees_only_itself() {
    let mut m = Model::new();
    put(&mut m.index, 0, 4, 0);
    let Pick::Run(run) = m.index.pick(&m.want(true, false)) else { panic!("a run") };
    put(&mut m.index, 1, 2, 0);
    assert!(
        matches!(m.index.pick(&m.want(true, false)), Pick::Nothing(_)),
        "the newer one waits for the older"
    );
    m.index.drained(&run, &mut Garbage::new());
    assert_eq!(m.index.totals().ram, 2 * CELL);
    let Pick::Run(run) = m.index.pick(&m.want(true, false)) else { panic!("now it can go") };
    assert_eq!(run.range, bytes(1, 2));
}

#[test]
fn what_is_old_enough_goes_in_order_of_address_with_its_neighbours() {
    let mut m = Model::new();
    for (at, now) in [(20, 0), (4, 5), (0, 0), (40, 9)] {
        put(&mut m.index, at, 4, now);
    }
    m.now = 11;
    let mut order = Vec::new();
    loop {
        match m.index.pick(&m.want(false, false)) {
            Pick::Run(run) => order.push(run.range),
            Pick::Again => {}
            Pick::Nothing(next) => {
                assert_eq!(next, Some(Instant(19)), "when the last one is old enough");
                break;
            }
        }
    }
    assert_eq!(order, [bytes(0, 8), bytes(20, 4)]);
}

#[test]
fn what_has_failed_is_tried_again_alone() {
    let mut m = Model::new();
    put(&mut m.index, 0, 4, 0);
    put(&mut m.index, 4, 4, 0);
    let Pick::Run(run) = m.index.pick(&m.want(true, false)) else { panic!("a run") };
    assert_eq!(run.pieces, 2);
    m.index.drain_failed(&run, Instant(5));
    assert!(matches!(m.index.pick(&m.want(true, false)), Pick::Nothing(Some(Instant(5)))));
    m.now = 5;
    for at in [0, 4] {
        let Pick::Run(run) = m.index.pick(&m.want(true, false)) else { panic!("a run") };
        assert_eq!((run.range, run.tries), (bytes(at, 4), 1));
    }
}

#[test]
fn the_spill_file_gets_what_is_drained_last() {
    let mut m = Model::new();
    for at in [0, 16, 32] {
        put(&mut m.index, at, 4, 0);
    }
    let Pick::Run(first) = m.index.pick(&m.want(true, false)) else { panic!("a run") };
    assert_eq!(first.range, bytes(0, 4));
    m.index.rewind_spill();
    let mut order = Vec::new();
    while let Pick::Run(run) = m.index.pick_spill(1 << 20, WINDOW as u64 * CELL) {
        order.push(run.range);
    }
    assert_eq!(order, [bytes(32, 4), bytes(16, 4)]);
}

#[test]
fn zeros_side_by_side_are_one_write_however_long() {
    let mut index = Index::default();
    let mut garbage = Garbage::new();
    for at in 0..3u64 {
        let range = ByteRange { offset: at << 40, len: 1 << 40 };
        index.put(range, Data::Zero { unmap: true }, u64::MAX, Instant(0), true, &mut garbage);
    }
    let want = Model::new().want(true, false);
    let Pick::Run(run) = index.pick(&want) else { panic!("a run") };
    assert_eq!((run.range.len, run.data.len()), (3 << 40, 1));
}
