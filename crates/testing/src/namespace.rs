//! Tests in namespaces of their own, for root and for an ordinary user, and the names of tests that are skipped.

use nix::sched::{CloneFlags, unshare};
use std::ffi::OsStr;
use std::io::{self, Write as _};
use std::process::{Command, Output};
use std::thread;

/// The environment variable that a test finds set where an ordinary user's user namespace is around it: the test's name.
const INSIDE: &str = "BERTH_TEST_INSIDE";

/// The name of the test that runs on this thread, with its modules.
#[must_use]
pub fn test_name() -> String {
    let thread = thread::current();
    let name = thread
        .name()
        .filter(|name| *name != "main")
        .map(str::to_owned);
    name.or_else(|| std::env::var(INSIDE).ok())
        .unwrap_or_else(|| "a test".to_owned())
}

/// Prints that the test of this thread is skipped, and why: `skipped: NAME: WHY`. Not by a macro such as `eprintln!`, for the harness
/// keeps such words to itself when a test passes.
pub fn skipped(why: &str) {
    let line = format!(
        "skipped: {}: {}\n",
        test_name(),
        why.trim().replace('\n', "; ")
    );
    // One write: other tests print at the same time.
    let _ = io::stderr().write_all(line.as_bytes());
}

/// How unshare(1) makes a user namespace whose root this user is.
const AS_ROOT: [&str; 2] = ["--user", "--map-root-user"];

/// The same, in which this user is the same and has all capabilities: for what gives its own groups to a child where it is root, which
/// the kernel refuses there.
pub const AS_ONESELF: [&str; 3] = ["--user", "--map-current-user", "--keep-caps"];

/// Runs a test on a thread in new namespaces of these kinds; the test returns what is missing there. Where something is missing, the
/// test is skipped.
///
/// An ordinary user may make namespaces only within a user namespace, and a process with threads cannot enter one: the test runs in a
/// process of its own there, as root of that namespace.
///
/// # Panics
/// The test panics.
pub fn run(kinds: CloneFlags, test: impl FnOnce() -> Result<(), String> + Send + 'static) {
    run_in(&AS_ROOT, kinds, test);
}

/// As [`run`], in a user namespace that unshare(1) makes with these options.
///
/// # Panics
/// The test panics.
pub fn run_in(
    user_namespace: &[&str],
    kinds: CloneFlags,
    test: impl FnOnce() -> Result<(), String> + Send + 'static,
) {
    let inside = thread::Builder::new().name(test_name()).spawn(move || {
        if let Err(error) = unshare(kinds) {
            return Some(error);
        }
        if let Err(why) = test() {
            skipped(&why);
        }
        None
    });
    let error = inside
        .unwrap()
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    match error {
        None => {}
        Some(error) => refused_in(user_namespace, &format!("no namespace can be had: {error}")),
    }
}

/// Runs the test of this thread, which this user may not run, in a process of its own in a user namespace, whose root this user is. The
/// test is skipped where this is that process, or none can be had.
///
/// # Panics
/// The test fails there.
pub fn refused(why: &str) {
    refused_in(&AS_ROOT, why);
}

fn refused_in(user_namespace: &[&str], why: &str) {
    if std::env::var_os(INSIDE).is_some() {
        return skipped(why);
    }
    let name = test_name();
    let within = |program: &OsStr| {
        let mut command = Command::new("unshare");
        command.args(user_namespace).arg("--").arg(program);
        command
    };
    match within("true".as_ref()).output() {
        Err(error) => {
            return skipped(&format!(
                "{why}; no user namespace can be had: unshare: {error}"
            ));
        }
        Ok(output) if !output.status.success() => {
            let error = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return skipped(&format!("{why}; no user namespace can be had: {error}"));
        }
        Ok(_) => {}
    }
    again(within(std::env::current_exe().unwrap().as_os_str()).env(INSIDE, &name));
}

/// Runs the test of this thread once more, in a process of its own that has this in its environment.
///
/// # Panics
/// The test fails there.
pub fn again_with(variable: &str) {
    again(Command::new(std::env::current_exe().unwrap()).env(variable, "1"));
}

/// Runs the test of this thread by this start of its program.
fn again(command: &mut Command) {
    let Output {
        status,
        stdout,
        stderr,
    } = command
        .args([&test_name(), "--exact", "--nocapture"])
        .output()
        .unwrap();
    let (out, err) = (
        String::from_utf8_lossy(&stdout),
        String::from_utf8_lossy(&stderr),
    );
    let ran = ["1 passed", "1 ignored"]
        .iter()
        .any(|count| out.contains(count));
    assert!(
        status.success() && ran,
        "in another process, {status}:\n{out}\n{err}"
    );
    // As a harness has it that can ignore a test that has begun.
    let ignored = out
        .lines()
        .find_map(|line| line.split_once(" ... ignored (")?.1.strip_suffix(')'));
    ignored.into_iter().for_each(skipped);
    for line in err.lines().filter(|line| line.starts_with("skipped: ")) {
        let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
    }
}
