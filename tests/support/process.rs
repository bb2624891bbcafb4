//! The real binary, with its output watched line by line.

use super::{PATIENCE, eventually};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// `berth` with a clean environment.
pub(crate) fn berth<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_berth"));
    clean(&mut command);
    command.args(args);
    command
}

fn clean(command: &mut Command) {
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"BERTH_")) {
        command.env_remove(name);
    }
    command.stdin(Stdio::null());
}

/// Exit status, output and log of a command that ends by itself.
#[track_caller]
pub(crate) fn said(command: &mut Command) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    (status.code(), String::from_utf8_lossy(&stdout).into_owned(), String::from_utf8_lossy(&stderr).into_owned())
}

/// A process that runs. Dropping it kills it.
pub(crate) struct Running {
    pub(crate) child: Child,
    out: Lines,
    log: Lines,
}

type Lines = Arc<Mutex<Vec<String>>>;

fn follow(pipe: impl Read + Send + 'static) -> Lines {
    let lines = Lines::default();
    let all = lines.clone();
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).lines().map_while(Result::ok) {
            all.lock().unwrap().push(line);
        }
    });
    lines
}

impl Running {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (out, log) = (follow(child.stdout.take().unwrap()), follow(child.stderr.take().unwrap()));
        Self { child, out, log }
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().try_into().unwrap())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    /// What it wrote to standard error so far.
    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().join("\n")
    }

    /// What it wrote to standard output so far.
    pub(crate) fn out(&self) -> String {
        self.out.lock().unwrap().join("\n")
    }

    /// Waits for a line of the log.
    #[track_caller]
    pub(crate) fn logs(&self, part: &str) -> String {
        self.line(&self.log, part)
    }

    /// Waits for a line of output.
    #[track_caller]
    pub(crate) fn says(&self, part: &str) -> String {
        self.line(&self.out, part)
    }

    #[track_caller]
    fn line(&self, lines: &Lines, part: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(line) = lines.lock().unwrap().iter().find(|line| line.contains(part)) {
                return line.clone();
            }
            assert!(Instant::now() < deadline, "no {part:?} in:\n{}\n{}", self.log(), self.out());
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    /// Waits for its end.
    #[track_caller]
    pub(crate) fn ended(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "it does not end:\n{}\n{}", self.log(), self.out());
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
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

/// Waits until there is no process of that ID, or only its remains.
#[track_caller]
pub(crate) fn gone(pid: u32) {
    eventually(&format!("the end of process {pid}"), || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok();
        let state = stat.as_deref().and_then(|stat| stat.rsplit(')').next()?.trim_start().chars().next());
        matches!(state, None | Some('Z' | 'X')).then_some(())
    });
}
