//! One QMP connection: negotiation, commands in their order, a bounded queue of what is still to be sent.
//!
//! Nothing here blocks. A client that does not read is read from no more once [`BACKLOG_PAUSE`] bytes wait for it, and is dropped when events make them
//! more than [`BACKLOG_MAX`]. While a command of the connection runs on the worker, the ones after it wait in the socket.

use super::command::{self, Command};
use super::wire::{Failure, Frame, Framer, Request, answer, greeting, line, read_request};
use serde_json::{Map, Value};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// Bytes waiting to be sent from which on no command is read.
const BACKLOG_PAUSE: usize = 64 << 10;
/// Bytes waiting to be sent at which the connection is dropped.
const BACKLOG_MAX: usize = 16 << 20;
/// Bytes read at a time.
const READ_LEN: usize = 64 << 10;

/// A connection.
#[derive(Debug)]
pub(super) struct Connection {
    stream: File,
    pretty: bool,
    negotiated: bool,
    framer: Framer,
    out: Vec<u8>,
    /// How much of `out` has been sent.
    sent: usize,
    /// A command of this connection is on the worker; its id.
    running: Option<Option<Value>>,
    /// The client sends no more; it still gets its answers.
    at_end: bool,
}

/// What a connection wants done with a command that it cannot answer itself.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) command: &'static Command,
    pub(super) arguments: Map<String, Value>,
}

/// What came of reading one message.
#[derive(Debug)]
pub(super) enum Step {
    /// There is none, or the connection has to wait.
    Idle,
    /// It has been answered.
    Answered,
    /// It has to be run; [`Connection::finish`] takes the result. Until then no more messages are read.
    Call(Call),
}

impl Connection {
    /// Greets a client.
    pub(super) fn new(fd: OwnedFd, pretty: bool) -> Self {
        let mut new = Self {
            stream: File::from(fd),
            pretty,
            negotiated: false,
            framer: Framer::default(),
            out: Vec::new(),
            sent: 0,
            running: None,
            at_end: false,
        };
        new.send(&greeting());
        new
    }

    /// For poll.
    pub(super) fn raw(&self) -> RawFd {
        self.stream.as_raw_fd()
    }

    /// Whether there is room for what the client sends.
    pub(super) fn wants_input(&self) -> bool {
        self.may_read() && !self.at_end && self.framer.is_idle()
    }

    /// Whether something waits to be sent.
    pub(super) fn wants_output(&self) -> bool {
        self.backlog() > 0
    }

    /// Whether a message may be ready without more input.
    pub(super) fn has_messages(&self) -> bool {
        self.may_read() && !self.framer.is_idle()
    }

    /// Whether the client has got everything it will get.
    pub(super) fn is_over(&self) -> bool {
        self.at_end && self.running.is_none() && self.backlog() == 0 && self.framer.is_idle()
    }

    /// Receives what is there, some of it at least.
    pub(super) fn receive(&mut self) -> io::Result<()> {
        let mut bytes = [0; READ_LEN];
        match (&self.stream).read(&mut bytes) {
            Ok(0) => self.at_end = true,
            Ok(n) => self.framer.feed(&bytes[..n]),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(e) => return Err(e),
        }
        Ok(())
    }

    /// Reads the next message.
    pub(super) fn step(&mut self) -> Step {
        if !self.may_read() {
            return Step::Idle;
        }
        let frame = match self.framer.next() {
            None => return Step::Idle,
            Some(frame) => frame,
        };
        let request = match frame {
            Frame::Message(text) => read_request(&text),
            Frame::TooLong => Err((None, Failure::generic("the message is too long"))),
        };
        let (id, result) = match request {
            Err((id, e)) => (id, Err(e)),
            Ok(Request { id, name, arguments }) => match self.look_up(&name, &arguments) {
                Ok(None) => (id, Ok(Value::Object(Map::new()))),
                Ok(Some(command)) => {
                    self.running = Some(id);
                    return Step::Call(Call { command, arguments });
                }
                Err(e) => (id, Err(e)),
            },
        };
        self.send(&answer(id, result));
        Step::Answered
    }

    /// Answers the command that was called.
    pub(super) fn finish(&mut self, result: Result<Value, Failure>) {
        if let Some(id) = self.running.take() {
            self.send(&answer(id, result));
        }
    }

    /// Tells the client about something; not before it has negotiated.
    pub(super) fn notify(&mut self, event: &Value) {
        if self.negotiated {
            self.send(event);
        }
    }

    /// Sends what fits. An error means that the connection is over; so does a client that is too far behind.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        while self.sent < self.out.len() {
            match (&self.stream).write(&self.out[self.sent..]) {
                Ok(n) => self.sent += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) => return Err(e),
            }
        }
        if self.backlog() > BACKLOG_MAX {
            return Err(io::Error::other("the client does not read"));
        }
        if self.sent == self.out.len() || self.sent > BACKLOG_PAUSE {
            self.out.drain(..self.sent);
            self.sent = 0;
        }
        Ok(())
    }

    fn may_read(&self) -> bool {
        self.running.is_none() && self.backlog() < BACKLOG_PAUSE
    }

    fn backlog(&self) -> usize {
        self.out.len() - self.sent
    }

    /// The command to run, or none if there is nothing left to do.
    fn look_up(
        &mut self,
        name: &str,
        arguments: &Map<String, Value>,
    ) -> Result<Option<&'static Command>, Failure> {
        if !self.negotiated {
            if name != "qmp_capabilities" {
                let text = format!("'{}' comes after 'qmp_capabilities'", shown(name));
                return Err(Failure::new(Failure::NO_COMMAND, text));
            }
            if let Some((key, value)) = arguments.iter().next()
                && !(key == "enable" && value.as_array().is_some_and(Vec::is_empty))
            {
                return Err(Failure::generic("there are no capabilities to enable"));
            }
            self.negotiated = true;
            return Ok(None);
        }
        match command::find(name) {
            Some(command) => Ok(Some(command)),
            None => {
                let text = format!("there is no command '{}'", shown(name));
                Err(Failure::new(Failure::NO_COMMAND, text))
            }
        }
    }

    fn send(&mut self, value: &Value) {
        self.out.extend_from_slice(&line(value, self.pretty));
    }
}

