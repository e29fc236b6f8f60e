//! Zeros: found before data is read (status) and after it has been (content), written without payload (S54).

use crate::error::IoResult;
use crate::node::Node;
use crate::queue::Cx;
use crate::request::{Buffers, Class, Flags, Request};
use crate::units::ByteRange;

/// Unit in which content is looked at: a run of zeros shorter than this is written as data.
const PIECE: u64 = 64 << 10;

/// Writes `bufs` to `target` at `offset`; runs of zeros, in pieces of 64 KiB, go as write-zeroes. `zero_init` says that the target reads as zeros already, so
/// that they need not go at all. Returns bytes written as data and bytes of zeros.
pub(in crate::job) async fn write_out(
    cx: &Cx,
    target: &dyn Node,
    offset: u64,
    bufs: Buffers,
    class: Class,
    zero_init: bool,
) -> IoResult<(u64, u64)> {
    let (mut data, mut zeros) = (0, 0);
    for (range, zero) in runs(&bufs, offset) {
        if !zero {
            let part = bufs.slice((range.offset - offset) as usize, range.len as usize);
            cx.run(target, Request::write(range.offset, part).class(class)).await?;
            data += range.len;
            continue;
        }
        if !zero_init {
            write_zeroes(cx, target, range, class).await?;
        }
        zeros += range.len;
    }
    Ok((data, zeros))
}

/// Makes `range` of `target` read as zeros.
pub(in crate::job) async fn write_zeroes(
    cx: &Cx,
    target: &dyn Node,
    range: ByteRange,
    class: Class,
) -> IoResult {
    cx.run(target, Request::write_zeroes(range, Flags::MAY_UNMAP).class(class)).await
}

/// Cuts a buffer that belongs at `offset` into runs of data and of zeros; boundaries lie at multiples of [`PIECE`].
fn runs(bufs: &Buffers, offset: u64) -> Vec<(ByteRange, bool)> {
    let end = offset + bufs.len() as u64;
    let mut out: Vec<(ByteRange, bool)> = Vec::new();
    let mut at = offset;
    while at < end {
        let len = (PIECE - at % PIECE).min(end - at);
        let zero = bufs.slice((at - offset) as usize, len as usize).is_zero();
        match out.last_mut() {
            Some((range, same)) if *same == zero => range.len += len,
            _ => out.push((ByteRange { offset: at, len }, zero)),
        }
        at += len;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_cover_the_buffer_and_meet_at_multiples_of_the_piece() {
        let bufs = Buffers::alloc(5 * PIECE as usize, 4096);
        // Data in the second piece (counted from 0), and in the last, short one.
        bufs.slice(PIECE as usize, 1).fill(1);
        bufs.slice(5 * PIECE as usize - 1, 1).fill(1);
        let offset = 3 * PIECE - 512;
        let got: Vec<_> =
            runs(&bufs, offset).into_iter().map(|(r, z)| (r.offset - offset, r.len, z)).collect();
        let p = PIECE;
        let want = [(0, 512, true), (512, p, false), (512 + p, 3 * p, true), (512 + 4 * p, p - 512, false)];
        assert_eq!(got, want);
    }
}
