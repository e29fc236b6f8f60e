//! Keeps `include/cobweb.h` in step with `src/capi` (added with the C ABI).
fn main() {}
