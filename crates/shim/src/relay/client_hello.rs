//! The first message of a TLS client. Pure.

/// The type of a handshake record (RFC 8446, section 5.1).
pub(super) const HANDSHAKE_TYPE: u8 = 0x16;

/// Length of a message's type and length fields (section 4).
const MESSAGE_HEADER: usize = 4;

/// True if an instance answers these bytes: they have a complete first message, in one or several
/// records, or are no TLS. A part of a message is never complete, whatever follows: Go's TLS waits
/// for the rest of the message, and skips warning alerts in between.
pub fn is_whole_hello(mut bytes: &[u8]) -> bool {
    if bytes.first().is_some_and(|first| *first != HANDSHAKE_TYPE) {
        return true;
    }
    let (mut received, mut header) = (0, [0; MESSAGE_HEADER]);
    while let [kind, _, _, high, low, rest @ ..] = bytes {
        let record = usize::from(u16::from_be_bytes([*high, *low]));
        let Some((fragment, next)) = rest.split_at_checked(record) else {
            return false;
        };
        if *kind == HANDSHAKE_TYPE {
            header[received.min(MESSAGE_HEADER)..]
                .iter_mut()
                .zip(fragment)
                .for_each(|(to, from)| *to = *from);
            received += fragment.len();
        }
        let [_, length @ ..] = header;
        let length = length
            .into_iter()
            .fold(0, |length, byte| length << 8 | usize::from(byte));
        if received >= MESSAGE_HEADER && received - MESSAGE_HEADER >= length {
            return true;
        }
        bytes = next;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CLIENT_HELLO: u8 = 1;

    /// Returns a message of the given length, cut into records of the given lengths.
    fn make_hello(length: usize, mut records: impl Iterator<Item = usize>) -> Vec<u8> {
        let mut message = vec![CLIENT_HELLO, 0, (length >> 8) as u8, length as u8];
        message.resize(MESSAGE_HEADER + length, 7);
        let mut bytes = Vec::new();
        let mut rest = &message[..];
        while !rest.is_empty() {
            let (record, next) =
                rest.split_at(records.next().unwrap_or(usize::MAX).min(rest.len()));
            bytes.extend([
                HANDSHAKE_TYPE,
                3,
                1,
                (record.len() >> 8) as u8,
                record.len() as u8,
            ]);
            bytes.extend(record);
            rest = next;
        }
        bytes
    }

    #[test]
    fn bytes_that_are_no_client_hello_are_not_waited_for() {
        assert!(
            !is_whole_hello(b"")
                && !is_whole_hello(&[HANDSHAKE_TYPE])
                && !is_whole_hello(&[HANDSHAKE_TYPE, 3, 1, 0, 9])
        );
        assert!(
            is_whole_hello(b"G") && is_whole_hello(b"GET / HTTP/1.1"),
            "no TLS"
        );
        assert!(
            is_whole_hello(&[HANDSHAKE_TYPE, 3, 1, 0, 4, 2, 0, 0, 0]),
            "a ServerHello"
        );
        assert!(
            !is_whole_hello(&[HANDSHAKE_TYPE, 3, 1, 0, 1, 2]),
            "a part of one"
        );
        assert!(
            !is_whole_hello(&[HANDSHAKE_TYPE, 3, 1, 0x40, 0, CLIENT_HELLO, 0, 0, 0]),
            "a short message in a long record"
        );
        let mut within = vec![
            HANDSHAKE_TYPE,
            3,
            1,
            0,
            1,
            CLIENT_HELLO,
            21,
            3,
            1,
            0,
            2,
            1,
            90,
        ];
        assert!(!is_whole_hello(&within), "an alert within it");
        within.extend([HANDSHAKE_TYPE, 3, 1, 0, 3, 0, 0, 0]);
        assert!(
            is_whole_hello(&within) && !is_whole_hello(&within[..within.len() - 1]),
            "and the rest of it"
        );
    }

    proptest! {
        #[test]
        fn only_a_complete_message_is_whole(length in 0..3000usize, records in prop::collection::vec(0..2000usize, 0..20)) {
            let bytes = make_hello(length, records.into_iter());
            prop_assert!(is_whole_hello(&bytes));
            for less in 0..bytes.len() {
                prop_assert!(!is_whole_hello(&bytes[..less]), "{less} of {}", bytes.len());
            }
        }
    }
}
