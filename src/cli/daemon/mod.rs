//! `cobweb storage-daemon`: the engine behind sockets, for scripts written for QEMU's storage daemon.
//!
//! Start: the command line becomes steps ([`args`]), which are carried out in their order ([`objects`]); then the daemon serves ([`service`]) until a signal
//! (SIGTERM, SIGINT, SIGHUP) or the command `quit`. `cobweb serve` is the same with the steps made for it.
//!
//! Threads: the main one runs the loop and answers commands that cannot block; `cobweb-control` runs those that can; the NBD server and the context have
//! their own. Nobody polls a clock: an idle daemon uses no CPU.
//!
//! Bounds: messages of 1 MiB, 16 monitor connections, 16 MiB waiting for a client that does not read, one command under way per connection.
//! A malformed message gets an error as its answer ([`wire`]).
//!
//! Order of the end: jobs, NBD clients and their server, nodes (each bounded in time), socket files, pid file.
//!
//! Start reading at `service.rs`; commands are in `command.rs`, one line each.

mod address;
mod args;
mod command;
mod event;
mod monitor;
mod objects;
mod service;
mod wire;

pub use wire::fuzz;

pub(super) use address::{parse_address, unix, uri};
pub(super) use objects::{NewExport, Objects};
pub(super) use service::{Monitor, Outcome, Service};

use super::sys::{Side, Signals, detach};
use crate::context::{Context, ContextOptions};
use crate::error::{Error, Result};
use crate::export::nbd::{Address, Listener};
use crate::options::Options;
use crate::sync::Arc;
use args::{CommandLine, HELP, Step};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Most worker threads of the context; as many as there are processors below that.
const WORKERS_MAX: usize = 4;

/// Runs the daemon with the words that follow `storage-daemon`.
pub(super) fn run(words: impl IntoIterator<Item = String>) -> Result<ExitCode> {
    let line = CommandLine::parse(words)?;
    if line.help {
        print!("{HELP}");
        return Ok(ExitCode::SUCCESS);
    }
    if line.version {
        println!("cobweb storage-daemon {}", env!("CARGO_PKG_VERSION"));
        return Ok(ExitCode::SUCCESS);
    }
    let detached = match line.daemonize {
        false => None,
        true => match detach().map_err(|e| Error::os(e, "cannot go into the background"))? {
            Side::Parent(true) => return Ok(ExitCode::SUCCESS),
            // The child has said why.
            Side::Parent(false) => return Ok(ExitCode::FAILURE),
            Side::Child(detached) => Some(detached),
        },
    };
    let signals = catch_signals()?;
    let objects = Arc::new(Objects::new(start_context("storage-daemon")?));
    let monitors = carry_out(&objects, line.steps)?;
    let service = Service::new(objects.clone(), monitors)?;
    let pid_file = line.pid_file.map(PidFile::write).transpose()?;
    if let Some(detached) = detached {
        detached.ready().map_err(|e| Error::os(e, "cannot go into the background"))?;
    }
    let outcome = service.run(&signals)?;
    Ok(end(outcome, objects, pid_file))
}

/// Makes the signals that end the daemon a descriptor. Before any thread is started.
pub(super) fn catch_signals() -> Result<Signals> {
    Signals::catch().map_err(|e| Error::os(e, "cannot catch signals"))
}

/// A context whose warnings go to stderr, started.
pub(super) fn start_context(command: &'static str) -> Result<Arc<Context>> {
    let processors = crate::sync::thread::available_parallelism().map_or(1, usize::from);
    let options = ContextOptions { worker_threads: processors.min(WORKERS_MAX), ..Default::default() };
    let log = move |level: i32, target: &str, text: &str| {
        if level <= 1 {
            say(&format!("cobweb {command}: {target}: {text}"));
        }
    };
    let context = Context::new(options, Some(Box::new(log)))?;
    context.start()?;
    // As QEMU's daemon does (C11).
    context.graph().set_implicit_open(crate::graph::ImplicitOpen::Allow);
    Ok(context)
}

