//! A container's specification as its runtime reads it (config.json, <https://github.com/opencontainers/runtime-spec>): what it runs
//! as and what it sees. What is not named here is kept as it is.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Parts of it that the temporary instance's does not have. Hooks and annotations are what the runtime of the node's pods does for a
/// pod, and the others need what belongs to the pod: its host name's namespace, its classes of caches.
const DROPPED: [&str; 4] = ["hooks", "annotations", "hostname", "domainname"];
const DROPPED_LINUX: [&str; 1] = ["intelRdt"];

/// Namespaces that are the node's for a pod with `hostNetwork`, and so for the process that starts the temporary instance.
const NODES: [&str; 2] = ["network", "uts"];

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Spec {
    process: ProcessSpec,
    root: Root,
    #[serde(default)]
    pub mounts: Vec<Mount>,
    linux: Linux,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct ProcessSpec {
    #[serde(default)]
    terminal: bool,
    args: Vec<String>,
    user: User,
    #[serde(rename = "oomScoreAdj", default, skip_serializing_if = "Option::is_none")]
    oom_score_adj: Option<i64>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Root {
    path: PathBuf,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Mount {
    pub destination: PathBuf,
    #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
    kind: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<PathBuf>,
    #[serde(default)]
    options: Vec<String>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Linux {
    #[serde(default)]
    namespaces: Vec<Namespace>,
    #[serde(rename = "cgroupsPath", default, skip_serializing_if = "Option::is_none")]
    cgroups_path: Option<String>,
    #[serde(rename = "mountLabel", default, skip_serializing_if = "Option::is_none")]
    mount_label: Option<String>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Namespace {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    path: Option<PathBuf>,
}

/// How the temporary instance's differs.
#[derive(Debug)]
pub struct Changes<'a> {
    pub args: Vec<String>,
    pub root: &'a Path,
    pub cgroup: &'a str,
    pub oom_score_adj: i16,
    /// Names of resources as in setrlimit(2), and the soft and the hard limit of each: a runtime that is given none passes on its own.
    pub limits: Vec<(String, u64, u64)>,
    /// What is mounted at these places instead.
    pub instead: &'a BTreeMap<PathBuf, Instead>,
    /// Files that are mounted besides, and where.
    pub besides: &'a [(&'a Path, &'a Path)],
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Instead {
    Copy(PathBuf),
    /// Memory, empty.
    Memory,
}

impl Spec {
    /// # Errors
    /// It is none.
    pub fn parse(json: &[u8]) -> serde_json::Result<Self> {
        serde_json::from_slice(json)
    }

    pub fn user(&self) -> &User {
        &self.process.user
    }

    /// SELinux's label of its files.
    pub fn label(&self) -> Option<&str> {
        self.linux.mount_label.as_deref().filter(|label| !label.is_empty())
    }

    pub fn has_namespace(&self, kind: &str) -> bool {
        self.linux.namespaces.iter().any(|namespace| namespace.kind == kind)
    }

    /// The mount of a directory or file of the node that a path in the container is in, and where on the node that is.
    pub fn on_node(&self, path: &Path) -> Option<(&Mount, PathBuf)> {
        let binds = self.mounts.iter().filter(|mount| mount.is_bind() && path.starts_with(&mount.destination));
        let mount = binds.max_by_key(|mount| mount.destination.components().count())?;
        let (source, within) = (mount.source.as_ref()?, path.strip_prefix(&mount.destination).ok()?);
        Some((mount, if within == Path::new("") { source.clone() } else { source.join(within) }))
    }

    #[must_use]
    pub fn changed(mut self, changes: Changes<'_>) -> Self {
        self.rest.retain(|key, _| !DROPPED.contains(&key.as_str()));
        self.linux.rest.retain(|key, _| !DROPPED_LINUX.contains(&key.as_str()));
        self.process.terminal = false;
        self.process.args = changes.args;
        self.process.oom_score_adj = Some(changes.oom_score_adj.into());
        let limits =
            changes.limits.into_iter().map(|(kind, soft, hard)| json!({"type": kind, "soft": soft, "hard": hard}));
        self.process.rest.insert("rlimits".into(), limits.collect());
        self.root.path = changes.root.to_owned();
        self.linux.cgroups_path = Some(changes.cgroup.to_owned());
        self.linux.forget_shares();
        self.linux.namespaces.retain(|namespace| !NODES.contains(&namespace.kind.as_str()));
        // The others are new ones, not those that the containers of the pod share.
        self.linux.namespaces.iter_mut().for_each(|namespace| namespace.path = None);
        for mount in &mut self.mounts {
            match changes.instead.get(&mount.destination) {
                Some(Instead::Copy(copy)) => mount.source = Some(copy.clone()),
                Some(Instead::Memory) => *mount = Mount::memory(mount.destination.clone()),
                None => {}
            }
        }
        self.mounts.extend(changes.besides.iter().map(|(source, destination)| Mount::of_file(source, destination)));
        self
    }
}

impl Linux {
    /// A pod's share of the CPUs is one among pods. In a cgroup next to those of all pods and of all services, it would be so
    /// small that a busy node starves it.
    fn forget_shares(&mut self) {
        let Some(resources) = self.rest.get_mut("resources") else { return };
        for (part, share) in [("cpu", "shares"), ("unified", "cpu.weight")] {
            if let Some(part) = resources.get_mut(part).and_then(Value::as_object_mut) {
                part.remove(share);
            }
        }
    }
}

impl Mount {
    /// Whether it is a directory or file of the node.
    pub fn is_bind(&self) -> bool {
        self.kind.as_deref() == Some("bind") || self.has("bind") || self.has("rbind")
    }

    pub fn is_read_only(&self) -> bool {
        self.has("ro") || self.has("rro")
    }

    fn has(&self, option: &str) -> bool {
        self.options.iter().any(|other| other == option)
    }

    fn memory(destination: PathBuf) -> Self {
        let options = ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"];
        Self {
            destination,
            kind: Some("tmpfs".into()),
            source: Some("tmpfs".into()),
            options: options.map(str::to_owned).into(),
            rest: Map::new(),
        }
    }

    fn of_file(source: &Path, destination: &Path) -> Self {
        Self {
            destination: destination.to_owned(),
            kind: Some("bind".into()),
            source: Some(source.to_owned()),
            options: ["bind", "rprivate", "rw"].map(str::to_owned).into(),
            rest: Map::new(),
        }
    }
}
