//! The process that began a bridge, or sends a request to a bridge: waits, prints the bridge's
//! progress, and runs COMMAND.

use super::cgroup;
use super::logs;
use super::watch::{TIMEOUT, WaitOutcome, Watcher, clients_stay_on_bridge};
use berth_manifest::wait::ask_until;
use berth_node::ipc::bridge::{Ask, BridgeOutcome, BridgeStatus, Connection, Reply, Step};
use berth_os::process::ignore_signal;
use berth_os::signals::Signals;
use berth_upgrade::logs::read_last_lines;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::ffi::OsString;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::path::Path;
use std::process::ExitStatus;
use std::time::Duration;
use tokio::time::timeout;

/// Outcome for a command that waited for a bridge. Decides the command's exit status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitResult {
    /// The bridge is on, or has ended well.
    Well,
    /// Clients stay on the bridge, or the node's kube-apiserver is not as expected.
    Again,
    /// COMMAND was not run, because the bridge did not begin or refused COMMAND.
    NotBegun,
    /// COMMAND failed.
    Failed(ExitStatus),
}

/// Asks the bridge in a directory for its status. `None` if no bridge answers in time.
pub async fn ask_status(directory: &Path) -> Option<BridgeStatus> {
    let client = Connection::ask(directory, &Ask::Status).await.ok()?;
    match timeout(TIMEOUT, client.receive_message()).await {
        Ok(Some(Reply::Status(status))) => Some(*status),
        _ => None,
    }
}

/// Ends the previous bridge if that bridge has done its work and only relays open connections to
/// the node's kube-apiserver. The next COMMAND would end these connections anyway.
pub(super) async fn end_last_bridge(directory: &Path) {
    let Some(last) = ask_status(directory)
        .await
        .filter(|last| last.outcome.is_some())
    else {
        return;
    };
    if Connection::ask(directory, &Ask::End { now: true })
        .await
        .is_ok()
    {
        let lives = async || {
            std::fs::read(format!("/proc/{}/cmdline", last.pid)).is_ok_and(|line| !line.is_empty())
        };
        ask_until(TIMEOUT, Duration::from_millis(20), lives, |lives| !lives).await;
    }
}

/// Waits until the bridge serves, and runs COMMAND, if any. With `json`, prints each status, and no
/// lines. A byte written to `asked` lets the bridge begin. If there is a COMMAND, the bridge
/// notices from then on when this process ends.
///
/// # Errors
/// The reason why the bridge refuses.
pub async fn accompany_bridge(
    directory: &Path,
    json: bool,
    run: Option<&[OsString]>,
    mut asked: impl Write,
) -> Result<WaitResult, String> {
    let mut watcher =
        Watcher::new(directory, json).map_err(|error| format!("cannot handle signals: {error}"))?;
    let first = if run.is_some() {
        Ask::Accompany
    } else {
        Ask::Status
    };
    let client = Connection::ask(directory, &first).await;
    let client = client.map_err(|error| format!("the bridge cannot be asked: {error}"))?;
    // If the bridge has ended already, the write fails, and the wait below notices the end.
    let _ = asked.write_all(&[0]);
    let status = match watcher
        .wait_until(&client, |status| status.step == Step::Hold)
        .await
    {
        WaitOutcome::There(status) => status,
        seen => return report_not_begun(&mut watcher, seen, directory).await,
    };
    if cgroup::is_shared_with(status.pid) {
        watcher.print_detail("no cgroup can be created here, so the bridge is in this session's cgroup, and ends if that cgroup is killed");
    }
    let Some(run) = run else {
        watcher.print_detail(
            "`berth bridge status` shows the bridge's state, `berth bridge end` ends the bridge",
        );
        return Ok(WaitResult::Well);
    };
    let terminals = [
        io::stdin().is_terminal(),
        io::stdout().is_terminal(),
        io::stderr().is_terminal(),
    ];
    if disconnect_loses_output(terminals, |variable| std::env::var(variable).ok()) {
        watcher.print_detail(
            "if this terminal is lost, COMMAND goes on, but its output is lost, and a lost pipe (`| tee`) may end \
             COMMAND: run berth in tmux or screen to keep both",
        );
    }
    // COMMAND does not run before the bridge confirms that it serves. If the request cannot be
    // sent, the bridge ends with this connection, and the wait below notices that.
    let requested = client.send(&Ask::Command).await;
    // A bridge that refuses COMMAND, for example because etcd is not safe, stays on and reports a
    // trouble that it had not reported before.
    let is_refused =
        |now: &BridgeStatus| clients_stay_on_bridge(now) && now.trouble != status.trouble;
    let begun = watcher
        .wait_until(&client, |now| now.command || is_refused(now))
        .await;
    if !matches!(&begun, WaitOutcome::There(now) if now.command) {
        if let Err(error) = requested {
            Watcher::print_refusal(&format!("COMMAND cannot be requested: {error}"));
        }
        return report_not_begun(&mut watcher, begun, directory).await;
    }
    let ended = tokio::select! {
        ended = run_command(run) => ended,
        never = watcher.report_progress_forever(&client) => match never {},
    };
    watcher
        .discard_signals()
        .map_err(|error| format!("cannot handle signals: {error}"))?;
    let (waited, failed) = match ended {
        Ok(status) if status.success() => (WaitResult::Well, None),
        Ok(status) => (
            WaitResult::Failed(status),
            Some(format!("COMMAND failed ({status})")),
        ),
        Err(error) => (
            WaitResult::NotBegun,
            Some(format!("COMMAND cannot be run: {error}")),
        ),
    };
    watcher.print_line(failed.as_deref().unwrap_or("COMMAND is done"));
    let _ = client.send(&Ask::Ended { failed }).await;
    let seen = watcher.wait_until(&client, clients_stay_on_bridge).await;
    let is_done = matches!(seen, WaitOutcome::Over(BridgeOutcome::Done));
    watcher.print_end(seen);
    Ok(if waited == WaitResult::Well && !is_done {
        WaitResult::Again
    } else {
        waited
    })
}

