//! Requests and updates that a shim receives, and a shim's replies. The sender may have another
//! version, or be malicious.
#![no_main]

use berth_node::ipc::wire::{parse_reply, parse_request, parse_update, split_message};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(request) = parse_request(bytes) {
        let again = serde_json::to_vec(&request).expect("what was read can be written");
        assert_eq!(parse_request(&again), Ok(request));
    }
    if let Ok(update) = parse_update(bytes) {
        let again = serde_json::to_vec(&update).expect("what was read can be written");
        assert_eq!(parse_update(&again), Ok(update));
    }
    let (json, rest) = split_message(bytes);
    assert!(json.len() + rest.len() <= bytes.len());
    if let Ok(reply) = parse_reply(bytes) {
        let again = serde_json::to_vec(&reply).expect("what was read can be written");
        assert_eq!(parse_reply(&again).as_ref(), Ok(&reply));
        if let berth_node::ipc::wire::Reply::Status(status) = reply {
            let _ = status.check_ready();
        }
    }
});
