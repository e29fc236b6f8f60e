//! Options of the filter (semantics.md, section 4). All but the nodes and the granule can be changed live ([`Live`]).

use super::geometry::GranuleWish;
use crate::error::Result;
use crate::options::props::REQUIRED;
use crate::options::{Options, Prop, PropStates, PropTable, PropType};
use crate::rt::Instant;
use crate::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// What gives way when old data cannot be copied for a guest write (S27, S30).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum OnCbwError {
    /// The guest's write fails with EIO.
    BreakGuestWrite,
    /// The snapshot, or the part of it that [`LossScope`] says.
    #[default]
    BreakSnapshot,
}

/// How much of the snapshot an error costs (S50).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum LossScope {
    /// All of it.
    #[default]
    Snapshot,
    /// The granules concerned.
    Range,
}

/// What becomes of a guest's discard (S12).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DiscardPolicy {
    /// Old data is copied first.
    #[default]
    Copy,
    /// It does nothing where old data would have to be copied.
    Hold,
}

const ON_ERROR: &[&str] = &["break-guest-write", "break-snapshot"];
const LOSS_SCOPE: &[&str] = &["snapshot", "range"];
const DISCARD_POLICY: &[&str] = &["copy", "hold"];

/// Default of `cbw-timeout`: below the 60 s after which the Windows virtio driver gives up.
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(45);

/// The options of a `copy-before-write` node, but for its children. A job takes the same keys and hands them over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CbwOptions {
    /// `on-cbw-error`.
    pub on_error: OnCbwError,
    /// `cbw-timeout` or `cbw-timeout-ms`; zero: none.
    pub timeout: Duration,
    /// `min-cluster-size` in bytes; 0: by the target.
    pub min_cluster_size: u64,
    /// `granularity` in bytes.
    pub granularity: Option<u64>,
    /// `latency-bound-ms`: longest wait for space; zero: no bound.
    pub latency_bound: Duration,
    /// `loss-scope`.
    pub loss_scope: LossScope,
    /// `discard-policy`.
    pub discard: DiscardPolicy,
}

impl Default for CbwOptions {
    fn default() -> Self {
        Self {
            on_error: OnCbwError::default(),
            timeout: TIMEOUT_DEFAULT,
            min_cluster_size: 0,
            granularity: None,
            latency_bound: Duration::ZERO,
            loss_scope: LossScope::default(),
            discard: DiscardPolicy::default(),
        }
    }
}

impl CbwOptions {
    /// Takes the options out of the tree.
    pub fn take(o: &mut Options) -> Result<Self> {
        if o.contains("bitmap") {
            return Err(
                o.invalid("bitmap", "needs an image with bitmaps, which no driver of this library has yet")
            );
        }
        let mut this = Self::default();
        if let Some(i) = o.take_enum("on-cbw-error", ON_ERROR)? {
            this.on_error = on_error_from(i as u8);
        }
        let seconds = o.take_u64("cbw-timeout")?;
        let millis = o.take_u64("cbw-timeout-ms")?;
        match (seconds, millis) {
            (Some(_), Some(_)) => {
                return Err(o.invalid("cbw-timeout-ms", "excludes 'cbw-timeout'"));
            }
            (Some(s), None) => this.timeout = Duration::from_secs(s),
            (None, Some(ms)) => this.timeout = Duration::from_millis(ms),
            (None, None) => {}
        }
        this.min_cluster_size = o.take_size("min-cluster-size")?.unwrap_or(0);
        this.granularity = o.take_size("granularity")?;
        if let Some(ms) = o.take_u64("latency-bound-ms")? {
            this.latency_bound = Duration::from_millis(ms);
        }
        if let Some(i) = o.take_enum("loss-scope", LOSS_SCOPE)? {
            this.loss_scope = loss_scope_from(i as u8);
        }
        if let Some(i) = o.take_enum("discard-policy", DISCARD_POLICY)? {
            this.discard = discard_from(i as u8);
        }
        Ok(this)
    }

    /// The wish for a granule over this target.
    pub(super) fn granule_wish(&self, target_cluster: u64, target_is_cache: bool) -> GranuleWish {
        let Self { granularity, min_cluster_size, .. } = *self;
        GranuleWish { granularity, min_cluster_size, target_cluster, target_is_cache }
    }
}

/// The options in force. Relaxed throughout: a change is seen by the requests that come a little later.
#[derive(Debug)]
pub struct Live {
    on_error: AtomicU8,
    loss_scope: AtomicU8,
    discard: AtomicU8,
    timeout_ns: AtomicU64,
    latency_bound_ns: AtomicU64,
}

