//! Records of instances: the address of each apiserver, and whether it is alive.
//!
//! A record is `instances/ID.json`. The instance's process holds an exclusive lock (flock) on the
//! file, from before the file gets its name until the process ends, through execve. So:
//!
//! * **Alive means locked.** Only the owner takes an exclusive lock. A process that checks a record
//!   takes a shared lock and releases it at once. Two checks therefore do not see each other, and a
//!   check never blocks an owner, which locks a new file before the file gets its name.
//! * **Gone means unlocked, not unlinked.** A shim that found a live record keeps the file's
//!   descriptor ([`HeldRecord`]) and checks the lock through the descriptor from then on. A
//!   removed, hidden or unreadable name does not show whether the process is alive.
//! * **Dead is final.** A file that was found unlocked is never locked again: a restarted instance
//!   writes a new file and renames it over the old file.
//! * **The time of death** is recorded by the first process that finds the record unlocked. It sets
//!   the file's modification time and then removes the write permission (mode 0400) to mark the
//!   modification time as the time of death. After [`DEAD_RECORD_LIFETIME`] the record is pruned;
//!   until then a restarted instance finds its address in the record. The time is wall-clock time:
//!   if the clock jumps, an address is forgotten early or late, which has no other effect.
//! * **Names are written** (by a claim or a prune) under the lock on `instances/.lock`, so a record
//!   that was renamed into place a moment ago is not removed, and no two claims choose the same
//!   address.
//!
//! Nothing is synced to disk: /run is a tmpfs, no record outlives its process, and a torn file is
//! ignored.
//!
//! The lock belongs to the open file. If an apiserver leaves a child behind that inherited the
//! descriptor, the child keeps the record alive; probes still find the address dead.

use super::BerthDir;
use super::file::{self, id_of, list_names, read_all};
pub use super::file::{IgnoredFile, Listing};
use crate::instance_id::InstanceId;
use berth_os::file::{lock_file_within, replace_file};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, Flock, FlockArg, fcntl};
use serde::{Deserialize, Serialize};
use std::error::Error;
use std::fs::{self, File, FileTimes, Permissions, TryLockError};
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Format of the records that this version writes, and the only format that it reads. New fields do
/// not change the format, because readers ignore unknown fields.
const VERSION: u32 = 1;

/// Time after which the record of a dead instance is pruned: ten minutes, longer than the kubelet's
/// longest pause between two restarts (five).
pub const DEAD_RECORD_LIFETIME: Duration = Duration::from_secs(600);

/// Time for which a claim waits for another claim, which takes milliseconds. If another process
/// holds the lock longer, it is stopped (SIGSTOP), and the claim fails with a message.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// Mode of the file of a dead instance's record. The mode means that the file's modification time
/// is the time of death.
const DEAD_MODE: u32 = 0o400;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub version: u32,
    /// The instance's name in its berth.
    pub instance: InstanceId,
    /// The listen address of the instance: an address in 127.0.0.0/8 and the berth's port.
    pub address: SocketAddr,
    pub advertise: IpAddr,
    /// True if the instance has a supervisor, to which shims may send clients.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub supervised: bool,
    /// The reason why there is no supervisor although one was wanted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unsupervised: Option<String>,
    /// The process ID in the instance's PID namespace. No decision depends on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Time at which the instance started, wall clock, in full seconds. No decision depends on it.
    #[serde(
        serialize_with = "file::serialize_second_time",
        deserialize_with = "file::deserialize_time"
    )]
    pub started: SystemTime,
}

impl Record {
    /// Parses a record from a file that is named after `id`.
    pub fn parse(bytes: &[u8], id: &InstanceId) -> Result<Self, String> {
        let record: Self = file::parse_versioned(bytes, "record", VERSION)?;
        if record.instance != *id {
            return Err(format!(
                "the file's name does not match: the content is for the instance {}",
                record.instance
            ));
        }
        match record.address {
            SocketAddr::V4(address) if address.ip().is_loopback() && address.port() != 0 => {
                Ok(record)
            }
            // Connections to any other address would leave the node, or fail.
            other => Err(format!(
                "the address {other} is not an address in 127.0.0.0/8 with a port"
            )),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    #[error(
        "the instance {instance} is alive{}: its record {} is locked. Stop that instance, or start this instance with another \
         --instance",
        pid.map(|pid| format!(" (pid {pid} according to the record)")).unwrap_or_default(),
        path.display()
    )]
    Alive {
        instance: InstanceId,
        path: PathBuf,
        pid: Option<u32>,
    },
    #[error(
        "another process has held {} for {} s: a process that starts an apiserver is stopped or hangs; end that process",
        path.display(),
        LOCK_TIMEOUT.as_secs()
    )]
    Busy { path: PathBuf },
    #[error(transparent)]
    Address(Box<dyn Error + Send + Sync>),
    #[error(
        "cannot {what} {}: {why}: check that the file system is neither full nor read-only, or give another directory with --run-dir",
        path.display()
    )]
    Io {
        what: &'static str,
        path: PathBuf,
        why: io::Error,
    },
}

