//! What a shim may do in a cluster, as objects.
//!
//! One list of [`Rule`]s is both what the Roles grant and what is tried at the end, so that the two cannot differ.
//!
//! | object | namespace | of |
//! | --- | --- | --- |
//! | Namespace `berth-system` | | all |
//! | ServiceAccount `berth-NODE` | `berth-system` | a node |
//! | Role and RoleBinding `berth-NODE`: Leases, and its own token | `berth-system` | a node |
//! | Role `berth`: the Service `kubernetes`, its slice, and all nodes' slices | `default` | all |
//! | RoleBinding `berth-NODE` | `default` | a node |
//!
//! A node removes the slice of another that is gone, so the Role in `default` names those of all nodes. Names bind `create`
//! too, because a slice is only made by server-side apply, a request with the name in its path; and `list` and `watch`,
//! because they come with a field selector for the name.

use berth_cluster::account::account_name;
use berth_cluster::lease::NAMESPACE;
use berth_cluster::service::{Family, slice_name};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fmt;

/// Namespace of the Service `kubernetes`.
pub const DEFAULT: &str = "default";

/// Name of what all nodes share in [`DEFAULT`].
pub const SHARED: &str = "berth";

const RBAC: &str = "rbac.authorization.k8s.io";

/// Verbs on a kind of things, of these names, or of any if none is given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    group: &'static str,
    resource: &'static str,
    subresource: &'static str,
    names: Vec<String>,
    verbs: &'static [&'static str],
}

impl Rule {
    fn object(&self) -> Value {
        let resource = match self.subresource {
            "" => self.resource.to_owned(),
            subresource => format!("{}/{subresource}", self.resource),
        };
        let mut rule = json!({"apiGroups": [self.group], "resources": [resource], "verbs": self.verbs});
        if !self.names.is_empty() {
            rule["resourceNames"] = json!(self.names);
        }
        rule
    }

    /// Each request that it allows.
    fn requests(&self, namespace: &'static str) -> Vec<Request> {
        let Self { group, resource, subresource, names, verbs } = self;
        let names = if names.is_empty() { &[String::new()][..] } else { names };
        let each = names.iter().flat_map(|name| verbs.iter().map(move |verb| (name.clone(), *verb)));
        each.map(|(name, verb)| Request { namespace, group, resource, subresource, name, verb }).collect()
    }
}

/// A request that RBAC decides on.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Request {
    namespace: &'static str,
    group: &'static str,
    resource: &'static str,
    #[serde(skip_serializing_if = "str::is_empty")]
    subresource: &'static str,
    #[serde(skip_serializing_if = "String::is_empty")]
    name: String,
    verb: &'static str,
}

impl Request {
    /// A SelfSubjectAccessReview of it.
    pub fn review(&self) -> Value {
        json!({
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": self},
        })
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { namespace, group, resource, subresource, name, verb } = self;
        let dot = if group.is_empty() { "" } else { "." };
        write!(f, "{verb} {resource}{dot}{group}")?;
        for part in [name.as_str(), subresource].into_iter().filter(|part| !part.is_empty()) {
            write!(f, "/{part}")?;
        }
        write!(f, " in {namespace}")
    }
}

/// What is allowed in [`DEFAULT`]: on the slices of these nodes.
pub fn in_default<'a>(nodes: impl IntoIterator<Item = &'a str>) -> Vec<Rule> {
    let own = nodes.into_iter().flat_map(|node| Family::ALL.map(|family| slice_name(node, family))).collect();
    let (group, resource, subresource) = ("discovery.k8s.io", "endpointslices", "");
    let kubernetes = || vec!["kubernetes".to_owned()];
    vec![
        Rule { group: "", resource: "services", subresource, names: kubernetes(), verbs: &["get"] },
        Rule { group, resource, subresource, names: kubernetes(), verbs: &["list", "watch"] },
        Rule { group, resource, subresource, names: own, verbs: &["create", "patch", "delete"] },
    ]
}

/// What is allowed on Leases, whose names are not known before.
pub fn on_leases() -> Rule {
    let verbs = &["list", "create", "patch", "delete"];
    Rule { group: "coordination.k8s.io", resource: "leases", subresource: "", names: Vec::new(), verbs }
}

