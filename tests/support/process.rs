//! The real binary, with its output read line by line.

use super::{eventually, print_skipped, too_busy};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fmt::Debug;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::str::FromStr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Longest wait for a line or for an end of a process. A command may have many steps before.
const LONG: Duration = Duration::from_secs(120);

/// A missing directory, in place of the default directories of commands.
const NOWHERE: &str = "/nonexistent/berth";

/// Returns a command that runs `berth` with a clean environment.
pub(crate) fn berth_command<S: AsRef<std::ffi::OsStr>>(
    args: impl IntoIterator<Item = S>,
) -> Command {
    berth_at(Path::new(BERTH), args)
}

/// The `berth` under test.
pub(crate) const BERTH: &str = env!("CARGO_BIN_EXE_berth");

/// Returns a command that runs the given `berth` with a clean environment.
pub(crate) fn berth_at<S: AsRef<std::ffi::OsStr>>(
    program: &Path,
    args: impl IntoIterator<Item = S>,
) -> Command {
    let mut command = Command::new(program);
    clean_environment(&mut command);
    command.args(args);
    if command
        .get_args()
        .next()
        .is_some_and(|command| command == "inject")
    {
        // `berth inject` would write the variable's value into manifests.
        command.env_remove("BERTH_PASS");
    }
    command
}

/// Returns a command for short rehearsals: through berth alone, with simulated apiservers that are
/// ready at once, unless options say otherwise.
pub(crate) fn rehearsal_command(program: &str) -> Command {
    let mut command = Command::new(program);
    command
        .env("BERTH_REHEARSE_COMPARE", "berth")
        .env("BERTH_REHEARSE_START_DELAY", "0s");
    if let Some(pass) = std::env::var_os("BERTH_TEST_PASS") {
        command.env("BERTH_REHEARSE_PASS", pass);
    }
    command
}

/// Exit statuses of a rehearsal if the machine was too busy, or if the run proves nothing for
/// another reason. The last constant is the number of attempts.
const TOO_BUSY: i32 = 71;
const PROVES_NOTHING: i32 = 75;
const TRIES: u32 = 5;

/// Runs a rehearsal, and runs it again if the result proves nothing. A loss or another failure is
/// returned at once.
pub(crate) fn run_rehearsal(rehearse: &mut Command) -> io::Result<Output> {
    for again in (0..TRIES).rev() {
        let output = rehearse.output()?;
        if again == 0 || !matches!(output.status.code(), Some(TOO_BUSY | PROVES_NOTHING)) {
            return Ok(output);
        }
    }
    unreachable!("the last one was returned")
}

/// True if the machine was too busy for every attempt. In this case, prints that the test is
/// skipped.
pub(crate) fn was_too_busy(rehearsed: &Output) -> bool {
    let is_so = rehearsed.status.code() == Some(TOO_BUSY);
    if is_so {
        too_busy(&format!("{TRIES} rehearsals"));
    }
    is_so
}

fn clean_environment(command: &mut Command) {
    for (name, _) in
        std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"BERTH_"))
    {
        command.env_remove(name);
    }
    // With these variables, tests do not see the machine's own upgrades, pods, shims or cluster.
    command
        .env("BERTH_STATE_DIR", NOWHERE)
        .env("BERTH_POD_LOGS_DIR", NOWHERE)
        .env("XDG_RUNTIME_DIR", NOWHERE);
    command.env("BERTH_TEST_WITHOUT_ADMIN", "1");
    if let Some(pass) = pass_option() {
        command.env("BERTH_PASS", pass);
    }
    command.stdin(Stdio::null());
}

/// Returns a standard input with the given text.
pub(crate) fn stdin_with(text: &str) -> Stdio {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file.rewind().unwrap();
    file.into()
}

