//! `berth bridge`: what was typed to a bridge, COMMAND within it, and how both ended.
//!
//! The bridge is another process, divided from this one before any thread and any runtime begins: two that share a runtime's pipe for
//! signals would take each other's.

use super::{Exit, block_on, mistaken, unavailable};
use crate::cli::{BridgeAction, BridgeArgs, BridgeEndArgs, BridgeOnFailure, BridgeStartArgs, BridgeStatusArgs};
use anyhow::Context;
use berth_cluster::kubeconfig::ADMIN;
use berth_operate::bridge::drive::{Claim, drive};
use berth_operate::bridge::ipc::{Ask, Client, Reply, Status};
use berth_operate::bridge::machine::{Limits, OVERLAP, OnFailure, Outcome, Step};
use berth_operate::bridge::preflight::{Plan, Refusal, find, preflight};
use berth_operate::bridge::service::sweep;
use berth_operate::bridge::{Options, cgroup};
use berth_operate::upgrade::say::Say;
use berth_options::check::{Checks, Mistakes, check_probe};
use berth_os::process::{Detached, detach, leave_terminal};
use humantime::format_duration;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;
use std::time::Duration;
use tokio::signal::unix::{Signal as Signals, SignalKind, signal};

/// What kube-apiserver answers when it is ready.
const READY: &str = "/readyz";

pub(super) fn run(args: &BridgeArgs) -> anyhow::Result<Exit> {
    match &args.action {
        Some(BridgeAction::Start(start)) => bridge(start, None),
        Some(BridgeAction::Status(args)) => block_on(status(args))?,
        Some(BridgeAction::End(args)) => block_on(end(args))?,
        None => bridge(&args.start, Some(&args.run)),
    }
}

fn bridge(args: &BridgeStartArgs, run: Option<&[OsString]>) -> anyhow::Result<Exit> {
    let options = match options(args, run) {
        Ok(options) => options,
        Err(mistakes) => return Ok(mistaken(&mistakes)),
    };
    if args.dry_run {
        let plan = match plan(options)? {
            Ok(plan) => plan,
            Err(exit) => return Ok(exit),
        };
        let mut out = std::io::stdout().lock();
        for (at, step) in steps(&plan, run).iter().enumerate() {
            let _ = writeln!(out, "{}  {step}", at + 1);
        }
        return Ok(Exit::Ok);
    }
    let directory = options.directory.clone();
    // The bridge says on it that it begins.
    let (mut begins, begin) = UnixStream::pair()?;
    match detach().context("cannot divide this process")? {
        Detached::Daemon => {
            drop(begins);
            hold(options, begin)
        }
        Detached::Caller(bridge) => {
            drop(begin);
            if begins.read_exact(&mut [0]).is_err() {
                // It has said why.
                return Ok(match waitpid(Pid::from_raw(bridge), None)? {
                    WaitStatus::Exited(_, code) => u8::try_from(code).map_or(Exit::Bug, Exit::Child),
                    _ => Exit::Unavailable,
                });
            }
            block_on(accompany(&directory, run))?
        }
    }
}

/// Is the bridge, if there can be one. Until it says on `begin` that it begins, it writes to who started it.
fn hold(options: Options, mut begin: UnixStream) -> anyhow::Result<Exit> {
    let directory = options.directory.clone();
    let plan = match plan(options)? {
        Ok(plan) => plan,
        Err(exit) => return Ok(exit),
    };
    let claim = match Claim::take(&directory) {
        Ok(claim) => claim,
        Err(why) => return Ok(unavailable(&why)),
    };
    leave_terminal(&claim.log).context("cannot leave the terminal")?;
    if begin.write_all(&[0]).is_err() {
        tracing::info!("who wanted a bridge has gone away: there is none");
        return Ok(Exit::Unavailable);
    }
    drop(begin);
    if let Err(error) = cgroup::leave() {
        tracing::info!(%error, "this bridge is in the cgroup of who started it");
    }
    block_on(drive(plan, claim))?;
    cgroup::remove();
    Ok(Exit::Ok)
}

