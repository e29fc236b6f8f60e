//! The handshake as a state machine over bytes. Pure: what arrives goes in, what must be sent comes out.
//!
//! The caller sends what a step has put out before it makes the next one, so the output is bounded by the answer to one option.

use super::meta::{ALLOCATION_ID, names_allocation};
use super::option::{Asked, Queries, Wants, parse};
use crate::io::nbd::proto::{
    CONTEXT_ALLOCATION, EXPORT_NAME_ZEROES, ExportFlags, ExportSize, Greeting, HandshakeFlags, Info, Opt,
    OptionHeader, OptionReplyHeader, Rep,
};
use crate::limits::{NBD_OPTION_LEN_MAX, NBD_OPTION_SKIP_MAX, NBD_OPTIONS_MAX, NBD_PAYLOAD_MAX};

/// What a handshake needs to know of the exports.
pub(super) trait Directory {
    /// An export by its exact name.
    fn find(&self, name: &str) -> Option<ExportView>;
    /// Names and descriptions of all exports.
    fn list(&self) -> Vec<(String, String)>;
}

/// An export as it is told to a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ExportView {
    pub(super) description: String,
    /// Bytes.
    pub(super) size: u64,
    /// Without `SEND_DF`, which depends on the client.
    pub(super) flags: ExportFlags,
    /// Best request size in bytes, a power of two.
    pub(super) preferred: u32,
}

/// What was agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Session {
    pub(super) export: String,
    /// Replies are structured.
    pub(super) structured: bool,
    /// `base:allocation` is selected.
    pub(super) allocation: bool,
}

/// What follows a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Another step; if this one consumed nothing, more input first.
    Step,
    /// Transmission.
    Enter(Session),
    /// The end, after the output has been sent.
    Close,
}

/// The server's side of one handshake.
#[derive(Debug)]
pub(super) struct Handshake {
    state: State,
    no_zeroes: bool,
    structured: bool,
    /// The export for which `base:allocation` has been selected.
    allocation: Option<String>,
    options: usize,
}

#[derive(Clone, Copy, Debug)]
enum State {
    ClientFlags,
    Options,
    /// Data of an option that is too long; `left` bytes are still to come.
    Skip {
        option: Opt,
        left: usize,
    },
}

impl Handshake {
    /// A handshake at its start; puts the greeting out.
    pub(super) fn begin(out: &mut Vec<u8>) -> Self {
        out.extend(Greeting { flags: HandshakeFlags::all() }.encode());
        Self { state: State::ClientFlags, no_zeroes: false, structured: false, allocation: None, options: 0 }
    }

    /// Options that have been answered: a measure of progress.
    pub(super) fn progress(&self) -> usize {
        self.options
    }

    /// Looks at `input`, which begins where the last step stopped; appends what must be sent to `out`. Returns how many bytes were used.
    /// No step needs more than [`INPUT_MAX`] bytes at once.
    pub(super) fn step(&mut self, input: &[u8], exports: &dyn Directory, out: &mut Vec<u8>) -> (usize, Next) {
        match self.state {
            State::ClientFlags => self.client_flags(input),
            State::Options => self.option(input, exports, out),
            State::Skip { option, left } => {
                let n = left.min(input.len());
                if n < left {
                    self.state = State::Skip { option, left: left - n };
                } else {
                    self.state = State::Options;
                    refuse(out, option, Rep::ERR_TOO_BIG, "the option is too long");
                }
                (n, Next::Step)
            }
        }
    }

    fn client_flags(&mut self, input: &[u8]) -> (usize, Next) {
        let Some(bytes) = input.first_chunk::<4>() else { return (0, Next::Step) };
        let bits = u32::from_be_bytes(*bytes);
        let flags = u16::try_from(bits).ok().and_then(HandshakeFlags::from_bits);
        let Some(flags) = flags else { return (4, Next::Close) };
        self.no_zeroes = flags.contains(HandshakeFlags::NO_ZEROES);
        self.state = State::Options;
        // A client that did not say that it knows the fixed style is answered all the same, as the protocol allows.
        (4, Next::Step)
    }

