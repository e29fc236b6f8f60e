//! Reading: typed accessors that take a key out of the tree, and the complaint about what is left.
//!
//! Every accessor gives `None` if the key is not there, and an error with the key's full path, its value and what was
//! expected if the value has the wrong type. The key is gone afterwards either way; an object that loses its last key that
//! way goes with it, so that an empty tree means that everything was understood.

use super::size::{hex_digits, read_digits, read_size};
use super::tree::{shortened, shown};
use super::{Child, ENTRIES_MAX, Options, PropTable};
use crate::error::{Error, Result};
use serde_json::{Map, Value};
use std::ops::RangeInclusive;

/// Most left-over keys that one message names.
const LEFT_NAMED_MAX: usize = 32;

impl Options {
    /// Text; JSON strings only.
    pub fn take_str(&mut self, key: &str) -> Result<Option<String>> {
        self.take_as(key, "a string", |value| match value {
            Value::String(text) => Ok(text),
            other => Err(other),
        })
    }

    /// A switch: `on`, `yes`, `true`, `off`, `no`, `false`, or a JSON boolean.
    pub fn take_bool(&mut self, key: &str) -> Result<Option<bool>> {
        self.take_as(key, "on or off", |value| {
            Ok(match &value {
                Value::Bool(v) => *v,
                Value::String(text) => match text.as_str() {
                    "on" | "yes" | "true" => true,
                    "off" | "no" | "false" => false,
                    _ => return Err(value),
                },
                _ => return Err(value),
            })
        })
    }

    /// A number without suffix: decimal or `0x` hexadecimal text, or a JSON integer.
    pub fn take_u64(&mut self, key: &str) -> Result<Option<u64>> {
        self.take_as(key, "a number without sign and suffix", |value| read_u64(&value).ok_or(value))
    }

    /// Like [`Options::take_u64`], within `range`.
    pub fn take_u64_in(&mut self, key: &str, range: RangeInclusive<u64>) -> Result<Option<u64>> {
        let expected = format!("a number from {} to {}", range.start(), range.end());
        self.take_as(key, &expected, |value| {
            read_u64(&value).filter(|number| range.contains(number)).ok_or(value)
        })
    }

    /// A size in bytes: text as [`super::parse_size`] reads it, or a JSON integer.
    pub fn take_size(&mut self, key: &str) -> Result<Option<u64>> {
        self.take_as(key, "a size (such as 65536, 64k or 1.5G, below 16E)", |value| {
            match &value {
                Value::Number(number) => number.as_u64(),
                Value::String(text) => read_size(text).ok(),
                _ => None,
            }
            .ok_or(value)
        })
    }

    /// A finite number, with or without fraction and exponent.
    pub fn take_f64(&mut self, key: &str) -> Result<Option<f64>> {
        self.take_as(key, "a number", |value| {
            match &value {
                Value::Number(number) => number.as_f64(),
                Value::String(text) => text.parse().ok(),
                _ => None,
            }
            .filter(|number: &f64| number.is_finite())
            .ok_or(value)
        })
    }

