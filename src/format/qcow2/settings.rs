//! The driver's options, in QEMU's names.

use super::layout::Layout;
use crate::error::Result;
use crate::graph::ImplicitOpen;
use crate::options::{Options, Prop, PropStates, PropTable, PropType, props::REQUIRED};
use std::time::Duration;

/// Options of the driver `qcow2`.
pub static QCOW2_PROPS: PropTable = PropTable {
    driver: "qcow2",
    props: &[
        prop("file", PropType::Node, REQUIRED, "the image file"),
        prop(
            "backing",
            PropType::Node,
            "",
            "instead of the backing file that the image names; null for none",
        ),
        prop("data-file", PropType::Node, "", "instead of the external data file that the image names"),
        prop(
            "implicit-open",
            PropType::Enum(ImplicitOpen::NAMES),
            "",
            "whether files that the image names are opened; deny unless the program says otherwise",
        ),
        prop("read-only", PropType::Bool, "off", "refuse writes"),
        prop("auto-read-only", PropType::Bool, "off", "read only where the image cannot be written"),
        prop(
            "discard",
            PropType::Enum(DISCARD),
            "ignore",
            "what a discard does; unmap is the default of pass-discard-request",
        ),
        prop("lazy-refcounts", PropType::Bool, "", "write refcounts late; as the image says if not given"),
        prop(
            "pass-discard-request",
            PropType::Bool,
            "",
            "give clusters back to the file that the guest has discarded",
        ),
        prop(
            "pass-discard-snapshot",
            PropType::Bool,
            "on",
            "give clusters back to the file that deleting a snapshot frees",
        ),
        prop("pass-discard-other", PropType::Bool, "off", "give other freed clusters back to the file"),
        prop("discard-no-unref", PropType::Bool, "off", "keep discarded clusters as preallocated zeros"),
        prop(
            "overlap-check",
            PropType::Enum(OVERLAP),
            "cached",
            "against which structures writes are checked",
        ),
        prop(
            "l2-cache-size",
            PropType::Size,
            "",
            "bytes of L2 tables in memory; enough for the disk, up to 32 MiB, if not given",
        ),
        prop(
            "l2-cache-entry-size",
            PropType::Size,
            "",
            "bytes of an L2 slice; 4096, or the cluster if that is smaller",
        ),
        prop(
            "refcount-cache-size",
            PropType::Size,
            "",
            "bytes of refcount blocks in memory; 4 clusters if not given",
        ),
        prop("cache-size", PropType::Size, "", "bytes of both caches together"),
        prop(
            "cow-staging-bytes",
            PropType::Size,
            "16M",
            "memory for clusters whose copy-on-write waits for the rest of them; 0 for none",
        ),
        prop(
            "cache-clean-interval",
            PropType::Int,
            "600",
            "seconds after which unused slices are dropped; 0 for never",
        ),
    ],
};

const DISCARD: &[&str] = &["ignore", "off", "unmap", "on"];
const OVERLAP: &[&str] = &["none", "constant", "cached", "all"];

const fn prop(name: &'static str, ty: PropType, default: &'static str, doc: &'static str) -> Prop {
    Prop { name, ty, default, states: PropStates::OPEN, doc }
}

bitflags::bitflags! {
    /// Structures that the host range of a write is compared with (qcow2.md section 2, rule 4).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct OverlapCheck: u32 {
        /// The header.
        const MAIN_HEADER = 1;
        /// The active L1 table.
        const ACTIVE_L1 = 2;
        /// L2 tables of the active L1 table.
        const ACTIVE_L2 = 4;
        /// Refcount blocks.
        const REFCOUNT_BLOCK = 8;
        /// The refcount table.
        const REFCOUNT_TABLE = 16;
        /// The snapshot table.
        const SNAPSHOT_TABLE = 32;
        /// L1 tables of snapshots.
        const INACTIVE_L1 = 64;
        /// L2 tables of snapshots, read from the file at each check.
        const INACTIVE_L2 = 128;
        /// The bitmap directory.
        const BITMAP_DIRECTORY = 256;
    }
}

impl OverlapCheck {
    /// What does not change while the image is open.
    pub const CONSTANT: Self = Self::MAIN_HEADER
        .union(Self::REFCOUNT_TABLE)
        .union(Self::SNAPSHOT_TABLE)
        .union(Self::BITMAP_DIRECTORY);
    /// What is in memory.
    pub const CACHED: Self = Self::CONSTANT
        .union(Self::ACTIVE_L1)
        .union(Self::ACTIVE_L2)
        .union(Self::REFCOUNT_BLOCK)
        .union(Self::INACTIVE_L1);

