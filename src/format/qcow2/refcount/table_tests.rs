//! Refcounts against a file that a byte model keeps.

use super::block;
use super::table::{Piece, RefCut, Refcounts, Refused};
use crate::format::qcow2::addr::HostOffset;
use crate::format::qcow2::layout::Layout;
use crate::rt::{Rng, real::SplitMix};
use crate::units::ByteRange;

fn layout(cluster_bits: u32, refcount_order: u32) -> Layout {
    Layout { version: 3, cluster_bits, slice_bits: 9, extended: false, refcount_order, data_file: false }
}

/// A new image: header, table, one block, all counted.
struct Image {
    layout: Layout,
    file: Vec<u8>,
    table: (u64, u32),
    counts: Refcounts,
}

impl Image {
    fn new(layout: Layout) -> Self {
        let cluster = layout.cluster_size() as usize;
        let mut file = vec![0; cluster * 3];
        file[cluster..cluster + 8].copy_from_slice(&(2 * cluster as u64).to_be_bytes());
        for at in 0..3 {
            block::set(&mut file[2 * cluster..], layout.refcount_order, at, 1).expect("one fits");
        }
        let mut image =
            Self { layout, file, table: (cluster as u64, 1), counts: Self::open(layout, &[], (0, 0)) };
        image.reopen();
        image
    }

    fn open(layout: Layout, file: &[u8], table: (u64, u32)) -> Refcounts {
        let bytes = (table.1 as usize) << layout.cluster_bits;
        let words = file.get(table.0 as usize..table.0 as usize + bytes).unwrap_or_default();
        let words = words.chunks(8).map(|w| u64::from_be_bytes(w.try_into().expect("8"))).collect();
        Refcounts::new(layout, HostOffset(table.0), words, 4, 512)
    }

    fn reopen(&mut self) {
        self.counts = Self::open(self.layout, &self.file, self.table);
    }

    fn load(&mut self, range: ByteRange) {
        for (index, offset) in self.counts.missing(range).expect("sound") {
            let at = offset.get() as usize;
            let bytes = self.file[at..at + self.layout.cluster_size() as usize].to_vec();
            self.counts.install(index, offset, bytes);
        }
    }

    fn write(&mut self, pieces: &[Piece]) {
        for piece in pieces {
            let at = piece.offset.get() as usize;
            self.file.resize(self.file.len().max(at + piece.bytes.len()), 0);
            self.file[at..at + piece.bytes.len()].copy_from_slice(&piece.bytes);
        }
    }

    fn commit(&mut self) -> RefCut {
        let cut = self.counts.take_cut();
        self.write(&cut.new);
        self.write(&cut.parts);
        self.write(&cut.table_parts);
        if let Some((offset, clusters)) = cut.table_moved {
            self.table = (offset.get(), clusters);
        }
        self.counts.end_cut(&cut, false);
        cut
    }

    /// What the file says, cluster by cluster.
    fn in_file(&self, clusters: usize) -> Vec<u64> {
        let mut fresh = Self {
            layout: self.layout,
            file: self.file.clone(),
            table: self.table,
            counts: Self::open(self.layout, &self.file, self.table),
        };
        (0..clusters as u64)
            .map(|n| {
                let host = n << self.layout.cluster_bits;
                fresh.load(ByteRange { offset: host, len: self.layout.cluster_size() });
                fresh.counts.get(host).expect("loaded")
            })
            .collect()
    }
}

#[test]
fn random_growth_and_changes_are_in_the_file_after_a_commit_whatever_the_geometry() {
    for (cluster_bits, order) in [(9, 6), (9, 4), (9, 0), (12, 3), (10, 6)] {
        let l = layout(cluster_bits, order);
        let cluster = l.cluster_size();
        let rng = SplitMix::new(u64::from(cluster_bits * 8 + order));
        let mut image = Image::new(l);
        let mut model: Vec<u64> = vec![1; 3];
        let (mut moved, mut grown) = (0, 0);
        for _ in 0..400 {
            match rng.next() % 4 {
                0 => {
                    let want = 1 + rng.next() % if matches!(order, 0 | 6) { 140 } else { 40 };
                    let at = model.len() as u64 * cluster;
                    image.load(ByteRange { offset: at, len: want * cluster });
                    let plan = image.counts.plan_growth(at, want * cluster).expect("not too large");
                    assert!(
                        plan.data.len >= want * cluster
                            && plan.all.offset == at
                            && plan.all.end() == plan.data.end()
                    );
                    image.load(plan.all);
                    let old = image.counts.grow(&plan).expect("free");
                    grown += plan.blocks.len();
                    model.resize((plan.all.end() / cluster) as usize, 1);
                    if let Some(old) = old {
                        moved += 1;
                        image.load(old);
                        image.counts.change(old, true).expect("was counted");
                        let first = (old.offset / cluster) as usize;
                        model[first..(old.end() / cluster) as usize].iter_mut().for_each(|c| *c -= 1);
                    }
                }
                1 => {
                    let first = rng.next() % model.len() as u64;
                    let len = 1 + rng.next() % (model.len() as u64 - first).min(8);
                    let range = ByteRange { offset: first * cluster, len: len * cluster };
                    image.load(range);
                    let place = &mut model[first as usize..(first + len) as usize];
                    let down = rng.next().is_multiple_of(2);
                    let refused =
                        place.iter().position(|c| if down { *c == 0 } else { *c == image.counts.max() });
                    let result = image.counts.change(range, down);
                    match refused {
                        None => {
                            assert_eq!(result, Ok(()));
                            place.iter_mut().for_each(|c| if down { *c -= 1 } else { *c += 1 });
                        }
                        Some(n) => {
                            assert_eq!(result, Err(Refused::OutOfBounds((first + n as u64) * cluster)))
                        }
                    }
                }
                2 => {
                    image.commit();
                    assert!(!image.counts.is_dirty());
                    image.counts.trim();
                    assert_eq!(image.in_file(model.len()), model);
                }
                _ => {
                    // A cut that fails is written by the next one.
                    let cut = image.counts.take_cut();
                    assert!(!image.counts.is_dirty());
                    image.counts.end_cut(&cut, true);
                    if rng.next().is_multiple_of(4) {
                        image.commit();
                        image.reopen();
                    }
                }
            }
        }
        image.commit();
        assert_eq!(image.in_file(model.len()), model);
        assert!(grown > 0 || cluster_bits == 12, "{cluster_bits} {order}: blocks were added");
        assert!(moved > 0 || cluster_bits != 9 || order < 6, "{cluster_bits} {order}: the table moved");
    }
}

