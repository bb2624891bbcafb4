//! Messages between a shim and an instance's supervisor, on a socket in the run directory: a JSON
//! object each. A shim sends clients' sockets. The supervisor makes each socket the result of an
//! accept(2) of the instance. This module does no I/O.
//!
//! The supervisor begins with [`ToShim::Hello`], then says whether the instance listens. While the
//! instance listens, a shim may send clients, at most [`UNACKNOWLEDGED`] before an acknowledgement.
//! Further clients wait in the shim, which decides their order. If the shim sends them
//! nevertheless, the supervisor sends them back.
//!
//! If the connection ends, the shim has its unacknowledged clients back: the supervisor has ended,
//! or has discarded them. The shim first reads the earlier messages, even after `ECONNRESET`. A
//! shim does not end the connection while a client is unacknowledged: the supervisor would hand the
//! client over nevertheless, as for a shim that died.

use crate::instance_id::InstanceId;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Version of the messages in both directions. If the supervisor has another version, the shim
/// relays clients instead of sending them.
pub const VERSION: u32 = 2;

/// Maximum number of clients that a shim has sent and the supervisor has not acknowledged.
pub const UNACKNOWLEDGED: usize = 64;

/// Maximum number of clients in one [`ToShim::Taken`]: a fourth of [`UNACKNOWLEDGED`], so that a
/// shim seldom waits.
pub const MAX_TAKEN: usize = UNACKNOWLEDGED / 4;

/// Time for which the supervisor may delay a [`ToShim::Taken`], to acknowledge more clients at
/// once.
pub const TAKEN_DELAY: Duration = Duration::from_millis(10);

/// A message from a shim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "message")]
pub enum FromShim {
    /// A client. Its socket comes with the message. The client's address is the socket's peer
    /// address, not an address that a shim reports. The socket becomes blocking or non-blocking as
    /// the instance asks, and so do the shim's duplicates of the socket. No number is used twice in
    /// a connection.
    Client { seq: u64 },
    /// The shim wants the client back. If the instance has accepted the client already, the
    /// supervisor acknowledges it as usual.
    Recall { seq: u64 },
    /// A message of a later version of berth. The supervisor ignores it.
    #[serde(other)]
    Unknown,
}

/// A message from a supervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "message")]
pub enum ToShim {
    Hello {
        version: u32,
        instance: InstanceId,
    },
    /// The instance accepts connections: from now on, a shim may send clients.
    Listening,
    /// The instance has closed its listener. The supervisor sends waiting clients and later clients
    /// back.
    Closed,
    /// The instance has accepted these clients, at most [`MAX_TAKEN`]. The supervisor may delay the
    /// message by [`TAKEN_DELAY`], since only a shim with many clients under way waits for it. If
    /// the supervisor is killed meanwhile, the shim does not know that the instance has the
    /// clients.
    Taken {
        seqs: Vec<u64>,
    },
    /// The supervisor gives this client back to the shim.
    Back {
        seq: u64,
    },
    /// A message of a later version of berth. The shim ignores it.
    #[serde(other)]
    Unknown,
}

/// Parses a message of either direction.
///
/// # Errors
/// The bytes are not a message.
pub fn parse_message<T: DeserializeOwned>(message: &[u8]) -> Result<T, String> {
    serde_json::from_slice(message)
        .map_err(|error| format!("not a message between a shim and a supervisor: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages_are_as_version_2_has_them() {
        let client = FromShim::Client { seq: 7 };
        let json = r#"{"message":"client","seq":7}"#;
        assert_eq!(serde_json::to_string(&client).unwrap(), json);
        let recall = r#"{"message":"recall","seq":7}"#;
        assert_eq!(
            serde_json::to_string(&FromShim::Recall { seq: 7 }).unwrap(),
            recall
        );
        let hello = ToShim::Hello {
            version: VERSION,
            instance: InstanceId::parse("a").unwrap(),
        };
        for (sent, json) in [
            (hello, r#"{"message":"hello","version":2,"instance":"a"}"#),
            (ToShim::Listening, r#"{"message":"listening"}"#),
            (ToShim::Closed, r#"{"message":"closed"}"#),
            (
                ToShim::Taken { seqs: vec![7, 9] },
                r#"{"message":"taken","seqs":[7,9]}"#,
            ),
            (ToShim::Back { seq: 7 }, r#"{"message":"back","seq":7}"#),
        ] {
            assert_eq!(serde_json::to_string(&sent).unwrap(), json);
            let later = json.replacen('{', r#"{"later":[],"#, 1);
            assert_eq!(parse_message(later.as_bytes()), Ok(sent));
        }
        let later = br#"{"message":"fly","seq":7}"#;
        assert_eq!(
            (parse_message(later), parse_message(later)),
            (Ok(FromShim::Unknown), Ok(ToShim::Unknown))
        );
    }

    proptest! {
        #[test]
        fn garbage_is_an_error_or_a_message_that_can_be_written(
            bytes in prop_oneof![
                prop::collection::vec(any::<u8>(), 0..200).boxed(),
                r#"\{("(message|seqs?|version|instance)":("?[a-z0-9:.\[\]]{0,12}"?|-?[0-9]{0,20}|\[([0-9]{1,20},?){0,3}\]),?){0,4}\}"#
                    .prop_map(String::into_bytes).boxed(),
            ],
        ) {
            if let Ok(message) = parse_message::<FromShim>(&bytes) {
                prop_assert_eq!(parse_message(&serde_json::to_vec(&message).unwrap()), Ok(message));
            }
            if let Ok(message) = parse_message::<ToShim>(&bytes) {
                prop_assert_eq!(parse_message(&serde_json::to_vec(&message).unwrap()), Ok(message));
            }
        }
    }
}