    /// Option keys of the single switches.
    const SWITCHES: &'static [(&'static str, Self)] = &[
        ("main-header", Self::MAIN_HEADER),
        ("active-l1", Self::ACTIVE_L1),
        ("active-l2", Self::ACTIVE_L2),
        ("refcount-block", Self::REFCOUNT_BLOCK),
        ("refcount-table", Self::REFCOUNT_TABLE),
        ("snapshot-table", Self::SNAPSHOT_TABLE),
        ("inactive-l1", Self::INACTIVE_L1),
        ("inactive-l2", Self::INACTIVE_L2),
        ("bitmap-directory", Self::BITMAP_DIRECTORY),
    ];

    fn template(index: usize) -> Self {
        [Self::empty(), Self::CONSTANT, Self::CACHED, Self::all()][index]
    }

    /// `overlap-check=cached`, or an object with `template` and single switches.
    fn take(o: &mut Options) -> Result<Self> {
        if o.peek_str("overlap-check").is_some() || !o.contains("overlap-check") {
            return Ok(Self::template(o.take_enum("overlap-check", OVERLAP)?.unwrap_or(2)));
        }
        let mut check = Self::template(o.take_enum("overlap-check.template", OVERLAP)?.unwrap_or(2));
        for (key, flag) in Self::SWITCHES {
            if let Some(on) = o.take_bool(&format!("overlap-check.{key}"))? {
                check.set(*flag, on);
            }
        }
        Ok(check)
    }
}

/// What the options say, without what depends on the image.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// `read-only`.
    pub read_only: bool,
    /// `auto-read-only`.
    pub auto_read_only: bool,
    /// `implicit-open`; `None`: as the graph has it.
    pub implicit_open: Option<ImplicitOpen>,
    /// `lazy-refcounts`; `None`: as the image says.
    pub lazy_refcounts: Option<bool>,
    /// `discard`: whether discards do anything, and zeroing may free clusters.
    pub unmap: bool,
    /// Whether clusters that the guest discarded are given back to the file.
    pub discard_request: bool,
    /// The same for deleted snapshots.
    pub discard_snapshot: bool,
    /// The same for the rest.
    pub discard_other: bool,
    /// `discard-no-unref`.
    pub discard_no_unref: bool,
    /// `overlap-check`.
    pub overlap: OverlapCheck,
    /// `cache-clean-interval`; `None` for never.
    pub clean_interval: Option<Duration>,
    /// `cow-staging-bytes`.
    pub stage_bytes: u64,
    l2_bytes: Option<u64>,
    l2_entry: Option<u64>,
    refcount_bytes: Option<u64>,
    total_bytes: Option<u64>,
}

/// Sizes of the caches of one image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheSizes {
    /// Bytes of L2 slices.
    pub l2: u64,
    /// Bytes of refcount blocks.
    pub refcounts: u64,
}

/// Largest L2 cache unless the options ask for more.
pub const L2_CACHE_DEFAULT_MAX: u64 = 32 << 20;
/// Bytes of a slice unless the options say otherwise.
pub const SLICE_DEFAULT: u64 = 4096;
/// Refcount blocks in memory unless the options say otherwise.
const REFBLOCKS_DEFAULT: u64 = 4;
/// Memory for staged clusters unless the options say otherwise.
const STAGE_BYTES_DEFAULT: u64 = 16 << 20;
/// Largest cache.
const CACHE_MAX: u64 = 1 << 40;

impl Settings {
    /// Takes them out of the options. The children stay.
    pub fn take(o: &mut Options) -> Result<Self> {
        let unmap = o.take_enum("discard", DISCARD)?.unwrap_or(0) >= 2;
        let read = |key: &str, o: &mut Options| -> Result<Option<u64>> {
            let size = o.take_size(key)?;
            match size {
                Some(bytes) if bytes > CACHE_MAX => Err(o.invalid(key, "is more than 1 TiB")),
                other => Ok(other),
            }
        };
        let settings = Self {
            read_only: o.take_bool("read-only")?.unwrap_or(false),
            auto_read_only: o.take_bool("auto-read-only")?.unwrap_or(false),
            implicit_open: o.take_enum("implicit-open", ImplicitOpen::NAMES)?.map(ImplicitOpen::from_index),
            lazy_refcounts: o.take_bool("lazy-refcounts")?,
            unmap,
            discard_request: o.take_bool("pass-discard-request")?.unwrap_or(unmap),
            discard_snapshot: o.take_bool("pass-discard-snapshot")?.unwrap_or(true),
            discard_other: o.take_bool("pass-discard-other")?.unwrap_or(false),
            discard_no_unref: o.take_bool("discard-no-unref")?.unwrap_or(false),
            overlap: OverlapCheck::take(o)?,
            clean_interval: match o
                .take_u64_in("cache-clean-interval", 0..=u64::from(u32::MAX))?
                .unwrap_or(600)
            {
                0 => None,
                seconds => Some(Duration::from_secs(seconds)),
            },
            stage_bytes: read("cow-staging-bytes", o)?.unwrap_or(STAGE_BYTES_DEFAULT),
            l2_bytes: read("l2-cache-size", o)?,
            l2_entry: read("l2-cache-entry-size", o)?,
            refcount_bytes: read("refcount-cache-size", o)?,
            total_bytes: read("cache-size", o)?,
        };
        if let Some(total) = settings.total_bytes {
            if settings.l2_bytes.is_some() && settings.refcount_bytes.is_some() {
                return Err(o.invalid(
                    "cache-size",
                    "goes with one of l2-cache-size and refcount-cache-size, not with both",
                ));
            }
            for (key, part) in
                [("l2-cache-size", settings.l2_bytes), ("refcount-cache-size", settings.refcount_bytes)]
            {
                if part.is_some_and(|bytes| bytes > total) {
                    return Err(o.invalid(key, "is larger than cache-size"));
                }
            }
        }
        Ok(settings)
    }

