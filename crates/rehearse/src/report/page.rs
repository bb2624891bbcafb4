//! A page for people: first the verdict, then the events, and at the end the machine and the
//! command.
//!
//! The page loads nothing and runs nothing, and a policy in its head forbids both. Text from a
//! program or a user goes through [`escape_html`]. The meaning of a colour is also given by a word.

use super::plot::{self, Frame};
use super::table;
use crate::record::{
    data::{Environment, Promise, Ran, Report, Row, Run, RunOutcome, Via},
    format::{self, escape_html},
    loss,
    verdict::Verdict,
};

pub(super) fn render(report: &Report) -> String {
    let mut runs: Vec<&Run> = report.runs.iter().collect();
    // The run through berth comes first.
    runs.sort_by_key(|run| run.via != Via::Berth);
    let made: Vec<(&Run, &Ran)> = runs
        .iter()
        .filter_map(|run| Some((*run, run.ran()?)))
        .collect();
    let several = runs.len() > 1;
    let (tone, headline) = match made.first() {
        _ if report.aborted.is_some() => ("unsure", "Stopped before its end".to_owned()),
        Some((run, ran)) if several => (
            verdict_class(ran),
            format!(
                "{}: {}",
                format::capitalize(run.via.describe()),
                describe_result(ran)
            ),
        ),
        Some((_, ran)) => (
            verdict_class(ran),
            format::capitalize(&describe_result(ran)),
        ),
        None => ("unsure", "Nothing was rehearsed".to_owned()),
    };
    let aborted = report.aborted.as_ref().map(|why| {
        format!(
            "<p>The rehearsal was aborted: {}. Nothing can be concluded from the results until then.</p>",
            escape_html(why)
        )
    });
    let frame = Frame::of(&made.iter().map(|(_, ran)| *ran).collect::<Vec<_>>());
    format!(
        include_str!("page.html"),
        style = include_str!("style.css"),
        tone = tone,
        headline = escape_html(&headline),
        made_at = escape_html(&report.made_at),
        berth_version = escape_html(&report.berth_version),
        lead = aborted.unwrap_or_default()
            + &made
                .first()
                .map(|(run, ran)| render_lead(run, ran))
                .unwrap_or_default(),
        comparison = if made.len() > 1 {
            render_comparison(&made)
        } else {
            String::new()
        },
        runs = runs
            .iter()
            .map(|run| render_section(run, &frame, several))
            .collect::<String>(),
        command = escape_html(&report.command),
        environment = render_environment(&report.environment),
    )
}

/// Describes the verdict for a headline, or what was lost.
fn describe_result(ran: &Ran) -> String {
    match ran.verdict {
        Verdict::Lost => format!("lost: {}", loss::losses_in_words(&ran.lost)),
        _ => ran.describe_verdict().to_owned(),
    }
}

/// Returns the CSS class for the colour of a verdict.
fn verdict_class(ran: &Ran) -> &'static str {
    match ran.verdict {
        Verdict::Held => "good",
        Verdict::Unproven | Verdict::TooBusy => "unsure",
        Verdict::Wrong | Verdict::Broken | Verdict::Lost => "bad",
    }
}

/// Returns the description of the upgrade, and the most important figures in large type.
fn render_lead(run: &Run, ran: &Ran) -> String {
    let tile = |row| {
        let [name, value, note] = escape_row(row);
        format!("<div><dt>{name}</dt><dd>{value}<small>{note}</small></dd></div>")
    };
    let tiles: String = ran.rows.iter().filter(|row| row.main).map(tile).collect();
    format!(
        "<p>{}</p><dl class=\"tiles\">{tiles}</dl>",
        escape_html(&describe_upgrade(run, ran))
    )
}

/// Describes the rehearsed upgrade in one line.
fn describe_upgrade(run: &Run, ran: &Ran) -> String {
    let names = ran
        .instances
        .iter()
        .map(plot::instance_label)
        .collect::<Vec<_>>()
        .join(" → ");
    let load = format!("{} of load", format::format_wait_time(ran.load_ms as f64));
    [ran.describe_apiservers(), &names, &run.topology, &load].join(" · ")
}

