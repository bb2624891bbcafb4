//! The run directory, where the shims and apiservers of a node find each other.
//!
//! ```text
//! /run/berth/                  mode 0700, owned by the shims' uid
//!   10.0.0.5:6443/             a berth, named by its address
//!     instances/ID.json        an apiserver that `berth exec` started; see [`instance`]
//!     leases/ID.json           a live shim; see [`lease`]
//!     ID.sock                  the shim's socket
//!     ID.accept                the socket of an apiserver's supervisor
//! ```
//!
//! Trust depends on write access to the run directory: this process's uid must own the directory,
//! and no other uid may write to it. The contents are checked nevertheless, because versions differ
//! and disks fill up.

mod file;
pub mod instance;
pub mod lease;
pub mod watch;

use crate::instance::InstanceId;
use berth_os::file::{make_private, none_if_missing};
use nix::unistd::{Uid, geteuid};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Maximum length of a Unix socket's path in bytes: 108 in `sockaddr_un` minus the closing NUL.
const SUN_PATH: usize = 107;

const WRITABLE_BY_OTHERS: u32 = 0o022;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "cannot make the directory {}: {why}: create it with mode 0700 for uid {uid}, or give another with --run-dir",
        path.display()
    )]
    Make {
        path: PathBuf,
        why: io::Error,
        uid: u32,
    },
    #[error("cannot read the directory {}: {why}: give another with --run-dir", path.display())]
    Read { path: PathBuf, why: io::Error },
    #[error(
        "{} is {found}, not a directory: remove it, or give the directory itself with --run-dir",
        path.display()
    )]
    NotADirectory { path: PathBuf, found: &'static str },
    #[error(
        "{} is owned by uid {owner}, this process is uid {uid}: run all shims and apiservers of a node with one uid, \
         chown the directory to {uid}, or give another with --run-dir",
        path.display()
    )]
    Owner { path: PathBuf, owner: u32, uid: u32 },
    #[error("{} is owned by uid {owner}, this process is uid {uid}: run this as root or as uid {owner}", path.display())]
    Reader { path: PathBuf, owner: u32, uid: u32 },
    #[error(
        "{} has mode {mode:04o}, so others may write to the directory: chmod 0700 the directory",
        path.display()
    )]
    Mode { path: PathBuf, mode: u32 },
    #[error(
        "the socket path {} is {length} bytes long, the kernel allows {SUN_PATH}: give a shorter --run-dir or --instance",
        path.display()
    )]
    SocketPath { path: PathBuf, length: usize },
}

/// The run directory, after a check of its owner and mode.
#[derive(Debug, Clone)]
pub struct RunDir {
    path: PathBuf,
    owner: u32,
}

impl RunDir {
    /// Returns the default path: `/run/berth` for root and without `$XDG_RUNTIME_DIR`, otherwise
    /// `$XDG_RUNTIME_DIR/berth`.
    pub fn default_path() -> PathBuf {
        default_path(geteuid().is_root(), std::env::var_os("XDG_RUNTIME_DIR"))
    }

