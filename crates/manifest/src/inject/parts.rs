//! Containers, mounts and variables to add to a pod, as values.

use super::{BINARY, Container, INSTALL, NODE_NAME, Problem, SERVICE, SHIM, VOLUMES, YamlNode};
use crate::names::VARIABLES;
use serde_json::{Value, json};

const BIN: &str = VOLUMES[0];
const RUN: &str = VOLUMES[1];
const CLUSTER: &str = VOLUMES[2];

/// Directory of [`BINARY`].
const BIN_DIR: &str = "/opt/berth";

pub(super) fn make_variable(name: &str, value: &str) -> Value {
    json!({"name": name, "value": value})
}

/// A variable from the downward API.
pub(super) fn make_field_variable(name: &str, path: &str) -> Value {
    json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}})
}

/// How long the shim waits for its port, which kube-apiserver itself may hold when berth comes to a
/// node.
fn bind_wait() -> Value {
    make_variable("BERTH_BIND_WAIT", "10m")
}

/// Like [`bind_wait`]. `None` if the operator has added this variable to the shim.
pub(super) fn bind_wait_unless_set(added: &[Value]) -> Option<Value> {
    Some(bind_wait()).filter(|wait| added.iter().all(|other| other["name"] != wait["name"]))
}

/// Variables that the operator added to a shim, and that `berth inject` has no options for.
pub(super) fn added_variables(shim: Container<'_>) -> Result<Vec<Value>, Problem> {
    let words: Vec<_> = shim
        .arguments()
        .into_iter()
        .filter_map(YamlNode::text)
        .collect();
    if words != ["serve"] {
        let message = format!(
            "the shim's command line is {}, which cannot be kept: write its options as variables of the container, such as \
             BERTH_ADMIN for --admin, and leave args: [serve]",
            words.join(" ")
        );
        return Err(Problem::new(shim.node().line, message));
    }
    let all = shim.node().list("env").iter().map(YamlNode::value);
    let own = |name: &str| VARIABLES.contains(&name) || [SERVICE, NODE_NAME].contains(&name);
    Ok(all
        .filter(|one| !one["name"].as_str().is_some_and(own) && *one != bind_wait())
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
        "name": INSTALL,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "args": ["copy-self", BINARY, "--run-dir", run_dir, "--owner", uid.to_string()],
        "resources": make_resources(),
        "securityContext": security,
        "volumeMounts": [{"name": BIN, "mountPath": BIN_DIR}, run_mount(run_dir)],
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
        "name": SHIM,
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

/// Security context with the apiserver's uid, further fields for access to the node's files (group,
/// SELinux label, AppArmor profile), the given capabilities, and nothing else.
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

/// The mounts of the apiserver's container.
pub(super) fn apiserver_mounts(run_dir: &str) -> Vec<Value> {
    vec![
        json!({"name": BIN, "mountPath": BIN_DIR, "readOnly": true}),
        run_mount(run_dir),
    ]
}

pub(super) fn run_mount(run_dir: &str) -> Value {
    json!({"name": RUN, "mountPath": run_dir})
}

/// Mount of a file of the apiserver. From a directory of the node, only the file is mounted, since
/// the shim needs no key of the cluster. Other volumes are mounted as they are, because they are
/// renewed as a whole.
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

/// Mount of the directory with the shim's credentials: the whole directory, since files are renewed
/// by rename, and writable, since the shim renews them.
pub(super) fn cluster_mount(directory: &str) -> Value {
    json!({"name": CLUSTER, "mountPath": directory})
}

/// The volumes of the mounts. `cluster` is the directory of the shim's credentials.
pub(super) fn make_volumes(run_dir: &str, cluster: Option<&str>) -> Vec<Value> {
    let directory =
        |name, path, kind| json!({"name": name, "hostPath": {"path": path, "type": kind}});
    let mut volumes = vec![
        json!({"name": BIN, "emptyDir": {}}),
        directory(RUN, run_dir, "DirectoryOrCreate"),
    ];
    // The directory must exist, because the shim does not start without credentials. The kubelet
    // reports a missing directory more clearly than the shim would.
    volumes.extend(cluster.map(|path| directory(CLUSTER, path, "Directory")));
    volumes
}
