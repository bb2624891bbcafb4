//! Messages between a shim and an instance's supervisor. The sender may have another version, or be
//! malicious.
#![no_main]

use berth_node::ipc::supervisor::{FromShim, ToShim, parse_message};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(message) = parse_message::<FromShim>(bytes) {
        let again = serde_json::to_vec(&message).expect("what was read can be written");
        assert_eq!(parse_message(&again), Ok(message));
    }
    if let Ok(message) = parse_message::<ToShim>(bytes) {
        let again = serde_json::to_vec(&message).expect("what was read can be written");
        assert_eq!(parse_message(&again), Ok(message));
    }
});
