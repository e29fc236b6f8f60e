//! Wire structures of the NBD protocol: constants, and pure encoding and decoding.
//!
//! Names follow `doc/proto.md` of the NetworkBlockDevice project without the prefix `NBD_`. All integers travel in big-endian order.
//! Nothing here allocates in proportion to a length that came from the wire; strings are borrowed from the input.

use std::fmt;

/// First word of the server's greeting, "NBDMAGIC".
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second word of the greeting and first word of each option, "IHAVEOPT".
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// First word of each reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// First word of a request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// First word of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// First word of a chunk of a structured reply.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Longest string (export name, description, error message, query) of the protocol, in bytes.
pub const STRING_LEN_MAX: usize = 4096;
/// Zero bytes after the answer to `OPT_EXPORT_NAME` unless both sides set `NO_ZEROES`.
pub const EXPORT_NAME_ZEROES: usize = 124;
/// The one metadata context that the protocol itself defines.
pub const CONTEXT_ALLOCATION: &str = "base:allocation";

bitflags::bitflags! {
    /// Flags of the server's greeting; a client answers with the same bits in 32 bits.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct HandshakeFlags: u16 {
        /// Options other than `OPT_EXPORT_NAME` are understood, and unknown ones are answered.
        const FIXED_NEWSTYLE = 1;
        /// The 124 zero bytes can be left out.
        const NO_ZEROES = 2;
    }

    /// What an export can do.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct ExportFlags: u16 {
        /// Always set.
        const HAS_FLAGS = 1;
        /// Writes are refused.
        const READ_ONLY = 1 << 1;
        /// `CMD_FLUSH`.
        const SEND_FLUSH = 1 << 2;
        /// `CMD_FLAG_FUA`.
        const SEND_FUA = 1 << 3;
        /// `CMD_TRIM`.
        const SEND_TRIM = 1 << 5;
        /// `CMD_WRITE_ZEROES`.
        const SEND_WRITE_ZEROES = 1 << 6;
        /// `CMD_FLAG_DF`; only with structured replies.
        const SEND_DF = 1 << 7;
        /// A flush on one connection covers what was written on the others.
        const CAN_MULTI_CONN = 1 << 8;
        /// `CMD_FLAG_FAST_ZERO`.
        const SEND_FAST_ZERO = 1 << 11;
    }

    /// Flags of a request.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct CommandFlags: u16 {
        /// Durable before the reply.
        const FUA = 1;
        /// Write-zeroes must not deallocate.
        const NO_HOLE = 1 << 1;
        /// Not more than one content chunk.
        const DF = 1 << 2;
        /// Not more than one extent per context.
        const REQ_ONE = 1 << 3;
        /// Write-zeroes fails rather than being as slow as a write.
        const FAST_ZERO = 1 << 4;
    }

    /// Flags of a chunk.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct ChunkFlags: u16 {
        /// The last chunk of its reply.
        const DONE = 1;
    }

    /// Status bits of the context `base:allocation`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct StateFlags: u32 {
        /// Not allocated.
        const HOLE = 1;
        /// Reads as zeros.
        const ZERO = 2;
    }
}

