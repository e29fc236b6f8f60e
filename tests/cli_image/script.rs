//! Runs a script of steps with the real tools in one directory and with ours in another, and compares.
//!
//! A line is one of
//! - `$ COMMAND`: prepares, with sh, in the directory of the real tools; then ours becomes a copy of it.
//! - `$$ COMMAND`: the same in both directories, each for itself: for what a copy would not keep.
//! - `io WORDS` or `img WORDS`: a step; `<<< TEXT` behind it is its standard input, with `\n` for a new line. Quotes group words.
//! - `img~ WORDS`: as `img`, but where in the file something lies, and how much space that takes, is not compared: for what both wrote, each in its own way.
//! - `io? WORDS` or `img? WORDS`: as `io` and `img~`, without comparing what is said of errors: where ours says more.
//! - `@same`: from here on both run in one directory. Only for steps that do not write.
//! - `# COMMENT`, or nothing.
//!
//! After each step the files of both directories are compared, images of formats other than raw by `qemu-img compare` (their layout may differ).

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Runs `text`, which must have at least `least` steps: a test that lost its steps would not fail otherwise.
pub fn run(name: &str, text: &str, least: usize) {
    if !have("qemu-io") || !have("qemu-img") {
        return;
    }
    let dir = tempfile::tempdir().expect("tempdir");
    let mut pair =
        Pair { real: dir.path().join("real"), ours: dir.path().join("ours"), alike: RefCell::default() };
    fs::create_dir(&pair.real).expect("mkdir");
    fs::create_dir(&pair.ours).expect("mkdir");
    let (mut steps, mut wrong, mut about) = (0, Vec::new(), "");
    for line in text.lines() {
        if let Some(comment) = line.strip_prefix("# ") {
            about = comment;
        } else if line.is_empty() {
            continue;
        } else if line == "@same" {
            pair.ours.clone_from(&pair.real);
        } else if let Some(command) = line.strip_prefix("$$ ") {
            shell(&pair.real, command);
            shell(&pair.ours, command);
        } else if let Some(command) = line.strip_prefix("$ ") {
            shell(&pair.real, command);
            pair.copy();
        } else {
            steps += 1;
            if let Err(difference) = pair.step(line) {
                wrong.push(format!("{name}: {line}\n  ({about})\n{difference}"));
                pair.copy();
            }
        }
    }
    assert!(steps >= least, "{name}: {steps} steps, expected {least}");
    assert!(wrong.is_empty(), "{} of {steps} steps differ\n{}", wrong.len(), wrong.join("\n"));
}

/// Seconds that a step may take: qemu-img does not end with every image.
const LIMIT: &str = "30";

/// Whether `name` can be run; loud if not.
pub fn have(name: &str) -> bool {
    let found = Command::new(name).arg("--version").output().is_ok();
    if !found {
        assert!(std::env::var_os("CI").is_none(), "{name} is not installed, and this is CI");
        eprintln!("*** SKIPPED: {name} is not installed ***");
    }
    found
}

/// The directory of the real tools and ours.
struct Pair {
    real: PathBuf,
    ours: PathBuf,
    /// Files that were alike, as they were then: most steps change none of them.
    alike: RefCell<HashMap<String, [Stamp; 2]>>,
}

/// Inode, length, and when it was last written to.
type Stamp = (u64, u64, i64, i64);

/// What a program left behind, made comparable.
#[derive(PartialEq, Eq)]
pub struct Seen {
    pub code: String,
    pub out: String,
    pub err: String,
}

impl Pair {
    /// Two copies of what is in the directory of the real tools, made the same way: they must agree in what takes space, too.
    fn copy(&self) {
        if self.ours == self.real {
            return;
        }
        let made = self.real.with_extension("made");
        fs::rename(&self.real, &made).expect("rename");
        fs::remove_dir_all(&self.ours).expect("rmdir");
        for to in [&self.real, &self.ours] {
            let copied =
                Command::new("cp").args(["-a", "--sparse=always"]).args([&made, to]).status().expect("cp");
            assert!(copied.success());
        }
        fs::remove_dir_all(&made).expect("rmdir");
    }

