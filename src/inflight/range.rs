//! Overlap search.

use std::ops::ControlFlow;

use super::chain;
use super::entry::Node;
use super::list::InflightList;
use super::shard::Span;
use crate::sync::atomic::Ordering::Acquire;
use crate::sync::epoch::Guard;
use crate::units::ByteRange;

impl InflightList {
    /// Calls `visit` for every live entry that overlaps `range` and is of one of `kinds`. An entry in several of the chains
    /// searched is met as often. Wait-free, except that the number of entries found is not bounded.
    pub(super) fn search<'g, B>(
        &self,
        range: ByteRange,
        kinds: u8,
        guard: &'g Guard,
        mut visit: impl FnMut(&'g Node, Place) -> ControlFlow<B>,
    ) -> ControlFlow<B> {
        if range.is_empty() {
            return ControlFlow::Continue(());
        }
        let mut look = |head, place| {
            chain::walk(head, guard, |node: &'g Node| {
                // The ticket word is read for the kind only, which never changes.
                if node.range.overlaps(range)
                    && kinds >> node.ticket().kind() & 1 != 0
                    && !node.waiters.is_closed(guard)
                {
                    visit(node, place)
                } else {
                    ControlFlow::Continue(())
                }
            })
        };
        let shards = &self.shards;
        // Acquire: see the module of `chain`.
        look(shards.wide.head.load(Acquire, guard), Place::Wide)?;
        match shards.span(range) {
            span @ Span::Narrow(..) => {
                for &number in span.numbers() {
                    look(shards.narrow[number as usize].head.load(Acquire, guard), Place::Narrow(number))?;
                }
            }
            Span::Wide => {
                for (number, shard) in shards.narrow.iter().enumerate() {
                    look(shard.head.load(Acquire, guard), Place::Narrow(number as u32))?;
                }
            }
        }
        ControlFlow::Continue(())
    }

    /// Number of links to entries, dead or alive.
    #[cfg(test)]
    pub(super) fn linked_count(&self) -> usize {
        let (guard, mut count) = (crate::sync::epoch::pin(), 0);
        for shard in self.shards.narrow.iter().chain([&self.shards.wide]) {
            let _ = chain::walk(shard.head.load(Acquire, &guard), &guard, |_| {
                count += 1;
                ControlFlow::<()>::Continue(())
            });
        }
        count
    }

    /// Whether `place` is the first one where a search for `range` meets `node`.
    pub(super) fn is_first_meeting(&self, range: ByteRange, node: &Node, place: Place) -> bool {
        let Place::Narrow(here) = place else { return true };
        let theirs = self.shards.span(node.range);
        let first = match self.shards.span(range) {
            Span::Narrow(numbers, count) => {
                numbers[..usize::from(count)].iter().find(|n| theirs.numbers().contains(n)).copied()
            }
            Span::Wide => theirs.numbers().iter().min().copied(),
        };
        first == Some(here)
    }

    /// The youngest live entry that overlaps `range`, is of one of `kinds` and has a ticket below `before`; entries
    /// without one are made to draw a later one. The caller drew `before` from this list.
    ///
    /// The youngest, because then requests that queue up for one range wait each for the one before it, and a removal
    /// wakes one of them and not all.
    pub(super) fn blocker<'g>(
        &self,
        range: ByteRange,
        kinds: u8,
        before: u64,
        guard: &'g Guard,
    ) -> Option<&'g Node> {
        let mut found: Option<(&'g Node, u64)> = None;
        let _ = self.search(range, kinds, guard, |node, _| {
            if node.is_older_than(before) {
                let number = node.ticket().number().unwrap_or(0);
                if found.is_none_or(|(_, best)| number > best) {
                    found = Some((node, number));
                }
            }
            ControlFlow::<()>::Continue(())
        });
        found.map(|(node, _)| node)
    }
}

/// The chain a search is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Wide,
    Narrow(u32),
}
