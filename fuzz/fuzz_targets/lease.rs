//! Parser of lease files, which other processes write.
#![no_main]

use berth_node::instance_id::InstanceId;
use berth_node::registry::lease::Lease;
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;
use std::time::{Duration, SystemTime};

static ID: LazyLock<InstanceId> = LazyLock::new(|| InstanceId::parse("a").expect("a valid ID"));

fuzz_target!(|bytes: &[u8]| {
    if let Ok(mut lease) = Lease::parse(bytes, &ID) {
        assert!(
            lease.instance == *ID
                && lease
                    .listen
                    .iter()
                    .chain(&lease.backend)
                    .all(|address| address.port() != 0)
        );
        assert!(!lease.is_live(&lease.boot_id, lease.expires()));
        let _ = lease.is_live(&lease.boot_id, Duration::ZERO);
        lease.renew(Duration::ZERO, SystemTime::now());
        let again = serde_json::to_vec(&lease).expect("what was read can be written");
        Lease::parse(&again, &ID).expect("what was written can be read");
    }
});
