//! Reads of metadata: whatever lies past the end of the file reads as zeros (qcow2.md section 7, trap 7).

use super::addr::HostOffset;
use super::join::join_bounded;
use crate::error::{IoError, IoResult};
use crate::limits::BATCH_LEN;
use crate::node::Node;
use crate::queue::Cx;
use crate::request::{Buffers, Class, Request};
use crate::units::ByteRange;

/// Reads at once for one table.
const WIDTH: usize = 8;

/// Reads `bufs.len()` bytes at `offset`; zeros past the end of `file`.
pub async fn read_at(cx: &Cx, file: &dyn Node, offset: HostOffset, bufs: &Buffers, class: Class) -> IoResult {
    let range = ByteRange::new(offset.get(), bufs.len() as u64).ok_or(IoError::out_of_range())?;
    let inside = file.limits().size.saturating_sub(range.offset).min(range.len);
    bufs.fill_range(inside as usize, (range.len - inside) as usize, 0);
    if inside == 0 {
        return Ok(());
    }
    cx.run(file, Request::read(range.offset, bufs.slice(0, inside as usize)).class(class)).await
}

/// Reads a table of `words` big-endian words, in pieces side by side. `words` is bounded by who asks.
pub async fn read_words(
    cx: &Cx,
    file: &dyn Node,
    offset: HostOffset,
    words: usize,
    class: Class,
) -> IoResult<Vec<u64>> {
    let bytes = words * 8;
    let memory = Buffers::alloc(bytes, 4096);
    let pieces = (0..bytes).step_by(BATCH_LEN as usize).map(|at| {
        let piece = memory.slice(at, (bytes - at).min(BATCH_LEN as usize));
        async move {
            let from = offset.checked_add(at as u64).ok_or(IoError::out_of_range())?;
            read_at(cx, file, from, &piece, class).await
        }
    });
    join_bounded(pieces, WIDTH).await?;
    Ok(to_words(&memory))
}

/// Big-endian words in memory to numbers.
pub fn to_words(memory: &Buffers) -> Vec<u64> {
    let bytes = memory.to_vec();
    bytes.as_chunks::<8>().0.iter().map(|w| u64::from_be_bytes(*w)).collect()
}
