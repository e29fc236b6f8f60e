//! The daemon at work: one thread that waits for sockets, signals and events, and one worker for commands that may block.
//!
//! The thread of the loop owns the monitors and their connections. It never blocks on anything but poll, which has no timeout while nothing is to
//! be repeated, so an idle daemon does nothing at all. The worker takes commands in their order from a bounded channel and puts results into the
//! [`Mailbox`]; of each connection at most one command is there.
//!
//! Order of what a client sees: events that were posted before a command ended come before its answer.
//!
//! The end (signal, `quit`): jobs are cancelled at once, monitors listen no more, and the worker, after the commands it has, stops
//! the jobs and the NBD server. All of that is bounded; a second signal, or a worker that does not come back ([`STOP_MAX`]), ends the process anyway.

use super::command::{self, Answer};
use super::event::{JobFacts, own, translate};
use super::monitor::{Call, Connection, Step};
use super::objects::Objects;
use super::wire::Failure;
use crate::cli::sys::{Interest, Signals, poll, trim_heap};
use crate::error::{Error, Result};
use crate::events::EventKind;
use crate::export::nbd::Listener;
use crate::job::Status;
use crate::queue::EventFd;
use crate::rt::{Instant, Join};
use crate::sync::{Arc, Mutex};
use crossbeam::channel::{Receiver, Sender, bounded};
use serde_json::json;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// A socket at which QMP is spoken.
#[derive(Debug)]
pub(in crate::cli) struct Monitor {
    pub(in crate::cli) listener: Listener,
    pub(in crate::cli) pretty: bool,
}

/// Monitor connections at a time; others wait to be accepted.
const CONNECTIONS_MAX: usize = 16;
/// Messages of one connection that are read before the others get a turn.
const MESSAGES_PER_TURN: usize = 32;
/// How long accepting pauses after an error (no descriptors left, for example).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long the worker may take to come to its end: jobs, then clients of the NBD server, each with a bound of its own.
const STOP_MAX: Duration = Duration::from_secs(20);
/// How long cancelled jobs may take to end.
const JOBS_STOP_MAX: Duration = Duration::from_secs(2);

/// How the daemon ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cli) enum Outcome {
    /// Everything was brought to its end.
    Clean,
    /// Something did not end in time and was left behind.
    Forced,
}

/// Work for the worker.
enum Work {
    Command { connection: u64, call: Call },
    Stop,
}

/// What the worker gives back.
#[derive(Debug)]
struct Mailbox {
    state: Mutex<Mail>,
    wake: EventFd,
}

#[derive(Debug, Default)]
struct Mail {
    answers: Vec<(u64, Answer)>,
    stopped: bool,
}

/// The loop's state.
pub(in crate::cli) struct Service {
    objects: Arc<Objects>,
    events: RawFd,
    monitors: Vec<Monitor>,
    connections: BTreeMap<u64, Connection>,
    next_id: u64,
    accept_again: Option<Instant>,
    work: Sender<Work>,
    mailbox: Arc<Mailbox>,
    worker: Option<Box<dyn Join>>,
    /// Facts of running jobs, kept for the events that come after they have been forgotten.
    jobs: BTreeMap<String, JobFacts>,
    events_lost: u32,
    /// Set once the daemon is to end; the time at which it ends in any case.
    stop_at: Option<Instant>,
}

impl Service {
    /// Starts the worker.
    pub(in crate::cli) fn new(objects: Arc<Objects>, monitors: Vec<Monitor>) -> Result<Self> {
        let failed = |e| Error::os(e, "cannot start the daemon");
        let events = objects.context().events().fd().map_err(failed)?;
        let mailbox = Arc::new(Mailbox { state: Mutex::default(), wake: EventFd::new().map_err(failed)? });
        // One command per connection, and the end.
        let (work, todo) = bounded(CONNECTIONS_MAX + 1);
        let body = {
            let (objects, mailbox) = (objects.clone(), mailbox.clone());
            Box::new(move || worker(&objects, &todo, &mailbox))
        };
        let spawn = &objects.context().env().runtime.spawn;
        let worker = Some(spawn.spawn("cobweb-control", body).map_err(failed)?);
        Ok(Self {
            objects,
            events,
            monitors,
            connections: BTreeMap::new(),
            next_id: 0,
            accept_again: None,
            work,
            mailbox,
            worker,
            jobs: BTreeMap::new(),
            events_lost: 0,
            stop_at: None,
        })
    }

