//! Entries: both directions, every layout.

use super::addr::HostOffset;
use super::entry::*;
use super::layout::Layout;
use super::limits::ENTRY_OFFSET_MASK;
use proptest::prelude::*;

fn layout(cluster_bits: u32, extended: bool) -> Layout {
    Layout { version: 3, cluster_bits, slice_bits: 9, extended, refcount_order: 4, data_file: false }
}

const L16: Layout = Layout {
    version: 3,
    cluster_bits: 16,
    slice_bits: 12,
    extended: false,
    refcount_order: 4,
    data_file: false,
};

fn entry(entry: u64) -> Words {
    Words { entry, bitmap: 0 }
}

fn words(entry: u64, data: u32, zero: u32) -> Words {
    Words { entry, bitmap: u64::from(zero) << 32 | u64::from(data) }
}

fn decode(w: Words, l: &Layout) -> Result<L2Entry, BadEntry> {
    w.decode(l, 0x50000)
}

#[test]
fn standard_entries_mean_what_the_specification_says() {
    let host = Some(HostOffset(0x50000));
    for (word, expected) in [
        (0, L2Entry::UNALLOCATED),
        (1, L2Entry::zero(None, false)),
        (0x50001, L2Entry::zero(host, false)),
        (COPIED | 0x50001, L2Entry::zero(host, true)),
        (COPIED | 0x50000, L2Entry::data(HostOffset(0x50000), true)),
        (0x00ff_ffff_ffff_0000, L2Entry::data(HostOffset(0x00ff_ffff_ffff_0000), false)),
    ] {
        assert_eq!(decode(entry(word), &L16), Ok(expected), "{word:#x}");
        assert_eq!(expected.encode(&L16), entry(word));
    }
    assert_eq!(decode(entry(0x50200), &L16), Err(BadEntry::Unaligned(0x50200)));
    assert_eq!(L2Entry::zero(host, false).kind(0), L2Kind::ZeroAllocated);
    assert_eq!(L2Entry::zero(None, false).kind(0), L2Kind::ZeroPlain);
    assert_eq!(L2Entry::UNALLOCATED.kind(0), L2Kind::Unallocated);
    assert_eq!(L2Entry::data(HostOffset(0x50000), true).kind(0), L2Kind::Data);
}

#[test]
fn a_zero_flag_in_version_2_is_an_error_and_not_backing_data() {
    let v2 = Layout { version: 2, ..L16 };
    for word in [1, 0x50001, COPIED | 0x50001] {
        assert_eq!(decode(entry(word), &v2), Err(BadEntry::ZeroInV2), "{word:#x}");
    }
    // In a compressed entry the same bit belongs to the offset.
    assert!(matches!(decode(entry(COMPRESSED | 0x50001), &v2), Ok(L2Entry::Compressed(_))));
}

#[test]
fn reserved_bits_are_told_and_do_not_hide_the_data() {
    for bit in 0..62 {
        let reserved = (1..=8).contains(&bit) || (56..=61).contains(&bit);
        let w = entry(COPIED | 0x50000 | 1 << bit);
        assert_eq!(w.reserved(&L16), if reserved { 1 << bit } else { 0 }, "{bit}");
        if reserved {
            assert_eq!(decode(w, &L16), Ok(L2Entry::data(HostOffset(0x50000), true)), "{bit}");
        }
    }
    let ext = layout(16, true);
    assert_eq!(words(0x50001, 1, 0).reserved(&ext), 1);
    assert_eq!(decode(words(0x50001, 1, 0), &ext), decode(words(0x50000, 1, 0), &ext));
    assert_eq!(entry(COMPRESSED | COPIED | 0x50001).reserved(&L16), COPIED);
    // With 512 byte clusters the offset field of a compressed entry is wider than an offset.
    let small = layout(9, false);
    assert_eq!(entry(COMPRESSED | 1 << 57 | 0x5000).reserved(&small), 1 << 57);
    assert_eq!(
        decode(entry(COMPRESSED | 1 << 57 | 0x5000), &small),
        Err(BadEntry::CompressedOffset(1 << 57 | 0x5000))
    );
    let l1_bits: Vec<u32> = (0..64).filter(|b| L1_RESERVED >> b & 1 == 1).collect();
    assert_eq!(l1_bits, (0..=8).chain(56..=62).collect::<Vec<u32>>());
}

