//! The C ABI: the only `extern "C"` functions of the crate, declared in `include/cobweb.h` (generated from this folder by `build.rs`).
//!
//! Rules of the boundary (C1..C25 are those of `c-api.md`; `docs/abi.md` has the ones this project has settled)
//! - Every entry point runs inside [`boundary::call`]: a panic becomes `-ENOTRECOVERABLE` (C17), an error becomes `-errno` and text in the caller's
//!   `cobweb_error` (C8), outputs are written only on success.
//! - A handle is a boxed [`handle::Handle`] with a mark: NULL gives `-EFAULT`, another object's handle `-EINVAL`, a handle that was made before a `fork` gives
//!   `-EOWNERDEAD` in the child (C3, C24). Only a dangling pointer can crash.
//! - The library never frees host memory and the host never frees library memory (C18); text goes into buffers of the caller.
//! - Functions that may block return `-EDEADLK` inside a callback (C25).
//!
//! One file per object; `abi.rs` has the structs and constants, whose sizes are asserted.

// The names are those of the C header.
#![allow(non_camel_case_types)]

pub mod abi;
mod backend;
mod boundary;
mod ctx;
mod disk;
mod export;
mod group;
mod handle;
mod job;
mod node;
mod props;
mod queue;
mod stats;
mod status;
mod version;
