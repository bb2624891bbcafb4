//! The position of an upgrade on disk: `upgrade.json` in berth's directory, never in the kubelet's.
//!
//! A save syncs a new file and renames it into place, so a crash leaves a whole file, old or new.
//! The file holds the text of both manifests, so the manifest for the way back cannot get lost
//! separately. A lock on a neighbouring file excludes a second run, and ends with the process in
//! every case.

use super::judge::options::JudgeOptions;
use super::machine::{Course, Position, Version};
use berth_manifest::file::{Access, FileError, format_backup_stamp, is_in_directory, replace_file};
use berth_manifest::report::Refusal;
use berth_node::instance_id::InstanceId;
use berth_os::file::{
    lock_file_within, make_private_directory, none_if_missing, sync_parent_directory,
};
use nix::errno::Errno;
use nix::fcntl::Flock;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The default directory for the state and for the original manifests.
pub const DEFAULT_DIRECTORY: &str = "/etc/kubernetes/berth";

const FILE_NAME: &str = "upgrade.json";

/// How long to wait for the lock. If a run is killed while it spawns a process, that process holds
/// the run's lock until it calls execve(2).
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// Why the state of an upgrade cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Another run has the lock.
    #[error("another `berth upgrade` runs (it holds {}): wait until that upgrade has ended", .0.display())]
    Busy(PathBuf),
    #[error(transparent)]
    File(#[from] FileError),
    /// The file exists but cannot be understood.
    #[error(
        "{} is not understood: {why}: the file belongs to an interrupted upgrade; finish the upgrade with the version of berth that \
         began the upgrade, or make sure that one kube-apiserver manifest is in the kubelet's directory, and remove this file",
        path.display()
    )]
    Format { path: PathBuf, why: String },
}

impl From<StateError> for Refusal {
    fn from(error: StateError) -> Self {
        Self::unavailable(&error)
    }
}

/// An upgrade that has begun and not ended, as in `upgrade.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Format; 1.
    pub version: u32,
    /// The berth version that began the upgrade.
    pub berth: String,
    /// Start time in RFC 3339, for people.
    pub started: String,
    pub position: Position,
    /// `kube-apiserver.yaml`.
    pub canonical: PathBuf,
    /// Path of the temporary pod's manifest, which exists only during the upgrade.
    pub temporary: PathBuf,
    /// UID of the temporary pod, and name of its instance.
    pub uid: InstanceId,
    /// The address that the node's instances advertise.
    pub address: SocketAddr,
    /// True if the Service `kubernetes` named this node at the start.
    pub service: bool,
    /// The manifest from before the upgrade.
    pub old: String,
    /// The manifest to upgrade to.
    pub new: String,
    /// The new manifest under the temporary pod's name.
    pub temporary_text: String,
    /// Mode and owner of `kube-apiserver.yaml`. An upgrade removes the file and creates it again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access: Option<Access>,
    /// The `--kubeconfig` at the start. The command that resumes the upgrade may lack the option.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kubeconfig: Option<PathBuf>,
    /// How the new instance is judged. `None` if it is not judged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub judge: Option<JudgeOptions>,
    /// The new manifest that is used until the verdict, if the new instance emulates the old
    /// release until then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub emulated: Option<EmulatedManifest>,
}

/// The new manifest with `--emulated-version`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmulatedManifest {
    /// The emulated release, such as 1.35.
    pub release: String,
    pub text: String,
}

impl State {
    /// The format of new files.
    pub const FORMAT_VERSION: u32 = 1;

    /// Returns the text of `kube-apiserver.yaml` for a version.
    pub fn manifest_text(&self, version: Version) -> &str {
        match version {
            Version::Old => &self.old,
            Version::Emulated => self
                .emulated
                .as_ref()
                .map_or(&self.new, |emulated| &emulated.text),
            Version::New => &self.new,
        }
    }

    pub fn course(&self) -> Course {
        Course {
            same: self.is_restart(),
            judged: self.judge.is_some(),
            emulated: self.emulated.is_some(),
        }
    }

    /// True if the old and the new manifest have the same text: a rolling restart.
    pub fn is_restart(&self) -> bool {
        self.old == self.new
    }
}

/// The directory with the state, locked.
#[derive(Debug)]
pub struct Store {
    path: PathBuf,
    _lock: Flock<File>,
}

