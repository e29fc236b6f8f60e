//! Persistent dirty bitmaps, as far as a writer owes them something: this driver does not track them.
//!
//! A bitmap that is enabled (flag *auto*) would be wrong after the first write it does not see. So it is marked *in use* before that, durably (rule 10): then every reader
//! knows that its content cannot be used, while it can still be listed and removed, and its clusters stay counted. Disabled bitmaps describe the past and stay as
//! they are. A directory that cannot be walked makes all of them void: the autoclear bit is to be cleared (section 2, rule 3).

use super::super::header::Header;
use super::super::image::Image;
use super::super::meta_io::read_at;
use crate::error::IoResult;
use crate::queue::Cx;
use crate::request::{Buffers, Class, Request};

/// Bytes of a directory entry before its extra data and name.
const ENTRY_LEN: usize = 24;
const FLAGS_AT: usize = 12;
const IN_USE: u8 = 1;
const AUTO: u8 = 2;

/// Marks the enabled bitmaps as in use, in the file. False if the directory cannot be walked.
pub(in crate::format::qcow2) async fn mark_in_use(cx: &Cx, image: &Image, header: &Header) -> IoResult<bool> {
    let Some(pointer) = header.bitmaps() else { return Ok(false) };
    let Ok(pointer) = pointer else { return Ok(false) };
    let file = image.file.node();
    if pointer.offset.checked_add(pointer.len).is_none_or(|end| end.get() > file.limits().size) {
        return Ok(false);
    }
    let bufs = Buffers::alloc(pointer.len as usize, 4096);
    read_at(cx, &*file, pointer.offset, &bufs, Class::Guest).await?;
    let mut directory = bufs.to_vec();
    match mark(&mut directory, pointer.count) {
        None => Ok(false),
        Some(false) => Ok(true),
        Some(true) => {
            cx.run(&*file, Request::write(pointer.offset.get(), Buffers::from_bytes(&directory))).await?;
            Ok(true)
        }
    }
}

/// Sets the flag in a directory of `count` entries; whether any has changed. `None` if it is not such a directory.
fn mark(directory: &mut [u8], count: u32) -> Option<bool> {
    let (mut at, mut changed) = (0usize, false);
    for _ in 0..count {
        let entry = directory.get_mut(at..at.checked_add(ENTRY_LEN)?)?;
        let name = usize::from(u16::from_be_bytes([entry[18], entry[19]]));
        let extra = u32::from_be_bytes([entry[20], entry[21], entry[22], entry[23]]) as usize;
        // The four bytes of flags are big-endian.
        let flags = &mut entry[FLAGS_AT + 3];
        if *flags & AUTO != 0 && *flags & IN_USE == 0 {
            *flags |= IN_USE;
            changed = true;
        }
        at = ENTRY_LEN.checked_add(extra)?.checked_add(name)?.checked_next_multiple_of(8)?.checked_add(at)?;
    }
    (at == directory.len()).then_some(changed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(flags: u8, name: &str, extra: usize) -> Vec<u8> {
        let mut e = vec![0; ENTRY_LEN];
        e[FLAGS_AT + 3] = flags;
        e[19] = name.len() as u8;
        e[23] = extra as u8;
        e.extend(vec![0xee; extra]);
        e.extend(name.as_bytes());
        e.resize(e.len().next_multiple_of(8), 0);
        e
    }

    #[test]
    fn enabled_bitmaps_are_marked_and_the_others_left_alone() {
        let mut d = [entry(AUTO, "a", 0), entry(0, "bcd", 8), entry(AUTO | IN_USE, "e", 3)].concat();
        let before = d.clone();
        assert_eq!(mark(&mut d, 3), Some(true));
        let changed: Vec<usize> = (0..d.len()).filter(|i| d[*i] != before[*i]).collect();
        assert_eq!((changed, d[FLAGS_AT + 3]), (vec![FLAGS_AT + 3], AUTO | IN_USE));
        assert_eq!(mark(&mut d, 3), Some(false));
    }

    #[test]
    fn a_directory_that_does_not_end_with_its_last_entry_is_none() {
        let d = [entry(AUTO, "a", 0), entry(0, "b", 0)].concat();
        assert_eq!(mark(&mut d.clone(), 1), None);
        assert_eq!(mark(&mut d.clone(), 3), None);
        assert_eq!(mark(&mut d[..40].to_vec(), 2), None);
        let mut long = d;
        long[20..24].fill(0xff);
        assert_eq!(mark(&mut long, 2), None);
    }
}
