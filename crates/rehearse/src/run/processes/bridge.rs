//! Runs `berth bridge`, and follows the status that the bridge reports on its socket. COMMAND waits
//! until the script has replaced the instance, like `systemctl restart`, which waits until systemd
//! has done so.

use super::instance_spec::InstanceSpec;
use super::layout::Limits;
use super::settings::BRIDGE_DIRECTORY;
use super::{Error, POLL_INTERVAL, Processes};
use crate::record::{
    data::MarkKind,
    event::{Event, EventKind},
    log::{Recorder, last_mark},
    stamp::Stamp,
};
use crate::testbed::certs::Names;
pub(crate) use berth_node::ipc::bridge::BridgeStatus as Status;
use berth_node::ipc::bridge::{Ask, Connection, Reply, SOCKET_NAME, Step};
use berth_os::process::HeldProcess;
use berth_os::seqpacket;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// COMMAND reads its exit status from a FIFO and ends. An open(2) of a FIFO for reading waits until
/// there is a writer, and the rehearsal may have been killed and never write. So the shell itself
/// also opens the FIFO for writing, and closes that descriptor once its open(2) for reading has
/// returned. If there is no other writer then, the read returns at once.
const COMMAND: &str = "exec 3<>\"$0\" <\"$0\" 3>&- && read -r status && exit \"$status\"";

/// Log files of the bridge and of the temporary instance, and the number of their lines that a
/// failure shows.
const LOGS: [&str; 2] = ["bridge.log", "kube-apiserver.log"];
const LAST_LINES: usize = 6;

/// Time limit for a bridge to exit when its work has ended, or after SIGKILL.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// A running or ended bridge.
#[derive(Debug)]
pub(super) struct Bridge {
    /// Name of the temporary instance.
    name: String,
    /// Name of the node's kube-apiserver, which listens on the secure port, without a shim.
    own: watch::Sender<String>,
    status: watch::Receiver<Status>,
    /// FIFO from which COMMAND reads its exit status.
    command: File,
    /// Task that follows the bridge's status. The task ends with the last status.
    follower: JoinSet<()>,
    /// The bridge's process, known after its first answer. The process runs on for a moment after
    /// its last status.
    daemon: Arc<OnceLock<HeldProcess>>,
}

impl Processes {
    /// Starts a bridge over a running instance. Waits until the instance may be replaced.
    pub(crate) async fn start_bridge(
        &mut self,
        running: &InstanceSpec,
        limits: Limits,
        within: Duration,
    ) -> Result<(), Error> {
        let temporary = running.temporary_instance_spec();
        let fifo = self.settings.dir.join("command");
        let _ = std::fs::remove_file(&fifo);
        let opened = mkfifo(&fifo, Mode::S_IRUSR | Mode::S_IWUSR).map_err(io::Error::from);
        // Opening the FIFO for both directions never waits for the other end.
        let opened = opened.and_then(|()| OpenOptions::new().read(true).write(true).open(&fifo));
        let command = opened.map_err(Error::unavailable_error(format!(
            "cannot make the FIFO {}",
            fifo.display()
        )))?;
        // The bridge needs the kubeconfig to keep the Service `kubernetes`.
        self.settings
            .certs
            .write_kubeconfig(self.settings.address)?;
        let run: [OsString; 4] = ["sh".into(), "-c".into(), COMMAND.into(), fifo.into()];
        let own = self.own_address(&running.name)?;
        let part = self
            .layout
            .bridge_spec(&self.settings, running, own, limits, run.into());
        self.log_participating_instance(&temporary, true);
        self.wait_for_bridge_end(within).await?;
        self.spawn(&temporary.name, &part)?;
        let (own, _) = watch::channel(running.name.clone());
        let (to, status) = watch::channel(Status::default());
        let marks = Marks {
            temporary: temporary.name.clone(),
            copied: running.name.clone(),
            own: own.subscribe(),
            recorder: Arc::clone(&self.recorder),
            names: self.settings.certs.names.clone(),
        };
        let (mut follower, daemon) = (JoinSet::new(), Arc::default());
        follower.spawn(follow_status(
            self.settings.bridge_directory(),
            marks,
            to,
            Arc::clone(&daemon),
        ));
        self.bridge = Some(Bridge {
            name: temporary.name,
            own,
            status,
            command,
            follower,
            daemon,
        });
        self.wait_for_bridge_status("COMMAND has begun", within, |status| {
            status.command && status.steering
        })
        .await?;
        self.publish_temporary_instance();
        Ok(())
    }

