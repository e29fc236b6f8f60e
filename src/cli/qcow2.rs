//! What the commands show of a qcow2 image without opening it as a disk, and how names inside it are meant.

use super::image::{ImageFlags, ImageSpec, check_file, describe, error_text, local_time};
use super::info::{Backing, Info};
use super::size::human;
use crate::context::Context;
use crate::error::{Error, Result};
use crate::format::qcow2::Qcow2Node;
use crate::format::qcow2::addr::HostOffset;
use crate::format::qcow2::bitmap::{AUTO, Bitmap, IN_USE, read_directory};
use crate::format::qcow2::feature::{Autoclear, Compatible, Incompatible};
use crate::format::qcow2::header::{Compression, CryptMethod, Header, Purpose};
use crate::format::qcow2::inspect::read_header;
use crate::format::qcow2::snapshot::table::{Snapshot, read_snapshots};
use crate::graph::Disk;
use crate::node::{Node, Vertex};
use crate::options::Options;
use crate::queue::Cx;
use crate::request::{Buffers, Request};
use crate::sync::Arc;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Opens the file below the format, read-only.
pub(super) fn open_file(ctx: &Context, spec: &ImageSpec) -> Result<Arc<Vertex>> {
    let mut tree = spec.tree.clone();
    let mut file = tree
        .take_object("file")?
        .ok_or_else(|| Error::invalid("A block device must be specified for \"file\""))?;
    file.set("read-only", "on");
    ctx.graph().open(Options::from_json(&file.to_json())?)
}

/// The header of an image.
pub(super) async fn header(cx: &Cx, file: &Vertex, purpose: Purpose) -> Result<Header> {
    read_header(cx, &*file.top_node(), purpose).await
}

/// Reads what an image lists.
pub(super) fn listed(ctx: &Arc<Context>, spec: &ImageSpec) -> Result<Listed> {
    let file = open_file(ctx, spec)?;
    let found = ctx.env().block_on(|cx| {
        let file = file.clone();
        async move { examine(&cx, &file.top_node()).await }
    })?;
    ctx.graph().forget_node(&file)?;
    found
}

/// Cluster size, offset of VM state, and `format-specific` data of an image that is open.
pub(super) fn look_open(disk: &Disk) -> Option<(u64, u64, Value)> {
    let top = disk.top()?;
    let image = top.as_any().downcast_ref::<Qcow2Node>()?.image();
    let (file, layout) = (image.file.node(), image.layout);
    let seen = disk.env().block_on(|cx| async move { examine(&cx, &file).await }).and_then(|r| r).ok()?;
    Some((layout.cluster_size(), image.size().next_multiple_of(layout.l2_span()), specific(&seen)))
}

/// What `info` shows of an image.
pub(super) fn look(ctx: &Arc<Context>, spec: ImageSpec) -> Result<Info> {
    let seen = listed(ctx, &spec)?;
    let header = &seen.header;
    warn_void_bitmaps(header);
    let backing = header.backing_name.as_ref().map(|name| {
        let name = text(name);
        Backing { full: full_name(&spec, &name), name, format: header.backing_format().map(text) }
    });
    Ok(Info {
        filename: spec.name,
        format: spec.format,
        virtual_size: header.usable_size(),
        file: None,
        cluster_size: Some(1 << header.cluster_bits),
        encrypted: header.crypt != CryptMethod::None,
        dirty: header.incompatible.contains(Incompatible::DIRTY),
        backing,
        snapshots: seen.snapshots.iter().map(snapshot_json).collect(),
        snapshot_lines: snapshot_lines(&seen.snapshots),
        specific: Some(specific(&seen)),
    })
}

/// Says so if somebody who does not know bitmaps has written to the image.
pub(super) fn warn_void_bitmaps(header: &Header) {
    if header.version > 2 && header.bitmaps().is_some() && !header.autoclear.contains(Autoclear::BITMAPS) {
        let program = super::program();
        eprintln!(
            "{program}: warning: a program that does not know bitmaps has modified this file, so all of them are void\n\
             Their clusters may be leaked."
        );
    }
}

