//! Prints findings as text for people, and as JSON for programs.

use super::{Finding, Severity, excuse_findings};
use berth_manifest::report::Refusal;
use serde::Serialize;
use std::fmt::Write as _;
use std::io::Write as _;

/// Version of the JSON form. New fields and new checks do not change the version.
const VERSION: u32 = 1;

/// Formats the findings as text. The last line counts errors and warnings.
pub fn render_text(name: &str, findings: &[Finding], color: bool) -> String {
    let mut out = String::new();
    for Finding {
        id,
        severity,
        place,
        cause,
        fix,
    } in findings
    {
        let (on, off) = if color {
            (severity_style(*severity), "\x1b[0m")
        } else {
            ("", "")
        };
        let _ = writeln!(
            out,
            "{on}{}{off}[{id}]: {}",
            severity.as_str(),
            make_printable(cause)
        );
        let _ = writeln!(
            out,
            "  --> {}\n  help: {}\n",
            make_printable(place),
            make_printable(fix)
        );
    }
    let _ = writeln!(
        out,
        "{}: {}",
        make_printable(name),
        format_summary(findings)
    );
    out
}

/// Prints the findings, before a command changes the node, and refuses the command if one is an
/// error.
///
/// # Errors
/// A finding is an error, and `ignore_errors` does not name its check.
pub fn refuse_errors(
    name: &str,
    mut findings: Vec<Finding>,
    ignore_errors: &[String],
) -> Result<(), Refusal> {
    excuse_findings(&mut findings, ignore_errors);
    let _ = write!(std::io::stderr(), "{}", render_text(name, &findings, false));
    if findings
        .iter()
        .all(|finding| finding.severity != Severity::Error)
    {
        return Ok(());
    }
    let _ = writeln!(
        std::io::stderr(),
        "berth: nothing was changed: fix the errors above first; --ignore-errors turns errors into warnings"
    );
    Err(Refusal::Errors)
}

/// Formats the findings as one JSON object.
pub fn render_json(findings: &[Finding]) -> String {
    #[derive(Serialize)]
    struct Document<'a> {
        version: u32,
        findings: &'a [Finding],
    }
    // The findings contain only texts and numbers, so serializing them cannot fail.
    serde_json::to_string_pretty(&Document {
        version: VERSION,
        findings,
    })
    .unwrap_or_default()
        + "\n"
}

fn format_summary(findings: &[Finding]) -> String {
    let count = |severity| {
        findings
            .iter()
            .filter(|finding| finding.severity == severity)
            .count()
    };
    let bad = [
        format_count(count(Severity::Error), "error", "errors"),
        format_count(count(Severity::Warning), "warning", "warnings"),
    ];
    let bad: Vec<_> = bad.into_iter().flatten().collect();
    if bad.is_empty() {
        "no error and no warning".into()
    } else {
        bad.join(", ")
    }
}

/// Formats a count with its noun. `None` if the count is zero.
fn format_count(count: usize, one: &str, many: &str) -> Option<String> {
    match count {
        0 => None,
        1 => Some(format!("1 {one}")),
        count => Some(format!("{count} {many}")),
    }
}

fn severity_style(severity: Severity) -> &'static str {
    match severity {
        Severity::Error => "\x1b[1;31m",
        Severity::Warning => "\x1b[1;33m",
        Severity::Info => "\x1b[1m",
    }
}

/// Replaces control characters, which would affect the terminal, in a text from files or the
/// system.
fn make_printable(text: &str) -> String {
    berth_os::strip_error_numbers(text.replace(char::is_control, "\u{fffd}"))
}

#[cfg(test)]
mod tests {
    use super::super::checks::{PRE_STOP, UID_MISMATCH};
    use super::*;

    #[test]
    fn the_sum_is_last_and_nothing_steers_the_terminal() {
        let findings = [
            UID_MISMATCH.make_finding("a.yaml:7", "other\x1b[2J", "the same"),
            PRE_STOP.make_finding("a.yaml:9", "little", "more"),
        ];
        insta::assert_snapshot!(render_text("a.yaml", &findings, false), @r"
        error[uid-mismatch]: other�[2J
          --> a.yaml:7
          help: the same

        warning[pre-stop]: little
          --> a.yaml:9
          help: more

        a.yaml: 1 error, 1 warning
        ");
        assert!(render_text("a", &findings, true).starts_with("\x1b[1;31merror\x1b[0m[uid"));
        assert_eq!(render_text("a", &[], true), "a: no error and no warning\n");
    }
}