/// Prints the reason why COMMAND was not run.
async fn report_not_begun(
    watcher: &mut Watcher,
    seen: WaitOutcome,
    directory: &Path,
) -> Result<WaitResult, String> {
    match seen {
        WaitOutcome::Refused(why) => return Err(why),
        WaitOutcome::Interrupted => {
            watcher.print_line("interrupted: COMMAND was not run, and the bridge ends");
            if let Ok(client) = Connection::ask(directory, &Ask::End { now: false }).await
                && matches!(
                    watcher.wait_until(&client, |_| false).await,
                    WaitOutcome::Refused(_) | WaitOutcome::Interrupted
                )
            {
                // The bridge refuses to end because it waits for the end of a COMMAND that never
                // began, or the operator sent a second signal.
                watcher.print_end(WaitOutcome::Interrupted);
                return Ok(WaitResult::Again);
            }
        }
        WaitOutcome::Over(BridgeOutcome::NotBegun(why) | BridgeOutcome::Abandoned(why)) => {
            watcher.print_line(&format!("not begun: {why}"));
            watcher.print_last_lines(
                "the temporary kube-apiserver",
                &read_last_lines(&directory.join(logs::INSTANCE_LOG)),
            );
            watcher.print_logs();
        }
        WaitOutcome::Over(_) => {
            watcher.print_line("the bridge has ended: COMMAND was not run");
        }
        WaitOutcome::There(_) => {
            watcher.print_line("COMMAND was not run");
            watcher.print_end(seen);
        }
        WaitOutcome::Gone => watcher.print_bridge_is_gone(),
    }
    Ok(WaitResult::NotBegun)
}

/// Waits for the end of a bridge that was asked to end: at once if `now` is true, and otherwise
/// when the node's kube-apiserver is ready.
///
/// # Errors
/// Signals cannot be handled.
pub async fn wait_for_end(
    directory: &Path,
    json: bool,
    client: &Connection,
    now: bool,
) -> io::Result<WaitResult> {
    let mut watcher = Watcher::new(directory, json)?;
    let seen = watcher.wait_until(client, clients_stay_on_bridge).await;
    let is_over = match &seen {
        WaitOutcome::Over(BridgeOutcome::Abandoned(_)) => now,
        seen => matches!(seen, WaitOutcome::Over(_)),
    };
    if is_over {
        return Ok(WaitResult::Well);
    }
    watcher.print_end(seen);
    Ok(WaitResult::Again)
}

