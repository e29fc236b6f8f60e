//! What is printed: transfer figures, dumps, and the stream they go to.

use super::super::size::exact;
use std::io::{BufWriter, IsTerminal, Stdout, Write};
use std::time::Duration;

/// Bytes that standard output holds back; what the C library does with a pipe or file.
const HELD: usize = 4096;

/// Standard output.
#[derive(Debug)]
pub(super) struct Out {
    stream: BufWriter<Stdout>,
    terminal: bool,
}

impl Out {
    pub(super) fn new() -> Self {
        let stdout = std::io::stdout();
        let terminal = stdout.is_terminal();
        Self { stream: BufWriter::with_capacity(HELD, stdout), terminal }
    }

    /// Prints a line. A reader that has gone is no error: the exit code says how the commands went.
    pub(super) fn line(&mut self, text: &str) {
        let _ = writeln!(self.stream, "{text}");
        if self.terminal {
            self.flush();
        }
    }

    /// Prints without ending the line, at once.
    pub(super) fn prompt(&mut self, text: &str) {
        let _ = write!(self.stream, "{text}");
        self.flush();
    }

    /// Brings everything out.
    pub(super) fn flush(&mut self) {
        let _ = self.stream.flush();
    }

    /// Forgets what was held back: what a process that crashes does.
    pub(super) fn lose(self) {
        let (_stdout, _held) = self.stream.into_parts();
    }
}

/// A finished transfer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Figures {
    /// `read`, `wrote`, `discard`.
    pub(super) verb: &'static str,
    pub(super) offset: u64,
    /// Bytes asked for, all of which were transferred.
    pub(super) len: u64,
    pub(super) time: Duration,
}

impl Figures {
    /// The lines, or with `machine` the comma-separated values.
    pub(super) fn text(&self, machine: bool) -> String {
        // A clock that has not moved would make the rates infinite.
        let seconds = self.time.as_secs_f64().max(1e-9);
        let (rate, ops) = (self.len as f64 / seconds, 1.0 / seconds);
        if machine {
            return format!("{},1,{},{rate:.3},{ops:.3}", self.len, clock(self.time, true));
        }
        format!(
            "{} {}/{} bytes at offset {}\n{}, 1 ops; {} ({}/sec and {ops:.4} ops/sec)",
            self.verb,
            self.len,
            self.len,
            self.offset,
            exact(self.len as f64),
            clock(self.time, false),
            exact(rate),
        )
    }
}

/// A duration: seconds with two decimals below a minute unless `full`, else `h:mm:ss.cc`.
fn clock(time: Duration, full: bool) -> String {
    let (seconds, hundredths) = (time.as_secs(), time.subsec_millis() / 10);
    if seconds < 60 && !full {
        return format!("{seconds:02}.{hundredths:02} sec");
    }
    format!("{}:{:02}:{:02}.{hundredths:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

/// Bytes in hexadecimal and, where they are letters or digits, as such; `offset` is that of the first.
pub(super) fn dump(offset: u64, bytes: &[u8]) -> String {
    let mut out = String::new();
    for (n, row) in bytes.chunks(16).enumerate() {
        out.push_str(&format!("{:08x}:  ", offset + 16 * n as u64));
        row.iter().for_each(|b| out.push_str(&format!("{b:02x} ")));
        out.push(' ');
        out.extend(row.iter().map(|b| if b.is_ascii_alphanumeric() { char::from(*b) } else { '.' }));
        out.push('\n');
    }
    out.pop();
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_and_dumps_have_the_shape_that_scripts_filter() {
        let f = Figures { verb: "wrote", offset: 512, len: 65536, time: Duration::from_millis(250) };
        assert_eq!(
            f.text(false),
            "wrote 65536/65536 bytes at offset 512\n64 KiB, 1 ops; 00.25 sec (256 KiB/sec and 4.0000 ops/sec)"
        );
        assert_eq!(f.text(true), "65536,1,0:00:00.25,262144.000,4.000");
        assert_eq!(clock(Duration::from_millis(3_723_450), false), "1:02:03.45");
        assert_eq!(
            dump(0x3fc, b"a B1!~\t\x80\xff .z\0\0\0\0q"),
            "000003fc:  61 20 42 31 21 7e 09 80 ff 20 2e 7a 00 00 00 00  a.B1.......z....\n0000040c:  71  q"
        );
        assert_eq!(dump(0, b""), "");
    }
}
