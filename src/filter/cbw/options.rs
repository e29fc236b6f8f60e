//! Options of the filter (semantics.md, section 4).

use crate::error::Result;
use crate::limits::{GRANULE_MAX, GRANULE_MIN};
use crate::node::Limits;
use crate::options::{Options, Prop, PropStates, PropTable, PropType, props::REQUIRED};
use std::time::Duration;

/// Options of the driver `copy-before-write`.
pub static CBW_PROPS: PropTable = PropTable {
    driver: "copy-before-write",
    props: &[
        prop(
            "file",
            PropType::Node,
            REQUIRED,
            "the disk whose instant is kept; given by the place when added live",
        ),
        prop(
            "target",
            PropType::Node,
            REQUIRED,
            "where old data goes: a ram-cache, or a node at least as fast as the guest needs",
        ),
        prop("on-cbw-error", PropType::Enum(ON_ERROR), "break-snapshot", "what a failed copy breaks"),
        prop(
            "cbw-timeout",
            PropType::Int,
            "45",
            "seconds a guest request may wait for its copies, 0 = no limit",
        ),
        prop("cbw-timeout-ms", PropType::Int, "", "the same in milliseconds; one of the two"),
        prop("min-cluster-size", PropType::Size, "0", "smallest granule, a power of two; 0 = by the target"),
        prop(
            "granularity",
            PropType::Size,
            "64k",
            "guest-facing granule, a power of two from 4k; below the target's cluster only over a ram-cache",
        ),
        prop(
            "latency-bound-ms",
            PropType::Int,
            "0",
            "longest wait for space before the next overflow step, 0 = off",
        ),
        prop(
            "loss-scope",
            PropType::Enum(LOSS),
            "snapshot",
            "what a failure after the guest was released loses",
        ),
        prop(
            "discard-policy",
            PropType::Enum(DISCARD),
            "copy",
            "hold: complete discards as no-op instead of copying first",
        ),
    ],
};

const ON_ERROR: &[&str] = &["break-guest-write", "break-snapshot"];
const LOSS: &[&str] = &["snapshot", "range"];
const DISCARD: &[&str] = &["copy", "hold"];
/// A day more than any driver waits.
const TIMEOUT_MAX_MS: u64 = u64::MAX / 2_000_000;

const fn prop(name: &'static str, ty: PropType, default: &'static str, doc: &'static str) -> Prop {
    Prop { name, ty, default, states: PropStates::OPEN, doc }
}

/// What the options say.
#[derive(Clone, Debug)]
pub(super) struct Config {
    /// Bytes per granule.
    pub(super) granule: u64,
    /// A failed copy fails the guest's write instead of the snapshot.
    pub(super) break_guest_write: bool,
    /// Longest wait of a guest request for its copies.
    pub(super) timeout: Option<Duration>,
    /// Longest wait for space.
    pub(super) space_wait: Option<Duration>,
    /// A failure after release loses the range only.
    pub(super) lose_range: bool,
    /// Discards of the guest complete without effect.
    pub(super) hold_discards: bool,
}

impl Config {
    /// Reads everything but the nodes. `target` are the limits of the target, `cached` whether it takes granules of any size into memory.
    pub(super) fn take(o: &mut Options, target: Limits, cached: bool) -> Result<Self> {
        if o.contains("bitmap") {
            return Err(
                o.invalid("bitmap", "needs an image with bitmaps, which no driver of this library has yet")
            );
        }
        let break_guest_write = o.take_enum("on-cbw-error", ON_ERROR)? == Some(0);
        let seconds = o.take_u64_in("cbw-timeout", 0..=TIMEOUT_MAX_MS / 1000)?;
        let ms = o.take_u64_in("cbw-timeout-ms", 0..=TIMEOUT_MAX_MS)?;
        let timeout_ms = match (seconds, ms) {
            (Some(_), Some(_)) => return Err(o.invalid("cbw-timeout-ms", "excludes 'cbw-timeout'")),
            (Some(s), None) => s * 1000,
            (None, Some(ms)) => ms,
            (None, None) => 45_000,
        };
        let space_ms = o.take_u64_in("latency-bound-ms", 0..=TIMEOUT_MAX_MS)?.unwrap_or(0);
        let lose_range = o.take_enum("loss-scope", LOSS)? == Some(1);
        let hold_discards = o.take_enum("discard-policy", DISCARD)? == Some(1);
        let min = size(o, "min-cluster-size", 0)?.unwrap_or(0);
        let asked = size(o, "granularity", GRANULE_MIN)?;
        let cluster = u64::from(target.cluster);
        if let Some(g) = asked
            && g < cluster
            && !cached
        {
            return Err(o.invalid(
                "granularity",
                format!("is below the target's cluster of {cluster} bytes; put a ram-cache above the target"),
            ));
        }
        let floor = if cached { GRANULE_MIN } else { cluster.max(GRANULE_MIN) };
        let granule = asked.unwrap_or(64 << 10).max(min).max(floor).next_power_of_two();
        let bound = |ms: u64| (ms > 0).then(|| Duration::from_millis(ms));
        Ok(Self {
            granule,
            break_guest_write,
            timeout: bound(timeout_ms),
            space_wait: bound(space_ms),
            lose_range,
            hold_discards,
        })
    }
}

fn size(o: &mut Options, key: &str, min: u64) -> Result<Option<u64>> {
    match o.take_size(key)? {
        None => Ok(None),
        Some(0) if min == 0 => Ok(Some(0)),
        Some(n) if n.is_power_of_two() && (min..=GRANULE_MAX).contains(&n) => Ok(Some(n)),
        Some(_) => Err(o.invalid(key, format!("is not a power of two from {} to {GRANULE_MAX}", min.max(1)))),
    }
}
