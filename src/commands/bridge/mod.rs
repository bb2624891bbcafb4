//! `berth bridge`: from options to a bridge, COMMAND under it, and how both ended.
//!
//! The bridge is another process, forked before any thread and any runtime starts: two processes that share a runtime's signal pipe
//! would take each other's signals.

mod ask;
mod watch;

use super::{Exit, block_on, exit_code, mistaken, numbered, print, print_stderr, refused, unavailable};
use crate::cli::{BridgeAction, BridgeArgs, BridgeStartArgs};
use anyhow::Context;
use berth_manifest::command::find;
use berth_manifest::report::Refusal;
use berth_manifest::wait::until;
use berth_node::ipc::bridge::{Ask, BridgeOutcome, BridgeStatus, Connection, Reply, Step};
use berth_operate::bridge::drive::{Claim, drive};
use berth_operate::bridge::machine::{Limits, OVERLAP, OnFailure};
use berth_operate::bridge::plan::{BridgeOptions, BridgePlan, RunningInstance};
use berth_operate::bridge::preflight::preflight;
use berth_operate::bridge::{DIRECTORY, cgroup, logs};
use berth_options::check::{Checks, Mistakes, check_probe};
use berth_os::namespaces::own_mounts;
use berth_os::process::{Detached, detach, leave_terminal, set_oom_score};
use berth_os::signals::Signals;
use berth_shim::backend::probe::ProbeKind;
use berth_upgrade::logs::end_of;
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

/// What kube-apiserver answers when it is ready.
const READY: &str = "/readyz";

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

