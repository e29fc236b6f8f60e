//! Numbers as qemu-img and qemu-io read and print them.

use crate::options::parse_size;

/// Why a number of the command line was refused; the text is what both tools print.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SizeError {
    /// No number, or something behind it.
    Form,
    /// Negative, or 2^63 or more.
    Range,
}

impl SizeError {
    /// The line that names the word.
    pub(super) fn text(self, word: &str) -> String {
        match self {
            Self::Form => {
                format!("Parsing error: non-numeric argument, or extraneous/unrecognized suffix -- {word}")
            }
            Self::Range => format!("Parsing error: argument too large -- {word}"),
        }
    }
}

/// A size or offset below 2^63 with an optional suffix, and perhaps blanks before it.
pub(super) fn parse(word: &str) -> Result<u64, SizeError> {
    let word = word.trim_ascii_start();
    let negative = word.strip_prefix('-').is_some_and(|rest| parse_size(rest).is_ok());
    if negative {
        return Err(SizeError::Range);
    }
    match parse_size(word) {
        Ok(value) if value <= i64::MAX as u64 => Ok(value),
        Ok(_) => Err(SizeError::Range),
        Err(e) if e.to_string().contains("too large") => Err(SizeError::Range),
        Err(_) => Err(SizeError::Form),
    }
}

/// An integer as strtol(3) reads it with base 0: decimal, `0x`, or octal behind a 0; a sign before it.
pub(super) fn parse_int(word: &str) -> Option<i64> {
    let (negative, digits) = match word.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, word.strip_prefix('+').unwrap_or(word)),
    };
    let lower = digits.to_ascii_lowercase();
    let (digits, radix) = match lower.strip_prefix("0x") {
        Some(hex) => (hex, 16),
        None if lower.len() > 1 && lower.starts_with('0') => (&lower[1..], 8),
        None => (lower.as_str(), 10),
    };
    if digits.is_empty() || !digits.chars().all(|c| c.is_digit(radix)) {
        return None;
    }
    let value = i64::from_str_radix(digits, radix).ok()?;
    Some(if negative { -value } else { value })
}

/// A size as qemu-io prints it: the largest unit it fills, three decimals unless they are zeros.
pub(super) fn exact(bytes: f64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut value = bytes;
    let mut unit = None;
    for name in UNITS {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = Some(name);
    }
    let text = match unit {
        None => format!("{value:.6} bytes"),
        Some(unit) => format!("{value:.3} {unit}"),
    };
    text.replacen(".000000 ", " ", 1).replacen(".000 ", " ", 1)
}

/// A size as qemu-img prints it: three significant digits, and the next unit from 1000 of one on.
pub(super) fn human(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut unit = 0;
    let mut at = 1u128;
    while unit + 1 < UNITS.len() && u128::from(bytes) >= at * 1000 {
        at <<= 10;
        unit += 1;
    }
    format!("{} {}", three_digits(bytes as f64 / at as f64), UNITS[unit])
}

/// `%.3g` for 0.97 and more.
fn three_digits(value: f64) -> String {
    let decimals = match value {
        v if v >= 99.95 => 0,
        v if v >= 9.995 => 1,
        v if v >= 0.9995 || v == 0.0 => 2,
        _ => 3,
    };
    let text = format!("{value:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_suffix_and_refused_by_what_is_wrong_with_them() {
        assert_eq!(parse("1.5k"), Ok(1536));
        assert_eq!(parse(" 1k"), Ok(1024));
        assert_eq!(parse("0x200"), Ok(512));
        assert_eq!(parse("9223372036854775807"), Ok(i64::MAX as u64));
        for word in ["9223372036854775808", "8E", "-1", "-4k", "99999999999999999999"] {
            assert_eq!(parse(word), Err(SizeError::Range), "{word}");
        }
        for word in ["", "a", "1x", "-", "-a"] {
            assert_eq!(parse(word), Err(SizeError::Form), "{word}");
        }
    }

    #[test]
    fn integers_have_the_bases_of_c() {
        assert_eq!(parse_int("10"), Some(10));
        assert_eq!(parse_int("0x10"), Some(16));
        assert_eq!(parse_int("010"), Some(8));
        assert_eq!(parse_int("-1"), Some(-1));
        assert_eq!(parse_int("0"), Some(0));
        for word in ["", "08", "1k", "--1", "0x"] {
            assert_eq!(parse_int(word), None, "{word}");
        }
    }

    #[test]
    fn sizes_look_like_those_of_the_tools() {
        for (bytes, text) in [
            (0.0, "0 bytes"),
            (40.0, "40 bytes"),
            (66.183_518, "66.183518 bytes"),
            (1025.0, "1.001 KiB"),
            (1536.0, "1.500 KiB"),
            (1_048_577.0, "1 MiB"),
            (65536.0, "64 KiB"),
            (20.2 * 1_048_576.0, "20.200 MiB"),
        ] {
            assert_eq!(exact(bytes), text);
        }
        for (bytes, text) in [
            (0, "0 B"),
            (512, "512 B"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            (102_400, "100 KiB"),
            (1_024_000, "0.977 MiB"),
            (1_047_552, "0.999 MiB"),
            (1_048_064, "1 MiB"),
            (1_073_741_824, "1 GiB"),
            (1_234_567_890_432, "1.12 TiB"),
            (1 << 63, "8 EiB"),
        ] {
            assert_eq!(human(bytes), text);
        }
    }
}
