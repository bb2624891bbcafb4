//! Leases of shims: a lease shows that its shim is alive, and tells siblings the shim's state.
//!
//! A lease is `leases/ID.json`, named after the shim's instance, with the fields of LeaseSpec
//! (`coordination.k8s.io/v1`) where LeaseSpec has them. The shim replaces its lease, by rename,
//! after each third of the lease duration. So:
//!
//! * **Alive means not expired**, on CLOCK_BOOTTIME and within the boot that the lease names.
//!   Wall-clock times are informative only.
//! * **One ID, one shim.** The shim's socket keeps a second shim from starting.
//! * **A lease has no lock.** [`prune`] and [`remove`] read a lease just before they remove it. If
//!   the owner renews it in the microseconds between, the renewed lease is lost. The owner hung
//!   until then; if it lives, it writes the lease again within a third of the lease duration.
//!
//! A new field does not change the format, and has a default: siblings of the previous version do
//! not write it. The previous version reads a new [`Phase`] as [`Phase::Waiting`].

use super::BerthDir;
use super::file::{self, IgnoredFile, Listing, list_names, read_all};
use crate::instance_id::InstanceId;
use crate::terms::{Phase, ShimId};
use berth_os::file::replace_file;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Format of the leases that this version writes, and the only format that it reads.
pub const VERSION: u32 = 1;

/// Maximum number of listen addresses of a shim. A node has a handful.
const MAX_LISTEN: usize = 64;

/// Maximum length of each text in a lease (the version and the boot ID), in bytes. A boot ID has
/// 36.
const MAX_TEXT: usize = 64;

/// Maximum duration of a lease, in seconds: a day. Longer leases would be useless, because siblings
/// notice that a shim hangs only when its lease has expired.
const MAX_DURATION: u32 = 86_400;

pub const LONGEST_DURATION: Duration = Duration::from_secs(MAX_DURATION as u64);

/// Age at which a temporary file counts as left over by a shim that died. Writing a lease takes
/// microseconds.
const LEFTOVER_AGE: Duration = Duration::from_secs(60);

/// The lease of a shim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Lease {
    pub version: u32,
    /// Name of the shim and its instance in the berth. The lease's file has this name.
    pub instance: InstanceId,
    /// ID of the shim's process, as 16 lower-case hexadecimal digits.
    #[serde(
        serialize_with = "file::serialize_display",
        deserialize_with = "file::deserialize_from_str"
    )]
    pub holder_identity: ShimId,
    /// Time for which the lease holds after each renewal.
    pub lease_duration_seconds: u32,
    /// Time when this holder first wrote the lease, wall clock, in microseconds. No decision
    /// depends on it.
    #[serde(
        serialize_with = "file::serialize_micro_time",
        deserialize_with = "file::deserialize_time"
    )]
    pub acquire_time: SystemTime,
    /// Time when this holder last wrote the lease, wall clock, in microseconds. No decision depends
    /// on it.
    #[serde(
        serialize_with = "file::serialize_micro_time",
        deserialize_with = "file::deserialize_time"
    )]
    pub renew_time: SystemTime,
    /// Number of changes of the holder. Always 0: nothing reads the field, but the previous version
    /// requires it.
    pub lease_transitions: u32,
    /// The instance's address, if it was configured and is not in a record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<SocketAddr>,
    pub state: Phase,
    pub ready: bool,
    /// True if the shim knows an instance to which connections can go.
    pub reachable: bool,
    pub listen: Vec<SocketAddr>,
    pub berth_version: String,
    pub boot_id: String,
    /// Time at which the lease expires, in milliseconds on CLOCK_BOOTTIME.
    pub expires_boottime_ms: u64,
}

impl Lease {
    /// Parses a lease from a file that is named after `id`.
    pub fn parse(bytes: &[u8], id: &InstanceId) -> Result<Self, String> {
        let lease: Self = file::parse_versioned(bytes, "lease", VERSION)?;
        if lease.instance != *id {
            return Err(format!(
                "the file's name does not match: the content is for the instance {}",
                lease.instance
            ));
        }
        lease.check_fields()?;
        Ok(lease)
    }

