//! Mechanical facts about the tree (style.md, point 24). An exception is one line in a table here, with its reason; an exception that is
//! no longer needed fails, too. A check that keeps being overridden is wrong and goes.

mod source;

use source::{Source, files, modules, read, rust_files, words};
use std::path::Path;
use std::sync::OnceLock;

/// Which top-level modules each one may use: every arrow points to the waist. Capitals stand for [`GROUPS`].
///
/// An entry may name one item (`graph::OpenCx`): then only that is allowed, for the reason beside it.
const ARROWS: &[(&str, &str, &str)] = &[
    // Foundations: know nothing above them.
    ("error", "", ""),
    ("limits", "", ""),
    ("units", "", ""),
    ("sync", "", ""),
    ("rt", "sync io::file::sys", "threads block all signals (C19), and system calls have one home"),
    ("rate", "rt", ""),
    ("stats", "sync", ""),
    ("options", "error", ""),
    ("events", "error limits sync queue::EventFd", "the wrapper of an eventfd lives with the queues"),
    ("report", "error rt sync units events request::Op", "an enum of the C ABI"),
    // The waist.
    ("inflight", "sync units", "compiles alone under cfg(cobweb_loom)"),
    ("request", "error limits rt sync units", ""),
    (
        "node",
        "FOUNDATION request queue::Cx io::FileOp",
        "a slow path is handed the executor, a plan can be an engine's",
    ),
    // Implementations: no arrow between these three, nor between two of one kind (see `SIBLINGS`).
    (
        "filter",
        "FOUNDATION WAIST queue graph::OpenCx",
        "open functions are handed the graph, to open children in it",
    ),
    (
        "format",
        "FOUNDATION WAIST queue graph::OpenCx graph::Base graph::Chain graph::ImplicitOpen graph::NamedChild",
        "the same, and names found inside images are opened by the graph's rules (C11)",
    ),
    ("io", "FOUNDATION WAIST queue", "engines and leaves know tasks and tags"),
    // Composition and execution.
    (
        "queue",
        "FOUNDATION WAIST io graph::Disk graph::IoCounters",
        "a queue drives an engine and belongs to a disk",
    ),
    ("graph", "FOUNDATION WAIST queue filter format io", "the registry names every driver"),
    (
        "job",
        "FOUNDATION WAIST queue graph filter context::Context io::file",
        "jobs put filters in, belong to a context, and mark the target file as incomplete (S25)",
    ),
    ("vmstate", "FOUNDATION WAIST queue graph", ""),
    ("context", "FOUNDATION WAIST queue graph io job", "owns all of them"),
    // Front doors.
    ("capi", "FOUNDATION WAIST COMPOSITION filter io export cli", "one file per C object"),
    ("export", "FOUNDATION WAIST COMPOSITION io", "the wire structs of NBD are shared with its client"),
    ("cli", "FOUNDATION WAIST COMPOSITION filter format io export", "serves disks, and looks into images"),
    ("sim", "*", "the simulator may use everything; nothing uses it"),
    ("lib", "*", "only says what is public"),
    ("bin", "cli", ""),
];

/// What capitals in [`ARROWS`] stand for.
const GROUPS: &[(&str, &str)] = &[
    ("FOUNDATION", "error events limits options rate report rt stats sync units"),
    ("WAIST", "inflight node request"),
    ("COMPOSITION", "context graph job queue vmstate"),
];

/// Folders whose parts do not know each other.
const SIBLINGS: &[&str] = &["filter", "format"];

/// Where `unsafe` may stand, and why.
const UNSAFE: &[(&str, &str)] = &[
    ("src/capi/", "the C ABI"),
    ("src/inflight/", "the lock-free list"),
    ("src/sync/", "the facade over atomics and epochs"),
    ("src/queue/eventfd.rs", "owning a raw descriptor"),
    ("src/request/buffer.rs", "memory of the guest and of the kernel, which no reference may cover"),
    ("src/request/arena.rs", "mapped memory of parked data"),
    ("src/io/align.rs", "bounce buffers"),
    ("src/io/file/sys.rs", "system calls on files"),
    ("src/io/uring/ring.rs", "the rings shared with the kernel"),
    ("src/export/nbd/sys.rs", "scatter-gather transfers between sockets and request memory, and poll"),
    ("src/export/vhost_user/memory.rs", "guest memory"),
    ("src/cli/sys.rs", "poll, signals, going into the background"),
    ("src/filter/cbw/loom_tests.rs", "the race on the source that loom is asked about"),
];

/// What goes around the seams (style.md, point 19).
const SEAMS: &[&str] = &[
    "Instant::now",
    "SystemTime::now",
    "thread::spawn",
    "thread::Builder",
    "thread::sleep",
    "std::fs",
    "std::net",
];

/// Where the seams are, and who may go around them.
const SEAM_PLACES: &[(&str, &str)] = &[
    ("src/rt/", "binds the seams to the system"),
    ("src/io/", "files are its business"),
    ("src/cli/", "a program of its own"),
    ("src/bin/", "a program of its own"),
    ("src/export/", "sockets and one thread per connection"),
    ("src/sync/", "names std::thread for the rest"),
    ("src/queue/eventfd.rs", "std::fs::File as the owner of a descriptor"),
];

