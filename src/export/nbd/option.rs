//! Options of the handshake: from bytes to what was asked for. Pure.

use crate::io::nbd::proto::{Info, Opt, Reader, STRING_LEN_MAX};

/// A well-formed option.
#[derive(Clone, Copy, Debug)]
pub(super) enum Asked<'a> {
    /// Begin transmission on this export; errors cannot be answered.
    ExportName(&'a str),
    /// End the session.
    Abort,
    /// List the exports.
    List,
    /// Begin TLS.
    StartTls,
    /// Tell about an export, and begin transmission if `go`.
    Info { name: &'a str, go: bool, wants: Wants },
    /// Use structured replies.
    StructuredReply,
    /// List metadata contexts of an export, or choose them if `set`.
    Meta { name: &'a str, set: bool, queries: Queries<'a> },
    /// Not known here.
    Unknown,
}

/// Which optional information the client asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Wants {
    pub(super) name: bool,
    pub(super) description: bool,
}

/// The queries of a metadata option; checked to be well-formed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queries<'a> {
    count: u32,
    rest: Reader<'a>,
}

impl Queries<'_> {
    /// Whether there is no query.
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }
}

impl<'a> Iterator for Queries<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        self.count = self.count.checked_sub(1)?;
        self.rest.counted_str()
    }
}

/// What `option` with `data` asks for, or a sentence that says what is wrong with it.
pub(super) fn parse(option: Opt, data: &[u8]) -> Result<Asked<'_>, &'static str> {
    let mut r = Reader::new(data);
    let asked = match option {
        Opt::EXPORT_NAME => {
            let name = r.str(data.len()).ok_or("the export name is too long or not UTF-8")?;
            return Ok(Asked::ExportName(name));
        }
        Opt::ABORT => return Ok(Asked::Abort),
        Opt::LIST => Asked::List,
        Opt::STARTTLS => Asked::StartTls,
        Opt::STRUCTURED_REPLY => Asked::StructuredReply,
        Opt::INFO | Opt::GO => parse_info(&mut r, option == Opt::GO)?,
        Opt::LIST_META_CONTEXT | Opt::SET_META_CONTEXT => {
            parse_meta(&mut r, option == Opt::SET_META_CONTEXT)?
        }
        _ => return Ok(Asked::Unknown),
    };
    if r.is_empty() { Ok(asked) } else { Err("the option has more data than it should") }
}

fn parse_info<'a>(r: &mut Reader<'a>, go: bool) -> Result<Asked<'a>, &'static str> {
    let name = r.counted_str().ok_or("the export name is cut off, too long or not UTF-8")?;
    let count = r.u16().ok_or("the number of information requests is missing")?;
    let mut wants = Wants::default();
    for _ in 0..count {
        match Info(r.u16().ok_or("information requests are missing")?) {
            Info::NAME => wants.name = true,
            Info::DESCRIPTION => wants.description = true,
            // Size and block sizes are always sent; unknown requests are ignored, as the protocol says.
            _ => {}
        }
    }
    Ok(Asked::Info { name, go, wants })
}

fn parse_meta<'a>(r: &mut Reader<'a>, set: bool) -> Result<Asked<'a>, &'static str> {
    let name = r.counted_str().ok_or("the export name is cut off, too long or not UTF-8")?;
    let count = r.u32().ok_or("the number of queries is missing")?;
    let queries = Queries { count, rest: *r };
    for _ in 0..count {
        // Ends at the latest where the data does, whatever `count` says.
        r.counted_str().ok_or("a query is cut off, too long or not UTF-8")?;
    }
    Ok(Asked::Meta { name, set, queries })
}

/// Whether `name` can be the name or description of an export.
pub(super) fn is_valid_string(name: &str) -> bool {
    name.len() <= STRING_LEN_MAX && !name.contains('\0')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(text: &str) -> Vec<u8> {
        let mut v = u32::try_from(text.len()).expect("short").to_be_bytes().to_vec();
        v.extend(text.as_bytes());
        v
    }

    #[test]
    fn info_names_the_export_and_what_is_wanted() {
        let mut data = counted("disk");
        data.extend([0, 3, 0, 1, 0, 9, 0, 2]);
        let Ok(Asked::Info { name: "disk", go: true, wants }) = parse(Opt::GO, &data) else {
            panic!("not understood");
        };
        assert_eq!(wants, Wants { name: true, description: true });
    }

    #[test]
    fn every_truncation_and_every_surplus_byte_is_refused() {
        let mut info = counted("disk");
        info.extend([0, 1, 0, 3]);
        let mut meta = counted("disk");
        meta.extend([0, 0, 0, 2]);
        meta.extend(counted("base:allocation"));
        meta.extend(counted("x:"));
        for (option, data) in [
            (Opt::INFO, info.clone()),
            (Opt::GO, info),
            (Opt::LIST_META_CONTEXT, meta.clone()),
            (Opt::SET_META_CONTEXT, meta),
        ] {
            assert!(parse(option, &data).is_ok());
            for cut in 0..data.len() {
                assert!(parse(option, &data[..cut]).is_err(), "{option:?} cut at {cut}");
            }
            let mut longer = data.clone();
            longer.push(0);
            assert!(parse(option, &longer).is_err(), "{option:?} with one byte more");
        }
        for option in [Opt::LIST, Opt::STARTTLS, Opt::STRUCTURED_REPLY] {
            assert!(parse(option, b"").is_ok() && parse(option, b"x").is_err());
        }
    }

    #[test]
    fn a_count_of_queries_far_beyond_the_data_ends_at_the_data() {
        let mut data = counted("d");
        data.extend(u32::MAX.to_be_bytes());
        data.extend(counted("base:"));
        assert!(parse(Opt::SET_META_CONTEXT, &data).is_err());
    }

    #[test]
    fn queries_come_in_order() {
        let mut data = counted("d");
        data.extend(2u32.to_be_bytes());
        data.extend(counted("a:1"));
        data.extend(counted(""));
        let Ok(Asked::Meta { name: "d", set: false, queries }) = parse(Opt::LIST_META_CONTEXT, &data) else {
            panic!("not understood");
        };
        assert!(!queries.is_empty());
        assert_eq!(queries.collect::<Vec<_>>(), ["a:1", ""]);
    }
}
