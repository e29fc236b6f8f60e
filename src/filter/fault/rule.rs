//! Fault rules: what they match, when they fire, what happens then. Pure; randomness is handed in.

use crate::error::{Code, Error, IoError, Result};
use crate::options::Options;
use crate::request::Op;
use crate::units::ByteRange;
use serde_json::{Map, Value};
use std::time::Duration;

/// What a rule can be about: the operations of a request, block status, and a change of the length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultOp {
    /// A request.
    Request(Op),
    /// A question about block status.
    BlockStatus,
    /// A change of the length; its range is what comes or goes.
    Resize,
}

/// What is to happen to one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Wait this long first.
    pub delay: Duration,
    /// Then do this.
    pub then: Then,
}

/// The end of a [`Verdict`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// Carry it out.
    Pass,
    /// Fail; nothing is carried out.
    Fail(IoError),
    /// Wait until released.
    Hang,
    /// Carry out this many bytes, then fail, or carry out the rest as a second transfer.
    Short {
        /// Bytes of the first transfer, fewer than the request has; 0 for none.
        first: u64,
        /// The error after it.
        error: Option<IoError>,
    },
}

/// A rule with its counters.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// Place of its `op` in [`OPS`].
    op: usize,
    /// The operations it is about, as bits of [`FaultOp::bit`]; `any` without those that its action or range rules out.
    ops: u8,
    range: ByteRange,
    skip: u64,
    count: u64,
    probability: f64,
    action: Action,
    errno: i32,
    delay: Duration,
    short_bytes: u64,
    matched: u64,
    fired: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Error,
    Delay,
    Hang,
    Short,
}

/// A list of rules; see the module of the filter for how they are walked.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rules(Vec<Rule>);

impl FaultOp {
    const fn bit(self) -> u8 {
        match self {
            FaultOp::Request(Op::Read) => 1,
            FaultOp::Request(Op::Write) => 2,
            FaultOp::Request(Op::WriteZeroes) => 4,
            FaultOp::Request(Op::Discard) => 8,
            FaultOp::Request(Op::Flush) => 16,
            FaultOp::BlockStatus => 32,
            FaultOp::Resize => 64,
        }
    }
}

impl Rules {
    /// Reads the option `rules`: a list of objects. `path` is its key in messages.
    pub fn from_value(value: Value, path: &str) -> Result<Self> {
        let list = match value {
            Value::Array(list) => list,
            Value::String(text) if text.is_empty() => Vec::new(),
            _ => return Err(Error::invalid(format!("option '{path}' is not a list of rules"))),
        };
        if list.len() > RULES_MAX {
            return Err(Error::invalid(format!("option '{path}' has more than {RULES_MAX} rules")));
        }
        let rule = |(n, value): (usize, &Value)| {
            Options::from_json(value)
                .and_then(Rule::take)
                .map_err(|e| Error::invalid(format!("in '{path}.{n}': {e}")))
        };
        list.iter().enumerate().map(rule).collect::<Result<Vec<_>>>().map(Self)
    }

    /// Reads the text of a live `rules`: a JSON list, or option text with `rules` in it. Empty clears.
    pub fn parse(text: &str) -> Result<Self> {
        let text = text.trim();
        let mut options = match text.starts_with('[') {
            true => Options::parse(&format!("{{\"rules\": {text}}}"))?,
            false => Options::parse(text)?,
        };
        let rules = options.take_value("rules");
        options.finish()?;
        rules.map_or_else(|| Ok(Self::default()), |value| Self::from_value(value, "rules"))
    }

    /// The rules as they were given, defaults left out.
    pub fn to_json(&self) -> Value {
        Value::Array(self.0.iter().map(Rule::to_json).collect())
    }

    /// Per rule: requests that matched (until it was spent), and how often it fired.
    pub fn hits(&self) -> Value {
        let hits = |r: &Rule| {
            Value::Object(Map::from_iter([
                ("matched".to_owned(), r.matched.into()),
                ("fired".to_owned(), r.fired.into()),
            ]))
        };
        Value::Array(self.0.iter().map(hits).collect())
    }

