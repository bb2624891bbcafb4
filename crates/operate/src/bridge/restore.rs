//! Restores the files that the node's own kube-apiserver is started from and reads, as they were before the bridge began: its manifest,
//! and the files that its arguments name. Nothing else: not etcd's manifest, the kubelet's configuration, or objects of the cluster.

use crate::manifest::file::{Access, replace_as};
use berth_node::ipc::bridge::Difference;
use berth_os::file::{found, make_private, open_regular};
use similar::TextDiff;
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Longest difference that is shown, in bytes: it goes into one message.
const LONGEST: usize = 32 * 1024;

/// A file, and what it was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedFile {
    pub path: PathBuf,
    pub copy: PathBuf,
    /// Its text may be shown. Of others it may be secret.
    pub shown: bool,
}

/// The files that have changed.
///
/// # Errors
/// One cannot be read.
pub fn differences(all: &[SavedFile]) -> Result<Vec<Difference>, String> {
    Ok(compare(all)?.into_iter().map(|(_, difference)| difference).collect())
}

/// Restores them, in this order: when the kubelet reads the manifest, the files that it names exist.
///
/// # Errors
/// All files that cannot be written. The others are restored.
pub fn restore(all: &[SavedFile]) -> Result<Vec<Difference>, String> {
    let (mut restored, mut failed) = (Vec::new(), Vec::new());
    for (before, difference) in compare(all)? {
        match write(before) {
            Ok(()) => {
                tracing::info!(path = %before.path.display(), "put back");
                restored.push(difference);
            }
            Err(error) => failed.push(format!("{}: {error}", before.path.display())),
        }
    }
    if failed.is_empty() { Ok(restored) } else { Err(failed.join("; ")) }
}

fn compare(all: &[SavedFile]) -> Result<Vec<(&SavedFile, Difference)>, String> {
    let failed = |path: &Path| {
        let path = path.display().to_string();
        move |error: io::Error| format!("cannot read {path}: {error}")
    };
    let mut differing = Vec::new();
    for before in all {
        let was = fs::read(&before.copy).map_err(failed(&before.copy))?;
        let like = fs::metadata(&before.copy).map_err(failed(&before.copy))?;
        let opened = found(open_regular(&before.path)).map_err(failed(&before.path))?;
        let is = opened.map(read).transpose().map_err(failed(&before.path))?;
        if is.as_ref().is_some_and(|(is, meta)| *is == was && Access::from(meta) == Access::from(&like)) {
            continue;
        }
        let (path, missing) = (before.path.clone(), is.is_none());
        let is = is.map(|(is, _)| is).unwrap_or_default();
        let diff = before.shown.then(|| diff(&path, &is, &was)).filter(|diff| diff.len() <= LONGEST);
        differing.push((before, Difference { path, missing, diff }));
    }
    Ok(differing)
}

fn read(mut file: File) -> io::Result<(Vec<u8>, Metadata)> {
    let mut is = Vec::new();
    file.read_to_end(&mut is)?;
    Ok((is, file.metadata()?))
}

fn diff(path: &Path, is: &[u8], was: &[u8]) -> String {
    let [is, was] = [is, was].map(String::from_utf8_lossy);
    let path = path.display().to_string();
    TextDiff::from_lines(&*is, &*was).unified_diff().header(&path, &path).to_string()
}

fn write(before: &SavedFile) -> io::Result<()> {
    if fs::symlink_metadata(&before.path).is_ok_and(|meta| meta.is_symlink()) {
        return Err(io::Error::other(
            "it is a symbolic link now, and what that means is not known: put it back by hand",
        ));
    }
    if let Some(parent) = before.path.parent() {
        // As root's alone: what COMMAND moved away is not known any more.
        make_private(parent)?;
    }
    let access = Access::from(&fs::metadata(&before.copy)?);
    replace_as(&before.path, fs::read(&before.copy)?, Some(access)).map_err(|error| io::Error::other(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    #[test]
    fn what_differs_is_put_back_and_nothing_else() {
        let temp = tempfile::tempdir().unwrap();
        let before = |name: &str, is: Option<&str>, was: &str, shown| {
            let (path, copy) = (temp.path().join(name), temp.path().join(format!("copy-of-{name}")));
            fs::write(&copy, was).unwrap();
            if let Some(is) = is {
                fs::write(&path, is).unwrap();
            }
            SavedFile { path, copy, shown }
        };
        let all = [
            before("gone.key", None, "secret\n", false),
            before("same.crt", Some("a\n"), "a\n", false),
            before("changed.key", Some("new\n"), "old\n", false),
            before("manifest.yaml", Some("a: 2\n"), "a: 1\n", true),
        ];
        for (before, mode) in all.iter().zip([0o640, 0o600, 0o600, 0o600]) {
            fs::set_permissions(&before.copy, Permissions::from_mode(mode)).unwrap();
        }
        fs::set_permissions(&all[1].path, Permissions::from_mode(0o600)).unwrap();
        let found = differences(&all).unwrap();
        let of = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
        let named: Vec<_> = found.iter().map(|it| (of(&it.path), it.missing, it.diff.is_some())).collect();
        let named: Vec<_> = named.iter().map(|(name, missing, diff)| (name.as_str(), *missing, *diff)).collect();
        assert_eq!(named, [("gone.key", true, false), ("changed.key", false, false), ("manifest.yaml", false, true)]);
        let diff = found[2].diff.as_ref().unwrap();
        assert!(diff.contains("-a: 2\n+a: 1\n"), "{diff}");
        assert_eq!(fs::read_to_string(&all[2].path).unwrap(), "new\n", "nothing is written");

        assert_eq!(restore(&all).unwrap(), found);
        assert_eq!(differences(&all).unwrap(), []);
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!((mode(&all[0].path), mode(&all[3].path)), (0o640, 0o600));
        // Who may read it counts too; a directory that is gone is made.
        fs::set_permissions(&all[1].path, Permissions::from_mode(0o400)).unwrap();
        assert_eq!(restore(&all).unwrap().len(), 1);
        assert_eq!(mode(&all[1].path), 0o600);
        let inside = [SavedFile { path: temp.path().join("gone/a.key"), ..all[0].clone() }];
        assert_eq!(restore(&inside).unwrap().len(), 1);
        // What is a link now is left alone, and the others are put back.
        fs::remove_file(&all[0].path).unwrap();
        std::os::unix::fs::symlink("elsewhere", &all[0].path).unwrap();
        fs::write(&all[2].path, "new\n").unwrap();
        assert!(restore(&all).unwrap_err().contains("symbolic link"));
        assert_eq!(fs::read_to_string(&all[2].path).unwrap(), "old\n");
    }

    #[test]
    fn what_cannot_be_read_is_said() {
        let before = SavedFile { path: "/proc/self/mem".into(), copy: "/nonexistent".into(), shown: false };
        assert!(differences(&[before]).unwrap_err().contains("/nonexistent"));
        // Opening a FIFO without a writer would block the daemon for ever.
        let temp = tempfile::tempdir().unwrap();
        let (path, copy) = (temp.path().join("fifo"), temp.path().join("copy"));
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        fs::write(&copy, "").unwrap();
        let (to, compared) = std::sync::mpsc::channel();
        std::thread::spawn(move || to.send(differences(&[SavedFile { path, copy, shown: false }])));
        let why = compared.recv_timeout(std::time::Duration::from_secs(30)).expect("it waits").unwrap_err();
        assert!(why.contains("fifo: it is no regular file"), "{why}");
    }
}
