//! The commands: names, numbers of arguments, what they need, and their help.

/// What a command does to the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Needs {
    /// Nothing: it runs without an image.
    Nothing,
    /// An open image.
    Image,
    /// An image that may be written to.
    Writable,
}

/// A command.
#[derive(Clone, Copy, Debug)]
pub(super) struct Command {
    pub(super) name: &'static str,
    pub(super) alias: &'static str,
    /// Fewest and most arguments, options included.
    pub(super) args: (usize, Option<usize>),
    pub(super) needs: Needs,
    /// Its options for getopt.
    pub(super) short: &'static str,
    /// What follows the name in its usage line.
    pub(super) usage: Option<&'static str>,
    pub(super) summary: &'static str,
    /// Longer help, its own paragraph; empty if there is none.
    pub(super) help: &'static str,
}

impl Command {
    /// The usage line under the name the user typed.
    pub(super) fn line(&self, typed: &str) -> String {
        match self.usage {
            Some(usage) => format!("{typed} {usage} -- {}", self.summary),
            None => format!("{typed} -- {}", self.summary),
        }
    }

    /// Whether a number of arguments is right; else what is said about it.
    pub(super) fn check_count(&self, typed: &str, count: usize) -> Result<(), String> {
        let (min, max) = self.args;
        if count >= min && max.is_none_or(|max| count <= max) {
            return Ok(());
        }
        let expected = match max {
            None => format!("at least {min} arguments"),
            Some(max) if max == min => format!("{min} arguments"),
            Some(max) => format!("between {min} and {max} arguments"),
        };
        Err(format!("bad argument count {count} to {typed}, expected {expected}"))
    }
}

/// A command by name or alias.
pub(super) fn find(name: &str) -> Option<&'static Command> {
    COMMANDS.iter().find(|c| c.name == name || (!c.alias.is_empty() && c.alias == name))
}

const fn plain(name: &'static str, needs: Needs, summary: &'static str) -> Command {
    Command { name, alias: "", args: (0, Some(0)), needs, short: "", usage: None, summary, help: "" }
}

