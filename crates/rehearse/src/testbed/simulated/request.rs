//! Parses path and query of a request, without I/O.

use super::objects::ObjectKind;
use hyper::Uri;

/// The resource that the path of a request names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Resource {
    /// `/livez`, `/healthz`.
    Live,
    /// `/readyz`.
    Ready,
    Version,
    /// `/api/v1`.
    ApiV1,
    /// Objects of a kind, in one namespace or in all. Secrets are never written.
    List {
        kind: ObjectKind,
        namespace: Option<String>,
    },
    Map {
        namespace: String,
        name: String,
    },
    Unknown,
}

impl Resource {
    pub(super) fn parse(path: &str) -> Self {
        let path = path.strip_prefix('/').unwrap_or(path);
        let Some(parts) = path
            .trim_end_matches('/')
            .split('/')
            .map(|part| decode_percent(part, false))
            .collect::<Option<Vec<_>>>()
        else {
            return Self::Unknown;
        };
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        let list = |kind, namespace: Option<&str>| Self::List {
            kind,
            namespace: namespace.map(str::to_owned),
        };
        match parts[..] {
            ["livez" | "healthz"] => Self::Live,
            ["readyz"] => Self::Ready,
            ["version"] => Self::Version,
            ["api", "v1"] => Self::ApiV1,
            ["api", "v1", "configmaps"] => list(ObjectKind::ConfigMap, None),
            ["api", "v1", "secrets"] => list(ObjectKind::Secret, None),
            ["api", "v1", "namespaces", n, "secrets"] if !n.is_empty() => {
                list(ObjectKind::Secret, Some(n))
            }
            ["api", "v1", "namespaces", n, "configmaps"] if !n.is_empty() => {
                list(ObjectKind::ConfigMap, Some(n))
            }
            ["api", "v1", "namespaces", n, "configmaps", name]
                if !n.is_empty() && !name.is_empty() =>
            {
                Self::Map {
                    namespace: n.into(),
                    name: name.into(),
                }
            }
            _ => Self::Unknown,
        }
    }

    /// True for a list of objects, which can be watched.
    pub(super) fn is_list(&self) -> bool {
        matches!(self, Self::List { .. })
    }

    /// True for a health check, which every phase answers.
    pub(super) fn is_probe(&self) -> bool {
        matches!(self, Self::Live | Self::Ready)
    }
}

/// The supported parts of a query.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Query {
    pub(super) watch: bool,
    /// The resourceVersion. `None` if missing or 0: both mean any.
    pub(super) resource_version: Option<u64>,
    pub(super) bookmarks: bool,
    pub(super) timeout_seconds: Option<u64>,
}

impl Query {
    /// Parses a query. An unknown parameter that would change the answer is an error, in words.
    pub(super) fn parse(uri: &Uri) -> Result<Self, String> {
        let mut query = Self::default();
        for pair in uri
            .query()
            .unwrap_or_default()
            .split('&')
            .filter(|p| !p.is_empty())
        {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let bad = || format!("invalid query parameter: {pair}");
            let value = decode_percent(value, true).ok_or_else(bad)?;
            let flag = || matches!(value.as_str(), "1" | "t" | "true" | "True" | "TRUE");
            match key {
                "watch" => query.watch = flag(),
                "allowWatchBookmarks" => query.bookmarks = flag(),
                "resourceVersion" if !value.is_empty() => {
                    query.resource_version =
                        Some(value.parse().map_err(|_| bad())?).filter(|&v| v != 0);
                }
                "timeoutSeconds" => {
                    query.timeout_seconds =
                        Some(value.parse().map_err(|_| bad())?).filter(|&v| v != 0);
                }
                "fieldSelector" | "labelSelector" if !value.is_empty() => {
                    return Err("a simulated apiserver knows no selectors".into());
                }
                "sendInitialEvents" if flag() => {
                    return Err("a simulated apiserver knows no streaming lists".into());
                }
                _ => {}
            }
        }
        Ok(query)
    }
}

/// Decodes percent-encoded text. `None` if the text is malformed or no UTF-8.
fn decode_percent(text: &str, plus_is_space: bool) -> Option<String> {
    let mut bytes = text.bytes();
    let mut decoded = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        decoded.push(match byte {
            b'%' => {
                let high = char::from(bytes.next()?).to_digit(16)?;
                let low = char::from(bytes.next()?).to_digit(16)?;
                u8::try_from(high * 16 + low).ok()?
            }
            b'+' if plus_is_space => b' ',
            other => other,
        });
    }
    String::from_utf8(decoded).ok()
}
