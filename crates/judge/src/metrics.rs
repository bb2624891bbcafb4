//! A parser of Prometheus' text exposition format, as far as the judge needs it: a sample's name,
//! labels and value.
//!
//! A page comes from outside and may hold anything. Lines that are no sample are skipped: comments
//! and broken lines. A timestamp or an exemplar after the value is ignored.

use std::borrow::Cow;

type Labels<'a> = Vec<(&'a str, Cow<'a, str>)>;

#[derive(Debug, Clone, PartialEq)]
pub struct Sample<'a> {
    pub name: &'a str,
    labels: Labels<'a>,
    pub value: f64,
}

impl Sample<'_> {
    /// The value of a label. A missing label equals an empty label, as in Prometheus.
    pub fn label(&self, name: &str) -> &str {
        self.labels
            .iter()
            .find(|(label, _)| *label == name)
            .map_or("", |(_, value)| value)
    }
}

/// Returns a page's samples with a wanted name. A page has a hundred thousand lines, and most of
/// its metrics are not needed.
pub fn find_samples<'a>(
    page: &'a str,
    wanted: impl Fn(&str) -> bool,
) -> impl Iterator<Item = Sample<'a>> {
    page.lines().filter_map(move |line| {
        let line = line.trim_start();
        let name = &line[..line.find(['{', ' ', '\t'])?];
        if name.is_empty() || name.starts_with('#') || !wanted(name) {
            return None;
        }
        let rest = line[name.len()..].trim_start();
        let (labels, rest) = match rest.strip_prefix('{') {
            Some(rest) => parse_labels(rest)?,
            None => (Vec::new(), rest),
        };
        Some(Sample {
            name,
            labels,
            value: rest.split_ascii_whitespace().next()?.parse().ok()?,
        })
    })
}

/// Parses the labels up to the closing brace. Returns the rest of the line, too.
fn parse_labels(mut rest: &str) -> Option<(Labels<'_>, &str)> {
    let mut labels = Vec::new();
    loop {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        if let Some(rest) = rest.strip_prefix('}') {
            return Some((labels, rest));
        }
        let (name, after) = rest.split_once('=')?;
        let (value, after) = quoted_value(after.trim_start().strip_prefix('"')?)?;
        labels.push((name.trim_end(), value));
        rest = after;
    }
}

/// Parses a label's value up to its closing quote. Returns the rest of the line, too. `\\`, `\"`
/// and `\n` are the only escapes.
fn quoted_value(text: &str) -> Option<(Cow<'_, str>, &str)> {
    let plain = text.find(['"', '\\'])?;
    if text[plain..].starts_with('"') {
        return Some((text[..plain].into(), &text[plain + 1..]));
    }
    let mut value = text[..plain].to_owned();
    let mut characters = text[plain..].char_indices();
    loop {
        match characters.next()? {
            (at, '"') => return Some((value.into(), &text[plain + at + 1..])),
            (_, '\\') => match characters.next()?.1 {
                'n' => value.push('\n'),
                other => value.push(other),
            },
            (_, other) => value.push(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_line_may_have_labels_escapes_a_timestamp_or_an_exemplar() {
        let page = concat!(
            "# HELP a b\n# TYPE a counter\na 1\n",
            "a{} 2 1700000000\n",
            "a{x=\"1\",y=\"q\\\"\\\\\\nz\",} +Inf # {trace_id=\"9\"} 3\n",
            "  a { x = \"{,}\" , y=\"\" }\t4e-3\n",
            "a{x=\"1\" 5\na{x=1} 5\na\na five\nother 6\n",
        );
        let all: Vec<_> = find_samples(page, |name| name == "a").collect();
        let values: Vec<_> = all.iter().map(|sample| sample.value).collect();
        assert_eq!(values, [1.0, 2.0, f64::INFINITY, 0.004]);
        assert_eq!(
            (all[2].label("x"), all[2].label("y"), all[2].label("none")),
            ("1", "q\"\\\nz", "")
        );
        assert_eq!((all[3].label("x"), all[3].label("y")), ("{,}", ""));
    }

    proptest! {
        #[test]
        fn written_samples_are_read_again(labels in prop::collection::vec(("[a-z_]{1,8}", ".*"), 0..4), value: f64) {
            let written: Vec<_> = labels
                .iter()
                .map(|(name, value)| {
                    let value = value.replace('\\', r"\\").replace('\n', r"\n").replace('"', "\\\"");
                    format!("{name}=\"{value}\"")
                })
                .collect();
            // A carriage return inside a label is kept: lines() strips one only before a newline.
            let page = format!("m{{{}}} {value} 17", written.join(","));
            let read: Vec<_> = find_samples(&page, |_| true).collect();
            prop_assert_eq!(read.len(), 1);
            prop_assert!(read[0].value == value || value.is_nan());
            for (name, _) in &labels {
                let first = labels.iter().find(|(other, _)| other == name).expect("it is one of them");
                prop_assert_eq!(read[0].label(name), &first.1);
            }
        }
    }
}
