//! Who has the lock on etcd's database (bbolt's flock(2)), and who waits for it.

use procfs::{Current as _, LockType, Locks};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// In etcd's data directory.
const DATABASE: &str = "member/snap/db";

/// A database, on the node.
#[derive(Debug, Clone)]
pub struct Database(PathBuf);

impl Database {
    pub fn of(data: &Path) -> Self {
        Self(data.join(DATABASE))
    }

    /// The process that has the lock, as /proc shows it.
    ///
    /// # Errors
    /// There is no database, or /proc/locks cannot be read.
    pub fn holder(&self) -> io::Result<Option<i32>> {
        // Not the device: of a btrfs the kernel shows another one there.
        let inode = fs::metadata(&self.0)?.ino();
        let locks = Locks::current().map_err(io::Error::other)?;
        let lock = locks.0.iter().find(|lock| lock.inode == inode && lock.lock_type == LockType::FLock);
        Ok(lock.and_then(|lock| lock.pid))
    }

    /// Whether a process has it open, and so waits for the lock if it has not got it.
    pub fn is_open_in(&self, pid: i32) -> bool {
        let Ok(meta) = fs::metadata(&self.0) else { return false };
        let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let mut open = files.filter_map(|file| fs::metadata(file.path()).ok());
        open.any(|open| (open.dev(), open.ino()) == (meta.dev(), meta.ino()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn the_holder_is_seen_and_who_has_it_open() {
        let temp = tempfile::tempdir().unwrap();
        let database = Database::of(temp.path());
        assert!(database.holder().is_err());
        fs::create_dir_all(temp.path().join("member/snap")).unwrap();
        let file = File::create(temp.path().join(DATABASE)).unwrap();
        let this = std::process::id().try_into().unwrap();
        assert_eq!(database.holder().unwrap(), None);
        assert!(database.is_open_in(this) && !database.is_open_in(1));
        file.lock().unwrap();
        assert_eq!(database.holder().unwrap(), Some(this));
        drop(file);
        assert_eq!(database.holder().unwrap(), None);
        assert!(!database.is_open_in(this));
    }
}
