//! zlib: a raw deflate stream without header (qcow2.md section 7, trap 4).

use super::BadData;
use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};

/// Takes windows up to the 32 KiB that deflate allows, also where images are written with 4 KiB.
pub(super) fn decompress(input: &[u8], output: &mut [u8]) -> Result<(), BadData> {
    let mut stream = Decompress::new(false);
    loop {
        let (taken, made) = (stream.total_in() as usize, stream.total_out() as usize);
        let status = stream.decompress(&input[taken..], &mut output[made..], FlushDecompress::Finish);
        if stream.total_out() as usize == output.len() {
            return Ok(());
        }
        let moved = stream.total_in() as usize > taken || stream.total_out() as usize > made;
        match status {
            // Output is left to fill and input moved on: once more.
            Ok(Status::Ok | Status::BufError) if moved => {}
            _ => return Err(BadData),
        }
    }
}

/// With windows of 4 KiB, which is what readers are made for. `None` if the result is not shorter than the input.
pub(super) fn compress(input: &[u8]) -> Option<Vec<u8>> {
    let mut stream = Compress::new_with_window_bits(Compression::default(), false, 12);
    let mut out = vec![0; input.len()];
    match stream.compress(input, &mut out, FlushCompress::Finish) {
        Ok(Status::StreamEnd) => {
            out.truncate(stream.total_out() as usize);
            Some(out)
        }
        _ => None,
    }
}
