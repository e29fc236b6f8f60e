//! `cobweb measure`: how large an image would be, of a size or of what another image holds.

use super::create::{EXTENDED_CLUSTER_MIN, EXTENDED_TOO_SMALL, cluster_size, image_size, refcount_bits};
use super::format_opts::{self, FormatOpts};
use super::getopt::Long;
use super::image::{Image, ImageFlags, SECTOR, errno_text, error_text};
use super::map::each_entry;
use super::qcow2::{Listed, listed};
use super::tool::{Ended, Step, Tool, pretty};
use crate::format::qcow2::bitmap::Bitmap;
use crate::format::qcow2::layout::Layout;
use crate::format::qcow2::measure::{Measured, bitmaps, measure as measure_qcow2};
use serde_json::{Map, Value};
use std::process::ExitCode;

const HELP: &str = "Usage: cobweb measure [-O FMT] [-o OPTIONS] [--output human|json] (--size SIZE | [-f FMT | --image-opts] [-U] FILE)

Prints how large a new image would be: with the data there is, and with all of it allocated.

  -O, --target-format FMT    raw (default) or qcow2
  -o OPTIONS                 options of that format, as for create
      --size SIZE            an empty disk of this size
  -f, --format FMT           format of the image
      --image-opts           the file is option text
      --output human|json    text or JSON
  -U, --force-share          open the image although others write it";

const LONG: &[Long] = &[
    ("help", false, 'h'),
    ("target-format", true, 'O'),
    ("size", true, 'S'),
    ("format", true, 'f'),
    ("image-opts", false, 'I'),
    ("snapshot", true, 'l'),
    ("output", true, 'J'),
    ("force-share", false, 'U'),
    ("object", true, 'B'),
];

/// Runs `cobweb measure`.
pub(super) fn run(words: &[String]) -> ExitCode {
    measure(words).map_or_else(|Ended(code)| code, |()| ExitCode::SUCCESS)
}

/// What is measured.
struct Source {
    image: Image,
    /// Bitmaps of a qcow2 image that can have some.
    bitmaps: Option<Vec<Bitmap>>,
}

fn measure(words: &[String]) -> Step {
    let tool = Tool::new("measure", 1, HELP);
    let (mut target, mut items, mut size, mut format) = ("raw".to_owned(), Vec::new(), None, None);
    let (mut image_opts, mut json, mut force_share, mut snapshot) = (false, false, false, None);
    let operands = tool.words(words, "hf:l:o:O:U", LONG, |tool, letter, value| {
        match letter {
            'O' => target = value,
            'o' => items.extend(tool.option_list(&value)?),
            'S' => size = Some(image_size(tool, &value)?),
            'f' => format = Some(value),
            'I' => image_opts = true,
            'l' => snapshot = Some(value),
            'J' => json = tool.output(&value)?,
            'U' => force_share = true,
            'B' => tool.object(&value)?,
            _ => {}
        }
        Ok(())
    })?;
    if operands.len() > 1 {
        return Err(tool.error("At most one filename argument is allowed."));
    }
    let name = operands.into_iter().next();
    match (&name, size) {
        (None, _) if image_opts || format.is_some() || snapshot.is_some() => {
            return Err(tool.error("--image-opts, -f, and -l require a filename argument."));
        }
        (None, None) => return Err(tool.error("Either --size N or one filename must be specified.")),
        (Some(_), Some(_)) => {
            return Err(tool.error("--size N cannot be used together with a filename."));
        }
        _ => {}
    }
    tool.check_format(image_opts, format.as_deref())?;
    let ctx = tool.context()?;
    let source = match &name {
        None => None,
        Some(name) => {
            let flags = ImageFlags {
                format: format.as_deref(),
                image_opts,
                force_share,
                read_only: true,
                ..Default::default()
            };
            let image = tool.open(&ctx, name, &flags)?;
            let listed = match image.spec.format.as_str() {
                "qcow2" => Some(listed(&ctx, &image.spec).map_err(|e| tool.could_not_open(name, &e))?),
                _ => None,
            };
            if let Some(wanted) = &snapshot {
                return Err(tool.error(no_snapshot(listed.as_ref(), wanted)));
            }
            Some(Source { image, bitmaps: listed.filter(|l| l.header.version > 2).map(|l| l.bitmaps) })
        }
    };
    if !format_opts::can_create(&target) {
        return Err(tool.error(&format!("Unknown file format '{target}'")));
    }
    let opts = FormatOpts::parse(&target, true, &items).map_err(|text| {
        let _ = tool.error(&text);
        tool.error(&format!("Invalid options for file format '{target}'"))
    })?;
    let size = match (&source, size) {
        (Some(source), _) => source.image.size(),
        (None, size) => size.unwrap_or(0),
    };
    let size = size.checked_next_multiple_of(SECTOR).unwrap_or(u64::MAX);
    let found = if target == "qcow2" {
        qcow2(&tool, &opts, size, source.as_ref())?
    } else {
        Found { measured: Measured { required: size, fully_allocated: size }, bitmaps: None }
    };
    print(&found, json);
    if let (Some(source), Some(name)) = (source, name) {
        source.image.close().map_err(|e| tool.error(&error_text(&e, &name)))?;
    }
    ctx.close();
    Ok(())
}