    /// Opens the directory, or creates it with mode 0700.
    ///
    /// # Errors
    /// The directory cannot be created, is not a directory or is a symbolic link, is owned by
    /// another user (also for root, since a process that can write to the directory gets its
    /// listeners), or is writable for others.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let path = without_trailing_slash(path);
        let owner = open_dir(&path)?;
        Ok(Self { path, owner })
    }

    /// Opens the directory for commands that only read. Returns `None` if it does not exist.
    ///
    /// # Errors
    /// The errors of [`RunDir::open`], but root may read any user's directory.
    pub fn find(path: &Path) -> Result<Option<Self>, Error> {
        let path = without_trailing_slash(path);
        Ok(check_dir_to_read(&path)?.map(|owner| Self { path, owner }))
    }

    /// True if a process of this uid could use the directory. False if the directory does not
    /// exist.
    ///
    /// # Errors
    /// The errors of [`RunDir::open`] for that uid.
    pub fn is_usable_by(path: &Path, uid: Uid) -> Result<bool, Error> {
        Ok(check_dir_as(&without_trailing_slash(path), uid)?.is_some())
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the directory of a berth. Creates missing directories.
    ///
    /// # Errors
    /// The errors of [`RunDir::open`], for each directory.
    pub fn berth(&self, address: SocketAddr) -> Result<BerthDir, Error> {
        let berth = BerthDir {
            path: self.path.join(address.to_string()),
            address,
            owner: self.owner,
        };
        for path in [berth.path.clone(), berth.instances(), berth.leases()] {
            open_dir(&path)?;
        }
        Ok(berth)
    }

    /// Returns the berths that have a directory, in the order of their addresses. Skips entries
    /// that are not directories or not named by an address.
    pub fn berths(&self) -> Result<Vec<BerthDir>, Error> {
        let read = |why| Error::Read {
            path: self.path.clone(),
            why,
        };
        let mut berths = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(read)? {
            let name = entry.map_err(read)?.file_name();
            let Some(address) = name.to_str().and_then(parse_name) else {
                continue;
            };
            let path = self.path.join(&name);
            if let Ok(Some(owner)) = check_dir_to_read(&path) {
                berths.push(BerthDir {
                    path,
                    address,
                    owner,
                });
            }
        }
        berths.sort_by_key(|berth| berth.address);
        Ok(berths)
    }
}

#[derive(Debug, Clone)]
pub struct BerthDir {
    path: PathBuf,
    address: SocketAddr,
    owner: u32,
}

impl BerthDir {
    /// The berth's address, which names the directory.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn instances(&self) -> PathBuf {
        self.path.join("instances")
    }

    pub fn leases(&self) -> PathBuf {
        self.path.join("leases")
    }

    /// Path of the Unix socket of the shim with this instance ID.
    ///
    /// # Errors
    /// The path is too long for the kernel.
    pub fn socket_path(&self, id: &InstanceId) -> Result<PathBuf, Error> {
        self.path_of_socket(&format!("{id}.sock"))
    }

    /// Path of the Unix socket of the supervisor of the instance with this ID.
    ///
    /// # Errors
    /// The path is too long for the kernel.
    pub fn supervisor_path(&self, id: &InstanceId) -> Result<PathBuf, Error> {
        self.path_of_socket(&format!("{id}.accept"))
    }

    fn path_of_socket(&self, name: &str) -> Result<PathBuf, Error> {
        let path = self.path.join(name);
        match path.as_os_str().as_bytes().len() {
            length if length > SUN_PATH => Err(Error::SocketPath { path, length }),
            _ => Ok(path),
        }
    }

    /// True if a file of this owner is trusted. Trusted are this process's uid and the directory's
    /// owner; the two differ only when root reads.
    fn trusts(&self, owner: u32) -> bool {
        owner == self.owner || owner == geteuid().as_raw()
    }
}

fn default_path(root: bool, xdg: Option<OsString>) -> PathBuf {
    // The XDG specification requires that a relative path is ignored.
    let xdg = xdg
        .map(PathBuf::from)
        .filter(|xdg| !root && xdg.is_absolute());
    xdg.unwrap_or_else(|| "/run".into()).join("berth")
}

/// Removes a trailing slash from the path, which would make the kernel follow a symbolic link.
fn without_trailing_slash(path: &Path) -> PathBuf {
    path.components().collect()
}

fn parse_name(name: &str) -> Option<SocketAddr> {
    name.parse()
        .ok()
        .filter(|address: &SocketAddr| address.to_string() == name)
}

