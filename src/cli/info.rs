//! `cobweb info`: what an image is. Opens neither backing nor data file, and takes no part of an image on trust that it does not show.

use super::getopt::Long;
use super::image::{ImageFlags, ImageSpec, SECTOR, describe};
use super::size::human;
use super::tool::{Ended, Step, Tool, pretty};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::sync::Arc;
use serde_json::{Map, Value, json};
use std::os::unix::fs::MetadataExt;
use std::process::ExitCode;

const HELP: &str = "Usage: cobweb info [-f FMT | --image-opts] [-b] [-U] [--output human|json] FILE

Prints what is known of an image: format, sizes, backing file, snapshots, bitmaps.

  -f, --format FMT           format of the image
      --image-opts           the file is option text
  -b, --backing-chain        the same for each file of its backing chain
      --output human|json    text or JSON
  -U, --force-share          open the image although others write it";

const LONG: &[Long] = &[
    ("help", false, 'h'),
    ("format", true, 'f'),
    ("image-opts", false, 'I'),
    ("backing-chain", false, 'b'),
    ("output", true, 'J'),
    ("force-share", false, 'U'),
    ("object", true, 'O'),
];

/// What is shown of one image.
#[derive(Debug)]
pub(super) struct Info {
    pub(super) filename: String,
    pub(super) format: String,
    pub(super) virtual_size: u64,
    pub(super) file: Option<FileInfo>,
    pub(super) cluster_size: Option<u64>,
    pub(super) encrypted: bool,
    pub(super) dirty: bool,
    pub(super) backing: Option<Backing>,
    pub(super) snapshots: Vec<Value>,
    /// Text lines of the snapshots, header included.
    pub(super) snapshot_lines: Vec<String>,
    /// `format-specific` data.
    pub(super) specific: Option<Value>,
}

/// The file below a format.
#[derive(Clone, Debug)]
pub(super) struct FileInfo {
    filename: String,
    len: u64,
    allocated: u64,
}

/// A backing file as an image names it.
#[derive(Clone, Debug)]
pub(super) struct Backing {
    pub(super) name: String,
    /// As it would be opened.
    pub(super) full: String,
    pub(super) format: Option<String>,
}

/// Runs `cobweb info`.
pub(super) fn run(words: &[String]) -> ExitCode {
    info(words).map_or_else(|Ended(code)| code, |()| ExitCode::SUCCESS)
}

fn info(words: &[String]) -> Step {
    let tool = Tool::new("info", 1, HELP);
    let (mut format, mut image_opts, mut json, mut force_share, mut chain) =
        (None, false, false, false, false);
    let operands = tool.words(words, "hf:bU", LONG, |tool, letter, value| {
        match letter {
            'f' => format = Some(value),
            'I' => image_opts = true,
            'b' => chain = true,
            'J' => json = tool.output(&value)?,
            'U' => force_share = true,
            'O' => tool.object(&value)?,
            _ => {}
        }
        Ok(())
    })?;
    let name = tool.one_file(operands)?;
    tool.check_format(image_opts, format.as_deref())?;
    let ctx = tool.context()?;
    let mut infos: Vec<Info> = Vec::new();
    let mut next = Some((name, format, image_opts));
    while let Some((name, format, image_opts)) = next.take() {
        let flags = ImageFlags {
            format: format.as_deref(),
            image_opts,
            force_share,
            read_only: true,
            ..Default::default()
        };
        if infos.iter().any(|i| i.filename == name) {
            return Err(tool.error(&format!("Backing file '{name}' creates an infinite loop.")));
        }
        let found = describe(&name, &flags, None)
            .and_then(|spec| look(&ctx, spec))
            .map_err(|e| tool.could_not_open(&name, &e))?;
        if chain && let Some(backing) = &found.backing {
            next = Some((backing.full.clone(), backing.format.clone(), false));
        }
        infos.push(found);
    }
    if json {
        let mut list: Vec<Value> = infos.iter().map(Info::json).collect();
        let value = if chain { Value::Array(list) } else { list.remove(0) };
        println!("{}", pretty(&value));
    } else {
        let texts: Vec<String> = infos.iter().map(Info::text).collect();
        print!("{}", texts.join("\n"));
    }
    ctx.close();
    Ok(())
}

/// Looks at an image.
pub(super) fn look(ctx: &Arc<Context>, spec: ImageSpec) -> Result<Info> {
    let file = spec.path.as_deref().map(file_info).transpose()?;
    let graph = ctx.graph();
    match spec.format.as_str() {
        "raw" => {
            let node = graph.open(spec.tree.clone())?;
            let size = node.top_node().limits().size.next_multiple_of(SECTOR);
            graph.forget_node(&node)?;
            Ok(plain(spec, size, file))
        }
        "qcow2" => super::qcow2::look(ctx, spec).map(|info| Info { file, ..info }),
        other => Err(Error::unsupported(format!("Driver '{other}' tells nothing about its images"))),
    }
}

fn plain(spec: ImageSpec, virtual_size: u64, file: Option<FileInfo>) -> Info {
    Info {
        filename: spec.name,
        format: spec.format,
        virtual_size,
        file,
        cluster_size: None,
        encrypted: false,
        dirty: false,
        backing: None,
        snapshots: Vec::new(),
        snapshot_lines: Vec::new(),
        specific: None,
    }
}

