//! Planted bugs that the tests must find, chosen by `COBWEB_CANARY` at run time; compiled in for loom and feature `sim`
//! only. Elsewhere the answer is a constant and the branch is gone.

/// Whether the bug with this name is to be there.
#[cfg(any(cobweb_loom, feature = "sim"))]
pub(super) fn canary(name: &str) -> bool {
    // Not through `sync`: a lock seen by loom would change what is modelled.
    static CHOSEN: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
    CHOSEN.get_or_init(|| std::env::var("COBWEB_CANARY").ok()).as_deref() == Some(name)
}

/// Whether the bug with this name is to be there.
#[cfg(not(any(cobweb_loom, feature = "sim")))]
pub(super) const fn canary(_name: &str) -> bool {
    false
}
