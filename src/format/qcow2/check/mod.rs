//! Whether an image is consistent: every reference walked and compared with the refcounts. Never writes.
//!
//! The work has three parts: `walk.rs` finds what the image references (header, active L1, snapshots, LUKS header, bitmaps, the refcount structures
//! themselves), `refs.rs` counts it, `compare.rs` compares the counts with the refcounts and the copied flags with both.
//!
//! Bounds (qcow2.md section 2, points 6 and 7). RAM is bounded by [`CheckOptions::ram`] plus one list of the L2 tables; when the counts need more, the walk is repeated
//! for the rest of the file. Nothing is sized by a header field beyond the bounds of the format. A table that several L1 entries point at
//! (snapshots share most of theirs) is read once and counted as often as it is referenced, so neither many snapshots nor an image made to loop cost more
//! than the tables there are.
//!
//! Findings are reported as they are found, in this order: snapshot table, L1 entries, L2 entries, snapshots, bitmaps, refcount structures, clusters in
//! the order of the file, copied flags.

mod compare;
mod finding;
mod refs;
mod walk;

pub use finding::{Finding, Severity};

use super::header::{Header, Purpose};
use super::inspect::read_header;
use super::snapshot::table::{SnapshotTable, TableError, read_table};
use crate::error::{Error, Result};
use crate::node::Node;
use crate::queue::Cx;

/// How to check.
#[derive(Clone, Copy, Debug)]
pub struct CheckOptions {
    /// Bytes for counting references, and as many for refcount blocks.
    pub ram: usize,
}

impl Default for CheckOptions {
    fn default() -> Self {
        Self { ram: 256 << 20 }
    }
}

/// What was found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// Findings by severity.
    pub corruptions: u64,
    /// Clusters that are counted more often than they are used.
    pub leaks: u64,
    /// Findings of [`Severity::Error`].
    pub errors: u64,
    /// End of the last cluster in use, in bytes.
    pub image_end_offset: u64,
    /// Clusters of the disk.
    pub total_clusters: u64,
    /// Clusters of the disk that have a place in the image, or in its data file.
    pub allocated_clusters: u64,
    /// Those of them that do not follow the one before.
    pub fragmented_clusters: u64,
    /// Those of them that are compressed.
    pub compressed_clusters: u64,
}

/// Is told each finding, as often as it occurs.
pub type Sink<'a> = &'a mut (dyn FnMut(&Finding) + Send);

/// Why a check could not be made.
#[derive(Debug)]
pub enum CheckError {
    /// The image cannot be opened: the header is broken, or not one.
    Open(Error),
    /// The snapshot table cannot be read, so references are unknown.
    Snapshots(TableError, Header),
    /// Something else, after the image had been opened.
    Failed(Error),
}

impl CheckError {
    /// The sentence.
    pub fn into_error(self) -> Error {
        match self {
            Self::Open(e) | Self::Failed(e) => e,
            Self::Snapshots(e, header) => e.into_error(&header),
        }
    }
}

/// Checks the image in `file`. Backing and data files are not looked at.
pub async fn check(
    cx: &Cx,
    file: &dyn Node,
    options: CheckOptions,
    sink: Sink<'_>,
) -> std::result::Result<CheckReport, CheckError> {
    let header = read_header(cx, file, Purpose::Repair).await.map_err(CheckError::Open)?;
    let snapshots = match read_table(cx, file, &header).await {
        Ok(table) => table,
        Err(e) => return Err(CheckError::Snapshots(e, header)),
    };
    walk_and_compare(cx, file, &header, &snapshots, options, sink).await.map_err(CheckError::Failed)
}

async fn walk_and_compare(
    cx: &Cx,
    file: &dyn Node,
    header: &Header,
    snapshots: &SnapshotTable,
    options: CheckOptions,
    sink: Sink<'_>,
) -> Result<CheckReport> {
    let mut report = walk::Report::new(sink);
    let layout = header.layout();
    report.counts.total_clusters = layout.clusters_for(header.usable_size());
    let file_clusters = layout.clusters_for(file.limits().size);
    let mut refcounts = compare::Refcounts::read(cx, file, header, options.ram).await?;
    let tables = walk::tables(cx, file, header, snapshots, &mut report).await?;
    let mut start = 0;
    // Each pass gets on by a page at least, and only pages with references make another one necessary.
    loop {
        let refs = refs::Refs::new(start, file_clusters, options.ram);
        let mut walk = walk::Walk::new(cx, file, header, refs, &mut report, start == 0);
        walk.all(&tables, snapshots, &mut refcounts).await?;
        let refs = walk.into_refs();
        let window = refs.window();
        compare::clusters(cx, file, &refs, &mut refcounts, file_clusters, &mut report).await?;
        start = window.end;
        if start >= file_clusters {
            break;
        }
    }
    report.finish_copied();
    // Whatever the refcounts say, there is a header.
    report.in_use(0, layout.cluster_bits);
    Ok(report.counts)
}