/// Declares an open set of numbers with names: unknown ones survive decoding and are shown as numbers.
macro_rules! numbers {
    ($(#[$doc:meta])* $name:ident: $repr:ty { $($(#[$item_doc:meta])* $item:ident = $value:expr,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash)]
        pub struct $name(pub $repr);

        impl $name {
            $($(#[$item_doc])* pub const $item: Self = Self($value);)+
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match *self {
                    $(Self::$item => f.write_str(stringify!($item)),)+
                    Self(other) => write!(f, "{}({other})", stringify!($name)),
                }
            }
        }
    };
}

numbers! {
    /// Options of the handshake.
    Opt: u32 {
        /// Choose an export without an answer that could carry an error.
        EXPORT_NAME = 1,
        /// End the session.
        ABORT = 2,
        /// List exports.
        LIST = 3,
        /// Begin TLS.
        STARTTLS = 5,
        /// Ask about an export.
        INFO = 6,
        /// Ask about an export and begin transmission.
        GO = 7,
        /// Use structured replies.
        STRUCTURED_REPLY = 8,
        /// List metadata contexts.
        LIST_META_CONTEXT = 9,
        /// Choose metadata contexts.
        SET_META_CONTEXT = 10,
    }
}

numbers! {
    /// Kinds of replies to options.
    Rep: u32 {
        /// Done.
        ACK = 1,
        /// An export of a list.
        SERVER = 2,
        /// A piece of information about an export.
        INFO = 3,
        /// A metadata context.
        META_CONTEXT = 4,
        /// The option is not known.
        ERR_UNSUP = 1 << 31 | 1,
        /// Forbidden here.
        ERR_POLICY = 1 << 31 | 2,
        /// The option's data is malformed, or the option is out of place.
        ERR_INVALID = 1 << 31 | 3,
        /// No such export.
        ERR_UNKNOWN = 1 << 31 | 6,
        /// The server is being shut down.
        ERR_SHUTDOWN = 1 << 31 | 7,
        /// The option's data is too long.
        ERR_TOO_BIG = 1 << 31 | 9,
    }
}

impl Rep {
    /// Whether this is an error reply.
    pub const fn is_error(self) -> bool {
        self.0 >> 31 != 0
    }
}

numbers! {
    /// Kinds of information in [`Rep::INFO`].
    Info: u16 {
        /// Size and flags; always sent.
        EXPORT = 0,
        /// The export's own name.
        NAME = 1,
        /// Text for a person.
        DESCRIPTION = 2,
        /// Smallest, preferred and largest request.
        BLOCK_SIZE = 3,
    }
}

numbers! {
    /// Commands of the transmission phase.
    Command: u16 {
        /// Read.
        READ = 0,
        /// Write; the data follows.
        WRITE = 1,
        /// End the session; has no reply.
        DISC = 2,
        /// Flush.
        FLUSH = 3,
        /// Discard.
        TRIM = 4,
        /// Prefetch.
        CACHE = 5,
        /// Write zeroes.
        WRITE_ZEROES = 6,
        /// Block status.
        BLOCK_STATUS = 7,
    }
}

numbers! {
    /// Kinds of chunks.
    Chunk: u16 {
        /// No content: the end of a reply.
        NONE = 0,
        /// Data at an offset.
        OFFSET_DATA = 1,
        /// Zeros at an offset.
        OFFSET_HOLE = 2,
        /// Extents of one context.
        BLOCK_STATUS = 5,
        /// An error of the whole request.
        ERROR = 1 << 15 | 1,
        /// An error at an offset.
        ERROR_OFFSET = 1 << 15 | 2,
    }
}

numbers! {
    /// Error values of replies.
    Errno: u32 {
        /// Success.
        OK = 0,
        /// Not permitted: a write to a read-only export.
        PERM = 1,
        /// Input or output error.
        IO = 5,
        /// No memory.
        NOMEM = 12,
        /// Invalid request.
        INVAL = 22,
        /// No space, or a write past the end.
        NOSPC = 28,
        /// Too large to be sent unfragmented.
        OVERFLOW = 75,
        /// Not supported (a fast zero that would be slow).
        NOTSUP = 95,
        /// The server is being shut down.
        SHUTDOWN = 108,
    }
}

impl Errno {
    /// The protocol's value for a positive errno of the system. What has no counterpart becomes EIO: the request was valid and has failed.
    pub const fn from_os(errno: i32) -> Self {
        match errno {
            libc::EPERM | libc::EACCES | libc::EROFS => Self::PERM,
            libc::ENOMEM => Self::NOMEM,
            libc::EINVAL => Self::INVAL,
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => Self::NOSPC,
            libc::EOVERFLOW => Self::OVERFLOW,
            libc::ENOTSUP => Self::NOTSUP,
            libc::ESHUTDOWN | libc::ECANCELED => Self::SHUTDOWN,
            _ => Self::IO,
        }
    }

    /// The system's errno (positive) for the protocol's value; EINVAL for values that the protocol does not define.
    pub const fn to_os(self) -> i32 {
        match self {
            Self::OK => 0,
            Self::PERM => libc::EPERM,
            Self::IO => libc::EIO,
            Self::NOMEM => libc::ENOMEM,
            Self::NOSPC => libc::ENOSPC,
            Self::OVERFLOW => libc::EOVERFLOW,
            Self::NOTSUP => libc::ENOTSUP,
            Self::SHUTDOWN => libc::ESHUTDOWN,
            _ => libc::EINVAL,
        }
    }
}

/// The server's first message: two magics (8 bytes each) and flags (2 bytes at 16).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// What the server can do.
    pub flags: HandshakeFlags,
}

impl Greeting {
    /// Bytes on the wire.
    pub const LEN: usize = 18;

    /// The message.
    pub fn encode(self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        b[0..8].copy_from_slice(&INIT_MAGIC.to_be_bytes());
        b[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
        b[16..18].copy_from_slice(&self.flags.bits().to_be_bytes());
        b
    }

    /// The message, or `None` for another magic (oldstyle servers included). Unknown flags are dropped.
    pub fn decode(b: &[u8; Self::LEN]) -> Option<Self> {
        let mut r = Reader::new(b);
        if r.u64()? != INIT_MAGIC || r.u64()? != OPTION_MAGIC {
            return None;
        }
        Some(Self { flags: HandshakeFlags::from_bits_truncate(r.u16()?) })
    }
}

/// Header of an option: magic (8 bytes), option (4), length of the data that follows (4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHeader {
    /// Which option.
    pub option: Opt,
    /// Bytes of data.
    pub len: u32,
}

impl OptionHeader {
    /// Bytes on the wire.
    pub const LEN: usize = 16;

    /// The header.
    pub fn encode(self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        b[0..8].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
        b[8..12].copy_from_slice(&self.option.0.to_be_bytes());
        b[12..16].copy_from_slice(&self.len.to_be_bytes());
        b
    }

    /// The header, or `None` for another magic.
    pub fn decode(b: &[u8; Self::LEN]) -> Option<Self> {
        let mut r = Reader::new(b);
        if r.u64()? != OPTION_MAGIC {
            return None;
        }
        Some(Self { option: Opt(r.u32()?), len: r.u32()? })
    }
}

/// Header of a reply to an option: magic (8 bytes), option (4), kind (4), length of the data that follows (4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionReplyHeader {
    /// The option that is answered.
    pub option: Opt,
    /// Kind of reply.
    pub reply: Rep,
    /// Bytes of data.
    pub len: u32,
}

