//! `berth bridge`: from options to a bridge, COMMAND under it, and how both ended.
//!
//! The bridge is another process, forked before any thread and any runtime starts: two processes that share a runtime's signal pipe
//! would take each other's signals.

mod ask;
mod watch;

use super::{Exit, block_on, exit_code, mistaken, numbered, print, print_stderr, refused, unavailable};
use crate::cli::{BridgeAction, BridgeArgs, BridgeStartArgs, Words};
use anyhow::Context;
use berth_manifest::command::find;
use berth_manifest::report::Refusal;
use berth_manifest::wait::until;
use berth_node::ipc::bridge::{Ask, BridgeOutcome, BridgeStatus, Connection, Reply, Step};
use berth_operate::bridge::claim::Claim;
use berth_operate::bridge::drive::drive;
use berth_operate::bridge::machine::{Limits, OVERLAP, OnFailure};
use berth_operate::bridge::plan::{BridgeOptions, BridgePlan, RunningInstance};
use berth_operate::bridge::preflight::preflight;
use berth_operate::bridge::{DIRECTORY, cgroup, logs};
use berth_upgrade::logs::end_of;
use berth_options::check::{Checks, Mistakes};
use berth_os::namespaces::own_mounts;
use berth_os::process::{Detached, detach, leave_terminal, set_oom_score};
use berth_os::signals::Signals;
use humantime::format_duration;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{Pid, geteuid};
use std::ffi::{OsStr, OsString};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::ExitStatus;
use std::time::Duration;
use tokio::time::timeout;
use watch::{WaitOutcome, Watcher, stays};

/// Longest wait for a bridge's first answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// How many lines of a log are shown.
const LINES: usize = 12;

/// The daemon's OOM score: out of memory, the kernel kills every pod before it (critical static pods have -997), but no container
/// runtime (-999).
const OOM_SCORE: i16 = -998;

pub(super) fn run(args: &BridgeArgs) -> anyhow::Result<Exit> {
    match &args.action {
        Some(BridgeAction::Start(start)) => bridge(start, None),
        Some(BridgeAction::Status(args)) => block_on(ask::status(args))?,
        Some(BridgeAction::Restore(args)) => block_on(ask::restore(args))?,
        Some(BridgeAction::End(args)) => block_on(ask::end(args))?,
        None => bridge(&args.start, Some(&args.run)),
    }
}

/// Whether a bridge is on in the default directory. One that does not answer counts as none.
pub(super) fn is_on() -> bool {
    let on = block_on(status(Path::new(DIRECTORY)));
    on.is_ok_and(|status| status.is_some_and(|status| status.outcome.is_none()))
}

/// The status of a directory's bridge, if there is one.
async fn status(directory: &Path) -> Option<BridgeStatus> {
    let client = Connection::ask(directory, &Ask::Status).await.ok()?;
    match timeout(PATIENCE, client.next()).await {
        Ok(Some(Reply::Status(status))) => Some(*status),
        _ => None,
    }
}

/// Ends the last bridge if it only relays its open connections to the node's own instance: the next COMMAND would end these anyway.
async fn end_last(directory: &Path) {
    let Some(last) = status(directory).await.filter(|last| last.outcome.is_some()) else { return };
    if Connection::ask(directory, &Ask::End { now: true }).await.is_ok() {
        let lives = async || std::fs::read(format!("/proc/{}/cmdline", last.pid)).is_ok_and(|line| !line.is_empty());
        until(PATIENCE, Duration::from_millis(20), lives, |lives| !lives).await;
    }
}

/// Runs another command of berth under a bridge, which replaces this process: see the module's documentation.
pub(super) fn around(options: &[&OsStr], run: &[OsString]) -> anyhow::Result<Exit> {
    let mut bridge = std::process::Command::new(std::env::current_exe().context("cannot find this program")?);
    let failed = bridge.arg("bridge").args(options).arg("--").args(run).exec();
    Err(failed).context("cannot begin a bridge")
}

/// The command line of this process, without one of its arguments.
pub(super) fn this_again(without: &str) -> anyhow::Result<Vec<OsString>> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let words = std::env::args_os().skip(1).filter(|word| word != without);
    Ok(std::iter::once(program.into()).chain(words).collect())
}

