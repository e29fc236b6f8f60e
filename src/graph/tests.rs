//! What a refused change leaves behind: nothing.

use super::Graph;
use crate::options::Options;
use crate::queue::Env;
use crate::queue::testing;
use crate::sync::Arc;
use serde_json::json;

fn graph() -> Arc<Graph> {
    Graph::new(testing::env(1))
}

fn names(graph: &Graph) -> Vec<String> {
    graph.nodes().iter().map(|n| n.name().to_owned()).collect()
}

/// Options of a stack of three, the lowest a file; `top` is the driver at the top.
fn stack(file: &std::path::Path, top: serde_json::Value) -> Options {
    let mut options = top;
    options["file"] = json!({
        "driver": "raw", "node-name": "middle",
        "file": { "driver": "file", "node-name": "bottom", "filename": file, "locking": "on" },
    });
    Options::from_json(&options).expect("an object")
}

#[test]
fn a_refused_open_leaves_no_child_and_the_same_names_and_files_can_be_opened_again() {
    let (graph, file) = (graph(), tempfile::NamedTempFile::new().expect("a file"));
    file.as_file().set_len(1 << 20).expect("sized");
    graph.open(Options::parse("driver=null-co,node-name=taken,size=1M").expect("parses")).expect("opens");
    for (top, why) in [
        (json!({ "driver": "raw", "node-name": "taken" }), "'taken' is in use"),
        (json!({ "driver": "raw", "node-name": "top", "no-such": 1 }), "no-such"),
        (json!({ "driver": "raw", "node-name": "top", "offset": "2M" }), "offset"),
        (json!({ "driver": "ram-cache", "node-name": "top", "capacity": 1 }), "capacity"),
        // Two levels of children below one that opens.
        (json!({ "driver": "copy-before-write", "node-name": "top", "target": "nobody" }), "nobody"),
        (
            json!({ "driver": "copy-before-write", "node-name": "top",
                    "target": { "driver": "memory", "node-name": "aside", "size": 512 } }),
            "target",
        ),
    ] {
        let e = graph.open(stack(file.path(), top)).expect_err(why);
        assert!(e.full_text().contains(why), "{}", e.full_text());
        assert_eq!(names(&graph), ["taken"], "{why}");
    }
    // The lock on the file is free as well.
    graph.open(stack(file.path(), json!({ "driver": "raw", "node-name": "top" }))).expect("opens");
    assert_eq!(names(&graph), ["bottom", "middle", "taken", "top"]);
}

#[test]
fn a_child_that_somebody_uses_outlives_the_refused_open_of_its_parent() {
    let graph = graph();
    graph.open(Options::parse("driver=memory,node-name=m,size=1M").expect("parses")).expect("opens");
    // By name, so not opened by this call.
    graph
        .open(Options::parse("driver=raw,node-name=r,file=m,offset=2M").expect("parses"))
        .expect_err("too far");
    assert_eq!(names(&graph), ["m"]);
}

#[test]
fn a_filter_that_cannot_be_put_in_leaves_nothing() {
    let graph = graph();
    let place =
        graph.open(Options::parse("driver=memory,node-name=m,size=1M").expect("parses")).expect("opens");
    let options = || {
        let text =
            "driver=copy-before-write,node-name=f,target.driver=memory,target.node-name=t,target.size=1M";
        Options::parse(text).expect("parses")
    };
    // Where it would have to wait and must not.
    let e = Env::without_blocking(|| graph.filter_add(&place, options())).expect_err("refused");
    assert_eq!(e.errno(), libc::EDEADLK);
    assert_eq!((names(&graph), place.filters().len()), (vec!["m".to_owned()], 0));
    graph.filter_add(&place, options()).expect("nothing is in the way");
}
