//! The subset of YAML that the editor accepts.
//!
//! YAML has more forms than manifests use. For some of these forms, parsers disagree where a value
//! ends (`[!a, 1]`: a comma may be part of a tag). In other forms, a value has no position in the
//! text (`? key` without a colon). Near such a value, berth's parser and Kubernetes may read an
//! edit differently, and parsing the result again would not show the difference. So a document with
//! such a form is not edited.

use super::Problem;
use berth_cluster::yaml::{Data, YamlNode};

/// Checks that a document uses only the forms of YAML that manifests use.
///
/// # Errors
/// The unusual form, and how to write the value instead.
pub(super) fn check_plain(text: &str, node: &YamlNode) -> Result<(), Problem> {
    if node.tagged {
        return Err(make_refused_form_problem(
            node.line,
            "a tag (!)",
            "write the value without this form",
        ));
    }
    if let (Data::Scalar { .. }, Some(at)) = (&node.data, find_tab(text, node.span.end)) {
        let fix = "indent with spaces (JSON: jq . FILE), and leave empty lines empty";
        return Err(make_refused_form_problem(
            text[..at].matches('\n').count() + 1,
            "a tab at the beginning of a line",
            fix,
        ));
    }
    if node.flow && text[node.span.clone()].starts_with(['?', ':']) {
        return Err(make_refused_form_problem(
            node.line,
            "a text that begins with ? or : inside of brackets",
            "quote it",
        ));
    }
    if node.shared && node.is_null() {
        return Err(make_refused_form_problem(
            node.line,
            "an anchor or alias (& or *) of an empty value",
            "write null in each place",
        ));
    }
    if node.shared && text[node.span.clone()].starts_with('*') {
        // An alias (`*name`) stands for a value that is checked at its anchor.
        return Ok(());
    }
    if node.flow && !node.entries().is_empty() && !text[node.span.clone()].ends_with('}') {
        return Err(make_refused_form_problem(
            node.line,
            "a pair without braces",
            "write {key: value}",
        ));
    }
    for (key, value) in node.entries() {
        if !is_plain_key(text, key) {
            return Err(make_refused_form_problem(
                key.line,
                "a key that is not a single text before a colon",
                "write key: value",
            ));
        }
        if matches!(&key.data, Data::Scalar { text, plain: true } if text == "<<") {
            return Err(make_refused_form_problem(
                key.line,
                "a merge key (<<)",
                "write its fields out",
            ));
        }
        check_plain(text, key)?;
        check_plain(text, value)?;
    }
    node.items()
        .iter()
        .try_for_each(|item| check_plain(text, item))
}

/// Position of a tab at the beginning of a line after a value that ends at `end`. A value without
/// quotes may continue on that line, so libyaml ignores the tab; after any other value, libyaml
/// reports the tab.
fn find_tab(text: &str, end: usize) -> Option<usize> {
    let blank = &text[..text.len() - text[end..].trim_start().len()];
    let below = end + blank[end..].find('\n')?;
    Some(below + blank[below..].find('\t')?)
}

/// True if a key is a text on one line, followed by a colon, and without a leading `?`.
fn is_plain_key(text: &str, key: &YamlNode) -> bool {
    let (before, rest) = (&text[..key.span.start], &text[key.span.end..]);
    let asked = key.flow && before.trim_end().ends_with('?');
    let written = &text[key.span.clone()];
    let one = !written.is_empty() && !written.contains('\n') && !key.shared && !key.tagged;
    one && !asked && rest.trim_start_matches([' ', '\t']).starts_with(':')
}

fn make_refused_form_problem(line: usize, form: &str, fix: &str) -> Problem {
    Problem::new(line, format!("{form}, which berth cannot edit: {fix}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_cluster::yaml::parse_documents;

    fn refusal_message(text: &str) -> Option<String> {
        parse_documents(text)
            .unwrap()
            .iter()
            .find_map(|document| check_plain(text, document).err())
            .map(|problem| problem.to_string())
    }

    #[test]
    fn common_yaml_forms_are_accepted() {
        for text in [
            "a: 1 # c\n\"b\" : 'x\n  y'\nc:\n- d: [e, {f: g}, {}]\n  h: |\n    ? &a !b *c\t\n-\n  - i: &x [1]\n  - *x\n",
            "{\"a\":1, 'b': [], c: what?,\n d: {}}",
            "a: {b: &x {c: 1}, d: *x, e: [*x]}\nf: *x\n",
            "'<<': 1\n",
            "",
        ] {
            assert_eq!(refusal_message(text), None, "{text}");
        }
    }

    #[test]
    fn rare_yaml_forms_are_refused() {
        for (text, form) in [
            ("{ ?: a}", "1: a text that"),
            ("a: [?b]", "1: a text that"),
            ("a: {b: :c}", "1: a text that"),
            ("a:\n- 0 \n \t\nb: 1", "3: a tab at the beginning of a line"),
            (
                "{\n\t\"a\": {\n\t\t\"b\": \"c\"\n\t}\n}\n",
                "4: a tab at the beginning of a line, which berth cannot edit: indent with spaces (JSON: jq . FILE)",
            ),
            ("a:\n- !!str\n", "2: a tag"),
            ("a: !x [1]", "1: a tag"),
            ("b: !x\n  a: 1", "a tag"),
            ("a: [&x , 1]", "1: an anchor"),
            ("a: &x ~\nb: *x", "1: an anchor"),
            ("&x a: 1", "1: a key"),
            ("!x a: 1", "1: a key"),
            ("a: &x b\n*x : 1", "2: a key"),
            ("b: 1\n? a\n: 2", "2: a key"),
            ("? a", "a key"),
            ("{a, b: 1}", "a key"),
            ("{? a : 1}", "a key"),
            ("{a\n : 1}", "a key"),
            (": 1", "a key"),
            ("[a: 1]", "a pair without braces"),
            ("a:\n  <<: {b: 1}", "2: a merge key"),
        ] {
            let refused = refusal_message(text).unwrap_or_else(|| panic!("{text} is not refused"));
            assert!(refused.contains(form), "{text}: {refused}");
        }
    }
}
