//! The command; everything is in [`cobweb::cli`].

fn main() -> std::process::ExitCode {
    cobweb::cli::main()
}
