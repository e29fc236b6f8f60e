//! Command lines: reading them, finding the command, checking what it needs, running it.

use super::super::getopt::{Getopt, Word};
use super::super::size::{self, parse_int};
use super::image::OpenImage;
use super::report::Out;
use super::table::{COMMANDS, Command, Needs, find};
use crate::context::Context;
use crate::error::Result;
use crate::sync::Arc;
use std::io::BufRead;
use std::time::Duration;

/// How a command ended.
pub(super) type Outcome = std::result::Result<(), Failed>;

/// A command that failed; what was wrong has been said already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Failed;

/// Everything between the first command and the last.
pub(super) struct Session {
    pub(super) ctx: Arc<Context>,
    pub(super) program: String,
    pub(super) out: Out,
    pub(super) image: Option<OpenImage>,
    /// Memory of requests starts one byte off.
    pub(super) misalign: bool,
    quit: bool,
}

/// Options and operands of one command line.
pub(super) struct Words {
    pub(super) options: Vec<(char, String)>,
    pub(super) operands: Vec<String>,
}

impl Words {
    pub(super) fn has(&self, letter: char) -> bool {
        self.options.iter().any(|o| o.0 == letter)
    }

    pub(super) fn value(&self, letter: char) -> Option<&str> {
        self.options.iter().rev().find(|o| o.0 == letter).map(|o| o.1.as_str())
    }
}

impl Session {
    pub(super) fn new(program: String, misalign: bool) -> Result<Self> {
        let ctx = Context::with_defaults()?;
        Ok(Self { ctx, program, out: Out::new(), image: None, misalign, quit: false })
    }

    /// Runs the lines until one of them quits; false if any failed.
    pub(super) fn run_lines(&mut self, lines: &[String]) -> bool {
        let mut ok = true;
        for line in lines {
            ok &= self.run_line(line).is_ok();
            if self.quit {
                break;
            }
        }
        self.end() && ok
    }

    /// Runs the lines of standard input behind a prompt; false if any failed.
    pub(super) fn run_stdin(&mut self) -> bool {
        let mut ok = true;
        let mut input = std::io::stdin().lock();
        while !self.quit {
            // The text is qemu-io's: scripts wait for it, or filter it out.
            self.out.prompt("qemu-io> ");
            let mut line = Vec::new();
            match input.read_until(b'\n', &mut line) {
                Ok(n) if n > 0 => {}
                _ => break,
            }
            let line = String::from_utf8_lossy(&line);
            ok &= self.run_line(line.trim_end_matches('\n')).is_ok();
        }
        self.end() && ok
    }

    /// Closes the image at the end of all commands; false if that failed.
    fn end(&mut self) -> bool {
        let closed = self.image.take().map_or(Ok(()), |image| self.close_image(image));
        self.out.flush();
        closed.is_ok()
    }

    /// Prints an error of the program itself, which goes to standard error under its name.
    pub(super) fn complain(&self, text: &str) -> Failed {
        eprintln!("{}: {text}", self.program);
        Failed
    }

    /// Prints what is wrong with the words of a command.
    pub(super) fn refuse(&mut self, text: &str) -> Failed {
        self.out.line(text);
        Failed
    }

    /// A size of the command line; refused in words.
    pub(super) fn size(&mut self, word: &str) -> std::result::Result<u64, Failed> {
        size::parse(word).map_err(|e| self.refuse(&e.text(word)))
    }

    fn run_line(&mut self, line: &str) -> Outcome {
        let words: Vec<String> = line.split(' ').filter(|w| !w.is_empty()).map(str::to_owned).collect();
        let Some((typed, args)) = words.split_first() else { return Ok(()) };
        let Some(command) = find(typed) else {
            eprintln!("command \"{typed}\" not found");
            return Err(Failed);
        };
        if command.needs != Needs::Nothing && self.image.is_none() {
            eprintln!("no file open, try 'help open'");
            return Err(Failed);
        }
        if let Err(text) = command.check_count(typed, args.len()) {
            eprintln!("{text}");
            return Err(Failed);
        }
        if command.needs == Needs::Writable && self.image.as_ref().is_some_and(|i| !i.is_writable()) {
            return Err(self.complain("Block node is read-only"));
        }
        let words = self.read_words(command, typed, args)?;
        let outcome = self.run_command(command, typed, &words);
        // What ended meanwhile is told now, not when somebody waits for it.
        self.poll_queued();
        outcome
    }

