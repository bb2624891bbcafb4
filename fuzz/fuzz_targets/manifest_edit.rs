//! Edits of any YAML. After an accepted edit, another reader reads the intended values at the
//! edited paths, and unchanged values elsewhere.
//!
//! Inputs are a file, a zero byte, and choices: paths in the file, and the changes there.
#![no_main]

use berth_cluster::yaml::{self, YamlNode};
use berth_fuzz::yaml::{Read, Yaml, read};
use berth_manifest::edit::{Change, Edit, Path, Step, apply_edits};
use libfuzzer_sys::arbitrary::Unstructured;
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};

/// Strings. Without quotes, YAML readers take most of these strings for other values or for syntax.
const HARD: [&str; 40] = [
    "a",
    "",
    " ",
    "~",
    "null",
    "yes",
    "No",
    "on",
    "1",
    "-1.5",
    "1_000",
    "0x1f",
    "0o7",
    "0b1",
    "1e3",
    ".5",
    ".inf",
    "1:30",
    "2026-01-02",
    "-",
    "- a",
    "? a",
    "a: b",
    "a:",
    ": a",
    "a #b",
    "#a",
    "*a",
    "&a",
    "!a",
    "%a",
    "@a",
    "{a}",
    "[a]",
    "'a'",
    "a\nb",
    "a\tb",
    "é\u{2028}\u{85}",
    "---",
    "<<",
];

/// Keys that the file may have or lack.
const KEYS: [&str; 8] = ["name", "args", "spec", "x", "a b", "1", "on", "- k"];

fuzz_target!(|bytes: &[u8]| {
    let end = bytes
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(bytes.len());
    let Ok(text) = std::str::from_utf8(&bytes[..end]) else {
        return;
    };
    let mut choices = Unstructured::new(bytes.get(end + 1..).unwrap_or_default());
    let Ok(documents) = yaml::parse_documents(text) else {
        return;
    };
    if documents.is_empty() {
        return;
    }
    let document = choices.choose_index(documents.len()).unwrap_or_default();
    let edits: Vec<_> = (0..choices.int_in_range(1..=3).unwrap_or(1))
        .map(|_| edit(&documents[document], &mut choices))
        .collect();
    let Ok(new) = apply_edits(text, document, &edits) else {
        return;
    };
    // A file that only one of the two readers accepts proves nothing.
    let Read::Documents(mut wanted) = read(text) else {
        return;
    };
    if wanted.len() != documents.len() {
        return;
    }
    for edit in &edits {
        change(&mut wanted[document], &edit.path.0, &edit.change);
    }
    let is = match read(&new) {
        Read::Documents(is) => is,
        Read::Refused => {
            panic!("another reader cannot read\n{new}\nmade from\n{text}\nby {edits:#?}")
        }
        Read::Broken => return,
    };
    assert!(
        is.len() == wanted.len() && is.iter().zip(&wanted).all(|(is, wanted)| is.is(wanted)),
        "{new}\nis not the result intended by {edits:#?}\nin\n{text}\nThe result is {is:#?}\nand should be {wanted:#?}"
    );
});

/// Chooses an edit. The path mostly exists.
fn edit(root: &YamlNode, choices: &mut Unstructured<'_>) -> Edit {
    let mut path = Path::default();
    let mut node = root;
    while choices.ratio(7, 8).unwrap_or(false) {
        let (entries, items) = (node.entries(), node.items());
        if !entries.is_empty() {
            let (key, value) = &entries[choices.choose_index(entries.len()).unwrap_or_default()];
            let yaml::Data::Scalar { text, .. } = &key.data else {
                break;
            };
            path = path.key(text);
            node = value;
        } else if !items.is_empty() {
            let index = choices.choose_index(items.len()).unwrap_or_default();
            path = match items[index].get("name").and_then(YamlNode::text) {
                Some(name) if choices.arbitrary().unwrap_or(false) => path.name(name),
                _ => path.index(index),
            };
            node = &items[index];
        } else {
            break;
        }
    }
    for _ in 0..choices.int_in_range(0..=2).unwrap_or(0) {
        path = path.key(choices.choose(&KEYS).unwrap_or(&"x"));
    }
    let values = |choices: &mut Unstructured<'_>| {
        (0..choices.int_in_range(1..=2).unwrap_or(1))
            .map(|_| value(choices, 2))
            .collect::<Vec<_>>()
    };
    let change = match choices.int_in_range(0..=4).unwrap_or(0) {
        0 | 1 => Change::Set(value(choices, 3)),
        2 => Change::Remove,
        3 => Change::Prepend(values(choices)),
        _ => Change::Append(values(choices)),
    };
    Edit {
        path,
        change,
        reason: "so it is".into(),
        comment: choices.arbitrary().unwrap_or(false),
    }
}