/// Orientation, printed only.
const LINES_LONG: usize = 600;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every file below `src`, read once.
fn sources() -> &'static [Source] {
    static SOURCES: OnceLock<Vec<Source>> = OnceLock::new();
    SOURCES.get_or_init(|| {
        let reached = modules(root(), &roots()).reached;
        let for_tests = |path: &String| reached.get(path).copied().unwrap_or(false);
        rust_files(root(), "src").iter().map(|p| read(root(), p, for_tests(p))).collect()
    })
}

fn roots() -> Vec<String> {
    let programs = rust_files(root(), "src/bin").into_iter().filter(|p| p.matches('/').count() == 2);
    std::iter::once("src/lib.rs".to_owned()).chain(programs).collect()
}

/// Fails with every finding on a line of its own.
fn report(findings: Vec<String>) {
    assert!(findings.is_empty(), "\n{}\n", findings.join("\n"));
}

fn top_module(path: &str) -> &str {
    let inner = path.strip_prefix("src/").expect("below src");
    inner.split('/').next().map_or(inner, |m| m.trim_end_matches(".rs"))
}

#[test]
fn arrows_between_modules_point_to_the_waist() {
    report(wrong_arrows(sources()));
}

fn wrong_arrows(sources: &[Source]) -> Vec<String> {
    let mut findings = Vec::new();
    for source in sources {
        let from = top_module(&source.path);
        let Some(allowed) = ARROWS.iter().find(|(name, ..)| *name == from).map(|row| spelled_out(row.1))
        else {
            findings.push(format!("{}: module '{from}' has no line in ARROWS", source.path));
            continue;
        };
        for path in &source.paths {
            if path.split("::").next() == Some(from) {
                if let Some(sibling) = other_sibling(&source.path, path) {
                    findings.push(format!("{}: uses '{path}', its sibling '{sibling}'", source.path));
                }
            } else if !allowed.iter().any(|rule| covers(rule, path)) {
                findings.push(format!("{}: '{from}' may not use '{path}'", source.path));
            }
        }
    }
    findings
}

/// The entries of a row of [`ARROWS`].
fn spelled_out(allowed: &'static str) -> Vec<&'static str> {
    let members = |entry: &'static str| {
        let group = GROUPS.iter().find(|(name, _)| *name == entry);
        group.map_or(entry, |(_, members)| *members).split(' ')
    };
    allowed.split(' ').flat_map(members).filter(|entry| !entry.is_empty()).collect()
}

