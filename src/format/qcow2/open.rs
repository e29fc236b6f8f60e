//! From options to open images: validation, bounds, and the chain below (qcow2.md sections 2 and 5).
//!
//! Opening an image reads its first cluster. Tables are read when they are needed. A backing chain is opened one layer after the other, not one inside the
//! other: its depth costs no stack.

use super::addr::HostOffset;
use super::cache::L2Cache;
use super::decompress::Clusters;
use super::feature::Incompatible;
use super::header::{CryptMethod, Header, PEEK_LEN, Purpose, peek};
use super::image::Image;
use super::l1::L1;
use super::meta_io::read_at;
use super::node::Qcow2Node;
use super::repair::repair;
use super::settings::{L2_CACHE_DEFAULT_MAX, QCOW2_PROPS, Settings};
use super::writer::Writer;
use crate::error::{Code, Error, Result};
use crate::graph::{Base, Chain, NamedChild, OpenCx};
use crate::node::{Edge, Node};
use crate::options::{Child, Options};
use crate::queue::Cx;
use crate::request::{Buffers, Class};
use crate::sync::atomic::{AtomicBool, AtomicU64};
use crate::sync::{Arc, Mutex};
use arc_swap::ArcSwapOption;
use once_cell::sync::OnceCell;

/// Least L2 cache of a layer in a chain, in bytes.
const CHAIN_CACHE_MIN: u64 = 64 << 10;

/// What a layer stands on.
enum Below {
    /// Nothing.
    Nothing,
    /// An open node.
    Edge(Edge),
    /// A node still to be opened.
    Options(Options),
}

/// Opens the driver `qcow2`.
pub fn open(cx: &OpenCx<'_>, options: Options) -> Result<Arc<dyn Node>> {
    let mut chain = Chain::default();
    let (top, mut below) = open_layer(cx, cx.name(), options, &mut chain, true)?;
    let mut layers: Vec<(String, Arc<Qcow2Node>)> = Vec::new();
    let mut base = loop {
        match below {
            Below::Nothing => break None,
            Below::Edge(edge) => break Some(edge),
            Below::Options(mut options) => {
                if options.peek_str("driver") != Some("qcow2") || options.contains("node-name") {
                    break Some(cx.open_below(options)?);
                }
                options.take_str("driver")?;
                let name = cx.new_name();
                let (layer, next) = open_layer(cx, &name, options, &mut chain, false)?;
                layers.push((name, layer));
                below = next;
            }
        }
    };
    share_memory(&layers);
    let images = layers.iter().map(|(_, layer)| layer.image().clone()).collect();
    // From the bottom up, so that a layer that can be found by name has all that is below it.
    for (name, layer) in layers.into_iter().rev() {
        layer.image().attach(base, Vec::new());
        base = Some(cx.add(name, layer)?);
    }
    top.image().attach(base, images);
    if top.image().is_writable() {
        let image = top.image();
        let writer = cx.env().block_on(|cx| async move { Writer::open(&cx, image).await })??;
        let set = image.writer.set(writer);
        debug_assert!(set.is_ok(), "opened once");
    }
    Ok(top)
}

/// The layers below the top share what one image may use for its L2 tables: the chain map answers for them, so their slices are mostly used once (qcow2.md 5.2).
fn share_memory(layers: &[(String, Arc<Qcow2Node>)]) {
    let each = (L2_CACHE_DEFAULT_MAX / layers.len().max(1) as u64).max(CHAIN_CACHE_MIN);
    for (_, layer) in layers {
        let image = layer.image();
        let sizes = image.settings.cache_sizes(&image.layout, image.size());
        if !image.settings.sizes_are_given() && sizes.l2 > each {
            image.cache.set_capacity(each);
        }
    }
}

/// Bytes read at once for the header.
const FIRST_READ: usize = 64 << 10;

