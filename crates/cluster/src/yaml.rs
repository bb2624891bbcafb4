//! A YAML file as a tree of nodes with their places in the text, so that an editor can leave the
//! rest of the text unchanged.
//!
//! [`saphyr_parser`] parses the file. Plain scalars have the types that Kubernetes gives them (YAML
//! 1.1's `yes` is true).

use saphyr_parser::{Event, Parser, ScalarStyle, Span};
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::ops::Range;

/// Limit of nesting. A pod has less than twenty levels.
const MAX_DEPTH: usize = 64;

/// Limit of values in expanded aliases: a few lines of aliases can expand to billions.
const MAX_ALIASED: usize = 10_000;

/// A mistake in a YAML file, and its fix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{line}: {message}")]
pub struct Problem {
    /// Line of the file, from 1.
    pub line: usize,
    pub message: String,
}

impl Problem {
    /// Makes a problem in a line.
    pub fn new(line: usize, message: impl Into<String>) -> Self {
        Self {
            line,
            message: message.into(),
        }
    }

    /// Returns cause and fix apart; see [`split_cause_and_fix`].
    pub fn parts(&self) -> (&str, &str) {
        split_cause_and_fix(&self.message)
    }
}

/// Splits a message into cause and fix: every message of berth has both, and the fix follows the
/// last colon.
pub fn split_cause_and_fix(message: &str) -> (&str, &str) {
    message.rsplit_once(": ").unwrap_or((message, ""))
}

/// A value in a YAML file.
#[derive(Debug, Clone)]
pub struct YamlNode {
    pub data: Data,
    /// The value's place in the text, in bytes; without comments and line ends around the value.
    pub span: Range<usize>,
    /// The line in which the value begins, from 1.
    pub line: usize,
    /// The column in which the value begins, from 0, in characters.
    pub column: usize,
    /// True if the value is written as `[…]` or `{…}`, or inside of brackets.
    pub flow: bool,
    /// True if the value has an anchor, or is an alias, which has the data of its anchor: a change
    /// would also change a value elsewhere.
    pub shared: bool,
    /// True if the value has a tag. The tag itself is not kept.
    pub tagged: bool,
}

#[derive(Debug, Clone)]
pub enum Data {
    /// Text, number, truth value or null.
    Scalar {
        /// The text without quotes and escapes.
        text: String,
        /// True if the scalar is not quoted, and so may be a number, a truth value or null.
        plain: bool,
    },
    Sequence(Vec<YamlNode>),
    /// Keys and values, in their order.
    Mapping(Vec<(YamlNode, YamlNode)>),
    /// An alias inside of the value that has its anchor.
    Alias,
}

impl YamlNode {
    /// Returns the text of a scalar. `None` for null.
    pub fn text(&self) -> Option<&str> {
        match &self.data {
            Data::Scalar { text, .. } if !self.is_null() => Some(text),
            _ => None,
        }
    }

    /// Returns the items of a list. Empty for any value but a list.
    pub fn items(&self) -> &[Self] {
        match &self.data {
            Data::Sequence(items) => items,
            _ => &[],
        }
    }

    /// Returns keys and values of a mapping. Empty for any value but a mapping.
    pub fn entries(&self) -> &[(Self, Self)] {
        match &self.data {
            Data::Mapping(entries) => entries,
            _ => &[],
        }
    }

    /// Returns the value of a key, if the key exists and its value is not null.
    pub fn get(&self, key: &str) -> Option<&Self> {
        self.entry(key)
            .map(|(_, value)| value)
            .filter(|value| !value.is_null())
    }

    /// Returns the items of a key's list.
    pub fn list(&self, key: &str) -> &[Self] {
        self.get(key).map(Self::items).unwrap_or_default()
    }

    /// Returns the text of a key.
    pub fn text_of(&self, key: &str) -> Option<&str> {
        self.get(key)?.text()
    }

    /// True if the value of a key is true.
    pub fn is_true(&self, key: &str) -> bool {
        self.get(key).is_some_and(|value| value.value() == true)
    }

    /// Calls [`YamlNode::get`] through several mappings.
    pub fn at(&self, keys: &[&str]) -> Option<&Self> {
        keys.iter().try_fold(self, |node, key| node.get(key))
    }

    /// Returns a key and its value, which may be null.
    pub fn entry(&self, key: &str) -> Option<&(Self, Self)> {
        self.entries()
            .iter()
            .find(|(name, _)| matches!(&name.data, Data::Scalar { text, .. } if text == key))
    }

    /// Returns the item with this `name` in a list of mappings, and its index.
    pub fn named(&self, name: &str) -> Option<(usize, &Self)> {
        self.items()
            .iter()
            .enumerate()
            .find(|(_, item)| item.get("name").and_then(Self::text) == Some(name))
    }

    /// True for null, in every notation of YAML.
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

    /// Returns the number of values in this value, including itself.
    fn size(&self) -> usize {
        let inner = match &self.data {
            Data::Sequence(items) => items.iter().map(Self::size).sum(),
            Data::Mapping(entries) => entries.iter().map(|(_, value)| value.size()).sum(),
            Data::Scalar { .. } | Data::Alias => 0,
        };
        1 + inner
    }

