//! `fault`: errors, delays, hangs and short transfers on chosen requests, for users' tests and our own.
//!
//! Options: `file`; `rules`, a list of objects; `enabled` (default on). A rule:
//!
//! | key | meaning | default |
//! |---|---|---|
//! | `op` | `read`, `write`, `write-zeroes`, `discard`, `flush`, `block-status`, `resize`, or `any` of these | required |
//! | `offset`, `length` | requests that share a byte with this range; length 0: to the end. With a range `any` leaves flushes out | everything |
//! | `skip` | so many matching requests pass first | 0 |
//! | `count` | fires at most so often; 0: always | 0 |
//! | `probability` | 0 to 1, drawn for each matching request past `skip` | 1 |
//! | `action` | `error`, `delay`, `hang`, `short` | required |
//! | `errno` | name or number, for `error` (EIO if not given) and `short` | |
//! | `delay-ms` | wait first; for every action, required for `delay` | 0 |
//! | `short-bytes` | length of a short transfer's first part | half |
//!
//! Rules are walked in order and each one that matches counts the request; the first that fires decides, except that a delay is
//! added and the walk goes on. Errors carry the code `injected`.
//!
//! - `error`: fails, nothing reaches the node below.
//! - `hang`: nothing happens until the request is cancelled (ECANCELED) or released; a released request goes on as if the rule
//!   had not been there.
//! - `short`: the first part of the range is carried out. With `errno` the request then fails, so a write is torn; without, the rest
//!   follows as a second transfer and the request succeeds, so the node below sees two.
//!
//! Live: `rules` (JSON list or option text; empty for none) replaces all rules and their counters; `enabled` (on, off); `release`
//! lets go what hangs or is delayed, with an errno as its value if it is to fail. Every change of the others releases, too,
//! and so does `settle`: from then until the next change nothing waits here, so that a node can always be closed and removed.
//! Readable: `rules`, `enabled`, `hits` (per rule `matched` and `fired`), `hung` (requests that hang or are delayed now).
//!
//! Lock: `state`, a leaf.

mod rule;
#[cfg(test)]
mod tests;

pub use rule::{FaultOp, Rules, Then, Verdict};

use crate::error::{Error, IoError, IoResult, Result};
use crate::graph::OpenCx;
use crate::node::{Edge, Extent, Growth, Limits, Node, NodeFuture, Plan, Reservation};
use crate::options::props::REQUIRED;
use crate::options::{Options, Prop, PropStates, PropTable, PropType};
use crate::queue::Cx;
use crate::request::{Class, ReqRef, Request};
use crate::rt::{Instant, Rng};
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use crate::sync::{Arc, Mutex};
use crate::units::ByteRange;
use event_listener::Event;
use std::any::Any;
use std::fmt;

/// The filter.
pub struct Fault {
    file: Edge,
    rng: Arc<dyn Rng>,
    /// Whether there may be something to do; spares the lock. Relaxed: a request that races with a change of the rules may go by
    /// either.
    active: AtomicBool,
    state: Mutex<State>,
    released: Event,
    hung: AtomicUsize,
}

#[derive(Debug)]
struct State {
    rules: Rules,
    enabled: bool,
    /// Counts releases: a request that waits goes on when the number has changed.
    generation: u64,
    /// How the requests of the last release go on.
    error: Option<IoError>,
    /// The node is being closed: nothing waits.
    settled: bool,
}

impl Fault {
    /// A filter above `file` with these rules, switched on. Random numbers come from `rng`.
    pub fn new(file: Edge, rules: Rules, rng: Arc<dyn Rng>) -> Arc<Self> {
        let node = Self {
            file,
            rng,
            active: AtomicBool::new(false),
            state: Mutex::new(State { rules, enabled: true, generation: 0, error: None, settled: false }),
            released: Event::new(),
            hung: AtomicUsize::new(0),
        };
        node.change(|_| ());
        Arc::new(node)
    }

