//! The two error types.
//!
//! [`IoError`] is what a request ends with: small, `Copy`, made without allocation. [`Error`] is what a control call
//! (open, insert, start a job) returns: a kind, a sentence for a person, and the cause. Both carry an errno and a
//! stable [`Code`]; the C ABI hands out exactly these two numbers.

use std::fmt;

/// Result of a request.
pub type IoResult<T = ()> = std::result::Result<T, IoError>;
/// Result of a control call.
pub type Result<T> = std::result::Result<T, Error>;

/// Stable code of an error, finer than errno. Numbers are used once and never change meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
#[repr(u32)]
pub enum Code {
    /// No error.
    None = 0,
    /// The system call or backend failed; errno says how.
    Io = 1,
    /// The request or option is not valid.
    Invalid = 2,
    /// The operation is not supported by the node.
    Unsupported = 3,
    /// Cancelled by the caller.
    Cancelled = 4,
    /// A range past the end of the disk.
    OutOfRange = 5,
    /// The node does not allow writes.
    ReadOnly = 6,
    /// No medium: the disk has no root node.
    NoMedium = 7,
    /// The named object does not exist.
    NotFound = 8,
    /// The name or the node is in use.
    Busy = 9,
    /// A copy for a guest write failed and the policy is `break-guest-write` (S27, S30).
    CbwFailed = 10,
    /// A copy for a guest write took longer than `cbw-timeout` (S34).
    CbwTimeout = 11,
    /// The snapshot was broken earlier.
    SnapshotBroken = 12,
    /// The range was lost (loss scope `range`, S50).
    RangeLost = 13,
    /// The range is not part of the snapshot, or was discarded by the reader (RELEASED).
    Released = 14,
    /// The RAM cache is full and the policy is not to wait.
    CacheFull = 15,
    /// The spill file is full or failed.
    SpillFull = 16,
    /// Reading old data from the source failed.
    ReadFailed = 17,
    /// Writing old data to the target failed.
    TargetFailed = 18,
    /// A panic was caught; the node is unusable.
    Panicked = 19,
    /// The object belongs to a process that has forked.
    Forked = 20,
    /// The injected error of a `fault` node.
    Injected = 21,
    /// A backup ended without a complete copy.
    Incomplete = 22,
}

impl Code {
    /// Every code, for tables and tests.
    pub const ALL: &'static [Code] = &[
        Code::None,
        Code::Io,
        Code::Invalid,
        Code::Unsupported,
        Code::Cancelled,
        Code::OutOfRange,
        Code::ReadOnly,
        Code::NoMedium,
        Code::NotFound,
        Code::Busy,
        Code::CbwFailed,
        Code::CbwTimeout,
        Code::SnapshotBroken,
        Code::RangeLost,
        Code::Released,
        Code::CacheFull,
        Code::SpillFull,
        Code::ReadFailed,
        Code::TargetFailed,
        Code::Panicked,
        Code::Forked,
        Code::Injected,
        Code::Incomplete,
    ];

    /// The code's name as it appears in reports and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Code::None => "none",
            Code::Io => "io",
            Code::Invalid => "invalid",
            Code::Unsupported => "unsupported",
            Code::Cancelled => "cancelled",
            Code::OutOfRange => "out-of-range",
            Code::ReadOnly => "read-only",
            Code::NoMedium => "no-medium",
            Code::NotFound => "not-found",
            Code::Busy => "busy",
            Code::CbwFailed => "cbw-failed",
            Code::CbwTimeout => "cbw-timeout",
            Code::SnapshotBroken => "snapshot-broken",
            Code::RangeLost => "range-lost",
            Code::Released => "released",
            Code::CacheFull => "cache-full",
            Code::SpillFull => "spill-full",
            Code::ReadFailed => "read-failed",
            Code::TargetFailed => "target-failed",
            Code::Panicked => "panicked",
            Code::Forked => "forked",
            Code::Injected => "injected",
            Code::Incomplete => "incomplete",
        }
    }
}

