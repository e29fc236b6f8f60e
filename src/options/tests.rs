//! The rules of the module, each with a test named after it.

use super::*;
use proptest::prelude::*;
use serde_json::json;

fn parse(text: &str) -> Options {
    Options::parse(text).unwrap_or_else(|e| panic!("{text}: {e}"))
}

fn refused(text: &str) -> String {
    let error = Options::parse(text).expect_err(text);
    assert_eq!(error.errno(), libc::EINVAL);
    error.to_string()
}

#[test]
fn dotted_keys_nest() {
    let options = parse("driver=qcow2,file.driver=file,file.cache.direct=on");
    let tree = json!({"driver": "qcow2", "file": {"driver": "file", "cache": {"direct": "on"}}});
    assert_eq!(options.to_json(), tree);
}

#[test]
fn both_spellings_make_the_same_tree() {
    let dotted = parse("driver=raw,file.driver=file,file.filename=a,list.0=x,list.1=y");
    for text in [
        r#"{"driver": "raw", "file": {"driver": "file", "filename": "a"}, "list": ["x", "y"]}"#,
        r#"{"driver": "raw", "file.driver": "file", "file.filename": "a", "list.0": "x", "list.1": "y"}"#,
        r#"{"file.driver": "file", "driver": "raw", "file": {"filename": "a"}, "list": {"1": "y", "0": "x"}}"#,
    ] {
        assert_eq!(parse(text), dotted, "{text}");
    }
}

#[test]
fn json_begins_with_a_brace_after_blanks() {
    assert_eq!(parse(" \n\t{\"a\": 1} \n").to_json(), json!({"a": 1}));
    assert!(refused(" [1]").contains("no value"));
    assert!(refused("{\"a\": 1} x").contains("not valid JSON"));
    assert!(refused("{\"a\": 1").contains("not valid JSON"));
}

#[test]
fn empty_and_blank_texts_are_empty_trees() {
    for text in ["", " ", "\n", "{}"] {
        assert!(parse(text).is_empty());
    }
}

#[test]
fn a_doubled_comma_means_itself() {
    let mut options = parse("filename=a,,b,,,,c,d=e,,,f=,,");
    assert_eq!(options.take_str("filename").unwrap().unwrap(), "a,b,,c");
    assert_eq!(options.take_str("d").unwrap().unwrap(), "e,");
    assert_eq!(options.take_str("f").unwrap().unwrap(), ",");
    options.finish().unwrap();
}

#[test]
fn only_the_first_equals_sign_ends_the_key() {
    assert_eq!(parse("a=b=c").take_str("a").unwrap().unwrap(), "b=c");
}

#[test]
fn one_comma_may_stand_at_the_end() {
    assert_eq!(parse("a=b,"), parse("a=b"));
    assert!(refused(",").contains("no value"));
    assert!(refused("a=b,c=d, ").contains("no value"));
}

#[test]
fn a_bare_key_is_refused() {
    assert!(refused("readonly").contains("option 'readonly' has no value"));
    assert!(refused("a=b,readonly,c=d").contains("option 'readonly' has no value"));
}

#[test]
fn bad_keys_are_refused() {
    for text in ["=a", ".=a", "a.=b", ".a=b", "a..b=c", "a b=c", " a=b", "a\0=b", "\u{e4}=b"] {
        assert!(refused(text).contains("not an option key"), "{text:?}");
        let key = text.split('=').next().unwrap();
        assert!(Options::from_json(&json!({key: 1})).is_err(), "{text:?}");
        assert!(Options::from_json(&json!({"a": {key: 1}})).is_err(), "{text:?}");
        assert!(Options::from_json(&json!({"a": [{key: 1}]})).is_err(), "{text:?}");
    }
}

