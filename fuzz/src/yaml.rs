//! A YAML reader independent of berth's. Fuzz targets read berth's output with this reader, and
//! compare the output with the intended values.

use libyaml_safer::{EventData, Parser, ScalarStyle};
use serde_json::Value;
use std::panic::{catch_unwind, set_hook, take_hook};

/// Maximum nesting that is read: the reader and the comparison are recursive.
const MAX_DEPTH: usize = 100;

/// A value in a YAML file, or the intended value of an edit.
#[derive(Debug, Clone, PartialEq)]
pub enum Yaml {
    Scalar {
        text: String,
        plain: bool,
    },
    Sequence(Vec<Yaml>),
    Mapping(Vec<(Yaml, Yaml)>),
    Alias(String),
    /// A value with an anchor or a tag.
    Marked {
        anchor: Option<String>,
        tag: Option<String>,
        value: Box<Yaml>,
    },
    /// The intended value of an edit, in no file.
    Meant(Value),
}

impl Yaml {
    /// Returns the value without its anchor and tag.
    pub fn bare(&self) -> &Self {
        match self {
            Self::Marked { value, .. } => value,
            other => other,
        }
    }

    pub fn bare_mut(&mut self) -> &mut Self {
        match self {
            Self::Marked { value, .. } => value,
            other => other,
        }
    }

    pub fn is_null(&self) -> bool {
        match self.bare() {
            Self::Scalar { text, plain: true } => is_null(text),
            Self::Meant(value) => value.is_null(),
            _ => false,
        }
    }

    /// Returns the text of a scalar or of an intended string. `None` for other values.
    pub fn text(&self) -> Option<&str> {
        match self.bare() {
            Self::Scalar { text, .. } => Some(text),
            Self::Meant(Value::String(text)) => Some(text),
            _ => None,
        }
    }

    /// True if `self`, a key in the file, is the wanted key. Keys are strings, like in JSON, so an
    /// edit may add quotes to any key.
    fn is_key(&self, wanted: &Self) -> bool {
        let quoted = matches!(self.bare(), Self::Scalar { plain: false, .. });
        self.is(wanted) || (quoted && self.text().is_some() && self.text() == wanted.text())
    }

    /// True if `self`, a value in the file, is the wanted value. The order of a mapping's entries
    /// does not matter.
    pub fn is(&self, wanted: &Self) -> bool {
        match (self, wanted) {
            (Self::Scalar { text, plain }, Self::Meant(value)) => scalar_is(text, *plain, value),
            // Quotes make a scalar a string. A scalar that is a string anyway may gain or lose
            // quotes.
            (
                Self::Scalar { text, plain },
                Self::Scalar {
                    text: wanted,
                    plain: wanted_plain,
                },
            ) => text == wanted && (plain == wanted_plain || is_text(text)),
            (Self::Sequence(items), Self::Meant(Value::Array(values))) => {
                items.len() == values.len()
                    && items
                        .iter()
                        .zip(values)
                        .all(|(item, value)| item.is(&Self::Meant(value.clone())))
            }
            (Self::Mapping(entries), Self::Meant(Value::Object(map))) => {
                entries.len() == map.len()
                    && entries.iter().all(|(key, value)| {
                        let Some(text) = key.text() else { return false };
                        let key = key.is(&Self::Meant(text.into()));
                        key && map
                            .get(text)
                            .is_some_and(|wanted| value.is(&Self::Meant(wanted.clone())))
                    })
            }
            (Self::Sequence(items), Self::Sequence(wanted)) => {
                items.len() == wanted.len()
                    && items
                        .iter()
                        .zip(wanted)
                        .all(|(item, wanted)| item.is(wanted))
            }
            (Self::Mapping(entries), Self::Mapping(wanted)) => {
                let mut left: Vec<_> = wanted.iter().collect();
                entries.iter().all(|(key, value)| {
                    let found = left.iter().position(|(k, v)| key.is_key(k) && value.is(v));
                    found.map(|at| left.remove(at)).is_some()
                }) && left.is_empty()
            }
            (
                Self::Marked { anchor, tag, value },
                Self::Marked {
                    anchor: wanted_anchor,
                    tag: wanted_tag,
                    value: wanted,
                },
            ) => anchor == wanted_anchor && tag == wanted_tag && value.is(wanted),
            (is, wanted) => is == wanted,
        }
    }
}

fn is_null(text: &str) -> bool {
    matches!(text, "" | "~" | "null" | "Null" | "NULL")
}

fn scalar_is(text: &str, plain: bool, wanted: &Value) -> bool {
    match wanted {
        Value::Null => plain && is_null(text),
        Value::Bool(wanted) => plain && text == if *wanted { "true" } else { "false" },
        Value::Number(wanted) => plain && text == wanted.to_string(),
        Value::String(wanted) => text == wanted && (!plain || is_text(text)),
        Value::Array(_) | Value::Object(_) => false,
    }
}

