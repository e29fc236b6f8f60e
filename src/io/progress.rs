//! What a result of the kernel means for a transfer: pure, shared by both engines.

use super::FileOpKind;

/// Most times one operation is repeated in a row because it was interrupted.
const INTERRUPTED_MAX: u16 = 1000;
/// Most times in a row because the kernel could not do it now.
const AGAIN_MAX: u16 = 16;
/// Most times in a row because its memory could not be reached: after the first it is an error of whoever gave the memory.
const FAULT_MAX: u16 = 2;

/// What to do next with an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// All of it is done.
    Done,
    /// Go on behind what is done.
    Again,
    /// The same, but others first.
    Later,
    /// End of file behind what is done: the rest reads as zeros.
    Zeros,
    /// It failed with this errno.
    Fail(i32),
}

/// State of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Progress {
    /// Bytes done so far.
    pub(super) done: u64,
    /// Repetitions since there was progress.
    repeats: u16,
    delays: u16,
}

impl Progress {
    pub(super) const NEW: Self = Self { done: 0, repeats: 0, delays: 0 };

    /// Whether the last try ended with EAGAIN.
    pub(super) fn is_delayed(&self) -> bool {
        self.delays > 0
    }

    /// Takes in a result: a count or a negative errno. `offset` and `len` are those of the whole operation, `align` is the file's offset
    /// alignment: a read that ends at an unaligned place has met the end of the file, since direct reads are cut nowhere else.
    pub(super) fn step(&mut self, kind: FileOpKind, offset: u64, len: u64, align: u64, result: i64) -> Step {
        if result < 0 {
            return self.failed(i32::try_from(-result).unwrap_or(libc::EIO));
        }
        let count = result as u64;
        match kind {
            FileOpKind::Sync | FileOpKind::Allocate(_) => Step::Done,
            FileOpKind::Read | FileOpKind::Write => {
                *self = Self { done: self.done + count.min(len - self.done), ..Self::NEW };
                if self.done == len {
                    Step::Done
                } else if kind == FileOpKind::Write {
                    // A write of nothing makes no progress and says no reason.
                    if count == 0 { Step::Fail(libc::EIO) } else { Step::Again }
                } else if count == 0 || !(offset + self.done).is_multiple_of(align) {
                    Step::Zeros
                } else {
                    Step::Again
                }
            }
        }
    }