impl OptionReplyHeader {
    /// Bytes on the wire.
    pub const LEN: usize = 20;

    /// The header.
    pub fn encode(self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        b[0..8].copy_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
        b[8..12].copy_from_slice(&self.option.0.to_be_bytes());
        b[12..16].copy_from_slice(&self.reply.0.to_be_bytes());
        b[16..20].copy_from_slice(&self.len.to_be_bytes());
        b
    }

    /// The header, or `None` for another magic.
    pub fn decode(b: &[u8; Self::LEN]) -> Option<Self> {
        let mut r = Reader::new(b);
        if r.u64()? != OPTION_REPLY_MAGIC {
            return None;
        }
        Some(Self { option: Opt(r.u32()?), reply: Rep(r.u32()?), len: r.u32()? })
    }
}

/// Header of a request: magic (4 bytes), flags (2), command (2), cookie (8), offset (8), length (4). A write's data follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// Command flags as sent; may hold unknown bits.
    pub flags: u16,
    /// What to do.
    pub command: Command,
    /// Chosen by the client, returned with the reply.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u32,
}

impl RequestHeader {
    /// Bytes on the wire.
    pub const LEN: usize = 28;

    /// The header.
    pub fn encode(self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        b[0..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        b[4..6].copy_from_slice(&self.flags.to_be_bytes());
        b[6..8].copy_from_slice(&self.command.0.to_be_bytes());
        b[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        b[16..24].copy_from_slice(&self.offset.to_be_bytes());
        b[24..28].copy_from_slice(&self.len.to_be_bytes());
        b
    }

    /// The header, or `None` for another magic: the stream is out of step and cannot be used any more.
    pub fn decode(b: &[u8; Self::LEN]) -> Option<Self> {
        let mut r = Reader::new(b);
        if r.u32()? != REQUEST_MAGIC {
            return None;
        }
        Some(Self {
            flags: r.u16()?,
            command: Command(r.u16()?),
            cookie: r.u64()?,
            offset: r.u64()?,
            len: r.u32()?,
        })
    }
}

/// A simple reply: magic (4 bytes), error (4), cookie (8). The data of a successful read follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimpleReply {
    /// Error, or [`Errno::OK`].
    pub error: Errno,
    /// Of the request.
    pub cookie: u64,
}

impl SimpleReply {
    /// Bytes on the wire.
    pub const LEN: usize = 16;

