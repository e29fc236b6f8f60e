//! What one client can do, and what it is told when it cannot.

use super::client::{Client, Content};
use super::support::{EIO, Fixture, TestDisk, pattern};
use crate::error::{Code, IoError};
use crate::io::nbd::proto::{Command, Errno, ExportFlags, Opt, Rep};
use crate::limits::{NBD_PAYLOAD_MAX, NBD_PIECE_LEN};
use crate::request::{Flags, Op};
use crate::sync::atomic::Ordering;

const FUA: u16 = 1;
const NO_HOLE: u16 = 2;
const DF: u16 = 4;
const REQ_ONE: u16 = 8;
const FAST_ZERO: u16 = 16;

fn patterned(offset: usize, len: usize) -> Vec<u8> {
    (offset..offset + len).map(pattern).collect()
}

#[test]
fn any_offset_and_length_reads_back_what_was_written_with_both_kinds_of_replies() {
    let len = 3 * NBD_PIECE_LEN + 4608;
    for structured in [true, false] {
        let (f, _disk) = Fixture::with_disk(len);
        let mut c = if structured { f.client() } else { f.simple_client() };
        for (offset, n) in [
            (0, 1),
            (511, 2),
            (512, 512),
            (1, 4095),
            (4095, 4609),
            (100, 65_536),
            (7, NBD_PIECE_LEN),
            (9, NBD_PIECE_LEN + 1),
            (3, 3 * NBD_PIECE_LEN + 4600),
            (len - 1, 1),
        ] {
            let data: Vec<u8> = (0..n).map(|i| (i % 249) as u8 + 1).collect();
            c.write(offset as u64, &data).expect("write");
            assert!(c.read(offset as u64, n as u32).expect("read") == data, "{n} bytes at {offset}");
        }
        c.flush().expect("flush");
        drop(c);
        f.assert_all_gone();
    }
}

#[test]
fn write_payload_reaches_the_disk_in_aligned_memory_in_pieces() {
    let (f, disk) = Fixture::with_disk(4 * NBD_PIECE_LEN);
    let mut c = f.client();
    for n in [512, 32 << 10, 2 * NBD_PIECE_LEN + 5] {
        c.write(512, &vec![7; n]).expect("write");
    }
    let seen = disk.seen.lock();
    let lens: Vec<_> = seen.iter().map(|s| s.range.len as usize).collect();
    assert_eq!(lens, [512, 32 << 10, NBD_PIECE_LEN, NBD_PIECE_LEN, 5]);
    assert!(seen.iter().all(|s| s.op == Op::Write && s.aligned));
}

#[test]
fn the_export_is_told_with_its_size_and_abilities() {
    let (f, disk) = Fixture::with_disk(12_345);
    let all = ExportFlags::all() - ExportFlags::READ_ONLY;
    let mut c = Client::connect(&f.path());
    assert_eq!(c.go(""), Ok((12_345, all - ExportFlags::SEND_DF)));
    let mut c = Client::connect(&f.path());
    c.structured();
    assert_eq!(c.go("nothing"), Err(Rep::ERR_UNKNOWN));
    assert_eq!(c.go(""), Ok((12_345, all)));
    disk.read_only.store(true, Ordering::SeqCst);
    let mut c = Client::connect(&f.path());
    let (_, flags) = c.go("").expect("go");
    assert!(flags.contains(ExportFlags::READ_ONLY | ExportFlags::CAN_MULTI_CONN));
    assert!(!flags.intersects(ExportFlags::SEND_TRIM | ExportFlags::SEND_WRITE_ZEROES));
}

#[test]
fn a_long_export_name_is_refused_without_ending_the_handshake() {
    let (f, _disk) = Fixture::with_disk(512);
    let mut c = Client::connect(&f.path());
    let mut data = 5000u32.to_be_bytes().to_vec();
    data.extend([b'a'; 5000]);
    data.extend([0, 0]);
    assert_eq!(c.option(Opt::GO, &data)[0].0, Rep::ERR_INVALID);
    assert!(c.go("").is_ok());
}

