//! The drivers: one line each.

use super::open::OpenCx;
use crate::error::Result;
use crate::filter::{cbw, compress, fault, passthrough, ram_cache, throttle};
use crate::format::qcow2;
use crate::format::raw::{RAW_PROPS, RawNode};
use crate::io::file::{FILE_PROPS, FileNode};
use crate::io::memory::{MEMORY_PROPS, MemoryNode};
use crate::io::null::{NULL_PROPS, NullNode};
use crate::io::uring_allowed;
use crate::node::Node;
use crate::options::{Options, PropTable};
use crate::sync::Arc;

/// A driver.
pub struct Driver {
    /// Name as in the option `driver`.
    pub name: &'static str,
    /// Whether it can be put above a node that is in use.
    pub is_filter: bool,
    /// Its options, for introspection.
    pub props: &'static PropTable,
    /// Opens a node; may block. Consumes every option it knows and refuses the rest.
    pub open: fn(&OpenCx<'_>, Options) -> Result<Arc<dyn Node>>,
}

/// All drivers, by name.
pub static DRIVERS: &[Driver] = &[
    Driver { name: "copy-before-write", is_filter: true, props: &cbw::CBW_PROPS, open: cbw::CbwNode::open },
    Driver {
        name: "snapshot-access",
        is_filter: false,
        props: &cbw::ACCESS_PROPS,
        open: cbw::SnapshotAccess::open,
    },
    Driver { name: "compress", is_filter: true, props: &compress::PROPS, open: compress::Compress::open },
    Driver { name: "fault", is_filter: true, props: &fault::PROPS, open: fault::Fault::open },
    Driver {
        name: "passthrough",
        is_filter: true,
        props: &passthrough::PROPS,
        open: passthrough::Passthrough::open,
    },
    Driver { name: "ram-cache", is_filter: true, props: &ram_cache::PROPS, open: ram_cache::RamCache::open },
    Driver { name: "throttle", is_filter: true, props: &throttle::PROPS, open: throttle::Throttle::open },
    Driver {
        name: "file",
        is_filter: false,
        props: &FILE_PROPS,
        open: |_, o| Ok(FileNode::open(o, uring_allowed())?),
    },
    Driver { name: "memory", is_filter: false, props: &MEMORY_PROPS, open: |_, o| Ok(MemoryNode::open(o)?) },
    Driver { name: "null-co", is_filter: false, props: &NULL_PROPS, open: |_, o| Ok(NullNode::open(o)?) },
    Driver { name: "qcow2", is_filter: false, props: &qcow2::QCOW2_PROPS, open: qcow2::open::open },
    Driver { name: "raw", is_filter: false, props: &RAW_PROPS, open: RawNode::open },
];

/// A driver by name or alias.
pub fn find_driver(name: &str) -> Option<&'static Driver> {
    let name = match name {
        "host_device" => "file",
        "null-aio" => "null-co",
        other => other,
    };
    DRIVERS.iter().find(|d| d.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_driver_has_a_sound_table_under_its_own_name() {
        for driver in DRIVERS {
            assert_eq!(driver.props.driver, driver.name);
            driver.props.check().unwrap();
            assert!(
                find_driver(driver.name).is_some_and(|d| std::ptr::eq(d, driver)),
                "{} twice",
                driver.name
            );
        }
    }
}
