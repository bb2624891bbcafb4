//! A kube-apiserver in a static pod: the temporary instance is a second container with the same
//! specification, which the node's runc or crun starts.
//!
//! | module | contents |
//! | --- | --- |
//! | [`runtime`] | the container of a process, its specification, and runc or crun |
//! | [`spec`] | the specification of the container, and of the temporary instance. Pure |
//! | [`tree`] | directories of a container, measured and copied |
//! | [`container`] | the temporary instance's container |
//!
//! Neither the kubelet nor the container runtime manages the container. It is a grandchild of the
//! bridge, in a separate PID namespace, cgroup and session. Its files are copies in memory, in a
//! mount namespace of the bridge, which ends with the bridge. The root file system is copied, since
//! the image of an ended container may be removed. The files and directories that the pod mounts
//! without write access are copied, since COMMAND changes them. The mounts of the running container
//! are copied, and not the whole directory above the manifest: on some nodes (RKE2) that directory
//! holds the images, too, and on others (minikube) certificates lie elsewhere. Mounts with write
//! access, such as a log directory, or with sockets, such as a KMS plugin's, are shared with the
//! node.

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
use tree::MountPoints;

pub const MANIFEST: &str = "/etc/kubernetes/manifests/kube-apiserver.yaml";

/// Largest file or directory to be kept in memory, in bytes. /etc/kubernetes has some 50 KiB, all
/// certificates of a distribution less than 2 MiB.
const MAX_COPY_SIZE: u64 = 64 << 20;

/// The bridge's file system in memory, in the bridge's directory. Its directory `FILES_DIRECTORY`
/// has numbered copies of the node's files from before COMMAND.
const MEMORY_DIRECTORY: &str = "bridge-memory";
const FILES_DIRECTORY: &str = "files";

/// The audit log's directory in the temporary instance's container, if the running kube-apiserver's
/// audit log is in no directory of the node.
const AUDIT_MOUNT: &str = "/berth-bridge-audit";
const AUDIT_DIRECTORY: &str = "audit";

/// Flags that limit the audit log if it is written to the bridge's directory, which may be in
/// memory: the log is rotated at this size in MB, and a single rotated file is kept.
const AUDIT_LIMITS: [(&str, &str); 2] = [
    ("--audit-log-maxsize", "16"),
    ("--audit-log-maxbackup", "1"),
];

/// Flags that name files with keys. Data that is written or signed with a key is read and checked
/// with the same key.
const KEY_FLAGS: [&str; 3] = [
    ENCRYPTION,
    "--service-account-key-file",
    "--service-account-signing-key-file",
];

/// The kubelet's directory for logs of containers.
const POD_LOGS: &str = "/var/log/pods";

/// A running kube-apiserver in a pod.
#[derive(Debug)]
pub struct RunningPod {
    spec: Spec,
    runtime: PathBuf,
    manifest: PathBuf,
    files: Vec<CopiedFile>,
    /// Mounts of the pod that are file systems in memory.
    memory: Vec<PathBuf>,
    /// Size of all copies, in bytes.
    pub bytes: u64,
}

/// A file or directory that the running kube-apiserver reads, with a copy from before COMMAND.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopiedFile {
    /// Path on the node.
    pub path: PathBuf,
    /// Path in the container. `None` for the manifest.
    mounted: Option<PathBuf>,
}

/// The port of the kube-apiserver in a manifest.
pub(super) fn find_port(manifest: &Path, report: &mut Report) -> Option<u16> {
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
            return Err(wrong(&"kube-apiserver's pod has its own network, and so listens on no port of this node: set hostNetwork: true"));
        }
        for other in manifest.other_containers() {
            report.add_note(format!(
                "the container {0} is in kube-apiserver's pod and stops with the pod: if the temporary \
                 kube-apiserver needs {0} (a KMS plugin, konnectivity), give {0} a pod of its own first",
                other.name()
            ));
        }
        manifest.secure_port().map_err(|problem| wrong(&problem))
    });
    report.value_or_add_error("", parsed)
}