#[test]
fn refused_requests_leave_the_connection_usable() {
    let size = 1 << 20;
    let (f, disk) = Fixture::with_disk(size);
    for structured in [true, false] {
        let mut c = if structured { f.client() } else { f.simple_client() };
        let end = size as u64;
        let cases = [
            (Command::READ, 0, end, 1, Errno::INVAL),
            (Command::READ, 0, end - 511, 512, Errno::INVAL),
            (Command::READ, 0, u64::MAX, 512, Errno::INVAL),
            (Command::READ, 0, 0, NBD_PAYLOAD_MAX + 1, Errno::INVAL),
            (Command::READ, FAST_ZERO, 0, 512, Errno::INVAL),
            (Command::READ, 1 << 15, 0, 512, Errno::INVAL),
            (Command::TRIM, 0, end, 512, Errno::INVAL),
            (Command::WRITE_ZEROES, 0, end - 1, 512, Errno::NOSPC),
            (Command::CACHE, 0, 0, 512, Errno::INVAL),
            (Command(77), 0, 0, 512, Errno::INVAL),
            (Command::BLOCK_STATUS, 0, end, 512, Errno::INVAL),
            (Command::BLOCK_STATUS, 0, 0, 0, Errno::INVAL),
        ];
        for (command, flags, offset, len, expected) in cases {
            let reply = c.call(command, flags, offset, len);
            assert_eq!(reply.error, Some(expected), "{command:?} {offset} {len}");
            assert_eq!(reply.text.is_empty(), !structured);
            assert!(reply.content.is_empty());
        }
        // The payload of a refused write is read over, even if it is longer than the protocol allows.
        for (flags, offset, len, expected) in [
            (0, end, 512, Errno::NOSPC),
            (0, end - 1, 2, Errno::NOSPC),
            (NO_HOLE, 0, 4096, Errno::INVAL),
            (0, 0, NBD_PAYLOAD_MAX as usize + 1, Errno::INVAL),
        ] {
            let cookie = c.send_write(flags, offset, &vec![9; len]);
            assert_eq!(c.reply_to(cookie).error, Some(expected));
        }
        assert_eq!(c.read(5, 100), Ok(patterned(5, 100)));
    }
    assert!(disk.ops().iter().all(|op| *op == Op::Read), "nothing refused has reached the disk");
}

#[test]
fn empty_requests_succeed_and_do_nothing() {
    let (f, disk) = Fixture::with_disk(512);
    for structured in [true, false] {
        let mut c = if structured { f.client() } else { f.simple_client() };
        assert_eq!(c.read(0, 0), Ok(vec![]));
        assert_eq!(c.write(512, &[]), Ok(()));
        assert_eq!(c.call(Command::TRIM, 0, 1, 0).result(), Ok(()));
        assert_eq!(c.call(Command::WRITE_ZEROES, 0, 1, 0).result(), Ok(()));
    }
    assert!(disk.ops().is_empty());
}

#[test]
fn a_read_only_export_refuses_changes_and_reads_over_their_payload() {
    let (f, disk) = Fixture::with_disk(4096);
    disk.read_only.store(true, Ordering::SeqCst);
    let mut c = f.client();
    assert_eq!(c.write(0, &[1; 512]), Err(Errno::PERM));
    assert_eq!(c.call(Command::TRIM, 0, 0, 512).error, Some(Errno::PERM));
    assert_eq!(c.call(Command::WRITE_ZEROES, 0, 0, 512).error, Some(Errno::PERM));
    assert_eq!(c.read(0, 512), Ok(patterned(0, 512)));
    assert_eq!(c.flush(), Ok(()));
}

#[test]
fn flags_of_requests_reach_the_disk() {
    let (f, disk) = Fixture::with_disk(1 << 16);
    let mut c = f.client();
    c.send_write(FUA, 0, &[1; 512]);
    c.next_reply().expect("reply").result().expect("write");
    for (flags, expected) in [
        (0, Flags::MAY_UNMAP),
        (NO_HOLE, Flags::empty()),
        (FAST_ZERO | FUA, Flags::MAY_UNMAP | Flags::NO_FALLBACK | Flags::FUA),
    ] {
        c.call(Command::WRITE_ZEROES, flags, 512, 1000).result().expect("zeroes");
        let last = *disk.seen.lock().last().expect("seen");
        assert_eq!((last.op, last.flags), (Op::WriteZeroes, expected));
    }
    assert_eq!(disk.seen.lock()[0].flags, Flags::FUA);
    assert_eq!(c.read(512, 1000), Ok(vec![0; 1000]));
    // FUA is accepted everywhere, and a durable trim is a trim and a flush.
    disk.seen.lock().clear();
    c.call(Command::READ, FUA, 0, 512).result().expect("read");
    c.call(Command::FLUSH, FUA, 0, 0).result().expect("flush");
    c.call(Command::TRIM, FUA, 0, 512).result().expect("trim");
    assert_eq!(disk.ops(), [Op::Read, Op::Flush, Op::Discard, Op::Flush]);
}

