//! Kubeconfigs, written by people and by many programs. An accepted kubeconfig has an HTTPS server
//! and credentials.
#![no_main]

use berth_cluster::Access;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    if let Ok(access) = Access::parse(text, |_| Ok(Vec::new())) {
        // URI schemes are case-insensitive (RFC 3986, section 3.1).
        assert!(
            access
                .server
                .get(..8)
                .is_some_and(|scheme| scheme.eq_ignore_ascii_case("https://"))
        );
        assert!(access.client.is_some() || access.token.is_some());
    }
});