fn value(choices: &mut Unstructured<'_>, depth: u32) -> Value {
    let text = |choices: &mut Unstructured<'_>| match choices.arbitrary() {
        Ok(true) => choices.arbitrary::<&str>().unwrap_or_default().to_owned(),
        _ => choices
            .choose(&HARD)
            .copied()
            .unwrap_or_default()
            .to_owned(),
    };
    match choices.int_in_range(0..=6).unwrap_or(0) {
        0..=2 => text(choices).into(),
        3 => choices.arbitrary::<i32>().unwrap_or(0).into(),
        4 => choices
            .choose(&[Value::Null, true.into(), false.into(), json!([]), json!({})])
            .cloned()
            .unwrap_or_default(),
        _ if depth == 0 => Value::Null,
        5 => (0..choices.int_in_range(0..=2).unwrap_or(0))
            .map(|_| value(choices, depth - 1))
            .collect(),
        _ => {
            // YAML limits a key to 1,024 characters. All keys that berth writes are much shorter.
            let key = |choices: &mut Unstructured<'_>| text(choices).chars().take(100).collect();
            let entries = (0..choices.int_in_range(0..=2).unwrap_or(0))
                .map(|_| (key(choices), value(choices, depth - 1)));
            Value::Object(entries.collect())
        }
    }
}

/// Makes the change in the value tree, as the editor does in the text.
fn change(value: &mut Yaml, path: &[Step], change: &Change) {
    let Some((step, rest)) = path.split_first() else {
        let there = match value.bare() {
            Yaml::Sequence(items) => items.clone(),
            Yaml::Meant(Value::Array(items)) => items.iter().cloned().map(Yaml::Meant).collect(),
            _ => Vec::new(),
        };
        // The edit replaces a null value together with the value's anchor and tag.
        if value.is_null() && *change != Change::Remove {
            *value = Yaml::Meant(Value::Null);
        }
        let new = |values: &[Value]| values.iter().cloned().map(Yaml::Meant).collect::<Vec<_>>();
        match change {
            Change::Set(new) => *value = Yaml::Meant(new.clone()),
            Change::Remove => {}
            Change::Prepend(values) => {
                *value.bare_mut() = Yaml::Sequence([new(values), there].concat())
            }
            Change::Append(values) => {
                *value.bare_mut() = Yaml::Sequence([there, new(values)].concat())
            }
        }
        return;
    };
    let remove = *change == Change::Remove && rest.is_empty();
    open(value);
    if value.is_null() && matches!(step, Step::Key(_)) && *change != Change::Remove {
        *value = Yaml::Mapping(Vec::new());
    }
    match (step, value.bare_mut()) {
        (Step::Key(key), Yaml::Mapping(entries)) => {
            let at = entries
                .iter()
                .position(|(name, _)| name.text() == Some(key));
            match at {
                Some(at) if remove => drop(entries.remove(at)),
                Some(at) => self::change(&mut entries[at].1, rest, change),
                None if *change == Change::Remove => {}
                None => {
                    let mut new = Yaml::Meant(Value::Null);
                    self::change(&mut new, rest, change);
                    entries.push((Yaml::Meant(key.as_str().into()), new));
                }
            }
        }
        (Step::Index(_) | Step::Name(_), Yaml::Sequence(items)) => {
            let named = |item: &Yaml, wanted: &str| match item.bare() {
                Yaml::Mapping(entries) => entries
                    .iter()
                    .any(|(key, value)| key.text() == Some("name") && value.text() == Some(wanted)),
                Yaml::Meant(value) => value["name"] == wanted,
                _ => false,
            };
            let at = match step {
                Step::Name(name) => items.iter().position(|item| named(item, name)),
                Step::Index(index) => Some(*index),
                Step::Key(_) => None,
            };
            match at.filter(|at| *at < items.len()) {
                Some(at) if remove => drop(items.remove(at)),
                Some(at) => self::change(&mut items[at], rest, change),
                None => {}
            }
        }
        _ => {}
    }
}

/// Turns an intended list or mapping of an earlier edit into a sequence or mapping that further
/// edits can change.
fn open(value: &mut Yaml) {
    let Yaml::Meant(meant) = value else { return };
    *value = match std::mem::take(meant) {
        Value::Array(items) => Yaml::Sequence(items.into_iter().map(Yaml::Meant).collect()),
        Value::Object(map) => Yaml::Mapping(
            map.into_iter()
                .map(|(key, value)| (Yaml::Meant(key.into()), Yaml::Meant(value)))
                .collect(),
        ),
        other => Yaml::Meant(other),
    };
}
