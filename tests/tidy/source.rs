//! Reading Rust sources without a parser: comments and texts blanked out, tests cut off, `mod` lines followed, `crate::` paths
//! spelled out. Good enough for rustfmt's output; the tests below say what it understands.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// A file below `src`.
pub struct Source {
    /// Path below the package, with slashes.
    pub path: String,
    /// As it is on disk.
    pub text: String,
    /// Without comments, texts and characters; the same lines.
    pub code: String,
    /// `code` without items that are compiled for tests only; empty for a file that is.
    pub live: String,
    /// The paths in `live` that lead to other modules; see [`crate_paths`].
    pub paths: BTreeSet<String>,
}

/// Every `.rs` file below `dir` of the package, sorted.
pub fn rust_files(root: &Path, dir: &str) -> Vec<String> {
    files(root, dir).into_iter().filter(|p| p.ends_with(".rs")).collect()
}

/// Every file below `dir` of the package, sorted.
pub fn files(root: &Path, dir: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut dirs = vec![PathBuf::from(dir)];
    while let Some(dir) = dirs.pop() {
        let Ok(entries) = std::fs::read_dir(root.join(&dir)) else { continue };
        for entry in entries {
            let entry = entry.expect("a readable directory");
            let path = dir.join(entry.file_name());
            match entry.file_type().expect("a file type").is_dir() {
                true => dirs.push(path),
                false => found.push(path.to_str().expect("a name in UTF-8").to_owned()),
            }
        }
    }
    found.sort();
    found
}

/// The modules of the package: files that `lib.rs` and the programs reach by `mod` lines.
pub struct Modules {
    /// Files reached, with whether they are compiled for tests only.
    pub reached: BTreeMap<String, bool>,
    /// `mod` lines without a file.
    pub missing: Vec<String>,
}

/// Follows `mod` lines from the roots.
pub fn modules(root: &Path, roots: &[String]) -> Modules {
    let mut modules = Modules { reached: BTreeMap::new(), missing: Vec::new() };
    let mut todo: Vec<(String, bool)> = roots.iter().map(|r| (r.clone(), false)).collect();
    while let Some((path, for_tests)) = todo.pop() {
        let known = modules.reached.get(&path).copied();
        if known == Some(for_tests) || known == Some(false) {
            continue;
        }
        modules.reached.insert(path.clone(), for_tests);
        let text = std::fs::read_to_string(root.join(&path)).expect("a readable file");
        let folder = folder_of(&path, roots.contains(&path));
        for (name, test_only) in mod_lines(&blank(&text)) {
            let places = [format!("{folder}/{name}.rs"), format!("{folder}/{name}/mod.rs")];
            match places.iter().find(|p| root.join(p).is_file()) {
                Some(file) => todo.push((file.clone(), for_tests || test_only)),
                None => modules.missing.push(format!("{path}: no file for 'mod {name};'")),
            }
        }
    }
    modules
}

/// Reads a file and strips it.
pub fn read(root: &Path, path: &str, for_tests: bool) -> Source {
    Source::new(path, std::fs::read_to_string(root.join(path)).expect("a file in UTF-8"), for_tests)
}

impl Source {
    /// A file with this text.
    pub fn new(path: &str, text: String, for_tests: bool) -> Self {
        let code = blank(&text);
        let live = if for_tests { String::new() } else { without_tests(&code) };
        let paths = crate_paths(path, &live);
        Self { path: path.to_owned(), text, code, live, paths }
    }
}

/// Where the child modules of a file are.
fn folder_of(path: &str, is_root: bool) -> String {
    let (dir, file) = path.rsplit_once('/').expect("below the package");
    if is_root || file == "mod.rs" { dir.to_owned() } else { format!("{dir}/{}", &file[..file.len() - 3]) }
}