    fn option(&mut self, input: &[u8], exports: &dyn Directory, out: &mut Vec<u8>) -> (usize, Next) {
        let Some(head) = input.first_chunk::<{ OptionHeader::LEN }>() else { return (0, Next::Step) };
        let Some(OptionHeader { option, len }) = OptionHeader::decode(head) else {
            return (OptionHeader::LEN, Next::Close);
        };
        if len > NBD_OPTION_SKIP_MAX || self.options >= NBD_OPTIONS_MAX {
            return (OptionHeader::LEN, Next::Close);
        }
        if len > NBD_OPTION_LEN_MAX {
            self.options += 1;
            self.state = State::Skip { option, left: len as usize };
            return (OptionHeader::LEN, Next::Step);
        }
        let end = OptionHeader::LEN + len as usize;
        let Some(data) = input.get(OptionHeader::LEN..end) else { return (0, Next::Step) };
        self.options += 1;
        (end, self.answer(option, data, exports, out))
    }

    fn answer(&mut self, option: Opt, data: &[u8], exports: &dyn Directory, out: &mut Vec<u8>) -> Next {
        let asked = match parse(option, data) {
            Ok(asked) => asked,
            // There is no way to tell.
            Err(_) if option == Opt::EXPORT_NAME => return Next::Close,
            Err(why) => {
                refuse(out, option, Rep::ERR_INVALID, why);
                return Next::Step;
            }
        };
        match asked {
            Asked::ExportName(name) => return self.export_name(name, exports, out),
            Asked::Abort => {
                reply(out, option, Rep::ACK, &[]);
                return Next::Close;
            }
            Asked::List => list(exports, out),
            Asked::StartTls => refuse(out, option, Rep::ERR_UNSUP, "there is no TLS here"),
            Asked::Info { name, go, wants } => return self.info(option, name, go, wants, exports, out),
            Asked::StructuredReply => {
                self.structured = true;
                reply(out, option, Rep::ACK, &[]);
            }
            Asked::Meta { name, set, queries } => self.meta(option, name, set, queries, exports, out),
            Asked::Unknown => refuse(out, option, Rep::ERR_UNSUP, "the option is not known"),
        }
        Next::Step
    }

    fn export_name(&self, name: &str, exports: &dyn Directory, out: &mut Vec<u8>) -> Next {
        let Some(view) = exports.find(name) else { return Next::Close };
        out.extend(self.size_of(&view).encode());
        if !self.no_zeroes {
            out.extend([0; EXPORT_NAME_ZEROES]);
        }
        Next::Enter(self.session(name))
    }

    fn info(
        &self,
        option: Opt,
        name: &str,
        go: bool,
        wants: Wants,
        exports: &dyn Directory,
        out: &mut Vec<u8>,
    ) -> Next {
        let Some(view) = exports.find(name) else {
            refuse(out, option, Rep::ERR_UNKNOWN, "there is no export of this name");
            return Next::Step;
        };
        info(out, option, Info::EXPORT, &self.size_of(&view).encode());
        if wants.name {
            info(out, option, Info::NAME, name.as_bytes());
        }
        if wants.description && !view.description.is_empty() {
            info(out, option, Info::DESCRIPTION, view.description.as_bytes());
        }
        let mut sizes = [0; 12];
        sizes[0..4].copy_from_slice(&1u32.to_be_bytes());
        sizes[4..8].copy_from_slice(&view.preferred.to_be_bytes());
        sizes[8..12].copy_from_slice(&NBD_PAYLOAD_MAX.to_be_bytes());
        info(out, option, Info::BLOCK_SIZE, &sizes);
        reply(out, option, Rep::ACK, &[]);
        if go { Next::Enter(self.session(name)) } else { Next::Step }
    }

    fn meta(
        &mut self,
        option: Opt,
        name: &str,
        set: bool,
        mut queries: Queries<'_>,
        exports: &dyn Directory,
        out: &mut Vec<u8>,
    ) {
        if set {
            // Whatever comes of it, the former selection is gone.
            self.allocation = None;
        }
        if !self.structured {
            return refuse(out, option, Rep::ERR_INVALID, "structured replies must be negotiated first");
        }
        if exports.find(name).is_none() {
            return refuse(out, option, Rep::ERR_UNKNOWN, "there is no export of this name");
        }
        let all = !set && queries.is_empty();
        if all || queries.any(|q| names_allocation(q, !set)) {
            let mut data = if set { ALLOCATION_ID } else { 0 }.to_be_bytes().to_vec();
            data.extend(CONTEXT_ALLOCATION.as_bytes());
            reply(out, option, Rep::META_CONTEXT, &data);
            if set {
                self.allocation = Some(name.to_owned());
            }
        }
        reply(out, option, Rep::ACK, &[]);
    }