    /// Serves until a signal or `quit`, and brings everything to its end.
    pub(in crate::cli) fn run(mut self, signals: &Signals) -> Result<Outcome> {
        loop {
            let ready = self.wait(signals).map_err(|e| Error::os(e, "cannot wait for events"))?;
            if ready.signal && signals.take() {
                if self.stop_at.is_some() {
                    return Ok(Outcome::Forced);
                }
                self.stop();
            }
            self.mailbox.wake.clear();
            let (answers, stopped) = {
                let mut mail = self.mailbox.state.lock();
                (std::mem::take(&mut mail.answers), mail.stopped)
            };
            self.send_events();
            for (id, result) in answers {
                if let Some(connection) = self.connections.get_mut(&id) {
                    connection.finish(result);
                }
            }
            for at in ready.monitors {
                self.accept(at);
            }
            self.serve(&ready.connections);
            if stopped {
                self.send_events();
                self.connections.values_mut().for_each(|c| drop(c.flush()));
                if let Some(worker) = self.worker.take() {
                    worker.join();
                }
                return Ok(Outcome::Clean);
            }
            if self.stop_at.is_some_and(|at| self.now() >= at) {
                return Ok(Outcome::Forced);
            }
        }
    }

    /// Waits until there is something to do.
    fn wait(&mut self, signals: &Signals) -> io::Result<Ready> {
        let stopping = self.stop_at.is_some();
        let accepting = match self.accept_again {
            Some(at) if self.now() < at => false,
            _ => {
                self.accept_again = None;
                !stopping && self.connections.len() < CONNECTIONS_MAX
            }
        };
        let mut fds = vec![
            (signals.raw(), Interest::READ),
            (self.mailbox.wake.raw(), Interest::READ),
            (self.events, Interest::READ),
        ];
        let first_monitor = fds.len();
        let listen = Interest { readable: accepting, writable: false };
        fds.extend(self.monitors.iter().map(|m| (m.listener.raw(), listen)));
        let first_connection = fds.len();
        fds.extend(self.connections.values().map(|c| {
            let readable = !stopping && c.wants_input();
            (c.raw(), Interest { readable, writable: c.wants_output() })
        }));
        let busy = !stopping && self.connections.values().any(Connection::has_messages);
        let deadline = [self.accept_again, self.stop_at].into_iter().flatten().min();
        let timeout = match deadline {
            _ if busy => Some(Duration::ZERO),
            Some(at) => Some(at.since(self.now())),
            None => None,
        };
        poll(&mut fds, timeout)?;
        let (head, connections) = fds.split_at(first_connection);
        let monitors = &head[first_monitor..];
        Ok(Ready {
            signal: head[0].1.readable,
            monitors: (0..monitors.len()).filter(|n| monitors[*n].1.readable).collect(),
            connections: self.connections.keys().copied().zip(connections.iter().map(|c| c.1)).collect(),
        })
    }

