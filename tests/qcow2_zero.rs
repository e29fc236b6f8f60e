//! Zeroes stay zeroes whatever becomes of the files below; judged by qemu-io.
//!
//! A tool that is not installed makes its test pass with a line on stderr, or fail if `CI` is set in the environment.

#[allow(dead_code, reason = "shared with tests that use the rest of it")]
mod support;

use std::path::Path;
use std::process::Command;

fn sh(dir: &Path, line: &str) {
    let line = line.replace("cobweb", env!("CARGO_BIN_EXE_cobweb"));
    let out = Command::new("sh").args(["-ec", &line]).current_dir(dir).output().expect("it starts");
    let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{line}: {text}");
}

#[test]
fn what_was_zeroed_behind_the_end_of_a_backing_file_does_not_show_it_when_it_has_grown() {
    if !["qemu-img", "qemu-io"].iter().all(|tool| support::have(tool)) {
        return;
    }
    for options in ["compat=1.1", "compat=0.10", "extended_l2=on,cluster_size=16k", "cluster_size=512"] {
        let dir = tempfile::tempdir().expect("tempdir");
        let dir = dir.path();
        sh(dir, "truncate -s 1M base.raw");
        sh(dir, &format!("qemu-img create -q -f qcow2 -o {options} -b base.raw -F raw top.q 4M"));
        sh(
            dir,
            "cobweb io -f qcow2 -c 'write -q -z 1536k 64k' -c 'write -q -z -u 2M 100k' -c 'write -q -z 3000k 3k' top.q",
        );
        sh(dir, "truncate -s 4M base.raw; qemu-io -f raw -c 'write -q -P 9 1M 3M' base.raw");
        sh(dir, "qemu-img check -q -f qcow2 top.q");
        let zeros =
            "-c 'read -P 0 1536k 64k' -c 'read -P 0 2M 100k' -c 'read -P 0 3000k 3k' -c 'read -P 9 1200k 4k'";
        sh(dir, &format!("qemu-io -f qcow2 {zeros} top.q | {{ ! grep -i fail; }}"));
        sh(dir, &format!("cobweb io -f qcow2 {zeros} top.q | {{ ! grep -i fail; }}"));
    }
}