/// Creates a directory unless it exists, checks the directory, and returns its owner.
fn open_dir(path: &Path) -> Result<u32, Error> {
    if let Some(owner) = check_dir(path)? {
        return Ok(owner);
    }
    let failed = |why| Error::Make {
        path: path.to_owned(),
        why,
        uid: geteuid().as_raw(),
    };
    match make_private(path) {
        Ok(()) => {}
        // Another process has just created the directory; the check follows below.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(failed(error)),
    }
    // `None` if another process removes the directory each time.
    check_dir(path)?.ok_or_else(|| failed(io::ErrorKind::NotFound.into()))
}

/// Checks a directory and returns its owner. Returns `None` if there is no directory.
///
/// The check uses the path, not a descriptor: once the directory is known to belong to this process
/// and to be closed to others, only its parent's owner could exchange it, who is trusted like root.
fn check_dir(path: &Path) -> Result<Option<u32>, Error> {
    check_dir_as(path, geteuid())
}

/// Like [`check_dir`], but read access is enough.
fn check_dir_to_read(path: &Path) -> Result<Option<u32>, Error> {
    match check_dir(path) {
        // Check again with the owner's uid.
        Err(Error::Owner { owner, .. }) if geteuid().is_root() => {
            check_dir_as(path, Uid::from_raw(owner))
        }
        // This process cannot change the directory's owner.
        Err(Error::Owner { path, owner, uid }) => Err(Error::Reader { path, owner, uid }),
        checked => checked,
    }
}

