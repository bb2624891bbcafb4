//! Prints the figures of a run and its verdict as a table.

use crate::record::{
    data::{Promise, Ran, Row, Via},
    loss,
};
use std::fmt::Write;

/// Returns the table and the line of the verdict. Only main figures are included unless `verbose`.
pub fn render(ran: &Ran, verbose: bool) -> String {
    let mut text = String::new();
    for Row {
        name, value, note, ..
    } in shown_rows(ran, verbose)
    {
        let line = format!("{name:<32}{:>10}   {note}", value.to_string());
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text.push('\n');
    for Promise {
        fault,
        instance,
        promise,
        held,
        what_happened,
        allowed,
        ..
    } in &ran.promises
    {
        // An instance that fails on purpose has the fault's name, which the line has already.
        let at = if instance == fault {
            String::new()
        } else {
            format!(" at {instance}")
        };
        let _ = writeln!(
            text,
            "{fault}{at}: {}: {promise}",
            if *held { "held" } else { "broken" }
        );
        for seen in what_happened {
            let _ = writeln!(text, "  {}", seen.replace('\n', "\n  "));
        }
        if !allowed.is_empty() {
            let _ = writeln!(text, "  allowed: {}", loss::losses_in_words(allowed));
        }
    }
    if !ran.promises.is_empty() {
        text.push('\n');
    }
    for (what, lines) in [
        ("lost", &ran.examples),
        ("note", &ran.notes),
        ("not as it should be", &ran.objections),
    ] {
        for line in lines {
            let _ = writeln!(text, "{what}: {line}");
        }
    }
    let _ = writeln!(text, "verdict: {}", ran.describe_verdict());
    text
}

/// Returns a table of several runs, with a column for each.
pub fn compare(runs: &[(Via, &Ran)], verbose: bool) -> String {
    let line = |name: &str, cells: Vec<String>| {
        cells.iter().fold(format!("{name:<32}"), |line, cell| {
            format!("{line}{cell:>14}")
        }) + "\n"
    };
    let header = line("", runs.iter().map(|(via, _)| via.to_string()).collect());
    let runs: Vec<&Ran> = runs.iter().map(|(_, ran)| *ran).collect();
    collect_figures_by_name(&runs, verbose)
        .into_iter()
        .fold(header, |text, (name, cells)| text + &line(name, cells))
}

/// Returns the names of all figures, with the value of each run. "-" stands for a missing value.
pub(crate) fn collect_figures_by_name<'a>(
    runs: &[&'a Ran],
    verbose: bool,
) -> Vec<(&'a str, Vec<String>)> {
    let mut names: Vec<&str> = Vec::new();
    for row in runs.iter().flat_map(|ran| shown_rows(ran, verbose)) {
        if !names.contains(&row.name.as_str()) {
            names.push(&row.name);
        }
    }
    let cell = |ran: &&Ran, name: &str| {
        ran.find_figure(name)
            .map_or_else(|| "-".to_owned(), |value| value.to_string())
    };
    names
        .into_iter()
        .map(|name| (name, runs.iter().map(|ran| cell(ran, name)).collect()))
        .collect()
}

fn shown_rows(ran: &Ran, verbose: bool) -> impl Iterator<Item = &Row> {
    ran.rows.iter().filter(move |row| verbose || row.main)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::data::{Loss, Losses, Value, Verdict};

    fn ran(requests: u64, lost: Losses) -> Ran {
        let mut ran = Ran {
            lost,
            ..Ran::default()
        };
        let sum = ran.lost.values().sum();
        let words = loss::losses_in_words(&ran.lost);
        ran.add("lost", Value::Count(sum))
            .mark_as_main()
            .set_note(words);
        ran.add("requests", Value::Count(requests))
            .mark_as_main()
            .set_note("1,031 on a new connection");
        ran.add("longest wait", Value::Ms(38.0)).mark_as_main();
        ran.add("99th percentile", Value::Ms(9.949));
        ran
    }

    #[test]
    fn only_main_figures_are_shown_unless_verbose() {
        let promise = Promise {
            fault: "kill-shim".into(),
            instance: "old".into(),
            from_ms: 0,
            to_ms: None,
            promise: "only what it had accepted is lost".into(),
            held: true,
            what_happened: vec!["the API was never unavailable".into()],
            allowed: [(Loss::Reset, 3)].into(),
        };
        let ran = Ran {
            promises: vec![promise],
            notes: vec!["old had to be killed".into()],
            ..ran(2_134, Losses::new())
        };
        insta::assert_snapshot!(render(&ran, false), @r"
        lost                                     0
        requests                             2,134   1,031 on a new connection
        longest wait                         38 ms

        kill-shim at old: held: only what it had accepted is lost
          the API was never unavailable
          allowed: 3 connections reset

        note: old had to be killed
        verdict: only losses that the injected faults may cause were seen, and every promise held
        ");
        assert!(render(&ran, true).contains("99th percentile                     9.9 ms"));
    }

    #[test]
    fn a_loss_is_shown() {
        let lost = [
            (Loss::Reset, 2),
            (Loss::StreamEnded, 1),
            (Loss::EventMissed, 2),
        ]
        .into();
        let ran = Ran {
            verdict: Verdict::Lost,
            examples: vec!["new-7: reset after 1.2ms".into()],
            objections: vec!["new never got ready".into()],
            ..ran(12, lost)
        };
        insta::assert_snapshot!(render(&ran, false), @r"
        lost                                     5   2 connections reset, 1 stream cut, 2 watch events missed
        requests                                12   1,031 on a new connection
        longest wait                         38 ms

        lost: new-7: reset after 1.2ms
        not as it should be: new never got ready
        verdict: something was lost
        ");
    }

    #[test]
    fn runs_have_a_column_each() {
        let (shared, mut berth) = (
            ran(2_000, [(Loss::Refused, 1_234)].into()),
            ran(2_100, Losses::new()),
        );
        berth
            .add("connections steered", Value::Count(7))
            .mark_as_main();
        insta::assert_snapshot!(compare(&[(Via::PortSharing, &shared), (Via::Berth, &berth)], false), @r"
                                          port-sharing         berth
        lost                                     1,234             0
        requests                                 2,000         2,100
        longest wait                             38 ms         38 ms
        connections steered                          -             7
        ");
    }
}