/// Reads and validates the header of the image in `file`.
pub async fn read_header(cx: &Cx, file: &dyn Node, purpose: Purpose) -> Result<Header> {
    let len = file.limits().size;
    let failed = |e| Error::io(e, "cannot read the header");
    // Mostly this is all of cluster 0.
    let first = Buffers::alloc(FIRST_READ, 4096);
    read_at(cx, file, HostOffset(0), &first, Class::Guest).await.map_err(failed)?;
    let mut bytes = [0; PEEK_LEN];
    first.slice(0, PEEK_LEN).copy_to_slice(&mut bytes);
    let size = 1usize << peek(&bytes)?;
    if size <= FIRST_READ {
        return Header::parse(&first.slice(0, size).to_vec(), len, purpose);
    }
    // All of a larger one that is not zeros, unless it is longer than any header in practice.
    let mut start = first.to_vec();
    start.resize(size, 0);
    if let Ok(header) = Header::parse(&start, len, purpose)
        && header.encode().is_ok_and(|bytes| bytes.len() + 8 <= FIRST_READ)
    {
        return Ok(header);
    }
    let cluster = Buffers::alloc(size, 4096);
    read_at(cx, file, HostOffset(0), &cluster, Class::Guest).await.map_err(failed)?;
    Header::parse(&cluster.to_vec(), len, purpose)
}

fn open_layer(
    cx: &OpenCx<'_>,
    name: &str,
    mut o: Options,
    chain: &mut Chain,
    is_top: bool,
) -> Result<(Arc<Qcow2Node>, Below)> {
    let settings = Settings::take(&mut o)?;
    let file = cx.require_child(&mut o, "file")?;
    let node = file.node();
    if is_top {
        chain.enter_node(&node);
    }
    let header = cx.env().block_on(|cx| {
        let node = node.clone();
        async move { read_header(&cx, &*node, Purpose::Use).await }
    })?;
    let mut header = header.map_err(|e| in_image(&node, e))?;
    check_use(&node, &header, &settings)?;
    let file = Arc::new(file);
    if is_writable(&node, &settings) && header.incompatible.contains(Incompatible::DIRTY) {
        let (edge, old) = (file.clone(), header.clone());
        let repaired = cx.env().block_on(|cx| async move { repair(&cx, &edge, &old).await })?;
        let (new, repaired) = repaired.map_err(|e| in_image(&node, e))?;
        header = new;
        cx.env().log(2, "qcow2", &format!("{name}: the image was not closed cleanly; {repaired}"));
    }
    let layout = settings.slices(header.layout()).map_err(|e| in_image(&node, e))?;
    let data_file = open_data_file(cx, &mut o, &settings, &node, &header, chain)?;
    let below = find_backing(cx, &mut o, &settings, &node, &header, chain)?;
    o.finish_for(&QCOW2_PROPS)?;
    let size = header.usable_size();
    // More entries than the disk needs are for vmstate, which only a writable image has a use for.
    let l1_entries = layout.l1_entries_for(size)?;
    let keys = l1_entries * layout.slices_per_table() as u64;
    let part = node.limits().request_align.clamp(512, 4096);
    let sizes = settings.cache_sizes(&layout, size);
    let image = Image {
        name: name.to_owned(),
        layout,
        size: AtomicU64::new(size),
        data_file,
        backing: OnceCell::new(),
        layers: OnceCell::new(),
        chain: ArcSwapOption::empty(),
        chain_tried: AtomicBool::new(false),
        watchers: Mutex::default(),
        l1: Arc::new(L1::new(header.l1_offset, l1_entries as usize)),
        cache: L2Cache::new(layout, keys, file.clone(), sizes.l2, part, settings.clean_interval),
        clusters: Clusters::new(header.compression, layout.cluster_size()),
        grace: Arc::default(),
        settings,
        read_only: AtomicBool::new(!is_writable(&node, &settings)),
        writer: OnceCell::new(),
        corrupt: AtomicBool::new(header.incompatible.contains(Incompatible::CORRUPT)),
        corruption_told: AtomicBool::new(false),
        last_error: Default::default(),
        env: Arc::downgrade(cx.env()),
        file,
        header: Mutex::new(header),
    };
    Ok((Arc::new(Qcow2Node::new(Arc::new(image))), below))
}

/// Whether the image can be used the way the options ask for.
fn check_use(file: &Arc<dyn Node>, header: &Header, settings: &Settings) -> Result<()> {
    if header.crypt != CryptMethod::None {
        return Err(in_image(file, Error::unsupported("encrypted images are not supported yet")));
    }
    if settings.lazy_refcounts == Some(true) && header.version < 3 {
        let text = "option 'lazy-refcounts' needs an image of version 3";
        return Err(in_image(file, Error::invalid(text)));
    }
    let bits = header.incompatible;
    if is_writable(file, settings) && bits.contains(Incompatible::CORRUPT) {
        let text = "the image is marked as damaged; repair it, or open it with read-only=on".to_owned();
        return Err(in_image(file, Error::new(libc::EACCES, Code::ReadOnly, text)));
    }
    Ok(())
}

