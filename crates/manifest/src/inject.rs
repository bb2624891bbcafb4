//! The edits that put a kube-apiserver's manifest behind berth. `docs/for-good.md` lists the edits
//! and their reasons; this module computes them.

mod addresses;
mod flags;
mod lapses;
mod parts;
mod probes;

use super::edit::{Change, Edit, Path, apply_edits};
use super::eject::{ORIGINAL_ANNOTATION, Original, undo_injection};
use super::names::{
    BINARY, INSTALL_CONTAINER, MIN_PROBE_SECONDS, PASS_VARIABLE, PROBES, SHIM_CONTAINER, VARIABLES,
    VOLUMES,
};
use super::pod::basename;
use super::{Container, Manifest, Problem};
use berth_cluster::yaml::YamlNode;
use berth_shim::config::{Listen, PassMode};
use serde_json::Value;

pub use addresses::find_loopback;
pub use lapses::{Lapse, Wrapping, find_lapses};

/// Variables that only the shim gets, from options of `berth inject`.
const CLUSTER_VARIABLE: &str = "BERTH_CLUSTER";
const NODE_NAME_VARIABLE: &str = "BERTH_NODE_NAME";

/// The first Kubernetes version with native sidecars (`restartPolicy: Always` in init containers).
const SIDECAR_RELEASE: (u64, u64) = (1, 29);

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Addresses {
    /// The address that the manifest names for kube-apiserver or, if there is none, the node's
    /// address.
    #[default]
    OfManifest,
    /// The given addresses. The first address names the berth.
    Given(Vec<Listen>),
}

/// How the apiserver is probed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Probing {
    /// Variables of berth for the probe, such as `BERTH_PROBE_CA`.
    pub variables: Vec<(&'static str, String)>,
    /// Files in the apiserver's container that the probe needs.
    pub files: Vec<String>,
    /// True if the probe has a CA, or trusts every certificate.
    pub trusts: bool,
    /// True if the probe authenticates itself to kube-apiserver.
    pub credentials: bool,
}

/// Options of `berth inject`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct InjectOptions {
    /// Image with berth as its entrypoint.
    pub image: String,
    /// The directory where the node's shims and instances meet. Its path in the containers is the
    /// same as on the node.
    pub run_dir: String,
    pub addresses: Addresses,
    pub probing: Probing,
    /// Path of the kubeconfig with which the shim keeps the node in the Service `kubernetes`. A pod
    /// that is not static uses its service account instead.
    pub service: Option<String>,
    /// Whether the shim relays the clients' bytes, or passes their sockets to kube-apiserver.
    pub pass: PassMode,
    /// Further variables of the shim, added by the operator.
    pub added: Vec<Value>,
}

/// The result of an injection.
#[derive(Debug)]
pub struct Injection {
    /// The text that the edits are made in: the manifest as it was before any injection.
    pub base: String,
    pub text: String,
    /// The parsed `text`.
    pub manifest: Manifest,
    pub edits: Vec<Edit>,
    /// Hints for the operator.
    pub notes: Vec<String>,
    /// The options that were applied. Two things are kept from an earlier injection: variables that
    /// were added to the shim, and the shim's addresses if the given options name none.
    pub options: InjectOptions,
}

/// Puts the kube-apiserver of a file behind berth. A manifest that is already behind berth is
/// regenerated with these options, and keeps its addresses if the options name none. If nothing
/// changes, the file stays the same, byte for byte.
///
/// # Errors
/// Every reason why the manifest cannot be put behind berth.
pub fn inject(text: &str, options: &InjectOptions) -> Result<Injection, Vec<Problem>> {
    inject_with_backup(text, None, options)
}

