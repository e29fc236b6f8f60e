//! The options of a backup (semantics.md, section 4).

use crate::error::{Error, Result};
use crate::job::copy::CopyOptions;
use crate::job::registry::either;
use crate::options::Options;

/// Which granules are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sync {
    /// All.
    Full,
    /// Those that the top layer holds.
    Top,
    /// Only those that the guest is about to overwrite; runs until it is cancelled.
    None,
}

/// Options of one backup, read.
#[derive(Clone, Debug)]
pub(super) struct BackupOptions {
    pub(super) device: String,
    pub(super) target: String,
    pub(super) sync: Sync,
    pub(super) copy: CopyOptions,
    /// Options of the filter, without `target`.
    pub(super) filter: Options,
    /// Whether the target stores what it can compressed.
    pub(super) compress: bool,
    /// Options of the cache that the job puts above the target, without `file`.
    pub(super) cache: Option<Options>,
}

/// Options that the filter reads itself.
const FILTER_KEYS: &[&str] = &[
    "on-cbw-error",
    "cbw-timeout",
    "cbw-timeout-ms",
    "granularity",
    "latency-bound-ms",
    "loss-scope",
    "discard-policy",
];

impl BackupOptions {
    /// Takes what a backup knows; what cannot work is refused here, with the name of the option.
    pub(super) fn take(options: &mut Options) -> Result<Self> {
        let device = options.require_str("device")?;
        let target = options.require_str("target")?;
        let sync = take_sync(options)?;
        refuse_unsupported(options)?;
        let copy = CopyOptions::take(options)?;
        let mut filter = Options::empty();
        filter.set("driver", "copy-before-write");
        if let Some(name) = options.take_str("filter-node-name")? {
            filter.set("node-name", name);
        }
        let cluster = either(options, "min-cluster-size", |o, key| o.take_size(key))?;
        if let Some(cluster) = cluster {
            filter.set("min-cluster-size", cluster);
        }
        for key in FILTER_KEYS {
            if let Some(value) = options.take_value(key) {
                filter.set(key, value);
            }
        }
        let compress = options.take_bool("compress")?.unwrap_or(false);
        Ok(Self { device, target, sync, copy, filter, compress, cache: take_cache(options)? })
    }
}

fn take_sync(options: &mut Options) -> Result<Sync> {
    Ok(match options.require_enum("sync", &["full", "top", "none", "incremental", "bitmap"])? {
        0 => Sync::Full,
        1 => Sync::Top,
        2 => Sync::None,
        n => {
            let name = if n == 3 { "incremental" } else { "bitmap" };
            let text = format!(
                "option 'sync' is '{name}', and there are no dirty bitmaps yet (they come with qcow2)"
            );
            return Err(Error::unsupported(text));
        }
    })
}

fn refuse_unsupported(options: &mut Options) -> Result<()> {
    for key in ["bitmap", "bitmap-mode"] {
        if options.contains(key) {
            return Err(Error::unsupported(format!(
                "option '{key}': there are no dirty bitmaps yet (they come with qcow2)"
            )));
        }
    }
    let on = |options: &mut Options, key: &str| Ok::<_, Error>(options.take_bool(key)?.unwrap_or(false));
    if on(options, "discard-source")? {
        return Err(Error::unsupported(
            "option 'discard-source' is on, and a disk in use cannot be discarded",
        ));
    }
    if either(options, "use-copy-range", |o, key| o.take_bool(key))?.unwrap_or(false) {
        return Err(Error::unsupported("option 'use-copy-range' is on; it is not supported (S40)"));
    }
    Ok(())
}

/// `ram-cache` or `ram-cache.*`.
fn take_cache(options: &mut Options) -> Result<Option<Options>> {
    let Some(mut cache) = options.take_object("ram-cache")? else { return Ok(None) };
    for key in ["driver", "file"] {
        if cache.contains(key) {
            return Err(cache.invalid(key, "is given by the job"));
        }
    }
    cache.set("driver", "ram-cache");
    Ok(Some(cache))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(text: &str) -> Result<BackupOptions> {
        let mut options = Options::parse(&format!("device=vda,target=t,{text}"))?;
        let read = BackupOptions::take(&mut options)?;
        options.finish()?;
        Ok(read)
    }

    #[test]
    fn options_of_the_filter_and_of_the_cache_are_handed_on() {
        let text = "sync=full,cbw-timeout=3,granularity=64k,on-cbw-error=break-guest-write,filter-node-name=f,\
            x-perf.min-cluster-size=128k,x-perf.max-workers=8,ram-cache.capacity=1G,ram-cache.overflow=spill,\
            ram-cache.spill=./spill,ram-cache.spill-quota=20G";
        let o = take(text).expect("all of them are known");
        assert_eq!((o.sync, o.copy.max_workers), (Sync::Full, 8));
        let filter = o.filter.to_json();
        assert_eq!((&filter["driver"], &filter["node-name"]), (&"copy-before-write".into(), &"f".into()));
        assert_eq!((&filter["cbw-timeout"], &filter["min-cluster-size"]), (&"3".into(), &(128 << 10).into()));
        let cache = o.cache.expect("a cache").to_json();
        assert_eq!((&cache["driver"], &cache["capacity"]), (&"ram-cache".into(), &"1G".into()));
        assert_eq!(cache["spill"], "./spill");
    }

    #[test]
    fn what_cannot_work_is_refused_by_name() {
        for (text, name) in [
            ("sync=incremental", "sync"),
            ("sync=bitmap,bitmap=b", "sync"),
            ("sync=half", "sync"),
            ("speed=1", "sync"),
            ("sync=full,bitmap=b", "bitmap"),
            ("sync=full,discard-source=on", "discard-source"),
            ("sync=full,x-perf.use-copy-range=on", "use-copy-range"),
            ("sync=full,max-workers=4,x-perf.max-workers=4", "max-workers"),
            ("sync=full,max-workers=0", "max-workers"),
            ("sync=full,max-chunk=512", "max-chunk"),
            ("sync=full,on-target-error=panic", "on-target-error"),
            ("sync=full,ram-cache.file=x", "ram-cache.file"),
            ("sync=full,ram-cache=x", "ram-cache"),
        ] {
            let e = take(text).expect_err(text);
            assert!(e.to_string().contains(&format!("'{name}'")), "{text}: {e}");
        }
        assert!(take("sync=none,compress=off,x-perf.use-copy-range=off,x-perf.max-chunk=0").is_ok());
    }
}
