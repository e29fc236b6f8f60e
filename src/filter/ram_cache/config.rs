//! Options of the cache, what of them can change while it is in use, and the sizes that follow from them.

use crate::error::{Error, Result};
use crate::limits::BATCH_LEN;
use crate::options::props::REQUIRED;
use crate::options::{Options, Prop, PropStates, PropTable, PropType};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// What to do when a reservation cannot be met (S46).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Overflow {
    /// Wait for space, first come, first served.
    Wait = 0,
    /// Move what is drained last to the spill file.
    Spill = 1,
    /// Write to the file before the request is acknowledged.
    WriteThrough = 2,
    /// Refuse: the reservation fails with `cache-full`, and the owner of the snapshot breaks it.
    BreakSnapshot = 3,
}

const OVERFLOWS: [&str; 4] = ["wait", "spill", "write-through", "break-snapshot"];
const SPILL_OVERFLOWS: [&str; 3] = ["wait", "write-through", "break-snapshot"];
const DELAY_MS_MAX: u64 = 3_600_000;
const BOUND_MS_MAX: u64 = 86_400_000;
const WORKERS_MAX: u64 = 256;

/// Memory that a piece of the index costs: key, piece, its share of the map's nodes and of its neighbours' half-empty ones.
pub(super) const PIECE_COST: u64 = 256;
/// Granule for which a cache must have room (S44): the default of copy-before-write.
const GRANULE: u64 = 64 << 10;

/// Options of a cache, without its nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheOptions {
    /// Bytes that the cache may occupy, everything included; 0: pass through.
    pub capacity: u64,
    /// Per cent of the capacity at which drain is forced.
    pub high_watermark: u64,
    /// Per cent of the capacity below which drain is lazy.
    pub low_watermark: u64,
    /// First step when the cache is full.
    pub overflow: Overflow,
    /// Bytes of the spill file.
    pub spill_quota: u64,
    /// The step after a full spill file.
    pub spill_overflow: Overflow,
    /// How long a lazy drain waits for neighbours.
    pub drain_delay_ms: u64,
    /// Writes to the file at a time.
    pub drain_workers: u64,
    /// Per cents at whose crossing an event is posted.
    pub occupancy_events: Vec<u64>,
    /// Longest wait for space before the next step is taken; 0: no bound.
    pub latency_bound_ms: u64,
}

impl Default for CacheOptions {
    fn default() -> Self {
        Self {
            capacity: 256 << 20,
            high_watermark: 80,
            low_watermark: 60,
            overflow: Overflow::Wait,
            spill_quota: 0,
            spill_overflow: Overflow::Wait,
            drain_delay_ms: 100,
            drain_workers: 16,
            occupancy_events: vec![50, 80, 95],
            latency_bound_ms: 0,
        }
    }
}

impl CacheOptions {
    /// Takes what it knows out of `options`; `has_spill` says whether a spill file or node is given.
    pub fn take(options: &mut Options, has_spill: bool) -> Result<Self> {
        let d = Self::default();
        let quota = options.take_size("spill-quota")?;
        let then = options.take_enum("spill-overflow", &SPILL_OVERFLOWS)?;
        let marks = options.take_list_u64("occupancy-events")?.unwrap_or(d.occupancy_events);
        let taken = Self {
            capacity: options.take_size("capacity")?.unwrap_or(d.capacity),
            high_watermark: options.take_u64_in("high-watermark", 1..=100)?.unwrap_or(d.high_watermark),
            low_watermark: options.take_u64_in("low-watermark", 0..=99)?.unwrap_or(d.low_watermark),
            overflow: options
                .take_enum("overflow", &OVERFLOWS)?
                .map_or(d.overflow, |i| overflow(OVERFLOWS[i])),
            spill_quota: quota.unwrap_or_default(),
            spill_overflow: then.map_or(d.spill_overflow, |i| overflow(SPILL_OVERFLOWS[i])),
            drain_delay_ms: options
                .take_u64_in("drain-delay-ms", 0..=DELAY_MS_MAX)?
                .unwrap_or(d.drain_delay_ms),
            drain_workers: options.take_u64_in("drain-workers", 1..=WORKERS_MAX)?.unwrap_or(d.drain_workers),
            occupancy_events: marks,
            latency_bound_ms: options
                .take_u64_in("latency-bound-ms", 0..=BOUND_MS_MAX)?
                .unwrap_or(d.latency_bound_ms),
        };
        for (given, key) in [(quota.is_some(), "spill-quota"), (then.is_some(), "spill-overflow")] {
            if given && !has_spill {
                return Err(Error::invalid(format!("option '{key}' needs 'spill'")));
            }
        }
        if has_spill && quota.is_none() {
            return Err(Error::invalid("missing required option 'spill-quota' (with 'spill')"));
        }
        taken.check(has_spill)?;
        Ok(taken)
    }

