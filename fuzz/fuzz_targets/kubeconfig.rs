//! A kubeconfig is written by people and programs of all kinds.
#![no_main]

use berth_cluster::Access;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(access) = Access::parse(text, |_| Ok(Vec::new())) {
        assert!(access.server.starts_with("https://") || access.server.starts_with("HTTPS://"));
        assert!(access.client.is_some() || access.token.is_some());
    }
});
