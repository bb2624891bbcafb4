//! Runs tests in namespaces of their own, whether the user is root or not, and prints the names of
//! skipped tests.

use nix::sched::{CloneFlags, unshare};
use std::ffi::OsStr;
use std::io::{self, Write as _};
use std::process::{Command, Output};
use std::thread;

/// Name of an environment variable that tells a test that it already runs inside a user namespace.
/// Its value is the test's name.
const INSIDE: &str = "BERTH_TEST_INSIDE";

/// Returns the name of the test that runs on this thread, including its modules.
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

/// Prints the line `skipped: NAME: WHY` for this thread's test. It does not use `eprintln!`, of
/// which the harness hides the output if a test passes.
pub fn print_skipped(why: &str) {
    let line = format!(
        "skipped: {}: {}\n",
        test_name(),
        why.trim().replace('\n', "; ")
    );
    // Write the line in one call, because other tests print at the same time.
    let _ = io::stderr().write_all(line.as_bytes());
}

/// Options of unshare(1) that make a user namespace in which this user is root.
const AS_ROOT: [&str; 2] = ["--user", "--map-root-user"];

/// Options of unshare(1) that make a user namespace in which this user keeps its uid and has all
/// capabilities. They are for programs that as root would set a child's groups, which the kernel
/// refuses in such a namespace.
pub const AS_ONESELF: [&str; 3] = ["--user", "--map-current-user", "--keep-caps"];

/// Runs a test on a thread in new namespaces of these kinds. If the test returns an error, which
/// names a missing requirement, it is skipped.
///
/// An ordinary user may create namespaces only within a user namespace, which a process with
/// threads cannot enter. The test then runs in a separate process, as root of a user namespace.
///
/// # Panics
/// The test panics.
pub fn run(kinds: CloneFlags, test: impl FnOnce() -> Result<(), String> + Send + 'static) {
    run_in(&AS_ROOT, kinds, test);
}

/// Like [`run`], in a user namespace that unshare(1) creates with the given options.
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
            print_skipped(&why);
        }
        None
    });
    let error = inside
        .unwrap()
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    match error {
        None => {}
        Some(error) => rerun_in(
            user_namespace,
            &format!("cannot create a namespace: {error}"),
        ),
    }
}

/// Runs this thread's test in a separate process, as root of a user namespace, because this user
/// may not run it. Skips the test if this process is already inside, or no user namespace is
/// available.
///
/// # Panics
/// The test fails in the separate process.
pub fn rerun_in_user_namespace(why: &str) {
    rerun_in(&AS_ROOT, why);
}

fn rerun_in(user_namespace: &[&str], why: &str) {
    if std::env::var_os(INSIDE).is_some() {
        return print_skipped(why);
    }
    let name = test_name();
    let within = |program: &OsStr| {
        let mut command = Command::new("unshare");
        command.args(user_namespace).arg("--").arg(program);
        command
    };
    match within("true".as_ref()).output() {
        Err(error) => {
            return print_skipped(&format!(
                "{why}; cannot create a user namespace: unshare: {error}"
            ));
        }
        Ok(output) if !output.status.success() => {
            let error = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return print_skipped(&format!("{why}; cannot create a user namespace: {error}"));
        }
        Ok(_) => {}
    }
    rerun_test(within(std::env::current_exe().unwrap().as_os_str()).env(INSIDE, &name));
}

/// Runs this thread's test once more, in a separate process that has the environment variable
/// `variable`.
///
/// # Panics
/// The test fails in the separate process.
pub fn rerun_with(variable: &str) {
    rerun_test(Command::new(std::env::current_exe().unwrap()).env(variable, "1"));
}

/// Runs this thread's test again: adds the test's name to `command`, which starts the test program.
fn rerun_test(command: &mut Command) {
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
    // The harness can mark a running test as ignored, with a reason, in its output. Report such a
    // test as skipped.
    let ignored = out
        .lines()
        .find_map(|line| line.split_once(" ... ignored (")?.1.strip_suffix(')'));
    ignored.into_iter().for_each(print_skipped);
    for line in err.lines().filter(|line| line.starts_with("skipped: ")) {
        let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
    }
}
