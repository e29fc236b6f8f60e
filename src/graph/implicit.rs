//! Names found inside images: whether they are opened, and what options they stand for (C11; qcow2.md 5.5, 5.6).
//!
//! An image can come from anybody, so a name in it is opened only if the caller has said so; the default is to refuse, naming image, structure and name.
//! Names are read as QEMU reads them: a path (relative to the directory of the naming image, or as it stands, see [`Base`]), `file:` before a path, or a `json:`
//! description. Other protocols are drivers that this library has or has not; an unknown one is refused by its name.

use super::registry::find_driver;
use crate::error::{Error, Result};
use crate::io::file::{self, FileNode};
use crate::limits::GRAPH_DEPTH_MAX;
use crate::node::Node;
use crate::options::Options;
use crate::sync::Arc;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Whether names found inside images are opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ImplicitOpen {
    /// No.
    #[default]
    Deny,
    /// Files that lie in the directory of the image that names them, after symbolic links have been followed.
    SameDirectory,
    /// Yes, as QEMU does.
    Allow,
}

impl ImplicitOpen {
    /// The values of the option `implicit-open`, in the order of the variants.
    pub const NAMES: &'static [&'static str] = &["deny", "same-directory", "allow"];

    /// By its index in [`ImplicitOpen::NAMES`].
    pub fn from_index(index: usize) -> Self {
        match index {
            1 => Self::SameDirectory,
            2 => Self::Allow,
            _ => Self::Deny,
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

/// What a relative path is relative to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// The directory of the naming image.
    Image,
    /// The working directory.
    Process,
}

/// A name found inside an image.
#[derive(Clone, Copy, Debug)]
pub struct NamedChild<'a> {
    /// Option key of the child it stands for: `backing`, `data-file`.
    pub key: &'static str,
    /// The structure that holds it, for messages.
    pub structure: &'static str,
    /// The name, as stored.
    pub name: &'a [u8],
    /// Driver to open it with; `None` if the image does not say.
    pub format: Option<&'a [u8]>,
    /// What a relative path is relative to.
    pub base: Base,
    /// The node of the naming image's file.
    pub image: &'a Arc<dyn Node>,
}

/// Longest name, in bytes.
const NAME_MAX: usize = 4096;

impl NamedChild<'_> {
    /// The options of the node that the name stands for, opened read-only or not, if `policy` allows it.
    pub(super) fn resolve(&self, policy: ImplicitOpen, read_only: bool) -> Result<Options> {
        let name = std::str::from_utf8(self.name).ok().filter(|n| n.len() <= NAME_MAX && !n.contains('\0'));
        let Some(name) = name else {
            return Err(self.refuse(libc::EINVAL, "is not text of at most 4096 bytes"));
        };
        if policy == ImplicitOpen::Deny {
            let why = format!(
                "may not be opened: it is named by the image, and implicit-open is deny (give '{}' or implicit-open=allow)",
                self.key
            );
            return Err(self.refuse(libc::EACCES, why));
        }
        let mut file = Options::empty();
        if let Some(json) = name.strip_prefix("json:") {
            if policy != ImplicitOpen::Allow {
                return Err(self.refuse(
                    libc::EACCES,
                    "is a json: description, which implicit-open=same-directory does not cover",
                ));
            }
            file = Options::parse(json.trim_start()).map_err(|e| self.refuse(libc::EINVAL, e.full_text()))?;
            if !json.trim_start().starts_with('{') {
                return Err(self.refuse(libc::EINVAL, "is not a JSON object"));
            }
            if read_only {
                let mut tree = file.to_json();
                set_read_only(&mut tree);
                file = Options::from_json(&tree)?;
            }
        } else {
            let path = self.path(name, policy)?;
            let Some(path) = path.to_str() else {
                return Err(self.refuse(libc::EINVAL, "is in a directory whose name is not text"));
            };
            file.set("driver", "file");
            file.set("filename", path);
            self.inherit(&mut file);
            if read_only {
                file.set("read-only", "on");
            }
        }
        self.with_format(file, read_only)
    }

    /// Puts the format above the file, unless a description says it all.
    fn with_format(&self, mut file: Options, read_only: bool) -> Result<Options> {
        let said = file.peek_str("driver").map(str::to_owned);
        let format = match self.format {
            Some(format) => std::str::from_utf8(format)
                .map_err(|_| self.refuse(libc::EINVAL, "has a format whose name is not text"))?,
            None if said.as_deref().is_some_and(|d| d != "file" && d != "host_device") => {
                // A json: description of a format.
                return Ok(file);
            }
            None => {
                let why = format!("has no stored format; give it ('{}.driver=...')", self.key);
                return Err(self.refuse(libc::EINVAL, why));
            }
        };
        if said.as_deref() == Some(format) || said.is_none() {
            if said.is_none() {
                file.set("driver", format);
            }
            return Ok(file);
        }
        let mut top = Options::empty();
        top.set("driver", format);
        if read_only && matches!(format, "qcow2" | "raw") {
            top.set("read-only", "on");
        }
        top.set("file", file);
        Ok(top)
    }

    fn path(&self, name: &str, policy: ImplicitOpen) -> Result<PathBuf> {
        let path = match protocol(name) {
            None => name,
            Some("file") => &name["file:".len()..],
            Some(other) => {
                return Err(self
                    .refuse(libc::ENOTSUP, format!("needs the protocol '{other}', which is not supported")));
            }
        };
        if path.is_empty() {
            return Err(self.refuse(libc::EINVAL, "is empty"));
        }
        let image = file_name(self.image).map(PathBuf::from);
        let directory = image.as_deref().and_then(Path::parent);
        let full = match (self.base, directory) {
            (Base::Image, _) if Path::new(path).is_absolute() => PathBuf::from(path),
            (Base::Process, _) => PathBuf::from(path),
            (Base::Image, Some(directory)) => directory.join(path),
            (Base::Image, None) => {
                return Err(self.refuse(libc::EINVAL, "is relative, and the image has no directory"));
            }
        };
        if policy == ImplicitOpen::SameDirectory {
            let real = |p: &Path| file::real_path(if p.as_os_str().is_empty() { Path::new(".") } else { p });
            let beside =
                directory.and_then(real).zip(real(&full)).is_some_and(|(d, f)| f.parent() == Some(&d));
            if !beside {
                return Err(self.refuse(
                    libc::EACCES,
                    "does not lie in the directory of the image (implicit-open=same-directory)",
                ));
            }
        }
        Ok(full)
    }

    /// How the naming image's file is opened goes for the files it names, too.
    fn inherit(&self, file: &mut Options) {
        let below = leaf(self.image);
        for key in ["cache.direct", "cache.no-flush", "aio", "discard", "locking", "force-share"] {
            if let Some(value) = below.get(key) {
                file.set(key, value);
            }
        }
    }

    pub(super) fn refuse(&self, errno: i32, why: impl std::fmt::Display) -> Error {
        let image = file_name(self.image).unwrap_or_else(|| "?".to_owned());
        let shown: String = String::from_utf8_lossy(self.name).chars().take(256).collect();
        let code = match errno {
            libc::ENOTSUP => crate::error::Code::Unsupported,
            _ => crate::error::Code::Invalid,
        };
        Error::new(
            errno,
            code,
            format!("image '{image}': {} '{}' {why}", self.structure, shown.escape_debug()),
        )
    }
}