/// Returns a command that runs `command` through a starter.
pub(crate) fn wrap_command(starter: &[&str], command: &Command) -> Command {
    let mut by = Command::new(starter[0]);
    by.args(&starter[1..])
        .arg(command.get_program())
        .args(command.get_args())
        .stdin(Stdio::null());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => by.env(name, value),
            None => by.env_remove(name),
        };
    }
    by
}

/// Returns the value of a field `NAME=` in a line of log.
pub(crate) fn read_field<T: FromStr<Err: Debug>>(line: &str, name: &str) -> T {
    let (_, rest) = line.split_once(name).unwrap();
    rest.split(' ').next().unwrap().parse().unwrap()
}

/// Returns exit status, output and log of a command that ends by itself.
#[track_caller]
pub(crate) fn output_of(command: &mut Command) -> (Option<i32>, String, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().unwrap();
    (
        status.code(),
        String::from_utf8_lossy(&stdout).into_owned(),
        String::from_utf8_lossy(&stderr).into_owned(),
    )
}

/// Value of `--pass` in tests that do not set the option, from `BERTH_TEST_PASS`. Clients get the
/// same service with each value.
pub(crate) fn pass_option() -> Option<String> {
    std::env::var("BERTH_TEST_PASS").ok()
}

/// True if shims pass sockets in tests that do not set `--pass`.
pub(crate) fn passes_sockets() -> bool {
    pass_option().is_some_and(|pass| pass != "relay")
}

/// True if `berth exec` can pass clients' sockets on this machine. If not, prints that the test is
/// skipped.
pub(crate) fn can_inject() -> bool {
    let temp = tempfile::tempdir().unwrap();
    let mut exec = berth_command([
        "exec",
        "--listen",
        "10.0.0.5:6443",
        "--pass",
        "inject",
        "--run-dir",
    ]);
    let (status, _, log) = output_of(exec.arg(temp.path().join("run")).args(["--", "true"]));
    if status != Some(0) {
        print_skipped(&log);
    }
    status == Some(0)
}

/// Runs a command, and checks its exit status and that its output and log contain each of the
/// parts. Returns output and log.
#[track_caller]
pub(crate) fn expect_status(
    command: &mut Command,
    status: i32,
    parts: &[&str],
) -> (String, String) {
    let (code, out, log) = output_of(command);
    assert_eq!(code, Some(status), "{command:?}: {out}{log}");
    has_all(&format!("{out}{log}"), parts);
    (out, log)
}

/// Checks that the text contains each of the parts.
#[track_caller]
pub(crate) fn has_all(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
}

/// A running process, killed when dropped.
pub(crate) struct Running {
    pub(crate) child: Child,
    out: Lines,
    log: Lines,
}

/// Lines that a process wrote.
type Lines = Arc<Mutex<Written>>;

#[derive(Default)]
struct Written {
    lines: Vec<String>,
    /// Bytes of an unfinished line.
    part: Vec<u8>,
    /// `None` if every writer has closed the pipe.
    pipe: Option<File>,
}

impl Written {
    /// Reads the available bytes without waiting.
    fn catch_up(&mut self) {
        let mut buffer = [0; 8192];
        while let Some(pipe) = self
            .pipe
            .as_mut()
            .filter(|pipe| is_readable(pipe.as_fd(), PollTimeout::ZERO))
        {
            match pipe.read(&mut buffer) {
                Ok(0) | Err(_) => self.pipe = None,
                Ok(length) => self.part.extend_from_slice(&buffer[..length]),
            }
            while let Some(end) = self.part.iter().position(|byte| *byte == b'\n') {
                let rest = self.part.split_off(end + 1);
                self.part.truncate(end);
                self.end_line();
                self.part = rest;
            }
            if self.pipe.is_none() && !self.part.is_empty() {
                self.end_line();
            }
        }
    }

    fn end_line(&mut self) {
        self.lines
            .push(String::from_utf8_lossy(&self.part).into_owned());
        self.part.clear();
    }
}

fn is_readable(pipe: BorrowedFd<'_>, within: PollTimeout) -> bool {
    poll(&mut [PollFd::new(pipe, PollFlags::POLLIN)], within).is_ok_and(|ready| ready > 0)
}

