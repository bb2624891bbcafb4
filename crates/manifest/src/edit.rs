//! A single change to a manifest, and the code that writes the change into the text.

use super::write::{Style, write_scalar};
use super::{Problem, plain};
use berth_cluster::yaml::{Data, YamlNode, parse_documents};
use serde_json::{Value, json};
use std::fmt;
use std::ops::Range;

/// Prefix of the comments that berth writes and eject removes.
pub(super) const COMMENT_PREFIX: &str = "# berth: ";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Edit {
    /// Path from the root of the document.
    pub path: Path,
    pub change: Change,
    /// The reason for the change: a sentence without a full stop.
    pub reason: String,
    /// True if a value that is removed leaves a comment with the reason in the file.
    pub comment: bool,
}

impl fmt::Display for Edit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.reason)
    }
}

/// The change that an edit makes to the value at its path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Sets the value, and creates missing parents.
    Set(Value),
    /// Removes the value with its key or list item.
    Remove,
    /// Inserts the values at the beginning of a list.
    Prepend(Vec<Value>),
    /// Appends the values to a list, and creates a missing list.
    Append(Vec<Value>),
}

/// The path to a value in a YAML document, step by step.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Path(pub Vec<Step>);

/// A step of a [`Path`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// A key of a mapping.
    Key(String),
    /// The `name` of a list item.
    Name(String),
    /// The index of a list item.
    Index(usize),
}

impl Path {
    /// Extends the path by a key of a mapping.
    pub fn key(&self, key: &str) -> Self {
        self.step(Step::Key(key.to_owned()))
    }

    /// Extends the path by the name of a list item.
    pub fn name(&self, name: &str) -> Self {
        self.step(Step::Name(name.to_owned()))
    }

    /// Extends the path by the index of a list item.
    pub fn index(&self, index: usize) -> Self {
        self.step(Step::Index(index))
    }

    fn step(&self, step: Step) -> Self {
        Self(self.0.iter().cloned().chain([step]).collect())
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, step) in self.0.iter().enumerate() {
            match step {
                Step::Key(key) if at == 0 => write!(f, "{key}")?,
                Step::Key(key) => write!(f, ".{key}")?,
                Step::Name(name) => write!(f, "[{name}]")?,
                Step::Index(index) => write!(f, "[{index}]")?,
            }
        }
        Ok(())
    }
}

/// Applies the edits to one document of a file, in order.
///
/// # Errors
/// A value has another type than the edit expects or is shared by an anchor, or the document is
/// written in a way that cannot be edited.
pub fn apply_edits(text: &str, document: usize, edits: &[Edit]) -> Result<String, Problem> {
    let newline = if text.contains("\r\n") { "\r\n" } else { "\n" };
    let mut text = text.to_owned();
    let mut documents = parse_documents(&text)?;
    let Some(style) = documents.get(document).map(Style::of) else {
        return Ok(text);
    };
    plain::check_plain(&text, &documents[document])?;
    let values = |documents: &[YamlNode]| documents.iter().map(YamlNode::value).collect::<Vec<_>>();
    for edit in edits {
        let editor = Editor {
            text: &text,
            style,
            edit,
        };
        let (place, new) = editor.build_splice(&documents[document])?;
        let line = text[..place.start].matches('\n').count() + 1;
        text.replace_range(place, &new.replace('\n', newline));

        // YAML has more forms than this editor knows, so the result is parsed and compared with the
        // edited value.
        let mut wanted = values(&documents);
        change_value(&mut wanted[document], &edit.path.0, &edit.change);
        documents = parse_documents(&text)
            .ok()
            .filter(|is| values(is) == wanted)
            .ok_or_else(|| {
                let message = format!(
                    "{} is written in a way that cannot be edited: write the value in plain YAML",
                    edit.path
                );
                Problem::new(line, message)
            })?;
    }
    Ok(text)
}

