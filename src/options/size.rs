//! Sizes as people write them.

use crate::error::{Error, Result};

/// Longest text of a size, in bytes: far more than any size has digits.
const SIZE_LEN_MAX: usize = 128;

/// A size in bytes: decimal digits, with a suffix `B`, `K`, `M`, `G`, `T`, `P` or `E` in either case (powers of 1024).
///
/// With a suffix above `B` there may be a fraction (`1.5G`, `.5k`, `1.M`), rounded down to whole bytes. Hexadecimal
/// (`0x200`) takes neither suffix nor fraction. There is no sign, no exponent and no octal (`010` is ten). More than
/// `u64::MAX` bytes is an error.
pub fn parse_size(text: &str) -> Result<u64> {
    read_size(text).map_err(|problem| {
        let text = super::tree::shortened(text);
        Error::invalid(format!("'{text}' is not a size: {problem}"))
    })
}

/// What [`parse_size`] does; the error says what is wrong with the text.
pub(super) fn read_size(text: &str) -> std::result::Result<u64, &'static str> {
    if text.len() > SIZE_LEN_MAX {
        return Err(FORM);
    }
    if let Some(digits) = hex_digits(text) {
        return read_digits(digits, 16);
    }
    let number_len = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(number_len);
    let shift = match suffix.to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        "P" => 50,
        "E" => 60,
        _ => return Err(FORM),
    };
    let (whole, fraction) = match number.split_once('.') {
        None => (number, None),
        Some((whole, fraction)) => (whole, Some(fraction)),
    };
    if whole.is_empty() && fraction.is_none_or(str::is_empty) || fraction.is_some_and(|f| f.contains('.')) {
        return Err(FORM);
    }
    if fraction.is_some() && shift == 0 {
        return Err("a fraction needs a suffix K, M, G, T, P or E");
    }
    let whole = if whole.is_empty() { 0 } else { read_digits(whole, 10)? };
    let scaled = whole.checked_mul(1 << shift).ok_or(TOO_LARGE)?;
    // The fraction is below one unit, so it cannot overflow what a whole unit could not.
    Ok(scaled | scale_fraction(fraction.unwrap_or(""), shift))
}

/// Digits of one number, at least one and nothing else.
pub(super) fn read_digits(digits: &str, radix: u32) -> std::result::Result<u64, &'static str> {
    // from_str_radix alone would accept a sign.
    if digits.is_empty() || !digits.chars().all(|c| c.is_digit(radix)) {
        return Err(FORM);
    }
    u64::from_str_radix(digits, radix).map_err(|_| TOO_LARGE)
}

/// What follows `0x`.
pub(super) fn hex_digits(text: &str) -> Option<&str> {
    text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"))
}

/// `0.digits` times 2 to the power of `shift`, rounded down; exact for any number of digits. Doubling a decimal fraction
/// carries its next binary digit out at the front.
fn scale_fraction(digits: &str, shift: u32) -> u64 {
    let mut digits: Vec<u8> = digits.bytes().map(|b| b - b'0').collect();
    let mut bits = 0;
    for _ in 0..shift {
        let mut carry = 0;
        for digit in digits.iter_mut().rev() {
            let doubled = *digit * 2 + carry;
            *digit = doubled % 10;
            carry = doubled / 10;
        }
        bits = bits << 1 | u64::from(carry);
    }
    bits
}

const FORM: &str = "expected digits with an optional suffix K, M, G, T, P or E";
const TOO_LARGE: &str = "too large";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suffixes_are_powers_of_1024_in_either_case() {
        for (n, suffix) in ["", "K", "M", "G", "T", "P", "E"].into_iter().enumerate() {
            let unit = 1u64 << (10 * n);
            assert_eq!(parse_size(&format!("3{suffix}")).unwrap(), 3 * unit);
            assert_eq!(parse_size(&format!("3{}", suffix.to_lowercase())).unwrap(), 3 * unit);
        }
        assert_eq!(parse_size("7B").unwrap(), 7);
        assert_eq!(parse_size("7b").unwrap(), 7);
        assert_eq!(parse_size("0").unwrap(), 0);
    }

    #[test]
    fn fractions_are_rounded_down_to_bytes() {
        assert_eq!(parse_size("1.5G").unwrap(), 3 << 29);
        assert_eq!(parse_size(".5k").unwrap(), 512);
        assert_eq!(parse_size("1.M").unwrap(), 1 << 20);
        assert_eq!(parse_size("0.0009k").unwrap(), 0);
        assert_eq!(parse_size("0.0010k").unwrap(), 1);
        assert_eq!(parse_size("1.9999999999999999999999999999999999999k").unwrap(), 2047);
        assert_eq!(parse_size("15.9999999999999999999999999999999999999E").unwrap(), u64::MAX);
    }

    #[test]
    fn a_long_fraction_is_exact() {
        // 2^-60 has 60 decimal digits, the last of them decides about the last byte.
        let one = "0.000000000000000000867361737988403547205962240695953369140625E";
        let less = "0.000000000000000000867361737988403547205962240695953369140624E";
        assert_eq!(parse_size(one).unwrap(), 1);
        assert_eq!(parse_size(less).unwrap(), 0);
    }

    #[test]
    fn a_fraction_needs_a_scale() {
        for text in ["1.5", "1.5B", "1.", ".5", "1.0"] {
            assert!(parse_size(text).unwrap_err().to_string().contains("needs a suffix"), "{text}");
        }
    }

    #[test]
    fn hexadecimal_takes_neither_suffix_nor_fraction() {
        assert_eq!(parse_size("0x7fEE").unwrap(), 0x7fee);
        assert_eq!(parse_size("0X1e").unwrap(), 0x1e);
        for text in ["0x", "0x20M", "0x1p", "0x1.8k"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn overflow_is_refused() {
        assert_eq!(parse_size("18446744073709551615").unwrap(), u64::MAX);
        assert_eq!(parse_size("15E").unwrap(), 15 << 60);
        for text in
            ["18446744073709551616", "16E", "16384P", "99999999999999999999999", "0x10000000000000000"]
        {
            assert!(parse_size(text).unwrap_err().to_string().contains("too large"), "{text}");
        }
    }

    #[test]
    fn leading_zeros_are_decimal() {
        assert_eq!(parse_size("010").unwrap(), 10);
        assert_eq!(parse_size("08k").unwrap(), 8192);
    }

    #[test]
    fn anything_else_is_refused() {
        for text in [
            "", " ", "k", ".", ".k", "-1", "+1", "-0", "1e3", "1 k", " 1", "1 ", "1kk", "1kB", "1KiB",
            "1.2.3k", "\u{661}k", "1\0",
        ] {
            assert!(parse_size(text).is_err(), "{text:?}");
        }
        assert!(parse_size(&"0".repeat(1000)).is_err());
    }
}
