//! Data of background copies between the end of their read and the target's acknowledgement (S7).
//!
//! Guests have been released, so the data is readable here (S15) until the target has it, and a write that fails is tried again from
//! here: the granule never becomes NEEDED again (S72). The memory is the copy engine's and bounded by its pool.

use crate::request::Buffers;
use crate::sync::Mutex;
use crate::units::ByteRange;
use std::collections::BTreeMap;

/// One piece on its way.
#[derive(Clone, Debug)]
pub(super) struct Transit {
    /// Bytes of the disk.
    pub(super) range: ByteRange,
    /// The data; `None` for zeros.
    pub(super) data: Option<Buffers>,
}

/// The pieces by offset; they do not overlap. A leaf lock, held for a look only.
#[derive(Debug, Default)]
pub(super) struct Transits(Mutex<BTreeMap<u64, Entry>>);

#[derive(Debug)]
struct Entry {
    transit: Transit,
    /// Nobody is writing it: the write has failed.
    failed: bool,
}

impl Transits {
    /// Adds a piece that is about to be written. It is readable from now on.
    pub(super) fn add(&self, transit: Transit) {
        self.0.lock().insert(transit.range.offset, Entry { transit, failed: false });
    }

    /// The write of the piece at `offset` has ended well.
    pub(super) fn done(&self, offset: u64) {
        self.0.lock().remove(&offset);
    }

    /// The write of the piece at `offset` has failed, or whoever wrote it has gone.
    pub(super) fn failed(&self, offset: u64) {
        if let Some(e) = self.0.lock().get_mut(&offset) {
            e.failed = true;
        }
    }

    /// Takes on the first failed piece that begins in `range`, to write it again.
    pub(super) fn retry(&self, range: ByteRange) -> Option<Transit> {
        let mut map = self.0.lock();
        let (_, e) = map.range_mut(range.offset..range.end()).find(|(_, e)| e.failed)?;
        e.failed = false;
        Some(e.transit.clone())
    }

    /// The first failed piece at or after `offset`.
    pub(super) fn next_failed(&self, offset: u64) -> Option<ByteRange> {
        self.0.lock().range(offset..).find(|(_, e)| e.failed).map(|(_, e)| e.transit.range)
    }

    /// Whether anything is here.
    pub(super) fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }

    /// Copies the start of `here` to `to` if it is in a piece (S73: into memory of the reader); how much that was. `Err` says where
    /// the next piece begins, or the end of `here`.
    pub(super) fn read(&self, here: ByteRange, to: &Buffers) -> Result<u64, u64> {
        let (found, next) = {
            let map = self.0.lock();
            let found = map.range(..=here.offset).next_back().map(|(_, e)| e.transit.clone());
            (found, map.range(here.offset + 1..).next().map_or(here.end(), |(at, _)| *at))
        };
        let Some(t) = found.filter(|t| t.range.end() > here.offset) else { return Err(next.min(here.end())) };
        let inside = here.offset - t.range.offset;
        let len = (t.range.len - inside).min(here.len);
        let to = to.slice(0, len as usize);
        match &t.data {
            Some(data) => to.copy_from(&data.slice(inside as usize, len as usize)),
            None => to.fill(0),
        }
        Ok(len)
    }

    /// Forgets everything; memory goes when the last write that uses it has ended (S29).
    pub(super) fn clear(&self) {
        self.0.lock().clear();
    }

    /// Forgets the pieces that lie wholly in `range`.
    pub(super) fn forget(&self, range: ByteRange) {
        self.0.lock().retain(|_, e| !range.contains(e.transit.range));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(offset: u64, len: u64) -> ByteRange {
        ByteRange { offset, len }
    }

    fn two() -> Transits {
        let t = Transits::default();
        t.add(Transit { range: range(10, 4), data: Some(Buffers::from_bytes(&[1, 2, 3, 4])) });
        t.add(Transit { range: range(14, 2), data: None });
        t
    }

    #[test]
    fn reads_come_from_the_piece_or_say_where_the_next_begins() {
        let t = two();
        for offset in 0..20 {
            for len in 1..20 {
                let to = Buffers::from_bytes(&[9; 20]);
                let got = t.read(range(offset, len), &to);
                match offset {
                    10..14 => {
                        let n = len.min(14 - offset);
                        assert_eq!(got, Ok(n));
                        assert_eq!(
                            to.slice(0, n as usize).to_vec(),
                            &[1, 2, 3, 4][offset as usize - 10..][..n as usize]
                        );
                    }
                    14..16 => {
                        assert_eq!(got, Ok(len.min(16 - offset)));
                        assert!(to.slice(0, got.unwrap() as usize).is_zero());
                    }
                    _ => assert_eq!(got, Err(if offset < 10 { 10.min(offset + len) } else { offset + len })),
                }
            }
        }
    }

    #[test]
    fn a_failed_piece_is_taken_on_by_one_and_stays_readable() {
        let t = two();
        assert!(t.retry(range(0, 100)).is_none());
        t.failed(14);
        assert_eq!(t.next_failed(0), Some(range(14, 2)));
        assert_eq!(t.next_failed(15), None);
        assert!(t.retry(range(0, 14)).is_none());
        assert_eq!(t.retry(range(0, 15)).map(|t| t.range), Some(range(14, 2)));
        assert!(t.retry(range(0, 15)).is_none(), "it is under way");
        assert_eq!(t.read(range(14, 2), &Buffers::alloc(2, 1)), Ok(2));
        t.done(14);
        t.forget(range(0, 13));
        assert!(!t.is_empty());
        t.forget(range(0, 14));
        assert!(t.is_empty());
    }
}
