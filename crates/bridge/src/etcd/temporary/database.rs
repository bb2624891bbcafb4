//! etcd's database: the holder of its lock (bbolt's flock(2)), waiting processes, and the file that
//! the path names.
//!
//! The lock is on a file and not on a name: when a process replaces the file (defragmentation), a
//! process that waits for the old file is left with a database without a name.

use super::machine::Opened;
use berth_exec::args;
use berth_os::locks::{self, Devices, Lock, LockKind, LockedFile};
use std::ffi::{OsStr, OsString};
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirEntryExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Paths in etcd's data directory.
const DATABASE: &str = "member/snap/db";
const SNAPSHOTS: &str = "member/snap";
const LOG: &str = "member/wal";

/// Prefix of a file that a defragmentation writes beside the database, and then renames over it.
const DEFRAGMENTED: &str = "db.tmp.";

/// Suffix of a raft snapshot. Names have the term and the index in 16 digits each, so that later
/// snapshots sort last.
const SNAPSHOT: &str = ".snap";

/// Suffix of a segment of the log. Names have the number and the first index in 16 digits each.
const SEGMENT: &str = ".wal";

/// A database on the node.
#[derive(Debug, Clone)]
pub struct Database {
    data: PathBuf,
    devices: Devices,
}

/// Observation of a database.
#[derive(Debug)]
pub struct Look {
    file: LockedFile,
    /// Size in bytes.
    pub size: u64,
    /// The last raft snapshot from before the observation.
    pub snapshot: Option<OsString>,
    locks: Vec<Lock>,
}

impl Look {
    /// The process that has the lock on the file at the path.
    pub fn lock_holder(&self) -> Option<i32> {
        self.locks
            .iter()
            .find(|lock| lock.file == self.file && lock.kind == LockKind::Flock)?
            .pid
    }

    /// Processes that have locked another file by flock(2), as etcd locks its database.
    pub fn other_lock_holders(&self) -> impl Iterator<Item = i32> {
        let others = self
            .locks
            .iter()
            .filter(|lock| lock.file != self.file && lock.kind == LockKind::Flock);
        others.filter_map(|lock| lock.pid)
    }
}

/// True if no process has a lock on the database or on a segment of the log.
fn is_unlocked(locks: &[Lock], database: LockedFile, segments: &[LockedFile]) -> bool {
    !locks
        .iter()
        .any(|lock| lock.file == database || segments.contains(&lock.file))
}

impl Database {
    pub fn from_directory(data: &Path) -> Self {
        Self {
            data: data.to_owned(),
            devices: Devices::default(),
        }
    }

    pub fn path(&self) -> PathBuf {
        self.data.join(DATABASE)
    }

    /// etcd's data directory on the node.
    pub fn data_directory(&self) -> &Path {
        &self.data
    }

    /// Observes the database and all locks.
    ///
    /// # Errors
    /// There is no database, or /proc cannot be read.
    pub fn observe_database(&mut self) -> io::Result<Look> {
        // The order matters: a process that is found to serve from the file had that file when it
        // wrote this snapshot.
        let snapshot = self.last_snapshot()?;
        let path = self.path();
        let file = self.devices.identify_file(&path)?;
        let size = fs::metadata(&path)?.len();
        Ok(Look {
            file,
            size,
            snapshot,
            locks: locks::read_locks()?,
        })
    }

    /// The name of the last raft snapshot.
    ///
    /// # Errors
    /// The directory of snapshots cannot be read.
    pub fn last_snapshot(&self) -> io::Result<Option<OsString>> {
        let mut last = None;
        for entry in fs::read_dir(self.data.join(SNAPSHOTS))? {
            let name = entry?.file_name();
            if name.as_bytes().ends_with(SNAPSHOT.as_bytes()) {
                last = last.max(Some(name));
            }
        }
        Ok(last)
    }

    /// True if no process has the data: no lock on the database or on the log, and no
    /// defragmentation under way.
    ///
    /// # Errors
    /// The data directory or /proc cannot be read.
    pub fn is_free(&self, look: &Look) -> io::Result<bool> {
        let log = self.data.join(LOG);
        let device = Devices::default().identify_file(&log)?.device;
        let segments = fs::read_dir(&log)?.map(|entry| {
            Ok(LockedFile {
                device,
                inode: entry?.ino(),
            })
        });
        Ok(is_unlocked(
            &look.locks,
            look.file,
            &segments.collect::<io::Result<Vec<_>>>()?,
        ) && !self.is_being_defragmented()?)
    }

    /// True if a process has a file open that a defragmentation writes. A failed rename leaves such
    /// a file, but no process has it open.
    fn is_being_defragmented(&self) -> io::Result<bool> {
        let mut left = Vec::new();
        for entry in fs::read_dir(self.data.join(SNAPSHOTS))? {
            let entry = entry?;
            if entry
                .file_name()
                .as_bytes()
                .starts_with(DEFRAGMENTED.as_bytes())
            {
                left.push(file_identity(&entry.metadata()?));
            }
        }
        if left.is_empty() {
            return Ok(false);
        }
        let processes = fs::read_dir("/proc")?.flatten();
        let mut pids = processes.filter_map(|process| process.file_name().to_str()?.parse().ok());
        Ok(pids.any(|pid| open_files(pid).any(|(_, file)| left.contains(&file_identity(&file)))))
    }

