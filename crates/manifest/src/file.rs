//! Manifest files and their backups.
//!
//! A kubelet reads every file of its manifest directory, unless the file's name begins with a dot.
//! Of two files with the same pod name, one overwrites the other. So the name of an incomplete file
//! begins with a dot, a file is replaced by a rename, and backups are in another directory.

use super::{Manifest, image_tag};
use berth_os::file::{make_private_directory, none_if_missing, sync_parent_directory};
use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::fs::{self, File, Metadata, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Largest manifest to read, in bytes: etcd's limit for an object.
const MAX_SIZE: u64 = 1 << 20;

/// A failed operation on a file.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what} {}: {source}{}", path.display(), suggest_fix(what, source))]
pub struct FileError {
    /// Name of the operation: `read`, `write` and so on.
    what: &'static str,
    path: PathBuf,
    source: io::Error,
}

/// Suggests a fix for an I/O error, as a continuation of the error's message. Empty if no fix is
/// known.
pub fn suggest_fix(what: &str, error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound if what == "read" => ": give the path of an existing file",
        io::ErrorKind::PermissionDenied => ": run berth as root",
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            ": free space on that file system"
        }
        io::ErrorKind::ReadOnlyFilesystem => ": that file system is mounted read-only",
        _ => "",
    }
}

impl FileError {
    /// Returns a function that turns an I/O error into a [`FileError`]. `what` is the operation
    /// that failed, such as `read`.
    pub fn wrap_io_error(what: &'static str, path: &Path) -> impl Fn(io::Error) -> Self {
        move |source| Self {
            what,
            path: path.to_owned(),
            source,
        }
    }

    /// True if the file could be read, but the content is no manifest.
    pub fn is_wrong_content(&self) -> bool {
        self.source.kind() == io::ErrorKind::InvalidData
    }
}

/// Reads a manifest; `-` is standard input.
///
/// # Errors
/// The file cannot be read, is larger than any manifest, or is no text.
pub fn read_manifest_text(path: &Path) -> Result<String, FileError> {
    if path == Path::new("-") {
        read_limited(&mut io::stdin().lock())
    } else {
        File::open(path).and_then(|mut file| read_limited(&mut file))
    }
    .map_err(FileError::wrap_io_error("read", path))
}

fn read_limited(input: &mut dyn Read) -> io::Result<String> {
    let invalid = |why| io::Error::new(io::ErrorKind::InvalidData, why);
    let mut bytes = Vec::new();
    input.take(MAX_SIZE + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_SIZE {
        return Err(invalid(format!(
            "the file is longer than {MAX_SIZE} bytes, too long for a manifest: give another file"
        )));
    }
    String::from_utf8(bytes).map_err(|error| {
        let before = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
        invalid(format!(
            "line {line} is not UTF-8: convert it (iconv --to-code=UTF-8), or give another file"
        ))
    })
}

/// Mode and owner of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Access {
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
}

impl Access {
    /// Mode and owner of an existing file.
    pub fn of_file(path: &Path) -> Option<Self> {
        fs::metadata(path).ok().as_ref().map(Self::from)
    }
}

impl From<&Metadata> for Access {
    fn from(meta: &Metadata) -> Self {
        Self {
            mode: meta.mode() & 0o777,
            uid: meta.uid(),
            gid: meta.gid(),
        }
    }
}

/// Replaces a file in one step, and keeps mode and owner. A missing file is created with mode 0600.
///
/// # Errors
/// The file cannot be written, and stays unchanged.
pub fn replace_file(path: &Path, text: impl AsRef<[u8]>) -> Result<(), FileError> {
    replace_or_create_file(path, text, None)
}

/// Like [`replace_file`], but a missing file is created with its former mode and owner.
///
/// # Errors
/// The file cannot be written, and stays unchanged.
pub fn replace_or_create_file(
    path: &Path,
    text: impl AsRef<[u8]>,
    had: Option<Access>,
) -> Result<(), FileError> {
    let real =
        none_if_missing(path.canonicalize()).map_err(FileError::wrap_io_error("write", path))?;
    let path = real.as_deref().unwrap_or(path);
    replace_file_with_access(path, text, Access::of_file(path).or(had))
}

/// Replaces or creates a file in one step, with the given mode and owner, or with 0600 and the
/// current user. A symbolic link is replaced, not followed.
///
/// # Errors
/// The file cannot be written, and stays unchanged.
pub fn replace_file_with_access(
    path: &Path,
    text: impl AsRef<[u8]>,
    access: Option<Access>,
) -> Result<(), FileError> {
    sweep_temporary_files_of(path);
    let temporary =
        path.with_file_name(format!("{}{}", temporary_prefix(path), std::process::id()));
    berth_os::file::replace_file(path, &temporary, |file| {
        write_with_access(file, access, text.as_ref())
    })
    .and_then(|()| sync_parent_directory(path))
    .map_err(FileError::wrap_io_error("write", path))
}