/// That a node's service account gets its own next token.
pub fn on_token(node: &str) -> Rule {
    let names = vec![account_name(node)];
    Rule { group: "", resource: "serviceaccounts", subresource: "token", names, verbs: &["create"] }
}

/// All that a node's shims ask for.
pub fn requests(node: &str) -> Vec<Request> {
    let default = in_default([node]).into_iter().flat_map(|rule| rule.requests(DEFAULT));
    let own = [on_leases(), on_token(node)].into_iter().flat_map(|rule| rule.requests(NAMESPACE));
    default.chain(own).collect()
}

fn role(name: &str, namespace: &str, rules: &[Rule]) -> Value {
    json!({
        "apiVersion": format!("{RBAC}/v1"),
        "kind": "Role",
        "metadata": metadata(name, Some(namespace)),
        "rules": rules.iter().map(Rule::object).collect::<Vec<_>>(),
    })
}

fn binding(node: &str, namespace: &str, role: &str) -> Value {
    json!({
        "apiVersion": format!("{RBAC}/v1"),
        "kind": "RoleBinding",
        "metadata": metadata(&account_name(node), Some(namespace)),
        "roleRef": {"apiGroup": RBAC, "kind": "Role", "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": account_name(node), "namespace": NAMESPACE}],
    })
}

fn metadata(name: &str, namespace: Option<&str>) -> Value {
    let mut metadata = json!({"name": name, "labels": {"app.kubernetes.io/managed-by": "berth"}});
    if let Some(namespace) = namespace {
        metadata["namespace"] = json!(namespace);
    }
    metadata
}

pub fn namespace(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata(name, None)})
}

/// What is a node's alone, the service account first.
pub fn of_node(node: &str) -> Vec<Value> {
    let name = account_name(node);
    let account = json!({
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(&name, Some(NAMESPACE)),
        "automountServiceAccountToken": false,
    });
    vec![
        account,
        role(&name, NAMESPACE, &[on_leases(), on_token(node)]),
        binding(node, NAMESPACE, &name),
        binding(node, DEFAULT, SHARED),
    ]
}

/// The Role that all nodes share.
pub fn shared_role<'a>(nodes: impl IntoIterator<Item = &'a str>) -> Value {
    role(SHARED, DEFAULT, &in_default(nodes))
}

/// The shared Role with one more node, if that is a change. Whatever else was in its rules is no shim's.
pub fn with_node(role: &Value, node: &str) -> Option<Value> {
    let mut nodes = nodes_of(role);
    nodes.insert(node.to_owned());
    let rules = shared_role(nodes.iter().map(String::as_str))["rules"].take();
    (role["rules"] != rules).then(|| {
        let mut role = role.clone();
        role["rules"] = rules;
        role
    })
}

/// The nodes whose slices a Role names.
fn nodes_of(role: &Value) -> BTreeSet<String> {
    let rules = role["rules"].as_array().into_iter().flatten();
    let names = rules.flat_map(|rule| rule["resourceNames"].as_array().into_iter().flatten());
    let node = |name: &Value| {
        let (node, family) = name.as_str()?.strip_prefix("berth-")?.rsplit_once('-')?;
        matches!(family, "ipv4" | "ipv6").then(|| node.to_owned())
    };
    names.filter_map(node).collect()
}