fn bridge(args: &BridgeStartArgs, run: Option<&[OsString]>) -> anyhow::Result<Exit> {
    let options = options(args, run).map_err(mistaken)?;
    if args.dry_run {
        let plan = plan(options)?;
        let steps = steps(&plan, run);
        print(&match args.dir.json {
            true => format!("{:#}\n", serde_json::json!({"steps": steps, "notes": plan.notes})),
            false => numbered(&steps),
        })?;
        return Ok(Exit::Ok);
    }
    // The bridge writes to it when it begins.
    let (mut begins, begin) = UnixStream::pair()?;
    match detach().context("cannot divide this process")? {
        Detached::Daemon => {
            drop(begins);
            hold(options, begin)
        }
        Detached::Caller(bridge) => {
            drop(begin);
            if begins.read_exact(&mut [0]).is_err() {
                // It has printed why.
                return Ok(match waitpid(Pid::from_raw(bridge), None)? {
                    WaitStatus::Exited(_, code) => u8::try_from(code).map_or(Exit::Bug, Exit::Child),
                    _ => Exit::Unavailable,
                });
            }
            block_on(accompany(args, run))?
        }
    }
}

/// Runs the bridge, if there can be one. Until it writes to `begin`, it prints on the terminal that started it.
fn hold(options: BridgeOptions, mut begin: UnixStream) -> anyhow::Result<Exit> {
    let directory = options.directory.clone();
    // Before there is a second thread. Without root there is no namespace, and the preflight reports that.
    if matches!(options.running, RunningInstance::Pod { .. }) && geteuid().is_root() {
        own_mounts().context("cannot have a mount namespace: run this with CAP_SYS_ADMIN")?;
    }
    block_on(end_last(&directory))?;
    let plan = plan(options)?;
    let claim = Claim::acquire(&directory).map_err(unavailable)?;
    leave_terminal(&claim.log).context("cannot leave the terminal")?;
    if begin.write_all(&[0]).is_err() {
        tracing::info!("the process that wanted a bridge has gone away: there is none");
        return Ok(Exit::Unavailable);
    }
    drop(begin);
    if let Err(error) = set_oom_score(OOM_SCORE) {
        tracing::info!(%error, "this bridge keeps its OOM score: run it with CAP_SYS_RESOURCE");
    }
    if let Err(error) = cgroup::leave() {
        tracing::info!(%error, "this bridge is in the cgroup of the process that started it");
    }
    block_on(drive(plan, claim))?;
    cgroup::remove();
    Ok(Exit::Ok)
}

/// Checks the node, and prints the notes about it.
fn plan(options: BridgeOptions) -> anyhow::Result<BridgePlan> {
    let plan = block_on(preflight(options))?.map_err(|mut refusal| {
        if let Refusal::Unavailable(why) = &mut refusal {
            why.push("nothing was changed".into());
        }
        refused(refusal)
    })?;
    plan.notes.iter().for_each(|note| print_stderr(format_args!("note: {note}")));
    Ok(plan)
}

/// What the options say together.
fn options(args: &BridgeStartArgs, run: Option<&[OsString]>) -> Result<BridgeOptions, Mistakes> {
    args.speedup.apply();
    let mut checks = Checks::default();
    if run.is_some_and(<[_]>::is_empty) && !args.dry_run {
        checks.wrong(
            "there is nothing to run: give COMMAND after --, or begin with `berth bridge start` (--dry-run needs none)",
        );
    }
    if let Some(program) = run.and_then(<[_]>::first)
        && find(program).is_none()
    {
        checks.wrong(format!("COMMAND: there is no program {} to run: give its path", program.display()));
    }
    if args.command.is_some() && args.on_failure == OnFailure::Restore {
        checks.wrong("--on-failure restore: what a kube-apiserver that is no pod is started from is not known here: give stay or end");
    }
    let running = match &args.command {
        None => RunningInstance::Pod { manifest: args.manifest.clone() },
        Some(Words(command)) => RunningInstance::Process { command: command.clone() },
    };
    checks.finish(Some(BridgeOptions {
        running,
        limits: Limits { ready: args.ready_timeout, settle: args.settle, speedup: args.speedup },
        on_failure: args.on_failure,
        etcd: args.etcd,
        probe_ca: args.probe_ca.clone(),
        probe_client: args.probe_cert.clone().zip(args.probe_key.clone()),
        probe_timeout: args.probe_timeout,
        directory: args.dir.state_dir.clone(),
        kubeconfig: args.kubeconfig.clone(),
    }))
}

fn steps(plan: &BridgePlan, run: Option<&[OsString]>) -> Vec<String> {
    let BridgePlan { options, port, temporary, own, .. } = plan;
    let Limits { ready, settle, speedup } = options.limits;
    let (ready, settle, overlap) =
        (format_duration(ready), format_duration(settle), format_duration(speedup.of(OVERLAP)));
    let run = match run {
        None => "leave it until `berth bridge end`".to_owned(),
        Some([]) => "run COMMAND".to_owned(),
        Some(run) => format!("run {}", run.join(" ".as_ref()).display()),
    };
    let argv = plan.argv.join(" ".as_ref());
    vec![
        format!("start a temporary kube-apiserver on {temporary}, as uid {}: {}", plan.like.uid, argv.display()),
        format!("wait until it is ready (at most {ready}) and has been for {settle}"),
        format!("steer new connections to port {port} to it; wait {overlap} for handshakes that began before"),
        run,
        format!(
            "wait until the node's own kube-apiserver is ready at {own} (at most {ready}) and has been for {settle}"
        ),
        format!("steer no more; wait {overlap} for handshakes that began before"),
        "let the temporary one's connections end, and end it".to_owned(),
    ]
}

