//! The text of QMP: bytes to messages, messages to requests, answers to bytes. Pure functions, no sockets.
//!
//! A message is one JSON value. It ends where its brackets close, so several may share a line and the last needs no newline; a value that is not an
//! object or list ends with its line. A message may go on over several lines only if its first line ends in an opening bracket or a comma (text that
//! was printed for people). Any other line that is not complete is an error at its end, so one mistake never swallows the commands after it.

use crate::error::Error;
use serde_json::{Map, Value, json};

/// Longest message, in bytes.
pub(super) const MESSAGE_LEN_MAX: usize = 1 << 20;

/// Cuts a stream of bytes into messages. Memory is bounded by [`MESSAGE_LEN_MAX`] and the size of the pieces that are fed.
#[derive(Debug, Default)]
pub(super) struct Framer {
    bytes: Vec<u8>,
    /// Where the value under way begins; what lies before it goes with the next call of `feed`.
    start: usize,
    /// Everything before this has been looked at.
    seen: usize,
    depth: usize,
    in_string: bool,
    escaped: bool,
    /// The value under way began with something else than a bracket.
    bare: bool,
    /// The value under way may go on in the next line.
    goes_on: bool,
    /// Last byte of the value under way that is not blank.
    last: u8,
    /// Dropping the rest of a line that was too long.
    skipping: bool,
}

/// One piece of the stream.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// The text of a message, complete or found to be incomplete.
    Message(Vec<u8>),
    /// A message longer than [`MESSAGE_LEN_MAX`]; the rest of its line is dropped.
    TooLong,
}

impl Framer {
    /// Adds bytes. Call [`Framer::next`] until it is empty before the next ones, or memory grows.
    pub(super) fn feed(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.start);
        self.seen -= self.start;
        self.start = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// Whether everything fed has been looked at.
    pub(super) fn is_idle(&self) -> bool {
        self.seen == self.bytes.len()
    }

    /// The next message, if one is complete.
    pub(super) fn next(&mut self) -> Option<Frame> {
        while self.seen < self.bytes.len() {
            let byte = self.bytes[self.seen];
            self.seen += 1;
            if self.skipping {
                self.skipping = byte != b'\n';
                self.start = self.seen;
                continue;
            }
            if self.step(byte) {
                let text = self.bytes[self.start..self.seen].to_vec();
                self.restart();
                return Some(Frame::Message(text));
            }
            if self.seen - self.start > MESSAGE_LEN_MAX {
                self.restart();
                self.skipping = byte != b'\n';
                return Some(Frame::TooLong);
            }
        }
        None
    }

    /// Looks at one byte; returns whether a message ends with it.
    fn step(&mut self, byte: u8) -> bool {
        let first = self.seen - self.start == 1;
        if first && byte.is_ascii_whitespace() {
            self.start = self.seen;
            return false;
        }
        if byte == b'\n' {
            self.goes_on |= !self.in_string && matches!(self.last, b'{' | b'[' | b',');
            // A string never contains a newline.
            return self.bare || self.in_string || !self.goes_on;
        }
        if self.in_string {
            match (self.escaped, byte) {
                (true, _) => self.escaped = false,
                (false, b'\\') => self.escaped = true,
                (false, b'"') => self.in_string = false,
                _ => {}
            }
            self.last = byte;
            return false;
        }
        if byte.is_ascii_whitespace() {
            return false;
        }
        self.bare |= first && !matches!(byte, b'{' | b'[');
        self.last = byte;
        if self.bare {
            return false;
        }
        match byte {
            b'"' => self.in_string = true,
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => {
                // The value began with an opening bracket, so the depth is at least 1.
                self.depth = self.depth.saturating_sub(1);
                return self.depth == 0;
            }
            _ => {}
        }
        false
    }

    /// Starts a new value after what has been looked at.
    fn restart(&mut self) {
        let (bytes, seen) = (std::mem::take(&mut self.bytes), self.seen);
        *self = Self { bytes, start: seen, seen, ..Self::default() };
    }
}

/// A command as it came.
#[derive(Debug, PartialEq)]
pub(super) struct Request {
    /// Echoed in the answer.
    pub(super) id: Option<Value>,
    pub(super) name: String,
    pub(super) arguments: Map<String, Value>,
}

/// Why a command was not carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    /// QEMU's class of the error.
    pub(super) class: &'static str,
    /// A sentence for a person.
    pub(super) text: String,
}