#[test]
fn a_key_given_twice_is_refused_in_every_spelling() {
    for text in [
        "a=1,a=1",
        "a.b=1,a.b=2",
        "a.0=1,a.0=2",
        r#"{"a": 1, "a": 1}"#,
        r#"{"a": {"b": 1, "b": 2}}"#,
        r#"{"a": [{"b": 1, "b": 2}]}"#,
        r#"{"a": {"b": 1}, "a": {"c": 2}}"#,
        r#"{"a": {"b": 1}, "a.b": 2}"#,
        r#"{"a.b": 1, "a": {"b": 2}}"#,
        r#"{"a": null, "a": null}"#,
    ] {
        assert!(refused(text).contains("given twice"), "{text}");
    }
    assert!(refused("x.a=1,x.a=2").contains("'x.a'"));
}

#[test]
fn a_key_that_is_a_value_and_a_prefix_is_refused() {
    for text in [
        "a=1,a.b=2",
        "a.b=2,a=1",
        "a.b.c=1,a.b=2",
        "backing=,backing.driver=file",
        r#"{"a": 1, "a.b": 2}"#,
        r#"{"a": {"b": 1}, "a.b.c": 2}"#,
        r#"{"a": [1], "a.1": 2}"#,
        r#"{"a.1": 2, "a": [1]}"#,
        r#"{"a": null, "a.b": 2}"#,
    ] {
        assert!(refused(text).contains("prefix"), "{text}");
    }
    assert!(refused("x.a=1,x.a.b=2").contains("'x.a'"));
}

#[test]
fn index_keys_make_a_list_in_their_order() {
    let options = parse("a.1=y,a.0=x,b.0.c=1,b.0.d=2,b.1.c=3");
    let tree = json!({"a": ["x", "y"], "b": [{"c": "1", "d": "2"}, {"c": "3"}]});
    assert_eq!(options.to_json(), tree);
    let many: Vec<String> = (0..12).rev().map(|n| format!("a.{n}={n}")).collect();
    let numbers = parse(&many.join(",")).take_list_u64("a").unwrap().unwrap();
    assert_eq!(numbers, (0..12).collect::<Vec<u64>>());
}

#[test]
fn a_list_has_no_gaps() {
    for text in ["a.1=x", "a.0=x,a.2=y", "a.0=x,a.99999999999999999999999=y"] {
        assert!(refused(text).contains("past its end"), "{text}");
    }
}

