//! Puts back what the node's own kube-apiserver is started from and reads, as it was before the bridge began: its manifest, and the
//! files that its arguments name. Nothing else: not etcd's manifest, not the kubelet's configuration, not what is in the cluster.

use crate::manifest::file;
use serde::{Deserialize, Serialize};
use similar::TextDiff;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

/// A file, and what it was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Before {
    pub path: PathBuf,
    pub copy: PathBuf,
    /// Its text may be shown. Of others it may be secret.
    pub shown: bool,
}

/// A file that is not what it was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    pub path: PathBuf,
    /// It is not there any more.
    pub missing: bool,
    /// What putting it back changes, as `diff -u` has it, where that may be shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diff: Option<String>,
}

/// Those that are not what they were.
///
/// # Errors
/// One cannot be read.
pub fn differences(all: &[Before]) -> Result<Vec<Difference>, String> {
    Ok(compare(all)?.into_iter().map(|(_, difference)| difference).collect())
}

/// Puts them back, in this order: a kubelet that sees a manifest finds the files that it names.
///
/// # Errors
/// One cannot be written. Those before it are put back.
pub fn put_back(all: &[Before]) -> Result<Vec<Difference>, String> {
    let mut put = Vec::new();
    for (before, difference) in compare(all)? {
        write(before, difference.missing).map_err(|error| format!("{}: {error}", before.path.display()))?;
        tracing::info!(path = %before.path.display(), "put back");
        put.push(difference);
    }
    Ok(put)
}

fn compare(all: &[Before]) -> Result<Vec<(&Before, Difference)>, String> {
    let failed = |path: &Path| {
        let path = path.display().to_string();
        move |error: io::Error| format!("cannot read {path}: {error}")
    };
    let mut found = Vec::new();
    for before in all {
        let was = fs::read(&before.copy).map_err(failed(&before.copy))?;
        let is = match fs::read(&before.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            other => Some(other.map_err(failed(&before.path))?),
        };
        if is.as_ref() == Some(&was) {
            continue;
        }
        let (path, missing) = (before.path.clone(), is.is_none());
        let diff = before.shown.then(|| diff(&path, &is.unwrap_or_default(), &was));
        found.push((before, Difference { path, missing, diff }));
    }
    Ok(found)
}

fn diff(path: &Path, is: &[u8], was: &[u8]) -> String {
    let [is, was] = [is, was].map(String::from_utf8_lossy);
    let path = path.display().to_string();
    TextDiff::from_lines(&*is, &*was).unified_diff().header(&path, &path).to_string()
}

fn write(before: &Before, missing: bool) -> io::Result<()> {
    file::replace(&before.path, fs::read(&before.copy)?).map_err(|error| io::Error::other(error.to_string()))?;
    if missing {
        let like = fs::metadata(&before.copy)?;
        chown(&before.path, Some(like.uid()), Some(like.gid()))?;
        fs::set_permissions(&before.path, Permissions::from_mode(like.mode() & 0o777))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_put_back_and_nothing_else() {
        let temp = tempfile::tempdir().unwrap();
        let before = |name: &str, is: Option<&str>, was: &str, shown| {
            let (path, copy) = (temp.path().join(name), temp.path().join(format!("copy-of-{name}")));
            fs::write(&copy, was).unwrap();
            if let Some(is) = is {
                fs::write(&path, is).unwrap();
            }
            Before { path, copy, shown }
        };
        let all = [
            before("gone.key", None, "secret\n", false),
            before("same.crt", Some("a\n"), "a\n", false),
            before("changed.key", Some("new\n"), "old\n", false),
            before("manifest.yaml", Some("a: 2\n"), "a: 1\n", true),
        ];
        fs::set_permissions(&all[0].copy, Permissions::from_mode(0o640)).unwrap();
        fs::set_permissions(&all[3].path, Permissions::from_mode(0o600)).unwrap();
        let found = differences(&all).unwrap();
        let of = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
        let told: Vec<_> = found.iter().map(|it| (of(&it.path), it.missing, it.diff.is_some())).collect();
        let told: Vec<_> = told.iter().map(|(name, missing, diff)| (name.as_str(), *missing, *diff)).collect();
        assert_eq!(told, [("gone.key", true, false), ("changed.key", false, false), ("manifest.yaml", false, true)]);
        let diff = found[2].diff.as_ref().unwrap();
        assert!(diff.contains("-a: 2\n+a: 1\n"), "{diff}");
        assert_eq!(fs::read_to_string(&all[2].path).unwrap(), "new\n", "nothing is written");

        assert_eq!(put_back(&all).unwrap(), found);
        assert_eq!(differences(&all).unwrap(), []);
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!((mode(&all[0].path), mode(&all[3].path)), (0o640, 0o600));
    }

    #[test]
    fn what_cannot_be_read_is_said() {
        let before = Before { path: "/proc/self/mem".into(), copy: "/nonexistent".into(), shown: false };
        assert!(differences(&[before]).unwrap_err().contains("/nonexistent"));
    }
}
