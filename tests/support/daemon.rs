//! A daemon under test and a QMP client.

use serde_json::{Value, json};
use std::collections::VecDeque;
use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The program.
pub const COBWEB: &str = env!("CARGO_BIN_EXE_cobweb");
/// How long anything may take before a test gives up; far more than it takes.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A running `cobweb storage-daemon` with a monitor, in a directory of its own.
pub struct Daemon {
    child: Child,
    dir: tempfile::TempDir,
    /// The monitor's socket.
    pub qmp: PathBuf,
}

impl Daemon {
    /// Starts one; `@/` in its arguments stands for its directory. Returns when it is up.
    pub fn start(args: &[&str]) -> Self {
        Self::start_in(tempfile::tempdir().expect("tempdir"), args)
    }

    /// Starts one in a directory that has been prepared.
    pub fn start_in(dir: tempfile::TempDir, args: &[&str]) -> Self {
        let at = |name: &str| dir.path().join(name);
        let here = format!("{}/", dir.path().display());
        let (qmp, pid) = (at("qmp"), at("pid"));
        let fifo = CString::new(pid.as_os_str().as_bytes()).expect("a path");
        // SAFETY: a NUL-terminated path.
        assert_eq!(unsafe { libc::mkfifo(fifo.as_ptr(), 0o600) }, 0);
        // The daemon writes its pid when it is up, so reading it is waiting for that.
        let mut up = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&pid).expect("fifo");
        let mut child = Command::new(COBWEB)
            .arg("storage-daemon")
            .args(args.iter().map(|a| a.replace("@/", &here)))
            .args(["--chardev", &format!("socket,id=q,path={here}qmp,server=on,wait=off"), "--monitor", "q"])
            .arg("--pidfile")
            .arg(&pid)
            .stdout(Stdio::piped())
            .spawn()
            .expect("start the daemon");
        wait_for(&up, child.stdout.as_ref().map(|s| s.as_raw_fd()));
        let mut text = String::new();
        up.read_to_string(&mut text).expect("read the pid");
        let id = child.id().to_string();
        if text.trim() != id {
            let _ = child.kill();
            panic!("the daemon did not come up: {:?}", child.wait());
        }
        Self { child, dir, qmp }
    }

    /// A path in the daemon's directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Sends a signal.
    pub fn signal(&self, signal: i32) {
        // SAFETY: no pointers; the process is our child and has not been waited for.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills it, so that it can do nothing more; its directory.
    pub fn kill(mut self) -> tempfile::TempDir {
        self.signal(libc::SIGKILL);
        let status = self.child.wait().expect("wait");
        assert_eq!(status.signal(), Some(libc::SIGKILL), "it had not ended by itself");
        std::mem::replace(&mut self.dir, tempfile::tempdir().expect("tempdir"))
    }

    /// Waits for the end of a daemon that has been told to end: a success that leaves neither sockets nor the pid file.
    pub fn assert_ends_cleanly(mut self) {
        self.assert_ended();
    }

    /// The same, and its directory stays for a look at the files.
    pub fn assert_ended(&mut self) {
        let status = self.child.wait().expect("wait");
        assert!(status.success(), "{status}");
        for name in ["qmp", "nbd", "pid"] {
            assert!(!self.path(name).exists(), "{name} is left behind");
        }
    }

    /// CPU time used so far, in clock ticks.
    pub fn cpu_ticks(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).expect("stat");
        let (_, fields) = stat.rsplit_once(')').expect("the name ends");
        let fields: Vec<&str> = fields.split_whitespace().collect();
        [11, 12].iter().map(|n| fields[*n].parse::<u64>().expect("a number")).sum()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // After a clean end there is nothing to kill.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until the daemon has written to its pid file, or has closed its output, which means that it has ended.
fn wait_for(up: &File, output: Option<i32>) {
    let watch = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let mut fds = [watch(up.as_raw_fd()), watch(output.unwrap_or(-1))];
    let ms = PATIENCE.as_millis() as i32;
    // SAFETY: two descriptors, both open.
    let n = unsafe { libc::poll(fds.as_mut_ptr(), 2, ms) };
    assert!(n > 0, "nothing came of the daemon");
    // From here on reads wait for the writer to close; without one they end at once.
    // SAFETY: an open descriptor, no pointers.
    assert_eq!(unsafe { libc::fcntl(up.as_raw_fd(), libc::F_SETFL, 0) }, 0);
}

/// A QMP client that has negotiated.
pub struct Qmp {
    stream: UnixStream,
    lines: BufReader<UnixStream>,
    events: VecDeque<Value>,
}

impl Qmp {
    /// Connects and negotiates.
    pub fn connect(path: &Path) -> Self {
        let stream = UnixStream::connect(path).expect("connect to the monitor");
        stream.set_read_timeout(Some(PATIENCE)).expect("timeout");
        let lines = BufReader::new(stream.try_clone().expect("clone"));
        let mut new = Self { stream, lines, events: VecDeque::new() };
        let greeting = new.message();
        assert!(greeting["QMP"].is_object(), "{greeting}");
        new.ok("qmp_capabilities", json!({}));
        new
    }

    /// Runs a command; the answer, whatever it is.
    pub fn command(&mut self, name: &str, arguments: Value) -> Value {
        let text = json!({"execute": name, "arguments": arguments}).to_string();
        self.stream.write_all(text.as_bytes()).expect("write");
        loop {
            let message = self.message();
            if message["event"].is_null() {
                return message;
            }
            self.events.push_back(message);
        }
    }

    /// Runs a command that must succeed; what it returns.
    pub fn ok(&mut self, name: &str, arguments: Value) -> Value {
        let mut answer = self.command(name, arguments);
        assert!(answer["error"].is_null(), "{name}: {answer}");
        answer["return"].take()
    }

    /// The next event of this name; others before it are dropped.
    pub fn event(&mut self, name: &str) -> Value {
        loop {
            let event = self.events.pop_front().unwrap_or_else(|| self.message());
            assert!(event["timestamp"]["microseconds"].is_u64(), "{event}");
            if event["event"] == name {
                return event;
            }
        }
    }

    /// The states that a job goes through up to `last`; other events are dropped.
    pub fn statuses_until(&mut self, id: &str, last: &str) -> Vec<String> {
        let mut all = Vec::new();
        loop {
            let event = self.event("JOB_STATUS_CHANGE");
            if event["data"]["id"] == id {
                all.push(event["data"]["status"].as_str().expect("a status").to_owned());
                if all.last().is_some_and(|s| s == last) {
                    return all;
                }
            }
        }
    }

    /// A job as `query-jobs` shows it.
    pub fn job(&mut self, id: &str) -> Value {
        let jobs = self.ok("query-jobs", json!({}));
        let found = jobs.as_array().expect("a list").iter().find(|j| j["id"] == id);
        found.unwrap_or_else(|| panic!("no job '{id}' in {jobs}")).clone()
    }

    /// Waits until the daemon closes the connection.
    pub fn assert_closed(&mut self) {
        let mut rest = String::new();
        self.lines.read_to_string(&mut rest).expect("the end of the stream");
    }

    fn message(&mut self) -> Value {
        let mut line = String::new();
        let n = self.lines.read_line(&mut line).expect("a message of the daemon");
        assert!(n > 0, "the daemon has closed the monitor");
        serde_json::from_str(&line).expect("JSON")
    }
}
