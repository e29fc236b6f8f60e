//! `-o` of `create` and `measure`: which options a format has, how they are read, listed and shown.
//!
//! The list is QEMU's, without encryption. Reading decides nothing about whether options go together: that is for whoever uses them.

use super::size;
use crate::options::parse_size;

/// What a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Str,
    Bool,
    Size,
    Number,
}

/// An option of a format or of the file below it.
#[derive(Debug)]
struct Known {
    name: &'static str,
    kind: Kind,
    /// Shown though not given.
    default: Option<&'static str>,
    help: &'static str,
}

const fn known(name: &'static str, kind: Kind, help: &'static str) -> Known {
    Known { name, kind, default: None, help }
}

const fn shown(name: &'static str, kind: Kind, default: &'static str, help: &'static str) -> Known {
    Known { name, kind, default: Some(default), help }
}

/// In the order in which they are shown.
const QCOW2: &[Known] = &[
    shown("cluster_size", Kind::Size, "65536", "bytes of a cluster, 512 to 2M"),
    shown("extended_l2", Kind::Bool, "off", "clusters have 32 sub-clusters"),
    known("preallocation", Kind::Str, "space that is allocated at once: off, metadata, falloc or full"),
    shown("compression_type", Kind::Str, "zlib", "how clusters are compressed: zlib or zstd"),
    known("size", Kind::Size, "size of the disk"),
    known("compat", Kind::Str, "version of the format: v2 (0.10) or v3 (1.1)"),
    known("backing_file", Kind::Str, "image that is read where this one has nothing"),
    known("backing_fmt", Kind::Str, "format of that image"),
    known("data_file", Kind::Str, "file for the data, so that this one has metadata only"),
    known("data_file_raw", Kind::Bool, "that file is to be a raw image at all times"),
    shown("lazy_refcounts", Kind::Bool, "off", "write refcounts late"),
    shown("refcount_bits", Kind::Number, "16", "width of a refcount, 1 to 64"),
];

const RAW: &[Known] = &[known("size", Kind::Size, "size of the disk")];

/// Those of a file that is created.
const FILE: &[Known] = &[
    known("size", Kind::Size, "size of the disk"),
    known("nocow", Kind::Bool, "file system does not copy on write (btrfs)"),
    known("preallocation", Kind::Str, "space that is allocated at once: off, falloc or full"),
    known("extent_size_hint", Kind::Size, "bytes of extents that a file system is asked for (XFS); not used"),
];

/// Formats that can be created.
pub(super) fn can_create(format: &str) -> bool {
    matches!(format, "raw" | "qcow2")
}

/// Options of a format, with those of a file below it.
fn table(format: &str, file: bool) -> Vec<&'static Known> {
    let own = if format == "qcow2" { QCOW2 } else { RAW };
    let mut all: Vec<&Known> = own.iter().collect();
    if file {
        all.extend(FILE.iter().filter(|f| own.iter().all(|o| o.name != f.name)));
    }
    all
}

/// Splits one `-o` at commas; two of them are one of the text. `None` if that is no list.
pub(super) fn split_list(text: &str) -> Option<Vec<String>> {
    let (mut items, mut item) = (Vec::new(), String::new());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c != ',' {
            item.push(c);
        } else if chars.next_if_eq(&',').is_some() {
            item.push(',');
        } else {
            items.push(std::mem::take(&mut item));
        }
    }
    let open = items.first().unwrap_or(&item).is_empty() || item.is_empty();
    items.push(item);
    (!open).then_some(items)
}

/// Whether a list asks for the list of options.
pub(super) fn asks_for_help(items: &[String]) -> bool {
    items.iter().any(|i| i == "help" || i == "?")
}

/// The list of options, as text; with those of a file if it is known that it is one.
pub(super) fn help(format: &str, file: bool) -> String {
    let mut all = table(format, file);
    all.sort_by_key(|k| k.name);
    let of = if file { String::new() } else { format!("{format} ") };
    let mut out = format!("Supported {of}options:\n");
    for k in all {
        let kind = match k.kind {
            Kind::Str => "str",
            Kind::Bool => "bool (on/off)",
            Kind::Size => "size",
            Kind::Number => "num",
        };
        out.push_str(&format!("  {:<22} - {}\n", format!("{}=<{kind}>", k.name), k.help));
    }
    if !file {
        out.push_str("\nThe protocol level may support further options.\nSpecify the target filename to include those options.\n");
    }
    out
}

/// Options that have been given, and defaults that are shown.
#[derive(Debug)]
pub(super) struct FormatOpts {
    format: String,
    known: Vec<&'static Known>,
    given: Vec<(&'static str, String)>,
}

impl FormatOpts {
    /// Reads the items of all `-o`. Errors are what the tools say, behind the name of the file.
    pub(super) fn parse(format: &str, file: bool, items: &[String]) -> Result<Self, String> {
        let mut opts = Self { format: format.to_owned(), known: table(format, file), given: Vec::new() };
        for item in items {
            let (name, value) = match item.split_once('=') {
                Some((name, value)) => (name, value.to_owned()),
                None => opts.bare(item),
            };
            opts.set(name, value)?;
        }
        Ok(opts)
    }