    /// Driver entry.
    pub fn open(cx: &OpenCx<'_>, mut options: Options) -> Result<Arc<dyn Node>> {
        let path = options.key_path("rules");
        let rules = options.take_value("rules").map(|v| Rules::from_value(v, &path)).transpose()?;
        let enabled = options.take_bool("enabled")?.unwrap_or(true);
        let file = cx.require_child(&mut options, "file")?;
        options.finish_for(&PROPS)?;
        let node = Self::new(file, rules.unwrap_or_default(), cx.env().runtime.rng.clone());
        node.change(|state| state.enabled = enabled);
        Ok(node)
    }

    /// Requests that hang or are delayed now.
    pub fn hung(&self) -> usize {
        self.hung.load(Relaxed)
    }

    /// Changes the state and lets go what waits.
    fn change(&self, change: impl FnOnce(&mut State)) {
        {
            let mut state = self.state.lock();
            state.error = None;
            state.settled = false;
            change(&mut state);
            state.generation += 1;
            self.active.store(state.enabled && state.rules != Rules::default(), Relaxed);
        }
        self.released.notify(usize::MAX);
    }

    /// Counts a request and says what is to happen to it, and the generation that it was decided in.
    fn decide(&self, op: FaultOp, range: ByteRange) -> (Verdict, u64) {
        let mut state = self.state.lock();
        let pass = Verdict { delay: std::time::Duration::ZERO, then: Then::Pass };
        let mut verdict =
            if state.enabled { state.rules.decide(op, range, || self.rng.next()) } else { pass };
        if state.settled {
            verdict.delay = pass.delay;
            if verdict.then == Then::Hang {
                verdict.then = Then::Pass;
            }
        }
        (verdict, state.generation)
    }

    /// Decides and waits. What is left to do afterwards: pass, fail, or be cut short.
    async fn judge(&self, cx: &Cx, op: FaultOp, range: ByteRange) -> IoResult<Then> {
        if !self.active.load(Relaxed) {
            return Ok(Then::Pass);
        }
        let (verdict, generation) = self.decide(op, range);
        let until = (!verdict.delay.is_zero()).then(|| cx.now().after(verdict.delay));
        if until.is_some() && self.wait(cx, until, generation).await? {
            return Ok(Then::Pass);
        }
        match verdict.then {
            Then::Hang => self.wait(cx, None, generation).await.map(|_| Then::Pass),
            then => Ok(then),
        }
    }

    /// Waits until `until` or a release after `generation`; whether it was a release.
    async fn wait(&self, cx: &Cx, until: Option<Instant>, generation: u64) -> IoResult<bool> {
        struct Hung<'a>(&'a AtomicUsize);
        impl Drop for Hung<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Relaxed);
            }
        }
        self.hung.fetch_add(1, Relaxed);
        let _hung = Hung(&self.hung);
        loop {
            let listener = self.released.listen();
            {
                let state = self.state.lock();
                if state.generation != generation {
                    return state.error.map_or(Ok(true), Err);
                }
            }
            if cx.cancellable(cx.until(until, listener)).await?.is_none() {
                return Ok(false);
            }
        }
    }
}

