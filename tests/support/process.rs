//! The real binary, with its output watched line by line.

use super::{eventually, skipped, too_busy};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Longest wait for a line or an end: a command may have many steps to go until then.
const LONG: Duration = Duration::from_secs(120);

/// A directory that is not there, in the place of those that commands use by default.
const NOWHERE: &str = "/nonexistent/berth";

/// `berth` with a clean environment.
pub(crate) fn berth<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    berth_at(Path::new(BERTH), args)
}

/// The `berth` that these tests are of.
pub(crate) const BERTH: &str = env!("CARGO_BIN_EXE_berth");

/// Another `berth`, the same way.
pub(crate) fn berth_at<S: AsRef<std::ffi::OsStr>>(
    program: &Path,
    args: impl IntoIterator<Item = S>,
) -> Command {
    let mut command = Command::new(program);
    clean(&mut command);
    command.args(args);
    if command
        .get_args()
        .next()
        .is_some_and(|command| command == "inject")
    {
        // It would be written into manifests.
        command.env_remove("BERTH_PASS");
    }
    command
}

/// A program for rehearsals that do not last longer than they must, unless options say otherwise: through berth alone, with
/// simulated apiservers that are ready at once.
pub(crate) fn rehearsal(program: &str) -> Command {
    let mut command = Command::new(program);
    command
        .env("BERTH_REHEARSE_COMPARE", "berth")
        .env("BERTH_REHEARSE_START_DELAY", "0s");
    if let Some(pass) = std::env::var_os("BERTH_TEST_PASS") {
        command.env("BERTH_REHEARSE_PASS", pass);
    }
    command
}

/// The exit statuses of a rehearsal for which the machine was too busy, and of one that proves nothing otherwise; and how often one
/// is made.
const TOO_BUSY: i32 = 71;
const PROVES_NOTHING: i32 = 75;
const TRIES: u32 = 5;

/// Rehearses; again if the run proves nothing. What is lost, or not as promised, is returned at once.
pub(crate) fn rehearsed(rehearse: &mut Command) -> io::Result<Output> {
    for again in (0..TRIES).rev() {
        let output = rehearse.output()?;
        if again == 0 || !matches!(output.status.code(), Some(TOO_BUSY | PROVES_NOTHING)) {
            return Ok(output);
        }
    }
    unreachable!("the last one was returned")
}

/// Whether the machine was too busy for every one of these rehearsals. The test is skipped then, as this says.
pub(crate) fn was_too_busy(rehearsed: &Output) -> bool {
    let is_so = rehearsed.status.code() == Some(TOO_BUSY);
    if is_so {
        too_busy(&format!("{TRIES} rehearsals"));
    }
    is_so
}

fn clean(command: &mut Command) {
    for (name, _) in
        std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"BERTH_"))
    {
        command.env_remove(name);
    }
    // Nothing of the machine on which tests run: no state of an upgrade, no pod, no shim of this user, no cluster.
    command
        .env("BERTH_STATE_DIR", NOWHERE)
        .env("BERTH_POD_LOGS_DIR", NOWHERE)
        .env("XDG_RUNTIME_DIR", NOWHERE);
    command.env("BERTH_TEST_WITHOUT_ADMIN", "1");
    if let Some(pass) = pass() {
        command.env("BERTH_PASS", pass);
    }
    command.stdin(Stdio::null());
}

/// A standard input that is this text.
pub(crate) fn input(text: &str) -> Stdio {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file.rewind().unwrap();
    file.into()
}

/// Exit status, output and log of a command that ends by itself.
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

/// The way in which clients come to instances in tests that do not name one: `--pass`, from `BERTH_TEST_PASS`. What clients get is the
/// same in each way.
pub(crate) fn pass() -> Option<String> {
    std::env::var("BERTH_TEST_PASS").ok()
}

/// Whether sockets are passed in tests that do not name a way.
pub(crate) fn passes_sockets() -> bool {
    pass().is_some_and(|pass| pass != "relay")
}

