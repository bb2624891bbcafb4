//! Prints a bridge's progress on the terminal of the command that waits for the bridge.

use super::machine::LATE;
use berth_node::ipc::bridge::{
    BridgeOutcome, BridgeStatus, Connection, EtcdStatus, EtcdStep, Reply, Step,
};
use berth_os::signals::Signals;
use berth_os::strip_error_numbers;
use berth_upgrade::progress::Progress;
use humantime::format_duration;
use nix::sys::signal::Signal;
use std::convert::Infallible;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest wait for a bridge's first answer.
pub const TIMEOUT: Duration = Duration::from_secs(10);

/// Signals that end the wait.
const SIGNALS: [Signal; 3] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];

/// The message for a bridge that does not answer. A hung bridge no longer renews the steering, so
/// new connections go to the port's own listener.
pub fn describe_hang(client: &Connection) -> String {
    let pid = client.peer_pid().map_or_else(
        || "the process of bridge.sock".to_owned(),
        |pid| pid.to_string(),
    );
    format!(
        "the bridge does not answer within {}: it hangs; `kill -9 {pid}` ends it",
        format_duration(TIMEOUT)
    )
}

/// Formats an address of a bridge's status. Empty for `None`, which a bridge that serves never
/// reports.
pub fn display_address(address: Option<SocketAddr>) -> String {
    address
        .map(|address| address.to_string())
        .unwrap_or_default()
}

/// Describes how long requests waited when the node's etcd and the temporary etcd last took over
/// from each other.
pub fn describe_wait(etcd: &EtcdStatus) -> String {
    etcd.pauses.last().map_or_else(
        || "no request waited".to_owned(),
        |pause| format!("requests that need etcd waited {pause} ms"),
    )
}

/// The message about connections that a bridge still relays after its end.
pub fn describe_end(status: &BridgeStatus) -> String {
    format!(
        "the bridge has ended, and relays {} open connections to the node's kube-apiserver for 5 minutes at most: \
         `berth bridge end --now`, or the next bridge, cuts them",
        status.connections_open
    )
}

/// Reference in each error with which a bridge ends.
pub const NEXT_STEP: &str = "docs/something-went-wrong.md has the next step";

/// True if clients stay on the bridge until the operator acts.
pub(super) fn clients_stay_on_bridge(status: &BridgeStatus) -> bool {
    status.step == Step::Hold && !status.command && status.trouble.is_some()
}

/// Result of waiting until a bridge's status meets a condition.
pub(super) enum WaitOutcome {
    There(Box<BridgeStatus>),
    Over(BridgeOutcome),
    Refused(String),
    /// The bridge has ended without an outcome.
    Gone,
    Interrupted,
}

/// Prints a bridge's progress.
pub(super) struct Watcher {
    progress: Progress,
    json: bool,
    directory: PathBuf,
    /// The last status. Only changes since then are printed.
    last: Option<BridgeStatus>,
    /// The bridge's outcome, if it ended while COMMAND ran.
    over: Option<BridgeOutcome>,
    signals: Signals,
}

impl Watcher {
    pub(super) fn new(directory: &Path, json: bool) -> io::Result<Self> {
        Ok(Self {
            progress: Progress::default(),
            json,
            directory: directory.to_owned(),
            last: None,
            over: None,
            signals: Signals::new(&SIGNALS)?,
        })
    }

    /// Discards signals that were meant for COMMAND.
    pub(super) fn discard_signals(&mut self) -> io::Result<()> {
        self.signals = Signals::new(&SIGNALS)?;
        Ok(())
    }

    /// Prints the bridge's progress while COMMAND runs, and never returns. The future may be
    /// dropped at any time.
    pub(super) async fn report_progress_forever(&mut self, client: &Connection) -> Infallible {
        while let (None, Some(reply)) = (&self.over, client.receive_message().await) {
            if let Reply::Status(status) = reply {
                self.report_status(&status);
                self.over = status.outcome;
            }
        }
        std::future::pending().await
    }

