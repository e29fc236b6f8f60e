//! Overlap search.

use std::ops::ControlFlow;

use super::chain;
use super::core::Core;
use super::entry::{Node, Ticket};
use super::shard::{Number, WIDE};
use crate::sync::atomic::Ordering::Acquire;
use crate::sync::epoch::Guard;
use crate::units::ByteRange;

impl Core {
    /// Calls `visit` for every live entry that overlaps `range` and is of one of `kinds`. An entry in several of the chains
    /// searched is met as often. Wait-free, except that the number of entries found is not bounded.
    pub(super) fn search<'g, B>(
        &self,
        range: ByteRange,
        kinds: u8,
        guard: &'g Guard,
        mut visit: impl FnMut(&'g Node, Ticket, Number) -> ControlFlow<B>,
    ) -> ControlFlow<B> {
        if range.is_empty() {
            return ControlFlow::Continue(());
        }
        let shards = &self.shards;
        let mut look = |number| {
            // Acquire: see the module of `chain`.
            chain::walk(shards.head(number).load(Acquire, guard), guard, |node: &'g Node| {
                if node.range.overlaps(range) {
                    let ticket = node.ticket();
                    if kinds >> ticket.kind() & 1 != 0 && !ticket.is_dead() {
                        return visit(node, ticket, number);
                    }
                }
                ControlFlow::Continue(())
            })
        };
        look(WIDE)?;
        if let Some(number) = shards.single(range) {
            return look(number);
        }
        match shards.span(range).numbers() {
            [WIDE] => shards.narrow().try_for_each(look),
            numbers => numbers.iter().copied().try_for_each(look),
        }
    }

    /// Whether a live entry of one of `kinds` overlaps `range`.
    pub(super) fn any(&self, range: ByteRange, kinds: u8, guard: &Guard) -> bool {
        self.search(range, kinds, guard, |_, _, _| ControlFlow::Break(())).is_break()
    }

    /// Number of live entries.
    pub(super) fn len(&self, guard: &Guard) -> usize {
        let mut count = 0;
        self.walk_all(guard, |node, number| {
            let first = self.shards.span(node.range).numbers()[0];
            count += usize::from(number == first && !node.ticket().is_dead());
        });
        count
    }

    /// Number of links to entries, dead or alive.
    #[cfg(test)]
    pub(super) fn linked_count(&self, guard: &Guard) -> usize {
        let mut count = 0;
        self.walk_all(guard, |_, _| count += 1);
        count
    }

    /// Visits every link to an entry, dead or alive.
    pub(super) fn walk_all<'g>(&self, guard: &'g Guard, mut visit: impl FnMut(&'g Node, Number)) {
        for number in self.shards.narrow().chain([WIDE]) {
            let _ = chain::walk(self.shards.head(number).load(Acquire, guard), guard, |node| {
                visit(node, number);
                ControlFlow::<()>::Continue(())
            });
        }
    }

    /// Whether the chain `here` is the first one in which a search for `range` meets `node`.
    pub(super) fn is_first_meeting(&self, range: ByteRange, node: &Node, here: Number) -> bool {
        let (ours, theirs) = (self.shards.span(range), self.shards.span(node.range));
        let first = match (ours.numbers(), theirs.numbers()) {
            (_, [WIDE]) => WIDE,
            ([WIDE], numbers) => numbers.iter().copied().min().unwrap_or(here),
            (ours, theirs) => ours.iter().copied().find(|n| theirs.contains(n)).unwrap_or(here),
        };
        first == here
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
        let _ = self.search(range, kinds, guard, |node, ticket, _| {
            if let Some(number) = node.number_below(before, ticket)
                && found.is_none_or(|(_, best)| number > best)
            {
                found = Some((node, number));
            }
            ControlFlow::<()>::Continue(())
        });
        found.map(|(node, _)| node)
    }
}
