//! A shim's rights in a cluster: the objects of `examples/static-pod/access.yaml`, for any node.
//! The requests that their Roles allow are also tried at the end.
//!
//! | object | namespace | of |
//! | --- | --- | --- |
//! | Namespace `berth-system` | | all |
//! | Role `berth`: the Service `kubernetes`, its slice, and all nodes' slices | `default` | all |
//! | ServiceAccount `berth-NODE_PLACEHOLDER` | `berth-system` | a node |
//! | Role and RoleBinding `berth-NODE_PLACEHOLDER`: Leases, and its own token | `berth-system` | a
//! node |
//! | RoleBinding `berth-NODE_PLACEHOLDER` | `default` | a node |
//!
//! A node removes the slice of a node that is gone, so the Role in `default` names the slices of
//! all nodes. The names also restrict `create`, because slices are made only by server-side apply,
//! and an apply request has the name in its path.

use berth_cluster::service::{Family, slice_name};
use berth_cluster::yaml::{YamlNode, parse_documents};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fmt;

/// The objects of the node [`NODE_PLACEHOLDER`], in the order of the table above.
const ACCESS_MANIFEST: &str = include_str!("../../../../examples/static-pod/access.yaml");

const NODE_PLACEHOLDER: &str = "cp-1";

/// A request that RBAC decides on.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Request {
    namespace: String,
    group: String,
    resource: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    subresource: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    name: String,
    verb: String,
}

impl Request {
    /// A SelfSubjectAccessReview of the request.
    pub fn access_review(&self) -> Value {
        json!({
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": self},
        })
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            namespace,
            group,
            resource,
            subresource,
            name,
            verb,
        } = self;
        let dot = if group.is_empty() { "" } else { "." };
        write!(f, "{verb} {resource}{dot}{group}")?;
        for part in [name, subresource]
            .into_iter()
            .filter(|part| !part.is_empty())
        {
            write!(f, "/{part}")?;
        }
        write!(f, " in {namespace}")
    }
}

/// All objects for the shims of one node.
fn node_objects(node: &str) -> Vec<Value> {
    parse_documents(&ACCESS_MANIFEST.replace(NODE_PLACEHOLDER, node))
        .iter()
        .flatten()
        .map(YamlNode::value)
        .collect()
}

pub fn namespace_object(name: &str) -> Value {
    let mut namespace = node_objects(NODE_PLACEHOLDER).swap_remove(0);
    namespace["metadata"]["name"] = json!(name);
    namespace
}

/// Makes the Role `berth` in `default`, which names the EndpointSlices of all nodes.
pub fn shared_role<'a>(nodes: impl IntoIterator<Item = &'a str>) -> Value {
    let mut role = node_objects(NODE_PLACEHOLDER).swap_remove(1);
    let slices = nodes
        .into_iter()
        .flat_map(|node| Family::ALL.map(|family| slice_name(node, family)));
    role["rules"][2]["resourceNames"] = slices.collect();
    role
}

/// The objects of a single node, the service account first.
pub fn single_node_objects(node: &str) -> Vec<Value> {
    node_objects(node).split_off(2)
}

/// All requests of a node's shims, as allowed by the Roles.
pub fn allowed_requests(node: &str) -> Vec<Request> {
    let mut requests = Vec::new();
    for role in node_objects(node)
        .iter()
        .filter(|object| object["kind"] == "Role")
    {
        for rule in list_items(&role["rules"]) {
            let resource = text_of(&rule["resources"][0]);
            let (resource, subresource) = resource.split_once('/').unwrap_or((&resource, ""));
            let any = json!([""]);
            for name in list_items(rule.get("resourceNames").unwrap_or(&any)) {
                requests.extend(list_items(&rule["verbs"]).map(|verb| Request {
                    namespace: text_of(&role["metadata"]["namespace"]),
                    group: text_of(&rule["apiGroups"][0]),
                    resource: resource.to_owned(),
                    subresource: subresource.to_owned(),
                    name: text_of(name),
                    verb: text_of(verb),
                }));
            }
        }
    }
    requests
}

/// Returns the shared Role with a node added. `None` if nothing changes. Rules that berth did not
/// write are dropped, since no shim needs them.
pub fn add_node(role: &Value, node: &str) -> Option<Value> {
    let mut nodes = list_nodes(role);
    nodes.insert(node.to_owned());
    let rules = shared_role(nodes.iter().map(String::as_str))["rules"].take();
    (role["rules"] != rules).then(|| {
        let mut role = role.clone();
        role["rules"] = rules;
        role
    })
}

/// Finds the nodes of a Role. The Role names the EndpointSlices of these nodes.
fn list_nodes(role: &Value) -> BTreeSet<String> {
    let names = list_items(&role["rules"]).flat_map(|rule| list_items(&rule["resourceNames"]));
    let node = |name: &Value| {
        let (node, family) = name.as_str()?.strip_prefix("berth-")?.rsplit_once('-')?;
        matches!(family, "ipv4" | "ipv6").then(|| node.to_owned())
    };
    names.filter_map(node).collect()
}

/// Path of an object in the API.
pub fn object_path(object: &Value) -> String {
    let metadata = &object["metadata"];
    let (api, kind) = (
        text_of(&object["apiVersion"]),
        text_of(&object["kind"]).to_ascii_lowercase(),
    );
    let root = if api.contains('/') { "/apis" } else { "/api" };
    let namespace = metadata["namespace"]
        .as_str()
        .map(|name| format!("/namespaces/{name}"))
        .unwrap_or_default();
    format!(
        "{root}/{api}{namespace}/{kind}s/{}",
        text_of(&metadata["name"])
    )
}

