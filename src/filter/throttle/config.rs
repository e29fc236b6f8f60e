//! The limits of a throttle group: keys, values, and which of them go together. The vocabulary is QEMU's.

use crate::error::{Error, Result};
use crate::options::{Options, Prop, PropStates, PropType};
use crate::rate::{RATE_MAX, Rate};
use serde_json::{Map, Value};

/// Which requests a limit counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Reads and writes together.
    Total,
    /// Reads.
    Read,
    /// Writes, write-zeroes and discards.
    Write,
}

/// All limits of a group. The default is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThrottleLimits {
    bps: [Rate; 3],
    iops: [Rate; 3],
    /// Bytes that count as one operation; larger requests count in proportion. 0: every request counts as one.
    pub iops_size: u64,
}

/// Every key of the limits in a node's options, and what it is.
const TABLE: [(&str, &str); 19] = [
    ("limits.bps-total", "Bytes per second of reads and writes together, 0 for no limit"),
    (
        "limits.bps-total-max",
        "Bytes per second of reads and writes together in a burst, 0 for a tenth of a second at the limit",
    ),
    ("limits.bps-total-max-length", "Seconds that a burst may last"),
    ("limits.bps-read", "Bytes per second of reads, 0 for no limit"),
    ("limits.bps-read-max", "Bytes per second of reads in a burst, 0 for a tenth of a second at the limit"),
    ("limits.bps-read-max-length", "Seconds that a burst may last"),
    ("limits.bps-write", "Bytes per second of writes, write-zeroes and discards, 0 for no limit"),
    (
        "limits.bps-write-max",
        "Bytes per second of writes, write-zeroes and discards in a burst, 0 for a tenth of a second at the limit",
    ),
    ("limits.bps-write-max-length", "Seconds that a burst may last"),
    ("limits.iops-total", "Operations per second of reads and writes together, 0 for no limit"),
    (
        "limits.iops-total-max",
        "Operations per second of reads and writes together in a burst, 0 for a tenth of a second at the limit",
    ),
    ("limits.iops-total-max-length", "Seconds that a burst may last"),
    ("limits.iops-read", "Operations per second of reads, 0 for no limit"),
    (
        "limits.iops-read-max",
        "Operations per second of reads in a burst, 0 for a tenth of a second at the limit",
    ),
    ("limits.iops-read-max-length", "Seconds that a burst may last"),
    ("limits.iops-write", "Operations per second of writes, write-zeroes and discards, 0 for no limit"),
    (
        "limits.iops-write-max",
        "Operations per second of writes, write-zeroes and discards in a burst, 0 for a tenth of a second at the limit",
    ),
    ("limits.iops-write-max-length", "Seconds that a burst may last"),
    (
        "limits.iops-size",
        "Bytes that count as one operation, larger requests count in proportion; 0 counts every request as one",
    ),
];

/// Every key of the limits, without the `limits.` or `x-` before it.
pub const KEYS: [&str; TABLE.len()] = keys();

/// The limits as properties.
pub(super) const PROPS: [Prop; TABLE.len()] = props();

impl Default for ThrottleLimits {
    fn default() -> Self {
        Self { bps: [Rate::UNLIMITED; 3], iops: [Rate::UNLIMITED; 3], iops_size: 0 }
    }
}

impl ThrottleLimits {
    /// Bytes per second.
    pub fn bps(&self, scope: Scope) -> Rate {
        self.bps[scope as usize]
    }

    /// Operations per second.
    pub fn iops(&self, scope: Scope) -> Rate {
        self.iops[scope as usize]
    }

    /// Whether requests of this scope are limited by anything.
    pub fn limits(&self, scope: Scope) -> bool {
        [scope, Scope::Total].iter().any(|s| self.bps(*s).is_limited() || self.iops(*s).is_limited())
    }

    /// Takes every limit out of `options` whose key is `prefix` and one of [`KEYS`] (`limits.bps-write`), and checks that
    /// they go together. `None` if there is none.
    pub fn take(options: &mut Options, prefix: &str) -> Result<Option<Self>> {
        let mut limits = Self::default();
        let mut any = false;
        for name in KEYS {
            let key = format!("{prefix}{name}");
            let value = if is_bytes(name) { options.take_size(&key)? } else { options.take_u64(&key)? };
            if let Some(value) = value {
                any = true;
                limits.put(name, value);
            }
        }
        limits.check(prefix)?;
        Ok(any.then_some(limits))
    }

    /// These limits with one changed; `key` is one of [`KEYS`].
    pub fn with(mut self, key: &str, text: &str) -> Result<Self> {
        let mut options = Options::empty();
        if !KEYS.contains(&key) {
            return Err(Error::invalid(format!(
                "unknown option 'limits.{key}' (known: {})",
                KEYS.join(", ")
            )));
        }
        let full = format!("limits.{key}");
        options.insert(&full, text)?;
        let value = if is_bytes(key) { options.take_size(&full)? } else { options.take_u64(&full)? };
        self.put(key, value.unwrap_or_default());
        self.check("limits.")?;
        Ok(self)
    }