    fn size_of(&self, view: &ExportView) -> ExportSize {
        let mut flags = view.flags;
        flags.set(ExportFlags::SEND_DF, self.structured);
        ExportSize { size: view.size, flags }
    }

    fn session(&self, name: &str) -> Session {
        let allocation = self.structured && self.allocation.as_deref() == Some(name);
        Session { export: name.to_owned(), structured: self.structured, allocation }
    }
}

fn list(exports: &dyn Directory, out: &mut Vec<u8>) {
    for (name, description) in exports.list() {
        let mut data = len_u32(name.len()).to_be_bytes().to_vec();
        data.extend(name.as_bytes());
        data.extend(description.as_bytes());
        reply(out, Opt::LIST, Rep::SERVER, &data);
    }
    reply(out, Opt::LIST, Rep::ACK, &[]);
}

fn info(out: &mut Vec<u8>, option: Opt, kind: Info, payload: &[u8]) {
    let mut data = kind.0.to_be_bytes().to_vec();
    data.extend(payload);
    reply(out, option, Rep::INFO, &data);
}

fn refuse(out: &mut Vec<u8>, option: Opt, error: Rep, why: &str) {
    reply(out, option, error, why.as_bytes());
}

fn reply(out: &mut Vec<u8>, option: Opt, reply: Rep, data: &[u8]) {
    out.extend(OptionReplyHeader { option, reply, len: len_u32(data.len()) }.encode());
    out.extend(data);
}

