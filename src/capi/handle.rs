//! Handles: who owns what, and how a wrong one is told from a right one.
//!
//! A handle is a `Box` behind an opaque pointer. Its mark says which object it is, is wiped when the handle is freed, and is checked
//! at every use, so NULL, another object's handle and (most often) a freed one give an error. The fork generation says whether the process is still the one
//! that made it.

use super::boundary::null;
use crate::error::{Code, Error, Result};
use crate::sync::atomic::{AtomicU32, Ordering};
use once_cell::sync::OnceCell;

/// An object of the API behind a pointer of type `Raw`.
#[repr(C)]
pub(super) struct Handle<T> {
    mark: u64,
    fork: u32,
    value: T,
}

/// The front of every handle.
#[repr(C)]
#[derive(Clone, Copy)]
struct Front {
    mark: u64,
    fork: u32,
}

impl Front {
    const fn parts(self) -> (u64, u32) {
        (self.mark, self.fork)
    }
}

/// What kind of handle a type is behind.
pub(super) trait Object: Sized {
    /// The opaque C type.
    type Raw;
    /// The mark; different for each kind.
    const MARK: u64;
    /// Name in messages.
    const NAME: &'static str;

    /// Makes a handle that the host frees.
    fn into_raw(self) -> *mut Self::Raw {
        watch_forks();
        let handle = Handle { mark: Self::MARK, fork: FORKS.load(Ordering::Relaxed), value: self };
        Box::into_raw(Box::new(handle)).cast()
    }

    /// Looks into a handle.
    ///
    /// # Safety
    /// `raw` is NULL, or a pointer that was returned by this library and not freed since, and stays so during `'a`.
    unsafe fn get<'a>(raw: *const Self::Raw) -> Result<&'a Self> {
        if raw.is_null() {
            return Err(null(Self::NAME));
        }
        // SAFETY: mark and fork generation come first in the handles of all types (`repr(C)`), so they can be read before the type is known.
        let (mark, fork) = unsafe { raw.cast::<Front>().read() }.parts();
        if mark != Self::MARK {
            return Err(Error::invalid(format!("not a handle of a {}", Self::NAME)));
        }
        // SAFETY: the mark says that it is a live handle of this type.
        let handle = unsafe { &*raw.cast::<Handle<Self>>() };
        if fork != FORKS.load(Ordering::Relaxed) {
            let text = "the object belongs to the process before fork()";
            return Err(Error::new(libc::EOWNERDEAD, Code::Forked, text));
        }
        Ok(&handle.value)
    }

    /// Takes a handle back; NULL gives `None`. In a forked child the object is leaked: its threads are not there.
    ///
    /// # Safety
    /// As [`Object::get`]; the pointer is not used afterwards.
    unsafe fn take(raw: *mut Self::Raw) -> Option<Self> {
        // SAFETY: passed on.
        if unsafe { Self::get(raw) }.is_err() {
            return None;
        }
        // SAFETY: the mark says that it was made by `into_raw` of this type.
        let mut handle = unsafe { Box::from_raw(raw.cast::<Handle<Self>>()) };
        handle.mark = 0;
        // The write must not be optimised away although the box is freed next: it is what tells a freed handle.
        std::hint::black_box(&mut handle.mark);
        Some(handle.value)
    }
}

/// Forks that this process is the child of, as seen by the library.
static FORKS: AtomicU32 = AtomicU32::new(0);

fn watch_forks() {
    static REGISTERED: OnceCell<()> = OnceCell::new();
    extern "C" fn child() {
        FORKS.fetch_add(1, Ordering::Relaxed);
    }
    REGISTERED.get_or_init(|| {
        // SAFETY: the handler only touches an atomic. If there is no memory for it, a fork goes unnoticed: no worse than without it.
        unsafe { libc::pthread_atfork(None, None, Some(child)) };
    });
}
