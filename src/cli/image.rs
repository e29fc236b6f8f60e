//! Opening an image the way qemu-img's flags say it.

use crate::context::Context;
use crate::error::{Error, Result};
use crate::graph::Disk;
use crate::options::Options;
use crate::sync::Arc;

/// What `-f`, `-t`, `-i`, `--image-opts` and `-U` say.
#[derive(Debug, Default)]
pub(super) struct ImageFlags<'a> {
    pub(super) format: Option<&'a str>,
    pub(super) cache: Option<&'a str>,
    pub(super) aio: Option<&'a str>,
    pub(super) image_opts: bool,
    pub(super) force_share: bool,
    pub(super) read_only: bool,
}

/// The option tree for `name`: option text with `image_opts`, else a file with a format above it (raw unless `-f`).
pub(super) fn image_options(name: &str, flags: &ImageFlags<'_>) -> Result<Options> {
    if flags.image_opts {
        if flags.format.is_some() {
            return Err(Error::invalid("--image-opts and --format are mutually exclusive"));
        }
        return Options::parse(name);
    }
    let mut file = Options::empty();
    file.set("driver", "file");
    file.set("filename", name);
    let cache = cache_mode(flags.cache.unwrap_or("writeback"))?;
    file.set("cache.direct", if cache.direct { "on" } else { "off" });
    file.set("cache.no-flush", if cache.no_flush { "on" } else { "off" });
    if let Some(aio) = flags.aio {
        file.set("aio", aio);
    }
    if flags.read_only {
        file.set("read-only", "on");
    }
    if flags.force_share {
        file.set("force-share", "on");
    }
    let mut top = Options::empty();
    top.set("driver", flags.format.unwrap_or("raw"));
    top.set("file", file);
    Ok(top)
}

/// A cache mode of qemu-img's `-t`.
pub(super) struct CacheMode {
    /// O_DIRECT.
    pub(super) direct: bool,
    /// Flushes are ignored.
    pub(super) no_flush: bool,
    /// Each write is flushed (FUA).
    pub(super) write_through: bool,
}

/// Parses `-t`.
pub(super) fn cache_mode(name: &str) -> Result<CacheMode> {
    let (direct, no_flush, write_through) = match name {
        "none" | "off" => (true, false, false),
        "directsync" => (true, false, true),
        "writeback" => (false, false, false),
        "writethrough" => (false, false, true),
        "unsafe" => (false, true, false),
        other => return Err(Error::invalid(format!("invalid cache option: '{other}'"))),
    };
    Ok(CacheMode { direct, no_flush, write_through })
}

/// Opens `name` and attaches a disk of its own to it.
pub(super) fn open_disk(ctx: &Context, name: &str, flags: &ImageFlags<'_>) -> Result<Arc<Disk>> {
    let graph = ctx.graph();
    let node = graph.open(image_options(name, flags)?)?;
    let disk = graph.add_disk("")?;
    graph.insert(&disk, Some(node))?;
    Ok(disk)
}
