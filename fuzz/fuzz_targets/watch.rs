//! What an apiserver sends in a watch, and the objects in it, come from outside.
#![no_main]

use berth_cluster::lease::{Expiry, InstanceLease};
use berth_cluster::service::{Service, addresses, ports};
use berth_cluster::watch::Events;
use libfuzzer_sys::fuzz_target;
use std::time::Duration;

fuzz_target!(|bytes: &[u8]| {
    let mut whole = Events::default();
    let seen = whole.push(bytes);
    let Ok(events) = seen else { return };
    // However they were cut.
    let (mut cut, (first, second)) = (Events::default(), bytes.split_at(bytes.len() / 2));
    let mut again = cut.push(first).unwrap_or_default();
    again.extend(cut.push(second).unwrap_or_default());
    assert_eq!(again, events);
    for event in &events {
        let _ = (addresses(&event.object).count(), ports(&event.object).count(), Service::parse(&event.object));
        if let Some(lease) = InstanceLease::parse(&event.object) {
            assert_eq!(InstanceLease::parse(&lease.object()).map(|lease| lease.name()), Some(lease.name()));
        }
    }
    Expiry::default().read(Duration::ZERO, Duration::ZERO, events.iter().map(|event| &event.object));
});
