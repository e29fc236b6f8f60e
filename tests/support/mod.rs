//! What the tests of the program share.

pub mod daemon;
pub mod nbd;