/// Checks the options.
fn options(args: &BridgeStartArgs, run: Option<&[OsString]>) -> Result<BridgeOptions, Mistakes> {
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
    let running = match &args.command {
        None => {
            let manifest =
                std::path::absolute(&args.manifest).map_err(|error| format!("--manifest: {error}: give a path"));
            checks.ok(manifest).map(|manifest| RunningInstance::Pod { manifest })
        }
        Some(text) => {
            let words = shell_words::split(text);
            let words =
                checks.ok(words.map_err(|error| format!("--command: {error}: close it, or put a backslash before it")));
            words.map(|words| RunningInstance::Process { command: words.into_iter().map(OsString::from).collect() })
        }
    };
    let is_pod = args.command.is_none();
    if !is_pod && args.on_failure == OnFailure::Restore {
        checks.wrong("--on-failure restore: what a kube-apiserver that is no pod is started from is not known here: give stay or end");
    }
    let port = args.port.as_deref().map(|text| checks.number("--port", text, 1..=u16::MAX));
    let ready = checks.duration("--ready-timeout", &args.ready_timeout, Duration::from_secs(1));
    let settle = checks.duration("--settle", &args.settle, Duration::ZERO);
    args.speedup.apply();
    let probe = check_probe(&args.probe, READY, !is_pod, &mut checks);
    let admin = args.admin.as_deref().and_then(|text| checks.address("--admin", text));
    // The daemon has another working directory.
    let directory = std::path::absolute(&args.dir.state_dir);
    let directory = checks.ok(directory.map_err(|error| format!("--state-dir: {error}: give a path")));
    let options = match (running, probe, directory) {
        (Some(running), Some(probe), Some(directory)) => Some(BridgeOptions {
            running,
            port,
            limits: Limits { ready, settle, speedup: args.speedup },
            on_failure: args.on_failure,
            etcd: args.etcd,
            finds_ca: is_pod && probe.kind == ProbeKind::Https && probe.ca.is_none() && !args.probe.probe_insecure,
            probe: probe.with_files(|path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned())),
            directory,
            admin,
            kubeconfig: args.kubeconfig.clone(),
        }),
        _ => None,
    };
    checks.finish(options)
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
    let built = watcher.until(&client, |status| status.step == Step::Hold).await?;
    let status = match built {
        WaitOutcome::There(status) => status,
        WaitOutcome::Refused(why) => return Err(unavailable(why)),
        WaitOutcome::Over(outcome) => return Ok(not_begun(&watcher, outcome, directory)),
        WaitOutcome::Gone => {
            watcher.gone();
            return Ok(Exit::Unavailable);
        }
        WaitOutcome::Interrupted => {
            watcher.line("interrupted: the bridge ends, COMMAND was not run");
            if let Ok(client) = Connection::ask(directory, &Ask::End { now: false }).await {
                watcher.until(&client, |_| false).await?;
            }
            return Ok(Exit::Unavailable);
        }
    };
    if cgroup::is_shared_with(status.pid) {
        watcher.more("it is in the cgroup of this session: what ends that ends it too (no cgroup can be made here)");
    }
    let Some(run) = run else {
        watcher.more("`berth bridge status` shows its state, `berth bridge end` ends it");
        return Ok(Exit::Ok);
    };
    if let Err(error) = client.send(&Ask::Command).await {
        tracing::debug!(%error, "the bridge did not receive that");
    }
    match watcher.until(&client, |status| status.command).await? {
        WaitOutcome::There(_) => {}
        WaitOutcome::Refused(why) => return Err(unavailable(why)),
        // COMMAND is not run while nothing serves in place of what it may stop.
        WaitOutcome::Interrupted => {
            watcher.line("interrupted: COMMAND was not run; `berth bridge end` ends the bridge");
            return Ok(Exit::Unavailable);
        }
        WaitOutcome::Over(outcome) => return Ok(not_begun(&watcher, outcome, directory)),
        WaitOutcome::Gone => {
            watcher.gone();
            return Ok(Exit::Unavailable);
        }
    }
    let ended = tokio::select! {
        ended = command(run) => ended,
        never = watcher.report_forever(&client) => match never {},
    };
    watcher.discard_signals()?;
    let exit = match &ended {
        Ok(status) => Exit::Child(exit_code(*status)),
        Err(_) => Exit::Unavailable,
    };
    let failed = match ended {
        Ok(status) if status.success() => None,
        Ok(status) => Some(format!("COMMAND failed ({status})")),
        Err(error) => Some(format!("COMMAND cannot be run: {error}")),
    };
    watcher.line(failed.as_deref().unwrap_or("COMMAND is done"));
    let succeeded = failed.is_none();
    let sent = client.send(&Ask::Ended { failed }).await;
    let seen = watcher.until(&client, stays).await?;
    match seen {
        WaitOutcome::Over(BridgeOutcome::Done) => return Ok(exit),
        WaitOutcome::Over(BridgeOutcome::Restored(why)) => {
            watcher.line(&format!("the node's own kube-apiserver serves as it did before: {why}"));
            watcher.logs();
        }
        WaitOutcome::Over(BridgeOutcome::NotBegun(why) | BridgeOutcome::Abandoned(why)) => {
            watcher.abandoned(&why);
            watcher.logs();
        }
        WaitOutcome::There(status) => watcher.stays(&status),
        WaitOutcome::Interrupted => {
            watcher.line("interrupted: clients stay on the bridge, which goes on by itself");
            watcher.more("`berth bridge status` shows its state, `berth bridge end` ends it");
        }
        WaitOutcome::Refused(_) | WaitOutcome::Gone => {
            if let Err(error) = sent {
                tracing::debug!(%error, "the bridge did not receive that");
            }
            watcher.gone();
        }
    }
    Ok(if succeeded { Exit::Again } else { exit })
}

/// The bridge has ended, and COMMAND was not run.
fn not_begun(watcher: &Watcher, outcome: BridgeOutcome, directory: &Path) -> Exit {
    let (BridgeOutcome::NotBegun(why) | BridgeOutcome::Abandoned(why)) = outcome else {
        watcher.line("the operator ended it before: COMMAND was not run");
        return Exit::Unavailable;
    };
    watcher.line(&format!("not begun: {why}"));
    let last = end_of(&directory.join(logs::INSTANCE), LINES);
    if !last.is_empty() {
        watcher.more("last lines of the temporary kube-apiserver:");
        last.iter().for_each(|line| watcher.more(&format!("  {line}")));
    }
    watcher.logs();
    Exit::Unavailable
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
