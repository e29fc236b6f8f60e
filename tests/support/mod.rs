//! What the tests of the program share.

pub mod daemon;
pub mod nbd;

/// Whether a program that a test needs is there. Without it the test says so and proves nothing; in CI it fails.
pub fn have(program: &str) -> bool {
    let found = std::process::Command::new(program).arg("--version").output().is_ok();
    if !found {
        eprintln!("!!! {program} IS MISSING: this test has proved nothing");
        assert!(std::env::var_os("CI").is_none(), "{program} is missing, and this is CI");
    }
    found
}