/// True if readers of YAML 1.1, readers of YAML 1.2 and Go's reader all read the plain scalar as a
/// string.
pub fn is_text(text: &str) -> bool {
    const WORDS: [&str; 14] = [
        "y", "n", "yes", "no", "on", "off", "true", "false", ".inf", "+.inf", "-.inf", ".nan",
        "<<", "null",
    ];
    // Words match in lower case, in upper case, or with one capital (NaN has two).
    let (first, rest) = text.split_at(
        text.find(|c: char| c.is_ascii_alphabetic())
            .map_or(0, |at| at + 1),
    );
    let cased = rest == rest.to_lowercase() || text == text.to_uppercase() || rest == "aN";
    if is_null(text)
        || cased && WORDS.contains(&(first.to_lowercase() + &rest.to_lowercase()).as_str())
    {
        return false;
    }
    let digits = text.replace('_', "");
    let digits = digits.strip_prefix(['-', '+']).unwrap_or(&digits);
    let radix = |prefix: &str, radix: u32| {
        digits
            .strip_prefix(prefix)
            .is_some_and(|d| !d.is_empty() && d.chars().all(|c| c.is_digit(radix)))
    };
    let based = radix("0x", 16) || radix("0X", 16) || radix("0o", 8) || radix("0b", 2);
    let number = digits.starts_with(|c: char| c.is_ascii_digit() || c == '.')
        && digits.parse::<f64>().is_ok();
    let sixties = digits.contains(':')
        && digits.starts_with(|c: char| c.is_ascii_digit())
        && digits
            .split(':')
            .all(|part| !part.is_empty() && part.chars().all(|c| c.is_ascii_digit() || c == '.'));
    !(based || number || sixties || is_date(text))
}

fn is_date(text: &str) -> bool {
    let date = text.split(['T', 't', ' ']).next().unwrap_or_default();
    let parts: Vec<_> = date.split('-').collect();
    parts.len() == 3
        && parts[0].len() == 4
        && parts
            .iter()
            .all(|part| (1..=4).contains(&part.len()) && part.chars().all(|c| c.is_ascii_digit()))
}

/// The result of reading a file.
#[derive(Debug)]
pub enum Read {
    Documents(Vec<Yaml>),
    /// The file is no YAML, or is nested deeper than `MAX_DEPTH`.
    Refused,
    /// The reader panicked. The file may be valid.
    Broken,
}

/// Reads the documents of a file, and catches panics of the reader.
pub fn read(text: &str) -> Read {
    // libFuzzer's panic hook aborts the process.
    let hook = take_hook();
    set_hook(Box::new(|_| {}));
    let read = catch_unwind(|| documents(text));
    set_hook(hook);
    match read {
        Ok(Some(documents)) => Read::Documents(documents),
        Ok(None) => Read::Refused,
        Err(_) => Read::Broken,
    }
}

fn documents(text: &str) -> Option<Vec<Yaml>> {
    let mut bytes = text.as_bytes();
    let mut parser = Parser::new();
    parser.set_input_string(&mut bytes);
    let mut documents = Vec::new();
    loop {
        match parser.parse().ok()?.data {
            EventData::StreamStart { .. } | EventData::DocumentEnd { .. } => {}
            EventData::DocumentStart { .. } => {
                let first = parser.parse().ok()?.data;
                documents.push(value(&mut parser, first, 0)?);
            }
            EventData::StreamEnd => return Some(documents),
            _ => return None,
        }
    }
}

fn value(parser: &mut Parser<&mut &[u8]>, event: EventData, depth: usize) -> Option<Yaml> {
    if depth > MAX_DEPTH {
        return None;
    }
    let (anchor, tag, value) = match event {
        EventData::Alias { anchor } => return Some(Yaml::Alias(anchor)),
        EventData::Scalar {
            anchor,
            tag,
            value,
            style,
            ..
        } => (
            anchor,
            tag,
            Yaml::Scalar {
                text: value,
                plain: style == ScalarStyle::Plain,
            },
        ),
        EventData::SequenceStart { anchor, tag, .. } => {
            let mut items = Vec::new();
            loop {
                match parser.parse().ok()?.data {
                    EventData::SequenceEnd => break,
                    item => items.push(self::value(parser, item, depth + 1)?),
                }
            }
            (anchor, tag, Yaml::Sequence(items))
        }
        EventData::MappingStart { anchor, tag, .. } => {
            let mut entries = Vec::new();
            loop {
                match parser.parse().ok()?.data {
                    EventData::MappingEnd => break,
                    key => {
                        let key = self::value(parser, key, depth + 1)?;
                        let next = parser.parse().ok()?.data;
                        entries.push((key, self::value(parser, next, depth + 1)?));
                    }
                }
            }
            (anchor, tag, Yaml::Mapping(entries))
        }
        _ => return None,
    };
    if anchor.is_none() && tag.is_none() {
        return Some(value);
    }
    Some(Yaml::Marked {
        anchor,
        tag,
        value: Box::new(value),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_written_is_told_from_what_is_not() {
        let read = |text: &str| documents(text).unwrap().remove(0);
        let meant = Yaml::Meant(json!({"a": [1, "1", "x: y", null, {}], "b": true}));
        assert!(read("b: true\na: [1, '1', \"x: y\", ~, {}]\n").is(&meant));
        for wrong in [
            "b: yes\na: [1, '1', 'x: y', ~, {}]",
            "a: [1, 1, 'x: y', ~, {}]\nb: true",
            "b: true",
            "[]",
        ] {
            assert!(!read(wrong).is(&meant), "{wrong}");
        }
        assert!(read("{a: 1, b: &x !t 2}").is(&read("b: &x !t 2\na: 1\n")));
        assert!(
            !read("{a: 1, b: &x 2}").is(&read("{b: &y 2, a: 1}"))
                && !read("a: *b").is(&read("a: b"))
        );
    }

    #[test]
    fn text_is_what_nobody_takes_for_anything_else() {
        for text in [
            "10.0.0.5", "a", "10m", "v1", "-", "1.2.3", "fd00::1", "2026-01", "a:b", "10:a", "nO",
            "éa",
        ] {
            assert!(is_text(text), "{text}");
        }
        for text in [
            "1_0",
            "0b1",
            "0x1F",
            "-0o7",
            "1e3",
            ".5",
            "+1",
            "1:30",
            "2026-01-02",
            "Yes",
            "NO",
            ".NaN",
            ".INF",
            "<<",
            "~",
        ] {
            assert!(!is_text(text), "{text}");
        }
    }
}
