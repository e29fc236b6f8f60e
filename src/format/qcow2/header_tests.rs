//! Headers made by qemu-img 10.0.2, and broken ones.

use super::extension::{self, Extension};
use super::feature::{Autoclear, Incompatible, name_table};
use super::header::*;
use crate::error::{Code, Result};
use proptest::prelude::*;

/// Bytes from hexadecimal text in which `*N` stands for N zeros.
fn golden(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for word in text.split_whitespace() {
        match word.strip_prefix('*') {
            Some(zeros) => bytes.resize(bytes.len() + zeros.parse::<usize>().unwrap(), 0),
            None => bytes
                .extend((0..word.len()).step_by(2).map(|i| u8::from_str_radix(&word[i..i + 2], 16).unwrap())),
        }
    }
    bytes
}

const TABLE: &str = "6803f857000001800000646972747920626974 *38 01636f727275707420626974 *36
    0265787465726e616c20646174612066696c65 *29 03636f6d7072657373696f6e2074797065 *31
    04657874656e646564204c3220656e7472696573 *27 01006c617a7920726566636f756e7473 *32 02006269746d617073 *39
    02017261772065787465726e616c2064617461 *29";
/// `-o compat=0.10 v2.q 64M`
const V2: &str = "514649fb00000002 *15 10 *4 04 *10 01 *5 03 *7 01 *5 01 *12 *8";
/// `-o compat=0.10 -b v2.q -F qcow2 v2e.q`
const V2_BACKED: &str = "514649fb00000002 *7 600000000400000010 *4 04 *10 01 *5 03 *7 01 *5 01 *12
    e2792aca0000000571636f7732 *11 76322e71";
/// `zero.q 0`
const EMPTY: &str = "514649fb00000003 *15 10 *29 01 *5 01 *39 0400000070 *8";
/// `-b v2.q -F qcow2 ov.q`
const BACKED: &str =
    "514649fb00000003 *6 02100000000400000010 *4 04 *10 01 *5 03 *7 01 *5 01 *39 0400000070 *8
    e2792aca0000000571636f7732 *3";
/// `-o data_file=df.raw df.q 64M`
const DATA_FILE: &str = "514649fb00000003 *15 10 *4 04 *10 01 *5 03 *7 01 *5 01 *19 04 *19 0400000070 *8
    444154410000000664662e726177 *2";
/// `-o compression_type=zstd,extended_l2=on,refcount_bits=1 zs.q 1G`
const MIXED: &str = "514649fb00000003 *15 10 *4 40 *10 04 *5 03 *7 01 *5 01 *19 18 *23 7001 *7";
/// `-o cluster_size=512 c512.q 64M`: the name table does not fit.
const SMALL: &str = "514649fb00000003 *15 09 *4 04 *9 08 *7 06 *7 02 *4 01 *39 0400000070 *8 *8";

fn all_golden() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("v2", golden(V2)),
        ("v2 backed", golden(V2_BACKED)),
        ("empty", golden(&format!("{EMPTY} {TABLE} *8"))),
        ("backed", golden(&format!("{BACKED} {TABLE} *8 76322e71"))),
        ("data file", golden(&format!("{DATA_FILE} {TABLE} *8"))),
        ("mixed", golden(&format!("{MIXED} {TABLE} *8"))),
        ("small", golden(SMALL)),
    ]
}

const FILE_LEN: u64 = 1 << 30;

fn parse(bytes: &[u8]) -> Result<Header> {
    parse_for(bytes, Purpose::Use)
}

fn parse_for(bytes: &[u8], purpose: Purpose) -> Result<Header> {
    let mut cluster = bytes.to_vec();
    cluster.resize(cluster.len().max(PEEK_LEN), 0);
    let bits = peek(cluster.first_chunk().expect("long enough"))?;
    cluster.resize(1 << bits, 0);
    Header::parse(&cluster, FILE_LEN, purpose)
}

#[test]
fn headers_of_qemu_img_come_back_byte_for_byte() {
    for (name, bytes) in all_golden() {
        let header = parse(&bytes).unwrap_or_else(|e| panic!("{name}: {}", e.full_text()));
        assert_eq!(header.encode().expect("it fits"), bytes, "{name}");
    }
}

#[test]
fn headers_of_qemu_img_say_what_was_asked_for() {
    let golden: std::collections::BTreeMap<_, _> = all_golden().into_iter().collect();
    let of = |name| parse(&golden[name]).expect("valid");
    let h = of("v2 backed");
    assert_eq!((h.version, h.size, h.refcount_order, h.header_length), (2, 64 << 20, 4, 72));
    assert_eq!((h.backing_name.as_deref(), h.backing_format()), (Some(&b"v2.q"[..]), Some(&b"qcow2"[..])));
    let h = of("empty");
    assert_eq!((h.size, h.l1_entries, h.l1_offset.get()), (0, 0, 0));
    assert_eq!(h.extensions, [Extension { magic: extension::FEATURE_TABLE, data: name_table() }]);
    let h = of("data file");
    assert_eq!((h.incompatible, h.data_file_name()), (Incompatible::DATA_FILE, Some(&b"df.raw"[..])));
    assert!(h.layout().data_file);
    let h = of("mixed");
    assert_eq!((h.compression, h.refcount_order, h.layout().extended), (Compression::Zstd, 0, true));
    assert_eq!((h.size, h.l1_entries), (1 << 30, 4));
    let h = of("small");
    assert_eq!((h.cluster_bits, h.l1_entries, h.l1_offset.get()), (9, 2048, 0x600));
}

