//! Clients that are slow, silent, rude or random: they keep only themselves waiting, and leave nothing behind.

use super::client::Client;
use super::support::{Fixture, PATIENT, TestDisk, pattern, until};
use crate::io::nbd::proto::{Command, Opt, OptionHeader, RequestHeader};
use crate::limits::{
    NBD_BYTES_CONNECTION_MAX, NBD_BYTES_OWN, NBD_BYTES_SHARED, NBD_COMMANDS_MAX, NBD_PIECE_LEN,
};
use crate::request::Op;
use proptest::prelude::*;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::time::Duration;

#[test]
fn a_client_that_does_not_take_its_replies_is_read_no_further_and_others_are_served() {
    let len = 4 * NBD_PIECE_LEN;
    let (f, disk) = Fixture::with_disk(len);
    let mut slow = f.client();
    let count = 200;
    let cookies: Vec<_> = (0..count).map(|_| slow.send(Command::READ, 0, 0, NBD_PIECE_LEN as u32)).collect();
    // It stops where its memory ends: that it came so far shows that the limit was met.
    let reads = || disk.ops().len();
    until("the slow client's reads reach the limit", || reads() >= NBD_BYTES_CONNECTION_MAX / NBD_PIECE_LEN);
    let mut other = f.client();
    for _ in 0..20 {
        assert_eq!(other.read(1, 100).map(|d| d.len()), Ok(100));
        assert!(f.server.budget_free() >= NBD_BYTES_SHARED - NBD_BYTES_CONNECTION_MAX);
    }
    // What is sent and not taken lies in the socket's buffer, less than a few pieces.
    assert!(reads() - 20 < NBD_BYTES_CONNECTION_MAX / NBD_PIECE_LEN + 10, "{} reads", reads());
    let expected: Vec<u8> = (0..NBD_PIECE_LEN).map(pattern).collect();
    let mut got = Vec::new();
    for _ in 0..count {
        let reply = slow.next_reply().expect("a reply");
        assert!(reply.assemble(0, NBD_PIECE_LEN as u32) == expected);
        got.push(reply.cookie);
    }
    got.sort_unstable();
    assert_eq!(got, cookies);
    drop((slow, other));
    f.assert_all_gone();
}

#[test]
fn a_flood_of_small_requests_stops_at_the_limit_of_commands() {
    let (f, disk) = Fixture::with_disk(1 << 16);
    disk.gate.close(Op::Write);
    let mut c = f.client();
    let count = NBD_COMMANDS_MAX + 50;
    for _ in 0..count {
        c.send_write(0, 0, &[1; 16]);
    }
    until("the limit of commands is reached", || disk.gate.waiting() == NBD_COMMANDS_MAX);
    // Another client's whole session later there are still no more.
    assert_eq!(f.client().read(0, 10).map(|d| d.len()), Ok(10));
    assert_eq!(disk.gate.waiting(), NBD_COMMANDS_MAX);
    disk.gate.open();
    for _ in 0..count {
        assert_eq!(c.next_reply().expect("a reply").error, None);
    }
}

#[test]
fn half_sent_payloads_hold_one_piece_each_and_block_nobody() {
    let (f, _disk) = Fixture::with_disk(32 << 20);
    let mut half: Vec<_> = (0..20)
        .map(|_| {
            let mut c = f.client();
            c.send(Command::WRITE, 0, 0, 32 << 20);
            c.stream.write_all(&vec![3; NBD_PIECE_LEN / 2]).expect("half a piece");
            c
        })
        .collect();
    let mut other = f.client();
    assert_eq!(other.write(0, &vec![1; 3 * NBD_PIECE_LEN]), Ok(()));
    // What half-sent writes hold is their connections' own.
    const { assert!(NBD_PIECE_LEN <= NBD_BYTES_OWN) };
    drop(other);
    until("the other client is gone", || f.server.connections() == half.len());
    assert_eq!(f.server.budget_free(), NBD_BYTES_SHARED);
    half.clear();
    f.assert_all_gone();
}

#[test]
fn a_client_that_goes_in_the_middle_of_a_payload_loses_that_write_only() {
    let (f, disk) = Fixture::with_disk(1 << 16);
    disk.gate.close(Op::Write);
    let mut c = f.client();
    c.send_write(0, 0, &[0xfd; 512]);
    c.send(Command::WRITE, 0, 4096, 8192);
    c.stream.write_all(&[0xfe; 4000]).expect("half a payload");
    until("the first write is in flight", || disk.gate.waiting() == 1);
    drop(c);
    // The connection waits for its write: the buffer belongs to the disk until then.
    assert_eq!(f.client().read(0, 1).map(|d| d.len()), Ok(1));
    assert_eq!((f.server.connections() >= 1, disk.gate.waiting()), (true, 1));
    disk.gate.open();
    f.assert_all_gone();
    let data = disk.data.lock();
    assert_eq!(data[..512], [0xfd; 512]);
    assert!(data[4096..12_288].iter().all(|b| *b != 0xfe), "half a write has reached the disk");
}

