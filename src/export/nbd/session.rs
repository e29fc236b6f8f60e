//! One client from its arrival to its end: handshake, then transmission. The body of a connection's thread.

use super::connection::Connection;
use super::handshake::{Handshake, INPUT_MAX, Next, Session};
use super::net::Socket;
use super::pool::Pool;
use super::server::{Control, Export, Shared};
use super::sys::{self, Gather, Interest};
use crate::rt::{Clock, Instant};
use crate::sync::Arc;
use std::io;

/// Serves the client behind `socket` until it goes or the server stops. `id` is its number at the server.
pub(super) fn serve(shared: &Shared, id: u64, socket: Socket, control: Arc<Control>) {
    let clock = shared.env().runtime.clock.clone();
    let talk = Talk { shared, id, socket: &socket, control: &control, clock: &*clock };
    let Some((session, export, rest)) = talk.shake_hands() else { return };
    let pool = Pool::new(shared.budget().clone());
    let agreed = (session.structured, session.allocation);
    let connection = Connection::new(socket, &export, agreed, &rest, control, pool, *shared.timing());
    let result = connection.map_err(|e| e.full_text()).and_then(|mut c| c.run().map_err(|e| e.to_string()));
    if let Err(why) = result {
        shared.env().log(1, "nbd", &format!("connection to export '{}' ended: {why}", session.export));
    }
}

/// A handshake over a socket, with a limit on time without progress.
struct Talk<'a> {
    shared: &'a Shared,
    id: u64,
    socket: &'a Socket,
    control: &'a Control,
    clock: &'a dyn Clock,
}

impl Talk<'_> {
    /// What was agreed on, the export, and what the client has sent since; `None` if the session is over.
    fn shake_hands(&self) -> Option<(Session, Arc<Export>, Vec<u8>)> {
        let mut out = Vec::new();
        let mut handshake = Handshake::begin(&mut out);
        let mut input = Vec::new();
        let mut deadline = self.deadline();
        loop {
            // Everything is sent before the next step, so a client that does not read is asked nothing more.
            self.send(&out, deadline).ok()?;
            out.clear();
            let before = handshake.progress();
            let (used, next) = handshake.step(&input, self.shared, &mut out);
            input.drain(..used);
            if handshake.progress() > before {
                deadline = self.deadline();
            }
            match next {
                Next::Enter(session) => {
                    // A client counts as one of the export's before it knows. If the export has gone since the answer was made, the
                    // client finds the connection closed, as it would a moment later.
                    let export = self.shared.attach(self.id, &session.export)?;
                    self.send(&out, deadline).ok()?;
                    return Some((session, export, input));
                }
                Next::Close => {
                    // Best effort: the client may have gone.
                    let _ = self.send(&out, deadline);
                    return None;
                }
                Next::Step if used == 0 => self.receive(&mut input, deadline).ok()?,
                Next::Step => {}
            }
        }
    }

    fn receive(&self, input: &mut Vec<u8>, deadline: Instant) -> io::Result<()> {
        debug_assert!(input.len() < INPUT_MAX, "a step wants more than its bound");
        let mut chunk = [0; 4096];
        loop {
            match self.socket.recv(None, &mut chunk) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => {
                    input.extend(&chunk[..n]);
                    return Ok(());
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.wait(true, deadline)?,
                Err(e) => return Err(e),
            }
        }
    }

    fn send(&self, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
        while !bytes.is_empty() {
            let mut gather = Gather::default();
            gather.bytes(bytes);
            match self.socket.send(gather) {
                Ok(n) => bytes = &bytes[n..],
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.wait(false, deadline)?,
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Waits until the socket is readable, or else writable. An error when the deadline has passed or the server stops.
    fn wait(&self, readable: bool, deadline: Instant) -> io::Result<()> {
        let left = deadline.since(self.clock.now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let fds = [(self.control.raw(), Interest::READ), self.socket.interest(readable, !readable)];
        let [control, _] = sys::poll(fds, Some(left))?;
        if control.readable && self.control.must_stop() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        Ok(())
    }

    fn deadline(&self) -> Instant {
        self.clock.now().after(self.shared.timing().handshake)
    }
}
