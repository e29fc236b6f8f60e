//! Open, close, reopen, truncate: how the image is open.

use super::super::create::make_qcow2;
use super::super::image::{
    CacheMode, Image, ImageFlags, ImageSpec, cache_mode, describe, error_text, warn_probed_raw,
};
use super::super::sys;
use super::queued::Queued;
use super::session::{Failed, Outcome, Session, Words};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::format::qcow2::create::CreateOptions;
use crate::graph::find_driver;
use crate::options::Options;
use crate::sync::Arc;
use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

/// What the options of `cobweb io` and of `open` say about an image.
#[derive(Clone, Debug, Default)]
pub(super) struct OpenFlags {
    read_only: bool,
    snapshot: bool,
    copy_on_read: bool,
    force_share: bool,
    cache: Option<String>,
    /// qemu-io deallocates unless told otherwise.
    ignore_discard: bool,
    aio: Option<String>,
}

impl OpenFlags {
    /// Takes one option; the error is what follows the program's name.
    pub(super) fn set(&mut self, letter: char, value: &str) -> std::result::Result<(), String> {
        match letter {
            'r' => self.read_only = true,
            's' => self.snapshot = true,
            'C' => self.copy_on_read = true,
            'U' => self.force_share = true,
            'n' => self.cache = Some("none".to_owned()),
            'k' => self.aio = Some("native".to_owned()),
            't' if cache_mode(value).is_err() => return Err(format!("Invalid cache option: {value}")),
            't' => self.cache = Some(value.to_owned()),
            'i' if !matches!(value, "threads" | "native" | "io_uring") => {
                return Err(format!("Invalid aio option: {value}"));
            }
            'i' => self.aio = Some(value.to_owned()),
            'd' => match value {
                "ignore" | "off" => self.ignore_discard = true,
                "unmap" | "on" => self.ignore_discard = false,
                _ => return Err(format!("Invalid discard option: {value}")),
            },
            _ => {}
        }
        Ok(())
    }

    fn mode(&self) -> Result<CacheMode> {
        cache_mode(self.cache.as_deref().unwrap_or("writeback"))
    }

    /// What can be refused before anything is opened.
    fn check(&self) -> Result<()> {
        if self.aio.as_deref() == Some("native") && !self.mode()?.direct {
            return Err(Error::invalid(
                "aio=native was specified, but it requires cache.direct=on, which was not specified.",
            ));
        }
        if self.force_share && !self.read_only {
            return Err(Error::invalid("force-share=on can only be used with read-only images"));
        }
        Ok(())
    }

    fn image_flags<'a>(&'a self, format: Option<&'a str>, image_opts: bool) -> ImageFlags<'a> {
        ImageFlags {
            format,
            cache: self.cache.as_deref(),
            // Native AIO is what io_uring does better.
            aio: self.aio.as_deref().filter(|aio| *aio != "native"),
            discard: Some(!self.ignore_discard),
            image_opts,
            force_share: self.force_share,
            read_only: self.read_only,
        }
    }
}

/// The image that commands work on.
pub(super) struct OpenImage {
    pub(super) image: Image,
    pub(super) queued: Queued,
    /// Each write is durable when it ends.
    pub(super) write_through: bool,
    /// Raw by probing: nothing may be written that would make it something else the next time.
    pub(super) guards_head: bool,
    writable: bool,
    /// What is read from a backing file is kept.
    pub(super) copy_on_read: bool,
}

impl OpenImage {
    fn new(image: Image, flags: &OpenFlags) -> Result<Self> {
        let writable = image.disk.top().is_some_and(|top| !top.limits().read_only);
        Ok(Self {
            queued: Queued::default(),
            write_through: flags.mode()?.write_through,
            guards_head: writable && image.spec.probed && image.spec.format == "raw",
            writable,
            copy_on_read: flags.copy_on_read && writable,
            image,
        })
    }

    pub(super) fn is_writable(&self) -> bool {
        self.writable
    }
}

