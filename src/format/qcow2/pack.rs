//! Compressed writes: whole clusters, compressed, packed into host clusters one behind the other (qcow2.md 3.1 crash rule 11).
//!
//! Only a cluster without a place in the file is stored compressed; another one, and one that does not become shorter, is written as it is. Pieces begin at the
//! file's own blocks (512 bytes at least), so a piece is one write without a read, and what is durable is never written again: that costs half a block a piece, below
//! 1 % with clusters of 64 KiB.
//!
//! The [`Packer`] counts as a user of the host cluster that it fills, so that the cluster is not given to anybody else while its pieces come and go; it leaves when the cluster is
//! full, and at close. With refcounts of one bit there is one piece a cluster.

use super::addr::HostOffset;
use super::alloc::Kind;
use super::alloc::pending::UnlinkedKind;
use super::commit::Commit;
use super::compress::compress;
use super::entry::{Compressed, L2Entry, Plain};
use super::image::Image;
use super::join::join_bounded;
use super::write::How;
use super::writer::Writer;
use crate::error::{IoError, IoResult};
use crate::queue::Cx;
use crate::request::{Buffers, Request};
use crate::sync::atomic::Ordering::Relaxed;
use crate::sync::{Arc, Mutex};
use crate::units::{ByteRange, align_up};

/// Clusters of a request that are compressed side by side.
const AT_ONCE: usize = 4;
/// Clusters above this are compressed on the blocking pool.
const INLINE_MAX: u64 = 4 << 10;

/// The host cluster that is being filled.
#[derive(Debug, Default)]
pub struct Packer {
    filling: Mutex<Option<Filling>>,
}

#[derive(Clone, Copy, Debug)]
struct Filling {
    cluster: HostOffset,
    used: u64,
}

impl Packer {
    /// Room for `len` bytes (whole blocks, less than a cluster) in the cluster that is being filled.
    fn reserve(&self, len: u64, cluster: u64) -> Option<HostOffset> {
        let mut filling = self.filling.lock();
        let now = filling.as_mut().filter(|f| f.used + len <= cluster)?;
        let at = now.cluster.get() + now.used;
        now.used += len;
        Some(HostOffset(at))
    }

    /// From now on `new` is filled, beginning with the end of a piece of `len` bytes if it lies behind the cluster before it. That cluster, and the place of the piece.
    fn advance(&self, new: HostOffset, len: u64, cluster: u64) -> (Option<HostOffset>, Option<HostOffset>) {
        let mut filling = self.filling.lock();
        let old = filling.replace(Filling { cluster: new, used: 0 });
        let joint = old.filter(|f| f.used < cluster && f.cluster.get() + cluster == new.get());
        let place = joint.map(|f| {
            *filling = Some(Filling { cluster: new, used: len - (cluster - f.used) });
            HostOffset(f.cluster.get() + f.used)
        });
        (old.map(|f| f.cluster), place)
    }

    /// Nothing is filled any more; the cluster that was.
    fn retire(&self) -> Option<HostOffset> {
        self.filling.lock().take().map(|f| f.cluster)
    }

    /// Nothing more goes into `cluster`.
    fn close(&self, cluster: HostOffset) {
        if let Some(f) = self.filling.lock().as_mut().filter(|f| f.cluster == cluster) {
            f.used = u64::MAX >> 1;
        }
    }
}

impl Image {
    /// Carries out a write whose clusters may be stored compressed. The range lies on the disk and is not empty.
    pub(super) async fn write_packed(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        req: &Request,
    ) -> IoResult {
        let cluster = self.layout.cluster_size();
        let parts = self.clusters_of(req.range).map(|part| async move {
            let whole =
                part.offset.is_multiple_of(cluster) && (part.len == cluster || part.end() == self.size());
            if whole {
                self.pack_cluster(writer, cx, req, part).await
            } else {
                self.write_part(writer, cx, req, part).await
            }
        });
        join_bounded(parts, AT_ONCE).await
    }

    async fn write_part(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        req: &Request,
        part: ByteRange,
    ) -> IoResult {
        let mut window = self.window_to_change(writer, cx, part).await?;
        let how = How { may_stage: false, follows: false };
        self.write_entered(writer, cx, &mut window, req, part, how).await
    }