    /// Whether a rule is about this request. Counts nothing.
    pub fn concern(&self, op: FaultOp, range: ByteRange) -> bool {
        self.0.iter().any(|r| !r.is_spent() && r.matches(op, range))
    }

    /// What is to happen to a request; counts it. `draw` gives a random number.
    ///
    /// The rules are walked in order. A rule that fires ends the walk, except a delay: its time is added and the walk goes on.
    pub fn decide(&mut self, op: FaultOp, range: ByteRange, mut draw: impl FnMut() -> u64) -> Verdict {
        let mut delay = Duration::ZERO;
        for rule in &mut self.0 {
            if !rule.fires(op, range, &mut draw) {
                continue;
            }
            delay = delay.saturating_add(rule.delay);
            let then = match rule.action {
                Action::Delay => continue,
                Action::Error => Then::Fail(rule.error()),
                Action::Hang => Then::Hang,
                Action::Short => Then::Short {
                    first: rule.first_part(range.len),
                    error: (rule.errno != 0).then(|| rule.error()),
                },
            };
            return Verdict { delay, then };
        }
        Verdict { delay, then: Then::Pass }
    }
}

impl Rule {
    fn take(mut options: Options) -> Result<Self> {
        let op = options.require_enum("op", &OPS.map(|(name, _)| name))?;
        let action = options.require_enum("action", &ACTIONS.map(|(name, _)| name))?;
        let (mut ops, action) = (OPS[op].1, ACTIONS[action].1);
        let offset = options.take_size("offset")?.unwrap_or(0);
        let length = options.take_size("length")?.unwrap_or(0);
        let skip = options.take_u64("skip")?.unwrap_or(0);
        let count = options.take_u64("count")?.unwrap_or(0);
        let probability = options.take_f64("probability")?.unwrap_or(1.0);
        let errno = options.take_value("errno").map(|v| read_errno(&v)).transpose()?;
        let delay_ms = options.take_u64_in("delay-ms", 0..=DELAY_MS_MAX)?;
        let short_bytes = options.take_size("short-bytes")?;
        options.finish()?;
        let refuse = |text: &str| Err(Error::invalid(text));
        if !(0.0..=1.0).contains(&probability) {
            return refuse("option 'probability' is not between 0 and 1");
        }
        let whole = offset == 0 && length == 0;
        if !whole && ops == FaultOp::Request(Op::Flush).bit() {
            return refuse("options 'offset' and 'length' do not go with 'op' flush: a flush has no range");
        }
        if errno.is_some() && !matches!(action, Action::Error | Action::Short) {
            return refuse("option 'errno' goes with 'action' error or short only");
        }
        if short_bytes.is_some() && action != Action::Short {
            return refuse("option 'short-bytes' goes with 'action' short only");
        }
        if action == Action::Delay && delay_ms.is_none() {
            return refuse("missing required option 'delay-ms' (of 'action' delay)");
        }
        if action == Action::Short {
            ops &= RANGED;
            if ops == 0 {
                return refuse("option 'action' short does not go with this 'op': there is no data to cut");
            }
        }
        if !whole {
            ops &= !FaultOp::Request(Op::Flush).bit();
        }
        // Without a length up to the end of any disk, which is never past `i64::MAX`.
        let rest = (i64::MAX as u64).saturating_sub(offset);
        let len = if length == 0 { rest } else { length.min(rest) };
        Ok(Self {
            op,
            ops,
            range: ByteRange { offset: offset.min(i64::MAX as u64), len },
            skip,
            count,
            probability,
            action,
            errno: errno.unwrap_or(if action == Action::Error { libc::EIO } else { 0 }),
            delay: Duration::from_millis(delay_ms.unwrap_or(0)),
            short_bytes: short_bytes.unwrap_or(0),
            matched: 0,
            fired: 0,
        })
    }