    /// True if a process has the last segment of this directory's log open. Writes that the process
    /// acknowledges are in that segment.
    ///
    /// # Errors
    /// The log cannot be listed.
    pub fn is_log_open_in(&self, pid: i32) -> io::Result<bool> {
        let mut last = None;
        for entry in fs::read_dir(self.data.join(LOG))? {
            let entry = entry?;
            if entry.file_name().as_bytes().ends_with(SEGMENT.as_bytes()) {
                last = last.max(Some((entry.file_name(), file_identity(&entry.metadata()?))));
            }
        }
        Ok(last.is_some_and(|(_, segment)| {
            open_files(pid).any(|(_, file)| file_identity(&file) == segment)
        }))
    }

    /// The database of a process by its arguments, seen through its mounts. `None` if the arguments
    /// do not name a database.
    pub fn of_process(pid: i32) -> Option<Self> {
        let command =
            berth_manifest::command::split_strings(&fs::read(format!("/proc/{pid}/cmdline")).ok()?);
        let data = args::flag_value(&command, "--data-dir")
            .map(Path::new)?
            .strip_prefix("/")
            .ok()?;
        Some(Self::from_directory(
            &Path::new(&format!("/proc/{pid}/root")).join(data),
        ))
    }

    /// The database that a process has opened, and the descriptor's path if the database is another
    /// file.
    pub fn file_opened_by(&self, pid: i32) -> (Opened, Option<PathBuf>) {
        let named = fs::metadata(self.path()).map(|meta| file_identity(&meta));
        let (mut waits, mut other) = (false, None);
        for (path, file) in open_files(pid) {
            let is_named = named
                .as_ref()
                .is_ok_and(|named| *named == file_identity(&file));
            match (is_named, is_locked(pid, &path)) {
                (true, true) => return (Opened::Named, None),
                (true, false) => waits = true,
                (false, true) => other = Some(path),
                (false, false) => {}
            }
        }
        match other {
            Some(path) => (Opened::Other, Some(path)),
            None if waits => (Opened::Waits, None),
            None => (Opened::Unseen, None),
        }
    }
}

/// Device and inode as in stat(2).
fn file_identity(meta: &Metadata) -> (u64, u64) {
    (meta.dev(), meta.ino())
}

/// The regular files that a process has open, each by its path in /proc/PID/fd.
fn open_files(pid: i32) -> impl Iterator<Item = (PathBuf, Metadata)> {
    let all = fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    // A socket or a pipe has no path.
    let files = all.filter(|path| fs::read_link(path).is_ok_and(|to| to.is_absolute()));
    files.filter_map(|path| {
        fs::metadata(&path)
            .ok()
            .filter(Metadata::is_file)
            .map(|meta| (path, meta))
    })
}

