//! The `key=value` spelling.

use super::tree::{Builder, shortened};
use crate::error::{Error, Result};
use serde_json::Value;

/// Adds every pair of `text` to `builder`.
pub(super) fn parse(text: &str, builder: &mut Builder) -> Result<()> {
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(['=', ',']).unwrap_or(rest.len());
        let (key, tail) = rest.split_at(end);
        let Some(tail) = tail.strip_prefix('=') else {
            return Err(Error::invalid(format!(
                "option '{}' has no value, expected key=value",
                shortened(key)
            )));
        };
        let (value, tail) = split_value(tail);
        builder.insert(key, Value::String(value))?;
        rest = tail;
    }
    Ok(())
}

/// The value up to the first comma that is not doubled, and what comes after that comma.
fn split_value(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut rest = text;
    while let Some((part, tail)) = rest.split_once(',') {
        value.push_str(part);
        match tail.strip_prefix(',') {
            Some(tail) => {
                value.push(',');
                rest = tail;
            }
            None => return (value, tail),
        }
    }
    value.push_str(rest);
    (value, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_ends_at_the_first_single_comma() {
        for (text, value, rest) in [
            ("", "", ""),
            ("a", "a", ""),
            ("a,b=c", "a", "b=c"),
            ("a,,b", "a,b", ""),
            ("a,,,b=c", "a,", "b=c"),
            (",,,,", ",,", ""),
            (",", "", ""),
            ("x=y=z,k=v", "x=y=z", "k=v"),
        ] {
            assert_eq!(split_value(text), (value.to_owned(), rest), "{text}");
        }
    }
}