/// Opens what the image is opened with: backing files and data file, down to the last one. A name that leads back ends it, too; whoever opens the chain as a
/// disk complains about that. Errors say of which layer they are as the tools do: once for each layer above.
pub(super) fn require_chain(ctx: &Arc<Context>, spec: &ImageSpec) -> Result<()> {
    let mut here = spec.clone();
    let mut seen: Vec<Option<String>> = Vec::new();
    let below = |depth: usize, e: Error, name: &str| {
        let prefix = "Could not open backing file: ".repeat(depth);
        Error::new(e.errno(), e.code(), format!("{prefix}{}", error_text(&e, name)))
    };
    while here.format == "qcow2" && seen.len() <= crate::limits::GRAPH_DEPTH_MAX && !seen.contains(&here.path)
    {
        let depth = seen.len();
        let in_layer =
            |e| if depth == 0 { e } else { below(depth, e, here.path.as_deref().unwrap_or_default()) };
        let header = layer_header(ctx, &here).map_err(in_layer)?;
        if depth == 0 {
            warn_void_bitmaps(&header);
        }
        let Some(name) = header.backing_name.as_ref().map(|n| full_name(&here, &text(n))) else { break };
        seen.push(here.path.clone());
        let format = header.backing_format().map(text);
        let force_share = spec.tree.peek_str("file.force-share") == Some("on");
        let flags =
            ImageFlags { format: format.as_deref(), read_only: true, force_share, ..Default::default() };
        here = describe(&name, &flags, None).map_err(|e| below(depth + 1, e, &name))?;
    }
    Ok(())
}

/// The header of a layer whose data file, if it has one, can be opened.
fn layer_header(ctx: &Arc<Context>, layer: &ImageSpec) -> Result<Header> {
    let file = open_file(ctx, layer)?;
    let header = ctx.env().block_on(|cx| {
        let file = file.clone();
        async move { header(&cx, &file, Purpose::Repair).await }
    })?;
    ctx.graph().forget_node(&file)?;
    let header = header?;
    if header.incompatible.contains(Incompatible::DATA_FILE) && !layer.tree.contains("data-file") {
        let missing = || Error::invalid("'data-file' is required for this image");
        // Unlike a backing file, QEMU looks for it where the process is.
        check_file(&text(header.data_file_name().ok_or_else(missing)?), true)?;
    }
    Ok(header)
}

/// Bytes of a name, which have no particular encoding, for output.
pub(super) fn text(bytes: impl AsRef<[u8]>) -> String {
    String::from_utf8_lossy(bytes.as_ref()).into_owned()
}

/// The name of a backing file as it would be opened: relative to the image that names it.
pub(super) fn full_name(spec: &ImageSpec, name: &str) -> String {
    beside(spec.path.as_deref(), name)
}

/// A name that an image at `path` contains, as it would be opened.
pub(super) fn beside(path: Option<&str>, name: &str) -> String {
    if has_protocol(name) || name.starts_with('/') {
        return name.to_owned();
    }
    let dir = path.and_then(|p| Path::new(p).parent()).filter(|d| !d.as_os_str().is_empty());
    dir.map_or_else(|| name.to_owned(), |dir| dir.join(name).display().to_string())
}

/// Whether a name is one of a protocol (`nbd:...`, `json:...`) rather than a path.
pub(super) fn has_protocol(name: &str) -> bool {
    let head = name.split('/').next().unwrap_or_default();
    head.contains(':')
}

/// What was read of an image: its header and what that leads to.
pub(super) struct Listed {
    pub(super) header: Header,
    pub(super) snapshots: Vec<Snapshot>,
    pub(super) bitmaps: Vec<Bitmap>,
    luks: Option<Vec<u8>>,
}

async fn examine(cx: &Cx, node: &Arc<dyn Node>) -> Result<Listed> {
    let header = read_header(cx, &**node, Purpose::Use).await?;
    let snapshots = read_snapshots(cx, &**node, &header).await?.entries;
    let bitmaps = match header.bitmaps() {
        Some(pointer) if header.autoclear.contains(Autoclear::BITMAPS) => {
            // Bitmaps that cannot be read never keep anything else from being shown.
            match pointer {
                Ok(p) => read_directory(cx, &**node, &p, &header.layout(), header.usable_size()).await,
                Err(e) => Err(e),
            }
            .unwrap_or_default()
        }
        _ => Vec::new(),
    };
    let luks = match header.crypto(node.limits().size) {
        Some(pointer) if header.crypt == CryptMethod::Luks => {
            let HostOffset(at) = pointer?.offset;
            let bytes = Buffers::alloc(LUKS_LEN, 4096);
            cx.run(&**node, Request::read(at, bytes.clone()))
                .await
                .map_err(|e| Error::io(e, format!("cannot read the LUKS header at {at:#x}")))?;
            Some(bytes.to_vec())
        }
        _ => None,
    };
    Ok(Listed { header, snapshots, bitmaps, luks })
}

