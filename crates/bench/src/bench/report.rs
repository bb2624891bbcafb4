//! What is written to `--out`: where and how it was measured, and all samples.

use super::results::Results;
use super::setting::BenchSetting;
use super::table;
use anyhow::{Context, Result};
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::fs;
use std::path::Path;

/// Version of the form of bench.json.
const VERSION: u32 = 2;

/// Writes bench.md and bench.json.
pub(super) fn write(directory: &Path, results: &Results, setting: &BenchSetting) -> Result<()> {
    fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    let json = serde_json::to_string_pretty(&json(results, setting))? + "\n";
    for (name, text) in [("bench.md", markdown(results, setting)), ("bench.json", json)] {
        let path = directory.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// The setting and a table for each case.
pub(super) fn markdown(results: &Results, setting: &BenchSetting) -> String {
    let mut text = String::from("# Measurements\n\n");
    let _ = writeln!(
        text,
        "- Machine: {}. Client, relay and backend share it; all traffic is on loopback.",
        setting.machine()
    );
    let _ = writeln!(text, "- Date: {}", setting.date);
    let _ = writeln!(text, "- Command: `{}`", setting.command);
    let _ = writeln!(
        text,
        "- {} rounds; in each, every peer does each work once, in an order that moves on by one. {} s a measurement, after \
         a warm-up of {} s. Every relay has one thread or worker a core.",
        setting.rounds, setting.window_seconds, setting.warm_up_seconds
    );
    for peer in &setting.environment.programs {
        let _ = writeln!(text, "- {}: {}", peer.role, peer.version);
    }
    for name in &results.missing {
        let _ = writeln!(text, "- {name}: was not found and is left out");
    }
    text.push('\n');
    text + &table::overview(results) + &table::tables(results)
}

fn json(results: &Results, setting: &BenchSetting) -> Value {
    let peers: Vec<_> =
        results.peers.iter().map(|peer| json!({"name": peer.name, "program_bytes": peer.size()})).collect();
    let samples: Vec<_> = results
        .samples
        .iter()
        .map(|sample| {
            let mut fields = json!({
                "case": sample.case.to_string(),
                "peer": results.peers[sample.peer].name,
                "round": sample.round + 1,
            });
            match &sample.outcome {
                Ok(figures) => {
                    let figures: Map<_, _> =
                        figures.iter().map(|(metric, value)| (metric.key().to_owned(), json!(value))).collect();
                    fields["figures"] = figures.into();
                }
                Err(error) => fields["error"] = error.as_str().into(),
            }
            fields
        })
        .collect();
    let mut summaries = Vec::new();
    for case in results.cases() {
        for peer in results.peers_of(case) {
            for metric in results.metrics_of(case) {
                let Some(summary) = results.summary(case, peer, metric) else { continue };
                summaries.push(json!({
                    "case": case.to_string(),
                    "peer": results.peers[peer].name,
                    "metric": metric.key(),
                    "samples": summary.count,
                    "median": summary.median,
                    "least": summary.least,
                    "most": summary.most,
                    "of_none": results.none().filter(|&none| none != peer).and_then(|none| results.ratio(case, peer, none, metric)),
                }));
            }
        }
    }
    json!({
        "version": VERSION,
        "setting": setting,
        "peers": peers,
        "missing": results.missing,
        "samples": samples,
        "summaries": summaries,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::results::tests::{results, setting};

    #[test]
    fn the_json_has_every_sample_and_every_failure() {
        let results = results();
        let json = json(&results, &setting());
        assert_eq!(json["version"], VERSION);
        let samples = json["samples"].as_array().unwrap();
        assert_eq!(samples.len(), results.samples.len());
        assert_eq!(samples[0]["figures"]["rate"], 100.0);
        assert_eq!(samples[5]["error"], "reset");
        let summaries = json["summaries"].as_array().unwrap();
        assert_eq!(summaries.len(), 8);
        assert_eq!(summaries[0]["median"], 110.0);
    }

    #[test]
    fn what_is_missing_is_named() {
        assert!(markdown(&results(), &setting()).contains("- nginx: was not found and is left out\n"));
    }
}