    /// One of `values`, spelled exactly so; gives its index.
    pub fn take_enum(&mut self, key: &str, values: &[&'static str]) -> Result<Option<usize>> {
        let expected = format!("one of {}", values.join(", "));
        self.take_as(key, &expected, |value| {
            let found = value.as_str().and_then(|text| values.iter().position(|v| *v == text));
            found.ok_or(value)
        })
    }

    /// A list of numbers: a JSON array, index keys (`a.0=50,a.1=80`), or one text with `:` or `,` between the numbers
    /// (`a=50:80`; in the dotted spelling its commas are doubled: `a=50,,80`). An empty text is an empty list. The elements
    /// are read like [`Options::take_u64`]. A single JSON number is not a list.
    pub fn take_list_u64(&mut self, key: &str) -> Result<Option<Vec<u64>>> {
        self.take_as(key, "a list of numbers (such as 50:80:95)", |value| {
            match &value {
                Value::Array(list) => list.iter().map(read_u64).collect(),
                Value::String(text) if text.is_empty() => Some(Vec::new()),
                // A text is not bounded by the number of entries of the tree, so it gets the same bound here.
                Value::String(text) if text.split([':', ',']).nth(ENTRIES_MAX).is_none() => {
                    text.split([':', ',']).map(text_u64).collect()
                }
                _ => None,
            }
            .ok_or(value)
        })
    }

    /// A list of texts: a JSON array of strings or index keys.
    pub fn take_list_str(&mut self, key: &str) -> Result<Option<Vec<String>>> {
        self.take_as(key, "a list of strings", |value| match value {
            Value::Array(list) if list.iter().all(Value::is_string) => Ok(list
                .into_iter()
                .filter_map(|v| match v {
                    Value::String(text) => Some(text),
                    _ => None,
                })
                .collect()),
            other => Err(other),
        })
    }

    /// A child node: a text is the name of a node, an object the options of one to open; `null` and the empty text are
    /// [`Child::Null`].
    pub fn take_child(&mut self, key: &str) -> Result<Option<Child>> {
        let prefix = format!("{}.", self.key_path(key));
        self.take_as(key, "a node-name or the options of a node", |value| match value {
            Value::Null => Ok(Child::Null),
            Value::String(name) if name.is_empty() => Ok(Child::Null),
            Value::String(name) => Ok(Child::Name(name)),
            Value::Object(root) => Ok(Child::Inline(Options { prefix, root })),
            other => Err(other),
        })
    }

    /// The options below a key, as a tree of their own that remembers its path for messages.
    pub fn take_object(&mut self, key: &str) -> Result<Option<Options>> {
        let prefix = format!("{}.", self.key_path(key));
        self.take_as(key, &format!("options below it ('{}...')", shortened(&prefix)), |value| match value {
            Value::Object(root) => Ok(Options { prefix, root }),
            other => Err(other),
        })
    }

    /// Whatever a key holds, as JSON.
    pub fn take_value(&mut self, key: &str) -> Option<Value> {
        take_from(&mut self.root, key)
    }

    /// The text of a key that stays where it is; `None` also if it is not a string.
    pub fn peek_str(&self, key: &str) -> Option<&str> {
        self.peek(key).and_then(Value::as_str)
    }

    /// Whether there is something under a key, be it a value, an object or `null`.
    pub fn contains(&self, key: &str) -> bool {
        self.peek(key).is_some()
    }

    /// [`Options::take_str`] for a required key.
    pub fn require_str(&mut self, key: &str) -> Result<String> {
        self.take_str(key)?.ok_or_else(|| self.missing(key))
    }

    /// [`Options::take_bool`] for a required key.
    pub fn require_bool(&mut self, key: &str) -> Result<bool> {
        self.take_bool(key)?.ok_or_else(|| self.missing(key))
    }

    /// [`Options::take_u64`] for a required key.
    pub fn require_u64(&mut self, key: &str) -> Result<u64> {
        self.take_u64(key)?.ok_or_else(|| self.missing(key))
    }

    /// [`Options::take_size`] for a required key.
    pub fn require_size(&mut self, key: &str) -> Result<u64> {
        self.take_size(key)?.ok_or_else(|| self.missing(key))
    }

    /// [`Options::take_enum`] for a required key.
    pub fn require_enum(&mut self, key: &str, values: &[&'static str]) -> Result<usize> {
        self.take_enum(key, values)?.ok_or_else(|| self.missing(key))
    }

    /// [`Options::take_child`] for a required key; [`Child::Null`] counts as missing.
    pub fn require_child(&mut self, key: &str) -> Result<Child> {
        match self.take_child(key)? {
            None | Some(Child::Null) => Err(self.missing(key)),
            Some(child) => Ok(child),
        }
    }

    /// The error of a required key that is not there.
    pub fn missing(&self, key: &str) -> Error {
        Error::invalid(format!("missing required option '{}'", self.key_path(key)))
    }

    /// Fails if a key is left, and names all of them by their full path.
    pub fn finish(self) -> Result<()> {
        match self.left_over() {
            None => Ok(()),
            Some(message) => Err(Error::invalid(message)),
        }
    }

    /// Like [`Options::finish`]; the message also says what the driver knows.
    pub fn finish_for(self, table: &PropTable) -> Result<()> {
        match self.left_over() {
            None => Ok(()),
            Some(message) => {
                let known = table.known_keys();
                let known = if known.is_empty() { "no options" } else { &known };
                Err(Error::invalid(format!("{message} (driver '{}' knows: {known})", table.driver)))
            }
        }
    }

    fn left_over(&self) -> Option<String> {
        let mut names = Vec::new();
        for (key, value) in &self.root {
            name_leaves(value, self.key_path(key), &mut names);
        }
        if names.is_empty() {
            return None;
        }
        let more = names.len().saturating_sub(LEFT_NAMED_MAX);
        names.truncate(LEFT_NAMED_MAX);
        let names: Vec<String> = names.iter().map(|name| format!("'{}'", shortened(name))).collect();
        let plural = if names.len() > 1 { "s" } else { "" };
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        Some(format!("unknown option{plural} {}{more}", names.join(", ")))
    }

    fn peek(&self, key: &str) -> Option<&Value> {
        let mut map = &self.root;
        let mut rest = key;
        while let Some((first, tail)) = rest.split_once('.') {
            map = map.get(first)?.as_object()?;
            rest = tail;
        }
        map.get(rest)
    }

    /// Takes a key and converts its value; `convert` hands a value back that it does not take.
    fn take_as<T>(
        &mut self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(Value) -> std::result::Result<T, Value>,
    ) -> Result<Option<T>> {
        let Some(value) = self.take_value(key) else { return Ok(None) };
        match convert(value) {
            Ok(taken) => Ok(Some(taken)),
            Err(value) => {
                let path = self.key_path(key);
                Err(Error::invalid(format!("option '{path}' is {}, expected {expected}", shown(&value))))
            }
        }
    }
}

/// Takes the value of a dotted key out of `map`, and objects on the way that are empty then. Recurses as deep as the tree.
fn take_from(map: &mut Map<String, Value>, key: &str) -> Option<Value> {
    // The order of what remains is kept: messages name left-over keys in the order in which they were given.
    let Some((first, rest)) = key.split_once('.') else { return map.shift_remove(key) };
    let inner = map.get_mut(first)?.as_object_mut()?;
    let value = take_from(inner, rest);
    if inner.is_empty() {
        map.shift_remove(first);
    }
    value
}

/// The full keys of everything in `value` that is not an object or list with something in it.
fn name_leaves(value: &Value, path: String, names: &mut Vec<String>) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            for (key, value) in map {
                name_leaves(value, format!("{path}.{key}"), names);
            }
        }
        // Only the objects in a list have keys to be named; a list of plain values is one unknown option.
        Value::Array(list) if list.iter().any(Value::is_object) => {
            for (index, value) in list.iter().enumerate() {
                name_leaves(value, format!("{path}.{index}"), names);
            }
        }
        _ => names.push(path),
    }
}

fn read_u64(value: &Value) -> Option<u64> {
    match value {
        Value::Number(number) => number.as_u64(),
        Value::String(text) => text_u64(text),
        _ => None,
    }
}

fn text_u64(text: &str) -> Option<u64> {
    match hex_digits(text) {
        Some(digits) => read_digits(digits, 16).ok(),
        None => read_digits(text, 10).ok(),
    }
}
