//! `cobweb map`: where the data of an image lies.

use super::getopt::Long;
use super::image::{Image, ImageFlags, SECTOR, errno_text, error_text};
use super::preallocated::Guesses;
use super::size::{self, SizeError};
use super::tool::{Ended, Step, Tool};
use crate::error::IoResult;
use crate::format::qcow2::Qcow2Node;
use crate::format::qcow2::addr::HostOffset;
use crate::format::qcow2::map::Run;
use crate::format::raw::RawNode;
use crate::node::{Edge, ExtentFlags, Node};
use crate::queue::Cx;
use crate::sync::Arc;
use crate::units::ByteRange;
use std::process::ExitCode;

const HELP: &str =
    "Usage: cobweb map [-f FMT | --image-opts] [--output human|json] [-s OFFSET] [-l LENGTH] [-U] FILE

Prints which parts of an image hold data, and where.

  -f, --format FMT           format of the image
      --image-opts           the file is option text
      --output human|json    text (only data), or every extent as JSON
  -s, --start-offset OFFSET  begin here
  -l, --max-length LENGTH    look at so many bytes
  -U, --force-share          open the image although others write it";

const LONG: &[Long] = &[
    ("help", false, 'h'),
    ("format", true, 'f'),
    ("image-opts", false, 'I'),
    ("output", true, 'J'),
    ("start-offset", true, 's'),
    ("max-length", true, 'l'),
    ("force-share", false, 'U'),
    ("object", true, 'O'),
];

/// One extent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) start: u64,
    pub(super) len: u64,
    /// Layer that answers, counted from the top.
    depth: u32,
    present: bool,
    zero: bool,
    data: bool,
    compressed: bool,
    /// Where it lies as it is read, and in which file.
    offset: Option<u64>,
    file: Option<String>,
}

impl Entry {
    /// What two images must agree in to be alike in more than their content; with whether this ends an image of `size` bytes.
    pub(super) const fn state(&self, size: u64) -> [bool; 6] {
        let ends = self.start + self.len >= size;
        [self.present, self.zero, self.data, self.compressed, self.offset.is_some(), ends]
    }

    /// Whether it may hold something else than zeros.
    pub(super) const fn holds_data(&self) -> bool {
        self.data && !self.zero
    }

    /// Whether `next` continues this extent.
    fn joins(&self, next: &Entry) -> bool {
        let same = (self.depth, self.present, self.zero, self.data, self.compressed, &self.file)
            == (next.depth, next.present, next.zero, next.data, next.compressed, &next.file);
        same && match (self.offset, next.offset) {
            (None, None) => true,
            (Some(a), Some(b)) => a.checked_add(self.len) == Some(b),
            _ => false,
        }
    }

    fn json(&self) -> String {
        let offset = self.offset.map_or(String::new(), |o| format!(", \"offset\": {o}"));
        format!(
            "{{ \"start\": {}, \"length\": {}, \"depth\": {}, \"present\": {}, \"zero\": {}, \"data\": {}, \"compressed\": {}{offset}}}",
            self.start, self.len, self.depth, self.present, self.zero, self.data, self.compressed
        )
    }
}

/// Runs `cobweb map`.
pub(super) fn run(words: &[String]) -> ExitCode {
    map(words).map_or_else(|Ended(code)| code, |()| ExitCode::SUCCESS)
}

fn map(words: &[String]) -> Step {
    let tool = Tool::new("map", 1, HELP);
    let (mut format, mut image_opts, mut json, mut force_share) = (None, false, false, false);
    let (mut start, mut length) = (0, None);
    let operands = tool.words(words, "hf:s:l:U", LONG, |tool, letter, value| {
        match letter {
            'f' => format = Some(value),
            'I' => image_opts = true,
            'J' => json = tool.output(&value)?,
            's' => start = number(tool, "start offset", &value)?,
            'l' => length = Some(number(tool, "max length", &value)?),
            'U' => force_share = true,
            'O' => tool.object(&value)?,
            _ => {}
        }
        Ok(())
    })?;
    let name = tool.one_file(operands)?;
    tool.check_format(image_opts, format.as_deref())?;
    let ctx = tool.context()?;
    let flags = ImageFlags {
        format: format.as_deref(),
        image_opts,
        force_share,
        read_only: true,
        ..Default::default()
    };
    let image = tool.open(&ctx, &name, &flags)?;
    let end = length.map_or(image.size(), |l| image.size().min(start.saturating_add(l)));
    if !json {
        println!("{:<16}{:<16}{:<16}File", "Offset", "Length", "Mapped to");
    }
    print_range(&tool, &image, start, end, json)?;
    image.close().map_err(|e| tool.error(&error_text(&e, &name)))?;
    ctx.close();
    Ok(())
}

