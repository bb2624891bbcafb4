//! A first message for clients that use no TLS. It looks like a complete ClientHello, so a relay
//! waits for all of it and can replay it.

/// Number of bytes before the ClientHello's body: the header of the record and the header of the
/// message.
pub(crate) const TLS_HEADER_BYTES: usize = 9;

/// Makes a ClientHello of LENGTH bytes in one record (RFC 8446, sections 4 and 5.1). Its body is
/// zeroes.
pub(crate) const fn client_hello<const LENGTH: usize>() -> [u8; LENGTH] {
    let mut hello = [0; LENGTH];
    let (record, body) = (LENGTH - 5, LENGTH - TLS_HEADER_BYTES);
    (hello[0], hello[1], hello[2], hello[3], hello[4]) =
        (0x16, 3, 1, (record >> 8) as u8, record as u8);
    (hello[5], hello[7], hello[8]) = (1, (body >> 8) as u8, body as u8);
    hello
}