fn list_items(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

fn text_of(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_cluster::lease::NAMESPACE;

    /// The rights of shims in Deployments and DaemonSets. The kubelet renews the tokens of their
    /// pods.
    const IN_CLUSTER: &str = include_str!("../../../../examples/kustomize/cluster/access.yaml");

    #[test]
    fn a_nodes_objects_have_their_api_paths() {
        let paths: Vec<_> = single_node_objects("cp-1")
            .iter()
            .chain([&namespace_object(NAMESPACE), &shared_role(["cp-1"])])
            .map(object_path)
            .collect();
        assert_eq!(
            paths,
            [
                "/api/v1/namespaces/berth-system/serviceaccounts/berth-cp-1",
                "/apis/rbac.authorization.k8s.io/v1/namespaces/berth-system/roles/berth-cp-1",
                "/apis/rbac.authorization.k8s.io/v1/namespaces/berth-system/rolebindings/berth-cp-1",
                "/apis/rbac.authorization.k8s.io/v1/namespaces/default/rolebindings/berth-cp-1",
                "/api/v1/namespaces/berth-system",
                "/apis/rbac.authorization.k8s.io/v1/namespaces/default/roles/berth",
            ]
        );
        assert_eq!(
            single_node_objects("cp-1")[0]["automountServiceAccountToken"],
            false
        );
        assert_eq!(
            single_node_objects("cp-1")[3]["subjects"][0]["namespace"],
            "berth-system"
        );
    }

    #[test]
    fn only_leases_are_allowed_without_a_name() {
        let role = single_node_objects("cp-1")[1].clone();
        let rules = shared_role(["cp-1"])["rules"].as_array().unwrap().clone();
        for rule in rules.iter().chain(role["rules"].as_array().unwrap()) {
            let named = rule["resourceNames"]
                .as_array()
                .is_some_and(|names| !names.is_empty());
            assert!(named || rule["resources"] == json!(["leases"]), "{rule}");
            assert!(!rule.to_string().contains('*'), "{rule}");
        }
        assert_eq!(
            role["rules"][1]["resources"],
            json!(["serviceaccounts/token"])
        );
        assert_eq!(role["rules"][1]["resourceNames"], json!(["berth-cp-1"]));
    }

    #[test]
    fn the_allowed_requests_are_those_of_the_roles() {
        let said: Vec<_> = allowed_requests("cp-1")
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(said.len(), 13, "{said:#?}");
        for request in [
            "get services/kubernetes in default",
            "get endpointslices.discovery.k8s.io/kubernetes in default",
            "create endpointslices.discovery.k8s.io/berth-cp-1-ipv6 in default",
            "list leases.coordination.k8s.io in berth-system",
            "create serviceaccounts/berth-cp-1/token in berth-system",
        ] {
            assert!(
                said.iter().any(|said| said == request),
                "{request} in {said:#?}"
            );
        }
        let review = allowed_requests("cp-1").pop().unwrap().access_review();
        let asked = json!({"namespace": "berth-system", "group": "", "resource": "serviceaccounts", "subresource": "token",
            "name": "berth-cp-1", "verb": "create"});
        assert_eq!(review["spec"]["resourceAttributes"], asked);
    }

    #[test]
    fn a_node_is_added_once_and_metadata_stays() {
        let mut role = shared_role(["cp-2"]);
        role["metadata"]["resourceVersion"] = json!("7");
        role["rules"][0]["verbs"] = json!(["*"]);
        let both = add_node(&role, "cp-1-ipv4").unwrap();
        assert_eq!(both["rules"], shared_role(["cp-1-ipv4", "cp-2"])["rules"]);
        assert_eq!(both["metadata"]["resourceVersion"], "7");
        assert_eq!(add_node(&both, "cp-1-ipv4"), None);
        assert_eq!(add_node(&both, "cp-2"), None);
        let names = &add_node(&json!({}), "cp-1").unwrap()["rules"][2]["resourceNames"];
        assert_eq!(names, &json!(["berth-cp-1-ipv4", "berth-cp-1-ipv6"]));
    }

    #[test]
    fn the_kustomize_component_has_the_same_rules() {
        let documents: Vec<_> = parse_documents(IN_CLUSTER)
            .unwrap()
            .iter()
            .map(YamlNode::value)
            .collect();
        let roles = documents.iter().filter(|object| object["kind"] == "Role");
        let rules: Vec<_> = roles
            .map(|role| (role["metadata"]["namespace"].clone(), role["rules"].clone()))
            .collect();
        let leases = json!([single_node_objects("cp-1")[1]["rules"][0]]);
        assert_eq!(
            rules,
            [
                (json!("default"), shared_role(["cp-1"])["rules"].take()),
                (json!(NAMESPACE), leases)
            ],
            "examples/kustomize/cluster/access.yaml"
        );
        let bindings: Vec<_> = documents
            .iter()
            .filter(|object| object["kind"] == "RoleBinding")
            .collect();
        assert_eq!(bindings.len(), 2);
        for binding in bindings {
            let account =
                json!([{"kind": "ServiceAccount", "name": "berth", "namespace": "kube-system"}]);
            assert_eq!(
                (&binding["roleRef"]["name"], &binding["subjects"]),
                (&json!("berth"), &account)
            );
        }
        assert!(
            documents.contains(&namespace_object(NAMESPACE)),
            "the namespace"
        );
    }
}