    fn step(&self, line: &str) -> Result<(), String> {
        let (line, input) = match line.split_once(" <<< ") {
            Some((line, input)) => (line, input.replace("\\n", "\n")),
            None => (line, String::new()),
        };
        let words = split(line);
        let (tool, args) = words.split_first().expect("a tool");
        let cobweb = env!("CARGO_BIN_EXE_cobweb");
        let (real, ours) = match tool.trim_end_matches(['~', '?']) {
            "io" => (command("timeout", &[LIMIT, "qemu-io"]), command("timeout", &[LIMIT, cobweb, "io"])),
            "img" => (command("timeout", &[LIMIT, "qemu-img"]), command("timeout", &[LIMIT, cobweb])),
            other => panic!("no tool '{other}'"),
        };
        let mut real = seen(real, args, &self.real, &input);
        let mut ours = seen(ours, args, &self.ours, &input);
        if tool.ends_with('?') {
            (real.err, ours.err) = (String::new(), String::new());
        }
        if matches!(tool.as_str(), "img~" | "img?") {
            (real.out, ours.out) = (placeless(&real.out), placeless(&ours.out));
        }
        let mut differences = String::new();
        for (what, a, b) in
            [("code", &real.code, &ours.code), ("out", &real.out, &ours.out), ("err", &real.err, &ours.err)]
        {
            if a != b {
                differences.push_str(&format!("  {what} of the real tool:\n{a}\n  ours:\n{b}\n"));
            }
        }
        for name in self.different_files() {
            differences.push_str(&format!("  {name} differs\n"));
        }
        if differences.is_empty() { Ok(()) } else { Err(differences) }
    }

    fn different_files(&self) -> Vec<String> {
        let list = |dir: &Path| {
            let mut names: Vec<String> = fs::read_dir(dir)
                .expect("readdir")
                .map(|e| e.expect("entry").file_name().to_string_lossy().into_owned())
                .collect();
            names.sort();
            names
        };
        let (real, ours) = (list(&self.real), list(&self.ours));
        if real != ours {
            let only = |a: &[String], b: &[String]| {
                a.iter().filter(|n| !b.contains(n)).cloned().collect::<Vec<_>>().join(" ")
            };
            return vec![format!("list ({}; ours: {})", only(&real, &ours), only(&ours, &real))];
        }
        // A backing file is compared as itself, so each image is looked at without its own.
        real.into_iter().filter(|n| !self.is_alike(n)).collect()
    }

    fn is_alike(&self, name: &str) -> bool {
        let [a, b] = [self.real.join(name), self.ours.join(name)];
        let stamps = [stamp(&a), stamp(&b)];
        if self.alike.borrow().get(name) == Some(&stamps) {
            return true;
        }
        let same = same_content(&a, &b);
        if same {
            self.alike.borrow_mut().insert(name.to_owned(), stamps);
        }
        same
    }
}

fn stamp(path: &Path) -> Stamp {
    use std::os::unix::fs::MetadataExt;
    let meta = fs::metadata(path).expect("stat");
    (meta.ino(), meta.len(), meta.mtime(), meta.mtime_nsec())
}

fn same_content(a: &Path, b: &Path) -> bool {
    if !a.is_file() {
        return true;
    }
    let cmp = Command::new("cmp").arg("-s").args([a, b]).status().expect("cmp");
    if cmp.success() {
        return true;
    }
    let mut head = [0; 4];
    let is_qcow2 = |p: &Path, head: &mut [u8; 4]| {
        use std::io::Read;
        fs::File::open(p).and_then(|mut f| f.read_exact(head)).is_ok() && head == b"QFI\xfb"
    };
    if !is_qcow2(a, &mut head) || !is_qcow2(b, &mut head) {
        // Behind the mapping of an image, what its data file holds where nothing is mapped is nobody's business.
        return a.extension().is_some_and(|e| e == "data");
    }
    if has_data_file(a) || has_data_file(b) {
        // Its name is relative to where the process is: there is no place from which both can be opened.
        return content(a) == content(b);
    }
    command("qemu-img", &["compare", "-q", "-U"]).args([a, b]).status().expect("qemu-img").success()
}

/// Bit 2 of the incompatible features.
fn has_data_file(path: &Path) -> bool {
    let bytes = fs::read(path).expect("read");
    bytes.get(79).is_some_and(|b| bytes[7] >= 3 && b & 4 != 0)
}

/// What an image reads as, in its own directory.
fn content(path: &Path) -> Vec<u8> {
    let (dir, name) = (path.parent().expect("a directory"), path.file_name().expect("a name"));
    let raw = dir.with_extension("raw");
    let done = command("qemu-img", &["convert", "-q", "-U", "-O", "raw"])
        .arg(name)
        .arg(&raw)
        .current_dir(dir)
        .status()
        .expect("qemu-img");
    assert!(done.success(), "{} cannot be converted", path.display());
    fs::read(&raw).expect("read")
}

fn command(program: &str, args: &[&str]) -> Command {
    let mut c = Command::new(program);
    c.args(args);
    c
}