/// `format-specific` data, keys in the order in which qemu-img has them.
fn specific(seen: &Listed) -> Value {
    let h = &seen.header;
    let v3 = h.version > 2;
    let mut map = Map::new();
    let mut put = |key: &str, value: Value| {
        map.insert(key.to_owned(), value);
    };
    put("compat", if v3 { "1.1" } else { "0.10" }.into());
    put("compression-type", if h.compression == Compression::Zstd { "zstd" } else { "zlib" }.into());
    if v3 {
        put("lazy-refcounts", h.compatible.contains(Compatible::LAZY_REFCOUNTS).into());
    }
    if !seen.bitmaps.is_empty() {
        put("bitmaps", seen.bitmaps.iter().map(bitmap_json).collect());
    }
    put("refcount-bits", h.layout().refcount_bits().into());
    match h.crypt {
        CryptMethod::None => {}
        CryptMethod::Aes => put("encrypt", json!({"format": "aes"})),
        CryptMethod::Luks => {
            put("encrypt", seen.luks.as_deref().map_or(json!({"format": "luks"}), luks_json))
        }
    }
    if h.incompatible.contains(Incompatible::DATA_FILE) {
        if let Some(name) = h.data_file_name() {
            put("data-file", text(name).into());
        }
        put("data-file-raw", h.autoclear.contains(Autoclear::RAW_DATA).into());
    }
    if v3 {
        put("corrupt", h.incompatible.contains(Incompatible::CORRUPT).into());
        put("extended-l2", h.incompatible.contains(Incompatible::EXTENDED_L2).into());
    }
    Value::Object(map)
}

fn bitmap_json(b: &Bitmap) -> Value {
    let mut flags = Vec::new();
    if b.flags & IN_USE != 0 || b.broken.is_some() {
        // Either way it cannot be used, and this is the flag that says so.
        flags.push("in-use");
    }
    if b.flags & AUTO != 0 {
        flags.push("auto");
    }
    json!({"flags": flags, "name": text(&b.name), "granularity": 1u64.checked_shl(u32::from(b.granularity_bits)).unwrap_or(0)})
}

fn snapshot_json(s: &Snapshot) -> Value {
    let mut map = Map::new();
    if let Some(icount) = s.icount {
        map.insert("icount".to_owned(), icount.into());
    }
    map.insert("vm-clock-nsec".to_owned(), (s.clock_ns % 1_000_000_000).into());
    map.insert("name".to_owned(), text(&s.name).into());
    map.insert("date-sec".to_owned(), s.date_s.into());
    map.insert("date-nsec".to_owned(), s.date_ns.into());
    map.insert("vm-clock-sec".to_owned(), (s.clock_ns / 1_000_000_000).into());
    map.insert("id".to_owned(), text(&s.id).into());
    map.insert("vm-state-size".to_owned(), s.vm_state_len.into());
    Value::Object(map)
}

/// The table of snapshots as text; nothing without any.
fn snapshot_lines(snapshots: &[Snapshot]) -> Vec<String> {
    if snapshots.is_empty() {
        return Vec::new();
    }
    let line =
        |c: [&str; 6]| format!("{:<7} {:<16} {:>8} {:>19} {:>15} {:>10}", c[0], c[1], c[2], c[3], c[4], c[5]);
    let mut lines = vec!["Snapshot list:".to_owned()];
    lines.push(line(["ID", "TAG", "VM_SIZE", "DATE", "VM_CLOCK", "ICOUNT"]));
    for s in snapshots {
        let (ms, seconds) = (s.clock_ns / 1_000_000 % 1000, s.clock_ns / 1_000_000_000);
        let clock = format!("{:04}:{:02}:{:02}.{ms:03}", seconds / 3600, seconds / 60 % 60, seconds % 60);
        let icount = s.icount.map_or("--".to_owned(), |n| n.to_string());
        let (id, name) = (text(&s.id), text(&s.name));
        lines.push(line([&id, &name, &human(s.vm_state_len), &local_time(s.date_s), &clock, &icount]));
    }
    lines
}

