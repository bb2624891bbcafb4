//! Parses a YAML file into a tree of values. Each value has its place in the text, so that an edit
//! of one value can leave the rest of the text unchanged.
//!
//! [`saphyr_parser`] parses the file. Plain scalars have the types that Kubernetes gives them (YAML
//! 1.1's `yes` is true).

use saphyr_parser::{Event, Parser, ScalarStyle, Span};
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::ops::Range;

/// Limit of nested lists and mappings in a YAML file. A pod has less than twenty levels.
const MAX_DEPTH: usize = 64;

/// Limit of the number of values in expanded aliases. Without a limit, a few lines of aliases can
/// expand to billions of values.
const MAX_ALIAS_VALUES: usize = 10_000;

/// An error in a YAML file. The message contains the fix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{line}: {message}")]
pub struct Problem {
    /// Number of the line in the file, from 1.
    pub line: usize,
    pub message: String,
}

impl Problem {
    /// Makes a problem that is reported for a line.
    pub fn new(line: usize, message: impl Into<String>) -> Self {
        Self {
            line,
            message: message.into(),
        }
    }

    /// Returns the cause and the fix from the message; see [`split_cause_and_fix`].
    pub fn cause_and_fix(&self) -> (&str, &str) {
        split_cause_and_fix(&self.message)
    }
}

/// Splits a message into cause and fix. Each message of berth has both, and its last colon
/// separates them.
pub fn split_cause_and_fix(message: &str) -> (&str, &str) {
    message.rsplit_once(": ").unwrap_or((message, ""))
}

/// A value in a YAML file.
#[derive(Debug, Clone)]
pub struct YamlNode {
    pub data: Data,
    /// The place of the value in the text, in bytes. Comments and line ends around the value do not
    /// belong to it.
    pub span: Range<usize>,
    /// The line in which the value begins, from 1.
    pub line: usize,
    /// The column in which the value begins, from 0, in characters.
    pub column: usize,
    /// True if the value is written with brackets (`[…]` or `{…}`), or is inside of such a value.
    pub flow: bool,
    /// True if the value has an anchor or is an alias. A change of such a value would also change a
    /// value elsewhere in the file.
    pub shared: bool,
    /// True if the value has a YAML tag (`!…`). The tag itself is not kept.
    pub tagged: bool,
}

#[derive(Debug, Clone)]
pub enum Data {
    /// A single value: a text, a number, a truth value or null.
    Scalar {
        /// The text without quotes and escapes.
        text: String,
        /// True if the scalar is not quoted, and so may be a number, a truth value or null.
        plain: bool,
    },
    Sequence(Vec<YamlNode>),
    /// Keys with their values, in the order of the file.
    Mapping(Vec<(YamlNode, YamlNode)>),
    /// An alias to the value inside of which the alias is.
    Alias,
}

impl YamlNode {
    /// Returns the text of a scalar. `None` if the value is null or no scalar.
    pub fn text(&self) -> Option<&str> {
        match &self.data {
            Data::Scalar { text, .. } if !self.is_null() => Some(text),
            _ => None,
        }
    }

    /// Returns the items of a list. Returns nothing if this value is not a list.
    pub fn items(&self) -> &[Self] {
        match &self.data {
            Data::Sequence(items) => items,
            _ => &[],
        }
    }

    /// Returns the keys and values of a mapping. Returns nothing if this value is not a mapping.
    pub fn entries(&self) -> &[(Self, Self)] {
        match &self.data {
            Data::Mapping(entries) => entries,
            _ => &[],
        }
    }

    /// Returns the value of a key. `None` if the key is missing or its value is null.
    pub fn get(&self, key: &str) -> Option<&Self> {
        self.find_entry(key)
            .map(|(_, value)| value)
            .filter(|value| !value.is_null())
    }

    /// Returns the items of the list that belongs to a key.
    pub fn list(&self, key: &str) -> &[Self] {
        self.get(key).map(Self::items).unwrap_or_default()
    }

    /// Returns the text that belongs to a key. `None` if there is none.
    pub fn get_text(&self, key: &str) -> Option<&str> {
        self.get(key)?.text()
    }

    /// True if the key's value is the truth value true.
    pub fn is_true(&self, key: &str) -> bool {
        self.get(key).is_some_and(|value| value.value() == true)
    }