/// Runs a tool with `args` and `input` in `dir`.
pub fn seen(mut command: Command, args: &[String], dir: &Path, input: &str) -> Seen {
    use std::io::Write;
    let mut child = command
        .args(args)
        .current_dir(dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the tool starts");
    // A program that ends before it has read everything is no error here.
    let _ = child.stdin.take().expect("a pipe").write_all(input.as_bytes());
    let Output { status, stdout, stderr } = child.wait_with_output().expect("the tool ends");
    let text = |bytes: &[u8]| normal(&String::from_utf8_lossy(bytes));
    Seen { code: format!("{status}").replace(" (core dumped)", ""), out: text(&stdout), err: text(&stderr) }
}

/// Takes times, rates and the program's name out; of lists of options, what is said of them and those about encryption.
fn normal(text: &str) -> String {
    let mut out = String::new();
    for line in text.split_inclusive('\n') {
        let mut line = line.to_owned();
        if line.starts_with("  ") && line.contains("=<") && line.contains("> ") {
            if line.starts_with("  encrypt") {
                continue;
            }
            line.truncate(line.rfind(" - ").unwrap_or(line.len()));
            line.push('\n');
        }
        if let Some(at) = line.find(" ops; ") {
            line.truncate(at + 6);
            line.push_str("FIGURES\n");
        }
        let fields: Vec<&str> = line.trim_end().split(',').collect();
        if fields.len() == 5 && fields.iter().all(|f| f.starts_with(|c: char| c.is_ascii_digit())) {
            line = format!("{},{},FIGURES\n", fields[0], fields[1]);
        }
        for name in ["qemu-img", "qemu-io", "cobweb"] {
            if let Some(rest) = line.strip_prefix(&format!("{name}: ")) {
                line = format!("PROGRAM: {rest}");
            } else if let Some(rest) = line.strip_prefix(&format!("{name} ")) {
                line = format!("PROGRAM {rest}");
            } else if let Some(rest) = line.strip_prefix(&format!("Try '{name} ")) {
                line = format!("Try 'PROGRAM {rest}");
            }
        }
        out.push_str(&line);
    }
    out
}

/// Takes out where things lie: places of a map, ends of files, space that is used.
fn placeless(text: &str) -> String {
    if let Ok(serde_json::Value::Array(entries)) = serde_json::from_str(text)
        && entries.iter().all(|e| e.get("depth").is_some())
    {
        return placeless_map(entries);
    }
    let of_places = [
        "disk size:",
        "Image end offset:",
        "file length:",
        "% allocated,",
        "\"image-end-offset\"",
        "\"fragmented-clusters\"",
        "\"actual-size\"",
    ];
    let kept = text.lines().filter(|line| !of_places.iter().any(|w| line.contains(w)));
    kept.map(|line| format!("{line}\n")).collect()
}

/// Extents without their places, those that are alike joined.
fn placeless_map(entries: Vec<serde_json::Value>) -> String {
    let mut lines: Vec<(u64, u64, String)> = Vec::new();
    for mut e in entries {
        let map = e.as_object_mut().expect("an extent");
        let mut number = |key: &str| map.remove(key).and_then(|v| v.as_u64());
        let (start, len) = (number("start").expect("start"), number("length").expect("length"));
        let place = number("offset").is_some();
        let state = format!("{e}, place: {place}");
        match lines.last_mut() {
            Some(last) if last.2 == state && last.0 + last.1 == start => last.1 += len,
            _ => lines.push((start, len, state)),
        }
    }
    lines.iter().map(|(start, len, state)| format!("{start}+{len} {state}\n")).collect()
}

fn shell(dir: &Path, command: &str) {
    let out = Command::new("sh").args(["-ec", command]).current_dir(dir).output().expect("sh");
    assert!(out.status.success(), "{command}: {}", String::from_utf8_lossy(&out.stderr));
}

/// Splits at blanks outside of quotes.
pub fn split(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote, mut open) = (Vec::new(), String::new(), None, false);
    for c in line.chars() {
        match (quote, c) {
            (Some(q), c) if c == q => quote = None,
            (None, '\'' | '"') => (quote, open) = (Some(c), true),
            (None, ' ') => {
                if open || !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
                open = false;
            }
            (_, c) => word.push(c),
        }
    }
    if open || !word.is_empty() {
        words.push(word);
    }
    words
}

#[test]
fn words_and_figures_are_taken_apart() {
    assert_eq!(split("io -c 'read 0 1' '' a"), ["io", "-c", "read 0 1", "", "a"]);
    assert_eq!(
        normal("64 KiB, 1 ops; 00.01 sec (x)\nqemu-io: a\n65536,1,0:00:00.00,1.5,2.5\n"),
        "64 KiB, 1 ops; FIGURES\nPROGRAM: a\n65536,1,FIGURES\n"
    );
}
