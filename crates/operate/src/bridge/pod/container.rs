//! The temporary instance's container: made of copies in memory, run in the foreground by the node's runtime.

use super::spec::Changes;
use super::tree::{self, Mounted};
use super::{AUDIT, AUDIT_DIRECTORY, FILES, MEMORY, RunningPod, copy};
use crate::bridge::cgroup;
use berth_os::file::{found, make_private};
use berth_os::namespaces::{in_own_processes, tmpfs, unmount};
use berth_os::process::ProcessAttributes;
use rustix::fs::{XattrFlags, fsetxattr};
use std::ffi::{CString, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

/// For what the container writes into its root file system, and for the runtime's copy, in bytes.
const SPARE: u64 = 64 << 20;

const ROOT: &str = "root";
const BUNDLE: &str = "bundle";
const RUNTIME: &str = "runtime";
const STATE: &str = "state";

/// Its ID, to the runtime that has no other.
const ID: &str = "temporary";

/// The extended attribute with a file's label.
const SELINUX: &str = "security.selinux";

/// Where programs that a runtime starts are found.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A container that can be started.
#[derive(Debug)]
pub struct Container {
    memory: PathBuf,
    cgroup: String,
}

impl Container {
    /// Copies what it needs of the running one, which is `like` and has this process. To be called in a mount namespace of this process's own.
    ///
    /// # Errors
    /// Something cannot be read any more, or memory is missing.
    pub fn new(
        pod: &RunningPod,
        argv: &[OsString],
        (like, pid): (&ProcessAttributes, i32),
        cgroup: String,
        directory: &Path,
    ) -> io::Result<Self> {
        let args = argv.iter().map(|argument| argument.to_str().map(str::to_owned));
        let args: Option<Vec<_>> = args.collect();
        let args = args.ok_or_else(|| io::Error::other("an argument is no UTF-8, as which all are handed on"))?;
        let memory = directory.join(MEMORY);
        make_private(&memory)?;
        tmpfs(&memory, pod.bytes + SPARE, pod.label())?;
        let root = tree::root_of(pid)?;
        tree::copy(&root, &memory.join(ROOT), Mounted::Leave)?;
        fs::copy(&pod.runtime, memory.join(RUNTIME))?;
        make_private(&memory.join(FILES))?;
        for (at, kept) in pod.files.iter().enumerate() {
            let to = copy(directory, at);
            let copied = match &kept.mounted {
                Some(mounted) => tree::copy(&tree::within(&root, mounted)?, &to, Mounted::Follow),
                None => fs::copy(&kept.path, &to).and_then(|_| {
                    let like = fs::metadata(&kept.path)?;
                    chown(&to, Some(like.uid()), Some(like.gid()))
                }),
            };
            copied.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", kept.path.display())))?;
        }
        let audit = directory.join(AUDIT_DIRECTORY);
        let writes = args.iter().any(|argument| argument.contains(AUDIT));
        if writes {
            make_private(&audit)?;
            chown(&audit, Some(pod.spec.user().uid), Some(pod.spec.user().gid))?;
            let_write(&File::open(&audit)?, pod.label())?;
        }
        let changes = Changes {
            args,
            root: &memory.join(ROOT),
            cgroup: &format!("/{cgroup}"),
            oom_score_adj: like.oom_score_adj,
            limits: like.limits.iter().map(|(kind, soft, hard)| (format!("{kind:?}"), *soft, *hard)).collect(),
            instead: &pod.instead(directory),
            besides: writes.then_some((&audit, Path::new(AUDIT))),
        };
        make_private(&memory.join(BUNDLE))?;
        fs::write(memory.join(BUNDLE).join("config.json"), serde_json::to_vec(&pod.spec.clone().changed(changes))?)?;
        Ok(Self { memory, cgroup })
    }

    /// What runs it, and ends as it does.
    ///
    /// # Errors
    /// What is left of one that ended cannot be removed.
    pub fn command(&self) -> io::Result<Command> {
        let state = self.memory.join(STATE);
        found(fs::remove_dir_all(&state))?;
        let mut command = Command::new(self.memory.join(RUNTIME));
        command.arg("--root").arg(state).args(["run", "--bundle"]).arg(self.memory.join(BUNDLE)).arg(ID);
        command.env_clear().env("PATH", PATH);
        in_own_processes(&mut command, &cgroup::all(&self.cgroup))?;
        Ok(command)
    }
}

/// Lets a container write into what is not in its file systems, where SELinux keeps it from that: as its own files are labelled.
///
/// # Errors
/// It cannot have the label.
pub fn let_write(to: &File, label: Option<&str>) -> io::Result<()> {
    let Some(label) = label else { return Ok(()) };
    let value = CString::new(label)?;
    fsetxattr(to, SELINUX, value.as_bytes_with_nul(), XattrFlags::empty()).map_err(|error| {
        io::Error::other(format!("SELinux's label {label} cannot be given to what the container writes: {error}"))
    })
}

/// Removes what is not to stay.
pub fn clean(directory: &Path) {
    let memory = directory.join(MEMORY);
    // Of a bridge that was killed only the place is left, where it was.
    let _ = unmount(&memory);
    let _ = fs::remove_dir(&memory);
    cgroup::sweep();
}
