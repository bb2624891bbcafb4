//! Parser of instance records, files which other processes write.
#![no_main]

use berth_node::instance_id::InstanceId;
use berth_node::registry::instance::Record;
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;

static ID: LazyLock<InstanceId> = LazyLock::new(|| InstanceId::parse("a").expect("a valid ID"));

fuzz_target!(|bytes: &[u8]| {
    if let Ok(record) = Record::parse(bytes, &ID) {
        assert!(record.address.ip().is_loopback() && record.instance == *ID);
        let again = serde_json::to_vec(&record).expect("what was read can be written");
        Record::parse(&again, &ID).expect("what was written can be read");
    }
});
