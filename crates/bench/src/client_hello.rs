//! A first message for clients without TLS. A relay waits for the message, replays it and finds it
//! complete, as with a real ClientHello.

/// Bytes before the body: the headers of the record and of the message.
pub(crate) const HEADERS: usize = 9;

/// A ClientHello of LENGTH bytes in one record (RFC 8446, sections 4 and 5.1), with an empty body.
pub(crate) const fn client_hello<const LENGTH: usize>() -> [u8; LENGTH] {
    let mut hello = [0; LENGTH];
    let (record, body) = (LENGTH - 5, LENGTH - HEADERS);
    (hello[0], hello[1], hello[2], hello[3], hello[4]) =
        (0x16, 3, 1, (record >> 8) as u8, record as u8);
    (hello[5], hello[7], hello[8]) = (1, (body >> 8) as u8, body as u8);
    hello
}
