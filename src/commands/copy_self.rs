//! `berth copy-self`: what an init container does before an apiserver that has no shell.

use super::{Exit, unavailable};
use anyhow::Context;
use berth_options::exec::CopySelfArgs;
use berth_os::file::replace;
use nix::unistd::geteuid;
use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::Path;

pub(super) fn run(args: &CopySelfArgs) -> anyhow::Result<Exit> {
    let made = args.run_dir.as_deref().map_or(Ok(()), |dir| {
        let owner = args.owner.unwrap_or_else(|| geteuid().as_raw());
        make(dir, owner)
            .with_context(|| format!("cannot make {} a directory of uid {owner} with mode 0700", dir.display()))
    });
    let done = made.and_then(|()| {
        copy(&args.path).with_context(|| format!("cannot copy this program to {}", args.path.display()))
    });
    match done {
        Ok(()) => Ok(Exit::Ok),
        Err(error) => Ok(unavailable(&format!("{error:#}"))),
    }
}

/// Copies the running program in one step: who runs the copy never finds half of it.
fn copy(to: &Path) -> io::Result<()> {
    let name = to.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy();
    let temporary = to.with_file_name(format!(".{name}.{}", std::process::id()));
    // In a container the process ID is always 1: there may be half of a copy that was killed, which gives way.
    replace(to, &temporary, |mut file| {
        // The open file and not its path, which may be another's by now.
        io::copy(&mut File::open("/proc/self/exe")?, &mut file)?;
        // Whatever the umask.
        file.set_permissions(Permissions::from_mode(0o755))
    })
}

/// Makes a directory, or of one that is there what the shims of this uid want.
///
/// By a descriptor, so that nobody can put something else under the name meanwhile. The mode comes first: of a
/// directory that is another's it cannot be changed without more capabilities than CHOWN.
fn make(dir: &Path, owner: u32) -> io::Result<()> {
    match DirBuilder::new().recursive(true).mode(0o700).create(dir) {
        // The name is a file's or a link's: what follows says so.
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let plain: std::path::PathBuf = dir.components().collect();
    let open =
        |flags| OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW | flags).open(&plain);
    // Of another uid's private directory, root without capabilities may not open more than the path.
    let meta = open(libc::O_PATH)?.metadata()?;
    if (meta.uid(), meta.mode() & 0o7777) == (owner, 0o700) {
        return Ok(());
    }
    let opened = open(0)?;
    let meta = opened.metadata()?;
    if meta.mode() & 0o7777 != 0o700 {
        opened.set_permissions(Permissions::from_mode(0o700))?;
    }
    if meta.uid() != owner {
        fchown(&opened, Some(owner), None)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_copy_is_the_program_and_replaces_what_was_there() {
        let temp = tempfile::tempdir().unwrap();
        let to = temp.path().join("berth");
        fs::write(&to, "old").unwrap();
        fs::write(temp.path().join(format!(".berth.{}", std::process::id())), "half").unwrap();
        copy(&to).unwrap();
        assert_eq!(fs::read(&to).unwrap(), fs::read("/proc/self/exe").unwrap());
        assert_eq!(fs::metadata(&to).unwrap().mode() & 0o7777, 0o755);
        assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 1);
        assert!(copy(&temp.path().join("none/berth")).is_err());
    }

    #[test]
    fn the_directory_gets_mode_and_owner_and_may_be_there() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("run/berth/");
        let own = geteuid().as_raw();
        make(&dir, own).unwrap();
        fs::set_permissions(&dir, Permissions::from_mode(0o755)).unwrap();
        // Only root can give it away.
        let owner = if own == 0 { 65534 } else { own };
        make(&dir, owner).unwrap();
        let meta = fs::metadata(&dir).unwrap();
        assert_eq!((meta.mode() & 0o7777, meta.uid()), (0o700, owner));
        make(&dir, owner).unwrap();
        std::os::unix::fs::symlink(&dir, temp.path().join("link")).unwrap();
        assert!(make(&temp.path().join("link/"), own).is_err());
    }
}
