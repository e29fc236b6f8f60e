//! zstd frames; ends when a cluster has come out (qcow2.md section 7, trap 4).

use super::BadData;
use zstd::stream::raw::{Decoder, InBuffer, Operation, OutBuffer};

/// log2 of the largest window that is accepted: a cluster at most comes out, so more is never needed, and a frame cannot ask for more memory.
const WINDOW_LOG_MAX: u32 = 23;

pub(super) fn decompress(input: &[u8], output: &mut [u8]) -> Result<(), BadData> {
    let mut stream = Decoder::new().map_err(|_| BadData)?;
    stream.set_parameter(zstd::stream::raw::DParameter::WindowLogMax(WINDOW_LOG_MAX)).map_err(|_| BadData)?;
    let wanted = output.len();
    let mut from = InBuffer::around(input);
    let mut to = OutBuffer::around(output);
    while to.pos() < wanted {
        let (taken, made) = (from.pos(), to.pos());
        stream.run(&mut from, &mut to).map_err(|_| BadData)?;
        if (from.pos(), to.pos()) == (taken, made) {
            return Err(BadData);
        }
    }
    Ok(())
}

/// At the default level. `None` if the result is not shorter than the input.
pub(super) fn compress(input: &[u8]) -> Option<Vec<u8>> {
    let mut out = vec![0; input.len()];
    let len = ::zstd::bulk::compress_to_buffer(input, &mut out, ::zstd::DEFAULT_COMPRESSION_LEVEL).ok()?;
    out.truncate(len);
    Some(out)
}
