//! JSON text to a value, stricter than `serde_json::Value`: a key given twice is an error instead of the last one winning,
//! and the bounds of the module apply while reading, so that a small text cannot become a large tree.

use super::{DEPTH_MAX, ENTRIES_MAX};
use crate::error::{Error, Result};
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::cell::Cell;
use std::fmt;

/// Reads a text that must be exactly one object.
pub(super) fn parse(text: &str) -> Result<Map<String, Value>> {
    let entries = Cell::new(0);
    let mut reader = serde_json::Deserializer::from_str(text);
    let value = Seed { depth: 0, entries: &entries }
        .deserialize(&mut reader)
        .and_then(|value| reader.end().map(|()| value))
        .map_err(|e| Error::invalid(format!("options are not valid JSON: {e}")))?;
    match value {
        Value::Object(map) => Ok(map),
        other => {
            Err(Error::invalid(format!("options are {}, expected an object", super::tree::shown(&other))))
        }
    }
}

#[derive(Clone, Copy)]
struct Seed<'a> {
    depth: usize,
    entries: &'a Cell<usize>,
}

impl Seed<'_> {
    /// The seed of one more key or element of a container at this depth.
    fn inner<E: serde::de::Error>(self) -> std::result::Result<Self, E> {
        if self.depth == DEPTH_MAX {
            return Err(E::custom(format_args!("nested deeper than {DEPTH_MAX} levels")));
        }
        self.entries.set(self.entries.get() + 1);
        if self.entries.get() > ENTRIES_MAX {
            return Err(E::custom(format_args!("more than {ENTRIES_MAX} entries")));
        }
        Ok(Self { depth: self.depth + 1, ..self })
    }
}

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> std::result::Result<Value, D::Error> {
        reader.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Seed<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E>(self, v: bool) -> std::result::Result<Value, E> {
        Ok(Value::Bool(v))
    }

    fn visit_i64<E>(self, v: i64) -> std::result::Result<Value, E> {
        Ok(v.into())
    }

    fn visit_u64<E>(self, v: u64) -> std::result::Result<Value, E> {
        Ok(v.into())
    }

    fn visit_f64<E>(self, v: f64) -> std::result::Result<Value, E> {
        Ok(v.into())
    }

    fn visit_str<E>(self, v: &str) -> std::result::Result<Value, E> {
        Ok(v.into())
    }

    fn visit_string<E>(self, v: String) -> std::result::Result<Value, E> {
        Ok(v.into())
    }

    fn visit_unit<E>(self) -> std::result::Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Value, A::Error> {
        let mut list = Vec::new();
        // The bounds are checked by the element's own seed, made before the element is read; a list may end at the bound.
        loop {
            let seed = Element(self);
            match seq.next_element_seed(seed)? {
                Some(value) => list.push(value),
                None => return Ok(Value::Array(list)),
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> std::result::Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = access.next_key::<String>()? {
            if map.contains_key(&key) {
                return Err(A::Error::custom(format_args!(
                    "key '{}' is given twice",
                    super::tree::shortened(&key)
                )));
            }
            let value = access.next_value_seed(self.inner()?)?;
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

/// A list element of the container that the seed reads.
struct Element<'a>(Seed<'a>);

impl<'de> DeserializeSeed<'de> for Element<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> std::result::Result<Value, D::Error> {
        self.0.inner()?.deserialize(reader)
    }
}
