//! Functions for files: atomic replacement of files that other processes read, file locks, and
//! private directories.

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf, absolute};
use std::thread;
use std::time::{Duration, Instant};

/// Pause between two attempts to lock a file. flock(2) has no timeout, so the lock is tried
/// repeatedly.
const LOCK_PAUSE: Duration = Duration::from_millis(5);

/// Replaces or creates a file atomically: a reader finds the whole old file or the whole new file.
/// `fill` gets the new file, which has mode 0600 and is named `temporary` until it is filled;
/// `temporary` must be in the same directory. An existing file of that name was left by a
/// writer that died, and is removed.
///
/// # Errors
/// Errors of the system calls and of `fill`. The file is then unchanged.
pub fn replace_file<T>(
    path: &Path,
    temporary: &Path,
    fill: impl FnOnce(File) -> io::Result<T>,
) -> io::Result<T> {
    none_if_missing(fs::remove_file(temporary))?;
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(temporary)?;
    let filled = fill(file).and_then(|filled| fs::rename(temporary, path).map(|()| filled));
    filled.inspect_err(|_| drop(fs::remove_file(temporary)))
}

/// Turns the error that nothing exists at a path into `None`.
///
/// # Errors
/// Every error except `NotFound`.
pub fn none_if_missing<T>(done: io::Result<T>) -> io::Result<Option<T>> {
    match done {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        done => done.map(Some),
    }
}

/// Opens a file at a path that an operator or a file gave. A FIFO or a device at the path cannot
/// block the call.
///
/// # Errors
/// Errors of open(2), or the path is not a regular file.
pub fn open_regular_file(path: &Path) -> io::Result<File> {
    check_regular_file(
        OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(path)?,
    )
}

/// Limit of the size of small files, in bytes. Small files are those with certificates, credentials
/// or configuration.
const MAX_SMALL_SIZE: u64 = 1 << 20;

/// Reads a small file at a path that an operator or a file gave. A FIFO cannot block the call, and
/// a file of gigabytes takes no memory.
///
/// # Errors
/// Errors of the system calls, or the file is not regular, or larger than 1 MiB.
pub fn read_small(path: &Path) -> io::Result<Vec<u8>> {
    read_open_small(open_regular_file(path)?)
}

/// Reads an open file of at most 1 MiB. If the file is not regular, the call may block.
///
/// # Errors
/// Errors of the system calls, or the file is larger than 1 MiB.
pub fn read_open_small(file: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(MAX_SMALL_SIZE + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_SMALL_SIZE {
        Err(io::Error::other("the file is larger than 1 MiB"))
    } else {
        Ok(bytes)
    }
}

/// Converts a file's bytes to text.
///
/// # Errors
/// The bytes are not UTF-8.
pub fn decode_text(bytes: Vec<u8>) -> io::Result<String> {
    String::from_utf8(bytes)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "the file is no text"))
}

/// Returns the open file if it is a regular file.
///
/// # Errors
/// The file is not regular, or fstat(2) failed.
pub fn check_regular_file(file: File) -> io::Result<File> {
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::other("it is no regular file"))
    }
}

/// Makes a file in memory that can be executed. Children inherit the file, and it is executable
/// even if `vm.memfd_noexec` is 1. Kernels before 6.3 do not know the flag for executable files,
/// and do not need it.
///
/// # Errors
/// Errors of memfd_create(2).
pub fn create_program_in_memory(name: &str) -> io::Result<File> {
    let created = match memfd_create(name, MemfdFlags::EXEC) {
        Err(rustix::io::Errno::INVAL) => memfd_create(name, MemfdFlags::empty()),
        Err(rustix::io::Errno::ACCESS) => {
            return Err(io::Error::other(
                "vm.memfd_noexec is 2, so files in memory cannot be executed: set vm.memfd_noexec to 1",
            ));
        }
        created => created,
    };
    Ok(File::from(created?))
}

/// Locks a file exclusively. Waits for another process's lock, at most for `wait`.
///
/// # Errors
/// Errors of flock(2); EWOULDBLOCK if the file is still locked after `wait`.
pub fn lock_file_within(mut file: File, wait: Duration) -> Result<Flock<File>, Errno> {
    let until = Instant::now() + wait;
    loop {
        file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Err((file, Errno::EWOULDBLOCK)) if Instant::now() < until => file,
            locked => return locked.map_err(|(_, errno)| errno),
        };
        thread::sleep(LOCK_PAUSE);
    }
}

/// Creates a directory with mode 0700, and its missing parents, and syncs each new entry. An
/// existing directory is not changed.
///
/// # Errors
/// Errors of mkdir(2) and fsync(2).
pub fn make_private_directory(dir: &Path) -> io::Result<()> {
    // A relative path's last ancestor is the empty path, which counts as existing.
    let is_missing = |dir: &&Path| !dir.as_os_str().is_empty() && !dir.exists();
    let missing: Vec<_> = dir.ancestors().take_while(is_missing).collect();
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    missing.into_iter().try_for_each(sync_parent_directory)
}

/// Syncs the directory of a file, so that a new name or a removed one survives a power loss.
///
/// # Errors
/// Errors of open(2) and fsync(2).
pub fn sync_parent_directory(path: &Path) -> io::Result<()> {
    File::open(absolute(path)?.parent().unwrap_or(path))?.sync_all()
}

