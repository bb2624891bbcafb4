//! Files that others read while they are written.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Replaces a file, or makes it, in one step: whoever opens it finds the old one or the new one, whole. `fill` gets the
/// new one, which has mode 0600 and is called `temporary` until it is filled; it must be in the same directory.
/// What is there of that name gives way: a writer that died left it.
///
/// # Errors
/// What the system calls and `fill` say. Then the file is as it was.
pub fn replace<T>(path: &Path, temporary: &Path, fill: impl FnOnce(File) -> io::Result<T>) -> io::Result<T> {
    match fs::remove_file(temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(temporary)?;
    let filled = fill(file).and_then(|filled| fs::rename(temporary, path).map(|()| filled));
    filled.inspect_err(|_| drop(fs::remove_file(temporary)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::{MetadataExt, symlink};

    #[test]
    fn a_file_is_replaced_whole_or_not_at_all() {
        let directory = tempfile::tempdir().unwrap();
        let (path, temporary) = (directory.path().join("a"), directory.path().join(".a.new"));
        // Not followed, and not in the way.
        symlink(&path, &temporary).unwrap();
        replace(&path, &temporary, |mut file| file.write_all(b"one")).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"one");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let half =
            |mut file: File| file.write_all(b"tw").and_then(|()| Err::<(), _>(io::ErrorKind::StorageFull.into()));
        assert_eq!(replace(&path, &temporary, half).unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(fs::read(&path).unwrap(), b"one");
        assert!(!temporary.exists());
    }
}
