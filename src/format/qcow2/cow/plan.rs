//! What a write to a part of a cluster has to read and to write: pure.
//!
//! A cluster is a row of *units* (32 sub-clusters, or the cluster itself), and each has a place where its bytes are until now. The guest's bytes are a set of
//! ranges: one for a request, several for a staged cluster. The answer covers what must reach the host cluster so that the units that are linked
//! afterwards read as they should: at most one read as a rule, and one vectored write for each stretch (one as a rule).
//!
//! Rule 5 decides every byte: whatever is readable through the new mapping has been written, or is known to be zero. See qcow2.md 3.1 points 2 and 3.

use smallvec::SmallVec;
use std::ops::Range;

/// A range of bytes inside a cluster (at most 2 MiB).
pub type Bytes = Range<u32>;

/// Where the bytes of a unit are before the write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// In the host cluster that is written to, and linked: only the guest's bytes change.
    Here,
    /// They are zeros, and no data is linked.
    Zero,
    /// Somewhere else, where they stay readable (backing file): they move only if the unit is touched.
    Elsewhere,
    /// In a cluster that the mapping is about to lose (shared or compressed): they move in any case.
    Leaving,
}

/// What is known when a cluster is planned.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// Bytes of the cluster.
    pub cluster: u32,
    /// Bytes of a unit.
    pub unit: u32,
    /// Writes are best multiples of this, a power of two, at most the unit.
    pub align: u32,
    /// One for each unit of the cluster.
    pub units: &'a [Unit],
    /// The guest's bytes: sorted, not empty, not touching each other.
    pub valid: &'a [Bytes],
    /// Whether the host cluster is known to read as zeros wherever it is not linked.
    pub zeroed: bool,
}

/// Where bytes of a write come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The guest's.
    Guest,
    /// Read from where they were.
    Old,
    /// Zeros.
    Zero,
}

/// One vectored write: a range of the cluster, and its bytes piece by piece.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// The range.
    pub range: Bytes,
    /// Sources with lengths; they add up to the range.
    pub parts: SmallVec<[(Source, u32); 3]>,
}

/// The work.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// To be read, sorted; may cover bytes that are then thrown away.
    pub reads: SmallVec<[Bytes; 2]>,
    /// To be written, sorted.
    pub writes: SmallVec<[Write; 1]>,
    /// Units that are data in the host cluster afterwards, bit by bit; bit 0 without sub-clusters.
    pub data: u32,
}

/// Bytes that are read only to be thrown away rather than be read around, at most.
pub const WASTE_MAX: u32 = 128 << 10;

/// Plans a cluster.
pub fn plan(input: &Input<'_>) -> Plan {
    debug_assert_eq!(input.units.len() as u32 * input.unit, input.cluster);
    debug_assert!(
        input.valid.is_sorted_by(|a, b| a.end < b.start) && input.valid.iter().all(|r| !r.is_empty())
    );
    let mut row = Row::default();
    let mut data = 0;
    let mut valid = input.valid;
    for (index, state) in input.units.iter().enumerate() {
        let unit = index as u32 * input.unit..(index as u32 + 1) * input.unit;
        while let [first, rest @ ..] = valid
            && first.end <= unit.start
        {
            valid = rest;
        }
        let touched = valid.first().is_some_and(|r| r.start < unit.end);
        if touched || matches!(state, Unit::Here | Unit::Leaving) {
            data |= 1 << index;
        }
        if touched || *state == Unit::Leaving {
            row.add_unit(input, &unit, *state, valid);
        }
    }
    Plan { reads: gather(&row.missing), writes: row.writes, data }
}

/// What has been planned so far, from left to right.
#[derive(Default)]
struct Row {
    writes: SmallVec<[Write; 1]>,
    missing: SmallVec<[Bytes; 4]>,
}

impl Row {
    fn add_unit(&mut self, input: &Input<'_>, unit: &Bytes, state: Unit, valid: &[Bytes]) {
        let mut at = unit.start;
        for guest in valid.iter().take_while(|r| r.start < unit.end) {
            let guest = guest.start.max(unit.start)..guest.end.min(unit.end);
            self.add_gap(input, at..guest.start, state, at > unit.start, true);
            self.push(Source::Guest, guest.clone());
            at = guest.end;
        }
        self.add_gap(input, at..unit.end, state, at > unit.start, false);
    }

