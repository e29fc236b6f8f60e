//! Addresses of sockets in the spellings of the command line and of QMP.

use crate::error::{Error, Result};
use crate::export::nbd::Address;
use crate::options::Options;
use std::path::PathBuf;

/// Longest path of a unix socket, in bytes (the kernel's limit, without the NUL).
const PATH_LEN_MAX: usize = 107;

/// Reads `type=unix,path=..` or `type=inet,host=..,port=..`; in QMP what follows the type may lie below `data`.
pub(in crate::cli) fn take_address(options: &mut Options) -> Result<Address> {
    let kind = options.require_enum("type", &["unix", "inet"])?;
    let data = options.take_object("data")?;
    match data {
        Some(mut data) => {
            let address = take_rest(&mut data, kind)?;
            data.finish()?;
            Ok(address)
        }
        None => take_rest(options, kind),
    }
}

fn take_rest(options: &mut Options, kind: usize) -> Result<Address> {
    if kind == 0 {
        return unix(options.require_str("path")?);
    }
    let host = options.require_str("host")?;
    let port = options.require_str("port")?;
    let port = port.parse().map_err(|_| options.invalid("port", "must be a number from 0 to 65535"))?;
    Ok(Address::Tcp(host, port))
}

/// Reads `unix:PATH` or `HOST:PORT`, the host of an IPv6 address in brackets. Without a host: all addresses.
pub(in crate::cli) fn parse_address(text: &str) -> Result<Address> {
    if let Some(path) = text.strip_prefix("unix:") {
        return unix(path.to_owned());
    }
    let wrong = || Error::invalid(format!("'{text}' is not an address, expected unix:PATH or HOST:PORT"));
    let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
    let inner = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
    if inner.is_none() && host.contains([':', '/']) {
        return Err(wrong());
    }
    let host = inner.unwrap_or(if host.is_empty() { "::" } else { host });
    Ok(Address::Tcp(host.to_owned(), port.parse().map_err(|_| wrong())?))
}

/// The address of a unix socket.
pub(in crate::cli) fn unix(path: String) -> Result<Address> {
    if path.is_empty() || path.len() > PATH_LEN_MAX || path.contains('\0') {
        return Err(Error::invalid(format!(
            "the path of a unix socket has 1 to {PATH_LEN_MAX} bytes, not {}",
            path.len()
        )));
    }
    Ok(Address::Unix(PathBuf::from(path)))
}

/// The URI under which clients find an export.
pub(in crate::cli) fn uri(address: &Address, export: &str) -> String {
    let name = percent_encoded(export.as_bytes(), false);
    match address {
        Address::Unix(path) => {
            let path = percent_encoded(path.as_os_str().as_encoded_bytes(), true);
            format!("nbd+unix:///{name}?socket={path}")
        }
        // Where all addresses are listened on, the local one is as good as any.
        Address::Tcp(host, port) => {
            let host = match host.as_str() {
                "::" | "0.0.0.0" => "localhost".to_owned(),
                h if h.contains(':') => format!("[{h}]"),
                h => h.to_owned(),
            };
            let slash = if name.is_empty() { "" } else { "/" };
            format!("nbd://{host}:{port}{slash}{name}")
        }
    }
}

fn percent_encoded(bytes: &[u8], keep_slash: bool) -> String {
    let mut out = String::new();
    for &b in bytes {
        if b.is_ascii_alphanumeric() || b"-._~".contains(&b) || keep_slash && b == b'/' {
            out.push(char::from(b));
        } else {
            out.push_str(&format!("%{b:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(text: &str) -> Result<Address> {
        let mut options = Options::parse(text)?;
        let address = take_address(&mut options)?;
        options.finish()?;
        Ok(address)
    }

    #[test]
    fn both_spellings_of_options_are_understood() {
        let unix = Address::Unix("/tmp/s".into());
        let tcp = Address::Tcp("::1".into(), 10809);
        assert_eq!(take("type=unix,path=/tmp/s").expect("unix"), unix);
        assert_eq!(take(r#"{"type": "unix", "data": {"path": "/tmp/s"}}"#).expect("unix"), unix);
        assert_eq!(take("type=inet,host=::1,port=10809").expect("inet"), tcp);
        assert_eq!(take(r#"{"type": "inet", "data": {"host": "::1", "port": "10809"}}"#).expect("inet"), tcp);
    }

    #[test]
    fn a_wrong_address_names_the_option() {
        for (text, part) in [
            ("path=/s", "'type'"),
            ("type=vsock", "'type'"),
            ("type=unix", "'path'"),
            ("type=inet,host=a", "'port'"),
            ("type=inet,host=a,port=99999", "'port'"),
            ("type=unix,path=/s,x=y", "'x'"),
            (r#"{"type": "unix", "data": {"path": "/s", "x": "y"}}"#, "'data.x'"),
        ] {
            let e = take(text).expect_err(text);
            assert!(e.to_string().contains(part), "{text}: {e}");
        }
        assert!(unix("/".repeat(200)).is_err());
    }

    #[test]
    fn the_short_spelling_and_its_uri() {
        for (text, address, link) in [
            ("unix:/a b/s", Address::Unix("/a b/s".into()), "nbd+unix:///d%2F1?socket=/a%20b/s"),
            ("localhost:10809", Address::Tcp("localhost".into(), 10809), "nbd://localhost:10809/d%2F1"),
            ("[::1]:0", Address::Tcp("::1".into(), 0), "nbd://[::1]:0/d%2F1"),
            (":1", Address::Tcp("::".into(), 1), "nbd://localhost:1/d%2F1"),
        ] {
            let found = parse_address(text).expect(text);
            assert_eq!(found, address, "{text}");
            assert_eq!(uri(&found, "d/1"), link);
        }
        assert_eq!(uri(&Address::Tcp("h".into(), 1), ""), "nbd://h:1");
        for wrong in ["", "localhost", "::1:80", "h:", "h:x", "unix:", "/tmp/s:1"] {
            assert!(parse_address(wrong).is_err(), "{wrong}");
        }
    }
}
