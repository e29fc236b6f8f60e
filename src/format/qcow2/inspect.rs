//! Reading an image's header without opening it as a disk: for `info`, `check` and whoever else only looks.

use super::header::{Header, PEEK_LEN, Purpose, peek};
use super::meta_io::read_at;
use crate::error::{Error, Result};
use crate::node::Node;
use crate::queue::Cx;
use crate::request::{Buffers, Class};

/// Reads and validates the header of the image in `file`.
pub async fn read_header(cx: &Cx, file: &dyn Node, purpose: Purpose) -> Result<Header> {
    let zero = super::addr::HostOffset(0);
    let failed = |e| Error::io(e, "cannot read the header");
    let first = Buffers::alloc(PEEK_LEN, 4096);
    read_at(cx, file, zero, &first, Class::Guest).await.map_err(failed)?;
    let mut bytes = [0; PEEK_LEN];
    first.copy_to_slice(&mut bytes);
    let bits = peek(&bytes)?;
    let cluster = Buffers::alloc(1 << bits, 4096);
    read_at(cx, file, zero, &cluster, Class::Guest).await.map_err(failed)?;
    Header::parse(&cluster.to_vec(), file.limits().size, purpose)
}