    /// Returns the value without its place.
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

/// Returns the value of a plain scalar.
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
    // Rust parses "inf" and "nan" as numbers, YAML does not.
    let digits = text.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '-' | '+' | '.'));
    match text.parse::<f64>() {
        Ok(number) if digits && number.is_finite() => number.into(),
        _ => Value::String(text.to_owned()),
    }
}

/// Parses a whole number like Go: underscores are ignored, and a prefix gives the radix. The prefix
/// of an octal number may be 0 alone.
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

/// Finds the first character that only some YAML parsers take for a line end or ignore. Returns its
/// position and a description.
fn find_disputed(text: &str) -> Option<(usize, &'static str)> {
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
    if let Some((at, what)) = find_disputed(text) {
        let line = text[..at].matches('\n').count() + 1;
        return Err(Problem::new(
            line,
            format!("{what}, which YAML parsers read differently: remove it"),
        ));
    }
    let offsets = Offsets::of(text);
    let mut documents = Vec::new();
    let mut open: Vec<Open> = Vec::new();
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
                        "nested too deeply for a manifest: is it the right file?",
                    ));
                }
                // The span at a block's beginning is empty, and a flow may follow as the block's
                // first child.
                let bracket = !node.span.is_empty()
                    && without_anchor(&text[node.span.start..]).starts_with(['[', '{']);
                node.flow |= bracket;
                let mapping = matches!(event, Event::MappingStart(..));
                open.push(Open {
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
                node.data = anchors.resolve(anchor, node.line)?;
                (0, node)
            }
            _ => continue,
        };
        anchors.keep(anchor, &done);
        match open.last_mut() {
            Some(outer) => outer.nodes.push(done),
            None => documents.push(done),
        }
    }
    Ok(documents)
}

/// Returns the text after the anchor, if the text begins with an anchor.
fn without_anchor(text: &str) -> &str {
    if text.starts_with('&') {
        text.trim_start_matches(|c: char| !c.is_whitespace())
            .trim_start()
    } else {
        text
    }
}

/// Makes a node without data. Returns the node and its anchor, or the anchor of an alias; 0 for no
/// anchor.
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
        span: offsets.byte(span.start.index())..offsets.byte(span.end.index()),
        line: span.start.line(),
        column: span.start.col(),
        flow: false,
        shared: anchor != 0,
        tagged,
    };
    (node, anchor)
}

/// Nodes with an anchor that were parsed so far.
#[derive(Default)]
struct Anchors {
    nodes: HashMap<usize, YamlNode>,
    aliased: usize,
}

impl Anchors {
    fn keep(&mut self, anchor: usize, node: &YamlNode) {
        if anchor != 0 {
            self.nodes.insert(anchor, node.clone());
        }
    }

    /// Returns the value of an alias.
    fn resolve(&mut self, anchor: usize, line: usize) -> Result<Data, Problem> {
        let Some(node) = self.nodes.get(&anchor) else {
            return Ok(Data::Alias);
        };
        self.aliased += node.size();
        if self.aliased > MAX_ALIASED {
            return Err(Problem::new(
                line,
                "aliases (*) expand to more than any manifest holds: write the values out",
            ));
        }
        Ok(node.data.clone())
    }
}

/// A list or mapping of which the end is not parsed yet.
struct Open {
    node: YamlNode,
    anchor: usize,
    bracket: bool,
    mapping: bool,
    nodes: Vec<YamlNode>,
}

impl Open {
    fn finish(mut self, text: &str, closing: usize) -> Result<YamlNode, Problem> {
        // The end event of a block is at the next token, so the block ends with its last child.
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
                "a key is a list or a mapping, which no manifest has: is it the right file?",
            ));
        };
        let same = |key: &YamlNode| matches!(&key.data, Data::Scalar { text, .. } if text == name);
        if let Some((first, _)) = entries.iter().find(|(key, _)| same(key)) {
            return Err(Problem::new(
                key.line,
                format!("{name} is set twice, also in line {}: keep one", first.line),
            ));
        }
        if value.span.is_empty() {
            // For an empty value, the parser reports a place anywhere up to the next key. The place
            // becomes the one after the colon, or after the key if there is no colon.
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

/// Converts characters, the unit of the parser, to bytes.
struct Offsets {
    /// Offset of each character and of the end; empty if the text is ASCII.
    bytes: Vec<usize>,
    length: usize,
}

impl Offsets {
    fn of(text: &str) -> Self {
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

    fn byte(&self, index: usize) -> usize {
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
        let (key, nothing) = documents[0].entry("e").unwrap();
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
        assert!(
            parse_documents(&format!("a0: &a0 [x]\n{bomb}"))
                .unwrap_err()
                .message
                .contains("more than any manifest")
        );
    }

    #[test]
    fn a_mistake_is_reported_with_its_line() {
        let refused = |text: &str| parse_documents(text).unwrap_err();
        assert_eq!(refused("a: 1\nb: [").line, 3);
        assert_eq!(
            refused("a: 1\nb: 2\na: 3").to_string(),
            "3: a is set twice, also in line 1: keep one"
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
        assert!(
            refused(&"[".repeat(100))
                .message
                .contains("nested too deeply")
        );
        assert!(parse_documents(&"[".repeat(100_000)).is_err());
    }
}
