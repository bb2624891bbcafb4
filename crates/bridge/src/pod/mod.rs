//! A kube-apiserver in a static pod: a second container as the running one, which the node's runtime starts and neither it nor the kubelet manages.
//!
//! | module | what lives there |
//! | --- | --- |
//! | [`runtime`] | which container a process is in, its specification, what starts it |
//! | [`spec`] | that specification, and the temporary instance's. Pure |
//! | [`tree`] | directories of a container, measured and copied |
//! | [`container`] | the temporary instance's container |
//!
//! The kubelet and the runtime do not manage it: the container is a grandchild of the bridge, in a PID namespace, a cgroup and a session
//! of its own. What it reads is a copy in memory, in a mount namespace of the bridge's own, which ends with the bridge:
//! its root file system, since the image of a container that has ended may be removed; and what the pod mounts to read, since
//! that is what COMMAND changes. These are the mounts of the running container, and not all of the directory above its manifest: on
//! some nodes (RKE2) that one has the images too, and on others (minikube) certificates lie elsewhere. What is mounted to be written to, such
//! as a log's directory, or has sockets in it, such as a KMS plugin's, is the node's own.

pub mod container;
pub mod runtime;
pub mod spec;
#[cfg(test)]
mod tests;
pub mod tree;

use super::restore::{ENCRYPTION, SavedFile};
use crate::report::Report;
use berth_cluster::yaml::YamlNode;
use berth_exec::args;
use berth_manifest::Manifest;
use berth_manifest::command::{AUDIT_LOG, audit_log};
use berth_os::namespaces::is_shared_with;
use berth_upgrade::logs;
use rustix::fs::FileType;
use spec::Spec;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use tree::Mounted;

pub const MANIFEST: &str = "/etc/kubernetes/manifests/kube-apiserver.yaml";

/// A file or directory that is larger is not kept in memory, in bytes. /etc/kubernetes has some 50 KiB, all certificates of a
/// distribution less than 2 MiB.
const LARGEST: u64 = 64 << 20;

/// In the bridge's directory, and only for the bridge: its file system in memory. In it, copies of what the node had before, by their
/// numbers.
const MEMORY: &str = "bridge-memory";
const FILES: &str = "files";

/// Where the temporary instance writes its audit log if the running one's is in no directory of the node.
const AUDIT: &str = "/berth-bridge-audit";
const AUDIT_DIRECTORY: &str = "audit";

/// Its bound there, in memory: it is rotated at this size in MB, and one rotated file is kept.
const AUDIT_BOUND: [(&str, &str); 2] = [
    ("--audit-log-maxsize", "16"),
    ("--audit-log-maxbackup", "1"),
];

/// Flags that name files with keys. What is written or signed with one is read and checked with the same.
const KEYS: [&str; 3] = [
    ENCRYPTION,
    "--service-account-key-file",
    "--service-account-signing-key-file",
];

/// Where the kubelet writes the logs of containers.
const LOGS: &str = "/var/log/pods";

/// A running kube-apiserver in a pod.
#[derive(Debug)]
pub struct RunningPod {
    spec: Spec,
    runtime: PathBuf,
    manifest: PathBuf,
    files: Vec<CopiedFile>,
    /// Mounts of the pod's that are memory.
    memory: Vec<PathBuf>,
    /// What all copies take, in bytes.
    pub bytes: u64,
}

/// Something that the running one reads, of which there is a copy as it was before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopiedFile {
    /// On the node.
    pub path: PathBuf,
    /// In the container; none: it is the manifest.
    mounted: Option<PathBuf>,
}

/// The port of the kube-apiserver in a manifest.
pub(super) fn port(manifest: &Path, report: &mut Report) -> Option<u16> {
    let wrong = |error: &dyn std::fmt::Display| {
        format!(
            "{}: {error}: give the static pod's manifest with --manifest, or, for a kube-apiserver that is no pod, its command line \
             with --command",
            manifest.display()
        )
    };
    let parsed = fs::read_to_string(manifest).map_err(|error| wrong(&error)).and_then(|text| {
        let manifest = Manifest::parse(&text).map_err(|problem| wrong(&problem))?;
        if !manifest.pod().is_true("hostNetwork") {
            return Err(wrong(&"its pod has a network of its own (no hostNetwork: true), and no port of this node"));
        }
        for other in manifest.others() {
            report.note(format!(
                "{} is in kube-apiserver's pod and stops with it; the temporary kube-apiserver is without it meanwhile: if it needs that one \
                 (a KMS plugin, konnectivity), give it a pod of its own first",
                other.name()
            ));
        }
        manifest.secure_port().map_err(|problem| wrong(&problem))
    });
    report.ok("", parsed)
}