    async fn pack_cluster(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        req: &Request,
        part: ByteRange,
    ) -> IoResult {
        let cluster = self.layout.cluster_size();
        let mut bytes = req.bufs.slice((part.offset - req.range.offset) as usize, part.len as usize).to_vec();
        // Behind the end of the disk there are zeros.
        bytes.resize(cluster as usize, 0);
        let kind = self.header.lock().compression;
        let work = move || compress(kind, &bytes);
        let packed = if cluster > INLINE_MAX { cx.blocking(work).await? } else { work() };
        let Some(packed) = packed else { return self.write_part(writer, cx, req, part).await };
        let mut window = self.window_to_change(writer, cx, part).await?;
        if let Some(stage) = writer.stages.get(part.offset) {
            self.drop_stage(writer, &stage).await;
        }
        let old = window.entry(self, part.offset)?;
        if !matches!(&old, L2Entry::Plain(Plain { host: None, .. })) {
            let how = How { may_stage: false, follows: false };
            return self.write_entered(writer, cx, &mut window, req, part, how).await;
        }
        let len = packed.len() as u64;
        let align = u64::from(self.file.get().limits().request_align).clamp(512, 4096).min(cluster);
        let room = align_up(len, align);
        let host = self.find_room_for(writer, cx, room).await?;
        let result = self.write_piece(writer, cx, req, host, packed, room).await;
        if let Err(e) = result {
            writer.alloc.unlink(ByteRange { offset: host.get(), len }, UnlinkedKind::Compressed, false);
            return Err(e);
        }
        // Before the entry can be seen: what was decompressed from here in another life.
        self.clusters.forget(host.get(), room);
        let new = L2Entry::Compressed(Compressed { offset: host, len });
        let ordered = writer.commit.order();
        window.set(self, part.offset, new.encode(&self.layout));
        drop(ordered);
        writer.counters.linked.fetch_add(1, Relaxed);
        drop(window);
        if self.cache.wants_commit() {
            Commit::kick(self, writer, cx);
        }
        Ok(())
    }

    /// A place for `len` bytes, counted.
    async fn find_room_for(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        len: u64,
    ) -> IoResult<HostOffset> {
        let cluster = self.layout.cluster_size();
        let shares = writer.alloc.can_share() && len < cluster;
        loop {
            if shares && let Some(at) = self.share_room(writer, cx, len).await? {
                return Ok(at);
            }
            let grants = writer.alloc.take(cx, Kind::Data, cluster).await?;
            let new = grants.first().map(|g| HostOffset(g.range.offset)).ok_or(IoError::os(libc::ENOSPC))?;
            if !shares {
                return Ok(new);
            }
            // Somebody else may have come first.
            if let Some(at) = self.share_room(writer, cx, len).await? {
                writer.alloc.give_back(ByteRange { offset: new.get(), len: cluster });
                return Ok(at);
            }
            let (old, joint) = writer.packer.advance(new, len, cluster);
            let shared = match joint {
                // Both clusters have the piece.
                Some(at) => {
                    let both = ByteRange { offset: new.get() - cluster, len: 2 * cluster };
                    writer.alloc.share(cx, both).await.map(|shared| shared.then_some(at))
                }
                None => Ok(None),
            };
            self.leave_packed(writer, old);
            if let Some(at) = shared? {
                return Ok(at);
            }
        }
    }

    /// A place for `len` bytes in the cluster that is being filled, counted.
    async fn share_room(&self, writer: &Writer, cx: &Cx, len: u64) -> IoResult<Option<HostOffset>> {
        let cluster = self.layout.cluster_size();
        let Some(at) = writer.packer.reserve(len, cluster) else { return Ok(None) };
        let whole = HostOffset(at.get() / cluster * cluster);
        if writer.alloc.share(cx, ByteRange { offset: whole.get(), len: cluster }).await? {
            return Ok(Some(at));
        }
        // At its maximum.
        writer.packer.close(whole);
        Ok(None)
    }

    /// The packer is no longer a user of this cluster.
    fn leave_packed(&self, writer: &Writer, old: Option<HostOffset>) {
        if let Some(old) = old {
            let range = ByteRange { offset: old.get(), len: self.layout.cluster_size() };
            writer.alloc.unlink(range, UnlinkedKind::Compressed, false);
        }
    }

    /// Before the image is closed: the cluster that is being filled belongs to its pieces alone.
    pub(super) fn retire_packer(&self, writer: &Writer) {
        self.leave_packed(writer, writer.packer.retire());
    }

    async fn write_piece(
        self: &Arc<Self>,
        writer: &Arc<Writer>,
        cx: &Cx,
        req: &Request,
        host: HostOffset,
        mut packed: Vec<u8>,
        room: u64,
    ) -> IoResult {
        packed.resize(room as usize, 0);
        let file = self.file.node();
        if host.get() + room > file.limits().size {
            writer.alloc.extend(cx, host.get() + room).await?;
        }
        cx.run(&*file, Request::write(host.get(), Buffers::from_bytes(&packed)).class(req.class)).await
    }
}