#[test]
fn errors_of_the_disk_are_told_with_their_reason() {
    let (f, disk) = Fixture::with_disk(1 << 16);
    let mut c = f.client();
    let cases = [
        (EIO, Errno::IO, "injected"),
        (IoError::os(libc::ENOSPC), Errno::NOSPC, ""),
        (IoError::new(libc::ETIMEDOUT, Code::CbwTimeout), Errno::IO, "cbw-timeout"),
    ];
    for (error, expected, text) in cases {
        *disk.fail.lock() = Some((Op::Write, 600, error));
        let cookie = c.send_write(0, 512, &[1; 512]);
        let reply = c.reply_to(cookie);
        assert_eq!((reply.error, reply.text.as_str()), (Some(expected), text));
    }
    *disk.fail.lock() = Some((Op::WriteZeroes, 0, IoError::unsupported()));
    assert_eq!(c.call(Command::WRITE_ZEROES, FAST_ZERO, 0, 512).error, Some(Errno::NOTSUP));
    // A trim is a hint: a disk that knows none has done its part.
    *disk.fail.lock() = Some((Op::Discard, 0, IoError::unsupported()));
    assert_eq!(c.call(Command::TRIM, 0, 0, 512).error, None);
    *disk.fail.lock() = Some((Op::Discard, 0, EIO));
    assert_eq!(c.call(Command::TRIM, 0, 0, 512).error, Some(Errno::IO));
}

#[test]
fn an_error_in_one_piece_of_a_long_write_fails_it_after_its_whole_payload() {
    let (f, disk) = Fixture::with_disk(8 * NBD_PIECE_LEN);
    *disk.fail.lock() = Some((Op::Write, NBD_PIECE_LEN as u64 + 10, EIO));
    let mut c = f.client();
    assert_eq!(c.write(0, &vec![1; 8 * NBD_PIECE_LEN]), Err(Errno::IO));
    assert_eq!(c.read(7, 9).map(|d| d.len()), Ok(9));
}

#[test]
fn an_error_in_one_piece_of_a_long_read_is_a_chunk_or_ends_a_simple_session() {
    let (f, disk) = Fixture::with_disk(4 * NBD_PIECE_LEN);
    *disk.fail.lock() = Some((Op::Read, NBD_PIECE_LEN as u64 + 10, EIO));
    let mut c = f.client();
    assert_eq!(c.read(0, 4 * NBD_PIECE_LEN as u32), Err(Errno::IO));
    assert_eq!(c.read(0, 512), Ok(patterned(0, 512)));
    let mut c = f.simple_client();
    assert_eq!(c.read(NBD_PIECE_LEN as u64, 512), Err(Errno::IO));
    c.send(Command::READ, 0, 0, 4 * NBD_PIECE_LEN as u32);
    let mut got = Vec::new();
    std::io::Read::read_to_end(&mut c.stream, &mut got).expect("the end of the stream");
    // At most the header and the piece that was good; never bytes of the piece that was not.
    assert!(got.len() <= 16 + NBD_PIECE_LEN);
}

#[test]
fn zeros_are_read_as_holes_unless_the_client_wants_one_piece() {
    let (f, disk) = Fixture::with_disk(1 << 20);
    disk.data.lock()[65_536..3 * 65_536].fill(0);
    let mut c = f.client();
    let reply = c.call(Command::READ, 0, 0, 4 * 65_536);
    let kinds: Vec<_> = reply.content.iter().map(|(at, c)| (*at, matches!(c, Content::Hole(_)))).collect();
    assert_eq!(kinds, [(0, false), (65_536, true), (3 * 65_536, false)]);
    let expected = disk.data.lock()[..4 * 65_536].to_vec();
    assert!(reply.assemble(0, 4 * 65_536) == expected);
    let reply = c.call(Command::READ, DF, 0, 4 * 65_536);
    assert_eq!(reply.content.len(), 1);
    assert!(reply.assemble(0, 4 * 65_536) == expected);
    assert_eq!(c.call(Command::READ, DF, 0, 1 << 20).error, None);
}

