//! `cobweb create`: makes an image.
//!
//! Options are judged before a file is touched; so unlike with qemu-img, an image that exists survives a wrong option.

use super::format_opts::{self, FormatOpts};
use super::getopt::Long;
use super::image::{Image, ImageFlags, SECTOR, describe, errno_text, error_text};
use super::qcow2::{beside, has_protocol};
use super::size::{self, SizeError};
use super::tool::{Ended, Step, Tool};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::format::qcow2::create::{
    BackingName, Compat, CreateOptions, DataFileName, Preallocation, create as create_qcow2,
};
use crate::format::qcow2::header::Compression;
use crate::limits::BATCH_LEN;
use crate::node::{Growth, Node, Vertex};
use crate::options::Options;
use crate::queue::Cx;
use crate::request::{Buffers, Class, Request};
use crate::sync::Arc;
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::process::ExitCode;

/// A result whose error is what is printed behind the name of the image.
type OrText<T = ()> = std::result::Result<T, String>;

const HELP: &str =
    "Usage: cobweb create [-f FMT] [-o OPTIONS] [-b BACKING -F BACKING_FMT] [-u] [-q] FILE [SIZE]

Makes an image, in place of what the file held.

  -f, --format FMT           raw (default) or qcow2
  -o, --options OPTIONS      options of the format: NAME=VALUE,...; help lists them
  -b, --backing FILE         image that is read where the new one has nothing
  -F, --backing-format FMT   its format
  -u, --backing-unsafe       do not look at it
  -q, --quiet                print errors only
  SIZE                       bytes, with a suffix k, M, G, T, P, E; that of the backing file if not given";

const LONG: &[Long] = &[
    ("help", false, 'h'),
    ("quiet", false, 'q'),
    ("format", true, 'f'),
    ("options", true, 'o'),
    ("backing", true, 'b'),
    ("backing-format", true, 'F'),
    ("backing-unsafe", false, 'u'),
    ("object", true, 'O'),
];

/// Formats that a backing file may be said to have. More than can be opened: the image may be for somebody else.
const BACKING_FORMATS: &[&str] = &[
    "raw",
    "qcow2",
    "qcow",
    "qed",
    "vmdk",
    "vdi",
    "vpc",
    "vhdx",
    "parallels",
    "luks",
    "file",
    "host_device",
    "nbd",
    "http",
    "https",
    "ssh",
    "iscsi",
    "nfs",
    "rbd",
    "copy-on-read",
    "throttle",
    "dmg",
    "cloop",
    "bochs",
];

/// Runs `cobweb create`.
pub(super) fn run(words: &[String]) -> ExitCode {
    create(words).map_or_else(|Ended(code)| code, |()| ExitCode::SUCCESS)
}

/// What the command line says.
#[derive(Debug, Default)]
struct Asked {
    format: String,
    items: Vec<String>,
    backing: Option<String>,
    backing_format: Option<String>,
    unsafe_backing: bool,
    quiet: bool,
    size: Option<u64>,
}

fn create(words: &[String]) -> Step {
    let tool = Tool::new("create", 1, HELP);
    let mut asked = Asked { format: "raw".to_owned(), ..Asked::default() };
    let mut operands = tool
        .words(words, "hqf:o:b:F:u", LONG, |tool, letter, value| {
            match letter {
                'q' => asked.quiet = true,
                'f' => asked.format = value,
                'o' => asked.items.extend(tool.option_list(&value)?),
                'b' => asked.backing = Some(value),
                'F' => asked.backing_format = Some(value),
                'u' => asked.unsafe_backing = true,
                'O' => tool.object(&value)?,
                _ => {}
            }
            Ok(())
        })?
        .into_iter();
    let name = operands.next();
    if format_opts::asks_for_help(&asked.items) {
        if !format_opts::can_create(&asked.format) {
            return Err(tool.error(&format!("Unknown file format '{}'", asked.format)));
        }
        print!("{}", format_opts::help(&asked.format, name.is_some()));
        return Ok(());
    }
    let name = name.ok_or_else(|| tool.usage_error("Expecting image file name"))?;
    asked.size = operands.next().map(|word| image_size(&tool, &word)).transpose()?;
    if let Some(more) = operands.next() {
        return Err(tool.usage_error(&format!("Unexpected argument: {more}")));
    }
    let ctx = tool.context()?;
    make(&ctx, &name, asked).map_err(|text| tool.error(&format!("{name}: {text}")))?;
    ctx.close();
    Ok(())
}

