//! Whether anything grows in the shim that stays, and what the logs call an error.

use crate::node::Node;
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Instant;

/// The first part of the run is left out: buffers find their size.
const WARM_UP: f64 = 0.25;

/// Fewer samples say nothing.
const LEAST: usize = 6;

/// Looks at the descriptors for one sample.
const LOOKS: usize = 10;

/// What is looked at: name, unit, and by how much the fitted line may rise over the run. Connections come and go, so the
/// first two vary (a relay thread keeps up to 64 descriptors of pipes for what moves a lot); a leak is one by one, for each of hundreds of connections or each harm.
const SERIES: [(&str, &str, f64); 4] = [
    ("memory (Pss)", "KiB", 1500.0),
    ("descriptors beside connections", "", 40.0),
    ("threads", "", 0.9),
    ("listeners", "", 0.9),
];

#[derive(Debug)]
struct Sample {
    at: Instant,
    values: [f64; SERIES.len()],
}

#[derive(Debug, Default)]
pub(crate) struct Figures(Vec<Sample>);

impl Figures {
    /// Looks at the shim that stays, in calm. Two descriptors of each connection are left out; connections come and go
    /// between the two looks, so the least of several is taken.
    pub(crate) async fn sample(&mut self, node: &Node) -> Result<()> {
        let pid = node.a.shim.pid().context("the shim that stays has ended")?;
        let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
        let pss =
            rollup.lines().find_map(|line| line.strip_prefix("Pss:")).and_then(|rest| rest.split_whitespace().next());
        let count = |what: &str| Ok::<_, anyhow::Error>(fs::read_dir(format!("/proc/{pid}/{what}"))?.count() as f64);
        let mut descriptors = f64::MAX;
        for _ in 0..LOOKS {
            let of_connections = node.status(&node.a).await.map_or(0, |status| 2 * status.connections_open);
            descriptors = descriptors.min(count("fd")? - of_connections as f64);
        }
        let values = [pss.context("no Pss")?.parse()?, descriptors, count("task")?, node.listeners() as f64];
        self.0.push(Sample { at: Instant::now(), values });
        Ok(())
    }

    /// Prints a line a series; whether all are flat.
    pub(crate) fn print(&self) -> bool {
        let samples = &self.0[(self.0.len() as f64 * WARM_UP) as usize..];
        let (Some(first), true) = (samples.first(), samples.len() >= LEAST) else {
            println!("{} samples are too few to tell what grows", self.0.len());
            // A run of seconds is no soak, and no failure.
            return true;
        };
        let times: Vec<_> = samples.iter().map(|sample| sample.at.duration_since(first.at).as_secs_f64()).collect();
        let mut flat = true;
        for (index, (name, unit, most)) in SERIES.into_iter().enumerate() {
            let values: Vec<_> = samples.iter().map(|sample| sample.values[index]).collect();
            let slope = slope(&times, &values);
            let (rise, hour) = (slope * times[times.len() - 1], slope * 3600.0);
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
    /// Those that the document does not explain, and how often each was said.
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
                // A panic, or a word of the loader's.
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

    #[test]
    fn an_error_is_explained_by_its_constant_part() {
        let document = "| `cannot listen, trying again: …` | the port |";
        assert!(is_explained("cannot listen, trying again: 127.0.0.1:1 is held", document));
        assert!(!is_explained("an accept loop ended: a bug", document) && !is_explained("", document));
    }
}