    /// A name alone: a switch that is on, or off with `no` before it.
    fn bare<'a>(&self, item: &'a str) -> (&'a str, String) {
        match item.strip_prefix("no").filter(|n| self.find(n).is_some_and(|k| k.kind == Kind::Bool)) {
            Some(name) => (name, "off".to_owned()),
            None => (item, "on".to_owned()),
        }
    }

    fn find(&self, name: &str) -> Option<&'static Known> {
        self.known.iter().find(|k| k.name == name).copied()
    }

    /// Sets an option, instead of what it was.
    pub(super) fn set(&mut self, name: &str, value: String) -> Result<(), String> {
        let known = self.find(name).ok_or_else(|| format!("Invalid parameter '{name}'"))?;
        let value = normal(known, value)?;
        self.given.retain(|g| g.0 != known.name);
        self.given.push((known.name, value));
        Ok(())
    }

    /// Whether the format has such an option.
    pub(super) fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// What was given.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.given.iter().find(|g| g.0 == name).map(|g| g.1.as_str())
    }

    /// A number that was given, or the default.
    pub(super) fn number(&self, name: &str) -> Option<u64> {
        let text = self.get(name).or_else(|| self.find(name).and_then(|k| k.default))?;
        text.parse().ok()
    }

    /// A switch.
    pub(super) fn on(&self, name: &str) -> bool {
        self.get(name).and_then(truth).unwrap_or(false)
    }

    /// What is printed before an image is made.
    pub(super) fn formatting(&self, name: &str) -> String {
        let mut out = format!("Formatting '{name}', fmt={}", self.format);
        for k in &self.known {
            let Some(value) = self.get(k.name).or(k.default) else { continue };
            // As they would have to be given.
            out.push_str(&format!(" {}={}", k.name, value.replace(',', ",,")));
        }
        out
    }
}

fn truth(text: &str) -> Option<bool> {
    match text {
        "on" | "yes" | "true" | "y" => Some(true),
        "off" | "no" | "false" | "n" => Some(false),
        _ => None,
    }
}

/// A value as it is shown: numbers in decimal.
fn normal(known: &Known, value: String) -> Result<String, String> {
    let name = known.name;
    match known.kind {
        Kind::Str => Ok(value),
        Kind::Bool if truth(&value).is_some() => Ok(value),
        Kind::Bool => Err(format!("Parameter '{name}' expects 'on' or 'off'")),
        Kind::Number => size::parse_int(&value)
            .map(|n| n.to_string())
            .ok_or_else(|| format!("Parameter '{name}' expects a number")),
        Kind::Size => match parse_size(&value) {
            Ok(bytes) => Ok(bytes.to_string()),
            Err(_) if size::parse(&value) == Err(size::SizeError::Range) => {
                Err(format!("Value '{value}' is out of range for parameter '{name}'"))
            }
            Err(_) => Err(format!(
                "Parameter '{name}' expects a non-negative number below 2^64\n\
                 Optional suffix k, M, G, T, P or E means kilo-, mega-, giga-, tera-, peta-\n\
                 and exabytes, respectively."
            )),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opts(text: &str) -> Result<FormatOpts, String> {
        FormatOpts::parse("qcow2", true, &split_list(text).ok_or("no list")?)
    }

    #[test]
    fn lists_are_split_at_single_commas() {
        let split = |text| split_list(text).map(|l| l.join("|"));
        assert_eq!(split("a=1,b").as_deref(), Some("a=1|b"));
        assert_eq!(split("a=x,,y,b").as_deref(), Some("a=x,y|b"));
        assert_eq!(split("a=1,,").as_deref(), Some("a=1,"));
        for no_list in ["", ",", "a,", ",a"] {
            assert_eq!(split(no_list), None, "{no_list}");
        }
    }

    #[test]
    fn the_last_value_counts_and_numbers_are_shown_in_decimal() {
        let o = opts("cluster_size=4k,refcount_bits=0x8,cluster_size=1M,data_file=a,,b,lazy_refcounts")
            .expect("valid");
        assert_eq!(
            o.formatting("x"),
            "Formatting 'x', fmt=qcow2 cluster_size=1048576 extended_l2=off compression_type=zlib data_file=a,,b \
             lazy_refcounts=on refcount_bits=8"
        );
        assert!(o.on("lazy_refcounts") && !o.on("extended_l2"));
        assert!(!opts("nolazy_refcounts").expect("valid").on("lazy_refcounts"));
        assert_eq!(o.number("cluster_size"), Some(1 << 20));
    }

    #[test]
    fn wrong_options_are_named() {
        for (text, error) in [
            ("bogus=1", "Invalid parameter 'bogus'"),
            ("nobogus", "Invalid parameter 'nobogus'"),
            ("extended_l2=maybe", "Parameter 'extended_l2' expects 'on' or 'off'"),
            ("size=17E", "Value '17E' is out of range for parameter 'size'"),
            ("refcount_bits=1k", "Parameter 'refcount_bits' expects a number"),
        ] {
            assert_eq!(opts(text).expect_err(text), error);
        }
    }
}