/// Like [`inject`], but the text before an earlier injection may come from a backup.
///
/// # Errors
/// As for [`inject`].
pub fn inject_with_backup(
    text: &str,
    backup: Option<String>,
    options: &InjectOptions,
) -> Result<Injection, Vec<Problem>> {
    let one = |problem| vec![problem];
    let found = Manifest::parse(text).map_err(one)?;
    let again = found.annotation(ORIGINAL_ANNOTATION).is_some();
    let base = match backup {
        Some(backup) if again => backup,
        _ if again => undo_injection(&found).map_err(one)?.text,
        _ => text.to_owned(),
    };
    let mut options = options.clone();
    if again && options.addresses == Addresses::OfManifest {
        options.addresses = addresses::inherit_addresses(&found).map_err(one)?;
    }
    let before = find_shim(&found).filter(|_| again);
    options.added = before
        .map_or(Ok(Vec::new()), parts::added_variables)
        .map_err(one)?;
    let manifest = Manifest::parse(&base).map_err(one)?;
    let (edits, mut notes) = plan_edits(&manifest, &options)?;
    let had = |name: &str| find_shim(&found).is_some_and(|shim| shim.variable(name).is_some());
    if options.service.is_none() && had(CLUSTER_VARIABLE) {
        notes.push(
            "without --service the shim does not keep the Service kubernetes any more".into(),
        );
    }
    if options.pass == PassMode::Relay && had(PASS_VARIABLE) {
        notes.push("without --pass the shim relays every connection again".into());
    }
    let new = apply_edits(&base, manifest.document_index(), &edits).map_err(one)?;
    let result = Manifest::parse(&new).map_err(one)?;
    if again && found.root().value() == result.root().value() {
        return Ok(Injection {
            base,
            text: text.to_owned(),
            manifest: found,
            edits: Vec::new(),
            notes,
            options,
        });
    }
    let fields = |manifest| find_shim(manifest).map(|shim| shim.node().value());
    if let (Some(Value::Object(was)), Some(now), true) = (fields(&found), fields(&result), again) {
        for (name, _) in was
            .iter()
            .filter(|(name, was)| !OPTIONAL_FIELDS.contains(&name.as_str()) && now[*name] != **was)
        {
            notes.push(format!(
                "berth inject has reset {name} of the container {SHIM_CONTAINER}: change it again"
            ));
        }
    }
    Ok(Injection {
        base,
        text: new,
        manifest: result,
        edits,
        notes,
        options,
    })
}

/// Fields of the shim's container that follow from options, or that a new injection keeps. If a new
/// injection resets a change to any other field, a note says so.
const OPTIONAL_FIELDS: [&str; 5] = ["image", "args", "env", "volumeMounts", "securityContext"];

/// Plans the edits that put a manifest behind berth, and the hints for the operator.
///
/// # Errors
/// Every reason why the manifest cannot be put behind berth.
pub fn plan_edits(
    manifest: &Manifest,
    options: &InjectOptions,
) -> Result<(Vec<Edit>, Vec<String>), Vec<Problem>> {
    let mut planner = Planner::new(manifest, options, Wrapping::default());
    planner.plan_injection();
    if planner.problems.is_empty() {
        Ok((planner.edits, planner.notes))
    } else {
        Err(planner.problems)
    }
}

/// Finds the shim's container that an earlier injection has added.
fn find_shim(manifest: &Manifest) -> Option<Container<'_>> {
    let all = manifest
        .containers("initContainers")
        .chain(manifest.containers("containers"));
    all.into_iter()
        .find(|container| container.name() == SHIM_CONTAINER)
}

struct Planner<'a> {
    manifest: &'a Manifest,
    options: &'a InjectOptions,
    wrapping: Wrapping<'a>,
    /// Path of the apiserver's container.
    container: Path,
    edits: Vec<Edit>,
    notes: Vec<String>,
    problems: Vec<Problem>,
    original: Original,
}

impl<'a> Planner<'a> {
    fn new(manifest: &'a Manifest, options: &'a InjectOptions, wrapping: Wrapping<'a>) -> Self {
        Self {
            manifest,
            options,
            wrapping,
            container: manifest.apiserver_path(),
            edits: Vec::new(),
            notes: Vec::new(),
            problems: Vec::new(),
            original: Original::default(),
        }
    }