fn number(tool: &Tool, what: &str, word: &str) -> Step<u64> {
    size::parse(word).map_err(|e| match e {
        SizeError::Form => tool.error(&format!("Invalid {what} specified: '{word}'.")),
        SizeError::Range => {
            tool.error(&format!("Invalid {what} specified. Must be between 0 and {}.", i64::MAX))
        }
    })
}

fn print_range(tool: &Tool, image: &Image, start: u64, end: u64, json: bool) -> Step {
    let mut printed = 0;
    let mut print = |entry: &Entry| -> Step {
        if json {
            print!("{}{}", if printed == 0 { "[" } else { ",\n" }, entry.json());
        } else if entry.data && !entry.zero {
            let (Some(offset), Some(file)) = (entry.offset, &entry.file) else {
                return Err(tool.error("File contains external, encrypted or compressed clusters."));
            };
            println!("{:<16}{:<16}{:<16}{file}", hex(entry.start), hex(entry.len), hex(offset));
        }
        printed += 1;
        Ok(())
    };
    let mut held: Option<Entry> = None;
    each_entry(image, start, end, |next| {
        match &mut held {
            Some(last) if last.joins(&next) => last.len += next.len,
            Some(last) => print(&std::mem::replace(last, next))?,
            None => held = Some(next),
        }
        Ok(())
    })
    .map_err(|e| tool.error(&format!("Failed to read image metadata: {}", errno_text(e.errno))))??;
    // A range without a byte is one extent without a byte, in JSON.
    let last = held.unwrap_or(Entry { start, ..Entry::default() });
    print(&last)?;
    if json {
        println!("]");
    }
    Ok(())
}

/// Shows every extent from `start` to `end`, one after the other; neighbours may be alike.
pub(super) fn each_entry(
    image: &Image,
    start: u64,
    end: u64,
    mut show: impl FnMut(Entry) -> Step,
) -> IoResult<Step> {
    let mut at = start;
    while at < end {
        let next = entry_at(image, ByteRange { offset: at, len: end - at })?;
        at += next.len;
        if let Err(ended) = show(next) {
            return Ok(Err(ended));
        }
    }
    Ok(Ok(()))
}

/// `%#x` of C, which has no prefix before a zero.
fn hex(value: u64) -> String {
    if value == 0 { "0".to_owned() } else { format!("{value:#x}") }
}

/// The extent at the start of `range`, which lies inside the image as its size is shown.
pub(super) fn entry_at(image: &Image, range: ByteRange) -> IoResult<Entry> {
    let disk = &image.disk;
    disk.env()
        .block_on(|cx| async move {
            match disk.top() {
                Some(top) => node_entry(&cx, &image.guesses, top, range).await,
                None => Ok(Entry { start: range.offset, len: range.len, ..Entry::default() }),
            }
        })
        .unwrap_or_else(|e| Err(e.as_io()))
}

/// Length of a layer, to whole sectors as QEMU counts them.
fn layer_size(node: &dyn Node) -> u64 {
    let size = node.limits().size;
    size.checked_next_multiple_of(SECTOR).unwrap_or(size)
}

/// Name of the file in which a node keeps its data, below raw formats.
fn file_name(node: &dyn Node) -> Option<String> {
    node.get("filename").or_else(|| {
        let below = node.children().into_iter().find(|c| c.0 == "file")?.1.node();
        below.get("filename")
    })
}

/// What a node says of the start of `range`, with the place in a file where a layer is one that knows it.
async fn node_entry(
    cx: &Cx,
    guesses: &Guesses,
    mut node: Arc<dyn Node>,
    range: ByteRange,
) -> IoResult<Entry> {
    let mut at = Entry { start: range.offset, len: range.len, ..Entry::default() };
    loop {
        let asked = ByteRange { len: at.len, ..range };
        let below = if node.as_any().is::<RawNode>() {
            return raw_entry(cx, &*node, asked, at).await;
        } else if let Some(top) = node.as_any().downcast_ref::<Qcow2Node>() {
            let found = top.image().mapped(cx, asked).await?;
            at.len = found.range.len;
            let Run::Unallocated = found.run else {
                return qcow2_entry(cx, guesses, top, found.run, at).await;
            };
            let below = top.image().backing().map(Edge::node);
            match below.filter(|b| range.offset < layer_size(&**b)) {
                Some(below) => below,
                // Past the end of a short layer it is the one above that answers (qcow2.md section 6).
                None => return unallocated_entry(cx, top, ByteRange { len: at.len, ..range }, at).await,
            }
        } else {
            return plain_entry(cx, &*node, asked, at).await;
        };
        at.len = at.len.min(layer_size(&*below) - range.offset);
        at.depth = at.depth.saturating_add(1);
        node = below;
    }
}

