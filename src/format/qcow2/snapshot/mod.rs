//! Internal snapshots. So far: reading their table.

pub mod table;