    /// Follows a path of keys through nested mappings, as repeated calls of [`YamlNode::get`] do.
    pub fn find_path(&self, keys: &[&str]) -> Option<&Self> {
        keys.iter().try_fold(self, |node, key| node.get(key))
    }

    /// Returns a key and its value, which may be null.
    pub fn find_entry(&self, key: &str) -> Option<&(Self, Self)> {
        self.entries()
            .iter()
            .find(|(name, _)| matches!(&name.data, Data::Scalar { text, .. } if text == key))
    }

    /// Returns the item with this `name` in a list of mappings, and its index.
    pub fn find_named(&self, name: &str) -> Option<(usize, &Self)> {
        self.items()
            .iter()
            .enumerate()
            .find(|(_, item)| item.get("name").and_then(Self::text) == Some(name))
    }

    /// True if the value is null, in any of YAML's notations.
    pub fn is_null(&self) -> bool {
        matches!(&self.data, Data::Scalar { text, plain: true } if resolve_scalar(text).is_null())
    }

    /// Returns a whole number that is not negative. Go parses `08` and `1e3` as floats, and its
    /// JSON then shows them without a fraction.
    pub fn number(&self) -> Option<u64> {
        let value = self.value();
        value
            .as_u64()
            .or_else(|| value.as_f64()?.to_string().parse().ok())
    }

    /// Counts this value and all values inside of it.
    fn count_values(&self) -> usize {
        let inner = match &self.data {
            Data::Sequence(items) => items.iter().map(Self::count_values).sum(),
            Data::Mapping(entries) => entries.iter().map(|(_, value)| value.count_values()).sum(),
            Data::Scalar { .. } | Data::Alias => 0,
        };
        1 + inner
    }

    /// Returns the value as JSON, without its place in the file.
    pub fn value(&self) -> Value {
        match &self.data {
            Data::Scalar { text, plain: true } => resolve_scalar(text),
            Data::Scalar { text, plain: false } => Value::String(text.clone()),
            Data::Sequence(items) => Value::Array(items.iter().map(Self::value).collect()),
            Data::Mapping(entries) => {
                let entries = entries.iter().filter_map(|(key, value)| match &key.data {
                    Data::Scalar { text, .. } => Some((text.clone(), value.value())),
                    _ => None,
                });
                Value::Object(entries.collect::<Map<_, _>>())
            }
            Data::Alias => Value::Null,
        }
    }
}

/// Returns the value of a scalar without quotes: text, number, truth value or null.
pub fn resolve_scalar(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Value::Null,
        "true" | "True" | "TRUE" | "yes" | "Yes" | "YES" | "on" | "On" | "ON" | "y" | "Y" => {
            return true.into();
        }
        "false" | "False" | "FALSE" | "no" | "No" | "NO" | "off" | "Off" | "OFF" | "n" | "N" => {
            return false.into();
        }
        _ => {}
    }
    if let Some(number) = parse_integer(text) {
        return number.into();
    }
    // Unlike YAML, Rust parses "inf" and "nan" as numbers, so the text must begin like a number.
    let digits = text.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '-' | '+' | '.'));
    match text.parse::<f64>() {
        Ok(number) if digits && number.is_finite() => number.into(),
        _ => Value::String(text.to_owned()),
    }
}

/// Parses a whole number as Go does: underscores are ignored, and a prefix such as `0x` gives the
/// base. The prefix of an octal number may be `0` alone.
fn parse_integer(text: &str) -> Option<i64> {
    if text.starts_with('_') {
        return None;
    }
    let text = text.replace('_', "");
    let digits = text.strip_prefix(['-', '+']).unwrap_or(&text);
    let (radix, prefix) = match digits.as_bytes() {
        [b'0', b'x' | b'X', ..] => (16, 2),
        [b'0', b'o' | b'O', ..] => (8, 2),
        [b'0', b'b' | b'B', ..] => (2, 2),
        [b'0', _, ..] => (8, 1),
        _ => (10, 0),
    };
    let (sign, digits) = (&text[..text.len() - digits.len()], &digits[prefix..]);
    let signed = digits.starts_with(['-', '+']);
    i64::from_str_radix(&format!("{sign}{digits}"), radix)
        .ok()
        .filter(|_| !signed)
}