    fn to_json(&self) -> Value {
        let action = ACTIONS.iter().find(|(_, a)| *a == self.action).map_or("", |(name, _)| name);
        let mut map = Map::new();
        map.insert("op".into(), OPS[self.op].0.into());
        map.insert("action".into(), action.into());
        let numbers = [
            ("offset", self.range.offset),
            ("length", if self.range.end() < i64::MAX as u64 { self.range.len } else { 0 }),
            ("skip", self.skip),
            ("count", self.count),
            ("errno", self.errno.unsigned_abs().into()),
            ("delay-ms", u64::try_from(self.delay.as_millis()).unwrap_or(u64::MAX)),
            ("short-bytes", self.short_bytes),
        ];
        for (key, value) in numbers.into_iter().filter(|(_, v)| *v != 0) {
            map.insert(key.into(), value.into());
        }
        if self.probability < 1.0 {
            map.insert("probability".into(), self.probability.into());
        }
        Value::Object(map)
    }

    fn matches(&self, op: FaultOp, range: ByteRange) -> bool {
        self.ops & op.bit() != 0 && (op == FaultOp::Request(Op::Flush) || self.range.overlaps(range))
    }

    fn is_spent(&self) -> bool {
        self.count > 0 && self.fired >= self.count
    }

    fn fires(&mut self, op: FaultOp, range: ByteRange, draw: &mut impl FnMut() -> u64) -> bool {
        // A spent rule no longer counts: once all are spent, requests do not come here any more.
        if self.is_spent() || !self.matches(op, range) {
            return false;
        }
        self.matched += 1;
        // The upper 53 bits make every value of 0..1 that a double can hold evenly.
        let fires = self.matched > self.skip
            && (self.probability >= 1.0 || (draw() >> 11) as f64 / ((1u64 << 53) as f64) < self.probability);
        self.fired += u64::from(fires);
        fires
    }

    fn error(&self) -> IoError {
        IoError::new(self.errno, Code::Injected)
    }

    /// Bytes of a short transfer's first part: what was asked for, or half, in sectors where there are that many.
    fn first_part(&self, len: u64) -> u64 {
        let half = if len / 2 >= SECTOR { len / 2 / SECTOR * SECTOR } else { len / 2 };
        let wanted = if self.short_bytes > 0 { self.short_bytes } else { half };
        wanted.min(len.saturating_sub(1))
    }
}

/// An errno by name or number, as text or JSON number.
fn read_errno(value: &Value) -> Result<i32> {
    let number = match value {
        Value::Number(n) => n.as_u64(),
        Value::String(text) => match ERRNOS.iter().find(|(name, _)| name == text) {
            Some((_, number)) => return Ok(*number),
            None => text.parse().ok(),
        },
        _ => None,
    };
    match number {
        Some(n) if (1..=ERRNO_MAX).contains(&n) => Ok(n as i32),
        _ => {
            let names = ERRNOS.map(|(name, _)| name).join(", ");
            Err(Error::invalid(format!(
                "option 'errno' is {value}, expected a number from 1 to {ERRNO_MAX} or one of {names}"
            )))
        }
    }
}

/// The error named in `text`, as a released request can be given it.
pub fn parse_error(text: &str) -> Result<IoError> {
    Ok(IoError::new(read_errno(&Value::String(text.to_owned()))?, Code::Injected))
}

const OPS: [(&str, u8); 8] = [
    ("read", FaultOp::Request(Op::Read).bit()),
    ("write", FaultOp::Request(Op::Write).bit()),
    ("write-zeroes", FaultOp::Request(Op::WriteZeroes).bit()),
    ("discard", FaultOp::Request(Op::Discard).bit()),
    ("flush", FaultOp::Request(Op::Flush).bit()),
    ("block-status", FaultOp::BlockStatus.bit()),
    ("resize", FaultOp::Resize.bit()),
    ("any", 0b111_1111),
];
const ACTIONS: [(&str, Action); 4] =
    [("error", Action::Error), ("delay", Action::Delay), ("hang", Action::Hang), ("short", Action::Short)];