impl Session {
    /// Opens the image of the command line; false, and said why, if that fails.
    pub(super) fn open_first(
        &mut self,
        name: &str,
        format: Option<&str>,
        image_opts: bool,
        flags: &OpenFlags,
    ) -> bool {
        let mut more = Options::empty();
        if let Some(format) = format {
            more.set("driver", format);
        }
        self.open_image(name, image_opts, flags, more).is_ok()
    }

    fn open_image(&mut self, name: &str, image_opts: bool, flags: &OpenFlags, more: Options) -> Outcome {
        let ctx = self.ctx.clone();
        let opened = flags
            .check()
            .and_then(|()| describe(name, &flags.image_flags(None, image_opts), Some(more)))
            .and_then(|spec| {
                if spec.probed && spec.format == "raw" && !flags.read_only {
                    warn_probed_raw(&spec.name);
                }
                let image = open_as_wanted(&ctx, spec, flags)?;
                // Without -r the user wants to write; an image that cannot be written is refused when opened, not later.
                if !flags.read_only && image.disk.top().is_some_and(|t| t.limits().read_only) {
                    image.close()?;
                    return Err(Error::invalid("Block node is read-only"));
                }
                OpenImage::new(image, flags)
            });
        match opened {
            Ok(image) => {
                self.image = Some(image);
                Ok(())
            }
            Err(e) => {
                let text = error_text(&e, name);
                let device = if image_opts { String::new() } else { format!(" device {name}") };
                Err(self.complain(&format!("can't open{device}: {text}")))
            }
        }
    }

    pub(super) fn open(&mut self, words: &Words, usage: &str) -> Outcome {
        let mut flags = OpenFlags::default();
        let mut more = Options::empty();
        for (letter, value) in &words.options {
            if *letter == 'o' {
                more = self.driver_options(value)?;
            } else if let Err(text) = flags.set(*letter, value) {
                return Err(self.complain(&text));
            }
        }
        if words.operands.len() > 1 {
            return Err(self.refuse(usage));
        }
        if self.image.is_some() {
            return Err(self.complain("file open already, try 'help close'"));
        }
        match words.operands.first() {
            Some(name)
                if more.peek_str("file").is_some()
                    || ["file.filename", "file.driver"].iter().any(|key| more.contains(key)) =>
            {
                let text = "Can't specify 'file' and 'filename' options at the same time";
                Err(self.complain(&format!("can't open device {name}: {text}")))
            }
            Some(name) => self.open_image(name, false, &flags, more),
            None => self.open_image("", true, &flags, more),
        }
    }

    /// `key=value` options; a key alone is switched on, as QEMU still allows.
    fn driver_options(&mut self, text: &str) -> std::result::Result<Options, Failed> {
        let mut parts = Vec::new();
        for part in text.split(',') {
            if part.contains('=') || part.is_empty() || text.trim_start().starts_with('{') {
                parts.push(part.to_owned());
            } else {
                let warning = format!(
                    "warning: short-form boolean option '{part}' deprecated\nPlease use {part}=on instead"
                );
                let _ = self.complain(&warning);
                parts.push(format!("{part}=on"));
            }
        }
        Options::parse(&parts.join(",")).map_err(|e| self.complain(&e.full_text()))
    }

    /// Closes an image. What was written and cannot be brought down is an error, though each write had ended well.
    pub(super) fn close_image(&mut self, mut image: OpenImage) -> Outcome {
        self.finish_queued_of(&mut image);
        image.queued = Queued::default();
        let name = image.image.spec.name.clone();
        image.image.close().map_err(|e| self.complain(&error_text(&e, &name)))
    }

    /// Options of `reopen` that are wrong by themselves.
    pub(super) fn check_reopen(&mut self, letter: char, value: &str, before: &Words) -> Outcome {
        if matches!(letter, 'r' | 'w') && (before.has('r') || before.has('w')) {
            return Err(self.complain("Only one -r/-w option may be given"));
        }
        if letter == 'c' && cache_mode(value).is_err() {
            return Err(self.complain(&format!("Invalid cache option: {value}")));
        }
        Ok(())
    }

