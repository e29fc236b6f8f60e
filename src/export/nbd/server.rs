//! The server: exports, the accepting thread, the list of connections.
//!
//! One lock guards exports and connections. It is held for look-ups and changes of the two lists only, never while a thread is joined or
//! anything is read or written. A connection's thread tells its end itself; the accepting thread is woken by it and joins it.

use super::handshake::{Directory, ExportView};
use super::net::{Address, Listener, Socket};
use super::option::is_valid_string;
use super::pool::Budget;
use super::session;
use super::sys::{self, Interest};
use crate::error::{Error, Result};
use crate::graph::Disk;
use crate::io::nbd::proto::ExportFlags;
use crate::limits::{NBD_BYTES_SHARED, NBD_CONNECTIONS_MAX, NBD_EXPORTS_MAX};
use crate::queue::{Env, EventFd};
use crate::rt::Join;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::RawFd;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

/// A disk under a name.
#[derive(Clone, Debug)]
pub struct Export {
    /// The name that clients ask for; may be empty (the default export). At most 4096 bytes.
    pub name: String,
    /// Text for a person; may be empty. At most 4096 bytes.
    pub description: String,
    /// What is exported. The caller made it for this export, and forgets it after the export has been removed.
    pub disk: Arc<Disk>,
    /// Whether clients may write. A disk that is read-only itself is exported so in any case.
    pub writable: bool,
}

/// What happens to the clients of an export that is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// The export is not removed while it has clients.
    Safe,
    /// They are disconnected, after the requests that are running.
    Hard,
}

/// An NBD server. All methods may be called from any thread; those that wait say so. Dropping it stops it.
pub struct Server {
    shared: Arc<Shared>,
    address: Address,
    acceptor: Mutex<Option<Box<dyn Join>>>,
}

/// How long a server is patient.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    /// For one option of a handshake.
    pub(super) handshake: Duration,
    /// For a client that has closed its side to take the last replies.
    pub(super) linger: Duration,
    /// For running requests and the last replies when the server stops or the export goes.
    pub(super) stop: Duration,
}

/// What the threads of a server share.
pub(super) struct Shared {
    env: Arc<Env>,
    timing: Timing,
    connections_max: usize,
    budget: Arc<Budget>,
    state: Mutex<State>,
    /// A connection has ended.
    ended: Condvar,
    /// Wakes the accepting thread.
    wake: EventFd,
    stopping: AtomicBool,
}

#[derive(Default)]
struct State {
    exports: BTreeMap<String, Arc<Export>>,
    connections: BTreeMap<u64, Entry>,
    next_id: u64,
    /// Threads that have ended, or are about to.
    over: Vec<Box<dyn Join>>,
}

/// A connection as the server sees it.
struct Entry {
    control: Arc<Control>,
    export: Option<Arc<Export>>,
    thread: Option<Box<dyn Join>>,
}

/// How the server speaks to a connection.
#[derive(Debug)]
pub(super) struct Control {
    event: EventFd,
    stop: AtomicBool,
}

impl Server {
    /// Listens at `address`. `connections_max` is the number of clients served at a time (0: as many as [`NBD_CONNECTIONS_MAX`]); others wait
    /// to be accepted. With 1 clients are not told that they may use several connections. Requests run in `env`.
    pub fn start(env: &Arc<Env>, address: &Address, connections_max: usize) -> Result<Self> {
        Self::start_with(env, address, connections_max, Timing::DEFAULT)
    }

    pub(super) fn start_with(
        env: &Arc<Env>,
        address: &Address,
        connections_max: usize,
        timing: Timing,
    ) -> Result<Self> {
        let listener = Listener::bind(address)?;
        let address = listener.address().clone();
        let max = if connections_max == 0 { NBD_CONNECTIONS_MAX } else { connections_max };
        let shared = Arc::new(Shared {
            env: env.clone(),
            timing,
            connections_max: max.min(NBD_CONNECTIONS_MAX),
            budget: Budget::new(NBD_BYTES_SHARED),
            state: Mutex::default(),
            ended: Condvar::new(),
            wake: EventFd::new().map_err(|e| Error::os(e, "cannot create an event fd"))?,
            stopping: AtomicBool::new(false),
        });
        let theirs = shared.clone();
        let body = Box::new(move || theirs.accept_clients(&listener));
        let thread = env.runtime.spawn.spawn("cobweb-nbd", body);
        let thread = thread.map_err(|e| Error::os(e, "cannot start the NBD server's thread"))?;
        Ok(Self { shared, address, acceptor: Mutex::new(Some(thread)) })
    }

