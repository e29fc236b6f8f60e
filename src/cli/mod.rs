//! The command `cobweb`: one file per subcommand, over the public Rust API only.
//!
//! Each subcommand parses its own arguments (clap), opens what it needs through a [`crate::context::Context`], and prints through
//! `println!`; errors end the process with one line on stderr, `cobweb: ...`, and exit code 1 unless the subcommand says otherwise. Arguments
//! that clap refuses end with code 2.

mod bench;
mod check;
mod compare;
mod create;
pub mod daemon;
mod demo;
mod format_opts;
mod getopt;
mod image;
mod info;
mod io;
mod map;
mod measure;
mod preallocated;
mod probe;
mod qcow2;
mod serve;
mod size;
mod sys;
mod tool;
mod workload;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Block storage for virtual machines: live backup that the guest does not feel.
#[derive(Debug, Parser)]
#[command(name = "cobweb", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Shows the main job: a guest writes, a slow target receives the disk as it was at one instant
    Demo(demo::Args),
    /// Measures request rates, with the flags of qemu-img bench
    Bench(bench::Args),
    /// Tells whether an image is consistent, with the options of qemu-img check
    #[command(disable_help_flag = true, disable_version_flag = true)]
    Check(Words),
    /// Tells whether two images read the same, with the options of qemu-img compare
    #[command(disable_help_flag = true, disable_version_flag = true)]
    Compare(Words),
    /// Makes an image, with the options of qemu-img create
    #[command(disable_help_flag = true, disable_version_flag = true)]
    Create(Words),
    /// Prints what an image is, with the options of qemu-img info
    #[command(disable_help_flag = true, disable_version_flag = true)]
    Info(Words),
    /// Prints where the data of an image lies, with the options of qemu-img map
    #[command(disable_help_flag = true, disable_version_flag = true)]
    Map(Words),
    /// Tells how large an image would be, with the options of qemu-img measure
    #[command(disable_help_flag = true, disable_version_flag = true)]
    Measure(Words),
    /// Reads, writes and looks at an image by commands, with the commands and options of qemu-io
    #[command(disable_help_flag = true, disable_version_flag = true)]
    Io(Words),
    /// Serves one disk over NBD
    Serve(serve::Args),
    /// Serves disks and runs backups over QMP, with the options of qemu-storage-daemon
    #[command(disable_help_flag = true, disable_version_flag = true)]
    StorageDaemon {
        /// See `cobweb storage-daemon --help`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
}

/// The words of a subcommand that reads them itself, the way the tool does whose place it takes.
#[derive(Debug, clap::Args)]
struct Words {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,
}

/// What the program was started as, for messages.
fn program() -> String {
    let name = std::env::args_os().next().map(std::path::PathBuf::from);
    let name = name.as_deref().and_then(std::path::Path::file_name);
    name.map_or_else(|| "cobweb".to_owned(), |n| n.to_string_lossy().into_owned())
}

/// Parses the process's arguments and runs the subcommand.
pub fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Demo(args) => demo::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Check(args) => Ok(check::run(&args.words)),
        Command::Compare(args) => Ok(compare::run(&args.words)),
        Command::Create(args) => Ok(create::run(&args.words)),
        Command::Info(args) => Ok(info::run(&args.words)),
        Command::Map(args) => Ok(map::run(&args.words)),
        Command::Measure(args) => Ok(measure::run(&args.words)),
        Command::Io(args) => io::run(&args.words),
        Command::Serve(args) => serve::run(&args),
        Command::StorageDaemon { words } => daemon::run(words),
    };
    match result {
        Ok(code) => code,
        Err(e) => {
            eprintln!("cobweb: {}", e.full_text());
            ExitCode::FAILURE
        }
    }
}