/// True if a process has locked an open file by flock(2).
fn is_locked(pid: i32, open: &Path) -> bool {
    let descriptor = open.file_name().unwrap_or_else(|| OsStr::new(""));
    let info = fs::read_to_string(Path::new(&format!("/proc/{pid}/fdinfo")).join(descriptor))
        .unwrap_or_default();
    let held = info.lines().filter_map(|line| line.strip_prefix("lock:"));
    held.flat_map(locks::parse_locks)
        .any(|lock| lock.kind == LockKind::Flock)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs::File;

    fn make_database() -> (tempfile::TempDir, Database) {
        let temp = tempfile::tempdir().unwrap();
        for directory in [SNAPSHOTS, LOG] {
            fs::create_dir_all(temp.path().join(directory)).unwrap();
        }
        let database = Database::from_directory(temp.path());
        (temp, database)
    }

    fn own_pid() -> i32 {
        std::process::id().try_into().unwrap()
    }

    #[test]
    fn the_lock_holder_and_the_open_database_are_seen() {
        let (_temp, mut database) = make_database();
        assert!(database.observe_database().is_err());
        let file = File::create(database.path()).unwrap();
        assert_eq!(database.observe_database().unwrap().lock_holder(), None);
        // A concurrent test may have locked another file.
        assert!(matches!(
            database.file_opened_by(own_pid()).0,
            Opened::Waits | Opened::Other
        ));
        file.lock().unwrap();
        assert_eq!(
            database.observe_database().unwrap().lock_holder(),
            Some(own_pid())
        );
        assert_eq!(database.file_opened_by(own_pid()).0, Opened::Named);
        drop(file);
        assert_eq!(database.observe_database().unwrap().lock_holder(), None);
        assert_ne!(database.file_opened_by(own_pid()).0, Opened::Named);
    }

    #[test]
    fn a_replaced_file_is_not_the_file_at_the_path() {
        let (temp, mut database) = make_database();
        let file = File::create(database.path()).unwrap();
        file.lock().unwrap();
        let new = temp.path().join(SNAPSHOTS).join("db.tmp.1");
        fs::write(&new, "").unwrap();
        fs::rename(&new, database.path()).unwrap();
        let (opened, at) = database.file_opened_by(own_pid());
        assert_eq!(opened, Opened::Other);
        assert!(fs::metadata(at.unwrap()).unwrap().is_file());
        let look = database.observe_database().unwrap();
        assert!(
            look.lock_holder().is_none() && look.other_lock_holders().any(|pid| pid == own_pid())
        );
    }

    #[test]
    fn other_lock_holders_have_locked_another_file_as_etcd_does() {
        let file = |inode| LockedFile {
            device: (8, 0),
            inode,
        };
        let lock = |kind, pid, inode| Lock {
            kind,
            pid: Some(pid),
            file: file(inode),
        };
        let look = Look {
            file: file(1),
            size: 0,
            snapshot: None,
            locks: vec![
                lock(LockKind::Flock, 1, 1),
                lock(LockKind::Flock, 2, 2),
                lock(LockKind::OpenFile, 3, 2),
            ],
        };
        assert_eq!(look.lock_holder(), Some(1));
        assert_eq!(look.other_lock_holders().collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn only_the_last_segment_is_the_log_that_is_written() {
        let (temp, database) = make_database();
        let segment = |name| File::create(temp.path().join(LOG).join(name)).unwrap();
        let first = segment("0-0.wal");
        assert!(database.is_log_open_in(own_pid()).unwrap());
        drop((first, segment("1-1.wal")));
        let _first = File::open(temp.path().join(LOG).join("0-0.wal")).unwrap();
        assert!(!database.is_log_open_in(own_pid()).unwrap());
    }

    #[test]
    fn a_process_has_the_database_of_its_arguments_and_its_open_files() {
        let (_temp, database) = make_database();
        File::create(database.path()).unwrap();
        let mut etcd = std::process::Command::new("sh");
        etcd.args(["-c", "echo; read line", "etcd", "--data-dir=/data"]);
        etcd.stdin(std::process::Stdio::piped());
        let mut etcd = etcd.stdout(std::process::Stdio::piped()).spawn().unwrap();
        // A process that has just been spawned has no arguments yet.
        let mut line = [0];
        io::Read::read_exact(etcd.stdout.as_mut().unwrap(), &mut line).unwrap();
        let pid = i32::try_from(etcd.id()).unwrap();
        let data = Database::of_process(pid).map(|its| its.data_directory().to_owned());
        assert_eq!(data, Some(format!("/proc/{pid}/root/data").into()));
        assert_eq!(database.file_opened_by(pid), (Opened::Unseen, None));
        etcd.kill().unwrap();
        etcd.wait().unwrap();
        assert!(Database::of_process(pid).is_none());
    }

    #[test]
    fn locked_or_defragmented_data_is_not_free() {
        let (temp, mut database) = make_database();
        File::create(database.path()).unwrap();
        let is_free = |database: &mut Database| {
            let look = database.observe_database().unwrap();
            database.is_free(&look).unwrap()
        };
        assert!(is_free(&mut database));
        let left = temp.path().join(SNAPSHOTS).join("db.tmp.17");
        let defragmentation = File::create(&left).unwrap();
        assert!(!is_free(&mut database));
        drop(defragmentation);
        assert!(is_free(&mut database), "a file that is left over is none");
        let segment = File::create(temp.path().join(LOG).join("0-0.wal")).unwrap();
        assert!(is_free(&mut database));
        rustix::fs::fcntl_lock(&segment, rustix::fs::FlockOperation::LockExclusive).unwrap();
        assert!(!is_free(&mut database));
        drop(segment);
        File::open(database.path()).unwrap().lock().unwrap();
        assert!(is_free(&mut database), "a file that is closed has no lock");
    }

    #[test]
    fn the_last_snapshot_is_the_one_whose_name_sorts_last() {
        let (temp, database) = make_database();
        assert_eq!(database.last_snapshot().unwrap(), None);
        for name in [
            "0000000000000002-000000000000271b.snap",
            "0000000000000002-0000000000002710.snap",
            "db",
            "x.snap.db",
        ] {
            fs::write(temp.path().join(SNAPSHOTS).join(name), "").unwrap();
        }
        assert_eq!(
            database.last_snapshot().unwrap(),
            Some("0000000000000002-000000000000271b.snap".into())
        );
    }

    proptest! {
        /// The data is free only if no file of the data is locked.
        #[test]
        fn a_lock_on_any_file_of_the_data_is_seen(
            held in prop::collection::vec((0_u32..2, 0_u64..8), 0..6),
            segments in prop::collection::vec(0_u64..8, 0..4),
        ) {
            let file = |(minor, inode)| LockedFile { device: (8, minor), inode };
            let locks: Vec<_> =
                held.iter().map(|at| Lock { kind: LockKind::OpenFile, pid: None, file: file(*at) }).collect();
            let segments: Vec<_> = segments.into_iter().map(|inode| file((0, inode))).collect();
            let ours = |(minor, inode): &(u32, u64)| {
                *minor == 0 && (*inode == 0 || segments.contains(&file((*minor, *inode))))
            };
            prop_assert_eq!(is_unlocked(&locks, file((0, 0)), &segments), !held.iter().any(ours));
        }
    }
}