/// What the preflight finds is said here.
fn plan(options: Options) -> anyhow::Result<Result<Plan, Exit>> {
    Ok(match block_on(preflight(options))? {
        Ok(plan) => {
            plan.notes.iter().for_each(|note| eprintln!("berth: note: {note}"));
            Ok(plan)
        }
        Err(Refusal::Mistakes(mistakes)) => Err(mistaken(&Mistakes(mistakes))),
        Err(Refusal::Missing(missing)) => {
            missing.iter().for_each(|what| eprintln!("berth: {what}"));
            eprintln!("berth: nothing was changed");
            Err(Exit::Unavailable)
        }
    })
}

/// Checks what was typed.
fn options(args: &BridgeStartArgs, run: Option<&[OsString]>) -> Result<Options, Mistakes> {
    let mut checks = Checks::default();
    if run.is_some_and(<[_]>::is_empty) {
        checks.wrong("there is nothing to run: give COMMAND after --, or begin with `berth bridge start`");
    }
    if let Some(program) = run.and_then(<[_]>::first)
        && find(program).is_none()
    {
        checks.wrong(format!("COMMAND: there is no program {} to run: give its path", program.display()));
    }
    let command = match &args.command {
        None => {
            checks.wrong(
                "--command is not given: name the command line of the kube-apiserver that runs here, such as \
                 --command 'kube-apiserver --etcd-servers=…' (one in a static pod cannot be bridged yet)",
            );
            None
        }
        Some(text) => {
            let words = shell_words::split(text);
            checks.note(words.map_err(|error| format!("--command: {error}: close it, or put a backslash before it")))
        }
    };
    let port = args.port.as_deref().map(|text| checks.number("--port", text, 1..=u16::MAX));
    let ready = checks.duration("--ready-timeout", &args.ready_timeout, Duration::from_secs(1));
    let settle = checks.duration("--settle", &args.settle, Duration::ZERO);
    let probe = check_probe(&args.probe, READY, true, &mut checks);
    let admin = args.admin.as_deref().and_then(|text| checks.address("--admin", text));
    let on_failure = match args.on_failure {
        BridgeOnFailure::Stay => OnFailure::Stay,
        BridgeOnFailure::End => OnFailure::End,
    };
    // The daemon has another working directory.
    let directory = std::path::absolute(&args.state_dir.state_dir);
    let directory = checks.note(directory.map_err(|error| format!("--state-dir: {error}: give a path")));
    let options = match (command, probe, directory) {
        (Some(command), Some(probe), Some(directory)) => Some(Options {
            command: command.into_iter().map(OsString::from).collect(),
            port,
            limits: Limits { ready, settle },
            on_failure,
            probe: absolute(probe),
            directory,
            admin,
            kubeconfig: args.kubeconfig.clone(),
        }),
        _ => None,
    };
    checks.finish(options)
}

/// Its files, wherever this process is later.
fn absolute(mut probe: berth_shim::backend::probe::ProbeConfig) -> berth_shim::backend::probe::ProbeConfig {
    let client = probe.client.iter_mut().flat_map(|(cert, key)| [cert, key]);
    for path in client.chain(&mut probe.ca).chain(&mut probe.token) {
        if let Ok(whole) = std::path::absolute(&*path) {
            *path = whole;
        }
    }
    probe
}

