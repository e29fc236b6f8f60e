//! Error reports: what went wrong, where, and what was done about it (semantics.md, section 5).
//!
//! Filters and jobs keep an [`ErrorLog`]: the first and the last error in full, and a count per (side, errno), so that the cause
//! stays readable after any number of later errors. What a snapshot has lost is kept complete in a [`LostList`].

use crate::error::IoError;
use crate::events::Side;
use crate::request::Op;
use crate::rt::Runtime;
use crate::sync::Mutex;
use crate::units::ByteRange;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// What was done about an error; the numbers are those of the C ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[repr(u32)]
pub enum Action {
    /// Nothing: it was only reported.
    #[default]
    None = 0,
    /// Tried again.
    Retried = 1,
    /// The data went to the spill file.
    Spilled = 2,
    /// The data went straight to the target.
    WrittenThrough = 3,
    /// The range was given up (loss scope `range`, S50).
    RangeLost = 4,
    /// The snapshot was given up (S29).
    SnapshotBroken = 5,
    /// A guest write failed (`break-guest-write`, S27).
    GuestWriteFailed = 6,
}

impl Action {
    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Action::None => "none",
            Action::Retried => "retried",
            Action::Spilled => "spilled",
            Action::WrittenThrough => "written-through",
            Action::RangeLost => "range-lost",
            Action::SnapshotBroken => "snapshot-broken",
            Action::GuestWriteFailed => "guest-write-failed",
        }
    }
}

/// One error in full.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// errno and our own code.
    pub error: IoError,
    /// Which part failed.
    pub side: Side,
    /// What was tried.
    pub op: Op,
    /// First byte, on the guest disk.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Name of the node, empty if it has none.
    pub node: String,
    /// Monotonic time in nanoseconds.
    pub mono_ns: u64,
    /// Wall-clock nanoseconds since 1970.
    pub real_ns: u64,
    /// What was done.
    pub action: Action,
    /// Errors of this side and errno so far, this one included; 0 until the report is in a log.
    pub count: u64,
}

impl Report {
    /// A report of now.
    pub fn new(rt: &Runtime, error: IoError, side: Side, op: Op, range: ByteRange) -> Self {
        Self {
            error,
            side,
            op,
            offset: range.offset,
            len: range.len,
            node: String::new(),
            mono_ns: rt.clock.now().0,
            real_ns: rt.clock.wall_ns(),
            action: Action::None,
            count: 0,
        }
    }

    /// The same report with the node's name.
    pub fn on_node(mut self, name: impl Into<String>) -> Self {
        self.node = name.into();
        self
    }

    /// The same report with what was done.
    pub fn action(mut self, action: Action) -> Self {
        self.action = action;
        self
    }

    /// The fields of section 5.
    pub fn to_json(&self) -> Value {
        json!({
            "errno": self.error.errno,
            "code": self.error.code.name(),
            "error": self.error.to_string(),
            "side": self.side.name(),
            "op": self.op.name(),
            "offset": self.offset,
            "len": self.len,
            "node": self.node,
            "mono-ns": self.mono_ns,
            "real-ns": self.real_ns,
            "action": self.action.name(),
            "count": self.count,
        })
    }
}

/// First and last error in full and a count per (side, errno). Any thread; the size does not grow with the number of errors.
#[derive(Debug, Default)]
pub struct ErrorLog {
    state: Mutex<LogState>,
}

#[derive(Debug, Default)]
struct LogState {
    first: Option<Report>,
    last: Option<Report>,
    counts: BTreeMap<(Side, i32), u64>,
}

impl ErrorLog {
    /// Adds an error and returns it with its count.
    pub fn add(&self, mut report: Report) -> Report {
        let mut s = self.state.lock();
        let count = s.counts.entry((report.side, report.error.errno)).or_default();
        *count += 1;
        report.count = *count;
        if s.first.is_none() {
            s.first = Some(report.clone());
        }
        s.last = Some(report.clone());
        report
    }

    /// The first error: the cause. Its count is the number of such errors up to now.
    pub fn first(&self) -> Option<Report> {
        let s = self.state.lock();
        s.counted(&s.first)
    }

