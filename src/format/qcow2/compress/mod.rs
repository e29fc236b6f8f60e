//! Compressed clusters to bytes and back.
//!
//! Pure functions over bytes; where they run (the blocking pool for clusters above 16 KiB) and what is kept of their results is `decompress`'s business.

mod deflate;
mod zstd;

use super::header::Compression;

/// Why compressed data cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadData;

/// Decompresses one cluster. `input` may have anything behind the compressed data; exactly `output.len()` bytes must come out.
pub fn decompress(kind: Compression, input: &[u8], output: &mut [u8]) -> Result<(), BadData> {
    match kind {
        Compression::Zlib => deflate::decompress(input, output),
        Compression::Zstd => zstd::decompress(input, output),
    }
}

/// Compresses one cluster; `None` if that saves nothing.
pub fn compress(kind: Compression, input: &[u8]) -> Option<Vec<u8>> {
    let out = match kind {
        Compression::Zlib => deflate::compress(input),
        Compression::Zstd => zstd::compress(input),
    }?;
    (out.len() < input.len()).then_some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compressed(kind: Compression, data: &[u8]) -> Vec<u8> {
        match kind {
            Compression::Zlib => {
                let mut c = flate2::Compress::new(flate2::Compression::default(), false);
                let mut out = Vec::with_capacity(data.len() * 2 + 64);
                c.compress_vec(data, &mut out, flate2::FlushCompress::Finish).expect("compresses");
                out
            }
            Compression::Zstd => ::zstd::bulk::compress(data, 3).expect("compresses"),
        }
    }

    #[test]
    fn a_cluster_comes_out_whatever_follows_the_data_and_nothing_else_does() {
        let data: Vec<u8> = (0..4096u32).map(|i| (i / 7 % 251) as u8).collect();
        for kind in [Compression::Zlib, Compression::Zstd] {
            let packed = compressed(kind, &data);
            for tail in [&[][..], &[0; 600], &[0xff; 600]] {
                let input = [packed.as_slice(), tail].concat();
                let mut out = vec![0; data.len()];
                decompress(kind, &input, &mut out).expect("it is whole");
                assert!(out == data, "{kind:?}");
            }
            // Too little comes out of data that was cut, or that holds less than a cluster.
            let mut out = vec![0; data.len()];
            assert_eq!(decompress(kind, &packed[..packed.len() / 2], &mut out), Err(BadData));
            assert_eq!(decompress(kind, &[], &mut out), Err(BadData));
            let mut more = vec![0; data.len() + 1];
            assert_eq!(decompress(kind, &packed, &mut more), Err(BadData));
        }
    }

    #[test]
    fn what_holds_more_than_a_cluster_gives_the_first() {
        let data: Vec<u8> = (0..8192u32).map(|i| (i % 13) as u8).collect();
        for kind in [Compression::Zlib, Compression::Zstd] {
            let mut out = vec![0; 4096];
            decompress(kind, &compressed(kind, &data), &mut out).expect("the first cluster is whole");
            assert!(out == data[..4096]);
        }
    }

    #[test]
    fn no_input_makes_it_panic() {
        let data: Vec<u8> = (0..4096u32).map(|i| (i * i % 61) as u8).collect();
        for kind in [Compression::Zlib, Compression::Zstd] {
            let packed = compressed(kind, &data);
            let mut refused = 0;
            for at in 0..packed.len().min(400) {
                for flip in [1u8, 0x80, 0xff] {
                    let mut bad = packed.clone();
                    bad[at] ^= flip;
                    refused += usize::from(decompress(kind, &bad, &mut vec![0; 4096]).is_err());
                }
            }
            assert!(refused > 0, "{kind:?}");
        }
    }
}
