//! File locks, as the kernel lists them in /proc/locks.

use procfs::FromRead as _;
use procfs::process::MountInfos;
use rustix::fs::{
    AtFlags, CWD, FlockOperation, Statx, StatxFlags, flock, fstat, major, minor, statx,
};
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

/// The kind of a lock, that is the system call that took it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockKind {
    /// flock(2).
    Flock,
    /// fcntl(2) with F_OFD_SETLK. An open file owns the lock, not a process.
    OpenFile,
    Other,
}

/// Identifies a file in the form of /proc/locks: device and inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LockedFile {
    /// Major and minor number of the file system's device. stat(2) shows another device for a
    /// subvolume of btrfs.
    pub device: (u32, u32),
    pub inode: u64,
}

/// A lock in /proc/locks that a process or an open file holds. Requests that still wait are not
/// listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lock {
    pub kind: LockKind,
    /// The process that owns the lock. `None` if an open file owns the lock, or if the process is
    /// not visible in this PID namespace.
    pub pid: Option<i32>,
    pub file: LockedFile,
}

/// Lists the locks in /proc/locks: the locks of processes in this process's PID namespace and
/// below.
///
/// # Errors
/// /proc/locks cannot be read.
pub fn read_locks() -> io::Result<Vec<Lock>> {
    Ok(parse_locks(&fs::read_to_string("/proc/locks")?))
}

/// Locks a socket until its last descriptor is closed, in any process. [`count_locked_sockets`]
/// counts the socket until then.
///
/// # Errors
/// `ENOLCK` for lack of memory.
pub fn lock_socket(socket: impl AsFd) -> io::Result<()> {
    Ok(flock(socket, FlockOperation::NonBlockingLockShared)?)
}

/// Counts the sockets that this process has locked and that are open here or in another process.
///
/// # Errors
/// Errors of [`read_locks`].
pub fn count_locked_sockets() -> io::Result<u64> {
    // All sockets are files of one device, so any socket shows it.
    let device = fstat(UnixDatagram::unbound()?)?.st_dev;
    let (device, this) = (
        (major(device), minor(device)),
        i32::try_from(std::process::id()).ok(),
    );
    let is_counted = |lock: &&Lock| {
        lock.kind == LockKind::Flock && lock.pid == this && lock.file.device == device
    };
    Ok(read_locks()?.iter().filter(is_counted).count() as u64)
}

/// Parses /proc/locks. Also parses the `lock:` line of /proc/PID/fdinfo/FD without its first word.
pub fn parse_locks(text: &str) -> Vec<Lock> {
    text.lines().filter_map(parse_line).collect()
}

/// Parses a line such as `13: FLOCK  ADVISORY  WRITE 11366 fe:00:10559497 0 EOF`.
fn parse_line(line: &str) -> Option<Lock> {
    let mut words = line.split_whitespace().skip(1);
    let kind = match words.next()? {
        // The line describes a process that waits for the lock of the line above.
        "->" => return None,
        "FLOCK" => LockKind::Flock,
        "OFDLCK" => LockKind::OpenFile,
        _ => LockKind::Other,
    };
    let pid = words.nth(2)?.parse().ok().filter(|pid| *pid > 0);
    let mut file = words.next()?.split(':');
    let mut number = || u32::from_str_radix(file.next()?, 16).ok();
    let device = (number()?, number()?);
    Some(Lock {
        kind,
        pid,
        file: LockedFile {
            device,
            inode: file.next()?.parse().ok()?,
        },
    })
}

/// Finds the device under which /proc/locks lists the files of a mount. Remembers the last mount,
/// for speed.
#[derive(Debug, Clone, Default)]
pub struct Devices(Option<(Mounted, (u32, u32))>);

/// A mount's ID, and the device that stat(2) shows in the mount. When the mount is gone, the kernel
/// may give its ID to another mount.
type Mounted = (u64, u32, u32);

