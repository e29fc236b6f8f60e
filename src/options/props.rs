//! What a driver's options are, for introspection (`cobweb_prop_next`, C10) and for messages.
//!
//! A driver has one static [`PropTable`] and reads its options by the same names; [`PropTable::check`] in a unit test of
//! the driver keeps the table sound.

use super::{Options, tree};
use crate::error::{Error, Result};

bitflags::bitflags! {
    /// When a property can be set, or that it only can be read.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct PropStates: u32 {
        /// In the options a node is opened with.
        const OPEN = 1;
        /// While the node is in use.
        const LIVE = 2;
        /// Never: it tells something about the node.
        const READ_ONLY = 4;
    }
}

/// What a property holds: the accessor of [`Options`] that reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PropType {
    /// [`Options::take_bool`].
    Bool,
    /// [`Options::take_u64`].
    Int,
    /// [`Options::take_size`].
    Size,
    /// [`Options::take_f64`].
    Number,
    /// [`Options::take_str`].
    Str,
    /// [`Options::take_enum`] with these values.
    Enum(&'static [&'static str]),
    /// [`Options::take_list_u64`].
    IntList,
    /// [`Options::take_list_str`].
    StrList,
    /// [`Options::take_child`]: a node-name or inline options.
    Node,
    /// [`Options::take_object`]: options below the name that are not listed one by one.
    Object,
}

impl PropType {
    /// Name of the type, stable.
    pub const fn name(self) -> &'static str {
        match self {
            PropType::Bool => "bool",
            PropType::Int => "int",
            PropType::Size => "size",
            PropType::Number => "number",
            PropType::Str => "str",
            PropType::Enum(_) => "enum",
            PropType::IntList => "int-list",
            PropType::StrList => "str-list",
            PropType::Node => "node",
            PropType::Object => "object",
        }
    }
}

/// One property of a driver.
#[derive(Clone, Copy, Debug)]
pub struct Prop {
    /// Its key, dotted if it lies below another.
    pub name: &'static str,
    /// Its type.
    pub ty: PropType,
    /// The default as one would write it; empty if there is none, [`REQUIRED`] if it must be given.
    pub default: &'static str,
    /// When it can be set.
    pub states: PropStates,
    /// One line for people, without a full stop.
    pub doc: &'static str,
}

/// Stands as [`Prop::default`] of a property that must be given.
pub const REQUIRED: &str = "required";

/// The properties of one driver, in the order in which they are listed.
#[derive(Clone, Copy, Debug)]
pub struct PropTable {
    /// Name of the driver.
    pub driver: &'static str,
    /// Its properties, without those that every node has (`driver`, `node-name`).
    pub props: &'static [Prop],
}

impl PropTable {
    /// The property of that name.
    pub fn find(&self, name: &str) -> Option<&'static Prop> {
        self.props.iter().find(|prop| prop.name == name)
    }

    /// The names of all that can be set, with commas between them.
    pub fn known_keys(&self) -> String {
        let settable = self.props.iter().filter(|prop| !prop.states.contains(PropStates::READ_ONLY));
        settable.map(|prop| prop.name).collect::<Vec<_>>().join(", ")
    }

    /// Whether the table is sound: names are keys and none is there twice or above another, every default can be read as
    /// its type, every property has a state and a line of documentation.
    pub fn check(&self) -> Result<()> {
        let mut names = Options::empty();
        for prop in self.props {
            let wrong = |problem: String| {
                Error::invalid(format!("property '{}' of driver '{}': {problem}", prop.name, self.driver))
            };
            names.insert(prop.name, "").map_err(|e| wrong(e.to_string()))?;
            if prop.doc.is_empty() || prop.doc.contains('\n') || prop.doc.ends_with('.') {
                return Err(wrong("its documentation is not one line without a full stop".into()));
            }
            let fixed = prop.states.contains(PropStates::READ_ONLY);
            if prop.states.is_empty() || fixed && prop.states != PropStates::READ_ONLY {
                return Err(wrong("its states contradict each other".into()));
            }
            if !prop.default.is_empty() && prop.default != REQUIRED {
                prop.check_default().map_err(|e| wrong(e.to_string()))?;
            }
        }
        Ok(())
    }
}