/// Returns a table with the figures of all runs side by side.
fn render_comparison(made: &[(&Run, &Ran)]) -> String {
    let heading = |(run, ran): &(&Run, &Ran)| {
        let way = escape_html(&format::capitalize(run.via.describe()));
        format!(
            "<th scope=\"col\">{way}<small class=\"{}\">{}</small></th>",
            verdict_class(ran),
            format::capitalize(ran.describe_verdict())
        )
    };
    let headings: String = made.iter().map(heading).collect();
    let row = |(name, cells): (&str, Vec<String>)| {
        let cells: String = cells
            .iter()
            .map(|cell| format!("<td>{}</td>", escape_html(cell)))
            .collect();
        format!(
            "<tr><th scope=\"row\">{}</th>{cells}</tr>",
            escape_html(&format::capitalize(name))
        )
    };
    let runs: Vec<&Ran> = made.iter().map(|(_, ran)| *ran).collect();
    let rows: String = table::collect_figures_by_name(&runs, false)
        .into_iter()
        .map(row)
        .collect();
    format!(
        "<section><h2>Side by side</h2><div class=\"scroll\" tabindex=\"0\"><table><thead><tr><td></td>{headings}</tr></thead>\
         <tbody>{rows}</tbody></table></div></section>"
    )
}

fn render_section(run: &Run, frame: &Frame, several: bool) -> String {
    let title = if several {
        format::capitalize(run.via.describe())
    } else {
        "What happened".to_owned()
    };
    let body = match &run.outcome {
        RunOutcome::Skipped(why) => format!("<p>Skipped: {}.</p>", escape_html(why)),
        RunOutcome::Ran(ran) => render_ran_section(ran, frame),
    };
    format!("<section><h2>{}</h2>{body}</section>", escape_html(&title))
}

/// Returns the name, the value and the note of a row, as HTML.
fn escape_row(row: &Row) -> [String; 3] {
    let name = format::capitalize(&row.name);
    [&name, &row.value.to_string(), &row.note].map(|text| escape_html(text))
}

fn render_ran_section(ran: &Ran, frame: &Frame) -> String {
    let row = |row| {
        let [name, value, note] = escape_row(row);
        format!(
            "<tr><th scope=\"row\">{name}</th><td>{value}</td><td class=\"quiet\">{note}</td></tr>"
        )
    };
    [
        render_list("Not as it should be", &ran.objections),
        render_list("Lost: the first of each kind", &ran.examples),
        render_list("Worth knowing", &ran.notes),
        format!(
            "<div class=\"scroll\" tabindex=\"0\">{}{}</div>",
            plot::draw_requests(frame, ran),
            plot::draw_instances(frame, ran)
        ),
        ran.promises.iter().map(render_promise).collect(),
        format!(
            "<h3>All figures</h3><div class=\"scroll\" tabindex=\"0\"><table>{}</table></div>",
            ran.rows.iter().map(row).collect::<String>()
        ),
    ]
    .concat()
}

/// Renders a heading with a list of lines. Empty if there are no lines.
fn render_list(heading: &str, lines: &[String]) -> String {
    if lines.is_empty() {
        return String::new();
    }
    let lines: String = lines
        .iter()
        .map(|line| format!("<li>{}</li>", escape_html(line)))
        .collect();
    format!("<h3>{heading}</h3><ul>{lines}</ul>")
}

fn render_promise(promise: &Promise) -> String {
    let Promise {
        fault,
        instance,
        from_ms,
        to_ms,
        promise,
        held,
        what_happened,
        allowed,
    } = promise;
    let (tone, came_to) = if *held {
        ("good", "held")
    } else {
        ("bad", "broken")
    };
    // An instance that fails on purpose has the fault's name, which the text has already.
    let at = if instance == fault {
        String::new()
    } else {
        format!(" at {instance}")
    };
    let to = to_ms
        .map(|to| format!(" to {}", format::format_moment(to)))
        .unwrap_or_default();
    let from = format::format_moment(*from_ms);
    let allowed =
        (!allowed.is_empty()).then(|| format!("allowed: {}", loss::losses_in_words(allowed)));
    let seen: String = what_happened
        .iter()
        .chain(&allowed)
        .map(|line| format!("<li>{}</li>", escape_html(line)))
        .collect();
    format!(
        "<h3 class=\"{tone}\">{}{}: {came_to}</h3><p>{} <span class=\"quiet\">{from}{to}</span></p><ul>{seen}</ul>",
        escape_html(fault),
        escape_html(&at),
        escape_html(&format::capitalize(promise)),
    )
}

