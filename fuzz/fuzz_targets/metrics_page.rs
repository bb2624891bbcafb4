//! Pages of metrics with any content, one after the other. A new instance with the same pages as
//! the old instance gets no bad verdict. Restarts (changes of the process's start time) are
//! accepted.
#![no_main]

use berth_judge::{Judge, Sample, Signal};
use libfuzzer_sys::fuzz_target;
use std::time::Duration;

/// Number of times that the judge sees all pages. More rounds only repeat the pages.
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
