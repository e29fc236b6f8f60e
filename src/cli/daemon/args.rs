//! The command line of `storage-daemon`: words to steps, in their order. Pure.

use crate::error::{Error, Result};
use crate::options::Options;
use std::path::PathBuf;

/// What to make, in the order of the command line; later steps may use what earlier ones made.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    Blockdev(Options),
    Object(Options),
    NbdServer(Options),
    Export(Options),
    Chardev(Options),
    Monitor(Options),
}

/// The command line, read.
#[derive(Debug, Default, PartialEq)]
pub(super) struct CommandLine {
    pub(super) steps: Vec<Step>,
    pub(super) pid_file: Option<PathBuf>,
    pub(super) daemonize: bool,
    pub(super) help: bool,
    pub(super) version: bool,
}

/// An option whose value describes an object: its name, the key that its first word may leave out, and its step.
struct Kind {
    name: &'static str,
    implied: Option<&'static str>,
    step: fn(Options) -> Step,
}

static KINDS: &[Kind] = &[
    Kind { name: "blockdev", implied: None, step: Step::Blockdev },
    Kind { name: "object", implied: Some("qom-type"), step: Step::Object },
    Kind { name: "nbd-server", implied: None, step: Step::NbdServer },
    Kind { name: "export", implied: Some("type"), step: Step::Export },
    Kind { name: "chardev", implied: Some("backend"), step: Step::Chardev },
    Kind { name: "monitor", implied: Some("chardev"), step: Step::Monitor },
];

impl CommandLine {
    /// Reads the words after `storage-daemon`. A value follows its option as the next word or after `=`.
    pub(super) fn parse(words: impl IntoIterator<Item = String>) -> Result<Self> {
        let mut line = Self::default();
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            let (name, mut given) = match word.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (word.as_str(), None),
            };
            let mut value = || {
                given
                    .take()
                    .or_else(|| words.next())
                    .ok_or_else(|| Error::invalid(format!("option '{name}' needs a value")))
            };
            match name {
                "-h" | "--help" => line.help = true,
                "-V" | "--version" => line.version = true,
                "--daemonize" => line.daemonize = true,
                "--pidfile" => line.pid_file = Some(PathBuf::from(value()?)),
                _ => {
                    let kind = KINDS.iter().find(|k| name.strip_prefix("--") == Some(k.name));
                    let Some(kind) = kind else {
                        return Err(Error::invalid(format!("unknown option '{word}' (see --help)")));
                    };
                    let options = parse_value(&value()?, kind.implied);
                    let options =
                        options.map_err(|e| Error::invalid(format!("{name}: {}", e.full_text())))?;
                    line.steps.push((kind.step)(options));
                }
            }
            if let Some(value) = given {
                return Err(Error::invalid(format!("option '{name}' takes no value, not '{value}'")));
            }
        }
        Ok(line)
    }
}

/// Option text whose first word may be a value without its key.
fn parse_value(text: &str, implied: Option<&str>) -> Result<Options> {
    let first = text.split(',').next().unwrap_or_default();
    match implied {
        Some(key) if !first.contains('=') && !text.trim_start().starts_with('{') && !first.is_empty() => {
            Options::parse(&format!("{key}={text}"))
        }
        _ => Options::parse(text),
    }
}

/// What `--help` prints.
pub(super) const HELP: &str = "\
Usage: cobweb storage-daemon [OPTIONS]

Serves block devices until it is told to stop. Options are carried out in their order, and may be repeated; values are
key=value,... or JSON.

  --blockdev [driver=]DRIVER,node-name=NAME,...  open a node
  --object throttle-group,id=NAME,limits.KEY=N   make a throttle group
  --nbd-server addr.type=unix,addr.path=PATH[,max-connections=N]
  --nbd-server addr.type=inet,addr.host=HOST,addr.port=PORT[,max-connections=N]
                                                 start the NBD server
  --export [type=]nbd,id=NAME,node-name=NODE[,name=EXPORT][,description=TEXT][,writable=on|off]
                                                 export a node
  --chardev socket,id=NAME,path=PATH,server=on,wait=off
  --chardev socket,id=NAME,host=HOST,port=PORT,server=on,wait=off
                                                 a socket for a monitor
  --monitor [chardev=]NAME[,pretty=on|off]       speak QMP there
  --pidfile PATH                                 write the process id to a file
  --daemonize                                    go into the background once everything is up
  -h, --help                                     print this help
  -V, --version                                  print the version

Commands, events and limits: docs/daemon.md.
";

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Result<CommandLine> {
        CommandLine::parse(words.iter().map(|w| (*w).to_owned()))
    }

    #[test]
    fn steps_keep_their_order_and_first_words_may_lack_their_key() {
        let line = parse(&[
            "--object",
            "throttle-group,id=tg,limits.bps-write=5",
            "--blockdev",
            r#"{"driver": "null-co", "node-name": "n"}"#,
            "--nbd-server=addr.type=unix,addr.path=/s",
            "--export",
            "nbd,id=e,node-name=n,writable=on",
            "--export=type=nbd,id=f,node-name=n",
            "--chardev",
            "socket,path=/q,server=on,wait=off,id=q",
            "--monitor",
            "q",
            "--monitor=chardev=q",
            "--pidfile",
            "/p",
            "--daemonize",
        ])
        .expect("a good command line");
        let o = |text: &str| Options::parse(text).expect("options");
        assert_eq!(
            line.steps,
            [
                Step::Object(o("qom-type=throttle-group,id=tg,limits.bps-write=5")),
                Step::Blockdev(o("driver=null-co,node-name=n")),
                Step::NbdServer(o("addr.type=unix,addr.path=/s")),
                Step::Export(o("type=nbd,id=e,node-name=n,writable=on")),
                Step::Export(o("type=nbd,id=f,node-name=n")),
                Step::Chardev(o("backend=socket,path=/q,server=on,wait=off,id=q")),
                Step::Monitor(o("chardev=q")),
                Step::Monitor(o("chardev=q")),
            ]
        );
        assert_eq!((line.pid_file, line.daemonize), (Some("/p".into()), true));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (words, part) in [
            (&["--blockdv", "x=y"][..], "'--blockdv'"),
            (&["extra"], "'extra'"),
            (&["--blockdev"], "'--blockdev'"),
            (&["--pidfile"], "'--pidfile'"),
            (&["--daemonize=on"], "'--daemonize'"),
            (&["--export", "nbd,id"], "--export: option 'id'"),
            (&["--blockdev", "{"], "--blockdev: "),
            (&["--blockdev", "driver=a,driver=b"], "'driver' is given twice"),
        ] {
            let e = parse(words).expect_err("refused");
            assert!(e.to_string().contains(part), "{words:?}: {e}");
        }
        assert!(parse(&["-h"]).expect("help").help);
        assert!(parse(&["--version"]).expect("version").version);
    }
}
