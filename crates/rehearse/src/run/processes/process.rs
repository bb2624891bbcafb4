//! A process of a rehearsal: starts the process, reads the log, sends signals, and waits for the
//! end of the process.

use super::layout::{ProcessSpec, Role};
use crate::config::apiserver::this_binary;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::VecDeque;
use std::ffi::OsStr;
use std::io;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::Command;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::timeout;

/// Number of log lines that are kept for an error.
const LOG_LINES: usize = 12;

/// Time limit for the remaining output of an ended process.
const OUTPUT_TIMEOUT: Duration = Duration::from_millis(500);

/// Callback for each log line of a process.
pub(super) type Listener = Arc<dyn Fn(&str) + Send + Sync>;

/// A process, killed on drop.
#[derive(Debug)]
pub(super) struct ChildProcess {
    pub(super) owner: String,
    pub(super) role: Role,
    pid: Pid,
    ended: watch::Receiver<Option<ExitStatus>>,
    waiter: AbortHandle,
    log: Arc<Mutex<VecDeque<String>>>,
    /// Tasks that read the output. They end with the process.
    readers: Vec<JoinHandle<()>>,
}

impl ChildProcess {
    /// Starts a process. `over` is called after its end.
    pub(super) fn start(
        owner: &str,
        part: &ProcessSpec,
        variables: Vec<(&str, PathBuf)>,
        on_line: &Listener,
        over: impl FnOnce(ExitStatus) + Send + 'static,
    ) -> io::Result<Self> {
        let (program, arguments) = part.argv.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        let mut command = prepare_command(program);
        let mut child = command
            .envs(variables)
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let pid = child
            .id()
            .and_then(|pid| i32::try_from(pid).ok())
            .ok_or(io::ErrorKind::NotFound)?;
        let log = Arc::default();
        let mut readers = Vec::new();
        if let Some(out) = child.stdout.take() {
            readers.push(tokio::spawn(keep_log(
                out,
                Arc::clone(&log),
                Arc::clone(on_line),
            )));
        }
        if let Some(err) = child.stderr.take() {
            readers.push(tokio::spawn(keep_log(
                err,
                Arc::clone(&log),
                Arc::clone(on_line),
            )));
        }
        let (exit_sender, ended) = watch::channel(None);
        let waiter = tokio::spawn(async move {
            if let Ok(status) = child.wait().await {
                over(status);
                exit_sender.send_replace(Some(status));
            }
        });
        let waiter = waiter.abort_handle();
        Ok(Self {
            owner: owner.to_owned(),
            role: part.role,
            pid: Pid::from_raw(pid),
            ended,
            waiter,
            log,
            readers,
        })
    }

    pub(super) fn pid(&self) -> Pid {
        self.pid
    }

    /// Returns the process ID. `None` after the process's end.
    pub(super) fn live_pid(&self) -> Option<Pid> {
        self.status().is_none().then_some(self.pid)
    }

    /// Returns the exit status. `None` while the process runs.
    pub(super) fn status(&self) -> Option<ExitStatus> {
        *self.ended.borrow()
    }

    /// Waits for the end of the process. Several tasks may wait at once.
    pub(super) fn wait(&self) -> impl Future<Output = ()> + use<> {
        let mut ended = self.ended.clone();
        async move {
            // An error means that the runtime is shutting down, and the process with it.
            let _ = ended.wait_for(Option::is_some).await;
        }
    }

    pub(super) fn signal(&self, signal: Signal) {
        let _ = self.live_pid().map(|pid| kill(pid, signal));
    }

    /// Returns the last log lines. After the process's end, waits for the remaining output.
    pub(super) async fn log(&mut self) -> Vec<String> {
        if self.status().is_some() {
            let output = async {
                for reader in &mut self.readers {
                    let _ = reader.await;
                }
            };
            // A child of the process may still hold the pipe.
            let _ = timeout(OUTPUT_TIMEOUT, output).await;
            self.readers.retain(|reader| !reader.is_finished());
        }
        let log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        log.iter().map(|line| to_readable(line)).collect()
    }
}

/// Returns a command in a new process group. The program gets none of berth's environment variables
/// and ends with this process.
fn prepare_command(program: &OsStr) -> Command {
    let mut command = Command::new(program);
    if program == this_binary() {
        command.arg0("berth");
    }
    command
        .process_group(0)
        .kill_on_drop(true)
        .stdin(Stdio::null());
    berth_os::process::remove_berth_variables(command.as_std_mut());
    // SIGKILL, because a process that the script has stopped (SIGSTOP) handles no other signal.
    // When a parent dies, the kernel continues its stopped children, but misses a child that is
    // just about to stop.
    berth_os::process::die_with_parent(command.as_std_mut(), Signal::SIGKILL);
    command
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        self.signal(Signal::SIGKILL);
        self.waiter.abort();
    }
}

async fn keep_log(
    from: impl AsyncRead + Unpin,
    log: Arc<Mutex<VecDeque<String>>>,
    on_line: Listener,
) {
    let mut lines = BufReader::new(from).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        on_line(&line);
        let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
        if log.len() == LOG_LINES {
            // Informational lines are dropped before other lines, because kube-apiserver writes
            // many of them.
            let first = log
                .iter()
                .position(|line| is_informational(line))
                .unwrap_or(0);
            log.remove(first);
        }
        log.push_back(line);
    }
}

/// True for a line of klog or of a JSON log that is no error.
fn is_informational(line: &str) -> bool {
    let klog = |line: &str| line.len() > 5 && line.as_bytes()[1..5].iter().all(u8::is_ascii_digit);
    (line.starts_with(['I', 'W']) && klog(line))
        || [
            "\"level\":\"INFO\"",
            "\"level\":\"info\"",
            "\"level\":\"warn\"",
        ]
        .iter()
        .any(|level| line.contains(level))
}

/// Returns a JSON log line in readable form. Other lines are unchanged.
fn to_readable(line: &str) -> String {
    let Ok(serde_json::Value::Object(mut fields)) = serde_json::from_str(line) else {
        return line.to_owned();
    };
    // etcd's log has the field `msg`.
    let text = if fields.contains_key("msg") {
        "msg"
    } else {
        "message"
    };
    let mut take = |name: &str| {
        let value = fields.remove(name).unwrap_or_default();
        value
            .as_str()
            .map_or_else(|| value.to_string(), str::to_owned)
    };
    let (level, message) = (take("level"), take(text));
    fields.retain(|name, _| {
        !matches!(
            name.as_str(),
            "timestamp" | "target" | "ts" | "caller" | "stacktrace"
        )
    });
    let rest: String = fields
        .iter()
        .map(|(name, value)| format!(" {name}={value}"))
        .collect();
    format!("{level} {message}{rest}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn errors_stay_in_the_log_and_so_does_the_last_line() {
        let lines: String = (0..40)
            .map(|n| format!("{}1121 {n}\n", if n == 3 { 'E' } else { 'I' }))
            .collect();
        let log = Arc::default();
        keep_log(lines.as_bytes(), Arc::clone(&log), Arc::new(|_| {})).await;
        let log = log.lock().unwrap();
        assert!(
            log.len() == LOG_LINES && log[0] == "E1121 3" && log[LOG_LINES - 1] == "I1121 39",
            "{log:?}"
        );
    }
}