fn steps(plan: &Plan, run: Option<&[OsString]>) -> Vec<String> {
    let Plan { options, port, temporary, own, .. } = plan;
    let (settle, overlap) = (format_duration(options.limits.settle), format_duration(OVERLAP));
    let ready = format_duration(options.limits.ready);
    let run = run.map_or_else(
        || "leave it until `berth bridge end`".to_owned(),
        |run| format!("run {}", run.join(" ".as_ref()).display()),
    );
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

/// Sees to it that there is a bridge, and runs COMMAND under it.
async fn accompany(directory: &Path, run: Option<&[OsString]>) -> anyhow::Result<Exit> {
    let mut watcher = Watcher::new(directory)?;
    let mut client = match Client::ask(directory, &Ask::Status).await {
        Ok(client) => client,
        Err(error) => return Ok(unavailable(&format!("the bridge cannot be asked: {error}"))),
    };
    let built = watcher.until(&mut client, |status| status.step == Step::Hold).await;
    let status = match built {
        Seen::There(status) => status,
        Seen::Refused(why) => return Ok(unavailable(&why)),
        Seen::Over(outcome) => {
            let (Outcome::NotBegun(why) | Outcome::Abandoned(why)) = outcome else { return Ok(Exit::Unavailable) };
            watcher.say.line(&format!("not begun: {why}"));
            watcher.logs();
            return Ok(Exit::Unavailable);
        }
        Seen::Gone => {
            watcher.gone();
            return Ok(Exit::Unavailable);
        }
        Seen::Interrupted => {
            watcher.say.line("interrupted: the bridge ends, COMMAND was not run");
            if let Ok(mut client) = Client::ask(directory, &Ask::End { now: false }).await {
                watcher.until(&mut client, |_| false).await;
            }
            return Ok(Exit::Unavailable);
        }
    };
    if cgroup::is_shared_with(status.pid) {
        watcher
            .say
            .more("it is in the cgroup of this session: what ends that ends it too (no cgroup can be made here)");
    }
    let Some(run) = run else {
        watcher.say.more("`berth bridge status` says how it is, `berth bridge end` ends it");
        return Ok(Exit::Ok);
    };
    drop(client);
    let Ok(mut client) = Client::ask(directory, &Ask::Command).await else {
        watcher.gone();
        return Ok(Exit::Unavailable);
    };
    match watcher.until(&mut client, |_| true).await {
        Seen::There(_) => {}
        Seen::Refused(why) => return Ok(unavailable(&why)),
        // COMMAND is not run where nothing stands in for what it may stop.
        Seen::Interrupted => {
            watcher.say.line("interrupted: COMMAND was not run; `berth bridge end` ends the bridge");
            return Ok(Exit::Unavailable);
        }
        Seen::Over(_) | Seen::Gone => {
            watcher.gone();
            return Ok(Exit::Unavailable);
        }
    }
    let ended = command(run).await;
    watcher.listen_anew()?;
    let exit = match &ended {
        Ok(status) => Exit::Child(exit_code(*status)),
        Err(_) => Exit::Unavailable,
    };
    let failed = match ended {
        Ok(status) if status.success() => None,
        Ok(status) => Some(format!("COMMAND failed ({status})")),
        Err(error) => Some(format!("COMMAND cannot be run: {error}")),
    };
    watcher.say.line(failed.as_deref().unwrap_or("COMMAND is done"));
    let succeeded = failed.is_none();
    let told = client.tell(&Ask::Ended { failed }).await;
    let seen = watcher.until(&mut client, stays).await;
    let again = if succeeded { Exit::Again } else { exit };
    Ok(match seen {
        Seen::Over(Outcome::Done) => exit,
        Seen::Over(Outcome::NotBegun(why) | Outcome::Abandoned(why)) => {
            watcher.say.line(&format!("the bridge has ended, and the node's own kube-apiserver may not serve: {why}"));
            watcher.logs();
            again
        }
        Seen::There(status) => {
            watcher.stays(&status);
            again
        }
        Seen::Interrupted => {
            watcher.say.line("interrupted: clients stay on the bridge, which goes on by itself");
            watcher.say.more("`berth bridge status` says how it is, `berth bridge end` ends it");
            again
        }
        Seen::Refused(_) | Seen::Gone => {
            if let Err(error) = told {
                tracing::debug!(%error, "the bridge was not told");
            }
            watcher.gone();
            again
        }
    })
}

/// Runs COMMAND with this process's terminal and output. SIGTERM and SIGHUP are passed on; SIGINT and SIGQUIT of a terminal
/// reach it anyway, and must not end this process.
async fn command(run: &[OsString]) -> std::io::Result<ExitStatus> {
    let Some((program, arguments)) = run.split_first() else { return Err(std::io::ErrorKind::InvalidInput.into()) };
    let listen = |kind| signal(kind);
    let (mut term, mut hup) = (listen(SignalKind::terminate())?, listen(SignalKind::hangup())?);
    let (mut int, mut quit) = (listen(SignalKind::interrupt())?, listen(SignalKind::quit())?);
    let mut child = tokio::process::Command::new(program).args(arguments).spawn()?;
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok());
    let pass = |signal| pid.map(|pid| kill(Pid::from_raw(pid), signal));
    loop {
        tokio::select! {
            status = child.wait() => return status,
            _ = term.recv() => drop(pass(Signal::SIGTERM)),
            _ = hup.recv() => drop(pass(Signal::SIGHUP)),
            _ = int.recv() => {}
            _ = quit.recv() => {}
        }
    }
}

