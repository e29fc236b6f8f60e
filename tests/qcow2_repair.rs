//! Images that were not closed cleanly: a writable open repairs them, as QEMU does; judged by qemu-img.
//!
//! A tool that is not installed makes its test pass with a line on stderr, or fail if `CI` is set in the environment.

#[allow(dead_code, reason = "shared with tests that use the rest of it")]
mod support;

use cobweb::context::{Context, ContextOptions};
use cobweb::graph::ImplicitOpen;
use cobweb::options::Options;
use cobweb::request::{Buffers, Request};
use std::path::Path;
use std::process::Command;

const KIB: u64 = 1024;

fn sh(dir: &Path, line: &str) -> String {
    let out = Command::new("sh").args(["-ec", line]).current_dir(dir).output().expect("it starts");
    let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{line}: {text}");
    text
}

fn have_tools() -> bool {
    ["qemu-img", "qemu-io"].iter().all(|tool| support::have(tool))
}

/// Whether the dirty bit is set in the file.
fn is_dirty(path: &Path) -> bool {
    std::fs::read(path).expect("read")[79] & 1 == 1
}

fn set_dirty(path: &Path) {
    patch(path, 79, |b| b | 1);
}

fn patch(path: &Path, at: usize, change: impl Fn(u8) -> u8) {
    let mut bytes = std::fs::read(path).expect("read");
    bytes[at] = change(bytes[at]);
    std::fs::write(path, bytes).expect("written");
}

fn word(path: &Path, at: u64) -> u64 {
    let bytes = std::fs::read(path).expect("read");
    u64::from_be_bytes(bytes[at as usize..at as usize + 8].try_into().expect("8 bytes"))
}

fn put_word(path: &Path, at: u64, value: u64) {
    let mut bytes = std::fs::read(path).expect("read");
    bytes[at as usize..at as usize + 8].copy_from_slice(&value.to_be_bytes());
    std::fs::write(path, bytes).expect("written");
}

/// Opens the image writable, writes a block to `at`, and closes it.
fn open_and_write(path: &Path, at: u64) -> Result<(), String> {
    let context = Context::new(ContextOptions::default(), None).expect("context");
    context.start().expect("start");
    let graph = context.graph();
    graph.set_implicit_open(ImplicitOpen::Allow);
    let text = format!("driver=qcow2,file.driver=file,file.filename={}", path.display());
    let node = graph.open(Options::parse(&text).expect("options")).map_err(|e| e.full_text())?;
    let disk = graph.add_disk("").expect("disk");
    graph.insert(&disk, Some(node)).expect("inserted");
    let bufs = Buffers::alloc(4096, 4096);
    bufs.fill(0x5a);
    disk.block(Request::write(at, bufs)).expect("written");
    graph.insert(&disk, None).expect("taken out");
    graph.collect().expect("settled");
    Ok(())
}

#[test]
fn an_image_whose_writer_was_killed_is_repaired_by_the_next_writable_open() {
    if !have_tools() {
        return;
    }
    for options in [
        "lazy_refcounts=on",
        "lazy_refcounts=on,cluster_size=512,refcount_bits=1",
        "lazy_refcounts=on,extended_l2=on,cluster_size=16k",
    ] {
        let dir = tempfile::tempdir().expect("tempdir");
        let image = dir.path().join("i.q");
        sh(dir.path(), &format!("qemu-img create -q -f qcow2 -o {options} i.q 8M"));
        sh(
            dir.path(),
            "qemu-io -f qcow2 -c 'write -P 1 0 1M' -c 'write -P 2 5M 100k' -c abort i.q >/dev/null 2>&1 || true",
        );
        assert!(is_dirty(&image), "{options}: the set-up has worked");
        sh(dir.path(), "! qemu-img check -q -f qcow2 i.q");
        // For reading nothing is repaired.
        let context = Context::new(ContextOptions::default(), None).expect("context");
        let text = format!(
            "driver=qcow2,read-only=on,file.driver=file,file.read-only=on,file.filename={}",
            image.display()
        );
        drop(context.graph().open(Options::parse(&text).expect("options")).expect("opened"));
        drop(context);
        assert!(is_dirty(&image));
        open_and_write(&image, 2 << 20).unwrap_or_else(|e| panic!("{options}: {e}"));
        assert!(!is_dirty(&image));
        sh(dir.path(), "qemu-img check -q -f qcow2 i.q");
        sh(
            dir.path(),
            "qemu-io -f qcow2 -c 'read -P 1 0 1M' -c 'read -P 2 5M 100k' -c 'read -P 0x5a 2M 4k' i.q | { ! grep -i fail; }",
        );
    }
}

