//! Runs `berth run`: a shim in this process, and `berth exec` as its child.
//!
//! The child does not become the apiserver, but stays as its parent. This process has several
//! threads: if it dies, the kernel signals the child once for each thread, and kube-apiserver would
//! exit at once on a second SIGTERM.
//!
//! The child gets SIGTERM when the shim has left the group and every client that sent something has
//! its first byte, so that no connection begins at an apiserver that is stopping. Then the shim
//! drains, and `berth run` ends with the child's exit status.

use super::serve::{Signals, build_shim};
use super::{Exit, block_on, exit_code, unavailable_error, usage_error};
use berth_options::check;
use berth_options::log::LogArgs;
use berth_options::shim::RunArgs;
use berth_os::explained;
use berth_os::process::{KILL_CHILD, die_with_parent};
use berth_shim::app::Bound;
use berth_shim::state::Stop;
use clap::ValueEnum;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::process::ExitStatus;
use tokio::process::Child;
use tokio::sync::watch;

pub(super) fn run(args: &RunArgs, log: &LogArgs) -> anyhow::Result<Exit> {
    let config = check::check_run(args).map_err(usage_error)?;
    args.shim.speedup.speed_up_process();
    block_on(async {
        let mut signals = Signals::new()?;
        let bound = build_shim(config, &mut signals).await?;
        let child = start_exec(&bound, args, log);
        let mut child = child
            .map_err(|error| unavailable_error(format!("cannot start `berth exec`: {error}")))?;
        let status = supervise(bound, &mut child, &mut signals).await?;
        Ok(Exit::Child(exit_code(status)))
    })?
}

/// Starts `berth exec` for the same berth, instance and command. The child has its own process
/// group, so a Ctrl-C on a terminal does not reach it: this process passes it on, once, as SIGTERM.
fn start_exec(bound: &Bound, args: &RunArgs, log: &LogArgs) -> std::io::Result<Child> {
    let mut command = std::process::Command::new("/proc/self/exe");
    command.arg0("berth").args(["exec", "--stay"]);
    for listen in &args.place.listen {
        command.arg("--listen").arg(listen);
    }
    command
        .arg("--instance")
        .arg(bound.instance().as_str())
        .arg("--run-dir")
        .arg(bound.run_dir());
    for (option, value) in [
        ("--log-format", log.log_format.to_possible_value()),
        ("--log-level", log.log_level.to_possible_value()),
    ] {
        command.args(
            value
                .map(|value| [OsStr::new(option).to_owned(), value.get_name().into()])
                .into_iter()
                .flatten(),
        );
    }
    command
        .args(["--pass", args.shim.pass.as_str()])
        .arg("--")
        .args(&args.command)
        .process_group(0);
    die_with_parent(&mut command, Signal::SIGTERM);
    tokio::process::Command::from(command).spawn()
}

/// Serves clients until the child has ended and the shim has drained its connections.
async fn supervise(
    bound: Bound,
    child: &mut Child,
    signals: &mut Signals,
) -> anyhow::Result<ExitStatus> {
    let instance = bound.instance().clone();
    let mut answered = bound.first_byte_wait();
    let (stop, stopped) = watch::channel(Stop::No);
    let serving = bound.run(stopped);
    tokio::pin!(serving);
    let mut drained = false;
    let mut terminated = false;
    let mut ended: Option<ExitStatus> = None;
    loop {
        if let (Some(status), true) = (ended, drained) {
            return Ok(status);
        }
        tokio::select! {
            _ = &mut serving, if !drained => {
                drained = true;
                // Kill the child only now that the shim has ended: a connected client would take
                // the child's end for the end of a response.
                if *stop.borrow() == Stop::Now {
                    signal_child(child, Signal::SIGKILL);
                }
            }
            status = child.wait(), if ended.is_none() => {
                let status = status?;
                ended = Some(status);
                if terminated {
                    tracing::info!(%instance, %status, "the apiserver ended");
                } else {
                    tracing::error!(
                        code = %explained::APISERVER_ENDED,
                        %instance,
                        %status,
                        "the apiserver ended by itself; the reason is in its own log"
                    );
                }
                stop.send_modify(|stop| *stop = (*stop).max(Stop::Drain));
            }
            // Wait only if the shim stops. A shim also leaves the group while its apiserver fails
            // probes and a sibling is joined, but that is no reason to end the apiserver.
            () = answered.wait_until_stoppable(),
                if !terminated && ended.is_none() && *stop.borrow() >= Stop::Drain =>
            {
                terminated = true;
                signal_child(child, Signal::SIGTERM);
            }
            () = signals.next() => {
                stop.send_modify(Signals::escalate_stop);
                if drained && *stop.borrow() == Stop::Now {
                    signal_child(child, Signal::SIGKILL);
                }
            }
        }
    }
}

fn signal_child(child: &Child, signal: Signal) {
    // If the child has ended and was waited for, it has no ID any more.
    let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()) else {
        return;
    };
    let sent = if signal == Signal::SIGKILL {
        KILL_CHILD
    } else {
        signal
    };
    match kill(Pid::from_raw(pid), sent) {
        Ok(()) => tracing::info!(%signal, "signal passed on to the apiserver"),
        Err(error) => {
            tracing::warn!(
                code = %explained::APISERVER_NOT_SIGNALLED,
                pid,
                %signal,
                %error,
                "cannot signal the apiserver"
            );
        }
    }
}