/// A range that no layer holds; sub-clusters without content may have a place all the same.
async fn unallocated_entry(cx: &Cx, top: &Qcow2Node, range: ByteRange, at: Entry) -> IoResult<Entry> {
    let at = Entry { zero: true, ..at };
    if !top.image().layout.extended {
        return Ok(at);
    }
    let (host, len) = top.image().place(cx, range).await?;
    Ok(Entry { len, offset: host.map(HostOffset::get), ..at })
}

/// A range that lies as it is in the file of a raw image.
async fn raw_entry(cx: &Cx, node: &dyn Node, range: ByteRange, at: Entry) -> IoResult<Entry> {
    let window = node.get("offset").and_then(|text| text.parse().ok()).unwrap_or(0);
    let Some(file) = node.children().into_iter().find(|c| c.0 == "file").map(|c| c.1.node()) else {
        return plain_entry(cx, node, range, at).await;
    };
    let (offset, name) = (Some(range.offset + window), file.get("filename"));
    let Some(inside) = node.limits().size.checked_sub(range.offset).filter(|n| *n > 0) else {
        // Between the end of the file and that of its last sector.
        return Ok(Entry { present: true, zero: true, offset, file: name, ..at });
    };
    let below = ByteRange { offset: range.offset + window, len: range.len.min(inside) };
    let extent = cx.status(&*file, below).await?;
    let zero = extent.is_zero();
    Ok(Entry { len: extent.len, present: true, zero, data: !zero, offset, file: name, ..at })
}

/// A range that a qcow2 image holds. Space that has only been set aside is data that reads as zeros.
async fn qcow2_entry(cx: &Cx, guesses: &Guesses, top: &Qcow2Node, run: Run, at: Entry) -> IoResult<Entry> {
    let file = top.image().data().node();
    let at = Entry { present: true, ..at };
    let (host, data) = match run {
        Run::Compressed(_) => return Ok(Entry { data: true, compressed: true, ..at }),
        Run::Unallocated | Run::Zero(None) => return Ok(Entry { zero: true, ..at }),
        Run::Zero(Some(host)) => (host.get(), false),
        Run::Data(host) => (host.get(), true),
    };
    let (mut len, mut zero) = (at.len, !data);
    if data && guesses.of(cx, top).await {
        let size = file.limits().size;
        if host >= size {
            zero = true;
        } else {
            let extent = cx.status(&*file, ByteRange { offset: host, len: len.min(size - host) }).await?;
            zero = extent.is_zero();
            // The end of the file is no border: what is past it reads as zeros, or is the rest of a cluster.
            len = if host + extent.len >= size { len } else { extent.len };
        }
    }
    Ok(Entry { len, zero, data, offset: Some(host), file: file_name(&*file), ..at })
}

async fn plain_entry(cx: &Cx, node: &dyn Node, range: ByteRange, at: Entry) -> IoResult<Entry> {
    let extent = cx.status(node, range).await?;
    let zero = extent.is_zero();
    let present = extent.flags.contains(ExtentFlags::ALLOCATED);
    Ok(Entry {
        len: extent.len,
        depth: at.depth.saturating_add(extent.depth),
        present,
        zero,
        data: present && !zero,
        compressed: extent.flags.contains(ExtentFlags::COMPRESSED),
        ..at
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_join_where_state_and_place_go_on() {
        let a = Entry { start: 0, len: 512, data: true, offset: Some(0), ..Entry::default() };
        let next = |offset| Entry { start: 512, offset, ..a.clone() };
        assert!(a.joins(&next(Some(512))));
        assert!(!a.joins(&next(Some(1024))) && !a.joins(&next(None)));
        assert!(!a.joins(&Entry { zero: true, ..next(Some(512)) }));
        assert_eq!((hex(0), hex(16)), ("0".into(), "0x10".into()));
    }
}