/// A header with `bytes` at `at`.
fn patched(base: &[u8], at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut b = base.to_vec();
    b.resize(b.len().max(at + bytes.len()), 0);
    b[at..at + bytes.len()].copy_from_slice(bytes);
    b
}

#[test]
fn every_rule_of_the_header_is_kept_and_the_error_names_offset_and_value() {
    let v3 = golden(&format!("{EMPTY} {TABLE} *8"));
    let v3 = patched(&v3, 24, &(64u64 << 20).to_be_bytes());
    let v3 = patched(&patched(&v3, 36, &1u32.to_be_bytes()), 40, &0x30000u64.to_be_bytes());
    parse(&v3).expect("valid");
    let (w4, w8) = (u32::to_be_bytes, u64::to_be_bytes);
    let cases: &[(usize, &[u8], &str)] = &[
        (0, b"QFI\xfa", "0x514649fa"),
        (4, &w4(1), "version 1"),
        (4, &w4(4), "version 4"),
        (8, &w8(65536), "0x10000"),
        (8, &w8(u64::MAX), "0xffffffffffffffff"),
        (20, &w4(8), "is 8"),
        (20, &w4(22), "is 22"),
        (24, &w8(1 << 30), "needs 2"),
        (24, &w8(u64::MAX), "largest size with these clusters: 2251799813685248"),
        (32, &w4(3), "method 3"),
        (32, &w4(2), "LUKS"),
        (36, &w4(0), "0 entries"),
        (36, &w4(4194305), "4194305"),
        (40, &w8(0x30200), "0x30200"),
        (40, &w8(0), "inside the header"),
        (40, &w8(1 << 63), "0x8000000000000000"),
        (48, &w8(0x10008), "0x10008"),
        (48, &w8(0), "inside the header"),
        (48, &w8((1 << 63) - 65536), "largest file"),
        (56, &w4(0), "no refcount table"),
        (56, &w4(129), "8454144"),
        (60, &w4(65537), "65537"),
        (60, &w4(1), "snapshot table: offset 0 is"),
        (64, &w8(5), ""),
        (72, &w8(32), "bit 5"),
        (72, &w8(8), "zlib"),
        (96, &w4(7), "is 7"),
        (100, &w4(96), "is 96"),
        (100, &w4(108), "is 108"),
        (100, &w4(65544), "is 65544"),
        (104, &[1], "zstd"),
        (104, &[2], "type 2"),
        (112, &w4(0x0537_be77), "not LUKS"),
        (116, &w4(65536), "65536"),
    ];
    for (at, bytes, named) in cases {
        let parsed = parse(&patched(&v3, *at, bytes));
        if named.is_empty() {
            parsed.expect("without snapshots the offset of their table means nothing");
            continue;
        }
        let text = parsed.expect_err(named).full_text();
        assert!(text.contains(named) && text.contains("offset "), "byte {at}: {text}");
    }
}

#[test]
fn a_backing_name_is_bounded_by_its_length_and_by_cluster_0() {
    let v3 = golden(SMALL);
    let with = |offset: u64, len: u32| {
        parse(&patched(&patched(&v3, 8, &offset.to_be_bytes()), 16, &len.to_be_bytes()))
    };
    assert_eq!(with(504, 8).expect("at the very end").backing_name.map(|n| n.len()), Some(8));
    assert_eq!(with(0, u32::MAX).expect("no name, whatever its length").backing_name, None);
    assert_eq!(with(200, 0).expect("empty").backing_name, None);
    assert!(with(504, 9).is_err() && with(512, 0).is_err());
    let long = golden(&format!("{BACKED} {TABLE} *8 76322e71"));
    assert!(parse(&patched(&long, 16, &1023u32.to_be_bytes())).is_ok());
    let e = parse(&patched(&long, 16, &1024u32.to_be_bytes())).expect_err("too long").full_text();
    assert!(e.contains("1024"), "{e}");
}

#[test]
fn a_name_at_the_end_of_cluster_0_moves_behind_the_extensions_and_survives() {
    let v3 = golden(SMALL);
    let mut bytes = patched(&patched(&v3, 8, &509u64.to_be_bytes()), 16, &3u32.to_be_bytes());
    bytes.resize(512, 0);
    bytes[509..].copy_from_slice(b"abc");
    let header = parse(&bytes).expect("valid");
    let again = parse(&header.encode().expect("fits")).expect("valid");
    assert_eq!((again.backing_name.as_deref(), &again), (Some(&b"abc"[..]), &header));
}

