//! Exclusive claims: one bridge per directory, and one per network namespace.

use super::watch::NEXT_STEP;
use super::{LOCK_FILE, logs, temporary_instance};
use berth_manifest::file::suggest_fix;
use berth_node::ipc::bridge::SOCKET_NAME;
use berth_os::bpf::{self, Attached, Purpose};
use berth_os::file::{ensure_private_directory, lock_file_within};
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

/// Run directory of the bridge's shim, with the shim's lease.
pub(super) const SHIM: &str = "bridge-shim";

/// Error message if a bridge with another directory runs on this node.
const OTHER_BRIDGE_RUNS: &str = "another bridge is on, in another directory: end that bridge";

/// Name of the abstract socket that a bridge holds, unique in the network namespace.
const NAMESPACE_SOCKET: &str = "berth-bridge";

/// Time for which a bridge that has done its work still answers on its socket, so that waiting
/// commands can read the outcome.
pub(super) const REPORTING: Duration = Duration::from_secs(2);

/// A directory claimed by the bridge, with the bridge's socket.
#[derive(Debug)]
pub struct Claim {
    pub(super) directory: PathBuf,
    pub(super) socket: OwnedFd,
    /// The daemon's log.
    pub log: File,
    pub(super) lock: DirectoryLock,
}

/// Locks that a bridge holds until its process ends.
#[derive(Debug)]
pub(super) struct DirectoryLock {
    /// The lock file. Has content while the bridge runs, and after a bridge that failed.
    pub(super) file: Flock<File>,
    _alone: UnixDatagram,
}

impl DirectoryLock {
    /// Writes to the lock file that the bridge is on. A bridge that is killed cannot record its
    /// failure, so the text then stays, and the next bridge reads it as a failure.
    pub(super) fn write_begun(&mut self) {
        if let Err(error) = self.file.write_all(b"on\n") {
            tracing::info!(%error, "if this bridge fails, the next bridge will not keep the logs of this bridge");
        }
    }
}

impl Claim {
    /// Claims a directory that the preflight accepted, and removes the files of a killed bridge
    /// there.
    ///
    /// # Errors
    /// Another bridge has claimed the directory, or the directory cannot be created.
    pub fn acquire(directory: &Path) -> Result<Self, String> {
        let failed = |what: &'static str| {
            let path = directory.display().to_string();
            move |error: io::Error| {
                format!(
                    "cannot {what} in {path}: {error}{}",
                    suggest_fix(what, &error)
                )
            }
        };
        ensure_private_directory(directory, geteuid().as_raw())
            .map_err(failed("make the bridge's directory"))?;
        let mut options = OpenOptions::new();
        options
            .create(true)
            .append(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW);
        let file = options
            .open(directory.join(LOCK_FILE))
            .map_err(failed("make a file"))?;
        // A bridge that has published its outcome may not have exited yet.
        let file = lock_file_within(file, REPORTING).map_err(|_| {
            format!(
                "another bridge is on ({}): see `berth bridge status`",
                directory.display()
            )
        })?;
        let lock = DirectoryLock {
            file,
            _alone: claim_namespace()?,
        };
        remove_files(directory);
        let path = directory.join(SOCKET_NAME);
        let socket = seqpacket::bind_listener(&path).map_err(failed("make a socket"))?;
        fs::set_permissions(&path, Permissions::from_mode(0o600))
            .map_err(failed("make a socket"))?;
        let last_failed = lock.file.metadata().is_ok_and(|meta| meta.len() > 0);
        logs::begin_logs(directory, last_failed);
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

/// Removes a bridge's files in the directory, except for the logs and the lock.
pub(super) fn remove_files(directory: &Path) {
    temporary_instance::remove_files(directory);
    let _ = fs::remove_dir_all(directory.join(SHIM));
    let _ = fs::remove_file(directory.join(SOCKET_NAME));
}

/// Describes how the last bridge of a directory ended. Must be called only if no bridge runs there.
pub fn describe_last_bridge(directory: &Path) -> String {
    let at = directory.display();
    match fs::metadata(directory.join(LOCK_FILE)) {
        Ok(lock) if lock.len() == 0 => {
            format!("the last bridge in {at} ended as it should, and its logs are there")
        }
        Ok(_) => format!(
            "the last bridge in {at} failed or was killed, and its logs are there; {NEXT_STEP}"
        ),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            format!("since this node started, no bridge began in {at}")
        }
        Err(error) => format!("how the last bridge in {at} ended cannot be read: {error}"),
    }
}

/// Claims the network namespace for this bridge: binds an abstract socket with a fixed name, which
/// only one process can hold. The claim ends when the returned socket is dropped or the process
/// ends. The BPF programs alone would not do: two bridges that begin at the same time do not see
/// each other's program yet.
fn claim_namespace() -> Result<UnixDatagram, String> {
    let name = SocketAddr::from_abstract_name(NAMESPACE_SOCKET)
        .and_then(|name| UnixDatagram::bind_addr(&name));
    name.map_err(|error| match error.kind() {
        ErrorKind::AddrInUse => {
            format!("{OTHER_BRIDGE_RUNS} (`ss -xp | grep @{NAMESPACE_SOCKET}` shows its process)")
        }
        _ => format!("cannot bind the socket @{NAMESPACE_SOCKET}: {error}"),
    })
}

/// Returns an error message if a bridge's BPF program steers in this network namespace. The caller
/// has found no bridge in its own directory, so that bridge has another directory.
pub fn find_other_bridge() -> Option<&'static str> {
    list_programs()
        .iter()
        .any(is_of_a_bridge)
        .then_some(OTHER_BRIDGE_RUNS)
}

/// The programs that steer in this network namespace. Without the right to list programs the list
/// is empty, and the steering's self-test reports the missing right.
pub(super) fn list_programs() -> Vec<Attached> {
    let own = File::open("/proc/thread-self/ns/net");
    own.ok()
        .and_then(|own| bpf::list_attached(own.as_fd()).ok())
        .unwrap_or_default()
}

pub(super) fn is_of_a_bridge(program: &Attached) -> bool {
    program
        .known
        .as_ref()
        .is_some_and(|(name, _)| name == Purpose::Bridge.name())
}