    /// The reply.
    pub fn encode(self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        b[0..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
        b[4..8].copy_from_slice(&self.error.0.to_be_bytes());
        b[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        b
    }

    /// The reply, or `None` for another magic.
    pub fn decode(b: &[u8; Self::LEN]) -> Option<Self> {
        let mut r = Reader::new(b);
        if r.u32()? != SIMPLE_REPLY_MAGIC {
            return None;
        }
        Some(Self { error: Errno(r.u32()?), cookie: r.u64()? })
    }
}

/// Header of a chunk of a structured reply: magic (4 bytes), flags (2), kind (2), cookie (8), length of the payload that follows (4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkHeader {
    /// Whether this is the last chunk.
    pub flags: ChunkFlags,
    /// Kind.
    pub kind: Chunk,
    /// Of the request.
    pub cookie: u64,
    /// Bytes of payload.
    pub len: u32,
}

impl ChunkHeader {
    /// Bytes on the wire.
    pub const LEN: usize = 20;

    /// The header.
    pub fn encode(self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        b[0..4].copy_from_slice(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
        b[4..6].copy_from_slice(&self.flags.bits().to_be_bytes());
        b[6..8].copy_from_slice(&self.kind.0.to_be_bytes());
        b[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        b[16..20].copy_from_slice(&self.len.to_be_bytes());
        b
    }

    /// The header, or `None` for another magic. Unknown flags are dropped.
    pub fn decode(b: &[u8; Self::LEN]) -> Option<Self> {
        let mut r = Reader::new(b);
        if r.u32()? != STRUCTURED_REPLY_MAGIC {
            return None;
        }
        Some(Self {
            flags: ChunkFlags::from_bits_truncate(r.u16()?),
            kind: Chunk(r.u16()?),
            cookie: r.u64()?,
            len: r.u32()?,
        })
    }
}

/// Size and flags of an export, as [`Info::EXPORT`] and the answer to `OPT_EXPORT_NAME` carry them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportSize {
    /// Bytes.
    pub size: u64,
    /// What it can do.
    pub flags: ExportFlags,
}

impl ExportSize {
    /// Bytes on the wire.
    pub const LEN: usize = 10;

    /// Size (8 bytes) and flags (2).
    pub fn encode(self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        b[0..8].copy_from_slice(&self.size.to_be_bytes());
        b[8..10].copy_from_slice(&self.flags.bits().to_be_bytes());
        b
    }

    /// The pair. Unknown flags are dropped.
    pub fn decode(b: &[u8; Self::LEN]) -> Option<Self> {
        let mut r = Reader::new(b);
        Some(Self { size: r.u64()?, flags: ExportFlags::from_bits_truncate(r.u16()?) })
    }
}

/// Reads fields from a slice; every method answers `None` once the slice is too short.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// A reader at the start of `bytes`.
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// Whether everything has been read.
    pub const fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// Bytes left.
    pub const fn remaining(&self) -> usize {
        self.rest.len()
    }

    /// 16 bits.
    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    /// 32 bits.
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    /// 64 bits.
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// The next `len` bytes.
    pub fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.rest.split_at_checked(len)?;
        self.rest = rest;
        Some(head)
    }

    /// A string of `len` bytes: UTF-8, not longer than the protocol allows.
    pub fn str(&mut self, len: usize) -> Option<&'a str> {
        if len > STRING_LEN_MAX {
            return None;
        }
        std::str::from_utf8(self.bytes(len)?).ok()
    }

    /// A string behind its length in 32 bits.
    pub fn counted_str(&mut self) -> Option<&'a str> {
        let len = self.u32()?;
        self.str(usize::try_from(len).ok()?)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.rest.split_first_chunk::<N>()?;
        self.rest = rest;
        Some(*head)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn request_header_has_the_layout_of_the_specification() {
        let h = RequestHeader {
            flags: 0x0102,
            command: Command::BLOCK_STATUS,
            cookie: 0x1112_1314_1516_1718,
            offset: 0x2122_2324_2526_2728,
            len: 0x3132_3334,
        };
        let expected = [
            0x25, 0x60, 0x95, 0x13, 0x01, 0x02, 0x00, 0x07, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18,
            0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0x28, 0x31, 0x32, 0x33, 0x34,
        ];
        assert_eq!(h.encode(), expected);
    }