impl RunningPod {
    /// The pod of a process. Mounts from the directory above the manifest's directory are copied.
    /// The manifest need not exist.
    pub(super) fn find(pid: i32, manifest: &Path, report: &mut Report) -> Option<Self> {
        let what = format!("process {pid}");
        let cgroup = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let Some(id) = runtime::parse_container_id(&cgroup).filter(|_| !is_shared_with(pid, "mnt"))
        else {
            report.add_error(format!(
                "{what}, which listens on the port, is in no pod's container: give its command line with --command"
            ));
            return None;
        };
        if !is_shared_with(pid, "net") {
            report.add_error(format!(
                "{what} is in another network namespace than this command: run berth in the node's network namespace, not in a container"
            ));
        }
        let shim = runtime::Shim::of_process(pid);
        let program = shim.as_ref().and_then(runtime::Shim::find_program);
        if program.is_none() {
            report.add_error(
                "there is no runc and no crun, neither next to the container's shim nor on the shim's PATH: install runc \
                 or crun, which the temporary kube-apiserver needs",
            );
        }
        let spec = runtime::read_spec(shim.as_ref(), id).map_err(|tried| {
            format!(
                "cannot find the specification of container {id} ({tried}): its runtime must be containerd, or CRI-O with \
                 conmon"
            )
        });
        let spec = report.value_or_add_error("", spec)?;
        if spec.has_namespace("user") {
            report.add_error(format!(
                "{what} has its own user namespace (hostUsers: false), which a second container cannot share: set hostUsers: true"
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
        let measured = tree::open_root(pid).and_then(|root| pod.measure_files(&root, report));
        report.value_or_add_error(&format!("cannot read the files of {what}: "), measured)?;
        Some(pod)
    }

    /// Measures the files to be copied.
    fn measure_files(&mut self, root: &OwnedFd, report: &mut Report) -> io::Result<()> {
        self.bytes = tree::measure_tree(root, MountPoints::Leave, u64::MAX)?.bytes
            + fs::metadata(&self.runtime).map_or(0, |meta| meta.len());
        self.measure_mounts(root, report);
        Ok(())
    }

    /// Measures the mounts to be copied. A mount that cannot be copied is shared with the running
    /// kube-apiserver.
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
            // Open the file that the running container sees, whatever has replaced it on the node.
            let measured = tree::open_within(root, destination).and_then(|open| {
                let wanted = match tree::read_file_type(&open)? {
                    FileType::RegularFile => true,
                    FileType::Directory => {
                        mount.is_read_only()
                            || configuration.is_some_and(|above| source.starts_with(above))
                            || is_kubelet_volume(source)
                            || is_runtime_directory(source)
                    }
                    _ => false,
                };
                wanted
                    .then(|| tree::measure_tree(&open, MountPoints::Follow, MAX_COPY_SIZE))
                    .transpose()
            });
            let why = match measured {
                Ok(Some(size)) if size.bytes > MAX_COPY_SIZE => {
                    format!(
                        "has more than {} MiB, which is too much for a copy in memory",
                        MAX_COPY_SIZE >> 20
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
                Err(error) => format!("cannot be copied: {error}"),
            };
            let instead = "the temporary kube-apiserver uses the original, and sees the changes that COMMAND makes";
            report.add_note(format!("{} {why}: {instead}", source.display()));
        }
    }

    /// Includes the manifest in the copies, so that it can be restored.
    #[must_use]
    pub fn with_manifest(mut self) -> Self {
        self.files.push(CopiedFile {
            path: self.manifest.clone(),
            mounted: None,
        });
        self
    }

    /// The node's path of a file in the container.
    pub fn path_on_node(&self, path: &Path) -> Option<PathBuf> {
        self.spec
            .find_mounted_path(path)
            .map(|(_, on_node)| on_node)
    }

    /// The bridge's copy of a file of the node, or the file itself if there is no copy.
    pub fn path_of_copy(&self, path: &Path, directory: &Path) -> PathBuf {
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
            Some((at, rest)) if rest == Path::new("") => numbered_copy_path(directory, at),
            Some((at, rest)) => numbered_copy_path(directory, at).join(rest),
        }
    }

    /// Moves the audit log to a place that outlives the container, if necessary, and returns its
    /// path on the node.
    pub fn keep_audit_log(&self, argv: &mut Vec<OsString>, directory: &Path) -> Option<PathBuf> {
        let path = audit_log(argv)?;
        let copied = self.replacements(directory);
        let on_node = self.spec.find_mounted_path(&path).filter(|(mount, _)| {
            mount.destination != path
                && !mount.is_read_only()
                && !copied.contains_key(&mount.destination)
        });
        if let Some((_, on_node)) = on_node {
            return Some(on_node);
        }
        let name = path.file_name().unwrap_or_default();
        args::set_flag(
            argv,
            AUDIT_LOG,
            Path::new(AUDIT_MOUNT).join(name).as_os_str(),
        );
        AUDIT_LIMITS
            .iter()
            .for_each(|(flag, value)| args::set_flag(argv, flag, OsStr::new(value)));
        Some(directory.join(AUDIT_DIRECTORY).join(name))
    }

    /// SELinux label of the container's files.
    pub fn selinux_label(&self) -> Option<&str> {
        self.spec.selinux_label()
    }

    /// The manifest that the kubelet starts the pod from.
    pub fn manifest(&self) -> &Path {
        &self.manifest
    }

    /// The last lines of the container's log, which may tell why kube-apiserver does not serve.
    pub fn last_log_lines(&self) -> Vec<String> {
        let text = fs::read_to_string(&self.manifest).unwrap_or_default();
        let Ok(manifest) = Manifest::parse(&text) else {
            return Vec::new();
        };
        let meta = |field: &str| {
            manifest
                .root()
                .find_path(&["metadata", field])
                .and_then(YamlNode::text)
        };
        let (namespace, name) = (
            meta("namespace").unwrap_or("default"),
            meta("name").unwrap_or_default(),
        );
        let pod = logs::LoggedPod::Name(namespace, name);
        let lines = logs::find_last_lines(Path::new(POD_LOGS), &pod, manifest.container().name());
        lines.map(|(_, lines)| lines).unwrap_or_default()
    }

    /// The node's paths of the files with keys for encryption, and for signing and checking tokens.
    pub fn key_files(&self, command: &[OsString]) -> BTreeSet<PathBuf> {
        let named = KEY_FLAGS
            .into_iter()
            .flat_map(|flag| args::flag_values(command, flag));
        named
            .filter_map(|path| self.path_on_node(Path::new(path)))
            .collect()
    }

    /// The files that the pod is started from and reads, the manifest last.
    pub fn saved_files(&self, command: &[OsString], directory: &Path) -> Vec<SavedFile> {
        // Files that the container may write to are not the node's configuration.
        let on_node = |path: PathBuf| {
            self.spec
                .find_mounted_path(&path)
                .filter(|(mount, _)| mount.is_read_only())
                .map(|(_, at)| at)
        };
        let named: BTreeSet<_> = command
            .iter()
            .flat_map(|argument| absolute_paths(argument))
            .filter_map(on_node)
            .collect();
        let before = |path: PathBuf, shown| SavedFile {
            copy: self.path_of_copy(&path, directory),
            path,
            shown,
        };
        // Exclude links, since their targets are not copied, and files that were not copied.
        let copies = directory
            .join(MEMORY_DIRECTORY)
            .join(FILES_DIRECTORY)
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

    fn replacements(&self, directory: &Path) -> BTreeMap<PathBuf, spec::Replacement> {
        let copies = self.files.iter().enumerate();
        let copies = copies.filter_map(|(at, kept)| {
            Some((
                kept.mounted.clone()?,
                spec::Replacement::Copy(numbered_copy_path(directory, at)),
            ))
        });
        copies
            .chain(
                self.memory
                    .iter()
                    .map(|place| (place.clone(), spec::Replacement::Memory)),
            )
            .collect()
    }
}

/// The absolute paths in an argument: a flag of kube-apiserver names one path, or several paths as
/// in `--tls-sni-cert-key=/a,/b:name`.
fn absolute_paths(argument: &OsStr) -> impl Iterator<Item = PathBuf> {
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

/// True for volumes that the kubelet makes for a pod, and removes with the pod.
fn is_kubelet_volume(source: &Path) -> bool {
    source
        .components()
        .any(|part| matches!(part, Component::Normal(name) if name.to_string_lossy().starts_with("kubernetes.io~")))
}

/// True for directories that the runtime makes for a container or its pod, such as CRI-O's default
/// mounts, and removes with the pod.
fn is_runtime_directory(source: &Path) -> bool {
    runtime::parse_container_id(&source.to_string_lossy()).is_some()
}

fn numbered_copy_path(directory: &Path, at: usize) -> PathBuf {
    directory
        .join(MEMORY_DIRECTORY)
        .join(FILES_DIRECTORY)
        .join(at.to_string())
}