#[test]
fn disconnect_and_half_close_let_running_requests_finish() {
    for disconnect in [true, false] {
        let (f, disk) = Fixture::with_disk(1 << 16);
        disk.gate.close(Op::Write);
        let mut c = f.client();
        let cookie = c.send_write(0, 0, &[0xfd; 512]);
        if disconnect {
            c.disconnect();
        } else {
            c.stream.shutdown(Shutdown::Write).expect("shutdown");
        }
        until("the write is in flight", || disk.gate.waiting() == 1);
        disk.gate.open();
        assert_eq!(c.reply_to(cookie).error, None);
        assert_eq!(c.next_reply(), None);
        assert_eq!(disk.data.lock()[..512], [0xfd; 512]);
    }
}

#[test]
fn nothing_after_a_disconnect_is_carried_out() {
    let (f, disk) = Fixture::with_disk(1 << 16);
    let mut c = f.client();
    let disc = RequestHeader { flags: 0, command: Command::DISC, cookie: 1, offset: 0, len: 0 };
    let flush = RequestHeader { command: Command::FLUSH, ..disc };
    c.stream.write_all(&[disc.encode(), flush.encode()].concat()).expect("both at once");
    assert!(c.is_closed());
    f.assert_all_gone();
    assert!(disk.ops().is_empty());
}

#[test]
fn a_request_without_its_magic_ends_the_session() {
    let (f, disk) = Fixture::with_disk(1 << 16);
    let mut c = f.client();
    c.stream.write_all(&[0x25; RequestHeader::LEN]).expect("garbage");
    assert!(c.is_closed());
    assert!(disk.ops().is_empty());
    f.assert_all_gone();
}

#[test]
fn silent_and_dribbling_clients_are_put_out_of_the_handshake() {
    let timing = super::super::server::Timing { handshake: Duration::from_millis(50), ..PATIENT };
    let f = Fixture::with(0, timing);
    f.export("", &TestDisk::new(512));
    let mut silent = Client::connect_raw(&f.path());
    let mut greeting = [0; 18];
    silent.stream.read_exact(&mut greeting).expect("greeting");
    assert!(silent.is_closed());
    // Bytes are not progress; only whole options are.
    let mut dribbling = Client::connect(&f.path());
    dribbling.stream.write_all(&OptionHeader { option: Opt::LIST, len: 60_000 }.encode()).expect("header");
    until("the server gives up", || dribbling.stream.write_all(&[0]).is_err());
    f.assert_all_gone();
}

#[test]
fn an_idle_client_past_the_handshake_may_stay() {
    let timing = super::super::server::Timing { handshake: Duration::from_millis(20), ..PATIENT };
    let f = Fixture::with(0, timing);
    f.export("", &TestDisk::new(512));
    let mut idle = f.client();
    let mut silent = Client::connect(&f.path());
    assert!(silent.is_closed(), "the limit has passed for somebody");
    assert_eq!(idle.read(0, 5).map(|d| d.len()), Ok(5));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_in_the_transmission_phase_hurt_nobody(
        parts in proptest::collection::vec(
            (any::<bool>(), any::<u16>(), 0u16..9, any::<u64>(), prop_oneof![0u32..70_000, any::<u32>()],
             proptest::collection::vec(any::<u8>(), 0..100)),
            1..20,
        ),
        structured: bool,
    ) {
        let (f, _disk) = Fixture::with_disk(1 << 17);
        let mut c = if structured { f.client() } else { f.simple_client() };
        let mut bytes = Vec::new();
        for (header, flags, command, offset, len, junk) in parts {
            if header {
                let offset = offset % (1 << 18);
                bytes.extend(RequestHeader { flags: flags & 31, command: Command(command), cookie: 1, offset, len }.encode());
            }
            bytes.extend(junk);
        }
        // The server may have closed already.
        let _ = c.stream.write_all(&bytes);
        let _ = c.stream.shutdown(Shutdown::Write);
        let _ = std::io::copy(&mut c.stream, &mut std::io::sink());
        let mut other = f.client();
        prop_assert!(other.read(0, 512).is_ok());
        drop((c, other));
        f.assert_all_gone();
    }
}
