//! Whether anything grows in the shim that stays, and what the logs call an error.

use super::node::Node;
use crate::process::{anonymous, count};
use anyhow::Result;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// The first part of the run is left out: buffers find their size.
const WARM_UP: f64 = 0.25;

/// Fewer samples prove nothing.
const LEAST: usize = 6;

/// The greatest step of memory that is not taken for growth, in KiB: 250 connections of 16 KiB, those of a hang of 8 s.
const STEP: f64 = 4000.0;

/// Samples of the descriptors, of which one is taken.
const TRIES: usize = 20;

/// Each series: name, unit, by how much the fitted line may rise over the run, whatever its length, and the greatest step
/// that is left out. A line through a step rises by up to 1.5 times the step: threads may take one, listeners two (orphans that a shim adopts: from
/// two they become four, and are four after an hour), and descriptors vary by four (pipes, guards, requests for its status).
///
/// There is a sample after each harm. So two minutes, with some 20 to 40 samples, see a leak of one descriptor, thread
/// or listener for every second harm, or for each connection. Memory is what no other process shares: of the pages of the
/// binary a process has more when another that runs it ends. It varies by half a MiB: two minutes
/// see only what loses 50 KiB a harm or more, an hour what loses 2 KiB. And it has a step when an instance hangs: what the
/// shim then keeps for more connections than ever before, up to 16 KiB each, stays with the allocator. See [`without_step`].
pub(super) const SERIES: [(&str, &str, f64, f64); 4] = [
    ("memory (RssAnon)", "KiB", 1500.0, STEP),
    ("descriptors of no connection", "", 8.0, 0.0),
    ("threads", "", 1.6, 0.0),
    ("listeners", "", 3.5, 0.0),
];

#[derive(Debug)]
pub(super) struct Sample {
    /// In seconds since the start.
    pub(super) at: f64,
    /// In the order of [`SERIES`].
    pub(super) values: [f64; SERIES.len()],
}

#[derive(Debug, Default)]
pub(super) struct Figures(pub(super) Vec<Sample>);

impl Figures {
    /// Samples the shim that stays, between faults. Descriptors of connections are left out; connections come and go, so this takes the
    /// least of several samples during which none did.
    pub(crate) async fn sample(&mut self, node: &Node, at: f64) -> Result<()> {
        let pid = node.a.shim.pid();
        let mut descriptors = f64::MAX;
        for _ in 0..TRIES {
            let (before, all, after) = (of_connections(node).await, count(pid, "fd")?, of_connections(node).await);
            if let Some(of_connections) = before.filter(|_| before == after) {
                descriptors = descriptors.min(all - of_connections as f64);
            }
        }
        if descriptors < f64::MAX {
            let values = [anonymous(pid)?, descriptors, count(pid, "task")?, node.listeners() as f64];
            self.0.push(Sample { at, values });
        }
        Ok(())
    }

    /// Prints a line for each series, and returns whether all are flat.
    pub(crate) fn print(&self) -> bool {
        let samples = &self.0[(self.0.len() as f64 * WARM_UP) as usize..];
        let (Some(first), true) = (samples.first(), samples.len() >= LEAST) else {
            println!("{} samples are too few to tell what grows", self.0.len());
            // A run of seconds is too short to fail.
            return true;
        };
        let times: Vec<_> = samples.iter().map(|sample| sample.at - first.at).collect();
        let mut flat = true;
        for (index, (name, unit, most, step)) in SERIES.into_iter().enumerate() {
            let values: Vec<_> = samples.iter().map(|sample| sample.values[index]).collect();
            let rise = rise(&times, &without_step(&values, step));
            let hour = rise / times[times.len() - 1] * 3600.0;
            let (low, high) = values.iter().fold((f64::MAX, f64::MIN), |(l, h), value| (l.min(*value), h.max(*value)));
            let grows = rise > most;
            println!(
                "{name}: {low:.0} to {high:.0} {unit}, fitted {rise:+.1} over {:.0} s ({hour:+.1} an hour, {} samples){}",
                times[times.len() - 1],
                values.len(),
                if grows { ": GROWS" } else { "" }
            );
            flat &= !grows;
        }
        flat
    }
}

/// The descriptors of connections: two each, but one while it waits for an instance or at the gate.
async fn of_connections(node: &Node) -> Option<i64> {
    let status = node.status(&node.a).await.ok()?;
    let waiting = status.held + status.gate.map_or(0, |gate| gate.waiting);
    Some(2 * status.connections_open as i64 - waiting as i64)
}

/// The values without the greatest step up, as far as it is allowed: one is no growth, a leak has many.
fn without_step(values: &[f64], most: f64) -> Vec<f64> {
    let steps = values.windows(2).map(|pair| pair[1] - pair[0]).enumerate();
    let (before, step) = steps.max_by(|(_, a), (_, b)| a.total_cmp(b)).unwrap_or_default();
    let less = |index| if index > before { step.clamp(0.0, most) } else { 0.0 };
    values.iter().enumerate().map(|(index, value)| value - less(index)).collect()
}

/// By how much the line that fits best rises from the first to the last.
fn rise(times: &[f64], values: &[f64]) -> f64 {
    slope(times, values) * (times[times.len() - 1] - times[0])
}