impl Failure {
    /// Nothing finer to say.
    pub(super) const GENERIC: &'static str = "GenericError";
    /// There is no such command now.
    pub(super) const NO_COMMAND: &'static str = "CommandNotFound";
    /// There is no such object.
    pub(super) const NO_DEVICE: &'static str = "DeviceNotFound";
    /// There is no such job.
    pub(super) const NOT_ACTIVE: &'static str = "DeviceNotActive";

    /// An error of this class.
    pub(super) fn new(class: &'static str, text: impl Into<String>) -> Self {
        Self { class, text: text.into() }
    }

    /// An error without a class of its own.
    pub(super) fn generic(text: impl Into<String>) -> Self {
        Self::new(Self::GENERIC, text)
    }
}

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        Self::generic(e.full_text())
    }
}

/// Reads a message. An error comes with the id to be echoed, if there is one.
pub(super) fn read_request(text: &[u8]) -> Result<Request, (Option<Value>, Failure)> {
    let value: Value = serde_json::from_slice(text)
        .map_err(|e| (None, Failure::generic(format!("the message is not valid JSON: {e}"))))?;
    let Value::Object(mut map) = value else {
        return Err((None, Failure::generic("a command is a JSON object")));
    };
    let id = map.remove("id");
    let fail = |text: String| Err((id.clone(), Failure::generic(text)));
    let name = match map.remove("execute") {
        Some(Value::String(name)) => name,
        Some(_) => return fail("'execute' must be the name of a command".into()),
        None => return fail("the message lacks the member 'execute'".into()),
    };
    let arguments = match map.remove("arguments") {
        Some(Value::Object(arguments)) => arguments,
        None => Map::new(),
        Some(_) => return fail("'arguments' must be an object".into()),
    };
    match map.keys().next() {
        Some(key) => fail(format!("unknown member '{}' of a command", key.escape_debug())),
        None => Ok(Request { id, name, arguments }),
    }
}

/// The answer to a command.
pub(super) fn answer(id: Option<Value>, result: Result<Value, Failure>) -> Value {
    let mut answer = match result {
        Ok(value) => json!({ "return": value }),
        Err(e) => json!({ "error": { "class": e.class, "desc": e.text } }),
    };
    if let (Some(id), Some(fields)) = (id, answer.as_object_mut()) {
        fields.insert("id".to_owned(), id);
    }
    answer
}

/// A value as it goes over the wire.
pub(super) fn line(value: &Value, pretty: bool) -> Vec<u8> {
    let text = if pretty { serde_json::to_vec_pretty(value) } else { serde_json::to_vec(value) };
    // A value that is in memory has text keys and finite numbers: it can always be written.
    let mut text = text.unwrap_or_default();
    text.extend_from_slice(b"\r\n");
    text
}

/// What a client is greeted with.
pub(super) fn greeting() -> Value {
    json!({ "QMP": { "version": version(), "capabilities": [] } })
}

/// Our version, where QEMU's clients look for one.
pub(super) fn version() -> Value {
    let number = |text: &str| text.parse::<u64>().unwrap_or(0);
    json!({
        "qemu": {
            "major": number(env!("CARGO_PKG_VERSION_MAJOR")),
            "minor": number(env!("CARGO_PKG_VERSION_MINOR")),
            "micro": number(env!("CARGO_PKG_VERSION_PATCH")),
        },
        "package": concat!("cobweb ", env!("CARGO_PKG_VERSION")),
    })
}