    /// Refuses what cannot work together.
    pub fn check(&self, has_spill: bool) -> Result<()> {
        if self.low_watermark >= self.high_watermark {
            return Err(Error::invalid(format!(
                "'low-watermark' ({}) must be below 'high-watermark' ({})",
                self.low_watermark, self.high_watermark
            )));
        }
        if self.overflow == Overflow::Spill && !has_spill {
            return Err(Error::invalid(
                "option 'overflow' is 'spill', which needs 'spill' and 'spill-quota'",
            ));
        }
        if self.spill_overflow == Overflow::Spill {
            return Err(Error::invalid("option 'spill-overflow' cannot be 'spill'"));
        }
        if let Some(mark) = self.occupancy_events.iter().find(|m| !(1..=100).contains(*m)) {
            return Err(Error::invalid(format!(
                "option 'occupancy-events' has {mark}, which is no per cent"
            )));
        }
        if self.occupancy_events.len() > 100 {
            return Err(Error::invalid("option 'occupancy-events' has more than 100 elements"));
        }
        if self.capacity == 0 {
            return Ok(());
        }
        let sizes = Sizes::new(self.capacity, has_spill)?;
        if has_spill && self.spill_quota < sizes.batch {
            return Err(Error::invalid(format!(
                "option 'spill-quota' is {}, at least {} are needed with this capacity",
                self.spill_quota, sizes.batch
            )));
        }
        Ok(())
    }
}

/// How a capacity is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    /// What one request reserves at a time (S44), and the size of each buffer set aside (S75).
    pub(super) batch: u64,
    /// What can be reserved.
    pub(super) usable: u64,
    /// Set aside for pieces of the index that nobody reserved.
    pub(super) slack: u64,
    /// Everything set aside: the slack and the buffers.
    pub(super) fixed: u64,
}

impl Sizes {
    pub(super) fn new(capacity: u64, has_spill: bool) -> Result<Self> {
        // Four batches beside the buffers: for write-through and, with a spill file, for reading back.
        let buffers = if has_spill { 2 } else { 1 };
        let page = crate::request::arena::PAGE as u64;
        let batch = (capacity / (5 + buffers) / page * page).min(BATCH_LEN);
        let slack = capacity / 64;
        let fixed = slack + buffers * super::reserve::cost(batch);
        if batch < GRANULE || capacity > i64::MAX as u64 {
            let least = (GRANULE * (5 + buffers)) >> 10;
            return Err(Error::invalid(format!(
                "option 'capacity' is {capacity}: it must be 0 (no cache) or at least {least}k{}",
                if has_spill { " with 'spill'" } else { "" }
            )));
        }
        Ok(Self { batch, usable: capacity - fixed, slack, fixed })
    }
}

/// Options that can change while the cache is in use.
#[derive(Debug)]
pub(super) struct Live {
    options: Mutex<CacheOptions>,
    has_spill: bool,
    overflow: AtomicU8,
    spill_overflow: AtomicU8,
    delay_ms: AtomicU64,
    workers: AtomicU32,
    bound_ms: AtomicU64,
}

