//! Pages of metrics, whatever is in them, one after the other. Whoever has the same pages as the old instance is never
//! sent back, except for a process that is another one from page to page.
#![no_main]

use berth_judge::{Judge, Sample, Signal};
use libfuzzer_sys::fuzz_target;
use std::time::Duration;

/// More is the same again.
const ROUNDS: u64 = 8;

fuzz_target!(|text: &str| {
    let mut judge = Judge::new([Signal::Restart]);
    for at in 0..ROUNDS {
        if at == 2 {
            judge.begin_step();
        }
        for (more, page) in (0..).zip(text.split("\n---\n")) {
            let now = Duration::from_secs(1000 * at + more);
            judge.observe(now, Sample::new(Some(page)), Sample::new(Some(page)));
        }
    }
    let verdict = judge.verdict();
    assert!(!judge.is_bad(), "{verdict:?}");
    assert!(
        verdict
            .rows
            .iter()
            .all(|row| row.new.is_finite() && row.limit.is_finite())
    );
});
