//! Writes values as YAML text, in the style of the file around them.

use berth_cluster::yaml::{YamlNode, resolve_scalar};
use serde_json::{Map, Value};
use std::fmt::Write;

#[rustfmt::skip]
/// The order in which people write a pod's fields. Other names come last, sorted by the alphabet.
const FIELD_ORDER: [&str; 55] = [
    "apiVersion", "kind", "metadata", "name", "namespace", "labels", "annotations", "spec", "hostNetwork",
    "priorityClassName", "terminationGracePeriodSeconds", "initContainers", "containers", "image",
    "imagePullPolicy", "restartPolicy", "command", "args", "env", "value", "valueFrom", "fieldRef", "ports",
    "resources", "requests", "cpu", "memory", "securityContext", "runAsUser", "runAsGroup", "runAsNonRoot",
    "allowPrivilegeEscalation", "capabilities", "drop", "add", "readOnlyRootFilesystem", "seccompProfile",
    "lifecycle", "preStop", "startupProbe", "livenessProbe", "readinessProbe", "exec", "httpGet",
    "initialDelaySeconds", "periodSeconds", "timeoutSeconds", "failureThreshold", "mountPath", "subPath",
    "readOnly", "volumeMounts", "op", "path", "volumes",
];

/// How a file is written, so that added text looks like the text around it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Style {
    /// True if lists are indented deeper than their key.
    pub(super) indented: bool,
    /// True if keys are sorted by the alphabet, as programs write them.
    pub(super) sorted: bool,
    /// True if the file is JSON, which is also YAML.
    pub(super) json: bool,
}

/// Writes a value as a whole document. The fields are in the order that people use.
pub fn write_document(value: &Value) -> String {
    let style = Style {
        indented: false,
        sorted: false,
        json: false,
    };
    value
        .as_object()
        .map(|map| style.write_fields(0, map))
        .unwrap_or_default()
}

impl Style {
    /// Finds the style of a document: the indent in its first block list, and the order of keys in
    /// all its mappings.
    pub(super) fn of(document: &YamlNode) -> Self {
        Self {
            indented: has_indented_lists(document).unwrap_or(true),
            sorted: has_sorted_keys(document),
            json: document.flow,
        }
    }

    /// Returns the index where a new key belongs among the present keys.
    pub(super) fn find_key_index<'a>(
        self,
        keys: impl Iterator<Item = &'a str>,
        new: &str,
    ) -> usize {
        let mut place = 0;
        for (at, key) in keys.enumerate() {
            if self.rank(key) <= self.rank(new) {
                place = at + 1;
            }
        }
        place
    }

    fn rank(self, key: &str) -> (usize, &str) {
        let place = if self.sorted {
            None
        } else {
            FIELD_ORDER.iter().position(|known| *known == key)
        };
        (place.unwrap_or(FIELD_ORDER.len()), key)
    }

    fn sort_entries(self, map: &Map<String, Value>) -> Vec<(&String, &Value)> {
        let mut entries: Vec<_> = map.iter().collect();
        entries.sort_by_key(|(key, _)| self.rank(key));
        entries
    }

    /// Writes the fields of a mapping, as complete lines with this indent.
    pub(super) fn write_fields(self, indent: usize, map: &Map<String, Value>) -> String {
        self.sort_entries(map)
            .into_iter()
            .map(|(key, value)| self.write_entry(indent, key, value))
            .collect()
    }

    /// Writes the items of a list, as complete lines with this indent.
    pub(super) fn write_items(self, indent: usize, items: &[Value]) -> String {
        items
            .iter()
            .map(|item| self.write_item(indent, item))
            .collect()
    }

    /// Writes `key: value`, as complete lines with this indent.
    pub(super) fn write_entry(self, indent: usize, key: &str, value: &Value) -> String {
        format!(
            "{:indent$}{}{}",
            "",
            write_text(key),
            self.write_after_key(indent, value)
        )
    }

    /// Writes the text after a key with this indent: the colon and the value.
    pub(super) fn write_after_key(self, indent: usize, value: &Value) -> String {
        match value {
            Value::Object(map) if !map.is_empty() => {
                format!(":\n{}", self.write_fields(indent + 2, map))
            }
            Value::Array(items) if !items.is_empty() => {
                format!(
                    ":\n{}",
                    self.write_items(if self.indented { indent + 2 } else { indent }, items)
                )
            }
            other => format!(": {}\n", write_scalar(other)),
        }
    }

    /// Writes `- value`, as complete lines with this indent.
    fn write_item(self, indent: usize, value: &Value) -> String {
        let lines = match value {
            Value::Object(map) if !map.is_empty() => self.write_fields(indent + 2, map),
            Value::Array(items) if !items.is_empty() => self.write_items(indent + 2, items),
            other => return format!("{:indent$}- {}\n", "", write_scalar(other)),
        };
        // The first key is on the same line as the dash.
        format!("{:indent$}- {}", "", &lines[indent + 2..])
    }

    /// Writes a value that stands inside of `[…]` or `{…}`.
    pub(super) fn write_flow(self, value: &Value) -> String {
        match value {
            Value::String(text) => {
                // In flow style, more characters end a text than in a block, and parsers disagree
                // on some of them (`:` and `?`).
                let safe = text
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "-_./=".contains(c));
                let plain = write_text(text);
                if safe && !self.json && plain == *text {
                    plain
                } else {
                    quote(text)
                }
            }
            Value::Array(items) => {
                format!(
                    "[{}]",
                    items
                        .iter()
                        .map(|item| self.write_flow(item))
                        .collect::<Vec<_>>()
                        .join(", ")
                )
            }
            Value::Object(map) => {
                let entry = |(key, value): (&String, &Value)| self.write_flow_entry(key, value);
                format!(
                    "{{{}}}",
                    self.sort_entries(map)
                        .into_iter()
                        .map(entry)
                        .collect::<Vec<_>>()
                        .join(", ")
                )
            }
            other => other.to_string(),
        }
    }

    /// Writes `key: value` for the inside of `{…}`.
    pub(super) fn write_flow_entry(self, key: &str, value: &Value) -> String {
        format!(
            "{}: {}",
            self.write_flow(&key.into()),
            self.write_flow(value)
        )
    }
}