/// Entry point for fuzzing: any bytes in pieces of any size; no panic, and the same messages however the bytes are cut.
pub fn fuzz(bytes: &[u8]) {
    let all = |piece: usize| {
        let mut framer = Framer::default();
        let mut frames = Vec::new();
        for part in bytes.chunks(piece) {
            framer.feed(part);
            frames.extend(std::iter::from_fn(|| framer.next()));
        }
        frames
    };
    let whole = all(bytes.len().max(1));
    assert_eq!(whole, all(1), "messages depend on how the stream was cut");
    for frame in whole {
        let Frame::Message(text) = frame else { continue };
        let result = match read_request(&text) {
            Ok(request) => answer(request.id, Ok(Value::Object(request.arguments))),
            Err((id, e)) => answer(id, Err(e)),
        };
        assert!(line(&result, false).len() <= 16 * text.len() + 1024);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frames(text: &str) -> Vec<String> {
        let mut framer = Framer::default();
        framer.feed(text.as_bytes());
        std::iter::from_fn(|| framer.next())
            .map(|f| match f {
                Frame::Message(m) => String::from_utf8_lossy(&m).trim().to_owned(),
                Frame::TooLong => "TOO LONG".to_owned(),
            })
            .collect()
    }

    #[test]
    fn messages_end_where_their_brackets_close() {
        assert_eq!(frames(r#"{"a":1}{"b":[{}]}  {"c""#), [r#"{"a":1}"#, r#"{"b":[{}]}"#]);
        assert_eq!(frames("\n \r\n{\"a\":\"}\\\"{\"}\r\n"), [r#"{"a":"}\"{"}"#]);
        assert_eq!(frames("[1,{}]{}"), ["[1,{}]", "{}"]);
        assert_eq!(frames(r#"{"a":1"#), [""; 0]);
    }

    #[test]
    fn a_broken_line_does_not_swallow_the_next() {
        let good = r#"{"execute":"quit"}"#;
        for bad in ["hello", "true", r#"{"execute":"#, r#"{"execute": "qu"#, r#"{"a": 1 "#, "}", r#"{"a":"\"#]
        {
            assert_eq!(frames(&format!("{bad}\n{good}\n")), [bad.trim(), good], "{bad}");
        }
        // Several closing brackets are one broken line each time they are met on their own.
        assert_eq!(frames(&format!("{{}}}}\n{good}")), ["{}", "}", good]);
    }

    #[test]
    fn text_that_was_printed_for_people_is_one_message() {
        let value = json!({"execute": "blockdev-add", "arguments": {"driver": "null-co", "list": [1, 2]}});
        let text = serde_json::to_string_pretty(&value).expect("printed");
        assert!(text.lines().count() > 4, "it is spread over lines");
        let all = frames(&format!("{text}\n{{}}\n"));
        assert_eq!(all, [text.as_str(), "{}"]);
    }

    #[test]
    fn a_message_without_end_is_dropped_and_the_next_line_works() {
        let mut framer = Framer::default();
        let piece = [b'['; 64 << 10];
        let mut found = Vec::new();
        for _ in 0..40 {
            framer.feed(&piece);
            found.extend(std::iter::from_fn(|| framer.next()));
            assert!(framer.bytes.len() <= MESSAGE_LEN_MAX + piece.len());
        }
        assert_eq!(found, [Frame::TooLong]);
        framer.feed(b"]]]\n{}");
        assert_eq!(framer.next(), Some(Frame::Message(b"{}".to_vec())));
    }

    #[test]
    fn what_is_wrong_with_a_command_is_said_and_its_id_echoed() {
        for (text, part, id) in [
            ("{", "not valid JSON", None),
            ("[]", "a JSON object", None),
            (r#"{"id": 7}"#, "'execute'", Some(json!(7))),
            (r#"{"execute": 5, "id": {"a": 1}}"#, "'execute'", Some(json!({"a": 1}))),
            (r#"{"execute": "x", "arguments": []}"#, "'arguments'", None),
            (r#"{"execute": "x", "argument": {}, "id": null}"#, "'argument'", Some(Value::Null)),
            ("{\"execute\": \"\u{1}", "not valid JSON", None),
        ] {
            let (found, e) = read_request(text.as_bytes()).expect_err(text);
            assert!(e.text.contains(part), "{text}: {}", e.text);
            assert_eq!(found, id, "{text}");
            assert_eq!(e.class, "GenericError");
        }
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(read_request(deep.as_bytes()).is_err());
    }

    #[test]
    fn an_answer_carries_the_id_of_its_command() {
        let r = read_request(br#"{"execute":"x","id":"a","arguments":{"b":1}}"#).expect("a command");
        assert_eq!((r.name.as_str(), &r.arguments["b"]), ("x", &json!(1)));
        let text = line(&answer(r.id, Ok(json!({}))), false);
        assert_eq!(text, b"{\"return\":{},\"id\":\"a\"}\r\n");
        let e = answer(None, Err(Failure::new(Failure::NO_COMMAND, "no")));
        assert_eq!(e, json!({"error": {"class": "CommandNotFound", "desc": "no"}}));
    }

    proptest! {
        #[test]
        fn no_stream_breaks_the_parser(bytes in proptest::collection::vec(
            prop_oneof![Just(b'{'), Just(b'}'), Just(b'"'), Just(b'\\'), Just(b'\n'), Just(b','), any::<u8>()], 0..200)) {
            fuzz(&bytes);
        }
    }
}
