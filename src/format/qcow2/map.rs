//! Guest range to runs: what the tables in RAM say, merged as far as it goes on the same way.
//!
//! No I/O, no waiting, nothing shared is written: a plan and the slow path look here. What is missing in RAM, or cannot be trusted, ends a run and is told.

use super::addr::HostOffset;
use super::cache::L2Cache;
use super::entry::{BadEntry, Compressed, L1Entry, L2Entry, Plain, Words};
use super::l1::L1Table;
use super::layout::Layout;
use crate::units::ByteRange;

/// What a range of the disk is in one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Run {
    /// Nothing: the backing file shows through, or zeros.
    Unallocated,
    /// Zeros; with the host place of the first byte if one is kept.
    Zero(Option<HostOffset>),
    /// Data, from this host place on.
    Data(HostOffset),
    /// A part of one compressed cluster. Runs of compressed data end with their cluster.
    Compressed(Compressed),
}

/// A run with its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapped {
    /// What it is.
    pub run: Run,
    /// Which bytes of the disk.
    pub range: ByteRange,
}

/// Why a mapping ends before its range does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The slice with this key is not in RAM.
    Miss(u64),
    /// Entry of the L1 table that cannot be used.
    BadL1(u64, BadEntry),
    /// Entry of an L2 table (the guest offset of its cluster) that cannot be used.
    BadL2(u64, BadEntry),
}

/// Looks for entries: in the cache, or in slices that a request has collected.
pub trait Slices {
    /// The entry for `guest`, `None` if its slice is not there.
    fn entry(&self, key: u64, index: usize) -> Option<Words>;
}

/// The run at the start of `range`, which is not empty and lies on the disk. As long as the tables tell it at once: it may go on behind its end.
pub fn map(layout: &Layout, l1: &L1Table, slices: &impl Slices, range: ByteRange) -> Result<Mapped, Stop> {
    let mut found: Option<Mapped> = None;
    let mut at = range.offset;
    while at < range.end() {
        let next = match unit(layout, l1, slices, at, range.end()) {
            Ok(next) => next,
            // What came before it is good.
            Err(stop) => return found.ok_or(stop),
        };
        match &mut found {
            None => found = Some(next),
            Some(run) if continues(run, next.run) => run.range.len += next.range.len,
            Some(_) => break,
        }
        at = next.range.end();
        if let Some(Mapped { run: Run::Compressed(_), .. }) = found {
            break;
        }
    }
    // Never: the range is not empty.
    found.ok_or(Stop::Miss(0))
}

/// Whether `next` can be put behind `run`.
fn continues(run: &Mapped, next: Run) -> bool {
    let len = run.range.len;
    match (run.run, next) {
        (Run::Unallocated, Run::Unallocated) | (Run::Zero(None), Run::Zero(None)) => true,
        (Run::Data(a), Run::Data(b)) | (Run::Zero(Some(a)), Run::Zero(Some(b))) => a.get() + len == b.get(),
        _ => false,
    }
}

/// What one lookup tells of the bytes from `at` to `end`: up to the end of the L2 table's span, of the cluster, or of the sub-clusters of one state.
fn unit(layout: &Layout, l1: &L1Table, slices: &impl Slices, at: u64, end: u64) -> Result<Mapped, Stop> {
    let l1_index = layout.l1_index(at);
    let entry = l1.entry(l1_index, layout).map_err(|bad| Stop::BadL1(l1_index, bad))?;
    if entry.table.is_none() {
        let stop = ((l1_index + 1) << layout.l2_span_bits()).min(end);
        return Ok(Mapped { run: Run::Unallocated, range: ByteRange { offset: at, len: stop - at } });
    }
    let key = at >> (layout.slice_entry_bits() + layout.cluster_bits);
    let words = slices.entry(key, layout.slice_entry(at)).ok_or(Stop::Miss(key))?;
    let cluster = layout.cluster_start(at);
    let entry = words.decode(layout, cluster).map_err(|bad| Stop::BadL2(cluster, bad))?;
    let (run, len) = match entry {
        L2Entry::Compressed(c) => (Run::Compressed(c), layout.cluster_size() - (at - cluster)),
        L2Entry::Plain(p) => plain(layout, &p, at - cluster),
    };
    Ok(Mapped { run, range: ByteRange { offset: at, len: len.min(end - at) } })
}

/// The run at byte `inside` of a cluster that is not compressed, and its length.
fn plain(layout: &Layout, p: &Plain, inside: u64) -> (Run, u64) {
    let index = (inside >> layout.subcluster_bits()) as u32;
    let (data, zero) = (p.data >> index & 1 == 1, p.zero >> index & 1 == 1);
    let place = p.host.map(|host| HostOffset(host.get() + inside));
    let (run, mask) = match (data, zero, place) {
        (true, _, Some(host)) => (Run::Data(host), p.data),
        (_, true, host) => (Run::Zero(host), p.zero),
        _ => (Run::Unallocated, !(p.data | p.zero)),
    };
    let units = if layout.extended { (!(mask >> index)).trailing_zeros().min(32 - index) } else { 1 };
    (run, (u64::from(index + units) << layout.subcluster_bits()) - inside)
}