/// The names of `mod x;` lines, with the inline modules around them (`outer/x`), and whether a `cfg` with `test` stands above any of these.
fn mod_lines(code: &str) -> Vec<(String, bool)> {
    let mut found = Vec::new();
    let mut attributes = String::new();
    // Inline modules that are open: indentation, path so far, for tests.
    let mut open: Vec<(usize, String, bool)> = Vec::new();
    for (indent, line) in code.lines().map(|l| (l.len() - l.trim_start().len(), l.trim())) {
        if line.starts_with("#[") {
            attributes.push_str(line);
            continue;
        }
        let item = line.strip_prefix("pub ").unwrap_or(line);
        let item =
            if item.starts_with("pub(") { item.split_once(") ").map_or(item, |(_, i)| i) } else { item };
        let (outer, outer_test) = open.last().map_or(("", false), |(_, path, test)| (path.as_str(), *test));
        let for_tests = outer_test || is_test_cfg(&attributes);
        if let Some(module) = item.strip_prefix("mod ") {
            if let Some(name) = module.strip_suffix(';') {
                found.push((format!("{outer}{}", name.trim_start_matches("r#")), for_tests));
            } else if let Some(name) = module.strip_suffix(" {") {
                open.push((indent, format!("{outer}{name}/"), for_tests));
            }
        } else if line == "}" && open.last().is_some_and(|(at, ..)| *at == indent) {
            open.pop();
        }
        attributes.clear();
    }
    found
}

fn is_test_cfg(attributes: &str) -> bool {
    attributes.contains("cfg") && words(attributes).any(|w| w == "test") && !attributes.contains("not(test)")
}

/// Identifiers of a text.
pub fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|w| !w.is_empty())
}

/// `text` with comments, texts and character literals replaced by blanks, line by line.
fn blank(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let skip = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            comment_len(rest)
        } else if c == '"' {
            text_len(rest)
        } else if c == '\'' {
            char_len(rest)
        } else if !out.ends_with(is_ident) && raw_hashes(rest).is_some() {
            raw_len(rest)
        } else {
            0
        };
        if skip == 0 {
            out.push(c);
            rest = &rest[c.len_utf8()..];
        } else {
            out.extend(rest[..skip].chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
            rest = &rest[skip..];
        }
    }
    out
}