/// Waits until the bridge serves, and runs COMMAND under it.
async fn accompany(args: &BridgeStartArgs, run: Option<&[OsString]>) -> anyhow::Result<Exit> {
    let directory = &args.dir.state_dir;
    let mut watcher = Watcher::new(&args.dir)?;
    let first = if run.is_some() { Ask::Accompany } else { Ask::Status };
    let client = Connection::ask(directory, &first).await;
    let client = client.map_err(|error| unavailable(format!("the bridge cannot be asked: {error}")))?;
    let status = match watcher.until(&client, |status| status.step == Step::Hold).await? {
        WaitOutcome::There(status) => status,
        seen => return not_begun(&mut watcher, seen, directory).await,
    };
    if cgroup::is_shared_with(status.pid) {
        watcher.more("it is in the cgroup of this session: what ends that ends it too (no cgroup can be made here)");
    }
    let Some(run) = run else {
        watcher.more("`berth bridge status` shows its state, `berth bridge end` ends it");
        return Ok(Exit::Ok);
    };
    // COMMAND is not run while nothing serves in place of what it may stop. One that does not receive this is seen to be gone.
    let _ = client.send(&Ask::Command).await;
    let begun = watcher.until(&client, |status| status.command).await?;
    if !matches!(begun, WaitOutcome::There(_)) {
        return not_begun(&mut watcher, begun, directory).await;
    }
    let ended = tokio::select! {
        ended = command(run) => ended,
        never = watcher.report_forever(&client) => match never {},
    };
    watcher.discard_signals()?;
    let (exit, failed) = match ended {
        Ok(status) if status.success() => (Exit::Ok, None),
        Ok(status) => (Exit::Child(exit_code(status)), Some(format!("COMMAND failed ({status})"))),
        Err(error) => (Exit::Unavailable, Some(format!("COMMAND cannot be run: {error}"))),
    };
    watcher.line(failed.as_deref().unwrap_or("COMMAND is done"));
    let _ = client.send(&Ask::Ended { failed }).await;
    let seen = watcher.until(&client, stays).await?;
    let is_done = matches!(seen, WaitOutcome::Over(BridgeOutcome::Done));
    watcher.ended(seen);
    Ok(if exit == Exit::Ok && !is_done { Exit::Again } else { exit })
}

/// COMMAND was not run: why.
async fn not_begun(watcher: &mut Watcher, seen: WaitOutcome, directory: &Path) -> anyhow::Result<Exit> {
    match seen {
        WaitOutcome::Refused(why) => return Err(unavailable(why)),
        WaitOutcome::Interrupted => {
            watcher.line("interrupted: the bridge ends, COMMAND was not run");
            if let Ok(client) = Connection::ask(directory, &Ask::End { now: false }).await {
                watcher.until(&client, |_| false).await?;
            }
        }
        WaitOutcome::Over(BridgeOutcome::NotBegun(why) | BridgeOutcome::Abandoned(why)) => {
            watcher.line(&format!("not begun: {why}"));
            watcher.last_lines("the temporary kube-apiserver", &end_of(&directory.join(logs::INSTANCE), LINES));
            watcher.logs();
        }
        WaitOutcome::Over(_) => watcher.line("the operator ended it before: COMMAND was not run"),
        WaitOutcome::There(_) | WaitOutcome::Gone => watcher.gone(),
    }
    Ok(Exit::Unavailable)
}

/// Runs COMMAND with this process's terminal and output. SIGTERM and SIGHUP are passed on; SIGINT and SIGQUIT of a terminal
/// reach it anyway, and must not end this process.
async fn command(run: &[OsString]) -> std::io::Result<ExitStatus> {
    let Some((program, arguments)) = run.split_first() else { return Err(ErrorKind::InvalidInput.into()) };
    let mut signals = Signals::new(&[Signal::SIGTERM, Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT])?;
    // A caller that has the variable set already must not begin another.
    let mut child = tokio::process::Command::new(program).args(arguments).env_remove("BERTH_BRIDGE").spawn()?;
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok());
    let pass = |signal| pid.map(|pid| kill(Pid::from_raw(pid), signal));
    loop {
        tokio::select! {
            status = child.wait() => return status,
            signal = signals.next() => if matches!(signal, Signal::SIGTERM | Signal::SIGHUP) {
                pass(signal);
            }
        }
    }
}
