//! The command `cobweb`: one file per subcommand, over the public Rust API only.
//!
//! Each subcommand parses its own arguments (clap), opens what it needs through a [`crate::context::Context`], and prints through
//! `println!`; errors end the process with one line on stderr, `cobweb: ...`, and exit code 1 unless the subcommand says otherwise. Arguments
//! that clap refuses end with code 2.

mod bench;
pub mod daemon;
mod demo;
mod image;
mod serve;
mod sys;
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

/// Parses the process's arguments and runs the subcommand.
pub fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Demo(args) => demo::run(&args),
        Command::Bench(args) => bench::run(&args),
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
