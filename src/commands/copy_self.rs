//! `berth copy-self`: what an init container does before an apiserver that has no shell.

use super::{Exit, unavailable};
use anyhow::Context;
use berth_options::exec::CopySelfArgs;
use berth_os::file::{private_directory, replace};
use nix::unistd::geteuid;
use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

pub(super) fn run(args: &CopySelfArgs) -> anyhow::Result<Exit> {
    let made = args.run_dir.as_deref().map_or(Ok(()), |dir| {
        let owner = args.owner.unwrap_or_else(|| geteuid().as_raw());
        private_directory(dir, owner)
            .with_context(|| format!("cannot make {} a directory of uid {owner} with mode 0700", dir.display()))
    });
    let done = made.and_then(|()| {
        copy(&args.path).with_context(|| format!("cannot copy this program to {}", args.path.display()))
    });
    done.map(|()| Exit::Ok).map_err(|error| unavailable(format!("{error:#}")))
}

/// Copies the running program atomically: the copy is never incomplete.
fn copy(to: &Path) -> io::Result<()> {
    let name = to.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy();
    let temporary = to.with_file_name(format!(".{name}.{}", std::process::id()));
    // In a container the process ID is always 1, so a killed copy may have left this file incomplete: it is replaced.
    replace(to, &temporary, |mut file| {
        // The open file and not its path, which may be another file by now.
        io::copy(&mut File::open("/proc/self/exe")?, &mut file)?;
        // Whatever the umask.
        file.set_permissions(Permissions::from_mode(0o755))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::MetadataExt;

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
}