#[test]
fn new_blocks_come_before_the_pointers_to_them() {
    let l = layout(9, 6);
    let mut image = Image::new(l);
    // 64 clusters to a block: the table (64 entries) is full after 64 blocks.
    let at = 64 * 512;
    let plan = image.counts.plan_growth(at, 512).expect("fits");
    assert_eq!(plan.blocks, [(1, HostOffset(at))]);
    image.counts.grow(&plan).expect("free");
    let cut = image.counts.take_cut();
    assert_eq!((cut.new.len(), cut.parts.len(), cut.table_parts.len(), cut.table_moved), (1, 0, 1, None));
    assert_eq!(cut.new[0].offset, HostOffset(at));
    assert_eq!(cut.new[0].bytes[..16], [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1]);
    image.counts.end_cut(&cut, true);
    assert!(image.counts.has_new(), "a failed cut leaves them new");
    let cut = image.commit();
    assert_eq!(cut.new.len(), 1);
    let far = 64 * 64 * 512;
    let plan = image.counts.plan_growth(far, 512).expect("fits");
    assert!(plan.table.is_some() && plan.blocks.len() == 1);
    let old = image.counts.grow(&plan).expect("free");
    assert_eq!(old, Some(ByteRange { offset: 512, len: 512 }));
    let cut = image.counts.take_cut();
    assert_eq!((cut.new.len(), cut.table_parts.len()), (2, 0), "the table is new as a whole");
    assert_eq!(cut.table_moved, plan.table);
}

#[test]
fn a_table_past_its_limit_is_refused() {
    let l = layout(9, 6);
    let image = Image::new(l);
    // 8 MiB of table: 2^20 entries of 64 clusters of 512 bytes, 2^35 bytes.
    let e = image.counts.plan_growth(1 << 35, 512).expect_err("too far");
    assert_eq!(e.errno(), libc::EFBIG);
    assert!(image.counts.plan_growth(u64::MAX - 511, 512).is_err());
}

#[test]
fn blocks_that_must_be_written_stay_and_others_go() {
    let l = layout(9, 6);
    let mut image = Image::new(l);
    image.load(ByteRange { offset: 0, len: 512 });
    let plan = image.counts.plan_growth(3 * 512, 64 * 20 * 512).expect("fits");
    image.counts.grow(&plan).expect("free");
    image.counts.trim();
    assert_eq!(image.counts.loaded(), 20 + 1, "new and changed blocks stay");
    let cut = image.counts.take_cut();
    let last = ByteRange { offset: plan.data.end() - 512, len: 512 };
    image.counts.trim();
    assert_eq!(image.counts.loaded(), 21, "and so do those of a cut");
    image.write(&cut.new);
    image.write(&cut.table_parts);
    image.counts.end_cut(&cut, false);
    image.counts.change(last, false).expect("fits");
    image.reopen();
    image.load(ByteRange { offset: 0, len: plan.all.end() });
    assert_eq!(image.counts.get(last.offset), Ok(1));
    image.counts.trim();
    assert_eq!(image.counts.loaded(), 4);
    assert_eq!(image.counts.get(last.offset), Ok(1), "the one used last stays");
}

#[test]
fn a_broken_table_entry_is_named() {
    let l = layout(9, 6);
    let counts = Refcounts::new(l, HostOffset(0x200), vec![0x400, 1 << 63 | 0x200], 4, 512);
    let e = counts.block_offset(1).expect_err("broken").full_text();
    assert!(e.contains("refcount table at 0x200, entry 1"), "{e}");
    assert_eq!(counts.get(0), Err(Refused::NotLoaded(0)));
    assert_eq!(counts.block_indices().collect::<Vec<_>>(), [0, 1]);
}

#[test]
fn free_ranges_and_the_end_of_what_is_used() {
    let l = layout(9, 4);
    let mut image = Image::new(l);
    image.load(ByteRange { offset: 0, len: 512 });
    image.counts.change(ByteRange { offset: 10 * 512, len: 1024 }, false).expect("fits");
    let range = |first: u64, count: u64| ByteRange { offset: first * 512, len: count * 512 };
    assert_eq!(image.counts.free_in_block(0, 20 * 512), [range(3, 7), range(12, 8)]);
    assert_eq!(image.counts.used_end_of_block(0), Some(12 * 512));
    assert_eq!(image.counts.free_run(10 * 512, 13 * 512), Ok(Some(range(12, 1))));
    assert_eq!(image.counts.free_run(10 * 512, 12 * 512), Ok(None));
}
