//! Options of a new image, in the names of QEMU's `blockdev-create`.

use super::create::{BackingName, Compat, CreateOptions, DataFileName, Preallocation};
use super::header::Compression;
use crate::error::{Error, Result};
use crate::options::{Options, Prop, PropStates, PropTable, PropType, props::REQUIRED};

const VERSIONS: &[&str] = &["v2", "v3"];
const PREALLOCATIONS: &[&str] = &["off", "metadata", "falloc", "full"];
const COMPRESSIONS: &[&str] = &["zlib", "zstd"];

/// What `cobweb_node_create` takes with `driver=qcow2`; the name for introspection is `create:qcow2`.
pub static CREATE_PROPS: PropTable = PropTable {
    driver: "create:qcow2",
    props: &[
        prop("filename", PropType::Str, REQUIRED, "the file to be made; also as file.filename"),
        prop("size", PropType::Size, "", "bytes of the disk; that of the backing file if not given"),
        prop("version", PropType::Enum(VERSIONS), "v3", "version of the format"),
        prop("cluster-size", PropType::Size, "64K", "512 to 2M; 128K for an overlay with nothing else given"),
        prop(
            "extended-l2",
            PropType::Bool,
            "off",
            "32 sub-clusters a cluster; on for an overlay with nothing else given",
        ),
        prop("backing-file", PropType::Str, "", "name of the backing file, as it is stored"),
        prop("backing-fmt", PropType::Str, "", "its format; required with backing-file"),
        prop("preallocation", PropType::Enum(PREALLOCATIONS), "off", "what is allocated at once"),
        prop("lazy-refcounts", PropType::Bool, "off", "whether others may write refcounts late"),
        prop("refcount-bits", PropType::Int, "16", "width of refcounts, a power of two up to 64"),
        prop("compression-type", PropType::Enum(COMPRESSIONS), "zlib", "how clusters are compressed"),
        prop("data-file", PropType::Str, "", "name of an external data file, which is made, too"),
        prop("data-file-raw", PropType::Bool, "off", "the data file is a raw image at all times"),
    ],
};

const fn prop(name: &'static str, ty: PropType, default: &'static str, doc: &'static str) -> Prop {
    Prop { name, ty, default, states: PropStates::OPEN, doc }
}

impl CreateOptions {
    /// Reads everything but the file's name and refuses what is left. `backing_size` is asked for the size of a backing file (name, format) if the options give none.
    ///
    /// An overlay for which neither version, cluster size nor extended L2 is given is made as [`CreateOptions::for_overlay`] says.
    pub fn take(o: &mut Options, backing_size: impl FnOnce(&BackingName) -> Result<u64>) -> Result<Self> {
        let format = o.take_str("backing-fmt")?;
        let backing = match (o.take_str("backing-file")?, format) {
            (None, None) => None,
            (Some(name), Some(format)) => Some(BackingName { name: name.into_bytes(), format }),
            (Some(_), None) => return Err(o.invalid("backing-fmt", "is required with backing-file")),
            (None, Some(_)) => return Err(o.invalid("backing-fmt", "is given without backing-file")),
        };
        let size = match (o.take_size("size")?, &backing) {
            (Some(size), _) => size,
            (None, Some(backing)) => backing_size(backing)?,
            (None, None) => return Err(Error::invalid("missing required option 'size'")),
        };
        let version = o.take_enum("version", VERSIONS)?;
        let (cluster_size, extended_l2) = (o.take_size("cluster-size")?, o.take_bool("extended-l2")?);
        let mut new = match backing {
            Some(backing) if version.is_none() && cluster_size.is_none() && extended_l2.is_none() => {
                Self::for_overlay(size, backing)
            }
            backing => Self { backing, ..Self::new(size) },
        };
        if version == Some(0) {
            new.compat = Compat::V010;
        }
        new.cluster_size = cluster_size.unwrap_or(new.cluster_size);
        new.extended_l2 = extended_l2.unwrap_or(new.extended_l2);
        new.preallocation = match o.take_enum("preallocation", PREALLOCATIONS)? {
            Some(1) => Preallocation::Metadata,
            Some(2) => Preallocation::Falloc,
            Some(3) => Preallocation::Full,
            _ => Preallocation::Off,
        };
        new.lazy_refcounts = o.take_bool("lazy-refcounts")?.unwrap_or(false);
        if let Some(bits) = o.take_u64_in("refcount-bits", 1..=64)? {
            new.refcount_bits = bits as u32;
        }
        if o.take_enum("compression-type", COMPRESSIONS)? == Some(1) {
            new.compression = Compression::Zstd;
        }
        let raw = o.take_bool("data-file-raw")?;
        new.data_file = match o.take_str("data-file")? {
            Some(name) => Some(DataFileName { name: name.into_bytes(), raw: raw.unwrap_or(false) }),
            None if raw == Some(true) => return Err(o.invalid("data-file-raw", "is given without data-file")),
            None => None,
        };
        new.check()?;
        Ok(new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(text: &str) -> Result<CreateOptions> {
        CreateOptions::take(&mut Options::parse(text)?, |b| {
            assert_eq!((b.name.as_slice(), b.format.as_str()), (&b"base"[..], "raw"));
            Ok(7 << 20)
        })
    }

    #[test]
    fn the_table_is_sound() {
        CREATE_PROPS.check().expect("sound");
    }

    #[test]
    fn an_overlay_is_made_for_speed_unless_its_layout_is_given() {
        let overlay = take("backing-file=base,backing-fmt=raw").expect("options");
        assert_eq!((overlay.size, overlay.cluster_size, overlay.extended_l2), (7 << 20, 128 << 10, true));
        let plain = take("backing-file=base,backing-fmt=raw,cluster-size=64K,size=1G").expect("options");
        assert_eq!((plain.size, plain.cluster_size, plain.extended_l2), (1 << 30, 64 << 10, false));
        let alone = take("size=1G").expect("options");
        assert_eq!((alone.cluster_size, alone.extended_l2), (64 << 10, false));
    }

    #[test]
    fn what_does_not_fit_together_names_the_key() {
        for (text, key) in [
            ("backing-file=base", "backing-fmt"),
            ("backing-fmt=raw,size=1M", "backing-fmt"),
            ("version=v2", "size"),
            ("size=1M,data-file-raw=on", "data-file-raw"),
            ("size=1M,refcount-bits=65", "refcount-bits"),
            ("size=1M,version=v9", "version"),
        ] {
            let e = take(text).expect_err(text).full_text();
            assert!(e.contains(key), "{text}: {e}");
        }
    }
}
