//! Objects from the cluster's API: services, endpoint slices and leases of instances.
#![no_main]

use berth_cluster::lease::{Expiry, InstanceLease};
use berth_cluster::service::{Service, slice_addresses, slice_ports};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use std::time::Duration;

fuzz_target!(|bytes: &[u8]| {
    let Ok(object) = serde_json::from_slice::<Value>(bytes) else {
        return;
    };
    let _ = (
        slice_addresses(&object).count(),
        slice_ports(&object).count(),
        Service::parse(&object),
    );
    if let Some(lease) = InstanceLease::parse(&object) {
        assert_eq!(
            InstanceLease::parse(&lease.object()).map(|lease| lease.name()),
            Some(lease.name())
        );
    }
    Expiry::default().record_list(Duration::ZERO, Duration::ZERO, [&object]);
});