    /// Where the server listens; a TCP port of 0 has become the port it got.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Offers a disk. Refused: a name that is in use or too long, or more than [`NBD_EXPORTS_MAX`] exports.
    pub fn add_export(&self, export: Export) -> Result<()> {
        let Export { name, description, .. } = &export;
        if !is_valid_string(name) || !is_valid_string(description) {
            return Err(Error::invalid(
                "the name or description of an export is longer than 4096 bytes or contains a NUL",
            ));
        }
        let mut state = self.shared.state.lock();
        if self.shared.stopping.load(Ordering::Acquire) {
            return Err(Error::invalid("the NBD server has been stopped"));
        }
        if state.exports.contains_key(name) {
            return Err(Error::busy(format!("there is an NBD export named '{name}' already")));
        }
        if state.exports.len() >= NBD_EXPORTS_MAX {
            return Err(Error::busy(format!("there are {NBD_EXPORTS_MAX} NBD exports already")));
        }
        state.exports.insert(name.clone(), Arc::new(export));
        Ok(())
    }

    /// Takes an export away. `Removal::Hard` disconnects its clients and waits for them, for some seconds: running requests are asked to
    /// stop waiting after five; a busy error (the name is free then, but the disk still in use) says that one has not ended.
    pub fn remove_export(&self, name: &str, removal: Removal) -> Result<()> {
        let mut state = self.shared.state.lock();
        let export = state.exports.get(name).cloned();
        let export =
            export.ok_or_else(|| Error::not_found(format!("there is no NBD export named '{name}'")))?;
        let uses = |e: &Entry| e.export.as_ref().is_some_and(|x| Arc::ptr_eq(x, &export));
        let clients = state.connections.values().filter(|e| uses(e)).count();
        if removal == Removal::Safe && clients > 0 {
            return Err(Error::busy(format!("the NBD export '{name}' has {clients} clients")));
        }
        state.exports.remove(name);
        state.connections.values().filter(|e| uses(e)).for_each(|e| e.control.stop());
        if self.shared.wait_until(state, |s| !s.connections.values().any(uses)) {
            Ok(())
        } else {
            Err(Error::busy(format!("requests of clients of the NBD export '{name}' have not ended")))
        }
    }

    /// The exports, by name.
    pub fn exports(&self) -> Vec<Arc<Export>> {
        self.shared.state.lock().exports.values().cloned().collect()
    }

    /// Number of clients, those in the handshake included.
    pub fn connections(&self) -> usize {
        self.shared.state.lock().connections.len()
    }

    /// Shared bytes that no connection has borrowed.
    #[cfg(test)]
    pub(super) fn budget_free(&self) -> usize {
        self.shared.budget.free()
    }

    /// Stops: nobody new is let in, clients are disconnected after their running requests, threads joined. Waits for some seconds at most; what is not over
    /// then (a disk that does not answer) is left behind, with a line in the log. May be called twice.
    pub fn stop(&self) {
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.wake.signal();
        if let Some(thread) = self.acceptor.lock().take() {
            thread.join();
        }
        let mut state = self.shared.state.lock();
        state.exports.clear();
        state.connections.values().for_each(|e| e.control.stop());
        if !self.shared.wait_until(state, |s| s.connections.is_empty()) {
            let n = self.connections();
            let text =
                format!("{n} connections have requests that do not end; their threads are left behind");
            self.shared.env.log(0, "nbd", &text);
        }
        self.shared.join_over();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.shared.state.lock();
        f.debug_struct("Server")
            .field("address", &self.address)
            .field("exports", &state.exports.keys().collect::<Vec<_>>())
            .field("connections", &state.connections.len())
            .finish()
    }
}

impl Timing {
    const DEFAULT: Self = Self {
        handshake: Duration::from_secs(30),
        linger: Duration::from_secs(30),
        stop: Duration::from_secs(5),
    };
}

impl Control {
    fn new() -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self { event: EventFd::new()?, stop: AtomicBool::new(false) }))
    }

    /// Asks the connection to end.
    fn stop(&self) {
        // Release: partner of the Acquire in `must_stop`. The fd stays readable for good.
        self.stop.store(true, Ordering::Release);
        self.event.signal();
    }

    /// Whether the connection has to end.
    pub(super) fn must_stop(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Readable once the connection has to end.
    pub(super) fn raw(&self) -> RawFd {
        self.event.raw()
    }
}

impl Shared {
    pub(super) fn env(&self) -> &Arc<Env> {
        &self.env
    }

    pub(super) fn timing(&self) -> &Timing {
        &self.timing
    }

    pub(super) fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    /// Makes connection `id` a client of an export, if that still exists.
    pub(super) fn attach(&self, id: u64, name: &str) -> Option<Arc<Export>> {
        let mut state = self.state.lock();
        let export = state.exports.get(name).cloned()?;
        state.connections.get_mut(&id)?.export = Some(export.clone());
        Some(export)
    }