/// Prefix of the names of temporary files. The process ID follows.
fn temporary_prefix(path: &Path) -> String {
    format!(
        ".{}.",
        path.file_name().unwrap_or_default().to_string_lossy()
    )
}

/// Removes temporary files that a killed process left when it was replacing this file. A file that
/// cannot be removed stays.
pub fn sweep_temporary_files_of(path: &Path) {
    sweep_files_with_prefix(path.parent(), &temporary_prefix(path), |rest| {
        (!rest.contains('.')).then_some(rest)
    });
}

/// Removes the temporary files in a directory that killed processes left, for all files with this
/// beginning. A name that contains a time needs this function, since the next run uses another
/// time.
pub fn sweep_temporary_files_beginning_with(directory: &Path, beginning: &str) {
    sweep_files_with_prefix(Some(directory), &format!(".{beginning}"), |rest| {
        rest.rsplit('.').next()
    });
}

/// Removes each file with this prefix, if the file's writer has ended. `process` finds the writer's
/// process ID in the rest of the name.
fn sweep_files_with_prefix(
    directory: Option<&Path>,
    prefix: &str,
    process: impl Fn(&str) -> Option<&str>,
) {
    let entries = directory
        .and_then(|directory| fs::read_dir(directory).ok())
        .into_iter()
        .flatten();
    for entry in entries.flatten() {
        let name = entry.file_name();
        let writer = name
            .to_str()
            .and_then(|name| process(name.strip_prefix(prefix)?)?.parse::<u32>().ok());
        if writer.is_some_and(|writer| !Path::new("/proc").join(writer.to_string()).exists()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn write_with_access(mut file: File, access: Option<Access>, text: &[u8]) -> io::Result<()> {
    if let Some(Access { uid, gid, .. }) = access {
        let own = file.metadata()?;
        if (own.uid(), own.gid()) != (uid, gid) {
            fchown(&file, Some(uid), Some(gid))?;
        }
    }
    file.set_permissions(Permissions::from_mode(
        access.map_or(0o600, |access| access.mode),
    ))?;
    file.write_all(text)?;
    file.sync_all()
}

/// True if a file is in this directory. A symbolic link is in its own directory and in its target's
/// directory.
pub fn is_in_directory(file: &Path, directory: &Path) -> bool {
    let directory = resolve_links(directory);
    let holds = |file: &Path| {
        file.parent()
            .is_some_and(|parent| resolve_links(parent) == directory)
    };
    std::path::absolute(file).is_ok_and(|file| holds(&file))
        || file.canonicalize().is_ok_and(|file| holds(&file))
}

/// A path with its symbolic links resolved, as far as the path exists.
pub fn resolve_links(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let there = path
        .ancestors()
        .find_map(|there| Some((there, there.canonicalize().ok()?)));
    there
        .and_then(|(there, real)| Some(real.join(path.strip_prefix(there).ok()?)))
        .unwrap_or(path)
}

/// Makes the readable part of a backup's name: the time, and the Kubernetes version of the
/// manifest. Such names sort by time. `time` is RFC 3339.
pub fn format_backup_stamp(time: &str, text: &str) -> String {
    let time: String = time.chars().filter(|c| !matches!(c, '-' | ':')).collect();
    let manifest = Manifest::parse(text).ok();
    let image = manifest
        .as_ref()
        .and_then(|manifest| manifest.apiserver().get("image")?.text());
    let tag = image.and_then(image_tag).filter(|tag| {
        tag.starts_with(|c: char| c.is_ascii_alphanumeric())
            && tag
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c))
    });
    format!("{time}.{}", tag.unwrap_or("unknown"))
}

/// Backups of original manifests. The name of a backup ends with a digest of the text that replaced
/// the original. So no backup overwrites another, and no backup is found for a file that was edited
/// since.
#[derive(Debug, Clone)]
pub struct Backups {
    directory: PathBuf,
}

impl Backups {
    /// Uses this directory for backups. The directory need not exist: [`Backups::keep_original`]
    /// creates it.
    pub fn new(directory: &Path) -> Self {
        Self {
            directory: directory.to_owned(),
        }
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Finds the original that was replaced by `text`, and the path of its backup. `None` if berth
    /// did not write this text.
    ///
    /// # Errors
    /// The backup exists and cannot be read.
    pub fn find_original(
        &self,
        manifest: &Path,
        text: &str,
    ) -> Result<Option<(PathBuf, String)>, FileError> {
        let failed = FileError::wrap_io_error("read", &self.directory);
        let entries = none_if_missing(fs::read_dir(&self.directory))
            .map_err(&failed)?
            .into_iter()
            .flatten();
        let (prefix, suffix) = backup_name_affixes(manifest, text);
        for entry in entries {
            let entry = entry.map_err(&failed)?;
            let name = entry.file_name();
            let between = name
                .to_str()
                .and_then(|name| name.strip_prefix(&prefix)?.strip_suffix(&suffix));
            // There is no second match: [`Backups::keep_original`] writes at most one file for a
            // text.
            if between.is_some_and(|it| it.starts_with('.')) {
                let original = read_manifest_text(&entry.path())?;
                return Ok(Some((entry.path(), original)));
            }
        }
        Ok(None)
    }

    /// Keeps the original of a file before the file gets this text.
    ///
    /// # Errors
    /// The backup cannot be written.
    pub fn keep_original(
        &self,
        manifest: &Path,
        original: &str,
        text: &str,
    ) -> Result<PathBuf, FileError> {
        make_private_directory(&self.directory).map_err(FileError::wrap_io_error(
            "make the directory",
            &self.directory,
        ))?;
        let (prefix, suffix) = backup_name_affixes(manifest, text);
        sweep_temporary_files_beginning_with(&self.directory, &format!("{prefix}."));
        let path = match self.find_original(manifest, text)? {
            Some((path, _)) => path,
            None => {
                let now = humantime::format_rfc3339_seconds(SystemTime::now()).to_string();
                self.directory.join(format!(
                    "{prefix}.{}{suffix}",
                    format_backup_stamp(&now, original)
                ))
            }
        };
        replace_file(&path, original)?;
        Ok(path)
    }
}

/// Prefix and suffix of the name of a backup. For a link, the name of its target counts, since
/// [`replace_file`] writes to the target.
fn backup_name_affixes(manifest: &Path, text: &str) -> (String, String) {
    let mut digits = String::from(".");
    for byte in &digest(&SHA256, text.as_bytes()).as_ref()[..6] {
        let _ = write!(digits, "{byte:02x}");
    }
    let real = manifest
        .canonicalize()
        .unwrap_or_else(|_| manifest.to_owned());
    (
        real.file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned(),
        digits,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_file_is_replaced_with_its_mode_and_leaves_no_other_file() {
        let temp = tempfile::tempdir().unwrap();
        let (real, link) = (temp.path().join("a.yaml"), temp.path().join("link.yaml"));
        fs::write(&real, "old").unwrap();
        fs::set_permissions(&real, Permissions::from_mode(0o640)).unwrap();
        symlink(&real, &link).unwrap();
        replace_file(&link, "new").unwrap();
        assert_eq!(fs::read_to_string(&real).unwrap(), "new");
        assert_eq!(fs::metadata(&real).unwrap().mode() & 0o777, 0o640);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 2);
        let missing = temp.path().join("none/a.yaml");
        let error = replace_file(&missing, "").unwrap_err();
        assert_eq!((error.what, error.path), ("write", missing));
    }

    #[test]
    fn files_of_a_killed_run_go_and_files_of_a_living_run_stay() {
        let temp = tempfile::tempdir().unwrap();
        let mut dead = std::process::Command::new("true").spawn().unwrap();
        dead.wait().unwrap();
        let names = [dead.id(), 1].map(|process| format!(".a.yaml.{process}"));
        for name in names.iter().map(String::as_str).chain([".a.yaml.swp"]) {
            fs::write(temp.path().join(name), "half").unwrap();
        }
        replace_file(&temp.path().join("a.yaml"), "whole").unwrap();
        let there = [&names[0], &names[1], ".a.yaml.swp", "a.yaml"]
            .map(|name| temp.path().join(name).exists());
        assert_eq!(there, [false, true, true, true]);
    }

    #[test]
    fn a_half_written_backup_is_removed_by_the_next_run() {
        let temp = tempfile::tempdir().unwrap();
        let (manifest, kept) = (temp.path().join("a.yaml"), temp.path().join("berth"));
        fs::write(&manifest, "").unwrap();
        fs::create_dir(&kept).unwrap();
        let mut dead = std::process::Command::new("true").spawn().unwrap();
        dead.wait().unwrap();
        let half = |process: u32| {
            kept.join(format!(
                ".a.yaml.20260504T030201Z.unknown.0123456789ab.{process}"
            ))
        };
        [dead.id(), 1]
            .into_iter()
            .for_each(|process| fs::write(half(process), "half").unwrap());
        Backups::new(&kept)
            .keep_original(&manifest, "old", "new")
            .unwrap();
        assert_eq!((half(dead.id()).exists(), half(1).exists()), (false, true));
    }

    #[test]
    fn a_backup_is_found_by_the_text_that_replaced_it() {
        let temp = tempfile::tempdir().unwrap();
        let manifest = temp.path().join("manifests/a.yaml");
        fs::create_dir(manifest.parent().unwrap()).unwrap();
        fs::write(&manifest, "").unwrap();
        let backups = Backups::new(&temp.path().join("etc/berth"));
        assert!(backups.find_original(&manifest, "new").unwrap().is_none());
        let path = backups.keep_original(&manifest, "old", "new").unwrap();
        backups.keep_original(&manifest, "older", "newer").unwrap();
        assert_eq!(
            backups.find_original(&manifest, "new").unwrap(),
            Some((path.clone(), "old".into()))
        );
        assert!(
            backups
                .find_original(&manifest, "changed")
                .unwrap()
                .is_none()
        );
        assert_eq!(fs::metadata(path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(
            fs::metadata(temp.path().join("etc/berth")).unwrap().mode() & 0o777,
            0o700
        );
        assert!(
            !is_in_directory(&manifest, backups.directory())
                && is_in_directory(&manifest, manifest.parent().unwrap())
        );
        // A symbolic link is in two directories: the link's own, and the target's. Neither has to
        // exist.
        let link = temp.path().join("a.yaml");
        symlink(&manifest, &link).unwrap();
        assert!(
            is_in_directory(&link, temp.path())
                && is_in_directory(&link, manifest.parent().unwrap())
        );
        let kubelets = temp.path().join("kubelets");
        symlink(temp.path(), &kubelets).unwrap();
        assert_eq!(
            resolve_links(&kubelets.join("new/er")),
            temp.path().canonicalize().unwrap().join("new/er")
        );
    }

    #[test]
    fn names_of_backups_say_version_and_time() {
        let temp = tempfile::tempdir().unwrap();
        let manifest = temp.path().join("kube-apiserver.yaml");
        let text = include_str!("../../../tests/data/manifest/kubeadm-v1.36.yaml");
        fs::write(&manifest, text).unwrap();
        let backups = Backups::new(&temp.path().join("berth"));
        let path = backups.keep_original(&manifest, text, "new").unwrap();
        let name = path.file_name().unwrap().to_str().unwrap();
        let rest = name.strip_prefix("kube-apiserver.yaml.").unwrap();
        let (time, rest) = rest.split_once('.').unwrap();
        assert!(time.len() == 16 && time.ends_with('Z'), "{name}");
        assert_eq!(rest.rsplit_once('.').unwrap().0, "v1.36.3", "{name}");
        // A second call finds the same backup.
        assert_eq!(backups.keep_original(&manifest, text, "new").unwrap(), path);
        // No image name can lead out of the directory.
        for (image, version) in [
            ("r.example:5000/kube-apiserver:v1.2@sha256:ab", "v1.2"),
            ("kube-apiserver@sha256:ab", "unknown"),
            ("kube-apiserver:../../x", "unknown"),
            ("kube-apiserver", "unknown"),
        ] {
            let text = text.replace("registry.k8s.io/kube-apiserver:v1.36.3", image);
            assert_eq!(
                format_backup_stamp("2026-11-22T00:29:52Z", &text),
                format!("20261122T002952Z.{version}")
            );
        }
    }

    #[test]
    fn files_that_are_no_manifests_are_refused() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("large");
        fs::write(&path, vec![b' '; MAX_SIZE as usize + 1]).unwrap();
        let error = read_manifest_text(&path).unwrap_err();
        assert!(error.is_wrong_content(), "{error}");
        fs::write(&path, b"kind: Pod\n# \xff\n").unwrap();
        let error = read_manifest_text(&path).unwrap_err();
        let message = format!(
            "cannot read {}: line 2 is not UTF-8: convert it (iconv ",
            path.display()
        );
        assert!(
            error.is_wrong_content() && error.to_string().starts_with(&message),
            "{error}"
        );
        assert!(
            !read_manifest_text(&temp.path().join("none"))
                .unwrap_err()
                .is_wrong_content()
        );
    }

    #[test]
    fn errors_of_writing_come_with_a_fix() {
        use nix::errno::Errno;
        for (errno, fix) in [
            (Errno::ENOSPC, "free space on that file system"),
            (Errno::EDQUOT, "free space on that file system"),
            (Errno::EROFS, "mounted read-only"),
            (Errno::EACCES, "run berth as root"),
        ] {
            let error = FileError {
                what: "write",
                path: "/m/a.yaml".into(),
                source: errno.into(),
            }
            .to_string();
            assert!(
                error.starts_with("cannot write /m/a.yaml: ") && error.ends_with(fix),
                "{error}"
            );
        }
    }
}