    #[test]
    fn greeting_spells_the_two_magics() {
        let g = Greeting { flags: HandshakeFlags::all() }.encode();
        assert_eq!(&g[..16], b"NBDMAGICIHAVEOPT");
        assert_eq!(&g[16..], [0, 3]);
    }

    #[test]
    fn errno_values_survive_the_way_to_the_system_and_back() {
        for e in [
            Errno::PERM,
            Errno::IO,
            Errno::NOMEM,
            Errno::INVAL,
            Errno::NOSPC,
            Errno::OVERFLOW,
            Errno::NOTSUP,
            Errno::SHUTDOWN,
        ] {
            assert_eq!(Errno::from_os(e.to_os()), e);
        }
        assert_eq!(Errno::from_os(libc::EDQUOT), Errno::NOSPC);
        assert_eq!(Errno::from_os(libc::ETIMEDOUT), Errno::IO);
        assert_eq!(Errno(77).to_os(), libc::EINVAL);
    }

    #[test]
    fn unknown_numbers_print_as_numbers() {
        assert_eq!(format!("{:?} {:?}", Command::TRIM, Command(99)), "TRIM Command(99)");
        assert!(Rep::ERR_TOO_BIG.is_error() && !Rep::ACK.is_error());
    }

    #[test]
    fn strings_past_the_limit_or_the_input_are_refused() {
        let long = vec![b'a'; STRING_LEN_MAX + 1];
        assert_eq!(Reader::new(&long).str(STRING_LEN_MAX).map(str::len), Some(STRING_LEN_MAX));
        assert_eq!(Reader::new(&long).str(STRING_LEN_MAX + 1), None);
        assert_eq!(Reader::new(b"\0\0\0\x04abc").counted_str(), None);
        assert_eq!(Reader::new(b"\0\0\0\x02\xff\xff").counted_str(), None);
        assert_eq!(Reader::new(b"\0\0\0\x03abc").counted_str(), Some("abc"));
    }

    proptest! {
        #[test]
        fn every_structure_survives_encoding_and_decoding(
            a: u32, b: u32, c: u64, d: u64, flags: u16, kind: u16,
        ) {
            let greeting = Greeting { flags: HandshakeFlags::from_bits_truncate(flags) };
            prop_assert_eq!(Greeting::decode(&greeting.encode()), Some(greeting));
            let option = OptionHeader { option: Opt(a), len: b };
            prop_assert_eq!(OptionHeader::decode(&option.encode()), Some(option));
            let reply = OptionReplyHeader { option: Opt(a), reply: Rep(b), len: a ^ b };
            prop_assert_eq!(OptionReplyHeader::decode(&reply.encode()), Some(reply));
            let request = RequestHeader { flags, command: Command(kind), cookie: c, offset: d, len: a };
            prop_assert_eq!(RequestHeader::decode(&request.encode()), Some(request));
            let simple = SimpleReply { error: Errno(a), cookie: c };
            prop_assert_eq!(SimpleReply::decode(&simple.encode()), Some(simple));
            let flags = ChunkFlags::from_bits_truncate(flags);
            let chunk = ChunkHeader { flags, kind: Chunk(kind), cookie: c, len: b };
            prop_assert_eq!(ChunkHeader::decode(&chunk.encode()), Some(chunk));
            let size = ExportSize { size: d, flags: ExportFlags::from_bits_truncate(kind) };
            prop_assert_eq!(ExportSize::decode(&size.encode()), Some(size));
        }

        #[test]
        fn decoding_random_bytes_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let mut r = Reader::new(&bytes);
            let _ = (r.counted_str(), r.u16(), r.u64(), r.str(3), r.u32());
            prop_assert!(r.remaining() <= bytes.len());
            if let Some(head) = bytes.first_chunk() {
                prop_assert!(RequestHeader::decode(head).is_none_or(|h| h.encode() == *head));
            }
        }
    }
}
