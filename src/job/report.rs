//! What a job tells about its errors (semantics.md, section 5).

use super::Job;
use crate::report::{LostRange, Report};
use serde_json::{Value, json};

impl Job {
    /// The first error: the cause of a failure. Readable after the end and after any number of later errors.
    pub fn report(&self) -> Option<Report> {
        let (own, body) = (self.errors.first(), self.body.cause());
        match (own, body) {
            // The filter may have broken before the job's own parts noticed, or after they failed.
            (Some(a), Some(b)) => Some(if b.mono_ns <= a.mono_ns { b } else { a }),
            (a, b) => a.or(b),
        }
    }

    /// One sentence on why the job failed; `None` if it has not.
    pub fn error_text(&self) -> Option<String> {
        let error = self.outcome()?.err()?;
        let mut text = format!("{} ({})", error, error.code.name());
        if let Some(r) = self.report().filter(|_| error.code != crate::error::Code::Cancelled) {
            let (side, op) = (r.side.name(), r.op.name());
            text.push_str(&format!(": {} of {} bytes at {} on the {side}: {}", op, r.len, r.offset, r.error));
        }
        Some(text)
    }

    /// The last error of the job's own parts.
    pub fn last_report(&self) -> Option<Report> {
        self.errors.last()
    }

    /// Every lost range, complete (S50).
    pub fn lost(&self) -> Vec<LostRange> {
        self.body.lost()
    }

    /// First cause, log of the job's parts, loss report.
    pub fn report_json(&self) -> Value {
        let lost: Vec<Value> = self.lost().iter().map(LostRange::to_json).collect();
        json!({
            "cause": self.report().map(|r| r.to_json()),
            "errors": self.errors.to_json(),
            "lost": lost,
        })
    }
}
