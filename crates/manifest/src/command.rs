//! Finds and runs programs of the node, and reads the command lines of processes.

use berth_exec::args;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;
use tokio::process::Command;

/// Runs a program, and kills the program at the timeout.
///
/// # Errors
/// The program does not exist, cannot be run, or does not end in time.
pub async fn read_output(
    program: &str,
    arguments: &[&str],
    within: Duration,
) -> Result<Output, String> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    match tokio::time::timeout(within, output).await {
        Err(_) => Err(format!(
            "{program} does not answer in {}",
            humantime::format_duration(within)
        )),
        Ok(Err(error)) if error.kind() == io::ErrorKind::NotFound => {
            Err(format!("the program {program} does not exist"))
        }
        Ok(output) => output.map_err(|error| format!("{program}: {error}")),
    }
}

/// Time over which a stopping kube-apiserver ends its watches. The watches' clients must not all
/// come to the other instances at once. Without the flag, kube-apiserver ends no watches itself. At
/// least 200 watches end per second, so a small number takes less time.
pub const WATCH_GRACE_FLAG: &str = "--shutdown-watch-termination-grace-period";
pub const WATCH_GRACE: Duration = Duration::from_secs(25);

pub const AUDIT_LOG: &str = "--audit-log-path";

/// The file that a kube-apiserver writes its audit log to.
pub fn audit_log(argv: &[OsString]) -> Option<PathBuf> {
    args::flag_value(argv, AUDIT_LOG)
        .map(PathBuf::from)
        .filter(|path| names_regular_file(path))
}

/// True if a path names a regular file. False for an empty path, standard output (`-`), and devices
/// such as /dev/stdout that are different in each process.
pub(crate) fn names_regular_file(path: &Path) -> bool {
    let device =
        (path.starts_with("/dev") && !path.starts_with("/dev/shm")) || path.starts_with("/proc");
    !device && path != "-" && path != ""
}

/// Splits a list of NUL-terminated strings, as in /proc.
pub fn split_strings(list: &[u8]) -> Vec<OsString> {
    let list = list.strip_suffix(&[0]).unwrap_or(list);
    list.split(|byte| *byte == 0)
        .map(|text| OsString::from_vec(text.to_vec()))
        .collect()
}

/// Finds an executable program, as a shell does.
pub fn find_executable(name: &OsStr) -> Option<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return Some(PathBuf::from(name)).filter(is_program);
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    std::env::split_paths(&path)
        .map(|directory| directory.join(name))
        .find(is_program)
}

/// True for an executable file, or a link to one.
pub fn is_program(path: &PathBuf) -> bool {
    fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_as_a_shell_finds_it() {
        assert!(
            find_executable("sh".as_ref()).is_some()
                && find_executable("/bin/sh".as_ref()).is_some()
        );
        for none in ["", "/", "/nonexistent", "/etc/passwd", "no-such-program"] {
            assert_eq!(find_executable(none.as_ref()), None, "{none}");
        }
    }
}
