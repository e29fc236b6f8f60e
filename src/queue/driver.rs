//! What the holder of the drive token works with.

use crate::io::{Completion, Engine, EngineOp};

/// Operations that are handed to the kernel together.
const GROUP: usize = 4;

/// An engine, with room for what goes in and comes out in a pass.
pub(super) struct Driver {
    pub(super) engine: Box<dyn Engine>,
    pub(super) completions: Vec<Completion>,
    pub(super) ops: Vec<EngineOp>,
    /// Operations pushed since the last [`Driver::hand_over`].
    pushed: usize,
}

impl Driver {
    pub(super) fn new(engine: Box<dyn Engine>) -> Self {
        Self { engine, completions: Vec::new(), ops: Vec::new(), pushed: 0 }
    }

    /// Gives an operation to the engine. The first one goes to the kernel at once and those after it in groups: the device works on them while
    /// this thread prepares the next ones, and the kernel does not hold a long list back until its last entry is translated. One call for all costs
    /// 10 to 15 % of the rate at depths of 8 and more on a fast disk (`benches/raw_fio.py`), one call for each no less time than this.
    pub(super) fn push(&mut self, op: EngineOp) {
        self.engine.push(op);
        if self.pushed.is_multiple_of(GROUP) {
            self.engine.kick();
        }
        self.pushed += 1;
    }

    /// Hands what is left to the kernel; the end of a round of a pass.
    pub(super) fn hand_over(&mut self) {
        self.pushed = 0;
        self.engine.kick();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::file::{Aio, FileHandle};
    use crate::io::{FileOp, FileOpKind, Notify, Tag};
    use crate::queue::IoCell;
    use crate::request::{Buffers, Class};
    use crate::rt::Instant;
    use crate::sync::{Arc, Mutex};
    use std::os::fd::{OwnedFd, RawFd};
    use std::time::Duration;

    /// Sizes of the groups that arrive, empty ones left out.
    type Groups = Arc<Mutex<Vec<usize>>>;

    #[derive(Debug)]
    struct Recorder {
        groups: Groups,
        waiting: usize,
    }

    impl Engine for Recorder {
        fn push(&mut self, _op: EngineOp) {
            self.waiting += 1;
        }

        fn kick(&mut self) {
            if self.waiting > 0 {
                self.groups.lock().push(std::mem::take(&mut self.waiting));
            }
        }

        fn reap(&mut self, _out: &mut Vec<Completion>) {}

        fn wait(&mut self, _timeout: Option<Duration>) {}

        fn in_flight(&self) -> usize {
            self.waiting
        }

        fn notify(&self) -> Arc<dyn Notify> {
            unreachable!("nobody is woken here")
        }

        fn event_fd(&mut self) -> std::io::Result<RawFd> {
            Err(std::io::Error::from_raw_os_error(libc::ENOTSUP))
        }

        fn clear_event(&mut self) {}

        fn arm(&mut self, _on: bool) -> std::io::Result<()> {
            Ok(())
        }

        fn set_timer(&mut self, _at: Option<Instant>, _now: Instant) {}
    }

    #[test]
    fn the_first_operation_goes_at_once_and_the_others_in_groups() {
        let groups = Groups::default();
        let mut driver = Driver::new(Box::new(Recorder { groups: groups.clone(), waiting: 0 }));
        let file = std::fs::File::open("/dev/null").expect("it opens");
        let file = Arc::new(FileHandle::buffered(OwnedFd::from(file), Aio::Uring));
        let mut groups_of = |n: usize| {
            for _ in 0..n {
                let kind = FileOpKind::Sync;
                let op = FileOp {
                    file: file.clone(),
                    kind,
                    offset: 0,
                    len: 0,
                    dsync: false,
                    counted: None,
                    pass: None,
                };
                let tag = Tag::Task(Arc::new(IoCell::default()));
                driver.push(EngineOp { op, bufs: Buffers::new(), class: Class::Guest, tag });
            }
            driver.hand_over();
            std::mem::take(&mut *groups.lock())
        };
        assert_eq!(groups_of(1), [1]);
        assert_eq!(groups_of(2), [1, 1]);
        assert_eq!(groups_of(8), [1, 4, 3]);
        assert_eq!(groups_of(9), [1, 4, 4]);
        assert_eq!(groups_of(0), [0; 0]);
    }
}