impl Node for Fault {
    fn driver(&self) -> &'static str {
        "fault"
    }

    fn limits(&self) -> Limits {
        self.file.get().limits()
    }

    fn children(&self) -> Vec<(&'static str, &Edge)> {
        vec![("file", &self.file)]
    }

    fn plan(&self, req: ReqRef<'_>) -> Plan {
        // A rule counts in `execute`, once per request; a plan may be asked for more than once.
        if self.active.load(Relaxed) && self.state.lock().rules.concern(FaultOp::Request(req.op), req.range) {
            return Plan::Slow;
        }
        self.file.get().plan(req)
    }

    fn execute<'a>(&'a self, cx: &'a Cx, req: Request) -> NodeFuture<'a, IoResult> {
        Box::pin(async move {
            let verdict = self.judge(cx, FaultOp::Request(req.op), req.range).await?;
            let child = self.file.node();
            match verdict {
                Then::Pass | Then::Hang => cx.run(&*child, req).await,
                Then::Fail(error) => Err(error),
                Then::Short { first, error } => {
                    let rest = req.range.len - first;
                    if first > 0 {
                        cx.run(&*child, part(&req, 0, first)).await?;
                    }
                    match error {
                        Some(error) => Err(error),
                        None => cx.run(&*child, part(&req, first, rest)).await,
                    }
                }
            }
        })
    }

    fn block_status<'a>(&'a self, cx: &'a Cx, range: ByteRange) -> NodeFuture<'a, IoResult<Extent>> {
        Box::pin(async move {
            match self.judge(cx, FaultOp::BlockStatus, range).await? {
                Then::Fail(error) => Err(error),
                _ => self.file.node().block_status(cx, range).await,
            }
        })
    }

    fn resize<'a>(&'a self, cx: &'a Cx, size: u64, growth: Growth) -> NodeFuture<'a, IoResult> {
        Box::pin(async move {
            let child = self.file.node();
            let old = child.limits().size;
            let changed = ByteRange { offset: old.min(size), len: old.abs_diff(size) };
            match self.judge(cx, FaultOp::Resize, changed).await? {
                Then::Fail(error) => Err(error),
                _ => child.resize(cx, size, growth).await,
            }
        })
    }

    fn settle<'a>(&'a self, _cx: &'a Cx) -> NodeFuture<'a, IoResult> {
        self.change(|state| state.settled = true);
        Box::pin(async { Ok(()) })
    }

    fn reserve<'a>(&'a self, cx: &'a Cx, len: u64, class: Class) -> NodeFuture<'a, IoResult<Reservation>> {
        let child = self.file.node();
        Box::pin(async move { child.reserve(cx, len, class).await })
    }

    fn set(&self, key: &str, value: &str) -> Result<()> {
        match key {
            "rules" => {
                let rules = Rules::parse(value)?;
                self.change(|state| state.rules = rules);
            }
            "enabled" => {
                let mut options = Options::empty();
                options.insert(key, value)?;
                let enabled = options.require_bool(key)?;
                self.change(|state| state.enabled = enabled);
            }
            "release" => {
                let error = if value.is_empty() { None } else { Some(rule::parse_error(value)?) };
                self.change(|state| state.error = error);
            }
            _ => return Err(Error::invalid(format!("driver 'fault' has no live option '{key}'"))),
        }
        Ok(())
    }

    fn get(&self, key: &str) -> Option<String> {
        let state = self.state.lock();
        match key {
            "rules" => Some(state.rules.to_json().to_string()),
            "enabled" => Some(if state.enabled { "on" } else { "off" }.to_owned()),
            "hits" => Some(state.rules.hits().to_string()),
            "hung" => Some(self.hung().to_string()),
            _ => None,
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fault").field("hung", &self.hung()).field("file", &self.file).finish_non_exhaustive()
    }
}

/// The bytes `skip .. skip + len` of a request, as a request of its own.
fn part(req: &Request, skip: u64, len: u64) -> Request {
    let bufs = if req.op.has_data() { req.bufs.slice(skip as usize, len as usize) } else { req.bufs.clone() };
    let range = ByteRange { offset: req.range.offset + skip, len };
    Request { op: req.op, flags: req.flags, class: req.class, range, bufs }
}

const LIVE: PropStates = PropStates::OPEN.union(PropStates::LIVE);

/// Options of the driver.
pub static PROPS: PropTable = PropTable {
    driver: "fault",
    props: &[
        Prop {
            name: "file",
            ty: PropType::Node,
            default: REQUIRED,
            states: PropStates::OPEN,
            doc: "The node below",
        },
        Prop {
            name: "rules",
            ty: PropType::Object,
            default: "",
            states: LIVE,
            doc: "List of objects with op, action, offset, length, skip, count, probability, errno, delay-ms, short-bytes",
        },
        Prop {
            name: "enabled",
            ty: PropType::Bool,
            default: "on",
            states: LIVE,
            doc: "Whether the rules are looked at",
        },
        Prop {
            name: "release",
            ty: PropType::Str,
            default: "",
            states: PropStates::LIVE,
            doc: "Lets go what hangs or is delayed; an errno makes it fail",
        },
        Prop {
            name: "hits",
            ty: PropType::Str,
            default: "",
            states: PropStates::READ_ONLY,
            doc: "Per rule, how many requests matched and how often it fired",
        },
        Prop {
            name: "hung",
            ty: PropType::Int,
            default: "",
            states: PropStates::READ_ONLY,
            doc: "Requests that hang or are delayed now",
        },
    ],
};
