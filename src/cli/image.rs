//! Opening an image the way the flags of qemu-img and qemu-io say it.
//!
//! [`describe`] makes the option tree (file name, `json:`, or `--image-opts`), finding the format where none was given; [`open`] opens it and attaches a
//! disk. Errors carry the text that follows `Could not open 'NAME': `.

use super::preallocated::Guesses;
use super::probe;
use super::qcow2::require_chain;
use crate::context::Context;
use crate::error::{Code, Error, Result};
use crate::graph::{Disk, Graph, ImplicitOpen, find_driver};
use crate::options::Options;
use crate::sync::Arc;
use serde_json::{Map, Value};
use std::path::Path;

/// What `-f`, `-t`, `-i`, `-d`, `--image-opts`, `-r` and `-U` say.
#[derive(Clone, Debug, Default)]
pub(super) struct ImageFlags<'a> {
    pub(super) format: Option<&'a str>,
    pub(super) cache: Option<&'a str>,
    pub(super) aio: Option<&'a str>,
    /// Whether discards deallocate; the driver's default if not given.
    pub(super) discard: Option<bool>,
    pub(super) image_opts: bool,
    pub(super) force_share: bool,
    pub(super) read_only: bool,
}

/// The option tree for `name`: option text with `image_opts`, else a file with a format above it (raw unless `-f`).
pub(super) fn image_options(name: &str, flags: &ImageFlags<'_>) -> Result<Options> {
    if flags.image_opts {
        if flags.format.is_some() {
            return Err(Error::invalid("--image-opts and --format are mutually exclusive"));
        }
        return Options::parse(name);
    }
    let mut top = Options::empty();
    top.set("driver", flags.format.unwrap_or("raw"));
    top.set("file.driver", "file").set("file.filename", name);
    set_file_options(&mut top, flags)?;
    Ok(top)
}

/// Puts what flags say where it belongs, without replacing what options say.
fn set_file_options(top: &mut Options, flags: &ImageFlags<'_>) -> Result<()> {
    let cache = cache_mode(flags.cache.unwrap_or("writeback"))?;
    let [is_qcow2, is_raw] = ["qcow2", "raw"].map(|format| top.peek_str("driver") == Some(format));
    let mut set = |key: &str, value: &str| {
        if !top.contains(key) {
            top.set(key, value);
        }
    };
    set("file.cache.direct", on_off(cache.direct));
    set("file.cache.no-flush", on_off(cache.no_flush));
    if let Some(aio) = flags.aio {
        set("file.aio", aio);
    }
    if let Some(discard) = flags.discard {
        let mode = if discard { "unmap" } else { "ignore" };
        set("file.discard", mode);
        if is_qcow2 {
            // Both have to agree: one gives clusters up, the other gives their space back.
            set("discard", mode);
        }
    }
    if flags.read_only {
        set("file.read-only", "on");
    }
    // Whoever only reads a raw file minds no writer: there is nothing in it that must fit together.
    if flags.force_share || (flags.read_only && is_raw) {
        set("file.force-share", "on");
    }
    Ok(())
}