/// Lengths of strings of ours, all far below 4 GiB.
fn len_u32(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

/// Bytes of input that a step may have to see at once.
pub(super) const INPUT_MAX: usize = OptionHeader::LEN + NBD_OPTION_LEN_MAX as usize;

/// Feeds `data` to a handshake in pieces of varying length, as a socket would, and checks the bounds. Returns the length of the output.
pub fn fuzz(data: &[u8]) -> usize {
    struct One;
    impl Directory for One {
        fn find(&self, name: &str) -> Option<ExportView> {
            let view = ExportView {
                description: "d".to_owned(),
                size: 1 << 20,
                flags: ExportFlags::HAS_FLAGS,
                preferred: 4096,
            };
            (name == "a" || name.is_empty()).then_some(view)
        }

        fn list(&self) -> Vec<(String, String)> {
            vec![(String::new(), "d".to_owned()), ("a".to_owned(), "d".to_owned())]
        }
    }
    let mut out = Vec::new();
    let mut handshake = Handshake::begin(&mut out);
    let mut sent = out.len();
    let (mut from, mut to) = (0, 0);
    while to < data.len() {
        // One to eight bytes more, taken from the data itself so that a run can be repeated.
        to = (to + 1 + usize::from(data[to] & 7)).min(data.len());
        loop {
            out.clear();
            let (used, next) = handshake.step(&data[from..to], &One, &mut out);
            assert!(used <= to - from, "more used than there is");
            assert!(out.len() <= 1024, "an answer of {} bytes", out.len());
            sent += out.len();
            from += used;
            match next {
                Next::Step if used > 0 => {}
                Next::Step => break,
                Next::Enter(_) | Next::Close => return sent,
            }
        }
        assert!(to - from < INPUT_MAX, "a step wants more than its bound");
    }
    sent
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    struct Disks(Vec<(&'static str, &'static str)>);

    impl Directory for Disks {
        fn find(&self, name: &str) -> Option<ExportView> {
            let (_, description) = self.0.iter().find(|(n, _)| *n == name)?;
            let flags = ExportFlags::HAS_FLAGS | ExportFlags::SEND_FLUSH;
            Some(ExportView { description: (*description).to_owned(), size: 5000, flags, preferred: 4096 })
        }

        fn list(&self) -> Vec<(String, String)> {
            self.0.iter().map(|(n, d)| ((*n).to_owned(), (*d).to_owned())).collect()
        }
    }

    type Reply = (Opt, Rep, Vec<u8>);

    /// A handshake past the client's flags, and the exports it sees.
    struct Fixture {
        handshake: Handshake,
        exports: Disks,
    }

    impl Fixture {
        fn new(flags: u32) -> Self {
            let exports = Disks(vec![("a", "first"), ("b", "")]);
            let mut out = Vec::new();
            let mut handshake = Handshake::begin(&mut out);
            assert_eq!(out.len(), Greeting::LEN);
            assert_eq!(handshake.step(&flags.to_be_bytes(), &exports, &mut out), (4, Next::Step));
            Self { handshake, exports }
        }

        fn raw(&mut self, input: &[u8]) -> (Next, Vec<u8>) {
            let mut out = Vec::new();
            let (used, next) = self.handshake.step(input, &self.exports, &mut out);
            assert_eq!(used, input.len());
            (next, out)
        }

        fn ask(&mut self, option: Opt, data: &[u8]) -> (Next, Vec<Reply>) {
            let (next, out) = self.raw(&message(option, data));
            (next, replies(&out))
        }
    }

    fn message(option: Opt, data: &[u8]) -> Vec<u8> {
        let mut m = OptionHeader { option, len: len_u32(data.len()) }.encode().to_vec();
        m.extend(data);
        m
    }

    fn replies(mut out: &[u8]) -> Vec<Reply> {
        let mut all = Vec::new();
        while let Some((head, rest)) = out.split_first_chunk::<{ OptionReplyHeader::LEN }>() {
            let h = OptionReplyHeader::decode(head).expect("a reply");
            let (data, rest) = rest.split_at(h.len as usize);
            all.push((h.option, h.reply, data.to_vec()));
            out = rest;
        }
        assert!(out.is_empty());
        all
    }

    fn counted(text: &str) -> Vec<u8> {
        let mut v = len_u32(text.len()).to_be_bytes().to_vec();
        v.extend(text.as_bytes());
        v
    }

    fn info_data(name: &str, wants: &[Info]) -> Vec<u8> {
        let mut v = counted(name);
        v.extend(u16::try_from(wants.len()).expect("few").to_be_bytes());
        v.extend(wants.iter().flat_map(|w| w.0.to_be_bytes()));
        v
    }

    fn meta_data(name: &str, queries: &[&str]) -> Vec<u8> {
        let mut v = counted(name);
        v.extend(len_u32(queries.len()).to_be_bytes());
        queries.iter().for_each(|q| v.extend(counted(q)));
        v
    }

    fn kinds(replies: &[Reply]) -> Vec<Rep> {
        replies.iter().map(|r| r.1).collect()
    }

    #[test]
    fn unknown_client_flags_close_the_connection() {
        for flags in [4u32, 1 << 16, u32::MAX] {
            let mut h = Handshake::begin(&mut Vec::new());
            let (_, next) = h.step(&flags.to_be_bytes(), &Disks(vec![]), &mut Vec::new());
            assert_eq!(next, Next::Close, "{flags:#x}");
        }
    }

    #[test]
    fn a_wrong_option_magic_closes_the_connection() {
        let mut f = Fixture::new(3);
        assert_eq!(f.raw(&[7; OptionHeader::LEN]).0, Next::Close);
    }

    #[test]
    fn list_names_every_export_with_its_description() {
        let mut f = Fixture::new(3);
        let (next, got) = f.ask(Opt::LIST, b"");
        assert_eq!(next, Next::Step);
        assert_eq!(
            got,
            [
                (Opt::LIST, Rep::SERVER, b"\0\0\0\x01afirst".to_vec()),
                (Opt::LIST, Rep::SERVER, b"\0\0\0\x01b".to_vec()),
                (Opt::LIST, Rep::ACK, vec![]),
            ]
        );
    }

    #[test]
    fn info_tells_what_was_asked_and_stays_in_the_handshake_but_go_enters() {
        let mut f = Fixture::new(3);
        let data = info_data("a", &[Info::NAME, Info::DESCRIPTION, Info::BLOCK_SIZE, Info(77)]);
        let (next, got) = f.ask(Opt::INFO, &data);
        assert_eq!(next, Next::Step);
        assert_eq!(kinds(&got), [Rep::INFO, Rep::INFO, Rep::INFO, Rep::INFO, Rep::ACK]);
        assert_eq!(got[0].2, b"\0\0\0\0\0\0\0\0\x13\x88\0\x05");
        assert_eq!(got[1].2, b"\0\x01a");
        assert_eq!(got[2].2, b"\0\x02first");
        assert_eq!(got[3].2, b"\0\x03\0\0\0\x01\0\0\x10\0\x02\0\0\0");
        let (next, got) = f.ask(Opt::GO, &info_data("b", &[]));
        assert_eq!(kinds(&got), [Rep::INFO, Rep::INFO, Rep::ACK]);
        assert_eq!(
            next,
            Next::Enter(Session { export: "b".to_owned(), structured: false, allocation: false })
        );
    }

    #[test]
    fn an_unknown_export_is_refused_and_the_client_can_go_on() {
        let mut f = Fixture::new(3);
        for option in [Opt::INFO, Opt::GO] {
            let (next, got) = f.ask(option, &info_data("c", &[]));
            assert_eq!((next, kinds(&got)), (Next::Step, vec![Rep::ERR_UNKNOWN]));
        }
        assert_eq!(f.ask(Opt::EXPORT_NAME, b"c"), (Next::Close, vec![]));
    }

    #[test]
    fn export_name_is_followed_by_zeroes_unless_both_sides_do_without() {
        for (flags, len) in [(3, 10), (1, 134), (0, 134)] {
            let mut f = Fixture::new(flags);
            let (next, out) = f.raw(&message(Opt::EXPORT_NAME, b"a"));
            assert!(matches!(next, Next::Enter(s) if s.export == "a"));
            assert_eq!(out.len(), len);
            assert!(out[10..].iter().all(|b| *b == 0));
        }
    }

    #[test]
    fn abort_is_acknowledged_and_ends_the_session() {
        let (next, got) = Fixture::new(3).ask(Opt::ABORT, b"");
        assert_eq!((next, kinds(&got)), (Next::Close, vec![Rep::ACK]));
    }

    #[test]
    fn tls_and_unknown_options_are_refused_without_ending_the_session() {
        let mut f = Fixture::new(3);
        for (option, data, error) in [
            (Opt::STARTTLS, &b""[..], Rep::ERR_UNSUP),
            (Opt::STARTTLS, b"x", Rep::ERR_INVALID),
            (Opt(4), b"", Rep::ERR_UNSUP),
            (Opt(99), b"data", Rep::ERR_UNSUP),
            (Opt::LIST, b"x", Rep::ERR_INVALID),
            (Opt::STRUCTURED_REPLY, b"x", Rep::ERR_INVALID),
            (Opt::GO, b"x", Rep::ERR_INVALID),
        ] {
            let (next, got) = f.ask(option, data);
            assert_eq!((next, kinds(&got)), (Next::Step, vec![error]), "{option:?}");
            assert_eq!(got[0].0, option);
        }
    }

    #[test]
    fn df_is_offered_only_with_structured_replies() {
        let mut f = Fixture::new(3);
        let (_, before) = f.ask(Opt::INFO, &info_data("a", &[]));
        assert_eq!(before[0].2[11] & 0x80, 0);
        assert_eq!(kinds(&f.ask(Opt::STRUCTURED_REPLY, b"").1), [Rep::ACK]);
        let (_, after) = f.ask(Opt::INFO, &info_data("a", &[]));
        assert_eq!(after[0].2[11] & 0x80, 0x80);
    }

    #[test]
    fn contexts_need_structured_replies_and_an_export() {
        let mut f = Fixture::new(3);
        let (_, got) = f.ask(Opt::SET_META_CONTEXT, &meta_data("a", &["base:allocation"]));
        assert_eq!(kinds(&got), [Rep::ERR_INVALID]);
        f.ask(Opt::STRUCTURED_REPLY, b"");
        let (_, got) = f.ask(Opt::LIST_META_CONTEXT, &meta_data("c", &[]));
        assert_eq!(kinds(&got), [Rep::ERR_UNKNOWN]);
        for queries in [&[][..], &["base:"], &[""], &["x:y", "base:allocation", "base:"]] {
            let (_, got) = f.ask(Opt::LIST_META_CONTEXT, &meta_data("a", queries));
            assert_eq!(kinds(&got), [Rep::META_CONTEXT, Rep::ACK], "{queries:?}");
            assert_eq!(&got[0].2[4..], CONTEXT_ALLOCATION.as_bytes());
        }
        let (_, got) = f.ask(Opt::LIST_META_CONTEXT, &meta_data("a", &["x:y"]));
        assert_eq!(kinds(&got), [Rep::ACK]);
    }

    #[test]
    fn a_selected_context_holds_for_its_export_until_the_next_selection() {
        let select =
            |f: &mut Fixture, queries: &[&str]| f.ask(Opt::SET_META_CONTEXT, &meta_data("a", queries)).1;
        let enter = |f: &mut Fixture, name: &str| match f.ask(Opt::GO, &info_data(name, &[])).0 {
            Next::Enter(session) => session.allocation,
            other => panic!("{other:?}"),
        };
        let mut f = Fixture::new(3);
        f.ask(Opt::STRUCTURED_REPLY, b"");
        assert_eq!(kinds(&select(&mut f, &["base:allocation"])), [Rep::META_CONTEXT, Rep::ACK]);
        assert!(enter(&mut f, "a"));
        assert!(!enter(&mut f, "b"));
        assert_eq!(kinds(&select(&mut f, &[])), [Rep::ACK]);
        assert!(!enter(&mut f, "a"));
        select(&mut f, &["base:allocation"]);
        let (_, got) = f.ask(Opt::SET_META_CONTEXT, &meta_data("c", &["base:allocation"]));
        assert_eq!(kinds(&got), [Rep::ERR_UNKNOWN]);
        assert!(!enter(&mut f, "a"));
    }

    #[test]
    fn a_long_option_is_skipped_and_answered_and_a_huge_one_closes() {
        let mut f = Fixture::new(3);
        let head = OptionHeader { option: Opt::LIST, len: NBD_OPTION_LEN_MAX + 1 };
        assert_eq!(f.raw(&head.encode()), (Next::Step, vec![]));
        assert_eq!(f.raw(&vec![0; NBD_OPTION_LEN_MAX as usize]), (Next::Step, vec![]));
        let (next, out) = f.raw(&[0]);
        assert_eq!((next, kinds(&replies(&out))), (Next::Step, vec![Rep::ERR_TOO_BIG]));
        let head = OptionHeader { option: Opt::LIST, len: NBD_OPTION_SKIP_MAX + 1 };
        assert_eq!(f.raw(&head.encode()).0, Next::Close);
    }

    #[test]
    fn a_handshake_has_a_bounded_number_of_options() {
        let mut f = Fixture::new(3);
        for _ in 0..NBD_OPTIONS_MAX {
            assert_eq!(f.ask(Opt(99), b"").0, Next::Step);
        }
        assert_eq!(f.raw(&OptionHeader { option: Opt(99), len: 0 }.encode()).0, Next::Close);
    }

    #[test]
    fn input_in_single_bytes_gives_the_same_answers() {
        let mut stream = message(Opt::STRUCTURED_REPLY, b"");
        stream.extend(message(Opt::SET_META_CONTEXT, &meta_data("a", &["base:allocation"])));
        stream.extend(message(Opt::GO, &info_data("a", &[])));
        let mut f = Fixture::new(3);
        let (mut from, mut out, mut end) = (0, Vec::new(), None);
        for to in 1..=stream.len() {
            let (used, next) = f.handshake.step(&stream[from..to], &f.exports, &mut out);
            from += used;
            if let Next::Enter(session) = next {
                end = Some((to, session));
            }
        }
        let session = Session { export: "a".to_owned(), structured: true, allocation: true };
        assert_eq!(end, Some((stream.len(), session)));
        assert_eq!(
            kinds(&replies(&out)),
            [Rep::ACK, Rep::META_CONTEXT, Rep::ACK, Rep::INFO, Rep::INFO, Rep::ACK]
        );
    }

    /// Mostly valid options with a damaged byte here and there, so that the parsers behind the header are reached.
    fn almost_valid() -> impl Strategy<Value = Vec<u8>> {
        let option = prop_oneof![
            Just(message(Opt::LIST, b"")),
            Just(message(Opt::STRUCTURED_REPLY, b"")),
            Just(message(Opt::INFO, &info_data("a", &[Info::NAME]))),
            Just(message(Opt::LIST_META_CONTEXT, &meta_data("a", &["base:", "x"]))),
            Just(message(Opt::SET_META_CONTEXT, &meta_data("", &["base:allocation"]))),
            (any::<u32>(), proptest::collection::vec(any::<u8>(), 0..64))
                .prop_map(|(o, d)| message(Opt(o), &d)),
        ];
        let options = proptest::collection::vec(option, 0..6);
        (options, proptest::collection::vec((any::<u16>(), any::<u8>()), 0..3)).prop_map(|(o, damage)| {
            let mut v = 3u32.to_be_bytes().to_vec();
            v.extend(o.concat());
            for (at, byte) in damage {
                let len = v.len();
                v[usize::from(at) % len] = byte;
            }
            v
        })
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived_within_bounds(data in proptest::collection::vec(any::<u8>(), 0..300)) {
            fuzz(&data);
        }

        #[test]
        fn damaged_options_are_survived_within_bounds(data in almost_valid()) {
            prop_assert!(fuzz(&data) >= Greeting::LEN);
        }
    }
}
