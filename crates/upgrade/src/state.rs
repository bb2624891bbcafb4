//! The position of an upgrade, on disk: `upgrade.json` in berth's directory, never in the kubelet's.
//!
//! It is replaced by a rename after a sync, so it is whole or the one before, and it holds both manifests
//! themselves: what it goes back to cannot get lost apart from it. A lock on a file next to it keeps two runs from each
//! other; it ends with the process, however that ends.

use super::judge::options::JudgeOptions;
use super::machine::{Course, Position, Version};
use berth_manifest::file::{Access, FileError, is_in, replace, stamp};
use berth_manifest::report::Refusal;
use berth_node::instance::InstanceId;
use berth_os::file::{lock_within, make_private, none_if_missing};
use nix::errno::Errno;
use nix::fcntl::Flock;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where it is kept by default, with originals of manifests.
pub const DIRECTORY: &str = "/etc/kubernetes/berth";

const NAME: &str = "upgrade.json";

/// How long a lock is waited for. A process that a killed run was starting holds that run's lock until its exec.
const LEFT: Duration = Duration::from_secs(1);

/// Why the state cannot be kept.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Another run has the lock.
    #[error("another `berth upgrade` runs (it holds {}): wait for it", .0.display())]
    Busy(PathBuf),
    #[error(transparent)]
    File(#[from] FileError),
    /// It is there and not understood.
    #[error(
        "{} is not understood: {why}: it belongs to an upgrade that was interrupted; finish it with the berth that began \
         it, or see that one kube-apiserver manifest is in the kubelet's directory and remove this file",
        path.display()
    )]
    Format { path: PathBuf, why: String },
}

impl From<StateError> for Refusal {
    fn from(error: StateError) -> Self {
        Self::unavailable(&error)
    }
}

/// An upgrade that has begun.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Format; 1.
    pub version: u32,
    /// The berth that began it.
    pub berth: String,
    /// When, RFC 3339. For people.
    pub started: String,
    pub position: Position,
    /// `kube-apiserver.yaml`.
    pub canonical: PathBuf,
    /// The other file, for the time of the upgrade.
    pub temporary: PathBuf,
    /// UID of the temporary pod, which is its instance's name.
    pub uid: InstanceId,
    /// The address that the node's instances advertise.
    pub address: SocketAddr,
    /// Whether the Service `kubernetes` named this node when it began.
    pub service: bool,
    /// The manifest that was there.
    pub old: String,
    /// The one that shall be there.
    pub new: String,
    /// The same under the temporary pod's name.
    pub temporary_text: String,
    /// Mode and owner of `kube-apiserver.yaml`, which is removed and made again on the way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access: Option<Access>,
    /// The `--kubeconfig` that it was begun with: the command that resumes it may not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kubeconfig: Option<PathBuf>,
    /// How the new one is judged; none: it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub judge: Option<JudgeOptions>,
    /// The new one as it is until it is judged, if it emulates the old one's release then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub emulated: Option<Emulated>,
}

/// The new manifest with `--emulated-version`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Emulated {
    /// Its release, such as 1.35.
    pub release: String,
    pub text: String,
}

impl State {
    /// The format that is written.
    pub const FORMAT: u32 = 1;

