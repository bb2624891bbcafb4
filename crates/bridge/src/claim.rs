//! One bridge a directory, and one a network namespace.

use super::{LOCK, instance, logs};
use berth_manifest::file::fix;
use berth_node::ipc::bridge::SOCKET;
use berth_os::bpf::{self, Attached, Purpose};
use berth_os::file::{lock_within, private_directory};
use berth_os::seqpacket;
use nix::fcntl::Flock;
use nix::unistd::geteuid;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Run directory of the bridge's shim, with its lease.
pub(super) const SHIM: &str = "bridge-shim";

/// The error for a bridge in another directory.
const ELSEWHERE: &str = "another bridge is on, in another directory: end that one";

/// Name of the socket that a bridge holds, in this network namespace alone.
const ALONE: &str = "berth-bridge";

/// How long commands that wait for a bridge's outcome may take to read it.
pub(super) const REPORTING: Duration = Duration::from_secs(2);

/// A directory that no other bridge has, with its socket.
#[derive(Debug)]
pub struct Claim {
    pub(super) directory: PathBuf,
    pub(super) socket: OwnedFd,
    /// Where the daemon writes what it logs.
    pub log: File,
    pub(super) lock: DirectoryLock,
}

/// What a bridge has until its process ends.
#[derive(Debug)]
pub(super) struct DirectoryLock {
    /// Not empty: the bridge has not ended well, or not yet.
    pub(super) file: Flock<File>,
    _alone: UnixDatagram,
}

impl DirectoryLock {
    /// A process that is killed cannot record that it failed.
    pub(super) fn begin(&mut self) {
        if let Err(error) = self.file.write_all(b"on\n") {
            tracing::info!(%error, "the next bridge will not keep the logs of this one if it fails");
        }
    }
}

impl Claim {
    /// Claims a directory that the preflight accepted, and removes what a killed bridge left there.
    ///
    /// # Errors
    /// Another bridge has it, or it cannot be created.
    pub fn acquire(directory: &Path) -> Result<Self, String> {
        let failed = |what: &'static str| {
            let path = directory.display().to_string();
            move |error: io::Error| format!("cannot {what} in {path}: {error}{}", fix(what, &error))
        };
        private_directory(directory, geteuid().as_raw())
            .map_err(failed("make the bridge's directory"))?;
        let mut options = OpenOptions::new();
        options
            .create(true)
            .append(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW);
        let file = options
            .open(directory.join(LOCK))
            .map_err(failed("make a file"))?;
        // One whose outcome is known may not be gone yet.
        let file = lock_within(file, REPORTING).map_err(|_| {
            format!(
                "another bridge is on ({}): see `berth bridge status`",
                directory.display()
            )
        })?;
        let lock = DirectoryLock {
            file,
            _alone: alone()?,
        };
        clear(directory);
        let path = directory.join(SOCKET);
        let socket = seqpacket::listener(&path).map_err(failed("make a socket"))?;
        fs::set_permissions(&path, Permissions::from_mode(0o600))
            .map_err(failed("make a socket"))?;
        let last_failed = lock.file.metadata().is_ok_and(|meta| meta.len() > 0);
        logs::begin(directory, last_failed);
        let log = options
            .open(directory.join(logs::BRIDGE))
            .map_err(failed("make a file"))?;
        lock.file.set_len(0).map_err(failed("write a file"))?;
        Ok(Self {
            directory: directory.to_owned(),
            socket,
            log,
            lock,
        })
    }
}

/// Removes a bridge's files here, except its logs and its lock.
pub(super) fn clear(directory: &Path) {
    instance::clean(directory);
    let _ = fs::remove_dir_all(directory.join(SHIM));
    let _ = fs::remove_file(directory.join(SOCKET));
}

/// Takes this network namespace for a bridge until what is returned is dropped: two that begin at once do not see each other's program
/// yet. The kernel frees the name, which a namespace has once, when the process ends.
fn alone() -> Result<UnixDatagram, String> {
    let name =
        SocketAddr::from_abstract_name(ALONE).and_then(|name| UnixDatagram::bind_addr(&name));
    name.map_err(|error| match error.kind() {
        ErrorKind::AddrInUse => format!("{ELSEWHERE} (`ss -xp | grep @{ALONE}` shows its process)"),
        _ => format!("cannot bind the socket @{ALONE}: {error}"),
    })
}

/// Why there can be no bridge in this directory: another directory's is on.
pub fn elsewhere() -> Option<&'static str> {
    attached().iter().any(is_bridges).then_some(ELSEWHERE)
}

/// The programs that steer in this network namespace. Without the right to list programs, the steering's own test reports that.
pub(super) fn attached() -> Vec<Attached> {
    let own = File::open("/proc/thread-self/ns/net");
    own.ok()
        .and_then(|own| bpf::list_attached(own.as_fd()).ok())
        .unwrap_or_default()
}

pub(super) fn is_bridges(program: &Attached) -> bool {
    program
        .known
        .as_ref()
        .is_some_and(|(name, _)| name == Purpose::Bridge.name())
}