impl Live {
    /// The options as opened.
    pub fn new(o: &CbwOptions) -> Self {
        Self {
            on_error: AtomicU8::new(o.on_error as u8),
            loss_scope: AtomicU8::new(o.loss_scope as u8),
            discard: AtomicU8::new(o.discard as u8),
            timeout_ns: AtomicU64::new(nanos(o.timeout)),
            latency_bound_ns: AtomicU64::new(nanos(o.latency_bound)),
        }
    }

    /// `on-cbw-error`.
    pub fn on_error(&self) -> OnCbwError {
        on_error_from(self.on_error.load(Relaxed))
    }

    /// `loss-scope`.
    pub fn loss_scope(&self) -> LossScope {
        loss_scope_from(self.loss_scope.load(Relaxed))
    }

    /// `discard-policy`.
    pub fn discard(&self) -> DiscardPolicy {
        discard_from(self.discard.load(Relaxed))
    }

    /// When a request that arrived at `arrived` has waited long enough (S34).
    pub fn deadline(&self, arrived: Instant) -> Option<Instant> {
        after(arrived, self.timeout_ns.load(Relaxed))
    }

    /// When a wait for space that begins now has lasted long enough (S46).
    pub fn space_deadline(&self, now: Instant) -> Option<Instant> {
        after(now, self.latency_bound_ns.load(Relaxed))
    }

