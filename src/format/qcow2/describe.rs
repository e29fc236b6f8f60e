//! What programs can ask of an open image, as JSON: its format, what it has done, whether it is consistent.

use super::check::{CheckOptions, Finding, check as walk};
use super::feature::{Autoclear, Compatible, Incompatible};
use super::header::Compression;
use super::image::Image;
use crate::error::{Error, Result};
use crate::queue::Cx;
use crate::sync::Arc;
use crate::sync::atomic::Ordering::Relaxed;
use serde_json::{Value, json};

/// Findings that are told one by one.
const FINDINGS_MAX: usize = 100;

/// The format, with the keys of `ImageInfoSpecificQCow2` and those of `ImageInfo` that the header has.
pub(super) fn info(image: &Image) -> Value {
    let h = image.header.lock().clone();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut data = json!({
        "compat": if h.version > 2 { "1.1" } else { "0.10" },
        "compression-type": if h.compression == Compression::Zstd { "zstd" } else { "zlib" },
        "refcount-bits": image.layout.refcount_bits(),
    });
    if h.version > 2 {
        data["lazy-refcounts"] = h.compatible.contains(Compatible::LAZY_REFCOUNTS).into();
        data["corrupt"] = h.incompatible.contains(Incompatible::CORRUPT).into();
        data["extended-l2"] = image.layout.extended.into();
    }
    if h.incompatible.contains(Incompatible::DATA_FILE) {
        if let Some(name) = h.data_file_name() {
            data["data-file"] = text(name).into();
        }
        data["data-file-raw"] = h.autoclear.contains(Autoclear::RAW_DATA).into();
    }
    let mut all = json!({
        "format": "qcow2",
        "virtual-size": image.size(),
        "cluster-size": image.layout.cluster_size(),
        "dirty-flag": h.incompatible.contains(Incompatible::DIRTY),
        "format-specific": {"type": "qcow2", "data": data},
    });
    if let Some(name) = &h.backing_name {
        all["backing-filename"] = text(name.as_ref()).into();
        if let Some(format) = h.backing_format() {
            all["backing-filename-format"] = text(format).into();
        }
    }
    all
}

/// Counters since the image was opened; what concerns writing is 0 for an image that is read only.
pub(super) fn statistics(image: &Image) -> Value {
    let mut all = json!({
        "l2-cache-slices": image.cache.len(),
        "l2-cache-slices-max": image.cache.slices_max(),
        "l2-cache-slice-bytes": 1u64 << image.layout.slice_bits,
        "l2-cache-loads": image.cache.loads(),
        "l2-cache-dirty": image.cache.kept(),
    });
    let Some(w) = image.writer.get() else { return all };
    let c = &w.counters;
    for (key, counter) in [
        ("clusters-linked", &c.linked),
        ("cow-reads", &c.cow_reads),
        ("cow-reads-avoided", &c.cow_avoided),
        ("cow-staged", &c.staged),
        ("cow-joined-writes", &c.joined),
        ("cow-filled", &c.filled),
    ] {
        all[key] = counter.load(Relaxed).into();
    }
    let (refills, end) = w.alloc.statistics();
    all["cow-staged-bytes"] = w.stages.bytes().into();
    all["allocation-runs"] = refills.into();
    all["image-end-offset"] = end.into();
    all["barriers"] = w.commit.barriers().into();
    all
}

/// A check of the whole image.
pub(super) async fn check(cx: &Cx, image: &Arc<Image>) -> Result<Value> {
    image.flush(cx).await.map_err(|e| Error::io(e, "cannot write what is in RAM"))?;
    let mut findings = Vec::new();
    let mut sink = |finding: &Finding| {
        if findings.len() < FINDINGS_MAX {
            findings.push(finding.to_string());
        }
    };
    let file = image.file.node();
    let found = walk(cx, &*file, CheckOptions::default(), &mut sink).await.map_err(|e| e.into_error())?;
    Ok(json!({
        "format": "qcow2",
        "corruptions": found.corruptions,
        "leaks": found.leaks,
        "check-errors": found.errors,
        "image-end-offset": found.image_end_offset,
        "total-clusters": found.total_clusters,
        "allocated-clusters": found.allocated_clusters,
        "fragmented-clusters": found.fragmented_clusters,
        "compressed-clusters": found.compressed_clusters,
        "findings": findings,
    }))
}