fn check_dir_as(path: &Path, uid: Uid) -> Result<Option<u32>, Error> {
    let meta = none_if_missing(fs::symlink_metadata(path)).map_err(|why| Error::Read {
        path: path.to_owned(),
        why,
    })?;
    let Some(meta) = meta else { return Ok(None) };
    let path = || path.to_owned();
    if !meta.is_dir() {
        let found = if meta.is_symlink() {
            "a symbolic link"
        } else {
            "a file"
        };
        return Err(Error::NotADirectory {
            path: path(),
            found,
        });
    }
    let owner = meta.uid();
    if owner != uid.as_raw() {
        return Err(Error::Owner {
            path: path(),
            owner,
            uid: uid.as_raw(),
        });
    }
    if meta.mode() & WRITABLE_BY_OTHERS != 0 {
        return Err(Error::Mode {
            path: path(),
            mode: meta.mode() & 0o7777,
        });
    }
    Ok(Some(owner))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    pub(super) fn id(text: &str) -> InstanceId {
        InstanceId::parse(text).unwrap()
    }

    /// Returns a berth and the temporary directory with its run directory.
    pub(super) fn berth() -> (tempfile::TempDir, BerthDir) {
        let temp = tempfile::tempdir().unwrap();
        let run = RunDir::open(&temp.path().join("run")).unwrap();
        let berth = run.berth("10.0.0.5:6443".parse().unwrap()).unwrap();
        (temp, berth)
    }

    /// Asserts that exactly these files are ignored, each for a reason with the given words, in one
    /// short line.
    pub(super) fn assert_ignored(problems: &[file::IgnoredFile], expected: &[(&str, &str)]) {
        assert_eq!(problems.len(), expected.len(), "{problems:#?}");
        for (problem, (name, part)) in problems.iter().zip(expected) {
            let text = problem.to_string();
            assert!(
                text.contains(&format!("/{name} is ignored: ")) && text.contains(part),
                "{text}"
            );
            assert!(
                problem.reason.len() <= 300 && !text.contains(char::is_control),
                "{text}"
            );
        }
    }

    fn mode_of(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn the_default_follows_the_user() {
        assert_eq!(
            default_path(true, Some("/run/user/7".into())),
            Path::new("/run/berth")
        );
        assert_eq!(
            default_path(false, Some("/run/user/7".into())),
            Path::new("/run/user/7/berth")
        );
        for unset in [None, Some("".into()), Some("relative".into())] {
            assert_eq!(default_path(false, unset), Path::new("/run/berth"));
        }
    }

    #[test]
    fn makes_private_directories_and_lists_berths() {
        let temp = tempfile::tempdir().unwrap();
        assert!(RunDir::find(&temp.path().join("none")).unwrap().is_none());
        let run = RunDir::open(&temp.path().join("run/berth/")).unwrap();
        let names = ["10.0.0.5:6443", "[::1]:6443"];
        for name in names {
            let berth = run.berth(name.parse().unwrap()).unwrap();
            assert_eq!(berth.path(), run.path().join(name));
            for path in [
                run.path(),
                berth.path(),
                &berth.instances(),
                &berth.leases(),
            ] {
                assert_eq!(mode_of(path), 0o700, "{path:?}");
            }
        }
        fs::write(run.path().join("10.0.0.6:6443"), "a file").unwrap();
        fs::create_dir(run.path().join("010.0.0.5:6443")).unwrap();
        fs::create_dir(run.path().join("lost+found")).unwrap();
        let found: Vec<_> = run
            .berths()
            .unwrap()
            .iter()
            .map(|berth| berth.address().to_string())
            .collect();
        assert_eq!(found, names);
    }

    #[test]
    fn refuses_directories_that_others_could_change() {
        let temp = tempfile::tempdir().unwrap();
        let path = |name: &str| temp.path().join(name);
        fs::write(path("file"), "").unwrap();
        fs::create_dir(path("open")).unwrap();
        fs::set_permissions(path("open"), fs::Permissions::from_mode(0o770)).unwrap();
        symlink(temp.path(), path("link")).unwrap();
        symlink(path("nowhere"), path("dangling")).unwrap();
        let refused = |name: &str| RunDir::open(&path(name)).unwrap_err().to_string();
        assert!(refused("file").contains("is a file"));
        assert!(refused("open").contains("mode 0770") && refused("open").contains("chmod 0700"));
        for link in ["link", "link/", "dangling"] {
            assert!(refused(link).contains("a symbolic link"), "{link}");
        }
        assert!(
            RunDir::open(&path("file/below"))
                .unwrap_err()
                .to_string()
                .contains("--run-dir")
        );
    }

    #[test]
    fn refuses_another_owner() {
        if !geteuid().is_root() {
            // For anyone but root, /proc is a directory of another user.
            assert!(matches!(
                RunDir::open(Path::new("/proc")),
                Err(Error::Owner { owner: 0, .. })
            ));
            return;
        }
        // Root may read a directory of another user.
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("run");
        let berth = RunDir::open(&path)
            .unwrap()
            .berth("10.0.0.5:6443".parse().unwrap())
            .unwrap();
        for directory in [&path, berth.path()] {
            std::os::unix::fs::chown(directory, Some(65534), None).unwrap();
            assert!(RunDir::find(&path).unwrap().is_some());
        }
        assert!(matches!(
            RunDir::open(&path),
            Err(Error::Owner {
                owner: 65534,
                uid: 0,
                ..
            })
        ));
        assert!(RunDir::is_usable_by(&path, Uid::from_raw(65534)).unwrap());
        assert!(RunDir::is_usable_by(&path, Uid::from_raw(0)).is_err());
        assert_eq!(
            RunDir::find(&path)
                .unwrap()
                .unwrap()
                .berths()
                .unwrap()
                .len(),
            1
        );
    }

    #[test]
    fn a_long_socket_path_is_an_error() {
        let temp = tempfile::tempdir().unwrap();
        let run = RunDir::open(temp.path()).unwrap();
        let berth = run.berth("[::1]:6443".parse().unwrap()).unwrap();
        let id = id("a");
        assert!(
            berth
                .socket_path(&id)
                .unwrap()
                .ends_with("[::1]:6443/a.sock")
        );
        let deep = RunDir::open(&temp.path().join("x".repeat(100))).unwrap();
        let error = deep
            .berth("[::1]:6443".parse().unwrap())
            .unwrap()
            .socket_path(&id)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("107") && error.contains("--run-dir"),
            "{error}"
        );
    }
}