/// Creates a directory with mode 0700 and this owner, or sets mode and owner of an existing
/// directory.
///
/// Mode and owner are set through a descriptor, so that nobody can exchange the directory
/// meanwhile. The mode is set first: CAP_CHOWN alone does not allow to change the mode of another
/// user's directory.
///
/// # Errors
/// Errors of the system calls.
pub fn ensure_private_directory(dir: &Path, owner: u32) -> io::Result<()> {
    match make_private_directory(dir) {
        // If something other than a directory is at the path, the open below fails.
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let plain: PathBuf = dir.components().collect();
    let open = |flags| {
        OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW | flags)
            .open(&plain)
    };
    // Another user may own the directory and allow nobody else in. Root without capabilities can
    // then open only the path itself (O_PATH).
    let meta = open(libc::O_PATH)?.metadata()?;
    if (meta.uid(), meta.mode() & 0o7777) == (owner, 0o700) {
        return Ok(());
    }
    let opened = open(0)?;
    let meta = opened.metadata()?;
    if meta.mode() & 0o7777 != 0o700 {
        opened.set_permissions(Permissions::from_mode(0o700))?;
    }
    if meta.uid() != owner {
        fchown(&opened, Some(owner), None)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_testing::namespace::rerun_in_user_namespace;
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::symlink;
    use std::process::Command;

    #[test]
    fn a_program_in_memory_runs_despite_memfd_noexec() {
        const INSIDE: &str = "BERTH_TEST_MEMFD_NOEXEC";
        if std::env::var_os(INSIDE).is_some() {
            let mut copy = create_program_in_memory("program").unwrap();
            io::copy(&mut File::open("/bin/true").unwrap(), &mut copy).unwrap();
            copy.set_permissions(Permissions::from_mode(0o555)).unwrap();
            let path = format!("/proc/self/fd/{}", copy.as_raw_fd());
            assert!(Command::new(path).status().unwrap().success());
            return;
        }
        // The script sets vm.memfd_noexec in a new PID namespace, which has its own value of the
        // setting.
        let own = std::env::current_exe().unwrap();
        let name = "file::tests::a_program_in_memory_runs_despite_memfd_noexec";
        let script =
            "echo 1 > /proc/sys/vm/memfd_noexec || exit 77; exec \"$0\" --exact \"$1\" --nocapture";
        let mut command = Command::new("unshare");
        command
            .args(["--pid", "--fork", "--mount-proc", "sh", "-c", script])
            .arg(own)
            .arg(name)
            .env(INSIDE, "1");
        let output = command.output().unwrap();
        let text =
            String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        match output.status.success() {
            true => assert!(text.contains("1 passed"), "{text}"),
            false if text.contains("passed") || text.contains("panicked") => panic!("{text}"),
            false => rerun_in_user_namespace(&format!(
                "no PID namespace with a vm.memfd_noexec of its own: {text}"
            )),
        }
    }

    #[test]
    fn only_a_small_regular_file_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        fs::write(&path, b"a\xff").unwrap();
        assert_eq!(read_small(&path).unwrap(), b"a\xff");
        assert_eq!(
            read_small(&path).and_then(decode_text).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
        File::create(&path).unwrap().set_len(1 << 40).unwrap();
        assert_eq!(
            read_small(&path).unwrap_err().to_string(),
            "the file is larger than 1 MiB"
        );
        fs::remove_file(&path).unwrap();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(
            read_small(&path).unwrap_err().to_string(),
            "it is no regular file"
        );
    }

    #[test]
    fn a_file_is_replaced_whole_or_not_at_all() {
        let directory = tempfile::tempdir().unwrap();
        let (path, temporary) = (directory.path().join("a"), directory.path().join(".a.new"));
        // A symbolic link has the temporary name. It must not be followed, and must not prevent the
        // replacement.
        symlink(&path, &temporary).unwrap();
        replace_file(&path, &temporary, |mut file| file.write_all(b"one")).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"one");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let half = |mut file: File| {
            file.write_all(b"tw")
                .and_then(|()| Err::<(), _>(io::ErrorKind::StorageFull.into()))
        };
        assert_eq!(
            replace_file(&path, &temporary, half).unwrap_err().kind(),
            io::ErrorKind::StorageFull
        );
        assert_eq!(fs::read(&path).unwrap(), b"one");
        assert!(!temporary.exists());
    }

    #[test]
    fn a_private_directory_gets_mode_and_owner_even_if_it_exists() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("run/berth/");
        let own = nix::unistd::geteuid().as_raw();
        ensure_private_directory(&dir, own).unwrap();
        fs::set_permissions(&dir, Permissions::from_mode(0o755)).unwrap();
        // Only root can make another user the owner of the directory.
        let owner = if own == 0 { 65534 } else { own };
        ensure_private_directory(&dir, owner).unwrap();
        let meta = fs::metadata(&dir).unwrap();
        assert_eq!((meta.mode() & 0o7777, meta.uid()), (0o700, owner));
        ensure_private_directory(&dir, owner).unwrap();
        symlink(&dir, temp.path().join("link")).unwrap();
        assert!(ensure_private_directory(&temp.path().join("link/"), own).is_err());
    }
}