    /// The accepting thread.
    fn accept_clients(self: &Arc<Self>, listener: &Listener) {
        let mut pause = None;
        while !self.stopping.load(Ordering::Acquire) {
            self.join_over();
            let room = self.state.lock().connections.len() < self.connections_max;
            let interest = Interest { readable: room && pause.is_none(), writable: false };
            let ready = sys::poll([(self.wake.raw(), Interest::READ), (listener.raw(), interest)], pause);
            pause = None;
            match ready {
                Ok([wake, new]) => {
                    if wake.readable {
                        self.wake.clear();
                    }
                    if new.readable
                        && let Err(e) = self.accept_one(listener)
                    {
                        self.env.log(1, "nbd", &format!("cannot accept a connection: {e}"));
                        pause = Some(PAUSE);
                    }
                }
                Err(e) => {
                    self.env.log(0, "nbd", &format!("cannot wait for connections: {e}"));
                    return;
                }
            }
        }
    }

    fn accept_one(self: &Arc<Self>, listener: &Listener) -> io::Result<()> {
        let socket = match listener.accept() {
            Ok(fd) => Socket::from(fd),
            // The client has thought better of it.
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted) => {
                return Ok(());
            }
            Err(e) => return Err(e),
        };
        self.adopt(socket)
    }

    /// Gives a connected client a thread.
    pub(super) fn adopt(self: &Arc<Self>, socket: Socket) -> io::Result<()> {
        let control = Control::new()?;
        let id = {
            let mut state = self.state.lock();
            state.next_id += 1;
            let id = state.next_id;
            state.connections.insert(id, Entry { control: control.clone(), export: None, thread: None });
            id
        };
        let guard = Registration { shared: self.clone(), id };
        let body = Box::new(move || {
            let serve = || session::serve(&guard.shared, id, socket, control);
            if std::panic::catch_unwind(AssertUnwindSafe(serve)).is_err() {
                guard.shared.env.log(0, "nbd", &format!("connection {id} panicked and has been closed"));
            }
            drop(guard);
        });
        // If the thread cannot start, the body is dropped and the guard takes the connection off the list.
        let thread = self.env.runtime.spawn.spawn(&format!("cobweb-nbd-{id}"), body)?;
        let mut state = self.state.lock();
        match state.connections.get_mut(&id) {
            Some(entry) => entry.thread = Some(thread),
            None => state.over.push(thread),
        }
        Ok(())
    }

    fn join_over(&self) {
        let over = std::mem::take(&mut self.state.lock().over);
        over.into_iter().for_each(|t| t.join());
    }

    /// Waits until `done`, within the time that connections are given to end and a little more.
    fn wait_until(&self, mut state: MutexGuard<'_, State>, done: impl Fn(&State) -> bool) -> bool {
        let clock = &self.env.runtime.clock;
        let deadline = clock.now().after(self.timing.stop * 2);
        while !done(&state) {
            let left = deadline.since(clock.now());
            if left.is_zero() {
                return false;
            }
            state = self.ended.wait_timeout(state, left);
        }
        true
    }
}

impl Directory for Shared {
    fn find(&self, name: &str) -> Option<ExportView> {
        let export = self.state.lock().exports.get(name).cloned()?;
        let limits = export.disk.top().map(|n| n.limits());
        let mut flags = ExportFlags::HAS_FLAGS | ExportFlags::SEND_FLUSH | ExportFlags::SEND_FUA;
        if export.writable && limits.is_some_and(|l| !l.read_only) {
            flags |= ExportFlags::SEND_TRIM | ExportFlags::SEND_WRITE_ZEROES | ExportFlags::SEND_FAST_ZERO;
        } else {
            flags |= ExportFlags::READ_ONLY;
        }
        // All connections of an export are queues on one disk, so a flush of one is a flush of all.
        flags.set(ExportFlags::CAN_MULTI_CONN, self.connections_max > 1);
        let align = limits.map_or(1, |l| l.request_align.max(l.opt_transfer));
        let preferred = align.clamp(PREFERRED_MIN, PREFERRED_MAX).next_power_of_two();
        let size = limits.map_or(0, |l| l.size);
        Some(ExportView { description: export.description.clone(), size, flags, preferred })
    }

    fn list(&self) -> Vec<(String, String)> {
        let state = self.state.lock();
        state.exports.values().map(|e| (e.name.clone(), e.description.clone())).collect()
    }
}

/// Takes a connection off the list when its thread ends, whether by return or by panic.
struct Registration {
    shared: Arc<Shared>,
    id: u64,
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        if let Some(thread) = state.connections.remove(&self.id).and_then(|e| e.thread) {
            state.over.push(thread);
        }
        drop(state);
        self.shared.ended.notify_all();
        self.shared.wake.signal();
    }
}

/// How long accepting pauses after an error (no descriptors left, for example).
const PAUSE: Duration = Duration::from_millis(100);
/// Bounds of the preferred request size told to clients.
const PREFERRED_MIN: u32 = 4096;
const PREFERRED_MAX: u32 = 1 << 20;