    /// True if the lease is valid at the time `now` of CLOCK_BOOTTIME in the boot `boot_id`.
    ///
    /// A lease that would hold for more than ten durations and a minute is invalid: in effect it
    /// would never expire.
    pub fn is_live(&self, boot_id: &str, now: Duration) -> bool {
        let left = self.expires().saturating_sub(now);
        self.boot_id == boot_id
            && !left.is_zero()
            && left <= 10 * self.duration() + Duration::from_secs(60)
    }

    /// Extends the lease by its duration from `now` (CLOCK_BOOTTIME). `wall` is the time `now` on
    /// the wall clock.
    pub fn renew(&mut self, now: Duration, wall: SystemTime) {
        self.renew_time = wall;
        self.expires_boottime_ms = now
            .saturating_add(self.duration())
            .as_millis()
            .try_into()
            .unwrap_or(u64::MAX);
    }

    /// Returns a time on CLOCK_BOOTTIME that is at most a second before the last renewal. The exact
    /// time is unknown, because the lease contains its duration in whole seconds.
    pub fn last_renewal_lower_bound(&self) -> Duration {
        self.expires()
            .saturating_sub(self.duration() + Duration::from_secs(1))
    }

    /// Returns the time for which the lease holds after each renewal.
    pub fn duration(&self) -> Duration {
        Duration::from_secs(self.lease_duration_seconds.into())
    }

    pub fn expires(&self) -> Duration {
        Duration::from_millis(self.expires_boottime_ms)
    }

    /// True if the shim counts as dead: its lease is from another boot, or expired longer ago than
    /// the lease's duration. A lease that has just expired is kept, to show which shim hangs.
    fn is_stale(&self, boot_id: &str, now: Duration) -> bool {
        self.boot_id != boot_id || now.saturating_sub(self.expires()) > self.duration()
    }

    fn check_fields(&self) -> Result<(), String> {
        if !(1..=MAX_DURATION).contains(&self.lease_duration_seconds) {
            return Err(format!(
                "a duration of {} s is not between 1 s and {MAX_DURATION} s",
                self.lease_duration_seconds
            ));
        }
        let nowhere = |backend: &SocketAddr| {
            backend.ip().to_canonical().is_unspecified() || !is_usable_address(*backend)
        };
        if let Some(backend) = self.backend.filter(nowhere) {
            return Err(format!(
                "the backend {backend} is not an address of one host, with a port"
            ));
        }
        if self.listen.len() > MAX_LISTEN {
            return Err(format!(
                "{} listen addresses, and at most {MAX_LISTEN} addresses are read",
                self.listen.len()
            ));
        }
        if let Some(bad) = self
            .listen
            .iter()
            .find(|address| !is_usable_address(**address))
        {
            return Err(format!(
                "the listen address {bad} is not a unicast address with a port"
            ));
        }
        for (name, text) in [
            ("berthVersion", &self.berth_version),
            ("bootId", &self.boot_id),
        ] {
            let printable = text.bytes().all(|byte| byte.is_ascii_graphic());
            if text.is_empty() || text.len() > MAX_TEXT || !printable {
                return Err(format!(
                    "the lease's {name} is not 1 to {MAX_TEXT} printable characters"
                ));
            }
        }
        Ok(())
    }
}

/// Writes a lease and replaces the file with its name.
///
/// Nothing is synced to disk: after a crash of the machine every lease is from another boot, a torn
/// file is ignored, and a disk that is slow to sync would let leases expire.
///
/// # Errors
/// The file system is full, read-only or the like, or siblings would ignore the lease
/// (`InvalidInput`).
pub fn write(berth: &BerthDir, lease: &Lease) -> io::Result<()> {
    lease
        .check_fields()
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    let bytes = file::to_bytes(lease)?;
    let new = berth
        .leases_path()
        .join(format!(".{}.lease.new", lease.instance));
    let write = || {
        replace_file(&path_of(berth, &lease.instance), &new, |mut file| {
            file.write_all(&bytes)
        })
    };
    // If the wall clock jumped during the write, a prune may have removed the new file as left
    // over. Write it again.
    write().or_else(|_| write())
}

