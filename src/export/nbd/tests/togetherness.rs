//! Several clients, several exports, and the server's own life.

use super::super::server::{Export, Removal, Server, Timing};
use super::client::Client;
use super::support::{Fixture, PATIENT, TestDisk, until};
use crate::error::Code;
use crate::io::nbd::proto::{Errno, ExportFlags, Opt, Rep};
use crate::request::Op;
use crate::sync::atomic::Ordering;
use std::os::unix::net::UnixStream;
use std::time::Duration;

#[test]
fn many_clients_write_and_read_at_once() {
    let clients = 40;
    let block = 64 << 10;
    let (f, disk) = Fixture::with_disk(clients * block);
    std::thread::scope(|s| {
        for i in 0..clients {
            let f = &f;
            s.spawn(move || {
                let mut c = f.client();
                let data = vec![i as u8 + 1; block];
                let at = (i * block) as u64;
                for _ in 0..5 {
                    c.write(at, &data).expect("write");
                    assert!(c.read(at, block as u32).expect("read") == data);
                }
                c.disconnect();
            });
        }
    });
    f.assert_all_gone();
    let data = disk.data.lock();
    assert!(data.chunks(block).enumerate().all(|(i, c)| c.iter().all(|b| *b == i as u8 + 1)));
}

#[test]
fn a_flush_on_one_connection_covers_what_was_written_on_another() {
    let (f, disk) = Fixture::with_disk(1 << 16);
    let (mut a, mut b) = (f.client(), f.client());
    a.write(0, &[1; 512]).expect("write");
    b.flush().expect("flush");
    // One disk is below both: its flush came after the write had completed there.
    assert_eq!(disk.ops(), [Op::Write, Op::Flush]);
    assert_eq!(b.read(0, 512), Ok(vec![1; 512]));
}

#[test]
fn clients_past_the_limit_wait_until_one_goes() {
    let f = Fixture::with(1, PATIENT);
    f.export("", &TestDisk::new(512));
    let mut first = Client::connect(&f.path());
    let (_, flags) = first.go("").expect("go");
    assert!(!flags.contains(ExportFlags::CAN_MULTI_CONN), "one connection is all there is");
    let waiting = Client::connect_raw(&f.path());
    waiting.stream.set_nonblocking(true).expect("nonblocking");
    assert_eq!(first.read(0, 5).map(|d| d.len()), Ok(5));
    let e = waiting.stream.peek_byte().expect_err("it has not been greeted");
    assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock);
    drop(first);
    until("the waiting client is greeted", || waiting.stream.peek_byte().is_ok());
}

trait PeekByte {
    fn peek_byte(&self) -> std::io::Result<u8>;
}

impl PeekByte for UnixStream {
    fn peek_byte(&self) -> std::io::Result<u8> {
        let mut b = [0];
        std::io::Read::read_exact(&mut &*self, &mut b)?;
        Ok(b[0])
    }
}

#[test]
fn exports_come_and_go_while_the_server_runs() {
    let f = Fixture::new();
    let (a, b) = (TestDisk::new(512), TestDisk::new(1024));
    f.export("a", &a);
    let mut c = Client::connect(&f.path());
    assert_eq!(c.go("b"), Err(Rep::ERR_UNKNOWN));
    f.export("b", &b);
    let names: Vec<_> = c.option(Opt::LIST, b"").into_iter().filter(|r| r.0 == Rep::SERVER).collect();
    assert_eq!(
        names,
        [(Rep::SERVER, b"\0\0\0\x01aa test".to_vec()), (Rep::SERVER, b"\0\0\0\x01ba test".to_vec())]
    );
    assert_eq!(c.go("b").map(|g| g.0), Ok(1024));

    let taken = Export { name: "a".to_owned(), description: String::new(), disk: f.disk(&b), writable: true };
    assert_eq!(f.server.add_export(taken).expect_err("the name is taken").code(), Code::Busy);
    let e = f.server.remove_export("b", Removal::Safe).expect_err("it has a client");
    assert_eq!(e.code(), Code::Busy);
    f.server.remove_export("a", Removal::Safe).expect("it has none");
    assert_eq!(f.server.remove_export("a", Removal::Hard).expect_err("gone").code(), Code::NotFound);
    assert_eq!(c.read(0, 3).map(|d| d.len()), Ok(3));
    f.server.remove_export("b", Removal::Hard).expect("its client is disconnected");
    assert!(c.is_closed());
    assert!(f.server.exports().is_empty());
}