fn is_ident(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn comment_len(text: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < text.len() {
        if text[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if text[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += text[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    text.len()
}

fn text_len(text: &str) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Length of a character literal; 0 for a lifetime.
fn char_len(text: &str) -> usize {
    let mut chars = text.char_indices().skip(1);
    match chars.next() {
        Some((_, '\\')) => {
            chars.next();
            text[1..].char_indices().skip(2).find(|(_, c)| *c == '\'').map_or(0, |(at, _)| at + 2)
        }
        Some(_) => chars.next().filter(|(_, c)| *c == '\'').map_or(0, |(at, _)| at + 1),
        None => 0,
    }
}

/// Number of `#` of a raw text that starts here.
fn raw_hashes(text: &str) -> Option<usize> {
    let text = text.strip_prefix('b').unwrap_or(text);
    let rest = text.strip_prefix('r')?;
    let hashes = rest.bytes().take_while(|b| *b == b'#').count();
    rest[hashes..].starts_with('"').then_some(hashes)
}

fn raw_len(text: &str) -> usize {
    let hashes = raw_hashes(text).expect("asked before");
    let end = format!("\"{}", "#".repeat(hashes));
    let start = text.find('"').expect("a raw text") + 1;
    text[start..].find(&end).map_or(text.len(), |at| start + at + end.len())
}

/// Blanks every item that follows a `cfg` with `test`.
fn without_tests(code: &str) -> String {
    let mut out = String::new();
    let mut lines = code.lines();
    while let Some(line) = lines.next() {
        if !(line.trim().starts_with("#[cfg") && is_test_cfg(line)) {
            out.push_str(line);
            out.push('\n');
            continue;
        }
        out.push('\n');
        // The item ends with the line that closes its last bracket, at the same indentation.
        let mut depth = 0i64;
        let mut opened = false;
        for line in lines.by_ref() {
            out.push('\n');
            let count = |set: &[char]| line.matches(set).count() as i64;
            depth += count(&['{', '(', '[']) - count(&['}', ')', ']']);
            opened |= line.contains('{');
            let ends = line.trim_end().ends_with([';', ',', '}']);
            if depth <= 0 && !line.trim().starts_with("#[") && (ends || opened) {
                break;
            }
        }
    }
    out
}

/// Every path in `code` that starts with `crate::`, or with `super::` and leads out of the folder; groups in braces spelled out. As the names after
/// `crate`, joined by `::`.
fn crate_paths(file: &str, code: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let module = module_of(file);
    for (start, _) in code.match_indices("crate::").chain(code.match_indices("super::")) {
        if code[..start].ends_with(is_ident) || code[..start].ends_with("::") {
            continue;
        }
        let mut rest = &code[start..];
        let mut base = module.clone();
        if let Some(r) = rest.strip_prefix("crate::") {
            (base, rest) = (Vec::new(), r);
        }
        while let Some(r) = rest.strip_prefix("super::") {
            base.pop();
            rest = r;
        }
        collect(rest, &base, &mut found);
    }
    found
}

fn module_of(file: &str) -> Vec<String> {
    let inner = file.strip_prefix("src/").unwrap_or(file).trim_end_matches(".rs");
    inner.trim_end_matches("/mod").split('/').map(str::to_owned).collect()
}

/// Adds the paths of a use tree that starts at `text`; what is behind it is ignored. Returns its length.
fn collect(text: &str, base: &[String], found: &mut BTreeSet<String>) -> usize {
    let mut path = base.to_vec();
    let mut at = 0;
    loop {
        let blanks = text[at..].len() - text[at..].trim_start().len();
        at += blanks;
        if text[at..].starts_with('{') {
            at += 1;
            loop {
                at += collect(&text[at..], &path, found);
                let next = text[at..].trim_start();
                at = text.len() - next.len();
                match next.chars().next() {
                    Some(',') => at += 1,
                    Some('}') => return at + 1,
                    _ => return at,
                }
            }
        }
        let name = text[at..].find(|c| !is_ident(c)).unwrap_or(text.len() - at);
        if name > 0 {
            path.push(text[at..at + name].to_owned());
            at += name;
        }
        if name > 0 && text[at..].starts_with("::") {
            at += 2;
            continue;
        }
        if path.len() > base.len() {
            found.insert(path.join("::"));
        }
        if let Some(alias) = text[at..].trim_start().strip_prefix("as ") {
            let alias_at = text.len() - alias.len();
            at = alias_at + alias.find(|c| !is_ident(c)).unwrap_or(alias.len());
        }
        return at;
    }
}

#[test]
fn texts_and_comments_are_blank_and_lines_stay() {
    let code = "let a = \"un\\\"safe\"; // unsafe\n/* a /* b */ unsafe */ let b = 'x'; let c: &'static str = r#\"un\"safe\"#;\nb\"x\" '\\'' '\"' end";
    let blank = blank(code);
    assert_eq!(blank.lines().count(), 3);
    assert_eq!(blank.len(), code.len());
    assert!(!blank.contains("safe"), "{blank}");
    let expected = ["let", "a", "let", "b", "let", "c", "static", "str", "b", "end"];
    assert_eq!(words(&blank).collect::<Vec<_>>(), expected);
}

#[test]
fn items_for_tests_are_cut_off() {
    let code = "fn a() {}\n#[cfg(test)]\nmod tests {\n    fn b() {}\n}\n#[cfg(any(test, feature = \"x\"))]\npub mod c;\n#[cfg(not(test))]\nfn d() {}\n#[cfg(test)]\nfn e(\n    x: u8,\n) {\n}\nfn f() {}\n";
    let live = without_tests(code);
    assert_eq!(live.lines().count(), code.lines().count());
    let functions: Vec<_> = words(&live).filter(|w| w.len() == 1).collect();
    assert_eq!(functions, ["a", "d", "f"]);
}

#[test]
fn paths_are_spelled_out() {
    let code = "use crate::a::{b, c::{self, D as E}, f::*};\nuse super::g::H;\nlet x = crate::i::j(super::super::k::L);\nuse other_crate::m;\nmod n { use crate::o; }";
    let found = crate_paths("src/p/q/r.rs", code);
    let expected = ["a::b", "a::c::D", "a::c::self", "a::f", "i::j", "o", "p::k::L", "p::q::g::H"];
    assert_eq!(found.iter().map(String::as_str).collect::<Vec<_>>(), expected);
    assert_eq!(crate_paths("src/p/mod.rs", "super::x::Y").first().map(String::as_str), Some("x::Y"));
}

#[test]
fn mod_lines_know_their_cfg() {
    let code = "pub mod a;\n#[cfg(test)]\nmod b;\n#[cfg(all(test, not(x)))]\n#[doc(hidden)]\npub(crate) mod c;\nmod d {\n}\n#[cfg(feature = \"sim\")]\nmod e;\nmod f {\n    mod g {\n        #[cfg(test)]\n        mod h;\n    }\n    mod i;\n}\nmod j;";
    let found: Vec<_> = mod_lines(code).into_iter().map(|(n, t)| format!("{n}{}", u8::from(t))).collect();
    assert_eq!(found, ["a0", "b1", "c1", "e0", "f/g/h1", "f/i0", "j0"]);
}