/// Finds the first character that some YAML parsers treat as a line end or ignore, and others do
/// not. Returns its position and a description.
fn find_disputed_character(text: &str) -> Option<(usize, &'static str)> {
    text.char_indices().find_map(|(at, c)| match c {
        '\u{feff}' if at > 0 => Some((at, "a byte order mark (U+FEFF)")),
        '\u{85}' | '\u{2028}' | '\u{2029}' => {
            Some((at, "a line separator of Unicode (U+0085, U+2028 or U+2029)"))
        }
        '\r' if !text[at + 1..].starts_with('\n') => {
            Some((at, "a carriage return (CR) without a line feed"))
        }
        _ => None,
    })
}

/// Parses every document of a file.
///
/// # Errors
/// The text is not YAML, a key is set twice or is not text, or the nesting is deeper than in any
/// manifest.
pub fn parse_documents(text: &str) -> Result<Vec<YamlNode>, Problem> {
    if let Some((at, what)) = find_disputed_character(text) {
        let line = text[..at].matches('\n').count() + 1;
        return Err(Problem::new(
            line,
            format!("{what}, which YAML parsers read differently: remove it"),
        ));
    }
    let offsets = Offsets::from_text(text);
    let mut documents = Vec::new();
    let mut open: Vec<OpenNode> = Vec::new();
    let mut anchors = Anchors::default();
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| {
            Problem::new(
                error.marker().line(),
                format!("this is no YAML: {}: fix it", error.info()),
            )
        })?;
        let (mut node, anchor) = begin_node(&event, span, &offsets);
        node.flow = open.last().is_some_and(|outer| outer.node.flow);
        let (anchor, done) = match event {
            Event::MappingStart(..) | Event::SequenceStart(..) => {
                if open.len() >= MAX_DEPTH {
                    return Err(Problem::new(
                        node.line,
                        "nested too deeply for a manifest: check that this is the right file",
                    ));
                }
                // An event with an empty span begins a block. If a bracket follows, it belongs to
                // the block's first child, and not to the block.
                let bracket = !node.span.is_empty()
                    && without_anchor(&text[node.span.start..]).starts_with(['[', '{']);
                node.flow |= bracket;
                let mapping = matches!(event, Event::MappingStart(..));
                open.push(OpenNode {
                    node,
                    anchor,
                    bracket,
                    mapping,
                    nodes: Vec::new(),
                });
                continue;
            }
            Event::MappingEnd | Event::SequenceEnd => {
                let Some(closed) = open.pop() else { continue };
                (closed.anchor, closed.finish(text, node.span.start)?)
            }
            Event::Scalar(ref value, style, ..) => {
                node.span.end = node.span.start + text[node.span.clone()].trim_end().len();
                node.data = Data::Scalar {
                    text: value.to_string(),
                    plain: style == ScalarStyle::Plain,
                };
                (anchor, node)
            }
            Event::Alias(_) => {
                node.data = anchors.resolve_alias(anchor, node.line)?;
                (0, node)
            }
            _ => continue,
        };
        anchors.add_anchor(anchor, &done);
        match open.last_mut() {
            Some(outer) => outer.nodes.push(done),
            None => documents.push(done),
        }
    }
    Ok(documents)
}

/// Removes an anchor (`&name`) from the beginning of a text, if there is one.
fn without_anchor(text: &str) -> &str {
    if text.starts_with('&') {
        text.trim_start_matches(|c: char| !c.is_whitespace())
            .trim_start()
    } else {
        text
    }
}

/// Makes a node from the parser's event; its data follow later. Returns the node and the number of
/// its anchor, or of the anchor to which an alias refers. The number is 0 if there is no anchor.
fn begin_node(event: &Event<'_>, span: Span, offsets: &Offsets) -> (YamlNode, usize) {
    let (anchor, tagged) = match event {
        Event::Scalar(_, _, anchor, tag)
        | Event::SequenceStart(anchor, tag)
        | Event::MappingStart(anchor, tag) => (*anchor, tag.is_some()),
        Event::Alias(anchor) => (*anchor, false),
        _ => (0, false),
    };
    let node = YamlNode {
        data: Data::Alias,
        span: offsets.byte_offset(span.start.index())..offsets.byte_offset(span.end.index()),
        line: span.start.line(),
        column: span.start.col(),
        flow: false,
        shared: anchor != 0,
        tagged,
    };
    (node, anchor)
}

