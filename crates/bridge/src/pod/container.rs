//! The temporary instance's container: made of copies in memory, run in the foreground by the
//! node's runc or crun.

use super::spec::Changes;
use super::tree::{self, Mounted};
use super::{AUDIT, AUDIT_DIRECTORY, FILES, MEMORY, RunningPod, copy_path};
use crate::cgroup;
use crate::localhost::{TEMPORARY, temporary_name};
use berth_os::file::{make_private, none_if_missing};
use berth_os::namespaces::{Enclosure, SignReader, mount_tmpfs, run_in_namespaces, unmount};
use berth_os::process::ProcessAttributes;
use rustix::fs::{AtFlags, Mode, OFlags, XattrFlags, fsetxattr, linkat};
use std::ffi::{CString, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Space for files that the container writes to its root file system, and for the runtime's copy,
/// in bytes.
const SPARE: u64 = 64 << 20;

const ROOT: &str = "root";
const BUNDLE: &str = "bundle";
const RUNTIME: &str = "runtime";
const STATE: &str = "state";

/// The extended attribute with a file's label.
const SELINUX: &str = "security.selinux";

/// Search path for programs that a runtime starts.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A container that can be started.
#[derive(Debug)]
pub struct Container {
    memory: PathBuf,
    cgroup: String,
}

impl Container {
    /// Copies the files of the running container, which has the attributes `like` and the process
    /// `pid`. `pinned` is a file of the node that the new container must not replace, and its path
    /// in the container. Must be called in a mount namespace of this process.
    ///
    /// # Errors
    /// A file can no longer be read, or memory is missing.
    pub fn new(
        pod: &RunningPod,
        argv: &[OsString],
        (like, pid): (&ProcessAttributes, i32),
        pinned: Option<(&Path, &Path)>,
        cgroup: String,
        directory: &Path,
    ) -> io::Result<Self> {
        let args = argv
            .iter()
            .map(|argument| argument.to_str().map(str::to_owned));
        let args: Option<Vec<_>> = args.collect();
        let mut args = args.ok_or_else(|| io::Error::other("an argument is not valid UTF-8"))?;
        let memory = directory.join(MEMORY);
        make_private(&memory)?;
        mount_tmpfs(&memory, pod.bytes + SPARE, pod.label())?;
        let root = tree::root_of(pid)?;
        tree::copy_tree(&root, &memory.join(ROOT), Mounted::Leave)?;
        let program = fs::read_link(format!("/proc/{pid}/exe"))?;
        match (link_renamed(&program, &memory.join(ROOT)), args.first_mut()) {
            (Ok(name), Some(first)) => *first = name,
            (Err(error), _) => {
                tracing::info!(%error, "the temporary process has the running one's name");
            }
            (Ok(_), None) => {}
        }
        fs::copy(&pod.runtime, memory.join(RUNTIME))?;
        make_private(&memory.join(FILES))?;
        for (at, kept) in pod.files.iter().enumerate() {
            let to = copy_path(directory, at);
            let copied = match &kept.mounted {
                Some(mounted) => {
                    tree::copy_tree(&tree::open_within(&root, mounted)?, &to, Mounted::Follow)
                }
                None => fs::copy(&kept.path, &to).and_then(|_| {
                    let like = fs::metadata(&kept.path)?;
                    chown(&to, Some(like.uid()), Some(like.gid()))
                }),
            };
            copied.map_err(|error| {
                io::Error::new(error.kind(), format!("{}: {error}", kept.path.display()))
            })?;
        }
        let audit = directory.join(AUDIT_DIRECTORY);
        let writes = args.iter().any(|argument| argument.contains(AUDIT));
        if writes {
            make_private(&audit)?;
            chown(&audit, pod.spec.user("uid"), pod.spec.user("gid"))?;
            let_write(&File::open(&audit)?, pod.label())?;
        }
        let audit = writes.then_some((audit.as_path(), Path::new(AUDIT)));
        let changes = Changes {
            args,
            root: &memory.join(ROOT),
            cgroup: &format!("/{cgroup}"),
            oom_score_adj: like.oom_score_adj,
            limits: like
                .limits
                .iter()
                .map(|(kind, soft, hard)| (format!("{kind:?}"), *soft, *hard))
                .collect(),
            replacements: &pod.replacements(directory),
            extra_mounts: &audit.into_iter().chain(pinned).collect::<Vec<_>>(),
        };
        make_private(&memory.join(BUNDLE))?;
        fs::write(
            memory.join(BUNDLE).join("config.json"),
            serde_json::to_vec(&pod.spec.apply(changes)?)?,
        )?;
        Ok(Self { memory, cgroup })
    }

    /// The command that runs the container, and ends with the container, or without signs of life.
    ///
    /// # Errors
    /// Remains of an ended container cannot be removed.
    pub fn command(&self, signs: Option<SignReader>) -> io::Result<Command> {
        let state = self.memory.join(STATE);
        none_if_missing(fs::remove_dir_all(&state))?;
        let mut command = Command::new(self.memory.join(RUNTIME));
        command
            .arg("--root")
            .arg(state)
            .args(["run", "--bundle"])
            .arg(self.memory.join(BUNDLE))
            .arg(TEMPORARY);
        command.env_clear().env("PATH", PATH);
        let enclosure = Enclosure {
            cgroups: cgroup::list_cgroups(&self.cgroup),
            signs,
            ..Enclosure::default()
        };
        run_in_namespaces(&mut command, enclosure)?;
        Ok(command)
    }
}

/// Links a program below `root` to the temporary instance's name, and returns the new path in the
/// container.
///
/// # Errors
/// The program is neither kube-apiserver nor etcd, and may depend on its name; or its directory is
/// mounted, and not in this file system.
fn link_renamed(program: &Path, root: &Path) -> io::Result<String> {
    let (Some(directory), Some(own)) = (program.parent(), program.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let Some(name) = temporary_name(own) else {
        return Err(io::Error::other(format!(
            "its program is {}",
            program.display()
        )));
    };
    let root = rustix::fs::open(
        root,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let within = tree::open_within(&root, directory)?;
    linkat(&within, own, &within, name, AtFlags::empty())?;
    let renamed = program.with_file_name(name);
    renamed
        .into_os_string()
        .into_string()
        .map_err(|_| io::Error::other("its path is no UTF-8"))
}

/// Allows a container to write to a file outside its file systems, by giving the file the SELinux
/// label of the container's files.
///
/// # Errors
/// The file cannot have the label.
pub fn let_write(to: &File, label: Option<&str>) -> io::Result<()> {
    let Some(label) = label else { return Ok(()) };
    let value = CString::new(label)?;
    fsetxattr(to, SELINUX, value.as_bytes_with_nul(), XattrFlags::empty()).map_err(|error| {
        io::Error::other(format!(
            "cannot give the SELinux label {label} to the files that the container writes: {error}"
        ))
    })
}

/// Removes the container's memory and cgroups.
pub fn remove_leftovers(directory: &Path) {
    let memory = directory.join(MEMORY);
    // A killed bridge leaves only the mount point.
    let _ = unmount(&memory);
    let _ = fs::remove_dir(&memory);
    cgroup::sweep_cgroups();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::localhost::{OWN, TEMPORARY};
    use std::os::unix::fs::symlink;

    #[test]
    fn a_program_is_renamed_only_in_the_copy() {
        let temp = tempfile::tempdir().unwrap();
        let [root, outside] = ["root", "outside"].map(|name| temp.path().join(name));
        for directory in [root.join("usr/bin"), outside.clone()] {
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join(OWN), "").unwrap();
        }
        let name = |program: &str| {
            link_renamed(Path::new(program), &root).map_err(|error| error.to_string())
        };
        assert_eq!(
            name("/usr/bin/kube-apiserver").unwrap(),
            "/usr/bin/berth-temporary"
        );
        let inode = |name| fs::metadata(root.join("usr/bin").join(name)).unwrap().ino();
        assert_eq!(inode(OWN), inode(TEMPORARY));
        assert!(
            name("/usr/bin/busybox")
                .unwrap_err()
                .contains("its program is /usr/bin/busybox")
        );
        assert!(name("/mounted/kube-apiserver").is_err());
        symlink(&outside, root.join("opt")).unwrap();
        assert!(
            name("/opt/kube-apiserver").is_err(),
            "a link leads out of it"
        );
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
    }
}
