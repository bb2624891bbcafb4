//! `berth exec`: give an apiserver its own address and become it.

use super::Exit;
use crate::cli::ExecArgs;
use crate::config::Listen;
use crate::instance::address;
use crate::instance::args::{self, Replaced, Rewritten, Wanted};
use crate::instance::{InstanceId, InstanceIdError};
use crate::registry::RunDir;
use crate::registry::instance::{Claimant, claim};
use anyhow::Context;
use std::convert::Infallible;
use std::ffi::OsString;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

pub(super) fn run(args: &ExecArgs) -> anyhow::Result<Exit> {
    let plan = match Plan::check(args) {
        Ok(plan) => plan,
        Err(mistakes) => {
            for mistake in mistakes {
                eprintln!("berth: {mistake}");
            }
            return Ok(Exit::Usage);
        }
    };
    match plan.carry_out() {
        Ok(never) => match never {},
        Err(error) => {
            eprintln!("berth: {error:#}");
            Ok(Exit::Unavailable)
        }
    }
}

/// A checked command line.
struct Plan {
    berth: SocketAddr,
    listen: Vec<SocketAddr>,
    instance: Option<InstanceId>,
    run_dir: PathBuf,
    argv: Vec<OsString>,
}

impl Plan {
    /// All that is wrong at once, each with its option and mend.
    fn check(args: &ExecArgs) -> Result<Self, Vec<String>> {
        let mut mistakes = Vec::new();
        let parsed = args.place.listen.iter().map(|text| text.parse::<Listen>());
        let listen: Vec<_> = parsed.filter_map(|parsed| note(parsed, &mut mistakes)).map(|l| l.addr).collect();
        // Of the addresses that could be read; the first of them names the berth only if all could.
        let berth = listen.first().copied();
        if mistakes.is_empty() {
            mistakes.extend(misplaced(&listen));
        }
        let parsed = args.place.instance.as_deref().map(InstanceId::parse).transpose();
        let parsed = parsed.map_err(|error: InstanceIdError| format!("--instance: {error}"));
        let instance = note(parsed, &mut mistakes).flatten();
        mistakes.extend(args::check(&args.command).iter().map(|error| format!("command after --: {error}")));
        match berth {
            Some(berth) if mistakes.is_empty() => Ok(Self {
                berth,
                listen,
                instance,
                run_dir: args.place.run_dir.run_dir.clone().unwrap_or_else(RunDir::default_path),
                argv: args.command.clone(),
            }),
            _ => Err(mistakes),
        }
    }

    /// Claims, rewrites and becomes the apiserver; comes back only if one of them fails.
    fn carry_out(self) -> anyhow::Result<Infallible> {
        let instance = self.instance.map_or_else(InstanceId::random, Ok)?;
        let advertise = args::advertised(&self.argv).unwrap_or(self.berth.ip());
        let port = self.berth.port();
        let berth = RunDir::open(&self.run_dir)?.berth(self.berth)?;
        let claimant = Claimant { instance: &instance, advertise, pid: Some(std::process::id()) };
        let claim = claim(&berth, &claimant, |previous, taken| {
            address::choose(port, previous, &[taken, &self.listen].concat())
        })?;

        let address = claim.record().address;
        // A record's address is always in 127.0.0.0/8; this is for the type.
        let IpAddr::V4(ip) = address.ip() else { anyhow::bail!("{address} is no IPv4 address") };
        let wanted = Wanted { address: ip, port, advertise: self.berth.ip(), instance: &instance };
        let rewritten = args::rewrite(&self.argv, &wanted)?;
        tell(&instance, address, advertise, &rewritten);

        let Some((program, arguments)) = rewritten.argv.split_first() else { anyhow::bail!("there is no command") };
        let kept = claim.keep_through_exec()?;
        // The signal mask and what is ignored pass through as they are, but for SIGPIPE: Rust's runtime
        // ignores it from the start, and `exec` sets it back to its default.
        let error = Command::new(program).args(arguments).exec();
        kept.remove();
        let mend = mend(&error);
        Err(error).with_context(|| format!("cannot run {}{mend}", program.display()))
    }
}

fn note<T, E: ToString>(result: Result<T, E>, mistakes: &mut Vec<String>) -> Option<T> {
    result.map_err(|error| mistakes.push(error.to_string())).ok()
}

/// Addresses that can be read and will not do for an apiserver.
fn misplaced(listen: &[SocketAddr]) -> Vec<String> {
    let Some(berth) = listen.first() else { return Vec::new() };
    let mut mistakes = Vec::new();
    for address in listen {
        if address.port() == 0 {
            mistakes
                .push(format!("--listen {address}: an apiserver needs a port that is known: give one, such as 6443"));
        } else if address.ip().is_unspecified() && address == berth {
            mistakes.push(format!(
                "--listen {address}: the first address names the berth and is advertised, so it cannot be a \
                 wildcard: give the node's own first, such as 10.0.0.5:{}",
                address.port()
            ));
        } else if address.ip().is_unspecified() && address.port() == berth.port() {
            mistakes.push(format!(
                "--listen {address}: a wildcard listener clashes with the apiserver's own 127.x address on port {}: \
                 list the addresses instead, or give the berth another port (--listen {} --listen {address})",
                address.port(),
                SocketAddr::new(berth.ip(), if berth.port() == 7443 { 8443 } else { 7443 })
            ));
        }
    }
    mistakes
}

fn tell(instance: &InstanceId, address: SocketAddr, advertise: IpAddr, rewritten: &Rewritten) {
    for Replaced { flag, was, now } in &rewritten.replaced {
        let was = was.display();
        match now {
            Some(now) => tracing::info!(flag, %was, now, "argument replaced"),
            None => tracing::info!(flag, %was, "repeated argument removed"),
        }
    }
    match &rewritten.kept_advertise {
        Some(kept) if kept.to_str().is_none_or(|kept| kept.trim().parse::<IpAddr>().is_err()) => tracing::warn!(
            kept = %kept.display(),
            "--advertise-address is kept and is no IP address: leave it out and berth sets it"
        ),
        Some(_) => tracing::info!(%advertise, "--advertise-address kept"),
        None => {}
    }
    let program = rewritten.argv.first().map(|program| program.display());
    tracing::info!(%instance, %address, %advertise, program = program.map(tracing::field::display), "becoming the apiserver");
}

fn mend(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => " (is it in this container, and in PATH? Else give its full path after --)",
        io::ErrorKind::PermissionDenied => {
            " (is it a file that this uid may execute, on a file system not mounted noexec, and may it search all of PATH?)"
        }
        _ => "",
    }
}
