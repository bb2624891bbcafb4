//! Prints the report of a run: the machine, the conditions, and a table for each case.

use super::results::Results;
use super::setting::BenchSetting;
use super::table;
use std::fmt::Write;

/// Returns the whole report as Markdown: the conditions of the run, and a table for each case.
pub(super) fn render_markdown(results: &Results, setting: &BenchSetting) -> String {
    let mut text = String::from("# Measurements\n\n");
    let _ = writeln!(
        text,
        "- Machine: {}. Client, relay and backend share this machine; all traffic is on loopback.",
        setting.machine()
    );
    let _ = writeln!(text, "- Date: {}", setting.date);
    let _ = writeln!(text, "- Command: `{}`", setting.command);
    let _ = writeln!(
        text,
        "- {} rounds; in each round, every peer does each work once, and the first peer moves to the end of the order. A measurement \
         takes {} s, after a warm-up of {} s. Every relay has one thread or worker per core.",
        setting.rounds, setting.window_seconds, setting.warm_up_seconds
    );
    let server = match setting.server.as_str() {
        "" => "one thread with epoll(7)",
        go => {
            &format!("{go}: the accept loop of the standard library, one goroutine per connection")
        }
    };
    let _ = writeln!(text, "- Server behind all peers: {server}");
    for peer in &setting.environment.programs {
        let _ = writeln!(text, "- {}: {}", peer.role, peer.version);
    }
    for (name, why) in &results.missing {
        let _ = writeln!(text, "- {name}: left out, {why}");
    }
    text.push('\n');
    text + &table::render_overview(results) + &table::render_tables(results)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::results::tests::{make_results, make_setting};

    #[test]
    fn missing_peers_are_named() {
        assert!(
            render_markdown(&make_results(), &make_setting())
                .contains("- nginx: left out, not found\n")
        );
    }
}
