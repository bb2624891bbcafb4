//! Containers, mounts and variables to add to a pod, as values.

use super::{
    BINARY, CLUSTER_VARIABLE, Container, INSTALL_CONTAINER, NODE_NAME_VARIABLE, Problem,
    SHIM_CONTAINER, VOLUMES, YamlNode,
};
use crate::names::VARIABLES;
use serde_json::{Value, json};

const BINARY_VOLUME: &str = VOLUMES[0];
const RUN_VOLUME: &str = VOLUMES[1];
const CLUSTER_VOLUME: &str = VOLUMES[2];

/// Directory of [`BINARY`].
const BIN_DIR: &str = "/opt/berth";

pub(super) fn make_variable(name: &str, value: &str) -> Value {
    json!({"name": name, "value": value})
}

/// A variable from the downward API.
pub(super) fn make_field_variable(name: &str, path: &str) -> Value {
    json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}})
}

/// Makes the variable that says how long the shim waits for its port. When berth comes to a node,
/// kube-apiserver itself may hold the port for a while.
fn make_bind_wait_variable() -> Value {
    make_variable("BERTH_BIND_WAIT", "10m")
}

/// Makes the variable of [`make_bind_wait_variable`]. `None` if the operator has set that variable
/// already.
pub(super) fn make_missing_bind_wait_variable(added: &[Value]) -> Option<Value> {
    Some(make_bind_wait_variable())
        .filter(|wait| added.iter().all(|other| other["name"] != wait["name"]))
}

/// Finds the variables that the operator has added to a shim: those that no option of `berth
/// inject` sets.
pub(super) fn added_variables(shim: Container<'_>) -> Result<Vec<Value>, Problem> {
    let words: Vec<_> = shim
        .arguments()
        .into_iter()
        .filter_map(YamlNode::text)
        .collect();
    if words != ["serve"] {
        let message = format!(
            "the shim's command line is {}, and berth cannot keep these arguments: set args to [serve], and write the shim's options as variables of the container, such as BERTH_ADMIN for --admin",
            words.join(" ")
        );
        return Err(Problem::new(shim.node().line, message));
    }
    let all = shim.node().list("env").iter().map(YamlNode::value);
    let own = |name: &str| {
        VARIABLES.contains(&name) || [CLUSTER_VARIABLE, NODE_NAME_VARIABLE].contains(&name)
    };
    Ok(all
        .filter(|one| !one["name"].as_str().is_some_and(own) && *one != make_bind_wait_variable())
        .collect())
}

/// The init container that copies the binary and makes the run directory.
pub(super) fn make_install_container(
    image: &str,
    run_dir: &str,
    uid: u32,
    label: &[(&str, Value)],
) -> Value {
    // The kubelet makes the directory as root, and only root with this capability can give the
    // directory to another uid.
    let mut security = make_security_context(0, label, if uid == 0 { &[] } else { &["CHOWN"] });
    if uid != 0 {
        security["runAsNonRoot"] = false.into();
    }
    json!({
        "name": INSTALL_CONTAINER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "args": ["copy-self", BINARY, "--run-dir", run_dir, "--owner", uid.to_string()],
        "resources": make_resources(),
        "securityContext": security,
        "volumeMounts": [{"name": BINARY_VOLUME, "mountPath": BIN_DIR}, run_mount(run_dir)],
    })
}

/// The shim: an init container that restarts, started before kube-apiserver and stopped after it.
pub(super) fn make_shim_container(
    image: &str,
    security: &Value,
    variables: &[Value],
    mounts: &[Value],
) -> Value {
    json!({
        "name": SHIM_CONTAINER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "restartPolicy": "Always",
        "args": ["serve"],
        "env": variables,
        "resources": make_resources(),
        "securityContext": security,
        "volumeMounts": mounts,
    })
}

/// Makes a security context with this uid and the given capabilities. `like` has the fields that
/// give access to the node's files: group, SELinux label, AppArmor profile. No other privilege is
/// given.
pub(super) fn make_security_context(
    uid: u32,
    like: &[(&str, Value)],
    capabilities: &[&str],
) -> Value {
    let mut security = json!({
        "allowPrivilegeEscalation": false,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": true,
        "runAsUser": uid,
        "seccompProfile": {"type": "RuntimeDefault"},
    });
    if !capabilities.is_empty() {
        security["capabilities"]["add"] = json!(capabilities);
    }
    for (field, value) in like {
        security[*field] = value.clone();
    }
    security
}

/// Requests like those of other small parts of a control plane, and no limit: a throttled shim
/// would make the apiserver slow.
fn make_resources() -> Value {
    json!({"requests": {"cpu": "100m", "memory": "32Mi"}})
}

/// Makes the mounts that `inject` adds to the apiserver's container.
pub(super) fn apiserver_mounts(run_dir: &str) -> Vec<Value> {
    vec![
        json!({"name": BINARY_VOLUME, "mountPath": BIN_DIR, "readOnly": true}),
        run_mount(run_dir),
    ]
}

pub(super) fn run_mount(run_dir: &str) -> Value {
    json!({"name": RUN_VOLUME, "mountPath": run_dir})
}

/// Makes the shim's mount of one of the apiserver's files. From a directory of the node, only the
/// file is mounted, since the shim needs no key of the cluster. Other volumes are mounted as they
/// are, because they are renewed as a whole.
pub(super) fn file_mount(mount: &Value, file: &str, host_path: bool) -> Value {
    let mut new = mount.clone();
    new["readOnly"] = true.into();
    let directory = mount["mountPath"]
        .as_str()
        .unwrap_or_default()
        .trim_end_matches('/');
    let rest = file
        .strip_prefix(directory)
        .unwrap_or_default()
        .trim_start_matches('/');
    if host_path && !rest.is_empty() && mount.get("subPathExpr").is_none() {
        let within = mount["subPath"]
            .as_str()
            .map(|path| format!("{}/", path.trim_end_matches('/')))
            .unwrap_or_default();
        new["mountPath"] = file.into();
        new["subPath"] = format!("{within}{rest}").into();
    }
    new
}

/// Mounts the directory with the shim's credentials. The whole directory is mounted, since its
/// files are renewed by a rename. It is writable, since the shim renews them.
pub(super) fn cluster_mount(directory: &str) -> Value {
    json!({"name": CLUSTER_VOLUME, "mountPath": directory})
}

/// Makes the volumes that the added mounts need. `cluster` is the directory with the shim's
/// credentials.
pub(super) fn make_volumes(run_dir: &str, cluster: Option<&str>) -> Vec<Value> {
    let directory =
        |name, path, kind| json!({"name": name, "hostPath": {"path": path, "type": kind}});
    let mut volumes = vec![
        json!({"name": BINARY_VOLUME, "emptyDir": {}}),
        directory(RUN_VOLUME, run_dir, "DirectoryOrCreate"),
    ];
    // The directory must exist, because the shim does not start without credentials. The kubelet
    // reports a missing directory more clearly than the shim would.
    volumes.extend(cluster.map(|path| directory(CLUSTER_VOLUME, path, "Directory")));
    volumes
}