const fn on_off(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

/// A cache mode of qemu-img's `-t`.
#[derive(Clone, Copy, Debug)]
pub(super) struct CacheMode {
    /// O_DIRECT.
    pub(super) direct: bool,
    /// Flushes are ignored.
    pub(super) no_flush: bool,
    /// Each write is flushed (FUA).
    pub(super) write_through: bool,
}

/// Parses `-t`.
pub(super) fn cache_mode(name: &str) -> Result<CacheMode> {
    let (direct, no_flush, write_through) = match name {
        "none" | "off" => (true, false, false),
        "directsync" => (true, false, true),
        "writeback" => (false, false, false),
        "writethrough" => (false, false, true),
        "unsafe" => (false, true, false),
        other => return Err(Error::invalid(format!("invalid cache option: '{other}'"))),
    };
    Ok(CacheMode { direct, no_flush, write_through })
}

/// Complains about options that the driver does not have, in the words of the tools. Whoever opens the image calls it last.
fn check_known(spec: &ImageSpec) -> Result<()> {
    let Some(driver) = find_driver(&spec.format) else { return Ok(()) };
    let known = |key: &str| {
        matches!(key, "driver" | "node-name" | "file" | "backing" | "read-only")
            || driver.props.props.iter().any(|p| p.name == key || p.name.starts_with(&format!("{key}.")))
    };
    match spec.tree.keys().find(|key| !known(key)) {
        None => Ok(()),
        Some(key) => {
            Err(Error::invalid(format!("Block format '{}' does not support the option '{key}'", spec.format)))
        }
    }
}

/// Opens `name` and attaches a disk of its own to it.
pub(super) fn open_disk(ctx: &Context, name: &str, flags: &ImageFlags<'_>) -> Result<Arc<Disk>> {
    let graph = implicit(ctx);
    let node = graph.open(image_options(name, flags)?)?;
    let disk = graph.add_disk("")?;
    graph.insert(&disk, Some(node))?;
    Ok(disk)
}

/// The graph, told to open the files that images name: what scripts for QEMU's tools expect (C11).
fn implicit(ctx: &Context) -> &Arc<Graph> {
    let graph = ctx.graph();
    graph.set_implicit_open(ImplicitOpen::Allow);
    graph
}

/// An image as the user named it, before it is opened.
#[derive(Clone, Debug)]
pub(super) struct ImageSpec {
    /// Options of the top node; `driver` is there.
    pub(super) tree: Options,
    /// Name for output: the file's, or `json:` text where that does not say enough.
    pub(super) name: String,
    /// The file below the format, if it is one.
    pub(super) path: Option<String>,
    /// Driver of the top node.
    pub(super) format: String,
    /// The format was found by looking, not given.
    pub(super) probed: bool,
}

/// Puts together what the user named, from a name or option text, flags, and options of the format (`open -o`). Looks at the file if no format was given.
pub(super) fn describe(name: &str, flags: &ImageFlags<'_>, more: Option<Options>) -> Result<ImageSpec> {
    let (mut tree, plain) = match (flags.image_opts, name.strip_prefix("json:")) {
        (true, _) => (Options::parse(name)?, None),
        (false, Some(json)) => (parse_json(json)?, None),
        (false, None) => {
            let path = name.strip_prefix("file:").unwrap_or(name);
            let mut tree = Options::empty();
            if !path.is_empty() {
                tree.set("file.driver", "file").set("file.filename", path);
            }
            (tree, Some(path))
        }
    };
    if let Some(more) = more {
        merge(&mut tree, more)?;
    }
    if let Some(format) = flags.format {
        tree.set("driver", format);
    }
    let mut tree = with_drivers(tree)?;
    flatten_blockdev(&mut tree);
    let explicit = tree.peek_str("driver").map(str::to_owned);
    if let Some(driver) = &explicit
        && !is_known(driver)
    {
        return Err(Error::not_found(format!("Unknown driver '{driver}'")));
    }
    if plain.is_some_and(str::is_empty) {
        return Err(Error::invalid("The 'file' block driver requires a file name"));
    }
    if explicit.is_none() && !tree.contains("file") {
        return Err(Error::invalid("Must specify either driver or file"));
    }
    let path = file_path(&tree);
    if let Some(path) = &path {
        check_file(path, flags.read_only)?;
    }
    let (format, probed) = match (explicit, &path) {
        (Some(driver), _) => (driver, false),
        (None, Some(path)) => (found_format(path)?, true),
        (None, None) => ("raw".to_owned(), true),
    };
    tree.set("driver", format.as_str());
    let name = match (plain, &path) {
        (Some(name), _) => name.to_owned(),
        (None, Some(path)) if is_plain(&tree) => path.clone(),
        (None, _) => format!("json:{}", spaced(&tree.to_json())),
    };
    if tree.peek_str("file.driver") == Some("file") {
        set_file_options(&mut tree, flags)?;
    } else if matches!(format.as_str(), "raw" | "qcow2") && !tree.contains("file") {
        return Err(Error::invalid("A block device must be specified for \"file\""));
    }
    Ok(ImageSpec { tree, name, path, format, probed })
}

fn parse_json(text: &str) -> Result<Options> {
    Options::parse(text)
        .map_err(|e| Error::invalid(format!("Could not parse the JSON options: {}", e.full_text())))
}

/// Adds options given beside a name; what is said twice is what was said last.
fn merge(tree: &mut Options, more: Options) -> Result<()> {
    fn add(to: &mut Map<String, Value>, from: Map<String, Value>) {
        for (key, value) in from {
            match (to.get_mut(&key), value) {
                (Some(Value::Object(inner)), Value::Object(more)) => add(inner, more),
                (_, value) => {
                    to.insert(key, value);
                }
            }
        }
    }
    let (Value::Object(mut to), Value::Object(from)) = (tree.to_json(), more.to_json()) else {
        return Ok(());
    };
    add(&mut to, from);
    *tree = Options::from_json(&Value::Object(to))?;
    Ok(())
}

/// The same options, where each node below the top one that has a file name and no driver is a file.
fn with_drivers(tree: Options) -> Result<Options> {
    fn complete(value: &mut Value, is_top: bool) {
        let Value::Object(map) = value else { return };
        if !is_top && !map.contains_key("driver") && map.contains_key("filename") {
            map.insert("driver".to_owned(), "file".into());
        }
        map.values_mut().for_each(|below| complete(below, false));
    }
    let mut json = tree.to_json();
    complete(&mut json, true);
    Options::from_json(&json)
}

/// Options that QEMU hands down from a format to its file: they are moved there, since here they belong to the file.
fn flatten_blockdev(tree: &mut Options) {
    if tree.contains("file") && tree.peek_str("file").is_none() && !tree.contains("file.driver") {
        tree.set("file.driver", "file");
    }
    if tree.peek_str("file.driver") != Some("file") {
        return;
    }
    for key in ["cache.direct", "cache.no-flush", "force-share", "auto-read-only", "locking", "detect-zeroes"]
    {
        let Some(value) = tree.take_value(key) else { continue };
        let below = format!("file.{key}");
        if !tree.contains(&below) {
            tree.set(&below, value);
        }
    }
}

/// Path of the file directly below the format.
fn file_path(tree: &Options) -> Option<String> {
    (tree.peek_str("file.driver") == Some("file"))
        .then(|| tree.peek_str("file.filename").map(str::to_owned))
        .flatten()
}

/// Whether a tree says no more than a format and a file name.
fn is_plain(tree: &Options) -> bool {
    tree.keys().all(|k| matches!(k, "driver" | "file" | "read-only"))
}

/// The same errors as opening it would give, in the words of the tools.
pub(super) fn check_file(path: &str, read_only: bool) -> Result<()> {
    let at = |e: std::io::Error| could_not_open(path, &e);
    let meta = std::fs::metadata(path).map_err(at)?;
    if meta.is_dir() && read_only {
        return Err(Error::invalid(format!("'file' driver requires '{path}' to be a regular file")));
    }
    let mut how = std::fs::OpenOptions::new();
    if meta.is_file() || meta.is_dir() {
        how.read(true).write(!read_only).open(path).map_err(at)?;
    }
    Ok(())
}

fn could_not_open(path: &str, e: &std::io::Error) -> Error {
    Error::new(
        e.raw_os_error().unwrap_or(libc::EIO),
        Code::Io,
        format!("Could not open '{path}': {}", errno_text(e.raw_os_error().unwrap_or(libc::EIO))),
    )
}

/// Whether a format can be opened, or at least looked into.
fn is_known(format: &str) -> bool {
    format == "qcow2" || find_driver(format).is_some()
}

fn found_format(path: &str) -> Result<String> {
    let format = probe::probe_file(Path::new(path)).map_err(|e| could_not_open(path, &e))?;
    match is_known(format) {
        true => Ok(format.to_owned()),
        false => Err(Error::not_found(format!("Unknown driver '{format}'"))),
    }
}

/// JSON on one line with a blank behind each comma and colon, as the tools print it.
fn spaced(value: &Value) -> String {
    match value {
        Value::Object(map) => {
            let pairs: Vec<String> =
                map.iter().map(|(k, v)| format!("{}: {}", Value::from(k.as_str()), spaced(v))).collect();
            format!("{{{}}}", pairs.join(", "))
        }
        Value::Array(list) => {
            format!("[{}]", list.iter().map(spaced).collect::<Vec<_>>().join(", "))
        }
        scalar => scalar.to_string(),
    }
}

/// What strerror(3) says, without Rust's number behind it.
pub(super) fn errno_text(errno: i32) -> String {
    let text = std::io::Error::from_raw_os_error(errno).to_string();
    match text.rfind(" (os error") {
        Some(at) => text[..at].to_owned(),
        None => text,
    }
}

/// A moment as the tools print it, in local time.
pub(super) fn local_time(seconds: u32) -> String {
    let [year, month, day, hour, minute, second] = super::sys::local_time(i64::from(seconds));
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}")
}