/// Writes a value on one line of a block: a scalar, `[]` or `{}`.
pub(super) fn write_scalar(value: &Value) -> String {
    match value {
        Value::String(text) => write_text(text),
        other => other.to_string(),
    }
}

/// Writes a text, in quotes if necessary. The quotes are those of Go's YAML library, so the result
/// equals the output of kubeadm.
fn write_text(text: &str) -> String {
    if !text.chars().all(is_printable) {
        return quote(text);
    }
    if text.is_empty()
        || !resolve_scalar(text).is_string()
        || looks_like_number(text)
        || is_infinity_nan_or_merge(text)
    {
        return format!("\"{text}\"");
    }
    let first = text.chars().next().unwrap_or_default();
    let indicator = matches!(first, '-' | '?' | ':')
        && text[1..].chars().next().is_none_or(|c| c == ' ')
        || ",[]{}#&*!|>'\"%@`".contains(first)
        || text.starts_with("---")
        || text.starts_with("...");
    let spaced = text.starts_with(' ') || text.ends_with(' ');
    if indicator || spaced || text.contains(": ") || text.ends_with(':') || text.contains(" #") {
        return format!("'{}'", text.replace('\'', "''"));
    }
    text.to_owned()
}

/// Writes a text in double quotes. YAML accepts JSON's escapes, but requires escapes for more
/// characters.
fn quote(text: &str) -> String {
    let mut quoted = String::new();
    for c in Value::from(text).to_string().chars() {
        if is_printable(c) {
            quoted.push(c);
        } else {
            let _ = write!(quoted, "\\u{:04x}", u32::from(c));
        }
    }
    quoted
}

/// True for a character that YAML allows unescaped and that is no line end. YAML 1.1 has five line
/// ends.
fn is_printable(c: char) -> bool {
    !c.is_control()
        && !matches!(
            c,
            '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}'
        )
}

/// True for infinity and NaN, which JSON does not have, and for the merge key `<<`.
fn is_infinity_nan_or_merge(text: &str) -> bool {
    let name = text.strip_prefix(['-', '+']).unwrap_or(text);
    text == "<<" || matches!(name, ".inf" | ".Inf" | ".INF" | ".nan" | ".NaN" | ".NAN")
}

/// True for texts that YAML 1.1 parsers read as a number or a time: hexadecimal, octal, base 60,
/// dates.
fn looks_like_number(text: &str) -> bool {
    // Go's YAML library drops each _ before it reads a number.
    let digits = text.trim_start_matches(['-', '+', '_']);
    let number =
        |c: char| c.is_ascii_digit() || matches!(c, '_' | ':' | '.' | '-' | 'e' | 'E' | '+');
    let radix = ["0x", "0X", "0o", "0O", "0b", "0B"]
        .iter()
        .any(|prefix| digits.starts_with(prefix));
    let address = digits.matches('.').count() > 1;
    digits.starts_with(|c: char| c.is_ascii_digit() || c == '.')
        && (radix || digits.chars().all(number) && !address)
}