/// Operations that have bytes to be cut.
const RANGED: u8 = FaultOp::Request(Op::Read).bit()
    | FaultOp::Request(Op::Write).bit()
    | FaultOp::Request(Op::WriteZeroes).bit()
    | FaultOp::Request(Op::Discard).bit();
const SECTOR: u64 = 512;
/// Most rules of a node.
const RULES_MAX: usize = 256;
/// Longest delay, in milliseconds: a week.
const DELAY_MS_MAX: u64 = 7 * 24 * 3600 * 1000;
/// Largest errno that the kernel uses.
const ERRNO_MAX: u64 = 4095;
/// Errors that disks, file systems and networks give.
const ERRNOS: [(&str, i32); 28] = [
    ("EPERM", libc::EPERM),
    ("ENOENT", libc::ENOENT),
    ("EINTR", libc::EINTR),
    ("EIO", libc::EIO),
    ("ENXIO", libc::ENXIO),
    ("EBADF", libc::EBADF),
    ("EAGAIN", libc::EAGAIN),
    ("ENOMEM", libc::ENOMEM),
    ("EACCES", libc::EACCES),
    ("EFAULT", libc::EFAULT),
    ("EBUSY", libc::EBUSY),
    ("ENODEV", libc::ENODEV),
    ("EINVAL", libc::EINVAL),
    ("EFBIG", libc::EFBIG),
    ("ENOSPC", libc::ENOSPC),
    ("EROFS", libc::EROFS),
    ("EPIPE", libc::EPIPE),
    ("EDQUOT", libc::EDQUOT),
    ("ENODATA", libc::ENODATA),
    ("EILSEQ", libc::EILSEQ),
    ("ENOTSUP", libc::ENOTSUP),
    ("ECONNRESET", libc::ECONNRESET),
    ("ENOTCONN", libc::ENOTCONN),
    ("ESHUTDOWN", libc::ESHUTDOWN),
    ("ETIMEDOUT", libc::ETIMEDOUT),
    ("ESTALE", libc::ESTALE),
    ("ENOMEDIUM", libc::ENOMEDIUM),
    ("ECANCELED", libc::ECANCELED),
];

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [FaultOp; 7] = [
        FaultOp::Request(Op::Read),
        FaultOp::Request(Op::Write),
        FaultOp::Request(Op::WriteZeroes),
        FaultOp::Request(Op::Discard),
        FaultOp::Request(Op::Flush),
        FaultOp::BlockStatus,
        FaultOp::Resize,
    ];

    fn rules(text: &str) -> Rules {
        Rules::parse(text).unwrap()
    }

    fn range(offset: u64, len: u64) -> ByteRange {
        ByteRange { offset, len }
    }

    fn never() -> u64 {
        panic!("no randomness needed")
    }

    #[test]
    fn an_operation_matches_its_own_name_and_any() {
        for (name, bits) in OPS {
            let mut r = rules(&format!(r#"[{{"op": "{name}", "action": "error"}}]"#));
            for op in ALL {
                let of_op = if op == FaultOp::Request(Op::Flush) { range(0, 0) } else { range(0, 1) };
                let expected = name == "any" || bits == op.bit();
                assert_eq!(r.concern(op, of_op), expected, "{name} {op:?}");
                let verdict = r.decide(op, of_op, never);
                assert_eq!(verdict.then != Then::Pass, expected, "{name} {op:?}");
            }
        }
        let bits = ALL.iter().fold(0, |a, op| a | op.bit());
        assert_eq!((bits, bits.count_ones()), (0b111_1111, ALL.len() as u32));
    }

    #[test]
    fn a_range_matches_exactly_the_requests_that_share_a_byte_with_it() {
        for offset in 0..5u64 {
            for length in 0..5u64 {
                let text = format!(
                    r#"[{{"op": "any", "action": "error", "offset": {offset}, "length": {length}}}]"#
                );
                let r = rules(&text);
                for at in 0..10u64 {
                    for len in 1..5u64 {
                        let end = if length == 0 { u64::MAX } else { offset + length };
                        let shares = (at..at + len).any(|b| (offset..end).contains(&b));
                        let read = FaultOp::Request(Op::Read);
                        assert_eq!(r.concern(read, range(at, len)), shares, "{offset}+{length} {at}+{len}");
                    }
                }
                // A flush has no byte in common with anything, so only a rule without a range is about it.
                let flush = FaultOp::Request(Op::Flush);
                assert_eq!(r.concern(flush, range(0, 0)), offset == 0 && length == 0);
            }
        }
    }

    #[test]
    fn skip_and_count_pick_exactly_the_requests_in_between() {
        for skip in 0..4u64 {
            for count in 0..4u64 {
                let text =
                    format!(r#"[{{"op": "write", "action": "error", "skip": {skip}, "count": {count}}}]"#);
                let mut r = rules(&text);
                for n in 0..10u64 {
                    let write = FaultOp::Request(Op::Write);
                    let hit = n >= skip && (count == 0 || n < skip + count);
                    // Requests of other kinds in between do not count.
                    r.decide(FaultOp::Request(Op::Read), range(0, 1), never);
                    assert_eq!(
                        r.decide(write, range(0, 1), never).then != Then::Pass,
                        hit,
                        "{skip} {count} {n}"
                    );
                    let spent = count > 0 && n + 1 >= skip + count;
                    assert_eq!(r.concern(write, range(0, 1)), !spent);
                }
                let (matched, fired) = if count == 0 { (10, 10 - skip) } else { (skip + count, count) };
                assert_eq!(r.hits().to_string(), format!(r#"[{{"matched":{matched},"fired":{fired}}}]"#));
            }
        }
    }

    #[test]
    fn a_probability_is_drawn_once_per_match_and_compared_exactly() {
        let mut r = rules(r#"[{"op": "read", "action": "error", "probability": 0.25}]"#);
        let read = FaultOp::Request(Op::Read);
        let quarter = 1u64 << 62;
        for (draw, fires) in [(0, true), (quarter - 1, true), (quarter, false), (u64::MAX, false)] {
            assert_eq!(r.decide(read, range(0, 1), || draw).then != Then::Pass, fires, "{draw}");
        }
        let mut none = rules(r#"[{"op": "read", "action": "error", "probability": 0}]"#);
        assert_eq!(none.decide(read, range(0, 1), || 0).then, Then::Pass);
    }

    #[test]
    fn delays_add_up_until_a_rule_ends_the_walk() {
        let text = r#"[{"op": "any", "action": "delay", "delay-ms": 10}, {"op": "write", "action": "delay", "delay-ms": 5},
            {"op": "write", "action": "error", "errno": "ENOSPC", "delay-ms": 1}, {"op": "any", "action": "hang"}]"#;
        let mut r = rules(text);
        let verdict = r.decide(FaultOp::Request(Op::Write), range(0, 1), never);
        let enospc = IoError::new(libc::ENOSPC, Code::Injected);
        assert_eq!(verdict, Verdict { delay: Duration::from_millis(16), then: Then::Fail(enospc) });
        let verdict = r.decide(FaultOp::Request(Op::Read), range(0, 1), never);
        assert_eq!(verdict, Verdict { delay: Duration::from_millis(10), then: Then::Hang });
    }

    #[test]
    fn a_short_transfer_ends_in_the_middle_and_never_at_the_end() {
        let mut half = rules(r#"[{"op": "any", "action": "short", "errno": 5}]"#);
        let mut fixed = rules(r#"[{"op": "any", "action": "short", "short-bytes": 700}]"#);
        let write = FaultOp::Request(Op::Write);
        for (len, first) in [(1, 0), (2, 1), (3, 1), (1023, 511), (1024, 512), (1536, 512), (4096, 2048)] {
            let eio = Some(IoError::new(libc::EIO, Code::Injected));
            assert_eq!(half.decide(write, range(0, len), never).then, Then::Short { first, error: eio });
            let first = 700.min(len - 1);
            assert_eq!(fixed.decide(write, range(0, len), never).then, Then::Short { first, error: None });
        }
        assert!(!half.concern(FaultOp::Request(Op::Flush), range(0, 0)));
        assert!(!half.concern(FaultOp::BlockStatus, range(0, 1)));
    }

    #[test]
    fn rules_read_back_as_they_were_given_from_every_spelling() {
        let json = r#"[{"op":"write","action":"error","offset":4096,"length":512,"skip":1,"count":2,"errno":28,"probability":0.5},{"op":"any","action":"delay","delay-ms":7},{"op":"any","action":"short","short-bytes":9}]"#;
        let from_list = rules(json);
        assert_eq!(from_list.to_json().to_string(), json);
        assert_eq!(rules(&from_list.to_json().to_string()), from_list);
        assert_eq!(rules(&format!(r#"{{"rules": {json}}}"#)), from_list);
        let dotted = "rules.0.op=write,rules.0.action=error,rules.0.offset=4k,rules.0.length=512,rules.0.skip=1,rules.0.count=2,\
            rules.0.errno=ENOSPC,rules.0.probability=0.5,rules.1.op=any,rules.1.action=delay,rules.1.delay-ms=7,\
            rules.2.op=any,rules.2.action=short,rules.2.short-bytes=9";
        assert_eq!(rules(dotted), from_list);
        assert_eq!(rules(""), Rules::default());
        assert_eq!(rules("[]"), Rules::default());
    }

    #[test]
    fn what_makes_no_sense_is_refused_and_named() {
        for (rule, part) in [
            (r#"{"action": "error"}"#, "'op'"),
            (r#"{"op": "read"}"#, "'action'"),
            (r#"{"op": "reed", "action": "error"}"#, "'op'"),
            (r#"{"op": "read", "action": "explode"}"#, "'action'"),
            (r#"{"op": "read", "action": "error", "errno": "EWHAT"}"#, "'errno'"),
            (r#"{"op": "read", "action": "error", "errno": 0}"#, "'errno'"),
            (r#"{"op": "read", "action": "error", "errno": 4096}"#, "'errno'"),
            (r#"{"op": "read", "action": "hang", "errno": 5}"#, "'errno'"),
            (r#"{"op": "read", "action": "error", "probability": 1.5}"#, "'probability'"),
            (r#"{"op": "read", "action": "error", "probability": -1}"#, "'probability'"),
            (r#"{"op": "read", "action": "delay"}"#, "'delay-ms'"),
            (r#"{"op": "read", "action": "delay", "delay-ms": 604800001}"#, "'delay-ms'"),
            (r#"{"op": "read", "action": "error", "short-bytes": 1}"#, "'short-bytes'"),
            (r#"{"op": "flush", "action": "short"}"#, "short"),
            (r#"{"op": "flush", "action": "error", "offset": 5}"#, "'offset'"),
            (r#"{"op": "read", "action": "error", "often": 5}"#, "'often'"),
            ("5", "'rules.0'"),
        ] {
            let message = Rules::parse(&format!("[{rule}]")).unwrap_err().to_string();
            assert!(message.contains(part) && message.contains("rules.0"), "{rule}: {message}");
        }
        assert!(Rules::parse("rules=5").is_err());
        assert!(Rules::parse("rule=5").is_err());
        assert!(Rules::parse("[").is_err());
        let many = vec![r#"{"op": "read", "action": "error"}"#; RULES_MAX + 1].join(",");
        assert!(Rules::parse(&format!("[{many}]")).unwrap_err().to_string().contains("256"));
    }

    #[test]
    fn names_and_numbers_of_errors_agree() {
        for (name, number) in ERRNOS {
            assert_eq!(parse_error(name).unwrap().errno, number);
            assert_eq!(parse_error(&number.to_string()).unwrap().errno, number);
        }
    }
}