    fn accept(&mut self, monitor: usize) {
        let Some(monitor) = self.monitors.get(monitor) else { return };
        match monitor.listener.accept() {
            Ok(fd) => {
                self.connections.insert(self.next_id, Connection::new(fd, monitor.pretty));
                self.next_id += 1;
            }
            // The client has thought better of it.
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted) => {}
            Err(e) => {
                let text = format!("cannot accept a monitor connection: {e}");
                self.objects.context().env().log(1, "monitor", &text);
                self.accept_again = Some(self.now().after(ACCEPT_PAUSE));
            }
        }
    }

    /// Gives every connection a turn.
    fn serve(&mut self, ready: &BTreeMap<u64, Interest>) {
        let ids: Vec<u64> = self.connections.keys().copied().collect();
        for id in ids {
            let readable = ready.get(&id).is_some_and(|i| i.readable);
            // Taken out for its turn: its commands may concern everybody.
            let Some(mut connection) = self.connections.remove(&id) else { continue };
            if self.turn(id, &mut connection, readable).is_ok() && !connection.is_over() {
                self.connections.insert(id, connection);
            }
        }
    }

    fn turn(&mut self, id: u64, connection: &mut Connection, readable: bool) -> io::Result<()> {
        if readable {
            connection.receive()?;
        }
        for _ in 0..MESSAGES_PER_TURN {
            if self.stop_at.is_some() {
                break;
            }
            match connection.step() {
                Step::Idle => break,
                Step::Answered => {}
                Step::Call(call) => self.call(id, connection, call),
            }
        }
        connection.flush()
    }

    fn call(&mut self, id: u64, connection: &mut Connection, call: Call) {
        if call.command.may_block {
            // There is room for one command of each connection; without a worker the daemon is about to end.
            let _ = self.work.try_send(Work::Command { connection: id, call });
            return;
        }
        let result = command::run(call.command, &self.objects, call.arguments);
        let quit = result.is_ok() && call.command.name == "quit";
        self.send_events_beside(Some(&mut *connection));
        connection.finish(result);
        if quit {
            self.stop();
        }
    }

    /// Begins the end.
    fn stop(&mut self) {
        for job in self.objects.context().jobs().list() {
            // Refused if it is ending by itself.
            let _ = job.cancel();
        }
        self.monitors.clear();
        self.stop_at = Some(self.now().after(STOP_MAX));
        let _ = self.work.try_send(Work::Stop);
    }

    fn send_events(&mut self) {
        self.send_events_beside(None);
    }

    /// Tells all connections, and one that is having its turn, what has happened.
    fn send_events_beside(&mut self, mut beside: Option<&mut Connection>) {
        let (mut messages, mut gone) = (Vec::new(), false);
        let context = self.objects.context();
        let clock = &*context.env().runtime.clock;
        for id in self.objects.take_gone() {
            messages.push(own("BLOCK_EXPORT_DELETED", json!({ "id": id }), clock));
        }
        while let Some(event) = context.events().next() {
            if event.dropped > self.events_lost {
                self.events_lost = event.dropped;
                messages.push(own("COBWEB_EVENTS_LOST", json!({ "count": event.dropped }), clock));
            }
            let mut facts = JobFacts { kind: "backup", speed: 0 };
            if event.kind == EventKind::Job {
                if let Ok(job) = context.jobs().find(&event.source) {
                    facts = JobFacts { kind: job.kind(), speed: job.query().speed };
                    self.jobs.insert(event.source.clone(), facts);
                } else if let Some(known) = self.jobs.get(&event.source) {
                    facts = *known;
                }
                if event.value == Status::Null as u64 {
                    self.jobs.remove(&event.source);
                    gone = true;
                }
            }
            messages.extend(translate(&event, clock, facts));
        }
        for message in &messages {
            self.connections.values_mut().chain(beside.as_deref_mut()).for_each(|c| c.notify(message));
        }
        if gone {
            // What a job took for its bookkeeping stays in the heaps of the threads that worked for it.
            trim_heap();
        }
    }

    fn now(&self) -> Instant {
        self.objects.context().env().runtime.clock.now()
    }
}

/// What poll found.
#[derive(Debug)]
struct Ready {
    signal: bool,
    monitors: Vec<usize>,
    connections: BTreeMap<u64, Interest>,
}

fn worker(objects: &Objects, todo: &Receiver<Work>, mailbox: &Mailbox) {
    while let Ok(Work::Command { connection, call }) = todo.recv() {
        // A panic is a defect of ours; the daemon, and the guests behind it, outlive it.
        let run = || command::run(call.command, objects, call.arguments);
        let result = catch_unwind(AssertUnwindSafe(run))
            .unwrap_or_else(|_| Err(Failure::generic(format!("'{}' has panicked", call.command.name))));
        mailbox.state.lock().answers.push((connection, result));
        mailbox.wake.signal();
    }
    objects.context().jobs().shut_down(JOBS_STOP_MAX);
    // Refused if there is none.
    let _ = objects.stop_server();
    mailbox.state.lock().stopped = true;
    mailbox.wake.signal();
}
