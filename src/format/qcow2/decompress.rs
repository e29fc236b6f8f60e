//! Decompressed clusters: read, decompressed and kept for the next who asks.
//!
//! A guest that reads a compressed cluster in small pieces would otherwise decompress it once for each. The work on a cluster is done once, whoever asks, in a
//! task of its own. Bounds: [`KEPT_BYTES`] of results (two clusters at least), [`WORK_BYTES`] of work under way; more waits.

use super::compress;
use super::entry::Compressed;
use super::flight::Flight;
use super::header::Compression;
use super::meta_io::read_at;
use crate::error::{IoError, IoResult};
use crate::node::Edge;
use crate::queue::Cx;
use crate::request::{Buffers, Class};
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{Arc, Mutex};
use event_listener::Event;
use std::collections::VecDeque;
use std::fmt;

/// Bytes of decompressed clusters that are kept.
const KEPT_BYTES: u64 = 1 << 20;
/// Bytes that work under way may use; a cluster takes up to three times its size.
const WORK_BYTES: u64 = 24 << 20;
/// Clusters above this are decompressed on the blocking pool.
const INLINE_MAX: u64 = 16 << 10;

/// The decompressed clusters of one image.
pub struct Clusters {
    kind: Compression,
    cluster: u64,
    kept: usize,
    /// Most recently used first.
    list: Mutex<VecDeque<Kept>>,
    working: Permits,
}

struct Kept {
    place: Compressed,
    flight: Arc<Flight<Buffers>>,
}

impl Clusters {
    /// For clusters of `cluster` bytes.
    pub fn new(kind: Compression, cluster: u64) -> Arc<Self> {
        let at_once = (WORK_BYTES / (3 * cluster)).clamp(2, 64) as usize;
        let kept = (KEPT_BYTES / cluster).clamp(2, 64) as usize;
        Arc::new(Self { kind, cluster, kept, list: Mutex::default(), working: Permits::new(at_once) })
    }

    /// The cluster at `place` of `file`, decompressed; a whole cluster, not to be written to.
    pub async fn get(
        self: &Arc<Self>,
        cx: &Cx,
        file: &Edge,
        place: Compressed,
        class: Class,
    ) -> IoResult<Buffers> {
        let flight = self.find(cx, file, place, class);
        let result = flight.wait(cx).await;
        if result.is_err() {
            // The next who asks tries again.
            self.list.lock().retain(|k| !Arc::ptr_eq(&k.flight, &flight));
        }
        result
    }

    /// Forgets what was compressed in the host bytes `offset .. offset + len`. Who writes compressed data there calls it before the entry is linked; a host
    /// cluster that becomes anything else is never looked for here.
    pub fn forget(&self, offset: u64, len: u64) {
        self.list.lock().retain(|k| {
            k.place.offset.get() >= offset.saturating_add(len) || k.place.offset.get() + k.place.len <= offset
        });
    }

    fn find(self: &Arc<Self>, cx: &Cx, file: &Edge, place: Compressed, class: Class) -> Arc<Flight<Buffers>> {
        let mut list = self.list.lock();
        if let Some(at) = list.iter().position(|k| k.place == place) {
            let Some(kept) = list.remove(at) else { unreachable!("found above") };
            let flight = kept.flight.clone();
            list.push_front(kept);
            return flight;
        }
        let (flight, landing) = Flight::start();
        list.push_front(Kept { place, flight: flight.clone() });
        // Those under way stay: somebody waits for them, and they are as many as there are requests.
        let mut at = list.len();
        while list.len() > self.kept && at > 1 {
            at -= 1;
            if list[at].flight.result().is_some() {
                list.remove(at);
            }
        }
        drop(list);
        let (this, file, task) = (self.clone(), file.node(), cx.detached());
        cx.spawn(async move {
            let permit = this.working.take().await;
            let input = Buffers::alloc(place.len as usize, 512);
            let read = read_at(&task, &*file, place.offset, &input, class).await;
            let result = match read {
                Ok(()) => this.unpack(&task, input).await,
                Err(e) => Err(e),
            };
            drop(permit);
            landing.land(result);
        });
        flight
    }

    async fn unpack(&self, cx: &Cx, input: Buffers) -> IoResult<Buffers> {
        let (kind, cluster) = (self.kind, self.cluster as usize);
        let work = move || {
            let mut bytes = vec![0; cluster];
            let done = compress::decompress(kind, &input.to_vec(), &mut bytes);
            done.map(|()| Buffers::from_bytes(&bytes)).map_err(|_| IoError::os(libc::EIO))
        };
        if self.cluster > INLINE_MAX { cx.blocking(work).await? } else { work() }
    }
}

impl fmt::Debug for Clusters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clusters")
    }
}

/// So many at a time.
struct Permits {
    free: AtomicUsize,
    freed: Event,
}

struct Permit<'a>(&'a Permits);

impl Permits {
    fn new(free: usize) -> Self {
        Self { free: AtomicUsize::new(free), freed: Event::new() }
    }

    async fn take(&self) -> Permit<'_> {
        loop {
            if self.try_take() {
                return Permit(self);
            }
            let listener = self.freed.listen();
            if self.try_take() {
                return Permit(self);
            }
            listener.await;
        }
    }

    fn try_take(&self) -> bool {
        self.free.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| n.checked_sub(1)).is_ok()
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.0.free.fetch_add(1, Ordering::AcqRel);
        self.0.freed.notify(1);
    }
}