/// As a shell says it.
fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(70);
    u8::try_from(code).unwrap_or(u8::MAX)
}

async fn end(args: &BridgeEndArgs) -> anyhow::Result<Exit> {
    let directory = &args.state_dir.state_dir;
    let mut watcher = Watcher::new(directory)?;
    let Ok(mut client) = Client::ask(directory, &Ask::End { now: args.now }).await else {
        return Ok(swept(args, directory).await);
    };
    Ok(match watcher.until(&mut client, stays).await {
        Seen::Over(Outcome::Abandoned(why)) if !args.now => {
            watcher.say.line(&format!("the bridge has ended, and the node's own kube-apiserver may not serve: {why}"));
            Exit::Again
        }
        Seen::Over(_) => Exit::Ok,
        Seen::There(status) => {
            watcher.stays(&status);
            Exit::Again
        }
        Seen::Refused(why) => {
            eprintln!("berth: {why}");
            Exit::Again
        }
        Seen::Gone => watcher.gone(),
        Seen::Interrupted => {
            watcher.say.line("interrupted: the bridge goes on ending by itself");
            Exit::Again
        }
    })
}

/// There is none here, but what one left in the cluster may be.
async fn swept(args: &BridgeEndArgs, directory: &Path) -> Exit {
    let kubeconfig = args.kubeconfig.as_deref().or_else(|| Some(Path::new(ADMIN)).filter(|path| path.exists()));
    let Some(kubeconfig) = kubeconfig else { return none(directory) };
    let left = match berth_cluster::Client::from_kubeconfig(kubeconfig) {
        Ok(client) => sweep(&client).await.map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    match left {
        Ok(left) if left.is_empty() => none(directory),
        Ok(left) => {
            let left = left.join(", ");
            println!("removed from the Service kubernetes what a bridge that was killed left there: {left}");
            Exit::Ok
        }
        Err(why) => {
            eprintln!(
                "berth: what a bridge that was killed may have left in the Service kubernetes was not looked for: {why}"
            );
            none(directory)
        }
    }
}

async fn status(args: &BridgeStatusArgs) -> anyhow::Result<Exit> {
    let directory = &args.state_dir.state_dir;
    let reply = match Client::ask(directory, &Ask::Status).await {
        Ok(mut client) => client.next().await,
        Err(_) => None,
    };
    let Some(Reply::Status(status)) = reply else { return Ok(none(directory)) };
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &status)?;
        let _ = writeln!(out);
        return Ok(Exit::Ok);
    }
    let Status { step, steering, temporary, own, connections_open, connections_steered, .. } = &*status;
    let ready = |ready: bool, probe: &str| if ready { "ready".to_owned() } else { format!("not ready: {probe}") };
    let to = if *steering { "the bridge" } else { "the node's own kube-apiserver" };
    let mut line = |name: &str, what: String| drop(writeln!(out, "{name:<16}{what}"));
    line("step", format!("{}{}", step.name(), if status.command { ", COMMAND runs" } else { "" }));
    line("new connections", format!("go to {to}"));
    line("connections", format!("{connections_open} open through the bridge, {connections_steered} were steered"));
    line("temporary", format!("{}, {}", temporary.address, ready(temporary.ready, &temporary.probe)));
    line("own", format!("{}, {}", own.address, ready(own.ready, &own.probe)));
    if let Some(trouble) = &status.trouble {
        line("trouble", trouble.clone());
    }
    for log in &status.logs {
        line("log", log.display().to_string());
    }
    Ok(Exit::Ok)
}