/// A size on the command line.
pub(super) fn image_size(tool: &Tool, word: &str) -> Step<u64> {
    size::parse(word).map_err(|e| match e {
        SizeError::Form => tool.error(&format!("Invalid image size specified: '{word}'.")),
        SizeError::Range => {
            tool.error(&format!("Invalid image size specified. Must be between 0 and {}.", i64::MAX))
        }
    })
}

/// Makes the image; an error is the text behind its name.
fn make(ctx: &Arc<Context>, name: &str, asked: Asked) -> OrText {
    if !format_opts::can_create(&asked.format) {
        return Err(format!("Unknown file format '{}'", asked.format));
    }
    let path = name.strip_prefix("file:").unwrap_or(name);
    if path == name && has_protocol(name) {
        return Err(format!("Unknown protocol '{}'", name.split(':').next().unwrap_or_default()));
    }
    let mut opts = FormatOpts::parse(&asked.format, true, &asked.items)?;
    settle(ctx, path, &asked, &mut opts)?;
    let size = opts.number("size").ok_or("Image creation needs a size parameter")?;
    if !asked.quiet {
        println!("{}", opts.formatting(name));
    }
    match asked.format.as_str() {
        "qcow2" => {
            let options = qcow2_options(&opts, size)?;
            make_qcow2(ctx, path, &options, opts.on("nocow"))
        }
        _ => {
            let preallocation = file_preallocation(&opts)?;
            make_raw(ctx, path, size, preallocation, opts.on("nocow"))
        }
    }
}

/// Brings size and backing file of the command line and of `-o` together.
fn settle(ctx: &Arc<Context>, path: &str, asked: &Asked, opts: &mut FormatOpts) -> OrText {
    if let Some(size) = asked.size {
        if opts.get("size").is_some() {
            return Err("The image size must be specified only once".to_owned());
        }
        opts.set("size", size.to_string())?;
    }
    for (key, value, what) in [
        ("backing_file", &asked.backing, "Backing file"),
        ("backing_fmt", &asked.backing_format, "Backing file format"),
    ] {
        let Some(value) = value else { continue };
        if !opts.has(key) {
            return Err(format!("{what} not supported for file format '{}'", asked.format));
        }
        opts.set(key, value.clone())?;
    }
    let format = opts.get("backing_fmt").map(str::to_owned);
    let Some(backing) = opts.get("backing_file").map(str::to_owned) else {
        return Ok(());
    };
    if backing.is_empty() {
        return Err("Expected backing file name, got empty string".to_owned());
    }
    if backing == path {
        return Err("Error: Trying to create an image with the same filename as the backing file".to_owned());
    }
    if path.is_empty() && !backing.starts_with('/') && !has_protocol(&backing) {
        return Err("Cannot use relative backing file names for ''".to_owned());
    }
    let unformatted = "Backing file specified without backing format";
    if asked.unsafe_backing {
        return if format.is_none() { Err(unformatted.to_owned()) } else { Ok(()) };
    }
    let full = beside(Some(path), &backing);
    // An overlay may be made while others write to its backing file: only the size of that is looked at.
    let flags =
        ImageFlags { format: format.as_deref(), read_only: true, force_share: true, ..Default::default() };
    let image = describe(&full, &flags, None)
        .and_then(|spec| Image::open(ctx, spec))
        .map_err(|e| format!("{}\nCould not open backing image.", error_text(&e, &full)))?;
    let (found, size) = (image.spec.format.clone(), image.size());
    image.close().map_err(|e| error_text(&e, &full))?;
    if format.is_none() {
        return Err(format!("{unformatted}\nDetected format of {found}."));
    }
    if opts.get("size").is_none() {
        opts.set("size", size.to_string())?;
    }
    Ok(())
}

