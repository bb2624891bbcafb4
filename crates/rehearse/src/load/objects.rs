//! The ConfigMaps of a rehearsal, in namespaces that every apiserver has, and the requests for
//! them.
//!
//! The user's etcd may hold objects of other rehearsals, so all names begin with a [`Tag`] for this
//! rehearsal.

use super::timetable::Ask;
use hyper::Method;
use serde::Deserialize;
use serde_json::json;
use std::borrow::Cow;
use std::time::{SystemTime, UNIX_EPOCH};

/// Namespace of the writer and the watches. Only the writer writes to this namespace.
pub(super) const WRITE_NAMESPACE: &str = "default";

/// Namespace where clients create objects.
pub(super) const CREATE_NAMESPACE: &str = "kube-public";

/// Namespace of the objects that clients get and list. They are written before the load, and not
/// changed.
pub(super) const READ_NAMESPACE: &str = "kube-node-lease";

/// Number of objects in [`READ_NAMESPACE`], enough for a list longer than one packet.
const READ_OBJECTS: u64 = 20;

/// Field of a ConfigMap's data that holds the number of the write.
const SEQUENCE_FIELD: &str = "sequence";

/// Prefix of the names of a rehearsal's objects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tag(String);

#[derive(Debug, Clone)]
pub(super) struct Request {
    pub(super) method: Method,
    pub(super) path: String,
    pub(super) body: String,
}

/// The needed fields of a ConfigMap, or of the `Status` of an error.
#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct Object<'a> {
    #[serde(borrow)]
    pub(super) metadata: Metadata<'a>,
    #[serde(borrow, default)]
    data: Data<'a>,
    /// For the `Status` of an ERROR event: the HTTP status that describes the error.
    #[serde(default)]
    pub(super) code: u16,
}

/// Metadata of an object or a list. A list has no name.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Metadata<'a> {
    #[serde(borrow, default)]
    pub(super) name: Cow<'a, str>,
    #[serde(borrow, default)]
    pub(super) resource_version: Cow<'a, str>,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct Data<'a> {
    #[serde(borrow)]
    sequence: Option<Cow<'a, str>>,
}

/// A ConfigMapList.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct List<'a> {
    #[serde(borrow)]
    pub(super) metadata: Metadata<'a>,
    #[serde(borrow)]
    pub(super) items: Vec<Object<'a>>,
}

/// A line of a watch. The object of an error is a `Status`.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Event<'a> {
    #[serde(rename = "type", borrow)]
    pub(super) kind: Cow<'a, str>,
    #[serde(borrow)]
    pub(super) object: Object<'a>,
}

impl Object<'_> {
    /// The number of the write that created the object. `None` if the writer did not create the
    /// object.
    pub(super) fn sequence(&self) -> Option<u64> {
        self.data.sequence.as_deref()?.parse().ok()
    }
}

impl Tag {
    /// A tag from the current time: on one etcd, two rehearsals never begin in the same
    /// millisecond.
    pub(super) fn from_current_time() -> Self {
        let time = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        Self(format!("rehearsal-{:x}", time.as_millis()))
    }

    /// True if an object belongs to this rehearsal.
    pub(super) fn owns_object_name(&self, name: &str) -> bool {
        name.strip_prefix(&self.0)
            .is_some_and(|rest| rest.starts_with('-'))
    }

    /// Name of the object that a write creates.
    pub(super) fn written_name(&self, number: u64) -> String {
        format!("{}-write-{number}", self.0)
    }

    /// Name of an object that a client creates on a stream, with a number unique in the stream.
    pub(super) fn created_name(&self, stream: &str, number: u64) -> String {
        format!("{}-{stream}-{number}", self.0)
    }

    /// Requests that create the objects in [`READ_NAMESPACE`], to be made before the load.
    pub(super) fn stock_requests(&self) -> Vec<Request> {
        (0..READ_OBJECTS)
            .map(|n| {
                create_request(
                    READ_NAMESPACE,
                    &self.name_of_read_object(n),
                    "hello",
                    "world",
                )
            })
            .collect()
    }

    fn name_of_read_object(&self, number: u64) -> String {
        format!("{}-read-{number}", self.0)
    }

    /// True if an object is in [`READ_NAMESPACE`].
    pub(super) fn is_name_of_read_object(&self, name: &str) -> bool {
        name.strip_prefix(&self.0)
            .is_some_and(|rest| rest.starts_with("-read-"))
    }

    /// The request for an entry of a timetable. `name` is the name of the object if the request
    /// creates one.
    pub(super) fn make_request(&self, ask: Ask, name: &str) -> Request {
        match ask {
            Ask::Get => get_request(format!(
                "{}/{}",
                configmaps_path(READ_NAMESPACE),
                self.name_of_read_object(0)
            )),
            Ask::List => get_request(configmaps_path(READ_NAMESPACE)),
            Ask::Create => create_request(CREATE_NAMESPACE, name, "hello", "world"),
        }
    }
}

/// The request of a write: creates the object with this number.
pub(super) fn write_request(name: &str, number: u64) -> Request {
    create_request(WRITE_NAMESPACE, name, SEQUENCE_FIELD, &number.to_string())
}

pub(super) fn delete_request(name: &str) -> Request {
    Request {
        method: Method::DELETE,
        path: format!("{}/{name}", configmaps_path(WRITE_NAMESPACE)),
        body: String::new(),
    }
}

pub(super) fn get_request(path: String) -> Request {
    Request {
        method: Method::GET,
        path,
        body: String::new(),
    }
}

/// Path of a namespace's ConfigMaps.
pub(super) fn configmaps_path(namespace: &str) -> String {
    format!("/api/v1/namespaces/{namespace}/configmaps")
}

/// Path of the ConfigMaps of all namespaces.
pub(super) const ALL_CONFIGMAPS: &str = "/api/v1/configmaps";

/// Path of the Secrets of all namespaces. No client writes a Secret during a rehearsal.
pub(super) const ALL_SECRETS: &str = "/api/v1/secrets";

fn create_request(namespace: &str, name: &str, field: &str, value: &str) -> Request {
    let object = json!({
        "kind": "ConfigMap", "apiVersion": "v1",
        "metadata": {"namespace": namespace, "name": name}, "data": {field: value},
    });
    Request {
        method: Method::POST,
        path: configmaps_path(namespace),
        body: object.to_string(),
    }
}