    pub(super) async fn wait_until(
        &mut self,
        client: &Connection,
        there: impl Fn(&BridgeStatus) -> bool,
    ) -> WaitOutcome {
        if let Some(outcome) = self.over.take() {
            return WaitOutcome::Over(outcome);
        }
        let mut answered = false;
        loop {
            let reply = tokio::select! {
                reply = client.receive_message() => reply,
                () = tokio::time::sleep(TIMEOUT), if !answered => {
                    Self::print_refusal(&describe_hang(client));
                    return WaitOutcome::Gone;
                }
                _ = self.signals.next() => return WaitOutcome::Interrupted,
            };
            answered = true;
            let status = match reply {
                Some(Reply::Status(status)) => status,
                Some(Reply::Refused(why)) => return WaitOutcome::Refused(why),
                // The differences are not printed here, because the notes in the status name the
                // replaced files.
                Some(Reply::Differences(_)) => continue,
                None => return WaitOutcome::Gone,
            };
            self.report_status(&status);
            if let Some(outcome) = status.outcome {
                return WaitOutcome::Over(outcome);
            }
            if there(&status) {
                return WaitOutcome::There(status);
            }
        }
    }

    pub(super) fn print_line(&self, what: &str) {
        if !self.json {
            self.progress.print_line(what);
        }
    }

    pub(super) fn print_detail(&self, what: &str) {
        if !self.json {
            self.progress.print_detail(what);
        }
    }

    fn report_status(&mut self, status: &BridgeStatus) {
        if self.json
            && let Ok(line) = serde_json::to_string(status)
        {
            let _ = writeln!(io::stderr(), "{line}");
        }
        let last = self.last.replace(status.clone());
        let is_first = last.is_none();
        let was = last.unwrap_or_default();
        let own = &status.own;
        if own.preferred && (!was.own.preferred || was.own.listener != own.listener) {
            self.print_line(
                "new connections go to the node's kube-apiserver, or to the temporary kube-apiserver while the node's is not ready",
            );
        }
        if let Some(why) = &status.steering_error
            && was.steering_error != status.steering_error
        {
            self.print_line(&format!(
                "new connections go to the node's kube-apiserver, as the bridge cannot steer: {why}"
            ));
            self.print_detail("the bridge tries again; do not stop the node's kube-apiserver meanwhile: connections would be lost");
        }
        if own.late && !was.own.late {
            let late = format_duration(LATE);
            self.print_line(&format!(
                "the node's kube-apiserver has not been ready for {late}: {}",
                own.probe
            ));
            self.print_detail("health checks at the node's addresses, kubeadm's and the kubelet's too, reach the temporary kube-apiserver");
            self.print_last_lines("its container", &own.log);
        }
        self.report_etcd(
            &was.etcd.unwrap_or_default(),
            &status.etcd.clone().unwrap_or_default(),
        );
        status
            .notes
            .iter()
            .filter(|note| !was.notes.contains(note))
            .for_each(|note| self.print_line(note));
        if status.outcome.is_some() && status.connections_open > 0 {
            self.print_detail(&describe_end(status));
        }
        if status.outcome == Some(BridgeOutcome::Done) {
            self.print_line("done: the node's kube-apiserver serves, and nothing of the bridge is left but its logs");
        }
        if status.outcome.is_none() && (is_first || was.step != status.step) {
            self.print_step(status);
        }
    }

    /// Prints the step that has begun.
    fn print_step(&self, status: &BridgeStatus) {
        self.print_line(&match status.step {
            Step::Start => format!(
                "a temporary kube-apiserver starts on {}",
                display_address(status.temporary.address)
            ),
            Step::Settle => "the temporary kube-apiserver is ready, and is watched for a while (--settle)".to_owned(),
            Step::Overlap => {
                "new connections go to the temporary kube-apiserver; earlier handshakes may complete".to_owned()
            }
            // The caller, which waited for COMMAND or for the end, prints the reason.
            Step::Hold if status.trouble.is_some() => return,
            Step::Hold => "the node's kube-apiserver may be replaced now".to_owned(),
            Step::AwaitOwn => format!(
                "waiting until the node's kube-apiserver is ready at {} for a while (--settle)",
                display_address(status.own.address)
            ),
            Step::Restore => {
                "the files of the node's kube-apiserver are being restored".to_owned()
            }
            Step::Linger => {
                "new connections go to the node's kube-apiserver again; earlier handshakes may complete"
                    .to_owned()
            }
            Step::Drain => "the temporary kube-apiserver ends when its connections have ended".to_owned(),
        });
    }