#[test]
fn hard_removal_waits_for_running_requests_and_leaves_other_exports_alone() {
    let f = Fixture::new();
    let (a, b) = (TestDisk::new(1 << 16), TestDisk::new(1 << 16));
    f.export("", &a);
    f.export("b", &b);
    let mut other = Client::connect(&f.path());
    other.go("b").expect("go");
    let mut c = f.client();
    a.gate.close(Op::Write);
    let cookie = c.send_write(0, 0, &[9; 512]);
    until("the write is in flight", || a.gate.waiting() == 1);
    std::thread::scope(|s| {
        let removal = s.spawn(|| f.server.remove_export("", Removal::Hard));
        until("the export is gone", || f.server.exports().len() == 1);
        assert_eq!(other.read(0, 7).map(|d| d.len()), Ok(7));
        assert!(!removal.is_finished(), "the write is still running");
        a.gate.open();
        removal.join().expect("no panic").expect("removed");
    });
    assert_eq!(c.reply_to(cookie).error, None);
    assert!(c.is_closed());
    assert_eq!(other.read(0, 7).map(|d| d.len()), Ok(7));
}

#[test]
fn stop_finishes_running_requests_and_takes_the_socket_away() {
    let (f, disk) = Fixture::with_disk(1 << 16);
    let mut c = f.client();
    let mut in_handshake = Client::connect(&f.path());
    disk.gate.close(Op::Write);
    let cookie = c.send_write(0, 0, &[9; 512]);
    until("the write is in flight", || disk.gate.waiting() == 1);
    std::thread::scope(|s| {
        let stop = s.spawn(|| f.server.stop());
        until("nobody new is let in", || UnixStream::connect(f.path()).is_err());
        assert!(in_handshake.is_closed());
        assert!(!stop.is_finished(), "the write is still running");
        disk.gate.open();
        stop.join().expect("no panic");
    });
    assert_eq!(c.reply_to(cookie).error, None);
    assert!(c.is_closed());
    assert!(!f.path().exists());
    assert_eq!(f.server.connections(), 0);
    let late =
        Export { name: "x".to_owned(), description: String::new(), disk: f.disk(&disk), writable: true };
    assert!(f.server.add_export(late).is_err());
    f.server.stop();
}

#[test]
fn stop_cancels_what_waits_and_does_not_wait_for_ever_for_what_hangs() {
    let timing = Timing { stop: Duration::from_millis(50), ..PATIENT };
    for cancellable in [true, false] {
        let f = Fixture::with(0, timing);
        let disk = TestDisk::new(1 << 16);
        f.export("", &disk);
        disk.gate.cancellable.store(cancellable, Ordering::SeqCst);
        disk.gate.close(Op::Write);
        let mut c = f.client();
        c.send_write(0, 0, &[9; 512]);
        until("the write is in flight", || disk.gate.waiting() == 1);
        f.server.stop();
        assert!(!f.path().exists());
        if !cancellable {
            assert_eq!((disk.gate.waiting(), f.server.connections()), (1, 1), "it is left behind");
            disk.gate.open();
        }
        until("the connection ends", || f.server.connections() == 0);
    }
}

#[test]
fn a_client_that_takes_no_replies_does_not_keep_the_server_from_stopping() {
    let timing = Timing { stop: Duration::from_millis(50), ..PATIENT };
    let f = Fixture::with(0, timing);
    let disk = TestDisk::new(4 << 20);
    f.export("", &disk);
    let mut c = f.client();
    for _ in 0..16 {
        c.send(crate::io::nbd::proto::Command::READ, 0, 0, 1 << 20);
    }
    until("reads have been done", || disk.ops().len() == 16);
    f.server.stop();
    assert_eq!(f.server.connections(), 0);
}

#[test]
fn exports_with_impossible_names_are_refused() {
    let f = Fixture::new();
    let disk = f.disk(&TestDisk::new(512));
    let export = |name: &str, description: &str| Export {
        name: name.to_owned(),
        description: description.to_owned(),
        disk: disk.clone(),
        writable: false,
    };
    for (name, description) in [("a".repeat(4097), ""), ("a\0b".to_owned(), ""), ("a".to_owned(), "\0")] {
        assert_eq!(f.server.add_export(export(&name, description)).expect_err("no").errno(), libc::EINVAL);
    }
    f.server.add_export(export("a", "d")).expect("fine");
    let mut c = Client::connect(&f.path());
    let (_, flags) = c.go("a").expect("go");
    assert!(flags.contains(ExportFlags::READ_ONLY));
    assert_eq!(c.write(0, &[1]), Err(Errno::PERM));
}

#[test]
fn a_server_on_tcp_serves_on_the_port_it_got() {
    use super::super::net::Address;
    let (f, _disk) = Fixture::with_disk(512);
    let address = Address::Tcp("127.0.0.1".to_owned(), 0);
    let server = Server::start(&f.env, &address, 0).expect("server");
    let Address::Tcp(host, port) = server.address() else { panic!("not tcp") };
    let mut stream = std::net::TcpStream::connect((host.as_str(), *port)).expect("connect");
    let mut greeting = [0; 18];
    std::io::Read::read_exact(&mut stream, &mut greeting).expect("greeting");
    assert_eq!(&greeting[..8], b"NBDMAGIC");
}