#[test]
fn block_status_covers_the_range_with_merged_extents() {
    let (f, disk) = Fixture::with_disk(10 * 4096 + 100);
    disk.data.lock()[2 * 4096..5 * 4096].fill(0);
    let mut c = f.client();
    let all = 10 * 4096 + 100;
    let reply = c.call(Command::BLOCK_STATUS, 0, 0, all);
    assert_eq!(reply.extents, [(2 * 4096, 0), (3 * 4096, 3), (5 * 4096 + 100, 0)]);
    let reply = c.call(Command::BLOCK_STATUS, REQ_ONE, 4096, all - 4096);
    assert_eq!(reply.extents, [(4096, 0)]);
    let reply = c.call(Command::BLOCK_STATUS, 0, 3 * 4096 + 1, 512);
    assert_eq!(reply.extents, [(512, 3)]);
    // Without the context there is no status to ask for.
    let mut c = Client::connect(&f.path());
    c.structured();
    c.go("").expect("go");
    assert_eq!(c.call(Command::BLOCK_STATUS, 0, 0, 512).error, Some(Errno::INVAL));
}

#[test]
fn replies_come_as_requests_end_and_a_long_simple_read_is_not_interleaved() {
    let (f, disk) = Fixture::with_disk(4 * NBD_PIECE_LEN);
    let mut c = f.simple_client();
    disk.gate.close(Op::Write);
    let slow = c.send_write(0, 0, &[5; 512]);
    let quick = c.send(Command::READ, 0, 512, 10);
    assert_eq!(c.reply_to(quick).content, [(0, Content::Data(patterned(512, 10)))]);
    assert_eq!(disk.gate.waiting(), 1);
    // The long read has to wait for the write, and what comes after it waits for the long read.
    let long = c.send(Command::READ, 0, 1, 3 * NBD_PIECE_LEN as u32);
    let last = c.send(Command::READ, 0, 0, 1);
    disk.gate.open();
    assert_eq!(c.reply_to(slow).error, None);
    let data = c.reply_to(long);
    let mut expected = patterned(1, 3 * NBD_PIECE_LEN);
    expected[..511].fill(5);
    assert!(data.content == [(0, Content::Data(expected))]);
    assert_eq!(c.reply_to(last).content, [(0, Content::Data(vec![5]))]);
}

#[test]
fn many_requests_in_flight_are_all_answered() {
    let (f, disk) = Fixture::with_disk(1 << 20);
    let mut c = f.client();
    let count = 1000u32;
    let mut open: std::collections::HashSet<u64> = (0..count)
        .map(|i| {
            let at = u64::from(i) * 1000;
            if i % 2 == 0 {
                c.send_write(0, at, &patterned(at as usize, 1000))
            } else {
                c.send(Command::READ, 0, at, 1000)
            }
        })
        .collect();
    while !open.is_empty() {
        let reply = c.next_reply().expect("a reply");
        assert!(open.remove(&reply.cookie) && reply.error.is_none());
    }
    assert_eq!(disk.ops().len(), count as usize);
}

#[test]
fn the_largest_requests_work_and_leave_no_memory_behind() {
    let len = NBD_PAYLOAD_MAX as usize;
    let (f, disk) = Fixture::with_disk(len + 512);
    for structured in [true, false] {
        let mut c = if structured { f.client() } else { f.simple_client() };
        let data: Vec<u8> = (0..len).map(|i| (i % 247) as u8 + 1).collect();
        c.write(512, &data).expect("write");
        assert!(disk.data.lock()[512..] == data);
        assert!(c.read(512, NBD_PAYLOAD_MAX).expect("read") == data);
    }
    f.assert_all_gone();
}

#[test]
fn a_disk_that_shrinks_or_loses_its_medium_refuses_what_is_gone() {
    let f = Fixture::new();
    let node = TestDisk::new(8192);
    let disk = f.export("", &node);
    let mut c = f.client();
    assert_eq!(c.read(4096, 4096).map(|d| d.len()), Ok(4096));
    node.data.lock().truncate(4096);
    assert_eq!(c.read(4096, 4096), Err(Errno::INVAL));
    f.eject(&disk);
    assert_eq!(c.read(0, 512), Err(Errno::INVAL));
    assert_eq!(c.write(0, &[0; 512]), Err(Errno::PERM));
    assert!(c.flush().is_err());
}