/// The host place that is set aside for the start of `range`, whether or not something is there, and how far that goes on: a cluster with sub-clusters has one even where
/// all that it shows is the backing file. Compressed clusters have none, and what cannot be trusted ends it like the end of the range.
pub fn place(
    layout: &Layout,
    l1: &L1Table,
    slices: &impl Slices,
    range: ByteRange,
) -> (Option<HostOffset>, u64) {
    let mut first = None;
    let mut at = range.offset;
    while at < range.end() {
        let l1_index = layout.l1_index(at);
        let (host, end) = match l1.entry(l1_index, layout) {
            Ok(L1Entry { table: None, .. }) => (None, (l1_index + 1) << layout.l2_span_bits()),
            Ok(_) => {
                let cluster = layout.cluster_start(at);
                let key = at >> (layout.slice_entry_bits() + layout.cluster_bits);
                let words = slices.entry(key, layout.slice_entry(at));
                let host = match words.map(|w| w.decode(layout, cluster)) {
                    Some(Ok(L2Entry::Plain(p))) => p.host.map(|h| HostOffset(h.get() + (at - cluster))),
                    Some(Ok(L2Entry::Compressed(_))) => None,
                    None | Some(Err(_)) => break,
                };
                (host, cluster + layout.cluster_size())
            }
            Err(_) => break,
        };
        let expected = |host: HostOffset| host.get() + (at - range.offset);
        match first {
            None => first = Some(host),
            Some(None) if host.is_none() => {}
            Some(Some(a)) if host.map(HostOffset::get) == Some(expected(a)) => {}
            Some(_) => break,
        }
        at = end.min(range.end());
    }
    // Without anything to tell, nothing is known of all of it.
    if at == range.offset { (None, range.len) } else { (first.flatten(), at - range.offset) }
}

impl Slices for L2Cache {
    fn entry(&self, key: u64, index: usize) -> Option<Words> {
        self.peek(key).map(|slice| slice.entry(index))
    }
}