/// An error as the tools would word it: causes behind colons, errno in words.
pub(super) fn error_text(e: &Error, name: &str) -> String {
    let text = e.full_text();
    if e.code() == Code::Busy
        && let Some(at) = text.find(": is another process using")
    {
        return format!("{}\nIs another process using the image [{name}]?", &text[..at]);
    }
    let mut out = text;
    while let Some(at) = out.find(" (os error ") {
        let end = out[at..].find(')').map_or(out.len(), |n| at + n + 1);
        out.replace_range(at..end, "");
    }
    header_text(&out).or_else(|| option_text(&out)).unwrap_or(out)
}

/// Errors of options and of opening files, in the words that scripts look for.
fn option_text(text: &str) -> Option<String> {
    if let Some(rest) = text.strip_prefix("cannot open '") {
        return Some(format!("Could not open '{rest}"));
    }
    let (key, problem) = text.strip_prefix("option '")?.split_once("' ")?;
    if problem.ends_with("expected on or off") {
        return Some(format!("Parameter '{key}' expects 'on' or 'off'"));
    }
    (problem == "is larger than cache-size").then(|| format!("{key} may not exceed cache-size"))
}

/// The errors of a qcow2 header that scripts look for, in the words they look for. The others say more in ours.
fn header_text(text: &str) -> Option<String> {
    if text.contains("not a qcow2 image") {
        return Some("Image is not in qcow2 format".to_owned());
    }
    if let Some((_, version)) = text.split_once(": unsupported qcow2 version ") {
        return Some(format!("Unsupported qcow2 version {version}"));
    }
    if let Some((_, method)) = text.split_once(": unsupported encryption method ") {
        return Some(format!("Unsupported encryption method {method}"));
    }
    let (_, list) = text.split_once(": unsupported incompatible features: ")?;
    // `'name' (bit 5), bit 63`: those with a name by it, the others as one number.
    let (mut names, mut unknown, mut rest) = (Vec::new(), 0u64, list);
    while let Some(at) = rest.find("bit ") {
        let number: String = rest[at + 4..].chars().take_while(char::is_ascii_digit).collect();
        let bit: u32 = number.parse().ok().filter(|b| *b < 64)?;
        match rest[..at].split('\'').nth(1) {
            Some(name) => names.push(name.to_owned()),
            None => unknown |= 1 << bit,
        }
        rest = rest[at + 4 + number.len()..].trim_start_matches([')', ',', ' ']);
    }
    if unknown != 0 {
        names.push(format!("Unknown incompatible feature: {unknown:x}"));
    }
    Some(format!("Unsupported qcow2 feature(s): {}", names.join(", ")))
}

