//! Runs `berth copy-self` in an init container. The program copies itself, because the apiserver's
//! image has no shell that could do it.

use super::{Exit, unavailable_error};
use anyhow::Context;
use berth_options::exec::CopySelfArgs;
use berth_os::file::{ensure_private_directory, replace_file};
use nix::unistd::geteuid;
use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

pub(super) fn run(args: &CopySelfArgs) -> anyhow::Result<Exit> {
    let made = args.run_dir.as_deref().map_or(Ok(()), |dir| {
        let owner = args.owner.unwrap_or_else(|| geteuid().as_raw());
        ensure_private_directory(dir, owner).with_context(|| {
            format!(
                "cannot make {} a directory of uid {owner} with mode 0700",
                dir.display()
            )
        })
    });
    let done = made.and_then(|()| {
        copy_program(&args.path)
            .with_context(|| format!("cannot copy this program to {}", args.path.display()))
    });
    done.map(|()| Exit::Ok)
        .map_err(|error| unavailable_error(format!("{error:#}")))
}

/// Copies the running program to a path. Nobody can see an incomplete copy, because the copy
/// replaces the path atomically.
fn copy_program(to: &Path) -> io::Result<()> {
    let name = to
        .file_name()
        .ok_or(io::ErrorKind::InvalidInput)?
        .to_string_lossy();
    let temporary = to.with_file_name(format!(".{name}.{}", std::process::id()));
    // In a container the process ID is always 1. So a copy that was killed may have left an
    // incomplete file of this name, which is replaced.
    replace_file(to, &temporary, |mut file| {
        // Read the running program's open file: its path may lead to another file by now.
        io::copy(&mut File::open("/proc/self/exe")?, &mut file)?;
        // Set the mode, because the umask has changed the mode of the new file.
        file.set_permissions(Permissions::from_mode(0o755))
    })
}