pub fn path(object: &Value) -> String {
    let of = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let metadata = &object["metadata"];
    let (api, kind) = (of(&object["apiVersion"]), of(&object["kind"]).to_ascii_lowercase());
    let root = if api.contains('/') { "/apis" } else { "/api" };
    let namespace = metadata["namespace"].as_str().map(|name| format!("/namespaces/{name}")).unwrap_or_default();
    format!("{root}/{api}{namespace}/{kind}s/{}", of(&metadata["name"]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_cluster::yaml::parse;

    /// What Deployments and DaemonSets get: the kubelet renews their token.
    const IN_CLUSTER: &str = include_str!("../../../../examples/kustomize/cluster/access.yaml");

    #[test]
    fn a_nodes_objects_are_where_they_should_be() {
        let paths: Vec<_> =
            of_node("cp-1").iter().chain([&namespace(NAMESPACE), &shared_role(["cp-1"])]).map(path).collect();
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
        assert_eq!(of_node("cp-1")[0]["automountServiceAccountToken"], false);
        assert_eq!(of_node("cp-1")[3]["subjects"][0]["namespace"], "berth-system");
    }

    #[test]
    fn nothing_but_leases_is_allowed_whatever_its_name() {
        let role = of_node("cp-1")[1].clone();
        let rules = shared_role(["cp-1"])["rules"].as_array().unwrap().clone();
        for rule in rules.iter().chain(role["rules"].as_array().unwrap()) {
            let named = rule["resourceNames"].as_array().is_some_and(|names| !names.is_empty());
            assert!(named || rule["resources"] == json!(["leases"]), "{rule}");
            assert!(!rule.to_string().contains('*'), "{rule}");
        }
        assert_eq!(role["rules"][1]["resources"], json!(["serviceaccounts/token"]));
        assert_eq!(role["rules"][1]["resourceNames"], json!(["berth-cp-1"]));
    }

    #[test]
    fn every_request_is_tried_by_its_name() {
        let said: Vec<_> = requests("cp-1").iter().map(ToString::to_string).collect();
        assert_eq!(said.len(), 14, "{said:#?}");
        for request in [
            "get services/kubernetes in default",
            "watch endpointslices.discovery.k8s.io/kubernetes in default",
            "create endpointslices.discovery.k8s.io/berth-cp-1-ipv6 in default",
            "list leases.coordination.k8s.io in berth-system",
            "create serviceaccounts/berth-cp-1/token in berth-system",
        ] {
            assert!(said.iter().any(|said| said == request), "{request} in {said:#?}");
        }
        let review = requests("cp-1").pop().unwrap().review();
        let asked = json!({"namespace": "berth-system", "group": "", "resource": "serviceaccounts", "subresource": "token",
            "name": "berth-cp-1", "verb": "create"});
        assert_eq!(review["spec"]["resourceAttributes"], asked);
    }

    #[test]
    fn a_node_is_added_once_and_keeps_what_is_not_a_rule() {
        let mut role = shared_role(["cp-2"]);
        role["metadata"]["resourceVersion"] = json!("7");
        role["rules"][0]["verbs"] = json!(["*"]);
        let both = with_node(&role, "cp-1-ipv4").unwrap();
        assert_eq!(both["rules"], shared_role(["cp-1-ipv4", "cp-2"])["rules"]);
        assert_eq!(both["metadata"]["resourceVersion"], "7");
        assert_eq!(with_node(&both, "cp-1-ipv4"), None);
        assert_eq!(with_node(&both, "cp-2"), None);
        let names = &with_node(&json!({}), "cp-1").unwrap()["rules"][2]["resourceNames"];
        assert_eq!(names, &json!(["berth-cp-1-ipv4", "berth-cp-1-ipv6"]));
    }

    #[test]
    fn the_kustomize_component_has_the_same_rules() {
        let documents: Vec<_> = parse(IN_CLUSTER).unwrap().iter().map(berth_cluster::yaml::YamlNode::value).collect();
        let roles = documents.iter().filter(|object| object["kind"] == "Role");
        let rules: Vec<_> = roles.map(|role| (role["metadata"]["namespace"].clone(), role["rules"].clone())).collect();
        let leases = json!([on_leases().object()]);
        assert_eq!(
            rules,
            [(json!(DEFAULT), shared_role(["cp-1"])["rules"].take()), (json!(NAMESPACE), leases)],
            "examples/kustomize/cluster/access.yaml"
        );
        let bindings: Vec<_> = documents.iter().filter(|object| object["kind"] == "RoleBinding").collect();
        assert_eq!(bindings.len(), 2);
        for binding in bindings {
            let account = json!([{"kind": "ServiceAccount", "name": "berth", "namespace": "kube-system"}]);
            assert_eq!((&binding["roleRef"]["name"], &binding["subjects"]), (&json!("berth"), &account));
        }
        assert!(documents.contains(&namespace(NAMESPACE)), "the namespace");
    }
}