/// What to say of a snapshot: none can be measured yet.
fn no_snapshot(listed: Option<&Listed>, wanted: &str) -> &'static str {
    let same = |name: &str, value: &[u8]| name.as_bytes() == value;
    let found = listed.is_some_and(|l| {
        l.snapshots.iter().any(|s| match wanted.split_once('=') {
            Some(("snapshot.name", name)) => same(name, &s.name),
            Some(("snapshot.id", id)) => same(id, &s.id),
            _ => same(wanted, &s.name) || same(wanted, &s.id),
        })
    });
    match found {
        true => "Failed to load snapshot: internal snapshots cannot be read yet",
        false => "Failed to load snapshot: Can't find snapshot",
    }
}

fn print(found: &Found, json: bool) {
    let Measured { required, fully_allocated } = found.measured;
    if json {
        let mut map = Map::new();
        if let Some(bytes) = found.bitmaps {
            map.insert("bitmaps".to_owned(), bytes.into());
        }
        map.insert("required".to_owned(), required.into());
        map.insert("fully-allocated".to_owned(), fully_allocated.into());
        println!("{}", pretty(&Value::Object(map)));
        return;
    }
    println!("required size: {required}\nfully allocated size: {fully_allocated}");
    if let Some(bytes) = found.bitmaps {
        println!("bitmaps size: {bytes}");
    }
}

struct Found {
    measured: Measured,
    bitmaps: Option<u64>,
}

/// Measures a qcow2 image to be.
fn qcow2(tool: &Tool, opts: &FormatOpts, size: u64, source: Option<&Source>) -> Step<Found> {
    let refuse = |text: String| tool.error(&text);
    let cluster = cluster_size(opts).map_err(refuse)?;
    let all = match opts.get("preallocation") {
        None | Some("off" | "metadata") => false,
        Some("falloc" | "full") => true,
        Some(other) => return Err(refuse(format!("invalid parameter value: {other}"))),
    };
    let extended = opts.on("extended_l2");
    if extended && cluster < EXTENDED_CLUSTER_MIN {
        return Err(refuse(EXTENDED_TOO_SMALL.to_owned()));
    }
    let v3 = match opts.get("compat") {
        Some("0.10" | "v2") => false,
        None | Some("1.1" | "v3") => true,
        Some(other) => return Err(refuse(format!("Invalid compatibility level: '{other}'"))),
    };
    let bits = refcount_bits(opts, v3, "compat=1.1").map_err(refuse)?;
    let layout = Layout {
        version: if v3 { 3 } else { 2 },
        cluster_bits: cluster.trailing_zeros(),
        slice_bits: cluster.trailing_zeros(),
        extended,
        refcount_order: bits.trailing_zeros(),
        data_file: false,
    };
    let clusters = match source {
        _ if all => u64::MAX,
        // How much of the chain the new image will share is not known.
        Some(_) if opts.get("backing_file").is_some() => u64::MAX,
        Some(source) => data_clusters(tool, &source.image, cluster)?,
        None => 0,
    };
    let measured = measure_qcow2(&layout, size, clusters)
        .map_err(|_| refuse("The image size is too large (try using a larger cluster size)".to_owned()))?;
    let listed = source.and_then(|s| s.bitmaps.as_ref()).filter(|_| v3);
    Ok(Found { measured, bitmaps: listed.map(|list| bitmaps(list, size, cluster)) })
}

/// Clusters of this size in which there is data that is not known to be zeros.
fn data_clusters(tool: &Tool, image: &Image, cluster: u64) -> Step<u64> {
    let (mut count, mut counted_to) = (0, 0);
    each_entry(image, 0, image.size(), |entry| {
        if entry.holds_data() {
            let end = (entry.start + entry.len).div_ceil(cluster);
            let first = (entry.start / cluster).max(counted_to);
            count += end.saturating_sub(first);
            counted_to = end.max(counted_to);
        }
        Ok(())
    })
    .map_err(|e| tool.error(&format!("Unable to get block status: {}", errno_text(e.errno))))??;
    Ok(count)
}