impl Live {
    pub(super) fn new(options: CacheOptions, has_spill: bool) -> Self {
        let live = Self {
            options: Mutex::new(options),
            has_spill,
            overflow: AtomicU8::new(0),
            spill_overflow: AtomicU8::new(0),
            delay_ms: AtomicU64::new(0),
            workers: AtomicU32::new(0),
            bound_ms: AtomicU64::new(0),
        };
        live.publish(&live.options.lock());
        live
    }

    pub(super) fn options(&self) -> CacheOptions {
        self.options.lock().clone()
    }

    pub(super) fn overflow(&self) -> Overflow {
        from_u8(self.overflow.load(Relaxed))
    }

    pub(super) fn spill_overflow(&self) -> Overflow {
        from_u8(self.spill_overflow.load(Relaxed))
    }

    pub(super) fn delay(&self) -> Duration {
        Duration::from_millis(self.delay_ms.load(Relaxed))
    }

    pub(super) fn workers(&self) -> usize {
        self.workers.load(Relaxed) as usize
    }

    pub(super) fn bound(&self) -> Option<Duration> {
        let ms = self.bound_ms.load(Relaxed);
        (ms > 0).then(|| Duration::from_millis(ms))
    }

    /// Sets one option; returns all of them as they are now.
    pub(super) fn set(&self, key: &str, value: &str) -> Result<CacheOptions> {
        let prop = PROPS.find(key).filter(|p| p.states.contains(PropStates::LIVE));
        if prop.is_none() {
            return Err(Error::invalid(format!("driver 'ram-cache' has no live option '{key}'")));
        }
        let mut one = Options::empty();
        one.insert(key, value)?;
        let mut now = self.options.lock();
        let mut new = now.clone();
        match key {
            "capacity" => new.capacity = one.require_size(key)?,
            "high-watermark" => new.high_watermark = one.take_u64_in(key, 1..=100)?.unwrap_or_default(),
            "low-watermark" => new.low_watermark = one.take_u64_in(key, 0..=99)?.unwrap_or_default(),
            "overflow" => new.overflow = overflow(OVERFLOWS[one.require_enum(key, &OVERFLOWS)?]),
            "spill-overflow" => {
                new.spill_overflow = overflow(SPILL_OVERFLOWS[one.require_enum(key, &SPILL_OVERFLOWS)?]);
            }
            "drain-delay-ms" => {
                new.drain_delay_ms = one.take_u64_in(key, 0..=DELAY_MS_MAX)?.unwrap_or_default()
            }
            "drain-workers" => new.drain_workers = one.take_u64_in(key, 1..=WORKERS_MAX)?.unwrap_or(1),
            "latency-bound-ms" => {
                new.latency_bound_ms = one.take_u64_in(key, 0..=BOUND_MS_MAX)?.unwrap_or_default();
            }
            _ => new.occupancy_events = one.take_list_u64(key)?.unwrap_or_default(),
        }
        if (new.capacity == 0) != (now.capacity == 0) {
            return Err(Error::invalid("option 'capacity' cannot be changed to or from 0 while in use"));
        }
        new.check(self.has_spill)?;
        self.publish(&new);
        *now = new.clone();
        Ok(new)
    }

    /// Takes a change back.
    pub(super) fn put_back(&self, old: CacheOptions) {
        let mut now = self.options.lock();
        self.publish(&old);
        *now = old;
    }

    pub(super) fn get(&self, key: &str) -> Option<String> {
        let o = self.options.lock();
        Some(match key {
            "capacity" => o.capacity.to_string(),
            "high-watermark" => o.high_watermark.to_string(),
            "low-watermark" => o.low_watermark.to_string(),
            "overflow" => name(o.overflow).to_owned(),
            "spill-quota" => o.spill_quota.to_string(),
            "spill-overflow" => name(o.spill_overflow).to_owned(),
            "drain-delay-ms" => o.drain_delay_ms.to_string(),
            "drain-workers" => o.drain_workers.to_string(),
            "latency-bound-ms" => o.latency_bound_ms.to_string(),
            "occupancy-events" => o.occupancy_events.iter().map(u64::to_string).collect::<Vec<_>>().join(":"),
            _ => return None,
        })
    }