    /// The last error.
    pub fn last(&self) -> Option<Report> {
        let s = self.state.lock();
        s.counted(&s.last)
    }

    /// Whether there was none.
    pub fn is_empty(&self) -> bool {
        self.state.lock().first.is_none()
    }

    /// Errors so far.
    pub fn total(&self) -> u64 {
        self.state.lock().counts.values().sum()
    }

    /// Errors so far per side and errno.
    pub fn counts(&self) -> Vec<(Side, i32, u64)> {
        self.state.lock().counts.iter().map(|((side, errno), n)| (*side, *errno, *n)).collect()
    }

    /// `first`, `last`, `counts`; `first` and `last` are null without an error.
    pub fn to_json(&self) -> Value {
        let counts: Vec<Value> = self
            .counts()
            .into_iter()
            .map(|(side, errno, n)| json!({"side": side.name(), "errno": errno, "count": n}))
            .collect();
        json!({
            "first": self.first().map(|r| r.to_json()),
            "last": self.last().map(|r| r.to_json()),
            "counts": counts,
        })
    }
}

impl LogState {
    fn counted(&self, report: &Option<Report>) -> Option<Report> {
        let mut report = report.clone()?;
        report.count = self.counts.get(&(report.side, report.error.errno)).copied().unwrap_or_default();
        Some(report)
    }
}

/// A range of a snapshot that is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LostRange {
    /// The bytes, on the guest disk.
    pub range: ByteRange,
    /// The first cause.
    pub error: IoError,
    /// Wall-clock nanoseconds since 1970.
    pub real_ns: u64,
}

impl LostRange {
    /// The fields of section 5.
    pub fn to_json(&self) -> Value {
        json!({
            "offset": self.range.offset,
            "len": self.range.len,
            "errno": self.error.errno,
            "code": self.error.code.name(),
            "real-ns": self.real_ns,
        })
    }
}

/// Every lost range: disjoint, in order of address, neighbours with one cause merged. Complete, so its length is bounded by the granules of
/// the disk only. Any thread.
#[derive(Debug, Default)]
pub struct LostList {
    ranges: Mutex<BTreeMap<u64, LostRange>>,
}

impl LostList {
    /// Adds a range. Where something was lost before the first cause is kept.
    pub fn add(&self, lost: LostRange) {
        let mut ranges = self.ranges.lock();
        for gap in gaps(&ranges, lost.range) {
            insert_merged(&mut ranges, LostRange { range: gap, ..lost });
        }
    }

    /// All ranges.
    pub fn all(&self) -> Vec<LostRange> {
        self.ranges.lock().values().copied().collect()
    }

    /// The first range that ends after `offset`; the way to walk the list without copying it.
    pub fn next_from(&self, offset: u64) -> Option<LostRange> {
        let ranges = self.ranges.lock();
        let before = ranges.range(..=offset).next_back().map(|(_, r)| *r).filter(|r| r.range.end() > offset);
        before.or_else(|| ranges.range(offset..).next().map(|(_, r)| *r))
    }

    /// The lost range that has the byte at `offset`.
    pub fn at(&self, offset: u64) -> Option<LostRange> {
        self.next_from(offset).filter(|r| r.range.offset <= offset)
    }

    /// Whether nothing is lost.
    pub fn is_empty(&self) -> bool {
        self.ranges.lock().is_empty()
    }

    /// Bytes lost.
    pub fn bytes(&self) -> u64 {
        self.ranges.lock().values().map(|r| r.range.len).sum()
    }

    /// An array of [`LostRange::to_json`].
    pub fn to_json(&self) -> Value {
        Value::Array(self.all().iter().map(LostRange::to_json).collect())
    }
}