    /// Bytes of a unit that the guest has not written. `left` and `right`: whether guest bytes of the unit border on them.
    fn add_gap(&mut self, input: &Input<'_>, gap: Bytes, state: Unit, left: bool, right: bool) {
        if gap.is_empty() {
            return;
        }
        match state {
            Unit::Here => {}
            Unit::Elsewhere | Unit::Leaving => {
                self.missing.push(gap.clone());
                self.push(Source::Old, gap);
            }
            Unit::Zero if input.zeroed => {
                // Nothing is needed; whole blocks are, so that the file need not read what it knows to be zero.
                let up = |n: u32| n.next_multiple_of(input.align);
                let start = if left { up(gap.start) } else { gap.start }.min(gap.end);
                let end = if right { gap.end - gap.end % input.align } else { gap.end }.max(gap.start);
                if left && right && start >= end {
                    return self.push(Source::Zero, gap);
                }
                if left {
                    self.push(Source::Zero, gap.start..start);
                }
                if right {
                    self.push(Source::Zero, end..gap.end);
                }
            }
            Unit::Zero => self.push(Source::Zero, gap),
        }
    }

    fn push(&mut self, source: Source, range: Bytes) {
        if range.is_empty() {
            return;
        }
        let len = range.end - range.start;
        match self.writes.last_mut() {
            Some(last) if last.range.end == range.start => {
                last.range.end = range.end;
                match last.parts.last_mut() {
                    Some((same, had)) if *same == source => *had += len,
                    _ => last.parts.push((source, len)),
                }
            }
            _ => self.writes.push(Write { range, parts: SmallVec::from_iter([(source, len)]) }),
        }
    }
}

/// The reads for what is missing: one over all of it, unless that reads too much in vain.
fn gather(missing: &[Bytes]) -> SmallVec<[Bytes; 2]> {
    let (Some(first), Some(last)) = (missing.first(), missing.last()) else { return SmallVec::new() };
    let span = first.start..last.end;
    let needed: u32 = missing.iter().map(|r| r.end - r.start).sum();
    if span.end - span.start - needed <= WASTE_MAX {
        return SmallVec::from_iter([span]);
    }
    let mut reads: SmallVec<[Bytes; 2]> = SmallVec::new();
    for gap in missing {
        match reads.last_mut() {
            Some(before) if before.end == gap.start => before.end = gap.end,
            _ => reads.push(gap.clone()),
        }
    }
    reads
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "the lists are of ranges")]
mod tests {
    use super::*;

    const STATES: [Unit; 4] = [Unit::Here, Unit::Zero, Unit::Elsewhere, Unit::Leaving];

    fn ranges(mask: u32, bytes: u32) -> Vec<Bytes> {
        let mut out: Vec<Bytes> = Vec::new();
        for at in (0..bytes).filter(|at| mask >> at & 1 == 1) {
            match out.last_mut() {
                Some(r) if r.end == at => r.end += 1,
                _ => out.push(at..at + 1),
            }
        }
        out
    }

    /// What the guest reads at `at` before the write: the old content is the letter of its place.
    fn old(state: Unit) -> u8 {
        match state {
            Unit::Here => b'h',
            Unit::Zero => 0,
            Unit::Elsewhere | Unit::Leaving => b'o',
        }
    }

    /// Carries a plan out on a host cluster and says what the guest reads afterwards.
    fn carry_out(input: &Input<'_>, plan: &Plan) -> Vec<u8> {
        let state = |at: u32| input.units[(at / input.unit) as usize];
        let mut host: Vec<u8> = (0..input.cluster)
            .map(|at| match state(at) {
                Unit::Here => b'h',
                _ if input.zeroed => 0,
                _ => b'!',
            })
            .collect();
        for write in &plan.writes {
            let mut at = write.range.start;
            for (source, len) in &write.parts {
                for _ in 0..*len {
                    host[at as usize] = match source {
                        Source::Guest => {
                            assert!(input.valid.iter().any(|r| r.contains(&at)), "not the guest's: {at}");
                            b'g'
                        }
                        Source::Zero => 0,
                        Source::Old => {
                            assert!(plan.reads.iter().any(|r| r.contains(&at)), "not read: {at}");
                            old(state(at))
                        }
                    };
                    at += 1;
                }
            }
            assert_eq!(at, write.range.end);
        }
        (0..input.cluster)
            .map(
                |at| if plan.data >> (at / input.unit) & 1 == 1 { host[at as usize] } else { old(state(at)) },
            )
            .collect()
    }

    #[test]
    fn every_small_cluster_reads_as_it_should_and_never_shows_what_was_there_before() {
        let mut cases = 0;
        for (unit, count) in [(2u32, 4u32), (8, 1)] {
            let cluster = unit * count;
            for states in 0..4u32.pow(count) {
                let units: Vec<Unit> = (0..count).map(|i| STATES[(states >> (2 * i) & 3) as usize]).collect();
                for mask in 1..1u32 << cluster {
                    let valid = ranges(mask, cluster);
                    for (zeroed, align) in [(false, 1), (true, 1), (true, 2), (false, 2)] {
                        let input = Input { cluster, unit, align, units: &units, valid: &valid, zeroed };
                        let plan = plan(&input);
                        let seen = carry_out(&input, &plan);
                        for at in 0..cluster {
                            let new = mask >> at & 1 == 1;
                            let expected = if new { b'g' } else { old(units[(at / unit) as usize]) };
                            assert_eq!(seen[at as usize], expected, "{input:?} {plan:?}");
                        }
                        let leaving = units.iter().zip(0..).filter(|u| *u.0 == Unit::Leaving);
                        assert!(leaving.into_iter().all(|(_, i)| plan.data >> i & 1 == 1));
                        cases += 1;
                    }
                }
            }
        }
        assert_eq!(cases, (256 + 4) * 255 * 4);
    }