    fn publish(&self, o: &CacheOptions) {
        // Relaxed: each value stands for itself.
        self.overflow.store(o.overflow as u8, Relaxed);
        self.spill_overflow.store(o.spill_overflow as u8, Relaxed);
        self.delay_ms.store(o.drain_delay_ms, Relaxed);
        self.workers.store(o.drain_workers as u32, Relaxed);
        self.bound_ms.store(o.latency_bound_ms, Relaxed);
    }
}

fn name(overflow: Overflow) -> &'static str {
    OVERFLOWS[overflow as usize]
}

fn overflow(name: &str) -> Overflow {
    from_u8(OVERFLOWS.iter().position(|n| *n == name).unwrap_or_default() as u8)
}

fn from_u8(value: u8) -> Overflow {
    match value {
        1 => Overflow::Spill,
        2 => Overflow::WriteThrough,
        3 => Overflow::BreakSnapshot,
        _ => Overflow::Wait,
    }
}

const OPEN: PropStates = PropStates::OPEN;
const LIVE: PropStates = PropStates::OPEN.union(PropStates::LIVE);
const READ: PropStates = PropStates::READ_ONLY;

const fn prop(
    name: &'static str,
    ty: PropType,
    default: &'static str,
    states: PropStates,
    doc: &'static str,
) -> Prop {
    Prop { name, ty, default, states, doc }
}

/// Options of the driver.
pub static PROPS: PropTable = PropTable {
    driver: "ram-cache",
    props: &[
        prop("file", PropType::Node, REQUIRED, OPEN, "The node below"),
        prop(
            "capacity",
            PropType::Size,
            "256M",
            LIVE,
            "Bytes that the cache may occupy, metadata and buffers included; 0 passes through",
        ),
        prop(
            "high-watermark",
            PropType::Int,
            "80",
            LIVE,
            "Per cent of the capacity at which drain is forced",
        ),
        prop(
            "low-watermark",
            PropType::Int,
            "60",
            LIVE,
            "Per cent of the capacity below which drain is lazy, and down to which a forced drain goes",
        ),
        prop(
            "overflow",
            PropType::Enum(&OVERFLOWS),
            "wait",
            LIVE,
            "What to do when there is no space for a request",
        ),
        prop(
            "spill",
            PropType::Node,
            "",
            OPEN,
            "Directory for an unlinked file (a text with a slash), or a node, to which data is moved when the cache is full",
        ),
        prop("spill-quota", PropType::Size, "", OPEN, "Bytes of the spill file; required with 'spill'"),
        prop(
            "spill-overflow",
            PropType::Enum(&SPILL_OVERFLOWS),
            "wait",
            LIVE,
            "What to do when the spill file is full or fails",
        ),
        prop("drain-delay-ms", PropType::Int, "100", LIVE, "How long a lazy drain waits for neighbours"),
        prop("drain-workers", PropType::Int, "16", LIVE, "Writes to the file at a time"),
        prop(
            "occupancy-events",
            PropType::IntList,
            "50:80:95",
            LIVE,
            "Per cents of the capacity at whose crossing an event is posted",
        ),
        prop(
            "latency-bound-ms",
            PropType::Int,
            "0",
            LIVE,
            "Longest wait for space before the next step is taken (spill, write through, break), 0 for none",
        ),
        prop("batch", PropType::Size, "", READ, "Most bytes that a reservation is sure to get at once"),
        prop("used", PropType::Size, "", READ, "Bytes in use"),
        prop("peak", PropType::Size, "", READ, "Most bytes ever in use"),
        prop("waiters", PropType::Int, "", READ, "Requests that wait for space"),
        prop("spilled", PropType::Size, "", READ, "Bytes in the spill file"),
        prop("zero-markers", PropType::Int, "", READ, "Ranges of zeros held without payload"),
        prop("lost", PropType::Size, "", READ, "Bytes lost"),
    ],
};