#[derive(Debug, Clone)]
pub struct Claimant<'a> {
    pub instance: &'a InstanceId,
    pub advertise: IpAddr,
    /// `Some(Ok(()))` if the instance has a supervisor. `Some(Err(_))` with the reason if it has
    /// none although one was wanted. `None` if none was wanted.
    pub supervisor: Option<Result<(), String>>,
    pub pid: Option<u32>,
}

/// A written and locked record. The instance counts as alive until the claim is dropped or, with
/// [`InstanceClaim::keep_through_exec`], until the process ends.
///
/// Dropping the claim leaves a dead record, so that the next instance with that ID gets the same
/// address. All processes that inherited the descriptor share the lock: a drop in the parent
/// releases the lock for a child, too. A process that starts the apiserver as a child keeps the
/// claim until the child has ended.
#[derive(Debug)]
pub struct InstanceClaim {
    record: Record,
    path: PathBuf,
    lock: Flock<File>,
}

impl InstanceClaim {
    pub fn record(&self) -> &Record {
        &self.record
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Calls `exec`, which returns only on failure, and keeps the record locked through it. After a
    /// failure, removes the record. A child that is started meanwhile inherits the lock's
    /// descriptor.
    ///
    /// # Errors
    /// The descriptor's flag cannot be changed; the record is removed.
    pub fn keep_through_exec(
        self,
        exec: impl FnOnce() -> io::Error,
    ) -> Result<io::Error, ClaimError> {
        let inherited = fcntl(&*self.lock, FcntlArg::F_SETFD(FdFlag::empty()));
        let outcome = inherited
            .map(|_| exec())
            .map_err(|errno| io_error("clear the close-on-exec flag of", &self.path)(errno.into()));
        self.remove();
        outcome
    }

    /// Removes the record of an instance that did not start. If that fails, the record stays as
    /// that of a dead instance.
    pub fn remove(self) {
        // Nobody replaces or prunes a locked record, so the path still names this record.
        let _ = fs::remove_file(&self.path);
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedInstance {
    pub record: Record,
    pub alive: bool,
}

/// The record of a live instance and the descriptor of its file. The file's lock shows whether the
/// instance is still alive, whatever happens to the file's name.
#[derive(Debug, Clone)]
pub struct HeldRecord {
    record: Record,
    file: Arc<File>,
    inode: u64,
}

impl HeldRecord {
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// The inode of the record's file. While this descriptor is held, the next process's record has
    /// another inode, even if its content is equal.
    pub fn inode(&self) -> u64 {
        self.inode
    }

    /// False if the instance has ended. If the lock cannot be tested, the instance counts as alive.
    pub fn is_alive(&self) -> bool {
        is_locked(&self.file).unwrap_or(true)
    }
}

/// Records an instance of a berth, with the address that `choose` returns. `choose` gets the
/// instance's previous address, if any, and the addresses of the berth's other instances, alive or
/// recently dead.
///
/// First waits, at most 5 s, for other claims in the berth to end, and prunes.
///
/// # Errors
/// See [`ClaimError`]. After any error nothing is recorded, and an earlier record is unchanged.
pub fn claim(
    berth: &BerthDir,
    claimant: &Claimant<'_>,
    choose: impl FnOnce(
        Option<SocketAddr>,
        &[SocketAddr],
    ) -> Result<SocketAddr, Box<dyn Error + Send + Sync>>,
) -> Result<InstanceClaim, ClaimError> {
    let directory = berth.instances_path();
    let _names = lock_record_names(&directory, LOCK_TIMEOUT)?;
    let path = path_of(berth, claimant.instance);
    let previous = previous_address(berth, claimant.instance, &path)?;
    let listing = list(berth).map_err(io_error("list", &directory))?;
    prune_locked_records(berth, SystemTime::now()).map_err(io_error("list", &directory))?;
    let others = listing
        .found
        .into_iter()
        .filter(|other| other.record.instance != *claimant.instance);
    let taken: Vec<_> = others.map(|other| other.record.address).collect();
    let record = Record {
        version: VERSION,
        instance: claimant.instance.clone(),
        address: choose(previous, &taken).map_err(ClaimError::Address)?,
        advertise: claimant.advertise,
        supervised: matches!(claimant.supervisor, Some(Ok(()))),
        unsupervised: claimant.supervisor.clone().and_then(Result::err),
        pid: claimant.pid,
        started: SystemTime::now(),
    };

    let lock = write_record(&directory, &record)?;
    Ok(InstanceClaim { record, path, lock })
}

/// Lists the records of a berth, each with its process's state, alive or dead.
///
/// # Errors
/// The directory cannot be listed. A missing directory gives an empty listing.
pub fn list(berth: &BerthDir) -> io::Result<Listing<ListedInstance>> {
    read_all(&berth.instances_path(), |id, path| {
        Ok(
            inspect_file(berth, id, path)?.map(|(held, alive)| ListedInstance {
                record: held.record,
                alive,
            }),
        )
    })
}

/// Lists the records of the live instances of a berth, with their descriptors.
pub fn list_live(berth: &BerthDir) -> io::Result<Listing<HeldRecord>> {
    read_all(&berth.instances_path(), |id, path| {
        Ok(inspect_file(berth, id, path)?.and_then(|(held, alive)| alive.then_some(held)))
    })
}

/// Removes records of instances that have been dead for longer than [`DEAD_RECORD_LIFETIME`] at the
/// time `now` (wall clock), and leftovers of claims that died. Returns the number of removed files.
/// While a claim is being made, does nothing.
pub fn prune(berth: &BerthDir, now: SystemTime) -> io::Result<usize> {
    match lock_record_names(&berth.instances_path(), Duration::ZERO) {
        Ok(_names) => prune_locked_records(berth, now),
        Err(ClaimError::Busy { .. }) => Ok(0),
        Err(ClaimError::Io { why, .. }) if why.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(ClaimError::Io { why, .. }) => Err(why),
        Err(other) => Err(io::Error::other(other)),
    }
}

/// Does the work of [`prune`]. The caller holds the lock on the names.
fn prune_locked_records(berth: &BerthDir, now: SystemTime) -> io::Result<usize> {
    let mut removed = 0;
    for name in list_names(&berth.instances_path())? {
        let path = berth.instances_path().join(&name);
        let bytes = name.as_encoded_bytes();
        let left_over = bytes.starts_with(b".") && bytes.ends_with(b".new");
        if left_over || id_of(&name).is_some_and(|id| is_long_dead(berth, &path, &id, now)) {
            removed += usize::from(file::remove_file(&path)?);
        }
    }
    Ok(removed)
}

fn is_long_dead(berth: &BerthDir, path: &Path, id: &InstanceId, now: SystemTime) -> bool {
    let Ok(Some(found)) = RecordFile::open(berth, id, path) else {
        return false;
    };
    let Ok(meta) = found.file.metadata() else {
        return false;
    };
    let since = meta
        .modified()
        .ok()
        .filter(|_| meta.mode() & 0o777 == DEAD_MODE);
    let long = since
        .and_then(|since| now.duration_since(since).ok())
        .is_some_and(|dead| dead > DEAD_RECORD_LIFETIME);
    long && is_locked(&found.file).is_ok_and(|locked| !locked)
}

/// Returns the address in an earlier record of the ID, if the record is dead and readable.
fn previous_address(
    berth: &BerthDir,
    id: &InstanceId,
    path: &Path,
) -> Result<Option<SocketAddr>, ClaimError> {
    // The claim replaces a file that is no record, for example a link or another user's file.
    let Ok(Some(found)) = RecordFile::open(berth, id, path) else {
        return Ok(None);
    };
    // If the file is locked, its instance is alive, even if a later version of berth wrote content
    // that cannot be read.
    if is_locked(&found.file).map_err(io_error("lock", path))? {
        let pid = found.content.ok().and_then(|record| record.pid);
        return Err(ClaimError::Alive {
            instance: id.clone(),
            path: path.to_owned(),
            pid,
        });
    }
    Ok(found.content.ok().map(|record| record.address))
}

/// Reads a record, and tests whether its process is alive (the bool). Returns `None` if there is no
/// file. The error is the reason to ignore the file.
fn inspect_file(
    berth: &BerthDir,
    id: &InstanceId,
    path: &Path,
) -> Result<Option<(HeldRecord, bool)>, String> {
    let Some(found) = RecordFile::open(berth, id, path)? else {
        return Ok(None);
    };
    let alive = is_locked(&found.file)
        .map_err(|error| format!("the file's lock cannot be tested: {error}"))?;
    if !alive {
        mark_dead(&found.file);
    }
    let inode = found
        .file
        .metadata()
        .map_err(|error| error.to_string())?
        .ino();
    Ok(Some((
        HeldRecord {
            record: found.content?,
            file: Arc::new(found.file),
            inode,
        },
        alive,
    )))
}

/// A file with the name of a record, and the file's content.
type RecordFile = file::OpenedFile<Record>;

impl RecordFile {
    /// Opens a record. Returns `None` if there is no file. The error is the reason to ignore the
    /// file.
    fn open(berth: &BerthDir, id: &InstanceId, path: &Path) -> Result<Option<Self>, String> {
        file::open_and_parse(berth, path, |bytes| Record::parse(bytes, id))
    }
}

fn path_of(berth: &BerthDir, id: &InstanceId) -> PathBuf {
    berth.instances_path().join(format!("{id}.json"))
}

/// Records the time of death, once. The time is set before the mode: a crash between the two would
/// otherwise leave the time of writing as the time of death.
///
/// A failure (a read-only mount, a file of another user) only keeps the record longer.
fn mark_dead(file: &File) {
    let marked = file
        .metadata()
        .is_ok_and(|meta| meta.mode() & 0o777 == DEAD_MODE);
    if !marked
        && file
            .set_times(FileTimes::new().set_modified(SystemTime::now()))
            .is_ok()
    {
        let _ = file.set_permissions(Permissions::from_mode(DEAD_MODE));
    }
}

/// True if an owner holds the lock of the file, which means that the instance is alive.
fn is_locked(file: &File) -> io::Result<bool> {
    match file.try_lock_shared() {
        Ok(()) => file.unlock().map(|()| false),
        Err(TryLockError::WouldBlock) => Ok(true),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Takes the lock on the names of records, for a claim or a prune. Opens the lock file for reading
/// only, because closing it would otherwise be an event for a [`super::watch::Watch`].
fn lock_record_names(directory: &Path, wait: Duration) -> Result<Flock<File>, ClaimError> {
    let path = directory.join(".lock");
    let nofollow = nix::fcntl::OFlag::O_NOFOLLOW | nix::fcntl::OFlag::O_NONBLOCK;
    let flags = nofollow | nix::fcntl::OFlag::O_CREAT | nix::fcntl::OFlag::O_CLOEXEC;
    let mode = nix::sys::stat::Mode::S_IRUSR | nix::sys::stat::Mode::S_IWUSR;
    let file = nix::fcntl::open(&path, flags, mode)
        .map(File::from)
        .map_err(|e| io_error("open", &path)(e.into()))?;
    lock_file_within(file, wait).map_err(|errno| match errno {
        Errno::EWOULDBLOCK => ClaimError::Busy { path },
        errno => io_error("lock", &path)(errno.into()),
    })
}

/// Writes a record over the file with its name, and returns the record's lock. The caller holds the
/// lock on names.
fn write_record(directory: &Path, record: &Record) -> Result<Flock<File>, ClaimError> {
    let new = directory.join(format!(".{}.new", record.instance));
    let path = directory.join(format!("{}.json", record.instance));
    // The claims of a berth are made one after the other, so only a claim that died can have left a
    // file with the temporary name.
    let written = replace_file(&path, &new, |file| {
        // Keep the file open for writing. The kernel closes it when the process ends, and that is
        // an event for a `super::watch::Watch`.
        let mut file =
            Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| errno)?;
        file.write_all(&file::to_bytes(record)?)?;
        Ok(file)
    });
    written.map_err(io_error("write", &path))
}

fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ClaimError {
    let path = path.to_owned();
    move |why| ClaimError::Io { what, path, why }
}

#[cfg(test)]
mod tests;
