//! Events that the host pulls (C15).
//!
//! The queue is bounded: a repeated event of one source and kind replaces the one that is still waiting, and `dropped` counts what
//! did not fit.

use crate::error::Code;
use crate::limits::EVENTS_MAX;
use crate::queue::EventFd;
use crate::sync::Mutex;
use std::collections::VecDeque;

/// Kinds of events; the numbers are those of the C ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum EventKind {
    /// A node's size has changed; `value` is the new size.
    Resize = 1,
    /// A job changed its state; `value` is the new state.
    Job = 2,
    /// A filter's snapshot broke.
    CbwBroken = 3,
    /// A range of a snapshot was lost.
    RangeLost = 4,
    /// A cache crossed an occupancy mark; `value` is the per cent, `len` the time to full in milliseconds.
    CacheMark = 5,
    /// An overflow step was taken; `value` says which ([`crate::events::Side`] of the data afterwards).
    Overflow = 6,
    /// An image is corrupt.
    Corrupt = 7,
    /// The last reader of a snapshot has gone.
    ReaderGone = 8,
}

/// Which part an error or event concerns; the numbers are those of the C ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[repr(u32)]
pub enum Side {
    /// None in particular.
    #[default]
    None = 0,
    /// The guest's disk.
    Source = 1,
    /// The backup target.
    Target = 2,
    /// The RAM cache.
    Cache = 3,
    /// The spill file.
    Spill = 4,
    /// A reader of the snapshot.
    Reader = 5,
    /// The host program.
    Host = 6,
}

impl Side {
    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Side::None => "none",
            Side::Source => "source",
            Side::Target => "target",
            Side::Cache => "cache",
            Side::Spill => "spill",
            Side::Reader => "reader",
            Side::Host => "host",
        }
    }
}

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub kind: EventKind,
    /// Name of the node or job.
    pub source: String,
    /// Number in the order of posting; set by [`Events::post`].
    pub seq: u64,
    /// Monotonic nanoseconds.
    pub time_ns: u64,
    /// First byte concerned.
    pub offset: u64,
    /// Bytes concerned.
    pub len: u64,
    /// Depends on the kind.
    pub value: u64,
    /// Positive errno, 0 if none.
    pub errno: i32,
    /// Finer than errno.
    pub code: Code,
    /// Which part.
    pub side: Side,
    /// Events lost so far because the queue was full.
    pub dropped: u32,
}

impl Event {
    /// An event without details.
    pub fn new(kind: EventKind, source: impl Into<String>) -> Self {
        Self {
            kind,
            source: source.into(),
            seq: 0,
            time_ns: 0,
            offset: 0,
            len: 0,
            value: 0,
            errno: 0,
            code: Code::None,
            side: Side::None,
            dropped: 0,
        }
    }
}

/// The bounded queue of one context. Any thread.
#[derive(Debug, Default)]
pub struct Events {
    state: Mutex<State>,
    posted: event_listener::Event,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Event>,
    seq: u64,
    dropped: u32,
    fd: Option<EventFd>,
}

impl Events {
    /// Adds an event; never blocks. Job events are never merged (every state change counts), others of one kind and source are.
    pub fn post(&self, mut event: Event) {
        let mut s = self.state.lock();
        s.seq += 1;
        event.seq = s.seq;
        let merge = event.kind != EventKind::Job;
        let old = s.waiting.iter().position(|e| merge && e.kind == event.kind && e.source == event.source);
        match old {
            Some(at) => {
                s.waiting.remove(at);
            }
            None if s.waiting.len() >= EVENTS_MAX => {
                s.waiting.pop_front();
                s.dropped = s.dropped.saturating_add(1);
            }
            None => {}
        }
        s.waiting.push_back(event);
        if let Some(fd) = &s.fd {
            fd.signal();
        }
        drop(s);
        self.posted.notify(usize::MAX);
    }

    /// The next event, if any.
    pub fn next(&self) -> Option<Event> {
        let mut s = self.state.lock();
        let dropped = s.dropped;
        let next = s.waiting.pop_front().map(|e| Event { dropped, ..e });
        if s.waiting.is_empty()
            && let Some(fd) = &s.fd
        {
            fd.clear();
        }
        next
    }

    /// A descriptor that is readable while events wait; made on first use, lives as long as the context.
    pub fn fd(&self) -> std::io::Result<std::os::fd::RawFd> {
        let mut s = self.state.lock();
        if s.fd.is_none() {
            let fd = EventFd::new()?;
            if !s.waiting.is_empty() {
                fd.signal();
            }
            s.fd = Some(fd);
        }
        Ok(s.fd.as_ref().map_or(-1, EventFd::raw))
    }

    /// Notified at each post; listen first, then look.
    pub fn listen(&self) -> event_listener::EventListener {
        self.posted.listen()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_events_of_one_source_merge_but_job_events_do_not() {
        let events = Events::default();
        for value in 0..3 {
            events.post(Event { value, ..Event::new(EventKind::CacheMark, "c") });
            events.post(Event { value, ..Event::new(EventKind::Job, "j") });
        }
        let all: Vec<_> = std::iter::from_fn(|| events.next()).map(|e| (e.kind, e.value)).collect();
        let jobs: Vec<_> = all.iter().filter(|e| e.0 == EventKind::Job).map(|e| e.1).collect();
        assert_eq!(jobs, [0, 1, 2]);
        assert_eq!(all.iter().filter(|e| e.0 == EventKind::CacheMark).map(|e| e.1).collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn a_full_queue_counts_what_it_drops() {
        let events = Events::default();
        for i in 0..EVENTS_MAX + 5 {
            events.post(Event::new(EventKind::Job, format!("j{i}")));
        }
        let first = events.next().expect("there are events");
        assert_eq!((first.source.as_str(), first.dropped), ("j5", 5));
    }
}