/// Keeps reading on a thread, so that no writer blocks.
fn follow_lines(pipe: impl Into<OwnedFd>) -> Lines {
    let pipe = File::from(pipe.into());
    let waited = pipe.try_clone().unwrap();
    let lines = Arc::new(Mutex::new(Written {
        pipe: Some(pipe),
        ..Written::default()
    }));
    let all = lines.clone();
    std::thread::spawn(move || {
        while all.lock().unwrap().pipe.is_some() {
            if is_readable(waited.as_fd(), PollTimeout::NONE) {
                all.lock().unwrap().catch_up();
            }
        }
    });
    lines
}

/// Returns all lines written until now.
fn join_lines(lines: &Lines) -> String {
    let mut written = lines.lock().unwrap();
    written.catch_up();
    written.lines.join("\n")
}
impl Running {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (out, log) = (
            follow_lines(child.stdout.take().unwrap()),
            follow_lines(child.stderr.take().unwrap()),
        );
        Self { child, out, log }
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().try_into().unwrap())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    /// Kills the process, and waits until it has ended.
    #[track_caller]
    pub(crate) fn kill(&mut self) {
        self.signal(Signal::SIGKILL);
        self.ended();
    }

    /// Returns the standard error so far.
    pub(crate) fn log(&self) -> String {
        join_lines(&self.log)
    }

    /// Returns the standard output so far.
    pub(crate) fn out(&self) -> String {
        join_lines(&self.out)
    }

    /// Waits for a line of standard error that contains `part`.
    #[track_caller]
    pub(crate) fn logs(&self, part: &str) -> String {
        self.line(&self.log, part)
    }

    /// Waits for a warning that contains `part`.
    #[track_caller]
    pub(crate) fn warns(&self, part: &str) {
        let line = self.logs(part);
        assert!(line.contains("WARN"), "{line}");
    }

    /// Waits for a line of standard output that contains `part`.
    #[track_caller]
    pub(crate) fn prints(&self, part: &str) -> String {
        self.line(&self.out, part)
    }

    #[track_caller]
    fn line(&self, lines: &Lines, part: &str) -> String {
        let deadline = Instant::now() + LONG;
        loop {
            let over = {
                let mut written = lines.lock().unwrap();
                written.catch_up();
                if let Some(line) = written.lines.iter().find(|line| line.contains(part)) {
                    return line.clone();
                }
                written.pipe.is_none()
            };
            // No process is left that could still write the line.
            assert!(
                !over && Instant::now() < deadline,
                "no {part:?} in:\n{}\n{}",
                self.log(),
                self.out()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until the process has ended.
    #[track_caller]
    pub(crate) fn ended(&mut self) -> ExitStatus {
        let deadline = Instant::now() + LONG;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(
                Instant::now() < deadline,
                "it does not end:\n{}\n{}",
                self.log(),
                self.out()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until the process has ended with the given exit status.
    #[track_caller]
    pub(crate) fn ends(&mut self, status: i32) {
        let code = self.ended().code();
        assert_eq!(code, Some(status), "{}", self.log());
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the command lines of processes that contain a word.
pub(crate) fn find_processes(word: &str) -> Vec<String> {
    let lines = std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .map(|entry| std::fs::read(entry.path().join("cmdline")));
    let lines =
        lines.map(|line| String::from_utf8_lossy(&line.unwrap_or_default()).replace('\0', " "));
    lines.filter(|line| line.contains(word)).collect()
}

/// Waits until the process is gone or a zombie.
#[track_caller]
pub(crate) fn wait_until_gone(pid: u32) {
    eventually(&format!("the end of process {pid}"), || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok();
        let state = stat
            .as_deref()
            .and_then(|stat| stat.rsplit(')').next()?.trim_start().chars().next());
        matches!(state, None | Some('Z' | 'X')).then_some(())
    });
}