/// The library's options, or what cannot be combined, in the words that are known from qemu-img.
fn qcow2_options(opts: &FormatOpts, size: u64) -> OrText<CreateOptions> {
    let refuse = |text: &str| Err(text.to_owned());
    let unknown =
        |what: &str, value: &str| Err(format!("Parameter '{what}' does not accept value '{value}'"));
    let newer = |what: &str| {
        Err(format!(
            "{what} only supported with compatibility level 1.1 and above (use version=v3 or greater)"
        ))
    };
    let mut made = CreateOptions::new(size);
    let v3 = match opts.get("compat") {
        Some("0.10" | "v2") => false,
        None | Some("1.1" | "v3") => true,
        Some(other) => return unknown("version", other),
    };
    if let Some(format) = opts.get("backing_fmt").filter(|f| !BACKING_FORMATS.contains(f)) {
        return unknown("backing-fmt", format);
    }
    made.preallocation = match opts.get("preallocation") {
        None | Some("off") => Preallocation::Off,
        Some("metadata") => Preallocation::Metadata,
        Some("falloc") => Preallocation::Falloc,
        Some("full") => Preallocation::Full,
        Some(other) => return unknown("preallocation", other),
    };
    made.compression = match opts.get("compression_type") {
        None | Some("zlib") => Compression::Zlib,
        Some("zstd") => Compression::Zstd,
        Some(other) => return unknown("compression-type", other),
    };
    made.compat = if v3 { Compat::V11 } else { Compat::V010 };
    made.extended_l2 = opts.on("extended_l2");
    made.lazy_refcounts = opts.on("lazy_refcounts");
    made.cluster_size = cluster_size(opts)?;
    if made.extended_l2 && made.cluster_size < EXTENDED_CLUSTER_MIN {
        return Err(EXTENDED_TOO_SMALL.to_owned());
    }
    if size > i64::MAX as u64 {
        return refuse("Could not resize image: Image size cannot be negative");
    }
    if made.extended_l2 && !v3 {
        return newer("Extended L2 entries are");
    }
    let data_file_raw = opts.on("data_file_raw");
    made.data_file = opts.get("data_file").map(|name| DataFileName { name: name.into(), raw: data_file_raw });
    if opts.get("backing_fmt").is_some() && opts.get("backing_file").is_none() {
        return refuse("Backing format cannot be used without backing file");
    }
    made.backing = opts.get("backing_file").map(|name| BackingName {
        name: name.into(),
        format: opts.get("backing_fmt").unwrap_or_default().to_owned(),
    });
    if made.backing.is_some() && made.preallocation != Preallocation::Off && !made.extended_l2 {
        return refuse(
            "Backing file and preallocation can only be used at the same time if extended_l2 is on",
        );
    }
    if !v3 && made.lazy_refcounts {
        return newer("Lazy refcounts");
    }
    made.refcount_bits = refcount_bits(opts, v3, "version=v3")?;
    if data_file_raw && made.data_file.is_none() {
        return refuse("data-file-raw requires data-file");
    }
    if made.data_file.is_some() && !v3 {
        return newer("External data files are");
    }
    if made.backing.is_some() && data_file_raw {
        return refuse("Backing file and data-file-raw cannot be used at the same time");
    }
    if made.compression != Compression::Zlib && !v3 {
        return newer("Non-zlib compression type is");
    }
    Ok(made)
}

pub(super) const EXTENDED_CLUSTER_MIN: u64 = 16 << 10;
pub(super) const EXTENDED_TOO_SMALL: &str =
    "Extended L2 entries are only supported with cluster sizes of at least 16384 bytes";

/// `cluster_size`.
pub(super) fn cluster_size(opts: &FormatOpts) -> OrText<u64> {
    opts.number("cluster_size")
        .filter(|n| n.is_power_of_two() && (512..=2 << 20).contains(n))
        .ok_or_else(|| "Cluster size must be a power of two between 512 and 2048k".to_owned())
}

