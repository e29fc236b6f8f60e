//! An open image: what all its requests share.

use super::cache::L2Cache;
use super::chain::ChainMap;
use super::decompress::Clusters;
use super::header::Header;
use super::l1::{L1, L1Table};
use super::layout::Layout;
use super::map::Stop;
use super::settings::Settings;
use super::writer::Writer;
use crate::error::{IoError, IoResult};
use crate::events::{Event, EventKind};
use crate::inflight::Grace;
use crate::node::{Edge, Node};
use crate::queue::{Cx, Env};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Arc, Mutex, Weak};
use crate::units::ByteRange;
use arc_swap::ArcSwapOption;
use once_cell::sync::OnceCell;
use std::fmt;

/// State of one layer. Everything is for the whole folder to use; who writes keeps to the order of `qcow2.md` 3.2.
pub struct Image {
    /// Name of the node, for messages and events.
    pub name: String,
    /// The header as it is in the file or will be (rule 17: all writes of the header area are built from this copy).
    pub header: Mutex<Header>,
    /// Shape of the tables.
    pub layout: Layout,
    /// Bytes of the disk.
    pub size: AtomicU64,
    /// The image file.
    pub file: Arc<Edge>,
    /// The external data file.
    pub data_file: Option<Edge>,
    /// The backing file; set once, before the node is used.
    pub backing: OnceCell<Option<Edge>>,
    /// The layers that were opened with this one, from the top down. Dropped after `backing` and in this order: each layer then lets go of the next
    /// while that is still held here, so that dropping a long chain does not recurse.
    pub layers: OnceCell<Vec<Arc<Image>>>,
    /// The map of the layers below, if there are any it can cover; see [`Image::chain`].
    pub chain: ArcSwapOption<ChainMap>,
    /// Whether it has been tried to make that map.
    pub chain_tried: AtomicBool,
    /// Who wants to know when the image is not read-only any more.
    pub watchers: Mutex<Vec<Weak<AtomicBool>>>,
    /// The active L1 table.
    pub l1: Arc<L1>,
    /// Slices of L2 tables.
    pub cache: Arc<L2Cache>,
    /// Decompressed clusters.
    pub clusters: Arc<Clusters>,
    /// Waits for those who may still use a host cluster. Passes are taken only on writable images: nothing is released on others.
    pub grace: Arc<Grace>,
    /// What the options say.
    pub settings: Settings,
    /// Whether writes are refused.
    pub read_only: AtomicBool,
    /// Damage has been found while the image was open, or the header says so.
    pub corrupt: AtomicBool,
    /// Whether damage has been told as an event.
    pub corruption_told: AtomicBool,
    /// What writing needs; set once, when the image has been opened to be written.
    pub writer: OnceCell<Arc<Writer>>,
    /// Text of the last error, for `last_error` of the node.
    pub last_error: Mutex<Option<String>>,
    /// Where events and log lines go.
    pub env: Weak<Env>,
}

impl Image {
    /// Bytes of the disk.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// The map of the layers below, made when it is first needed and anew when the chain has changed; `None` if there is nothing it could cover.
    pub fn chain(&self) -> Option<Arc<ChainMap>> {
        let chain = self.chain.load_full();
        match chain {
            Some(chain) if chain.is_current() => return Some(chain),
            None if self.chain_tried.load(Ordering::Acquire) => return None,
            _ => {}
        }
        let chain = self.backing().and_then(ChainMap::new);
        self.chain.store(chain.clone());
        self.chain_tried.store(true, Ordering::Release);
        chain
    }

    /// Sets the backing file, or that there is none. Once, before the node is used. `layers` are the images below that were opened with this one.
    pub fn attach(&self, backing: Option<Edge>, layers: Vec<Arc<Image>>) {
        let set = self.backing.set(backing).is_ok() && self.layers.set(layers).is_ok();
        debug_assert!(set, "a layer has one place");
    }

    /// `changed` is set when what the image reads as can change from then on: it becomes writable.
    pub fn watch(&self, changed: &Arc<AtomicBool>) {
        let mut watchers = self.watchers.lock();
        watchers.retain(|w| w.strong_count() > 0);
        watchers.push(Arc::downgrade(changed));
    }

    /// Lets the image be written, or not any more. What stands on it is told first.
    pub fn set_writable(&self, writable: bool) {
        self.read_only.store(!writable, Ordering::Release);
        let watchers = std::mem::take(&mut *self.watchers.lock());
        watchers.iter().filter_map(Weak::upgrade).for_each(|changed| changed.store(true, Ordering::Release));
    }

    /// Whether the image can be written.
    pub fn is_writable(&self) -> bool {
        !self.read_only.load(Ordering::Acquire)
    }

    /// Where guest data lies: the data file, or the image file.
    pub fn data(&self) -> &Edge {
        self.data_file.as_ref().unwrap_or(&self.file)
    }

    /// The backing file, if there is one.
    pub fn backing(&self) -> Option<&Edge> {
        self.backing.get().and_then(Option::as_ref)
    }

    /// The L1 table, read if need be.
    pub async fn l1_table(&self, cx: &Cx) -> IoResult<Arc<L1Table>> {
        self.l1.load(cx, &self.file).await
    }

    /// The error of a table entry that cannot be used: told in words once, as an event and as the node's last error (qcow2.md section 2, rule 2).
    pub fn bad_entry(&self, stop: Stop, l1: &L1Table) -> IoError {
        let text = match stop {
            Stop::BadL1(index, bad) => bad.at("L1 table", l1.offset(), index),
            Stop::BadL2(guest, bad) => {
                let table = l1.entry(self.layout.l1_index(guest), &self.layout).ok().and_then(|e| e.table);
                bad.at("L2 table", table.unwrap_or_default(), self.layout.l2_index(guest))
            }
            // The caller has loaded every slice of the range; one that is missing was evicted by a change of the chain.
            Stop::Miss(key) => format!("L2 slice {key} vanished"),
        };
        let range = match stop {
            Stop::BadL2(guest, _) => ByteRange { offset: guest, len: self.layout.cluster_size() },
            Stop::BadL1(index, _) => {
                ByteRange { offset: index << self.layout.l2_span_bits(), len: self.layout.l2_span() }
            }
            Stop::Miss(_) => ByteRange { offset: 0, len: 0 },
        };
        self.found_corrupt(text, range);
        IoError::os(libc::EIO)
    }

    /// Tells, once, that the image is damaged. `range` are the bytes of the disk concerned.
    pub fn found_corrupt(&self, text: String, range: ByteRange) {
        let env = self.env.upgrade();
        if let Some(env) = &env {
            env.log(0, "qcow2", &format!("node '{}': {text}", self.name));
        }
        *self.last_error.lock() = Some(text);
        // One event: more of them say nothing new.
        self.corrupt.store(true, Ordering::Release);
        if self.corruption_told.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(env) = env {
            let mut event = Event::new(EventKind::Corrupt, self.name.clone());
            event.offset = range.offset;
            event.len = range.len;
            event.errno = libc::EIO;
            event.code = crate::error::Code::Io;
            env.events.post(event);
        }
    }

    /// Whether the host range `offset .. offset + len` of the data lies in its file now.
    pub fn in_data_file(&self, data: &dyn Node, offset: u64, len: u64) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= data.limits().size)
    }
}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Image")
            .field("name", &self.name)
            .field("layout", &self.layout)
            .finish_non_exhaustive()
    }
}