/// Makes the same change to a parsed value, without the text.
fn change_value(value: &mut Value, path: &[Step], change: &Change) {
    let Some((step, rest)) = path.split_first() else {
        match change {
            Change::Set(new) => *value = new.clone(),
            Change::Remove => {}
            Change::Prepend(new) => {
                *value = new
                    .iter()
                    .chain(value.as_array().into_iter().flatten())
                    .cloned()
                    .collect();
            }
            Change::Append(new) => {
                *value = value
                    .as_array()
                    .into_iter()
                    .flatten()
                    .chain(new)
                    .cloned()
                    .collect();
            }
        }
        return;
    };
    let remove = *change == Change::Remove && rest.is_empty();
    if let Step::Key(key) = step {
        if value.is_null() {
            *value = json!({});
        }
        match value.as_object_mut() {
            Some(map) if remove => drop(map.remove(key)),
            Some(map) => change_value(map.entry(key.clone()).or_insert(Value::Null), rest, change),
            None => {}
        }
        return;
    }
    let Some(items) = value.as_array_mut() else {
        return;
    };
    let at = match step {
        Step::Index(index) => Some(*index),
        Step::Name(name) => items.iter().position(|item| item["name"] == name.as_str()),
        Step::Key(_) => None,
    };
    match at.filter(|at| *at < items.len()) {
        Some(at) if remove => drop(items.remove(at)),
        Some(at) => change_value(&mut items[at], rest, change),
        None => {}
    }
}

/// Translates one edit into a range of the text's bytes and the text that replaces them.
struct Editor<'a> {
    text: &'a str,
    style: Style,
    edit: &'a Edit,
}

type Splice = (Range<usize>, String);

