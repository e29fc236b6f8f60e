//! Compressed writes by `cobweb io write -c`, read back by QEMU and by us, and the other way round.
//!
//! A tool that is not installed makes its test pass with a line on stderr, or fail if `CI` is set in the environment.

#[allow(dead_code, reason = "shared with tests that use the rest of it")]
mod support;

use std::path::Path;
use std::process::Command;

fn sh(dir: &Path, line: &str) -> String {
    let line = line.replace("cobweb", env!("CARGO_BIN_EXE_cobweb"));
    let out = Command::new("sh").args(["-ec", &line]).current_dir(dir).output().expect("it starts");
    let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{line}: {text}");
    text
}

fn have_tools() -> bool {
    ["qemu-img", "qemu-io"].iter().all(|tool| support::have(tool))
}

/// A file that compresses well and is not one byte, and one that does not.
const TEXT: &str = "seq 1 200000 | head -c 1M > text; head -c 1M /dev/urandom > noise";

#[test]
fn compressed_clusters_are_read_back_by_everybody_in_all_geometries() {
    if !have_tools() {
        return;
    }
    for options in [
        "cluster_size=64k",
        "compression_type=zstd",
        "cluster_size=512",
        "cluster_size=2M,refcount_bits=64",
        "cluster_size=4k,refcount_bits=1",
        "refcount_bits=2",
        "extended_l2=on,cluster_size=16k,compression_type=zstd",
        "compat=0.10",
    ] {
        let dir = tempfile::tempdir().expect("tempdir");
        let dir = dir.path();
        sh(dir, TEXT);
        // 65 sectors more than whole clusters: the last one is partial.
        sh(dir, &format!("qemu-img create -q -f qcow2 -o {options} i.q 8225k; truncate -s 8225k model"));
        sh(
            dir,
            "cobweb io -f qcow2 -c 'write -c -q -s text 0 2M' -c 'write -c -q -s noise 4M 2M' -c 'write -c -q -P 7 8M 33k' i.q",
        );
        sh(
            dir,
            "cat text text | dd of=model bs=1M conv=notrunc status=none; cat noise noise | dd of=model bs=1M seek=4 conv=notrunc status=none",
        );
        sh(
            dir,
            "head -c 33k /dev/zero | tr '\\0' '\\7' | dd of=model bs=1k seek=8192 conv=notrunc status=none",
        );
        let check = sh(dir, "qemu-img check --output=json -f qcow2 i.q");
        let check: serde_json::Value = serde_json::from_str(&check).expect("JSON");
        assert!(
            check["compressed-clusters"].as_u64() > Some(0)
                && check["leaks"].is_null()
                && check["corruptions"].is_null(),
            "{options}: {check}"
        );
        sh(dir, "qemu-img compare -q -f qcow2 -F raw i.q model; cobweb compare -q -f qcow2 -F raw i.q model");
        // Overwritten in part and in whole, by us and by QEMU in turn, plain and compressed; then discarded.
        sh(
            dir,
            "cobweb io -f qcow2 -c 'write -q -P 9 100k 3k' -c 'write -c -q -P 8 2M 2M' i.q; qemu-io -f qcow2 -c 'write -q -P 10 300k 5k' i.q",
        );
        sh(dir, "cobweb io -f qcow2 -c 'write -c -q -P 11 0 1M' i.q");
        sh(dir, "qemu-img check -q -f qcow2 i.q; cobweb check -q -f qcow2 i.q");
        sh(dir, "qemu-io -f qcow2 -c 'read -P 11 0 1M' -c 'read -P 8 2M 2M' i.q | { ! grep -i fail; }");
        sh(dir, "cobweb io -f qcow2 -d unmap -c 'discard -q 0 8M' i.q; qemu-img check -q -f qcow2 i.q");
        sh(dir, "qemu-io -f qcow2 -c 'read -P 7 8M 33k' i.q | { ! grep -i fail; }");
    }
}

#[test]
fn packed_clusters_take_little_space_and_survive_a_killed_writer() {
    if !have_tools() {
        return;
    }
    let dir = tempfile::tempdir().expect("tempdir");
    let dir = dir.path();
    sh(dir, TEXT);
    sh(dir, "qemu-img create -q -f qcow2 i.q 64M; cobweb io -f qcow2 -c 'write -c -q -s text 0 16M' i.q");
    let ours = std::fs::metadata(dir.join("i.q")).expect("it is there").len();
    sh(dir, "cp i.q whole.q; qemu-img convert -q -c -f qcow2 -O qcow2 whole.q packed.q");
    let theirs = std::fs::metadata(dir.join("packed.q")).expect("it is there").len();
    assert!(ours <= theirs + theirs / 10 + (256 << 10), "{ours} bytes, QEMU {theirs}");
    // Killed between writes: flushed ones are there, nothing is damaged.
    sh(
        dir,
        "cobweb io -f qcow2 -c 'write -c -q -P 3 20M 1M' -c flush -c 'write -c -q -P 4 21M 1M' -c abort i.q 2>/dev/null || true",
    );
    let code = Command::new("qemu-img")
        .args(["check", "-q", "-f", "qcow2"])
        .arg(dir.join("i.q"))
        .output()
        .expect("it starts")
        .status
        .code();
    assert!(matches!(code, Some(0 | 3)), "leaks at most: {code:?}");
    sh(dir, "qemu-io -f qcow2 -c 'read -P 3 20M 1M' i.q | { ! grep -i fail; }");
    sh(
        dir,
        "cobweb io -f qcow2 -c 'write -c -q -P 5 22M 1M' i.q; qemu-io -f qcow2 -c 'read -P 5 22M 1M' -c 'read -P 3 20M 1M' i.q | { ! grep -i fail; }",
    );
}
