//! ConfigMaps in Kubernetes' protobuf form, since `kubectl create configmap` sends nothing else. Read
//! only: answers are JSON, which clients take as well.
//!
//! The form is `k8s\0`, then a `runtime.Unknown` with the object inside (k8s.io/apimachinery and
//! k8s.io/api, files `generated.proto`). Fields that a stand-in has no use for are passed over.

use serde_json::{Map, Value, json};

/// First bytes of every such body.
const MAGIC: &[u8] = b"k8s\0";

/// The media type.
pub(super) const MEDIA_TYPE: &str = "application/vnd.kubernetes.protobuf";

/// Reads a ConfigMap as the JSON object that it stands for; `None` if it is none.
pub(super) fn config_map(body: &[u8]) -> Option<Value> {
    let (mut type_meta, mut raw) = (&[][..], None);
    for field in Fields(body.strip_prefix(MAGIC)?) {
        match field? {
            (1, Wire::Bytes(bytes)) => type_meta = bytes,
            (2, Wire::Bytes(bytes)) => raw = Some(bytes),
            _ => {}
        }
    }
    let mut object = json!({"metadata": {}});
    for field in Fields(type_meta) {
        match field? {
            (1, Wire::Bytes(bytes)) => object["apiVersion"] = json!(text(bytes)?),
            (2, Wire::Bytes(bytes)) => object["kind"] = json!(text(bytes)?),
            _ => {}
        }
    }
    let mut data = Map::new();
    for field in Fields(raw?) {
        match field? {
            (1, Wire::Bytes(bytes)) => object["metadata"] = metadata(bytes)?,
            (2, Wire::Bytes(bytes)) => entry(&mut data, bytes)?,
            // Binary data would have to become base64; nothing here needs it.
            (3, _) => return None,
            (4, Wire::Number(immutable)) => object["immutable"] = json!(immutable != 0),
            _ => {}
        }
    }
    if !data.is_empty() {
        object["data"] = data.into();
    }
    Some(object)
}

fn metadata(bytes: &[u8]) -> Option<Value> {
    let mut object = json!({});
    let (mut labels, mut annotations) = (Map::new(), Map::new());
    for field in Fields(bytes) {
        match field? {
            (1, Wire::Bytes(bytes)) => object["name"] = json!(text(bytes)?),
            (3, Wire::Bytes(bytes)) => object["namespace"] = json!(text(bytes)?),
            (6, Wire::Bytes(bytes)) => object["resourceVersion"] = json!(text(bytes)?),
            (11, Wire::Bytes(bytes)) => entry(&mut labels, bytes)?,
            (12, Wire::Bytes(bytes)) => entry(&mut annotations, bytes)?,
            _ => {}
        }
    }
    for (name, map) in [("labels", labels), ("annotations", annotations)] {
        if !map.is_empty() {
            object[name] = map.into();
        }
    }
    Some(object)
}

/// One entry of a map of strings.
fn entry(map: &mut Map<String, Value>, bytes: &[u8]) -> Option<()> {
    let (mut key, mut value) = ("", "");
    for field in Fields(bytes) {
        match field? {
            (1, Wire::Bytes(bytes)) => key = text(bytes)?,
            (2, Wire::Bytes(bytes)) => value = text(bytes)?,
            _ => {}
        }
    }
    map.insert(key.to_owned(), json!(value));
    Some(())
}

fn text(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok()
}

enum Wire<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// The fields of a message: number and value. A `None` inside: the message is broken.
struct Fields<'a>(&'a [u8]);

impl<'a> Iterator for Fields<'a> {
    type Item = Option<(u64, Wire<'a>)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_none() {
            self.0 = &[];
        }
        Some(field)
    }
}

impl<'a> Fields<'a> {
    fn field(&mut self) -> Option<(u64, Wire<'a>)> {
        let key = self.number()?;
        let value = match key & 7 {
            0 => Wire::Number(self.number()?),
            1 => Wire::Bytes(self.bytes(8)?),
            2 => {
                let length = self.number()?;
                Wire::Bytes(self.bytes(usize::try_from(length).ok()?)?)
            }
            5 => Wire::Bytes(self.bytes(4)?),
            _ => return None,
        };
        Some((key >> 3, value))
    }

    fn bytes(&mut self, length: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(bytes)
    }

    fn number(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = self.0.split_first()?;
            self.0 = rest;
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(number);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes(field: u8, value: &[u8]) -> Vec<u8> {
        let mut out = vec![field << 3 | 2, u8::try_from(value.len()).unwrap()];
        out.extend_from_slice(value);
        out
    }

    fn body() -> Vec<u8> {
        let type_meta = [bytes(1, b"v1"), bytes(2, b"ConfigMap")].concat();
        let label = [bytes(1, b"l"), bytes(2, b"m")].concat();
        let metadata = [bytes(1, b"a"), bytes(2, b""), bytes(3, b"n"), bytes(11, &label)].concat();
        let data = [bytes(1, b"k"), bytes(2, b"v")].concat();
        let map = [bytes(1, &metadata), bytes(2, &data), vec![4 << 3, 1]].concat();
        [MAGIC.to_vec(), bytes(1, &type_meta), bytes(2, &map), bytes(3, b""), bytes(4, b"")].concat()
    }

    #[test]
    fn a_config_map() {
        let wanted = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "immutable": true, "data": {"k": "v"},
            "metadata": {"name": "a", "namespace": "n", "labels": {"l": "m"}},
        });
        assert_eq!(config_map(&body()), Some(wanted));
    }

    #[test]
    fn every_cut_and_every_flipped_byte_is_survived() {
        let whole = body();
        for length in 0..whole.len() {
            let _ = config_map(&whole[..length]);
            for bit in 0..8 {
                let mut spoiled = whole.clone();
                spoiled[length] ^= 1 << bit;
                let _ = config_map(&spoiled);
            }
        }
        assert_eq!(config_map(b"{}"), None);
        assert_eq!(config_map(MAGIC), None);
    }

    proptest! {
        #[test]
        fn nothing_panics(tail in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = config_map(&[MAGIC, &tail].concat());
        }
    }
}