/// The slope of the line that fits best (least squares).
fn slope(x: &[f64], y: &[f64]) -> f64 {
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
    let (mean_x, mean_y) = (mean(x), mean(y));
    let varies: f64 = x.iter().map(|x| (x - mean_x).powi(2)).sum();
    let together: f64 = x.iter().zip(y).map(|(x, y)| (x - mean_x) * (y - mean_y)).sum();
    if varies == 0.0 { 0.0 } else { together / varies }
}

/// Lines at error in the logs of shims.
#[derive(Debug, Default)]
pub(crate) struct Errors {
    pub(crate) all: u64,
    /// Those that the document does not explain, with the number of times.
    pub(crate) unexplained: BTreeMap<String, u64>,
}

pub(crate) fn errors(logs: &Path, explained: &str) -> Result<Errors> {
    let mut errors = Errors::default();
    for entry in fs::read_dir(logs)?.flatten().filter(|entry| entry.path().extension().is_some_and(|e| e == "shim")) {
        let log = String::from_utf8_lossy(&fs::read(entry.path())?).into_owned();
        for line in log.lines() {
            let parsed: Option<serde_json::Value> = serde_json::from_str(line).ok();
            let message = match &parsed {
                Some(line) if line["level"] == "ERROR" => line["message"].as_str().unwrap_or_default(),
                Some(_) => continue,
                // A panic, or an error of the dynamic loader.
                None => line,
            };
            errors.all += 1;
            if !is_explained(message, explained) {
                *errors.unexplained.entry(message.to_owned()).or_default() += 1;
            }
        }
    }
    Ok(errors)
}

/// Whether the document has the message up to the first part that varies.
fn is_explained(message: &str, document: &str) -> bool {
    let constant = message.split([':', ';', '(', ',']).next().unwrap_or_default().trim();
    constant.len() > 8 && document.contains(constant)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_fitted() {
        let x: Vec<_> = (0..10).map(f64::from).collect();
        let y: Vec<_> = x.iter().map(|x| 3.0 + 2.0 * x).collect();
        assert!((slope(&x, &y) - 2.0).abs() < 1e-9);
        assert_eq!(slope(&[1.0, 1.0], &[1.0, 9.0]), 0.0);
    }

    /// What two minutes' soak has of samples: some 30 harms, of which the first quarter is left out.
    #[test]
    fn two_minutes_see_a_descriptor_that_leaks_in_every_second_harm() {
        let times: Vec<_> = (0..22).map(|harm| f64::from(harm) * 4.0).collect();
        let noise = |harm: u32| f64::from(harm * 7 % 5);
        let leak = |one_in: u32| (0..22).map(|harm| 33.0 + noise(harm) + f64::from(harm / one_in)).collect::<Vec<_>>();
        let most = SERIES[1].2;
        assert!(rise(&times, &leak(1)) > most && rise(&times, &leak(2)) > most);
        assert!(rise(&times, &leak(u32::MAX)) < most);
    }

    #[test]
    fn a_few_steps_are_no_growth_and_many_are() {
        let times: Vec<_> = (0..30).map(f64::from).collect();
        let steps = |at: &[usize]| (0..30).map(|x| at.iter().filter(|at| x >= **at).count() as f64).collect::<Vec<_>>();
        let [.., (_, _, threads, _), (_, _, listeners, _)] = SERIES;
        for at in 0..30 {
            assert!(rise(&times, &steps(&[at])) < threads && rise(&times, &steps(&[at, at])) < listeners);
        }
        assert!(rise(&times, &steps(&[5, 10, 15, 20, 25])) > listeners.max(threads));
    }

    /// The first is a run in which an instance hung for 8 s.
    #[test]
    fn one_step_of_memory_is_no_growth_but_a_greater_one_and_a_leak_are() {
        let rises = |values: &[f64]| {
            let times: Vec<_> = (0..values.len()).map(|index| index as f64).collect();
            rise(&times, &without_step(values, STEP)) > SERIES[0].2
        };
        let run = [3812.0, 3824.0, 3824.0, 3924.0, 3932.0, 3932.0, 3868.0, 5588.0, 5588.0, 5588.0, 5584.0, 5584.0];
        assert!(!rises(&[run.as_slice(), &[5584.0, 5944.0, 5944.0, 5944.0, 5944.0, 5944.0, 6064.0]].concat()));
        assert!(rises(&run.map(|value| if value > 5000.0 { value + 4000.0 } else { value })));
        assert!(rises(&(0..30).map(|harm| f64::from(harm) * 60.0).collect::<Vec<_>>()));
        assert_eq!(without_step(&[], STEP), [0.0; 0]);
        assert_eq!(without_step(&[3.0, 2.0], STEP), [3.0, 2.0]);
    }

    #[test]
    fn an_error_is_explained_by_its_constant_part() {
        let document = "| `cannot listen, trying again: …` | the port |";
        assert!(is_explained("cannot listen, trying again: 127.0.0.1:1 is held", document));
        assert!(!is_explained("an accept loop ended: a bug", document) && !is_explained("", document));
    }
}