/// An open image.
#[derive(Debug)]
pub(super) struct Image {
    pub(super) disk: Arc<Disk>,
    pub(super) spec: ImageSpec,
    pub(super) guesses: Guesses,
    ctx: Arc<Context>,
}

impl Image {
    /// Opens what was described.
    pub(super) fn open(ctx: &Arc<Context>, spec: ImageSpec) -> Result<Self> {
        check_known(&spec)?;
        let graph = implicit(ctx);
        // An error in a file that the image names is told as the tools tell it, which say whose it is.
        let reworded = |e| match require_chain(ctx, &spec) {
            Err(e) if !spec.tree.contains("backing") && e.to_string().starts_with("Could not open") => e,
            _ => e,
        };
        let node = graph.open(spec.tree.clone()).map_err(reworded)?;
        let disk = graph.add_disk("")?;
        graph.insert(&disk, Some(node))?;
        Ok(Self { disk, spec, guesses: Guesses::default(), ctx: ctx.clone() })
    }

    /// Length in bytes; a raw image ends with a whole sector, as QEMU counts it.
    pub(super) fn size(&self) -> u64 {
        let size = self.disk.size();
        if self.spec.format == "raw" { size.next_multiple_of(SECTOR) } else { size }
    }

    /// Detaches the disk and closes what nobody uses any more; errors of bringing down what was held are returned.
    pub(super) fn close(self) -> Result<()> {
        let graph = self.ctx.graph();
        graph.insert(&self.disk, None)?;
        graph.remove_disk(&self.disk);
        drop(self.disk);
        graph.collect()
    }
}

