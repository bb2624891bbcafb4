//! Restores the files that the node's kube-apiserver is started from and reads, as they were before
//! the bridge began: the manifest, and the files that its arguments name. Nothing else is restored:
//! not etcd's manifest, the kubelet's configuration, or objects of the cluster.

use berth_manifest::Manifest;
use berth_manifest::file::{
    self, Access, replace_file_with_access, sweep_temporary_files_beginning_with,
};
use berth_node::ipc::bridge::Difference;
use berth_os::file::{make_private_directory, none_if_missing, open_regular_file};
use similar::TextDiff;
use std::collections::BTreeSet;
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// kube-apiserver's flag for the encryption configuration.
pub(super) const ENCRYPTION: &str = "--encryption-provider-config";

/// Longest diff to be shown, in bytes: a diff must fit into one message.
const LONGEST: usize = 32 * 1024;

/// A file, and a copy from before the bridge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedFile {
    pub path: PathBuf,
    pub copy: PathBuf,
    /// True for the manifest. The manifest's text may be shown. Other files may be secret.
    pub shown: bool,
}

/// The files that have changed.
///
/// # Errors
/// A file cannot be read.
pub fn find_differences(all: &[SavedFile]) -> Result<Vec<Difference>, String> {
    let mut differing: Vec<_> = compare_files(all)?
        .into_iter()
        .map(|(_, difference)| difference)
        .collect();
    if let Some(first) = differing.first_mut() {
        first.refused = check_keys_stay(all).err();
    }
    Ok(differing)
}

/// Returns the files with keys that have changed, and an encryption configuration that the manifest
/// names now and did not name before. The temporary instance still has the old keys.
///
/// # Errors
/// A file cannot be read.
pub fn changed_keys(
    all: &[SavedFile],
    keys: &BTreeSet<PathBuf>,
) -> Result<BTreeSet<PathBuf>, String> {
    let changed = compare_files(all)?
        .into_iter()
        .map(|(_, difference)| difference.path)
        .filter(|path| keys.contains(path));
    let mut changed: BTreeSet<_> = changed.collect();
    if let Some(manifest) = all.iter().find(|file| file.shown) {
        let (was, is) = (
            find_encryption_file(&read_text(&manifest.copy)?),
            find_encryption_file(&read_text(&manifest.path)?),
        );
        changed.extend(is.filter(|is| was.as_ref() != Some(is)));
    }
    Ok(changed)
}

/// Result of a restore.
#[derive(Debug)]
pub struct Restored {
    /// The restored files; or the errors of the files that cannot be written, after all others were
    /// restored.
    pub files: Result<Vec<Difference>, String>,
    /// Copies of the replaced files.
    pub kept: Vec<PathBuf>,
}

/// Restores the saved files in order, so that the files named by the manifest exist when the
/// kubelet reads the manifest. A replaced file is kept, because it may be the only copy of a key.
/// Nothing is restored if the encryption configuration has changed.
pub fn restore_files(all: &[SavedFile]) -> Restored {
    let (mut restored, mut failed, mut kept) = (Vec::new(), Vec::new(), Vec::new());
    let differing = match check_keys_stay(all).and_then(|()| compare_files(all)) {
        Ok(differing) => differing,
        Err(why) => {
            return Restored {
                files: Err(why),
                kept,
            };
        }
    };
    let manifests = all
        .iter()
        .find(|file| file.shown)
        .and_then(|manifest| manifest.path.parent());
    for (before, difference) in differing {
        let done = keep_copy(before, manifests).and_then(|at| {
            // Listed even if the write fails.
            kept.extend(at.clone());
            restore_file(before).map(|()| at)
        });
        match done {
            Ok(at) => {
                tracing::info!(path = %before.path.display(), kept = ?at, "put back");
                restored.push(difference);
            }
            Err(error) => failed.push(format!("{}: {error}", before.path.display())),
        }
    }
    Restored {
        files: if failed.is_empty() {
            Ok(restored)
        } else {
            Err(failed.join("; "))
        },
        kept,
    }
}

