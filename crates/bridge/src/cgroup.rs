//! A cgroup for the bridge: killing the operator's session by cgroup must not kill the bridge.

use procfs::ProcResult;
use procfs::process::{MountInfo, MountInfos, Process};
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

/// Name of the bridge's cgroup, below the root like the cgroups of the node's services.
const CGROUP_NAME: &str = "berth-bridge";

/// Prefix of the cgroups of containers, in every hierarchy. Containers are not in children of the
/// bridge's cgroup: version 2 allows processes only in leaves.
const CONTAINER_PREFIX: &str = "berth-bridge-";

/// Name of a container's cgroup. The instance's address is included because nodes that share a
/// kernel share cgroups.
pub fn name_container_cgroup(name: &str, address: Ipv4Addr) -> String {
    format!("{CONTAINER_PREFIX}{name}-{address}")
}

/// CPU weight of the bridge in version 2 and version 1: ten times the default. The bridge needs
/// little CPU, and all clients wait for it: on a busy node the relay stalled for 3 s.
const CPU_WEIGHTS: [(&str, &str); 2] = [("cpu.weight", "1000"), ("cpu.shares", "10240")];

/// Number of attempts to enter the bridge's cgroup. A bridge that ends may remove the cgroup after
/// it was created here and before it is entered.
const MAX_TRIES: u32 = 100;

/// Moves this process into the bridge's cgroup, in each hierarchy through which a session may be
/// killed or CPU time is shared.
///
/// # Errors
/// No hierarchy can be written to.
pub fn leave_session_cgroup() -> io::Result<()> {
    let mounts = read_mounts().map_err(io::Error::other)?;
    let mut left = Err(io::Error::other("no cgroup file system is mounted"));
    for mount in select_hierarchies(mounts, needs_bridge_cgroup) {
        let moved = create_and_enter(&mount.join(CGROUP_NAME));
        left = if left.is_ok() { left } else { moved };
    }
    left
}

/// Moves this process to the root cgroup, and removes the bridge's cgroup.
pub fn remove_bridge_cgroup() {
    for root in find_roots(needs_bridge_cgroup) {
        // An error is harmless: the empty cgroup stays, and the next bridge enters it.
        let _ = fs::write(root.join("cgroup.procs"), "0")
            .and_then(|()| fs::remove_dir(root.join(CGROUP_NAME)));
    }
}

/// Creates the cgroup and enters it. Tries again if another bridge removed the cgroup in between
/// because it was empty.
fn create_and_enter(cgroup: &Path) -> io::Result<()> {
    let mut tries = 0;
    loop {
        match try_enter(cgroup) {
            Err(error) if means_removed_cgroup(&error) && tries < MAX_TRIES => tries += 1,
            entered => return entered,
        }
    }
}

/// A write to an open file of a removed cgroup fails with ENODEV.
fn means_removed_cgroup(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV)
}

fn try_enter(cgroup: &Path) -> io::Result<()> {
    match fs::create_dir(cgroup) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    for (file, weight) in CPU_WEIGHTS.map(|(file, weight)| (cgroup.join(file), weight)) {
        // Without permission the cgroup keeps the default weight.
        let _ = file.exists().then(|| fs::write(file, weight));
    }
    // Writing 0 moves the process that writes.
    OpenOptions::new()
        .write(true)
        .open(cgroup.join("cgroup.procs"))?
        .write_all(b"0")
}

/// Returns the cgroups of a bridge and of its container in each hierarchy. Each cgroup is a pair:
/// the parent's cgroup.procs, and the cgroup's own directory.
pub fn list_cgroups(container: &str) -> Vec<(PathBuf, PathBuf)> {
    let all = find_roots(|_| true).flat_map(|root| {
        let own = [container, CGROUP_NAME].map(|name| root.join(name));
        own.map(|own| (root.join("cgroup.procs"), own))
    });
    all.collect()
}

/// Removes the cgroups that killed bridges left.
pub fn sweep_cgroups() {
    find_roots(|_| true).for_each(|root| sweep_below(&root));
}

fn sweep_below(root: &Path) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if name == CGROUP_NAME || name.to_string_lossy().starts_with(CONTAINER_PREFIX) {
            // The cgroup of a bridge that runs has a process, and so cannot be removed.
            let _ = fs::remove_dir(entry.path());
        }
    }
}

/// True if the bridge leaves the session's cgroup in this hierarchy: in the hierarchy of cgroup v2,
/// and in systemd's and the CPU controller's hierarchy of cgroup v1.
fn needs_bridge_cgroup(mount: &MountInfo) -> bool {
    let is_systemd = mount
        .super_options
        .get("name")
        .is_some_and(|name| name.as_deref() == Some("systemd"));
    mount.fs_type == "cgroup2" || is_systemd || mount.super_options.contains_key("cpu")
}

fn read_mounts() -> ProcResult<MountInfos> {
    Process::myself()?.mountinfo()
}

/// Mount point of cgroup v2. `None` if cgroup v2 is not mounted.
pub fn find_cgroup_root() -> Option<PathBuf> {
    find_roots(|mount| mount.fs_type == "cgroup2").next()
}

/// Root directories of the cgroup hierarchies that `wanted` accepts. Empty if this process's mounts
/// cannot be read.
fn find_roots(wanted: fn(&MountInfo) -> bool) -> impl Iterator<Item = PathBuf> {
    read_mounts()
        .into_iter()
        .flat_map(move |mounts| select_hierarchies(mounts, wanted))
}

fn select_hierarchies(
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

/// True if the process shares its cgroups with this process, so that a kill of the whole cgroup
/// ends both processes.
pub fn is_shared_with(pid: u32) -> bool {
    let of = |process: &str| fs::read_to_string(format!("/proc/{process}/cgroup")).ok();
    of(&pid.to_string()).is_some_and(|other| of("self") == Some(other))
}

#[cfg(test)]
mod tests {
    use super::*;
    use procfs::FromRead as _;

    #[test]
    fn leftover_cgroups_are_removed_unless_in_use() {
        let temp = tempfile::tempdir().unwrap();
        let names = [
            CGROUP_NAME,
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
    fn the_hierarchies_to_leave_are_found() {
        let mountinfo = "24 30 0:22 / /proc rw shared:5 - proc proc rw\n\
            35 24 0:31 / /sys/fs/cgroup ro,nosuid shared:9 - tmpfs tmpfs ro,mode=755\n\
            36 35 0:32 / /sys/fs/cgroup/unified rw shared:10 - cgroup2 cgroup2 rw,nsdelegate\n\
            37 35 0:33 / /sys/fs/cgroup/systemd rw shared:11 - cgroup cgroup rw,xattr,name=systemd\n\
            38 35 0:34 / /sys/fs/cgroup/memory rw shared:12 - cgroup cgroup rw,memory\n\
            40 35 0:35 / /sys/fs/cgroup/cpu,cpuacct rw shared:13 - cgroup cgroup rw,cpu,cpuacct\n\
            39 35 0:33 /user.slice /mnt rw shared:11 - cgroup cgroup rw,xattr,name=systemd\n";
        let mounts = || MountInfos::from_read(mountinfo.as_bytes()).unwrap();
        let found: Vec<_> = select_hierarchies(mounts(), needs_bridge_cgroup).collect();
        assert_eq!(
            found,
            [
                "/sys/fs/cgroup/unified",
                "/sys/fs/cgroup/systemd",
                "/sys/fs/cgroup/cpu,cpuacct"
            ]
            .map(PathBuf::from)
        );
        assert_eq!(select_hierarchies(mounts(), |_| true).count(), 4);
    }
}