    /// Waits until the bridge reports the wanted status. Fails if the command that started the
    /// bridge ends before that.
    pub(crate) async fn wait_for_bridge_status(
        &mut self,
        what: &str,
        within: Duration,
        check: impl Fn(&Status) -> bool,
    ) -> Result<(), Error> {
        let Some(bridge) = &self.bridge else {
            return Ok(());
        };
        let (name, mut status) = (bridge.name.clone(), bridge.status.clone());
        let why = tokio::select! {
            biased;
            Ok(_) = status.wait_for(check) => return Ok(()),
            ended = self.wait_for_any_end(&name) => format!("ended before reporting that {what} ({ended})"),
            () = sleep(within) => format!("did not report within {within:?} that {what}"),
        };
        Err(self.instance_error(&name, why).await)
    }

    /// Returns the bridge's last status.
    pub(crate) fn bridge_status(&self) -> Status {
        self.bridge
            .as_ref()
            .map(|bridge| bridge.status.borrow().clone())
            .unwrap_or_default()
    }

    /// Lets the control group's clients dial the temporary instance, too.
    pub(crate) fn publish_temporary_instance(&mut self) {
        let Some((name, Some(SocketAddr::V4(address)))) = self.bridge.as_ref().map(|bridge| {
            (
                bridge.name.clone(),
                bridge.status.borrow().temporary.address,
            )
        }) else {
            return;
        };
        self.own.insert(name.clone(), address.into());
        self.publish_joined(&name);
    }

    /// Sets the instance that is the node's kube-apiserver from now on.
    pub(crate) fn set_own_instance(&self, name: &str) {
        if let Some(bridge) = &self.bridge {
            bridge.own.send_replace(name.to_owned());
        }
    }

    /// Lets COMMAND end with this exit status.
    pub(crate) fn end_command(&mut self, status: u8) -> Result<(), Error> {
        let Some(bridge) = &mut self.bridge else {
            return Ok(());
        };
        let written = bridge.command.write_all(format!("{status}\n").as_bytes());
        written.map_err(Error::unavailable_error("cannot make COMMAND end"))
    }

    /// Runs `berth bridge end`, as an operator does.
    pub(crate) fn end_bridge(&mut self) -> Result<(), Error> {
        let Some(name) = self.bridge.as_ref().map(|bridge| bridge.name.clone()) else {
            return Ok(());
        };
        let part = self.layout.bridge_end_spec(&self.settings);
        self.spawn(&name, &part)
    }

    /// Waits until `berth bridge` or `berth bridge end` has ended. Returns the exit status, `None`
    /// after a signal.
    pub(crate) async fn wait_for_bridge_exit(
        &mut self,
        within: Duration,
    ) -> Result<Option<i32>, Error> {
        let Some(name) = self.bridge.as_ref().map(|bridge| bridge.name.clone()) else {
            return Ok(None);
        };
        match timeout(within, self.wait_for_any_end(&name)).await {
            Ok(status) => Ok(status.code()),
            Err(_) => Err(self
                .instance_error(&name, format!("did not end within {within:?}"))
                .await),
        }
    }

    /// Waits until the bridge has sent its last status and the marks are logged.
    pub(crate) async fn wait_for_bridge_end(&mut self, within: Duration) -> Result<(), Error> {
        let Some(Bridge { name, follower, .. }) = &mut self.bridge else {
            return Ok(());
        };
        let name = name.clone();
        match timeout(within, async {
            while follower.join_next().await.is_some() {}
        })
        .await
        {
            Ok(()) => Ok(()),
            Err(_) => Err(self
                .instance_error(&name, format!("was not gone within {within:?}"))
                .await),
        }
    }

    /// Returns the last lines of the bridge's logs. Empty if the name is no bridge's.
    pub(super) fn bridge_log(&self, name: &str) -> Vec<String> {
        let of_it = self
            .bridge
            .as_ref()
            .is_some_and(|bridge| bridge.name == name);
        let logs = LOGS
            .iter()
            .filter(|_| of_it)
            .map(|log| std::fs::read_to_string(self.settings.bridge_directory().join(log)));
        let last = |log: String| {
            let skipped = log.lines().count().saturating_sub(LAST_LINES);
            log.lines()
                .skip(skipped)
                .map(|line| format!("  {line}"))
                .collect::<Vec<_>>()
        };
        logs.flat_map(|log| log.map(last).unwrap_or_default())
            .collect()
    }

