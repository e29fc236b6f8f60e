//! The C and C++ programs of `capi-tests/`, built with warnings as errors against the static library of this build and run.

#![cfg(all(feature = "capi", not(cobweb_loom)))]

use std::path::{Path, PathBuf};
use std::process::Command;

#[test]
fn c_and_cxx_programs_use_the_library_as_a_hypervisor_would() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let lib = static_library();
    let out = lib.with_file_name("capi-tests");
    let run = Command::new("make")
        .args(["-s", "-C"])
        .arg(root.join("capi-tests"))
        .arg("check")
        .arg(format!("LIB={}", lib.display()))
        .arg(format!("OUT={}", out.display()))
        .output()
        .expect("make and a C compiler are installed");
    let text = format!("{}{}", String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    assert!(run.status.success(), "{text}");
    assert!(text.contains("passed, 0 failed"), "no test ran: {text}");
}

#[test]
fn the_committed_header_and_map_are_those_of_the_source() {
    // build.rs has just rewritten both if they were stale; git knows whether that changed anything. Outside of a checkout there is nothing to compare.
    let root = env!("CARGO_MANIFEST_DIR");
    let inside = Command::new("git").args(["-C", root, "rev-parse", "--is-inside-work-tree"]).output();
    if !inside.is_ok_and(|o| o.status.success()) {
        return;
    }
    let diff = Command::new("git")
        .args(["-C", root, "status", "--porcelain", "--", "include"])
        .output()
        .expect("git runs");
    let text = String::from_utf8_lossy(&diff.stdout);
    assert!(text.is_empty(), "include/ is stale, commit what build.rs wrote:\n{text}");
}

/// `libcobweb.a` of the profile this test was built with.
fn static_library() -> PathBuf {
    let deps = std::env::current_exe().expect("a path").parent().expect("a folder").to_owned();
    [deps.join("libcobweb.a"), deps.join("../libcobweb.a")]
        .into_iter()
        .find(|p| p.exists())
        .unwrap_or_else(|| panic!("no libcobweb.a in or above {}", deps.display()))
}