/// The nodes with an anchor that were parsed so far, for aliases that refer to them.
#[derive(Default)]
struct Anchors {
    nodes: HashMap<usize, YamlNode>,
    aliased: usize,
}

impl Anchors {
    fn add_anchor(&mut self, anchor: usize, node: &YamlNode) {
        if anchor != 0 {
            self.nodes.insert(anchor, node.clone());
        }
    }

    /// Returns the value of the anchor to which an alias refers.
    fn resolve_alias(&mut self, anchor: usize, line: usize) -> Result<Data, Problem> {
        let Some(node) = self.nodes.get(&anchor) else {
            return Ok(Data::Alias);
        };
        self.aliased += node.count_values();
        if self.aliased > MAX_ALIAS_VALUES {
            return Err(Problem::new(
                line,
                "aliases (*) expand to more than any manifest holds: write the values out",
            ));
        }
        Ok(node.data.clone())
    }
}

/// A list or mapping. The parser has not reached the end of the list or mapping yet.
struct OpenNode {
    node: YamlNode,
    anchor: usize,
    bracket: bool,
    mapping: bool,
    nodes: Vec<YamlNode>,
}

impl OpenNode {
    fn finish(mut self, text: &str, closing: usize) -> Result<YamlNode, Problem> {
        // The parser reports the end of a block at the next token. So the block ends here with its
        // last child.
        self.node.span.end = match self.nodes.last() {
            _ if self.bracket => closing + 1,
            Some(last) => last.span.end,
            None => self.node.span.start,
        };
        self.node.data = if self.mapping {
            Data::Mapping(pair_entries(text, self.nodes)?)
        } else {
            Data::Sequence(self.nodes)
        };
        Ok(self.node)
    }
}

fn pair_entries(text: &str, nodes: Vec<YamlNode>) -> Result<Vec<(YamlNode, YamlNode)>, Problem> {
    let mut entries: Vec<(YamlNode, YamlNode)> = Vec::with_capacity(nodes.len() / 2);
    let mut nodes = nodes.into_iter();
    while let (Some(key), Some(mut value)) = (nodes.next(), nodes.next()) {
        let Data::Scalar { text: name, .. } = &key.data else {
            return Err(Problem::new(
                key.line,
                "a key is a list or a mapping, which no manifest has: check that this is the right file",
            ));
        };
        let same = |key: &YamlNode| matches!(&key.data, Data::Scalar { text, .. } if text == name);
        if let Some((first, _)) = entries.iter().find(|(key, _)| same(key)) {
            return Err(Problem::new(
                key.line,
                format!(
                    "{name} is set twice, also in line {}: keep one of the two",
                    first.line
                ),
            ));
        }
        if value.span.is_empty() {
            // For an empty value, the parser reports a place anywhere up to the next key. This code
            // puts the value directly after the colon, or directly after the key if there is no
            // colon.
            let rest = &text[key.span.end..];
            let colon = rest.len() - rest.trim_start().len();
            let colon = if rest[colon..].starts_with(':') {
                colon + 1
            } else {
                0
            };
            value.span = key.span.end + colon..key.span.end + colon;
        }
        entries.push((key, value));
    }
    Ok(entries)
}

/// Converts positions: the parser counts characters, and the tree counts bytes.
struct Offsets {
    /// Position of each character in bytes, and the length of the text. Empty if the text is ASCII,
    /// in which both positions are equal.
    bytes: Vec<usize>,
    length: usize,
}

impl Offsets {
    fn from_text(text: &str) -> Self {
        let bytes = if text.is_ascii() {
            Vec::new()
        } else {
            text.char_indices().map(|(at, _)| at).collect()
        };
        Self {
            bytes,
            length: text.len(),
        }
    }

