//! What the cache promises, rule by rule, over a node that holds and fails as told.

mod drain;
mod errors;
mod memory;
mod open;
mod order;
mod overflow;
mod stress;
mod twin;
