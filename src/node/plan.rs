//! What a plan can say.

use crate::error::IoResult;
use crate::io::FileOp;

/// How to carry out a request; see [`crate::node::Node::plan`].
#[derive(Debug)]
pub enum Plan {
    /// This engine operation, with the request's buffers, is all there is to do.
    Io(FileOp),
    /// A read of zeros: whoever asked fills the buffers.
    Zero,
    /// Already carried out.
    Done(IoResult),
    /// It takes a task: call `execute`.
    Slow,
}
