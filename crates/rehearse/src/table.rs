//! The verdict as a short table, for standard output.

use super::data::{Promise, Ran, Via};
use super::judges;
use super::section::{Place, Row};
use std::fmt::Write;

/// The table, whole or what matters most, and one line of verdict below.
pub fn render(ran: &Ran, verbose: bool) -> String {
    let (mut text, place) = (String::new(), if verbose { Place::Table } else { Place::Tile });
    for Row { name, value, note, .. } in judges::sections(ran).iter().flat_map(|section| section.rows(place)) {
        let line = format!("{name:<32}{value:>10}   {note}");
        let _ = writeln!(text, "{}", line.trim_end());
    }
    let Ran { verdict, promises, .. } = ran;
    text.push('\n');
    for Promise { fault, instance, promise, held, what_happened, .. } in promises {
        // A version that is wrong on purpose is named by what is wrong with it.
        let at = if instance == fault { String::new() } else { format!(" at {instance}") };
        let _ = writeln!(text, "{fault}{at}: {}: {promise}", if *held { "held" } else { "broken" });
        for seen in what_happened {
            let _ = writeln!(text, "  {}", seen.replace('\n', "\n  "));
        }
    }
    if !promises.is_empty() {
        text.push('\n');
    }
    for (what, lines) in
        [("lost", &verdict.examples), ("note", &verdict.notes), ("not as it should be", &verdict.objections)]
    {
        for line in lines {
            let _ = writeln!(text, "{what}: {line}");
        }
    }
    text.push_str(match (verdict.lost(), verdict.objections.is_empty()) {
        (0, _) if ran.broken() > 0 => "verdict: a promise was broken\n",
        (0, true) if ran.allowed() > 0 => "verdict: nothing was lost but what faults may cost, every promise held\n",
        (0, true) => "verdict: nothing was lost\n",
        (0, false) if verdict.too_busy => "verdict: this machine was too busy to tell\n",
        (0, false) => "verdict: nothing was seen to be lost, but the run proves nothing\n",
        _ => "verdict: something was lost\n",
    });
    text
}