/// A foreign name as a message repeats it.
fn shown(name: &str) -> String {
    name.chars().take(80).flat_map(char::escape_debug).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::os::unix::net::UnixStream;

    fn pair() -> (UnixStream, Connection) {
        let (client, ours) = UnixStream::pair().expect("socketpair");
        client.set_nonblocking(true).expect("nonblocking");
        ours.set_nonblocking(true).expect("nonblocking");
        (client, Connection::new(ours.into(), false))
    }

    fn received(client: &mut UnixStream) -> Vec<Value> {
        let mut text = Vec::new();
        let e = client.read_to_end(&mut text).expect_err("it is still open");
        assert_eq!(e.kind(), io::ErrorKind::WouldBlock);
        let lines = text.split(|b| *b == b'\n').filter(|l| !l.is_empty());
        lines.map(|l| serde_json::from_slice(l).expect("JSON")).collect()
    }

    fn ask(client: &mut UnixStream, ours: &mut Connection, text: &str) -> (Vec<Value>, Option<Call>) {
        client.write_all(text.as_bytes()).expect("write");
        ours.receive().expect("receive");
        let call = loop {
            match ours.step() {
                Step::Idle => break None,
                Step::Answered => {}
                Step::Call(call) => break Some(call),
            }
        };
        ours.flush().expect("flush");
        (received(client), call)
    }

    #[test]
    fn nothing_works_before_the_negotiation_and_it_is_done_once() {
        let (mut c, mut x) = pair();
        x.notify(&json!({"event": "E"}));
        let (all, _) = ask(&mut c, &mut x, r#"{"execute":"query-version","id":1}"#);
        assert!(all[0]["QMP"]["capabilities"].is_array(), "{all:?}");
        assert_eq!((&all[1]["error"]["class"], &all[1]["id"]), (&json!("CommandNotFound"), &json!(1)));
        let bad = r#"{"execute":"qmp_capabilities","arguments":{"enable":["oob"]}}"#;
        assert_eq!(ask(&mut c, &mut x, bad).0[0]["error"]["class"], "GenericError");
        let (all, _) = ask(&mut c, &mut x, r#"{"execute":"qmp_capabilities"}"#);
        assert_eq!(all, [json!({"return": {}})]);
        let (all, call) = ask(&mut c, &mut x, r#"{"execute":"quit","id":2}{"execute":"quit","id":3}"#);
        assert!(all.is_empty());
        assert_eq!(call.expect("a call").command.name, "quit");
        assert!(!x.wants_input() && matches!(x.step(), Step::Idle), "the second waits for the first");
        x.finish(Ok(json!({})));
        assert!(matches!(x.step(), Step::Call(_)));
        x.flush().expect("flush");
        assert_eq!(received(&mut c), [json!({"return": {}, "id": 2})]);
    }

    #[test]
    fn a_mistake_is_answered_and_the_next_command_works() {
        let (mut c, mut x) = pair();
        ask(&mut c, &mut x, r#"{"execute":"qmp_capabilities"}"#);
        for text in ["nonsense\n", "{\"execute\":\n", "[1]", "{}", "\u{0}\n", r#"{"execute":"no-such"}"#] {
            let (all, _) = ask(&mut c, &mut x, text);
            assert!(all.len() == 1 && all[0]["error"]["desc"].is_string(), "{text:?}: {all:?}");
        }
        let (_, call) = ask(&mut c, &mut x, r#"{"execute":"query-jobs","arguments":{"a":1}}"#);
        assert_eq!(call.expect("a call").arguments["a"], 1);
    }

    #[test]
    fn a_client_that_does_not_read_is_dropped_before_memory_grows() {
        let (mut c, mut x) = pair();
        ask(&mut c, &mut x, r#"{"execute":"qmp_capabilities"}"#);
        let event = json!({"event": "E", "data": "x".repeat(1 << 20)});
        let mut sent = 0;
        let e = loop {
            x.notify(&event);
            if let Err(e) = x.flush() {
                break e;
            }
            assert!(!x.wants_input(), "no commands from a client that is behind");
            sent += 1;
            assert!(sent < 64);
        };
        assert!(e.to_string().contains("does not read"), "{e}");
        assert!(x.backlog() <= BACKLOG_MAX + (2 << 20));
    }

    #[test]
    fn a_client_that_has_sent_everything_still_gets_its_answers() {
        let (mut c, mut x) = pair();
        c.write_all(br#"{"execute":"qmp_capabilities"}{"execute":"query-jobs"}"#).expect("write");
        c.shutdown(std::net::Shutdown::Write).expect("shutdown");
        x.receive().expect("receive");
        x.receive().expect("the end");
        assert!(matches!(x.step(), Step::Answered) && matches!(x.step(), Step::Call(_)));
        assert!(!x.is_over());
        x.finish(Ok(json!([])));
        assert!(!x.is_over());
        x.flush().expect("flush");
        assert!(x.is_over());
        assert_eq!(received(&mut c)[2], json!({"return": []}));
    }
}