    fn kib(cluster: u32, state: Unit, valid: &[Bytes], zeroed: bool) -> Plan {
        let valid: Vec<Bytes> = valid.iter().map(|r| r.start << 10..r.end << 10).collect();
        let cluster = cluster << 10;
        plan(&Input { cluster, unit: cluster, align: 512, units: &[state], valid: &valid, zeroed })
    }

    fn reads(plan: &Plan) -> Vec<Bytes> {
        plan.reads.iter().map(|r| r.start >> 10..r.end >> 10).collect()
    }

    #[test]
    fn the_operations_are_those_of_the_cost_table() {
        // 4K in the middle, at the head, 32K in the middle: one read, one write of the cluster.
        let p = kib(64, Unit::Elsewhere, &[32..36], true);
        assert_eq!((reads(&p), p.writes.len(), p.writes[0].range.clone()), (vec![0..64], 1, 0..65536));
        assert_eq!(
            p.writes[0].parts.to_vec(),
            [(Source::Old, 32 << 10), (Source::Guest, 4096), (Source::Old, 28 << 10)]
        );
        assert_eq!(reads(&kib(64, Unit::Elsewhere, &[0..4], true)), [4..64]);
        assert_eq!(reads(&kib(64, Unit::Leaving, &[16..48], true)), [0..64]);
        // Whole cluster: no read.
        let p = kib(64, Unit::Leaving, &[0..64], false);
        assert_eq!((reads(&p), p.writes.len()), (vec![], 1));
        // Old content zero: only the guest's bytes on a known zero cluster, the whole cluster on another.
        let p = kib(64, Unit::Zero, &[32..36], true);
        assert_eq!((reads(&p), p.writes[0].range.clone()), (vec![], 32 << 10..36 << 10));
        let p = kib(64, Unit::Zero, &[32..36], false);
        assert_eq!((reads(&p), p.writes[0].range.clone()), (vec![], 0..64 << 10));
        // In place.
        let p = kib(64, Unit::Here, &[32..36], false);
        assert_eq!((reads(&p), p.writes[0].range.clone()), (vec![], 32 << 10..36 << 10));
        // A large cluster: what lies between is not read for nothing when it is much.
        assert_eq!(reads(&kib(2048, Unit::Elsewhere, &[1024..1028], true)), [0..2048]);
        assert_eq!(reads(&kib(2048, Unit::Elsewhere, &[1024..1153], true)), [0..1024, 1153..2048]);
    }

    #[test]
    fn a_sub_cluster_is_read_only_where_the_guest_leaves_a_part_of_it() {
        let units = [Unit::Elsewhere; 32];
        let input = |valid: &[Bytes]| {
            let valid = valid.to_vec();
            plan(&Input {
                cluster: 128 << 10,
                unit: 4096,
                align: 512,
                units: &units,
                valid: &valid,
                zeroed: true,
            })
        };
        let p = input(&[8192..12288]);
        assert_eq!((p.reads.len(), p.data, p.writes[0].range.clone()), (0, 1 << 2, 8192..12288));
        let p = input(&[8192 + 1024..8192 + 2048]);
        assert_eq!((p.reads.to_vec(), p.writes[0].range.clone()), (vec![8192..12288], 8192..12288));
        // Ragged at both ends: the sub-clusters in between need nothing.
        let p = input(&[4000..13000]);
        assert_eq!((p.reads.to_vec(), p.data), (vec![0..16384], 0b1111));
        assert_eq!(
            p.writes[0].parts.to_vec(),
            [(Source::Old, 4000), (Source::Guest, 9000), (Source::Old, 3384)]
        );
    }

    #[test]
    fn a_write_into_zeros_is_widened_to_blocks_but_not_past_its_unit() {
        let units = [Unit::Zero; 2];
        let input = Input {
            cluster: 8192,
            unit: 4096,
            align: 1024,
            units: &units,
            valid: &[100..200, 4000..4096],
            zeroed: true,
        };
        let p = plan(&input);
        let written: Vec<Bytes> = p.writes.iter().map(|w| w.range.clone()).collect();
        assert_eq!(written, [0..1024, 3072..4096]);
        assert_eq!(p.data, 1);
        // Two ranges in one block.
        let p = plan(&Input { valid: &[100..200, 300..400], ..input });
        assert_eq!(p.writes.len(), 1);
        assert_eq!(p.writes[0].range, 0..1024);
    }
}