/// `refcount_bits`; `how` names the option that makes more of them possible.
pub(super) fn refcount_bits(opts: &FormatOpts, v3: bool, how: &str) -> OrText<u32> {
    let bits = opts
        .number("refcount_bits")
        .filter(|n| n.is_power_of_two() && *n <= 64)
        .ok_or_else(|| "Refcount width must be a power of two and may not exceed 64 bits".to_owned())?;
    if bits != 16 && !v3 {
        return Err(format!(
            "Different refcount widths than 16 bits require compatibility level 1.1 or above (use {how} or greater)"
        ));
    }
    Ok(bits as u32)
}

fn file_preallocation(opts: &FormatOpts) -> OrText<Preallocation> {
    match opts.get("preallocation") {
        None | Some("off") => Ok(Preallocation::Off),
        Some("falloc") => Ok(Preallocation::Falloc),
        Some("full") => Ok(Preallocation::Full),
        Some("metadata") => Err("Unsupported preallocation mode: metadata".to_owned()),
        Some(other) => Err(format!("invalid parameter value: {other}")),
    }
}

/// A file that an image goes to, open and locked; it is removed again if it was made here and is not kept.
struct Target {
    ctx: Arc<Context>,
    path: String,
    node: Arc<Vertex>,
    made_here: bool,
}

impl Target {
    fn open(ctx: &Arc<Context>, path: &str, nocow: bool) -> OrText<Self> {
        let existed = std::fs::symlink_metadata(path).is_ok();
        let mut how = OpenOptions::new();
        how.read(true).write(true).create(true).truncate(false).mode(0o644);
        let file = how.open(path).map_err(|e| {
            let errno = e.raw_os_error().unwrap_or(libc::EIO);
            format!("Could not create '{path}': {}", errno_text(errno))
        })?;
        if nocow {
            // Only btrfs has it, and the image is no worse without.
            let _ = super::sys::set_nocow(&file);
        }
        drop(file);
        let mut options = Options::empty();
        options.set("driver", "file").set("filename", path);
        match ctx.graph().open(options) {
            Ok(node) => Ok(Self { ctx: ctx.clone(), path: path.to_owned(), node, made_here: !existed }),
            Err(e) => {
                if !existed {
                    let _ = std::fs::remove_file(path);
                }
                Err(error_text(&e, path))
            }
        }
    }

    /// Closes the file after `result`.
    fn end(self, result: OrText) -> OrText {
        let closed = self.ctx.graph().forget_node(&self.node).map_err(|e| error_text(&e, &self.path));
        let result = result.and(closed);
        if result.is_err() && self.made_here {
            // Nothing that could be mistaken for an image is left.
            let _ = std::fs::remove_file(&self.path);
        }
        result
    }
}

/// Makes a qcow2 image, and its data file.
pub(super) fn make_qcow2(ctx: &Arc<Context>, path: &str, options: &CreateOptions, nocow: bool) -> OrText {
    if options.data_file.as_ref().is_some_and(|d| d.name.is_empty()) {
        return Err(format!("Could not create '': {}", errno_text(libc::ENOENT)));
    }
    // What the library would refuse, it refuses before there is a file.
    options.check().map_err(|e| qcow2_error(&e, path))?;
    options.placeable().map_err(|_| too_large("qcow2", CLUSTER_ADVICE))?;
    let file = Target::open(ctx, path, nocow)?;
    let data = match &options.data_file {
        None => None,
        Some(data) => match Target::open(ctx, &super::qcow2::text(&data.name), nocow) {
            Ok(data) => Some(data),
            Err(e) => return file.end(Err(e)),
        },
    };
    let (node, data_node) = (file.node.top_node(), data.as_ref().map(|d| d.node.top_node()));
    let options = options.clone();
    let result = ctx
        .env()
        .block_on(|cx| async move { create_qcow2(&cx, &*node, data_node.as_deref(), &options).await })
        .and_then(|r| r)
        .map_err(|e| qcow2_error(&e, path));
    let result = match data {
        Some(data) => data.end(result),
        None => result,
    };
    file.end(result)
}

