//! What a result of the kernel means for a transfer: pure, shared by both engines.

use super::FileOpKind;

/// Most times one operation is repeated for EAGAIN before that is its error.
const AGAIN_MAX: u32 = 1000;

/// What to do next with an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// All of it is done.
    Done,
    /// Go on behind the first `n` bytes.
    Again(u64),
    /// End of file behind the first `n` bytes: the rest reads as zeros.
    Zeros(u64),
    /// It failed with this errno.
    Fail(i32),
}

/// State of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Progress {
    /// Bytes done so far.
    pub(super) done: u64,
    /// Repetitions without progress so far.
    pub(super) repeats: u32,
}

impl Progress {
    pub(super) const NEW: Self = Self { done: 0, repeats: 0 };

    /// Takes in a result: a count or a negative errno. `offset` and `len` are those of the whole operation, `align` is the file's offset alignment: a read that
    /// ends at an unaligned place has met the end of the file, since direct reads are cut nowhere else.
    pub(super) fn step(&mut self, kind: FileOpKind, offset: u64, len: u64, align: u64, result: i64) -> Step {
        if result < 0 {
            let errno = i32::try_from(-result).unwrap_or(libc::EIO);
            let repeat = errno == libc::EINTR || errno == libc::EAGAIN;
            if repeat && self.repeats < AGAIN_MAX {
                self.repeats += 1;
                return Step::Again(self.done);
            }
            return Step::Fail(errno);
        }
        let count = result as u64;
        match kind {
            FileOpKind::Sync | FileOpKind::Allocate(_) => Step::Done,
            FileOpKind::Read | FileOpKind::Write => {
                self.done += count.min(len - self.done);
                self.repeats = 0;
                if self.done == len {
                    Step::Done
                } else if kind == FileOpKind::Write {
                    // A write of nothing makes no progress and says no reason.
                    if count == 0 { Step::Fail(libc::EIO) } else { Step::Again(self.done) }
                } else if count == 0 || !(offset + self.done).is_multiple_of(align) {
                    Step::Zeros(self.done)
                } else {
                    Step::Again(self.done)
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_cut_a_transfer_ends_with_all_of_it() {
        for kind in [FileOpKind::Read, FileOpKind::Write] {
            for first in 1..=8 {
                for second in 1..=8 {
                    let mut p = Progress::NEW;
                    let mut results = [first, -i64::from(libc::EINTR), second, 8, 8].into_iter();
                    loop {
                        match p.step(kind, 0, 8, 1, results.next().expect("it ends")) {
                            Step::Done => break,
                            Step::Again(n) => assert_eq!(n, p.done),
                            other => panic!("{other:?}"),
                        }
                    }
                    assert_eq!(p.done, 8);
                }
            }
        }
    }

    #[test]
    fn the_end_of_the_file_reads_as_zeros_and_is_not_asked_twice_at_an_unaligned_place() {
        let mut p = Progress::NEW;
        assert_eq!(p.step(FileOpKind::Read, 0, 8192, 512, 4608 - 8), Step::Zeros(4600));
        let mut p = Progress::NEW;
        assert_eq!(p.step(FileOpKind::Read, 0, 8192, 512, 4608), Step::Again(4608));
        assert_eq!(p.step(FileOpKind::Read, 0, 8192, 512, 0), Step::Zeros(4608));
    }

    #[test]
    fn a_write_that_makes_no_progress_fails_and_repeats_are_bounded() {
        let mut p = Progress::NEW;
        assert_eq!(p.step(FileOpKind::Write, 0, 8, 1, 0), Step::Fail(libc::EIO));
        let mut p = Progress::NEW;
        let again = -i64::from(libc::EAGAIN);
        for _ in 0..AGAIN_MAX {
            assert_eq!(p.step(FileOpKind::Write, 0, 8, 1, again), Step::Again(0));
        }
        assert_eq!(p.step(FileOpKind::Write, 0, 8, 1, again), Step::Fail(libc::EAGAIN));
        let mut p = Progress::NEW;
        assert_eq!(p.step(FileOpKind::Sync, 0, 0, 1, -5), Step::Fail(5));
    }
}
