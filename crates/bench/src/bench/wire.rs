//! The messages between client and backend.
//!
//! Requests and answers are a header and a body. The bodies are a known pattern, so an answer as
//! long as its request is an echo, and no end has to keep sent data. The header begins as a
//! ClientHello: a relay that inspects the first bytes treats the client as a real one.

use crate::client_hello::{HEADERS, client_hello};
use std::io;

/// Bytes of a header.
pub(super) const HEADER: usize = HEADERS + 21;

/// The length of a message that lasts as long as its connection.
pub(super) const ENDLESS: u64 = u64::MAX;

/// Most bytes in one read or write.
pub(super) const CHUNK: usize = 256 * 1024;

/// A header is a ClientHello with numbers inside.
const BLANK: [u8; HEADER] = client_hello();

/// The pattern repeats after this many bytes.
const PERIOD: usize = 256;

/// Reads up to this length are compared completely, and longer reads only at the beginning and the
/// end: the tool must be cheaper than the measured relay.
const COMPARED: usize = 1024;

/// The header of a request or an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    /// Asks for the number of received bytes of endless requests, instead of the pattern.
    pub(super) count: bool,
    /// An answer repeats the number of its request.
    pub(super) number: u32,
    /// Bytes of the request, including the header. In the answer to `count`, the count.
    pub(super) request: u64,
    /// Bytes of the answer, including its header.
    pub(super) answer: u64,
}

impl Header {
    pub(super) fn encode(&self) -> [u8; HEADER] {
        let mut bytes = BLANK;
        let numbers = &mut bytes[HEADERS..];
        numbers[0] = u8::from(self.count);
        numbers[1..5].copy_from_slice(&self.number.to_be_bytes());
        numbers[5..13].copy_from_slice(&self.request.to_be_bytes());
        numbers[13..].copy_from_slice(&self.answer.to_be_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; HEADER]) -> io::Result<Self> {
        let Some([count @ (0 | 1), numbers @ ..]) = bytes.strip_prefix(&BLANK[..HEADERS]) else {
            return Err(garbled_error());
        };
        let long = |at: usize| u64::from_be_bytes(std::array::from_fn(|byte| numbers[at + byte]));
        let number = u32::from_be_bytes(std::array::from_fn(|byte| numbers[byte]));
        let header = Self {
            count: *count == 1,
            number,
            request: long(4),
            answer: long(12),
        };
        let too_short = header.request.min(header.answer) < HEADER as u64;
        // In an answer with a count, the field `request` is the count.
        if too_short && !header.count {
            Err(garbled_error())
        } else {
            Ok(header)
        }
    }
}

/// The bodies of all messages.
pub(super) struct Pattern(Vec<u8>);

impl Pattern {
    pub(super) fn new() -> Self {
        Self((0..CHUNK + PERIOD).map(|at| (at % PERIOD) as u8).collect())
    }

    /// The bytes for one write of a message from `offset` on, with `left` bytes remaining.
    pub(super) fn from(&self, offset: u64, left: u64) -> &[u8] {
        &self.at(offset)[..left.min(CHUNK as u64) as usize]
    }

    /// A complete message.
    pub(super) fn message(&self, header: &Header, length: usize) -> Vec<u8> {
        let mut message = self.0[..length].to_vec();
        message[..HEADER].copy_from_slice(&header.encode());
        message
    }

    /// Checks that `bytes` are a body's bytes from `offset` of the message on.
    pub(super) fn check(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let expected = &self.at(offset)[..bytes.len()];
        let same = if bytes.len() <= COMPARED {
            bytes == expected
        } else {
            bytes[..PERIOD] == expected[..PERIOD] && bytes.last() == expected.last()
        };
        if same { Ok(()) } else { Err(garbled_error()) }
    }

    fn at(&self, offset: u64) -> &[u8] {
        &self.0[(offset % PERIOD as u64) as usize..]
    }
}

/// The error if other bytes arrive than were sent.
pub(super) fn garbled_error() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        "bytes arrived that were not sent",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_survives_encoding() {
        let header = Header {
            count: true,
            number: 7,
            request: 256,
            answer: ENDLESS,
        };
        assert_eq!(Header::decode(&header.encode()).ok(), Some(header));
        assert!(Header::decode(&[0; HEADER]).is_err());
    }

    #[test]
    fn a_changed_byte_is_seen() {
        let pattern = Pattern::new();
        for (length, changed) in [(100, 50), (CHUNK, 0), (CHUNK, CHUNK - 1)] {
            let mut bytes = pattern.from(300, length as u64).to_vec();
            assert!(pattern.check(&bytes, 300).is_ok());
            assert!(pattern.check(&bytes, 301).is_err());
            bytes[changed] ^= 1;
            assert!(pattern.check(&bytes, 300).is_err());
        }
    }
}