    /// Sets a live option; `false` if there is none of that name.
    pub fn set(&self, key: &str, value: &str) -> Result<bool> {
        if !CBW_PROPS.find(key).is_some_and(|p| p.states.contains(PropStates::LIVE)) {
            return Ok(false);
        }
        let mut text = Options::default();
        text.set(key, value);
        let new = CbwOptions::take(&mut text)?;
        match key {
            "on-cbw-error" => self.on_error.store(new.on_error as u8, Relaxed),
            "loss-scope" => self.loss_scope.store(new.loss_scope as u8, Relaxed),
            "discard-policy" => self.discard.store(new.discard as u8, Relaxed),
            "latency-bound-ms" => self.latency_bound_ns.store(nanos(new.latency_bound), Relaxed),
            "cbw-timeout" | "cbw-timeout-ms" => self.timeout_ns.store(nanos(new.timeout), Relaxed),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// A live option as text.
    pub fn get(&self, key: &str) -> Option<String> {
        Some(match key {
            "on-cbw-error" => ON_ERROR[usize::from(self.on_error.load(Relaxed))].into(),
            "loss-scope" => LOSS_SCOPE[usize::from(self.loss_scope.load(Relaxed))].into(),
            "discard-policy" => DISCARD_POLICY[usize::from(self.discard.load(Relaxed))].into(),
            "latency-bound-ms" => (self.latency_bound_ns.load(Relaxed) / 1_000_000).to_string(),
            "cbw-timeout" => (self.timeout_ns.load(Relaxed) / 1_000_000_000).to_string(),
            "cbw-timeout-ms" => (self.timeout_ns.load(Relaxed) / 1_000_000).to_string(),
            _ => return None,
        })
    }
}

fn on_error_from(value: u8) -> OnCbwError {
    if value == OnCbwError::BreakGuestWrite as u8 {
        OnCbwError::BreakGuestWrite
    } else {
        OnCbwError::BreakSnapshot
    }
}

fn loss_scope_from(value: u8) -> LossScope {
    if value == LossScope::Range as u8 { LossScope::Range } else { LossScope::Snapshot }
}

fn discard_from(value: u8) -> DiscardPolicy {
    if value == DiscardPolicy::Hold as u8 { DiscardPolicy::Hold } else { DiscardPolicy::Copy }
}

/// Zero stays zero, which stands for "none"; what does not fit is as good as forever.
fn nanos(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}

fn after(start: Instant, ns: u64) -> Option<Instant> {
    (ns > 0).then(|| start.after(Duration::from_nanos(ns)))
}

const LIVE: PropStates = PropStates::OPEN.union(PropStates::LIVE);

/// Options of the driver.
pub static CBW_PROPS: PropTable = PropTable {
    driver: "copy-before-write",
    props: &[
        Prop {
            name: "file",
            ty: PropType::Node,
            default: REQUIRED,
            states: PropStates::OPEN,
            doc: "The disk whose content at one instant is kept",
        },
        Prop {
            name: "target",
            ty: PropType::Node,
            default: REQUIRED,
            states: PropStates::OPEN,
            doc: "Where old data goes; at least as large as the disk",
        },
        Prop {
            name: "on-cbw-error",
            ty: PropType::Enum(ON_ERROR),
            default: "break-snapshot",
            states: LIVE,
            doc: "What gives way when old data cannot be copied",
        },
        Prop {
            name: "cbw-timeout",
            ty: PropType::Int,
            default: "45",
            states: LIVE,
            doc: "Longest time in seconds that a copy may hold a guest write, 0 = no limit",
        },
        Prop {
            name: "cbw-timeout-ms",
            ty: PropType::Int,
            default: "",
            states: LIVE,
            doc: "The same in milliseconds; one of the two",
        },
        Prop {
            name: "min-cluster-size",
            ty: PropType::Size,
            default: "0",
            states: PropStates::OPEN,
            doc: "Smallest unit of copying, a power of two, 0 = by the target",
        },
        Prop {
            name: "granularity",
            ty: PropType::Size,
            default: "",
            states: PropStates::OPEN,
            doc: "Unit of copying, from 4 KiB; below the target's cluster only over a ram-cache",
        },
        Prop {
            name: "latency-bound-ms",
            ty: PropType::Int,
            default: "0",
            states: LIVE,
            doc: "Longest wait for space in the target before the error policy is applied, 0 = no bound",
        },
        Prop {
            name: "loss-scope",
            ty: PropType::Enum(LOSS_SCOPE),
            default: "snapshot",
            states: LIVE,
            doc: "Whether an error costs the whole snapshot or the range concerned",
        },
        Prop {
            name: "discard-policy",
            ty: PropType::Enum(DISCARD_POLICY),
            default: "copy",
            states: LIVE,
            doc: "Whether a discard copies old data first or does nothing where it would have to",
        },
        Prop {
            name: "granule",
            ty: PropType::Size,
            default: "",
            states: PropStates::READ_ONLY,
            doc: "Unit of copying in use, in bytes",
        },
        Prop {
            name: "state",
            ty: PropType::Enum(&["active", "broken", "ended"]),
            default: "",
            states: PropStates::READ_ONLY,
            doc: "Whether the snapshot is kept",
        },
    ],
};

#[cfg(test)]
mod tests {
    use super::*;

    fn take(text: &str) -> Result<CbwOptions> {
        let mut o = Options::parse(text)?;
        let taken = CbwOptions::take(&mut o)?;
        o.finish()?;
        Ok(taken)
    }

    #[test]
    fn the_property_table_is_sound_and_its_defaults_are_those_of_the_code() {
        CBW_PROPS.check().unwrap();
        let mut text = Options::default();
        for p in CBW_PROPS.props.iter().filter(|p| !p.default.is_empty() && p.default != REQUIRED) {
            text.set(p.name, p.default);
        }
        assert_eq!(CbwOptions::take(&mut text).unwrap(), CbwOptions::default());
        assert!(text.finish().is_ok());
    }

    #[test]
    fn timeouts_have_64_bits_and_exclude_each_other() {
        let o = take("cbw-timeout=18446744073709551615").unwrap();
        assert_eq!(o.timeout, Duration::from_secs(u64::MAX));
        let p = Live::new(&o);
        assert_eq!(p.deadline(Instant(7)), Some(Instant(u64::MAX)), "saturates");
        assert_eq!(
            take("cbw-timeout-ms=4294967296000").unwrap().timeout,
            Duration::from_millis(4294967296000)
        );
        let e = take("cbw-timeout=1,cbw-timeout-ms=1000").unwrap_err();
        assert!(e.to_string().contains("cbw-timeout-ms"), "{e}");
        assert_eq!(Live::new(&take("cbw-timeout=0").unwrap()).deadline(Instant(7)), None);
        assert_eq!(Live::new(&CbwOptions::default()).deadline(Instant(0)), Some(Instant(45_000_000_000)));
    }

    #[test]
    fn live_options_are_set_and_read_by_name_and_others_are_not() {
        let p = Live::new(&CbwOptions::default());
        for (key, value) in [
            ("on-cbw-error", "break-guest-write"),
            ("loss-scope", "range"),
            ("discard-policy", "hold"),
            ("latency-bound-ms", "70"),
            ("cbw-timeout", "3"),
            ("cbw-timeout-ms", "1500"),
        ] {
            assert!(p.set(key, value).unwrap(), "{key}");
            assert_eq!(p.get(key).as_deref(), Some(value), "{key}");
        }
        assert_eq!((p.on_error(), p.loss_scope()), (OnCbwError::BreakGuestWrite, LossScope::Range));
        assert_eq!(p.discard(), DiscardPolicy::Hold);
        assert_eq!(p.deadline(Instant(0)), Some(Instant(1_500_000_000)));
        assert!(!p.set("granularity", "64k").unwrap());
        let e = p.set("loss-scope", "none").unwrap_err();
        assert!(e.to_string().contains("loss-scope"), "{e}");
    }
}
