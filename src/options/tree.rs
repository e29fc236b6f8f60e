//! Builds the tree: dotted keys become objects, index keys become lists, duplicates and conflicts are refused, bounds are
//! kept. Every value passes through here, whatever it came from.

use super::{DEPTH_MAX, ENTRIES_MAX, Options};
use crate::error::{Error, Result};
use serde_json::{Map, Value};

/// Longest part of a foreign text that a message repeats, in characters.
const SHOWN_MAX: usize = 80;

/// A tree being put together. Lists given by index keys stay objects until [`Builder::finish`].
#[derive(Default)]
pub(super) struct Builder {
    root: Map<String, Value>,
    entries: usize,
}

impl Builder {
    /// A builder that holds a tree already built.
    pub(super) fn of(root: &Map<String, Value>) -> Result<Self> {
        let mut builder = Self::default();
        for (key, value) in root {
            builder.insert_ref(key, value)?;
        }
        Ok(builder)
    }

    /// Adds `value` under a dotted key.
    pub(super) fn insert(&mut self, key: &str, value: Value) -> Result<()> {
        let mut place = Place { path: String::new(), depth: 0, entries: &mut self.entries };
        place.add(&mut self.root, key, value)
    }

    /// Like [`Builder::insert`]. Checks the depth before it copies: the copy would recurse as deep as the value is.
    pub(super) fn insert_ref(&mut self, key: &str, value: &Value) -> Result<()> {
        if !is_shallow(value, DEPTH_MAX) {
            return Err(too_deep(key));
        }
        self.insert(key, value.clone())
    }

    /// The finished tree.
    pub(super) fn finish(mut self) -> Result<Options> {
        for (key, value) in &mut self.root {
            listify(value, key)?;
        }
        Ok(Options { prefix: String::new(), root: self.root })
    }
}

/// Where in the tree something is being added.
struct Place<'a> {
    /// Full key of the container, empty at the top.
    path: String,
    depth: usize,
    entries: &'a mut usize,
}

impl Place<'_> {
    /// Adds `value` to `map`, the container at this place. Recurses only into values that lie deeper, at most `DEPTH_MAX`.
    fn add(&mut self, map: &mut Map<String, Value>, key: &str, value: Value) -> Result<()> {
        check_key(key)?;
        let mut map = map;
        let mut rest = key;
        while let Some((first, tail)) = rest.split_once('.') {
            self.enter(first)?;
            map = self.object(map, first)?;
            rest = tail;
        }
        self.enter(rest)?;
        match value {
            Value::Object(pairs) => {
                let inner = self.object(map, rest)?;
                for (key, value) in pairs {
                    let mut place =
                        Place { path: self.path.clone(), depth: self.depth, entries: self.entries };
                    place.add(inner, &key, value)?;
                }
            }
            value => {
                match map.get(rest) {
                    None => {}
                    Some(Value::Object(_)) => return Err(self.conflict()),
                    Some(_) => return Err(self.duplicate()),
                }
                self.count()?;
                let value = match value {
                    Value::Array(list) => self.list(list)?,
                    scalar => scalar,
                };
                map.insert(rest.to_owned(), value);
            }
        }
        Ok(())
    }

    /// The object under `name`, made if it is not there; this place is already inside it.
    fn object<'m>(
        &mut self,
        map: &'m mut Map<String, Value>,
        name: &str,
    ) -> Result<&'m mut Map<String, Value>> {
        if !map.contains_key(name) {
            self.count()?;
        }
        match map.entry(name).or_insert_with(|| Value::Object(Map::new())) {
            Value::Object(inner) => Ok(inner),
            _ => Err(self.conflict()),
        }
    }

    /// A list given as such; this place is already inside it.
    fn list(&mut self, list: Vec<Value>) -> Result<Value> {
        let mut out = Vec::new();
        for (index, value) in list.into_iter().enumerate() {
            let mut place = Place { path: self.path.clone(), depth: self.depth, entries: self.entries };
            place.enter(&index.to_string())?;
            place.count()?;
            out.push(match value {
                Value::Object(pairs) => {
                    let mut inner = Map::new();
                    for (key, value) in pairs {
                        let mut place =
                            Place { path: place.path.clone(), depth: place.depth, entries: place.entries };
                        place.add(&mut inner, &key, value)?;
                    }
                    Value::Object(inner)
                }
                Value::Array(list) => place.list(list)?,
                scalar => scalar,
            });
        }
        Ok(Value::Array(out))
    }

    /// Goes one level down.
    fn enter(&mut self, name: &str) -> Result<()> {
        if self.depth == DEPTH_MAX {
            return Err(too_deep(&self.path));
        }
        self.depth += 1;
        if !self.path.is_empty() {
            self.path.push('.');
        }
        self.path.push_str(name);
        Ok(())
    }

    fn count(&mut self) -> Result<()> {
        if *self.entries == ENTRIES_MAX {
            return Err(Error::invalid(format!("more than {ENTRIES_MAX} options")));
        }
        *self.entries += 1;
        Ok(())
    }

    fn conflict(&self) -> Error {
        let path = shortened(&self.path);
        Error::invalid(format!("option '{path}' has a value and is also the prefix of another option"))
    }

    fn duplicate(&self) -> Error {
        Error::invalid(format!("option '{}' is given twice", shortened(&self.path)))
    }
}