#[test]
fn sub_clusters_have_states_of_their_own() {
    let ext = layout(16, true);
    let e = decode(words(COPIED | 0x50000, 0b0011, 0b0100), &ext).expect("valid");
    assert_eq!(
        (0..4).map(|i| e.kind(i)).collect::<Vec<_>>(),
        [L2Kind::Data, L2Kind::Data, L2Kind::ZeroAllocated, L2Kind::Unallocated]
    );
    let e = decode(words(0, 0, 0x8000_0000), &ext).expect("valid");
    assert_eq!((e.kind(31), e.kind(30)), (L2Kind::ZeroPlain, L2Kind::Unallocated));
    // A cluster of which nothing is used yet keeps its offset.
    let e = decode(words(COPIED | 0x50000, 0, 0), &ext).expect("valid");
    assert_eq!((e.kind(0), e.encode(&ext)), (L2Kind::Unallocated, words(COPIED | 0x50000, 0, 0)));
    assert_eq!(decode(words(0x50000, 3, 2), &ext), Err(BadEntry::BothStates(2)));
    assert_eq!(decode(words(0, 3, 0), &ext), Err(BadEntry::NoOffset(3)));
    assert_eq!(decode(words(0x50200, 3, 0), &ext), Err(BadEntry::Unaligned(0x50200)));
    // A compressed entry has no bitmap, whatever the second word says.
    let c = decode(words(COMPRESSED | 0x50007, 3, 3), &ext).expect("valid");
    assert_eq!(c.kind(9), L2Kind::Compressed);
}

#[test]
fn a_data_file_has_the_guests_own_offsets() {
    let df = Layout { data_file: true, ..L16 };
    let at_0 = |w: u64| entry(w).decode(&df, 0);
    assert_eq!(at_0(0), Ok(L2Entry::UNALLOCATED));
    assert_eq!(at_0(COPIED), Ok(L2Entry::data(HostOffset(0), true)));
    assert_eq!(at_0(COPIED | 1), Ok(L2Entry::zero(Some(HostOffset(0)), true)));
    assert_eq!(at_0(1), Ok(L2Entry::zero(None, false)));
    assert_eq!(decode(entry(COPIED | 0x50000), &df), Ok(L2Entry::data(HostOffset(0x50000), true)));
    assert_eq!(decode(entry(COPIED | 0x60000), &df), Err(BadEntry::NotGuestOffset(0x60000, 0x50000)));
    assert_eq!(decode(entry(COPIED), &df), Err(BadEntry::NotGuestOffset(0, 0x50000)));
    assert_eq!(decode(entry(COMPRESSED | 0x50000), &df), Err(BadEntry::CompressedInDataFile));
    let ext = Layout { extended: true, ..df };
    assert_eq!(
        words(COPIED, 1, 2).decode(&ext, 0),
        Ok(L2Entry::Plain(Plain { host: Some(HostOffset(0)), copied: true, data: 1, zero: 2 }))
    );
    assert_eq!(words(0, 1, 2).decode(&ext, 0), Err(BadEntry::NoOffset(1)));
}

#[test]
fn compressed_entries_reach_to_the_end_of_a_sector() {
    // 64 KiB clusters: 54 bits of offset, then 8 bits of sectors.
    let one = COMPRESSED | 0x50123;
    assert_eq!(
        decode(entry(one), &L16),
        Ok(L2Entry::Compressed(Compressed { offset: HostOffset(0x50123), len: 512 - 0x123 }))
    );
    let c = Compressed { offset: HostOffset(0x50123), len: 256 * 512 - 0x123 };
    assert_eq!(decode(entry(one | 255 << 54), &L16), Ok(L2Entry::Compressed(c)));
    assert_eq!(decode(entry(COMPRESSED | 0x1234), &L16), Err(BadEntry::InHeader));
    assert_eq!(Compressed::for_data(HostOffset(0x50123), 0, &L16), None);
    let longest = 256 * 512 - 0x123;
    assert_eq!(Compressed::for_data(HostOffset(0x50123), longest, &L16), Some(c));
    assert_eq!(Compressed::for_data(HostOffset(0x50123), longest + 1, &L16), None);
    assert_eq!(Compressed::for_data(HostOffset(1 << 54), 1, &L16), None);
    assert_eq!(Compressed::for_data(HostOffset(u64::MAX), 1, &L16), None);
}