impl RunningPod {
    /// The one that a process runs in. What is in the directory above the manifest's is copied; the manifest need not be there.
    pub(super) fn find(pid: i32, manifest: &Path, report: &mut Report) -> Option<Self> {
        let what = format!("process {pid}");
        let cgroup = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let Some(id) = runtime::container(&cgroup).filter(|_| !is_shared_with(pid, "mnt")) else {
            report.error(format!(
                "{what}, which listens on the port, is in no pod's container: give its command line with --command"
            ));
            return None;
        };
        if !is_shared_with(pid, "net") {
            report.error(format!(
                "{what} is in another network namespace than this: run this in the node's, not in a container"
            ));
        }
        let shim = runtime::Shim::of(pid);
        let program = shim.as_ref().and_then(runtime::Shim::program);
        if program.is_none() {
            report.error(
                "there is no runc and no crun, neither next to the container's shim nor on its PATH: install one, as the temporary \
                 kube-apiserver is run by it",
            );
        }
        let spec = runtime::spec(shim.as_ref(), id).map_err(|tried| {
            format!(
                "the specification of container {id} is not to be found ({tried}): its runtime must be containerd, or CRI-O with \
                 conmon"
            )
        });
        let spec = report.ok("", spec)?;
        if spec.has_namespace("user") {
            report.error(format!(
                "{what} has a user namespace of its own (hostUsers: false), which cannot be had twice: set hostUsers: true"
            ));
        }
        let mut pod = Self {
            spec,
            runtime: program.unwrap_or_default(),
            manifest: manifest.to_owned(),
            files: Vec::new(),
            memory: Vec::new(),
            bytes: 0,
        };
        let measured = tree::root_of(pid).and_then(|root| pod.measure(&root, report));
        report.ok(&format!("{what}: its files cannot be read: "), measured)?;
        Some(pod)
    }

    /// What will be copied, and how much that is.
    fn measure(&mut self, root: &OwnedFd, report: &mut Report) -> io::Result<()> {
        self.bytes = tree::measure(root, Mounted::Leave, u64::MAX)?.bytes
            + fs::metadata(&self.runtime).map_or(0, |meta| meta.len());
        self.measure_mounts(root, report);
        Ok(())
    }

    /// One that cannot be copied is read as it is, as the running one does.
    fn measure_mounts(&mut self, root: &OwnedFd, report: &mut Report) {
        let configuration = self.manifest.parent().and_then(Path::parent);
        for mount in self.spec.mounts.iter().filter(|mount| mount.is_bind()) {
            let (Some(source), destination) = (&mount.source, &mount.destination) else {
                continue;
            };
            if destination == Path::new("/dev/shm") {
                self.memory.push(destination.clone());
                continue;
            }
            // As the running one sees it, whatever has been put into its place on the node.
            let measured = tree::within(root, destination).and_then(|open| {
                let wanted = match tree::kind(&open)? {
                    FileType::RegularFile => true,
                    FileType::Directory => {
                        mount.is_read_only()
                            || configuration.is_some_and(|above| source.starts_with(above))
                            || is_kubelets(source)
                            || is_runtimes(source)
                    }
                    _ => false,
                };
                wanted
                    .then(|| tree::measure(&open, Mounted::Follow, LARGEST))
                    .transpose()
            });
            let why = match measured {
                Ok(Some(size)) if size.bytes > LARGEST => {
                    format!(
                        "has more than {} MiB, which is too much to be kept as it is",
                        LARGEST >> 20
                    )
                }
                Ok(Some(size)) if !size.special => {
                    self.bytes += size.bytes;
                    self.files.push(CopiedFile {
                        path: source.clone(),
                        mounted: Some(destination.clone()),
                    });
                    continue;
                }
                Ok(_) => continue,
                Err(error) => format!("cannot be kept as it is: {error}"),
            };
            let instead = "the temporary kube-apiserver reads what COMMAND leaves there";
            report.note(format!("{} {why}: {instead}", source.display()));
        }
    }

    /// Has the manifest copied, too, so that it can be put back.
    #[must_use]
    pub fn with_manifest(mut self) -> Self {
        self.files.push(CopiedFile {
            path: self.manifest.clone(),
            mounted: None,
        });
        self
    }

    /// Where on the node a file of the container is.
    pub fn on_node(&self, path: &Path) -> Option<PathBuf> {
        self.spec.on_node(path).map(|(_, on_node)| on_node)
    }

    /// The bridge's copy of a file of the node; that file itself, if there is none.
    pub fn copy_of(&self, path: &Path, directory: &Path) -> PathBuf {
        let within =
            |(at, kept): (usize, &CopiedFile)| Some((at, path.strip_prefix(&kept.path).ok()?));
        match self
            .files
            .iter()
            .enumerate()
            .filter_map(within)
            .min_by_key(|(_, rest)| rest.components().count())
        {
            None => path.to_owned(),
            Some((at, rest)) if rest == Path::new("") => copy(directory, at),
            Some((at, rest)) => copy(directory, at).join(rest),
        }
    }

