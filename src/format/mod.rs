//! Formats: how a disk is laid out in a node below.
//!
//! A format knows the waist and nothing else: no other format, no filter, no engine. It states the size its guest sees and translates requests to
//! its `file` child; it never probes (C11).

pub mod qcow2;
pub mod raw;