#[test]
fn without_room_for_the_end_marker_name_and_extensions_still_fit() {
    let mut header = parse(&golden(SMALL)).expect("valid");
    header.backing_name = Some(vec![b'n'; 16]);
    header.extensions = vec![Extension { magic: 0x1111_2222, data: vec![7; 512 - 112 - 16 - 8] }];
    let bytes = header.encode().expect("fits without an end marker");
    assert_eq!(bytes.len(), 512);
    assert_eq!(parse(&bytes).expect("valid"), header);
    header.backing_name = Some(vec![b'n'; 17]);
    assert_eq!(header.encode().expect_err("too long").errno(), libc::ENOSPC);
}

#[test]
fn version_2_has_neither_feature_bits_nor_a_length_field() {
    // An extension at byte 72 must not be taken for feature bits.
    let v2 = golden(V2_BACKED);
    let header = parse(&patched(&v2, 96, b"zz")).expect("valid");
    assert_eq!(header.incompatible, Incompatible::empty());
    assert_eq!(header.backing_name.as_deref(), Some(&b"zz.q"[..]));
    assert_eq!(header.extensions, [Extension { magic: extension::BACKING_FORMAT, data: b"qcow2".to_vec() }]);
}

#[test]
fn unknown_bytes_bits_and_extensions_survive_a_rewrite() {
    let mut bytes = golden(EMPTY);
    bytes.resize(136, 0);
    bytes[100..104].copy_from_slice(&136u32.to_be_bytes());
    bytes[105..136].fill(0xa5);
    bytes[80..88].fill(0x77); // compatible
    bytes[88..96].fill(0x33); // autoclear
    let list = [
        Extension { magic: 0xdead_beef, data: b"1234567".to_vec() },
        Extension { magic: 0xdead_beef, data: Vec::new() },
    ];
    extension::append(&list, &mut bytes, usize::MAX);
    let header = parse(&bytes).expect("valid");
    assert_eq!(header.extensions, list);
    assert_eq!(header.encode().expect("fits"), bytes);
    let mut changed = header.clone();
    changed.incompatible |= Incompatible::DIRTY;
    changed.autoclear &= Autoclear::all();
    let mut expected = bytes.clone();
    expected[79] |= 1;
    expected[88..96].copy_from_slice(&3u64.to_be_bytes());
    assert_eq!(changed.encode().expect("fits"), expected);
}

#[test]
fn an_unknown_layout_is_named_from_its_table_even_if_the_extensions_are_broken() {
    let v3 = golden(&format!("{EMPTY} {TABLE} *8"));
    let mut named = patched(&v3, 72, &(1u64 << 40).to_be_bytes());
    named[120..122].copy_from_slice(&[0, 40]);
    let e = parse(&named).expect_err("unknown");
    assert!(e.full_text().contains("'dirty bit' (bit 40)"), "{}", e.full_text());
    let broken = patched(&named, 116, &u32::MAX.to_be_bytes());
    let e = parse(&broken).expect_err("unknown");
    assert!(
        e.full_text().contains("bit 40") && e.code() == Code::Unsupported && !e.full_text().contains("dirty")
    );
}

#[test]
fn repair_opens_what_use_refuses() {
    let v3 = golden(&format!("{EMPTY} {TABLE} *8"));
    let no_table = patched(&v3, 56, &0u32.to_be_bytes());
    let snapshots = patched(&v3, 60, &u32::MAX.to_be_bytes());
    for broken in [no_table, snapshots] {
        assert!(parse_for(&broken, Purpose::Use).is_err());
        parse_for(&broken, Purpose::Repair).expect("it is what a repair is for");
    }
    assert!(parse_for(&patched(&v3, 48, &8u64.to_be_bytes()), Purpose::Repair).is_err());
}

#[test]
fn short_input_is_an_error() {
    let v3 = golden(EMPTY);
    for len in [0, 50, 103, 104, 1000] {
        let mut cut = v3.clone();
        cut.resize(len, 0);
        assert!(Header::parse(&cut, FILE_LEN, Purpose::Use).is_err(), "{len}");
    }
}

proptest! {
    #[test]
    fn no_damage_makes_the_parser_panic_and_what_it_takes_can_be_written(
        which in 0usize..7,
        damage in prop::collection::vec((0usize..640, any::<u8>()), 0..8),
    ) {
        let mut bytes = all_golden().swap_remove(which).1;
        bytes.resize(640.max(bytes.len()), 0);
        for (at, byte) in damage {
            bytes[at] = byte;
        }
        if let Ok(header) = parse(&bytes)
            && let Ok(encoded) = header.encode()
        {
            prop_assert_eq!(parse(&encoded).unwrap(), header);
        }
    }
}