/// True if the operator would lose COMMAND's output together with the connection to this node: this
/// process has a terminal, and neither tmux nor screen keeps that terminal. A guess from the
/// environment variables.
fn disconnect_loses_output(
    terminals: [bool; 3],
    variable: impl Fn(&str) -> Option<String>,
) -> bool {
    terminals.contains(&true)
        && ["TMUX", "STY"].iter().all(|name| variable(name).is_none())
        // sudo(8) removes TMUX and STY, and keeps TERM.
        && !variable("TERM").is_some_and(|term| ["tmux", "screen"].iter().any(|name| term.starts_with(name)))
}

/// Runs COMMAND with this process's terminal and output. SIGTERM is forwarded. SIGINT and SIGQUIT
/// of a terminal reach COMMAND anyway, and must not end this process. The SIGHUP of a lost terminal
/// ends neither COMMAND nor this process: half an upgrade is worse than an upgrade that nobody
/// watches.
async fn run_command(run: &[OsString]) -> io::Result<ExitStatus> {
    let Some((program, arguments)) = run.split_first() else {
        return Err(ErrorKind::InvalidInput.into());
    };
    let mut signals = Signals::new(&[
        Signal::SIGTERM,
        Signal::SIGHUP,
        Signal::SIGINT,
        Signal::SIGQUIT,
    ])?;
    let mut command = std::process::Command::new(program);
    ignore_signal(command.args(arguments), Signal::SIGHUP);
    let mut child = tokio::process::Command::from(command).spawn()?;
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok());
    loop {
        tokio::select! {
            status = child.wait() => return status,
            signal = signals.next() => if signal == Signal::SIGTERM {
                pid.map(|pid| kill(Pid::from_raw(pid), signal));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::serve_commands;
    use berth_node::ipc::bridge::SOCKET_NAME;
    use berth_os::seqpacket;
    use tokio::sync::{Mutex, mpsc, oneshot, watch};

    /// Lock for tests that send signals to this process, and for tests that a signal would disturb.
    static SIGNALS: Mutex<()> = Mutex::const_new(());

    /// When an ssh session is lost, COMMAND and the process that runs COMMAND get SIGHUP. Here
    /// COMMAND sends both signals itself.
    #[tokio::test]
    async fn a_lost_terminal_ends_neither_command_nor_its_caller() {
        let _alone = SIGNALS.lock().await;
        let mut lost = Signals::new(&[Signal::SIGHUP]).unwrap();
        let run = ["sh", "-c", "kill -HUP $$ $PPID; exit 7"].map(OsString::from);
        assert_eq!(run_command(&run).await.unwrap().code(), Some(7));
        lost.next().await;
    }

    #[test]
    fn output_is_lost_on_a_terminal_without_tmux_even_behind_a_pipe() {
        let loses = |terminals, set: &[(&str, &str)]| {
            disconnect_loses_output(terminals, |name| {
                set.iter()
                    .find(|(it, _)| *it == name)
                    .map(|(_, value)| (*value).to_owned())
            })
        };
        for (terminals, set, lost) in [
            ([true; 3], &[("TERM", "xterm")][..], true),
            ([true, false, false], &[], true),
            ([false; 3], &[], false),
            ([true; 3], &[("TMUX", "/tmp/tmux-0/default,7,0")], false),
            ([true; 3], &[("TERM", "screen-256color")], false),
        ] {
            assert_eq!(loses(terminals, set), lost, "{terminals:?} {set:?}");
        }
    }

    /// The bridge already waits for the operator (`Step::Hold`) because of an earlier trouble, and
    /// refuses COMMAND with a second trouble.
    #[tokio::test]
    async fn a_command_that_is_refused_later_is_not_waited_for() {
        let _alone = SIGNALS.lock().await;
        let temp = tempfile::tempdir().unwrap();
        let socket = seqpacket::bind_listener(&temp.path().join(SOCKET_NAME)).unwrap();
        let hold = |trouble: Option<&str>| BridgeStatus {
            step: Step::Hold,
            trouble: trouble.map(str::to_owned),
            pid: std::process::id(),
            ..BridgeStatus::default()
        };
        let status = watch::Sender::new(hold(Some("it did not come back")));
        let (ask, mut asks) = mpsc::unbounded_channel();
        let (_end, ended) = oneshot::channel();
        tokio::spawn(serve_commands(socket, status.clone(), ask, ended));
        let bridge = async {
            for asked in [Ask::Accompany, Ask::Command] {
                let (seen, reply) = asks.recv().await.unwrap();
                assert_eq!(seen, Some(asked));
                reply.send(Ok(None)).unwrap();
            }
            status.send_replace(hold(Some("no majority")));
        };
        let run = [OsString::from("false")];
        let (waited, ()) = tokio::join!(
            accompany_bridge(temp.path(), true, Some(&run), io::sink()),
            bridge
        );
        assert_eq!(waited, Ok(WaitResult::NotBegun));
    }

    #[tokio::test]
    async fn a_bridge_that_refuses_command_is_asked_to_end() {
        let _alone = SIGNALS.lock().await;
        let temp = tempfile::tempdir().unwrap();
        let socket = seqpacket::bind_listener(&temp.path().join(SOCKET_NAME)).unwrap();
        let hold = BridgeStatus {
            step: Step::Hold,
            pid: std::process::id(),
            ..BridgeStatus::default()
        };
        let (ask, mut asks) = mpsc::unbounded_channel();
        let (_end, ended) = oneshot::channel();
        tokio::spawn(serve_commands(socket, watch::Sender::new(hold), ask, ended));
        let why = "etcd is not safe";
        let bridge = async {
            for (asked, answer) in [
                (Ask::Accompany, Ok(None)),
                (Ask::Command, Err(why.to_owned())),
            ] {
                let (seen, reply) = asks.recv().await.unwrap();
                assert_eq!(seen, Some(asked));
                reply.send(answer).unwrap();
            }
        };
        let run = [OsString::from("false")];
        let (waited, ()) = tokio::join!(
            accompany_bridge(temp.path(), true, Some(&run), io::sink()),
            bridge
        );
        assert_eq!(waited, Err(why.to_owned()));
        let (asked, _reply) = asks.recv().await.unwrap();
        assert_eq!(asked, Some(Ask::End { now: false }));
    }

    /// The kernel refuses a message that is larger than the socket's buffer, as it does without
    /// memory.
    #[tokio::test]
    async fn a_caller_that_cannot_report_the_end_of_command_reads_the_status() {
        let temp = tempfile::tempdir().unwrap();
        let socket = seqpacket::bind_listener(&temp.path().join(SOCKET_NAME)).unwrap();
        let status = watch::Sender::new(BridgeStatus::default());
        let (ask, mut asks) = mpsc::unbounded_channel();
        let (_end, ended) = oneshot::channel();
        tokio::spawn(serve_commands(socket, status.clone(), ask, ended));
        let answer = async {
            for asked in [Some(Ask::Accompany), Some(Ask::Command), None] {
                let (seen, reply) = asks.recv().await.unwrap();
                assert_eq!(seen, asked);
                reply.send(Ok(None)).unwrap();
            }
            status.send_modify(|status| status.trouble = Some("it went away".into()));
        };
        let caller = async {
            let client = Connection::ask(temp.path(), &Ask::Accompany).await.unwrap();
            client.send(&Ask::Command).await.unwrap();
            let failed = Some("larger than the buffer of the socket".repeat(1 << 16));
            client.send(&Ask::Ended { failed }).await.unwrap_err();
            loop {
                match client.receive_message().await.unwrap() {
                    Reply::Status(status) if status.trouble.is_some() => break,
                    _ => {}
                }
            }
        };
        tokio::join!(answer, caller);
    }

    #[tokio::test]
    async fn an_interrupted_caller_knows_that_the_bridge_goes_on() {
        let _alone = SIGNALS.lock().await;
        for (answer, waited) in [
            (Ok(None), WaitResult::NotBegun),
            (Err("COMMAND runs".to_owned()), WaitResult::Again),
        ] {
            let temp = tempfile::tempdir().unwrap();
            let socket = seqpacket::bind_listener(&temp.path().join(SOCKET_NAME)).unwrap();
            let done = BridgeStatus {
                outcome: Some(BridgeOutcome::Done),
                ..BridgeStatus::default()
            };
            let (ask, mut asks) = mpsc::unbounded_channel();
            let (_end, ended) = oneshot::channel();
            tokio::spawn(serve_commands(socket, watch::Sender::new(done), ask, ended));
            let mut watcher = Watcher::new(temp.path(), true).unwrap();
            let answers = async {
                let (asked, reply) = asks.recv().await.unwrap();
                assert_eq!(asked, Some(Ask::End { now: false }));
                reply.send(answer).unwrap();
            };
            let (seen, ()) = tokio::join!(
                report_not_begun(&mut watcher, WaitOutcome::Interrupted, temp.path()),
                answers
            );
            assert_eq!(seen, Ok(waited));
        }
    }
}