impl Editor<'_> {
    fn build_splice(&self, root: &YamlNode) -> Result<Splice, Problem> {
        let (found, missing) = self.follow_path(root)?;
        let node = found.last().copied().unwrap_or(root);
        let there = missing.is_empty();
        match &self.edit.change {
            Change::Set(value) => self.set_value(&found, missing, value),
            Change::Remove if there => self.remove_value(&found),
            Change::Remove => Ok((0..0, String::new())),
            Change::Prepend(_) | Change::Append(_)
                if there && !node.is_null() && !matches!(node.data, Data::Sequence(_)) =>
            {
                Err(Problem::new(
                    node.line,
                    format!("{} must be a list: fix the manifest", self.edit.path),
                ))
            }
            Change::Prepend(values) | Change::Append(values)
                if !there || node.is_null() || node.items().is_empty() =>
            {
                self.set_value(&found, missing, &Value::Array(values.clone()))
            }
            Change::Prepend(values) => Ok(self.insert_items(node, 0, values)),
            Change::Append(values) => Ok(self.insert_items(node, node.items().len(), values)),
        }
    }

    /// Follows the edit's path from the root of the document. Returns the nodes on the path that
    /// exist, and the steps that lead further.
    fn follow_path<'n>(&self, root: &'n YamlNode) -> Result<(Vec<&'n YamlNode>, &[Step]), Problem> {
        let mut found = vec![root];
        let mut node = root;
        for (at, step) in self.edit.path.0.iter().enumerate() {
            self.check_type(node, step)?;
            let next = match step {
                Step::Key(key) => node.find_entry(key).map(|(_, value)| value),
                Step::Name(name) => node.find_named(name).map(|(_, item)| item),
                Step::Index(index) => node.items().get(*index),
            };
            let Some(next) = next else {
                return Ok((found, &self.edit.path.0[at..]));
            };
            found.push(next);
            node = next;
        }
        if node.shared {
            return Err(self.shared_value_error(node));
        }
        Ok((found, &[]))
    }

    /// Checks that a node has the type that a step needs: a mapping for a key, a list for a name or
    /// an index.
    fn check_type(&self, node: &YamlNode, step: &Step) -> Result<(), Problem> {
        if node.shared {
            return Err(self.shared_value_error(node));
        }
        let fits = match (&node.data, step) {
            (Data::Mapping(_), Step::Key(_))
            | (Data::Sequence(_), Step::Name(_) | Step::Index(_)) => true,
            _ => node.is_null(),
        };
        if fits {
            return Ok(());
        }
        let kind = if matches!(step, Step::Key(_)) {
            "mapping"
        } else {
            "list"
        };
        Err(Problem::new(
            node.line,
            format!("{} must be a {kind}: fix the manifest", self.edit.path),
        ))
    }

    fn shared_value_error(&self, node: &YamlNode) -> Problem {
        let path = &self.edit.path;
        Problem::new(
            node.line,
            format!(
                "{path} cannot be changed, since an anchor (& or *) shares the value: write the value out in each place"
            ),
        )
    }

    fn set_value(
        &self,
        found: &[&YamlNode],
        missing: &[Step],
        value: &Value,
    ) -> Result<Splice, Problem> {
        // The missing parents are built around the value, the innermost first.
        let mut value = value.clone();
        for step in missing.iter().skip(1).rev() {
            value = match step {
                Step::Key(key) => json!({ key.as_str(): value }),
                Step::Name(_) | Step::Index(_) => json!([value]),
            };
        }
        let Some(node) = found.last() else {
            return Ok((0..0, String::new()));
        };
        match missing.first() {
            None => self.replace_value(found, &value),
            Some(Step::Key(key)) if node.is_null() || node.entries().is_empty() => {
                self.replace_value(found, &json!({ key.as_str(): value }))
            }
            Some(Step::Key(key)) => Ok(self.add_entry(node, key, &value)),
            Some(Step::Name(_) | Step::Index(_)) => Err(Problem::new(
                node.line,
                format!("{} does not exist: fix the manifest", self.edit.path),
            )),
        }
    }

    /// Replaces a value that exists: the last node of `found`.
    fn replace_value(&self, found: &[&YamlNode], value: &Value) -> Result<Splice, Problem> {
        let [.., parent, node] = found else {
            return Err(Problem::new(
                1,
                "the document is empty: check that this is the right file",
            ));
        };
        if parent.flow {
            return Ok((
                node.span.clone(),
                format!("{}{}", gap_before(node), self.style.write_flow(value)),
            ));
        }
        let Some((key, _)) = parent
            .entries()
            .iter()
            .find(|(_, value)| std::ptr::eq(value, *node))
        else {
            return match value {
                Value::Object(_) | Value::Array(_) => {
                    Ok((node.span.clone(), self.style.write_flow(value)))
                }
                value => Ok((node.span.clone(), write_scalar(value))),
            };
        };
        // The key stays as written, with everything before it.
        let written = self.style.write_after_key(key.column, value);
        Ok((
            key.span.end..node.span.end,
            written.trim_end_matches([' ', '\n']).to_owned(),
        ))
    }

    fn add_entry(&self, map: &YamlNode, key: &str, value: &Value) -> Splice {
        let Some((first, _)) = map.entries().first() else {
            return (0..0, String::new());
        };
        if map.flow {
            let last = map.entries().last().map(|(_, value)| value);
            let (end, gap) =
                last.map_or((map.span.end, ""), |last| (last.span.end, gap_before(last)));
            return (
                end..end,
                format!("{gap}, {}", self.style.write_flow_entry(key, value)),
            );
        }
        let keys = map
            .entries()
            .iter()
            .map(|(key, _)| key.text().unwrap_or_default());
        let written = self.style.write_entry(first.column, key, value);
        match self.style.find_key_index(keys, key) {
            0 => {
                let text = format!("{}{:2$}", written.trim_start(), "", first.column);
                (first.span.start..first.span.start, text)
            }
            place => {
                let before = &map.entries()[place - 1].1;
                self.insert_lines(self.find_end(before, first.column), written)
            }
        }
    }

    /// Inserts items into a list. The first of them gets this index.
    fn insert_items(&self, list: &YamlNode, index: usize, values: &[Value]) -> Splice {
        let items = list.items();
        if list.flow {
            let values: Vec<_> = values
                .iter()
                .map(|value| self.style.write_flow(value))
                .collect();
            return match items.get(index) {
                Some(next) => (
                    next.span.start..next.span.start,
                    format!("{}, ", values.join(", ")),
                ),
                None => {
                    let end = items.last().map_or(list.span.end, |last| last.span.end);
                    (end..end, format!(", {}", values.join(", ")))
                }
            };
        }
        let dash = items.first().map_or(0, |first| self.dash_column(first));
        let written = self.style.write_items(dash, values);
        match index.checked_sub(1).and_then(|before| items.get(before)) {
            Some(before) => self.insert_lines(self.find_end(before, dash), written),
            None => self.insert_lines(self.line_start(list.span.start), written),
        }
    }

    fn remove_value(&self, found: &[&YamlNode]) -> Result<Splice, Problem> {
        let [.., parent, node] = found else {
            return Ok((0..0, String::new()));
        };
        let last = parent.entries().len() + parent.items().len() == 1;
        if last {
            let empty = if parent.entries().is_empty() {
                json!([])
            } else {
                json!({})
            };
            return self.replace_value(&found[..found.len() - 1], &empty);
        }
        if parent.flow {
            let entries = parent
                .entries()
                .iter()
                .map(|(key, value)| key.span.start..value.span.end);
            let all: Vec<_> = entries
                .chain(parent.items().iter().map(|item| item.span.clone()))
                .collect();
            let at = all
                .iter()
                .position(|span| span.end == node.span.end)
                .unwrap_or_default();
            return Ok(match all.get(at + 1) {
                Some(next) => (all[at].start..next.start, String::new()),
                None => (all[at - 1].end..all[at].end, String::new()),
            });
        }
        let end = self.line_end(node.span.end);
        let Some(at) = parent
            .entries()
            .iter()
            .position(|(_, value)| std::ptr::eq(value, *node))
        else {
            return Ok((self.line_start(node.span.start)..end, String::new()));
        };
        let key = &parent.entries()[at].0;
        let start = self.line_start(key.span.start);
        match parent.entries().get(at + 1) {
            // The key is on the line of a dash. The dash stays, and the next key moves to the place
            // of the removed key.
            Some((next, _)) if !self.text[start..key.span.start].trim().is_empty() => {
                Ok((key.span.start..next.span.start, String::new()))
            }
            _ => Ok(self.replace_lines(start..end, self.write_comment(key.column))),
        }
    }

    /// End of the lines of a value, where `column` is the column of the value's key or dash.
    /// Comments below a value belong to the value if they are indented deeper. Below a list that is
    /// no deeper than its key, comments that look like list items also belong to the list, and so
    /// do all lines between the list and such a comment. Other comments belong to the next key or
    /// item.
    fn find_end(&self, value: &YamlNode, column: usize) -> usize {
        let list = !value.flow && !value.items().is_empty();
        let mut end = self.line_end(value.span.end);
        let mut at = end;
        while at < self.text.len() {
            let next = self.line_end(at);
            let line = self.text[at..next].trim_end();
            let said = line.trim_start_matches(' ');
            let indent = line.len() - said.len();
            match said.strip_prefix('#') {
                Some(said)
                    if indent > column
                        || indent == column && list && is_commented_list_item(said) =>
                {
                    end = next;
                }
                Some(_) if indent == column && list => {}
                None if said.is_empty() => {}
                _ => break,
            }
            at = next;
        }
        end
    }

    /// Returns the comment that takes the place of a removed key. Empty if the edit leaves no
    /// comment.
    fn write_comment(&self, indent: usize) -> String {
        if !self.edit.comment {
            return String::new();
        }
        let last = self.edit.path.0.iter().rev().find_map(|step| match step {
            Step::Key(key) => Some(key.as_str()),
            _ => None,
        });
        format!(
            "{:indent$}{COMMENT_PREFIX}{}: {}\n",
            "",
            last.unwrap_or_default(),
            self.edit.reason
        )
    }

    /// Column of the dash before an item.
    fn dash_column(&self, item: &YamlNode) -> usize {
        let line = &self.text[self.line_start(item.span.start)..item.span.start];
        line.find('-')
            .unwrap_or_else(|| item.column.saturating_sub(2))
    }

    fn insert_lines(&self, at: usize, written: String) -> Splice {
        self.replace_lines(at..at, written)
    }

    /// Makes a splice that replaces whole lines. If the file does not end with a newline, one is
    /// added first.
    fn replace_lines(&self, place: Range<usize>, written: String) -> Splice {
        let open = place.start > 0 && !self.text[..place.start].ends_with('\n');
        (
            place,
            if open {
                format!("\n{}", written.trim_end_matches('\n'))
            } else {
                written
            },
        )
    }

    fn line_start(&self, at: usize) -> usize {
        self.text[..at].rfind('\n').map_or(0, |newline| newline + 1)
    }

    /// Start of the next line.
    fn line_end(&self, at: usize) -> usize {
        self.text[at..]
            .find('\n')
            .map_or(self.text.len(), |newline| at + newline + 1)
    }
}

