//! What clients that speak no TLS say first, so that a relay waits for it, replays it and takes it for whole as if they did.

/// Bytes until the body: the headers of the record and of the message.
pub const HEADERS: usize = 9;

/// A ClientHello of so many bytes in one record (RFC 8446, sections 4 and 5.1), with nothing in it.
pub const fn client_hello<const LENGTH: usize>() -> [u8; LENGTH] {
    let mut hello = [0; LENGTH];
    let (record, body) = (LENGTH - 5, LENGTH - HEADERS);
    (hello[0], hello[1], hello[2], hello[3], hello[4]) = (0x16, 3, 1, (record >> 8) as u8, record as u8);
    (hello[5], hello[7], hello[8]) = (1, (body >> 8) as u8, body as u8);
    hello
}