/// Unit of sizes in QEMU.
pub(super) const SECTOR: u64 = 512;

/// What both tools print when they had to find out that a writable image is raw.
pub(super) fn warn_probed_raw(name: &str) {
    eprintln!(
        "WARNING: Image format was not specified for '{name}' and probing guessed raw.\n         \
         Automatically detecting the format is dangerous for raw images, write operations on block 0 will be restricted.\n         \
         Specify the 'raw' format explicitly to remove the restrictions."
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(name: &str, flags: &ImageFlags<'_>) -> Result<ImageSpec> {
        describe(name, flags, None)
    }

    #[test]
    fn a_missing_format_is_found_and_an_explicit_one_is_not_questioned() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("a").display().to_string();
        std::fs::write(&path, b"plain").expect("write");
        let read = ImageFlags { read_only: true, ..Default::default() };
        let found = spec(&path, &read).expect("described");
        assert_eq!((found.format.as_str(), found.probed, found.name.as_str()), ("raw", true, path.as_str()));
        std::fs::write(&path, b"KDMV").expect("write");
        let e = spec(&path, &read).expect_err("not supported");
        assert_eq!(e.to_string(), "Unknown driver 'vmdk'");
        let raw = ImageFlags { format: Some("raw"), ..read };
        assert!(!spec(&path, &raw).expect("described").probed);
    }

    #[test]
    fn errors_of_headers_have_the_words_that_scripts_look_for() {
        for (ours, theirs) in [
            ("header, offset 0: not a qcow2 image: the magic is 0", "Image is not in qcow2 format"),
            ("header, offset 4: unsupported qcow2 version 4", "Unsupported qcow2 version 4"),
            (
                "header, offset 72: unsupported incompatible features: 'time travel' (bit 7), bit 5, bit 63",
                "Unsupported qcow2 feature(s): time travel, Unknown incompatible feature: 8000000000000020",
            ),
        ] {
            assert_eq!(error_text(&Error::invalid(ours), ""), theirs);
        }
    }

    #[test]
    fn option_text_is_completed_and_errors_are_worded_as_the_tools_do() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("a").display().to_string();
        std::fs::write(&path, b"plain").expect("write");
        let opts =
            ImageFlags { image_opts: true, read_only: true, cache: Some("none"), ..Default::default() };
        let found =
            spec(&format!("driver=raw,file.filename={path},cache.direct=off"), &opts).expect("described");
        let json = found.tree.to_json();
        assert_eq!(
            (&json["file"]["driver"], &json["file"]["cache"]["direct"]),
            (&"file".into(), &"off".into())
        );
        assert_eq!((found.name, found.path), (path.clone(), Some(path.clone())));
        let window = spec(&format!("driver=raw,file.filename={path},offset=512"), &opts).expect("described");
        assert!(window.name.starts_with("json:{\"driver\": \"raw\""), "{}", window.name);
        for (text, error) in [
            ("driver=foo", "Unknown driver 'foo'".to_owned()),
            ("read-only=on", "Must specify either driver or file".to_owned()),
            ("driver=raw", "A block device must be specified for \"file\"".to_owned()),
            (
                "driver=raw,file.filename=/nofile",
                "Could not open '/nofile': No such file or directory".to_owned(),
            ),
        ] {
            assert_eq!(spec(text, &opts).expect_err(text).to_string(), error);
        }
    }
}
