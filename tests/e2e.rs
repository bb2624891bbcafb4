//! Runs `scripts/e2e.sh`, an upgrade of a real kube-apiserver behind this build of berth, where that is
//! possible: as root, on Linux, with the tools and with binaries that are there already. Where it is
//! not, the test counts as ignored and says why. Rust's own harness can decide that only at
//! compile time, so this one has its own.

use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

/// What the script needs beside the binaries.
const TOOLS: [&str; 3] = ["ip", "openssl", "jq"];

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let upgrade = Trial::ignorable_test("upgrade_of_a_real_kube_apiserver", || match obstacle() {
        Some(why) => Ok(Completion::ignored_with(why)),
        None => upgrade().map(|()| Completion::Completed),
    });
    libtest_mimic::run(&arguments, vec![upgrade]).exit_code()
}

fn upgrade() -> Result<(), Failed> {
    let status = Command::new(root().join("scripts/e2e.sh"))
        .env("BERTH", env!("CARGO_BIN_EXE_berth"))
        .stdin(Stdio::null())
        .status()
        .map_err(|error| format!("cannot run scripts/e2e.sh: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("scripts/e2e.sh: {status}; what failed is above").into()) }
}

/// Why it cannot be run here.
fn obstacle() -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("it needs root, for network namespaces".into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let missing: Vec<_> =
        TOOLS.into_iter().filter(|tool| !std::env::split_paths(&path).any(|dir| dir.join(tool).is_file())).collect();
    if !missing.is_empty() {
        return Some(format!("it needs {}", missing.join(", ")));
    }
    // Root in a container may have no right to make one.
    let probe = format!("berth-e2e-{}-probe", std::process::id());
    if let Err(why) = output(Command::new("ip").args(["netns", "add", &probe])) {
        return Some(format!("no network namespace can be made: {why}"));
    }
    let _ = output(Command::new("ip").args(["netns", "del", &probe]));
    output(Command::new(root().join("scripts/kube-apiserver.sh")).arg("--check")).err()
}

/// Runs a command; what it said, if it fails, in one line.
fn output(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; "))
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}