    /// The layout with the slices that the options ask for.
    pub fn slices(&self, layout: Layout) -> Result<Layout> {
        layout.with_slice(self.l2_entry.unwrap_or(SLICE_DEFAULT.min(layout.cluster_size())))
    }

    /// Whether the options say how large the caches are.
    pub fn sizes_are_given(&self) -> bool {
        self.l2_bytes.is_some() || self.total_bytes.is_some()
    }

    /// Sizes of the caches for a disk of `size` bytes.
    pub fn cache_sizes(&self, layout: &Layout, size: u64) -> CacheSizes {
        let needed = layout.clusters_for(size) << layout.entry_bits();
        let least = REFBLOCKS_DEFAULT * layout.cluster_size();
        let (l2, refcounts) = match (self.total_bytes, self.l2_bytes, self.refcount_bytes) {
            (_, Some(l2), Some(refcounts)) => (l2, refcounts),
            (Some(total), Some(l2), None) => (l2, total - l2),
            (Some(total), None, Some(refcounts)) => (total - refcounts, refcounts),
            (Some(total), None, None) => {
                let l2 = needed.min(total.saturating_sub(least).max(total / 2));
                (l2, total - l2)
            }
            (None, l2, refcounts) => {
                (l2.unwrap_or(L2_CACHE_DEFAULT_MAX.min(needed)), refcounts.unwrap_or(least))
            }
        };
        CacheSizes { l2, refcounts }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(text: &str) -> Result<Settings> {
        let mut o = Options::parse(text).expect("options");
        let s = Settings::take(&mut o)?;
        o.finish_for(&QCOW2_PROPS)?;
        Ok(s)
    }

    #[test]
    fn the_table_is_sound_and_names_what_is_taken() {
        QCOW2_PROPS.check().expect("sound");
        let e = take("l2-cache-sice=1M").expect_err("unknown").full_text();
        assert!(e.contains("'l2-cache-sice'") && e.contains("l2-cache-size"), "{e}");
    }

    #[test]
    fn caches_are_sized_as_qemu_sizes_them() {
        let layout = Layout {
            version: 3,
            cluster_bits: 16,
            slice_bits: 12,
            extended: false,
            refcount_order: 4,
            data_file: false,
        };
        let sizes = |text: &str, size: u64| {
            let s = take(text).expect("valid").cache_sizes(&layout, size);
            (s.l2, s.refcounts)
        };
        assert_eq!(sizes("", 64 << 20), (8192, 256 << 10));
        assert_eq!(sizes("", 1 << 40), (32 << 20, 256 << 10));
        assert_eq!(sizes("l2-cache-size=64M", 1 << 30), (64 << 20, 256 << 10));
        assert_eq!(sizes("cache-size=16M,l2-cache-size=1M", 1 << 40), (1 << 20, 15 << 20));
        assert_eq!(sizes("cache-size=16M,refcount-cache-size=1M", 1 << 40), (15 << 20, 1 << 20));
        assert_eq!(sizes("cache-size=16M", 1 << 40), ((16 << 20) - (256 << 10), 256 << 10));
        for wrong in [
            "cache-size=1M,l2-cache-size=1M,refcount-cache-size=1",
            "cache-size=1M,l2-cache-size=2M",
            "cache-size=2T",
        ] {
            assert!(take(wrong).is_err(), "{wrong}");
        }
        assert_eq!(take("").expect("valid").slices(layout).expect("fits").slice_bits, 12);
        assert!(take("l2-cache-entry-size=128k").expect("valid").slices(layout).is_err());
    }

    #[test]
    fn overlap_checks_are_a_template_with_switches() {
        assert_eq!(take("").expect("valid").overlap, OverlapCheck::CACHED);
        assert_eq!(take("overlap-check=all").expect("valid").overlap, OverlapCheck::all());
        let s =
            take("overlap-check.template=constant,overlap-check.main-header=off,overlap-check.active-l1=on")
                .expect("valid");
        assert_eq!(
            s.overlap,
            OverlapCheck::CONSTANT.difference(OverlapCheck::MAIN_HEADER).union(OverlapCheck::ACTIVE_L1)
        );
        assert!(take("overlap-check=some").is_err() && take("overlap-check.nothing=on").is_err());
    }
}
