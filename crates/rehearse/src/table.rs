//! The verdict as a short table, for standard output.

use super::Run;
use super::data::Instance;
use super::report::format::{count, wait};
use super::verdict::{Loss, Verdict};
use std::fmt::Write;

/// The table and one line of verdict below.
pub fn render(verdict: &Verdict) -> String {
    let mut text = String::new();
    let mut row = |name: &str, value: String, note: String| {
        let line = format!("{name:<32}{value:>10}   {note}");
        let _ = writeln!(text, "{}", line.trim_end());
    };
    let figures = &verdict.figures;
    row("requests", count(figures.requests), format!("{} on a new connection", count(figures.new_connections)));
    row("lost", count(verdict.lost()), String::new());
    for (loss, number) in &verdict.lost {
        row(&format!("  {loss}"), count(*number), String::new());
    }
    let waits = format!("median {}, 99 % within {}", wait(figures.wait_p50_ms), wait(figures.wait_p99_ms));
    if !verdict.promises.is_empty() {
        row("allowed under faults", count(verdict.allowed()), String::new());
    }
    for promise in verdict.promises.iter().filter(|promise| !promise.allowed.is_empty()) {
        let kinds = promise.allowed_by_kind();
        let kinds: Vec<_> = kinds.iter().map(|(loss, number)| format!("{} {loss}", count(*number))).collect();
        row(&format!("  {}", promise.fault), count(promise.allowed.len() as u64), kinds.join(", "));
    }
    row("longest wait", wait(figures.wait_max_ms), waits);
    row("longest time without an answer", wait(figures.longest_silence_ms), String::new());
    row("x509 errors", count(figures.x509_errors), String::new());
    row("streams ended by berth", count(verdict.ended_by_berth), String::new());
    let control = format!("{} of {}", count(verdict.control_ended), count(verdict.control_streams));
    let apart = format!("counted apart: it shut down; without berth {control}");
    row("streams ended by the instance", count(verdict.ended_by_instance), apart);
    row("rejected by the instance", count(verdict.rejected), "503 or 429 while it shut down".into());
    let gaps = [Loss::EventMissed, Loss::EventDuplicated].iter().any(|loss| verdict.lost.contains_key(loss));
    let seen = if gaps { "with gaps" } else { "no write missed or duplicated" };
    row("watch events", count(figures.watch_events), seen.into());
    let whole = format!("of {} hold exactly what was written", verdict.informers);
    row("informers", count(verdict.whole_informers), whole);
    let expired =
        format!("{} after 410: their revision was older than the instance (--settle)", count(figures.expired));
    row("lists again", count(figures.relists), expired);
    for Instance { name, version } in &verdict.instances {
        let served = figures.new_connections_by_instance.get(name).copied().unwrap_or(0);
        row(&format!("connections on {name}"), count(served), version.clone());
    }
    if let Some(errors) = figures.logged_x509_errors {
        row("x509 errors of apiservers", count(errors), "in their logs: one met another's certificate".into());
    }
    if let Some(gap) = figures.endpoint_gap_ms {
        row(
            "Service kubernetes was empty for",
            wait(gap),
            "the one that stops empties it, whoever shares the port".into(),
        );
    }
    text.push('\n');
    for promise in &verdict.promises {
        let held = if promise.held() { "held" } else { "broken" };
        let fault = promise.fault.to_string();
        // A version that is wrong on purpose is named by what is wrong with it.
        let at = if promise.instance == fault { String::new() } else { format!(" at {}", promise.instance) };
        let _ = writeln!(text, "{fault}{at}: {held}: {}", promise.text);
        for seen in &promise.seen {
            let _ = writeln!(text, "  {}", seen.replace('\n', "\n  "));
        }
        for broken in &promise.broken {
            let _ = writeln!(text, "  broken: {broken}");
        }
    }
    if !verdict.promises.is_empty() {
        text.push('\n');
    }
    for example in &verdict.examples {
        let _ = writeln!(text, "lost: {example}");
    }
    for note in &verdict.notes {
        let _ = writeln!(text, "note: {note}");
    }
    for objection in &verdict.objections {
        let _ = writeln!(text, "not as it should be: {objection}");
    }
    text.push_str(match (verdict.lost(), verdict.objections.is_empty()) {
        (0, _) if !verdict.kept() => "verdict: a promise was broken\n",
        (0, true) if verdict.allowed() > 0 => {
            "verdict: nothing was lost but what faults may cost, every promise held\n"
        }
        (0, true) => "verdict: nothing was lost\n",
        (0, false) => "verdict: nothing was seen to be lost, but the run proves nothing\n",
        _ => "verdict: something was lost\n",
    });
    text
}

