//! What an error means: decided here, once, as a pure function (S27, S28, S30, S34).

use crate::error::Code;
use crate::events::Side;

/// What went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// Reading old data from the source.
    Read,
    /// No space at the target, and the options do not let the guest wait.
    Space,
    /// Writing old data to the target.
    Write,
    /// The guest has waited for too long.
    Timeout,
    /// A copy panicked (C17).
    Panic,
}

/// What is broken by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The guest's request fails; the granules are needed again.
    FailGuest,
    /// The granules are lost, everything else stays valid.
    LoseRange,
    /// The snapshot as a whole.
    BreakSnapshot,
}

/// `held`: every writer of the granules is still waiting, so the old data is still on the source (S72).
pub(super) fn decide(failure: Failure, held: bool, break_guest_write: bool, lose_range: bool) -> Verdict {
    if break_guest_write && held {
        return Verdict::FailGuest;
    }
    // A range can be given up as long as the others are whole; that is so for all failures but a lack of space, which would meet every granule that
    // follows, and a panic, after which nothing is known.
    if lose_range && !matches!(failure, Failure::Space | Failure::Panic) {
        return Verdict::LoseRange;
    }
    Verdict::BreakSnapshot
}

impl Failure {
    /// Which part failed.
    pub(super) const fn side(self) -> Side {
        match self {
            Failure::Read => Side::Source,
            Failure::Space => Side::Cache,
            Failure::Write | Failure::Timeout => Side::Target,
            Failure::Panic => Side::None,
        }
    }

    /// Code of its report.
    pub(super) const fn code(self) -> Code {
        match self {
            Failure::Read => Code::ReadFailed,
            Failure::Space => Code::CacheFull,
            Failure::Write => Code::TargetFailed,
            Failure::Timeout => Code::CbwTimeout,
            Failure::Panic => Code::Panicked,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_was_released_is_never_failed_and_a_lack_of_space_never_loses_single_ranges() {
        for failure in [Failure::Read, Failure::Space, Failure::Write, Failure::Timeout, Failure::Panic] {
            for lose in [false, true] {
                assert_eq!(decide(failure, true, true, lose), Verdict::FailGuest);
                assert_ne!(decide(failure, false, true, lose), Verdict::FailGuest);
                let v = decide(failure, false, false, lose);
                let range = lose && !matches!(failure, Failure::Space | Failure::Panic);
                assert_eq!(v, if range { Verdict::LoseRange } else { Verdict::BreakSnapshot });
            }
        }
    }
}