#[test]
fn refcounts_that_are_too_low_too_high_or_without_a_block_and_wrong_flags_are_put_right() {
    if !have_tools() {
        return;
    }
    let dir = tempfile::tempdir().expect("tempdir");
    let image = dir.path().join("i.q");
    let fresh = |cluster: &str| {
        sh(
            dir.path(),
            &format!(
                "rm -f i.q; qemu-img create -q -f qcow2 -o cluster_size={cluster} i.q 16M; qemu-io -f qcow2 -c 'write -P 1 0 2M' i.q >/dev/null; qemu-img snapshot -c s i.q; qemu-io -f qcow2 -c 'write -P 2 1M 64k' i.q >/dev/null"
            ),
        );
        set_dirty(&image);
    };
    let mended = |what: &str| {
        sh(dir.path(), "! qemu-img check -q -f qcow2 i.q");
        open_and_write(&image, 4 << 20).unwrap_or_else(|e| panic!("{what}: {e}"));
        let text = sh(dir.path(), "qemu-img check -f qcow2 i.q");
        assert!(text.contains("No errors were found"), "{what}: {text}");
        sh(
            dir.path(),
            "qemu-io -f qcow2 -c 'read -P 1 0 1M' -c 'read -P 2 1M 64k' -c 'read -P 0x5a 4M 4k' i.q | { ! grep -i fail; }",
        );
        sh(
            dir.path(),
            "qemu-img snapshot -a s i.q; qemu-io -f qcow2 -c 'read -P 1 0 2M' i.q | { ! grep -i fail; }",
        );
    };
    for cluster in ["4k", "64k"] {
        let len = cluster.trim_end_matches('k').parse::<u64>().expect("a number") * KIB;
        // All counts of the first block: zeros, then all too high.
        for value in [0, 9] {
            fresh(cluster);
            let block = word(&image, word(&image, 48));
            // Of the clusters that the file has.
            let clusters = std::fs::metadata(&image).expect("it is there").len() / len;
            for entry in 0..clusters.min(len / 2) {
                if value == 0 || entry % 7 == 0 {
                    patch(&image, (block + entry * 2 + 1) as usize, |_| value);
                }
            }
            mended(&format!("{cluster}, counts of {value}"));
        }
        // The table without its first block.
        fresh(cluster);
        put_word(&image, word(&image, 48), 0);
        mended(&format!("{cluster}, no block"));
        // Flags: none is set in the first table.
        fresh(cluster);
        let l1 = word(&image, 40);
        let first = word(&image, l1);
        put_word(&image, l1, first & !(1 << 63));
        mended(&format!("{cluster}, flags"));
    }
}

#[test]
fn what_cannot_be_repaired_stays_as_it_is_and_is_named() {
    if !have_tools() {
        return;
    }
    let dir = tempfile::tempdir().expect("tempdir");
    let image = dir.path().join("i.q");
    sh(dir.path(), "qemu-img create -q -f qcow2 i.q 8M; qemu-io -f qcow2 -c 'write 0 1M' i.q >/dev/null");
    set_dirty(&image);
    // An L2 entry far behind the end of the file.
    let table = word(&image, word(&image, 40)) & 0x00ff_ffff_ffff_fe00;
    put_word(&image, table, 1 << 63 | 1 << 40);
    let before = std::fs::read(&image).expect("read");
    let text = open_and_write(&image, 0).expect_err("it is damaged");
    assert!(text.contains("cannot be repaired") && text.contains("0x10000000000"), "{text}");
    assert!(std::fs::read(&image).expect("read") == before, "nothing was changed");
    // The corrupt bit: read-only, whatever else is wrong.
    patch(&image, 79, |b| b | 2);
    let text = open_and_write(&image, 0).expect_err("it is marked");
    assert!(text.contains("marked as damaged"), "{text}");
}