/// Takes everything down after the loop has ended.
pub(super) fn end(outcome: Outcome, objects: Arc<Objects>, pid_file: Option<PidFile>) -> ExitCode {
    drop(pid_file);
    match outcome {
        Outcome::Clean => {
            // The worker has been joined: these are the last ones, and the context ends with them.
            drop(objects);
            ExitCode::SUCCESS
        }
        Outcome::Forced => {
            if let Some(Address::Unix(path)) = objects.server_address() {
                let _ = remove_file(&path);
            }
            say("cobweb: not everything ended in time; it is left behind");
            // Destructors would wait for what does not end.
            std::process::exit(1);
        }
    }
}

/// Makes what the command line describes, in its order.
fn carry_out(objects: &Objects, steps: Vec<Step>) -> Result<Vec<Monitor>> {
    let mut sockets = BTreeMap::new();
    let mut monitors = Vec::new();
    for step in steps {
        let (name, done) = match step {
            Step::Blockdev(o) => ("--blockdev", objects.add_node(o)),
            Step::Object(o) => ("--object", objects.add_object(o)),
            Step::NbdServer(o) => ("--nbd-server", objects.start_server(o, "addr")),
            Step::Export(o) => ("--export", objects.add_export(o)),
            Step::Chardev(o) => ("--chardev", add_socket(&mut sockets, o)),
            Step::Monitor(o) => ("--monitor", add_monitor(&mut sockets, o).map(|m| monitors.push(m))),
        };
        done.map_err(|e| Error::new(e.errno(), e.code(), format!("{name}: {}", e.full_text())))?;
    }
    Ok(monitors)
}

/// Listens for a monitor to come. The daemon never waits for a client before it goes on (`wait=on` makes no difference).
fn add_socket(sockets: &mut BTreeMap<String, Listener>, mut o: Options) -> Result<()> {
    o.require_enum("backend", &["socket"])?;
    let id = o.require_str("id")?;
    objects::check_id(&id)?;
    if !o.take_bool("server")?.unwrap_or(false) {
        return Err(o.invalid("server", "must be on: the daemon does not connect to others"));
    }
    o.take_bool("wait")?;
    let address = match o.take_str("path")? {
        Some(path) => unix(path)?,
        None => {
            let host = o.take_str("host")?.unwrap_or_else(|| "localhost".to_owned());
            let port = o.take_u64_in("port", 0..=65535)?.ok_or_else(|| o.missing("path"))?;
            Address::Tcp(host, u16::try_from(port).unwrap_or_default())
        }
    };
    o.finish()?;
    if sockets.contains_key(&id) {
        return Err(Error::busy(format!("there is a chardev '{id}' already")));
    }
    sockets.insert(id, Listener::bind(&address)?);
    Ok(())
}

fn add_monitor(sockets: &mut BTreeMap<String, Listener>, mut o: Options) -> Result<Monitor> {
    let id = o.require_str("chardev")?;
    o.take_str("id")?;
    o.take_enum("mode", &["control"])?;
    let pretty = o.take_bool("pretty")?.unwrap_or(false);
    o.finish()?;
    match sockets.remove(&id) {
        Some(listener) => Ok(Monitor { listener, pretty }),
        None => Err(Error::not_found(format!("there is no unused chardev '{id}'"))),
    }
}

/// Writes a line to stderr. Whoever reads it may have gone, and that must not end the daemon (the macro of std would).
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// A file with the process id, removed with this object.
#[derive(Debug)]
pub(super) struct PidFile(PathBuf);

impl PidFile {
    #[allow(clippy::disallowed_methods)]
    fn write(path: PathBuf) -> Result<Self> {
        let text = format!("{}\n", std::process::id());
        std::fs::write(&path, text)
            .map_err(|e| Error::os(e, format!("cannot write the pid file '{}'", path.display())))?;
        Ok(Self(path))
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        // Somebody else may have removed it.
        let _ = remove_file(&self.0);
    }
}

// Names of sockets and pid files are not files of the engine, so they do not go through the seam of `io`.
#[allow(clippy::disallowed_methods)]
fn remove_file(path: &Path) -> std::io::Result<()> {
    std::fs::remove_file(path)
}
