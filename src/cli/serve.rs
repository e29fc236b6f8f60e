//! `cobweb serve`: one disk over NBD, the short way.

use super::daemon::{
    Monitor, NewExport, Objects, Service, catch_signals, end, parse_address, start_context, uri,
};
use super::image::{ImageFlags, cache_mode, image_options};
use crate::error::{Error, Result};
use crate::export::nbd::Listener;
use crate::options::Options;
use crate::sync::Arc;
use std::io::Write;
use std::process::ExitCode;

/// Arguments of `serve`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// A file (raw unless -f), or the options of a node: key=value text with driver=, or JSON
    disk: String,
    /// Format of the file
    #[arg(short = 'f', long, value_name = "FMT")]
    format: Option<String>,
    /// Where NBD clients connect; port 0 takes a free one
    #[arg(long, value_name = "unix:PATH|HOST:PORT")]
    nbd: String,
    /// Where QMP is spoken
    #[arg(long, value_name = "unix:PATH")]
    qmp: Option<String>,
    /// Cache mode of the file: none, writeback, unsafe
    #[arg(short = 't', long, value_name = "MODE")]
    cache: Option<String>,
    /// Serve it read-only
    #[arg(short = 'r', long)]
    read_only: bool,
}

/// Name of the node.
const NODE: &str = "disk0";
/// Id of the export.
const EXPORT: &str = "export0";

/// Serves until a signal or the QMP command `quit`.
pub(super) fn run(args: &Args) -> Result<ExitCode> {
    let at = parse_address(&args.nbd)?;
    let qmp = args.qmp.as_deref().map(parse_address).transpose()?;
    let node = node_options(args)?;
    let signals = catch_signals()?;
    let objects = Arc::new(Objects::new(start_context("serve")?));
    objects.add_node(node)?;
    let read_only = objects.context().graph().node(NODE)?.base().limits().read_only;
    // As many clients as the engine allows: a server for one disk is a server for one guest and its tools.
    let address = objects.start_server_at(&at, 0)?;
    let export = NewExport {
        name: String::new(),
        description: String::new(),
        writable: !args.read_only && !read_only,
    };
    objects.export(EXPORT, NODE, export)?;
    let mut monitors = Vec::new();
    if let Some(at) = qmp {
        monitors.push(Monitor { listener: Listener::bind(&at)?, pretty: false });
    }
    let service = Service::new(objects.clone(), monitors)?;
    let mut out = std::io::stdout();
    // Whoever started us may have closed its end, and is served all the same.
    let _ = writeln!(out, "{}", uri(&address, "")).and_then(|()| out.flush());
    let outcome = service.run(&signals)?;
    Ok(end(outcome, objects, None))
}

/// The options of the node, whatever DISK was.
fn node_options(args: &Args) -> Result<Options> {
    let text = args.disk.trim_start();
    let is_options = text.starts_with('{') || text.starts_with("driver=") || text.contains(",driver=");
    let mut options = if is_options {
        if args.format.is_some() || args.cache.is_some() {
            return Err(Error::invalid("-f and -t go with a file; options of a node say it themselves"));
        }
        let mut options = Options::parse(text)?;
        if options.contains("node-name") {
            return Err(Error::invalid(format!("option 'node-name' is given by the command ('{NODE}')")));
        }
        if args.read_only && !options.contains("read-only") {
            options.insert("read-only", true)?;
        }
        options
    } else {
        if args.cache.as_deref().map(cache_mode).transpose()?.is_some_and(|c| c.write_through) {
            return Err(Error::unsupported("-t: NBD clients flush for themselves; use none or writeback"));
        }
        let flags = ImageFlags {
            format: args.format.as_deref(),
            cache: args.cache.as_deref(),
            read_only: args.read_only,
            ..Default::default()
        };
        image_options(&args.disk, &flags)?
    };
    options.insert("node-name", NODE)?;
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn options(words: &[&str]) -> Result<serde_json::Value> {
        let line = ["serve", "--nbd", "unix:/s"].iter().chain(words);
        let line = Line::try_parse_from(line).expect("arguments");
        node_options(&line.args).map(|o| o.to_json())
    }

    #[test]
    fn a_file_is_raw_unless_said_otherwise_and_options_are_taken_as_they_are() {
        let o = options(&["a,b.img", "-t", "none"]).expect("a file");
        assert_eq!((&o["driver"], &o["node-name"]), (&"raw".into(), &"disk0".into()));
        assert_eq!(
            (&o["file"]["filename"], &o["file"]["cache"]["direct"]),
            (&"a,b.img".into(), &"on".into())
        );
        assert_eq!(options(&["x", "-f", "qcow2"]).expect("a file")["driver"], "qcow2");
        for text in
            ["driver=memory,size=1M", "size=1M,driver=memory", r#" {"driver": "memory", "size": "1M"}"#]
        {
            let o = options(&[text]).expect("options");
            let expected = serde_json::json!({"driver": "memory", "size": "1M", "node-name": "disk0"});
            assert_eq!(o, expected, "{text}");
        }
    }

    #[test]
    fn what_does_not_go_together_is_refused() {
        assert!(options(&["driver=memory,size=1M", "-f", "raw"]).is_err());
        assert!(options(&["driver=memory,size=1M", "-t", "none"]).is_err());
        assert!(options(&["driver=memory,node-name=x"]).is_err());
        assert!(options(&["x", "-t", "fast"]).is_err());
        assert!(options(&["x", "-t", "directsync"]).is_err());
    }
}
