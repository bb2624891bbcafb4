//! A cgroup for the bridge: killing the operator's session by its cgroup must not kill the bridge.

use procfs::ProcResult;
use procfs::process::{MountInfo, MountInfos, Process};
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

/// The cgroup's name, at the root like those of the node's services.
const NAME: &str = "berth-bridge";

/// Prefix of containers' cgroups, in every hierarchy. They are not children of the bridge's: version 2 has processes only in leaves.
const CONTAINER: &str = "berth-bridge-";

/// The cgroup of the container that runs this, with this address: nodes that share a kernel share cgroups.
pub fn of_container(name: &str, address: Ipv4Addr) -> String {
    format!("{CONTAINER}{name}-{address}")
}

/// Its CPU weight, in version 2 and version 1: ten times the default. It needs little CPU, and all clients wait for it: its relay
/// stalled for 3 s on a busy node.
const WEIGHTS: [(&str, &str); 2] = [("cpu.weight", "1000"), ("cpu.shares", "10240")];

/// How often a removed cgroup is created again.
const TRIES: u32 = 100;

/// Moves this process into its own cgroup, in the hierarchies by which sessions are killed and CPUs are shared.
///
/// # Errors
/// There is none that can be written to.
pub fn leave() -> io::Result<()> {
    let mounts = mounts().map_err(io::Error::other)?;
    let mut left = Err(io::Error::other("no cgroup file system is mounted"));
    for mount in hierarchies(mounts, is_left) {
        let moved = enter(&mount.join(NAME));
        left = if left.is_ok() { left } else { moved };
    }
    left
}

/// Removes the bridge's cgroup, which this process leaves first.
pub fn remove() {
    for root in roots(is_left) {
        // If it cannot be removed it stays, empty, for the next bridge.
        let _ = fs::write(root.join("cgroup.procs"), "0")
            .and_then(|()| fs::remove_dir(root.join(NAME)));
    }
}

/// Makes the cgroup and enters it; again if another bridge removed it in between because it was empty.
fn enter(cgroup: &Path) -> io::Result<()> {
    let mut tries = 0;
    loop {
        match try_enter(cgroup) {
            Err(error) if is_removed(&error) && tries < TRIES => tries += 1,
            entered => return entered,
        }
    }
}

/// Writing to an open file of a cgroup that was removed fails with ENODEV.
fn is_removed(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV)
}

fn try_enter(cgroup: &Path) -> io::Result<()> {
    match fs::create_dir(cgroup) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    for (file, weight) in WEIGHTS.map(|(file, weight)| (cgroup.join(file), weight)) {
        // Without permission it keeps the default weight.
        let _ = file.exists().then(|| fs::write(file, weight));
    }
    // 0 is the process that writes.
    OpenOptions::new()
        .write(true)
        .open(cgroup.join("cgroup.procs"))?
        .write_all(b"0")
}

/// The cgroups of a bridge and of its container, in each hierarchy: the parent's cgroup.procs, and the cgroup's directory.
pub fn all(container: &str) -> Vec<(PathBuf, PathBuf)> {
    let all = roots(|_| true).flat_map(|root| {
        let own = [container, NAME].map(|name| root.join(name));
        own.map(|own| (root.join("cgroup.procs"), own))
    });
    all.collect()
}

/// Removes the cgroups that killed bridges left.
pub fn sweep() {
    roots(|_| true).for_each(|root| sweep_below(&root));
}

fn sweep_below(root: &Path) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if name == NAME || name.to_string_lossy().starts_with(CONTAINER) {
            // A cgroup with a process in it cannot be removed.
            let _ = fs::remove_dir(entry.path());
        }
    }
}

/// Version 2, and of version 1 systemd's own hierarchy and that of CPUs: by their file system and its options.
fn is_left(mount: &MountInfo) -> bool {
    let is_systemd = mount
        .super_options
        .get("name")
        .is_some_and(|name| name.as_deref() == Some("systemd"));
    mount.fs_type == "cgroup2" || is_systemd || mount.super_options.contains_key("cpu")
}

fn mounts() -> ProcResult<MountInfos> {
    Process::myself()?.mountinfo()
}

/// The root of version 2, wherever it is mounted.
pub fn root() -> Option<PathBuf> {
    roots(|mount| mount.fs_type == "cgroup2").next()
}

/// Roots of this process's hierarchies; none if its mounts cannot be read.
fn roots(wanted: fn(&MountInfo) -> bool) -> impl Iterator<Item = PathBuf> {
    mounts()
        .into_iter()
        .flat_map(move |mounts| hierarchies(mounts, wanted))
}

fn hierarchies(
    mounts: MountInfos,
    wanted: impl Fn(&MountInfo) -> bool,
) -> impl Iterator<Item = PathBuf> {
    let is_root = |mount: &MountInfo| {
        matches!(mount.fs_type.as_str(), "cgroup" | "cgroup2") && mount.root == "/"
    };
    mounts
        .into_iter()
        .filter(move |mount| is_root(mount) && wanted(mount))
        .map(|mount| mount.mount_point)
}

/// Whether a process is in this one's cgroups: what ends them ends both.
pub fn is_shared_with(pid: u32) -> bool {
    let of = |process: &str| fs::read_to_string(format!("/proc/{process}/cgroup")).ok();
    of(&pid.to_string()).is_some_and(|other| of("self") == Some(other))
}

#[cfg(test)]
mod tests {
    use super::*;
    use procfs::FromRead as _;

    #[test]
    fn what_was_left_is_removed_but_where_somebody_is_in() {
        let temp = tempfile::tempdir().unwrap();
        let names = [
            NAME,
            "berth-bridge-etcd-127.1.2.3",
            "berth-bridge-kube-apiserver-127.1.2.4/in",
            "berth-other",
        ];
        names
            .iter()
            .for_each(|name| fs::create_dir_all(temp.path().join(name)).unwrap());
        sweep_below(temp.path());
        assert_eq!(
            names.map(|name| temp.path().join(name).exists()),
            [false, false, true, true]
        );
    }

    #[test]
    fn hierarchies_that_are_left_are_found() {
        let mountinfo = "24 30 0:22 / /proc rw shared:5 - proc proc rw\n\
            35 24 0:31 / /sys/fs/cgroup ro,nosuid shared:9 - tmpfs tmpfs ro,mode=755\n\
            36 35 0:32 / /sys/fs/cgroup/unified rw shared:10 - cgroup2 cgroup2 rw,nsdelegate\n\
            37 35 0:33 / /sys/fs/cgroup/systemd rw shared:11 - cgroup cgroup rw,xattr,name=systemd\n\
            38 35 0:34 / /sys/fs/cgroup/memory rw shared:12 - cgroup cgroup rw,memory\n\
            40 35 0:35 / /sys/fs/cgroup/cpu,cpuacct rw shared:13 - cgroup cgroup rw,cpu,cpuacct\n\
            39 35 0:33 /user.slice /mnt rw shared:11 - cgroup cgroup rw,xattr,name=systemd\n";
        let mounts = || MountInfos::from_read(mountinfo.as_bytes()).unwrap();
        let found: Vec<_> = hierarchies(mounts(), is_left).collect();
        assert_eq!(
            found,
            [
                "/sys/fs/cgroup/unified",
                "/sys/fs/cgroup/systemd",
                "/sys/fs/cgroup/cpu,cpuacct"
            ]
            .map(PathBuf::from)
        );
        assert_eq!(hierarchies(mounts(), |_| true).count(), 4);
    }
}