    fn failed(&mut self, errno: i32) -> Step {
        // ECANCELED and EFAULT without anybody's doing: see the module text of `uring`.
        let most = match errno {
            libc::EINTR | libc::ECANCELED => INTERRUPTED_MAX,
            libc::EFAULT => FAULT_MAX,
            libc::EAGAIN => {
                self.delays += 1;
                return if self.delays > AGAIN_MAX { Step::Fail(errno) } else { Step::Later };
            }
            _ => return Step::Fail(errno),
        };
        self.repeats += 1;
        if self.repeats > most { Step::Fail(errno) } else { Step::Again }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Buffers;

    /// A file whose every answer is scripted: bytes moved at most, or an errno.
    struct Script {
        file: Vec<u8>,
        answers: Vec<i64>,
    }

    impl Script {
        fn call(&mut self, kind: FileOpKind, offset: usize, bufs: &Buffers) -> i64 {
            let answer = if self.answers.is_empty() { 3 } else { self.answers.remove(0) };
            if answer < 0 {
                return answer;
            }
            let n = bufs.len().min(answer as usize).min(self.file.len().saturating_sub(offset));
            let memory = bufs.slice(0, n);
            if n == 0 {
                return 0;
            }
            let file = &mut self.file[offset..offset + n];
            match kind {
                FileOpKind::Read => memory.copy_from_slice(file),
                _ => memory.copy_to_slice(file),
            }
            n as i64
        }

        /// The loop of an engine.
        fn run(&mut self, kind: FileOpKind, offset: usize, bufs: &Buffers) -> Result<(), i32> {
            let mut progress = Progress::NEW;
            loop {
                let done = progress.done as usize;
                let result = self.call(kind, offset + done, &bufs.slice(done, bufs.len() - done));
                match progress.step(kind, offset as u64, bufs.len() as u64, 1, result) {
                    Step::Done => return Ok(()),
                    Step::Again | Step::Later => {}
                    Step::Zeros => {
                        let done = progress.done as usize;
                        bufs.slice(done, bufs.len() - done).fill(0);
                        return Ok(());
                    }
                    Step::Fail(errno) => return Err(errno),
                }
            }
        }
    }

    fn pieces(lens: &[usize]) -> Buffers {
        let mut all = Buffers::new();
        lens.iter().for_each(|n| all.append(Buffers::alloc(*n, 8)));
        all
    }

    /// Every script of three answers out of these.
    fn scripts() -> impl Iterator<Item = Vec<i64>> {
        const ANSWERS: [i64; 8] =
            [1, 2, 3, 5, 100, -(libc::EINTR as i64), -(libc::EAGAIN as i64), -(libc::ECANCELED as i64)];
        (0..512).map(|n| [n & 7, n >> 3 & 7, n >> 6].map(|i| ANSWERS[i]).to_vec())
    }

    #[test]
    fn every_way_to_cut_a_transfer_moves_every_byte_to_its_place() {
        const CUTS: [&[usize]; 5] = [&[8], &[1, 7], &[3, 5], &[2, 2, 4], &[1, 1, 1, 1, 1, 3]];
        for answers in scripts() {
            for cuts in CUTS {
                for offset in [0, 1, 5] {
                    // One file ends inside the transfer, one behind it.
                    for size in [offset + 5, 20] {
                        let file: Vec<u8> = (1..=size as u8).collect();
                        let mut script = Script { file: file.clone(), answers: answers.clone() };
                        let bufs = pieces(cuts);
                        bufs.fill(0xee);
                        script.run(FileOpKind::Read, offset, &bufs).expect("it ends well");
                        let mut expected = file;
                        expected.resize(size.max(offset + 8), 0);
                        assert_eq!(
                            bufs.to_vec(),
                            expected[offset..offset + 8],
                            "{answers:?} {cuts:?} {offset} {size}"
                        );
                    }
                    let mut script = Script { file: vec![0; 20], answers: answers.clone() };
                    let data: Vec<u8> = (101..=108).collect();
                    let bufs = pieces(cuts);
                    bufs.copy_from_slice(&data);
                    script.run(FileOpKind::Write, offset, &bufs).expect("it ends well");
                    let mut expected = vec![0; 20];
                    expected[offset..offset + 8].copy_from_slice(&data);
                    assert_eq!(script.file, expected, "{answers:?} {cuts:?} {offset}");
                }
            }
        }
    }

    #[test]
    fn an_error_behind_any_number_of_bytes_is_the_operation_s_error() {
        for answers in scripts() {
            let mut answers = answers;
            answers.push(-i64::from(libc::ENOSPC));
            let mut script = Script { file: vec![0; 2000], answers };
            assert_eq!(script.run(FileOpKind::Write, 0, &pieces(&[1000])), Err(libc::ENOSPC));
        }
    }

    #[test]
    fn a_direct_read_that_ends_at_an_unaligned_place_has_met_the_end_of_the_file() {
        let mut p = Progress::NEW;
        assert_eq!(p.step(FileOpKind::Read, 0, 8192, 512, 4608 - 8), Step::Zeros);
        assert_eq!(p.done, 4600);
        let mut p = Progress::NEW;
        assert_eq!(p.step(FileOpKind::Read, 0, 8192, 512, 4608), Step::Again);
        assert_eq!(p.step(FileOpKind::Read, 0, 8192, 512, 0), Step::Zeros);
        assert_eq!(p.done, 4608);
    }

    #[test]
    fn a_write_that_makes_no_progress_fails() {
        let new = || Progress::NEW;
        assert_eq!(new().step(FileOpKind::Write, 0, 8, 1, 0), Step::Fail(libc::EIO));
        assert_eq!(new().step(FileOpKind::Sync, 0, 0, 1, -5), Step::Fail(5));
        assert_eq!(new().step(FileOpKind::Sync, 0, 0, 1, 0), Step::Done);
    }

    #[test]
    fn repetitions_are_bounded_and_counted_from_the_last_progress() {
        for (errno, most, step) in [
            (libc::EINTR, INTERRUPTED_MAX, Step::Again),
            (libc::ECANCELED, INTERRUPTED_MAX, Step::Again),
            (libc::EFAULT, FAULT_MAX, Step::Again),
            (libc::EAGAIN, AGAIN_MAX, Step::Later),
        ] {
            let mut p = Progress::NEW;
            for _ in 0..2 {
                for _ in 0..most {
                    assert_eq!(p.step(FileOpKind::Write, 0, 8, 1, -i64::from(errno)), step);
                }
                assert_eq!(p.step(FileOpKind::Write, 0, 8, 1, 1), Step::Again);
                assert!(!p.is_delayed());
            }
            for _ in 0..most {
                assert_eq!(p.step(FileOpKind::Write, 0, 8, 1, -i64::from(errno)), step);
            }
            assert_eq!(p.step(FileOpKind::Write, 0, 8, 1, -i64::from(errno)), Step::Fail(errno));
        }
    }
}