    fn plan_injection(&mut self) {
        self.check_host_network();
        self.check_supported();
        self.check_sidecar_support();
        self.check_rollout();
        let port = self
            .record_problem(self.manifest.secure_port())
            .unwrap_or(6443);
        let ca = self.find_ca();
        let (listen, variables) = self.find_addresses_and_shared_variables(port, ca);
        let uid = self.find_uid();
        let pod = self.manifest.pod_path();

        let wrapped = [self.wrapping.binary, "exec", "--"]
            .map(Value::from)
            .to_vec();
        self.add_edit(
            self.container.key("command"),
            Change::Prepend(wrapped),
            "kube-apiserver is started by berth exec, with a 127.x address of its own",
        );
        for flag in flags::PER_INSTANCE_PATHS {
            self.make_flag_path_unique(flag);
        }
        self.add_audit_log_note();
        let (delay, watches) = (self.set_shutdown_delay(), self.set_watch_grace());
        self.add_items(
            self.container.key("env"),
            variables.clone(),
            "berth exec, the probes and the preStop hook need these variables",
        );
        self.add_items(
            self.container.key("volumeMounts"),
            parts::apiserver_mounts(&self.options.run_dir),
            "the binary, and the directory where the shims of the node meet",
        );
        for probe in PROBES {
            self.replace_probe(probe, port);
            let foreign = self
                .check_probe_of_other_server(probe, port)
                .map(|problem| problem.message);
            self.notes.extend(foreign);
        }
        self.add_readiness();
        self.remove_ports();
        self.notes.extend(
            self.problems_of_other_containers()
                .into_iter()
                .map(|other| other.message),
        );
        self.add_pre_stop();
        self.raise_grace_period(delay, watches);

        self.check_anonymous();
        let mut mounts = vec![parts::run_mount(&self.options.run_dir)];
        for file in ca
            .into_iter()
            .chain(self.options.probing.files.iter().map(String::as_str))
        {
            mounts.extend(self.add_mount(file).filter(|mount| !mounts.contains(mount)));
        }
        let mut of_shim = variables;
        let cluster = self.add_cluster_variables(&mut of_shim);
        mounts.extend(cluster.map(parts::cluster_mount));
        let image = &self.options.image;
        let low = listen.iter().any(|address| address.port() < 1024);
        let capabilities: &[&str] = if low { &["NET_BIND_SERVICE"] } else { &[] };
        of_shim.extend(parts::make_missing_bind_wait_variable(&self.options.added));
        of_shim.extend(self.options.added.iter().cloned());
        let container = self.manifest.container();
        let group = container
            .security_field("runAsGroup")
            .map(|group| ("runAsGroup", group.value()));
        // The pod's securityContext applies to the added containers anyway, so only the container's
        // own fields are copied.
        let own = |field| {
            Some((
                field,
                container
                    .node()
                    .find_path(&["securityContext", field])?
                    .value(),
            ))
        };
        let label: Vec<_> = ["seLinuxOptions", "appArmorProfile"]
            .into_iter()
            .filter_map(own)
            .collect();
        let like: Vec<_> = label.iter().cloned().chain(group).collect();
        let shim = parts::make_shim_container(
            image,
            &parts::make_security_context(uid, &like, capabilities),
            &of_shim,
            &mounts,
        );
        self.add_edit(
            pod.key("initContainers"),
            Change::Append(vec![parts::make_install_container(image, &self.options.run_dir, uid, &label), shim]),
            "berth-install copies the binary and makes the run directory; berth is the shim, which is stopped after kube-apiserver",
        );
        let volumes = parts::make_volumes(&self.options.run_dir, cluster);
        let reason = match cluster {
            Some(_) => {
                "for the binary, the run directory and the shim's credentials in the cluster"
            }
            None => "for the binary and the run directory",
        };
        self.add_items(pod.key("volumes"), volumes, reason);
        let annotations = self
            .manifest
            .template_path()
            .key("metadata")
            .key("annotations");
        let original = Value::from(self.original.to_string());
        self.add_edit(
            annotations.key(ORIGINAL_ANNOTATION),
            Change::Set(original),
            "the original values, for berth eject",
        );
    }

