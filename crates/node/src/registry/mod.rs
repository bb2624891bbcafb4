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

use crate::instance_id::InstanceId;
use berth_os::file::{make_private_directory, none_if_missing};
use nix::unistd::{Uid, geteuid};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Maximum length of a Unix socket's path in bytes: 108 in `sockaddr_un` minus the closing NUL.
const MAX_SOCKET_PATH: usize = 107;

const WRITABLE_BY_OTHERS: u32 = 0o022;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "cannot make the directory {}: {why}: create the directory with mode 0700 for uid {uid}, or give another directory with --run-dir",
        path.display()
    )]
    Make {
        path: PathBuf,
        why: io::Error,
        uid: u32,
    },
    #[error("cannot read the directory {}: {why}: give another directory with --run-dir", path.display())]
    Read { path: PathBuf, why: io::Error },
    #[error(
        "{} is {found}, not a directory: remove the file, or give the directory itself with --run-dir",
        path.display()
    )]
    NotADirectory { path: PathBuf, found: &'static str },
    #[error(
        "{} is owned by uid {owner}, this process is uid {uid}: run all shims and apiservers of a node with one uid, \
         chown the directory to {uid}, or give another directory with --run-dir",
        path.display()
    )]
    Owner { path: PathBuf, owner: u32, uid: u32 },
    #[error("{} is owned by uid {owner}, this process is uid {uid}: run berth as root or as uid {owner}", path.display())]
    Reader { path: PathBuf, owner: u32, uid: u32 },
    #[error(
        "{} has mode {mode:04o}, so others may write to the directory: chmod 0700 the directory",
        path.display()
    )]
    Mode { path: PathBuf, mode: u32 },
    #[error(
        "the socket path {} is {length} bytes long, the kernel allows {MAX_SOCKET_PATH} bytes: give a shorter --run-dir or --instance",
        path.display()
    )]
    SocketPath { path: PathBuf, length: usize },
}

/// A run directory that has been checked: its owner and mode are right.
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
        let owner = create_and_check_dir(&path)?;
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
        for path in [
            berth.path.clone(),
            berth.instances_path(),
            berth.leases_path(),
        ] {
            create_and_check_dir(&path)?;
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
    /// Returns the address of the berth. The directory is named after this address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn instances_path(&self) -> PathBuf {
        self.path.join("instances")
    }

    pub fn leases_path(&self) -> PathBuf {
        self.path.join("leases")
    }

    /// Returns the path of the Unix socket on which the shim of this instance listens.
    ///
    /// # Errors
    /// The path is too long for the kernel.
    pub fn socket_path(&self, id: &InstanceId) -> Result<PathBuf, Error> {
        self.path_of_socket(&format!("{id}.sock"))
    }

    /// Returns the path of the Unix socket on which the supervisor of this instance listens.
    ///
    /// # Errors
    /// The path is too long for the kernel.
    pub fn supervisor_path(&self, id: &InstanceId) -> Result<PathBuf, Error> {
        self.path_of_socket(&format!("{id}.accept"))
    }

    fn path_of_socket(&self, name: &str) -> Result<PathBuf, Error> {
        let path = self.path.join(name);
        match path.as_os_str().as_bytes().len() {
            length if length > MAX_SOCKET_PATH => Err(Error::SocketPath { path, length }),
            _ => Ok(path),
        }
    }

    /// True if this process trusts a file of this owner. It trusts its own uid and the directory's
    /// owner, which differ only if root reads another user's directory.
    fn trusts_owner(&self, owner: u32) -> bool {
        owner == self.owner || owner == geteuid().as_raw()
    }
}

fn default_path(root: bool, xdg: Option<OsString>) -> PathBuf {
    // The XDG specification says that a relative path must be ignored.
    let xdg = xdg
        .map(PathBuf::from)
        .filter(|xdg| !root && xdg.is_absolute());
    xdg.unwrap_or_else(|| "/run".into()).join("berth")
}