/// Checks that a restore takes no encryption key away: objects may have been written with any key
/// of a configuration that differs from the saved one.
fn check_keys_stay(all: &[SavedFile]) -> Result<(), String> {
    let Some(manifest) = all.iter().find(|file| file.shown) else {
        return Ok(());
    };
    let then = find_encryption_file(&read_text(&manifest.copy)?);
    let is = read_text(&manifest.path)?;
    // No kube-apiserver starts from a manifest that is gone or cannot be parsed.
    let now = if Manifest::parse(&is).is_ok() {
        find_encryption_file(&is)
    } else {
        then.clone()
    };
    let Some(path) = now.clone().or_else(|| then.clone()) else {
        return Ok(());
    };
    let copy = all
        .iter()
        .find(|file| file.path == path)
        .map_or(&path, |file| &file.copy);
    let has_changed = path.exists() && read_text(&path)? != read_text(copy)?;
    if now == then && !has_changed {
        return Ok(());
    }
    Err(format!(
        "the encryption configuration ({ENCRYPTION}) has changed, and kube-apiserver may have written objects with \
         a key that only {} has: nothing is restored; undo the other changes by hand (`berth bridge restore --dry-run` shows the \
         changes), and keep the new encryption keys",
        path.display()
    ))
}

/// The node's path of the encryption configuration that a manifest names.
fn find_encryption_file(manifest: &str) -> Option<PathBuf> {
    let manifest = Manifest::parse(manifest).ok()?;
    let path = manifest.flag(ENCRYPTION.trim_start_matches('-'))?.value;
    manifest.container().path_on_node(path).map(PathBuf::from)
}

/// Text of a file. Empty if there is no file.
fn read_text(path: &Path) -> Result<String, String> {
    let file = none_if_missing(open_regular_file(path))
        .and_then(|file| file.map(read_with_metadata).transpose());
    let file = file.map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    Ok(file
        .map(|(bytes, _)| String::from_utf8_lossy(&bytes).into_owned())
        .unwrap_or_default())
}

/// Copies the current file to a place beside it, and returns the copy's path. `None` if the file is
/// unchanged or gone.
fn keep_copy(before: &SavedFile, manifests: Option<&Path>) -> io::Result<Option<PathBuf>> {
    let Some((is, _)) = none_if_missing(open_regular_file(&before.path))?
        .map(read_with_metadata)
        .transpose()?
    else {
        return Ok(None);
    };
    if is == fs::read(&before.copy)? {
        return Ok(None);
    }
    let parent = before.path.parent().unwrap_or(Path::new("/"));
    // The kubelet would start a pod from a file beside a manifest.
    let is_manifests =
        manifests.is_some_and(|manifests| file::is_in_directory(&before.path, manifests));
    let directory = if is_manifests {
        parent.parent().unwrap_or(parent)
    } else {
        parent
    };
    let name = before
        .path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy();
    let now = humantime::format_rfc3339_millis(SystemTime::now())
        .to_string()
        .replace(['-', ':'], "");
    let start = format!("{name}.replaced-");
    // Remove half-written copies of a killed bridge.
    sweep_temporary_files_beginning_with(directory, &start);
    let path = directory.join(start + &now);
    replace_file_with_access(&path, is, None).map_err(io::Error::other)?;
    Ok(Some(path))
}

fn compare_files(all: &[SavedFile]) -> Result<Vec<(&SavedFile, Difference)>, String> {
    let failed = |path: &Path| {
        let path = path.display().to_string();
        move |error: io::Error| format!("cannot read {path}: {error}")
    };
    let mut differing = Vec::new();
    for before in all {
        let was = fs::read(&before.copy).map_err(failed(&before.copy))?;
        let like = fs::metadata(&before.copy).map_err(failed(&before.copy))?;
        let opened =
            none_if_missing(open_regular_file(&before.path)).map_err(failed(&before.path))?;
        let is = opened
            .map(read_with_metadata)
            .transpose()
            .map_err(failed(&before.path))?;
        if is
            .as_ref()
            .is_some_and(|(is, meta)| *is == was && Access::from(meta) == Access::from(&like))
        {
            continue;
        }
        let (path, missing) = (before.path.clone(), is.is_none());
        let is = is.map(|(is, _)| is).unwrap_or_default();
        let diff = before
            .shown
            .then(|| make_diff(&path, &is, &was))
            .filter(|diff| diff.len() <= LONGEST);
        differing.push((
            before,
            Difference {
                path,
                missing,
                diff,
                refused: None,
            },
        ));
    }
    Ok(differing)
}

