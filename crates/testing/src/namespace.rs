//! Runs tests in separate namespaces, for root and for an ordinary user, and prints the names of
//! skipped tests.

use nix::sched::{CloneFlags, unshare};
use std::ffi::OsStr;
use std::io::{self, Write as _};
use std::process::{Command, Output};
use std::thread;

/// Name of the environment variable that is set inside an ordinary user's user namespace. Its value
/// is the test's name.
const INSIDE: &str = "BERTH_TEST_INSIDE";

/// Returns the name of the test on this thread, with its modules.
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

/// Prints that this thread's test is skipped, and why: `skipped: NAME: WHY`. A macro such as
/// `eprintln!` would not do, because the harness hides its output when a test passes.
pub fn print_skipped(why: &str) {
    let line = format!(
        "skipped: {}: {}\n",
        test_name(),
        why.trim().replace('\n', "; ")
    );
    // A single write, because other tests print at the same time.
    let _ = io::stderr().write_all(line.as_bytes());
}

/// Options of unshare(1) for a user namespace where this user is root.
const AS_ROOT: [&str; 2] = ["--user", "--map-root-user"];

/// Options of unshare(1) for a user namespace where this user keeps its uid and has all
/// capabilities. For programs that, as root, pass their groups on to a child, which the kernel
/// refuses in such a namespace.
pub const AS_ONESELF: [&str; 3] = ["--user", "--map-current-user", "--keep-caps"];

/// Runs a test on a thread in new namespaces of these kinds. The test returns a missing requirement
/// as an error, and is then skipped.
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

/// Runs this thread's test, which this user may not run, in a separate process in a user namespace
/// where the user is root. Skips the test if this process is already inside, or no user namespace
/// is available.
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

/// Runs this thread's test once more, in a separate process with the environment variable set.
///
/// # Panics
/// The test fails in the separate process.
pub fn rerun_with(variable: &str) {
    rerun_test(Command::new(std::env::current_exe().unwrap()).env(variable, "1"));
}

/// Runs this thread's test with `command`, which starts the test program.
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
    // The output of a harness that can ignore a running test.
    let ignored = out
        .lines()
        .find_map(|line| line.split_once(" ... ignored (")?.1.strip_suffix(')'));
    ignored.into_iter().for_each(print_skipped);
    for line in err.lines().filter(|line| line.starts_with("skipped: ")) {
        let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
    }
}
