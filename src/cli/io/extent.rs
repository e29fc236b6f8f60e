//! map, alloc, length, info: what the image is like.

use super::super::image::errno_text;
use super::super::info::specific_lines;
use super::super::qcow2::look_open;
use super::super::size::{exact, parse};
use super::image::OpenImage;
use super::session::{Failed, Outcome, Session};
use crate::error::IoResult;
use crate::node::ExtentFlags;
use crate::units::ByteRange;

/// Length that `alloc` looks at if none is given.
const ALLOC_LEN: u64 = 512;

impl OpenImage {
    /// Whether the bytes from `range.offset` on belong to the image's own layer, and how many (at most `range.len`, at least 1) do so in the same way.
    fn is_allocated(&self, range: ByteRange) -> IoResult<(bool, u64)> {
        if self.image.spec.format == "raw" {
            // A raw file has a place for every byte, holes included.
            return Ok((true, range.len));
        }
        let disk = &self.image.disk;
        let extent = disk
            .env()
            .block_on(|cx| async move { disk.status(&cx, range).await })
            .unwrap_or_else(|e| Err(e.as_io()))?;
        Ok((extent.depth == 0 && extent.flags.contains(ExtentFlags::ALLOCATED), extent.len))
    }

    /// The same, for as long as it goes on.
    pub(super) fn run_of(&self, offset: u64, end: u64) -> IoResult<(bool, u64)> {
        let (first, mut len) = self.is_allocated(ByteRange { offset, len: end - offset })?;
        while offset + len < end {
            let rest = ByteRange { offset: offset + len, len: end - offset - len };
            let (next, more) = self.is_allocated(rest)?;
            if next != first {
                break;
            }
            len += more;
        }
        Ok((first, len))
    }
}

impl Session {
    pub(super) fn map(&mut self) -> Outcome {
        let Some(open) = self.image.take() else { return Err(Failed) };
        let outcome = self.map_of(&open);
        self.image = Some(open);
        outcome
    }

    fn map_of(&mut self, open: &OpenImage) -> Outcome {
        let (mut at, end) = (0, open.image.size());
        while at < end {
            let (allocated, len) = match open.run_of(at, end) {
                Ok(found) => found,
                Err(e) => {
                    let text = format!("Failed to get allocation status: {}", errno_text(e.errno));
                    return Err(self.complain(&text));
                }
            };
            let status = if allocated { "    allocated" } else { "not allocated" };
            let line = format!(
                "{} ({len:#x}) bytes {status} at offset {} ({at:#x})",
                exact(len as f64),
                exact(at as f64)
            );
            self.out.line(&line);
            at += len;
        }
        Ok(())
    }

    pub(super) fn alloc(&mut self, operands: &[String]) -> Outcome {
        let mut numbers = Vec::new();
        for word in operands {
            match parse(word) {
                Ok(n) => numbers.push(n),
                Err(e) => return Err(self.refuse(&e.text(word))),
            }
        }
        let start = numbers[0];
        let count = numbers.get(1).copied().unwrap_or(ALLOC_LEN);
        let Some(open) = &self.image else { return Err(Failed) };
        let count = count.min(open.image.size().saturating_sub(start));
        let (mut at, end, mut sum) = (start, start + count, 0);
        while at < end {
            match open.is_allocated(ByteRange { offset: at, len: end - at }) {
                Ok((allocated, len)) => {
                    sum += if allocated { len } else { 0 };
                    at += len;
                }
                Err(e) => {
                    let text = format!("is_allocated failed: {}", errno_text(e.errno));
                    return Err(self.complain(&text));
                }
            }
        }
        self.out.line(&format!("{sum}/{count} bytes allocated at offset {}", exact(start as f64)));
        Ok(())
    }

    pub(super) fn length(&mut self) -> Outcome {
        let Some(open) = &self.image else { return Err(Failed) };
        let text = exact(open.image.size() as f64);
        self.out.line(&text);
        Ok(())
    }

    pub(super) fn info(&mut self) -> Outcome {
        let Some(open) = &self.image else { return Err(Failed) };
        let format = open.image.spec.format.clone();
        let (cluster, vm_state, specific) = match look_open(&open.image.disk) {
            Some((cluster, vm_state, specific)) => (cluster, vm_state, Some(specific)),
            None => (0, 0, None),
        };
        let [cluster, vm_state] = [cluster, vm_state].map(|bytes| exact(bytes as f64));
        self.out
            .line(&format!("format name: {format}\ncluster size: {cluster}\nvm state offset: {vm_state}"));
        if let Some(specific) = specific {
            self.out.line("Format specific information:");
            specific_lines(&specific, 1).iter().for_each(|line| self.out.line(line));
        }
        Ok(())
    }
}
