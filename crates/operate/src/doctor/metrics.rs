//! Samples in Prometheus' text form, as kube-apiserver and the kubelet write them.

/// A sample: its name, its labels as they are written, and its value.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample<'a> {
    pub name: &'a str,
    labels: Vec<(&'a str, &'a str)>,
    pub value: f64,
}

impl Sample<'_> {
    /// A label's value; one that is absent is empty, as Prometheus has it.
    pub fn label(&self, name: &str) -> &str {
        self.labels.iter().find(|(label, _)| *label == name).map_or("", |(_, value)| value)
    }
}

/// The samples with a name that is wanted: a page has tens of thousands. A line that is none is passed over.
pub fn samples<'a>(page: &'a str, wanted: impl Fn(&str) -> bool) -> impl Iterator<Item = Sample<'a>> {
    page.lines().filter_map(move |line| {
        let (name, rest) = line.split_at(line.find(['{', ' ', '\t'])?);
        if !wanted(name) {
            return None;
        }
        let (labels, rest) = rest.strip_prefix('{').map_or(Some((Vec::new(), rest)), labels)?;
        // A time may follow.
        Some(Sample { name, labels, value: rest.split_ascii_whitespace().next()?.parse().ok()? })
    })
}

fn labels(mut rest: &str) -> Option<(Vec<(&str, &str)>, &str)> {
    let mut labels = Vec::new();
    loop {
        rest = rest.trim_start_matches([' ', ',']);
        if let Some(rest) = rest.strip_prefix('}') {
            return Some((labels, rest));
        }
        let (name, quoted) = rest.split_once("=\"")?;
        let mut escaped = false;
        let end = quoted.find(|c| {
            let ends = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        })?;
        labels.push((name, &quoted[..end]));
        rest = &quoted[end + 1..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn samples_have_names_labels_and_values() {
        let text = "# HELP a b\n# TYPE a gauge\na{x=\"1\",y=\"\\\"}\\\\\", } 2 1700000000\nb +Inf\nc{} 1e3\n\nd{x=\"1} 2\ne{x=\"1\"} z\nf\n";
        let found: Vec<_> = samples(text, |name| name != "#").collect();
        let names: Vec<_> = found.iter().map(|sample| (sample.name, sample.value)).collect();
        assert_eq!(names, [("a", 2.0), ("b", f64::INFINITY), ("c", 1000.0)]);
        let labels = ["x", "y", "z"].map(|name| found[0].label(name));
        assert_eq!(labels, ["1", r#"\"}\\"#, ""]);
        assert_eq!(samples(text, |name| name == "c").count(), 1);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[a{}=\"\\\\, \n0-9é#]{0,60}") {
            for sample in samples(&text, |_| true) {
                prop_assert!(!sample.name.chars().any(|c| " {\n".contains(c)), "{:?}", sample);
            }
        }
    }
}