/// The table that an L1 word points at.
pub fn table_of(layout: &Layout, l1: &L1Table, l1_index: u64) -> Result<Option<HostOffset>, Stop> {
    match l1.entry(l1_index, layout) {
        Ok(L1Entry { table, .. }) => Ok(table),
        Err(bad) => Err(Stop::BadL1(l1_index, bad)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::entry::{ALL, COPIED};
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[derive(Default)]
    struct Fake(BTreeMap<(u64, usize), Words>, Vec<u64>);

    impl Slices for Fake {
        fn entry(&self, key: u64, index: usize) -> Option<Words> {
            (!self.1.contains(&key)).then(|| self.0.get(&(key, index)).copied().unwrap_or(Words::NONE))
        }
    }

    fn layout(extended: bool) -> Layout {
        Layout { version: 3, cluster_bits: 14, slice_bits: 9, extended, refcount_order: 4, data_file: false }
    }

    fn put(fake: &mut Fake, l: &Layout, cluster: u64, words: Words) {
        let guest = cluster << l.cluster_bits;
        fake.0.insert((guest >> (l.slice_entry_bits() + l.cluster_bits), l.slice_entry(guest)), words);
    }

    fn state(l: &Layout, l1: &L1Table, fake: &Fake, byte: u64) -> Run {
        map(l, l1, fake, ByteRange { offset: byte, len: 1 }).expect("all is there").run
    }

    #[test]
    fn contiguous_clusters_are_one_run_over_slices_and_a_miss_ends_it() {
        let l = layout(false);
        let l1 = L1Table::new(HostOffset(0), [COPIED | 0x10000, 0]);
        let mut fake = Fake::default();
        for cluster in 0..200 {
            put(
                &mut fake,
                &l,
                cluster,
                L2Entry::data(HostOffset(0x100000 + (cluster << 14)), true).encode(&l),
            );
        }
        let range = ByteRange { offset: 100, len: 150 << 14 };
        let m = map(&l, &l1, &fake, range).expect("mapped");
        assert_eq!(m, Mapped { run: Run::Data(HostOffset(0x100064)), range });
        // Slices have 64 entries; the third is missing.
        fake.1.push(2);
        let m = map(&l, &l1, &fake, range).expect("its start is there");
        assert_eq!((m.run, m.range.end()), (Run::Data(HostOffset(0x100064)), 128 << 14));
        assert_eq!(map(&l, &l1, &fake, ByteRange { offset: 130 << 14, len: 1 }), Err(Stop::Miss(2)));
        // Behind the first L2 table there is nothing, and no slice is asked for.
        let m = map(
            &l,
            &l1,
            &Fake(BTreeMap::new(), (0..99).collect()),
            ByteRange { offset: 2048 << 14, len: 1 << 20 },
        );
        assert_eq!(m.expect("mapped").run, Run::Unallocated);
    }

    #[test]
    fn a_place_that_is_set_aside_is_told_although_nothing_is_there() {
        let l = layout(true);
        let l1 = L1Table::new(HostOffset(0), [0x10000, 0]);
        let mut fake = Fake::default();
        for cluster in 2..5 {
            let host = Some(HostOffset(0x100000 + (cluster << 14)));
            let data = if cluster == 3 { 5 } else { 0 };
            let entry = L2Entry::Plain(Plain { host, copied: true, data, zero: 0 });
            put(&mut fake, &l, cluster, entry.encode(&l));
        }
        let at = |offset, len| place(&l, &l1, &fake, ByteRange { offset, len });
        assert_eq!(at(0, 1 << 20), (None, 2 << 14));
        assert_eq!(at((2 << 14) + 5, 1 << 20), (Some(HostOffset(0x108005)), (3 << 14) - 5));
        assert_eq!(at((3 << 14) + 5, 9), (Some(HostOffset(0x10c005)), 9));
        assert_eq!(at(5 << 14, 1 << 30), (None, 1 << 30));
        // What is not in RAM is not told.
        let missing = Fake(BTreeMap::new(), vec![0]);
        assert_eq!(place(&l, &l1, &missing, ByteRange { offset: 0, len: 9 }), (None, 9));
    }

    #[test]
    fn what_cannot_be_trusted_is_told_with_its_place_and_only_where_it_is() {
        let l = layout(false);
        let l1 = L1Table::new(HostOffset(0), [0x10000, 0x10200]);
        let mut fake = Fake::default();
        put(&mut fake, &l, 3, Words { entry: 0x20200, bitmap: 0 });
        let m = map(&l, &l1, &fake, ByteRange { offset: 0, len: 10 << 14 }).expect("its start is good");
        assert_eq!((m.run, m.range.len), (Run::Unallocated, 3 << 14));
        let at_3 = map(&l, &l1, &fake, ByteRange { offset: (3 << 14) + 5, len: 9 });
        assert_eq!(at_3, Err(Stop::BadL2(3 << 14, BadEntry::Unaligned(0x20200))));
        let at_l1 = map(&l, &l1, &fake, ByteRange { offset: 2048 << 14, len: 9 });
        assert_eq!(at_l1, Err(Stop::BadL1(1, BadEntry::Unaligned(0x10200))));
    }

    proptest! {
        #[test]
        fn a_run_says_of_each_byte_what_a_look_at_that_byte_alone_says(
            clusters in prop::collection::vec((0u64..3, any::<u32>(), any::<u32>(), any::<bool>()), 1..12),
            extended: bool, from in 0u64..12 << 14, len in 1u64..12 << 14,
        ) {
            let l = layout(extended);
            let l1 = L1Table::new(HostOffset(0), [0x10000]);
            let mut fake = Fake::default();
            for (i, (place, data, zero, coarse)) in clusters.iter().enumerate() {
                let i = i as u64;
                let host = (*place > 0).then(|| HostOffset((0x100 + i * place) << 14));
                let (mut data, mut zero) = if *coarse || !extended {
                    match data % 3 { 0 => (ALL, 0), 1 => (0, ALL), _ => (0, 0) }
                } else {
                    (*data, *zero)
                };
                zero &= !data;
                if host.is_none() { data = 0; }
                let entry = if data % 7 == 6 && !extended {
                    L2Entry::Compressed(Compressed { offset: HostOffset(0x200000 + i * 999), len: 512 })
                } else if host.is_some() && data | zero == 0 && !extended {
                    L2Entry::UNALLOCATED
                } else {
                    L2Entry::Plain(Plain { host, copied: true, data, zero })
                };
                put(&mut fake, &l, i, entry.encode(&l));
            }
            let range = ByteRange { offset: from, len };
            let m = map(&l, &l1, &fake, range).expect("all is there");
            prop_assert!(m.range.offset == from && m.range.len >= 1 && range.contains(m.range));
            for byte in (m.range.offset..m.range.end()).step_by(97).chain([m.range.end() - 1]) {
                let ahead = byte - from;
                let expected = match m.run {
                    Run::Data(host) => Run::Data(HostOffset(host.get() + ahead)),
                    Run::Zero(Some(host)) => Run::Zero(Some(HostOffset(host.get() + ahead))),
                    other => other,
                };
                prop_assert_eq!(state(&l, &l1, &fake, byte), expected);
            }
        }
    }
}