/// True if a comment below a list looks like lines of the list that were commented out: an item, a
/// further line of an item, or a flag.
fn is_commented_list_item(comment: &str) -> bool {
    comment.trim_start().starts_with('-') || comment.starts_with("  ")
}

/// The space after a colon in a flow mapping, since libyaml would otherwise read the colon as part
/// of the key.
fn gap_before(value: &YamlNode) -> &'static str {
    if value.span.is_empty() { " " } else { "" }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_path(steps: &str) -> Path {
        steps
            .split('.')
            .fold(Path::default(), |path, step| match step.strip_prefix('#') {
                Some(name) => path.name(name),
                None => step
                    .parse()
                    .map_or_else(|_| path.key(step), |index| path.index(index)),
            })
    }

    fn edit_text(text: &str, steps: &str, change: Change) -> Result<String, String> {
        let edit = Edit {
            path: parse_path(steps),
            change,
            reason: "so it is".into(),
            comment: true,
        };
        apply_edits(text, 0, &[edit]).map_err(|problem| problem.to_string())
    }

    fn set_value(text: &str, steps: &str, value: Value) -> String {
        edit_text(text, steps, Change::Set(value)).unwrap()
    }

    #[test]
    fn values_are_set_in_place_and_keep_their_comments() {
        for (text, steps, value, wanted) in [
            ("a: 1 # one\nb: 2", "a", json!("x"), "a: x # one\nb: 2"),
            (
                "a:\n# of b\n- b: {c: 1} # d\n",
                "a.0.b.c",
                json!([2]),
                "a:\n# of b\n- b: {c: [2]} # d\n",
            ),
            (
                "a:\n  b: |\n    x\n\n  c: 1\n",
                "a.b",
                json!("z"),
                "a:\n  b: z\n\n  c: 1\n",
            ),
            (
                "a:\n- x # X\n- y\n",
                "a.1",
                json!("1"),
                "a:\n- x # X\n- \"1\"\n",
            ),
            (
                "a: { b: 1, c: [ # d\n 2 ] }\n",
                "a.c.0",
                json!(3),
                "a: { b: 1, c: [ # d\n 3 ] }\n",
            ),
            (
                "a: { b: 1 }\nc: &x { d: 1 }\n",
                "a.e",
                json!(2),
                "a: { b: 1, e: 2 }\nc: &x { d: 1 }\n",
            ),
            ("a: { b: }\n", "a.c", json!(1), "a: { b: , c: 1 }\n"),
            ("a: { b: }\n", "a.b", json!(1), "a: { b: 1 }\n"),
            ("a: {}\n", "a.b.c", json!(1), "a:\n  b:\n    c: 1\n"),
            (
                "\"a\" : 1\n'b': 2",
                "b",
                json!([1]),
                "\"a\" : 1\n'b':\n  - 1",
            ),
            ("a:\nb: 1\n", "a.c", json!([1]), "a:\n  c:\n    - 1\nb: 1\n"),
        ] {
            assert_eq!(set_value(text, steps, value), wanted);
        }
    }

    #[test]
    fn new_keys_go_where_people_or_programs_put_them() {
        // People put the name first and the volumes last; programs sort by the alphabet.
        let people = "- name: a\n  image: b\n  volumeMounts: []\n";
        for (text, steps, wanted) in [
            (
                people,
                "0.env",
                "- name: a\n  image: b\n  env: 1\n  volumeMounts: []\n",
            ),
            (
                "- b: 1\n  # of d\n  d: 2\n",
                "0.c",
                "- b: 1\n  c: 1\n  # of d\n  d: 2\n",
            ),
            ("- b: 1\n", "0.a", "- a: 1\n  b: 1\n"),
            ("a: 1", "b", "a: 1\nb: 1"),
            ("{\"a\": 1}", "b", "{\"a\": 1, \"b\": 1}"),
        ] {
            assert_eq!(set_value(text, steps, json!(1)), wanted);
        }
        assert_eq!(
            set_value("{\"a\": 1}", "b", json!({"c": "d"})),
            "{\"a\": 1, \"b\": {\"c\": \"d\"}}"
        );
    }

    #[test]
    fn lists_grow_at_both_ends_in_their_style() {
        let prepended = |text| {
            edit_text(
                text,
                "a",
                Change::Prepend(vec![json!("x"), json!({"z": 1})]),
            )
            .unwrap()
        };
        let appended = |text| edit_text(text, "a", Change::Append(vec![json!("x")])).unwrap();
        assert_eq!(prepended("a:\n- b\n"), "a:\n- x\n- z: 1\n- b\n");
        assert_eq!(prepended("a: [b]\n"), "a: [x, {z: 1}, b]\n");
        assert_eq!(
            appended("a:\n    - b # B\n    # end\nc: 1\n"),
            "a:\n    - b # B\n    - x\n    # end\nc: 1\n"
        );
        assert_eq!(appended("a:\n  - - b\n"), "a:\n  - - b\n  - x\n");
        assert_eq!(appended("a: [b,\n  c] # d\n"), "a: [b,\n  c, x] # d\n");
        assert_eq!(appended("a:\nb: 1\n"), "a:\n  - x\nb: 1\n");
        assert_eq!(
            (appended("a0: 1\n"), appended("a: []\n")),
            ("a:\n  - x\na0: 1\n".into(), "a:\n  - x\n".into())
        );
    }

    #[test]
    fn comments_at_the_end_of_a_value_stay_with_it() {
        for (text, steps, wanted) in [
            (
                "a:\n  - b\n  # - c\n\n  # - d\ne: 1\n",
                "b",
                "a:\n  - b\n  # - c\n\n  # - d\nb: 1\ne: 1\n",
            ),
            // A list at the same indent as its key, as Kubernetes' programs write lists.
            (
                "a:\n- b\n# - c\n# of e\ne: 1\n",
                "b",
                "a:\n- b\n# - c\nb: 1\n# of e\ne: 1\n",
            ),
            (
                "a:\n- b\n# of d:\n# - d\n\n# --v=6\n# of e\ne: 1\n",
                "b",
                "a:\n- b\n# of d:\n# - d\n\n# --v=6\nb: 1\n# of e\ne: 1\n",
            ),
            (
                "a:\n- b: 1\n# - b: 2\n#   c: 3\n# of e\ne: 1\n",
                "b",
                "a:\n- b: 1\n# - b: 2\n#   c: 3\nb: 1\n# of e\ne: 1\n",
            ),
            // `# of e` belongs to the next key, although it contains a dash.
            (
                "a:\n- b\n# of e: - x\ne: 1\n",
                "b",
                "a:\n- b\nb: 1\n# of e: - x\ne: 1\n",
            ),
            (
                "a: |\n  x\n # - y\n# - z\nc: 1\n",
                "b",
                "a: |\n  x\n # - y\nb: 1\n# - z\nc: 1\n",
            ),
            ("a:\n  - b\n  # - c", "d", "a:\n  - b\n  # - c\nd: 1"),
            ("a: [b]\n# - c\nc: 1\n", "b", "a: [b]\nb: 1\n# - c\nc: 1\n"),
            (
                "a: 1\n# of e\n  # too\ne: 1\n",
                "b",
                "a: 1\nb: 1\n# of e\n  # too\ne: 1\n",
            ),
            (
                "a: 1\ne: 1\n  # of e\n",
                "b",
                "a: 1\nb: 1\ne: 1\n  # of e\n",
            ),
            // The comments below the list are outside of `x`, so the new key goes before them.
            (
                "x:\n  a:\n  - b\n# - c\ny: 1\n",
                "x.b",
                "x:\n  a:\n  - b\n  b: 1\n# - c\ny: 1\n",
            ),
            (
                "x:\n  a:\n  - b\n# of y\n  # - c\ny: 1\n",
                "x.b",
                "x:\n  a:\n  - b\n  b: 1\n# of y\n  # - c\ny: 1\n",
            ),
        ] {
            assert_eq!(set_value(text, steps, json!(1)), wanted);
        }
        let nested = "a:\n- b:\n  - c\n  # - d\n# end\n";
        let appended = edit_text(nested, "a", Change::Append(vec![json!("x")])).unwrap();
        assert_eq!(appended, "a:\n- b:\n  - c\n  # - d\n- x\n# end\n");
    }

    #[test]
    fn a_removed_value_leaves_its_reason_as_a_comment() {
        for (text, steps, wanted) in [
            (
                "a: 1\n  # of b\nb:\n  - c # d\ne: 1\n",
                "b",
                "a: 1\n  # of b\n# berth: b: so it is\ne: 1\n",
            ),
            ("- a: 1\n  b: 2\n", "0.a", "- b: 2\n"),
            ("a: {b: 1, c: 2}\n", "a.b", "a: {c: 2}\n"),
            ("a: [b, c]\n", "a.1", "a: [b]\n"),
            (
                "a:\n  - name: b\n  - name: c\n    d: 1\n",
                "a.#b",
                "a:\n  - name: c\n    d: 1\n",
            ),
            ("a:\n  b: 1\n", "a.b", "a: {}\n"),
            ("a: 1\n", "b", "a: 1\n"),
            ("a:\n- b\n", "a.1", "a:\n- b\n"),
            ("a: 1\nb: 2\n", "a", "# berth: a: so it is\nb: 2\n"),
        ] {
            assert_eq!(edit_text(text, steps, Change::Remove).unwrap(), wanted);
        }
    }

    #[test]
    fn one_document_is_edited_and_its_line_ends_are_kept() {
        let edit = Edit {
            path: parse_path("a"),
            change: Change::Append(vec![json!("x")]),
            reason: String::new(),
            comment: false,
        };
        let text = "b: 1\r\n---\r\na:\r\n  - y\r\n---\r\na: []\r\n";
        let wanted = "b: 1\r\n---\r\na:\r\n  - y\r\n  - x\r\n---\r\na: []\r\n";
        assert_eq!(apply_edits(text, 1, &[edit]).unwrap(), wanted);
    }

    #[test]
    fn an_edit_is_displayed_with_path_and_reason() {
        let edit = Edit {
            path: parse_path("a.#b.0.c"),
            change: Change::Remove,
            reason: "so it is".into(),
            comment: false,
        };
        assert_eq!(edit.to_string(), "a[b][0].c: so it is");
    }

    #[test]
    fn an_impossible_edit_is_refused() {
        let refused = |text, steps| edit_text(text, steps, Change::Set(json!(1))).unwrap_err();
        for (text, steps, why) in [
            (
                "x: &a {b: 1}\na: *a\n",
                "a.b",
                "2: a.b cannot be changed, since an anchor",
            ),
            ("x: &a {b: 1}\na: *a\n", "x.b", "1: x.b cannot be changed"),
            ("a:\n  <<: {b: 1}\n", "a.c", "2: a merge key"),
            ("a: 1\n", "a.b", "1: a.b must be a mapping"),
            ("a:\n- name: x\n", "a.#y.b", "2: a[y].b does not exist"),
            ("b: 1\n? a\n: 2\n", "a", "2: a key that is not"),
        ] {
            assert!(refused(text, steps).starts_with(why), "{text}");
        }
        // Kubernetes' YAML library reads the comma as part of the tag.
        let tagged = edit_text("a: [1, !-c ]\n", "a", Change::Append(vec![json!(2)]));
        assert!(tagged.is_err_and(|refused| refused.starts_with("1: a tag (!)")));
        let below = edit_text("-\n  a: 1\n-\n  b: 1\n", "1", Change::Remove).unwrap_err();
        assert!(
            below.starts_with("4: [1] is written in a way that cannot be edited"),
            "{below}"
        );
        let beside = edit_text("a:\n- b\n", "a.1", Change::Append(vec![json!(1)])).unwrap_err();
        assert_eq!(beside, "2: a[1] does not exist: fix the manifest");
        assert!(edit_text("a: x\n", "a", Change::Append(vec![json!(1)])).is_err());
    }
}
