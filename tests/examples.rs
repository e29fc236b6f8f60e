//! What the documents show is true: the C programs in README, `examples/` and `benches/` compile without a warning, the example of a live backup
//! runs and finds its backup equal to the instant, and links between documents lead to files.

#![cfg(all(feature = "capi", not(cobweb_loom)))]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const LIBS: &[&str] = &["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl", "-lc"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// `libcobweb.a` of the profile this test was built with.
fn static_library() -> PathBuf {
    let deps = std::env::current_exe().expect("a path").parent().expect("a folder").to_owned();
    let places = [deps.join("libcobweb.a"), deps.join("../libcobweb.a")];
    places
        .into_iter()
        .find(|p| p.exists())
        .unwrap_or_else(|| panic!("no libcobweb.a near {}", deps.display()))
}

/// Compiles and links `source` strictly.
fn compile(source: &Path, standard: &str, out: &Path) {
    let run = Command::new("cc")
        .args([standard, "-Wall", "-Wextra", "-Werror", "-pedantic", "-I"])
        .arg(root().join("include"))
        .arg("-o")
        .args([out, source])
        .arg(static_library())
        .args(LIBS)
        .output()
        .expect("a C compiler is installed");
    let text = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{}:\n{text}", source.display());
}

/// The blocks of a document that are marked with `language`.
fn blocks<'a>(text: &'a str, language: &str) -> Vec<&'a str> {
    let open = format!("```{language}\n");
    text.split(open.as_str()).skip(1).filter_map(|rest| rest.split("\n```").next()).collect()
}

fn documents() -> Vec<PathBuf> {
    let mut list = vec![root().join("README.md")];
    for folder in ["docs", "docs/design"] {
        let entries = fs::read_dir(root().join(folder)).expect("a folder");
        let paths = entries.map(|e| e.expect("an entry").path());
        list.extend(paths.filter(|p| p.extension().is_some_and(|e| e == "md")));
    }
    list
}

#[test]
fn the_program_in_the_readme_compiles() {
    let dir = tempfile::tempdir().expect("tempdir");
    let text = fs::read_to_string(root().join("README.md")).expect("README.md");
    let programs = blocks(&text, "c");
    assert_eq!(programs.len(), 1);
    let source = dir.path().join("readme.c");
    fs::write(&source, programs[0]).expect("write");
    compile(&source, "-std=c99", &dir.path().join("readme"));
}

#[test]
fn the_backup_example_equals_the_instant() {
    let dir = tempfile::tempdir().expect("tempdir");
    let program = dir.path().join("backup");
    compile(&root().join("examples/backup.c"), "-std=c99", &program);
    let run = Command::new(&program).arg(dir.path().join("target.raw")).output().expect("run");
    let text = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{text}{}", String::from_utf8_lossy(&run.stderr));
    let last = text.lines().last().unwrap_or_default();
    assert!(last.ends_with("the backup equals the instant") && !last.starts_with("0 writes"), "{text}");
}

#[test]
fn the_benchmark_of_the_null_node_runs() {
    let dir = tempfile::tempdir().expect("tempdir");
    let program = dir.path().join("null");
    compile(&root().join("benches/null.c"), "-std=gnu99", &program);
    let run = Command::new(&program).args(["0.01", "32"]).output().expect("run");
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    assert!(String::from_utf8_lossy(&run.stdout).contains("requests/s (depth 32)"));
}

#[test]
fn links_between_documents_lead_to_files() {
    let mut checked = 0;
    for document in documents() {
        let text = fs::read_to_string(&document).expect("a document");
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let path = link.split('#').next().unwrap_or_default();
            if path.is_empty() || path.contains("://") {
                continue;
            }
            let to = document.parent().expect("a folder").join(path);
            assert!(to.exists(), "{} links to {link}", document.display());
            checked += 1;
        }
    }
    assert!(checked > 5, "{checked} links");
}