/// Bytes of a LUKS header up to the end of its key slots.
const LUKS_LEN: usize = 592;

/// What a LUKS header says of itself. It has been checked to lie in the file, not to make sense.
fn luks_json(h: &[u8]) -> Value {
    let u32_at = |at: usize| u32::from_be_bytes([h[at], h[at + 1], h[at + 2], h[at + 3]]);
    let words = |at: usize, len: usize| {
        let bytes = h[at..at + len].split(|b| *b == 0).next().unwrap_or_default();
        text(bytes)
    };
    let (cipher, mode, hash) = (words(8, 32), words(40, 32), words(72, 32));
    let key_bits = u64::from(u32_at(108)) * 8;
    let (mode, ivgen) =
        mode.split_once('-').map_or((mode.clone(), String::new()), |(m, i)| (m.to_owned(), i.to_owned()));
    // XTS uses two keys, of which the name counts one.
    let bits = if mode == "xts" { key_bits / 2 } else { key_bits };
    let (ivgen, ivgen_hash) =
        ivgen.split_once(':').map_or((ivgen.clone(), None), |(i, h)| (i.to_owned(), Some(h.to_owned())));
    let slots: Vec<Value> = (0..8usize)
        .map(|n| 208 + n * 48)
        .map(|at| {
            let key_offset = u64::from(u32_at(at + 40)) * 512;
            if u32_at(at) == 0x00ac_71f3 {
                json!({"active": true, "iters": u32_at(at + 4), "key-offset": key_offset, "stripes": u32_at(at + 44)})
            } else {
                json!({"active": false, "key-offset": key_offset})
            }
        })
        .collect();
    let mut map = Map::new();
    let mut put = |key: &str, value: Value| {
        map.insert(key.to_owned(), value);
    };
    put("ivgen-alg", ivgen.into());
    put("detached-header", false.into());
    put("hash-alg", hash.into());
    put("cipher-alg", format!("{cipher}-{bits}").into());
    put("uuid", words(168, 40).into());
    put("format", "luks".into());
    put("cipher-mode", mode.into());
    if let Some(hash) = ivgen_hash {
        put("ivgen-hash-alg", hash.into());
    }
    put("slots", slots.into());
    put("payload-offset", (u64::from(u32_at(104)) * 512).into());
    put("master-key-iters", u32_at(164).into());
    Value::Object(map)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_snapshot_table_has_the_columns_that_scripts_cut_out() {
        let s = Snapshot {
            l1_offset: 0,
            l1_entries: 0,
            id: b"1".to_vec(),
            name: b"s1".to_vec(),
            date_s: 0,
            date_ns: 0,
            clock_ns: 3_723_004_000_000,
            vm_state_len: 0,
            disk_size: None,
            icount: None,
            unknown_extra: Vec::new(),
            extra_len: 0,
        };
        let lines = snapshot_lines(std::slice::from_ref(&s));
        assert_eq!(
            lines[1],
            "ID      TAG               VM_SIZE                DATE        VM_CLOCK     ICOUNT"
        );
        assert!(lines[2].starts_with("1       s1                    0 B "), "{}", lines[2]);
        assert!(lines[2].ends_with("  0001:02:03.004         --"), "{}", lines[2]);
    }

    #[test]
    fn backing_names_are_relative_to_the_image_unless_they_say_otherwise() {
        let spec = |path: &str| ImageSpec {
            tree: Options::empty(),
            name: path.to_owned(),
            path: Some(path.to_owned()),
            format: "qcow2".to_owned(),
            probed: false,
        };
        for (image, name, full) in [
            ("a.q", "b.q", "b.q"),
            ("sub/a.q", "b.q", "sub/b.q"),
            ("/x/a.q", "../b.q", "/x/../b.q"),
            ("sub/a.q", "/b.q", "/b.q"),
            ("sub/a.q", "json:{}", "json:{}"),
            ("sub/a.q", "nbd://h/x", "nbd://h/x"),
            ("sub/a.q", "d/x:y", "sub/d/x:y"),
        ] {
            assert_eq!(full_name(&spec(image), name), full);
        }
    }
}
