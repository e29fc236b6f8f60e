//! `cobweb check`: whether an image is consistent. Never writes.

use super::getopt::Long;
use super::image::{ImageFlags, cache_mode, describe, errno_text, error_text};
use super::qcow2::{open_file, require_chain};
use super::tool::{Ended, Step, Tool, pretty};
use crate::format::qcow2::check::{CheckError, CheckOptions, CheckReport, Finding, check};
use crate::format::qcow2::limits::SNAPSHOTS_MAX;
use crate::format::qcow2::snapshot::table::TableError;
use serde_json::{Map, Value};
use std::process::ExitCode;

const HELP: &str = "Usage: cobweb check [-f FMT | --image-opts] [-T CACHE] [-q] [-U] [--output human|json] FILE

Tells whether an image is consistent. Exit code 0: it is; 1: the check could not be made; 2: it is damaged; 3: it has lost space, but
is not damaged; 63: images of this format cannot be checked.

  -f, --format FMT           format of the image
      --image-opts           the file is option text
  -T, --cache MODE           cache mode
  -q, --quiet                print nothing but errors
      --output human|json    text or JSON
  -U, --force-share          open the image although others write it";

const LONG: &[Long] = &[
    ("help", false, 'h'),
    ("format", true, 'f'),
    ("image-opts", false, 'I'),
    ("cache", true, 'T'),
    ("quiet", false, 'q'),
    ("output", true, 'J'),
    ("repair", true, 'r'),
    ("force-share", false, 'U'),
    ("object", true, 'O'),
];

/// Runs `cobweb check`.
pub(super) fn run(words: &[String]) -> ExitCode {
    checked(words).unwrap_or_else(|Ended(code)| code)
}

fn checked(words: &[String]) -> Step<ExitCode> {
    let tool = Tool::new("check", 1, HELP);
    let (mut format, mut image_opts, mut json, mut quiet, mut force_share) =
        (None, false, false, false, false);
    let (mut cache, mut repair) = (None, false);
    let operands = tool.words(words, "hf:T:qr:U", LONG, |tool, letter, value| {
        match letter {
            'f' => format = Some(value),
            'I' => image_opts = true,
            'T' => cache = Some(value),
            'q' => quiet = true,
            'J' => json = tool.output(&value)?,
            'r' if !matches!(value.as_str(), "leaks" | "all") => {
                let text = format!("--repair (-r) expects 'leaks' or 'all' not '{value}'");
                return Err(tool.usage_error(&text));
            }
            'r' => repair = true,
            'U' => force_share = true,
            'O' => tool.object(&value)?,
            _ => {}
        }
        Ok(())
    })?;
    let name = tool.one_file(operands)?;
    if let Some(cache) = cache.as_ref().filter(|c| cache_mode(c).is_err()) {
        return Err(tool.error(&format!("Invalid source cache option: {cache}")));
    }
    tool.check_format(image_opts, format.as_deref())?;
    if repair {
        return Err(tool.error("--repair (-r): images cannot be repaired yet"));
    }
    let flags = ImageFlags {
        format: format.as_deref(),
        cache: cache.as_deref(),
        image_opts,
        force_share,
        read_only: true,
        ..Default::default()
    };
    let ctx = tool.context()?;
    let spec = describe(&name, &flags, None).map_err(|e| tool.could_not_open(&name, &e))?;
    if spec.format != "qcow2" {
        let _ = tool.error("This image format does not support checks");
        return Err(Ended(ExitCode::from(63)));
    }
    require_chain(&ctx, &spec).map_err(|e| tool.could_not_open(&name, &e))?;
    let file = open_file(&ctx, &spec).map_err(|e| tool.could_not_open(&name, &e))?;
    let result = ctx
        .env()
        .block_on(|cx| {
            let node = file.top_node();
            async move {
                let mut print = |finding: &Finding| eprintln!("{finding}");
                check(&cx, &*node, CheckOptions::default(), &mut print).await
            }
        })
        .map_err(|e| tool.error(&e.full_text()))?;
    let report = result.map_err(|e| failed(&tool, &name, e))?;
    if report.errors > 0 {
        let _ = tool.error("Check failed");
    }
    if json {
        println!("{}", pretty(&as_json(&spec.name, &spec.format, &report)));
    } else if !quiet {
        print!("{}", as_text(&report));
    }
    ctx.close();
    Ok(ExitCode::from(match report {
        CheckReport { errors: 1.., .. } => 1,
        CheckReport { corruptions: 1.., .. } => 2,
        CheckReport { leaks: 1.., .. } => 3,
        _ => 0,
    }))
}

