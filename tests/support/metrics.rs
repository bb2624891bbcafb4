//! Checks of a page of metrics by Prometheus' conventions.

use std::collections::BTreeSet;

/// Checks the page's families and samples. Each family appears once, with a help text and a type,
/// before its samples. Each sample appears once and belongs to a shim. Counters end in `_total`,
/// and other metrics do not. Bounds of buckets are round numbers.
#[track_caller]
pub(crate) fn follow_conventions(page: &str) {
    let (mut family, mut kind, mut seen) = ("", "", BTreeSet::new());
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        if let Some(head) = line.strip_prefix("# HELP ") {
            let help;
            (family, help) = head.split_once(' ').unwrap();
            let next = lines.next().unwrap_or_default();
            kind = next
                .strip_prefix(&format!("# TYPE {family} "))
                .unwrap_or_else(|| panic!("no type: {line}, {next}"));
            assert!(
                help.ends_with('.') && !help.starts_with(char::is_lowercase),
                "not a sentence: {line}"
            );
            assert_eq!(family.ends_with("_total"), kind == "counter", "{next}");
            assert!(seen.insert(family), "twice: {line}");
            continue;
        }
        let (sample, _) = line
            .rsplit_once(' ')
            .unwrap_or_else(|| panic!("neither head nor sample: {line}"));
        let (name, labels) = sample
            .split_once('{')
            .unwrap_or_else(|| panic!("no labels: {line}"));
        match (kind, name.strip_prefix(family)) {
            ("counter" | "gauge", Some(""))
            | ("histogram", Some("_bucket" | "_sum" | "_count")) => {}
            (_, end) => panic!("{end:?} of the {kind} {family}: {line}"),
        }
        assert!(
            labels.starts_with("shim=\"") && seen.insert(sample),
            "of no shim, or twice: {line}"
        );
        let bucket = labels.split_once("le=\"").map_or("", |(_, rest)| rest);
        let digits: String = bucket
            .chars()
            .take_while(|c| *c != '"')
            .filter(char::is_ascii_digit)
            .collect();
        assert!(
            digits.trim_matches('0').len() <= 2,
            "not a round bucket: {line}"
        );
    }
    assert!(seen.len() > 50, "only {seen:?}");
}
