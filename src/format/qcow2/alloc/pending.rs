//! Host clusters that the mapping has lost and that are not free yet (rule 4).
//!
//! Who unlinks something puts it here with the number of the first cut that holds the change. When that cut is durable the commit takes it out, waits for
//! those who had looked the place up, punches it if that is wanted, lowers its refcount, and only then is it free.

use crate::units::ByteRange;
use std::collections::VecDeque;

/// Something that was unlinked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unlinked {
    /// Host bytes: whole clusters, or compressed data with any bounds.
    pub range: ByteRange,
    /// What it was; compressed data counts one reference per cluster that it touches.
    pub kind: UnlinkedKind,
    /// Whether the file may give the space back.
    pub punch: bool,
}

/// What was unlinked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnlinkedKind {
    /// Whole clusters.
    Clusters,
    /// Compressed data.
    Compressed,
}

/// The list, in the order of cuts.
#[derive(Debug, Default)]
pub struct Pending {
    list: VecDeque<(u64, Unlinked)>,
}

impl Pending {
    /// Adds what the cut `cut`, the next one to begin, will hold. Clusters that follow each other are put together.
    pub fn push(&mut self, cut: u64, unlinked: Unlinked) {
        debug_assert!(self.list.back().is_none_or(|(last, _)| *last <= cut));
        if let Some((last_cut, last)) = self.list.back_mut()
            && *last_cut == cut
            && (last.kind, last.punch) == (UnlinkedKind::Clusters, unlinked.punch)
            && unlinked.kind == UnlinkedKind::Clusters
            && last.range.end() == unlinked.range.offset
        {
            last.range.len += unlinked.range.len;
            return;
        }
        self.list.push_back((cut, unlinked));
    }

    /// Takes out what cuts up to `done` have made durable.
    pub fn take(&mut self, done: u64) -> Vec<Unlinked> {
        let ready = self.list.partition_point(|(cut, _)| *cut <= done);
        self.list.drain(..ready).map(|(_, unlinked)| unlinked).collect()
    }

    /// Puts back what was taken out and could not be freed; it is durable already.
    pub fn put_back(&mut self, list: &[Unlinked]) {
        for unlinked in list.iter().rev() {
            self.list.push_front((0, *unlinked));
        }
    }

    /// Whether something waits for a cut.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.list.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clusters(offset: u64, len: u64, punch: bool) -> Unlinked {
        Unlinked { range: ByteRange { offset, len }, kind: UnlinkedKind::Clusters, punch }
    }

    #[test]
    fn nothing_leaves_before_its_cut_is_done() {
        let mut p = Pending::default();
        p.push(3, clusters(0, 2, true));
        p.push(3, clusters(2, 1, true));
        p.push(4, clusters(3, 1, true));
        assert_eq!(p.take(2), []);
        assert_eq!(p.take(3), [clusters(0, 3, true)], "neighbours of one cut go together");
        assert_eq!(p.take(3), []);
        assert_eq!((p.take(9), p.is_empty()), (vec![clusters(3, 1, true)], true));
    }

    #[test]
    fn what_is_put_back_comes_first_and_at_once() {
        let mut p = Pending::default();
        p.push(3, clusters(0, 2, true));
        p.push(4, clusters(7, 2, true));
        let taken = p.take(3);
        p.put_back(&taken);
        assert_eq!(p.take(1), taken);
    }

    #[test]
    fn only_clusters_that_are_treated_alike_go_together() {
        let mut p = Pending::default();
        p.push(1, clusters(0, 2, true));
        p.push(1, clusters(2, 1, false));
        p.push(1, Unlinked { kind: UnlinkedKind::Compressed, ..clusters(3, 1, false) });
        p.push(1, clusters(4, 1, false));
        assert_eq!(p.len(), 4);
    }
}