fn failed(tool: &Tool, name: &str, e: CheckError) -> Ended {
    let end = |errno: i32| tool.error(&format!("Check failed: {}", errno_text(errno)));
    match e {
        CheckError::Open(e) => tool.could_not_open(name, &e),
        CheckError::Failed(e) => {
            let _ = tool.error(&format!("ERROR {}", error_text(&e, name)));
            end(e.errno())
        }
        CheckError::Snapshots(e, header) => {
            let (text, errno) = match e {
                TableError::Offset => ("ERROR snapshot table offset invalid".to_owned(), libc::EINVAL),
                TableError::TooMany(n) => (
                    format!(
                        "ERROR snapshot table too large: {} snapshots more than there can be",
                        n - SNAPSHOTS_MAX
                    ),
                    libc::EFBIG,
                ),
                other => {
                    let e = other.into_error(&header);
                    (format!("ERROR failed to read the snapshot table: {}", error_text(&e, name)), e.errno())
                }
            };
            let _ = tool.error(&text);
            end(errno)
        }
    }
}

fn as_json(name: &str, format: &str, r: &CheckReport) -> Value {
    let mut map = Map::new();
    let mut put = |key: &str, value: u64, always: bool| {
        if always || value > 0 {
            map.insert(key.to_owned(), value.into());
        }
    };
    put("image-end-offset", r.image_end_offset, false);
    put("compressed-clusters", r.compressed_clusters, false);
    put("total-clusters", r.total_clusters, false);
    put("corruptions", r.corruptions, false);
    put("check-errors", r.errors, true);
    put("leaks", r.leaks, false);
    put("allocated-clusters", r.allocated_clusters, false);
    map.insert("filename".to_owned(), name.into());
    map.insert("format".to_owned(), format.into());
    if r.fragmented_clusters > 0 {
        map.insert("fragmented-clusters".to_owned(), r.fragmented_clusters.into());
    }
    Value::Object(map)
}

fn as_text(r: &CheckReport) -> String {
    let mut out = String::new();
    let mut line = |text: String| {
        out.push_str(&text);
        out.push('\n');
    };
    if r.corruptions + r.leaks + r.errors == 0 {
        line("No errors were found on the image.".to_owned());
    }
    if r.corruptions > 0 {
        line(format!(
            "\n{} errors were found on the image.\nData may be corrupted, or further writes to the image may corrupt it.",
            r.corruptions
        ));
    }
    if r.leaks > 0 {
        line(format!(
            "\n{} leaked clusters were found on the image.\nThis means waste of disk space, but no harm to data.",
            r.leaks
        ));
    }
    if r.errors > 0 {
        line(format!("\n{} internal errors have occurred during the check.", r.errors));
    }
    if r.total_clusters > 0 && r.allocated_clusters > 0 {
        let percent = |part: u64, of: u64| part as f64 * 100.0 / of as f64;
        line(format!(
            "{}/{} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed clusters",
            r.allocated_clusters,
            r.total_clusters,
            percent(r.allocated_clusters, r.total_clusters),
            percent(r.fragmented_clusters, r.allocated_clusters),
            percent(r.compressed_clusters, r.allocated_clusters)
        ));
    }
    if r.image_end_offset > 0 {
        line(format!("Image end offset: {}", r.image_end_offset));
    }
    out
}
