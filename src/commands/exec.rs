//! Runs `berth exec`, which gives an apiserver its own address and then becomes the apiserver, or
//! stays as its supervisor.

use super::{Exit, unavailable_error, usage_error};
use anyhow::Context;
use berth_exec::address;
use berth_exec::args::{self, ReplacedValue, RewrittenCommand, WantedValues};
use berth_node::instance_id::InstanceId;
use berth_node::ipc::{self, SocketFile};
use berth_node::registry::instance::{Claimant, claim};
use berth_node::registry::{BerthDir, RunDir};
use berth_options::check;
use berth_options::exec::ExecArgs;
use berth_os::explained;
use berth_os::process::{continue_as_child, end_on_signals, exit_like};
use berth_shim::config::{PassMode, Place};
use berth_supervisor::{Config, Supervisor, self_test};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::Command;

pub(super) fn run(args: &ExecArgs) -> anyhow::Result<Exit> {
    let place = check::check_exec(args).map_err(usage_error)?;
    end_on_signals().context("cannot handle signals")?;
    rewrite_and_exec(place, args).map_err(|error| unavailable_error(format!("{error:#}")))
}

/// Claims an address, rewrites the apiserver's arguments, and becomes the apiserver or its
/// supervisor.
fn rewrite_and_exec(place: Place, args: &ExecArgs) -> anyhow::Result<Exit> {
    let argv = &args.command;
    let listen: Vec<_> = place.addresses().collect();
    let (public, port) = (place.berth_address().ip(), place.berth_address().port());
    let berth = RunDir::open(&place.run_dir)?.berth(place.berth_address())?;
    let instance = place.instance.map_or_else(InstanceId::random, Ok)?;
    let advertise = args::advertise_address(argv).unwrap_or(public);
    let supervising = (args.pass != PassMode::Relay).then(|| listen_for_shims(&berth, &instance));
    match (&supervising, args.pass) {
        (Some(Err(why)), PassMode::Inject) => anyhow::bail!("--pass inject: {why}"),
        (Some(Err(why)), _) => tracing::info!("--pass auto: clients will be relayed: {why}"),
        _ => {}
    }
    if args.stay && !matches!(supervising, Some(Ok(_))) {
        continue_as_child().context("cannot start the process that becomes the apiserver")?;
    }
    let supervisor = supervising
        .as_ref()
        .map(|prepared| prepared.as_ref().map(|_| ()).map_err(Clone::clone));
    let claimant = Claimant {
        instance: &instance,
        advertise,
        supervisor,
        pid: Some(std::process::id()),
    };
    let claim = claim(&berth, &claimant, |previous, taken| {
        Ok(address::choose_address(
            port,
            previous,
            &[taken, &listen].concat(),
        )?)
    })?;

    let address = claim.record().address;
    // A record's address is always in 127.0.0.0/8, so this is always an IPv4 address.
    let IpAddr::V4(ip) = address.ip() else {
        anyhow::bail!("{address} is no IPv4 address")
    };
    let wanted = WantedValues {
        address: ip,
        port,
        advertise: public,
        instance: &instance,
    };
    let rewritten = args::rewrite_command(argv, &wanted)?;
    log_changes(&instance, address, advertise, &rewritten);

    let Some((program, arguments)) = rewritten.argv.split_first() else {
        anyhow::bail!("there is no command")
    };
    let mut command = Command::new(program);
    command.args(arguments);
    // The apiserver inherits the signal mask and the ignored signals of this process. SIGPIPE is an
    // exception: Rust's runtime ignores it, and `exec` restores its default.
    let error = match supervising {
        Some(Ok((shims, file))) => {
            let run = || {
                claim
                    .keep_through_exec(|| command.exec())
                    .unwrap_or_else(io::Error::other)
            };
            match Supervisor::start(
                Config {
                    instance,
                    address,
                    shims,
                    once: args.stay,
                },
                run,
            ) {
                Ok(supervisor) => {
                    let status = supervisor.run()?;
                    drop(file);
                    exit_like(status)
                }
                Err(error) => error,
            }
        }
        _ => claim.keep_through_exec(|| command.exec())?,
    };
    let fix = suggest_fix(&error);
    Err(error).with_context(|| format!("cannot run {}{fix}", program.display()))
}

/// Checks that clients' sockets can be passed to a child, and makes the socket on which shims
/// connect to the supervisor.
///
/// # Errors
/// The obstacle and its fix.
fn listen_for_shims(
    berth: &BerthDir,
    instance: &InstanceId,
) -> Result<(OwnedFd, SocketFile), String> {
    self_test().map_err(|obstacle| obstacle.to_string())?;
    let path = berth
        .supervisor_path(instance)
        .map_err(|error| error.to_string())?;
    ipc::listen_at(&path).map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => format!(
            "instance {instance} is already running ({} answers)",
            path.display()
        ),
        _ => format!(
            "cannot listen on {}: {error}: check that the file system is neither full nor read-only",
            path.display()
        ),
    })
}

fn log_changes(
    instance: &InstanceId,
    address: SocketAddr,
    advertise: IpAddr,
    rewritten: &RewrittenCommand,
) {
    for ReplacedValue { flag, was, now } in &rewritten.replaced {
        tracing::info!(flag, was = %was.display(), now, "argument replaced");
    }
    match &rewritten.kept_advertise {
        Some(kept)
            if kept
                .to_str()
                .is_none_or(|kept| kept.trim().parse::<IpAddr>().is_err()) =>
        {
            tracing::warn!(
                code = %explained::ADVERTISE_ADDRESS,
                kept = %kept.display(),
                "--advertise-address is kept and is no IP address: leave the flag out and berth sets the address"
            );
        }
        Some(_) => tracing::info!(%advertise, "--advertise-address kept"),
        None => {}
    }
    let program = rewritten.argv.first().map(|program| program.display());
    tracing::info!(%instance, %address, %advertise, program = program.map(tracing::field::display), "becoming the apiserver");
}

fn suggest_fix(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => {
            " (check that the program is in this container and in PATH, or give its full path after --)"
        }
        io::ErrorKind::PermissionDenied => {
            " (check that this uid may execute the file and search all of PATH, and that the file system is not mounted noexec)"
        }
        _ => "",
    }
}