    /// Kills the bridge and waits for its end.
    pub(crate) async fn kill_bridge(&self) {
        let Some(daemon) = self.bridge.as_ref().and_then(|bridge| bridge.daemon.get()) else {
            return;
        };
        let _ = daemon.kill();
        while !daemon.ends_within(Duration::ZERO).unwrap_or(true) {
            sleep(POLL_INTERVAL).await;
        }
    }
}

/// Logs the events in the lives of a bridge's two instances, as changes of the bridge's status show
/// them.
struct Marks {
    temporary: String,
    /// Name of an instance. The temporary instance serves this instance's certificate.
    copied: String,
    own: watch::Receiver<String>,
    recorder: Arc<Recorder>,
    names: Names,
}

impl Marks {
    fn record_changes(&self, before: &Status, now: &Status) {
        let at = Stamp::now();
        match (before.steering, now.steering) {
            (false, true) => self.names.rename_instance(&self.copied, &self.temporary),
            (true, false) => self.names.rename_instance(&self.temporary, &self.copied),
            _ => {}
        }
        let own = self.own.borrow().clone();
        self.recorder.with_events(|log| {
            for (is_temporary, mark) in compare_statuses(before, now) {
                let name = if is_temporary { &self.temporary } else { &own };
                // A simulated apiserver's own reports are more exact and may arrive earlier.
                let (started, ready) = (
                    last_mark(log, name, MarkKind::Started),
                    last_mark(log, name, MarkKind::Ready),
                );
                let at = match mark {
                    MarkKind::Ready if ready >= started && ready.is_some() => continue,
                    MarkKind::Started => {
                        let before =
                            ready.filter(|ready| started.is_none_or(|started| *ready > started));
                        before
                            .filter(|_| last_mark(log, name, MarkKind::Exited) < ready)
                            .unwrap_or(at)
                    }
                    _ => at,
                };
                log.push(Event {
                    at,
                    subject: name.clone(),
                    what: EventKind::Mark {
                        mark,
                        text: String::new(),
                    },
                });
            }
        });
    }
}

/// Returns what happened between two statuses. The bool is true for the temporary instance, false
/// for the node's kube-apiserver.
fn compare_statuses(before: &Status, now: &Status) -> Vec<(bool, MarkKind)> {
    let mut marks = Vec::new();
    if (before.steering, now.steering) == (true, false) {
        marks.extend([(true, MarkKind::Left), (false, MarkKind::Joined)]);
    }
    if before.temporary.pid != now.temporary.pid {
        marks.extend(before.temporary.pid.map(|_| (true, MarkKind::Exited)));
        marks.extend(now.temporary.pid.map(|_| (true, MarkKind::Started)));
    }
    if now.temporary.ready && !before.temporary.ready {
        marks.push((true, MarkKind::Ready));
    }
    if (before.steering, now.steering) == (false, true) {
        marks.extend([(true, MarkKind::Joined), (false, MarkKind::Left)]);
    }
    if now.step == Step::Drain && before.step != now.step {
        marks.push((true, MarkKind::Sigterm));
    }
    marks
}

/// Reads a bridge's status until the bridge closes its socket.
async fn follow_status(
    directory: PathBuf,
    marks: Marks,
    to: watch::Sender<Status>,
    daemon: Arc<OnceLock<HeldProcess>>,
) {
    let bridge = loop {
        match Connection::ask(&directory, &Ask::Status).await {
            Ok(bridge) => break bridge,
            // Until the preflight checks are done, the bridge has no socket.
            Err(_) => sleep(POLL_INTERVAL).await,
        }
    };
    if let Some(held) = bridge
        .peer_pid()
        .and_then(|peer| HeldProcess::of(peer).ok())
    {
        let _ = daemon.set(held);
    }
    while let Some(reply) = bridge.receive_message().await {
        match reply {
            Reply::Status(now) => {
                marks.record_changes(&to.borrow(), &now);
                to.send_replace(*now);
            }
            Reply::Refused(why) => tracing::debug!(why, "the bridge does not answer"),
            Reply::Differences(_) => {}
        }
    }
    // The temporary instance and its listeners ended with the bridge.
    let gone = Status {
        pid: to.borrow().pid,
        ..Status::default()
    };
    marks.record_changes(&to.borrow(), &gone);
    to.send_replace(gone);
}

