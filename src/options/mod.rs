//! The one option text (c-api.md, C10): how nodes, jobs and exports are described, in the vocabulary of QEMU's blockdev.
//!
//! Two spellings make the same tree:
//!
//! - **JSON**, if the first character that is not blank is `{`. Keys may be dotted, also inside objects.
//! - **`key=value,key2=value2`** with dotted keys (`file.cache.direct=on`); a comma is doubled to mean itself. A key
//!   without `=` is an error. One comma at the end is allowed.
//!
//! # Rules of the tree
//!
//! - A key is one or more fragments of ASCII letters, digits, `-` and `_`, joined by dots.
//! - Keys `0`, `1`, ... below one parent make a list, in that order and without gaps; they do not mix with names. This
//!   holds in both spellings, but not for the outermost object, which is never a list.
//! - A key given twice is refused, whatever the spelling, and so is a key that has a value and is a prefix of another.
//!   Objects that are given in pieces (`{"file": {"driver": "file"}, "file.filename": "a"}`) are put together.
//! - Bounds: [`TEXT_LEN_MAX`], [`DEPTH_MAX`], [`ENTRIES_MAX`]. Nothing here panics or recurses deeper than that.
//!
//! # Reading
//!
//! The reader *takes* what it knows and calls [`Options::finish_for`] (or [`Options::finish`]), which fails on what is
//! left over: unknown keys fail when set, never later. A string converts to the type asked for, because in the dotted
//! spelling everything is a string; a JSON value of another type does not, and a number or a boolean is never taken for
//! a string. Errors name the key with its full path, the value, and what was expected.
//!
//! Where to start reading: [`Options`] (`tree.rs` builds, `take.rs` reads), then [`props`].

mod json;
pub mod props;
mod size;
mod take;
#[cfg(test)]
mod tests;
mod text;
mod tree;

pub use props::{Prop, PropStates, PropTable, PropType};
pub use size::parse_size;

use crate::error::{Error, Result};
use serde_json::{Map, Value};

/// Longest option text, in bytes.
pub const TEXT_LEN_MAX: usize = 1 << 20;
/// Most fragments of a key: objects and lists inside one another, the outermost object not counted.
pub const DEPTH_MAX: usize = 32;
/// Most keys and list elements of one tree, inner ones included.
pub const ENTRIES_MAX: usize = 4096;

/// An ordered tree of options. Keys of the accessors may be dotted; see the module for the rules.
///
/// Two trees are equal if they hold the same values; the order of the keys and the place the tree was taken from do not
/// count.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Key of this tree in the tree it was taken from, for messages: `` or `file.`.
    prefix: String,
    root: Map<String, Value>,
}

/// What a key that names a child node holds.
#[derive(Clone, Debug, PartialEq)]
pub enum Child {
    /// The `node-name` of an existing node.
    Name(String),
    /// Options of a node to open.
    Inline(Options),
    /// Explicitly none: JSON `null` or an empty string.
    Null,
}

impl Options {
    /// Reads either spelling. An empty or blank text is an empty tree.
    pub fn parse(text: &str) -> Result<Options> {
        if text.len() > TEXT_LEN_MAX {
            return Err(Error::invalid(format!("option text is longer than {TEXT_LEN_MAX} bytes")));
        }
        let mut builder = tree::Builder::default();
        let trimmed = text.trim_start();
        if trimmed.starts_with('{') {
            for (key, value) in json::parse(trimmed)? {
                builder.insert(&key, value)?;
            }
        } else if !trimmed.is_empty() {
            text::parse(text, &mut builder)?;
        }
        builder.finish()
    }

    /// Makes a tree of a JSON object.
    pub fn from_json(value: &Value) -> Result<Options> {
        let Value::Object(map) = value else {
            return Err(Error::invalid(format!("options are {}, expected an object", tree::shown(value))));
        };
        let mut builder = tree::Builder::default();
        for (key, value) in map {
            builder.insert_ref(key, value)?;
        }
        builder.finish()
    }

    /// The tree as a JSON object without dotted keys; [`Options::from_json`] makes an equal tree of it.
    pub fn to_json(&self) -> Value {
        Value::Object(self.root.clone())
    }

    /// A tree without keys.
    pub fn empty() -> Options {
        Options::default()
    }

    /// Adds a key from outside by the rules of the module; a key that is already there is refused.
    pub fn insert(&mut self, key: &str, value: impl Into<Value>) -> Result<()> {
        let mut builder = tree::Builder::of(&self.root)?;
        builder.insert(key, value.into())?;
        self.root = builder.finish()?.root;
        Ok(())
    }

    /// Sets a key that the program itself chose; what was there before is replaced, also a value where a dotted key needs
    /// an object. Not for keys or values from outside: those take [`Options::insert`].
    pub fn set(&mut self, key: &str, value: impl Into<Value>) -> &mut Self {
        debug_assert!(tree::check_key(key).is_ok(), "key '{key}'");
        let mut map = &mut self.root;
        let mut rest = key;
        while let Some((first, tail)) = rest.split_once('.') {
            if !map.get(first).is_some_and(Value::is_object) {
                map.insert(first.to_owned(), Value::Object(Map::new()));
            }
            let Some(Value::Object(inner)) = map.get_mut(first) else { unreachable!("made an object above") };
            (map, rest) = (inner, tail);
        }
        map.insert(rest.to_owned(), value.into());
        self
    }

    /// Whether no key is left.
    pub fn is_empty(&self) -> bool {
        self.root.is_empty()
    }

    /// The outermost keys, in order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.root.keys().map(String::as_str)
    }

    /// `key` with the path of this tree before it, as it stands in messages.
    pub fn key_path(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    /// The error of a value that has the right type but cannot be: `option 'file.size' <problem>`.
    pub fn invalid(&self, key: &str, problem: impl std::fmt::Display) -> Error {
        Error::invalid(format!("option '{}' {problem}", self.key_path(key)))
    }
}

impl PartialEq for Options {
    fn eq(&self, other: &Self) -> bool {
        self.root == other.root
    }
}

impl From<Options> for Value {
    fn from(options: Options) -> Self {
        Value::Object(options.root)
    }
}
