//! zlib: a raw deflate stream without header (qcow2.md section 7, trap 4).

use super::BadData;
use flate2::{Decompress, FlushDecompress, Status};

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