    /// Sees to it that the audit log is where it stays: where it is on the node then.
    pub fn keep_audit_log(&self, argv: &mut Vec<OsString>, directory: &Path) -> Option<PathBuf> {
        let path = audit_log(argv)?;
        let copied = self.instead(directory);
        let on_node = self.spec.on_node(&path).filter(|(mount, _)| {
            mount.destination != path
                && !mount.is_read_only()
                && !copied.contains_key(&mount.destination)
        });
        if let Some((_, on_node)) = on_node {
            return Some(on_node);
        }
        let name = path.file_name().unwrap_or_default();
        args::set(argv, AUDIT_LOG, Path::new(AUDIT).join(name).as_os_str());
        AUDIT_BOUND
            .iter()
            .for_each(|(flag, value)| args::set(argv, flag, OsStr::new(value)));
        Some(directory.join(AUDIT_DIRECTORY).join(name))
    }

    /// SELinux's label of its files.
    pub fn label(&self) -> Option<&str> {
        self.spec.label()
    }

    /// What the kubelet starts it from.
    pub fn manifest(&self) -> &Path {
        &self.manifest
    }

    /// The end of its log: why it does not serve.
    pub fn last_lines(&self) -> Vec<String> {
        let text = fs::read_to_string(&self.manifest).unwrap_or_default();
        let Ok(manifest) = Manifest::parse(&text) else {
            return Vec::new();
        };
        let meta = |field: &str| {
            manifest
                .root()
                .at(&["metadata", field])
                .and_then(YamlNode::text)
        };
        let (namespace, name) = (
            meta("namespace").unwrap_or("default"),
            meta("name").unwrap_or_default(),
        );
        let pod = logs::LoggedPod::Name(namespace, name);
        let lines = logs::last_lines(Path::new(LOGS), &pod, manifest.container().name());
        lines.map(|(_, lines)| lines).unwrap_or_default()
    }

    /// The files with keys that it encrypts with, and with which tokens are signed and checked, on the node.
    pub fn keys(&self, command: &[OsString]) -> BTreeSet<PathBuf> {
        let named = KEYS
            .into_iter()
            .flat_map(|flag| args::values(command, flag));
        named
            .filter_map(|path| self.on_node(Path::new(path)))
            .collect()
    }

    /// What it is started from and reads, its manifest last.
    pub fn before(&self, command: &[OsString], directory: &Path) -> Vec<SavedFile> {
        // What the container may write to is not the node's configuration.
        let on_node = |path: PathBuf| {
            self.spec
                .on_node(&path)
                .filter(|(mount, _)| mount.is_read_only())
                .map(|(_, at)| at)
        };
        let named: BTreeSet<_> = command
            .iter()
            .flat_map(|argument| paths(argument))
            .filter_map(on_node)
            .collect();
        let before = |path: PathBuf, shown| SavedFile {
            copy: self.copy_of(&path, directory),
            path,
            shown,
        };
        // Nor is a link: where it led is not copied. What was not copied is the node's.
        let copies = directory
            .join(MEMORY)
            .join(FILES)
            .canonicalize()
            .unwrap_or_default();
        let is_copy = |path: &Path| {
            let is_file = fs::symlink_metadata(path).is_ok_and(|meta| meta.is_file());
            is_file
                && path
                    .canonicalize()
                    .is_ok_and(|real| real.starts_with(&copies))
        };
        let named = named
            .into_iter()
            .map(|path| before(path, false))
            .filter(|before| is_copy(&before.copy));
        named.chain([before(self.manifest.clone(), true)]).collect()
    }

    fn instead(&self, directory: &Path) -> BTreeMap<PathBuf, spec::Instead> {
        let copies = self.files.iter().enumerate();
        let copies = copies.filter_map(|(at, kept)| {
            Some((
                kept.mounted.clone()?,
                spec::Instead::Copy(copy(directory, at)),
            ))
        });
        copies
            .chain(
                self.memory
                    .iter()
                    .map(|place| (place.clone(), spec::Instead::Memory)),
            )
            .collect()
    }
}

/// The absolute paths in an argument: kube-apiserver's flags have one, or several as in `--tls-sni-cert-key=/a,/b:name`.
fn paths(argument: &OsStr) -> impl Iterator<Item = PathBuf> {
    let bytes = argument.as_bytes();
    let value = bytes
        .iter()
        .position(|byte| *byte == b'=')
        .map_or(bytes, |at| &bytes[at + 1..]);
    let parts = value
        .split(|byte| b",:".contains(byte))
        .filter(|part| part.starts_with(b"/"));
    let paths = parts.map(|part| PathBuf::from(OsStr::from_bytes(part)));
    paths
        .filter(|path| path.components().all(|part| part != Component::ParentDir))
        .collect::<Vec<_>>()
        .into_iter()
}

/// Volumes that the kubelet makes for a pod, and removes with it.
fn is_kubelets(source: &Path) -> bool {
    source
        .components()
        .any(|part| matches!(part, Component::Normal(name) if name.to_string_lossy().starts_with("kubernetes.io~")))
}

/// Directories that the runtime makes for a container or its pod, such as CRI-O for its default mounts, and removes with it.
fn is_runtimes(source: &Path) -> bool {
    runtime::container(&source.to_string_lossy()).is_some()
}

fn copy(directory: &Path, at: usize) -> PathBuf {
    directory.join(MEMORY).join(FILES).join(at.to_string())
}