fn read_with_metadata(mut file: File) -> io::Result<(Vec<u8>, Metadata)> {
    let mut is = Vec::new();
    file.read_to_end(&mut is)?;
    Ok((is, file.metadata()?))
}

fn make_diff(path: &Path, is: &[u8], was: &[u8]) -> String {
    let [is, was] = [is, was].map(String::from_utf8_lossy);
    let path = path.display().to_string();
    TextDiff::from_lines(&*is, &*was)
        .unified_diff()
        .header(&path, &path)
        .to_string()
}

fn restore_file(before: &SavedFile) -> io::Result<()> {
    if fs::symlink_metadata(&before.path).is_ok_and(|meta| meta.is_symlink()) {
        return Err(io::Error::other(
            "the file is a symbolic link now, and berth cannot tell why: restore the file by hand",
        ));
    }
    if let Some(parent) = before.path.parent() {
        // Only root gets access: the mode of a directory that COMMAND moved away is unknown.
        make_private_directory(parent)?;
    }
    let access = Access::from(&fs::metadata(&before.copy)?);
    replace_file_with_access(&before.path, fs::read(&before.copy)?, Some(access))
        .map_err(|error| io::Error::other(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    /// A file with the text `is`, or no file, and a saved copy with the text `was` and a mode.
    fn make_saved_file(
        directory: &Path,
        name: &str,
        is: Option<&str>,
        was: &str,
        mode: u32,
    ) -> SavedFile {
        let shown = name.ends_with(".yaml");
        let (path, copy) = (
            directory.join(name),
            directory.with_file_name(format!("copy-of-{name}")),
        );
        fs::write(&copy, was).unwrap();
        fs::set_permissions(&copy, Permissions::from_mode(mode)).unwrap();
        if let Some(is) = is {
            fs::write(&path, is).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        }
        SavedFile { path, copy, shown }
    }

    fn read_mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o777
    }

    #[test]
    fn only_changed_files_are_restored() {
        let temp = tempfile::tempdir().unwrap();
        let [files, manifests] = ["files", "manifests"].map(|name| temp.path().join(name));
        [&files, &manifests]
            .map(fs::create_dir)
            .into_iter()
            .for_each(Result::unwrap);
        let all = [
            make_saved_file(&files, "gone.key", None, "secret\n", 0o640),
            make_saved_file(&files, "same.crt", Some("a\n"), "a\n", 0o600),
            make_saved_file(&files, "changed.key", Some("new\n"), "old\n", 0o600),
            make_saved_file(&manifests, "manifest.yaml", Some("a: 2\n"), "a: 1\n", 0o600),
        ];
        let difference = |at: usize, missing, diff| Difference {
            path: all[at].path.clone(),
            missing,
            diff,
            refused: None,
        };
        let path = all[3].path.display();
        let diff = format!("--- {path}\n+++ {path}\n@@ -1 +1 @@\n-a: 2\n+a: 1\n");
        let found = find_differences(&all).unwrap();
        assert_eq!(
            found,
            [
                difference(0, true, None),
                difference(2, false, None),
                difference(3, false, Some(diff))
            ]
        );
        assert_eq!(
            fs::read_to_string(&all[2].path).unwrap(),
            "new\n",
            "nothing is written"
        );

        let restored = restore_files(&all);
        assert_eq!(restored.files.unwrap(), found);
        // The manifest is kept beside its directory. A missing file leaves no copy.
        let [key, manifest] = &restored.kept[..] else {
            panic!("{:?}", restored.kept)
        };
        assert_eq!(fs::read_dir(&manifests).unwrap().count(), 1);
        for (kept, directory, name) in [
            (key, &*files, "changed.key"),
            (manifest, temp.path(), "manifest.yaml"),
        ] {
            let start = directory.join(format!("{name}.replaced-"));
            assert!(
                kept.to_str().unwrap().starts_with(start.to_str().unwrap()),
                "{kept:?}"
            );
        }
        assert_eq!(
            (fs::read_to_string(key).unwrap().as_str(), read_mode(key)),
            ("new\n", 0o600)
        );
        assert_eq!(find_differences(&all).unwrap(), []);
        assert_eq!(
            (read_mode(&all[0].path), read_mode(&all[3].path)),
            (0o640, 0o600)
        );
        // A changed mode counts, too; a missing directory is created.
        fs::set_permissions(&all[1].path, Permissions::from_mode(0o400)).unwrap();
        assert_eq!(restore_files(&all).files.unwrap().len(), 1);
        assert_eq!(read_mode(&all[1].path), 0o600);
        let inside = [SavedFile {
            path: files.join("gone/a.key"),
            ..all[0].clone()
        }];
        assert_eq!(restore_files(&inside).files.unwrap().len(), 1);
        // A symbolic link is left alone, and the other files are restored.
        fs::remove_file(&all[0].path).unwrap();
        std::os::unix::fs::symlink("elsewhere", &all[0].path).unwrap();
        fs::write(&all[2].path, "new\n").unwrap();
        assert!(restore_files(&all).files.is_err() && all[0].path.is_symlink());
        assert_eq!(fs::read_to_string(&all[2].path).unwrap(), "old\n");
    }

    #[test]
    fn a_long_difference_is_not_shown() {
        let temp = tempfile::tempdir().unwrap();
        let files = temp.path().join("files");
        fs::create_dir(&files).unwrap();
        for (length, shown) in [(4 << 10, true), (32 << 10, false)] {
            let saved = make_saved_file(&files, "m.yaml", Some(&"a".repeat(length)), "b", 0o600);
            let found = find_differences(&[saved]).unwrap();
            assert_eq!(found[0].diff.is_some(), shown, "{length}");
        }
    }

    #[test]
    fn kept_copies_are_listed_even_if_a_restore_fails() {
        let temp = tempfile::tempdir().unwrap();
        let [path, copy, target] = ["key", "copy", "target"].map(|name| temp.path().join(name));
        fs::write(&target, "new\n").unwrap();
        fs::write(&copy, "old\n").unwrap();
        std::os::unix::fs::symlink(&target, &path).unwrap();
        let Restored { files, kept } = restore_files(&[SavedFile {
            path,
            copy,
            shown: false,
        }]);
        assert!(files.is_err());
        assert_eq!(
            kept.iter()
                .map(|kept| fs::read_to_string(kept).unwrap())
                .collect::<Vec<_>>(),
            ["new\n"]
        );
    }

    /// A node with encryption keys: first `old`, now the keys of `now`. `named` says if the
    /// manifest names the configuration, before and now.
    fn make_encryption_files(temp: &Path, now: &[&str], named: [bool; 2]) -> [SavedFile; 2] {
        let manifests = temp.join("manifests");
        fs::create_dir(&manifests).unwrap();
        let config = |keys: &[&str]| {
            let keys: String = keys
                .iter()
                .map(|key| format!("{{name: {key}, secret: c2VjcmV0}},"))
                .collect();
            format!(
                "resources:\n- resources: [secrets]\n  providers: [{{aescbc: {{keys: [{keys}]}}}}, {{identity: {{}}}}]\n"
            )
        };
        let manifest = |is_named: bool| {
            let flag = if is_named {
                format!(
                    ", --encryption-provider-config={}",
                    temp.join("enc").display()
                )
            } else {
                String::new()
            };
            format!(
                "apiVersion: v1\nkind: Pod\nmetadata: {{name: kube-apiserver}}\nspec:\n  containers:\n  - name: kube-apiserver\n    \
                 command: [kube-apiserver{flag}]\n    volumeMounts: [{{name: v, mountPath: {0}}}]\n  \
                 volumes: [{{name: v, hostPath: {{path: {0}}}}}]\n",
                temp.display()
            )
        };
        [
            make_saved_file(temp, "enc", Some(&config(now)), &config(&["old"]), 0o600),
            make_saved_file(
                &manifests,
                "m.yaml",
                Some(&manifest(named[1])),
                &manifest(named[0]),
                0o600,
            ),
        ]
    }

    /// Nothing is restored if a key might get lost, and changed keys that the temporary instance
    /// lacks are reported.
    #[test]
    fn encryption_keys_are_never_removed_and_changed_ones_are_listed() {
        for (now, named, is_refused, is_changed) in [
            (&["new", "old"][..], [true, true], true, true),
            // COMMAND introduced encryption.
            (&["new"], [false, true], true, true),
            (&["old"], [true, true], false, false),
            (&[], [true, true], true, true),
            // COMMAND keeps the file, but no longer uses it: objects may have been written with any
            // of its keys.
            (&["new", "old"], [true, false], true, true),
            (&["old"], [true, false], true, false),
        ] {
            let temp = tempfile::tempdir().unwrap();
            let files = temp.path().join("files");
            fs::create_dir(&files).unwrap();
            let all = make_encryption_files(&files, now, named);
            let all = if named[0] { &all[..] } else { &all[1..] };
            let config = files.join("enc");
            let changed = is_changed.then(|| config.clone()).into_iter().collect();
            assert_eq!(
                changed_keys(all, &[config.clone()].into()),
                Ok(changed),
                "{now:?} {named:?}"
            );
            // The manifest holds no keys.
            assert!(changed_keys(all, &BTreeSet::new()).unwrap().len() <= usize::from(!named[0]));
            let texts = || {
                all.iter()
                    .map(|file| fs::read_to_string(&file.path).unwrap())
                    .collect::<Vec<_>>()
            };
            let before = texts();
            let files = restore_files(all).files;
            assert_eq!(files.is_err(), is_refused, "{now:?} {named:?}: {files:?}");
            let Err(why) = files else { continue };
            assert!(why.contains(&config.display().to_string()), "{why}");
            assert_eq!(texts(), before);
            let shown = find_differences(all).unwrap();
            assert!(
                shown
                    .iter()
                    .any(|difference| difference.refused.as_ref() == Some(&why)),
                "{shown:?}"
            );
        }
        // COMMAND removed the manifest or the configuration, and no kube-apiserver was started
        // without it.
        for gone in 0..2 {
            let temp = tempfile::tempdir().unwrap();
            let files = temp.path().join("files");
            fs::create_dir(&files).unwrap();
            let all = make_encryption_files(&files, &["old"], [true, true]);
            fs::remove_file(&all[gone].path).unwrap();
            assert_eq!(restore_files(&all).files.map(|all| all.len()), Ok(1));
        }
    }

    #[test]
    fn an_unreadable_file_is_an_error() {
        let before = SavedFile {
            path: "/proc/self/mem".into(),
            copy: "/nonexistent".into(),
            shown: false,
        };
        assert!(
            find_differences(&[before])
                .unwrap_err()
                .contains("/nonexistent")
        );
        // Opening a FIFO without a writer would block the daemon forever.
        let temp = tempfile::tempdir().unwrap();
        let (path, copy) = (temp.path().join("fifo"), temp.path().join("copy"));
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        fs::write(&copy, "").unwrap();
        let (to, compared) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            to.send(find_differences(&[SavedFile {
                path,
                copy,
                shown: false,
            }]))
        });
        let compared = compared
            .recv_timeout(std::time::Duration::from_secs(30))
            .expect("it waits");
        assert!(compared.is_err(), "{compared:?}");
    }
}