/// Whether the image is to be written.
fn is_writable(file: &Arc<dyn Node>, settings: &Settings) -> bool {
    !settings.read_only && !file.limits().read_only
}

/// The external data file: what the caller gives, or what the image names if that may be opened.
fn open_data_file(
    cx: &OpenCx<'_>,
    o: &mut Options,
    settings: &Settings,
    file: &Arc<dyn Node>,
    header: &Header,
    chain: &mut Chain,
) -> Result<Option<Edge>> {
    let wanted = header.incompatible.contains(Incompatible::DATA_FILE);
    if !wanted {
        return match o.take_child("data-file")? {
            None | Some(Child::Null) => Ok(None),
            Some(_) => Err(o.invalid("data-file", "is given, but the image has no external data file")),
        };
    }
    if let Some(edge) = cx.child(o, "data-file")? {
        return Ok(Some(edge));
    }
    let Some(name) = header.data_file_name() else {
        return Err(in_image(file, Error::invalid("the image names no data file; give 'data-file'")));
    };
    let named = NamedChild {
        key: "data-file",
        structure: "data file name",
        name,
        format: Some(b"raw"),
        base: Base::Process,
        image: file,
    };
    let read_only = !is_writable(file, settings);
    let options = cx.resolve_named(&named, settings.implicit_open, read_only, chain)?;
    cx.open_below(options).map(Some)
}

/// What is below: what the caller gives, or what the image names if that may be opened.
fn find_backing(
    cx: &OpenCx<'_>,
    o: &mut Options,
    settings: &Settings,
    file: &Arc<dyn Node>,
    header: &Header,
    chain: &mut Chain,
) -> Result<Below> {
    // Options without a place for the data stand for those of the node that the image names.
    let partial =
        matches!(o.peek_str("backing.driver"), Some("qcow2" | "raw")) && !o.contains("backing.file");
    let given = if partial { None } else { o.take_child("backing")? };
    match given {
        Some(Child::Null) => return Ok(Below::Nothing),
        Some(Child::Inline(mut options)) => {
            // What the caller gives is opened; that it is in the chain matters for the names below it.
            chain.enter(&options);
            inherit_policy(&mut options, settings);
            return Ok(Below::Options(options));
        }
        Some(Child::Name(name)) => return Ok(Below::Edge(Edge::to_vertex(cx.graph().place(&name)?))),
        None => {}
    }
    let extra = if partial { o.take_object("backing")? } else { None };
    let Some(name) = &header.backing_name else {
        return match extra {
            None => Ok(Below::Nothing),
            Some(_) => Err(o.invalid("backing", "is given without a file, and the image names none")),
        };
    };
    let format = match &extra {
        Some(extra) => extra.peek_str("driver").map(str::as_bytes),
        None => header.backing_format(),
    };
    let named = NamedChild {
        key: "backing",
        structure: "backing file name",
        name,
        format,
        base: Base::Image,
        image: file,
    };
    let mut options = cx.resolve_named(&named, settings.implicit_open, true, chain)?;
    inherit_policy(&mut options, settings);
    if let Some(extra) = extra {
        let serde_json::Value::Object(map) = extra.to_json() else { return Ok(Below::Options(options)) };
        for (key, value) in map.into_iter().filter(|(key, _)| key != "driver") {
            options.set(&key, value);
        }
    }
    Ok(Below::Options(options))
}

/// What may be opened goes for the whole chain, unless the options of a layer say otherwise.
fn inherit_policy(options: &mut Options, settings: &Settings) {
    if let Some(policy) = settings.implicit_open
        && options.peek_str("driver") == Some("qcow2")
        && !options.contains("implicit-open")
    {
        options.set("implicit-open", policy.name());
    }
}

/// Puts the image's file name before an error.
fn in_image(file: &Arc<dyn Node>, e: Error) -> Error {
    match file.get("filename") {
        Some(name) => Error::new(e.errno(), e.code(), format!("image '{name}': {}", e.full_text())),
        None => e,
    }
}