impl Devices {
    /// Returns the device and inode under which /proc/locks lists the file at a path. Follows a
    /// symbolic link.
    ///
    /// # Errors
    /// The file does not exist, or its mount is not listed in /proc/self/mountinfo.
    pub fn identify_file(&mut self, path: &Path) -> io::Result<LockedFile> {
        let flags = StatxFlags::BASIC_STATS | StatxFlags::MNT_ID;
        let meta = statx(CWD, path, AtFlags::empty(), flags)?;
        if meta.stx_mask & StatxFlags::MNT_ID.bits() == 0 {
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok(LockedFile {
            device: self.find_device(&meta)?,
            inode: meta.stx_ino,
        })
    }

    fn find_device(&mut self, meta: &Statx) -> io::Result<(u32, u32)> {
        let mounted = (meta.stx_mnt_id, meta.stx_dev_major, meta.stx_dev_minor);
        if let Some((_, device)) = self.0.filter(|(known, _)| *known == mounted) {
            return Ok(device);
        }
        let all = MountInfos::from_file("/proc/thread-self/mountinfo").map_err(io::Error::other)?;
        let found = all
            .into_iter()
            .find(|mount| u64::try_from(mount.mnt_id) == Ok(mounted.0));
        let device = found.and_then(|mount| {
            let (major, minor) = mount.majmin.split_once(':')?;
            Some((major.parse().ok()?, minor.parse().ok()?))
        });
        let device = device
            .ok_or_else(|| io::Error::other("the file's mount is not in /proc/self/mountinfo"))?;
        self.0 = Some((mounted, device));
        Ok(device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs::File;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::process::{Command, Stdio};

    const LOCKS: &str = "1: OFDLCK ADVISORY  WRITE -1 fe:00:9977982 0 EOF\n\
                         2: FLOCK  ADVISORY  WRITE 28438 00:1b:9977981 0 EOF\n\
                         2: -> FLOCK  ADVISORY  WRITE 11317 00:1b:9977981 0 EOF\n\
                         3: POSIX  ADVISORY  READ 17 08:01:5 128 128\n\
                         4: FLOCK  ADVISORY  WRITE 0 103:10:18446744073709551615 0 EOF\n\
                         5 <none>:0\n";

    #[test]
    fn locks_are_parsed_with_their_device_and_without_waiting_processes() {
        let lock = |kind, pid, device, inode| Lock {
            kind,
            pid,
            file: LockedFile { device, inode },
        };
        let expected = [
            lock(LockKind::OpenFile, None, (0xfe, 0), 9_977_982),
            lock(LockKind::Flock, Some(28438), (0, 0x1b), 9_977_981),
            lock(LockKind::Other, Some(17), (8, 1), 5),
            lock(LockKind::Flock, None, (0x103, 0x10), u64::MAX),
        ];
        assert_eq!(parse_locks(LOCKS), expected);
    }

    #[test]
    fn the_lock_of_a_file_is_found_by_its_path() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut devices = Devices::default();
        let at = devices.identify_file(file.path()).unwrap();
        assert_eq!(devices.identify_file(file.path()).unwrap(), at);
        let this = i32::try_from(std::process::id()).unwrap();
        let held = || {
            read_locks()
                .unwrap()
                .into_iter()
                .any(|lock| lock.file == at && lock.pid == Some(this))
        };
        assert!(!held());
        let open = File::open(file.path()).unwrap();
        open.lock().unwrap();
        assert!(held());
        assert!(devices.identify_file(Path::new("/nonexistent")).is_err());
    }

    #[test]
    fn a_socket_is_counted_until_its_last_descriptor_is_closed() {
        let (given, kept) = UnixStream::pair().unwrap();
        assert_eq!(count_locked_sockets().unwrap(), 0);
        lock_socket(&given).unwrap();
        lock_socket(&kept).unwrap();
        let mut child = Command::new("cat")
            .stdin(OwnedFd::from(given))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        assert_eq!(
            count_locked_sockets().unwrap(),
            2,
            "one is another process's alone"
        );
        drop(kept);
        // The child ends because the other end of the socket pair was closed.
        child.wait().unwrap();
        assert_eq!(count_locked_sockets().unwrap(), 0);
    }

    proptest! {
        #[test]
        fn any_lock_table_is_parsed_without_a_panic(text in "(([0-9]{1,3}: )?(-> )?(FLOCK|OFDLCK|\\PC{0,6})?[ \\t]*(\\PC{0,12}[ :\\n]){0,8}){0,4}") {
            parse_locks(&text);
        }

        #[test]
        fn a_truncated_line_is_parsed_without_a_panic(at in 0..LOCKS.len()) {
            prop_assert!(parse_locks(&LOCKS[..at]).len() <= 4);
        }
    }
}