/// Error of one request: a positive errno and a [`Code`].
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct IoError {
    /// Positive errno value.
    pub errno: i32,
    /// Our own, finer code.
    pub code: Code,
}

impl IoError {
    /// An error with its own code.
    pub const fn new(errno: i32, code: Code) -> Self {
        Self { errno, code }
    }

    /// A plain system error.
    pub const fn os(errno: i32) -> Self {
        Self { errno, code: Code::Io }
    }

    /// EINVAL.
    pub const fn invalid() -> Self {
        Self::new(libc::EINVAL, Code::Invalid)
    }

    /// ENOTSUP.
    pub const fn unsupported() -> Self {
        Self::new(libc::ENOTSUP, Code::Unsupported)
    }

    /// ECANCELED.
    pub const fn cancelled() -> Self {
        Self::new(libc::ECANCELED, Code::Cancelled)
    }

    /// The error of a request that reaches past the end of its disk.
    pub const fn out_of_range() -> Self {
        Self::new(libc::EIO, Code::OutOfRange)
    }

    /// A write to something read-only.
    pub const fn read_only() -> Self {
        Self::new(libc::EACCES, Code::ReadOnly)
    }

    /// A caught panic.
    pub const fn panicked() -> Self {
        Self::new(libc::ENOTRECOVERABLE, Code::Panicked)
    }
}

impl fmt::Debug for IoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IoError({}, {})", self.code.name(), self)
    }
}

impl fmt::Display for IoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&std::io::Error::from_raw_os_error(self.errno), f)
    }
}

impl std::error::Error for IoError {}

impl From<std::io::Error> for IoError {
    fn from(e: std::io::Error) -> Self {
        Self::os(e.raw_os_error().unwrap_or(libc::EIO))
    }
}

/// Error of a control call. `Display` is one sentence without the cause; the cause is `source()`.
#[derive(Debug)]
pub struct Error {
    io: IoError,
    message: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// An error from its parts.
    pub fn new(errno: i32, code: Code, message: impl Into<String>) -> Self {
        Self { io: IoError::new(errno, code), message: message.into(), source: None }
    }

    /// EINVAL with a message that names what is wrong.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(libc::EINVAL, Code::Invalid, message)
    }

    /// ENOTSUP.
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(libc::ENOTSUP, Code::Unsupported, message)
    }

    /// ENOENT for a name that does not exist.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(libc::ENOENT, Code::NotFound, message)
    }

    /// EBUSY.
    pub fn busy(message: impl Into<String>) -> Self {
        Self::new(libc::EBUSY, Code::Busy, message)
    }

    /// A request's error with the sentence that says what was tried.
    pub fn io(error: IoError, message: impl Into<String>) -> Self {
        Self { io: error, message: message.into(), source: Some(Box::new(error)) }
    }

    /// A system error with the sentence that says what was tried.
    pub fn os(error: std::io::Error, message: impl Into<String>) -> Self {
        Self {
            io: IoError::from(std::io::Error::from_raw_os_error(error.raw_os_error().unwrap_or(libc::EIO))),
            message: message.into(),
            source: Some(Box::new(error)),
        }
    }

    /// Positive errno value.
    pub fn errno(&self) -> i32 {
        self.io.errno
    }

    /// Our own code.
    pub fn code(&self) -> Code {
        self.io.code
    }

    /// The two numbers without the text.
    pub fn as_io(&self) -> IoError {
        self.io
    }

    /// The sentence and, after a colon, its causes: what a command prints.
    pub fn full_text(&self) -> String {
        let mut text = self.message.clone();
        let mut cause = std::error::Error::source(self);
        while let Some(e) = cause {
            text.push_str(": ");
            text.push_str(&e.to_string());
            cause = e.source();
        }
        text
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|e| e as _)
    }
}
