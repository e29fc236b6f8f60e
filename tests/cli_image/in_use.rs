//! Images that another process has open: who may look at them, who may not, and what is said.

use crate::script::{Seen, have, seen, split};
use std::io::BufRead;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// A qemu-io that has an image open until it is dropped.
struct Holder(Child);

impl Holder {
    fn new(dir: &Path, words: &[&str]) -> Self {
        let mut child = Command::new("qemu-io")
            .args(words)
            .current_dir(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("qemu-io");
        // The answer to a command is the proof that the image is open; the pipe keeps it so.
        use std::io::Write;
        child.stdin.as_mut().expect("a pipe").write_all(b"length\n").expect("written");
        let mut line = String::new();
        let out = child.stdout.take().expect("a pipe");
        std::io::BufReader::new(out).read_line(&mut line).expect("an answer");
        assert!(line.contains("1 MiB"), "{line}");
        Self(child)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn images_in_use_are_refused_and_shared_as_with_the_real_tools() {
    if !have("qemu-img") || !have("qemu-io") {
        return;
    }
    let dir = tempfile::tempdir().expect("tempdir");
    let dir = dir.path();
    let make = "qemu-img create -q -f qcow2 a.q 1M && qemu-img create -q r.raw 1M && qemu-img create -q -f qcow2 -b a.q -F qcow2 ov.q";
    let made = Command::new("sh").args(["-ec", make]).current_dir(dir).status().expect("sh");
    assert!(made.success());
    let holders = [Holder::new(dir, &["-f", "qcow2", "a.q"]), Holder::new(dir, &["-f", "raw", "r.raw"])];
    let cobweb = env!("CARGO_BIN_EXE_cobweb");
    let mut wrong = Vec::new();
    for line in include_str!("in_use.txt").lines().filter(|l| !l.is_empty() && !l.starts_with('#')) {
        let words = split(line);
        let (tool, args) = words.split_first().expect("a tool");
        let real = seen(Command::new(format!("qemu-{tool}")), args, dir, "");
        let mut ours = Command::new(cobweb);
        if tool == "io" {
            ours.arg("io");
        }
        let ours = seen(ours, args, dir, "");
        if real != ours {
            let show = |s: &Seen| format!("{}\n{}{}", s.code, s.out, s.err);
            wrong.push(format!("{line}\nreal: {}\nours: {}", show(&real), show(&ours)));
        }
    }
    drop(holders);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