    /// The value under one of [`KEYS`].
    pub fn value(&self, key: &str) -> Option<u64> {
        // A copy, so that one walk through the keys serves reading and writing.
        let mut copy = *self;
        copy.field(KEYS.iter().find(|k| **k == key)?).map(|v| *v)
    }

    /// All limits as a JSON object, in the order of [`KEYS`].
    pub fn to_json(&self) -> Value {
        let pairs = KEYS.iter().map(|k| ((*k).to_owned(), self.value(k).into()));
        Value::Object(pairs.collect::<Map<_, _>>())
    }

    fn put(&mut self, key: &str, value: u64) {
        if let Some(field) = self.field(key) {
            *field = value;
        }
    }

    fn field(&mut self, key: &str) -> Option<&mut u64> {
        if key == "iops-size" {
            return Some(&mut self.iops_size);
        }
        let (unit, rest) = key.split_once('-')?;
        let rates = match unit {
            "bps" => &mut self.bps,
            "iops" => &mut self.iops,
            _ => return None,
        };
        let (scope, field) = rest.split_once('-').unwrap_or((rest, ""));
        let rate = match scope {
            "total" => &mut rates[Scope::Total as usize],
            "read" => &mut rates[Scope::Read as usize],
            "write" => &mut rates[Scope::Write as usize],
            _ => return None,
        };
        match field {
            "" => Some(&mut rate.avg),
            "max" => Some(&mut rate.max),
            "max-length" => Some(&mut rate.max_length),
            _ => None,
        }
    }

    /// Refuses what cannot work together, and names the keys.
    fn check(&self, prefix: &str) -> Result<()> {
        let refuse = |text: String| Err(Error::invalid(text));
        for (unit, rates) in [("bps", &self.bps), ("iops", &self.iops)] {
            let [total, read, write] = rates;
            if total.avg > 0 && (read.avg > 0 || write.avg > 0)
                || total.max > 0 && (read.max > 0 || write.max > 0)
            {
                return refuse(format!(
                    "option '{prefix}{unit}-total' and its -max exclude '{prefix}{unit}-read' and '{prefix}{unit}-write'"
                ));
            }
            for (scope, rate) in ["total", "read", "write"].iter().zip(rates) {
                let key = format!("{prefix}{unit}-{scope}");
                if rate.avg > RATE_MAX || rate.max > RATE_MAX {
                    return refuse(format!("option '{key}' and its -max must be at most {RATE_MAX}"));
                }
                if rate.max > 0 && rate.avg == 0 {
                    return refuse(format!("option '{key}-max' needs '{key}'"));
                }
                if rate.max > 0 && rate.max < rate.avg {
                    return refuse(format!("option '{key}-max' is below '{key}'"));
                }
                if rate.max_length == 0 {
                    return refuse(format!("option '{key}-max-length' must be at least 1 (second)"));
                }
                if rate.max_length > 1 && rate.max == 0 {
                    return refuse(format!("option '{key}-max-length' needs '{key}-max'"));
                }
                if rate.max.checked_mul(rate.max_length).is_none_or(|units| units > RATE_MAX) {
                    return refuse(format!(
                        "option '{key}-max' times '{key}-max-length' must be at most {RATE_MAX}"
                    ));
                }
            }
        }
        if self.iops_size > 0 && self.iops.iter().all(|r| r.avg == 0) {
            return refuse(format!(
                "option '{prefix}iops-size' needs a limit of operations ('{prefix}iops-...')"
            ));
        }
        Ok(())
    }
}

const fn keys() -> [&'static str; TABLE.len()] {
    let mut keys = [""; TABLE.len()];
    let mut i = 0;
    while i < TABLE.len() {
        keys[i] = TABLE[i].0.split_at("limits.".len()).1;
        i += 1;
    }
    keys
}

const fn props() -> [Prop; TABLE.len()] {
    let states = PropStates::OPEN.union(PropStates::LIVE);
    let mut props = [Prop { name: "", ty: PropType::Size, default: "0", states, doc: "" }; TABLE.len()];
    let mut i = 0;
    while i < TABLE.len() {
        (props[i].name, props[i].doc) = TABLE[i];
        // Each triple is the limit, its -max and its -max-length; bytes first, then operations, then iops-size.
        if i % 3 == 2 {
            props[i].default = "1";
        }
        if i % 3 == 2 || i >= 9 && i < TABLE.len() - 1 {
            props[i].ty = PropType::Int;
        }
        i += 1;
    }
    props
}

