//! What the subcommands that stand in for qemu-img share: reading words, errors, exit codes, JSON.

use super::getopt::{Getopt, Long, Word};
use super::image::{Image, ImageFlags, describe, error_text};
use crate::context::Context;
use crate::error::Error;
use crate::sync::Arc;
use serde_json::Value;
use std::process::ExitCode;

/// A subcommand that has ended early: what was to be said has been said.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ended(pub(super) ExitCode);

/// Result of a step of a subcommand.
pub(super) type Step<T = ()> = std::result::Result<T, Ended>;

/// Name of the program and the subcommand, for messages.
#[derive(Debug)]
pub(super) struct Tool {
    program: String,
    command: &'static str,
    /// Exit code of errors before the work begins.
    failure: u8,
    help: &'static str,
}

impl Tool {
    pub(super) fn new(command: &'static str, failure: u8, help: &'static str) -> Self {
        Self { program: super::program(), command, failure, help }
    }

    /// Prints an error and gives the exit code for it.
    pub(super) fn error(&self, text: &str) -> Ended {
        eprintln!("{}: {text}", self.program);
        Ended(ExitCode::from(self.failure))
    }

    /// An error in the words of the command line, which always ends with 1.
    pub(super) fn usage_error(&self, text: &str) -> Ended {
        eprintln!("{}: {text}\nTry '{} {} --help' for more info", self.program, self.program, self.command);
        Ended(ExitCode::FAILURE)
    }

    /// Reads the words; options go to `set`, operands are returned.
    pub(super) fn words(
        &self,
        words: &[String],
        short: &str,
        long: &[Long],
        mut set: impl FnMut(&Self, char, String) -> Step,
    ) -> Step<Vec<String>> {
        let mut operands = Vec::new();
        for word in Getopt::new(words, short, long) {
            match word {
                Ok(Word::Operand(operand)) => operands.push(operand),
                Ok(Word::Option('h', _)) => {
                    println!("{}", self.help);
                    return Err(Ended(ExitCode::SUCCESS));
                }
                Ok(Word::Option(letter, value)) => set(self, letter, value)?,
                Err(problem) => {
                    eprintln!(
                        "{} {}: {problem}\nTry '{} {} --help' for more info",
                        self.program, self.command, self.program, self.command
                    );
                    return Err(Ended(ExitCode::FAILURE));
                }
            }
        }
        Ok(operands)
    }

    /// `--output`: whether it is JSON.
    pub(super) fn output(&self, value: &str) -> Step<bool> {
        match value {
            "human" => Ok(false),
            "json" => Ok(true),
            _ => Err(self.usage_error(&format!("--output expects 'human' or 'json' not '{value}'"))),
        }
    }

    /// `--object`: secrets are taken and not used; there is no encryption yet.
    pub(super) fn object(&self, value: &str) -> Step {
        let kind = value.split(',').next().unwrap_or_default();
        if kind.trim_start_matches("qom-type=") == "secret" {
            return Ok(());
        }
        Err(self.error(&format!("Parameter 'qom-type' does not accept value '{kind}'")))
    }

    /// The items of an `-o`.
    pub(super) fn option_list(&self, value: &str) -> Step<Vec<String>> {
        super::format_opts::split_list(value)
            .ok_or_else(|| self.error(&format!("Invalid option list: {value}")))
    }

    /// The only operand.
    pub(super) fn one_file(&self, operands: Vec<String>) -> Step<String> {
        match <[String; 1]>::try_from(operands) {
            Ok([one]) => Ok(one),
            Err(_) => Err(self.usage_error("Expecting one image file name")),
        }
    }

    /// A context, started.
    pub(super) fn context(&self) -> Step<Arc<Context>> {
        Context::with_defaults().map_err(|e| self.error(&e.full_text()))
    }

    /// Opens an image.
    pub(super) fn open(&self, ctx: &Arc<Context>, name: &str, flags: &ImageFlags<'_>) -> Step<Image> {
        describe(name, flags, None)
            .and_then(|spec| Image::open(ctx, spec))
            .map_err(|e| self.could_not_open(name, &e))
    }

    /// The line about an image that cannot be opened.
    pub(super) fn could_not_open(&self, name: &str, e: &Error) -> Ended {
        self.error(&format!("Could not open '{name}': {}", error_text(e, name)))
    }

    /// `--image-opts` and a format exclude each other.
    pub(super) fn check_format(&self, image_opts: bool, format: Option<&str>) -> Step {
        if image_opts && format.is_some() {
            return Err(self.error("--image-opts and --format are mutually exclusive"));
        }
        Ok(())
    }
}

/// JSON as qemu-img lays it out: four blanks a level, a line for each end, also of what is empty.
pub(super) fn pretty(value: &Value) -> String {
    let mut out = String::new();
    write_pretty(value, 0, &mut out);
    out
}

fn write_pretty(value: &Value, depth: usize, out: &mut String) {
    let indent = |out: &mut String, depth| out.extend(std::iter::repeat_n("    ", depth));
    match value {
        Value::Object(map) => {
            out.push('{');
            for (n, (key, value)) in map.iter().enumerate() {
                out.push_str(if n == 0 { "\n" } else { ",\n" });
                indent(out, depth + 1);
                out.push_str(&format!("{}: ", Value::from(key.as_str())));
                write_pretty(value, depth + 1, out);
            }
            out.push('\n');
            indent(out, depth);
            out.push('}');
        }
        Value::Array(list) => {
            out.push('[');
            for (n, value) in list.iter().enumerate() {
                out.push_str(if n == 0 { "\n" } else { ",\n" });
                indent(out, depth + 1);
                write_pretty(value, depth + 1, out);
            }
            out.push('\n');
            indent(out, depth);
            out.push(']');
        }
        scalar => out.push_str(&scalar.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn json_has_a_line_for_every_bracket() {
        let text = pretty(&json!({"a": [], "b": {}, "c": [1, {"d": "x\"y"}], "e": false}));
        let expected = "{\n    \"a\": [\n    ],\n    \"b\": {\n    },\n    \"c\": [\n        1,\n        {\n            \"d\": \"x\\\"y\"\n        }\n    ],\n    \"e\": false\n}";
        assert_eq!(text, expected);
    }
}