    fn byte_offset(&self, index: usize) -> usize {
        let at = if self.bytes.is_empty() {
            Some(index)
        } else {
            self.bytes.get(index).copied()
        };
        at.unwrap_or(self.length).min(self.length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# é\na: &x\n  - b: 1 # é\n    c: [d, {e: f}] # hi\n  - |\n    lit\n\n  -\n    z\ne:\nf: *x\ng: 'q'\n---\nlast:\n- y: ~";

    #[test]
    fn nodes_have_their_places_in_the_text() {
        let documents = parse_documents(TEXT).unwrap();
        assert_eq!(documents.len(), 2);
        let written = |node: &YamlNode| TEXT[node.span.clone()].to_owned();
        let a = documents[0].get("a").unwrap();
        assert!(a.shared && documents[0].get("f").unwrap().shared);
        assert_eq!(written(&a.items()[0]), "b: 1 # é\n    c: [d, {e: f}]");
        assert_eq!(written(a.items()[0].get("c").unwrap()), "[d, {e: f}]");
        assert!(a.items()[0].get("c").unwrap().flow && !a.flow);
        assert_eq!(
            (written(&a.items()[1]), a.items()[1].text()),
            ("lit".into(), Some("lit\n"))
        );
        assert_eq!((a.items()[2].line, a.items()[2].column), (9, 4));
        let (key, nothing) = documents[0].find_entry("e").unwrap();
        assert_eq!(nothing.span, key.span.end + 1..key.span.end + 1);
        assert_eq!(written(documents[0].get("g").unwrap()), "'q'");
        assert_eq!(
            documents[1].value(),
            serde_json::json!({"last": [{"y": null}]})
        );
    }

    #[test]
    fn a_key_without_a_colon_has_a_place_for_its_value() {
        for (text, place) in [
            ("? a", 3),
            ("? ", 2),
            ("a :", 3),
            ("? a\n:", 5),
            ("? é\n# c\n", 4),
        ] {
            let documents = parse_documents(text).unwrap();
            let (_, value) = &documents[0].entries()[0];
            assert_eq!(value.span, place..place, "{text:?}");
        }
    }

    #[test]
    fn plain_scalars_have_the_types_of_kubernetes() {
        for (text, value) in [
            ("1", Value::from(1)),
            ("010", 8.into()),
            ("-0x1F", (-31).into()),
            ("0b11", 3.into()),
            ("+1_000", 1000.into()),
            ("-1.5", (-1.5).into()),
            ("yes", true.into()),
            ("~", Value::Null),
        ] {
            assert_eq!(resolve_scalar(text), value);
        }
        for text in [
            "10.0.0.5", "10m", "inf", "nan", "v1", "0x", "0b", "_1", "--1", "0x-1", "-",
        ] {
            assert_eq!(resolve_scalar(text), Value::from(text));
        }
    }

    #[test]
    fn an_alias_has_the_data_of_its_anchor() {
        let documents = parse_documents(TEXT).unwrap();
        let (a, f) = (
            documents[0].get("a").unwrap(),
            documents[0].get("f").unwrap(),
        );
        assert_eq!((f.value(), f.line), (a.value(), 11));
        assert_eq!(
            parse_documents("a: &a [*a]").unwrap()[0].value(),
            serde_json::json!({"a": [null]})
        );
        let bomb: String = (1..9)
            .map(|at| format!("a{at}: &a{at} [{}]\n", format!("*a{},", at - 1).repeat(9)))
            .collect();
        let refused = parse_documents(&format!("a0: &a0 [x]\n{bomb}")).unwrap_err();
        assert_eq!(refused.line, 5, "{refused}");
    }

    #[test]
    fn a_mistake_is_reported_with_its_line() {
        let refused = |text: &str| parse_documents(text).unwrap_err();
        assert_eq!(refused("a: 1\nb: [").line, 3);
        assert_eq!(
            refused("a: 1\nb: 2\na: 3").to_string(),
            "3: a is set twice, also in line 1: keep one of the two"
        );
        assert!(
            refused("a: 1\n[b]: 2")
                .to_string()
                .starts_with("2: a key is a list")
        );
        for disputed in ["\u{feff}b: 2", "b: \u{85}", "# \u{2028}", "b: 2\rc: 3"] {
            assert!(
                refused(&format!("a: 1\n{disputed}"))
                    .to_string()
                    .starts_with("2: a ")
            );
        }
        assert!(parse_documents("\u{feff}a: 1\r\nb: 2\r\n").is_ok());
        let nested = |depth| parse_documents(&("[".repeat(depth) + &"]".repeat(depth)));
        assert!(nested(10).is_ok() && nested(100).is_err());
        assert!(parse_documents(&"[".repeat(100_000)).is_err());
    }
}