fn qcow2_error(e: &Error, path: &str) -> String {
    match e.errno() {
        libc::EFBIG => too_large("qcow2", CLUSTER_ADVICE),
        _ => error_text(e, path),
    }
}

const CLUSTER_ADVICE: &str = " (try using a larger cluster size)";

fn too_large(format: &str, advice: &str) -> String {
    format!("The image size is too large for file format '{format}'{advice}")
}

fn make_raw(ctx: &Arc<Context>, path: &str, size: u64, preallocation: Preallocation, nocow: bool) -> OrText {
    let size = size
        .checked_next_multiple_of(SECTOR)
        .filter(|s| *s <= i64::MAX as u64)
        .ok_or_else(|| too_large("raw", ""))?;
    let file = Target::open(ctx, path, nocow)?;
    let node = file.node.top_node();
    let result = ctx
        .env()
        .block_on(|cx| async move { fill_raw(&cx, &*node, size, preallocation).await })
        .and_then(|r| r)
        .map_err(|e| match e.errno() {
            libc::EFBIG => too_large("raw", ""),
            _ => error_text(&e, path),
        });
    file.end(result)
}

async fn fill_raw(cx: &Cx, node: &dyn Node, size: u64, preallocation: Preallocation) -> Result<()> {
    let failed = |e| Error::io(e, "Could not resize file");
    let growth = if preallocation == Preallocation::Falloc { Growth::Reserved } else { Growth::Sparse };
    match node.resize(cx, 0, Growth::Sparse).await {
        Ok(()) => node.resize(cx, size, growth).await.map_err(failed)?,
        // A device has the length it has.
        Err(e) if e.errno == libc::ENOTSUP && node.limits().size >= size => {}
        Err(e) => return Err(failed(e)),
    }
    if preallocation == Preallocation::Full {
        let failed = |e| Error::io(e, "Could not write zeros for preallocation");
        let zeros = Buffers::alloc(BATCH_LEN.min(size) as usize, 4096);
        for offset in (0..size).step_by(BATCH_LEN as usize) {
            let piece = zeros.slice(0, BATCH_LEN.min(size - offset) as usize);
            cx.run(node, Request::write(offset, piece).class(Class::Background)).await.map_err(failed)?;
        }
    }
    cx.run(node, Request::flush()).await.map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(text: &str) -> OrText<CreateOptions> {
        let items = format_opts::split_list(text).expect("a list");
        qcow2_options(&FormatOpts::parse("qcow2", true, &items)?, 1 << 20)
    }

    #[test]
    fn options_become_those_of_the_library() {
        let made = options("compat=v2,backing_file=b,backing_fmt=raw,cluster_size=4k").expect("valid");
        assert_eq!((made.compat, made.cluster_size), (Compat::V010, 4096));
        assert_eq!(made.backing, Some(BackingName { name: b"b".to_vec(), format: "raw".to_owned() }));
        assert_eq!(options("size=1").expect("valid"), CreateOptions::new(1 << 20));
    }

    #[test]
    fn a_wrong_option_leaves_an_image_as_it_is() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("a").display().to_string();
        std::fs::write(&path, b"precious").expect("write");
        for wrong in ["cluster_size=3k", "compat=0.10,refcount_bits=8", "cluster_size=512,size=1P"] {
            let mut words: Vec<String> =
                ["-q", "-f", "qcow2", "-o", wrong].iter().map(|w| (*w).to_owned()).collect();
            words.push(path.clone());
            if !wrong.contains("size=1P") {
                words.push("1M".to_owned());
            }
            assert_eq!(run(&words), ExitCode::FAILURE, "{wrong}");
            assert_eq!(std::fs::read(&path).expect("read"), b"precious", "{wrong}");
        }
        let new = dir.path().join("new");
        let words = ["-q", "-f", "qcow2", "-o", "data_file=/no/dir", &new.display().to_string(), "1M"]
            .map(str::to_owned);
        assert_eq!(run(&words), ExitCode::FAILURE);
        assert!(!new.exists());
    }
}
