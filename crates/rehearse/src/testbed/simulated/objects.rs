//! The Kubernetes objects of a simulated apiserver: ConfigMaps, `Status`, and the discovery
//! documents.

use super::body::Payload;
use hyper::body::Bytes;
use hyper::{Response, StatusCode, header};
use serde::Serialize;
use serde_json::{Value, json};

pub(super) fn json_response(status: StatusCode, object: &Value) -> Response<Payload> {
    build_typed_response(status, "application/json", Bytes::from(object.to_string()))
}

/// A text answer, as for health checks.
pub(super) fn text_response(status: StatusCode, text: impl Into<Bytes>) -> Response<Payload> {
    build_typed_response(status, "text/plain; charset=utf-8", text.into())
}

fn build_typed_response(status: StatusCode, kind: &'static str, bytes: Bytes) -> Response<Payload> {
    let mut response = Response::new(Payload::Whole(bytes));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
    response
}

/// The answer for an error: a `Status` object in kube-apiserver's words.
pub(super) fn failure_response(
    status: StatusCode,
    reason: &str,
    message: &str,
    name: &str,
) -> Response<Payload> {
    json_response(status, &status_object(status, reason, message, name))
}

/// The `Status` object of an error. `name` may be empty.
pub(super) fn status_object(status: StatusCode, reason: &str, message: &str, name: &str) -> Value {
    let mut object = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": status.as_u16(),
    });
    if !name.is_empty() {
        object["details"] = json!({"name": name, "kind": "configmaps"});
    }
    object
}

/// The `Status` object that answers a successful deletion. `name` is the name of the deleted
/// object.
pub(super) fn success_status(name: &str) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success",
        "details": {"name": name, "kind": "configmaps"},
    })
}

/// Kinds that can be listed and watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ObjectKind {
    ConfigMap,
    /// Secrets, of which there are none and none are ever written.
    Secret,
}

impl ObjectKind {
    fn name(self) -> &'static str {
        match self {
            Self::ConfigMap => "ConfigMap",
            Self::Secret => "Secret",
        }
    }
}

/// The discovery document `/api/v1`: ConfigMaps and Secrets.
pub(super) fn api_resources() -> Value {
    json!({
        "kind": "APIResourceList", "groupVersion": "v1",
        "resources": [{
            "name": "configmaps", "singularName": "configmap", "namespaced": true, "kind": "ConfigMap",
            "verbs": ["create", "delete", "get", "list", "watch"], "shortNames": ["cm"],
        }, {
            "name": "secrets", "singularName": "secret", "namespaced": true, "kind": "Secret",
            "verbs": ["list", "watch"],
        }],
    })
}

/// The answer of `/version`.
pub(super) fn version_object(git: &str) -> Value {
    let mut parts = git.trim_start_matches('v').split('.');
    let (major, minor) = (
        parts.next().unwrap_or_default(),
        parts.next().unwrap_or_default(),
    );
    json!({
        "major": major, "minor": minor, "gitVersion": git, "gitCommit": "", "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z", "goVersion": "none (simulated by berth)", "compiler": "rustc",
        "platform": "linux/berth",
    })
}

/// A list object, such as a `ConfigMapList`.
pub(super) fn list_object(kind: ObjectKind, revision: u64, items: &[Value]) -> Value {
    json!({
        "kind": format!("{}List", kind.name()), "apiVersion": "v1",
        "metadata": {"resourceVersion": revision.to_string()}, "items": items,
    })
}

/// Formats an event of a watch as a line of JSON.
pub(super) fn event_line(kind: &impl Serialize, object: &Value) -> Bytes {
    let mut line = json!({"type": kind, "object": object}).to_string();
    line.push('\n');
    line.into()
}

/// A bookmark, which carries only a revision.
pub(super) fn bookmark_line(kind: ObjectKind, revision: u64) -> Bytes {
    let object = json!({"kind": kind.name(), "apiVersion": "v1",
        "metadata": {"resourceVersion": revision.to_string(), "creationTimestamp": null}});
    event_line(&"BOOKMARK", &object)
}

/// The answer for a ConfigMap that is not valid: status, reason and message of the error.
pub(super) type Rejected = (StatusCode, &'static str, String);

/// Checks a ConfigMap that a client sent to `namespace`, and fills in optional fields. Returns the
/// ConfigMap and its name.
pub(super) fn admit_object(
    mut object: Value,
    namespace: &str,
) -> Result<(Value, String), Rejected> {
    let bad = |message: String| (StatusCode::BAD_REQUEST, "BadRequest", message);
    let invalid = |field: &str, why: &str| {
        let message = format!("ConfigMap is invalid: {field}: {why}");
        (StatusCode::UNPROCESSABLE_ENTITY, "Invalid", message)
    };
    if !object.is_object() {
        return Err(bad("the body is no ConfigMap".into()));
    }
    for (field, wanted) in [("kind", "ConfigMap"), ("apiVersion", "v1")] {
        match object.get(field) {
            None => object[field] = json!(wanted),
            Some(value) if value == wanted => {}
            Some(value) => {
                return Err(bad(format!(
                    "{field} is {value}, but a simulated apiserver knows only {wanted}"
                )));
            }
        }
    }
    let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) else {
        return Err(invalid("metadata.name", "Required value: name is required"));
    };
    match metadata
        .get("namespace")
        .map(|n| n.as_str().unwrap_or_default())
    {
        None | Some("") => {
            metadata.insert("namespace".into(), json!(namespace));
        }
        Some(there) if there == namespace => {}
        Some(_) => {
            return Err(bad(
                "the namespace of the object does not match the namespace of the request".into(),
            ));
        }
    }
    let name = metadata
        .get("name")
        .and_then(Value::as_str)
        .unwrap_or_default()
        .to_owned();
    if !is_subdomain(&name) {
        return Err(invalid(
            "metadata.name",
            "Invalid value: a lowercase RFC 1123 subdomain is required",
        ));
    }
    for field in ["data", "binaryData"] {
        let strings = |v: &Value| {
            v.as_object()
                .is_some_and(|map| map.values().all(Value::is_string))
        };
        if object
            .get(field)
            .is_some_and(|v| !v.is_null() && !strings(v))
        {
            return Err(bad(format!("{field} must be a map of strings")));
        }
    }
    Ok((object, name))
}

/// True for a DNS subdomain (RFC 1123).
fn is_subdomain(name: &str) -> bool {
    let word = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let label = |label: &str| {
        let bytes = label.as_bytes();
        let ends =
            bytes.first().is_some_and(|&b| word(b)) && bytes.last().is_some_and(|&b| word(b));
        ends && bytes.iter().all(|&b| word(b) || b == b'-')
    };
    name.len() <= 253 && name.split('.').all(label)
}