impl Prop {
    fn check_default(&self) -> Result<()> {
        tree::check_key(self.name)?;
        let mut options = Options::empty();
        options.set(self.name, self.default);
        match self.ty {
            PropType::Bool => options.take_bool(self.name).map(drop),
            PropType::Int => options.take_u64(self.name).map(drop),
            PropType::Size => options.take_size(self.name).map(drop),
            PropType::Number => options.take_f64(self.name).map(drop),
            PropType::Str => options.take_str(self.name).map(drop),
            PropType::Enum(values) => options.take_enum(self.name, values).map(drop),
            PropType::IntList => options.take_list_u64(self.name).map(drop),
            PropType::StrList => options.take_list_str(self.name).map(drop),
            PropType::Node => options.take_child(self.name).map(drop),
            PropType::Object => options.take_object(self.name).map(drop),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPEN: PropStates = PropStates::OPEN;

    const fn prop(name: &'static str, ty: PropType, default: &'static str) -> Prop {
        Prop { name, ty, default, states: OPEN, doc: "something" }
    }

    static FILE: PropTable = PropTable {
        driver: "file",
        props: &[
            prop("filename", PropType::Str, REQUIRED),
            prop("fd", PropType::Int, ""),
            prop("cache.direct", PropType::Bool, "off"),
            prop("aio", PropType::Enum(&["threads", "io_uring"]), "threads"),
            Prop { states: PropStates::READ_ONLY, ..prop("size", PropType::Size, "") },
        ],
    };

    #[test]
    fn an_unknown_key_error_says_what_the_driver_knows() {
        let mut top = Options::parse("file.driver=file,file.chache.direct=on").unwrap();
        let Some(super::super::Child::Inline(mut file)) = top.take_child("file").unwrap() else {
            panic!("not inline")
        };
        assert_eq!(file.require_str("driver").unwrap(), "file");
        let error = file.finish_for(&FILE).unwrap_err();
        assert_eq!(
            error.to_string(),
            "unknown option 'file.chache.direct' (driver 'file' knows: filename, fd, cache.direct, aio)"
        );
    }

    #[test]
    fn a_driver_without_options_says_so() {
        let table = PropTable { driver: "null-co", props: &[] };
        let error = Options::parse("a=b").unwrap().finish_for(&table).unwrap_err();
        assert_eq!(error.to_string(), "unknown option 'a' (driver 'null-co' knows: no options)");
        Options::empty().finish_for(&table).unwrap();
    }

    #[test]
    fn a_sound_table_passes_the_check() {
        FILE.check().unwrap();
        assert_eq!(FILE.find("cache.direct").unwrap().default, "off");
        assert!(FILE.find("cache").is_none());
    }

    #[test]
    fn every_fault_of_a_table_is_found() {
        fn fault(props: Vec<Prop>, part: &str) {
            let error = PropTable { driver: "d", props: props.leak() }.check().unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        fault(vec![prop("a b", PropType::Str, "")], "not an option key");
        fault(vec![prop("a", PropType::Str, ""), prop("a", PropType::Str, "")], "twice");
        fault(vec![prop("a.b", PropType::Str, ""), prop("a", PropType::Str, "")], "prefix");
        for ty in [
            PropType::Bool,
            PropType::Int,
            PropType::Size,
            PropType::Number,
            PropType::Enum(&["x"]),
            PropType::IntList,
            PropType::StrList,
            PropType::Object,
        ] {
            fault(vec![prop("a", ty, "maybe")], "expected");
        }
        fault(vec![Prop { doc: "", ..prop("a", PropType::Str, "") }], "documentation");
        fault(vec![Prop { doc: "Ends.", ..prop("a", PropType::Str, "") }], "documentation");
        fault(vec![Prop { states: PropStates::empty(), ..prop("a", PropType::Str, "") }], "states");
        fault(vec![Prop { states: PropStates::all(), ..prop("a", PropType::Str, "") }], "states");
    }
}
