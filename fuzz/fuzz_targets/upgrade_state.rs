//! Files with the state of an upgrade. A file may be truncated, or written by another version of
//! berth.
#![no_main]

use berth_upgrade::state::parse_state;
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

fuzz_target!(|bytes: &[u8]| {
    let Ok(state) = parse_state(bytes) else {
        return;
    };
    let again = serde_json::to_vec(&state).expect("what was read can be written");
    assert_eq!(parse_state(&again).as_ref(), Ok(&state));
    // Fields that a later version adds are ignored.
    let mut later: Value = serde_json::from_slice(&again).expect("it was just written");
    later["later"] = "x".into();
    later["position"]["later"] = 1.into();
    assert_eq!(parse_state(later.to_string().as_bytes()), Ok(state));
});