/// Removes a lease if its file is readable and still has the lease's holder.
pub fn remove(berth: &BerthDir, lease: &Lease) -> io::Result<()> {
    match read(berth, &lease.instance) {
        Ok(Some(found)) if found.holder_identity == lease.holder_identity => {
            file::remove_file(&path_of(berth, &lease.instance)).map(drop)
        }
        _ => Ok(()),
    }
}

/// Reads the lease of one shim, which may be alive or dead. Returns `None` if there is no file.
///
/// # Errors
/// The file is not a lease, or is not trusted.
pub fn read(berth: &BerthDir, id: &InstanceId) -> Result<Option<Lease>, IgnoredFile> {
    let path = path_of(berth, id);
    read_at(berth, id, &path).map_err(|reason| IgnoredFile::new(path, &reason))
}

/// True if no file has the name of the shim's lease. An invalid file is not missing.
pub fn is_missing(berth: &BerthDir, id: &InstanceId) -> bool {
    file::is_missing(&path_of(berth, id))
}

/// Lists the leases of a berth, those of dead shims too.
///
/// # Errors
/// The directory cannot be listed. A missing directory gives an empty listing.
pub fn list(berth: &BerthDir) -> io::Result<Listing<Lease>> {
    read_all(&berth.leases_path(), |id, path| read_at(berth, id, path))
}

/// Removes leases that are from another boot or have been expired for longer than their duration,
/// and half-written files of shims that died. Returns the number of removed files. `now` is on
/// CLOCK_BOOTTIME.
///
/// # Errors
/// The directory cannot be listed, or a file not removed. The remaining files are removed
/// nevertheless.
pub fn prune(berth: &BerthDir, boot_id: &str, now: Duration) -> io::Result<usize> {
    let mut removed = Ok(0);
    for name in list_names(&berth.leases_path())? {
        let path = berth.leases_path().join(&name);
        let bytes = name.as_encoded_bytes();
        let stale = match file::id_of(&name) {
            // Reads the lease twice, the second time just before the removal: the module's
            // documentation says why.
            Some(id) => (0..2).all(|_| {
                read_at(berth, &id, &path).is_ok_and(|found| is_stale(found, boot_id, now))
            }),
            None => bytes.starts_with(b".") && bytes.ends_with(b".lease.new") && is_leftover(&path),
        };
        if stale {
            removed = match (removed, file::remove_file(&path)) {
                (Ok(count), Ok(was_there)) => Ok(count + usize::from(was_there)),
                (Err(error), _) | (Ok(_), Err(error)) => Err(error),
            };
        }
    }
    removed
}

fn is_stale(found: Option<Lease>, boot_id: &str, now: Duration) -> bool {
    found.is_some_and(|lease| lease.is_stale(boot_id, now))
}

fn is_leftover(path: &Path) -> bool {
    let written = fs::symlink_metadata(path)
        .and_then(|meta| meta.modified())
        .ok();
    written
        .and_then(|written| written.elapsed().ok())
        .is_some_and(|age| age > LEFTOVER_AGE)
}

/// Reads a lease. Returns `None` if the file is gone. The error is the reason to ignore the file.
fn read_at(berth: &BerthDir, id: &InstanceId, path: &Path) -> Result<Option<Lease>, String> {
    file::open_and_parse(berth, path, |bytes| Lease::parse(bytes, id))?
        .map(|opened| opened.content)
        .transpose()
}

fn path_of(berth: &BerthDir, id: &InstanceId) -> PathBuf {
    berth.leases_path().join(format!("{id}.json"))
}

/// True if a shim can listen on the address: it has a port, and is a unicast or unspecified
/// address.
fn is_usable_address(address: SocketAddr) -> bool {
    let group = match address.ip().to_canonical() {
        IpAddr::V4(ip) => ip.is_multicast() || ip.is_broadcast(),
        IpAddr::V6(ip) => ip.is_multicast(),
    };
    address.port() != 0 && !group
}

#[cfg(test)]
pub(super) mod tests;