/// Whether a key is a number of bytes (and may have a suffix) or a plain number.
fn is_bytes(key: &str) -> bool {
    key == "iops-size" || key.starts_with("bps-") && !key.ends_with("-length")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(text: &str) -> Result<Option<ThrottleLimits>> {
        let mut options = Options::parse(text)?;
        let limits = ThrottleLimits::take(&mut options, "limits.")?;
        options.finish()?;
        Ok(limits)
    }

    #[test]
    fn every_key_is_a_field_of_its_own_and_reads_back() {
        let mut limits = ThrottleLimits::default();
        for (n, key) in KEYS.iter().enumerate() {
            *limits.field(key).unwrap() = n as u64 + 100;
        }
        for (n, key) in KEYS.iter().enumerate() {
            assert_eq!(limits.value(key), Some(n as u64 + 100), "{key}");
        }
        assert_eq!(limits.to_json().as_object().unwrap().len(), KEYS.len());
        for unknown in ["bps", "bps-", "bps-all", "bps-read-", "bps-read-max-", "iops-sizes", "", "x-y-z"] {
            assert_eq!(limits.value(unknown), None, "{unknown}");
        }
    }

    #[test]
    fn both_spellings_of_a_group_give_the_same_limits() {
        let dotted = take("limits.bps-write=50M,limits.bps-write-max=100M,limits.bps-write-max-length=3,limits.iops-size=4k,limits.iops-total=100").unwrap();
        let json = take(r#"{"limits": {"bps-write": 52428800, "bps-write-max": 104857600, "bps-write-max-length": 3, "iops-size": 4096, "iops-total": 100}}"#).unwrap();
        assert_eq!(dotted, json);
        let limits = dotted.unwrap();
        assert_eq!(limits.bps(Scope::Write), Rate { avg: 50 << 20, max: 100 << 20, max_length: 3 });
        assert_eq!(limits.iops(Scope::Total), Rate::per_second(100));
        assert_eq!(limits.iops_size, 4096);
        assert_eq!(take("").unwrap(), None);
    }

    #[test]
    fn what_cannot_work_together_is_refused_and_the_key_is_named() {
        for (text, key) in [
            ("limits.bps-total=1,limits.bps-read=1", "limits.bps-total"),
            ("limits.iops-total=1,limits.iops-write=1", "limits.iops-total"),
            ("limits.bps-read-max=1", "limits.bps-read-max"),
            ("limits.bps-read=10,limits.bps-read-max=9", "limits.bps-read-max"),
            ("limits.iops-read=1,limits.iops-read-max-length=2", "limits.iops-read-max-length"),
            (
                "limits.iops-read=1,limits.iops-read-max=2,limits.iops-read-max-length=0",
                "limits.iops-read-max-length",
            ),
            ("limits.bps-write=1000000000000001", "limits.bps-write"),
            (
                "limits.bps-write=1,limits.bps-write-max=1000000000000,limits.bps-write-max-length=1001",
                "limits.bps-write-max",
            ),
            ("limits.iops-size=512", "limits.iops-size"),
            ("limits.bps-writes=1", "limits.bps-writes"),
            ("limits.bps-write=fast", "limits.bps-write"),
            ("limits.iops-write=1k", "limits.iops-write"),
            ("limits.bps-write=-1", "limits.bps-write"),
        ] {
            let message = take(text).unwrap_err().to_string();
            assert!(message.contains(&format!("'{key}'")), "{text}: {message}");
        }
    }

    #[test]
    fn the_properties_agree_with_how_keys_are_read() {
        let default = ThrottleLimits::default();
        for (key, prop) in KEYS.iter().zip(PROPS) {
            assert_eq!(prop.name, format!("limits.{key}"));
            assert_eq!(prop.ty == PropType::Size, is_bytes(key), "{key}");
            assert_eq!(prop.default, default.value(key).unwrap().to_string(), "{key}");
        }
    }

    #[test]
    fn changing_one_key_checks_the_whole() {
        let limits = take("limits.bps-write=10").unwrap().unwrap();
        assert_eq!(limits.with("bps-write", "20k").unwrap().bps(Scope::Write).avg, 20480);
        assert!(limits.with("bps-total", "5").is_err());
        assert!(limits.with("bps-nothing", "5").unwrap_err().to_string().contains("bps-nothing"));
        let none = limits.with("bps-write", "0").unwrap();
        assert!(!none.limits(Scope::Write));
        assert_eq!(none, ThrottleLimits::default());
    }

    #[test]
    fn a_total_limits_both_directions() {
        let limits = take("limits.bps-total=1").unwrap().unwrap();
        assert!(limits.limits(Scope::Read) && limits.limits(Scope::Write));
        let limits = take("limits.iops-read=1").unwrap().unwrap();
        assert!(limits.limits(Scope::Read) && !limits.limits(Scope::Write));
    }
}