    /// Adds the variables with which the shim keeps the Service `kubernetes`. Returns the directory
    /// of the shim's credentials, if any are needed.
    fn add_cluster_variables(&mut self, variables: &mut Vec<Value>) -> Option<&'a str> {
        let kubeconfig = self.options.service.as_deref()?;
        let is_static = self.manifest.kind() == "Pod";
        let cluster = if is_static { kubeconfig } else { "in-cluster" };
        variables.push(parts::make_variable(CLUSTER_VARIABLE, cluster));
        variables.push(parts::make_field_variable(
            NODE_NAME_VARIABLE,
            "spec.nodeName",
        ));
        if !is_static {
            self.notes.push(
                "--service: the pod's service account needs the Roles of berth; see docs/for-good.md#the-service-kubernetes"
                    .into(),
            );
            return None;
        }
        kubeconfig.rsplit_once('/').map(|(directory, _)| directory)
    }

    /// Adds items to a list in which each item has a name. In a manifest of kubeadm, the items go
    /// to the beginning, where kubeadm's patches put them; otherwise to the end.
    fn add_items(&mut self, path: Path, values: Vec<Value>, reason: &str) {
        let change = if self.manifest.is_kubeadm() {
            Change::Prepend(values)
        } else {
            Change::Append(values)
        };
        self.add_edit(path, change, reason);
    }

    fn add_edit(&mut self, path: Path, change: Change, reason: impl Into<String>) {
        self.edits.push(Edit {
            path,
            change,
            reason: reason.into(),
            comment: false,
        });
    }

    fn add_problem(&mut self, line: usize, message: impl Into<String>) {
        self.problems.push(Problem::new(line, message));
    }

    fn record_problem<T>(&mut self, result: Result<T, Problem>) -> Option<T> {
        result.map_err(|problem| self.problems.push(problem)).ok()
    }

    fn check_host_network(&mut self) {
        let pod = self.manifest.pod();
        if !pod.is_true("hostNetwork") {
            self.add_problem(
                pod.line,
                "hostNetwork is not true, so the pod has no address of the node to share: set hostNetwork to true",
            );
        }
    }

    /// Rejects manifests that cannot be put behind berth.
    fn check_supported(&mut self) {
        let (pod, container) = (self.manifest.pod(), self.manifest.apiserver());
        let program = self
            .manifest
            .arguments()
            .first()
            .and_then(|program| program.text())
            .unwrap_or_default();
        if basename(program) == "berth" {
            self.add_problem(
                container.line,
                "kube-apiserver is behind berth already, but berth inject did not write this manifest: remove berth from the manifest by hand first",
            );
        }
        for (parent, list, names) in [
            (pod, "containers", &[SHIM_CONTAINER][..]),
            (pod, "initContainers", &[SHIM_CONTAINER, INSTALL_CONTAINER]),
            (pod, "volumes", &VOLUMES),
            (container, "env", &VARIABLES),
        ] {
            for name in names {
                if let Some((_, there)) = parent.get(list).and_then(|list| list.find_named(name)) {
                    self.add_problem(
                        there.line,
                        format!("{name} is in {list} already, and berth needs the name: rename or remove that entry"),
                    );
                }
            }
        }
    }

    /// Finds problems with the pod's other containers. During an upgrade, each of them runs twice.
    fn problems_of_other_containers(&self) -> Vec<Problem> {
        let other = |container: Container<'_>| {
            let cause = format!(
                "{} runs twice during an upgrade, and two copies cannot share a fixed port or a socket in a hostPath",
                container.name()
            );
            Problem::new(
                container.node().line,
                format!(
                    "{cause}: give that container a pod of its own, or check that two copies can run"
                ),
            )
        };
        self.manifest.other_containers().map(other).collect()
    }

    /// Checks that Kubernetes is new enough for native sidecars.
    fn check_sidecar_support(&mut self) {
        if let Some((major, minor)) = self
            .manifest
            .version()
            .filter(|version| *version < SIDECAR_RELEASE)
        {
            let line = self.manifest.line_of(&self.container.key("image"));
            self.add_problem(
                line,
                format!(
                    "kube-apiserver is v{major}.{minor}: Kubernetes before v1.29 ignores restartPolicy of an init container, so kube-apiserver would wait for the shim to end and never start: upgrade kube-apiserver first"
                ),
            );
        }
        if self.manifest.version().is_none() {
            let image = self.manifest.image();
            self.notes.push(format!(
                "the image {image} names no version of kube-apiserver; below v1.29 kube-apiserver would never start behind berth"
            ));
        }
    }

    /// Checks that an update of the pod starts the new pod first.
    fn check_rollout(&mut self) {
        let spec = self.manifest.root().get("spec");
        let at = |keys: &[&str]| {
            spec.and_then(|spec| spec.find_path(keys))
                .map(YamlNode::value)
        };
        let notes = &mut self.notes;
        match self.manifest.kind() {
            "Deployment" => {
                let unavailable = at(&["strategy", "rollingUpdate", "maxUnavailable"]);
                if at(&["strategy", "type"]) == Some("Recreate".into())
                    || unavailable.is_some_and(|it| it != 0 && it != "0%")
                {
                    notes.push("an update stops the old pod before the new one is ready: set strategy.rollingUpdate.maxUnavailable: 0".into());
                }
            }
            "DaemonSet"
                if at(&["updateStrategy", "rollingUpdate", "maxSurge"])
                    .is_none_or(|it| it == 0) =>
            {
                notes.push("an update stops the old pod before it starts the new one: set updateStrategy.rollingUpdate.maxSurge: 1 and maxUnavailable: 0".into());
            }
            _ => {}
        }
    }

    fn find_uid(&mut self) -> u32 {
        let Some(user) = self.manifest.container().security_field("runAsUser") else {
            if let Some(rule) = self
                .manifest
                .container()
                .security_field("runAsNonRoot")
                .filter(|rule| rule.value() == true)
            {
                self.add_problem(
                    rule.line,
                    "runAsNonRoot without runAsUser: the shim must run with kube-apiserver's uid, so set runAsUser",
                );
            }
            return 0;
        };
        let uid = user.number().and_then(|uid| u32::try_from(uid).ok());
        uid.unwrap_or_else(|| {
            self.add_problem(user.line, "runAsUser is no uid: give a number");
            0
        })
    }

    /// Removes declared ports. With hostNetwork, each declared port is a port of the node, and the
    /// kubelet refuses a second pod that declares it.
    fn remove_ports(&mut self) {
        let apiserver = self.manifest.container().name();
        for container in self
            .manifest
            .long_running_containers()
            .filter(|container| container.name() != apiserver)
        {
            let ports = container.node().list("ports");
            let numbers = ports
                .iter()
                .filter_map(|port| port.get_text("hostPort").or(port.get_text("containerPort")));
            let numbers = numbers.collect::<Vec<_>>().join(", ");
            if let Some(first) = ports.first() {
                let cause = format!(
                    "{} declares the port {numbers}, and the kubelet refuses a second pod with that port",
                    container.name()
                );
                let fix = "remove ports from that container, which needs no declared port in the node's network";
                self.add_problem(first.line, format!("{cause}: {fix}"));
            }
        }
        let Some(ports) = self.manifest.apiserver().get("ports") else {
            return;
        };
        self.original.fields.insert("ports".into(), ports.value());
        self.edits.push(Edit {
            path: self.container.key("ports"),
            change: Change::Remove,
            reason:
                "with hostNetwork each declared port is a hostPort too, and the second pod would stay Pending"
                    .into(),
            // kubeadm writes no comments, and its next upgrade would see a comment as a change.
            comment: !self.manifest.is_kubeadm(),
        });
    }
}

#[cfg(test)]
mod tests;
