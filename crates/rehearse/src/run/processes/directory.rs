//! The temporary directory of a run, and the removal of directories of killed rehearsals.
//!
//! A rehearsal locks a file in its directory for its whole life. A process that gets the lock of a
//! foreign directory knows that its rehearsal is gone.

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::unistd::geteuid;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use tempfile::{Builder, TempDir};

/// Prefix of directory names.
const PREFIX: &str = "berth-rehearse-";

/// Name of the locked file. A directory without this file belongs to no rehearsal.
const LOCK: &str = "berth-rehearse.lock";

/// The temporary directory of a run. Removed with its content on drop.
#[derive(Debug)]
pub(super) struct Directory {
    dir: TempDir,
    /// Lock, released after the directory was removed.
    _lock: Flock<File>,
}

impl Directory {
    /// Creates a directory in TMPDIR.
    pub(super) fn new() -> io::Result<Self> {
        loop {
            let dir = Builder::new().prefix(PREFIX).tempdir()?;
            let file = OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(dir.path().join(LOCK))?;
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) if lock.metadata()?.nlink() > 0 => return Ok(Self { dir, _lock: lock }),
                // Another rehearsal removed the directory as abandoned before it was locked.
                Ok(_) | Err((_, Errno::EWOULDBLOCK)) => {}
                Err((_, errno)) => return Err(errno.into()),
            }
        }
    }

    pub(super) fn path(&self) -> &Path {
        self.dir.path()
    }
}

/// Removes this user's directories of killed rehearsals. Returns the removed directories.
pub(crate) fn sweep_directories() -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(std::env::temp_dir()) else {
        return Vec::new();
    };
    let named = entries.flatten().filter(|entry| {
        entry
            .file_name()
            .as_encoded_bytes()
            .starts_with(PREFIX.as_bytes())
    });
    named
        .map(|entry| entry.path())
        .filter(|dir| remove_abandoned(dir).unwrap_or(false))
        .collect()
}

/// Removes a directory unless a process holds its lock. True if the directory was removed.
fn remove_abandoned(dir: &Path) -> io::Result<bool> {
    let own = |metadata: fs::Metadata| metadata.uid() == geteuid().as_raw();
    let metadata = fs::symlink_metadata(dir)?;
    if !metadata.is_dir() || !own(metadata) {
        return Ok(false);
    }
    let lock = dir.join(LOCK);
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(&lock)?;
    if !own(file.metadata()?) {
        return Ok(false);
    }
    let Ok(_held) = Flock::lock(file, FlockArg::LockExclusiveNonblock) else {
        return Ok(false);
    };
    super::bridge::kill_leftover(dir);
    // The lock file goes last. If this process is killed, too, or a dying process still writes, the
    // next rehearsal continues.
    for entry in fs::read_dir(dir)?
        .flatten()
        .filter(|entry| entry.file_name() != LOCK)
    {
        match entry.file_type()?.is_dir() {
            true => fs::remove_dir_all(entry.path())?,
            false => fs::remove_file(entry.path())?,
        }
    }
    fs::remove_dir_all(dir)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_removed_only_if_it_is_unlocked() {
        let held = Directory::new().unwrap();
        assert!(!remove_abandoned(held.path()).unwrap());
        let Directory { dir, _lock } = held;
        drop(_lock);
        fs::create_dir(dir.path().join("etcd")).unwrap();
        fs::write(dir.path().join("etcd/data"), "x").unwrap();
        std::os::unix::fs::symlink("/nonexistent", dir.path().join("link")).unwrap();
        assert!(remove_abandoned(dir.path()).unwrap() && !dir.path().exists());

        let others = Builder::new().prefix(PREFIX).tempdir().unwrap();
        assert!(remove_abandoned(others.path()).is_err() && others.path().exists());
        let link = others.path().join("link");
        std::os::unix::fs::symlink(others.path(), &link).unwrap();
        assert!(!remove_abandoned(&link).unwrap());
    }
}