impl Store {
    /// Creates the directory if necessary, and takes the lock.
    ///
    /// # Errors
    /// See [`StateError`].
    pub fn open(directory: &Path) -> Result<Self, StateError> {
        make_private_directory(directory)
            .map_err(FileError::wrap_io_error("make the directory", directory))?;
        let path = directory.join("upgrade.lock");
        let mut options = OpenOptions::new();
        let file = options
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW);
        let file = file
            .open(&path)
            .map_err(FileError::wrap_io_error("open", &path))?;
        match lock_file_within(file, LOCK_TIMEOUT) {
            Ok(lock) => Ok(Self {
                path: directory.join(FILE_NAME),
                _lock: lock,
            }),
            Err(Errno::EWOULDBLOCK) => Err(StateError::Busy(path)),
            Err(errno) => Err(FileError::wrap_io_error("lock", &path)(errno.into()).into()),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Path of the old manifest, saved before the first change. An operator who gives up on berth
    /// restores this file.
    pub fn old_manifest_path(&self, state: &State) -> PathBuf {
        let name = state
            .canonical
            .file_name()
            .unwrap_or_default()
            .to_string_lossy();
        self.path.with_file_name(format!(
            "{name}.before-upgrade.{}",
            format_backup_stamp(&state.started, &state.old)
        ))
    }

    /// Loads the upgrade that has begun. `None` if there is none.
    ///
    /// # Errors
    /// See [`StateError`].
    pub fn load(&self) -> Result<Option<State>, StateError> {
        load_file(&self.path)
    }

    /// Saves the state. On return the state is on disk.
    ///
    /// # Errors
    /// See [`StateError`]. The previous state is still there.
    pub fn save(&self, state: &State) -> Result<(), StateError> {
        let text = serde_json::to_string_pretty(state);
        let text =
            text.map_err(|error| FileError::wrap_io_error("write", &self.path)(error.into()))?;
        Ok(replace_file(&self.path, &(text + "\n"))?)
    }

    /// Removes the state: the upgrade has ended.
    ///
    /// # Errors
    /// See [`StateError`].
    pub fn remove(&self) -> Result<(), StateError> {
        remove_file(&self.path)
    }
}

/// Removes a file and syncs the directory. A missing file is no error.
///
/// # Errors
/// The file is still there.
pub fn remove_file(path: &Path) -> Result<(), StateError> {
    Ok(none_if_missing(fs::remove_file(path))
        .and_then(|_| sync_parent_directory(path))
        .map_err(FileError::wrap_io_error("remove", path))?)
}

/// Reads the state of an upgrade that has begun, without the lock.
///
/// # Errors
/// See [`StateError`].
pub fn find_state(directory: &Path) -> Result<Option<State>, StateError> {
    load_file(&directory.join(FILE_NAME))
}

/// Checks that a command may write a file. During an upgrade no command may write into the
/// kubelet's directory, because two kube-apiservers that know of each other run from there.
///
/// # Errors
/// An upgrade is under way, and the message says how to end it. Or the state cannot be read.
pub fn check_writable(directory: &Path, file: &Path) -> Result<(), String> {
    let Some(state) = find_state(directory).map_err(|error| error.to_string())? else {
        return Ok(());
    };
    if !state
        .canonical
        .parent()
        .is_some_and(|own| is_in_directory(file, own))
    {
        return Ok(());
    }
    let State {
        started, position, ..
    } = &state;
    Err(format!(
        "an upgrade that began at {started} is under way (step {}), so nothing was changed: `berth upgrade` \
         finishes that upgrade, and Ctrl-C during `berth upgrade` takes that upgrade back; run this command again afterwards",
        position.step
    ))
}

/// Describes an upgrade that was begun and not finished, in a sentence for the operator.
///
/// # Errors
/// The state cannot be read.
pub fn describe_interrupted(directory: &Path) -> Result<Option<String>, StateError> {
    match find_state(directory) {
        Ok(found) => Ok(found.map(
            |State {
                 started, position, ..
             }| {
                format!(
                    "an upgrade that began at {started} was interrupted in the step {}",
                    position.step
                )
            },
        )),
        Err(error @ StateError::Format { .. }) => Ok(Some(error.to_string())),
        Err(error) => Err(error),
    }
}

fn load_file(path: &Path) -> Result<Option<State>, StateError> {
    let Some(bytes) =
        none_if_missing(fs::read(path)).map_err(FileError::wrap_io_error("read", path))?
    else {
        return Ok(None);
    };
    parse_state(&bytes)
        .map(Some)
        .map_err(|why| StateError::Format {
            path: path.to_owned(),
            why,
        })
}

/// Parses the state file.
///
/// # Errors
/// The text is no state, or has another format.
pub fn parse_state(bytes: &[u8]) -> Result<State, String> {
    #[derive(Deserialize)]
    struct Format {
        version: u32,
    }
    // The format is parsed first, so that a newer format is reported by its number and not as a
    // missing field.
    let Format { version } = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    if version != State::FORMAT_VERSION {
        return Err(format!(
            "the file has format {version}, this is berth {} with format {}",
            berth_node::VERSION,
            State::FORMAT_VERSION
        ));
    }
    serde_json::from_slice(bytes).map_err(|error| error.to_string())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::judge::{INTERVAL, Plan, Signal, Undecided};
    use std::os::unix::fs::PermissionsExt;

    pub(in super::super) fn make_state() -> State {
        State {
            version: State::FORMAT_VERSION,
            berth: "0.1.0".into(),
            started: "2026-05-04T03:02:01Z".into(),
            position: Position::initial(),
            canonical: "/m/kube-apiserver.yaml".into(),
            temporary: "/m/berth-kube-apiserver.yaml".into(),
            uid: InstanceId::parse("a").unwrap(),
            address: "10.0.0.5:6443".parse().unwrap(),
            service: true,
            old: "old".into(),
            new: "new".into(),
            temporary_text: "temporary".into(),
            access: Some(Access {
                mode: 0o640,
                uid: 0,
                gid: 7,
            }),
            kubeconfig: Some("/root/admin.conf".into()),
            judge: None,
            emulated: None,
        }
    }

    #[test]
    fn the_state_is_private_and_survives_a_round_trip() {
        let temp = tempfile::tempdir().unwrap();
        let directory = temp.path().join("etc/berth");
        let store = Store::open(&directory).unwrap();
        assert_eq!(
            (
                store.load().unwrap(),
                describe_interrupted(&directory).unwrap()
            ),
            (None, None)
        );
        let judge = JudgeOptions {
            plan: Plan::default(),
            interval: INTERVAL,
            accepted: vec![Signal::WebhookErrors],
            undecided: Undecided::GoBack,
            requests: true,
            local: false,
        };
        let emulated = EmulatedManifest {
            release: "1.35".into(),
            text: "new\nflag".into(),
        };
        for state in [
            State {
                judge: Some(judge),
                emulated: Some(emulated),
                ..make_state()
            },
            make_state(),
        ] {
            store.save(&state).unwrap();
            assert_eq!(store.load().unwrap(), Some(state));
        }
        assert_eq!(
            fs::metadata(store.path()).unwrap().permissions().mode() & 0o777,
            0o600
        );
        let why = describe_interrupted(&directory).unwrap().unwrap();
        assert!(
            why.ends_with(
                "began at 2026-05-04T03:02:01Z was interrupted in the step start-temporary"
            ),
            "{why}"
        );
        store.remove().unwrap();
        store.remove().unwrap();
        assert_eq!(store.load().unwrap(), None);
    }

    #[test]
    fn a_second_run_is_refused() {
        let temp = tempfile::tempdir().unwrap();
        let first = Store::open(temp.path()).unwrap();
        assert!(matches!(Store::open(temp.path()), Err(StateError::Busy(_))));
        drop(first);
        Store::open(temp.path()).unwrap();
    }

    #[test]
    fn a_state_that_cannot_be_parsed_is_reported() {
        let temp = tempfile::tempdir().unwrap();
        let store = Store::open(temp.path()).unwrap();
        for (text, part) in [
            ("{\"version\": 9}", "format 9"),
            ("{", "EOF"),
            ("{\"version\": 1}", "missing field"),
        ] {
            fs::write(store.path(), text).unwrap();
            let error = store.load().unwrap_err().to_string();
            assert!(
                error.contains(part) && error.contains("upgrade.json is not understood"),
                "{error}"
            );
        }
    }
}
