//! The fields of a manifest that an upgrade needs, and variants of the manifest: the temporary pod,
//! and an emulated release.

use berth_cluster::yaml::YamlNode;
use berth_doctor::{ShimOf, find_shim};
use berth_manifest::edit::{Change, Edit, apply_edits};
use berth_manifest::names::VOLUMES;
use berth_manifest::{Manifest, Problem, basename};
use berth_node::instance_id::InstanceId;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

/// Prefix of the temporary pod's name and file name.
pub const TEMPORARY_PREFIX: &str = "berth-";

/// The kubelet's default grace period.
const DEFAULT_GRACE_SECONDS: u64 = 30;

/// The flag with which kube-apiserver behaves as an older release.
pub const EMULATION_FLAG: &str = "emulated-version";

/// Each read of this file returns a new random UUID; see random(4).
const UUID_PATH: &str = "/proc/sys/kernel/random/uuid";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiserverPod {
    pub namespace: String,
    /// The pod's name, without the node's.
    pub name: String,
    /// Name of the apiserver's container.
    pub container: String,
    pub image: String,
    /// True if `berth exec` starts the apiserver.
    pub behind: bool,
    /// True if the instance's ID is the pod's UID.
    pub by_uid: bool,
    /// The shim's listen addresses, as written in the manifest.
    pub listen: Option<String>,
    /// The pod's shim, and how the shim trusts the apiserver.
    pub shim: ShimOf,
    /// The run directory on the node.
    pub run_dir: Option<PathBuf>,
    /// Time from SIGTERM to SIGKILL.
    pub grace: Duration,
}

impl ApiserverPod {
    /// Reads the fields from a manifest.
    ///
    /// # Errors
    /// The manifest is no static pod.
    pub fn from_manifest(manifest: &Manifest) -> Result<Self, Problem> {
        let text = |node: Option<&YamlNode>| node.and_then(YamlNode::text).map(ToOwned::to_owned);
        let root = manifest.root();
        if manifest.kind() != "Pod" {
            let kind = manifest.kind();
            return Err(Problem::new(
                root.line,
                format!(
                    "kind: {kind}: the kubelet runs Pods from its directory, and no other kind"
                ),
            ));
        }
        manifest.secure_port()?;
        let name = text(root.find_path(&["metadata", "name"]));
        let name = name.ok_or_else(|| {
            Problem::new(root.line, "metadata.name is missing: give the pod a name")
        })?;
        let (spec, apiserver) = (manifest.pod(), manifest.apiserver());
        let variable = |name: &str| {
            apiserver
                .get("env")
                .and_then(|env| env.find_named(name))
                .map(|(_, variable)| variable)
        };
        let program = manifest
            .arguments()
            .first()
            .and_then(|program| program.text())
            .unwrap_or_default();
        let by_uid = variable("BERTH_INSTANCE")
            .and_then(|it| it.find_path(&["valueFrom", "fieldRef", "fieldPath"]));
        let volume = spec
            .get("volumes")
            .and_then(|all| all.find_named(VOLUMES[1]))
            .map(|(_, volume)| volume);
        let grace = spec
            .get("terminationGracePeriodSeconds")
            .and_then(YamlNode::number);
        Ok(Self {
            namespace: text(root.find_path(&["metadata", "namespace"]))
                .unwrap_or_else(|| "default".into()),
            name,
            container: text(apiserver.get("name")).unwrap_or_default(),
            image: text(apiserver.get("image")).unwrap_or_default(),
            behind: basename(program) == "berth",
            by_uid: text(by_uid).as_deref() == Some("metadata.uid"),
            listen: text(variable("BERTH_LISTEN").and_then(|listen| listen.get("value"))),
            shim: find_shim(manifest),
            run_dir: text(volume.and_then(|volume| volume.find_path(&["hostPath", "path"])))
                .map(PathBuf::from),
            grace: Duration::from_secs(grace.unwrap_or(DEFAULT_GRACE_SECONDS)),
        })
    }
}

/// Makes the temporary pod's manifest: the same pod under another name, and with the given UID.
///
/// # Errors
/// The manifest is written in a way that cannot be edited.
pub fn make_temporary(manifest: &Manifest, uid: &InstanceId) -> Result<String, Problem> {
    let metadata = manifest.template_path().key("metadata");
    let name = manifest
        .root()
        .find_path(&["metadata", "name"])
        .and_then(YamlNode::text)
        .unwrap_or_default();
    let set = |key: &str, value: String, reason: &str| Edit {
        path: metadata.key(key),
        change: Change::Set(value.into()),
        reason: reason.into(),
        comment: false,
    };
    let mut edits = vec![
        set(
            "name",
            format!("{TEMPORARY_PREFIX}{name}"),
            "the kubelet runs only one pod of a name",
        ),
        set(
            "uid",
            uid.to_string(),
            "the UID names the instance of this pod",
        ),
    ];
    let component = manifest
        .template()
        .find_path(&["metadata", "labels", "component"])
        .and_then(YamlNode::text);
    edits.extend(component.map(|component| Edit {
        path: metadata.key("labels").key("component"),
        change: Change::Set(format!("{TEMPORARY_PREFIX}{component}").into()),
        reason: "kubeadm takes each pod with this label for the node's only kube-apiserver".into(),
        comment: false,
    }));
    apply_edits(manifest.text(), manifest.document_index(), &edits)
}