fn render_environment(environment: &Environment) -> String {
    let Environment {
        kernel,
        cpu_model,
        cpus,
        memory_bytes,
        open_files_limit,
        sysctls,
        programs,
    } = environment;
    let machine = [
        ("Kernel", kernel.clone()),
        ("CPUs", format!("{cpus} × {cpu_model}")),
        ("Memory", format::format_bytes(*memory_bytes)),
        (
            "Open files (ulimit -n)",
            format::format_count(*open_files_limit),
        ),
    ];
    let machine = machine.iter().map(|(name, value)| (*name, value));
    let programs = programs
        .iter()
        .map(|program| (program.role.as_str(), &program.version));
    let sysctls = sysctls.iter().map(|(name, value)| (name.as_str(), value));
    let pair = |(name, value): (&str, &String)| {
        format!(
            "<dt>{}</dt><dd>{}</dd>",
            escape_html(name),
            escape_html(value)
        )
    };
    machine.chain(programs).chain(sysctls).map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::fault::Fault;
    use crate::judges::{
        judge,
        tests::{
            attempt, end, good_answer, injected, plan, record, report as end_report, stamp_at,
        },
    };
    use crate::record::{
        data::{Instance, Mark, MarkKind, Program, Value},
        event::{Answer, EndedBy, Failure, StreamKind},
        verdict::OLD,
    };

    /// A judged run in which a shim is killed at 0.5 s. If `is_lossy`, connections are lost and the
    /// fault's end is not seen.
    fn ran(is_lossy: bool) -> Ran {
        let mut record = record();
        // Adds 500 answers at the same moment, and streams that the instance `old` ended.
        record
            .attempts
            .extend((0..500).map(|_| attempt("burst", 200, 210, good_answer(OLD))));
        for stream in ["a", "b", "c"] {
            record.ends.push(end(StreamKind::Watch, stream, 2_000));
            record
                .reports
                .push(end_report(stream, EndedBy::Instance, 2_000));
        }
        record.moments.add(OLD, MarkKind::Exited, stamp_at(2_200));
        if is_lossy {
            let failed = |due, failure| attempt("failed", due, 610, Answer::Failed(failure));
            record
                .attempts
                .extend((0..7).map(|_| failed(600, Failure::Refused)));
            record
                .attempts
                .extend((0..3).map(|_| failed(490, Failure::Reset)));
        }
        record.injected.push(injected(
            Fault::KillShim,
            OLD,
            500,
            (!is_lossy).then_some(600),
        ));
        judge(&record, &plan(0), None)
    }

    fn run(via: Via, ran: Ran) -> Run {
        Run {
            via,
            topology: "sidecar".into(),
            outcome: RunOutcome::Ran(Box::new(ran)),
        }
    }

    fn report(runs: Vec<Run>) -> Report {
        let program = Program {
            role: "etcd".into(),
            version: "3.6.1".into(),
        };
        Report {
            version: 1,
            berth_version: "0.1.0".into(),
            made_at: "2026-05-04T03:02:01Z".into(),
            command: "berth rehearse --seed=7".into(),
            environment: Environment {
                kernel: "Linux 6.12.8".into(),
                programs: vec![program],
                ..Environment::default()
            },
            aborted: None,
            runs,
        }
    }

    fn assert_has(page: &str, texts: &[&str]) {
        texts
            .iter()
            .for_each(|text| assert!(page.contains(text), "{text}: {page}"));
    }

    #[test]
    fn a_page_has_the_verdict_all_figures_the_drawings_and_the_command() {
        let page = render(&report(vec![run(Via::Berth, ran(false))]));
        assert_has(
            &page,
            &[
                "<h1>Nothing was lost</h1>",
                "simulated apiservers · old v1.33.0 → new v1.34.0 · sidecar",
            ],
        );
        assert_has(
            &page,
            &[
                "99th percentile",
                "10 ms",
                "berth rehearse --seed=7",
                "3.6.1",
            ],
        );
        // The burst is cut off in the drawing, and its rate is shown as text.
        assert_has(
            &page,
            &[
                "kill-shim 0.50 s",
                "exited 2.20 s",
                "ended by the instance: 3",
                "↑ 10,100",
            ],
        );
        assert!(!page.contains("Side by side") && !page.contains("class=\"lost\""));
    }

    #[test]
    fn losses_and_broken_promises_are_shown() {
        let page = render(&report(vec![run(Via::Berth, ran(true))]));
        assert_has(
            &page,
            &[
                "<h1>Lost: 7 connections refused</h1>",
                "connections refused: 7",
                "class=\"lost\"",
            ],
        );
        assert_has(
            &page,
            &[
                "kill-shim at old: broken",
                "the end of the fault was not seen",
                "allowed: 3 connections reset",
            ],
        );
    }

    #[test]
    fn runs_are_compared_and_the_page_is_about_berths() {
        let missing = RunOutcome::Skipped("there is no haproxy in PATH".into());
        let skipped = Run {
            via: Via::Haproxy,
            topology: "sidecar".into(),
            outcome: missing,
        };
        let page = render(&report(vec![
            run(Via::None, ran(true)),
            skipped,
            run(Via::Berth, ran(false)),
        ]));
        assert_has(
            &page,
            &[
                "<h1>Through berth: nothing was lost</h1>",
                "Side by side",
                "there is no haproxy in PATH",
            ],
        );
        assert_has(&page, &["<td>0</td><td>7</td>"]);
    }

    #[test]
    fn an_aborted_or_empty_run_allows_no_conclusion() {
        let mut aborted = report(vec![run(Via::Berth, ran(false))]);
        aborted.aborted = Some("SIGINT".into());
        let page = render(&aborted);
        assert_has(
            &page,
            &["<h1>Stopped before its end</h1>", "aborted: SIGINT"],
        );
        assert!(!page.contains("<h1>Nothing was lost"));
        assert_has(&render(&report(Vec::new())), &["Nothing was rehearsed"]);
        assert_has(
            &render(&report(vec![run(Via::None, Ran::default())])),
            &["<h1>Nothing was lost</h1>"],
        );
    }

    #[test]
    fn text_from_others_is_escaped() {
        let evil = || "<script>alert(1)</script>\"'><img src=x>&".to_owned();
        let mut hostile = ran(true);
        hostile.instances.push(Instance {
            name: evil(),
            version: evil(),
        });
        hostile
            .timeline
            .answered
            .insert(evil(), vec![1; hostile.timeline.allowed.len()]);
        hostile.marks.push(Mark {
            at_ms: 100,
            instance: evil(),
            what: MarkKind::Fault,
            text: evil(),
        });
        let Promise {
            fault,
            instance,
            promise,
            what_happened,
            ..
        } = &mut hostile.promises[0];
        for text in [fault, promise, &mut what_happened[0]] {
            *text = evil();
        }
        *instance = evil() + "x";
        hostile
            .add(evil(), Value::Count(1))
            .mark_as_main()
            .set_note(evil());
        for lines in [
            &mut hostile.objections,
            &mut hostile.notes,
            &mut hostile.examples,
        ] {
            lines.push(evil());
        }
        let skipped = Run {
            via: Via::None,
            topology: evil(),
            outcome: RunOutcome::Skipped(evil()),
        };
        let mut report = report(vec![
            Run {
                topology: evil(),
                ..run(Via::Berth, hostile)
            },
            skipped,
        ]);
        for text in [
            &mut report.berth_version,
            &mut report.made_at,
            &mut report.command,
        ] {
            *text = evil();
        }
        report.aborted = Some(evil());
        let Environment {
            kernel,
            cpu_model,
            sysctls,
            programs,
            ..
        } = &mut report.environment;
        (*kernel, *cpu_model) = (evil(), evil());
        sysctls.insert(evil(), evil());
        programs.push(Program {
            role: evil(),
            version: evil(),
        });
        let page = render(&report);
        assert!(page.contains("&lt;script&gt;alert(1)"));
        for forbidden in ["<script", "<img", "\"'>"] {
            assert!(!page.contains(forbidden), "{forbidden}");
        }
    }
}