    /// Text of a version's canonical file.
    pub fn text(&self, version: Version) -> &str {
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
            same: self.same(),
            judged: self.judge.is_some(),
            emulated: self.emulated.is_some(),
        }
    }

    /// Old and new are one text: a rolling restart.
    pub fn same(&self) -> bool {
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
    /// Makes the directory if it is not there, and takes the lock.
    ///
    /// # Errors
    /// See [`StateError`].
    pub fn open(directory: &Path) -> Result<Self, StateError> {
        make_private(directory).map_err(FileError::of("make the directory", directory))?;
        let path = directory.join("upgrade.lock");
        let mut options = OpenOptions::new();
        let file = options
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW);
        let file = file.open(&path).map_err(FileError::of("open", &path))?;
        match lock_within(file, LEFT) {
            Ok(lock) => Ok(Self {
                path: directory.join(NAME),
                _lock: lock,
            }),
            Err(Errno::EWOULDBLOCK) => Err(StateError::Busy(path)),
            Err(errno) => Err(FileError::of("lock", &path)(errno.into()).into()),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the manifest that was there is kept, from before the first change on: what an operator restores who gives up
    /// on berth.
    pub fn before(&self, state: &State) -> PathBuf {
        let name = state
            .canonical
            .file_name()
            .unwrap_or_default()
            .to_string_lossy();
        self.path.with_file_name(format!(
            "{name}.before-upgrade.{}",
            stamp(&state.started, &state.old)
        ))
    }

    /// The upgrade that has begun, if one has.
    ///
    /// # Errors
    /// See [`StateError`].
    pub fn load(&self) -> Result<Option<State>, StateError> {
        load(&self.path)
    }

    /// Saves the position; when this returns it is on disk.
    ///
    /// # Errors
    /// See [`StateError`]; then the one before is there.
    pub fn save(&self, state: &State) -> Result<(), StateError> {
        let text = serde_json::to_string_pretty(state);
        let text = text.map_err(|error| FileError::of("write", &self.path)(error.into()))?;
        Ok(replace(&self.path, &(text + "\n"))?)
    }

    /// Removes the state: the upgrade has ended.
    ///
    /// # Errors
    /// See [`StateError`].
    pub fn remove(&self) -> Result<(), StateError> {
        remove(&self.path)
    }
}

/// Removes a file for good; one that is not there is as good.
///
/// # Errors
/// It is there still.
pub fn remove(path: &Path) -> Result<(), StateError> {
    let synced = |_| {
        path.parent()
            .map_or(Ok(()), |directory| File::open(directory)?.sync_all())
    };
    Ok(none_if_missing(fs::remove_file(path))
        .and_then(synced)
        .map_err(FileError::of("remove", path))?)
}

/// The upgrade that has begun, without the lock: to read only.
///
/// # Errors
/// See [`StateError`].
pub fn find(directory: &Path) -> Result<Option<State>, StateError> {
    load(&directory.join(NAME))
}

/// Whether a file may be written by another command: not into the kubelet's directory while an upgrade is under way there,
/// because two kube-apiservers run from it that know of each other.
///
/// # Errors
/// Why not, and what to do; or the state cannot be read.
pub fn leave_alone(directory: &Path, file: &Path) -> Result<(), String> {
    let Some(state) = find(directory).map_err(|error| error.to_string())? else {
        return Ok(());
    };
    if !state.canonical.parent().is_some_and(|own| is_in(file, own)) {
        return Ok(());
    }
    let State {
        started, position, ..
    } = &state;
    Err(format!(
        "an upgrade that began at {started} is under way (step {}), so nothing was changed: `berth upgrade` brings it to its \
         end, and Ctrl-C takes it back; give this command again afterwards",
        position.step
    ))
}

/// A sentence on an upgrade that was begun and not brought to an end, for the operator.
///
/// # Errors
/// Whether there is one cannot be read.
pub fn interrupted(directory: &Path) -> Result<Option<String>, StateError> {
    match find(directory) {
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

fn load(path: &Path) -> Result<Option<State>, StateError> {
    let Some(bytes) = none_if_missing(fs::read(path)).map_err(FileError::of("read", path))? else {
        return Ok(None);
    };
    parse(&bytes).map(Some).map_err(|why| StateError::Format {
        path: path.to_owned(),
        why,
    })
}

/// Reads the file.
///
/// # Errors
/// It is no state, or one of another format.
pub fn parse(bytes: &[u8]) -> Result<State, String> {
    #[derive(Deserialize)]
    struct Format {
        version: u32,
    }
    // First the format alone, so that a later one is named as such and not by a missing field.
    let Format { version } = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    if version != State::FORMAT {
        return Err(format!(
            "it has format {version}, this is berth {} with format {}",
            berth_node::VERSION,
            State::FORMAT
        ));
    }
    serde_json::from_slice(bytes).map_err(|error| error.to_string())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::judge::{INTERVAL, Plan, Signal, Undecided};
    use std::os::unix::fs::PermissionsExt;

    pub(in super::super) fn state() -> State {
        State {
            version: State::FORMAT,
            berth: "0.1.0".into(),
            started: "2026-05-04T03:02:01Z".into(),
            position: Position::begin(),
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
    fn is_kept_whole_and_for_root_alone() {
        let temp = tempfile::tempdir().unwrap();
        let directory = temp.path().join("etc/berth");
        let store = Store::open(&directory).unwrap();
        assert_eq!(
            (store.load().unwrap(), interrupted(&directory).unwrap()),
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
        let emulated = Emulated {
            release: "1.35".into(),
            text: "new\nflag".into(),
        };
        for state in [
            State {
                judge: Some(judge),
                emulated: Some(emulated),
                ..state()
            },
            state(),
        ] {
            store.save(&state).unwrap();
            assert_eq!(store.load().unwrap(), Some(state));
        }
        assert_eq!(
            fs::metadata(store.path()).unwrap().permissions().mode() & 0o777,
            0o600
        );
        let why = interrupted(&directory).unwrap().unwrap();
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
    fn two_do_not_run_at_once() {
        let temp = tempfile::tempdir().unwrap();
        let first = Store::open(temp.path()).unwrap();
        assert!(matches!(Store::open(temp.path()), Err(StateError::Busy(_))));
        drop(first);
        Store::open(temp.path()).unwrap();
    }

    #[test]
    fn what_is_not_understood_is_told() {
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