/// Runs side by side, a column each.
pub fn compare(runs: &[Run]) -> String {
    let broken = |v: &Verdict| v.promises.iter().filter(|promise| !promise.held()).count() as u64;
    type Cell = fn(&Verdict) -> String;
    let rows: [(&str, Cell); 7] = [
        ("new connections", |v| count(v.figures.new_connections)),
        ("lost", |v| count(v.lost())),
        ("allowed under faults", |v| count(v.allowed())),
        ("longest wait", |v| wait(v.figures.wait_max_ms)),
        ("99 % within", |v| wait(v.figures.wait_p99_ms)),
        ("streams ended by the instance", |v| count(v.ended_by_instance)),
        ("rejected by the instance", |v| count(v.rejected)),
    ];
    let mut text = format!("{:<32}", "");
    let mut cells = |name: &str, cell: &dyn Fn(&Run) -> String| {
        if !name.is_empty() {
            let _ = write!(text, "{name:<32}");
        }
        for run in runs {
            let _ = write!(text, "{:>14}", cell(run));
        }
        text.push('\n');
    };
    cells("", &|run| run.via.to_string());
    for (name, cell) in rows {
        cells(name, &|run| cell(&run.verdict));
    }
    if runs.iter().any(|run| !run.verdict.promises.is_empty()) {
        cells("promises broken", &|run| count(broken(&run.verdict)));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::data::Figures;
    use super::super::plan::Via;
    use super::super::record::Record;
    use super::super::verdict::{NEW, OLD};
    use super::*;

    fn instance(name: &str, version: &str) -> Instance {
        Instance { name: name.into(), version: version.into() }
    }

    #[test]
    fn nothing_lost() {
        let verdict = Verdict {
            notes: vec!["old had to be killed".into()],
            ended_by_instance: 16,
            instances: vec![instance(OLD, "v1.35.4"), instance(NEW, "v1.36.3")],
            figures: Figures {
                requests: 2_134,
                new_connections: 1_031,
                new_connections_by_instance: [(OLD.to_owned(), 600), (NEW.to_owned(), 431)].into(),
                wait_p50_ms: 1.24,
                wait_p99_ms: 9.949,
                wait_max_ms: 38.0,
                watch_events: 820,
                logged_x509_errors: Some(4),
                endpoint_gap_ms: Some(9_600.0),
                ..Figures::default()
            },
            ..Verdict::default()
        };
        insta::assert_snapshot!(render(&verdict), @r#"
        requests                             2,134   1,031 on a new connection
        lost                                     0
        longest wait                         38 ms   median 1.2 ms, 99 % within 9.9 ms
        longest time without an answer        0 ms
        x509 errors                              0
        streams ended by berth                   0
        streams ended by the instance           16   counted apart: it shut down; without berth 0 of 0
        rejected by the instance                 0   503 or 429 while it shut down
        watch events                           820   no write missed or duplicated
        informers                                0   of 0 hold exactly what was written
        lists again                              0   0 after 410: their revision was older than the instance (--settle)
        connections on old                     600   v1.35.4
        connections on new                     431   v1.36.3
        x509 errors of apiservers                4   in their logs: one met another's certificate
        Service kubernetes was empty for     9.6 s   the one that stops empties it, whoever shares the port

        note: old had to be killed
        verdict: nothing was lost
        "#);
    }

    #[test]
    fn something_lost() {
        let verdict = Verdict {
            figures: Figures { requests: 12, wait_max_ms: 15_000.0, ..Figures::default() },
            lost: [(Loss::Reset, 2), (Loss::StreamEnded, 1), (Loss::EventMissed, 2)].into(),
            instances: vec![instance(OLD, ""), instance(NEW, "")],
            examples: vec!["new-7: reset after 1.2ms".into()],
            ended_by_berth: 1,
            objections: vec!["new never got ready".into()],
            ..Verdict::default()
        };
        insta::assert_snapshot!(render(&verdict), @r#"
        requests                                12   0 on a new connection
        lost                                     5
          connections reset                      2
          streams cut                            1
          watch events missed                    2
        longest wait                        15.0 s   median 0 ms, 99 % within 0 ms
        longest time without an answer        0 ms
        x509 errors                              0
        streams ended by berth                   1
        streams ended by the instance            0   counted apart: it shut down; without berth 0 of 0
        rejected by the instance                 0   503 or 429 while it shut down
        watch events                             0   with gaps
        informers                                0   of 0 hold exactly what was written
        lists again                              0   0 after 410: their revision was older than the instance (--settle)
        connections on old                       0
        connections on new                       0

        lost: new-7: reset after 1.2ms
        not as it should be: new never got ready
        verdict: something was lost
        "#);
    }

    #[test]
    fn side_by_side() {
        let run = |via, refused: u64| Run {
            via,
            record: Record::default(),
            verdict: Verdict {
                figures: Figures { new_connections: 1_031, ..Figures::default() },
                lost: [(Loss::Refused, refused)].into(),
                ..Verdict::default()
            },
            failed: None,
        };
        insta::assert_snapshot!(compare(&[run(Via::PortSharing, 1_234), run(Via::Berth, 0)]), @r"
                                          port-sharing         berth
        new connections                          1,031         1,031
        lost                                     1,234             0
        allowed under faults                         0             0
        longest wait                              0 ms          0 ms
        99 % within                               0 ms          0 ms
        streams ended by the instance                0             0
        rejected by the instance                     0             0
        ");
    }
}