fn none(directory: &Path) -> Exit {
    unavailable(&format!(
        "there is no bridge in {} (--state-dir): begin one with `berth bridge start`",
        directory.display()
    ))
}

/// Clients stay on the bridge, and nothing changes that but the operator.
fn stays(status: &Status) -> bool {
    status.step == Step::Hold && !status.command && status.trouble.is_some()
}

/// What was waited for.
enum Seen {
    There(Box<Status>),
    Over(Outcome),
    Refused(String),
    /// The bridge has gone away without a word.
    Gone,
    Interrupted,
}

/// Tells what a bridge does.
struct Watcher {
    say: Say,
    directory: std::path::PathBuf,
    step: Option<Step>,
    term: Signals,
    int: Signals,
}

impl Watcher {
    fn new(directory: &Path) -> anyhow::Result<Self> {
        let (term, int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        Ok(Self { say: Say::default(), directory: directory.to_owned(), step: None, term, int })
    }

    /// Forgets the signals that were meant for COMMAND.
    fn listen_anew(&mut self) -> anyhow::Result<()> {
        (self.term, self.int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        Ok(())
    }

    async fn until(&mut self, client: &mut Client, there: impl Fn(&Status) -> bool) -> Seen {
        loop {
            let reply = tokio::select! {
                reply = client.next() => reply,
                _ = self.term.recv() => return Seen::Interrupted,
                _ = self.int.recv() => return Seen::Interrupted,
            };
            let status = match reply {
                Some(Reply::Status(status)) => status,
                Some(Reply::Refused(why)) => return Seen::Refused(why),
                None => return Seen::Gone,
            };
            self.tell(&status);
            if let Some(outcome) = status.outcome {
                return Seen::Over(outcome);
            }
            if there(&status) {
                return Seen::There(status);
            }
        }
    }

    fn tell(&mut self, status: &Status) {
        let Status { step, temporary, own, .. } = status;
        if status.outcome == Some(Outcome::Done) {
            self.say.line("done: the node's own kube-apiserver serves, and nothing of the bridge is left but its logs");
        }
        if status.outcome.is_some() || self.step.replace(*step) == Some(*step) {
            return;
        }
        self.say.line(&match step {
            Step::Start => format!("a temporary kube-apiserver starts on {}", temporary.address),
            Step::Settle => "it is ready, and is watched for a while (--settle)".to_owned(),
            Step::Overlap => "new connections go to it; handshakes that began before may end".to_owned(),
            Step::Hold => "the node's own kube-apiserver may be replaced now".to_owned(),
            Step::AwaitOwn => format!(
                "waiting until the node's own kube-apiserver is ready at {} for a while (--settle)",
                own.address
            ),
            Step::Linger => {
                "new connections go to the node's own again; handshakes that began before may end".to_owned()
            }
            Step::Drain => "the temporary one's connections end, then it does".to_owned(),
        });
    }

    fn stays(&self, status: &Status) {
        let trouble = status.trouble.as_deref().unwrap_or_default();
        self.say.line(&format!("{trouble}: clients stay on the bridge"));
        self.say.more(&format!("the node's own kube-apiserver: {}", status.own.probe));
        self.say.more("fix it, then `berth bridge end`; `berth bridge end --now` ends it without");
        self.logs();
    }

    fn gone(&self) -> Exit {
        self.say.line("the bridge has ended without a word; new connections go to who listens on the port itself");
        self.logs();
        Exit::Again
    }

    fn logs(&self) {
        self.say.more(&format!("logs are in {}", self.directory.display()));
    }
}
