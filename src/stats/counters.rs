//! The values of `cobweb_stats`.

use super::HistSnapshot;
use serde_json::{Map, Value};

/// Defines [`Stats`] and everything that must name each field, from one list in the order of the C struct.
macro_rules! stats {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of a disk, node or job; fields that do not concern it are 0. The fields are those of `cobweb_stats`, in its
        /// order.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Stats {
            /// The names of the fields, in order.
            pub const NAMES: &'static [&'static str] = &[$(stringify!($name)),*];

            /// The values, in the order of [`Stats::NAMES`].
            pub fn values(&self) -> [u64; Self::NAMES.len()] {
                [$(self.$name),*]
            }
        }
    };
}

stats! {
    /// Reads.
    rd_ops,
    /// Bytes read.
    rd_bytes,
    /// Writes.
    wr_ops,
    /// Bytes written.
    wr_bytes,
    /// Write-zeroes requests.
    zero_ops,
    /// Discard requests.
    discard_ops,
    /// Flush requests.
    flush_ops,
    /// Requests that ended with an error.
    failed,
    /// Requests running now.
    in_flight,
    /// Bytes that guests wrote in protected granules.
    cbw_guest_bytes,
    /// Bytes copied because a guest wrote.
    cbw_copied_bytes,
    /// Copies for a guest write that took longer than `cbw-timeout`.
    cbw_timeouts,
    /// Copies still running after their guest write was let go.
    cbw_late,
    /// Times a guest write waited for a reader of the snapshot (S5).
    cbw_frozen_waits,
    /// Bytes lost (S50).
    lost_bytes,
    /// Bytes of memory in use.
    cache_used,
    /// Most bytes of memory ever in use.
    cache_peak,
    /// Requests waiting for memory now.
    cache_waiters,
    /// Bytes in the spill file.
    cache_spilled,
    /// Bytes stored by the writers of the cache, up to now.
    cache_stored,
    /// Writes that drained the cache, up to now.
    cache_writes,
    /// Time until the cache is full at the present rates, in milliseconds; `u64::MAX` if it does not fill. See
    /// [`super::rate`].
    time_to_full_ms,
}

impl Stats {
    /// The fields as a JSON object, `-` for `_`. A time-to-full of "never" is `null`: `u64::MAX` is not a number that every
    /// reader of JSON can hold.
    pub fn to_json(&self) -> Value {
        let never = |name: &str, value: u64| name == "time_to_full_ms" && value == u64::MAX;
        let pairs = Self::NAMES.iter().zip(self.values()).map(|(name, value)| {
            let json = if never(name, value) { Value::Null } else { Value::from(value) };
            (name.replace('_', "-"), json)
        });
        Value::Object(pairs.collect())
    }

    /// [`Stats::to_json`] with a member `wait`: one histogram for each of `waits` (name and content), see [`super::WAITS`].
    pub fn to_json_with<'a>(&self, waits: impl IntoIterator<Item = (&'a str, HistSnapshot)>) -> Value {
        let mut json = self.to_json();
        let waits: Map<String, Value> =
            waits.into_iter().map(|(name, hist)| (name.to_owned(), hist.to_json())).collect();
        json["wait"] = Value::Object(waits);
        json
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The fields of `cobweb_stats` as the header has them.
    const HEADER: &str = "rd_ops, rd_bytes, wr_ops, wr_bytes, zero_ops, discard_ops, flush_ops, failed, in_flight, \
        cbw_guest_bytes, cbw_copied_bytes, cbw_timeouts, cbw_late, cbw_frozen_waits, lost_bytes, \
        cache_used, cache_peak, cache_waiters, cache_spilled, cache_stored, cache_writes, time_to_full_ms";

    #[test]
    fn the_fields_are_those_of_the_header_in_its_order() {
        assert_eq!(Stats::NAMES.join(", "), HEADER);
        assert_eq!(size_of::<Stats>(), 8 * Stats::NAMES.len());
        let stats = Stats { rd_ops: 1, wr_ops: 3, time_to_full_ms: 22, ..Stats::default() };
        let values = stats.values();
        assert_eq!((values[0], values[2], values[21]), (1, 3, 22));
    }

    #[test]
    fn json_names_have_dashes() {
        let json = Stats { cbw_guest_bytes: 7, ..Stats::default() }.to_json();
        assert_eq!(json.as_object().unwrap().len(), Stats::NAMES.len());
        assert_eq!(json["cbw-guest-bytes"], json!(7));
        assert_eq!(json["time-to-full-ms"], json!(0));
        assert!(json.as_object().unwrap().keys().all(|key| !key.contains('_')));
    }

    #[test]
    fn never_full_is_null_in_json() {
        let stats = Stats { time_to_full_ms: u64::MAX, rd_bytes: u64::MAX, ..Stats::default() };
        assert_eq!(stats.to_json()["time-to-full-ms"], Value::Null);
        assert_eq!(stats.to_json()["rd-bytes"], json!(u64::MAX), "only there");
    }

    #[test]
    fn waits_are_one_member_each() {
        let waits = [("total", HistSnapshot::default()), ("space", HistSnapshot::default())];
        let json = Stats::default().to_json_with(waits);
        assert_eq!(json["wait"]["space"]["count"], json!(0));
        assert_eq!(json["wait"].as_object().unwrap().len(), 2);
    }
}