/// Sets `read-only` for every node of a description whose driver knows it and that does not say itself. Recurses as deep as the options.
fn set_read_only(tree: &mut Value) {
    let Value::Object(map) = tree else { return };
    map.values_mut().for_each(set_read_only);
    let driver = map.get("driver").and_then(Value::as_str).and_then(find_driver);
    if driver.is_some_and(|d| d.props.find("read-only").is_some()) && !map.contains_key("read-only") {
        map.insert("read-only".to_owned(), Value::Bool(true));
    }
}

/// The protocol before the first colon, if that comes before the first slash.
fn protocol(name: &str) -> Option<&str> {
    let (before, _) = name.split_once(':')?;
    (!before.contains('/')).then_some(before)
}

/// The node at the end of the `file` edges: the one that has a file, if any has.
fn leaf(node: &Arc<dyn Node>) -> Arc<dyn Node> {
    let mut at = node.clone();
    for _ in 0..GRAPH_DEPTH_MAX {
        let below = at.children().into_iter().find(|(key, _)| *key == "file").map(|(_, edge)| edge.node());
        match below {
            Some(below) => at = below,
            None => break,
        }
    }
    at
}

/// The file that `node` lies in, as it was named.
pub(super) fn file_name(node: &Arc<dyn Node>) -> Option<String> {
    leaf(node).get("filename")
}

/// The files of a backing chain, to find loops (qcow2.md 5.7).
#[derive(Debug, Default)]
pub struct Chain {
    files: BTreeSet<(u64, u64)>,
    len: usize,
}

impl Chain {
    /// Files counted.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no file has been counted.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Counts the file of an open node.
    pub fn enter_node(&mut self, node: &Arc<dyn Node>) {
        self.len += 1;
        let leaf = leaf(node);
        self.files.extend(leaf.as_any().downcast_ref::<FileNode>().map(FileNode::identity));
    }

    /// Counts the file of a node that is to be opened from `options`; false if it is in the chain already.
    pub fn enter(&mut self, options: &Options) -> bool {
        self.len += 1;
        let mut key = String::from("filename");
        for _ in 0..crate::options::DEPTH_MAX {
            if let Some(name) = options.peek_str(&key) {
                let file = file::identity_at(Path::new(name));
                return file.is_none_or(|file| self.files.insert(file));
            }
            key.insert_str(0, "file.");
        }
        true
    }
}
