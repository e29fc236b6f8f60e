//! States of a job, as in QEMU.

/// Where a job is in its life; numbers and names are QEMU's JobStatus (numbered from 1, as in the C ABI).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
pub enum Status {
    /// Made, not started.
    Created = 1,
    /// At work.
    Running = 2,
    /// Paused by the user or by an error with policy `stop`.
    Paused = 3,
    /// Ready to be completed (mirror only; not used by the jobs here).
    Ready = 4,
    /// Paused while ready.
    Standby = 5,
    /// Done, waits for the other jobs of its group.
    Waiting = 6,
    /// Done, waits for `finalize`.
    Pending = 7,
    /// Failed or cancelled, being cleaned up.
    Aborting = 8,
    /// Ended; the result can be read until `dismiss`.
    Concluded = 9,
    /// Forgotten by the context.
    Null = 10,
}

impl Status {
    /// Name in QMP.
    pub const fn name(self) -> &'static str {
        match self {
            Status::Created => "created",
            Status::Running => "running",
            Status::Paused => "paused",
            Status::Ready => "ready",
            Status::Standby => "standby",
            Status::Waiting => "waiting",
            Status::Pending => "pending",
            Status::Aborting => "aborting",
            Status::Concluded => "concluded",
            Status::Null => "null",
        }
    }

    /// Whether the job has ended and its result stands.
    pub const fn has_ended(self) -> bool {
        matches!(self, Status::Concluded | Status::Null)
    }

    /// Whether a job may go from this state to `next`.
    pub const fn may_become(self, next: Status) -> bool {
        use Status::*;
        matches!(
            (self, next),
            (Created, Running | Aborting | Null)
                | (Running, Paused | Ready | Waiting | Aborting)
                | (Paused, Running)
                | (Ready, Standby | Waiting | Aborting)
                | (Standby, Ready)
                | (Waiting, Pending | Aborting)
                | (Pending, Concluded | Aborting)
                | (Aborting, Concluded)
                | (Concluded, Null)
        )
    }
}
