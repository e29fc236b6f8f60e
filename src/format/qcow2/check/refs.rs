//! How often each cluster of the file is referenced.
//!
//! Memory follows what is referenced, not the length of the file: pages of 4096 counts, made when one of them is first raised, a byte per cluster
//! until a count outgrows it. When the pages reach the budget the highest ones are given up and the *window* ends there: the clusters behind it are
//! counted in another pass.

use std::collections::BTreeMap;
use std::ops::Range;

/// Counts of a page.
pub(super) const PAGE: u64 = 4096;

/// A page of counts.
#[derive(Debug)]
enum Page {
    Small(Box<[u8; PAGE as usize]>),
    Large(Box<[u32; PAGE as usize]>),
}

/// The counts inside the window.
#[derive(Debug)]
pub(super) struct Refs {
    pages: BTreeMap<u64, Page>,
    bytes: usize,
    budget: usize,
    window: Range<u64>,
}

impl Page {
    fn small() -> Self {
        Self::Small(Box::new([0; PAGE as usize]))
    }

    fn len(&self) -> usize {
        match self {
            Self::Small(_) => PAGE as usize,
            Self::Large(_) => PAGE as usize * 4,
        }
    }

    fn get(&self, index: usize) -> u32 {
        match self {
            Self::Small(p) => u32::from(p[index]),
            Self::Large(p) => p[index],
        }
    }

    /// Adds `n`; saturates.
    fn add(&mut self, index: usize, n: u32) {
        if let Self::Small(p) = self {
            match u32::from(p[index]).checked_add(n).and_then(|sum| u8::try_from(sum).ok()) {
                Some(sum) => {
                    p[index] = sum;
                    return;
                }
                None => *self = Self::Large(Box::new(p.map(u32::from))),
            }
        }
        if let Self::Large(p) = self {
            p[index] = p[index].saturating_add(n);
        }
    }
}

impl Refs {
    /// Counts for clusters from `start` to `end`, in `budget` bytes (at least one page is held whatever it says).
    pub(super) fn new(start: u64, end: u64, budget: usize) -> Self {
        Self { pages: BTreeMap::new(), bytes: 0, budget, window: start..end.max(start) }
    }

    /// Clusters whose counts are complete.
    pub(super) fn window(&self) -> Range<u64> {
        self.window.clone()
    }

    /// Adds `n` references to a cluster, if it is in the window.
    pub(super) fn add(&mut self, cluster: u64, n: u32) {
        if !self.window.contains(&cluster) || n == 0 {
            return;
        }
        let (number, index) = (cluster / PAGE, (cluster % PAGE) as usize);
        let page = match self.pages.entry(number) {
            std::collections::btree_map::Entry::Occupied(p) => p.into_mut(),
            std::collections::btree_map::Entry::Vacant(p) => {
                self.bytes += PAGE as usize;
                p.insert(Page::small())
            }
        };
        let before = page.len();
        page.add(index, n);
        self.bytes += page.len() - before;
        while self.bytes > self.budget && self.pages.len() > 1 {
            let Some((number, page)) = self.pages.pop_last() else { return };
            self.bytes -= page.len();
            // A page that straddles the start of the window is never the only one given up, since lower ones cannot exist.
            self.window.end = (number * PAGE).max(self.window.start);
        }
    }

    /// References of a cluster in the window.
    pub(super) fn get(&self, cluster: u64) -> u32 {
        self.pages.get(&(cluster / PAGE)).map_or(0, |p| p.get((cluster % PAGE) as usize))
    }

    /// The first cluster from `from` on that is referenced, and how often.
    pub(super) fn next(&self, from: u64) -> Option<(u64, u32)> {
        self.pages.range(from / PAGE..).find_map(|(number, page)| {
            let first = from.saturating_sub(number * PAGE).min(PAGE) as usize;
            (first..PAGE as usize).find_map(|i| {
                let n = page.get(i);
                (n > 0).then_some((number * PAGE + i as u64, n))
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_outgrow_a_byte_and_saturate() {
        let mut r = Refs::new(0, 1 << 40, usize::MAX);
        r.add(5, 200);
        r.add(5, 100);
        r.add(6, 1);
        assert_eq!((r.get(5), r.get(6), r.get(7)), (300, 1, 0));
        r.add(5, u32::MAX);
        assert_eq!(r.get(5), u32::MAX);
        r.add(1 << 40, 1);
        assert_eq!(r.get(1 << 40), 0, "outside of the window");
        assert_eq!((r.next(0), r.next(6), r.next(7)), (Some((5, u32::MAX)), Some((6, 1)), None));
    }

    #[test]
    fn the_highest_pages_go_when_the_budget_is_used_up_and_a_next_window_takes_them() {
        let budget = 3 * PAGE as usize;
        let clusters: Vec<u64> = (0..50).map(|i| (i * 7919) % 50 * PAGE + i).collect();
        let (mut start, mut found, mut passes) = (0, Vec::new(), 0);
        while start < 50 * PAGE {
            let mut r = Refs::new(start, 50 * PAGE, budget);
            clusters.iter().for_each(|c| r.add(*c, 1));
            assert!(r.bytes <= budget);
            let window = r.window();
            assert!(window.end > start, "each pass gets on");
            let mut at = start;
            while let Some((c, n)) = r.next(at).filter(|(c, _)| *c < window.end) {
                assert_eq!(n, 1);
                found.push(c);
                at = c + 1;
            }
            start = window.end;
            passes += 1;
        }
        let mut expected = clusters;
        expected.sort_unstable();
        assert_eq!(found, expected);
        assert!(passes >= 16, "{passes}");
    }
}
