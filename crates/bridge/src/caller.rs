//! The process that began a bridge, or sends a request to a bridge: waits, prints the bridge's
//! progress, and runs COMMAND.

use super::cgroup;
use super::logs;
use super::watch::{PATIENCE, WaitOutcome, Watcher, clients_stay};
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

/// Result of waiting for a bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waited {
    /// The bridge is on, or has ended well.
    Well,
    /// Clients stay on the bridge, or the node's kube-apiserver is not as expected.
    Again,
    /// COMMAND was not run.
    NotBegun,
    /// COMMAND failed.
    Failed(ExitStatus),
}

/// The status of the directory's bridge, if any.
pub async fn ask_status(directory: &Path) -> Option<BridgeStatus> {
    let client = Connection::ask(directory, &Ask::Status).await.ok()?;
    match timeout(PATIENCE, client.next()).await {
        Ok(Some(Reply::Status(status))) => Some(*status),
        _ => None,
    }
}

/// Ends the last bridge if it only relays open connections to the node's kube-apiserver: the next
/// COMMAND would end those anyway.
pub(super) async fn end_last(directory: &Path) {
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
        ask_until(PATIENCE, Duration::from_millis(20), lives, |lives| !lives).await;
    }
}

/// Waits until the bridge serves, and runs COMMAND, if any. With `json`, prints each status, and no
/// lines. The bridge begins after a write to `asked`. If there is a COMMAND, the bridge notices
/// from then on when this process ends.
///
/// # Errors
/// The reason why the bridge refuses.
pub async fn accompany_bridge(
    directory: &Path,
    json: bool,
    run: Option<&[OsString]>,
    mut asked: impl Write,
) -> Result<Waited, String> {
    let mut watcher =
        Watcher::new(directory, json).map_err(|error| format!("cannot handle signals: {error}"))?;
    let first = if run.is_some() {
        Ask::Accompany
    } else {
        Ask::Status
    };
    let client = Connection::ask(directory, &first).await;
    let client = client.map_err(|error| format!("the bridge cannot be asked: {error}"))?;
    // A bridge that does not receive the byte has gone away.
    let _ = asked.write_all(&[0]);
    let status = match watcher
        .wait_until(&client, |status| status.step == Step::Hold)
        .await
    {
        WaitOutcome::There(status) => status,
        seen => return report_not_begun(&mut watcher, seen, directory).await,
    };
    if cgroup::is_shared_with(status.pid) {
        watcher.print_detail("the bridge is in this session's cgroup, and ends if that is killed (no cgroup can be created here)");
    }
    let Some(run) = run else {
        watcher.print_detail("`berth bridge status` shows its state, `berth bridge end` ends it");
        return Ok(Waited::Well);
    };
    let terminals = [
        io::stdin().is_terminal(),
        io::stdout().is_terminal(),
        io::stderr().is_terminal(),
    ];
    if loses_output(terminals, |variable| std::env::var(variable).ok()) {
        watcher.print_detail(
            "COMMAND goes on if this terminal is lost; what it prints then is lost, and a pipe that is lost too (`| tee`) may end it: tmux \
             or screen would keep both",
        );
    }
    // COMMAND does not run before the bridge confirms that it serves. If the request cannot be
    // sent, the bridge has ended, and the wait below notices that.
    let _ = client.send(&Ask::Command).await;
    // If the bridge cannot provide a condition that COMMAND needs, it stays and reports a new
    // trouble.
    let is_refused = |now: &BridgeStatus| clients_stay(now) && now.trouble != status.trouble;
    let begun = watcher
        .wait_until(&client, |now| now.command || is_refused(now))
        .await;
    if !matches!(&begun, WaitOutcome::There(now) if now.command) {
        return report_not_begun(&mut watcher, begun, directory).await;
    }
    let ended = tokio::select! {
        ended = run_command(run) => ended,
        never = watcher.report_forever(&client) => match never {},
    };
    watcher
        .discard_signals()
        .map_err(|error| format!("cannot handle signals: {error}"))?;
    let (waited, failed) = match ended {
        Ok(status) if status.success() => (Waited::Well, None),
        Ok(status) => (
            Waited::Failed(status),
            Some(format!("COMMAND failed ({status})")),
        ),
        Err(error) => (
            Waited::NotBegun,
            Some(format!("COMMAND cannot be run: {error}")),
        ),
    };
    watcher.print_line(failed.as_deref().unwrap_or("COMMAND is done"));
    let _ = client.send(&Ask::Ended { failed }).await;
    let seen = watcher.wait_until(&client, clients_stay).await;
    let is_done = matches!(seen, WaitOutcome::Over(BridgeOutcome::Done));
    watcher.print_end(seen);
    Ok(if waited == Waited::Well && !is_done {
        Waited::Again
    } else {
        waited
    })
}