/// Runs side by side, a column each.
pub fn compare(runs: &[(Via, &Ran)], verbose: bool) -> String {
    let line = |name: &str, cells: &mut dyn Iterator<Item = String>| {
        cells.fold(format!("{name:<32}"), |line, cell| format!("{line}{cell:>14}")) + "\n"
    };
    let place = if verbose { Place::Compared } else { Place::Tile };
    let header = line("", &mut runs.iter().map(|(via, _)| via.to_string()));
    let rows = judges::compared(&runs.iter().map(|(_, ran)| Some(*ran)).collect::<Vec<_>>(), place);
    let cell = |cell: Option<String>| cell.unwrap_or_else(|| "-".to_owned());
    rows.into_iter().fold(header, |text, (name, cells)| text + &line(&name, &mut cells.into_iter().map(cell)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{ControlStreams, Figures, Gate, Informer, Instance, Storm, Tally, Verdict};
    use crate::verdict::{Loss, NEW, OLD};

    fn instance(name: &str, version: &str) -> Instance {
        Instance { name: name.into(), version: version.into() }
    }

    #[test]
    fn nothing_lost() {
        let apart = Tally { kind: "ended_by_instance".into(), text: String::new(), count: 16 };
        let informer = |id: &str, missing| Informer { id: id.into(), missing, ..Informer::default() };
        let ran = Ran {
            verdict: Verdict { notes: vec!["old had to be killed".into()], apart: vec![apart], ..Verdict::default() },
            instances: vec![instance(OLD, "v1.35.4"), instance(NEW, "v1.36.3")],
            // What the quiet one holds is no evidence.
            informers: [("informer-0", 0), ("informer-1", 1), ("informer-2", 0), ("quiet-0", 0)]
                .map(|(id, missing)| informer(id, missing))
                .into(),
            control_streams: [(OLD.to_owned(), ControlStreams { opened: 8, ended: 3 })].into(),
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
            ..Ran::default()
        };
        insta::assert_snapshot!(render(&ran, true), @r#"
        requests                             2,134   1,031 on a new connection, to real kube-apiservers
        lost                                     0
        longest wait                         38 ms   median 1.2 ms, 99 % within 9.9 ms
        longest time without an answer        0 ms
        x509 errors                              0
        streams ended by the instance           16   closed as it shut down (normal); of those straight to it 3 of 8
        rejected by the instance                 0   503 or 429 while it shut down
        watch events                           820   no write missed or duplicated
        informers                                2   of 3 hold exactly what was written
        relists                                  0   0 after 410 Gone: their resourceVersion was older than the instance (--settle)
        connections on old                     600   v1.35.4
        connections on new                     431   v1.36.3
        x509 errors of apiservers                4   in their logs: one met another's certificate
        Service kubernetes was empty for     9.6 s   the instance that stops removes the address, even if another serves

        note: old had to be killed
        verdict: nothing was lost
        "#);
        let short = Ran { figures: Figures { endpoint_gap_ms: None, ..ran.figures.clone() }, ..ran };
        insta::assert_snapshot!(render(&short, false), @r"
        requests                             2,134   1,031 on a new connection, to real kube-apiservers
        lost                                     0
        longest wait                         38 ms   median 1.2 ms, 99 % within 9.9 ms
        longest time without an answer        0 ms
        watch events                           820   no write missed or duplicated

        note: old had to be killed
        verdict: nothing was lost
        ");
    }

    #[test]
    fn something_lost() {
        let ran = Ran {
            figures: Figures { requests: 12, wait_max_ms: 15_000.0, ..Figures::default() },
            instances: vec![instance(OLD, ""), instance(NEW, "")],
            verdict: Verdict {
                lost: vec![Loss::Reset.tally(2), Loss::StreamEnded.tally(1), Loss::EventMissed.tally(2)],
                examples: vec!["new-7: reset after 1.2ms".into()],
                objections: vec!["new never got ready".into()],
                ..Verdict::default()
            },
            ..Ran::default()
        };
        insta::assert_snapshot!(render(&ran, true), @r#"
        requests                                12   0 on a new connection, to real kube-apiservers
        lost                                     5   2 connections reset, 1 stream cut, 2 watch events missed
        longest wait                        15.0 s   median 0 ms, 99 % within 0 ms
        longest time without an answer        0 ms
        x509 errors                              0
        streams ended by the instance            0   closed as it shut down (normal); of those straight to it 0 of 0
        rejected by the instance                 0   503 or 429 while it shut down
        watch events                             0   with gaps
        informers                                0   of 0 hold exactly what was written
        relists                                  0   0 after 410 Gone: their resourceVersion was older than the instance (--settle)
        connections on old                       0
        connections on new                       0

        lost: new-7: reset after 1.2ms
        not as it should be: new never got ready
        verdict: something was lost
        "#);
    }

    #[test]
    fn too_busy_to_tell() {
        let verdict = Verdict { objections: vec!["behind".into()], inconclusive: true, ..Verdict::default() };
        let last = |verdict| {
            let text = render(&Ran { verdict, ..Ran::default() }, false);
            text.lines().last().unwrap().to_owned()
        };
        assert_eq!(last(verdict.clone()), "verdict: nothing was seen to be lost, but the run proves nothing");
        assert_eq!(last(Verdict { too_busy: true, ..verdict }), "verdict: this machine was too busy to tell");
    }

    #[test]
    fn a_storm() {
        let mut storm = Storm {
            clients: 5_000,
            served: 5_000,
            all_served_ms: Some(8_200.0),
            gave_up: 1,
            failed: vec![Loss::Reset.tally(12)],
            ..Storm::default()
        };
        let row = |storm: &Storm| {
            let text = render(&Ran { storm: Some(storm.clone()), ..Ran::default() }, false);
            text.lines().find(|line| line.contains("storm")).unwrap().to_owned()
        };
        let all = row(&storm);
        (storm.served, storm.all_served_ms) = (4_998, None);
        let gate = |full| Gate {
            waited: [("first".to_owned(), 12), ("others".to_owned(), 4_700)].into(),
            dropped: [("full".to_owned(), full), ("left".to_owned(), full / 2)].into(),
            most_waiting: 3_900,
            ..Gate::default()
        };
        let at_gate = |full| {
            let text = render(&Ran { gate: Some(gate(full)), ..Ran::default() }, true);
            text.lines().find(|line| line.contains("gate")).unwrap().to_owned()
        };
        insta::assert_snapshot!([all, row(&storm), at_gate(0), at_gate(4)].join("\n"), @r"
        clients of the storm                 5,000   all served within 8.2 s; 1 try given up, 12 connections reset
        clients of the storm                 5,000   only 4,998 were served; 1 try given up, 12 connections reset
        most clients queued at the gate      3,900   4,712 clients had to wait, dropped: none
        most clients queued at the gate      3,900   4,718 clients had to wait, dropped: 4 for lack of room, 2 that had left
        ");
    }

    #[test]
    fn side_by_side() {
        let ran = |refused| Ran {
            figures: Figures { new_connections: 1_031, ..Figures::default() },
            verdict: Verdict { lost: vec![Loss::Refused.tally(refused)], ..Verdict::default() },
            ..Ran::default()
        };
        let runs = [(Via::PortSharing, &ran(1_234)), (Via::Berth, &ran(0))];
        insta::assert_snapshot!(compare(&runs, false), @r"
                                          port-sharing         berth
        requests                                     0             0
        lost                                     1,234             0
        longest wait                              0 ms          0 ms
        longest time without an answer            0 ms          0 ms
        ");
        insta::assert_snapshot!(compare(&runs, true), @r"
                                          port-sharing         berth
        requests                                     0             0
        new connections                          1,031         1,031
        lost                                     1,234             0
        longest wait                              0 ms          0 ms
        99th percentile                           0 ms          0 ms
        longest time without an answer            0 ms          0 ms
        x509 errors                                  0             0
        streams ended by the instance                0             0
        rejected by the instance                     0             0
        watch events missed or duplicated             0             0
        watches cut                                  0             0
        watches cut as promises allow                0             0
        relists                                      0             0
        of those after 410 Gone                      0             0
        ");
    }
}