    pub(super) fn reopen(&mut self, words: &Words, usage: &str) -> Outcome {
        if !words.operands.is_empty() {
            return Err(self.refuse(usage));
        }
        let more = match words.value('o') {
            Some(text) => self.driver_options(text)?,
            None => Options::empty(),
        };
        if (words.has('r') || words.has('w')) && more.contains("read-only") {
            return Err(self.complain("Cannot set both -r/-w and 'read-only'"));
        }
        if words.has('c') && more.contains("cache") {
            return Err(self.complain("Cannot set both -c and the cache options"));
        }
        let Some(mut open) = self.image.take() else { return Err(Failed) };
        self.finish_queued_of(&mut open);
        match changed(&open.image.spec, words, &more) {
            Ok(spec) => self.exchange(open, spec, words.value('c')),
            Err(e) => {
                self.image = Some(open);
                Err(self.complain(&error_text(&e, "")))
            }
        }
    }

    /// Closes the image and opens it as `spec` says, or as it was if that fails.
    fn exchange(&mut self, open: OpenImage, spec: ImageSpec, cache: Option<&str>) -> Outcome {
        let before = open.image.spec.clone();
        let write_through = match cache.map(cache_mode) {
            Some(Ok(mode)) => mode.write_through,
            _ => open.write_through,
        };
        let guards = open.guards_head;
        let mut outcome = self.close_image(open);
        let ctx = self.ctx.clone();
        let image = Image::open(&ctx, spec).or_else(|e| {
            outcome = Err(self.complain(&error_text(&e, &before.name)));
            Image::open(&ctx, before)
        });
        let opened = image.and_then(|image| OpenImage::new(image, &OpenFlags::default()));
        match opened {
            Ok(open) => {
                let guards_head = guards && open.writable;
                self.image = Some(OpenImage { write_through, guards_head, ..open });
                outcome
            }
            Err(e) => Err(self.complain(&error_text(&e, ""))),
        }
    }

    pub(super) fn check_preallocation(&mut self, mode: &str) -> Outcome {
        match mode {
            "off" | "metadata" | "falloc" | "full" => Ok(()),
            _ => Err(self.complain(&format!("Invalid preallocation mode '{mode}'"))),
        }
    }

    pub(super) fn truncate(&mut self, words: &Words, usage: &str) -> Outcome {
        let Some(word) = words.operands.first() else { return Err(self.refuse(usage)) };
        let size = self.size(word)?;
        if words.operands.len() > 1 {
            return Err(self.refuse(usage));
        }
        let mode = words.value('m').unwrap_or("off");
        let Some(mut open) = self.image.take() else { return Err(Failed) };
        self.finish_queued_of(&mut open);
        let spec = open.image.spec.clone();
        let is_file = spec.format == "raw" && !spec.tree.contains("offset") && !spec.tree.contains("size");
        let Some(path) = spec.path.clone().filter(|_| is_file) else {
            self.image = Some(open);
            return Err(self.complain("Image format driver does not support resize"));
        };
        // The size of an open file is fixed, so it is closed for the change.
        let done = resize_file(&path, size, mode);
        let reopened = self.exchange(open, spec, None);
        match done {
            Ok(()) => reopened,
            Err(e) => Err(self.complain(&error_text(&e, &path))),
        }
    }
}

/// Opens what was described, under a temporary image with `-s`.
fn open_as_wanted(ctx: &Arc<Context>, spec: ImageSpec, flags: &OpenFlags) -> Result<Image> {
    if flags.copy_on_read && flags.read_only {
        return Err(Error::invalid("Can't use copy-on-read on read-only device"));
    }
    if !flags.snapshot {
        return Image::open(ctx, spec);
    }
    let mut below = spec.clone();
    below.tree.set("file.read-only", "on");
    let base = Image::open(ctx, below.clone())?;
    let size = base.size();
    base.close()?;
    let file = TempFile::new()?;
    make_qcow2(ctx, &file.0, &CreateOptions::new(size), false).map_err(Error::invalid)?;
    let mut tree = Options::empty();
    tree.set("driver", "qcow2").set("file.driver", "file").set("file.filename", file.0.as_str());
    tree.set("discard", "unmap").set("file.discard", "unmap");
    tree.set("backing", below.tree.to_json());
    Image::open(ctx, ImageSpec { tree, format: "qcow2".to_owned(), probed: false, ..spec })
}