/// Prints the reason why COMMAND was not run.
async fn report_not_begun(
    watcher: &mut Watcher,
    seen: WaitOutcome,
    directory: &Path,
) -> Result<Waited, String> {
    match seen {
        WaitOutcome::Refused(why) => return Err(why),
        WaitOutcome::Interrupted => {
            watcher.print_line("interrupted: COMMAND was not run; the bridge is asked to end");
            if let Ok(client) = Connection::ask(directory, &Ask::End { now: false }).await
                && matches!(
                    watcher.wait_until(&client, |_| false).await,
                    WaitOutcome::Refused(_) | WaitOutcome::Interrupted
                )
            {
                // The bridge refuses to end because it waits for the end of a COMMAND that never
                // began, or the operator sent a second signal.
                watcher.print_end(WaitOutcome::Interrupted);
                return Ok(Waited::Again);
            }
        }
        WaitOutcome::Over(BridgeOutcome::NotBegun(why) | BridgeOutcome::Abandoned(why)) => {
            watcher.print_line(&format!("not begun: {why}"));
            watcher.print_last_lines(
                "the temporary kube-apiserver",
                &read_last_lines(&directory.join(logs::INSTANCE)),
            );
            watcher.print_logs();
        }
        WaitOutcome::Over(_) => {
            watcher.print_line("the operator ended the bridge: COMMAND was not run");
        }
        WaitOutcome::There(_) => {
            watcher.print_line("COMMAND was not run");
            watcher.print_end(seen);
        }
        WaitOutcome::Gone => watcher.print_gone(),
    }
    Ok(Waited::NotBegun)
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
) -> io::Result<Waited> {
    let mut watcher = Watcher::new(directory, json)?;
    let seen = watcher.wait_until(client, clients_stay).await;
    let is_over = match &seen {
        WaitOutcome::Over(BridgeOutcome::Abandoned(_)) => now,
        seen => matches!(seen, WaitOutcome::Over(_)),
    };
    if is_over {
        return Ok(Waited::Well);
    }
    watcher.print_end(seen);
    Ok(Waited::Again)
}

/// True if COMMAND's output is lost when the operator's connection is lost, as far as can be told:
/// this process has a terminal, even if COMMAND prints into a pipe, and neither tmux nor screen
/// keeps that terminal.
fn loses_output(terminals: [bool; 3], variable: impl Fn(&str) -> Option<String>) -> bool {
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
    use berth_node::ipc::bridge::SOCKET;
    use berth_os::seqpacket;
    use tokio::sync::{Mutex, mpsc, oneshot, watch};

    /// Lock for tests that send signals to this process, or must not get any.
    static SIGNALS: Mutex<()> = Mutex::const_new(());

    /// An ssh session is lost: the kernel and berth's caller send SIGHUP.
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
            loses_output(terminals, |name| {
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

    /// The bridge is in the step in which clients stay until the operator acts, and has reported an
    /// earlier trouble.
    #[tokio::test]
    async fn a_command_that_is_refused_later_is_not_waited_for() {
        let _alone = SIGNALS.lock().await;
        let temp = tempfile::tempdir().unwrap();
        let socket = seqpacket::bind_listener(&temp.path().join(SOCKET)).unwrap();
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
        assert_eq!(waited, Ok(Waited::NotBegun));
    }

    #[tokio::test]
    async fn an_interrupted_caller_knows_that_the_bridge_goes_on() {
        let _alone = SIGNALS.lock().await;
        for (answer, waited) in [
            (Ok(None), Waited::NotBegun),
            (Err("COMMAND runs".to_owned()), Waited::Again),
        ] {
            let temp = tempfile::tempdir().unwrap();
            let socket = seqpacket::bind_listener(&temp.path().join(SOCKET)).unwrap();
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