/// Makes a manifest in which kube-apiserver emulates another release.
///
/// # Errors
/// The manifest is written in a way that cannot be edited.
pub fn add_emulation(manifest: &Manifest, release: &str) -> Result<String, Problem> {
    let key = if manifest.apiserver().get("args").is_some() {
        "args"
    } else {
        "command"
    };
    let edit = Edit {
        path: manifest.apiserver_path().key(key),
        change: Change::Append(vec![format!("--{EMULATION_FLAG}={release}").into()]),
        reason: "both instances serve the same APIs, and store what the old instance reads".into(),
        comment: false,
    };
    apply_edits(manifest.text(), manifest.document_index(), &[edit])
}

/// Draws a new random UID for a pod.
///
/// # Errors
/// The kernel's UUID cannot be read.
pub fn draw_uid() -> Result<InstanceId, String> {
    let uid = fs::read_to_string(UUID_PATH)
        .map_err(|error| format!("cannot read {UUID_PATH}: {error}: is /proc mounted?"))?;
    InstanceId::parse(uid.trim_end()).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_manifest::inject::{InjectOptions, inject};

    const KUBEADM: &str = include_str!("../../../tests/data/manifest/kubeadm-v1.36.yaml");

    fn injected_manifest() -> String {
        let options = InjectOptions {
            image: "registry.example/berth:v0.1.0".into(),
            run_dir: "/run/other".into(),
            ..InjectOptions::default()
        };
        inject(KUBEADM, &options).unwrap().text
    }

    #[test]
    fn the_fields_are_found_in_an_injected_manifest() {
        let plain = ApiserverPod::from_manifest(&Manifest::parse(KUBEADM).unwrap()).unwrap();
        assert!(!plain.behind && !plain.by_uid && plain.run_dir.is_none());
        assert_eq!(
            (plain.namespace.as_str(), plain.name.as_str()),
            ("kube-system", "kube-apiserver")
        );
        assert_eq!(plain.grace, Duration::from_secs(30));
        let pod =
            ApiserverPod::from_manifest(&Manifest::parse(&injected_manifest()).unwrap()).unwrap();
        assert!(pod.behind && pod.by_uid);
        assert_eq!(
            (pod.listen.as_deref(), pod.run_dir),
            (Some("10.0.0.5:6443"), Some("/run/other".into()))
        );
        assert_eq!(pod.grace, Duration::from_secs(120));
        let deployment =
            Manifest::parse(include_str!("../../../tests/data/manifest/deployment.yaml")).unwrap();
        assert!(
            ApiserverPod::from_manifest(&deployment)
                .unwrap_err()
                .message
                .starts_with("kind: Deployment: the kubelet runs Pods")
        );
    }

    #[test]
    fn a_pod_that_emulates_differs_in_the_flag_alone() {
        let text = injected_manifest();
        let emulating = add_emulation(&Manifest::parse(&text).unwrap(), "1.35").unwrap();
        let changed: Vec<_> = emulating
            .lines()
            .filter(|line| !text.contains(line))
            .collect();
        assert_eq!(changed, ["    - --emulated-version=1.35"]);
        assert_eq!(emulating.lines().count(), text.lines().count() + 1);
        let flag = Manifest::parse(&emulating)
            .unwrap()
            .flag(EMULATION_FLAG)
            .map(|flag| flag.value.to_owned());
        assert_eq!(flag.as_deref(), Some("1.35"));
    }

    #[test]
    fn the_temporary_pod_differs_in_name_uid_and_label_alone() {
        let text = injected_manifest();
        assert_eq!(draw_uid().unwrap().to_string().len(), 36);
        assert_ne!(draw_uid().unwrap(), draw_uid().unwrap());
        // A UID that YAML could read as a number, such as 0b…, would be quoted.
        let uid = "c1a5d5a2-93ae-4a2a-a5ba-2d1c8a3ff86a".parse().unwrap();
        let temporary = make_temporary(&Manifest::parse(&text).unwrap(), &uid).unwrap();
        let changed: Vec<_> = temporary
            .lines()
            .filter(|line| !text.contains(line))
            .collect();
        assert_eq!(
            changed,
            [
                "    component: berth-kube-apiserver",
                "  name: berth-kube-apiserver",
                &format!("  uid: {uid}")
            ]
        );
        assert_eq!(temporary.lines().count(), text.lines().count() + 1);
    }
}