#[cfg(test)]
mod tests {
    use super::*;

    fn take(text: &str) -> Result<CacheOptions> {
        let mut options = Options::parse(text)?;
        let spill = options.take_str("spill")?.is_some();
        let taken = CacheOptions::take(&mut options, spill)?;
        options.finish_for(&PROPS)?;
        Ok(taken)
    }

    fn message(text: &str) -> String {
        take(text).expect_err(text).to_string()
    }

    #[test]
    fn the_table_is_sound_and_has_the_defaults() {
        PROPS.check().expect("sound");
        let live = Live::new(CacheOptions::default(), false);
        for p in PROPS.props.iter().filter(|p| !p.default.is_empty() && p.default != REQUIRED) {
            let now = live.get(p.name).expect(p.name);
            let want = if p.name == "capacity" { "268435456" } else { p.default };
            assert_eq!(now, want, "{}", p.name);
        }
    }

    #[test]
    fn options_are_read_and_what_cannot_be_is_refused_by_name() {
        let o = take("capacity=1G,overflow=spill,spill=/tmp,spill-quota=2G,spill-overflow=write-through")
            .unwrap();
        assert_eq!(
            (o.capacity, o.overflow, o.spill_overflow),
            (1 << 30, Overflow::Spill, Overflow::WriteThrough)
        );
        assert_eq!(take("capacity=0").unwrap().capacity, 0);
        for (text, part) in [
            ("high-watermark=101", "high-watermark"),
            ("high-watermark=50,low-watermark=50", "must be below"),
            ("overflow=spill", "needs 'spill'"),
            ("spill-quota=1G", "'spill-quota' needs 'spill'"),
            ("spill=/tmp", "spill-quota"),
            ("spill=/tmp,spill-quota=4k", "'spill-quota' is 4096"),
            ("spill=/tmp,spill-quota=1G,spill-overflow=spill", "spill-overflow"),
            ("occupancy-events=0", "no per cent"),
            ("drain-workers=0", "drain-workers"),
            ("overflow=panic", "overflow"),
            ("capcity=1", "capcity"),
        ] {
            assert!(message(text).contains(part), "{text}: {}", message(text));
        }
    }

    #[test]
    fn a_capacity_without_room_for_four_granules_beside_the_buffers_is_refused() {
        assert!(message("capacity=1").contains("at least 384k"));
        assert!(message("capacity=256k").contains("at least 384k"));
        assert!(message("capacity=384k,spill=/tmp,spill-quota=1G").contains("at least 448k with 'spill'"));
        for capacity in [384 << 10, 1 << 20, 7 << 20, 256 << 20, 1 << 40] {
            for has_spill in [false, true] {
                let Ok(s) = Sizes::new(capacity, has_spill) else {
                    assert!(has_spill && capacity == 384 << 10);
                    continue;
                };
                assert!(s.usable >= 4 * super::super::reserve::cost(s.batch), "{capacity}: {s:?}");
                assert!(s.usable + s.fixed == capacity && s.batch <= BATCH_LEN);
            }
        }
    }

    #[test]
    fn live_options_change_and_the_others_do_not() {
        let live = Live::new(CacheOptions::default(), false);
        live.set("drain-delay-ms", "5").unwrap();
        live.set("overflow", "write-through").unwrap();
        assert_eq!((live.delay(), live.overflow()), (Duration::from_millis(5), Overflow::WriteThrough));
        for (key, value, part) in [
            ("spill-quota", "1G", "no live option"),
            ("used", "1", "no live option"),
            ("capacity", "0", "cannot be changed"),
            ("capacity", "1", "at least"),
            ("low-watermark", "80", "must be below"),
            ("overflow", "spill", "needs 'spill'"),
        ] {
            let error = live.set(key, value).expect_err(key).to_string();
            assert!(error.contains(part), "{key}={value}: {error}");
        }
        assert_eq!(live.get("low-watermark").as_deref(), Some("60"), "a refused change changes nothing");
    }
}
