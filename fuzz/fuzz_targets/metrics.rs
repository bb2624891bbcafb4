//! Metrics in Prometheus' text form, whatever answers at a kube-apiserver's or a kubelet's address.
#![no_main]

use berth_operate::doctor::metrics::samples;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    for sample in samples(text, |_| true) {
        assert!(!sample.name.contains(['{', ' ', '\n']), "{sample:?}");
    }
});
