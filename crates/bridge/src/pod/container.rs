//! The temporary instance's container: made of copies in memory, run in the foreground by the
//! node's runc or crun.

use super::spec::Changes;
use super::tree::{self, MountPoints};
use super::{
    AUDIT_DIRECTORY, AUDIT_MOUNT, FILES_DIRECTORY, MEMORY_DIRECTORY, RunningPod, numbered_copy_path,
};
use crate::cgroup;
use crate::localhost::{TEMPORARY_NAME, temporary_process_name};
use berth_os::file::{make_private_directory, none_if_missing};
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
const SPARE_MEMORY: u64 = 64 << 20;

const ROOT_DIRECTORY: &str = "root";
const BUNDLE_DIRECTORY: &str = "bundle";
const RUNTIME_DIRECTORY: &str = "runtime";
const STATE_DIRECTORY: &str = "state";

/// The extended attribute that holds a file's SELinux label.
const SELINUX_ATTRIBUTE: &str = "security.selinux";

/// Search path for programs that a runtime starts.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The temporary instance's container, with copies of its files in memory. Can be started again
/// after its end.
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
        let memory = directory.join(MEMORY_DIRECTORY);
        make_private_directory(&memory)?;
        mount_tmpfs(&memory, pod.bytes + SPARE_MEMORY, pod.selinux_label())?;
        let root = tree::open_root(pid)?;
        tree::copy_tree(&root, &memory.join(ROOT_DIRECTORY), MountPoints::Leave)?;
        let program = fs::read_link(format!("/proc/{pid}/exe"))?;
        match (
            link_under_temporary_name(&program, &memory.join(ROOT_DIRECTORY)),
            args.first_mut(),
        ) {
            (Ok(name), Some(first)) => *first = name,
            (Err(error), _) => {
                tracing::info!(%error, "the temporary process has the name of the running process");
            }
            (Ok(_), None) => {}
        }
        fs::copy(&pod.runtime, memory.join(RUNTIME_DIRECTORY))?;
        make_private_directory(&memory.join(FILES_DIRECTORY))?;
        for (at, kept) in pod.files.iter().enumerate() {
            let to = numbered_copy_path(directory, at);
            let copied = match &kept.mounted {
                Some(mounted) => tree::copy_tree(
                    &tree::open_within(&root, mounted)?,
                    &to,
                    MountPoints::Follow,
                ),
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
        let writes = args.iter().any(|argument| argument.contains(AUDIT_MOUNT));
        if writes {
            make_private_directory(&audit)?;
            chown(
                &audit,
                pod.spec.find_uid_or_gid("uid"),
                pod.spec.find_uid_or_gid("gid"),
            )?;
            allow_writes(&File::open(&audit)?, pod.selinux_label())?;
        }
        let audit = writes.then_some((audit.as_path(), Path::new(AUDIT_MOUNT)));
        let changes = Changes {
            args,
            root: &memory.join(ROOT_DIRECTORY),
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
        make_private_directory(&memory.join(BUNDLE_DIRECTORY))?;
        fs::write(
            memory.join(BUNDLE_DIRECTORY).join("config.json"),
            serde_json::to_vec(&pod.spec.apply(changes)?)?,
        )?;
        Ok(Self { memory, cgroup })
    }

    /// The command that runs the container. The command ends when the container ends, or when the
    /// signs of life stop.
    ///
    /// # Errors
    /// Remains of an ended container cannot be removed.
    pub fn command(&self, signs: Option<SignReader>) -> io::Result<Command> {
        let state = self.memory.join(STATE_DIRECTORY);
        none_if_missing(fs::remove_dir_all(&state))?;
        let mut command = Command::new(self.memory.join(RUNTIME_DIRECTORY));
        command
            .arg("--root")
            .arg(state)
            .args(["run", "--bundle"])
            .arg(self.memory.join(BUNDLE_DIRECTORY))
            .arg(TEMPORARY_NAME);
        command.env_clear().env("PATH", DEFAULT_PATH);
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
fn link_under_temporary_name(program: &Path, root: &Path) -> io::Result<String> {
    let (Some(directory), Some(own)) = (program.parent(), program.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let Some(name) = temporary_process_name(own) else {
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
pub fn allow_writes(to: &File, label: Option<&str>) -> io::Result<()> {
    let Some(label) = label else { return Ok(()) };
    let value = CString::new(label)?;
    fsetxattr(
        to,
        SELINUX_ATTRIBUTE,
        value.as_bytes_with_nul(),
        XattrFlags::empty(),
    )
    .map_err(|error| {
        io::Error::other(format!(
            "cannot give the SELinux label {label} to the files that the container writes: {error}"
        ))
    })
}

/// Removes the container's memory and cgroups.
pub fn remove_leftovers(directory: &Path) {
    let memory = directory.join(MEMORY_DIRECTORY);
    // A killed bridge leaves only the mount point.
    let _ = unmount(&memory);
    let _ = fs::remove_dir(&memory);
    cgroup::sweep_cgroups();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::localhost::{OWN_NAME, TEMPORARY_NAME};
    use std::os::unix::fs::symlink;

    #[test]
    fn a_program_is_renamed_only_in_the_copy() {
        let temp = tempfile::tempdir().unwrap();
        let [root, outside] = ["root", "outside"].map(|name| temp.path().join(name));
        for directory in [root.join("usr/bin"), outside.clone()] {
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join(OWN_NAME), "").unwrap();
        }
        fs::write(root.join("usr/bin/busybox"), "").unwrap();
        let name = |program: &str| {
            link_under_temporary_name(Path::new(program), &root).map_err(|error| error.to_string())
        };
        assert_eq!(
            name("/usr/bin/kube-apiserver").unwrap(),
            "/usr/bin/berth-temporary"
        );
        let inode = |name| fs::metadata(root.join("usr/bin").join(name)).unwrap().ino();
        assert_eq!(inode(OWN_NAME), inode(TEMPORARY_NAME));
        assert!(name("/usr/bin/busybox").is_err());
        assert!(name("/mounted/kube-apiserver").is_err());
        symlink(&outside, root.join("opt")).unwrap();
        assert!(
            name("/opt/kube-apiserver").is_err(),
            "a link leads out of it"
        );
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
    }
}