/// Whether `berth exec` can pass clients' sockets here. If not, the test is skipped, as this says.
pub(crate) fn can_inject() -> bool {
    let temp = tempfile::tempdir().unwrap();
    let mut exec = berth([
        "exec",
        "--listen",
        "10.0.0.5:6443",
        "--pass",
        "inject",
        "--run-dir",
    ]);
    let (status, _, log) = output_of(exec.arg(temp.path().join("run")).args(["--", "true"]));
    if status != Some(0) {
        skipped(&log);
    }
    status == Some(0)
}

/// Runs a command that must end with this exit status, and whose output and log must have each of these parts; output and log.
#[track_caller]
pub(crate) fn ends(command: &mut Command, status: i32, parts: &[&str]) -> (String, String) {
    let (code, out, log) = output_of(command);
    assert_eq!(code, Some(status), "{command:?}: {out}{log}");
    has_all(&format!("{out}{log}"), parts);
    (out, log)
}

/// Each of these parts is in the text.
#[track_caller]
pub(crate) fn has_all(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
}

/// A process that runs. Dropping it kills it.
pub(crate) struct Running {
    pub(crate) child: Child,
    out: Lines,
    log: Lines,
}

/// What a process wrote.
type Lines = Arc<Mutex<Written>>;

#[derive(Default)]
struct Written {
    lines: Vec<String>,
    /// Of a line that is not over.
    part: Vec<u8>,
    /// None: every writer has closed it.
    pipe: Option<File>,
}

impl Written {
    /// Reads what is there, without waiting.
    fn catch_up(&mut self) {
        let mut buffer = [0; 8192];
        while let Some(pipe) = self
            .pipe
            .as_mut()
            .filter(|pipe| readable(pipe.as_fd(), PollTimeout::ZERO))
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

fn readable(pipe: BorrowedFd<'_>, within: PollTimeout) -> bool {
    poll(&mut [PollFd::new(pipe, PollFlags::POLLIN)], within).is_ok_and(|ready| ready > 0)
}

/// Reads on all the time, so that no writer waits.
fn follow(pipe: impl Into<OwnedFd>) -> Lines {
    let pipe = File::from(pipe.into());
    let waited = pipe.try_clone().unwrap();
    let lines = Arc::new(Mutex::new(Written {
        pipe: Some(pipe),
        ..Written::default()
    }));
    let all = lines.clone();
    std::thread::spawn(move || {
        while all.lock().unwrap().pipe.is_some() {
            if readable(waited.as_fd(), PollTimeout::NONE) {
                all.lock().unwrap().catch_up();
            }
        }
    });
    lines
}

/// All that was written until now.
fn text(lines: &Lines) -> String {
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
            follow(child.stdout.take().unwrap()),
            follow(child.stderr.take().unwrap()),
        );
        Self { child, out, log }
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().try_into().unwrap())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    /// Kills it, and waits until it has ended.
    #[track_caller]
    pub(crate) fn kill(&mut self) {
        self.signal(Signal::SIGKILL);
        self.ended();
    }

    /// What it wrote to standard error so far.
    pub(crate) fn log(&self) -> String {
        text(&self.log)
    }

    /// What it wrote to standard output so far.
    pub(crate) fn out(&self) -> String {
        text(&self.out)
    }

    /// Waits for a line of the log.
    #[track_caller]
    pub(crate) fn logs(&self, part: &str) -> String {
        self.line(&self.log, part)
    }

    /// Waits for a line of output.
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
            // No process is left that could write it.
            assert!(
                !over && Instant::now() < deadline,
                "no {part:?} in:\n{}\n{}",
                self.log(),
                self.out()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for its end.
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

    /// Waits until it has ended with this exit status.
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

/// The command lines that have a word, of processes.
pub(crate) fn processes(word: &str) -> Vec<String> {
    let lines = std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .map(|entry| std::fs::read(entry.path().join("cmdline")));
    let lines =
        lines.map(|line| String::from_utf8_lossy(&line.unwrap_or_default()).replace('\0', " "));
    lines.filter(|line| line.contains(word)).collect()
}

/// Waits until there is no process of that ID, or only its remains.
#[track_caller]
pub(crate) fn gone(pid: u32) {
    eventually(&format!("the end of process {pid}"), || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok();
        let state = stat
            .as_deref()
            .and_then(|stat| stat.rsplit(')').next()?.trim_start().chars().next());
        matches!(state, None | Some('Z' | 'X')).then_some(())
    });
}