/// All commands, by name.
pub(super) const COMMANDS: &[Command] = &[
    Command { args: (0, None), ..plain("abort", Needs::Nothing, "simulate a program crash using abort(3)") },
    Command { args: (0, None), ..plain("aio_flush", Needs::Image, "completes all outstanding aio requests") },
    Command {
        args: (2, None),
        short: "CiP:qrv",
        usage: Some("[-Ciqrv] [-P pattern] off len [len..]"),
        help: "Starts a read into one buffer per length and returns; aio_flush waits for its end. Its outcome is printed when it ends and does\nnot count for the exit code.\n -C  figures as comma-separated values\n -i  count a request that was refused, send none\n -P  compare what was read with this byte\n -q  print no figures\n -r  nothing: buffers need not be registered\n -v  print what was read",
        ..plain("aio_read", Needs::Image, "asynchronously reads a number of bytes")
    },
    Command {
        args: (2, None),
        short: "CfiP:qruz",
        usage: Some("[-Cfiqruz] [-P pattern] off len [len..]"),
        help: "Starts a write from one buffer per length and returns; aio_flush waits for its end. Its outcome is printed when it ends and does\nnot count for the exit code.\n -C  figures as comma-separated values\n -f  durable when it ends (FUA)\n -i  count a request that was refused, send none\n -P  write this byte (0xcd)\n -q  print no figures\n -r  nothing: buffers need not be registered\n -u  with -z, deallocate\n -z  write zeroes without data",
        ..plain("aio_write", Needs::Writable, "asynchronously writes a number of bytes")
    },
    Command {
        args: (1, Some(2)),
        usage: Some("offset [count]"),
        ..plain("alloc", Needs::Image, "checks if offset is allocated in the file")
    },
    Command { alias: "c", ..plain("close", Needs::Image, "close the current open file") },
    Command {
        alias: "d",
        args: (2, None),
        short: "Cq",
        usage: Some("[-Cq] off len"),
        help: "Tells the image that a range is no longer needed.\n -C  figures as comma-separated values\n -q  print no figures",
        ..plain("discard", Needs::Writable, "discards a number of bytes at a specified offset")
    },
    Command { alias: "f", ..plain("flush", Needs::Image, "flush all in-core file state to disk") },
    Command {
        alias: "?",
        args: (0, Some(1)),
        usage: Some("[command]"),
        ..plain("help", Needs::Nothing, "help for one or all commands")
    },
    Command { alias: "i", ..plain("info", Needs::Image, "prints information about the current file") },
    Command { alias: "l", ..plain("length", Needs::Image, "gets the length of the current file") },
    Command { usage: Some(""), ..plain("map", Needs::Image, "prints the allocated areas of a file") },
    Command {
        alias: "o",
        args: (1, None),
        short: "snCro:ki:t:d:U",
        usage: Some("[-rsCnkU] [-t cache] [-d discard] [-o options] [path]"),
        help: "Opens an image for the commands that follow.\n -r  read-only\n -s  keep writes in a temporary file\n -C  keep what is read from a backing file\n -n  bypass the page cache, as -t none\n -U  although others write it\n -k  as -i native\n -i  how operations are carried out: threads, native, io_uring\n -t  cache mode\n -d  what a discard does: ignore, unmap\n -o  options of the image's driver",
        ..plain("open", Needs::Nothing, "open the file specified by path")
    },
    Command { alias: "q", args: (0, None), ..plain("quit", Needs::Nothing, "exit the program") },
    Command {
        alias: "r",
        args: (2, None),
        short: "bCl:pP:qrs:v",
        usage: Some("[-abCqrv] [-P pattern [-s off] [-l len]] off len"),
        help: "Reads a range.\n -b  of the VM state instead of the disk\n -C  figures as comma-separated values\n -l  compare this many bytes (with -P)\n -p  nothing: for old scripts\n -P  compare what was read with this byte\n -q  print no figures\n -r  nothing: buffers need not be registered\n -s  compare from here on, counted from the start of the range (with -P)\n -v  print what was read",
        ..plain("read", Needs::Image, "reads a number of bytes at a specified offset")
    },
    Command {
        args: (2, None),
        short: "CP:qrv",
        usage: Some("[-Cqrv] [-P pattern] off len [len..]"),
        help: "Reads a range into one buffer per length.\n -C  figures as comma-separated values\n -P  compare what was read with this byte\n -q  print no figures\n -r  nothing: buffers need not be registered\n -v  print what was read",
        ..plain("readv", Needs::Image, "reads a number of bytes at a specified offset")
    },
    Command {
        args: (0, None),
        short: "c:o:rw",
        usage: Some("[(-r|-w)] [-c cache] [-o options]"),
        help: "Changes how the image is open.\n -r  read-only\n -w  writable\n -c  cache mode\n -o  options of the image's driver",
        ..plain("reopen", Needs::Image, "reopens an image with new options")
    },
    Command {
        args: (1, Some(1)),
        usage: Some("signal"),
        help: "Sends the process the signal of this number.",
        ..plain("sigraise", Needs::Nothing, "raises a signal")
    },
    Command {
        args: (1, Some(1)),
        ..plain("sleep", Needs::Nothing, "waits for the given value in milliseconds")
    },
    Command {
        alias: "t",
        args: (1, Some(3)),
        short: "m:",
        usage: Some("[-m prealloc_mode] off"),
        ..plain("truncate", Needs::Writable, "truncates the current file at the given offset")
    },
    Command {
        alias: "w",
        args: (2, None),
        short: "bcCfnpP:qrs:uz",
        usage: Some("[-bcCfnqruz] [-P pattern | -s source_file] off len"),
        help: "Writes a range.\n -b  of the VM state instead of the disk\n -c  compressed\n -C  figures as comma-separated values\n -f  durable when it ends (FUA)\n -n  with -z, fail rather than write the zeros slowly\n -p  nothing: for old scripts\n -P  write this byte (0xcd)\n -q  print no figures\n -r  nothing: buffers need not be registered\n -s  write the bytes of this file, again and again\n -u  with -z, deallocate\n -z  write zeroes without data",
        ..plain("write", Needs::Writable, "writes a number of bytes at a specified offset")
    },
    Command {
        args: (2, None),
        short: "CfqrP:",
        usage: Some("[-Cfqr] [-P pattern] off len [len..]"),
        help: "Writes a range from one buffer per length.\n -C  figures as comma-separated values\n -f  durable when it ends (FUA)\n -P  write this byte (0xcd)\n -q  print no figures\n -r  nothing: buffers need not be registered",
        ..plain("writev", Needs::Writable, "writes a number of bytes at a specified offset")
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_in_order_and_no_name_means_two() {
        assert!(COMMANDS.is_sorted_by_key(|c| c.name));
        let names: Vec<&str> =
            COMMANDS.iter().flat_map(|c| [c.name, c.alias]).filter(|n| !n.is_empty()).collect();
        for (i, name) in names.iter().enumerate() {
            assert!(!names[..i].contains(name), "{name}");
        }
    }

    #[test]
    fn argument_counts_are_told_in_the_words_of_qemu_io() {
        let text = |name: &str, n| find(name).expect(name).check_count(name, n).expect_err(name);
        assert_eq!(text("read", 1), "bad argument count 1 to read, expected at least 2 arguments");
        assert_eq!(text("length", 1), "bad argument count 1 to length, expected 0 arguments");
        assert_eq!(text("alloc", 3), "bad argument count 3 to alloc, expected between 1 and 2 arguments");
    }
}