fn file_info(path: &str) -> Result<FileInfo> {
    let meta = std::fs::metadata(path).map_err(|e| Error::os(e, format!("Could not open '{path}'")))?;
    Ok(FileInfo {
        filename: path.to_owned(),
        len: meta.len().next_multiple_of(SECTOR),
        allocated: meta.blocks() * 512,
    })
}

impl Info {
    /// The object of `--output=json`, its keys in the order in which qemu-img has them.
    fn json(&self) -> Value {
        let mut map = Map::new();
        let mut put = |key: &str, value: Value| {
            map.insert(key.to_owned(), value);
        };
        if let Some(file) = &self.file {
            put("children", json!([{"name": "file", "info": file.json()}]));
        } else {
            put("children", json!([]));
        }
        if !self.snapshots.is_empty() {
            put("snapshots", Value::Array(self.snapshots.clone()));
        }
        if let Some(format) = self.backing.as_ref().and_then(|b| b.format.clone()) {
            put("backing-filename-format", format.into());
        }
        put("virtual-size", self.virtual_size.into());
        put("filename", self.filename.as_str().into());
        if let Some(size) = self.cluster_size {
            put("cluster-size", size.into());
        }
        put("format", self.format.as_str().into());
        if let Some(file) = &self.file {
            put("actual-size", file.allocated.into());
        }
        if let Some(specific) = &self.specific {
            put("format-specific", json!({"type": self.format, "data": specific}));
        }
        if let Some(backing) = &self.backing {
            put("full-backing-filename", backing.full.as_str().into());
            put("backing-filename", backing.name.as_str().into());
        }
        if self.encrypted {
            put("encrypted", true.into());
        }
        put("dirty-flag", self.dirty.into());
        Value::Object(map)
    }

    fn text(&self) -> String {
        let mut out = format!(
            "image: {}\nfile format: {}\nvirtual size: {} ({} bytes)\n",
            self.filename,
            self.format,
            human(self.virtual_size),
            self.virtual_size
        );
        let mut line = |text: String| {
            out.push_str(&text);
            out.push('\n');
        };
        if let Some(file) = &self.file {
            line(format!("disk size: {}", human(file.allocated)));
        }
        if self.encrypted {
            line("encrypted: yes".to_owned());
        }
        if let Some(size) = self.cluster_size {
            line(format!("cluster_size: {size}"));
        }
        if self.dirty {
            line("cleanly shut down: no".to_owned());
        }
        if let Some(backing) = &self.backing {
            let actual = if backing.full == backing.name {
                String::new()
            } else {
                format!(" (actual path: {})", backing.full)
            };
            line(format!("backing file: {}{actual}", backing.name));
            if let Some(format) = &backing.format {
                line(format!("backing file format: {format}"));
            }
        }
        self.snapshot_lines.iter().for_each(|l| line(l.clone()));
        if let Some(specific) = &self.specific {
            line("Format specific information:".to_owned());
            specific_lines(specific, 1).into_iter().for_each(&mut line);
        }
        if let Some(file) = &self.file {
            line("Child node '/file':".to_owned());
            line(format!("    filename: {}", file.filename));
            line("    protocol type: file".to_owned());
            line(format!("    file length: {} ({} bytes)", human(file.len), file.len));
            line(format!("    disk size: {}", human(file.allocated)));
        }
        out
    }
}

impl FileInfo {
    fn json(&self) -> Value {
        json!({
            "children": [],
            "virtual-size": self.len,
            "filename": self.filename,
            "format": "file",
            "actual-size": self.allocated,
            "format-specific": {"type": "file", "data": {}},
            "dirty-flag": false
        })
    }
}

/// What a format says of itself, a line for each value, indented by what it is part of.
pub(super) fn specific_lines(value: &Value, depth: usize) -> Vec<String> {
    let indent = "    ".repeat(depth);
    let pairs: Vec<(String, &Value)> = match value {
        Value::Object(map) => map.iter().map(|(k, v)| (k.replace('-', " "), v)).collect(),
        Value::Array(list) => list.iter().enumerate().map(|(n, v)| (format!("[{n}]"), v)).collect(),
        _ => Vec::new(),
    };
    let mut lines = Vec::new();
    for (key, value) in pairs {
        match value {
            Value::Object(_) | Value::Array(_) => {
                lines.push(format!("{indent}{key}:"));
                lines.extend(specific_lines(value, depth + 1));
            }
            Value::String(text) => lines.push(format!("{indent}{key}: {text}")),
            other => lines.push(format!("{indent}{key}: {other}")),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_values_are_indented_under_their_key() {
        let value =
            json!({"lazy-refcounts": false, "bitmaps": [{"flags": ["auto"], "name": "b0"}], "compat": "1.1"});
        let expected = [
            "    lazy refcounts: false",
            "    bitmaps:",
            "        [0]:",
            "            flags:",
            "                [0]: auto",
            "            name: b0",
            "    compat: 1.1",
        ];
        assert_eq!(specific_lines(&value, 1), expected);
    }
}