#[test]
fn l1_and_refcount_table_entries() {
    let e = L1Entry::decode(COPIED | 0x40000, &L16).expect("valid");
    assert_eq!(e, L1Entry { table: Some(HostOffset(0x40000)), copied: true });
    assert_eq!(e.encode(), COPIED | 0x40000);
    assert_eq!(L1Entry::decode(0, &L16).expect("none"), L1Entry { table: None, copied: false });
    assert_eq!(
        L1Entry::decode(0x40000 | L1_RESERVED, &L16).expect("masked").table,
        Some(HostOffset(0x40000))
    );
    let bad = L1Entry::decode(0x40200, &L16).expect_err("unaligned");
    assert_eq!(
        bad.at("L1 table", HostOffset(0x30000), 17),
        "L1 table at 0x30000, entry 17: offset 0x40200 not aligned to a cluster"
    );
    assert_eq!(decode_reftable(0x20000, &L16), Ok(Some(HostOffset(0x20000))));
    assert_eq!(decode_reftable(0x1ff, &L16), Ok(None));
    assert_eq!(decode_reftable(0x20200, &L16), Err(BadEntry::Unaligned(0x20200)));
    assert_eq!(decode_reftable(1 << 63, &L16), Err(BadEntry::Unaligned(1 << 63)));
}

fn any_layout() -> impl Strategy<Value = Layout> {
    (9u32..=21, any::<bool>(), any::<bool>(), 2u32..=3).prop_map(|(bits, ext, data_file, version)| {
        let extended = ext && bits >= 14 && version == 3;
        Layout { version, data_file: data_file && version == 3, ..layout(bits, extended) }
    })
}

proptest! {
    #[test]
    fn what_is_decoded_encodes_to_the_same_words(
        l in any_layout(), word: u64, bitmap: u64, flags in 0u64..8, guest in 0u64..1 << 40
    ) {
        let guest = l.cluster_start(guest);
        // Mostly entries that can be valid: aligned, and with a data file at the guest's offset.
        let offset = if l.data_file { guest } else { l.cluster_start(word & ENTRY_OFFSET_MASK) };
        let flags = flags >> 2 & 1 | (flags & 2) << 61 | (flags & 1) << 63;
        for w in [Words { entry: word, bitmap }, Words { entry: offset | flags, bitmap: if bitmap & 1 == 0 { 0 } else { bitmap & 0xffff } }] {
            let w = Words { bitmap: if l.extended { w.bitmap } else { 0 }, ..w };
            let Ok(e) = w.decode(&l, guest) else { continue };
            let again = e.encode(&l);
            prop_assert_eq!(again.decode(&l, guest), Ok(e));
            if !matches!(e, L2Entry::Compressed(_)) {
                prop_assert_eq!(again.entry, w.entry & !w.reserved(&l));
                prop_assert_eq!(again.bitmap, w.bitmap);
            } else {
                prop_assert_eq!(again.entry, w.entry & !w.reserved(&l));
            }
        }
    }

    #[test]
    fn compressed_data_survives_its_entry(l in any_layout(), offset in 0u64..1 << 48, len in 1u64..1 << 22) {
        let l = Layout { data_file: false, ..l };
        let offset = HostOffset(offset.max(l.cluster_size()));
        let Some(c) = Compressed::for_data(offset, len, &l) else {
            prop_assert!(len + 511 > l.cluster_size() || l.cluster_bits == 21 && offset.get() >> 49 > 0);
            return Ok(());
        };
        prop_assert!(c.len >= len && c.len - len < 512 && (c.offset.get() + c.len) % 512 == 0);
        prop_assert_eq!(L2Entry::Compressed(c).encode(&l).decode(&l, 0), Ok(L2Entry::Compressed(c)));
    }
}