    fn read_words(
        &mut self,
        command: &Command,
        typed: &str,
        args: &[String],
    ) -> std::result::Result<Words, Failed> {
        let mut words = Words { options: Vec::new(), operands: Vec::new() };
        if command.short.is_empty() {
            words.operands = args.to_vec();
            return Ok(words);
        }
        for word in Getopt::new(args, command.short, &[]) {
            match word {
                Ok(Word::Option(letter, value)) => {
                    self.check_option(command, letter, &value, &words)?;
                    words.options.push((letter, value));
                }
                Ok(Word::Operand(operand)) => words.operands.push(operand),
                Err(problem) => {
                    eprintln!("{typed}: {problem}");
                    return Err(self.refuse(&command.line(typed)));
                }
            }
        }
        Ok(words)
    }

    /// Values are checked as they are read: the first bad one is the one complained about.
    fn check_option(&mut self, command: &Command, letter: char, value: &str, before: &Words) -> Outcome {
        match (command.name, letter) {
            (_, 'P') => pattern(value)
                .map(|_| ())
                .ok_or_else(|| self.refuse(&format!("{value} is not a valid pattern byte"))),
            ("read", 's' | 'l') => self.size(value).map(|_| ()),
            ("reopen", _) => self.check_reopen(letter, value, before),
            ("truncate", 'm') => self.check_preallocation(value),
            _ => Ok(()),
        }
    }

    fn run_command(&mut self, command: &Command, typed: &str, words: &Words) -> Outcome {
        let usage = command.line(typed);
        match command.name {
            "read" => self.read(words, &usage),
            "readv" => self.readv(words, &usage),
            "write" => self.write(words, &usage),
            "writev" => self.writev(words, &usage),
            "aio_read" => self.aio_read(words, &usage),
            "aio_write" => self.aio_write(words, &usage),
            "aio_flush" => {
                self.finish_queued();
                Ok(())
            }
            "flush" => self.flush(),
            "discard" => self.discard(words, &usage),
            "map" => self.map(),
            "alloc" => self.alloc(&words.operands),
            "length" => self.length(),
            "info" => self.info(),
            "truncate" => self.truncate(words, &usage),
            "open" => self.open(words, &usage),
            "reopen" => self.reopen(words, &usage),
            "close" => self.image.take().map_or(Ok(()), |image| self.close_image(image)),
            "sleep" => self.sleep(&words.operands[0]),
            "sigraise" => self.sigraise(&words.operands[0]),
            "abort" => {
                std::mem::replace(&mut self.out, Out::new()).lose();
                std::process::abort()
            }
            "quit" => {
                self.quit = true;
                Ok(())
            }
            "help" => self.help(words.operands.first().map(String::as_str)),
            other => unreachable!("command '{other}' has no implementation"),
        }
    }

    fn sleep(&mut self, word: &str) -> Outcome {
        let Some(ms) = parse_int(word).and_then(|n| u32::try_from(n).ok()) else {
            return Err(self.refuse(&format!("{word} is not a valid number")));
        };
        std::thread::sleep(Duration::from_millis(u64::from(ms)));
        Ok(())
    }

    fn sigraise(&mut self, word: &str) -> Outcome {
        let signal = self.size(word)?;
        self.out.flush();
        match i32::try_from(signal).ok().filter(|s| super::super::sys::raise(*s).is_ok()) {
            Some(_) => Ok(()),
            None => Err(self.complain(&format!("cannot raise signal {signal}"))),
        }
    }

    fn help(&mut self, name: Option<&str>) -> Outcome {
        let Some(name) = name else {
            let lines: Vec<String> = COMMANDS.iter().map(|c| c.line(c.name)).collect();
            lines.iter().for_each(|l| self.out.line(l));
            self.out.line("\nUse 'help commandname' for extended help.");
            return Ok(());
        };
        let Some(command) = find(name) else {
            return Err(self.refuse(&format!("command {name} not found")));
        };
        self.out.line(&command.line(name));
        if !command.help.is_empty() {
            self.out.line(&format!("\n{}\n", command.help));
        }
        Ok(())
    }
}

/// A byte as `-P` names it.
pub(super) fn pattern(word: &str) -> Option<u8> {
    parse_int(word).and_then(|n| u8::try_from(n).ok())
}
