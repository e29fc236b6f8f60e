//! Refcounts of 1 to 64 bits in the bytes of a refcount block (qcow2.md section 7, trap 12).
//!
//! Widths below 8 fill a byte from its least significant bit; wider ones are big-endian.

/// A refcount that does not fit its width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overflow;

/// Largest refcount of width `1 << order` bits; `order` is at most 6.
pub const fn max(order: u32) -> u64 {
    u64::MAX >> (64 - (1 << order))
}

/// Refcount `index` of `block`. Panics past the block's end.
pub fn get(block: &[u8], order: u32, index: usize) -> u64 {
    if order < 3 {
        let (byte, shift) = narrow(order, index);
        return u64::from(block[byte]) >> shift & max(order);
    }
    let len = 1 << (order - 3);
    block[index * len..][..len].iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

/// Stores refcount `index` of `block`; a value that does not fit changes nothing. Panics past the block's end.
pub fn set(block: &mut [u8], order: u32, index: usize, value: u64) -> Result<(), Overflow> {
    if value > max(order) {
        return Err(Overflow);
    }
    if order < 3 {
        let (byte, shift) = narrow(order, index);
        let mask = (max(order) as u8) << shift;
        block[byte] = block[byte] & !mask | (value as u8) << shift;
    } else {
        let len = 1 << (order - 3);
        block[index * len..][..len].copy_from_slice(&value.to_be_bytes()[8 - len..]);
    }
    Ok(())
}

/// Byte range of the block that holds refcount `index`.
pub const fn bytes_of(order: u32, index: usize) -> std::ops::Range<usize> {
    let first = (index << order) / 8;
    let last = ((index << order) + (1 << order)).div_ceil(8);
    first..last
}

/// Byte of refcount `index`, and the bit inside it where the count begins.
fn narrow(order: u32, index: usize) -> (usize, u32) {
    let bit = index << order;
    (bit / 8, (bit % 8) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn narrow_counts_fill_a_byte_from_the_least_significant_bit() {
        let mut block = [0; 2];
        for i in 0..4 {
            set(&mut block, 0, i, 1).unwrap();
        }
        assert_eq!(block, [0x0f, 0]);
        set(&mut block, 1, 5, 2).unwrap();
        assert_eq!(block, [0x0f, 0x08]);
        set(&mut block, 2, 2, 9).unwrap();
        assert_eq!(block, [0x0f, 0x09]);
    }

    #[test]
    fn wide_counts_are_big_endian() {
        let mut block = [0; 16];
        set(&mut block, 4, 1, 0x0102).unwrap();
        set(&mut block, 5, 1, 0x0304_0506).unwrap();
        set(&mut block, 6, 1, 0x1122_3344_5566_7788).unwrap();
        assert_eq!(block, [0, 0, 1, 2, 3, 4, 5, 6, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88]);
    }

    proptest! {
        #[test]
        fn a_count_is_what_was_stored_and_its_neighbours_stay(
            order in 0u32..=6, writes in prop::collection::vec((0usize..64, any::<u64>()), 1..60)
        ) {
            let mut block = [0u8; 512];
            let mut model = [0u64; 64];
            for (index, value) in writes {
                let fits = value & max(order);
                prop_assert_eq!(set(&mut block, order, index, fits), Ok(()));
                model[index] = fits;
                if order < 6 {
                    prop_assert_eq!(set(&mut block, order, index, max(order) + 1), Err(Overflow));
                }
                let before = block;
                set(&mut block, order, index, 0).unwrap();
                for at in (0..512).filter(|at| !bytes_of(order, index).contains(at)) {
                    prop_assert_eq!(block[at], before[at]);
                }
                block = before;
                for (i, m) in model.iter().enumerate() {
                    prop_assert_eq!(get(&block, order, i), *m);
                }
            }
        }
    }
}
