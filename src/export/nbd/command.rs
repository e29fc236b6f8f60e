//! Commands: whether a request may be carried out, and as what. Pure.

use crate::io::nbd::proto::{Command, CommandFlags, Errno, RequestHeader};
use crate::limits::{NBD_PAYLOAD_MAX, NBD_PIECE_LEN};
use crate::request::Flags;
use crate::units::ByteRange;

/// What a connection may do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    /// Bytes of the export as of now.
    pub(super) size: u64,
    pub(super) read_only: bool,
    pub(super) structured: bool,
    /// `base:allocation` was selected.
    pub(super) allocation: bool,
}

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The client says goodbye.
    Disconnect,
    /// It is answered with this error; `payload` bytes that follow the header are not looked at.
    Refuse { error: Errno, why: &'static str, payload: u32 },
    /// It is carried out on `range`.
    Run { action: Action, range: ByteRange },
}

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// `whole`: as one content chunk.
    Read {
        whole: bool,
    },
    Write {
        fua: bool,
    },
    Flush,
    Trim {
        fua: bool,
    },
    WriteZeroes {
        flags: Flags,
    },
    BlockStatus {
        one: bool,
    },
}

/// Judges one request. Its range lies inside the export if it is to be run; it may be empty.
pub(super) fn judge(h: &RequestHeader, rules: &Rules) -> Verdict {
    let payload = if h.command == Command::WRITE { h.len } else { 0 };
    let refuse = |error, why| Verdict::Refuse { error, why, payload };
    let allowed = match h.command {
        Command::DISC => return Verdict::Disconnect,
        Command::READ if rules.structured => CommandFlags::DF,
        Command::WRITE_ZEROES => CommandFlags::NO_HOLE | CommandFlags::FAST_ZERO,
        Command::BLOCK_STATUS => CommandFlags::REQ_ONE,
        Command::READ | Command::WRITE | Command::FLUSH | Command::TRIM => CommandFlags::empty(),
        _ => return refuse(Errno::INVAL, "the command is not known"),
    };
    let flags = match CommandFlags::from_bits(h.flags) {
        Some(flags) if (allowed | CommandFlags::FUA).contains(flags) => flags,
        _ => return refuse(Errno::INVAL, "a flag is not known or does not go with the command"),
    };
    if rules.read_only && matches!(h.command, Command::WRITE | Command::TRIM | Command::WRITE_ZEROES) {
        return refuse(Errno::PERM, "the export is read-only");
    }
    if matches!(h.command, Command::READ | Command::WRITE) && h.len > NBD_PAYLOAD_MAX {
        return refuse(Errno::INVAL, "the request is longer than 32 MiB");
    }
    if h.command == Command::FLUSH {
        // Offset and length are reserved; clients that fill them in mean no harm.
        return Verdict::Run { action: Action::Flush, range: ByteRange { offset: 0, len: 0 } };
    }
    let range = match ByteRange::new(h.offset, u64::from(h.len)) {
        Some(range) if range.end() <= rules.size => range,
        _ if matches!(h.command, Command::WRITE | Command::WRITE_ZEROES) => {
            return refuse(Errno::NOSPC, "the range reaches past the end of the export");
        }
        _ => return refuse(Errno::INVAL, "the range reaches past the end of the export"),
    };
    let fua = flags.contains(CommandFlags::FUA);
    let action = match h.command {
        Command::READ => {
            let whole = flags.contains(CommandFlags::DF);
            if whole && h.len as usize > NBD_PIECE_LEN {
                return refuse(Errno::OVERFLOW, "the read is too long to be sent unfragmented");
            }
            Action::Read { whole }
        }
        Command::WRITE => Action::Write { fua },
        Command::TRIM => Action::Trim { fua },
        Command::WRITE_ZEROES => Action::WriteZeroes { flags: zero_flags(flags) },
        _ => {
            if !rules.allocation {
                return refuse(Errno::INVAL, "no metadata context was selected");
            }
            if range.is_empty() {
                return refuse(Errno::INVAL, "the range is empty");
            }
            Action::BlockStatus { one: flags.contains(CommandFlags::REQ_ONE) }
        }
    };
    Verdict::Run { action, range }
}

