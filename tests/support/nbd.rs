//! A small NBD client: one request at a time, simple replies.

use super::daemon::PATIENCE;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// A connection to an export.
pub struct Client {
    stream: UnixStream,
    size: u64,
    flags: u16,
    cookie: u64,
}

const OPTION_EXPORT_NAME: u32 = 1;
const FLAGS_FIXED_NO_ZEROES: u32 = 3;
const READ_ONLY: u16 = 2;

impl Client {
    /// Connects to an export that exists.
    pub fn connect(path: &Path, export: &str) -> Self {
        let mut stream = UnixStream::connect(path).expect("connect to the NBD server");
        stream.set_read_timeout(Some(PATIENCE)).expect("timeout");
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).expect("greeting");
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        let mut hello = FLAGS_FIXED_NO_ZEROES.to_be_bytes().to_vec();
        hello.extend(b"IHAVEOPT");
        hello.extend(OPTION_EXPORT_NAME.to_be_bytes());
        hello.extend((export.len() as u32).to_be_bytes());
        hello.extend(export.as_bytes());
        stream.write_all(&hello).expect("option");
        let mut info = [0; 10];
        stream.read_exact(&mut info).expect("there is such an export");
        let size = u64::from_be_bytes(info[..8].try_into().expect("8 bytes"));
        Self { stream, size, flags: u16::from_be_bytes([info[8], info[9]]), cookie: 0 }
    }

    /// Bytes of the export.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether the server says so.
    pub fn is_read_only(&self) -> bool {
        self.flags & READ_ONLY != 0
    }

    /// Reads.
    pub fn read(&mut self, offset: u64, len: usize) -> Vec<u8> {
        self.request(0, offset, len as u32, &[]);
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).expect("data");
        bytes
    }

    /// Writes.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        self.request(1, offset, bytes.len() as u32, bytes);
    }

    /// Writes; false if the server has gone.
    pub fn try_write(&mut self, offset: u64, bytes: &[u8]) -> bool {
        self.try_request(1, offset, bytes.len() as u32, bytes).is_ok()
    }

    /// Waits until the server closes the connection.
    pub fn assert_closed(mut self) {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => {}
            Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::ConnectionReset),
        }
    }

    fn request(&mut self, command: u16, offset: u64, len: u32, payload: &[u8]) {
        self.try_request(command, offset, len, payload).expect("a reply");
    }

    fn try_request(&mut self, command: u16, offset: u64, len: u32, payload: &[u8]) -> std::io::Result<()> {
        self.cookie += 1;
        let mut header = 0x2560_9513_u32.to_be_bytes().to_vec();
        header.extend([0, 0]);
        header.extend(command.to_be_bytes());
        header.extend(self.cookie.to_be_bytes());
        header.extend(offset.to_be_bytes());
        header.extend(len.to_be_bytes());
        header.extend(payload);
        self.stream.write_all(&header)?;
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply)?;
        assert_eq!(reply[..4], 0x6744_6698_u32.to_be_bytes());
        assert_eq!(reply[4..8], [0; 4], "the request failed");
        assert_eq!(reply[8..], self.cookie.to_be_bytes());
        Ok(())
    }
}