/// The parts of `range` that no entry of `ranges` covers.
fn gaps(ranges: &BTreeMap<u64, LostRange>, range: ByteRange) -> Vec<ByteRange> {
    let mut out = Vec::new();
    let mut at = range.offset;
    let first = ranges.range(..=range.offset).next_back().map_or(range.offset, |(k, _)| *k);
    for known in ranges.range(first..range.end().max(first)).map(|(_, r)| r.range) {
        if known.end() <= at {
            continue;
        }
        if known.offset > at {
            out.push(ByteRange { offset: at, len: known.offset - at });
        }
        at = known.end();
    }
    if at < range.end() {
        out.push(ByteRange { offset: at, len: range.end() - at });
    }
    out
}

/// Inserts a range that overlaps none, joining it with neighbours of the same cause.
fn insert_merged(ranges: &mut BTreeMap<u64, LostRange>, mut lost: LostRange) {
    let before = ranges.range(..lost.range.offset).next_back().map(|(_, r)| *r);
    if let Some(b) = before.filter(|b| b.range.end() == lost.range.offset && b.error == lost.error) {
        ranges.remove(&b.range.offset);
        lost.range = ByteRange { offset: b.range.offset, len: b.range.len + lost.range.len };
        lost.real_ns = b.real_ns;
    }
    let after = ranges.get(&lost.range.end()).copied();
    if let Some(a) = after.filter(|a| a.error == lost.error) {
        ranges.remove(&a.range.offset);
        lost.range.len += a.range.len;
        lost.real_ns = lost.real_ns.min(a.real_ns);
    }
    ranges.insert(lost.range.offset, lost);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    fn report(errno: i32, side: Side, offset: u64) -> Report {
        Report {
            error: IoError::os(errno),
            side,
            op: Op::Write,
            offset,
            len: 512,
            node: "t0".into(),
            mono_ns: 1,
            real_ns: 2,
            action: Action::Retried,
            count: 0,
        }
    }

    #[test]
    fn the_first_error_stays_and_the_counts_go_on() {
        let log = ErrorLog::default();
        assert!(log.is_empty() && log.first().is_none());
        log.add(report(libc::EIO, Side::Target, 0));
        log.add(report(libc::ENOSPC, Side::Target, 1));
        log.add(report(libc::EIO, Side::Target, 2));
        log.add(report(libc::EIO, Side::Source, 3));
        let first = log.first().expect("there is a first error");
        assert_eq!((first.offset, first.count), (0, 2));
        assert_eq!(log.last().expect("there is a last error").offset, 3);
        assert_eq!(log.total(), 4);
        let json = log.to_json();
        assert_eq!(json["first"]["side"], "target");
        assert_eq!(json["counts"].as_array().map(Vec::len), Some(3));
    }

    #[test]
    fn lost_ranges_agree_with_a_map_of_bytes() {
        // Every pair of ranges over 8 bytes, two causes: the list is disjoint, merged and keeps the first cause.
        let ranges: Vec<(u64, u64)> = (0..8).flat_map(|o| (1..=8 - o).map(move |l| (o, l))).collect();
        for a in &ranges {
            for b in &ranges {
                for c in [(2, 3), (0, 8)] {
                    let list = LostList::default();
                    let mut model = [None; 8];
                    for (i, (o, l)) in [*a, *b, c].into_iter().enumerate() {
                        let errno = [libc::EIO, libc::ENOSPC, libc::EIO][i];
                        let range = ByteRange { offset: o, len: l };
                        list.add(LostRange { range, error: IoError::new(errno, Code::Io), real_ns: 0 });
                        (o..o + l).for_each(|x| model[x as usize] = model[x as usize].or(Some(errno)));
                    }
                    check(&list, &model);
                }
            }
        }
    }

    fn check(list: &LostList, model: &[Option<i32>; 8]) {
        let all = list.all();
        for (x, want) in model.iter().enumerate() {
            assert_eq!(list.at(x as u64).map(|r| r.error.errno), *want, "byte {x} of {all:?}");
        }
        for pair in all.windows(2) {
            assert!(pair[0].range.end() <= pair[1].range.offset);
            assert!(pair[0].range.end() < pair[1].range.offset || pair[0].error != pair[1].error);
        }
        assert_eq!(list.bytes(), model.iter().flatten().count() as u64);
    }
}
