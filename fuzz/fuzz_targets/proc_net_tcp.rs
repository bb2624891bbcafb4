//! /proc/net/tcp comes from the kernel, but its format is the kernel's to change.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let entries = berth_os::holder::parse(text);
    assert!(entries.len() <= text.lines().count());
});