fn zero_flags(flags: CommandFlags) -> Flags {
    let mut f = Flags::empty();
    f.set(Flags::FUA, flags.contains(CommandFlags::FUA));
    f.set(Flags::MAY_UNMAP, !flags.contains(CommandFlags::NO_HOLE));
    f.set(Flags::NO_FALLBACK, flags.contains(CommandFlags::FAST_ZERO));
    f
}

/// Judges every header in `data` under rules taken from its first bytes, and checks what a verdict promises. Returns the number of headers that may run.
pub fn fuzz(data: &[u8]) -> usize {
    let Some((first, rest)) = data.split_first_chunk::<9>() else { return 0 };
    let size = u64::from_be_bytes(*first.first_chunk().unwrap_or(&[0; 8])) >> (first[8] & 63);
    let rules = Rules {
        size: size & i64::MAX as u64,
        read_only: first[8] & 1 != 0,
        structured: first[8] & 2 != 0,
        allocation: first[8] & 4 != 0,
    };
    let mut run = 0;
    for chunk in rest.chunks_exact(RequestHeader::LEN) {
        let Some(mut head) = chunk.first_chunk::<{ RequestHeader::LEN }>().copied() else { continue };
        // Random bytes hardly ever hold the magic; what is behind it is what matters.
        head[..4].copy_from_slice(&crate::io::nbd::proto::REQUEST_MAGIC.to_be_bytes());
        let Some(h) = RequestHeader::decode(&head) else { continue };
        match judge(&h, &rules) {
            Verdict::Disconnect => assert_eq!(h.command, Command::DISC),
            Verdict::Refuse { error, payload, .. } => {
                assert_ne!(error, Errno::OK);
                assert_eq!(payload, if h.command == Command::WRITE { h.len } else { 0 });
            }
            Verdict::Run { action, range } => {
                assert!(range.end() <= rules.size);
                let changes =
                    matches!(action, Action::Write { .. } | Action::Trim { .. } | Action::WriteZeroes { .. });
                assert!(!(changes && rules.read_only));
                let carries = matches!(action, Action::Read { .. } | Action::Write { .. });
                assert!(!carries || range.len <= u64::from(NBD_PAYLOAD_MAX));
                run += 1;
            }
        }
    }
    run
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RULES: Rules = Rules { size: 10_000, read_only: false, structured: true, allocation: true };

    fn header(command: Command, flags: u16, offset: u64, len: u32) -> RequestHeader {
        RequestHeader { flags, command, cookie: 7, offset, len }
    }

    fn error(h: RequestHeader, rules: Rules) -> Option<Errno> {
        match judge(&h, &rules) {
            Verdict::Refuse { error, payload, .. } => {
                assert_eq!(payload, if h.command == Command::WRITE { h.len } else { 0 });
                Some(error)
            }
            _ => None,
        }
    }

    #[test]
    fn ranges_past_the_end_are_refused_with_the_error_of_the_command() {
        for (command, expected) in [
            (Command::READ, Errno::INVAL),
            (Command::WRITE, Errno::NOSPC),
            (Command::TRIM, Errno::INVAL),
            (Command::WRITE_ZEROES, Errno::NOSPC),
            (Command::BLOCK_STATUS, Errno::INVAL),
        ] {
            assert_eq!(error(header(command, 0, 9_000, 1_000), RULES), None);
            for (offset, len) in [(9_000, 1_001), (10_000, 1), (u64::MAX, 1), (u64::MAX - 3, 100)] {
                assert_eq!(error(header(command, 0, offset, len), RULES), Some(expected), "{command:?}");
            }
        }
    }

    #[test]
    fn a_read_only_export_refuses_every_change_and_nothing_else() {
        let rules = Rules { read_only: true, ..RULES };
        for command in [Command::WRITE, Command::TRIM, Command::WRITE_ZEROES] {
            assert_eq!(error(header(command, 0, 0, 512), rules), Some(Errno::PERM));
        }
        for command in [Command::READ, Command::FLUSH, Command::BLOCK_STATUS] {
            assert_eq!(error(header(command, 0, 0, 512), rules), None);
        }
    }

    #[test]
    fn data_is_limited_to_32_mib_but_zeroes_and_trim_are_not() {
        let rules = Rules { size: 1 << 40, ..RULES };
        for command in [Command::READ, Command::WRITE] {
            assert_eq!(error(header(command, 0, 0, NBD_PAYLOAD_MAX), rules), None);
            assert_eq!(error(header(command, 0, 0, NBD_PAYLOAD_MAX + 1), rules), Some(Errno::INVAL));
        }
        for command in [Command::TRIM, Command::WRITE_ZEROES, Command::BLOCK_STATUS] {
            assert_eq!(error(header(command, 0, 0, u32::MAX), rules), None);
        }
    }

    #[test]
    fn every_flag_goes_with_its_command_only_and_fua_with_all() {
        let fits = |command, bit| match bit {
            0 => true,
            1 | 4 => command == Command::WRITE_ZEROES,
            2 => command == Command::READ,
            3 => command == Command::BLOCK_STATUS,
            _ => false,
        };
        for command in [
            Command::READ,
            Command::WRITE,
            Command::FLUSH,
            Command::TRIM,
            Command::WRITE_ZEROES,
            Command::BLOCK_STATUS,
        ] {
            for bit in 0..16 {
                let got = error(header(command, 1 << bit, 0, 512), RULES);
                let expected = (!fits(command, bit)).then_some(Errno::INVAL);
                assert_eq!(got, expected, "{command:?} with bit {bit}");
            }
        }
        let rules = Rules { structured: false, ..RULES };
        assert_eq!(error(header(Command::READ, 4, 0, 512), rules), Some(Errno::INVAL));
    }

    #[test]
    fn unknown_commands_and_status_without_context_are_invalid() {
        for command in [Command::CACHE, Command(8), Command(u16::MAX)] {
            assert_eq!(error(header(command, 0, 0, 512), RULES), Some(Errno::INVAL));
        }
        let rules = Rules { allocation: false, ..RULES };
        assert_eq!(error(header(Command::BLOCK_STATUS, 0, 0, 512), rules), Some(Errno::INVAL));
        assert_eq!(error(header(Command::BLOCK_STATUS, 0, 0, 0), RULES), Some(Errno::INVAL));
    }

    #[test]
    fn a_long_unfragmented_read_overflows() {
        let rules = Rules { size: 1 << 40, ..RULES };
        let piece = u32::try_from(NBD_PIECE_LEN).expect("small");
        assert_eq!(error(header(Command::READ, 4, 0, piece), rules), None);
        assert_eq!(error(header(Command::READ, 4, 0, piece + 1), rules), Some(Errno::OVERFLOW));
        const { assert!(NBD_PIECE_LEN >= 65_536, "the protocol wants this much to work") };
    }

    #[test]
    fn flags_of_write_zeroes_reach_the_engine() {
        for (wire, flags) in [
            (0, Flags::MAY_UNMAP),
            (1, Flags::MAY_UNMAP | Flags::FUA),
            (2, Flags::empty()),
            (16 | 2, Flags::NO_FALLBACK),
        ] {
            let verdict = judge(&header(Command::WRITE_ZEROES, wire, 0, 512), &RULES);
            let range = ByteRange { offset: 0, len: 512 };
            assert_eq!(verdict, Verdict::Run { action: Action::WriteZeroes { flags }, range });
        }
    }

    proptest! {
        #[test]
        fn any_headers_are_judged_within_their_promises(data in proptest::collection::vec(any::<u8>(), 0..400)) {
            fuzz(&data);
        }
    }
}
