//! The specification of a container, as its runtime reads it (config.json,
//! <https://github.com/opencontainers/runtime-spec>): user, limits, mounts and namespaces. Parts
//! that are not named here stay unchanged.

use serde::Deserialize;
use serde::de::Error as _;
use serde_json::{Value, json, to_value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Parts that the temporary instance's specification lacks, each with its parent object. Hooks and
/// annotations belong to the runtime that manages the node's pods, and some parts need resources of
/// the pod: the namespace of its host name, its cache classes. A pod's CPU share only counts among
/// pods: in a cgroup next to those of all pods and of all services, the share would be so small
/// that a busy node starves the instance.
const DROPPED_FIELDS: [(&str, &str); 7] = [
    ("", "hooks"),
    ("", "annotations"),
    ("", "hostname"),
    ("", "domainname"),
    ("/linux", "intelRdt"),
    ("/linux/resources/cpu", "shares"),
    ("/linux/resources/unified", "cpu.weight"),
];

/// Namespaces that a pod with `hostNetwork` shares with the node, and so with the process that
/// starts the temporary instance.
const SHARED: [&str; 2] = ["network", "uts"];

#[derive(Debug, Clone, PartialEq)]
pub struct Spec {
    whole: Value,
    pub mounts: Vec<Mount>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Mount {
    pub destination: PathBuf,
    #[serde(rename = "type")]
    kind: Option<String>,
    pub source: Option<PathBuf>,
    #[serde(default)]
    options: Vec<String>,
}

/// Changes for the temporary instance's specification.
#[derive(Debug)]
pub struct Changes<'a> {
    pub args: Vec<String>,
    pub root: &'a Path,
    pub cgroup: &'a str,
    pub oom_score_adj: i16,
    /// Names of resources as in setrlimit(2), and the soft and the hard limit of each: without
    /// limits in the specification, the container gets the limits of the runtime's own process.
    pub limits: Vec<(String, u64, u64)>,
    /// Replacements for the mounts at the given places.
    pub replacements: &'a BTreeMap<PathBuf, Replacement>,
    /// Additional files to be mounted, and their places.
    pub extra_mounts: &'a [(&'a Path, &'a Path)],
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Replacement {
    Copy(PathBuf),
    /// Empty memory.
    Memory,
}

impl Spec {
    /// # Errors
    /// The bytes are not a container's specification.
    pub fn parse(json: &[u8]) -> serde_json::Result<Self> {
        let whole: Value = serde_json::from_slice(json)?;
        if !["process", "root", "linux"]
            .iter()
            .all(|part| whole[part].is_object())
        {
            return Err(serde_json::Error::custom(
                "the file is no specification of a container",
            ));
        }
        Ok(Self {
            mounts: Vec::deserialize(&whole["mounts"])?,
            whole,
        })
    }

    /// The `uid` or the `gid` of the container's process.
    pub fn find_uid_or_gid(&self, id: &str) -> Option<u32> {
        self.whole["process"]["user"][id].as_u64()?.try_into().ok()
    }

    /// SELinux label of the container's files.
    pub fn selinux_label(&self) -> Option<&str> {
        self.whole["linux"]["mountLabel"]
            .as_str()
            .filter(|label| !label.is_empty())
    }

    pub fn has_namespace(&self, kind: &str) -> bool {
        let all = self.whole["linux"]["namespaces"].as_array();
        all.is_some_and(|all| all.iter().any(|namespace| namespace["type"] == kind))
    }

    /// The bind mount that contains a path of the container, and the path on the node.
    pub fn find_mounted_path(&self, path: &Path) -> Option<(&Mount, PathBuf)> {
        let binds = self
            .mounts
            .iter()
            .filter(|mount| mount.is_bind() && path.starts_with(&mount.destination));
        let mount = binds.max_by_key(|mount| mount.destination.components().count())?;
        let (source, within) = (
            mount.source.as_ref()?,
            path.strip_prefix(&mount.destination).ok()?,
        );
        Some((
            mount,
            if within == Path::new("") {
                source.clone()
            } else {
                source.join(within)
            },
        ))
    }

    /// # Errors
    /// A path is not UTF-8.
    pub fn apply(&self, changes: Changes<'_>) -> serde_json::Result<Value> {
        let mut whole = self.whole.clone();
        DROPPED_FIELDS
            .iter()
            .for_each(|(at, part)| remove_part(&mut whole, at, part));
        let limits = changes
            .limits
            .into_iter()
            .map(|(kind, soft, hard)| json!({"type": kind, "soft": soft, "hard": hard}));
        for (part, key, value) in [
            ("process", "terminal", false.into()),
            ("process", "args", changes.args.into()),
            ("process", "oomScoreAdj", changes.oom_score_adj.into()),
            ("process", "rlimits", limits.collect()),
            ("root", "path", to_value(changes.root)?),
            ("linux", "cgroupsPath", changes.cgroup.into()),
        ] {
            whole[part][key] = value;
        }
        if let Some(Value::Array(namespaces)) = whole.pointer_mut("/linux/namespaces") {
            namespaces.retain(|namespace| !SHARED.iter().any(|kind| namespace["type"] == *kind));
            // Remaining namespaces are new, and not shared with the pod's containers.
            namespaces
                .iter_mut()
                .for_each(|namespace| remove_part(namespace, "", "path"));
        }
        if let Some(Value::Array(mounts)) = whole.get_mut("mounts") {
            for (mount, Mount { destination, .. }) in mounts.iter_mut().zip(&self.mounts) {
                match changes.replacements.get(destination) {
                    Some(Replacement::Copy(copy)) => mount["source"] = to_value(copy)?,
                    Some(Replacement::Memory) => {
                        let options = ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"];
                        *mount = json!({"destination": mount["destination"], "type": "tmpfs", "source": "tmpfs", "options": options});
                    }
                    None => {}
                }
            }
            for (source, destination) in changes.extra_mounts {
                let (source, destination) = (to_value(source)?, to_value(destination)?);
                let options = ["bind", "rprivate", "rw"];
                mounts.push(json!({"destination": destination, "type": "bind", "source": source, "options": options}));
            }
        }
        Ok(whole)
    }
}

/// Removes a part of the object at `at`, if present.
fn remove_part(whole: &mut Value, at: &str, part: &str) {
    if let Some(Value::Object(object)) = whole.pointer_mut(at) {
        object.remove(part);
    }
}

impl Mount {
    /// True if the mount is a directory or file of the node.
    pub fn is_bind(&self) -> bool {
        self.kind.as_deref() == Some("bind") || self.has_option("bind") || self.has_option("rbind")
    }

    pub fn is_read_only(&self) -> bool {
        self.has_option("ro") || self.has_option("rro")
    }

    fn has_option(&self, option: &str) -> bool {
        self.options.iter().any(|other| other == option)
    }
}