impl Bridge {
    /// Waits for the end of the bridge's process, the daemon. The daemon removes its socket before
    /// its cgroup and before it exits, so a missing socket does not mean that the daemon has ended.
    pub(super) fn wait_for_end(&self) {
        if let Some(daemon) = self
            .daemon
            .get()
            .filter(|daemon| !daemon.ends_within(EXIT_TIMEOUT).unwrap_or(false))
        {
            kill_held(daemon);
        }
    }
}

/// Kills the bridge that has its socket below this directory, if there is one, and waits for the
/// bridge's end.
pub(super) fn kill_leftover(run: &Path) {
    let Ok(socket) = seqpacket::dial_path(&run.join(BRIDGE_DIRECTORY).join(SOCKET_NAME)) else {
        return;
    };
    let Ok(peer) = seqpacket::peer_credentials(socket.as_fd()) else {
        return;
    };
    if let Ok(held) = HeldProcess::of(peer.pid()) {
        kill_held(&held);
    }
}

fn kill_held(daemon: &HeldProcess) {
    let _ = daemon.kill();
    let _ = daemon.ends_within(EXIT_TIMEOUT);
}

#[cfg(test)]
mod tests {
    use super::*;
    use MarkKind::{Exited, Joined, Left, Ready, Sigterm, Started};
    use berth_node::ipc::bridge::TemporaryStatus;
    use std::process::{Command, Stdio};

    fn status(step: Step, steering: bool, pid: Option<u32>, ready: bool) -> Status {
        let temporary = TemporaryStatus {
            pid,
            ready,
            ..TemporaryStatus::default()
        };
        Status {
            step,
            steering,
            temporary,
            ..Status::default()
        }
    }

    #[test]
    fn a_bridges_status_becomes_marks() {
        let life = [
            (status(Step::Start, false, None, false), vec![]),
            (
                status(Step::Start, false, Some(7), false),
                vec![(true, Started)],
            ),
            (
                status(Step::Settle, false, Some(7), true),
                vec![(true, Ready)],
            ),
            (
                status(Step::Overlap, true, Some(7), true),
                vec![(true, Joined), (false, Left)],
            ),
            // The temporary instance was killed and started again.
            (
                status(Step::Hold, false, None, false),
                vec![(true, Left), (false, Joined), (true, Exited)],
            ),
            (
                status(Step::Hold, false, Some(8), false),
                vec![(true, Started)],
            ),
            (
                status(Step::Hold, true, Some(8), true),
                vec![(true, Ready), (true, Joined), (false, Left)],
            ),
            (
                status(Step::Linger, false, Some(8), true),
                vec![(true, Left), (false, Joined)],
            ),
            (
                status(Step::Drain, false, Some(8), true),
                vec![(true, Sigterm)],
            ),
            (Status::default(), vec![(true, Exited)]),
        ];
        let mut before = Status::default();
        for (now, marks) in life {
            assert_eq!(compare_statuses(&before, &now), marks, "{now:?}");
            before = now;
        }
    }

    #[test]
    fn a_command_ends_if_its_rehearsal_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("command");
        mkfifo(&fifo, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
        let mut child = Command::new("sh")
            .args(["-c", COMMAND])
            .arg(&fifo)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let held = HeldProcess::of(child.id().try_into().unwrap()).unwrap();
        if !held.ends_within(EXIT_TIMEOUT).unwrap() {
            held.kill().unwrap();
        }
        assert_eq!(child.wait().unwrap().code(), Some(1));
    }

    #[test]
    fn a_daemon_without_a_socket_is_waited_for() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let held = HeldProcess::of(child.id().try_into().unwrap()).unwrap();
        let bridge = Bridge {
            name: String::new(),
            own: watch::channel(String::new()).0,
            status: watch::channel(Status::default()).1,
            command: File::open("/dev/null").unwrap(),
            follower: JoinSet::new(),
            daemon: Arc::new(OnceLock::from(held)),
        };
        // The end of its input ends the child.
        drop(child.stdin.take());
        bridge.wait_for_end();
        assert!(child.try_wait().unwrap().expect("an end").success());
    }
}
