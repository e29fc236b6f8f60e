//! `cobweb io`: qemu-io's commands, flags, output lines and exit codes.
//!
//! One [`Session`] holds at most one open image and runs command lines, from `-c` or from standard input. A command that fails makes the exit code 1 and
//! the next one runs all the same. What goes to standard output is kept back until 4 KiB, a prompt or the end, unless it is a terminal: that is how the C
//! library buffers it, and whoever captures both streams in one file sees errors first.
//!
//! `table.rs` lists the commands; `transfer.rs` carries out read and write, `queued.rs` the asynchronous ones, `image.rs` open, close and reopen,
//! `extent.rs` what looks at the image; `report.rs` prints.

mod copy_up;
mod extent;
mod image;
mod queued;
mod report;
mod session;
mod table;
mod transfer;

use super::getopt::{Getopt, Long, Word};
use crate::error::Result;
use image::OpenFlags;
use session::Session;
use std::process::ExitCode;

const LONG: &[Long] = &[
    ("help", false, 'h'),
    ("version", false, 'V'),
    ("cmd", true, 'c'),
    ("format", true, 'f'),
    ("read-only", false, 'r'),
    ("snapshot", false, 's'),
    ("nocache", false, 'n'),
    ("copy-on-read", false, 'C'),
    ("misalign", false, 'm'),
    ("native-aio", false, 'k'),
    ("aio", true, 'i'),
    ("discard", true, 'd'),
    ("cache", true, 't'),
    ("trace", true, 'T'),
    ("force-share", false, 'U'),
    ("object", true, 'O'),
    ("image-opts", false, 'I'),
];

/// What the words of the command line ask for.
#[derive(Debug, Default)]
struct Line {
    commands: Vec<String>,
    format: Option<String>,
    image_opts: bool,
    misalign: bool,
    flags: OpenFlags,
    operands: Vec<String>,
}

/// Runs `cobweb io` with the words behind `io`.
pub(super) fn run(words: &[String]) -> Result<ExitCode> {
    let program = super::program();
    let mut line = Line::default();
    for word in Getopt::new(words, "hVc:d:f:rsnCmki:t:T:U", LONG) {
        let checked = match word {
            Ok(Word::Operand(name)) => {
                line.operands.push(name);
                Ok(())
            }
            Ok(Word::Option('h', _)) => {
                println!("{}", usage());
                return Ok(ExitCode::SUCCESS);
            }
            Ok(Word::Option('V', _)) => {
                println!("{program} version {}", env!("CARGO_PKG_VERSION"));
                return Ok(ExitCode::SUCCESS);
            }
            Ok(Word::Option(letter, value)) => line.option(letter, value),
            Err(problem) => {
                eprintln!("{program}: {problem}\n{}", usage());
                return Ok(ExitCode::FAILURE);
            }
        };
        if let Err(text) = checked {
            eprintln!("{program}: {text}");
            return Ok(ExitCode::FAILURE);
        }
    }
    if line.operands.len() > 1 {
        println!("{}", usage());
        return Ok(ExitCode::FAILURE);
    }
    if line.format.is_some() && line.image_opts {
        eprintln!("{program}: --image-opts and -f are mutually exclusive");
        return Ok(ExitCode::FAILURE);
    }
    let mut session = Session::new(program, line.misalign)?;
    if let Some(name) = line.operands.first()
        && !session.open_first(name, line.format.as_deref(), line.image_opts, &line.flags)
    {
        return Ok(ExitCode::FAILURE);
    }
    let ok = if line.commands.is_empty() { session.run_stdin() } else { session.run_lines(&line.commands) };
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl Line {
    fn option(&mut self, letter: char, value: String) -> std::result::Result<(), String> {
        match letter {
            'c' => self.commands.push(value),
            'f' => self.format = Some(value),
            'm' => self.misalign = true,
            'I' => self.image_opts = true,
            'T' => {}
            'O' => return Err("--object: there are no objects to define yet".to_owned()),
            other => self.flags.set(other, &value)?,
        }
        Ok(())
    }
}

fn usage() -> &'static str {
    "Usage: cobweb io [OPTIONS]... [-c STRING]... [file]
Reads, writes and looks at a disk image by commands

      --image-opts     the file is option text
  -c, --cmd STRING     run this command; may be given again
  -f, --format FMT     format of the image
  -r, --read-only      open it read-only
  -s, --snapshot       keep writes in a temporary file
  -n, --nocache        bypass the page cache, as -t none
  -C, --copy-on-read   keep what is read from a backing file
  -m, --misalign       use memory that is not aligned
  -k, --native-aio     as -i native
  -i, --aio=MODE       how operations are carried out: threads, native, io_uring
  -t, --cache=MODE     cache mode: none, writeback, writethrough, directsync, unsafe
  -d, --discard=MODE   what a discard does: ignore, unmap
  -U, --force-share    open it although others write it
  -h, --help           show this help and exit
  -V, --version        show the version and exit

'cobweb io -c help' lists the commands."
}
