//! The messages between client and backend.
//!
//! Requests and answers are a header and a body. The bodies are a known pattern, so neither end has
//! to keep the data that it sends, and an answer can be an echo of its request. The header begins
//! as a ClientHello: a relay that inspects the first bytes treats the client as a real one.

use crate::client_hello::{TLS_HEADER_BYTES, client_hello};
use std::io;

/// Length of a header, in bytes.
pub(super) const HEADER_BYTES: usize = TLS_HEADER_BYTES + 21;

/// The length that stands for a message without an end: it lasts as long as its connection.
pub(super) const ENDLESS_LENGTH: u64 = u64::MAX;

/// Largest number of bytes in one read or write.
pub(super) const MAX_CHUNK: usize = 256 * 1024;

/// A header before its numbers are filled in: a ClientHello without numbers.
const BLANK_HEADER: [u8; HEADER_BYTES] = client_hello();

/// Length after which the pattern in bodies repeats, in bytes.
const PATTERN_PERIOD: usize = 256;

/// Length up to which received bytes are compared completely. Of longer reads, only the beginning
/// and the end are compared, because the tool must use less CPU time than the relay.
const MAX_COMPARED: usize = 1024;

/// The numbers in the header of a request or an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    /// True if the request asks how many bytes of requests without an end have arrived, and for
    /// nothing else.
    pub(super) count: bool,
    /// The number of the request. The answer has the same number.
    pub(super) number: u32,
    /// Length of the request in bytes, with its header. In the answer to a `count` request, the
    /// count.
    pub(super) request: u64,
    /// Length of the answer in bytes, with its header.
    pub(super) answer: u64,
}

impl Header {
    pub(super) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = BLANK_HEADER;
        let numbers = &mut bytes[TLS_HEADER_BYTES..];
        numbers[0] = u8::from(self.count);
        numbers[1..5].copy_from_slice(&self.number.to_be_bytes());
        numbers[5..13].copy_from_slice(&self.request.to_be_bytes());
        numbers[13..].copy_from_slice(&self.answer.to_be_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; HEADER_BYTES]) -> io::Result<Self> {
        let Some([count @ (0 | 1), numbers @ ..]) =
            bytes.strip_prefix(&BLANK_HEADER[..TLS_HEADER_BYTES])
        else {
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
        let too_short = header.request.min(header.answer) < HEADER_BYTES as u64;
        // The answer to a `count` request has the count in the field `request`.
        if too_short && !header.count {
            Err(garbled_error())
        } else {
            Ok(header)
        }
    }
}

/// The pattern that is the body of every message.
pub(super) struct Pattern(Vec<u8>);

impl Pattern {
    pub(super) fn new() -> Self {
        Self(
            (0..MAX_CHUNK + PATTERN_PERIOD)
                .map(|at| (at % PATTERN_PERIOD) as u8)
                .collect(),
        )
    }

    /// Returns the bytes that one write sends of a message from `offset` on, if `left` bytes
    /// remain.
    pub(super) fn bytes_from(&self, offset: u64, left: u64) -> &[u8] {
        &self.pattern_at(offset)[..left.min(MAX_CHUNK as u64) as usize]
    }

    /// A complete message.
    pub(super) fn encode_message(&self, header: &Header, length: usize) -> Vec<u8> {
        let mut message = self.0[..length].to_vec();
        message[..HEADER_BYTES].copy_from_slice(&header.encode());
        message
    }

    /// Checks that received bytes are those of the pattern, from `offset` of their message on.
    pub(super) fn check_bytes(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let expected = &self.pattern_at(offset)[..bytes.len()];
        let same = if bytes.len() <= MAX_COMPARED {
            bytes == expected
        } else {
            bytes[..PATTERN_PERIOD] == expected[..PATTERN_PERIOD] && bytes.last() == expected.last()
        };
        if same { Ok(()) } else { Err(garbled_error()) }
    }

    fn pattern_at(&self, offset: u64) -> &[u8] {
        &self.0[(offset % PATTERN_PERIOD as u64) as usize..]
    }
}

/// Makes the error for received bytes that nobody sent.
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
            answer: ENDLESS_LENGTH,
        };
        assert_eq!(Header::decode(&header.encode()).ok(), Some(header));
        assert!(Header::decode(&[0; HEADER_BYTES]).is_err());
    }

    #[test]
    fn a_changed_byte_is_seen() {
        let pattern = Pattern::new();
        for (length, changed) in [(100, 50), (MAX_CHUNK, 0), (MAX_CHUNK, MAX_CHUNK - 1)] {
            let mut bytes = pattern.bytes_from(300, length as u64).to_vec();
            assert!(pattern.check_bytes(&bytes, 300).is_ok());
            assert!(pattern.check_bytes(&bytes, 301).is_err());
            bytes[changed] ^= 1;
            assert!(pattern.check_bytes(&bytes, 300).is_err());
        }
    }
}