    fn report_etcd(&self, was: &EtcdStatus, etcd: &EtcdStatus) {
        if was.step != etcd.step {
            self.print_line(&match etcd.step {
                EtcdStep::Own => format!("the node's etcd serves; {}", describe_wait(etcd)),
                EtcdStep::Stopping => {
                    "the node's etcd stops; requests that need etcd wait for the temporary etcd"
                        .to_owned()
                }
                EtcdStep::Temporary => format!(
                    "a temporary etcd serves from the same data; {}",
                    describe_wait(etcd)
                ),
                EtcdStep::Returning => {
                    "the node's etcd waits for the data; the temporary etcd ends".to_owned()
                }
                EtcdStep::GivenBack => "the temporary etcd has ended".to_owned(),
            });
        }
        if let Some(trouble) = &etcd.trouble
            && was.trouble != etcd.trouble
        {
            self.print_line(&format!("etcd: {trouble}"));
        }
    }

    /// Prints why a bridge refuses a request, or that the bridge does not answer. The text is the
    /// same with --json.
    pub(super) fn print_refusal(why: &str) {
        let _ = writeln!(
            io::stderr(),
            "berth: {}",
            strip_error_numbers(why.to_owned())
        );
    }

    /// Prints the result of waiting for the end.
    pub(super) fn print_end(&self, seen: WaitOutcome) {
        match seen {
            WaitOutcome::Over(BridgeOutcome::Done) => {}
            WaitOutcome::Over(BridgeOutcome::Restored(why)) => {
                self.print_line(&format!(
                    "the node's kube-apiserver serves as it did before: {why}"
                ));
                self.print_logs();
            }
            WaitOutcome::Over(BridgeOutcome::NotBegun(why) | BridgeOutcome::Abandoned(why)) => {
                self.print_line(&format!(
                    "the bridge has ended, and the node's kube-apiserver may not serve: {why}"
                ));
                self.print_logs();
            }
            WaitOutcome::There(status) => self.print_trouble(&status),
            WaitOutcome::Interrupted => {
                self.print_line("interrupted: the bridge goes on by itself");
                self.print_detail(
                    "`berth bridge status` shows the bridge's state, `berth bridge end` ends the bridge",
                );
            }
            WaitOutcome::Refused(why) => Self::print_refusal(&why),
            WaitOutcome::Gone => self.print_bridge_is_gone(),
        }
    }

    fn print_trouble(&self, status: &BridgeStatus) {
        let trouble = status.trouble.as_deref().unwrap_or_default();
        self.print_line(&format!("{trouble}: clients stay on the bridge"));
        self.print_detail(&format!("the node's kube-apiserver: {}", status.own.probe));
        self.print_last_lines("its container", &status.own.log);
        self.print_detail("fix the node's kube-apiserver, then run `berth bridge end`; `berth bridge end --now` gives clients to the node's kube-apiserver, ready or not");
        self.print_detail("`berth bridge restore --dry-run` shows the changes in a static pod's files, `berth bridge restore` undoes them");
        self.print_logs();
    }

    pub(super) fn print_last_lines(&self, of: &str, lines: &[String]) {
        if !lines.is_empty() {
            self.print_detail(&format!("last lines of {of}:"));
            lines
                .iter()
                .for_each(|line| self.print_detail(&format!("  {line}")));
        }
    }

    pub(super) fn print_bridge_is_gone(&self) {
        self.print_line(
            "the bridge has ended unexpectedly; new connections go to the port's own listener",
        );
        self.print_logs();
    }

    pub(super) fn print_logs(&self) {
        self.print_detail(&format!(
            "logs are in {}; {NEXT_STEP}",
            self.directory.display()
        ));
    }
}
