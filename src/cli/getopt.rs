//! Option words as getopt_long(3) reads them: options and operands in any order, short options in one word, long ones shortened.
//!
//! qemu-img and qemu-io parse this way, and scripts rely on it; clap neither permutes within a word nor words its errors like that.

/// A long option: its name, whether it takes a value, and what it is reported as.
pub(super) type Long = (&'static str, bool, char);

/// What a word was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// An option, with its value if it takes one.
    Option(char, String),
    /// Anything else.
    Operand(String),
}

/// Reads words one after the other, so that an error of an earlier option's value comes before one of a later word.
#[derive(Debug)]
pub(super) struct Getopt<'a> {
    words: std::slice::Iter<'a, String>,
    /// Rest of a word of short options.
    cluster: String,
    short: &'a str,
    long: &'a [Long],
    only_operands: bool,
}

impl<'a> Getopt<'a> {
    /// `short` as for getopt(3): a colon behind a letter that takes a value.
    pub(super) fn new(words: &'a [String], short: &'a str, long: &'a [Long]) -> Self {
        Self { words: words.iter(), cluster: String::new(), short, long, only_operands: false }
    }

    /// Whether a short option is known, and takes a value.
    fn takes_value(&self, letter: char) -> Option<bool> {
        let at = self.short.find(letter).filter(|_| letter != ':')?;
        Some(self.short[at + letter.len_utf8()..].starts_with(':'))
    }

    fn short(&mut self) -> Result<Word, String> {
        let letter = self.cluster.remove(0);
        match self.takes_value(letter) {
            None => Err(format!("invalid option -- '{letter}'")),
            Some(false) => Ok(Word::Option(letter, String::new())),
            Some(true) if !self.cluster.is_empty() => {
                Ok(Word::Option(letter, std::mem::take(&mut self.cluster)))
            }
            Some(true) => match self.words.next() {
                Some(value) => Ok(Word::Option(letter, value.clone())),
                None => Err(format!("option requires an argument -- '{letter}'")),
            },
        }
    }

    fn long(&mut self, word: &str) -> Result<Word, String> {
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (word, None),
        };
        let (full, takes, code) = self.find_long(name)?;
        match (takes, value) {
            (true, Some(value)) => Ok(Word::Option(code, value)),
            (true, None) => match self.words.next() {
                Some(value) => Ok(Word::Option(code, value.clone())),
                None => Err(format!("option '--{full}' requires an argument")),
            },
            (false, Some(_)) => Err(format!("option '--{full}' doesn't allow an argument")),
            (false, None) => Ok(Word::Option(code, String::new())),
        }
    }

    fn find_long(&self, name: &str) -> Result<Long, String> {
        if let Some(exact) = self.long.iter().find(|l| l.0 == name) {
            return Ok(*exact);
        }
        let found: Vec<&Long> = self.long.iter().filter(|l| l.0.starts_with(name)).collect();
        match found.as_slice() {
            [] => Err(format!("unrecognized option '--{name}'")),
            [one] => Ok(**one),
            [first, rest @ ..] if rest.iter().all(|l| (l.1, l.2) == (first.1, first.2)) => Ok(**first),
            many => {
                let names: String = many.iter().map(|l| format!(" '--{}'", l.0)).collect();
                Err(format!("option '--{name}' is ambiguous; possibilities:{names}"))
            }
        }
    }
}

impl Iterator for Getopt<'_> {
    type Item = Result<Word, String>;

    fn next(&mut self) -> Option<Self::Item> {
        if !self.cluster.is_empty() {
            return Some(self.short());
        }
        let word = self.words.next()?;
        if self.only_operands || word == "-" || !word.starts_with('-') {
            return Some(Ok(Word::Operand(word.clone())));
        }
        if word == "--" {
            self.only_operands = true;
            return self.next();
        }
        if let Some(long) = word.strip_prefix("--") {
            return Some(self.long(long));
        }
        self.cluster = word[1..].to_owned();
        Some(self.short())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: &[Long] =
        &[("format", true, 'f'), ("force-share", false, 'U'), ("quiet", false, 'q'), ("output", true, 'o')];

    fn words(line: &str) -> Result<Vec<Word>, String> {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        Getopt::new(&words, "f:Uq", LONG).collect()
    }

    fn option(letter: char, value: &str) -> Word {
        Word::Option(letter, value.to_owned())
    }

    #[test]
    fn options_and_operands_mix_and_short_ones_share_a_word() {
        let file = Word::Operand("a".into());
        assert_eq!(
            words("a -Uqfraw --quiet"),
            Ok(vec![file.clone(), option('U', ""), option('q', ""), option('f', "raw"), option('q', "")])
        );
        assert_eq!(
            words("-f raw --format=x --out y -- -q"),
            Ok(vec![option('f', "raw"), option('f', "x"), option('o', "y"), Word::Operand("-q".into())])
        );
        assert_eq!(words("-"), Ok(vec![Word::Operand("-".into())]));
    }

    #[test]
    fn errors_are_worded_as_scripts_know_them() {
        for (line, error) in [
            ("-x", "invalid option -- 'x'"),
            ("-1", "invalid option -- '1'"),
            ("-:", "invalid option -- ':'"),
            ("-f", "option requires an argument -- 'f'"),
            ("--nope", "unrecognized option '--nope'"),
            ("--output", "option '--output' requires an argument"),
            ("--quiet=1", "option '--quiet' doesn't allow an argument"),
            ("--fo", "option '--fo' is ambiguous; possibilities: '--format' '--force-share'"),
        ] {
            assert_eq!(words(line), Err(error.to_owned()), "{line}");
        }
    }
}