/// Whether an entry of [`ARROWS`] allows a path.
fn covers(rule: &str, path: &str) -> bool {
    rule == "*" || path.strip_prefix(rule).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

#[test]
fn every_exception_of_an_arrow_is_in_use() {
    let mut findings = Vec::new();
    for (from, allowed, why) in ARROWS {
        let mut of_module = sources().iter().filter(|s| top_module(&s.path) == *from).peekable();
        let is_there = of_module.peek().is_some();
        let paths: Vec<_> = of_module.flat_map(|s| &s.paths).collect();
        for item in allowed.split(' ').filter(|item| item.contains("::")) {
            if why.is_empty() {
                findings.push(format!("ARROWS: '{from}' has '{item}' without a reason"));
            }
            if is_there && !paths.iter().any(|path| covers(item, path)) {
                findings.push(format!("ARROWS: '{from}' no longer uses '{item}'"));
            }
        }
    }
    report(findings);
}

/// The part of a folder in [`SIBLINGS`] that `path` leads to, if the file is in another part.
fn other_sibling(file: &str, path: &str) -> Option<String> {
    let inner = file.strip_prefix("src/")?;
    let (folder, rest) = inner.split_once('/')?;
    let own = rest.split('/').next()?.trim_end_matches(".rs");
    let mut names = path.split("::");
    let (top, part) = (names.next()?, names.next()?);
    let is_part = root().join(format!("src/{top}/{part}")).is_dir()
        || root().join(format!("src/{top}/{part}.rs")).is_file();
    (SIBLINGS.contains(&folder) && top == folder && own != "mod" && is_part && part != own)
        .then(|| part.to_owned())
}

#[test]
fn unsafe_stands_only_where_it_is_listed() {
    report(unlisted_unsafe(sources()));
}

fn unlisted_unsafe(sources: &[Source]) -> Vec<String> {
    let unlisted = sources.iter().filter(|s| !UNSAFE.iter().any(|(place, _)| s.path.starts_with(place)));
    let lines = unlisted.flat_map(|s| s.code.lines().enumerate().map(move |(n, line)| (s, n + 1, line)));
    lines
        .filter(|(_, _, line)| words(line).any(|w| w == "unsafe"))
        .map(|(source, n, _)| format!("{}:{n}: unsafe", source.path))
        .collect()
}

#[test]
fn every_file_below_src_is_part_of_the_package() {
    let modules = modules(root(), &roots());
    let mut findings = modules.missing;
    for path in rust_files(root(), "src") {
        if !modules.reached.contains_key(&path) {
            findings.push(format!("{path}: reached by no 'mod' line"));
        }
    }
    report(findings);
}

#[test]
fn texts_are_ascii() {
    let mut findings = Vec::new();
    let dirs = ["src", "tests", "benches", "examples", "capi-tests", "include", "docs", "bindings"];
    let ends = [".rs", ".c", ".h", ".md", ".py", ".toml", ".map"];
    for path in dirs.iter().flat_map(|d| files(root(), d)).filter(|p| ends.iter().any(|e| p.ends_with(e))) {
        let text = std::fs::read(root().join(&path)).expect("a readable file");
        for (n, line) in text.split(|b| *b == b'\n').enumerate().filter(|(_, l)| !l.is_ascii()) {
            findings.push(format!("{path}:{}: not ASCII: {}", n + 1, String::from_utf8_lossy(line).trim()));
        }
    }
    report(findings);
}

#[test]
fn nothing_is_left_over() {
    let dirs = ["tests", "benches", "examples"];
    let others: Vec<_> =
        dirs.iter().flat_map(|d| rust_files(root(), d)).map(|p| read(root(), &p, false)).collect();
    report(left_over(sources()).into_iter().chain(left_over(&others)).collect());
}

fn left_over(sources: &[Source]) -> Vec<String> {
    // Put together here, so that this file does not find itself.
    let notes = [concat!("FIX", "ME"), concat!("TO", "DO"), concat!("XX", "X")];
    let calls = ["dbg!", "todo!", "unimplemented!"];
    let mut findings = Vec::new();
    for source in sources {
        for (n, (line, code)) in source.text.lines().zip(source.code.lines()).enumerate() {
            let note = notes.iter().find(|note| words(line).any(|w| w == **note));
            let call = calls.iter().find(|call| code.contains(**call));
            findings.extend(note.or(call).map(|left| format!("{}:{}: {left}", source.path, n + 1)));
        }
    }
    findings
}

#[test]
fn time_threads_and_files_go_through_the_seams() {
    report(around_the_seams(sources()));
}

fn around_the_seams(sources: &[Source]) -> Vec<String> {
    let mut findings = Vec::new();
    for source in sources.iter().filter(|s| !SEAM_PLACES.iter().any(|(place, _)| s.path.starts_with(place))) {
        for (n, line) in source.live.lines().enumerate() {
            let around = SEAMS.iter().find(|s| line.contains(**s));
            findings.extend(around.map(|s| format!("{}:{}: {s} goes around the seams", source.path, n + 1)));
        }
    }
    findings
}

/// A check that finds nothing might be broken: each has to find what is planted here.
#[test]
fn planted_violations_are_found() {
    let planted = |path: &str, text: &str| {
        let source = Source::new(path, text.to_owned(), false);
        let one = std::slice::from_ref(&source);
        let checks = [wrong_arrows, unlisted_unsafe, left_over, around_the_seams];
        checks.map(|check| check(one).len())
    };
    assert_eq!(planted("src/units.rs", "use crate::sync::Arc;\n/// unsafe\nfn a() {}"), [1, 0, 0, 0]);
    assert_eq!(
        planted("src/filter/throttle/x.rs", "use crate::filter::cbw::X;\nuse super::super::fault::Y;"),
        [2, 0, 0, 0]
    );
    assert_eq!(
        planted("src/filter/throttle/x.rs", "use super::config::X;\nuse crate::graph::OpenCx;"),
        [0, 0, 0, 0]
    );
    assert_eq!(planted("src/filter/throttle/x.rs", "use crate::graph::{Graph, OpenCx};"), [1, 0, 0, 0]);
    assert_eq!(planted("src/new.rs", ""), [1, 0, 0, 0]);
    assert_eq!(planted("src/node/x.rs", "fn a() { unsafe { b() } }"), [0, 1, 0, 0]);
    assert_eq!(planted("src/node/x.rs", concat!("// FIX", "ME\nfn a() { todo", "!() }")), [0, 0, 2, 0]);
    assert_eq!(
        planted(
            "src/node/x.rs",
            "fn a() { std::thread::spawn(b); }\n#[cfg(test)]\nmod tests { use std::fs; }"
        ),
        [0, 0, 0, 1]
    );
}

#[test]
fn listed_places_exist_while_their_folder_does() {
    let mut findings = Vec::new();
    for (place, _) in UNSAFE.iter().chain(SEAM_PLACES) {
        let folder = place.trim_end_matches('/').rsplit_once('/').map_or("src", |(dir, _)| dir);
        // A folder that is still to come is no finding; a file that has moved is.
        if !place.ends_with('/') && root().join(folder).is_dir() && !root().join(place).is_file() {
            findings.push(format!("{place} is listed and does not exist"));
        }
    }
    report(findings);
}

/// Only prints: run with `--nocapture`.
#[test]
fn long_files_are_printed() {
    let mut long: Vec<_> = sources().iter().map(|s| (s.text.lines().count(), s.path.clone())).collect();
    long.retain(|(lines, _)| *lines > LINES_LONG);
    long.sort();
    for (lines, path) in long.iter().rev() {
        println!("{path}: {lines} lines");
    }
}