#[test]
fn indices_and_names_do_not_mix() {
    assert!(refused("x.a.0=1,x.a.b=2").contains("'x.a' mixes"));
    assert!(refused(r#"{"a": [{"0": 1, "b": 2}]}"#).contains("'a.0' mixes"));
    assert_eq!(parse("a.00=1,a.b=2").to_json(), json!({"a": {"00": "1", "b": "2"}}));
}

#[test]
fn the_outermost_object_is_never_a_list() {
    assert_eq!(parse("0=a,1=b,c=d").to_json(), json!({"0": "a", "1": "b", "c": "d"}));
}

#[test]
fn from_json_takes_objects_only() {
    for value in [json!(null), json!([]), json!("a=b"), json!(1)] {
        assert!(Options::from_json(&value).unwrap_err().to_string().contains("expected an object"));
    }
}

#[test]
fn the_text_is_at_most_1_mib() {
    let text = |len: usize| format!("a={}", "x".repeat(len - 2));
    assert!(Options::parse(&text(TEXT_LEN_MAX)).is_ok());
    assert!(refused(&text(TEXT_LEN_MAX + 1)).contains("longer than"));
}

#[test]
fn the_depth_is_at_most_32() {
    fn key(fragments: usize) -> String {
        vec!["a"; fragments].join(".")
    }
    fn nested(open: &str, close: &str, levels: usize) -> String {
        format!("{{\"a\": {}1{}}}", open.repeat(levels), close.repeat(levels))
    }
    assert!(Options::parse(&format!("{}=1", key(32))).is_ok());
    assert!(refused(&format!("{}=1", key(33))).contains("deeper"));
    assert!(refused(&format!("{}=1", key(300_000))).contains("deeper"));
    for (open, close) in [("[", "]"), ("{\"a\": ", "}")] {
        assert!(Options::parse(&nested(open, close, 31)).is_ok());
        assert!(refused(&nested(open, close, 32)).contains("deeper"));
        assert!(refused(&nested(open, close, 100_000)).contains("deeper"));
    }
    assert!(refused(&format!("{{\"{}\": {{\"{}\": 1}}}}", key(16), key(17))).contains("deeper"));
    let mut value = json!(1);
    for _ in 0..150 {
        value = json!({ "a": [value] });
    }
    assert!(Options::from_json(&value).unwrap_err().to_string().contains("deeper"));
}

#[test]
fn there_are_at_most_4096_entries() {
    let pairs = |n: usize| (0..n).map(|i| format!("k{i}=")).collect::<Vec<_>>().join(",");
    assert!(Options::parse(&pairs(ENTRIES_MAX)).is_ok());
    assert!(refused(&pairs(ENTRIES_MAX + 1)).contains("more than 4096"));
    let list = |n: usize| format!("{{\"a\": [{}]}}", vec!["1"; n].join(","));
    assert!(Options::parse(&list(ENTRIES_MAX - 1)).is_ok());
    assert!(refused(&list(ENTRIES_MAX)).contains("more than 4096"));
    assert!(refused(&list(200_000)).contains("more than 4096"));
    let value = json!({"a": vec![0; ENTRIES_MAX]});
    assert!(Options::from_json(&value).unwrap_err().to_string().contains("more than 4096"));
    let deep = |n: usize| (0..n).map(|i| format!("a.b.k{i}=")).collect::<Vec<_>>().join(",");
    assert!(Options::parse(&deep(ENTRIES_MAX - 2)).is_ok(), "the parents count once");
    assert!(refused(&deep(ENTRIES_MAX - 1)).contains("more than 4096"));
}

#[test]
fn strings_convert_to_the_type_asked_for() {
    for mut options in [
        parse("b=on,n=12,h=0x10,s=1.5k,f=0.25,l=1:2,,3"),
        parse(r#"{"b": "on", "n": "12", "h": "0x10", "s": "1.5k", "f": "0.25", "l": "1:2,3"}"#),
    ] {
        assert_eq!(options.take_bool("b").unwrap(), Some(true));
        assert_eq!(options.take_u64("n").unwrap(), Some(12));
        assert_eq!(options.take_u64("h").unwrap(), Some(16));
        assert_eq!(options.take_size("s").unwrap(), Some(1536));
        assert_eq!(options.take_f64("f").unwrap(), Some(0.25));
        assert_eq!(options.take_list_u64("l").unwrap(), Some(vec![1, 2, 3]));
        options.finish().unwrap();
    }
}

#[test]
fn json_values_have_their_own_type() {
    let mut options =
        parse(r#"{"b": true, "n": 12, "s": 4096, "f": 0.25, "i": 3, "l": [1, "0x2", 3], "e": "x"}"#);
    assert_eq!(options.take_bool("b").unwrap(), Some(true));
    assert_eq!(options.take_u64("n").unwrap(), Some(12));
    assert_eq!(options.take_size("s").unwrap(), Some(4096));
    assert_eq!(options.take_f64("f").unwrap(), Some(0.25));
    assert_eq!(options.take_f64("i").unwrap(), Some(3.0));
    assert_eq!(options.take_list_u64("l").unwrap(), Some(vec![1, 2, 3]));
    assert_eq!(options.take_enum("e", &["w", "x"]).unwrap(), Some(1));
    options.finish().unwrap();
}

#[test]
fn numbers_and_booleans_are_not_strings() {
    let number = Options::parse(r#"{"a": 5}"#).unwrap().take_str("a").unwrap_err();
    assert_eq!(number.to_string(), "option 'a' is 5, expected a string");
    let switch = Options::parse(r#"{"a": true}"#).unwrap().take_str("a").unwrap_err();
    assert_eq!(switch.to_string(), "option 'a' is true, expected a string");
    assert!(parse(r#"{"a": 1}"#).take_enum("a", &["1"]).is_err());
    assert!(parse(r#"{"a": 1}"#).take_child("a").is_err());
}

/// Takes `a`; says whether it was there.
type Take = fn(&mut Options) -> Result<bool>;

/// Every accessor.
const ACCESSORS: &[(&str, Take)] = &[
    ("str", |o| o.take_str("a").map(|v| v.is_some())),
    ("bool", |o| o.take_bool("a").map(|v| v.is_some())),
    ("u64", |o| o.take_u64("a").map(|v| v.is_some())),
    ("u64_in", |o| o.take_u64_in("a", 1..=10).map(|v| v.is_some())),
    ("size", |o| o.take_size("a").map(|v| v.is_some())),
    ("f64", |o| o.take_f64("a").map(|v| v.is_some())),
    ("enum", |o| o.take_enum("a", &["on", "x"]).map(|v| v.is_some())),
    ("list_u64", |o| o.take_list_u64("a").map(|v| v.is_some())),
    ("list_str", |o| o.take_list_str("a").map(|v| v.is_some())),
    ("child", |o| o.take_child("a").map(|v| v.is_some())),
    ("object", |o| o.take_object("a").map(|v| v.is_some())),
];

#[test]
fn each_type_takes_its_values_and_no_others() {
    let table: &[(Value, &[&str])] = &[
        (json!(null), &["child"]),
        (json!(true), &["bool"]),
        (json!(5), &["u64", "u64_in", "size", "f64"]),
        (json!(11), &["u64", "size", "f64"]),
        (json!(-5), &["f64"]),
        (json!(1.5), &["f64"]),
        (json!(""), &["str", "list_u64", "child"]),
        (json!("on"), &["str", "bool", "enum", "child"]),
        (json!("On"), &["str", "child"]),
        (json!("7"), &["str", "u64", "u64_in", "size", "f64", "list_u64", "child"]),
        (json!("0x7"), &["str", "u64", "u64_in", "size", "list_u64", "child"]),
        (json!("7k"), &["str", "size", "child"]),
        (json!("1.5"), &["str", "f64", "child"]),
        (json!("-1"), &["str", "f64", "child"]),
        (json!("+1"), &["str", "f64", "child"]),
        (json!(" 1"), &["str", "child"]),
        (json!("inf"), &["str", "child"]),
        (json!("nan"), &["str", "child"]),
        (json!("1e999"), &["str", "child"]),
        (json!("18446744073709551616"), &["str", "f64", "child"]),
        (json!("1::2"), &["str", "child"]),
        (json!("1:2"), &["str", "list_u64", "child"]),
        (json!([]), &["list_u64", "list_str"]),
        (json!([1, 2]), &["list_u64"]),
        (json!(["1", "2"]), &["list_u64", "list_str"]),
        (json!(["x"]), &["list_str"]),
        (json!([[1]]), &[]),
        (json!([-1]), &[]),
        (json!({}), &["child", "object"]),
        (json!({"b": 1}), &["child", "object"]),
    ];
    for (value, takers) in table {
        for (name, take) in ACCESSORS {
            let mut options = Options::from_json(&json!({ "a": value })).unwrap();
            match take(&mut options) {
                Ok(taken) => assert!(taken && takers.contains(name), "{name} took {value}"),
                Err(e) => assert!(!takers.contains(name), "{name} refused {value}: {e}"),
            }
            assert!(options.is_empty(), "{name} left {value}");
        }
    }
    for (name, take) in ACCESSORS {
        assert!(!take(&mut Options::empty()).unwrap(), "{name}");
        assert!(!take(&mut parse("b=1")).unwrap(), "{name}");
    }
}

#[test]
fn every_spelling_of_a_switch() {
    for (text, expected) in
        [("on", true), ("yes", true), ("true", true), ("off", false), ("no", false), ("false", false)]
    {
        assert_eq!(parse(&format!("a={text}")).take_bool("a").unwrap(), Some(expected));
    }
    for text in ["", "1", "0", "ON", "y", "enabled"] {
        assert!(parse(&format!("a={text}")).take_bool("a").is_err(), "{text}");
    }
}

#[test]
fn type_errors_name_the_full_path_the_value_and_what_was_expected() {
    let mut top = parse("file.cache.direct=maybe,file.size=10Q,file.fd=-1,file.aio=fast,file.n=70");
    let Some(Child::Inline(mut file)) = top.take_child("file").unwrap() else { panic!("not inline") };
    let mut cache = file.clone().take_object("cache").unwrap().unwrap();
    for error in [cache.take_bool("direct").unwrap_err(), file.take_bool("cache.direct").unwrap_err()] {
        assert_eq!(error.to_string(), "option 'file.cache.direct' is 'maybe', expected on or off");
        assert_eq!((error.errno(), error.code()), (libc::EINVAL, crate::error::Code::Invalid));
    }
    let error = file.take_size("size").unwrap_err().to_string();
    assert!(error.starts_with("option 'file.size' is '10Q', expected a size"), "{error}");
    let error = file.take_u64("fd").unwrap_err().to_string();
    assert_eq!(error, "option 'file.fd' is '-1', expected a number without sign and suffix");
    let error = file.take_enum("aio", &["threads", "io_uring"]).unwrap_err().to_string();
    assert_eq!(error, "option 'file.aio' is 'fast', expected one of threads, io_uring");
    let error = file.take_u64_in("n", 1..=64).unwrap_err().to_string();
    assert_eq!(error, "option 'file.n' is '70', expected a number from 1 to 64");
    assert_eq!(file.invalid("n", "is odd").to_string(), "option 'file.n' is odd");
}

#[test]
fn sizes_that_overflow_are_refused() {
    for text in ["a=16E", "a=18446744073709551616", r#"{"a": 18446744073709551616}"#, r#"{"a": 1e30}"#] {
        assert!(parse(text).take_size("a").is_err(), "{text}");
    }
    assert_eq!(parse(r#"{"a": 18446744073709551615}"#).take_size("a").unwrap(), Some(u64::MAX));
}

#[test]
fn missing_required_options_are_named_by_their_path() {
    let mut file = parse("file.driver=file").take_object("file").unwrap().unwrap();
    for error in [
        file.require_str("filename").unwrap_err(),
        file.require_bool("filename").unwrap_err(),
        file.require_u64("filename").unwrap_err(),
        file.require_size("filename").unwrap_err(),
        file.require_enum("filename", &[]).unwrap_err(),
        file.require_child("filename").unwrap_err(),
    ] {
        assert_eq!(error.to_string(), "missing required option 'file.filename'");
    }
    assert!(parse("target=").require_child("target").is_err(), "no child is a missing child");
}

#[test]
fn a_child_is_a_name_or_options_or_explicitly_none() {
    let child = |text: &str| parse(text).take_child("backing").unwrap();
    assert_eq!(child("a=b"), None);
    assert_eq!(child("backing=base0"), Some(Child::Name("base0".into())));
    assert_eq!(child("backing="), Some(Child::Null));
    assert_eq!(child(r#"{"backing": null}"#), Some(Child::Null));
    assert_eq!(child("backing.driver=raw"), Some(Child::Inline(parse("driver=raw"))));
    assert_eq!(child(r#"{"backing": {"driver": "raw"}}"#), Some(Child::Inline(parse("driver=raw"))));
}

#[test]
fn left_over_keys_fail_by_their_full_path() {
    assert_eq!(parse("a=1").finish().unwrap_err().to_string(), "unknown option 'a'");
    let text = r#"{"x": 1, "file": {"b": {"c": null}, "d": {}, "l": [1, 2], "m": [{"k": 1}, 2]}}"#;
    let mut options = parse(text);
    let error = options.clone().finish().unwrap_err().to_string();
    assert_eq!(error, "unknown options 'x', 'file.b.c', 'file.d', 'file.l', 'file.m.0.k', 'file.m.1'");
    let error = options.take_object("file").unwrap().unwrap().finish().unwrap_err().to_string();
    assert!(error.starts_with("unknown options 'file.b.c', 'file.d'"), "{error}");
    assert_eq!(options.finish().unwrap_err().to_string(), "unknown option 'x'");
}

#[test]
fn very_many_left_over_keys_are_counted() {
    let text: Vec<String> = (0..100).map(|i| format!("k{i}=")).collect();
    let error = parse(&text.join(",")).finish().unwrap_err().to_string();
    assert!(error.contains("'k31' and 68 more"), "{error}");
}

#[test]
fn the_order_of_left_over_keys_is_that_of_the_text() {
    let mut options = parse("a=,b=,c=,d=,e=");
    options.take_value("b").unwrap();
    assert_eq!(options.keys().collect::<Vec<_>>(), ["a", "c", "d", "e"]);
    assert_eq!(options.finish().unwrap_err().to_string(), "unknown options 'a', 'c', 'd', 'e'");
}

#[test]
fn an_object_whose_last_key_is_taken_goes_with_it() {
    let mut options = parse("cache.direct=on,cache.no-flush=off");
    options.take_bool("cache.direct").unwrap();
    assert!(options.contains("cache"));
    options.take_bool("cache.no-flush").unwrap();
    options.finish().unwrap();
    let mut options = parse(r#"{"cache": {}}"#);
    assert_eq!(options.take_bool("cache.direct").unwrap(), None);
    options.finish().unwrap();
}

#[test]
fn peek_and_contains_leave_the_key() {
    let options = parse(r#"{"a": "x", "b": {"c": 1}, "d": null}"#);
    assert_eq!(options.peek_str("a"), Some("x"));
    assert_eq!(options.peek_str("b.c"), None);
    assert!(options.contains("b.c") && options.contains("b") && options.contains("d"));
    assert!(!options.contains("a.x") && !options.contains("b.d") && !options.contains("e"));
    assert_eq!(options.keys().count(), 3);
}

#[test]
fn set_replaces_and_nests() {
    let mut options = Options::empty();
    options.set("a", 1).set("file.filename", "x").set("a.b", true).set("file.filename", "y");
    options.set("target", parse("driver=raw"));
    let tree = json!({"a": {"b": true}, "file": {"filename": "y"}, "target": {"driver": "raw"}});
    assert_eq!(options.to_json(), tree);
}

#[test]
fn insert_keeps_the_rules_and_changes_nothing_if_it_fails() {
    let mut options = parse("a=1,l.0=x");
    options.insert("b.c", 2).unwrap();
    let before = options.clone();
    for (key, part) in [("a", "twice"), ("a.b", "prefix"), ("b", "prefix"), ("x y", "key"), ("l.0", "prefix")]
    {
        let error = options.insert(key, 1).unwrap_err().to_string();
        assert!(error.contains(part), "{key}: {error}");
    }
    assert!(options.insert(&vec!["a"; 40].join("."), 1).is_err());
    assert_eq!(options, before);
    let mut file = parse("file.driver=file").take_object("file").unwrap().unwrap();
    file.insert("fd", -1).unwrap();
    assert!(file.take_u64("fd").unwrap_err().to_string().contains("'file.fd'"), "the path is kept");
}

#[test]
fn messages_repeat_long_and_odd_values_shortened() {
    let error = parse(&format!("a={}", "x".repeat(100_000))).take_bool("a").unwrap_err().to_string();
    assert!(error.len() < 200 && error.contains("xxx...'"), "{error}");
    let error = parse("a=1\n\u{1b}[2J").take_bool("a").unwrap_err().to_string();
    assert!(error.contains(r"'1\n\u{1b}[2J'"), "{error}");
    assert!(refused(&format!("{}=", "k".repeat(1000) + "!")).len() < 250);
}

/// A tree as the builder makes it: no dotted keys, and no object whose keys could be taken for indices.
fn tree() -> impl Strategy<Value = Value> {
    let name = "[a-z_-][a-z0-9_-]{0,6}";
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
    ];
    let inner = leaf.prop_recursive(5, 40, 6, move |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            proptest::collection::hash_map(name, inner, 0..6).prop_map(|m| m.into_iter().collect()),
        ]
    });
    proptest::collection::hash_map(name, inner, 0..6).prop_map(|m| m.into_iter().collect())
}

/// The `key=value` spelling of a tree of strings.
fn dotted(value: &Value, path: &str, out: &mut Vec<String>) {
    let below = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
    match value {
        Value::Object(map) => map.iter().for_each(|(key, value)| dotted(value, &below(key), out)),
        Value::Array(list) => {
            list.iter().enumerate().for_each(|(n, value)| dotted(value, &below(&n.to_string()), out));
        }
        Value::String(text) => out.push(format!("{path}={}", text.replace(',', ",,"))),
        other => panic!("{other} has no dotted spelling"),
    }
}

/// A tree that the dotted spelling can express: strings only, no empty containers.
fn text_tree() -> impl Strategy<Value = Value> {
    let name = "[a-z_-][a-z0-9_-]{0,6}";
    let inner = "[a-z,=. \u{e4}]{0,12}".prop_map(Value::from).prop_recursive(5, 40, 6, move |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 1..6).prop_map(Value::from),
            proptest::collection::hash_map(name, inner, 1..6).prop_map(|m| m.into_iter().collect()),
        ]
    });
    proptest::collection::hash_map(name, inner, 0..6).prop_map(|m| m.into_iter().collect())
}

proptest! {
    #[test]
    fn json_goes_through_unchanged(value in tree()) {
        let options = Options::from_json(&value).unwrap();
        prop_assert_eq!(&options.to_json(), &value);
        // Floats may change in the last place when read from text, by serde_json as well.
        let text = options.to_json().to_string();
        let again = Options::parse(&text).unwrap();
        prop_assert_eq!(again.to_json(), serde_json::from_str::<Value>(&text).unwrap());
    }

    #[test]
    fn dotted_text_to_tree_to_json_to_tree(value in text_tree()) {
        let mut pairs = Vec::new();
        dotted(&value, "", &mut pairs);
        let options = Options::parse(&pairs.join(",")).unwrap();
        prop_assert_eq!(&options.to_json(), &value);
        prop_assert_eq!(&Options::parse(&options.to_json().to_string()).unwrap(), &options);
        prop_assert_eq!(&Options::from_json(&options.to_json()).unwrap(), &options);
    }

    #[test]
    fn arbitrary_text_never_panics(text in ".{0,200}") {
        let _ = Options::parse(&text);
        let _ = parse_size(&text);
    }

    #[test]
    fn text_like_options_never_panics(text in r#"[{}\[\]":,=.a0-2 ]{0,60}"#) {
        if let Ok(options) = Options::parse(&text) {
            for (_, take) in ACCESSORS {
                let _ = take(&mut options.clone());
            }
            prop_assert_eq!(options.is_empty(), options.clone().finish().is_ok());
            prop_assert_eq!(Options::from_json(&options.to_json()).unwrap(), options);
        }
    }

    #[test]
    fn text_like_sizes_never_panics(text in "[0-9]{0,25}[.x]?[0-9a-f]{0,25}[bkmgtpeKMGTPE]?") {
        if let Ok(size) = parse_size(&text) {
            prop_assert_eq!(parse_size(&size.to_string()).unwrap(), size);
        }
    }
}