/// A file in the directory for large temporary files, under its name until this is dropped. Who has it open keeps it.
struct TempFile(String);

impl TempFile {
    fn new() -> Result<Self> {
        let dir = std::env::var("TMPDIR").unwrap_or_else(|_| "/var/tmp".to_owned());
        for n in 0..100u32 {
            let path = format!("{dir}/cobweb-{}-{n}", std::process::id());
            match std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
                Ok(_) => return Ok(Self(path)),
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(Error::os(e, format!("Could not create '{path}'"))),
            }
        }
        Err(Error::invalid(format!("no name is free for a temporary file in '{dir}'")))
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The description with the changes of a `reopen`.
fn changed(spec: &ImageSpec, words: &Words, more: &Options) -> Result<ImageSpec> {
    let mut new = spec.clone();
    let known =
        |key: &str| find_driver(&spec.format).is_some_and(|d| d.props.props.iter().any(|p| p.name == key));
    let mut more = more.clone();
    let keys: Vec<String> = more.keys().map(str::to_owned).collect();
    for key in keys {
        let allowed =
            matches!(key.as_str(), "read-only" | "cache" | "discard" | "detect-zeroes") || known(&key);
        if !allowed || matches!(key.as_str(), "driver" | "node-name" | "file" | "backing") {
            let name = innermost(&more, &key);
            return Err(Error::invalid(format!("Cannot change the option '{name}'")));
        }
        let Some(value) = more.take_value(&key) else { continue };
        let of_file = matches!(key.as_str(), "read-only" | "cache" | "discard" | "detect-zeroes");
        new.tree.set(&if of_file { format!("file.{key}") } else { key }, value);
    }
    if words.has('r') || words.has('w') {
        new.tree.set("file.read-only", if words.has('r') { "on" } else { "off" });
        if words.has('w') {
            new.tree.take_value("file.force-share");
        }
        new.tree.take_value("read-only");
    }
    if let Some(mode) = words.value('c').map(cache_mode).transpose()? {
        new.tree.set("file.cache.direct", if mode.direct { "on" } else { "off" });
        new.tree.set("file.cache.no-flush", if mode.no_flush { "on" } else { "off" });
    }
    Ok(new)
}

/// The option as the user may have written it: an option of the file by its own name, another one with its path.
fn innermost(options: &Options, key: &str) -> String {
    let mut path = key.to_owned();
    let json = options.to_json();
    let mut at = &json[key];
    while let Some((name, inner)) = at.as_object().and_then(|map| map.iter().next()) {
        path = format!("{path}.{name}");
        at = inner;
    }
    path.strip_prefix("file.").map_or(path.clone(), str::to_owned)
}

/// Sets the length of a raw file; `mode` says what becomes of the new part.
fn resize_file(path: &str, size: u64, mode: &str) -> Result<()> {
    let at = |e| Error::os(e, format!("Could not resize '{path}'"));
    if mode == "metadata" {
        return Err(Error::unsupported("Unsupported preallocation mode: metadata"));
    }
    let file = File::options().read(true).write(true).open(path).map_err(at)?;
    let old = file.metadata().map_err(at)?.len();
    if mode != "off" && size < old {
        return Err(Error::invalid("Cannot use preallocation for shrinking files"));
    }
    match mode {
        "falloc" if size > old => sys::allocate(&file, old, size - old).map_err(at),
        "full" => write_zeros(&file, old, size).map_err(at),
        _ => file.set_len(size).map_err(at),
    }
}

fn write_zeros(file: &File, from: u64, to: u64) -> std::io::Result<()> {
    let zeros = vec![0; 1 << 20];
    let mut at = from;
    while at < to {
        let len = (to - at).min(zeros.len() as u64);
        file.write_all_at(&zeros[..len as usize], at)?;
        at += len;
    }
    file.sync_all()
}