/// Whether every fragment of `key` is a non-empty name.
pub(super) fn check_key(key: &str) -> Result<()> {
    let good = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
    if key.split('.').all(|part| !part.is_empty() && part.bytes().all(good)) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "'{}' is not an option key, expected letters, digits, '-' and '_' between dots",
        shortened(key)
    )))
}

/// Turns objects whose keys are all indices into lists, from the inside out.
fn listify(value: &mut Value, path: &str) -> Result<()> {
    match value {
        Value::Object(map) => {
            for (key, value) in map.iter_mut() {
                listify(value, &format!("{path}.{key}"))?;
            }
            let indices = map.keys().filter(|key| is_index(key)).count();
            if indices == 0 {
                return Ok(());
            }
            if indices < map.len() {
                let path = shortened(path);
                return Err(Error::invalid(format!("option '{path}' mixes list indices and names")));
            }
            let mut list = vec![Value::Null; indices];
            for (key, value) in std::mem::take(map) {
                // The keys are distinct numbers without leading zeros: with all of them below their count, none is missing.
                match key.parse::<usize>().ok().and_then(|index| list.get_mut(index)) {
                    Some(place) => *place = value,
                    None => {
                        return Err(Error::invalid(format!(
                            "option '{}' is a list of {indices} with an index past its end",
                            shortened(&format!("{path}.{key}"))
                        )));
                    }
                }
            }
            *value = Value::Array(list);
        }
        Value::Array(list) => {
            for (index, value) in list.iter_mut().enumerate() {
                listify(value, &format!("{path}.{index}"))?;
            }
        }
        _ => {}
    }
    Ok(())
}

fn is_index(key: &str) -> bool {
    key.bytes().all(|b| b.is_ascii_digit()) && (key.len() == 1 || !key.starts_with('0'))
}

/// Whether containers in `value` are nested at most `levels` deep.
fn is_shallow(value: &Value, levels: usize) -> bool {
    match value {
        Value::Object(map) => levels > 0 && map.values().all(|v| is_shallow(v, levels - 1)),
        Value::Array(list) => levels > 0 && list.iter().all(|v| is_shallow(v, levels - 1)),
        _ => true,
    }
}

fn too_deep(path: &str) -> Error {
    Error::invalid(format!("option '{}' is nested deeper than {DEPTH_MAX} levels", shortened(path)))
}

/// A text from outside as a message repeats it: control characters escaped, and not longer than a line.
pub(super) fn shortened(text: &str) -> String {
    let mut out = String::new();
    for (n, c) in text.chars().enumerate() {
        if n == SHOWN_MAX {
            out.push_str("...");
            break;
        }
        if c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

/// A value as a message repeats it.
pub(super) fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => format!("'{}'", shortened(text)),
        Value::Object(_) => "an object".into(),
        Value::Array(_) => "a list".into(),
        scalar => scalar.to_string(),
    }
}
