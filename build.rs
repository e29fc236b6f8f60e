//! Keeps `include/cobweb.h` and `include/libcobweb.map` in step with `src/capi`. Files are written only when their text changes, so that a package
//! build from a read-only or pristine tree touches nothing.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

fn main() {
    println!("cargo:rerun-if-changed=src/capi");
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=include/cobweb.h");
    println!("cargo:rerun-if-changed=include/libcobweb.map");
    let root = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("set by cargo"));
    let sources = sources(&root.join("src/capi"));
    if sources.is_empty() {
        return;
    }
    let mut functions: Vec<String> = sources.iter().flat_map(|p| exported(p)).collect();
    functions.sort();
    write_if_changed(&root.join("include/cobweb.h"), &header(&sources, &functions));
    write_if_changed(&root.join("include/libcobweb.map"), &map(&functions));
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut list: Vec<PathBuf> =
        entries.flatten().map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "rs")).collect();
    // cbindgen follows the module declarations of mod.rs and would find everything twice.
    list.retain(|p| !p.ends_with("mod.rs"));
    list.sort();
    list
}

/// Names of the exported functions of a source file.
fn exported(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.match_indices("extern \"C\" fn cobweb_")
        .map(|(at, _)| {
            let name = &text[at + "extern \"C\" fn ".len()..];
            name.split(['(', '<']).next().unwrap_or_default().to_owned()
        })
        .collect()
}

fn header(sources: &[PathBuf], functions: &[String]) -> String {
    let mut config = cbindgen::Config {
        language: cbindgen::Language::C,
        cpp_compat: true,
        include_guard: Some("COBWEB_H".into()),
        no_includes: true,
        sys_includes: vec!["stddef.h".into(), "stdint.h".into(), "sys/uio.h".into()],
        header: Some(HEADER.into()),
        style: cbindgen::Style::Both,
        line_length: 110,
        ..cbindgen::Config::default()
    };
    config.documentation_style = cbindgen::DocumentationStyle::C;
    config.usize_is_size_t = true;
    config.function.must_use = Some("COBWEB_CHECK".into());
    config.export.rename.insert("iovec".into(), "struct iovec".into());
    // No function mentions it: it is the element of a request's result array.
    config.export.include.push("cobweb_mapping".into());
    config.after_includes = Some(after_includes(functions));
    // The struct first: in C99 an opaque type must be named before its first use.
    let mut builder = cbindgen::Builder::new().with_config(config);
    for source in sources {
        builder = builder.with_src(source);
    }
    let mut text = Vec::new();
    match builder.generate() {
        Ok(bindings) => bindings.write(&mut text),
        Err(e) => {
            // Broken source: rustc says it better.
            println!("cargo:warning=cobweb.h was not generated: {e}");
            return String::new();
        }
    }
    without_safety(&String::from_utf8_lossy(&text))
}

/// Takes the `# Safety` sections out of the comments: what they say holds for every C function.
fn without_safety(text: &str) -> String {
    let mut out = String::new();
    let mut skipping = false;
    for line in text.lines() {
        skipping =
            (skipping || line.trim_start_matches([' ', '*']).starts_with("# Safety")) && !line.contains("*/");
        if !skipping {
            out.push_str(line.trim_end());
            out.push('\n');
        }
    }
    one_line_comments(&out.replace("\n\n */", "\n */"))
}

/// Comments of one line on one line.
fn one_line_comments(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let mut out = String::new();
    let mut at = 0;
    while at < lines.len() {
        if let [open, body, close, ..] = &lines[at..]
            && open.trim() == "/*"
            && close.trim() == "*/"
        {
            let indent = &open[..open.len() - open.trim_start().len()];
            let _ = writeln!(out, "{indent}/* {} */", body.trim());
            at += 3;
        } else {
            let _ = writeln!(out, "{}", lines[at]);
            at += 1;
        }
    }
    out
}

fn after_includes(functions: &[String]) -> String {
    let mut text = String::from(
        "\n#if defined(__GNUC__) || defined(__clang__)\n#define COBWEB_CHECK __attribute__((warn_unused_result))\n\
         #else\n#define COBWEB_CHECK\n#endif\n\n/* One per function: what this header declares (cobweb_has asks the loaded library). */\n",
    );
    for f in functions {
        let name = f.trim_start_matches("cobweb_").to_uppercase();
        let _ = writeln!(text, "#define COBWEB_HAVE_{name} 1");
    }
    text
}

fn map(functions: &[String]) -> String {
    let mut text = String::from(
        "/* Exported symbols by version; generated by build.rs from src/capi. */\nCOBWEB_0.1 {\nglobal:\n",
    );
    for f in functions {
        let _ = writeln!(text, "    {f};");
    }
    text.push_str("local:\n    *;\n};\n");
    text
}

fn write_if_changed(path: &Path, text: &str) {
    if text.is_empty() || std::fs::read_to_string(path).is_ok_and(|old| old == text) {
        return;
    }
    if let Err(e) = std::fs::write(path, text) {
        println!("cargo:warning=cannot write {}: {e}", path.display());
    }
}

const HEADER: &str = "/* SPDX-License-Identifier: MIT OR Apache-2.0 */\n\
/* libcobweb: block storage for virtual machines. Generated from src/capi by build.rs; do not edit. */\n\
/* Functions return 0 or a count, or a negative errno. Outputs are written only on success. */\n\
/* See docs/abi.md for objects, thread rules and lifetimes. */";