/// True if the first list in a mapping is indented deeper than its key.
fn has_indented_lists(node: &YamlNode) -> Option<bool> {
    for (key, value) in node.entries() {
        let block = !value.flow && !value.items().is_empty();
        let first = value.items().first().filter(|_| block);
        // A block list's item begins two characters after its dash.
        let here = first
            .filter(|item| item.line != key.line)
            .map(|item| item.column > key.column + 2);
        if let Some(found) = here.or_else(|| has_indented_lists(value)) {
            return Some(found);
        }
    }
    node.items().iter().find_map(has_indented_lists)
}

fn has_sorted_keys(node: &YamlNode) -> bool {
    let keys: Vec<_> = node
        .entries()
        .iter()
        .filter_map(|(key, _)| key.text())
        .collect();
    keys.is_sorted()
        && node
            .entries()
            .iter()
            .all(|(_, value)| has_sorted_keys(value))
        && node.items().iter().all(has_sorted_keys)
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_cluster::yaml::parse_documents;
    use serde_json::json;

    #[test]
    fn quotes_match_gos_yaml_library() {
        let same = [
            "10.0.0.5:6443",
            "--a={instance}",
            "$(HOST_IP):6443",
            "/a b",
            "10m",
            "a:b",
            "it's",
            "10.0.0.5",
        ];
        for text in same {
            assert_eq!(write_text(text), text);
        }
        for text in [
            "",
            "true",
            "no",
            "1",
            "1e3",
            "0x1f",
            "0X1F",
            "10:30",
            "2026-01-02",
            "~",
            ".5",
            "-_4",
            "_4",
            ".inf",
            "-.Inf",
            ".NaN",
            "<<",
        ] {
            assert_eq!(write_text(text), format!("\"{text}\""));
        }
        for text in [
            "{\"a\":1}",
            "[fd00::5]:6443",
            "- a",
            "a: b",
            "a #b",
            "*a",
            " a",
            "a:",
        ] {
            assert_eq!(write_text(text), format!("'{text}'"));
        }
        assert_eq!(
            (write_text("'a'"), write_text("a\nb")),
            ("'''a'''".into(), "\"a\\nb\"".into())
        );
        // Line ends of YAML 1.1, and forbidden characters, none of which JSON escapes.
        assert_eq!(
            write_text("é\u{85}\u{2028}\u{7f}\u{ffff}\""),
            "\"é\\u0085\\u2028\\u007f\\uffff\\\"\""
        );
        let flow = |text: &str| {
            Style {
                indented: true,
                sorted: true,
                json: false,
            }
            .write_flow(&text.into())
        };
        for text in ["a", "--a=/b.c", "10m", "-_"] {
            assert_eq!(flow(text), text);
        }
        for text in ["?a", ":a", "a:b", "a,b", "a#b", "é", "a b", "1", "_1"] {
            assert_eq!(flow(text), format!("\"{text}\""));
        }
        assert_eq!(flow("\u{7f}"), "\"\\u007f\"");
    }

    #[test]
    fn the_style_follows_the_file() {
        let style = |text: &str| Style::of(&parse_documents(text).unwrap()[0]);
        assert_eq!(
            style("a:\n- b: 1\n  c: 2\n"),
            Style {
                indented: false,
                sorted: true,
                json: false
            }
        );
        assert_eq!(
            style("b:\n  - 1\na: 1\n"),
            Style {
                indented: true,
                sorted: false,
                json: false
            }
        );
        let place = |sorted, new| {
            Style {
                indented: true,
                sorted,
                json: false,
            }
            .find_key_index(["command", "image", "name"].into_iter(), new)
        };
        assert_eq!(
            (place(true, "env"), place(false, "env"), place(true, "a")),
            (1, 3, 0)
        );
    }

    proptest::proptest! {
        #[test]
        fn written_values_are_read_again(
            texts in proptest::collection::vec("[ -~é\n]{0,12}|[-+0-9.:_exn~]{1,6}|yes|null|True", 1..5),
            indented: bool,
        ) {
            let items: Vec<_> = texts.iter().map(|text| json!({"k": text, "l": [[text, 1], {}], "m": {"n": [true]}})).collect();
            let value = json!({"a": items, "b": texts});
            let style = Style { indented, sorted: true, json: false };
            let text: String = value.as_object().unwrap().iter().map(|(key, value)| style.write_entry(2, key, value)).collect();
            proptest::prop_assert_eq!(&parse_documents(&text).unwrap()[0].value(), &value);
            for json in [false, true] {
                let text = Style { json, ..style }.write_flow(&value);
                proptest::prop_assert_eq!(&parse_documents(&text).unwrap()[0].value(), &value);
            }
        }
    }
}