/// Removes a slash at the path's end, because it would make the kernel follow a symbolic link.
fn without_trailing_slash(path: &Path) -> PathBuf {
    path.components().collect()
}

fn parse_name(name: &str) -> Option<SocketAddr> {
    name.parse()
        .ok()
        .filter(|address: &SocketAddr| address.to_string() == name)
}

/// Creates a directory if it is missing. Then checks the directory, and returns its owner.
fn create_and_check_dir(path: &Path) -> Result<u32, Error> {
    if let Some(owner) = check_dir(path)? {
        return Ok(owner);
    }
    let failed = |why| Error::Make {
        path: path.to_owned(),
        why,
        uid: geteuid().as_raw(),
    };
    match make_private_directory(path) {
        Ok(()) => {}
        // Another process created the directory at the same time. The check below decides whether
        // this process can use it.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(failed(error)),
    }
    // If another process removes the directory after each attempt, check_dir returns `None`.
    check_dir(path)?.ok_or_else(|| failed(io::ErrorKind::NotFound.into()))
}

/// Checks a directory and returns its owner. Returns `None` if there is no directory.
///
/// The check uses the path, not a descriptor. Once the directory is known to belong to this process
/// and to be closed to others, only the owner of the parent directory could replace it, and that
/// owner is trusted like root.
fn check_dir(path: &Path) -> Result<Option<u32>, Error> {
    check_dir_as(path, geteuid())
}

/// Checks a directory like [`check_dir`], for a process that only reads it.
fn check_dir_to_read(path: &Path) -> Result<Option<u32>, Error> {
    match check_dir(path) {
        // Root may read any user's directory, so check the directory again as its owner.
        Err(Error::Owner { owner, .. }) if geteuid().is_root() => {
            check_dir_as(path, Uid::from_raw(owner))
        }
        // This process only reads, and cannot change the directory's owner, so the error gives
        // other advice.
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

    /// Makes a berth in a temporary directory. Returns both, because the directory must outlive the
    /// berth.
    pub(super) fn berth() -> (tempfile::TempDir, BerthDir) {
        let temp = tempfile::tempdir().unwrap();
        let run = RunDir::open(&temp.path().join("run")).unwrap();
        let berth = run.berth("10.0.0.5:6443".parse().unwrap()).unwrap();
        (temp, berth)
    }

    /// Asserts that exactly these files are ignored. Each reason must contain the given words and
    /// fit into one short line.
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
    fn the_default_path_depends_on_the_user() {
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
    fn private_directories_are_made_and_berths_are_listed() {
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
                &berth.instances_path(),
                &berth.leases_path(),
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
    fn directories_that_others_could_change_are_refused() {
        let temp = tempfile::tempdir().unwrap();
        let path = |name: &str| temp.path().join(name);
        fs::write(path("file"), "").unwrap();
        fs::create_dir(path("open")).unwrap();
        fs::set_permissions(path("open"), fs::Permissions::from_mode(0o770)).unwrap();
        symlink(temp.path(), path("link")).unwrap();
        symlink(path("nowhere"), path("dangling")).unwrap();
        let refused = |name: &str| RunDir::open(&path(name)).unwrap_err();
        assert!(matches!(refused("open"), Error::Mode { mode: 0o770, .. }));
        for other in ["file", "link", "link/", "dangling"] {
            let error = refused(other);
            assert!(matches!(error, Error::NotADirectory { .. }), "{error}");
        }
        assert!(matches!(refused("file/below"), Error::Read { .. }));
    }

    #[test]
    fn a_directory_of_another_owner_is_refused() {
        if !geteuid().is_root() {
            // /proc belongs to root, so for any other user it is another user's directory.
            assert!(matches!(
                RunDir::open(Path::new("/proc")),
                Err(Error::Owner { owner: 0, .. })
            ));
            return;
        }
        // Root may read another user's run directory, but not use it.
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
            .unwrap_err();
        assert!(matches!(error, Error::SocketPath { .. }), "{error}");
    }
}
